/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who asks, and how they end: FUSE requests carry the thread's id; files are written by processes.
 *
 * A daemon in another PID namespace sees 0 for callers outside it: all of them then count as one
 * process, and how it ends is not known. Threads: any.
 */
#ifndef KVFS_FS_CALLER_H
#define KVFS_FS_CALLER_H

#include <stdbool.h>
#include <sys/types.h>

/* The process (thread group) of thread TID; TID itself if it is gone; 0 for 0. */
pid_t kv_caller_process(pid_t tid);

enum kv_end {
	KV_END_NONE,    /* it lives: what it closes, it closes by itself */
	KV_END_EXIT,    /* it is exiting, or has exited, by its own will */
	KV_END_KILLED,  /* a signal ended it */
	KV_END_UNKNOWN, /* that cannot be seen: another PID namespace, no /proc, no permission */
};

/*
 * How thread TID is ending, while a request of its own waits for us. The kernel shows the exit code
 * to whom it lets trace the thread: the same user, or CAP_SYS_PTRACE.
 */
enum kv_end kv_caller_end(pid_t tid);

/* The same from the text of /proc/TID/stat. */
enum kv_end kv_end_of_stat(const char *text);

/*
 * A descriptor by which the end of PROCESS can be told later, even when it has been reaped (that
 * needs Linux 6.15). Negative errno.
 */
int kv_caller_watch(pid_t process);
enum kv_end kv_caller_end_of(int watch, pid_t process);

/* Whether a signal that ends thread TID is on its way to it: it waits in vain for an answer. */
bool kv_caller_is_dying(pid_t tid);

/* The same from the text of /proc/TID/status. */
bool kv_is_dying_in_status(const char *text);

#endif
