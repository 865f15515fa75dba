/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core's life, and what all of its rooms lean on: sleeping and waking, DRAM and space
 * accounting, hold-back of writers.
 */
#include "fs/core_internal.h"
#include "fs/wait.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

/* Writers wait above the one; unpublished versions are written early above the other. */
#define DIRTY_LIMIT(core) KV_DIRTY_LIMIT((core)->budget)
#define SPILL_LIMIT(core) ((core)->budget / 4)

void kv_cond_init(pthread_cond_t *cond)
{
	pthread_condattr_t attr;

	(void)pthread_condattr_init(&attr);
	(void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	(void)pthread_cond_init(cond, &attr);
	(void)pthread_condattr_destroy(&attr);
}

bool kv_cond_wait_ms(pthread_cond_t *cond, pthread_mutex_t *lock, unsigned ms)
{
	struct timespec until;

	kv_wait_begins();
	(void)clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += ms / 1000;
	until.tv_nsec += (long)(ms % 1000) * 1000000;
	if (until.tv_nsec >= 1000000000) {
		until.tv_sec++;
		until.tv_nsec -= 1000000000;
	}
	return pthread_cond_timedwait(cond, lock, &until) == 0;
}

static struct kv_park *park_of(struct kv_core *core, const void *key)
{
	uintptr_t bits = (uintptr_t)key;

	return &core->parks[(bits >> 5 ^ bits >> 11) % KV_PARKS];
}

void kv_park_wait(struct kv_core *core, const void *key, pthread_mutex_t *held, unsigned ms)
{
	struct kv_park *park = park_of(core, key);

	/* The waker changes what is waited for under HELD before it takes the park's lock: no
	 * wake-up is lost. */
	(void)pthread_mutex_lock(&park->lock);
	(void)pthread_mutex_unlock(held);
	(void)kv_cond_wait_ms(&park->cond, &park->lock, (unsigned)kv_min_u64(ms, KV_WAIT_SLICE_MS));
	(void)pthread_mutex_unlock(&park->lock);
	(void)pthread_mutex_lock(held);
}

void kv_park_wake(struct kv_core *core, const void *key)
{
	struct kv_park *park = park_of(core, key);

	KV_LOCKED(&park->lock);
	(void)pthread_cond_broadcast(&park->cond);
}

int kv_core_charge(struct kv_core *core, uint64_t bytes, unsigned patience_ms)
{
	int64_t since_ms = kv_monotonic_ms(), until = since_ms + patience_ms;
	int r;

	if (!bytes)
		return 0;
	for (;;) {
		r = kv_dram_charge(core->dram, bytes, 0);
		if (r != -EAGAIN)
			break;
		/* What keeps DRAM may be unpublished bytes that only an early write-back can turn
		 * into droppable ones. */
		kv_writeback_kick(core, true);
		int64_t left = until - kv_monotonic_ms();
		if (left <= 0 || atomic_load(&core->stopping) || kv_core_gives_up(core, since_ms))
			return -EAGAIN;
		r = kv_dram_charge(core->dram, bytes, (unsigned)kv_min_u64((uint64_t)left, 100));
		if (r != -EAGAIN)
			break;
	}
	if (r < 0)
		return r;
	uint64_t charged = atomic_fetch_add(&core->charged, bytes) + bytes;
	if (charged > core->budget / 100 * 95)
		kv_evict_kick(core);
	return 0;
}

int kv_core_charge_found(struct kv_core *core, uint64_t bytes)
{
	int r = kv_dram_charge_found(core->dram, bytes);

	if (r == 0)
		atomic_fetch_add(&core->charged, bytes);
	return r;
}

void kv_core_uncharge(struct kv_core *core, uint64_t bytes)
{
	if (!bytes)
		return;
	uint64_t before = atomic_fetch_sub(&core->charged, bytes);
	assert(before >= bytes);
	(void)before;
	kv_dram_uncharge(core->dram, bytes);
}

void kv_core_dirty_add(struct kv_core *core, uint64_t blocks)
{
	uint64_t bytes = blocks << KV_BLOCK_SHIFT;
	uint64_t before = atomic_fetch_add(&core->dirty, bytes);

	if (before <= SPILL_LIMIT(core) && before + bytes > SPILL_LIMIT(core))
		kv_writeback_kick(core, false);
}

void kv_core_dirty_sub(struct kv_core *core, uint64_t blocks, bool wake)
{
	uint64_t bytes = blocks << KV_BLOCK_SHIFT;
	uint64_t before = atomic_fetch_sub(&core->dirty, bytes);

	assert(before >= bytes);
	if (wake || before > DIRTY_LIMIT(core)) {
		KV_LOCKED(&core->writeback.lock);
		(void)pthread_cond_broadcast(&core->writeback.settled);
	}
}

void kv_core_throttle(struct kv_core *core)
{
	int64_t since_ms = kv_monotonic_ms(), until = since_ms + KV_PATIENCE_MS;
	uint64_t progress = 0;

	if (atomic_load(&core->dirty) <= DIRTY_LIMIT(core))
		return;
	kv_stat_add(&core->stats->throttled, 1);
	KV_LOCKED(&core->writeback.lock);
	while (atomic_load(&core->dirty) > DIRTY_LIMIT(core) && !atomic_load(&core->stopping)) {
		if (core->writeback.progress != progress) {
			progress = core->writeback.progress;
			since_ms = kv_monotonic_ms();
			until = since_ms + KV_PATIENCE_MS;
		}
		if (kv_monotonic_ms() > until || kv_core_gives_up(core, since_ms))
			return;
		(void)pthread_cond_signal(&core->writeback.work);
		(void)kv_cond_wait_ms(&core->writeback.settled, &core->writeback.lock, 50);
	}
}

int64_t kv_core_now_ns(struct kv_core *core)
{
	const struct kv_io_ops *ops = kv_devices_ops(core->devices);

	return ops->clock_ns(ops->context);
}

struct kv_index *kv_core_index(struct kv_core *core)
{
	return core->index;
}

struct kv_dram *kv_core_dram(struct kv_core *core)
{
	return core->dram;
}

void kv_core_set_hooks(struct kv_core *core, const struct kv_core_hooks *hooks)
{
	core->hooks = *hooks;
}

void kv_core_usage(struct kv_core *core, struct kv_core_usage *ret_usage)
{
	*ret_usage = (struct kv_core_usage){
		.files = atomic_load(&core->files),
		.versions = atomic_load(&core->versions),
		.dirty_bytes = atomic_load(&core->dirty),
		.dirty_limit = DIRTY_LIMIT(core),
		.open_handles = atomic_load(&core->opens),
	};
}

int kv_core_sync(struct kv_core *core)
{
	int64_t since_ms = kv_monotonic_ms();

	kv_writeback_hurry(core);
	{
		KV_LOCKED(&core->writeback.lock);
		uint64_t last = core->writeback.serial;
		for (;;) {
			struct kv_version *oldest = TAILQ_FIRST(&core->writeback.inflight);
			if (!oldest || oldest->serial > last)
				break;
			/* Its older siblings would be in front of it. */
			if ((kv_devices_all_slow(core->devices) ||
				    atomic_load(&oldest->wrote_on) &
					    kv_devices_slow(core->devices)) &&
				kv_core_gives_up(core, since_ms))
				return -EIO;
			(void)kv_cond_wait_ms(
				&core->writeback.settled, &core->writeback.lock, KV_WAIT_SLICE_MS);
		}
	}
	return kv_index_wait(core->index, kv_index_sequence(core->index));
}

void kv_core_changed(struct kv_core *core, uint64_t ino)
{
	if (core->hooks.changed)
		core->hooks.changed(core->hooks.arg, ino);
}

void kv_core_orphan(struct kv_core *core, uint64_t ino)
{
	struct kv_shard *shard = kv_shard_of(core, ino);
	struct kv_file *file = kv_file_find(core, ino);

	kv_core_changed(core, ino);
	if (!file) {
		kv_reap_push(core, ino);
		return;
	}
	(void)pthread_mutex_lock(&shard->lock);
	file->unlinked = true;
	kv_file_consider_reap_locked(file);
	(void)pthread_mutex_unlock(&shard->lock);
	kv_park_wake(core, file);
	kv_file_put(file);
}

int kv_core_thread(struct kv_core *core, void *(*main)(void *core))
{
	assert(core->thread_count < KV_THREADS_MAX);
	int r = pthread_create(&core->threads[core->thread_count], NULL, main, core);
	if (r)
		return -r;
	core->thread_count++;
	return 0;
}

static void core_init_locks(struct kv_core *core)
{
	for (unsigned i = 0; i < KV_SHARDS; i++) {
		(void)pthread_mutex_init(&core->shards[i].lock, NULL);
	}
	for (unsigned i = 0; i < KV_PARKS; i++) {
		(void)pthread_mutex_init(&core->parks[i].lock, NULL);
		kv_cond_init(&core->parks[i].cond);
	}
	(void)pthread_mutex_init(&core->lists.lock, NULL);
	TAILQ_INIT(&core->lists.idle);
	TAILQ_INIT(&core->lists.active);
	(void)pthread_mutex_init(&core->legacies.lock, NULL);
	(void)pthread_mutex_init(&core->fill.lock, NULL);
	kv_cond_init(&core->fill.cond);
	TAILQ_INIT(&core->fill.urgent);
	TAILQ_INIT(&core->fill.ahead);
	(void)pthread_mutex_init(&core->writeback.lock, NULL);
	kv_cond_init(&core->writeback.work);
	kv_cond_init(&core->writeback.ready);
	kv_cond_init(&core->writeback.settled);
	(void)pthread_mutex_init(&core->flush.lock, NULL);
	kv_cond_init(&core->flush.wanted);
	kv_cond_init(&core->flush.ended);
	(void)pthread_mutex_init(&core->watch.lock, NULL);
	kv_cond_init(&core->watch.cond);
	TAILQ_INIT(&core->writeback.queue);
	TAILQ_INIT(&core->writeback.waiting);
	TAILQ_INIT(&core->writeback.complete);
	TAILQ_INIT(&core->writeback.inflight);
	(void)pthread_mutex_init(&core->dram_evictor.lock, NULL);
	kv_cond_init(&core->dram_evictor.cond);
	(void)pthread_mutex_init(&core->evictor.lock, NULL);
	(void)pthread_mutex_init(&core->index_room_lock, NULL);
	kv_cond_init(&core->evictor.wanted);
	kv_cond_init(&core->evictor.done);
	(void)pthread_mutex_init(&core->quotas.lock, NULL);
	kv_cond_init(&core->quotas.changed);
	(void)pthread_mutex_init(&core->reaper.lock, NULL);
	kv_cond_init(&core->reaper.cond);
	kv_cond_init(&core->reaper.idle);
	STAILQ_INIT(&core->reaper.queue);
}

static int core_start(struct kv_core *core)
{
	int r = kv_lease_start(core);

	if (r >= 0)
		r = kv_flush_start(core);
	if (r >= 0)
		r = kv_fill_start(core);
	if (r >= 0)
		r = kv_writeback_start(core);
	if (r >= 0)
		r = kv_evict_start(core);
	if (r >= 0)
		r = kv_reap_start(core);
	if (r >= 0)
		r = kv_watch_start(core);
	if (r >= 0)
		r = kv_adopt_start(core);
	return r;
}

/* Waits for the last thread's end. False: a device does not answer it. */
static bool join_last(struct kv_core *core)
{
	int64_t since_ms = kv_monotonic_ms();
	struct timespec until;

	for (;;) {
		(void)clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec++;
		if (pthread_timedjoin_np(core->threads[core->thread_count - 1], NULL, &until) !=
			ETIMEDOUT)
			break;
		if (kv_core_gives_up(core, since_ms))
			return false;
	}
	core->thread_count--;
	return true;
}

/* The order in which the rooms may still need each other: reaping frees, eviction, writing,
 * filling, flushing. False: a device holds threads up, so nothing may be freed. */
static bool core_stop(struct kv_core *core)
{
	bool joined = true;

	kv_devices_closing(core->devices);
	kv_watch_no_more(core);
	kv_reap_stop(core);
	kv_writeback_stop(core);
	kv_evict_stop(core);
	kv_fill_stop(core);
	while (core->thread_count > 0 && joined) {
		/* The flushers were started first: all others have ended. */
		if (core->thread_count <= kv_devices_count(core->devices))
			kv_flush_stop(core);
		joined = join_last(core);
	}
	kv_watch_stop(core);
	return joined;
}

int kv_core_new(const struct kv_core_options *options, struct kv_core **ret_core, char *ret_error,
	size_t error_size)
{
	struct kv_core *core = calloc(1, sizeof(*core));

	if (!core) {
		(void)snprintf(ret_error, error_size, "out of memory");
		return -ENOMEM;
	}
	core->options = *options->options;
	core->store = options->store;
	core->index = options->store->index;
	core->space = kv_index_space(core->index);
	core->devices = options->store->devices;
	core->stats = options->stats;
	core->hooks = options->hooks;
	core->budget = core->options.dram_bytes;
	core->outlives = options->dram_is_shared;
	core->reaper.awaits_word = options->awaits_word;
	core->unsettled.notes = options->unsettled;
	core_init_locks(core);

	const struct kv_dram_options dram = {
		.budget_bytes = core->budget,
		.reclaim = kv_evict_reclaim,
		.reclaim_arg = core,
		.shared = options->dram_is_shared,
		.mount_fd = options->dram_mount,
	};
	int r = kv_dram_new(&dram, &core->dram, ret_error, error_size);
	if (r < 0) {
		free(core);
		return r;
	}
	/* The hooks, which may come at once, look for it there. */
	*ret_core = core;
	r = core_start(core);
	if (r < 0) {
		*ret_core = NULL;
		(void)snprintf(
			ret_error, error_size, "cannot start the worker threads: %s", strerror(-r));
		(void)core_stop(core);
		kv_adopt_done(core);
		kv_dram_free(core->dram);
		free(core->fill.staging);
		free(core->leases);
		free(core);
		return r;
	}
	return 0;
}

struct kv_core *kv_core_free(struct kv_core *core)
{
	if (!core)
		return NULL;
	int r = kv_core_sync(core);
	if (r < 0)
		kv_log_error("core", "last commit failed error=%s", strerror(-r));
	kv_core_go_on(core);
	kv_reap_drain(core, KV_PATIENCE_MS);
	atomic_store(&core->stopping, true);
	if (!core_stop(core)) {
		kv_log_error("core",
			"a device does not answer: what was not written yet is lost bytes=%" PRIu64,
			(uint64_t)atomic_load(&core->dirty));
		(void)kv_index_wait(core->index, kv_index_sequence(core->index));
		return core;
	}
	unsigned left = kv_files_free(core);
	if (left)
		kv_log_warning("core", "files still in use at the end files=%u", left);
	r = kv_index_wait(core->index, kv_index_sequence(core->index));
	if (r < 0)
		kv_log_error("core", "last commit failed error=%s", strerror(-r));
	/* Where libfuse had no memory for a RELEASE for a minute, what that file has goes with the
	 * process. */
	if (left == 0)
		kv_dram_free(core->dram);
	kv_adopt_done(core);
	free(core->fill.staging);
	free(core->leases);
	free(core);
	return NULL;
}
