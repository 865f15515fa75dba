/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What hbm.c (entries, maps, life), hbm_admit.c (what comes in), hbm_room.c (who has how much, and
 * what goes) and hbm_tick.c (what time does) share.
 */
#ifndef KVFS_GPU_HBM_INTERNAL_H
#define KVFS_GPU_HBM_INTERNAL_H

#include "fs/base.h"
#include "gpu/hbm.h"

TAILQ_HEAD(kvg_entry_queue, kvg_entry);
RB_HEAD(kvg_entry_tree, kvg_entry);

/* What one user has. Gone with his last entry. */
struct kvg_user {
	LIST_ENTRY(kvg_user) entry;
	uid_t uid;
	unsigned users;   /* entries of any kind */
	unsigned entries; /* of them, those with memory, also stale */
	uint64_t used;    /* bytes of his blocks */
	uint64_t coming;  /* bytes that revocations under way will bring */
	struct kvg_entry_queue lists[_KVG_LIST_MAX];
};

struct kvg_hbm {
	struct kvg_hbm_options options;
	struct kvg_pool pool;
	struct kvg_blocks blocks;
	struct kvg_entry_tree tree;
	struct kvg_entry_queue lists[_KVG_LIST_MAX];
	LIST_HEAD(, kvg_entry) stale;
	LIST_HEAD(, kvg_entry) revoked;  /* of them, those with a deadline */
	LIST_HEAD(, kvg_entry) expiring; /* of those in the tree */
	LIST_HEAD(, kvg_user) users;
	uint64_t coming; /* bytes, of all users */
	unsigned entries_max;
	unsigned entries; /* with memory, also stale */
	unsigned staging; /* of those in the tree; so the next */
	unsigned resident;
	uint64_t maps;
	uint64_t held; /* bytes */
	uint64_t evicted;
	int64_t expire_ms; /* nothing expires before */
	int64_t refill_ms; /* when to ask again for what is missing */
	int64_t forget_ms; /* when to look for failures to forget */
	struct kvg_ghosts ghosts;
};

/* ---- hbm.c ---- */

/* Of KEY's user, with no memory yet, found by nobody. NULL: no memory. */
struct kvg_entry *kvg_entry_new(struct kvg_hbm *hbm, const struct kvg_key *key);
/* One that was never linked. */
void kvg_entry_delete(struct kvg_entry *entry);
/* It can be found from now on. */
void kvg_entry_link(struct kvg_entry *entry);
void kvg_entry_free(struct kvg_entry *entry);

/* ---- hbm_room.c ---- */

/* UID's, taken for one more entry. NULL: no memory. */
struct kvg_user *kvg_user_take(struct kvg_hbm *hbm, uid_t uid);
void kvg_user_put(struct kvg_user *user);

/* ENTRY was used, or what can be done with it has changed: it goes to the end of its list. */
void kvg_room_used(struct kvg_entry *entry);
/* ENTRY leaves the tree. */
void kvg_room_leave(struct kvg_entry *entry);
/* ENTRY's revocation is over, in whatever way. */
void kvg_room_settled(struct kvg_entry *entry);
/* What was idle for longest goes, of USER, or with NULL of all. False: nothing is idle. */
bool kvg_room_evict(struct kvg_hbm *hbm, struct kvg_user *user);
/*
 * Room for one more entry of USER, of BYTES bytes, of which MISSING are not there yet. Errors as
 * kvg_hbm_admit.
 */
int kvg_room_make(struct kvg_hbm *hbm, struct kvg_user *user, uint64_t bytes, uint64_t missing,
	int64_t now_ms);

#endif
