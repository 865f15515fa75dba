/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core's common way: write, publish, read, rewrite, delete, sync, reopen.
 */
#include <time.h>

#include "tests/unit/unit_core.h"

static const struct unit_sizes small = {.store = 64 * MIB, .dram = 16 * MIB};

/* What was written is read back: before the publish by the writer, then by all, then after a
 * remount. */
static void test_core__file_survives_remount(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL), *current;
	assert_int_equal(unit_write_pattern(version, 3 * MIB + 12345, 0, 1), 0);
	unit_expect_pattern(version, 3 * MIB + 12345, 0, 1);
	assert_int_equal(kv_file_current(file, &current), -ENOENT);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(unit_publish(version), -EALREADY);
	current = unit_current(file);
	assert_ptr_equal(current, version);
	assert_true(kv_file_is_current(file, current));
	assert_int_equal(unit_attr(current).number, 1);
	assert_int_equal(unit_attr(current).blocks, 3 * 256 + 4);
	assert_int_equal(kv_version_sync(current), 0);
	assert_true(unit_attr(current).committed);
	assert_int_equal(kv_version_write(current, "x", 1, 0), -ESTALE);
	kv_version_unref(current);
	kv_version_unref(version);
	kv_file_put(file);
	unit_unmount(&unit);

	unit_mount(&unit);
	assert_int_equal(unit_lookup(&unit, "a"), ino);
	unit_expect_file(&unit, ino, 3 * MIB + 12345, 1);
	unit_expect_used(&unit, 3 * 256 + 4);
	unit_done(&unit);
}

/* Empty files and files of one byte cost what they hold. */
static void test_core__small_files(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	uint64_t empty = unit_put(&unit, "empty", 0, 0);
	uint64_t one = unit_put(&unit, "one", 1, 7);
	unit_sync(&unit);
	unit_expect_used(&unit, 1);
	unit_chill(&unit);
	unit_expect_file(&unit, empty, 0, 0);
	unit_expect_file(&unit, one, 1, 7);
	unit_done(&unit);
}

/* A rewrite leaves readers of the old version alone, and shares the chunks it does not change. */
static void test_core__rewrite_keeps_old_version_readable(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_put(&unit, "a", 3 * MIB, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *old = unit_current(file);
	assert_int_equal(kv_version_open(old, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	for (unsigned round = 0; round < 3; round++) {
		struct kv_version *base = unit_current(file);
		struct kv_version *version = unit_new(file, base);
		assert_false(unit_attr(version).changed);
		assert_int_equal(unit_attr(version).blocks, 3 * 256);
		assert_int_equal(unit_write_pattern(version, 100, MIB + 50, 2 + round), 0);
		assert_true(unit_attr(version).changed);
		unit_expect_pattern(version, MIB, 0, 1);
		assert_int_equal(unit_publish(version), 0);
		assert_int_equal(kv_version_sync(version), 0);
		unit_expect_pattern(version, 100, MIB + 50, 2 + round);
		unit_expect_pattern(version, 50, MIB, 1);
		unit_expect_pattern(version, MIB, 2 * MIB, 1);
		kv_version_unref(version);
		kv_version_unref(base);
	}
	unit_expect_pattern(old, 3 * MIB, 0, 1);
	assert_int_equal(unit_usage(&unit).used, 3 * 256);
	kv_version_close(old);
	unit_expect_pattern(old, 3 * MIB, 0, 1);
	kv_version_unref(old);
	kv_file_put(file);
	unit_expect_used(&unit, 3 * 256);
	unit_chill(&unit);
	file = unit_file(&unit, ino);
	old = unit_current(file);
	assert_int_equal(unit_attr(old).number, 4);
	unit_expect_pattern(old, 100, MIB + 50, 4);
	unit_expect_pattern(old, MIB, 0, 1);
	kv_version_unref(old);
	kv_file_put(file);
	unit_done(&unit);
}

/* An old version whose map was never loaded is still whole after the index has forgotten it. */
static void test_core__old_version_outlives_its_index_records(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_put(&unit, "a", 2 * MIB, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *old = unit_current(file);
	struct kv_version *version = unit_new(file, NULL);
	assert_int_equal(unit_write_pattern(version, MIB, 0, 2), 0);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	kv_version_unref(version);
	unit_expect_pattern(old, 2 * MIB, 0, 1);
	/* Deleting the file does not hurt its reader either. */
	unit_unlink(&unit, "a");
	UNIT_WAIT_FOR(!unit_has_content(file));
	unit_expect_pattern(old, 2 * MIB, 0, 1);
	kv_version_unref(old);
	kv_file_put(file);
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* Versions published one after the other without a sync end up as the last one, numbers growing. */
static void test_core__publishes_in_order(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *base = NULL;
	for (unsigned i = 0; i < 40; i++) {
		struct kv_version *version = unit_new(file, i % 3 ? base : NULL);
		assert_int_equal(unit_write_pattern(version, 100000, i * 1000, i), 0);
		assert_int_equal(unit_publish(version), 0);
		assert_int_equal(unit_attr(version).number, i + 1);
		kv_version_unref(base);
		base = version;
	}
	unit_expect_pattern(base, 100000, 39000, 39);
	assert_int_equal(kv_version_sync(base), 0);
	uint64_t size = unit_attr(base).size, blocks = unit_attr(base).blocks;
	kv_version_unref(base);
	kv_file_put(file);
	unit_chill(&unit);
	file = unit_file(&unit, ino);
	base = unit_current(file);
	assert_int_equal(unit_attr(base).size, size);
	assert_int_equal(unit_attr(base).number, 40);
	unit_expect_pattern(base, 100000, 39000, 39);
	kv_version_unref(base);
	kv_file_put(file);
	unit_expect_used(&unit, blocks);
	unit_done(&unit);
}

/* Two writers that start from the same version do not mix their bytes; the last publish wins whole.
 */
static void test_core__concurrent_rewrites_do_not_mix(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_put(&unit, "a", 3 * MIB, 1);
	unit_sync(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *base = unit_current(file);
	struct kv_version *first = unit_new(file, base), *second = unit_new(file, base);
	kv_version_unref(base);
	assert_int_equal(unit_write_pattern(first, MIB, 0, 2), 0);
	assert_int_equal(unit_write_pattern(second, MIB, 2 * MIB, 3), 0);
	assert_int_equal(unit_publish(first), 0);
	assert_int_equal(unit_publish(second), 0);
	assert_int_equal(kv_version_sync(second), 0);
	unit_expect_pattern(second, 2 * MIB, 0, 1);
	unit_expect_pattern(second, MIB, 2 * MIB, 3);
	unit_expect_pattern(first, MIB, 0, 2);
	unit_expect_pattern(first, 2 * MIB, MIB, 1);
	kv_version_unref(first);
	kv_version_unref(second);
	kv_file_put(file);
	unit_chill(&unit);
	file = unit_file(&unit, ino);
	base = unit_current(file);
	unit_expect_pattern(base, 2 * MIB, 0, 1);
	unit_expect_pattern(base, MIB, 2 * MIB, 3);
	kv_version_unref(base);
	kv_file_put(file);
	unit_expect_used(&unit, 3 * 256);
	unit_done(&unit);
}

/* What was seen of a file spares a look while the index has not moved, and is not believed later.
 */
static void test_core__seen_is_believed_until_the_index_moves(void **state)
{
	struct kv_inode inode;
	struct kv_seen seen = {.inode = &inode};
	struct kv_version *version;
	struct kv_file *file;
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_put(&unit, "a", 5, 1);
	unit_sync(&unit);
	unit_unmount(&unit);
	unit_mount(&unit);
	seen.sequence = kv_index_sequence(unit_index(&unit));
	assert_int_equal(kv_index_get(unit_index(&unit), ino, &inode), 0);
	inode.mtime_ns = 4711; /* tells where the version came from */
	file = unit_file(&unit, ino);
	assert_int_equal(kv_file_current_seen(file, &seen, &version), 0);
	assert_int_equal(unit_attr(version).mtime_ns, 4711);
	assert_int_equal(unit_attr(version).size, 5);
	kv_version_unref(version);
	kv_file_put(file);
	unit_unmount(&unit);

	unit_mount(&unit);
	seen.sequence = kv_index_sequence(unit_index(&unit));
	(void)unit_create(&unit, "another");
	file = unit_file(&unit, ino);
	assert_int_equal(kv_file_current_seen(file, &seen, &version), 0);
	assert_int_not_equal(unit_attr(version).mtime_ns, 4711);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

/* A version that is not published leaves nothing behind. */
static void test_core__discard_leaves_nothing(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	assert_int_equal(unit_write_pattern(version, 5 * MIB, 0, 1), 0);
	assert_int_equal(unit_usage(&unit).used, 0);
	kv_version_unref(version);
	assert_int_equal(kv_file_current(file, &version), -ENOENT);
	kv_file_put(file);
	unit_expect_used(&unit, 0);
	unit_unlink(&unit, "a");
	unit_done(&unit);
}

/* Deleting gives the space back to the last block, at once or when the last user is gone. */
static void test_core__orphans_give_space_back(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, small);
	(void)unit_put(&unit, "a", 2 * MIB + 1, 1);
	uint64_t ino = unit_put(&unit, "b", 2 * MIB, 2);
	unit_sync(&unit);
	unit_unlink(&unit, "a");
	unit_expect_used(&unit, 512);
	struct kv_file *file = unit_file(&unit, ino);
	kv_file_opened(file);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	unit_unlink(&unit, "b");
	unit_expect_used(&unit, 512);
	unit_expect_pattern(version, 2 * MIB, 0, 2);
	kv_version_close(version);
	kv_file_closed(file);
	kv_version_unref(version);
	kv_file_put(file);
	unit_expect_used(&unit, 0);
	/* One that is deleted before it is written. */
	atomic_store(&unit.disk.delay_us, 20000);
	(void)unit_put(&unit, "c", 3 * MIB, 3);
	unit_unlink(&unit, "c");
	atomic_store(&unit.disk.delay_us, 0);
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* Orphans that a crash left are freed after the next mount. */
static void test_core__orphans_of_a_crash(void **state)
{
	struct unit unit;
	struct kv_inode inode;

	(void)state;
	unit_init(&unit, small);
	(void)unit_put(&unit, "a", 2 * MIB, 1);
	unit_sync(&unit);
	/* As after a crash: the name is gone and nobody was told. */
	assert_int_equal(kv_index_unlink(unit_index(&unit), KV_ROOT_INO, "a", 1, false, 0,
				 kv_core_now_ns(unit.core), &inode),
		0);
	unit_unmount(&unit);
	unit_mount(&unit);
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* Uses reach the index, at most once a second, and none is lost. */
static void test_core__touch_counts(void **state)
{
	struct unit unit;
	struct kv_inode inode;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_put(&unit, "a", 100, 1);
	unit_sync(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	for (unsigned i = 0; i < 5; i++)
		kv_file_touch(file);
	assert_int_equal(kv_index_get(unit_index(&unit), ino, &inode), 0);
	assert_int_equal(inode.hits, 1);
	atomic_store(&unit.disk.offset_ns, INT64_C(2000000000));
	kv_file_touch(file);
	assert_int_equal(kv_index_get(unit_index(&unit), ino, &inode), 0);
	assert_int_equal(inode.hits, 6);
	kv_file_touch(file);
	kv_file_put(file);
	unit_chill(&unit);
	assert_int_equal(kv_index_get(unit_index(&unit), ino, &inode), 0);
	assert_int_equal(inode.hits, 7);
	unit_done(&unit);
}

/* Explicit times survive the publish; a write after them does not leave them. */
static void test_core__explicit_times(void **state)
{
	struct unit unit;
	struct kv_inode inode;

	(void)state;
	unit_init(&unit, small);
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	kv_version_set_times(version, 5, 6);
	assert_int_equal(unit_write_pattern(version, 100, 0, 1), 0);
	assert_true(unit_attr(version).mtime_ns > 1000);
	kv_version_set_times(version, 77, INT64_MIN);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	assert_int_equal(kv_index_get(unit_index(&unit), ino, &inode), 0);
	assert_int_equal(inode.mtime_ns, 77);
	assert_true(inode.ctime_ns > 1000);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

static int64_t now_ms(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* What is published in one go is written together: nothing of it before all of it is there. */
static void test_core__files_published_together_wait_for_each_other(void **state)
{
	unsigned quick = 0;
	struct unit unit;
	char name[24];

	(void)state;
	unit_init(&unit, small);
	for (unsigned round = 0; round < 200; round++) {
		uint64_t writes = atomic_load(&unit.disk.writes);
		int64_t from_ms = now_ms();

		for (unsigned i = 0; i < 20; i++) {
			(void)snprintf(name, sizeof(name), "f%u.%u", round, i);
			(void)unit_put(&unit, name, 100, i);
		}
		bool early = atomic_load(&unit.disk.writes) != writes;
		/* When the machine paused meanwhile, it may have been for longer than they wait. */
		if (now_ms() - from_ms < 8) {
			assert_false(early);
			quick++;
		}
		unit_sync(&unit);
		assert_true(atomic_load(&unit.disk.writes) > writes);
	}
	assert_true(quick > 0);
	unit_expect_used(&unit, 200 * 20);
	unit_done(&unit);
}

/* Nobody waits for it, and others are published without end: it is written all the same. */
static void test_core__company_is_not_waited_for_without_end(void **state)
{
	const time_t until = time(NULL) + 60;
	struct unit unit;
	char name[16];

	(void)state;
	unit_init(&unit, small);
	struct kv_file *file = unit_file(&unit, unit_put(&unit, "first", 5000, 1));
	struct kv_version *first = unit_current(file);
	/* Empty ones, for dirty bytes end the wait too. */
	for (unsigned i = 0; !unit_attr(first).committed && time(NULL) < until; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		(void)unit_put(&unit, name, 0, 0);
	}
	assert_true(unit_attr(first).committed);
	kv_version_unref(first);
	kv_file_put(file);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core__file_survives_remount),
		cmocka_unit_test(test_core__small_files),
		cmocka_unit_test(test_core__rewrite_keeps_old_version_readable),
		cmocka_unit_test(test_core__old_version_outlives_its_index_records),
		cmocka_unit_test(test_core__publishes_in_order),
		cmocka_unit_test(test_core__concurrent_rewrites_do_not_mix),
		cmocka_unit_test(test_core__discard_leaves_nothing),
		cmocka_unit_test(test_core__orphans_give_space_back),
		cmocka_unit_test(test_core__seen_is_believed_until_the_index_moves),
		cmocka_unit_test(test_core__orphans_of_a_crash),
		cmocka_unit_test(test_core__touch_counts),
		cmocka_unit_test(test_core__explicit_times),
		cmocka_unit_test(test_core__files_published_together_wait_for_each_other),
		cmocka_unit_test(test_core__company_is_not_waited_for_without_end),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
