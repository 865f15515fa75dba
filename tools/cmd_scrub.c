/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs scrub: reads all data of a mount at a bounded rate, so that damage is found before it is
 * met.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <time.h>

#include "fs/base.h"
#include "fs/kvfs_ioctl.h"
#include "fs/parse.h"
#include "tools/cmd.h"
#include "tools/progress.h"
#include "tools/text.h"
#include "tools/walk.h"

#define DEFAULT_DIRECTORY "/kv"
#define DEFAULT_RATE "200M"
#define NS_PER_S 1000000000

/* As those of kvfs check. */
enum status {
	STATUS_CLEAN = 0,
	STATUS_DAMAGED = 4,
	STATUS_FAILED = 8, /* or ended before its end */
	STATUS_USAGE = 16,
};

static const char help_text[] =
	"usage: kvfs scrub [DIR] [--rate SIZE] [--quiet]\n"
	"\n"
	"Reads what the devices hold of all files in DIR (default /kv) and below it,\n"
	"and compares the checksums. A file that fails is quarantined: its names are\n"
	"gone. Nothing comes into DRAM, and no file counts as used by it. For root,\n"
	"and for others with their own files.\n"
	"\n"
	"  --rate SIZE  bytes a second at most (default 200M); 0: as fast as it goes\n"
	"  -q, --quiet  print no progress and no summary\n"
	"\n"
	"Exit status: 0 all is sound; 4 damage was found; 8 not all could be read, or\n"
	"it was interrupted; 16 wrong usage.\n";

struct scrub {
	const char *command;
	bool counting; /* the first pass, which only adds up the totals */
	uint64_t rate;
	struct kv_progress progress;
	int64_t due_ns; /* when the next call may begin */
	uint64_t checked;
	uint64_t damaged; /* files */
	uint64_t failed;  /* files and directories that could not be checked, or not all of */
};

static volatile sig_atomic_t interrupted;

static void interrupt(int number)
{
	(void)number;
	interrupted = 1;
}

/* Waits until the bytes read so far are no more than the rate allows. */
static void keep_rate(struct scrub *scrub, uint64_t bytes)
{
	struct timespec due;
	int64_t now_ns;

	if (scrub->rate == 0 || bytes == 0)
		return;
	now_ns = kv_monotonic_ns();
	/* Time that was not used is not made up for. */
	if (scrub->due_ns < now_ns)
		scrub->due_ns = now_ns;
	scrub->due_ns += (int64_t)((double)bytes * NS_PER_S / (double)scrub->rate);
	due = (struct timespec){scrub->due_ns / NS_PER_S, scrub->due_ns % NS_PER_S};
	(void)clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
}

static void complain(struct scrub *scrub, const char *path, int error)
{
	kv_progress_clear(&scrub->progress);
	scrub->failed++;
	(void)cmd_fail(scrub->command, "%s: %s", path,
		error == -ENOTTY ? "not on a kvfs mount" : strerror(-error));
}

static void report_damage(struct scrub *scrub, const char *path)
{
	kv_progress_clear(&scrub->progress);
	scrub->damaged++;
	(void)printf("damaged, quarantined: ");
	kv_text_print(stdout, path);
	(void)printf("\n");
	(void)fflush(stdout);
}

static int call(const struct kv_walk_file *file, struct kvfs_scrub *piece)
{
	size_t length = strlen(file->name);

	if (length > KVFS_NAME_MAX)
		return -ENAMETOOLONG;
	memcpy(piece->name, file->name, length + 1);
	return ioctl(file->directory, KVFS_IOC_SCRUB, piece) < 0 ? -errno : 0;
}

static void count_file(struct scrub *scrub, const struct kv_walk_file *file)
{
	struct kvfs_scrub piece = {.flags = KVFS_SCRUB_ASK};

	if (file->error != 0 || call(file, &piece) < 0)
		return;
	scrub->progress.total_files++;
	scrub->progress.total_bytes += piece.size;
}

/* Piece by piece, for a rate that is kept to. Returns 0 or what went wrong. */
static int scrub_file(struct scrub *scrub, const struct kv_walk_file *file)
{
	uint64_t offset = 0;
	bool unreadable = false;

	while (!interrupted) {
		struct kvfs_scrub piece = {.offset = offset};
		int r = call(file, &piece);

		if (r < 0)
			return r;
		scrub->checked += piece.checked;
		scrub->progress.bytes += piece.done;
		unreadable |= piece.unreadable > 0;
		if (piece.damaged)
			report_damage(scrub, file->path);
		kv_progress_show(&scrub->progress);
		keep_rate(scrub, piece.checked + piece.unreadable);
		offset += piece.done;
		if (piece.done == 0 || offset >= piece.size || piece.damaged)
			break;
	}
	scrub->progress.files++;
	return unreadable ? -EIO : 0;
}

static void each_file(void *arg, const struct kv_walk_file *file)
{
	struct scrub *scrub = arg;
	int r = file->error;

	if (interrupted)
		return;
	if (scrub->counting) {
		count_file(scrub, file);
		return;
	}
	if (r == 0)
		r = scrub_file(scrub, file);
	/* Evicted, removed or not yet published. */
	if (r < 0 && (r != -ENOENT || file->error != 0))
		complain(scrub, file->path, r);
}

static enum status finish(struct scrub *scrub)
{
	char text[16];

	kv_progress_clear(&scrub->progress);
	if (!scrub->progress.quiet)
		(void)printf("%s of %" PRIu64 " files read, %" PRIu64 " files damaged%s%s\n",
			kv_format_size(scrub->checked, text, sizeof(text)), scrub->progress.files,
			scrub->damaged, scrub->failed > 0 ? ", some could not be read" : "",
			interrupted ? ", interrupted" : "");
	if (scrub->damaged > 0)
		return STATUS_DAMAGED;
	return scrub->failed > 0 || interrupted ? STATUS_FAILED : STATUS_CLEAN;
}

static void walk(struct scrub *scrub, const char *directory)
{
	int r = kv_walk(directory, each_file, scrub);

	if (r < 0 && !scrub->counting)
		complain(scrub, directory, r);
}

int scrub_main(int argc, char **argv)
{
	struct scrub scrub = {.command = argv[0], .counting = true, .progress.command = argv[0]};
	const struct sigaction action = {.sa_handler = interrupt};
	const char *rate = DEFAULT_RATE;
	const struct cmd_option options[] = {
		{.name = "rate", .value = &rate},
		{.name = "quiet", .letter = 'q', .flag = &scrub.progress.quiet},
	};
	const char *directory;
	int status;

	if (!cmd_options(
		    argc, argv, help_text, options, sizeof(options) / sizeof(options[0]), &status))
		return status == 0 ? STATUS_CLEAN : STATUS_USAGE;
	if (argc - optind > 1) {
		(void)cmd_bad_usage(argv[0], "more than one DIR");
		return STATUS_USAGE;
	}
	if (kv_parse_size(rate, &scrub.rate) < 0) {
		(void)cmd_bad_usage(argv[0], "--rate %.64s: not a size such as 200M", rate);
		return STATUS_USAGE;
	}
	directory = optind < argc ? argv[optind] : DEFAULT_DIRECTORY;
	(void)sigaction(SIGINT, &action, NULL);
	(void)sigaction(SIGTERM, &action, NULL);
	walk(&scrub, directory);
	scrub.counting = false;
	walk(&scrub, directory);
	return finish(&scrub);
}
