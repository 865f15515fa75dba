/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What another process has left in DRAM, a daemon that was killed or has made way: found by its
 * files when they are asked for, and what is not asked for by a thread.
 *
 * Any thread. The list does not change after kv_adopt_start; its lock is a leaf.
 */
#ifndef KVFS_FS_ADOPT_INTERNAL_H
#define KVFS_FS_ADOPT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "fs/unsettled_internal.h"

struct kv_core;
struct kv_found;
struct kv_legacy;
struct kv_version;

struct kv_legacies {
	pthread_mutex_t lock;
	struct kv_legacy *list; /* by ino and version */
	size_t count;
	_Atomic size_t left; /* that nobody has taken yet */
};

/* Lists what there is, and starts the thread. */
int kv_adopt_start(struct kv_core *core);
void kv_adopt_done(struct kv_core *core);
/* Gives VERSION, fresh from the index and the caller's alone, the object that was left of it. */
void kv_version_adopt(struct kv_version *version);
/* Waits for kv_core_go_on, or the end: before that nothing that was left may be freed. */
void kv_core_await_word(struct kv_core *core);
/* Hands an object that has all of version NUMBER of INO to the caller, if one was left. -ENOENT. */
int kv_adopt_whole(struct kv_core *core, uint64_t ino, uint64_t number, struct kv_found *ret_found);
/* Lock held. Says of VERSION's object what another process may make of it. On failure a mark may
 * say more than is so from here on. */
int kv_version_mark_locked(struct kv_version *version);

#endif
