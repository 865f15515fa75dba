/* SPDX-License-Identifier: Apache-2.0 */
/* Eviction: the use order, taking all names away, quarantine. */
#include "unit_index.h"

/* Times of use are kept in that. */
#define GRAIN 4096

static int try_evict(struct unit *unit, uint64_t ino, bool quarantine)
{
	return kv_index_evict(unit->index, ino, unit_get(unit, ino).last_use_ns, quarantine,
		++unit->now, NULL, NULL);
}

/* Published files come oldest use first, whichever layer they are in; nothing else comes. */
static void test_index_evict__oldest_first(void **state)
{
	struct unit *unit = *state;
	struct kv_inode inodes[20];
	struct kv_index_use uses[32];
	char name[24];
	size_t count = 0;

	(void)unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	(void)unit_make(unit, KV_ROOT_INO, "link", S_IFLNK | 0777);
	(void)unit_hold(unit, KV_ROOT_INO, "held");
	for (unsigned i = 0; i < 20; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		inodes[i] = unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644);
		if (i == 10)
			unit_sync(unit);
		/* Times on both sides of zero, in another order than the numbers. */
		assert_int_equal(kv_index_touch(unit->index, inodes[i].ino,
					 ((int64_t)(i * 7 % 20) - 10) * GRAIN, 1, INT64_MIN),
			0);
	}
	unit_unlink(unit, KV_ROOT_INO, "3"); /* used at -9 grains */
	for (int round = 0; round < 2; round++) {
		assert_int_equal(kv_index_oldest(unit->index, NULL, NULL, uses, 32), 19);
		for (size_t i = 0; i < 19; i++) {
			assert_int_equal(uses[i].last_use_ns, ((int64_t)i - 10 + (i >= 1)) * GRAIN);
			assert_int_equal(
				unit_get(unit, uses[i].ino).last_use_ns, uses[i].last_use_ns);
		}
		unit_reopen(unit);
	}
	for (ssize_t n; (n = kv_index_oldest(unit->index, NULL,
				 count != 0 ? &uses[count - 1] : NULL, uses + count, 4)) > 0;)
		count += (size_t)n;
	assert_int_equal(count, 19);
	assert_int_equal(uses[18].last_use_ns, 9 * GRAIN);
	assert_int_equal(kv_index_oldest(unit->index, NULL, &uses[18], uses, 4), 0);
}

struct told {
	uint64_t parents[8];
	char names[8][8];
	size_t count;
};

static void tell(void *arg, uint64_t parent, const char *name, size_t length)
{
	struct told *told = arg;

	assert_true(told->count < 8 && length < 8);
	told->parents[told->count] = parent;
	memcpy(told->names[told->count], name, length);
	told->names[told->count++][length] = '\0';
}

/* All names go in one operation, each is told, and the space goes when the orphan is reaped. */
static void test_index_evict__takes_every_name(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	struct kv_index_use use;
	struct told told = {.count = 0};
	uint64_t sequence;
	unsigned seen = 0;

	(void)unit_write(unit, file.ino, 9);
	assert_int_equal(unit_try_link(unit, file.ino, dir.ino, "b"), 0);
	unit_sync(unit);
	assert_int_equal(unit_try_link(unit, file.ino, dir.ino, "c"), 0);
	sequence = kv_index_sequence(unit->index);
	assert_int_equal(kv_index_evict(unit->index, file.ino, unit_get(unit, file.ino).last_use_ns,
				 false, 555, tell, &told),
		0);
	assert_int_equal(kv_index_sequence(unit->index), sequence + 1);
	assert_int_equal(told.count, 3);
	for (size_t i = 0; i < 3; i++) {
		seen |= 1u << (told.names[i][0] - 'a');
		assert_int_equal(told.parents[i], told.names[i][0] == 'a' ? KV_ROOT_INO : dir.ino);
	}
	assert_int_equal(seen, 7);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "a"), 0);
	assert_int_equal(unit_lookup(unit, dir.ino, "b"), 0);
	assert_int_equal(unit_lookup(unit, dir.ino, "c"), 0);
	assert_int_equal(unit_get(unit, dir.ino).mtime_ns, 555);
	assert_int_equal(unit_get(unit, file.ino).nlink, 0);
	assert_int_equal(kv_index_oldest(unit->index, NULL, NULL, &use, 1), 0);
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", true), 0);
	assert_int_equal(unit_space(unit).used, 9);
	unit_check(unit);
	unit_reap(unit, file.ino);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used + unit_space(unit).busy, 0);
	assert_int_equal(try_evict(unit, dir.ino, false), -EISDIR);
}

/* Every documented error. */
static void test_index_evict__errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	struct kv_inode link = unit_make(unit, KV_ROOT_INO, "link", S_IFLNK | 0777);
	struct told told = {.count = 0};

	assert_int_equal(kv_index_touch(unit->index, file.ino, 100, 1, 1), 0);
	assert_int_equal(kv_index_evict(unit->index, file.ino, 99, false, 1, tell, &told), -EAGAIN);
	assert_int_equal(kv_index_evict(unit->index, file.ino, 99, true, 1, tell, &told), -EAGAIN);
	assert_int_equal(kv_index_evict(unit->index, 999, 99, false, 1, tell, &told), -ENOENT);
	assert_int_equal(try_evict(unit, KV_ROOT_INO, false), -EISDIR);
	assert_int_equal(try_evict(unit, link.ino, false), -EINVAL);
	assert_int_equal(told.count, 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "a"), file.ino);
}

/* A quarantined file has no name, keeps its space, and is the first to be evicted, also after a
 * restart. */
static void test_index_evict__quarantine(void **state)
{
	struct unit *unit = *state;
	struct kv_inode old = unit_make(unit, KV_ROOT_INO, "old", S_IFREG | 0644);
	struct kv_inode bad = unit_make(unit, KV_ROOT_INO, "bad", S_IFREG | 0644);
	struct kv_index_use uses[2];
	struct kv_freed freed;

	(void)unit_write(unit, old.ino, 3);
	(void)unit_write(unit, bad.ino, 5);
	assert_int_equal(try_evict(unit, bad.ino, true), 0);
	for (int round = 0; round < 2; round++) {
		assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "bad"), 0);
		assert_int_equal(unit_space(unit).used, 8);
		assert_int_equal(kv_index_oldest(unit->index, NULL, NULL, uses, 2), 2);
		assert_int_equal(uses[0].ino, bad.ino);
		assert_int_equal(uses[0].last_use_ns, INT64_MIN);
		assert_true(unit_get(unit, bad.ino).flags & KV_INODE_QUARANTINED);
		assert_int_equal(kv_index_orphans(unit->index, 0, &(uint64_t){0}, 1), 0);
		assert_int_equal(kv_index_reap(unit->index, bad.ino, &freed), -ENOENT);
		unit_check(unit);
		unit_reopen(unit);
	}
	/* Neither a use nor a writer that still has it open makes it younger. */
	assert_int_equal(kv_index_touch(unit->index, bad.ino, 999, 1, 1), 0);
	(void)unit_write(unit, bad.ino, 6);
	assert_int_equal(unit_get(unit, bad.ino).last_use_ns, INT64_MIN);
	assert_int_equal(try_evict(unit, bad.ino, true), 0);
	unit_check(unit);
	assert_int_equal(kv_index_evict(unit->index, bad.ino, INT64_MIN, false, 1, NULL, NULL), 0);
	unit_check(unit);
	assert_int_equal(kv_index_oldest(unit->index, NULL, NULL, uses, 2), 1);
	assert_int_equal(kv_index_touch(unit->index, bad.ino, 999, 1, 1), 0);
	unit_check(unit);
	unit_reap(unit, bad.ino);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used, 3);
}

/* Orphans and held files can be evicted, too: they are orphans then. */
static void test_index_evict__orphans_and_held(void **state)
{
	struct unit *unit = *state;
	struct kv_inode orphan = unit_make(unit, KV_ROOT_INO, "orphan", S_IFREG | 0644);
	struct kv_inode held = unit_hold(unit, KV_ROOT_INO, "held");
	uint64_t inos[4];

	unit_unlink(unit, KV_ROOT_INO, "orphan");
	assert_int_equal(try_evict(unit, orphan.ino, false), 0);
	assert_int_equal(try_evict(unit, orphan.ino, true), 0);
	assert_int_equal(try_evict(unit, held.ino, true), 0);
	assert_int_equal(kv_index_orphans(unit->index, 0, inos, 4), 2);
	unit_check(unit);
	unit_reap(unit, orphan.ino);
	unit_reap(unit, held.ino);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, unit_setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_evict__oldest_first),
		TEST(test_index_evict__takes_every_name),
		TEST(test_index_evict__errors),
		TEST(test_index_evict__quarantine),
		TEST(test_index_evict__orphans_and_held),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
