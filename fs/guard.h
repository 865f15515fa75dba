/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The guard: a small process that ends the FUSE connection when the daemon's main thread dies.
 *
 * A daemon that is killed normally takes its connection along, since its descriptors are closed.
 * Not when one of its threads is inside the kernel waiting for a directory's lock (an
 * invalidation), which a client holds who waits for the daemon: then neither ever ends. The guard
 * breaks that circle by aborting the connection, so that a dead daemon never leaves a client
 * hanging.
 *
 * Call all of it on the main thread: new before there are other threads, end on an orderly way out.
 */
#ifndef KVFS_FS_GUARD_H
#define KVFS_FS_GUARD_H

struct kv_guard;

/* Starts the process. Negative errno. */
int kv_guard_new(struct kv_guard **ret_guard);
/* From now on the connection of the mount with this device number is aborted if this thread dies.
 */
void kv_guard_arm(struct kv_guard *guard, unsigned minor_number);
/* Ends the process. NULL is allowed. Returns NULL. */
struct kv_guard *kv_guard_free(struct kv_guard *guard);

#endif
