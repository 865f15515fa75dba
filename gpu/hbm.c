/* SPDX-License-Identifier: Apache-2.0 */
/* Residency in device memory: see hbm.h. */
#include "gpu/hbm.h"

#include <errno.h>

#include "gpu/hbm_internal.h"

static int compare_u64(uint64_t a, uint64_t b)
{
	return a < b ? -1 : a > b;
}

static int entry_compare(const struct kvg_entry *a, const struct kvg_entry *b)
{
	int r = compare_u64(a->key.ino, b->key.ino);

	if (r == 0)
		r = compare_u64(a->key.version, b->key.version);
	if (r == 0)
		r = compare_u64(a->key.uid, b->key.uid);
	if (r == 0)
		r = compare_u64(a->key.first, b->key.first);
	return r != 0 ? r : compare_u64(a->key.end, b->key.end);
}
KV_TREE_GENERATE(kvg_entry_tree, kvg_entry, by_key, entry_compare)

/* ---- Entries ---- */

struct kvg_entry *kvg_entry_new(struct kvg_hbm *hbm, const struct kvg_key *key)
{
	struct kvg_entry *entry = calloc(1, sizeof(*entry));

	if (!entry)
		return NULL;
	entry->hbm = hbm;
	entry->key = *key;
	entry->user = kvg_user_take(hbm, key->uid);
	if (!entry->user) {
		free(entry);
		return NULL;
	}
	LIST_INIT(&entry->maps);
	return entry;
}

static void parts_put(struct kvg_entry *entry)
{
	for (unsigned i = 0; i < entry->count; i++)
		if (entry->parts[i].block)
			kvg_block_put(&entry->hbm->blocks, entry->parts[i].block, !entry->stale,
				entry->orphan);
	entry->count = 0;
	free(kv_steal_ptr(&entry->parts));
}

void kvg_entry_delete(struct kvg_entry *entry)
{
	parts_put(entry);
	kvg_user_put(entry->user);
	free(entry);
}

static void count(struct kvg_entry *entry, int by)
{
	struct kvg_hbm *hbm = entry->hbm;

	hbm->staging += entry->state == KVG_STAGING ? (unsigned)by : 0;
	hbm->resident += entry->state == KVG_RESIDENT ? (unsigned)by : 0;
}

static void set_state(struct kvg_entry *entry, enum kvg_state state)
{
	if (!entry->stale)
		count(entry, -1);
	entry->state = state;
	if (!entry->stale)
		count(entry, 1);
	kvg_room_used(entry);
}

void kvg_entry_link(struct kvg_entry *entry)
{
	RB_INSERT(kvg_entry_tree, &entry->hbm->tree, entry);
	count(entry, 1);
	kvg_room_used(entry);
}

static void entry_unlink(struct kvg_entry *entry)
{
	RB_REMOVE(kvg_entry_tree, &entry->hbm->tree, entry);
	count(entry, -1);
	kvg_room_leave(entry);
	if (entry->expires_ms > 0)
		LIST_REMOVE(entry, expiring_entry);
	entry->expires_ms = 0;
}

void kvg_entry_free(struct kvg_entry *entry)
{
	struct kvg_hbm *hbm = entry->hbm;

	assert(entry->map_count == 0);
	if (hbm->options.gone)
		hbm->options.gone(hbm->options.arg, entry);
	kvg_room_settled(entry);
	if (entry->stale)
		LIST_REMOVE(entry, stale_entry);
	else
		entry_unlink(entry);
	if (entry->count > 0) {
		hbm->entries--;
		entry->user->entries--;
	}
	kvg_entry_delete(entry);
	(void)kvg_pool_fill(&hbm->pool);
}

/* ---- Looking up ---- */

static bool is_same_file(const struct kvg_key *a, const struct kvg_key *b)
{
	return a->ino == b->ino && a->version == b->version && a->uid == b->uid;
}

/* Of those that begin before KEY's stretch does, one that reaches behind it. */
static struct kvg_entry *find_covering(struct kvg_hbm *hbm, const struct kvg_key *key)
{
	struct kvg_entry wanted = {.key = *key};
	struct kvg_entry *entry;

	wanted.key.first = wanted.key.end = 0;
	for (entry = RB_NFIND(kvg_entry_tree, &hbm->tree, &wanted);
		entry && is_same_file(&entry->key, key) && entry->key.first <= key->first;
		entry = RB_NEXT(kvg_entry_tree, &hbm->tree, entry))
		if (entry->key.end >= key->end && entry->state != KVG_FAILED)
			return entry;
	return NULL;
}

struct kvg_entry *kvg_hbm_find(struct kvg_hbm *hbm, const struct kvg_key *key)
{
	struct kvg_entry wanted = {.key = *key};
	struct kvg_entry *entry = find_covering(hbm, key);

	if (!entry)
		entry = RB_FIND(kvg_entry_tree, &hbm->tree, &wanted);
	if (entry)
		kvg_room_used(entry);
	return entry;
}

bool kvg_hbm_hint(struct kvg_hbm *hbm, const struct kvg_key *key, int64_t now_ms)
{
	return kvg_ghost_hint(&hbm->ghosts, key->ino, key->version, key->uid, now_ms);
}

/* ---- How long ---- */

void kvg_hbm_expire(struct kvg_entry *entry, int64_t expires_ms)
{
	struct kvg_hbm *hbm = entry->hbm;

	if (entry->stale || (expires_ms > 0 && expires_ms <= entry->expires_ms))
		return;
	if (entry->expires_ms > 0)
		LIST_REMOVE(entry, expiring_entry);
	entry->expires_ms = expires_ms;
	if (expires_ms == 0)
		return;
	LIST_INSERT_HEAD(&hbm->expiring, entry, expiring_entry);
	if (hbm->expire_ms == 0 || expires_ms < hbm->expire_ms)
		hbm->expire_ms = expires_ms;
}

/* ---- Staging ends ---- */

/* A stale entry goes when nothing and nobody uses it. */
static void consider_free(struct kvg_entry *entry)
{
	if (entry->stale && entry->state != KVG_STAGING && entry->map_count == 0 &&
		entry->held == 0)
		kvg_entry_free(entry);
}

void kvg_hbm_hold(struct kvg_entry *entry)
{
	entry->hbm->held += entry->held == 0 ? entry->bytes : 0;
	entry->held++;
}

void kvg_hbm_release(struct kvg_entry *entry)
{
	assert(entry->held > 0);
	if (--entry->held > 0)
		return;
	entry->hbm->held -= entry->bytes;
	consider_free(entry);
}

int kvg_hbm_filled(struct kvg_entry *entry)
{
	int r = 0;

	assert(entry->state == KVG_STAGING);
	for (unsigned i = 0; i < entry->count; i++) {
		struct kvg_block *block = entry->parts[i].block;

		if (entry->parts[i].own && block->state == KVG_BLOCK_FILLING)
			kvg_block_filled(&entry->hbm->blocks, block);
		if (block->state == KVG_BLOCK_FAILED)
			r = -EIO;
		else if (block->state == KVG_BLOCK_FILLING && r == 0)
			r = -EAGAIN;
	}
	return r;
}

void kvg_hbm_staged(struct kvg_entry *entry)
{
	int r = kvg_hbm_filled(entry);

	assert(r == 0);
	(void)r;
	set_state(entry, KVG_RESIDENT);
	entry->failures = 0;
	consider_free(entry);
}

/* What is left of ENTRY: that it failed, and when it may be tried again. Without memory for that it
 * may be tried at once. */
static void leave_failure(struct kvg_entry *entry, int error, int64_t now_ms)
{
	struct kvg_entry *left = kvg_entry_new(entry->hbm, &entry->key);
	unsigned doublings = (unsigned)kv_min_u64(entry->failures, 16);

	if (!left)
		return;
	left->state = KVG_FAILED;
	left->error = error;
	left->failures = entry->failures + 1;
	left->retry_ms = now_ms + (int64_t)kv_min_u64((uint64_t)KVG_RETRY_FIRST_MS << doublings,
					  KVG_RETRY_LAST_MS);
	kvg_entry_link(left);
}

static void make_stale(struct kvg_entry *entry)
{
	struct kvg_hbm *hbm = entry->hbm;

	entry_unlink(entry);
	entry->stale = true;
	LIST_INSERT_HEAD(&hbm->stale, entry, stale_entry);
	for (unsigned i = 0; i < entry->count; i++)
		kvg_block_hide(&hbm->blocks, entry->parts[i].block);
}

void kvg_hbm_failed(struct kvg_entry *entry, int error, int64_t now_ms)
{
	assert(entry->state == KVG_STAGING && error < 0);
	for (unsigned i = 0; i < entry->count; i++)
		if (entry->parts[i].own && entry->parts[i].block->state == KVG_BLOCK_FILLING)
			entry->parts[i].block->state = KVG_BLOCK_FAILED;
	set_state(entry, KVG_FAILED);
	/* Who has it mapped keeps the memory until he unmaps: it counts until then. */
	if (!entry->stale) {
		make_stale(entry);
		leave_failure(entry, error, now_ms);
	}
	consider_free(entry);
}

/* ---- Maps ---- */

int kvg_hbm_map(struct kvg_entry *entry, struct kvg_holder *holder, bool revocable,
	struct kvg_map **ret_map)
{
	struct kvg_map *map;

	assert(!entry->stale && entry->state != KVG_FAILED);
	if (holder->overdue > 0)
		return -EDQUOT;
	map = calloc(1, sizeof(*map));
	if (!map)
		return -ENOMEM;
	map->entry = entry;
	map->holder = holder;
	map->revocable = revocable;
	LIST_INSERT_HEAD(&entry->maps, map, of_entry);
	entry->map_count++;
	entry->fixed += !revocable;
	entry->hbm->maps++;
	holder->maps++;
	kvg_hbm_expire(entry, 0);
	kvg_room_used(entry);
	*ret_map = map;
	return 0;
}

void kvg_hbm_unmap(struct kvg_map *map)
{
	struct kvg_entry *entry = map->entry;

	LIST_REMOVE(map, of_entry);
	entry->map_count--;
	entry->fixed -= !map->revocable;
	entry->hbm->maps--;
	map->holder->maps--;
	if (entry->orphan)
		map->holder->overdue -= entry->bytes;
	free(map);
	kvg_room_used(entry);
	consider_free(entry);
}

int kvg_hbm_export(struct kvg_entry *entry, unsigned number, int *ret_fd)
{
	struct kvg_backend *backend = entry->hbm->options.backend;

	assert(number < entry->count);
	/* The answer to who asked for it may have waited for him longer than he was given. */
	if (!entry->parts[number].block->segment)
		return -ESTALE;
	return backend->ops->segment_export(backend, entry->parts[number].block->segment, ret_fd);
}

/* ---- Going ---- */

void kvg_hbm_stale(struct kvg_entry *entry)
{
	if (!entry->stale)
		make_stale(entry);
	consider_free(entry);
}

void kvg_hbm_of_ino(struct kvg_hbm *hbm, uint64_t ino,
	void (*each)(void *arg, struct kvg_entry *entry), void *arg)
{
	struct kvg_entry wanted = {.key = {.ino = ino}};
	struct kvg_entry *entry = RB_NFIND(kvg_entry_tree, &hbm->tree, &wanted);

	while (entry && entry->key.ino == ino) {
		struct kvg_entry *next = RB_NEXT(kvg_entry_tree, &hbm->tree, entry);

		each(arg, entry);
		entry = next;
	}
}

void kvg_hbm_blocks(
	struct kvg_hbm *hbm, void (*each)(void *arg, struct kvg_block *block), void *arg)
{
	kvg_block_all(&hbm->blocks, each, arg);
}

void kvg_hbm_all(struct kvg_hbm *hbm, void (*each)(void *arg, struct kvg_entry *entry), void *arg)
{
	struct kvg_entry *entry, *next;

	for (entry = RB_MIN(kvg_entry_tree, &hbm->tree); entry; entry = next) {
		next = RB_NEXT(kvg_entry_tree, &hbm->tree, entry);
		each(arg, entry);
	}
}

/* ---- Life ---- */

int kvg_hbm_new(const struct kvg_hbm_options *options, struct kvg_hbm **ret_hbm)
{
	struct kvg_hbm *hbm = calloc(1, sizeof(*hbm));
	int r;

	assert(options->segment % options->granularity == 0);
	if (!hbm)
		return -ENOMEM;
	hbm->options = *options;
	hbm->entries_max = (unsigned)kv_min_u64(options->budget / options->granularity, 1u << 20);
	RB_INIT(&hbm->tree);
	for (unsigned i = 0; i < _KVG_LIST_MAX; i++)
		TAILQ_INIT(&hbm->lists[i]);
	hbm->pool = (struct kvg_pool){
		.backend = options->backend,
		.budget = options->budget,
		.segment = options->segment,
		.margin = options->margin,
		.zeroed = options->zeroed,
	};
	LIST_INIT(&hbm->pool.spares);
	hbm->blocks = (struct kvg_blocks){.pool = &hbm->pool};
	r = kvg_pool_fill(&hbm->pool);
	if (r < 0) {
		kvg_hbm_free(hbm);
		return r;
	}
	*ret_hbm = hbm;
	return 0;
}

struct kvg_hbm *kvg_hbm_free(struct kvg_hbm *hbm)
{
	struct kvg_entry *entry;

	if (!hbm)
		return NULL;
	assert(hbm->maps == 0);
	/* So that what the entries give back is not taken again. */
	hbm->pool.budget = 0;
	while ((entry = RB_MIN(kvg_entry_tree, &hbm->tree)) || (entry = LIST_FIRST(&hbm->stale)))
		kvg_entry_free(entry);
	kvg_pool_drain(&hbm->pool);
	free(hbm);
	return NULL;
}

uint64_t kvg_hbm_missing(const struct kvg_hbm *hbm)
{
	return kvg_pool_missing(&hbm->pool);
}

void kvg_hbm_usage(const struct kvg_hbm *hbm, struct kvg_hbm_usage *ret_usage)
{
	*ret_usage = (struct kvg_hbm_usage){
		.budget = hbm->options.budget,
		.used = hbm->pool.used,
		.orphaned = hbm->blocks.orphaned,
		.entries = hbm->staging + hbm->resident,
		.resident = hbm->resident,
		.maps = hbm->maps,
		.evicted = hbm->evicted,
		.missing = kvg_pool_missing(&hbm->pool),
		.reserve = hbm->pool.spare_bytes,
		.held = hbm->held,
	};
}
