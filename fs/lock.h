/* SPDX-License-Identifier: Apache-2.0 */
/*
 * File locks (fcntl and flock) by inode number: the nodes of a file are several inodes to the
 * kernel, whose own locks would not exclude each other.
 *
 * Byte ranges (fcntl) are merged and split as POSIX has it, and a new one replaces what its owner
 * had there; flock is one lock for the whole file, and the two kinds do not see each other. There
 * is no look for deadlocks (EDEADLK). An owner is the kernel's name for a process's table of
 * descriptors, or for an open file; a handle is what the lock was taken through.
 *
 * Knows neither FUSE nor waiting: who meets a conflict tries again when a release says so. Locks:
 * one mutex, a leaf; nothing waits under it. Threads: any. At most KV_LOCKS_MAX locks a table.
 */
#ifndef KVFS_FS_LOCK_H
#define KVFS_FS_LOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define KV_LOCKS_MAX 16384u
#define KV_LOCK_END_MAX ((uint64_t)INT64_MAX)

struct kv_locks;

struct kv_lock {
	uint64_t ino;
	uint64_t owner;
	const void *handle;
	uint64_t start; /* bytes; both ends belong to the range */
	uint64_t end;
	pid_t pid;  /* for F_GETLK */
	bool whole; /* flock */
	bool exclusive;
	bool unsure; /* HANDLE may have been closed already: its RELEASE may be on its way */
};

struct kv_locks *kv_locks_new(void);
/* NULL is allowed. Returns NULL. */
struct kv_locks *kv_locks_free(struct kv_locks *locks);

/*
 * Takes LOCK. 0; -EAGAIN if another owner has a lock that excludes it, which ret_conflict then
 * describes; -ENOLCK if there are too many, -ENOMEM. flock gives up what it had first, as on Linux.
 */
int kv_lock_take(struct kv_locks *locks, const struct kv_lock *lock, struct kv_lock *ret_conflict);

/* Whether LOCK could be taken: false, or true and what excludes it. */
bool kv_lock_conflicts(
	struct kv_locks *locks, const struct kv_lock *lock, struct kv_lock *ret_conflict);

/*
 * These give up locks of LOCK's kind: those of its owner in its range; of OWNER on INO (byte ranges
 * only); all that were taken through HANDLE. ret_released: others may try again. -ENOLCK, -ENOMEM:
 * a range would have to be split.
 */
int kv_lock_give_up(struct kv_locks *locks, const struct kv_lock *lock, bool *ret_released);
bool kv_lock_owner_closed(struct kv_locks *locks, uint64_t ino, uint64_t owner);
bool kv_lock_handle_closed(struct kv_locks *locks, uint64_t ino, const void *handle);

/* A descriptor of HANDLE was closed: what was taken through it is unsure from now on. */
void kv_lock_handle_closing(struct kv_locks *locks, uint64_t ino, const void *handle);

unsigned kv_locks_count(struct kv_locks *locks);

#endif
