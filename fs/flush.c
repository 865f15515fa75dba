/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Flushing the devices: a thread each, so that one that does not answer holds up only what was
 * written to it.
 */
#include "fs/core_internal.h"

static void flush_one(struct kv_core *core, unsigned device)
{
	int r = kv_devices_flush(core->devices, device);

	if (r == 0)
		return;
	kv_log_error("commit", "flush failed device=%u error=%s", device, strerror(-r));
	(void)atomic_fetch_add(&core->flush_failures, 1);
}

static void *flush_main(void *arg)
{
	struct kv_core *core = arg;
	struct kv_flusher *flusher = NULL;

	{
		KV_LOCKED(&core->flush.lock);
		for (unsigned i = 0; !flusher; i++)
			if (!core->flush.flushers[i].core)
				flusher = &core->flush.flushers[i];
		flusher->core = core;
		flusher->device = (unsigned)(flusher - core->flush.flushers);
	}
	for (;;) {
		uint64_t asked;
		{
			KV_LOCKED(&core->flush.lock);
			while (flusher->asked == flusher->ended && !core->flush.stop)
				(void)pthread_cond_wait(&core->flush.wanted, &core->flush.lock);
			if (flusher->asked == flusher->ended)
				return NULL;
			asked = flusher->asked;
		}
		flush_one(core, flusher->device);
		KV_LOCKED(&core->flush.lock);
		flusher->ended = asked;
		(void)pthread_cond_broadcast(&core->flush.ended);
	}
}

/* Lock held. Asks for a flush of every device that was written to. Returns which these are. */
static uint64_t ask(struct kv_core *core, uint64_t *ret_numbers)
{
	uint64_t asked = 0;

	for (unsigned i = 0; i < kv_devices_count(core->devices); i++) {
		struct kv_flusher *flusher = &core->flush.flushers[i];

		if (!kv_devices_unflushed(core->devices, i))
			continue;
		asked |= UINT64_C(1) << i;
		/* One that has not begun yet covers this, too. */
		ret_numbers[i] = ++flusher->asked;
	}
	if (asked)
		(void)pthread_cond_broadcast(&core->flush.wanted);
	return asked;
}

uint64_t kv_flush_devices(struct kv_core *core)
{
	uint64_t numbers[KV_DEVICES_MAX];
#ifdef KV_BREAK_NO_DATA_FLUSH
	/* Built beside the right one, by which the crash tests show that they would notice. */
	return 0;
#endif
	KV_LOCKED(&core->flush.lock);
	uint64_t left = ask(core, numbers);

	for (;;) {
		for (unsigned i = 0; i < kv_devices_count(core->devices); i++)
			if (left >> i & 1 && core->flush.flushers[i].ended >= numbers[i])
				left &= ~(UINT64_C(1) << i);
		if ((left & ~kv_devices_slow(core->devices)) == 0)
			return left;
		(void)kv_cond_wait_ms(&core->flush.ended, &core->flush.lock, KV_WAIT_SLICE_MS);
	}
}

int kv_flush_start(struct kv_core *core)
{
	int r = 0;

	for (unsigned i = 0; i < kv_devices_count(core->devices) && r == 0; i++)
		r = kv_core_thread(core, flush_main);
	return r;
}

void kv_flush_stop(struct kv_core *core)
{
	KV_LOCKED(&core->flush.lock);

	core->flush.stop = true;
	(void)pthread_cond_broadcast(&core->flush.wanted);
}
