/* SPDX-License-Identifier: Apache-2.0 */
/* Content: publishing maps, reading them, sharing extents, reaping. */
#include "unit_index.h"

#define MIB ((uint64_t)KV_CHUNK_SIZE)

struct map {
	struct kv_chunk chunks[128];
	struct kv_extent extents[128][4];
	size_t count;
};

static void add_chunk(void *arg, const struct kv_chunk *chunk)
{
	struct map *map = arg;
	size_t i = map->count++;

	assert_true(i < 128 && chunk->extent_count <= 4);
	map->chunks[i] = *chunk;
	memcpy(map->extents[i], chunk->extents, chunk->extent_count * sizeof(*chunk->extents));
	map->chunks[i].extents = map->extents[i];
}

static struct map *read_map(struct unit *unit, uint64_t ino)
{
	static struct map map;

	map.count = 0;
	assert_int_equal(kv_index_map(unit->index, ino, 0, UINT32_MAX, add_chunk, &map), 0);
	return &map;
}

static bool map_has(struct unit *unit, uint64_t ino, uint32_t number, struct kv_extent extent)
{
	const struct map *map = read_map(unit, ino);

	for (size_t i = 0; i < map->count; i++)
		if (map->chunks[i].number == number)
			return map->chunks[i].extent_count == 1 &&
			       memcmp(&map->extents[i][0], &extent, sizeof(extent)) == 0;
	return false;
}

/* One run of BLOCKS for one chunk. */
static struct kv_extent alloc_run(struct unit *unit, uint32_t blocks)
{
	struct kv_extent extents[KV_CHUNK_BLOCKS];

	assert_int_equal(unit_alloc(unit, blocks, extents), 1);
	return extents[0];
}

static struct kv_chunk fresh(uint32_t number, const struct kv_extent *extent)
{
	return (struct kv_chunk){number, 1, KV_CHUNK_FRESH, 1000 + number, extent};
}

static struct kv_chunk shared(uint32_t number, const struct kv_extent *extent)
{
	return (struct kv_chunk){number, 1, KV_CHUNK_SHARED, 1000 + number, extent};
}

static struct kv_content replace(uint64_t size)
{
	return (struct kv_content){.size = size, .replace = true};
}

static struct kv_content change(uint64_t size)
{
	return (struct kv_content){.size = size};
}

/* What is published is there: size, version, times, blocks and map, also after a restart. */
static void test_index_publish__attributes_and_map(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	const struct kv_extent extents[] = {alloc_run(unit, 256), alloc_run(unit, 7)};
	const struct kv_chunk chunks[] = {fresh(0, &extents[0]), fresh(2, &extents[1])};
	const struct kv_content content = {
		2 * MIB + 25000, 9, 11, 12, 3 * 4096, true, chunks, 2, 0, 0};
	struct kv_inode inode;
	struct kv_freed freed;

	assert_int_equal(unit_space(unit).busy, 263);
	assert_int_equal(kv_index_publish(unit->index, file.ino, &content, &inode, &freed), 0);
	assert_int_equal(freed.count, 0);
	assert_int_equal(freed.sequence, kv_index_sequence(unit->index));
	kv_space_release(unit->space, &freed);
	for (int round = 0; round < 2; round++) {
		inode = unit_get(unit, file.ino);
		assert_int_equal(inode.size, 2 * MIB + 25000);
		assert_int_equal(inode.version, 9);
		assert_int_equal(inode.mtime_ns, 11);
		assert_int_equal(inode.ctime_ns, 12);
		assert_int_equal(inode.last_use_ns, 3 * 4096);
		assert_int_equal(inode.blocks, 263);
		assert_int_equal(unit_space(unit).used, 263);
		assert_int_equal(unit_space(unit).busy, 0);
		assert_int_equal(read_map(unit, file.ino)->count, 2);
		assert_int_equal(read_map(unit, file.ino)->chunks[1].sum, 1002);
		assert_int_equal(read_map(unit, file.ino)->chunks[1].origin, KV_CHUNK_KEPT);
		assert_true(map_has(unit, file.ino, 0, extents[0]));
		assert_true(map_has(unit, file.ino, 2, extents[1]));
		unit_reopen(unit);
	}
}

/* Every documented error; each leaves the file and the space as they were. */
static void test_index_publish__errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_extent extent = alloc_run(unit, 8);
	struct kv_extent far = {UINT64_MAX, 0, 0, 8};
	struct kv_extent nothing = {99000, 1, 0, 8};
	struct kv_chunk good = fresh(0, &extent);
	struct kv_chunk bad = fresh(0, &far);
	struct kv_chunk unallocated = fresh(0, &nothing);
	struct kv_chunk stale = shared(0, &nothing);
	struct kv_chunk kept = {0, 1, KV_CHUNK_KEPT, 5, &extent};
	struct kv_chunk twice[] = {fresh(0, &extent), fresh(0, &extent)};
	struct kv_chunk same[] = {fresh(0, &extent), fresh(1, &extent)};
	struct kv_chunk half[] = {fresh(0, &extent), fresh(1, &nothing)};
	struct kv_freed freed = {0};
	struct kv_inode before;
	struct kv_inode after;

	unit_publish(unit, file.ino, NULL, 0, replace(100));
	before = unit_get(unit, file.ino);
	assert_int_equal(unit_try_publish(unit, 999, &good, 1, replace(MIB), &freed), -ENOENT);
	assert_int_equal(unit_try_publish(unit, dir.ino, &good, 1, replace(MIB), &freed), -EINVAL);
	assert_int_equal(unit_try_publish(unit, file.ino, &bad, 1, replace(MIB), &freed), -EINVAL);
	assert_int_equal(
		unit_try_publish(unit, file.ino, &unallocated, 1, replace(MIB), &freed), -EINVAL);
	assert_int_equal(
		unit_try_publish(unit, file.ino, &stale, 1, replace(MIB), &freed), -ESTALE);
	assert_int_equal(unit_try_publish(unit, file.ino, &kept, 1, replace(MIB), &freed), -ESTALE);
	assert_int_equal(unit_try_publish(unit, file.ino, twice, 2, replace(MIB), &freed), -EINVAL);
	assert_int_equal(
		unit_try_publish(unit, file.ino, same, 2, replace(2 * MIB), &freed), -EINVAL);
	assert_int_equal(
		unit_try_publish(unit, file.ino, half, 2, replace(2 * MIB), &freed), -EINVAL);
	good.number = 1; /* behind the end */
	assert_int_equal(unit_try_publish(unit, file.ino, &good, 1, replace(MIB), &freed), -EINVAL);
	assert_int_equal(
		unit_try_publish(unit, file.ino, NULL, 0, replace(UINT64_MAX), &freed), -EFBIG);
	unit->version = 0; /* the next one is not above the committed one */
	assert_int_equal(unit_try_publish(unit, file.ino, NULL, 0, replace(0), &freed), -EINVAL);
	assert_null(freed.extents);
	after = unit_get(unit, file.ino);
	assert_memory_equal(&after, &before, sizeof(after));
	assert_int_equal(unit_space(unit).busy, 8);
	assert_int_equal(unit_space(unit).used, 0);
	kv_space_cancel(unit->space, &extent, 1);
	assert_int_equal(unit_space(unit).busy, 0);
}

/* With replace, chunks not listed go; without, they stay, those behind the size excepted. */
static void test_index_publish__replace_and_change(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_extent e[6];
	struct kv_chunk chunks[3];

	for (size_t i = 0; i < 6; i++)
		e[i] = alloc_run(unit, 10);
	for (uint32_t i = 0; i < 3; i++)
		chunks[i] = fresh(i, &e[i]);
	unit_publish(unit, file.ino, chunks, 3, replace(3 * MIB));
	chunks[0] = fresh(1, &e[3]);
	unit_publish(unit, file.ino, chunks, 1, change(3 * MIB));
	assert_int_equal(read_map(unit, file.ino)->count, 3);
	assert_true(map_has(unit, file.ino, 0, e[0]));
	assert_true(map_has(unit, file.ino, 1, e[3]));
	assert_true(map_has(unit, file.ino, 2, e[2]));
	assert_int_equal(unit_get(unit, file.ino).blocks, 30);
	unit_publish(unit, file.ino, NULL, 0, change(MIB + 5)); /* truncated */
	assert_int_equal(read_map(unit, file.ino)->count, 2);
	chunks[0] = (struct kv_chunk){.number = 0, .origin = KV_CHUNK_FRESH}; /* punched */
	unit_publish(unit, file.ino, chunks, 1, change(MIB + 5));
	assert_int_equal(read_map(unit, file.ino)->count, 1);
	assert_int_equal(unit_get(unit, file.ino).blocks, 10);
	chunks[0] = fresh(0, &e[4]);
	unit_publish(unit, file.ino, chunks, 1, replace(2 * MIB));
	assert_int_equal(read_map(unit, file.ino)->count, 1);
	assert_true(map_has(unit, file.ino, 0, e[4]));
	unit_publish(unit, file.ino, NULL, 0, replace(2 * MIB));
	assert_int_equal(read_map(unit, file.ino)->count, 0);
	assert_int_equal(unit_get(unit, file.ino).blocks, 0);
	kv_space_cancel(unit->space, &e[5], 1);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used, 0);
	assert_int_equal(unit_space(unit).busy, 0);
}

/* A KEPT chunk survives a replace; one that is not as the index has it is refused. */
static void test_index_publish__kept(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_extent e[2] = {alloc_run(unit, 10), alloc_run(unit, 10)};
	struct kv_chunk chunks[2] = {fresh(0, &e[0]), fresh(1, &e[1])};
	struct kv_freed freed;

	unit_publish(unit, file.ino, chunks, 2, replace(2 * MIB));
	chunks[1].origin = KV_CHUNK_KEPT;
	unit_publish(unit, file.ino, &chunks[1], 1, replace(2 * MIB));
	assert_int_equal(read_map(unit, file.ino)->count, 1);
	assert_true(map_has(unit, file.ino, 1, e[1]));
	chunks[1].sum++;
	assert_int_equal(
		unit_try_publish(unit, file.ino, &chunks[1], 1, replace(2 * MIB), &freed), -ESTALE);
	chunks[1].sum--;
	e[1].count--;
	assert_int_equal(
		unit_try_publish(unit, file.ino, &chunks[1], 1, replace(2 * MIB), &freed), -ESTALE);
	chunks[1].extent_count = 0;
	assert_int_equal(
		unit_try_publish(unit, file.ino, &chunks[1], 1, replace(2 * MIB), &freed), -ESTALE);
}

/* A map grows out of its inode into segments and shrinks back; every chunk is found in both. */
static void test_index_publish__segments(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_extent extents[100];
	struct kv_chunk chunk;
	struct map map = {.count = 0};

	for (uint32_t i = 0; i < 100; i++) {
		extents[i] = alloc_run(unit, 1);
		chunk = fresh(i, &extents[i]);
		unit_publish(unit, file.ino, &chunk, 1, change((i + 1) * MIB));
		assert_int_equal(read_map(unit, file.ino)->count, i + 1);
		if (i % 30 == 29)
			unit_sync(unit);
	}
	for (uint32_t i = 0; i < 100; i++)
		assert_true(map_has(unit, file.ino, i, extents[i]));
	assert_int_equal(kv_index_map(unit->index, file.ino, 30, 40, add_chunk, &map), 0);
	assert_int_equal(map.count, 40);
	assert_int_equal(map.chunks[0].number, 30);
	map.count = 0;
	assert_int_equal(kv_index_map(unit->index, file.ino, 99, 1, add_chunk, &map), 0);
	assert_int_equal(map.count, 1);
	map.count = 0;
	assert_int_equal(kv_index_map(unit->index, file.ino, 100, UINT32_MAX, add_chunk, &map), 0);
	assert_int_equal(map.count, 0);
	unit_check(unit);
	for (uint32_t i = 99; i > 7; i -= 7) {
		unit_publish(unit, file.ino, NULL, 0, change(i * MIB));
		assert_int_equal(read_map(unit, file.ino)->count, i);
		unit_check(unit);
	}
	assert_true(map_has(unit, file.ino, 0, extents[0]));
	unit_publish(unit, file.ino, NULL, 0, change(40 * MIB)); /* a hole at the end */
	assert_int_equal(read_map(unit, file.ino)->count, 8);
	unit_check(unit);
}

/* A sparse file at the far end of what a file can be. */
static void test_index_publish__sparse(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_extent extent = alloc_run(unit, 1);
	struct kv_chunk chunk = fresh(UINT32_MAX - 1, &extent);

	unit_publish(unit, file.ino, &chunk, 1, replace(KV_FILE_SIZE_MAX));
	assert_true(map_has(unit, file.ino, UINT32_MAX - 1, extent));
	unit_check(unit);
	unit_publish(unit, file.ino, NULL, 0, change(KV_FILE_SIZE_MAX - MIB));
	assert_int_equal(read_map(unit, file.ino)->count, 0);
}

/* Maps of what has none. */
static void test_index_publish__map_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode held = unit_hold(unit, KV_ROOT_INO, "held");
	struct map map = {.count = 0};

	assert_int_equal(kv_index_map(unit->index, dir.ino, 0, 1, add_chunk, &map), -EINVAL);
	assert_int_equal(kv_index_map(unit->index, 999, 0, 1, add_chunk, &map), -ENOENT);
	assert_int_equal(kv_index_map(unit->index, held.ino, 0, 1, add_chunk, &map), 0);
	assert_int_equal(map.count, 0);
}

/* ---- Sharing ---- */

static uint32_t refcount(struct unit *unit, const struct kv_extent *extent)
{
	struct kv_key key = kv_key_pair(KV_TABLE_REFCOUNT, extent->device, extent->start);
	struct kv_value value;
	struct kv_view view;
	uint32_t count = 1;
	int r;

	kv_view_begin(&view, unit->index);
	r = kv_view_get(&view, &key, &value);
	if (r == 0)
		assert_int_equal(kv_refcount_decode(value.data, value.size, &count), 0);
	else
		assert_int_equal(r, -ENOENT);
	kv_view_end(&view);
	return count;
}

/* A shared extent is freed when the last file that has it lets go. */
static void test_index_publish__shared(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	struct kv_inode b = unit_make(unit, KV_ROOT_INO, "b", S_IFREG | 0644);
	struct kv_extent extent = unit_write(unit, a.ino, 20);
	struct kv_chunk chunks[2] = {shared(0, &extent), shared(1, &extent)};
	struct kv_freed freed;

	unit_publish(unit, b.ino, chunks, 2, replace(2 * MIB));
	assert_int_equal(refcount(unit, &extent), 3);
	assert_int_equal(unit_space(unit).used, 20);
	assert_int_equal(unit_get(unit, b.ino).blocks, 40);
	unit_reopen(unit);
	unit_check(unit);
	assert_int_equal(unit_try_publish(unit, a.ino, NULL, 0, replace(0), &freed), 0);
	assert_int_equal(freed.count, 0);
	kv_space_release(unit->space, &freed);
	assert_int_equal(refcount(unit, &extent), 2);
	unit_publish(unit, b.ino, NULL, 0, change(MIB));
	assert_int_equal(refcount(unit, &extent), 1);
	unit_check(unit);
	assert_int_equal(unit_try_publish(unit, b.ino, NULL, 0, replace(0), &freed), 0);
	assert_int_equal(freed.count, 1);
	assert_int_equal(freed.extents[0].start, extent.start);
	assert_int_equal(unit_space(unit).used, 0);
	assert_int_equal(unit_space(unit).busy, 20);
	kv_space_release(unit->space, &freed);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).busy, 0);
}

/* An extent may move within a file: it is never free in between, and not counted twice. */
static void test_index_publish__shared_within_a_file(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_extent extent = unit_write(unit, file.ino, 20);
	struct kv_chunk chunk = shared(5, &extent);
	struct kv_freed freed;

	assert_int_equal(unit_try_publish(unit, file.ino, &chunk, 1, replace(6 * MIB), &freed), 0);
	assert_int_equal(freed.count, 0);
	kv_space_release(unit->space, &freed);
	assert_int_equal(refcount(unit, &extent), 1);
	assert_int_equal(unit_space(unit).used, 20);
	assert_true(map_has(unit, file.ino, 5, extent));
	chunk.number = 5; /* onto itself */
	unit_publish(unit, file.ino, &chunk, 1, change(6 * MIB));
	assert_int_equal(refcount(unit, &extent), 1);
	assert_int_equal(unit_space(unit).used, 20);
}

/* An extent freed but not released can be shared: it is in use again, and the release does not free
 * it. */
static void test_index_publish__adopted(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	struct kv_inode b = unit_make(unit, KV_ROOT_INO, "b", S_IFREG | 0644);
	struct kv_extent extent = unit_write(unit, a.ino, 20);
	struct kv_chunk chunks[2] = {shared(0, &extent), shared(1, &extent)};
	struct kv_freed first;
	struct kv_freed second;

	assert_int_equal(unit_try_publish(unit, a.ino, NULL, 0, replace(0), &first), 0);
	assert_int_equal(first.count, 1);
	unit_publish(unit, b.ino, chunks, 2, replace(2 * MIB));
	assert_int_equal(refcount(unit, &extent), 2);
	assert_int_equal(unit_space(unit).used, 20);
	assert_int_equal(unit_space(unit).busy, 0);
	unit_check(unit);
	/* Freed a second time, while the first release is still to come. */
	assert_int_equal(unit_try_publish(unit, b.ino, NULL, 0, replace(0), &second), 0);
	assert_int_equal(second.count, 1);
	unit_sync(unit);
	kv_space_release(unit->space, &second);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).busy, 20); /* the holder of the first may still read */
	kv_space_release(unit->space, &first);
	assert_int_equal(unit_space(unit).busy, 0);
	assert_int_equal(unit_space(unit).used, 0);
}

/* A release that comes after the adoption does not take the blocks away from the adopter. */
static void test_index_publish__release_after_adoption(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	struct kv_inode b = unit_make(unit, KV_ROOT_INO, "b", S_IFREG | 0644);
	struct kv_extent extent = unit_write(unit, a.ino, 20);
	struct kv_chunk chunk = shared(0, &extent);
	struct kv_freed freed;

	unit_sync(unit);
	assert_int_equal(unit_try_publish(unit, a.ino, NULL, 0, replace(0), &freed), 0);
	unit_publish(unit, b.ino, &chunk, 1, replace(MIB));
	kv_space_release(unit->space, &freed);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used, 20);
	unit_check(unit);
	assert_int_equal(unit_try_publish(unit, b.ino, NULL, 0, replace(0), &freed), 0);
	kv_space_release(unit->space, &freed);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used + unit_space(unit).busy, 0);
}

/* A failed publish undoes its adoption and its references. */
static void test_index_publish__failure_is_undone(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = unit_make(unit, KV_ROOT_INO, "a", S_IFREG | 0644);
	struct kv_inode b = unit_make(unit, KV_ROOT_INO, "b", S_IFREG | 0644);
	struct kv_extent gone = unit_write(unit, a.ino, 20);
	struct kv_extent live = unit_write(unit, b.ino, 30);
	struct kv_extent e = alloc_run(unit, 5);
	struct kv_chunk chunks[] = {shared(0, &gone), shared(1, &live), fresh(2, &e), fresh(3, &e)};
	struct kv_freed freed;
	struct kv_freed none;
	struct kv_space_usage before;

	assert_int_equal(unit_try_publish(unit, a.ino, NULL, 0, replace(0), &freed), 0);
	before = unit_space(unit);
	assert_int_equal(
		unit_try_publish(unit, b.ino, chunks, 4, replace(4 * MIB), &none), -EINVAL);
	assert_int_equal(unit_space(unit).used, before.used);
	assert_int_equal(unit_space(unit).busy, before.busy);
	assert_int_equal(refcount(unit, &live), 1);
	unit_check(unit);
	kv_space_release(unit->space, &freed);
	kv_space_cancel(unit->space, &e, 1);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).busy, 0); /* no adoption kept the release from freeing */
}

/* ---- Orphans ---- */

/* An orphan can still be published to; its space goes when it is reaped. */
static void test_index_publish__to_an_orphan(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_freed freed;

	unit_unlink(unit, KV_ROOT_INO, "file");
	(void)unit_write(unit, file.ino, 12);
	assert_int_equal(unit_get(unit, file.ino).nlink, 0);
	unit_reopen(unit);
	unit_check(unit);
	assert_int_equal(unit_space(unit).used, 12);
	unit_reap(unit, file.ino);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used, 0);
	assert_int_equal(unit_try_publish(unit, file.ino, NULL, 0, replace(0), &freed), -ENOENT);
}

/* A file unlinked while it is held leaves nothing at all; published as an orphan it is one. */
static void test_index_publish__held_orphan(void **state)
{
	struct unit *unit = *state;
	struct kv_inode a = unit_hold(unit, KV_ROOT_INO, "a");
	struct kv_inode b = unit_hold(unit, KV_ROOT_INO, "b");
	struct kv_index_usage usage;
	uint64_t inos[4];

	unit_unlink(unit, KV_ROOT_INO, "a");
	unit_unlink(unit, KV_ROOT_INO, "b");
	assert_true(unit_get(unit, a.ino).flags & KV_INODE_HELD);
	assert_int_equal(kv_index_orphans(unit->index, 0, inos, 4), 2);
	(void)unit_write(unit, b.ino, 4);
	assert_false(unit_get(unit, b.ino).flags & KV_INODE_HELD);
	unit_check(unit);
	unit_reap(unit, a.ino);
	kv_index_usage(unit->index, &usage);
	assert_int_equal(usage.held, 0);
	assert_int_equal(usage.inodes, 2); /* the root and b */
	unit_reopen(unit);
	assert_int_equal(kv_index_orphans(unit->index, 0, inos, 4), 1);
	assert_int_equal(inos[0], b.ino);
	unit_reap(unit, b.ino);
}

/* A big orphan is reaped in pieces, over a restart, and every piece leaves a consistent index. */
static void test_index_publish__reap_in_pieces(void **state)
{
	const uint32_t count = 2 * KV_REAP_CHUNKS + 100;
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_chunk *chunks = calloc(count, sizeof(*chunks));
	struct kv_extent *extents = calloc(count, sizeof(*extents));
	struct kv_freed freed;

	assert_non_null(chunks);
	assert_non_null(extents);
	for (uint32_t i = 0; i < count; i++) {
		extents[i] = alloc_run(unit, 2);
		chunks[i] = fresh(i, &extents[i]);
	}
	unit_publish(unit, file.ino, chunks, count, replace(count * MIB));
	free(chunks);
	free(extents);
	unit_unlink(unit, KV_ROOT_INO, "file");
	for (int pieces = 0; pieces < 2; pieces++) {
		assert_int_equal(kv_index_reap(unit->index, file.ino, &freed), 1);
		assert_int_equal(freed.count, KV_REAP_CHUNKS);
		kv_space_release(unit->space, &freed);
		unit_check(unit);
		unit_reopen(unit);
	}
	assert_int_equal(unit_space(unit).used, 200);
	assert_int_equal(kv_index_reap(unit->index, file.ino, &freed), 0);
	assert_int_equal(freed.count, 100);
	kv_space_release(unit->space, &freed);
	assert_int_equal(unit_space(unit).used, 0);
	assert_int_equal(kv_index_reap(unit->index, file.ino, &freed), -ENOENT);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, unit_setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_publish__attributes_and_map),
		TEST(test_index_publish__errors),
		TEST(test_index_publish__replace_and_change),
		TEST(test_index_publish__kept),
		TEST(test_index_publish__segments),
		TEST(test_index_publish__sparse),
		TEST(test_index_publish__map_errors),
		TEST(test_index_publish__shared),
		TEST(test_index_publish__shared_within_a_file),
		TEST(test_index_publish__adopted),
		TEST(test_index_publish__release_after_adoption),
		TEST(test_index_publish__failure_is_undone),
		TEST(test_index_publish__to_an_orphan),
		TEST(test_index_publish__held_orphan),
		TEST(test_index_publish__reap_in_pieces),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
