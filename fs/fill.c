/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Asking for chunks to be brought into DRAM. The work itself is in fill_run.c.
 */
#include "fs/fill_internal.h"

#include <sys/mman.h>

/* While one waits for its device or compares sums, the others keep the device's queue filled. */
#define FILL_THREADS_A_DEVICE 4u
#define FILL_THREADS_MAX 8u
/* A job has the chunks of a huge page, and a thread takes as many bytes at a time. */
#define FILL_JOB_CHUNKS 2u
#define FILL_BATCH_BLOCKS (FILL_JOB_CHUNKS * KV_CHUNK_BLOCKS)
#define STAGING_SIZE ((size_t)2 << 20)

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

/* A chunk that has to be brought in. */
struct wanted {
	struct kv_bits bits;
	uint64_t devices; /* that it has to be read from, as far as is known */
};

/*
 * What a chunk that has to be brought in has; *ret_any is false if it has not. Of a BASE chunk the
 * blocks do not change, so they are looked up first, with no lock held.
 */
static int find_wanted(
	struct kv_version *version, uint32_t number, struct wanted *ret_wanted, bool *ret_any)
{
	{
		KV_LOCKED(&version->lock);
		int r = kv_map_load(version, number);

		*ret_any = r == 0 && is_wanted(version, number);
		if (!*ret_any)
			return r;
		const struct kv_slot *slot = kv_slot_find(version, number);
		if (kv_slot_state(version, number) != KV_CHUNK_BASE) {
			kv_slot_bits(slot, &ret_wanted->bits);
			ret_wanted->devices = kv_slot_devices(slot);
			return 0;
		}
	}
	return kv_chunk_find(version, number, &ret_wanted->bits, &ret_wanted->devices);
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
		struct wanted wanted;
		bool any;
		int r = find_wanted(version, i, &wanted, &any);

		if (r < 0)
			return r;
		if (any)
			blocks += kv_bits_count(&wanted.bits);
		*ret_any = *ret_any || any;
	}
	*ret_bytes = blocks << KV_BLOCK_SHIFT;
	return 0;
}

/* Lock held. Adds NUMBER to the job at the end of QUEUE, or to a new one. A run's pages have no
 * gaps. */
static int add_to_jobs(struct kv_version *version, uint32_t number, const struct wanted *wanted,
	struct kv_fill_queue *queue)
{
	const struct kv_bits *bits = &wanted->bits;
	struct kv_fill *job = TAILQ_LAST(queue, kv_fill_queue);

	if (job && job->first + job->count == number && number % FILL_JOB_CHUNKS != 0 &&
		kv_bits_count(&job->bits) == KV_CHUNK_BLOCKS && kv_bits_is_prefix(bits)) {
		job->count++;
		job->bits = *bits;
		job->devices |= wanted->devices;
		version->busy++;
		return 0;
	}
	job = calloc(1, sizeof(*job));
	if (!job)
		return -ENOMEM;
	job->version = kv_version_ref(version);
	job->first = number;
	job->count = 1;
	job->bits = *bits;
	job->devices = wanted->devices;
	version->busy++;
	TAILQ_INSERT_TAIL(queue, job, entry);
	return 0;
}

/* Marks the chunk busy and makes a job of it, if *BYTES of DRAM are enough: -EAGAIN. */
static int claim(
	struct kv_version *version, uint32_t number, uint64_t *bytes, struct kv_fill_queue *queue)
{
	const struct kv_bits *bits;
	struct wanted wanted;
	bool any;
	int r = find_wanted(version, number, &wanted, &any);
	KV_LOCKED(&version->lock);
	struct kv_slot *slot;

	if (r < 0 || !any || !is_wanted(version, number))
		return r;
	r = kv_slot_get(version, number, &slot);
	if (r < 0)
		return r;
	/* It may have been written and evicted in between. */
	if (slot->state == KV_CHUNK_COLD) {
		kv_slot_bits(slot, &wanted.bits);
		wanted.devices = kv_slot_devices(slot);
	}
	bits = &wanted.bits;
	/* Pages that came before the content are its first ones. */
	uint64_t blocks = slot->charge ? 0 : kv_bits_count(bits);
	assert(!slot->charge || kv_bits_end(bits) <= slot->charge);
	if (kv_bits_count(bits) == 0) {
		slot->flags |= KV_SLOT_RESIDENT;
		return 0;
	}
	if (blocks << KV_BLOCK_SHIFT > *bytes)
		return -EAGAIN;
	r = add_to_jobs(version, number, &wanted, queue);
	if (r < 0)
		return r;
	slot->flags |= KV_SLOT_BUSY;
	slot->flags &= (uint16_t)~KV_SLOT_FAILED;
	*bytes -= blocks << KV_BLOCK_SHIFT;
	if (blocks > 0)
		kv_slot_charge_pages(version, slot, bits);
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
		/* Nobody need have it open: until the jobs do, nothing else keeps the object. */
		version->busy++;
	}
	for (uint32_t i = range->first; i - range->first < range->count && r == 0; i++)
		r = claim(version, i, bytes, queue);
	{
		KV_LOCKED(&version->lock);
		version->busy--;
	}
	/* What there was not enough for is asked for again. */
	return r == -EAGAIN ? 0 : r;
}

static void push_jobs(struct kv_core *core, struct kv_fill_queue *jobs, bool ahead)
{
	const struct kv_fill *job;
	KV_LOCKED(&core->fill.lock);

	/* One thread a job, as far as they are idle. */
	TAILQ_FOREACH (job, jobs, entry)
		(void)pthread_cond_signal(&core->fill.cond);
	TAILQ_CONCAT(ahead ? &core->fill.ahead : &core->fill.urgent, jobs, entry);
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

bool kv_fill_gives_up(struct kv_version *version, const struct kv_slot *slot, int64_t since_ms)
{
	struct kv_core *core = version->file->core;

	if (kv_core_gives_up(core, since_ms))
		return true;
	if ((kv_slot_devices(slot) & kv_devices_hung(core->devices)) == 0)
		return false;
	kv_stat_add(&core->stats->io_timeouts, 1);
	return true;
}

int kv_fill_wait(struct kv_version *version, uint32_t number)
{
	int64_t since_ms = kv_monotonic_ms();
	KV_LOCKED(&version->lock);

	for (;;) {
		const struct kv_slot *slot = kv_slot_find(version, number);
		if (!slot)
			return 0;
		if (!(slot->flags & KV_SLOT_BUSY))
			return slot->flags & KV_SLOT_FAILED ? -EIO : 0;
		if (kv_fill_gives_up(version, slot, since_ms))
			return -ETIMEDOUT;
		kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
	}
}

/* ---- Past the object ---- */

void kv_fill_free(struct kv_fill *job)
{
	kv_version_unref(job->version);
	free(job->memory);
	free(job);
}

/* -ETIMEDOUT: the job is not ours any more. */
static int wait_private(struct kv_fill *job)
{
	struct kv_version *version = job->version;
	int64_t since_ms = kv_monotonic_ms();
	KV_LOCKED(&version->lock);

	while (!job->done) {
		if (kv_core_gives_up(version->file->core, since_ms)) {
			job->left = true;
			return -ETIMEDOUT;
		}
		kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
	}
	return job->result;
}

static struct kv_fill *private_job(
	struct kv_version *version, uint32_t number, bool ours, bool stored)
{
	struct kv_fill *job = calloc(1, sizeof(*job));

	if (!job)
		return NULL;
	job->memory = aligned_alloc(KV_BLOCK_SIZE, KV_CHUNK_SIZE);
	if (!job->memory) {
		free(job);
		return NULL;
	}
	memset(job->memory, 0, KV_CHUNK_SIZE);
	job->version = kv_version_ref(version);
	job->first = number;
	job->count = 1;
	job->ours = ours;
	job->stored = stored;
	return job;
}

static int fill_memory(
	struct kv_version *version, uint32_t number, bool ours, bool stored, void **ret_memory)
{
	struct kv_core *core = version->file->core;
	struct kv_fill *job = private_job(version, number, ours, stored);
	struct kv_bits bits;
	int r;

	if (!job) {
		KV_LOCKED(&version->lock);
		if (ours)
			kv_slot_find(version, number)->flags &= (uint16_t)~KV_SLOT_BUSY;
		kv_park_wake(core, version);
		return -ENOMEM;
	}
	/* Where that fails the job does, too, and says so. */
	(void)kv_chunk_find(version, number, &bits, &job->devices);
	{
		KV_LOCKED(&core->fill.lock);
		TAILQ_INSERT_TAIL(&core->fill.urgent, job, entry);
		(void)pthread_cond_signal(&core->fill.cond);
	}
	r = wait_private(job);
	if (r == -ETIMEDOUT)
		return r;
	if (r == 0)
		*ret_memory = kv_steal_ptr(&job->memory);
	kv_fill_free(job);
	return r;
}

int kv_fill_private(struct kv_version *version, uint32_t number, bool ours, void **ret_memory)
{
	return fill_memory(version, number, ours, false, ret_memory);
}

int kv_fill_stored(struct kv_version *version, uint32_t number)
{
	_cleanup_free_ void *memory = NULL;

	return fill_memory(version, number, false, true, &memory);
}

/* ---- Threads ---- */

/*
 * Jobs that need a slow device wait until it has answered what it was asked, or is given up: then
 * they fail at once. What a thread takes while it waits for CURRENT shares its fate, so it is for
 * the same devices.
 */
static bool may_take(
	const struct kv_core *core, const struct kv_fill *job, const struct kv_fill_batch *current)
{
	uint64_t avoided = kv_devices_slow(core->devices) & ~kv_devices_hung(core->devices);

	if (core->fill.stop)
		return true;
	if (current && (job->devices == 0 || job->devices & ~current->devices))
		return false;
	return (job->devices & avoided) == 0;
}

static struct kv_fill *next_job(const struct kv_core *core, const struct kv_fill_queue *queue,
	const struct kv_fill_batch *current)
{
	struct kv_fill *job;

	TAILQ_FOREACH (job, queue, entry)
		if (may_take(core, job, current))
			break;
	return job;
}

static unsigned blocks_of(const struct kv_fill *job)
{
	return job->memory ? KV_CHUNK_BLOCKS
			   : (job->count - 1) * KV_CHUNK_BLOCKS + kv_bits_count(&job->bits);
}

/* Takes a share of the waiting jobs, urgent ones first: few as long as other threads are idle. */
static void take_jobs(
	struct kv_core *core, const struct kv_fill_batch *current, struct kv_fill_batch *ret_batch)
{
	unsigned most = core->fill.idle > 0 ? FILL_JOB_CHUNKS : KV_FILL_BATCH_JOBS;
	unsigned blocks = 0;
	bool known = true;

	ret_batch->count = 0;
	ret_batch->devices = 0;
	while (ret_batch->count < most) {
		struct kv_fill_queue *queue = &core->fill.urgent;
		struct kv_fill *job = next_job(core, queue, current);

		if (!job && ret_batch->count == 0) {
			queue = &core->fill.ahead;
			job = next_job(core, queue, current);
		}
		if (!job || (ret_batch->count > 0 && blocks + blocks_of(job) > FILL_BATCH_BLOCKS))
			break;
		TAILQ_REMOVE(queue, job, entry);
		ret_batch->jobs[ret_batch->count++] = job;
		ret_batch->devices |= job->devices;
		known = known && job->devices != 0;
		blocks += blocks_of(job);
	}
	if (!known)
		ret_batch->devices = 0;
}

/*
 * Waits for work; no jobs: there will be none. With CURRENT under way it does not wait, and leaves
 * the work to those who have none.
 */
static void next_batch(
	struct kv_core *core, const struct kv_fill_batch *current, struct kv_fill_batch *ret_batch)
{
	KV_LOCKED(&core->fill.lock);

	ret_batch->count = 0;
	ret_batch->staging = NULL;
	if (current && core->fill.idle > 0)
		return;
	for (;;) {
		take_jobs(core, current, ret_batch);
		if (ret_batch->count > 0 || current || core->fill.stop)
			break;
		core->fill.idle++;
		(void)pthread_cond_wait(&core->fill.cond, &core->fill.lock);
		core->fill.idle--;
	}
	if (ret_batch->count == 1 && core->fill.idle + 1 >= core->fill.crew.size && !current)
		ret_batch->staging = kv_steal_ptr(&core->fill.staging);
}

static void end_batch(struct kv_core *core, struct kv_fill_batch *batch)
{
	KV_LOCKED(&core->fill.lock);

	if (batch->staging)
		core->fill.staging = kv_steal_ptr(&batch->staging);
}

/*
 * A thread prepares the next batch while the devices are at the current one, so that they get it
 * the moment they have answered. They would wait meanwhile while sums are compared and pages
 * cleared, which takes about as long as to read them.
 */
static void *fill_main(void *arg)
{
	struct kv_core *core = arg;
	struct kv_fill_batch batches[2], *current = &batches[0], *next = &batches[1];
	struct kv_fill_run *run = NULL, *prepared;
	unsigned me = kv_crew_join(&core->fill.crew);
	struct kv_ring *ring = NULL;
	int r = kv_fill_ring_new(core, &ring);

	for (;;) {
		next_batch(core, run ? current : NULL, next);
		if (next->count == 0 && !run)
			break;
		/* What it lacked when the thread began may be there now. */
		if (r < 0)
			r = kv_fill_ring_new(core, &ring);
		if (!run)
			kv_crew_begin(&core->fill.crew, me);
		prepared = next->count > 0 ? kv_fill_prepare(core, ring, r, next, !run) : NULL;
		if (run) {
			kv_fill_finish(run, prepared);
			end_batch(core, current);
		}
		run = prepared;
		if (run) {
			kv_crew_begin(&core->fill.crew, me);
		} else {
			kv_crew_end(&core->fill.crew, me);
			end_batch(core, next);
		}
		struct kv_fill_batch *swap = current;
		current = next;
		next = swap;
	}
	(void)kv_fill_ring_free(ring);
	return NULL;
}

/* One huge page, which a transfer takes whole. Without it the first chunk waits for its pages. */
static void *new_staging(void)
{
	void *memory = aligned_alloc(STAGING_SIZE, STAGING_SIZE);

	static_assert(STAGING_SIZE >= FILL_JOB_CHUNKS * KV_CHUNK_SIZE, "room for a job");
	if (!memory)
		return NULL;
	(void)madvise(memory, STAGING_SIZE, MADV_HUGEPAGE);
	/* Somebody's content: see privileges.h. */
	(void)madvise(memory, STAGING_SIZE, MADV_DONTDUMP);
	return memory;
}

int kv_fill_start(struct kv_core *core)
{
	unsigned count = (unsigned)kv_min_u64(
		FILL_THREADS_A_DEVICE * kv_devices_count(core->devices), FILL_THREADS_MAX);

	core->fill.staging = new_staging();
	core->fill.crew.main = fill_main;
	return kv_crew_start(core, &core->fill.crew, count);
}

void kv_fill_stop(struct kv_core *core)
{
	KV_LOCKED(&core->fill.lock);

	core->fill.stop = true;
	(void)pthread_cond_broadcast(&core->fill.cond);
}
