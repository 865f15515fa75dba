/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether an index is consistent: names, inodes and links, chunk maps and references, bitmaps and
 * their counts, the use order. For tests and for an offline check.
 *
 * The live view is checked, with everything that is not committed. Operations wait meanwhile, and
 * the time is proportional to the index. Memory: two bits a block of the devices.
 */
#ifndef KVFS_INDEX_CHECK_H
#define KVFS_INDEX_CHECK_H

#include <sys/types.h>

struct kv_index;

/* Calls VIOLATION with one line for each; it must not call the index. Returns how many, or an
 * error. */
ssize_t kv_index_check(
	struct kv_index *index, void (*violation)(void *arg, const char *text), void *arg);

#endif
