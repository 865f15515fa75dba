/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What dram.c (budget and mount) and object.c (objects and their descriptors) share.
 *
 * The tier's lock guards everything marked so. It is a leaf: nothing is called under it but
 * short system calls on the tier's own descriptors.
 */
#ifndef KVFS_FS_DRAM_INTERNAL_H
#define KVFS_FS_DRAM_INTERNAL_H

#include <bsd/sys/queue.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "fs/dram.h"

struct kv_object {
	struct kv_dram *dram;
	struct kv_mark mark;         /* lock; its name */
	int fd;                      /* lock; -1: closed, to be opened by name */
	unsigned users;              /* lock; borrowed descriptors */
	TAILQ_ENTRY(kv_object) idle; /* lock; on idle_objects while open and unused (tmpfs only) */
};

struct kv_dram {
	struct kv_dram_options options;
	uint64_t slack;       /* bytes of the tmpfs beyond the budget: zombies live there first */
	uint64_t size_normal; /* size= of the tmpfs: budget and slack */
	int mount_fd;         /* -1: memfds */
	bool huge;
	unsigned objects_max; /* memfds only: descriptors the process may have, less a reserve */
	unsigned idle_max;    /* open descriptors of unused objects */

	pthread_mutex_t lock;
	pthread_cond_t given_back;
	uint64_t size;                        /* lock; size= now: raised by kv_dram_make_room */
	uint64_t charged;                     /* lock */
	unsigned waiters;                     /* lock; threads that wait on given_back */
	unsigned objects;                     /* lock */
	TAILQ_HEAD(, kv_object) idle_objects; /* lock; least recently used first */
	unsigned idle_count;                  /* lock */
};

/* Four 64-bit numbers in hexadecimal, points between them and a NUL. */
#define KV_OBJECT_NAME_SIZE 68
void kv_mark_name(const struct kv_mark *mark, char ret_name[KV_OBJECT_NAME_SIZE]);

/*
 * The tmpfs is full although its pages were charged for: raises its size by a step. False if it may
 * not grow any more. kv_dram_uncharge lowers it again.
 */
bool kv_dram_make_room(struct kv_dram *dram);

#endif
