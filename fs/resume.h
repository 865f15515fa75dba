/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection as one daemon takes it over from another: requests are looked at as they are read
 * from the kernel, before libfuse sees them.
 *
 * Directories, symlinks and published files keep their nodeids. An open on an old node of a file is
 * answered ESTALE: the VFS looks the name up once more and finds a new node. Reads through old
 * handles go on. Old writers' content died with the old daemon: EIO.
 *
 * A planned end loses nothing: from kv_resume_drain on, requests that would begin a change are left
 * unanswered, for the next daemon to get; what was begun before is waited for.
 */
#ifndef KVFS_FS_RESUME_H
#define KVFS_FS_RESUME_H

#include "fs/daemon.h"

/* Makes SESSION use FD, which it will close, through these eyes. */
int kv_resume_attach(struct kv_daemon *daemon, struct fuse_session *session, int fd);
/* Before the first request: makes nodes of what the kernel knows. */
int kv_resume_nodes(struct kv_daemon *daemon);
/* Has the kernel forget names, and send again what the daemon before had not answered. */
int kv_resume_requests(struct kv_daemon *daemon);

/* Gives those backing files back that are old since AGE_MS: an open that the daemon before has
 * answered with one may be on its way yet. Returns how many are left for later. */
size_t kv_resume_release(struct kv_daemon *daemon, int64_t age_ms);

/*
 * Waits until nothing is being changed or written, for WAIT_MS at most, and makes everything
 * durable. 0: the next daemon may come; -EBUSY: files are open for writing still, and will be lost
 * to who writes them.
 */
int kv_resume_drain(struct kv_daemon *daemon, unsigned wait_ms);

#endif
