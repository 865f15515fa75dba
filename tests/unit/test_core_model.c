/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random changes compared with a model in memory: bytes, sizes, holes and blocks, with so little
 * DRAM that chunks are written early, punched and brought back all the time.
 */
#include "tests/unit/unit_pools.h"

#define SPACE_MIB 24u
#define ROUNDS 260u

struct model {
	uint8_t *bytes;
	bool *blocks;    /* present */
	bool *allocated; /* by fallocate */
	uint64_t size;
};

static uint64_t limit_blocks(void)
{
	return SPACE_MIB * MIB / KV_BLOCK_SIZE;
}

static void model_init(struct model *model)
{
	model->bytes = calloc(1, SPACE_MIB * MIB);
	model->blocks = calloc(limit_blocks(), sizeof(bool));
	model->allocated = calloc(limit_blocks(), sizeof(bool));
	model->size = 0;
	assert_non_null(model->bytes);
	assert_non_null(model->blocks);
	assert_non_null(model->allocated);
}

static void model_free(struct model *model)
{
	free(model->bytes);
	free(model->blocks);
	free(model->allocated);
}

static void model_copy(struct model *to, const struct model *from)
{
	memcpy(to->bytes, from->bytes, SPACE_MIB * MIB);
	memcpy(to->blocks, from->blocks, limit_blocks() * sizeof(bool));
	memcpy(to->allocated, from->allocated, limit_blocks() * sizeof(bool));
	to->size = from->size;
}

static void model_present(struct model *model, uint64_t offset, uint64_t length)
{
	for (uint64_t b = offset / KV_BLOCK_SIZE; b * KV_BLOCK_SIZE < offset + length; b++)
		model->blocks[b] = true;
}

static void model_allocate(struct model *model, uint64_t offset, uint64_t length)
{
	for (uint64_t b = offset / KV_BLOCK_SIZE; b * KV_BLOCK_SIZE < offset + length; b++)
		model->allocated[b] = true;
}

static uint64_t model_count(const struct model *model)
{
	uint64_t count = 0;

	for (uint64_t b = 0; b < limit_blocks(); b++)
		count += model->blocks[b] || model->allocated[b];
	return count;
}

/* Zeros, and absence of the blocks that lie inside wholly. */
static void model_punch(struct model *model, uint64_t offset, uint64_t length)
{
	memset(model->bytes + offset, 0, length);
	for (uint64_t b = kv_div_round_up(offset, KV_BLOCK_SIZE);
		(b + 1) * KV_BLOCK_SIZE <= offset + length; b++)
		model->blocks[b] = model->allocated[b] = false;
}

static void model_truncate(struct model *model, uint64_t size)
{
	if (size <= model->size)
		model_punch(model, size, SPACE_MIB * MIB - size);
	model->size = size;
}

/* What publishing leaves: nothing behind the end, and nothing that is only allocated unless the
 * writer goes on. */
static void model_publish(struct model *model, bool goes_on)
{
	for (uint64_t b = kv_div_round_up(model->size, KV_BLOCK_SIZE); b < limit_blocks(); b++)
		model->blocks[b] = false;
	if (!goes_on)
		memset(model->allocated, 0, limit_blocks() * sizeof(bool));
}

static uint64_t model_seek(const struct model *model, uint64_t offset, bool data)
{
	while (offset < model->size && model->blocks[offset / KV_BLOCK_SIZE] != data)
		offset = (offset / KV_BLOCK_SIZE + 1) * KV_BLOCK_SIZE;
	return kv_min_u64(offset, model->size);
}

static void expect_seek(struct kv_version *version, const struct model *model, uint64_t offset)
{
	uint64_t found;
	int r = kv_version_seek(version, offset, SEEK_DATA, &found);

	if (offset >= model->size || model_seek(model, offset, true) == model->size) {
		assert_int_equal(r, -ENXIO);
	} else {
		assert_int_equal(r, 0);
		assert_int_equal(found, model_seek(model, offset, true));
	}
	r = kv_version_seek(version, offset, SEEK_HOLE, &found);
	if (offset >= model->size) {
		assert_int_equal(r, -ENXIO);
	} else {
		assert_int_equal(r, 0);
		assert_int_equal(found, model_seek(model, offset, false));
	}
}

static void expect_range(
	struct kv_version *version, const struct model *model, uint64_t offset, size_t length)
{
	uint8_t *memory = malloc(length + 1);
	ssize_t expected = 0;

	assert_non_null(memory);
	if (offset < model->size)
		expected = (ssize_t)kv_min_u64(length, model->size - offset);
	assert_int_equal(kv_version_read(version, memory, length, offset), expected);
	assert_memory_equal(memory, model->bytes + offset, (size_t)expected);
	free(memory);
}

static void expect_all(struct kv_version *version, const struct model *model)
{
	assert_int_equal(unit_attr(version).size, model->size);
	assert_int_equal(unit_attr(version).blocks, model_count(model));
	for (uint64_t at = 0; at < model->size; at += 3 * MIB)
		expect_range(version, model, at, 3 * MIB);
}

struct piece {
	uint64_t offset;
	uint64_t length;
};

/* Pieces of all sizes, many of them at the start of chunks; or (BLOCKS) a few blocks, whole ones
 * most of the time, few of them side by side. */
static struct piece choose(uint64_t *seed, bool blocks)
{
	struct piece piece = {.offset = unit_random(seed) % (SPACE_MIB * MIB - 1)};

	if (blocks && unit_random(seed) % 16) {
		piece.length = (1 + unit_random(seed) % 3) * KV_BLOCK_SIZE;
		if (unit_random(seed) % 4)
			piece.offset &= ~(uint64_t)(KV_BLOCK_SIZE - 1);
	} else {
		piece.length = 1 + unit_random(seed) % (unit_random(seed) % 4 ? 70000 : 3 * MIB);
		if (unit_random(seed) % 3 == 0)
			piece.offset &= ~(MIB - 1);
		if (unit_random(seed) % 5 == 0)
			piece.length = (1 + unit_random(seed) % 3) * MIB;
	}
	piece.length = kv_min_u64(piece.length, SPACE_MIB * MIB - piece.offset);
	return piece;
}

static void change(struct kv_version *version, struct model *model, uint64_t *seed, bool blocks)
{
	struct piece piece = choose(seed, blocks);
	uint64_t offset = piece.offset, length = piece.length;
	uint64_t kind = unit_random(seed) % (blocks ? 48 : 12);

	/* With blocks, three in four more are writes, and cuts are rare. */
	if (kind >= 12 || (blocks && kind == 6 && unit_random(seed) % 8))
		kind = 0;
	if (kind < 6) {
		uint8_t *memory = malloc(length);
		unit_random_fill(seed, memory, length);
		assert_int_equal(kv_version_write(version, memory, length, offset), 0);
		memcpy(model->bytes + offset, memory, length);
		model_present(model, offset, length);
		model->size = kv_max_u64(model->size, offset + length);
		free(memory);
	} else if (kind < 7) {
		assert_int_equal(kv_version_truncate(version, offset), 0);
		model_truncate(model, offset);
	} else if (kind < 8) {
		assert_int_equal(kv_version_allocate(version, 0, offset, length), 0);
		model_allocate(model, offset, length);
		model->size = kv_max_u64(model->size, offset + length);
	} else if (kind < 9) {
		assert_int_equal(
			kv_version_allocate(version, FALLOC_FL_KEEP_SIZE, offset, length), 0);
		model_allocate(model, offset, length);
	} else if (kind < 11) {
		assert_int_equal(
			kv_version_allocate(version, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
				offset, length),
			0);
		model_punch(model, offset, length);
	} else {
		assert_int_equal(
			kv_version_allocate(version, FALLOC_FL_ZERO_RANGE, offset, length), 0);
		model_punch(model, offset, length);
		model_allocate(model, offset, length);
		model->size = kv_max_u64(model->size, offset + length);
	}
	expect_range(version, model, unit_random(seed) % (SPACE_MIB * MIB - MIB), 200000);
	expect_seek(version, model, unit_random(seed) % (SPACE_MIB * MIB));
}

/* What is clean goes, or what is dirty is written so that it can, now and then. */
static void evict(struct unit *unit, uint64_t *seed)
{
	if (unit_random(seed) % 4 == 0)
		kv_writeback_kick(unit->core, true);
	if (unit_random(seed) % 3 == 0)
		(void)kv_evict_reclaim(unit->core, unit_random(seed) % MIB);
}

struct options {
	uint64_t seed;
	uint64_t dram;
	unsigned devices;
	bool blocks;
	unsigned rounds;
};

static void run_model(struct options options)
{
	uint64_t seed = options.seed;
	struct unit unit;
	struct model model, old_model;
	struct kv_version *old = NULL, *version;

	unit_init(&unit,
		(struct unit_sizes){
			.store = 200 * MIB, .dram = options.dram, .devices = options.devices});
	model_init(&model);
	model_init(&old_model);
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	version = unit_new(file, NULL);
	for (unsigned i = 0; i < options.rounds; i++) {
		change(version, &model, &seed, options.blocks);
		if (options.blocks)
			evict(&unit, &seed);
		unit_expect_pages(version);
		assert_int_equal(unit_attr(version).size, model.size);
		assert_int_equal(unit_attr(version).blocks, model_count(&model));
		if (unit_random(&seed) % (options.blocks ? 60 : 20))
			continue;
		bool goes_on = unit_random(&seed) % 2;
		assert_int_equal(goes_on ? kv_version_publish(version) : unit_publish(version), 0);
		model_publish(&model, goes_on);
		if (unit_random(&seed) % 2)
			assert_int_equal(kv_version_sync(version), 0);
		expect_all(version, &model);
		if (old) {
			expect_all(old, &old_model);
			kv_version_unref(old);
		}
		old = version;
		model_copy(&old_model, &model);
		model_publish(&old_model, false);
		version = unit_new(file, old);
		if (goes_on)
			kv_version_continue(version, old);
	}
	expect_all(version, &model);
	assert_int_equal(unit_publish(version), 0);
	model_publish(&model, false);
	kv_version_unref(old);
	kv_version_unref(version);
	kv_file_put(file);
	unit_sync(&unit);
	unit_expect_used(&unit, model_count(&model));
	unit_chill(&unit);
	file = unit_file(&unit, ino);
	version = unit_current(file);
	expect_all(version, &model);
	kv_version_unref(version);
	kv_file_put(file);
	model_free(&model);
	model_free(&old_model);
	/* The test proves something about spilling only if chunks went out and came back. */
	assert_true(kv_stat_get(&unit.stats.fill_chunks) > 0);
	assert_true(kv_stat_get(&unit.stats.writeback_chunks) > 20);
	unit_done(&unit);
}

/* Random changes give what the model says, with one device and the least DRAM. */
static void test_core_model__least_dram(void **state)
{
	(void)state;
	run_model((struct options){.seed = 0x1234567, .dram = 16 * MIB, .rounds = ROUNDS});
}

/* The same with enough DRAM. */
static void test_core_model__enough_dram(void **state)
{
	(void)state;
	run_model((struct options){.seed = 0x777, .dram = 256 * MIB, .rounds = ROUNDS});
}

/* The same over three devices. */
static void test_core_model__three_devices(void **state)
{
	(void)state;
	run_model((struct options){
		.seed = 0xabcdef, .dram = 16 * MIB, .devices = 3, .rounds = ROUNDS});
}

/* A few blocks at a time, with chunks that are written, dropped from DRAM and brought back in all
 * states, and what each costs in DRAM right to the page. */
static void test_core_model__blocks(void **state)
{
	(void)state;
	for (unsigned i = 0; i < 3; i++)
		run_model((struct options){.seed = 0x5eed + i,
			.dram = i ? 16 * MIB : 64 * MIB,
			.devices = i == 2 ? 3 : 0,
			.blocks = true,
			.rounds = 2 * ROUNDS});
}

/* A write to a huge offset, truncation to a huge size and seeking there cost next to nothing. */
static void test_core_model__huge_sparse(void **state)
{
	struct unit unit;
	const uint64_t huge = UINT64_C(1) << 50;
	uint64_t found;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	assert_int_equal(kv_version_truncate(version, KV_FILE_SIZE_MAX + 1), -EFBIG);
	assert_int_equal(kv_version_write(version, "x", 1, KV_FILE_SIZE_MAX), -EFBIG);
	assert_int_equal(kv_version_truncate(version, KV_FILE_SIZE_MAX), 0);
	assert_int_equal(kv_version_truncate(version, huge), 0);
	assert_int_equal(unit_write_pattern(version, 5000, huge - 5000, 1), 0);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	assert_int_equal(unit_attr(version).blocks, 2);
	assert_int_equal(kv_version_seek(version, 0, SEEK_DATA, &found), 0);
	assert_int_equal(found, huge - 8192);
	kv_version_unref(version);
	kv_file_put(file);
	unit_chill(&unit);
	file = unit_file(&unit, ino);
	struct kv_version *base = unit_current(file);
	assert_int_equal(kv_version_seek(base, 5, SEEK_DATA, &found), 0);
	assert_int_equal(found, huge - 8192);
	version = unit_new(file, base);
	assert_int_equal(unit_write_pattern(version, 10, 0, 2), 0);
	assert_int_equal(kv_version_seek(version, 5000, SEEK_DATA, &found), 0);
	assert_int_equal(found, huge - 8192);
	assert_int_equal(unit_attr(version).blocks, 3);
	assert_int_equal(kv_version_truncate(version, huge / 2), 0);
	assert_int_equal(kv_version_truncate(version, huge), 0);
	assert_int_equal(unit_attr(version).blocks, 1);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	kv_version_unref(base);
	kv_version_unref(version);
	kv_file_put(file);
	unit_expect_used(&unit, 1);
	unit_chill(&unit);
	file = unit_file(&unit, ino);
	base = unit_current(file);
	unit_expect_pattern(base, 10, 0, 2);
	assert_int_equal(kv_version_seek(base, 4096, SEEK_DATA, &found), -ENXIO);
	kv_version_unref(base);
	kv_file_put(file);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_model__least_dram),
		cmocka_unit_test(test_core_model__enough_dram),
		cmocka_unit_test(test_core_model__three_devices),
		cmocka_unit_test(test_core_model__blocks),
		cmocka_unit_test(test_core_model__huge_sparse),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
