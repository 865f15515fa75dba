/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests that wait for something another process does: parked here, they hold no worker thread.
 *
 * One thread looks at them: when it is told that something happened to their key (kv_parking_wake),
 * when their time is over, and when the kernel interrupts them. Each look says whether the request
 * is answered now or stays. A request is looked at as soon as it has been parked, so that nothing
 * is missed in between.
 *
 * Ownership: kv_parking_add takes a request over. Locks: the room's is a leaf; looks and answers
 * are called without it, one at a time, and should not wait for long. Threads: any may park and
 * wake.
 */
#ifndef KVFS_FS_PARKING_H
#define KVFS_FS_PARKING_H

#include <bsd/sys/queue.h>
#include <stdbool.h>
#include <stdint.h>

#include "fs/daemon.h"
#include "fs/tree.h"

/* All that may be parked at once; who comes later is refused. */
#define KV_PARKED_MAX 16384u

enum kv_parked_why {
	KV_PARKED_WOKEN,
	KV_PARKED_INTERRUPTED, /* a signal came: looked at again and again from now on */
	KV_PARKED_LATE,        /* its time is over */
	KV_PARKED_ENDING,      /* the mount ends: must be answered */
};

#define KV_PARKED_STAYS 1

/* First member of what the look needs. */
struct kv_parked {
	/* Set by the caller: */
	fuse_req_t req;
	uint64_t key;    /* kv_parking_key */
	int64_t wait_ms; /* negative: no limit */
	/* Both are called on the room's thread: what is to be answered now (0 or negative errno),
	 * or KV_PARKED_STAYS; and the answer, which frees PARKED. */
	int (*look)(struct kv_daemon *daemon, struct kv_parked *parked, enum kv_parked_why why);
	void (*answer)(struct kv_daemon *daemon, struct kv_parked *parked, int result);

	/* The room's: */
	struct kv_parking *parking;
	TAILQ_ENTRY(kv_parked) by_key;
	STAILQ_ENTRY(kv_parked) ready;
	RB_ENTRY(kv_parked) by_due;
	int64_t due_ms; /* next look, if nothing happens before */
	int64_t end_ms;
	bool is_parked;
	bool is_ready;
	bool is_timed;
	bool interrupted;
};

/* What requests of INO wait for. */
enum kv_parking_kind {
	KV_PARKING_PUBLISH,
	KV_PARKING_LOCK,
};

static inline uint64_t kv_parking_key(uint64_t ino, enum kv_parking_kind kind)
{
	return ino << 1 | kind;
}

int kv_parking_new(struct kv_daemon *daemon, struct kv_parking **ret_parking);
/* Answers all that is parked. After the last request; kv_parking_wake does nothing from now on.
 * NULL is allowed. */
void kv_parking_stop(struct kv_parking *parking);
/* After kv_parking_stop, when nobody calls kv_parking_wake any more. NULL is allowed. Returns NULL.
 */
struct kv_parking *kv_parking_free(struct kv_parking *parking);

/* -ENOBUFS: there are too many; PARKED remains the caller's. */
int kv_parking_add(struct kv_parking *parking, struct kv_parked *parked);

/* Something happened to KEY: all that wait for it are looked at, in the order in which they came.
 */
void kv_parking_wake(struct kv_parking *parking, uint64_t key);

/* How many are parked. */
unsigned kv_parking_count(struct kv_parking *parking);

#endif
