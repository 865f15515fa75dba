/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kv_io_ops table over disks in memory, for tests: it can fail, be short, be slow to accept, and
 * completes transfers in a shuffled order. Header only; single-threaded.
 */
#ifndef KVFS_TESTS_UNIT_MEMORY_DISK_H
#define KVFS_TESTS_UNIT_MEMORY_DISK_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fs/device.h"
#include "tests/unit/unit_fs.h"

#define MEMORY_DISKS 4
#define MEMORY_BUFFERS 2

struct memory_disk {
	const char *path;
	uint8_t *bytes; /* NULL: not there */
	uint64_t size;
	bool open;
	int open_error;
	int read_error;  /* of plain reads */
	int write_error; /* of plain writes */
	int flush_error;
};

struct memory_disks {
	struct kv_io_ops ops;
	struct memory_disk disk[MEMORY_DISKS];
	uint64_t seed;
	unsigned writes; /* plain ones */
	unsigned flushes;
	unsigned open_queues;
	unsigned deepest;        /* most transfers in flight at once */
	unsigned refuse_submits; /* so many submits answer -EAGAIN */
	/* What the queue answers for IO instead of doing all of it; io->length: do it. May be NULL.
	 */
	int (*fault)(void *arg, const struct kv_io *io);
	void *fault_arg;
};

struct kv_io_queue {
	unsigned depth;
	unsigned count;
	struct kv_io *io[KV_RING_DEPTH_MAX];
	void *buffers[MEMORY_BUFFERS];
};

static inline int memory_open(void *context, const char *path, bool create, uint64_t size,
	int *ret_handle, uint64_t *ret_size)
{
	struct memory_disks *disks = context;

	for (int i = 0; i < MEMORY_DISKS; i++) {
		struct memory_disk *disk = &disks->disk[i];

		if (!disk->path || strcmp(disk->path, path) != 0)
			continue;
		if (disk->open_error)
			return disk->open_error;
		if (!disk->bytes != create)
			return create ? -EEXIST : -ENOENT;
		if (disk->open)
			return -EBUSY;
		if (create) {
			disk->bytes = calloc(1, size);
			disk->size = size;
		}
		disk->open = true;
		*ret_handle = i;
		*ret_size = disk->size;
		return 0;
	}
	return -ENOENT;
}

static inline void memory_close(void *context, int handle)
{
	struct memory_disks *disks = context;

	assert_true(disks->disk[handle].open);
	disks->disk[handle].open = false;
}

static inline int memory_read(
	void *context, int handle, void *memory, size_t length, uint64_t offset)
{
	struct memory_disk *disk = &((struct memory_disks *)context)->disk[handle];

	assert_true(disk->open);
	if (disk->read_error)
		return disk->read_error;
	if (offset + length > disk->size)
		return -EIO;
	memcpy(memory, disk->bytes + offset, length);
	return 0;
}

static inline int memory_write(
	void *context, int handle, const void *memory, size_t length, uint64_t offset)
{
	struct memory_disks *disks = context;
	struct memory_disk *disk = &disks->disk[handle];

	assert_true(disk->open);
	disks->writes++;
	/* A write that fails may have reached the disk in part. */
	if (disk->write_error) {
		memset(disk->bytes + offset, 0xee, length / 2);
		return disk->write_error;
	}
	if (offset + length > disk->size)
		return -EIO;
	memcpy(disk->bytes + offset, memory, length);
	return 0;
}

static inline int memory_flush(void *context, int handle)
{
	struct memory_disks *disks = context;

	assert_true(disks->disk[handle].open);
	disks->flushes++;
	return disks->disk[handle].flush_error;
}

static inline int memory_queue_new(void *context, const int *handles, unsigned handle_count,
	unsigned depth, struct kv_io_queue **ret_queue)
{
	struct memory_disks *disks = context;
	struct kv_io_queue *queue = calloc(1, sizeof(*queue));

	assert_non_null(queue);
	for (unsigned i = 0; i < handle_count; i++)
		assert_int_equal(handles[i], i);
	queue->depth = depth;
	for (int i = 0; i < MEMORY_BUFFERS; i++) {
		queue->buffers[i] = aligned_alloc(KV_BLOCK_SIZE, KV_RING_BUFFER_SIZE);
		assert_non_null(queue->buffers[i]);
	}
	disks->open_queues++;
	*ret_queue = queue;
	return 0;
}

static inline void memory_queue_free(void *context, struct kv_io_queue *queue)
{
	struct memory_disks *disks = context;

	assert_int_equal(queue->count, 0);
	for (int i = 0; i < MEMORY_BUFFERS; i++)
		free(queue->buffers[i]);
	free(queue);
	disks->open_queues--;
}

static inline int memory_submit(void *context, struct kv_io_queue *queue, struct kv_io *io)
{
	struct memory_disks *disks = context;

	if (disks->refuse_submits > 0) {
		disks->refuse_submits--;
		return -EAGAIN;
	}
	if (queue->count == queue->depth)
		return -EAGAIN;
	queue->io[queue->count++] = io;
	if (queue->count > disks->deepest)
		disks->deepest = queue->count;
	return 0;
}

static inline int memory_transfer(struct memory_disks *disks, struct kv_io *io)
{
	struct memory_disk *disk = &disks->disk[io->device];
	int result = disks->fault ? disks->fault(disks->fault_arg, io) : (int)io->length;

	if (result <= 0 || (unsigned)result > io->length)
		return result;
	if (io->offset >= disk->size)
		return 0;
	if (io->kind == KV_IO_READ)
		memcpy(io->memory, disk->bytes + io->offset, (size_t)result);
	else
		memcpy(disk->bytes + io->offset, io->memory, (size_t)result);
	return result;
}

static inline int memory_reap(void *context, struct kv_io_queue *queue, bool wait,
	struct kv_io_completion *ret_completions, unsigned capacity)
{
	struct memory_disks *disks = context;
	unsigned count = 0, wanted;

	wanted = wait + (unsigned)(unit_random(&disks->seed) % capacity);
	while (count < wanted && queue->count > 0) {
		unsigned i = (unsigned)(unit_random(&disks->seed) % queue->count);
		struct kv_io *io = queue->io[i];

		queue->io[i] = queue->io[--queue->count];
		ret_completions[count].io = io;
		ret_completions[count++].result = memory_transfer(disks, io);
	}
	return (int)count;
}

static inline void *memory_buffer(void *context, struct kv_io_queue *queue, unsigned index)
{
	(void)context;
	return index < MEMORY_BUFFERS ? queue->buffers[index] : NULL;
}

static inline int64_t memory_clock_ns(void *context)
{
	(void)context;
	return 1000000000;
}

static inline void memory_random(void *context, void *memory, size_t length)
{
	unit_random_fill(&((struct memory_disks *)context)->seed, memory, length);
}

/* Adds a disk of SIZE zeros, or the name of one to be created (SIZE 0). */
static inline void memory_disks_add(
	struct memory_disks *disks, unsigned number, const char *path, uint64_t size)
{
	disks->disk[number].path = path;
	disks->disk[number].size = size;
	if (size > 0) {
		disks->disk[number].bytes = calloc(1, size);
		assert_non_null(disks->disk[number].bytes);
	}
}

static inline struct memory_disks *memory_disks_new(void)
{
	struct memory_disks *disks = calloc(1, sizeof(*disks));

	assert_non_null(disks);
	disks->seed = 88172645463325252u;
	disks->ops = (struct kv_io_ops){
		.context = disks,
		.open = memory_open,
		.close = memory_close,
		.read = memory_read,
		.write = memory_write,
		.flush = memory_flush,
		.queue_new = memory_queue_new,
		.queue_free = memory_queue_free,
		.submit = memory_submit,
		.reap = memory_reap,
		.buffer = memory_buffer,
		.clock_ns = memory_clock_ns,
		.random = memory_random,
	};
	return disks;
}

/* Everything that was opened must have been closed. */
static inline void memory_disks_free(struct memory_disks *disks)
{
	assert_int_equal(disks->open_queues, 0);
	for (int i = 0; i < MEMORY_DISKS; i++) {
		assert_false(disks->disk[i].open);
		free(disks->disk[i].bytes);
	}
	free(disks);
}

#endif
