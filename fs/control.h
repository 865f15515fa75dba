/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the daemon tells the tools about itself: reports, read as extended attributes. (Those for
 * people, one value each, are in attributes.h.)
 *
 *	user.kvfs.status   of any file or directory of the mount: the mount as a whole
 *	user.kvfs.stat     of a file: its state
 *	user.kvfs.map.N    of a file: its chunks from number N on, as many as fit 60 KiB; empty
 *behind the last
 *
 * The text is lines `key value...`, fields separated by one space, a value that may hold spaces
 *last on its line. They are not listed by listxattr and cannot be set (EPERM).
 *
 * status: version, store, mode (passthrough|daemon), mode_reason (why not passthrough; "-"),
 *transport (legacy|io_uring), uptime_s, devices N, device I SIZE BLOCKS FAILED PATH; store_total,
 *store_used, store_busy, store_reserved, store_pinned (bytes), files, index_bytes, index_pending,
 *index_held, index_commits, dram_budget, dram_charged, dram_zombie, dram_dirty (bytes),
 *dram_objects, dram_kind (tmpfs|memfd), dram_huge (0|1), open_handles, nodes, user_files,
 *user_writers, user_space, user_dirty (0: no limit), user UID FILES WRITERS SPACE DIRTY (bytes),
 *stat NAME VALUE (one a counter of stats.h). stat: ino, version, tier
 *(writing|dram|nvme|dram+nvme|none), size, blocks (of 4096), chunks, chunks_resident, chunks_dirty,
 *checksum (pending|stored|none), hits, last_use_ns, opens, quarantined (0|1). map: chunk NUMBER
 *SUM(16 hex digits) STATE(hole|cold|hot|dirty|base), extent CHUNK BLOCK COUNT DEVICE OFFSET (bytes
 *on the device).
 */
#ifndef KVFS_FS_CONTROL_H
#define KVFS_FS_CONTROL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct kv_daemon;
struct kv_inode;
struct kv_version;

#define KV_CONTROL_PREFIX "user.kvfs."

/*
 * Answers attribute NAME of inode INO: *ret_text is malloc'ed, the caller's. Returns its length;
 * -ENODATA for names outside the table, -EINVAL for a bad number.
 */
ssize_t kv_control_get(struct kv_daemon *daemon, uint64_t ino, const char *name, char **ret_text);

/* ---- For attributes.c ---- */

/*
 * The version that describes file INO, with a reference: the published one, else one being written,
 * else NULL (a directory, or a file that is going away).
 */
struct kv_version *kv_control_version(struct kv_daemon *daemon, uint64_t ino);

/* The inode, with all uses up to now. -ENOENT. */
int kv_control_inode(struct kv_daemon *daemon, uint64_t ino, struct kv_inode *ret_inode);

struct kv_content_report {
	uint64_t version;
	const char *tier; /* as control.h says, static */
	uint64_t size;    /* bytes */
	uint64_t blocks;
	uint64_t chunks;
	uint64_t resident; /* chunks in DRAM */
	uint64_t dirty;    /* chunks */
	const char *checksum;
};
void kv_control_content(struct kv_daemon *daemon, const struct kv_inode *inode,
	struct kv_content_report *ret_content);

#endif
