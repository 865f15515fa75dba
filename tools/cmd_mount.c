/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs mount: checks what can be checked at once, then becomes kvfsd, which does the rest.
 */
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "fs/base.h"
#include "fs/control.h"
#include "fs/options.h"
#include "tools/cmd.h"

/* Longest option text, as mount(2) has it. */
#define OPTIONS_SIZE 4096

struct arguments {
	const char *store;
	const char *directory;
	char options[OPTIONS_SIZE];
	bool foreground;
};

static void print_help(void)
{
	(void)fputs(
		"usage: kvfs mount STORE DIR [-o OPTION[,OPTION]...] [-f]\n"
		"\n"
		"Mounts the store STORE on the directory DIR by starting kvfsd, and returns when\n"
		"it is mounted. umount DIR ends it, after everything was written to the store.\n"
		"\n"
		"  -f, --foreground  stay in the foreground and log to stderr\n"
		"  -o OPTIONS        options, separated by commas:\n"
		"\n",
		stdout);
	kv_options_help(stdout);
	(void)fputs(
		"\n"
		"Sizes such as 512M or 8G, times such as 250ms or 5s. The environment variable\n"
		"KVFSD names another kvfsd.\n"
		"\n"
		"Example: kvfs mount /var/lib/kvfs /kv -o dram=8G,allow_other\n",
		stdout);
}

static int add_options(struct arguments *arguments, const char *text)
{
	size_t used = strlen(arguments->options);
	int n = snprintf(arguments->options + used, sizeof(arguments->options) - used, "%s%s",
		used > 0 ? "," : "", text);

	return n < 0 || (size_t)n >= sizeof(arguments->options) - used ? -E2BIG : 0;
}

static int parse_arguments(int argc, char **argv, struct arguments *arguments)
{
	static const struct option longs[] = {
		{"options", required_argument, NULL, 'o'},
		{"foreground", no_argument, NULL, 'f'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	int c;

	while ((c = cmd_getopt(argc, argv, ":o:fh", longs)) != -1) {
		switch (c) {
		case 'o':
			if (add_options(arguments, optarg) < 0)
				return cmd_bad_usage(argv[0], "the options are too long");
			break;
		case 'f':
			arguments->foreground = true;
			break;
		case 'h':
			print_help();
			return -1;
		default:
			return 1;
		}
	}
	if (argc - optind != 2)
		return cmd_bad_usage(argv[0], argc - optind > 2 ? "too many arguments"
					      : argc == optind  ? "STORE and DIR are missing"
								: "DIR is missing");
	arguments->store = argv[optind];
	arguments->directory = argv[optind + 1];
	return 0;
}

static int check_directory(const char *command, const char *path)
{
	struct stat st;

	if (stat(path, &st) < 0)
		return cmd_fail(command, "%s: %s; %s", path, strerror(errno),
			errno == ENOENT     ? "make the directory first"
			: errno == ENOTCONN ? "a dead mount is left there: umount it first"
					    : "choose another directory");
	if (!S_ISDIR(st.st_mode))
		return cmd_fail(command, "%s: not a directory", path);
	if (st.st_ino == KV_ROOT_INO && getxattr(path, KV_CONTROL_PREFIX "status", NULL, 0) >= 0)
		return cmd_fail(
			command, "%s: a kvfs is mounted there already; umount it first", path);
	return 0;
}

/* kvfsd is the one that was built with this program, else the installed one. */
static const char *find_daemon(char *buffer, size_t size)
{
	static const char beside[] = "/../fs/kvfsd";
	const char *chosen = getenv("KVFSD");
	ssize_t length;
	char *slash;

	if (chosen && *chosen != '\0')
		return chosen;
	length = readlink("/proc/self/exe", buffer, size - sizeof(beside));
	if (length > 0) {
		buffer[length] = '\0';
		slash = strrchr(buffer, '/');
		if (slash) {
			memcpy(slash, beside, sizeof(beside));
			if (access(buffer, X_OK) == 0)
				return buffer;
		}
	}
	return KV_SBINDIR "/kvfsd";
}

int mount_main(int argc, char **argv)
{
	static struct arguments arguments;
	struct kv_options options;
	char daemon[PATH_MAX], error[512];
	const char *args[8];
	size_t count = 0;
	int r = parse_arguments(argc, argv, &arguments);

	if (r != 0)
		return r < 0 ? 0 : r;
	kv_options_init(&options);
	if (kv_options_parse(&options, arguments.options, error, sizeof(error)) < 0)
		return cmd_fail(argv[0], "%s", error);
	r = check_directory(argv[0], arguments.directory);
	if (r != 0)
		return r;
	args[count++] = find_daemon(daemon, sizeof(daemon));
	args[count++] = arguments.store;
	args[count++] = arguments.directory;
	if (arguments.options[0] != '\0') {
		args[count++] = "-o";
		args[count++] = arguments.options;
	}
	if (arguments.foreground)
		args[count++] = "-f";
	args[count] = NULL;
	(void)execv(args[0], (char *const *)args);
	return cmd_fail(argv[0], "cannot run %s: %s; KVFSD can name it", args[0], strerror(errno));
}
