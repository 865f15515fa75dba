/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of damaged indexes share: a small index with records of every table, its image to
 * begin again from, and damage to single records. Functions that can fail assert that they do not.
 */
#ifndef KVFS_TESTS_UNIT_UNIT_DAMAGE_H
#define KVFS_TESTS_UNIT_UNIT_DAMAGE_H

#include "unit_index.h"

/* What unit_populate names in the directory "dir" and in the root, and "new". */
static const char *const NAMES[] = {
	"dir", "sub", "file", "link", "held", "one", "two", "shared", "big", "gone", "bad", "new"};
#define NAME_COUNT (sizeof(NAMES) / sizeof(NAMES[0]))

struct image {
	uint8_t *data;
	size_t size;
};

static inline void data_path(const struct unit *unit, char path[160])
{
	(void)snprintf(path, 160, "%s/data.mdb", unit->path);
}

static inline struct image image_read(const struct unit *unit)
{
	struct image image = {.data = malloc(1 << 20)};
	char path[160];
	FILE *file;

	data_path(unit, path);
	file = fopen(path, "r");
	assert_non_null(file);
	assert_non_null(image.data);
	image.size = fread(image.data, 1, 1 << 20, file);
	assert_int_equal(fclose(file), 0);
	assert_true(image.size > 0 && image.size < 1 << 20);
	return image;
}

static inline void image_write(const struct unit *unit, const struct image *image)
{
	char path[160];
	FILE *file;

	data_path(unit, path);
	file = fopen(path, "w");
	assert_non_null(file);
	assert_int_equal(fwrite(image->data, 1, image->size, file), image->size);
	assert_int_equal(fclose(file), 0);
}

/* A small index with at least one record of every table. */
static inline void unit_populate(struct unit *unit)
{
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	struct kv_inode file = unit_make(unit, dir.ino, "file", S_IFREG | 0644);
	struct kv_inode shared = unit_make(unit, dir.ino, "shared", S_IFREG | 0644);
	struct kv_inode big = unit_make(unit, dir.ino, "big", S_IFREG | 0644);
	struct kv_inode gone = unit_make(unit, dir.ino, "gone", S_IFREG | 0644);
	struct kv_inode bad = unit_make(unit, dir.ino, "bad", S_IFREG | 0644);
	struct kv_extent extent;
	struct kv_extent far;
	struct kv_chunk chunks[2];

	(void)unit_make(unit, dir.ino, "sub", S_IFDIR | 0755);
	(void)unit_make(unit, dir.ino, "link", S_IFLNK | 0777);
	extent = unit_write(unit, file.ino, 5);
	chunks[0] = (struct kv_chunk){0, 1, KV_CHUNK_SHARED, 1, &extent};
	unit_publish(unit, shared.ino, chunks, 1,
		(struct kv_content){.size = 5 * KV_BLOCK_SIZE, .replace = true});
	assert_int_equal(unit_alloc(unit, 4, &far), 1);
	chunks[0] = (struct kv_chunk){0, 1, KV_CHUNK_SHARED, 1, &extent};
	chunks[1] = (struct kv_chunk){100, 1, KV_CHUNK_FRESH, 1, &far};
	unit_publish(unit, big.ino, chunks, 2,
		(struct kv_content){.size = 101u << KV_CHUNK_SHIFT, .replace = true});
	assert_int_equal(unit_try_link(unit, file.ino, KV_ROOT_INO, "one"), 0);
	assert_int_equal(unit_try_link(unit, file.ino, dir.ino, "two"), 0);
	assert_int_equal(
		kv_index_xattr_set(unit->index, file.ino, "user.a", "value", 5, 0, unit->now), 0);
	(void)unit_write(unit, gone.ino, 2);
	unit_unlink(unit, dir.ino, "gone");
	(void)unit_write(unit, bad.ino, 2);
	assert_int_equal(kv_index_evict(unit->index, bad.ino, unit_get(unit, bad.ino).last_use_ns,
				 true, ++unit->now, NULL, NULL),
		0);
}

struct damage {
	size_t record; /* which of them */
	size_t cut;    /* bytes taken from its end */
	size_t flip;   /* byte that is flipped, if it has that many */
	uint8_t bits;
	bool remove; /* all of it */
	bool raw;    /* leaves the record's sum as it was: else a writer did it */
};

/* False: there is no such record. */
static inline bool unit_damage(struct unit *unit, struct damage damage, size_t *ret_size)
{
	uint8_t value[8192];
	struct kv_key key;
	MDB_val k;
	MDB_val v;
	MDB_env *env;
	MDB_txn *txn;
	MDB_dbi dbi;
	MDB_cursor *cursor;
	int code = 0;

	assert_int_equal(mdb_env_create(&env), 0);
	assert_int_equal(mdb_env_open(env, unit->path, MDB_NOSYNC, 0600), 0);
	assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
	assert_int_equal(mdb_dbi_open(txn, NULL, 0, &dbi), 0);
	assert_int_equal(mdb_cursor_open(txn, dbi, &cursor), 0);
	for (size_t i = 0; i <= damage.record && code == 0; i++)
		code = mdb_cursor_get(cursor, &k, &v, MDB_NEXT);
	if (code == 0 && damage.remove) {
		assert_int_equal(mdb_cursor_del(cursor, 0), 0);
	} else if (code == 0) {
		assert_int_equal(kv_key_decode(k.mv_data, k.mv_size, &key), 0);
		assert_true(v.mv_size <= sizeof(value));
		memcpy(value, v.mv_data, v.mv_size);
		if (!damage.raw)
			v.mv_size = v.mv_size - kv_record_sum_size(&key);
		*ret_size = v.mv_size;
		if (damage.flip < v.mv_size)
			value[damage.flip] ^= damage.bits;
		v.mv_size -= kv_min_u64(damage.cut, v.mv_size);
		if (damage.raw) {
			k = (MDB_val){key.size, key.bytes};
			v.mv_data = value;
			assert_int_equal(mdb_put(txn, dbi, &k, &v, 0), 0);
		} else {
			assert_int_equal(kv_index_put(txn, dbi, &key, value, v.mv_size), 0);
		}
	}
	mdb_cursor_close(cursor);
	assert_int_equal(mdb_txn_commit(txn), 0);
	mdb_env_close(env);
	return code == 0;
}

/* A whole index for the tests of a program to begin from, closed. */
static inline int populated_setup(void **state)
{
	static struct unit unit;

	unit_create(&unit, 2, 100000);
	unit_open(&unit);
	unit_populate(&unit);
	unit_check(&unit);
	unit_close(&unit);
	*state = &unit;
	return 0;
}

#endif
