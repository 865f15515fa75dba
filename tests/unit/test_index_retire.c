/* SPDX-License-Identifier: Apache-2.0 */
/* Retiring a directory: hidden in one operation, worked off in bounded ones, also after a crash. */
#include <signal.h>

#include "unit_index.h"

static uint64_t put(struct unit *unit, uint64_t parent, const char *name, uint32_t blocks)
{
	struct kv_inode file = unit_hold(unit, parent, name);

	(void)unit_write(unit, file.ino, blocks);
	return file.ino;
}

static int retire(struct unit *unit, uint64_t ino, const char *unless, struct kv_inode *ret_fresh)
{
	const struct kv_retire retire = {
		.ino = ino,
		.unless = unless,
		.unless_size = unless ? strlen(unless) : 0,
		.now_ns = ++unit->now,
	};

	return kv_index_retire(unit->index, &retire, ret_fresh);
}

static void ignore(void *arg, const struct kv_inode *inode, const char *name, size_t length)
{
	assert_true(inode->nlink == 0 || (length == 4 && memcmp(name, "kept", 4) == 0));
	++*(unsigned *)arg;
}

/* Works off all orphans, as the reaper does. Returns the calls that took. */
static unsigned work_off(struct unit *unit)
{
	unsigned calls = 0;
	unsigned gone = 0;
	uint64_t ino;

	while (kv_index_orphans(unit->index, 0, &ino, 1) == 1) {
		while (S_ISDIR(unit_get(unit, ino).mode) &&
			kv_index_clear(unit->index, ino, ++unit->now, ignore, &gone) == 1)
			calls++;
		unit_reap(unit, ino);
		calls++;
	}
	return calls;
}

static void grow_tree(struct unit *unit, uint64_t top)
{
	char name[16];

	for (unsigned i = 0; i < 3; i++) {
		for (unsigned k = 0; k < 300; k++) {
			(void)snprintf(name, sizeof(name), "f%u", k);
			(void)put(unit, top, name, 1);
		}
		top = unit_make(unit, top, "sub", S_IFDIR | 0755).ino;
	}
	(void)unit_make(unit, top, "link", S_IFLNK | 0777);
}

/* The name has an empty directory with all that the old one had, at once; the rest goes later. */
static void test_index_retire__hides_at_once(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 02750);
	struct kv_inode fresh;
	struct kv_freed freed;
	uint64_t sequence;
	uint32_t number;
	unsigned gone = 0;
	char value[8];

	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 5000, &number), 0);
	assert_int_equal(kv_index_quota_step(unit->index, number, &(struct kv_quota_walk){0}), 0);
	assert_int_equal(
		kv_index_xattr_set(unit->index, dir.ino, "user.a", "value", 5, 0, ++unit->now), 0);
	grow_tree(unit, dir.ino);
	dir = unit_get(unit, dir.ino);
	sequence = kv_index_sequence(unit->index);
	assert_int_equal(retire(unit, dir.ino, NULL, &fresh), 1);
	assert_int_equal(kv_index_sequence(unit->index), sequence + 1);
	for (int round = 0; round < 2; round++) {
		struct kv_domain_info info;

		fresh = unit_get(unit, unit_lookup(unit, KV_ROOT_INO, "dir"));
		assert_true(fresh.ino > dir.ino);
		assert_int_equal(fresh.mode, S_IFDIR | 02750);
		assert_int_equal(fresh.uid, dir.uid);
		assert_int_equal(fresh.mtime_ns, dir.mtime_ns);
		assert_int_equal(fresh.nlink, 2);
		assert_int_equal(fresh.domain, number);
		assert_int_equal(kv_index_domain(unit->index, number, &info), 0);
		assert_int_equal(info.ino, fresh.ino);
		assert_int_equal(info.used, 900);
		assert_int_equal(
			kv_index_xattr_get(unit->index, fresh.ino, "user.a", value, sizeof(value)),
			5);
		assert_memory_equal(value, "value", 5);
		assert_int_equal(unit_lookup(unit, fresh.ino, "f1"), 0);
		assert_int_equal(kv_index_lookup(unit->index, dir.ino, "f1", 2, &fresh), -ENOENT);
		unit_check(unit);
		unit_reopen(unit);
	}
	(void)put(unit, fresh.ino = unit_lookup(unit, KV_ROOT_INO, "dir"), "f1", 2);
	assert_int_equal(kv_index_reap(unit->index, dir.ino, &freed), -ENOTEMPTY);
	assert_int_equal(kv_index_clear(unit->index, dir.ino, ++unit->now, ignore, &gone), 1);
	assert_int_equal(gone, KV_CLEAR_NAMES);
	unit_check(unit);
	(void)work_off(unit);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used, 2);
	unit_check(unit);
}

/* With its fingerprint nothing is done; with another, or none, it is retired and gets it. */
static void test_index_retire__unless(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode fresh;
	struct kv_inode again;
	uint64_t sequence;
	char value[16];
	char large[KV_FINGERPRINT_MAX + 2];

	(void)put(unit, dir.ino, "old", 1);
	assert_int_equal(retire(unit, dir.ino, "model-1", &fresh), 1);
	(void)put(unit, fresh.ino, "new", 1);
	sequence = kv_index_sequence(unit->index);
	assert_int_equal(retire(unit, fresh.ino, "model-1", &again), 0);
	assert_int_equal(kv_index_sequence(unit->index), sequence);
	assert_int_equal(retire(unit, dir.ino, "model-1", &again), -ENOENT);
	assert_true(unit_lookup(unit, fresh.ino, "new") != 0);
	assert_int_equal(retire(unit, fresh.ino, "model-12", &again), 1);
	assert_int_equal(kv_index_xattr_get(
				 unit->index, again.ino, KV_FINGERPRINT_NAME, value, sizeof(value)),
		8);
	assert_memory_equal(value, "model-12", 8);
	assert_int_equal(unit_lookup(unit, again.ino, "new"), 0);
	memset(large, 'x', sizeof(large) - 1);
	large[sizeof(large) - 1] = '\0';
	assert_int_equal(retire(unit, again.ino, large, &fresh), -E2BIG);
	(void)work_off(unit);
}

/* What cannot be retired. */
static void test_index_retire__errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_inode fresh;
	unsigned gone = 0;

	assert_int_equal(retire(unit, KV_ROOT_INO, NULL, &fresh), -EBUSY);
	assert_int_equal(retire(unit, file.ino, NULL, &fresh), -ENOTDIR);
	assert_int_equal(retire(unit, 999, NULL, &fresh), -ENOENT);
	assert_int_equal(kv_index_clear(unit->index, KV_ROOT_INO, 1, ignore, &gone), -ENOENT);
	assert_int_equal(kv_index_clear(unit->index, 999, 1, ignore, &gone), -ENOENT);
	assert_int_equal(gone, 0);
}

/* Another name elsewhere keeps a file; a quota below ends; held and pinned files go. */
static void test_index_retire__what_is_below(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode sub = unit_make(unit, dir.ino, "sub", S_IFDIR | 0755);
	struct kv_inode fresh;
	struct kv_inode inode;
	struct kv_domain_info info;
	uint32_t number;
	uint64_t kept = put(unit, dir.ino, "kept", 3);
	uint64_t pinned;

	assert_int_equal(unit_try_link(unit, kept, KV_ROOT_INO, "other"), 0);
	assert_int_equal(kv_index_quota_set(unit->index, sub.ino, 50, &number), 0);
	pinned = put(unit, sub.ino, "pinned", 2);
	assert_int_equal(kv_index_pin(unit->index, pinned, true, true, &inode), 0);
	(void)unit_hold(unit, sub.ino, "held");
	assert_int_equal(retire(unit, dir.ino, NULL, &fresh), 1);
	unit_check(unit);
	/* Evicted before its turn comes. */
	assert_int_equal(kv_index_evict(unit->index, pinned, unit_get(unit, pinned).last_use_ns,
				 false, ++unit->now, NULL, NULL),
		0);
	unit_check(unit);
	(void)work_off(unit);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "other"), kept);
	assert_int_equal(unit_get(unit, kept).nlink, 1);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used, 3);
	assert_int_equal(kv_index_domain(unit->index, number, &info), -ENOENT);
}

/* A process that retires, again and again, and is killed at any time. */
static void live(struct unit *unit)
{
	char name[16];

	unit_open(unit);
	for (unsigned i = 0;; i++) {
		struct kv_inode fresh;
		uint64_t dir = unit_lookup(unit, KV_ROOT_INO, "dir");
		uint64_t sub = unit_make(unit, dir, "sub", S_IFDIR | 0755).ino;
		uint32_t number;

		for (unsigned k = 0; k < 300; k++) {
			(void)snprintf(name, sizeof(name), "f%u", k);
			(void)put(unit, k % 2 ? dir : sub, name, 1);
		}
		if (i % 3 == 0)
			assert_int_equal(
				kv_index_quota_set(unit->index, dir, 1000 + i, &number), 0);
		(void)snprintf(name, sizeof(name), "%d-%u", (int)getpid(), i);
		assert_int_equal(retire(unit, dir, name, &fresh), 1);
		(void)work_off(unit);
	}
}

/* Whenever that is, the index is whole, and what was retired is gone on with. */
static void test_index_retire__killed_at_any_time(void **state)
{
	struct unit *unit = *state;
	unsigned found = 0;

	(void)unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	unit_close(unit);
	/* On a slow machine it takes more rounds, and longer ones, to get anywhere. */
	for (unsigned round = 0; round < 15 || (found <= 2 && round < 300); round++) {
		pid_t child = fork();
		struct kv_inode fresh;
		uint64_t dir;
		int status;

		assert_true(child >= 0);
		if (child == 0) {
			live(unit);
			_exit(1);
		}
		(void)usleep((15000 + round % 15 * 4001) * (1 + round / 15));
		assert_int_equal(kill(child, SIGKILL), 0);
		assert_int_equal(waitpid(child, &status, 0), child);
		assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		unit_open(unit);
		unit_check(unit);
		dir = unit_lookup(unit, KV_ROOT_INO, "dir");
		assert_true(dir != 0);
		found += work_off(unit) > 0;
		unit_check(unit);
		/* Retired once more, nothing is left. */
		assert_int_equal(retire(unit, dir, NULL, &fresh), 1);
		(void)work_off(unit);
		unit_sync(unit);
		assert_int_equal(unit_space(unit).used, 0);
		unit_check(unit);
		unit_close(unit);
	}
	assert_true(found > 2); /* else nothing was shown */
	unit_open(unit);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, unit_setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_retire__hides_at_once),
		TEST(test_index_retire__unless),
		TEST(test_index_retire__errors),
		TEST(test_index_retire__what_is_below),
		TEST(test_index_retire__killed_at_any_time),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
