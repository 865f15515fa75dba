/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The way of replies to the kernel. Who waits for one that does not arrive waits for ever, so a
 * reply that is refused is tried again, and where that does not help an error is sent in its place.
 */
#ifndef KVFS_FS_SEND_H
#define KVFS_FS_SEND_H

#include <sys/uio.h>

#include "fs/daemon.h"

/*
 * writev(2) for libfuse's fuse_custom_io, ARG the daemon. ENOENT: the kernel knows nothing of what
 * was to be said, because nobody waits for it any more, or got EIO instead.
 */
ssize_t kv_send(int fd, struct iovec *iov, int count, void *arg);

/* Has SESSION, which is mounted, send its replies so. */
int kv_send_attach(struct fuse_session *session);

#endif
