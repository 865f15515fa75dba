/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commit stage: one thread flushes the devices once for all versions that are complete, then
 * publishes each to the index. So the index never names bytes that a power cut could take back.
 */
#include "fs/core_internal.h"
#include "fs/writeback_internal.h"
#include "fs/crash.h"

#include <inttypes.h>

/* The index refuses operations while it cannot commit (its disk is full, say): wait that often that
 * long. */
#define INDEX_ATTEMPTS_MAX 50u
#define INDEX_RETRY_MS 100u

void kv_commit_push(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	KV_LOCKED(&core->writeback.lock);

	TAILQ_INSERT_TAIL(&core->writeback.complete, version, queued);
	(void)pthread_cond_signal(&core->writeback.ready);
}

/* ---- What the index is told ---- */

struct numbers {
	uint32_t *list;
	size_t count;
	size_t capacity;
	bool failed;
};

static void add_number(struct numbers *numbers, uint32_t number)
{
	if (numbers->count == numbers->capacity) {
		size_t capacity = numbers->capacity ? numbers->capacity * 2 : 64;
		uint32_t *list = realloc(numbers->list, capacity * sizeof(*list));

		if (!list) {
			numbers->failed = true;
			return;
		}
		numbers->list = list;
		numbers->capacity = capacity;
	}
	numbers->list[numbers->count++] = number;
}

static void note_number(void *arg, const struct kv_chunk *chunk)
{
	add_number(arg, chunk->number);
}

/* Where a rewrite was cut and grew again, chunks of the old content lie that it does not have: they
 * get slots. */
static int add_lost_chunks(struct kv_version *version)
{
	struct numbers numbers = {0};
	uint32_t end = kv_chunk_count(version->size);
	struct kv_slot *slot;
	int r;

	if (!version->base || version->base_chunks >= end)
		return 0;
	r = kv_index_map(version->file->core->index, version->file->ino, version->base_chunks,
		end - version->base_chunks, note_number, &numbers);
	if (numbers.failed)
		r = -ENOMEM;
	KV_LOCKED(&version->lock);
	for (size_t i = 0; i < numbers.count && r == 0; i++)
		r = kv_slot_get(version, numbers.list[i], &slot);
	free(numbers.list);
	return r;
}

struct content {
	struct kv_chunk *chunks;
	struct kv_extent *extents;
	size_t chunk_count;
};

static bool is_listed(const struct kv_version *version, const struct kv_slot *slot)
{
	/* Without a base everything is replaced, and holes need not be told. */
	return slot->state != KV_CHUNK_BASE && (slot->extent_count > 0 || version->base);
}

/* Lock held. */
static void fill_content(struct kv_version *version, struct content *content)
{
	uint32_t end = kv_chunk_count(version->size);
	struct kv_extent *extent = content->extents;
	struct kv_segment *segment;

	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			const struct kv_slot *slot = &segment->slots[i];
			uint32_t number = segment->number * KV_SEGMENT_CHUNKS + i;

			if (number >= end || !is_listed(version, slot))
				continue;
			assert(slot->state != KV_CHUNK_DIRTY || slot->blocks == 0);
			struct kv_chunk *chunk = &content->chunks[content->chunk_count++];
			*chunk = (struct kv_chunk){
				.number = number,
				.extent_count = slot->extent_count,
				.origin = slot->flags & KV_SLOT_SHARED ? KV_CHUNK_SHARED
								       : KV_CHUNK_FRESH,
				.sum = slot->extent_count > 0 ? slot->sum : 0,
				.extents = extent,
			};
			memcpy(extent, kv_slot_extents(slot), slot->extent_count * sizeof(*extent));
			extent += slot->extent_count;
		}
	}
}

static int build_content(struct kv_version *version, struct content *ret_content)
{
	size_t chunks = 0, extents = 0;
	struct kv_segment *segment;
	KV_LOCKED(&version->lock);

	assert(version->dirty == 0 && version->reserved == 0);
	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			chunks += is_listed(version, &segment->slots[i]);
			extents += segment->slots[i].extent_count;
		}
	}
	*ret_content = (struct content){
		.chunks = malloc((chunks + 1) * sizeof(struct kv_chunk)),
		.extents = malloc((extents + 1) * sizeof(struct kv_extent)),
	};
	if (!ret_content->chunks || !ret_content->extents) {
		free(ret_content->chunks);
		free(ret_content->extents);
		return -ENOMEM;
	}
	fill_content(version, ret_content);
	return 0;
}

/* ---- One version ---- */

static bool is_from_index(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	return version->from_index;
}

int kv_file_pin_maps(struct kv_file *file)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	struct kv_version *version, *held = NULL;
	int r = 0;

	do {
		(void)pthread_mutex_lock(&shard->lock);
		TAILQ_FOREACH (version, &file->versions, sibling) {
			if (is_from_index(version) && kv_version_try_ref(version))
				break;
		}
		held = version;
		(void)pthread_mutex_unlock(&shard->lock);
		if (held)
			r = kv_map_load_all(held);
		kv_version_unref(held);
	} while (held && r == 0);
	return r;
}

/* Numbers of the segments in which VERSION may differ from what the index has. */
static int changed_segments(struct kv_version *version, struct numbers *ret_numbers)
{
	struct numbers numbers = {0};
	struct kv_segment *segment;
	KV_LOCKED(&version->lock);

	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		uint32_t i = 0;

		/* Copies of what the base has are no change. */
		while (i < segment->capacity && segment->slots[i].state == KV_CHUNK_BASE)
			i++;
		if (i < segment->capacity)
			add_number(&numbers, segment->number);
	}
	if (numbers.failed) {
		free(numbers.list);
		return -ENOMEM;
	}
	*ret_numbers = numbers;
	return 0;
}

static int pin_segments(struct kv_version *older, const struct numbers *numbers, uint32_t limit)
{
	bool whole;

	{
		KV_LOCKED(&older->lock);
		if (!older->from_index)
			return 0;
		older->pinned = true;
		whole = kv_chunk_count(older->size) > limit;
	}
	if (whole)
		return kv_map_load_all(older);
	for (size_t i = 0; i < numbers->count; i++) {
		KV_LOCKED(&older->lock);
		int r = kv_map_load(older, numbers->list[i] * KV_SEGMENT_CHUNKS);
		if (r < 0)
			return r;
	}
	return 0;
}

/* The version of the same file published before VERSION, with a reference, or NULL. */
static struct kv_version *version_before(struct kv_version *version)
{
	struct kv_shard *shard = kv_shard_of(version->file->core, version->file->ino);
	struct kv_version *older = version;
	KV_LOCKED(&shard->lock);

	do
		older = TAILQ_PREV(older, kv_version_queue, sibling);
	while (older && !kv_version_try_ref(older));
	return older;
}

/*
 * Older versions that somebody holds learn the parts of their maps that VERSION's commit changes in
 * the index. So a small change of a huge file costs what it changes.
 */
static int pin_changed(struct kv_version *version)
{
	/* Without a base all of the map is replaced. */
	uint32_t limit = version->base ? kv_chunk_count(version->size) : 0;
	struct numbers numbers = {0};
	struct kv_version *older = version_before(version);
	int r = older ? changed_segments(version, &numbers) : 0;

	while (older) {
		struct kv_version *before;

		if (r == 0)
			r = pin_segments(older, &numbers, limit);
		before = version_before(older);
		kv_version_unref(older);
		older = before;
	}
	free(numbers.list);
	return r;
}

static int publish_to_index(
	struct kv_version *version, const struct content *content, struct kv_freed *ret_freed)
{
	struct kv_core *core = version->file->core;
	struct kv_content record = {
		.size = version->size,
		.version = version->number,
		.last_use_ns = version->published_ns,
		.replace = !version->base,
		.chunks = content->chunks,
		.chunk_count = content->chunk_count,
	};
	struct kv_inode inode;
	int r = -EIO;

	(void)pthread_mutex_lock(&version->lock);
	record.mtime_ns = version->mtime_ns;
	record.ctime_ns = version->ctime_ns;
	record.domain = version->quota.domain;
	record.promised = version->quota.promised;
	(void)pthread_mutex_unlock(&version->lock);
	for (unsigned i = 0; i < INDEX_ATTEMPTS_MAX; i++) {
		r = kv_index_publish(core->index, version->file->ino, &record, &inode, ret_freed);
		if ((r != -EIO && r != -ENOSPC) || atomic_load(&core->stopping))
			break;
		if (r == -EIO || !kv_index_is_short(core->index) || !kv_core_index_room(core))
			(void)usleep(INDEX_RETRY_MS * 1000);
	}
	if (r < 0)
		return r;
	KV_LOCKED(&version->lock);
	version->blocks = inode.blocks;
	version->quota.promised = 0;
	version->sequence = kv_index_sequence(core->index);
	return 0;
}

static int commit_version(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	struct kv_freed freed = {0};
	struct content content = {0};
	int r;

	r = add_lost_chunks(version);
	if (r == 0)
		r = pin_changed(version);
	if (r == 0)
		r = build_content(version, &content);
	if (r < 0)
		return r;
	r = publish_to_index(version, &content, &freed);
	free(content.chunks);
	free(content.extents);
	if (r < 0)
		return r;
	kv_crash_point("commit-published");
	if (kv_map_rebase(version) < 0) {
		kv_log_error("commit", "map cannot be read back ino=%" PRIu64, version->file->ino);
		KV_LOCKED(&version->lock);
		version->damaged = true;
	}
	kv_file_release(version->file, version, &freed);
	kv_version_settle(version, KV_VERSION_COMMITTED, 0);
	kv_stat_add(&core->stats->committed, 1);
	return 0;
}

static int error_of(struct kv_version *version)
{
	const struct kv_core *core = version->file->core;

	/* A flush that failed may have lost any write since the one before. */
	if (version->wrote && version->flush_failures != atomic_load(&core->flush_failures))
		return -EIO;
	if (version->error || !version->base)
		return version->error;
	KV_LOCKED(&version->base->lock);
	return kv_version_failure_locked(version->base);
}

static void settle_version(struct kv_version *version)
{
	int r = error_of(version);

	(void)pthread_mutex_lock(&version->lock);
	bool dropped = version->dropped;
	(void)pthread_mutex_unlock(&version->lock);
	if (dropped || kv_version_is_invisible(version))
		r = -ENOENT;
	else if (r == 0)
		r = commit_version(version);
	if (r == -ENOENT) {
		(void)pthread_mutex_lock(&version->lock);
		version->dropped = true;
		(void)pthread_mutex_unlock(&version->lock);
		kv_version_settle(version, KV_VERSION_FAILED, 0);
	} else if (r < 0) {
		kv_version_fail(version, r);
	}
	kv_version_unref(version);
}

/* ---- The thread ---- */

static bool must_wait(struct kv_version *version)
{
	struct kv_shard *shard = kv_shard_of(version->file->core, version->file->ino);
	KV_LOCKED(&shard->lock);

	return kv_version_must_wait_locked(version);
}

/*
 * Settles all of BATCH whose predecessors are settled and whose bytes the devices keep. Returns
 * with BATCH holding the others: those devices that were too slow to flush, a bit each.
 */
static uint64_t settle_batch(struct kv_core *core, struct kv_version_queue *batch)
{
	struct kv_version *version, *next;
	uint64_t unflushed = kv_flush_devices(core);
	bool progress;

	kv_crash_point("commit-flushed");
	do {
		progress = false;
		for (version = TAILQ_FIRST(batch); version; version = next) {
			next = TAILQ_NEXT(version, queued);
			if (must_wait(version) || atomic_load(&version->wrote_on) & unflushed)
				continue;
			TAILQ_REMOVE(batch, version, queued);
			settle_version(version);
			progress = true;
		}
	} while (progress && !TAILQ_EMPTY(batch));
	return unflushed;
}

void *kv_commit_main(void *arg)
{
	struct kv_core *core = arg;
	struct kv_version_queue batch = TAILQ_HEAD_INITIALIZER(batch);
	uint64_t unflushed = 0;

	for (;;) {
		{
			KV_LOCKED(&core->writeback.lock);
			while (TAILQ_EMPTY(&core->writeback.complete)) {
				if (core->writeback.stop && TAILQ_EMPTY(&core->writeback.inflight))
					return NULL;
				if (unflushed && !TAILQ_EMPTY(&batch)) {
					(void)kv_cond_wait_ms(&core->writeback.ready,
						&core->writeback.lock, KV_WAIT_SLICE_MS);
					break;
				}
				(void)pthread_cond_wait(
					&core->writeback.ready, &core->writeback.lock);
			}
			TAILQ_CONCAT(&batch, &core->writeback.complete, queued);
		}
		unflushed = settle_batch(core, &batch);
		kv_store_evict_kick(core);
		kv_quota_kick(core);
	}
}
