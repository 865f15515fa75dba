/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Asking for many names of one directory at once: what KVFS_IOC_LOOKUP answers (kvfs_ioctl.h).
 *
 * Stateless; any thread. Knows nothing of FUSE, and trusts nothing of the request.
 */
#ifndef KVFS_FS_LOOKUP_H
#define KVFS_FS_LOOKUP_H

#include <stddef.h>
#include <stdint.h>

#include "fs/kvfs_ioctl.h"

struct kv_core;

/*
 * Answers REQUEST for directory PARENT. RET_ANSWER gets the counts and the bitmap; ret_size: the
 * bytes of it that are to be sent back. -EINVAL: the counts, lengths or flags do not fit, or a name
 * is none; -ENAMETOOLONG; -ENOTDIR.
 */
int kv_lookup_names(struct kv_core *core, uint64_t parent, const struct kvfs_lookup *request,
	struct kvfs_lookup *ret_answer, size_t *ret_size);

#endif
