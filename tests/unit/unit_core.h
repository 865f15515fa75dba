/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of the core share: a real store in a temporary directory, device I/O that fails on
 * demand, and shorthands. Functions that can fail assert that they do not.
 */
#ifndef KVFS_TESTS_UNIT_UNIT_CORE_H
#define KVFS_TESTS_UNIT_UNIT_CORE_H

#include <pthread.h>

#include "fs/core.h"
#include "index/check.h"
#include "index/space.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)

/* What other threads do takes as long as the machine lets it: a minute is none of our business. */
#define UNIT_WAIT_FOR(condition)                                                                   \
	for (unsigned unit_turns = 0; unit_turns < 60000 && !(condition); unit_turns++)            \
	(void)usleep(1000)

/* The real table with faults in front; counters go down to 0, then the fault strikes. */
struct unit_disk {
	struct kv_io_ops ops;
	const struct kv_io_ops *real;
	_Atomic bool hold;         /* nothing completes */
	_Atomic int64_t offset_ns; /* added to the clock */
	_Atomic int reads_fail;    /* that many completed reads become EIO */
	_Atomic int writes_fail;
	_Atomic int reads_flip; /* that many reads have a bit flipped */
	_Atomic int flushes_fail;
	_Atomic int queues_fail;   /* that many are not made: ENOMEM */
	_Atomic unsigned delay_us; /* before every reap */
	_Atomic uint64_t submitted;
	_Atomic uint64_t reads;
	_Atomic uint64_t writes;
};

struct unit {
	char *directory;
	char store_path[300];
	struct unit_disk disk;
	struct kv_store *store;
	struct kv_stats stats;
	struct kv_options options;
	struct kv_core *core;
	uint64_t quota;
	int dram_fd; /* of a tier that outlives the core; 0: none */
	_Atomic unsigned names_gone;
	_Atomic unsigned became_hot;
	_Atomic int backings;
	char gone[64];
};

static inline bool unit_strike(_Atomic int *counter)
{
	int left = atomic_load(counter);

	while (left > 0)
		if (atomic_compare_exchange_weak(counter, &left, left - 1))
			return true;
	return false;
}

static inline int unit_reap_io(void *context, struct kv_io_queue *queue, bool wait,
	struct kv_io_completion *ret_completions, unsigned capacity)
{
	struct unit_disk *disk = context;

	while (atomic_load(&disk->hold))
		(void)usleep(1000);
	if (atomic_load(&disk->delay_us) > 0)
		(void)usleep(atomic_load(&disk->delay_us));
	int n = disk->real->reap(disk->real->context, queue, wait, ret_completions, capacity);
	for (int i = 0; i < n; i++) {
		struct kv_io *io = ret_completions[i].io;

		if (io->kind == KV_IO_READ) {
			atomic_fetch_add(&disk->reads, 1);
			if (unit_strike(&disk->reads_fail))
				ret_completions[i].result = -EIO;
			else if (unit_strike(&disk->reads_flip))
				((uint8_t *)io->memory)[io->length / 2] ^= 4;
		} else {
			atomic_fetch_add(&disk->writes, 1);
			if (unit_strike(&disk->writes_fail))
				ret_completions[i].result = -EIO;
		}
	}
	return n;
}

#define UNIT_PASS(name, result, parameters, ...)                                                   \
	static inline result unit_##name parameters                                                \
	{                                                                                          \
		const struct unit_disk *disk = context;                                            \
		return disk->real->name(disk->real->context, __VA_ARGS__);                         \
	}
UNIT_PASS(open, int,
	(void *context, const char *path, bool create, uint64_t size, int *handle,
		uint64_t *ret_size),
	path, create, size, handle, ret_size)
UNIT_PASS(read, int, (void *context, int handle, void *memory, size_t length, uint64_t offset),
	handle, memory, length, offset)
UNIT_PASS(write, int,
	(void *context, int handle, const void *memory, size_t length, uint64_t offset), handle,
	memory, length, offset)
UNIT_PASS(buffer, void *, (void *context, struct kv_io_queue *queue, unsigned index), queue, index)
#undef UNIT_PASS

static inline int unit_submit(void *context, struct kv_io_queue *queue, struct kv_io *io)
{
	struct unit_disk *disk = context;
	int r = disk->real->submit(disk->real->context, queue, io);

	atomic_fetch_add(&disk->submitted, r == 0);
	return r;
}

static inline void unit_close_io(void *context, int handle)
{
	const struct unit_disk *disk = context;

	disk->real->close(disk->real->context, handle);
}

static inline void unit_queue_free(void *context, struct kv_io_queue *queue)
{
	const struct unit_disk *disk = context;

	disk->real->queue_free(disk->real->context, queue);
}

static inline int unit_queue_new(void *context, const int *handles, unsigned count, unsigned depth,
	struct kv_io_queue **ret_queue)
{
	struct unit_disk *disk = context;

	if (unit_strike(&disk->queues_fail))
		return -ENOMEM;
	return disk->real->queue_new(disk->real->context, handles, count, depth, ret_queue);
}

static inline int unit_flush(void *context, int handle)
{
	struct unit_disk *disk = context;

	if (unit_strike(&disk->flushes_fail))
		return -EIO;
	return disk->real->flush(disk->real->context, handle);
}

static inline int64_t unit_clock_ns(void *context)
{
	struct unit_disk *disk = context;

	return disk->real->clock_ns(disk->real->context) + atomic_load(&disk->offset_ns);
}

static inline void unit_random_io(void *context, void *memory, size_t length)
{
	const struct unit_disk *disk = context;

	disk->real->random(disk->real->context, memory, length);
}

static inline void unit_disk_init(struct unit_disk *disk)
{
	disk->real = kv_io_real();
	disk->ops = (struct kv_io_ops){
		.context = disk,
		.open = unit_open,
		.close = unit_close_io,
		.read = unit_read,
		.write = unit_write,
		.flush = unit_flush,
		.queue_new = unit_queue_new,
		.queue_free = unit_queue_free,
		.submit = unit_submit,
		.reap = unit_reap_io,
		.buffer = unit_buffer,
		.clock_ns = unit_clock_ns,
		.random = unit_random_io,
	};
}

static inline void unit_name_gone(void *arg, uint64_t parent, const char *name, size_t length)
{
	struct unit *unit = arg;

	(void)parent;
	(void)snprintf(unit->gone, sizeof(unit->gone), "%.*s", (int)length, name);
	atomic_fetch_add(&unit->names_gone, 1);
}

static inline void unit_became_hot(void *arg, uint64_t ino)
{
	(void)ino;
	atomic_fetch_add(&((struct unit *)arg)->became_hot, 1);
}

static inline int unit_backing_open(void *arg, int fd)
{
	assert_true(fd >= 0);
	return atomic_fetch_add(&((struct unit *)arg)->backings, 1) + 1;
}

static inline void unit_backing_close(void *arg, int backing_id)
{
	(void)backing_id;
	atomic_fetch_sub(&((struct unit *)arg)->backings, 1);
}

/* Negative errno, and why. */
static inline int unit_try_mount(struct unit *unit, char ret_error[300])
{
	const struct kv_store_open open = {
		.ops = &unit->disk.ops,
		.path = unit->store_path,
		.quota_bytes = unit->quota,
		.stats = &unit->stats,
	};

	int r = kv_store_open(&open, &unit->store, ret_error, 300);

	if (r < 0)
		return r;
	const struct kv_core_options options = {
		.options = &unit->options,
		.store = unit->store,
		.stats = &unit->stats,
		.hooks = {unit, unit_backing_open, unit_backing_close, unit_name_gone,
			unit_became_hot},
		.dram_is_shared = unit->dram_fd > 0,
		.dram_mount = unit->dram_fd > 0 ? dup(unit->dram_fd) : -1,
	};
	return kv_core_new(&options, &unit->core, ret_error, 300);
}

static inline void unit_mount(struct unit *unit)
{
	char error[300] = "";

	if (unit_try_mount(unit, error) != 0)
		fail_msg("mount: %s", error);
}

static inline void unit_violation(void *arg, const char *text)
{
	(void)arg;
	print_error("check: %s\n", text);
}

static inline struct kv_index *unit_index(struct unit *unit)
{
	return kv_core_index(unit->core);
}

static inline struct kv_space_usage unit_usage(struct unit *unit)
{
	struct kv_space_usage usage;

	kv_space_usage(kv_index_space(unit_index(unit)), &usage);
	return usage;
}

/* At rest nothing is promised or under way; only what files hold is used. */
static inline void unit_unmount(struct unit *unit)
{
	struct kv_space_usage usage;

	unit->core = kv_core_free(unit->core);
	assert_int_equal(
		kv_index_wait(unit->store->index, kv_index_sequence(unit->store->index)), 0);
	kv_space_usage(kv_index_space(unit->store->index), &usage);
	assert_int_equal(usage.reserved, 0);
	assert_int_equal(usage.busy, 0);
	assert_int_equal(kv_index_check(unit->store->index, unit_violation, NULL), 0);
	assert_int_equal(unit->backings, 0);
	unit->store = kv_store_close(unit->store);
}

struct unit_sizes {
	uint64_t store;
	uint64_t dram;
	uint64_t stream_above; /* 0: the default */
	uint64_t quota;
	unsigned devices; /* 0: embedded */
	bool sparse;      /* devices are files with holes: larger than the disk they are on */
};

static inline void unit_init(struct unit *unit, struct unit_sizes sizes)
{
	char error[300] = "";
	char paths[4][300];
	const char *devices[4];
	void *state = NULL;

	memset(unit, 0, sizeof(*unit));
	assert_int_equal(unit_directory_setup(&state), 0);
	unit->directory = state;
	(void)snprintf(unit->store_path, sizeof(unit->store_path), "%s/store", unit->directory);
	unit_disk_init(&unit->disk);
	kv_options_init(&unit->options);
	unit->options.lease_ms = 0; /* a test that fills the store need not wait */
	unit->options.dram_bytes = sizes.dram;
	unit->options.stream_above_bytes = sizes.stream_above ? sizes.stream_above : 256 * MIB;
	for (unsigned i = 0; i < sizes.devices; i++) {
		(void)snprintf(paths[i], sizeof(paths[i]), "%s/device%u", unit->directory, i);
		devices[i] = paths[i];
		if (sizes.sparse) {
			FILE *made = fopen(paths[i], "wx");
			assert_non_null(made);
			assert_int_equal(ftruncate(fileno(made), (off_t)sizes.store), 0);
			assert_int_equal(fclose(made), 0);
		}
	}
	const struct kv_store_format format = {
		.ops = &unit->disk.ops,
		.path = unit->store_path,
		.devices = sizes.devices ? devices : NULL,
		.device_count = sizes.devices,
		.size_bytes = sizes.store,
	};
	if (kv_store_format(&format, error, sizeof(error)) != 0)
		fail_msg("format: %s", error);
	unit->quota = sizes.quota;
	unit_mount(unit);
	assert_int_equal(unit_usage(unit).used, 0);
}

static inline void unit_done(struct unit *unit)
{
	void *state = unit->directory;

	unit_unmount(unit);
	assert_int_equal(unit_directory_teardown(&state), 0);
}

/* ---- Files ---- */

static inline uint64_t unit_create(struct unit *unit, const char *name)
{
	const struct kv_make make = {
		.parent = KV_ROOT_INO,
		.name = name,
		.length = strlen(name),
		.mode = S_IFREG | 0644,
		.now_ns = kv_core_now_ns(unit->core),
		.hold = true,
	};
	struct kv_inode inode;

	assert_int_equal(kv_index_make(unit_index(unit), &make, &inode), 0);
	return inode.ino;
}

static inline uint64_t unit_lookup(struct unit *unit, const char *name)
{
	struct kv_inode inode;
	int r = kv_index_lookup(unit_index(unit), KV_ROOT_INO, name, strlen(name), &inode);

	assert_true(r == 0 || r == -ENOENT);
	return r == 0 ? inode.ino : 0;
}

static inline struct kv_file *unit_file(struct unit *unit, uint64_t ino)
{
	struct kv_file *file;

	assert_int_equal(kv_file_get(unit->core, ino, &file), 0);
	return file;
}

static inline struct kv_version *unit_current(struct kv_file *file)
{
	struct kv_version *version = NULL;

	assert_int_equal(kv_file_current(file, &version), 0);
	return version;
}

static inline bool unit_has_content(struct kv_file *file)
{
	struct kv_version *version;

	if (kv_file_current(file, &version) < 0)
		return false;
	kv_version_unref(version);
	return true;
}

static inline struct kv_version *unit_new(struct kv_file *file, struct kv_version *base)
{
	struct kv_version *version;

	assert_int_equal(kv_version_new(file, base, &version), 0);
	return version;
}

/* Publishes for a writer that does not go on. */
static inline int unit_publish(struct kv_version *version)
{
	int r = kv_version_publish(version);

	if (r == 0)
		kv_version_give_up(version);
	return r;
}

static inline struct kv_version_attr unit_attr(struct kv_version *version)
{
	struct kv_version_attr attr;

	kv_version_attr(version, &attr);
	return attr;
}

/* Bytes that depend on the place and on SEED. */
static inline void unit_pattern(uint8_t *memory, size_t size, uint64_t offset, uint64_t seed)
{
	for (size_t i = 0; i < size; i++) {
		uint64_t x = (offset + i) / 8 * UINT64_C(0x9e3779b97f4a7c15) + seed;

		x ^= x >> 29;
		x *= UINT64_C(0xbf58476d1ce4e5b9);
		memory[i] = (uint8_t)(x >> ((offset + i) % 8 * 8));
	}
}

static inline int unit_write_pattern(
	struct kv_version *version, uint64_t size, uint64_t offset, uint64_t seed)
{
	uint8_t *memory = malloc(MIB);
	int r = 0;

	assert_non_null(memory);
	for (uint64_t done = 0; done < size && r == 0; done += MIB) {
		size_t part = (size_t)kv_min_u64(MIB, size - done);

		unit_pattern(memory, part, offset + done, seed);
		r = kv_version_write(version, memory, part, offset + done);
	}
	free(memory);
	return r;
}

static inline void unit_expect_pattern(
	struct kv_version *version, uint64_t size, uint64_t offset, uint64_t seed)
{
	uint8_t *memory = malloc(MIB), *expected = malloc(MIB);

	assert_non_null(memory);
	assert_non_null(expected);
	for (uint64_t done = 0; done < size; done += MIB) {
		size_t part = (size_t)kv_min_u64(MIB, size - done);

		unit_pattern(expected, part, offset + done, seed);
		assert_int_equal(
			kv_version_read(version, memory, part, offset + done), (ssize_t)part);
		assert_memory_equal(memory, expected, part);
	}
	free(memory);
	free(expected);
}

/* A published file of SIZE bytes. Returns its inode number. */
static inline uint64_t unit_put(struct unit *unit, const char *name, uint64_t size, uint64_t seed)
{
	uint64_t ino = unit_create(unit, name);
	struct kv_file *file = unit_file(unit, ino);
	struct kv_version *version = unit_new(file, NULL);

	assert_int_equal(unit_write_pattern(version, size, 0, seed), 0);
	assert_int_equal(unit_publish(version), 0);
	kv_version_unref(version);
	kv_file_put(file);
	return ino;
}

static inline void unit_expect_file(struct unit *unit, uint64_t ino, uint64_t size, uint64_t seed)
{
	struct kv_file *file = unit_file(unit, ino);
	struct kv_version *version = unit_current(file);

	assert_int_equal(unit_attr(version).size, size);
	unit_expect_pattern(version, size, 0, seed);
	kv_version_unref(version);
	kv_file_put(file);
}

static inline void unit_unlink(struct unit *unit, const char *name)
{
	struct kv_inode inode;

	assert_int_equal(kv_index_unlink(unit_index(unit), KV_ROOT_INO, name, strlen(name), false,
				 0, kv_core_now_ns(unit->core), &inode),
		0);
	if (inode.nlink == 0)
		kv_core_orphan(unit->core, inode.ino);
}

static inline void unit_sync(struct unit *unit)
{
	assert_int_equal(kv_core_sync(unit->core), 0);
}

/* Drops everything idle from DRAM. */
static inline void unit_chill(struct unit *unit)
{
	unit_unmount(unit);
	unit_mount(unit);
}

static inline bool unit_is_used(struct unit *unit, uint64_t wanted)
{
	(void)kv_index_wait(unit_index(unit), kv_index_sequence(unit_index(unit)));
	const struct kv_space_usage usage = unit_usage(unit);
	return usage.used == wanted && usage.busy == 0 && usage.reserved == 0;
}

/* Waits until the blocks in use are WANTED: reaping goes on in the background. */
static inline void unit_expect_used(struct unit *unit, uint64_t wanted)
{
	UNIT_WAIT_FOR(unit_is_used(unit, wanted));
	const struct kv_space_usage usage = unit_usage(unit);
	assert_int_equal(usage.used, wanted);
	assert_int_equal(usage.busy, 0);
	assert_int_equal(usage.reserved, 0);
}

#endif
