/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library to preload into the daemon: the Nth call of a kind fails, as a test says through the
 * file that KV_FAULT_FILE names, which both have mapped.
 */
/* Both sets of names are made here, so none may stand for the other. */
#undef _FILE_OFFSET_BITS
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <liburing.h>

#define EXPORT __attribute__((visibility("default")))

/* tests/lib/faults.py has the same numbers. */
enum fault_kind {
	FAULT_NONE,
	FAULT_MALLOC,
	FAULT_OPEN,
	FAULT_MMAP,
	FAULT_THREAD,
	FAULT_SUBMIT,
	FAULT_SYNC, /* of the index's file, and of devices */
	/* Of what is read in large pieces, a chunk's data: */
	FAULT_READ,   /* one fails */
	FAULT_SECTOR, /* that one and all behind it */
	FAULT_DRIVE,  /* from that one on everything, small or large, from the same descriptor */
	FAULT_FSYNC,  /* of directories */
	FAULT_SWAP,   /* that, and then every exchange of names */
	/* Of replies to the kernel: */
	FAULT_REPLY_SHORT,   /* there is no memory for one */
	FAULT_REPLY_REFUSED, /* one is not taken */
	FAULT_REPLY_GONE,    /* nobody waits for one any more: its caller has had EIO */
	FAULT_REPLY_END,     /* from that one on none is taken */
	_FAULT_KIND_MAX,
};

struct control {
	_Atomic int64_t kind;
	_Atomic int64_t left; /* calls until the one that fails */
	_Atomic int64_t struck;
};

static struct control *control;

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *memory, size_t size);

EXPORT void *malloc(size_t size);
EXPORT void *calloc(size_t count, size_t size);
EXPORT void *realloc(void *memory, size_t size);
EXPORT int open(const char *path, int flags, ...);
EXPORT int open64(const char *path, int flags, ...);
EXPORT int openat(int directory, const char *path, int flags, ...);
EXPORT int openat64(int directory, const char *path, int flags, ...);
EXPORT void *mmap(void *address, size_t length, int prot, int flags, int fd, off_t offset);
EXPORT void *mmap64(void *address, size_t length, int prot, int flags, int fd, off_t offset);
EXPORT int pthread_create(
	pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg);
EXPORT int io_uring_submit_and_wait(struct io_uring *ring, unsigned count);
EXPORT int fdatasync(int fd);
EXPORT int fsync(int fd);
EXPORT int renameat2(int from, const char *name, int to, const char *new_name, unsigned flags);
EXPORT ssize_t writev(int fd, const struct iovec *iov, int count);
EXPORT ssize_t pread(int fd, void *memory, size_t size, off_t offset);
EXPORT ssize_t pread64(int fd, void *memory, size_t size, off_t offset);

__attribute__((constructor)) static void map_control(void)
{
	const char *path = getenv("KV_FAULT_FILE");
	int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
	long mapped;

	if (fd < 0)
		return;
	mapped = syscall(
		SYS_mmap, NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	(void)close(fd);
	if (mapped != -1)
		control = (struct control *)mapped;
}

static bool strikes(enum fault_kind kind, int error)
{
	if (!control || atomic_load(&control->kind) != kind ||
		atomic_fetch_sub(&control->left, 1) != 1)
		return false;
	atomic_fetch_add(&control->struck, 1);
	errno = error;
	return true;
}

void *malloc(size_t size)
{
	return strikes(FAULT_MALLOC, ENOMEM) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
	return strikes(FAULT_MALLOC, ENOMEM) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
	return strikes(FAULT_MALLOC, ENOMEM) ? NULL : __libc_realloc(memory, size);
}

static int open_at(int directory, const char *path, int flags, va_list args)
{
	int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(args, int) : 0;

	if (strikes(FAULT_OPEN, EMFILE))
		return -1;
	return (int)syscall(SYS_openat, directory, path, flags, mode);
}

#define OPEN(name)                                                                                 \
	int name(const char *path, int flags, ...)                                                 \
	{                                                                                          \
		va_list args;                                                                      \
		va_start(args, flags);                                                             \
		int fd = open_at(AT_FDCWD, path, flags, args);                                     \
		va_end(args);                                                                      \
		return fd;                                                                         \
	}
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                               \
	int name(int directory, const char *path, int flags, ...)                                  \
	{                                                                                          \
		va_list args;                                                                      \
		va_start(args, flags);                                                             \
		int fd = open_at(directory, path, flags, args);                                    \
		va_end(args);                                                                      \
		return fd;                                                                         \
	}
OPENAT(openat)
OPENAT(openat64)

void *mmap(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
	if (strikes(FAULT_MMAP, ENOMEM))
		return MAP_FAILED;
	return (void *)syscall(SYS_mmap, address, length, prot, flags, fd, offset);
}

void *mmap64(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
	return mmap(address, length, prot, flags, fd, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg)
{
	static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

	if (!real)
		real = dlsym(RTLD_NEXT, "pthread_create");
	return strikes(FAULT_THREAD, EAGAIN) ? EAGAIN : real(thread, attr, start, arg);
}

int io_uring_submit_and_wait(struct io_uring *ring, unsigned count)
{
	static int (*real)(struct io_uring *, unsigned);

	if (!real)
		real = dlsym(RTLD_NEXT, "io_uring_submit_and_wait");
	return strikes(FAULT_SUBMIT, EAGAIN) ? -EAGAIN : real(ring, count);
}

int fdatasync(int fd)
{
	return strikes(FAULT_SYNC, EIO) ? -1 : (int)syscall(SYS_fdatasync, fd);
}

int fsync(int fd)
{
	if (strikes(FAULT_FSYNC, EIO) || strikes(FAULT_SWAP, EIO))
		return -1;
	return (int)syscall(SYS_fsync, fd);
}

int renameat2(int from, const char *name, int to, const char *new_name, unsigned flags)
{
	if (control && atomic_load(&control->kind) == FAULT_SWAP &&
		atomic_load(&control->left) <= 0) {
		errno = EIO;
		return -1;
	}
	return (int)syscall(SYS_renameat2, from, name, to, new_name, flags);
}

/* A reply or a notice: struct fuse_out_header, and what follows. */
static bool is_reply(const struct iovec *iov, int count, struct fuse_out_header *ret_header)
{
	size_t size = 0;

	if (count < 1 || iov[0].iov_len != sizeof(*ret_header))
		return false;
	for (int i = 0; i < count; i++)
		size += iov[i].iov_len;
	memcpy(ret_header, iov[0].iov_base, sizeof(*ret_header));
	return ret_header->len == size && ret_header->unique != 0;
}

ssize_t writev(int fd, const struct iovec *iov, int count)
{
	struct fuse_out_header header;

	if (!control || !is_reply(iov, count, &header))
		return syscall(SYS_writev, fd, iov, count);
	if (atomic_load(&control->kind) == FAULT_REPLY_END && atomic_load(&control->left) <= 0) {
		errno = EINVAL;
		return -1;
	}
	if (strikes(FAULT_REPLY_SHORT, ENOMEM) || strikes(FAULT_REPLY_REFUSED, EINVAL) ||
		strikes(FAULT_REPLY_END, EINVAL))
		return -1;
	if (strikes(FAULT_REPLY_GONE, ENOENT)) {
		header.len = sizeof(header);
		header.error = -EIO;
		(void)syscall(SYS_write, fd, &header, sizeof(header));
		errno = ENOENT;
		return -1;
	}
	return syscall(SYS_writev, fd, iov, count);
}

#define LARGE 65536u

static bool read_fails(int fd, size_t size)
{
	static _Atomic int drive = -1;
	int64_t kind = control ? atomic_load(&control->kind) : FAULT_NONE;

	if (kind == FAULT_DRIVE && fd == atomic_load(&drive))
		return true;
	if (size < LARGE)
		return false;
	if (kind == FAULT_SECTOR && atomic_load(&control->left) <= 0)
		return true;
	if (!strikes(FAULT_READ, EIO) && !strikes(FAULT_SECTOR, EIO) && !strikes(FAULT_DRIVE, EIO))
		return false;
	if (kind == FAULT_DRIVE)
		atomic_store(&drive, fd);
	return true;
}

ssize_t pread(int fd, void *memory, size_t size, off_t offset)
{
	if (read_fails(fd, size)) {
		errno = EIO;
		return -1;
	}
	return syscall(SYS_pread64, fd, memory, size, offset);
}

ssize_t pread64(int fd, void *memory, size_t size, off_t offset)
{
	return pread(fd, memory, size, offset);
}
