/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Free space of a store's devices.
 *
 * The index keeps a bitmap a group of blocks; this module keeps, in memory, what the bitmaps cannot
 * know: blocks allocated for writes that are not committed ("busy"), and freed blocks that must
 * not be used again yet, because the freeing commit is not on stable storage. A block moves
 *     free -> busy (kv_space_alloc) -> used (kv_index_publish) -> busy (freed by an operation) ->
 * free (durable) and the counts always satisfy used + busy + reserved <= total. Start-up reads
 * group summaries, never files. Owned by the index. Any thread may call; the space lock is a leaf
 * (below the index lock).
 */
#ifndef KVFS_INDEX_SPACE_H
#define KVFS_INDEX_SPACE_H

#include <stddef.h>
#include <stdint.h>

#include "fs/base.h"
#include "index/index.h"

struct kv_space_usage {
	uint64_t total;    /* blocks: the devices, or the quota if smaller */
	uint64_t used;     /* held by committed or pending content */
	uint64_t busy;     /* being written, or freed and not yet reusable */
	uint64_t freed;    /* the latter of these */
	uint64_t reserved; /* promised to accepted writes */
};
void kv_space_usage(struct kv_space *space, struct kv_space_usage *ret_usage);

/* Promises BLOCKS to the caller: -ENOSPC if total would be exceeded. Never waits. */
int kv_space_reserve(struct kv_space *space, uint64_t blocks);
/* Gives back a promise that was not turned into blocks. */
void kv_space_unreserve(struct kv_space *space, uint64_t blocks);

/*
 * Turns BLOCKS (1 to KV_CHUNK_BLOCKS) of the caller's reservation into extents: on device DEVICE if
 * it has room, else on others; contiguous if possible, in pieces if not. The extents' `block`
 * fields count up from FIRST_BLOCK. ret_extents has room for BLOCKS entries. Returns their number,
 * or -ENOSPC (the reservation is kept), or -EIO if the index cannot be read.
 */
int kv_space_alloc(struct kv_space *space, uint16_t device, uint32_t blocks, uint16_t first_block,
	struct kv_extent *ret_extents);

/* Returns allocated extents that were never committed; they are free at once. */
void kv_space_cancel(struct kv_space *space, const struct kv_extent *extents, size_t count);

/* The same, but the blocks stay promised to the caller: they can be allocated again without fail.
 */
void kv_space_renew(struct kv_space *space, const struct kv_extent *extents, size_t count);

/* Takes over FREED (and empties it): its blocks become free when its operation is durable. Never
 * waits. */
void kv_space_release(struct kv_space *space, struct kv_freed *freed);

/* A device that failed: nothing more is allocated on it. */
void kv_space_disable(struct kv_space *space, uint16_t device);

#endif
