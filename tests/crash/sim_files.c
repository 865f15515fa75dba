/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam to what LMDB writes: these functions of the C library are this program's own, and those
 * of liblmdb that write end here. Whatever does not concern the index's file goes on to the kernel.
 */
/* Both sets of names are made here, so none may stand for the other. */
#undef _FILE_OFFSET_BITS
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fs/base.h"
#include "tests/crash/sim.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT ssize_t pwrite(int fd, const void *memory, size_t length, off_t offset);
EXPORT ssize_t pwrite64(int fd, const void *memory, size_t length, off_t offset);
EXPORT ssize_t writev(int fd, const struct iovec *vectors, int count);
EXPORT ssize_t pwritev(int fd, const struct iovec *vectors, int count, off_t offset);
EXPORT ssize_t pwritev64(int fd, const struct iovec *vectors, int count, off_t offset);
EXPORT int fdatasync(int fd);
EXPORT int fsync(int fd);

static bool is_index(int fd)
{
	struct stat st, index;

	return sim_current && fstat(fd, &st) == 0 && stat(sim_current->index_path, &index) == 0 &&
	       st.st_ino == index.st_ino && st.st_dev == index.st_dev;
}

static ssize_t real_pwrite(int fd, const void *memory, size_t length, off_t offset)
{
	return syscall(SYS_pwrite64, fd, memory, length, offset);
}

/* One piece of a write. The file is on a tmpfs: it takes what it gets. */
static ssize_t index_write(int fd, const void *memory, size_t length, off_t offset)
{
	struct sim *sim = sim_current;
	size_t event, done = length;
	int error = 0;
	KV_LOCKED(&sim->lock);

	if (sim_strikes(sim, SIM_FAULT_INDEX_WRITE))
		error = EIO;
	else if (length < KV_BLOCK_SIZE && sim_strikes(sim, SIM_FAULT_INDEX_HEAD))
		error = EIO;
	else if (sim_strikes(sim, SIM_FAULT_INDEX_FULL))
		error = ENOSPC;
	/* Less than a block is of a head page of LMDB's, which counts on whole sectors. */
	if (error)
		done = length / 2 & ~(size_t)(KV_BLOCK_SIZE - 1);
	if (done > 0) {
		event = sim_note_write(sim, SIM_INDEX, memory, (uint32_t)done, (uint64_t)offset);
		if (real_pwrite(fd, memory, done, offset) != (ssize_t)done)
			abort();
		sim_completed(sim, event);
	}
	if (error) {
		errno = error;
		return -1;
	}
	return (ssize_t)done;
}

static ssize_t index_writev(int fd, const struct iovec *vectors, int count, off_t offset)
{
	ssize_t done = 0;

	for (int i = 0; i < count; i++) {
		ssize_t n = index_write(fd, vectors[i].iov_base, vectors[i].iov_len, offset + done);

		if (n < 0)
			return -1;
		done += n;
	}
	return done;
}

ssize_t pwrite(int fd, const void *memory, size_t length, off_t offset)
{
	return is_index(fd) ? index_write(fd, memory, length, offset)
			    : real_pwrite(fd, memory, length, offset);
}

ssize_t pwrite64(int fd, const void *memory, size_t length, off_t offset)
{
	return pwrite(fd, memory, length, offset);
}

ssize_t writev(int fd, const struct iovec *vectors, int count)
{
	off_t offset;
	ssize_t n;

	if (!is_index(fd))
		return syscall(SYS_writev, fd, vectors, count);
	offset = lseek(fd, 0, SEEK_CUR);
	n = index_writev(fd, vectors, count, offset);
	if (n > 0)
		(void)lseek(fd, offset + n, SEEK_SET);
	return n;
}

ssize_t pwritev(int fd, const struct iovec *vectors, int count, off_t offset)
{
	return is_index(fd) ? index_writev(fd, vectors, count, offset)
			    : syscall(SYS_pwritev, fd, vectors, count, offset, 0);
}

ssize_t pwritev64(int fd, const struct iovec *vectors, int count, off_t offset)
{
	return pwritev(fd, vectors, count, offset);
}

static int index_flush(void)
{
	struct sim *sim = sim_current;
	KV_LOCKED(&sim->lock);
	bool failed = sim_strikes(sim, SIM_FAULT_INDEX_FLUSH);

	sim_note_flush(sim, SIM_INDEX, sim->count, failed);
	if (failed)
		errno = EIO;
	return failed ? -1 : 0;
}

/* Nothing here needs to outlive this process: other files are not flushed. */
int fdatasync(int fd)
{
	return is_index(fd) ? index_flush() : 0;
}

int fsync(int fd)
{
	return fdatasync(fd);
}

/* ---- Images ---- */

void sim_file_store(const char *path, const uint8_t *const *blocks, uint64_t size)
{
	static uint8_t *memory;
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

	if (!memory)
		memory = malloc(SIM_DEVICE_SIZE);
	if (fd < 0 || !memory || ftruncate(fd, (off_t)size) < 0)
		abort();
	for (uint32_t b = 0; (uint64_t)b * KV_BLOCK_SIZE < size; b++) {
		uint8_t *to = memory + (size_t)b * KV_BLOCK_SIZE;

		if (blocks[b])
			memcpy(to, blocks[b], KV_BLOCK_SIZE);
		else
			memset(to, 0, KV_BLOCK_SIZE);
	}
	if (real_pwrite(fd, memory, size, 0) != (ssize_t)size)
		abort();
	(void)close(fd);
}

uint64_t sim_file_fetch(const char *path, const uint8_t **ret_blocks)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0 || (uint64_t)st.st_size > SIM_DEVICE_SIZE)
		abort();
	for (uint32_t b = 0; (off_t)b * (off_t)KV_BLOCK_SIZE < st.st_size; b++) {
		uint8_t *block = calloc(1, KV_BLOCK_SIZE);

		if (!block || pread(fd, block, KV_BLOCK_SIZE, (off_t)b * (off_t)KV_BLOCK_SIZE) < 0)
			abort();
		ret_blocks[b] = block;
	}
	(void)close(fd);
	return (uint64_t)st.st_size;
}
