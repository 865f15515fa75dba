/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The check of an index that may be damaged, page by page and record by record, and its repair:
 * what a repair leaves is always sound, and keeps what was whole.
 */
#include <fcntl.h>

#include "index/pages.h"
#include "index/repair.h"
#include "unit_damage.h"

struct told {
	size_t count;
	uint64_t ino;
	char path[256];
	char text[256];
	bool has_blocks;
};

static void tell(void *arg, const struct kv_violation *violation)
{
	struct told *told = arg;

	told->count++;
	told->ino = violation->ino;
	told->has_blocks = violation->has_blocks;
	(void)snprintf(told->text, sizeof(told->text), "%s", violation->text);
	(void)snprintf(
		told->path, sizeof(told->path), "%s", violation->path ? violation->path : "");
}

/* All violations of the index in PATH, or an error. */
static ssize_t inspect(const char *path, struct told *told)
{
	const struct kv_check_to to = {told ? tell : NULL, told};
	struct kv_index *index;
	size_t opening;
	char error[512];
	ssize_t r;

	if (told)
		*told = (struct told){0};
	r = kv_index_inspect(path, &to, &index, &opening, error, sizeof(error));
	if (r < 0)
		return r;
	r = kv_index_check_all(index, &to);
	(void)kv_index_close(index);
	return r < 0 ? r : r + (ssize_t)opening;
}

static void new_path(const struct unit *unit, char *path)
{
	(void)snprintf(path, sizeof(unit->path), "%.120s.new", unit->path);
}

static void new_remove(const struct unit *unit)
{
	char path[200];

	new_path(unit, path);
	strcat(path, "/data.mdb");
	(void)unlink(path);
	new_path(unit, path);
	strcat(path, "/lock.mdb");
	(void)unlink(path);
	new_path(unit, path);
	(void)rmdir(path);
}

/* Repairs the index of UNIT into its new path. */
static int repair(const struct unit *unit, const uint64_t *bad, size_t bad_count, struct told *told)
{
	char path[160];
	struct kv_index_repair what = {
		.path = unit->path,
		.new_path = path,
		.bad = bad,
		.bad_count = bad_count,
		.dropped = {told ? tell : NULL, told},
	};
	char error[512];

	if (told)
		*told = (struct told){0};
	new_path(unit, path);
	new_remove(unit);
	assert_int_equal(mkdir(path, 0700), 0);
	return kv_index_repair(&what, error, sizeof(error));
}

/* A repaired index has no violation, and works. */
static void assert_sound(const struct unit *unit)
{
	struct unit fresh = {.options = unit->options, .now = UNIT_NOW};
	struct told told;
	char path[160];

	new_path(unit, path);
	if (inspect(path, &told) != 0)
		print_error("after the repair: %s\n", told.text);
	assert_int_equal(inspect(path, NULL), 0);
	memcpy(fresh.path, path, sizeof(fresh.path));
	unit_open(&fresh);
	(void)unit_make(&fresh, KV_ROOT_INO, "made-after-the-repair", S_IFREG | 0644);
	unit_check(&fresh);
	unit_close(&fresh);
}

static int teardown(void **state)
{
	new_remove(*state);
	unit_remove(*state);
	return 0;
}

static uint64_t image_sum(const struct unit *unit)
{
	struct image image = image_read(unit);
	uint64_t sum = kv_hash_base(image.data, image.size, 0, UINT64_MAX);

	free(image.data);
	return sum;
}

/* ---- Pages ---- */

static int count_record(
	void *arg, const void *key, size_t key_size, const void *value, size_t value_size)
{
	struct kv_key decoded;

	(void)value;
	(void)value_size;
	assert_int_equal(kv_key_decode(key, key_size, &decoded), 0);
	++*(size_t *)arg;
	return 0;
}

static ssize_t check_pages(const struct unit *unit, size_t *ret_records)
{
	char path[160];
	struct kv_pages pages = {.record = count_record, .arg = ret_records};
	ssize_t r;

	data_path(unit, path);
	*ret_records = 0;
	pages.fd = open(path, O_RDONLY | O_CLOEXEC);
	assert_true(pages.fd >= 0);
	r = kv_pages_check(&pages);
	assert_int_equal(close(pages.fd), 0);
	return r;
}

/* What LMDB makes of an index that grows and shrinks is found sound, and nothing is left out. */
static void test_index_check__pages_sound(void **state)
{
	struct unit unit;
	char name[32];
	size_t records;

	(void)state;
	unit_init(&unit);
	for (unsigned round = 0; round < 6; round++) {
		MDB_stat stat;

		for (unsigned i = 0; i < 3000; i++) {
			struct kv_inode inode;

			(void)snprintf(name, sizeof(name), "%u-%u", round % 3, i);
			if (round < 3) {
				inode = unit_make(&unit, KV_ROOT_INO, name, S_IFREG | 0644);
				if (i % 64 == 0)
					(void)unit_write(&unit, inode.ino, 3);
				if (i % 500 == 0)
					assert_int_equal(
						kv_index_xattr_set(unit.index, inode.ino,
							"user.big", &unit, sizeof(unit), 0, 1),
						0);
			} else if (i % 7 != 0) {
				inode.ino = unit_lookup(&unit, KV_ROOT_INO, name);
				unit_unlink(&unit, KV_ROOT_INO, name);
				unit_reap(&unit, inode.ino);
			}
			if (i % 400 == 0)
				unit_sync(&unit);
		}
		unit_sync(&unit);
		assert_int_equal(mdb_env_stat(unit.index->env, &stat), 0);
		assert_int_equal(check_pages(&unit, &records), 0);
		assert_int_equal(records, stat.ms_entries);
	}
	assert_true(records > 1000);
	unit_done(&unit);
}

/* A file that is cut short, empty or something else is refused. */
static void test_index_check__pages_cut(void **state)
{
	struct unit *unit = *state;
	struct image image = image_read(unit);
	struct image cut = image;
	size_t records;

	for (cut.size = 0; cut.size < image.size; cut.size += 4096 - 1024) {
		ssize_t r;

		image_write(unit, &cut);
		r = check_pages(unit, &records);
		assert_true(r == -EUCLEAN || r > 0);
	}
	memset(image.data, 'x', image.size);
	image_write(unit, &image);
	assert_int_equal(check_pages(unit, &records), -EUCLEAN);
	free(image.data);
}

static void image_set_last_page(struct image *image, uint64_t last_page)
{
	for (size_t i = 0; i < 2; i++)
		kv_put_le64(image->data + i * 4096 + 136, last_page);
}

/*
 * LMDB may leave the file shorter than it says, as it does not write pages that a transaction took
 * and gave back: that is sound, but not a length that no index has.
 */
static void test_index_check__pages_behind_the_end(void **state)
{
	struct unit *unit = *state;
	struct image image = image_read(unit);
	size_t records;

	assert_int_equal(check_pages(unit, &records), 0);
	image_set_last_page(&image, image.size / 4096 + 10);
	image_write(unit, &image);
	assert_int_equal(check_pages(unit, &records), 0);
	assert_true(records > 0);
	assert_int_equal(inspect(unit->path, NULL), 0);
	unit_open(unit);
	(void)unit_make(unit, KV_ROOT_INO, "behind", S_IFREG | 0644);
	unit_check(unit);
	unit_close(unit);
	assert_int_equal(inspect(unit->path, NULL), 0);
	image_set_last_page(&image, UINT64_C(1) << 40);
	image_write(unit, &image);
	assert_int_equal(check_pages(unit, &records), -EUCLEAN);
	free(image.data);
}

/*
 * A flipped byte anywhere in the file: found or harmless, never a crash, neither in the check nor
 * in LMDB where the check lets it in; and what a repair makes of it is sound.
 */
static void test_index_check__pages_flipped(void **state)
{
	struct unit *unit = *state;
	struct image image = image_read(unit);
	size_t stride = getenv("KVFS_LONG") ? 31 : 331;
	size_t found = 0;
	size_t repaired = 0;

	/* Where the structures are more densely than elsewhere. */
	for (size_t at = 5; at < image.size; at += at % 4096 < 160 ? 5 : stride) {
		uint8_t bits = at % 2 ? 0xff : 0x10;
		size_t records;
		bool sound;
		int r;

		image.data[at] ^= bits;
		image_write(unit, &image);
		sound = check_pages(unit, &records) == 0;
		found += !sound;
		if (inspect(unit->path, NULL) != 0) {
			r = repair(unit, NULL, 0, NULL);
			assert_true(r == 0 || r == -EUCLEAN);
			repaired += r == 0;
			if (r == 0)
				assert_sound(unit);
		} else {
			assert_true(sound);
		}
		image.data[at] ^= bits;
	}
	assert_true(found > 20);
	assert_true(repaired > found / 2);
	free(image.data);
}

/* What the index says of one name: all that a reader would be given. */
struct seen {
	int r;
	struct kv_inode inode;
	uint64_t map;
	int map_r;
};

static void sum_chunk(void *arg, const struct kv_chunk *chunk)
{
	uint64_t *sum = arg;

	*sum = kv_hash_base(chunk->extents, chunk->extent_count * sizeof(chunk->extents[0]),
		*sum ^ chunk->sum ^ chunk->number, UINT64_MAX);
}

static struct seen see(struct unit *unit, uint64_t parent, const char *name)
{
	struct seen seen = {0};

	seen.r = kv_index_lookup(unit->index, parent, name, strlen(name), &seen.inode);
	if (seen.r == 0)
		seen.map_r = kv_index_map(
			unit->index, seen.inode.ino, 0, UINT32_MAX, sum_chunk, &seen.map);
	return seen;
}

#define SEEN_NAMES (NAME_COUNT * 2)

static void see_all(struct unit *unit, uint64_t dir, struct seen *ret_seen)
{
	for (size_t i = 0; i < NAME_COUNT; i++) {
		ret_seen[i] = see(unit, KV_ROOT_INO, NAMES[i]);
		ret_seen[NAME_COUNT + i] = see(unit, dir, NAMES[i]);
	}
}

/* Each is as it was, or an error: nothing else. Returns how many are. */
static size_t compare_all(const struct seen *before, const struct seen *after)
{
	size_t same = 0;

	for (size_t i = 0; i < SEEN_NAMES; i++) {
		if (after[i].r < 0)
			continue;
		assert_int_equal(before[i].r, 0);
		assert_memory_equal(&after[i].inode, &before[i].inode, sizeof(before[i].inode));
		if (after[i].map_r < 0)
			continue;
		assert_true(after[i].map == before[i].map);
		same++;
	}
	return same;
}

/*
 * R1: a byte that is flipped anywhere in the file, past the checks of whoever wrote it: what the
 * index then says is what it said before, or an error. Never a crash, and never something else.
 */
static void test_index_check__flips_are_errors_or_misses(void **state)
{
	static const uint8_t bits[] = {0x01, 0x80, 0xff};
	struct unit *unit = *state;
	struct image image = image_read(unit);
	struct seen before[SEEN_NAMES], after[SEEN_NAMES];
	size_t stride = getenv("KVFS_LONG") ? 13 : 97;
	size_t refused = 0, same = 0, opened = 0;
	uint64_t dir;

	unit_open(unit);
	dir = unit_lookup(unit, KV_ROOT_INO, "dir");
	see_all(unit, dir, before);
	unit_close(unit);
	for (size_t at = 1; at < image.size; at += stride) {
		char error[512];

		image.data[at] ^= bits[at % 3];
		image_write(unit, &image);
		if (kv_index_open(unit->path, &unit->options, &unit->index, error, sizeof(error)) <
			0) {
			refused++;
			assert_non_null(strstr(error, "kvfs format"));
		} else {
			see_all(unit, dir, after);
			same += compare_all(before, after);
			opened++;
			unit_close(unit);
		}
		image.data[at] ^= bits[at % 3];
	}
	assert_true(refused > 5 && opened > refused);
	assert_true(same > opened * 3);
	free(image.data);
}

/* The same of each record that does not match its sum, wherever the file has it: in one byte of it,
 * and in one of its sum. */
static void test_index_check__records_are_errors_or_misses(void **state)
{
	struct unit *unit = *state;
	struct image image = image_read(unit);
	struct seen before[SEEN_NAMES], after[SEEN_NAMES];
	size_t size, damaged = 0, same = 0;
	uint64_t dir;

	unit_open(unit);
	dir = unit_lookup(unit, KV_ROOT_INO, "dir");
	see_all(unit, dir, before);
	unit_close(unit);
	for (struct damage damage = {.bits = 0xff, .raw = true};; damage.record++) {
		char error[512];

		damage.flip = SIZE_MAX;
		image_write(unit, &image);
		if (!unit_damage(unit, damage, &size))
			break;
		for (unsigned i = 0; i < 2 && size > 0; i++) {
			damage.flip = i ? size - 1 : 0;
			image_write(unit, &image);
			assert_true(unit_damage(unit, damage, &size));
			damaged++;
			if (kv_index_open(unit->path, &unit->options, &unit->index, error,
				    sizeof(error)) < 0)
				continue;
			see_all(unit, dir, after);
			same += compare_all(before, after);
			unit_close(unit);
		}
	}
	assert_true(damaged > 50 && same > damaged * 3);
	free(image.data);
}

/* ---- Records ---- */

/* Looking changes not a byte, and makes no file. */
static void test_index_check__reads_only(void **state)
{
	struct unit *unit = *state;
	char path[160];
	uint64_t sum = image_sum(unit);

	(void)snprintf(path, sizeof(path), "%s/lock.mdb", unit->path);
	(void)unlink(path);
	assert_int_equal(inspect(unit->path, NULL), 0);
	assert_int_equal(access(path, F_OK), -1);
	assert_true(image_sum(unit) == sum);
	assert_int_equal(repair(unit, NULL, 0, NULL), 0);
	assert_int_equal(access(path, F_OK), -1);
	assert_true(image_sum(unit) == sum);
}

/* A repair of what is sound keeps everything that has a name. */
static void test_index_check__repair_keeps(void **state)
{
	static const char *const names[] = {"file", "shared", "big", "sub", "link", "two"};
	struct unit *unit = *state;
	struct unit fresh = {.options = unit->options, .now = UNIT_NOW};
	struct told told;
	uint64_t dir, next_ino;

	unit_open(unit);
	next_ino = atomic_load(&unit->index->next_ino);
	unit_close(unit);
	assert_int_equal(repair(unit, NULL, 0, &told), 0);
	assert_int_equal(told.count, 2); /* the orphan and the one that was quarantined */
	assert_sound(unit);
	new_path(unit, fresh.path);
	unit_open(&fresh);
	unit_open(unit);
	dir = unit_lookup(unit, KV_ROOT_INO, "dir");
	assert_true(unit_lookup(&fresh, KV_ROOT_INO, "dir") == dir);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		struct kv_inode before = unit_get(unit, unit_lookup(unit, dir, names[i]));
		struct kv_inode after = unit_get(&fresh, unit_lookup(&fresh, dir, names[i]));

		assert_memory_equal(&before, &after, sizeof(before));
	}
	assert_true(atomic_load(&fresh.index->next_ino) >= next_ino);
	unit_close(&fresh);
	unit_close(unit);
}

/* Every record in turn is removed, cut or changed: whatever that does, a repair makes it sound. */
static void test_index_check__repairs_records(void **state)
{
	static const struct damage damages[] = {
		{.flip = SIZE_MAX, .remove = true},
		{.flip = SIZE_MAX, .cut = 1},
		{.flip = 0, .bits = 0x01},
		{.flip = 2, .bits = 0xff},
		{.flip = 36, .bits = 0x02},
		{.flip = 40, .bits = 0x01},
		{.flip = 36, .bits = 0x02, .raw = true},
	};
	struct unit *unit = *state;
	struct image image = image_read(unit);
	size_t unsound = 0;
	size_t lost = 0;

	for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++)
		for (size_t record = 0;; record++) {
			struct damage damage = damages[i];
			size_t size;
			int r;

			damage.record = record;
			image_write(unit, &image);
			if (!unit_damage(unit, damage, &size))
				break;
			unsound += inspect(unit->path, NULL) != 0;
			r = repair(unit, NULL, 0, NULL);
			if (r < 0) {
				assert_int_equal(r, -EUCLEAN);
				lost++;
				continue;
			}
			assert_sound(unit);
		}
	assert_true(unsound > 100);
	/* Only the head says which store it is. */
	assert_true(lost >= 1 && lost <= sizeof(damages) / sizeof(damages[0]));
	free(image.data);
}

/* A file that is said to be bad goes, with all its names, and the message says which it was. */
static void test_index_check__drops_bad(void **state)
{
	struct unit *unit = *state;
	struct unit fresh = {.options = unit->options, .now = UNIT_NOW};
	struct told told;
	uint64_t dir, ino;

	unit_open(unit);
	dir = unit_lookup(unit, KV_ROOT_INO, "dir");
	ino = unit_lookup(unit, dir, "file");
	unit_close(unit);
	assert_int_equal(repair(unit, &ino, 1, &told), 0);
	assert_int_equal(told.count, 3); /* and the orphan and the one that was quarantined */
	assert_sound(unit);
	new_path(unit, fresh.path);
	unit_open(&fresh);
	assert_true(unit_lookup(&fresh, dir, "file") == 0);
	assert_true(unit_lookup(&fresh, KV_ROOT_INO, "one") == 0);
	assert_true(unit_lookup(&fresh, dir, "shared") != 0);
	unit_close(&fresh);
}

/* Takes the record of INO away, as a whole. */
static void remove_inode(const struct unit *unit, uint64_t ino)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, ino);
	MDB_val k = {key.size, key.bytes};
	MDB_env *env;
	MDB_txn *txn;
	MDB_dbi dbi;

	assert_int_equal(mdb_env_create(&env), 0);
	assert_int_equal(mdb_env_open(env, unit->path, MDB_NOSYNC, 0600), 0);
	assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
	assert_int_equal(mdb_dbi_open(txn, NULL, 0, &dbi), 0);
	assert_int_equal(mdb_del(txn, dbi, &k, NULL), 0);
	assert_int_equal(mdb_txn_commit(txn), 0);
	mdb_env_close(env);
}

/* Who might look into a root that is lost is lost, too: a new one is its owner's alone. */
static void test_index_check__root_made(void **state)
{
	struct unit *unit = *state;
	struct unit fresh = {.options = unit->options, .now = UNIT_NOW};

	remove_inode(unit, KV_ROOT_INO);
	assert_int_equal(repair(unit, NULL, 0, NULL), 0);
	assert_sound(unit);
	new_path(unit, fresh.path);
	unit_open(&fresh);
	assert_int_equal(unit_get(&fresh, KV_ROOT_INO).mode, S_IFDIR | 0700);
	unit_close(&fresh);
}

/* Moves the only extent of INO, whose map lies in its record. */
static void move_extent(struct unit *unit, uint64_t ino, uint64_t start)
{
	uint8_t head[KV_INODE_HEAD_MAX + KV_INLINE_MAP_MAX + KV_RECORD_SUM_SIZE];
	struct kv_key key = kv_key_single(KV_TABLE_INODE, ino);
	MDB_val k = {key.size, key.bytes};
	MDB_val v;
	MDB_txn *txn;

	assert_int_equal(mdb_txn_begin(unit->index->env, NULL, 0, &txn), 0);
	assert_int_equal(mdb_get(txn, unit->index->dbi, &k, &v), 0);
	memcpy(head, v.mv_data, v.mv_size);
	v.mv_size -= KV_RECORD_SUM_SIZE;
	/* The start is the last 16 bytes' first field. */
	kv_put_le64(head + v.mv_size - KV_EXTENT_RECORD_SIZE, start);
	assert_int_equal(kv_index_put(txn, unit->index->dbi, &key, head, v.mv_size), 0);
	assert_int_equal(mdb_txn_commit(txn), 0);
}

/*
 * Files that claim the same blocks: told with path and blocks, and only one is kept; but a file
 * that has blocks in common only with one that is dropped is kept.
 */
static void test_index_check__overlap(void **state)
{
	struct unit unit;
	struct told told;
	struct kv_inode first, second, third;
	struct kv_extent extent;

	(void)state;
	unit_init(&unit);
	first = unit_make(&unit, KV_ROOT_INO, "first", S_IFREG | 0644);
	second = unit_make(&unit, KV_ROOT_INO, "second", S_IFREG | 0644);
	third = unit_make(&unit, KV_ROOT_INO, "third", S_IFREG | 0644);
	extent = unit_write(&unit, first.ino, 4);
	(void)unit_write(&unit, second.ino, 4);
	(void)unit_write(&unit, third.ino, 4);
	unit_sync(&unit);
	move_extent(&unit, second.ino, extent.start + 2);
	move_extent(&unit, third.ino, extent.start + 4);
	unit_close(&unit);

	assert_true(inspect(unit.path, &told) > 0);
	assert_int_equal(repair(&unit, NULL, 0, &told), 0);
	assert_int_equal(told.count, 1);
	assert_string_equal(told.path, "/second");
	assert_true(told.ino == second.ino);
	assert_sound(&unit);
	new_remove(&unit);
	unit_remove(&unit);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, populated_setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_index_check__pages_sound),
		TEST(test_index_check__pages_cut),
		TEST(test_index_check__pages_behind_the_end),
		TEST(test_index_check__pages_flipped),
		TEST(test_index_check__flips_are_errors_or_misses),
		TEST(test_index_check__records_are_errors_or_misses),
		TEST(test_index_check__reads_only),
		TEST(test_index_check__repair_keeps),
		TEST(test_index_check__repairs_records),
		TEST(test_index_check__drops_bad),
		TEST(test_index_check__root_made),
		cmocka_unit_test(test_index_check__overlap),
	};

	kv_log_setup(_KV_LOG_INVALID, KV_LOG_STDERR); /* much damage: say nothing */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
