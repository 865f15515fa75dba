/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs pin, kvfs unpin: what is never evicted, for files or all that is below directories.
 */
#include <fts.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/xattr.h>

#include "fs/base.h"
#include "fs/parse.h"
#include "tools/cmd.h"
#include "tools/report.h"

static const char pin_help[] =
	"usage: kvfs pin PATH...\n"
	"\n"
	"Pins files: they are not evicted until they are unpinned or removed. A\n"
	"directory stands for all that is below it, and what is made in it later is\n"
	"pinned, too. Only the owner and root may. At most 7/8 of a quota, and of the\n"
	"store, can be pinned; where no directory's quota holds, users other than root\n"
	"can pin as long as no more than 1/4 of the store is.\n";
static const char unpin_help[] =
	"usage: kvfs unpin PATH...\n"
	"\n"
	"Takes back what kvfs pin did, for files or all that is below directories.\n";

struct pinning {
	const char *command;
	const char *value;
	uint64_t done;
};

static void format_bytes(const struct kv_report *report, const char *key, char text[16])
{
	(void)kv_format_size(kv_report_number(report, key), text, 16);
}

/* Why PATH could not be pinned, in words of its quota. */
static int fail_for_room(const struct pinning *pinning, const char *path, bool quota)
{
	struct kv_report usage;
	char limit[16], pinned[16];

	if (kv_report_read(path, "quota.usage", &usage) < 0)
		return cmd_fail(pinning->command, "%s: too much is pinned", path);
	format_bytes(&usage, "pin_limit", limit);
	format_bytes(&usage, "pinned", pinned);
	kv_report_done(&usage);
	if (quota)
		return cmd_fail(pinning->command,
			"%s: its quota has room for %s of pinned files, and %s are: unpin others "
			"or raise the quota (%" PRIu64 " paths pinned before)",
			path, limit, pinned, pinning->done);
	return cmd_fail(pinning->command,
		"%s: too much of the store is pinned for it to work: unpin others (%" PRIu64
		" paths pinned before)",
		path, pinning->done);
}

static int pin_one(struct pinning *pinning, const char *path)
{
	if (setxattr(path, "user.kvfs.pin", pinning->value, 1, 0) == 0) {
		pinning->done++;
		return 0;
	}
	switch (errno) {
	case ENOENT: /* removed, or evicted, meanwhile */
		return 0;
	case EDQUOT:
	case ENOSPC:
		return fail_for_room(pinning, path, errno == EDQUOT);
	case EPERM:
	case EACCES:
		return cmd_fail(pinning->command, "%s: only its owner and root may", path);
	default:
		return cmd_fail(pinning->command, "%s: %s", path, strerror(errno));
	}
}

static int pin_tree(struct pinning *pinning, FTS *tree)
{
	FTSENT *entry;
	int status = 0;

	while (status == 0 && (entry = fts_read(tree))) {
		switch (entry->fts_info) {
		case FTS_D: /* before what is in it: what comes meanwhile is pinned by it */
		case FTS_F:
			status = pin_one(pinning, entry->fts_accpath);
			break;
		case FTS_DNR:
		case FTS_ERR:
		case FTS_NS:
			if (entry->fts_errno != ENOENT)
				status = cmd_fail(pinning->command, "%s: %s", entry->fts_path,
					strerror(entry->fts_errno));
			break;
		default: /* symlinks, and directories for the second time */
			break;
		}
	}
	return status;
}

static int pin_path(struct pinning *pinning, char *path)
{
	char *paths[] = {path, NULL};
	struct kv_report usage;
	FTS *tree;
	int status;

	/* Elsewhere the attribute would be an ordinary one, and would do nothing. */
	if (cmd_report(pinning->command, path, "quota.usage", &usage) != 0)
		return 1;
	kv_report_done(&usage);
	tree = fts_open(paths, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR | FTS_XDEV, NULL);
	if (!tree)
		return cmd_fail(pinning->command, "%s: %s", path, strerror(errno));
	status = pin_tree(pinning, tree);
	(void)fts_close(tree);
	return status;
}

static int run(int argc, char **argv, const char *value, const char *help)
{
	struct pinning pinning = {.command = argv[0], .value = value};
	int status = 0;

	if (!cmd_options(argc, argv, help, NULL, 0, &status))
		return status;
	if (optind == argc)
		return cmd_bad_usage(argv[0], "PATH is missing");
	for (int i = optind; i < argc && status == 0; i++)
		status = pin_path(&pinning, argv[i]);
	return status;
}

int pin_main(int argc, char **argv)
{
	return run(argc, argv, "1", pin_help);
}

int unpin_main(int argc, char **argv)
{
	return run(argc, argv, "0", unpin_help);
}
