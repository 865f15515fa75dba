/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs warm: brings files into DRAM and waits until they are there.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include "fs/base.h"
#include "fs/kvfs_ioctl.h"
#include "fs/parse.h"
#include "tools/cmd.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/walk.h"

static const char help_text[] =
	"usage: kvfs warm PATH... [--quiet]\n"
	"\n"
	"Brings files on a kvfs mount into DRAM, directories with all that is below\n"
	"them, and waits until they are there. Others that were used longer ago leave\n"
	"DRAM for it. It ends with status 1 if not everything fits.\n"
	"\n"
	"  -q, --quiet  print no progress and no summary\n";

/* The daemon starts to drop what is not in use above this share of the budget (fs/evict.c): more
 * would push out what was warmed first. */
#define SHARE_PERCENT 90u

/* Files that are warmed at a time: one alone does not keep many drives busy. */
#define WORKERS 8u
#define JOBS_MAX (2 * WORKERS)

/* A file to be warmed. */
struct job {
	int fd;
	char *path; /* for messages */
	uint64_t size;
	uint64_t room; /* bytes of the budget that are set aside for it */
};

struct warm {
	const char *command;
	bool counting;  /* the first pass, which only adds up the totals */
	bool no_thread; /* there are no workers */
	pthread_t threads[WORKERS];

	pthread_mutex_t lock; /* guards what follows */
	pthread_cond_t more;  /* jobs came, or the end */
	pthread_cond_t less;  /* jobs went */
	struct job jobs[JOBS_MAX];
	unsigned first; /* of the jobs that wait */
	unsigned waiting;
	bool end;
	struct kv_progress progress;
	dev_t device;   /* of the mount that the budget is of */
	uint64_t room;  /* bytes of the budget that are left */
	uint64_t files; /* wholly in DRAM */
	uint64_t bytes; /* in DRAM */
	uint64_t missed_files;
	uint64_t missed_bytes;
	int status;
};

/* Lock held. */
static void complain(struct warm *warm, const char *path, int error)
{
	const char *reason = error == -ENOTTY ? "not on a kvfs mount"
			     : error == -EBUSY
				     ? "is being written; it is in DRAM until it is stored"
			     : error == -EIO    ? "damaged or unreadable: its bytes cannot be had"
			     : error == -EINVAL ? "not a regular file or directory"
						: strerror(-error);

	kv_progress_clear(&warm->progress);
	warm->status = cmd_fail(warm->command, "%s: %s", path, reason);
}

/* How much may be brought in on the mount that PATH is on. What is none says so file by file. */
static void learn_room(struct warm *warm, const char *path)
{
	struct kv_report status;
	struct stat st;
	KV_LOCKED(&warm->lock);

	if (stat(path, &st) < 0 || st.st_dev == warm->device ||
		kv_report_read(path, "status", &status) < 0)
		return;
	warm->room = kv_report_number(&status, "dram_budget") / 100 * SHARE_PERCENT;
	warm->device = st.st_dev;
	kv_report_done(&status);
}

/* ---- One file ---- */

static int ask(int fd, uint64_t offset, struct kvfs_warm *ret_piece)
{
	memset(ret_piece, 0, sizeof(*ret_piece));
	ret_piece->offset = offset;
	ret_piece->length = KVFS_WARM_BYTES;
	ret_piece->flags = KVFS_WARM_ASK;
	return ioctl(fd, KVFS_IOC_WARM, ret_piece) < 0 ? -errno : 0;
}

/* Piece by piece, as far as there is room; what is there already is not brought in again. */
static int warm_file(
	struct warm *warm, struct job *job, uint64_t *ret_resident, uint64_t *ret_holes)
{
	struct kvfs_warm piece;
	uint64_t offset = 0;
	int r;

	*ret_resident = *ret_holes = 0;
	while ((r = ask(job->fd, offset, &piece)) == 0 && piece.done > 0) {
		if (piece.resident + piece.holes < piece.done && job->room > 0) {
			piece.flags = 0;
			piece.length = kv_min_u64(piece.done, job->room);
			if (ioctl(job->fd, KVFS_IOC_WARM, &piece) < 0)
				return -errno;
		}
		*ret_resident += piece.resident;
		*ret_holes += piece.holes;
		job->room -= kv_min_u64(job->room, piece.resident);
		offset += piece.done;
		KV_LOCKED(&warm->lock);
		warm->progress.bytes += piece.done;
		kv_progress_show(&warm->progress);
	}
	return r;
}

static void finish_job(struct warm *warm, struct job *job)
{
	uint64_t resident, holes, missing;
	int r = warm_file(warm, job, &resident, &holes);
	KV_LOCKED(&warm->lock);

	warm->room += job->room;
	warm->progress.files++;
	kv_progress_show(&warm->progress);
	if (r < 0) {
		complain(warm, job->path, r);
	} else {
		missing = job->size - kv_min_u64(job->size, resident + holes);
		warm->bytes += resident;
		warm->files += missing == 0;
		warm->missed_files += missing > 0;
		warm->missed_bytes += missing;
	}
	(void)close(job->fd);
	free(job->path);
}

/* ---- All files ---- */

static bool take_job(struct warm *warm, struct job *ret_job)
{
	KV_LOCKED(&warm->lock);

	while (warm->waiting == 0 && !warm->end)
		(void)pthread_cond_wait(&warm->more, &warm->lock);
	if (warm->waiting == 0)
		return false;
	*ret_job = warm->jobs[warm->first];
	warm->first = (warm->first + 1) % JOBS_MAX;
	warm->waiting--;
	(void)pthread_cond_signal(&warm->less);
	return true;
}

static void *worker(void *arg)
{
	struct job job;

	while (take_job(arg, &job))
		finish_job(arg, &job);
	return NULL;
}

/* Room is set aside in the order of the files, so that those that come first are warmed whole. */
static void give_job(struct warm *warm, struct job *job)
{
	(void)pthread_mutex_lock(&warm->lock);
	while (warm->waiting == JOBS_MAX)
		(void)pthread_cond_wait(&warm->less, &warm->lock);
	job->room = kv_min_u64(warm->room, job->size);
	warm->room -= job->room;
	if (!warm->no_thread) {
		warm->jobs[(warm->first + warm->waiting++) % JOBS_MAX] = *job;
		(void)pthread_cond_signal(&warm->more);
	}
	(void)pthread_mutex_unlock(&warm->lock);
	if (warm->no_thread)
		finish_job(warm, job);
}

/*
 * O_DIRECT, for a plain open would bring in the whole file at once, whether there is room for it or
 * not, and without a word.
 */
static int open_job(const struct kv_walk_file *file, struct job *ret_job)
{
	_cleanup_fd_ int fd = openat(file->directory, file->name,
		O_RDONLY | O_DIRECT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return -errno;
	*ret_job = (struct job){.path = strdup(file->path), .size = (uint64_t)st.st_size};
	if (!ret_job->path)
		return -ENOMEM;
	ret_job->fd = kv_steal_fd(&fd);
	return 0;
}

static void count_file(struct warm *warm, const struct kv_walk_file *file)
{
	struct stat st;

	if (file->error != 0 || fstatat(file->directory, file->name, &st, 0) < 0)
		return;
	warm->progress.total_files++;
	warm->progress.total_bytes += (uint64_t)st.st_size;
}

static void each_file(void *arg, const struct kv_walk_file *file)
{
	struct warm *warm = arg;
	struct job job = {.fd = -1};
	int r = file->error;

	if (warm->counting) {
		count_file(warm, file);
		return;
	}
	if (r == 0)
		r = open_job(file, &job);
	if (r == 0) {
		give_job(warm, &job);
		return;
	}
	/* Evicted or removed meanwhile. */
	if (r == -ENOENT && file->error == 0 && !file->named)
		return;
	KV_LOCKED(&warm->lock);
	complain(warm, file->path, r);
}

static void walk_all(struct warm *warm, char **paths, int count)
{
	for (int i = 0; i < count; i++) {
		int r;

		if (!warm->counting)
			learn_room(warm, paths[i]);
		r = kv_walk(paths[i], each_file, warm);
		if (r < 0 && !warm->counting) {
			KV_LOCKED(&warm->lock);
			complain(warm, paths[i], r);
		}
	}
}

static void warm_all(struct warm *warm, char **paths, int count)
{
	unsigned threads = 0;

	while (threads < WORKERS &&
		pthread_create(&warm->threads[threads], NULL, worker, warm) == 0)
		threads++;
	warm->no_thread = threads == 0;
	walk_all(warm, paths, count);
	(void)pthread_mutex_lock(&warm->lock);
	warm->end = true;
	(void)pthread_cond_broadcast(&warm->more);
	(void)pthread_mutex_unlock(&warm->lock);
	while (threads > 0)
		(void)pthread_join(warm->threads[--threads], NULL);
}

static void print_summary(struct warm *warm)
{
	char text[16];

	kv_progress_clear(&warm->progress);
	if (!warm->progress.quiet)
		(void)printf("%" PRIu64 " files in DRAM, %s\n", warm->files,
			kv_format_size(warm->bytes, text, sizeof(text)));
	if (warm->missed_files > 0)
		warm->status = cmd_fail(warm->command,
			"%" PRIu64 " files do not fit, %s of them is not in DRAM; mount with a "
			"larger dram=, or name fewer",
			warm->missed_files, kv_format_size(warm->missed_bytes, text, sizeof(text)));
}

int warm_main(int argc, char **argv)
{
	static struct warm warm = {
		.counting = true,
		.lock = PTHREAD_MUTEX_INITIALIZER,
		.more = PTHREAD_COND_INITIALIZER,
		.less = PTHREAD_COND_INITIALIZER,
	};
	const struct cmd_option options[] = {
		{.name = "quiet", .letter = 'q', .flag = &warm.progress.quiet}};
	int status;

	warm.command = warm.progress.command = argv[0];
	if (!cmd_options(argc, argv, help_text, options, 1, &status))
		return status;
	if (optind == argc)
		return cmd_bad_usage(argv[0], "PATH is missing");
	walk_all(&warm, argv + optind, argc - optind);
	warm.counting = false;
	warm_all(&warm, argv + optind, argc - optind);
	print_summary(&warm);
	return warm.status;
}
