/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams, events, copies, the link and the clock of the fake driver. Each direction has one engine
 * that moves one copy at a time; a copy waits for the one before it in its stream and a gap, and
 * for its engine. When its time has come on the clock its bytes move, by whichever thread looks.
 */
#include <stdio.h>
#include <time.h>

#include "tests/gpu/fake/internal.h"

#define BOUNCE_SIZE (UINT64_C(1) << 20)
#define NS_A_SECOND UINT64_C(1000000000)

struct run {
	uint64_t to, from, size;
};

struct op {
	STAILQ_ENTRY(op) entry;
	uint64_t end_ns;
	bool fill;
	bool moved;                 /* in the call itself, FAKECU_COPY=early */
	struct fake_launch *launch; /* a kernel; there are no runs then */
	unsigned char byte;
	size_t count;
	struct run runs[];
};

struct kvg_cu_str {
	LIST_ENTRY(kvg_cu_str) entry;
	STAILQ_HEAD(, op) ops;
	uint64_t ready_ns; /* its last operation is done */
	uint64_t issued, done;
};

struct kvg_cu_evt {
	LIST_ENTRY(kvg_cu_evt) entry;
	struct kvg_cu_str *stream; /* NULL: done, or never recorded */
	uint64_t mark;             /* done when the stream has done as many */
};

static LIST_HEAD(, kvg_cu_str) streams = LIST_HEAD_INITIALIZER(streams);
static LIST_HEAD(, kvg_cu_evt) events = LIST_HEAD_INITIALIZER(events);
static struct kvg_cu_str default_stream = {.ops = STAILQ_HEAD_INITIALIZER(default_stream.ops)};
static uint64_t clock_ns;
static uint64_t engine_free_ns[_FAKECU_DIRECTION_MAX];
static struct fakecu_traffic traffic[_FAKECU_DIRECTION_MAX];

/* ---- The clock ---- */

static uint64_t now_ns(void)
{
	struct timespec t;

	if (fake.config.clock != FAKE_CLOCK_REAL)
		return clock_ns;
	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * NS_A_SECOND + (uint64_t)t.tv_nsec;
}

void fake_spend(uint64_t ns)
{
	if (fake.config.clock == FAKE_CLOCK_VIRTUAL)
		clock_ns += ns;
}

static uint64_t wire_ns(uint64_t bytes, uint64_t bandwidth)
{
	return (uint64_t)((double)bytes * (double)NS_A_SECOND / (double)bandwidth);
}

/* ---- Moving bytes ---- */

/* Moves bytes between MEMORY and device memory; false if the device faults. */
static bool move(uint64_t device, unsigned char *memory, uint64_t size, bool to_device)
{
	while (size > 0) {
		const struct fake_mapping *m = fake_mapping_find(device);
		uint64_t within, length;
		ssize_t n;

		if (!m || m->access == KVG_CU_ACCESS_NONE ||
			(to_device && m->access != KVG_CU_ACCESS_READ_WRITE))
			return false;
		within = device - m->address;
		length = kv_min_u64(size, m->size - within);
		n = to_device
			    ? pwrite(m->allocation->fd, memory, length, (off_t)(m->offset + within))
			    : pread(m->allocation->fd, memory, length, (off_t)(m->offset + within));
		if (n <= 0)
			return false;
		device += (uint64_t)n;
		memory += n;
		size -= (uint64_t)n;
	}
	return true;
}

/* From device to device, or of one byte, through a buffer. */
static bool move_on_device(const struct run *run, bool fill, unsigned char byte)
{
	static unsigned char bounce[BOUNCE_SIZE];

	if (fill)
		memset(bounce, byte, kv_min_u64(run->size, BOUNCE_SIZE));
	for (uint64_t done = 0; done < run->size; done += BOUNCE_SIZE) {
		uint64_t length = kv_min_u64(run->size - done, BOUNCE_SIZE);

		if (!fill && !move(run->from + done, bounce, length, false))
			return false;
		if (!move(run->to + done, bounce, length, true))
			return false;
	}
	return true;
}

static bool move_run(const struct op *op, const struct run *run)
{
	if (op->fill || (fake_is_device(run->to) && fake_is_device(run->from)))
		return move_on_device(run, op->fill, op->byte);
	if (fake_is_device(run->to))
		return move(run->to, (void *)(uintptr_t)run->from, run->size, true);
	return move(run->from, (void *)(uintptr_t)run->to, run->size, false);
}

static void move_op(struct op *op)
{
	if (op->launch && !fake_launch_run(op->launch))
		(void)fake_result(KVG_CU_ILLEGAL_ADDRESS);
	op->launch = NULL;
	for (size_t i = 0; i < op->count && !op->moved && fake.fatal == KVG_CU_SUCCESS; i++)
		if (!move_run(op, &op->runs[i]))
			(void)fake_result(KVG_CU_ILLEGAL_ADDRESS);
	op->moved = true;
}

/* ---- Completion ---- */

static void finish_first(struct kvg_cu_str *stream)
{
	struct op *op = STAILQ_FIRST(&stream->ops);

	STAILQ_REMOVE_HEAD(&stream->ops, entry);
	move_op(op);
	stream->done++;
	free(op);
}

/* The stream whose first operation is done before all others'. */
static struct kvg_cu_str *next_stream(void)
{
	struct kvg_cu_str *next = STAILQ_EMPTY(&default_stream.ops) ? NULL : &default_stream;
	struct kvg_cu_str *stream;

	LIST_FOREACH (stream, &streams, entry) {
		if (STAILQ_EMPTY(&stream->ops))
			continue;
		if (!next || STAILQ_FIRST(&stream->ops)->end_ns < STAILQ_FIRST(&next->ops)->end_ns)
			next = stream;
	}
	return next;
}

static void finish_due(void)
{
	struct kvg_cu_str *stream;

	if (fake_is_held())
		return;
	while ((stream = next_stream()) != NULL && STAILQ_FIRST(&stream->ops)->end_ns <= now_ns())
		finish_first(stream);
}

void fake_drain(void)
{
	struct kvg_cu_str *stream;

	while ((stream = next_stream()) != NULL)
		finish_first(stream);
}

/* Whoever asks in vain makes the time pass; see fakecu.h. */
static void pass_time(void)
{
	struct kvg_cu_str *stream = next_stream();

	if (stream && fake.config.clock == FAKE_CLOCK_VIRTUAL && !fake_is_held())
		clock_ns = kv_max_u64(clock_ns, STAILQ_FIRST(&stream->ops)->end_ns);
}

/* Waits until STREAM has done MARK operations. The lock is let go while it sleeps. */
static kvg_cu_result wait_for(struct kvg_cu_str *stream, uint64_t mark)
{
	const struct timespec pause = {.tv_nsec = 200000};

	for (;;) {
		finish_due();
		if (fake.fatal != KVG_CU_SUCCESS)
			return fake.fatal;
		if (stream->done >= mark)
			return KVG_CU_SUCCESS;
		if (!fake_is_held() && fake.config.clock != FAKE_CLOCK_REAL) {
			clock_ns = kv_max_u64(clock_ns, STAILQ_FIRST(&stream->ops)->end_ns);
			continue;
		}
		(void)pthread_mutex_unlock(&fake.lock);
		(void)nanosleep(&pause, NULL);
		(void)pthread_mutex_lock(&fake.lock);
	}
}

/* ---- Streams ---- */

static struct kvg_cu_str *of_stream(kvg_cu_stream handle)
{
	struct kvg_cu_str *stream;

	if (!handle)
		return &default_stream;
	LIST_FOREACH (stream, &streams, entry) {
		if (stream == handle)
			return stream;
	}
	return NULL;
}

kvg_cu_result fake_stream_create(kvg_cu_stream *stream, unsigned flags)
{
	struct kvg_cu_str *made;
	FAKE_ENTER("cuStreamCreate", FAKE_CONTEXT);

	if (flags > KVG_CU_STREAM_NON_BLOCKING)
		return KVG_CU_INVALID_VALUE;
	made = calloc(1, sizeof(*made));
	assert(made);
	STAILQ_INIT(&made->ops);
	LIST_INSERT_HEAD(&streams, made, entry);
	*stream = made;
	return KVG_CU_SUCCESS;
}

static void free_stream(struct kvg_cu_str *stream)
{
	struct kvg_cu_evt *event;

	while (!STAILQ_EMPTY(&stream->ops))
		finish_first(stream);
	LIST_FOREACH (event, &events, entry) {
		if (event->stream == stream)
			event->stream = NULL;
	}
	LIST_REMOVE(stream, entry);
	free(stream);
}

/* What is in it still takes place. */
kvg_cu_result fake_stream_destroy(kvg_cu_stream handle)
{
	struct kvg_cu_str *stream;
	FAKE_ENTER("cuStreamDestroy", FAKE_CONTEXT);

	stream = handle ? of_stream(handle) : NULL;
	if (!stream)
		return KVG_CU_INVALID_HANDLE;
	free_stream(stream);
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_stream_sync(kvg_cu_stream handle)
{
	struct kvg_cu_str *stream;
	FAKE_ENTER("cuStreamSynchronize", FAKE_CONTEXT);

	stream = of_stream(handle);
	return stream ? wait_for(stream, stream->issued) : KVG_CU_INVALID_HANDLE;
}

/* ---- Events ---- */

static struct kvg_cu_evt *of_event(kvg_cu_event handle)
{
	struct kvg_cu_evt *event;

	LIST_FOREACH (event, &events, entry) {
		if (event == handle)
			return event;
	}
	return NULL;
}

kvg_cu_result fake_event_create(kvg_cu_event *event, unsigned flags)
{
	struct kvg_cu_evt *made;
	FAKE_ENTER("cuEventCreate", FAKE_CONTEXT);

	if (flags > 7)
		return KVG_CU_INVALID_VALUE;
	made = calloc(1, sizeof(*made));
	assert(made);
	LIST_INSERT_HEAD(&events, made, entry);
	*event = made;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_event_destroy(kvg_cu_event handle)
{
	struct kvg_cu_evt *event;
	FAKE_ENTER("cuEventDestroy", FAKE_CONTEXT);

	event = of_event(handle);
	if (!event)
		return KVG_CU_INVALID_HANDLE;
	LIST_REMOVE(event, entry);
	free(event);
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_event_record(kvg_cu_event handle, kvg_cu_stream stream_handle)
{
	struct kvg_cu_str *stream;
	struct kvg_cu_evt *event;
	FAKE_ENTER("cuEventRecord", FAKE_CONTEXT);

	event = of_event(handle);
	stream = of_stream(stream_handle);
	if (!event || !stream)
		return KVG_CU_INVALID_HANDLE;
	event->stream = stream;
	event->mark = stream->issued;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_event_query(kvg_cu_event handle)
{
	struct kvg_cu_evt *event;
	FAKE_ENTER("cuEventQuery", FAKE_CONTEXT);

	event = of_event(handle);
	if (!event)
		return KVG_CU_INVALID_HANDLE;
	finish_due();
	if (fake.fatal != KVG_CU_SUCCESS)
		return fake.fatal;
	if (!event->stream || event->stream->done >= event->mark)
		return KVG_CU_SUCCESS;
	pass_time();
	return KVG_CU_NOT_READY;
}

/* ---- Copies ---- */

static enum fakecu_direction direction_of(const struct run *run)
{
	if (!fake_is_device(run->to))
		return FAKECU_TO_HOST;
	return fake_is_device(run->from) ? FAKECU_ON_DEVICE : FAKECU_TO_DEVICE;
}

static bool is_pageable(const struct run *run, enum fakecu_direction direction)
{
	if (direction == FAKECU_ON_DEVICE)
		return false;
	return !fake_host_is_pinned(direction == FAKECU_TO_DEVICE ? run->from : run->to, run->size);
}

static bool is_run_valid(const struct op *op, const struct run *run)
{
	bool to = fake_is_device(run->to), from = !op->fill && fake_is_device(run->from), rdma;

	return run->size > 0 && (to || from) &&
	       (!to || fake_range_is_mapped(run->to, run->size, &rdma)) &&
	       (!from || fake_range_is_mapped(run->from, run->size, &rdma));
}

/* When OP is done if it goes into STREAM now; ret_waits: and the call waits for that. */
static uint64_t schedule(struct kvg_cu_str *stream, const struct op *op, bool *ret_waits)
{
	enum fakecu_direction engine =
		op->fill || op->launch ? FAKECU_ON_DEVICE : direction_of(&op->runs[0]);
	uint64_t start = now_ns(), wire = 0, total = op->launch ? fake.config.kernel_ns : 0;

	*ret_waits = false;
	if (stream->issued > 0)
		start = kv_max_u64(start, stream->ready_ns + fake.config.gap_ns);
	start = kv_max_u64(start, engine_free_ns[engine]);
	for (size_t i = 0; i < op->count; i++) {
		const struct run *run = &op->runs[i];
		enum fakecu_direction direction = op->fill ? engine : direction_of(run);
		bool pageable = !op->fill && is_pageable(run, direction);

		*ret_waits = *ret_waits || pageable;
		wire = wire_ns(run->size, pageable ? fake.config.bandwidth_pageable
						   : fake.config.bandwidth[direction]);
		traffic[direction].copies++;
		traffic[direction].bytes += run->size;
		traffic[direction].busy_ns += wire;
		total += wire + (i > 0 ? fake.config.batch_gap_ns : 0);
	}
	engine_free_ns[engine] = start + total;
	return start + total;
}

/* Takes OP. */
static kvg_cu_result submit(kvg_cu_stream handle, struct op *op)
{
	struct kvg_cu_str *stream = of_stream(handle);
	bool waits;

	for (size_t i = 0; stream && i < op->count; i++) {
		if (is_run_valid(op, &op->runs[i]))
			continue;
		free(op);
		return KVG_CU_INVALID_VALUE;
	}
	if (!stream) {
		free(op->launch);
		free(op);
		return KVG_CU_INVALID_HANDLE;
	}
	fake_spend(fake.config.submit_ns);
	op->end_ns = schedule(stream, op, &waits);
	stream->ready_ns = op->end_ns;
	stream->issued++;
	STAILQ_INSERT_TAIL(&stream->ops, op, entry);
	if (fake.config.early_copies)
		move_op(op);
	return waits ? wait_for(stream, stream->issued) : KVG_CU_SUCCESS;
}

static struct op *new_op(size_t count)
{
	struct op *op = calloc(1, sizeof(*op) + count * sizeof(struct run));

	assert(op);
	op->count = count;
	return op;
}

static kvg_cu_result copy_one(uint64_t to, uint64_t from, size_t size, kvg_cu_stream stream)
{
	struct op *op = new_op(1);

	op->runs[0] = (struct run){.to = to, .from = from, .size = size};
	return submit(stream, op);
}

kvg_cu_result fake_copy_to_device(
	kvg_cu_ptr to, const void *from, size_t size, kvg_cu_stream stream)
{
	FAKE_ENTER("cuMemcpyHtoDAsync", FAKE_CONTEXT);

	if (!fake_is_device(to))
		return KVG_CU_INVALID_VALUE;
	return copy_one(to, (uint64_t)(uintptr_t)from, size, stream);
}

kvg_cu_result fake_copy_to_host(void *to, kvg_cu_ptr from, size_t size, kvg_cu_stream stream)
{
	FAKE_ENTER("cuMemcpyDtoHAsync", FAKE_CONTEXT);

	if (!fake_is_device(from))
		return KVG_CU_INVALID_VALUE;
	return copy_one((uint64_t)(uintptr_t)to, from, size, stream);
}

kvg_cu_result fake_copy_on_device(kvg_cu_ptr to, kvg_cu_ptr from, size_t size, kvg_cu_stream stream)
{
	FAKE_ENTER("cuMemcpyDtoDAsync", FAKE_CONTEXT);

	if (!fake_is_device(to) || !fake_is_device(from))
		return KVG_CU_INVALID_VALUE;
	return copy_one(to, from, size, stream);
}

kvg_cu_result fake_copy_batch(kvg_cu_ptr *to, kvg_cu_ptr *from, size_t *sizes, size_t count,
	struct kvg_cu_copy_attributes *attributes, size_t *attribute_starts, size_t attribute_count,
	size_t *failed, kvg_cu_stream stream)
{
	struct op *op;
	FAKE_ENTER("cuMemcpyBatchAsync", FAKE_CONTEXT);

	*failed = SIZE_MAX;
	if (!stream || count == 0 || attribute_count == 0 || attribute_count > count ||
		attribute_starts[0] != 0)
		return KVG_CU_INVALID_VALUE;
	for (size_t i = 0; i < attribute_count; i++)
		if (attributes[i].source_order < 1 || attributes[i].source_order > 3 ||
			attributes[i].flags > 1 || attribute_starts[i] >= count ||
			(i > 0 && attribute_starts[i] <= attribute_starts[i - 1]))
			return KVG_CU_INVALID_VALUE;
	op = new_op(count);
	for (size_t i = 0; i < count; i++) {
		op->runs[i] = (struct run){.to = to[i], .from = from[i], .size = sizes[i]};
		if (*failed == SIZE_MAX && !is_run_valid(op, &op->runs[i]))
			*failed = i;
	}
	return submit(stream, op);
}

kvg_cu_result fake_fill(kvg_cu_ptr to, unsigned char byte, size_t size, kvg_cu_stream stream)
{
	struct op *op;
	FAKE_ENTER("cuMemsetD8Async", FAKE_CONTEXT);

	op = new_op(1);
	op->fill = true;
	op->byte = byte;
	op->runs[0] = (struct run){.to = to, .size = size};
	return submit(stream, op);
}

kvg_cu_result fake_launch_submit(kvg_cu_stream stream, struct fake_launch *launch)
{
	struct op *op = new_op(0);

	op->launch = launch;
	return submit(stream, op);
}

/* ---- All of it ---- */

void fake_streams_live(struct fakecu_live *live)
{
	struct kvg_cu_str *stream;
	struct kvg_cu_evt *event;

	LIST_FOREACH (stream, &streams, entry)
		live->streams++;
	LIST_FOREACH (event, &events, entry)
		live->events++;
}

void fake_streams_reset(void)
{
	fake_drain();
	while (!LIST_EMPTY(&events)) {
		struct kvg_cu_evt *event = LIST_FIRST(&events);

		LIST_REMOVE(event, entry);
		free(event);
	}
	while (!LIST_EMPTY(&streams))
		free_stream(LIST_FIRST(&streams));
	default_stream.issued = default_stream.done = default_stream.ready_ns = 0;
	clock_ns = 0;
	memset(engine_free_ns, 0, sizeof(engine_free_ns));
	memset(traffic, 0, sizeof(traffic));
}

FAKE_API uint64_t fakecu_now(void)
{
	KV_LOCKED(&fake.lock);
	return now_ns();
}

FAKE_API void fakecu_advance(uint64_t ns)
{
	KV_LOCKED(&fake.lock);
	clock_ns += ns;
	finish_due();
}

FAKE_API uint64_t fakecu_next(void)
{
	struct kvg_cu_str *stream;
	KV_LOCKED(&fake.lock);

	stream = next_stream();
	return stream ? STAILQ_FIRST(&stream->ops)->end_ns : UINT64_MAX;
}

FAKE_API void fakecu_traffic(enum fakecu_direction direction, struct fakecu_traffic *ret_traffic)
{
	KV_LOCKED(&fake.lock);
	*ret_traffic = traffic[direction];
}
