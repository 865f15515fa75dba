/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend on CUDA devices. Memory is made with the driver's virtual memory calls, whose
 * handles are counted by the driver: memory lives until the last mapping, handle and descriptor of
 * any process is gone, so that nobody can pull it from under a reader.
 *
 * Exported descriptors carry no access rights: who has one can map it for writing.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "fs/base.h"
#include "gpu/backend_cuda_internal.h"
#include "gpu/cuda_kernels.h"

struct kvg_segment {
	kvg_cu_handle handle;
	uint64_t size; /* bytes */
	bool imported;
};

struct kvg_mapping {
	kvg_cu_ptr address;
	uint64_t size;    /* bytes of address space */
	size_t count;     /* of sizes: what is mapped */
	uint64_t sizes[]; /* bytes of each segment, in order */
};

struct kvg_event {
	kvg_cu_event event;
};

static _Thread_local kvg_cu_result last_failed;

/* ---- Context and errors ---- */

int kvg_cuda_check(struct kvg_cuda *cuda, kvg_cu_result result)
{
	if (result == KVG_CU_SUCCESS)
		return 0;
	last_failed = result;
	if (kvg_cuda_is_fatal(result))
		atomic_store_explicit(&cuda->dead, result, memory_order_relaxed);
	return kvg_cuda_errno(result);
}

int kvg_cuda_enter(struct kvg_cuda *cuda)
{
	if (atomic_load_explicit(&cuda->dead, memory_order_relaxed) != KVG_CU_SUCCESS)
		return -EIO;
	return kvg_cuda_check(cuda, cuda->driver->context_push(cuda->context));
}

void kvg_cuda_leave(struct kvg_cuda *cuda)
{
	kvg_cu_context context;

	(void)cuda->driver->context_pop(&context);
}

/* ---- The device ---- */

static int cuda_probe(char *ret_reason, size_t reason_size)
{
	const struct kvg_cuda_driver *driver;

	return kvg_cuda_load(&driver, ret_reason, reason_size);
}

static int cuda_open(const struct kvg_backend_open *open, struct kvg_backend **ret_backend,
	char *ret_error, size_t error_size)
{
	struct kvg_cuda *cuda = calloc(1, sizeof(*cuda));
	int r;

	if (!cuda) {
		(void)snprintf(ret_error, error_size, "out of memory");
		return -ENOMEM;
	}
	cuda->base.ops = &kvg_backend_cuda;
	r = kvg_cuda_open(cuda, open, ret_error, error_size);
	if (r < 0) {
		free(cuda);
		return r;
	}
	*ret_backend = &cuda->base;
	return 0;
}

static void cuda_close(struct kvg_backend *backend)
{
	if (!backend)
		return;
	kvg_cuda_close(kvg_cuda_of(backend));
	free(backend);
}

void kvg_cuda_info(struct kvg_backend *backend, struct kvg_device_info *ret_info)
{
	*ret_info = kvg_cuda_of(backend)->info;
	kvg_cuda_kernels_describe(
		kvg_cuda_of(backend), ret_info->kernels, sizeof(ret_info->kernels));
}

int kvg_cuda_free_bytes(struct kvg_backend *backend, uint64_t *ret_bytes)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	size_t available = 0, total;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r == 0)
		r = kvg_cuda_check(cuda, cuda->driver->memory_info(&available, &total));
	if (r == 0)
		*ret_bytes = available;
	return r;
}

bool kvg_cuda_is_dead(struct kvg_backend *backend)
{
	return atomic_load_explicit(&kvg_cuda_of(backend)->dead, memory_order_relaxed) !=
	       KVG_CU_SUCCESS;
}

int kvg_cuda_last_code(struct kvg_backend *backend)
{
	kvg_cu_result dead =
		atomic_load_explicit(&kvg_cuda_of(backend)->dead, memory_order_relaxed);

	/* From then on the driver is not called: that is every thread's last failure. */
	return (int)(dead != KVG_CU_SUCCESS ? dead : last_failed);
}

/* ---- Segments ---- */

static int new_segment(kvg_cu_handle handle, uint64_t size, bool imported, struct kvg_cuda *cuda,
	struct kvg_segment **ret_segment)
{
	struct kvg_segment *segment = calloc(1, sizeof(*segment));

	if (!segment) {
		(void)cuda->driver->release(handle);
		return -ENOMEM;
	}
	segment->handle = handle;
	segment->size = size;
	segment->imported = imported;
	*ret_segment = segment;
	return 0;
}

int kvg_cuda_segment_new(
	struct kvg_backend *backend, uint64_t size, struct kvg_segment **ret_segment)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	const struct kvg_cu_allocation allocation = {
		.type = KVG_CU_ALLOCATION_PINNED,
		.handle_types = KVG_CU_HANDLE_POSIX_FD,
		.location = {.type = KVG_CU_LOCATION_DEVICE, .id = cuda->device},
		.flags.rdma = cuda->rdma,
	};
	kvg_cu_handle handle;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	if (size == 0 || size % cuda->info.granularity != 0)
		return -EINVAL;
	r = kvg_cuda_check(cuda, cuda->driver->create(&handle, size, &allocation, 0));
	return r < 0 ? r : new_segment(handle, size, false, cuda, ret_segment);
}

void kvg_cuda_segment_free(struct kvg_backend *backend, struct kvg_segment *segment)
{
	if (!segment)
		return;
	(void)kvg_cuda_check(
		kvg_cuda_of(backend), kvg_cuda_of(backend)->driver->release(segment->handle));
	free(segment);
}

int kvg_cuda_segment_export(struct kvg_backend *backend, struct kvg_segment *segment, int *ret_fd)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r, fd = -1;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	if (segment->imported)
		return -EINVAL;
	r = kvg_cuda_check(
		cuda, cuda->driver->export_handle(&fd, segment->handle, KVG_CU_HANDLE_POSIX_FD, 0));
	if (r < 0)
		return r;
	/* The driver does not promise it. */
	if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
		r = -errno;
		(void)close(fd);
		return r;
	}
	*ret_fd = fd;
	return 0;
}

/* Whether the memory behind an imported HANDLE is that of this device. */
static int check_device(struct kvg_cuda *cuda, kvg_cu_handle handle)
{
	struct kvg_cu_allocation allocation;
	int r = kvg_cuda_check(cuda, cuda->driver->handle_allocation(&allocation, handle));

	if (r < 0)
		return r;
	return allocation.location.type == KVG_CU_LOCATION_DEVICE &&
			       allocation.location.id == cuda->device
		       ? 0
		       : -EXDEV;
}

int kvg_cuda_segment_import(
	struct kvg_backend *backend, int fd, uint64_t size, struct kvg_segment **ret_segment)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	kvg_cu_handle handle;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	if (fd < 0 || size == 0 || size % cuda->info.granularity != 0)
		return -EINVAL;
	r = kvg_cuda_check(cuda,
		cuda->driver->import_handle(&handle, (void *)(intptr_t)fd, KVG_CU_HANDLE_POSIX_FD));
	if (r == -ENODEV)
		return -EXDEV;
	if (r < 0)
		return r;
	r = check_device(cuda, handle);
	if (r < 0) {
		(void)cuda->driver->release(handle);
		return r;
	}
	return new_segment(handle, size, true, cuda, ret_segment);
}

/* ---- Mappings ---- */

static void unmap_all(struct kvg_cuda *cuda, struct kvg_mapping *mapping)
{
	kvg_cu_ptr at = mapping->address;

	/* One by one: a call must cover exactly what one cuMemMap has mapped. */
	for (size_t i = 0; i < mapping->count; i++) {
		(void)kvg_cuda_check(cuda, cuda->driver->unmap(at, mapping->sizes[i]));
		at += mapping->sizes[i];
	}
	mapping->count = 0;
	(void)kvg_cuda_check(cuda, cuda->driver->unreserve(mapping->address, mapping->size));
}

static int map_all(struct kvg_cuda *cuda, struct kvg_segment *const *segments, size_t count,
	bool writable, struct kvg_mapping *mapping)
{
	const struct kvg_cu_access access = {
		.location = {.type = KVG_CU_LOCATION_DEVICE, .id = cuda->device},
		.flags = writable ? KVG_CU_ACCESS_READ_WRITE : KVG_CU_ACCESS_READ,
	};
	kvg_cu_ptr at = mapping->address;

	for (size_t i = 0; i < count; i++) {
		int r = kvg_cuda_check(
			cuda, cuda->driver->map(at, segments[i]->size, 0, segments[i]->handle, 0));

		if (r < 0)
			return r;
		mapping->sizes[mapping->count++] = segments[i]->size;
		at += segments[i]->size;
	}
	return kvg_cuda_check(
		cuda, cuda->driver->set_access(mapping->address, mapping->size, &access, 1));
}

int kvg_cuda_map(struct kvg_backend *backend, struct kvg_segment *const *segments, size_t count,
	bool writable, struct kvg_mapping **ret_mapping)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	struct kvg_mapping *mapping;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	if (count == 0)
		return -EINVAL;
	mapping = calloc(1, sizeof(*mapping) + count * sizeof(mapping->sizes[0]));
	if (!mapping)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++)
		mapping->size += segments[i]->size;
	r = kvg_cuda_check(cuda, cuda->driver->reserve(&mapping->address, mapping->size, 0, 0, 0));
	if (r < 0) {
		free(mapping);
		return r;
	}
	r = map_all(cuda, segments, count, writable, mapping);
	if (r < 0) {
		unmap_all(cuda, mapping);
		free(mapping);
		return r;
	}
	*ret_mapping = mapping;
	return 0;
}

void kvg_cuda_unmap(struct kvg_backend *backend, struct kvg_mapping *mapping)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;

	if (!mapping)
		return;
	{
		/* Also when it is dead: the addresses are this process's. */
		KVG_CUDA_ENTER(cuda, r);

		unmap_all(cuda, mapping);
	}
	free(mapping);
}

kvg_devptr kvg_cuda_address(struct kvg_backend *backend, struct kvg_mapping *mapping)
{
	return mapping->address;
}

/* ---- Host memory ---- */

int kvg_cuda_host_register(struct kvg_backend *backend, void *memory, uint64_t size, unsigned flags)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	unsigned cu_flags = KVG_CU_REGISTER_PORTABLE;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	if (size == 0 || size > KVG_REGISTER_MAX || (flags & ~KVG_REGISTER_READ_ONLY) != 0)
		return -EINVAL;
	if ((flags & KVG_REGISTER_READ_ONLY) != 0) {
		if (!cuda->info.register_read_only)
			return -EOPNOTSUPP;
		cu_flags |= KVG_CU_REGISTER_READ_ONLY;
	}
	return kvg_cuda_check(cuda, cuda->driver->host_register(memory, size, cu_flags));
}

void kvg_cuda_host_unregister(struct kvg_backend *backend, void *memory)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r == 0)
		(void)kvg_cuda_check(cuda, cuda->driver->host_unregister(memory));
}

/* ---- Streams ---- */

int kvg_cuda_stream_new(struct kvg_backend *backend, kvg_stream *ret_stream)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	kvg_cu_stream stream = NULL;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	/* Not blocking: it takes no notice of what an engine does on the default stream. */
	if (r == 0)
		r = kvg_cuda_check(
			cuda, cuda->driver->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING));
	if (r == 0)
		*ret_stream = stream;
	return r;
}

void kvg_cuda_stream_free(struct kvg_backend *backend, kvg_stream stream)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;

	if (!stream)
		return;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return;
	(void)kvg_cuda_check(cuda, cuda->driver->stream_sync(stream));
	(void)kvg_cuda_check(cuda, cuda->driver->stream_destroy(stream));
}

int kvg_cuda_stream_sync(struct kvg_backend *backend, kvg_stream stream)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;
	KVG_CUDA_ENTER(cuda, r);

	return r < 0 ? r : kvg_cuda_check(cuda, cuda->driver->stream_sync(stream));
}

/* ---- Events ---- */

int kvg_cuda_event_new(struct kvg_backend *backend, struct kvg_event **ret_event)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	struct kvg_event *event;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	event = calloc(1, sizeof(*event));
	if (!event)
		return -ENOMEM;
	r = kvg_cuda_check(
		cuda, cuda->driver->event_create(&event->event, KVG_CU_EVENT_DISABLE_TIMING));
	if (r < 0) {
		free(event);
		return r;
	}
	*ret_event = event;
	return 0;
}

void kvg_cuda_event_free(struct kvg_backend *backend, struct kvg_event *event)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;

	if (!event)
		return;
	KVG_CUDA_ENTER(cuda, r);

	if (r == 0)
		(void)kvg_cuda_check(cuda, cuda->driver->event_destroy(event->event));
	free(event);
}

int kvg_cuda_event_record(struct kvg_backend *backend, struct kvg_event *event, kvg_stream stream)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	int r;
	KVG_CUDA_ENTER(cuda, r);

	return r < 0 ? r : kvg_cuda_check(cuda, cuda->driver->event_record(event->event, stream));
}

int kvg_cuda_event_query(struct kvg_backend *backend, struct kvg_event *event)
{
	struct kvg_cuda *cuda = kvg_cuda_of(backend);
	kvg_cu_result result;
	int r;
	KVG_CUDA_ENTER(cuda, r);

	if (r < 0)
		return r;
	result = cuda->driver->event_query(event->event);
	/* No failure: nothing to remember. */
	return result == KVG_CU_NOT_READY ? -EAGAIN : kvg_cuda_check(cuda, result);
}

const struct kvg_backend_ops kvg_backend_cuda = {
	.name = "cuda",
	.probe = cuda_probe,
	.open = cuda_open,
	.close = cuda_close,
	KVG_CUDA_OPS,
};
