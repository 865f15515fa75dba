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

static struct kv_stats stats;

static struct kv_users *new_users(uint64_t files, uint64_t writers, uint64_t blocks)
{
	const struct kv_user_max max = {.files = files, .writers = writers, .blocks = blocks};
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
	kv_users_print(users, out);
	assert_int_equal(fclose(out), 0);
	assert_string_equal(text, "user_files 1000\nuser_writers 0\nuser_space 409600\n"
				  "user 1002 1 0 204800\nuser 1001 1 1 0\n");
	free(text);
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
	int64_t until = kv_monotonic_ms() + 10000;
	uint64_t count;

	while ((count = left(writer)) != expected && kv_monotonic_ms() < until)
		(void)usleep(1000);
	return count;
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_users__open_files),
		cmocka_unit_test(test_users__no_limits_for_the_owner),
		cmocka_unit_test(test_users__report),
		cmocka_unit_test(test_users__unpublished_space),
		cmocka_unit_test(test_users__rewriting_counts_in_whole),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
