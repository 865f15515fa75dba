/* SPDX-License-Identifier: Apache-2.0 */
/* Free space: reservations, allocation, exact counts, reuse only when durable. */
#include "unit_index.h"

#include "index/space_internal.h"

#define BLOCKS 20000u /* of each device: two groups and a part of a third */

static int setup(void **state)
{
	static struct unit unit;

	unit_create(&unit, 2, BLOCKS);
	unit.options.commit_delay_ms = UNIT_NEVER_MS;
	unit_open(&unit);
	*state = &unit;
	return 0;
}

static uint64_t random_state = 7;

static uint32_t random_u32(void)
{
	random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407u;
	return (uint32_t)(random_state >> 32);
}

static int alloc_on(
	struct unit *unit, uint16_t device, uint32_t blocks, struct kv_extent *ret_extents)
{
	assert_int_equal(kv_space_reserve(unit->space, blocks), 0);
	return kv_space_alloc(unit->space, device, blocks, 0, ret_extents);
}

static uint32_t count_blocks(const struct kv_extent *extents, int count)
{
	uint32_t blocks = 0;

	for (int i = 0; i < count; i++)
		blocks += extents[i].count;
	return blocks;
}

/* Promises are kept: no more is promised than there is, and a promise can be given back. */
static void test_space__reserve(void **state)
{
	struct unit *unit = *state;

	assert_int_equal(unit_space(unit).total, 2 * BLOCKS);
	assert_int_equal(kv_space_reserve(unit->space, 2 * BLOCKS + 1), -ENOSPC);
	assert_int_equal(kv_space_reserve(unit->space, UINT64_MAX), -ENOSPC);
	assert_int_equal(kv_space_reserve(unit->space, 2 * BLOCKS - 5), 0);
	assert_int_equal(kv_space_reserve(unit->space, 6), -ENOSPC);
	assert_int_equal(unit_space(unit).reserved, 2 * BLOCKS - 5);
	kv_space_unreserve(unit->space, 2 * BLOCKS - 5);
	assert_int_equal(unit_space(unit).reserved, 0);
}

/* A quota below the devices' size is the total. */
static void test_space__quota(void **state)
{
	struct unit *unit = *state;
	struct kv_extent extents[100];

	unit_close(unit);
	unit->options.quota_blocks = 100;
	unit_open(unit);
	assert_int_equal(unit_space(unit).total, 100);
	assert_int_equal(alloc_on(unit, 0, 60, extents), 1);
	assert_int_equal(kv_space_reserve(unit->space, 41), -ENOSPC);
	assert_int_equal(kv_space_reserve(unit->space, 40), 0);
	kv_space_unreserve(unit->space, 40);
	kv_space_cancel(unit->space, extents, 1);
}

/* Blocks that are renewed are promised again: nobody else gets them, whoever asks first. */
static void test_space__renewed(void **state)
{
	struct unit *unit = *state;
	struct kv_extent extents[100];

	unit_close(unit);
	unit->options.quota_blocks = 100;
	unit_open(unit);
	assert_int_equal(alloc_on(unit, 0, 60, extents), 1);
	assert_int_equal(kv_space_reserve(unit->space, 40), 0);
	kv_space_renew(unit->space, extents, 1);
	assert_int_equal(unit_space(unit).busy, 0);
	assert_int_equal(unit_space(unit).reserved, 100);
	assert_int_equal(kv_space_reserve(unit->space, 1), -ENOSPC);
	assert_int_equal(kv_space_alloc(unit->space, 0, 60, 0, extents), 1);
	assert_int_equal(unit_space(unit).busy, 60);
	assert_int_equal(unit_space(unit).reserved, 40);
	kv_space_cancel(unit->space, extents, 1);
	kv_space_unreserve(unit->space, 40);
}

/* Blocks come as one run on the device asked for, numbered from first_block on. */
static void test_space__contiguous(void **state)
{
	struct unit *unit = *state;
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	uint64_t next[2] = {0, 0};

	for (unsigned i = 0; i < 20; i++) {
		uint16_t device = (uint16_t)(i % 2);

		assert_int_equal(kv_space_reserve(unit->space, 200), 0);
		assert_int_equal(kv_space_alloc(unit->space, device, 200, 56, extents), 1);
		assert_int_equal(extents[0].device, device);
		assert_int_equal(extents[0].start, next[device]);
		assert_int_equal(extents[0].block, 56);
		assert_int_equal(extents[0].count, 200);
		next[device] += 200;
	}
	assert_int_equal(unit_space(unit).busy, 20 * 200);
	assert_int_equal(unit_space(unit).reserved, 0);
	for (unsigned i = 0; i < 20; i++)
		kv_space_cancel(unit->space,
			&(struct kv_extent){i / 2 * 200, (uint16_t)(i % 2), 0, 200}, 1);
	assert_int_equal(unit_space(unit).busy, 0);
}

/* All of a device can be had, to the last block; then the other device is used; then nothing is
 * left. */
static void test_space__fills_to_the_last_block(void **state)
{
	struct unit *unit = *state;
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	uint8_t *seen = calloc(2, BLOCKS);
	uint64_t left = 2 * BLOCKS;

	assert_non_null(seen);
	while (left > 0) {
		uint32_t want = (uint32_t)kv_min_u64(left, 1 + random_u32() % 256);
		int count = alloc_on(unit, 0, want, extents);

		assert_true(count > 0);
		assert_int_equal(count_blocks(extents, count), want);
		for (int i = 0; i < count; i++) {
			assert_true(extents[i].start + extents[i].count <= BLOCKS);
			for (uint32_t k = 0; k < extents[i].count; k++)
				assert_int_equal(
					seen[extents[i].device * BLOCKS + extents[i].start + k]++,
					0);
		}
		left -= want;
	}
	assert_int_equal(unit_space(unit).busy, 2 * BLOCKS);
	assert_int_equal(kv_space_reserve(unit->space, 1), -ENOSPC);
	for (uint64_t block = 0; block < BLOCKS; block += 100)
		for (uint16_t device = 0; device < 2; device++)
			kv_space_cancel(unit->space, &(struct kv_extent){block, device, 0, 100}, 1);
	free(seen);
}

/* Where no run is long enough, pieces are taken. */
static void test_space__pieces(void **state)
{
	struct unit *unit = *state;
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	struct kv_extent hole = {.count = 1};

	for (uint32_t left = 2 * BLOCKS; left > 0; left -= 200)
		assert_true(alloc_on(unit, 0, 200, extents) > 0);
	for (hole.start = 0; hole.start < 600; hole.start += 2) /* every second block */
		kv_space_cancel(unit->space, &hole, 1);
	assert_int_equal(alloc_on(unit, 1, 256, extents), 256);
	for (int i = 0; i < 256; i++) {
		assert_int_equal(extents[i].device, 0);
		assert_int_equal(extents[i].count, 1);
		assert_int_equal(extents[i].block, i);
		assert_int_equal(extents[i].start % 2, 0);
	}
	assert_int_equal(kv_space_reserve(unit->space, 45), -ENOSPC);
	assert_int_equal(kv_space_reserve(unit->space, 44), 0);
	assert_int_equal(kv_space_alloc(unit->space, 0, 44, 0, extents), 44);
	for (uint64_t block = 0; block < BLOCKS; block += 100)
		for (uint16_t device = 0; device < 2; device++)
			kv_space_cancel(unit->space, &(struct kv_extent){block, device, 0, 100}, 1);
}

/* A failed device gives nothing more, and is not promised any more. */
static void test_space__disabled_device(void **state)
{
	struct unit *unit = *state;
	struct kv_extent extents[KV_CHUNK_BLOCKS];

	assert_int_equal(kv_space_reserve(unit->space, 100), 0);
	kv_space_disable(unit->space, 0);
	assert_int_equal(kv_space_alloc(unit->space, 0, 100, 0, extents), 1);
	assert_int_equal(extents[0].device, 1);
	assert_int_equal(kv_space_reserve(unit->space, BLOCKS - 99), -ENOSPC);
	assert_int_equal(kv_space_reserve(unit->space, BLOCKS - 100), 0);
	kv_space_disable(unit->space, 1);
	assert_int_equal(kv_space_alloc(unit->space, 1, 100, 0, extents + 1), -ENOSPC);
	assert_int_equal(unit_space(unit).reserved, BLOCKS - 100); /* the promise is kept */
	kv_space_unreserve(unit->space, BLOCKS - 100);
	kv_space_cancel(unit->space, extents, 1);
}

/* A freed block can be had again only when it is released and its freeing is durable, in either
 * order. */
static void test_space__reuse_only_when_durable(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);

	for (int released_first = 0; released_first < 2; released_first++) {
		struct kv_extent extent = unit_write(unit, file.ino, 100);
		struct kv_content nothing = {.replace = true};
		struct kv_freed freed;

		unit_sync(unit);
		assert_int_equal(unit_space(unit).used, 100);
		assert_int_equal(unit_try_publish(unit, file.ino, NULL, 0, nothing, &freed), 0);
		assert_int_equal(freed.count, 1);
		assert_int_equal(freed.extents[0].start, extent.start);
		assert_int_equal(unit_space(unit).used, 0);
		assert_int_equal(unit_space(unit).busy, 100);
		if (released_first)
			kv_space_release(unit->space, &freed);
		else
			unit_sync(unit);
		assert_int_equal(unit_space(unit).busy, 100);
		assert_int_equal(kv_space_reserve(unit->space, 2 * BLOCKS - 99), -ENOSPC);
		if (released_first)
			unit_sync(unit);
		else
			kv_space_release(unit->space, &freed);
		assert_null(freed.extents);
		assert_int_equal(freed.count, 0);
		assert_int_equal(unit_space(unit).busy, 0);
	}
}

/* While the commit that frees blocks fails, they stay out of reach. */
static void test_space__no_reuse_while_commits_fail(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_freed freed;

	(void)unit_write(unit, file.ino, 100);
	unit_sync(unit);
	assert_int_equal(unit_try_publish(unit, file.ino, NULL, 0,
				 (struct kv_content){.replace = true}, &freed),
		0);
	kv_space_release(unit->space, &freed);
	kv_commit_fail(unit->index, EIO, UINT32_MAX);
	assert_int_equal(kv_index_wait(unit->index, kv_index_sequence(unit->index)), -EIO);
	assert_int_equal(unit_space(unit).busy, 100);
	kv_commit_fail(unit->index, 0, 0);
	unit_sync(unit);
	assert_int_equal(unit_space(unit).busy, 0);
}

/* Used blocks are the same after a restart; busy ones are free. */
static void test_space__restart(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	struct kv_extent extent = unit_write(unit, file.ino, 123);

	assert_true(alloc_on(unit, 1, 77, extents) > 0);
	assert_int_equal(kv_space_reserve(unit->space, 5), 0);
	unit_reopen(unit);
	assert_int_equal(unit_space(unit).used, 123);
	assert_int_equal(unit_space(unit).busy, 0);
	assert_int_equal(unit_space(unit).reserved, 0);
	/* What is used is not handed out. */
	for (uint32_t left = 2 * BLOCKS - 123; left > 0;) {
		uint32_t want = (uint32_t)kv_min_u64(left, 256);
		int count = alloc_on(unit, 0, want, extents);

		assert_true(count > 0);
		for (int i = 0; i < count; i++)
			assert_true(extents[i].device != extent.device ||
				    extents[i].start >= extent.start + extent.count ||
				    extents[i].start + extents[i].count <= extent.start);
		left -= want;
	}
	unit_close(unit); /* all of it is given back */
	unit_open(unit);
	assert_int_equal(unit_space(unit).busy, 0);
}

/* ---- A model ---- */

#define FILES 200

struct model {
	uint64_t inos[FILES];
	uint32_t blocks[FILES];
	uint8_t taken[2 * BLOCKS]; /* blocks that a file has, or that may not be reused yet */
	uint64_t used;
	struct kv_extent limbo[8192]; /* freed, and released, but not durable */
	int limbo_count;
};

static void model_mark(struct model *model, const struct kv_extent *extents, int count, uint8_t to)
{
	for (int i = 0; i < count; i++)
		for (uint32_t k = 0; k < extents[i].count; k++) {
			uint8_t *block =
				&model->taken[extents[i].device * BLOCKS + extents[i].start + k];

			assert_int_equal(*block, !to);
			*block = to;
		}
}

static void model_sync(struct unit *unit, struct model *model)
{
	unit_sync(unit);
	model_mark(model, model->limbo, model->limbo_count, 0);
	model->limbo_count = 0;
}

/* File FILE gets new content of BLOCKS blocks, or, now and then, its allocation is cancelled. */
static void model_write(struct unit *unit, struct model *model, unsigned file, uint32_t blocks)
{
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	struct kv_chunk chunk = {0, 0, KV_CHUNK_FRESH, file, extents};
	struct kv_content content = {.size = KV_CHUNK_SIZE, .replace = true};
	struct kv_freed freed;
	int count = 0;

	if (blocks > 0) {
		if (kv_space_reserve(unit->space, blocks) < 0) {
			model_sync(unit, model); /* busy blocks become free */
			return;
		}
		count = kv_space_alloc(unit->space, (uint16_t)(file % 2), blocks, 0, extents);
		assert_true(count > 0);
		model_mark(model, extents, count, 1);
	}
	chunk.extent_count = (uint32_t)count;
	if (random_u32() % 10 == 0) {
		kv_space_cancel(unit->space, extents, (size_t)count);
		model_mark(model, extents, count, 0);
		return;
	}
	assert_int_equal(unit_try_publish(unit, model->inos[file], &chunk, 1, content, &freed), 0);
	assert_int_equal(count_blocks(freed.extents, (int)freed.count), model->blocks[file]);
	assert_true(model->limbo_count + freed.count <= 8192);
	for (size_t i = 0; i < freed.count; i++)
		model->limbo[model->limbo_count++] = freed.extents[i];
	kv_space_release(unit->space, &freed);
	model->used += blocks - (uint64_t)model->blocks[file];
	model->blocks[file] = blocks;
	if (random_u32() % 16 == 0)
		model_sync(unit, model);
}

/* Thousands of random allocations, publishes and frees: nothing is handed out twice, counts are
 * exact. */
static void test_space__model(void **state)
{
	struct unit *unit = *state;
	struct model *model = calloc(1, sizeof(*model));
	char name[24];

	assert_non_null(model);
	unit->space->loaded_max = 64;
	for (unsigned i = 0; i < FILES; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		model->inos[i] = unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644).ino;
	}
	for (unsigned i = 0; i < 6000; i++) {
		uint32_t blocks = random_u32() % 5 == 0 ? 0 : 1 + random_u32() % 256;

		model_write(unit, model, random_u32() % FILES, blocks);
		assert_int_equal(unit_space(unit).used, model->used);
		struct kv_space_usage usage = unit_space(unit);
		assert_true(usage.used + usage.busy <= 2 * BLOCKS);
		assert_int_equal(usage.freed, usage.busy); /* nothing is being written */
		if (i % 1000 == 999) {
			unit_check(unit);
			model_sync(unit, model);
			unit_reopen(unit);
			unit_check(unit);
			assert_int_equal(unit_space(unit).used, model->used);
			assert_int_equal(unit_space(unit).busy, 0);
		}
	}
	free(model);
}

/* Bitmaps are loaded when needed and dropped when clean: their number stays bounded. */
static void test_space__loaded_groups_are_bounded(void **state)
{
	struct unit *unit = *state;
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	struct kv_inode file;

	unit_close(unit);
	unit_remove(unit);
	unit_create(unit, 1, 200u * KV_GROUP_BLOCKS);
	unit_open(unit);
	unit->space->loaded_max = 64;
	file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	for (unsigned i = 0; i < 200; i++) {
		unit->space->devices[0].cursor = (uint64_t)i * KV_GROUP_BLOCKS;
		(void)unit_write(unit, file.ino, 200);
		if (i % 10 == 9)
			unit_sync(unit);
	}
	assert_true(unit->space->loaded_count <= 100);
	unit_reopen(unit);
	assert_int_equal(unit->space->loaded_count, 0); /* opening reads no bitmap */
	assert_int_equal(unit_space(unit).used, 200);
	assert_int_equal(alloc_on(unit, 0, 10, extents), 1);
	assert_int_equal(unit->space->loaded_count, 1);
	kv_space_cancel(unit->space, extents, 1);
}

/* A damaged bitmap costs its group's free blocks, nothing else. */
static void test_space__damaged_group_is_avoided(void **state)
{
	struct unit *unit = *state;
	struct kv_key group = kv_key_pair(KV_TABLE_SPACE_GROUP, 0, 0);
	MDB_val key = {group.size, group.bytes};
	char bad[] = "bad";
	MDB_val value = {3, bad};
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	MDB_txn *txn;

	(void)unit_write(unit, file.ino, 10);
	unit_reopen(unit);
	assert_int_equal(mdb_txn_begin(unit->index->env, NULL, 0, &txn), 0);
	assert_int_equal(mdb_put(txn, unit->index->dbi, &key, &value, 0), 0);
	assert_int_equal(mdb_txn_commit(txn), 0);
	assert_int_equal(alloc_on(unit, 0, 100, extents), 1);
	assert_int_equal(extents[0].start, KV_GROUP_BLOCKS);
	assert_int_equal(unit_space(unit).busy, 100 + KV_GROUP_BLOCKS - 10);
	assert_true(kv_index_check(unit->index, NULL, NULL) > 0);
	kv_space_cancel(unit->space, extents, 1);
	/* Its file cannot be freed, and the failure leaves it as it was. */
	assert_int_equal(
		unit_try_publish(unit, file.ino, NULL, 0, (struct kv_content){.replace = true},
			&(struct kv_freed){NULL, 0, 0}),
		-EUCLEAN);
	assert_int_equal(unit_get(unit, file.ino).blocks, 10);
	unit_close(unit);
	unit_remove(unit);
	unit_create(unit, 1, BLOCKS);
	unit_open(unit);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_space__reserve),
		TEST(test_space__quota),
		TEST(test_space__renewed),
		TEST(test_space__contiguous),
		TEST(test_space__fills_to_the_last_block),
		TEST(test_space__pieces),
		TEST(test_space__disabled_device),
		TEST(test_space__reuse_only_when_durable),
		TEST(test_space__no_reuse_while_commits_fail),
		TEST(test_space__restart),
		TEST(test_space__model),
		TEST(test_space__loaded_groups_are_bounded),
		TEST(test_space__damaged_group_is_avoided),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
