/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a file that is written here and there costs: DRAM, transfers and space by the block.
 */
#include <fcntl.h>

#include "tests/unit/unit_pools.h"

#define TIB (UINT64_C(1) << 40)
#define PAGES 1500u

static const int PUNCH = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;

/* Block I of many that lie apart, each in a chunk of its own. */
static uint64_t far_apart(unsigned i)
{
	return (uint64_t)i * 517 * MIB + (uint64_t)(i * 37 % KV_CHUNK_BLOCKS) * KV_BLOCK_SIZE;
}

static void expect_blocks(struct kv_version *version, unsigned count, uint64_t seed)
{
	for (unsigned i = 0; i < count; i++)
		unit_expect_pattern(version, KV_BLOCK_SIZE, far_apart(i), seed);
	unit_expect_zeros(version, KV_BLOCK_SIZE, far_apart(count / 2) + KV_BLOCK_SIZE);
}

/* Nothing is allocated that nobody is charged for. */
static void expect_no_more_than_charged(struct unit *unit)
{
	struct kv_dram_usage usage;

	kv_dram_usage(kv_core_dram(unit->core), &usage);
	if (usage.tmpfs)
		assert_int_equal(usage.zombie, 0);
}

/* Blocks far apart in a pool of a terabyte take their pages of DRAM, whether it was cut to its size
 * or allocated, and nothing else. */
static void test_core_pages__blocks_take_their_pages(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){
				 .store = 2 * TIB, .dram = 32 * MIB, .devices = 1, .sparse = true});
	for (unsigned allocated = 0; allocated < 2; allocated++) {
		struct unit_pool pool = unit_pool_new(&unit, "pool", allocated ? TIB : 0);

		assert_int_equal(kv_version_truncate(pool.version, TIB), 0);
		for (unsigned i = 0; i < PAGES; i++)
			assert_int_equal(
				unit_write_pattern(pool.version, KV_BLOCK_SIZE, far_apart(i), 1),
				0);
		assert_int_equal(unit_charged(&unit), PAGES * KV_BLOCK_SIZE);
		assert_int_equal(
			unit_attr(pool.version).blocks, allocated ? TIB / KV_BLOCK_SIZE : PAGES);
		/* Pieces of a block, two blocks, and what is there already. */
		assert_int_equal(unit_write_pattern(pool.version, 10, TIB - 5000, 1), 0);
		assert_int_equal(unit_write_pattern(pool.version, 10, TIB / 2 - 3, 1), 0);
		assert_int_equal(unit_write_pattern(pool.version, 10, far_apart(7) + 50, 1), 0);
		assert_int_equal(unit_charged(&unit), (PAGES + 3) * KV_BLOCK_SIZE);
		expect_no_more_than_charged(&unit);
		unit_expect_pages(pool.version);
		expect_blocks(pool.version, PAGES, 1);
		assert_int_equal(unit_charged(&unit), (PAGES + 3) * KV_BLOCK_SIZE);
		unit_pool_end(&unit, &pool, "pool");
		assert_int_equal(unit_charged(&unit), 0);
		unit_expect_used(&unit, 0);
	}
	unit_done(&unit);
}

/* A chunk that was evicted before its last pages were asked for gets none: they would be zeros. */
static void test_core_pages__evicted_chunks_get_no_pages(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 64 * MIB});
	uint64_t ino = unit_put(&unit, "file", 2 * MIB, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	assert_int_equal(unit_charged(&unit), 0);
	assert_int_equal(kv_chunk_allocate_rest(version, 0), 0);
	assert_int_equal(unit_charged(&unit), 0);
	unit_expect_pattern(version, 2 * MIB, 0, 1);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

/* A write that goes on where the last one ended, and one of most of a chunk, take whole chunks: a
 * pool that is filled from its start on has huge pages. */
static void test_core_pages__streams_take_chunks(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 64 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, 8 * KV_BLOCK_SIZE, 4 * MIB, 1), 0);
	assert_int_equal(unit_charged(&unit), 8 * KV_BLOCK_SIZE);
	assert_int_equal(
		unit_write_pattern(pool.version, KV_BLOCK_SIZE, 4 * MIB + 8 * KV_BLOCK_SIZE, 1), 0);
	assert_int_equal(unit_charged(&unit), MIB);
	assert_int_equal(unit_write_pattern(pool.version, MIB / 2, 8 * MIB, 1), 0);
	assert_int_equal(unit_charged(&unit), 2 * MIB);
	/* Not if it begins within: the rest may never come. */
	assert_int_equal(unit_write_pattern(pool.version, MIB / 2, 12 * MIB + MIB / 2, 1), 0);
	assert_int_equal(unit_charged(&unit), 2 * MIB + MIB / 2);
	/* A write over the border of two chunks goes on with itself, which is no stream. */
	assert_int_equal(
		unit_write_pattern(pool.version, 2 * KV_BLOCK_SIZE, 20 * MIB - KV_BLOCK_SIZE, 1),
		0);
	assert_int_equal(unit_charged(&unit), 2 * MIB + MIB / 2 + 2 * KV_BLOCK_SIZE);
	unit_expect_pages(pool.version);
	unit_pool_end(&unit, &pool, "pool");
	unit_done(&unit);
}

/* A chunk may be written from its start on first, and far behind that later: what nothing was
 * written to is given back then. */
static void test_core_pages__from_the_start_then_apart(void **state)
{
	struct unit unit;
	const uint64_t at = 4 * MIB;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 64 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, 20 * KV_BLOCK_SIZE, at, 1), 0);
	assert_int_equal(kv_version_allocate(pool.version, PUNCH, at + 3 * KV_BLOCK_SIZE,
				 5 * KV_BLOCK_SIZE + 7),
		0);
	assert_int_equal(unit_charged(&unit), 20 * KV_BLOCK_SIZE);
	assert_int_equal(
		unit_write_pattern(pool.version, KV_BLOCK_SIZE, at + 200 * KV_BLOCK_SIZE, 1), 0);
	assert_int_equal(unit_charged(&unit), 16 * KV_BLOCK_SIZE);
	unit_expect_pages(pool.version);
	expect_no_more_than_charged(&unit);
	/* Of a sparse chunk each hole gives its pages back, and keeps what shares a block with it.
	 */
	assert_int_equal(kv_version_allocate(pool.version, PUNCH, at + 10 * KV_BLOCK_SIZE + 9,
				 5 * KV_BLOCK_SIZE),
		0);
	assert_int_equal(unit_charged(&unit), 12 * KV_BLOCK_SIZE);
	assert_int_equal(kv_version_allocate(pool.version, PUNCH, at + 100 * KV_BLOCK_SIZE + 9,
				 100 * KV_BLOCK_SIZE),
		0);
	assert_int_equal(unit_charged(&unit), 12 * KV_BLOCK_SIZE);
	unit_expect_pages(pool.version);
	unit_expect_pattern(pool.version, 3 * KV_BLOCK_SIZE, at, 1);
	unit_expect_zeros(pool.version, 5 * KV_BLOCK_SIZE + 7, at + 3 * KV_BLOCK_SIZE);
	unit_expect_pattern(pool.version, 2 * KV_BLOCK_SIZE - 7 + 9, at + 8 * KV_BLOCK_SIZE + 7, 1);
	unit_expect_zeros(pool.version, 5 * KV_BLOCK_SIZE, at + 10 * KV_BLOCK_SIZE + 9);
	unit_expect_zeros(pool.version, 9, at + 200 * KV_BLOCK_SIZE);
	unit_expect_pattern(pool.version, KV_BLOCK_SIZE - 9, at + 200 * KV_BLOCK_SIZE + 9, 1);
	/* Filled up, it is like any other: holes stay as zeros, so that it can be mapped. */
	assert_int_equal(unit_write_pattern(pool.version, MIB, at, 2), 0);
	assert_int_equal(unit_charged(&unit), MIB);
	unit_expect_pattern(pool.version, MIB, at, 2);
	/* Cut within a sparse chunk. */
	assert_int_equal(
		unit_write_pattern(pool.version, KV_BLOCK_SIZE, 9 * MIB + KV_BLOCK_SIZE, 3), 0);
	assert_int_equal(
		unit_write_pattern(pool.version, KV_BLOCK_SIZE, 9 * MIB + 9 * KV_BLOCK_SIZE, 3), 0);
	assert_int_equal(kv_version_truncate(pool.version, 9 * MIB + KV_BLOCK_SIZE + 5), 0);
	assert_int_equal(unit_charged(&unit), MIB + KV_BLOCK_SIZE);
	unit_expect_pages(pool.version);
	unit_pool_end(&unit, &pool, "pool");
	assert_int_equal(unit_charged(&unit), 0);
	unit_done(&unit);
}

/* A pool that is synced keeps its pages, and goes on with them. */
static void test_core_pages__sync_keeps_pages(void **state)
{
	static const unsigned order[] = {10, 20, 1, 0, 255, 11, 10};
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 64 * MIB);
	for (unsigned i = 0; i < 7; i++) {
		assert_int_equal(unit_write_pattern(pool.version, KV_BLOCK_SIZE,
					 3 * MIB + order[i] * KV_BLOCK_SIZE, 1),
			0);
		assert_int_equal(unit_charged(&unit), (i < 6 ? i + 1 : 6) * KV_BLOCK_SIZE);
		unit_pool_sync(&pool);
		for (unsigned k = 0; k <= i; k++)
			unit_expect_pattern(
				pool.version, KV_BLOCK_SIZE, 3 * MIB + order[k] * KV_BLOCK_SIZE, 1);
		assert_int_equal(unit_charged(&unit), (i < 6 ? i + 1 : 6) * KV_BLOCK_SIZE);
		unit_expect_pages(pool.version);
	}
	assert_int_equal(kv_stat_get(&unit.stats.fill_bytes), 0);
	unit_expect_zeros(pool.version, KV_BLOCK_SIZE, 3 * MIB + 2 * KV_BLOCK_SIZE);
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* Only blocks go to the devices and come back, a few of them in one transfer, and a chunk that
 * comes back has its blocks' pages. */
static void test_core_pages__transfers_by_the_block(void **state)
{
	struct unit unit;
	const unsigned runs = 20;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 64 * MIB, .devices = 1});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 0);
	assert_int_equal(kv_version_truncate(pool.version, 64 * MIB), 0);
	for (unsigned i = 0; i < runs; i++)
		assert_int_equal(unit_write_pattern(pool.version, 2 * KV_BLOCK_SIZE,
					 3 * MIB + i * 10 * KV_BLOCK_SIZE + KV_BLOCK_SIZE, 1),
			0);
	uint64_t bytes = runs * 2 * KV_BLOCK_SIZE;
	assert_int_equal(unit_charged(&unit), bytes);
	uint64_t writes = unit.disk.writes;
	unit_pool_sync(&pool);
	assert_int_equal(unit.disk.writes - writes, 1);
	assert_int_equal(kv_stat_get(&unit.stats.writeback_bytes), bytes);
	assert_int_equal(unit_charged(&unit), bytes);
	assert_int_equal(unit_attr(pool.version).blocks, 2 * runs);
	unit_pool_close(&pool);
	unit_chill(&unit);
	assert_int_equal(unit_charged(&unit), 0);
	/* By a reader, then by a writer of a piece of a block, whose rest has to come first. */
	for (unsigned writes_too = 0; writes_too < 2; writes_too++) {
		uint64_t reads = unit.disk.reads, fills = kv_stat_get(&unit.stats.fill_bytes);

		pool.file = unit_file(&unit, pool.ino);
		kv_file_opened(pool.file);
		struct kv_version *current = unit_current(pool.file);
		pool.version = writes_too ? unit_new(pool.file, current) : kv_version_ref(current);
		kv_version_unref(current);
		if (writes_too)
			assert_int_equal(unit_write_pattern(pool.version, 5,
						 3 * MIB + 11 * KV_BLOCK_SIZE + 77, 1),
				0);
		for (unsigned i = 0; i < runs; i++)
			unit_expect_pattern(pool.version, 2 * KV_BLOCK_SIZE,
				3 * MIB + i * 10 * KV_BLOCK_SIZE + KV_BLOCK_SIZE, 1);
		unit_expect_zeros(pool.version, KV_BLOCK_SIZE, 3 * MIB);
		assert_int_equal(unit.disk.reads - reads, 1);
		assert_int_equal(kv_stat_get(&unit.stats.fill_bytes) - fills, bytes);
		unit_expect_pages(pool.version);
		assert_int_equal(unit_charged(&unit), bytes);
		unit_pool_close(&pool);
		unit_chill(&unit);
	}
	unit_unlink(&unit, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* Much more than DRAM holds, block by block: blocks go out early, as they are, and come back. */
static void test_core_pages__more_than_dram(void **state)
{
	struct unit unit;
	const unsigned count = 9000;

	(void)state;
	unit_init(&unit, (struct unit_sizes){
				 .store = 8 * TIB, .dram = 16 * MIB, .devices = 1, .sparse = true});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 0);
	assert_int_equal(kv_version_truncate(pool.version, 5 * TIB), 0);
	for (unsigned i = 0; i < count; i++) {
		assert_int_equal(
			unit_write_pattern(pool.version, KV_BLOCK_SIZE, far_apart(i), 1), 0);
		assert_true(unit_charged(&unit) <= 16 * MIB);
	}
	assert_true(kv_stat_get(&unit.stats.writeback_bytes) >= 20 * MIB);
	assert_true(kv_stat_get(&unit.stats.writeback_bytes) <= count * KV_BLOCK_SIZE);
	expect_blocks(pool.version, count, 1);
	uint64_t fills = kv_stat_get(&unit.stats.fill_bytes);
	assert_true(fills > 0 && fills <= count * KV_BLOCK_SIZE);
	unit_expect_pages(pool.version);
	unit_pool_sync(&pool);
	assert_int_equal(unit_attr(pool.version).blocks, count);
	expect_blocks(pool.version, count, 1);
	for (unsigned i = 0; i < count; i += 3)
		assert_int_equal(
			unit_write_pattern(pool.version, KV_BLOCK_SIZE, far_apart(i), 2), 0);
	for (unsigned i = 0; i < count; i++)
		unit_expect_pattern(pool.version, KV_BLOCK_SIZE, far_apart(i), i % 3 ? 1 : 2);
	assert_true(unit_charged(&unit) <= 16 * MIB);
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* A file with few holes is opened as a whole: what it was written with, and pages for the holes. */
static void test_core_pages__few_holes_are_filled(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 64 * MIB});
	for (unsigned cold = 0; cold < 2; cold++) {
		struct unit_pool pool = unit_pool_new(&unit, "pool", 0);

		assert_int_equal(kv_version_truncate(pool.version, 4 * MIB), 0);
		assert_int_equal(
			unit_write_pattern(pool.version, 2 * MIB - KV_BLOCK_SIZE, KV_BLOCK_SIZE, 1),
			0);
		assert_int_equal(unit_write_pattern(pool.version, MIB, 2 * MIB + 8192, 1), 0);
		assert_int_equal(unit_write_pattern(pool.version, MIB / 2, 3 * MIB + 8192, 1), 0);
		assert_int_equal(
			unit_write_pattern(pool.version, MIB / 2 - 16384, 7 * MIB / 2 + 16384, 1),
			0);
		assert_int_equal(unit_publish(pool.version), 0);
		assert_int_equal(kv_version_sync(pool.version), 0);
		if (cold) {
			unit_pool_close(&pool);
			unit_chill(&unit);
			pool.file = unit_file(&unit, pool.ino);
			kv_file_opened(pool.file);
			pool.version = unit_current(pool.file);
		}
		assert_int_equal(kv_version_open(pool.version, false, &access), 0);
		assert_int_equal(access, KV_ACCESS_HOT);
		assert_int_equal(unit_charged(&unit), 4 * MIB);
		assert_true(kv_version_backing(pool.version) > 0);
		unit_expect_zeros(pool.version, KV_BLOCK_SIZE, 0);
		unit_expect_pattern(pool.version, 2 * MIB - KV_BLOCK_SIZE, KV_BLOCK_SIZE, 1);
		unit_expect_zeros(pool.version, 8192, 2 * MIB);
		kv_version_close(pool.version);
		unit_pool_end(&unit, &pool, "pool");
		unit_expect_used(&unit, 0);
	}
	unit_done(&unit);
}

/* A chunk of many holes that is damaged on the device is never seen, and its pages are free. */
static void test_core_pages__damage(void **state)
{
	struct unit unit;
	uint8_t byte;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 0);
	assert_int_equal(kv_version_truncate(pool.version, 64 * MIB), 0);
	for (unsigned i = 0; i < 100; i++)
		assert_int_equal(unit_write_pattern(pool.version, KV_BLOCK_SIZE,
					 3 * MIB + (2 * i + 1) * KV_BLOCK_SIZE, 1),
			0);
	assert_int_equal(unit_publish(pool.version), 0);
	assert_int_equal(kv_version_sync(pool.version), 0);
	unit_pool_close(&pool);
	unit_chill(&unit);
	/* Not at all readable, which passes, then with a bit flipped. */
	pool.file = unit_file(&unit, pool.ino);
	pool.version = unit_current(pool.file);
	atomic_store(&unit.disk.reads_fail, 1000);
	assert_int_equal(kv_version_read(pool.version, &byte, 1, 3 * MIB + KV_BLOCK_SIZE), -EIO);
	unit_expect_charged(&unit, 0);
	atomic_store(&unit.disk.reads_fail, 0);
	unit_expect_pattern(pool.version, KV_BLOCK_SIZE, 3 * MIB + KV_BLOCK_SIZE, 1);
	assert_int_equal(unit_charged(&unit), 100 * KV_BLOCK_SIZE);
	kv_version_unref(pool.version);
	kv_file_put(pool.file);
	unit_chill(&unit);
	pool.file = unit_file(&unit, pool.ino);
	pool.version = unit_current(pool.file);
	atomic_store(&unit.disk.reads_flip, 1);
	assert_int_equal(kv_version_read(pool.version, &byte, 1, 3 * MIB + KV_BLOCK_SIZE), -EIO);
	unit_expect_charged(&unit, 0);
	kv_version_unref(pool.version);
	kv_file_put(pool.file);
	UNIT_WAIT_FOR(unit.names_gone);
	assert_int_equal(unit_lookup(&unit, "pool"), 0);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_pages__blocks_take_their_pages),
		cmocka_unit_test(test_core_pages__evicted_chunks_get_no_pages),
		cmocka_unit_test(test_core_pages__streams_take_chunks),
		cmocka_unit_test(test_core_pages__from_the_start_then_apart),
		cmocka_unit_test(test_core_pages__sync_keeps_pages),
		cmocka_unit_test(test_core_pages__transfers_by_the_block),
		cmocka_unit_test(test_core_pages__more_than_dram),
		cmocka_unit_test(test_core_pages__few_holes_are_filled),
		cmocka_unit_test(test_core_pages__damage),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
