/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Residency and eviction on request: what moves, what is refused, and what a failing device makes
 * of it; and uses that are told.
 */
#include "tests/unit/unit_core.h"

static const struct unit_sizes small = {.store = 64 * MIB, .dram = 16 * MIB};

/* A file that is stored and not in DRAM, open as by O_DIRECT. */
struct opened {
	struct kv_file *file;
	struct kv_version *version;
	uint64_t ino;
};

static struct opened open_cold(struct unit *unit, const char *name, uint64_t size)
{
	struct opened opened = {.ino = unit_put(unit, name, size, 1)};
	enum kv_access access;

	unit_chill(unit);
	opened.file = unit_file(unit, opened.ino);
	opened.version = unit_current(opened.file);
	assert_int_equal(kv_version_open(opened.version, true, &access), 0);
	assert_int_equal(access, KV_ACCESS_STREAM);
	return opened;
}

static void opened_done(struct opened *opened)
{
	kv_version_close(opened->version);
	kv_version_unref(opened->version);
	kv_file_put(opened->file);
}

static void expect_warm(
	struct kv_version *version, struct kv_warm range, struct kv_warm_result wanted)
{
	struct kv_warm_result result;

	assert_int_equal(kv_version_warm(version, &range, &result), 0);
	assert_int_equal(result.done, wanted.done);
	assert_int_equal(result.resident, wanted.resident);
	assert_int_equal(result.holes, wanted.holes);
}

/* The chunks of the range come in, and no others; when all are there, the next open is hot. */
static void test_warm__brings_in_what_is_asked_for(void **state)
{
	const uint64_t size = 4 * MIB + 5;
	enum kv_access access;
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	struct opened opened = open_cold(&unit, "a", size);
	expect_warm(opened.version, (struct kv_warm){0, size, true},
		(struct kv_warm_result){size, 0, 0});
	expect_warm(opened.version, (struct kv_warm){MIB + 7, 10, false},
		(struct kv_warm_result){10, 10, 0});
	expect_warm(opened.version, (struct kv_warm){0, size, true},
		(struct kv_warm_result){size, MIB, 0});
	assert_int_equal(unit.stats.fill_chunks, 1);
	expect_warm(opened.version, (struct kv_warm){size - 1, UINT64_MAX, false},
		(struct kv_warm_result){1, 1, 0});
	expect_warm(opened.version, (struct kv_warm){size, 1, false}, (struct kv_warm_result){0});
	expect_warm(
		opened.version, (struct kv_warm){UINT64_MAX, 1, false}, (struct kv_warm_result){0});
	assert_int_equal(unit.became_hot, 0);
	expect_warm(opened.version, (struct kv_warm){0, size, false},
		(struct kv_warm_result){size, size, 0});
	assert_true(unit.became_hot >= 1);
	assert_int_equal(unit.stats.fill_chunks, 5);
	opened_done(&opened);
	struct kv_file *file = unit_file(&unit, opened.ino);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	unit_expect_file(&unit, opened.ino, size, 1);
	unit_done(&unit);
}

/* A file that is larger than the tier: as much as there is room for, and no error. */
static void test_warm__what_does_not_fit_is_left_out(void **state)
{
	struct kv_warm_result result;
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	struct opened opened = open_cold(&unit, "a", 24 * MIB);
	const struct kv_warm range = {0, 24 * MIB, false};
	assert_int_equal(kv_version_warm(opened.version, &range, &result), 0);
	assert_int_equal(result.done, 24 * MIB);
	assert_true(result.resident < 17 * MIB);
	opened_done(&opened);
	unit_expect_file(&unit, opened.ino, 24 * MIB, 1);
	unit_done(&unit);
}

/* A device that fails, and bytes that are damaged. */
static void test_warm__errors(void **state)
{
	struct kv_warm_result result;
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	struct opened opened = open_cold(&unit, "a", 3 * MIB);
	const struct kv_warm range = {0, 3 * MIB, false};
	atomic_store(&unit.disk.reads_fail, 1000);
	assert_int_equal(kv_version_warm(opened.version, &range, &result), -EIO);
	atomic_store(&unit.disk.reads_fail, 0);
	expect_warm(opened.version, range, (struct kv_warm_result){3 * MIB, 3 * MIB, 0});
	opened_done(&opened);
	uint64_t bytes;
	assert_int_equal(kv_core_cool(unit.core, opened.ino, &bytes), 0);
	assert_int_equal(bytes, 3 * MIB);
	opened = open_cold(&unit, "b", 3 * MIB);
	atomic_store(&unit.disk.reads_flip, 1);
	assert_int_equal(kv_version_warm(opened.version, &range, &result), -EIO);
	/* Who waits is told first. */
	UNIT_WAIT_FOR(kv_stat_get(&unit.stats.quarantined) > 0);
	assert_int_equal(unit.stats.quarantined, 1);
	opened_done(&opened);
	unit_done(&unit);
}

/* Cold, unknown, open, being written, not durable, and not to be made durable. */
static void test_cool(void **state)
{
	enum kv_access access;
	struct unit unit;
	uint64_t bytes;

	(void)state;
	unit_init(&unit, small);
	assert_int_equal(kv_core_cool(unit.core, 4711, &bytes), 0);
	assert_int_equal(bytes, 0);
	uint64_t ino = unit_put(&unit, "a", 2 * MIB, 1);
	assert_int_equal(kv_core_cool(unit.core, ino, &bytes), 0);
	assert_int_equal(bytes, 2 * MIB);
	assert_int_equal(unit.stats.committed, 1);
	assert_int_equal(kv_core_cool(unit.core, ino, &bytes), 0);
	assert_int_equal(bytes, 0);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(kv_core_cool(unit.core, ino, &bytes), -EBUSY);
	kv_version_close(version);
	struct kv_version *next = unit_new(file, version);
	assert_int_equal(kv_core_cool(unit.core, ino, &bytes), -EBUSY);
	kv_version_unref(next);
	assert_int_equal(kv_core_cool(unit.core, ino, &bytes), 0);
	assert_int_equal(bytes, 2 * MIB);
	kv_version_unref(version);
	kv_file_put(file);
	atomic_store(&unit.disk.writes_fail, 1000);
	ino = unit_put(&unit, "b", MIB, 2);
	file = unit_file(&unit, ino);
	assert_int_equal(kv_core_cool(unit.core, ino, &bytes), -EIO);
	kv_file_put(file);
	atomic_store(&unit.disk.writes_fail, 0);
	unit_done(&unit);
}

static void unit_remount_with_lease(struct unit *unit, uint64_t lease_ms)
{
	unit_unmount(unit);
	unit->options.lease_ms = lease_ms;
	unit_mount(unit);
}

/* Everything of the file goes; what is in use, or was a moment ago, stays. */
static void test_evict(void **state)
{
	enum kv_access access;
	struct unit unit;
	uint64_t bytes = 0;

	(void)state;
	unit_init(&unit, small);
	unit_remount_with_lease(&unit, 60000);
	assert_int_equal(kv_core_evict(unit.core, 4711, true, &bytes), -ENOENT);
	assert_int_equal(kv_core_evict(unit.core, KV_ROOT_INO, true, &bytes), -EISDIR);
	uint64_t ino = unit_put(&unit, "a", 2 * MIB, 1);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	kv_file_opened(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	kv_file_touch(file);
	assert_int_equal(kv_core_evict(unit.core, ino, true, &bytes), -EBUSY);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_closed(file);
	assert_int_equal(kv_core_evict(unit.core, ino, false, &bytes), -EAGAIN);
	assert_int_equal(unit_lookup(&unit, "a"), ino);
	assert_int_equal(kv_core_evict(unit.core, ino, true, &bytes), 0);
	assert_int_equal(bytes, 2 * MIB);
	assert_int_equal(unit_lookup(&unit, "a"), 0);
	assert_string_equal(unit.gone, "a");
	assert_int_equal(unit.stats.evicted_store, 1);
	assert_int_equal(kv_core_evict(unit.core, ino, true, &bytes), -ENOENT);
	kv_file_put(file);
	unit_expect_used(&unit, 0);

	ino = unit_put(&unit, "b", MIB, 1);
	struct kv_inode inode;
	assert_int_equal(kv_index_pin(unit_index(&unit), ino, true, true, &inode), 0);
	assert_int_equal(kv_core_evict(unit.core, ino, true, &bytes), -EPERM);
	assert_int_equal(kv_index_pin(unit_index(&unit), ino, false, true, &inode), 0);
	assert_int_equal(kv_core_evict(unit.core, ino, false, &bytes), 0);
	assert_int_equal(kv_index_get(unit_index(&unit), ino, &inode), -ENOENT);

	atomic_store(&unit.disk.writes_fail, 1000);
	ino = unit_put(&unit, "c", MIB, 2);
	file = unit_file(&unit, ino);
	assert_int_equal(kv_core_evict(unit.core, ino, true, &bytes), -EIO);
	kv_file_put(file);
	atomic_store(&unit.disk.writes_fail, 0);
	unit_done(&unit);
}

static int64_t last_use(struct unit *unit, uint64_t ino)
{
	struct kv_inode inode;

	assert_int_equal(kv_index_get(unit_index(unit), ino, &inode), 0);
	return inode.last_use_ns;
}

/* A use that is told orders eviction; it never goes back, and never beyond now. */
static void test_used_at(void **state)
{
	struct unit unit;

	(void)state;
	unit_init(&unit, small);
	uint64_t older = unit_put(&unit, "older", MIB, 1);
	unit_sync(&unit);
	uint64_t newer = unit_put(&unit, "newer", MIB, 2);
	unit_sync(&unit);
	assert_true(last_use(&unit, older) < last_use(&unit, newer));
	struct kv_file *file = unit_file(&unit, older);
	const int64_t before = last_use(&unit, older);
	kv_file_used_at(file, before - 1);
	kv_file_used_at(file, INT64_MIN);
	assert_int_equal(last_use(&unit, older), before);
	kv_file_used_at(file, INT64_MAX);
	assert_true(last_use(&unit, older) > last_use(&unit, newer));
	assert_true(last_use(&unit, older) <= kv_core_now_ns(unit.core));
	struct kv_index_use oldest;
	assert_int_equal(kv_index_oldest(unit_index(&unit), NULL, NULL, &oldest, 1), 1);
	assert_int_equal(oldest.ino, newer);
	struct kv_inode inode;
	assert_int_equal(kv_index_get(unit_index(&unit), older, &inode), 0);
	assert_int_equal(inode.hits, 0);
	kv_file_put(file);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_warm__brings_in_what_is_asked_for),
		cmocka_unit_test(test_warm__what_does_not_fit_is_left_out),
		cmocka_unit_test(test_warm__errors),
		cmocka_unit_test(test_cool),
		cmocka_unit_test(test_evict),
		cmocka_unit_test(test_used_at),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
