/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbers, sizes and times from text.
 */
#include <errno.h>

#include "fs/parse.h"
#include "tests/unit/unit_fs.h"

struct number_case {
	const char *text;
	int result;
	uint64_t value;
};

static void check_cases(int (*parse)(const char *text, uint64_t *ret_value),
	const struct number_case *cases, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		uint64_t value = 4711;
		int r = parse(cases[i].text, &value);

		if (r != cases[i].result)
			print_error("\"%s\"\n", cases[i].text);
		assert_int_equal(r, cases[i].result);
		assert_int_equal(value, r == 0 ? cases[i].value : 4711);
	}
}

/* A number is all digits, and either fits or is refused. */
static void test_parse__numbers(void **state)
{
	static const struct number_case cases[] = {
		{"0", 0, 0},
		{"007", 0, 7},
		{"18446744073709551615", 0, UINT64_MAX},
		{"18446744073709551616", -ERANGE, 0},
		{"99999999999999999999999", -ERANGE, 0},
		{"99999999999999999999999x", -EINVAL, 0},
		{"", -EINVAL, 0},
		{" 1", -EINVAL, 0},
		{"1 ", -EINVAL, 0},
		{"+1", -EINVAL, 0},
		{"-1", -EINVAL, 0},
		{"0x10", -EINVAL, 0},
		{"1\n", -EINVAL, 0},
	};

	(void)state;
	check_cases(kv_parse_u64, cases, sizeof(cases) / sizeof(cases[0]));
}

/* Sizes take units of 1024, fractions of a unit, and nothing behind that. */
static void test_parse__sizes(void **state)
{
	static const struct number_case cases[] = {
		{"4096", 0, 4096},
		{"0", 0, 0},
		{"1K", 0, 1024},
		{"1k", 0, 1024},
		{"512M", 0, UINT64_C(512) << 20},
		{"8G", 0, UINT64_C(8) << 30},
		{"8GiB", 0, UINT64_C(8) << 30},
		{"8GB", 0, UINT64_C(8) << 30},
		{"8gib", 0, UINT64_C(8) << 30},
		{"1.5T", 0, UINT64_C(3) << 39},
		{"0.5K", 0, 512},
		{"1.0005K", 0, 1024},
		{"2P", 0, UINT64_C(2) << 50},
		{"16383P", 0, UINT64_C(16383) << 50},
		{"16384P", -ERANGE, 0},
		{"16383.9999999999P", 0, UINT64_MAX - 112589},
		{"18446744073709551615", 0, UINT64_MAX},
		{"18446744073709551616", -ERANGE, 0},
		{"18446744073709551616X", -EINVAL, 0},
		{"1.5", -EINVAL, 0},
		{"1.K", -EINVAL, 0},
		{".5K", -EINVAL, 0},
		{"1.0000000000000001K", -EINVAL, 0},
		{"1,5G", -EINVAL, 0},
		{"8GG", -EINVAL, 0},
		{"8Gi", -EINVAL, 0},
		{"8 G", -EINVAL, 0},
		{"8E", -EINVAL, 0},
		{"B", -EINVAL, 0},
		{"8B", -EINVAL, 0},
		{"G", -EINVAL, 0},
		{"", -EINVAL, 0},
		{"-8G", -EINVAL, 0},
		{"25%", -EINVAL, 0},
	};

	(void)state;
	check_cases(kv_parse_size, cases, sizeof(cases) / sizeof(cases[0]));
}

static int parse_of_1000(const char *text, uint64_t *ret_value)
{
	return kv_parse_size_or_percent(text, 1000, ret_value);
}

/* A percentage is a whole number up to 100 of the total. */
static void test_parse__percentages(void **state)
{
	static const struct number_case cases[] = {
		{"25%", 0, 250},
		{"0%", 0, 0},
		{"100%", 0, 1000},
		{"101%", -ERANGE, 0},
		{"99999999999999999999%", -ERANGE, 0},
		{"2.5%", -EINVAL, 0},
		{"%", -EINVAL, 0},
		{"25%%", -EINVAL, 0},
		{"25 %", -EINVAL, 0},
		{"2K", 0, 2048},
	};
	uint64_t value = 0;

	(void)state;
	check_cases(parse_of_1000, cases, sizeof(cases) / sizeof(cases[0]));
	assert_int_equal(kv_parse_size_or_percent("50%", UINT64_MAX, &value), 0);
	assert_int_equal(value, UINT64_MAX / 2);
}

/* Times come in milliseconds whatever their unit, and a bare number is seconds. */
static void test_parse__durations(void **state)
{
	static const struct number_case cases[] = {
		{"250ms", 0, 250},
		{"5s", 0, 5000},
		{"5", 0, 5000},
		{"10m", 0, 600000},
		{"2h", 0, 7200000},
		{"7d", 0, 604800000},
		{"0", 0, 0},
		{"18446744073709551615ms", 0, UINT64_MAX},
		{"18446744073709551615", -ERANGE, 0},
		{"18446744073709551616ms", -ERANGE, 0},
		{"", -EINVAL, 0},
		{"5 s", -EINVAL, 0},
		{"5S", -EINVAL, 0},
		{"1.5s", -EINVAL, 0},
		{"5w", -EINVAL, 0},
		{"ms", -EINVAL, 0},
		{"-5s", -EINVAL, 0},
	};

	(void)state;
	check_cases(kv_parse_duration_ms, cases, sizeof(cases) / sizeof(cases[0]));
}

/* Sizes are printed with a tenth of the largest unit that is not below 1, rounded to nearest. */
static void test_parse__formats_sizes(void **state)
{
	static const struct {
		uint64_t bytes;
		const char *text;
	} cases[] = {
		{0, "0B"},
		{1023, "1023B"},
		{1024, "1.0K"},
		{1536, "1.5K"},
		{UINT64_C(8) << 30, "8.0G"},
		{1048524, "1023.9K"},
		{1048525, "1.0M"},
		{1048575, "1.0M"},
		{UINT64_C(3) << 39, "1.5T"},
		{UINT64_C(5) << 50, "5.0P"},
		{UINT64_MAX, "16.0E"},
	};
	char text[16];

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		assert_string_equal(
			kv_format_size(cases[i].bytes, text, sizeof(text)), cases[i].text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_parse__numbers),
		cmocka_unit_test(test_parse__sizes),
		cmocka_unit_test(test_parse__percentages),
		cmocka_unit_test(test_parse__durations),
		cmocka_unit_test(test_parse__formats_sizes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
