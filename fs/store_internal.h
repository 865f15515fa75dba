/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What store.c (open) and store_format.c share: the names in a store, its lock and its list of
 * devices.
 */
#ifndef KVFS_FS_STORE_INTERNAL_H
#define KVFS_FS_STORE_INTERNAL_H

#include <limits.h>
#include <stdbool.h>

#include "fs/device.h"
#include "fs/error.h"

#define KV_STORE_LOCK "lock"
#define KV_STORE_DEVICES "devices"
#define KV_STORE_INDEX "index"
#define KV_STORE_DATA "data0"
/* What a format builds beside the old, until it is renamed into place. */
#define KV_STORE_NEW_SUFFIX ".new"

/*
 * Opens the directory PATH, which must belong to the caller (or root) and be writable by its owner
 * alone. Returns the descriptor.
 */
int kv_store_open_directory(const struct kv_error *error, const char *path);

/* Takes the lock NAME in DIRECTORY_FD, made if CREATE, and notes our pid there. Returns its
 * descriptor. */
int kv_store_take_lock(
	const struct kv_error *error, int directory_fd, const char *path, bool create);

/* The same, but waits for a holder that has said, or soon says, that it is closing. QUIET: without
 * a note in it, or any other byte that changes. */
int kv_store_take_lock_patiently(const struct kv_error *error, int directory_fd, const char *path,
	unsigned closing_wait_ms, bool quiet);

/* The paths in the `devices` file. Zeroed at first. */
struct kv_store_devices {
	unsigned count;
	char *paths[KV_DEVICES_MAX];
};
int kv_store_read_devices(const struct kv_error *error, int directory_fd, const char *path,
	struct kv_store_devices *ret_list);
void kv_store_devices_done(struct kv_store_devices *list);

/* LMDB opens its files by name: what is there must be plain files, not links to others' files. */
int kv_store_check_index_files(const struct kv_error *error, int directory_fd, const char *path);

/* Makes NAME_NEW to NAME; what was NAME, if there was anything, becomes NAME_NEW. */
int kv_store_swap(int directory_fd, const char *name, const char *name_new);
/* Removes a directory of plain files, as the index is one. 0 if there is none. */
int kv_store_remove_directory(int directory_fd, const char *name);

/*
 * The absolute path of device TEXT, links resolved; a name without a slash is in STORE (absolute).
 * It need not exist. The caller frees ret_path.
 */
int kv_store_device_path(const char *store, const char *text, char **ret_path);

#endif
