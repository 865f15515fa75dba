/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks that were allocated and perhaps never written: ranges over a version being written.
 *
 * A range says that each of its blocks has space in the store for sure. Those that are present in
 * the chunk map have it by that; the others are counted in version->unwritten, and are promised
 * (kv_space_reserve). Writing does not change the ranges, only that count, so a pool of any size is
 * one range, however much of it was written. What was never written reads as zeros and is a hole to
 * SEEK_DATA.
 *
 * The ranges change while the version is entered exclusively, under its lock. They and the promise
 * are the version's own: neither is in the index. A publish turns what was not written into holes;
 * a writer that goes on takes the ranges along into the version it writes next.
 */
#include "fs/charge_internal.h"
#include "fs/core_internal.h"
#include "fs/tree.h"

static int range_compare(const struct kv_range *a, const struct kv_range *b)
{
	return a->first < b->first ? -1 : a->first > b->first;
}

KV_TREE_GENERATE(kv_range_tree, kv_range, entry, range_compare)

/* The first range that ends behind BLOCK. */
static struct kv_range *range_at(struct kv_version *version, uint64_t block)
{
	struct kv_range key = {.first = block};
	struct kv_range *range = RB_NFIND(kv_range_tree, &version->ranges, &key);
	struct kv_range *before = range ? RB_PREV(kv_range_tree, &version->ranges, range)
					: RB_MAX(kv_range_tree, &version->ranges);

	return before && before->end > block ? before : range;
}

/* The range behind RANGE if it begins before END. */
static struct kv_range *range_next(struct kv_version *version, struct kv_range *range, uint64_t end)
{
	range = RB_NEXT(kv_range_tree, &version->ranges, range);
	return range && range->first < end ? range : NULL;
}

static struct kv_range *range_first(struct kv_version *version, uint64_t first, uint64_t end)
{
	struct kv_range *range = range_at(version, first);

	return range && range->first < end ? range : NULL;
}

/* ---- Counting ---- */

static uint64_t allocated_length(struct kv_version *version, uint64_t first, uint64_t end)
{
	uint64_t blocks = 0;

	for (struct kv_range *range = range_first(version, first, end); range;
		range = range_next(version, range, end))
		blocks += kv_min_u64(range->end, end) - kv_max_u64(range->first, first);
	return blocks;
}

static void allocated_bits(struct kv_version *version, uint32_t chunk, struct kv_bits *ret_bits)
{
	uint64_t start = (uint64_t)chunk * KV_CHUNK_BLOCKS, end = start + KV_CHUNK_BLOCKS;

	*ret_bits = (struct kv_bits){0};
	for (struct kv_range *range = range_first(version, start, end); range;
		range = range_next(version, range, end))
		kv_bits_set(ret_bits, (unsigned)(kv_max_u64(range->first, start) - start),
			(unsigned)(kv_min_u64(range->end, end) - start));
}

unsigned kv_promise_covers(struct kv_version *version, uint32_t chunk, const struct kv_bits *bits)
{
	struct kv_bits allocated;
	unsigned count = 0;

	if (RB_EMPTY(&version->ranges))
		return 0;
	allocated_bits(version, chunk, &allocated);
	for (unsigned i = 0; i < KV_CHUNK_BLOCKS / 64; i++)
		count += (unsigned)__builtin_popcountll(allocated.word[i] & bits->word[i]);
	return count;
}

/* Blocks of [FIRST, END) that are present, inside the ranges or (OUTSIDE) outside of them. */
static int present_length(struct kv_version *version, uint64_t first, uint64_t end, bool outside,
	uint64_t *ret_blocks)
{
	uint32_t at = (uint32_t)(first / KV_CHUNK_BLOCKS);
	uint32_t last = (uint32_t)kv_div_round_up(end, KV_CHUNK_BLOCKS);
	uint64_t blocks = 0;

	for (;;) {
		struct kv_bits bits;
		uint32_t number;
		int r = kv_chunks_next(version, at, last, &number);

		if (r == 0 && number < last)
			r = kv_chunk_bits(version, number, &bits);
		if (r < 0)
			return r;
		if (number >= last)
			break;
		uint64_t start = (uint64_t)number * KV_CHUNK_BLOCKS;
		if (start < first)
			kv_bits_clear(&bits, 0, (unsigned)(first - start));
		if (end < start + KV_CHUNK_BLOCKS)
			kv_bits_clear(&bits, (unsigned)(end - start), KV_CHUNK_BLOCKS);
		KV_LOCKED(&version->lock);
		unsigned inside = kv_promise_covers(version, number, &bits);
		blocks += outside ? kv_bits_count(&bits) - inside : inside;
		at = number + 1;
	}
	*ret_blocks = blocks;
	return 0;
}

/* ---- Changing the ranges: lock held ---- */

static void range_remove(struct kv_version *version, struct kv_range *range)
{
	RB_REMOVE(kv_range_tree, &version->ranges, range);
	free(range);
}

/* One range over [FIRST, END) and all that it meets. */
static int ranges_add(struct kv_version *version, uint64_t first, uint64_t end)
{
	struct kv_range *added = malloc(sizeof(*added)), *range;

	if (!added)
		return -ENOMEM;
	/* Neighbours too: pools that grow by fallocate stay one range. */
	while ((range = range_first(version, first > 0 ? first - 1 : 0, end + 1))) {
		first = kv_min_u64(first, range->first);
		end = kv_max_u64(end, range->end);
		range_remove(version, range);
	}
	*added = (struct kv_range){.first = first, .end = end};
	RB_INSERT(kv_range_tree, &version->ranges, added);
	return 0;
}

static int ranges_cut(struct kv_version *version, uint64_t first, uint64_t end)
{
	struct kv_range *range = range_first(version, first, end);

	if (range && range->first < first && range->end > end) {
		struct kv_range *behind = malloc(sizeof(*behind));

		if (!behind)
			return -ENOMEM;
		*behind = (struct kv_range){.first = end, .end = range->end};
		range->end = first;
		RB_INSERT(kv_range_tree, &version->ranges, behind);
		return 0;
	}
	while ((range = range_first(version, first, end))) {
		if (range->first < first)
			range->end = first;
		else if (range->end > end)
			range->first = end;
		else
			range_remove(version, range);
	}
	return 0;
}

static void unwritten_add(struct kv_version *version, uint64_t blocks)
{
	version->unwritten += blocks;
	atomic_fetch_add(&version->file->core->unwritten, blocks);
}

static void unwritten_sub(struct kv_version *version, uint64_t blocks)
{
	assert(version->unwritten >= blocks);
	version->unwritten -= blocks;
	atomic_fetch_sub(&version->file->core->unwritten, blocks);
}

/* ---- Allocating and giving up ---- */

/*
 * What others have been promised for blocks they have not written cannot be had by evicting: saying
 * so first spares the files that would be evicted in vain.
 */
static int reserve(struct kv_core *core, uint64_t blocks)
{
	uint64_t unwritten = atomic_load(&core->unwritten);
	struct kv_space_usage usage;

	kv_space_usage(core->space, &usage);
	if (blocks > usage.total || unwritten > usage.total - blocks)
		return -ENOSPC;
	return kv_core_reserve(core, blocks);
}

int kv_promise_allocate(struct kv_version *version, uint64_t first, uint64_t end)
{
	struct kv_core *core = version->file->core;
	uint64_t present, missing;
	int r = present_length(version, first, end, true, &present);

	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		missing = end - first - allocated_length(version, first, end) - present;
	}
	r = kv_quota_promise(version, missing);
	if (r < 0)
		return r;
	r = reserve(core, missing);
	if (r == 0) {
		KV_LOCKED(&version->lock);
		r = ranges_add(version, first, end);
		if (r == 0)
			unwritten_add(version, missing);
		else
			kv_space_unreserve(core->space, missing);
	}
	kv_quota_grown(version, missing);
	return r;
}

int kv_promise_drop(struct kv_version *version, uint64_t first, uint64_t end)
{
	uint64_t present, gone;
	int r;

	{
		KV_LOCKED(&version->lock);
		if (!range_first(version, first, end))
			return 0;
		end = kv_min_u64(end, RB_MAX(kv_range_tree, &version->ranges)->end);
	}
	r = present_length(version, first, end, false, &present);
	if (r < 0)
		return r;
	KV_LOCKED(&version->lock);
	gone = allocated_length(version, first, end) - present;
	r = ranges_cut(version, first, end);
	if (r < 0)
		return r;
	unwritten_sub(version, gone);
	kv_space_unreserve(version->file->core->space, gone);
	return 0;
}

void kv_promise_clear(struct kv_version *version)
{
	struct kv_range *range;

	kv_space_unreserve(version->file->core->space, version->unwritten);
	unwritten_sub(version, version->unwritten);
	while ((range = RB_MIN(kv_range_tree, &version->ranges)))
		range_remove(version, range);
}

/* ---- Blocks that come and go ---- */

unsigned kv_promise_take(struct kv_version *version, uint32_t chunk, const struct kv_bits *bits)
{
	unsigned count = kv_promise_covers(version, chunk, bits);

	unwritten_sub(version, count);
	version->reserved += count;
	return count;
}

void kv_promise_return(struct kv_version *version, uint32_t chunk, const struct kv_bits *bits)
{
	unsigned count = kv_bits_count(bits), kept = kv_promise_covers(version, chunk, bits);

	assert(version->reserved >= count);
	version->reserved -= count;
	unwritten_add(version, kept);
	kv_space_unreserve(version->file->core->space, count - kept);
}

void kv_promise_keep(struct kv_version *version, uint64_t count)
{
	unwritten_add(version, count);
}

void kv_promise_cancel(struct kv_version *version, uint32_t chunk, const struct kv_slot *slot)
{
	struct kv_core *core = version->file->core;
	struct kv_bits bits;

	kv_slot_bits(slot, &bits);
	kv_space_renew(core->space, kv_slot_extents(slot), slot->extent_count);
	version->reserved += kv_bits_count(&bits);
	kv_promise_return(version, chunk, &bits);
}

/* ---- From version to version ---- */

void kv_promise_move(struct kv_version *version, struct kv_version *from)
{
	assert(RB_EMPTY(&version->ranges));
	version->ranges = from->ranges;
	version->unwritten = from->unwritten;
	RB_INIT(&from->ranges);
	from->unwritten = 0;
}

void kv_version_give_up(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	if (version->state == KV_VERSION_WRITING)
		return;
	kv_promise_clear(version);
	kv_charge_settle_locked(version);
}
