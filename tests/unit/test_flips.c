/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A byte in every 997th place of everything that a store is made of is flipped in turn: then each
 * file is what it was or an error, and nothing crashes or hangs. Each trial is a process of its
 * own.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/unit/unit_core.h"

#define STRIDE 997u
#define PAGE 4096u
#define SUPERBLOCKS_SIZE (2 * KV_BLOCK_SIZE)
/* Bytes of it that mean something. */
#define SUPERBLOCK_FIELDS 64u
#define FILES 10u
#define SECONDS_MAX 60

/* None that a sanitizer ends a process with. */
enum result {
	RESULT_RIGHT = 40, /* all files are there, and right */
	RESULT_NOTICED,    /* the store, or a file of it, was refused */
	RESULT_WRONG,      /* somebody was given other bytes */
};

struct flips {
	struct unit unit;
	uint64_t inos[FILES];
	struct kv_extent extents[FILES];
};

static uint64_t size_of(unsigned number)
{
	return number % 3 == 2 ? MIB + 5000 : 1000 + number * 30000;
}

static bool remember_extent(void *arg, const struct kv_chunk_info *info)
{
	if (info->extent_count > 0)
		*(struct kv_extent *)arg = info->extents[0];
	return false;
}

static int setup(void **state)
{
	static struct flips flips;

	unit_init(&flips.unit, (struct unit_sizes){.store = 64 * MIB, .dram = 32 * MIB});
	for (unsigned i = 0; i < FILES; i++) {
		char name[16];

		(void)snprintf(name, sizeof(name), "f%u", i);
		flips.inos[i] = unit_put(&flips.unit, name, size_of(i), i);
	}
	unit_sync(&flips.unit);
	for (unsigned i = 0; i < FILES; i++) {
		struct kv_file *file = unit_file(&flips.unit, flips.inos[i]);
		struct kv_version *version = unit_current(file);

		assert_int_equal(kv_version_map(version, 0, remember_extent, &flips.extents[i]), 0);
		assert_true(flips.extents[i].count > 0);
		kv_version_unref(version);
		kv_file_put(file);
	}
	unit_unmount(&flips.unit);
	*state = &flips;
	return 0;
}

static int teardown(void **state)
{
	struct flips *flips = *state;

	/* It is as good as before the first flip. */
	unit_mount(&flips->unit);
	for (unsigned i = 0; i < FILES; i++)
		unit_expect_file(&flips->unit, flips->inos[i], size_of(i), i);
	unit_done(&flips->unit);
	return 0;
}

/* ---- A trial, in a process of its own ---- */

static enum result read_file(struct unit *unit, uint64_t ino, unsigned number)
{
	_cleanup_free_ uint8_t *got = malloc(2 * MIB);
	_cleanup_free_ uint8_t *expected = malloc(2 * MIB);
	enum result result = RESULT_NOTICED;
	struct kv_version *version = NULL;
	struct kv_file *file;
	enum kv_access access;

	if (!got || !expected || kv_file_get(unit->core, ino, &file) < 0)
		return RESULT_NOTICED;
	if (kv_file_current(file, &version) == 0 && kv_version_open(version, false, &access) == 0) {
		ssize_t n = kv_version_read(version, got, 2 * MIB, 0);

		unit_pattern(expected, size_of(number), 0, number);
		if (n >= 0)
			result = n == (ssize_t)size_of(number) &&
						 memcmp(got, expected, (size_t)n) == 0
					 ? RESULT_RIGHT
					 : RESULT_WRONG;
		kv_version_close(version);
	}
	kv_version_unref(version);
	kv_file_put(file);
	return result;
}

/* Under its name, as a user would come to it. */
static enum result find_and_read(struct unit *unit, uint64_t ino, unsigned number)
{
	struct kv_inode inode;
	char name[16];

	(void)snprintf(name, sizeof(name), "f%u", number);
	if (kv_index_lookup(unit_index(unit), KV_ROOT_INO, name, strlen(name), &inode) < 0)
		return RESULT_NOTICED;
	return inode.ino == ino ? read_file(unit, ino, number) : RESULT_WRONG;
}

static enum result look(struct flips *flips)
{
	struct unit *unit = &flips->unit;
	enum result result = RESULT_RIGHT;
	char error[300];

	if (unit_try_mount(unit, error) < 0)
		return RESULT_NOTICED;
	for (unsigned i = 0; i < FILES; i++) {
		enum result one = find_and_read(unit, flips->inos[i], i);

		result = one > result ? one : result;
	}
	(void)kv_core_free(unit->core);
	(void)kv_store_close(unit->store);
	return result;
}

/* How a trial ended. */
static int try_status(struct flips *flips)
{
	pid_t child = fork();
	int status = 0;

	assert_true(child >= 0);
	if (child == 0) {
		(void)alarm(SECONDS_MAX);
		_exit((int)look(flips));
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	return status;
}

static enum result try(struct flips *flips, const char *what, uint64_t place)
{
	int status = try_status(flips);

	if (WIFSIGNALED(status))
		fail_msg("%s, byte %llu flipped: %s", what, (unsigned long long)place,
			strsignal(WTERMSIG(status)));
	if (WEXITSTATUS(status) != RESULT_RIGHT && WEXITSTATUS(status) != RESULT_NOTICED)
		fail_msg("%s, byte %llu flipped: wrong bytes, or exit status %d", what,
			(unsigned long long)place, WEXITSTATUS(status));
	return (enum result)WEXITSTATUS(status);
}

/* ---- What is flipped ---- */

static int open_file(const struct flips *flips, const char *name)
{
	char path[400];
	int fd;

	(void)snprintf(path, sizeof(path), "%s/%s", flips->unit.store_path, name);
	fd = open(path, O_RDWR | O_CLOEXEC);
	assert_true(fd >= 0);
	return fd;
}

static uint64_t length_of(int fd)
{
	struct stat st;

	assert_int_equal(fstat(fd, &st), 0);
	return (uint64_t)st.st_size;
}

static void flip(int fd, uint64_t place)
{
	uint8_t byte;

	assert_int_equal(pread(fd, &byte, 1, (off_t)place), 1);
	byte ^= (uint8_t)(1u << place % 8);
	assert_int_equal(pwrite(fd, &byte, 1, (off_t)place), 1);
}

struct image {
	uint8_t *bytes;
	uint64_t size;
};

static struct image image_read(int fd, uint64_t size)
{
	struct image image = {malloc(size), size};

	assert_non_null(image.bytes);
	assert_int_equal(pread(fd, image.bytes, size, 0), size);
	return image;
}

static void image_write(int fd, const struct image *image)
{
	assert_int_equal(ftruncate(fd, (off_t)image->size), 0);
	assert_int_equal(pwrite(fd, image->bytes, image->size, 0), image->size);
}

/*
 * The places of an index that are flipped: every 997th byte, and of each page the numbers that LMDB
 * goes by (flags, ends of the list of nodes and of the nodes, the first node). False at the end.
 */
static bool index_place(unsigned trial, uint64_t size, uint64_t *ret_place)
{
	static const uint64_t heads[] = {10, 13, 15, 17};
	uint64_t strides = (size - 1) / STRIDE;

	if (trial < strides) {
		*ret_place = 5 + trial * STRIDE;
	} else {
		trial -= (unsigned)strides;
		*ret_place = trial / 4 * PAGE + heads[trial % 4];
	}
	return *ret_place < size;
}

/* The index: its pages are looked over before LMDB is let at them, and its records have sums. */
static void test_flips__index(void **state)
{
	int fd = open_file(*state, "index/data.mdb");
	struct image image = image_read(fd, length_of(fd));
	unsigned noticed = 0;
	uint64_t place;

	for (unsigned i = 0; index_place(i, image.size, &place); i++) {
		flip(fd, place);
		noticed += try(*state, "index", place) == RESULT_NOTICED;
		image_write(fd, &image);
	}
	if (noticed < 5)
		fail_msg("%u flips hit something: this proves nothing", noticed);
	free(image.bytes);
	assert_int_equal(close(fd), 0);
}

/*
 * The pages of a large index are not looked over when it is opened: LMDB may end the process, but
 * nobody is given wrong bytes, and nobody waits. What is damaged is found by kvfs check.
 */
static void test_flips__large_index(void **state)
{
	int fd = open_file(*state, "index/data.mdb");
	struct image image = image_read(fd, length_of(fd));
	unsigned trials = 0, noticed = 0, ended = 0;
	uint64_t place;

	for (; index_place(trials, image.size, &place); trials++) {
		assert_int_equal(ftruncate(fd, (off_t)(65 * MIB)), 0);
		flip(fd, place);
		int status = try_status(*state);
		if (WIFSIGNALED(status) ? WTERMSIG(status) == SIGALRM
					: WEXITSTATUS(status) == RESULT_WRONG)
			fail_msg("byte %llu flipped: status %#x", (unsigned long long)place,
				(unsigned)status);
		if (WIFSIGNALED(status) || WEXITSTATUS(status) < RESULT_RIGHT)
			ended++;
		else
			noticed += WEXITSTATUS(status) == RESULT_NOTICED;
		image_write(fd, &image);
	}
	print_message(
		"%u trials: %u noticed, in %u LMDB ended the process\n", trials, noticed, ended);
	if (noticed < 5)
		fail_msg("%u flips hit something: this proves nothing", noticed);
	free(image.bytes);
	assert_int_equal(close(fd), 0);
}

/* The list of devices is short: each byte of it. */
static void test_flips__devices(void **state)
{
	int fd = open_file(*state, "devices");
	struct image image = image_read(fd, length_of(fd));

	for (uint64_t place = 0; place < image.size; place++) {
		flip(fd, place);
		assert_int_equal(try(*state, "devices", place), RESULT_NOTICED);
		image_write(fd, &image);
	}
	free(image.bytes);
	assert_int_equal(close(fd), 0);
}

/* Flips byte AT of one copy of the superblock, or of both, and has them back afterwards. */
static enum result flip_superblock(struct flips *flips, unsigned first, unsigned last, uint64_t at)
{
	struct image image;
	enum result result;
	int fd = open_file(flips, "data0");

	image = image_read(fd, SUPERBLOCKS_SIZE);
	for (unsigned i = first; i <= last; i++)
		flip(fd, i * KV_BLOCK_SIZE + at);
	result = try(flips, "superblock", at);
	/* Not cut to that size: the data is behind it. */
	assert_int_equal(pwrite(fd, image.bytes, image.size, 0), image.size);
	free(image.bytes);
	assert_int_equal(close(fd), 0);
	return result;
}

/* One copy of a superblock makes good the other. Where both are wrong, the store is refused. */
static void test_flips__superblocks(void **state)
{
	for (uint64_t at = 1; at < SUPERBLOCK_FIELDS; at += 7) {
		assert_int_equal(flip_superblock(*state, 0, 0, at), RESULT_RIGHT);
		assert_int_equal(flip_superblock(*state, 1, 1, at), RESULT_RIGHT);
		assert_int_equal(flip_superblock(*state, 0, 1, at), RESULT_NOTICED);
	}
	for (uint64_t at = STRIDE; at < KV_BLOCK_SIZE; at += STRIDE)
		(void)flip_superblock(*state, 0, 1, at);
}

static void flip_files(const struct flips *flips, int fd, uint64_t at)
{
	for (unsigned i = 0; i < FILES; i++) {
		const struct kv_extent *extent = &flips->extents[i];
		uint64_t length = (uint64_t)extent->count << KV_BLOCK_SHIFT;

		flip(fd, kv_extent_offset(extent) + at % length);
	}
}

/* Content: a byte of each file in each trial. The short run leaves most of them out. */
static void test_flips__data(void **state)
{
	struct flips *flips = *state;
	int fd = open_file(flips, "data0"), index_fd = open_file(flips, "index/data.mdb");
	struct image index = image_read(index_fd, length_of(index_fd));
	uint64_t stride = getenv("KVFS_LONG") ? STRIDE : (uint64_t)STRIDE * 29;

	for (uint64_t at = 3; at < MIB; at += stride) {
		flip_files(flips, fd, at);
		assert_int_equal(try(flips, "data", at), RESULT_NOTICED);
		flip_files(flips, fd, at);
		image_write(index_fd, &index);
	}
	free(index.bytes);
	assert_int_equal(close(fd), 0);
	assert_int_equal(close(index_fd), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_flips__index),
		cmocka_unit_test(test_flips__large_index),
		cmocka_unit_test(test_flips__devices),
		cmocka_unit_test(test_flips__superblocks),
		cmocka_unit_test(test_flips__data),
	};

	kv_log_setup(_KV_LOG_INVALID, KV_LOG_STDERR); /* thousands of damages: say nothing */
	return cmocka_run_group_tests(tests, setup, teardown);
}
