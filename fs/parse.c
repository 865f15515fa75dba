/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text to numbers, and sizes to text. All arithmetic is in integers of known width, so that no
 * locale and no rounding of floating point can change what a user typed.
 */
#include "fs/parse.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* More digits behind the point than that name less than a byte of any unit. */
#define FRACTION_DIGITS_MAX 15

static const char unit_letters[] = "KMGTPE";

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* Reads the digits at *TEXT and moves *TEXT behind them; there must be one at least. */
static int take_digits(const char **text, uint64_t *ret_value)
{
	const char *p = *text;
	uint64_t value = 0;
	bool overflow = false;

	if (!is_digit(*p))
		return -EINVAL;
	for (; is_digit(*p); p++) {
		overflow |= __builtin_mul_overflow(value, 10u, &value);
		overflow |= __builtin_add_overflow(value, (unsigned)(*p - '0'), &value);
	}
	*text = p;
	if (overflow)
		return -ERANGE;
	*ret_value = value;
	return 0;
}

int kv_parse_u64(const char *text, uint64_t *ret_value)
{
	uint64_t value = 0;
	int r = take_digits(&text, &value);

	if (r != -EINVAL && *text != '\0')
		return -EINVAL;
	if (r < 0)
		return r;
	*ret_value = value;
	return 0;
}

/* The unit that TEXT is, all of it: "K", "kB", "KiB"... Without a letter it is bytes. */
static int parse_unit(const char *text, unsigned *ret_shift)
{
	const char *letter;

	if (*text == '\0') {
		*ret_shift = 0;
		return 0;
	}
	letter = strchr(unit_letters, *text >= 'a' ? *text - 'a' + 'A' : *text);
	if (!letter || *letter == 'E')
		return -EINVAL;
	text++;
	if (*text != '\0' && strcasecmp(text, "B") != 0 && strcasecmp(text, "iB") != 0)
		return -EINVAL;
	*ret_shift = 10 * (unsigned)(letter - unit_letters + 1);
	return 0;
}

/* Reads ".5" at *TEXT, if there is a point, as FRACTION / SCALE. */
static int take_fraction(const char **text, uint64_t *ret_fraction, uint64_t *ret_scale)
{
	const char *start;

	*ret_fraction = 0;
	*ret_scale = 1;
	if (**text != '.')
		return 0;
	start = ++*text;
	if (take_digits(text, ret_fraction) < 0 || *text - start > FRACTION_DIGITS_MAX)
		return -EINVAL;
	for (const char *p = start; p < *text; p++)
		*ret_scale *= 10;
	return 0;
}

int kv_parse_size(const char *text, uint64_t *ret_bytes)
{
	uint64_t whole = 0, fraction, scale;
	unsigned __int128 bytes;
	unsigned shift;
	int whole_result = take_digits(&text, &whole);
	int r;

	if (whole_result == -EINVAL)
		return whole_result;
	r = take_fraction(&text, &fraction, &scale);
	if (r < 0)
		return r;
	r = parse_unit(text, &shift);
	if (r < 0)
		return r;
	if (scale > 1 && shift == 0)
		return -EINVAL;
	if (whole_result < 0)
		return whole_result;
	bytes = ((unsigned __int128)whole << shift) +
		((unsigned __int128)fraction << shift) / scale;
	if (bytes > UINT64_MAX)
		return -ERANGE;
	*ret_bytes = (uint64_t)bytes;
	return 0;
}

int kv_parse_size_or_percent(const char *text, uint64_t total_bytes, uint64_t *ret_bytes)
{
	const char *p = text;
	uint64_t percent = 0;
	int r = take_digits(&p, &percent);

	if (r == -EINVAL || strcmp(p, "%") != 0)
		return kv_parse_size(text, ret_bytes);
	if (r < 0 || percent > 100)
		return -ERANGE;
	*ret_bytes = (uint64_t)((unsigned __int128)total_bytes * percent / 100);
	return 0;
}

int kv_parse_duration_ms(const char *text, uint64_t *ret_ms)
{
	static const struct {
		const char *name;
		uint64_t ms;
	} units[] = {
		{"ms", 1},
		{"s", 1000},
		{"", 1000},
		{"m", 60 * 1000},
		{"h", 60 * 60 * 1000},
		{"d", 24 * 60 * 60 * 1000},
	};
	uint64_t value = 0;
	int r = take_digits(&text, &value);

	if (r == -EINVAL)
		return r;
	for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
		if (strcmp(text, units[i].name) != 0)
			continue;
		if (r < 0 || __builtin_mul_overflow(value, units[i].ms, &value))
			return -ERANGE;
		*ret_ms = value;
		return 0;
	}
	return -EINVAL;
}

char *kv_format_size(uint64_t bytes, char *text, size_t text_size)
{
	unsigned unit = 0;
	unsigned __int128 tenths;

	if (bytes < 1024) {
		(void)snprintf(text, text_size, "%uB", (unsigned)bytes);
		return text;
	}
	/* Rounded to the nearest tenth; 1023.95K and more is shown as 1.0M. */
	do {
		unsigned shift = 10 * ++unit;

		tenths = ((unsigned __int128)bytes * 10 + (UINT64_C(1) << (shift - 1))) >> shift;
	} while (tenths >= 10240 && unit_letters[unit] != '\0');
	(void)snprintf(text, text_size, "%u.%u%c", (unsigned)(tenths / 10), (unsigned)(tenths % 10),
		unit_letters[unit - 1]);
	return text;
}
