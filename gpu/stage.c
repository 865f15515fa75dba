/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs, and the stager's thread: see stage.h. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <time.h>

#include "gpu/numa.h"
#include "gpu/sample.h"
#include "gpu/stage_internal.h"

#define SLOTS_DEFAULT 16u
#define SLOT_SIZE_DEFAULT (8u << 20)
#define STREAMS_DEFAULT 2u
#define TIMEOUT_DEFAULT_MS 5000u
#define WORKERS_DEFAULT_MAX 4u
#define RESCUERS 2u
/* A round that finds nothing to do sleeps this long: short against the time of one chunk. */
#define PAUSE_NS 30000
/* How long the end waits for reads that do not come. */
#define END_PATIENCE_NS (INT64_C(2) * 1000 * 1000 * 1000)

int64_t kvg_stager_now(const struct kvg_stager *stager)
{
	return stager->options.io->clock_ns(stager->options.io->context);
}

void kvg_job_fail(struct kvg_job *job, int error)
{
	assert(error < 0);
	if (job->result == 0)
		job->result = error;
}

static const struct kvg_target *target_at(const struct kvg_job *job, uint64_t offset)
{
	return &job->targets[(offset - job->offset) / job->targets[0].size];
}

uint64_t kvg_job_more(struct kvg_job *job, uint64_t at_most)
{
	uint64_t size = job->targets[0].size, end = kvg_job_end(job), until;

	while (job->next < end && target_at(job, job->next)->skip)
		job->next = kv_min_u64(
			job->offset + kv_round_up(job->next - job->offset + 1, size), end);
	for (until = job->next; until < end && until - job->next < at_most;
		until = job->offset + kv_round_up(until - job->offset + 1, size))
		if (target_at(job, until)->skip)
			break;
	return kv_min_u64(kv_min_u64(until, end) - job->next, at_most);
}

void kvg_job_sample(const struct kvg_job *job, const void *memory, uint64_t offset, uint64_t length)
{
	uint64_t size = job->targets[0].size;

	for (uint64_t done = 0; done < length;) {
		uint64_t at = offset - job->offset + done;
		uint64_t part = kv_min_u64(length - done, size - at % size);
		struct kvg_samples *samples = job->targets[at / size].samples;

		if (samples)
			kvg_samples_take(samples, (const uint8_t *)memory + done, at % size, part);
		done += part;
	}
}

/* ---- Jobs ---- */

static bool begin_more(struct kvg_stager *stager, struct kvg_job *job)
{
	if (job->result < 0)
		return false;
	if (!job->tail_done && !kvg_tail_begin(stager, job))
		return false;
	if (kvg_job_is_direct(stager, job))
		return kvg_windows_begin(stager, job);
	return job->object_fd >= 0 && !job->ring ? kvg_pieces_begin(stager, job)
						 : kvg_slots_begin(stager, job);
}

/* To the caller. OVER: its memory is his again. */
static void report(struct kvg_stager *stager, struct kvg_job *job, bool over)
{
	const uint64_t one = 1;
	KV_LOCKED(&stager->lock);

	job->over = over;
	if (!job->queued)
		TAILQ_INSERT_TAIL(&stager->done, job, entry);
	job->queued = true;
	(void)!write(stager->event_fd, &one, sizeof(one));
}

void kvg_job_over(struct kvg_stager *stager, struct kvg_job *job)
{
	report(stager, job, true);
}

/* Whether nothing is under way any more of JOB, which has failed, but what does not end. */
static bool is_stuck(const struct kvg_stager *stager, const struct kvg_job *job)
{
	return job->result < 0 && job->in_flight > 0 &&
	       job->in_flight == kvg_directs_stuck(stager, job);
}

static bool jobs_step(struct kvg_stager *stager)
{
	struct kvg_job *job, *next;
	bool progress = false;

	for (job = TAILQ_FIRST(&stager->active); job; job = next) {
		next = TAILQ_NEXT(job, entry);
		if (atomic_load_explicit(&job->cancel, memory_order_relaxed))
			kvg_job_fail(job, -ECANCELED);
		progress |= begin_more(stager, job);
		job->early = is_stuck(stager, job);
		if (!job->early &&
			(job->in_flight > 0 || (job->result == 0 && job->next < kvg_job_end(job))))
			continue;
		TAILQ_REMOVE(&stager->active, job, entry);
		report(stager, job, !job->early);
		progress = true;
	}
	return progress;
}

/* Behind those that go before it: of equals, those that came earlier. */
static void activate(struct kvg_stager *stager, struct kvg_job *job)
{
	struct kvg_job *other;

	job->rank = job->priority;
	TAILQ_FOREACH (other, &stager->active, entry)
		if (other->rank < job->rank)
			break;
	if (other)
		TAILQ_INSERT_BEFORE(other, job, entry);
	else
		TAILQ_INSERT_TAIL(&stager->active, job, entry);
}

static void take_submitted(struct kvg_stager *stager)
{
	struct kvg_job_queue old = TAILQ_HEAD_INITIALIZER(old);
	struct kvg_job *job;
	KV_LOCKED(&stager->lock);

	if (stager->reorder) {
		TAILQ_CONCAT(&old, &stager->active, entry);
		stager->reorder = false;
	}
	TAILQ_CONCAT(&old, &stager->submitted, entry);
	while ((job = TAILQ_FIRST(&old))) {
		TAILQ_REMOVE(&old, job, entry);
		activate(stager, job);
	}
}

bool kvg_stager_step(struct kvg_stager *stager)
{
	bool progress;

	take_submitted(stager);
	progress = kvg_lanes_step(stager);
	progress |= kvg_slots_step(stager);
	progress |= kvg_pieces_step(stager);
	progress |= kvg_directs_step(stager);
	progress |= jobs_step(stager);
	return progress;
}

static bool is_idle(const struct kvg_stager *stager)
{
	return TAILQ_EMPTY(&stager->active) && stager->reads == 0 && kvg_slots_idle(stager) &&
	       kvg_pieces_idle(stager) && kvg_directs_idle(stager);
}

static void *stager_main(void *arg)
{
	const struct timespec pause = {.tv_nsec = PAUSE_NS};
	struct kvg_stager *stager = arg;
	int64_t stop_ns = 0;

	for (;;) {
		bool progress = kvg_stager_step(stager);

		(void)pthread_mutex_lock(&stager->lock);
		while (!stager->stop && TAILQ_EMPTY(&stager->submitted) && is_idle(stager))
			(void)pthread_cond_wait(&stager->more, &stager->lock);
		bool stop = stager->stop;
		(void)pthread_mutex_unlock(&stager->lock);
		if (stop && stop_ns == 0) {
			struct kvg_job *job;

			take_submitted(stager);
			TAILQ_FOREACH (job, &stager->active, entry)
				kvg_job_fail(job, -ESHUTDOWN);
			stop_ns = kvg_stager_now(stager);
		}
		if (stop && (is_idle(stager) || kvg_stager_now(stager) - stop_ns > END_PATIENCE_NS))
			return NULL;
		if (!progress)
			(void)nanosleep(&pause, NULL);
	}
}

void kvg_stager_submit(struct kvg_stager *stager, struct kvg_job *job)
{
	assert(job->size > 0 && job->target_count > 0 && job->offset % KV_CHUNK_SIZE == 0);
	job->result = 0;
	job->counts = (struct kvg_job_counts){0};
	job->next = job->offset;
	job->in_flight = 0;
	job->tail_done = job->ring = job->early = job->queued = job->over = false;
	atomic_store_explicit(&job->cancel, false, memory_order_relaxed);
	KV_LOCKED(&stager->lock);
	TAILQ_INSERT_TAIL(&stager->submitted, job, entry);
	(void)pthread_cond_signal(&stager->more);
}

void kvg_stager_raise(struct kvg_stager *stager, struct kvg_job *job, unsigned priority)
{
	KV_LOCKED(&stager->lock);

	if (job->priority >= priority)
		return;
	job->priority = priority;
	stager->reorder = true;
}

void kvg_stager_latency(struct kvg_stager *stager, bool wanted)
{
	/* A length, which no other memory goes with. */
	if (stager)
		atomic_store_explicit(&stager->latency, wanted, memory_order_relaxed);
}

uint64_t kvg_stager_copy_max(const struct kvg_stager *stager)
{
	uint64_t chunks = stager->options.slot_size / KV_CHUNK_SIZE;

	if (atomic_load_explicit(&stager->latency, memory_order_relaxed))
		chunks = kv_max_u64(chunks / 2, 1);
	return chunks * KV_CHUNK_SIZE;
}

void kvg_stager_cancel(struct kvg_job *job)
{
	/* It alone tells something: no other memory goes with it. */
	atomic_store_explicit(&job->cancel, true, memory_order_relaxed);
}

int kvg_stager_fd(const struct kvg_stager *stager)
{
	return stager->event_fd;
}

struct kvg_job *kvg_stager_reap(struct kvg_stager *stager)
{
	struct kvg_job *job;
	uint64_t count;
	KV_LOCKED(&stager->lock);

	(void)!read(stager->event_fd, &count, sizeof(count));
	job = TAILQ_FIRST(&stager->done);
	if (!job)
		return NULL;
	TAILQ_REMOVE(&stager->done, job, entry);
	job->queued = false;
	job->final = job->over;
	return job;
}

void kvg_stager_news(struct kvg_stager *stager, char ret_line[KVG_NEWS_SIZE])
{
	KV_LOCKED(&stager->lock);

	(void)snprintf(ret_line, KVG_NEWS_SIZE, "%s", stager->directs.news);
	stager->directs.news[0] = '\0';
}

/* ---- Life ---- */

static unsigned default_workers(void)
{
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);

	return cpus < 1 ? 1 : (unsigned)kv_min_u64((uint64_t)cpus, WORKERS_DEFAULT_MAX);
}

static void set_defaults(struct kvg_stager_options *options)
{
	if (options->slots == 0)
		options->slots = SLOTS_DEFAULT;
	if (options->slot_size == 0)
		options->slot_size = SLOT_SIZE_DEFAULT;
	if (options->streams == 0)
		options->streams = STREAMS_DEFAULT;
	if (options->workers == 0)
		options->workers = default_workers();
	if (options->timeout_ms == 0)
		options->timeout_ms = TIMEOUT_DEFAULT_MS;
}

static int stager_init(struct kvg_stager *stager)
{
	struct kvg_stager_options *options = &stager->options;
	struct kvg_device_info info;
	int r;

	stager->backend->ops->info(stager->backend, &info);
	/* Pieces begin and end anywhere in a segment. */
	stager->copies_max = (unsigned)(options->slot_size / info.granularity) + 2;
	stager->copies = calloc(stager->copies_max, sizeof(*stager->copies));
	stager->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (!stager->copies || stager->event_fd < 0)
		return stager->copies ? -errno : -ENOMEM;
	options->direct = options->direct && info.direct;
	for (unsigned i = 0; i < KVG_PIECES; i++)
		stager->pieces[i].stager = stager;
	r = kvg_workers_new(options->inline_workers ? 0 : options->workers, &stager->workers);
	if (r == 0)
		r = kvg_workers_new(options->inline_workers ? 0 : RESCUERS, &stager->rescuers);
	if (r == 0)
		r = kvg_lanes_new(stager);
	if (r == 0)
		r = kvg_slots_new(stager);
	if (r == 0)
		r = kvg_directs_new(stager);
	return r;
}

/* The ring of requests belongs to the thread that uses it. */
static int queue_new(struct kvg_stager *stager)
{
	const struct kvg_stager_options *options = &stager->options;
	const struct kv_io_ops *io = options->io;
	int r;

	if (options->device_count == 0)
		return 0;
	r = io->queue_new(io->context, options->devices, options->device_count, KVG_QUEUE_DEPTH,
		&stager->queue);
	/* Where the limit of locked memory does not allow it, each read pins its pages itself. */
	stager->ring_lent = r == 0 && io->lend &&
			    io->lend(io->context, stager->queue, stager->ring, options->slot_size,
				    options->slots) == 0;
	return r;
}

struct start {
	struct kvg_stager *stager;
	int result;
	bool known; /* stager's lock */
};

static void *thread_main(void *arg)
{
	struct start *start = arg;
	struct kvg_stager *stager = start->stager;
	int r = queue_new(stager);

	{
		KV_LOCKED(&stager->lock);
		start->result = r;
		start->known = true;
		(void)pthread_cond_broadcast(&stager->more);
	}
	if (r < 0)
		return NULL;
	(void)stager_main(stager);
	if (stager->queue && stager->reads == 0)
		stager->options.io->queue_free(
			stager->options.io->context, kv_steal_ptr(&stager->queue));
	return NULL;
}

static int start_thread(struct kvg_stager *stager)
{
	struct start start = {.stager = stager};
	int r;

	if (stager->options.inline_workers)
		return queue_new(stager);
	r = pthread_create(&stager->thread, NULL, thread_main, &start);
	if (r != 0)
		return -r;
	{
		KV_LOCKED(&stager->lock);
		while (!start.known)
			(void)pthread_cond_wait(&stager->more, &stager->lock);
	}
	stager->has_thread = start.result == 0;
	if (start.result < 0)
		(void)pthread_join(stager->thread, NULL);
	return start.result;
}

/* With threads, and memory, near to the device. */
static int start_near(struct kvg_stager *stager)
{
	struct kvg_device_info info;
	cpu_set_t before;
	bool moved;
	int r;

	stager->backend->ops->info(stager->backend, &info);
	moved = kvg_numa_enter(stager->options.sysfs, info.numa_node, &before);
	r = stager_init(stager);
	if (r == 0)
		r = start_thread(stager);
	if (moved)
		kvg_numa_leave(&before);
	return r;
}

int kvg_stager_new(const struct kvg_stager_options *options, struct kvg_stager **ret_stager)
{
	struct kvg_stager *stager = calloc(1, sizeof(*stager));
	int r;

	if (!stager)
		return -ENOMEM;
	stager->options = *options;
	set_defaults(&stager->options);
	stager->backend = options->backend;
	stager->event_fd = -1;
	TAILQ_INIT(&stager->active);
	TAILQ_INIT(&stager->submitted);
	TAILQ_INIT(&stager->done);
	(void)pthread_mutex_init(&stager->lock, NULL);
	(void)pthread_cond_init(&stager->more, NULL);
	if (stager->options.slots > KVG_SLOTS_MAX || stager->options.streams > KVG_STREAMS_MAX ||
		stager->options.slot_size % KV_CHUNK_SIZE != 0 ||
		stager->options.slot_size / KV_CHUNK_SIZE > KVG_SLOT_CHUNKS_MAX)
		r = -EINVAL;
	else
		r = start_near(stager);
	if (r < 0) {
		(void)kvg_stager_free(stager);
		return r;
	}
	*ret_stager = stager;
	return 0;
}

bool kvg_stager_free(struct kvg_stager *stager)
{
	if (!stager)
		return true;
	{
		KV_LOCKED(&stager->lock);
		stager->stop = true;
		(void)pthread_cond_broadcast(&stager->more);
	}
	if (stager->has_thread)
		(void)pthread_join(stager->thread, NULL);
	kvg_directs_free(stager, !is_idle(stager));
	if (!is_idle(stager)) {
		(void)kvg_workers_free(stager->workers, true);
		(void)kvg_workers_free(stager->rescuers, true);
		return false;
	}
	(void)kvg_workers_free(stager->workers, false);
	(void)kvg_workers_free(stager->rescuers, false);
	if (stager->queue)
		stager->options.io->queue_free(stager->options.io->context, stager->queue);
	kvg_slots_free(stager);
	kvg_lanes_free(stager);
	if (stager->event_fd >= 0)
		(void)close(stager->event_fd);
	(void)pthread_cond_destroy(&stager->more);
	(void)pthread_mutex_destroy(&stager->lock);
	free(stager->copies);
	free(stager);
	return true;
}
