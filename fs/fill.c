/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Asking for chunks to be brought into DRAM. The work itself is in fill_run.c.
 */
#include "fs/fill_internal.h"

#define FILL_THREADS_MAX 8u
#define FILL_BATCH_JOBS 64u

/* Lock held. True if the chunk has to be brought in and nobody is at it. */
static bool is_wanted(struct kv_version *version, uint32_t number)
{
	const struct kv_slot *slot = kv_slot_find(version, number);
	enum kv_chunk_state state = kv_slot_state(version, number);

	if (slot && slot->flags & KV_SLOT_BUSY)
		return false;
	return state == KV_CHUNK_COLD ||
	       (state == KV_CHUNK_BASE && !(slot && kv_slot_is_resident(slot)));
}

/*
 * The blocks of a chunk that has to be brought in; *ret_wanted is false if it has not. Of a BASE
 * chunk they do not change, so they are looked up first, with no lock held.
 */
static int wanted_bits(
	struct kv_version *version, uint32_t number, struct kv_bits *ret_bits, bool *ret_wanted)
{
	{
		KV_LOCKED(&version->lock);
		int r = kv_map_load(version, number);

		*ret_wanted = r == 0 && is_wanted(version, number);
		if (!*ret_wanted || kv_slot_state(version, number) != KV_CHUNK_BASE) {
			if (*ret_wanted)
				kv_slot_bits(kv_slot_find(version, number), ret_bits);
			return r;
		}
	}
	return kv_chunk_bits(version, number, ret_bits);
}

static int missing_bytes(struct kv_version *version, const struct kv_fill_range *range,
	uint64_t *ret_bytes, bool *ret_any)
{
	uint64_t blocks = 0;

	{
		KV_LOCKED(&version->lock);
		if (version->damaged)
			return -EIO;
	}
	*ret_any = false;
	for (uint32_t i = range->first; i - range->first < range->count; i++) {
		struct kv_bits bits;
		bool wanted;
		int r = wanted_bits(version, i, &bits, &wanted);

		if (r < 0)
			return r;
		if (wanted)
			blocks += kv_bits_count(&bits);
		*ret_any = *ret_any || wanted;
	}
	*ret_bytes = blocks << KV_BLOCK_SHIFT;
	return 0;
}

/* Lock held. Adds NUMBER, which has BITS, to the job at the end of QUEUE, or to a new one. A run's
 * pages have no gaps. */
static int add_to_jobs(struct kv_version *version, uint32_t number, const struct kv_bits *bits,
	struct kv_fill_queue *queue)
{
	struct kv_fill *job = TAILQ_LAST(queue, kv_fill_queue);

	if (job && job->first + job->count == number && job->count < KV_RUN_CHUNKS &&
		kv_bits_count(&job->bits) == KV_CHUNK_BLOCKS && kv_bits_is_prefix(bits)) {
		job->count++;
		job->bits = *bits;
		return 0;
	}
	job = calloc(1, sizeof(*job));
	if (!job)
		return -ENOMEM;
	job->version = kv_version_ref(version);
	job->first = number;
	job->count = 1;
	job->bits = *bits;
	version->busy++;
	TAILQ_INSERT_TAIL(queue, job, entry);
	return 0;
}

/* Marks the chunk busy and makes a job of it, if *BYTES of DRAM are enough: -EAGAIN. */
static int claim(
	struct kv_version *version, uint32_t number, uint64_t *bytes, struct kv_fill_queue *queue)
{
	struct kv_bits bits;
	bool wanted;
	int r = wanted_bits(version, number, &bits, &wanted);
	KV_LOCKED(&version->lock);
	struct kv_slot *slot;

	if (r < 0 || !wanted || !is_wanted(version, number))
		return r;
	r = kv_slot_get(version, number, &slot);
	if (r < 0)
		return r;
	/* It may have been written and evicted in between. */
	if (slot->state == KV_CHUNK_COLD)
		kv_slot_bits(slot, &bits);
	/* Pages that came before the content are its first ones. */
	uint64_t blocks = slot->charge ? 0 : kv_bits_count(&bits);
	assert(!slot->charge || kv_bits_end(&bits) <= slot->charge);
	if (kv_bits_count(&bits) == 0) {
		slot->flags |= KV_SLOT_RESIDENT;
		return 0;
	}
	if (blocks << KV_BLOCK_SHIFT > *bytes)
		return -EAGAIN;
	r = add_to_jobs(version, number, &bits, queue);
	if (r < 0)
		return r;
	slot->flags |= KV_SLOT_BUSY;
	slot->flags &= (uint16_t)~KV_SLOT_FAILED;
	*bytes -= blocks << KV_BLOCK_SHIFT;
	if (blocks > 0)
		kv_slot_charge_pages(version, slot, &bits);
	return 0;
}

/* Makes jobs of the wanted chunks, as far as BYTES of DRAM go. Leaves there what was not used. */
static int make_jobs(struct kv_version *version, const struct kv_fill_range *range, uint64_t *bytes,
	struct kv_fill_queue *queue)
{
	int r;

	{
		KV_LOCKED(&version->lock);
		r = kv_version_object_locked(version);
		if (r == 0 && version->state == KV_VERSION_WRITING &&
			version->object_size < kv_round_up(version->size, KV_CHUNK_SIZE)) {
			version->object_size = kv_round_up(version->size, KV_CHUNK_SIZE);
			r = kv_object_resize(version->object, version->object_size);
		}
	}
	for (uint32_t i = range->first; i - range->first < range->count && r == 0; i++)
		r = claim(version, i, bytes, queue);
	/* What there was not enough for is asked for again. */
	return r == -EAGAIN ? 0 : r;
}

static void push_jobs(struct kv_core *core, struct kv_fill_queue *jobs, bool ahead)
{
	KV_LOCKED(&core->fill.lock);

	TAILQ_CONCAT(ahead ? &core->fill.ahead : &core->fill.urgent, jobs, entry);
	(void)pthread_cond_broadcast(&core->fill.cond);
}

int kv_fill_begin(struct kv_version *version, const struct kv_fill_range *range)
{
	struct kv_core *core = version->file->core;
	struct kv_fill_queue jobs = TAILQ_HEAD_INITIALIZER(jobs);
	uint64_t bytes;
	bool any;
	int r;

	r = missing_bytes(version, range, &bytes, &any);
	if (r < 0 || !any)
		return r;
	r = kv_core_charge(core, bytes, range->patience_ms);
	if (r < 0)
		return r == -E2BIG ? -EAGAIN : r;
	r = make_jobs(version, range, &bytes, &jobs);
	push_jobs(core, &jobs, range->ahead);
	kv_core_uncharge(core, bytes);
	/* Too many descriptors is a shortage like any other. */
	return r == -EMFILE || r == -ENFILE || r == -ENOSPC ? -EAGAIN : r;
}

int kv_fill_wait(struct kv_version *version, uint32_t number)
{
	KV_LOCKED(&version->lock);

	for (;;) {
		const struct kv_slot *slot = kv_slot_find(version, number);
		if (!slot)
			return 0;
		if (!(slot->flags & KV_SLOT_BUSY))
			return slot->flags & KV_SLOT_FAILED ? -EIO : 0;
		kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
	}
}

static int fill_memory(struct kv_version *version, uint32_t number, bool stored, void *ret_memory)
{
	struct kv_core *core = version->file->core;
	struct kv_fill job = {
		.version = version,
		.first = number,
		.count = 1,
		.memory = ret_memory,
		.stored = stored,
	};

	assert((uintptr_t)ret_memory % KV_BLOCK_SIZE == 0);
	{
		KV_LOCKED(&core->fill.lock);
		TAILQ_INSERT_TAIL(&core->fill.urgent, &job, entry);
		(void)pthread_cond_broadcast(&core->fill.cond);
	}
	KV_LOCKED(&version->lock);
	while (!job.done)
		kv_park_wait(core, version, &version->lock, KV_WAIT_SLICE_MS);
	return job.result;
}

int kv_fill_private(struct kv_version *version, uint32_t number, void *ret_memory)
{
	return fill_memory(version, number, false, ret_memory);
}

int kv_fill_stored(struct kv_version *version, uint32_t number, void *ret_memory)
{
	return fill_memory(version, number, true, ret_memory);
}

/* Takes a share of the waiting jobs, urgent ones first, so that several threads work on many small
 * ones. */
static unsigned take_jobs(struct kv_core *core, struct kv_fill **ret_jobs)
{
	unsigned count = 0, chunks = 0;

	while (count < FILL_BATCH_JOBS) {
		struct kv_fill *job = TAILQ_FIRST(&core->fill.urgent);
		struct kv_fill_queue *queue = &core->fill.urgent;

		if (!job && count == 0) {
			job = TAILQ_FIRST(&core->fill.ahead);
			queue = &core->fill.ahead;
		}
		if (!job || (count > 0 && chunks + job->count > KV_RUN_CHUNKS))
			break;
		TAILQ_REMOVE(queue, job, entry);
		ret_jobs[count++] = job;
		chunks += job->count;
	}
	return count;
}

static void *fill_main(void *arg)
{
	struct kv_core *core = arg;
	struct kv_fill *jobs[FILL_BATCH_JOBS];
	struct kv_ring *ring = NULL;
	int r = kv_ring_new(core->devices, KV_RING_DEPTH, &ring);

	for (;;) {
		unsigned count;
		{
			KV_LOCKED(&core->fill.lock);
			while ((count = take_jobs(core, jobs)) == 0 && !core->fill.stop)
				(void)pthread_cond_wait(&core->fill.cond, &core->fill.lock);
			if (count == 0)
				break;
		}
		kv_fill_run(core, ring, r, (struct kv_fill_batch){jobs, count});
	}
	kv_ring_free(ring);
	return NULL;
}

int kv_fill_start(struct kv_core *core)
{
	unsigned count = (unsigned)kv_min_u64(
		kv_max_u64(2u * kv_devices_count(core->devices), 2), FILL_THREADS_MAX);
	int r = 0;

	for (unsigned i = 0; i < count && r == 0; i++)
		r = kv_core_thread(core, fill_main);
	return r;
}

void kv_fill_stop(struct kv_core *core)
{
	KV_LOCKED(&core->fill.lock);

	core->fill.stop = true;
	(void)pthread_cond_broadcast(&core->fill.cond);
}
