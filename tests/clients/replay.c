/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replays what engines do with files whose own code cannot run here: it needs a GPU, or is not in
 * the package index. The system calls, their flags and their sizes are those of the source named
 * above each shape; the bytes are checked, and so is that no call fails or comes out short.
 *
 *     replay SHAPE DIR pool           a pool file of one process: written, read, rewritten; with
 *                                     input waiting, says "stored" in between and waits for a line
 *     replay SHAPE DIR store COUNT    COUNT blocks, a file (or a slot) each
 *     replay SHAPE DIR load COUNT     checks them, and prints how many are still there
 *
 * Exits 1 with one line that says which call failed.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/clients/replay.h"

static const char *arg_shape;

/* ---- What all shapes share ---- */

void replay_fail(const char *format, ...)
{
	va_list args;

	(void)fprintf(stderr, "replay: %s: ", arg_shape);
	va_start(args, format);
	(void)vfprintf(stderr, format, args);
	va_end(args);
	(void)fputc('\n', stderr);
	exit(1);
}

void replay_expect(int64_t result, uint64_t wanted, const char *what)
{
	if (result < 0)
		replay_fail("%s: %s", what, strerror(errno));
	if ((uint64_t)result != wanted)
		replay_fail("%s: %" PRId64 " instead of %" PRIu64, what, result, wanted);
}

const char *replay_path(char *path, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	if (vsnprintf(path, PATH_MAX, format, args) >= PATH_MAX)
		replay_fail("the path is too long");
	va_end(args);
	return path;
}

int replay_open(const char *path, int flags, mode_t mode)
{
	int fd = open(path, flags, mode);

	if (fd < 0)
		replay_fail("open %s, flags %#x: %s", path, (unsigned)flags, strerror(errno));
	return fd;
}

void replay_close(int fd)
{
	replay_expect(close(fd), 0, "close");
}

void replay_make_dir(const char *path)
{
	if (mkdir(path, 0777) < 0 && errno != EEXIST)
		replay_fail("mkdir %s: %s", path, strerror(errno));
}

void *replay_memory(uint64_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		replay_fail("no memory");
	return p;
}

static uint64_t word_of(uint64_t seed, uint64_t i)
{
	uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + i * UINT64_C(0xbf58476d1ce4e5b9);

	return x ^ x >> 29;
}

void replay_fill(void *data, uint64_t size, uint64_t seed)
{
	uint64_t *words = data;

	for (uint64_t i = 0; i < size / 8; i++)
		words[i] = word_of(seed, i);
}

void replay_verify(const void *data, uint64_t size, uint64_t seed, const char *what)
{
	const uint64_t *words = data;

	for (uint64_t i = 0; i < size / 8; i++)
		if (words[i] != word_of(seed, i))
			replay_fail("%s: wrong bytes at %" PRIu64 " of block %" PRIu64, what, i * 8,
				seed);
}

/* ---- The table ---- */

static const struct shape {
	const char *name;
	void (*pool)(const char *dir);
	void (*store)(const char *dir, uint64_t count);
	uint64_t (*load)(const char *dir, uint64_t count);
} shapes[] = {
	{.name = "dynamo", .pool = replay_dynamo_pool},
	{.name = "dynamo-zeros", .pool = replay_dynamo_zeros_pool},
	{.name = "dynamo-path", .store = replay_dynamo_path_store, .load = replay_dynamo_path_load},
	{.name = "vllm-disk", .pool = replay_vllm_disk_pool},
	{.name = "flexkv", .pool = replay_flexkv_pool},
	{.name = "3fs", .store = replay_hf3fs_store, .load = replay_hf3fs_load},
	{.name = "lmcache-gds", .store = replay_gds_store, .load = replay_gds_load},
	{.name = "ucm", .store = replay_ucm_store, .load = replay_ucm_load},
	{.name = "llm-d", .store = replay_llmd_store, .load = replay_llmd_load},
	{.name = "ds4", .store = replay_ds4_store, .load = replay_ds4_load},
};

static int usage(void)
{
	(void)fprintf(stderr, "usage: replay SHAPE DIR pool | store COUNT | load COUNT\n");
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
		(void)fprintf(stderr, "  %s: %s\n", shapes[i].name,
			shapes[i].pool ? "pool" : "store, load");
	return 2;
}

int main(int argc, char **argv)
{
	const struct shape *shape = NULL;
	uint64_t count = argc == 5 ? strtoull(argv[4], NULL, 10) : 0;

	for (size_t i = 0; argc >= 4 && i < sizeof(shapes) / sizeof(shapes[0]); i++)
		if (strcmp(shapes[i].name, argv[1]) == 0)
			shape = &shapes[i];
	if (!shape)
		return usage();
	arg_shape = shape->name;
	if (shape->pool && strcmp(argv[3], "pool") == 0)
		shape->pool(argv[2]);
	else if (shape->store && count && strcmp(argv[3], "store") == 0)
		shape->store(argv[2], count);
	else if (shape->load && count && strcmp(argv[3], "load") == 0)
		(void)printf("%" PRIu64 "\n", shape->load(argv[2], count));
	else
		return usage();
	return 0;
}
