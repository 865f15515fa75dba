/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The supervisor of `-o restart`: mounts, holds the connection and the DRAM tier, and starts
 * another daemon when one has been killed. Its callers block meanwhile.
 */
#ifndef KVFS_FS_SUPERVISE_H
#define KVFS_FS_SUPERVISE_H

#include <stdbool.h>
#include <stdint.h>

#include "fs/log.h"

/* The exit status of a daemon that wants to be followed by another; it gets SIGUSR1, which it has
 * blocked, when it is time. */
#define KV_SUPERVISE_NEXT 75

/* What the supervisor hands to a daemon. */
struct kv_served {
	int fuse_fd;  /* the connection; -1: there is no supervisor */
	int state_fd; /* see takeover.h */
	int dram_fd;  /* see kv_dram_mount */
	int ready_fd; /* of who waits for the mount in the foreground, or -1 */
};

/* True if this process was started by a supervisor. */
bool kv_supervise_inherit(struct kv_served *ret_served);

struct kv_supervise {
	const char *store;     /* absolute */
	const char *directory; /* absolute */
	uint64_t dram_bytes;   /* budget of the DRAM tier */
	bool allow_other;
	bool foreground;
	enum kv_log_level log_level;
	int ready_fd;            /* or -1 */
	const char *const *argv; /* the daemon's; its program is this process's own */
};

/* Runs until the mount ends. Returns the exit status. */
int kv_supervise(const struct kv_supervise *supervise);

/* Ends the mount on DIRECTORY if FUSE_FD still is its connection. */
void kv_supervise_unmount(const char *directory, int fuse_fd);

#endif
