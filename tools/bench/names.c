/* SPDX-License-Identifier: Apache-2.0 */
/* Loads on names alone: storms of existence checks, one by one and in batches, listings, walks. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include "fs/base.h"
#include "fs/kvfs_ioctl.h"
#include "tools/bench/kvbench.h"

/* Far from the numbers of files that are there. */
#define ABSENT_FIRST (UINT64_C(1) << 40)

/* The names asked for in turn: all COUNT of them, or OPS drawn from them if that is fewer. */
static uint64_t pool_size(const struct bench *bench)
{
	return bench->ops > 0 ? kv_min_u64(bench->ops, bench->count) : bench->count;
}

static uint64_t count_calls(const struct bench *bench)
{
	return bench->ops > 0 ? bench->ops : bench->count;
}

/* Making the names would cost a tenth of looking them up. */
static int prepare_names(const struct bench *bench, void **ret_state)
{
	uint64_t size = pool_size(bench);
	char(*names)[NAME_BYTES] = calloc(size + 1, sizeof(names[0]));
	uint64_t first = bench->first + (bench->absent ? ABSENT_FIRST : 0);

	if (!names)
		return bench_fail("names", "calloc", -ENOMEM);
	for (uint64_t i = 0; i < size; i++) {
		uint64_t index = size == bench->count
					 ? i
					 : pattern_mix(bench->seed << 32 ^ i) % bench->count;

		pattern_name(bench, first + index, names[i]);
	}
	*ret_state = names;
	return 0;
}

static void release_names(const struct bench *bench, void *state)
{
	free(state);
}

static int check_name(struct worker *worker, uint64_t call)
{
	const char(*names)[NAME_BYTES] = run_state(worker);
	uint64_t index = call % pool_size(worker->bench);
	int r = access(names[index], F_OK) < 0 ? -errno : 0;

	worker->ops++;
	if (r == (worker->bench->absent ? -ENOENT : 0))
		return 0;
	return bench_fail(names[index], "access", r < 0 ? r : -EEXIST);
}

const struct kernel kernel_access = {
	.name = "access",
	.help = "ask for COUNT names by access(), OPS times; there, or --absent",
	.items = count_calls,
	.prepare = prepare_names,
	.item = check_name,
	.release = release_names,
};

/* ---- In batches ---- */

/* All COUNT names at once, as an engine asks for the blocks of a prompt. */
static int look_up_names(struct worker *worker, uint64_t item)
{
	const char(*names)[NAME_BYTES] = run_state(worker);
	const struct bench *bench = worker->bench;
	const char **list = calloc(bench->count, sizeof(list[0]));
	_cleanup_fd_ int fd = open(".", O_RDONLY | O_DIRECTORY);
	long present;

	if (!list)
		return bench_fail("names", "calloc", -ENOMEM);
	for (uint64_t i = 0; i < bench->count; i++)
		list[i] = names[i];
	present = fd < 0 ? -1 : kvfs_lookup_names(fd, list, bench->count, 0, NULL);
	free(list);
	if (present < 0)
		return bench_fail(bench->directory, "KVFS_IOC_LOOKUP", -errno);
	worker->ops += bench->count;
	if ((uint64_t)present != (bench->absent ? 0 : bench->count))
		return bench_fail(bench->directory, "counting the names", -ERANGE);
	return 0;
}

static uint64_t count_once(const struct bench *bench)
{
	return 1;
}

const struct kernel kernel_lookup = {
	.name = "lookup",
	.help = "ask kvfs for COUNT names by the batch look-up; there, or --absent",
	.items = count_once,
	.prepare = prepare_names,
	.item = look_up_names,
	.release = release_names,
};

/* ---- Listing ---- */

static uint64_t one(const struct bench *bench)
{
	return 1;
}

static int walk(struct worker *worker, bool with_stat)
{
	DIR *directory = opendir(".");
	struct dirent *entry;
	int r = 0;

	if (!directory)
		return bench_fail(worker->bench->directory, "opendir", -errno);
	while (errno = 0, r == 0 && (entry = readdir(directory)) != NULL) {
		struct stat st;

		if (entry->d_name[0] == '.')
			continue;
		worker->ops++;
		if (with_stat &&
			fstatat(dirfd(directory), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
			r = bench_fail(entry->d_name, "stat", -errno);
		else if (with_stat && (uint64_t)st.st_size != worker->bench->size)
			r = bench_fail(entry->d_name, "checking the size", -ERANGE);
	}
	if (errno != 0 && r == 0)
		r = bench_fail(worker->bench->directory, "readdir", -errno);
	(void)closedir(directory);
	if (r == 0 && worker->ops != worker->bench->count)
		r = bench_fail(worker->bench->directory, "counting the entries", -ERANGE);
	return r;
}

static int list_item(struct worker *worker, uint64_t item)
{
	return walk(worker, false);
}

static int walk_item(struct worker *worker, uint64_t item)
{
	return walk(worker, true);
}

const struct kernel kernel_list = {
	.name = "list",
	.help = "list a directory of COUNT entries, as ls -U",
	.items = one,
	.item = list_item,
};

const struct kernel kernel_walk = {
	.name = "walk",
	.help = "list a directory of COUNT entries and stat each, as find -size",
	.items = one,
	.item = walk_item,
};
