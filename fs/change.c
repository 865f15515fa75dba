/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Changing a version's size and holes. Nobody writes meanwhile: the version is entered exclusively.
 * Its chunks may still be written early and punched, so that what is changed can be brought into
 * DRAM: each slot is waited for.
 */
#include "fs/core_internal.h"

#include <fcntl.h>

static const uint8_t zeros[KV_BLOCK_SIZE];

struct kv_slot *kv_slot_when_free(struct kv_version *version, uint32_t number)
{
	for (;;) {
		struct kv_slot *slot = kv_slot_find(version, number);

		if (!slot || !(slot->flags & (KV_SLOT_BUSY | KV_SLOT_WRITEBACK)))
			return slot;
		kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
	}
}

/* Lock held. The slot's blocks are given up, BASE_BLOCKS being those of the base. Returns its DRAM
 * bytes. */
static uint64_t forget_slot(struct kv_version *version, struct kv_slot *slot, unsigned base_blocks)
{
	struct kv_core *core = version->file->core;
	uint64_t bytes = (uint64_t)slot->charge << KV_BLOCK_SHIFT;
	struct kv_bits bits;

	assert(!(slot->flags & KV_SLOT_WRITEBACK));
	kv_slot_bits(slot, &bits);
	unsigned count = kv_bits_count(&bits);
	if (slot->state == KV_CHUNK_DIRTY) {
		version->dirty -= count;
		kv_core_dirty_sub(core, count);
		if (!(slot->flags & KV_SLOT_LOST)) {
			version->reserved -= count;
			kv_space_unreserve(core->space, count);
		}
	} else if (slot->flags & KV_SLOT_FRESH) {
		kv_space_cancel(core->space, kv_slot_extents(slot), slot->extent_count);
	}
	version->blocks -= slot->state == KV_CHUNK_BASE ? base_blocks : count;
	version->charged -= slot->charge;
	kv_slot_clear_extents(slot);
	slot->charge = 0;
	slot->flags = 0;
	slot->state = KV_CHUNK_HOLE;
	return bytes;
}

int kv_chunk_drop(struct kv_version *version, uint32_t number)
{
	struct kv_core *core = version->file->core;
	struct kv_bits base = {0};
	struct kv_slot *slot;
	uint64_t bytes = 0;
	int r = 0;

	(void)pthread_mutex_lock(&version->lock);
	slot = kv_slot_when_free(version, number);
	enum kv_chunk_state state = kv_slot_state(version, number);
	(void)pthread_mutex_unlock(&version->lock);
	if (!slot && state == KV_CHUNK_HOLE)
		return 0;
	if (state == KV_CHUNK_BASE)
		r = kv_chunk_bits(version, number, &base);
	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		(void)kv_slot_when_free(version, number);
		r = kv_slot_get(version, number, &slot);
		if (r == 0 && slot->charge > 0)
			r = kv_object_punch(
				version->object, (uint64_t)number << KV_CHUNK_SHIFT, KV_CHUNK_SIZE);
		if (r == 0)
			bytes = forget_slot(version, slot, kv_bits_count(&base));
	}
	kv_core_uncharge(core, bytes);
	return r;
}

/* The base's chunks from FIRST on are not the version's any more; those with a slot of their own
 * were dropped. */
static int drop_base_from(struct kv_version *version, uint32_t first)
{
	uint32_t end = version->base_chunks;
	uint64_t blocks = 0;
	int r = 0;

	if (first >= end)
		return 0;
	/* Count the smaller part. */
	bool count_kept = first < end - first;
	if (!count_kept)
		r = kv_chunks_count(version, first, end, &blocks);
	else if (first > 0)
		r = kv_chunks_count(version, 0, first, &blocks);
	if (r < 0)
		return r;
	KV_LOCKED(&version->lock);
	version->blocks = count_kept ? blocks : version->blocks - blocks;
	version->base_chunks = first;
	return 0;
}

int kv_chunks_drop_from(struct kv_version *version, uint32_t first)
{
	struct kv_segment key = {.number = first / KV_SEGMENT_CHUNKS};

	for (;;) {
		struct kv_segment *segment;
		uint32_t number, capacity;

		(void)pthread_mutex_lock(&version->lock);
		segment = RB_NFIND(kv_segment_tree, &version->segments, &key);
		number = segment ? segment->number : 0;
		capacity = segment ? segment->capacity : 0;
		(void)pthread_mutex_unlock(&version->lock);
		if (!segment)
			break;
		for (uint32_t i = 0; i < capacity; i++) {
			uint32_t chunk = number * KV_SEGMENT_CHUNKS + i;
			int r = chunk < first ? 0 : kv_chunk_drop(version, chunk);

			if (r < 0)
				return r;
		}
		key.number = number + 1;
	}
	return drop_base_from(version, first);
}

/* Lock held. The blocks of a DIRTY chunk that are not in BITS any more are given up. */
static int keep_bits(struct kv_version *version, struct kv_slot *slot, const struct kv_bits *bits)
{
	struct kv_core *core = version->file->core;
	struct kv_bits before;

	assert(slot->state == KV_CHUNK_DIRTY && !(slot->flags & KV_SLOT_WRITEBACK));
	kv_slot_bits(slot, &before);
	unsigned gone = kv_bits_count(&before) - kv_bits_count(bits);
	int r = kv_slot_set_bits(slot, bits);
	if (r < 0)
		return r;
	version->blocks -= gone;
	version->dirty -= gone;
	version->reserved -= gone;
	kv_space_unreserve(core->space, gone);
	kv_core_dirty_sub(core, gone);
	return 0;
}

/* Writes zeros over [FROM, TO) of a chunk's pages. */
static int zero_pages(struct kv_version *version, uint32_t chunk, uint32_t from, uint32_t to)
{
	uint64_t start = (uint64_t)chunk << KV_CHUNK_SHIFT;
	int r = 0;

	while (from < to && r == 0) {
		uint32_t part = KV_BLOCK_SIZE - from % KV_BLOCK_SIZE;

		part = (uint32_t)kv_min_u64(part, to - from);
		r = kv_object_write(version->object, zeros, part, start + from);
		from += part;
	}
	return r;
}

/* Lock held, the chunk DIRTY and free. */
static int punch_dirty(struct kv_version *version, struct kv_slot *slot, const struct kv_span *span)
{
	unsigned first = (unsigned)kv_div_round_up(span->from, KV_BLOCK_SIZE);
	unsigned end = span->to >> KV_BLOCK_SHIFT;
	/* Pages stay, as zeros: the object has no holes inside its charged blocks. */
	uint32_t to = (uint32_t)kv_min_u64(span->to, (uint64_t)slot->charge << KV_BLOCK_SHIFT);
	struct kv_bits bits;
	int r = zero_pages(version, span->chunk, span->from, to);

	if (r < 0)
		return r;
	kv_slot_bits(slot, &bits);
	if (first < end)
		kv_bits_clear(&bits, first, end);
	return keep_bits(version, slot, &bits);
}

int kv_writer_punch(struct kv_writer *writer, const struct kv_span *span)
{
	struct kv_version *version = writer->version;
	unsigned first = span->from >> KV_BLOCK_SHIFT;
	unsigned end = (unsigned)kv_div_round_up(span->to, KV_BLOCK_SIZE);
	struct kv_bits bits;
	int r;

	if (span->from == 0 && span->to == KV_CHUNK_SIZE)
		return kv_chunk_drop(version, span->chunk);
	r = kv_chunk_bits(version, span->chunk, &bits);
	if (r < 0 || kv_bits_next(&bits, first, true) >= end)
		return r;
	for (;;) {
		r = kv_writer_own(writer, span->chunk);
		if (r < 0)
			return r;
		KV_LOCKED(&version->lock);
		struct kv_slot *slot = kv_slot_when_free(version, span->chunk);
		if (slot && slot->state == KV_CHUNK_DIRTY)
			return punch_dirty(version, slot, span);
		if (!slot || slot->state == KV_CHUNK_HOLE)
			return 0;
		/* It was written early in between. */
	}
}

/* ---- Truncating ---- */

/* Lock held. Cuts the object at SIZE, so that it reads as zeros behind it; the boundary chunk's
 * other pages are free. */
static int cut_object(struct kv_version *version, uint64_t size, uint64_t *ret_bytes)
{
	uint32_t number = (uint32_t)(size >> KV_CHUNK_SHIFT);
	unsigned used = kv_chunk_used(size, number);
	struct kv_slot *slot = kv_slot_find(version, number);
	int r;

	*ret_bytes = 0;
	if (!version->object || version->object_size <= size)
		return 0;
	r = kv_object_resize(version->object, size);
	if (r < 0)
		return r;
	version->object_size = size;
	if (slot && slot->charge > used) {
		*ret_bytes = (uint64_t)(slot->charge - used) << KV_BLOCK_SHIFT;
		version->charged -= slot->charge - used;
		slot->charge = used & 511;
	}
	return 0;
}

static int shrink(struct kv_writer *writer, uint64_t size)
{
	struct kv_version *version = writer->version;
	uint32_t number = (uint32_t)(size >> KV_CHUNK_SHIFT);
	uint32_t from = (uint32_t)(size & (KV_CHUNK_SIZE - 1));
	const struct kv_span tail = {.chunk = number, .from = from, .to = KV_CHUNK_SIZE};
	uint64_t bytes;
	int r;

	r = kv_chunks_drop_from(version, from > 0 ? number + 1 : number);
	if (r == 0 && from > 0)
		r = kv_writer_punch(writer, &tail);
	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		/* A chunk that keeps its extents may be resident whole: its pages stay as they are.
		 */
		const struct kv_slot *slot = kv_slot_when_free(version, number);
		if (slot && slot->state == KV_CHUNK_HOT)
			return 0;
		r = cut_object(version, size, &bytes);
	}
	if (r == 0)
		kv_core_uncharge(version->file->core, bytes);
	return r;
}

static void changed(struct kv_version *version)
{
	int64_t now_ns = kv_core_now_ns(version->file->core);
	KV_LOCKED(&version->lock);

	version->changed = true;
	version->mtime_ns = version->ctime_ns = now_ns;
	version->mtime_set = version->ctime_set = false;
}

int kv_version_truncate(struct kv_version *version, uint64_t size)
{
	struct kv_writer writer = {.version = version};
	int r;

	if (size > KV_FILE_SIZE_MAX)
		return -EFBIG;
	r = kv_version_enter_exclusive(version);
	if (r < 0)
		return r;
	(void)pthread_mutex_lock(&version->lock);
	uint64_t before = version->size;
	(void)pthread_mutex_unlock(&version->lock);
	r = size < before ? shrink(&writer, size) : 0;
	kv_writer_done(&writer);
	if (r == 0) {
		(void)pthread_mutex_lock(&version->lock);
		version->size = size;
		(void)pthread_mutex_unlock(&version->lock);
		changed(version);
	}
	kv_version_leave_exclusive(version);
	return r;
}

/* ---- Allocating and punching ---- */

static int punch(struct kv_version *version, uint64_t offset, uint64_t length)
{
	struct kv_writer writer = {.version = version};
	uint64_t end = offset + length;
	uint32_t last = (uint32_t)((end - 1) >> KV_CHUNK_SHIFT);
	int r;

	r = kv_version_enter_exclusive(version);
	if (r < 0)
		return r;
	for (uint64_t at = offset; at < end && r == 0;) {
		uint32_t number = (uint32_t)(at >> KV_CHUNK_SHIFT), next;

		r = kv_chunks_next(version, number, last + 1, &next);
		if (r < 0 || next > last)
			break;
		if (next > number)
			at = (uint64_t)next << KV_CHUNK_SHIFT;
		const struct kv_span span = kv_span_at(at, end - at);
		r = kv_writer_punch(&writer, &span);
		at += span.to - span.from;
	}
	kv_writer_done(&writer);
	if (r == 0)
		changed(version);
	kv_version_leave_exclusive(version);
	return r;
}

static int allocate(struct kv_version *version, bool keep_size, uint64_t offset, uint64_t length)
{
	struct kv_writer writer = {.version = version};
	uint64_t end = offset + length;
	int r;

	r = kv_version_enter(version);
	if (r < 0)
		return r;
	r = kv_writer_promise(&writer, offset, length);
	for (uint64_t at = offset; at < end && r == 0;) {
		const struct kv_span span = kv_span_at(at, end - at);

		kv_core_throttle(version->file->core);
		r = kv_writer_span(&writer, &span, NULL);
		at += span.to - span.from;
		KV_LOCKED(&version->lock);
		if (r == 0 && !keep_size)
			version->size = kv_max_u64(version->size, at);
	}
	kv_writer_done(&writer);
	if (r == 0)
		changed(version);
	kv_version_leave(version);
	return r;
}

int kv_version_allocate(struct kv_version *version, int mode, uint64_t offset, uint64_t length)
{
	bool keep_size = mode & FALLOC_FL_KEEP_SIZE;
	int r;

	if (length == 0)
		return -EINVAL;
	if (offset > KV_FILE_SIZE_MAX || length > KV_FILE_SIZE_MAX - offset)
		return -EFBIG;
	switch (mode & ~FALLOC_FL_KEEP_SIZE) {
	case 0:
		return allocate(version, keep_size, offset, length);
	case FALLOC_FL_PUNCH_HOLE:
		return keep_size ? punch(version, offset, length) : -EOPNOTSUPP;
	case FALLOC_FL_ZERO_RANGE:
		r = punch(version, offset, length);
		return r < 0 ? r : allocate(version, keep_size, offset, length);
	default:
		return -EOPNOTSUPP;
	}
}
