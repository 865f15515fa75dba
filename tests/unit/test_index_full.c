/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An index whose map, or whose filesystem, is full: growing is refused, removing works, and makes
 * room for growing again.
 */
#include <sys/mount.h>

#include "unit_index.h"

#define FILES_MAX 200000u

static void name_of(unsigned number, char name[64])
{
	/* Long ones fill an index faster. */
	(void)snprintf(name, 64, "a-file-with-a-long-name-that-takes-room-%u", number);
}

static int make_file(struct unit *unit, unsigned number)
{
	struct kv_inode inode;
	char name[64];

	name_of(number, name);
	return unit_try_make(unit, KV_ROOT_INO, name, S_IFREG | 0644, &inode);
}

/* Makes files from FIRST on until there is no room for more: the number behind the last. */
static unsigned fill_up(struct unit *unit, unsigned first)
{
	unsigned number = first;
	int r;

	while ((r = make_file(unit, number)) == 0 && number < FILES_MAX) {
		number++;
	}
	assert_int_equal(r, -ENOSPC);
	assert_true(kv_index_is_short(unit->index));
	return number;
}

/* Removing works however it is done, and reaches the disk. */
static void remove_some(struct unit *unit, unsigned first, unsigned last)
{
	for (unsigned i = first; i < last; i++) {
		struct kv_inode inode;
		char name[64];

		name_of(i, name);
		inode.ino = unit_lookup(unit, KV_ROOT_INO, name);
		assert_true(inode.ino != 0);
		if (i % 2) {
			unit_unlink(unit, KV_ROOT_INO, name);
		} else {
			int64_t used = unit_get(unit, inode.ino).last_use_ns;

			assert_int_equal(kv_index_evict(unit->index, inode.ino, used, false,
						 ++unit->now, NULL, NULL),
				0);
		}
		unit_reap(unit, inode.ino);
	}
	unit_sync(unit);
}

/* The index of UNIT on a filesystem of its own. False: that takes root. */
static bool create_on_tmpfs(struct unit *unit, const char *size)
{
	const struct kv_index_store store = {.device_count = 1, .device_blocks = {100000}};

	if (geteuid() != 0)
		return false;
	unit_create(unit, 1, 100000);
	unit_remove(unit);
	assert_int_equal(mkdir(unit->path, 0700), 0);
	assert_int_equal(mount("kvfs-test", unit->path, "tmpfs", 0, size), 0);
	assert_int_equal(kv_index_create(unit->path, &store, 0755, 10, 20, UNIT_NOW), 0);
	return true;
}

static void remove_tmpfs(struct unit *unit)
{
	unit_check(unit);
	unit_close(unit);
	assert_int_equal(umount(unit->path), 0);
	assert_int_equal(rmdir(unit->path), 0);
}

/* The map is full. */
static void test_index_full__map(void **state)
{
	struct unit unit;
	unsigned first = 0, end;

	(void)state;
	if (!create_on_tmpfs(&unit, "size=64m"))
		skip();
	unit.options.map_size_bytes = 16 << 20;
	unit_open(&unit);
	end = fill_up(&unit, 0);
	assert_true(end > 1000);
	for (unsigned round = 0; round < 4; round++) {
		unsigned before = end;

		assert_int_equal(make_file(&unit, end), -ENOSPC);
		remove_some(&unit, first, first + end / 8);
		first += end / 8;
		assert_false(kv_index_is_short(unit.index));
		end = fill_up(&unit, end);
		assert_true(end > before + 100);
	}
	/* Also when it was full before it was opened. */
	unit_reopen(&unit);
	remove_some(&unit, first, end);
	assert_int_equal(make_file(&unit, end), 0);
	unit_sync(&unit);
	remove_tmpfs(&unit);
}

/* Of something else. */
static void fill_filesystem(const struct unit *unit)
{
	static char zeros[1 << 16];
	char path[160];
	FILE *file;

	(void)snprintf(path, sizeof(path), "%s/filler", unit->path);
	file = fopen(path, "w");
	assert_non_null(file);
	setbuf(file, NULL);
	while (fwrite(zeros, 1, sizeof(zeros), file) == sizeof(zeros))
		continue;
	(void)fclose(file);
}

/* The filesystem is full, of something else. */
static void test_index_full__filesystem(void **state)
{
	struct unit unit;

	(void)state;
	if (!create_on_tmpfs(&unit, "size=48m"))
		skip();
	unit_open(&unit);
	for (unsigned i = 0; i < 20000; i++)
		assert_int_equal(make_file(&unit, FILES_MAX + i), 0);
	unit_sync(&unit);
	fill_filesystem(&unit);
	/* The commit behind the fill learns of it. */
	(void)make_file(&unit, 1);
	unit_sync(&unit);
	assert_true(kv_index_is_short(unit.index));
	assert_int_equal(make_file(&unit, 2), -ENOSPC);
	remove_some(&unit, FILES_MAX, FILES_MAX + 10000);
	assert_false(kv_index_is_short(unit.index));
	assert_int_equal(make_file(&unit, 2), 0);
	assert_true(fill_up(&unit, 3) > 1000);
	remove_some(&unit, FILES_MAX + 10000, FILES_MAX + 20000);
	remove_tmpfs(&unit);
}

/* ---- Many at once ---- */

#define WRITERS 16u
#define HELD 300u

struct writer {
	struct unit *unit;
	unsigned number;
	pthread_barrier_t *full;
	uint64_t inos[HELD];
	unsigned made;      /* of HELD */
	unsigned published; /* of those made */
	int r;
};

static int make_held(struct writer *writer, unsigned file)
{
	char name[64];
	name_of(writer->number * FILES_MAX + file, name);
	const struct kv_make make = {
		.parent = KV_ROOT_INO,
		.name = name,
		.length = strlen(name),
		.mode = S_IFREG | 0644,
		.now_ns = UNIT_NOW,
		.hold = true,
	};
	struct kv_inode inode;
	int r = kv_index_make(writer->unit->index, &make, &inode);

	writer->inos[file] = inode.ino;
	return r;
}

static int publish_held(struct writer *writer, unsigned file)
{
	const struct kv_content content = {.version = 1, .replace = true, .mtime_ns = UNIT_NOW};
	struct kv_freed freed;
	struct kv_inode inode;

	return kv_index_publish(writer->unit->index, writer->inos[file], &content, &inode, &freed);
}

static int remove_one(struct writer *writer, unsigned file)
{
	struct kv_index *index = writer->unit->index;
	struct kv_freed freed;
	struct kv_inode inode;
	char name[64];
	int r;

	name_of(writer->number * FILES_MAX + file, name);
	r = kv_index_unlink(index, KV_ROOT_INO, name, strlen(name), false, 0, UNIT_NOW, &inode);
	return r < 0 ? r : kv_index_reap(index, inode.ino, &freed);
}

/* Publishes what was made before the filesystem was full, as long as the index takes it. */
static void *writer_main(void *arg)
{
	struct writer *writer = arg;

	while (writer->made < HELD && make_held(writer, writer->made) == 0)
		writer->made++;
	(void)pthread_barrier_wait(writer->full); /* now it is filled */
	(void)pthread_barrier_wait(writer->full);
	while (writer->published < writer->made && writer->r == 0) {
		writer->r = publish_held(writer, writer->published);
		writer->published += writer->r == 0;
	}
	writer->r = writer->r == -ENOSPC ? 0 : writer->r;
	for (unsigned i = 0; i < writer->made && writer->r == 0; i++)
		writer->r = remove_one(writer, i);
	return NULL;
}

static void many_at_once(const char *size, struct writer *writers)
{
	pthread_t threads[WRITERS];
	pthread_barrier_t full;
	struct unit unit;

	assert_true(create_on_tmpfs(&unit, size));
	unit_open(&unit);
	assert_int_equal(pthread_barrier_init(&full, NULL, WRITERS + 1), 0);
	for (unsigned k = 0; k < WRITERS; k++) {
		writers[k] = (struct writer){.unit = &unit, .number = k, .full = &full};
		assert_int_equal(pthread_create(&threads[k], NULL, writer_main, &writers[k]), 0);
	}
	(void)pthread_barrier_wait(&full);
	fill_filesystem(&unit);
	(void)pthread_barrier_wait(&full);
	for (unsigned k = 0; k < WRITERS; k++)
		assert_int_equal(pthread_join(threads[k], NULL), 0);
	for (unsigned k = 0; k < WRITERS; k++)
		if (writers[k].r != 0)
			fail_msg("%s: %s", size, strerror(-writers[k].r));
	unit_sync(&unit);
	(void)pthread_barrier_destroy(&full);
	remove_tmpfs(&unit);
}

/*
 * Many files were begun when the filesystem gets full: they are published as far as the reserve for
 * removals is not touched, and no commit fails.
 */
static void test_index_full__many_at_once(void **state)
{
	static const char *const sizes[] = {"size=2m", "size=3m", "size=5m", "size=8m", "size=13m",
		"size=21m", "size=34m", "size=55m", "size=89m", "size=144m"};
	static struct writer writers[WRITERS];

	(void)state;
	if (geteuid() != 0)
		skip();
	for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
		many_at_once(sizes[i], writers);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_index_full__map),
		cmocka_unit_test(test_index_full__filesystem),
		cmocka_unit_test(test_index_full__many_at_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
