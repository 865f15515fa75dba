/* SPDX-License-Identifier: Apache-2.0 */
/* Files on the simulated drives of unit_stage.h, and a stager that brings them. */
#ifndef KVFS_TESTS_UNIT_UNIT_STAGE_FILE_H
#define KVFS_TESTS_UNIT_UNIT_STAGE_FILE_H

#include <xxhash.h>

#include "tests/unit/unit_stage.h"

/* ---- A file ---- */

struct file {
	struct kvg_job job;
	uint64_t size;
	uint8_t *content;
	uint8_t *device; /* memory of the segments */
	struct kvg_target *targets;
	struct kvg_chunk *chunks;
	struct kv_gpu_extent *extents;
	struct kvg_watermark mark;
	int fd;
};

static struct kvg_stager *stager;

static inline int setup(void **state)
{
	const struct kvg_backend_open open = {0};
	char reasons[256];

	(void)state;
	memset(&sim, 0, sizeof(sim));
	streams_made = 0;
	sim.device_fd = memfd_create("drives", MFD_CLOEXEC);
	if (ftruncate(sim.device_fd, (off_t)(DRIVES * (UINT64_C(1) << 30))) < 0 ||
		kvg_backend_choose("host", &open, &backend, reasons, sizeof(reasons)) < 0)
		return -1;
	ops = kvg_backend_host;
	ops.stream_new = sim_stream_new;
	ops.stream_free = sim_stream_free;
	ops.stream_sync = sim_stream_sync;
	ops.copy = sim_copy;
	ops.fill = sim_fill;
	ops.event_new = sim_event_new;
	ops.event_record = sim_event_record;
	ops.event_query = sim_event_query;
	ops.host_register = sim_register;
	ops.host_unregister = sim_unregister;
	backend->ops = &ops;
	return 0;
}

static inline void start(unsigned drives, unsigned slots)
{
	const int devices[DRIVES] = {0};
	const struct kvg_stager_options options = {
		.backend = backend,
		.io = &sim_io,
		.devices = devices,
		.device_count = drives,
		.slots = slots,
		.inline_workers = true,
	};

	assert_int_equal(kvg_stager_new(&options, &stager), 0);
}

static inline int teardown(void **state)
{
	(void)state;
	if (!kvg_stager_free(stager))
		return -1;
	stager = NULL;
	(void)close(sim.device_fd);
	kvg_backend_close(backend);
	return sim.registered == 0 ? 0 : -1;
}

/* Chunk I is on drive I mod DRIVES, in two extents that leave its block 100 out if SPLIT. */
static inline void place_chunk(struct file *file, uint32_t i, unsigned drives, bool split)
{
	struct kvg_chunk *chunk = &file->chunks[i];
	struct kv_gpu_extent *extents = &file->extents[2 * i];
	uint64_t at = (uint64_t)i << 20, length = file->size - at < MIB ? file->size - at : MIB;
	uint8_t *block = calloc(1, MIB);
	uint32_t whole = (uint32_t)((length + 4095) & ~UINT64_C(4095));
	XXH3_state_t *sum = XXH3_createState();

	if (file->content)
		memcpy(block, file->content + at, length);
	extents[0] = (struct kv_gpu_extent){
		.offset = (uint64_t)(i / drives) * 2 * MIB + 4096,
		.length = split ? 100 * 4096 : whole,
		.device = (uint16_t)(i % drives),
	};
	extents[1] = (struct kv_gpu_extent){
		.offset = extents[0].offset + MIB,
		.length = split ? whole - 101 * 4096 : 0,
		.device = extents[0].device,
		.block = 101,
	};
	*chunk = (struct kvg_chunk){
		.where = KV_GPU_DEVICE, .first = 2 * i, .extents = split ? 2 : 1};
	(void)XXH3_64bits_reset(sum);
	for (unsigned k = 0; k < chunk->extents; k++) {
		const uint8_t *from = block + (size_t)extents[k].block * 4096;

		(void)XXH3_64bits_update(sum, from, extents[k].length);
		if (!sim.timed)
			assert_int_equal(pwrite(sim.device_fd, from, extents[k].length,
						 (off_t)(extents[k].offset +
							 extents[k].device * (UINT64_C(1) << 30))),
				extents[k].length);
	}
	chunk->sum = XXH3_64bits_digest(sum);
	XXH3_freeState(sum);
	free(block);
}

static inline void file_init(struct file *file, uint64_t size, unsigned drives)
{
	uint32_t count = (uint32_t)((size + MIB - 1) >> 20);
	unsigned targets = (unsigned)((size + SEGMENT - 1) / SEGMENT);
	uint64_t room = (size + 2 * MIB - 1) & ~(2 * MIB - 1);

	memset(file, 0, sizeof(*file));
	file->size = size;
	file->fd = memfd_create("file", MFD_CLOEXEC);
	assert_int_equal(ftruncate(file->fd, (off_t)size), 0);
	file->chunks = calloc(count, sizeof(*file->chunks));
	file->extents = calloc(2ul * count, sizeof(*file->extents));
	file->targets = calloc(targets, sizeof(*file->targets));
	if (!sim.timed) {
		file->content = malloc(size);
		file->device = malloc(room);
		memset(file->device, 0xdd, room);
		for (uint64_t i = 0; i < size; i++)
			file->content[i] = (uint8_t)(i * 7 ^ i >> 9 ^ i >> 17);
		/* One hole, and a block that was never written. */
		if (count > 3) {
			memset(file->content + 2 * MIB, 0, MIB);
			memset(file->content + MIB + 100 * 4096, 0, 4096);
		}
		assert_int_equal(pwrite(file->fd, file->content, size, 0), size);
	}
	for (uint32_t i = 0; i < count; i++)
		place_chunk(file, i, drives, file->content && count > 3 && i == 1);
	if (file->content && count > 3)
		file->chunks[2] = (struct kvg_chunk){.where = KV_GPU_HOLE};
	for (unsigned i = 0; i < targets; i++)
		file->targets[i] = (struct kvg_target){
			.address = (kvg_devptr)(uintptr_t)file->device + i * SEGMENT,
			.size = room - i * SEGMENT < SEGMENT ? room - i * SEGMENT : SEGMENT,
		};
	file->job = (struct kvg_job){
		.size = size,
		.targets = file->targets,
		.target_count = targets,
		.object_fd = -1,
		.chunks = file->chunks,
		.extents = file->extents,
		.file_fd = -1,
		.watermark = &file->mark,
	};
}

static inline void file_done(struct file *file)
{
	free(file->content);
	free(file->device);
	free(file->targets);
	free(file->chunks);
	free(file->extents);
	(void)close(file->fd);
}

static inline double next_end(void)
{
	double next = sim.now_us + 1e6;

	for (unsigned i = 0; i < sim.io_count && !sim.hang; i++)
		if (sim.ios[i].end_us > sim.now_us && sim.ios[i].end_us < next)
			next = sim.ios[i].end_us;
	for (unsigned i = 0; i < 3; i++)
		if (sim.stream_us[i] > sim.now_us && sim.stream_us[i] < next)
			next = sim.stream_us[i];
	/* A link that is used in turns: an earlier copy may end before the streams' last ones. */
	if (next > sim.now_us + 50 && (sim.io_count > 0 || sim.link_free_us > sim.now_us))
		next = sim.hang ? next : sim.now_us + 10;
	return next;
}

/* Until the next job ends. */
static inline struct kvg_job *run(void)
{
	struct kvg_job *job;

	for (unsigned i = 0; i < 10000000; i++) {
		bool progress = kvg_stager_step(stager);

		job = kvg_stager_reap(stager);
		if (job)
			return job;
		if (!progress)
			sim.now_us = next_end();
	}
	fail_msg("the job does not end");
	return NULL;
}

static inline int stage(struct file *file)
{
	kvg_stager_submit(stager, &file->job);
	assert_ptr_equal(run(), &file->job);
	return file->job.result;
}

static inline void assert_staged(const struct file *file)
{
	uint64_t room = (file->size + 2 * MIB - 1) & ~(2 * MIB - 1);

	assert_memory_equal(file->device, file->content, file->size);
	for (uint64_t i = file->size; i < room; i++)
		assert_int_equal(file->device[i], 0);
}

#endif
