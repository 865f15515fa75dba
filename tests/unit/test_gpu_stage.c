/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stager: right bytes in every case, faults, and how near its defaults come to the speed of
 * link and drives. Time is simulated: a link of 55.6 GB/s with gaps of 2 us, drives of 14 GB/s.
 */
#include <dirent.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>

#include "tests/unit/unit_stage_file.h"

/* ---- Bytes ---- */

/* From drives: holes, blocks that were never written, odd ends; and nothing of others behind it. */
static void test_stage__brings_bytes_from_drives(void **state)
{
	static const uint64_t sizes[] = {2 * MIB, 4 * MIB + 1, 29 * MIB + 4095, 70 * MIB + 123};
	struct file file;

	(void)state;
	start(3, 4);
	for (unsigned i = 0; i < 4; i++) {
		file_init(&file, sizes[i], 3);
		assert_int_equal(stage(&file), 0);
		assert_staged(&file);
		assert_true(file.job.counts.from_device > 0);
		assert_int_equal(file.job.counts.from_file, 0);
		file_done(&file);
	}
}

/* From an object in DRAM, in pieces that are registered and let go. */
static void test_stage__brings_bytes_from_dram(void **state)
{
	struct file file;

	(void)state;
	start(0, 4);
	file_init(&file, 70 * MIB + 77, 1);
	file.job.object_fd = file.fd;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.from_dram, file.size);
	assert_true(sim.longest_register <= KVG_REGISTER_MAX);
	assert_int_equal(sim.reads, 0);
	file_done(&file);
}

/* What cannot be registered goes by the ring, from any piece on. */
static void test_stage__copies_by_the_ring_what_cannot_be_registered(void **state)
{
	(void)state;
	start(0, 4);
	for (unsigned refuse = 1; refuse < 3; refuse++) {
		struct file file;

		file_init(&file, 70 * MIB + 77, 1);
		file.job.object_fd = file.fd;
		sim.refuse_registers = refuse;
		assert_int_equal(stage(&file), 0);
		assert_staged(&file);
		sim.refuse_registers = 0;
		file_done(&file);
	}
}

/* Part of a file: nothing else of it is read or written to, and the watermark is the file's. */
static void test_stage__brings_a_stretch_of_a_file(void **state)
{
	static const struct {
		uint64_t offset, size;
	} stretches[] = {{0, 10 * MIB}, {5 * MIB, 10 * MIB}, {28 * MIB, 2 * MIB - 1}};
	uint64_t file_size = 30 * MIB - 1;
	struct file file;

	(void)state;
	start(3, 2);
	for (unsigned i = 0; i < 6; i++) {
		uint64_t offset = stretches[i / 2].offset, size = stretches[i / 2].size;
		struct kvg_target target;
		bool touched = false;

		file_init(&file, file_size, 3);
		target = (struct kvg_target){
			.address = (kvg_devptr)(uintptr_t)file.device + offset,
			.size = (size + 2 * MIB - 1) & ~(2 * MIB - 1),
		};
		file.job.offset = offset;
		file.job.size = size;
		file.job.targets = &target;
		file.job.target_count = 1;
		file.job.chunks = file.chunks + offset / MIB;
		file.job.object_fd = i % 2 ? file.fd : -1;
		sim.reads = 0;
		assert_int_equal(stage(&file), 0);
		assert_true(i % 2 ? sim.reads == 0 : sim.reads >= size / MIB - 1);
		assert_true(sim.reads <= size / MIB + 2);
		assert_memory_equal(file.device + offset, file.content + offset, size);
		for (uint64_t at = 0; at < file_size; at++)
			touched |= (at < offset || at >= offset + target.size) &&
				   file.device[at] != 0xdd;
		assert_false(touched);
		assert_true(file.mark.staged < offset + size);
		assert_true(size < 9 * MIB || file.mark.staged > offset);
		file_done(&file);
	}
}

/* The watermark only grows, never runs ahead of the bytes, and leaves the end to the caller. */
static void test_stage__watermark_follows_the_bytes(void **state)
{
	struct file file;
	uint64_t last = 0, changes = 0;

	(void)state;
	start(3, 4);
	for (unsigned object = 0; object < 2; object++) {
		file_init(&file, 66 * MIB, 3);
		file.job.object_fd = object ? file.fd : -1;
		kvg_stager_submit(stager, &file.job);
		last = changes = 0;
		for (;;) {
			bool progress = kvg_stager_step(stager);
			uint64_t mark = file.mark.staged;

			assert_true(mark >= last && mark < file.size);
			changes += mark > last;
			assert_memory_equal(file.device + last, file.content + last, mark - last);
			last = mark;
			if (kvg_stager_reap(stager))
				break;
			if (!progress)
				sim.now_us = next_end();
		}
		assert_true(changes > 5);
		file_done(&file);
	}
}

/* ---- Faults ---- */

/* What a drive does not give, or gives wrong, is read through the mount once. */
static void test_stage__reads_through_the_mount_what_fails(void **state)
{
	unsigned *faults[] = {&sim.fail_reads, &sim.short_reads, &sim.flip_reads};

	(void)state;
	start(3, 4);
	for (unsigned i = 0; i < 3; i++) {
		struct file file;

		file_init(&file, 20 * MIB + 5, 3);
		file.job.file_fd = file.fd;
		*faults[i] = 2;
		assert_int_equal(stage(&file), 0);
		assert_staged(&file);
		/* Both reads may have been of one chunk. */
		assert_true(
			file.job.counts.from_file == MIB || file.job.counts.from_file == 2 * MIB);
		assert_int_equal(file.job.counts.checksum_errors,
			i == 2 ? file.job.counts.from_file / MIB : 0);
		file_done(&file);
	}
}

/* Without that, or if it is no better, the staging fails; wrong bytes never pass. */
static void test_stage__fails_when_bytes_are_not_to_be_had(void **state)
{
	struct file file;

	(void)state;
	start(3, 4);
	file_init(&file, 20 * MIB, 3);
	sim.flip_reads = 1;
	assert_int_equal(stage(&file), -EIO);
	sim.fail_reads = 1;
	assert_int_equal(stage(&file), -EIO);
	file.job.file_fd = file.fd;
	assert_int_equal(ftruncate(file.fd, MIB), 0);
	sim.fail_reads = 20;
	assert_int_equal(stage(&file), -EIO);
	sim.fail_reads = 0;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	file_done(&file);
}

/* Chunks that are only in the mount's memory are read through it. */
static void test_stage__reads_through_the_mount_what_is_on_no_drive(void **state)
{
	struct file file;

	(void)state;
	start(3, 4);
	file_init(&file, 9 * MIB + 1, 3);
	file.chunks[4] = file.chunks[9] = (struct kvg_chunk){.where = KV_GPU_FILE};
	file.job.file_fd = file.fd;
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	assert_int_equal(file.job.counts.from_file, MIB + 1);
	file_done(&file);
}

/* Extents that lead out of their chunk, or to a drive that is not there. */
static void test_stage__refuses_insane_extents(void **state)
{
	struct kv_gpu_extent good;
	struct file file;

	(void)state;
	start(3, 4);
	file_init(&file, 9 * MIB, 3);
	good = file.extents[8];
	file.extents[8].device = 3;
	assert_int_equal(stage(&file), -EPROTO);
	file.extents[8] = good;
	file.extents[8].block = 1;
	assert_int_equal(stage(&file), -EPROTO);
	file.extents[8] = good;
	file.extents[8].length = 100;
	assert_int_equal(stage(&file), -EPROTO);
	file.extents[8] = good;
	assert_int_equal(stage(&file), 0);
	file_done(&file);
}

/* A drive that hangs fails its files only; the slots it may still write to are not used. */
static void test_stage__gives_up_a_drive_that_hangs(void **state)
{
	struct file file, object;
	double began;

	(void)state;
	start(3, 2);
	file_init(&file, 9 * MIB, 3);
	file_init(&object, 20 * MIB, 3);
	sim.hang = true;
	began = sim.now_us;
	assert_int_equal(stage(&file), -ETIMEDOUT);
	assert_true(sim.now_us - began >= 5e6);
	object.job.object_fd = object.fd;
	assert_int_equal(stage(&object), 0);
	assert_staged(&object);
	/* Both slots are in the drive's hands. */
	kvg_stager_submit(stager, &file.job);
	for (unsigned i = 0; i < 100; i++)
		assert_false(kvg_stager_step(stager) && kvg_stager_reap(stager));
	assert_int_equal(file.job.next, 0);
	sim.hang = false;
	assert_ptr_equal(run(), &file.job);
	assert_int_equal(file.job.result, 0);
	assert_staged(&file);
	file_done(&file);
	file_done(&object);
}

/* A copy that fails ends its job, from both kinds of source. */
static void test_stage__reports_a_failed_copy(void **state)
{
	struct file file;

	(void)state;
	start(3, 4);
	file_init(&file, 30 * MIB, 3);
	for (unsigned object = 0; object < 2; object++) {
		file.job.object_fd = object ? file.fd : -1;
		sim.fail_copies = 1;
		assert_int_equal(stage(&file), -EIO);
		sim.fail_copies = 0;
		assert_int_equal(stage(&file), 0);
		assert_staged(&file);
	}
	file_done(&file);
}

/* What a copy that failed half-way still reads is not used for anything else. */
static void test_stage__waits_for_what_a_failed_copy_began(void **state)
{
	struct file file;

	(void)state;
	start(3, 4);
	file_init(&file, 4 * MIB, 3);
	for (unsigned how = 0; how < 3; how++) {
		sim.half_copies = how == 0;
		kvg_stager_submit(stager, &file.job);
		while (sim.copies == 0) {
			if (!kvg_stager_step(stager))
				sim.now_us = next_end();
			sim.fail_records = how == 1;
			/* The mark cannot be looked at, before the copy has ended. */
			sim.fail_queries = how == 2 && sim.copies > 0;
		}
		assert_ptr_equal(run(), &file.job);
		assert_int_equal(file.job.result, -EIO);
		assert_true(sim.now_us >= sim.link_free_us);
		sim.fail_records = sim.fail_queries = sim.copies = 0;
	}
	assert_int_equal(stage(&file), 0);
	assert_staged(&file);
	file_done(&file);
}

/* ---- Speed ---- */

/* Fraction of BYTES_PER_US at which a file of 2 GiB comes in. */
static double fraction(unsigned drives, bool object, double bytes_per_us)
{
	struct file file;
	double began, took;

	sim.timed = true;
	start(drives, 0);
	file_init(&file, 2048 * MIB, drives > 0 ? drives : 1);
	file.job.object_fd = object ? file.fd : -1;
	began = sim.now_us;
	assert_int_equal(stage(&file), 0);
	took = sim.now_us - began;
	file_done(&file);
	print_message("%.3f of the link or the drives\n", (double)file.size / took / bytes_per_us);
	return (double)file.size / took / bytes_per_us;
}

/* At least 95 % of the link out of DRAM. */
static void test_stage__fills_the_link_from_dram(void **state)
{
	(void)state;
	assert_true(fraction(0, true, LINK_BYTES_PER_US) >= 0.95);
}

/* At least 90 % of the link from eight drives, which are twice as fast. */
static void test_stage__fills_the_link_from_drives(void **state)
{
	(void)state;
	assert_true(fraction(8, false, LINK_BYTES_PER_US) >= 0.90);
}

/* At least 90 % of the drives where they are the slower ones. */
static void test_stage__fills_slow_drives(void **state)
{
	(void)state;
	assert_true(fraction(2, false, 2 * DRIVE_BYTES_PER_US) >= 0.90);
}

/* ---- With threads, on a real file ---- */

static struct {
	unsigned plain; /* reads into memory that is not registered */
	unsigned fixed;
	int lend_result;
} reads;

static int watched_submit(void *context, struct kv_io_queue *queue, struct kv_io *io)
{
	reads.plain += io->buffer < 0;
	reads.fixed += io->buffer >= 0;
	return kv_io_real()->submit(context, queue, io);
}

static int watched_lend(
	void *context, struct kv_io_queue *queue, void *memory, size_t size, unsigned count)
{
	if (reads.lend_result == 0)
		reads.lend_result = kv_io_real()->lend(context, queue, memory, size, count);
	return reads.lend_result;
}

/* Reads go into the ring as registered buffers, or as plain memory where that is refused. */
static void test_stage__lends_the_ring_to_the_kernel(void **state)
{
	struct kv_io_ops io = *kv_io_real();
	struct kvg_stager_options options = {.io = &io, .device_count = 1, .slots = 3};

	(void)state;
	ops = kvg_backend_host;
	options.backend = backend;
	options.devices = &sim.device_fd;
	io.submit = watched_submit;
	io.lend = watched_lend;
	for (unsigned refused = 0; refused < 2; refused++) {
		struct pollfd fd = {.events = POLLIN};
		struct file file;

		memset(&reads, 0, sizeof(reads));
		reads.lend_result = refused ? -ENOMEM : 0;
		assert_int_equal(kvg_stager_new(&options, &stager), 0);
		file_init(&file, 45 * MIB + 3, 1);
		kvg_stager_submit(stager, &file.job);
		fd.fd = kvg_stager_fd(stager);
		assert_int_equal(poll(&fd, 1, 60000), 1);
		assert_ptr_equal(kvg_stager_reap(stager), &file.job);
		assert_int_equal(file.job.result, 0);
		assert_staged(&file);
		/* Where io_uring itself is refused there is nothing to lend. */
		assert_int_equal(reads.lend_result == 0 ? reads.plain : reads.fixed, 0);
		assert_true(reads.plain + reads.fixed >= 45);
		assert_true(kvg_stager_free(stager));
		stager = NULL;
		file_done(&file);
	}
}

static void test_stage__works_with_threads(void **state)
{
	struct kvg_stager_options options = {.io = kv_io_real(), .device_count = 1, .slots = 3};
	struct file files[2];

	(void)state;
	ops = kvg_backend_host;
	options.backend = backend;
	options.devices = &sim.device_fd;
	assert_int_equal(kvg_stager_new(&options, &stager), 0);
	file_init(&files[0], 45 * MIB + 3, 1);
	file_init(&files[1], 67 * MIB + 3, 1);
	/* The same drive holds the second one now. */
	files[0].job.object_fd = files[0].fd;
	for (unsigned i = 0; i < 2; i++)
		kvg_stager_submit(stager, &files[i].job);
	for (unsigned ended = 0; ended < 2;) {
		struct pollfd fd = {.fd = kvg_stager_fd(stager), .events = POLLIN};

		assert_int_equal(poll(&fd, 1, 60000), 1);
		while (kvg_stager_reap(stager))
			ended++;
	}
	for (unsigned i = 0; i < 2; i++) {
		assert_int_equal(files[i].job.result, 0);
		assert_staged(&files[i]);
		file_done(&files[i]);
	}
}

static void on_a_node(struct kvg_backend *b, struct kvg_device_info *ret_info)
{
	kvg_backend_host.info(b, ret_info);
	ret_info->numa_node = 5;
}

/* How many of this process's threads may run on one CPU only. */
static unsigned bound_threads(void)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *item;
	unsigned count = 0;

	assert_non_null(tasks);
	while ((item = readdir(tasks))) {
		cpu_set_t cpus;
		pid_t id = (pid_t)strtol(item->d_name, NULL, 10);

		count += id > 0 && sched_getaffinity(id, sizeof(cpus), &cpus) == 0 &&
			 CPU_COUNT(&cpus) == 1;
	}
	(void)closedir(tasks);
	return count;
}

/* The stager's threads run near the device; who made it does not move. */
static void test_stage__threads_run_near_the_device(void **state)
{
	struct kvg_stager_options options = {
		.io = kv_io_real(), .device_count = 1, .slots = 3, .workers = 2};
	void *root = NULL;
	cpu_set_t cpus;
	FILE *file;
	int first = 0;

	(void)state;
	assert_int_equal(sched_getaffinity(0, sizeof(cpus), &cpus), 0);
	if (CPU_COUNT(&cpus) < 2)
		skip();
	while (!CPU_ISSET(first, &cpus))
		first++;
	assert_int_equal(unit_directory_setup(&root), 0);
	assert_int_equal(mkdir(unit_path(&root, "devices"), 0700), 0);
	assert_int_equal(mkdir(unit_path(&root, "devices/system"), 0700), 0);
	assert_int_equal(mkdir(unit_path(&root, "devices/system/node"), 0700), 0);
	assert_int_equal(mkdir(unit_path(&root, "devices/system/node/node5"), 0700), 0);
	file = fopen(unit_path(&root, "devices/system/node/node5/cpulist"), "we");
	assert_non_null(file);
	(void)fprintf(file, "%d\n", first);
	(void)fclose(file);
	ops.info = on_a_node;
	options.backend = backend;
	options.devices = &sim.device_fd;
	options.sysfs = root;
	assert_int_equal(bound_threads(), 0);
	assert_int_equal(kvg_stager_new(&options, &stager), 0);
	/* The one that runs all, two workers, those that read through the mount. */
	assert_true(bound_threads() >= 4);
	assert_int_equal(sched_getaffinity(0, sizeof(cpus), &cpus), 0);
	assert_true(CPU_COUNT(&cpus) >= 2);
	assert_int_equal(unit_directory_teardown(&root), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(test_stage__##name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(brings_bytes_from_drives),
		TEST(brings_bytes_from_dram),
		TEST(copies_by_the_ring_what_cannot_be_registered),
		TEST(brings_a_stretch_of_a_file),
		TEST(watermark_follows_the_bytes),
		TEST(reads_through_the_mount_what_fails),
		TEST(fails_when_bytes_are_not_to_be_had),
		TEST(reads_through_the_mount_what_is_on_no_drive),
		TEST(refuses_insane_extents),
		TEST(gives_up_a_drive_that_hangs),
		TEST(reports_a_failed_copy),
		TEST(waits_for_what_a_failed_copy_began),
		TEST(fills_the_link_from_dram),
		TEST(fills_the_link_from_drives),
		TEST(fills_slow_drives),
		TEST(lends_the_ring_to_the_kernel),
		TEST(works_with_threads),
		TEST(threads_run_near_the_device),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
