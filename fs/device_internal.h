/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What device.c (open devices), device_format.c, superblock.c and ring.c share.
 */
#ifndef KVFS_FS_DEVICE_INTERNAL_H
#define KVFS_FS_DEVICE_INTERNAL_H

#include <bsd/sys/queue.h>
#include <pthread.h>
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
	_Atomic int64_t flush_since_ms; /* of the flush under way, or 0 */
	_Atomic int64_t answered_ms;    /* when a transfer or a flush last ended */
	_Atomic int64_t oldest_ms;      /* since when something is without an answer, or 0 */
	struct kv_log_limit limit;
};

LIST_HEAD(kv_ring_list, kv_ring);

struct kv_devices {
	const struct kv_io_ops *ops;
	struct kv_stats *stats; /* may be NULL */
	unsigned count;
	int handles[KV_DEVICES_MAX]; /* those of the devices, as queue_new takes them */
	_Atomic uint64_t slow;       /* bit N: device N; so for the next */
	_Atomic uint64_t hung;
	_Atomic bool closing;
	int64_t excused_ms; /* the watch's: what began before that counts from then */
	pthread_mutex_t rings_lock;
	struct kv_ring_list rings;
	struct kv_device device[];
};

/* Counts, logs (rate-limited) and, where it is the device's fault, remembers the failure of IO. */
void kv_devices_note_error(struct kv_devices *devices, const struct kv_io *io, int error);
void kv_devices_note_write(struct kv_devices *devices, unsigned number);

/* Makes ret_oldest_ms[N] the time since which a transfer of device N is under way, if that is
 * earlier than what is there, or if that is 0. */
void kv_rings_oldest(struct kv_devices *devices, int64_t *ret_oldest_ms);

/*
 * After an attempt to open a device that ended with R: true, a moment later, if it is to be tried
 * again, because a killed daemon's rings may hold it. WAITED_MS is 0 before the first one.
 */
bool kv_device_try_again(int r, unsigned *waited_ms);
/* Opens what is there, with that patience. */
int kv_device_open(
	const struct kv_io_ops *ops, const char *path, int *ret_handle, uint64_t *ret_size);
/* One line for the user: why PATH could not be opened. Returns R. */
int kv_device_open_error(const struct kv_error *error, const char *path, int r);

#endif
