/* SPDX-License-Identifier: Apache-2.0 */
/* What node.c, node_caller.c, node_write.c and node_resume.c share. All of it wants the lock of the
 * file's nodes held. */
#ifndef KVFS_FS_NODE_INTERNAL_H
#define KVFS_FS_NODE_INTERNAL_H

#include "fs/node.h"

/* The nodes of FILE, in a list: see sibling. */
struct kv_node *kv_node_first(struct kv_file *file);
/* The published node that LOOKUP may give out, if it still shows the current version; or NULL. */
struct kv_node *kv_node_published_of(struct kv_file *file);
/* An active writing node of FILE, or NULL. */
struct kv_node *kv_node_any_writer(struct kv_file *file);
/* One that has begun to write, or NULL: others were only prepared. */
struct kv_node *kv_node_any_draft(struct kv_file *file);
/* The active writing node of PROCESS, or NULL. */
struct kv_node *kv_node_writer_of(struct kv_file *file, pid_t process);

/* Makes sure that PROCESS has an active writing node, which LOOKUP will find. */
int kv_node_add_writer(struct kv_daemon *daemon, struct kv_file *file, pid_t process);

/* The node of a directory or symlink, if there is one. */
struct kv_node *kv_node_find_plain(struct kv_daemon *daemon, uint64_t ino);
/* A node of a directory or symlink, with nodeid ID, or a new one if that is 0. NULL: no memory. */
struct kv_node *kv_node_new_plain(
	struct kv_nodes *nodes, uint64_t ino, enum kv_node_kind kind, uint64_t id);
/* The same of a regular file, with a file reference of its own, linked to its file. */
struct kv_node *kv_node_new(
	struct kv_daemon *daemon, uint64_t ino, enum kv_node_kind kind, uint64_t id);
/*
 * Frees NODE if neither the kernel nor a handle has it. FORGET can overtake the RELEASE of a
 * last handle, so both come here.
 */
void kv_node_free_if_unused(struct kv_daemon *daemon, struct kv_node *node);

/* How often the kernel has looked NODE up: a restart must know. */
void kv_node_set_lookups(struct kv_daemon *daemon, struct kv_node *node, uint64_t lookups);

/* FILE has lost its last name. What the kernel knows of it stays until it is forgotten. */
bool kv_node_orphan_file(struct kv_daemon *daemon, struct kv_file *file);
#endif
