/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores: what format makes, what it refuses, and that a refusal changes nothing; the same for
 * open.
 *
 * Everything runs on a real directory. "Changes nothing" is checked on a fingerprint of names,
 * modes, sizes and contents; of data files only the superblock area counts.
 */
#include <dirent.h>
#include <errno.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <xxhash.h>

#include "fs/device_internal.h"
#include "fs/parse.h"
#include "fs/store.h"
#include "index/space.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)
#define SIZE (64 * MIB)

static char error[512];

static int format_store(const char *path, bool force)
{
	const struct kv_store_format format = {.path = path, .size_bytes = SIZE, .force = force};

	error[0] = '\0';
	return kv_store_format(&format, error, sizeof(error));
}

static int format_devices(const char *path, const char *const *devices, unsigned count, bool force)
{
	const struct kv_store_format format = {
		.path = path,
		.devices = devices,
		.device_count = count,
		.size_bytes = SIZE,
		.force = force,
	};

	error[0] = '\0';
	return kv_store_format(&format, error, sizeof(error));
}

static int open_store(const char *path, struct kv_store **ret_store)
{
	const struct kv_store_open open = {.path = path};

	error[0] = '\0';
	return kv_store_open(&open, ret_store, error, sizeof(error));
}

static uint64_t sum;

static int add_to_fingerprint(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	static char bytes[2 << 20];
	char line[1024];
	ssize_t n = 0;
	int fd;

	(void)type;
	(void)ftw;
	/* LMDB's lock file is nobody's state, and the pid in ours is not either. */
	if (strstr(path, "/lock"))
		return 0;
	(void)snprintf(line, sizeof(line), "%s %o %llu", path, st->st_mode,
		S_ISREG(st->st_mode) ? (unsigned long long)st->st_size : 0);
	if (S_ISREG(st->st_mode)) {
		fd = open(path, O_RDONLY | O_CLOEXEC);
		n = fd < 0 ? 0 : read(fd, bytes, sizeof(bytes));
		(void)close(fd);
	}
	sum += XXH3_64bits(line, strlen(line)) ^ XXH3_64bits(bytes, n > 0 ? (size_t)n : 0);
	return 0;
}

static uint64_t fingerprint(void *const *state)
{
	sum = 0;
	(void)nftw(*state, add_to_fingerprint, 16, FTW_PHYS);
	return sum;
}

/* The line is one, and has WORDS. */
static void assert_error(const char *words)
{
	if (!strstr(error, words) || strchr(error, '\n'))
		fail_msg("'%s' lacks '%s'", error, words);
}

static void assert_format_refused(
	void *const *state, const char *path, bool force, int result, const char *words)
{
	uint64_t before = fingerprint(state);

	assert_int_equal(format_store(path, force), result);
	assert_error(words);
	assert_int_equal(fingerprint(state), before);
}

static void assert_open_refused(void *const *state, const char *path, int result, const char *words)
{
	struct kv_store *store = NULL;
	uint64_t before = fingerprint(state);

	assert_int_equal(open_store(path, &store), result);
	assert_null(store);
	assert_error(words);
	assert_int_equal(fingerprint(state), before);
}

/* The text of a small file, in a static buffer. */
static const char *text_of(const char *path)
{
	static char text[1024];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	assert_true(fd >= 0);
	n = read(fd, text, sizeof(text) - 1);
	assert_true(n >= 0);
	text[n] = '\0';
	(void)close(fd);
	return text;
}

static void write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), strlen(text));
	(void)close(fd);
}

static void flip_byte(const char *path, off_t offset)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	char byte;

	assert_true(fd >= 0);
	assert_int_equal(pread(fd, &byte, 1, offset), 1);
	byte = (char)(byte ^ 0x20);
	assert_int_equal(pwrite(fd, &byte, 1, offset), 1);
	(void)close(fd);
}

static unsigned entries(const char *path)
{
	DIR *directory = opendir(path);
	unsigned count = 0;

	assert_non_null(directory);
	while (readdir(directory))
		count++;
	(void)closedir(directory);
	return count - 2;
}

/* A store is made where nothing was, with its four parts, for its owner alone. */
static void test_store__format_then_open(void **state)
{
	const char *path = unit_path(state, "store");
	struct kv_store *store;
	struct kv_inode root;
	struct stat st;

	assert_int_equal(format_store(path, false), 0);
	assert_string_equal(error, "");
	assert_int_equal(entries(path), 4);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0700);
	assert_string_equal(text_of(unit_path(state, "store/devices")), "data0\n");
	assert_int_equal(stat(unit_path(state, "store/data0"), &st), 0);
	assert_int_equal(st.st_size, SIZE);
	assert_int_equal(open_store(path, &store), 0);
	assert_string_equal(error, "");
	assert_string_equal(store->path, path);
	assert_int_equal(kv_devices_count(store->devices), 1);
	assert_int_equal(kv_index_store(store->index)->device_blocks[0], (SIZE - MIB) / 4096);
	assert_int_equal(kv_index_get(store->index, KV_ROOT_INO, &root), 0);
	assert_int_equal(root.mode, S_IFDIR | 0755);
	assert_int_equal(root.uid, geteuid());
	assert_int_equal(root.gid, getegid());
	assert_null(kv_store_close(store));
	assert_null(kv_store_close(NULL));
	/* And once more, after a clean close. */
	assert_int_equal(open_store(path, &store), 0);
	(void)kv_store_close(store);
}

/* An empty directory that is there is taken, and made private. */
static void test_store__format_takes_empty_directory(void **state)
{
	const char *path = unit_path(state, "store");
	struct stat st;

	assert_int_equal(mkdir(path, 0755), 0);
	assert_int_equal(format_store(path, false), 0);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0700);
}

/* Two formats make two stores: their UUIDs differ. */
static void test_store__uuids_differ(void **state)
{
	const char *a = unit_path(state, "a"), *b = unit_path(state, "b");
	struct kv_store *first, *second;

	assert_int_equal(format_store(a, false), 0);
	assert_int_equal(format_store(b, false), 0);
	assert_int_equal(open_store(a, &first), 0);
	assert_int_equal(open_store(b, &second), 0);
	assert_memory_not_equal(
		kv_index_store(first->index)->uuid, kv_index_store(second->index)->uuid, 16);
	assert_int_equal(kv_index_store(first->index)->uuid[6] >> 4, 4);
	(void)kv_store_close(first);
	(void)kv_store_close(second);
}

/* Places that cannot become a store are refused, with or without force. */
static void test_store__format_refusals(void **state)
{
	const char *directory = unit_path(state, "full"), *file = unit_path(state, "file");
	const char *open_to_all = unit_path(state, "open");

	assert_int_equal(mkdir(directory, 0700), 0);
	write_text(unit_path(state, "full/notes.txt"), "mine");
	write_text(file, "mine");
	assert_int_equal(mkdir(open_to_all, 0700), 0);
	assert_int_equal(chmod(open_to_all, 0777), 0);
	for (int force = 0; force <= 1; force++) {
		assert_format_refused(state, directory, force, -ENOTEMPTY, "notes.txt");
		assert_format_refused(state, file, force, -ENOTDIR, "is not a directory");
		assert_format_refused(
			state, unit_path(state, "no/store"), force, -ENOENT, "would be in");
		assert_format_refused(state, open_to_all, force, -EPERM, "chmod 0700");
	}
}

/* A directory of somebody else's is refused. */
static void test_store__format_refuses_others_directory(void **state)
{
	const char *path = unit_path(state, "store");

	if (geteuid() != 0)
		skip();
	assert_int_equal(mkdir(path, 0700), 0);
	assert_int_equal(chown(path, 4711, 4711), 0);
	assert_format_refused(state, path, false, -EPERM, "belongs to user 4711");
}

/* A store that is there is replaced only by force, and then by an empty one of its own. */
static void test_store__format_over_a_store(void **state)
{
	const char *path = unit_path(state, "store");
	const struct kv_make make = {
		.parent = KV_ROOT_INO, .name = "old", .length = 3, .mode = S_IFDIR | 0755};
	const struct kv_store_format larger = {
		.path = path, .size_bytes = SIZE + MIB, .force = true};
	const struct kv_store_format as_is = {.path = path, .force = true};
	struct kv_store *store;
	struct kv_inode inode;
	struct stat st;
	uint8_t uuid[16];

	assert_int_equal(format_store(path, false), 0);
	assert_int_equal(open_store(path, &store), 0);
	assert_int_equal(kv_index_make(store->index, &make, &inode), 0);
	memcpy(uuid, kv_index_store(store->index)->uuid, 16);
	(void)kv_store_close(store);
	assert_format_refused(state, path, false, -EEXIST, "--force replaces it");
	assert_int_equal(format_store(path, true), 0);
	assert_int_equal(entries(path), 4);
	assert_int_equal(open_store(path, &store), 0);
	assert_memory_not_equal(kv_index_store(store->index)->uuid, uuid, 16);
	assert_int_equal(kv_index_lookup(store->index, KV_ROOT_INO, "old", 3, &inode), -ENOENT);
	(void)kv_store_close(store);
	/* Another size makes another data file, no size keeps the one there is. */
	assert_int_equal(kv_store_format(&larger, error, sizeof(error)), 0);
	assert_int_equal(kv_store_format(&as_is, error, sizeof(error)), 0);
	assert_int_equal(entries(path), 4);
	assert_int_equal(stat(unit_path(state, "store/data0"), &st), 0);
	assert_int_equal(st.st_size, SIZE + MIB);
	assert_int_equal(open_store(path, &store), 0);
	(void)kv_store_close(store);
}

/* What an interrupted format left is no obstacle: force cleans it up. */
static void test_store__format_after_interrupted_format(void **state)
{
	const char *path = unit_path(state, "store");
	struct kv_store *store;

	assert_int_equal(mkdir(path, 0700), 0);
	assert_int_equal(mkdir(unit_path(state, "store/index.new"), 0700), 0);
	write_text(unit_path(state, "store/index.new/data.mdb"), "half");
	write_text(unit_path(state, "store/devices.new"), "half");
	write_text(unit_path(state, "store/data0.new"), "half");
	write_text(unit_path(state, "store/lock"), "");
	assert_format_refused(state, path, false, -EEXIST, "--force");
	assert_int_equal(format_store(path, true), 0);
	assert_int_equal(entries(path), 4);
	assert_int_equal(open_store(path, &store), 0);
	(void)kv_store_close(store);
}

/* A mounted store can neither be mounted again nor formatted, and the message names the process. */
static void test_store__mounted(void **state)
{
	const char *path = unit_path(state, "store");
	struct kv_store *store, *second;
	char words[64];

	assert_int_equal(format_store(path, false), 0);
	assert_int_equal(open_store(path, &store), 0);
	(void)snprintf(words, sizeof(words), "already mounted (its lock is held by process %d)",
		(int)getpid());
	assert_int_equal(open_store(path, &second), -EBUSY);
	assert_error(words);
	assert_format_refused(state, path, true, -EBUSY, words);
	assert_int_equal(truncate(unit_path(state, "store/lock"), 0), 0);
	assert_int_equal(open_store(path, &second), -EBUSY);
	assert_error("held by another process");
	(void)kv_store_close(store);
}

static void *close_soon(void *arg)
{
	(void)usleep(100 * 1000);
	kv_store_closing(arg);
	(void)usleep(100 * 1000);
	return kv_store_close(arg);
}

/* Who mounts a store that its last daemon is about to close waits for that, if it is patient. */
static void test_store__closing(void **state)
{
	const char *path = unit_path(state, "store");
	struct kv_store_open patient = {.path = path, .closing_wait_ms = 20000};
	struct kv_store *store, *second;
	pthread_t thread;

	assert_int_equal(format_store(path, false), 0);
	assert_int_equal(open_store(path, &store), 0);
	assert_int_equal(pthread_create(&thread, NULL, close_soon, store), 0);
	assert_int_equal(kv_store_open(&patient, &second, error, sizeof(error)), 0);
	assert_int_equal(pthread_join(thread, NULL), 0);
	/* One that says nothing of closing is not waited for to the end. */
	assert_int_equal(kv_store_open(&patient, &store, error, sizeof(error)), -EBUSY);
	assert_error("already mounted");
	(void)kv_store_close(second);
}

/* What is no store, or lacks a part, is not opened, and the message says how to make one. */
static void test_store__open_what_is_no_store(void **state)
{
	const char *path = unit_path(state, "store"), *file = unit_path(state, "file");
	const char *const parts[] = {"lock", "devices", "index", "data0"};

	assert_open_refused(state, path, -ENOENT, "is not a kvfs store: it is not there");
	assert_error("make one with `kvfs format ");
	write_text(file, "mine");
	assert_open_refused(state, file, -ENOTDIR, "is not a kvfs store: it is not a directory");
	assert_int_equal(mkdir(path, 0700), 0);
	assert_open_refused(state, path, -ENOENT, "is not a kvfs store: it has no lock");
	assert_int_equal(format_store(path, false), 0);
	for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
		char part[64];
		const char *at, *away = unit_path(state, "away");

		(void)snprintf(part, sizeof(part), "store/%s", parts[i]);
		at = unit_path(state, part);
		assert_int_equal(rename(at, away), 0);
		assert_open_refused(state, path, -ENOENT,
			i < 3 ? "is not a kvfs store: it has no " : "is not there");
		/* A link in its place is no better. */
		assert_int_equal(symlink(away, at), 0);
		assert_open_refused(
			state, path, strcmp(parts[i], "index") == 0 ? -ENOTDIR : -ELOOP, "store");
		assert_int_equal(unlink(at), 0);
		assert_int_equal(rename(away, at), 0);
	}
	assert_int_equal(chmod(path, 0770), 0);
	assert_open_refused(state, path, -EPERM, "chmod 0700");
}

/* Files of LMDB that are links are refused before LMDB follows them. */
static void test_store__open_refuses_planted_index_files(void **state)
{
	const char *path = unit_path(state, "store");
	const char *file = unit_path(state, "store/index/data.mdb");

	assert_int_equal(format_store(path, false), 0);
	assert_int_equal(rename(file, unit_path(state, "elsewhere")), 0);
	assert_int_equal(symlink("../../elsewhere", file), 0);
	assert_open_refused(state, path, -EINVAL, "data.mdb is not a regular file");
}

/* A file of the store that has a second name is one that others may read or change. */
static void test_store__open_refuses_hard_links(void **state)
{
	static const char *const parts[] = {"store/index/data.mdb", "store/index/lock.mdb",
		"store/devices", "store/lock", "store/data0"};
	const char *path = unit_path(state, "store");
	const char *other = unit_path(state, "other");
	struct kv_store *store;

	assert_int_equal(format_store(path, false), 0);
	for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
		assert_int_equal(link(unit_path(state, parts[i]), other), 0);
		assert_open_refused(state, path, -EMLINK, "has another name");
		assert_int_equal(unlink(other), 0);
	}
	assert_int_equal(open_store(path, &store), 0);
	(void)kv_store_close(store);
}

/* A list of devices that is damaged, or is not this store's, is refused. */
static void test_store__open_checks_the_device_list(void **state)
{
	static const struct {
		const char *text;
		int result;
		const char *words;
	} cases[] = {
		{"", -EUCLEAN, "is damaged"},
		{"data0", -EUCLEAN, "is damaged"},
		{"\n", -EINVAL, "names device \"\""},
		{"../store/data0\n", -EINVAL, "names device \"../store/data0\""},
		{"sub/data0\n", -EINVAL, "names device"},
		{"..\n", -EINVAL, "names device"},
		{"data0\ndata0\n", -EINVAL, "names 2 devices, but the store has 1"},
		{"data1\n", -ENOENT, "is not there"},
		{"/nonexistent/data0\n", -ENOENT, "names device"},
	};
	const char *path = unit_path(state, "store"), *list = unit_path(state, "store/devices");
	char many[KV_DEVICES_MAX * 6 + 16];

	assert_int_equal(format_store(path, false), 0);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		write_text(list, cases[i].text);
		assert_open_refused(state, path, cases[i].result, cases[i].words);
	}
	many[0] = '\0';
	for (unsigned i = 0; i <= KV_DEVICES_MAX; i++)
		strcat(many, "data0\n");
	write_text(list, many);
	assert_open_refused(state, path, -EUCLEAN, "more than 64 devices");
}

/* One damaged superblock is repaired, two are refused, and so is one of another store. */
static void test_store__open_checks_superblocks(void **state)
{
	const char *path = unit_path(state, "store"), *other = unit_path(state, "other");
	const char *data = unit_path(state, "store/data0");
	struct unit_capture capture;
	struct kv_store *store;
	int r;

	assert_int_equal(format_store(path, false), 0);
	flip_byte(data, 40);
	unit_capture_begin(&capture);
	r = open_store(path, &store);
	free(unit_capture_end(&capture));
	assert_int_equal(r, 0);
	(void)kv_store_close(store);
	flip_byte(data, 40);
	flip_byte(data, 4096 + 40);
	assert_open_refused(state, path, -EUCLEAN, "both superblocks");
	assert_int_equal(format_store(other, false), 0);
	assert_int_equal(rename(unit_path(state, "other/data0"), data), 0);
	assert_open_refused(state, path, -EINVAL, "belongs to another kvfs store");
	assert_int_equal(truncate(data, SIZE - 4096), 0);
	assert_open_refused(state, path, -EINVAL, "belongs to another kvfs store");
}

/* Devices may be several, given relative to where the user is; the order is that of the format. */
static void test_store__several_devices(void **state)
{
	const char *path = unit_path(state, "store");
	const char *const devices[] = {unit_path(state, "b"), "a"};
	char expected[1024];
	struct kv_store *store;
	struct kv_device_info info;
	int here = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	assert_true(here >= 0);
	assert_int_equal(chdir(*state), 0);
	assert_int_equal(format_devices(path, devices, 2, false), 0);
	assert_int_equal(fchdir(here), 0);
	(void)close(here);
	(void)snprintf(expected, sizeof(expected), "%s/b\n%s/a\n", (const char *)*state,
		(const char *)*state);
	assert_string_equal(text_of(unit_path(state, "store/devices")), expected);
	assert_int_equal(entries(path), 3);
	assert_int_equal(open_store(path, &store), 0);
	assert_int_equal(kv_devices_count(store->devices), 2);
	kv_devices_info(store->devices, 1, &info);
	assert_string_equal(info.path, unit_path(state, "a"));
	(void)kv_store_close(store);
	/* In another order they are refused. */
	(void)snprintf(expected, sizeof(expected), "%s/a\n%s/b\n", (const char *)*state,
		(const char *)*state);
	write_text(unit_path(state, "store/devices"), expected);
	assert_open_refused(state, path, -EINVAL, "correct the order");
}

/* A device named by a link (as in /dev/disk/by-id) is kept by that name and found through it. */
static void test_store__device_by_link(void **state)
{
	const char *path = unit_path(state, "store");
	const char *const link = unit_path(state, "by-id");
	struct kv_store *store;
	struct kv_device_info info;
	int fd = open(unit_path(state, "disk"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, SIZE), 0);
	(void)close(fd);
	assert_int_equal(symlink("disk", link), 0);
	assert_int_equal(format_devices(path, &link, 1, false), 0);
	assert_non_null(strstr(text_of(unit_path(state, "store/devices")), "/by-id\n"));
	assert_int_equal(open_store(path, &store), 0);
	kv_devices_info(store->devices, 0, &info);
	assert_string_equal(info.path, unit_path(state, "disk"));
	(void)kv_store_close(store);
}

/* Devices that cannot be used leave neither a store nor new device files behind. */
static void test_store__format_refuses_devices(void **state)
{
	const char *path = unit_path(state, "store");
	const char *const twice[] = {unit_path(state, "new"), unit_path(state, "new")};
	const char *const used[] = {unit_path(state, "new"), unit_path(state, "used")};
	const char *const lost[] = {unit_path(state, "new"), unit_path(state, "no/disk")};
	const char *const inside[] = {unit_path(state, "store/disk")};
	const char *const strange[] = {"a\nb"};
	const char *const empty[] = {""};
	const char *many[KV_DEVICES_MAX + 1];
	const struct {
		const char *const *devices;
		unsigned count;
		int result;
		const char *words;
	} cases[] = {
		{twice, 2, -EINVAL, "named twice"},
		{used, 2, -EEXIST, "already holds data"},
		{lost, 2, -ENOENT, "no/disk"},
		{inside, 1, -EINVAL, "inside the store"},
		{strange, 1, -EINVAL, "line break cannot be used"},
		{empty, 1, -EINVAL, "line break cannot be used"},
		{many, KV_DEVICES_MAX + 1, -E2BIG, "at most 64 devices, not 65"},
	};
	int fd = open(unit_path(state, "used"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	assert_true(fd >= 0);
	assert_int_equal(pwrite(fd, "x", 1, 5000), 1);
	assert_int_equal(ftruncate(fd, SIZE), 0);
	(void)close(fd);
	for (unsigned i = 0; i <= KV_DEVICES_MAX; i++)
		many[i] = "x";
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		uint64_t before = fingerprint(state);

		assert_int_equal(format_devices(path, cases[i].devices, cases[i].count, false),
			cases[i].result);
		assert_error(cases[i].words);
		assert_int_equal(fingerprint(state), before);
	}
}

/* Sizes that do not fit, or are too small, say what would. */
static void test_store__format_refuses_sizes(void **state)
{
	const char *path = unit_path(state, "store");
	struct kv_store_format format = {.path = path, .size_bytes = UINT64_C(1) << 60};
	uint64_t before = fingerprint(state);

	assert_int_equal(kv_store_format(&format, error, sizeof(error)), -ENOSPC);
	assert_error("are free there");
	format.size_bytes = MIB;
	assert_int_equal(kv_store_format(&format, error, sizeof(error)), -EINVAL);
	assert_error("at least 64M");
	assert_int_equal(fingerprint(state), before);
}

/* A table that does not write: the format fails after the names were swapped in. */
static int fail_write(void *context, int handle, const void *memory, size_t length, uint64_t offset)
{
	(void)context;
	(void)handle;
	(void)memory;
	(void)length;
	(void)offset;
	return -EIO;
}

/* A format that fails at its last step leaves the old store as it was, and usable. */
static void test_store__failed_format_keeps_the_old_store(void **state)
{
	const char *path = unit_path(state, "store");
	struct kv_io_ops ops = *kv_io_real();
	struct kv_store_format format = {
		.ops = &ops, .path = path, .size_bytes = SIZE, .force = true};
	struct kv_store *store;
	uint64_t before = fingerprint(state);

	ops.write = fail_write;
	assert_int_equal(kv_store_format(&format, error, sizeof(error)), -EIO);
	assert_error("cannot be written");
	assert_int_equal(fingerprint(state), before);
	assert_int_equal(format_store(path, false), 0);
	before = fingerprint(state);
	assert_int_equal(kv_store_format(&format, error, sizeof(error)), -EIO);
	assert_int_equal(fingerprint(state), before);
	format.size_bytes = SIZE + MIB;
	assert_int_equal(kv_store_format(&format, error, sizeof(error)), -EIO);
	assert_int_equal(fingerprint(state), before);
	assert_int_equal(open_store(path, &store), 0);
	(void)kv_store_close(store);
}

/* The quota reaches the index in blocks. */
static void test_store__quota(void **state)
{
	const char *path = unit_path(state, "store");
	const struct kv_store_open open = {.path = path, .quota_bytes = 10 * MIB};
	struct kv_space_usage usage;
	struct kv_store *store;

	assert_int_equal(format_store(path, false), 0);
	assert_int_equal(kv_store_open(&open, &store, error, sizeof(error)), 0);
	kv_space_usage(kv_index_space(store->index), &usage);
	assert_int_equal(usage.total, 10 * MIB / 4096);
	(void)kv_store_close(store);
}

/* Without a size data0 takes its share of the free space and leaves the rest. */
static void test_store__default_size(void **state)
{
	const char *path = unit_path(state, "store");
	const struct kv_store_format format = {.path = path};
	struct statvfs st;
	struct stat data;
	uint64_t free_bytes;

	assert_int_equal(statvfs(*state, &st), 0);
	free_bytes = (uint64_t)st.f_bavail * st.f_frsize;
	if (free_bytes < UINT64_C(4) << 30)
		skip();
	assert_int_equal(kv_store_format(&format, error, sizeof(error)), 0);
	assert_int_equal(stat(unit_path(state, "store/data0"), &data), 0);
	assert_int_equal((uint64_t)data.st_size % MIB, 0);
	/* Others use the disk, too: roughly half. */
	assert_true((uint64_t)data.st_size > free_bytes / 3);
	assert_true((uint64_t)data.st_size < free_bytes / 3 * 2);
}

#define REAL(name)                                                                                 \
	cmocka_unit_test_setup_teardown(name, unit_directory_setup, unit_directory_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		REAL(test_store__format_then_open),
		REAL(test_store__format_takes_empty_directory),
		REAL(test_store__uuids_differ),
		REAL(test_store__format_refusals),
		REAL(test_store__format_refuses_others_directory),
		REAL(test_store__format_over_a_store),
		REAL(test_store__format_after_interrupted_format),
		REAL(test_store__mounted),
		REAL(test_store__closing),
		REAL(test_store__open_what_is_no_store),
		REAL(test_store__open_refuses_planted_index_files),
		REAL(test_store__open_refuses_hard_links),
		REAL(test_store__open_checks_the_device_list),
		REAL(test_store__open_checks_superblocks),
		REAL(test_store__several_devices),
		REAL(test_store__device_by_link),
		REAL(test_store__format_refuses_devices),
		REAL(test_store__format_refuses_sizes),
		REAL(test_store__failed_format_keeps_the_old_store),
		REAL(test_store__quota),
		REAL(test_store__default_size),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
