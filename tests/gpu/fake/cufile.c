/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for cuFile, over the fake driver: libcufile.so.0. It reads files with O_DIRECT and
 * writes what it has read into the fake's device memory. It refuses what the real one refuses or
 * fails on: FUSE and tmpfs (5030), overlay (5008), descriptors without O_DIRECT (5020), memory that
 * was not made for it (5013), more memory than can be opened to drives (5016).
 *
 * Environment, read by cuFileDriverOpen:
 *   FAKECUFILE_GDS=1            0: the kernel has no nvidia-fs: only compatibility mode works
 *   FAKECUFILE_FORCE_COMPAT=0   1: as if cufile.json said force_compat_mode
 *   FAKECUFILE_PINNED_MAX       bytes of memory that can be registered; 32 GiB
 *   FAKECUFILE_OLD=0            1: a library before 1.14, whose parameters cannot be set
 *   FAKECUFILE_OVERLAY=0        1: overlay is taken, for tests in containers
 * Each call can be made to fail by FAKECU_FAIL or fakecu_fail with the code (cuFileRead:1:5008).
 * Of cuFileRead, codes below 5000 stand for: 1 a short read, 2 wrong bytes, 3 it hangs while copies
 * are held (fakecu_hold), 7 it hangs as long as cuFileStuck is to fail, others -1 and that errno.
 * What is left at cuFileDriverClose, and memory that was unmapped before cuFileBufDeregister, is
 * told in the fake driver's report.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <time.h>

#include "gpu/cufile_driver.h"
#include "tests/gpu/fake/internal.h"

#define FILES_MAX 256
#define BUFFERS_MAX 1024
#define PIECE (UINT64_C(1) << 20)
#define FUSE_MAGIC 0x65735546
#define TMPFS_MAGIC 0x01021994
#define OVERLAY_MAGIC 0x794c7630
#define WRONG_MEMORY 5013u

enum {
	READ_SHORT = 1,
	READ_WRONG = 2,
	READ_HANGS = 3,
	READ_STUCK = 7, /* of the driver's codes, one that is not fatal */
};

struct file {
	int fd;
	bool used;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool is_open, allow_compat = true; /* lock */
static struct file files[FILES_MAX];      /* lock */
static struct {
	uint64_t base, size;
} buffers[BUFFERS_MAX];                /* lock */
static unsigned buffer_count, misused; /* lock; so the next */
static uint64_t pinned;

#define FUNCTION(field, symbol, required, returns, parameters) FAKE_API returns symbol parameters;
KVG_CUFILE_SYMBOLS(FUNCTION)
#undef FUNCTION

static uint64_t setting(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static struct kvg_cufile_error error(unsigned code)
{
	/* Codes of the driver's come as those. */
	if (code > 0 && code < KVG_CUFILE_BASE)
		return (struct kvg_cufile_error){KVG_CUFILE_CUDA_ERROR, code};
	return (struct kvg_cufile_error){.code = code};
}

/* One that is too old has no function to set it, which for us is one that changes nothing. */
static bool is_compat_allowed(void)
{
	return allow_compat || setting("FAKECUFILE_OLD", 0) != 0;
}

/* What a call is to fail with before it does anything. */
static unsigned enter(const char *symbol)
{
	unsigned code = fakecu_fault(symbol);

	return code ? code : !is_open ? KVG_CUFILE_NOT_INITIALIZED : 0;
}

/* ---- The driver ---- */

/* What was not given back, or too late: in the report of the fake driver. */
static void report(void)
{
	const char *path = getenv("FAKECU_REPORT");
	unsigned left = 0;
	FILE *file;

	for (unsigned i = 0; i < FILES_MAX; i++)
		left += files[i].used;
	if (left == 0 && buffer_count == 0 && misused == 0)
		return;
	file = path ? fopen(path, "ae") : stderr;
	if (!file)
		return;
	(void)fprintf(file, "fakecufile: leaks files=%u buffers=%u unmapped=%u\n", left,
		buffer_count, misused);
	if (path)
		(void)fclose(file);
}

struct kvg_cufile_error cuFileDriverOpen(void)
{
	unsigned code = fakecu_fault("cuFileDriverOpen");
	KV_LOCKED(&lock);

	if (code)
		return error(code);
	if (is_open)
		return error(KVG_CUFILE_ALREADY_OPEN);
	if (setting("FAKECUFILE_GDS", 1) == 0 && !is_compat_allowed())
		return error(KVG_CUFILE_NOT_INITIALIZED);
	is_open = true;
	return error(0);
}

struct kvg_cufile_error cuFileDriverClose_v2(void)
{
	KV_LOCKED(&lock);

	if (!is_open)
		return error(KVG_CUFILE_NOT_INITIALIZED);
	report();
	is_open = false;
	allow_compat = true;
	misused = 0;
	buffer_count = 0;
	pinned = 0;
	memset(files, 0, sizeof(files));
	return error(0);
}

struct kvg_cufile_error cuFileGetVersion(int *version)
{
	*version = setting("FAKECUFILE_OLD", 0) ? 1040 : 1140;
	return error(0);
}

struct kvg_cufile_error cuFileSetParameterBool(unsigned parameter, bool value)
{
	unsigned code = fakecu_fault("cuFileSetParameterBool");
	KV_LOCKED(&lock);

	if (code)
		return error(code);
	if (is_open)
		return error(KVG_CUFILE_ALREADY_OPEN);
	if (parameter == KVG_CUFILE_ALLOW_COMPAT)
		allow_compat = value;
	return error(0);
}

struct kvg_cufile_error cuFileGetParameterBool(unsigned parameter, bool *value)
{
	KV_LOCKED(&lock);

	*value = parameter == KVG_CUFILE_FORCE_COMPAT ? setting("FAKECUFILE_FORCE_COMPAT", 0) != 0
						      : allow_compat;
	return error(0);
}

struct kvg_cufile_error cuFileDriverGetProperties(struct kvg_cufile_properties *properties)
{
	unsigned code = enter("cuFileDriverGetProperties");
	KV_LOCKED(&lock);

	if (code)
		return error(code);
	*properties = (struct kvg_cufile_properties){
		.nvfs = {.major = setting("FAKECUFILE_GDS", 1) != 0 ? 2 : 0,
			.minor = 17,
			.direct_io_max = 16384,
			.control = is_compat_allowed() ? 1u << KVG_CUFILE_CONTROL_COMPAT : 0},
		.device_pinned_max = 33554432,
		.batch_max = 128,
	};
	return error(0);
}

/* ---- Files ---- */

static unsigned refuse_file(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	struct statfs fs;
	struct stat st;

	if (flags < 0 || fstat(fd, &st) < 0 || fstatfs(fd, &fs) < 0)
		return KVG_CUFILE_INVALID_VALUE;
	if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
		return KVG_CUFILE_FILE_TYPE;
	if (fs.f_type == FUSE_MAGIC || fs.f_type == TMPFS_MAGIC)
		return KVG_CUFILE_INTERNAL;
	if (fs.f_type == OVERLAY_MAGIC && !setting("FAKECUFILE_OVERLAY", 0))
		return KVG_CUFILE_IO_NOT_SUPPORTED;
	return (flags & O_DIRECT) == 0 ? KVG_CUFILE_NOT_DIRECT : 0;
}

struct kvg_cufile_error cuFileHandleRegister(
	kvg_cufile_handle *handle, struct kvg_cufile_file *file)
{
	unsigned code = enter("cuFileHandleRegister");
	KV_LOCKED(&lock);

	if (!code && file->type != KVG_CUFILE_HANDLE_FD)
		code = KVG_CUFILE_INVALID_VALUE;
	if (!code)
		code = refuse_file(file->handle.fd);
	for (unsigned i = 0; !code && i < FILES_MAX; i++) {
		if (files[i].used)
			continue;
		files[i].used = true;
		files[i].fd = file->handle.fd;
		*handle = &files[i];
		return error(0);
	}
	return error(code ? code : KVG_CUFILE_INTERNAL);
}

void cuFileHandleDeregister(kvg_cufile_handle handle)
{
	KV_LOCKED(&lock);

	((struct file *)handle)->used = false;
}

/* ---- Memory ---- */

struct kvg_cufile_error cuFileBufRegister(const void *base, size_t size, int flags)
{
	unsigned code = enter("cuFileBufRegister");
	uint64_t address = (uint64_t)(uintptr_t)base;
	bool rdma;
	KV_LOCKED(&lock);

	if (code)
		return error(code);
	if (size == 0 || flags != 0)
		return error(KVG_CUFILE_INVALID_VALUE);
	if (!fakecu_is_mapped(address, size, &rdma))
		return error(KVG_CUFILE_POINTER_INVALID);
	if (!rdma)
		return error(WRONG_MEMORY);
	for (unsigned i = 0; i < buffer_count; i++)
		if (address < buffers[i].base + buffers[i].size && buffers[i].base < address + size)
			return error(KVG_CUFILE_ALREADY_REGISTERED);
	if (pinned + size > setting("FAKECUFILE_PINNED_MAX", UINT64_C(32) << 30) ||
		buffer_count == BUFFERS_MAX)
		return error(KVG_CUFILE_MAPPING_SIZE);
	buffers[buffer_count].base = address;
	buffers[buffer_count++].size = size;
	pinned += size;
	return error(0);
}

struct kvg_cufile_error cuFileBufDeregister(const void *base)
{
	unsigned code = enter("cuFileBufDeregister");
	bool rdma;
	KV_LOCKED(&lock);

	for (unsigned i = 0; !code && i < buffer_count; i++) {
		if (buffers[i].base != (uint64_t)(uintptr_t)base)
			continue;
		/* The real one may hang then. */
		misused += !fakecu_is_mapped(buffers[i].base, buffers[i].size, &rdma);
		pinned -= buffers[i].size;
		buffers[i] = buffers[--buffer_count];
		return error(0);
	}
	return error(code ? code : KVG_CUFILE_NOT_REGISTERED);
}

/* Whether the range from BASE on is a registered one's; an address within one is not known. */
static bool is_registered(uint64_t base, uint64_t end)
{
	KV_LOCKED(&lock);

	for (unsigned i = 0; i < buffer_count; i++)
		if (buffers[i].base == base)
			return end <= buffers[i].size;
	return false;
}

/* ---- Reads ---- */

static void hang(unsigned code)
{
	const struct timespec pause = {.tv_nsec = 1000000};

	while (code == READ_HANGS ? fakecu_is_held() : fakecu_fault("cuFileStuck") != 0)
		(void)nanosleep(&pause, NULL);
}

/* One piece, from the file to TO on the device. Returns bytes or -errno. */
static ssize_t read_piece(const struct file *file, uint64_t to, uint64_t offset, uint64_t size,
	bool wrong, unsigned char *bounce)
{
	uint64_t before = offset % KV_BLOCK_SIZE;
	uint64_t length = kv_round_up(before + size, KV_BLOCK_SIZE);
	const struct kvg_cuda_driver *cu;
	char reason[128];
	ssize_t n = pread(file->fd, bounce, length, (off_t)(offset - before));

	if (n < 0)
		return -errno;
	if ((uint64_t)n <= before)
		return 0;
	n = (ssize_t)kv_min_u64((uint64_t)n - before, size);
	if (wrong)
		bounce[before] ^= 0x40;
	if (kvg_cuda_load(&cu, reason, sizeof(reason)) < 0 ||
		cu->copy_to_device(to, bounce + before, (size_t)n, NULL) != KVG_CU_SUCCESS ||
		cu->stream_sync(NULL) != KVG_CU_SUCCESS)
		return -EIO;
	return n;
}

ssize_t cuFileRead(
	kvg_cufile_handle handle, void *base, size_t size, off_t file_offset, off_t base_offset)
{
	uint64_t to = (uint64_t)(uintptr_t)base + (uint64_t)base_offset, done = 0;
	_cleanup_free_ unsigned char *bounce = NULL;
	const struct file *file = handle;
	unsigned code = enter("cuFileRead");

	if (code >= KVG_CUFILE_BASE)
		return -(ssize_t)code;
	if (code == READ_HANGS || code == READ_STUCK)
		hang(code);
	if (code > READ_HANGS && code != READ_STUCK) {
		errno = (int)code;
		return -1;
	}
	if (!file->used)
		return -KVG_CUFILE_HANDLE_NOT_REGISTERED;
	if (!is_registered((uint64_t)(uintptr_t)base, (uint64_t)base_offset + size))
		return -KVG_CUFILE_NOT_REGISTERED;
	bounce = aligned_alloc(KV_BLOCK_SIZE, PIECE + 2 * KV_BLOCK_SIZE);
	if (code == READ_SHORT)
		size = size > KV_BLOCK_SIZE ? size / 2 / KV_BLOCK_SIZE * KV_BLOCK_SIZE : size / 2;
	while (done < size) {
		ssize_t n = read_piece(file, to + done, (uint64_t)file_offset + done,
			kv_min_u64(size - done, PIECE), code == READ_WRONG, bounce);

		if (n < 0) {
			errno = (int)-n;
			return -1;
		}
		if (n == 0)
			break;
		done += (uint64_t)n;
	}
	return (ssize_t)done;
}
