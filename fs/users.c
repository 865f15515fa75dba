/* SPDX-License-Identifier: Apache-2.0 */
/* Limits of users: see users.h. One lock for all: it is held for a few instructions an open. */

#include "fs/users.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "fs/base.h"
#include "fs/tree.h"

/* As many are named in a report: an attribute has 64 KiB for all of it. */
#define SHOWN_MAX 64u

struct kv_user {
	RB_ENTRY(kv_user) entry;
	struct kv_users *users;
	uid_t uid;
	/* Guarded by the lock of them all. */
	unsigned refs;
	uint64_t files;
	uint64_t writers;
	uint64_t blocks;
	/* Not guarded: they change with each write. */
	_Atomic uint64_t dirty; /* blocks */
	_Atomic uint64_t cleaned;
	_Atomic unsigned held;
};
RB_HEAD(user_tree, kv_user);

struct kv_users {
	pthread_mutex_t lock;
	struct kv_user_max max;
	struct kv_stats *stats;
	struct user_tree tree;
	uid_t owner;
	unsigned count;
};

static int compare_uids(struct kv_user *a, struct kv_user *b)
{
	return a->uid < b->uid ? -1 : a->uid > b->uid;
}

KV_TREE_GENERATE(user_tree, kv_user, entry, compare_uids)

struct kv_users *kv_users_new(const struct kv_user_max *max, struct kv_stats *stats)
{
	struct kv_users *users = calloc(1, sizeof(*users));

	if (!users)
		return NULL;
	(void)pthread_mutex_init(&users->lock, NULL);
	users->max = *max;
	users->stats = stats;
	users->owner = geteuid();
	RB_INIT(&users->tree);
	return users;
}

struct kv_users *kv_users_free(struct kv_users *users)
{
	if (!users)
		return NULL;
	struct kv_user *user;

	/* Of handles that the kernel has not released: it is gone. */
	while ((user = RB_ROOT(&users->tree))) {
		RB_REMOVE(user_tree, &users->tree, user);
		free(user);
	}
	(void)pthread_mutex_destroy(&users->lock);
	free(users);
	return NULL;
}

static bool has_none(const struct kv_users *users, uid_t uid)
{
	return uid == 0 || uid == users->owner;
}

/* ---- Users; the lock is held ---- */

static struct kv_user *find(struct kv_users *users, uid_t uid)
{
	struct kv_user key = {.uid = uid};

	return RB_FIND(user_tree, &users->tree, &key);
}

static struct kv_user *find_or_make(struct kv_users *users, uid_t uid)
{
	struct kv_user *user = find(users, uid);

	if (user)
		return user;
	user = calloc(1, sizeof(*user));
	if (!user)
		return NULL;
	user->users = users;
	user->uid = uid;
	RB_INSERT(user_tree, &users->tree, user);
	users->count++;
	return user;
}

static void drop(struct kv_user *user)
{
	assert(user->refs > 0);
	if (--user->refs > 0)
		return;
	assert(user->files == 0 && user->writers == 0 && user->blocks == 0 && user->dirty == 0);
	RB_REMOVE(user_tree, &user->users->tree, user);
	user->users->count--;
	free(user);
}

static int check_open(const struct kv_users *users, const struct kv_user *user, bool writes)
{
	if (!user ||
		(user->files < users->max.files && (!writes || user->writers < users->max.writers)))
		return 0;
	kv_stat_add(&users->stats->limited, 1);
	return -EMFILE;
}

/* ---- Files ---- */

int kv_user_may_open(struct kv_users *users, uid_t uid, bool writes)
{
	if (has_none(users, uid))
		return 0;
	KV_LOCKED(&users->lock);

	return check_open(users, find(users, uid), writes);
}

int kv_user_open(struct kv_users *users, uid_t uid, bool writes, struct kv_user **ret_user)
{
	struct kv_user *user;
	int r;

	*ret_user = NULL;
	if (has_none(users, uid))
		return 0;
	KV_LOCKED(&users->lock);
	user = find_or_make(users, uid);
	if (!user)
		return -ENOMEM;
	/* One that was just made has nothing yet, and no limit is 0. */
	r = check_open(users, user, writes);
	if (r < 0)
		return r;
	user->refs++;
	user->files++;
	user->writers += writes;
	*ret_user = user;
	return 0;
}

void kv_user_close(struct kv_user *user, bool writes)
{
	if (!user)
		return;
	KV_LOCKED(&user->users->lock);

	assert(user->files > 0 && user->writers >= (writes ? 1 : 0));
	user->files--;
	user->writers -= writes;
	drop(user);
}

struct kv_user *kv_user_ref(struct kv_user *user)
{
	if (!user)
		return NULL;
	KV_LOCKED(&user->users->lock);

	assert(user->refs > 0);
	user->refs++;
	return user;
}

struct kv_user *kv_user_unref(struct kv_user *user)
{
	if (!user)
		return NULL;
	KV_LOCKED(&user->users->lock);

	drop(user);
	return NULL;
}

/* ---- Space ---- */

int kv_user_take(struct kv_user *user, uint64_t blocks)
{
	if (!user)
		return 0;
	KV_LOCKED(&user->users->lock);
	uint64_t max = user->users->max.blocks;

	if (blocks > max || user->blocks > max - blocks) {
		kv_stat_add(&user->users->stats->limited, 1);
		return -EDQUOT;
	}
	user->blocks += blocks;
	return 0;
}

void kv_user_give(struct kv_user *user, uint64_t blocks)
{
	if (!user)
		return;
	KV_LOCKED(&user->users->lock);

	assert(user->blocks >= blocks);
	user->blocks -= blocks;
}

/* ---- Blocks to be written back ---- */

void kv_user_dirtied(struct kv_user *user, uint64_t blocks)
{
	if (user)
		(void)atomic_fetch_add(&user->dirty, blocks);
}

bool kv_user_cleaned(struct kv_user *user, uint64_t blocks)
{
	if (!user)
		return false;
	uint64_t before = atomic_fetch_sub(&user->dirty, blocks);

	assert(before >= blocks);
	(void)atomic_fetch_add(&user->cleaned, blocks);
	return before > user->users->max.dirty;
}

bool kv_user_is_over(struct kv_user *user)
{
	return user && atomic_load(&user->dirty) > user->users->max.dirty;
}

uint64_t kv_user_progress(struct kv_user *user)
{
	return atomic_load(&user->cleaned);
}

bool kv_user_hold(struct kv_user *user)
{
	if (atomic_fetch_add(&user->held, 1) < KV_USER_HELD_MAX)
		return true;
	kv_user_let_go(user);
	return false;
}

void kv_user_let_go(struct kv_user *user)
{
	unsigned before = atomic_fetch_sub(&user->held, 1);

	assert(before > 0);
	(void)before;
}

/* ---- The report ---- */

/* How much of what he may have a user has, of what he has most of: in thousandths. */
static uint64_t share_of(const struct kv_user *user)
{
	const struct kv_user_max *max = &user->users->max;
	uint64_t files = user->files / (max->files / 1000 + 1);
	uint64_t writers = user->writers / (max->writers / 1000 + 1);
	uint64_t blocks = user->blocks / (max->blocks / 1000 + 1);
	uint64_t dirty = user->dirty / (max->dirty / 1000 + 1);

	return kv_max_u64(kv_max_u64(files, writers), kv_max_u64(blocks, dirty));
}

static int compare_shares(const void *a, const void *b)
{
	uint64_t ours = share_of(a), theirs = share_of(b);

	return ours > theirs ? -1 : ours < theirs;
}

static void print_max(FILE *out, const char *name, uint64_t max, uint64_t unit)
{
	fprintf(out, "%s %" PRIu64 "\n", name, max == UINT64_MAX ? 0 : max * unit);
}

void kv_users_print(struct kv_users *users, FILE *out)
{
	_cleanup_free_ struct kv_user *list = NULL;
	unsigned count = 0;
	struct kv_user *user;
	KV_LOCKED(&users->lock);

	print_max(out, "user_files", users->max.files, 1);
	print_max(out, "user_writers", users->max.writers, 1);
	print_max(out, "user_space", users->max.blocks, KV_BLOCK_SIZE);
	print_max(out, "user_dirty", users->max.dirty, KV_BLOCK_SIZE);
	list = calloc(users->count + 1, sizeof(*list));
	if (!list)
		return;
	RB_FOREACH (user, user_tree, &users->tree)
		list[count++] = *user;
	qsort(list, count, sizeof(*list), compare_shares);
	for (unsigned i = 0; i < count && i < SHOWN_MAX; i++)
		fprintf(out, "user %u %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n",
			list[i].uid, list[i].files, list[i].writers, list[i].blocks * KV_BLOCK_SIZE,
			list[i].dirty * KV_BLOCK_SIZE);
}
