/* SPDX-License-Identifier: Apache-2.0 */
/* Checksums of device memory: they are those of the CPU, for all sizes and alignments. */
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

static void device_close(struct device *d)
{
	const struct kvg_backend_ops *ops = d->backend->ops;

	ops->stream_free(d->backend, d->stream);
	ops->unmap(d->backend, d->mapping);
	for (int i = 0; i < 2; i++)
		ops->segment_free(d->backend, d->segments[i]);
	kvg_backend_close(d->backend);
	free(d->memory);
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(test_gpu_kernels__sums_of_host, unit_gpu_setup),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
