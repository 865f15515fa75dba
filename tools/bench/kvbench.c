/* SPDX-License-Identifier: Apache-2.0 */
/* kvbench's command line: one table of kernels, one of options. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <sys/resource.h>

#include "fs/base.h"
#include "fs/parse.h"
#include "tools/bench/kvbench.h"

static const struct kernel *const kernels[] = {
	&kernel_read,
	&kernel_mmap,
	&kernel_random,
	&kernel_store,
	&kernel_unlink,
	&kernel_copy,
	&kernel_sync,
	&kernel_access,
	&kernel_lookup,
	&kernel_list,
	&kernel_walk,
	&kernel_raw,
	&kernel_stream,
	&kernel_touch,
	&kernel_pool,
};

struct setting {
	const char *name;
	size_t offset; /* in struct bench */
	bool is_flag;  /* a bool; else a size or a number */
	const char *help;
};

#define NUMBER(field, text)                                                                        \
	{                                                                                          \
#field, offsetof(struct bench, field), false, text                                 \
	}
#define FLAG(field, text)                                                                          \
	{                                                                                          \
#field, offsetof(struct bench, field), true, text                                  \
	}

static const struct setting settings[] = {
	NUMBER(count, "files (default 1)"),
	NUMBER(first, "number of the first file (default 0)"),
	NUMBER(size, "bytes a file, a multiple of 4K (default 2M)"),
	NUMBER(block, "bytes a call, a multiple of 4K (default 2M)"),
	NUMBER(ops, "calls, for random, access, pool (default: 100000; COUNT; 20000)"),
	NUMBER(fan, "sub-directories to spread the files over (default 0: none)"),
	NUMBER(threads, "default 1"),
	NUMBER(depth, "blocks in flight, for raw (default 32)"),
	NUMBER(rate, "bytes a second at most, for stream (default 0: no limit)"),
	NUMBER(pause_ms, "pause before every file, in ms (default 0)"),
	NUMBER(seed, "of the random order (default 1)"),
	FLAG(random, "in random order"),
	FLAG(reopen, "opening and closing the files is part of the load"),
	FLAG(direct, "open with O_DIRECT"),
	FLAG(rename, "store under a temporary name and rename"),
	FLAG(sync, "make all of it durable before the clock stops"),
	FLAG(absent, "ask for names that are not there"),
	FLAG(write, "for raw, pool: write; for raw, fdatasync at the end"),
	FLAG(latency, "print latencies: a file's, or a call's for random"),
	FLAG(verify, "check every byte read; without it two words a call are checked"),
};

#define SETTINGS (sizeof(settings) / sizeof(settings[0]))
#define KERNELS (sizeof(kernels) / sizeof(kernels[0]))

static void print_help(void)
{
	(void)puts("usage: kvbench KERNEL DIR [--OPTION[=VALUE]]...\n\n"
		   "Runs one load on the directory DIR and prints lines of: name value unit.\n\n"
		   "Kernels:");
	for (size_t i = 0; i < KERNELS; i++)
		(void)printf("  %-8s %s\n", kernels[i]->name, kernels[i]->help);
	(void)puts("\nOptions (sizes such as 64K, 2M, 4G):");
	for (size_t i = 0; i < SETTINGS; i++)
		(void)printf("  --%-9s %s\n", settings[i].name, settings[i].help);
}

static int bad_usage(const char *what, const char *which)
{
	(void)fprintf(stderr, "kvbench: %s%s; see kvbench --help\n", what, which);
	return -EINVAL;
}

static int set(struct bench *bench, const struct setting *setting, const char *text)
{
	void *field = (char *)bench + setting->offset;

	if (setting->is_flag)
		*(bool *)field = true;
	else if (kv_parse_size(text, field) < 0)
		return bad_usage("not a number or a size: ", text);
	return 0;
}

static int parse_options(int argc, char **argv, struct bench *bench)
{
	struct option longs[SETTINGS + 1] = {0};
	int c, index, r = 0;

	for (size_t i = 0; i < SETTINGS; i++)
		longs[i] = (struct option){.name = settings[i].name,
			.has_arg = settings[i].is_flag ? no_argument : required_argument};
	opterr = 0;
	while (r == 0 && (c = getopt_long(argc, argv, ":", longs, &index)) != -1) {
		if (c != 0)
			return bad_usage("bad option: ", argv[optind - 1]);
		r = set(bench, &settings[index], optarg);
	}
	if (r < 0)
		return r;
	if (argc - optind != 2)
		return bad_usage("a kernel and a directory are needed", "");
	if (bench->block == 0 || bench->block % PAGE_BYTES != 0 || bench->size % PAGE_BYTES != 0)
		return bad_usage("sizes and blocks are multiples of 4K", "");
	bench->directory = argv[optind + 1];
	return 0;
}

static const struct kernel *find_kernel(const char *name)
{
	for (size_t i = 0; i < KERNELS; i++) {
		if (strcmp(kernels[i]->name, name) == 0)
			return kernels[i];
	}
	return NULL;
}

/* Kernels that hold all their files open need as many descriptors as there are. */
static void raise_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &limit);
	}
}

int main(int argc, char **argv)
{
	struct bench bench = {.count = 1,
		.size = UINT64_C(2) << 20,
		.block = UINT64_C(2) << 20,
		.threads = 1,
		.depth = 32,
		.seed = 1};
	const struct kernel *kernel;

	if (argc == 2 && strcmp(argv[1], "--help") == 0) {
		print_help();
		return 0;
	}
	if (parse_options(argc, argv, &bench) < 0)
		return 1;
	kernel = find_kernel(argv[optind]);
	if (!kernel) {
		(void)bad_usage("no such kernel: ", argv[optind]);
		return 1;
	}
	raise_limit();
	return bench_run(&bench, kernel) < 0;
}
