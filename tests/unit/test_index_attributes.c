/* SPDX-License-Identifier: Apache-2.0 */
/* Attributes: modes, owners, times, uses, and extended attributes. */
#include <sys/xattr.h>

#include "unit_index.h"

/* Only what the mask names changes, and a mode never changes the type. */
static void test_index_attributes__change(void **state)
{
	struct unit *unit = *state;
	struct kv_inode before = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	const unsigned all = KV_CHANGE_MODE | KV_CHANGE_UID | KV_CHANGE_GID | KV_CHANGE_ATIME |
			     KV_CHANGE_MTIME | KV_CHANGE_CTIME;

	for (unsigned mask = 0; mask <= all; mask++) {
		const struct kv_change change = {mask, S_IFDIR | 0700 | mask % 8, mask, mask + 1,
			mask + 2, mask + 3, mask + 4};
		struct kv_inode after;

		assert_int_equal(kv_index_change(unit->index, before.ino, &change, &after), 0);
		if (mask & KV_CHANGE_MODE)
			before.mode = S_IFREG | 0700 | mask % 8;
		if (mask & KV_CHANGE_UID)
			before.uid = mask;
		if (mask & KV_CHANGE_GID)
			before.gid = mask + 1;
		if (mask & KV_CHANGE_ATIME)
			before.atime_ns = mask + 2;
		if (mask & KV_CHANGE_MTIME)
			before.mtime_ns = mask + 3;
		if (mask & KV_CHANGE_CTIME)
			before.ctime_ns = mask + 4;
		assert_memory_equal(&after, &before, sizeof(after));
	}
	assert_int_equal(
		kv_index_change(unit->index, 999, &(struct kv_change){0}, &before), -ENOENT);
}

/* A changed symlink keeps its target, a changed file its map. */
static void test_index_attributes__change_keeps_the_tail(void **state)
{
	struct unit *unit = *state;
	struct kv_inode link = unit_make(unit, KV_ROOT_INO, "link", S_IFLNK | 0777);
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	const struct kv_change change = {.mask = KV_CHANGE_UID, .uid = 5};
	struct kv_inode inode;
	char target[8];

	(void)unit_write(unit, file.ino, 3);
	assert_int_equal(kv_index_change(unit->index, link.ino, &change, &inode), 0);
	assert_int_equal(kv_index_change(unit->index, file.ino, &change, &inode), 0);
	assert_int_equal(kv_index_readlink(unit->index, link.ino, target, sizeof(target)), 6);
	assert_memory_equal(target, "target", 6);
	assert_int_equal(unit_get(unit, file.ino).blocks, 3);
}

/* A use adds hits and sets times; INT64_MIN leaves the access time. */
static void test_index_attributes__touch(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode held = unit_hold(unit, KV_ROOT_INO, "held");

	assert_int_equal(kv_index_touch(unit->index, file.ino, 20500, 2, INT64_MIN), 0);
	assert_int_equal(unit_get(unit, file.ino).hits, 2);
	assert_int_equal(unit_get(unit, file.ino).last_use_ns, 20480); /* rounded */
	assert_int_equal(unit_get(unit, file.ino).atime_ns, file.atime_ns);
	assert_int_equal(kv_index_touch(unit->index, file.ino, 4096, UINT32_MAX, 77), 0);
	assert_int_equal(unit_get(unit, file.ino).hits, UINT32_MAX); /* no wrap */
	assert_int_equal(unit_get(unit, file.ino).last_use_ns, 4096);
	assert_int_equal(unit_get(unit, file.ino).atime_ns, 77);
	assert_int_equal(kv_index_touch(unit->index, dir.ino, 1, 0, 2), 0);
	assert_int_equal(kv_index_touch(unit->index, held.ino, 1, 0, 2), 0);
	assert_int_equal(kv_index_touch(unit->index, 999, 1, 0, 2), -ENOENT);
	unit_check(unit);
}

/* ---- Extended attributes ---- */

static int set(struct unit *unit, uint64_t ino, const char *name, const char *value, int flags)
{
	return kv_index_xattr_set(unit->index, ino, name, value, strlen(value), flags, ++unit->now);
}

/* A value comes back; its inode notes the change; sizes are answered and checked. */
static void test_index_attributes__xattr_round_trip(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	char value[16];

	assert_int_equal(set(unit, file.ino, "user.a", "hello", 0), 0);
	assert_int_equal(unit_get(unit, file.ino).ctime_ns, unit->now);
	for (int round = 0; round < 2; round++) {
		assert_int_equal(kv_index_xattr_get(unit->index, file.ino, "user.a", NULL, 0), 5);
		assert_int_equal(kv_index_xattr_get(unit->index, file.ino, "user.a", value, 16), 5);
		assert_memory_equal(value, "hello", 5);
		assert_int_equal(
			kv_index_xattr_get(unit->index, file.ino, "user.a", value, 4), -ERANGE);
		unit_reopen(unit);
	}
	assert_int_equal(set(unit, file.ino, "user.a", "", 0), 0);
	assert_int_equal(kv_index_xattr_get(unit->index, file.ino, "user.a", value, 16), 0);
}

/* CREATE and REPLACE, names, and what is not there. */
static void test_index_attributes__xattr_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	char name[KV_XATTR_NAME_MAX + 2];
	char value[4];

	assert_int_equal(set(unit, file.ino, "user.a", "1", XATTR_REPLACE), -ENODATA);
	assert_int_equal(set(unit, file.ino, "user.a", "1", XATTR_CREATE), 0);
	assert_int_equal(set(unit, file.ino, "user.a", "1", XATTR_CREATE), -EEXIST);
	assert_int_equal(set(unit, file.ino, "user.a", "2", XATTR_REPLACE), 0);
	assert_int_equal(set(unit, file.ino, "user.a", "2", 4), -EINVAL);
	assert_int_equal(set(unit, file.ino, "", "2", 0), -ERANGE);
	assert_int_equal(set(unit, 999, "user.a", "2", 0), -ENOENT);
	assert_int_equal(kv_index_xattr_get(unit->index, file.ino, "user.b", value, 4), -ENODATA);
	assert_int_equal(kv_index_xattr_get(unit->index, 999, "user.b", value, 4), -ENOENT);
	assert_int_equal(kv_index_xattr_remove(unit->index, file.ino, "user.b", 1), -ENODATA);
	assert_int_equal(kv_index_xattr_remove(unit->index, 999, "user.b", 1), -ENOENT);
	assert_int_equal(kv_index_xattr_list(unit->index, 999, NULL, 0), -ENOENT);
	memset(name, 'n', sizeof(name));
	name[KV_XATTR_NAME_MAX + 1] = '\0';
	assert_int_equal(set(unit, file.ino, name, "2", 0), -ERANGE);
	assert_int_equal(kv_index_xattr_get(unit->index, file.ino, name, value, 4), -ERANGE);
	name[KV_XATTR_NAME_MAX] = '\0';
	assert_int_equal(set(unit, file.ino, name, "2", 0), 0);
	assert_int_equal(kv_index_xattr_get(unit->index, file.ino, name, value, 4), 1);
}

/* Names are listed with their NULs; a removed one is not. */
static void test_index_attributes__xattr_list_and_remove(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	char names[64];

	assert_int_equal(kv_index_xattr_list(unit->index, file.ino, names, sizeof(names)), 0);
	assert_int_equal(set(unit, file.ino, "user.aa", "1", 0), 0);
	unit_sync(unit);
	assert_int_equal(set(unit, file.ino, "user.b", "1", 0), 0);
	assert_int_equal(kv_index_xattr_list(unit->index, file.ino, NULL, 0), 15);
	assert_int_equal(kv_index_xattr_list(unit->index, file.ino, names, 14), -ERANGE);
	assert_int_equal(kv_index_xattr_list(unit->index, file.ino, names, 15), 15);
	assert_true(memcmp(names, "user.aa\0user.b\0", 15) == 0 ||
		    memcmp(names, "user.b\0user.aa\0", 15) == 0);
	assert_int_equal(kv_index_xattr_remove(unit->index, file.ino, "user.aa", 99), 0);
	assert_int_equal(unit_get(unit, file.ino).ctime_ns, 99);
	assert_int_equal(kv_index_xattr_list(unit->index, file.ino, names, sizeof(names)), 7);
	assert_string_equal(names, "user.b");
}

/* 64 KiB of values an inode, and no value above that. */
static void test_index_attributes__xattr_limits(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	char *value = calloc(1, KV_XATTR_SIZE_MAX + 1);

	assert_non_null(value);
	assert_int_equal(kv_index_xattr_set(unit->index, file.ino, "user.a", value,
				 KV_XATTR_SIZE_MAX + 1, 0, 1),
		-E2BIG);
	assert_int_equal(
		kv_index_xattr_set(unit->index, file.ino, "user.a", value, KV_XATTR_SIZE_MAX, 0, 1),
		0);
	assert_int_equal(set(unit, file.ino, "user.b", "1", 0), -ENOSPC);
	assert_int_equal(set(unit, file.ino, "user.b", "", 0), 0);
	assert_int_equal(
		kv_index_xattr_set(unit->index, file.ino, "user.a", value, 60000, 0, 1), 0);
	assert_int_equal(kv_index_xattr_set(unit->index, file.ino, "user.b", value, 5536, 0, 1), 0);
	assert_int_equal(
		kv_index_xattr_set(unit->index, file.ino, "user.b", value, 5537, 0, 1), -ENOSPC);
	free(value);
}

/* Attributes follow a rename and go with the inode. */
static void test_index_attributes__xattrs_go_with_the_inode(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	const struct kv_rename rename = {KV_ROOT_INO, "file", 4, KV_ROOT_INO, "new", 3, 0, 5};
	struct kv_inode moved;
	struct kv_inode replaced;

	assert_int_equal(set(unit, file.ino, "user.a", "1", 0), 0);
	assert_int_equal(set(unit, file.ino, "user.b", "1", 0), 0);
	assert_int_equal(kv_index_rename(unit->index, &rename, &moved, &replaced), 0);
	assert_int_equal(kv_index_xattr_get(unit->index, moved.ino, "user.a", NULL, 0), 1);
	unit_unlink(unit, KV_ROOT_INO, "new");
	assert_int_equal(kv_index_xattr_get(unit->index, moved.ino, "user.a", NULL, 0), 1);
	unit_reap(unit, file.ino);
	unit_check(unit); /* finds attributes without an inode */
}

/* Attributes whose names collide. */
static void test_index_attributes__xattr_collisions(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file;
	char name[24];
	char value[24];

	unit->index->hash_mask = 0;
	file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	for (unsigned i = 0; i < KV_HASH_SLOTS; i++) {
		(void)snprintf(name, sizeof(name), "user.%u", i);
		assert_int_equal(set(unit, file.ino, name, name, 0), 0);
	}
	assert_int_equal(set(unit, file.ino, "user.more", "1", 0), -ENOSPC);
	assert_int_equal(kv_index_xattr_get(unit->index, file.ino, "user.more", NULL, 0), -ENODATA);
	assert_int_equal(kv_index_xattr_remove(unit->index, file.ino, "user.more", 1), -ENODATA);
	assert_int_equal(kv_index_xattr_remove(unit->index, file.ino, "user.3", 1), 0);
	assert_int_equal(set(unit, file.ino, "user.15", "again", 0), 0); /* not into slot 3 */
	assert_int_equal(set(unit, file.ino, "user.more", "1", 0), 0);
	for (unsigned i = 0; i < KV_HASH_SLOTS - 1; i++) {
		(void)snprintf(name, sizeof(name), "user.%u", i);
		assert_int_equal(
			kv_index_xattr_get(unit->index, file.ino, name, value, sizeof(value)),
			i == 3 ? -ENODATA : (int)strlen(name));
		assert_true(i == 3 || memcmp(value, name, strlen(name)) == 0);
	}
	unit_check(unit);
	unit_unlink(unit, KV_ROOT_INO, "file");
	unit_reap(unit, file.ino);
	unit->index->hash_mask = UINT64_MAX;
}

/* Attributes of a held file are held, and are there once it is published. */
static void test_index_attributes__xattrs_of_held_files(void **state)
{
	struct unit *unit = *state;
	struct kv_inode kept = unit_hold(unit, KV_ROOT_INO, "kept");
	struct kv_inode lost = unit_hold(unit, KV_ROOT_INO, "lost");

	assert_int_equal(set(unit, kept.ino, "user.a", "1", 0), 0);
	assert_int_equal(set(unit, lost.ino, "user.a", "1", 0), 0);
	assert_int_equal(set(unit, lost.ino, "user.b", "1", 0), 0);
	assert_int_equal(kv_index_xattr_remove(unit->index, lost.ino, "user.b", 1), 0);
	(void)unit_write(unit, kept.ino, 1);
	unit_reopen(unit);
	assert_int_equal(kv_index_xattr_get(unit->index, kept.ino, "user.a", NULL, 0), 1);
	assert_int_equal(kv_index_xattr_get(unit->index, lost.ino, "user.a", NULL, 0), -ENOENT);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, unit_setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_attributes__change),
		TEST(test_index_attributes__change_keeps_the_tail),
		TEST(test_index_attributes__touch),
		TEST(test_index_attributes__xattr_round_trip),
		TEST(test_index_attributes__xattr_errors),
		TEST(test_index_attributes__xattr_list_and_remove),
		TEST(test_index_attributes__xattr_limits),
		TEST(test_index_attributes__xattrs_go_with_the_inode),
		TEST(test_index_attributes__xattr_collisions),
		TEST(test_index_attributes__xattrs_of_held_files),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
