/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs: what a person types. This file only finds the command; each is in its cmd_<name>.c.
 */
#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fs/base.h"
#include "tools/cmd.h"
#include "tools/report.h"
#include "tools/text.h"

/* What getopt calls the long options: above all letters. */
#define LONG_FIRST 256

static const struct {
	const char *name;
	int (*main)(int argc, char **argv);
	const char *arguments;
	const char *summary;
} commands[] = {
	{"format", format_main, "STORE", "make a store"},
	{"mount", mount_main, "STORE DIR", "mount a store; umount DIR ends it"},
	{"status", status_main, "[DIR]", "what a mount is doing"},
	{"stat", stat_main, "FILE...", "where the bytes of files are"},
	{"quota", quota_main, "DIR [SIZE]", "how much a directory may hold"},
	{"pin", pin_main, "PATH...", "never evict these"},
	{"unpin", unpin_main, "PATH...", "take that back"},
	{"retire", retire_main, "DIR", "empty a model's directory at once"},
	{"warm", warm_main, "PATH...", "bring files into DRAM"},
	{"cool", cool_main, "PATH...", "drop files from DRAM"},
	{"evict", evict_main, "PATH...", "remove files from the store, as eviction does"},
	{"scrub", scrub_main, "[DIR]", "read all of a mount's data and check it"},
	{"check", check_main, "STORE", "check and repair a store that is not mounted"},
	{"gpu", gpu_main, "WHAT...", "files in the memory of GPUs"},
};

static void print_help(FILE *out)
{
	(void)fprintf(out, "usage: kvfs COMMAND ...\n\n");
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
		(void)fprintf(out, "  kvfs %-6s %-10s %s\n", commands[i].name,
			commands[i].arguments, commands[i].summary);
	(void)fprintf(out, "\n"
			   "kvfs COMMAND --help explains a command; kvfs --version prints the\n"
			   "version. Exit status: 0, or 1 after one line that says what is wrong;\n"
			   "kvfs check and kvfs scrub have more of them.\n");
}

static void complain(const char *command, const char *format, va_list ap)
{
	_cleanup_free_ char *text = NULL;

	if (vasprintf(&text, format, ap) < 0)
		text = NULL;
	(void)fprintf(stderr, "kvfs %s: ", command);
	kv_text_print(stderr, text ? text : "out of memory");
}

int cmd_fail(const char *command, const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	complain(command, format, ap);
	va_end(ap);
	(void)fputc('\n', stderr);
	return 1;
}

int cmd_bad_usage(const char *command, const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	complain(command, format, ap);
	va_end(ap);
	(void)fprintf(stderr, "; see kvfs %s --help\n", command);
	return 1;
}

int cmd_getopt(int argc, char **argv, const char *shorts, const struct option *longs)
{
	int c;

	opterr = 0;
	c = getopt_long(argc, argv, shorts, longs, NULL);
	if (c == ':') {
		(void)cmd_bad_usage(argv[0], "%s needs a value", argv[optind - 1]);
		return CMD_BAD_OPTION;
	}
	if (c != '?')
		return c;
	/* An unknown letter may stand among others in one argument; an unknown word is one. */
	if (optopt != 0 && strncmp(argv[optind - 1], "--", 2) != 0)
		(void)cmd_bad_usage(argv[0], "unknown option -%c", optopt);
	else if (optopt != 0)
		(void)cmd_bad_usage(argv[0], "%s takes no value", argv[optind - 1]);
	else
		(void)cmd_bad_usage(argv[0], "unknown option %s", argv[optind - 1]);
	return CMD_BAD_OPTION;
}

bool cmd_options(int argc, char **argv, const char *help, const struct cmd_option *options,
	size_t count, int *ret_status)
{
	struct option longs[CMD_OPTIONS_MAX + 2] = {{"help", no_argument, NULL, 'h'}};
	char shorts[CMD_OPTIONS_MAX + 3] = ":h";
	int c;

	assert(count <= CMD_OPTIONS_MAX);
	for (size_t i = 0; i < count; i++) {
		int value = options[i].value ? required_argument : no_argument;

		longs[i + 1] = (struct option){options[i].name, value, NULL, LONG_FIRST + (int)i};
		if (options[i].letter)
			strncat(shorts, &options[i].letter, 1);
	}
	while ((c = cmd_getopt(argc, argv, shorts, longs)) != -1) {
		size_t i = 0;

		while (i < count && c != LONG_FIRST + (int)i && c != options[i].letter)
			i++;
		if (i == count) {
			if (c == 'h')
				(void)fputs(help, stdout);
			*ret_status = c != 'h'; /* else it was complained about */
			return false;
		}
		if (options[i].flag)
			*options[i].flag = true;
		else
			*options[i].value = optarg;
	}
	return true;
}

int cmd_report(
	const char *command, const char *path, const char *name, struct kv_report *ret_report)
{
	int r = kv_report_read(path, name, ret_report);

	if (r == -ENODATA)
		return cmd_fail(command, "%s is not on a kvfs mount", path);
	return r < 0 ? cmd_fail(command, "%s: %s", path, strerror(-r)) : 0;
}

static int run(int argc, char **argv)
{
	if (argc < 2) {
		print_help(stderr);
		return 1;
	}
	if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0 ||
		strcmp(argv[1], "-h") == 0) {
		print_help(stdout);
		return 0;
	}
	if (strcmp(argv[1], "--version") == 0) {
		(void)printf("kvfs %s\n", KV_VERSION);
		return 0;
	}
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		if (strcmp(argv[1], commands[i].name) == 0)
			return commands[i].main(argc - 1, argv + 1);
	}
	(void)fprintf(stderr, "kvfs: unknown command '%.64s'; see kvfs --help\n", argv[1]);
	return 1;
}

int main(int argc, char **argv)
{
	int status = run(argc, argv);

	if (fflush(stdout) != 0 || ferror(stdout)) {
		perror("kvfs: cannot write the output");
		return 1;
	}
	return status;
}
