/* SPDX-License-Identifier: Apache-2.0 */
/* Residency in device memory: budget, order of eviction, states. */
#include "tests/unit/unit_hbm.h"

/* The whole budget is taken at the start, and stays taken: by files or by spares. */
static void test_hbm__reserves_its_budget(void **state)
{
	(void)state;
	assert_int_equal(seen.live, BUDGET / SEGMENT);
	assert_int_equal(usage()->reserve, BUDGET);
	resident(1, SEGMENT + GRANULE);
	assert_int_equal(usage()->used, SEGMENT + GRANULE);
	assert_true(usage()->used + usage()->reserve <= BUDGET);
	kvg_hbm_stale(find(1));
	assert_int_equal(usage()->used, 0);
	assert_int_equal(usage()->reserve, BUDGET);
}

/* Segments cover the file; only the last one is smaller; less than a granule is lost. */
static void test_hbm__cuts_a_file_into_segments(void **state)
{
	struct kvg_entry *entry = admit(1, 2 * SEGMENT + 1);

	(void)state;
	assert_int_equal(entry->count, 3);
	assert_int_equal(entry->parts[0].block->size, SEGMENT);
	assert_int_equal(entry->parts[2].block->size, GRANULE);
	assert_int_equal(entry->state, KVG_STAGING);
	assert_non_null(entry->parts[2].block->mapping);
	kvg_hbm_staged(entry);
	assert_int_equal(entry->state, KVG_RESIDENT);
	assert_null(entry->parts[2].block->mapping);
}

/* Too small for a segment of its own; too large for the budget. */
static void test_hbm__refuses_sizes_that_make_no_sense(void **state)
{
	(void)state;
	assert_int_equal(try_admit(1, GRANULE - 1, 0), -ERANGE);
	assert_int_equal(try_admit(1, 0, 0), -ERANGE);
	assert_int_equal(try_admit(1, BUDGET + 1, 0), -E2BIG);
	assert_int_equal(usage()->entries, 0);
}

/* The one used longest ago goes; a look is a use; what is mapped or being staged stays. */
static void test_hbm__evicts_the_least_recently_used(void **state)
{
	struct kvg_holder holder = {0};
	struct kvg_map *map;

	(void)state;
	resident(1, SEGMENT);
	resident(2, SEGMENT);
	resident(3, SEGMENT);
	admit(4, SEGMENT);
	assert_int_equal(kvg_hbm_map(find(1), &holder, false, &map), 0);
	assert_non_null(find(2));
	resident(5, SEGMENT);
	assert_null(find(3));
	assert_non_null(find(2));
	assert_int_equal(usage()->evicted, 1);
	assert_int_equal(seen.gone_ino, 3);
	/* 1 is mapped, 4 is being staged: 2 and 5 can go, which is not enough. */
	assert_int_equal(try_admit(6, BUDGET, 0), -ENOSPC);
	kvg_hbm_unmap(map);
	kvg_hbm_failed(find(4), -EIO, 0);
	assert_int_equal(try_admit(6, BUDGET, 0), 0);
	kvg_hbm_staged(find(6));
}

/* Users never share an entry, nor do versions. */
static void test_hbm__keeps_users_and_versions_apart(void **state)
{
	struct kvg_key key = key_of(1);

	(void)state;
	resident(1, SEGMENT);
	key.uid = 8;
	assert_null(kvg_hbm_find(hbm, &key));
	key = key_of(1);
	key.version = 2;
	assert_null(kvg_hbm_find(hbm, &key));
}

/* Part of what is there, or on its way, is there too; what only overlaps is not. */
static void test_hbm__finds_what_covers_a_stretch(void **state)
{
	static const struct {
		uint64_t first, end;
		int found; /* which of the entries below; -1: none */
	} wanted[] = {
		{0, 4, 0},
		{8, 16, 0},
		{16, 24, 1},
		{20, 32, 1},
		{8, 24, -1},
		{24, 40, -1},
		{32, 40, 2},
		{0, 40, -1},
	};
	static const uint64_t ends[][2] = {{0, 16}, {16, 32}, {32, 40}};
	struct kvg_key key = key_of(1);
	struct kvg_entry *entries[3];

	(void)state;
	for (unsigned i = 0; i < 3; i++) {
		key.first = ends[i][0] * MIB;
		key.end = ends[i][1] * MIB;
		assert_int_equal(
			kvg_hbm_admit(hbm, &key, (key.end - key.first) / 4, 0, &entries[i]), 0);
	}
	kvg_hbm_staged(entries[1]);
	for (unsigned i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
		key.first = wanted[i].first * MIB;
		key.end = wanted[i].end * MIB;
		assert_ptr_equal(kvg_hbm_find(hbm, &key),
			wanted[i].found < 0 ? NULL : entries[wanted[i].found]);
	}
	/* One that failed is found as what it is only, and does not hide others. */
	kvg_hbm_failed(entries[2], -EIO, 0);
	assert_null(kvg_hbm_find(hbm, &(struct kvg_key){1, 1, 7, 34 * MIB, 36 * MIB}));
	assert_int_equal(kvg_hbm_find(hbm, &(struct kvg_key){1, 1, 7, 32 * MIB, 40 * MIB})->state,
		KVG_FAILED);
	kvg_hbm_staged(entries[0]);
}

/* An error of the device's: what is idle makes way, three times at most, then ENOSPC. */
static void test_hbm__evicts_when_the_device_is_short(void **state)
{
	(void)state;
	resident(1, GRANULE);
	resident(2, GRANULE);
	seen.fail_at = 1;
	seen.fails = 1;
	assert_int_equal(try_admit(3, GRANULE, 0), 0);
	assert_null(find(1));
	assert_non_null(find(2));
	kvg_hbm_staged(find(3));
	seen.fail_at = 1;
	seen.fails = 100;
	assert_int_equal(try_admit(4, GRANULE, 0), -ENOSPC);
	assert_null(find(2));
	assert_null(find(3));
	seen.fail_at = 0;
	assert_int_equal(usage()->used, 0);
}

/* At every single allocation that fails: nothing is lost, and the budget still adds up. */
static void test_hbm__survives_any_failed_allocation(void **state)
{
	(void)state;
	for (unsigned at = 1; at < 8; at++) {
		seen.fail_at = at;
		seen.fails = 100;
		int r = try_admit(1, 3 * SEGMENT + GRANULE, 0);
		seen.fail_at = 0;
		assert_true(r == 0 || r == -ENOSPC);
		if (r == 0) {
			kvg_hbm_staged(find(1));
			kvg_hbm_stale(find(1));
		}
		assert_int_equal(usage()->used, 0);
	}
}

/* A failure is remembered for 100 ms, then twice as long each time, up to 10 s. */
static void test_hbm__waits_longer_after_each_failure(void **state)
{
	int64_t now_ms = 1000, wait_ms = 100;

	(void)state;
	for (unsigned i = 0; i < 12; i++) {
		assert_int_equal(try_admit(1, SEGMENT, now_ms), 0);
		kvg_hbm_failed(find(1), -EIO, now_ms);
		assert_int_equal(usage()->used, 0);
		assert_int_equal(find(1)->state, KVG_FAILED);
		assert_int_equal(try_admit(1, SEGMENT, now_ms + wait_ms - 1), -EIO);
		now_ms += wait_ms;
		wait_ms = wait_ms * 2 < 10000 ? wait_ms * 2 : 10000;
	}
	assert_int_equal(try_admit(1, SEGMENT, now_ms + wait_ms), 0);
	kvg_hbm_staged(find(1));
	assert_int_equal(find(1)->failures, 0);
	/* One that nobody tries again is forgotten. */
	assert_int_equal(try_admit(2, SEGMENT, now_ms), 0);
	kvg_hbm_failed(find(2), -EIO, now_ms);
	kvg_hbm_tick(hbm, now_ms + 200000);
	assert_null(find(2));
}

/* Who had mapped early keeps the memory of a staging that failed, and it counts. */
static void test_hbm__counts_what_is_mapped_of_a_failure(void **state)
{
	struct kvg_holder holder = {0};
	struct kvg_map *map;
	struct kvg_entry *entry = admit(1, SEGMENT);

	(void)state;
	assert_int_equal(kvg_hbm_map(entry, &holder, false, &map), 0);
	kvg_hbm_failed(entry, -EIO, 0);
	assert_int_equal(usage()->used, SEGMENT);
	assert_int_equal(find(1)->state, KVG_FAILED);
	assert_int_equal(try_admit(1, SEGMENT, 50), -EIO);
	kvg_hbm_unmap(map);
	assert_int_equal(usage()->used, 0);
}

/* What changed is found no more, but lives for those who have it. */
static void test_hbm__keeps_stale_content_for_its_readers(void **state)
{
	struct kvg_holder holder = {0};
	struct kvg_map *map;
	struct kvg_entry *entry = resident(1, SEGMENT);

	(void)state;
	assert_int_equal(kvg_hbm_map(entry, &holder, false, &map), 0);
	kvg_hbm_stale(entry);
	assert_null(find(1));
	assert_int_equal(usage()->used, SEGMENT);
	assert_int_equal(seen.gone, 0);
	kvg_hbm_unmap(map);
	assert_int_equal(seen.gone, 1);
	assert_int_equal(usage()->used, 0);
	/* While it is being staged, it goes when that ends. */
	entry = admit(2, SEGMENT);
	kvg_hbm_stale(entry);
	assert_int_equal(usage()->used, SEGMENT);
	kvg_hbm_staged(entry);
	assert_int_equal(usage()->used, 0);
}

/* A segment that was exported never holds another file's bytes. */
static void test_hbm__never_uses_an_exported_segment_again(void **state)
{
	int fds[4];

	(void)state;
	resident(1, BUDGET);
	for (unsigned i = 0; i < 4; i++)
		assert_int_equal(kvg_hbm_export(find(1), i, &fds[i]), 0);
	resident(2, BUDGET);
	for (unsigned i = 0; i < 4; i++) {
		struct stat mine, theirs;
		int other;

		assert_int_equal(fstat(fds[i], &mine), 0);
		for (unsigned k = 0; k < 4; k++) {
			assert_int_equal(kvg_hbm_export(find(2), k, &other), 0);
			assert_int_equal(fstat(other, &theirs), 0);
			assert_true(mine.st_ino != theirs.st_ino);
			(void)close(other);
		}
		(void)close(fds[i]);
	}
}

/* Where the device gives memory as it was, no byte of it is shared before it was cleared. */
static void test_hbm__clears_memory_before_it_is_shared(void **state)
{
	(void)state;
	assert_int_equal(seen.cleared, BUDGET);
	admit(1, 2 * SEGMENT + 1);
	assert_int_equal(seen.cleared, BUDGET + GRANULE);
	assert_true(seen.synced);
	kvg_hbm_staged(find(1));
	/* What is given back is replaced: two segments, and the one that made way for the small
	 * one. */
	kvg_hbm_stale(find(1));
	assert_int_equal(seen.cleared, BUDGET + GRANULE + 3 * SEGMENT);
	resident(2, SEGMENT);
	assert_int_equal(seen.cleared, BUDGET + GRANULE + 3 * SEGMENT);
	assert_true(seen.synced);
}

/* The second hint within a minute stages; the third begins anew. */
static void test_hbm__takes_the_second_hint(void **state)
{
	const struct kvg_key one = key_of(1), two = key_of(2);

	(void)state;
	assert_false(kvg_hbm_hint(hbm, &one, 0));
	assert_false(kvg_hbm_hint(hbm, &two, 0));
	assert_true(kvg_hbm_hint(hbm, &one, KVG_GHOST_MS));
	assert_false(kvg_hbm_hint(hbm, &one, KVG_GHOST_MS));
	assert_false(kvg_hbm_hint(hbm, &two, KVG_GHOST_MS + 1));
}

/* ---- A random walk beside a model ---- */

#define WALK_FILES 8u
#define WALK_MAPS 16u

struct model {
	struct kvg_entry *entry; /* found by its key */
	uint64_t size;
};

struct walk {
	struct model files[WALK_FILES];
	struct kvg_map *maps[WALK_MAPS];
	struct kvg_holder holders[WALK_MAPS];
	int64_t now_ms;
	unsigned random;
};

static void count_bytes(void *arg, struct kvg_entry *entry)
{
	*(uint64_t *)arg += entry->bytes;
	assert_false(entry->stale);
	assert_true(entry->state == KVG_FAILED || entry->count > 0);
}

static void walk_check(struct walk *walk)
{
	uint64_t bytes = 0;
	unsigned maps = 0;

	kvg_hbm_all(hbm, count_bytes, &bytes);
	for (unsigned i = 0; i < WALK_MAPS; i++) {
		maps += walk->maps[i] != NULL;
		assert_int_equal(walk->holders[i].maps, walk->maps[i] != NULL);
		assert_true(!walk->maps[i] || walk->maps[i]->entry->map_count > 0);
		assert_true(walk->maps[i] || walk->holders[i].overdue == 0);
	}
	assert_int_equal(usage()->maps, maps);
	assert_true(bytes <= usage()->used && usage()->used <= BUDGET);
	assert_true(usage()->used + usage()->reserve <= BUDGET);
}

static void walk_map(struct walk *walk, uint64_t ino, unsigned slot)
{
	struct kvg_entry *entry = find(ino);
	bool overdue = walk->holders[slot].overdue > 0;

	if (!entry || entry->state == KVG_FAILED || walk->maps[slot])
		return;
	assert_int_equal(kvg_hbm_map(entry, &walk->holders[slot], rand_r(&walk->random) % 2,
				 &walk->maps[slot]),
		overdue ? -EDQUOT : 0);
}

static void walk_step(struct walk *walk)
{
	uint64_t ino = 1 + (uint64_t)rand_r(&walk->random) % WALK_FILES;
	unsigned slot = (unsigned)rand_r(&walk->random) % WALK_MAPS;
	struct kvg_entry *entry = find(ino);

	switch (rand_r(&walk->random) % 7) {
	case 0:
	case 1:
		if (!entry || entry->state == KVG_FAILED)
			(void)try_admit(ino, GRANULE * (1 + (uint64_t)rand_r(&walk->random) % 8),
				walk->now_ms);
		break;
	case 2:
		if (entry && entry->state == KVG_STAGING)
			kvg_hbm_staged(entry);
		break;
	case 3:
		if (entry && entry->state == KVG_STAGING && rand_r(&walk->random) % 4 == 0)
			kvg_hbm_failed(entry, -EIO, walk->now_ms);
		break;
	case 4:
		walk_map(walk, ino, slot);
		break;
	case 5:
		if (walk->maps[slot]) {
			kvg_hbm_unmap(walk->maps[slot]);
			walk->maps[slot] = NULL;
		}
		break;
	default:
		/* What is being staged goes stale too, but must still be told of its end. */
		if (entry && entry->state != KVG_STAGING && rand_r(&walk->random) % 4 == 0)
			kvg_hbm_stale(entry);
		walk->now_ms += rand_r(&walk->random) % 500;
		(void)kvg_hbm_tick(hbm, walk->now_ms);
	}
}

static void finish_staging(void *arg, struct kvg_entry *entry)
{
	(void)arg;
	if (entry->state == KVG_STAGING)
		kvg_hbm_staged(entry);
}

/* Whatever happens in whatever order, bytes and maps add up, and all comes back at the end. */
static void test_hbm__adds_up_in_a_random_walk(void **state)
{
	unsigned steps = getenv("KVFS_LONG") ? 300000 : 30000;
	struct walk walk = {.random = 1};

	(void)state;
	for (unsigned i = 0; i < steps; i++) {
		seen.revoked = 0;
		walk_step(&walk);
		if (i % 16 == 0)
			walk_check(&walk);
	}
	for (unsigned i = 0; i < WALK_MAPS; i++)
		if (walk.maps[i])
			kvg_hbm_unmap(walk.maps[i]);
	kvg_hbm_all(hbm, finish_staging, NULL);
	assert_int_equal(usage()->maps, 0);
	assert_int_equal(usage()->orphaned, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(test_hbm__##name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(reserves_its_budget),
		TEST(cuts_a_file_into_segments),
		TEST(refuses_sizes_that_make_no_sense),
		TEST(evicts_the_least_recently_used),
		TEST(keeps_users_and_versions_apart),
		TEST(finds_what_covers_a_stretch),
		TEST(evicts_when_the_device_is_short),
		TEST(survives_any_failed_allocation),
		TEST(waits_longer_after_each_failure),
		TEST(counts_what_is_mapped_of_a_failure),
		TEST(keeps_stale_content_for_its_readers),
		TEST(never_uses_an_exported_segment_again),
		cmocka_unit_test_setup_teardown(
			test_hbm__clears_memory_before_it_is_shared, setup_used, teardown),
		TEST(takes_the_second_hint),
		TEST(adds_up_in_a_random_walk),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
