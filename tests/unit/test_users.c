/* SPDX-License-Identifier: Apache-2.0 */
/* What one user may have at once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <fcntl.h>

#include "fs/users.h"
#include "tests/unit/unit_core.h"

#define UID 1001u
#define OTHER 1002u
#define DIRTY_MAX 1024u /* blocks */

static struct kv_stats stats;

static struct kv_users *new_users(uint64_t files, uint64_t writers, uint64_t blocks)
{
	const struct kv_user_max max = {
		.files = files, .writers = writers, .blocks = blocks, .dirty = DIRTY_MAX};
	struct kv_users *users = kv_users_new(&max, &stats);

	assert_non_null(users);
	return users;
}

static struct kv_user *open_ok(struct kv_users *users, uid_t uid, bool writes)
{
	struct kv_user *user;

	assert_int_equal(kv_user_may_open(users, uid, writes), 0);
	assert_int_equal(kv_user_open(users, uid, writes, &user), 0);
	return user;
}

/* The limits of open files and of those open for writing count separately, and for each user. */
static void test_users__open_files(void **state)
{
	struct kv_users *users = new_users(3, 1, 8);
	struct kv_user *first = open_ok(users, UID, true), *user;

	(void)state;
	assert_int_equal(kv_user_may_open(users, UID, true), -EMFILE);
	assert_int_equal(kv_user_open(users, UID, true, &user), -EMFILE);
	assert_ptr_equal(open_ok(users, UID, false), first);
	assert_ptr_equal(open_ok(users, UID, false), first);
	assert_int_equal(kv_user_open(users, UID, false, &user), -EMFILE);
	assert_null(user);
	assert_int_equal(kv_stat_get(&stats.limited), 3);
	assert_ptr_not_equal(user = open_ok(users, OTHER, true), first);
	kv_user_close(user, true);
	kv_user_close(first, false);
	assert_int_equal(kv_user_open(users, UID, true, &user), -EMFILE);
	kv_user_close(first, true);
	assert_ptr_equal(open_ok(users, UID, true), first);
	kv_user_close(first, true);
	kv_user_close(first, false);
	assert_null(kv_users_free(users));
}

/* Root and who mounts have no limits, and are not counted. */
static void test_users__no_limits_for_the_owner(void **state)
{
	struct kv_users *users = new_users(1, 1, 1);

	(void)state;
	for (int i = 0; i < 3; i++) {
		assert_null(open_ok(users, 0, true));
		assert_null(open_ok(users, geteuid(), true));
	}
	kv_user_close(NULL, true);
	assert_int_equal(kv_user_take(NULL, 1000), 0);
	kv_user_give(NULL, 1000);
	kv_user_dirtied(NULL, 10000);
	assert_false(kv_user_is_over(NULL));
	assert_false(kv_user_cleaned(NULL, 10000));
	assert_null(kv_user_unref(kv_user_ref(NULL)));
	kv_users_free(users);
}

/* A report has the limits and, the nearest to one of them first, the users. */
static void test_users__report(void **state)
{
	struct kv_users *users = new_users(1000, UINT64_MAX, 100);
	struct kv_user *one = open_ok(users, UID, true), *two = open_ok(users, OTHER, false);
	char *text = NULL;
	size_t size;
	FILE *out = open_memstream(&text, &size);

	(void)state;
	assert_non_null(out);
	assert_int_equal(kv_user_take(two, 50), 0);
	kv_user_dirtied(one, 3);
	kv_users_print(users, out);
	assert_int_equal(fclose(out), 0);
	assert_string_equal(text,
		"user_files 1000\nuser_writers 0\nuser_space 409600\nuser_dirty 4194304\n"
		"user 1002 1 0 204800 0\nuser 1001 1 1 0 12288\n");
	free(text);
	assert_false(kv_user_cleaned(one, 3));
	kv_user_give(two, 50);
	kv_user_close(one, true);
	kv_user_close(two, false);
	kv_users_free(users);
}

/* ---- Space, through versions ---- */

struct writer {
	struct unit unit;
	struct kv_users *users;
	struct kv_user *user;
};

static void writer_init(struct writer *writer, uint64_t blocks)
{
	unit_init(&writer->unit, (struct unit_sizes){.store = 64 * MIB, .dram = 32 * MIB});
	writer->users = new_users(10, 10, blocks);
	writer->user = open_ok(writer->users, UID, true);
}

static void writer_done(struct writer *writer)
{
	unit_done(&writer->unit);
	kv_user_close(writer->user, true);
	kv_users_free(writer->users);
}

/* How many blocks the user may still take. */
static uint64_t left(struct writer *writer)
{
	uint64_t count = 0;

	while (kv_user_take(writer->user, 1) == 0)
		count++;
	kv_user_give(writer->user, count);
	return count;
}

/* Once all of a version is gone: threads that fill it may hold it for a moment longer. */
static uint64_t left_in_the_end(struct writer *writer, uint64_t expected)
{
	UNIT_WAIT_FOR(left(writer) == expected);
	return left(writer);
}

static struct kv_version *begin(
	struct writer *writer, struct kv_file *file, struct kv_version *base)
{
	struct kv_version *version = unit_new(file, base);

	kv_version_set_user(version, writer->user);
	return version;
}

/* What is written counts until it is published, cut or dropped; what did not fit is an error. */
static void test_users__unpublished_space(void **state)
{
	static const uint8_t block[KV_BLOCK_SIZE];
	struct writer writer;
	struct kv_version *version;

	(void)state;
	writer_init(&writer, 256 + 16);
	struct kv_file *file = unit_file(&writer.unit, unit_create(&writer.unit, "f"));
	version = begin(&writer, file, NULL);
	assert_int_equal(unit_write_pattern(version, MIB, 0, 1), 0);
	assert_int_equal(left(&writer), 16);
	assert_int_equal(unit_write_pattern(version, 17 * KV_BLOCK_SIZE, MIB, 1), -EDQUOT);
	assert_int_equal(left(&writer), 16);
	/* What is there may be written again; a block more fits. */
	assert_int_equal(unit_write_pattern(version, MIB, 0, 1), 0);
	assert_int_equal(unit_write_pattern(version, KV_BLOCK_SIZE, MIB, 1), 0);
	assert_int_equal(left(&writer), 15);
	assert_int_equal(kv_version_truncate(version, KV_BLOCK_SIZE), 0);
	assert_int_equal(left(&writer), 256 + 15);
	assert_int_equal(kv_version_allocate(version, 0, 0, 2 * MIB), -EDQUOT);
	assert_int_equal(kv_version_allocate(version, 0, 0, MIB), 0);
	assert_int_equal(left(&writer), 16);
	/* Published, what was written does not count, but what is promised still does. */
	assert_int_equal(kv_version_publish(version), 0);
	assert_int_equal(left(&writer), 17);
	struct kv_version *next = begin(&writer, file, version);
	kv_version_continue(next, version);
	assert_int_equal(kv_version_write(next, block, sizeof(block), KV_BLOCK_SIZE), 0);
	assert_int_equal(left(&writer), 16);
	kv_version_unref(version);
	assert_int_equal(kv_version_publish(next), 0);
	kv_version_give_up(next);
	assert_int_equal(left(&writer), 256 + 16);
	kv_version_unref(next);
	kv_file_put(file);
	writer_done(&writer);
}

/* Who rewrites a file may come to own as much as it has: that counts from the first change on. */
static void test_users__rewriting_counts_in_whole(void **state)
{
	static const uint8_t block[KV_BLOCK_SIZE];
	struct kv_version *base, *version;
	struct writer writer;

	(void)state;
	writer_init(&writer, 256);
	struct kv_file *small = unit_file(&writer.unit, unit_put(&writer.unit, "small", MIB, 1));
	struct kv_file *large =
		unit_file(&writer.unit, unit_put(&writer.unit, "large", 2 * MIB, 2));
	base = unit_current(large);
	version = begin(&writer, large, base);
	assert_int_equal(left(&writer), 256);
	assert_int_equal(kv_version_write(version, block, sizeof(block), 0), -EDQUOT);
	kv_version_unref(version);
	kv_version_unref(base);
	base = unit_current(small);
	version = begin(&writer, small, base);
	assert_int_equal(kv_version_write(version, block, sizeof(block), 0), 0);
	assert_int_equal(left(&writer), 0);
	kv_version_unref(version);
	assert_int_equal(left_in_the_end(&writer, 256), 256);
	kv_version_unref(base);
	kv_file_put(small);
	kv_file_put(large);
	writer_done(&writer);
}

/* ---- What is to be written back ---- */

/* Over is who has more than the limit; so many of his writers are held back, and no more. */
static void test_users__dirty_blocks(void **state)
{
	struct kv_users *users = new_users(10, 10, 10);
	struct kv_user *user = open_ok(users, UID, true), *other = open_ok(users, OTHER, true);

	(void)state;
	kv_user_dirtied(user, DIRTY_MAX);
	assert_false(kv_user_is_over(user));
	kv_user_dirtied(user, 1);
	assert_true(kv_user_is_over(user));
	assert_false(kv_user_is_over(other));
	for (unsigned i = 0; i < KV_USER_HELD_MAX; i++)
		assert_true(kv_user_hold(user));
	assert_false(kv_user_hold(user));
	assert_true(kv_user_hold(other));
	kv_user_let_go(other);
	kv_user_let_go(user);
	assert_true(kv_user_hold(user));
	for (unsigned i = 0; i < KV_USER_HELD_MAX; i++)
		kv_user_let_go(user);
	assert_true(kv_user_cleaned(user, 1));
	assert_false(kv_user_is_over(user));
	assert_false(kv_user_cleaned(user, DIRTY_MAX));
	assert_int_equal(kv_user_progress(user), DIRTY_MAX + 1);
	kv_user_close(user, true);
	kv_user_close(other, true);
	kv_users_free(users);
}

static void publish(struct kv_version *version)
{
	assert_int_equal(unit_publish(version), 0);
	kv_version_unref(version);
}

struct storer {
	struct writer *writer;
	unsigned count;
	_Atomic unsigned done;
};

/* Stores files of a MiB, one after the other. */
static void *store(void *arg)
{
	struct storer *storer = arg;
	char name[16];

	for (unsigned i = 0; i < storer->count; i++) {
		(void)snprintf(name, sizeof(name), "s%u", i);
		struct kv_file *file =
			unit_file(&storer->writer->unit, unit_create(&storer->writer->unit, name));
		struct kv_version *version = begin(storer->writer, file, NULL);

		assert_int_equal(unit_write_pattern(version, MIB, 0, i), 0);
		publish(version);
		kv_file_put(file);
		atomic_fetch_add(&storer->done, 1);
	}
	return NULL;
}

/*
 * Who has more to be written back than his share waits for that; meanwhile others write. When the
 * devices go on he does, and in the end nothing counts against him. All limits are far above what
 * is written, but his: 4 MiB.
 */
static void test_users__who_has_too_much_to_be_written_waits(void **state)
{
	struct writer writer;
	/* Each is let go after half a second in which nothing is written back. */
	struct storer storer = {.writer = &writer, .count = 40};
	pthread_t thread;

	(void)state;
	writer_init(&writer, UINT64_MAX);
	writer.unit.options.dram_bytes = 128 * MIB;
	unit_chill(&writer.unit);
	atomic_store(&writer.unit.disk.hold, true);
	assert_int_equal(pthread_create(&thread, NULL, store, &storer), 0);
	UNIT_WAIT_FOR(kv_stat_get(&writer.unit.stats.throttled) > 0);
	assert_true(kv_user_is_over(writer.user));
	assert_true(storer.done >= 5);
	(void)unit_put(&writer.unit, "other", 4 * MIB, 3);
	assert_true(storer.done < storer.count);
	atomic_store(&writer.unit.disk.hold, false);
	assert_int_equal(pthread_join(thread, NULL), 0);
	unit_sync(&writer.unit);
	assert_int_equal(kv_user_progress(writer.user), storer.count * 256);
	assert_false(kv_user_is_over(writer.user));
	unit_expect_file(&writer.unit, unit_lookup(&writer.unit, "s39"), MIB, 39);
	/* Its last reference finds nothing that counts against the user. */
	writer_done(&writer);
}

/* So many chunks have been written early, once something more was written. */
static bool has_spilled(struct writer *writer, struct kv_version *version, unsigned count)
{
	assert_int_equal(unit_write_pattern(version, KV_BLOCK_SIZE, 39 * MIB, 1), 0);
	return kv_stat_get(&writer->unit.stats.writeback_chunks) >= count;
}

/* What was never published counts too, is written early, and counts no more when it is given up. */
static void test_users__unpublished_dirt_is_written_early(void **state)
{
	struct writer writer;

	(void)state;
	writer_init(&writer, UINT64_MAX);
	writer.unit.options.dram_bytes = 256 * MIB;
	unit_chill(&writer.unit);
	struct kv_file *file = unit_file(&writer.unit, unit_create(&writer.unit, "f"));
	struct kv_version *version = begin(&writer, file, NULL);
	assert_int_equal(unit_write_pattern(version, 40 * MIB, 0, 1), 0);
	/* A quarter of the tier, from which on all are written early, is far away. */
	UNIT_WAIT_FOR(has_spilled(&writer, version, 35));
	assert_true(has_spilled(&writer, version, 35));
	assert_true(kv_stat_get(&writer.unit.stats.throttled) > 0);
	unit_expect_pattern(version, 40 * MIB, 0, 1);
	kv_version_unref(version);
	kv_file_put(file);
	writer_done(&writer);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_users__open_files),
		cmocka_unit_test(test_users__no_limits_for_the_owner),
		cmocka_unit_test(test_users__report),
		cmocka_unit_test(test_users__unpublished_space),
		cmocka_unit_test(test_users__rewriting_counts_in_whole),
		cmocka_unit_test(test_users__dirty_blocks),
		cmocka_unit_test(test_users__who_has_too_much_to_be_written_waits),
		cmocka_unit_test(test_users__unpublished_dirt_is_written_early),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
