/* SPDX-License-Identifier: Apache-2.0 */
/* Who was just answered ESTALE. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "fs/retry.h"

#define MS INT64_C(1000000)

/* A note is found once, by its thread alone, and only for a while. */
static void test_retry__note_is_taken_once(void **state)
{
	struct kv_retries *retries = kv_retries_new();

	(void)state;
	assert_non_null(retries);
	assert_false(kv_retry_take(retries, 7, 0));
	kv_retry_note(retries, 7, 100 * MS);
	assert_false(kv_retry_take(retries, 8, 100 * MS));
	assert_true(kv_retry_pending(retries, 7, 101 * MS));
	assert_true(kv_retry_pending(retries, 7, 101 * MS));
	assert_false(kv_retry_pending(retries, 8, 101 * MS));
	assert_true(kv_retry_take(retries, 7, 101 * MS));
	assert_false(kv_retry_pending(retries, 7, 101 * MS));
	assert_false(kv_retry_take(retries, 7, 101 * MS));
	kv_retry_note(retries, 7, 100 * MS);
	assert_false(kv_retry_take(retries, 7, 100 * MS + 3000 * MS));
	assert_null(kv_retries_free(retries));
}

/* Two threads that share a slot: the newer note wins, the older thread is not taken for it. */
static void test_retry__newest_wins(void **state)
{
	struct kv_retries *retries = kv_retries_new();

	(void)state;
	assert_non_null(retries);
	kv_retry_note(retries, 5, 0);
	kv_retry_note(retries, 5 + 1024, MS);
	assert_false(kv_retry_take(retries, 5, MS));
	assert_true(kv_retry_take(retries, 5 + 1024, MS));
	/* The clock in the note wraps after 49 days. */
	kv_retry_note(retries, 5, (INT64_C(1) << 32) * MS - MS);
	assert_true(kv_retry_take(retries, 5, (INT64_C(1) << 32) * MS + MS));
	kv_retries_free(retries);
}

/* Callers outside the daemon's PID namespace have no id: they are never known again. */
static void test_retry__no_thread(void **state)
{
	struct kv_retries *retries = kv_retries_new();

	(void)state;
	assert_non_null(retries);
	kv_retry_note(retries, 0, MS);
	assert_false(kv_retry_take(retries, 0, MS));
	kv_retries_free(retries);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_retry__note_is_taken_once),
		cmocka_unit_test(test_retry__newest_wins),
		cmocka_unit_test(test_retry__no_thread),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
