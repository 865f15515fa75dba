/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes that fill a huge page, two chunks at once: when they come to that, and what they leave.
 */
#include "fs/write_internal.h"
#include "tests/unit/unit_pools.h"

#define PAIR (2 * MIB)
#define FILE_SIZE (16 * MIB)
#define WRITES 80u

/* What kv_version_write does before it copies, then the pair. */
static int64_t write_pair(struct kv_version *version, uint64_t offset, uint64_t size, bool promised)
{
	struct kv_writer writer = {.version = version};
	uint8_t *memory = malloc(size);
	int64_t n;

	assert_non_null(memory);
	unit_pattern(memory, size, offset, 1);
	assert_int_equal(kv_version_enter(version), 0);
	if (promised)
		assert_int_equal(kv_writer_promise(&writer, offset, size), 0);
	n = kv_writer_pair(&writer, offset, size, memory);
	kv_writer_done(&writer);
	(void)pthread_mutex_lock(&version->lock);
	version->changed = true;
	(void)pthread_mutex_unlock(&version->lock);
	kv_version_leave(version);
	free(memory);
	return n;
}

static void expect_published(struct unit *unit, struct unit_pool *pool, uint64_t size)
{
	assert_int_equal(unit_publish(pool->version), 0);
	unit_pool_close(pool);
	unit_sync(unit);
	unit_expect_file(unit, pool->ino, size, 1);
	unit_chill(unit);
	unit_expect_file(unit, pool->ino, size, 1);
}

/* Two whole chunks, wherever in the file, and no more than two at once. */
static void test_core_pairs__whole_ones(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "file", 0);

	assert_int_equal(write_pair(pool.version, PAIR, PAIR, true), PAIR);
	assert_int_equal(write_pair(pool.version, 0, 3 * MIB, true), PAIR);
	assert_int_equal(unit_attr(pool.version).size, 2 * PAIR);
	assert_int_equal(unit_attr(pool.version).blocks, 2 * PAIR / KV_BLOCK_SIZE);
	assert_int_equal(unit_charged(&unit), 2 * PAIR);
	unit_expect_pages(pool.version);
	expect_published(&unit, &pool, 2 * PAIR);
	unit_done(&unit);
}

/* Memory that is not aligned to pages makes the kernel cut within the last block. */
static void test_core_pairs__last_block_in_part(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "file", 0);

	assert_int_equal(write_pair(pool.version, 0, PAIR - 4095, true), PAIR - 4095);
	assert_int_equal(unit_attr(pool.version).size, PAIR - 4095);
	assert_int_equal(unit_attr(pool.version).blocks, PAIR / KV_BLOCK_SIZE);
	assert_int_equal(unit_charged(&unit), PAIR);
	assert_int_equal(unit_write_pattern(pool.version, MIB, PAIR - 4095, 1), 0);
	expect_published(&unit, &pool, 3 * MIB - 4095);
	unit_done(&unit);
}

/* What lies across two pages, leaves a block out, or meets what is there, comes chunk by chunk. */
static void test_core_pairs__others_are_left_alone(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "file", 0);

	assert_int_equal(write_pair(pool.version, MIB, PAIR, true), 0);
	assert_int_equal(write_pair(pool.version, 1, PAIR, true), 0);
	assert_int_equal(write_pair(pool.version, 0, PAIR - KV_BLOCK_SIZE, true), 0);
	assert_int_equal(write_pair(pool.version, 0, PAIR, false), 0);
	assert_int_equal(unit_charged(&unit), 0);
	assert_int_equal(unit_attr(pool.version).blocks, 0);
	assert_int_equal(unit_write_pattern(pool.version, 10, PAIR - 10, 1), 0);
	assert_int_equal(write_pair(pool.version, 0, PAIR, true), 0);
	assert_int_equal(unit_write_pattern(pool.version, PAIR, 0, 1), 0);
	expect_published(&unit, &pool, PAIR);
	/* Chunks of a base. */
	pool.file = unit_file(&unit, pool.ino);
	struct kv_version *base = unit_current(pool.file);
	pool.version = unit_new(pool.file, base);
	assert_int_equal(write_pair(pool.version, 0, PAIR, true), 0);
	assert_int_equal(write_pair(pool.version, PAIR, PAIR, true), PAIR);
	kv_version_unref(base);
	kv_version_unref(pool.version);
	kv_file_put(pool.file);
	unit_done(&unit);
}

/* Space that was allocated before pays for them. */
static void test_core_pairs__allocated(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", PAIR);
	uint64_t reserved = unit_usage(&unit).reserved;

	assert_int_equal(write_pair(pool.version, 0, PAIR, false), PAIR);
	assert_int_equal(unit_usage(&unit).reserved, reserved);
	assert_int_equal(unit_attr(pool.version).unwritten, 0);
	expect_published(&unit, &pool, PAIR);
	unit_done(&unit);
}

/* A tier that is full is not waited for: one chunk may still have room. */
static void test_core_pairs__no_dram(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 128 * MIB, .dram = 16 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "file", 0);

	assert_int_equal(kv_core_charge(unit.core, 15 * MIB, 0), 0);
	assert_int_equal(write_pair(pool.version, 0, PAIR, true), 0);
	assert_int_equal(unit_charged(&unit), 15 * MIB);
	kv_core_uncharge(unit.core, 15 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, 40 * MIB, 0, 1), 0);
	expect_published(&unit, &pool, 40 * MIB);
	unit_done(&unit);
}

/* Large writes anywhere, over each other, are what memory has. */
static void test_core_pairs__as_memory(void **state)
{
	struct unit unit;
	uint8_t *wanted = calloc(1, FILE_SIZE), *found = calloc(1, FILE_SIZE);
	uint64_t seed = 7, end = 0;

	(void)state;
	assert_non_null(wanted);
	assert_non_null(found);
	unit_init(&unit, (struct unit_sizes){.store = 128 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "file", 0);
	for (unsigned i = 0; i < WRITES; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		uint64_t unit_size = i % 3 == 0 ? MIB : i % 3 == 1 ? KV_BLOCK_SIZE : 1;
		uint64_t at = (seed >> 20) % FILE_SIZE / unit_size * unit_size;
		uint64_t size = kv_min_u64((seed >> 8) % (5 * MIB) + 1, FILE_SIZE - at);

		unit_pattern(wanted + at, size, at, i);
		assert_int_equal(kv_version_write(pool.version, wanted + at, size, at), 0);
		end = kv_max_u64(end, at + size);
		assert_int_equal(kv_version_read(pool.version, found, FILE_SIZE, 0), (ssize_t)end);
		assert_memory_equal(found, wanted, end);
	}
	unit_expect_pages(pool.version);
	assert_int_equal(unit_publish(pool.version), 0);
	unit_pool_close(&pool);
	unit_sync(&unit);
	unit_chill(&unit);
	pool.file = unit_file(&unit, pool.ino);
	pool.version = unit_current(pool.file);
	assert_int_equal(kv_version_read(pool.version, found, FILE_SIZE, 0), (ssize_t)end);
	assert_memory_equal(found, wanted, end);
	kv_version_unref(pool.version);
	kv_file_put(pool.file);
	unit_done(&unit);
	free(wanted);
	free(found);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_pairs__whole_ones),
		cmocka_unit_test(test_core_pairs__last_block_in_part),
		cmocka_unit_test(test_core_pairs__others_are_left_alone),
		cmocka_unit_test(test_core_pairs__allocated),
		cmocka_unit_test(test_core_pairs__no_dram),
		cmocka_unit_test(test_core_pairs__as_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
