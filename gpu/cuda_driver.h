/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver, opened by name: a table of the functions that kvfs uses, each asked for at the
 * version of CUDA whose ABI is declared here, so that a newer driver gives the same ABI. Nothing of
 * NVIDIA's is needed to build; where the toolkit's headers are, tests/gpu/abi_cuda.c holds every
 * declaration against them.
 *
 * One table a process, loaded once and never given back (a driver cannot be unloaded safely); any
 * thread may load and use it.
 */
#ifndef KVFS_GPU_CUDA_DRIVER_H
#define KVFS_GPU_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Enumerations of the driver's are unsigned in its ABI. */
typedef unsigned kvg_cu_result;
typedef int kvg_cu_device;
typedef unsigned long long kvg_cu_ptr;
typedef unsigned long long kvg_cu_handle;
typedef struct kvg_cu_ctx *kvg_cu_context;
typedef struct kvg_cu_str *kvg_cu_stream;
typedef struct kvg_cu_evt *kvg_cu_event;
typedef struct kvg_cu_mod *kvg_cu_module;
typedef struct kvg_cu_fun *kvg_cu_function;

enum {
	KVG_CU_SUCCESS = 0,
	KVG_CU_INVALID_VALUE = 1,
	KVG_CU_OUT_OF_MEMORY = 2,
	KVG_CU_NOT_INITIALIZED = 3,
	KVG_CU_DEINITIALIZED = 4,
	KVG_CU_STUB_LIBRARY = 34,
	KVG_CU_DEVICE_UNAVAILABLE = 46,
	KVG_CU_NO_DEVICE = 100,
	KVG_CU_INVALID_DEVICE = 101,
	KVG_CU_INVALID_CONTEXT = 201,
	KVG_CU_ECC_UNCORRECTABLE = 214,
	KVG_CU_INVALID_PTX = 218,
	KVG_CU_NVLINK_UNCORRECTABLE = 220,
	KVG_CU_CONTAINED = 226,
	KVG_CU_OPERATING_SYSTEM = 304,
	KVG_CU_INVALID_HANDLE = 400,
	KVG_CU_NOT_FOUND = 500,
	KVG_CU_NOT_READY = 600,
	KVG_CU_ILLEGAL_ADDRESS = 700,
	KVG_CU_LAUNCH_TIMEOUT = 702,
	KVG_CU_CONTEXT_IS_DESTROYED = 709,
	KVG_CU_ASSERT = 710,
	KVG_CU_ALREADY_REGISTERED = 712,
	KVG_CU_NOT_REGISTERED = 713,
	KVG_CU_HARDWARE_STACK_ERROR = 714,
	KVG_CU_ILLEGAL_INSTRUCTION = 715,
	KVG_CU_MISALIGNED_ADDRESS = 716,
	KVG_CU_INVALID_ADDRESS_SPACE = 717,
	KVG_CU_INVALID_PC = 718,
	KVG_CU_LAUNCH_FAILED = 719,
	KVG_CU_TENSOR_MEMORY_LEAK = 721,
	KVG_CU_NOT_SUPPORTED = 801,
	KVG_CU_MPS_CLIENT_TERMINATED = 810,
	KVG_CU_UNKNOWN = 999,
};

/* Device attributes. */
enum {
	KVG_CU_ATTRIBUTE_HOST_REGISTER = 99,
	/* The device reads pageable memory through the CPU's page tables (Grace). */
	KVG_CU_ATTRIBUTE_HOST_PAGE_TABLES = 100,
	KVG_CU_ATTRIBUTE_VMM = 102,
	KVG_CU_ATTRIBUTE_POSIX_FD = 103,
	KVG_CU_ATTRIBUTE_RDMA_VMM = 110,
	KVG_CU_ATTRIBUTE_REGISTER_READ_ONLY = 113,
	KVG_CU_ATTRIBUTE_HOST_NUMA_ID = 134,
};

enum {
	KVG_CU_ALLOCATION_PINNED = 1,
	KVG_CU_HANDLE_NONE = 0,
	KVG_CU_HANDLE_POSIX_FD = 1,
	KVG_CU_LOCATION_DEVICE = 1,
	KVG_CU_ACCESS_NONE = 0,
	KVG_CU_ACCESS_READ = 1,
	KVG_CU_ACCESS_READ_WRITE = 3,
	KVG_CU_GRANULARITY_MINIMUM = 0,
	KVG_CU_REGISTER_PORTABLE = 1,
	KVG_CU_REGISTER_READ_ONLY = 8,
	KVG_CU_STREAM_NON_BLOCKING = 1,
	KVG_CU_EVENT_DISABLE_TIMING = 2,
	KVG_CU_SOURCE_ORDER_STREAM = 1,
	KVG_CU_COPY_PREFER_OVERLAP = 1,
	KVG_CU_QUERY_SUCCESS = 0,
	KVG_CU_QUERY_NOT_FOUND = 1,
	KVG_CU_QUERY_TOO_OLD = 2,
};

/* Pointer attributes. */
enum {
	KVG_CU_POINTER_MEMORY_TYPE = 2, /* unsigned: KVG_CU_MEMORY_* */
	KVG_CU_POINTER_DEVICE = 9,      /* int */
	/* bool: made by cuMemAlloc, and not by the virtual memory calls. */
	KVG_CU_POINTER_LEGACY = 10,
	KVG_CU_POINTER_RANGE_START = 11,   /* kvg_cu_ptr: of the allocation, or of the addresses */
	KVG_CU_POINTER_RANGE_SIZE = 12,    /* size_t */
	KVG_CU_POINTER_ACCESS = 16,        /* unsigned: KVG_CU_ACCESS_* */
	KVG_CU_POINTER_MAPPING_SIZE = 18,  /* size_t: of what was mapped there */
	KVG_CU_POINTER_MAPPING_START = 19, /* kvg_cu_ptr */
	KVG_CU_MEMORY_DEVICE = 2,
};

struct kvg_cu_uuid {
	char bytes[16];
};

struct kvg_cu_location {
	unsigned type; /* KVG_CU_LOCATION_* */
	int id;        /* the device's number */
};

struct kvg_cu_allocation {
	unsigned type;         /* KVG_CU_ALLOCATION_* */
	unsigned handle_types; /* KVG_CU_HANDLE_* */
	struct kvg_cu_location location;
	void *windows;
	struct {
		unsigned char compression;
		unsigned char rdma; /* fit for reads by other devices (gpuDirectRDMACapable) */
		unsigned short usage;
		unsigned char reserved[4];
	} flags;
};

struct kvg_cu_access {
	struct kvg_cu_location location;
	unsigned flags; /* KVG_CU_ACCESS_* */
};

struct kvg_cu_copy_attributes {
	unsigned source_order; /* KVG_CU_SOURCE_ORDER_* */
	struct kvg_cu_location source_hint;
	struct kvg_cu_location target_hint;
	unsigned flags; /* KVG_CU_COPY_* */
};

/*
 * X(field, symbol, version, required, parameters): VERSION is 1000 * major + 10 * minor of the CUDA
 * that brought the ABI in PARAMETERS. What is not required is NULL where the driver lacks it.
 */
#define KVG_CUDA_SYMBOLS(X)                                                                        \
	X(init, cuInit, 2000, 1, (unsigned flags))                                                 \
	X(driver_version, cuDriverGetVersion, 2020, 1, (int *version))                             \
	X(error_name, cuGetErrorName, 6000, 1, (kvg_cu_result result, const char **name))          \
	X(device_count, cuDeviceGetCount, 2000, 1, (int *count))                                   \
	X(device_get, cuDeviceGet, 2000, 1, (kvg_cu_device * device, int ordinal))                 \
	X(device_name, cuDeviceGetName, 2000, 1, (char *name, int length, kvg_cu_device device))   \
	X(device_parent_uuid, cuDeviceGetUuid, 9020, 1,                                            \
		(struct kvg_cu_uuid * uuid, kvg_cu_device device))                                 \
	X(device_uuid, cuDeviceGetUuid, 11040, 1,                                                  \
		(struct kvg_cu_uuid * uuid, kvg_cu_device device))                                 \
	X(device_bus_id, cuDeviceGetPCIBusId, 4010, 0,                                             \
		(char *id, int length, kvg_cu_device device))                                      \
	X(device_memory, cuDeviceTotalMem, 3020, 1, (size_t * bytes, kvg_cu_device device))        \
	X(device_attribute, cuDeviceGetAttribute, 2000, 1,                                         \
		(int *value, unsigned attribute, kvg_cu_device device))                            \
	X(primary_retain, cuDevicePrimaryCtxRetain, 7000, 1,                                       \
		(kvg_cu_context * context, kvg_cu_device device))                                  \
	X(primary_release, cuDevicePrimaryCtxRelease, 11000, 1, (kvg_cu_device device))            \
	X(context_get, cuCtxGetCurrent, 4000, 1, (kvg_cu_context * context))                       \
	X(context_push, cuCtxPushCurrent, 4000, 1, (kvg_cu_context context))                       \
	X(context_pop, cuCtxPopCurrent, 4000, 1, (kvg_cu_context * context))                       \
	X(context_device, cuCtxGetDevice, 2000, 1, (kvg_cu_device * device))                       \
	X(memory_info, cuMemGetInfo, 3020, 1, (size_t * free_bytes, size_t * total_bytes))         \
	X(granularity, cuMemGetAllocationGranularity, 10020, 1,                                    \
		(size_t * granularity, const struct kvg_cu_allocation *allocation,                 \
			unsigned option))                                                          \
	X(create, cuMemCreate, 10020, 1,                                                           \
		(kvg_cu_handle * handle, size_t size, const struct kvg_cu_allocation *allocation,  \
			unsigned long long flags))                                                 \
	X(release, cuMemRelease, 10020, 1, (kvg_cu_handle handle))                                 \
	X(export_handle, cuMemExportToShareableHandle, 10020, 1,                                   \
		(void *shareable, kvg_cu_handle handle, unsigned type, unsigned long long flags))  \
	X(import_handle, cuMemImportFromShareableHandle, 10020, 1,                                 \
		(kvg_cu_handle * handle, void *shareable, unsigned type))                          \
	X(handle_allocation, cuMemGetAllocationPropertiesFromHandle, 10020, 1,                     \
		(struct kvg_cu_allocation * allocation, kvg_cu_handle handle))                     \
	X(reserve, cuMemAddressReserve, 10020, 1,                                                  \
		(kvg_cu_ptr * address, size_t size, size_t alignment, kvg_cu_ptr fixed,            \
			unsigned long long flags))                                                 \
	X(unreserve, cuMemAddressFree, 10020, 1, (kvg_cu_ptr address, size_t size))                \
	X(map, cuMemMap, 10020, 1,                                                                 \
		(kvg_cu_ptr address, size_t size, size_t offset, kvg_cu_handle handle,             \
			unsigned long long flags))                                                 \
	X(unmap, cuMemUnmap, 10020, 1, (kvg_cu_ptr address, size_t size))                          \
	X(set_access, cuMemSetAccess, 10020, 1,                                                    \
		(kvg_cu_ptr address, size_t size, const struct kvg_cu_access *access,              \
			size_t count))                                                             \
	X(host_register, cuMemHostRegister, 6050, 1, (void *memory, size_t size, unsigned flags))  \
	X(host_unregister, cuMemHostUnregister, 4000, 1, (void *memory))                           \
	X(copy_to_device, cuMemcpyHtoDAsync, 3020, 1,                                              \
		(kvg_cu_ptr to, const void *from, size_t size, kvg_cu_stream stream))              \
	X(copy_to_host, cuMemcpyDtoHAsync, 3020, 1,                                                \
		(void *to, kvg_cu_ptr from, size_t size, kvg_cu_stream stream))                    \
	X(copy_on_device, cuMemcpyDtoDAsync, 3020, 1,                                              \
		(kvg_cu_ptr to, kvg_cu_ptr from, size_t size, kvg_cu_stream stream))               \
	X(copy_batch, cuMemcpyBatchAsync, 12080, 0,                                                \
		(kvg_cu_ptr * to, kvg_cu_ptr * from, size_t * sizes, size_t count,                 \
			struct kvg_cu_copy_attributes * attributes, size_t * attribute_starts,     \
			size_t attribute_count, size_t * failed, kvg_cu_stream stream))            \
	X(fill, cuMemsetD8Async, 3020, 1,                                                          \
		(kvg_cu_ptr to, unsigned char byte, size_t size, kvg_cu_stream stream))            \
	X(stream_create, cuStreamCreate, 2000, 1, (kvg_cu_stream * stream, unsigned flags))        \
	X(stream_destroy, cuStreamDestroy, 4000, 1, (kvg_cu_stream stream))                        \
	X(stream_sync, cuStreamSynchronize, 2000, 1, (kvg_cu_stream stream))                       \
	X(event_create, cuEventCreate, 2000, 1, (kvg_cu_event * event, unsigned flags))            \
	X(event_destroy, cuEventDestroy, 4000, 1, (kvg_cu_event event))                            \
	X(event_record, cuEventRecord, 2000, 1, (kvg_cu_event event, kvg_cu_stream stream))        \
	X(event_query, cuEventQuery, 2000, 1, (kvg_cu_event event))                                \
	X(pointer_attribute, cuPointerGetAttribute, 4000, 0,                                       \
		(void *value, unsigned attribute, kvg_cu_ptr address))                             \
	X(module_load, cuModuleLoadData, 2000, 0, (kvg_cu_module * module, const void *image))     \
	X(module_unload, cuModuleUnload, 2000, 0, (kvg_cu_module module))                          \
	X(module_function, cuModuleGetFunction, 2000, 0,                                           \
		(kvg_cu_function * function, kvg_cu_module module, const char *name))              \
	X(launch, cuLaunchKernel, 4000, 0,                                                         \
		(kvg_cu_function function, unsigned blocks_x, unsigned blocks_y,                   \
			unsigned blocks_z, unsigned threads_x, unsigned threads_y,                 \
			unsigned threads_z, unsigned shared_bytes, kvg_cu_stream stream,           \
			void **params, void **extra))

/* cuGetProcAddress of CUDA 12.0 (the symbol cuGetProcAddress_v2), by which all others are found. */
#define KVG_CUDA_GET_PROC_ADDRESS "cuGetProcAddress_v2"
typedef kvg_cu_result (*kvg_cu_get_proc_address)(
	const char *symbol, void **address, int version, uint64_t flags, unsigned *status);

struct kvg_cuda_driver {
	int version;   /* of CUDA, that the driver supports: 1000 * major + 10 * minor */
	bool modelled; /* a stand-in for a driver, as in tests */
#define KVG_CUDA_FIELD(field, symbol, version_, required, parameters)                              \
	kvg_cu_result(*field) parameters;
	KVG_CUDA_SYMBOLS(KVG_CUDA_FIELD)
#undef KVG_CUDA_FIELD
};

/*
 * Finds the driver (that which is loaded already, else libcuda.so.1) and initialises it. On failure
 * one line in ret_reason, and: -ENODEV, no driver or no device; -EOPNOTSUPP, too old; -EIO, it does
 * not start. A failure is not remembered: the next call tries again. Valid for ever.
 */
int kvg_cuda_load(const struct kvg_cuda_driver **ret_driver, char *ret_reason, size_t reason_size);

/* The errno that RESULT stands for, negative; 0 for success. */
int kvg_cuda_errno(kvg_cu_result result);
/* True for errors after which the process cannot use the device any more. */
bool kvg_cuda_is_fatal(kvg_cu_result result);
/* Writes "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)". */
void kvg_cuda_describe(const struct kvg_cuda_driver *driver, const char *call, kvg_cu_result result,
	char *text, size_t text_size);

#endif
