/* SPDX-License-Identifier: Apache-2.0 */
/* What time does to device memory: deadlines, ends of prefetches, second tries. */
#include <errno.h>

#include "gpu/hbm_internal.h"

/* A file that could not be staged is forgotten that long after it might have been tried again. */
#define FORGET_MS 60000
#define FORGET_LOOK_MS 1000
/* What others wait for is looked at again after that. */
#define EXPIRE_AGAIN_MS 100

static void make_orphan(struct kvg_entry *entry)
{
	struct kvg_map *map;

	kvg_room_settled(entry);
	entry->orphan = true;
	for (unsigned i = 0; i < entry->count; i++)
		kvg_block_orphan(&entry->hbm->blocks, entry->parts[i].block);
	LIST_FOREACH (map, &entry->maps, of_entry)
		map->holder->overdue += entry->bytes;
}

/* Others may have given back what they had taken. */
static void refill(struct kvg_hbm *hbm, int64_t now_ms)
{
	if (now_ms < hbm->refill_ms || kvg_pool_missing(&hbm->pool) == 0)
		return;
	hbm->refill_ms = now_ms + KVG_REFILL_MS;
	(void)kvg_pool_fill(&hbm->pool);
}

static void forget_failed(struct kvg_hbm *hbm, int64_t now_ms)
{
	struct kvg_entry *entry, *next;

	if (now_ms < hbm->forget_ms)
		return;
	hbm->forget_ms = now_ms + FORGET_LOOK_MS;
	for (entry = TAILQ_FIRST(&hbm->lists[KVG_LIST_FAILED]); entry; entry = next) {
		next = TAILQ_NEXT(entry, by_use);
		if (now_ms > entry->retry_ms + FORGET_MS)
			kvg_entry_free(entry);
	}
}

/* Whether another entry waits for what ENTRY stages. */
static bool is_shared(const struct kvg_entry *entry)
{
	for (unsigned i = 0; i < entry->count; i++)
		if (entry->parts[i].own && entry->parts[i].block->users > 1)
			return true;
	return false;
}

/*
 * Its time is over. False: others wait for what it stages: it goes when they have that (the blocks
 * are theirs too then), or have gone.
 */
static bool give_up(struct kvg_entry *entry)
{
	struct kvg_hbm *hbm = entry->hbm;
	bool staging = entry->state == KVG_STAGING;

	if (staging && is_shared(entry))
		return false;
	hbm->evicted++;
	kvg_hbm_stale(entry);
	/* Which may be the end of it. */
	if (staging && hbm->options.expired)
		hbm->options.expired(hbm->options.arg, entry);
	return true;
}

static void expire(struct kvg_hbm *hbm, int64_t now_ms)
{
	struct kvg_entry *entry, *next;

	if (hbm->expire_ms == 0 || now_ms < hbm->expire_ms)
		return;
	hbm->expire_ms = 0;
	for (entry = LIST_FIRST(&hbm->expiring); entry; entry = next) {
		int64_t at_ms = entry->expires_ms;

		next = LIST_NEXT(entry, expiring_entry);
		if (at_ms <= now_ms && give_up(entry))
			continue;
		if (at_ms <= now_ms)
			at_ms = now_ms + EXPIRE_AGAIN_MS;
		if (hbm->expire_ms == 0 || at_ms < hbm->expire_ms)
			hbm->expire_ms = at_ms;
	}
}

int64_t kvg_hbm_tick(struct kvg_hbm *hbm, int64_t now_ms)
{
	struct kvg_entry *entry, *next;
	int64_t next_ms = 0;

	forget_failed(hbm, now_ms);
	expire(hbm, now_ms);
	refill(hbm, now_ms);
	for (entry = LIST_FIRST(&hbm->revoked); entry; entry = next) {
		next = LIST_NEXT(entry, revoked_entry);
		if (entry->deadline_ms <= now_ms)
			make_orphan(entry);
		else if (next_ms == 0 || entry->deadline_ms < next_ms)
			next_ms = entry->deadline_ms;
	}
	return next_ms;
}
