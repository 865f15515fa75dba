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

#define KV_FILL_BATCH_JOBS 64u

struct kv_fill_batch {
	struct kv_fill *jobs[KV_FILL_BATCH_JOBS];
	unsigned count;
	uint64_t devices; /* of all jobs, as far as is known; 0: of one it is not */
	/* Room for a job's chunks, if no others are being filled: they are read there while its
	 * pages are made. */
	void *staging;
};

/* Frees a job with MEMORY. */
void kv_fill_free(struct kv_fill *job);
/* A batch on its way, by one thread and its ring. */
struct kv_fill_run;

/* A ring for the two below. */
int kv_fill_ring_new(struct kv_core *core, struct kv_ring **ret_ring);
struct kv_ring *kv_fill_ring_free(struct kv_ring *ring);
/*
 * Finds memory and extents for the jobs of BATCH, which stays where it is. START: and asks the
 * devices for them. NULL: they have failed, all of them, as they do with RING_ERROR.
 */
struct kv_fill_run *kv_fill_prepare(struct kv_core *core, struct kv_ring *ring, int ring_error,
	struct kv_fill_batch *batch, bool start);
/*
 * Waits for what RUN has asked the devices for, checks it, and ends its jobs. NEXT, which may be
 * NULL, is prepared but not started: it is as soon as the devices have answered, before anything
 * else.
 */
void kv_fill_finish(struct kv_fill_run *run, struct kv_fill_run *next);

#endif
