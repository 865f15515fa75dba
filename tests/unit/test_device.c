/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices: formatting, verification at open, damaged superblocks, and what users are told.
 *
 * Most run on disks in memory; those of real files say so.
 */
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <linux/loop.h>
#include <xxhash.h>

#include "fs/device_internal.h"
#include "tests/unit/memory_disk.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)
#define SIZE (64 * MIB)
#define BLOCKS ((SIZE - KV_DEVICE_DATA_START) / KV_BLOCK_SIZE)

static const uint8_t uuid[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const uint8_t other_uuid[16] = {99};
static char error[512];

static int setup(void **state)
{
	struct memory_disks *disks = memory_disks_new();

	memory_disks_add(disks, 0, "disk-a", SIZE);
	memory_disks_add(disks, 1, "disk-b", SIZE);
	kv_log_setup(KV_LOG_WARNING, KV_LOG_STDERR);
	error[0] = '\0';
	*state = disks;
	return 0;
}

static int teardown(void **state)
{
	memory_disks_free(*state);
	return 0;
}

static const char *const both[] = {"disk-a", "disk-b"};
static const char *const reversed[] = {"disk-b", "disk-a"};

static struct kv_devices_format format_of(struct memory_disks *disks, unsigned count)
{
	return (struct kv_devices_format){
		.ops = &disks->ops,
		.paths = both,
		.count = count,
		.uuid = uuid,
	};
}

static int format_with(const struct kv_devices_format *format, uint64_t *ret_blocks)
{
	error[0] = '\0';
	return kv_devices_format(format, ret_blocks, error, sizeof(error));
}

static void format_disks(struct memory_disks *disks, unsigned count)
{
	const struct kv_devices_format format = format_of(disks, count);
	uint64_t blocks[KV_DEVICES_MAX];

	assert_int_equal(format_with(&format, blocks), 0);
	for (unsigned i = 0; i < count; i++)
		assert_int_equal(blocks[i], BLOCKS);
}

static int open_paths(struct memory_disks *disks, const char *const *paths, unsigned count,
	struct kv_devices **ret_devices)
{
	static const uint64_t blocks[] = {BLOCKS, BLOCKS};
	const struct kv_devices_open open = {
		.ops = &disks->ops,
		.paths = paths,
		.count = count,
		.uuid = uuid,
		.blocks = blocks,
	};

	error[0] = '\0';
	return kv_devices_open(&open, ret_devices, error, sizeof(error));
}

/* The open fails with RESULT and a line that has WORDS and the name of the device; nothing is
 * written. */
static void assert_open_fails(struct memory_disks *disks, const char *const *paths, unsigned count,
	int result, const char *words)
{
	struct kv_devices *devices = NULL;
	unsigned writes = disks->writes;

	assert_int_equal(open_paths(disks, paths, count, &devices), result);
	assert_null(devices);
	assert_int_equal(disks->writes, writes);
	if (!strstr(error, words) || !strstr(error, "disk-") || strchr(error, '\n'))
		fail_msg("'%s' lacks '%s'", error, words);
}

/* A format is verified by the open, which knows sizes and blocks. */
static void test_device__format_then_open(void **state)
{
	struct memory_disks *disks = *state;
	struct kv_devices *devices;
	struct kv_device_info info;

	format_disks(disks, 2);
	assert_int_equal(open_paths(disks, both, 2, &devices), 0);
	assert_int_equal(kv_devices_count(devices), 2);
	kv_devices_info(devices, 1, &info);
	assert_string_equal(info.path, "disk-b");
	assert_int_equal(info.size, SIZE);
	assert_int_equal(info.blocks, BLOCKS);
	assert_false(info.failed);
	assert_ptr_equal(kv_devices_ops(devices), &disks->ops);
	/* A second open finds them taken. */
	assert_open_fails(disks, both, 2, -EBUSY, "in use");
	assert_null(kv_devices_close(devices));
	assert_null(kv_devices_close(NULL));
}

/* The bytes on the device are those that the header of the module draws. */
static void test_device__superblock_layout(void **state)
{
	struct memory_disks *disks = *state;
	const uint8_t *b;

	format_disks(disks, 2);
	for (unsigned copy = 0; copy < 2; copy++) {
		b = disks->disk[1].bytes + copy * 4096;
		assert_memory_equal(b, "kvfsdev1", 8);
		assert_int_equal(kv_get_le32(b + 8), 1);
		assert_int_equal(kv_get_le32(b + 12), 1);
		assert_memory_equal(b + 16, uuid, 16);
		assert_int_equal(kv_get_le64(b + 32), SIZE);
		assert_int_equal(kv_get_le64(b + 40), MIB);
		assert_int_equal(kv_get_le32(b + 48), 2);
		assert_int_equal(kv_get_le32(b + 52), 0);
		assert_int_equal(kv_get_le64(b + 56), XXH3_64bits(b, 56));
		assert_true(unit_is_zero(b + 64, 4096 - 64));
	}
}

/* Any damaged byte of one copy is repaired from the other; the same byte in both is refused. */
static void test_device__every_damaged_byte(void **state)
{
	struct memory_disks *disks = *state;
	uint8_t *bytes = disks->disk[0].bytes, good[8192];
	struct kv_devices *devices;
	struct unit_capture capture;
	char *log;

	format_disks(disks, 1);
	memcpy(good, bytes, sizeof(good));
	for (unsigned i = 0; i < 8192; i++) {
		bytes[i] ^= 0x10;
		unit_capture_begin(&capture);
		assert_int_equal(open_paths(disks, both, 1, &devices), 0);
		log = unit_capture_end(&capture);
		assert_non_null(strstr(log, i < 4096 ? "superblock copy 0" : "superblock copy 1"));
		free(log);
		(void)kv_devices_close(devices);
		assert_memory_equal(bytes, good, sizeof(good));
	}
	for (unsigned i = 0; i < 4096; i++) {
		bytes[i] ^= 0x10;
		bytes[4096 + i] ^= 0x10;
		assert_open_fails(disks, both, 1, -EUCLEAN,
			i < 8 ? "no kvfs superblock" : "both superblocks");
		memcpy(bytes, good, sizeof(good));
	}
}

/* A copy that the drive cannot read is like a damaged one, and one that cannot be rewritten only
 * warns. */
static void test_device__unrepairable_copy_warns(void **state)
{
	struct memory_disks *disks = *state;
	struct kv_devices *devices;
	struct unit_capture capture;
	char *log;

	format_disks(disks, 1);
	disks->disk[0].bytes[100] ^= 1;
	disks->disk[0].flush_error = -EIO;
	unit_capture_begin(&capture);
	assert_int_equal(open_paths(disks, both, 1, &devices), 0);
	log = unit_capture_end(&capture);
	assert_non_null(strstr(log, "cannot be rewritten, ignoring device=disk-a"));
	free(log);
	(void)kv_devices_close(devices);
	disks->disk[0].read_error = -EIO;
	assert_open_fails(disks, both, 1, -EIO, "cannot be read");
}

/* Writes SUPERBLOCK to both copies of disk NUMBER. */
static void put_superblock(
	struct memory_disks *disks, unsigned number, const struct kv_superblock *superblock)
{
	for (unsigned copy = 0; copy < 2; copy++)
		kv_superblock_encode(superblock, disks->disk[number].bytes + copy * 4096);
}

/* A newer format is called newer, not damaged, and is left alone. */
static void test_device__newer_format(void **state)
{
	struct memory_disks *disks = *state;
	struct kv_superblock superblock = {
		.format = KV_DEVICE_FORMAT + 1,
		.size = SIZE,
		.data_start = KV_DEVICE_DATA_START,
		.count = 1,
	};

	memcpy(superblock.uuid, uuid, sizeof(uuid));
	put_superblock(disks, 0, &superblock);
	assert_open_fails(disks, both, 1, -EPROTO, "another kvfs");
	superblock.format = 0;
	put_superblock(disks, 0, &superblock);
	assert_open_fails(disks, both, 1, -EUCLEAN, "damaged");
}

/* Fields that are whole but mean nothing are damage, whatever their sum says. */
static void test_device__senseless_fields(void **state)
{
	struct memory_disks *disks = *state;
	const struct kv_superblock sound = {
		.format = KV_DEVICE_FORMAT,
		.size = SIZE,
		.data_start = KV_DEVICE_DATA_START,
		.count = 1,
	};
	struct kv_superblock bad[6];

	for (int i = 0; i < 6; i++)
		bad[i] = sound;
	bad[0].data_start = 4096;
	bad[1].size = 4096;
	bad[2].size = SIZE + 1;
	bad[3].count = 0;
	bad[4].count = KV_DEVICES_MAX + 1;
	bad[5].number = 1;
	for (int i = 0; i < 6; i++) {
		put_superblock(disks, 0, &bad[i]);
		assert_open_fails(disks, both, 1, -EUCLEAN, "damaged");
	}
}

/* Devices of another store, in another order, or of another number are named, with what to do. */
static void test_device__wrong_devices(void **state)
{
	struct memory_disks *disks = *state;
	struct kv_devices_format format = format_of(disks, 2);
	uint64_t blocks[2];

	format_disks(disks, 2);
	assert_open_fails(disks, reversed, 2, -EINVAL, "is number 1 of the store, not 0");
	assert_open_fails(disks, both, 1, -EINVAL, "is one of 2, but the store names 1");
	format.uuid = other_uuid;
	format.force = true;
	assert_int_equal(format_with(&format, blocks), 0);
	assert_open_fails(disks, both, 2, -EINVAL, "belongs to another kvfs store");
}

/* Of two whole superblocks the one of this store is believed, and replaces the other. */
static void test_device__stale_copy_of_another_store(void **state)
{
	struct memory_disks *disks = *state;
	struct kv_superblock stale = {
		.format = KV_DEVICE_FORMAT,
		.size = SIZE,
		.data_start = KV_DEVICE_DATA_START,
		.count = 1,
		.uuid = {99},
	};
	struct kv_devices *devices;
	struct unit_capture capture;

	format_disks(disks, 1);
	kv_superblock_encode(&stale, disks->disk[0].bytes);
	unit_capture_begin(&capture);
	assert_int_equal(open_paths(disks, both, 1, &devices), 0);
	free(unit_capture_end(&capture));
	(void)kv_devices_close(devices);
	assert_memory_equal(disks->disk[0].bytes, disks->disk[0].bytes + 4096, 4096);
	assert_memory_equal(disks->disk[0].bytes + 16, uuid, 16);
}

/* A device that shrank is refused; one that grew is used as it was formatted. */
static void test_device__changed_size(void **state)
{
	struct memory_disks *disks = *state;
	struct kv_devices *devices;
	struct kv_device_info info;

	format_disks(disks, 1);
	disks->disk[0].size = SIZE - 4096;
	assert_open_fails(disks, both, 1, -EINVAL, "give it its size back");
	disks->disk[0].size = SIZE + 4096;
	assert_int_equal(open_paths(disks, both, 1, &devices), 0);
	kv_devices_info(devices, 0, &info);
	assert_int_equal(info.size, SIZE);
	(void)kv_devices_close(devices);
	disks->disk[0].size = SIZE;
}

/* An index that knows other block numbers than the superblock is of another time. */
static void test_device__index_disagrees(void **state)
{
	static const uint64_t blocks[] = {BLOCKS - 1};
	struct memory_disks *disks = *state;
	const struct kv_devices_open open = {
		.ops = &disks->ops, .paths = both, .count = 1, .uuid = uuid, .blocks = blocks};
	struct kv_devices *devices;

	format_disks(disks, 1);
	assert_int_equal(kv_devices_open(&open, &devices, error, sizeof(error)), -EUCLEAN);
	assert_non_null(strstr(error, "disagree about its size"));
}

/* A repair is not begun before every device is known to belong to the store. */
static void test_device__repairs_nothing_when_refused(void **state)
{
	struct memory_disks *disks = *state;

	format_disks(disks, 2);
	disks->disk[0].bytes[0] ^= 1;
	memset(disks->disk[1].bytes, 0, 8192);
	assert_open_fails(disks, both, 2, -EUCLEAN, "disk-b has no kvfs superblock");
}

/* Each reason why a device does not open has its line. */
static void test_device__open_errors(void **state)
{
	static const struct {
		int error;
		const char *words;
	} cases[] = {
		{-ENOENT, "is not there"},
		{-EBUSY, "in use"},
		{-ENOTBLK, "neither a block device nor a regular file"},
		{-EISDIR, "neither a block device nor a regular file"},
		{-ELOOP, "symbolic link"},
		{-EACCES, "root"},
		{-EPERM, "root"},
		{-ENXIO, "No such device or address"},
	};
	struct memory_disks *disks = *state;
	struct kv_devices_format format = format_of(disks, 1);
	uint64_t blocks[1];

	format_disks(disks, 1);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		disks->disk[0].open_error = cases[i].error;
		assert_open_fails(disks, both, 1, cases[i].error, cases[i].words);
		if (cases[i].error == -ENOENT)
			continue;
		assert_int_equal(format_with(&format, blocks), cases[i].error);
		assert_non_null(strstr(error, cases[i].words));
	}
	disks->disk[0].open_error = 0;
}

/* What already holds something is not overwritten unless forced, and then no old signature stays.
 */
static void test_device__format_refuses_used_devices(void **state)
{
	static const struct {
		uint32_t offset;
		const char *bytes;
		uint32_t size;
		const char *words;
	} cases[] = {
		{0, "kvfsdev1", 8, "a kvfs device"},
		{4096, "kvfsdev1", 8, "a kvfs device"},
		{1080, "\x53\xef", 2, "ext4"},
		{0, "XFSB", 4, "XFS"},
		{65600, "_BHRfS_M", 8, "btrfs"},
		{4086, "SWAPSPACE2", 10, "swap"},
		{512, "LABELONE", 8, "LVM"},
		{0, "LUKS\xba\xbe", 6, "LUKS"},
		{510, "\x55\xaa", 2, "partition table"},
		{512, "EFI PART", 8, "partition table"},
		{4096, "\xfc\x4e\x2b\xa9", 4, "RAID"},
		{1048575, "x", 1, "holds data"},
	};
	struct memory_disks *disks = *state;
	struct kv_devices_format format = format_of(disks, 2);
	uint64_t blocks[2];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		uint8_t *bytes = disks->disk[1].bytes;

		memset(bytes, 0, MIB);
		memset(disks->disk[0].bytes, 0, MIB);
		memcpy(bytes + cases[i].offset, cases[i].bytes, cases[i].size);
		disks->writes = 0;
		format.force = false;
		assert_int_equal(format_with(&format, blocks), -EEXIST);
		if (!strstr(error, cases[i].words) || !strstr(error, "--force"))
			fail_msg("'%s' lacks '%s'", error, cases[i].words);
		assert_int_equal(disks->writes, 0);
		format.force = true;
		assert_int_equal(format_with(&format, blocks), 0);
		assert_true(unit_is_zero(bytes + 8192, MIB - 8192));
	}
}

/* Sizes that cannot be used are refused before anything is made. */
static void test_device__format_sizes(void **state)
{
	struct memory_disks *disks = *state;
	const char *const missing[] = {"disk-c"};
	struct kv_devices_format format = format_of(disks, 1);
	uint64_t blocks[1];

	memory_disks_add(disks, 2, "disk-c", 0);
	format.paths = missing;
	assert_int_equal(format_with(&format, blocks), -ENOENT);
	assert_non_null(strstr(error, "--size"));
	format.size_bytes = SIZE - 4096;
	assert_int_equal(format_with(&format, blocks), -EINVAL);
	assert_non_null(strstr(error, "at least 64M"));
	format.size_bytes = SIZE + 1;
	assert_int_equal(format_with(&format, blocks), -EINVAL);
	assert_null(disks->disk[2].bytes);
	format.size_bytes = SIZE;
	assert_int_equal(format_with(&format, blocks), 0);
	assert_int_equal(blocks[0], BLOCKS);
	disks->disk[0].size = SIZE - 1;
	format.paths = both;
	assert_int_equal(format_with(&format, blocks), -EINVAL);
	assert_non_null(strstr(error, "too small"));
	disks->disk[0].size = SIZE;
}

/* When the second device cannot be written, the first gets back what it held. */
static void test_device__failed_format_restores(void **state)
{
	struct memory_disks *disks = *state;
	struct kv_devices_format format = format_of(disks, 2);
	uint8_t *before = malloc(SIZE);
	uint64_t blocks[2] = {7, 7}, seed = 3;

	assert_non_null(before);
	unit_random_fill(&seed, before, MIB + 4096);
	memcpy(disks->disk[0].bytes, before, MIB + 4096);
	format.force = true;
	disks->disk[1].write_error = -EIO;
	assert_int_equal(format_with(&format, blocks), -EIO);
	assert_non_null(strstr(error, "disk-b cannot be written"));
	assert_memory_equal(disks->disk[0].bytes, before, MIB + 4096);
	assert_int_equal(blocks[0], 7);
	/* And where it was blank before, blank. */
	memset(disks->disk[0].bytes, 0, SIZE);
	memset(disks->disk[1].bytes, 0, SIZE);
	disks->disk[1].write_error = 0;
	disks->disk[1].flush_error = -EIO;
	format.force = false;
	assert_int_equal(format_with(&format, blocks), -EIO);
	assert_true(unit_is_zero(disks->disk[0].bytes, MIB));
	assert_true(unit_is_zero(disks->disk[1].bytes, MIB));
	free(before);
}

/* One that cannot be read is not formatted. */
static void test_device__format_reads_first(void **state)
{
	struct memory_disks *disks = *state;
	const struct kv_devices_format format = format_of(disks, 1);
	uint64_t blocks[1];

	disks->disk[0].read_error = -EIO;
	assert_int_equal(format_with(&format, blocks), -EIO);
	assert_non_null(strstr(error, "disk-a cannot be read"));
	assert_int_equal(disks->writes, 0);
}

struct prepared {
	struct memory_disks *disks;
	unsigned calls;
	int result;
};

static int prepare(void *arg, const uint64_t *blocks)
{
	struct prepared *prepared = arg;

	assert_int_equal(blocks[0], BLOCKS);
	assert_int_equal(blocks[1], BLOCKS);
	assert_int_equal(prepared->disks->writes, 0);
	prepared->calls++;
	(void)snprintf(error, sizeof(error), "not prepared");
	return prepared->result;
}

/* The caller's part comes between the checks and the first write, and its failure ends the format.
 */
static void test_device__prepare_comes_before_writes(void **state)
{
	struct memory_disks *disks = *state;
	struct prepared prepared = {.disks = disks, .result = -ENOSPC};
	struct kv_devices_format format = format_of(disks, 2);
	uint64_t blocks[2];

	format.prepare = prepare;
	format.prepare_arg = &prepared;
	assert_int_equal(format_with(&format, blocks), -ENOSPC);
	assert_string_equal(error, "not prepared");
	assert_int_equal(disks->writes, 0);
	prepared.result = 0;
	assert_int_equal(format_with(&format, blocks), 0);
	assert_int_equal(prepared.calls, 2);
	format.force = false;
	assert_int_equal(format_with(&format, blocks), -EEXIST);
	assert_int_equal(prepared.calls, 2);
}

/* A flush that fails is reported, counted, and marks the device; the device is still asked again.
 */
static void test_device__failed_flush(void **state)
{
	static const uint64_t blocks[] = {BLOCKS};
	struct memory_disks *disks = *state;
	struct kv_stats stats = {0};
	const struct kv_devices_open open = {.ops = &disks->ops,
		.paths = both,
		.count = 1,
		.uuid = uuid,
		.blocks = blocks,
		.stats = &stats};
	struct kv_devices *devices;
	struct kv_device_info info;
	struct unit_capture capture;
	char *log;

	format_disks(disks, 1);
	assert_int_equal(kv_devices_open(&open, &devices, error, sizeof(error)), 0);
	assert_false(kv_devices_unflushed(devices, 0));
	kv_devices_note_write(devices, 0);
	assert_true(kv_devices_unflushed(devices, 0));
	disks->disk[0].flush_error = -EIO;
	unit_capture_begin(&capture);
	assert_int_equal(kv_devices_flush(devices, 0), -EIO);
	log = unit_capture_end(&capture);
	assert_non_null(strstr(log, "error device: flush failed device=disk-a"));
	free(log);
	assert_true(kv_devices_unflushed(devices, 0));
	assert_int_equal(kv_stat_get(&stats.io_errors), 1);
	kv_devices_info(devices, 0, &info);
	assert_true(info.failed);
	disks->disk[0].flush_error = 0;
	assert_int_equal(kv_devices_flush(devices, 0), 0);
	assert_false(kv_devices_unflushed(devices, 0));
	(void)kv_devices_close(devices);
}

/* ---- Real files ---- */

static int format_file(const char *path, uint64_t size, bool force)
{
	const struct kv_devices_format format = {
		.ops = kv_io_real(),
		.paths = &path,
		.count = 1,
		.size_bytes = size,
		.uuid = uuid,
		.force = force,
	};
	uint64_t blocks[1];

	return format_with(&format, blocks);
}

static int open_file(const char *path, struct kv_devices **ret_devices)
{
	static const uint64_t blocks[] = {BLOCKS};
	const struct kv_devices_open open = {
		.ops = kv_io_real(), .paths = &path, .count = 1, .uuid = uuid, .blocks = blocks};

	error[0] = '\0';
	return kv_devices_open(&open, ret_devices, error, sizeof(error));
}

/* A device file is made for its owner alone, wholly allocated where the filesystem can. */
static void test_device__real_file(void **state)
{
	const char *path = unit_path(state, "data0");
	struct kv_devices *devices, *second;
	struct stat st;

	assert_int_equal(format_file(path, SIZE, false), 0);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_size, SIZE);
	assert_int_equal(st.st_mode & 07777, 0600);
	assert_int_equal(open_file(path, &devices), 0);
	assert_int_equal(open_file(path, &second), -EBUSY);
	assert_int_equal(format_file(path, SIZE, true), -EBUSY);
	assert_non_null(strstr(error, "in use"));
	(void)kv_devices_close(devices);
	assert_int_equal(format_file(path, SIZE, false), -EEXIST);
	assert_int_equal(format_file(path, SIZE, true), 0);
	/* Gone shorter behind our back. */
	assert_int_equal(truncate(path, SIZE / 2), 0);
	assert_int_equal(open_file(path, &devices), -EINVAL);
	assert_non_null(strstr(error, "give it its size back"));
}

/* Links, directories and other things are no devices, and a missing directory is said. */
static void test_device__real_refusals(void **state)
{
	const char *link = unit_path(state, "link"), *directory = unit_path(state, "directory");
	const char *fifo = unit_path(state, "fifo"), *lost = unit_path(state, "no/data0");
	struct kv_devices *devices;

	assert_int_equal(symlink("elsewhere", link), 0);
	assert_int_equal(mkdir(directory, 0700), 0);
	assert_int_equal(mkfifo(fifo, 0600), 0);
	assert_int_equal(format_file(link, SIZE, true), -ELOOP);
	assert_int_equal(open_file(link, &devices), -ELOOP);
	assert_int_equal(format_file(directory, SIZE, true), -EISDIR);
	assert_int_equal(format_file(fifo, SIZE, true), -ENOTBLK);
	assert_int_equal(format_file("/dev/null", SIZE, true), -ENOTBLK);
	assert_int_equal(format_file(lost, SIZE, true), -ENOENT);
	assert_non_null(strstr(error, "cannot be created: No such file or directory"));
	assert_int_equal(open_file(lost, &devices), -ENOENT);
}

/* A file that does not fit is not left behind, and the line says how much is free. */
static void test_device__real_file_does_not_fit(void **state)
{
	const char *path = unit_path(state, "data0");
	uint64_t size;
	struct statvfs st;
	struct stat file;

	assert_int_equal(statvfs(*state, &st), 0);
	size = ((uint64_t)st.f_bavail * st.f_frsize + 100 * MIB) / 4096 * 4096 + (MIB << 10);
	assert_int_equal(format_file(path, size, false), -ENOSPC);
	assert_non_null(strstr(error, "does not fit"));
	assert_non_null(strstr(error, "are free"));
	assert_int_equal(stat(path, &file), -1);
	assert_int_equal(format_file(path, (uint64_t)INT64_MAX + 1, false), -EFBIG);
	assert_int_equal(stat(path, &file), -1);
}

/* Puts the file PATH behind a loop device. Returns its descriptor, or -1 where that is not
 * possible. */
static int attach_loop(const char *path, char *ret_name, size_t name_size)
{
	int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
	int file = open(path, O_RDWR | O_CLOEXEC);
	int number = control < 0 ? -1 : ioctl(control, LOOP_CTL_GET_FREE);
	int loop = -1;

	if (number >= 0) {
		(void)snprintf(ret_name, name_size, "/dev/loop%d", number);
		loop = open(ret_name, O_RDWR | O_CLOEXEC);
	}
	if (loop >= 0 && ioctl(loop, LOOP_SET_FD, file) < 0) {
		(void)close(loop);
		loop = -1;
	}
	(void)close(file);
	if (control >= 0)
		(void)close(control);
	return loop;
}

/* A block device is measured, claimed, checked for signatures, formatted and opened. */
static void test_device__real_block_device(void **state)
{
	const char *path = unit_path(state, "image");
	char name[32];
	struct kv_devices *devices = NULL, *second;
	int loop, file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	int forced, unforced, opened, reopened;

	assert_true(file >= 0);
	assert_int_equal(ftruncate(file, SIZE), 0);
	assert_int_equal(pwrite(file, "\x53\xef", 2, 1080), 2);
	loop = attach_loop(path, name, sizeof(name));
	if (loop < 0) {
		(void)close(file);
		skip();
	}
	unforced = format_file(name, 0, false);
	forced = format_file(name, 0, true);
	opened = open_file(name, &devices);
	reopened = opened == 0 ? open_file(name, &second) : 0;
	(void)kv_devices_close(devices);
	(void)ioctl(loop, LOOP_CLR_FD);
	(void)close(loop);
	(void)close(file);
	assert_int_equal(unforced, -EEXIST);
	assert_int_equal(forced, 0);
	assert_int_equal(opened, 0);
	assert_int_equal(reopened, -EBUSY);
}

#define MEMORY(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define REAL(name)                                                                                 \
	cmocka_unit_test_setup_teardown(name, unit_directory_setup, unit_directory_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		MEMORY(test_device__format_then_open),
		MEMORY(test_device__superblock_layout),
		MEMORY(test_device__every_damaged_byte),
		MEMORY(test_device__unrepairable_copy_warns),
		MEMORY(test_device__newer_format),
		MEMORY(test_device__senseless_fields),
		MEMORY(test_device__wrong_devices),
		MEMORY(test_device__stale_copy_of_another_store),
		MEMORY(test_device__changed_size),
		MEMORY(test_device__index_disagrees),
		MEMORY(test_device__repairs_nothing_when_refused),
		MEMORY(test_device__open_errors),
		MEMORY(test_device__format_refuses_used_devices),
		MEMORY(test_device__format_sizes),
		MEMORY(test_device__failed_format_restores),
		MEMORY(test_device__format_reads_first),
		MEMORY(test_device__prepare_comes_before_writes),
		MEMORY(test_device__failed_flush),
		REAL(test_device__real_file),
		REAL(test_device__real_refusals),
		REAL(test_device__real_file_does_not_fit),
		REAL(test_device__real_block_device),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
