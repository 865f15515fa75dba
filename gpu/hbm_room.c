/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who has how much of device memory, and what goes when it is short: see hbm.h. Nothing here looks
 * at more entries than it lets go or asks for, however many there are.
 */
#include <errno.h>

#include "gpu/hbm_internal.h"

/* ---- Users ---- */

struct kvg_user *kvg_user_take(struct kvg_hbm *hbm, uid_t uid)
{
	struct kvg_user *user;

	LIST_FOREACH (user, &hbm->users, entry)
		if (user->uid == uid)
			break;
	if (!user) {
		user = calloc(1, sizeof(*user));
		if (!user)
			return NULL;
		user->uid = uid;
		for (unsigned i = 0; i < _KVG_LIST_MAX; i++)
			TAILQ_INIT(&user->lists[i]);
		LIST_INSERT_HEAD(&hbm->users, user, entry);
	}
	user->users++;
	return user;
}

void kvg_user_put(struct kvg_user *user)
{
	assert(user->users > 0);
	if (--user->users > 0)
		return;
	assert(user->used == 0 && user->coming == 0);
	LIST_REMOVE(user, entry);
	free(user);
}

/* ---- Lists ---- */

static enum kvg_list list_of(const struct kvg_entry *entry)
{
	if (entry->stale || entry->state == KVG_STAGING)
		return KVG_LIST_NONE;
	if (entry->state == KVG_FAILED)
		return KVG_LIST_FAILED;
	if (entry->map_count == 0)
		return KVG_LIST_IDLE;
	return entry->fixed == 0 ? KVG_LIST_LOOSE : KVG_LIST_NONE;
}

void kvg_room_leave(struct kvg_entry *entry)
{
	if (entry->list == KVG_LIST_NONE)
		return;
	TAILQ_REMOVE(&entry->hbm->lists[entry->list], entry, by_use);
	TAILQ_REMOVE(&entry->user->lists[entry->list], entry, by_use_of_user);
	entry->list = KVG_LIST_NONE;
}

void kvg_room_used(struct kvg_entry *entry)
{
	kvg_room_leave(entry);
	entry->list = list_of(entry);
	if (entry->list == KVG_LIST_NONE)
		return;
	TAILQ_INSERT_TAIL(&entry->hbm->lists[entry->list], entry, by_use);
	TAILQ_INSERT_TAIL(&entry->user->lists[entry->list], entry, by_use_of_user);
}

static struct kvg_entry *oldest(struct kvg_hbm *hbm, struct kvg_user *user, enum kvg_list list)
{
	return TAILQ_FIRST(user ? &user->lists[list] : &hbm->lists[list]);
}

/* ---- Eviction, revocation ---- */

bool kvg_room_evict(struct kvg_hbm *hbm, struct kvg_user *user)
{
	struct kvg_entry *entry = oldest(hbm, user, KVG_LIST_IDLE);

	if (!entry)
		return false;
	hbm->evicted++;
	kvg_entry_free(entry);
	return true;
}

void kvg_room_settled(struct kvg_entry *entry)
{
	if (entry->deadline_ms == 0)
		return;
	LIST_REMOVE(entry, revoked_entry);
	entry->deadline_ms = 0;
	entry->user->coming -= entry->bytes;
	entry->hbm->coming -= entry->bytes;
}

static void ask_back(struct kvg_hbm *hbm, struct kvg_entry *entry, int64_t now_ms)
{
	struct kvg_map *map, *after;

	entry->deadline_ms = now_ms + KVG_REVOKE_MS;
	entry->user->coming += entry->bytes;
	hbm->coming += entry->bytes;
	LIST_INSERT_HEAD(&hbm->revoked, entry, revoked_entry);
	kvg_hbm_stale(entry);
	for (map = LIST_FIRST(&entry->maps); map; map = after) {
		after = LIST_NEXT(map, of_entry);
		hbm->options.revoke(hbm->options.arg, map, entry->deadline_ms);
	}
}

/* Asks for what was not used for longest. It comes back later, for who tries again. */
static void revoke_oldest(
	struct kvg_hbm *hbm, struct kvg_user *user, uint64_t wanted, int64_t now_ms)
{
	struct kvg_entry *entry;

	for (uint64_t asked = 0; asked < wanted; asked += entry->bytes) {
		entry = oldest(hbm, user, KVG_LIST_LOOSE);
		if (!entry)
			return;
		ask_back(hbm, entry, now_ms);
	}
}

/* So that USER, or with NULL all, have no more than LIMIT with BYTES more. */
static int make_below(
	struct kvg_hbm *hbm, struct kvg_user *user, uint64_t limit, uint64_t bytes, int64_t now_ms)
{
	const uint64_t *used = user ? &user->used : &hbm->pool.used;
	uint64_t coming;

	while (*used + bytes > limit && kvg_room_evict(hbm, user))
		;
	if (*used + bytes <= limit)
		return 0;
	coming = user ? user->coming : hbm->coming;
	if (*used + bytes - limit > coming)
		revoke_oldest(hbm, user, *used + bytes - limit - coming, now_ms);
	return user ? -ENOBUFS : -ENOSPC;
}

/*
 * Stretches of the same bytes take no memory, but a watermark and a descriptor each: there are no
 * more than if they shared nothing.
 */
static int make_slot(struct kvg_hbm *hbm, struct kvg_user *user)
{
	const struct kvg_hbm_options *options = &hbm->options;
	uint64_t own = (uint64_t)hbm->entries_max * (options->share / options->granularity) /
		       (options->budget / options->granularity);

	while (options->share < options->budget && user->entries >= kv_max_u64(own, 1))
		if (!kvg_room_evict(hbm, user))
			return -ENOBUFS;
	while (hbm->entries >= hbm->entries_max)
		if (!kvg_room_evict(hbm, NULL))
			return -ENOSPC;
	return 0;
}

/* Who has his share makes room among his own; others' are left alone for it. */
int kvg_room_make(struct kvg_hbm *hbm, struct kvg_user *user, uint64_t bytes, uint64_t missing,
	int64_t now_ms)
{
	const struct kvg_hbm_options *options = &hbm->options;
	int r;

	if (bytes > options->share || bytes > options->budget)
		return -E2BIG;
	r = make_slot(hbm, user);
	if (r == 0 && options->share < options->budget)
		r = make_below(hbm, user, options->share, missing, now_ms);
	return r < 0 ? r : make_below(hbm, NULL, options->budget, missing, now_ms);
}
