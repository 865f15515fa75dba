/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes a sound index from a damaged one: what can be read and fits together is copied, what
 * follows from it (free space, reference counts, the use order, counters) is made anew, and what is
 * not whole is left out. It is a cache: a file that lost a part is dropped, never filled up, and so
 * are one without a name and, of two that claim the same blocks, the one with the higher number.
 *
 * The damaged index is only read. The caller keeps everybody else away. Memory: two bits a block of
 * the devices; time proportional to the index. Errors: negative errno, and one line for the user.
 */
#ifndef KVFS_INDEX_REPAIR_H
#define KVFS_INDEX_REPAIR_H

#include "index/check.h"

struct kv_index_repair {
	const char *path;     /* of the damaged index */
	const char *new_path; /* an empty directory */
	const uint64_t *bad;  /* files whose content is known to be wrong, ascending */
	size_t bad_count;
	struct kv_check_to dropped; /* told of each file and directory that is left out */
};

/* -EUCLEAN: what says which store it is cannot be read any more. */
int kv_index_repair(const struct kv_index_repair *repair, char *ret_error, size_t error_size);

#endif
