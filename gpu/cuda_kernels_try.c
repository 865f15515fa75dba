/* SPDX-License-Identifier: Apache-2.0 */
/* Both kernels, run on this very device and held against the CPU: see cuda_kernels.h. */
#define XXH_INLINE_ALL
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "fs/base.h"
#include "gpu/backend_cuda_internal.h"
#include "gpu/cuda_kernels.h"

/* Bytes on the device: what is read, and where it is copied to, behind KVG_KERNEL_TRY_START. */
#define SOURCE_SIZE (UINT64_C(256) << 10)
#define TARGET_SIZE (UINT64_C(512) << 10)
#define UNTOUCHED 0xa5u
/* Between two copies: what a copy writes beyond its end is seen. */
#define SPACE 32u
#define ALIGNMENTS 256u /* both ends at each of 16 */
#define COPIES (ALIGNMENTS + 6u)
#define SUMS 12u

static_assert(KVG_KERNEL_TRY_START + SOURCE_SIZE + TARGET_SIZE <= KVG_KERNEL_MEMORY, "fits");
static_assert(SUMS * sizeof(uint64_t) <= KVG_KERNEL_TRY_START, "fits");

struct attempt {
	struct kvg_cuda *cuda;
	kvg_stream stream;
	kvg_devptr results, source, target;
	uint8_t *bytes;    /* of the source */
	uint8_t *expected; /* of the target */
	uint8_t *found;
};

/* ---- Copies ---- */

/* Sizes on both sides of each step that the kernel takes. */
static uint64_t copy_size(unsigned i)
{
	static const uint64_t sizes[] = {1, 2, 3, 4, 15, 16, 17, 31, 33, 63, 64, 100, 255, 256, 257,
		1000, 1024, 1025, 2048, 4096, 4099};
	static const uint64_t large[COPIES - ALIGNMENTS] = {
		65535, 65535, 16384, 12288 + 4096 + 16, 32768 + 8, 20000};

	if (i >= ALIGNMENTS)
		return large[i - ALIGNMENTS];
	return sizes[i % (sizeof(sizes) / sizeof(sizes[0]))];
}

/* Both ends at all alignments; the large ones alike at 16, at 4 and not at all. */
static void make_copies(const struct attempt *a, struct kvg_copy *ret_copies)
{
	static const unsigned shifts[COPIES - ALIGNMENTS] = {0x00, 0x15, 0x77, 0x00, 0x48, 0x01};
	uint64_t at = 0;

	for (unsigned i = 0; i < COPIES; i++) {
		unsigned shift = i < ALIGNMENTS ? i : shifts[i - ALIGNMENTS];
		uint64_t size = copy_size(i);
		uint64_t from = kv_round_up((i * UINT64_C(7919)) % (SOURCE_SIZE - 66000), 16);

		from += shift % 16;
		at = kv_round_up(at, 16) + shift / 16;
		assert(from + size <= SOURCE_SIZE && at + size <= TARGET_SIZE);
		ret_copies[i] = (struct kvg_copy){
			.to = a->target + at, .from = a->source + from, .size = size};
		memcpy(a->expected + at, a->bytes + from, size);
		at += size + SPACE;
	}
}

static int try_copies(struct attempt *a)
{
	struct kvg_copy copies[COPIES];
	const struct kvg_copy back = {
		.to = (uint64_t)(uintptr_t)a->found, .from = a->target, .size = TARGET_SIZE};
	struct kvg_backend *backend = &a->cuda->base;
	int r = kvg_cuda_fill(backend, a->stream, a->target, UNTOUCHED, TARGET_SIZE);

	memset(a->expected, UNTOUCHED, TARGET_SIZE);
	make_copies(a, copies);
	for (unsigned done = 0, n; done < COPIES && r == 0; done += n) {
		n = (unsigned)kv_min_u64(COPIES - done, KVG_KERNEL_RUNS_MAX);
		r = kvg_cuda_launch_copy(a->cuda, a->stream, copies + done, n);
	}
	if (r == 0)
		r = kvg_cuda_copy(backend, a->stream, KVG_COPY_TO_HOST, &back, 1);
	return r < 0 ? r : kvg_cuda_stream_sync(backend, a->stream);
}

/* ---- Checksums ---- */

static void make_ranges(const struct attempt *a, struct kvg_range *ret_ranges)
{
	static const uint64_t sizes[SUMS] = {KVG_KERNEL_SUM_MIN, 256, 1023, 1024, 1025, 1088, 4096,
		32767, 32769, 33 << 10, 65536, 200000};

	for (unsigned i = 0; i < SUMS; i++)
		ret_ranges[i] = (struct kvg_range){.address = a->source + i * 5, .size = sizes[i]};
}

static int try_sums(struct attempt *a, bool *ret_same)
{
	struct kvg_range ranges[SUMS];
	uint64_t sums[SUMS] = {0};
	const struct kvg_copy back = {
		.to = (uint64_t)(uintptr_t)sums, .from = a->results, .size = sizeof(sums)};
	struct kvg_backend *backend = &a->cuda->base;
	int r, waited;

	make_ranges(a, ranges);
	r = kvg_cuda_launch_checksum(a->cuda, a->stream, ranges, SUMS, a->results);
	if (r == 0)
		r = kvg_cuda_copy(backend, a->stream, KVG_COPY_TO_HOST, &back, 1);
	/* Whatever has failed: the sums are this function's. */
	waited = kvg_cuda_stream_sync(backend, a->stream);
	*ret_same = true;
	for (unsigned i = 0; i < SUMS; i++)
		if (sums[i] !=
			XXH3_64bits(a->bytes + (ranges[i].address - a->source), ranges[i].size))
			*ret_same = false;
	return r < 0 ? r : waited;
}

/* ---- All of it ---- */

static void make_bytes(uint8_t *bytes)
{
	uint64_t word = 1;

	for (size_t i = 0; i < SOURCE_SIZE; i++) {
		word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		bytes[i] = (uint8_t)(word >> 56);
	}
}

static int attempt(struct attempt *a, char *ret_reason, size_t reason_size)
{
	const struct kvg_copy there = {
		.to = a->source, .from = (uint64_t)(uintptr_t)a->bytes, .size = SOURCE_SIZE};
	struct kvg_backend *backend = &a->cuda->base;
	const char *wrong = NULL;
	bool same = true;
	int r;

	make_bytes(a->bytes);
	r = kvg_cuda_copy(backend, a->stream, KVG_COPY_TO_DEVICE, &there, 1);
	if (r == 0)
		r = try_copies(a);
	if (r == 0 && memcmp(a->found, a->expected, TARGET_SIZE) != 0)
		wrong = "it copied wrong bytes when it was tried";
	if (r == 0 && !wrong)
		r = try_sums(a, &same);
	if (r == 0 && !same)
		wrong = "its checksums were wrong when it was tried";
	if (r < 0)
		kvg_cuda_describe(a->cuda->driver, "trying them",
			(kvg_cu_result)kvg_cuda_last_code(backend), ret_reason, reason_size);
	else if (wrong)
		(void)snprintf(ret_reason, reason_size, "%s", wrong);
	return wrong ? -EIO : r;
}

int kvg_cuda_kernels_try(
	struct kvg_cuda *cuda, kvg_devptr memory, char *ret_reason, size_t reason_size)
{
	_cleanup_free_ uint8_t *bytes = malloc(SOURCE_SIZE + 2 * TARGET_SIZE);
	struct attempt a = {
		.cuda = cuda,
		.results = memory,
		.source = memory + KVG_KERNEL_TRY_START,
		.target = memory + KVG_KERNEL_TRY_START + SOURCE_SIZE,
		.bytes = bytes,
	};
	int r = bytes ? kvg_cuda_stream_new(&cuda->base, &a.stream) : -ENOMEM;

	if (r < 0) {
		(void)snprintf(ret_reason, reason_size, "trying them: %s", strerror(-r));
		return r;
	}
	a.expected = bytes + SOURCE_SIZE;
	a.found = a.expected + TARGET_SIZE;
	r = attempt(&a, ret_reason, reason_size);
	/* Waits for what is in it: nothing reads, or writes, the bytes any more. */
	kvg_cuda_stream_free(&cuda->base, a.stream);
	return r;
}
