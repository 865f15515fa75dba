/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Walks a tree with a stack of paths: see walk.h.
 */
#include "tools/walk.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include "fs/base.h"
#include "fs/kvfs_ioctl.h"

struct pending {
	struct pending *next;
	char path[]; /* relative to the top; "" is the top itself */
};

struct walk {
	const char *top;
	int top_fd;
	dev_t device; /* of the top */
	struct pending *stack;
	void (*file)(void *arg, const struct kv_walk_file *file);
	void *arg;
};

static int push(struct walk *walk, const char *directory, const char *name)
{
	size_t size = strlen(directory) + strlen(name) + 2;
	struct pending *pending = malloc(sizeof(*pending) + size);

	if (!pending)
		return -ENOMEM;
	(void)snprintf(pending->path, size, "%s%s%s", directory, *directory ? "/" : "", name);
	pending->next = walk->stack;
	walk->stack = pending;
	return 0;
}

/* Opens PATH below the top step by step. A descriptor, or negative errno. */
static int open_below(const struct walk *walk, char *path)
{
	_cleanup_fd_ int fd = openat(walk->top_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	for (char *step = path; fd >= 0 && step && *step;) {
		char *slash = strchr(step, '/');
		int next;

		if (slash)
			*slash = '\0';
		next = openat(fd, step, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (slash)
			*slash = '/';
		if (next < 0)
			return -errno;
		(void)close(fd);
		fd = next;
		step = slash ? slash + 1 : NULL;
	}
	return fd < 0 ? -errno : kv_steal_fd(&fd);
}

/* The type of an entry, as st_mode has it; 0 if it has just gone. */
static mode_t type_of(int directory, const struct dirent *entry)
{
	struct stat st;

	if (entry->d_type != DT_UNKNOWN)
		return DTTOIF(entry->d_type);
	return fstatat(directory, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 ? 0 : st.st_mode;
}

static int give(const struct walk *walk, int directory, const char *path, const char *name)
{
	size_t size = strlen(walk->top) + strlen(path) + strlen(name) + 3;
	_cleanup_free_ char *whole = malloc(size);
	struct kv_walk_file file = {.directory = directory, .name = name, .path = whole};

	if (!whole)
		return -ENOMEM;
	(void)snprintf(whole, size, "%s%s%s/%s", walk->top, *path ? "/" : "", path, name);
	walk->file(walk->arg, &file);
	return 0;
}

/* Lists one directory: files are given, directories pushed. Takes FD over. */
static int list(struct walk *walk, int fd, const char *path)
{
	struct stat st;
	/* Another filesystem below this one is none of ours. */
	bool other = fstat(fd, &st) == 0 && st.st_dev != walk->device;
	DIR *directory = fdopendir(fd);
	struct dirent *entry;
	int r = 0;

	if (!directory) {
		r = -errno;
		(void)close(fd);
		return r;
	}
	while (errno = 0, !other && r == 0 && (entry = readdir(directory)) != NULL) {
		mode_t type = type_of(fd, entry) & S_IFMT;

		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (type == S_IFDIR)
			r = push(walk, path, entry->d_name);
		else if (type == S_IFREG)
			r = give(walk, fd, path, entry->d_name);
	}
	if (r == 0)
		r = -errno;
	(void)closedir(directory);
	return r;
}

static void report(const struct walk *walk, const char *path, int error)
{
	size_t size = strlen(walk->top) + strlen(path) + 2;
	_cleanup_free_ char *whole = malloc(size);
	struct kv_walk_file file = {.directory = -1, .path = walk->top, .error = error};

	if (whole) {
		(void)snprintf(whole, size, "%s%s%s", walk->top, *path ? "/" : "", path);
		file.path = whole;
	}
	walk->file(walk->arg, &file);
}

static int walk_tree(struct walk *walk)
{
	struct pending *pending;
	int r = push(walk, "", "");

	while ((pending = walk->stack)) {
		int fd;

		walk->stack = pending->next;
		fd = open_below(walk, pending->path);
		r = fd < 0 ? fd : list(walk, fd, pending->path);
		/* What went while we walked is no failure. */
		if (r < 0 && r != -ENOENT)
			report(walk, pending->path, r);
		free(pending);
	}
	return r == -ENOMEM ? r : 0;
}

/* A file named by the user: it is given by its directory. */
static int walk_file(struct walk *walk, const char *path)
{
	_cleanup_free_ char *real = realpath(path, NULL);
	struct kv_walk_file file = {.path = path, .named = true};
	_cleanup_fd_ int fd = -1;
	char *slash;

	if (!real)
		return -errno;
	slash = strrchr(real, '/');
	assert(slash);
	file.name = slash + 1;
	*slash = '\0';
	fd = open(*real ? real : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	file.directory = fd;
	walk->file(walk->arg, &file);
	return 0;
}

/* A kvfs mount answers a question about no names, and nobody else does. */
static bool is_kvfs(int directory)
{
	_cleanup_free_ struct kvfs_lookup *none = calloc(1, sizeof(*none));

	return !none || ioctl(directory, KVFS_IOC_LOOKUP, none) == 0;
}

int kv_walk(const char *path, void (*file)(void *arg, const struct kv_walk_file *file), void *arg)
{
	struct walk walk = {.top = path, .file = file, .arg = arg};
	_cleanup_fd_ int fd = -1;
	struct stat st;

	if (stat(path, &st) < 0)
		return -errno;
	if (S_ISREG(st.st_mode))
		return walk_file(&walk, path);
	if (!S_ISDIR(st.st_mode))
		return -EINVAL;
	fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (!is_kvfs(fd))
		return -ENOTTY;
	walk.top_fd = fd;
	walk.device = st.st_dev;
	return walk_tree(&walk);
}
