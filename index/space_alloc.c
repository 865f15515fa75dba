/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocation: next-fit on each device. First a contiguous run, looked for in a few groups behind
 * the last allocation; then pieces, in the order of the device; then the same on the other devices.
 */
#include "index/space_internal.h"

/* Groups with enough free blocks that are searched for one run before pieces are taken. */
#define RUN_TRIES 8u

struct alloc {
	struct kv_space *space;
	struct kv_view *view;
	uint32_t left;  /* blocks wanted */
	uint32_t block; /* of the chunk, for the next extent */
	struct kv_extent *extents;
	int count;
};

struct run {
	uint32_t start; /* in the group */
	uint32_t count;
};

/* The first block at or behind FROM that is free (or is not), or LIMIT. */
static uint32_t next_bit(const struct kv_group *group, uint32_t from, uint32_t limit, bool is_free)
{
	while (from < limit) {
		uint64_t taken = group->used[from / 64] | group->busy[from / 64];
		uint64_t bits = (is_free ? ~taken : taken) >> (from % 64);

		if (bits != 0)
			return (uint32_t)kv_min_u64(from + (uint32_t)__builtin_ctzll(bits), limit);
		from = (from / 64 + 1) * 64;
	}
	return limit;
}

/* The next free run at or behind FROM, cut to WANT; count 0: none. */
static struct run next_run(
	const struct kv_group *group, uint32_t from, uint32_t limit, uint32_t want)
{
	uint32_t start = next_bit(group, from, limit, true);
	uint32_t end = (uint32_t)kv_min_u64(limit, (uint64_t)start + want);

	return (struct run){start, next_bit(group, start, end, false) - start};
}

static void take(struct alloc *alloc, const struct kv_group *group, struct run run)
{
	struct kv_extent extent = {
		.start = group->number * KV_GROUP_BLOCKS + run.start,
		.device = group->device,
		.block = (uint16_t)alloc->block,
		.count = run.count,
	};
	struct kv_extent *last = alloc->count > 0 ? &alloc->extents[alloc->count - 1] : NULL;

	kv_space_move(alloc->space, &extent, KV_BLOCK_FREE, KV_BLOCK_BUSY);
	if (last && last->device == extent.device && last->start + last->count == extent.start)
		last->count += extent.count;
	else
		alloc->extents[alloc->count++] = extent;
	alloc->left -= run.count;
	alloc->block += run.count;
	alloc->space->devices[group->device].cursor = extent.start + extent.count;
}

/* The first group at or behind NUMBER with WANT free blocks, or the number of groups. */
static uint64_t next_group(const struct kv_space_device *device, uint64_t number, uint32_t want)
{
	while (number < device->group_count) {
		if (device->spans[number / KV_SUMMARY_GROUPS].free < want) {
			number = (number / KV_SUMMARY_GROUPS + 1) * KV_SUMMARY_GROUPS;
			continue;
		}
		if (kv_group_free(device, number) >= want)
			return number;
		number++;
	}
	return device->group_count;
}

/* A damaged group is out of the counts now: going on without it is right. */
static int load(struct alloc *alloc, uint16_t device, uint64_t number, struct kv_group **ret_group)
{
	int r = kv_space_load(alloc->space, alloc->view, device, number, ret_group);

	return r == -EUCLEAN ? 0 : r < 0 ? r : 1;
}

/* Takes runs of at least WANT blocks behind FROM until nothing is left to allocate. */
static void alloc_group(
	struct alloc *alloc, const struct kv_group *group, uint32_t from, uint32_t want)
{
	const struct kv_space_device *device = &alloc->space->devices[group->device];
	uint32_t limit = kv_group_blocks(device, group->number);
	struct run run = {from, 0};

	while (alloc->left > 0) {
		run = next_run(group, run.start + run.count, limit, alloc->left);
		if (run.count == 0)
			return;
		if (run.count >= want)
			take(alloc, group, run);
	}
}

/*
 * Walks the groups with WANT free blocks in two rounds: from the cursor to the end, then from the
 * start to the cursor's group again. TRIES bounds how many are looked at.
 */
static int alloc_walk(struct alloc *alloc, uint16_t number, uint32_t want, unsigned tries)
{
	struct kv_space_device *device = &alloc->space->devices[number];
	uint64_t cursor = device->cursor < device->blocks ? device->cursor : 0;
	uint64_t first = cursor / KV_GROUP_BLOCKS;
	uint32_t from = (uint32_t)(cursor % KV_GROUP_BLOCKS);

	for (unsigned round = 0; round < 2; round++) {
		uint64_t at = next_group(device, round == 0 ? first : 0, want);
		uint64_t end = round == 0 ? device->group_count : first + 1;

		for (; at < end && alloc->left > 0 && tries > 0; tries--) {
			struct kv_group *group;
			int r = load(alloc, number, at, &group);

			if (r < 0)
				return r;
			if (r > 0)
				alloc_group(
					alloc, group, round == 0 && at == first ? from : 0, want);
			at = next_group(device, at + 1, want);
		}
	}
	return 0;
}

static int alloc_device(struct alloc *alloc, uint16_t number)
{
	struct kv_space_device *device = &alloc->space->devices[number];
	int r = 0;

	if (device->disabled || device->free == 0)
		return 0;
	if (device->free >= alloc->left)
		r = alloc_walk(alloc, number, alloc->left, RUN_TRIES);
	if (r == 0 && alloc->left > 0)
		r = alloc_walk(alloc, number, 1, UINT32_MAX);
	return r;
}

static int alloc_blocks(struct alloc *alloc, uint16_t device)
{
	struct kv_space *space = alloc->space;
	uint32_t blocks = alloc->left;
	int r = 0;

	for (uint32_t i = 0; i < space->device_count && alloc->left > 0 && r == 0; i++)
		r = alloc_device(alloc, (uint16_t)((device + i) % space->device_count));
	if (alloc->left == 0) {
		space->reserved -= blocks;
		return alloc->count;
	}
	for (int i = 0; i < alloc->count; i++)
		kv_space_move(space, &alloc->extents[i], KV_BLOCK_BUSY, KV_BLOCK_FREE);
	return r < 0 ? -EIO : -ENOSPC;
}

int kv_space_alloc(struct kv_space *space, uint16_t device, uint32_t blocks, uint16_t first_block,
	struct kv_extent *ret_extents)
{
	struct kv_view view;
	struct alloc alloc = {
		.space = space,
		.view = &view,
		.left = blocks,
		.block = first_block,
		.extents = ret_extents,
	};
	int r;

	assert(blocks >= 1 && first_block + blocks <= KV_CHUNK_BLOCKS);
	assert(device < space->device_count);
	kv_view_begin(&view, space->index);
	(void)pthread_mutex_lock(&space->lock);
	assert(space->reserved >= blocks);
	r = alloc_blocks(&alloc, device);
	(void)pthread_mutex_unlock(&space->lock);
	kv_view_end(&view);
	return r;
}
