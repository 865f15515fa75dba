/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages of DRAM of a chunk: which ones it has, and getting more.
 *
 * A chunk that is written from its start on, or whole, has its first pages, as many as it is
 * charged for: also some that nothing was written to yet, because huge pages come whole and a
 * writer that goes on needs them next. A chunk that is written here and there is sparse
 * (KV_SLOT_SPARSE): it has the pages of the blocks that are present, and is charged for those. So
 * no list of pages is kept beside the blocks.
 *
 * What is resident is so by chunk: a chunk has the pages of all its blocks, or none. Its checksum
 * is over all of them; pages of only some could neither be checked when the others come back nor be
 * written without these.
 */
#include "fs/core_internal.h"

#define ATTEMPTS_MAX 3u
/* A write of that much to an empty chunk takes the whole chunk, for the sake of huge pages. */
#define LARGE_BLOCKS (KV_CHUNK_BLOCKS / 2)

/* ---- What there is ---- */

void kv_slot_pages(const struct kv_slot *slot, struct kv_bits *ret_pages)
{
	if (slot->flags & KV_SLOT_SPARSE) {
		/* A BASE chunk's blocks are its base's. */
		assert(slot->state != KV_CHUNK_BASE);
		kv_slot_bits(slot, ret_pages);
		return;
	}
	*ret_pages = (struct kv_bits){0};
	kv_bits_set(ret_pages, 0, slot->charge);
}

bool kv_slot_has_all_pages(const struct kv_slot *slot, unsigned used)
{
	return slot->charge >= used && !(slot->flags & KV_SLOT_SPARSE);
}

static void set_charge(struct kv_version *version, struct kv_slot *slot, unsigned blocks)
{
	assert(blocks <= KV_CHUNK_BLOCKS && version->charged >= slot->charge);
	version->charged = version->charged - slot->charge + blocks;
	slot->charge = blocks & 511;
}

unsigned kv_slot_forget_pages(struct kv_version *version, struct kv_slot *slot)
{
	unsigned blocks = slot->charge;

	set_charge(version, slot, 0);
	slot->flags &= (uint16_t)~KV_SLOT_SPARSE;
	return blocks;
}

void kv_slot_charge_pages(
	struct kv_version *version, struct kv_slot *slot, const struct kv_bits *bits)
{
	assert(slot->charge == 0);
	set_charge(version, slot, kv_bits_count(bits));
	slot->flags &= (uint16_t)~KV_SLOT_SPARSE;
	slot->flags |= kv_bits_is_prefix(bits) ? 0 : KV_SLOT_SPARSE;
}

void kv_slot_settle_pages(struct kv_slot *slot)
{
	struct kv_bits bits;

	if (!(slot->flags & KV_SLOT_SPARSE))
		return;
	kv_slot_bits(slot, &bits);
	if (kv_bits_is_prefix(&bits) && kv_bits_count(&bits) == slot->charge)
		slot->flags &= (uint16_t)~KV_SLOT_SPARSE;
}

/* ---- Allocating ---- */

static uint64_t offset_of(uint32_t number, unsigned block)
{
	return ((uint64_t)number << KV_CHUNK_SHIFT) + ((uint64_t)block << KV_BLOCK_SHIFT);
}

static int punch(struct kv_version *version, uint32_t number, const struct kv_bits *bits)
{
	KV_BITS_FOREACH (first, end, bits) {
		int r = kv_object_punch(version->object, offset_of(number, first),
			(uint64_t)(end - first) << KV_BLOCK_SHIFT);

		if (r < 0)
			return r;
	}
	return 0;
}

/*
 * A part of what lies inside the size would bring pages around it along, and so would a chunk: a
 * huge page is two. The other one would be nobody's, and stay when this one is punched.
 */
static int allocate_run(
	struct kv_object *object, uint64_t offset, uint64_t length, uint64_t object_size)
{
	bool inside = offset + length <= kv_round_up(object_size, KV_BLOCK_SIZE);
	bool whole = length >= kv_min_u64(object_size, 2 * KV_CHUNK_SIZE);

	return inside && !whole ? kv_object_allocate_small(object, offset, length)
				: kv_object_allocate(object, offset, length);
}

int kv_chunk_allocate(struct kv_version *version, uint32_t number, const struct kv_bits *bits)
{
	uint64_t size;

	{
		KV_LOCKED(&version->lock);
		size = version->object_size;
	}
	KV_BITS_FOREACH (first, end, bits) {
		int r = allocate_run(version->object, offset_of(number, first),
			(uint64_t)(end - first) << KV_BLOCK_SHIFT, size);

		if (r < 0) {
			(void)punch(version, number, bits);
			return r;
		}
	}
	return 0;
}

static int charge_and_allocate(struct kv_version *version, uint32_t number,
	const struct kv_bits *bits, unsigned patience_ms)
{
	uint64_t bytes = (uint64_t)kv_bits_count(bits) << KV_BLOCK_SHIFT;
	struct kv_core *core = version->file->core;
	int r = -ENOSPC;

	for (unsigned i = 0; i < ATTEMPTS_MAX && r == -ENOSPC; i++) {
		r = kv_core_charge(core, bytes, patience_ms);
		if (r < 0)
			break;
		r = kv_chunk_allocate(version, number, bits);
		if (r == 0)
			break;
		kv_core_uncharge(core, bytes);
		/* The tier's filesystem is short although the budget is not: huge pages used in
		 * part. */
		if (r == -ENOSPC)
			(void)kv_evict_reclaim(core, bytes);
	}
	return r == -E2BIG || r == -ENOSPC ? -EAGAIN : r;
}

/* Two chunks at once, or nothing. */
static int charge_and_allocate_pair(struct kv_version *version, uint32_t number)
{
	struct kv_core *core = version->file->core;
	int r = kv_core_charge(core, 2 * KV_CHUNK_SIZE, 0);

	if (r < 0)
		return r;
	r = kv_object_allocate(
		version->object, (uint64_t)number << KV_CHUNK_SHIFT, 2 * KV_CHUNK_SIZE);
	if (r < 0)
		kv_core_uncharge(core, 2 * KV_CHUNK_SIZE);
	return r;
}

/* ---- What a write needs ---- */

/* How many pages a chunk that is written from its start on gets for [FIRST, END). */
static unsigned pages_ahead(
	const struct kv_version *version, const struct kv_span *span, bool stream, unsigned had)
{
	unsigned end = (unsigned)kv_div_round_up(span->to, KV_BLOCK_SIZE);
	uint64_t start = ((uint64_t)span->chunk << KV_CHUNK_SHIFT) + span->from;

	if (end <= had)
		return had;
	/* A small file written at once gets what it needs; one that grows by appending gets twice
	 * what it had. */
	if (span->chunk == 0 && version->size <= KV_CHUNK_SIZE)
		return (unsigned)kv_min_u64(kv_max_u64(end, 2ul * had), KV_CHUNK_BLOCKS);
	if (stream || start == version->size ||
		end - (span->from >> KV_BLOCK_SHIFT) >= LARGE_BLOCKS)
		return KV_CHUNK_BLOCKS;
	return end;
}

void kv_pages_for_span(struct kv_version *version, const struct kv_span *span, bool stream,
	struct kv_pages *ret_pages)
{
	const struct kv_slot *slot = kv_slot_find(version, span->chunk);
	unsigned first = span->from >> KV_BLOCK_SHIFT;
	struct kv_pages pages = {
		.sparse = slot->flags & KV_SLOT_SPARSE, .patience_ms = KV_PATIENCE_MS};
	struct kv_bits have, bits;

	assert(version->state == KV_VERSION_WRITING);
	if (!pages.sparse && first <= slot->charge) {
		unsigned to = pages_ahead(version, span, stream, slot->charge);

		kv_bits_set(&pages.add, slot->charge, to);
		pages.pair = slot->charge == 0 && to == KV_CHUNK_BLOCKS;
		*ret_pages = pages;
		return;
	}
	kv_slot_pages(slot, &have);
	kv_slot_bits(slot, &bits);
	kv_bits_set(&pages.add, first, (unsigned)kv_div_round_up(span->to, KV_BLOCK_SIZE));
	pages.add = kv_bits_without(&pages.add, &have);
	pages.drop = kv_bits_without(&have, &bits);
	pages.sparse = true;
	*ret_pages = pages;
}

void kv_pages_for_bits(const struct kv_bits *bits, struct kv_pages *ret_pages)
{
	*ret_pages = (struct kv_pages){
		.add = *bits,
		.sparse = !kv_bits_is_prefix(bits),
		.patience_ms = KV_PATIENCE_MS,
	};
}

/* True if the next chunk is best allocated along: a huge page is two chunks, and the writer goes on
 * there. */
static bool claim_next(struct kv_version *version, uint32_t number)
{
	struct kv_slot *next;

	if (number % 2 || number == 0 || version->size < (uint64_t)number << KV_CHUNK_SHIFT ||
		version->size > (uint64_t)(number + 1) << KV_CHUNK_SHIFT ||
		number + 1 == UINT32_MAX || kv_slot_get(version, number + 1, &next) < 0)
		return false;
	if (next->state != KV_CHUNK_HOLE || next->charge || next->flags & KV_SLOT_BUSY)
		return false;
	next->flags |= KV_SLOT_BUSY;
	return true;
}

int kv_chunk_add_pair(struct kv_version *version, uint32_t number)
{
	(void)pthread_mutex_unlock(&version->lock);
	int r = charge_and_allocate_pair(version, number);
	(void)pthread_mutex_lock(&version->lock);
	for (uint32_t i = number; i < number + 2 && r == 0; i++)
		set_charge(version, kv_slot_find(version, i), KV_CHUNK_BLOCKS);
	return r;
}

/* Drops the lock meanwhile. True if NUMBER and the next one, which was claimed, have got all pages.
 */
static bool add_pair(struct kv_version *version, uint32_t number)
{
	int r = kv_chunk_add_pair(version, number);

	kv_slot_find(version, number + 1)->flags &= (uint16_t)~KV_SLOT_BUSY;
	kv_park_wake(version->file->core, version);
	return r == 0;
}

int kv_chunk_add_pages(struct kv_version *version, uint32_t number, const struct kv_pages *pages)
{
	unsigned add = kv_bits_count(&pages->add), drop = kv_bits_count(&pages->drop);
	struct kv_core *core = version->file->core;
	int r;

	if (add == 0 || (pages->pair && claim_next(version, number) && add_pair(version, number)))
		return 0;
	(void)pthread_mutex_unlock(&version->lock);
	r = charge_and_allocate(version, number, &pages->add, pages->patience_ms);
	/* What cannot be given back stays charged. */
	if (r == 0 && drop > 0 && punch(version, number, &pages->drop) < 0)
		drop = 0;
	(void)pthread_mutex_lock(&version->lock);
	if (r < 0)
		return r;
	struct kv_slot *slot = kv_slot_find(version, number);
	unsigned all = slot->charge + add - drop;
	unsigned most = (unsigned)kv_min_u64(all, KV_CHUNK_BLOCKS);
	set_charge(version, slot, most);
	slot->flags &= (uint16_t)~KV_SLOT_SPARSE;
	slot->flags |= pages->sparse ? KV_SLOT_SPARSE : 0;
	kv_core_uncharge(core, (uint64_t)(drop + all - most) << KV_BLOCK_SHIFT);
	return 0;
}

int kv_chunk_free_pages(struct kv_version *version, uint32_t number, struct kv_slot *slot,
	const struct kv_bits *gone)
{
	unsigned count = kv_bits_count(gone);

	if (!(slot->flags & KV_SLOT_SPARSE))
		return 0;
	int r = punch(version, number, gone);
	if (r < 0)
		return r;
	assert(slot->charge >= count);
	set_charge(version, slot, slot->charge - count);
	kv_core_uncharge(version->file->core, (uint64_t)count << KV_BLOCK_SHIFT);
	return 0;
}
