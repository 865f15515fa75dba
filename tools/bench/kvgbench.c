/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of kvgbench, its clock and its memory: see kvgbench.h. */
#include "tools/bench/kvgbench.h"

#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "fs/base.h"

#define QUICK_SHARE 64u

static const struct question {
	const char *name;
	const char *what;
	int (*ask)(struct kvgbench *);
} questions[] = {
	{"peak", "pinned copies of 512 MiB, both ways: what 1.0 is", kvgbench_peak},
	{"ring", "slots of pinned memory: size, number, streams", kvgbench_ring},
	{"runs", "many small copies: one by one, and in batches", kvgbench_runs},
	{"inside", "copies on the device: one by one, in batches, by a kernel", kvgbench_inside},
	{"checksum", "checksums of device memory by a kernel", kvgbench_checksum},
	{"register", "registering a memory file, by kind of page", kvgbench_register},
	{"segments", "making, sharing and mapping device memory", kvgbench_segments},
	{"share", "three processes, a forbidden store, a death, an orphan", kvgbench_share},
	{"context", "device memory that a process takes", kvgbench_context},
	{"direct", "reads from --file past the CPU", kvgbench_direct},
};
#define QUESTIONS (sizeof(questions) / sizeof(questions[0]))

static const char help_text[] =
	"Usage: kvgbench [OPTION...] QUESTION...\n"
	"\n"
	"  --backend NAME   cufile, cuda or host; default: the best that works\n"
	"  --device DEVICE  UUID or number\n"
	"  --file FILE      for direct: on a drive, 16 MiB at least\n"
	"  --quick          a 64th of the bytes, fewer cases\n"
	"\n"
	"Questions:\n";

/* ---- Time ---- */

double kvgbench_now(const struct kvgbench *bench)
{
	static uint64_t (*model_now)(void);
	struct timespec t;

	if (bench->model_clock && !model_now)
		*(void **)&model_now = dlsym(RTLD_DEFAULT, "fakecu_now");
	if (bench->model_clock && !model_now)
		*(void **)&model_now =
			dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fakecu_now");
	if (bench->model_clock && model_now)
		return (double)model_now() / 1e9;
	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ---- Output ---- */

void kvgbench_say(double value, const char *unit, const char *format, ...)
{
	char name[96];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(name, sizeof(name), format, args);
	va_end(args);
	(void)printf("%-28s %10.3f %s\n", name, value, unit);
	(void)fflush(stdout);
}

int kvgbench_fail(int r, const char *what)
{
	(void)fprintf(stderr, "kvgbench: %s: %s\n", what, strerror(-r));
	return r;
}

/* ---- Memory ---- */

uint64_t kvgbench_size(const struct kvgbench *bench, uint64_t size)
{
	return kv_round_up(bench->quick ? size / QUICK_SHARE : size, bench->info.granularity);
}

static int get_device_memory(struct kvgbench *bench, struct kvgbench_memory *memory)
{
	int r = bench->ops->segment_new(bench->backend, memory->device_size, &memory->segment);

	if (r == 0)
		r = bench->ops->map(bench->backend, &memory->segment, 1, true, &memory->mapping);
	if (r == 0)
		memory->address = bench->ops->address(bench->backend, memory->mapping);
	return r < 0 ? kvgbench_fail(r, "device memory") : 0;
}

static int get_host_memory(struct kvgbench *bench, struct kvgbench_memory *memory)
{
	void *host = mmap(NULL, memory->host_size, PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int r;

	if (host == MAP_FAILED)
		return kvgbench_fail(-errno, "host memory");
	(void)madvise(host, memory->host_size, MADV_HUGEPAGE);
	memset(host, 0x5a, memory->host_size);
	r = bench->ops->host_register(bench->backend, host, memory->host_size, 0);
	if (r < 0) {
		(void)munmap(host, memory->host_size);
		return kvgbench_fail(r, "registering host memory");
	}
	memory->host = host;
	return 0;
}

int kvgbench_memory_get(struct kvgbench *bench, uint64_t device_size, uint64_t host_size,
	struct kvgbench_memory *ret_memory)
{
	int r;

	*ret_memory = (struct kvgbench_memory){.device_size = device_size, .host_size = host_size};
	r = get_device_memory(bench, ret_memory);
	if (r == 0 && host_size > 0)
		r = get_host_memory(bench, ret_memory);
	if (r < 0)
		kvgbench_memory_put(bench, ret_memory);
	return r;
}

void kvgbench_memory_put(struct kvgbench *bench, struct kvgbench_memory *memory)
{
	if (memory->host) {
		bench->ops->host_unregister(bench->backend, memory->host);
		(void)munmap(memory->host, memory->host_size);
	}
	bench->ops->unmap(bench->backend, memory->mapping);
	bench->ops->segment_free(bench->backend, memory->segment);
	*memory = (struct kvgbench_memory){0};
}

/* ---- The command line ---- */

int kvgbench_open(struct kvgbench *bench, const char *backend)
{
	const struct kvg_backend_open options = {.device = bench->device};
	char reasons[1024];
	int r = kvg_backend_choose(backend, &options, &bench->backend, reasons, sizeof(reasons));

	if (r < 0) {
		(void)fprintf(stderr, "kvgbench: no device: %s\n", reasons);
		return r;
	}
	bench->ops = bench->backend->ops;
	bench->ops->info(bench->backend, &bench->info);
	bench->model_clock = bench->info.modelled && bench->info.dl_device_type != 1;
	if (reasons[0])
		(void)fprintf(stderr, "kvgbench: %s\n", reasons);
	return 0;
}

void kvgbench_close(struct kvgbench *bench)
{
	bench->backend = kvg_backend_close(bench->backend);
}

static void say_device(const struct kvgbench *bench)
{
	(void)printf("device %s, %s: %s%s\n", bench->ops->name, bench->info.name, bench->info.mode,
		bench->info.modelled ? "; NO REAL DEVICE, numbers say nothing about one" : "");
	(void)fflush(stdout);
}

static const struct question *find_question(const char *name)
{
	for (size_t i = 0; i < QUESTIONS; i++)
		if (strcmp(questions[i].name, name) == 0)
			return &questions[i];
	return NULL;
}

static int usage(FILE *to, int status)
{
	(void)fputs(help_text, to);
	for (size_t i = 0; i < QUESTIONS; i++)
		(void)fprintf(to, "  %-16s %s\n", questions[i].name, questions[i].what);
	return status;
}

/* All questions, also after one that failed. */
static int ask(struct kvgbench *bench, char *const *names, int count)
{
	int status = 0;

	for (int i = 0; i < count; i++) {
		const struct question *question = find_question(names[i]);

		if (!question) {
			(void)fprintf(stderr, "kvgbench: there is no question '%s'\n", names[i]);
			return 2;
		}
		if (question->ask(bench) < 0) {
			(void)fprintf(stderr, "kvgbench: %s: not answered\n", names[i]);
			status = 1;
		}
	}
	return status;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"backend", required_argument, NULL, 'b'},
		{"device", required_argument, NULL, 'd'},
		{"file", required_argument, NULL, 'f'},
		{"quick", no_argument, NULL, 'q'},
		{"child", required_argument, NULL, 'c'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct kvgbench bench = {.program = "/proc/self/exe"};
	const char *backend = NULL, *role = NULL;
	int option, status;

	while ((option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (option) {
		case 'b':
			backend = optarg;
			break;
		case 'd':
			bench.device = optarg;
			break;
		case 'f':
			bench.file = optarg;
			break;
		case 'q':
			bench.quick = true;
			break;
		case 'c':
			role = optarg;
			break;
		case 'h':
			return usage(stdout, 0);
		default:
			return usage(stderr, 2);
		}
	}
	if (optind == argc && !role)
		return usage(stderr, 2);
	if (kvgbench_open(&bench, backend) < 0)
		return 1;
	if (role) {
		status = kvgbench_child(&bench, role);
	} else {
		say_device(&bench);
		status = ask(&bench, argv + optind, argc - optind);
	}
	kvgbench_close(&bench);
	return status;
}
