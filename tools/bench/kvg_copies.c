/* SPDX-License-Identifier: Apache-2.0 */
/* kvgbench's questions about copies. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "fs/base.h"
#include "tools/bench/kvgbench.h"

#define PEAK_SIZE (512 * MIB)
#define WARM_UPS 4u
#define COPIES 16u
#define ROUNDS 3u
#define SLOTS_MAX 32u

/* ---- peak: as nvbandwidth measures ---- */

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* Bytes a second of COPIES copies of all of MEMORY, the median of ROUNDS. */
static int measure_peak(struct kvgbench *bench, struct kvgbench_memory *memory, kvg_stream stream,
	enum kvg_copy_kind kind, double *ret_rate)
{
	uint64_t host = (uint64_t)(uintptr_t)memory->host, size = memory->host_size;
	bool in = kind == KVG_COPY_TO_DEVICE;
	const struct kvg_copy copy = {.to = in ? memory->address : host,
		.from = in ? host : memory->address,
		.size = size};
	double rates[ROUNDS];
	int r = 0;

	for (unsigned i = 0; r == 0 && i < WARM_UPS; i++)
		r = bench->ops->copy(bench->backend, stream, kind, &copy, 1);
	r = r < 0 ? r : bench->ops->stream_sync(bench->backend, stream);
	for (unsigned round = 0; r == 0 && round < ROUNDS; round++) {
		double start = kvgbench_now(bench);

		for (unsigned i = 0; r == 0 && i < COPIES; i++)
			r = bench->ops->copy(bench->backend, stream, kind, &copy, 1);
		r = r < 0 ? r : bench->ops->stream_sync(bench->backend, stream);
		rates[round] = (double)size * COPIES / (kvgbench_now(bench) - start);
	}
	if (r < 0)
		return kvgbench_fail(r, "copying");
	qsort(rates, ROUNDS, sizeof(rates[0]), compare);
	*ret_rate = rates[ROUNDS / 2];
	return 0;
}

int kvgbench_peak(struct kvgbench *bench)
{
	uint64_t size = kvgbench_size(bench, PEAK_SIZE);
	struct kvgbench_memory memory;
	kvg_stream stream = NULL;
	double out;
	int r = kvgbench_memory_get(bench, size, size, &memory);

	if (r < 0)
		return r;
	r = bench->ops->stream_new(bench->backend, &stream);
	if (r == 0)
		r = measure_peak(bench, &memory, stream, KVG_COPY_TO_DEVICE, &bench->peak);
	if (r == 0)
		r = measure_peak(bench, &memory, stream, KVG_COPY_TO_HOST, &out);
	if (r == 0) {
		kvgbench_say(bench->peak / 1e9, "GB/s", "peak.to_device");
		kvgbench_say(out / 1e9, "GB/s", "peak.to_host");
	}
	bench->ops->stream_free(bench->backend, stream);
	kvgbench_memory_put(bench, &memory);
	return r;
}

/* The peak, measured now if it was not, unseen. */
static int need_peak(struct kvgbench *bench)
{
	return bench->peak > 0 ? 0 : kvgbench_peak(bench);
}

static void say_share(struct kvgbench *bench, uint64_t bytes, double seconds, const char *name)
{
	kvgbench_say((double)bytes / seconds / bench->peak, "of the peak", "%s", name);
}

/* ---- ring ---- */

struct ring {
	uint64_t slot_size;
	unsigned slots;
	unsigned streams;
	kvg_stream stream[2];
	struct kvg_event *event[SLOTS_MAX];
};

static void ring_done(struct kvgbench *bench, struct ring *ring)
{
	for (unsigned i = 0; i < ring->streams; i++)
		bench->ops->stream_free(bench->backend, ring->stream[i]);
	for (unsigned i = 0; i < ring->slots; i++)
		bench->ops->event_free(bench->backend, ring->event[i]);
}

static int ring_start(struct kvgbench *bench, struct ring *ring)
{
	int r = 0;

	for (unsigned i = 0; r == 0 && i < ring->streams; i++)
		r = bench->ops->stream_new(bench->backend, &ring->stream[i]);
	for (unsigned i = 0; r == 0 && i < ring->slots; i++)
		r = bench->ops->event_new(bench->backend, &ring->event[i]);
	return r;
}

static int wait_event(struct kvgbench *bench, struct kvg_event *event)
{
	int r;

	do
		r = bench->ops->event_query(bench->backend, event);
	while (r == -EAGAIN);
	return r;
}

/* Sends BYTES through the slots, each again as soon as its copy is done. */
static int ring_run(struct kvgbench *bench, struct ring *ring, const struct kvgbench_memory *memory,
	uint64_t bytes)
{
	unsigned slot = 0;
	int r = 0;

	for (uint64_t done = 0; r == 0 && done < bytes; done += ring->slot_size) {
		kvg_stream stream = ring->stream[slot % ring->streams];
		const struct kvg_copy copy = {.to = memory->address + done % memory->device_size,
			.from = (uint64_t)(uintptr_t)memory->host + slot * ring->slot_size,
			.size = ring->slot_size};

		r = wait_event(bench, ring->event[slot]);
		if (r == 0)
			r = bench->ops->copy(bench->backend, stream, KVG_COPY_TO_DEVICE, &copy, 1);
		if (r == 0)
			r = bench->ops->event_record(bench->backend, ring->event[slot], stream);
		slot = (slot + 1) % ring->slots;
	}
	for (unsigned i = 0; r == 0 && i < ring->slots; i++)
		r = wait_event(bench, ring->event[i]);
	return r;
}

static int measure_ring(struct kvgbench *bench, const struct kvgbench_memory *memory,
	uint64_t slot_size, unsigned slots, unsigned streams)
{
	struct ring ring = {.slot_size = slot_size, .slots = slots, .streams = streams};
	uint64_t bytes = kvgbench_size(bench, 4 * GIB);
	char name[64];
	double start;
	int r = ring_start(bench, &ring);

	if (r == 0)
		r = ring_run(bench, &ring, memory, slots * slot_size);
	start = kvgbench_now(bench);
	if (r == 0)
		r = ring_run(bench, &ring, memory, bytes);
	(void)snprintf(name, sizeof(name), "ring.%lluM.slots%u.streams%u",
		(unsigned long long)(slot_size / MIB), slots, streams);
	if (r == 0)
		say_share(bench, bytes, kvgbench_now(bench) - start, name);
	ring_done(bench, &ring);
	return r < 0 ? kvgbench_fail(r, name) : 0;
}

int kvgbench_ring(struct kvgbench *bench)
{
	static const uint64_t sizes[] = {MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB};
	static const unsigned slots[] = {2, 8, 16};
	uint64_t room = bench->quick ? 64 * MIB : 256 * MIB; /* of all slots */
	struct kvgbench_memory memory;
	int r = need_peak(bench);

	if (r == 0)
		r = kvgbench_memory_get(bench, room, room, &memory);
	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < sizeof(sizes) / sizeof(sizes[0]); i++)
		for (size_t k = 0; r == 0 && k < sizeof(slots) / sizeof(slots[0]); k++)
			for (unsigned streams = 1;
				r == 0 && streams <= 2 && sizes[i] * slots[k] <= room; streams++)
				r = measure_ring(bench, &memory, sizes[i], slots[k], streams);
	kvgbench_memory_put(bench, &memory);
	return r;
}

/* ---- runs ---- */

/* Runs of SIZE, scattered on the device: every second place, from the last to the first. */
static void scatter(
	struct kvg_copy *copies, size_t count, uint64_t size, uint64_t to, uint64_t from)
{
	for (size_t i = 0; i < count; i++)
		copies[i] = (struct kvg_copy){.to = to + 2 * (count - 1 - i) * size,
			.from = from + i * size,
			.size = size};
}

static int measure_runs(struct kvgbench *bench, kvg_stream stream, enum kvg_copy_kind kind,
	const struct kvg_copy *copies, size_t count, bool batch, double *ret_seconds)
{
	double start = kvgbench_now(bench);
	int r = 0;

	if (batch)
		r = bench->ops->copy(bench->backend, stream, kind, copies, count);
	for (size_t i = 0; !batch && r == 0 && i < count; i++)
		r = bench->ops->copy(bench->backend, stream, kind, &copies[i], 1);
	if (r == 0)
		r = bench->ops->stream_sync(bench->backend, stream);
	*ret_seconds = kvgbench_now(bench) - start;
	return r;
}

static int runs_of(struct kvgbench *bench, const struct kvgbench_memory *memory, kvg_stream stream,
	uint64_t size)
{
	size_t count = memory->host_size / size;
	_cleanup_free_ struct kvg_copy *copies = calloc(count, sizeof(*copies));
	char name[64];
	double seconds;
	int r = 0;

	if (!copies)
		return -ENOMEM;
	scatter(copies, count, size, memory->address, (uint64_t)(uintptr_t)memory->host);
	/* The first time is not counted. */
	for (int pass = 0; r == 0 && pass < 4; pass++) {
		r = measure_runs(
			bench, stream, KVG_COPY_TO_DEVICE, copies, count, pass % 2 == 1, &seconds);
		(void)snprintf(name, sizeof(name), "runs.%lluK.%s",
			(unsigned long long)(size / KIB), pass % 2 == 1 ? "batch" : "single");
		if (r == 0 && pass >= 2)
			say_share(bench, memory->host_size, seconds, name);
	}
	return r < 0 ? kvgbench_fail(r, "runs") : 0;
}

int kvgbench_runs(struct kvgbench *bench)
{
	static const uint64_t sizes[] = {32 * KIB, 64 * KIB, 256 * KIB, 2 * MIB};
	uint64_t size = kvgbench_size(bench, 256 * MIB);
	struct kvgbench_memory memory;
	kvg_stream stream = NULL;
	int r = need_peak(bench);

	if (r == 0)
		r = kvgbench_memory_get(bench, 2 * size, size, &memory);
	if (r < 0)
		return r;
	r = bench->ops->stream_new(bench->backend, &stream);
	for (size_t i = 0; r == 0 && i < sizeof(sizes) / sizeof(sizes[0]); i++)
		r = runs_of(bench, &memory, stream, sizes[i]);
	bench->ops->stream_free(bench->backend, stream);
	kvgbench_memory_put(bench, &memory);
	return r;
}

/* ---- inside ---- */

/*
 * In calls of up to MOST copies. The kernel is for more than 4096 small ones in a call: so calls of
 * 4096 are always the copy engines'.
 */
static int measure_calls(struct kvgbench *bench, kvg_stream stream, const struct kvg_copy *copies,
	size_t count, size_t most, double *ret_seconds)
{
	double start = kvgbench_now(bench);
	int r = 0;

	for (size_t done = 0, n; r == 0 && done < count; done += n) {
		n = kv_min_u64(count - done, most);
		r = bench->ops->copy(bench->backend, stream, KVG_COPY_ON_DEVICE, copies + done, n);
	}
	if (r == 0)
		r = bench->ops->stream_sync(bench->backend, stream);
	*ret_seconds = kvgbench_now(bench) - start;
	return r;
}

/* The copies of SIZE cut into pieces that the kernel takes. */
static size_t cut_for_kernel(
	struct kvg_copy *pieces, const struct kvg_copy *copies, size_t count, uint64_t size)
{
	size_t made = 0;

	for (size_t i = 0; i < count; i++)
		for (uint64_t at = 0; at < copies[i].size; at += size)
			pieces[made++] = (struct kvg_copy){
				.to = copies[i].to + at, .from = copies[i].from + at, .size = size};
	return made;
}

static bool has_kernel(struct kvgbench *bench)
{
	struct kvg_device_info info;

	bench->ops->info(bench->backend, &info);
	return strncmp(info.kernels, "tried", 5) == 0;
}

/* One by one, in batches of one call, and by the kernel; the first time of each is not counted. */
static int inside_of(struct kvgbench *bench, const struct kvgbench_memory *memory,
	kvg_stream stream, uint64_t size)
{
	static const char *const names[] = {"single", "batch", "kernel"};
	uint64_t bytes = memory->device_size / 4, piece = bench->quick ? KIB : 32 * KIB;
	size_t count = bytes / size, pieces = bytes / piece;
	_cleanup_free_ struct kvg_copy *copies = calloc(count, sizeof(*copies));
	_cleanup_free_ struct kvg_copy *cut = calloc(pieces, sizeof(*cut));
	int r = 0;

	if (!copies || !cut)
		return -ENOMEM;
	scatter(copies, count, size, memory->address, memory->address + 3 * bytes);
	pieces = cut_for_kernel(cut, copies, count, piece);
	for (size_t way = 0; r == 0 && way < sizeof(names) / sizeof(names[0]); way++) {
		double seconds = 0;

		for (int pass = 0; r == 0 && pass < 2; pass++)
			r = way == 2 ? measure_calls(bench, stream, cut, pieces, pieces, &seconds)
				     : measure_calls(bench, stream, copies, count,
					       way == 1 ? 4096 : 1, &seconds);
		if (r == 0 && (way < 2 || has_kernel(bench)))
			kvgbench_say((double)bytes / seconds / 1e9, "GB/s", "inside.%lluK.%s",
				(unsigned long long)(size / KIB), names[way]);
	}
	return r < 0 ? kvgbench_fail(r, "inside") : 0;
}

int kvgbench_inside(struct kvgbench *bench)
{
	static const uint64_t sizes[] = {32 * KIB, 64 * KIB, 256 * KIB, 2 * MIB};
	struct kvgbench_memory memory;
	struct kvg_device_info info;
	kvg_stream stream = NULL;
	int r = kvgbench_memory_get(bench, kvgbench_size(bench, 2 * GIB), 0, &memory);

	if (r < 0)
		return r;
	r = bench->ops->stream_new(bench->backend, &stream);
	for (size_t i = 0; r == 0 && i < sizeof(sizes) / sizeof(sizes[0]); i++)
		r = inside_of(bench, &memory, stream, sizes[i]);
	bench->ops->info(bench->backend, &info);
	(void)printf("kernels %s\n", info.kernels);
	bench->ops->stream_free(bench->backend, stream);
	kvgbench_memory_put(bench, &memory);
	return r;
}

/* ---- checksum ---- */

#define SUMS 128u

/* Of COUNT chunks of 1 MiB in one call, each of the same bytes. */
static int checksum_of(struct kvgbench *bench, const struct kvgbench_memory *memory,
	kvg_stream stream, unsigned count)
{
	uint64_t chunks = memory->device_size / MIB, sums[SUMS];
	struct kvg_range ranges[SUMS];
	double start = 0;
	int r = 0;

	for (unsigned i = 0; i < count; i++)
		ranges[i] = (struct kvg_range){
			.address = memory->address + i % chunks * MIB, .size = MIB};
	for (int pass = 0; r == 0 && pass < 2; pass++) {
		start = kvgbench_now(bench);
		r = bench->ops->checksum(bench->backend, stream, ranges, count, sums);
	}
	if (r == 0)
		kvgbench_say((double)count * (double)MIB / (kvgbench_now(bench) - start) / 1e9,
			"GB/s", "checksum.%ux1M", count);
	return r;
}

int kvgbench_checksum(struct kvgbench *bench)
{
	static const unsigned counts[] = {1, 16, SUMS};
	struct kvgbench_memory memory;
	kvg_stream stream = NULL;
	char reason[128] = "";
	int r = bench->ops->checksum_probe(bench->backend, reason, sizeof(reason));

	if (r < 0)
		return kvgbench_fail(r, reason);
	r = kvgbench_memory_get(bench, kvgbench_size(bench, SUMS * MIB), 0, &memory);
	if (r < 0)
		return r;
	r = bench->ops->stream_new(bench->backend, &stream);
	for (size_t i = 0; r == 0 && i < (bench->quick ? 2 : 3); i++)
		r = checksum_of(bench, &memory, stream, counts[i]);
	bench->ops->stream_free(bench->backend, stream);
	kvgbench_memory_put(bench, &memory);
	return r < 0 ? kvgbench_fail(r, "checksum") : 0;
}
