/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An index that a process has crashed with: all of it is looked at before it is used again.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "unit_damage.h"

/* An index of any size is larger than what is looked at each time. */
static int setup(void **state)
{
	if (unit_setup(state) != 0)
		return -1;
	struct unit *unit = *state;

	unit->options.checked_bytes = 1;
	return 0;
}

static int try_open(struct unit *unit, char error[300])
{
	struct kv_index *index = NULL;
	int r = kv_index_open(unit->path, &unit->options, &index, error, 300);

	(void)kv_index_close(index);
	return r;
}

/* ---- Crashes ---- */

static void fault(void)
{
	volatile char *page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	*page = 1;
}

/* As when the file under LMDB's mapping has become short, or its drive gives an error. */
static void read_behind_the_end(void)
{
	int fd = memfd_create("short", MFD_CLOEXEC);
	volatile char *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);

	(void)*page;
}

static void send_fault(void)
{
	(void)raise(SIGSEGV);
}

/* In a process that has UNIT's index open. Returns the signal that it has ended by. */
static int crash(struct unit *unit, void (*how)(void))
{
	pid_t pid = fork();
	int status;

	assert_true(pid >= 0);
	if (pid == 0) {
		const struct rlimit none = {0};

		(void)setrlimit(RLIMIT_CORE, &none);
		(void)signal(SIGSEGV, SIG_DFL);
		(void)signal(SIGBUS, SIG_DFL);
		(void)signal(SIGABRT, SIG_DFL);
		unit_open(unit);
		if (kv_index_watch_crashes(unit->index) == 0)
			how();
		_exit(1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

/* One more entry than the tree has, in both heads: LMDB does not notice. */
static void miscount(struct image *image)
{
	for (size_t i = 0; i < 2; i++) {
		uint8_t *entries = image->data + i * 4096 + 16 + 24 + 48 + 32;

		kv_put_le64(entries, kv_get_le64(entries) + 1);
	}
}

/* Each way to crash is one, and the process ends as it would have. */
static void test_index_suspect__after_a_crash(void **state)
{
	static const struct {
		void (*how)(void);
		int signal;
	} ways[] = {
		{fault, SIGSEGV},
		{read_behind_the_end, SIGBUS},
		{abort, SIGABRT},
		{send_fault, SIGSEGV},
	};
	struct unit *unit = *state;
	struct image sound, damaged;
	char error[300];

	unit_populate(unit);
	unit_close(unit);
	sound = image_read(unit);
	damaged = image_read(unit);
	miscount(&damaged);
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		assert_int_equal(kv_suspect_find(unit->path), 0);
		assert_int_equal(crash(unit, ways[i].how), ways[i].signal);
		assert_int_equal(kv_suspect_find(unit->path), 1);
		/* What is damaged is refused each time, until it is not any more. */
		image_write(unit, &damaged);
		for (unsigned k = 0; k < 2; k++) {
			assert_int_equal(try_open(unit, error), -EUCLEAN);
			assert_non_null(strstr(error, "kvfs check"));
			assert_int_equal(kv_suspect_find(unit->path), 1);
		}
		image_write(unit, &sound);
		assert_int_equal(try_open(unit, error), 0);
		assert_int_equal(kv_suspect_find(unit->path), 0);
	}
	free(sound.data);
	free(damaged.data);
	unit_open(unit);
}

/* Without a crash a large one is not looked at, and a small one is. */
static void test_index_suspect__without_a_crash(void **state)
{
	struct unit *unit = *state;
	struct image image;
	char error[300];

	unit_populate(unit);
	unit_close(unit);
	image = image_read(unit);
	miscount(&image);
	image_write(unit, &image);
	assert_int_equal(try_open(unit, error), 0);
	unit->options.checked_bytes = 0;
	image_write(unit, &image);
	assert_int_equal(try_open(unit, error), -EUCLEAN);
	free(image.data);
	unit->options.checked_bytes = 1;
	unit_open(unit);
}

/* A directory that cannot be looked into is an error, not a sound index. */
static void test_index_suspect__errors(void **state)
{
	struct unit *unit = *state;
	char path[160];

	(void)snprintf(path, sizeof(path), "%s/data.mdb", unit->path);
	assert_int_equal(kv_suspect_find(path), -ENOTDIR);
	assert_int_equal(kv_suspect_clear(path), -ENOTDIR);
	assert_int_equal(kv_suspect_clear(unit->path), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_suspect__after_a_crash),
		TEST(test_index_suspect__without_a_crash),
		TEST(test_index_suspect__errors),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
