/* SPDX-License-Identifier: Apache-2.0 */
/* What comes into device memory: a stretch's segments, those that others have and new ones. */
#include <errno.h>

#include "gpu/hbm_internal.h"

#define ALLOCATE_TRIES 3u
/* Of one user: so many failures are remembered. */
#define FAILURES_MAX 1024u

/* Of part NUMBER's segment. */
static uint64_t part_size(const struct kvg_entry *entry, unsigned number)
{
	uint64_t segment = entry->hbm->options.segment;

	return kv_min_u64(segment, entry->bytes - number * segment);
}

static struct kvg_block_key block_key(const struct kvg_entry *entry, unsigned number)
{
	const struct kvg_key *key = &entry->key;

	return (struct kvg_block_key){key->ino, key->version, key->uid,
		key->first + number * entry->hbm->options.segment};
}

/* Takes what others have of ENTRY's stretch. Bytes that nobody has. */
static uint64_t take_shared(struct kvg_entry *entry)
{
	uint64_t missing = 0;

	for (unsigned i = 0; i < entry->count; i++) {
		const struct kvg_block_key key = block_key(entry, i);
		struct kvg_block *block = kvg_block_take(&entry->hbm->blocks, &key);

		/* A file's end is where it is in every stretch of it. */
		assert(!block || block->size == part_size(entry, i));
		entry->parts[i].block = block;
		missing += block ? 0 : part_size(entry, i);
	}
	return missing;
}

static int make_missing(struct kvg_entry *entry)
{
	for (unsigned i = 0; i < entry->count; i++) {
		const struct kvg_block_key key = block_key(entry, i);
		int r;

		if (entry->parts[i].block)
			continue;
		r = kvg_block_new(&entry->hbm->blocks, &key, part_size(entry, i),
			&entry->user->used, &entry->parts[i].block);
		if (r < 0)
			return r;
		entry->parts[i].own = true;
		entry->parts[i].block->filler = entry;
	}
	return 0;
}

static void drop_own(struct kvg_entry *entry)
{
	for (unsigned i = 0; i < entry->count; i++) {
		if (!entry->parts[i].own)
			continue;
		kvg_block_put(&entry->hbm->blocks, entry->parts[i].block, true, false);
		entry->parts[i] = (struct kvg_part){0};
	}
}

/* The device may have less than the budget says: others use it too. */
static int allocate(struct kvg_entry *entry)
{
	int r = -ENOMEM;

	for (unsigned i = 0; i <= ALLOCATE_TRIES && r == -ENOMEM; i++) {
		r = make_missing(entry);
		if (r == 0)
			return 0;
		drop_own(entry);
		if (r == -ENOMEM && !kvg_room_evict(entry->hbm, NULL))
			break;
	}
	return r == -ENOMEM ? -ENOSPC : r;
}

/* Segments for all of ENTRY's stretch. */
static int get_memory(struct kvg_entry *entry, int64_t now_ms)
{
	struct kvg_hbm *hbm = entry->hbm;
	uint64_t missing;
	int r;

	entry->count = (unsigned)kv_div_round_up(entry->bytes, hbm->options.segment);
	entry->parts = calloc(entry->count, sizeof(*entry->parts));
	if (!entry->parts) {
		entry->count = 0;
		return -ENOMEM;
	}
	missing = take_shared(entry);
	r = kvg_room_make(hbm, entry->user, entry->bytes, missing, now_ms);
	return r < 0 ? r : allocate(entry);
}

/* Who has many stretches fail must not fill our memory with that. */
static void forget_failures(struct kvg_user *user)
{
	while (user->users - user->entries > FAILURES_MAX)
		kvg_entry_free(TAILQ_FIRST(&user->lists[KVG_LIST_FAILED]));
}

bool kvg_hbm_has(struct kvg_hbm *hbm, const struct kvg_key *key)
{
	struct kvg_block_key wanted = {key->ino, key->version, key->uid, key->first};

	for (; wanted.first < key->end; wanted.first += hbm->options.segment)
		if (!kvg_block_find(&hbm->blocks, &wanted))
			return false;
	return true;
}

int kvg_hbm_admit(struct kvg_hbm *hbm, const struct kvg_key *key, uint64_t size, int64_t now_ms,
	struct kvg_entry **ret_entry)
{
	struct kvg_entry *old = kvg_hbm_find(hbm, key);
	struct kvg_entry *entry;
	int r;

	assert(!old || old->state == KVG_FAILED);
	if (size < hbm->options.granularity)
		return -ERANGE;
	if (old && now_ms < old->retry_ms)
		return old->error;
	entry = kvg_entry_new(hbm, key);
	if (!entry)
		return -ENOMEM;
	entry->size = size;
	entry->bytes = kv_round_up(size, hbm->options.granularity);
	entry->failures = old ? old->failures : 0;
	r = get_memory(entry, now_ms);
	if (r < 0) {
		kvg_entry_delete(entry);
		return r;
	}
	if (old)
		kvg_entry_free(old);
	hbm->entries++;
	entry->user->entries++;
	kvg_entry_link(entry);
	forget_failures(entry->user);
	*ret_entry = entry;
	return 0;
}
