/* SPDX-License-Identifier: Apache-2.0 */
/* File locks: ranges, owners, handles; the second half against a model, byte by byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fs/lock.h"

enum { READ, WRITE };

static struct kv_lock range(uint64_t owner, int type, uint64_t start, uint64_t end)
{
	return (struct kv_lock){
		.ino = 7,
		.owner = owner,
		.handle = (const void *)(uintptr_t)owner, /* NOLINT: a name only */
		.start = start,
		.end = end,
		.pid = (pid_t)owner,
		.exclusive = type == WRITE,
	};
}

static int take(struct kv_locks *locks, uint64_t owner, int type, uint64_t start, uint64_t end)
{
	struct kv_lock lock = range(owner, type, start, end);
	struct kv_lock conflict;

	return kv_lock_take(locks, &lock, &conflict);
}

static bool give_up(struct kv_locks *locks, uint64_t owner, uint64_t start, uint64_t end)
{
	struct kv_lock lock = range(owner, READ, start, end);
	bool released;

	assert_int_equal(kv_lock_give_up(locks, &lock, &released), 0);
	return released;
}

/* Readers share; a writer is alone; ranges that do not meet do not matter. */
static void test_lock__conflicts(void **state)
{
	struct kv_locks *locks = kv_locks_new();
	struct kv_lock lock = range(9, READ, 150, 150);
	struct kv_lock conflict;

	(void)state;
	assert_int_equal(take(locks, 1, READ, 0, 99), 0);
	assert_int_equal(take(locks, 2, READ, 50, 149), 0);
	assert_int_equal(take(locks, 3, WRITE, 149, 149), -EAGAIN);
	assert_int_equal(take(locks, 3, WRITE, 150, KV_LOCK_END_MAX), 0);
	assert_true(kv_lock_conflicts(locks, &lock, &conflict));
	assert_int_equal(conflict.start, 150);
	assert_int_equal(conflict.end, KV_LOCK_END_MAX);
	assert_int_equal(conflict.pid, 3);
	assert_true(conflict.exclusive);
	lock.ino = 8;
	assert_false(kv_lock_conflicts(locks, &lock, &conflict));
	assert_null(kv_locks_free(locks));
}

/* One's own range changes type, is split by a hole, and grows together again. */
static void test_lock__split_and_merge(void **state)
{
	struct kv_locks *locks = kv_locks_new();

	(void)state;
	assert_int_equal(take(locks, 1, WRITE, 0, 99), 0);
	assert_int_equal(take(locks, 1, READ, 40, 59), 0);
	assert_int_equal(kv_locks_count(locks), 3);
	assert_int_equal(take(locks, 2, READ, 40, 59), 0);
	assert_int_equal(take(locks, 2, READ, 39, 39), -EAGAIN);
	assert_int_equal(take(locks, 1, WRITE, 40, 59), -EAGAIN);
	assert_true(give_up(locks, 2, 0, 99));
	assert_false(give_up(locks, 2, 0, 99));
	assert_int_equal(take(locks, 1, WRITE, 40, 59), 0);
	assert_int_equal(kv_locks_count(locks), 1);
	assert_true(give_up(locks, 1, 10, 10));
	assert_int_equal(kv_locks_count(locks), 2);
	assert_int_equal(take(locks, 2, WRITE, 10, 10), 0);
	assert_null(kv_locks_free(locks));
}

/* A process's close ends its ranges, a handle's end all that was taken through it. */
static void test_lock__closes(void **state)
{
	struct kv_locks *locks = kv_locks_new();
	struct kv_lock whole = range(5, WRITE, 0, KV_LOCK_END_MAX);
	struct kv_lock other = range(6, WRITE, 0, KV_LOCK_END_MAX);
	struct kv_lock conflict;

	(void)state;
	whole.whole = other.whole = true;
	assert_false(kv_lock_owner_closed(locks, 7, 5));
	assert_false(kv_lock_handle_closed(locks, 7, whole.handle));
	assert_int_equal(kv_lock_take(locks, &whole, &conflict), 0);
	/* The two kinds do not see each other. */
	assert_int_equal(take(locks, 6, WRITE, 0, 10), 0);
	assert_int_equal(kv_lock_take(locks, &other, &conflict), -EAGAIN);
	assert_false(conflict.unsure);
	assert_false(kv_lock_owner_closed(locks, 7, 5));
	kv_lock_handle_closing(locks, 7, whole.handle);
	assert_int_equal(kv_lock_take(locks, &other, &conflict), -EAGAIN);
	assert_true(conflict.unsure);
	assert_true(kv_lock_handle_closed(locks, 7, whole.handle));
	assert_int_equal(kv_lock_take(locks, &other, &conflict), 0);
	assert_true(kv_lock_owner_closed(locks, 7, 6));
	assert_int_equal(kv_locks_count(locks), 1);
	assert_null(kv_locks_free(locks));
}

/* flock gives up what it has before it tries: two readers that want to write do not block. */
static void test_lock__flock_conversion(void **state)
{
	struct kv_locks *locks = kv_locks_new();
	struct kv_lock a = range(1, READ, 0, KV_LOCK_END_MAX);
	struct kv_lock b = range(2, READ, 0, KV_LOCK_END_MAX);
	struct kv_lock conflict;

	(void)state;
	a.whole = b.whole = true;
	assert_int_equal(kv_lock_take(locks, &a, &conflict), 0);
	assert_int_equal(kv_lock_take(locks, &b, &conflict), 0);
	a.exclusive = b.exclusive = true;
	assert_int_equal(kv_lock_take(locks, &a, &conflict), -EAGAIN);
	assert_int_equal(kv_lock_take(locks, &b, &conflict), 0);
	assert_null(kv_locks_free(locks));
}

/* The table has an end, and everything can be given up then. */
static void test_lock__limit(void **state)
{
	struct kv_locks *locks = kv_locks_new();
	unsigned taken = 0;
	bool released;
	struct kv_lock middle = range(1, READ, 1, 1);
	int r;

	(void)state;
	assert_int_equal(take(locks, 1, WRITE, 0, 2), 0);
	while ((r = take(locks, 2, WRITE, 10 + 2ul * taken, 10 + 2ul * taken)) == 0)
		taken++;
	assert_int_equal(r, -ENOLCK);
	assert_true(taken > KV_LOCKS_MAX - 5);
	assert_int_equal(take(locks, 3, WRITE, 5, 5), -ENOLCK);
	assert_int_equal(kv_lock_give_up(locks, &middle, &released), 0);
	assert_true(kv_lock_owner_closed(locks, 7, 2));
	assert_int_equal(kv_locks_count(locks), 2);
	assert_null(kv_locks_free(locks));
}

/* Random calls on a file of few bytes against an array that says who has what of each. */
static void test_lock__model(void **state)
{
	enum { OWNERS = 3, BYTES = 12, ROUNDS = 200000 };
	struct kv_locks *locks = kv_locks_new();
	char model[OWNERS][BYTES] = {{0}};

	(void)state;
	srandom(1);
	for (unsigned i = 0; i < ROUNDS; i++) {
		unsigned owner = (unsigned)random() % OWNERS;
		unsigned start = (unsigned)random() % BYTES;
		unsigned end = start + (unsigned)random() % (BYTES - start);
		char want = "-rw"[random() % 3];
		bool free = true;

		for (unsigned o = 0; o < OWNERS; o++)
			for (unsigned b = start; b <= end; b++)
				if (o != owner && model[o][b] &&
					(model[o][b] == 'w' || want == 'w'))
					free = false;
		if (want == '-')
			(void)give_up(locks, owner, start, end);
		else
			assert_int_equal(take(locks, owner, want == 'w' ? WRITE : READ, start, end),
				free ? 0 : -EAGAIN);
		if (want == '-' || free)
			(void)memset(&model[owner][start], want == '-' ? 0 : want, end - start + 1);
	}
	/* As few records as there are runs of one type. */
	unsigned runs = 0;
	for (unsigned o = 0; o < OWNERS; o++)
		for (unsigned b = 0; b < BYTES; b++)
			runs += model[o][b] && (b == 0 || model[o][b] != model[o][b - 1]);
	assert_int_equal(kv_locks_count(locks), runs);
	assert_null(kv_locks_free(locks));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_lock__conflicts),
		cmocka_unit_test(test_lock__split_and_merge),
		cmocka_unit_test(test_lock__closes),
		cmocka_unit_test(test_lock__flock_conversion),
		cmocka_unit_test(test_lock__limit),
		cmocka_unit_test(test_lock__model),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
