/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications to the kernel, from a thread of their own.
 *
 * An entry's invalidation takes the directory's lock in the kernel; a request handler that
 * waited for it could wait for itself. So handlers queue it here, together with the reply that must
 * not leave before it. Threads: any may queue.
 */
#ifndef KVFS_FS_NOTIFY_H
#define KVFS_FS_NOTIFY_H

#include <stddef.h>
#include <stdint.h>

#include "fs/daemon.h"

int kv_notify_new(struct kv_daemon *daemon, struct kv_notify **ret_notify);
/* Sends what is queued, stops the thread. NULL is allowed. Returns NULL. */
struct kv_notify *kv_notify_free(struct kv_notify *notify);

/* Forgets the kernel's entry NAME in the directory with nodeid DIRECTORY. -ENOMEM. */
int kv_notify_entry(struct kv_notify *notify, uint64_t directory, const char *name, size_t length);

/* Answers REQ with ERROR (0 or errno of either sign) after everything queued so far. REQ is
 * answered in any case. */
void kv_notify_then_reply(struct kv_notify *notify, fuse_req_t req, int error);

/* The same for an ioctl that has succeeded, with SIZE bytes of ANSWER. */
void kv_notify_then_reply_ioctl(
	struct kv_notify *notify, fuse_req_t req, const void *answer, size_t size);

/* Calls kv_node_expire for NODEID of INO when its time is over. -ENOMEM. */
int kv_notify_expire(struct kv_notify *notify, uint64_t ino, uint64_t nodeid);

/* Makes the kernel ask for the attributes of NODEID again. */
int kv_notify_attributes(struct kv_notify *notify, uint64_t nodeid);

/* Drops the kernel's own pages of NODEID. */
int kv_notify_pages(struct kv_notify *notify, uint64_t nodeid);

#endif
