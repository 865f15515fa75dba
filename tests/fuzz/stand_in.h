/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon for the targets that stand above the core: it has a directory (ino 1) and three files,
 * does nothing, and counts what is taken and given back, and the answers.
 */
#ifndef KVFS_TESTS_FUZZ_STAND_IN_H
#define KVFS_TESTS_FUZZ_STAND_IN_H

#include "fs/daemon.h"
#include "fs/node.h"

#define STAND_IN_DIRECTORY 1u
#define STAND_IN_FILE 2u

extern struct kv_daemon stand_in;
/* Its only request, of user UID. */
fuse_req_t stand_in_request(uint32_t uid);
/* A node of an inode. */
struct kv_node *stand_in_node(uint64_t ino);
/* The version of file INO, with a reference. */
struct kv_version *stand_in_version(uint64_t ino);
/* Answers to the request since the last call. */
unsigned stand_in_answers(void);
/* References and opens that were not given back; 0 at the end of each input. */
int stand_in_held(void);

#endif
