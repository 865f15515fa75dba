/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The virtual attributes by which users say what is kept: pins, quotas, retiring.
 *
 *   user.kvfs.pin          1 or 0. Set by the owner or root; removing it unpins.
 *   user.kvfs.quota        of a directory that carries one: its bytes. Set (512M, 8G; 0 or none
 *                          takes it away) and removed by root.
 *   user.kvfs.quota.usage  lines "key value" of the domain in force: directory_ino, own, limit,
 *                          used, promised, pinned, pin_limit (bytes), inodes. Read only.
 *   user.kvfs.lease        milliseconds that a look-up still keeps the file. Read only.
 *   user.kvfs.retire       set on a directory: retires it; a value is the fingerprint that spares
 *                          it, and that the new one gets. Cannot be read. The kernel forgets the
 *                          old directory a moment after the answer; kvfs retire waits for that.
 *
 * user.kvfs.fingerprint is a plain attribute. Thread-safe.
 */
#ifndef KVFS_FS_KEEP_H
#define KVFS_FS_KEEP_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "fs/daemon.h"
#include "fs/node.h"

/* Whether NAME is one of them. */
bool kv_keep_has(const char *name);
/* Whether the caller may read the attribute: figures about everybody's files are for root, the
 * mount's user and the owner of its root. */
bool kv_keep_may_see(fuse_req_t req, const char *name);
/* These two answer REQ. */
void kv_keep_set(
	fuse_req_t req, struct kv_node *node, const char *name, const char *value, size_t size);
void kv_keep_remove(fuse_req_t req, struct kv_node *node, const char *name);
/* The value for INO as malloc'ed text, and its length; -ENODATA if it has none. */
ssize_t kv_keep_get(struct kv_daemon *daemon, uint64_t ino, const char *name, char **ret_text);

#endif
