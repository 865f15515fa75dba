/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FUSE passthrough: registering backing files with the kernel (Linux 6.9, FUSE protocol 7.40).
 *
 * The ids live in the connection and hold the file open in the kernel, so the daemon needs no
 * descriptor. Threads: any. Source of the ABI: include/uapi/linux/fuse.h.
 */
#ifndef KVFS_FS_PASSTHROUGH_H
#define KVFS_FS_PASSTHROUGH_H

/* SESSION_FD: the connection's /dev/fuse. An id > 0, or negative errno (-EPERM: not CAP_SYS_ADMIN;
 * -ELOOP: a stacked file). */
int kv_passthrough_open(int session_fd, int fd);
void kv_passthrough_close(int session_fd, int backing_id);

#endif
