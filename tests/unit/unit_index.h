/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of the index share: an index in a temporary directory, shorthands for its calls,
 * and the check at the end. Functions that can fail assert that they do not.
 */
#ifndef KVFS_TESTS_UNIT_UNIT_INDEX_H
#define KVFS_TESTS_UNIT_UNIT_INDEX_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "index/check.h"
#include "index/index_internal.h"

/* So long that nothing is committed before somebody waits for it. */
#define UNIT_NEVER_MS 3600000u
#define UNIT_NOW INT64_C(1000000000)

struct unit {
	char path[128];
	struct kv_index_options options;
	struct kv_index *index;
	struct kv_space *space;
	int64_t now;
	uint64_t version;
};

static inline void unit_open(struct unit *unit)
{
	char error[256] = "";
	int r = kv_index_open(unit->path, &unit->options, &unit->index, error, sizeof(error));

	if (r != 0)
		print_error("open: %s\n", error);
	assert_int_equal(r, 0);
	unit->space = kv_index_space(unit->index);
}

static inline void unit_close(struct unit *unit)
{
	unit->index = kv_index_close(unit->index);
	assert_null(unit->index);
	unit->space = NULL;
}

static inline void unit_reopen(struct unit *unit)
{
	unit_close(unit);
	unit_open(unit);
}

static inline void unit_create(struct unit *unit, uint32_t device_count, uint64_t blocks)
{
	struct kv_index_store store = {.uuid = {1, 2, 3}, .device_count = device_count};

	*unit = (struct unit){.options = {.commit_delay_ms = 1}, .now = UNIT_NOW};
	(void)snprintf(unit->path, sizeof(unit->path), "%s/kvfs-unit-XXXXXX", P_tmpdir);
	assert_non_null(mkdtemp(unit->path));
	for (uint32_t i = 0; i < device_count; i++)
		store.device_blocks[i] = blocks;
	assert_int_equal(kv_index_create(unit->path, &store, 0755, 10, 20, UNIT_NOW), 0);
}

static inline void unit_init(struct unit *unit)
{
	unit_create(unit, 2, 100000);
	unit_open(unit);
}

static inline void unit_violation(void *arg, const char *text)
{
	(void)arg;
	print_error("check: %s\n", text);
}

static inline void unit_check(struct unit *unit)
{
	assert_int_equal(kv_index_check(unit->index, unit_violation, NULL), 0);
}

static inline void unit_remove(struct unit *unit)
{
	char file[160];

	(void)snprintf(file, sizeof(file), "%s/data.mdb", unit->path);
	(void)unlink(file);
	(void)snprintf(file, sizeof(file), "%s/lock.mdb", unit->path);
	(void)unlink(file);
	assert_int_equal(rmdir(unit->path), 0);
}

/* Checks, also after a reopening, closes and removes. */
static inline void unit_done(struct unit *unit)
{
	unit_check(unit);
	unit_reopen(unit);
	unit_check(unit);
	unit_close(unit);
	unit_remove(unit);
}

static inline void unit_sync(struct unit *unit)
{
	assert_int_equal(kv_index_wait(unit->index, kv_index_sequence(unit->index)), 0);
}

/* ---- Names ---- */

static inline int unit_try_make(struct unit *unit, uint64_t parent, const char *name, uint32_t mode,
	struct kv_inode *ret_inode)
{
	const struct kv_make make = {
		.parent = parent,
		.name = name,
		.length = strlen(name),
		.mode = mode,
		.uid = 1000,
		.gid = 1001,
		.target = S_ISLNK(mode) ? "target" : NULL,
		.now_ns = ++unit->now,
	};

	return kv_index_make(unit->index, &make, ret_inode);
}

static inline struct kv_inode unit_make(
	struct unit *unit, uint64_t parent, const char *name, uint32_t mode)
{
	struct kv_inode inode;

	assert_int_equal(unit_try_make(unit, parent, name, mode, &inode), 0);
	return inode;
}

static inline struct kv_inode unit_hold(struct unit *unit, uint64_t parent, const char *name)
{
	const struct kv_make make = {
		.parent = parent,
		.name = name,
		.length = strlen(name),
		.mode = S_IFREG | 0644,
		.now_ns = ++unit->now,
		.hold = true,
	};
	struct kv_inode inode;

	assert_int_equal(kv_index_make(unit->index, &make, &inode), 0);
	assert_true(inode.flags & KV_INODE_HELD);
	return inode;
}

/* 0 if there is no such name. */
static inline uint64_t unit_lookup(struct unit *unit, uint64_t parent, const char *name)
{
	struct kv_inode inode;
	int r = kv_index_lookup(unit->index, parent, name, strlen(name), &inode);

	if (r == -ENOENT)
		return 0;
	assert_int_equal(r, 0);
	return inode.ino;
}

static inline struct kv_inode unit_get(struct unit *unit, uint64_t ino)
{
	struct kv_inode inode;

	assert_int_equal(kv_index_get(unit->index, ino, &inode), 0);
	return inode;
}

static inline int unit_try_unlink(
	struct unit *unit, uint64_t parent, const char *name, bool directory)
{
	struct kv_inode inode;

	return kv_index_unlink(
		unit->index, parent, name, strlen(name), directory, 0, ++unit->now, &inode);
}

static inline void unit_unlink(struct unit *unit, uint64_t parent, const char *name)
{
	assert_int_equal(unit_try_unlink(unit, parent, name, false), 0);
}

static inline int unit_try_link(struct unit *unit, uint64_t ino, uint64_t parent, const char *name)
{
	struct kv_inode inode;

	return kv_index_link(unit->index, ino, parent, name, strlen(name), ++unit->now, &inode);
}

/* ---- Content ---- */

static inline struct kv_space_usage unit_space(struct unit *unit)
{
	struct kv_space_usage usage;

	kv_space_usage(unit->space, &usage);
	return usage;
}

static inline int unit_alloc(struct unit *unit, uint32_t blocks, struct kv_extent *ret_extents)
{
	int count;

	assert_int_equal(kv_space_reserve(unit->space, blocks), 0);
	count = kv_space_alloc(unit->space, 0, blocks, 0, ret_extents);
	assert_true(count > 0);
	return count;
}

static inline int unit_try_publish(struct unit *unit, uint64_t ino, const struct kv_chunk *chunks,
	size_t count, struct kv_content content, struct kv_freed *ret_freed)
{
	struct kv_inode inode;

	content.version = ++unit->version;
	content.chunks = chunks;
	content.chunk_count = count;
	content.mtime_ns = content.ctime_ns = content.last_use_ns = ++unit->now;
	return kv_index_publish(unit->index, ino, &content, &inode, ret_freed);
}

/* Publishes with size and replace, and releases what that freed. */
static inline void unit_publish(struct unit *unit, uint64_t ino, const struct kv_chunk *chunks,
	size_t count, struct kv_content content)
{
	struct kv_freed freed;

	assert_int_equal(unit_try_publish(unit, ino, chunks, count, content, &freed), 0);
	kv_space_release(unit->space, &freed);
}

/* New content of one chunk, BLOCKS long. Returns its first extent. */
static inline struct kv_extent unit_write(struct unit *unit, uint64_t ino, uint32_t blocks)
{
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	int count = unit_alloc(unit, blocks, extents);
	const struct kv_chunk chunk = {0, (uint32_t)count, KV_CHUNK_FRESH, 42, extents};

	unit_publish(unit, ino, &chunk, 1,
		(struct kv_content){.size = (uint64_t)blocks * KV_BLOCK_SIZE, .replace = true});
	return extents[0];
}

/* Reaps an orphan to its end. */
static inline void unit_reap(struct unit *unit, uint64_t ino)
{
	int r;

	do {
		struct kv_freed freed;

		r = kv_index_reap(unit->index, ino, &freed);
		assert_true(r == 0 || r == 1);
		kv_space_release(unit->space, &freed);
	} while (r == 1);
}

/* ---- Commits ---- */

/* While this is held, a batch can be taken but not written. */
static inline MDB_txn *unit_block_commits(struct unit *unit)
{
	MDB_txn *txn;

	assert_int_equal(mdb_txn_begin(unit->index->env, NULL, 0, &txn), 0);
	return txn;
}

/* Makes the commit thread take what is pending, and waits until it has. */
static inline void unit_take_batch(struct unit *unit)
{
	for (;;) {
		size_t flushing;

		(void)pthread_mutex_lock(&unit->index->commit_lock);
		unit->index->commit_urgent = true;
		(void)pthread_cond_signal(&unit->index->commit_work);
		(void)pthread_mutex_unlock(&unit->index->commit_lock);
		(void)pthread_rwlock_rdlock(&unit->index->lock);
		flushing = unit->index->flushing.count;
		(void)pthread_rwlock_unlock(&unit->index->lock);
		if (flushing > 0)
			return;
		(void)usleep(1000);
	}
}

static inline void unit_unblock_commits(MDB_txn *txn)
{
	mdb_txn_abort(txn);
}

/* For cmocka: a fresh index before each test, and the check behind it. */
static inline int unit_setup(void **state)
{
	static struct unit unit;

	unit_init(&unit);
	*state = &unit;
	return 0;
}

static inline int unit_teardown(void **state)
{
	unit_done(*state);
	return 0;
}

#endif
