/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of a store's check share. store_check.c is its frame, store_check_device.c looks
 * at superblocks, store_check_data.c reads the data.
 */
#ifndef KVFS_FS_STORE_CHECK_INTERNAL_H
#define KVFS_FS_STORE_CHECK_INTERNAL_H

#include "fs/device_internal.h"
#include "fs/store_check.h"
#include "fs/store_internal.h"
#include "index/index.h"

enum kv_copy_state {
	KV_COPY_WHOLE,
	KV_COPY_DAMAGED,
	KV_COPY_ABSENT, /* nothing there tells that it ever was one */
	KV_COPY_UNREADABLE,
};

/* A device as it is checked. */
struct kv_checked_device {
	int fd; /* -1: it cannot be used */
	uint64_t size;
	enum kv_copy_state copies[KV_SUPERBLOCK_COPIES];
	struct kv_superblock superblock; /* of the first whole copy */
	bool known;                      /* there is one */
	bool mendable;                   /* its damaged copies can be written anew */
	bool damaged;
	bool foreign; /* whole, but of another format */
};

struct kv_checking {
	const struct kv_store_check *check;
	struct kv_store_check_result *result;
	struct kv_error error;
	char *path; /* absolute */
	int directory_fd;
	int lock_fd;
	struct kv_store_devices list;
	struct kv_checked_device devices[KV_DEVICES_MAX];
	struct kv_index *index; /* NULL: it cannot be read */
	bool index_damaged;
	uint64_t *bad; /* files with wrong bytes */
	size_t bad_count;
	size_t bad_capacity;
};

/* Tells and counts a violation. */
void kv_checking_tell(struct kv_checking *checking, const struct kv_violation *violation);
/* The same with a text alone. */
void kv_checking_say(struct kv_checking *checking, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
/* File INO has wrong bytes. */
int kv_checking_add_bad(struct kv_checking *checking, uint64_t ino);

/* Opens the devices, and looks at their superblocks; identifies them if there is an index. */
int kv_checking_devices(struct kv_checking *checking);
/* Compares the devices with what the index says; one that is not the store's own is closed. */
int kv_checking_identify(struct kv_checking *checking);
/* Writes damaged superblocks anew. */
int kv_checking_mend_devices(struct kv_checking *checking);
/* Reads all data, and compares the checksums. With a device missing, no file is said to be bad. */
int kv_checking_data(struct kv_checking *checking);

#endif
