/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What fill.c (who wants what) and fill_run.c (reading and checking it) share.
 */
#ifndef KVFS_FS_FILL_INTERNAL_H
#define KVFS_FS_FILL_INTERNAL_H

#include "fs/core_internal.h"

/*
 * A run of chunks to be read. Into the object: the slots are BUSY and charged, the job holds a
 * reference and a busy count and frees itself. Into MEMORY: one COLD chunk, the job is the
 * waiter's.
 */
struct kv_fill {
	TAILQ_ENTRY(kv_fill) entry;
	struct kv_version *version;
	uint32_t first;
	uint32_t count;
	struct kv_bits bits; /* blocks of the last chunk; those before it are whole */
	void *memory;
	bool stored; /* what the device holds, also if DRAM has it */
	bool done;   /* version's lock */
	int result;  /* version's lock */
};

struct kv_fill_batch {
	struct kv_fill **jobs;
	unsigned count;
};

/* Runs the jobs and ends them. RING_ERROR: there is no ring, all fail with it. */
void kv_fill_run(
	struct kv_core *core, struct kv_ring *ring, int ring_error, struct kv_fill_batch batch);

#endif
