/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Changing a version's size and holes. Nobody writes meanwhile: the version is entered exclusively.
 * Its chunks may still be written early and punched, so that what is changed can be brought into
 * DRAM: each slot is waited for.
 */
#include "fs/charge_internal.h"
#include "fs/write_internal.h"

#include <fcntl.h>

static const uint8_t zeros[KV_BLOCK_SIZE];

int kv_slot_when_free(struct kv_version *version, uint32_t number, struct kv_slot **ret_slot)
{
	int64_t since_ms = kv_monotonic_ms();

	for (;;) {
		struct kv_slot *slot = kv_slot_find(version, number);

		if (!slot || !(slot->flags & (KV_SLOT_BUSY | KV_SLOT_WRITEBACK))) {
			*ret_slot = slot;
			return 0;
		}
		if (kv_core_gives_up(version->file->core, since_ms))
			return -EIO;
		kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
	}
}

/* Lock held. True if the blocks of the slot have space that is not the version's own. */
static bool is_borrowed(const struct kv_slot *slot)
{
	return slot->state == KV_CHUNK_BASE ||
	       (slot->state != KV_CHUNK_DIRTY && !(slot->flags & KV_SLOT_FRESH));
}

/* Lock held. The slot's blocks BITS are given up. Returns its DRAM bytes. */
static uint64_t forget_slot(
	struct kv_writer *writer, uint32_t number, struct kv_slot *slot, const struct kv_bits *bits)
{
	struct kv_version *version = writer->version;
	uint64_t bytes = (uint64_t)slot->charge << KV_BLOCK_SHIFT;
	unsigned count = kv_bits_count(bits);

	assert(!(slot->flags & KV_SLOT_WRITEBACK));
	if (is_borrowed(slot)) {
		/* They stay allocated on space of the version's own. */
		unsigned kept = kv_promise_covers(version, number, bits);

		assert(writer->promised >= kept);
		writer->promised -= kept;
		kv_promise_keep(version, kept);
	} else if (slot->state == KV_CHUNK_DIRTY) {
		kv_charge_clean_locked(version, count);
		if (!(slot->flags & KV_SLOT_LOST))
			kv_promise_return(version, number, bits);
	} else {
		kv_promise_cancel(version, number, slot);
	}
	version->blocks -= count;
	(void)kv_slot_forget_pages(version, slot);
	kv_slot_clear_extents(slot);
	slot->flags = 0;
	slot->state = KV_CHUNK_HOLE;
	return bytes;
}

int kv_chunk_drop(struct kv_writer *writer, uint32_t number)
{
	struct kv_version *version = writer->version;
	struct kv_bits bits = {0};
	struct kv_slot *slot = NULL;
	uint64_t bytes = 0;
	unsigned kept = 0;
	int r;

	(void)pthread_mutex_lock(&version->lock);
	r = kv_slot_when_free(version, number, &slot);
	enum kv_chunk_state state = kv_slot_state(version, number);
	bool borrowed = !slot || is_borrowed(slot);
	if (slot)
		kv_slot_bits(slot, &bits);
	(void)pthread_mutex_unlock(&version->lock);
	if (r < 0 || (!slot && state == KV_CHUNK_HOLE))
		return r;
	if (state == KV_CHUNK_BASE)
		r = kv_chunk_bits(version, number, &bits);
	if (r == 0 && borrowed) {
		KV_LOCKED(&version->lock);
		kept = kv_promise_covers(version, number, &bits);
	}
	if (r == 0)
		r = kv_writer_promise_more(writer, kept);
	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		r = kv_slot_when_free(version, number, &slot);
		if (r == 0)
			r = kv_slot_get(version, number, &slot);
		if (r == 0 && slot->charge > 0)
			r = kv_object_punch(
				version->object, (uint64_t)number << KV_CHUNK_SHIFT, KV_CHUNK_SIZE);
		if (r == 0)
			bytes = forget_slot(writer, number, slot, &bits);
	}
	kv_core_uncharge(version->file->core, bytes);
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

int kv_chunks_drop_from(struct kv_writer *writer, uint32_t first)
{
	struct kv_version *version = writer->version;
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
			int r = chunk < first ? 0 : kv_chunk_drop(writer, chunk);

			if (r < 0)
				return r;
		}
		key.number = number + 1;
	}
	return drop_base_from(version, first);
}

int kv_slot_clear_blocks(struct kv_version *version, uint32_t number, unsigned first, unsigned end)
{
	struct kv_slot *slot = kv_slot_find(version, number);
	struct kv_bits bits, gone;

	assert(slot->state == KV_CHUNK_DIRTY && !(slot->flags & KV_SLOT_WRITEBACK));
	kv_slot_bits(slot, &gone);
	bits = gone;
	kv_bits_clear(&bits, first, end);
	for (unsigned i = 0; i < KV_CHUNK_BLOCKS / 64; i++)
		gone.word[i] &= ~bits.word[i];
	unsigned count = kv_bits_count(&gone);
	int r = count > 0 ? kv_chunk_free_pages(version, number, slot, &gone) : 0;
	if (r == 0 && count > 0)
		r = kv_slot_set_bits(slot, &bits);
	if (r < 0 || count == 0)
		return r;
	version->blocks -= count;
	kv_charge_clean_locked(version, count);
	kv_promise_return(version, number, &gone);
	return 0;
}

/* Writes zeros over [SPAN) where the chunk has pages. */
static int zero_pages(
	struct kv_version *version, const struct kv_span *span, const struct kv_bits *pages)
{
	uint64_t start = (uint64_t)span->chunk << KV_CHUNK_SHIFT;
	int r = 0;

	for (uint32_t from = span->from, part; from < span->to && r == 0; from += part) {
		unsigned block = from >> KV_BLOCK_SHIFT;

		part = (uint32_t)kv_min_u64(KV_BLOCK_SIZE - from % KV_BLOCK_SIZE, span->to - from);
		if (kv_bits_next(pages, block, true) == block)
			r = kv_object_write(version->object, zeros, part, start + from);
	}
	return r;
}

/* Lock held, the chunk DIRTY and free. */
static int punch_dirty(struct kv_version *version, struct kv_slot *slot, const struct kv_span *span)
{
	unsigned first = (unsigned)kv_div_round_up(span->from, KV_BLOCK_SIZE);
	unsigned end = span->to >> KV_BLOCK_SHIFT;
	struct kv_bits pages;
	int r;

	/* First its pages stay, as zeros: only a sparse chunk may lack some of them. */
	kv_slot_pages(slot, &pages);
	r = zero_pages(version, span, &pages);
	if (r < 0 || first >= end)
		return r;
	return kv_slot_clear_blocks(version, span->chunk, first, end);
}

int kv_writer_punch(struct kv_writer *writer, const struct kv_span *span)
{
	struct kv_version *version = writer->version;
	unsigned first = span->from >> KV_BLOCK_SHIFT;
	unsigned end = (unsigned)kv_div_round_up(span->to, KV_BLOCK_SIZE);
	struct kv_bits bits;
	int r;

	if (span->from == 0 && span->to == KV_CHUNK_SIZE)
		return kv_chunk_drop(writer, span->chunk);
	r = kv_chunk_bits(version, span->chunk, &bits);
	if (r < 0 || kv_bits_next(&bits, first, true) >= end)
		return r;
	for (;;) {
		r = kv_writer_own(writer, span->chunk);
		if (r < 0)
			return r;
		KV_LOCKED(&version->lock);
		struct kv_slot *slot;
		r = kv_slot_when_free(version, span->chunk, &slot);
		if (r < 0)
			return r;
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

	r = kv_chunks_drop_from(writer, from > 0 ? number + 1 : number);
	if (r == 0 && from > 0)
		r = kv_writer_punch(writer, &tail);
	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		/* A chunk that keeps its extents may be resident whole: its pages stay as they are.
		 */
		struct kv_slot *slot;
		r = kv_slot_when_free(version, number, &slot);
		if (r < 0)
			return r;
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
	kv_unsettled_changed(version);
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
	/* What is allocated behind the end goes too, as on ext4 and XFS. */
	if (size <= before)
		r = kv_promise_drop(version, kv_div_round_up(size, KV_BLOCK_SIZE), UINT64_MAX);
	if (r == 0 && size < before)
		r = shrink(&writer, size);
	kv_writer_done(&writer);
	if (r == 0) {
		(void)pthread_mutex_lock(&version->lock);
		/* Who cuts what did not fit has seen to it. */
		version->quota.refused = false;
		version->size = size;
		(void)pthread_mutex_unlock(&version->lock);
		changed(version);
	}
	kv_version_leave_exclusive(version);
	return r;
}

/* ---- Allocating and punching ---- */

/* Makes [OFFSET, OFFSET + LENGTH) read as zeros, whole blocks of it absent. */
static int punch_range(struct kv_writer *writer, uint64_t offset, uint64_t length)
{
	uint64_t end = offset + length;
	uint32_t last = (uint32_t)((end - 1) >> KV_CHUNK_SHIFT);
	int r = 0;

	for (uint64_t at = offset; at < end && r == 0;) {
		uint32_t number = (uint32_t)(at >> KV_CHUNK_SHIFT), next;

		r = kv_chunks_next(writer->version, number, last + 1, &next);
		if (r < 0 || next > last)
			break;
		if (next > number)
			at = (uint64_t)next << KV_CHUNK_SHIFT;
		const struct kv_span span = kv_span_at(at, end - at);
		r = kv_writer_punch(writer, &span);
		at += span.to - span.from;
	}
	return r;
}

static int punch(struct kv_writer *writer, uint64_t offset, uint64_t length)
{
	uint64_t first = kv_div_round_up(offset, KV_BLOCK_SIZE);
	uint64_t end = (offset + length) >> KV_BLOCK_SHIFT;
	int r = first < end ? kv_promise_drop(writer->version, first, end) : 0;

	return r < 0 ? r : punch_range(writer, offset, length);
}

static int allocate(struct kv_writer *writer, bool keep_size, uint64_t offset, uint64_t length)
{
	struct kv_version *version = writer->version;
	uint64_t end = offset + length;
	int r = kv_promise_allocate(
		version, offset >> KV_BLOCK_SHIFT, kv_div_round_up(end, KV_BLOCK_SIZE));

	if (r < 0 || keep_size)
		return r;
	KV_LOCKED(&version->lock);
	version->size = kv_max_u64(version->size, end);
	return 0;
}

/* The blocks are promised first: those that are punched then stay so. */
static int zero(struct kv_writer *writer, bool keep_size, uint64_t offset, uint64_t length)
{
	int r = allocate(writer, keep_size, offset, length);

	return r < 0 ? r : punch_range(writer, offset, length);
}

int kv_version_allocate(struct kv_version *version, int mode, uint64_t offset, uint64_t length)
{
	struct kv_writer writer = {.version = version};
	bool keep_size = mode & FALLOC_FL_KEEP_SIZE;
	int what = mode & ~FALLOC_FL_KEEP_SIZE;
	int r;

	if (length == 0)
		return -EINVAL;
	if (offset > KV_FILE_SIZE_MAX || length > KV_FILE_SIZE_MAX - offset)
		return -EFBIG;
	if ((what != 0 && what != FALLOC_FL_PUNCH_HOLE && what != FALLOC_FL_ZERO_RANGE) ||
		(what == FALLOC_FL_PUNCH_HOLE && !keep_size))
		return -EOPNOTSUPP;
	r = kv_version_enter_exclusive(version);
	if (r < 0)
		return r;
	if (what == 0)
		r = allocate(&writer, keep_size, offset, length);
	else if (what == FALLOC_FL_PUNCH_HOLE)
		r = punch(&writer, offset, length);
	else
		r = zero(&writer, keep_size, offset, length);
	kv_writer_done(&writer);
	if (r == 0)
		changed(version);
	kv_version_leave_exclusive(version);
	return r;
}
