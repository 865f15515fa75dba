/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs quota: how much a directory, with all below it, may hold.
 */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "fs/base.h"
#include "fs/parse.h"
#include "tools/cmd.h"
#include "tools/report.h"
#include "tools/text.h"

static const char help_text[] =
	"usage: kvfs quota DIR [SIZE|none] [--json]\n"
	"\n"
	"With SIZE, such as 8G: limits what DIR may hold, with all below it down to\n"
	"directories that have a quota of their own. When it is full, its own files\n"
	"go, the one used longest ago first. none takes the quota away. Only root may.\n"
	"Without: shows the quota that holds for DIR, or a file, how much of it is used\n"
	"and how much is pinned.\n"
	"\n"
	"  --json  print a JSON object, sizes in bytes\n";

/* The directory above PATH, or PATH itself, that has inode INO; "" if it is out of reach. */
static void find_directory(const char *path, uint64_t ino, char ret_path[PATH_MAX])
{
	struct stat st;

	if (!realpath(path, ret_path)) {
		ret_path[0] = '\0';
		return;
	}
	while (stat(ret_path, &st) == 0 && st.st_ino != ino) {
		char *slash = strrchr(ret_path, '/');

		if (!slash || slash == ret_path)
			break;
		*slash = '\0';
	}
	if (stat(ret_path, &st) < 0 || st.st_ino != ino)
		ret_path[0] = '\0';
}

static void print_text(const struct kv_report *usage, const char *path)
{
	char limit[16], used[16], pinned[16], top[PATH_MAX];
	uint64_t limit_bytes = kv_report_number(usage, "limit");
	uint64_t used_bytes = kv_report_number(usage, "used") + kv_report_number(usage, "promised");

	kv_text_print(stdout, path);
	(void)printf(": limit %s, used %s (%" PRIu64 " %%), pinned %s, %" PRIu64
		     " files and directories\n",
		kv_format_size(limit_bytes, limit, sizeof(limit)),
		kv_format_size(used_bytes, used, sizeof(used)),
		limit_bytes > 0 ? used_bytes * 100 / limit_bytes : 0,
		kv_format_size(kv_report_number(usage, "pinned"), pinned, sizeof(pinned)),
		kv_report_number(usage, "inodes"));
	if (kv_report_number(usage, "own"))
		return;
	find_directory(path, kv_report_number(usage, "directory_ino"), top);
	(void)printf("  it has no quota of its own: these are of ");
	kv_text_print(stdout, top[0] != '\0' ? top : "a directory above it");
	(void)printf("\n");
}

static void print_json(const struct kv_report *usage, const char *path)
{
	struct kv_json json = {.out = stdout};

	kv_json_open(&json, NULL, '{');
	kv_json_text(&json, "path", path);
	for (size_t i = 0; i < usage->count; i++) {
		if (strcmp(usage->lines[i].key, "own") == 0)
			kv_json_bool(&json, "own", kv_report_number(usage, "own"));
		else
			kv_report_line_to_json(&usage->lines[i], &json);
	}
	kv_json_close(&json, '}');
}

static void show(const struct kv_report *usage, const char *path, bool json)
{
	if (json)
		print_json(usage, path);
	else
		print_text(usage, path);
}

static int set(const char *command, const char *path, const char *size)
{
	if (setxattr(path, "user.kvfs.quota", size, strlen(size), 0) == 0)
		return 0;
	switch (errno) {
	case EPERM:
	case EACCES:
		return cmd_fail(command, "%s: only root may set a quota", path);
	case ENODATA:
		return cmd_fail(command, "%s: it has no quota of its own", path);
	case ENOSPC:
		return cmd_fail(command,
			"%s: there are 1023 quotas already, and no more are possible: take one "
			"away with kvfs quota DIR none",
			path);
	case EDQUOT:
		return cmd_fail(command,
			"%s: more is pinned than %s leaves room for: see kvfs quota %s, and "
			"kvfs unpin",
			path, size, path);
	case EINVAL:
		return cmd_fail(
			command, "%s: the quota of the mount itself is its option max_size", path);
	case ERANGE:
		return cmd_fail(command, "%s: a quota is 1M at least", path);
	default:
		return cmd_fail(command, "%s: %s", path, strerror(errno));
	}
}

/* Elsewhere than on a kvfs mount the attribute would be an ordinary one, and would do nothing. */
static int set_or_show(const char *command, const char *path, const char *size, bool json)
{
	struct kv_report usage;
	struct stat st;
	int status = 0;

	if (stat(path, &st) < 0)
		return cmd_fail(command, "%s: %s", path, strerror(errno));
	if (cmd_report(command, path, "quota.usage", &usage) != 0)
		return 1;
	if (!size)
		show(&usage, path, json);
	else if (S_ISDIR(st.st_mode))
		status = set(command, path, size);
	else
		status = cmd_fail(command, "%s: not a directory", path);
	kv_report_done(&usage);
	return status;
}

int quota_main(int argc, char **argv)
{
	bool json = false;
	const struct cmd_option options[] = {{.name = "json", .flag = &json}};
	const char *size;
	uint64_t bytes;
	int status;

	if (!cmd_options(argc, argv, help_text, options, 1, &status))
		return status;
	if (optind == argc)
		return cmd_bad_usage(argv[0], "DIR is missing");
	if (argc - optind > 2)
		return cmd_bad_usage(argv[0], "too many arguments");
	size = argc - optind == 2 ? argv[optind + 1] : NULL;
	if (size && strcmp(size, "none") != 0 && kv_parse_size(size, &bytes) < 0)
		return cmd_bad_usage(
			argv[0], "'%.64s' is no size, give one such as 8G, or none", size);
	return set_or_show(argv[0], argv[optind], size, json);
}
