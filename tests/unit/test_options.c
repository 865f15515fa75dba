/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mount options: defaults, every type of value, and the wording of refusals.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "fs/base.h"
#include "fs/dram.h"
#include "fs/options.h"

static char error[256];

static uint64_t memory_bytes(void)
{
	return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

static int parse(struct kv_options *options, const char *text)
{
	error[0] = '\0';
	kv_options_init(options);
	return kv_options_parse(options, text, error, sizeof(error));
}

/* The text is refused with a line that has all of the words, and the options stay the defaults. */
static void assert_refused(const char *text, const char *const words[static 3])
{
	struct kv_options options, defaults;

	kv_options_init(&defaults);
	assert_int_equal(parse(&options, text), -EINVAL);
	assert_memory_equal(&options, &defaults, sizeof(options));
	assert_null(strchr(error, '\n'));
	assert_non_null(strstr(error, "kvfs mount --help"));
	for (size_t i = 0; i < 3; i++) {
		if (!strstr(error, words[i]))
			fail_msg("'%s' lacks '%s'", error, words[i]);
	}
}

/* The defaults are those that the documentation promises. */
static void test_options__defaults(void **state)
{
	struct kv_options options;

	(void)state;
	kv_options_init(&options);
	assert_int_equal(options.dram_bytes, kv_max_u64(memory_bytes() / 4, KV_DRAM_MIN));
	assert_int_equal(options.stream_above_bytes, UINT64_C(256) << 20);
	assert_int_equal(options.max_size_bytes, 0);
	assert_int_equal(options.read_wait_ms, 5000);
	assert_int_equal(options.io_timeout_ms, 5000);
	assert_int_equal(options.lease_ms, 10000);
	assert_int_equal(options.unread_ttl_ms, 0);
	assert_int_equal(options.user_files, 65536);
	assert_int_equal(options.user_writers, 8192);
	assert_int_equal(options.user_space_percent, 90);
	assert_int_equal(options.user_dirty_percent, 75);
	assert_false(options.allow_other);
	assert_false(options.restart);
	assert_int_equal(options.passthrough, KV_PASSTHROUGH_AUTO);
	assert_int_equal(options.log_level, KV_LOG_INFO);
}

/* Every option can be set, all in one text, in any order. */
static void test_options__all_set(void **state)
{
	struct kv_options options;

	(void)state;
	assert_int_equal(
		parse(&options,
			"log=debug,passthrough=off,allow_other,restart,read_wait=250ms,lease=2m,"
			"unread_ttl=3h,io_timeout=700ms,"
			"user_files=0,user_writers=12,user_space=1%,user_dirty=100%,"
			"max_size=2T,stream_above=64M,dram=1.5G"),
		0);
	assert_int_equal(options.dram_bytes, UINT64_C(1536) << 20);
	assert_int_equal(options.stream_above_bytes, UINT64_C(64) << 20);
	assert_int_equal(options.max_size_bytes, UINT64_C(2) << 40);
	assert_int_equal(options.read_wait_ms, 250);
	assert_int_equal(options.lease_ms, 120000);
	assert_int_equal(options.io_timeout_ms, 700);
	assert_int_equal(options.user_files, 0);
	assert_int_equal(options.user_writers, 12);
	assert_int_equal(options.user_space_percent, 1);
	assert_int_equal(options.user_dirty_percent, 100);
	assert_int_equal(options.unread_ttl_ms, UINT64_C(3) * 3600 * 1000);
	assert_true(options.allow_other);
	assert_true(options.restart);
	assert_int_equal(options.passthrough, KV_PASSTHROUGH_OFF);
	assert_int_equal(options.log_level, KV_LOG_DEBUG);
}

/* A percentage of DRAM is one of the machine's memory. */
static void test_options__dram_percent(void **state)
{
	struct kv_options options;

	(void)state;
	assert_int_equal(parse(&options, "dram=50%"), 0);
	assert_int_equal(options.dram_bytes, memory_bytes() / 2);
}

/* The last of several equal options counts, and empty places between commas are no options. */
static void test_options__last_one_counts(void **state)
{
	struct kv_options options;

	(void)state;
	assert_int_equal(parse(&options, ",passthrough=off,,passthrough=on,"), 0);
	assert_int_equal(options.passthrough, KV_PASSTHROUGH_ON);
	assert_int_equal(parse(&options, ""), 0);
}

/* The ends of a range are allowed, what is beyond them is not. */
static void test_options__range_ends(void **state)
{
	struct kv_options options;

	(void)state;
	assert_int_equal(parse(&options, "dram=16M,read_wait=10m,stream_above=0"), 0);
	assert_int_equal(options.dram_bytes, KV_DRAM_MIN);
	assert_int_equal(options.read_wait_ms, 600000);
	assert_int_equal(options.stream_above_bytes, 0);
	assert_refused("dram=16383K", (const char *const[]){"dram=16383K", "16.0M", "size"});
	assert_refused("dram=0%", (const char *const[]){"dram=0%", "16.0M", "25%"});
	assert_refused("read_wait=601s", (const char *const[]){"read_wait=601s", "0", "600s"});
	assert_int_equal(parse(&options, "io_timeout=100ms"), 0);
	assert_refused(
		"io_timeout=99ms", (const char *const[]){"io_timeout=99ms", "100ms", "600s"});
	assert_refused("lease=601s", (const char *const[]){"lease=601s", "0", "600s"});
}

/* A name that is no option is named in the refusal. */
static void test_options__unknown(void **state)
{
	(void)state;
	assert_refused("allow_other,drum=8G", (const char *const[]){"unknown", "'drum'", "help"});
	assert_refused("DRAM=8G", (const char *const[]){"unknown", "'DRAM'", "help"});
	assert_refused("=8G", (const char *const[]){"unknown", "''", "help"});
}

/* Values that are missing, or stand where none goes, are refused. */
static void test_options__missing_or_surplus_value(void **state)
{
	(void)state;
	assert_refused("dram", (const char *const[]){"dram", "missing", "8G"});
	assert_refused("log=", (const char *const[]){"log", "missing", "debug"});
	assert_refused("allow_other=1", (const char *const[]){"allow_other=1", "no value", "help"});
	assert_refused("allow_other=", (const char *const[]){"allow_other=", "no value", "help"});
}

/* Values of the wrong form are refused with what is allowed. */
static void test_options__bad_values(void **state)
{
	(void)state;
	assert_refused("dram=lots", (const char *const[]){"dram=lots", "bad value", "16.0M"});
	assert_refused("dram=101%", (const char *const[]){"dram=101%", "bad value", "percentage"});
	assert_refused("dram=-8G", (const char *const[]){"dram=-8G", "bad value", "size"});
	assert_refused("max_size=8X", (const char *const[]){"max_size=8X", "bad value", "8G"});
	assert_refused("max_size=5%", (const char *const[]){"max_size=5%", "bad value", "size"});
	assert_refused("user_files=4K", (const char *const[]){"user_files=4K", "number", "0 to"});
	assert_refused("user_space=50", (const char *const[]){"user_space=50", "percentage", "1%"});
	assert_refused("user_space=0%", (const char *const[]){"user_space=0%", "1%", "100%"});
	assert_refused("user_space=101%", (const char *const[]){"user_space=101%", "1%", "100%"});
	assert_refused("user_dirty=1M", (const char *const[]){"user_dirty=1M", "percentage", "1%"});
	assert_refused("read_wait=5 s", (const char *const[]){"read_wait=5 s", "time", "5s"});
	assert_refused("passthrough=yes", (const char *const[]){"yes", "auto", "on or off"});
	assert_refused("log=loud", (const char *const[]){"log=loud", "warning", "info"});
}

/* A text of any length is answered, not overrun. */
static void test_options__too_long(void **state)
{
	char text[1024];

	(void)state;
	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	assert_refused(text, (const char *const[]){"xxx...", "too long", "help"});
	text[255] = '\0';
	assert_refused(text, (const char *const[]){"xxx", "unknown", "'"});
}

/* The help names every option and keeps to 80 columns. */
static void test_options__help(void **state)
{
	static const char *const names[] = {"dram=SIZE|PERCENT", "stream_above=SIZE",
		"max_size=SIZE", "read_wait=TIME", "io_timeout=TIME", "lease=TIME",
		"unread_ttl=TIME", "allow_other", "restart", "passthrough=auto|on|off",
		"log=LEVEL"};
	char *text = NULL;
	size_t size = 0;
	FILE *out = open_memstream(&text, &size);

	(void)state;
	assert_non_null(out);
	kv_options_help(out);
	assert_int_equal(fclose(out), 0);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		assert_non_null(strstr(text, names[i]));
	for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
		assert_true(strlen(line) <= 80);
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_options__defaults),
		cmocka_unit_test(test_options__all_set),
		cmocka_unit_test(test_options__dram_percent),
		cmocka_unit_test(test_options__last_one_counts),
		cmocka_unit_test(test_options__range_ends),
		cmocka_unit_test(test_options__unknown),
		cmocka_unit_test(test_options__missing_or_surplus_value),
		cmocka_unit_test(test_options__bad_values),
		cmocka_unit_test(test_options__too_long),
		cmocka_unit_test(test_options__help),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
