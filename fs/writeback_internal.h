/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What writeback.c (which chunks) and writeback_run.c (how) share.
 */
#ifndef KVFS_FS_WRITEBACK_INTERNAL_H
#define KVFS_FS_WRITEBACK_INTERNAL_H

#include "fs/core_internal.h"

/* Chunks in one run of the ring, of one version or of many. */
#define KV_BATCH_CHUNKS 64u

/* A chunk on its way to a device. Its slot has WRITEBACK; its blocks' promise is the job's. */
struct kv_batch_chunk {
	struct kv_version *version; /* counted */
	struct kv_blocks content;
	unsigned blocks;
	int buffer; /* ring buffer that holds it, or -1 */
	struct kv_extent *extents;
	unsigned extent_count;
	unsigned left; /* transfers */
	int result;
	unsigned promised; /* blocks that are not turned into extents */
	bool finished;
};

struct kv_mapping {
	void *memory;
	size_t length;
};

struct kv_batch {
	struct kv_batch_chunk chunks[KV_BATCH_CHUNKS];
	unsigned chunk_count;
	unsigned blocks; /* of all chunks */
	struct kv_mapping mappings[KV_BATCH_CHUNKS];
	unsigned mapping_count;
	int buffers[KV_BATCH_CHUNKS]; /* ring buffers in use */
	unsigned buffer_count;
	uint8_t *slab; /* the last of them */
	size_t slab_used;
	struct kv_io *ios;
	unsigned io_count;
	unsigned io_capacity;
};

struct kv_worker {
	struct kv_core *core;
	struct kv_ring *ring;
	int ring_error;
	unsigned member;       /* of the crew */
	unsigned spill_blocks; /* an early batch ends with the chunk that reaches that */
	struct kv_batch batch;
};

/*
 * Adds VERSION's dirty chunks from *CURSOR on that can be written now, until the batch is full or
 * has LIMIT blocks. True if there are more; *cursor is then the next one, else UINT32_MAX.
 */
bool kv_batch_collect(
	struct kv_batch *batch, struct kv_version *version, uint32_t *cursor, unsigned limit);
/* Writes the batch, settles its slots, and empties it. */
void kv_batch_run(struct kv_worker *worker);
void kv_batch_done(struct kv_worker *worker);

/* The version of its file that was published before is not settled. Shard locked. */
bool kv_version_must_wait_locked(struct kv_version *version);
/* A version of FILE was settled: those that waited for it are written. Shard locked. */
void kv_writeback_next_locked(struct kv_file *file);
/* Evicts files until the index is not short of room any more, or 256. False: nothing was gained. */
bool kv_core_index_room(struct kv_core *core);

#endif
