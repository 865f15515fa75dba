/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one user may have at once: open files, files open for writing, space of the store that
 * what he writes takes before it is published, and blocks in DRAM that are still to be written
 * back. Root and who mounts have no limits.
 *
 * A user's figures live while somebody has a reference: each handle has one, and each version that
 * is being written or written back. Threads: any. Errors: -EMFILE for files, -EDQUOT for space,
 * both at once: what frees them is the user's own doing, so nobody waits for it. Who has too much
 * to be written back is held back (charge.c): that is ours.
 */
#ifndef KVFS_FS_USERS_H
#define KVFS_FS_USERS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "fs/stats.h"

struct kv_users;
struct kv_user;

/* For each user; UINT64_MAX: no limit. */
struct kv_user_max {
	uint64_t files;
	uint64_t writers;
	uint64_t blocks;
	uint64_t dirty; /* blocks */
};

/* Counts in STATS what is refused. NULL: out of memory. */
struct kv_users *kv_users_new(const struct kv_user_max *max, struct kv_stats *stats);
/* Nobody may use a reference to a user any more. NULL is allowed. Returns NULL. */
struct kv_users *kv_users_free(struct kv_users *users);
/* Lines for `kvfs status`: the limits, and who has most of them. */
void kv_users_print(struct kv_users *users, FILE *out);

/*
 * UID opens a file: counts it, until kv_user_close. ret_user: a reference that goes with it, or
 * NULL for who has no limits.
 */
int kv_user_open(struct kv_users *users, uid_t uid, bool writes, struct kv_user **ret_user);
/* Whether kv_user_open would refuse, for who has other things to do before it. */
int kv_user_may_open(struct kv_users *users, uid_t uid, bool writes);
/* NULL is allowed, here and below. */
void kv_user_close(struct kv_user *user, bool writes);

struct kv_user *kv_user_ref(struct kv_user *user);
/* Returns NULL. */
struct kv_user *kv_user_unref(struct kv_user *user);

/* BLOCKS more, or fewer, that he writes and has not published. */
int kv_user_take(struct kv_user *user, uint64_t blocks);
void kv_user_give(struct kv_user *user, uint64_t blocks);

/* BLOCKS of his are in DRAM alone. */
void kv_user_dirtied(struct kv_user *user, uint64_t blocks);
/* Not any more. True if he had too many. */
bool kv_user_cleaned(struct kv_user *user, uint64_t blocks);
/* Whether he has too many. Both never wait. */
bool kv_user_is_over(struct kv_user *user);
/* Grows with every block of his that was cleaned. */
uint64_t kv_user_progress(struct kv_user *user);
/*
 * One of his writers is held back, until kv_user_let_go. False: so many are that others would lack
 * the threads; he must not be.
 */
#define KV_USER_HELD_MAX 64u
bool kv_user_hold(struct kv_user *user);
void kv_user_let_go(struct kv_user *user);

#endif
