/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads past the CPU, by the backend's direct_read, from drives into the job's targets.
 *
 * A window is a target that drives can write to while it is open; a few of them at a time, since
 * what can be opened is bound by the device's address space on its bus. Within it spans, chunks
 * that lie together on their drive, are read by threads, a request each. What was read is passed to
 * slots of the ring, which fetch it from the device, the way that the link has free, and check it:
 * before that no watermark includes it. Where the device can compute the sums, it does, and nothing
 * is fetched. Chunks that cannot go this way (not on a drive, with gaps,
 * the odd end of a file) go by the ring, and so does all that was refused, or failed.
 *
 * A read that does not end fails its job at once, but its drive may write into the target at any
 * time: the window stays, and with it the job, which is reported a second time when all has ended.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>

#include "gpu/stage_internal.h"

#define REGISTRARS 2u
#define SPAN_MAX (KVG_SPAN_CHUNKS * (uint64_t)KV_CHUNK_SIZE)

/* ---- News ---- */

static void tell(struct kvg_stager *stager, const char *what, const char *why)
{
	char *news = stager->directs.news;
	size_t length;
	KV_LOCKED(&stager->lock);

	length = strlen(news);
	if (length > 0 && length + 2 < sizeof(stager->directs.news)) {
		memcpy(news + length, "; ", 3);
		length += 2;
	}
	(void)snprintf(news + length, sizeof(stager->directs.news) - length, "%s: %s", what, why);
}

/* ---- Windows ---- */

static void run_register(struct kvg_task *task)
{
	struct kvg_window *window = (struct kvg_window *)task;
	struct kvg_backend *backend = window->stager->backend;

	window->result = backend->ops->direct_register(backend, window->base, window->size);
	if (window->result < 0)
		backend->ops->direct_reason(backend, window->why, sizeof(window->why));
}

static void run_unregister(struct kvg_task *task)
{
	struct kvg_window *window = (struct kvg_window *)task;
	struct kvg_backend *backend = window->stager->backend;

	backend->ops->direct_unregister(backend, window->base);
}

/* Whether the chunk at OFFSET of JOB can be read past the CPU: all of it is on drives, in order. */
static bool is_direct(const struct kvg_stager *stager, const struct kvg_job *job, uint64_t offset)
{
	const struct kvg_chunk *chunk = kvg_job_chunk(job, offset);
	const struct kv_gpu_extent *extents = &job->extents[chunk->first];
	uint64_t length = kv_min_u64(kvg_job_end(job) - offset, KV_CHUNK_SIZE), covered = 0;

	if (chunk->where != KV_GPU_DEVICE || chunk->extents > KVG_SPAN_READS)
		return false;
	for (unsigned i = 0; i < chunk->extents; i++) {
		if (!kvg_extent_is_sane(stager, &extents[i]) ||
			!stager->directs.devices[extents[i].device] ||
			(uint64_t)extents[i].block << KV_BLOCK_SHIFT != covered)
			return false;
		covered += extents[i].length;
	}
	/* What is read behind the file's end would be somebody else's. */
	return covered == length;
}

static bool any_direct(const struct kvg_window *window)
{
	for (uint64_t at = window->next; at < window->end; at += KV_CHUNK_SIZE)
		if (is_direct(window->stager, window->job, at))
			return true;
	return false;
}

static void window_begin(struct kvg_window *window, struct kvg_job *job)
{
	uint64_t size = job->targets[0].size, number = (job->next - job->offset) / size;

	window->job = job;
	window->base = job->targets[number].address;
	window->size = job->targets[number].size;
	window->at = job->offset + number * size;
	window->next = job->next;
	window->end = kv_min_u64(window->at + size, kvg_job_end(job));
	window->spans = window->late = 0;
	window->registered = any_direct(window);
	window->state = KVG_WINDOW_OPEN;
	job->next = window->end;
	job->in_flight++;
	if (!window->registered)
		return;
	window->state = KVG_WINDOW_REGISTERING;
	window->task.run = run_register;
	kvg_workers_start(window->stager->directs.registrars, &window->task);
}

bool kvg_windows_begin(struct kvg_stager *stager, struct kvg_job *job)
{
	bool progress = false;

	for (unsigned i = 0; i < KVG_WINDOWS && kvg_job_more(job, UINT64_MAX) > 0; i++) {
		if (stager->directs.windows[i].state != KVG_WINDOW_FREE)
			continue;
		window_begin(&stager->directs.windows[i], job);
		progress = true;
	}
	return progress;
}

bool kvg_job_is_direct(const struct kvg_stager *stager, const struct kvg_job *job)
{
	/* While a drive does not answer it is given no more threads, nor memory. */
	return stager->directs.on && stager->directs.hung == 0 && job->object_fd < 0 && !job->ring;
}

/* No more memory can be opened to drives now; a later job may try again. */
static void refuse(struct kvg_window *window)
{
	struct kvg_directs *directs = &window->stager->directs;

	window->registered = false;
	window->job->ring = true;
	if (directs->full)
		return;
	directs->full = true;
	tell(window->stager, "device memory cannot be opened to drives", window->why);
}

static void window_release(struct kvg_window *window)
{
	struct kvg_job *job = window->job;

	window->job = NULL;
	window->state = KVG_WINDOW_FREE;
	job->in_flight--;
	if (job->early && job->in_flight == 0)
		kvg_job_over(window->stager, job);
}

static void window_end(struct kvg_window *window)
{
	if (!window->registered) {
		window_release(window);
		return;
	}
	window->state = KVG_WINDOW_ENDING;
	window->task.run = run_unregister;
	kvg_workers_start(window->stager->directs.registrars, &window->task);
}

/* ---- Spans ---- */

/*
 * Chunks lie in the target as they do in the file, without gaps: so one range each, whatever their
 * extents are.
 */
static void compute_sums(struct kvg_span *span)
{
	const struct kvg_window *window = span->window;
	struct kvg_backend *backend = window->stager->backend;
	struct kvg_range ranges[KVG_SPAN_CHUNKS] = {0};
	uint64_t sums[KVG_SPAN_CHUNKS], at = 0;
	size_t count = 0;
	int r;

	for (; at < span->length; at += KV_CHUNK_SIZE)
		ranges[count++] = (struct kvg_range){
			.address = window->base + (span->offset - window->at) + at,
			.size = kv_min_u64(span->length - at, KV_CHUNK_SIZE),
		};
	r = backend->ops->checksum(backend, span->stream, ranges, count, sums);
	span->summed = r == 0;
	if (r < 0)
		(void)snprintf(span->why, sizeof(span->why), "%s", strerror(-r));
	for (size_t i = 0; i < count && r == 0; i++)
		span->wrong += sums[i] != span->sums[i];
	if (span->wrong > 0)
		span->result = -EBADMSG;
}

static void run_span(struct kvg_task *task)
{
	struct kvg_span *span = (struct kvg_span *)task;
	struct kvg_window *window = span->window;
	struct kvg_backend *backend = window->stager->backend;

	span->result = 0;
	span->summed = false;
	span->wrong = 0;
	for (unsigned i = 0; i < span->count && span->result == 0; i++) {
		const struct kvg_span_read *read = &span->reads[i];
		ssize_t n;

		/* It alone tells something: no other memory goes with it. */
		if (atomic_load_explicit(&span->late, memory_order_relaxed))
			return;
		n = backend->ops->direct_read(backend,
			window->stager->directs.devices[read->device], window->base, read->to,
			read->length, read->from);
		if (n == (ssize_t)read->length)
			continue;
		span->result = n < 0 ? (int)n : -EIO;
		if (n < 0)
			backend->ops->direct_reason(backend, span->why, sizeof(span->why));
		else
			(void)snprintf(span->why, sizeof(span->why), "a read was short");
	}
	if (span->result == 0 && span->by_device &&
		!atomic_load_explicit(&span->late, memory_order_relaxed))
		compute_sums(span);
}

/* Reads of the chunk at OFFSET; false: they are not one with SPAN's. */
static bool add_chunk(struct kvg_span *span, uint64_t offset)
{
	const struct kvg_window *window = span->window;
	const struct kvg_chunk *chunk = kvg_job_chunk(window->job, offset);
	const struct kv_gpu_extent *extents = &window->job->extents[chunk->first];
	struct kvg_span_read *last = &span->reads[0];

	if (span->count > 0) {
		if (span->count > 1 || chunk->extents > 1 || extents->device != last->device ||
			extents->offset != last->from + last->length)
			return false;
		last->length += extents->length;
		return true;
	}
	for (unsigned i = 0; i < chunk->extents; i++)
		span->reads[span->count++] = (struct kvg_span_read){
			.from = extents[i].offset,
			.to = offset - window->at + ((uint64_t)extents[i].block << KV_BLOCK_SHIFT),
			.length = extents[i].length,
			.device = extents[i].device,
		};
	return true;
}

/* Chunks from WINDOW's next one on, which can be read past the CPU. */
static void span_begin(struct kvg_span *span, struct kvg_window *window)
{
	struct kvg_stager *stager = window->stager;
	uint64_t at = window->next;

	span->window = window;
	span->offset = at;
	span->count = 0;
	span->by_device = stager->directs.sums;
	while (at < window->end && at - span->offset < SPAN_MAX &&
		is_direct(stager, window->job, at) && add_chunk(span, at)) {
		span->sums[(at - span->offset) >> KV_CHUNK_SHIFT] =
			kvg_job_chunk(window->job, at)->sum;
		at = kv_min_u64(at + KV_CHUNK_SIZE, window->end);
	}
	span->length = at - span->offset;
	span->passed = 0;
	span->state = KVG_SPAN_READING;
	span->deadline_ns = kvg_stager_now(stager) + (int64_t)stager->options.timeout_ms * 1000000;
	atomic_store_explicit(&span->late, false, memory_order_relaxed);
	span->task.run = run_span;
	window->next = at;
	window->spans++;
	stager->directs.busy++;
	kvg_workers_start(stager->directs.readers, &span->task);
}

static struct kvg_span *free_span(struct kvg_stager *stager)
{
	struct kvg_directs *directs = &stager->directs;

	for (unsigned i = 0; i < KVG_SPANS && directs->busy < directs->threads; i++)
		if (directs->spans[i].state == KVG_SPAN_FREE)
			return &directs->spans[i];
	return NULL;
}

/* Bytes from WINDOW's next one on that go by the ring, in one go. */
static uint64_t ring_run(const struct kvg_window *window, bool direct)
{
	uint64_t most = kvg_stager_copy_max(window->stager), at = window->next;

	do
		at = kv_min_u64(at + KV_CHUNK_SIZE, window->end);
	while (at < window->end && at - window->next < most &&
		!(direct && is_direct(window->stager, window->job, at)));
	return at - window->next;
}

static bool feed_one(struct kvg_window *window)
{
	struct kvg_stager *stager = window->stager;
	bool direct = window->registered && stager->directs.on && stager->directs.hung == 0;

	if (direct && is_direct(stager, window->job, window->next)) {
		struct kvg_span *span = free_span(stager);

		if (span)
			span_begin(span, window);
		return span;
	}
	uint64_t length = ring_run(window, direct);
	if (!kvg_slots_read(stager, window->job, window->next, length))
		return false;
	window->next += length;
	return true;
}

static bool feed(struct kvg_window *window)
{
	bool progress = false;

	while (window->next < window->end && window->job->result == 0 && feed_one(window))
		progress = true;
	if (window->spans > 0 || (window->next < window->end && window->job->result == 0))
		return progress;
	window_end(window);
	return true;
}

/* First the most urgent, and of them those that come first in their file. */
static bool feed_in_order(struct kvg_stager *stager)
{
	bool tried[KVG_WINDOWS] = {false};
	bool progress = false;

	for (unsigned round = 0; round < KVG_WINDOWS; round++) {
		struct kvg_window *best = NULL;

		for (unsigned i = 0; i < KVG_WINDOWS; i++) {
			struct kvg_window *window = &stager->directs.windows[i];

			if (!tried[i] && window->state == KVG_WINDOW_OPEN &&
				(!best || kvg_job_is_before(
						  window->job, window->at, best->job, best->at)))
				best = window;
		}
		if (!best)
			break;
		tried[best - stager->directs.windows] = true;
		progress |= feed(best);
	}
	return progress;
}

static void span_release(struct kvg_span *span)
{
	span->state = KVG_SPAN_FREE;
	span->window->spans--;
	span->window = NULL;
}

/* It goes by the ring; and if none can ever work, so does all. */
static void read_failed(struct kvg_span *span)
{
	struct kvg_stager *stager = span->window->stager;
	struct kvg_directs *directs = &stager->directs;

	span->window->job->counts.direct_errors++;
	if (span->result == -EOPNOTSUPP && directs->on) {
		directs->on = false;
		tell(stager, "drives are not read past the CPU any more", span->why);
	} else if (span->result != -EOPNOTSUPP && !directs->failed) {
		directs->failed = true;
		tell(stager, "a read past the CPU failed, and goes by the ring", span->why);
	}
}

/* They are there, and right. */
static void sums_agree(struct kvg_span *span)
{
	struct kvg_job *job = span->window->job;

	job->counts.from_device += span->length;
	job->counts.direct += span->length;
	span->passed = span->length;
}

/* What was read is fetched, and so is all that is read from now on. */
static void sums_failed(struct kvg_span *span)
{
	struct kvg_stager *stager = span->window->stager;

	if (stager->directs.sums)
		tell(stager, "the device computes no checksums any more", span->why);
	stager->directs.sums = false;
}

static void span_ended(struct kvg_span *span)
{
	struct kvg_directs *directs = &span->window->stager->directs;

	directs->busy--;
	if (atomic_load_explicit(&span->late, memory_order_relaxed)) {
		directs->hung--;
		span->window->late--;
		span_release(span);
		return;
	}
	span->state = KVG_SPAN_PASSING;
	if (span->result == -EBADMSG)
		span->window->job->counts.checksum_errors += span->wrong;
	else if (span->result < 0)
		read_failed(span);
	else if (span->summed)
		sums_agree(span);
	else if (span->by_device)
		sums_failed(span);
}

/* Slots take over what was read, to check it, or what was not, to read it. */
static bool pass(struct kvg_span *span)
{
	struct kvg_window *window = span->window;
	struct kvg_stager *stager = window->stager;
	uint64_t before = span->passed;

	while (span->passed < span->length && window->job->result == 0) {
		uint64_t length =
			kv_min_u64(span->length - span->passed, kvg_stager_copy_max(stager));

		if (!(span->result == 0 ? kvg_slots_fetch : kvg_slots_read)(
			    stager, window->job, span->offset + span->passed, length))
			return span->passed > before;
		span->passed += length;
	}
	span_release(span);
	kvg_job_advance(stager, window->job);
	return true;
}

static void give_up(struct kvg_span *span)
{
	kvg_job_fail(span->window->job, -ETIMEDOUT);
	atomic_store_explicit(&span->late, true, memory_order_relaxed);
	span->window->late++;
	span->window->stager->directs.hung++;
}

static bool span_step(struct kvg_stager *stager, struct kvg_span *span)
{
	if (span->state == KVG_SPAN_PASSING)
		return pass(span);
	if (span->state == KVG_SPAN_FREE)
		return false;
	if (kvg_task_is_done(&span->task))
		span_ended(span);
	else if (!atomic_load_explicit(&span->late, memory_order_relaxed) &&
		 kvg_stager_now(stager) > span->deadline_ns)
		give_up(span);
	else
		return false;
	return true;
}

/* ---- Rounds ---- */

static bool window_step(struct kvg_window *window)
{
	if ((window->state != KVG_WINDOW_REGISTERING && window->state != KVG_WINDOW_ENDING) ||
		!kvg_task_is_done(&window->task))
		return false;
	if (window->state == KVG_WINDOW_ENDING) {
		window_release(window);
		return true;
	}
	window->state = KVG_WINDOW_OPEN;
	if (window->result < 0)
		refuse(window);
	return true;
}

bool kvg_directs_step(struct kvg_stager *stager)
{
	struct kvg_directs *directs = &stager->directs;
	bool progress = false;

	if (directs->threads == 0)
		return false;
	for (unsigned i = 0; i < KVG_WINDOWS; i++)
		progress |= window_step(&directs->windows[i]);
	for (unsigned i = 0; i < KVG_SPANS; i++)
		progress |= span_step(stager, &directs->spans[i]);
	return feed_in_order(stager) || progress;
}

bool kvg_directs_idle(const struct kvg_stager *stager)
{
	for (unsigned i = 0; i < KVG_WINDOWS; i++)
		if (stager->directs.windows[i].state != KVG_WINDOW_FREE)
			return false;
	return true;
}

uint64_t kvg_directs_lowest(
	const struct kvg_stager *stager, const struct kvg_job *job, uint64_t end)
{
	for (unsigned i = 0; i < KVG_WINDOWS; i++) {
		const struct kvg_window *window = &stager->directs.windows[i];

		if (window->job == job && window->next < window->end)
			end = kv_min_u64(end, window->next);
	}
	for (unsigned i = 0; i < KVG_SPANS; i++) {
		const struct kvg_span *span = &stager->directs.spans[i];

		if (span->state != KVG_SPAN_FREE && span->window->job == job)
			end = kv_min_u64(end, span->offset + span->passed);
	}
	return end;
}

unsigned kvg_directs_stuck(const struct kvg_stager *stager, const struct kvg_job *job)
{
	unsigned count = 0;

	for (unsigned i = 0; i < KVG_WINDOWS; i++) {
		const struct kvg_window *window = &stager->directs.windows[i];

		count += window->job == job && window->late > 0 && window->late == window->spans;
	}
	return count;
}

/* ---- Life ---- */

/* Those that can be read so, found out by reading; the others go by the ring. */
static void open_devices(struct kvg_stager *stager)
{
	const struct kvg_backend_ops *ops = stager->backend->ops;
	const struct kvg_stager_options *options = &stager->options;
	char why[KVG_WHY_SIZE] = "";

	for (unsigned i = 0; i < options->device_count; i++) {
		int fd = options->devices[i];
		struct kvg_direct **device = &stager->directs.devices[i];
		int r = ops->direct_probe(stager->backend, fd, 0, why, sizeof(why));

		if (r == 0)
			r = ops->direct_open(stager->backend, fd, device);
		if (r == 0)
			stager->directs.on = true;
		else
			tell(stager, "a drive is not read past the CPU", why);
	}
}

/* A stream for each span that the device is to sum. Without them what was read is fetched. */
static void start_sums(struct kvg_stager *stager)
{
	const struct kvg_backend_ops *ops = stager->backend->ops;
	struct kvg_directs *directs = &stager->directs;
	char why[KVG_WHY_SIZE] = "";
	int r = 0;

	if (!directs->on || !ops->checksum)
		return;
	if (ops->checksum_probe(stager->backend, why, sizeof(why)) < 0) {
		tell(stager, "the device computes no checksums", why);
		return;
	}
	for (unsigned i = 0; i < KVG_SPANS && r == 0; i++)
		r = ops->stream_new(stager->backend, &directs->spans[i].stream);
	directs->sums = r == 0;
}

int kvg_directs_new(struct kvg_stager *stager)
{
	struct kvg_directs *directs = &stager->directs;
	const struct kvg_stager_options *options = &stager->options;
	unsigned threads = options->direct_threads;
	int r;

	if (!options->direct)
		return 0;
	if (threads == 0)
		threads = options->inline_workers ? 0 : KVG_DIRECT_THREADS;
	for (unsigned i = 0; i < KVG_WINDOWS; i++)
		directs->windows[i].stager = stager;
	open_devices(stager);
	start_sums(stager);
	r = kvg_workers_new(threads, &directs->readers);
	if (r == 0)
		r = kvg_workers_new(options->inline_workers ? 0 : REGISTRARS, &directs->registrars);
	directs->threads = threads > 0 ? threads : 1;
	return r;
}

void kvg_directs_free(struct kvg_stager *stager, bool abandon)
{
	struct kvg_directs *directs = &stager->directs;

	(void)kvg_workers_free(directs->readers, abandon);
	(void)kvg_workers_free(directs->registrars, abandon);
	for (unsigned i = 0; i < stager->options.device_count && !abandon; i++)
		if (directs->devices[i])
			stager->backend->ops->direct_close(
				stager->backend, kv_steal_ptr(&directs->devices[i]));
	for (unsigned i = 0; i < KVG_SPANS && !abandon; i++)
		stager->backend->ops->stream_free(
			stager->backend, kv_steal_ptr(&directs->spans[i].stream));
}
