/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process that gives the kernel the daemon's notices, where another daemon may go on (-o
 * restart).
 *
 * The kernel takes the lock of a directory for it, or of a page. A client that holds that and waits
 * for an answer keeps who tells it waiting, and nothing ends that but the answer: not even a kill.
 * Were it a thread of the daemon, a daemon killed at that time would stay, with its locks, and the
 * next one, whose the answer is to give, could not begin. This process has the connection and
 * nothing else; left alone, it ends when the kernel lets it go.
 */
#ifndef KVFS_FS_TELLER_H
#define KVFS_FS_TELLER_H

#include <stddef.h>

struct kv_teller;

/* Starts the process. FUSE_FD stays the caller's. To be called before there are other threads, and
 * anything in memory that is not to outlive the caller. */
int kv_teller_new(int fuse_fd, struct kv_teller **ret_teller);
/* Ends the process. NULL is allowed. Returns NULL. */
struct kv_teller *kv_teller_free(struct kv_teller *teller);

/*
 * Has it write the notice MESSAGE, as the kernel wants it, and waits for that. The kernel's error;
 * -EPIPE: the process has died. One thread at a time.
 */
#define KV_TELLER_MESSAGE_MAX 2048u
int kv_teller_tell(struct kv_teller *teller, const void *message, size_t length);

#endif
