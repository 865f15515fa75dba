/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who was just answered ESTALE for wanting to write.
 *
 * The VFS repeats a call that got ESTALE once, beginning with LOOKUP, and hands a second ESTALE to
 * the user. By this table LOOKUP knows who comes back to write, and gives it a node for that even
 * if the name has become another file's meanwhile. Best effort: fixed size, by thread, newest wins.
 * Threads: any.
 */
#ifndef KVFS_FS_RETRY_H
#define KVFS_FS_RETRY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct kv_retries;

struct kv_retries *kv_retries_new(void);
/* NULL is allowed. Returns NULL. */
struct kv_retries *kv_retries_free(struct kv_retries *retries);

/* Thread TID, which wants to write, is about to be answered ESTALE, at NOW_NS. */
void kv_retry_note(struct kv_retries *retries, pid_t tid, int64_t now_ns);
/* Whether TID is on its second try, as far as that can be told. */
bool kv_retry_pending(struct kv_retries *retries, pid_t tid, int64_t now_ns);
/* As above, and forgets it: the call has come through. */
bool kv_retry_take(struct kv_retries *retries, pid_t tid, int64_t now_ns);

#endif
