/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rings: whole transfers over a table that is short, refuses and fails, and over real files.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "fs/device.h"
#include "fs/log.h"
#include "tests/unit/memory_disk.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)
#define SIZE (64 * MIB)
#define BLOCK KV_BLOCK_SIZE
#define TRANSFERS 500

static const uint8_t uuid[16] = {42};
static const char *const paths[] = {"disk-a", "disk-b"};

struct fixture {
	struct memory_disks *disks;
	struct kv_stats stats;
	struct kv_devices *devices;
	struct kv_ring *ring;
	uint8_t *memory; /* TRANSFERS blocks */
	struct kv_io ios[TRANSFERS];
	unsigned done; /* calls of the callback */
	unsigned faults;
};

static void open_devices(const struct kv_io_ops *ops, const char *const *names, unsigned count,
	struct kv_stats *stats, struct kv_devices **ret_devices)
{
	const struct kv_devices_format format = {
		.ops = ops, .paths = names, .count = count, .uuid = uuid, .size_bytes = SIZE};
	uint64_t blocks[KV_DEVICES_MAX];
	const struct kv_devices_open open = {.ops = ops,
		.paths = names,
		.count = count,
		.uuid = uuid,
		.blocks = blocks,
		.stats = stats};
	char error[256] = "";

	assert_int_equal(kv_devices_format(&format, blocks, error, sizeof(error)), 0);
	assert_int_equal(kv_devices_open(&open, ret_devices, error, sizeof(error)), 0);
}

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	assert_non_null(f);
	f->disks = memory_disks_new();
	memory_disks_add(f->disks, 0, "disk-a", SIZE);
	memory_disks_add(f->disks, 1, "disk-b", SIZE);
	open_devices(&f->disks->ops, paths, 2, &f->stats, &f->devices);
	assert_int_equal(kv_ring_new(f->devices, 16, &f->ring), 0);
	f->memory = aligned_alloc(BLOCK, (size_t)TRANSFERS * BLOCK);
	assert_non_null(f->memory);
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	assert_null(kv_ring_free(f->ring));
	assert_null(kv_ring_free(NULL));
	(void)kv_devices_close(f->devices);
	memory_disks_free(f->disks);
	free(f->memory);
	free(f);
	return 0;
}

/* Transfer NUMBER of the fixture: one block of its own, on the two disks in turn. */
static struct kv_io *one_block(struct fixture *f, unsigned number, enum kv_io_kind kind)
{
	struct kv_io *io = &f->ios[number];

	*io = (struct kv_io){
		.kind = kind,
		.device = (uint16_t)(number % 2),
		.buffer = -1,
		.offset = MIB + (uint64_t)number * BLOCK,
		.memory = f->memory + (size_t)number * BLOCK,
		.length = BLOCK,
		.result = 12345,
		.arg = f,
	};
	return io;
}

/* One transfer of LENGTH bytes from the start of the fixture's memory. */
static struct kv_io *one_transfer(struct fixture *f, enum kv_io_kind kind, uint32_t length)
{
	struct kv_io *io = one_block(f, 0, kind);

	io->length = length;
	return io;
}

static void count_done(void *arg, struct kv_io *io)
{
	struct fixture *f = arg;

	assert_ptr_equal(io->arg, f);
	assert_int_not_equal(io->result, 12345);
	f->done++;
}

/* Log lines of expected failures go nowhere. */
static int run_quietly(struct fixture *f, unsigned count)
{
	struct unit_capture capture;
	int r;

	unit_capture_begin(&capture);
	r = kv_ring_run(f->ring, f->ios, count, count_done, f);
	free(unit_capture_end(&capture));
	return r;
}

/* Transfers added in steps, some while others are under way, are each called back once, by the end.
 */
static void test_ring__takes_transfers_in_steps(void **state)
{
	struct fixture *f = *state;
	uint64_t seed = 78;

	unit_random_fill(&seed, f->memory, (size_t)TRANSFERS * BLOCK);
	kv_ring_begin(f->ring, count_done, f);
	for (unsigned i = 0; i < TRANSFERS; i++) {
		(void)one_block(f, i, KV_IO_WRITE);
		kv_ring_add(f->ring, &f->ios[i], 1);
		/* Seven at a time, and some more than the queue takes without a submit between. */
		if (i < TRANSFERS / 2 && i % 7 == 0)
			kv_ring_submit(f->ring);
	}
	kv_ring_add(f->ring, f->ios, 0);
	assert_int_equal(kv_ring_end(f->ring), 0);
	assert_int_equal(f->done, TRANSFERS);
	for (unsigned i = 0; i < TRANSFERS; i++)
		assert_memory_equal(f->disks->disk[i % 2].bytes + f->ios[i].offset,
			f->memory + (size_t)i * BLOCK, BLOCK);
	kv_ring_begin(f->ring, NULL, NULL);
	kv_ring_submit(f->ring);
	assert_int_equal(kv_ring_end(f->ring), 0);
}

/* Many transfers keep the queue as deep as asked for, and each is called back once. */
static void test_ring__keeps_the_queue_deep(void **state)
{
	struct fixture *f = *state;
	uint64_t seed = 77;

	unit_random_fill(&seed, f->memory, (size_t)TRANSFERS * BLOCK);
	for (unsigned i = 0; i < TRANSFERS; i++)
		(void)one_block(f, i, KV_IO_WRITE);
	assert_int_equal(kv_ring_run(f->ring, f->ios, TRANSFERS, count_done, f), 0);
	assert_int_equal(f->done, TRANSFERS);
	assert_int_equal(f->disks->deepest, 16);
	for (unsigned i = 0; i < TRANSFERS; i++) {
		assert_int_equal(f->ios[i].result, 0);
		assert_int_equal(f->ios[i].done, BLOCK);
		assert_memory_equal(f->disks->disk[i % 2].bytes + f->ios[i].offset,
			f->memory + (size_t)i * BLOCK, BLOCK);
	}
	assert_int_equal(kv_ring_run(f->ring, f->ios, 0, count_done, f), 0);
	assert_int_equal(f->done, TRANSFERS);
}

/* A ring is never deeper than the limit, nor than one. */
static void test_ring__depth_is_capped(void **state)
{
	struct fixture *f = *state;
	struct kv_ring *deep, *flat;

	assert_int_equal(kv_ring_new(f->devices, 100000, &deep), 0);
	assert_int_equal(kv_ring_new(f->devices, 0, &flat), 0);
	for (unsigned i = 0; i < TRANSFERS; i++)
		(void)one_block(f, i, KV_IO_READ);
	assert_int_equal(kv_ring_run(flat, f->ios, TRANSFERS, NULL, NULL), 0);
	assert_int_equal(f->disks->deepest, 1);
	assert_int_equal(kv_ring_run(deep, f->ios, TRANSFERS, NULL, NULL), 0);
	assert_int_equal(f->disks->deepest, KV_RING_DEPTH_MAX);
	(void)kv_ring_free(deep);
	(void)kv_ring_free(flat);
}

/* Moves a random part, at times less than a block, of all that is longer than a block. */
static int short_transfer(void *arg, const struct kv_io *io)
{
	struct fixture *f = arg;

	assert_int_equal(io->offset % BLOCK, 0);
	assert_int_equal((uintptr_t)io->memory % BLOCK, 0);
	assert_int_equal(io->length % BLOCK, 0);
	f->faults++;
	if (io->length == BLOCK)
		return BLOCK;
	return 1 + (int)(unit_random(&f->disks->seed) % io->length);
}

/* Short transfers are continued at whole blocks until everything has moved. */
static void test_ring__continues_short_transfers(void **state)
{
	struct fixture *f = *state;
	const uint32_t length = 100 * BLOCK;
	uint8_t *expected = malloc(length);
	uint64_t seed = 4;

	assert_non_null(expected);
	f->disks->fault = short_transfer;
	f->disks->fault_arg = f;
	unit_random_fill(&seed, f->memory, length);
	memcpy(expected, f->memory, length);
	(void)one_transfer(f, KV_IO_WRITE, length);
	assert_int_equal(kv_ring_run(f->ring, f->ios, 1, count_done, f), 0);
	assert_memory_equal(f->disks->disk[0].bytes + MIB, expected, length);
	memset(f->memory, 0, length);
	(void)one_transfer(f, KV_IO_READ, length);
	assert_int_equal(kv_ring_run(f->ring, f->ios, 1, count_done, f), 0);
	assert_memory_equal(f->memory, expected, length);
	assert_int_equal(f->ios[0].done, length);
	assert_int_equal(f->done, 2);
	assert_true(f->faults > 4);
	free(expected);
}

/* Answers EAGAIN and EINTR in turn, until FAULTS has run down. */
static int interrupted(void *arg, const struct kv_io *io)
{
	struct fixture *f = arg;

	if (f->faults == 0)
		return (int)io->length;
	f->faults--;
	return f->faults % 2 ? -EAGAIN : -EINTR;
}

/* Interruptions are tried again, but not for ever. */
static void test_ring__retries_interruptions(void **state)
{
	struct fixture *f = *state;

	f->disks->fault = interrupted;
	f->disks->fault_arg = f;
	f->faults = 60;
	memset(f->memory, 0x3c, BLOCK);
	(void)one_block(f, 0, KV_IO_WRITE);
	assert_int_equal(run_quietly(f, 1), 0);
	assert_int_equal(f->faults, 0);
	assert_int_equal(f->disks->disk[0].bytes[MIB], 0x3c);
	f->faults = 1000;
	(void)one_block(f, 0, KV_IO_WRITE);
	assert_int_equal(run_quietly(f, 1), -EIO);
	assert_int_equal(f->ios[0].result, -EIO);
	assert_true(f->faults > 900);
}

static int nothing_moves(void *arg, const struct kv_io *io)
{
	(void)arg;
	(void)io;
	return 0;
}

static int less_than_a_block(void *arg, const struct kv_io *io)
{
	struct fixture *f = arg;

	(void)io;
	f->faults++;
	return 512;
}

static int more_than_asked(void *arg, const struct kv_io *io)
{
	(void)arg;
	return (int)io->length + 1;
}

/* What cannot make progress, or makes too much, is an I/O error. */
static void test_ring__no_progress_is_an_error(void **state)
{
	struct fixture *f = *state;

	f->disks->fault_arg = f;
	f->disks->fault = nothing_moves;
	(void)one_block(f, 0, KV_IO_READ);
	assert_int_equal(run_quietly(f, 1), -EIO);
	f->disks->fault = more_than_asked;
	(void)one_block(f, 0, KV_IO_READ);
	assert_int_equal(run_quietly(f, 1), -EIO);
	f->disks->fault = less_than_a_block;
	(void)one_block(f, 0, KV_IO_READ);
	assert_int_equal(run_quietly(f, 1), -EIO);
	assert_true(f->faults > 10 && f->faults < 1000);
}

/* Transfers on the second disk fail: the first with ENXIO, later ones with EIO. */
static int second_disk_fails(void *arg, const struct kv_io *io)
{
	struct fixture *f = arg;

	if (io->device == 0)
		return (int)io->length;
	return f->faults++ == 0 ? -ENXIO : -EIO;
}

/* A failing device fails its transfers alone; it is marked, counted, logged once, and asked again.
 */
static void test_ring__reports_failed_devices(void **state)
{
	struct fixture *f = *state;
	struct kv_device_info info;
	struct unit_capture capture;
	char *log;

	f->disks->fault = second_disk_fails;
	f->disks->fault_arg = f;
	for (unsigned i = 0; i < 40; i++)
		(void)one_block(f, i, KV_IO_READ);
	unit_capture_begin(&capture);
	assert_int_equal(kv_ring_run(f->ring, f->ios, 40, count_done, f), -ENXIO);
	log = unit_capture_end(&capture);
	assert_non_null(strstr(log, "error device: read failed device=disk-b offset="));
	/* Rate-limited: 20 failures, a line a second. */
	assert_true(strlen(log) < 500);
	free(log);
	assert_int_equal(f->done, 40);
	for (unsigned i = 0; i < 40; i++)
		assert_true(i % 2 ? f->ios[i].result < 0 : f->ios[i].result == 0);
	kv_devices_info(f->devices, 0, &info);
	assert_false(info.failed);
	kv_devices_info(f->devices, 1, &info);
	assert_true(info.failed);
	assert_int_equal(kv_stat_get(&f->stats.io_errors), 20);
	f->disks->fault = NULL;
	assert_int_equal(kv_ring_run(f->ring, f->ios, 40, count_done, f), 0);
}

static int out_of_space(void *arg, const struct kv_io *io)
{
	(void)arg;
	(void)io;
	return -ENOSPC;
}

/* A full filesystem below a sparse device file is no fault of the device. */
static void test_ring__full_is_not_failed(void **state)
{
	struct fixture *f = *state;
	struct kv_device_info info;

	f->disks->fault = out_of_space;
	(void)one_block(f, 0, KV_IO_WRITE);
	assert_int_equal(run_quietly(f, 1), -ENOSPC);
	kv_devices_info(f->devices, 0, &info);
	assert_false(info.failed);
	assert_int_equal(kv_stat_get(&f->stats.io_errors), 1);
}

/* A table that does not accept for a while is asked again; one that never does is an error. */
static void test_ring__submission_is_refused(void **state)
{
	struct fixture *f = *state;

	for (unsigned i = 0; i < 40; i++)
		(void)one_block(f, i, KV_IO_READ);
	f->disks->refuse_submits = 30;
	assert_int_equal(run_quietly(f, 40), 0);
	assert_int_equal(f->done, 40);
	f->disks->refuse_submits = 1000000;
	for (unsigned i = 0; i < 40; i++)
		(void)one_block(f, i, KV_IO_READ);
	assert_int_equal(run_quietly(f, 40), -EIO);
	assert_int_equal(f->done, 80);
}

static int answers_nothing(void *context, struct kv_io_queue *queue, bool wait,
	struct kv_io_completion *ret_completions, unsigned capacity)
{
	(void)context;
	(void)queue;
	(void)wait;
	(void)ret_completions;
	(void)capacity;
	return 0;
}

/* A transfer without an answer makes its device slow, then hung; what is excused counts anew. */
static void test_ring__excused_transfers_count_anew(void **state)
{
	struct fixture *f = *state;
	struct unit_capture capture;

	f->disks->ops.reap = answers_nothing;
	kv_ring_begin(f->ring, NULL, NULL);
	kv_ring_add(f->ring, one_block(f, 1, KV_IO_WRITE), 1);
	kv_ring_submit(f->ring);
	unit_capture_begin(&capture);
	const int64_t begun = kv_monotonic_ms();
	assert_false(kv_devices_watch(f->devices, begun, 1000000, 4000000));
	assert_true(kv_devices_watch(f->devices, begun + 1000000, 1000000, 4000000));
	assert_int_equal(kv_devices_slow(f->devices), 2);
	kv_devices_excuse(f->devices, begun + 9000000);
	assert_true(kv_devices_watch(f->devices, begun + 9000000, 1000000, 4000000));
	assert_int_equal(kv_devices_slow(f->devices), 0);
	assert_false(kv_devices_watch(f->devices, begun + 9999999, 1000000, 4000000));
	assert_true(kv_devices_watch(f->devices, begun + 10000000, 1000000, 4000000));
	assert_int_equal(kv_devices_hung(f->devices), 0);
	assert_true(kv_devices_watch(f->devices, begun + 13000000, 1000000, 4000000));
	assert_int_equal(kv_devices_hung(f->devices), 2);
	f->disks->ops.reap = memory_reap;
	assert_int_equal(kv_ring_end(f->ring), 0);
	assert_true(kv_devices_watch(f->devices, begun + 13000001, 1000000, 4000000));
	assert_int_equal(kv_devices_hung(f->devices), 0);
	free(unit_capture_end(&capture));
}

/* Writes make a device unflushed, reads do not, and a flush ends it. */
static void test_ring__writes_want_a_flush(void **state)
{
	struct fixture *f = *state;

	(void)one_block(f, 0, KV_IO_READ);
	assert_int_equal(kv_ring_run(f->ring, f->ios, 1, NULL, NULL), 0);
	assert_false(kv_devices_unflushed(f->devices, 0));
	(void)one_block(f, 0, KV_IO_WRITE);
	assert_int_equal(kv_ring_run(f->ring, f->ios, 1, NULL, NULL), 0);
	assert_true(kv_devices_unflushed(f->devices, 0));
	assert_false(kv_devices_unflushed(f->devices, 1));
	assert_int_equal(kv_devices_flush(f->devices, 0), 0);
	assert_false(kv_devices_unflushed(f->devices, 0));
}

/* Registered buffers are handed out once each, and again after they came back. */
static void test_ring__lends_buffers(void **state)
{
	struct fixture *f = *state;
	int a = -1, b = -1, c = -1;
	void *first = kv_ring_buffer_get(f->ring, &a);
	void *second = kv_ring_buffer_get(f->ring, &b);

	assert_non_null(first);
	assert_non_null(second);
	assert_ptr_not_equal(first, second);
	assert_int_not_equal(a, b);
	assert_null(kv_ring_buffer_get(f->ring, &c));
	assert_int_equal(c, -1);
	kv_ring_buffer_put(f->ring, a);
	assert_ptr_equal(kv_ring_buffer_get(f->ring, &c), first);
	assert_int_equal(c, a);
	kv_ring_buffer_put(f->ring, b);
	kv_ring_buffer_put(f->ring, c);
}

/* ---- Real files ---- */

#define REAL_SIZE (16 * MIB) /* of the data area that is used, per device */
#define REAL_BATCH 64

struct real {
	const char *names[2];
	struct kv_devices *devices;
	struct kv_ring *ring;
	uint8_t *model[2];
	uint8_t *memory; /* REAL_BATCH pieces of KV_RING_BUFFER_SIZE */
	struct kv_io ios[REAL_BATCH];
	uint64_t seed;
};

static void real_open(struct real *real, void **state)
{
	memset(real, 0, sizeof(*real));
	real->seed = 2024;
	real->names[0] = unit_path(state, "a");
	real->names[1] = unit_path(state, "b");
	open_devices(kv_io_real(), real->names, 2, NULL, &real->devices);
	assert_int_equal(kv_ring_new(real->devices, 32, &real->ring), 0);
	real->memory = aligned_alloc(BLOCK, (size_t)REAL_BATCH * KV_RING_BUFFER_SIZE);
	assert_non_null(real->memory);
	for (int i = 0; i < 2; i++) {
		real->model[i] = calloc(1, REAL_SIZE);
		assert_non_null(real->model[i]);
	}
}

static void real_close(struct real *real)
{
	(void)kv_ring_free(real->ring);
	(void)kv_devices_close(real->devices);
	free(real->memory);
	free(real->model[0]);
	free(real->model[1]);
}

/* A random transfer in a slice of the device that no other transfer of the batch touches. */
static void real_transfer(struct real *real, unsigned number, enum kv_io_kind kind)
{
	const uint64_t slice = REAL_SIZE / REAL_BATCH;
	uint32_t blocks = (uint32_t)(slice / BLOCK);
	uint32_t first = (uint32_t)(unit_random(&real->seed) % blocks);
	struct kv_io *io = &real->ios[number];
	uint64_t at = number * slice + (uint64_t)first * BLOCK;

	*io = (struct kv_io){
		.kind = kind,
		.device = (uint16_t)(unit_random(&real->seed) % 2),
		.buffer = -1,
		.offset = KV_DEVICE_DATA_START + at,
		.memory = real->memory + (size_t)number * KV_RING_BUFFER_SIZE,
		.length = (1 + (uint32_t)(unit_random(&real->seed) % (blocks - first))) * BLOCK,
	};
	/* Half of them through registered buffers, as far as there are any. */
	if (number % 2) {
		void *memory = kv_ring_buffer_get(real->ring, &io->buffer);

		if (memory)
			io->memory = memory;
	}
	if (kind == KV_IO_WRITE) {
		unit_random_fill(&real->seed, io->memory, io->length);
		memcpy(real->model[io->device] + at, io->memory, io->length);
	} else {
		memset(io->memory, 0xdb, io->length);
	}
}

static void real_check(void *arg, struct kv_io *io)
{
	struct real *real = arg;

	assert_int_equal(io->result, 0);
	if (io->kind == KV_IO_READ)
		assert_memory_equal(io->memory,
			real->model[io->device] + io->offset - KV_DEVICE_DATA_START, io->length);
	if (io->buffer >= 0)
		kv_ring_buffer_put(real->ring, io->buffer);
}

static void real_run(struct real *real, unsigned batches)
{
	for (unsigned batch = 0; batch < batches; batch++) {
		for (unsigned i = 0; i < REAL_BATCH; i++)
			real_transfer(
				real, i, unit_random(&real->seed) % 3 ? KV_IO_READ : KV_IO_WRITE);
		assert_int_equal(
			kv_ring_run(real->ring, real->ios, REAL_BATCH, real_check, real), 0);
	}
}

/* Random transfers on two real files, many at once, agree with a model in memory. */
static void test_ring__real_files_match_a_model(void **state)
{
	struct real real;
	int fd;

	real_open(&real, state);
	real_run(&real, 20);
	assert_int_equal(kv_devices_flush(real.devices, 0), 0);
	assert_int_equal(kv_devices_flush(real.devices, 1), 0);
	/* The bytes are in the files where they belong. */
	for (int i = 0; i < 2; i++) {
		uint8_t *back = malloc(REAL_SIZE);

		assert_non_null(back);
		fd = open(real.names[i], O_RDONLY | O_CLOEXEC);
		assert_true(fd >= 0);
		assert_int_equal(pread(fd, back, REAL_SIZE, KV_DEVICE_DATA_START), REAL_SIZE);
		(void)close(fd);
		assert_memory_equal(back, real.model[i], REAL_SIZE);
		free(back);
	}
	real_close(&real);
}

/* Behind the end of a real file nothing moves: an error, not a hang. */
static void test_ring__real_file_ends(void **state)
{
	struct unit_capture capture;
	struct real real;

	real_open(&real, state);
	real.ios[0] = (struct kv_io){
		.kind = KV_IO_READ,
		.buffer = -1,
		.offset = SIZE - BLOCK,
		.memory = real.memory,
		.length = 2 * BLOCK,
	};
	unit_capture_begin(&capture);
	assert_int_equal(kv_ring_run(real.ring, real.ios, 1, NULL, NULL), -EIO);
	free(unit_capture_end(&capture));
	assert_int_equal(real.ios[0].done, BLOCK);
	real_close(&real);
}

/* Takes the system call away, as containers do. */
static bool forbid_io_uring(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};

	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
	       prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* The same in a process that has no io_uring. Returns its exit status: 0 if all was well. */
static int without_io_uring(void **state)
{
	struct unit_capture capture;
	struct real real;
	char *log;
	int index;

	if (!forbid_io_uring())
		return UNIT_SKIP;
	unit_capture_begin(&capture);
	real_open(&real, state);
	log = unit_capture_end(&capture);
	if (!strstr(log, "io_uring is not available"))
		return 1;
	free(log);
	if (kv_ring_buffer_get(real.ring, &index))
		return 2;
	real_run(&real, 5);
	real_close(&real);
	return 0;
}

/* Without io_uring the same transfers are done one by one, with the same results. */
static void test_ring__works_without_io_uring(void **state)
{
	int status;
	pid_t child = fork();

	assert_true(child >= 0);
	if (child == 0)
		_exit(without_io_uring(state));
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	if (WEXITSTATUS(status) == UNIT_SKIP)
		skip();
	assert_int_equal(WEXITSTATUS(status), 0);
}

#define MEMORY(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define REAL(name)                                                                                 \
	cmocka_unit_test_setup_teardown(name, unit_directory_setup, unit_directory_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		MEMORY(test_ring__keeps_the_queue_deep),
		MEMORY(test_ring__takes_transfers_in_steps),
		MEMORY(test_ring__depth_is_capped),
		MEMORY(test_ring__continues_short_transfers),
		MEMORY(test_ring__retries_interruptions),
		MEMORY(test_ring__no_progress_is_an_error),
		MEMORY(test_ring__reports_failed_devices),
		MEMORY(test_ring__full_is_not_failed),
		MEMORY(test_ring__submission_is_refused),
		MEMORY(test_ring__excused_transfers_count_anew),
		MEMORY(test_ring__writes_want_a_flush),
		MEMORY(test_ring__lends_buffers),
		REAL(test_ring__real_files_match_a_model),
		REAL(test_ring__real_file_ends),
		REAL(test_ring__works_without_io_uring),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
