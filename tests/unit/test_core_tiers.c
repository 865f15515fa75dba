/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two tiers when they are short: eviction from DRAM and from the store, streams, direct reads,
 * hold-back, ENOSPC.
 */
#include "fs/core_internal.h"
#include "tests/unit/unit_core.h"

static uint64_t charged(struct unit *unit)
{
	struct kv_dram_usage usage;

	kv_dram_usage(kv_core_dram(unit->core), &usage);
	return usage.charged;
}

/* Files that do not fit DRAM together push each other out, and come back from the device. */
static void test_core_tiers__dram_eviction(void **state)
{
	struct unit unit;
	uint64_t inos[12];
	char name[8];

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 128 * MIB, .dram = 16 * MIB});
	for (unsigned i = 0; i < 12; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		inos[i] = unit_put(&unit, name, 3 * MIB + i, i);
	}
	unit_sync(&unit);
	for (unsigned round = 0; round < 2; round++)
		for (unsigned i = 0; i < 12; i++)
			unit_expect_file(&unit, inos[i], 3 * MIB + i, i);
	assert_true(charged(&unit) <= 16 * MIB);
	assert_true(kv_stat_get(&unit.stats.evicted_dram) >= 12);
	assert_true(kv_stat_get(&unit.stats.fill_bytes) >= 24 * MIB);
	unit_done(&unit);
}

/* A version that is open and hot stays in DRAM while others come and go, and is passed through by
 * one id. */
static void test_core_tiers__hot_opens_are_pinned(void **state)
{
	struct unit unit;
	enum kv_access access;
	char name[8];

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 128 * MIB, .dram = 16 * MIB});
	struct kv_file *file = unit_file(&unit, unit_put(&unit, "hot", 3 * MIB + 5, 1));
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	int id = kv_version_backing(version);
	assert_true(id > 0);
	assert_int_equal(kv_version_backing(version), id);
	for (unsigned i = 0; i < 10; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		unit_expect_file(&unit, unit_put(&unit, name, 4 * MIB, i), 4 * MIB, i);
	}
	unit_sync(&unit);
	uint64_t filled = kv_stat_get(&unit.stats.fill_bytes);
	unit_expect_pattern(version, 3 * MIB + 5, 0, 1);
	assert_int_equal(kv_stat_get(&unit.stats.fill_bytes), filled);
	assert_int_equal(unit.backings, 1);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	for (unsigned i = 0; i < 6; i++) {
		(void)snprintf(name, sizeof(name), "g%u", i);
		(void)unit_put(&unit, name, 4 * MIB, i);
	}
	unit_sync(&unit);
	assert_int_equal(unit.backings, 0);
	unit_done(&unit);
}

/* A cold open waits for the fill and is hot then; the object is exactly as long as the file. */
static void test_core_tiers__cold_open_fills(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 64 * MIB, .devices = 2});
	uint64_t ino = unit_put(&unit, "a", 7 * MIB + 100, 1);
	uint64_t tiny = unit_put(&unit, "b", 100, 2);
	unit_sync(&unit);
	unit_chill(&unit);
	for (unsigned i = 0; i < 2; i++) {
		struct kv_file *file = unit_file(&unit, i ? tiny : ino);
		struct kv_version *version = unit_current(file);
		assert_int_equal(kv_version_open(version, false, &access), 0);
		assert_int_equal(access, KV_ACCESS_HOT);
		assert_true(kv_version_backing(version) > 0);
		unit_expect_pattern(version, unit_attr(version).size, 0, 1 + i);
		kv_version_close(version);
		kv_version_unref(version);
		kv_file_put(file);
	}
	assert_int_equal(charged(&unit), 7 * MIB + 2 * KV_BLOCK_SIZE);
	assert_int_equal(kv_stat_get(&unit.stats.open_cold), 2);
	unit_done(&unit);
}

/* A file larger than DRAM can be written, published, and read as a stream, forwards and at random.
 */
static void test_core_tiers__file_larger_than_dram(void **state)
{
	struct unit unit;
	enum kv_access access;
	uint64_t seed = 99;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 200 * MIB, .dram = 16 * MIB, .devices = 2});
	uint64_t ino = unit_put(&unit, "a", 50 * MIB + 77, 1);
	assert_true(charged(&unit) <= 16 * MIB);
	unit_sync(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_STREAM);
	unit_expect_pattern(version, 50 * MIB + 77, 0, 1);
	for (unsigned i = 0; i < 60; i++)
		unit_expect_pattern(version, 5000, unit_random(&seed) % (50 * MIB), 1);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

/* A stream whose file fits becomes hot when its last chunk has come. */
static void test_core_tiers__stream_becomes_hot(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit,
		(struct unit_sizes){.store = 64 * MIB, .dram = 64 * MIB, .stream_above = 2 * MIB});
	uint64_t ino = unit_put(&unit, "a", 6 * MIB, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_STREAM);
	unit_expect_pattern(version, 6 * MIB, 0, 1);
	UNIT_WAIT_FOR(unit.became_hot);
	assert_true(unit.became_hot > 0);
	kv_version_close(version);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

/* Direct readers of a cold file do not bring it into DRAM. */
static void test_core_tiers__direct_reads_do_not_admit(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 64 * MIB});
	uint64_t ino = unit_put(&unit, "a", 6 * MIB + 5000, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, true, &access), 0);
	assert_int_equal(access, KV_ACCESS_STREAM);
	unit_expect_pattern(version, 6 * MIB + 5000, 0, 1);
	assert_int_equal(charged(&unit), 0);
	/* A piece of a chunk goes the common way. */
	unit_expect_pattern(version, 5000, MIB + 3, 1);
	assert_int_equal(charged(&unit), MIB);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

/* Holes cost nothing in either tier when they are many, and are filled with pages when they are
 * few. */
static void test_core_tiers__holes(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 256 * MIB});
	struct kv_file *file = unit_file(&unit, unit_create(&unit, "many"));
	struct kv_version *version = unit_new(file, NULL);
	assert_int_equal(kv_version_truncate(version, 40 * MIB), 0);
	assert_int_equal(unit_write_pattern(version, MIB, 20 * MIB, 1), 0);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_STREAM);
	assert_true(charged(&unit) <= 2 * MIB);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	file = unit_file(&unit, unit_create(&unit, "few"));
	version = unit_new(file, NULL);
	assert_int_equal(unit_write_pattern(version, 8 * MIB, 0, 2), 0);
	assert_int_equal(unit_write_pattern(version, 8 * MIB, 9 * MIB, 2), 0);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	kv_version_close(version);
	unit_sync(&unit);
	assert_int_equal(unit_attr(version).blocks, 16 * 256);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

/* K1: writing several times the store's size succeeds, the oldest files make room, and figures stay
 * true. */
static void test_core_tiers__store_eviction(void **state)
{
	struct unit unit;
	char name[16];
	unsigned left = 0;
	uint64_t used = 0;

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 32 * MIB, .quota = 40 * MIB});
	for (unsigned i = 0; i < 100; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		(void)unit_put(&unit, name, 2 * MIB, i);
		const struct kv_space_usage usage = unit_usage(&unit);
		assert_true(usage.used + usage.busy + usage.reserved <= usage.total);
	}
	unit_sync(&unit);
	kv_core_free(unit.core);
	unit.core = NULL;
	unit.store = kv_store_close(unit.store);
	unit_mount(&unit);
	for (unsigned i = 0; i < 100; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		uint64_t ino = unit_lookup(&unit, name);
		if (!ino)
			continue;
		/* Those that are left are the youngest. */
		left++;
		used += 512;
		unit_expect_file(&unit, ino, 2 * MIB, i);
	}
	assert_true(left >= 8);
	(void)snprintf(name, sizeof(name), "f%u", 99);
	assert_int_not_equal(unit_lookup(&unit, name), 0);
	assert_true(unit.names_gone >= 80);
	assert_int_equal(kv_stat_get(&unit.stats.evicted_store), 100 - left);
	unit_expect_used(&unit, used);
	unit_done(&unit);
}

/* Files that are open are not evicted: ENOSPC when nothing else is left, and never a short or torn
 * write. */
static void test_core_tiers__enospc_when_all_is_open(void **state)
{
	struct unit unit;
	struct kv_file *files[16];
	unsigned count = 0;
	char name[8];
	int r = 0;

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 32 * MIB, .quota = 24 * MIB});
	while (r == 0 && count < 16) {
		(void)snprintf(name, sizeof(name), "f%u", count);
		struct kv_file *file = unit_file(&unit, unit_create(&unit, name));
		struct kv_version *version = unit_new(file, NULL);
		uint8_t *memory = malloc(2 * MIB);
		unit_pattern(memory, 2 * MIB, 0, count);
		kv_file_opened(file);
		r = kv_version_write(version, memory, 2 * MIB, 0);
		free(memory);
		if (r == 0)
			assert_int_equal(unit_publish(version), 0);
		else
			assert_int_equal(unit_attr(version).size, 0);
		kv_version_unref(version);
		files[count++] = file;
	}
	assert_int_equal(r, -ENOSPC);
	assert_true(count >= 10);
	/* One of them is closed: there is room again. */
	kv_file_closed(files[0]);
	struct kv_version *version = unit_new(files[count - 1], NULL);
	assert_int_equal(unit_write_pattern(version, 2 * MIB, 0, 50), 0);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	kv_version_unref(version);
	assert_int_equal(unit_lookup(&unit, "f0"), 0);
	kv_file_put(files[0]);
	for (unsigned i = 1; i < count; i++) {
		kv_file_closed(files[i]);
		version = unit_current(files[i]);
		unit_expect_pattern(version, 2 * MIB, 0, i == count - 1 ? 50 : i);
		kv_version_unref(version);
		kv_file_put(files[i]);
	}
	/* More than there is at all. */
	files[0] = unit_file(&unit, unit_create(&unit, "x"));
	version = unit_new(files[0], NULL);
	assert_int_equal(kv_version_allocate(version, 0, 0, 100 * MIB), -ENOSPC);
	kv_version_unref(version);
	kv_file_put(files[0]);
	unit_done(&unit);
}

/* Files used lately outlive files used before them. */
static void test_core_tiers__used_files_are_kept(void **state)
{
	struct unit unit;
	char name[16];

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 32 * MIB, .quota = 40 * MIB});
	uint64_t keep = unit_put(&unit, "keep", 2 * MIB, 1000);
	for (unsigned i = 0; i < 40; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		(void)unit_put(&unit, name, 2 * MIB, i);
		struct kv_file *file = unit_file(&unit, keep);
		kv_file_touch(file);
		kv_file_put(file);
		unit_sync(&unit);
	}
	assert_int_equal(unit_lookup(&unit, "keep"), keep);
	unit_expect_file(&unit, keep, 2 * MIB, 1000);
	assert_int_equal(unit_lookup(&unit, "f0"), 0);
	unit_done(&unit);
}

static void *put_large(void *arg)
{
	(void)unit_put(arg, "a", 20 * MIB, 1);
	return NULL;
}

/* Writers wait while too much is dirty: the limit holds, and they go on when the device does. */
static void test_core_tiers__writers_are_held_back(void **state)
{
	struct unit unit;
	struct kv_core_usage usage;
	pthread_t thread;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 128 * MIB, .dram = 16 * MIB});
	atomic_store(&unit.disk.hold, true);
	assert_int_equal(pthread_create(&thread, NULL, put_large, &unit), 0);
	UNIT_WAIT_FOR(kv_stat_get(&unit.stats.throttled));
	assert_true(kv_stat_get(&unit.stats.throttled) > 0);
	kv_core_usage(unit.core, &usage);
	assert_int_equal(usage.dirty_limit, 8 * MIB);
	assert_true(usage.dirty_bytes > usage.dirty_limit);
	assert_true(usage.dirty_bytes <= usage.dirty_limit + MIB);
	atomic_store(&unit.disk.hold, false);
	assert_int_equal(pthread_join(thread, NULL), 0);
	unit_sync(&unit);
	kv_core_usage(unit.core, &usage);
	assert_int_equal(usage.dirty_bytes, 0);
	unit_done(&unit);
}

/*
 * Lent bytes are the file's, end with it, and stay while the tier reclaims what it can; what is not
 * all there is not lent.
 */
static void test_core_tiers__lend(void **state)
{
	const uint64_t size = 3 * MIB + 12345;
	struct kv_loan loan, other;
	uint8_t *expected = malloc(MIB);
	struct unit unit;

	(void)state;
	assert_non_null(expected);
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	uint64_t ino = unit_put(&unit, "a", size, 1), sparse = unit_create(&unit, "sparse");
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);

	unit_pattern(expected, MIB, MIB - 4096, 1);
	assert_int_equal(kv_version_lend(version, MIB - 4096, MIB, &loan), 0);
	assert_int_equal(loan.size, MIB);
	/* More than the tier has room for. */
	(void)unit_put(&unit, "b", 8 * MIB, 2);
	(void)unit_put(&unit, "c", 8 * MIB, 3);
	assert_memory_equal(loan.memory, expected, MIB);
	assert_int_equal(kv_version_lend(version, size - 100, MIB, &other), 0);
	assert_int_equal(other.size, 100);
	unit_pattern(expected, 100, size - 100, 1);
	assert_memory_equal(other.memory, expected, 100);
	kv_loan_end(&other);
	kv_loan_end(&loan);
	assert_int_equal(kv_version_lend(version, size, MIB, &loan), -EAGAIN);
	kv_version_unref(version);
	kv_file_put(file);

	file = unit_file(&unit, sparse);
	version = unit_new(file, NULL);
	assert_int_equal(unit_write_pattern(version, 2 * MIB, 2 * MIB, 1), 0);
	assert_int_equal(kv_version_lend(version, 2 * MIB, MIB, &loan), -EAGAIN);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_lend(version, 0, MIB, &loan), -EAGAIN);
	assert_int_equal(kv_version_lend(version, MIB, 2 * MIB, &loan), -EAGAIN);
	assert_int_equal(kv_version_lend(version, 2 * MIB, 2 * MIB, &loan), 0);
	kv_loan_end(&loan);
	kv_version_unref(version);
	kv_file_put(file);
	free(expected);
	unit_done(&unit);
}

/* Drops a version from DRAM whenever it is idle, until it is told to stop. */
struct dropper {
	struct kv_version *version;
	_Atomic bool stop;
	_Atomic unsigned dropped;
};

static void *drop(void *arg)
{
	struct dropper *dropper = arg;

	while (!atomic_load(&dropper->stop))
		if (kv_version_drop_object(dropper->version) > 0)
			atomic_fetch_add(&dropper->dropped, 1);
	return NULL;
}

/* Nobody has it open, as what a writer goes on from: a fill keeps the object from its first moment
 * on. */
static void test_core_tiers__dropped_while_it_fills(void **state)
{
	struct unit unit;
	pthread_t threads[3];
	const size_t size = 16 * MIB;
	uint8_t *memory = malloc(size);

	(void)state;
	assert_non_null(memory);
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 256 * MIB});
	/* Holes are looked at first. */
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	assert_int_equal(unit_write_pattern(version, KV_BLOCK_SIZE, size - KV_BLOCK_SIZE, 1), 0);
	assert_int_equal(unit_publish(version), 0);
	kv_version_unref(version);
	kv_file_put(file);
	unit_chill(&unit);
	file = unit_file(&unit, ino);
	struct dropper dropper = {.version = unit_current(file)};
	for (unsigned i = 0; i < 3; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, drop, &dropper), 0);
	for (unsigned i = 0; i < 300; i++)
		assert_int_equal(kv_version_read(dropper.version, memory, size, 0), size);
	unit_expect_pattern(dropper.version, KV_BLOCK_SIZE, size - KV_BLOCK_SIZE, 1);
	atomic_store(&dropper.stop, true);
	for (unsigned i = 0; i < 3; i++)
		assert_int_equal(pthread_join(threads[i], NULL), 0);
	assert_true(dropper.dropped > 0);
	free(memory);
	kv_version_unref(dropper.version);
	kv_file_put(file);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_tiers__dram_eviction),
		cmocka_unit_test(test_core_tiers__hot_opens_are_pinned),
		cmocka_unit_test(test_core_tiers__cold_open_fills),
		cmocka_unit_test(test_core_tiers__file_larger_than_dram),
		cmocka_unit_test(test_core_tiers__stream_becomes_hot),
		cmocka_unit_test(test_core_tiers__direct_reads_do_not_admit),
		cmocka_unit_test(test_core_tiers__holes),
		cmocka_unit_test(test_core_tiers__store_eviction),
		cmocka_unit_test(test_core_tiers__enospc_when_all_is_open),
		cmocka_unit_test(test_core_tiers__used_files_are_kept),
		cmocka_unit_test(test_core_tiers__writers_are_held_back),
		cmocka_unit_test(test_core_tiers__lend),
		cmocka_unit_test(test_core_tiers__dropped_while_it_fills),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
