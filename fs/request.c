/* SPDX-License-Identifier: Apache-2.0 */
/* The request that a thread is at: see request.h. */

#include "fs/request.h"

#include "fs/daemon.h"

/* Of the kernel's ABI: in the number of a request that was sent before. */
#define SENT_BEFORE (UINT64_C(1) << 63)

static _Thread_local uint64_t request_now;

void kv_request_begin(uint64_t unique)
{
	request_now = unique;
	kv_index_for_request(0);
}

uint64_t kv_request_number(void)
{
	return request_now & ~SENT_BEFORE;
}

bool kv_request_comes_again(void)
{
	return request_now & SENT_BEFORE;
}

void kv_request_counts(void)
{
	kv_index_for_request(kv_request_number());
}

bool kv_request_was_done(struct kv_daemon *daemon)
{
	return kv_request_comes_again() && kv_index_was_done(daemon->index, kv_request_number());
}
