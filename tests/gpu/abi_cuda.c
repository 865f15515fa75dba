/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holds gpu/cuda_driver.h against the toolkit's own headers: sizes, offsets, values, and the type
 * of each function at the version it is asked for. All of it while compiling; built where cuda.h
 * and cudaTypedefs.h are, as a test that only has to exist.
 */
#include <assert.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <stddef.h>

#include "gpu/cuda_driver.h"

#define SAME_VALUE(ours, theirs) static_assert((long long)(ours) == (long long)(theirs), #theirs)
#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(ours, our_field, theirs, their_field)                                           \
	static_assert(                                                                             \
		offsetof(ours, our_field) == offsetof(theirs, their_field) &&                      \
			sizeof(((ours *)0)->our_field) == sizeof(((theirs *)0)->their_field),      \
		#theirs "." #their_field)

SAME_SIZE(kvg_cu_result, CUresult);
SAME_SIZE(kvg_cu_device, CUdevice);
SAME_SIZE(kvg_cu_ptr, CUdeviceptr);
SAME_SIZE(kvg_cu_handle, CUmemGenericAllocationHandle);
SAME_SIZE(kvg_cu_context, CUcontext);
SAME_SIZE(kvg_cu_stream, CUstream);
SAME_SIZE(kvg_cu_event, CUevent);
SAME_SIZE(struct kvg_cu_uuid, CUuuid);
SAME_SIZE(struct kvg_cu_location, CUmemLocation);
SAME_PLACE(struct kvg_cu_location, type, CUmemLocation, type);
SAME_PLACE(struct kvg_cu_location, id, CUmemLocation, id);
SAME_SIZE(struct kvg_cu_allocation, CUmemAllocationProp);
SAME_PLACE(struct kvg_cu_allocation, type, CUmemAllocationProp, type);
SAME_PLACE(struct kvg_cu_allocation, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(struct kvg_cu_allocation, location, CUmemAllocationProp, location);
SAME_PLACE(struct kvg_cu_allocation, windows, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(struct kvg_cu_allocation, flags.compression, CUmemAllocationProp,
	allocFlags.compressionType);
SAME_PLACE(
	struct kvg_cu_allocation, flags.rdma, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
SAME_PLACE(struct kvg_cu_allocation, flags.usage, CUmemAllocationProp, allocFlags.usage);
SAME_PLACE(struct kvg_cu_allocation, flags.reserved, CUmemAllocationProp, allocFlags.reserved);
SAME_SIZE(struct kvg_cu_access, CUmemAccessDesc);
SAME_PLACE(struct kvg_cu_access, location, CUmemAccessDesc, location);
SAME_PLACE(struct kvg_cu_access, flags, CUmemAccessDesc, flags);
#if CUDA_VERSION >= 12080
SAME_SIZE(struct kvg_cu_copy_attributes, CUmemcpyAttributes);
SAME_PLACE(struct kvg_cu_copy_attributes, source_order, CUmemcpyAttributes, srcAccessOrder);
SAME_PLACE(struct kvg_cu_copy_attributes, source_hint, CUmemcpyAttributes, srcLocHint);
SAME_PLACE(struct kvg_cu_copy_attributes, target_hint, CUmemcpyAttributes, dstLocHint);
SAME_PLACE(struct kvg_cu_copy_attributes, flags, CUmemcpyAttributes, flags);
SAME_VALUE(KVG_CU_SOURCE_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME_VALUE(KVG_CU_COPY_PREFER_OVERLAP, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
SAME_VALUE(KVG_CU_TENSOR_MEMORY_LEAK, CUDA_ERROR_TENSOR_MEMORY_LEAK);
SAME_VALUE(KVG_CU_CONTAINED, CUDA_ERROR_CONTAINED);
#endif

SAME_VALUE(KVG_CU_SUCCESS, CUDA_SUCCESS);
SAME_VALUE(KVG_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME_VALUE(KVG_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(KVG_CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME_VALUE(KVG_CU_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED);
SAME_VALUE(KVG_CU_STUB_LIBRARY, CUDA_ERROR_STUB_LIBRARY);
SAME_VALUE(KVG_CU_DEVICE_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE);
SAME_VALUE(KVG_CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME_VALUE(KVG_CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME_VALUE(KVG_CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME_VALUE(KVG_CU_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME_VALUE(KVG_CU_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE);
SAME_VALUE(KVG_CU_INVALID_PTX, CUDA_ERROR_INVALID_PTX);
SAME_VALUE(KVG_CU_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM);
SAME_VALUE(KVG_CU_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME_VALUE(KVG_CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME_VALUE(KVG_CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME_VALUE(KVG_CU_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME_VALUE(KVG_CU_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME_VALUE(KVG_CU_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME_VALUE(KVG_CU_ASSERT, CUDA_ERROR_ASSERT);
SAME_VALUE(KVG_CU_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME_VALUE(KVG_CU_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME_VALUE(KVG_CU_HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME_VALUE(KVG_CU_ILLEGAL_INSTRUCTION, CUDA_ERROR_ILLEGAL_INSTRUCTION);
SAME_VALUE(KVG_CU_MISALIGNED_ADDRESS, CUDA_ERROR_MISALIGNED_ADDRESS);
SAME_VALUE(KVG_CU_INVALID_ADDRESS_SPACE, CUDA_ERROR_INVALID_ADDRESS_SPACE);
SAME_VALUE(KVG_CU_INVALID_PC, CUDA_ERROR_INVALID_PC);
SAME_VALUE(KVG_CU_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
SAME_VALUE(KVG_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME_VALUE(KVG_CU_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_CLIENT_TERMINATED);
SAME_VALUE(KVG_CU_UNKNOWN, CUDA_ERROR_UNKNOWN);

SAME_VALUE(KVG_CU_ATTRIBUTE_HOST_REGISTER, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
SAME_VALUE(KVG_CU_ATTRIBUTE_HOST_PAGE_TABLES,
	CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
SAME_VALUE(KVG_CU_ATTRIBUTE_VMM, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME_VALUE(
	KVG_CU_ATTRIBUTE_POSIX_FD, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME_VALUE(KVG_CU_ATTRIBUTE_RDMA_VMM, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME_VALUE(
	KVG_CU_ATTRIBUTE_REGISTER_READ_ONLY, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
SAME_VALUE(KVG_CU_ATTRIBUTE_HOST_NUMA_ID, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);

SAME_VALUE(KVG_CU_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME_VALUE(KVG_CU_POINTER_DEVICE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME_VALUE(KVG_CU_POINTER_LEGACY, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME_VALUE(KVG_CU_POINTER_RANGE_START, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME_VALUE(KVG_CU_POINTER_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME_VALUE(KVG_CU_POINTER_ACCESS, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS);
SAME_VALUE(KVG_CU_POINTER_MAPPING_SIZE, CU_POINTER_ATTRIBUTE_MAPPING_SIZE);
SAME_VALUE(KVG_CU_POINTER_MAPPING_START, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR);
SAME_VALUE(KVG_CU_ACCESS_READ_WRITE, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE);
SAME_VALUE(KVG_CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);

SAME_VALUE(KVG_CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME_VALUE(KVG_CU_HANDLE_NONE, CU_MEM_HANDLE_TYPE_NONE);
SAME_VALUE(KVG_CU_HANDLE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME_VALUE(KVG_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME_VALUE(KVG_CU_ACCESS_NONE, CU_MEM_ACCESS_FLAGS_PROT_NONE);
SAME_VALUE(KVG_CU_ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME_VALUE(KVG_CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME_VALUE(KVG_CU_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME_VALUE(KVG_CU_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME_VALUE(KVG_CU_REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY);
SAME_VALUE(KVG_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME_VALUE(KVG_CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(KVG_CU_QUERY_SUCCESS, CU_GET_PROC_ADDRESS_SUCCESS);
SAME_VALUE(KVG_CU_QUERY_NOT_FOUND, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
SAME_VALUE(KVG_CU_QUERY_TOO_OLD, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);

/* From here on our tags are theirs, so that the types of functions can be the same. */
#define kvg_cu_ctx CUctx_st
#define kvg_cu_str CUstream_st
#define kvg_cu_evt CUevent_st
#define kvg_cu_mod CUmod_st
#define kvg_cu_fun CUfunc_st
#define kvg_cu_context CUcontext
#define kvg_cu_stream CUstream
#define kvg_cu_event CUevent
#define kvg_cu_module CUmodule
#define kvg_cu_function CUfunction
#define kvg_cu_uuid CUuuid_st
#define kvg_cu_allocation CUmemAllocationProp_st
#define kvg_cu_access CUmemAccessDesc_st
#define kvg_cu_copy_attributes CUmemcpyAttributes_st
/* The version in a typedef's name is that of its ABI: a wrong one has no typedef. */
#define SAME_FUNCTION(field, symbol, version, required, parameters)                                \
	SAME_FUNCTION_##required(PFN_##symbol##_v##version, #symbol, parameters)
#define SAME_FUNCTION_1(type, name, parameters)                                                    \
	static_assert(__builtin_types_compatible_p(type, kvg_cu_result(*) parameters), name);
/* What a driver may lack, a toolkit may lack too. */
#if CUDA_VERSION >= 12080
#define SAME_FUNCTION_0 SAME_FUNCTION_1
#else
#define SAME_FUNCTION_0(type, name, parameters)
#endif
KVG_CUDA_SYMBOLS(SAME_FUNCTION)

static_assert(
	__builtin_types_compatible_p(PFN_cuGetProcAddress_v12000, kvg_cu_get_proc_address), "");

int main(void)
{
	return 0;
}
