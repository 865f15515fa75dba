/* SPDX-License-Identifier: Apache-2.0 */
/*
 * DRAM eviction: whole idle versions first, least recently used first; then single chunks of
 * versions that are in use, as long as no client can have their pages mapped.
 */
#include "fs/core_internal.h"

/* The evictor keeps the tier between these shares of the budget, so that requests seldom wait. */
#define HIGH_PERCENT 95u
#define LOW_PERCENT 90u
/* Candidates that turn out to be busy before one call gives up. */
#define MISSES_MAX 64u
#define PUNCH_CANDIDATES 32u
#define PUNCH_CHUNKS 16u

struct kv_object *kv_version_detach_locked(
	struct kv_version *version, int *ret_backing, uint64_t *ret_bytes)
{
	struct kv_object *object = kv_steal_ptr(&version->object);
	struct kv_segment *segment;

	assert(version->opens == 0 && version->busy == 0);
	*ret_bytes = version->charged << KV_BLOCK_SHIFT;
	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			struct kv_slot *slot = &segment->slots[i];

			(void)kv_slot_forget_pages(version, slot);
			slot->flags &= (uint16_t)~KV_SLOT_RESIDENT;
			if (slot->state == KV_CHUNK_HOT)
				slot->state = KV_CHUNK_COLD;
		}
	}
	/* The index has it all: the memory serves better elsewhere. */
	if (version->state == KV_VERSION_COMMITTED && version->from_index && !version->pinned)
		kv_map_free(version);
	*ret_backing = version->backing;
	version->backing = 0;
	assert(version->charged == 0);
	version->object_size = 0;
	version->all_hot = version->exposed = false;
	kv_version_relist_locked(version, false);
	return object;
}

uint64_t kv_version_drop_object(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	struct kv_object *object = NULL;
	uint64_t bytes = 0;
	int backing = 0;

	{
		KV_LOCKED(&version->lock);
		if (version->object && version->state == KV_VERSION_COMMITTED &&
			version->opens == 0 && version->busy == 0)
			object = kv_version_detach_locked(version, &backing, &bytes);
		else
			kv_version_relist_locked(version, true);
	}
	if (!object)
		return 0;
	if (backing > 0 && core->hooks.backing_close)
		core->hooks.backing_close(core->hooks.arg, backing);
	kv_object_free(object);
	kv_core_uncharge(core, bytes);
	kv_stat_add(&core->stats->evicted_dram, 1);
	return bytes;
}

static struct kv_version *oldest_idle(struct kv_core *core)
{
	struct kv_version *version;
	KV_LOCKED(&core->lists.lock);

	TAILQ_FOREACH (version, &core->lists.idle, lru) {
		if (kv_version_try_ref(version))
			return version;
	}
	return NULL;
}

static uint64_t evict_idle(struct kv_core *core, uint64_t wanted)
{
	uint64_t freed = 0;
	unsigned misses = 0;

	while (freed < wanted && misses < MISSES_MAX) {
		struct kv_version *version = oldest_idle(core);
		if (!version)
			break;
		uint64_t bytes = kv_version_drop_object(version);
		kv_version_unref(version);
		freed += bytes;
		misses += bytes == 0;
	}
	return freed;
}

/* ---- Chunks ---- */

static bool is_punchable(const struct kv_slot *slot)
{
	return (slot->state == KV_CHUNK_HOT ||
		       (slot->state == KV_CHUNK_BASE && slot->flags & KV_SLOT_RESIDENT)) &&
	       slot->pins == 0 && !(slot->flags & (KV_SLOT_BUSY | KV_SLOT_WRITEBACK));
}

/* Lock held. One turn of the hand: picks chunks that were not used since the last one, and makes
 * them BUSY. */
static unsigned pick_chunks(
	struct kv_version *version, uint64_t wanted, uint32_t *ret_numbers, uint64_t *ret_bytes)
{
	struct kv_segment key = {.number = version->hand / KV_SEGMENT_CHUNKS};
	struct kv_segment *segment;
	unsigned count = 0;

	for (segment = RB_NFIND(kv_segment_tree, &version->segments, &key); segment;
		segment = RB_NEXT(kv_segment_tree, &version->segments, segment)) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			struct kv_slot *slot = &segment->slots[i];
			uint32_t number = segment->number * KV_SEGMENT_CHUNKS + i;

			if (number < version->hand || !is_punchable(slot))
				continue;
			if (slot->flags & KV_SLOT_USED) {
				slot->flags &= (uint16_t)~KV_SLOT_USED;
				continue;
			}
			slot->flags |= KV_SLOT_BUSY;
			*ret_bytes += (uint64_t)slot->charge << KV_BLOCK_SHIFT;
			ret_numbers[count++] = number;
			version->hand = number + 1;
			if (count == PUNCH_CHUNKS || *ret_bytes >= wanted)
				return count;
		}
	}
	version->hand = 0;
	return count;
}

/* Lock held. */
static uint64_t cool_slot(struct kv_version *version, uint32_t number, bool punched)
{
	struct kv_slot *slot = kv_slot_find(version, number);

	slot->flags &= (uint16_t)~KV_SLOT_BUSY;
	if (!punched)
		return 0;
	if (slot->state == KV_CHUNK_HOT)
		slot->state = KV_CHUNK_COLD;
	slot->flags &= (uint16_t)~KV_SLOT_RESIDENT;
	return (uint64_t)kv_slot_forget_pages(version, slot) << KV_BLOCK_SHIFT;
}

static uint64_t punch_version(struct kv_core *core, struct kv_version *version, uint64_t wanted)
{
	uint32_t numbers[PUNCH_CHUNKS];
	bool punched[PUNCH_CHUNKS];
	unsigned count;
	uint64_t bytes = 0;

	{
		KV_LOCKED(&version->lock);
		kv_version_relist_locked(version, true);
		if (!version->object || version->exposed || version->hot)
			return 0;
		count = pick_chunks(version, wanted, numbers, &bytes);
		/* All were in use since the hand's last turn: now they had their second chance. */
		if (count == 0)
			count = pick_chunks(version, wanted, numbers, &bytes);
		if (count == 0)
			return 0;
		version->all_hot = false;
		kv_unsettled_lose(version);
		if (kv_version_mark_locked(version) < 0) {
			for (unsigned i = 0; i < count; i++)
				(void)cool_slot(version, numbers[i], false);
			return 0;
		}
		version->busy++;
	}
	for (unsigned i = 0; i < count; i++)
		punched[i] = kv_object_punch(version->object,
				     (uint64_t)numbers[i] << KV_CHUNK_SHIFT, KV_CHUNK_SIZE) == 0;
	bytes = 0;
	{
		KV_LOCKED(&version->lock);
		for (unsigned i = 0; i < count; i++)
			bytes += cool_slot(version, numbers[i], punched[i]);
		version->busy--;
		kv_park_wake(core, version);
	}
	kv_core_uncharge(core, bytes);
	return bytes;
}

static uint64_t punch_active(struct kv_core *core, uint64_t wanted)
{
	struct kv_version *versions[PUNCH_CANDIDATES];
	struct kv_version *version;
	unsigned count = 0;
	uint64_t freed = 0;

	(void)pthread_mutex_lock(&core->lists.lock);
	TAILQ_FOREACH (version, &core->lists.active, lru) {
		if (count == PUNCH_CANDIDATES)
			break;
		if (kv_version_try_ref(version))
			versions[count++] = version;
	}
	(void)pthread_mutex_unlock(&core->lists.lock);
	for (unsigned i = 0; i < count; i++) {
		if (freed < wanted)
			freed += punch_version(core, versions[i], wanted - freed);
		kv_version_unref(versions[i]);
	}
	return freed;
}

uint64_t kv_evict_reclaim(void *arg, uint64_t bytes)
{
	struct kv_core *core = arg;
	uint64_t freed = evict_idle(core, bytes);

	if (freed < bytes)
		freed += punch_active(core, bytes - freed);
	return freed;
}

/* ---- The thread ---- */

static void *evict_main(void *arg)
{
	struct kv_core *core = arg;
	const uint64_t high = core->budget / 100 * HIGH_PERCENT;
	const uint64_t low = core->budget / 100 * LOW_PERCENT;

	for (;;) {
		{
			KV_LOCKED(&core->dram_evictor.lock);
			while (!core->dram_evictor.stop && atomic_load(&core->charged) <= high)
				(void)pthread_cond_wait(
					&core->dram_evictor.cond, &core->dram_evictor.lock);
			if (core->dram_evictor.stop)
				return NULL;
		}
		uint64_t charged = atomic_load(&core->charged);
		while (charged > low && evict_idle(core, charged - low) > 0)
			charged = atomic_load(&core->charged);
		if (charged <= high)
			continue;
		/* Everything is in use: whoever needs DRAM now waits for it or does without. */
		KV_LOCKED(&core->dram_evictor.lock);
		if (!core->dram_evictor.stop)
			(void)kv_cond_wait_ms(&core->dram_evictor.cond, &core->dram_evictor.lock,
				KV_WAIT_SLICE_MS);
	}
}

int kv_evict_start(struct kv_core *core)
{
	return kv_core_thread(core, evict_main);
}

void kv_evict_stop(struct kv_core *core)
{
	KV_LOCKED(&core->dram_evictor.lock);

	core->dram_evictor.stop = true;
	(void)pthread_cond_broadcast(&core->dram_evictor.cond);
}

void kv_evict_kick(struct kv_core *core)
{
	KV_LOCKED(&core->dram_evictor.lock);

	(void)pthread_cond_signal(&core->dram_evictor.cond);
}
