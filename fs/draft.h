/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A draft: what is known about the unpublished content of a writing node, apart from the content.
 *
 * Two things decide at its end whether it may be published. Who changed it: a process that is ended
 * by a signal leaves it unfinished (P6). And which of its bytes are missing because a write failed:
 * published, they would read as a hole, or as what was there before.
 *
 * Plain memory, owned by its node and guarded by the lock of the file's nodes. No limits but that
 * of the processes it can tell apart; with more, each counts as having changed it.
 */
#ifndef KVFS_FS_DRAFT_H
#define KVFS_FS_DRAFT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define KV_DRAFT_PROCESSES 4u
#define KV_DRAFT_THREADS 8u

struct kv_draft {
	/* Who changed it. */
	pid_t processes[KV_DRAFT_PROCESSES];
	unsigned process_count;
	bool many;                       /* more than there is room for */
	pid_t threads[KV_DRAFT_THREADS]; /* of those processes: spares a look into /proc */
	bool abandoned; /* its opener was killed, and nobody who changed it has closed it since */

	/* A process that changed it after closing a descriptor: its end may come without a FLUSH.
	 */
	int watch; /* -1: none */
	pid_t watched;

	/* Bytes that are missing. */
	int error; /* of the first write that failed; 0: none is missing */
	uint64_t missing_from;
	uint64_t missing_to;
};

void kv_draft_init(struct kv_draft *draft);
void kv_draft_done(struct kv_draft *draft);
/* It was published: what comes now is a new one. */
void kv_draft_reset(struct kv_draft *draft);

/* Thread TID has changed it; TID 0 is a caller that cannot be seen. PROCESS is the thread's where
 * the caller knows it, else 0. */
void kv_draft_changed_by(struct kv_draft *draft, pid_t tid, pid_t process);
bool kv_draft_was_changed_by(const struct kv_draft *draft, pid_t process);

/* The process of thread TID may end unseen from now on: WATCH is for kv_caller_end_of. */
void kv_draft_watch(struct kv_draft *draft, pid_t tid);
/* A change of the bytes [FROM, TO) failed with ERROR, negative errno. Ignored where the content is
 * as good as before: the call itself was wrong. */
void kv_draft_failed(struct kv_draft *draft, uint64_t from, uint64_t to, int error);
/* The bytes [FROM, TO) were written. */
void kv_draft_written(struct kv_draft *draft, uint64_t from, uint64_t to);
/* Its size was set to SIZE: what was missing behind that is not wanted any more. */
void kv_draft_cut(struct kv_draft *draft, uint64_t size);

#endif
