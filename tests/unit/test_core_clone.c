/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cloning: shared extents cost nothing, are counted right, and part when one side changes.
 */
#include "tests/unit/unit_core.h"

static struct kv_version *clone_of(
	struct kv_file *file, struct kv_version *from, uint64_t length, uint64_t *ret_copied)
{
	struct kv_version *version = unit_new(file, NULL);
	const struct kv_clone clone = {.from = from, .length = length};

	assert_int_equal(kv_version_clone(version, &clone, ret_copied), 0);
	return version;
}

/* A copy of a file takes no space, reads the same, and survives the deletion of the original. */
static void test_core_clone__whole_file_shares_all(void **state)
{
	struct unit unit;
	uint64_t copied;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB, .devices = 2});
	uint64_t a = unit_put(&unit, "a", 5 * MIB + 77, 1);
	struct kv_file *from_file = unit_file(&unit, a);
	struct kv_version *from = unit_current(from_file);
	uint64_t b = unit_create(&unit, "b");
	struct kv_file *file = unit_file(&unit, b);
	struct kv_version *version = clone_of(file, from, UINT64_MAX / 2, &copied);
	assert_int_equal(copied, 5 * MIB + 77);
	assert_int_equal(unit_attr(version).size, 5 * MIB + 77);
	assert_int_equal(unit_attr(version).blocks, 5 * 256 + 1);
	unit_expect_pattern(version, 5 * MIB + 77, 0, 1);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	unit_expect_pattern(version, 5 * MIB + 77, 0, 1);
	kv_version_unref(version);
	kv_version_unref(from);
	kv_file_put(file);
	kv_file_put(from_file);
	unit_expect_used(&unit, 5 * 256 + 1);
	unit_unlink(&unit, "a");
	unit_expect_used(&unit, 5 * 256 + 1);
	unit_chill(&unit);
	unit_expect_file(&unit, b, 5 * MIB + 77, 1);
	unit_unlink(&unit, "b");
	unit_expect_used(&unit, 0);
	unit_done(&unit);
}

/* The original may be deleted, and reaped, between the clone and its publish. */
static void test_core_clone__source_dies_before_publish(void **state)
{
	struct unit unit;
	uint64_t copied;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	uint64_t a = unit_put(&unit, "a", 3 * MIB, 1);
	struct kv_file *from_file = unit_file(&unit, a);
	struct kv_version *from = unit_current(from_file);
	struct kv_file *file = unit_file(&unit, unit_create(&unit, "b"));
	struct kv_version *version = clone_of(file, from, 3 * MIB, &copied);
	kv_version_unref(from);
	kv_file_put(from_file);
	unit_unlink(&unit, "a");
	for (unsigned i = 0; i < 50; i++) {
		/* Others want the space meanwhile. */
		char name[8];
		(void)snprintf(name, sizeof(name), "f%u", i % 10);
		if (i >= 10)
			unit_unlink(&unit, name);
		(void)unit_put(&unit, name, MIB, i);
	}
	unit_sync(&unit);
	unit_expect_pattern(version, 3 * MIB, 0, 1);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	unit_expect_pattern(version, 3 * MIB, 0, 1);
	kv_version_unref(version);
	kv_file_put(file);
	unit_expect_used(&unit, 13 * 256);
	unit_done(&unit);
}

/* Writing to a clone copies the chunk that changes, and only that. */
static void test_core_clone__parts_on_write(void **state)
{
	struct unit unit;
	uint64_t copied;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	uint64_t a = unit_put(&unit, "a", 4 * MIB, 1);
	struct kv_file *from_file = unit_file(&unit, a);
	struct kv_version *from = unit_current(from_file);
	struct kv_file *file = unit_file(&unit, unit_create(&unit, "b"));
	struct kv_version *version = clone_of(file, from, 4 * MIB, &copied);
	assert_int_equal(unit_write_pattern(version, 10, MIB + 5, 2), 0);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	unit_expect_pattern(version, MIB, 0, 1);
	unit_expect_pattern(version, 10, MIB + 5, 2);
	unit_expect_pattern(version, MIB - 15, MIB + 15, 1);
	unit_expect_used(&unit, 5 * 256);
	/* And a rewrite of the clone over its own committed version. */
	struct kv_version *second = unit_new(file, version);
	const struct kv_clone back = {
		.from = from, .from_offset = MIB, .to_offset = MIB, .length = MIB};
	assert_int_equal(kv_version_clone(second, &back, &copied), 0);
	assert_int_equal(copied, MIB);
	assert_int_equal(unit_publish(second), 0);
	assert_int_equal(kv_version_sync(second), 0);
	unit_expect_pattern(second, 4 * MIB, 0, 1);
	unit_expect_pattern(from, 4 * MIB, 0, 1);
	kv_version_unref(version);
	kv_version_unref(second);
	kv_version_unref(from);
	kv_file_put(file);
	kv_file_put(from_file);
	unit_expect_used(&unit, 4 * 256);
	unit_done(&unit);
}

/* Ranges at odd places are copied right, bytes around them stay. */
static void test_core_clone__odd_ranges(void **state)
{
	struct unit unit;
	uint64_t copied, seed = 5;
	uint8_t *model = malloc(8 * MIB), *source = malloc(5 * MIB + 999), *got = malloc(8 * MIB);

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	uint64_t a = unit_put(&unit, "a", 5 * MIB + 999, 1);
	unit_pattern(source, 5 * MIB + 999, 0, 1);
	struct kv_file *from_file = unit_file(&unit, a);
	struct kv_version *from = unit_current(from_file);
	struct kv_file *file = unit_file(&unit, unit_create(&unit, "b"));
	struct kv_version *version = unit_new(file, NULL);
	assert_int_equal(unit_write_pattern(version, 8 * MIB, 0, 9), 0);
	unit_pattern(model, 8 * MIB, 0, 9);
	for (unsigned i = 0; i < 30; i++) {
		struct kv_clone clone = {
			.from = from,
			.from_offset = unit_random(&seed) % (5 * MIB),
			.to_offset = unit_random(&seed) % (2 * MIB),
			.length = 1 + unit_random(&seed) % (4 * MIB),
		};
		if (i % 2) {
			clone.from_offset &= ~(MIB - 1);
			clone.to_offset &= ~(MIB - 1);
		}
		assert_int_equal(kv_version_clone(version, &clone, &copied), 0);
		assert_int_equal(
			copied, kv_min_u64(clone.length, 5 * MIB + 999 - clone.from_offset));
		memcpy(model + clone.to_offset, source + clone.from_offset, copied);
		assert_int_equal(kv_version_read(version, got, 8 * MIB, 0), 8 * MIB);
		assert_memory_equal(got, model, 8 * MIB);
	}
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	assert_int_equal(kv_version_read(version, got, 8 * MIB, 0), 8 * MIB);
	assert_memory_equal(got, model, 8 * MIB);
	kv_version_unref(version);
	kv_version_unref(from);
	kv_file_put(file);
	kv_file_put(from_file);
	unit_unlink(&unit, "a");
	unit_unlink(&unit, "b");
	unit_expect_used(&unit, 0);
	free(model);
	free(source);
	free(got);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_clone__whole_file_shares_all),
		cmocka_unit_test(test_core_clone__source_dies_before_publish),
		cmocka_unit_test(test_core_clone__parts_on_write),
		cmocka_unit_test(test_core_clone__odd_ranges),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
