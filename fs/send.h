/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The way of replies to the kernel. Who waits for one that does not arrive waits for ever, so a
 * reply that is refused is tried again, and where that does not help an error is sent in its place.
 */
#ifndef KVFS_FS_SEND_H
#define KVFS_FS_SEND_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "fs/daemon.h"

/*
 * writev(2) for libfuse's fuse_custom_io, ARG the daemon. ENOENT: the kernel knows nothing of what
 * was to be said, because nobody waits for it any more, or got EIO instead.
 */
ssize_t kv_send(int fd, struct iovec *iov, int count, void *arg);

/*
 * Whether requests of that kind end something that the kernel does not know any more then: an open
 * file, a node. They are sent once; when libfuse has no memory for one it is lost.
 */
bool kv_send_is_end(uint32_t opcode);
/*
 * Until the next call, a refusal for want of memory of request UNIQUE of this thread, which is such
 * an end, is not sent: 0 for none. Nobody but libfuse refuses one so, before it is handled at all.
 */
void kv_send_keep(uint64_t unique);
/* It was refused: the request is to be handled again. */
bool kv_send_was_kept(void);

/* Has SESSION, which is mounted, send its replies so. */
int kv_send_attach(struct fuse_session *session);

#endif
