/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the backends cuda and cufile share: the second is the first, and reads from drives. The
 * functions are those of struct kvg_backend_ops; see backend.h.
 */
#ifndef KVFS_GPU_BACKEND_CUDA_INTERNAL_H
#define KVFS_GPU_BACKEND_CUDA_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "gpu/backend.h"
#include "gpu/cuda_driver.h"

enum kvg_kernels_state {
	KVG_KERNELS_UNTRIED,
	KVG_KERNELS_ON,
	KVG_KERNELS_OFF,
};

/* cuda_kernels.c's; but for the lock and what is below it nothing changes once they are on. */
struct kvg_cuda_kernels {
	pthread_mutex_t lock;
	pthread_cond_t freed;         /* of a place for results */
	enum kvg_kernels_state state; /* lock */
	char reason[80];              /* lock; why they are off */
	uint64_t taken;               /* lock; a bit a place for results */
	kvg_cu_module module;
	kvg_cu_function copy;
	kvg_cu_function checksum;
	struct kvg_segment *segment;
	struct kvg_mapping *mapping; /* places for results, then what they are tried on */
};

struct kvg_cuda {
	struct kvg_backend base;
	const struct kvg_cuda_driver *driver;
	kvg_cu_device device;
	kvg_cu_context context;
	bool retained;              /* context is the primary one, and this holds a reference */
	bool rdma;                  /* segments are made fit for reads by other devices */
	_Atomic kvg_cu_result dead; /* the error that this process cannot get over; 0 */
	struct kvg_device_info info;
	struct kvg_cuda_kernels kernels;
};

static inline struct kvg_cuda *kvg_cuda_of(struct kvg_backend *backend)
{
	return (struct kvg_cuda *)backend;
}

/* Opens the device into CUDA; on failure one line in ret_error and nothing is left. */
int kvg_cuda_open(struct kvg_cuda *cuda, const struct kvg_backend_open *open, char *ret_error,
	size_t error_size);
void kvg_cuda_close(struct kvg_cuda *cuda);

/*
 * Makes the context current on this thread, to be undone by kvg_cuda_leave. -EIO when the backend
 * is dead.
 */
int kvg_cuda_enter(struct kvg_cuda *cuda);
void kvg_cuda_leave(struct kvg_cuda *cuda);
static inline void kvg_cuda_leave_if(struct kvg_cuda **cuda)
{
	if (*cuda)
		kvg_cuda_leave(*cuda);
}

/* Makes the context current until the end of the scope; ret_r as kvg_cuda_enter. */
#define KVG_CUDA_ENTER(cuda, ret_r)                                                                \
	__attribute__((cleanup(kvg_cuda_leave_if))) struct kvg_cuda *entered_ = (cuda);            \
	(ret_r) = kvg_cuda_enter(entered_);                                                        \
	if ((ret_r) < 0)                                                                           \
	entered_ = NULL

/* The errno of RESULT; remembers it, and whether the backend is dead now. */
int kvg_cuda_check(struct kvg_cuda *cuda, kvg_cu_result result);

void kvg_cuda_info(struct kvg_backend *backend, struct kvg_device_info *ret_info);
int kvg_cuda_free_bytes(struct kvg_backend *backend, uint64_t *ret_bytes);
bool kvg_cuda_is_dead(struct kvg_backend *backend);
int kvg_cuda_last_code(struct kvg_backend *backend);
int kvg_cuda_segment_new(
	struct kvg_backend *backend, uint64_t size, struct kvg_segment **ret_segment);
void kvg_cuda_segment_free(struct kvg_backend *backend, struct kvg_segment *segment);
int kvg_cuda_segment_export(struct kvg_backend *backend, struct kvg_segment *segment, int *ret_fd);
int kvg_cuda_segment_import(
	struct kvg_backend *backend, int fd, uint64_t size, struct kvg_segment **ret_segment);
int kvg_cuda_map(struct kvg_backend *backend, struct kvg_segment *const *segments, size_t count,
	bool writable, struct kvg_mapping **ret_mapping);
void kvg_cuda_unmap(struct kvg_backend *backend, struct kvg_mapping *mapping);
kvg_devptr kvg_cuda_address(struct kvg_backend *backend, struct kvg_mapping *mapping);
int kvg_cuda_host_register(
	struct kvg_backend *backend, void *memory, uint64_t size, unsigned flags);
void kvg_cuda_host_unregister(struct kvg_backend *backend, void *memory);
int kvg_cuda_stream_new(struct kvg_backend *backend, kvg_stream *ret_stream);
void kvg_cuda_stream_free(struct kvg_backend *backend, kvg_stream stream);
int kvg_cuda_stream_sync(struct kvg_backend *backend, kvg_stream stream);
int kvg_cuda_copy(struct kvg_backend *backend, kvg_stream stream, enum kvg_copy_kind kind,
	const struct kvg_copy *copies, size_t count);
int kvg_cuda_fill(
	struct kvg_backend *backend, kvg_stream stream, kvg_devptr to, uint8_t byte, uint64_t size);
int kvg_cuda_event_new(struct kvg_backend *backend, struct kvg_event **ret_event);
void kvg_cuda_event_free(struct kvg_backend *backend, struct kvg_event *event);
int kvg_cuda_event_record(struct kvg_backend *backend, struct kvg_event *event, kvg_stream stream);
int kvg_cuda_event_query(struct kvg_backend *backend, struct kvg_event *event);
int kvg_cuda_checksum_probe(struct kvg_backend *backend, char *ret_reason, size_t reason_size);
int kvg_cuda_checksum(struct kvg_backend *backend, kvg_stream stream,
	const struct kvg_range *ranges, size_t count, uint64_t *ret_sums);

/* The part of a kvg_backend_ops that both have. */
#define KVG_CUDA_OPS                                                                               \
	.info = kvg_cuda_info, .free_bytes = kvg_cuda_free_bytes, .is_dead = kvg_cuda_is_dead,     \
	.last_code = kvg_cuda_last_code, .segment_new = kvg_cuda_segment_new,                      \
	.segment_free = kvg_cuda_segment_free, .segment_export = kvg_cuda_segment_export,          \
	.segment_import = kvg_cuda_segment_import, .map = kvg_cuda_map, .unmap = kvg_cuda_unmap,   \
	.address = kvg_cuda_address, .host_register = kvg_cuda_host_register,                      \
	.host_unregister = kvg_cuda_host_unregister, .stream_new = kvg_cuda_stream_new,            \
	.stream_free = kvg_cuda_stream_free, .stream_sync = kvg_cuda_stream_sync,                  \
	.copy = kvg_cuda_copy, .fill = kvg_cuda_fill, .event_new = kvg_cuda_event_new,             \
	.event_free = kvg_cuda_event_free, .event_record = kvg_cuda_event_record,                  \
	.event_query = kvg_cuda_event_query, .checksum_probe = kvg_cuda_checksum_probe,            \
	.checksum = kvg_cuda_checksum

#endif
