/* SPDX-License-Identifier: Apache-2.0 */
/* kvgbench's question about reads past the CPU: whether --file can be read so, and how fast. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>

#include "fs/base.h"
#include "tools/bench/kvgbench.h"

#define REQUEST (16 * MIB)
#define THREADS_MAX 16u

/* What the threads share: they take requests one after the other. */
struct load {
	struct kvgbench *bench;
	struct kvg_direct *direct;
	kvg_devptr base;
	uint64_t size; /* of the file, whole requests */
	_Atomic uint64_t next;
	_Atomic int error;
};

static void *load_main(void *arg)
{
	struct load *load = arg;
	struct kvgbench *bench = load->bench;

	for (;;) {
		uint64_t at = atomic_fetch_add(&load->next, REQUEST);
		ssize_t n;

		if (at >= load->size || atomic_load(&load->error) != 0)
			return NULL;
		n = bench->ops->direct_read(bench->backend, load->direct, load->base,
			at / REQUEST % THREADS_MAX * REQUEST, REQUEST, at);
		if (n != (ssize_t)REQUEST)
			atomic_store(&load->error, n < 0 ? (int)n : -EIO);
	}
}

static int measure(struct load *load, unsigned threads)
{
	struct kvgbench *bench = load->bench;
	double start = kvgbench_now(bench);
	pthread_t thread[THREADS_MAX];
	unsigned started = 0;

	atomic_store(&load->next, 0);
	atomic_store(&load->error, 0);
	while (started < threads && pthread_create(&thread[started], NULL, load_main, load) == 0)
		started++;
	for (unsigned i = 0; i < started; i++)
		(void)pthread_join(thread[i], NULL);
	if (started < threads || atomic_load(&load->error) != 0)
		return kvgbench_fail(
			started < threads ? -EAGAIN : atomic_load(&load->error), "reading");
	kvgbench_say((double)load->size / (kvgbench_now(bench) - start) / 1e9, "GB/s",
		"direct.threads%u", threads);
	return 0;
}

static int read_all(struct kvgbench *bench, int fd, uint64_t size)
{
	struct kvgbench_memory memory;
	struct load load = {.bench = bench, .size = size / REQUEST * REQUEST};
	int r = kvgbench_memory_get(bench, THREADS_MAX * REQUEST, 0, &memory);

	if (r < 0)
		return r;
	load.base = memory.address;
	r = bench->ops->direct_register(bench->backend, memory.address, memory.device_size);
	if (r == 0) {
		r = bench->ops->direct_open(bench->backend, fd, &load.direct);
		for (unsigned threads = 1; r == 0 && threads <= THREADS_MAX; threads *= 4)
			r = measure(&load, threads);
		bench->ops->direct_close(bench->backend, load.direct);
		bench->ops->direct_unregister(bench->backend, memory.address);
	}
	kvgbench_memory_put(bench, &memory);
	return r < 0 ? kvgbench_fail(r, "direct") : 0;
}

int kvgbench_direct(struct kvgbench *bench)
{
	_cleanup_fd_ int fd = -1;
	char reason[256] = "";
	struct stat st;
	int r;

	if (!bench->info.direct) {
		(void)printf("direct: not with the backend %s\n", bench->ops->name);
		return 0;
	}
	if (!bench->file)
		return kvgbench_fail(-EINVAL, "direct needs --file FILE");
	fd = open(bench->file, O_RDONLY | O_DIRECT | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0)
		return kvgbench_fail(-errno, bench->file);
	r = bench->ops->direct_probe(bench->backend, fd, 0, reason, sizeof(reason));
	/* That a file cannot be read so is an answer. */
	(void)printf("direct.probe: %s\n", r == 0 ? "works" : reason);
	if (r == -EOPNOTSUPP)
		return 0;
	return r < 0 ? kvgbench_fail(r, "direct.probe") : read_all(bench, fd, (uint64_t)st.st_size);
}
