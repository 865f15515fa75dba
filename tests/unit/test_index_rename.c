/* SPDX-License-Identifier: Apache-2.0 */
/* Renaming: every kind over every kind, flags, subtrees, links, held files. */
#include <linux/fs.h>

#include "unit_index.h"

struct renamed {
	struct kv_inode moved;
	struct kv_inode replaced;
};

struct from_to {
	uint64_t parent;
	const char *name;
	uint64_t new_parent;
	const char *new_name;
};

static int try_rename(
	struct unit *unit, struct from_to what, unsigned flags, struct renamed *ret_renamed)
{
	const struct kv_rename rename = {
		.parent = what.parent,
		.name = what.name,
		.length = strlen(what.name),
		.new_parent = what.new_parent,
		.new_name = what.new_name,
		.new_length = strlen(what.new_name),
		.flags = flags,
		.now_ns = ++unit->now,
	};

	return kv_index_rename(unit->index, &rename, &ret_renamed->moved, &ret_renamed->replaced);
}

/* In the root, without flags. */
static int try_move(struct unit *unit, const char *name, const char *new_name)
{
	struct renamed renamed;

	return try_rename(
		unit, (struct from_to){KV_ROOT_INO, name, KV_ROOT_INO, new_name}, 0, &renamed);
}

/* A file moves to a free name in another directory; both directories and the file note the time. */
static void test_index_rename__to_a_free_name(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct renamed renamed;

	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "file", dir.ino, "new"}, 0,
				 &renamed),
		0);
	assert_int_equal(renamed.moved.ino, file.ino);
	assert_int_equal(renamed.moved.parent, dir.ino);
	assert_int_equal(renamed.moved.ctime_ns, unit->now);
	assert_int_equal(renamed.moved.mtime_ns, file.mtime_ns);
	assert_int_equal(renamed.replaced.ino, 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "file"), 0);
	assert_int_equal(unit_lookup(unit, dir.ino, "new"), file.ino);
	assert_int_equal(unit_get(unit, dir.ino).mtime_ns, unit->now);
	assert_int_equal(unit_get(unit, KV_ROOT_INO).mtime_ns, unit->now);
}

enum kind {
	FILE_KIND,
	SYMLINK_KIND,
	EMPTY_KIND,
	FULL_KIND, /* a directory with an entry */
	KINDS,
};

static struct kv_inode make_kind(struct unit *unit, const char *name, enum kind kind)
{
	static const uint32_t modes[KINDS] = {
		S_IFREG | 0644, S_IFLNK | 0777, S_IFDIR | 0755, S_IFDIR | 0755};
	struct kv_inode inode = unit_make(unit, KV_ROOT_INO, name, modes[kind]);

	if (kind == FULL_KIND)
		(void)unit_make(unit, inode.ino, "entry", S_IFREG | 0644);
	return inode;
}

/* Every kind over every kind: what POSIX says. */
static void test_index_rename__matrix(void **state)
{
	static const int results[KINDS][KINDS] = {
		/* over a file, a symlink, an empty and a full directory */
		[FILE_KIND] = {0, 0, -EISDIR, -EISDIR},
		[SYMLINK_KIND] = {0, 0, -EISDIR, -EISDIR},
		[EMPTY_KIND] = {-ENOTDIR, -ENOTDIR, 0, -ENOTEMPTY},
		[FULL_KIND] = {-ENOTDIR, -ENOTDIR, 0, -ENOTEMPTY},
	};
	struct unit *unit = *state;
	char from[32];
	char to[32];

	for (int round = 0; round < 2; round++)
		for (enum kind i = 0; i < KINDS; i++)
			for (enum kind k = 0; k < KINDS; k++) {
				struct kv_inode source;
				struct kv_inode target;
				struct renamed renamed;
				int r;

				(void)snprintf(from, sizeof(from), "f%d%u%u", round, i, k);
				(void)snprintf(to, sizeof(to), "t%d%u%u", round, i, k);
				source = make_kind(unit, from, i);
				target = make_kind(unit, to, k);
				if (round == 1)
					unit_sync(unit);
				r = try_rename(unit,
					(struct from_to){KV_ROOT_INO, from, KV_ROOT_INO, to}, 0,
					&renamed);
				assert_int_equal(r, results[i][k]);
				assert_int_equal(unit_lookup(unit, KV_ROOT_INO, to),
					r == 0 ? source.ino : target.ino);
				assert_int_equal(unit_lookup(unit, KV_ROOT_INO, from),
					r == 0 ? 0 : source.ino);
				if (r < 0)
					continue;
				assert_int_equal(renamed.replaced.ino, target.ino);
				assert_int_equal(renamed.replaced.nlink, 0);
				unit_reap(unit, target.ino);
			}
}

/* NOREPLACE refuses an existing target, even the same name. */
static void test_index_rename__noreplace(void **state)
{
	struct unit *unit = *state;
	struct renamed renamed;

	(void)unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	(void)unit_make(unit, KV_ROOT_INO, "b", S_IFREG | 0644);
	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "a", KV_ROOT_INO, "b"},
				 RENAME_NOREPLACE, &renamed),
		-EEXIST);
	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "a", KV_ROOT_INO, "a"},
				 RENAME_NOREPLACE, &renamed),
		-EEXIST);
	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "a", KV_ROOT_INO, "c"},
				 RENAME_NOREPLACE, &renamed),
		0);
}

/* Names and flags that cannot be, and what is not there. */
static void test_index_rename__errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	struct renamed renamed;
	char longest[KV_NAME_MAX + 2];

	memset(longest, 'x', sizeof(longest));
	longest[KV_NAME_MAX + 1] = '\0';
	assert_int_equal(try_move(unit, "none", "b"), -ENOENT);
	assert_int_equal(try_move(unit, "a", longest), -ENAMETOOLONG);
	assert_int_equal(try_move(unit, "a", ""), -EINVAL);
	assert_int_equal(
		try_rename(unit, (struct from_to){KV_ROOT_INO, "a", 999, "b"}, 0, &renamed),
		-ENOENT);
	assert_int_equal(
		try_rename(unit, (struct from_to){KV_ROOT_INO, "a", file.ino, "b"}, 0, &renamed),
		-ENOTDIR);
	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "a", KV_ROOT_INO, "b"},
				 RENAME_EXCHANGE, &renamed),
		-ENOENT);
	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "a", KV_ROOT_INO, "b"},
				 RENAME_EXCHANGE | RENAME_NOREPLACE, &renamed),
		-EINVAL);
	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "a", KV_ROOT_INO, "b"},
				 RENAME_WHITEOUT, &renamed),
		-EINVAL);
}

/* Two names of one file: nothing happens. */
static void test_index_rename__same_inode_is_no_operation(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	struct renamed renamed;
	uint64_t sequence;

	assert_int_equal(unit_try_link(unit, file.ino, KV_ROOT_INO, "b"), 0);
	sequence = kv_index_sequence(unit->index);
	assert_int_equal(
		try_rename(unit, (struct from_to){KV_ROOT_INO, "a", KV_ROOT_INO, "b"}, 0, &renamed),
		0);
	assert_int_equal(renamed.moved.ino, file.ino);
	assert_int_equal(renamed.replaced.ino, 0);
	assert_int_equal(try_move(unit, "a", "a"), 0);
	assert_int_equal(kv_index_sequence(unit->index), sequence);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "a"), file.ino);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "b"), file.ino);
}

/* A directory takes its ".." along; both parents' link counts follow. */
static void test_index_rename__directory_to_another_parent(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = unit_make(unit, KV_ROOT_INO, "a", S_IFDIR | 0755);
	struct kv_inode b = unit_make(unit, KV_ROOT_INO, "b", S_IFDIR | 0755);
	struct kv_inode sub = unit_make(unit, a.ino, "sub", S_IFDIR | 0755);
	struct renamed renamed;

	assert_int_equal(
		try_rename(unit, (struct from_to){a.ino, "sub", b.ino, "sub"}, 0, &renamed), 0);
	assert_int_equal(unit_get(unit, sub.ino).parent, b.ino);
	assert_int_equal(unit_get(unit, a.ino).nlink, 2);
	assert_int_equal(unit_get(unit, b.ino).nlink, 3);
	assert_int_equal(unit_get(unit, KV_ROOT_INO).nlink, 4);
	/* Over an empty directory: the parent loses one and gains one. */
	(void)unit_make(unit, a.ino, "other", S_IFDIR | 0755);
	assert_int_equal(
		try_rename(unit, (struct from_to){b.ino, "sub", a.ino, "other"}, 0, &renamed), 0);
	assert_int_equal(unit_get(unit, a.ino).nlink, 3);
	assert_int_equal(unit_get(unit, b.ino).nlink, 2);
}

/* No directory moves into itself or below. */
static void test_index_rename__not_into_own_subtree(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = unit_make(unit, KV_ROOT_INO, "a", S_IFDIR | 0755);
	struct kv_inode b = unit_make(unit, a.ino, "b", S_IFDIR | 0755);
	struct kv_inode c = unit_make(unit, b.ino, "c", S_IFDIR | 0755);
	struct renamed renamed;

	assert_int_equal(
		try_rename(unit, (struct from_to){KV_ROOT_INO, "a", a.ino, "x"}, 0, &renamed),
		-EINVAL);
	assert_int_equal(
		try_rename(unit, (struct from_to){KV_ROOT_INO, "a", c.ino, "x"}, 0, &renamed),
		-EINVAL);
	assert_int_equal(
		try_rename(unit, (struct from_to){b.ino, "c", KV_ROOT_INO, "a"}, 0, &renamed),
		-ENOTEMPTY);
	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "a", b.ino, "c"},
				 RENAME_EXCHANGE, &renamed),
		-EINVAL);
	assert_int_equal(try_rename(unit, (struct from_to){b.ino, "c", KV_ROOT_INO, "a"},
				 RENAME_EXCHANGE, &renamed),
		-EINVAL);
	assert_int_equal(
		try_rename(unit, (struct from_to){b.ino, "c", KV_ROOT_INO, "c"}, 0, &renamed), 0);
}

/* EXCHANGE swaps a file and a directory of two directories. */
static void test_index_rename__exchange(void **state)
{
	struct unit *unit = *state;
	struct kv_inode p = unit_make(unit, KV_ROOT_INO, "p", S_IFDIR | 0755);
	struct kv_inode q = unit_make(unit, KV_ROOT_INO, "q", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, p.ino, "file", S_IFREG | 0644);
	struct kv_inode dir = unit_make(unit, q.ino, "dir", S_IFDIR | 0755);
	struct renamed renamed;

	(void)unit_make(unit, dir.ino, "entry", S_IFREG | 0644);
	for (int round = 0; round < 2; round++) {
		assert_int_equal(try_rename(unit, (struct from_to){p.ino, "file", q.ino, "dir"},
					 RENAME_EXCHANGE, &renamed),
			0);
		assert_int_equal(renamed.moved.ino, round == 0 ? file.ino : dir.ino);
		assert_int_equal(renamed.replaced.ino, round == 0 ? dir.ino : file.ino);
		assert_int_equal(renamed.replaced.nlink, round == 0 ? 2 : 1);
		assert_int_equal(unit_lookup(unit, p.ino, "file"), round == 0 ? dir.ino : file.ino);
		assert_int_equal(unit_lookup(unit, q.ino, "dir"), round == 0 ? file.ino : dir.ino);
		assert_int_equal(unit_get(unit, p.ino).nlink, round == 0 ? 3 : 2);
		assert_int_equal(unit_get(unit, q.ino).nlink, round == 0 ? 2 : 3);
		assert_int_equal(unit_get(unit, dir.ino).parent, round == 0 ? p.ino : q.ino);
		unit_sync(unit);
		unit_check(unit);
	}
}

/* Links that are not the first move and are replaced, too. */
static void test_index_rename__further_links(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode a = unit_make(unit, KV_ROOT_INO, "a1", S_IFREG | 0644);
	struct kv_inode b = unit_make(unit, KV_ROOT_INO, "b1", S_IFREG | 0644);
	struct renamed renamed;

	assert_int_equal(unit_try_link(unit, a.ino, KV_ROOT_INO, "a2"), 0);
	assert_int_equal(unit_try_link(unit, b.ino, KV_ROOT_INO, "b2"), 0);
	assert_int_equal(
		try_rename(unit, (struct from_to){KV_ROOT_INO, "a2", dir.ino, "a3"}, 0, &renamed),
		0);
	assert_int_equal(renamed.moved.nlink, 2);
	unit_check(unit);
	assert_int_equal(try_rename(unit, (struct from_to){dir.ino, "a3", KV_ROOT_INO, "b2"},
				 RENAME_EXCHANGE, &renamed),
		0);
	unit_check(unit);
	assert_int_equal(unit_lookup(unit, dir.ino, "a3"), b.ino);
	assert_int_equal(
		try_rename(unit, (struct from_to){dir.ino, "a3", KV_ROOT_INO, "a1"}, 0, &renamed),
		0);
	assert_int_equal(renamed.replaced.ino, a.ino);
	assert_int_equal(renamed.replaced.nlink, 1);
	unit_check(unit);
	assert_int_equal(unit_get(unit, b.ino).nlink, 2);
}

/* Colliding names can be renamed to each other, in full buckets, too. */
static void test_index_rename__collisions(void **state)
{
	struct unit *unit = *state;
	char name[24];

	unit->index->hash_mask = 0;
	for (unsigned i = 0; i < KV_HASH_SLOTS; i++) {
		(void)snprintf(name, sizeof(name), "n%u", i);
		(void)unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644);
	}
	assert_int_equal(try_move(unit, "n3", "new"), 0); /* into its own slot */
	assert_int_equal(try_move(unit, "n4", "n5"), 0);
	assert_int_equal(try_move(unit, "new", "n4"), 0);
	unit_check(unit);
	for (unsigned i = 0; i < KV_HASH_SLOTS; i++) {
		(void)snprintf(name, sizeof(name), "n%u", i);
		assert_int_equal(unit_lookup(unit, KV_ROOT_INO, name) != 0, i != 3);
		if (i != 3)
			unit_unlink(unit, KV_ROOT_INO, name);
	}
	unit->index->hash_mask = UINT64_MAX;
}

/* A held file moves to a free name and stays held; where the other name exists, it must be
 * published. */
static void test_index_rename__held(void **state)
{
	struct unit *unit = *state;
	struct kv_inode held = unit_hold(unit, KV_ROOT_INO, "held");
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct renamed renamed;

	assert_int_equal(try_move(unit, "held", "held2"), 0);
	assert_true(unit_get(unit, held.ino).flags & KV_INODE_HELD);
	assert_int_equal(try_move(unit, "held2", "file"), -EINPROGRESS);
	assert_int_equal(try_move(unit, "file", "held2"), -EINPROGRESS);
	assert_int_equal(
		try_rename(unit, (struct from_to){KV_ROOT_INO, "held2", KV_ROOT_INO, "file"},
			RENAME_EXCHANGE, &renamed),
		-EINPROGRESS);
	assert_int_equal(
		try_rename(unit, (struct from_to){KV_ROOT_INO, "held2", KV_ROOT_INO, "file"},
			RENAME_NOREPLACE, &renamed),
		-EEXIST);
	(void)unit_write(unit, held.ino, 1);
	assert_int_equal(try_move(unit, "held2", "file"), 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "file"), held.ino);
	unit_reap(unit, file.ino);
}

/* A held file that was renamed is absent after a restart under both names. */
static void test_index_rename__held_is_not_committed(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct renamed renamed;

	(void)unit_hold(unit, KV_ROOT_INO, "held");
	assert_int_equal(try_rename(unit, (struct from_to){KV_ROOT_INO, "held", dir.ino, "new"}, 0,
				 &renamed),
		0);
	unit_reopen(unit);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "held"), 0);
	assert_int_equal(unit_lookup(unit, dir.ino, "new"), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, unit_setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_rename__to_a_free_name),
		TEST(test_index_rename__matrix),
		TEST(test_index_rename__noreplace),
		TEST(test_index_rename__errors),
		TEST(test_index_rename__same_inode_is_no_operation),
		TEST(test_index_rename__directory_to_another_parent),
		TEST(test_index_rename__not_into_own_subtree),
		TEST(test_index_rename__exchange),
		TEST(test_index_rename__further_links),
		TEST(test_index_rename__collisions),
		TEST(test_index_rename__held),
		TEST(test_index_rename__held_is_not_committed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
