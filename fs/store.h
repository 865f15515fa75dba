/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store: the directory that `kvfs format` makes.
 *
 *	STORE/lock      held (flock) by whoever formats or mounts it
 *	STORE/devices   a line a device, in order: an absolute path, or a name inside STORE
 *	STORE/index/    LMDB
 *	STORE/data0     the embedded device, when no --device was given
 *	STORE/gpu.sock  where GPU helpers connect while it is mounted (gpu_protocol.h)
 *
 * STORE is 0700, belongs to the user who formatted it, and is opened once; nothing in it is reached
 *through a symlink. Errors come as negative errno with one line for the user: what is wrong and
 *what to do. Threads: open and close on one thread; the members may then be used by any.
 */
#ifndef KVFS_FS_STORE_H
#define KVFS_FS_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fs/device.h"
#include "index/index.h"

struct kv_store_format {
	const struct kv_io_ops *ops; /* NULL: the real ones */
	const char *path;
	const char *const *devices; /* NULL: the embedded data0 */
	unsigned device_count;
	uint64_t size_bytes; /* of data0, or of device files to be created; 0: half of the free
				space for data0 */
	bool force;          /* replace a store that is there */
};
/* On failure nothing that was there before has changed. */
int kv_store_format(const struct kv_store_format *format, char *ret_error, size_t error_size);

struct kv_store_open {
	const struct kv_io_ops *ops; /* NULL: the real ones */
	const char *path;
	uint64_t quota_bytes; /* 0: none */
	struct kv_stats *stats;
	/* How long to wait for a daemon that has said kv_store_closing and still writes back; 0:
	 * not at all. */
	unsigned closing_wait_ms;
	void *journal; /* for the index, or NULL */
};
struct kv_store {
	char *path; /* absolute */
	struct kv_index *index;
	struct kv_devices *devices;
	int directory_fd;
	int lock_fd;
};
int kv_store_open(const struct kv_store_open *open, struct kv_store **ret_store, char *ret_error,
	size_t error_size);
/* Notes in the lock file that STORE is about to be closed: who opens it next may wait for that. */
void kv_store_closing(struct kv_store *store);
/* Commits and closes. NULL is allowed. Returns NULL. */
struct kv_store *kv_store_close(struct kv_store *store);

#endif
