/* SPDX-License-Identifier: Apache-2.0 */
/* Residency in device memory: see hbm.h. */
#include "gpu/hbm.h"

#include <errno.h>

#include "fs/base.h"
#include "gpu/pool.h"

#define ALLOCATE_TRIES 3u
/* A file that could not be staged is forgotten that long after it might have been tried again. */
#define FORGET_MS 60000

struct ghost {
	struct kvg_key key;
	int64_t when_ms;
	bool used;
};

RB_HEAD(kvg_entry_tree, kvg_entry);

struct kvg_hbm {
	struct kvg_hbm_options options;
	struct kvg_entry_tree tree;
	TAILQ_HEAD(, kvg_entry) lru;
	LIST_HEAD(, kvg_entry) stale;
	struct kvg_pool pool;
	int64_t refill_ms; /* when to ask again for what is missing */
	uint64_t maps;
	uint64_t evicted;
	struct ghost ghosts[KVG_GHOSTS_MAX]; /* by a hash of the key: the newer one stays */
};

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

static void parts_free(struct kvg_entry *entry)
{
	struct kvg_backend *backend = entry->hbm->options.backend;

	for (unsigned i = 0; i < entry->count; i++) {
		backend->ops->unmap(backend, entry->parts[i].mapping);
		backend->ops->segment_free(backend, entry->parts[i].segment);
		entry->parts[i].mapping = NULL;
		entry->parts[i].segment = NULL;
	}
}

static void give_back_bytes(struct kvg_entry *entry)
{
	assert(entry->hbm->pool.used >= entry->bytes);
	entry->hbm->pool.used -= entry->bytes;
	entry->bytes = 0;
}

static void entry_unlink(struct kvg_entry *entry)
{
	struct kvg_hbm *hbm = entry->hbm;

	if (entry->stale) {
		LIST_REMOVE(entry, stale_entry);
		return;
	}
	RB_REMOVE(kvg_entry_tree, &hbm->tree, entry);
	TAILQ_REMOVE(&hbm->lru, entry, lru);
}

static void entry_free(struct kvg_entry *entry)
{
	struct kvg_hbm *hbm = entry->hbm;

	assert(entry->map_count == 0);
	if (hbm->options.gone)
		hbm->options.gone(hbm->options.arg, entry);
	entry_unlink(entry);
	parts_free(entry);
	give_back_bytes(entry);
	free(entry->parts);
	free(entry);
	(void)kvg_pool_fill(&hbm->pool);
}

static int part_new(struct kvg_hbm *hbm, uint64_t size, struct kvg_part *ret_part)
{
	struct kvg_backend *backend = hbm->options.backend;
	struct kvg_part part = {.size = size};
	int r = kvg_pool_take(&hbm->pool, size, &part.segment);

	if (r == 0)
		r = backend->ops->map(backend, &part.segment, 1, true, &part.mapping);
	if (r < 0) {
		backend->ops->segment_free(backend, part.segment);
		return r;
	}
	*ret_part = part;
	return 0;
}

/* Segments for ENTRY's bytes, which the budget has counted already. */
static int parts_new(struct kvg_entry *entry)
{
	struct kvg_hbm *hbm = entry->hbm;
	uint64_t left = entry->bytes;

	entry->parts =
		calloc((size_t)kv_div_round_up(left, hbm->options.segment), sizeof(*entry->parts));
	if (!entry->parts)
		return -ENOMEM;
	while (left > 0) {
		uint64_t size = kv_min_u64(left, hbm->options.segment);
		int r = part_new(hbm, size, &entry->parts[entry->count]);

		if (r < 0)
			return r;
		entry->count++;
		left -= size;
	}
	return 0;
}

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
	if (entry) {
		TAILQ_REMOVE(&hbm->lru, entry, lru);
		TAILQ_INSERT_TAIL(&hbm->lru, entry, lru);
	}
	return entry;
}

bool kvg_hbm_hint(struct kvg_hbm *hbm, const struct kvg_key *key, int64_t now_ms)
{
	uint64_t hash = (key->ino * 31 + key->version) * 31 + key->uid;
	struct ghost *ghost =
		&hbm->ghosts[(hash * UINT64_C(0x9e3779b97f4a7c15)) >> 52 & (KVG_GHOSTS_MAX - 1)];
	bool again = ghost->used && ghost->key.ino == key->ino &&
		     ghost->key.version == key->version && ghost->key.uid == key->uid &&
		     now_ms - ghost->when_ms <= KVG_GHOST_MS;

	*ghost = (struct ghost){.key = *key, .when_ms = now_ms, .used = !again};
	return again;
}

/* ---- Room ---- */

/* OF: of that user; NULL: of all. */
static bool is_of(const struct kvg_entry *entry, const uid_t *of)
{
	return !of || entry->key.uid == *of;
}

static uint64_t used_by(const struct kvg_hbm *hbm, const uid_t *of)
{
	const struct kvg_entry *entry;
	uint64_t bytes = 0;

	if (!of)
		return hbm->pool.used;
	TAILQ_FOREACH (entry, &hbm->lru, lru)
		bytes += is_of(entry, of) ? entry->bytes : 0;
	LIST_FOREACH (entry, &hbm->stale, stale_entry)
		bytes += is_of(entry, of) ? entry->bytes : 0;
	return bytes;
}

static bool evict_one(struct kvg_hbm *hbm, const uid_t *of)
{
	struct kvg_entry *entry;

	TAILQ_FOREACH (entry, &hbm->lru, lru) {
		if (entry->state != KVG_RESIDENT || entry->map_count > 0 || !is_of(entry, of))
			continue;
		hbm->evicted++;
		entry_free(entry);
		return true;
	}
	return false;
}

static bool is_revocable(const struct kvg_entry *entry)
{
	const struct kvg_map *map;

	if (entry->state != KVG_RESIDENT || entry->map_count == 0)
		return false;
	LIST_FOREACH (map, &entry->maps, of_entry)
		if (!map->revocable)
			return false;
	return true;
}

/* Asks for what was not used for longest. It comes back later, for who tries again. */
static void revoke_oldest(struct kvg_hbm *hbm, const uid_t *of, uint64_t wanted, int64_t now_ms)
{
	struct kvg_entry *entry, *next;
	uint64_t asked = 0;

	for (entry = TAILQ_FIRST(&hbm->lru); entry && asked < wanted; entry = next) {
		struct kvg_map *map, *after;

		next = TAILQ_NEXT(entry, lru);
		if (!is_of(entry, of) || !is_revocable(entry))
			continue;
		asked += entry->bytes;
		entry->deadline_ms = now_ms + KVG_REVOKE_MS;
		kvg_hbm_stale(entry);
		for (map = LIST_FIRST(&entry->maps); map; map = after) {
			after = LIST_NEXT(map, of_entry);
			hbm->options.revoke(hbm->options.arg, map, entry->deadline_ms);
		}
	}
}

/* Bytes that revocations under way will bring. */
static uint64_t revoked_bytes(const struct kvg_hbm *hbm, const uid_t *of)
{
	const struct kvg_entry *entry;
	uint64_t bytes = 0;

	LIST_FOREACH (entry, &hbm->stale, stale_entry)
		if (entry->deadline_ms > 0 && !entry->orphan && is_of(entry, of))
			bytes += entry->bytes;
	return bytes;
}

/* So that OF, or all, have no more than LIMIT with BYTES more. */
static int make_room_below(
	struct kvg_hbm *hbm, const uid_t *of, uint64_t limit, uint64_t bytes, int64_t now_ms)
{
	uint64_t used = used_by(hbm, of), coming;

	if (bytes > limit)
		return -E2BIG;
	while (used + bytes > limit && evict_one(hbm, of))
		used = used_by(hbm, of);
	if (used + bytes <= limit)
		return 0;
	coming = revoked_bytes(hbm, of);
	if (used + bytes - limit > coming)
		revoke_oldest(hbm, of, used + bytes - limit - coming, now_ms);
	return of ? -ENOBUFS : -ENOSPC;
}

/* Who has his share makes room among his own; others' are left alone for it. */
static int make_room(struct kvg_hbm *hbm, uid_t uid, uint64_t bytes, int64_t now_ms)
{
	const struct kvg_hbm_options *options = &hbm->options;
	int r = options->share < options->budget
			? make_room_below(hbm, &uid, options->share, bytes, now_ms)
			: 0;

	return r < 0 ? r : make_room_below(hbm, NULL, options->budget, bytes, now_ms);
}

/* The device may have less than the budget says: others use it too. */
static int allocate(struct kvg_entry *entry)
{
	struct kvg_hbm *hbm = entry->hbm;
	int r = -ENOMEM;

	for (unsigned i = 0; i <= ALLOCATE_TRIES && r == -ENOMEM; i++) {
		r = parts_new(entry);
		if (r == 0)
			return 0;
		parts_free(entry);
		entry->count = 0;
		free(kv_steal_ptr(&entry->parts));
		if (r == -ENOMEM && !evict_one(hbm, NULL))
			break;
	}
	return r == -ENOMEM ? -ENOSPC : r;
}

int kvg_hbm_admit(struct kvg_hbm *hbm, const struct kvg_key *key, uint64_t size, int64_t now_ms,
	struct kvg_entry **ret_entry)
{
	uint64_t bytes = kv_round_up(size, hbm->options.granularity);
	struct kvg_entry *old = kvg_hbm_find(hbm, key);
	struct kvg_entry *entry;
	unsigned failures = 0;
	int r;

	assert(!old || old->state == KVG_FAILED);
	if (size < hbm->options.granularity)
		return -ERANGE;
	if (old && now_ms < old->retry_ms)
		return old->error;
	r = make_room(hbm, key->uid, bytes, now_ms);
	if (r < 0)
		return r;
	entry = calloc(1, sizeof(*entry));
	if (!entry)
		return -ENOMEM;
	if (old) {
		failures = old->failures;
		entry_free(old);
	}
	entry->hbm = hbm;
	entry->key = *key;
	entry->failures = failures;
	entry->size = size;
	entry->bytes = bytes;
	LIST_INIT(&entry->maps);
	hbm->pool.used += bytes;
	r = allocate(entry);
	if (r < 0) {
		give_back_bytes(entry);
		free(entry);
		return r;
	}
	RB_INSERT(kvg_entry_tree, &hbm->tree, entry);
	TAILQ_INSERT_TAIL(&hbm->lru, entry, lru);
	*ret_entry = entry;
	return 0;
}

/* ---- Staging ends ---- */

/* A stale entry goes when nothing and nobody uses it. */
static void consider_free(struct kvg_entry *entry)
{
	if (entry->stale && entry->state != KVG_STAGING && entry->map_count == 0)
		entry_free(entry);
}

void kvg_hbm_staged(struct kvg_entry *entry)
{
	struct kvg_backend *backend = entry->hbm->options.backend;

	assert(entry->state == KVG_STAGING);
	for (unsigned i = 0; i < entry->count; i++) {
		backend->ops->unmap(backend, entry->parts[i].mapping);
		entry->parts[i].mapping = NULL;
	}
	entry->state = KVG_RESIDENT;
	entry->failures = 0;
	consider_free(entry);
}

/* What is left of ENTRY: that it failed, and when it may be tried again. Without memory for that it
 * may be tried at once. */
static void leave_failure(struct kvg_entry *entry, int error, int64_t now_ms)
{
	struct kvg_hbm *hbm = entry->hbm;
	struct kvg_entry *left = calloc(1, sizeof(*left));
	unsigned doublings = (unsigned)kv_min_u64(entry->failures, 16);

	if (!left)
		return;
	left->hbm = hbm;
	left->key = entry->key;
	left->state = KVG_FAILED;
	left->error = error;
	left->failures = entry->failures + 1;
	left->retry_ms = now_ms + (int64_t)kv_min_u64((uint64_t)KVG_RETRY_FIRST_MS << doublings,
					  KVG_RETRY_LAST_MS);
	LIST_INIT(&left->maps);
	RB_INSERT(kvg_entry_tree, &hbm->tree, left);
	TAILQ_INSERT_TAIL(&hbm->lru, left, lru);
}

void kvg_hbm_failed(struct kvg_entry *entry, int error, int64_t now_ms)
{
	assert(entry->state == KVG_STAGING && error < 0);
	entry->state = KVG_FAILED;
	/* Who has it mapped keeps the memory until he unmaps: it counts until then. */
	if (entry->stale) {
		consider_free(entry);
		return;
	}
	entry_unlink(entry);
	entry->stale = true;
	LIST_INSERT_HEAD(&entry->hbm->stale, entry, stale_entry);
	leave_failure(entry, error, now_ms);
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
	entry->hbm->maps++;
	holder->maps++;
	*ret_map = map;
	return 0;
}

void kvg_hbm_unmap(struct kvg_map *map)
{
	struct kvg_entry *entry = map->entry;

	LIST_REMOVE(map, of_entry);
	entry->map_count--;
	entry->hbm->maps--;
	map->holder->maps--;
	if (entry->orphan)
		map->holder->overdue -= entry->bytes;
	free(map);
	consider_free(entry);
}

int kvg_hbm_export(struct kvg_entry *entry, unsigned number, int *ret_fd)
{
	struct kvg_backend *backend = entry->hbm->options.backend;

	assert(number < entry->count && entry->parts[number].segment);
	entry->exported = true;
	return backend->ops->segment_export(backend, entry->parts[number].segment, ret_fd);
}

/* ---- Going ---- */

void kvg_hbm_stale(struct kvg_entry *entry)
{
	struct kvg_hbm *hbm = entry->hbm;

	if (!entry->stale) {
		entry_unlink(entry);
		entry->stale = true;
		LIST_INSERT_HEAD(&hbm->stale, entry, stale_entry);
	}
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

void kvg_hbm_all(struct kvg_hbm *hbm, void (*each)(void *arg, struct kvg_entry *entry), void *arg)
{
	struct kvg_entry *entry, *next;

	for (entry = RB_MIN(kvg_entry_tree, &hbm->tree); entry; entry = next) {
		next = RB_NEXT(kvg_entry_tree, &hbm->tree, entry);
		each(arg, entry);
	}
}

static void make_orphan(struct kvg_entry *entry)
{
	struct kvg_map *map;

	parts_free(entry);
	entry->orphan = true;
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

	for (entry = TAILQ_FIRST(&hbm->lru); entry; entry = next) {
		next = TAILQ_NEXT(entry, lru);
		if (entry->state == KVG_FAILED && now_ms > entry->retry_ms + FORGET_MS)
			entry_free(entry);
	}
}

int64_t kvg_hbm_tick(struct kvg_hbm *hbm, int64_t now_ms)
{
	struct kvg_entry *entry;
	int64_t next_ms = 0;

	forget_failed(hbm, now_ms);
	refill(hbm, now_ms);
	LIST_FOREACH (entry, &hbm->stale, stale_entry) {
		if (entry->deadline_ms == 0 || entry->orphan)
			continue;
		if (entry->deadline_ms <= now_ms)
			make_orphan(entry);
		else if (next_ms == 0 || entry->deadline_ms < next_ms)
			next_ms = entry->deadline_ms;
	}
	return next_ms;
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
	RB_INIT(&hbm->tree);
	TAILQ_INIT(&hbm->lru);
	LIST_INIT(&hbm->stale);
	hbm->pool = (struct kvg_pool){
		.backend = options->backend,
		.budget = options->budget,
		.segment = options->segment,
		.margin = options->margin,
		.zeroed = options->zeroed,
	};
	LIST_INIT(&hbm->pool.spares);
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
	while ((entry = TAILQ_FIRST(&hbm->lru)) || (entry = LIST_FIRST(&hbm->stale)))
		entry_free(entry);
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
	struct kvg_hbm_usage usage = {
		.budget = hbm->options.budget,
		.used = hbm->pool.used,
		.maps = hbm->maps,
		.evicted = hbm->evicted,
		.missing = kvg_pool_missing(&hbm->pool),
		.reserve = hbm->pool.spare_bytes,
	};
	const struct kvg_entry *entry;

	TAILQ_FOREACH (entry, &hbm->lru, lru) {
		usage.entries += entry->state != KVG_FAILED;
		usage.resident += entry->state == KVG_RESIDENT;
	}
	LIST_FOREACH (entry, &hbm->stale, stale_entry)
		usage.orphaned += entry->orphan ? entry->bytes : 0;
	*ret_usage = usage;
}
