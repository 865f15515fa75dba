/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checking and repairing a store that is not mounted: its superblocks, its index and, if wanted,
 * every byte of its data. Without `repair` nothing in the store changes.
 *
 * A repair makes a new index beside the old one (index/repair.h), checks it, and only then puts it
 * in its place: what interrupts it leaves the store as it was. Superblocks of which one copy is
 * whole, or whose damage shows that they are the store's, are written anew.
 *
 * Threads: the callbacks come from several, one at a time. Errors: negative errno with one line.
 */
#ifndef KVFS_FS_STORE_CHECK_H
#define KVFS_FS_STORE_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/check.h"

struct kv_store_progress {
	uint64_t files; /* read to their end */
	uint64_t bytes;
	uint64_t total_files;
	uint64_t total_bytes;
};

struct kv_store_check {
	const char *path;
	bool repair;
	bool data; /* read all, and compare the checksums */
	struct kv_check_to found;
	struct kv_check_to dropped; /* what a repair leaves out */
	void (*progress)(void *arg, const struct kv_store_progress *progress); /* may be NULL */
	void *arg;
};

struct kv_store_check_result {
	uint64_t violations;
	uint64_t dropped; /* files and directories that the repair left out */
	bool left;        /* some of them are there still */
	const char *hint; /* what to do about those; NULL: nothing to say */
	struct kv_store_progress read;
};

/* An error: it could not be checked at all, or (with ret_result written) not be repaired. */
int kv_store_check(const struct kv_store_check *check, struct kv_store_check_result *ret_result,
	char *ret_error, size_t error_size);

#endif
