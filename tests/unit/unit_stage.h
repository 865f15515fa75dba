/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Simulated drives and a simulated link for the tests of the stager: a link of 55.6 GB/s with gaps
 * of 2 us, drives of 14 GB/s.
 */
#ifndef KVFS_TESTS_UNIT_UNIT_STAGE_H
#define KVFS_TESTS_UNIT_UNIT_STAGE_H

#include <errno.h>
#include <stdlib.h>

#include "gpu/stage.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)
#define SEGMENT (64 * MIB)
#define DRIVES 8u
#define IOS_MAX 512u
#define LINK_BYTES_PER_US 55600.0
#define LINK_GAP_US 2.0
#define DRIVE_BYTES_PER_US 14000.0
#define DRIVE_LATENCY_US 80.0

static struct {
	double now_us;
	double link_free_us;
	double drive_free_us[DRIVES];
	double back_free_us; /* the link's other direction */
	double stream_us[3]; /* end of what is in it; [0] of the first stream */
	struct {
		struct kv_io *io;
		double end_us;
	} ios[IOS_MAX];
	unsigned io_count;
	unsigned reads;
	bool timed;          /* nothing is moved, only counted */
	int device_fd;       /* all drives are windows of it */
	unsigned fail_reads; /* the next ones */
	unsigned short_reads;
	unsigned flip_reads;
	bool hang; /* reads do not end */
	unsigned refuse_registers;
	unsigned registered;
	uint64_t longest_register;
	unsigned fail_copies;
	unsigned half_copies; /* fail, and some of their bytes are under way */
	unsigned fail_records;
	unsigned fail_queries;
	unsigned copies;
	uint64_t longest_copy;
} sim;

static struct kvg_backend_ops ops;
static struct kvg_backend *backend;

/* ---- The drives ---- */

static inline int sim_queue_new(void *context, const int *handles, unsigned count, unsigned depth,
	struct kv_io_queue **ret_queue)
{
	(void)context;
	(void)handles;
	(void)count;
	(void)depth;
	*ret_queue = (struct kv_io_queue *)&sim;
	return 0;
}

static inline void sim_queue_free(void *context, struct kv_io_queue *queue)
{
	(void)context;
	(void)queue;
	assert_int_equal(sim.io_count, 0);
}

static inline int sim_submit(void *context, struct kv_io_queue *queue, struct kv_io *io)
{
	double *drive = &sim.drive_free_us[io->device];
	double start = sim.now_us + DRIVE_LATENCY_US;

	(void)context;
	(void)queue;
	if (sim.io_count == 256)
		return -EAGAIN;
	if (start < *drive)
		start = *drive;
	*drive = start + io->length / DRIVE_BYTES_PER_US;
	sim.ios[sim.io_count].io = io;
	sim.ios[sim.io_count++].end_us = *drive;
	sim.reads++;
	return 0;
}

static inline bool sim_strike(unsigned *counter)
{
	if (*counter == 0)
		return false;
	--*counter;
	return true;
}

static inline int sim_transfer(const struct kv_io *io)
{
	if (sim_strike(&sim.fail_reads))
		return -EIO;
	if (!sim.timed)
		assert_int_equal(pread(sim.device_fd, io->memory, io->length,
					 (off_t)(io->offset + io->device * (UINT64_C(1) << 30))),
			io->length);
	if (sim_strike(&sim.flip_reads))
		((uint8_t *)io->memory)[io->length / 2] ^= 1;
	return sim_strike(&sim.short_reads) ? (int)io->length / 2 : (int)io->length;
}

static inline int sim_reap(void *context, struct kv_io_queue *queue, bool wait,
	struct kv_io_completion *ret_completions, unsigned capacity)
{
	unsigned count = 0;

	(void)context;
	(void)queue;
	assert_false(wait);
	for (unsigned i = 0; i < sim.io_count && count < capacity && !sim.hang;) {
		if (sim.ios[i].end_us > sim.now_us) {
			i++;
			continue;
		}
		ret_completions[count].io = sim.ios[i].io;
		ret_completions[count++].result = sim_transfer(sim.ios[i].io);
		sim.ios[i] = sim.ios[--sim.io_count];
	}
	return (int)count;
}

static int64_t sim_clock(void *context)
{
	(void)context;
	return (int64_t)(sim.now_us * 1000);
}

static const struct kv_io_ops sim_io = {
	.queue_new = sim_queue_new,
	.queue_free = sim_queue_free,
	.submit = sim_submit,
	.reap = sim_reap,
	.clock_ns = sim_clock,
};

/* ---- The link ---- */

struct sim_event {
	double end_us;
};

static unsigned streams_made;

static inline int sim_stream_new(struct kvg_backend *b, kvg_stream *ret_stream)
{
	(void)b;
	*ret_stream = &sim.stream_us[streams_made++ % 3];
	return 0;
}

static inline void sim_stream_free(struct kvg_backend *b, kvg_stream stream)
{
	(void)b;
	(void)stream;
}

static inline int sim_copy(struct kvg_backend *b, kvg_stream stream, enum kvg_copy_kind kind,
	const struct kvg_copy *copies, size_t count)
{
	double *free_us = kind == KVG_COPY_TO_HOST ? &sim.back_free_us : &sim.link_free_us;
	uint64_t bytes = 0;

	if (sim_strike(&sim.fail_copies))
		return -EIO;
	for (size_t i = 0; i < count; i++)
		bytes += copies[i].size;
	if (bytes > sim.longest_copy)
		sim.longest_copy = bytes;
	if (*free_us < sim.now_us)
		*free_us = sim.now_us;
	*free_us += LINK_GAP_US + (double)bytes / LINK_BYTES_PER_US;
	*(double *)stream = *free_us;
	sim.copies++;
	if (sim_strike(&sim.half_copies))
		return -EIO;
	return sim.timed ? 0 : kvg_backend_host.copy(b, NULL, kind, copies, count);
}

static inline int sim_fill(
	struct kvg_backend *b, kvg_stream stream, kvg_devptr to, uint8_t byte, uint64_t size)
{
	*(double *)stream = sim.now_us;
	return sim.timed ? 0 : kvg_backend_host.fill(b, NULL, to, byte, size);
}

static inline int sim_event_new(struct kvg_backend *b, struct kvg_event **ret_event)
{
	(void)b;
	*ret_event = calloc(1, sizeof(struct sim_event));
	return 0;
}

static inline int sim_event_record(
	struct kvg_backend *b, struct kvg_event *event, kvg_stream stream)
{
	(void)b;
	if (sim_strike(&sim.fail_records))
		return -EIO;
	((struct sim_event *)event)->end_us = *(double *)stream;
	return 0;
}

static inline int sim_stream_sync(struct kvg_backend *b, kvg_stream stream)
{
	(void)b;
	if (sim.now_us < *(double *)stream)
		sim.now_us = *(double *)stream;
	return 0;
}

static inline int sim_event_query(struct kvg_backend *b, struct kvg_event *event)
{
	(void)b;
	if (sim_strike(&sim.fail_queries))
		return -EIO;
	return ((struct sim_event *)event)->end_us <= sim.now_us ? 0 : -EAGAIN;
}

static inline int sim_register(struct kvg_backend *b, void *memory, uint64_t size, unsigned flags)
{
	if (sim_strike(&sim.refuse_registers))
		return -ENOMEM;
	sim.registered++;
	if (size > sim.longest_register)
		sim.longest_register = size;
	return kvg_backend_host.host_register(b, memory, size, flags);
}

static inline void sim_unregister(struct kvg_backend *b, void *memory)
{
	(void)b;
	(void)memory;
	sim.registered--;
}

#endif
