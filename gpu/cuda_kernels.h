/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels of the backends cuda and cufile: copies of many small runs, and checksums. They are
 * kernels.ptx, which the driver compiles for its device.
 *
 * Nothing is trusted that was not seen to work on this very device: the first use runs both on some
 * 100 KiB of memory of its own, at all alignments, and compares with the CPU. Any difference or
 * error, then or later, turns both off for as long as the backend is open; copies are the copy
 * engines' then, and checksums -EOPNOTSUPP.
 *
 * A kernel that touches memory which is not there is an error that no process gets over, so it must
 * not happen at all. It does not because
 *   - each range is looked up before: the driver says which mapping it is in, that it is this
 *     device's, and that it may be read, or written (cuda_ranges.c). What it does not say, or says
 *     in a way that is not expected, is left to the copy engines, which check for themselves;
 *   - a block of threads touches its own range and no other byte (of a checksum: no other aligned
 *     8 bytes than those with a byte of the range, which are in the same page): kernels.ptx;
 *   - results go to a place of this backend's own memory, which is theirs until the kernel has
 *     ended;
 *   - descriptors of ranges are parameters of the launch, which the driver copies in the call: no
 *     list in memory can change or vanish under the kernel.
 * Memory that its owner unmaps while it is in use faults: just as it does under a copy engine.
 *
 * Threads: any, at any time.
 */
#ifndef KVFS_GPU_CUDA_KERNELS_H
#define KVFS_GPU_CUDA_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/backend.h"

struct kvg_cuda;

/* The kernel is for more runs than this, each smaller than that. */
#define KVG_KERNEL_RUNS_MIN 4096u
#define KVG_KERNEL_SIZE_MAX (UINT64_C(64) << 10)
/* What one launch takes: parameters are 4 KiB at most. */
#define KVG_KERNEL_RUNS_MAX 170u
#define KVG_KERNEL_RANGES_MAX 128u
/* XXH3 goes another way for so few bytes: they are left to the CPU. */
#define KVG_KERNEL_SUM_MIN 241u
/* Of memory for trying: results are below it. */
#define KVG_KERNEL_TRY_START (UINT64_C(64) << 10)
#define KVG_KERNEL_MEMORY (UINT64_C(2) << 20)

extern const char kvg_kernels_text[];

void kvg_cuda_kernels_init(struct kvg_cuda *cuda, const struct kvg_backend_open *open);
/* May be called without init, and again. */
void kvg_cuda_kernels_done(struct kvg_cuda *cuda);
void kvg_cuda_kernels_describe(struct kvg_cuda *cuda, char *text, size_t text_size);

/*
 * With the context current: queues those of the copies that are below KVG_KERNEL_SIZE_MAX.
 * -EOPNOTSUPP: not by a kernel; some of them may have been queued.
 */
int kvg_cuda_kernels_copy(
	struct kvg_cuda *cuda, kvg_stream stream, const struct kvg_copy *copies, size_t count);

/* One launch each, of ranges that were looked up; with the context current. */
int kvg_cuda_launch_copy(
	struct kvg_cuda *cuda, kvg_stream stream, const struct kvg_copy *runs, unsigned count);
/* The sums go to RESULTS, on the device. */
int kvg_cuda_launch_checksum(struct kvg_cuda *cuda, kvg_stream stream,
	const struct kvg_range *ranges, unsigned count, kvg_devptr results);
/*
 * Runs both on device memory from MEMORY on; KVG_KERNEL_MEMORY bytes are its own. One line in
 * ret_reason on failure.
 */
int kvg_cuda_kernels_try(
	struct kvg_cuda *cuda, kvg_devptr memory, char *ret_reason, size_t reason_size);

/* ---- cuda_ranges.c ---- */

#define KVG_CUDA_RANGES_MAX 8u

struct kvg_cuda_range {
	kvg_devptr start, end;
	bool writable;
};

/* What the driver has said about ranges during one call; starts as zeros. */
struct kvg_cuda_ranges {
	struct kvg_cuda_range known[KVG_CUDA_RANGES_MAX];
	unsigned count; /* of known */
	unsigned asked; /* questions to the driver */
};

/* True if the driver says that a kernel may read, or also write, all of it. */
bool kvg_cuda_ranges_check(struct kvg_cuda *cuda, struct kvg_cuda_ranges *ranges,
	const struct kvg_range *range, bool write);

#endif
