/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pull and push: between a file and memory of the engine's own, through a ring of pinned slots, by
 * a few threads, so that the file's side and the link are busy together.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

#include "fs/base.h"
#include "gpu/kvg_internal.h"
#include "gpu/numa.h"

#define THREADS 4u
/* Bytes between two segments of a file that are rather read than left out. */
#define GAP_MAX (UINT64_C(64) << 10)
#define PAUSE_NS 20000

/* A stretch of the file that goes through one slot: segments [FIRST, END) of the list. */
struct piece {
	uint64_t file_off;
	uint64_t len;
	size_t first;
	size_t end;
};

struct kvg_op {
	struct kvg_ctx *ctx;
	bool push;
	int fd;
	kvg_stream_handle stream;
	struct kvg_event *begin; /* push: what the caller's stream held */
	struct kvg_seg *segs;
	size_t seg_count;
	struct piece *pieces;
	size_t piece_count;
	pthread_t threads[THREADS];
	unsigned thread_count;

	pthread_mutex_t lock;
	pthread_cond_t ended;
	size_t next;      /* piece */
	unsigned running; /* threads */
	int error;
	pthread_mutex_t stream_lock; /* calls on the stream are made one at a time */
};

/* What a thread has under way. */
struct worker {
	struct kvg_op *op;
	struct kvg_ring_slot *pending[KVG_RING_SLOTS]; /* pull: copies under way, oldest first */
	unsigned pending_count;
	struct kvg_copy *copies;
	kvg_stream_handle stream; /* push: its own */
};

static void fail_op(struct kvg_op *op, int r)
{
	KV_LOCKED(&op->lock);

	if (op->error == 0)
		op->error = r;
}

/* ---- Slots ---- */

static int ring_new(struct kvg_ctx *ctx)
{
	size_t size = KVG_RING_SLOTS * KVG_RING_SLOT_SIZE;
	void *memory;
	int r = 0;

	if (ctx->ring)
		return 0;
	for (unsigned i = 0; i < KVG_RING_SLOTS && r == 0; i++)
		if (!ctx->slots[i].event)
			r = ctx->backend->ops->event_new(ctx->backend, &ctx->slots[i].event);
	if (r < 0)
		return r;
	memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return -errno;
	kvg_numa_bind(memory, size, ctx->info.numa_node);
	(void)madvise(memory, size, MADV_HUGEPAGE);
	r = ctx->backend->ops->host_register(ctx->backend, memory, size, 0);
	if (r < 0) {
		(void)munmap(memory, size);
		return r;
	}
	for (unsigned i = 0; i < KVG_RING_SLOTS; i++)
		ctx->slots[i].memory = (uint8_t *)memory + i * KVG_RING_SLOT_SIZE;
	ctx->ring = memory;
	return 0;
}

/* EVENT, of STREAM. An error comes when nothing of it is under way any more, either. */
static int wait_event(
	struct kvg_backend *backend, struct kvg_event *event, kvg_stream_handle stream)
{
	const struct timespec pause = {.tv_nsec = PAUSE_NS};
	int r;

	while ((r = backend->ops->event_query(backend, event)) == -EAGAIN)
		(void)nanosleep(&pause, NULL);
	if (r < 0)
		(void)backend->ops->stream_sync(backend, stream);
	return r;
}

static void slot_put(struct kvg_ctx *ctx, struct kvg_ring_slot *slot)
{
	KV_LOCKED(&ctx->ring_lock);

	slot->taken = false;
	(void)pthread_cond_signal(&ctx->ring_free);
}

static struct kvg_ring_slot *slot_try(struct kvg_ctx *ctx, bool wait)
{
	KV_LOCKED(&ctx->ring_lock);

	for (;;) {
		for (unsigned i = 0; i < KVG_RING_SLOTS; i++) {
			if (ctx->slots[i].taken)
				continue;
			ctx->slots[i].taken = true;
			return &ctx->slots[i];
		}
		if (!wait)
			return NULL;
		(void)pthread_cond_wait(&ctx->ring_free, &ctx->ring_lock);
	}
}

/* Gives back the oldest of WORKER's slots when its copy has ended. */
static void retire_oldest(struct worker *worker)
{
	struct kvg_ctx *ctx = worker->op->ctx;
	struct kvg_ring_slot *slot = worker->pending[0];
	int r = wait_event(ctx->backend, slot->event, worker->op->stream);

	if (r < 0)
		fail_op(worker->op, r);
	memmove(worker->pending, worker->pending + 1,
		--worker->pending_count * sizeof(worker->pending[0]));
	slot_put(ctx, slot);
}

/* Who has slots of his own waits for those, so that nobody waits for each other. */
static struct kvg_ring_slot *slot_get(struct worker *worker)
{
	struct kvg_ring_slot *slot;

	if (worker->pending_count > 1)
		retire_oldest(worker);
	while (!(slot = slot_try(worker->op->ctx, worker->pending_count == 0)))
		retire_oldest(worker);
	return slot;
}

/* ---- One piece ---- */

static int transfer(const struct kvg_op *op, const struct piece *piece, uint8_t *memory)
{
	for (uint64_t done = 0; done < piece->len;) {
		off_t at = (off_t)(piece->file_off + done);
		ssize_t n = op->push ? pwrite(op->fd, memory + done, piece->len - done, at)
				     : pread(op->fd, memory + done, piece->len - done, at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return op->push ? -EIO : -ENODATA;
		done += (uint64_t)n;
	}
	return 0;
}

static size_t make_copies(const struct kvg_op *op, const struct piece *piece, const uint8_t *memory,
	struct kvg_copy *copies)
{
	for (size_t i = piece->first; i < piece->end; i++) {
		const struct kvg_seg *seg = &op->segs[i];
		uint64_t host = (uint64_t)(uintptr_t)memory + (seg->file_off - piece->file_off);

		copies[i - piece->first] = (struct kvg_copy){
			.to = op->push ? host : seg->dst,
			.from = op->push ? seg->dst : host,
			.size = seg->len,
		};
	}
	return piece->end - piece->first;
}

static int start_copy(struct worker *worker, const struct piece *piece, struct kvg_ring_slot *slot)
{
	struct kvg_op *op = worker->op;
	struct kvg_backend *backend = op->ctx->backend;
	kvg_stream_handle stream = op->push ? worker->stream : op->stream;
	size_t count = make_copies(op, piece, slot->memory, worker->copies);
	KV_LOCKED(&op->stream_lock);
	int r = backend->ops->copy(backend, stream,
		op->push ? KVG_COPY_TO_HOST : KVG_COPY_TO_DEVICE, worker->copies, count);
	int recorded = backend->ops->event_record(backend, slot->event, stream);

	/* Nobody could tell when the slot is free: so it is now. */
	if (recorded < 0)
		(void)backend->ops->stream_sync(backend, stream);
	return r < 0 ? r : recorded;
}

static int do_pull(struct worker *worker, const struct piece *piece)
{
	struct kvg_ring_slot *slot = slot_get(worker);
	int r = transfer(worker->op, piece, slot->memory);

	if (r == -ENODATA)
		r = -EINVAL;
	if (r < 0) {
		slot_put(worker->op->ctx, slot);
		return r;
	}
	r = start_copy(worker, piece, slot);
	worker->pending[worker->pending_count++] = slot;
	return r;
}

static int do_push(struct worker *worker, const struct piece *piece)
{
	struct kvg_ctx *ctx = worker->op->ctx;
	struct kvg_ring_slot *slot = slot_get(worker);
	int r = start_copy(worker, piece, slot);
	int ended = wait_event(ctx->backend, slot->event, worker->stream);

	r = r < 0 ? r : ended;
	if (r == 0)
		r = transfer(worker->op, piece, slot->memory);
	slot_put(ctx, slot);
	return r;
}

/* ---- Threads ---- */

static const struct piece *next_piece(struct kvg_op *op)
{
	KV_LOCKED(&op->lock);

	return op->error < 0 || op->next == op->piece_count ? NULL : &op->pieces[op->next++];
}

static size_t largest_piece(const struct kvg_op *op)
{
	size_t most = 1;

	for (size_t i = 0; i < op->piece_count; i++)
		most = kv_max_u64(most, op->pieces[i].end - op->pieces[i].first);
	return most;
}

static int worker_start(struct worker *worker)
{
	struct kvg_op *op = worker->op;
	struct kvg_backend *backend = op->ctx->backend;

	worker->copies = malloc(largest_piece(op) * sizeof(*worker->copies));
	if (!worker->copies)
		return -ENOMEM;
	if (!op->push)
		return 0;
	int r = backend->ops->stream_new(backend, &worker->stream);
	return r < 0 ? r : wait_event(backend, op->begin, op->stream);
}

static void *worker_main(void *arg)
{
	struct kvg_op *op = arg;
	struct worker worker = {.op = op};
	const struct piece *piece;
	int r = worker_start(&worker);

	if (r < 0)
		fail_op(op, r);
	while ((piece = next_piece(op))) {
		r = op->push ? do_push(&worker, piece) : do_pull(&worker, piece);
		if (r < 0)
			fail_op(op, r);
	}
	while (worker.pending_count > 0)
		retire_oldest(&worker);
	op->ctx->backend->ops->stream_free(op->ctx->backend, worker.stream);
	free(worker.copies);
	KV_LOCKED(&op->lock);
	op->running--;
	(void)pthread_cond_broadcast(&op->ended);
	return NULL;
}

/* ---- Ops ---- */

/* Neighbours share a slot: for reading also with a small gap between them. */
static int make_pieces(struct kvg_op *op)
{
	uint64_t gap_max = op->push ? 0 : GAP_MAX;

	op->pieces = malloc((op->seg_count + 1) * sizeof(*op->pieces));
	if (!op->pieces)
		return -ENOMEM;
	for (size_t i = 0; i < op->seg_count; i++) {
		const struct kvg_seg *seg = &op->segs[i];
		struct piece *last = op->piece_count > 0 ? &op->pieces[op->piece_count - 1] : NULL;
		uint64_t end = last ? last->file_off + last->len : 0;

		if (last && seg->file_off >= end && seg->file_off - end <= gap_max &&
			seg->file_off + seg->len - last->file_off <= KVG_RING_SLOT_SIZE) {
			last->len = seg->file_off + seg->len - last->file_off;
			last->end = i + 1;
			continue;
		}
		op->pieces[op->piece_count++] = (struct piece){
			.file_off = seg->file_off,
			.len = seg->len,
			.first = i,
			.end = i + 1,
		};
	}
	return 0;
}

static int op_start(struct kvg_op *op)
{
	struct kvg_backend *backend = op->ctx->backend;
	int r = 0;

	if (op->push) {
		r = backend->ops->event_new(backend, &op->begin);
		if (r == 0)
			r = backend->ops->event_record(backend, op->begin, op->stream);
	}
	for (unsigned i = 0; i < THREADS && i < op->piece_count && r == 0; i++) {
		{
			KV_LOCKED(&op->lock);
			op->running++;
		}
		r = -pthread_create(&op->threads[i], NULL, worker_main, op);
		if (r == 0) {
			op->thread_count++;
			continue;
		}
		KV_LOCKED(&op->lock);
		op->running--;
		/* Fewer threads are slower, but do. */
		if (op->thread_count > 0)
			return 0;
	}
	return r;
}

static int op_new(
	struct kvg_ctx *ctx, bool push, int fd, kvg_stream_handle stream, struct kvg_op **ret_op)
{
	struct kvg_op *op;
	int r = kvg_check_device(ctx);

	if (r < 0)
		return r;
	r = ring_new(ctx);
	if (r < 0)
		return kvg_fail(ctx, r, "no pinned memory: %s", strerror(-r));
	op = calloc(1, sizeof(*op));
	if (!op)
		return -ENOMEM;
	op->ctx = ctx;
	op->push = push;
	op->stream = stream;
	(void)pthread_mutex_init(&op->lock, NULL);
	(void)pthread_mutex_init(&op->stream_lock, NULL);
	(void)pthread_cond_init(&op->ended, NULL);
	ctx->ops++;
	/* The caller may close his at once. */
	op->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (op->fd < 0) {
		r = -errno;
		kvg_op_free(op);
		return r;
	}
	*ret_op = op;
	return 0;
}

static int op_run(struct kvg_op *op, const struct kvg_seg *segs, size_t n)
{
	int r = kvg_list_new(segs, n, KVG_RING_SLOT_SIZE, &op->segs, &op->seg_count);

	if (r == 0)
		r = make_pieces(op);
	if (r == 0)
		r = op_start(op);
	return r;
}

static int start(struct kvg_ctx *ctx, bool push, int fd, const struct kvg_seg *segs, size_t n,
	kvg_stream_handle stream, struct kvg_op **ret_op)
{
	struct kvg_op *op = NULL;
	int r = op_new(ctx, push, fd, stream, &op);

	if (r < 0)
		return r;
	r = op_run(op, segs, n);
	if (r < 0) {
		kvg_op_free(op);
		return kvg_fail(ctx, r, "cannot begin: %s", strerror(-r));
	}
	*ret_op = op;
	return 0;
}

int kvg_pull(struct kvg_ctx *ctx, int fd, const struct kvg_seg *segs, size_t n,
	kvg_stream_handle stream, struct kvg_op **ret_op)
{
	return start(ctx, false, fd, segs, n, stream, ret_op);
}

int kvg_push(struct kvg_ctx *ctx, int fd, const struct kvg_seg *segs, size_t n,
	kvg_stream_handle stream, struct kvg_op **ret_op)
{
	return start(ctx, true, fd, segs, n, stream, ret_op);
}

static void deadline_after(int timeout_ms, struct timespec *ret_time)
{
	(void)clock_gettime(CLOCK_REALTIME, ret_time);
	ret_time->tv_sec += timeout_ms / 1000;
	ret_time->tv_nsec += (long)(timeout_ms % 1000) * 1000000;
	if (ret_time->tv_nsec >= 1000000000) {
		ret_time->tv_sec++;
		ret_time->tv_nsec -= 1000000000;
	}
}

int kvg_op_poll(struct kvg_op *op, int timeout_ms)
{
	struct timespec end;
	KV_LOCKED(&op->lock);

	if (timeout_ms > 0)
		deadline_after(timeout_ms, &end);
	while (op->running > 0 && timeout_ms != 0) {
		int r = timeout_ms < 0 ? pthread_cond_wait(&op->ended, &op->lock)
				       : pthread_cond_timedwait(&op->ended, &op->lock, &end);

		if (r == ETIMEDOUT)
			break;
	}
	if (op->running > 0)
		return kvg_fail(op->ctx, -EAGAIN, "not all of it has arrived yet");
	return op->error == 0 ? 0
			      : kvg_fail(op->ctx, op->error, "the transfer has failed: %s",
					strerror(-op->error));
}

void kvg_op_free(struct kvg_op *op)
{
	if (!op)
		return;
	for (unsigned i = 0; i < op->thread_count; i++)
		(void)pthread_join(op->threads[i], NULL);
	op->ctx->backend->ops->event_free(op->ctx->backend, op->begin);
	if (op->fd >= 0)
		(void)close(op->fd);
	op->ctx->ops--;
	(void)pthread_cond_destroy(&op->ended);
	(void)pthread_mutex_destroy(&op->stream_lock);
	(void)pthread_mutex_destroy(&op->lock);
	free(op->segs);
	free(op->pieces);
	free(op);
}
