/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices that do not answer: who needs them gets an error within io_timeout, everybody else goes
 * on, nothing that is under way is used again, and all is well when they answer.
 */
#include <signal.h>
#include <sys/wait.h>

#include "tests/unit/unit_core.h"

#define TIMEOUT_MS 400
#define HELD_MAX 4096u
/* More than all threads of fill take before they know that the device is slow. */
#define READERS 160u

static const struct unit_sizes two = {.store = 64 * MIB, .dram = 64 * MIB, .devices = 2};
static const struct unit_sizes large = {.store = 256 * MIB, .dram = 256 * MIB, .devices = 2};
static const struct unit_sizes one = {.store = 64 * MIB, .dram = 64 * MIB};

/* What was submitted to devices that hang, and never reaches the real table before they do not. */
static struct {
	pthread_mutex_t lock;
	_Atomic uint64_t transfers; /* bit N: device N keeps its transfers */
	_Atomic uint64_t flushes;   /* bit N: ... its flushes */
	int handles[2];
	_Atomic unsigned count;
	struct {
		struct kv_io_queue *queue;
		struct kv_io *io;
	} held[HELD_MAX];
} hang = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int hang_submit(void *context, struct kv_io_queue *queue, struct kv_io *io)
{
	struct unit_disk *disk = context;

	if (!(atomic_load(&hang.transfers) >> io->device & 1))
		return disk->real->submit(disk->real->context, queue, io);
	KV_LOCKED(&hang.lock);
	assert_true(hang.count < HELD_MAX);
	hang.held[hang.count].queue = queue;
	hang.held[hang.count++].io = io;
	return 0;
}

/* Hands on what hangs no more. True if something of QUEUE still does. */
static bool hang_release(struct unit_disk *disk, struct kv_io_queue *queue)
{
	bool left = false;
	KV_LOCKED(&hang.lock);

	for (unsigned i = 0; i < hang.count;) {
		struct kv_io *io = hang.held[i].io;

		if (hang.held[i].queue != queue) {
			i++;
		} else if (atomic_load(&hang.transfers) >> io->device & 1) {
			left = true;
			i++;
		} else {
			assert_int_equal(disk->real->submit(disk->real->context, queue, io), 0);
			hang.held[i] = hang.held[--hang.count];
		}
	}
	return left;
}

static int hang_reap(void *context, struct kv_io_queue *queue, bool wait,
	struct kv_io_completion *ret_completions, unsigned capacity)
{
	struct unit_disk *disk = context;

	for (;;) {
		bool held = hang_release(disk, queue);
		int n = disk->real->reap(
			disk->real->context, queue, wait && !held, ret_completions, capacity);

		if (n != 0 || !wait || !held)
			return n;
		(void)usleep(1000);
	}
}

static int hang_flush(void *context, int handle)
{
	struct unit_disk *disk = context;

	for (unsigned i = 0; i < 2; i++)
		while (hang.handles[i] == handle && atomic_load(&hang.flushes) >> i & 1)
			(void)usleep(1000);
	return disk->real->flush(disk->real->context, handle);
}

static int hang_open(void *context, const char *path, bool create, uint64_t size, int *ret_handle,
	uint64_t *ret_size)
{
	struct unit_disk *disk = context;
	int r = disk->real->open(disk->real->context, path, create, size, ret_handle, ret_size);
	unsigned number = (unsigned)(path[strlen(path) - 1] - '0');

	assert_true(number < 2);
	hang.handles[number] = *ret_handle;
	return r;
}

/* A store with a short io_timeout, on devices that can be made to hang. */
static void hang_init(struct unit *unit, struct unit_sizes sizes)
{
	unit_init(unit, sizes);
	unit->options.io_timeout_ms = TIMEOUT_MS;
	unit->disk.ops.submit = hang_submit;
	unit->disk.ops.reap = hang_reap;
	unit->disk.ops.flush = hang_flush;
	unit->disk.ops.open = hang_open;
	unit_chill(unit);
}

/* A file of one chunk that is on DEVICE, and in no DRAM after the next unit_chill. */
static uint64_t put_on(struct unit *unit, unsigned device, unsigned seed)
{
	char name[40];

	for (unsigned i = 0; i < 2; i++) {
		(void)snprintf(name, sizeof(name), "file-%u-%u-%u", device, seed, i);
		uint64_t ino = unit_put(unit, name, 300 << 10, seed);
		if (ino % 2 == device)
			return ino;
		unit_unlink(unit, name);
	}
	fail_msg("no file for device %u", device);
	return 0;
}

static int open_file(struct unit *unit, uint64_t ino, bool direct)
{
	struct kv_file *file = unit_file(unit, ino);
	struct kv_version *version = unit_current(file);
	enum kv_access access;
	int r = kv_version_open(version, direct, &access);

	if (r == 0)
		kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	return r;
}

static struct kv_device_info device_of(struct unit *unit, unsigned number)
{
	struct kv_device_info info;

	kv_devices_info(unit->store->devices, number, &info);
	return info;
}

static void expect_state(struct unit *unit, unsigned number, enum kv_device_state state)
{
	UNIT_WAIT_FOR(device_of(unit, number).state == state);
	assert_int_equal(device_of(unit, number).state, state);
}

/* An open that needs the device is a miss, one on another device or of a file in DRAM is not; the
 * file is whole again when the device answers. */
static void test_core_hang__open_is_a_miss(void **state)
{
	struct unit unit;

	(void)state;
	hang_init(&unit, two);
	uint64_t hung = put_on(&unit, 0, 1), other = put_on(&unit, 1, 2);
	uint64_t resident = put_on(&unit, 0, 3);
	unit_sync(&unit);
	unit_chill(&unit);
	unit_expect_file(&unit, resident, 300 << 10, 3);
	atomic_store(&hang.transfers, 1);
	assert_int_equal(open_file(&unit, hung, false), -ENOENT);
	assert_true(kv_stat_get(&unit.stats.io_timeouts) > 0);
	expect_state(&unit, 0, KV_DEVICE_HUNG);
	assert_true(device_of(&unit, 0).waiting_ms >= TIMEOUT_MS);
	assert_int_equal(device_of(&unit, 1).state, KV_DEVICE_OK);
	assert_int_equal(open_file(&unit, other, false), 0);
	unit_expect_file(&unit, other, 300 << 10, 2);
	unit_expect_file(&unit, resident, 300 << 10, 3);
	/* Now that it is known, nobody waits, and nothing more is asked of it. */
	unsigned held = hang.count;
	assert_int_equal(open_file(&unit, hung, false), -ENOENT);
	assert_int_equal(hang.count, held);
	atomic_store(&hang.transfers, 0);
	expect_state(&unit, 0, KV_DEVICE_OK);
	assert_int_equal(open_file(&unit, hung, false), 0);
	unit_expect_file(&unit, hung, 300 << 10, 1);
	assert_false(device_of(&unit, 0).failed);
	unit_done(&unit);
}

/* Reads that have begun are EIO, in every way there is to read; a second one fails at once. */
static void test_core_hang__reads_are_eio(void **state)
{
	struct unit unit;
	struct kv_loan loan;
	enum kv_access access;
	uint8_t *memory = aligned_alloc(KV_BLOCK_SIZE, MIB);

	(void)state;
	assert_non_null(memory);
	hang_init(&unit,
		(struct unit_sizes){
			.store = 64 * MIB, .dram = 64 * MIB, .devices = 2, .stream_above = MIB});
	uint64_t ino = unit_put(&unit, "stream", 8 * MIB, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_STREAM);
	atomic_store(&hang.transfers, 3);
	assert_int_equal(kv_version_read_direct(version, memory, MIB, 6 * MIB), -EIO);
	assert_int_equal(kv_version_read(version, memory, 4096, 0), -EIO);
	assert_int_equal(kv_version_lend(version, 0, 256 << 10, &loan), -EIO);
	atomic_store(&hang.transfers, 0);
	expect_state(&unit, 0, KV_DEVICE_OK);
	expect_state(&unit, 1, KV_DEVICE_OK);
	unit_expect_pattern(version, 8 * MIB, 0, 1);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	unit_done(&unit);
	free(memory);
}

/* Changes a byte: the rest of the chunk is brought in from the version before. */
static int rewrite_file(struct unit *unit, uint64_t ino)
{
	struct kv_file *file = unit_file(unit, ino);
	struct kv_version *base = unit_current(file);
	struct kv_version *version = unit_new(file, base);
	int r = kv_version_write(version, "x", 1, 5);

	kv_version_unref(version);
	kv_version_unref(base);
	kv_file_put(file);
	return r;
}

struct reader {
	struct unit *unit;
	uint64_t ino;
	bool rewrites;
	pthread_t thread;
	int result;
};

static void *reader_main(void *arg)
{
	struct reader *reader = arg;

	reader->result = reader->rewrites ? rewrite_file(reader->unit, reader->ino)
					  : open_file(reader->unit, reader->ino, false);
	return NULL;
}

/* Ever so many who need the device do not take the threads away from the others. */
static void many_hold_up_nobody(bool rewrites)
{
	struct reader readers[READERS] = {0};
	struct unit unit;
	uint64_t other;

	hang_init(&unit, large);
	for (unsigned i = 0; i < READERS; i++)
		readers[i] = (struct reader){
			.unit = &unit, .ino = put_on(&unit, 0, i), .rewrites = rewrites};
	other = put_on(&unit, 1, 99);
	unit_sync(&unit);
	unit.options.io_timeout_ms = 20000; /* the others must not wait for that */
	unit_chill(&unit);
	atomic_store(&hang.transfers, 1);
	for (unsigned i = 0; i < READERS; i++)
		assert_int_equal(
			pthread_create(&readers[i].thread, NULL, reader_main, &readers[i]), 0);
	/* All threads there are have met the device by now; or the rest is kept back. */
	expect_state(&unit, 0, KV_DEVICE_SLOW);
	assert_int_equal(open_file(&unit, other, false), 0);
	assert_int_equal(device_of(&unit, 0).state, KV_DEVICE_SLOW);
	/* Those who came behind that are not even asked for. */
	assert_true(hang.count < READERS);
	atomic_store(&hang.transfers, 0);
	for (unsigned i = 0; i < READERS; i++) {
		assert_int_equal(pthread_join(readers[i].thread, NULL), 0);
		assert_int_equal(readers[i].result, 0);
	}
	unit_done(&unit);
}

static void test_core_hang__many_readers_hold_up_nobody(void **state)
{
	(void)state;
	many_hold_up_nobody(false);
}

static void test_core_hang__many_rewriters_hold_up_nobody(void **state)
{
	(void)state;
	many_hold_up_nobody(true);
}

/* What cannot be written stays in DRAM and can be read; sync is EIO now, and 0 when it is there. */
static void test_core_hang__dirty_bytes_stay(void **state)
{
	struct kv_core_usage usage;
	struct unit unit;

	(void)state;
	hang_init(&unit, one);
	atomic_store(&hang.transfers, 1);
	uint64_t ino = unit_put(&unit, "dirty", 3 * MIB, 1);
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_sync(version), -EIO);
	assert_int_equal(kv_core_sync(unit.core), -EIO);
	expect_state(&unit, 0, KV_DEVICE_HUNG);
	/* One that is written while nothing can be: it is not even begun. */
	unsigned held = hang.count;
	uint64_t late = unit_put(&unit, "late", MIB, 2);
	struct kv_file *late_file = unit_file(&unit, late);
	struct kv_version *late_version = unit_current(late_file);
	assert_int_equal(kv_version_sync(late_version), -EIO);
	assert_int_equal(hang.count, held);
	kv_core_usage(unit.core, &usage);
	assert_int_equal(usage.dirty_bytes, 4 * MIB);
	unit_expect_pattern(version, 3 * MIB, 0, 1);
	atomic_store(&hang.transfers, 0);
	expect_state(&unit, 0, KV_DEVICE_OK);
	assert_int_equal(kv_version_sync(version), 0);
	assert_int_equal(kv_version_sync(late_version), 0);
	assert_int_equal(kv_stat_get(&unit.stats.writeback_errors), 0);
	kv_version_unref(version);
	kv_version_unref(late_version);
	kv_file_put(file);
	kv_file_put(late_file);
	unit_chill(&unit);
	unit_expect_file(&unit, ino, 3 * MIB, 1);
	unit_expect_file(&unit, late, MIB, 2);
	unit_done(&unit);
}

/* With another device that answers, what is written goes there, whosever turn it is. */
static void test_core_hang__writes_go_elsewhere(void **state)
{
	struct unit unit;

	(void)state;
	hang_init(&unit, two);
	uint64_t cold = put_on(&unit, 0, 1);
	unit_sync(&unit);
	unit_chill(&unit);
	atomic_store(&hang.transfers, 1);
	assert_int_equal(open_file(&unit, cold, false), -ENOENT);
	uint64_t ino = put_on(&unit, 0, 2);
	unit_sync(&unit);
	atomic_store(&hang.transfers, 0);
	unit_expect_file(&unit, ino, 300 << 10, 2);
	unit_done(&unit);
}

/* A flush that does not end holds up what was written to its device, and nothing else. */
static void test_core_hang__flush(void **state)
{
	struct unit unit;

	(void)state;
	hang_init(&unit, two);
	atomic_store(&hang.flushes, 1);
	uint64_t held = put_on(&unit, 0, 1);
	struct kv_file *file = unit_file(&unit, held);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_sync(version), -EIO);
	uint64_t other = put_on(&unit, 1, 2);
	struct kv_file *other_file = unit_file(&unit, other);
	struct kv_version *other_version = unit_current(other_file);
	assert_int_equal(kv_version_sync(other_version), 0);
	assert_int_equal(kv_version_sync(version), -EIO);
	atomic_store(&hang.flushes, 0);
	assert_int_equal(kv_version_sync(version), 0);
	assert_int_equal(kv_stat_get(&unit.stats.writeback_errors), 0);
	kv_version_unref(version);
	kv_version_unref(other_version);
	kv_file_put(file);
	kv_file_put(other_file);
	unit_chill(&unit);
	unit_expect_file(&unit, held, 300 << 10, 1);
	unit_expect_file(&unit, other, 300 << 10, 2);
	unit_done(&unit);
}

#define LATE 40u

/* Versions that wait for an earlier one of their file, which a device holds up, hold up nobody. */
static void test_core_hang__versions_wait_for_earlier_ones(void **state)
{
	struct kv_file *files[LATE];
	struct kv_version *earlier[LATE], *later[LATE];
	struct unit unit;

	(void)state;
	hang_init(&unit, two);
	for (unsigned i = 0; i < LATE; i++)
		files[i] = unit_file(&unit, put_on(&unit, 0, i));
	unit_sync(&unit);
	atomic_store(&hang.flushes, 1);
	for (unsigned i = 0; i < LATE; i++) {
		struct kv_version *base = unit_current(files[i]);

		earlier[i] = unit_new(files[i], base);
		later[i] = unit_new(files[i], base);
		kv_version_unref(base);
		assert_int_equal(unit_write_pattern(earlier[i], 300 << 10, 0, 100 + i), 0);
		assert_int_equal(unit_publish(earlier[i]), 0);
	}
	assert_int_equal(kv_version_sync(earlier[0]), -EIO);
	for (unsigned i = 0; i < LATE; i++) {
		assert_int_equal(unit_write_pattern(later[i], 4096, 0, 200 + i), 0);
		assert_int_equal(unit_publish(later[i]), 0);
	}
	assert_int_equal(kv_version_sync(later[0]), -EIO);
	uint64_t other = put_on(&unit, 1, LATE);
	struct kv_file *file = unit_file(&unit, other);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_sync(version), 0);
	kv_version_unref(version);
	kv_file_put(file);
	atomic_store(&hang.flushes, 0);
	for (unsigned i = 0; i < LATE; i++) {
		assert_int_equal(kv_version_sync(later[i]), 0);
		unit_expect_pattern(later[i], 4096, 0, 200 + i);
		kv_version_unref(earlier[i]);
		kv_version_unref(later[i]);
		kv_file_put(files[i]);
	}
	assert_int_equal(kv_stat_get(&unit.stats.writeback_errors), 0);
	unit_done(&unit);
}

/* A file that is being written, and was begun to be written early, cannot be published or cut while
 * that is under way: EIO; and can, afterwards. */
static void test_core_hang__writers_get_eio(void **state)
{
	struct unit unit;

	(void)state;
	hang_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 32 * MIB});
	uint64_t ino = unit_create(&unit, "early");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	atomic_store(&hang.transfers, 1);
	assert_int_equal(unit_write_pattern(version, 12 * MIB, 0, 1), 0);
	expect_state(&unit, 0, KV_DEVICE_HUNG);
	assert_int_equal(kv_version_publish(version), -EIO);
	assert_int_equal(kv_version_truncate(version, 4096), -EIO);
	atomic_store(&hang.transfers, 0);
	expect_state(&unit, 0, KV_DEVICE_OK);
	assert_int_equal(kv_version_truncate(version, 11 * MIB), 0);
	assert_int_equal(unit_publish(version), 0);
	kv_version_unref(version);
	kv_file_put(file);
	unit_sync(&unit);
	unit_chill(&unit);
	unit_expect_file(&unit, ino, 11 * MIB, 1);
	unit_done(&unit);
}

static void *answer_late(void *arg)
{
	(void)usleep(TIMEOUT_MS * 1500);
	atomic_store(&hang.transfers, 0);
	return arg;
}

/* A device that answers after the end has stopped waiting for it, but is not over yet: all that was
 * published is there, also what was not even begun. */
static void test_core_hang__the_end_writes_what_it_can(void **state)
{
	struct unit unit;
	pthread_t thread;

	(void)state;
	hang_init(&unit, one);
	atomic_store(&hang.transfers, 1);
	uint64_t begun = unit_put(&unit, "begun", MIB, 1);
	struct kv_file *file = unit_file(&unit, begun);
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_sync(version), -EIO);
	kv_version_unref(version);
	kv_file_put(file);
	uint64_t queued = unit_put(&unit, "queued", MIB, 2);
	assert_int_equal(pthread_create(&thread, NULL, answer_late, NULL), 0);
	unit_unmount(&unit);
	assert_int_equal(pthread_join(thread, NULL), 0);
	unit_mount(&unit);
	unit_expect_file(&unit, begun, MIB, 1);
	unit_expect_file(&unit, queued, MIB, 2);
	unit_done(&unit);
}

/* In a process of its own, which cannot free what the device has. */
static int end_while_hung(void)
{
	static struct unit unit; /* its threads live on */

	hang_init(&unit, one);
	uint64_t kept = unit_put(&unit, "kept", MIB, 1);
	unit_sync(&unit);
	atomic_store(&hang.transfers, 1);
	(void)unit_put(&unit, "lost", MIB, 2);
	unit.core = kv_core_free(unit.core);
	void *state = unit.directory;
	(void)unit_directory_teardown(&state);
	return unit.core && kept ? 0 : 1;
}

/* The end of a mount does not wait for ever; what still belongs to the device is not freed. */
static void test_core_hang__the_end_comes(void **state)
{
	int status;
	pid_t child = fork();

	(void)state;
	assert_true(child >= 0);
	if (child == 0) {
		int result = end_while_hung();

		/* Without the sanitizers' reports of what could not be freed, which is the point.
		 */
		(void)kill(getpid(), result == 0 ? SIGKILL : SIGABRT);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status));
	assert_int_equal(WTERMSIG(status), SIGKILL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_hang__open_is_a_miss),
		cmocka_unit_test(test_core_hang__reads_are_eio),
		cmocka_unit_test(test_core_hang__many_readers_hold_up_nobody),
		cmocka_unit_test(test_core_hang__many_rewriters_hold_up_nobody),
		cmocka_unit_test(test_core_hang__dirty_bytes_stay),
		cmocka_unit_test(test_core_hang__writes_go_elsewhere),
		cmocka_unit_test(test_core_hang__flush),
		cmocka_unit_test(test_core_hang__versions_wait_for_earlier_ones),
		cmocka_unit_test(test_core_hang__writers_get_eio),
		cmocka_unit_test(test_core_hang__the_end_writes_what_it_can),
		cmocka_unit_test(test_core_hang__the_end_comes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
