/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The log: its lines, its levels, and what it does to hostile names.
 */
#include <errno.h>
#include <inttypes.h>

#include "fs/log.h"
#include "tests/unit/unit_fs.h"

/* A line is level, subsystem and message, with the program's name and pid in front. */
static void test_log__line_format(void **state)
{
	struct unit_capture capture;
	char *text, expected[64];

	(void)state;
	kv_log_setup(KV_LOG_INFO, KV_LOG_STDERR);
	unit_capture_begin(&capture);
	kv_log_warning("fill", "slow device=%s ms=%d", "data0", 12);
	text = unit_capture_end(&capture);
	(void)snprintf(expected, sizeof(expected),
		"test_log[%d] warning fill: slow device=data0 ms=12\n", (int)getpid());
	assert_string_equal(text, expected);
	free(text);
}

/* What is below the level set is not written. */
static void test_log__levels(void **state)
{
	struct unit_capture capture;
	char *text;

	(void)state;
	kv_log_setup(KV_LOG_WARNING, KV_LOG_STDERR);
	assert_true(kv_log_enabled(KV_LOG_ERROR));
	assert_true(kv_log_enabled(KV_LOG_WARNING));
	assert_false(kv_log_enabled(KV_LOG_INFO));
	unit_capture_begin(&capture);
	kv_log_info("fill", "hidden");
	kv_log_debug("fill", "hidden");
	kv_log_error("fill", "shown");
	text = unit_capture_end(&capture);
	assert_null(strstr(text, "hidden"));
	assert_non_null(strstr(text, "error fill: shown"));
	free(text);
}

/* Levels are known by their names and by nothing else. */
static void test_log__level_names(void **state)
{
	(void)state;
	assert_int_equal(kv_log_level_parse("error"), KV_LOG_ERROR);
	assert_int_equal(kv_log_level_parse("warning"), KV_LOG_WARNING);
	assert_int_equal(kv_log_level_parse("info"), KV_LOG_INFO);
	assert_int_equal(kv_log_level_parse("debug"), KV_LOG_DEBUG);
	assert_int_equal(kv_log_level_parse("Debug"), _KV_LOG_INVALID);
	assert_int_equal(kv_log_level_parse(""), _KV_LOG_INVALID);
	assert_int_equal(_KV_LOG_INVALID, -EINVAL);
}

/* A name with control characters can neither forge a line nor drive a terminal; UTF-8 passes. */
static void test_log__escapes_control_characters(void **state)
{
	struct unit_capture capture;
	char *text;

	(void)state;
	kv_log_setup(KV_LOG_INFO, KV_LOG_STDERR);
	unit_capture_begin(&capture);
	kv_log_info("ops", "name=\"%s\"", "a\nkvfsd[1] error\x1b[2J\x7f\\ \xc3\xa9");
	text = unit_capture_end(&capture);
	assert_non_null(strstr(text, "name=\"a\\x0akvfsd[1] error\\x1b[2J\\x7f\\\\ \xc3\xa9\"\n"));
	assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
	free(text);
}

/* A message that is too long is cut and still ends its line. */
static void test_log__cuts_long_messages(void **state)
{
	struct unit_capture capture;
	char *text, *message = malloc(20001);

	(void)state;
	assert_non_null(message);
	memset(message, '\x01', 20000);
	message[20000] = '\0';
	kv_log_setup(KV_LOG_INFO, KV_LOG_STDERR);
	unit_capture_begin(&capture);
	kv_log_info("ops", "%s", message);
	text = unit_capture_end(&capture);
	assert_true(strlen(text) > 3000 && strlen(text) < 3500);
	assert_string_equal(text + strlen(text) - 4, "...\n");
	free(text);
	free(message);
}

/* Lines carry systemd's priority where stderr is the journal's stream, and only there. */
static void test_log__journal_prefix(void **state)
{
	struct unit_capture capture;
	char *text, stream[64];
	struct stat st;

	(void)state;
	unit_capture_begin(&capture);
	assert_int_equal(fstat(STDERR_FILENO, &st), 0);
	(void)snprintf(
		stream, sizeof(stream), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
	assert_int_equal(setenv("JOURNAL_STREAM", stream, 1), 0);
	kv_log_setup(KV_LOG_INFO, KV_LOG_STDERR);
	kv_log_error("a", "one");
	kv_log_info("a", "two");
	assert_int_equal(setenv("JOURNAL_STREAM", "1:1", 1), 0);
	kv_log_setup(KV_LOG_INFO, KV_LOG_STDERR);
	kv_log_info("a", "three");
	assert_int_equal(unsetenv("JOURNAL_STREAM"), 0);
	kv_log_setup(KV_LOG_INFO, KV_LOG_STDERR);
	text = unit_capture_end(&capture);
	assert_int_equal(strncmp(text, "<3>test_log[", 12), 0);
	assert_non_null(strstr(text, "\n<6>test_log["));
	assert_non_null(strstr(text, "one\n"));
	assert_non_null(strstr(text, "\ntest_log["));
	free(text);
}

/* Logging leaves errno alone, so that it can stand anywhere. */
static void test_log__keeps_errno(void **state)
{
	struct unit_capture capture;

	(void)state;
	unit_capture_begin(&capture);
	(void)close(STDERR_FILENO);
	errno = ENOTTY;
	kv_log_error("a", "nobody hears this");
	assert_int_equal(errno, ENOTTY);
	free(unit_capture_end(&capture));
}

/* A limit lets one call a second through and counts the others. */
static void test_log__rate_limit(void **state)
{
	struct kv_log_limit limit = {0};
	unsigned suppressed = 99, passed = 0, swallowed = 0;

	(void)state;
	assert_true(kv_log_allowed(&limit, &suppressed));
	assert_int_equal(suppressed, 0);
	/* A second may end in between, so count instead of expecting each call's answer. */
	for (unsigned i = 0; i < 1000; i++) {
		if (kv_log_allowed(&limit, &suppressed)) {
			passed++;
			swallowed += suppressed;
		}
	}
	assert_true(passed <= 2);
	/* Another second, as the limit sees it. */
	limit.last_s -= 10;
	assert_true(kv_log_allowed(&limit, &suppressed));
	assert_int_equal(swallowed + suppressed, 1000 - passed);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_log__line_format),
		cmocka_unit_test(test_log__levels),
		cmocka_unit_test(test_log__level_names),
		cmocka_unit_test(test_log__escapes_control_characters),
		cmocka_unit_test(test_log__cuts_long_messages),
		cmocka_unit_test(test_log__journal_prefix),
		cmocka_unit_test(test_log__keeps_errno),
		cmocka_unit_test(test_log__rate_limit),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
