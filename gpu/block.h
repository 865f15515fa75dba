/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks: what the stretches of one file (hbm.h's entries) share. A block is one segment of device
 * memory with the bytes of one version of a file from one offset on, for one user. It is there
 * once, however many entries have it, and counts once against the budget.
 *
 *	           filled                     (the entry that made it has staged it)
 *	FILLING ----------> THERE
 *	   | failed
 *	   v
 *	 FAILED
 *
 * A block is found by new entries as long as one that has it can be found (live). When all that
 *have it are orphans, its segment is given up, but its bytes count until the last of them is gone.
 *
 * Threads: one. Errors: negative errno.
 */
#ifndef KVFS_GPU_BLOCK_H
#define KVFS_GPU_BLOCK_H

#include <bsd/sys/queue.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "fs/tree.h"
#include "gpu/pool.h"

enum kvg_block_state {
	KVG_BLOCK_FILLING,
	KVG_BLOCK_THERE,
	KVG_BLOCK_FAILED,
};

struct kvg_entry;
struct kvg_samples;

struct kvg_block_key {
	uint64_t ino;
	uint64_t version;
	uid_t uid;
	uint64_t first; /* offset in the file */
};

struct kvg_block {
	RB_ENTRY(kvg_block) by_key;
	struct kvg_block_key key;
	enum kvg_block_state state;
	struct kvg_entry *filler;    /* who stages it; while it is FILLING */
	struct kvg_segment *segment; /* NULL once it was given up */
	struct kvg_mapping *mapping; /* for writing, until it is there */
	uint64_t size;               /* bytes, of the segment */
	uint64_t *charged;           /* the user's sum that SIZE is in */
	struct kvg_samples *samples; /* of its bytes; freed with it; NULL: none are kept */
	unsigned users;              /* entries that have it */
	unsigned live;               /* of them, those that can be found */
	unsigned orphans;            /* of them, those that were not given back in time */
};

RB_HEAD(kvg_block_tree, kvg_block);

/* A plain value of the caller's. */
struct kvg_blocks {
	struct kvg_pool *pool;      /* outlives it */
	uint64_t orphaned;          /* bytes of blocks that only orphans have */
	struct kvg_block_tree tree; /* those that are live */
};

/* Calls EACH for all that are found. EACH changes none of that. */
void kvg_block_all(
	struct kvg_blocks *blocks, void (*each)(void *arg, struct kvg_block *block), void *arg);
/* NULL: there is none. */
struct kvg_block *kvg_block_find(struct kvg_blocks *blocks, const struct kvg_block_key *key);
/* The one that is found by KEY, taken for one more entry; NULL: there is none. */
struct kvg_block *kvg_block_take(struct kvg_blocks *blocks, const struct kvg_block_key *key);
/* A new one, FILLING, mapped for writing, taken for one entry; CHARGED grows by SIZE. -ENOMEM. */
int kvg_block_new(struct kvg_blocks *blocks, const struct kvg_block_key *key, uint64_t size,
	uint64_t *charged, struct kvg_block **ret_block);
/* An entry that has it lets it go. LIVE, ORPHAN: what that entry was. */
void kvg_block_put(struct kvg_blocks *blocks, struct kvg_block *block, bool live, bool orphan);
/* An entry that has it can be found no more. */
void kvg_block_hide(struct kvg_blocks *blocks, struct kvg_block *block);
/* An entry that has it is an orphan now. */
void kvg_block_orphan(struct kvg_blocks *blocks, struct kvg_block *block);
/* All of its bytes are there, and nobody writes to it any more. */
void kvg_block_filled(struct kvg_blocks *blocks, struct kvg_block *block);

#endif
