/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening a device for the backends cuda and cufile: which one, whether it can do what sharing
 * needs, its context, and what there is to say about it.
 *
 * A MIG instance is a device of its own to the driver, with an UUID of its own; the older form of
 * cuDeviceGetUuid gives that of the whole GPU, which is how the two are told apart.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fs/base.h"
#include "gpu/backend_cuda_internal.h"
#include "gpu/cuda_kernels.h"
#include "gpu/numa.h"

#define UUID_TEXT_SIZE 52u /* with what may stand before it */
#define BUS_ID_SIZE 32

struct device_name {
	bool any;     /* no device was asked for */
	bool by_uuid; /* else by number */
	unsigned long number;
	uint8_t uuid[KVG_UUID_SIZE];
};

static int hex(char c)
{
	return c >= '0' && c <= '9'   ? c - '0'
	       : c >= 'a' && c <= 'f' ? c - 'a' + 10
	       : c >= 'A' && c <= 'F' ? c - 'A' + 10
				      : -1;
}

/* "GPU-8a1b2c3d-....", as nvidia-smi -L prints it. */
static int parse_uuid(const char *text, uint8_t *ret_uuid)
{
	unsigned digits = 0;

	if (strncmp(text, "GPU-", 4) != 0 && strncmp(text, "MIG-", 4) != 0)
		return -EINVAL;
	for (text += 4; *text; text++) {
		int digit = hex(*text);

		if (*text == '-')
			continue;
		if (digit < 0 || digits == 2 * KVG_UUID_SIZE)
			return -EINVAL;
		if (digits % 2 == 0)
			ret_uuid[digits / 2] = (uint8_t)(digit << 4);
		else
			ret_uuid[digits / 2] |= (uint8_t)digit;
		digits++;
	}
	return digits == 2 * KVG_UUID_SIZE ? 0 : -EINVAL;
}

static void format_uuid(const char *prefix, const uint8_t *uuid, char *text)
{
	size_t length = (size_t)snprintf(text, UUID_TEXT_SIZE, "%s", prefix);

	for (unsigned i = 0; i < KVG_UUID_SIZE; i++)
		length += (size_t)snprintf(text + length, UUID_TEXT_SIZE - length, "%s%02x",
			i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}

static int parse_device(const char *text, struct device_name *ret_name)
{
	char *end;

	*ret_name = (struct device_name){.any = !text};
	if (!text)
		return 0;
	ret_name->number = strtoul(text, &end, 10);
	if (text[0] >= '0' && text[0] <= '9' && *end == '\0')
		return 0;
	ret_name->by_uuid = true;
	return parse_uuid(text, ret_name->uuid);
}

/* An attribute that a driver may not know yet. */
static int attribute(const struct kvg_cuda *cuda, unsigned which, int otherwise)
{
	int value;

	return cuda->driver->device_attribute(&value, which, cuda->device) == KVG_CU_SUCCESS
		       ? value
		       : otherwise;
}

static bool is_device(const struct kvg_cuda *cuda, const struct device_name *name, int number)
{
	struct kvg_cu_uuid uuid;

	if (!name->by_uuid)
		return name->any || name->number == (unsigned long)number;
	return cuda->driver->device_uuid(&uuid, cuda->device) == KVG_CU_SUCCESS &&
	       memcmp(uuid.bytes, name->uuid, KVG_UUID_SIZE) == 0;
}

static int find_device(
	struct kvg_cuda *cuda, const struct kvg_backend_open *open, char *ret_error, size_t size)
{
	const struct kvg_cuda_driver *cu = cuda->driver;
	kvg_cu_context current = NULL;
	struct device_name name;
	int count = 0;

	if (parse_device(open->device, &name) < 0) {
		(void)snprintf(ret_error, size,
			"'%.64s' is no device: give its UUID as nvidia-smi -L prints it, or its "
			"number",
			open->device);
		return -ENODEV;
	}
	if (name.any && cu->context_get(&current) == KVG_CU_SUCCESS && current &&
		cu->context_device(&cuda->device) == KVG_CU_SUCCESS)
		return 0;
	if (cu->device_count(&count) != KVG_CU_SUCCESS || count == 0) {
		(void)snprintf(ret_error, size, "the driver sees no GPU");
		return -ENODEV;
	}
	for (int i = 0; i < count; i++)
		if (cu->device_get(&cuda->device, i) == KVG_CU_SUCCESS && is_device(cuda, &name, i))
			return 0;
	(void)snprintf(ret_error, size,
		"the driver sees no device '%.64s' among its %d (is it in CUDA_VISIBLE_DEVICES?)",
		open->device ? open->device : "0", count);
	return -ENODEV;
}

/* Without these there is no sharing between processes. */
static int need_sharing(const struct kvg_cuda *cuda, char *ret_error, size_t size)
{
	const char *lacks = NULL;

	if (attribute(cuda, KVG_CU_ATTRIBUTE_VMM, 0) == 0)
		lacks = "virtual memory management";
	else if (attribute(cuda, KVG_CU_ATTRIBUTE_POSIX_FD, 0) == 0)
		lacks = "sharing of memory by file descriptors";
	if (!lacks)
		return 0;
	(void)snprintf(ret_error, size, "%s has no %s here (some vGPU profiles and WSL lack it)",
		cuda->info.name, lacks);
	return -EOPNOTSUPP;
}

static void describe_mode(struct kvg_cuda *cuda)
{
	const struct kvg_cuda_driver *cu = cuda->driver;
	struct kvg_cu_uuid parent;
	char text[UUID_TEXT_SIZE] = "";

	if (cu->device_parent_uuid(&parent, cuda->device) == KVG_CU_SUCCESS &&
		memcmp(parent.bytes, cuda->info.uuid, KVG_UUID_SIZE) != 0)
		format_uuid(", MIG of GPU-", (const uint8_t *)parent.bytes, text);
	(void)snprintf(cuda->info.mode, sizeof(cuda->info.mode), "%s: CUDA %d.%d, %s copies%s",
		cuda->base.ops->name, cu->version / 1000, cu->version % 1000 / 10,
		cu->copy_batch ? "batched" : "single", text);
}

/* What the driver knows, which is a lot on Grace only; else what the kernel does. */
static int find_node(const struct kvg_cuda *cuda, const char *sysfs)
{
	int node = attribute(cuda, KVG_CU_ATTRIBUTE_HOST_NUMA_ID, -1);
	char id[BUS_ID_SIZE];

	if (node >= 0 || !cuda->driver->device_bus_id ||
		cuda->driver->device_bus_id(id, sizeof(id), cuda->device) != KVG_CU_SUCCESS)
		return node;
	return kvg_numa_node(sysfs, id);
}

static int describe(struct kvg_cuda *cuda, const struct kvg_backend_open *open, char *ret_error,
	size_t error_size)
{
	const struct kvg_cuda_driver *cu = cuda->driver;
	struct kvg_device_info *info = &cuda->info;
	struct kvg_cu_uuid uuid;
	const char *call = "cuDeviceGetName";
	kvg_cu_result result = cu->device_name(info->name, sizeof(info->name), cuda->device);
	size_t total = 0;

	if (result == KVG_CU_SUCCESS) {
		call = "cuDeviceGetUuid";
		result = cu->device_uuid(&uuid, cuda->device);
	}
	if (result == KVG_CU_SUCCESS) {
		call = "cuDeviceTotalMem";
		result = cu->device_memory(&total, cuda->device);
	}
	if (result != KVG_CU_SUCCESS) {
		kvg_cuda_describe(cu, call, result, ret_error, error_size);
		return kvg_cuda_check(cuda, result);
	}
	memcpy(info->uuid, uuid.bytes, KVG_UUID_SIZE);
	info->total = total;
	info->numa_node = find_node(cuda, open->sysfs);
	info->integrated = attribute(cuda, KVG_CU_ATTRIBUTE_HOST_PAGE_TABLES, 0) != 0;
	info->register_read_only = attribute(cuda, KVG_CU_ATTRIBUTE_REGISTER_READ_ONLY, 0) != 0;
	info->reserves = true;
	info->modelled = cu->modelled;
	info->dl_device_type = 2; /* kDLCUDA */
	info->dl_device_id = cuda->device;
	describe_mode(cuda);
	return need_sharing(cuda, ret_error, error_size);
}

/* An engine's own context if it is of this device; else the primary one, which engines use too. */
static int take_context(struct kvg_cuda *cuda, bool client, char *ret_error, size_t error_size)
{
	const struct kvg_cuda_driver *cu = cuda->driver;
	kvg_cu_context current = NULL;
	kvg_cu_device device;
	kvg_cu_result result;

	if (client && cu->context_get(&current) == KVG_CU_SUCCESS && current &&
		cu->context_device(&device) == KVG_CU_SUCCESS && device == cuda->device) {
		cuda->context = current;
		return 0;
	}
	result = cu->primary_retain(&cuda->context, cuda->device);
	if (result != KVG_CU_SUCCESS) {
		kvg_cuda_describe(cu, "cuDevicePrimaryCtxRetain", result, ret_error, error_size);
		return kvg_cuda_check(cuda, result);
	}
	cuda->retained = true;
	return 0;
}

static int find_granularity(struct kvg_cuda *cuda, char *ret_error, size_t error_size)
{
	const struct kvg_cu_allocation allocation = {
		.type = KVG_CU_ALLOCATION_PINNED,
		.handle_types = KVG_CU_HANDLE_POSIX_FD,
		.location = {.type = KVG_CU_LOCATION_DEVICE, .id = cuda->device},
		.flags.rdma = cuda->rdma,
	};
	size_t granularity = 0;
	kvg_cu_result result =
		cuda->driver->granularity(&granularity, &allocation, KVG_CU_GRANULARITY_MINIMUM);

	if (result == KVG_CU_SUCCESS && granularity > 0 && (granularity & (granularity - 1)) == 0) {
		cuda->info.granularity = granularity;
		return 0;
	}
	kvg_cuda_describe(
		cuda->driver, "cuMemGetAllocationGranularity", result, ret_error, error_size);
	return result == KVG_CU_SUCCESS ? -EOPNOTSUPP : kvg_cuda_check(cuda, result);
}

int kvg_cuda_open(struct kvg_cuda *cuda, const struct kvg_backend_open *open, char *ret_error,
	size_t error_size)
{
	int r = kvg_cuda_load(&cuda->driver, ret_error, error_size);

	kvg_cuda_kernels_init(cuda, open);
	if (r == 0)
		r = find_device(cuda, open, ret_error, error_size);
	if (r == 0)
		r = describe(cuda, open, ret_error, error_size);
	if (r == 0)
		r = take_context(cuda, open->client, ret_error, error_size);
	if (r < 0)
		return r;
	r = find_granularity(cuda, ret_error, error_size);
	if (r < 0)
		kvg_cuda_close(cuda);
	return r;
}

void kvg_cuda_close(struct kvg_cuda *cuda)
{
	kvg_cuda_kernels_done(cuda);
	if (cuda->retained)
		(void)cuda->driver->primary_release(cuda->device);
	cuda->retained = false;
}
