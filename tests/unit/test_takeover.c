/* SPDX-License-Identifier: Apache-2.0 */
/* What a daemon leaves to the next one on the same connection. */
#include <errno.h>

#include "fs/takeover.h"
#include "tests/unit/unit_fs.h"

struct seen {
	unsigned count;
	uint64_t id[8];
	struct kv_takeover_record record[8];
	int closed[8];
};

static void see(void *arg, uint64_t id, const struct kv_takeover_record *record)
{
	struct seen *seen = arg;

	assert_true(seen->count < 8);
	seen->id[seen->count] = id;
	seen->record[seen->count++] = *record;
}

static void see_closed(void *arg, int id)
{
	struct seen *seen = arg;

	assert_true(seen->count < 8);
	seen->closed[seen->count++] = id;
}

/* The daemon that begins, on MEMORY, which stays the caller's. */
static struct kv_takeover *begin(int memory)
{
	struct kv_takeover *takeover = NULL;

	assert_int_equal(kv_takeover_new(dup(memory), &takeover), 0);
	return takeover;
}

/* The first daemon resumes nothing; the next one has its INIT and its records, and ids are never
 * given out twice. */
static void test_takeover__records_are_handed_on(void **state)
{
	int memory = kv_takeover_memory();
	struct kv_takeover *one = begin(memory), *two;
	struct seen seen = {0};
	size_t length;

	(void)state;
	assert_false(kv_takeover_resumes(one));
	uint64_t directory = kv_takeover_add(one, 10, 0);
	uint64_t file = kv_takeover_add(one, 11, 2);
	uint64_t gone = kv_takeover_add(one, 12, 2);
	kv_takeover_set_lookups(one, directory, 3);
	kv_takeover_set_lookups(one, file, 5);
	kv_takeover_set_version(one, file, 77, -5);
	kv_takeover_remove(one, gone);
	kv_takeover_set_init(one, "init", 4);
	kv_takeover_each(one, see, &seen);
	assert_int_equal(seen.count, 0); /* none is old to itself */
	kv_takeover_free(one);

	two = begin(memory);
	assert_true(kv_takeover_resumes(two));
	assert_memory_equal(kv_takeover_init(two, &length), "init", 4);
	assert_int_equal(length, 4);
	uint64_t new = kv_takeover_add(two, 13, 0);
	assert_true(new != gone &&new != file &&new != directory);
	assert_false(kv_takeover_is_old(two, new));
	assert_true(kv_takeover_is_old(two, file));
	kv_takeover_each(two, see, &seen);
	assert_int_equal(seen.count, 2);
	assert_int_equal(seen.id[0], directory);
	assert_int_equal(seen.record[0].ino, 10);
	assert_int_equal(seen.record[0].lookups, 3);
	assert_int_equal(seen.id[1], file);
	assert_int_equal(seen.record[1].version, 77);
	assert_int_equal(seen.record[1].mtime_ns, -5);
	assert_int_equal(seen.record[1].kind, 2);
	kv_takeover_free(two);
	(void)close(memory);
}

/* Ids that nobody made a node of go when the kernel has forgotten all of its look-ups; calls for
 * ids that are gone do nothing. */
static void test_takeover__forget(void **state)
{
	int memory = kv_takeover_memory();
	struct kv_takeover *one = begin(memory), *two;
	struct seen seen = {0};

	(void)state;
	uint64_t file = kv_takeover_add(one, 11, 2);
	kv_takeover_set_lookups(one, file, 5);
	kv_takeover_free(one);
	two = begin(memory);
	kv_takeover_forget(two, file, 4);
	kv_takeover_each(two, see, &seen);
	assert_int_equal(seen.count, 1);
	assert_int_equal(seen.record[0].lookups, 1);
	kv_takeover_forget(two, file, 1);
	kv_takeover_forget(two, file, 1);
	kv_takeover_set_version(two, file, 9, 0);
	kv_takeover_remove(two, file);
	seen.count = 0;
	kv_takeover_each(two, see, &seen);
	assert_int_equal(seen.count, 0);
	kv_takeover_free(two);
	(void)close(memory);
}

/* Backing ids of the daemon before are closed once, its own are not. */
static void test_takeover__backings(void **state)
{
	int memory = kv_takeover_memory();
	struct kv_takeover *one = begin(memory), *two, *three;
	struct seen seen = {0};

	(void)state;
	kv_takeover_backing(one, 5);
	kv_takeover_backing(one, 6);
	kv_takeover_backing(one, 6 + (1 << 18)); /* the place of 6 */
	kv_takeover_no_backing(one, 5);
	kv_takeover_free(one);
	two = begin(memory);
	kv_takeover_backing(two, 9);
	/* Not before the kernel is done with what the daemon before has answered. */
	assert_int_equal(kv_takeover_close_backings(two, 1 << 30, see_closed, &seen), 2);
	assert_int_equal(seen.count, 0);
	assert_true(kv_takeover_has_backing(two, 6));
	assert_int_equal(kv_takeover_close_backings(two, 0, see_closed, &seen), 0);
	assert_false(kv_takeover_has_backing(two, 6));
	assert_int_equal(seen.count, 2);
	assert_int_equal(seen.closed[0], 6);
	assert_int_equal(seen.closed[1], 6 + (1 << 18));
	assert_int_equal(kv_takeover_close_backings(two, 0, see_closed, &seen), 0);
	assert_int_equal(seen.count, 2);
	kv_takeover_free(two);
	three = begin(memory);
	seen.count = 0;
	assert_int_equal(kv_takeover_close_backings(three, 0, see_closed, &seen), 0);
	assert_int_equal(seen.count, 1);
	assert_int_equal(seen.closed[0], 9);
	kv_takeover_free(three);
	(void)close(memory);
}

struct seen_handles {
	struct kv_takeover_handle handle[4];
	uint32_t place[4];
	unsigned count;
};

static void see_handle(void *arg, uint32_t place, const struct kv_takeover_handle *handle)
{
	struct seen_handles *seen = arg;

	assert_true(seen->count < 4);
	seen->place[seen->count] = place;
	seen->handle[seen->count++] = *handle;
}

/* Numbers of handles are told apart by their daemons; those that are there are handed on. */
static void test_takeover__handles(void **state)
{
	int memory = kv_takeover_memory();
	struct kv_takeover *one = begin(memory), *two;
	struct seen_handles seen = {0};
	int address;
	struct kv_takeover_handle handle = {
		.number = kv_takeover_tag(one, &address),
		.nodeid = 77,
		.request = 8,
		.may_write = true,
	};

	(void)state;
	uint32_t gone = kv_takeover_add_handle(one, &handle);
	uint32_t stays = kv_takeover_add_handle(one, &handle);
	assert_int_not_equal(gone, stays);
	kv_takeover_handle_flushed(one, stays);
	kv_takeover_remove_handle(one, gone);
	kv_takeover_remove_handle(one, KV_TAKEOVER_NO_HANDLE);
	kv_takeover_free(one);
	two = begin(memory);
	assert_int_not_equal(kv_takeover_tag(two, &address), handle.number);
	kv_takeover_each_handle(two, see_handle, &seen);
	assert_int_equal(seen.count, 1);
	assert_int_equal(seen.place[0], stays);
	assert_int_equal(seen.handle[0].number, handle.number);
	assert_int_equal(seen.handle[0].nodeid, 77);
	assert_int_equal(seen.handle[0].request, 8);
	assert_true(seen.handle[0].may_write);
	assert_true(seen.handle[0].flushed);
	assert_false(seen.handle[0].elsewhere);
	/* There is an end to them. */
	unsigned count = 0;
	while (kv_takeover_add_handle(two, &handle) != KV_TAKEOVER_NO_HANDLE)
		count++;
	assert_int_equal(count, (1 << 16) - 1);
	kv_takeover_free(two);
	(void)close(memory);
}

/* Memory of another version is refused. */
static void test_takeover__of_another_version(void **state)
{
	int memory = kv_takeover_memory();
	struct kv_takeover *takeover;

	(void)state;
	assert_int_equal(pwrite(memory, "another!", 8, 0), 8);
	assert_int_equal(kv_takeover_new(dup(memory), &takeover), -EPROTO);
	(void)close(memory);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_takeover__records_are_handed_on),
		cmocka_unit_test(test_takeover__forget),
		cmocka_unit_test(test_takeover__backings),
		cmocka_unit_test(test_takeover__handles),
		cmocka_unit_test(test_takeover__of_another_version),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
