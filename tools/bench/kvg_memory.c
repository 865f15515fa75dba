/* SPDX-License-Identifier: Apache-2.0 */
/* kvgbench's questions about what memory costs: registering the host's, making the device's. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

#include "fs/base.h"
#include "tools/bench/kvgbench.h"

#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif
#define TIMES 8u

/* ---- register ---- */

/* A memory file with pages of KIND, all of them there; NULL if this machine has no such. */
static void *memory_file(const char *kind, uint64_t size)
{
	bool huge_tlb = strcmp(kind, "hugetlb") == 0;
	unsigned flags = MFD_CLOEXEC | (huge_tlb ? MFD_HUGETLB | MFD_HUGE_2MB : 0);
	_cleanup_fd_ int fd = memfd_create("kvgbench", flags);
	void *memory;

	if (fd < 0 || ftruncate(fd, (off_t)size) < 0)
		return NULL;
	memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return NULL;
	if (strcmp(kind, "4K") == 0)
		(void)madvise(memory, size, MADV_NOHUGEPAGE);
	else if (!huge_tlb)
		(void)madvise(memory, size, MADV_HUGEPAGE);
	/* Where there are not enough huge pages it fails now, and not by a signal later. */
	if (fallocate(fd, 0, 0, (off_t)size) < 0) {
		(void)munmap(memory, size);
		return NULL;
	}
	if (huge_tlb || madvise(memory, size, 23 /* MADV_POPULATE_WRITE */) < 0)
		memset(memory, 1, size);
	return memory;
}

int kvgbench_register(struct kvgbench *bench)
{
	static const char *const kinds[] = {"4K", "thp", "hugetlb"};
	uint64_t size = kvgbench_size(bench, GIB);
	double gib = (double)size / (double)GIB;

	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		void *memory = memory_file(kinds[i], size);
		double start, registered;
		int r;

		if (!memory) {
			(void)printf(
				"register.%s: this machine has no such pages to spare\n", kinds[i]);
			continue;
		}
		start = kvgbench_now(bench);
		r = bench->ops->host_register(bench->backend, memory, size, 0);
		registered = kvgbench_now(bench);
		if (r < 0) {
			(void)munmap(memory, size);
			return kvgbench_fail(r, kinds[i]);
		}
		bench->ops->host_unregister(bench->backend, memory);
		kvgbench_say((registered - start) / gib, "s/GiB", "register.%s", kinds[i]);
		kvgbench_say((kvgbench_now(bench) - registered) / gib, "s/GiB", "unregister.%s",
			kinds[i]);
		(void)munmap(memory, size);
	}
	return 0;
}

/* ---- segments ---- */

enum step {
	STEP_NEW,
	STEP_MAP,
	STEP_EXPORT,
	STEP_IMPORT,
	STEP_MAP_IMPORT,
	STEP_UNMAP,
	STEP_FREE,
	_STEP_MAX,
};

static const char *const step_names[] = {
	"new", "map", "export", "import", "map_import", "unmap_both", "free_both"};
static_assert(sizeof(step_names) / sizeof(step_names[0]) == _STEP_MAX, "a name each");

/* Adds what each step took to SECONDS. */
static int one_life(struct kvgbench *bench, uint64_t size, double *seconds)
{
	const struct kvg_backend_ops *ops = bench->ops;
	struct kvg_segment *segment = NULL, *import = NULL;
	struct kvg_mapping *mapping = NULL, *view = NULL;
	double times[_STEP_MAX + 1];
	_cleanup_fd_ int fd = -1;
	int r;

	times[0] = kvgbench_now(bench);
	r = ops->segment_new(bench->backend, size, &segment);
	times[1] = kvgbench_now(bench);
	r = r < 0 ? r : ops->map(bench->backend, &segment, 1, true, &mapping);
	times[2] = kvgbench_now(bench);
	r = r < 0 ? r : ops->segment_export(bench->backend, segment, &fd);
	times[3] = kvgbench_now(bench);
	r = r < 0 ? r : ops->segment_import(bench->backend, fd, size, &import);
	times[4] = kvgbench_now(bench);
	r = r < 0 ? r : ops->map(bench->backend, &import, 1, false, &view);
	times[5] = kvgbench_now(bench);
	ops->unmap(bench->backend, view);
	ops->unmap(bench->backend, mapping);
	times[6] = kvgbench_now(bench);
	ops->segment_free(bench->backend, import);
	ops->segment_free(bench->backend, segment);
	times[7] = kvgbench_now(bench);
	for (unsigned i = 0; i < _STEP_MAX; i++)
		seconds[i] += times[i + 1] - times[i];
	return r;
}

int kvgbench_segments(struct kvgbench *bench)
{
	static const uint64_t sizes[] = {2 * MIB, 64 * MIB, 256 * MIB};

	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		double unused[_STEP_MAX] = {0}, seconds[_STEP_MAX] = {0};
		uint64_t size = kv_round_up(sizes[i], bench->info.granularity);
		int r = one_life(bench, size, unused);

		for (unsigned n = 0; r == 0 && n < TIMES; n++)
			r = one_life(bench, size, seconds);
		if (r < 0)
			return kvgbench_fail(r, "segments");
		for (unsigned step = 0; step < _STEP_MAX; step++)
			kvgbench_say(seconds[step] / TIMES * 1e6, "us", "segments.%lluM.%s",
				(unsigned long long)(size / MIB), step_names[step]);
	}
	return 0;
}
