/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The watermark page: how much of a file is in device memory, from its start. One page of shared
 * memory a file being staged: the helper writes, clients map it for reading and sleep on
 * `sequence`.
 */
#ifndef KVFS_GPU_WATERMARK_H
#define KVFS_GPU_WATERMARK_H

#include <assert.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define KVG_WATERMARK_SIZE 4096u

struct kvg_watermark {
	_Atomic uint64_t staged;   /* bytes; all of them are there for who loads this (acquire) */
	_Atomic uint32_t sequence; /* grows with every change: a futex */
	_Atomic int32_t status;    /* 0, or a negative errno: there will be no more */
};
static_assert(sizeof(struct kvg_watermark) == 16, "shared between processes");

static inline void kvg_watermark_set(struct kvg_watermark *mark, uint64_t staged, int status)
{
	/* Pairs with the loads of who waits. */
	atomic_store_explicit(&mark->staged, staged, memory_order_release);
	atomic_store_explicit(&mark->status, status, memory_order_release);
	atomic_fetch_add_explicit(&mark->sequence, 1, memory_order_release);
	(void)syscall(SYS_futex, &mark->sequence, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sleeps until the page changes from SEQUENCE, or a while. */
static inline void kvg_watermark_sleep(const struct kvg_watermark *mark, uint32_t sequence, int ms)
{
	const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};

	(void)syscall(SYS_futex, &mark->sequence, FUTEX_WAIT, sequence, &time, NULL, 0);
}

#endif
