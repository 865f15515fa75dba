/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Red-black trees of libbsd's headers, with a generator that works here: their RB_GENERATE_STATIC
 * needs a definition of __unused, which glibc does not have.
 */
#ifndef KVFS_FS_TREE_H
#define KVFS_FS_TREE_H

#include <bsd/sys/tree.h>

#define KV_TREE_GENERATE(name, type, field, compare)                                               \
	RB_GENERATE_INTERNAL(name, type, field, compare, __attribute__((unused)) static)

#endif
