/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools: files of a fixed size that their owner allocates once and writes by offset, for as long as
 * it lives.
 */
#include <fcntl.h>

#include "fs/core_internal.h"
#include "tests/unit/unit_pools.h"

#define TIB (UINT64_C(1) << 40)

/* Files that stay open until nothing more fits. Returns how many. */
static unsigned fill_store(struct unit *unit, struct kv_file **files, unsigned capacity)
{
	uint8_t *memory = calloc(1, MIB);
	unsigned count = 0;
	char name[16];
	int r = 0;

	assert_non_null(memory);
	while (r == 0) {
		assert_true(count < capacity);
		(void)snprintf(name, sizeof(name), "fill%u", count);
		struct kv_file *file = unit_file(unit, unit_create(unit, name));
		struct kv_version *version = unit_new(file, NULL);
		kv_file_opened(file);
		r = kv_version_write(version, memory, MIB, 0);
		if (r == 0)
			assert_int_equal(unit_publish(version), 0);
		kv_version_unref(version);
		files[count++] = file;
	}
	assert_int_equal(r, -ENOSPC);
	free(memory);
	return count;
}

static void close_all(struct unit *unit, struct kv_file **files, unsigned count)
{
	char name[16];

	for (unsigned i = 0; i < count; i++) {
		(void)snprintf(name, sizeof(name), "fill%u", i);
		unit_unlink(unit, name);
		kv_file_closed(files[i]);
		kv_file_put(files[i]);
	}
}

/* ---- The promise ---- */

/* R4: a terabyte is allocated without a byte of DRAM or of I/O, counts in st_blocks, reads as
 * zeros, and is a hole. */
static void test_core_pools__fallocate_is_a_promise(void **state)
{
	struct unit unit;
	uint64_t found;

	(void)state;
	unit_init(&unit, (struct unit_sizes){
				 .store = 2 * TIB, .dram = 16 * MIB, .devices = 1, .sparse = true});
	struct unit_pool pool = unit_pool_new(&unit, "pool", TIB);
	assert_int_equal(unit_attr(pool.version).size, TIB);
	assert_int_equal(unit_attr(pool.version).blocks, TIB / KV_BLOCK_SIZE);
	assert_int_equal(unit_attr(pool.version).unwritten, TIB / KV_BLOCK_SIZE);
	assert_int_equal(unit_usage(&unit).reserved, TIB / KV_BLOCK_SIZE);
	assert_int_equal(unit_charged(&unit), 0);
	assert_int_equal(unit.disk.writes, 0);
	unit_expect_zeros(pool.version, 3 * MIB, TIB / 2 - 77);
	assert_int_equal(kv_version_seek(pool.version, 0, SEEK_DATA, &found), -ENXIO);
	assert_int_equal(kv_version_seek(pool.version, 5, SEEK_HOLE, &found), 0);
	assert_int_equal(found, 5);
	assert_int_equal(unit_write_pattern(pool.version, 10, TIB - 10, 1), 0);
	assert_int_equal(kv_version_seek(pool.version, 0, SEEK_DATA, &found), 0);
	assert_int_equal(found, TIB - KV_BLOCK_SIZE);
	assert_int_equal(unit_attr(pool.version).blocks, TIB / KV_BLOCK_SIZE);
	assert_int_equal(unit_attr(pool.version).unwritten, TIB / KV_BLOCK_SIZE - 1);
	assert_int_equal(unit_usage(&unit).reserved, TIB / KV_BLOCK_SIZE);
	/* A second one does not fit, and nothing changes. */
	struct unit_pool other = unit_pool_new(&unit, "other", 0);
	assert_int_equal(kv_version_allocate(other.version, 0, 0, TIB), -ENOSPC);
	assert_int_equal(unit_attr(other.version).size, 0);
	assert_int_equal(unit_attr(other.version).blocks, 0);
	/* Truncated up, it costs nothing. */
	assert_int_equal(kv_version_truncate(other.version, 100 * TIB), 0);
	assert_int_equal(unit_attr(other.version).blocks, 0);
	assert_int_equal(unit_usage(&unit).reserved, TIB / KV_BLOCK_SIZE);
	unit_pool_end(&unit, &other, "other");
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* A sparse terabyte of which little was touched costs memory for what was touched. */
static void test_core_pools__memory_by_what_is_touched(void **state)
{
	struct unit unit;
	struct kv_segment *segment;
	uint64_t seed = 3, bytes = 0;

	(void)state;
	unit_init(&unit, (struct unit_sizes){
				 .store = 2 * TIB, .dram = 32 * MIB, .devices = 1, .sparse = true});
	struct unit_pool pool = unit_pool_new(&unit, "pool", TIB);
	for (unsigned i = 0; i < 64; i++) {
		uint64_t slot = unit_random(&seed) % (TIB / (2 * MIB));
		assert_int_equal(unit_write_pattern(pool.version, 2 * MIB, slot * 2 * MIB, i), 0);
	}
	RB_FOREACH (segment, kv_segment_tree, &pool.version->segments)
		bytes += sizeof(*segment) + segment->capacity * sizeof(struct kv_slot);
	/* So 1 GiB in slots of 2 MiB, wherever they are, takes half a MiB at most. */
	assert_true(bytes <= 64 * 1100);
	const struct kv_range *range = RB_ROOT(&pool.version->ranges);
	assert_true(range && !RB_LEFT(range, entry) && !RB_RIGHT(range, entry));
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* K1: what was allocated can be written, and written again, when nothing else fits any more. */
static void test_core_pools__writes_never_fail_for_space(void **state)
{
	struct unit unit;
	struct kv_file *files[32];
	uint64_t seed = 5;
	uint64_t seeds[16] = {0};

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB, .quota = 24 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 16 * MIB);
	unsigned count = fill_store(&unit, files, 32);
	assert_in_range(count, 2, 9);
	for (unsigned i = 0; i < 200; i++) {
		uint64_t slot = i < 16 ? i : unit_random(&seed) % 16;

		assert_int_equal(unit_write_pattern(pool.version, MIB, slot * MIB, i + 1), 0);
		seeds[slot] = i + 1;
		/* And a piece in the middle of another one, which may be cold by now. */
		slot = unit_random(&seed) % 16;
		if (seeds[slot])
			assert_int_equal(unit_write_pattern(pool.version, 5000, slot * MIB + 100000,
						 seeds[slot]),
				0);
	}
	for (unsigned i = 0; i < 16; i++)
		unit_expect_pattern(pool.version, MIB, i * MIB, seeds[i]);
	assert_true(kv_stat_get(&unit.stats.writeback_chunks) > 0);
	assert_int_equal(unit_attr(pool.version).blocks, 16 * 256);
	assert_int_equal(unit_attr(pool.version).unwritten, 0);
	unit_pool_end(&unit, &pool, "pool");
	close_all(&unit, files, count);
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* A doomed allocation evicts nothing. */
static void test_core_pools__enospc_evicts_nothing_in_vain(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB, .quota = 32 * MIB});
	uint64_t ino = unit_put(&unit, "a", 4 * MIB, 1);
	unit_sync(&unit);
	struct unit_pool pool = unit_pool_new(&unit, "pool", 20 * MIB);
	struct unit_pool other = unit_pool_new(&unit, "other", 0);
	assert_int_equal(kv_version_allocate(other.version, 0, 0, 13 * MIB), -ENOSPC);
	assert_int_equal(unit_lookup(&unit, "a"), ino);
	/* One that is possible does. */
	assert_int_equal(kv_version_allocate(other.version, 0, 0, 11 * MIB), 0);
	assert_int_equal(unit_lookup(&unit, "a"), 0);
	unit_pool_end(&unit, &other, "other");
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

static const int PUNCH = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;

/* Each kind of change gives promises back exactly, whatever state the blocks are in. */
static void test_core_pools__accounts_are_exact(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 128 * MIB, .dram = 16 * MIB});
	for (unsigned written = 0; written < 3; written++) {
		struct unit_pool pool = unit_pool_new(&unit, "pool", 20 * MIB);
		struct kv_version *version = pool.version;

		/* Not at all, dirty in part, and on the device for the most part. */
		if (written)
			assert_int_equal(unit_write_pattern(version,
						 written == 1 ? 2 * MIB : 20 * MIB, 4096, 1),
				0);
		uint64_t size = written == 2 ? 20 * MIB + 4096 : 20 * MIB;
		assert_int_equal(unit_attr(version).blocks, size / KV_BLOCK_SIZE);
		assert_int_equal(kv_version_allocate(version, PUNCH, MIB + 1, MIB - 1), 0);
		assert_int_equal(unit_attr(version).blocks, size / KV_BLOCK_SIZE - 255);
		assert_int_equal(kv_version_allocate(version, PUNCH, 5 * MIB, 8 * MIB), 0);
		assert_int_equal(unit_attr(version).blocks, size / KV_BLOCK_SIZE - 255 - 2048);
		assert_int_equal(kv_version_allocate(version, 0, 5 * MIB, 8 * MIB), 0);
		assert_int_equal(unit_attr(version).blocks, size / KV_BLOCK_SIZE - 255);
		assert_int_equal(
			kv_version_allocate(version, FALLOC_FL_ZERO_RANGE, 100, 3 * MIB), 0);
		assert_int_equal(unit_attr(version).blocks, size / KV_BLOCK_SIZE);
		unit_expect_zeros(version, 3 * MIB, 100);
		assert_int_equal(
			kv_version_allocate(version, FALLOC_FL_KEEP_SIZE, 30 * MIB, MIB), 0);
		assert_int_equal(unit_attr(version).size, size);
		assert_int_equal(unit_attr(version).blocks, size / KV_BLOCK_SIZE + 256);
		assert_int_equal(kv_version_truncate(version, 10 * MIB + 5), 0);
		assert_int_equal(unit_attr(version).blocks, 10 * 256 + 1);
		assert_int_equal(kv_version_truncate(version, 40 * MIB), 0);
		assert_int_equal(unit_attr(version).blocks, 10 * 256 + 1);
		assert_int_equal(unit_write_pattern(version, MIB, 9 * MIB + 5, 3), 0);
		unit_expect_pattern(version, MIB, 9 * MIB + 5, 3);
		unit_pool_end(&unit, &pool, "pool");
		unit_expect_used(&unit, 0);
	}
	unit_done(&unit);
}

/* S1: a block that is allocated after another file has freed it reads as zeros. */
static void test_core_pools__never_old_bytes(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB, .quota = 16 * MIB});
	(void)unit_put(&unit, "secret", 12 * MIB, 1);
	unit_sync(&unit);
	unit_unlink(&unit, "secret");
	struct unit_pool pool = unit_pool_new(&unit, "pool", 14 * MIB);
	for (unsigned i = 0; i < 14; i++) {
		unit_expect_zeros(pool.version, MIB, i * MIB);
		assert_int_equal(unit_write_pattern(pool.version, 10, i * MIB + 5000, 2), 0);
		unit_expect_zeros(pool.version, 5000, i * MIB);
		unit_expect_zeros(pool.version, MIB - 5010, i * MIB + 5010);
	}
	unit_pool_sync(&pool);
	unit_expect_zeros(pool.version, MIB - 5010, MIB + 5010);
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* A clone into an allocated range needs no promise; writing over the clone's blocks works. */
static void test_core_pools__clone_into_a_range(void **state)
{
	struct unit unit;
	uint64_t copied;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	struct kv_file *file = unit_file(&unit, unit_put(&unit, "a", 3 * MIB + 10, 1));
	struct kv_version *from = unit_current(file);
	struct unit_pool pool = unit_pool_new(&unit, "pool", 8 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, 2 * MIB, 2 * MIB, 2), 0);
	const struct kv_clone clone = {.from = from, .to_offset = MIB, .length = 3 * MIB + 10};
	assert_int_equal(kv_version_clone(pool.version, &clone, &copied), 0);
	assert_int_equal(copied, 3 * MIB + 10);
	assert_int_equal(unit_attr(pool.version).blocks, 8 * 256);
	assert_int_equal(unit_attr(pool.version).unwritten, 5 * 256 - 1);
	/* Zeroed: shared blocks become promises of the pool's own. */
	assert_int_equal(kv_version_allocate(pool.version, FALLOC_FL_ZERO_RANGE, MIB, 2 * MIB), 0);
	assert_int_equal(unit_attr(pool.version).blocks, 8 * 256);
	assert_int_equal(unit_attr(pool.version).unwritten, 7 * 256 - 1);
	unit_expect_zeros(pool.version, 2 * MIB, MIB);
	unit_pool_sync(&pool);
	assert_int_equal(unit_attr(pool.version).blocks, 8 * 256);
	assert_int_equal(unit_write_pattern(pool.version, 8 * MIB, 0, 3), 0);
	unit_expect_pattern(pool.version, 8 * MIB, 0, 3);
	unit_expect_pattern(from, 3 * MIB + 10, 0, 1);
	unit_pool_end(&unit, &pool, "pool");
	kv_version_unref(from);
	kv_file_put(file);
	unit_unlink(&unit, "a");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* ---- fsync ---- */

/* The promise outlives fsync as long as the owner goes on, and ends with him. */
static void test_core_pools__promise_outlives_fsync(void **state)
{
	struct unit unit;
	struct kv_file *files[32];

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB, .quota = 24 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 12 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, MIB, 0, 1), 0);
	unit_pool_sync(&pool);
	assert_int_equal(unit_attr(pool.version).blocks, 12 * 256);
	assert_int_equal(unit_attr(pool.version).unwritten, 11 * 256);
	unsigned count = fill_store(&unit, files, 32);
	for (unsigned i = 1; i < 12; i++) {
		assert_int_equal(unit_write_pattern(pool.version, MIB, i * MIB, 1), 0);
		if (i % 4 == 0)
			unit_pool_sync(&pool);
	}
	unit_expect_pattern(pool.version, 12 * MIB, 0, 1);
	close_all(&unit, files, count);
	assert_int_equal(kv_version_allocate(pool.version, 0, 12 * MIB, MIB), 0);
	assert_int_equal(kv_version_publish(pool.version), 0);
	assert_int_equal(kv_version_sync(pool.version), 0);
	assert_int_equal(unit_attr(pool.version).blocks, 13 * 256);
	assert_int_equal(unit_usage(&unit).reserved, 256);
	kv_version_give_up(pool.version);
	kv_version_give_up(pool.version);
	assert_int_equal(unit_attr(pool.version).blocks, 12 * 256);
	unit_pool_close(&pool);
	unit_expect_used(&unit, 12 * 256);
	/* What was only allocated is a hole after the publish. */
	unit_chill(&unit);
	unit_expect_used(&unit, 12 * 256);
	pool.file = unit_file(&unit, pool.ino);
	pool.version = unit_current(pool.file);
	assert_int_equal(unit_attr(pool.version).size, 13 * MIB);
	unit_expect_pattern(pool.version, 12 * MIB, 0, 1);
	unit_expect_zeros(pool.version, MIB, 12 * MIB);
	kv_version_unref(pool.version);
	kv_file_put(pool.file);
	unit_unlink(&unit, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

static unsigned segments_of(struct kv_version *version)
{
	struct kv_segment *segment;
	unsigned count = 0;

	RB_FOREACH (segment, kv_segment_tree, &version->segments)
		count++;
	return count;
}

/* fsync after a small write costs what was written: one chunk on the device, and of the map of the
 * version before, which a reader holds, the part that changes. The reader keeps his bytes. */
static void test_core_pools__fsync_costs_what_changed(void **state)
{
	struct unit unit;
	uint64_t seed = 8;
	char name[8];

	(void)state;
	/* 8 segments of 32 chunks. */
	unit_init(&unit, (struct unit_sizes){.store = 700 * MIB, .dram = 16 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 256 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, 256 * MIB, 0, 1), 0);
	unit_pool_sync(&pool);
	unit_pool_close(&pool);
	unit_chill(&unit);

	pool.file = unit_file(&unit, pool.ino);
	kv_file_opened(pool.file);
	struct kv_version *first = unit_current(pool.file);
	assert_int_equal(segments_of(first), 0);
	pool.version = unit_new(pool.file, first);
	uint64_t before = kv_stat_get(&unit.stats.writeback_bytes);
	assert_int_equal(unit_write_pattern(pool.version, 4096, 40 * MIB + 8192, 2), 0);
	unit_pool_sync(&pool);
	assert_int_equal(kv_stat_get(&unit.stats.writeback_bytes) - before, MIB);
	assert_int_equal(segments_of(first), 1);
	/* Several versions later, with all of it evicted from DRAM in between. */
	for (unsigned i = 0; i < 6; i++) {
		assert_int_equal(unit_write_pattern(pool.version, MIB, i * 33 * MIB, 10 + i), 0);
		unit_pool_sync(&pool);
		(void)snprintf(name, sizeof(name), "f%u", i);
		unit_expect_file(&unit, unit_put(&unit, name, 14 * MIB, i), 14 * MIB, i);
	}
	assert_in_range(segments_of(first), 1, 7);
	for (unsigned i = 0; i < 60; i++)
		unit_expect_pattern(first, 5000, unit_random(&seed) % (255 * MIB), 1);
	for (unsigned i = 0; i < 6; i++) {
		unit_expect_pattern(pool.version, MIB, i * 33 * MIB, 10 + i);
		unit_expect_pattern(first, MIB, i * 33 * MIB, 1);
	}
	unit_expect_pattern(pool.version, 4096, 40 * MIB + 8192, 2);
	/* A version that cuts the file, then one that replaces it all. */
	struct kv_version *second = unit_current(pool.file);
	assert_int_equal(kv_version_truncate(pool.version, 100 * MIB), 0);
	unit_pool_sync(&pool);
	unit_expect_pattern(first, 3 * MIB, 200 * MIB, 1);
	unit_expect_pattern(second, 3 * MIB, 200 * MIB, 1);
	kv_version_unref(pool.version);
	pool.version = unit_new(pool.file, NULL);
	assert_int_equal(unit_write_pattern(pool.version, 3 * MIB, 0, 77), 0);
	unit_pool_sync(&pool);
	unit_expect_pattern(first, 256 * MIB, 0, 1);
	unit_expect_pattern(second, MIB, 66 * MIB, 12);
	unit_expect_pattern(second, 90 * MIB, 166 * MIB, 1);
	kv_version_unref(first);
	kv_version_unref(second);
	unit_pool_end(&unit, &pool, "pool");
	for (unsigned i = 0; i < 6; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		unit_unlink(&unit, name);
	}
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* Two versions of a huge pool made from the same one: the last publish wins whole, and it costs a
 * look at what the other changed. */
static void test_core_pools__two_writers(void **state)
{
	struct unit unit;
	const uint64_t far = TIB - 5 * MIB;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 0);
	assert_int_equal(kv_version_truncate(pool.version, TIB), 0);
	assert_int_equal(unit_write_pattern(pool.version, 3 * MIB, 0, 1), 0);
	assert_int_equal(unit_write_pattern(pool.version, 3 * MIB, far, 1), 0);
	unit_pool_sync(&pool);
	unit_pool_close(&pool);
	unit_chill(&unit);
	pool.file = unit_file(&unit, pool.ino);
	kv_file_opened(pool.file);
	struct kv_version *base = unit_current(pool.file);
	for (unsigned i = 0; i < 3; i++) {
		struct kv_version *one = unit_new(pool.file, base);

		pool.version = unit_new(pool.file, base);
		assert_int_equal(unit_write_pattern(one, MIB, far + MIB, 10 + i), 0);
		assert_int_equal(unit_write_pattern(one, MIB, TIB / 2 + i * MIB, 10 + i), 0);
		assert_int_equal(unit_publish(one), 0);
		assert_int_equal(kv_version_sync(one), 0);
		unit_expect_pattern(one, MIB, far + MIB, 10 + i);
		unit_expect_pattern(one, MIB, TIB / 2 + i * MIB, 10 + i);
		kv_version_unref(one);
		assert_int_equal(unit_write_pattern(pool.version, MIB, 0, 20 + i), 0);
		assert_int_equal(unit_publish(pool.version), 0);
		assert_int_equal(kv_version_sync(pool.version), 0);
		unit_expect_pattern(pool.version, MIB, 0, 20 + i);
		unit_expect_pattern(pool.version, 2 * MIB, MIB, 1);
		unit_expect_pattern(pool.version, 3 * MIB, far, 1);
		unit_expect_zeros(pool.version, 3 * MIB, TIB / 2);
		kv_version_unref(pool.version);
		unit_expect_pattern(base, 3 * MIB, 0, 1);
		unit_expect_pattern(base, 3 * MIB, far, 1);
	}
	pool.version = base;
	unit_pool_close(&pool);
	unit_chill(&unit);
	pool.file = unit_file(&unit, pool.ino);
	pool.version = unit_current(pool.file);
	unit_expect_pattern(pool.version, MIB, 0, 22);
	unit_expect_pattern(pool.version, 3 * MIB, far, 1);
	unit_expect_zeros(pool.version, 3 * MIB, TIB / 2);
	assert_int_equal(unit_attr(pool.version).blocks, 6 * 256);
	kv_version_unref(pool.version);
	kv_file_put(pool.file);
	unit_unlink(&unit, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* A chunk that was written and then punched is a hole for ever, also when its DRAM is gone. */
static void test_core_pools__punched_chunks_after_sync(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 4 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, 4 * MIB, 0, 1), 0);
	assert_int_equal(kv_version_allocate(pool.version, PUNCH, MIB, MIB - 1), 0);
	assert_int_equal(kv_version_allocate(pool.version, PUNCH, MIB + 5, MIB - 5), 0);
	assert_int_equal(kv_version_publish(pool.version), 0);
	assert_int_equal(kv_version_sync(pool.version), 0);
	struct kv_version *published = kv_version_ref(pool.version);
	kv_version_unref(pool.version);
	pool.version = unit_new(pool.file, published);
	kv_version_continue(pool.version, published);
	unit_expect_zeros(published, MIB, MIB);
	unit_expect_zeros(pool.version, MIB, MIB);
	unit_expect_pattern(published, MIB, 2 * MIB, 1);
	kv_version_unref(published);
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* What a pool has in DRAM stays there when it is synced, unless a reader has it; and what is read
 * after that stays too. */
static void test_core_pools__fsync_keeps_what_is_in_dram(void **state)
{
	struct unit unit;
	enum kv_access access;
	uint64_t fills, charge;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 64 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 24 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, 20 * MIB, 0, 1), 0);
	unit_pool_sync(&pool);
	charge = unit_charged(&unit);
	fills = kv_stat_get(&unit.stats.fill_bytes);
	for (unsigned i = 0; i < 4; i++) {
		unit_expect_pattern(pool.version, 19 * MIB, MIB, 1);
		assert_int_equal(unit_write_pattern(pool.version, 5000, 100 + i, 2 + i), 0);
		unit_expect_pattern(pool.version, 5000, 100 + i, 2 + i);
		unit_expect_pattern(pool.version, MIB - 6000, 6000, 1);
		unit_pool_sync(&pool);
		assert_int_equal(unit_charged(&unit), charge);
	}
	unit_expect_zeros(pool.version, 4 * MIB, 20 * MIB);
	assert_int_equal(kv_stat_get(&unit.stats.fill_bytes), fills);
	/* A reader keeps his object, and his bytes. */
	struct kv_version *read = unit_current(pool.file);
	assert_int_equal(kv_version_open(read, false, &access), 0);
	assert_int_equal(unit_write_pattern(pool.version, 3 * MIB, 2 * MIB, 9), 0);
	unit_pool_sync(&pool);
	unit_expect_pattern(read, 19 * MIB, MIB, 1);
	unit_expect_pattern(pool.version, 3 * MIB, 2 * MIB, 9);
	unit_expect_pattern(pool.version, 15 * MIB, 5 * MIB, 1);
	kv_version_close(read);
	kv_version_unref(read);
	/* Read by now into what the writer keeps. */
	unit_pool_sync(&pool);
	fills = kv_stat_get(&unit.stats.fill_bytes);
	unit_expect_pattern(pool.version, 15 * MIB, 5 * MIB, 1);
	assert_int_equal(unit_write_pattern(pool.version, 1, 7 * MIB, 3), 0);
	assert_int_equal(kv_version_truncate(pool.version, 8 * MIB + 5), 0);
	assert_int_equal(kv_version_truncate(pool.version, 24 * MIB), 0);
	unit_expect_zeros(pool.version, 15 * MIB, 8 * MIB + 5);
	unit_expect_pattern(pool.version, 5, 8 * MIB, 1);
	unit_pool_sync(&pool);
	unit_expect_pattern(pool.version, MIB - 1, 7 * MIB + 1, 1);
	unit_expect_zeros(pool.version, 15 * MIB, 8 * MIB + 5);
	assert_int_equal(kv_stat_get(&unit.stats.fill_bytes), fills);
	unit_pool_close(&pool);
	/* A pool that was cold: what is read after its first sync stays for the next ones. */
	unit_chill(&unit);
	pool.file = unit_file(&unit, pool.ino);
	kv_file_opened(pool.file);
	struct kv_version *cold = unit_current(pool.file);
	pool.version = unit_new(pool.file, cold);
	kv_version_unref(cold);
	assert_int_equal(unit_write_pattern(pool.version, MIB, 0, 5), 0);
	unit_pool_sync(&pool);
	unit_expect_pattern(pool.version, 2 * MIB, 5 * MIB, 1);
	assert_int_equal(unit_write_pattern(pool.version, 1, 0, 5), 0);
	unit_pool_sync(&pool);
	fills = kv_stat_get(&unit.stats.fill_bytes);
	unit_expect_pattern(pool.version, 2 * MIB, 5 * MIB, 1);
	unit_expect_pattern(pool.version, MIB, 0, 5);
	assert_int_equal(kv_stat_get(&unit.stats.fill_bytes), fills);
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_expect_charged(&unit, 0);
	unit_done(&unit);
}

/* ---- The tiers ---- */

/* O_DIRECT reads of whole cold chunks of a pool do not bring them into DRAM; those of pieces do. */
static void test_core_pools__direct_reads_do_not_admit(void **state)
{
	struct unit unit;
	uint8_t *memory = malloc(MIB), *expected = malloc(MIB);

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 16 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", 100 * MIB);
	assert_int_equal(unit_write_pattern(pool.version, 100 * MIB, 0, 1), 0);
	uint64_t fills = kv_stat_get(&unit.stats.fill_chunks), cold = 0;
	for (unsigned i = 0; i < 90; i++) {
		(void)pthread_mutex_lock(&pool.version->lock);
		bool is_cold = kv_slot_state(pool.version, i) == KV_CHUNK_COLD;
		(void)pthread_mutex_unlock(&pool.version->lock);
		cold += is_cold;
		unit_pattern(expected, MIB, i * MIB, 1);
		assert_int_equal(kv_version_read_direct(pool.version, memory, MIB, i * MIB), MIB);
		assert_memory_equal(memory, expected, MIB);
		KV_LOCKED(&pool.version->lock);
		if (is_cold)
			assert_int_equal(kv_slot_state(pool.version, i), KV_CHUNK_COLD);
	}
	assert_true(cold > 40);
	assert_true(kv_stat_get(&unit.stats.fill_chunks) >= fills + cold);
	assert_int_equal(kv_version_read_direct(pool.version, memory, 5000, 3 * MIB + 7), 5000);
	unit_pattern(expected, 5000, 3 * MIB + 7, 1);
	assert_memory_equal(memory, expected, 5000);
	assert_int_equal(kv_slot_state(pool.version, 3), KV_CHUNK_HOT);
	assert_true(unit_charged(&unit) <= 16 * MIB);
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	free(memory);
	free(expected);
	unit_done(&unit);
}

/* K2: a pool that is open is never evicted from the store, published or not; a closed one goes
 * whole. */
static void test_core_pools__evicted_whole_or_not(void **state)
{
	struct unit unit;
	char name[8];

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB, .quota = 40 * MIB});
	struct unit_pool unpublished = unit_pool_new(&unit, "unpublished", 8 * MIB);
	struct unit_pool published = unit_pool_new(&unit, "published", 8 * MIB);
	assert_int_equal(unit_write_pattern(unpublished.version, 8 * MIB, 0, 1), 0);
	assert_int_equal(unit_write_pattern(published.version, 4 * MIB, 0, 2), 0);
	unit_pool_sync(&published);
	for (unsigned i = 0; i < 40; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		(void)unit_put(&unit, name, 2 * MIB, i);
	}
	assert_true(unit.names_gone > 20);
	assert_int_equal(unit_lookup(&unit, "unpublished"), unpublished.ino);
	assert_int_equal(unit_lookup(&unit, "published"), published.ino);
	unit_expect_pattern(unpublished.version, 8 * MIB, 0, 1);
	unit_expect_pattern(published.version, 4 * MIB, 0, 2);
	unit_expect_zeros(published.version, 4 * MIB, 4 * MIB);
	unit_pool_close(&published);
	atomic_fetch_add(&unit.disk.offset_ns, 20 * INT64_C(1000000000));
	for (unsigned i = 40; i < 80; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		(void)unit_put(&unit, name, 2 * MIB, i);
	}
	assert_int_equal(unit_lookup(&unit, "published"), 0);
	unit_pool_end(&unit, &unpublished, "unpublished");
	for (unsigned i = 0; i < 80; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		if (unit_lookup(&unit, name))
			unit_unlink(&unit, name);
	}
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* ---- Threads ---- */

#define WORKERS 4u
#define SLOT (256u << 10)
#define SLOTS 64u /* a worker */

struct worker {
	struct kv_version *version;
	uint64_t number;
	pthread_t thread;
};

/* Writes and reads slots of its own, with a stretch behind them that is allocated and punched. */
static void *work(void *arg)
{
	struct worker *worker = arg;
	uint64_t seed = worker->number + 1, base = worker->number * (SLOTS + 8) * SLOT;
	uint64_t seeds[SLOTS] = {0};

	for (unsigned i = 0; i < 300; i++) {
		unsigned slot = (unsigned)(unit_random(&seed) % SLOTS);
		uint64_t at = base + (uint64_t)slot * SLOT;

		if (unit_random(&seed) % 3 == 0) {
			uint64_t from = base + SLOTS * SLOT + unit_random(&seed) % SLOT;
			int mode = unit_random(&seed) % 2 ? PUNCH : FALLOC_FL_KEEP_SIZE;

			assert_int_equal(kv_version_allocate(worker->version, mode, from, SLOT), 0);
		}
		if (seeds[slot])
			unit_expect_pattern(worker->version, SLOT, at, seeds[slot]);
		else
			unit_expect_zeros(worker->version, SLOT, at);
		seeds[slot] = i + 1;
		assert_int_equal(unit_write_pattern(worker->version, SLOT, at, seeds[slot]), 0);
	}
	return NULL;
}

/* Several threads on one pool that is several times as large as DRAM, changing its ranges too. */
static void test_core_pools__threads(void **state)
{
	struct unit unit;
	struct worker workers[WORKERS];
	uint64_t size = (uint64_t)WORKERS * (SLOTS + 8) * SLOT;

	(void)state;
	unit_init(&unit,
		(struct unit_sizes){.store = 200 * MIB, .dram = 16 * MIB, .quota = size + 2 * MIB});
	struct unit_pool pool = unit_pool_new(&unit, "pool", size);
	for (unsigned i = 0; i < WORKERS; i++) {
		workers[i] = (struct worker){.version = pool.version, .number = i};
		assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (unsigned i = 0; i < WORKERS; i++)
		assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
	assert_true(unit_charged(&unit) <= 16 * MIB);
	assert_int_equal(kv_version_allocate(pool.version, 0, 0, size), 0);
	assert_int_equal(unit_attr(pool.version).blocks, size / KV_BLOCK_SIZE);
	unit_pool_end(&unit, &pool, "pool");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_pools__fallocate_is_a_promise),
		cmocka_unit_test(test_core_pools__memory_by_what_is_touched),
		cmocka_unit_test(test_core_pools__writes_never_fail_for_space),
		cmocka_unit_test(test_core_pools__enospc_evicts_nothing_in_vain),
		cmocka_unit_test(test_core_pools__accounts_are_exact),
		cmocka_unit_test(test_core_pools__never_old_bytes),
		cmocka_unit_test(test_core_pools__clone_into_a_range),
		cmocka_unit_test(test_core_pools__promise_outlives_fsync),
		cmocka_unit_test(test_core_pools__fsync_costs_what_changed),
		cmocka_unit_test(test_core_pools__two_writers),
		cmocka_unit_test(test_core_pools__punched_chunks_after_sync),
		cmocka_unit_test(test_core_pools__fsync_keeps_what_is_in_dram),
		cmocka_unit_test(test_core_pools__direct_reads_do_not_admit),
		cmocka_unit_test(test_core_pools__evicted_whole_or_not),
		cmocka_unit_test(test_core_pools__threads),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
