/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the space module share: the map of blocks in memory.
 *
 * A block is free, busy or used; per group and device there are counts of each. Bitmaps are loaded
 * group by group when needed and dropped when nothing in them differs from the index: a group that
 * is dirty or has busy blocks stays. Everything here is guarded by the space lock.
 */
#ifndef KVFS_INDEX_SPACE_INTERNAL_H
#define KVFS_INDEX_SPACE_INTERNAL_H

#include <bsd/sys/queue.h>

#include "index/index_internal.h"

enum kv_block_state {
	KV_BLOCK_FREE,
	KV_BLOCK_BUSY,
	KV_BLOCK_USED,
};

/* The bitmaps of one group. */
struct kv_group {
	TAILQ_ENTRY(kv_group) loaded; /* least recently used first */
	TAILQ_ENTRY(kv_group) dirty;
	bool is_dirty; /* used differs from what the index has */
	uint16_t device;
	uint64_t number;
	uint64_t used[KV_GROUP_WORDS];
	uint64_t busy[KV_GROUP_WORDS];
};
TAILQ_HEAD(kv_group_list, kv_group);

struct kv_group_count {
	uint16_t used;
	uint16_t busy;
};

/* 256 groups, those of one summary record. */
struct kv_span {
	uint32_t free;
	bool is_dirty;
};

struct kv_space_device {
	uint64_t blocks;
	uint64_t group_count;
	uint64_t free;
	uint64_t cursor; /* block behind the last one allocated */
	bool disabled;
	struct kv_group_count *counts; /* by group */
	struct kv_group **groups;      /* by group, NULL: not loaded */
	struct kv_span *spans;
};

struct kv_space {
	struct kv_index *index;
	pthread_mutex_t lock;
	uint64_t total;
	uint64_t used;
	uint64_t busy;
	uint64_t freed; /* of the busy ones: those that an operation freed */
	uint64_t reserved;
	uint64_t durable; /* sequence */
	uint32_t device_count;
	struct kv_space_device devices[KV_DEVICES_MAX];
	struct kv_group_list loaded;
	struct kv_group_list dirty;
	size_t loaded_count;
	size_t loaded_max; /* at least 64, so that a group stays while an extent is worked on */
	/* Handed over by kv_space_release, waiting to be durable; room for `expected` more. */
	struct kv_freed *releases;
	size_t release_count;
	size_t release_capacity;
	size_t expected;
	/* By device and start: releases to come of extents that are in use again. */
	struct kv_overlay adopted;
};

static inline uint32_t kv_group_blocks(const struct kv_space_device *device, uint64_t number)
{
	return (uint32_t)kv_min_u64(KV_GROUP_BLOCKS, device->blocks - number * KV_GROUP_BLOCKS);
}

/* Blocks of the group that can be allocated. */
static inline uint32_t kv_group_free(const struct kv_space_device *device, uint64_t number)
{
	const struct kv_group_count *count = &device->counts[number];

	return kv_group_blocks(device, number) - count->used - count->busy;
}

/*
 * The group, loaded. -EUCLEAN: its record is damaged; then nothing is allocated in it any more.
 * Valid until others are loaded.
 */
int kv_space_load(struct kv_space *space, struct kv_view *view, uint16_t device, uint64_t number,
	struct kv_group **ret_group);
/* 1 if all blocks are in STATE, else 0, or an error. Loads their groups. */
int kv_space_is(struct kv_space *space, struct kv_view *view, const struct kv_extent *extent,
	enum kv_block_state state);
/* The blocks, of loaded groups, go from one state to the other: assert()s that they are in FROM. */
void kv_space_move(struct kv_space *space, const struct kv_extent *extent, enum kv_block_state from,
	enum kv_block_state to);

/* One release to come is not to free the extent: 0 or -ENOMEM. */
int kv_space_adopt(struct kv_space *space, const struct kv_extent *extent);
/* True if there is such a release to come; it is then accounted for. */
bool kv_space_unadopt(struct kv_space *space, const struct kv_extent *extent);

#endif
