/* SPDX-License-Identifier: Apache-2.0 */
/* What a stored file costs in the index: page fill included, as an engine fills it. */
#include "unit_index.h"

#define FILES 30000u
/* Bytes of LMDB pages a file of one chunk, whose name is a hash in hexadecimal. */
#define BYTES_MAX 300u

static int setup(void **state)
{
	static struct unit unit;

	unit_create(&unit, 1, 1000000);
	unit_open(&unit);
	*state = &unit;
	return 0;
}

static int teardown(void **state)
{
	unit_close(*state);
	unit_remove(*state);
	return 0;
}

static void put_file(struct unit *unit, uint64_t parent, unsigned number)
{
	uint64_t x = (number + 1) * UINT64_C(0x9e3779b97f4a7c15);
	char name[80];
	struct kv_inode inode;

	(void)snprintf(name, sizeof(name), "%016llx%016llx%016llx%016llx", (unsigned long long)x,
		(unsigned long long)(x ^ x >> 7), (unsigned long long)(x * 3),
		(unsigned long long)(x * 5));
	/* Times as real ones lie: far from the epoch, close to each other. */
	unit->now = INT64_C(1800000000123456789) + (int64_t)number * 1234567;
	inode = unit_hold(unit, parent, name);
	(void)unit_write(unit, inode.ino, 1);
}

static double bytes_a_file(struct unit *unit, uint64_t before)
{
	struct kv_index_usage usage;

	unit_sync(unit);
	kv_index_usage(unit->index, &usage);
	return (double)(usage.size_bytes - before) / FILES;
}

static uint64_t bytes_now(struct unit *unit)
{
	struct kv_index_usage usage;

	unit_sync(unit);
	kv_index_usage(unit->index, &usage);
	return usage.size_bytes;
}

/* The directory has a quota, and every file is read once: the lists of its domain fill their pages.
 */
static void test_index_size__read_within_a_quota(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_quota_walk walk = {0};
	uint32_t number;
	uint64_t before;
	double bytes;

	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 1000000, &number), 0);
	assert_int_equal(kv_index_quota_step(unit->index, number, &walk), 0);
	before = bytes_now(unit);
	for (unsigned i = 0; i < FILES; i++)
		put_file(unit, dir.ino, i);
	for (uint64_t i = 0; i < FILES; i++)
		assert_int_equal(kv_index_touch(unit->index, dir.ino + 1 + i,
					 unit->now + (int64_t)i * 7654321, 1, INT64_MIN),
			0);
	bytes = bytes_a_file(unit, before);
	print_message("%.1f bytes a file\n", bytes);
	assert_true(bytes <= BYTES_MAX);
}

/* Files that come one after the other, in the root: every table stays full enough. */
static void test_index_size__written_once(void **state)
{
	struct unit *unit = *state;
	uint64_t before = bytes_now(unit);
	double bytes;

	for (unsigned i = 0; i < FILES; i++)
		put_file(unit, KV_ROOT_INO, i);
	bytes = bytes_a_file(unit, before);
	print_message("%.1f bytes a file\n", bytes);
	assert_true(bytes <= BYTES_MAX);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_size__written_once),
		TEST(test_index_size__read_within_a_quota),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
