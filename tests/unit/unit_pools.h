/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool and its owner, who writes it by offset, and what it costs.
 */
#ifndef KVFS_TESTS_UNIT_UNIT_POOLS_H
#define KVFS_TESTS_UNIT_UNIT_POOLS_H

#include "fs/core_internal.h"
#include "tests/unit/unit_core.h"

static inline uint64_t unit_charged(struct unit *unit)
{
	struct kv_dram_usage usage;

	kv_dram_usage(kv_core_dram(unit->core), &usage);
	return usage.charged;
}

/* Whoever was the last to use a version gives back what it has: that may be a thread of the core.
 */
static inline void unit_expect_charged(struct unit *unit, uint64_t bytes)
{
	UNIT_WAIT_FOR(unit_charged(unit) == bytes);
	assert_int_equal(unit_charged(unit), bytes);
}

/* A pool that its owner has open. */
struct unit_pool {
	struct kv_file *file;
	struct kv_version *version;
	uint64_t ino;
};

static inline struct unit_pool unit_pool_new(
	struct unit *unit, const char *name, uint64_t allocated)
{
	struct unit_pool pool = {.ino = unit_create(unit, name)};

	pool.file = unit_file(unit, pool.ino);
	pool.version = unit_new(pool.file, NULL);
	kv_file_opened(pool.file);
	if (allocated > 0)
		assert_int_equal(kv_version_allocate(pool.version, 0, 0, allocated), 0);
	return pool;
}

static inline void unit_pool_close(struct unit_pool *pool)
{
	kv_version_unref(pool->version);
	kv_file_closed(pool->file);
	kv_file_put(pool->file);
}

static inline void unit_pool_end(struct unit *unit, struct unit_pool *pool, const char *name)
{
	unit_unlink(unit, name);
	unit_pool_close(pool);
}

/* As fsync does: publishes, waits, and goes on with a version made from that. */
static inline void unit_pool_sync(struct unit_pool *pool)
{
	struct kv_version *published = pool->version;

	assert_int_equal(kv_version_publish(published), 0);
	assert_int_equal(kv_version_sync(published), 0);
	pool->version = unit_new(pool->file, published);
	kv_version_continue(pool->version, published);
	kv_version_unref(published);
}

static inline void unit_expect_zeros(struct kv_version *version, uint64_t size, uint64_t offset)
{
	uint8_t *memory = malloc(size), *expected = calloc(1, size);

	assert_non_null(memory);
	assert_non_null(expected);
	assert_int_equal(kv_version_read(version, memory, size, offset), (ssize_t)size);
	assert_memory_equal(memory, expected, size);
	free(memory);
	free(expected);
}

/*
 * What VERSION is charged for is what its chunks have; a chunk that is written here and there, and
 * resident, has its blocks.
 */
static inline void unit_expect_pages(struct kv_version *version)
{
	struct kv_segment *segment;
	uint64_t charged = 0;
	KV_LOCKED(&version->lock);

	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			const struct kv_slot *slot = &segment->slots[i];
			struct kv_bits bits;

			charged += slot->charge;
			if (slot->flags & KV_SLOT_BUSY || !(slot->flags & KV_SLOT_SPARSE) ||
				slot->state == KV_CHUNK_BASE)
				continue;
			kv_slot_bits(slot, &bits);
			assert_true(slot->state == KV_CHUNK_DIRTY || slot->state == KV_CHUNK_HOT);
			assert_int_equal(slot->charge, kv_bits_count(&bits));
		}
	}
	assert_int_equal(charged, version->charged);
}

#endif
