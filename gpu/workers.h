/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A few threads that do small tasks: checksums, reads that may block, registrations.
 *
 * Tasks belong to the caller, who keeps one alive until it is done; done is seen with everything
 * that the task wrote. With no threads a task is done when start returns. Threads: start by one at
 * a time, done by any.
 */
#ifndef KVFS_GPU_WORKERS_H
#define KVFS_GPU_WORKERS_H

#include <bsd/sys/queue.h>
#include <stdatomic.h>
#include <stdbool.h>

struct kvg_workers;

struct kvg_task {
	STAILQ_ENTRY(kvg_task) entry;
	void (*run)(struct kvg_task *task);
	_Atomic bool done;
};

/* Negative errno. */
int kvg_workers_new(unsigned threads, struct kvg_workers **ret_workers);
/*
 * Waits until all tasks are done. ABANDON: does not wait for threads that are in one, and frees
 * nothing then. NULL is allowed. Returns NULL.
 */
struct kvg_workers *kvg_workers_free(struct kvg_workers *workers, bool abandon);
void kvg_workers_start(struct kvg_workers *workers, struct kvg_task *task);

static inline bool kvg_task_is_done(const struct kvg_task *task)
{
	/* Pairs with the store in workers.c. */
	return atomic_load_explicit((_Atomic bool *)&task->done, memory_order_acquire);
}

#endif
