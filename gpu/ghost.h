/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ghosts: files that were opened lately and are not in device memory. The second hint within a
 * while makes one worth staging, so that what is read once throws nothing out.
 *
 * A plain value of the caller's, zero at first. Threads: one.
 */
#ifndef KVFS_GPU_GHOST_H
#define KVFS_GPU_GHOST_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Hints: the second one within this time stages. */
#define KVG_GHOST_MS 60000
#define KVG_GHOSTS_MAX 4096u

struct kvg_ghost {
	uint64_t ino;
	uint64_t version;
	uid_t uid;
	bool used;
	int64_t when_ms;
};

struct kvg_ghosts {
	struct kvg_ghost slots[KVG_GHOSTS_MAX]; /* by a hash: the newer one stays */
};

/* Whether this hint is the second one within KVG_GHOST_MS. */
bool kvg_ghost_hint(
	struct kvg_ghosts *ghosts, uint64_t ino, uint64_t version, uid_t uid, int64_t now_ms);

#endif
