/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The open data devices of a store: verification at mount, failures, flushes.
 */
#include "fs/device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fs/device_internal.h"

#define SUPERBLOCKS_SIZE (KV_SUPERBLOCK_COPIES * KV_BLOCK_SIZE)

/*
 * A killed daemon's rings keep their registered devices open, and so locked, for a moment after its
 * end: the kernel takes them apart in the background.
 */
#define BUSY_WAIT_MS 3000u
#define BUSY_POLL_MS 20u

/* What the steps of kv_devices_open share. */
struct opening {
	const struct kv_devices_open *open;
	struct kv_devices *devices;
	struct kv_error error;
};

bool kv_device_try_again(int r, unsigned *waited_ms)
{
	if (r != -EBUSY || *waited_ms >= BUSY_WAIT_MS)
		return false;
	(void)usleep(BUSY_POLL_MS * 1000);
	*waited_ms += BUSY_POLL_MS;
	return true;
}

int kv_device_open(
	const struct kv_io_ops *ops, const char *path, int *ret_handle, uint64_t *ret_size)
{
	unsigned waited_ms = 0;
	int r;

	do
		r = ops->open(ops->context, path, false, 0, ret_handle, ret_size);
	while (kv_device_try_again(r, &waited_ms));
	return r;
}

int kv_device_open_error(const struct kv_error *error, const char *path, int r)
{
	switch (r) {
	case -ENOENT:
		return kv_fail(error, r, "device %s is not there", path);
	case -EBUSY:
		return kv_fail(error, r,
			"device %s is in use: it is mounted, or another kvfs has it", path);
	case -ENOTBLK:
	case -EISDIR:
		return kv_fail(error, r, "%s is neither a block device nor a regular file", path);
	case -EMLINK:
		return kv_fail(error, r,
			"%s has another name (a hard link), which others may use; remove that, or "
			"copy the file",
			path);
	case -ELOOP:
		return kv_fail(error, r, "%s is a symbolic link; name what it points to", path);
	case -EACCES:
	case -EPERM:
		return kv_fail(error, r,
			"device %s cannot be opened: %s; are you its owner, or root?", path,
			strerror(-r));
	default:
		return kv_fail(error, r, "device %s cannot be opened: %s", path, strerror(-r));
	}
}

/* Which of the copies is to be believed; -1 if none. Of two whole ones, that of this store. */
static int choose_copy(const struct kv_superblock *copies, const int *results, const uint8_t *uuid)
{
	int chosen = -1;

	for (unsigned i = 0; i < KV_SUPERBLOCK_COPIES; i++) {
		if (results[i] < 0)
			continue;
		if (memcmp(copies[i].uuid, uuid, sizeof(copies[i].uuid)) == 0)
			return (int)i;
		if (chosen < 0)
			chosen = (int)i;
	}
	return chosen;
}

/* Neither copy can be used: says why. */
static int no_superblock_error(const struct kv_error *error, const char *path, const int *results)
{
	bool damaged = false;

	for (unsigned i = 0; i < KV_SUPERBLOCK_COPIES; i++) {
		if (results[i] == -EPROTO)
			return kv_fail(error, -EPROTO,
				"device %s has the format of another kvfs, this one knows only "
				"%u: use the kvfs that made it, or make a new, empty store with "
				"`kvfs format --force`",
				path, KV_DEVICE_FORMAT);
		if (results[i] != -EUCLEAN && results[i] != -ENODATA)
			return kv_fail(error, results[i],
				"the superblock of device %s cannot be read: %s; check the drive",
				path, strerror(-results[i]));
		damaged |= results[i] == -EUCLEAN;
	}
	if (!damaged)
		return kv_fail(error, -EUCLEAN,
			"device %s has no kvfs superblock: it was overwritten, or is not this "
			"store's",
			path);
	return kv_fail(error, -EUCLEAN,
		"both superblocks of device %s are damaged: `kvfs check --repair` may mend "
		"them; else restore the device, or make a new, empty store with `kvfs format "
		"--force`",
		path);
}

/* Whether superblock S is that of device NUMBER of the store, and the device still as large. */
static int check_superblock(
	const struct opening *opening, unsigned number, const struct kv_superblock *s)
{
	const struct kv_devices_open *open = opening->open;
	const struct kv_error *error = &opening->error;
	const char *path = open->paths[number];
	uint64_t size = opening->devices->device[number].size;

	if (memcmp(s->uuid, open->uuid, sizeof(s->uuid)) != 0)
		return kv_fail(error, -EINVAL,
			"device %s belongs to another kvfs store; put back this store's own", path);
	if (s->count != open->count)
		return kv_fail(error, -EINVAL,
			"device %s is one of %u, but the store names %u; list all of them in its "
			"`devices` file",
			path, s->count, open->count);
	if (s->number != number)
		return kv_fail(error, -EINVAL,
			"device %s is number %u of the store, not %u; correct the order in its "
			"`devices` file",
			path, s->number, number);
	if (size < s->size)
		return kv_fail(error, -EINVAL,
			"device %s has %llu bytes, but had %llu when it was formatted; give it its "
			"size back",
			path, (unsigned long long)size, (unsigned long long)s->size);
	if ((s->size - KV_DEVICE_DATA_START) >> KV_BLOCK_SHIFT != open->blocks[number])
		return kv_fail(error, -EUCLEAN,
			"device %s and the store's index disagree about its size; restore an index "
			"and devices of the same time",
			path);
	return 0;
}

/* Reads the copies of a superblock; ret_results says for each how that went. */
static void read_copies(
	const struct kv_io_ops *ops, int handle, uint8_t *ret_blocks, int *ret_results)
{
	for (unsigned i = 0; i < KV_SUPERBLOCK_COPIES; i++) {
		uint8_t *block = ret_blocks + i * KV_BLOCK_SIZE;

		ret_results[i] =
			ops->read(ops->context, handle, block, KV_BLOCK_SIZE, i * KV_BLOCK_SIZE);
		if (ret_results[i] < 0)
			memset(block, 0, KV_BLOCK_SIZE);
	}
}

/* Writes copy GOOD over the other one, where they differ. Mounting goes on if that fails. */
static void repair_copy(struct kv_devices *devices, unsigned number, unsigned good)
{
	const struct kv_device *device = &devices->device[number];
	const struct kv_io_ops *ops = devices->ops;
	_cleanup_free_ uint8_t *blocks = aligned_alloc(KV_BLOCK_SIZE, SUPERBLOCKS_SIZE);
	int results[KV_SUPERBLOCK_COPIES];
	unsigned bad = 1 - good;
	int r;

	static_assert(KV_SUPERBLOCK_COPIES == 2, "there is one other copy");
	if (!blocks)
		return;
	read_copies(ops, device->handle, blocks, results);
	if (results[good] < 0 || memcmp(blocks, blocks + KV_BLOCK_SIZE, KV_BLOCK_SIZE) == 0)
		return;
	r = ops->write(ops->context, device->handle, blocks + good * KV_BLOCK_SIZE, KV_BLOCK_SIZE,
		bad * KV_BLOCK_SIZE);
	if (r >= 0)
		r = ops->flush(ops->context, device->handle);
	if (r < 0)
		kv_log_warning("device",
			"superblock copy %u is damaged and cannot be rewritten, ignoring device=%s "
			"error=\"%s\"",
			bad, device->path, strerror(-r));
	else
		kv_log_warning("device",
			"superblock copy %u was damaged, rewritten from the other one device=%s",
			bad, device->path);
}

/* Returns the number of the copy to believe, or a negative errno. */
static int verify_device(struct opening *opening, unsigned number)
{
	struct kv_device *device = &opening->devices->device[number];
	struct kv_superblock copies[KV_SUPERBLOCK_COPIES];
	int results[KV_SUPERBLOCK_COPIES];
	_cleanup_free_ uint8_t *blocks = aligned_alloc(KV_BLOCK_SIZE, SUPERBLOCKS_SIZE);
	int r, good;

	if (!blocks)
		return kv_fail(&opening->error, -ENOMEM, "out of memory");
	read_copies(opening->open->ops, device->handle, blocks, results);
	for (unsigned i = 0; i < KV_SUPERBLOCK_COPIES; i++)
		if (results[i] >= 0)
			results[i] = kv_superblock_decode(blocks + i * KV_BLOCK_SIZE, &copies[i]);
	good = choose_copy(copies, results, opening->open->uuid);
	if (good < 0)
		return no_superblock_error(&opening->error, device->path, results);
	r = check_superblock(opening, number, &copies[good]);
	if (r < 0)
		return r;
	device->size = copies[good].size;
	device->blocks = opening->open->blocks[number];
	return good;
}

/* Opens device NUMBER; once it counts in devices->count, kv_devices_close closes it. */
static int open_device(struct opening *opening, unsigned number)
{
	struct kv_devices *devices = opening->devices;
	struct kv_device *device = &devices->device[number];
	const struct kv_io_ops *ops = devices->ops;
	_cleanup_free_ char *path = strdup(opening->open->paths[number]);
	int r;

	if (!path)
		return kv_fail(&opening->error, -ENOMEM, "out of memory");
	r = kv_device_open(ops, path, &device->handle, &device->size);
	if (r < 0)
		return kv_device_open_error(&opening->error, path, r);
	device->path = kv_steal_ptr(&path);
	devices->handles[number] = device->handle;
	devices->count = number + 1;
	return 0;
}

int kv_devices_open(const struct kv_devices_open *open, struct kv_devices **ret_devices,
	char *ret_error, size_t error_size)
{
	struct opening opening = {.open = open, .error = {ret_error, error_size}};
	struct kv_devices *devices;
	int good[KV_DEVICES_MAX];
	int r = 0;

	assert(open->count > 0 && open->count <= KV_DEVICES_MAX);
	devices = calloc(1, sizeof(*devices) + open->count * sizeof(devices->device[0]));
	if (!devices)
		return kv_fail(&opening.error, -ENOMEM, "out of memory");
	devices->ops = open->ops;
	devices->stats = open->stats;
	(void)pthread_mutex_init(&devices->rings_lock, NULL);
	LIST_INIT(&devices->rings);
	opening.devices = devices;
	for (unsigned i = 0; i < open->count && r >= 0; i++) {
		r = open_device(&opening, i);
		if (r >= 0)
			r = good[i] = verify_device(&opening, i);
	}
	if (r < 0) {
		(void)kv_devices_close(devices);
		return r;
	}
	/* Only now, when all are known to belong together, may anything be written. */
	for (unsigned i = 0; i < open->count; i++)
		repair_copy(devices, i, (unsigned)good[i]);
	*ret_devices = devices;
	return 0;
}

struct kv_devices *kv_devices_close(struct kv_devices *devices)
{
	if (!devices)
		return NULL;
	for (unsigned i = 0; i < devices->count; i++) {
		devices->ops->close(devices->ops->context, devices->device[i].handle);
		free(devices->device[i].path);
	}
	free(devices);
	return NULL;
}

unsigned kv_devices_count(const struct kv_devices *devices)
{
	return devices->count;
}

void kv_devices_info(
	const struct kv_devices *devices, unsigned number, struct kv_device_info *ret_info)
{
	const struct kv_device *device = &devices->device[number];

	assert(number < devices->count);
	const uint64_t bit = UINT64_C(1) << number;
	int64_t since = atomic_load_explicit(&device->oldest_ms, memory_order_relaxed);
	*ret_info = (struct kv_device_info){
		.path = device->path,
		.state = kv_devices_hung(devices) & bit   ? KV_DEVICE_HUNG
			 : kv_devices_slow(devices) & bit ? KV_DEVICE_SLOW
							  : KV_DEVICE_OK,
		.waiting_ms = since > 0 ? (uint64_t)(kv_monotonic_ms() - since) : 0,
		.size = device->size,
		.blocks = device->blocks,
		.failed = atomic_load_explicit(&device->failed, memory_order_relaxed),
	};
}

const struct kv_io_ops *kv_devices_ops(const struct kv_devices *devices)
{
	return devices->ops;
}

int kv_devices_flush(struct kv_devices *devices, unsigned number)
{
	struct kv_device *device = &devices->device[number];
	uint64_t written, flushed;
	int r;

	assert(number < devices->count);
	/* Acquire pairs with kv_devices_note_write: what was counted before is in this flush. */
	written = atomic_load_explicit(&device->written, memory_order_acquire);
	atomic_store_explicit(&device->flush_since_ms, kv_monotonic_ms(), memory_order_relaxed);
	r = devices->ops->flush(devices->ops->context, device->handle);
	atomic_store_explicit(&device->flush_since_ms, 0, memory_order_relaxed);
	atomic_store_explicit(&device->answered_ms, kv_monotonic_ms(), memory_order_relaxed);
	if (r < 0) {
		struct kv_io io = {.kind = KV_IO_WRITE, .device = (uint16_t)number};

		kv_devices_note_error(devices, &io, r);
		return r;
	}
	/* Flushes of several threads may end in any order: the number only grows. */
	flushed = atomic_load_explicit(&device->flushed, memory_order_relaxed);
	while (flushed < written &&
		!atomic_compare_exchange_weak_explicit(&device->flushed, &flushed, written,
			memory_order_release, memory_order_relaxed))
		continue;
	return 0;
}

bool kv_devices_unflushed(const struct kv_devices *devices, unsigned number)
{
	const struct kv_device *device = &devices->device[number];

	assert(number < devices->count);
	return atomic_load_explicit(&device->written, memory_order_acquire) !=
	       atomic_load_explicit(&device->flushed, memory_order_acquire);
}

void kv_devices_note_write(struct kv_devices *devices, unsigned number)
{
	(void)atomic_fetch_add_explicit(&devices->device[number].written, 1, memory_order_release);
}

/* Memory and space run out without any fault of the drive. */
static bool is_device_fault(int error)
{
	return error != -ENOMEM && error != -EFAULT && error != -ENOSPC && error != -EDQUOT;
}

void kv_devices_note_error(struct kv_devices *devices, const struct kv_io *io, int error)
{
	struct kv_device *device = &devices->device[io->device];
	unsigned suppressed;

	if (is_device_fault(error))
		atomic_store_explicit(&device->failed, true, memory_order_relaxed);
	if (devices->stats)
		kv_stat_add(&devices->stats->io_errors, 1);
	if (!kv_log_allowed(&device->limit, &suppressed))
		return;
	kv_log_error("device",
		"%s failed device=%s offset=%llu length=%u error=\"%s\" suppressed=%u",
		io->length == 0           ? "flush"
		: io->kind == KV_IO_WRITE ? "write"
					  : "read",
		device->path, (unsigned long long)io->offset, io->length, strerror(-error),
		suppressed);
}
