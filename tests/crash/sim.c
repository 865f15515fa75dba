/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated devices, their faults, and the recording. */
#include "tests/crash/sim.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fs/base.h"

#define BUFFERS 2u
#define LATE_US_MAX 300u

struct queued {
	struct kv_io *io;
	size_t event;
};

struct kv_io_queue {
	unsigned depth;
	unsigned count;
	struct queued queued[KV_RING_DEPTH_MAX];
	void *buffers[BUFFERS];
};

struct sim *sim_current;

uint64_t sim_random(uint64_t *seed)
{
	*seed ^= *seed >> 12;
	*seed ^= *seed << 25;
	*seed ^= *seed >> 27;
	return *seed * UINT64_C(2685821657736338717);
}

static void *must(void *memory)
{
	if (!memory)
		abort();
	return memory;
}

/* ---- The recording ---- */

bool sim_strikes(struct sim *sim, enum sim_fault fault)
{
	if (!sim->recording || sim->faults[fault].after < 0)
		return false;
	if (sim->faults[fault].after > 0) {
		sim->faults[fault].after--;
		return false;
	}
	if (--sim->faults[fault].count <= 0)
		sim->faults[fault].after = -1;
	sim->struck++;
	return true;
}

static struct sim_event *add_event(struct sim *sim)
{
	if (sim->count == sim->capacity) {
		sim->capacity = sim->capacity ? 2 * sim->capacity : 1024;
		sim->events = must(realloc(sim->events, sim->capacity * sizeof(*sim->events)));
	}
	return &sim->events[sim->count++];
}

size_t sim_note_write(
	struct sim *sim, unsigned disk, const void *bytes, uint32_t length, uint64_t offset)
{
	struct sim_event *event;

	if (!sim->recording)
		return SIZE_MAX;
	event = add_event(sim);
	*event = (struct sim_event){
		.kind = SIM_WRITE,
		.disk = disk,
		.offset = offset,
		.length = length,
		.bytes = must(malloc(length)),
		.completed = SIZE_MAX,
	};
	memcpy(event->bytes, bytes, length);
	return sim->count - 1;
}

void sim_completed(struct sim *sim, size_t event)
{
	if (event != SIZE_MAX && sim->recording)
		sim->events[event].completed = sim->count;
}

void sim_note_flush(struct sim *sim, unsigned disk, size_t begun, bool failed)
{
	if (sim->recording)
		*add_event(sim) = (struct sim_event){
			.kind = failed ? SIM_FLUSH_FAILED : SIM_FLUSH,
			.disk = disk,
			.begun = begun,
		};
}

size_t sim_place(struct sim *sim)
{
	KV_LOCKED(&sim->lock);

	return sim->count;
}

void sim_record(struct sim *sim, uint64_t seed)
{
	KV_LOCKED(&sim->lock);

	for (size_t i = 0; i < sim->count; i++)
		free(sim->events[i].bytes);
	sim->count = 0;
	sim->seed = seed;
	sim->struck = 0;
	sim->recording = true;
}

void sim_stop(struct sim *sim)
{
	KV_LOCKED(&sim->lock);

	sim->recording = false;
	for (unsigned i = 0; i < _SIM_FAULT_MAX; i++)
		sim->faults[i].after = -1;
}

/* ---- The devices ---- */

static const uint8_t *keep_copy(struct sim *sim, const void *bytes)
{
	uint8_t *copy = must(malloc(KV_BLOCK_SIZE));

	if (sim->copy_count == sim->copy_capacity) {
		sim->copy_capacity = sim->copy_capacity ? 2 * sim->copy_capacity : 1024;
		sim->copies = must(realloc(sim->copies, sim->copy_capacity * sizeof(*sim->copies)));
	}
	sim->copies[sim->copy_count++] = copy;
	memcpy(copy, bytes, KV_BLOCK_SIZE);
	return copy;
}

static void forget_copies(struct sim *sim)
{
	for (size_t i = 0; i < sim->copy_count; i++)
		free(sim->copies[i]);
	sim->copy_count = 0;
}

/* Lock held. LENGTH may end within a block when a transfer was short: then that one is not written.
 */
static void device_write(
	struct sim *sim, unsigned disk, const uint8_t *bytes, size_t length, uint64_t offset)
{
	assert(offset % KV_BLOCK_SIZE == 0);
	for (; length >= KV_BLOCK_SIZE; length -= KV_BLOCK_SIZE) {
		sim->live.blocks[disk][offset / KV_BLOCK_SIZE] = keep_copy(sim, bytes);
		bytes += KV_BLOCK_SIZE;
		offset += KV_BLOCK_SIZE;
	}
}

static void device_read(
	struct sim *sim, unsigned disk, uint8_t *ret_bytes, size_t length, uint64_t offset)
{
	while (length > 0) {
		const uint8_t *block = sim->live.blocks[disk][offset / KV_BLOCK_SIZE];
		size_t skip = offset % KV_BLOCK_SIZE;
		size_t part = (size_t)kv_min_u64(length, KV_BLOCK_SIZE - skip);

		if (block)
			memcpy(ret_bytes, block + skip, part);
		else
			memset(ret_bytes, 0, part);
		ret_bytes += part;
		offset += part;
		length -= part;
	}
}

static int sim_open(void *context, const char *path, bool create, uint64_t size, int *ret_handle,
	uint64_t *ret_size)
{
	struct sim *sim = context;
	const char *name = strrchr(path, '/');
	unsigned number = (unsigned)(name[strlen(name) - 1] - '0');
	KV_LOCKED(&sim->lock);

	(void)create;
	(void)size;
	assert(number < SIM_DEVICES);
	if (sim->open[number])
		return -EBUSY;
	sim->open[number] = true;
	*ret_handle = (int)number;
	*ret_size = SIM_DEVICE_SIZE;
	return 0;
}

static void sim_close(void *context, int handle)
{
	struct sim *sim = context;
	KV_LOCKED(&sim->lock);

	assert(sim->open[handle]);
	sim->open[handle] = false;
}

static int sim_read(void *context, int handle, void *memory, size_t length, uint64_t offset)
{
	struct sim *sim = context;
	KV_LOCKED(&sim->lock);

	if (offset + length > SIM_DEVICE_SIZE)
		return -EIO;
	device_read(sim, (unsigned)handle, memory, length, offset);
	return 0;
}

static int sim_write(void *context, int handle, const void *memory, size_t length, uint64_t offset)
{
	struct sim *sim = context;
	size_t event;
	KV_LOCKED(&sim->lock);

	if (offset + length > SIM_DEVICE_SIZE)
		return -EIO;
	event = sim_note_write(sim, (unsigned)handle, memory, (uint32_t)length, offset);
	device_write(sim, (unsigned)handle, memory, length, offset);
	sim_completed(sim, event);
	return 0;
}

static int sim_flush(void *context, int handle)
{
	struct sim *sim = context;
	KV_LOCKED(&sim->lock);
	bool failed = sim_strikes(sim, SIM_FAULT_FLUSH);

	sim_note_flush(sim, (unsigned)handle, sim->count, failed);
	return failed ? -EIO : 0;
}

/* ---- Queues ---- */

static int queue_new(void *context, const int *handles, unsigned handle_count, unsigned depth,
	struct kv_io_queue **ret_queue)
{
	struct kv_io_queue *queue = must(calloc(1, sizeof(*queue)));

	(void)context;
	for (unsigned i = 0; i < handle_count; i++)
		assert(handles[i] == (int)i);
	queue->depth = depth;
	for (unsigned i = 0; i < BUFFERS; i++)
		queue->buffers[i] = must(aligned_alloc(KV_BLOCK_SIZE, KV_RING_BUFFER_SIZE));
	*ret_queue = queue;
	return 0;
}

static void queue_free(void *context, struct kv_io_queue *queue)
{
	(void)context;
	assert(queue->count == 0);
	for (unsigned i = 0; i < BUFFERS; i++)
		free(queue->buffers[i]);
	free(queue);
}

/* What is issued may reach the disk from now on. */
static int submit(void *context, struct kv_io_queue *queue, struct kv_io *io)
{
	struct sim *sim = context;
	struct queued *queued = &queue->queued[queue->count];
	KV_LOCKED(&sim->lock);

	if (queue->count == queue->depth || (queue->count > 0 && sim_strikes(sim, SIM_FAULT_FULL)))
		return -EAGAIN;
	*queued = (struct queued){io, SIZE_MAX};
	if (io->kind == KV_IO_WRITE)
		queued->event = sim_note_write(sim, io->device, io->memory, io->length, io->offset);
	queue->count++;
	return 0;
}

/* Lock held. What the device answers. */
static int transfer(struct sim *sim, const struct kv_io *io, size_t event)
{
	uint32_t half = io->length / 2 & ~(KV_BLOCK_SIZE - 1);

	if (io->offset + io->length > SIM_DEVICE_SIZE)
		return -EIO;
	if (io->kind == KV_IO_READ) {
		if (sim_strikes(sim, SIM_FAULT_READ))
			return -EIO;
		device_read(sim, io->device, io->memory, io->length, io->offset);
		return (int)io->length;
	}
	if (sim_strikes(sim, SIM_FAULT_WRITE)) {
		device_write(sim, io->device, io->memory, half, io->offset);
		return -EIO;
	}
	if (half > 0 && sim_strikes(sim, SIM_FAULT_SHORT)) {
		device_write(sim, io->device, io->memory, half, io->offset);
		sim->events[event].length = half;
		sim_completed(sim, event);
		return (int)half;
	}
	device_write(sim, io->device, io->memory, io->length, io->offset);
	sim_completed(sim, event);
	return (int)io->length;
}

static int reap(void *context, struct kv_io_queue *queue, bool wait,
	struct kv_io_completion *ret_completions, unsigned capacity)
{
	struct sim *sim = context;
	unsigned count = 0, wanted, pause_us;

	{
		KV_LOCKED(&sim->lock);
		wanted = wait + (unsigned)(sim_random(&sim->seed) % capacity);
		pause_us = sim->late ? (unsigned)(sim_random(&sim->seed) % LATE_US_MAX) : 0;
	}
	if (pause_us > 0)
		(void)usleep(pause_us);
	KV_LOCKED(&sim->lock);
	while (count < wanted && queue->count > 0) {
		unsigned i = (unsigned)(sim_random(&sim->seed) % queue->count);
		struct queued queued = queue->queued[i];

		queue->queued[i] = queue->queued[--queue->count];
		ret_completions[count].io = queued.io;
		ret_completions[count++].result = transfer(sim, queued.io, queued.event);
	}
	return (int)count;
}

static void *buffer(void *context, struct kv_io_queue *queue, unsigned index)
{
	(void)context;
	return index < BUFFERS ? queue->buffers[index] : NULL;
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
	struct sim *sim = context;
	uint8_t *p = memory;
	KV_LOCKED(&sim->lock);

	for (size_t i = 0; i < length; i++)
		p[i] = (uint8_t)(sim_random(&sim->seed) >> 32);
}

/* ---- Life ---- */

struct sim *sim_new(const char *store)
{
	struct sim *sim = must(calloc(1, sizeof(*sim)));

	(void)pthread_mutex_init(&sim->lock, NULL);
	sim->seed = 1;
	sim_stop(sim);
	sim_image_init(&sim->live);
	(void)snprintf(sim->index_path, sizeof(sim->index_path), "%s/index/data.mdb", store);
	sim->ops = (struct kv_io_ops){
		.context = sim,
		.open = sim_open,
		.close = sim_close,
		.read = sim_read,
		.write = sim_write,
		.flush = sim_flush,
		.queue_new = queue_new,
		.queue_free = queue_free,
		.submit = submit,
		.reap = reap,
		.buffer = buffer,
		.clock_ns = clock_ns,
		.random = fill_random,
	};
	sim_current = sim;
	return sim;
}

struct sim *sim_free(struct sim *sim)
{
	sim_record(sim, 1);
	sim_current = NULL;
	forget_copies(sim);
	sim_image_done(&sim->live);
	free(sim->copies);
	free(sim->events);
	(void)pthread_mutex_destroy(&sim->lock);
	free(sim);
	return NULL;
}

/* ---- Images ---- */

void sim_image_init(struct sim_image *image)
{
	*image = (struct sim_image){0};
	for (unsigned i = 0; i < SIM_DISKS; i++)
		image->blocks[i] = must(calloc(SIM_BLOCKS, sizeof(*image->blocks[i])));
}

void sim_image_done(struct sim_image *image)
{
	for (unsigned i = 0; i < SIM_DISKS; i++)
		free(image->blocks[i]);
	*image = (struct sim_image){0};
}

void sim_image_copy(struct sim_image *to, const struct sim_image *from)
{
	for (unsigned i = 0; i < SIM_DISKS; i++)
		memcpy(to->blocks[i], from->blocks[i], SIM_BLOCKS * sizeof(*to->blocks[i]));
	to->index_size = from->index_size;
}

void sim_load(struct sim *sim, const struct sim_image *image)
{
	KV_LOCKED(&sim->lock);

	forget_copies(sim);
	sim_image_copy(&sim->live, image);
	sim_file_store(sim->index_path, image->blocks[SIM_INDEX], image->index_size);
}

void sim_image_own(struct sim_image *image)
{
	for (unsigned i = 0; i < SIM_DISKS; i++) {
		for (uint32_t b = 0; b < SIM_BLOCKS; b++) {
			uint8_t *copy;

			if (!image->blocks[i][b])
				continue;
			copy = must(malloc(KV_BLOCK_SIZE));
			memcpy(copy, image->blocks[i][b], KV_BLOCK_SIZE);
			image->blocks[i][b] = copy;
		}
	}
}

void sim_image_free_blocks(struct sim_image *image)
{
	for (unsigned i = 0; i < SIM_DISKS; i++) {
		for (uint32_t b = 0; b < SIM_BLOCKS; b++) {
			free((void *)image->blocks[i][b]);
			image->blocks[i][b] = NULL;
		}
	}
}

void sim_save(struct sim *sim, struct sim_image *ret_image)
{
	KV_LOCKED(&sim->lock);

	sim_image_copy(ret_image, &sim->live);
	for (uint32_t b = 0; b < SIM_BLOCKS; b++)
		ret_image->blocks[SIM_INDEX][b] = NULL;
	sim_image_own(ret_image);
	ret_image->index_size = sim_file_fetch(sim->index_path, ret_image->blocks[SIM_INDEX]);
}
