/* SPDX-License-Identifier: Apache-2.0 */
/* The stager with several jobs, and parts of jobs: what goes first, what is left out, what ends. */
#include <sys/mman.h>

#include "tests/unit/unit_stage_file.h"

/* Segments that are somebody else's are neither read for nor written to, wherever they are. */
static void test_stage__passes_over_what_others_bring(void **state)
{
	static const unsigned sets[] = {1, 2, 4, 5, 6, 8, 10, 15};
	uint64_t size = 31 * MIB - 5, segment = 8 * MIB;

	(void)state;
	start(3, 2);
	for (unsigned i = 0; i < 2 * sizeof(sets) / sizeof(sets[0]); i++) {
		unsigned skipped = sets[i / 2];
		struct kvg_target targets[4];
		struct file file;

		file_init(&file, size, 3);
		for (unsigned k = 0; k < 4; k++)
			targets[k] = (struct kvg_target){
				.address = (kvg_devptr)(uintptr_t)file.device + k * segment,
				.size = segment,
				.skip = skipped >> k & 1,
			};
		file.job.targets = targets;
		file.job.target_count = 4;
		file.job.object_fd = i % 2 ? file.fd : -1;
		file.job.mark_end = 9 * MIB;
		assert_int_equal(stage(&file), 0);
		for (uint64_t at = 0; at < 4 * segment; at++)
			assert_int_equal(file.device[at], targets[at / segment].skip ? 0xdd
							  : at < size ? file.content[at]
								      : 0);
		assert_true(file.mark.staged <= 9 * MIB);
		file_done(&file);
	}
}

/* A client that cares for latency gets copies half as long. */
static void test_stage__makes_short_copies_for_who_waits(void **state)
{
	(void)state;
	start(3, 4);
	for (unsigned i = 0; i < 6; i++) {
		bool object = i & 1;
		struct file file;

		file_init(&file, 64 * MIB, 3);
		file.job.object_fd = object ? file.fd : -1;
		kvg_stager_latency(stager, i / 2 == 1);
		sim.copies = 0;
		sim.longest_copy = 0;
		assert_int_equal(stage(&file), 0);
		assert_staged(&file);
		assert_int_equal(sim.longest_copy, (i / 2 == 1 ? 4 : 8) * MIB);
		file_done(&file);
	}
}

/* One that is not wanted any more ends when what is under way has, and the others go on. */
static void test_stage__ends_what_nobody_wants(void **state)
{
	struct file file, other;

	(void)state;
	start(3, 2);
	file_init(&file, 60 * MIB, 3);
	file_init(&other, 20 * MIB, 3);
	other.job.object_fd = other.fd;
	kvg_stager_submit(stager, &file.job);
	(void)kvg_stager_step(stager);
	kvg_stager_submit(stager, &other.job);
	kvg_stager_cancel(&file.job);
	for (unsigned i = 0; i < 2; i++) {
		struct kvg_job *job = run();

		assert_int_equal(job->result, job == &file.job ? -ECANCELED : 0);
	}
	assert_staged(&other);
	assert_true(sim.reads < 60);
	file_done(&file);
	file_done(&other);
}

/* What came later and is more urgent is there first; also if it becomes so only then. */
static void test_stage__urgent_files_go_first(void **state)
{
	(void)state;
	start(3, 2);
	for (unsigned i = 0; i < 8; i++) {
		bool object = i & 1, raised = i & 2, late = i & 4;
		struct file slow, urgent;

		file_init(&slow, 60 * MIB, 3);
		file_init(&urgent, 30 * MIB, 3);
		if (object) {
			slow.job.object_fd = slow.fd;
			urgent.job.object_fd = urgent.fd;
		} else {
			/* Both are on the same drives: one is read through the mount. */
			for (unsigned k = 0; k < 60; k++)
				slow.chunks[k].where = KV_GPU_FILE;
			slow.job.file_fd = slow.fd;
		}
		urgent.job.priority = raised ? 0 : 2;
		kvg_stager_submit(stager, &slow.job);
		for (unsigned k = 0; k < 3 && late; k++)
			(void)kvg_stager_step(stager);
		kvg_stager_submit(stager, &urgent.job);
		if (raised)
			kvg_stager_raise(stager, &urgent.job, 2);
		assert_ptr_equal(run(), &urgent.job);
		assert_ptr_equal(run(), &slow.job);
		assert_int_equal(urgent.job.result, 0);
		assert_int_equal(slow.job.result, 0);
		assert_staged(&urgent);
		assert_staged(&slow);
		file_done(&slow);
		file_done(&urgent);
	}
}

/* Several at once, of both kinds. */
static void test_stage__stages_many_files_at_once(void **state)
{
	struct file files[6];

	(void)state;
	start(3, 4);
	for (unsigned i = 0; i < 6; i++) {
		file_init(&files[i], 5 * MIB * (i + 1) + i, 3);
		/* All are on the same drives: only one of them can be there. */
		if (i != 5)
			files[i].job.object_fd = files[i].fd;
		kvg_stager_submit(stager, &files[i].job);
	}
	for (unsigned i = 0; i < 6; i++)
		assert_int_equal(run()->result, 0);
	for (unsigned i = 0; i < 6; i++) {
		assert_staged(&files[i]);
		file_done(&files[i]);
	}
}

#define TEST(name) cmocka_unit_test_setup_teardown(test_stage__##name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(passes_over_what_others_bring),
		TEST(makes_short_copies_for_who_waits),
		TEST(ends_what_nobody_wants),
		TEST(urgent_files_go_first),
		TEST(stages_many_files_at_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
