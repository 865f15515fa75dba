/* SPDX-License-Identifier: Apache-2.0 */
/* The devices of a store that is checked: whether they are its own, and their superblocks whole. */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fs/io_internal.h"
#include "fs/store_check_internal.h"

/* As the daemon opens them, but not for writing unless they are to be repaired. */
static int device_open(const char *path, bool repair, uint64_t *ret_size)
{
	int flags = O_EXCL | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | (repair ? O_RDWR : O_RDONLY);
	_cleanup_fd_ int fd = open(path, flags);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return -errno;
	if (S_ISBLK(st.st_mode)) {
		if (ioctl(fd, BLKGETSIZE64, ret_size) < 0)
			return -errno;
	} else if (S_ISREG(st.st_mode)) {
		if (flock(fd, LOCK_EX | LOCK_NB) < 0)
			return errno == EWOULDBLOCK ? -EBUSY : -errno;
		*ret_size = (uint64_t)st.st_size;
	} else {
		return -ENOTBLK;
	}
	return kv_steal_fd(&fd);
}

static int device_open_patiently(const char *path, bool repair, uint64_t *ret_size)
{
	unsigned waited_ms = 0;
	int fd;

	do
		fd = device_open(path, repair, ret_size);
	while (kv_device_try_again(fd, &waited_ms));
	return fd;
}

/* Where it can be had, so that what is read is what the drive holds. */
static void device_set_direct(int fd)
{
	_cleanup_free_ void *block = aligned_alloc(KV_BLOCK_SIZE, KV_BLOCK_SIZE);
	int flags = fcntl(fd, F_GETFL);

	if (!block || flags < 0 || fcntl(fd, F_SETFL, flags | O_DIRECT) < 0)
		return;
	if (pread(fd, block, KV_BLOCK_SIZE, 0) < 0 && errno == EINVAL)
		(void)fcntl(fd, F_SETFL, flags);
}

static void read_copy(struct kv_checked_device *device, unsigned number)
{
	_cleanup_free_ uint8_t *block = aligned_alloc(KV_BLOCK_SIZE, KV_BLOCK_SIZE);
	struct kv_superblock superblock;
	int r = block ? kv_io_file_read(NULL, device->fd, block, KV_BLOCK_SIZE,
				(uint64_t)number * KV_BLOCK_SIZE)
		      : -ENOMEM;

	device->copies[number] = KV_COPY_UNREADABLE;
	if (r < 0)
		return;
	r = kv_superblock_decode(block, &superblock);
	device->foreign |= r == -EPROTO;
	device->copies[number] = r == 0          ? KV_COPY_WHOLE
				 : r == -ENODATA ? KV_COPY_ABSENT
						 : KV_COPY_DAMAGED;
	if (r == 0 && !device->known) {
		device->known = true;
		device->superblock = superblock;
	}
}

/* What the index says the superblock of device NUMBER is. */
static struct kv_superblock superblock_of(const struct kv_checking *checking, unsigned number)
{
	const struct kv_index_store *store = kv_index_store(checking->index);
	struct kv_superblock superblock = {
		.format = KV_DEVICE_FORMAT,
		.number = number,
		.size = KV_DEVICE_DATA_START + (store->device_blocks[number] << KV_BLOCK_SHIFT),
		.data_start = KV_DEVICE_DATA_START,
		.count = store->device_count,
	};

	memcpy(superblock.uuid, store->uuid, sizeof(superblock.uuid));
	return superblock;
}

static bool is_same(const struct kv_superblock *a, const struct kv_superblock *b)
{
	return a->number == b->number && a->count == b->count && a->size == b->size &&
	       memcmp(a->uuid, b->uuid, sizeof(a->uuid)) == 0;
}

static void tell_copies(struct kv_checking *checking, unsigned number)
{
	static const char *const words[] = {
		[KV_COPY_DAMAGED] = "is damaged",
		[KV_COPY_ABSENT] = "is not there",
		[KV_COPY_UNREADABLE] = "cannot be read",
	};
	struct kv_checked_device *device = &checking->devices[number];

	for (unsigned i = 0; i < KV_SUPERBLOCK_COPIES; i++) {
		if (device->copies[i] == KV_COPY_WHOLE)
			continue;
		device->damaged = true;
		/* Overwritten as a whole, it may be another's device by now. */
		device->mendable |= device->copies[i] == KV_COPY_DAMAGED;
		kv_checking_say(checking, "device %u (%s): superblock copy %u %s", number,
			checking->list.paths[number], i, words[device->copies[i]]);
	}
	device->mendable |= device->known;
}

static int check_device(struct kv_checking *checking, unsigned number)
{
	struct kv_checked_device *device = &checking->devices[number];

	for (unsigned i = 0; i < KV_SUPERBLOCK_COPIES; i++)
		read_copy(device, i);
	if (device->foreign)
		return kv_fail(&checking->error, -EPROTO,
			"device %s has the format of another kvfs; check it with that one",
			checking->list.paths[number]);
	tell_copies(checking, number);
	return 0;
}

/* Whatever is on a device that is not the store's own says nothing about the store's files. */
static void check_identity(struct kv_checking *checking, unsigned number)
{
	struct kv_checked_device *device = &checking->devices[number];
	struct kv_superblock expected = superblock_of(checking, number);
	bool own = device->known ? is_same(&device->superblock, &expected) : device->mendable;
	bool small = device->size < expected.size;

	if (device->fd < 0 || (own && !small))
		return;
	if (small)
		kv_checking_say(checking,
			"device %u (%s): has %llu bytes, but had %llu when it was formatted",
			number, checking->list.paths[number], (unsigned long long)device->size,
			(unsigned long long)expected.size);
	if (!own && device->known)
		kv_checking_say(checking,
			"device %u (%s): belongs to another store, or elsewhere in this one",
			number, checking->list.paths[number]);
	else if (!own)
		kv_checking_say(checking,
			"device %u (%s): nothing on it tells that it is this store's, so it is "
			"not used",
			number, checking->list.paths[number]);
	device->mendable = false;
	kv_cleanup_fd(&device->fd);
}

static int check_count(struct kv_checking *checking)
{
	uint32_t count = kv_index_store(checking->index)->device_count;

	if (count == checking->list.count)
		return 0;
	return kv_fail(&checking->error, -EINVAL,
		"%s/" KV_STORE_DEVICES
		" names %u devices, but the store has %u; list all of them, in their order",
		checking->path, checking->list.count, count);
}

int kv_checking_identify(struct kv_checking *checking)
{
	int r = check_count(checking);

	for (unsigned i = 0; i < checking->list.count && r == 0; i++)
		check_identity(checking, i);
	return r;
}

int kv_checking_devices(struct kv_checking *checking)
{
	int r = checking->index ? check_count(checking) : 0;

	for (unsigned i = 0; i < checking->list.count && r == 0; i++) {
		struct kv_checked_device *device = &checking->devices[i];
		int fd = device_open_patiently(
			checking->list.paths[i], checking->check->repair, &device->size);

		if (fd == -EBUSY)
			return kv_device_open_error(&checking->error, checking->list.paths[i], fd);
		if (fd < 0) {
			device->damaged = true;
			kv_checking_say(checking, "device %u (%s): cannot be opened: %s", i,
				checking->list.paths[i], strerror(-fd));
			continue;
		}
		device->fd = fd;
		device_set_direct(fd);
		r = check_device(checking, i);
	}
	return r == 0 && checking->index ? kv_checking_identify(checking) : r;
}

int kv_checking_mend_devices(struct kv_checking *checking)
{
	_cleanup_free_ uint8_t *block = aligned_alloc(KV_BLOCK_SIZE, KV_BLOCK_SIZE);

	if (!block)
		return -ENOMEM;
	for (unsigned i = 0; i < checking->list.count; i++) {
		struct kv_checked_device *device = &checking->devices[i];
		struct kv_superblock superblock;
		int r = 0;

		if (!device->damaged && device->fd >= 0)
			continue;
		if (!device->mendable || device->fd < 0 || !checking->index) {
			checking->result->left = true;
			checking->result->hint =
				"put the store's own devices in place, in the order of its "
				"`devices` file";
			continue;
		}
		superblock = superblock_of(checking, i);
		kv_superblock_encode(&superblock, block);
		for (unsigned j = 0; j < KV_SUPERBLOCK_COPIES && r == 0; j++)
			r = kv_io_file_write(NULL, device->fd, block, KV_BLOCK_SIZE,
				(uint64_t)j * KV_BLOCK_SIZE);
		if (r == 0)
			r = kv_io_file_flush(NULL, device->fd);
		if (r < 0)
			return kv_fail(&checking->error, r, "device %s cannot be written: %s",
				checking->list.paths[i], strerror(-r));
	}
	return 0;
}
