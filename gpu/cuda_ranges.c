/* SPDX-License-Identifier: Apache-2.0 */
/* What a kernel may touch: see cuda_kernels.h. */
#include "gpu/backend_cuda_internal.h"
#include "gpu/cuda_kernels.h"

/*
 * Questions in one call, each of some microseconds: lists of more mappings than that are better
 * copied than looked up.
 */
#define ASKED_MAX 1024u

static bool attribute(struct kvg_cuda *cuda, kvg_devptr address, unsigned which, void *ret_value)
{
	kvg_cu_result result = cuda->driver->pointer_attribute(ret_value, which, address);

	/* An address that is nobody's is no failure of a call. */
	if (result != KVG_CU_SUCCESS && kvg_cuda_is_fatal(result))
		(void)kvg_cuda_check(cuda, result);
	return result == KVG_CU_SUCCESS;
}

/*
 * The mapping that ADDRESS is in. Of memory of the virtual memory calls the "range" may be a
 * reservation of which only a part is mapped: so it is believed of cuMemAlloc's only.
 */
static bool find_extent(struct kvg_cuda *cuda, kvg_devptr address, struct kvg_cuda_range *ret_range)
{
	kvg_cu_ptr start = 0;
	size_t size = 0;
	bool legacy = false;

	if (!attribute(cuda, address, KVG_CU_POINTER_MAPPING_START, &start) ||
		!attribute(cuda, address, KVG_CU_POINTER_MAPPING_SIZE, &size))
		return false;
	if (size == 0 && (!attribute(cuda, address, KVG_CU_POINTER_LEGACY, &legacy) || !legacy ||
				 !attribute(cuda, address, KVG_CU_POINTER_RANGE_START, &start) ||
				 !attribute(cuda, address, KVG_CU_POINTER_RANGE_SIZE, &size)))
		return false;
	if (address < start || address - start >= size)
		return false;
	ret_range->start = start;
	ret_range->end = start + size;
	return true;
}

static bool ask(struct kvg_cuda *cuda, kvg_devptr address, struct kvg_cuda_range *ret_range)
{
	unsigned type = 0, access = KVG_CU_ACCESS_NONE;
	int device = -1;

	if (!attribute(cuda, address, KVG_CU_POINTER_MEMORY_TYPE, &type) ||
		type != KVG_CU_MEMORY_DEVICE)
		return false;
	if (!attribute(cuda, address, KVG_CU_POINTER_DEVICE, &device) || device != cuda->device)
		return false;
	if (!attribute(cuda, address, KVG_CU_POINTER_ACCESS, &access) ||
		(access != KVG_CU_ACCESS_READ && access != KVG_CU_ACCESS_READ_WRITE))
		return false;
	ret_range->writable = access == KVG_CU_ACCESS_READ_WRITE;
	return find_extent(cuda, address, ret_range);
}

/* NULL: no kernel may touch ADDRESS, or nobody knows. */
static const struct kvg_cuda_range *find(
	struct kvg_cuda *cuda, struct kvg_cuda_ranges *ranges, kvg_devptr address)
{
	struct kvg_cuda_range *place;

	for (unsigned i = 0; i < ranges->count; i++)
		if (address >= ranges->known[i].start && address < ranges->known[i].end)
			return &ranges->known[i];
	if (ranges->asked == ASKED_MAX)
		return NULL;
	/* In the place of the oldest when there is no other. */
	place = &ranges->known[ranges->asked++ % KVG_CUDA_RANGES_MAX];
	if (!ask(cuda, address, place))
		return NULL;
	if (ranges->count < KVG_CUDA_RANGES_MAX)
		ranges->count++;
	return place;
}

bool kvg_cuda_ranges_check(struct kvg_cuda *cuda, struct kvg_cuda_ranges *ranges,
	const struct kvg_range *range, bool write)
{
	kvg_devptr at = range->address, end = range->address + range->size;

	if (end < at)
		return false;
	while (at < end) {
		const struct kvg_cuda_range *found = find(cuda, ranges, at);

		if (!found || (write && !found->writable))
			return false;
		at = found->end;
	}
	return true;
}
