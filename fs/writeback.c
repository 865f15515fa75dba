/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The write-back queue: which version's chunks are written next. The writing itself is in
 * writeback_run.c.
 *
 * Published versions are written whole, in the order of their publishing. When they leave nothing
 * to do and DRAM is short, chunks of versions that are still being written follow, so that a file
 * may be larger than the tier.
 */
#include "fs/write_internal.h"
#include "fs/writeback_internal.h"
#include "fs/crash.h"

#include <limits.h>

#define WRITEBACK_THREADS_MAX 4u
/* Versions with no more dirty bytes than this are written several at once. */
#define SMALL_BYTES (1u << 20)
/* Unpublished versions looked at for one early batch. */
#define SPILL_CANDIDATES 16u
#define SPILL_AGAIN_MS 20u
/*
 * What is published is held for company: until nothing more came for a moment, or the oldest of it
 * has waited for long, or much is dirty, or somebody waits for it. A flush of the devices and a
 * commit cost the same for one file and for a thousand, and those who store want the processors.
 */
#define QUIET_MS 10
#define HELD_MAX_MS 500
#define HELD_DIRTY(core) ((core)->budget / 8)

/* Queue locked. All that is queued is written from now on. */
static void release_held(struct kv_core *core)
{
	core->writeback.due = core->writeback.serial;
	(void)pthread_cond_broadcast(&core->writeback.work);
}

/* Queue locked. */
static bool holds_some(const struct kv_core *core)
{
	return core->writeback.due != core->writeback.serial;
}

/* Queue locked. How long what is held stays so, if nothing happens. */
static unsigned held_ms(const struct kv_core *core)
{
	int64_t quiet = core->writeback.published_ms + QUIET_MS;
	int64_t late = core->writeback.held_ms + HELD_MAX_MS;
	int64_t left = (quiet < late ? quiet : late) - kv_monotonic_ms();

	return left > 0 ? (unsigned)left : 0;
}

void kv_writeback_push(struct kv_version *version)
{
	struct kv_core *core = version->file->core;

	kv_version_ref(version);
	(void)pthread_mutex_lock(&version->lock);
	bool bulky = version->base || version->dirty << KV_BLOCK_SHIFT > SMALL_BYTES;
	(void)pthread_mutex_unlock(&version->lock);
	KV_LOCKED(&core->writeback.lock);
	bool first = !holds_some(core);
	version->bulky = bulky;
	version->serial = ++core->writeback.serial;
	core->writeback.published_ms = kv_monotonic_ms();
	if (first)
		core->writeback.held_ms = core->writeback.published_ms;
	TAILQ_INSERT_TAIL(&core->writeback.inflight, version, inflight);
	TAILQ_INSERT_TAIL(&core->writeback.queue, version, queued);
	if (atomic_load(&core->dirty) > HELD_DIRTY(core))
		release_held(core);
	else if (first)
		(void)pthread_cond_signal(&core->writeback.work);
}

void kv_writeback_hurry(struct kv_core *core)
{
	KV_LOCKED(&core->writeback.lock);

	if (holds_some(core))
		release_held(core);
}

void kv_writeback_kick(struct kv_core *core, bool spill)
{
	KV_LOCKED(&core->writeback.lock);

	core->writeback.spill = core->writeback.spill || spill;
	/* What is committed can be dropped from DRAM. */
	if (spill && holds_some(core))
		release_held(core);
	(void)pthread_cond_signal(&core->writeback.work);
}

/* ---- Collecting ---- */

/* Lock held. May this chunk's content be taken as it is now? */
static bool is_ready(const struct kv_version *version, uint32_t number, const struct kv_slot *slot)
{
	if (slot->state != KV_CHUNK_DIRTY || slot->blocks == 0 ||
		slot->flags & (KV_SLOT_WRITEBACK | KV_SLOT_LOST))
		return false;
	if (version->state != KV_VERSION_WRITING)
		return true;
	if (slot->flags & KV_SLOT_BUSY || slot->pins > 0)
		return false;
	/* A file that grows is about to change its last chunk again. */
	if (number > 0 && number + 1 == kv_chunk_count(version->size))
		return false;
	return true;
}

/* Lock held. */
static void take_chunk(
	struct kv_batch *batch, struct kv_version *version, uint32_t number, struct kv_slot *slot)
{
	struct kv_batch_chunk *chunk = &batch->chunks[batch->chunk_count++];

	*chunk = (struct kv_batch_chunk){
		.version = kv_version_ref(version),
		.content.number = number,
		.blocks = slot->blocks,
		.buffer = -1,
	};
	batch->blocks += slot->blocks;
	kv_slot_bits(slot, &chunk->content.bits);
	slot->flags |= KV_SLOT_WRITEBACK;
	if (!version->wrote)
		version->flush_failures = atomic_load(&version->file->core->flush_failures);
	version->wrote = true;
	assert(version->reserved >= slot->blocks);
	version->reserved -= slot->blocks;
	version->busy++;
	version->jobs++;
}

bool kv_batch_collect(
	struct kv_batch *batch, struct kv_version *version, uint32_t *cursor, unsigned limit)
{
	struct kv_segment key = {.number = *cursor / KV_SEGMENT_CHUNKS};
	struct kv_segment *segment;
	KV_LOCKED(&version->lock);

	if (version->error || (version->sealed && version->state == KV_VERSION_WRITING))
		return false;
	for (segment = RB_NFIND(kv_segment_tree, &version->segments, &key); segment;
		segment = RB_NEXT(kv_segment_tree, &version->segments, segment)) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			uint32_t number = segment->number * KV_SEGMENT_CHUNKS + i;

			if (number < *cursor || !is_ready(version, number, &segment->slots[i]))
				continue;
			if (batch->chunk_count == KV_BATCH_CHUNKS || batch->blocks >= limit) {
				*cursor = number;
				return true;
			}
			take_chunk(batch, version, number, &segment->slots[i]);
		}
	}
	*cursor = UINT32_MAX;
	return false;
}

/* ---- Published versions ---- */

/* Another version was published between VERSION and what it was made from. By number: one that came
 * between and was committed may be gone from the list by now. */
static bool is_late(const struct kv_version *version)
{
	return version->base && version->number != version->base->number + 1;
}

bool kv_version_must_wait_locked(struct kv_version *version)
{
	struct kv_version *older = TAILQ_PREV(version, kv_version_queue, sibling);

	return older && !kv_version_is_settled(older);
}

static void set_aside_locked(struct kv_core *core, struct kv_version *version)
{
	KV_LOCKED(&core->writeback.lock);

	version->aside = true;
	TAILQ_INSERT_TAIL(&core->writeback.waiting, version, queued);
}

/*
 * Puts VERSION aside while one that was published before it is not settled; that may take as long
 * as a device hangs, and no thread waits with it. True if so: it is somebody else's then.
 */
static bool put_aside(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	/* Who settles the earlier one looks under this lock. */
	KV_LOCKED(&kv_shard_of(core, version->file->ino)->lock);

	if (!is_late(version) || !kv_version_must_wait_locked(version))
		return false;
	set_aside_locked(core, version);
	return true;
}

void kv_writeback_next_locked(struct kv_file *file)
{
	struct kv_core *core = file->core;
	struct kv_version *version;

	TAILQ_FOREACH (version, &file->versions, sibling) {
		if (!version->aside || kv_version_must_wait_locked(version))
			continue;
		KV_LOCKED(&core->writeback.lock);
		version->aside = false;
		TAILQ_REMOVE(&core->writeback.waiting, version, queued);
		TAILQ_INSERT_HEAD(&core->writeback.queue, version, queued);
		(void)pthread_cond_broadcast(&core->writeback.work);
	}
}

/* Whether the index has exactly the extents that BASE names for the chunk. */
struct comparison {
	const struct kv_slot *slot;
	bool seen;
	bool same;
};

static void compare_chunk(void *arg, const struct kv_chunk *chunk)
{
	struct comparison *comparison = arg;

	comparison->seen = true;
	comparison->same = chunk->extent_count == comparison->slot->extent_count &&
			   memcmp(chunk->extents, kv_slot_extents(comparison->slot),
				   chunk->extent_count * sizeof(*chunk->extents)) == 0;
}

static bool index_agrees(struct kv_version *base, uint32_t number)
{
	static const struct kv_slot none;
	struct comparison comparison = {0};
	KV_LOCKED(&base->lock);
	int r = kv_map_load(base, number);
	const struct kv_slot *slot = kv_slot_find(base, number);

	comparison.slot = slot ? slot : &none;
	if (r == 0)
		r = kv_index_map(base->file->core->index, base->file->ino, number, 1, compare_chunk,
			&comparison);
	return r == 0 && (comparison.seen ? comparison.same : comparison.slot->extent_count == 0);
}

/*
 * The first chunk from NUMBER on, or END, for which the index may have something else than BASE.
 * Segments that are not in memory are as in the index: commits load those that they change.
 */
static uint32_t next_in_doubt(struct kv_version *base, uint32_t number, uint32_t end)
{
	struct kv_segment key = {.number = number / KV_SEGMENT_CHUNKS};
	KV_LOCKED(&base->lock);
	const struct kv_segment *segment;

	if (!base->from_index)
		return number;
	segment = RB_NFIND(kv_segment_tree, &base->segments, &key);
	if (!segment)
		return end;
	return (uint32_t)kv_min_u64(
		end, kv_max_u64(number, (uint64_t)segment->number * KV_SEGMENT_CHUNKS));
}

/*
 * Another version was published between BASE and VERSION: chunks that are still BASE must be in the
 * index as BASE has them, or become VERSION's own.
 */
static int resolve_base(struct kv_version *version)
{
	struct kv_writer writer = {.version = version};
	uint32_t end = version->base_chunks;
	int r = 0;

	for (uint32_t i = next_in_doubt(version->base, 0, end); i < end && r == 0;
		i = next_in_doubt(version->base, i + 1, end)) {
		(void)pthread_mutex_lock(&version->lock);
		bool is_base = kv_slot_state(version, i) == KV_CHUNK_BASE;
		(void)pthread_mutex_unlock(&version->lock);
		if (is_base && !index_agrees(version->base, i))
			r = kv_writer_own(&writer, i);
	}
	kv_writer_done(&writer);
	return r;
}

/* Earlier versions are settled. Returns an error if VERSION cannot be what it was meant to be. */
static int settle_base(struct kv_version *version)
{
	struct kv_version *base = version->base;

	if (!is_late(version))
		return 0;
	(void)pthread_mutex_lock(&base->lock);
	int r = kv_version_failure_locked(base);
	(void)pthread_mutex_unlock(&base->lock);
	return r < 0 ? r : resolve_base(version);
}

static void work_off(struct kv_worker *worker, struct kv_version **versions, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		uint32_t cursor = 0;
		bool more = !kv_version_is_invisible(versions[i]);

		if (more && put_aside(versions[i])) {
			versions[i] = NULL;
			continue;
		}
		/* For good: somebody may open it before the commit stage looks, but its chunks were
		 * not written. */
		if (!more) {
			KV_LOCKED(&versions[i]->lock);
			versions[i]->dropped = true;
		} else {
			int r = settle_base(versions[i]);
			if (r < 0) {
				KV_LOCKED(&versions[i]->lock);
				versions[i]->error = r;
			}
		}
		while (more) {
			more = kv_batch_collect(&worker->batch, versions[i], &cursor, UINT_MAX);
			if (more)
				kv_batch_run(worker);
		}
	}
	kv_batch_run(worker);
	kv_crash_point("writeback-written");
	for (unsigned i = 0; i < count; i++)
		if (versions[i])
			kv_commit_push(versions[i]);
}

/* ---- Early write-back ---- */

/* References to versions that are in use, longest not looked at first. */
static unsigned spill_candidates(struct kv_core *core, struct kv_version **ret_versions)
{
	unsigned count = 0;
	struct kv_version *version;
	KV_LOCKED(&core->lists.lock);

	TAILQ_FOREACH (version, &core->lists.active, lru) {
		if (count == SPILL_CANDIDATES)
			break;
		if (kv_version_try_ref(version))
			ret_versions[count++] = version;
	}
	return count;
}

/* Writes a few chunks of versions being written, oldest first. False if there was nothing. */
static bool spill(struct kv_worker *worker)
{
	struct kv_version *versions[SPILL_CANDIDATES];
	unsigned count = spill_candidates(worker->core, versions);
	bool any;

	for (unsigned i = 0; i < count; i++) {
		bool writing;
		uint32_t cursor;

		{
			KV_LOCKED(&versions[i]->lock);
			writing = versions[i]->state == KV_VERSION_WRITING;
			cursor = versions[i]->cursor;
		}
		if (writing && worker->batch.blocks < worker->spill_blocks) {
			unsigned before = worker->batch.chunk_count;

			(void)kv_batch_collect(
				&worker->batch, versions[i], &cursor, worker->spill_blocks);
			if (worker->batch.chunk_count == before || cursor == UINT32_MAX)
				cursor = 0;
			KV_LOCKED(&versions[i]->lock);
			versions[i]->cursor = cursor;
		}
		{
			KV_LOCKED(&versions[i]->lock);
			kv_version_relist_locked(versions[i], true);
		}
		kv_version_unref(versions[i]);
	}
	any = worker->batch.chunk_count > 0;
	kv_batch_run(worker);
	return any;
}

/* ---- Threads ---- */

/* Queue locked. */
static unsigned take_versions(struct kv_core *core, struct kv_version **ret_versions)
{
	unsigned count = 0;
	struct kv_version *version;

	while (count < KV_BATCH_CHUNKS / 2 && (version = TAILQ_FIRST(&core->writeback.queue))) {
		if (version->serial > core->writeback.due && !core->writeback.stop)
			break;
		if (count > 0 && version->bulky)
			break;
		TAILQ_REMOVE(&core->writeback.queue, version, queued);
		ret_versions[count++] = version;
		if (version->bulky)
			break;
	}
	return count;
}

static bool wants_spill(const struct kv_core *core)
{
	return core->writeback.spill || atomic_load(&core->dirty) > core->budget / 4;
}

/* While no device answers in time, what is dirty stays where it is: later there is a place for it.
 */
static bool may_write(const struct kv_core *core)
{
	return !kv_devices_all_slow(core->devices);
}

/* Queue locked. */
static void wait_for_work(struct kv_core *core)
{
	unsigned ms = UINT_MAX;

	if (holds_some(core))
		ms = held_ms(core);
	/* After a spill that found nothing, look again when something may have changed. */
	if (wants_spill(core) && may_write(core))
		ms = (unsigned)kv_min_u64(ms, SPILL_AGAIN_MS);
	if (ms == 0)
		release_held(core);
	else if (ms == UINT_MAX)
		(void)pthread_cond_wait(&core->writeback.work, &core->writeback.lock);
	else
		(void)kv_cond_wait_ms(&core->writeback.work, &core->writeback.lock, ms);
}

/* Queue locked. Also at the end nothing is left behind: a slow device may answer yet. */
static bool is_done(const struct kv_core *core)
{
	return core->writeback.stop && TAILQ_EMPTY(&core->writeback.queue) &&
	       TAILQ_EMPTY(&core->writeback.waiting);
}

static void worker_loop(struct kv_worker *worker)
{
	struct kv_core *core = worker->core;
	struct kv_version *versions[KV_BATCH_CHUNKS];
	bool idle = false;

	for (;;) {
		unsigned count;
		{
			KV_LOCKED(&core->writeback.lock);
			while (!(count = may_write(core) ? take_versions(core, versions) : 0) &&
				!is_done(core)) {
				bool spills = wants_spill(core) && may_write(core) &&
					      !core->writeback.stop;

				if (spills && !idle)
					break;
				wait_for_work(core);
				idle = false;
			}
			if (!count && is_done(core))
				return;
			core->writeback.spill = false;
		}
		kv_crew_begin(&core->writeback.crew, worker->member);
		if (count > 0)
			work_off(worker, versions, count);
		else
			idle = !spill(worker);
		kv_crew_end(&core->writeback.crew, worker->member);
	}
}

static void *writeback_main(void *arg)
{
	struct kv_worker worker = {.core = arg};

	worker.member = kv_crew_join(&worker.core->writeback.crew);
	worker.ring_error = kv_ring_new(worker.core->devices, KV_RING_DEPTH, &worker.ring);
	worker.spill_blocks = (unsigned)kv_min_u64(
		KV_RUN_CHUNKS * KV_CHUNK_BLOCKS, worker.core->budget / 16 / KV_BLOCK_SIZE);
	worker_loop(&worker);
	kv_batch_done(&worker);
	kv_ring_free(worker.ring);
	return NULL;
}

int kv_writeback_start(struct kv_core *core)
{
	unsigned count =
		(unsigned)kv_min_u64(kv_devices_count(core->devices) + 1u, WRITEBACK_THREADS_MAX);
	int r;

	core->writeback.crew.main = writeback_main;
	r = kv_crew_start(core, &core->writeback.crew, count);
	return r < 0 ? r : kv_core_thread(core, kv_commit_main);
}

void kv_writeback_stop(struct kv_core *core)
{
	KV_LOCKED(&core->writeback.lock);

	core->writeback.stop = true;
	(void)pthread_cond_broadcast(&core->writeback.work);
	(void)pthread_cond_broadcast(&core->writeback.ready);
}
