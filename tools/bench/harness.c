/* SPDX-License-Identifier: Apache-2.0 */
/* Threads, order, clocks and the printed results. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#include "fs/base.h"
#include "tools/bench/kvbench.h"

#define THREADS_MAX 256u
#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)

struct run {
	const struct bench *bench;
	const struct kernel *kernel;
	void *state;
	uint64_t items;
	uint32_t *order;           /* item numbers; NULL: as they come */
	uint32_t *latency_ns;      /* by the order of taking; NULL: not asked for */
	_Atomic uint64_t next;     /* position in the order */
	_Atomic uint64_t begun_ns; /* by the clock of the first worker that set out; 0: none yet */
	pthread_barrier_t start, end;
};

struct totals {
	uint64_t elapsed_ns;
	uint64_t bytes;
	uint64_t ops;
	uint64_t user_us, system_us;
};

static volatile sig_atomic_t stop_flag;

static void on_signal(int number)
{
	stop_flag = 1;
}

bool bench_stopped(void)
{
	return stop_flag != 0;
}

uint64_t bench_now_ns(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int bench_fail(const char *path, const char *what, int r)
{
	(void)fprintf(stderr, "kvbench: %s: %s failed: %s\n", path, what,
		r == -EBADMSG ? "these are not the bytes that were stored" : strerror(-r));
	return r;
}

void *bench_memory(uint64_t size)
{
	uint64_t length = kv_round_up(size, HUGE_PAGE_BYTES);
	void *memory =
		mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return NULL;
	(void)madvise(memory, length, MADV_HUGEPAGE);
	pattern_fill(memory, kv_round_up(size, PAGE_BYTES));
	return memory;
}

void *run_state(const struct worker *worker)
{
	return worker->run->state;
}

/* ---- Order ---- */

static int make_order(struct run *run)
{
	uint64_t random = run->bench->seed;

	if (run->items > UINT32_MAX)
		return -E2BIG;
	run->order = calloc(run->items, sizeof(run->order[0]));
	if (!run->order)
		return -ENOMEM;
	for (uint64_t i = 0; i < run->items; i++) {
		uint64_t j;

		random = pattern_mix(random + i);
		j = random % (i + 1);
		run->order[i] = run->order[j];
		run->order[j] = (uint32_t)i;
	}
	return 0;
}

static bool take(struct worker *worker, uint64_t *ret_position)
{
	struct run *run = worker->run;

	if (bench_stopped())
		return false;
	*ret_position = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
	return *ret_position < run->items;
}

bool run_next(struct worker *worker, uint64_t *ret_item)
{
	uint64_t position;

	if (!take(worker, &position))
		return false;
	*ret_item = worker->run->order ? worker->run->order[position] : position;
	return true;
}

/* ---- Workers ---- */

static int timed_item(struct worker *worker, uint64_t position)
{
	struct run *run = worker->run;
	uint64_t item = run->order ? run->order[position] : position;
	uint64_t start, elapsed;
	int r;

	if (!run->latency_ns)
		return run->kernel->item(worker, item);
	start = bench_now_ns();
	r = run->kernel->item(worker, item);
	elapsed = bench_now_ns() - start;
	run->latency_ns[position] = (uint32_t)kv_min_u64(elapsed, UINT32_MAX);
	return r;
}

static int work(struct worker *worker)
{
	const struct bench *bench = worker->bench;
	const struct timespec pause = {
		.tv_sec = (time_t)(bench->pause_ms / 1000),
		.tv_nsec = (long)(bench->pause_ms % 1000 * 1000000),
	};
	uint64_t position;
	int r = 0;

	if (worker->run->kernel->batch)
		return worker->run->kernel->item(worker, 0);
	while (r == 0 && take(worker, &position)) {
		if (bench->pause_ms > 0)
			(void)nanosleep(&pause, NULL);
		r = timed_item(worker, position);
	}
	return r;
}

static void *worker_main(void *arg)
{
	struct worker *worker = arg;
	uint64_t none = 0;

	worker->buffer = bench_memory(worker->bench->block);
	if (!worker->buffer)
		worker->error = bench_fail("memory", "mmap", -ENOMEM);
	(void)pthread_barrier_wait(&worker->run->start);
	(void)atomic_compare_exchange_strong(&worker->run->begun_ns, &none, bench_now_ns());
	if (worker->error == 0)
		worker->error = work(worker);
	(void)pthread_barrier_wait(&worker->run->end);
	return NULL;
}

/* ---- Results ---- */

static int compare_u32(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static void print_latencies(struct run *run)
{
	uint32_t *sorted = run->latency_ns;

	qsort(sorted, run->items, sizeof(sorted[0]), compare_u32);
	(void)printf("latency_p50 %.2f us\n", sorted[run->items / 2] / 1e3);
	(void)printf("latency_p99 %.2f us\n", sorted[run->items - 1 - run->items / 100] / 1e3);
	(void)printf("latency_max %.2f us\n", sorted[run->items - 1] / 1e3);
}

static void print_totals(struct run *run, const struct totals *totals)
{
	double seconds = (double)totals->elapsed_ns / 1e9;

	(void)printf("seconds %.6f s\n", seconds);
	(void)printf("ops %" PRIu64 " count\n", totals->ops);
	(void)printf("op_rate %.1f 1/s\n", (double)totals->ops / seconds);
	(void)printf("bytes %" PRIu64 " B\n", totals->bytes);
	(void)printf("rate %.4f GB/s\n", (double)totals->bytes / 1e9 / seconds);
	(void)printf("cpu_user %.6f s\n", (double)totals->user_us / 1e6);
	(void)printf("cpu_system %.6f s\n", (double)totals->system_us / 1e6);
	if (run->latency_ns && run->items > 0)
		print_latencies(run);
}

static uint64_t timeval_us(struct timeval time)
{
	return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_usec;
}

/*
 * From the moment that the first worker sets out to the moment that the last one is done. This
 * thread may not get a processor before they are through.
 */
static int measure(struct run *run, struct totals *totals)
{
	struct rusage before, after;
	int r = 0;

	(void)getrusage(RUSAGE_SELF, &before);
	(void)pthread_barrier_wait(&run->start);
	(void)pthread_barrier_wait(&run->end);
	if (run->kernel->finish)
		r = run->kernel->finish(run->bench);
	totals->elapsed_ns = kv_max_u64(bench_now_ns() - atomic_load(&run->begun_ns), 1);
	(void)getrusage(RUSAGE_SELF, &after);
	totals->user_us = timeval_us(after.ru_utime) - timeval_us(before.ru_utime);
	totals->system_us = timeval_us(after.ru_stime) - timeval_us(before.ru_stime);
	return r;
}

static int run_threads(struct run *run, struct totals *totals)
{
	static struct worker workers[THREADS_MAX];
	static pthread_t threads[THREADS_MAX];
	unsigned count = (unsigned)run->bench->threads;
	int r;

	(void)pthread_barrier_init(&run->start, NULL, count + 1);
	(void)pthread_barrier_init(&run->end, NULL, count + 1);
	for (unsigned i = 0; i < count; i++) {
		workers[i] = (struct worker){.run = run, .bench = run->bench, .number = i};
		r = pthread_create(&threads[i], NULL, worker_main, &workers[i]);
		if (r != 0) /* the others wait for this one and end with the process */
			return bench_fail("thread", "pthread_create", -r);
	}
	r = measure(run, totals);
	for (unsigned i = 0; i < count; i++) {
		(void)pthread_join(threads[i], NULL);
		totals->bytes += workers[i].bytes;
		totals->ops += workers[i].ops;
		if (r == 0)
			r = workers[i].error;
	}
	return r;
}

static int prepare(struct run *run)
{
	const struct bench *bench = run->bench;
	int r = 0;

	if (chdir(bench->directory) < 0)
		return bench_fail(bench->directory, "chdir", -errno);
	run->items = run->kernel->items(bench);
	if (bench->random)
		r = make_order(run);
	if (r < 0)
		return bench_fail("the random order", "making it", r);
	if (bench->latency && !run->kernel->batch) {
		run->latency_ns = calloc(run->items + 1, sizeof(run->latency_ns[0]));
		if (!run->latency_ns)
			return bench_fail("latencies", "calloc", -ENOMEM);
		memset(run->latency_ns, 1, run->items * sizeof(run->latency_ns[0]));
	}
	return run->kernel->prepare ? run->kernel->prepare(bench, &run->state) : 0;
}

int bench_run(const struct bench *bench, const struct kernel *kernel)
{
	const struct sigaction action = {.sa_handler = on_signal};
	struct run run = {.bench = bench, .kernel = kernel};
	struct totals totals = {0};
	int r;

	if (bench->threads < 1 || bench->threads > THREADS_MAX)
		return bench_fail("--threads", "taking it", -ERANGE);
	(void)sigaction(SIGTERM, &action, NULL);
	(void)sigaction(SIGINT, &action, NULL);
	r = prepare(&run);
	if (r == 0)
		r = run_threads(&run, &totals);
	if (kernel->release)
		kernel->release(bench, run.state);
	if (r == 0)
		print_totals(&run, &totals);
	free(run.order);
	free(run.latency_ns);
	return r;
}
