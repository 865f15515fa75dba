/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that runs out: every operation is tried with the first, second, third... allocation
 * failing, until it succeeds. A failed one must answer -ENOMEM and leave the view exactly as it
 * was.
 *
 * The allocator of the C library is wrapped by symbols of this program, which the sanitizers do not
 * allow.
 */
#include <linux/fs.h>

#include "unit_index.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

int main(void)
{
	return 77;
}

#else

/* glibc's own names of what the wrappers stand for. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *p, size_t size);

/* Of this thread: how many allocations succeed before all fail. */
static _Thread_local int allocations_left = -1;

static bool allocation_fails(void)
{
	if (allocations_left < 0)
		return false;
	if (allocations_left == 0)
		return true;
	allocations_left--;
	return false;
}

void *malloc(size_t size)
{
	return allocation_fails() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
	return allocation_fails() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *p, size_t size)
{
	return allocation_fails() ? NULL : __libc_realloc(p, size);
}

/* Everything that a view shows, as one number. */
static uint64_t add(uint64_t sum, const void *data, size_t size)
{
	const uint8_t *p = data;

	for (size_t i = 0; i < size; i++)
		sum = (sum ^ p[i]) * UINT64_C(0x100000001b3);
	return sum;
}

static uint64_t fingerprint(struct unit *unit)
{
	struct kv_space_usage space = unit_space(unit);
	struct kv_key key = {.size = KV_KEY_TABLE_SIZE, .bytes = {0}};
	struct kv_iter iter;
	struct kv_value value;
	struct kv_view view;
	uint64_t sum = add(5, &space, sizeof(space));

	kv_view_begin(&view, unit->index);
	assert_int_equal(kv_iter_init(&iter, &view, &key, 0), 0);
	while (kv_iter_next(&iter, &key, &value) == 1) {
		/* Bitmaps and counters are written with the commit, not with the operation. */
		if (key.bytes[0] <= KV_TABLE_SPACE_SUMMARY)
			continue;
		sum = add(sum, key.bytes, key.size);
		sum = add(sum, value.data, value.size);
	}
	kv_iter_done(&iter);
	kv_view_end(&view);
	return sum;
}

struct scene {
	struct unit *unit;
	uint64_t dir;
	uint64_t file;   /* with two links, an attribute, and a map with segments */
	uint64_t held;   /* with two links and an attribute */
	uint64_t orphan; /* with content */
	struct kv_extent shared;
	struct kv_extent fresh;
};

static struct scene scene_new(struct unit *unit)
{
	struct scene scene = {.unit = unit};
	struct kv_chunk chunks[2];

	scene.dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755).ino;
	(void)unit_make(unit, scene.dir, "empty", S_IFDIR | 0755);
	scene.file = unit_make(unit, scene.dir, "file", S_IFREG | 0644).ino;
	scene.held = unit_hold(unit, scene.dir, "held").ino;
	scene.orphan = unit_make(unit, scene.dir, "orphan", S_IFREG | 0644).ino;
	scene.shared = unit_write(unit, scene.orphan, 5);
	unit_unlink(unit, scene.dir, "orphan");
	assert_int_equal(unit_alloc(unit, 7, &scene.fresh), 1);
	chunks[0] = (struct kv_chunk){0, 1, KV_CHUNK_SHARED, 1, &scene.shared};
	chunks[1] = (struct kv_chunk){100, 1, KV_CHUNK_FRESH, 1, &scene.fresh};
	unit_publish(unit, scene.file, chunks, 2,
		(struct kv_content){.size = 101u << KV_CHUNK_SHIFT, .replace = true});
	assert_int_equal(unit_alloc(unit, 9, &scene.fresh), 1);
	assert_int_equal(unit_try_link(unit, scene.file, KV_ROOT_INO, "file2"), 0);
	assert_int_equal(unit_try_link(unit, scene.held, KV_ROOT_INO, "held2"), 0);
	assert_int_equal(kv_index_xattr_set(unit->index, scene.file, "user.a", "1", 1, 0, 1), 0);
	assert_int_equal(kv_index_xattr_set(unit->index, scene.held, "user.a", "1", 1, 0, 1), 0);
	return scene;
}

static int do_make(struct scene *scene)
{
	struct kv_inode inode;

	return unit_try_make(scene->unit, scene->dir, "new", S_IFREG | 0644, &inode);
}

static int do_hold(struct scene *scene)
{
	const struct kv_make make = {.parent = scene->dir,
		.name = "new",
		.length = 3,
		.mode = S_IFREG | 0644,
		.hold = true};
	struct kv_inode inode;

	return kv_index_make(scene->unit->index, &make, &inode);
}

static int do_link(struct scene *scene)
{
	return unit_try_link(scene->unit, scene->file, scene->dir, "new");
}

static int do_unlink(struct scene *scene)
{
	return unit_try_unlink(scene->unit, scene->dir, "file", false);
}

static int do_rmdir(struct scene *scene)
{
	return unit_try_unlink(scene->unit, scene->dir, "empty", true);
}

static int do_rename(struct scene *scene)
{
	const struct kv_rename rename = {scene->dir, "empty", 5, KV_ROOT_INO, "new", 3, 0, 1};
	struct kv_inode a;
	struct kv_inode b;

	return kv_index_rename(scene->unit->index, &rename, &a, &b);
}

static int do_exchange(struct scene *scene)
{
	const struct kv_rename rename = {
		scene->dir, "empty", 5, KV_ROOT_INO, "file2", 5, RENAME_EXCHANGE, 1};
	struct kv_inode a;
	struct kv_inode b;

	return kv_index_rename(scene->unit->index, &rename, &a, &b);
}

static int do_xattr_set(struct scene *scene)
{
	return kv_index_xattr_set(scene->unit->index, scene->file, "user.b", "2", 1, 0, 1);
}

static int do_xattr_remove(struct scene *scene)
{
	return kv_index_xattr_remove(scene->unit->index, scene->file, "user.a", 1);
}

static int do_touch(struct scene *scene)
{
	return kv_index_touch(scene->unit->index, scene->file, 3, 1, 1);
}

static int do_publish(struct scene *scene)
{
	struct kv_chunk chunks[2] = {
		{1, 1, KV_CHUNK_SHARED, 1, &scene->shared},
		{2, 1, KV_CHUNK_FRESH, 1, &scene->fresh},
	};
	const struct kv_content content = {
		3 << KV_CHUNK_SHIFT, UINT32_MAX, 1, 1, 1, true, chunks, 2, 0, 0};
	struct kv_inode inode;
	struct kv_freed freed;
	int r = kv_index_publish(scene->unit->index, scene->file, &content, &inode, &freed);

	if (r == 0)
		kv_space_release(scene->unit->space, &freed);
	return r;
}

static int do_publish_held(struct scene *scene)
{
	struct kv_chunk chunk = {0, 1, KV_CHUNK_FRESH, 1, &scene->fresh};
	const struct kv_content content = {1 << KV_CHUNK_SHIFT, 1, 1, 1, 1, true, &chunk, 1, 0, 0};
	struct kv_inode inode;
	struct kv_freed freed;
	int r = kv_index_publish(scene->unit->index, scene->held, &content, &inode, &freed);

	if (r == 0)
		kv_space_release(scene->unit->space, &freed);
	return r;
}

static int do_evict(struct scene *scene)
{
	struct kv_inode inode;
	int r = kv_index_get(scene->unit->index, scene->file, &inode);

	return r < 0 ? r
		     : kv_index_evict(scene->unit->index, scene->file, inode.last_use_ns, false, 1,
			       NULL, NULL);
}

static int do_reap(struct scene *scene)
{
	struct kv_freed freed;
	int r = kv_index_reap(scene->unit->index, scene->orphan, &freed);

	if (r == 0)
		kv_space_release(scene->unit->space, &freed);
	return r;
}

static int do_alloc(struct scene *scene)
{
	struct kv_extent extents[8];
	int r;

	assert_int_equal(kv_space_reserve(scene->unit->space, 8), 0);
	r = kv_space_alloc(scene->unit->space, 1, 8, 0, extents);
	if (r < 0)
		kv_space_unreserve(scene->unit->space, 8);
	else
		kv_space_cancel(scene->unit->space, extents, (size_t)r);
	return r == -EIO ? -ENOMEM : r < 0 ? r : 0;
}

typedef int operation(struct scene *scene);

/* True once the operation succeeded; before it failed cleanly. */
static bool try_with(operation *what, int allocations, bool committed)
{
	struct unit unit;
	struct scene scene;
	uint64_t before;
	int r;

	unit_create(&unit, 2, 100000);
	unit.options.commit_delay_ms = UNIT_NEVER_MS;
	unit_open(&unit);
	scene = scene_new(&unit);
	if (committed)
		unit_sync(&unit);
	before = fingerprint(&unit);
	allocations_left = allocations;
	r = what(&scene);
	allocations_left = -1;
	assert_true(r == 0 || r == -ENOMEM);
	if (r < 0)
		assert_int_equal(fingerprint(&unit), before);
	unit_done(&unit);
	return r == 0;
}

static void try_all(operation *what)
{
	for (int committed = 0; committed < 2; committed++) {
		int allocations = 0;

		while (!try_with(what, allocations, committed))
			assert_true(++allocations < 200);
		assert_true(allocations > 0); /* else the wrapper does not work */
	}
}

#define MEMORY_TEST(name)                                                                          \
	static void test_index_memory__##name(void **state)                                        \
	{                                                                                          \
		(void)state;                                                                       \
		try_all(do_##name);                                                                \
	}

MEMORY_TEST(make)
MEMORY_TEST(hold)
MEMORY_TEST(link)
MEMORY_TEST(unlink)
MEMORY_TEST(rmdir)
MEMORY_TEST(rename)
MEMORY_TEST(exchange)
MEMORY_TEST(xattr_set)
MEMORY_TEST(xattr_remove)
MEMORY_TEST(touch)
MEMORY_TEST(publish)
MEMORY_TEST(publish_held)
MEMORY_TEST(evict)
MEMORY_TEST(reap)
MEMORY_TEST(alloc)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_index_memory__make),
		cmocka_unit_test(test_index_memory__hold),
		cmocka_unit_test(test_index_memory__link),
		cmocka_unit_test(test_index_memory__unlink),
		cmocka_unit_test(test_index_memory__rmdir),
		cmocka_unit_test(test_index_memory__rename),
		cmocka_unit_test(test_index_memory__exchange),
		cmocka_unit_test(test_index_memory__xattr_set),
		cmocka_unit_test(test_index_memory__xattr_remove),
		cmocka_unit_test(test_index_memory__touch),
		cmocka_unit_test(test_index_memory__publish),
		cmocka_unit_test(test_index_memory__publish_held),
		cmocka_unit_test(test_index_memory__evict),
		cmocka_unit_test(test_index_memory__reap),
		cmocka_unit_test(test_index_memory__alloc),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
