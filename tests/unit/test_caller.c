/* SPDX-License-Identifier: Apache-2.0 */
/* From thread ids to processes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fs/caller.h"

static void *process_of_this_thread(void *arg)
{
	pid_t *ids = arg;

	ids[0] = (pid_t)syscall(SYS_gettid);
	ids[1] = kv_caller_process(ids[0]);
	return NULL;
}

/* The main thread's id is the process's; another thread's leads to it. */
static void test_caller__threads(void **state)
{
	pthread_t thread;
	pid_t ids[2] = {0};

	(void)state;
	assert_int_equal(kv_caller_process(getpid()), getpid());
	assert_int_equal(pthread_create(&thread, NULL, process_of_this_thread, ids), 0);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_not_equal(ids[0], getpid());
	assert_int_equal(ids[1], getpid());
}

/* Nobody (another PID namespace) stays nobody; a thread that is gone stands for itself. */
static void test_caller__nobody(void **state)
{
	const pid_t never = 0x7ffffffe;

	(void)state;
	assert_int_equal(kv_caller_process(0), 0);
	assert_int_equal(kv_caller_process(-1), 0);
	assert_int_equal(kv_caller_process(never), never);
}

/* A stat line of a thread named NAME with these FLAGS, STACK pointer and exit CODE. */
static enum kv_end end_of(const char *name, unsigned flags, unsigned long stack, int code)
{
	char text[1024];

	(void)snprintf(text, sizeof(text),
		"77 (%s) R 1 77 77 0 -1 %u 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0 0 0 0 %lu %lu %lu "
		"0 0 0 0 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 %d\n",
		name, flags, stack, stack, stack, code);
	return kv_end_of_stat(text);
}

/* Field 9 says that it exits, field 52 why; a name may look like the fields behind it. */
static void test_caller__end_of_stat(void **state)
{
	static const char *const names[] = {"a", "a b", ") R 1", "((x) 4 4 4 4 4 4"};

	(void)state;
	for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		assert_int_equal(end_of(names[i], 0x400000, 1, 9), KV_END_NONE);
		assert_int_equal(end_of(names[i], 0x400004, 1, 0), KV_END_EXIT);
		assert_int_equal(end_of(names[i], 0x400004, 1, 9 << 8), KV_END_EXIT);
		assert_int_equal(end_of(names[i], 0x400004, 1, SIGKILL), KV_END_KILLED);
		assert_int_equal(end_of(names[i], 0x400004, 1, SIGABRT | 0x80), KV_END_KILLED);
		/* Without permission all three read 0. */
		assert_int_equal(end_of(names[i], 0x400004, 0, 0), KV_END_UNKNOWN);
	}
	assert_int_equal(kv_end_of_stat(""), KV_END_UNKNOWN);
	assert_int_equal(kv_end_of_stat("77 (cut"), KV_END_UNKNOWN);
	assert_int_equal(kv_end_of_stat("77 (cut) R 1"), KV_END_NONE);
}

/* The kernel's own text: alive, and ended one way or the other but not reaped. */
static void test_caller__end_of_a_process(void **state)
{
	siginfo_t info;

	(void)state;
	assert_int_equal(kv_caller_end(getpid()), KV_END_NONE);
	assert_int_equal(kv_caller_end(0), KV_END_UNKNOWN);
	assert_int_equal(kv_caller_end(0x7ffffffe), KV_END_UNKNOWN);
	pid_t child = fork();
	if (child == 0) {
		(void)pause();
		_exit(0);
	}
	assert_int_equal(kv_caller_end(child), KV_END_NONE);
	assert_int_equal(kill(child, SIGTERM), 0);
	assert_int_equal(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), 0);
	assert_int_equal(kv_caller_end(child), KV_END_KILLED);
	assert_int_equal(waitpid(child, NULL, 0), child);
	assert_int_equal(kv_caller_end(child), KV_END_UNKNOWN);
	assert_true(kv_caller_is_dying(child));
}

/* Only a signal that nothing stops from ending the thread counts. */
static void test_caller__dying(void **state)
{
	static const struct {
		unsigned long thread, process, blocked, ignored, caught;
		bool dying;
	} cases[] = {
		{0, 0, 0, 0, 0, false}, {0x100, 0, 0x100, 0x100, 0x100, true}, /* SIGKILL */
		{0, 0x4000, 0, 0, 0, true}, /* SIGTERM, for the process */
		{0, 0x4000, 0x4000, 0, 0, false}, {0, 0x4000, 0, 0x4000, 0, false},
		{0, 0x4000, 0, 0, 0x4000, false},
		{0x10000, 0x40000, 0, 0, 0, false}, /* SIGCHLD, SIGSTOP */
		{0x2, 0x4000, 0x4000, 0, 0, true},  /* SIGINT */
	};
	char text[512];

	(void)state;
	for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		(void)snprintf(text, sizeof(text),
			"Name:\tx\nSigPnd:\t%016lx\nShdPnd:\t%016lx\nSigBlk:\t%016lx\n"
			"SigIgn:\t%016lx\nSigCgt:\t%016lx\n",
			cases[i].thread, cases[i].process, cases[i].blocked, cases[i].ignored,
			cases[i].caught);
		assert_int_equal(kv_is_dying_in_status(text), cases[i].dying);
	}
	assert_false(kv_is_dying_in_status("Name:\tx\n"));
	assert_false(kv_caller_is_dying(getpid()));
	assert_false(kv_caller_is_dying(0));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_caller__threads),
		cmocka_unit_test(test_caller__nobody),
		cmocka_unit_test(test_caller__end_of_stat),
		cmocka_unit_test(test_caller__end_of_a_process),
		cmocka_unit_test(test_caller__dying),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
