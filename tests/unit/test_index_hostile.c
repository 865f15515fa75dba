/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An index with damaged records: every record in turn is cut, emptied and has bytes flipped, and
 * then everything is called. Nothing may crash or hang (the sanitizers watch), and damage to what a
 * call needs is answered with -EUCLEAN.
 */
#include <linux/fs.h>

#include "unit_damage.h"

#define INOS 40u

static bool see_entry(void *arg, const struct kv_dirent *dirent)
{
	(void)arg;
	assert_true(dirent->length <= KV_NAME_MAX);
	return true;
}

static void see_chunk(void *arg, const struct kv_chunk *chunk)
{
	struct unit *unit = arg;

	assert_int_equal(
		kv_extents_check(kv_index_store(unit->index), chunk->extents, chunk->extent_count),
		0);
}

static void see_name(void *arg, uint64_t parent, const char *name, size_t length)
{
	(void)arg;
	(void)parent;
	(void)name;
	assert_true(length <= KV_NAME_MAX);
}

/* What a call on a damaged index may answer. */
static ssize_t allowed(ssize_t r)
{
	switch (r) {
	case -EUCLEAN:
	case -ENOENT:
	case -ENOTDIR:
	case -EISDIR:
	case -EINVAL:
	case -EEXIST:
	case -ENOTEMPTY:
	case -EBUSY:
	case -ENODATA:
	case -EAGAIN:
	case -EPERM:
	case -ENOSPC:
	case -EMLINK:
	case -ESTALE:
	case -EIO:
		break;
	default:
		assert_true(r >= 0);
	}
	return r;
}

static void read_all(struct unit *unit)
{
	struct kv_index *index = unit->index;
	struct kv_index_use uses[INOS];
	struct kv_inode inode;
	char buffer[KV_NAME_MAX + 1];
	uint64_t inos[INOS];
	uint64_t parent;

	for (uint64_t ino = 0; ino < INOS; ino++) {
		(void)allowed(kv_index_get(index, ino, &inode));
		(void)allowed(kv_index_readlink(index, ino, buffer, sizeof(buffer)));
		(void)allowed(kv_index_readdir(index, ino, 0, true, see_entry, NULL));
		(void)allowed(kv_index_name(index, ino, &parent, buffer));
		(void)allowed(kv_index_xattr_list(index, ino, buffer, sizeof(buffer)));
		(void)allowed(kv_index_xattr_get(index, ino, "user.a", buffer, sizeof(buffer)));
		(void)allowed(kv_index_map(index, ino, 0, UINT32_MAX, see_chunk, unit));
		for (size_t i = 0; i < NAME_COUNT; i++)
			(void)allowed(
				kv_index_lookup(index, ino, NAMES[i], strlen(NAMES[i]), &inode));
	}
	(void)allowed(kv_index_orphans(index, 0, inos, INOS));
	(void)allowed(kv_index_oldest(index, NULL, NULL, uses, INOS));
	assert_true(kv_index_check(index, NULL, NULL) >= 0);
}

static void publish_some(struct unit *unit, uint64_t ino)
{
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	struct kv_content content = {.size = KV_CHUNK_SIZE, .replace = ino % 2};
	struct kv_freed freed;
	struct kv_chunk chunk = {0, 0, KV_CHUNK_FRESH, 1, extents};
	int count;

	if (kv_space_reserve(unit->space, 3) < 0)
		return;
	count = kv_space_alloc(unit->space, 0, 3, 0, extents);
	if (count < 0) {
		kv_space_unreserve(unit->space, 3);
		return;
	}
	chunk.extent_count = (uint32_t)count;
	if (allowed(unit_try_publish(unit, ino, &chunk, 1, content, &freed)) < 0)
		kv_space_cancel(unit->space, extents, (size_t)count);
	else
		kv_space_release(unit->space, &freed);
}

static void change_inode(struct unit *unit, uint64_t ino)
{
	struct kv_index *index = unit->index;
	const struct kv_change change = {.mask = KV_CHANGE_UID, .uid = 9};
	struct kv_inode inode;
	struct kv_freed freed;

	(void)allowed(kv_index_touch(index, ino, 5, 1, 5));
	(void)allowed(kv_index_change(index, ino, &change, &inode));
	(void)allowed(kv_index_xattr_set(index, ino, "user.a", "x", 1, 0, 1));
	(void)allowed(kv_index_xattr_remove(index, ino, "user.a", 1));
	(void)allowed(unit_try_link(unit, ino, KV_ROOT_INO, "new"));
	(void)allowed(unit_try_make(unit, ino, "new", S_IFREG | 0644, &inode));
	publish_some(unit, ino);
	if (ino % 3 == 0 && kv_index_get(index, ino, &inode) == 0)
		(void)allowed(
			kv_index_evict(index, ino, inode.last_use_ns, false, 1, see_name, NULL));
	for (int i = 0; i < 3; i++)
		if (allowed(kv_index_reap(index, ino, &freed)) >= 0)
			kv_space_release(unit->space, &freed);
}

static void change_names(struct unit *unit, uint64_t parent)
{
	for (size_t i = 0; i < NAME_COUNT; i++)
		for (unsigned flags = 0; flags <= RENAME_EXCHANGE; flags += RENAME_EXCHANGE) {
			const char *to = NAMES[(i + 3) % NAME_COUNT];
			const struct kv_rename rename = {parent, NAMES[i], strlen(NAMES[i]),
				KV_ROOT_INO, to, strlen(to), flags, 1};
			struct kv_inode moved;
			struct kv_inode replaced;

			(void)allowed(kv_index_rename(unit->index, &rename, &moved, &replaced));
		}
	for (size_t i = 0; i < NAME_COUNT; i++) {
		(void)allowed(unit_try_unlink(unit, parent, NAMES[i], false));
		(void)allowed(unit_try_unlink(unit, parent, NAMES[i], true));
	}
}

static void change_all(struct unit *unit)
{
	for (uint64_t ino = 0; ino < INOS; ino++) {
		change_inode(unit, ino);
		change_names(unit, ino);
	}
	(void)kv_index_wait(unit->index, kv_index_sequence(unit->index));
	assert_true(kv_index_check(unit->index, NULL, NULL) >= 0);
}

/* ---- Damage ---- */

/* Damages a fresh copy of the index, and calls everything. False: there is no such record. */
static bool try_damage(
	struct unit *unit, const struct image *image, struct damage damage, size_t *ret_size)
{
	char error[256];

	image_write(unit, image);
	if (!unit_damage(unit, damage, ret_size))
		return false;
	if (kv_index_open(unit->path, &unit->options, &unit->index, error, sizeof(error)) < 0)
		return true;
	unit->space = kv_index_space(unit->index);
	read_all(unit);
	change_all(unit);
	unit_close(unit);
	return true;
}

static int teardown(void **state)
{
	unit_remove(*state);
	return 0;
}

/* The undamaged index passes through the same calls. */
static void test_index_hostile__undamaged(void **state)
{
	struct unit *unit = *state;

	unit_open(unit);
	read_all(unit);
	unit_check(unit);
	change_all(unit);
	unit_check(unit);
	unit_close(unit);
}

/* Records that are cut short or empty. */
static void test_index_hostile__cut(void **state)
{
	static const size_t cuts[] = {1, 9, SIZE_MAX};
	struct unit *unit = *state;
	struct image image = image_read(unit);
	size_t size;
	size_t count = 0;

	for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++)
		for (size_t record = 0;; record++, count++) {
			struct damage damage = {.record = record, .cut = cuts[i], .flip = SIZE_MAX};

			if (!try_damage(unit, &image, damage, &size))
				break;
		}
	assert_true(count > 60);
	free(image.data);
}

/* Records with a flipped byte, at every place of the small ones. */
static void test_index_hostile__flipped(void **state)
{
	struct unit *unit = *state;
	struct image image = image_read(unit);
	size_t size = 1;

	for (size_t record = 0; size > 0; record++) {
		size_t last = 0;

		for (size_t flip = 0;; flip += last < 200 ? 5 : 211) {
			struct damage damage = {
				.record = record, .flip = flip, .bits = flip % 2 ? 0xff : 0x81};

			if (!try_damage(unit, &image, damage, &last)) {
				size = 0;
				break;
			}
			if (flip >= last)
				break;
		}
	}
	free(image.data);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, populated_setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_hostile__undamaged),
		TEST(test_index_hostile__cut),
		TEST(test_index_hostile__flipped),
	};

	kv_log_setup(
		_KV_LOG_INVALID, KV_LOG_STDERR); /* thousands of damaged records: say nothing */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
