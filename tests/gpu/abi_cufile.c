/* SPDX-License-Identifier: Apache-2.0 */
/* Holds gpu/cufile_driver.h against cuFile's own header, as abi_cuda.c does for the driver. */
#include <assert.h>
#include <stddef.h>
#include <time.h>

#include <cufile.h>

#include "gpu/cufile_driver.h"

#define SAME_VALUE(ours, theirs) static_assert((long long)(ours) == (long long)(theirs), #theirs)
#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(ours, our_field, theirs, their_field)                                           \
	static_assert(                                                                             \
		offsetof(ours, our_field) == offsetof(theirs, their_field) &&                      \
			sizeof(((ours *)0)->our_field) == sizeof(((theirs *)0)->their_field),      \
		#theirs "." #their_field)

SAME_SIZE(struct kvg_cufile_error, CUfileError_t);
SAME_PLACE(struct kvg_cufile_error, code, CUfileError_t, err);
SAME_PLACE(struct kvg_cufile_error, cuda, CUfileError_t, cu_err);
SAME_SIZE(struct kvg_cufile_file, CUfileDescr_t);
SAME_PLACE(struct kvg_cufile_file, type, CUfileDescr_t, type);
SAME_PLACE(struct kvg_cufile_file, handle, CUfileDescr_t, handle);
SAME_PLACE(struct kvg_cufile_file, handle.fd, CUfileDescr_t, handle.fd);
SAME_PLACE(struct kvg_cufile_file, operations, CUfileDescr_t, fs_ops);
SAME_SIZE(struct kvg_cufile_properties, CUfileDrvProps_t);
SAME_PLACE(struct kvg_cufile_properties, nvfs.major, CUfileDrvProps_t, nvfs.major_version);
SAME_PLACE(struct kvg_cufile_properties, nvfs.status, CUfileDrvProps_t, nvfs.dstatusflags);
SAME_PLACE(struct kvg_cufile_properties, nvfs.control, CUfileDrvProps_t, nvfs.dcontrolflags);
SAME_PLACE(struct kvg_cufile_properties, features, CUfileDrvProps_t, fflags);
SAME_PLACE(struct kvg_cufile_properties, device_pinned_max, CUfileDrvProps_t,
	max_device_pinned_mem_size);
SAME_PLACE(struct kvg_cufile_properties, batch_max, CUfileDrvProps_t, max_batch_io_size);
SAME_SIZE(kvg_cufile_handle, CUfileHandle_t);

SAME_VALUE(KVG_CUFILE_SUCCESS, CU_FILE_SUCCESS);
SAME_VALUE(KVG_CUFILE_BASE, CUFILEOP_BASE_ERR);
SAME_VALUE(KVG_CUFILE_NOT_INITIALIZED, CU_FILE_DRIVER_NOT_INITIALIZED);
SAME_VALUE(KVG_CUFILE_PLATFORM_NOT_SUPPORTED, CU_FILE_PLATFORM_NOT_SUPPORTED);
SAME_VALUE(KVG_CUFILE_IO_NOT_SUPPORTED, CU_FILE_IO_NOT_SUPPORTED);
SAME_VALUE(KVG_CUFILE_DEVICE_NOT_SUPPORTED, CU_FILE_DEVICE_NOT_SUPPORTED);
SAME_VALUE(KVG_CUFILE_CUDA_ERROR, CU_FILE_CUDA_DRIVER_ERROR);
SAME_VALUE(KVG_CUFILE_POINTER_INVALID, CU_FILE_CUDA_POINTER_INVALID);
SAME_VALUE(KVG_CUFILE_CONTEXT_MISMATCH, CU_FILE_CUDA_CONTEXT_MISMATCH);
SAME_VALUE(KVG_CUFILE_MAPPING_SIZE, CU_FILE_INVALID_MAPPING_SIZE);
SAME_VALUE(KVG_CUFILE_MAPPING_RANGE, CU_FILE_INVALID_MAPPING_RANGE);
SAME_VALUE(KVG_CUFILE_FILE_TYPE, CU_FILE_INVALID_FILE_TYPE);
SAME_VALUE(KVG_CUFILE_FILE_FLAGS, CU_FILE_INVALID_FILE_OPEN_FLAG);
SAME_VALUE(KVG_CUFILE_NOT_DIRECT, CU_FILE_DIO_NOT_SET);
SAME_VALUE(KVG_CUFILE_INVALID_VALUE, CU_FILE_INVALID_VALUE);
SAME_VALUE(KVG_CUFILE_ALREADY_REGISTERED, CU_FILE_MEMORY_ALREADY_REGISTERED);
SAME_VALUE(KVG_CUFILE_NOT_REGISTERED, CU_FILE_MEMORY_NOT_REGISTERED);
SAME_VALUE(KVG_CUFILE_ALREADY_OPEN, CU_FILE_DRIVER_ALREADY_OPEN);
SAME_VALUE(KVG_CUFILE_HANDLE_NOT_REGISTERED, CU_FILE_HANDLE_NOT_REGISTERED);
SAME_VALUE(KVG_CUFILE_HANDLE_REGISTERED, CU_FILE_HANDLE_ALREADY_REGISTERED);
SAME_VALUE(KVG_CUFILE_INTERNAL, CU_FILE_INTERNAL_ERROR);
SAME_VALUE(KVG_CUFILE_DISABLED, CU_FILE_IO_DISABLED);
SAME_VALUE(KVG_CUFILE_PINNING_FAILED, CU_FILE_GPU_MEMORY_PINNING_FAILED);
SAME_VALUE(KVG_CUFILE_HANDLE_FD, CU_FILE_HANDLE_TYPE_OPAQUE_FD);
SAME_VALUE(KVG_CUFILE_ALLOW_COMPAT, CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE);
SAME_VALUE(KVG_CUFILE_FORCE_COMPAT, CUFILE_PARAM_FORCE_COMPAT_MODE);
SAME_VALUE(KVG_CUFILE_CONTROL_COMPAT, CU_FILE_ALLOW_COMPAT_MODE);

/* From here on our types are theirs, so that the types of functions can be the same. */
#define kvg_cufile_error CUfileError
#define kvg_cufile_file CUfileDescr_t
#define kvg_cufile_properties CUfileDrvProps
#define SAME_FUNCTION(field, symbol, required, returns, parameters)                                \
	static_assert(__builtin_types_compatible_p(__typeof__(&symbol), returns(*) parameters),    \
		#symbol);
KVG_CUFILE_SYMBOLS(SAME_FUNCTION)

int main(void)
{
	return 0;
}
