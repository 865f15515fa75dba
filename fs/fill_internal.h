/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What fill.c (who wants what) and fill_run.c (reading and checking it) share.
 */
#ifndef KVFS_FS_FILL_INTERNAL_H
#define KVFS_FS_FILL_INTERNAL_H

#include "fs/core_internal.h"

/*
 * A run of chunks to be read. Into the object: the slots are BUSY and charged, the job holds a
 * reference, and a busy count a chunk, and frees itself. Into MEMORY, which is the job's: one COLD
 * chunk; the job frees itself only if the waiter has left it.
 */
struct kv_fill {
	TAILQ_ENTRY(kv_fill) entry;
	struct kv_version *version; /* counted */
	uint32_t first;
	uint32_t count;
	struct kv_bits bits; /* blocks of the last chunk; those before it are whole */
	uint64_t devices;    /* a bit for each that is known to have some of it */
	void *memory;
	bool stored; /* what the device holds, also if DRAM has it */
	bool ours;   /* with MEMORY: the slot is BUSY for this job */
	/* Guarded by the version's lock. */
	bool done;
	bool left;
	int result;
};

struct kv_fill_batch {
	struct kv_fill **jobs;
	unsigned count;
	/* Room for a chunk, if no others are being filled: its first chunk is read there while its
	 * pages are made. */
	void *staging;
};

/* Frees a job with MEMORY. */
void kv_fill_free(struct kv_fill *job);
/* Runs the jobs and ends them. RING_ERROR: there is no ring, all fail with it. */
void kv_fill_run(
	struct kv_core *core, struct kv_ring *ring, int ring_error, struct kv_fill_batch batch);

#endif
