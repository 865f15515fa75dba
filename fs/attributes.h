/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Extended attributes that a file or directory has by being on this mount, one value each:
 *
 *	user.kvfs.tier      files  where its bytes are: dram, nvme, dram+nvme, none, or writing
 *	user.kvfs.hits      files  opens for reading
 *	user.kvfs.version   files  of its published content; grows with every publish
 *	user.kvfs.checksum  files  stored, pending (not all of it is on a device yet), or none (no
 *bytes) user.kvfs.extents   files  DEVICE:OFFSET+LENGTH of the first runs of bytes on the devices,
 *in the file's order; "..." if there are more
 *
 * One table in attributes.c says all of it. They are read-only (EPERM), and any program may get
 *them by name; but only programs that show attributes to people find them in listxattr. Tools that
 *copy attributes would carry them to other filesystems as dead text, and rsync -X would never see
 *two trees as equal again (tried with cp, rsync and tar; Ceph and others hide theirs for that
 *reason). Stateless; any thread. Errors: negative errno.
 */
#ifndef KVFS_FS_ATTRIBUTES_H
#define KVFS_FS_ATTRIBUTES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

struct kv_daemon;

/* Prints the value of attribute KEY (the name behind user.kvfs.) of inode INO. -ENODATA: no such
 * attribute, or it is not one of that kind of inode. */
int kv_attribute_print(FILE *out, struct kv_daemon *daemon, uint64_t ino, const char *key);

/* Whether the thread CALLER shows attributes to people: getfattr, attr, xattr. One that cannot be
 * seen from here does not. */
bool kv_attribute_is_viewer(pid_t caller);

/* Writes the names of those that INO has to RET_NAMES, each with a NUL, as far as they fit SIZE.
 * Returns how many bytes they all need. */
ssize_t kv_attribute_names(struct kv_daemon *daemon, uint64_t ino, char *ret_names, size_t size);

#endif
