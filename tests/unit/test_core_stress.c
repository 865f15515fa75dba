/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many threads on few files with little of everything: what is read is always some version, whole.
 */
#include "tests/unit/unit_core.h"

#define THREADS 6u
#define FILES 5u
#define STEPS 60u

struct stress {
	struct unit *unit;
	uint64_t inos[FILES];
	uint64_t seed;
};

/* Every version holds its own number in every word, so that mixed bytes show. */
static void expect_one_version(struct kv_version *version)
{
	struct kv_version_attr attr = unit_attr(version);
	uint8_t *memory = malloc(64 << 10);
	uint64_t first = 0;

	assert_non_null(memory);
	for (uint64_t at = 0; at + 8 <= attr.size; at += 700001) {
		ssize_t n = kv_version_read(version, memory, 64 << 10, at & ~UINT64_C(7));
		assert_true(n >= 8);
		for (ssize_t i = 0; i + 8 <= n; i += 8) {
			uint64_t word = kv_get_le64(memory + i);
			if (at == 0 && i == 0)
				first = word;
			assert_int_equal(word, first);
		}
	}
	free(memory);
}

static void read_one(struct stress *stress, uint64_t ino)
{
	struct kv_file *file = unit_file(stress->unit, ino);
	struct kv_version *version;
	enum kv_access access;

	if (kv_file_current(file, &version) == 0) {
		kv_file_opened(file);
		assert_int_equal(
			kv_version_open(version, unit_random(&stress->seed) % 3 == 0, &access), 0);
		kv_file_touch(file);
		if (access == KV_ACCESS_HOT)
			assert_true(kv_version_backing(version) > 0);
		expect_one_version(version);
		kv_version_close(version);
		kv_file_closed(file);
		kv_version_unref(version);
	}
	kv_file_put(file);
}

static void write_one(struct stress *stress, uint64_t ino)
{
	struct kv_file *file = unit_file(stress->unit, ino);
	uint64_t size = (1 + unit_random(&stress->seed) % 700000) * 8;
	uint64_t word = unit_random(&stress->seed);
	struct kv_version *version, *base = NULL;
	uint8_t *memory = malloc(MIB);

	assert_non_null(memory);
	for (size_t i = 0; i < MIB; i += 8)
		kv_put_le64(memory + i, word);
	kv_file_opened(file);
	if (unit_random(&stress->seed) % 2)
		(void)kv_file_current(file, &base);
	version = unit_new(file, base);
	assert_int_equal(kv_version_truncate(version, size), 0);
	for (uint64_t at = 0; at < size; at += MIB)
		assert_int_equal(
			kv_version_write(version, memory, kv_min_u64(MIB, size - at), at), 0);
	if (unit_random(&stress->seed) % 8)
		assert_int_equal(unit_publish(version), 0);
	if (unit_random(&stress->seed) % 8 == 0)
		(void)kv_version_sync(version);
	kv_version_unref(base);
	kv_version_unref(version);
	kv_file_closed(file);
	kv_file_put(file);
	free(memory);
}

static void *stress_main(void *arg)
{
	struct stress *stress = arg;

	for (unsigned i = 0; i < STEPS; i++) {
		uint64_t ino = stress->inos[unit_random(&stress->seed) % FILES];

		if (unit_random(&stress->seed) % 3)
			read_one(stress, ino);
		else
			write_one(stress, ino);
	}
	return NULL;
}

/* Readers, rewriters and both evictors at once: no mixed bytes, nothing leaked, the index
 * consistent. */
static void test_core_stress__readers_and_rewriters(void **state)
{
	struct unit unit;
	struct stress stress[THREADS];
	pthread_t threads[THREADS];
	uint64_t blocks = 0;

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 256 * MIB, .dram = 24 * MIB, .devices = 2});
	for (unsigned i = 0; i < THREADS; i++) {
		stress[i] = (struct stress){.unit = &unit, .seed = 1000 + i};
		for (unsigned k = 0; k < FILES; k++) {
			char name[8];
			(void)snprintf(name, sizeof(name), "f%u", k);
			stress[i].inos[k] = i ? stress[0].inos[k] : unit_create(&unit, name);
		}
	}
	for (unsigned i = 0; i < THREADS; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, stress_main, &stress[i]), 0);
	for (unsigned i = 0; i < THREADS; i++)
		assert_int_equal(pthread_join(threads[i], NULL), 0);
	unit_sync(&unit);
	for (unsigned k = 0; k < FILES; k++) {
		struct kv_inode inode;
		if (kv_index_get(unit_index(&unit), stress[0].inos[k], &inode) == 0)
			blocks += inode.blocks;
	}
	unit_expect_used(&unit, blocks);
	unit_chill(&unit);
	for (unsigned k = 0; k < FILES; k++)
		read_one(&stress[0], stress[0].inos[k]);
	unit_done(&unit);
}

struct appender {
	struct kv_version *version;
	uint64_t part;
};

#define PARTS 4u
#define PIECE 5000u
#define PIECES 600u

static void *append_main(void *arg)
{
	struct appender *appender = arg;

	/* Pieces of several threads lie side by side in the same chunks. */
	for (uint64_t i = 0; i < PIECES; i++)
		assert_int_equal(unit_write_pattern(appender->version, PIECE,
					 (i * PARTS + appender->part) * PIECE, 4),
			0);
	return NULL;
}

/* Several threads write one version, while chunks of it are written early and punched. */
static void test_core_stress__writers_of_one_version(void **state)
{
	struct unit unit;
	struct appender appenders[PARTS];
	pthread_t threads[PARTS];

	(void)state;
	unit_init(&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 16 * MIB});
	uint64_t ino = unit_create(&unit, "a");
	struct kv_file *file = unit_file(&unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	for (unsigned i = 0; i < PARTS; i++) {
		appenders[i] = (struct appender){version, i};
		assert_int_equal(pthread_create(&threads[i], NULL, append_main, &appenders[i]), 0);
	}
	for (unsigned i = 0; i < PARTS; i++)
		assert_int_equal(pthread_join(threads[i], NULL), 0);
	unit_expect_pattern(version, (uint64_t)PIECE * PARTS * PIECES, 0, 4);
	assert_int_equal(unit_publish(version), 0);
	assert_int_equal(kv_version_sync(version), 0);
	kv_version_unref(version);
	kv_file_put(file);
	unit_expect_used(&unit, kv_div_round_up((uint64_t)PIECE * PARTS * PIECES, KV_BLOCK_SIZE));
	unit_chill(&unit);
	unit_expect_file(&unit, ino, (uint64_t)PIECE * PARTS * PIECES, 4);
	unit_done(&unit);
}

struct churn {
	struct unit *unit;
	unsigned number;
};

static void *churn_main(void *arg)
{
	struct churn *churn = arg;
	char name[24];

	for (unsigned i = 0; i < 60; i++) {
		(void)snprintf(name, sizeof(name), "c%u.%u", churn->number, i);
		uint64_t size = 300000 * (1 + i % 5);
		uint64_t ino = unit_put(churn->unit, name, size, i);
		struct kv_file *file = unit_file(churn->unit, ino);
		struct kv_version *version;
		/* It may be evicted already; if not, it reads back whole. */
		if (kv_file_current(file, &version) == 0) {
			unit_expect_pattern(version, size, 0, i);
			kv_version_unref(version);
		}
		kv_file_put(file);
	}
	return NULL;
}

/* Several writers on a store that is always full: no error, no lost space. */
static void test_core_stress__full_store(void **state)
{
	struct unit unit;
	struct churn churns[4];
	pthread_t threads[4];

	(void)state;
	unit_init(
		&unit, (struct unit_sizes){.store = 64 * MIB, .dram = 24 * MIB, .quota = 32 * MIB});
	for (unsigned i = 0; i < 4; i++) {
		churns[i] = (struct churn){&unit, i};
		assert_int_equal(pthread_create(&threads[i], NULL, churn_main, &churns[i]), 0);
	}
	for (unsigned i = 0; i < 4; i++)
		assert_int_equal(pthread_join(threads[i], NULL), 0);
	unit_sync(&unit);
	assert_true(kv_stat_get(&unit.stats.evicted_store) > 100);
	unit_done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_core_stress__readers_and_rewriters),
		cmocka_unit_test(test_core_stress__writers_of_one_version),
		cmocka_unit_test(test_core_stress__full_store),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
