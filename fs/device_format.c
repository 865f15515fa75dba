/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Formatting of data devices: all are opened and checked before the first byte is written, and
 * what was on them comes back if one of them fails.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "fs/device_internal.h"
#include "fs/parse.h"

struct target {
	const char *path;
	int handle; /* valid if opened */
	bool opened;
	bool created; /* to be removed on failure */
	bool written; /* to be restored on failure */
	uint64_t size;
	uint8_t *before; /* the first KV_DEVICE_DATA_START bytes; NULL: blank */
};

struct formatting {
	const struct kv_devices_format *format;
	const struct kv_io_ops *ops;
	struct kv_error error;
	struct target target[KV_DEVICES_MAX];
};

/* The file does not fit, or cannot be made: says how much room there is where it would be. */
static int create_error(const struct formatting *f, const struct target *target, int r)
{
	_cleanup_free_ char *parent = strdup(target->path);
	uint64_t size = f->format->size_bytes;
	char wanted[16], available[16];
	struct statvfs st;
	char *slash = parent ? strrchr(parent, '/') : NULL;

	if (r != -ENOSPC || !parent)
		return kv_fail(&f->error, r, "device file %s cannot be created: %s", target->path,
			strerror(-r));
	if (slash)
		slash[slash == parent ? 1 : 0] = '\0';
	if (statvfs(slash ? parent : ".", &st) < 0)
		st.f_bavail = 0;
	return kv_fail(&f->error, r,
		"device file %s of %s does not fit: %s are free there; choose a smaller --size",
		target->path, kv_format_size(size, wanted, sizeof(wanted)),
		kv_format_size((uint64_t)st.f_bavail * st.f_frsize, available, sizeof(available)));
}

static int open_target(struct formatting *f, struct target *target)
{
	const struct kv_io_ops *ops = f->ops;
	uint64_t size = f->format->size_bytes;
	int r = kv_device_open(ops, target->path, &target->handle, &target->size);

	if (r == -ENOENT) {
		if (size == 0)
			return kv_fail(&f->error, r,
				"device %s is not there; to make it a file, give its --size",
				target->path);
		if (size < KV_DEVICE_SIZE_MIN || size % KV_BLOCK_SIZE != 0)
			return kv_fail(&f->error, -EINVAL,
				"a size of %llu bytes cannot be used: at least 64M, a multiple of "
				"4096",
				(unsigned long long)size);
		r = ops->open(
			ops->context, target->path, true, size, &target->handle, &target->size);
		if (r < 0)
			return create_error(f, target, r);
		target->created = true;
	}
	if (r < 0)
		return kv_device_open_error(&f->error, target->path, r);
	target->opened = true;
	target->size -= target->size % KV_BLOCK_SIZE;
	if (target->size < KV_DEVICE_SIZE_MIN)
		return kv_fail(&f->error, -EINVAL,
			"device %s is too small: %llu bytes, and at least 64M are needed",
			target->path, (unsigned long long)target->size);
	return 0;
}

/* Refuses what looks used, and keeps what will be overwritten. */
static int check_target(struct formatting *f, struct target *target)
{
	_cleanup_free_ uint8_t *area = aligned_alloc(KV_BLOCK_SIZE, KV_DEVICE_DATA_START);
	const char *found;
	int r;

	if (!area)
		return kv_fail(&f->error, -ENOMEM, "out of memory");
	r = f->ops->read(f->ops->context, target->handle, area, KV_DEVICE_DATA_START, 0);
	if (r < 0)
		return kv_fail(
			&f->error, r, "device %s cannot be read: %s", target->path, strerror(-r));
	found = kv_superblock_describe(area);
	if (!found)
		return 0;
	if (!f->format->force)
		return kv_fail(&f->error, -EEXIST,
			"device %s already holds %s; --force overwrites it", target->path, found);
	target->before = kv_steal_ptr(&area);
	return 0;
}

/*
 * Writes the superblock area: the copies of the superblock and zeros, so that no older signature
 * stays behind for others to find.
 */
static int write_target(struct formatting *f, unsigned number)
{
	struct target *target = &f->target[number];
	struct kv_superblock superblock = {
		.format = KV_DEVICE_FORMAT,
		.number = number,
		.size = target->size,
		.data_start = KV_DEVICE_DATA_START,
		.count = f->format->count,
	};
	_cleanup_free_ uint8_t *area = aligned_alloc(KV_BLOCK_SIZE, KV_DEVICE_DATA_START);
	int r;

	if (!area)
		return kv_fail(&f->error, -ENOMEM, "out of memory");
	memcpy(superblock.uuid, f->format->uuid, sizeof(superblock.uuid));
	memset(area, 0, KV_DEVICE_DATA_START);
	for (unsigned i = 0; i < KV_SUPERBLOCK_COPIES; i++)
		kv_superblock_encode(&superblock, area + i * KV_BLOCK_SIZE);
	target->written = true;
	r = f->ops->write(f->ops->context, target->handle, area, KV_DEVICE_DATA_START, 0);
	if (r >= 0)
		r = f->ops->flush(f->ops->context, target->handle);
	if (r < 0)
		return kv_fail(&f->error, r, "device %s cannot be written: %s", target->path,
			strerror(-r));
	return 0;
}

/* Puts back what was there. The device is failing already: nothing more can be done if it does not
 * work. */
static void restore_target(struct formatting *f, struct target *target)
{
	uint8_t *area = target->before;

	if (!target->written || target->created)
		return;
	if (!area) {
		area = target->before = aligned_alloc(KV_BLOCK_SIZE, KV_DEVICE_DATA_START);
		if (!area)
			return;
		memset(area, 0, KV_DEVICE_DATA_START);
	}
	(void)f->ops->write(f->ops->context, target->handle, area, KV_DEVICE_DATA_START, 0);
	(void)f->ops->flush(f->ops->context, target->handle);
}

static int format_targets(struct formatting *f, uint64_t *blocks)
{
	const struct kv_devices_format *format = f->format;
	int r = 0;

	for (unsigned i = 0; i < format->count && r >= 0; i++) {
		f->target[i].path = format->paths[i];
		r = open_target(f, &f->target[i]);
		if (r >= 0)
			r = check_target(f, &f->target[i]);
		blocks[i] = (f->target[i].size - KV_DEVICE_DATA_START) >> KV_BLOCK_SHIFT;
	}
	if (r >= 0 && format->prepare)
		r = format->prepare(format->prepare_arg, blocks);
	for (unsigned i = 0; i < format->count && r >= 0; i++)
		r = write_target(f, i);
	return r;
}

int kv_devices_format(const struct kv_devices_format *format, uint64_t *ret_blocks, char *ret_error,
	size_t error_size)
{
	_cleanup_free_ struct formatting *f = calloc(1, sizeof(*f));
	uint64_t blocks[KV_DEVICES_MAX];
	int r;

	assert(format->count > 0 && format->count <= KV_DEVICES_MAX);
	if (!f) {
		(void)snprintf(ret_error, error_size, "out of memory");
		return -ENOMEM;
	}
	f->format = format;
	f->ops = format->ops;
	f->error = (struct kv_error){ret_error, error_size};
	r = format_targets(f, blocks);
	for (unsigned i = 0; i < format->count; i++) {
		struct target *target = &f->target[i];

		if (r < 0)
			restore_target(f, target);
		if (target->opened)
			f->ops->close(f->ops->context, target->handle);
		if (r < 0 && target->created)
			(void)unlink(target->path);
		free(target->before);
	}
	if (r < 0)
		return r;
	memcpy(ret_blocks, blocks, format->count * sizeof(blocks[0]));
	return 0;
}
