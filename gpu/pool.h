/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the segments of hbm.c come from: what its entries do not take of the budget is kept as
 * spare segments, so that nobody else takes it from the device. All are free of other users' bytes.
 *
 * A plain value of the caller's. Threads: one. Errors: negative errno.
 */
#ifndef KVFS_GPU_POOL_H
#define KVFS_GPU_POOL_H

#include <bsd/sys/queue.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu/backend.h"

struct spare;

struct kvg_pool {
	struct kvg_backend *backend;
	uint64_t budget;  /* bytes; the caller's, as the next four */
	uint64_t segment; /* bytes: size of spares */
	uint64_t margin;  /* bytes of the device's memory that are left to others; 0: do not look */
	bool zeroed;      /* new segments hold zeros */
	uint64_t used;    /* bytes that count against the budget, without the spares */
	uint64_t spare_bytes;
	LIST_HEAD(, spare) spares; /* never exported */
};

/* Takes from the device what the budget has left. -ENOMEM: it has not so much. */
int kvg_pool_fill(struct kvg_pool *pool);
/* A segment, the caller's to free with the backend; USED has SIZE in it already. -ENOMEM. */
int kvg_pool_take(struct kvg_pool *pool, uint64_t size, struct kvg_segment **ret_segment);
/* Bytes of the budget that the device had no room for when they were to be taken again. */
uint64_t kvg_pool_missing(const struct kvg_pool *pool);
/* Frees all spares. */
void kvg_pool_drain(struct kvg_pool *pool);

#endif
