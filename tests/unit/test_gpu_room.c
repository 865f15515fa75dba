/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory among many: stretches that overlap, users' shares, revocation, ends of prefetches.
 */
#include "tests/unit/unit_hbm.h"

/* Stretches that overlap have what they have in common once, from whoever brings it first. */
static void test_hbm__shares_what_stretches_have_in_common(void **state)
{
	const struct kvg_key whole = {1, 1, 7, 0, 3 * SEGMENT},
			     end = {1, 1, 7, 2 * SEGMENT, BUDGET};
	const struct kvg_key start = {1, 1, 7, 0, SEGMENT}, other = {1, 1, 8, 0, SEGMENT};
	struct kvg_entry *first, *second, *third;

	(void)state;
	assert_false(kvg_hbm_has(hbm, &start));
	assert_int_equal(kvg_hbm_admit(hbm, &whole, 3 * SEGMENT, 0, &first), 0);
	assert_int_equal(kvg_hbm_admit(hbm, &end, SEGMENT + GRANULE, 0, &second), 0);
	assert_int_equal(usage()->used, 3 * SEGMENT + GRANULE);
	assert_ptr_equal(first->parts[2].block, second->parts[0].block);
	assert_true(first->parts[2].own && !second->parts[0].own && second->parts[1].own);
	assert_true(kvg_hbm_has(hbm, &start) && !kvg_hbm_has(hbm, &other));
	/* The second one is not there before the first one has brought its part of it. */
	assert_int_equal(kvg_hbm_filled(second), -EAGAIN);
	kvg_hbm_staged(first);
	assert_int_equal(kvg_hbm_filled(second), 0);
	kvg_hbm_staged(second);
	/* What one of them does not need any more stays for the other. */
	kvg_hbm_stale(first);
	assert_int_equal(usage()->used, SEGMENT + GRANULE);
	assert_int_equal(kvg_hbm_admit(hbm, &whole, 3 * SEGMENT, 0, &third), 0);
	assert_true(third->parts[0].own && third->parts[1].own && !third->parts[2].own);
	assert_int_equal(usage()->used, 3 * SEGMENT + GRANULE);
	kvg_hbm_staged(third);
	kvg_hbm_stale(second);
	assert_int_equal(usage()->used, 3 * SEGMENT);
	kvg_hbm_stale(third);
	assert_int_equal(usage()->used, 0);
}

/* Who waits for another's part fails with it, and nobody gets that part any more. */
static void test_hbm__fails_with_what_it_shares(void **state)
{
	const struct kvg_key one = {1, 1, 7, 0, 2 * SEGMENT}, two = {1, 1, 7, SEGMENT, 3 * SEGMENT};
	struct kvg_holder holder = {0};
	struct kvg_entry *first, *second;
	struct kvg_map *map;

	(void)state;
	assert_int_equal(kvg_hbm_admit(hbm, &one, 2 * SEGMENT, 0, &first), 0);
	assert_int_equal(kvg_hbm_admit(hbm, &two, 2 * SEGMENT, 0, &second), 0);
	assert_int_equal(kvg_hbm_map(first, &holder, false, &map), 0);
	kvg_hbm_failed(first, -EIO, 0);
	assert_int_equal(kvg_hbm_filled(second), -EIO);
	kvg_hbm_failed(second, -EIO, 0);
	assert_false(kvg_hbm_has(hbm, &(struct kvg_key){1, 1, 7, SEGMENT, 2 * SEGMENT}));
	/* The first one's segments, for who has them mapped; the new ones are all its own. */
	assert_int_equal(usage()->used, 2 * SEGMENT);
	assert_int_equal(kvg_hbm_admit(hbm, &two, 2 * SEGMENT, 200, &second), 0);
	assert_true(second->parts[0].own && second->parts[1].own);
	kvg_hbm_staged(second);
	kvg_hbm_unmap(map);
	assert_int_equal(usage()->used, 2 * SEGMENT);
}

/* Room for a stretch is made of others' files, not of the parts that it is to share. */
static void test_hbm__keeps_what_it_is_about_to_share(void **state)
{
	const struct kvg_key part = {1, 1, 7, 0, 2 * SEGMENT}, whole = {1, 1, 7, 0, BUDGET};
	struct kvg_entry *entry;

	(void)state;
	assert_int_equal(kvg_hbm_admit(hbm, &part, 2 * SEGMENT, 0, &entry), 0);
	kvg_hbm_staged(entry);
	resident(2, 2 * SEGMENT);
	assert_int_equal(kvg_hbm_admit(hbm, &whole, BUDGET, 0, &entry), 0);
	assert_true(!entry->parts[0].own && !entry->parts[1].own);
	assert_int_equal(usage()->used, BUDGET);
	assert_null(find(2));
	kvg_hbm_staged(entry);
}

/* However many stretches of the same bytes are asked for, what each costs beside them is bounded.
 */
static void test_hbm__bounds_stretches_of_the_same_bytes(void **state)
{
	struct kvg_holder holder = {0};
	struct kvg_map *maps[BUDGET / GRANULE];
	struct kvg_key key = {1, 1, 7, 0, 0};
	struct kvg_entry *entry;
	unsigned count = BUDGET / GRANULE;

	(void)state;
	for (unsigned i = 0; i < count; i++) {
		key.end = SEGMENT + i;
		assert_int_equal(kvg_hbm_admit(hbm, &key, SEGMENT, 0, &entry), 0);
		kvg_hbm_staged(entry);
		assert_int_equal(kvg_hbm_map(entry, &holder, false, &maps[i]), 0);
	}
	assert_int_equal(usage()->used, SEGMENT);
	key.end = SEGMENT + count;
	assert_int_equal(kvg_hbm_admit(hbm, &key, SEGMENT, 0, &entry), -ENOSPC);
	kvg_hbm_unmap(maps[0]);
	assert_int_equal(kvg_hbm_admit(hbm, &key, SEGMENT, 0, &entry), 0);
	kvg_hbm_staged(entry);
	assert_int_equal(usage()->entries, count);
	for (unsigned i = 1; i < count; i++)
		kvg_hbm_unmap(maps[i]);
}

/* What is wanted for a time only goes when that is over, unless somebody has mapped it meanwhile.
 */
static void test_hbm__gives_up_what_nobody_wanted_in_time(void **state)
{
	struct kvg_holder holder = {0};
	struct kvg_entry *late;
	struct kvg_map *map;

	(void)state;
	kvg_hbm_expire(resident(1, SEGMENT), 100);
	kvg_hbm_expire(resident(2, SEGMENT), 100);
	kvg_hbm_expire(find(2), 50);
	kvg_hbm_expire(resident(3, SEGMENT), 300);
	late = admit(4, SEGMENT);
	kvg_hbm_expire(late, 200);
	assert_int_equal(kvg_hbm_map(find(1), &holder, false, &map), 0);
	(void)kvg_hbm_tick(hbm, 99);
	assert_int_equal(usage()->entries, 4);
	(void)kvg_hbm_tick(hbm, 100);
	assert_true(find(1) && !find(2) && find(3) && find(4));
	/* One that is on its way: whoever stages it is told. */
	(void)kvg_hbm_tick(hbm, 200);
	assert_ptr_equal(seen.expired, late);
	assert_null(find(4));
	assert_int_equal(usage()->used, 3 * SEGMENT);
	kvg_hbm_failed(late, -ECANCELED, 200);
	assert_int_equal(usage()->used, 2 * SEGMENT);
	assert_null(find(4));
	/* For good after all. */
	kvg_hbm_expire(find(3), 0);
	(void)kvg_hbm_tick(hbm, 1000000);
	assert_non_null(find(3));
	kvg_hbm_unmap(map);
	(void)kvg_hbm_tick(hbm, 2000000);
	assert_non_null(find(1));
}

/*
 * What another stretch waits for stays on its way, though who asked has no use for it; it goes when
 * that one has it, or has gone.
 */
static void test_hbm__does_not_give_up_what_others_wait_for(void **state)
{
	const struct kvg_key two = {1, 1, 7, 0, 2 * SEGMENT};

	(void)state;
	for (unsigned gone = 0; gone < 2; gone++) {
		struct kvg_entry *first = admit(1, SEGMENT), *second;

		kvg_hbm_expire(first, 100);
		assert_int_equal(kvg_hbm_admit(hbm, &two, 2 * SEGMENT, 0, &second), 0);
		(void)kvg_hbm_tick(hbm, 100);
		(void)kvg_hbm_tick(hbm, 300);
		assert_null(seen.expired);
		assert_ptr_equal(find(1), first);
		if (gone) {
			kvg_hbm_stale(second);
			kvg_hbm_failed(second, -ECANCELED, 300);
			(void)kvg_hbm_tick(hbm, 500);
			assert_ptr_equal(seen.expired, first);
			kvg_hbm_failed(first, -ECANCELED, 500);
			assert_int_equal(usage()->used, 0);
			continue;
		}
		kvg_hbm_staged(first);
		kvg_hbm_staged(second);
		(void)kvg_hbm_tick(hbm, 500);
		assert_null(seen.expired);
		assert_int_equal(usage()->entries, 1);
		assert_int_equal(usage()->used, 2 * SEGMENT);
		kvg_hbm_stale(second);
	}
}

/* Who has all of his share makes room among his own, and is refused when all of that is mapped. */
static void test_hbm__one_user_has_his_share(void **state)
{
	struct kvg_key other = {.ino = 9, .version = 1, .uid = 8};
	struct kvg_holder holder = {0};
	struct kvg_entry *entry;

	(void)state;
	assert_int_equal(try_admit(1, BUDGET / 2 + 1, 0), -E2BIG);
	assert_int_equal(kvg_hbm_admit(hbm, &other, SEGMENT, 0, &entry), 0);
	kvg_hbm_staged(entry);
	resident(1, SEGMENT);
	resident(2, SEGMENT);
	resident(3, SEGMENT);
	assert_null(find(1));
	assert_ptr_equal(kvg_hbm_find(hbm, &other), entry);
	assert_int_equal(usage()->used, 3 * SEGMENT);
	assert_int_equal(kvg_hbm_map(find(2), &holder, true, &seen.maps[0]), 0);
	assert_int_equal(kvg_hbm_map(find(3), &holder, false, &seen.maps[1]), 0);
	struct kvg_map *maps[] = {seen.maps[0], seen.maps[1]};
	assert_int_equal(try_admit(4, SEGMENT, 0), -ENOBUFS);
	/* What can be asked back of his own is; of what is coming no more is asked. */
	assert_int_equal(seen.revoked, 1);
	assert_ptr_equal(seen.maps[0], maps[0]);
	assert_int_equal(try_admit(4, SEGMENT, 0), -ENOBUFS);
	assert_int_equal(seen.revoked, 1);
	kvg_hbm_unmap(maps[0]);
	resident(4, SEGMENT);
	assert_ptr_equal(kvg_hbm_find(hbm, &other), entry);
	kvg_hbm_unmap(maps[1]);
}

/* What others take of the device while it is nobody's is missing, until they have given it back. */
static void test_hbm__leaves_others_what_they_have_taken(void **state)
{
	struct kvg_entry *entry = resident(1, SEGMENT);
	struct kvg_holder holder = {0};
	struct kvg_hbm *other = NULL;
	struct kvg_hbm_options options = hbm_options();
	unsigned live = seen.live;
	int fd;

	(void)state;
	options.zeroed = true;
	options.margin = GRANULE;
	assert_int_equal(kvg_hbm_export(entry, 0, &fd), 0);
	(void)close(fd);
	seen.available = SEGMENT + GRANULE - 1;
	kvg_hbm_stale(entry);
	assert_int_equal(usage()->missing, SEGMENT);
	assert_int_equal(usage()->used + usage()->reserve, BUDGET - SEGMENT);
	assert_int_equal(kvg_hbm_new(&options, &other), -ENOMEM);
	assert_int_equal(seen.live, live - 1);
	/* What is kept can still be used; more is refused, though the budget would allow it. */
	entry = resident(2, BUDGET - SEGMENT);
	assert_int_equal(kvg_hbm_map(entry, &holder, false, &seen.maps[0]), 0);
	assert_int_equal(try_admit(3, SEGMENT, 0), -ENOSPC);
	(void)kvg_hbm_tick(hbm, 1);
	seen.available = SEGMENT + GRANULE;
	(void)kvg_hbm_tick(hbm, KVG_REFILL_MS);
	assert_int_equal(kvg_hbm_missing(hbm), SEGMENT);
	(void)kvg_hbm_tick(hbm, KVG_REFILL_MS + 1);
	assert_int_equal(kvg_hbm_missing(hbm), 0);
	seen.available = 0;
	resident(3, SEGMENT);
	kvg_hbm_unmap(seen.maps[0]);
}

/* When all is mapped, those who agreed are asked; the room is there when they have given back. */
static void test_hbm__revokes_what_may_be_revoked(void **state)
{
	struct kvg_holder holder = {0};
	struct kvg_map *fixed, *loose;

	(void)state;
	assert_int_equal(kvg_hbm_map(resident(1, BUDGET / 2), &holder, false, &fixed), 0);
	assert_int_equal(kvg_hbm_map(resident(2, BUDGET / 2), &holder, true, &loose), 0);
	assert_int_equal(try_admit(3, SEGMENT, 1000), -ENOSPC);
	assert_int_equal(seen.revoked, 1);
	assert_ptr_equal(seen.maps[0], loose);
	assert_int_equal(try_admit(3, SEGMENT, 1000), -ENOSPC);
	assert_int_equal(seen.revoked, 1);
	assert_int_equal(kvg_hbm_tick(hbm, 1000), 1000 + KVG_REVOKE_MS);
	kvg_hbm_unmap(loose);
	assert_int_equal(try_admit(3, SEGMENT, 1001), 0);
	kvg_hbm_staged(find(3));
	kvg_hbm_unmap(fixed);
}

/* Who does not give back in time keeps the bytes on his account, and gets no more. */
static void test_hbm__charges_orphans_to_their_holder(void **state)
{
	struct kvg_holder bad = {0}, good = {0};
	struct kvg_map *kept, *map;
	int fd;

	(void)state;
	assert_int_equal(kvg_hbm_map(resident(1, BUDGET), &bad, true, &kept), 0);
	assert_int_equal(try_admit(2, SEGMENT, 0), -ENOSPC);
	assert_int_equal(kvg_hbm_tick(hbm, KVG_REVOKE_MS - 1), KVG_REVOKE_MS);
	assert_int_equal(usage()->orphaned, 0);
	assert_int_equal(kvg_hbm_tick(hbm, KVG_REVOKE_MS), 0);
	assert_int_equal(usage()->orphaned, BUDGET);
	assert_int_equal(bad.overdue, BUDGET);
	/* An answer that still waits for room in his socket has nothing to give any more. */
	assert_int_equal(kvg_hbm_export(kept->entry, 0, &fd), -ESTALE);
	/* The bytes are still somebody's: nobody else can have them. */
	assert_int_equal(try_admit(2, SEGMENT, KVG_REVOKE_MS), -ENOSPC);
	kvg_hbm_unmap(kept);
	assert_int_equal(bad.overdue, 0);
	assert_int_equal(usage()->used, 0);
	resident(2, SEGMENT);
	bad.overdue = 1;
	assert_int_equal(kvg_hbm_map(find(2), &bad, true, &map), -EDQUOT);
	assert_int_equal(kvg_hbm_map(find(2), &good, true, &map), 0);
	kvg_hbm_unmap(map);
}

#define TEST(name) cmocka_unit_test_setup_teardown(test_hbm__##name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(shares_what_stretches_have_in_common),
		TEST(fails_with_what_it_shares),
		TEST(keeps_what_it_is_about_to_share),
		TEST(bounds_stretches_of_the_same_bytes),
		TEST(gives_up_what_nobody_wanted_in_time),
		TEST(does_not_give_up_what_others_wait_for),
		cmocka_unit_test_setup_teardown(
			test_hbm__one_user_has_his_share, setup_halves, teardown),
		cmocka_unit_test_setup_teardown(
			test_hbm__leaves_others_what_they_have_taken, setup_shared, teardown),
		TEST(revokes_what_may_be_revoked),
		TEST(charges_orphans_to_their_holder),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
