/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replies: every handler answers through these.
 *
 * A reply that fails has already freed the request, and the caller would hang for ever (libfuse
 * send_reply_iov); so any failure but ENOENT (the caller was interrupted) ends the mount. Replies
 * are made only from memory that cannot vanish: daemon buffers, never mappings of objects.
 */
#ifndef KVFS_FS_REPLY_H
#define KVFS_FS_REPLY_H

#include "fs/daemon.h"
#include "fs/node.h"

/* ERROR: 0, or errno of either sign. */
void kv_reply_error(fuse_req_t req, int error);

/* For the fuse_reply_* calls made elsewhere: RESULT is what one returned; DAEMON was read from the
 * request before it. */
void kv_reply_check(struct kv_daemon *daemon, int result);

/* A directory entry for NODE, whose lookup is taken back if the reply cannot be delivered. SEEN
 * spares another look, and may be NULL. */
void kv_reply_entry(
	fuse_req_t req, struct kv_node *node, const struct kv_seen *seen, bool cacheable);
/* As above, without a reply: fills in ret_entry. 0 or negative errno. */
int kv_entry_fill(struct kv_daemon *daemon, struct kv_node *node, const struct kv_seen *seen,
	bool cacheable, struct fuse_entry_param *ret_entry);
void kv_reply_attr(fuse_req_t req, struct kv_node *node);

/* What the kernel shall see of NODE. 0 or negative errno. */
int kv_node_stat(struct kv_daemon *daemon, struct kv_node *node, struct stat *ret_stat);

#endif
