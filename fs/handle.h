/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An open file description of a regular file: what fi->fh of its requests points to.
 *
 * Made by OPEN or CREATE, freed by RELEASE, which the kernel sends last. Immutable in between, but
 * for its atomic mark; the node's lock guards what it points to.
 */
#ifndef KVFS_FS_HANDLE_H
#define KVFS_FS_HANDLE_H

#include "fs/daemon.h"
#include "fs/node.h"

struct kv_handle {
	struct kv_node *node;
	/* Published node: its version, opened by kv_version_open. NULL for writing nodes, whose
	 * version changes. */
	struct kv_version *version;
	struct kv_user *user;     /* who opened it; NULL: without limits */
	bool may_write;           /* opened for writing, or by CREATE: its close can publish */
	_Atomic bool flushed;     /* a descriptor of it was closed */
	struct kv_ticket *ticket; /* NULL, or what GPU helpers know it by; gpu.c's lock */
	uint32_t place;           /* of a writing node, with a takeover: its place there */
	uint64_t number;          /* what the kernel knows it by: see kv_takeover_tag */
};

#define KV_HANDLE_ADDRESS ((UINT64_C(1) << 48) - 1)

static inline struct kv_handle *kv_handle_of(const struct fuse_file_info *fi)
{
	return (struct kv_handle *)(uintptr_t)(fi->fh &
					       KV_HANDLE_ADDRESS); /* NOLINT: libfuse carries
								      pointers as integers */
}

#endif
