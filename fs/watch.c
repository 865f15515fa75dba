/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices that do not answer. A thread looks at them now and then; who waits for a device asks here
 * when to stop. What is under way on a hung device keeps its memory, its slot and its thread until
 * the device answers; the thread is replaced, so that the other devices lack none.
 */
#include "fs/core_internal.h"

/* A device is slow when it has not answered for that part of io_timeout: no new work until then. */
#define SLOW_SHARE 4u
/* The watch looks that often within io_timeout, but no more often than every LOOK_MS_MIN. */
#define LOOKS 16u
#define LOOK_MS_MIN 10u
#define LOOK_MS_MAX 250u

uint64_t kv_watch_slow_ms(const struct kv_core *core)
{
	return core->options.io_timeout_ms / SLOW_SHARE;
}

bool kv_core_gives_up(struct kv_core *core, int64_t since_ms)
{
	if (kv_devices_hung(core->devices) == 0 ||
		kv_monotonic_ms() - since_ms < (int64_t)core->options.io_timeout_ms)
		return false;
	kv_stat_add(&core->stats->io_timeouts, 1);
	return true;
}

/* ---- Crews ---- */

static int start_member(struct kv_core *core, struct kv_crew *crew)
{
	int r = kv_core_thread(core, crew->main);

	if (r == 0)
		crew->started++;
	return r;
}

int kv_crew_start(struct kv_core *core, struct kv_crew *crew, unsigned size)
{
	int r = 0;

	assert(size <= KV_CREW_MAX);
	crew->size = size;
	while (crew->started < size && r == 0)
		r = start_member(core, crew);
	return r;
}

unsigned kv_crew_join(struct kv_crew *crew)
{
	return atomic_fetch_add(&crew->joined, 1);
}

void kv_crew_begin(struct kv_crew *crew, unsigned member)
{
	atomic_store_explicit(&crew->since_ms[member], kv_monotonic_ms(), memory_order_relaxed);
}

void kv_crew_end(struct kv_crew *crew, unsigned member)
{
	atomic_store_explicit(&crew->since_ms[member], 0, memory_order_relaxed);
}

/* As many as there should be are free to work, or will soon be. */
static void reinforce(struct kv_core *core, struct kv_crew *crew)
{
	int64_t before = kv_monotonic_ms() - (int64_t)kv_watch_slow_ms(core);
	unsigned held_up = 0;

	for (unsigned i = 0; i < crew->started; i++) {
		int64_t since = atomic_load_explicit(&crew->since_ms[i], memory_order_relaxed);

		held_up += since != 0 && since <= before;
	}
	while (crew->started < KV_CREW_MAX && crew->started < crew->size + held_up)
		if (start_member(core, crew) < 0)
			return; /* the next look tries again */
}

/* ---- The watch ---- */

/* Whoever waits looks again. */
static void wake_all(struct kv_core *core)
{
	for (unsigned i = 0; i < KV_PARKS; i++) {
		KV_LOCKED(&core->parks[i].lock);
		(void)pthread_cond_broadcast(&core->parks[i].cond);
	}
	{
		KV_LOCKED(&core->fill.lock);
		(void)pthread_cond_broadcast(&core->fill.cond);
	}
	{
		KV_LOCKED(&core->flush.lock);
		(void)pthread_cond_broadcast(&core->flush.ended);
	}
	KV_LOCKED(&core->writeback.lock);
	(void)pthread_cond_broadcast(&core->writeback.work);
	(void)pthread_cond_broadcast(&core->writeback.ready);
	(void)pthread_cond_broadcast(&core->writeback.settled);
}

static void *watch_main(void *arg)
{
	struct kv_core *core = arg;
	uint64_t timeout_ms = core->options.io_timeout_ms;
	uint64_t slow_ms = kv_watch_slow_ms(core);
	unsigned look_ms =
		(unsigned)kv_min_u64(LOOK_MS_MAX, kv_max_u64(LOOK_MS_MIN, timeout_ms / LOOKS));
	int64_t looked_ms = kv_monotonic_ms();

	for (;;) {
		{
			KV_LOCKED(&core->watch.lock);
			if (!core->watch.stop)
				(void)kv_cond_wait_ms(
					&core->watch.cond, &core->watch.lock, look_ms);
			if (core->watch.stop)
				return NULL;
		}
		const int64_t now_ms = kv_monotonic_ms();
		if ((uint64_t)(now_ms - looked_ms) >= look_ms + slow_ms)
			kv_devices_excuse(core->devices, now_ms);
		looked_ms = now_ms;
		if (kv_devices_watch(core->devices, now_ms, slow_ms, timeout_ms))
			wake_all(core);
		KV_LOCKED(&core->watch.lock);
		if (kv_devices_slow(core->devices) == 0 || core->watch.ending)
			continue;
		reinforce(core, &core->fill.crew);
		reinforce(core, &core->writeback.crew);
	}
}

int kv_watch_start(struct kv_core *core)
{
	int r = pthread_create(&core->watch.thread, NULL, watch_main, core);

	core->watch.running = r == 0;
	return -r;
}

void kv_watch_no_more(struct kv_core *core)
{
	KV_LOCKED(&core->watch.lock);

	core->watch.ending = true;
}

void kv_watch_stop(struct kv_core *core)
{
	if (!core->watch.running)
		return;
	{
		KV_LOCKED(&core->watch.lock);
		core->watch.stop = true;
		(void)pthread_cond_broadcast(&core->watch.cond);
	}
	(void)pthread_join(core->watch.thread, NULL);
	core->watch.running = false;
}
