/* SPDX-License-Identifier: Apache-2.0 */
/* Names: making, looking up, listing, linking, unlinking, and their errors. */
#include "unit_index.h"

/* A new index has the root, with the owner and mode it was made with. */
static void test_index_names__root(void **state)
{
	struct kv_inode root = unit_get(*state, KV_ROOT_INO);

	assert_int_equal(root.mode, S_IFDIR | 0755);
	assert_int_equal(root.uid, 10);
	assert_int_equal(root.gid, 20);
	assert_int_equal(root.nlink, 2);
	assert_int_equal(root.parent, KV_ROOT_INO);
	assert_int_equal(root.mtime_ns, UNIT_NOW);
}

/* What is made can be looked up, has the attributes given, and changes its directory's times. */
static void test_index_names__make_and_look_up(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0640);
	struct kv_inode found;
	struct kv_inode root = unit_get(unit, KV_ROOT_INO);

	assert_int_equal(kv_index_lookup(unit->index, KV_ROOT_INO, "file", 4, &found), 0);
	assert_memory_equal(&found, &file, sizeof(found));
	assert_int_equal(found.mode, S_IFREG | 0640);
	assert_int_equal(found.uid, 1000);
	assert_int_equal(found.gid, 1001);
	assert_int_equal(found.nlink, 1);
	assert_int_equal(found.btime_ns, unit->now);
	assert_int_equal(found.parent, KV_ROOT_INO);
	assert_int_equal(root.mtime_ns, unit->now);
	assert_int_equal(root.ctime_ns, unit->now);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "fil"), 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "file2"), 0);
}

/* Every documented error of make. */
static void test_index_names__make_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_inode gone = unit_make(unit, KV_ROOT_INO, "gone", S_IFDIR | 0755);
	char longest[KV_NAME_MAX + 2];
	struct kv_inode inode;
	uint64_t sequence;

	memset(longest, 'x', sizeof(longest));
	longest[KV_NAME_MAX + 1] = '\0';
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "gone", true), 0);
	sequence = kv_index_sequence(unit->index);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "file", S_IFREG, &inode), -EEXIST);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "file", S_IFDIR, &inode), -EEXIST);
	assert_int_equal(unit_try_make(unit, file.ino, "x", S_IFREG, &inode), -ENOTDIR);
	assert_int_equal(unit_try_make(unit, 999, "x", S_IFREG, &inode), -ENOENT);
	assert_int_equal(unit_try_make(unit, gone.ino, "x", S_IFREG, &inode), -ENOENT);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, longest, S_IFREG, &inode), -ENAMETOOLONG);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "", S_IFREG, &inode), -EINVAL);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, ".", S_IFREG, &inode), -EINVAL);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "..", S_IFREG, &inode), -EINVAL);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "a/b", S_IFREG, &inode), -EINVAL);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "fifo", S_IFIFO, &inode), -EPERM);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "dev", S_IFBLK, &inode), -EPERM);
	/* A refused operation is none. */
	assert_int_equal(kv_index_sequence(unit->index), sequence);
	longest[KV_NAME_MAX] = '\0';
	inode = unit_make(unit, KV_ROOT_INO, longest, S_IFREG);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, longest), inode.ino);
	unit_reap(unit, gone.ino);
}

/* Lookup in what is no directory, or not there. */
static void test_index_names__lookup_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	char name[KV_NAME_MAX + 1] = {0};
	struct kv_inode inode;

	memset(name, 'x', sizeof(name));
	assert_int_equal(kv_index_lookup(unit->index, file.ino, "x", 1, &inode), -ENOTDIR);
	assert_int_equal(kv_index_lookup(unit->index, 999, "x", 1, &inode), -ENOENT);
	assert_int_equal(kv_index_lookup(unit->index, KV_ROOT_INO, "x", 1, &inode), -ENOENT);
	assert_int_equal(kv_index_lookup(unit->index, KV_ROOT_INO, name, sizeof(name), &inode),
		-ENAMETOOLONG);
	assert_int_equal(kv_index_get(unit->index, 999, &inode), -ENOENT);
	assert_int_equal(kv_index_get(unit->index, 0, &inode), -ENOENT);
}

/* A symlink gives back its target, cut to the buffer, from every layer. */
static void test_index_names__readlink(void **state)
{
	struct unit *unit = *state;
	struct kv_inode link = unit_make(unit, KV_ROOT_INO, "link", S_IFLNK | 0777);
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	char target[16];

	assert_int_equal(link.size, 6);
	for (int round = 0; round < 2; round++) {
		assert_int_equal(
			kv_index_readlink(unit->index, link.ino, target, sizeof(target)), 6);
		assert_memory_equal(target, "target", 6);
		assert_int_equal(kv_index_readlink(unit->index, link.ino, target, 3), 3);
		unit_reopen(unit);
	}
	assert_int_equal(kv_index_readlink(unit->index, file.ino, target, 3), -EINVAL);
	assert_int_equal(kv_index_readlink(unit->index, 999, target, 3), -ENOENT);
}

/* Symlink targets of 1 to 4095 bytes, no others. */
static void test_index_names__symlink_target_limits(void **state)
{
	struct unit *unit = *state;
	static char target[KV_TARGET_MAX + 2];
	static char back[KV_TARGET_MAX + 1];
	struct kv_make make = {
		.parent = KV_ROOT_INO,
		.name = "l",
		.length = 1,
		.mode = S_IFLNK | 0777,
		.target = target,
	};
	struct kv_inode inode;

	memset(target, 't', KV_TARGET_MAX + 1);
	target[KV_TARGET_MAX + 1] = '\0';
	assert_int_equal(kv_index_make(unit->index, &make, &inode), -ENAMETOOLONG);
	target[KV_TARGET_MAX] = '\0';
	assert_int_equal(kv_index_make(unit->index, &make, &inode), 0);
	assert_int_equal(
		kv_index_readlink(unit->index, inode.ino, back, sizeof(back)), KV_TARGET_MAX);
	make.name = "m";
	target[0] = '\0';
	assert_int_equal(kv_index_make(unit->index, &make, &inode), -EINVAL);
	make.target = NULL;
	assert_int_equal(kv_index_make(unit->index, &make, &inode), -EINVAL);
}

/* Directories count their subdirectories. */
static void test_index_names__directory_link_counts(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);

	assert_int_equal(dir.nlink, 2);
	assert_int_equal(unit_get(unit, KV_ROOT_INO).nlink, 3);
	(void)unit_make(unit, dir.ino, "a", S_IFDIR | 0755);
	(void)unit_make(unit, dir.ino, "b", S_IFDIR | 0755);
	(void)unit_make(unit, dir.ino, "c", S_IFREG | 0644);
	assert_int_equal(unit_get(unit, dir.ino).nlink, 4);
	assert_int_equal(unit_try_unlink(unit, dir.ino, "a", true), 0);
	assert_int_equal(unit_get(unit, dir.ino).nlink, 3);
}

/* Every documented error of unlink and rmdir. */
static void test_index_names__unlink_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, dir.ino, "file", S_IFREG | 0644);
	struct kv_inode inode;

	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "none", false), -ENOENT);
	assert_int_equal(unit_try_unlink(unit, 999, "none", false), -ENOENT);
	assert_int_equal(unit_try_unlink(unit, file.ino, "none", false), -ENOTDIR);
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", false), -EISDIR);
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", true), -ENOTEMPTY);
	assert_int_equal(unit_try_unlink(unit, dir.ino, "file", true), -ENOTDIR);
	assert_int_equal(
		kv_index_unlink(unit->index, dir.ino, "file", 4, false, 999, 1, &inode), -ESTALE);
	assert_int_equal(
		kv_index_unlink(unit->index, dir.ino, "file", 4, false, file.ino, 77, &inode), 0);
	assert_int_equal(inode.ino, file.ino);
	assert_int_equal(inode.nlink, 0);
	assert_int_equal(inode.ctime_ns, 77);
	assert_int_equal(unit_get(unit, dir.ino).mtime_ns, 77);
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", true), 0);
}

/* An unlinked inode stays readable as an orphan until it is reaped, also across a restart. */
static void test_index_names__orphans_stay_until_reaped(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_freed freed;
	uint64_t inos[4];

	assert_int_equal(kv_index_reap(unit->index, file.ino, &freed), -EBUSY);
	assert_int_equal(kv_index_reap(unit->index, dir.ino, &freed), -EBUSY);
	unit_unlink(unit, KV_ROOT_INO, "file");
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", true), 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "file"), 0);
	for (int round = 0; round < 2; round++) {
		assert_int_equal(unit_get(unit, file.ino).nlink, 0);
		assert_int_equal(kv_index_orphans(unit->index, 0, inos, 4), 2);
		assert_int_equal(inos[0], file.ino);
		assert_int_equal(inos[1], dir.ino);
		assert_int_equal(kv_index_orphans(unit->index, file.ino, inos, 4), 1);
		assert_int_equal(inos[0], dir.ino);
		assert_int_equal(kv_index_orphans(unit->index, 0, inos, 1), 1);
		unit_reopen(unit);
	}
	unit_reap(unit, file.ino);
	unit_reap(unit, dir.ino);
	assert_int_equal(kv_index_reap(unit->index, file.ino, &freed), -ENOENT);
	assert_int_equal(kv_index_orphans(unit->index, 0, inos, 4), 0);
}

/* Inode numbers are never used twice, not even after a restart. */
static void test_index_names__numbers_are_not_reused(void **state)
{
	struct unit *unit = *state;
	uint64_t last = 0;

	for (int i = 0; i < 5; i++) {
		struct kv_inode inode = unit_make(unit, KV_ROOT_INO, "f", S_IFREG | 0644);

		assert_true(inode.ino > last);
		last = inode.ino;
		unit_unlink(unit, KV_ROOT_INO, "f");
		unit_reap(unit, inode.ino);
		unit_reopen(unit);
	}
	assert_true(last < 100); /* an orderly close gives back the margin */
}

/* The name of an inode, for messages. */
static void test_index_names__name_of_inode(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, dir.ino, "some file", S_IFREG | 0644);
	char name[KV_NAME_MAX + 1];
	uint64_t parent;

	assert_int_equal(kv_index_name(unit->index, file.ino, &parent, name), 0);
	assert_int_equal(parent, dir.ino);
	assert_string_equal(name, "some file");
	unit_unlink(unit, dir.ino, "some file");
	assert_int_equal(kv_index_name(unit->index, file.ino, &parent, name), -ENOENT);
	assert_int_equal(kv_index_name(unit->index, 999, &parent, name), -ENOENT);
}

/* ---- Links ---- */

/* A file is there until its last name goes, whichever goes first. */
static void test_index_names__hard_links(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "one", S_IFREG | 0644);
	char name[KV_NAME_MAX + 1];
	uint64_t parent;

	assert_int_equal(unit_try_link(unit, file.ino, dir.ino, "two"), 0);
	assert_int_equal(unit_try_link(unit, file.ino, dir.ino, "three"), 0);
	assert_int_equal(unit_get(unit, file.ino).nlink, 3);
	assert_int_equal(unit_get(unit, file.ino).ctime_ns, unit->now);
	assert_int_equal(unit_get(unit, dir.ino).mtime_ns, unit->now);
	unit_check(unit);
	unit_unlink(unit, KV_ROOT_INO, "one"); /* the first link: another takes its place */
	assert_int_equal(kv_index_name(unit->index, file.ino, &parent, name), 0);
	assert_int_equal(parent, dir.ino);
	unit_reopen(unit);
	unit_check(unit);
	assert_int_equal(unit_lookup(unit, dir.ino, "two"), file.ino);
	unit_unlink(unit, dir.ino, "two");
	assert_int_equal(unit_get(unit, file.ino).nlink, 1);
	unit_check(unit);
	unit_unlink(unit, dir.ino, "three");
	assert_int_equal(unit_get(unit, file.ino).nlink, 0);
	unit_reap(unit, file.ino);
}

/* Every documented error of link. */
static void test_index_names__link_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_inode gone = unit_make(unit, KV_ROOT_INO, "gone", S_IFREG | 0644);
	struct kv_inode symlink = unit_make(unit, KV_ROOT_INO, "sym", S_IFLNK | 0777);

	unit_unlink(unit, KV_ROOT_INO, "gone");
	assert_int_equal(unit_try_link(unit, dir.ino, KV_ROOT_INO, "x"), -EPERM);
	assert_int_equal(unit_try_link(unit, file.ino, KV_ROOT_INO, "dir"), -EEXIST);
	assert_int_equal(unit_try_link(unit, file.ino, KV_ROOT_INO, "file"), -EEXIST);
	assert_int_equal(unit_try_link(unit, file.ino, 999, "x"), -ENOENT);
	assert_int_equal(unit_try_link(unit, file.ino, file.ino, "x"), -ENOTDIR);
	assert_int_equal(unit_try_link(unit, 999, KV_ROOT_INO, "x"), -ENOENT);
	assert_int_equal(unit_try_link(unit, gone.ino, KV_ROOT_INO, "x"), -ENOENT);
	assert_int_equal(unit_try_link(unit, symlink.ino, dir.ino, "sym"), 0);
	assert_int_equal(unit_get(unit, symlink.ino).nlink, 2);
}

/* A file has at most 65,000 names. */
static void test_index_names__link_limit(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, dir.ino, "first", S_IFREG | 0644);
	char name[24];

	for (unsigned i = 1; i < KV_NLINK_MAX; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		assert_int_equal(unit_try_link(unit, file.ino, dir.ino, name), 0);
	}
	assert_int_equal(unit_get(unit, file.ino).nlink, KV_NLINK_MAX);
	assert_int_equal(unit_try_link(unit, file.ino, dir.ino, "more"), -EMLINK);
	unit_unlink(unit, dir.ino, "first");
	assert_int_equal(unit_try_link(unit, file.ino, dir.ino, "more"), 0);
}

/* ---- Listing ---- */

struct listing {
	char names[64][24];
	uint64_t cookies[64];
	uint64_t inos[64];
	struct kv_inode inodes[64];
	size_t count;
	size_t most;
};

static bool add_entry(void *arg, const struct kv_dirent *dirent)
{
	struct listing *listing = arg;
	size_t i = listing->count++;

	assert_true(i < 64 && dirent->length < 24);
	memcpy(listing->names[i], dirent->name, dirent->length);
	listing->names[i][dirent->length] = '\0';
	listing->cookies[i] = dirent->cookie;
	listing->inos[i] = dirent->ino;
	listing->inodes[i] = dirent->inode;
	assert_true(dirent->cookie > 2 && dirent->cookie <= INT64_MAX);
	return listing->count < listing->most;
}

/* Every entry is listed once, in the order of its cookie, with its inode if wanted. */
static void test_index_names__readdir(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct listing listing = {.most = 64};
	char name[24];

	for (int i = 0; i < 50; i++) {
		(void)snprintf(name, sizeof(name), "entry-%d", i);
		(void)unit_make(unit, dir.ino, name, i % 2 ? S_IFREG | 0644 : S_IFDIR | 0755);
		if (i % 20 == 10)
			unit_sync(unit); /* some in LMDB, some above */
	}
	assert_int_equal(kv_index_readdir(unit->index, dir.ino, 0, true, add_entry, &listing), 0);
	assert_int_equal(listing.count, 50);
	for (size_t i = 0; i < 50; i++) {
		assert_true(i == 0 || listing.cookies[i] > listing.cookies[i - 1]);
		assert_int_equal(unit_lookup(unit, dir.ino, listing.names[i]), listing.inos[i]);
		assert_int_equal(listing.inodes[i].ino, listing.inos[i]);
	}
}

/* A listing goes on behind any cookie, also if that entry went meanwhile. */
static void test_index_names__readdir_goes_on(void **state)
{
	struct unit *unit = *state;
	struct listing all = {.most = 64};
	struct listing part = {.most = 7};
	uint64_t cookie = 0;
	char name[24];

	for (int i = 0; i < 30; i++) {
		(void)snprintf(name, sizeof(name), "entry-%d", i);
		(void)unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644);
	}
	assert_int_equal(kv_index_readdir(unit->index, KV_ROOT_INO, 0, false, add_entry, &all), 0);
	for (size_t i = 0; i < 30; i += 7) {
		part.count = 0;
		assert_int_equal(
			kv_index_readdir(unit->index, KV_ROOT_INO, cookie, false, add_entry, &part),
			0);
		assert_int_equal(part.count, i + 7 <= 30 ? 7 : 30 - i);
		for (size_t k = 0; k < part.count; k++)
			assert_string_equal(part.names[k], all.names[i + k]);
		cookie = part.cookies[part.count - 1];
		unit_unlink(unit, KV_ROOT_INO, part.names[part.count - 1]);
	}
}

/* Listing what is no directory, or behind every cookie. */
static void test_index_names__readdir_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct listing listing = {.most = 64};

	assert_int_equal(
		kv_index_readdir(unit->index, file.ino, 0, false, add_entry, &listing), -ENOTDIR);
	assert_int_equal(
		kv_index_readdir(unit->index, 999, 0, false, add_entry, &listing), -ENOENT);
	assert_int_equal(
		kv_index_readdir(unit->index, KV_ROOT_INO, UINT64_MAX, false, add_entry, &listing),
		0);
	assert_int_equal(listing.count, 0);
}

/* ---- Collisions ---- */

/* Names of one hash live beside each other; the seventeenth is refused; a slot that went is reused.
 */
static void test_index_names__collisions(void **state)
{
	struct unit *unit = *state;
	struct kv_inode inode;
	struct listing listing = {.most = 64};
	uint64_t inos[KV_HASH_SLOTS];
	char name[24];

	unit->index->hash_mask = 0;
	for (unsigned i = 0; i < KV_HASH_SLOTS; i++) {
		(void)snprintf(name, sizeof(name), "n%u", i);
		inos[i] = unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644).ino;
		if (i == 9)
			unit_sync(unit);
	}
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "n16", S_IFREG, &inode), -ENOSPC);
	assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "n3", S_IFREG, &inode), -EEXIST);
	for (unsigned i = 0; i < KV_HASH_SLOTS; i++) {
		(void)snprintf(name, sizeof(name), "n%u", i);
		assert_int_equal(unit_lookup(unit, KV_ROOT_INO, name), inos[i]);
	}
	unit_unlink(unit, KV_ROOT_INO, "n4");
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "n4"), 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "n15"), inos[15]);
	inode = unit_make(unit, KV_ROOT_INO, "n16", S_IFREG | 0644);
	assert_int_equal(inode.cookie, KV_HASH_SLOTS + 4);
	assert_int_equal(
		kv_index_readdir(unit->index, KV_ROOT_INO, 0, true, add_entry, &listing), 0);
	assert_int_equal(listing.count, KV_HASH_SLOTS);
	unit_check(unit);
	/* The checks of teardown hash with the real mask: leave nothing that was placed without. */
	for (size_t i = 0; i < listing.count; i++)
		unit_unlink(unit, KV_ROOT_INO, listing.names[i]);
	unit->index->hash_mask = UINT64_MAX;
}

static struct kv_find find_of(const char *name, size_t length)
{
	return (struct kv_find){.name = name, .length = length, .ino = 77};
}

/* Many names at once: number, type and whether it is held of those that are there; what is no name
 * ends it. */
static void test_index_names__find(void **state)
{
	struct unit *unit = *state;
	const struct kv_make held = {
		.parent = KV_ROOT_INO,
		.name = "held",
		.length = 4,
		.mode = S_IFREG | 0600,
		.now_ns = UNIT_NOW,
		.hold = true,
	};
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0640);
	struct kv_inode directory = unit_make(unit, KV_ROOT_INO, "d", S_IFDIR | 0750);
	struct kv_inode inode;
	char longest[KV_NAME_MAX + 1];

	memset(longest, 'n', sizeof(longest));
	assert_int_equal(kv_index_make(unit->index, &held, &inode), 0);
	struct kv_find finds[] = {
		find_of("d", 1), find_of("none", 4), find_of("held", 4), find_of("file", 4)};
	assert_int_equal(kv_index_find(unit->index, KV_ROOT_INO, finds, 4), 0);
	assert_int_equal(finds[0].ino, directory.ino);
	assert_int_equal(finds[0].type, S_IFDIR);
	assert_int_equal(finds[1].ino, 0);
	assert_int_equal(finds[2].ino, inode.ino);
	assert_true(finds[2].held);
	assert_int_equal(finds[3].ino, file.ino);
	assert_int_equal(finds[3].type, S_IFREG);
	assert_false(finds[3].held);
	assert_int_equal(kv_index_find(unit->index, file.ino, finds, 4), -ENOTDIR);
	assert_int_equal(kv_index_find(unit->index, 999, finds, 4), 0);
	assert_int_equal(finds[0].ino, 0);
	finds[1] = find_of("a/b", 3);
	assert_int_equal(kv_index_find(unit->index, KV_ROOT_INO, finds, 4), -EINVAL);
	finds[1] = find_of(longest, sizeof(longest));
	assert_int_equal(kv_index_find(unit->index, KV_ROOT_INO, finds, 4), -ENAMETOOLONG);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, unit_setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_names__root),
		TEST(test_index_names__make_and_look_up),
		TEST(test_index_names__make_errors),
		TEST(test_index_names__lookup_errors),
		TEST(test_index_names__find),
		TEST(test_index_names__readlink),
		TEST(test_index_names__symlink_target_limits),
		TEST(test_index_names__directory_link_counts),
		TEST(test_index_names__unlink_errors),
		TEST(test_index_names__orphans_stay_until_reaped),
		TEST(test_index_names__numbers_are_not_reused),
		TEST(test_index_names__name_of_inode),
		TEST(test_index_names__hard_links),
		TEST(test_index_names__link_errors),
		TEST(test_index_names__link_limit),
		TEST(test_index_names__readdir),
		TEST(test_index_names__readdir_goes_on),
		TEST(test_index_names__readdir_errors),
		TEST(test_index_names__collisions),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
