/* SPDX-License-Identifier: Apache-2.0 */
/* What the hardware can do: a deep O_DIRECT queue; what disturbs: an endless stream; memory. */
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#include "fs/base.h"
#include "tools/bench/kvbench.h"

#define DEPTH_MAX 256u

struct slot {
	void *memory;
	struct place place;
};

struct queue {
	struct worker *worker;
	struct io_uring ring;
	struct slot slots[DEPTH_MAX];
	unsigned in_flight;
	int fd;
};

static uint64_t count_blocks(const struct bench *bench)
{
	return bench->size / bench->block;
}

static void submit(struct queue *queue, struct slot *slot, uint64_t block)
{
	const struct bench *bench = queue->worker->bench;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&queue->ring);

	assert(sqe != NULL); /* the ring is as deep as there are slots */
	slot->place = (struct place){bench->first, block * bench->block};
	if (bench->write) {
		pattern_stamp(slot->memory, bench->block, slot->place);
		io_uring_prep_write(
			sqe, queue->fd, slot->memory, (unsigned)bench->block, slot->place.offset);
	} else {
		io_uring_prep_read(
			sqe, queue->fd, slot->memory, (unsigned)bench->block, slot->place.offset);
	}
	io_uring_sqe_set_data(sqe, slot);
	queue->in_flight++;
}

static int complete(struct queue *queue, struct slot **ret_slot)
{
	const struct bench *bench = queue->worker->bench;
	struct io_uring_cqe *cqe;
	int r = io_uring_submit_and_wait(&queue->ring, 1);

	if (r >= 0)
		r = io_uring_peek_cqe(&queue->ring, &cqe);
	if (r < 0)
		return bench_fail("the ring", "io_uring_enter", r);
	*ret_slot = io_uring_cqe_get_data(cqe);
	r = cqe->res;
	io_uring_cqe_seen(&queue->ring, cqe);
	queue->in_flight--;
	queue->worker->bytes += bench->block;
	queue->worker->ops++;
	if (r != (int)bench->block)
		return bench_fail("raw file", bench->write ? "write" : "read", r < 0 ? r : -EIO);
	if (!bench->write && !pattern_check((*ret_slot)->memory, bench->block, (*ret_slot)->place,
				     bench->verify))
		return bench_fail("raw file", "read", -EBADMSG);
	return 0;
}

static int pump(struct queue *queue)
{
	struct slot *slot = NULL;
	uint64_t block;
	int r = 0;

	for (unsigned i = 0; i < queue->worker->bench->depth; i++) {
		if (!run_next(queue->worker, &block))
			break;
		submit(queue, &queue->slots[i], block);
	}
	while (r == 0 && queue->in_flight > 0) {
		r = complete(queue, &slot);
		if (r == 0 && run_next(queue->worker, &block))
			submit(queue, slot, block);
	}
	if (r == 0 && queue->worker->bench->write && fdatasync(queue->fd) < 0)
		r = bench_fail("raw file", "fdatasync", -errno);
	return r;
}

static int prepare_raw(const struct bench *bench, void **ret_state)
{
	struct queue *queue;
	char name[NAME_BYTES];
	int r;

	if (bench->depth < 1 || bench->depth > DEPTH_MAX || bench->threads != 1)
		return bench_fail("--depth or --threads", "taking it", -ERANGE);
	queue = calloc(1, sizeof(*queue));
	if (!queue)
		return bench_fail("the queue", "calloc", -ENOMEM);
	*ret_state = queue;
	pattern_name(bench, bench->first, name);
	queue->fd = open(name, (bench->write ? O_RDWR : O_RDONLY) | O_DIRECT | O_CLOEXEC);
	if (queue->fd < 0)
		return bench_fail(name, "open", -errno);
	r = io_uring_queue_init((unsigned)bench->depth, &queue->ring, 0);
	if (r < 0)
		return bench_fail("the ring", "io_uring_queue_init", r);
	for (unsigned i = 0; i < bench->depth; i++) {
		queue->slots[i].memory = bench_memory(bench->block);
		if (!queue->slots[i].memory)
			return bench_fail("memory", "mmap", -ENOMEM);
	}
	return 0;
}

static int raw_items(struct worker *worker, uint64_t item)
{
	struct queue *queue = run_state(worker);

	queue->worker = worker;
	return pump(queue);
}

static void release_raw(const struct bench *bench, void *state)
{
	struct queue *queue = state;

	if (!queue)
		return;
	if (queue->fd >= 0)
		(void)close(queue->fd);
	if (queue->slots[0].memory)
		io_uring_queue_exit(&queue->ring);
	free(queue);
}

const struct kernel kernel_raw = {
	.name = "raw",
	.help = "read or --write a file of SIZE bytes, O_DIRECT, DEPTH at a time",
	.items = count_blocks,
	.prepare = prepare_raw,
	.item = raw_items,
	.release = release_raw,
	.batch = true,
};

/* ---- The disturber ---- */

/* Sleeps until BYTES are due at the rate asked for. */
static void hold_back(uint64_t start_ns, uint64_t bytes, uint64_t rate)
{
	uint64_t due_ns = start_ns + (uint64_t)((double)bytes / (double)rate * 1e9);
	const struct timespec due = {
		.tv_sec = (time_t)(due_ns / 1000000000),
		.tv_nsec = (long)(due_ns % 1000000000),
	};

	(void)clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
}

static uint64_t one(const struct bench *bench)
{
	return 1;
}

static int stream(struct worker *worker, uint64_t item)
{
	const struct bench *bench = worker->bench;
	uint64_t start = bench_now_ns();
	char name[NAME_BYTES];
	_cleanup_fd_ int fd = -1;

	pattern_name(bench, bench->first, name);
	fd = open(name, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return bench_fail(name, "open", -errno);
	for (uint64_t offset = 0; !bench_stopped(); offset += bench->block) {
		if (offset + bench->block > bench->size)
			offset = 0;
		if (pread(fd, worker->buffer, bench->block, (off_t)offset) != (ssize_t)bench->block)
			return bench_fail(name, "pread", -EIO);
		worker->bytes += bench->block;
		worker->ops++;
		if (bench->rate > 0)
			hold_back(start, worker->bytes, bench->rate);
	}
	return 0;
}

const struct kernel kernel_stream = {
	.name = "stream",
	.help = "read one file of SIZE bytes over and over, at RATE, until SIGTERM",
	.items = one,
	.item = stream,
};

/* ---- Memory ---- */

/*
 * Memory that nobody has used for a while may have been given back to the host of a virtual
 * machine; whoever touches it first then waits for the host.
 */
static int touch(struct worker *worker, uint64_t item)
{
	const struct bench *bench = worker->bench;
	uint8_t *memory =
		mmap(NULL, bench->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return bench_fail("memory", "mmap", -errno);
	(void)madvise(memory, bench->size, MADV_HUGEPAGE);
	for (uint64_t i = 0; i < bench->size; i += PAGE_BYTES)
		memory[i] = 1;
	(void)munmap(memory, bench->size);
	worker->bytes += bench->size;
	worker->ops++;
	return 0;
}

const struct kernel kernel_touch = {
	.name = "touch",
	.help = "take SIZE bytes of memory, touch every page, and give them back",
	.items = one,
	.item = touch,
};
