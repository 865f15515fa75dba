/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who asks: FUSE requests carry the thread's id; files are written by processes.
 *
 * A daemon in another PID namespace sees 0 for callers outside it: all of them then count as one
 * process. Threads: any.
 */
#ifndef KVFS_FS_CALLER_H
#define KVFS_FS_CALLER_H

#include <sys/types.h>

/* The process (thread group) of thread TID; TID itself if it is gone; 0 for 0. */
pid_t kv_caller_process(pid_t tid);

#endif
