/* SPDX-License-Identifier: Apache-2.0 */
/* From thread ids to processes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <pthread.h>
#include <sys/syscall.h>
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_caller__threads),
		cmocka_unit_test(test_caller__nobody),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
