/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The real kv_io_ops table: queues on io_uring, and, where the kernel or a container refuses
 * that, queues that do each transfer when it is reaped.
 *
 * Optional kernel features, each tried and done without when refused:
 *   SINGLE_ISSUER, DEFER_TASKRUN  Linux 6.1   completions run when we wait, not whenever they come
 *   COOP_TASKRUN                  Linux 5.19  no interrupts for completions
 *   SUBMIT_ALL                    Linux 5.18  one bad entry does not hold up the others
 *   registered files, buffers     limits of descriptors and of locked memory (RLIMIT_MEMLOCK)
 *   registered ring descriptor    Linux 5.18
 */
#include <errno.h>
#include <liburing.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "fs/base.h"
#include "fs/device.h"
#include "fs/io_internal.h"
#include "fs/log.h"

#ifndef IORING_SETUP_SUBMIT_ALL
#define IORING_SETUP_SUBMIT_ALL (1U << 7)
#endif
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

/* 4 MiB a queue: half of the usual RLIMIT_MEMLOCK. */
#define BUFFERS_MAX 16u

struct kv_io_queue {
	bool uring; /* else: pending is used */
	struct io_uring ring;
	int handles[KV_DEVICES_MAX];
	bool files_registered;
	unsigned depth;
	unsigned in_flight; /* submitted, not reaped */
	void *buffers;      /* buffer_count times KV_RING_BUFFER_SIZE, or NULL */
	unsigned buffer_count;
	unsigned pending_first;
	struct kv_io *pending[KV_RING_DEPTH_MAX]; /* a circle of in_flight entries */
};

/* Sets up the ring with as many of the flags as the kernel knows. */
static int setup_ring(struct io_uring *ring, unsigned depth)
{
	static const unsigned choices[] = {
		IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
		IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
		IORING_SETUP_SUBMIT_ALL,
		0,
	};
	int r = -EINVAL;

	for (size_t i = 0; i < sizeof(choices) / sizeof(choices[0]) && r == -EINVAL; i++) {
		struct io_uring_params params = {.flags = choices[i]};

		r = io_uring_queue_init_params(depth, ring, &params);
	}
	return r;
}

/* Registers as many buffers as the limit of locked memory lets us; none is no error. */
static void register_buffers(struct kv_io_queue *queue)
{
	size_t size = (size_t)BUFFERS_MAX * KV_RING_BUFFER_SIZE;
	struct iovec vectors[BUFFERS_MAX];
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return;
	(void)madvise(memory, size, MADV_HUGEPAGE);
	/* A child that shares these pages could see, or take along, transfers in flight. */
	(void)madvise(memory, size, MADV_DONTFORK);
	(void)madvise(memory, size, MADV_DONTDUMP);
	for (unsigned i = 0; i < BUFFERS_MAX; i++) {
		vectors[i].iov_base = memory + (size_t)i * KV_RING_BUFFER_SIZE;
		vectors[i].iov_len = KV_RING_BUFFER_SIZE;
	}
	for (unsigned count = BUFFERS_MAX; count > 0; count /= 2) {
		if (io_uring_register_buffers(&queue->ring, vectors, count) < 0)
			continue;
		queue->buffers = memory;
		queue->buffer_count = count;
		return;
	}
	(void)munmap(memory, size);
}

static bool is_unavailable(int r)
{
	return r == -ENOSYS || r == -EPERM || r == -EACCES || r == -ENOMEM;
}

static void log_unavailable(int r)
{
	static atomic_flag logged = ATOMIC_FLAG_INIT;

	if (!atomic_flag_test_and_set_explicit(&logged, memory_order_relaxed))
		kv_log_warning("device",
			"io_uring is not available, using plain reads and writes: slower "
			"error=\"%s\"",
			strerror(-r));
}

static int queue_new(void *context, const int *handles, unsigned handle_count, unsigned depth,
	struct kv_io_queue **ret_queue)
{
	struct kv_io_queue *queue;
	int r;

	(void)context;
	assert(handle_count > 0 && handle_count <= KV_DEVICES_MAX);
	assert(depth > 0 && depth <= KV_RING_DEPTH_MAX);
	queue = calloc(1, sizeof(*queue));
	if (!queue)
		return -ENOMEM;
	memcpy(queue->handles, handles, handle_count * sizeof(handles[0]));
	queue->depth = depth;
	r = setup_ring(&queue->ring, depth);
	if (r < 0 && !is_unavailable(r)) {
		free(queue);
		return r;
	}
	queue->uring = r >= 0;
	if (queue->uring) {
		(void)io_uring_register_ring_fd(&queue->ring);
		queue->files_registered =
			io_uring_register_files(&queue->ring, handles, handle_count) == 0;
		register_buffers(queue);
	} else {
		log_unavailable(r);
	}
	*ret_queue = queue;
	return 0;
}

static void queue_free(void *context, struct kv_io_queue *queue)
{
	(void)context;
	/* The kernel may still write into the memory of a transfer in flight. */
	assert(queue->in_flight == 0);
	if (queue->uring)
		io_uring_queue_exit(&queue->ring);
	if (queue->buffers)
		(void)munmap(queue->buffers, (size_t)BUFFERS_MAX * KV_RING_BUFFER_SIZE);
	free(queue);
}

/* Only queues: the next reap hands the whole batch to the kernel in one call. */
static void prepare(struct kv_io_queue *queue, struct kv_io *io)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&queue->ring);
	int file = queue->files_registered ? io->device : queue->handles[io->device];

	/* The queue has DEPTH entries, and no more than that are ever in flight. */
	assert(sqe);
	if (io->buffer >= 0 && io->kind == KV_IO_READ)
		io_uring_prep_read_fixed(sqe, file, io->memory, io->length, io->offset, io->buffer);
	else if (io->buffer >= 0)
		io_uring_prep_write_fixed(
			sqe, file, io->memory, io->length, io->offset, io->buffer);
	else if (io->kind == KV_IO_READ)
		io_uring_prep_read(sqe, file, io->memory, io->length, io->offset);
	else
		io_uring_prep_write(sqe, file, io->memory, io->length, io->offset);
	if (queue->files_registered)
		io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
	io_uring_sqe_set_data(sqe, io);
}

static int submit(void *context, struct kv_io_queue *queue, struct kv_io *io)
{
	(void)context;
	assert(io->buffer < (int)queue->buffer_count);
	if (queue->in_flight == queue->depth)
		return -EAGAIN;
	if (queue->uring)
		prepare(queue, io);
	else
		queue->pending[(queue->pending_first + queue->in_flight) % queue->depth] = io;
	queue->in_flight++;
	return 0;
}

/* Submits what is queued and, with WAIT, sleeps until a completion is there. */
static int enter(struct kv_io_queue *queue, bool wait)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	int r = 0;

	if (io_uring_cq_ready(&queue->ring) == 0 && wait)
		r = io_uring_submit_and_wait(&queue->ring, 1);
	else if (io_uring_cq_ready(&queue->ring) == 0 || io_uring_sq_ready(&queue->ring) > 0)
		r = io_uring_submit_and_get_events(&queue->ring);
	/* The kernel is short of memory for requests; those in flight will give some back. */
	if (r == -EAGAIN || r == -EBUSY)
		(void)nanosleep(&pause, NULL);
	return r == -EAGAIN || r == -EBUSY || r == -EINTR ? 0 : r;
}

static int reap_uring(struct kv_io_queue *queue, bool wait,
	struct kv_io_completion *ret_completions, unsigned capacity)
{
	struct io_uring_cqe *cqe;
	unsigned count = 0;

	while (queue->in_flight > 0) {
		unsigned head;
		int r = enter(queue, wait);

		if (r < 0)
			return r;
		io_uring_for_each_cqe(&queue->ring, head, cqe)
		{
			if (count == capacity)
				break;
			ret_completions[count].io = io_uring_cqe_get_data(cqe);
			ret_completions[count++].result = cqe->res;
		}
		io_uring_cq_advance(&queue->ring, count);
		queue->in_flight -= count;
		if (count > 0 || !wait)
			break;
	}
	return (int)count;
}

static int transfer(const struct kv_io_queue *queue, const struct kv_io *io)
{
	int fd = queue->handles[io->device];
	ssize_t n = io->kind == KV_IO_READ ? pread(fd, io->memory, io->length, (off_t)io->offset)
					   : pwrite(fd, io->memory, io->length, (off_t)io->offset);

	return n < 0 ? -errno : (int)n;
}

static int reap(void *context, struct kv_io_queue *queue, bool wait,
	struct kv_io_completion *ret_completions, unsigned capacity)
{
	unsigned count = 0;

	(void)context;
	assert(capacity > 0);
	if (queue->uring)
		return reap_uring(queue, wait, ret_completions, capacity);
	for (; queue->in_flight > 0 && count < capacity; count++) {
		ret_completions[count].io = queue->pending[queue->pending_first];
		ret_completions[count].result = transfer(queue, ret_completions[count].io);
		queue->pending_first = (queue->pending_first + 1) % queue->depth;
		queue->in_flight--;
	}
	return (int)count;
}

static void *buffer(void *context, struct kv_io_queue *queue, unsigned index)
{
	(void)context;
	/* Those that were lent are the lender's to find. */
	if (index >= queue->buffer_count || !queue->buffers)
		return NULL;
	return (char *)queue->buffers + (size_t)index * KV_RING_BUFFER_SIZE;
}

static int lend(void *context, struct kv_io_queue *queue, void *memory, size_t size, unsigned count)
{
	struct iovec *vectors;
	int r;

	(void)context;
	assert(queue->in_flight == 0 && count > 0);
	if (!queue->uring)
		return -EOPNOTSUPP;
	vectors = calloc(count, sizeof(*vectors));
	if (!vectors)
		return -ENOMEM;
	if (queue->buffers) {
		(void)io_uring_unregister_buffers(&queue->ring);
		(void)munmap(queue->buffers, (size_t)BUFFERS_MAX * KV_RING_BUFFER_SIZE);
	}
	queue->buffers = NULL;
	for (unsigned i = 0; i < count; i++)
		vectors[i] = (struct iovec){(char *)memory + i * size, size};
	r = io_uring_register_buffers(&queue->ring, vectors, count);
	queue->buffer_count = r < 0 ? 0 : count;
	free(vectors);
	return r;
}

static int64_t clock_ns(void *context)
{
	struct timespec now;

	(void)context;
	(void)clock_gettime(CLOCK_REALTIME, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void fill_random(void *context, void *memory, size_t length)
{
	char *p = memory;

	(void)context;
	while (length > 0) {
		ssize_t n = getrandom(p, length, 0);

		/* Fails for a signal only; every supported kernel has the call. */
		if (n < 0) {
			assert(errno == EINTR);
			continue;
		}
		p += n;
		length -= (size_t)n;
	}
}

const struct kv_io_ops *kv_io_real(void)
{
	static const struct kv_io_ops ops = {
		.open = kv_io_file_open,
		.close = kv_io_file_close,
		.read = kv_io_file_read,
		.write = kv_io_file_write,
		.flush = kv_io_file_flush,
		.queue_new = queue_new,
		.queue_free = queue_free,
		.submit = submit,
		.reap = reap,
		.buffer = buffer,
		.lend = lend,
		.clock_ns = clock_ns,
		.random = fill_random,
	};

	return &ops;
}
