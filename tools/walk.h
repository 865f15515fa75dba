/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every regular file that a path names: itself, or all below it.
 *
 * Works at any depth: no recursion, and paths longer than the kernel takes are walked in steps.
 * Symlinks are followed where the user named them, and nowhere else. A directory must be on a kvfs
 * mount, and what is mounted below it is left out. Single-threaded.
 */
#ifndef KVFS_TOOLS_WALK_H
#define KVFS_TOOLS_WALK_H

#include <stdbool.h>

struct kv_walk_file {
	int directory;    /* open for reading during the call */
	const char *name; /* in it */
	const char *path; /* for messages */
	bool named;       /* by the user, not found in a directory */
	int error;        /* 0, or the negative errno why PATH, a directory, could not be listed */
};

/* Calls FILE for each file of PATH and for each directory that cannot be listed. Returns 0, or the
 * negative errno of PATH itself: -EINVAL if it is neither a file nor a directory, -ENOTTY if it is
 * a directory that is not on a kvfs mount. */
int kv_walk(const char *path, void (*file)(void *arg, const struct kv_walk_file *file), void *arg);

#endif
