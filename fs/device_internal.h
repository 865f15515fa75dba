/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What device.c (open devices), device_format.c, superblock.c and ring.c share.
 */
#ifndef KVFS_FS_DEVICE_INTERNAL_H
#define KVFS_FS_DEVICE_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fs/device.h"
#include "fs/error.h"
#include "fs/log.h"

#define KV_DEVICE_SIZE_MIN (UINT64_C(64) << 20)
#define KV_SUPERBLOCK_COPIES 2u

/* The fields of a superblock; device.h draws the layout. */
struct kv_superblock {
	uint32_t format;
	uint32_t number;
	uint8_t uuid[16];
	uint64_t size;
	uint64_t data_start;
	uint32_t count;
};

/* Fills the KV_BLOCK_SIZE bytes at ret_block. */
void kv_superblock_encode(const struct kv_superblock *superblock, void *ret_block);
/*
 * Checks the KV_BLOCK_SIZE bytes at BLOCK. -ENODATA: not a superblock at all; -EUCLEAN: a damaged
 * one; -EPROTO: whole, but of another format.
 */
int kv_superblock_decode(const void *block, struct kv_superblock *ret_superblock);

/* What the KV_DEVICE_DATA_START bytes at AREA hold, in words: NULL if they are blank. */
const char *kv_superblock_describe(const uint8_t *area);

struct kv_device {
	char *path;
	int handle;
	uint64_t size;
	uint64_t blocks;
	atomic_bool failed;
	/* Writes completed, and that number at the start of the last flush that succeeded. */
	_Atomic uint64_t written;
	_Atomic uint64_t flushed;
	struct kv_log_limit limit;
};

struct kv_devices {
	const struct kv_io_ops *ops;
	struct kv_stats *stats; /* may be NULL */
	unsigned count;
	int handles[KV_DEVICES_MAX]; /* those of the devices, as queue_new takes them */
	struct kv_device device[];
};

/* Counts, logs (rate-limited) and, where it is the device's fault, remembers the failure of IO. */
void kv_devices_note_error(struct kv_devices *devices, const struct kv_io *io, int error);
void kv_devices_note_write(struct kv_devices *devices, unsigned number);

/* One line for the user: why PATH could not be opened. Returns R. */
int kv_device_open_error(const struct kv_error *error, const char *path, int r);

#endif
