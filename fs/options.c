/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of mount options, and what is made from it: the defaults, the parser, the help text.
 */
#include "fs/options.h"

#include <errno.h>
#include <string.h>

#include "fs/base.h"
#include "fs/dram.h"
#include "fs/parse.h"

/* Longest option text taken apart here: far above what mount(2) itself hands on (a page). */
#define OPTION_LENGTH_MAX 255
#define HELP_COLUMN 25
/* As much of a bad name or value is quoted, so that the rest of the line fits a terminal. */
#define QUOTE "%.64s"

enum option_type {
	TYPE_SIZE,
	TYPE_SIZE_OR_PERCENT, /* of the machine's memory */
	TYPE_DURATION,
	TYPE_NUMBER,
	TYPE_PERCENT,
	TYPE_FLAG, /* takes no value */
	TYPE_PASSTHROUGH,
	TYPE_LOG_LEVEL,
};

struct option {
	const char *name;
	const char *value; /* what --help calls the value; NULL for flags */
	const char *fallback;
	const char *help;
	uint64_t min;
	uint64_t max;
	size_t offset;
	enum option_type type;
};

#define OPTION(field) offsetof(struct kv_options, field)

static const struct option options_table[] = {
	{
		.name = "dram",
		.value = "SIZE|PERCENT",
		.fallback = "25%",
		.help = "budget of the DRAM tier; PERCENT is of the machine's memory",
		.min = KV_DRAM_MIN,
		.max = KV_FILE_SIZE_MAX,
		.offset = OPTION(dram_bytes),
		.type = TYPE_SIZE_OR_PERCENT,
	},
	{
		.name = "stream_above",
		.value = "SIZE",
		.fallback = "256M",
		.help = "larger files are served while they are still being read in",
		.max = KV_FILE_SIZE_MAX,
		.offset = OPTION(stream_above_bytes),
		.type = TYPE_SIZE,
	},
	{
		.name = "max_size",
		.value = "SIZE",
		.fallback = "0",
		.help = "quota of the store; 0: all of its devices",
		.max = KV_FILE_SIZE_MAX,
		.offset = OPTION(max_size_bytes),
		.type = TYPE_SIZE,
	},
	{
		.name = "read_wait",
		.value = "TIME",
		.fallback = "5s",
		.help = "how long an open waits for a file that is being written for the first "
			"time",
		.max = UINT64_C(10) * 60 * 1000,
		.offset = OPTION(read_wait_ms),
		.type = TYPE_DURATION,
	},
	{
		.name = "io_timeout",
		.value = "TIME",
		.fallback = "5s",
		.help = "how long a call waits for a device that does not answer",
		.min = 100,
		.max = UINT64_C(10) * 60 * 1000,
		.offset = OPTION(io_timeout_ms),
		.type = TYPE_DURATION,
	},
	{
		.name = "lease",
		.value = "TIME",
		.fallback = "10s",
		.help = "how long a file that was looked up or opened is not evicted",
		.max = UINT64_C(10) * 60 * 1000,
		.offset = OPTION(lease_ms),
		.type = TYPE_DURATION,
	},
	{
		.name = "unread_ttl",
		.value = "TIME",
		.fallback = "0s",
		.help = "files never read back within that are evicted first; 0s: off",
		.max = UINT64_C(366) * 24 * 3600 * 1000,
		.offset = OPTION(unread_ttl_ms),
		.type = TYPE_DURATION,
	},
	{
		.name = "user_files",
		.value = "NUMBER",
		.fallback = "65536",
		.help = "files that one user may have open; 0: no limit",
		.max = UINT32_MAX,
		.offset = OPTION(user_files),
		.type = TYPE_NUMBER,
	},
	{
		.name = "user_writers",
		.value = "NUMBER",
		.fallback = "8192",
		.help = "how many of them for writing; 0: no limit",
		.max = UINT32_MAX,
		.offset = OPTION(user_writers),
		.type = TYPE_NUMBER,
	},
	{
		.name = "user_space",
		.value = "PERCENT",
		.fallback = "90%",
		.help = "share of the store for what one user has not published; 100%: all",
		.min = 1,
		.max = 100,
		.offset = OPTION(user_space_percent),
		.type = TYPE_PERCENT,
	},
	{
		.name = "user_dirty",
		.value = "PERCENT",
		.fallback = "75%",
		.help = "share of half the DRAM tier for what one user has not written back",
		.min = 1,
		.max = 100,
		.offset = OPTION(user_dirty_percent),
		.type = TYPE_PERCENT,
	},
	{
		.name = "allow_other",
		.fallback = "off",
		.help = "let other users in; owners and modes are always enforced",
		.offset = OPTION(allow_other),
		.type = TYPE_FLAG,
	},
	{
		.name = "restart",
		.fallback = "off",
		.help = "start the daemon again when it was killed, without unmounting",
		.offset = OPTION(restart),
		.type = TYPE_FLAG,
	},
	{
		.name = "passthrough",
		.value = "auto|on|off",
		.fallback = "auto",
		.help = "hand reads of resident files to the kernel; on: fail where it cannot",
		.offset = OPTION(passthrough),
		.type = TYPE_PASSTHROUGH,
	},
	{
		.name = "log",
		.value = "LEVEL",
		.fallback = "info",
		.help = "error, warning, info or debug",
		.offset = OPTION(log_level),
		.type = TYPE_LOG_LEVEL,
	},
};

static const struct {
	const char *name;
	enum kv_passthrough_mode mode;
} passthrough_modes[] = {
	{"auto", KV_PASSTHROUGH_AUTO},
	{"on", KV_PASSTHROUGH_ON},
	{"off", KV_PASSTHROUGH_OFF},
};

static uint64_t memory_bytes(void)
{
	long pages = sysconf(_SC_PHYS_PAGES);
	long page_size = sysconf(_SC_PAGESIZE);

	return pages > 0 && page_size > 0 ? (uint64_t)pages * (uint64_t)page_size : 0;
}

static int parse_number(const struct option *option, const char *value, uint64_t *ret_number)
{
	uint64_t number = 0;
	int r;

	if (option->type == TYPE_DURATION)
		r = kv_parse_duration_ms(value, &number);
	else if (option->type == TYPE_SIZE_OR_PERCENT)
		r = kv_parse_size_or_percent(value, memory_bytes(), &number);
	else if (option->type == TYPE_NUMBER)
		r = kv_parse_u64(value, &number);
	else if (option->type == TYPE_PERCENT)
		r = strchr(value, '%') ? kv_parse_size_or_percent(value, 100, &number) : -EINVAL;
	else
		r = kv_parse_size(value, &number);
	if (r < 0)
		return r;
	if (number < option->min || number > option->max)
		return -ERANGE;
	*ret_number = number;
	return 0;
}

static int parse_passthrough(const char *value, enum kv_passthrough_mode *ret_mode)
{
	for (size_t i = 0; i < sizeof(passthrough_modes) / sizeof(passthrough_modes[0]); i++) {
		if (strcmp(value, passthrough_modes[i].name) == 0) {
			*ret_mode = passthrough_modes[i].mode;
			return 0;
		}
	}
	return -EINVAL;
}

/* Stores VALUE in OPTION's field of OPTIONS; that is unchanged on failure. */
static int set_value(struct kv_options *options, const struct option *option, const char *value)
{
	void *field = (char *)options + option->offset;
	enum kv_log_level level;

	switch (option->type) {
	case TYPE_SIZE:
	case TYPE_SIZE_OR_PERCENT:
	case TYPE_DURATION:
	case TYPE_NUMBER:
	case TYPE_PERCENT:
		return parse_number(option, value, field);
	case TYPE_FLAG:
		*(bool *)field = true;
		return 0;
	case TYPE_PASSTHROUGH:
		return parse_passthrough(value, field);
	case TYPE_LOG_LEVEL:
		level = kv_log_level_parse(value);
		if (level == _KV_LOG_INVALID)
			return -EINVAL;
		*(enum kv_log_level *)field = level;
		return 0;
	}
	return -EINVAL;
}

void kv_options_init(struct kv_options *options)
{
	memset(options, 0, sizeof(*options));
	for (size_t i = 0; i < sizeof(options_table) / sizeof(options_table[0]); i++) {
		const struct option *option = &options_table[i];

		if (option->type == TYPE_FLAG)
			continue;
		/* Only a share of a very small memory can fall below the minimum. */
		if (set_value(options, option, option->fallback) < 0) {
			assert(option->type == TYPE_SIZE_OR_PERCENT);
			*(uint64_t *)(void *)((char *)options + option->offset) = option->min;
		}
	}
}

/* What OPTION takes, in words, for an error message. */
static void describe_allowed(const struct option *option, char *text, size_t text_size)
{
	char min[16], max[16];

	switch (option->type) {
	case TYPE_SIZE:
	case TYPE_SIZE_OR_PERCENT:
		(void)snprintf(text, text_size, "a size%s such as %s, from %s to %s",
			option->type == TYPE_SIZE_OR_PERCENT ? " or percentage" : "",
			option->type == TYPE_SIZE_OR_PERCENT ? "8G or 25%" : "512M or 8G",
			kv_format_size(option->min, min, sizeof(min)),
			kv_format_size(option->max, max, sizeof(max)));
		break;
	case TYPE_DURATION:
		(void)snprintf(text, text_size, "a time such as 250ms or 5s, from %llu%s to %llus",
			(unsigned long long)option->min, option->min > 0 ? "ms" : "",
			(unsigned long long)(option->max / 1000));
		break;
	case TYPE_NUMBER:
		(void)snprintf(text, text_size, "a number from %llu to %llu",
			(unsigned long long)option->min, (unsigned long long)option->max);
		break;
	case TYPE_PERCENT:
		(void)snprintf(text, text_size, "a percentage from %llu%% to %llu%%",
			(unsigned long long)option->min, (unsigned long long)option->max);
		break;
	case TYPE_FLAG:
		(void)snprintf(text, text_size, "no value");
		break;
	case TYPE_PASSTHROUGH:
		(void)snprintf(text, text_size, "auto, on or off");
		break;
	case TYPE_LOG_LEVEL:
		(void)snprintf(text, text_size, "error, warning, info or debug");
		break;
	}
}

static const struct option *find_option(const char *name)
{
	for (size_t i = 0; i < sizeof(options_table) / sizeof(options_table[0]); i++) {
		if (strcmp(name, options_table[i].name) == 0)
			return &options_table[i];
	}
	return NULL;
}

/* Parses one "name" or "name=value"; TEXT is cut in two at the sign. */
static int parse_one(struct kv_options *options, char *text, char *ret_error, size_t error_size)
{
	const struct option *option;
	char *value = strchr(text, '=');
	char allowed[120];

	if (value)
		*value++ = '\0';
	option = find_option(text);
	if (!option) {
		(void)snprintf(ret_error, error_size,
			"unknown option '" QUOTE "'; see kvfs mount --help for those there are",
			text);
		return -EINVAL;
	}
	describe_allowed(option, allowed, sizeof(allowed));
	if (value && option->type == TYPE_FLAG) {
		(void)snprintf(ret_error, error_size,
			"option " QUOTE "=" QUOTE ": takes no value; see kvfs mount --help", text,
			value);
		return -EINVAL;
	}
	if (option->type != TYPE_FLAG && (!value || *value == '\0')) {
		(void)snprintf(ret_error, error_size,
			"option %s: the value is missing, give %s; see kvfs mount --help", text,
			allowed);
		return -EINVAL;
	}
	if (set_value(options, option, value) < 0) {
		(void)snprintf(ret_error, error_size,
			"option " QUOTE "=" QUOTE ": bad value, give %s; see kvfs mount --help",
			text, value, allowed);
		return -EINVAL;
	}
	return 0;
}

/* What was quoted may hold anything; the message is one line. */
static void make_line(char *text)
{
	for (; *text != '\0'; text++)
		if ((unsigned char)*text < ' ' || *text == 0x7f)
			*text = '?';
}

int kv_options_parse(
	struct kv_options *options, const char *text, char *ret_error, size_t ret_error_size)
{
	struct kv_options parsed = *options;

	while (*text != '\0') {
		char one[OPTION_LENGTH_MAX + 1];
		size_t length = strcspn(text, ",");
		int r;

		if (length > OPTION_LENGTH_MAX) {
			(void)snprintf(ret_error, ret_error_size,
				"option '%.32s...' is too long; see kvfs mount --help", text);
			return -EINVAL;
		}
		memcpy(one, text, length);
		one[length] = '\0';
		text += length;
		if (*text == ',')
			text++;
		if (length == 0)
			continue;
		r = parse_one(&parsed, one, ret_error, ret_error_size);
		if (r < 0) {
			make_line(ret_error);
			return r;
		}
	}
	*options = parsed;
	return 0;
}

void kv_options_help(FILE *out)
{
	for (size_t i = 0; i < sizeof(options_table) / sizeof(options_table[0]); i++) {
		const struct option *option = &options_table[i];
		char left[HELP_COLUMN];

		(void)snprintf(left, sizeof(left), "%s%s%s", option->name, option->value ? "=" : "",
			option->value ? option->value : "");
		(void)fprintf(out, "  %-*s(default %s)\n      %s\n", HELP_COLUMN, left,
			option->fallback, option->help);
	}
}
