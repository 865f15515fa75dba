/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An index that a process has crashed with is suspect: a file beside data.mdb says so.
 *
 * LMDB trusts the pages that it maps. Of a large index they cannot all be looked at by each mount,
 * and a handler that went on after a fault would leave LMDB's locks behind, and pages half
 * changed. So the process ends as it would have, but leaves that file, and who opens the index next
 * looks at every page before LMDB does: a damaged one is refused then, by what the check says and
 * not by a second crash.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fs/base.h"
#include "index/index_internal.h"

#define SUSPECT "suspect"

/* A fault, a page behind the file's end or that the drive does not give, LMDB's own assertions. */
static const int signals[] = {SIGSEGV, SIGBUS, SIGABRT};
#define SIGNALS (sizeof(signals) / sizeof(signals[0]))

/* Written before the handlers are there, and never again: what a handler may use. */
static struct {
	int directory;
	struct sigaction before[SIGNALS];
} watched;

static void on_crash(int number, siginfo_t *info, void *context)
{
	static const char text[] = "kvfsd: crashed; the next mount looks at all of the index\n";
	int fd = openat(watched.directory, SUSPECT,
		O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);

	(void)context;
	if (fd >= 0)
		(void)close(fd);
	(void)!write(STDERR_FILENO, text, sizeof(text) - 1);
	for (size_t i = 0; i < SIGNALS; i++)
		if (signals[i] == number)
			(void)sigaction(number, &watched.before[i], NULL);
	/* A fault comes again when this returns; what was sent does not. */
	if (info->si_code <= 0)
		(void)raise(number);
}

int kv_index_watch_crashes(const struct kv_index *index)
{
	struct sigaction action = {.sa_sigaction = on_crash, .sa_flags = SA_SIGINFO};
	int fd = open(index->path, O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	watched.directory = fd;
	(void)sigemptyset(&action.sa_mask);
	for (size_t i = 0; i < SIGNALS; i++)
		if (sigaction(signals[i], NULL, &watched.before[i]) < 0 ||
			sigaction(signals[i], &action, NULL) < 0)
			return -errno;
	return 0;
}

static int suspect_path(const char *path, char **ret_file)
{
	if (asprintf(ret_file, "%s/" SUSPECT, path) >= 0)
		return 0;
	*ret_file = NULL;
	return -ENOMEM;
}

int kv_suspect_find(const char *path)
{
	_cleanup_free_ char *file = NULL;
	struct stat st;
	int r = suspect_path(path, &file);

	if (r < 0)
		return r;
	if (lstat(file, &st) < 0)
		return errno == ENOENT ? 0 : -errno;
	return 1;
}

int kv_suspect_clear(const char *path)
{
	_cleanup_free_ char *file = NULL;
	int r = suspect_path(path, &file);

	if (r == 0 && unlink(file) < 0 && errno != ENOENT)
		r = -errno;
	return r;
}
