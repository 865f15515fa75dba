/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs cool and kvfs evict: drop files from DRAM, or from the store.
 */
#include <inttypes.h>
#include <stdio.h>
#include <sys/ioctl.h>

#include "fs/base.h"
#include "fs/kvfs_ioctl.h"
#include "fs/parse.h"
#include "tools/cmd.h"
#include "tools/walk.h"

/* Who has just closed a file has it open until the kernel's RELEASE has come: all waits for that
 * together, and one of them. */
#define PATIENCE_MS 1000u
#define PAUSE_MS 10u

static const char cool_help[] =
	"usage: kvfs cool PATH... [--quiet]\n"
	"\n"
	"Drops files on a kvfs mount from DRAM, directories with all that is below them.\n"
	"What is not on a device yet is written first. Files stay in the store. Files\n"
	"that are open or being written are named, and left as they are.\n"
	"\n"
	"  -q, --quiet  print no summary\n";

static const char evict_help[] =
	"usage: kvfs evict PATH... [--force] [--quiet]\n"
	"\n"
	"Removes files from the store of a kvfs mount, directories with all that is\n"
	"below them, as eviction does: all names of a file go, its space is freed, and\n"
	"the directories stay. Files that are open, being written, pinned, or leased\n"
	"(opened in the last seconds) are named, and kept.\n"
	"\n"
	"  -f, --force  leased ones too\n"
	"  -q, --quiet  print no summary\n";

struct drop {
	const char *command;
	unsigned long request;
	unsigned flags;
	bool quiet;
	unsigned patience_ms; /* left */
	uint64_t files;
	uint64_t bytes;
	int status;
};

static bool is_evict(const struct drop *drop)
{
	return drop->request == KVFS_IOC_EVICT;
}

static const char *reason(const struct drop *drop, int error)
{
	switch (-error) {
	case ENOTTY:
		return "not on a kvfs mount";
	case EBUSY:
		return "is open or being written; close it first";
	case EAGAIN:
		return "is leased, for it was opened in the last seconds; wait, or use --force";
	case EPERM:
		return is_evict(drop) ? "only its owner and root may evict it, and nobody while it "
					"is pinned"
				      : "only its owner and root may drop it from DRAM";
	case EINVAL:
		return "not a regular file or directory";
	case EIO:
		return "could not be written to the store; see the daemon's log";
	default:
		return strerror(-error);
	}
}

static int drop_file(struct drop *drop, const struct kv_walk_file *file, uint64_t *ret_bytes)
{
	struct kvfs_drop argument;

	for (;;) {
		memset(&argument, 0, sizeof(argument));
		argument.flags = drop->flags;
		if (strlen(file->name) >= sizeof(argument.name))
			return -ENAMETOOLONG;
		memcpy(argument.name, file->name, strlen(file->name));
		if (ioctl(file->directory, drop->request, &argument) == 0) {
			*ret_bytes = argument.bytes;
			return 0;
		}
		if (errno != EBUSY || drop->patience_ms < PAUSE_MS)
			return -errno;
		drop->patience_ms -= PAUSE_MS;
		(void)usleep(PAUSE_MS * 1000);
	}
}

static void each_file(void *arg, const struct kv_walk_file *file)
{
	struct drop *drop = arg;
	uint64_t bytes = 0;
	int r = file->error;

	if (r == 0)
		r = drop_file(drop, file, &bytes);
	/* Gone before we came. */
	if (r == -ENOENT && file->error == 0 && !file->named)
		return;
	if (r < 0) {
		drop->status = cmd_fail(drop->command, "%s: %s", file->path, reason(drop, r));
		return;
	}
	drop->files++;
	drop->bytes += bytes;
}

static int drop_main(int argc, char **argv, unsigned long request)
{
	struct drop drop = {.command = argv[0], .request = request, .patience_ms = PATIENCE_MS};
	bool force = false;
	const struct cmd_option options[] = {
		{.name = "quiet", .letter = 'q', .flag = &drop.quiet},
		{.name = "force", .letter = 'f', .flag = &force}, /* evict only */
	};
	char bytes[16];
	int status;

	if (!cmd_options(argc, argv, is_evict(&drop) ? evict_help : cool_help, options,
		    is_evict(&drop) ? 2 : 1, &status))
		return status;
	if (optind == argc)
		return cmd_bad_usage(argv[0], "PATH is missing");
	drop.flags = force ? KVFS_DROP_LEASED : 0;
	for (int i = optind; i < argc; i++) {
		int r = kv_walk(argv[i], each_file, &drop);
		if (r < 0)
			drop.status = cmd_fail(argv[0], "%s: %s", argv[i], reason(&drop, r));
	}
	if (!drop.quiet && (drop.status == 0 || drop.files > 0))
		(void)printf("%" PRIu64 " files %s, %s freed\n", drop.files,
			is_evict(&drop) ? "evicted" : "out of DRAM",
			kv_format_size(drop.bytes, bytes, sizeof(bytes)));
	return drop.status;
}

int cool_main(int argc, char **argv)
{
	return drop_main(argc, argv, KVFS_IOC_COOL);
}

int evict_main(int argc, char **argv)
{
	return drop_main(argc, argv, KVFS_IOC_EVICT);
}
