/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices that fail or lie: readers get ENOENT or EIO and never wrong bytes, writers hear of it by
 * sync, the rest lives on.
 */
#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "tests/unit/unit_core.h"

/* The sanitizers have a mmap of their own. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OWN_MMAP 0
#else
#define OWN_MMAP 1
#endif

static const struct unit_sizes roomy = {.store = 64 * MIB, .dram = 64 * MIB};

static void expect_enoent_soon(struct kv_file *file)
{
	struct kv_version *version;

	UNIT_WAIT_FOR(!unit_has_content(file));
	assert_int_equal(kv_file_current(file, &version), -ENOENT);
}

/* A flipped bit is a miss: ENOENT, the file loses its name and is counted; later its space is freed
 * by eviction. */
static void test_core_faults__checksum_mismatch_quarantines(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, roomy);
	uint64_t ino = unit_put(&unit, "bad", 3 * MIB, 1);
	uint64_t good = unit_put(&unit, "good", 3 * MIB, 2);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	atomic_store(&unit.disk.reads_flip, 1);
	assert_int_equal(kv_version_open(version, false, &access), -ENOENT);
	expect_enoent_soon(file);
	UNIT_WAIT_FOR(unit.names_gone);
	assert_int_equal(unit_lookup(&unit, "bad"), 0);
	assert_string_equal(unit.gone, "bad");
	assert_int_equal(unit.names_gone, 1);
	assert_int_equal(kv_stat_get(&unit.stats.checksum_errors), 1);
	assert_int_equal(kv_stat_get(&unit.stats.quarantined), 1);
	/* The damage stays found, although the device reads well again. */
	assert_int_equal(kv_version_open(version, false, &access), -ENOENT);
	uint8_t byte;
	assert_int_equal(kv_version_read(version, &byte, 1, 0), -EIO);
	kv_version_unref(version);
	kv_file_put(file);
	unit_expect_file(&unit, good, 3 * MIB, 2);
	unit_chill(&unit);
	file = unit_file(&unit, ino);
	assert_int_equal(kv_file_current(file, &version), -ENOENT);
	kv_file_put(file);
	unit_expect_file(&unit, good, 3 * MIB, 2);
	unit_done(&unit);
}

/* The space of a quarantined file is taken also while somebody knows the file, touched or not. */
static void test_core_faults__quarantined_space_is_taken(void **state)
{
	(void)state;
	for (unsigned touched = 0; touched < 2; touched++) {
		struct unit unit;
		struct kv_version *version;
		struct kv_inode inode;
		enum kv_access access;

		unit_init(&unit, roomy);
		uint64_t pinned = unit_put(&unit, "pinned", 40 * MIB, 3);
		uint64_t ino = unit_put(&unit, "bad", 12 * MIB, 1);
		unit_sync(&unit);
		assert_int_equal(kv_index_pin(unit_index(&unit), pinned, true, true, &inode), 0);
		unit_chill(&unit);
		struct kv_file *file = unit_file(&unit, ino);
		version = unit_current(file);
		if (touched)
			kv_file_touch(file);
		atomic_store(&unit.disk.reads_flip, 1);
		assert_int_equal(kv_version_open(version, false, &access), -ENOENT);
		expect_enoent_soon(file);
		UNIT_WAIT_FOR(unit.names_gone);
		kv_version_unref(version);
		uint64_t next = unit_put(&unit, "next", 13 * MIB, 2);
		unit_sync(&unit);
		unit_expect_file(&unit, next, 13 * MIB, 2);
		kv_file_put(file);
		unit_done(&unit);
	}
}

/* A flipped bit under a read that has begun is EIO. */
static void test_core_faults__checksum_mismatch_in_a_stream(void **state)
{
	struct unit unit;
	enum kv_access access;
	uint8_t buffer[4096];

	(void)state;
	unit_init(&unit,
		(struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB, .stream_above = MIB});
	uint64_t ino = unit_put(&unit, "bad", 30 * MIB, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	for (unsigned direct = 0; direct < 2; direct++) {
		struct kv_file *file = unit_file(&unit, ino);
		struct kv_version *version = unit_current(file);
		assert_int_equal(kv_version_open(version, false, &access), 0);
		assert_int_equal(access, KV_ACCESS_STREAM);
		unit_expect_pattern(version, MIB, 0, 1);
		if (direct == 0) {
			/* A read error is not damage: the file stays, the next read may succeed. */
			atomic_store(&unit.disk.reads_fail, 1000);
			assert_int_equal(kv_version_read(version, buffer, 4096, 20 * MIB), -EIO);
			atomic_store(&unit.disk.reads_fail, 0);
			unit_expect_pattern(version, 4096, 20 * MIB, 1);
		} else {
			atomic_store(&unit.disk.reads_flip, 1);
			assert_int_equal(kv_version_read(version, buffer, 4096, 25 * MIB), -EIO);
			expect_enoent_soon(file);
		}
		kv_version_close(version);
		kv_version_unref(version);
		kv_file_put(file);
	}
	UNIT_WAIT_FOR(unit.names_gone);
	assert_int_equal(unit_lookup(&unit, "bad"), 0);
	unit_done(&unit);
}

/* A device that cannot read makes the open fail, deletes nothing, and one bad moment is survived by
 * a retry. */
static void test_core_faults__read_error(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, roomy);
	uint64_t ino = unit_put(&unit, "a", 3 * MIB, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	atomic_store(&unit.disk.reads_fail, 1000);
	assert_int_equal(kv_version_open(version, false, &access), -ENOENT);
	atomic_store(&unit.disk.reads_fail, 1);
	assert_int_equal(unit_lookup(&unit, "a"), ino);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	unit_expect_pattern(version, 3 * MIB, 0, 1);
	assert_int_equal(kv_stat_get(&unit.stats.quarantined), 0);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

#if OWN_MMAP

/* So many shared mappings fail. */
static atomic_int maps_fail;

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
	if (flags & MAP_SHARED && atomic_load(&maps_fail) > 0) {
		atomic_fetch_sub(&maps_fail, 1);
		errno = ENOMEM;
		return MAP_FAILED;
	}
	return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}

/* Chunks that are on their way already when their object cannot be mapped go nowhere, and whoever
 * tries again gets them. */
static void test_core_faults__early_read_without_pages(void **state)
{
	struct unit unit;
	enum kv_access access;

	(void)state;
	unit_init(&unit, roomy);
	uint64_t ino = unit_put(&unit, "a", 2 * MIB, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	uint64_t reads = unit.disk.reads;
	/* An open tries twice. */
	atomic_store(&maps_fail, 2);
	assert_int_equal(kv_version_open(version, false, &access), -ENOENT);
	assert_int_equal(atomic_load(&maps_fail), 0);
	/* No chunk was asked for again when it could go nowhere. */
	assert_true(unit.disk.reads - reads <= 4);
	assert_int_equal(kv_stat_get(&unit.stats.fill_chunks), 0);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	unit_expect_pattern(version, 2 * MIB, 0, 1);
	assert_int_equal(kv_stat_get(&unit.stats.quarantined), 0);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
}

#endif

/* A first version that cannot be written vanishes, with an error for who syncs; the space comes
 * back. */
static void test_core_faults__write_error_of_a_new_file(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, roomy);
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	assert_int_equal(unit_write_pattern(version, 3 * MIB, 0, 1), 0);
	atomic_store(&unit.disk.writes_fail, 1000000);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), -EIO);
	atomic_store(&unit.disk.writes_fail, 0);
	/* Who has it open still reads it. */
	unit_expect_pattern(version, 3 * MIB, 0, 1);
	expect_enoent_soon(file);
	kv_version_unref(version);
	kv_file_put(file);
	assert_int_equal(unit_lookup(&unit, "a"), 0);
	assert_int_equal(kv_stat_get(&unit.stats.writeback_errors), 1);
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* A rewrite that cannot be written leaves the old version current; one failed attempt is survived.
 */
static void test_core_faults__write_error_of_a_rewrite(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, roomy);
	uint64_t ino = unit_put(&unit, "a", 3 * MIB, 1);
	unit_sync(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *base = unit_current(file);
	struct kv_version *version = unit_new(file, base);
	assert_int_equal(unit_write_pattern(version, MIB, MIB, 2), 0);
	atomic_store(&unit.disk.writes_fail, 1000000);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), -EIO);
	atomic_store(&unit.disk.writes_fail, 0);
	kv_version_unref(version);
	kv_version_unref(base);
	unit_expect_file(&unit, ino, 3 * MIB, 1);
	unit_expect_used(&unit, 3 * 256);

	base = unit_current(file);
	version = unit_new(file, base);
	assert_int_equal(unit_write_pattern(version, MIB, MIB, 3), 0);
	atomic_store(&unit.disk.writes_fail, 1);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	unit_expect_pattern(version, MIB, MIB, 3);
	kv_version_unref(version);
	kv_version_unref(base);
	kv_file_put(file);
	unit_expect_used(&unit, 3 * 256);
	unit_done(&unit);
}

/* A version that is based on a lost one is lost too: nobody else's bytes stand in for it. */
static void test_core_faults__lost_base(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, roomy);
	uint64_t ino = unit_put(&unit, "a", 3 * MIB, 1);
	unit_sync(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *base = unit_current(file);
	struct kv_version *lost = unit_new(file, base);
	assert_int_equal(unit_write_pattern(lost, 100, 0, 2), 0);
	atomic_store(&unit.disk.writes_fail, 1000000);
	assert_int_equal(unit_publish(lost), 0);
	struct kv_version *next = unit_new(file, lost);
	assert_int_equal(unit_write_pattern(next, 100, 2 * MIB, 3), 0);
	assert_int_equal(kv_version_sync(lost), -EIO);
	atomic_store(&unit.disk.writes_fail, 0);
	assert_int_equal(unit_publish(next), 0);
	assert_int_equal(kv_version_sync(next), -EIO);
	kv_version_unref(base);
	kv_version_unref(lost);
	kv_version_unref(next);
	kv_file_put(file);
	unit_expect_file(&unit, ino, 3 * MIB, 1);
	unit_expect_used(&unit, 3 * 256);
	unit_done(&unit);
}

/* When a flush fails, what it should have made durable is lost, also if a later flush succeeds. */
static void test_core_faults__flush_error(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, roomy);
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	assert_int_equal(unit_write_pattern(version, MIB, 0, 1), 0);
	atomic_store(&unit.disk.flushes_fail, 1);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), -EIO);
	kv_version_unref(version);
	kv_file_put(file);
	uint64_t other = unit_put(&unit, "b", MIB, 2);
	unit_sync(&unit);
	assert_int_equal(unit_lookup(&unit, "b"), other);
	unit_expect_used(&unit, 256);
	unit_done(&unit);
}

/* An early write-back that fails shows at the next write or the publish, and harms nothing else. */
static void test_core_faults__early_write_error(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 128 * MIB, .dram = 16 * MIB});
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	atomic_store(&unit.disk.writes_fail, 1000000);
	int r = unit_write_pattern(version, 40 * MIB, 0, 1);
	assert_int_equal(r, -EIO);
	assert_int_equal(unit_publish(version), -EIO);
	atomic_store(&unit.disk.writes_fail, 0);
	kv_version_unref(version);
	kv_file_put(file);
	unit_unlink(&unit, "a");
	ino = unit_put(&unit, "b", 40 * MIB, 2);
	unit_expect_file(&unit, ino, 40 * MIB, 2);
	unit_sync(&unit);
	unit_expect_used(&unit, 40 * 256);
	unit_done(&unit);
}

/* Threads that could not make their rings at first make them when there is work: nothing is lost.
 */
static void test_core_faults__late_rings(void **state)
{
	const int many = 1000;
	struct unit unit;

	(void)state;
	unit_init(&unit, roomy);
	uint64_t old = unit_put(&unit, "old", 3 * MIB, 1);
	unit_sync(&unit);
	unit_unmount(&unit);
	atomic_store(&unit.disk.queues_fail, many);
	unit_mount(&unit);
	/* Four threads fill, and two write. */
	UNIT_WAIT_FOR(atomic_load(&unit.disk.queues_fail) <= many - 6);
	assert_int_equal(atomic_load(&unit.disk.queues_fail), many - 6);
	atomic_store(&unit.disk.queues_fail, 0);
	uint64_t ino = unit_put(&unit, "new", 3 * MIB, 2);
	unit_sync(&unit);
	assert_int_equal(kv_stat_get(&unit.stats.writeback_errors), 0);
	unit_expect_file(&unit, old, 3 * MIB, 1);
	unit_chill(&unit);
	unit_expect_file(&unit, ino, 3 * MIB, 2);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_faults__checksum_mismatch_quarantines),
		cmocka_unit_test(test_core_faults__quarantined_space_is_taken),
		cmocka_unit_test(test_core_faults__checksum_mismatch_in_a_stream),
		cmocka_unit_test(test_core_faults__read_error),
#if OWN_MMAP
		cmocka_unit_test(test_core_faults__early_read_without_pages),
#endif
		cmocka_unit_test(test_core_faults__write_error_of_a_new_file),
		cmocka_unit_test(test_core_faults__write_error_of_a_rewrite),
		cmocka_unit_test(test_core_faults__lost_base),
		cmocka_unit_test(test_core_faults__flush_error),
		cmocka_unit_test(test_core_faults__early_write_error),
		cmocka_unit_test(test_core_faults__late_rings),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
