/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Request handlers: decode, call the index or the core, reply. One table, filled by seven files:
 * ops_name.c (the namespace), ops_attr.c (attributes), ops_open.c (handles), ops_file.c (content),
 * ops_dir.c (listing), ops_ioctl.c (what only kvfs has), ops_lock.c (locks). They add their
 * handlers to OPS.
 */
#ifndef KVFS_FS_OPS_H
#define KVFS_FS_OPS_H

#include <sys/stat.h>

#include "fs/daemon.h"
#include "fs/handle.h"
#include "fs/node.h"

void kv_ops_name(struct fuse_lowlevel_ops *ops);
void kv_ops_attr(struct fuse_lowlevel_ops *ops);
void kv_ops_file(struct fuse_lowlevel_ops *ops);
void kv_ops_open(struct fuse_lowlevel_ops *ops);
void kv_ops_dir(struct fuse_lowlevel_ops *ops);
void kv_ops_ioctl(struct fuse_lowlevel_ops *ops);
void kv_ops_lock(struct fuse_lowlevel_ops *ops);

/*
 * Completes MAKE (name, mode and hold are the caller's) for a new entry in PARENT: time, and as
 * owner the request's caller; the group is the directory's where its set-group-ID bit says so,
 * which subdirectories inherit.
 */
int kv_make_owned(fuse_req_t req, struct kv_node *parent, struct kv_make *make);
/* kv_core_make for the request at hand; what a daemon before this one has made for it is that. */
int kv_make_once(struct kv_daemon *daemon, const struct kv_make *make, struct kv_inode *ret_inode);

/* The permission bits of MODE after a change by somebody who may not keep the set-ID bits, as Linux
 * drops them. */
static inline uint32_t kv_without_set_id(uint32_t mode)
{
	mode &= 07777 & ~(uint32_t)S_ISUID;
	/* Without group execution the bit is an old mark for mandatory locks, and stays. */
	return mode & S_IXGRP ? mode & ~(uint32_t)S_ISGID : mode;
}

/* The caller of REQ has changed content through NODE: takes the set-ID bits away unless it is root.
 */
void kv_drop_set_id(fuse_req_t req, struct kv_node *node);

/* What FLUSH and RELEASE of HANDLE mean for locks. */
void kv_locks_flushed(
	struct kv_daemon *daemon, struct kv_handle *handle, const struct fuse_file_info *fi);
void kv_locks_released(struct kv_daemon *daemon, struct kv_handle *handle);

#endif
