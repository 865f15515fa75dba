/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stager's reads past the CPU, on simulated drives that write into the targets themselves:
 * right bytes, wrong ones, refusals, reads that do not end.
 */
#include <pthread.h>
#include <sys/mman.h>

#include "tests/unit/unit_stage_file.h"

static struct {
	pthread_mutex_t lock; /* of all: threads read */
	pthread_cond_t more;
	unsigned opened;
	unsigned registered;
	unsigned most_registered;
	unsigned calls; /* of direct_read */
	unsigned together;
	unsigned most_together;
	uint64_t longest;
	unsigned fail;   /* the next reads, with ERROR */
	unsigned shorts; /* the next ones are short */
	unsigned flips;
	int error;
	unsigned refuse_after; /* registrations; 0: none is refused */
	unsigned bad_drive;    /* fails its probe; UINT_MAX: none */
	bool hang;             /* reads wait, and write other bytes when they may go on */
	unsigned waiting;
	bool no_sums; /* the device's */
	unsigned fail_sums;
	unsigned sums;
} drives;

/* ---- The backend's part ---- */

static void direct_info(struct kvg_backend *b, struct kvg_device_info *ret_info)
{
	kvg_backend_host.info(b, ret_info);
	ret_info->direct = true;
}

static int direct_probe(
	struct kvg_backend *b, int fd, uint64_t offset, char *ret_reason, size_t reason_size)
{
	(void)b;
	(void)offset;
	if ((unsigned)fd != drives.bad_drive)
		return 0;
	(void)snprintf(ret_reason, reason_size, "drive %d is bad", fd);
	return -EOPNOTSUPP;
}

static void direct_reason(struct kvg_backend *b, char *ret_reason, size_t reason_size)
{
	(void)b;
	(void)snprintf(ret_reason, reason_size, "that is why");
}

/* The drive's number, from 1 on. */
static int direct_open(struct kvg_backend *b, int fd, struct kvg_direct **ret_direct)
{
	(void)b;
	drives.opened++;
	*ret_direct = (struct kvg_direct *)(uintptr_t)(fd + 1);
	return 0;
}

static void direct_close(struct kvg_backend *b, struct kvg_direct *direct)
{
	(void)b;
	assert_non_null(direct);
	drives.opened--;
}

static int direct_register(struct kvg_backend *b, kvg_devptr base, uint64_t size)
{
	KV_LOCKED(&drives.lock);

	(void)b;
	(void)base;
	assert_true(size > 0 && size <= SEGMENT);
	if (drives.refuse_after > 0 && --drives.refuse_after == 0) {
		drives.refuse_after = 1;
		return -ENOSPC;
	}
	drives.registered++;
	if (drives.registered > drives.most_registered)
		drives.most_registered = drives.registered;
	return 0;
}

static void direct_unregister(struct kvg_backend *b, kvg_devptr base)
{
	KV_LOCKED(&drives.lock);

	(void)b;
	(void)base;
	assert_true(drives.registered > 0);
	drives.registered--;
}

static ssize_t transfer(const struct kvg_direct *direct, uint8_t *to, uint64_t size, uint64_t from)
{
	off_t drive = (off_t)((uintptr_t)direct - 1) << 30;

	assert_int_equal(pread(sim.device_fd, to, size, drive + (off_t)from), size);
	if (sim_strike(&drives.flips))
		to[size / 2] ^= 1;
	return (ssize_t)size;
}

static ssize_t direct_read(struct kvg_backend *b, struct kvg_direct *direct, kvg_devptr base,
	uint64_t offset, uint64_t size, uint64_t file_offset)
{
	uint8_t *to = (uint8_t *)(uintptr_t)base + offset;
	bool waited = false;
	KV_LOCKED(&drives.lock);

	(void)b;
	assert_true(drives.registered > 0);
	assert_int_equal((offset | size | file_offset) % 4096, 0);
	drives.calls++;
	if (++drives.together > drives.most_together)
		drives.most_together = drives.together;
	if (size > drives.longest)
		drives.longest = size;
	while (drives.hang) {
		waited = true;
		drives.waiting++;
		(void)pthread_cond_broadcast(&drives.more);
		(void)pthread_cond_wait(&drives.more, &drives.lock);
		drives.waiting--;
	}
	drives.together--;
	if (sim_strike(&drives.fail))
		return drives.error;
	if (waited)
		memset(to, 0xee, size);
	if (waited)
		return (ssize_t)size;
	return sim_strike(&drives.shorts) ? transfer(direct, to, size / 2, file_offset)
					  : transfer(direct, to, size, file_offset);
}

static int direct_setup(void **state)
{
	memset(&drives, 0, sizeof(drives));
	(void)pthread_mutex_init(&drives.lock, NULL);
	(void)pthread_cond_init(&drives.more, NULL);
	drives.bad_drive = UINT_MAX;
	if (setup(state) < 0)
		return -1;
	ops.info = direct_info;
	ops.direct_probe = direct_probe;
	ops.direct_reason = direct_reason;
	ops.direct_open = direct_open;
	ops.direct_close = direct_close;
	ops.direct_register = direct_register;
	ops.direct_unregister = direct_unregister;
	ops.direct_read = direct_read;
	/* Most tests are of bytes that the CPU checks. */
	ops.checksum = NULL;
	return 0;
}

static int direct_teardown(void **state)
{
	if (teardown(state) < 0)
		return -1;
	return drives.registered == 0 && drives.opened == 0 ? 0 : -1;
}

/* THREADS 0: reads take place at once. */
static void start_direct(unsigned count, unsigned slots, unsigned threads)
{
	static const int devices[] = {0, 1, 2, 3};
	const struct kvg_stager_options options = {
		.backend = backend,
		.io = &sim_io,
		.devices = devices,
		.device_count = count,
		.slots = slots,
		.direct = true,
		.direct_threads = threads,
		.inline_workers = true,
	};

	assert_int_equal(kvg_stager_new(&options, &stager), 0);
}

/* ---- Files ---- */

/* Moves FILE's whole chunks behind one another on the first drive. */
static void lay_together(struct file *file)
{
	for (uint64_t i = 0; i < file->size / MIB; i++) {
		struct kvg_chunk *chunk = &file->chunks[i];

		if (chunk->where != KV_GPU_DEVICE || chunk->extents > 1)
			continue;
		file->extents[chunk->first].offset = (300 + i) * MIB;
		file->extents[chunk->first].device = 0;
		assert_int_equal(pwrite(sim.device_fd, file->content + i * MIB, MIB,
					 (off_t)((300 + i) * MIB)),
			MIB);
	}
}

/* Bytes of FILE, made by file_init, that can be read past the CPU: no hole, no gap, no odd end. */
static uint64_t direct_bytes(const struct file *file)
{
	uint64_t whole = file->size / MIB + (file->size % MIB > 0 && file->size % 4096 == 0);
	uint64_t bytes = whole * MIB - (file->size % 4096 == 0 ? whole * MIB - file->size : 0);

	return bytes - 2 * MIB;
}

static const char *news(void)
{
	static char line[KVG_NEWS_SIZE];

	kvg_stager_news(stager, line);
	return line;
}

static void assert_told(const char *wanted)
{
	const char *line = news();

	if (!strstr(line, wanted))
		fail_msg("'%s' is not in '%s'", wanted, line);
	assert_string_equal(news(), "");
}

/* ---- Bytes ---- */

/* Whole chunks come past the CPU; what has holes, gaps or an odd end by the ring. */
static void test_direct__brings_bytes(void **state)
{
	static const uint64_t sizes[] = {70 * MIB + 77, 9 * MIB + 8192, 130 * MIB};

	(void)state;
	start_direct(3, 4, 0);
	for (unsigned i = 0; i < 3; i++) {
		struct file file;

		file_init(&file, sizes[i], 3);
		assert_int_equal(stage(&file), 0);
		assert_staged(&file);
		assert_true(file.job.final);
		assert_int_equal(file.job.counts.direct, direct_bytes(&file));
		assert_int_equal(file.job.counts.from_device + MIB, file.size);
		assert_int_equal(file.job.counts.from_file, 0);
		assert_int_equal(drives.registered, 0);
		file_done(&file);
	}
	assert_int_equal(sim.reads, 3 * 2 + 1);
	assert_string_equal(news(), "");
}

/* What lies together is read together, in requests of up to 16 MiB that no segment's end is in. */
static void test_direct__joins_what_lies_together(void **state)
{
	struct file file;

	(void)state;
	start_direct(1, 4, 0);
	file_init(&file, 150 * MIB, 1);
	lay_together(&file);
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(drives.longest, 16 * MIB);
	/* 1, hole and gap, then 61 of the first segment, 64, 22. */
	assert_int_equal(drives.calls, 1 + 4 + 4 + 2);
	file_done(&file);
}

/* A stretch of a file, and segments in it that are somebody else's. */
static void test_direct__brings_a_stretch(void **state)
{
	struct file file;

	(void)state;
	start_direct(3, 4, 0);
	file_init(&file, 200 * MIB, 3);
	file.job.offset = SEGMENT;
	file.job.size = file.size - SEGMENT;
	file.job.targets++;
	file.job.target_count--;
	file.job.chunks += 64;
	file.targets[2].skip = true;
	file.targets[2].address = 0;
	assert_int_equal(stage(&file), 0);
	assert_memory_equal(file.device + SEGMENT, file.content + SEGMENT, SEGMENT);
	assert_memory_equal(file.device + 3 * SEGMENT, file.content + 3 * SEGMENT, 8 * MIB);
	for (uint64_t i = 0; i < SEGMENT; i++)
		assert_true(file.device[i] == 0xdd && file.device[2 * SEGMENT + i] == 0xdd);
	assert_int_equal(file.job.counts.direct, SEGMENT + 8 * MIB);
	file_done(&file);
}

/* The watermark waits for what is still to be checked, and for what did not match. */
static void test_direct__shows_nothing_unchecked(void **state)
{
	struct file file;
	uint64_t changes = 0, last = 0;

	(void)state;
	start_direct(3, 2, 0);
	file_init(&file, 40 * MIB, 3);
	drives.flips = 1000;
	kvg_stager_submit(stager, &file.job);
	for (;;) {
		bool progress = kvg_stager_step(stager);
		uint64_t mark = file.mark.staged;

		assert_true(mark >= last && mark < file.size);
		assert_memory_equal(file.device + last, file.content + last, mark - last);
		changes += mark > last;
		last = mark;
		if (kvg_stager_reap(stager))
			break;
		if (!progress)
			sim.now_us = next_end();
	}
	assert_true(changes > 5);
	assert_int_equal(file.job.result, 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.direct, 0);
	assert_int_equal(file.job.counts.checksum_errors, 38);
	file_done(&file);
}

/* ---- Faults ---- */

/* A chunk that does not match is read once more by the ring; if it is no better the job fails. */
static void test_direct__wrong_bytes_are_read_again(void **state)
{
	struct file file;

	(void)state;
	start_direct(3, 4, 0);
	file_init(&file, 20 * MIB, 3);
	drives.flips = 2;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.checksum_errors, 2);
	assert_int_equal(file.job.counts.direct, direct_bytes(&file) - 2 * MIB);
	/* What is on the drive is wrong, and so is what the mount gives. */
	assert_int_equal(pwrite(sim.device_fd, "x", 1, (off_t)file.extents[0].offset), 1);
	assert_int_equal(stage(&file), -EIO);
	file.job.file_fd = file.fd;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.from_file, MIB);
	file_done(&file);
}

/* Short reads and failed ones are done again by the ring; that is told once. */
static void test_direct__failed_reads_go_by_the_ring(void **state)
{
	struct file file;

	(void)state;
	start_direct(3, 4, 0);
	file_init(&file, 20 * MIB, 3);
	drives.error = -EIO;
	drives.fail = 3;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.direct_errors, 3);
	assert_int_equal(file.job.counts.direct, direct_bytes(&file) - 3 * MIB);
	assert_told("a read past the CPU failed, and goes by the ring: that is why");
	drives.shorts = 2;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.direct_errors, 2);
	assert_string_equal(news(), "");
	file_done(&file);
}

/* Where it does not work at all, nothing is tried again, also not for other files. */
static void test_direct__is_off_when_it_is_not_supported(void **state)
{
	struct file file;
	unsigned before;

	(void)state;
	start_direct(3, 4, 0);
	file_init(&file, 20 * MIB, 3);
	drives.error = -EOPNOTSUPP;
	drives.fail = 1000;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.direct, 0);
	assert_told("drives are not read past the CPU any more: that is why");
	before = drives.calls;
	assert_true(before <= 16);
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(drives.calls, before);
	assert_string_equal(news(), "");
	file_done(&file);
}

/* When no more memory can be opened to drives, the rest of that file goes by the ring. */
static void test_direct__stops_to_register(void **state)
{
	struct file file;

	(void)state;
	start_direct(3, 4, 0);
	file_init(&file, 200 * MIB, 3);
	for (unsigned after = 1; after <= 3; after++) {
		drives.refuse_after = after;
		assert_int_equal(stage(&file), 0);
		assert_staged(&file);
		assert_true(file.job.counts.direct <= (after - 1) * SEGMENT);
		assert_true(
			file.job.counts.direct >= (after - 1) * SEGMENT - 2 * MIB * (after > 1));
		if (after == 1)
			assert_told("device memory cannot be opened to drives: that is why");
	}
	assert_string_equal(news(), "");
	/* There may be room again. */
	drives.refuse_after = 0;
	assert_int_equal(stage(&file), 0);
	assert_int_equal(file.job.counts.direct, direct_bytes(&file));
	file_done(&file);
}

/* A drive that fails its probe is read by the ring, and the others past the CPU. */
static void test_direct__leaves_out_a_drive_that_cannot(void **state)
{
	struct file file;

	(void)state;
	drives.bad_drive = 1;
	start_direct(3, 4, 0);
	assert_told("a drive is not read past the CPU: drive 1 is bad");
	file_init(&file, 30 * MIB, 3);
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	/* Chunk 1, with its gap, is that drive's too. */
	assert_int_equal(file.job.counts.direct, 19 * MIB);
	file_done(&file);
}

/* A copy back that fails ends the job, and nothing is left of it. */
static void test_direct__a_failed_fetch_fails_the_job(void **state)
{
	struct file file;

	(void)state;
	start_direct(3, 4, 0);
	file_init(&file, 30 * MIB, 3);
	sim.fail_copies = 1;
	assert_int_equal(stage(&file), -EIO);
	assert_true(file.job.final);
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	file_done(&file);
}

/* Extents that make no sense are no better past the CPU. */
static void test_direct__refuses_insane_extents(void **state)
{
	struct file file;

	(void)state;
	start_direct(3, 4, 0);
	file_init(&file, 9 * MIB, 3);
	file.extents[8].device = 3;
	assert_int_equal(stage(&file), -EPROTO);
	file.extents[8].device = 1;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	file_done(&file);
}

/* ---- Sums by the device ---- */

static int sum_probe(struct kvg_backend *b, char *ret_reason, size_t reason_size)
{
	(void)b;
	(void)snprintf(ret_reason, reason_size, "no kernels");
	return drives.no_sums ? -EOPNOTSUPP : 0;
}

static int sum(struct kvg_backend *b, kvg_stream stream, const struct kvg_range *ranges,
	size_t count, uint64_t *ret_sums)
{
	assert_non_null(stream);
	if (sim_strike(&drives.fail_sums))
		return -EIO;
	drives.sums += (unsigned)count;
	return kvg_backend_host.checksum(b, NULL, ranges, count, ret_sums);
}

static void start_with_sums(void)
{
	ops.checksum_probe = sum_probe;
	ops.checksum = sum;
	start_direct(3, 4, 0);
}

/* Nothing is fetched then; the watermark follows all the same. */
static void test_direct__the_device_checks(void **state)
{
	struct file file;

	(void)state;
	start_with_sums();
	file_init(&file, 70 * MIB + 77, 3);
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.direct, direct_bytes(&file));
	assert_int_equal(drives.sums, 68);
	assert_true(sim.back_free_us == 0);
	assert_true(file.mark.staged > 0);
	/* All that it finds wrong goes by the ring. */
	drives.flips = 5;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.checksum_errors, 5);
	assert_int_equal(file.job.counts.direct, direct_bytes(&file) - 5 * MIB);
	assert_string_equal(news(), "");
	file_done(&file);
}

/* What lies together is one read, and has a sum for each of its chunks. */
static void test_direct__the_device_checks_each_chunk(void **state)
{
	struct file file;

	(void)state;
	start_with_sums();
	file_init(&file, 40 * MIB, 3);
	lay_together(&file);
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(drives.sums, 38);
	assert_true(drives.calls < 5);
	drives.flips = 1;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.checksum_errors, 1);
	file_done(&file);
}

/* Without its sums, from the start or later, the CPU checks. */
static void test_direct__the_cpu_checks_where_the_device_does_not(void **state)
{
	struct file file;

	(void)state;
	start_with_sums();
	file_init(&file, 40 * MIB, 3);
	drives.fail_sums = 1;
	drives.flips = 1;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.checksum_errors, 1);
	assert_int_equal(file.job.counts.direct_errors, 0);
	assert_told("the device computes no checksums any more: Input/output error");
	assert_true(kvg_stager_free(stager));
	drives.no_sums = true;
	drives.sums = 0;
	start_with_sums();
	assert_told("the device computes no checksums: no kernels");
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(drives.sums, 0);
	assert_int_equal(file.job.counts.direct, direct_bytes(&file));
	file_done(&file);
}

/* ---- Reads that do not end ---- */

static void hang(bool yes)
{
	KV_LOCKED(&drives.lock);

	drives.hang = yes;
	(void)pthread_cond_broadcast(&drives.more);
}

static unsigned calls(void)
{
	KV_LOCKED(&drives.lock);

	return drives.calls;
}

/* Until COUNT threads wait in a read. */
static void wait_for_waiting(unsigned count)
{
	KV_LOCKED(&drives.lock);

	while (drives.waiting < count)
		(void)pthread_cond_wait(&drives.more, &drives.lock);
}

/* Steps until a job is reaped; threads need time that nobody else gives them. */
static struct kvg_job *run_threads(void)
{
	for (;;) {
		bool progress = kvg_stager_step(stager);
		struct kvg_job *job = kvg_stager_reap(stager);

		if (job)
			return job;
		if (!progress) {
			(void)usleep(200);
			if (sim.io_count > 0 || sim.now_us < sim.link_free_us ||
				sim.now_us < sim.back_free_us)
				sim.now_us = next_end();
		}
	}
}

/*
 * The job fails at its time, but its memory stays as it is: it is reported again when the last read
 * has ended. Meanwhile others go by the ring, and afterwards past the CPU again.
 */
static void test_direct__sets_aside_what_a_drive_may_still_write_to(void **state)
{
	struct file file, other;

	(void)state;
	start_direct(3, 4, 4);
	file_init(&file, 20 * MIB, 3);
	file_init(&other, 20 * MIB, 3);
	hang(true);
	kvg_stager_submit(stager, &file.job);
	while (calls() < 4)
		(void)kvg_stager_step(stager);
	wait_for_waiting(4);
	assert_null(kvg_stager_reap(stager));
	sim.now_us += 6e6;
	assert_ptr_equal(run_threads(), &file.job);
	assert_int_equal(file.job.result, -ETIMEDOUT);
	assert_false(file.job.final);
	assert_int_equal(drives.registered, 1);
	assert_int_equal(drives.most_together, 4);
	kvg_stager_submit(stager, &other.job);
	assert_ptr_equal(run_threads(), &other.job);
	assert_int_equal(other.job.result, 0);
	assert_staged(&other);
	assert_int_equal(other.job.counts.direct, 0);
	assert_int_equal(drives.calls, 4);
	hang(false);
	assert_ptr_equal(run_threads(), &file.job);
	assert_true(file.job.final);
	assert_int_equal(file.job.result, -ETIMEDOUT);
	assert_int_equal(drives.registered, 0);
	kvg_stager_submit(stager, &file.job);
	assert_ptr_equal(run_threads(), &file.job);
	assert_int_equal(file.job.result, 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.direct, direct_bytes(&file));
	file_done(&file);
	file_done(&other);
}

/* It may end before anybody has looked: then it is reported once, for good. */
static void test_direct__may_end_before_it_is_reaped(void **state)
{
	struct file file;

	(void)state;
	start_direct(1, 4, 1);
	file_init(&file, 20 * MIB, 1);
	hang(true);
	kvg_stager_submit(stager, &file.job);
	while (calls() < 1)
		(void)kvg_stager_step(stager);
	wait_for_waiting(1);
	sim.now_us += 6e6;
	while (!file.job.queued)
		(void)kvg_stager_step(stager);
	assert_false(file.job.over);
	hang(false);
	while (!file.job.over)
		(void)kvg_stager_step(stager);
	assert_ptr_equal(kvg_stager_reap(stager), &file.job);
	assert_true(file.job.final);
	assert_null(kvg_stager_reap(stager));
	file_done(&file);
}

/* As many threads as there are, and the right bytes with them. */
static void test_direct__threads_read_together(void **state)
{
	struct file file;

	(void)state;
	start_direct(3, 4, 3);
	file_init(&file, 130 * MIB, 3);
	kvg_stager_submit(stager, &file.job);
	assert_ptr_equal(run_threads(), &file.job);
	assert_int_equal(file.job.result, 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.direct, direct_bytes(&file));
	assert_true(drives.most_together <= 3);
	file_done(&file);
}

#define TEST(name)                                                                                 \
	cmocka_unit_test_setup_teardown(test_direct__##name, direct_setup, direct_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(brings_bytes),
		TEST(joins_what_lies_together),
		TEST(brings_a_stretch),
		TEST(shows_nothing_unchecked),
		TEST(wrong_bytes_are_read_again),
		TEST(failed_reads_go_by_the_ring),
		TEST(is_off_when_it_is_not_supported),
		TEST(stops_to_register),
		TEST(leaves_out_a_drive_that_cannot),
		TEST(a_failed_fetch_fails_the_job),
		TEST(refuses_insane_extents),
		TEST(the_device_checks),
		TEST(the_device_checks_each_chunk),
		TEST(the_cpu_checks_where_the_device_does_not),
		TEST(sets_aside_what_a_drive_may_still_write_to),
		TEST(may_end_before_it_is_reaped),
		TEST(threads_read_together),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
