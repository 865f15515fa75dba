/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every part of kvfs shares: the sizes of the store's units, clean-up attributes, small
 * arithmetic, and the plain values that cross module borders.
 *
 * Header only; no state. Nothing here allocates or blocks.
 */
#ifndef KVFS_FS_BASE_H
#define KVFS_FS_BASE_H

#include <assert.h>
#include <endian.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The unit of allocation on a device and of st_blocks; also the alignment of all device I/O. */
#define KV_BLOCK_SIZE 4096u
#define KV_BLOCK_SHIFT 12u
/* The unit of checksums, of copy-on-write and of residency in the DRAM tier. */
#define KV_CHUNK_SIZE (1u << 20)
#define KV_CHUNK_SHIFT 20u
#define KV_CHUNK_BLOCKS (KV_CHUNK_SIZE / KV_BLOCK_SIZE)
/* Longest name of a directory entry, in bytes; the kernel's own limit for FUSE is 1024. */
#define KV_NAME_MAX 1023u
/* Most devices in one store: the device number fits one byte with room to spare. */
#define KV_DEVICES_MAX 64u
/* Largest file: chunk numbers fit 32 bits (4 PiB). */
#define KV_FILE_SIZE_MAX ((uint64_t)UINT32_MAX << KV_CHUNK_SHIFT)
#define KV_ROOT_INO UINT64_C(1)

/*
 * A run of device blocks that holds a run of blocks of one chunk.
 * Invariant: block + count <= KV_CHUNK_BLOCKS, count > 0; an extent never crosses a chunk.
 */
struct kv_extent {
	uint64_t start;  /* first block on the device, in units of KV_BLOCK_SIZE */
	uint16_t device; /* number of the device in the store */
	uint16_t block;  /* first block within the chunk, 0..KV_CHUNK_BLOCKS-1 */
	uint32_t count;  /* blocks */
};

static inline uint64_t kv_min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static inline uint64_t kv_max_u64(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

/* UNIT must be a power of two. */
static inline uint64_t kv_round_up(uint64_t value, uint64_t unit)
{
	return (value + unit - 1) & ~(unit - 1);
}

static inline uint64_t kv_div_round_up(uint64_t value, uint64_t unit)
{
	return (value + unit - 1) / unit;
}

static inline int64_t kv_monotonic_ns(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t kv_monotonic_ms(void)
{
	return kv_monotonic_ns() / 1000000;
}

/* accept() has failed for want of something: who waits for it would be woken again at once. */
static inline bool kv_accept_lacks(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/* Little-endian fields in records; P needs no alignment. */
static inline uint16_t kv_get_le16(const void *p)
{
	uint16_t v;

	memcpy(&v, p, sizeof(v));
	return le16toh(v);
}

static inline uint32_t kv_get_le32(const void *p)
{
	uint32_t v;

	memcpy(&v, p, sizeof(v));
	return le32toh(v);
}

static inline uint64_t kv_get_le64(const void *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof(v));
	return le64toh(v);
}

static inline void kv_put_le16(void *p, uint16_t v)
{
	v = htole16(v);
	memcpy(p, &v, sizeof(v));
}

static inline void kv_put_le32(void *p, uint32_t v)
{
	v = htole32(v);
	memcpy(p, &v, sizeof(v));
}

static inline void kv_put_le64(void *p, uint64_t v)
{
	v = htole64(v);
	memcpy(p, &v, sizeof(v));
}

/* Big-endian: index keys, which LMDB compares bytewise. */
static inline uint64_t kv_get_be64(const void *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof(v));
	return be64toh(v);
}

static inline void kv_put_be64(void *p, uint64_t v)
{
	v = htobe64(v);
	memcpy(p, &v, sizeof(v));
}

/* Clean-up attributes: acquire and release stand in one function. */
static inline void kv_cleanup_free(void *p)
{
	free(*(void **)p);
}

static inline void kv_cleanup_fd(int *fd)
{
	int saved = errno;

	if (*fd >= 0)
		(void)close(*fd);
	*fd = -1;
	errno = saved;
}

static inline void kv_cleanup_unlock(pthread_mutex_t **lock)
{
	if (*lock)
		(void)pthread_mutex_unlock(*lock);
}

static inline pthread_mutex_t *kv_lock_acquire(pthread_mutex_t *lock)
{
	(void)pthread_mutex_lock(lock);
	return lock;
}

#define _cleanup_free_ __attribute__((cleanup(kv_cleanup_free)))
#define _cleanup_fd_ __attribute__((cleanup(kv_cleanup_fd)))
/* Holds LOCK until the end of the scope: KV_LOCKED(&file->lock); */
#define KV_LOCKED(lock)                                                                            \
	__attribute__((cleanup(kv_cleanup_unlock), unused)) pthread_mutex_t *kv_locked_ =          \
		kv_lock_acquire(lock)

static inline int kv_steal_fd(int *fd)
{
	int taken = *fd;

	*fd = -1;
	return taken;
}

#define kv_steal_ptr(p)                                                                            \
	({                                                                                         \
		__typeof__(*(p)) taken_ = *(p);                                                    \
		*(p) = NULL;                                                                       \
		taken_;                                                                            \
	})

#endif
