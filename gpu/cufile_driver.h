/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVIDIA's cuFile library (GPUDirect Storage), opened by name: reads from drives into device memory
 * past the CPU. As with the driver nothing of NVIDIA's is needed to build, and
 * tests/gpu/abi_cufile.c holds what is declared here against the real header where there is one.
 *
 * Only synchronous reads are used: batches have hung (nixl#2070) and reported failures as successes
 * (nixl#2146), and the stream calls fail without a configuration file.
 */
#ifndef KVFS_GPU_CUFILE_DRIVER_H
#define KVFS_GPU_CUFILE_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "gpu/cuda_driver.h"

enum {
	KVG_CUFILE_SUCCESS = 0,
	KVG_CUFILE_BASE = 5000,
	KVG_CUFILE_NOT_INITIALIZED = 5001,
	KVG_CUFILE_PLATFORM_NOT_SUPPORTED = 5007,
	KVG_CUFILE_IO_NOT_SUPPORTED = 5008,
	KVG_CUFILE_DEVICE_NOT_SUPPORTED = 5009,
	KVG_CUFILE_CUDA_ERROR = 5011,
	KVG_CUFILE_POINTER_INVALID = 5012,
	KVG_CUFILE_CONTEXT_MISMATCH = 5015,
	KVG_CUFILE_MAPPING_SIZE = 5016,
	KVG_CUFILE_MAPPING_RANGE = 5017,
	KVG_CUFILE_FILE_TYPE = 5018,
	KVG_CUFILE_FILE_FLAGS = 5019,
	KVG_CUFILE_NOT_DIRECT = 5020,
	KVG_CUFILE_INVALID_VALUE = 5022,
	KVG_CUFILE_ALREADY_REGISTERED = 5023,
	KVG_CUFILE_NOT_REGISTERED = 5024,
	KVG_CUFILE_ALREADY_OPEN = 5026,
	KVG_CUFILE_HANDLE_NOT_REGISTERED = 5027,
	KVG_CUFILE_HANDLE_REGISTERED = 5028,
	KVG_CUFILE_INTERNAL = 5030,
	KVG_CUFILE_DISABLED = 5034,
	KVG_CUFILE_PINNING_FAILED = 5036,

	KVG_CUFILE_HANDLE_FD = 1,
	/* Parameters that are true or false. */
	KVG_CUFILE_ALLOW_COMPAT = 1,
	KVG_CUFILE_FORCE_COMPAT = 2,
	/* The bit of dcontrolflags that says that compatibility mode is allowed. */
	KVG_CUFILE_CONTROL_COMPAT = 1,
};

/* By value, as their functions return it. */
struct kvg_cufile_error {
	unsigned code;      /* KVG_CUFILE_* */
	kvg_cu_result cuda; /* where code is KVG_CUFILE_CUDA_ERROR */
};

struct kvg_cufile_file {
	unsigned type; /* KVG_CUFILE_HANDLE_FD */
	union {
		int fd;
		void *other;
	} handle;
	const void *operations;
};

struct kvg_cufile_properties {
	struct {
		unsigned major, minor; /* of the kernel module nvidia-fs; 0: it is not there */
		size_t poll_threshold;
		size_t direct_io_max;
		unsigned status;
		unsigned control; /* bits KVG_CUFILE_CONTROL_* */
	} nvfs;
	unsigned features;
	unsigned device_cache_max;
	unsigned buffer_cache;
	unsigned device_pinned_max;
	unsigned batch_max;
	unsigned batch_timeout_ms;
};

typedef void *kvg_cufile_handle;

/* X(field, symbol, required, returns, parameters) */
#define KVG_CUFILE_SYMBOLS(X)                                                                      \
	X(driver_open, cuFileDriverOpen, 1, struct kvg_cufile_error, (void))                       \
	X(driver_close, cuFileDriverClose_v2, 1, struct kvg_cufile_error, (void))                  \
	X(get_properties, cuFileDriverGetProperties, 1, struct kvg_cufile_error,                   \
		(struct kvg_cufile_properties * properties))                                       \
	X(get_version, cuFileGetVersion, 1, struct kvg_cufile_error, (int *version))               \
	X(set_bool, cuFileSetParameterBool, 0, struct kvg_cufile_error,                            \
		(unsigned parameter, bool value))                                                  \
	X(get_bool, cuFileGetParameterBool, 0, struct kvg_cufile_error,                            \
		(unsigned parameter, bool *value))                                                 \
	X(handle_register, cuFileHandleRegister, 1, struct kvg_cufile_error,                       \
		(kvg_cufile_handle * handle, struct kvg_cufile_file * file))                       \
	X(handle_deregister, cuFileHandleDeregister, 1, void, (kvg_cufile_handle handle))          \
	X(buffer_register, cuFileBufRegister, 1, struct kvg_cufile_error,                          \
		(const void *base, size_t size, int flags))                                        \
	X(buffer_deregister, cuFileBufDeregister, 1, struct kvg_cufile_error, (const void *base))  \
	X(read, cuFileRead, 1, ssize_t,                                                            \
		(kvg_cufile_handle handle, void *base, size_t size, off_t file_offset,             \
			off_t base_offset))

struct kvg_cufile_driver {
	int version; /* 1000 * major + 10 * minor */
#define KVG_CUFILE_FIELD(field, symbol, required, returns, parameters) returns(*field) parameters;
	KVG_CUFILE_SYMBOLS(KVG_CUFILE_FIELD)
#undef KVG_CUFILE_FIELD
};

/*
 * Opens libcufile.so.0 and starts it with compatibility mode off, so that what cannot go past the
 * CPU fails instead of going a slow way unseen. Needs a current context. On failure one line in
 * ret_reason and -ENODEV, not installed; -EOPNOTSUPP, it cannot be used. Valid until as many
 * kvg_cufile_unload as loads; any thread.
 */
int kvg_cufile_load(
	const struct kvg_cufile_driver **ret_driver, char *ret_reason, size_t reason_size);
void kvg_cufile_unload(void);

/* A name for a code above 5000 ("this file or its filesystem is not supported"). */
const char *kvg_cufile_text(unsigned code);

#endif
