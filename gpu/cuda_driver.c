/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the driver and its functions: see cuda_driver.h. */
#include "gpu/cuda_driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "fs/base.h"

#define LIBRARY "libcuda.so.1"
#define VERSION_MIN 12000

struct symbol {
	const char *name;
	int version;
	bool required;
	size_t offset; /* of its field in kvg_cuda_driver */
};

static const struct symbol symbols[] = {
#define SYMBOL(field, symbol_, version_, required_, parameters)                                    \
	{.name = #symbol_,                                                                         \
		.version = (version_),                                                             \
		.required = (required_),                                                           \
		.offset = offsetof(struct kvg_cuda_driver, field)},
	KVG_CUDA_SYMBOLS(SYMBOL)
#undef SYMBOL
};

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvg_cuda_driver loaded; /* load_lock, until load_done; then it never changes */
static bool load_done;                /* load_lock */

/* The driver of an engine that has one loaded is that driver, wherever it came from. */
static void *open_library(char *ret_reason, size_t reason_size)
{
	void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
	const char *text;

	if (!library)
		library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	if (library)
		return library;
	text = dlerror();
	(void)snprintf(ret_reason, reason_size, "no NVIDIA driver: %s", text ? text : LIBRARY);
	return NULL;
}

static int find_symbols(
	void *library, struct kvg_cuda_driver *driver, char *ret_reason, size_t reason_size)
{
	kvg_cu_get_proc_address get;

	*(void **)&get = dlsym(library, KVG_CUDA_GET_PROC_ADDRESS);
	if (!get) {
		(void)snprintf(ret_reason, reason_size,
			"the NVIDIA driver is older than 525 (CUDA 12.0): install a newer one");
		return -EOPNOTSUPP;
	}
	for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
		unsigned status = KVG_CU_QUERY_NOT_FOUND;
		void *address = NULL;

		/* Not found is also said by the status alone, with a result of success. */
		if (get(symbols[i].name, &address, symbols[i].version, 0, &status) !=
				KVG_CU_SUCCESS ||
			status != KVG_CU_QUERY_SUCCESS)
			address = NULL;
		if (!address && symbols[i].required) {
			(void)snprintf(ret_reason, reason_size,
				"the NVIDIA driver has no %s of CUDA %d.%d: install another "
				"version",
				symbols[i].name, symbols[i].version / 1000,
				symbols[i].version % 1000 / 10);
			return -EOPNOTSUPP;
		}
		memcpy((char *)driver + symbols[i].offset, &address, sizeof(address));
	}
	return 0;
}

static int start(struct kvg_cuda_driver *driver, char *ret_reason, size_t reason_size)
{
	kvg_cu_result result = driver->init(0);
	const char *call = "cuInit";

	if (result == KVG_CU_SUCCESS) {
		call = "cuDriverGetVersion";
		result = driver->driver_version(&driver->version);
	}
	if (result == KVG_CU_SUCCESS && driver->version < VERSION_MIN) {
		(void)snprintf(ret_reason, reason_size,
			"the NVIDIA driver is of CUDA %d.%d: install 525 (CUDA 12.0) or newer",
			driver->version / 1000, driver->version % 1000 / 10);
		return -EOPNOTSUPP;
	}
	if (result == KVG_CU_SUCCESS)
		return 0;
	if (result == KVG_CU_STUB_LIBRARY)
		(void)snprintf(ret_reason, reason_size,
			"%s is the toolkit's stub, no driver: take its folder out of "
			"LD_LIBRARY_PATH",
			LIBRARY);
	else
		kvg_cuda_describe(driver, call, result, ret_reason, reason_size);
	return result == KVG_CU_NO_DEVICE || result == KVG_CU_STUB_LIBRARY ? -ENODEV : -EIO;
}

int kvg_cuda_load(const struct kvg_cuda_driver **ret_driver, char *ret_reason, size_t reason_size)
{
	struct kvg_cuda_driver driver = {0};
	void *library;
	int r;
	KV_LOCKED(&load_lock);

	if (!load_done) {
		library = open_library(ret_reason, reason_size);
		if (!library)
			return -ENODEV;
		r = find_symbols(library, &driver, ret_reason, reason_size);
		if (r < 0) {
			(void)dlclose(library);
			return r;
		}
		/* Once it was called it stays loaded, whatever came of that. */
		r = start(&driver, ret_reason, reason_size);
		if (r < 0)
			return r;
		/* Only the stand-in of the tests has it. */
		driver.modelled = dlsym(library, "kvg_modelled_driver") != NULL;
		loaded = driver;
		load_done = true;
	}
	*ret_driver = &loaded;
	return 0;
}

int kvg_cuda_errno(kvg_cu_result result)
{
	switch (result) {
	case KVG_CU_SUCCESS:
		return 0;
	case KVG_CU_INVALID_VALUE:
	case KVG_CU_INVALID_HANDLE:
	case KVG_CU_ALREADY_REGISTERED:
	case KVG_CU_NOT_REGISTERED:
		return -EINVAL;
	case KVG_CU_OUT_OF_MEMORY:
		return -ENOMEM;
	case KVG_CU_NO_DEVICE:
	case KVG_CU_INVALID_DEVICE:
	case KVG_CU_DEVICE_UNAVAILABLE:
	case KVG_CU_STUB_LIBRARY:
		return -ENODEV;
	case KVG_CU_NOT_READY:
		return -EAGAIN;
	case KVG_CU_NOT_SUPPORTED:
		return -EOPNOTSUPP;
	default:
		return -EIO;
	}
}

bool kvg_cuda_is_fatal(kvg_cu_result result)
{
	switch (result) {
	/* Those of which cuda.h says that the process must be ended and started again. */
	case KVG_CU_CONTAINED:
	case KVG_CU_ILLEGAL_ADDRESS:
	case KVG_CU_LAUNCH_TIMEOUT:
	case KVG_CU_HARDWARE_STACK_ERROR:
	case KVG_CU_ILLEGAL_INSTRUCTION:
	case KVG_CU_MISALIGNED_ADDRESS:
	case KVG_CU_INVALID_ADDRESS_SPACE:
	case KVG_CU_INVALID_PC:
	case KVG_CU_LAUNCH_FAILED:
	case KVG_CU_TENSOR_MEMORY_LEAK:
	case KVG_CU_MPS_CLIENT_TERMINATED:
	/* Those where the device's memory, or the context, is in doubt. */
	case KVG_CU_ECC_UNCORRECTABLE:
	case KVG_CU_NVLINK_UNCORRECTABLE:
	case KVG_CU_CONTEXT_IS_DESTROYED:
	case KVG_CU_ASSERT:
	case KVG_CU_DEINITIALIZED:
		return true;
	default:
		return false;
	}
}

void kvg_cuda_describe(const struct kvg_cuda_driver *driver, const char *call, kvg_cu_result result,
	char *text, size_t text_size)
{
	const char *name = NULL;

	if (!driver->error_name || driver->error_name(result, &name) != KVG_CU_SUCCESS || !name)
		name = "unknown error";
	(void)snprintf(text, text_size, "%s: %s (%u)", call, name, result);
}
