/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend cufile: cuda, and reads from drives into device memory past the CPU. For the helper
 * only, for it alone has descriptors of the drives; a file of the mount is never given to cuFile
 * (it looks for a block device behind the file's st_dev, and FUSE has none).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fs/base.h"
#include "gpu/backend_cuda_internal.h"
#include "gpu/cufile_driver.h"

#define PROBE_SIZE 4096u

struct kvg_direct {
	kvg_cufile_handle handle;
};

struct cufile {
	struct kvg_cuda cuda;
	const struct kvg_cufile_driver *driver;
};

static struct cufile *of(struct kvg_backend *backend)
{
	return (struct cufile *)backend;
}

/* cuFile's own code of this thread's last failed call. */
static _Thread_local unsigned last_failed;
static _Thread_local int last_errno; /* where that is none */

static int check(struct cufile *cufile, struct kvg_cufile_error error)
{
	last_failed = error.code;
	last_errno = EIO;
	switch (error.code) {
	case KVG_CUFILE_SUCCESS:
		return 0;
	case KVG_CUFILE_CUDA_ERROR: {
		int r = kvg_cuda_check(&cufile->cuda, error.cuda);

		return r < 0 ? r : -EIO;
	}
	case KVG_CUFILE_NOT_INITIALIZED:
	case KVG_CUFILE_PLATFORM_NOT_SUPPORTED:
	case KVG_CUFILE_IO_NOT_SUPPORTED:
	case KVG_CUFILE_DEVICE_NOT_SUPPORTED:
	case KVG_CUFILE_FILE_TYPE:
	case KVG_CUFILE_FILE_FLAGS:
	case KVG_CUFILE_NOT_DIRECT:
	case KVG_CUFILE_INTERNAL:
	case KVG_CUFILE_DISABLED:
		return -EOPNOTSUPP;
	case KVG_CUFILE_MAPPING_SIZE:
	case KVG_CUFILE_PINNING_FAILED:
		return -ENOSPC;
	case KVG_CUFILE_POINTER_INVALID:
	case KVG_CUFILE_MAPPING_RANGE:
	case KVG_CUFILE_INVALID_VALUE:
	case KVG_CUFILE_ALREADY_REGISTERED:
	case KVG_CUFILE_NOT_REGISTERED:
	case KVG_CUFILE_HANDLE_NOT_REGISTERED:
	case KVG_CUFILE_HANDLE_REGISTERED:
		return -EINVAL;
	default:
		return -EIO;
	}
}

/* ---- Open ---- */

static int cufile_probe(char *ret_reason, size_t reason_size)
{
	return kvg_backend_cuda.probe(ret_reason, reason_size);
}

static int start(struct cufile *cufile, char *ret_error, size_t error_size)
{
	struct kvg_device_info *info = &cufile->cuda.info;
	size_t length = strlen(info->mode);
	int r = kvg_cuda_enter(&cufile->cuda);

	if (r < 0) {
		(void)snprintf(ret_error, error_size, "the device's context cannot be used");
		return r;
	}
	r = kvg_cufile_load(&cufile->driver, ret_error, error_size);
	kvg_cuda_leave(&cufile->cuda);
	if (r < 0)
		return r;
	info->direct = true;
	(void)snprintf(info->mode + length, sizeof(info->mode) - length, ", cuFile %d.%d",
		cufile->driver->version / 1000, cufile->driver->version % 1000 / 10);
	return 0;
}

static int cufile_open(const struct kvg_backend_open *open_options,
	struct kvg_backend **ret_backend, char *ret_error, size_t error_size)
{
	struct cufile *cufile;
	int value = 0, r;

	if (open_options->client) {
		(void)snprintf(ret_error, error_size, "only the helper reads from drives");
		return -EOPNOTSUPP;
	}
	cufile = calloc(1, sizeof(*cufile));
	if (!cufile) {
		(void)snprintf(ret_error, error_size, "out of memory");
		return -ENOMEM;
	}
	cufile->cuda.base.ops = &kvg_backend_cufile;
	cufile->cuda.rdma = true;
	r = kvg_cuda_open(&cufile->cuda, open_options, ret_error, error_size);
	if (r < 0) {
		free(cufile);
		return r;
	}
	if (cufile->cuda.driver->device_attribute(
		    &value, KVG_CU_ATTRIBUTE_RDMA_VMM, cufile->cuda.device) != KVG_CU_SUCCESS ||
		value == 0) {
		(void)snprintf(ret_error, error_size,
			"%s does not let drives write into memory that is shared",
			cufile->cuda.info.name);
		r = -EOPNOTSUPP;
	}
	if (r == 0)
		r = start(cufile, ret_error, error_size);
	if (r < 0) {
		kvg_cuda_close(&cufile->cuda);
		free(cufile);
		return r;
	}
	*ret_backend = &cufile->cuda.base;
	return 0;
}

static void cufile_close(struct kvg_backend *backend)
{
	if (!backend)
		return;
	if (kvg_cuda_enter(&of(backend)->cuda) == 0) {
		kvg_cufile_unload();
		kvg_cuda_leave(&of(backend)->cuda);
	} else {
		kvg_cufile_unload();
	}
	kvg_cuda_close(&of(backend)->cuda);
	free(backend);
}

/* ---- Reads ---- */

static int cufile_direct_open(struct kvg_backend *backend, int fd, struct kvg_direct **ret_direct)
{
	struct cufile *cufile = of(backend);
	struct kvg_cufile_file file = {.type = KVG_CUFILE_HANDLE_FD, .handle.fd = fd};
	struct kvg_direct *direct = calloc(1, sizeof(*direct));
	int r;

	if (!direct)
		return -ENOMEM;
	r = kvg_cuda_enter(&cufile->cuda);
	if (r == 0) {
		r = check(cufile, cufile->driver->handle_register(&direct->handle, &file));
		kvg_cuda_leave(&cufile->cuda);
	}
	if (r < 0) {
		free(direct);
		return r;
	}
	*ret_direct = direct;
	return 0;
}

static void cufile_direct_close(struct kvg_backend *backend, struct kvg_direct *direct)
{
	if (!direct)
		return;
	of(backend)->driver->handle_deregister(direct->handle);
	free(direct);
}

/* As kvg_cuda_enter, for the calls whose failures can be asked about. */
static int enter(struct cufile *cufile)
{
	int r = kvg_cuda_enter(&cufile->cuda);

	last_failed = KVG_CUFILE_SUCCESS;
	last_errno = -r;
	return r;
}

static int cufile_direct_register(struct kvg_backend *backend, kvg_devptr base, uint64_t size)
{
	struct cufile *cufile = of(backend);
	int r = enter(cufile);

	if (r < 0)
		return r;
	r = check(cufile, cufile->driver->buffer_register((const void *)(uintptr_t)base, size, 0));
	kvg_cuda_leave(&cufile->cuda);
	return r;
}

static void cufile_direct_unregister(struct kvg_backend *backend, kvg_devptr base)
{
	struct cufile *cufile = of(backend);

	/* Also when the backend is dead: memory that stays registered must not be unmapped. */
	bool entered = kvg_cuda_enter(&cufile->cuda) == 0;

	(void)check(cufile, cufile->driver->buffer_deregister((const void *)(uintptr_t)base));
	if (entered)
		kvg_cuda_leave(&cufile->cuda);
}

static void cufile_direct_reason(struct kvg_backend *backend, char *ret_reason, size_t reason_size)
{
	(void)backend;
	if (last_failed > KVG_CUFILE_BASE)
		(void)snprintf(ret_reason, reason_size, "error %u, %s", last_failed,
			kvg_cufile_text(last_failed));
	else
		(void)snprintf(ret_reason, reason_size, "%s", strerror(last_errno));
}

static ssize_t read_result(struct cufile *cufile, ssize_t n, int error, uint64_t size)
{
	last_failed = KVG_CUFILE_SUCCESS;
	last_errno = n == -1 && error > 0 ? error : EIO;
	if (n >= 0)
		return (uint64_t)n <= size ? n : -EIO;
	if (n == -1)
		return -last_errno;
	return check(
		cufile, (struct kvg_cufile_error){
				.code = n < -KVG_CUFILE_BASE ? (unsigned)-n : KVG_CUFILE_BASE});
}

static ssize_t cufile_direct_read(struct kvg_backend *backend, struct kvg_direct *direct,
	kvg_devptr base, uint64_t offset, uint64_t size, uint64_t file_offset)
{
	struct cufile *cufile = of(backend);
	int r = enter(cufile);
	ssize_t n;

	if (r < 0)
		return r;
	errno = 0;
	n = cufile->driver->read(
		direct->handle, (void *)(uintptr_t)base, size, (off_t)file_offset, (off_t)offset);
	n = read_result(cufile, n, errno, size);
	kvg_cuda_leave(&cufile->cuda);
	return n;
}

/* ---- The probe ---- */

/* What a probe holds, so that it can be given back in one place. */
struct probe {
	struct kvg_backend *backend;
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	struct kvg_direct *direct;
	kvg_devptr address;
	bool registered;
	uint8_t *expected; /* PROBE_SIZE, by the CPU */
	uint8_t *found;    /* PROBE_SIZE, by the device */
};

static void probe_done(struct probe *probe)
{
	if (probe->registered)
		cufile_direct_unregister(probe->backend, probe->address);
	cufile_direct_close(probe->backend, probe->direct);
	kvg_cuda_unmap(probe->backend, probe->mapping);
	kvg_cuda_segment_free(probe->backend, probe->segment);
	free(probe->expected);
	free(probe->found);
}

/* All that a read needs; ret_step: what failed. */
static int probe_prepare(struct probe *probe, int fd, const char **ret_step)
{
	struct kvg_backend *backend = probe->backend;
	uint64_t size = of(backend)->cuda.info.granularity;
	int r;

	*ret_step = "device memory";
	probe->expected = aligned_alloc(PROBE_SIZE, PROBE_SIZE);
	probe->found = aligned_alloc(PROBE_SIZE, PROBE_SIZE);
	if (!probe->expected || !probe->found)
		return -ENOMEM;
	r = kvg_cuda_segment_new(backend, size, &probe->segment);
	if (r == 0)
		r = kvg_cuda_map(backend, &probe->segment, 1, true, &probe->mapping);
	if (r < 0)
		return r;
	probe->address = kvg_cuda_address(backend, probe->mapping);
	*ret_step = "cuFileBufRegister";
	r = cufile_direct_register(backend, probe->address, size);
	if (r < 0)
		return r;
	probe->registered = true;
	*ret_step = "cuFileHandleRegister";
	return cufile_direct_open(backend, fd, &probe->direct);
}

/* Reads the block both ways. The device's memory holds other bytes before. */
static int probe_read(struct probe *probe, int fd, uint64_t offset, const char **ret_step)
{
	struct kvg_backend *backend = probe->backend;
	const struct kvg_copy back = {.to = (uint64_t)(uintptr_t)probe->found,
		.from = probe->address,
		.size = PROBE_SIZE};
	ssize_t n;
	int r;

	*ret_step = "a read by the CPU";
	n = pread(fd, probe->expected, PROBE_SIZE, (off_t)offset);
	if (n != PROBE_SIZE)
		return n < 0 ? -errno : -EIO;
	*ret_step = "filling device memory";
	r = kvg_cuda_fill(backend, NULL, probe->address, (uint8_t)~probe->expected[0], PROBE_SIZE);
	if (r == 0)
		r = kvg_cuda_stream_sync(backend, NULL);
	if (r < 0)
		return r;
	*ret_step = "cuFileRead";
	n = cufile_direct_read(backend, probe->direct, probe->address, 0, PROBE_SIZE, offset);
	if (n != PROBE_SIZE)
		return n < 0 ? (int)n : -EIO;
	*ret_step = "reading device memory";
	r = kvg_cuda_copy(backend, NULL, KVG_COPY_TO_HOST, &back, 1);
	if (r == 0)
		r = kvg_cuda_stream_sync(backend, NULL);
	if (r < 0)
		return r;
	*ret_step = "cuFileRead gives other bytes than the CPU, it cannot be used here";
	return memcmp(probe->expected, probe->found, PROBE_SIZE) == 0 ? 0 : -EBADMSG;
}

static int cufile_direct_probe(
	struct kvg_backend *backend, int fd, uint64_t offset, char *ret_reason, size_t reason_size)
{
	struct probe probe = {.backend = backend};
	const char *step;
	unsigned code;
	int r;

	last_failed = KVG_CUFILE_SUCCESS;
	r = probe_prepare(&probe, fd, &step);
	if (r == 0)
		r = probe_read(&probe, fd, offset, &step);
	code = last_failed;
	probe_done(&probe);
	if (r == 0)
		return 0;
	if (code > KVG_CUFILE_BASE)
		(void)snprintf(ret_reason, reason_size, "%s: error %u, %s", step, code,
			kvg_cufile_text(code));
	else
		(void)snprintf(ret_reason, reason_size, "%s: %s", step, strerror(-r));
	return kvg_cuda_is_dead(backend) ? -EIO : -EOPNOTSUPP;
}

const struct kvg_backend_ops kvg_backend_cufile = {
	.name = "cufile",
	.probe = cufile_probe,
	.open = cufile_open,
	.close = cufile_close,
	KVG_CUDA_OPS,
	.direct_probe = cufile_direct_probe,
	.direct_reason = cufile_direct_reason,
	.direct_open = cufile_direct_open,
	.direct_close = cufile_direct_close,
	.direct_register = cufile_direct_register,
	.direct_unregister = cufile_direct_unregister,
	.direct_read = cufile_direct_read,
};
