/* SPDX-License-Identifier: Apache-2.0 */
/* Loading, trying and launching the kernels: see cuda_kernels.h. */
#include "gpu/cuda_kernels.h"

/* Inlined, so that what engines link needs no further library. */
#define XXH_INLINE_ALL
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "fs/base.h"
#include "gpu/backend_cuda_internal.h"

#define THREADS 256u /* of a block, .reqntid in kernels.ptx */
/* Places for the results of one launch each, below KVG_KERNEL_TRY_START. */
#define PLACES 64u
#define PLACE_SIZE (KVG_KERNEL_RANGES_MAX * sizeof(uint64_t))
#define SECRET_SIZE 192u

static_assert(sizeof(struct kvg_copy) == 24, "kernels.ptx, runs");
static_assert(sizeof(struct kvg_range) == 16, "kernels.ptx, ranges");
static_assert(PLACES * PLACE_SIZE <= KVG_KERNEL_TRY_START, "results are below");

/* What kvg_checksum has as its second parameter; little-endian, as all that have such a GPU are. */
struct keys {
	uint8_t secret[SECRET_SIZE];
	uint8_t last[64];
	uint8_t merge[64];
	uint64_t begin[8];
};
static_assert(sizeof(struct keys) == 384, "kernels.ptx, keys");

/* ---- Their state ---- */

void kvg_cuda_kernels_init(struct kvg_cuda *cuda, const struct kvg_backend_open *open)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;

	(void)pthread_mutex_init(&kernels->lock, NULL);
	(void)pthread_cond_init(&kernels->freed, NULL);
	if (!open->no_kernels)
		return;
	kernels->state = KVG_KERNELS_OFF;
	(void)snprintf(kernels->reason, sizeof(kernels->reason), "not wanted");
}

static void unload(struct kvg_cuda *cuda)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r == 0 && kernels->module)
		(void)cuda->driver->module_unload(kernels->module);
	kernels->module = NULL;
	kvg_cuda_unmap(&cuda->base, kernels->mapping);
	kvg_cuda_segment_free(&cuda->base, kernels->segment);
	kernels->mapping = NULL;
	kernels->segment = NULL;
}

void kvg_cuda_kernels_done(struct kvg_cuda *cuda)
{
	if (cuda->kernels.module || cuda->kernels.segment)
		unload(cuda);
}

void kvg_cuda_kernels_describe(struct kvg_cuda *cuda, char *text, size_t text_size)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;
	KV_LOCKED(&kernels->lock);

	if (kernels->state == KVG_KERNELS_OFF)
		(void)snprintf(text, text_size, "off: %s", kernels->reason);
	else
		(void)snprintf(text, text_size, "%s",
			kernels->state == KVG_KERNELS_ON ? "tried, and in use" : "not tried yet");
}

/* What is under way stays; nothing more is launched. The first reason is kept. */
static void turn_off(struct kvg_cuda *cuda, const char *reason)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;
	KV_LOCKED(&kernels->lock);

	if (kernels->state == KVG_KERNELS_OFF)
		return;
	kernels->state = KVG_KERNELS_OFF;
	(void)snprintf(kernels->reason, sizeof(kernels->reason), "%s", reason);
}

/* ---- Loading ---- */

static int check(struct kvg_cuda *cuda, const char *call, kvg_cu_result result, char *ret_reason,
	size_t reason_size)
{
	if (result != KVG_CU_SUCCESS)
		kvg_cuda_describe(cuda->driver, call, result, ret_reason, reason_size);
	return kvg_cuda_check(cuda, result);
}

static int load_code(struct kvg_cuda *cuda, char *ret_reason, size_t reason_size)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;
	const struct kvg_cuda_driver *cu = cuda->driver;
	int r;

	if (!cu->module_load || !cu->module_unload || !cu->module_function || !cu->launch ||
		!cu->pointer_attribute) {
		(void)snprintf(ret_reason, reason_size, "the driver has not all of their calls");
		return -EOPNOTSUPP;
	}
	r = check(cuda, "cuModuleLoadData", cu->module_load(&kernels->module, kvg_kernels_text),
		ret_reason, reason_size);
	if (r < 0)
		return r;
	r = check(cuda, "cuModuleGetFunction",
		cu->module_function(&kernels->copy, kernels->module, "kvg_copy"), ret_reason,
		reason_size);
	if (r < 0)
		return r;
	return check(cuda, "cuModuleGetFunction",
		cu->module_function(&kernels->checksum, kernels->module, "kvg_checksum"),
		ret_reason, reason_size);
}

static int load_memory(struct kvg_cuda *cuda, char *ret_reason, size_t reason_size)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;
	uint64_t size = kv_round_up(KVG_KERNEL_MEMORY, cuda->info.granularity);
	int r = kvg_cuda_segment_new(&cuda->base, size, &kernels->segment);

	if (r == 0)
		r = kvg_cuda_map(&cuda->base, &kernels->segment, 1, true, &kernels->mapping);
	if (r < 0)
		(void)snprintf(
			ret_reason, reason_size, "no device memory for them: %s", strerror(-r));
	return r;
}

static int load_and_try(struct kvg_cuda *cuda, char *ret_reason, size_t reason_size)
{
	int r = load_code(cuda, ret_reason, reason_size);

	if (r == 0)
		r = load_memory(cuda, ret_reason, reason_size);
	if (r == 0)
		r = kvg_cuda_kernels_try(cuda, kvg_cuda_address(&cuda->base, cuda->kernels.mapping),
			ret_reason, reason_size);
	if (r < 0)
		unload(cuda);
	return r;
}

/* With the context current. The first caller tries, others wait for him. */
static bool are_on(struct kvg_cuda *cuda)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;
	KV_LOCKED(&kernels->lock);

	if (kernels->state == KVG_KERNELS_UNTRIED)
		kernels->state = load_and_try(cuda, kernels->reason, sizeof(kernels->reason)) == 0
					 ? KVG_KERNELS_ON
					 : KVG_KERNELS_OFF;
	return kernels->state == KVG_KERNELS_ON;
}

/* ---- Launching ---- */

static int launch(struct kvg_cuda *cuda, kvg_stream stream, kvg_cu_function function,
	unsigned blocks, void **params)
{
	return kvg_cuda_check(cuda, cuda->driver->launch(function, blocks, 1, 1, THREADS, 1, 1, 0,
					    stream, params, NULL));
}

int kvg_cuda_launch_copy(
	struct kvg_cuda *cuda, kvg_stream stream, const struct kvg_copy *runs, unsigned count)
{
	/* All of it is read by the call. */
	struct kvg_copy all[KVG_KERNEL_RUNS_MAX] = {0};
	void *params[] = {all};

	assert(count > 0 && count <= KVG_KERNEL_RUNS_MAX);
	memcpy(all, runs, count * sizeof(*runs));
	return launch(cuda, stream, cuda->kernels.copy, count, params);
}

/* XXH3's own constants, as its specification has them. */
static const struct keys *make_keys(struct keys *keys)
{
	static const uint64_t secret[SECRET_SIZE / 8] = {
		0xbe4ba423396cfeb8,
		0x1cad21f72c81017c,
		0xdb979083e96dd4de,
		0x1f67b3b7a4a44072,
		0x78e5c0cc4ee679cb,
		0x2172ffcc7dd05a82,
		0x8e2443f7744608b8,
		0x4c263a81e69035e0,
		0xcb00c391bb52283c,
		0xa32e531b8b65d088,
		0x4ef90da297486471,
		0xd8acdea946ef1938,
		0x3f349ce33f76faa8,
		0x1d4f0bc7c7bbdcf9,
		0x3159b4cd4be0518a,
		0x647378d9c97e9fc8,
		0xc3ebd33483acc5ea,
		0xeb6313faffa081c5,
		0x49daf0b751dd0d17,
		0x9e68d429265516d3,
		0xfca1477d58be162b,
		0xce31d07ad1b8f88f,
		0x280416958f3acb45,
		0x7e404bbbcafbd7af,
	};
	static const uint64_t begin[8] = {
		0x00000000c2b2ae3d,
		0x9e3779b185ebca87,
		0xc2b2ae3d27d4eb4f,
		0x165667b19e3779f9,
		0x85ebca77c2b2ae63,
		0x0000000085ebca77,
		0x27d4eb2f165667c5,
		0x000000009e3779b1,
	};

	memcpy(keys->secret, secret, sizeof(keys->secret));
	memcpy(keys->last, keys->secret + SECRET_SIZE - 64 - 7, sizeof(keys->last));
	memcpy(keys->merge, keys->secret + 11, sizeof(keys->merge));
	memcpy(keys->begin, begin, sizeof(keys->begin));
	return keys;
}

int kvg_cuda_launch_checksum(struct kvg_cuda *cuda, kvg_stream stream,
	const struct kvg_range *ranges, unsigned count, kvg_devptr results)
{
	struct kvg_range all[KVG_KERNEL_RANGES_MAX] = {0};
	struct keys keys;
	void *params[] = {all, &keys, &results};

	assert(count > 0 && count <= KVG_KERNEL_RANGES_MAX);
	memcpy(all, ranges, count * sizeof(*ranges));
	(void)make_keys(&keys);
	return launch(cuda, stream, cuda->kernels.checksum, count, params);
}

/* For calls that a later driver error has ended, not a dead device: others do their work. */
static int give_up(struct kvg_cuda *cuda, const char *call)
{
	char reason[sizeof(cuda->kernels.reason)];

	if (kvg_cuda_is_dead(&cuda->base))
		return -EIO;
	kvg_cuda_describe(cuda->driver, call, (kvg_cu_result)kvg_cuda_last_code(&cuda->base),
		reason, sizeof(reason));
	turn_off(cuda, reason);
	return -EOPNOTSUPP;
}

/* ---- Copies ---- */

static bool may_copy(struct kvg_cuda *cuda, const struct kvg_copy *copies, size_t count)
{
	struct kvg_cuda_ranges ranges = {0};

	for (size_t i = 0; i < count; i++) {
		const struct kvg_range to = {.address = copies[i].to, .size = copies[i].size};
		const struct kvg_range from = {.address = copies[i].from, .size = copies[i].size};

		if (copies[i].size < KVG_KERNEL_SIZE_MAX &&
			(!kvg_cuda_ranges_check(cuda, &ranges, &to, true) ||
				!kvg_cuda_ranges_check(cuda, &ranges, &from, false)))
			return false;
	}
	return true;
}

int kvg_cuda_kernels_copy(
	struct kvg_cuda *cuda, kvg_stream stream, const struct kvg_copy *copies, size_t count)
{
	struct kvg_copy runs[KVG_KERNEL_RUNS_MAX];
	unsigned n = 0;
	int r = 0;

	if (!are_on(cuda) || !may_copy(cuda, copies, count))
		return kvg_cuda_is_dead(&cuda->base) ? -EIO : -EOPNOTSUPP;
	for (size_t i = 0; i < count && r == 0; i++) {
		if (copies[i].size >= KVG_KERNEL_SIZE_MAX)
			continue;
		runs[n++] = copies[i];
		if (n < KVG_KERNEL_RUNS_MAX)
			continue;
		r = kvg_cuda_launch_copy(cuda, stream, runs, n);
		n = 0;
	}
	if (r == 0 && n > 0)
		r = kvg_cuda_launch_copy(cuda, stream, runs, n);
	return r < 0 ? give_up(cuda, "cuLaunchKernel") : 0;
}

/* ---- Checksums ---- */

static kvg_devptr take_place(struct kvg_cuda *cuda, unsigned *ret_place)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;
	KV_LOCKED(&kernels->lock);

	while (kernels->taken == UINT64_MAX)
		(void)pthread_cond_wait(&kernels->freed, &kernels->lock);
	*ret_place = (unsigned)__builtin_ctzll(~kernels->taken);
	kernels->taken |= UINT64_C(1) << *ret_place;
	return kvg_cuda_address(&cuda->base, kernels->mapping) + *ret_place * PLACE_SIZE;
}

static void give_place(struct kvg_cuda *cuda, unsigned place)
{
	struct kvg_cuda_kernels *kernels = &cuda->kernels;
	KV_LOCKED(&kernels->lock);

	kernels->taken &= ~(UINT64_C(1) << place);
	(void)pthread_cond_signal(&kernels->freed);
}

/* Waits, whatever comes of it: the place, and the array, must be nobody's any more. */
static int sum_by_kernel(struct kvg_cuda *cuda, kvg_stream stream, const struct kvg_range *ranges,
	unsigned count, uint64_t *ret_sums)
{
	unsigned place;
	kvg_devptr results = take_place(cuda, &place);
	const struct kvg_copy back = {.to = (uint64_t)(uintptr_t)ret_sums,
		.from = results,
		.size = count * sizeof(*ret_sums)};
	int r = kvg_cuda_launch_checksum(cuda, stream, ranges, count, results), waited;

	if (r == 0)
		r = kvg_cuda_copy(&cuda->base, stream, KVG_COPY_TO_HOST, &back, 1);
	waited = kvg_cuda_stream_sync(&cuda->base, stream);
	give_place(cuda, place);
	return r < 0 ? r : waited;
}

static int sum_by_cpu(
	struct kvg_cuda *cuda, kvg_stream stream, const struct kvg_range *range, uint64_t *ret_sum)
{
	uint8_t bytes[KVG_KERNEL_SUM_MIN];
	const struct kvg_copy back = {
		.to = (uint64_t)(uintptr_t)bytes, .from = range->address, .size = range->size};
	int r = 0, waited = 0;

	if (range->size > 0) {
		r = kvg_cuda_copy(&cuda->base, stream, KVG_COPY_TO_HOST, &back, 1);
		waited = kvg_cuda_stream_sync(&cuda->base, stream);
	}
	if (r < 0 || waited < 0)
		return r < 0 ? r : waited;
	*ret_sum = XXH3_64bits(bytes, range->size);
	return 0;
}

/* Puts those that are for the kernel together, from *AT on, up to a launch. */
static int sum_some(struct kvg_cuda *cuda, kvg_stream stream, const struct kvg_range *ranges,
	size_t count, size_t *at, uint64_t *ret_sums)
{
	struct kvg_range chosen[KVG_KERNEL_RANGES_MAX];
	uint64_t sums[KVG_KERNEL_RANGES_MAX];
	size_t from = *at, n = 0, taken = 0;
	int r = 0;

	for (; *at < count && n < KVG_KERNEL_RANGES_MAX && r == 0; ++*at) {
		if (ranges[*at].size >= KVG_KERNEL_SUM_MIN)
			chosen[n++] = ranges[*at];
		else
			r = sum_by_cpu(cuda, stream, &ranges[*at], &ret_sums[*at]);
	}
	if (r == 0 && n > 0)
		r = sum_by_kernel(cuda, stream, chosen, (unsigned)n, sums);
	for (size_t i = from; i < *at && r == 0; i++)
		if (ranges[i].size >= KVG_KERNEL_SUM_MIN)
			ret_sums[i] = sums[taken++];
	return r;
}

int kvg_cuda_checksum(struct kvg_backend *backend, kvg_stream stream,
	const struct kvg_range *ranges, size_t count, uint64_t *ret_sums)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	struct kvg_cuda_ranges known = {0};
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	if (!are_on(cuda))
		return kvg_cuda_is_dead(backend) ? -EIO : -EOPNOTSUPP;
	for (size_t i = 0; i < count; i++)
		if (!kvg_cuda_ranges_check(cuda, &known, &ranges[i], false))
			return kvg_cuda_is_dead(backend) ? -EIO : -EINVAL;
	for (size_t at = 0; at < count && r == 0;)
		r = sum_some(cuda, stream, ranges, count, &at, ret_sums);
	return r < 0 ? give_up(cuda, "a checksum") : 0;
}

int kvg_cuda_checksum_probe(struct kvg_backend *backend, char *ret_reason, size_t reason_size)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r == 0 && are_on(cuda))
		return 0;
	kvg_cuda_kernels_describe(cuda, ret_reason, reason_size);
	return r < 0 || kvg_cuda_is_dead(backend) ? -EIO : -EOPNOTSUPP;
}
