/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The request that a thread is at: whether it comes again because a daemon before this one was
 * killed before it had answered it, and was done already. What is safe to do twice does not ask.
 */
#ifndef KVFS_FS_REQUEST_H
#define KVFS_FS_REQUEST_H

#include <stdbool.h>
#include <stdint.h>

struct kv_daemon;

/* A request begins, with the number that the kernel sent. */
void kv_request_begin(uint64_t unique);
/* The next operation on the index that succeeds is what the request asks for. */
void kv_request_counts(void);
/* Its number, whether or not it comes again; 0: the thread is at none that the kernel has sent. */
uint64_t kv_request_number(void);
/* The kernel has sent it before. */
bool kv_request_comes_again(void);
/* A daemon before this one has done that operation. */
bool kv_request_was_done(struct kv_daemon *daemon);

#endif
