/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work for devices that may not answer: watch.c and flush.c, for core_internal.h and its rooms.
 */
#ifndef KVFS_FS_WATCH_INTERNAL_H
#define KVFS_FS_WATCH_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct kv_core;

/* Threads of one kind, replacements of those that a device holds up among them. */
#define KV_CREW_MAX 32u

/* Threads that share a queue of work for the devices. */
struct kv_crew {
	void *(*main)(void *core);
	unsigned size;    /* without replacements */
	unsigned started; /* touched by the starting thread, later by the watch */
	_Atomic unsigned joined;
	_Atomic int64_t since_ms[KV_CREW_MAX]; /* when a member took up its work; 0: it has none */
};

/* One device's flushes; guarded by the lock of the core's flush. */
struct kv_flusher {
	struct kv_core *core;
	unsigned device;
	uint64_t asked; /* flushes wanted, and ended, so far */
	uint64_t ended;
};

/* ---- flush.c ---- */

int kv_flush_start(struct kv_core *core);
void kv_flush_stop(struct kv_core *core);
/* Flushes the devices that were written to. Returns those, a bit each, that are too slow to be
 * waited for: what was written to them is not durable yet. */
uint64_t kv_flush_devices(struct kv_core *core);

/* ---- watch.c ---- */

int kv_watch_start(struct kv_core *core);
/* From now on no threads are replaced. */
void kv_watch_no_more(struct kv_core *core);
void kv_watch_stop(struct kv_core *core);
/* How long a device may take for an answer before work is kept away from it. */
uint64_t kv_watch_slow_ms(const struct kv_core *core);
/* True if who waits for a device since SINCE_MS does so no longer. */
bool kv_core_gives_up(struct kv_core *core, int64_t since_ms);
/* Starts SIZE threads of one kind. A member tells by begin and end when it works for a device. */
int kv_crew_start(struct kv_core *core, struct kv_crew *crew, unsigned size);
unsigned kv_crew_join(struct kv_crew *crew);
void kv_crew_begin(struct kv_crew *crew, unsigned member);
void kv_crew_end(struct kv_crew *crew, unsigned member);

#endif
