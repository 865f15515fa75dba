/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Request handlers: decode, call the index or the core, reply. One table, filled by five files:
 * ops_name.c (the namespace), ops_attr.c (attributes), ops_open.c (handles), ops_file.c (content),
 * ops_dir.c (listing). They add their handlers to OPS.
 */
#ifndef KVFS_FS_OPS_H
#define KVFS_FS_OPS_H

#include "fs/daemon.h"
#include "fs/node.h"

void kv_ops_name(struct fuse_lowlevel_ops *ops);
void kv_ops_attr(struct fuse_lowlevel_ops *ops);
void kv_ops_file(struct fuse_lowlevel_ops *ops);
void kv_ops_open(struct fuse_lowlevel_ops *ops);
void kv_ops_dir(struct fuse_lowlevel_ops *ops);

/*
 * Completes MAKE (name, mode and hold are the caller's) for a new entry in PARENT: time, and as
 * owner the request's caller; the group is the directory's where its set-group-ID bit says so,
 * which subdirectories inherit.
 */
int kv_make_owned(fuse_req_t req, struct kv_node *parent, struct kv_make *make);

#endif
