/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening a store: everything is checked in an order in which nothing is written before all of it
 * is known to be sound and to belong together.
 */
#include "fs/store.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fs/log.h"
#include "fs/store_internal.h"

/* The lock file: the holder's pid, and LOCK_CLOSING behind it when it is about to let go. */
#define LOCK_CLOSING " closing"
#define LOCK_NOTE_SIZE 32u
#define LOCK_POLL_MS 20u
#define LOCK_GRACE_MS 1000u

/* A line a device. */
#define DEVICES_FILE_MAX (KV_DEVICES_MAX * (PATH_MAX + 1))

int kv_store_open_directory(const struct kv_error *error, const char *path)
{
	_cleanup_fd_ int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;

	if (fd < 0 && errno == ENOTDIR)
		return kv_fail(error, -errno,
			"%s is not a kvfs store: it is not a directory; make one with `kvfs format "
			"DIR`",
			path);
	if (fd < 0 || fstat(fd, &st) < 0)
		return kv_fail(error, -errno, "%s cannot be opened: %s", path, strerror(errno));
	if (st.st_uid != geteuid() && st.st_uid != 0)
		return kv_fail(error, -EPERM,
			"%s belongs to user %u; only its owner may use it as a store", path,
			(unsigned)st.st_uid);
	if (st.st_mode & (S_IWGRP | S_IWOTH))
		return kv_fail(error, -EPERM,
			"%s can be written by others than its owner; run `chmod 0700 %s`", path,
			path);
	return kv_steal_fd(&fd);
}

/* Whoever has the other name may read or change what is in the store. */
static int linked_error(const struct kv_error *error, const char *path, const char *name)
{
	return kv_fail(error, -EMLINK,
		"%s/%s has another name, outside the store's control; remove that (find -samefile "
		"finds it), or copy the file",
		path, name);
}

/* Names the process that holds the lock in FD, if it wrote itself down. */
static int locked_error(const struct kv_error *error, int fd, const char *path)
{
	char text[16] = "";
	long pid;

	if (pread(fd, text, sizeof(text) - 1, 0) < 0)
		text[0] = '\0';
	pid = strtol(text, NULL, 10);
	if (pid <= 0)
		return kv_fail(error, -EBUSY,
			"%s is already mounted (its lock is held by another process)", path);
	return kv_fail(error, -EBUSY, "%s is already mounted (its lock is held by process %ld)",
		path, pid);
}

/* Writes who holds the lock, for the message and for who may wait. A full filesystem does not
 * matter. */
static void lock_note(int lock_fd, const char *state)
{
	char text[LOCK_NOTE_SIZE];
	int length = snprintf(text, sizeof(text), "%ld%s\n", (long)getpid(), state);

	if (ftruncate(lock_fd, 0) == 0 && pwrite(lock_fd, text, (size_t)length, 0) < 0)
		(void)ftruncate(lock_fd, 0);
}

static int take_lock(const struct kv_error *error, int directory_fd, const char *path, int flags)
{
	_cleanup_fd_ int fd = openat(
		directory_fd, KV_STORE_LOCK, flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
	struct stat st;

	if (fd < 0 && errno == ENOENT)
		return kv_fail(error, -errno,
			"%s is not a kvfs store: it has no lock file; make one with `kvfs format "
			"%s`",
			path, path);
	if (fd < 0 || fstat(fd, &st) < 0)
		return kv_fail(error, -errno, "%s/" KV_STORE_LOCK " cannot be opened: %s", path,
			strerror(errno));
	if (!S_ISREG(st.st_mode))
		return kv_fail(error, -EINVAL,
			"%s/" KV_STORE_LOCK " is not a regular file; "
			"this is not a kvfs store",
			path);
	if (st.st_nlink > 1)
		return linked_error(error, path, KV_STORE_LOCK);
	if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
		if (errno == EWOULDBLOCK)
			return locked_error(error, fd, path);
		return kv_fail(error, -errno, "%s cannot be locked: %s", path, strerror(errno));
	}
	return kv_steal_fd(&fd);
}

int kv_store_take_lock(
	const struct kv_error *error, int directory_fd, const char *path, bool create)
{
	int fd = take_lock(error, directory_fd, path, create ? O_RDWR | O_CREAT : O_RDWR);

	if (fd >= 0)
		lock_note(fd, "");
	return fd;
}

int kv_store_device_path(const char *store, const char *text, char **ret_path)
{
	_cleanup_free_ char *copy = NULL, *parent = NULL;
	char *path, *slash;

	if (!strchr(text, '/')) {
		if (text[0] == '\0' || text[0] == '.')
			return -EINVAL;
		return asprintf(ret_path, "%s/%s", store, text) < 0 ? -ENOMEM : 0;
	}
	path = realpath(text, NULL);
	if (path) {
		*ret_path = path;
		return 0;
	}
	if (errno != ENOENT)
		return -errno;
	/* Not there (yet): its directory must be. A dangling link stays one, and is refused. */
	copy = strdup(text);
	if (!copy)
		return -ENOMEM;
	slash = strrchr(copy, '/');
	*slash = '\0';
	if (slash[1] == '\0')
		return -EINVAL;
	parent = realpath(slash == copy ? "/" : copy, NULL);
	if (!parent)
		return -errno;
	return asprintf(ret_path, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, slash + 1) < 0
		       ? -ENOMEM
		       : 0;
}

void kv_store_devices_done(struct kv_store_devices *list)
{
	for (unsigned i = 0; i < list->count; i++)
		free(list->paths[i]);
	list->count = 0;
}

/* Reads the whole `devices` file as text. The caller frees ret_text. */
static int read_devices_file(
	const struct kv_error *error, int directory_fd, const char *path, char **ret_text)
{
	_cleanup_fd_ int fd = openat(
		directory_fd, KV_STORE_DEVICES, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
	_cleanup_free_ char *text = malloc(DEVICES_FILE_MAX + 1);
	struct stat st;
	ssize_t n;

	if (!text)
		return kv_fail(error, -ENOMEM, "out of memory");
	if (fd < 0 && errno == ENOENT)
		return kv_fail(error, -errno,
			"%s is not a kvfs store: it has no list of devices; make one with `kvfs "
			"format %s`",
			path, path);
	if (fd < 0 || fstat(fd, &st) < 0)
		return kv_fail(error, -errno, "%s/" KV_STORE_DEVICES " cannot be opened: %s", path,
			strerror(errno));
	if (!S_ISREG(st.st_mode))
		return kv_fail(error, -EINVAL,
			"%s/" KV_STORE_DEVICES " is not a regular file; this is not a kvfs store",
			path);
	if (st.st_nlink > 1)
		return linked_error(error, path, KV_STORE_DEVICES);
	n = read(fd, text, DEVICES_FILE_MAX + 1);
	if (n < 0)
		return kv_fail(error, -errno, "%s/" KV_STORE_DEVICES " cannot be read: %s", path,
			strerror(errno));
	if (n == 0 || n > DEVICES_FILE_MAX || text[n - 1] != '\n' || memchr(text, '\0', (size_t)n))
		return kv_fail(error, -EUCLEAN,
			"%s/" KV_STORE_DEVICES " is damaged; put one device a line there, in their "
			"order",
			path);
	text[n] = '\0';
	*ret_text = kv_steal_ptr(&text);
	return 0;
}

int kv_store_read_devices(const struct kv_error *error, int directory_fd, const char *path,
	struct kv_store_devices *list)
{
	_cleanup_free_ char *text = NULL;
	char *rest, *line;
	int r = read_devices_file(error, directory_fd, path, &text);

	if (r < 0)
		return r;
	rest = text;
	while ((line = strsep(&rest, "\n")) && rest) {
		if (list->count == KV_DEVICES_MAX)
			return kv_fail(error, -EUCLEAN,
				"%s/" KV_STORE_DEVICES " names more than %u devices", path,
				KV_DEVICES_MAX);
		if (line[0] != '/' && strchr(line, '/'))
			r = -EINVAL;
		else
			r = kv_store_device_path(path, line, &list->paths[list->count]);
		if (r < 0)
			return kv_fail(error, r,
				"%s/" KV_STORE_DEVICES " names device \"%s\": %s; correct the line",
				path, line, strerror(-r));
		list->count++;
	}
	return 0;
}

int kv_store_check_index_files(const struct kv_error *error, int directory_fd, const char *path)
{
	static const char *const names[] = {"data.mdb", "lock.mdb"};
	static const char *const shown[] = {KV_STORE_INDEX "/data.mdb", KV_STORE_INDEX "/lock.mdb"};
	_cleanup_fd_ int fd = openat(
		directory_fd, KV_STORE_INDEX, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;

	if (fd < 0 && errno == ENOENT)
		return kv_fail(error, -errno,
			"%s is not a kvfs store: it has no index; make one with `kvfs format %s`",
			path, path);
	if (fd < 0)
		return kv_fail(error, -errno, "%s/" KV_STORE_INDEX " cannot be opened: %s", path,
			strerror(errno));
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (fstatat(fd, names[i], &st, AT_SYMLINK_NOFOLLOW) < 0) {
			if (errno == ENOENT)
				continue;
			return kv_fail(error, -errno, "%s/" KV_STORE_INDEX " cannot be read: %s",
				path, strerror(errno));
		}
		if (!S_ISREG(st.st_mode))
			return kv_fail(error, -EINVAL,
				"%s/" KV_STORE_INDEX "/%s is not a regular file; refused", path,
				names[i]);
		if (st.st_nlink > 1)
			return linked_error(error, path, shown[i]);
	}
	return 0;
}

static int open_index(
	const struct kv_error *error, const struct kv_store_open *open, struct kv_store *store)
{
	const struct kv_index_options options = {
		/* A quota below a block still is one. */
		.quota_blocks = kv_div_round_up(open->quota_bytes, KV_BLOCK_SIZE),
		.journal = open->journal,
	};
	_cleanup_free_ char *index_path = NULL;
	int r = kv_store_check_index_files(error, store->directory_fd, store->path);

	if (r < 0)
		return r;
	if (asprintf(&index_path, "%s/" KV_STORE_INDEX, store->path) < 0) {
		index_path = NULL;
		return kv_fail(error, -ENOMEM, "out of memory");
	}
	return kv_index_open(index_path, &options, &store->index, error->text, error->size);
}

static int open_devices(const struct kv_error *error, const struct kv_store_open *open,
	struct kv_store *store, const struct kv_store_devices *list)
{
	const struct kv_index_store *known = kv_index_store(store->index);
	const struct kv_devices_open devices = {
		.ops = open->ops ? open->ops : kv_io_real(),
		.paths = (const char *const *)list->paths,
		.count = list->count,
		.uuid = known->uuid,
		.blocks = known->device_blocks,
		.stats = open->stats,
	};

	if (known->device_count != list->count)
		return kv_fail(error, -EINVAL,
			"%s/" KV_STORE_DEVICES
			" names %u devices, but the store has %u; list all of "
			"them, in their order",
			store->path, list->count, known->device_count);
	return kv_devices_open(&devices, &store->devices, error->text, error->size);
}

void kv_store_closing(struct kv_store *store)
{
	lock_note(store->lock_fd, LOCK_CLOSING);
}

/* Whether the holder of the lock has said that it is about to let go. */
static bool lock_is_closing(int directory_fd)
{
	_cleanup_fd_ int fd =
		openat(directory_fd, KV_STORE_LOCK, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
	char text[LOCK_NOTE_SIZE] = "";

	return fd >= 0 && pread(fd, text, sizeof(text) - 1, 0) > 0 && strstr(text, LOCK_CLOSING);
}

/*
 * Takes the lock. `umount` returns before the daemon has noticed, let alone written back: a
 * holder gets LOCK_GRACE_MS to say that it is closing, and then the caller's patience.
 */
int kv_store_take_lock_patiently(const struct kv_error *error, int directory_fd, const char *path,
	unsigned closing_wait_ms, bool quiet)
{
	unsigned grace_ms = closing_wait_ms < LOCK_GRACE_MS ? closing_wait_ms : LOCK_GRACE_MS;

	for (unsigned waited_ms = 0;; waited_ms += LOCK_POLL_MS) {
		int fd = take_lock(error, directory_fd, path, quiet ? O_RDONLY : O_RDWR);

		if (fd >= 0 && !quiet)
			lock_note(fd, "");
		if (fd != -EBUSY || waited_ms >= closing_wait_ms ||
			(waited_ms >= grace_ms && !lock_is_closing(directory_fd)))
			return fd;
		(void)usleep(LOCK_POLL_MS * 1000);
	}
}

/* On failure the caller closes what STORE has by then. */
static int open_parts(
	const struct kv_error *error, const struct kv_store_open *open, struct kv_store *store)
{
	struct kv_store_devices list = {0};
	int r;

	store->path = realpath(open->path, NULL);
	if (!store->path && errno == ENOENT)
		return kv_fail(error, -errno,
			"%s is not a kvfs store: it is not there; make one with `kvfs format %s`",
			open->path, open->path);
	if (!store->path)
		return kv_fail(
			error, -errno, "%s cannot be opened: %s", open->path, strerror(errno));
	store->directory_fd = kv_store_open_directory(error, store->path);
	if (store->directory_fd < 0)
		return store->directory_fd;
	store->lock_fd = kv_store_take_lock_patiently(
		error, store->directory_fd, store->path, open->closing_wait_ms, false);
	if (store->lock_fd < 0)
		return store->lock_fd;
	r = kv_store_read_devices(error, store->directory_fd, store->path, &list);
	if (r == 0)
		r = open_index(error, open, store);
	if (r == 0)
		r = open_devices(error, open, store, &list);
	kv_store_devices_done(&list);
	return r;
}

int kv_store_open(const struct kv_store_open *open, struct kv_store **ret_store, char *ret_error,
	size_t error_size)
{
	const struct kv_error error = {ret_error, error_size};
	struct kv_store *store = calloc(1, sizeof(*store));
	int r;

	if (!store)
		return kv_fail(&error, -ENOMEM, "out of memory");
	store->directory_fd = -1;
	store->lock_fd = -1;
	r = open_parts(&error, open, store);
	if (r < 0) {
		(void)kv_store_close(store);
		return r;
	}
	*ret_store = store;
	return 0;
}

struct kv_store *kv_store_close(struct kv_store *store)
{
	if (!store)
		return NULL;
	(void)kv_index_close(store->index);
	(void)kv_devices_close(store->devices);
	if (store->lock_fd >= 0)
		(void)close(store->lock_fd);
	if (store->directory_fd >= 0)
		(void)close(store->directory_fd);
	free(store->path);
	free(store);
	return NULL;
}
