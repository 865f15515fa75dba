/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the commands of `kvfs` share: how they are found, how they refuse, how they read options.
 *
 * A command is a <name>_main in cmd_<name>.c; it returns the exit status: 0, or 1 after one line on
 * stderr. Single-threaded.
 */
#ifndef KVFS_TOOLS_CMD_H
#define KVFS_TOOLS_CMD_H

#include <getopt.h>
#include <stdbool.h>
#include <stddef.h>

struct kv_report;

/* Returned by cmd_getopt for an option it has complained about. */
#define CMD_BAD_OPTION '?'

int check_main(int argc, char **argv);
int cool_main(int argc, char **argv);
int evict_main(int argc, char **argv);
int format_main(int argc, char **argv);
int gpu_main(int argc, char **argv);
int mount_main(int argc, char **argv);
int pin_main(int argc, char **argv);
int quota_main(int argc, char **argv);
int retire_main(int argc, char **argv);
int scrub_main(int argc, char **argv);
int stat_main(int argc, char **argv);
int status_main(int argc, char **argv);
int unpin_main(int argc, char **argv);
int warm_main(int argc, char **argv);

/* Prints "kvfs COMMAND: ..." on stderr. Returns 1, for the caller to return. */
int cmd_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same, and points to the command's --help. */
int cmd_bad_usage(const char *command, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/*
 * getopt_long, but with messages of our own. SHORTS begins with ':'. Returns the option, -1 at the
 * end, or CMD_BAD_OPTION after it has complained.
 */
int cmd_getopt(int argc, char **argv, const char *shorts, const struct option *longs);

/* An option of a command: a switch, or one with a value. Where both go belongs to the caller. */
struct cmd_option {
	const char *name;   /* without its dashes */
	char letter;        /* of its short form; 0: it has none */
	bool *flag;         /* set to true */
	const char **value; /* or this to the argument's text */
};
#define CMD_OPTIONS_MAX 4u

/*
 * Reads OPTIONS, COUNT of them, and --help, which prints HELP. True: go on, optind is behind them.
 * False: the command ends, with *ret_status.
 */
bool cmd_options(int argc, char **argv, const char *help, const struct cmd_option *options,
	size_t count, int *ret_status);

/* Reads the report NAME of PATH (kv_report_read), for the caller to free. Returns 0, or 1 after it
 * has complained. */
int cmd_report(
	const char *command, const char *path, const char *name, struct kv_report *ret_report);

#endif
