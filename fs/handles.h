/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handles of nodes that are being written, over restarts: the kernel goes on using the numbers that
 * a daemon before this one gave out.
 */
#ifndef KVFS_FS_HANDLES_H
#define KVFS_FS_HANDLES_H

#include "fs/handle.h"

/* HANDLE gets its number; from now on it outlives this process, with a takeover. */
void kv_handles_note(struct kv_daemon *daemon, struct kv_handle *handle);

/* After the nodes: makes the handles that the daemons before this one gave out. Those for which
 * there is no memory are lost. */
void kv_handles_resume(struct kv_daemon *daemon);
void kv_handles_done(struct kv_daemon *daemon);
/* True if NUMBER is of a daemon before this one. */
bool kv_handles_is_old(const struct kv_daemon *daemon, uint64_t number);
/* The handle that is meant by it, or NULL. LAST: nobody will ask for it again. */
struct kv_handle *kv_handles_find(struct kv_daemon *daemon, uint64_t number, bool last);
/* The one that the request at hand was given when it came for the first time, or NULL. */
struct kv_handle *kv_handles_given(struct kv_daemon *daemon);

#endif
