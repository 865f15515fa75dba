/* SPDX-License-Identifier: Apache-2.0 */
/* Loads on a pool: one file that is cut to its size first, and of which only pieces are written. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "fs/base.h"
#include "tools/bench/kvbench.h"

#define POOL_OPS 20000u

static uint64_t count_ops(const struct bench *bench)
{
	return bench->ops > 0 ? bench->ops : POOL_OPS;
}

static struct place place_of(const struct bench *bench, uint64_t item)
{
	uint64_t piece = pattern_mix(bench->seed + item) % (bench->size / bench->block);

	return (struct place){bench->first, piece * bench->block};
}

static int write_piece(const struct bench *bench, int fd, void *memory, uint64_t item)
{
	struct place place = place_of(bench, item);

	pattern_stamp(memory, bench->block, place);
	ssize_t n = pwrite(fd, memory, bench->block, (off_t)place.offset);
	return n == (ssize_t)bench->block ? 0 : n < 0 ? -errno : -EIO;
}

static int read_piece(const struct bench *bench, int fd, void *memory, uint64_t item)
{
	struct place place = place_of(bench, item);
	ssize_t n = pread(fd, memory, bench->block, (off_t)place.offset);

	if (n < 0)
		return -errno;
	return pattern_check(memory, bench->block, place, bench->verify) ? 0 : -EBADMSG;
}

static int use_piece(struct worker *worker, uint64_t item)
{
	const struct bench *bench = worker->bench;
	const int *fd = run_state(worker);
	int r = bench->write ? write_piece(bench, *fd, worker->buffer, item)
			     : read_piece(bench, *fd, worker->buffer, item);

	worker->ops++;
	worker->bytes += bench->block;
	return r < 0 ? bench_fail("pool", bench->write ? "pwrite" : "pread", r) : 0;
}

/* What is to be read has to be there. */
static int write_all(const struct bench *bench, int fd)
{
	void *memory = bench_memory(bench->block);
	int r = memory ? 0 : -ENOMEM;

	if (memory)
		pattern_fill(memory, bench->block);
	for (uint64_t i = 0; i < count_ops(bench) && r == 0; i++)
		r = write_piece(bench, fd, memory, i);
	return r < 0 ? bench_fail("pool", "pwrite", r) : 0;
}

static int make_pool(const struct bench *bench, void **ret_state)
{
	char name[NAME_BYTES];
	int *fd;
	int r;

	if (bench->block == 0 || bench->size < bench->block)
		return bench_fail("pool", "making sense of the options", -EINVAL);
	fd = malloc(sizeof(*fd));
	if (!fd)
		return bench_fail("pool", "malloc", -ENOMEM);
	pattern_name(bench, bench->first, name);
	*fd = open(name, O_CREAT | O_RDWR | O_CLOEXEC | (bench->direct ? O_DIRECT : 0), 0644);
	r = *fd < 0 || ftruncate(*fd, (off_t)bench->size) < 0 ? -errno : 0;
	if (r < 0)
		(void)bench_fail(name, "making a pool", r);
	else if (!bench->write)
		r = write_all(bench, *fd);
	if (r == 0)
		*ret_state = fd;
	else
		free(fd); /* the descriptor closes with the process */
	return r;
}

static void close_pool(const struct bench *bench, void *state)
{
	int *fd = state;

	(void)bench;
	if (fd)
		(void)close(*fd);
	free(fd);
}

const struct kernel kernel_pool = {
	.name = "pool",
	.help = "read, or --write, OPS blocks at random places of a new file of SIZE bytes",
	.items = count_ops,
	.prepare = make_pool,
	.item = use_piece,
	.release = close_pool,
};
