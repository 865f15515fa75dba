/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Leases: who has looked a file up, or opened it, finds it still there for a while (K2).
 *
 * A table of coarse times, by a hash of the inode number: bounded, without locks, and the same for
 * files that are in memory and those that are not. Two files may share a place, and then a lease.
 */
#include "fs/core_internal.h"

#define TABLE_BITS 20u
#define TICK_MS 16
/*
 * What was just published stays so long, or for a lease if that is shorter: its writer is about to
 * rename it, and then somebody may look up the new name. No longer, for a store that takes in more
 * than it holds must be able to evict it.
 */
#define PUBLISHED_MS 1000

int kv_lease_start(struct kv_core *core)
{
	core->leases = calloc(UINT64_C(1) << TABLE_BITS, sizeof(*core->leases));
	return core->leases ? 0 : -ENOMEM;
}

static _Atomic uint32_t *place_of(struct kv_core *core, uint64_t ino)
{
	return &core->leases[ino * UINT64_C(0x9e3779b97f4a7c15) >> (64 - TABLE_BITS)];
}

/* Never 0, which is no time. */
static uint32_t now_ticks(void)
{
	return (uint32_t)(kv_monotonic_ms() / TICK_MS) | 1;
}

/* What is left of a lease that began at TICKS. */
static int64_t left_ms(const struct kv_core *core, uint32_t ticks)
{
	int64_t passed = (int64_t)(uint32_t)(now_ticks() - ticks) * TICK_MS;
	int64_t lease = (int64_t)core->options.lease_ms;

	return ticks != 0 && passed < lease ? lease - passed : 0;
}

static int64_t brief_ms(const struct kv_core *core)
{
	int64_t lease = (int64_t)core->options.lease_ms;

	return lease < PUBLISHED_MS ? lease : PUBLISHED_MS;
}

int64_t kv_core_lease_left(struct kv_core *core, uint64_t ino)
{
	return left_ms(core, atomic_load_explicit(place_of(core, ino), memory_order_acquire));
}

bool kv_core_lease(struct kv_core *core, uint64_t ino)
{
	_Atomic uint32_t *place = place_of(core, ino);
	uint32_t before;

	if (core->options.lease_ms == 0)
		return false;
	/* Pairs with the acquire of kv_core_lease_left under the index lock. */
	before = atomic_exchange_explicit(place, now_ticks(), memory_order_acq_rel);
	return left_ms(core, before) == 0;
}

int kv_core_lease_found(struct kv_core *core, uint64_t ino)
{
	struct kv_inode inode;
	int r;

	if (!kv_core_lease(core, ino))
		return 0;
	r = kv_index_get(core->index, ino, &inode);
	return r == 0 && inode.nlink == 0 ? -ENOENT : r;
}

/* A lease of which no more than a brief time is left, counted from now. */
static uint32_t brief_ticks(const struct kv_core *core)
{
	int64_t lease = (int64_t)core->options.lease_ms;
	uint32_t ticks = now_ticks() - (uint32_t)((lease - brief_ms(core)) / TICK_MS);

	return ticks != 0 ? ticks : 1;
}

void kv_lease_published(struct kv_core *core, uint64_t ino)
{
	_Atomic uint32_t *place = place_of(core, ino);
	uint32_t before = atomic_load_explicit(place, memory_order_relaxed);

	if (brief_ms(core) == 0 || left_ms(core, before) >= brief_ms(core))
		return;
	/* If another one comes in between, it is the longer one. */
	(void)atomic_compare_exchange_strong_explicit(
		place, &before, brief_ticks(core), memory_order_acq_rel, memory_order_relaxed);
}

void kv_core_lease_renamed(struct kv_core *core, uint64_t ino)
{
	if (brief_ms(core) > 0)
		atomic_store_explicit(place_of(core, ino), brief_ticks(core), memory_order_release);
}
