/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Objects of the DRAM tier: a cache of descriptors, and their bytes.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fs/dram.h"
#include "fs/dram_internal.h"

#define COPY_BUFFER_SIZE (256u << 10)
/* A signal, or a full tmpfs, ends an allocation, which the kernel has then undone whole. */
#define ATTEMPTS_MAX 100

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

static void idle_remove(struct kv_object *object)
{
	TAILQ_REMOVE(&object->dram->idle_objects, object, idle);
	object->dram->idle_count--;
}

/* Closes the descriptor that was not used for longest. Returns false if there is none. */
static bool idle_close_one(struct kv_dram *dram)
{
	struct kv_object *object = TAILQ_FIRST(&dram->idle_objects);

	if (!object)
		return false;
	assert(object->users == 0);
	idle_remove(object);
	(void)close(object->fd);
	object->fd = -1;
	return true;
}

static void idle_add(struct kv_object *object)
{
	struct kv_dram *dram = object->dram;

	TAILQ_INSERT_TAIL(&dram->idle_objects, object, idle);
	dram->idle_count++;
	while (dram->idle_count > dram->idle_max)
		(void)idle_close_one(dram);
}

/* Opens OBJECT's file by name. Idle descriptors make way if the process has no more. */
static int open_named(struct kv_object *object, int flags)
{
	struct kv_dram *dram = object->dram;
	char name[KV_OBJECT_NAME_SIZE];

	kv_mark_name(&object->mark, name);
	for (;;) {
		int fd =
			openat(dram->mount_fd, name, flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);

		if (fd >= 0)
			return fd;
		if (errno != EMFILE && errno != ENFILE)
			return -errno;
		if (!idle_close_one(dram))
			return -EMFILE;
	}
}

static int open_memfd(const struct kv_object *object)
{
	char name[KV_OBJECT_NAME_SIZE];
	int fd;

	if (object->dram->objects >= object->dram->objects_max)
		return -EMFILE;
	kv_mark_name(&object->mark, name);
	fd = memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL);
	/* Before Linux 6.3 the second flag is unknown. */
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, MFD_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

int kv_object_new(
	struct kv_dram *dram, uint64_t ino, uint64_t serial, struct kv_object **ret_object)
{
	struct kv_object *object = calloc(1, sizeof(*object));
	KV_LOCKED(&dram->lock);

	if (!object)
		return -ENOMEM;
	object->dram = dram;
	object->mark = (struct kv_mark){.ino = ino, .serial = serial};
	object->fd =
		dram->mount_fd >= 0 ? open_named(object, O_CREAT | O_EXCL) : open_memfd(object);
	if (object->fd < 0) {
		int r = object->fd;

		free(object);
		return r;
	}
	if (dram->mount_fd >= 0)
		idle_add(object);
	dram->objects++;
	*ret_object = object;
	return 0;
}

struct kv_object *kv_object_free(struct kv_object *object)
{
	struct kv_dram *dram;
	int fd;

	if (!object)
		return NULL;
	dram = object->dram;
	{
		KV_LOCKED(&dram->lock);
		assert(object->users == 0);
		assert(dram->objects > 0);
		fd = object->fd;
		if (dram->mount_fd >= 0 && fd >= 0)
			idle_remove(object);
		dram->objects--;
	}
	if (dram->mount_fd >= 0) {
		char name[KV_OBJECT_NAME_SIZE];

		kv_mark_name(&object->mark, name);
		(void)unlinkat(dram->mount_fd, name, 0);
	}
	/* Freeing gigabytes of pages takes a while: not under the lock. */
	if (fd >= 0)
		(void)close(fd);
	free(object);
	return NULL;
}

int kv_object_get(struct kv_object *object)
{
	KV_LOCKED(&object->dram->lock);

	if (object->fd < 0) {
		int fd = open_named(object, 0);

		if (fd < 0)
			return fd;
		object->fd = fd;
	} else if (object->dram->mount_fd >= 0 && object->users == 0) {
		idle_remove(object);
	}
	object->users++;
	return object->fd;
}

void kv_object_put(struct kv_object *object)
{
	KV_LOCKED(&object->dram->lock);

	assert(object->users > 0);
	assert(object->fd >= 0);
	object->users--;
	if (object->users == 0 && object->dram->mount_fd >= 0)
		idle_add(object);
}

int kv_object_resize(struct kv_object *object, uint64_t size)
{
	int fd = kv_object_get(object);
	int r;

	if (fd < 0)
		return fd;
	r = size > INT64_MAX ? -EFBIG : ftruncate(fd, (off_t)size) < 0 ? -errno : 0;
	kv_object_put(object);
	return r;
}

static int change_pages(struct kv_object *object, int mode, uint64_t offset, uint64_t length)
{
	int fd, r;

	if (length == 0)
		return 0;
	if (offset > INT64_MAX || length > INT64_MAX - offset)
		return -EFBIG;
	fd = kv_object_get(object);
	if (fd < 0)
		return fd;
	for (unsigned i = 0; i < ATTEMPTS_MAX; i++) {
		r = fallocate(fd, mode, (off_t)offset, (off_t)length) < 0 ? -errno : 0;
		if (r != -EINTR && (r != -ENOSPC || !kv_dram_make_room(object->dram)))
			break;
	}
	kv_object_put(object);
	return r;
}

int kv_object_allocate(struct kv_object *object, uint64_t offset, uint64_t length)
{
	return change_pages(object, FALLOC_FL_KEEP_SIZE, offset, length);
}

/*
 * The one way past huge=within_size: a fault in a mapping that wants no huge pages. Unmapped at
 * once, so that page tables do not cost as much again.
 */
static int populate(struct kv_object *object, uint64_t offset, uint64_t length)
{
	void *memory;
	int r = kv_object_map(object, offset, length, &memory);

	if (r < 0)
		return r;
	if (madvise(memory, length, MADV_NOHUGEPAGE) < 0 ||
		madvise(memory, length, MADV_POPULATE_WRITE) < 0)
		r = -errno;
	kv_object_unmap(memory, length);
	/* An access would have ended in SIGBUS: the tmpfs is full. */
	return r == -EFAULT ? -ENOSPC : r;
}

int kv_object_allocate_small(struct kv_object *object, uint64_t offset, uint64_t length)
{
	int r = 0;

	if (!object->dram->huge || length == 0)
		return kv_object_allocate(object, offset, length);
	for (unsigned i = 0; i < ATTEMPTS_MAX; i++) {
		r = populate(object, offset, length);
		if (r != -EINTR && (r != -ENOSPC || !kv_dram_make_room(object->dram)))
			break;
	}
	return r;
}

int kv_object_punch(struct kv_object *object, uint64_t offset, uint64_t length)
{
	return change_pages(object, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
}

bool kv_object_has(struct kv_object *object, uint64_t offset, uint64_t length)
{
	int fd = kv_object_get(object);
	off_t hole;

	if (fd < 0)
		return false;
	hole = lseek(fd, (off_t)offset, SEEK_HOLE);
	kv_object_put(object);
	return hole >= 0 && (uint64_t)hole >= offset + length;
}

bool kv_object_is_empty(struct kv_object *object, uint64_t offset, uint64_t length)
{
	int fd = kv_object_get(object);
	off_t data;
	int error;

	if (fd < 0)
		return false;
	data = lseek(fd, (off_t)offset, SEEK_DATA);
	error = errno;
	kv_object_put(object);
	return data < 0 ? error == ENXIO : (uint64_t)data >= offset + length;
}

static int read_all(int fd, char *memory, size_t length, uint64_t offset)
{
	while (length > 0) {
		ssize_t n = pread(fd, memory, length, (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0) {
			memset(memory, 0, length);
			return 0;
		}
		memory += n;
		offset += (size_t)n;
		length -= (size_t)n;
	}
	return 0;
}

static int write_all(int fd, const char *memory, size_t length, uint64_t offset)
{
	while (length > 0) {
		ssize_t n = pwrite(fd, memory, length, (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return -EIO;
		memory += n;
		offset += (size_t)n;
		length -= (size_t)n;
	}
	return 0;
}

int kv_object_read(struct kv_object *object, void *ret_memory, size_t length, uint64_t offset)
{
	int fd = kv_object_get(object);
	int r;

	if (fd < 0)
		return fd;
	r = read_all(fd, ret_memory, length, offset);
	kv_object_put(object);
	return r;
}

int kv_object_write(struct kv_object *object, const void *memory, size_t length, uint64_t offset)
{
	int fd = kv_object_get(object);
	int r;

	if (fd < 0)
		return fd;
	do
		r = write_all(fd, memory, length, offset);
	while (r == -ENOSPC && kv_dram_make_room(object->dram));
	kv_object_put(object);
	return r;
}

/*
 * Through a buffer that stays in the processor's cache: copy_file_range on tmpfs goes by splice,
 * page by page, which is slower, and mapping the source would allocate pages for its holes.
 */
int kv_object_copy(struct kv_object *to, uint64_t to_offset, struct kv_object *from,
	uint64_t from_offset, size_t length)
{
	_cleanup_free_ char *buffer = NULL;
	int r = 0;

	if (length == 0)
		return 0;
	buffer = malloc(kv_min_u64(length, COPY_BUFFER_SIZE));
	if (!buffer)
		return -ENOMEM;
	while (length > 0 && r == 0) {
		size_t part = kv_min_u64(length, COPY_BUFFER_SIZE);

		r = kv_object_read(from, buffer, part, from_offset);
		if (r == 0)
			r = kv_object_write(to, buffer, part, to_offset);
		from_offset += part;
		to_offset += part;
		length -= part;
	}
	return r;
}

int kv_object_map(struct kv_object *object, uint64_t offset, size_t length, void **ret_memory)
{
	void *memory;
	int fd, r;

	assert(offset % KV_BLOCK_SIZE == 0);
	assert(length % KV_BLOCK_SIZE == 0 && length > 0);
	fd = kv_object_get(object);
	if (fd < 0)
		return fd;
	memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
	r = memory == MAP_FAILED ? -errno : 0;
	kv_object_put(object);
	if (r == 0)
		*ret_memory = memory;
	return r;
}

/* Before Linux 5.14 the first writes do it. */
void kv_object_touch(void *memory, size_t length)
{
	(void)madvise(memory, length, MADV_POPULATE_WRITE);
}

void kv_object_unmap(void *memory, size_t length)
{
	int r = munmap(memory, length);

	assert(r == 0);
	(void)r;
}
