/* SPDX-License-Identifier: Apache-2.0 */
/* Hash tables of things that have a number. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdbool.h>
#include <stdlib.h>

#include "fs/table.h"

#define COUNT 10000u

/* Numbers of all kinds: dense, far apart, with equal low bits. */
static uint64_t key_of(uint64_t i)
{
	return i % 3 == 0 ? i : i % 3 == 1 ? i << 32 : i * 64;
}

/* What was added and not removed is found, and nothing else, at every size. */
static void test_table__finds_what_is_there(void **state)
{
	struct kv_link *links = calloc(COUNT, sizeof(*links));
	struct kv_table table = {0};

	(void)state;
	assert_non_null(links);
	assert_null(kv_table_find(&table, 0));
	for (uint64_t i = 0; i < COUNT; i++) {
		uint64_t key = i << 20 | key_of(i);

		assert_null(kv_table_find(&table, key));
		assert_int_equal(kv_table_add(&table, &links[i], key), 0);
		assert_ptr_equal(kv_table_find(&table, links[i / 2].key), &links[i / 2]);
	}
	assert_int_equal(table.count, COUNT);
	for (uint64_t i = 0; i < COUNT; i += 2)
		kv_table_remove(&table, &links[i]);
	for (uint64_t i = 0; i < COUNT; i++)
		assert_ptr_equal(
			kv_table_find(&table, links[i].key), i % 2 == 0 ? NULL : &links[i]);
	for (uint64_t i = 1; i < COUNT; i += 2)
		kv_table_remove(&table, &links[i]);
	assert_int_equal(table.count, 0);
	kv_table_done(&table);
	assert_null(kv_table_find(&table, 0));
	free(links);
}

/* No bucket holds many, whatever the numbers have in common. */
static void test_table__chains_stay_short(void **state)
{
	static const uint64_t steps[] = {1, 64, 4096, UINT64_C(1) << 32};
	struct kv_link *links = calloc(COUNT, sizeof(*links));

	(void)state;
	assert_non_null(links);
	for (size_t s = 0; s < sizeof(steps) / sizeof(steps[0]); s++) {
		struct kv_table table = {0};

		for (uint64_t i = 0; i < COUNT; i++)
			assert_int_equal(kv_table_add(&table, &links[i], i * steps[s]), 0);
		assert_true(table.used >= COUNT);
		for (size_t b = 0; b < table.used; b++) {
			unsigned length = 0;

			for (struct kv_link *link = table.buckets[b]; link; link = link->next)
				length++;
			assert_true(length <= 16);
		}
		for (uint64_t i = 0; i < COUNT; i++)
			kv_table_remove(&table, &links[i]);
		kv_table_done(&table);
	}
	free(links);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_table__finds_what_is_there),
		cmocka_unit_test(test_table__chains_stay_short),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
