/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Samples: a few blocks of each segment, at places that nobody can know, whose sums are kept, so
 * that it can be seen later whether the segment still holds what was loaded. Whoever has a
 * segment's descriptor may write to it on a GPU, and copies may go wrong unseen.
 *
 * A segment has KVG_SAMPLES of them, one in each of as many equal strips: what was written over two
 * strips or more is found for sure, less by chance.
 *
 * The checker copies samples back and compares, on a thread of its own; a check has a mapping of
 * its own of the segment, which may be freed meanwhile. Threads: all but that thread's work one.
 * Errors: negative errno.
 */
#ifndef KVFS_GPU_SAMPLE_H
#define KVFS_GPU_SAMPLE_H

#include <bsd/sys/queue.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu/backend.h"
#include "gpu/block.h"
#include "gpu/workers.h"

#define KVG_SAMPLES 64u
#define KVG_SAMPLE_SIZE 4096u

struct kvg_sample {
	uint64_t offset; /* in the segment */
	uint64_t sum;    /* XXH3-64 */
	bool known;      /* else it is learnt by the first check */
};

struct kvg_samples {
	struct kvg_sample each[KVG_SAMPLES]; /* by offset */
};

struct kvg_checker;

/* A check, from start to reap. */
struct kvg_check {
	struct kvg_task task; /* first member */
	STAILQ_ENTRY(kvg_check) entry;
	struct kvg_checker *checker;
	struct kvg_mapping *mapping;
	struct kvg_samples samples; /* when it is reaped, with those that were learnt */
	struct kvg_block_key key;   /* the caller's; so the next */
	void *arg;
	int result; /* 0; -EBADMSG: some sample is not what it was; others: nobody knows */
};

/* NULL: no memory, or no random numbers. USED: bytes of the segment that files have. */
struct kvg_samples *kvg_samples_new(uint64_t used);
/* Bytes [OFFSET, OFFSET + LENGTH) of the segment, as they should be, are at MEMORY. */
void kvg_samples_take(
	struct kvg_samples *samples, const void *memory, uint64_t offset, uint64_t length);

int kvg_checker_new(struct kvg_backend *backend, struct kvg_checker **ret_checker);
/* Waits for what is under way. NULL is allowed. Returns NULL. */
struct kvg_checker *kvg_checker_free(struct kvg_checker *checker);
/* Readable when a check has ended. */
int kvg_checker_fd(const struct kvg_checker *checker);
/* Begins to check SEGMENT against SAMPLES, which are copied. */
int kvg_checker_start(struct kvg_checker *checker, struct kvg_segment *segment,
	const struct kvg_samples *samples, const struct kvg_block_key *key, void *arg);
/* One that has ended, the caller's to kvg_check_free; NULL: there is none. */
struct kvg_check *kvg_checker_reap(struct kvg_checker *checker);
void kvg_check_free(struct kvg_check *check);

#endif
