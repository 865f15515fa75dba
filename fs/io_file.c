/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening, locking and creating real devices, and the plain calls on them: the file half of the
 * real kv_io_ops table.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "fs/base.h"
#include "fs/io_internal.h"
#include "fs/log.h"

#define INTERRUPTS_MAX 100

/* Makes the name of a new file durable. Best effort: the format flushes the file itself anyway. */
static void sync_parent(const char *path)
{
	_cleanup_free_ char *parent = strdup(path);
	_cleanup_fd_ int fd = -1;
	char *slash = parent ? strrchr(parent, '/') : NULL;

	if (slash)
		slash[slash == parent ? 1 : 0] = '\0';
	fd = open(slash ? parent : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd >= 0)
		(void)fsync(fd);
}

/* Preallocates, so that the store cannot run out of space later; sparse where that is not known. */
static int allocate_file(int fd, uint64_t size)
{
	struct statvfs st;
	int r = -EINTR;

	if (fstatvfs(fd, &st) < 0)
		return -errno;
	if ((uint64_t)st.f_bavail * st.f_frsize < size)
		return -ENOSPC;
	for (unsigned i = 0; i < INTERRUPTS_MAX && r == -EINTR; i++)
		r = fallocate(fd, 0, 0, (off_t)size) < 0 ? -errno : 0;
	if (r == -EOPNOTSUPP || r == -ENOSYS)
		r = ftruncate(fd, (off_t)size) < 0 ? -errno : 0;
	if (r == 0 && fsync(fd) < 0)
		r = -errno;
	return r;
}

/*
 * Opens PATH. O_EXCL claims a block device (-EBUSY while it is mounted); with O_CREAT it means a
 * new file; on files that exist Linux ignores it.
 */
static int open_device(const char *path, bool create)
{
	int flags = O_RDWR | O_EXCL | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY;
	int fd = open(path, create ? flags | O_CREAT : flags, 0600);

	return fd < 0 ? -errno : fd;
}

/*
 * Turns direct I/O on, after the open, so that a filesystem that refuses it has not half opened the
 * file. Some take the flag and then want larger blocks than ours: one read tells.
 */
static int set_direct(int fd, const char *path)
{
	_cleanup_free_ void *block = aligned_alloc(KV_BLOCK_SIZE, KV_BLOCK_SIZE);
	int flags = fcntl(fd, F_GETFL);

	if (!block)
		return -ENOMEM;
	if (flags < 0)
		return -errno;
	if (fcntl(fd, F_SETFL, flags | O_DIRECT) == 0) {
		if (pread(fd, block, KV_BLOCK_SIZE, 0) >= 0 || errno != EINVAL)
			return 0;
		if (fcntl(fd, F_SETFL, flags) < 0)
			return -errno;
	}
	kv_log_info("device", "direct I/O is not possible, using the page cache device=%s", path);
	return 0;
}

static int lock_and_measure(int fd, uint64_t *ret_size)
{
	struct stat st;
	uint64_t size;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (S_ISBLK(st.st_mode)) {
		if (ioctl(fd, BLKGETSIZE64, &size) < 0)
			return -errno;
		*ret_size = size;
		return 0;
	}
	if (!S_ISREG(st.st_mode))
		return -ENOTBLK;
	/* Whoever has the other name may read what is on it. */
	if (st.st_nlink > 1)
		return -EMLINK;
	if (flock(fd, LOCK_EX | LOCK_NB) < 0)
		return errno == EWOULDBLOCK ? -EBUSY : -errno;
	*ret_size = (uint64_t)st.st_size;
	return 0;
}

int kv_io_file_open(void *context, const char *path, bool create, uint64_t size, int *ret_handle,
	uint64_t *ret_size)
{
	_cleanup_fd_ int fd = -1;
	uint64_t found = 0;
	int r;

	(void)context;
	if (size > INT64_MAX)
		return -EFBIG;
	fd = open_device(path, create);
	if (fd < 0)
		return fd;
	r = create ? allocate_file(fd, size) : 0;
	if (r == 0)
		r = lock_and_measure(fd, &found);
	if (r == 0)
		r = set_direct(fd, path);
	if (r < 0) {
		if (create)
			(void)unlink(path);
		return r;
	}
	if (create)
		sync_parent(path);
	*ret_size = found;
	*ret_handle = kv_steal_fd(&fd);
	return 0;
}

void kv_io_file_close(void *context, int handle)
{
	(void)context;
	/* A ring that registered the file may hold it a moment longer than this descriptor: not the
	 * lock, too. */
	(void)flock(handle, LOCK_UN);
	(void)close(handle);
}

int kv_io_file_read(void *context, int handle, void *memory, size_t length, uint64_t offset)
{
	char *p = memory;

	(void)context;
	while (length > 0) {
		ssize_t n = pread(handle, p, length, (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		p += n;
		offset += (size_t)n;
		length -= (size_t)n;
	}
	return 0;
}

int kv_io_file_write(void *context, int handle, const void *memory, size_t length, uint64_t offset)
{
	const char *p = memory;

	(void)context;
	while (length > 0) {
		ssize_t n = pwrite(handle, p, length, (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		p += n;
		offset += (size_t)n;
		length -= (size_t)n;
	}
	return 0;
}

int kv_io_file_flush(void *context, int handle)
{
	(void)context;
	return fdatasync(handle) < 0 ? -errno : 0;
}
