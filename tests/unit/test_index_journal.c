/* SPDX-License-Identifier: Apache-2.0 */
/* The journal: a process is killed, and who opens the index next has all that it has done. */
#include <signal.h>
#include <sys/mman.h>

#include "unit_index.h"

#define NAMES 24

/* What the process that is killed has told of, in memory that both have. */
struct told {
	uint64_t inos[NAMES];   /* 0: there is no such name */
	uint32_t blocks[NAMES]; /* of its content; 0: held */
	uint64_t operations;
};

static struct unit unit;
static struct told *told;

static void *shared_memory(size_t size)
{
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
		MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	assert_true(memory != MAP_FAILED);
	return memory;
}

static int setup(void **state)
{
	unit_create(&unit, 2, 100000);
	unit.options.commit_delay_ms = UNIT_NEVER_MS;
	unit.options.journal = shared_memory(KV_INDEX_JOURNAL_SIZE);
	told = shared_memory(sizeof(*told));
	*state = &unit;
	return 0;
}

static int teardown(void **state)
{
	unit_done(*state);
	assert_int_equal(munmap(unit.options.journal, KV_INDEX_JOURNAL_SIZE), 0);
	assert_int_equal(munmap(told, sizeof(*told)), 0);
	return 0;
}

static const char *name_of(unsigned i)
{
	static char name[32];

	(void)snprintf(name, sizeof(name), "name-%u", i);
	return name;
}

/* Of a name that there is not: a file with content, or one that is held. */
static void make(unsigned i, bool held)
{
	struct kv_inode inode;

	if (held) {
		told->inos[i] = unit_hold(&unit, KV_ROOT_INO, name_of(i)).ino;
		told->blocks[i] = 0;
		return;
	}
	inode = unit_hold(&unit, KV_ROOT_INO, name_of(i));
	(void)unit_write(&unit, inode.ino, i + 1);
	told->inos[i] = inode.ino;
	told->blocks[i] = i + 1;
}

static void replace(unsigned i)
{
	struct kv_inode inode = unit_get(&unit, told->inos[i]);

	/* Its numbers go on from what it has. */
	unit.version = kv_max_u64(unit.version, inode.version);
	(void)unit_write(&unit, inode.ino, i + 2);
	told->blocks[i] = i + 2;
}

static void take_away(unsigned i)
{
	unit_unlink(&unit, KV_ROOT_INO, name_of(i));
	unit_reap(&unit, told->inos[i]);
	told->inos[i] = 0;
}

static void step(unsigned *seed)
{
	unsigned i = (unsigned)rand_r(seed) % NAMES;

	switch (rand_r(seed) % 8) {
	case 0:
		unit_sync(&unit);
		break;
	case 1:
		if (told->inos[i] != 0)
			replace(i);
		break;
	default:
		if (told->inos[i] == 0)
			make(i, rand_r(seed) % 3 == 0);
		else
			take_away(i);
	}
}

/* Another process does STEPS steps and is killed; BLOCKED: while a batch cannot be committed. */
static void work_and_die(unsigned seed, unsigned steps, bool blocked)
{
	pid_t child = fork();
	int status;

	assert_true(child >= 0);
	if (child == 0) {
		unit_open(&unit);
		for (unsigned i = 0; i < steps / 2; i++)
			step(&seed);
		if (blocked) {
			(void)unit_make(&unit, KV_ROOT_INO, name_of(1000 + seed), S_IFREG | 0644);
			(void)unit_block_commits(&unit);
			unit_take_batch(&unit);
		}
		/* A step that waits for a commit would wait for ever. */
		for (unsigned i = 0; i < steps / 2; i++) {
			unsigned n = i % NAMES;

			if (told->inos[n] == 0)
				make(n, i % 3 == 0);
			else
				take_away(n);
		}
		(void)raise(SIGKILL);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void all_is_there(void)
{
	uint64_t used = 0;

	unit_check(&unit);
	for (unsigned i = 0; i < NAMES; i++) {
		assert_int_equal(unit_lookup(&unit, KV_ROOT_INO, name_of(i)), told->inos[i]);
		if (told->inos[i] == 0)
			continue;
		struct kv_inode inode = unit_get(&unit, told->inos[i]);
		assert_int_equal(inode.blocks, told->blocks[i]);
		assert_int_equal((inode.flags & KV_INODE_HELD) != 0, told->blocks[i] == 0);
		used += told->blocks[i];
	}
	assert_int_equal(unit_space(&unit).used, used);
}

/* Once, and once more before anybody has done anything. */
static void test_index_journal__kills(void **state)
{
	(void)state;
	for (unsigned round = 0; round < 12; round++) {
		work_and_die(round, 4 * (round % 12), round % 3 == 0);
		work_and_die(round, 0, false);
		unit_open(&unit);
		all_is_there();
		/* It is closed as one that is killed would leave it. */
		unit_close(&unit);
		for (unsigned i = 0; i < NAMES; i++)
			if (told->inos[i] != 0 && told->blocks[i] == 0)
				told->inos[i] = 0;
		memset(unit.options.journal, 0, KV_INDEX_JOURNAL_SIZE);
	}
	unit_open(&unit);
}

/* Requests that were done, of those that came before the kill. */
static void test_index_journal__requests(void **state)
{
	struct kv_inode inode;
	pid_t child = fork();
	int status;

	(void)state;
	if (child == 0) {
		unit_open(&unit);
		kv_index_for_request(2);
		(void)unit_make(&unit, KV_ROOT_INO, "a", S_IFDIR | 0755);
		unit_sync(&unit);
		kv_index_for_request(4);
		(void)unit_try_make(&unit, KV_ROOT_INO, "a", S_IFDIR | 0755, &inode);
		kv_index_for_request(0);
		(void)unit_make(&unit, KV_ROOT_INO, "b", S_IFDIR | 0755);
		kv_index_for_request(6);
		(void)unit_make(&unit, KV_ROOT_INO, "c", S_IFDIR | 0755);
		(void)unit_make(&unit, KV_ROOT_INO, "d", S_IFDIR | 0755);
		(void)raise(SIGKILL);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status));
	unit_open(&unit);
	assert_true(kv_index_was_done(unit.index, 2));
	assert_false(kv_index_was_done(unit.index, 4)); /* it failed */
	assert_true(kv_index_was_done(unit.index, 6));
	assert_false(kv_index_was_done(unit.index, 8));
	for (const char *name = "a\0b\0c\0d\0"; *name; name += 2)
		assert_true(unit_lookup(&unit, KV_ROOT_INO, name) != 0);
}

/* Where somebody else has changed the index since, nothing is done again. */
static void test_index_journal__not_ours(void **state)
{
	void *journal = unit.options.journal;

	(void)state;
	work_and_die(5, 8, false);
	unit.options.journal = NULL;
	for (unsigned i = 0; i < 3; i++) {
		unit_open(&unit);
		(void)unit_make(&unit, KV_ROOT_INO, name_of(2000 + i), S_IFREG | 0644);
		unit_close(&unit);
	}
	unit.options.journal = journal;
	unit_open(&unit);
	unit_check(&unit);
	for (unsigned i = 0; i < NAMES; i++)
		assert_true(unit_lookup(&unit, KV_ROOT_INO, name_of(i)) == 0 ||
			    unit_get(&unit, told->inos[i]).blocks == told->blocks[i]);
}

/* More than the journal has room for: what is too much for it waits for commits. */
static void test_index_journal__is_full(void **state)
{
	pid_t child = fork();
	int status;

	(void)state;
	if (child == 0) {
		uint8_t value[60000] = {1};

		unit_open(&unit);
		for (unsigned i = 0; i < 1500; i++) {
			struct kv_inode inode =
				unit_make(&unit, KV_ROOT_INO, name_of(i), S_IFREG | 0644);

			assert_int_equal(kv_index_xattr_set(unit.index, inode.ino, "user.x", value,
						 sizeof(value), 0, ++unit.now),
				0);
		}
		(void)raise(SIGKILL);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	unit_open(&unit);
	unit_check(&unit);
	for (unsigned i = 0; i < 1500; i++)
		assert_true(unit_lookup(&unit, KV_ROOT_INO, name_of(i)) != 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_index_journal__kills, setup, teardown),
		cmocka_unit_test_setup_teardown(test_index_journal__requests, setup, teardown),
		cmocka_unit_test_setup_teardown(test_index_journal__not_ours, setup, teardown),
		cmocka_unit_test_setup_teardown(test_index_journal__is_full, setup, teardown),
	};

	return cmocka_run_group_tests_name("index_journal", tests, NULL, NULL);
}
