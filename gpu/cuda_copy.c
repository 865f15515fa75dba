/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies of the backends cuda and cufile. They are the copy engines', which take no multiprocessor
 * from an engine's kernels and wait for none; but thousands of small ones on the device, for which
 * those are too slow, are a kernel's.
 */
#include <errno.h>

#include "fs/base.h"
#include "gpu/backend_cuda_internal.h"
#include "gpu/cuda_kernels.h"

/* Copies in one call of the driver's: what fits a few KiB of stack. */
#define BATCH_MAX 256u
/* Above this, copies that are to overlap with kernels are slower than others (rmm#2511). */
#define OVERLAP_SIZE_MAX (UINT64_C(128) << 10)

static kvg_cu_result copy_one(const struct kvg_cuda_driver *cu, kvg_cu_stream stream,
	enum kvg_copy_kind kind, const struct kvg_copy *copy)
{
	switch (kind) {
	case KVG_COPY_TO_DEVICE:
		return cu->copy_to_device(
			copy->to, (const void *)(uintptr_t)copy->from, copy->size, stream);
	case KVG_COPY_TO_HOST:
		return cu->copy_to_host(
			(void *)(uintptr_t)copy->to, copy->from, copy->size, stream);
	case KVG_COPY_ON_DEVICE:
		break;
	}
	return cu->copy_on_device(copy->to, copy->from, copy->size, stream);
}

/* On the device the flag makes copies many times slower (nccl#2177). */
static bool is_overlapping(enum kvg_copy_kind kind, const struct kvg_copy *copies, size_t count)
{
	if (kind == KVG_COPY_ON_DEVICE)
		return false;
	for (size_t i = 0; i < count; i++)
		if (copies[i].size > OVERLAP_SIZE_MAX)
			return false;
	return true;
}

/* COUNT: up to BATCH_MAX. */
static kvg_cu_result copy_batch(const struct kvg_cuda_driver *cu, kvg_cu_stream stream,
	bool overlapping, const struct kvg_copy *copies, size_t count)
{
	struct kvg_cu_copy_attributes attributes = {
		.source_order = KVG_CU_SOURCE_ORDER_STREAM,
		.flags = overlapping ? KVG_CU_COPY_PREFER_OVERLAP : 0,
	};
	kvg_cu_ptr to[BATCH_MAX], from[BATCH_MAX];
	size_t sizes[BATCH_MAX], start = 0, failed;

	for (size_t i = 0; i < count; i++) {
		to[i] = copies[i].to;
		from[i] = copies[i].from;
		sizes[i] = copies[i].size;
	}
	return cu->copy_batch(to, from, sizes, count, &attributes, &start, 1, &failed, stream);
}

/* By the copy engines. */
static int copy_by_engine(struct kvg_cuda *cuda, kvg_stream stream, enum kvg_copy_kind kind,
	const struct kvg_copy *copies, size_t count)
{
	const struct kvg_cuda_driver *cu = cuda->driver;
	/* The driver takes no batches on the default stream. */
	bool batches = cu->copy_batch && stream && count > 1;
	bool overlapping = is_overlapping(kind, copies, count);
	int r = 0;

	for (size_t done = 0, n; r == 0 && done < count; done += n) {
		n = batches ? kv_min_u64(count - done, BATCH_MAX) : 1;
		r = kvg_cuda_check(
			cuda, n > 1 ? copy_batch(cu, stream, overlapping, copies + done, n)
				    : copy_one(cu, stream, kind, copies + done));
	}
	return r;
}

/* Those that are too large for the kernel, which has the others. */
static int copy_large(
	struct kvg_cuda *cuda, kvg_stream stream, const struct kvg_copy *copies, size_t count)
{
	struct kvg_copy large[BATCH_MAX];
	size_t n = 0;
	int r = 0;

	for (size_t i = 0; i < count && r == 0; i++) {
		if (copies[i].size < KVG_KERNEL_SIZE_MAX)
			continue;
		large[n++] = copies[i];
		if (n < BATCH_MAX)
			continue;
		r = copy_by_engine(cuda, stream, KVG_COPY_ON_DEVICE, large, n);
		n = 0;
	}
	return r < 0 ? r : copy_by_engine(cuda, stream, KVG_COPY_ON_DEVICE, large, n);
}

/* Many small copies are what the engines are slow at: each takes them some 2 us (FlexKV#193). */
static bool are_for_kernel(enum kvg_copy_kind kind, const struct kvg_copy *copies, size_t count)
{
	size_t small = 0;

	if (kind != KVG_COPY_ON_DEVICE || count <= KVG_KERNEL_RUNS_MIN)
		return false;
	for (size_t i = 0; i < count; i++)
		small += copies[i].size < KVG_KERNEL_SIZE_MAX;
	return small > KVG_KERNEL_RUNS_MIN;
}

int kvg_cuda_copy(struct kvg_backend *backend, kvg_stream stream, enum kvg_copy_kind kind,
	const struct kvg_copy *copies, size_t count)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	if (are_for_kernel(kind, copies, count)) {
		r = kvg_cuda_kernels_copy(cuda, stream, copies, count);
		if (r == 0)
			return copy_large(cuda, stream, copies, count);
		/* Some may have been copied: once more does no harm. */
		if (r != -EOPNOTSUPP)
			return r;
	}
	return copy_by_engine(cuda, stream, kind, copies, count);
}

int kvg_cuda_fill(
	struct kvg_backend *backend, kvg_stream stream, kvg_devptr to, uint8_t byte, uint64_t size)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0 || size == 0)
		return r;
	return kvg_cuda_check(cuda, cuda->driver->fill(to, byte, size, stream));
}
