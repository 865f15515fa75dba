/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quota domains and pins: who counts where through every operation, the walk over what is there
 * already, what is refused, the order of eviction. unit_check compares all counters with the files.
 */
#include <errno.h>
#include <linux/fs.h>
#include <signal.h>

#include "unit_index.h"

#define GRAIN 4096

static struct kv_inode make_dir(struct unit *unit, uint64_t parent, const char *name)
{
	return unit_make(unit, parent, name, S_IFDIR | 0755);
}

static uint64_t put(struct unit *unit, uint64_t parent, const char *name, uint32_t blocks)
{
	struct kv_inode file = unit_hold(unit, parent, name);

	(void)unit_write(unit, file.ino, blocks);
	return file.ino;
}

static struct kv_domain_info domain_of(struct unit *unit, uint64_t ino)
{
	struct kv_domain_info info;

	assert_int_equal(kv_index_domain(unit->index, unit_get(unit, ino).domain, &info), 0);
	return info;
}

/* Sets a quota, and walks to the end. Returns how many steps that took. */
static unsigned set_quota(struct unit *unit, uint64_t ino, uint64_t limit)
{
	struct kv_quota_walk walk = {0};
	uint32_t number;
	unsigned steps = 1;
	int r;

	assert_int_equal(kv_index_quota_set(unit->index, ino, limit, &number), 0);
	while ((r = kv_index_quota_step(unit->index, number, &walk)) == 1)
		steps++;
	assert_int_equal(r, 0);
	return steps;
}

static int try_rename(struct unit *unit, uint64_t parent, const char *name, uint64_t new_parent,
	const char *new_name, unsigned flags)
{
	const struct kv_rename rename = {parent, name, strlen(name), new_parent, new_name,
		strlen(new_name), flags, ++unit->now};
	struct kv_inode moved;
	struct kv_inode replaced;

	return kv_index_rename(unit->index, &rename, &moved, &replaced);
}

/* What is made below the directory counts, whether held, published, rewritten, removed or reaped.
 */
static void test_index_quota__counts(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_inode sub;
	uint64_t file;
	uint64_t outside = put(unit, KV_ROOT_INO, "outside", 3);

	assert_int_equal(set_quota(unit, dir.ino, 100), 1);
	assert_int_equal(domain_of(unit, dir.ino).limit, 100);
	assert_int_equal(domain_of(unit, dir.ino).state, KV_DOMAIN_LIVE);
	assert_int_equal(domain_of(unit, dir.ino).inodes, 1);
	sub = make_dir(unit, dir.ino, "sub");
	(void)unit_hold(unit, sub.ino, "held");
	file = put(unit, sub.ino, "file", 10);
	assert_int_equal(domain_of(unit, file).used, 10);
	assert_int_equal(domain_of(unit, file).inodes, 3);
	assert_int_equal(domain_of(unit, outside).number, 0);
	assert_int_equal(domain_of(unit, outside).used, 3);
	unit_check(unit);
	(void)unit_write(unit, file, 4);
	assert_int_equal(domain_of(unit, file).used, 4);
	unit_reopen(unit);
	assert_int_equal(domain_of(unit, file).used, 4);
	assert_int_equal(domain_of(unit, file).limit, 100);
	unit_unlink(unit, sub.ino, "file");
	assert_int_equal(domain_of(unit, file).used, 4);
	unit_reap(unit, file);
	assert_int_equal(domain_of(unit, dir.ino).used, 0);
	assert_int_equal(domain_of(unit, dir.ino).inodes, 2);
	/* An operation that fails counts nothing. */
	assert_int_equal(unit_try_make(unit, dir.ino, "sub", S_IFREG | 0644, &sub), -EEXIST);
	assert_int_equal(domain_of(unit, dir.ino).inodes, 2);
}

/* Every documented error of setting a quota. */
static void test_index_quota__set_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_inode inode;
	struct kv_quota_walk walk = {0};
	uint32_t number;

	assert_int_equal(kv_index_quota_set(unit->index, KV_ROOT_INO, 9, &number), -EINVAL);
	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, UINT64_MAX, &number), -EINVAL);
	assert_int_equal(kv_index_quota_set(unit->index, file.ino, 9, &number), -ENOTDIR);
	assert_int_equal(kv_index_quota_set(unit->index, 999, 9, &number), -ENOENT);
	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 0, &number), -ENODATA);
	assert_int_equal(kv_index_quota_step(unit->index, 0, &walk), -EINVAL);
	assert_int_equal(kv_index_quota_step(unit->index, KV_DOMAINS_MAX, &walk), -EINVAL);
	assert_int_equal(kv_index_quota_step(unit->index, 5, &walk), 0);
	(void)set_quota(unit, dir.ino, 80);
	(void)unit_write(unit, put(unit, dir.ino, "a", 1), 40);
	assert_int_equal(
		kv_index_pin(unit->index, unit_lookup(unit, dir.ino, "a"), true, true, &inode), 0);
	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 40, &number), -EDQUOT);
	assert_int_equal(domain_of(unit, dir.ino).limit, 80);
	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 0, &number), 0);
	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 90, &number), -EBUSY);
	while (kv_index_quota_step(unit->index, number, &walk) == 1)
		continue;
	assert_int_equal(domain_of(unit, dir.ino).number, 0);
	assert_int_equal(domain_of(unit, dir.ino).pinned, 40);
}

/* All numbers can be used up, and are used again. */
static void test_index_quota__numbers(void **state)
{
	struct unit *unit = *state;
	struct kv_domain_info info;
	uint64_t inos[KV_DOMAINS_MAX];
	uint32_t number;
	char name[16];

	for (uint32_t i = 1; i < KV_DOMAINS_MAX; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		inos[i] = make_dir(unit, KV_ROOT_INO, name).ino;
		assert_int_equal(set_quota(unit, inos[i], i), 1);
	}
	inos[0] = make_dir(unit, KV_ROOT_INO, "more").ino;
	assert_int_equal(kv_index_quota_set(unit->index, inos[0], 7, &number), -ENOSPC);
	unit_reopen(unit);
	assert_int_equal(domain_of(unit, inos[700]).limit, 700);
	assert_int_equal(set_quota(unit, inos[700], 0), 1);
	unit_sync(unit);
	assert_int_equal(kv_index_domain(unit->index, 700, &info), -ENOENT);
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "800", true), 0);
	unit_reap(unit, inos[800]);
	unit_sync(unit);
	assert_int_equal(kv_index_domain(unit->index, 800, &info), -ENOENT);
	(void)set_quota(unit, inos[0], 7);
	assert_int_equal(domain_of(unit, inos[0]).number, 700);
	assert_int_equal(domain_of(unit, inos[0]).limit, 7);
}

/* WIDTH files and one directory in each of DEPTH directories. */
static void grow_tree(struct unit *unit, uint64_t top, unsigned depth, unsigned width)
{
	char name[24];

	for (unsigned i = 0; i < depth; i++) {
		for (unsigned k = 0; k < width; k++) {
			(void)snprintf(name, sizeof(name), "f%u-%u", i, k);
			(void)put(unit, top, name, 1);
		}
		(void)snprintf(name, sizeof(name), "d%u", i);
		top = make_dir(unit, top, name).ino;
	}
}

/*
 * A quota on a directory with content, set and taken away: all below joins, in bounded steps, also
 * if a restart comes between them; what carries a quota itself, and what has its first name
 * elsewhere, does not.
 */
static void test_index_quota__walk(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_inode nested;
	struct kv_quota_walk walk = {0};
	uint64_t foreign = put(unit, KV_ROOT_INO, "foreign", 7);
	uint32_t number;

	grow_tree(unit, dir.ino, 20, 30);
	nested = make_dir(unit, dir.ino, "nested");
	(void)set_quota(unit, nested.ino, 50);
	(void)put(unit, nested.ino, "a", 5);
	(void)unit_hold(unit, dir.ino, "held");
	assert_int_equal(unit_try_link(unit, foreign, dir.ino, "link"), 0);
	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 9999, &number), 0);
	for (unsigned i = 0; i < 3; i++)
		assert_int_equal(kv_index_quota_step(unit->index, number, &walk), 1);
	unit_check(unit);
	unit_reopen(unit); /* the walk is lost, the held file, too */
	assert_int_equal(domain_of(unit, dir.ino).state, KV_DOMAIN_ADOPTING);
	assert_true(domain_of(unit, dir.ino).used < 600);
	walk = (struct kv_quota_walk){0};
	while (kv_index_quota_step(unit->index, number, &walk) == 1)
		continue;
	assert_int_equal(domain_of(unit, dir.ino).state, KV_DOMAIN_LIVE);
	assert_int_equal(domain_of(unit, dir.ino).used, 600);
	assert_int_equal(domain_of(unit, dir.ino).inodes, 1 + 600 + 20);
	assert_int_equal(domain_of(unit, nested.ino).used, 5);
	assert_int_equal(domain_of(unit, foreign).number, 0);
	unit_check(unit);
	assert_true(set_quota(unit, dir.ino, 0) > 5);
	assert_int_equal(domain_of(unit, dir.ino).number, 0);
	assert_int_equal(domain_of(unit, dir.ino).used, 607);
	assert_int_equal(domain_of(unit, nested.ino).used, 5);
}

/* Directories that are moved about during the walk do not escape it. */
static void test_index_quota__walk_and_renames(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_inode a = make_dir(unit, dir.ino, "a");
	struct kv_inode b = make_dir(unit, dir.ino, "b");
	struct kv_quota_walk walk = {0};
	uint32_t number;
	uint64_t gone;
	bool there = false;

	grow_tree(unit, a.ino, 10, 40);
	grow_tree(unit, b.ino, 10, 40);
	gone = unit_lookup(unit, a.ino, "f0-1");
	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 9999, &number), 0);
	for (unsigned i = 0; kv_index_quota_step(unit->index, number, &walk) == 1; i++) {
		assert_true(i < 200);
		/* To and fro; -EXDEV while one has joined and the other has not. */
		if (i < 40 && try_rename(unit, there ? b.ino : a.ino, "d0", there ? a.ino : b.ino,
				      "d0", 0) == 0)
			there = !there;
		if (i == 5)
			unit_unlink(unit, a.ino, "f0-1");
	}
	unit_reap(unit, gone);
	assert_int_equal(domain_of(unit, dir.ino).state, KV_DOMAIN_LIVE);
	assert_int_equal(domain_of(unit, dir.ino).used, 799);
	unit_check(unit);
}

/* Where the walk is inside a directory that is moved, the rest of the one it came from is not
 * missed. */
static void test_index_quota__walk_is_led_astray(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_inode a = make_dir(unit, dir.ino, "a");
	struct kv_quota_walk walk = {0};
	uint64_t d0;
	uint32_t number;
	bool moved = false;

	grow_tree(unit, a.ino, 2, 400);
	d0 = unit_lookup(unit, a.ino, "d0");
	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 9999, &number), 0);
	while (kv_index_quota_step(unit->index, number, &walk) == 1) {
		if (walk.ino != d0 || moved)
			continue;
		moved = true;
		assert_int_equal(try_rename(unit, a.ino, "d0", dir.ino, "d0", 0), 0);
	}
	assert_true(moved);
	assert_int_equal(domain_of(unit, dir.ino).used, 800);
}

/* A directory with a quota that is removed during the walk takes its domain along. */
static void test_index_quota__removed_directory(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_quota_walk walk = {0};
	struct kv_domain_info info;
	uint32_t number;
	uint64_t file;

	assert_int_equal(kv_index_quota_set(unit->index, dir.ino, 10, &number), 0);
	file = put(unit, dir.ino, "open", 3);
	unit_unlink(unit, dir.ino, "open");
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", true), 0);
	assert_int_equal(kv_index_quota_step(unit->index, number, &walk), 0);
	unit_reap(unit, dir.ino);
	unit_sync(unit);
	assert_int_equal(kv_index_domain(unit->index, number, &info), 0);
	assert_int_equal(info.state, KV_DOMAIN_DEAD);
	assert_int_equal(info.used, 3);
	unit_reap(unit, file);
	unit_sync(unit);
	assert_int_equal(kv_index_domain(unit->index, number, &info), -ENOENT);
}

/* A renamed file moves its blocks; a directory with entries is to be copied. */
static void test_index_quota__renames(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = make_dir(unit, KV_ROOT_INO, "a");
	struct kv_inode b = make_dir(unit, KV_ROOT_INO, "b");
	struct kv_inode inode;
	uint64_t file;

	(void)set_quota(unit, a.ino, 100);
	(void)set_quota(unit, b.ino, 16);
	file = put(unit, a.ino, "file", 12);
	(void)put(unit, a.ino, "large", 17);
	assert_int_equal(try_rename(unit, a.ino, "file", b.ino, "file", 0), 0);
	assert_int_equal(domain_of(unit, a.ino).used, 17);
	assert_int_equal(domain_of(unit, b.ino).used, 12);
	assert_int_equal(try_rename(unit, a.ino, "large", b.ino, "large", 0), -EDQUOT);
	/* More than fits is for eviction; what is pinned must fit. */
	(void)put(unit, a.ino, "fits", 10);
	assert_int_equal(try_rename(unit, a.ino, "fits", b.ino, "fits", 0), 0);
	assert_int_equal(domain_of(unit, b.ino).used, 22);
	(void)put(unit, a.ino, "pinned", 15);
	assert_int_equal(
		kv_index_pin(unit->index, unit_lookup(unit, a.ino, "pinned"), true, true, &inode),
		0);
	assert_int_equal(try_rename(unit, a.ino, "pinned", b.ino, "pinned", 0), -EDQUOT);
	(void)make_dir(unit, a.ino, "empty");
	(void)put(unit, make_dir(unit, a.ino, "full").ino, "x", 1);
	assert_int_equal(try_rename(unit, a.ino, "empty", b.ino, "empty", 0), 0);
	assert_int_equal(try_rename(unit, a.ino, "full", b.ino, "full", 0), -EXDEV);
	assert_int_equal(try_rename(unit, a.ino, "full", b.ino, "empty", RENAME_EXCHANGE), -EXDEV);
	assert_int_equal(try_rename(unit, KV_ROOT_INO, "a", b.ino, "a", 0), 0);
	assert_int_equal(domain_of(unit, a.ino).used, 17 + 15 + 1);
	assert_int_equal(try_rename(unit, a.ino, "large", b.ino, "file", RENAME_EXCHANGE), -EDQUOT);
	(void)put(unit, a.ino, "small", 2);
	assert_int_equal(try_rename(unit, a.ino, "small", b.ino, "file", RENAME_EXCHANGE), 0);
	assert_int_equal(domain_of(unit, file).number, domain_of(unit, a.ino).number);
	assert_int_equal(domain_of(unit, b.ino).used, 10 + 2);
	unit_check(unit);
}

/* A file with several names counts where its first one is. */
static void test_index_quota__links(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = make_dir(unit, KV_ROOT_INO, "a");
	struct kv_inode b = make_dir(unit, KV_ROOT_INO, "b");
	uint64_t file;

	(void)set_quota(unit, a.ino, 100);
	(void)set_quota(unit, b.ino, 100);
	file = put(unit, a.ino, "file", 6);
	assert_int_equal(unit_try_link(unit, file, b.ino, "x"), 0);
	assert_int_equal(unit_try_link(unit, file, KV_ROOT_INO, "root"), 0);
	assert_int_equal(try_rename(unit, b.ino, "x", KV_ROOT_INO, "x", 0), 0);
	assert_int_equal(try_rename(unit, KV_ROOT_INO, "x", b.ino, "x", 0), 0);
	assert_int_equal(domain_of(unit, a.ino).used, 6);
	unit_unlink(unit, KV_ROOT_INO, "root");
	unit_unlink(unit, a.ino, "file");
	assert_int_equal(domain_of(unit, a.ino).used, 0);
	assert_int_equal(domain_of(unit, b.ino).used, 6);
	unit_check(unit);
}

/* Promises and what is used together keep below the limit. */
static void test_index_quota__promises(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	uint32_t number;

	(void)set_quota(unit, dir.ino, 100);
	number = domain_of(unit, dir.ino).number;
	(void)put(unit, dir.ino, "file", 30);
	assert_int_equal(kv_index_charge(unit->index, number, 71, 0), -EDQUOT);
	assert_int_equal(kv_index_charge(unit->index, number, UINT32_MAX, 0), -EDQUOT);
	assert_int_equal(kv_index_charge(unit->index, number, 70, 0), 0);
	assert_int_equal(kv_index_charge(unit->index, number, 1, 0), -EDQUOT);
	assert_int_equal(domain_of(unit, dir.ino).promised, 70);
	assert_int_equal(kv_index_charge(unit->index, number, 3, 5), 0);
	assert_int_equal(kv_index_charge(unit->index, number, 3, 0), -EDQUOT);
	assert_int_equal(kv_index_charge(unit->index, number, 0, 68), 0);
	assert_int_equal(kv_index_charge(unit->index, 0, UINT32_MAX, 0), 0);
	assert_int_equal(kv_index_charge(unit->index, 0, 0, UINT32_MAX), 0);
}

/* A publish turns what was promised for it into use, in one step; one that fails leaves it. */
static void test_index_quota__publish_redeems_the_promise(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_inode file = unit_make(unit, dir.ino, "file", S_IFREG | 0644);
	struct kv_content content = {.size = KV_CHUNK_SIZE, .replace = true, .promised = 60};
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	struct kv_chunk chunk = {0, 0, KV_CHUNK_FRESH, 42, extents};
	struct kv_freed freed;

	(void)set_quota(unit, dir.ino, 100);
	content.domain = domain_of(unit, dir.ino).number;
	assert_int_equal(kv_index_charge(unit->index, content.domain, 60, 0), 0);
	assert_int_equal(unit_try_publish(unit, file.ino + 1, NULL, 0, content, &freed), -ENOENT);
	assert_int_equal(domain_of(unit, dir.ino).promised, 60);
	chunk.extent_count = (uint32_t)unit_alloc(unit, 50, extents);
	unit_publish(unit, file.ino, &chunk, 1, content);
	assert_int_equal(domain_of(unit, dir.ino).promised, 0);
	assert_int_equal(domain_of(unit, dir.ino).used, 50);
	assert_int_equal(kv_index_charge(unit->index, content.domain, 51, 0), -EDQUOT);
	assert_int_equal(kv_index_charge(unit->index, content.domain, 50, 0), 0);
	assert_int_equal(kv_index_charge(unit->index, content.domain, 0, 50), 0);
	unit_check(unit);
}

/* A process that sets quotas, moves files between them and takes them away, until it is killed. */
static void live(struct unit *unit)
{
	char name[16];

	unit_open(unit);
	for (unsigned i = 0;; i++) {
		uint64_t a = unit_lookup(unit, KV_ROOT_INO, "a");
		uint64_t b = unit_lookup(unit, KV_ROOT_INO, "b");

		(void)snprintf(name, sizeof(name), "f%u", i % 500);
		if (unit_lookup(unit, a, name) == 0 && unit_lookup(unit, b, name) == 0)
			(void)put(unit, i % 2 ? a : b, name, 1 + i % 7);
		(void)try_rename(unit, a, name, b, name, 0);
		if (i % 3 == 0)
			(void)try_rename(unit, b, name, a, name, 0);
		if (i % 50 == 0)
			(void)set_quota(unit, i % 100 ? a : b, 4000 + i);
		if (i % 170 == 169 && domain_of(unit, a).number != 0)
			(void)set_quota(unit, a, 0);
	}
}

/* Whenever that is, the counters are right, and a walk that was begun can be gone on with. */
static void test_index_quota__killed_at_any_time(void **state)
{
	struct unit *unit = *state;
	unsigned unfinished = 0;

	(void)make_dir(unit, KV_ROOT_INO, "a");
	(void)make_dir(unit, KV_ROOT_INO, "b");
	unit_close(unit);
	/* On a slow machine it takes more rounds, and longer ones, to get anywhere. */
	for (unsigned round = 0; round < 15 || (unfinished == 0 && round < 300); round++) {
		pid_t child = fork();
		int status;

		assert_true(child >= 0);
		if (child == 0) {
			live(unit);
			_exit(1);
		}
		(void)usleep((10000 + round % 15 * 5003) * (1 + round / 15));
		assert_int_equal(kill(child, SIGKILL), 0);
		assert_int_equal(waitpid(child, &status, 0), child);
		assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		unit_open(unit);
		unit_check(unit);
		for (uint32_t i = 1; i < kv_index_domain_count(unit->index); i++) {
			struct kv_quota_walk walk = {0};
			struct kv_domain_info info;

			if (kv_index_domain(unit->index, i, &info) < 0)
				continue;
			unfinished += info.state != KV_DOMAIN_LIVE;
			while (kv_index_quota_step(unit->index, i, &walk) == 1)
				continue;
			if (kv_index_domain(unit->index, i, &info) == 0)
				assert_true(info.state == KV_DOMAIN_LIVE ||
					    (info.state == KV_DOMAIN_DEAD && info.inodes == 0));
		}
		unit_check(unit);
		unit_close(unit);
	}
	print_message("%u walks unfinished\n", unfinished);
	unit_open(unit);
}

/* ---- Pins ---- */

static int pin(struct unit *unit, uint64_t ino, bool on, bool privileged)
{
	struct kv_inode inode;

	return kv_index_pin(unit->index, ino, on, privileged, &inode);
}

/* Pinned files are in no list; a directory's pin goes to what is made in it later. */
static void test_index_pin__is_kept(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_index_use uses[4];
	struct kv_freed freed;
	uint64_t a = put(unit, dir.ino, "a", 3);
	uint64_t b = put(unit, dir.ino, "b", 4);
	uint64_t c;

	assert_int_equal(pin(unit, a, true, true), 0);
	assert_int_equal(pin(unit, a, true, true), 0);
	for (int round = 0; round < 2; round++) {
		assert_true(unit_get(unit, a).flags & KV_INODE_PINNED);
		assert_int_equal(kv_index_oldest(unit->index, NULL, NULL, uses, 4), 1);
		assert_int_equal(uses[0].ino, b);
		assert_int_equal(domain_of(unit, a).pinned, 3);
		unit_check(unit);
		unit_reopen(unit);
	}
	(void)unit_write(unit, a, 8);
	assert_int_equal(domain_of(unit, a).pinned, 8);
	assert_int_equal(pin(unit, dir.ino, true, true), 0);
	c = put(unit, dir.ino, "c", 5);
	assert_int_equal(domain_of(unit, a).pinned, 13);
	assert_int_equal(kv_index_oldest(unit->index, NULL, NULL, uses, 4), 1);
	assert_int_equal(pin(unit, a, false, true), 0);
	assert_int_equal(kv_index_oldest(unit->index, NULL, NULL, uses, 4), 2);
	/* A pin ends with the last name. */
	unit_unlink(unit, dir.ino, "c");
	assert_int_equal(domain_of(unit, a).pinned, 0);
	assert_int_equal(pin(unit, c, true, true), -ENOENT);
	unit_check(unit);
	assert_int_equal(kv_index_reap(unit->index, c, &freed), 0);
	kv_space_release(unit->space, &freed);
}

/* A damaged file loses its pin with its names. */
static void test_index_pin__quarantine(void **state)
{
	struct unit *unit = *state;
	uint64_t file = put(unit, KV_ROOT_INO, "a", 3);
	struct kv_index_use use;

	assert_int_equal(pin(unit, file, true, true), 0);
	assert_int_equal(kv_index_evict(unit->index, file, unit_get(unit, file).last_use_ns, true,
				 ++unit->now, NULL, NULL),
		0);
	assert_int_equal(domain_of(unit, file).pinned, 0);
	assert_int_equal(kv_index_oldest(unit->index, NULL, NULL, &use, 1), 1);
	assert_int_equal(use.ino, file);
}

/* More than the share of a quota or of the store is not pinned; users without one get less. */
static void test_index_pin__limits(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = make_dir(unit, KV_ROOT_INO, "dir");
	struct kv_inode link = unit_make(unit, KV_ROOT_INO, "link", S_IFLNK | 0777);
	char name[16];
	uint64_t file;

	(void)set_quota(unit, dir.ino, 80);
	file = put(unit, dir.ino, "a", 70);
	assert_int_equal(pin(unit, file, true, false), 0);
	assert_int_equal(pin(unit, put(unit, dir.ino, "b", 1), true, true), -EDQUOT);
	assert_int_equal(kv_index_pin_check(unit->index, domain_of(unit, file).number, 1), -EDQUOT);
	assert_int_equal(kv_index_pin_check(unit->index, domain_of(unit, file).number, 0), 0);
	assert_int_equal(kv_index_pin_check(unit->index, 0, 1), 0);
	assert_int_equal(pin(unit, link.ino, true, true), -EINVAL);
	assert_int_equal(pin(unit, 999, true, true), -ENOENT);
	unit_close(unit);
	unit->options.quota_blocks = 800;
	unit_open(unit);
	for (unsigned i = 0; i < 6; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		file = put(unit, KV_ROOT_INO, name, 100);
		assert_int_equal(pin(unit, file, true, false), i < 2 ? 0 : -ENOSPC);
		assert_int_equal(pin(unit, file, true, true), 0);
	}
	/* 670 of 700 are pinned by now. */
	assert_int_equal(kv_index_pin_check(unit->index, 0, 30), 0);
	assert_int_equal(kv_index_pin_check(unit->index, 0, 31), -ENOSPC);
	unit->options.quota_blocks = 0;
}

/* ---- Order ---- */

static void expect_order(
	struct unit *unit, const struct kv_index_scope *scope, const uint64_t *inos, size_t count)
{
	struct kv_index_use uses[16];
	struct kv_index_use after;

	assert_int_equal(kv_index_oldest(unit->index, scope, NULL, uses, 16), (ssize_t)count);
	for (size_t i = 0; i < count; i++)
		assert_int_equal(uses[i].ino, inos[i]);
	/* The same one by one. */
	for (size_t i = 0; i < count; i++) {
		assert_int_equal(
			kv_index_oldest(unit->index, scope, i > 0 ? &after : NULL, uses, 1), 1);
		assert_int_equal(uses[0].ino, inos[i]);
		after = uses[0];
	}
	if (count > 0)
		assert_int_equal(kv_index_oldest(unit->index, scope, &after, uses, 1), 0);
}

/* Each domain, and the never-read in it, has an order of its own, and together they have one. */
static void test_index_quota__order(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = make_dir(unit, KV_ROOT_INO, "a");
	struct kv_inode b = make_dir(unit, KV_ROOT_INO, "b");
	uint64_t files[6];
	struct kv_index_scope scope = {.domain = KV_DOMAIN_ANY};
	char name[16];

	(void)set_quota(unit, a.ino, 100);
	(void)set_quota(unit, b.ino, 100);
	for (unsigned i = 0; i < 6; i++) {
		const uint64_t parents[] = {KV_ROOT_INO, a.ino, b.ino};

		(void)snprintf(name, sizeof(name), "%u", i);
		unit->now += 10 * GRAIN;
		files[i] = put(unit, parents[i % 3], name, 1);
	}
	for (int round = 0; round < 2; round++) {
		expect_order(unit, NULL, files, 6);
		unit_reopen(unit);
	}
	scope.domain = domain_of(unit, a.ino).number;
	expect_order(unit, &scope, (uint64_t[]){files[1], files[4]}, 2);
	/* Read: to the end of the others. Used, but not read: among the never read still. */
	assert_int_equal(
		kv_index_touch(unit->index, files[1], unit->now + 100 * GRAIN, 1, INT64_MIN), 0);
	assert_int_equal(
		kv_index_touch(unit->index, files[0], unit->now + 50 * GRAIN, 0, INT64_MIN), 0);
	scope.domain = KV_DOMAIN_ANY;
	expect_order(unit, &scope,
		(uint64_t[]){files[2], files[3], files[4], files[5], files[0], files[1]}, 6);
	scope.unread = true;
	expect_order(
		unit, &scope, (uint64_t[]){files[2], files[3], files[4], files[5], files[0]}, 5);
	scope.before_ns = unit_get(unit, files[5]).last_use_ns;
	expect_order(unit, &scope, (uint64_t[]){files[2], files[3], files[4]}, 3);
	scope.domain = domain_of(unit, b.ino).number;
	expect_order(unit, &scope, (uint64_t[]){files[2]}, 1);
	/* Published again, before it was read; and then later: nobody has read that. */
	(void)unit_write(unit, files[1], 1);
	scope = (struct kv_index_scope){.domain = domain_of(unit, a.ino).number, .unread = true};
	expect_order(unit, &scope, (uint64_t[]){files[4]}, 1);
	unit->now += 200 * GRAIN;
	(void)unit_write(unit, files[1], 1);
	expect_order(unit, &scope, (uint64_t[]){files[4], files[1]}, 2);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, unit_setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_quota__counts),
		TEST(test_index_quota__set_errors),
		TEST(test_index_quota__numbers),
		TEST(test_index_quota__walk),
		TEST(test_index_quota__walk_and_renames),
		TEST(test_index_quota__walk_is_led_astray),
		TEST(test_index_quota__removed_directory),
		TEST(test_index_quota__renames),
		TEST(test_index_quota__links),
		TEST(test_index_quota__promises),
		TEST(test_index_quota__publish_redeems_the_promise),
		TEST(test_index_quota__order),
		TEST(test_index_quota__killed_at_any_time),
		TEST(test_index_pin__is_kept),
		TEST(test_index_pin__quarantine),
		TEST(test_index_pin__limits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
