/* SPDX-License-Identifier: Apache-2.0 */
/* Loads that make, copy and remove files. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include "fs/base.h"
#include "tools/bench/kvbench.h"

#define TEMPORARY_SUFFIX ".tmp"

static uint64_t count_files(const struct bench *bench)
{
	return bench->count;
}

static int make_fan(const struct bench *bench, void **ret_state)
{
	char name[NAME_BYTES];

	for (uint64_t i = 0; i < bench->fan; i++) {
		pattern_fan(i, name);
		if (mkdir(name, 0755) < 0 && errno != EEXIST)
			return bench_fail(name, "mkdir", -errno);
	}
	return 0;
}

static int write_content(struct worker *worker, int fd, uint64_t number)
{
	const struct bench *bench = worker->bench;

	for (uint64_t offset = 0; offset < bench->size; offset += bench->block) {
		uint64_t size = kv_min_u64(bench->block, bench->size - offset);
		ssize_t n;

		pattern_stamp(worker->buffer, size, (struct place){number, offset});
		n = write(fd, worker->buffer, size);
		if (n != (ssize_t)size)
			return n < 0 ? -errno : -EIO;
		worker->bytes += size;
	}
	return 0;
}

static int write_file(struct worker *worker, const char *name, uint64_t number)
{
	const struct bench *bench = worker->bench;
	int fd = open(name,
		O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC | (bench->direct ? O_DIRECT : 0), 0644);
	int r;

	if (fd < 0)
		return bench_fail(name, "open for writing", -errno);
	r = write_content(worker, fd, number);
	if (r < 0)
		(void)bench_fail(name, "write", r);
	if (close(fd) < 0 && r == 0)
		r = bench_fail(name, "close", -errno);
	return r;
}

static int store_file(struct worker *worker, uint64_t index)
{
	const struct bench *bench = worker->bench;
	uint64_t number = bench->first + index;
	char name[NAME_BYTES], temporary[NAME_BYTES + sizeof(TEMPORARY_SUFFIX)];
	int r;

	worker->ops++;
	pattern_name(bench, number, name);
	if (!bench->rename)
		return write_file(worker, name, number);
	(void)snprintf(temporary, sizeof(temporary), "%s" TEMPORARY_SUFFIX, name);
	r = write_file(worker, temporary, number);
	if (r == 0 && rename(temporary, name) < 0)
		r = bench_fail(temporary, "rename", -errno);
	return r;
}

/*
 * Makes all that was stored durable: syncfs does it where the kernel holds the data, fsync of the
 * directory where a daemon does, which syncfs does not ask.
 */
static int sync_all(const struct bench *bench)
{
	_cleanup_fd_ int fd = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0 || syncfs(fd) < 0 || fsync(fd) < 0)
		return bench_fail(bench->directory, "sync", -errno);
	return 0;
}

static int sync_if_asked(const struct bench *bench)
{
	return bench->sync ? sync_all(bench) : 0;
}

const struct kernel kernel_store = {
	.name = "store",
	.help = "store COUNT files of SIZE bytes by writes of BLOCK bytes",
	.items = count_files,
	.prepare = make_fan,
	.item = store_file,
	.finish = sync_if_asked,
};

/* ---- Removing ---- */

static int remove_file(struct worker *worker, uint64_t index)
{
	char name[NAME_BYTES];

	worker->ops++;
	pattern_name(worker->bench, worker->bench->first + index, name);
	return unlink(name) < 0 ? bench_fail(name, "unlink", -errno) : 0;
}

const struct kernel kernel_unlink = {
	.name = "unlink",
	.help = "unlink COUNT files",
	.items = count_files,
	.item = remove_file,
	.finish = sync_if_asked,
};

/* ---- Copying ---- */

static int copy_content(struct worker *worker, int from, int to)
{
	uint64_t done = 0;

	while (done < worker->bench->size) {
		ssize_t n = copy_file_range(from, NULL, to, NULL, worker->bench->size - done, 0);

		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		done += (uint64_t)n;
	}
	worker->bytes += done;
	worker->ops++;
	return 0;
}

/* File FIRST + index becomes, as cp does it, a file of the same name with an ending. */
static int copy_file(struct worker *worker, uint64_t index)
{
	char name[NAME_BYTES], copy[NAME_BYTES + sizeof(".copy")];
	_cleanup_fd_ int from = -1, to = -1;
	int r;

	pattern_name(worker->bench, worker->bench->first + index, name);
	(void)snprintf(copy, sizeof(copy), "%s.copy", name);
	from = open(name, O_RDONLY | O_CLOEXEC);
	if (from < 0)
		return bench_fail(name, "open", -errno);
	to = open(copy, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
	if (to < 0)
		return bench_fail(copy, "open for writing", -errno);
	r = copy_content(worker, from, to);
	if (close(to) < 0 && r == 0)
		r = -errno;
	to = -1;
	return r < 0 ? bench_fail(copy, "copy_file_range", r) : 0;
}

const struct kernel kernel_copy = {
	.name = "copy",
	.help = "copy_file_range COUNT files of SIZE bytes to NAME.copy",
	.items = count_files,
	.item = copy_file,
	.finish = sync_if_asked,
};

/* ---- Syncing ---- */

static uint64_t one(const struct bench *bench)
{
	return 1;
}

static int sync_item(struct worker *worker, uint64_t item)
{
	worker->ops++;
	return sync_all(worker->bench);
}

const struct kernel kernel_sync = {
	.name = "sync",
	.help = "make everything in DIR's filesystem durable",
	.items = one,
	.item = sync_item,
};
