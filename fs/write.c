/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing to a version that is not published. Each chunk is made ready first (content from the base
 * or the devices, DRAM, space in the store), one step at a time and with no lock held; then the
 * bytes are copied.
 */
#include "fs/charge_internal.h"
#include "fs/write_internal.h"

static unsigned first_block(const struct kv_span *span)
{
	return span->from >> KV_BLOCK_SHIFT;
}

static unsigned end_block(const struct kv_span *span)
{
	return (unsigned)kv_div_round_up(span->to, KV_BLOCK_SIZE);
}

static uint64_t span_end(const struct kv_span *span)
{
	return ((uint64_t)span->chunk << KV_CHUNK_SHIFT) + span->to;
}

/* ---- Space ---- */

/* Its extents are on their way, and useless as soon as it changes. */
static bool is_under_way(unsigned state, unsigned flags)
{
	return state == KV_CHUNK_DIRTY && flags & KV_SLOT_WRITEBACK && !(flags & KV_SLOT_REDIRTIED);
}

/* Lock held. Blocks to be promised so that SPAN becomes present in a chunk that has BITS. */
static unsigned blocks_new(
	struct kv_version *version, const struct kv_span *span, const struct kv_bits *bits)
{
	struct kv_bits added = {0};

	kv_bits_set(&added, first_block(span), end_block(span));
	added = kv_bits_without(&added, bits);
	return kv_bits_count(&added) - kv_promise_covers(version, span->chunk, &added);
}

/* Blocks to be promised so that a chunk with BITS can be written again as a whole. FLAGS and STATE
 * are the slot's. */
static unsigned blocks_again(const struct kv_bits *bits, unsigned state, unsigned flags)
{
	/* Promised already, or on blocks of our own that become a promise again. */
	if (is_under_way(state, flags) || (state != KV_CHUNK_DIRTY && !(flags & KV_SLOT_FRESH)))
		return kv_bits_count(bits);
	return 0;
}

static int needed_for(
	struct kv_writer *writer, const struct kv_span *span, uint64_t *blocks, uint64_t *growth)
{
	struct kv_version *version = writer->version;
	struct kv_bits bits = {0};
	unsigned state, flags = 0;
	int r = 0;

	{
		KV_LOCKED(&version->lock);
		const struct kv_slot *slot = kv_slot_find(version, span->chunk);
		state = kv_slot_state(version, span->chunk);
		if (slot) {
			flags = slot->flags;
			kv_slot_bits(slot, &bits);
		}
	}
	if (state == KV_CHUNK_BASE)
		r = kv_chunk_bits(version, span->chunk, &bits);
	if (r < 0)
		return r;
	KV_LOCKED(&version->lock);
	unsigned added = blocks_new(version, span, &bits);
	*blocks += added;
	*growth += added;
	/* What is under way can be waited for. */
	if (!is_under_way(state, flags))
		*blocks += blocks_again(&bits, state, flags);
	return 0;
}

int kv_writer_promise(struct kv_writer *writer, uint64_t offset, uint64_t size)
{
	uint64_t blocks = 0, growth = 0;

	for (uint64_t at = offset; at < offset + size;) {
		const struct kv_span span = kv_span_at(at, offset + size - at);
		int r = needed_for(writer, &span, &blocks, &growth);

		if (r < 0)
			return r;
		at += span.to - span.from;
	}
	int r = kv_quota_promise(writer->version, growth);
	if (r < 0)
		return r;
	writer->growth += growth;
	r = kv_core_reserve(writer->version->file->core, blocks);
	if (r == 0)
		writer->promised += blocks;
	return r;
}

void kv_writer_done(struct kv_writer *writer)
{
	if (writer->promised > 0)
		kv_space_unreserve(writer->version->file->core->space, writer->promised);
	writer->promised = 0;
	kv_quota_grown(writer->version, writer->growth);
	writer->growth = 0;
}

int kv_writer_promise_more(struct kv_writer *writer, unsigned blocks)
{
	int r;

	if (writer->promised >= blocks)
		return 0;
	r = kv_core_reserve(writer->version->file->core, blocks - writer->promised);
	if (r == 0)
		writer->promised = blocks;
	return r;
}

/* The same without evicting. */
static bool promise_now(struct kv_writer *writer, unsigned blocks)
{
	if (kv_space_reserve(writer->version->file->core->space, blocks - writer->promised) < 0)
		return false;
	writer->promised = blocks;
	return true;
}

/* ---- DRAM ---- */

/* Lock held. */
static void free_slot(struct kv_version *version, uint32_t number)
{
	kv_slot_find(version, number)->flags &= (uint16_t)~KV_SLOT_BUSY;
	kv_park_wake(version->file->core, version);
}

/* Lock held, the slot BUSY by the caller, which it stays. Drops the lock meanwhile. */
static int add_pages(struct kv_version *version, uint32_t number, const struct kv_pages *pages)
{
	int r = kv_chunk_add_pages(version, number, pages);

	return r == -EAGAIN ? -ENOMEM : r;
}

int kv_writer_object(struct kv_version *version, uint64_t end)
{
	/* Small ones are kept exact, so that their publish has nothing to cut. */
	uint64_t size = end <= KV_CHUNK_SIZE ? end : kv_round_up(end, KV_CHUNK_SIZE);
	int r = kv_version_object_locked(version);

	if (r < 0 || version->object_size >= size || version->state != KV_VERSION_WRITING)
		return r;
	r = kv_object_resize(version->object, size);
	if (r == 0)
		version->object_size = size;
	return r;
}

/* ---- Content ---- */

int kv_writer_make_dirty(struct kv_writer *writer, uint32_t number, const struct kv_bits *bits)
{
	struct kv_version *version = writer->version;
	struct kv_core *core = version->file->core;
	struct kv_slot *slot = kv_slot_find(version, number);
	unsigned again, more = kv_bits_count(bits);
	struct kv_bits old, added;
	uint64_t *memory;
	int r = kv_slot_memory_for_bits(slot, bits, &memory);

	if (r < 0)
		return r;
	kv_slot_bits(slot, &old);
	/* A BASE chunk's blocks are counted already. */
	if (slot->state == KV_CHUNK_BASE)
		old = *bits;
	again = blocks_again(&old, slot->state, slot->flags);
	added = kv_bits_without(bits, &old);
	if (slot->state == KV_CHUNK_DIRTY) {
		more = kv_bits_count(&added);
		if (is_under_way(slot->state, slot->flags))
			slot->flags |= KV_SLOT_REDIRTIED;
	} else {
		if (slot->flags & KV_SLOT_FRESH) {
			kv_space_renew(core->space, kv_slot_extents(slot), slot->extent_count);
			version->reserved += kv_bits_count(&old);
		}
		kv_slot_clear_extents(slot);
		slot->flags &= (uint16_t) ~(
			KV_SLOT_FRESH | KV_SLOT_SHARED | KV_SLOT_FAILED | KV_SLOT_RESIDENT);
		slot->state = KV_CHUNK_DIRTY;
	}
	version->blocks += kv_bits_count(&added);
	kv_charge_dirty_locked(version, more);
	again += kv_bits_count(&added) - kv_promise_take(version, number, &added);
	assert(writer->promised >= again);
	writer->promised -= again;
	version->reserved += again;
	kv_slot_put_bits(slot, bits, memory);
	kv_slot_settle_pages(slot);
	return 0;
}

/* Brings a chunk that lies on the devices, or in a base, into the version's own object. */
static int bring_in(struct kv_version *version, uint32_t number)
{
	const struct kv_fill_range range = {
		.first = number,
		.count = 1,
		.patience_ms = KV_PATIENCE_MS,
	};
	int r = kv_fill_begin(version, &range);

	if (r == 0)
		r = kv_fill_wait(version, number);
	if (r == -ETIMEDOUT)
		return -EIO;
	return r == -EAGAIN ? -ENOMEM : r;
}

/* Lock held. A moment's wait for who has the chunk now. -EIO: a device does not answer him. */
static int wait_for_chunk(const struct kv_writer *writer)
{
	struct kv_version *version = writer->version;

	if (kv_core_gives_up(version->file->core, writer->since_ms))
		return -EIO;
	kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
	return 0;
}

/* Lock held. Whether the chunk, which has BITS, keeps nothing of what it has when SPAN is written.
 */
static bool covers(
	const struct kv_version *version, const struct kv_span *span, const struct kv_bits *bits)
{
	unsigned first = (unsigned)kv_div_round_up(span->from, KV_BLOCK_SIZE);
	unsigned end =
		span_end(span) >= version->size ? end_block(span) : span->to >> KV_BLOCK_SHIFT;

	return kv_bits_next(bits, 0, true) >= first && kv_bits_end(bits) <= end;
}

/* Lock held, the chunk BASE with BITS and resident, or nothing of it is kept: now it is DIRTY. */
static int own_pages(struct kv_writer *writer, uint32_t number, const struct kv_bits *bits)
{
	struct kv_version *version = writer->version;
	int r = kv_writer_object(version, ((uint64_t)number + 1) << KV_CHUNK_SHIFT);
	struct kv_pages pages;

	kv_pages_for_bits(bits, &pages);
	/* BUSY as the slot is, it cannot be punched. */
	if (r == 0 && !(kv_slot_find(version, number)->flags & KV_SLOT_RESIDENT))
		r = add_pages(version, number, &pages);
	return r < 0 ? r : kv_writer_make_dirty(writer, number, bits);
}

/*
 * A step towards a BASE chunk that is the version's own: with its content, or without what SPAN (if
 * there is one) covers. The slot is BUSY by the caller.
 */
static int own_base(struct kv_writer *writer, uint32_t number, const struct kv_span *span)
{
	struct kv_version *version = writer->version;
	bool missing = false;
	struct kv_bits bits;
	int r = kv_chunk_bits(version, number, &bits);

	if (r == 0)
		r = kv_writer_promise_more(writer, kv_bits_count(&bits));
	{
		KV_LOCKED(&version->lock);
		struct kv_slot *slot = kv_slot_find(version, number);

		if (r == 0 && kv_bits_count(&bits) == 0)
			slot->state = KV_CHUNK_HOLE;
		else if (r == 0)
			missing = !(slot->flags & KV_SLOT_RESIDENT) &&
				  !(span && covers(version, span, &bits));
		if (r == 0 && kv_bits_count(&bits) > 0 && !missing)
			r = own_pages(writer, number, &bits);
		free_slot(version, number);
	}
	return missing ? bring_in(version, number) : r;
}

/* ---- One span ---- */

enum ready {
	READY,       /* the lock is still held */
	READY_AGAIN, /* something was done or waited for: look again */
};

/*
 * The last step: pages. The lock is dropped meanwhile, but not between their coming and the blocks'
 * that are on them, for a sparse chunk has the pages of its blocks.
 */
static int give_pages(struct kv_writer *writer, const struct kv_span *span, enum ready *ret_ready)
{
	struct kv_version *version = writer->version;
	struct kv_pages pages;
	int r = 0;

	kv_pages_for_span(version, span, writer->stream, &pages);
	if (kv_bits_end(&pages.add) > 0) {
		kv_slot_find(version, span->chunk)->flags |= KV_SLOT_BUSY;
		r = add_pages(version, span->chunk, &pages);
		free_slot(version, span->chunk);
	}
	if (r == 0)
		*ret_ready = READY;
	else
		(void)pthread_mutex_unlock(&version->lock);
	return r;
}

/* One step towards a chunk that SPAN can be written to. Lock held; released unless READY. */
static int make_ready(struct kv_writer *writer, const struct kv_span *span, enum ready *ret_ready)
{
	struct kv_version *version = writer->version;
	struct kv_slot *slot;
	struct kv_bits bits;
	int r = kv_slot_get(version, span->chunk, &slot);

	*ret_ready = READY_AGAIN;
	if (r == 0 && slot->flags & KV_SLOT_BUSY) {
		r = wait_for_chunk(writer);
		(void)pthread_mutex_unlock(&version->lock);
		return r;
	}
	if (r == 0)
		r = kv_writer_object(version, span_end(span));
	if (r < 0) {
		(void)pthread_mutex_unlock(&version->lock);
		return r;
	}
	kv_slot_bits(slot, &bits);
	if (slot->state == KV_CHUNK_BASE) {
		slot->flags |= KV_SLOT_BUSY;
		(void)pthread_mutex_unlock(&version->lock);
		return own_base(writer, span->chunk, span);
	}
	if (slot->state == KV_CHUNK_COLD && !covers(version, span, &bits)) {
		(void)pthread_mutex_unlock(&version->lock);
		return bring_in(version, span->chunk);
	}
	unsigned needed =
		blocks_new(version, span, &bits) + blocks_again(&bits, slot->state, slot->flags);
	if (writer->promised >= needed)
		return give_pages(writer, span, ret_ready);
	if (is_under_way(slot->state, slot->flags) && !promise_now(writer, needed)) {
		/* A pool may be as large as the store: then there is room when the extents under
		 * way are there. */
		r = wait_for_chunk(writer);
		(void)pthread_mutex_unlock(&version->lock);
		return r;
	}
	(void)pthread_mutex_unlock(&version->lock);
	return kv_writer_promise_more(writer, needed);
}

/* Lock held, chunk ready; comes back unlocked. */
static int copy_in(struct kv_writer *writer, const struct kv_span *span, const uint8_t *memory)
{
	struct kv_version *version = writer->version;
	struct kv_slot *slot = kv_slot_find(version, span->chunk);
	struct kv_bits bits;
	int r;

	kv_slot_bits(slot, &bits);
	kv_bits_set(&bits, first_block(span), end_block(span));
	r = kv_writer_make_dirty(writer, span->chunk, &bits);
	if (r < 0) {
		(void)pthread_mutex_unlock(&version->lock);
		return r;
	}
	slot->pins++;
	version->busy++;
	(void)pthread_mutex_unlock(&version->lock);
	r = kv_object_write(version->object, memory, span->to - span->from,
		((uint64_t)span->chunk << KV_CHUNK_SHIFT) + span->from);
	KV_LOCKED(&version->lock);
	kv_slot_find(version, span->chunk)->pins--;
	version->busy--;
	if (r == 0)
		version->size = kv_max_u64(version->size, span_end(span));
	return r;
}

int kv_writer_span(struct kv_writer *writer, const struct kv_span *span, const uint8_t *memory)
{
	struct kv_version *version = writer->version;

	writer->since_ms = kv_monotonic_ms();
	for (;;) {
		enum ready ready;

		(void)pthread_mutex_lock(&version->lock);
		int r = make_ready(writer, span, &ready);
		if (r < 0)
			return r;
		if (ready == READY)
			return copy_in(writer, span, memory);
	}
}

int kv_writer_own(struct kv_writer *writer, uint32_t number)
{
	struct kv_version *version = writer->version;
	struct kv_slot *slot;
	struct kv_bits bits;

	writer->since_ms = kv_monotonic_ms();
	for (;;) {
		(void)pthread_mutex_lock(&version->lock);
		int r = kv_slot_get(version, number, &slot);
		enum kv_chunk_state state = r == 0 ? (enum kv_chunk_state)slot->state : 0;
		if (r == 0 && slot->flags & KV_SLOT_BUSY) {
			r = wait_for_chunk(writer);
			(void)pthread_mutex_unlock(&version->lock);
			if (r < 0)
				return r;
			continue;
		}
		if (r < 0 || state == KV_CHUNK_DIRTY || state == KV_CHUNK_HOLE) {
			(void)pthread_mutex_unlock(&version->lock);
			return r;
		}
		if (state == KV_CHUNK_BASE)
			slot->flags |= KV_SLOT_BUSY;
		kv_slot_bits(slot, &bits);
		unsigned again = blocks_again(&bits, state, slot->flags);
		if (state == KV_CHUNK_HOT && writer->promised >= again) {
			r = kv_writer_make_dirty(writer, number, &bits);
			(void)pthread_mutex_unlock(&version->lock);
			return r;
		}
		(void)pthread_mutex_unlock(&version->lock);
		if (state == KV_CHUNK_BASE)
			r = own_base(writer, number, NULL);
		else if (state == KV_CHUNK_COLD)
			r = bring_in(version, number);
		else
			r = kv_writer_promise_more(writer, again);
		if (r < 0)
			return r;
	}
}

static int write_spans(
	struct kv_writer *writer, const uint8_t *memory, uint64_t size, uint64_t offset)
{
	uint64_t end = offset + size;
	int r;

	r = kv_writer_promise(writer, offset, size);
	for (uint64_t at = offset; at < end && r == 0;) {
		const struct kv_span span = kv_span_at(at, end - at);

		kv_core_throttle(writer->version->file->core);
		kv_charge_hold(writer->version);
		int64_t n = kv_writer_pair(writer, at, end - at, memory + (at - offset));
		if (n == 0)
			r = kv_writer_span(writer, &span, memory + (at - offset));
		else if (n < 0)
			r = (int)n;
		at += n > 0 ? (uint64_t)n : span.to - span.from;
	}
	return r;
}

int kv_version_write(struct kv_version *version, const void *memory, size_t size, uint64_t offset)
{
	struct kv_writer writer = {.version = version};
	int r;

	if (offset > KV_FILE_SIZE_MAX || size > KV_FILE_SIZE_MAX - offset)
		return -EFBIG;
	if (size == 0)
		return 0;
	r = kv_version_enter(version);
	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		writer.stream = offset > 0 && offset == version->write_end;
		version->write_end = offset + size;
	}
	r = write_spans(&writer, memory, size, offset);
	kv_writer_done(&writer);
	int64_t now_ns = kv_core_now_ns(version->file->core);
	{
		KV_LOCKED(&version->lock);
		version->changed = true;
		version->mtime_ns = version->ctime_ns = now_ns;
		version->mtime_set = version->ctime_set = false;
		kv_unsettled_changed(version);
		if (r < 0)
			kv_unsettled_lose(version);
	}
	kv_version_leave(version);
	return r;
}
