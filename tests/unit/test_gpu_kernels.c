/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checksums of device memory, and copies of many small runs: on the fake driver, which runs the
 * very text of the kernels. They are the CPU's for all sizes and alignments; where anything is
 * wrong with the kernels they are off, and all goes on without.
 */
#include <pthread.h>
#include <xxhash.h>

#include "tests/unit/unit_gpu.h"

#define BYTES (4 * MIB)

struct device {
	struct kvg_backend *backend;
	struct kvg_segment *segments[2];
	struct kvg_mapping *mapping;
	kvg_devptr address;
	kvg_stream stream;
	uint8_t *memory; /* what is on the device */
};

static struct device device_open(const struct kvg_backend_ops *ops)
{
	struct device d = {.backend = unit_gpu_open(ops, NULL), .memory = malloc(BYTES)};
	uint64_t word = 1;

	assert_non_null(d.memory);
	for (size_t i = 0; i < BYTES; i++) {
		word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		d.memory[i] = (uint8_t)(word >> 56);
	}
	for (int i = 0; i < 2; i++)
		assert_int_equal(ops->segment_new(d.backend, GRANULE, &d.segments[i]), 0);
	assert_int_equal(ops->map(d.backend, d.segments, 2, true, &d.mapping), 0);
	assert_int_equal(ops->stream_new(d.backend, &d.stream), 0);
	d.address = ops->address(d.backend, d.mapping);
	unit_gpu_write(d.backend, d.address, d.memory, BYTES);
	return d;
}

static void device_drop(struct device *d)
{
	const struct kvg_backend_ops *ops = d->backend->ops;

	ops->stream_free(d->backend, d->stream);
	ops->unmap(d->backend, d->mapping);
	for (int i = 0; i < 2; i++)
		ops->segment_free(d->backend, d->segments[i]);
	kvg_backend_close(d->backend);
	free(d->memory);
}

static void device_close(struct device *d)
{
	device_drop(d);
	unit_gpu_assert_nothing_lives();
}

/* Sizes around each of XXH3's steps (64, 240, 1024) and the store's (4 KiB, 1 MiB). */
static const uint64_t sizes[] = {0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023,
	1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 4095, 4096, 4097, 32768, 32769, 33792,
	65536, 100000, MIB - 1, MIB, MIB + 1};
#define SIZES (sizeof(sizes) / sizeof(sizes[0]))

/* The sum of every size, from an address that is SHIFT off, all in one call. */
static void check_sums(const struct device *d, uint64_t shift)
{
	const struct kvg_backend_ops *ops = d->backend->ops;
	struct kvg_range ranges[SIZES];
	uint64_t sums[SIZES];

	for (size_t i = 0; i < SIZES; i++)
		ranges[i] = (struct kvg_range){
			.address = d->address + shift + 4096 * i, .size = sizes[i]};
	assert_int_equal(ops->checksum(d->backend, d->stream, ranges, SIZES, sums), 0);
	for (size_t i = 0; i < SIZES; i++)
		assert_int_equal(sums[i], XXH3_64bits(d->memory + shift + 4096 * i, sizes[i]));
}

/* A fill that is still in the stream is summed, too. */
static void check_order(const struct device *d)
{
	const struct kvg_backend_ops *ops = d->backend->ops;
	const struct kvg_range range = {.address = d->address, .size = MIB};
	uint64_t sum;

	memset(d->memory, 7, 1000);
	assert_int_equal(ops->fill(d->backend, d->stream, d->address, 7, 1000), 0);
	assert_int_equal(ops->checksum(d->backend, d->stream, &range, 1, &sum), 0);
	assert_int_equal(sum, XXH3_64bits(d->memory, MIB));
}

/* The host backend's are the CPU's, after what is in the stream. */
static void test_gpu_kernels__sums_of_host(void **state)
{
	struct device d = device_open(&kvg_backend_host);
	char reason[96] = "";

	assert_int_equal(kvg_backend_host.checksum_probe(d.backend, reason, sizeof(reason)), 0);
	for (uint64_t shift = 0; shift < 16; shift++)
		check_sums(&d, shift);
	check_order(&d);
	device_close(&d);
}

/* ---- Checksums by the kernel ---- */

static void assert_kernels(const struct device *d, const char *expected)
{
	struct kvg_device_info info;

	d->backend->ops->info(d->backend, &info);
	assert_string_equal(info.kernels, expected);
}

/* The kernel's are the CPU's; it is tried first, and what is in the stream comes before it. */
static void test_gpu_kernels__sums_of_cuda(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	char reason[96] = "";

	assert_kernels(&d, "not tried yet");
	assert_int_equal(fakecu_calls("cuModuleLoadData"), 0);
	assert_int_equal(kvg_backend_cuda.checksum_probe(d.backend, reason, sizeof(reason)), 0);
	assert_kernels(&d, "tried, and in use");
	for (uint64_t shift = 0; shift < 16; shift += 5)
		check_sums(&d, shift);
	check_order(&d);
	assert_int_equal(fakecu_calls("cuModuleLoadData"), 1);
	device_close(&d);
}

/* cufile has them too. */
static void test_gpu_kernels__sums_of_cufile(void **state)
{
	struct device d = device_open(&kvg_backend_cufile);

	check_sums(&d, 3);
	device_close(&d);
}

/* More ranges than a launch takes, on the default stream, across two segments. */
static void test_gpu_kernels__many_sums(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	enum { RANGES = 300 };
	struct kvg_range ranges[RANGES];
	uint64_t sums[RANGES];

	for (uint64_t i = 0; i < RANGES; i++)
		ranges[i] = (struct kvg_range){
			.address = d.address + GRANULE - 20000 + i * 100, .size = i * 2};
	assert_int_equal(kvg_backend_cuda.checksum(d.backend, NULL, ranges, RANGES, sums), 0);
	for (uint64_t i = 0; i < RANGES; i++)
		assert_int_equal(sums[i], XXH3_64bits(d.memory + GRANULE - 20000 + i * 100, i * 2));
	device_close(&d);
}

struct summing {
	const struct device *device;
	bool right;
};

static void *sum_alone(void *arg)
{
	struct summing *summing = arg;
	const struct device *d = summing->device;
	const struct kvg_backend_ops *ops = d->backend->ops;
	kvg_stream stream = NULL;
	int r = ops->stream_new(d->backend, &stream);

	summing->right = r == 0;
	for (uint64_t i = 0; i < 20 && summing->right; i++) {
		const struct kvg_range range = {.address = d->address + i * 5000, .size = 4096 + i};
		uint64_t sum = 0;

		summing->right = ops->checksum(d->backend, stream, &range, 1, &sum) == 0 &&
				 sum == XXH3_64bits(d->memory + i * 5000, 4096 + i);
	}
	ops->stream_free(d->backend, stream);
	return NULL;
}

/* Threads that sum at the same time do not mix up their results, the first use included. */
static void test_gpu_kernels__sums_of_many_threads(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	enum { THREADS = 8 };
	struct summing summing[THREADS];
	pthread_t threads[THREADS];

	for (int i = 0; i < THREADS; i++) {
		summing[i] = (struct summing){.device = &d};
		assert_int_equal(pthread_create(&threads[i], NULL, sum_alone, &summing[i]), 0);
	}
	for (int i = 0; i < THREADS; i++) {
		assert_int_equal(pthread_join(threads[i], NULL), 0);
		assert_true(summing[i].right);
	}
	assert_int_equal(fakecu_calls("cuModuleLoadData"), 1);
	device_close(&d);
}

/* What is not all mapped, or nobody's, is refused before anything is started. */
static void test_gpu_kernels__sums_of_bad_ranges(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	const struct kvg_range bad[] = {
		{.address = d.address + BYTES - 4096, .size = 4097},
		{.address = d.address + BYTES, .size = 1},
		{.address = (uintptr_t)d.memory, .size = 4096},
		{.address = 0, .size = 4096},
		{.address = d.address, .size = UINT64_MAX - 100},
	};
	char reason[96];
	unsigned launches;
	uint64_t sum;

	assert_int_equal(kvg_backend_cuda.checksum_probe(d.backend, reason, sizeof(reason)), 0);
	launches = fakecu_calls("cuLaunchKernel");
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_int_equal(
			kvg_backend_cuda.checksum(d.backend, d.stream, &bad[i], 1, &sum), -EINVAL);
	assert_int_equal(fakecu_calls("cuLaunchKernel"), launches);
	assert_kernels(&d, "tried, and in use");
	device_close(&d);
}

/* ---- Copies by the kernel ---- */

#define RUNS_MAX 4100u
#define STEP 400u

/*
 * COUNT runs on the device from the first segment to the second, of all alignments, the last LARGE
 * of them of 64 KiB, and whether every byte there is as it should be.
 */
static void check_copies(const struct device *d, kvg_stream stream, unsigned count, unsigned large)
{
	const struct kvg_backend_ops *ops = d->backend->ops;
	struct kvg_copy *copies = calloc(count, sizeof(*copies));
	uint8_t *expected = malloc(GRANULE), *found = malloc(GRANULE);

	assert_true(copies && expected && found);
	memset(expected, 0x11, GRANULE);
	for (uint64_t i = 0; i < count; i++) {
		bool is_large = i >= count - large;
		uint64_t to = is_large ? GRANULE - (count - i) * 65536 : i * STEP + i % 16;
		uint64_t from = (i * 7919) % (GRANULE - 65536),
			 size = is_large ? 65536 : 1 + i % 97;

		copies[i] = (struct kvg_copy){
			.to = d->address + GRANULE + to, .from = d->address + from, .size = size};
		memcpy(expected + to, d->memory + from, size);
	}
	assert_int_equal(ops->fill(d->backend, stream, d->address + GRANULE, 0x11, GRANULE), 0);
	assert_int_equal(ops->copy(d->backend, stream, KVG_COPY_ON_DEVICE, copies, count), 0);
	assert_int_equal(ops->stream_sync(d->backend, stream), 0);
	unit_gpu_read(d->backend, d->address + GRANULE, found, GRANULE);
	assert_memory_equal(found, expected, GRANULE);
	free(found);
	free(expected);
	free(copies);
}

/* More than 4096 small runs are the kernel's, on any stream; 4096 are the copy engine's. */
static void test_gpu_kernels__copies(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	unsigned launches, batches;

	check_copies(&d, d.stream, 4096, 0);
	assert_int_equal(fakecu_calls("cuModuleLoadData"), 0);
	batches = fakecu_calls("cuMemcpyBatchAsync");
	check_copies(&d, d.stream, 4097, 0);
	assert_kernels(&d, "tried, and in use");
	assert_int_equal(fakecu_calls("cuMemcpyBatchAsync"), batches);
	launches = fakecu_calls("cuLaunchKernel");
	check_copies(&d, NULL, 4097, 0);
	/* 170 a launch. */
	assert_int_equal(fakecu_calls("cuLaunchKernel"), launches + 25);
	device_close(&d);
}

/* Runs of 64 KiB are not counted as small, and are the copy engine's. */
static void test_gpu_kernels__large_copies(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	unsigned batches;

	check_copies(&d, d.stream, 4097, 1);
	assert_int_equal(fakecu_calls("cuModuleLoadData"), 0);
	batches = fakecu_calls("cuMemcpyBatchAsync");
	check_copies(&d, d.stream, 4099, 2);
	assert_kernels(&d, "tried, and in use");
	assert_int_equal(fakecu_calls("cuMemcpyBatchAsync"), batches + 1);
	device_close(&d);
}

/* Copies to the device and back are never a kernel's. */
static void test_gpu_kernels__copies_of_host_memory(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	struct kvg_copy *copies = calloc(RUNS_MAX, sizeof(*copies));

	assert_non_null(copies);
	for (uint64_t i = 0; i < RUNS_MAX; i++)
		copies[i] = (struct kvg_copy){.to = d.address + i * 100,
			.from = (uintptr_t)d.memory + i * 100,
			.size = 64};
	assert_int_equal(
		kvg_backend_cuda.copy(d.backend, d.stream, KVG_COPY_TO_DEVICE, copies, RUNS_MAX),
		0);
	assert_int_equal(kvg_backend_cuda.stream_sync(d.backend, d.stream), 0);
	assert_int_equal(fakecu_calls("cuModuleLoadData"), 0);
	free(copies);
	device_close(&d);
}

/* A device that says of which allocation memory is, not of which mapping, has kernels as well. */
static void test_gpu_kernels__copies_of_cumemalloc(void **state)
{
	struct device d;

	unit_gpu_set("FAKECU_LEGACY", "1");
	d = device_open(&kvg_backend_cuda);
	check_copies(&d, d.stream, 4097, 0);
	assert_kernels(&d, "tried, and in use");
	assert_true(fakecu_calls("cuLaunchKernel") > 20);
	device_close(&d);
}

/*
 * Where the driver does not say that a kernel may touch all of it, none does: the copy engine
 * refuses what is wrong, and the device lives on.
 */
static void check_refused_copy(const struct device *d, const struct kvg_copy *last, int expected)
{
	struct kvg_copy *copies = calloc(RUNS_MAX, sizeof(*copies));
	unsigned launches;
	char reason[96];

	assert_non_null(copies);
	assert_int_equal(kvg_backend_cuda.checksum_probe(d->backend, reason, sizeof(reason)), 0);
	launches = fakecu_calls("cuLaunchKernel");
	for (uint64_t i = 0; i < RUNS_MAX; i++)
		copies[i] = (struct kvg_copy){
			.to = d->address + GRANULE + i * 100, .from = d->address, .size = 64};
	copies[RUNS_MAX - 1] = *last;
	assert_int_equal(
		kvg_backend_cuda.copy(d->backend, d->stream, KVG_COPY_ON_DEVICE, copies, RUNS_MAX),
		expected);
	assert_int_equal(fakecu_calls("cuLaunchKernel"), launches);
	free(copies);
}

static void test_gpu_kernels__bad_copies(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	const struct kvg_copy beyond = {
		.to = d.address + BYTES - 10, .from = d.address, .size = 11};
	const struct kvg_copy from_beyond = {
		.to = d.address, .from = d.address + BYTES - 10, .size = 11};

	check_refused_copy(&d, &beyond, -EINVAL);
	check_refused_copy(&d, &from_beyond, -EINVAL);
	assert_int_equal(kvg_backend_cuda.stream_sync(d.backend, d.stream), 0);
	assert_false(kvg_backend_cuda.is_dead(d.backend));
	check_copies(&d, d.stream, 4097, 0);
	device_close(&d);
}

/* Memory that may only be read is not written to by a kernel. */
static void test_gpu_kernels__copies_to_read_only_memory(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	struct kvg_mapping *view;
	struct kvg_copy copy = {.from = d.address, .size = 100};

	assert_int_equal(kvg_backend_cuda.map(d.backend, d.segments, 1, false, &view), 0);
	copy.to = kvg_backend_cuda.address(d.backend, view);
	check_refused_copy(&d, &copy, 0);
	/* As without kernels: the fake's copy engine faults at it. */
	assert_int_equal(kvg_backend_cuda.stream_sync(d.backend, d.stream), -EIO);
	kvg_backend_cuda.unmap(d.backend, view);
	device_drop(&d);
}

/* ---- When they do not work ---- */

/* Copies are right, if not the kernel's, and checksums say why there are none. */
static void check_off(struct device *d, const char *reason)
{
	const struct kvg_range range = {.address = d->address, .size = MIB};
	char expected[96], told[96] = "";
	uint64_t sum;

	(void)snprintf(expected, sizeof(expected), "off: %s", reason);
	check_copies(d, d->stream, 4097, 0);
	assert_kernels(d, expected);
	assert_int_equal(
		kvg_backend_cuda.checksum_probe(d->backend, told, sizeof(told)), -EOPNOTSUPP);
	assert_string_equal(told, expected);
	assert_int_equal(
		kvg_backend_cuda.checksum(d->backend, d->stream, &range, 1, &sum), -EOPNOTSUPP);
	device_close(d);
}

/* A kernel that gives a wrong result when it is tried is off, and so is the other. */
static void test_gpu_kernels__wrong_results(void **state)
{
	struct device d;

	unit_gpu_set("FAKECU_WRONG", "kvg_copy");
	d = device_open(&kvg_backend_cuda);
	check_off(&d, "it copied wrong bytes when it was tried");
	unit_gpu_set("FAKECU_WRONG", "kvg_checksum");
	d = device_open(&kvg_backend_cuda);
	check_off(&d, "its checksums were wrong when it was tried");
}

/* A driver that lacks one of the calls. */
static void test_gpu_kernels__no_symbol(void **state)
{
	/* The table is loaded once a process: another process has another driver. */
	struct unit_child child;

	unit_gpu_set("FAKECU_HIDE", "cuLaunchKernel");
	child = unit_child_start("without");
	assert_int_equal(unit_child_end(&child), 0);
}

static int without(void)
{
	struct device d = device_open(&kvg_backend_cuda);

	check_off(&d, "the driver has not all of their calls");
	return 0;
}

/* Each call that they need may fail while they are tried. */
static void test_gpu_kernels__failures_when_tried(void **state)
{
	static const char *const names[] = {"cuModuleLoadData", "cuModuleGetFunction",
		"cuLaunchKernel", "cuMemCreate", "cuMemMap", "cuStreamCreate", "cuMemcpyHtoDAsync",
		"cuMemcpyDtoHAsync", "cuMemsetD8Async"};
	unsigned code = KVG_CU_UNKNOWN;

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		for (unsigned nth = 1; nth <= 2; nth++) {
			struct device d = device_open(&kvg_backend_cuda);
			char reason[96] = "";
			int r;

			fakecu_fail(names[i], nth, false, code);
			r = kvg_backend_cuda.checksum_probe(d.backend, reason, sizeof(reason));
			fakecu_heal();
			/* Some are called once. */
			if (nth == 1 || r < 0) {
				assert_int_equal(r, -EOPNOTSUPP);
				assert_memory_equal(reason, "off: ", 5);
				assert_true(strlen(reason) > 20);
				check_copies(&d, d.stream, 4097, 0);
			}
			device_close(&d);
			fakecu_reset();
		}
	}
}

/* A launch that fails later: that copy is made otherwise, and all later ones. */
static void test_gpu_kernels__a_launch_fails(void **state)
{
	for (unsigned nth = 1; nth <= 25; nth += 24) {
		struct device d = device_open(&kvg_backend_cuda);

		check_copies(&d, d.stream, 4097, 0);
		fakecu_fail("cuLaunchKernel", nth, false, KVG_CU_UNKNOWN);
		check_off(&d, "cuLaunchKernel: CUDA_ERROR_UNKNOWN (999)");
	}
}

/* A checksum that fails is none, and there are no more. */
static void test_gpu_kernels__a_checksum_fails(void **state)
{
	struct device d = device_open(&kvg_backend_cuda);
	const struct kvg_range range = {.address = d.address, .size = MIB};
	char reason[96];
	uint64_t sum;

	assert_int_equal(kvg_backend_cuda.checksum_probe(d.backend, reason, sizeof(reason)), 0);
	fakecu_fail("cuMemcpyDtoHAsync", 1, false, KVG_CU_UNKNOWN);
	assert_int_equal(
		kvg_backend_cuda.checksum(d.backend, d.stream, &range, 1, &sum), -EOPNOTSUPP);
	check_off(&d, "a checksum: CUDA_ERROR_UNKNOWN (999)");
}

/* After an error that nobody gets over the device is dead, which is said as such. */
static void test_gpu_kernels__a_fatal_error(void **state)
{
	static const char *const names[] = {"cuModuleLoadData", "cuLaunchKernel",
		"cuStreamSynchronize", "cuPointerGetAttribute"};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		struct device d = device_open(&kvg_backend_cuda);
		const struct kvg_range range = {.address = d.address, .size = MIB};
		uint64_t sum;

		fakecu_fail(names[i], 1, false, KVG_CU_ILLEGAL_ADDRESS);
		assert_int_equal(
			kvg_backend_cuda.checksum(d.backend, d.stream, &range, 1, &sum), -EIO);
		assert_true(kvg_backend_cuda.is_dead(d.backend));
		device_drop(&d);
		fakecu_reset();
	}
}

/* Who wants none gets none. */
static void test_gpu_kernels__not_wanted(void **state)
{
	const struct kvg_backend_open options = {.no_kernels = true};
	struct device d = device_open(&kvg_backend_cuda);
	struct kvg_backend *backend;
	struct kvg_device_info info;
	char error[256];

	assert_int_equal(kvg_backend_cuda.open(&options, &backend, error, sizeof(error)), 0);
	kvg_backend_cuda.info(backend, &info);
	assert_string_equal(info.kernels, "off: not wanted");
	assert_int_equal(
		kvg_backend_cuda.checksum_probe(backend, error, sizeof(error)), -EOPNOTSUPP);
	assert_int_equal(fakecu_calls("cuModuleLoadData"), 0);
	kvg_backend_close(backend);
	device_close(&d);
}

#define TEST(name) cmocka_unit_test_setup(test_gpu_kernels__##name, unit_gpu_setup)

int main(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "without") == 0)
		return without();

	const struct CMUnitTest tests[] = {
		TEST(sums_of_host),
		TEST(sums_of_cuda),
		TEST(sums_of_cufile),
		TEST(many_sums),
		TEST(sums_of_many_threads),
		TEST(sums_of_bad_ranges),
		TEST(copies),
		TEST(large_copies),
		TEST(copies_of_host_memory),
		TEST(copies_of_cumemalloc),
		TEST(bad_copies),
		TEST(copies_to_read_only_memory),
		TEST(wrong_results),
		TEST(no_symbol),
		TEST(failures_when_tried),
		TEST(a_launch_fails),
		TEST(a_checksum_fails),
		TEST(a_fatal_error),
		TEST(not_wanted),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
