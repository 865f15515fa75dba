/* SPDX-License-Identifier: Apache-2.0 */
/* The fake driver's versions, devices and contexts, and how its functions are found. */
#include <stdio.h>

#include "tests/gpu/fake/internal.h"

#define STACK_MAX 16

/* What a real driver does not export. */
extern const int kvg_modelled_driver;
FAKE_API const int kvg_modelled_driver = 1;

static _Thread_local kvg_cu_context stack[STACK_MAX];
static _Thread_local unsigned stack_depth;

static const struct {
	const char *symbol;
	int version;
	void *function;
} functions[] = {
#define FUNCTION(field, symbol_, version_, required, parameters)                                   \
	{#symbol_, (version_), (void *)fake_##field},
	KVG_CUDA_SYMBOLS(FUNCTION)
#undef FUNCTION
};

/* Gives the newest ABI that is not newer than VERSION, as the driver does. */
FAKE_API kvg_cu_result cuGetProcAddress_v2(
	const char *symbol, void **address, int version, uint64_t flags, unsigned *status);
FAKE_API kvg_cu_result cuGetProcAddress_v2(
	const char *symbol, void **address, int version, uint64_t flags, unsigned *status)
{
	int best = 0;
	KV_LOCKED(&fake.lock);

	fake_config_read();
	*address = NULL;
	*status = KVG_CU_QUERY_NOT_FOUND;
	if (fake_is_hidden(symbol))
		return KVG_CU_NOT_FOUND;
	for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
		if (strcmp(functions[i].symbol, symbol) != 0 ||
			functions[i].version > fake.config.version)
			continue;
		if (functions[i].version > version && best == 0) {
			*status = KVG_CU_QUERY_TOO_OLD;
		} else if (functions[i].version <= version && functions[i].version > best) {
			best = functions[i].version;
			*address = functions[i].function;
			*status = KVG_CU_QUERY_SUCCESS;
		}
	}
	return *address ? KVG_CU_SUCCESS : KVG_CU_NOT_FOUND;
}

/* ---- Start ---- */

kvg_cu_result fake_init(unsigned flags)
{
	FAKE_ENTER("cuInit", FAKE_NOTHING);

	if (flags != 0)
		return KVG_CU_INVALID_VALUE;
	if (fake.initialised)
		return fake.process == getpid() ? KVG_CU_SUCCESS : KVG_CU_NOT_INITIALIZED;
	if (fake.config.stub)
		return KVG_CU_STUB_LIBRARY;
	if (fake.config.devices == 0)
		return KVG_CU_NO_DEVICE;
	for (int i = 0; i < FAKE_DEVICES_MAX; i++)
		fake.contexts[i].device = i;
	fake.process = getpid();
	fake.initialised = true;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_driver_version(int *version)
{
	FAKE_ENTER("cuDriverGetVersion", FAKE_NOTHING);

	*version = fake.config.version;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_error_name(kvg_cu_result result, const char **name)
{
	static const struct {
		kvg_cu_result code;
		const char *name;
	} names[] = {
		{KVG_CU_SUCCESS, "CUDA_SUCCESS"},
		{KVG_CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
		{KVG_CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
		{KVG_CU_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
		{KVG_CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
		{KVG_CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
		{KVG_CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
		{KVG_CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
		{KVG_CU_UNKNOWN, "CUDA_ERROR_UNKNOWN"},
	};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (names[i].code == result) {
			*name = names[i].name;
			return KVG_CU_SUCCESS;
		}
	}
	*name = NULL;
	return KVG_CU_INVALID_VALUE;
}

/* ---- Devices ---- */

static bool is_device(kvg_cu_device device)
{
	return device >= 0 && device < fake.config.devices;
}

kvg_cu_result fake_device_count(int *count)
{
	FAKE_ENTER("cuDeviceGetCount", FAKE_INIT);

	*count = fake.config.devices;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_device_get(kvg_cu_device *device, int ordinal)
{
	FAKE_ENTER("cuDeviceGet", FAKE_INIT);

	if (!is_device(ordinal))
		return KVG_CU_INVALID_DEVICE;
	*device = ordinal;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_device_name(char *name, int length, kvg_cu_device device)
{
	FAKE_ENTER("cuDeviceGetName", FAKE_INIT);

	if (!is_device(device) || length <= 0)
		return KVG_CU_INVALID_DEVICE;
	(void)snprintf(name, (size_t)length, "%s", fake.config.name);
	return KVG_CU_SUCCESS;
}

/* In a domain that no machine has. */
kvg_cu_result fake_device_bus_id(char *id, int length, kvg_cu_device device)
{
	FAKE_ENTER("cuDeviceGetPCIBusId", FAKE_INIT);

	if (!is_device(device) || length <= 0)
		return KVG_CU_INVALID_DEVICE;
	(void)snprintf(id, (size_t)length, "FAFA:%02X:00.0", 0xC0 + (unsigned)device);
	return KVG_CU_SUCCESS;
}

static kvg_cu_result make_uuid(struct kvg_cu_uuid *uuid, kvg_cu_device device, char instance)
{
	if (!is_device(device))
		return KVG_CU_INVALID_DEVICE;
	for (int i = 0; i < 16; i++)
		uuid->bytes[i] = (char)(0xfa + i);
	uuid->bytes[14] = instance;
	uuid->bytes[15] = (char)device;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_device_parent_uuid(struct kvg_cu_uuid *uuid, kvg_cu_device device)
{
	FAKE_ENTER("cuDeviceGetUuid", FAKE_INIT);

	return make_uuid(uuid, device, 0);
}

kvg_cu_result fake_device_uuid(struct kvg_cu_uuid *uuid, kvg_cu_device device)
{
	FAKE_ENTER("cuDeviceGetUuid", FAKE_INIT);

	return make_uuid(uuid, device, fake.config.mig ? 1 : 0);
}

kvg_cu_result fake_device_memory(size_t *bytes, kvg_cu_device device)
{
	FAKE_ENTER("cuDeviceTotalMem", FAKE_INIT);

	if (!is_device(device))
		return KVG_CU_INVALID_DEVICE;
	*bytes = fake.config.memory;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_device_attribute(int *value, unsigned attribute, kvg_cu_device device)
{
	FAKE_ENTER("cuDeviceGetAttribute", FAKE_INIT);

	if (!is_device(device))
		return KVG_CU_INVALID_DEVICE;
	switch (attribute) {
	case KVG_CU_ATTRIBUTE_HOST_REGISTER:
	case KVG_CU_ATTRIBUTE_VMM:
	case KVG_CU_ATTRIBUTE_POSIX_FD:
	case KVG_CU_ATTRIBUTE_RDMA_VMM:
	case KVG_CU_ATTRIBUTE_REGISTER_READ_ONLY:
		*value = 1;
		break;
	case KVG_CU_ATTRIBUTE_HOST_PAGE_TABLES:
		*value = 0;
		break;
	case KVG_CU_ATTRIBUTE_HOST_NUMA_ID:
		*value = -1;
		break;
	default:
		return KVG_CU_INVALID_VALUE;
	}
	*value = fake_attribute_override((int)attribute, *value);
	return KVG_CU_SUCCESS;
}

/* ---- Contexts ---- */

kvg_cu_context fake_context_current(void)
{
	return stack_depth > 0 && stack[stack_depth - 1]->references > 0 ? stack[stack_depth - 1]
									 : NULL;
}

void fake_contexts_reset(void)
{
	for (int i = 0; i < FAKE_DEVICES_MAX; i++)
		fake.contexts[i].references = 0;
	stack_depth = 0;
}

unsigned fake_contexts_live(void)
{
	unsigned live = 0;

	for (int i = 0; i < FAKE_DEVICES_MAX; i++)
		live += fake.contexts[i].references;
	return live;
}

kvg_cu_result fake_primary_retain(kvg_cu_context *context, kvg_cu_device device)
{
	FAKE_ENTER("cuDevicePrimaryCtxRetain", FAKE_INIT);

	if (!is_device(device))
		return KVG_CU_INVALID_DEVICE;
	fake.contexts[device].references++;
	*context = &fake.contexts[device];
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_primary_release(kvg_cu_device device)
{
	FAKE_ENTER("cuDevicePrimaryCtxRelease", FAKE_INIT);

	if (!is_device(device))
		return KVG_CU_INVALID_DEVICE;
	if (fake.contexts[device].references == 0)
		return KVG_CU_INVALID_CONTEXT;
	fake.contexts[device].references--;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_context_get(kvg_cu_context *context)
{
	FAKE_ENTER("cuCtxGetCurrent", FAKE_INIT);

	*context = fake_context_current();
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_context_push(kvg_cu_context context)
{
	FAKE_ENTER("cuCtxPushCurrent", FAKE_INIT);

	if (!context || context->references == 0)
		return KVG_CU_INVALID_CONTEXT;
	assert(stack_depth < STACK_MAX);
	stack[stack_depth++] = context;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_context_pop(kvg_cu_context *context)
{
	FAKE_ENTER("cuCtxPopCurrent", FAKE_INIT);

	if (stack_depth == 0)
		return KVG_CU_INVALID_CONTEXT;
	stack_depth--;
	if (context)
		*context = stack[stack_depth];
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_context_device(kvg_cu_device *device)
{
	FAKE_ENTER("cuCtxGetDevice", FAKE_CONTEXT);

	*device = fake_context_current()->device;
	return KVG_CU_SUCCESS;
}
