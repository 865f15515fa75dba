/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making a store.
 *
 * Everything new is built beside what is there ("index.new") and swapped in by rename just before
 * the superblocks are written, so that a failure at any step can be taken back:
 * the names are swapped again, files we made are removed, and the devices get back what they held.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "fs/gpu_protocol.h"
#include "fs/parse.h"
#include "fs/store.h"
#include "fs/store_internal.h"

#define INDEX_NEW KV_STORE_INDEX KV_STORE_NEW_SUFFIX
#define DEVICES_NEW KV_STORE_DEVICES KV_STORE_NEW_SUFFIX
#define DATA_NEW KV_STORE_DATA KV_STORE_NEW_SUFFIX
/* Room that the default size of data0 leaves on its filesystem, for the index and for others. */
#define FREE_LEFT_MIN (UINT64_C(1) << 30)
#define DATA_SIZE_MIN (UINT64_C(64) << 20)
#define ROOT_MODE 0755u

/* What is in a directory that shall become a store. */
struct content {
	bool foreign; /* something that is not ours */
	bool store;   /* a store, or what an interrupted format left */
	bool lock;
	char foreign_name[NAME_MAX + 1];
};

struct making {
	const struct kv_store_format *format;
	const struct kv_io_ops *ops;
	struct kv_error error;
	char *path; /* absolute */
	int directory_fd;
	int lock_fd;
	bool made_directory;
	bool made_lock;
	bool made_data; /* data0 is built as data0.new */
	bool swapped_index;
	bool swapped_devices;
	unsigned count;
	char *lines[KV_DEVICES_MAX]; /* as in the `devices` file */
	char *paths[KV_DEVICES_MAX]; /* as they are opened */
	uint64_t size_bytes;
	struct kv_index_store store;
};

static int look_at(struct making *m, struct content *ret_content)
{
	static const char *const names[] = {KV_STORE_LOCK, KV_GPU_SOCKET, KV_STORE_DATA, DATA_NEW,
		KV_STORE_DEVICES, KV_STORE_INDEX, INDEX_NEW, DEVICES_NEW};
	const size_t marks_from = 4; /* the names from there on tell a store */
	int fd = openat(m->directory_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	const struct dirent *entry;

	if (!directory) {
		int r = -errno;

		if (fd >= 0)
			(void)close(fd);
		return kv_fail(&m->error, r, "%s cannot be read: %s", m->path, strerror(-r));
	}
	memset(ret_content, 0, sizeof(*ret_content));
	while ((entry = readdir(directory))) {
		size_t i = 0;

		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		while (i < sizeof(names) / sizeof(names[0]) && strcmp(entry->d_name, names[i]) != 0)
			i++;
		if (i == sizeof(names) / sizeof(names[0])) {
			ret_content->foreign = true;
			(void)snprintf(ret_content->foreign_name, sizeof(ret_content->foreign_name),
				"%s", entry->d_name);
		} else {
			ret_content->store |= i >= marks_from;
			ret_content->lock |= i == 0;
		}
	}
	(void)closedir(directory);
	return 0;
}

/* Refuses a directory that holds anything we may not replace. */
static int check_content(struct making *m, bool *ret_lock)
{
	struct content content;
	int r = look_at(m, &content);

	if (r < 0)
		return r;
	if (content.foreign)
		return kv_fail(&m->error, -ENOTEMPTY,
			"%s is not empty: it holds \"%s\", which is not kvfs's; choose an empty or "
			"new directory",
			m->path, content.foreign_name);
	if (content.store && !m->format->force)
		return kv_fail(&m->error, -EEXIST,
			"%s already holds a kvfs store; --force replaces it, and everything in it "
			"is lost",
			m->path);
	*ret_lock = content.lock;
	return 0;
}

static int open_directory(struct making *m)
{
	const char *path = m->format->path;
	struct stat st;

	if (mkdir(path, 0700) == 0)
		m->made_directory = true;
	else if (errno == ENOENT)
		return kv_fail(&m->error, -ENOENT,
			"%s cannot be created: the directory it would be in is not there", path);
	else if (errno != EEXIST)
		return kv_fail(
			&m->error, -errno, "%s cannot be created: %s", path, strerror(errno));
	m->path = realpath(path, NULL);
	if (!m->path)
		return kv_fail(&m->error, -errno, "%s cannot be opened: %s", path, strerror(errno));
	if (stat(m->path, &st) == 0 && !S_ISDIR(st.st_mode))
		return kv_fail(&m->error, -ENOTDIR,
			"%s is not a directory; name the directory of the store", path);
	m->directory_fd = kv_store_open_directory(&m->error, m->path);
	return m->directory_fd < 0 ? m->directory_fd : 0;
}

int kv_store_remove_directory(int directory_fd, const char *name)
{
	int fd = openat(directory_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	const struct dirent *entry;

	if (!directory) {
		int r = -errno;

		if (fd >= 0)
			(void)close(fd);
		return r == -ENOENT ? 0 : r;
	}
	while ((entry = readdir(directory)))
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
			(void)unlinkat(fd, entry->d_name, 0);
	(void)closedir(directory);
	return unlinkat(directory_fd, name, AT_REMOVEDIR) < 0 ? -errno : 0;
}

/* What is under the ".new" names is either rest of an interrupted format or replaced by this one.
 */
static int remove_new(struct making *m)
{
	int r = kv_store_remove_directory(m->directory_fd, INDEX_NEW);

	if (r == 0 && unlinkat(m->directory_fd, DEVICES_NEW, 0) < 0 && errno != ENOENT)
		r = -errno;
	if (r == 0 && unlinkat(m->directory_fd, DATA_NEW, 0) < 0 && errno != ENOENT)
		r = -errno;
	return r;
}

/* Half of what is free, but FREE_LEFT_MIN stays. */
static int default_size(struct making *m, uint64_t *ret_size)
{
	char text[16];
	struct statvfs st;
	uint64_t free_bytes, size;

	if (fstatvfs(m->directory_fd, &st) < 0)
		return kv_fail(&m->error, -errno,
			"the free space of %s is not known: %s; give a "
			"--size",
			m->path, strerror(errno));
	free_bytes = (uint64_t)st.f_bavail * st.f_frsize;
	size = free_bytes / 2;
	if (free_bytes < FREE_LEFT_MIN + DATA_SIZE_MIN)
		return kv_fail(&m->error, -ENOSPC,
			"%s has only %s free, too little for a store and 1G of room beside it; "
			"give a --size, or a --device",
			m->path, kv_format_size(free_bytes, text, sizeof(text)));
	size = kv_min_u64(size, free_bytes - FREE_LEFT_MIN);
	*ret_size = size - size % (UINT64_C(1) << 20);
	return 0;
}

/* The embedded device. One of the right size is used again, since there may not be room for two. */
static int choose_data(struct making *m)
{
	const char *name = KV_STORE_DATA;
	struct stat st;
	bool there = fstatat(m->directory_fd, KV_STORE_DATA, &st, AT_SYMLINK_NOFOLLOW) == 0;
	int r = 0;

	if (!there || !S_ISREG(st.st_mode) ||
		(m->size_bytes != 0 && (uint64_t)st.st_size != m->size_bytes) ||
		(uint64_t)st.st_size < DATA_SIZE_MIN) {
		name = DATA_NEW;
		m->made_data = true;
		if (m->size_bytes == 0)
			r = default_size(m, &m->size_bytes);
	}
	if (r < 0)
		return r;
	m->lines[0] = strdup(KV_STORE_DATA);
	m->count = 1;
	if (!m->lines[0] || kv_store_device_path(m->path, name, &m->paths[0]) < 0)
		return kv_fail(&m->error, -ENOMEM, "out of memory");
	return 0;
}

/* The list keeps names as given (links in /dev/disk/by-id are stable), made absolute. */
static int choose_device(struct making *m, const char *text)
{
	_cleanup_free_ char *cwd = NULL;
	unsigned number = m->count;
	size_t store_length = strlen(m->path);
	int r;

	if (text[0] == '\0' || strchr(text, '\n'))
		return kv_fail(&m->error, -EINVAL,
			"a device path that is empty or has a line break cannot be used");
	cwd = text[0] == '/' ? strdup("") : getcwd(NULL, 0);
	if (!cwd || asprintf(&m->lines[number], "%s%s%s", cwd, text[0] == '/' ? "" : "/", text) < 0)
		return kv_fail(&m->error, -ENOMEM, "out of memory");
	m->count++;
	if (strlen(m->lines[number]) >= PATH_MAX)
		r = -ENAMETOOLONG;
	else
		r = kv_store_device_path(m->path, m->lines[number], &m->paths[number]);
	if (r < 0)
		return kv_fail(&m->error, r, "device %s cannot be used: %s", text, strerror(-r));
	if (strncmp(m->paths[number], m->path, store_length) == 0 &&
		m->paths[number][store_length] == '/')
		return kv_fail(&m->error, -EINVAL,
			"device %s is inside the store; put it elsewhere, or leave out --device",
			text);
	for (unsigned i = 0; i < number; i++)
		if (strcmp(m->paths[i], m->paths[number]) == 0)
			return kv_fail(&m->error, -EINVAL, "device %s is named twice", text);
	return 0;
}

static int choose_devices(struct making *m)
{
	const struct kv_store_format *format = m->format;
	int r = 0;

	m->size_bytes = format->size_bytes;
	if (!format->devices || format->device_count == 0)
		return choose_data(m);
	if (format->device_count > KV_DEVICES_MAX)
		return kv_fail(&m->error, -E2BIG, "a store has at most %u devices, not %u",
			KV_DEVICES_MAX, format->device_count);
	for (unsigned i = 0; i < format->device_count && r == 0; i++)
		r = choose_device(m, format->devices[i]);
	return r;
}

static int write_device_list(struct making *m)
{
	_cleanup_fd_ int fd = openat(m->directory_fd, DEVICES_NEW,
		O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	FILE *file;
	bool failed = false;

	if (fd < 0)
		return -errno;
	file = fdopen(fd, "w");
	if (!file)
		return -errno;
	fd = -1;
	for (unsigned i = 0; i < m->count; i++)
		failed |= fprintf(file, "%s\n", m->lines[i]) < 0;
	failed |= fflush(file) != 0 || fsync(fileno(file)) < 0;
	failed |= fclose(file) != 0;
	return failed ? -EIO : 0;
}

static int make_index(struct making *m)
{
	_cleanup_free_ char *path = NULL;
	_cleanup_fd_ int fd = -1;
	int r;

	if (asprintf(&path, "%s/" INDEX_NEW, m->path) < 0) {
		path = NULL;
		return -ENOMEM;
	}
	if (mkdirat(m->directory_fd, INDEX_NEW, 0700) < 0)
		return -errno;
	r = kv_index_create(path, &m->store, ROOT_MODE, geteuid(), getegid(),
		m->ops->clock_ns(m->ops->context));
	if (r < 0)
		return r;
	fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	return fd < 0 || fsync(fd) < 0 ? -errno : 0;
}

int kv_store_swap(int directory_fd, const char *name, const char *name_new)
{
	if (renameat2(directory_fd, name_new, directory_fd, name, RENAME_EXCHANGE) == 0)
		return 0;
	if (errno != ENOENT)
		return -errno;
	return renameat(directory_fd, name_new, directory_fd, name) < 0 ? -errno : 0;
}

/* Called by kv_devices_format when all devices are ready, before it writes on them. */
static int prepare(void *arg, const uint64_t *blocks)
{
	struct making *m = arg;
	int r;

	m->store.device_count = m->count;
	memcpy(m->store.device_blocks, blocks, m->count * sizeof(blocks[0]));
	r = make_index(m);
	if (r == 0)
		r = write_device_list(m);
	if (r == 0) {
		r = kv_store_swap(m->directory_fd, KV_STORE_INDEX, INDEX_NEW);
		m->swapped_index = r == 0;
	}
	if (r == 0) {
		r = kv_store_swap(m->directory_fd, KV_STORE_DEVICES, DEVICES_NEW);
		m->swapped_devices = r == 0;
	}
	if (r < 0)
		return kv_fail(
			&m->error, r, "the index in %s cannot be made: %s", m->path, strerror(-r));
	return 0;
}

static void make_uuid(struct making *m)
{
	uint8_t *uuid = m->store.uuid;

	m->ops->random(m->ops->context, uuid, sizeof(m->store.uuid));
	/* Version 4, variant 1 of RFC 9562: random. */
	uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x40);
	uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80);
}

static int format_devices(struct making *m)
{
	const struct kv_devices_format devices = {
		.ops = m->ops,
		.paths = (const char *const *)m->paths,
		.count = m->count,
		.size_bytes = m->size_bytes,
		.uuid = m->store.uuid,
		.force = m->format->force,
		.prepare = prepare,
		.prepare_arg = m,
	};
	uint64_t blocks[KV_DEVICES_MAX];

	return kv_devices_format(&devices, blocks, m->error.text, m->error.size);
}

/* Renames in the data file, whose place kv_devices_format must not see change, and tidies up. */
static int finish(struct making *m)
{
	if (m->made_data && renameat(m->directory_fd, DATA_NEW, m->directory_fd, KV_STORE_DATA) < 0)
		return kv_fail(&m->error, -errno, "%s/" KV_STORE_DATA " cannot be made: %s",
			m->path, strerror(errno));
	/* The new store stands: from here on nothing is taken back. */
	m->swapped_index = m->swapped_devices = m->made_lock = m->made_directory = false;
	if (fchmod(m->directory_fd, 0700) < 0 || fsync(m->directory_fd) < 0)
		return kv_fail(
			&m->error, -errno, "%s cannot be written: %s", m->path, strerror(errno));
	/* The old store, if there was one, is under the ".new" names now. */
	(void)remove_new(m);
	if (strcmp(m->lines[0], KV_STORE_DATA) != 0)
		(void)unlinkat(m->directory_fd, KV_STORE_DATA, 0);
	return 0;
}

static int make_store(struct making *m)
{
	bool lock = false;
	int r = open_directory(m);

	if (r < 0)
		return r;
	r = check_content(m, &lock);
	if (r < 0)
		return r;
	m->lock_fd = kv_store_take_lock(&m->error, m->directory_fd, m->path, true);
	if (m->lock_fd < 0)
		return m->lock_fd;
	m->made_lock = !lock;
	/* Once more: another format may just have finished. */
	r = check_content(m, &lock);
	if (r < 0)
		return r;
	r = remove_new(m);
	if (r < 0)
		return kv_fail(&m->error, r,
			"the rest of an interrupted format in %s cannot be "
			"removed: %s",
			m->path, strerror(-r));
	r = choose_devices(m);
	if (r < 0)
		return r;
	make_uuid(m);
	r = format_devices(m);
	return r < 0 ? r : finish(m);
}

/* Takes everything back that was not there before. */
static void undo(struct making *m)
{
	if (m->swapped_devices)
		(void)kv_store_swap(m->directory_fd, DEVICES_NEW, KV_STORE_DEVICES);
	if (m->swapped_index)
		(void)kv_store_swap(m->directory_fd, INDEX_NEW, KV_STORE_INDEX);
	if (m->lock_fd >= 0)
		(void)remove_new(m);
	if (m->made_lock)
		(void)unlinkat(m->directory_fd, KV_STORE_LOCK, 0);
	if (m->made_directory)
		(void)rmdir(m->format->path);
}

int kv_store_format(const struct kv_store_format *format, char *ret_error, size_t error_size)
{
	struct making *m = calloc(1, sizeof(*m));
	int r;

	if (!m) {
		(void)snprintf(ret_error, error_size, "out of memory");
		return -ENOMEM;
	}
	m->format = format;
	m->ops = format->ops ? format->ops : kv_io_real();
	m->error = (struct kv_error){ret_error, error_size};
	m->directory_fd = -1;
	m->lock_fd = -1;
	r = make_store(m);
	if (r < 0)
		undo(m);
	for (unsigned i = 0; i < m->count; i++) {
		free(m->lines[i]);
		free(m->paths[i]);
	}
	if (m->lock_fd >= 0)
		(void)close(m->lock_fd);
	if (m->directory_fd >= 0)
		(void)close(m->directory_fd);
	free(m->path);
	free(m);
	return r;
}
