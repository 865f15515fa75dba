/* SPDX-License-Identifier: Apache-2.0 */
/* Second tries: see retry.h. */

#include "fs/retry.h"

#include <stdatomic.h>
#include <stdlib.h>

#define SLOTS 1024u
/* A repeated call comes within the time of a path walk. */
#define RETRY_MS 2000

struct kv_retries {
	/* Thread id in the upper half, milliseconds (wrapping) in the lower; 0: free. */
	_Atomic uint64_t slots[SLOTS];
};

static uint32_t to_ms(int64_t now_ns)
{
	return (uint32_t)(now_ns / 1000000);
}

struct kv_retries *kv_retries_new(void)
{
	return calloc(1, sizeof(struct kv_retries));
}

struct kv_retries *kv_retries_free(struct kv_retries *retries)
{
	free(retries);
	return NULL;
}

void kv_retry_note(struct kv_retries *retries, pid_t tid, int64_t now_ns)
{
	uint64_t note = (uint64_t)(uint32_t)tid << 32 | to_ms(now_ns);

	/* Relaxed: only the same thread's next request asks, and the kernel orders the two. */
	atomic_store_explicit(&retries->slots[(uint32_t)tid % SLOTS], note, memory_order_relaxed);
}

/* TID's note, or 0. Thread ids are never 0, but that of a caller in another PID namespace is. */
static uint64_t note_of(const _Atomic uint64_t *slot, pid_t tid)
{
	uint64_t note = atomic_load_explicit(slot, memory_order_relaxed);

	return tid != 0 && note >> 32 == (uint32_t)tid ? note : 0;
}

static bool is_fresh(uint64_t note, int64_t now_ns)
{
	return note != 0 && to_ms(now_ns) - (uint32_t)note < RETRY_MS;
}

bool kv_retry_pending(struct kv_retries *retries, pid_t tid, int64_t now_ns)
{
	return is_fresh(note_of(&retries->slots[(uint32_t)tid % SLOTS], tid), now_ns);
}

bool kv_retry_take(struct kv_retries *retries, pid_t tid, int64_t now_ns)
{
	_Atomic uint64_t *slot = &retries->slots[(uint32_t)tid % SLOTS];
	uint64_t note = note_of(slot, tid);
	uint64_t expected = note;

	/* Somebody else's newer note stays. */
	if (note != 0)
		(void)atomic_compare_exchange_strong_explicit(
			slot, &expected, 0, memory_order_relaxed, memory_order_relaxed);
	return is_fresh(note, now_ns);
}
