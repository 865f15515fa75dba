/* SPDX-License-Identifier: Apache-2.0 */
/* Loads that read files: whole ones by pread, mapped ones, and small pieces at random places. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

#include "fs/base.h"
#include "tools/bench/kvbench.h"

/* Independent sums, so that a scan waits for memory and not for additions. */
#define SUMS 8u
/* Where no --ops says how many. */
#define RANDOM_OPS 100000u

static int open_file(const struct bench *bench, uint64_t index, int *ret_fd)
{
	char name[NAME_BYTES];
	int fd;

	pattern_name(bench, bench->first + index, name);
	fd = open(name, O_RDONLY | O_CLOEXEC | (bench->direct ? O_DIRECT : 0));
	if (fd < 0)
		return bench_fail(name, "open", -errno);
	*ret_fd = fd;
	return 0;
}

/* Opens all the files, so that only reading them is measured. */
static int prepare_files(const struct bench *bench, void **ret_state)
{
	int *fds;

	if (bench->reopen)
		return 0;
	fds = calloc(bench->count, sizeof(fds[0]));
	if (!fds)
		return bench_fail("descriptors", "calloc", -ENOMEM);
	for (uint64_t i = 0; i < bench->count; i++) {
		int r = open_file(bench, i, &fds[i]);

		if (r < 0) { /* the open ones close with the process */
			free(fds);
			return r;
		}
	}
	*ret_state = fds;
	return 0;
}

static void release_files(const struct bench *bench, void *state)
{
	int *fds = state;

	for (uint64_t i = 0; fds && i < bench->count; i++)
		(void)close(fds[i]);
	free(fds);
}

static int read_block(struct worker *worker, int fd, struct place place, uint64_t size)
{
	char name[NAME_BYTES];
	ssize_t n = pread(fd, worker->buffer, size, (off_t)place.offset);

	worker->bytes += size;
	worker->ops++;
	if (n == (ssize_t)size && pattern_check(worker->buffer, size, place, worker->bench->verify))
		return 0;
	pattern_name(worker->bench, place.file, name);
	return bench_fail(name, "pread", n < 0 ? -errno : n < (ssize_t)size ? -EIO : -EBADMSG);
}

static int read_file(struct worker *worker, uint64_t index)
{
	const struct bench *bench = worker->bench;
	const int *fds = run_state(worker);
	_cleanup_fd_ int opened = -1;
	int r = 0;

	if (!fds)
		r = open_file(bench, index, &opened);
	for (uint64_t offset = 0; r == 0 && offset < bench->size; offset += bench->block)
		r = read_block(worker, fds ? fds[index] : opened,
			(struct place){bench->first + index, offset},
			kv_min_u64(bench->block, bench->size - offset));
	return r;
}

static uint64_t count_files(const struct bench *bench)
{
	return bench->count;
}

const struct kernel kernel_read = {
	.name = "read",
	.help = "read COUNT files of SIZE bytes by preads of BLOCK bytes",
	.items = count_files,
	.prepare = prepare_files,
	.item = read_file,
	.release = release_files,
};

/* ---- Random pieces ---- */

static uint64_t count_ops(const struct bench *bench)
{
	return bench->ops > 0 ? bench->ops : RANDOM_OPS;
}

static int read_piece(struct worker *worker, uint64_t item)
{
	const struct bench *bench = worker->bench;
	const int *fds = run_state(worker);
	uint64_t blocks = bench->size / bench->block;
	uint64_t piece = pattern_mix(bench->seed + item) % (bench->count * blocks);
	uint64_t index = piece / blocks;

	return read_block(worker, fds[index],
		(struct place){bench->first + index, piece % blocks * bench->block}, bench->block);
}

static int prepare_pieces(const struct bench *bench, void **ret_state)
{
	if (bench->reopen || bench->count == 0 || bench->size < bench->block)
		return bench_fail("random", "making sense of the options", -EINVAL);
	return prepare_files(bench, ret_state);
}

const struct kernel kernel_random = {
	.name = "random",
	.help = "OPS preads of BLOCK bytes at random places of COUNT open files",
	.items = count_ops,
	.prepare = prepare_pieces,
	.item = read_piece,
	.release = release_files,
};

/* ---- Mappings ---- */

static uint64_t scan(const uint64_t *word, uint64_t size)
{
	uint64_t sums[SUMS] = {0}, sum = 0;

	for (uint64_t i = 0; i < size / sizeof(*word); i += SUMS) {
		for (unsigned j = 0; j < SUMS; j++)
			sums[j] += word[i + j];
	}
	for (unsigned j = 0; j < SUMS; j++)
		sum += sums[j];
	return sum;
}

static int scan_file(struct worker *worker, uint64_t index)
{
	const struct bench *bench = worker->bench;
	struct place place = {bench->first + index, 0};
	_cleanup_fd_ int fd = -1;
	void *memory;
	bool right;
	int r = open_file(bench, index, &fd);

	if (r < 0)
		return r;
	memory = mmap(NULL, bench->size, PROT_READ, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return bench_fail("file", "mmap", -errno);
	worker->sum += scan(memory, bench->size);
	worker->bytes += bench->size;
	worker->ops++;
	right = pattern_check(memory, bench->size, place, bench->verify);
	(void)munmap(memory, bench->size);
	return right ? 0 : bench_fail("mapping", "scan", -EBADMSG);
}

const struct kernel kernel_mmap = {
	.name = "mmap",
	.help = "map COUNT files of SIZE bytes in turn and read every word",
	.items = count_files,
	.item = scan_file,
};
