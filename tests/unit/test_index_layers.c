/* SPDX-License-Identifier: Apache-2.0 */
/* The layers: held, pending, flushing and LMDB as one view; group commit; commits that fail. */
#include "unit_index.h"

static int setup(void **state)
{
	static struct unit unit;

	unit_create(&unit, 2, 100000);
	unit.options.commit_delay_ms = UNIT_NEVER_MS;
	unit_open(&unit);
	/* The first operation after an opening commits at once, to reserve inode numbers. */
	(void)unit_make(&unit, KV_ROOT_INO, "first", S_IFREG | 0644);
	unit_unlink(&unit, KV_ROOT_INO, "first");
	unit_reap(&unit, unit.index->next_ino - 1);
	unit_sync(&unit);
	*state = &unit;
	return 0;
}

struct names {
	char text[256]; /* the names in their order, each behind a space */
};

static bool add_name(void *arg, const struct kv_dirent *dirent)
{
	struct names *names = arg;
	size_t used = strlen(names->text);

	(void)snprintf(names->text + used, sizeof(names->text) - used, " %.*s", (int)dirent->length,
		dirent->name);
	return true;
}

static size_t count_names(struct unit *unit, uint64_t ino)
{
	struct names names = {""};
	size_t count = 0;

	assert_int_equal(kv_index_readdir(unit->index, ino, 0, true, add_name, &names), 0);
	for (const char *p = names.text; *p; p++)
		count += *p == ' ';
	return count;
}

/* A directory whose entries lie in all four layers is listed and looked up as one. */
static void test_index_layers__all_four(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	MDB_txn *block;

	(void)unit_make(unit, dir.ino, "lmdb", S_IFREG | 0644);
	(void)unit_make(unit, dir.ino, "lmdb-then-gone", S_IFREG | 0644);
	(void)unit_make(unit, dir.ino, "lmdb-then-flushed-away", S_IFREG | 0644);
	unit_sync(unit);
	block = unit_block_commits(unit);
	(void)unit_make(unit, dir.ino, "flushing", S_IFREG | 0644);
	(void)unit_make(unit, dir.ino, "flushing-then-gone", S_IFREG | 0644);
	unit_unlink(unit, dir.ino, "lmdb-then-flushed-away");
	unit_take_batch(unit);
	(void)unit_make(unit, dir.ino, "pending", S_IFREG | 0644);
	unit_unlink(unit, dir.ino, "lmdb-then-gone");
	unit_unlink(unit, dir.ino, "flushing-then-gone");
	(void)unit_make(unit, dir.ino, "lmdb-then-flushed-away", S_IFREG | 0644);
	(void)unit_hold(unit, dir.ino, "held");
	(void)unit_hold(unit, dir.ino, "lmdb-then-gone");
	for (int round = 0; round < 2; round++) {
		assert_int_equal(count_names(unit, dir.ino), 6);
		assert_true(unit_lookup(unit, dir.ino, "lmdb") != 0);
		assert_true(unit_lookup(unit, dir.ino, "flushing") != 0);
		assert_true(unit_lookup(unit, dir.ino, "pending") != 0);
		assert_true(unit_lookup(unit, dir.ino, "held") != 0);
		assert_true(unit_lookup(unit, dir.ino, "lmdb-then-gone") != 0);
		assert_true(unit_lookup(unit, dir.ino, "lmdb-then-flushed-away") != 0);
		assert_true(unit_lookup(unit, dir.ino, "flushing-then-gone") == 0);
		unit_check(unit);
		if (round == 0) {
			unit_unblock_commits(block);
			unit_sync(unit);
		}
	}
	unit_reopen(unit);
	assert_int_equal(count_names(unit, dir.ino), 4); /* without the held ones */
}

/* An inode changed in each layer shows its newest state at every moment. */
static void test_index_layers__newest_wins(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	struct kv_change change = {.mask = KV_CHANGE_UID, .uid = 1};
	struct kv_inode inode;
	MDB_txn *block;

	unit_sync(unit);
	block = unit_block_commits(unit);
	assert_int_equal(kv_index_change(unit->index, file.ino, &change, &inode), 0);
	unit_take_batch(unit);
	assert_int_equal(unit_get(unit, file.ino).uid, 1);
	change.uid = 2;
	assert_int_equal(kv_index_change(unit->index, file.ino, &change, &inode), 0);
	assert_int_equal(unit_get(unit, file.ino).uid, 2);
	unit_unblock_commits(block);
	unit_sync(unit);
	assert_int_equal(unit_get(unit, file.ino).uid, 2);
	unit_reopen(unit);
	assert_int_equal(unit_get(unit, file.ino).uid, 2);
}

/* A directory is empty only if no layer has an entry of it. */
static void test_index_layers__emptiness(void **state)
{
	struct unit *unit = *state;
	struct kv_inode dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);

	(void)unit_make(unit, dir.ino, "entry", S_IFREG | 0644);
	unit_sync(unit);
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", true), -ENOTEMPTY);
	unit_unlink(unit, dir.ino, "entry");
	(void)unit_hold(unit, dir.ino, "held");
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", true), -ENOTEMPTY);
	unit_unlink(unit, dir.ino, "held");
	assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, "dir", true), 0);
}

/* A held file costs nothing in LMDB; publishing commits its names, links and attributes with its
 * content. */
static void test_index_layers__held_then_published(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_hold(unit, KV_ROOT_INO, "file");
	struct kv_inode lost = unit_hold(unit, KV_ROOT_INO, "lost");
	const struct kv_change change = {.mask = KV_CHANGE_MODE, .mode = 0600};
	struct kv_index_usage usage;
	struct kv_inode inode;

	kv_index_usage(unit->index, &usage);
	assert_int_equal(usage.inodes, 3);
	assert_int_equal(usage.held, 4);
	assert_int_equal(usage.pending, 1); /* the times of the root */
	assert_int_equal(unit_try_link(unit, file.ino, KV_ROOT_INO, "second"), 0);
	assert_int_equal(unit_try_link(unit, file.ino, KV_ROOT_INO, "third"), 0);
	assert_int_equal(kv_index_change(unit->index, file.ino, &change, &inode), 0);
	assert_true(inode.flags & KV_INODE_HELD);
	unit_check(unit);
	(void)unit_write(unit, file.ino, 3);
	assert_false(unit_get(unit, file.ino).flags & KV_INODE_HELD);
	kv_index_usage(unit->index, &usage);
	assert_int_equal(usage.held, 2);
	unit_check(unit);
	unit_reopen(unit);
	kv_index_usage(unit->index, &usage);
	assert_int_equal(usage.inodes, 2);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "file"), file.ino);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "second"), file.ino);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "third"), file.ino);
	assert_int_equal(unit_get(unit, file.ino).mode, S_IFREG | 0600);
	assert_int_equal(unit_get(unit, file.ino).nlink, 3);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "lost"), 0);
	assert_int_equal(kv_index_get(unit->index, lost.ino, &inode), -ENOENT);
}

/* A held file loses its first name to its second, held as before. */
static void test_index_layers__held_links(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_hold(unit, KV_ROOT_INO, "one");

	assert_int_equal(unit_try_link(unit, file.ino, KV_ROOT_INO, "two"), 0);
	unit_unlink(unit, KV_ROOT_INO, "one");
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "two"), file.ino);
	unit_check(unit);
	(void)unit_write(unit, file.ino, 1);
	unit_reopen(unit);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "one"), 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "two"), file.ino);
}

/* Operations are numbered, share commits, and are durable once waited for. */
static void test_index_layers__group_commit(void **state)
{
	struct unit *unit = *state;
	struct kv_index_usage usage;
	uint64_t sequence = kv_index_sequence(unit->index);
	uint64_t commits;
	char name[24];

	kv_index_usage(unit->index, &usage);
	commits = usage.commits;
	for (unsigned i = 0; i < 100; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		(void)unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644);
	}
	assert_int_equal(kv_index_sequence(unit->index), sequence + 100);
	kv_index_usage(unit->index, &usage);
	assert_int_equal(usage.commits, commits);
	assert_int_equal(usage.pending, 301); /* inode, name, use each; the root */
	assert_int_equal(usage.inodes, 101);
	assert_int_equal(kv_index_wait(unit->index, sequence + 50), 0);
	kv_index_usage(unit->index, &usage);
	assert_int_equal(usage.commits, commits + 1);
	assert_int_equal(usage.pending, 0);
	assert_true(usage.size_bytes > 0);
	assert_int_equal(kv_index_wait(unit->index, sequence + 100), 0);
	kv_index_usage(unit->index, &usage);
	assert_int_equal(usage.commits, commits + 1);
}

/* Without anybody waiting, operations are committed after the delay. */
static void test_index_layers__commits_by_itself(void **state)
{
	struct unit *unit = *state;
	struct kv_index_usage usage;

	unit_close(unit);
	unit->options.commit_delay_ms = 1;
	unit_open(unit);
	(void)unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	do {
		(void)usleep(1000);
		kv_index_usage(unit->index, &usage);
	} while (usage.pending > 0);
	assert_true(usage.commits > 0);
}

/* Enough pending records are committed without anybody waiting, long before the delay. */
static void test_index_layers__pending_is_bounded(void **state)
{
	struct unit *unit = *state;
	struct kv_index_usage usage;
	uint64_t commits;
	char name[24];

	kv_index_usage(unit->index, &usage);
	commits = usage.commits;
	for (unsigned i = 0; i < 8000; i++) {
		(void)snprintf(name, sizeof(name), "f%u", i);
		(void)unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644);
	}
	do {
		(void)usleep(1000);
		kv_index_usage(unit->index, &usage);
	} while (usage.commits == commits);
}

/* ---- Commits that fail ---- */

/* A failed commit is reported to who waits, refuses operations, loses nothing, and is made good. */
static void test_index_layers__failed_commit(void **state)
{
	static const struct {
		int error;
		int result;
	} cases[] = {{MDB_MAP_FULL, -ENOSPC}, {ENOSPC, -ENOSPC}, {EIO, -EIO}, {MDB_PANIC, -EIO}};
	struct unit *unit = *state;
	struct kv_inode inode;
	char name[24];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		uint64_t sequence;

		(void)snprintf(name, sizeof(name), "file%zu", i);
		(void)unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644);
		sequence = kv_index_sequence(unit->index);
		kv_commit_fail(unit->index, cases[i].error, UINT32_MAX);
		assert_int_equal(kv_index_wait(unit->index, sequence), cases[i].result);
		assert_int_equal(kv_index_wait(unit->index, sequence), cases[i].result);
		assert_int_equal(unit_try_make(unit, KV_ROOT_INO, "refused", S_IFREG, &inode),
			cases[i].result);
		assert_int_equal(unit_try_unlink(unit, KV_ROOT_INO, name, false), cases[i].result);
		assert_true(unit_lookup(unit, KV_ROOT_INO, name) != 0);
		assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "refused"), 0);
		unit_check(unit);
		kv_commit_fail(unit->index, 0, 0);
		assert_int_equal(kv_index_wait(unit->index, sequence), 0);
		unit_reopen(unit);
		assert_true(unit_lookup(unit, KV_ROOT_INO, name) != 0);
	}
}

/* What was applied while the failing batch was under way follows with the next one. */
static void test_index_layers__failed_batch_keeps_its_place(void **state)
{
	struct unit *unit = *state;
	struct kv_inode file = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	MDB_txn *block = unit_block_commits(unit);
	struct kv_freed freed;

	(void)unit_write(unit, file.ino, 5);
	unit_take_batch(unit);
	assert_int_equal(unit_try_publish(unit, file.ino, NULL, 0,
				 (struct kv_content){.replace = true}, &freed),
		0);
	unit_unlink(unit, KV_ROOT_INO, "file");
	kv_space_release(unit->space, &freed);
	kv_commit_fail(unit->index, EIO, 1);
	unit_unblock_commits(block);
	/* The failed attempt may be over before the wait begins; then this one is the retry. */
	(void)kv_index_wait(unit->index, kv_index_sequence(unit->index));
	assert_int_equal(kv_index_wait(unit->index, kv_index_sequence(unit->index)), 0);
	assert_int_equal(unit_space(unit).used, 0);
	assert_int_equal(unit_space(unit).busy, 0);
	unit_reopen(unit);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "file"), 0);
	assert_int_equal(unit_get(unit, file.ino).blocks, 0);
}

/* Failing commits are retried without anybody asking. */
static void test_index_layers__retries_by_itself(void **state)
{
	struct unit *unit = *state;
	struct kv_inode inode;
	int r;

	(void)unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644);
	kv_commit_fail(unit->index, EIO, 1);
	assert_int_equal(kv_index_wait(unit->index, kv_index_sequence(unit->index)), -EIO);
	do {
		(void)usleep(10000);
		r = unit_try_make(unit, KV_ROOT_INO, "later", S_IFREG | 0644, &inode);
		assert_true(r == 0 || r == -EIO);
	} while (r != 0);
}

/* Closing while commits fail ends, and keeps what was durable. */
static void test_index_layers__close_while_failing(void **state)
{
	struct unit *unit = *state;

	(void)unit_make(unit, KV_ROOT_INO, "durable", S_IFREG | 0644);
	unit_sync(unit);
	(void)unit_make(unit, KV_ROOT_INO, "lost", S_IFREG | 0644);
	kv_commit_fail(unit->index, EIO, UINT32_MAX);
	assert_int_equal(kv_index_wait(unit->index, kv_index_sequence(unit->index)), -EIO);
	unit_reopen(unit);
	assert_true(unit_lookup(unit, KV_ROOT_INO, "durable") != 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "lost"), 0);
}

/* A real full map: the error is ENOSPC, and lookups go on. */
static void test_index_layers__full_map(void **state)
{
	struct unit *unit = *state;
	struct kv_inode inode;
	char name[24];
	int r = 0;

	unit_close(unit);
	unit->options.map_size_bytes = 256 * 1024;
	unit->options.commit_delay_ms = 1;
	unit_open(unit);
	for (unsigned i = 0; r == 0; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		r = unit_try_make(unit, KV_ROOT_INO, name, S_IFREG | 0644, &inode);
		if (r == 0 && i % 100 == 99)
			r = kv_index_wait(unit->index, kv_index_sequence(unit->index));
	}
	assert_int_equal(r, -ENOSPC);
	assert_true(unit_lookup(unit, KV_ROOT_INO, "5") != 0);
	unit_check(unit);
	unit->options.map_size_bytes = 0;
	unit_reopen(unit); /* what could not be committed is gone, nothing else */
	assert_true(unit_lookup(unit, KV_ROOT_INO, "5") != 0);
}

/* ---- Threads ---- */

struct worker {
	struct unit *unit;
	uint64_t parent;
	unsigned number;
	pthread_t thread;
};

/* Makes, writes, reads and removes files of its own, and lists what all make. */
static void *work(void *arg)
{
	struct worker *worker = arg;
	struct kv_index *index = worker->unit->index;
	struct kv_space *space = kv_index_space(index);
	char name[24];

	for (unsigned i = 0; i < 300; i++) {
		struct kv_make make = {.parent = worker->parent,
			.name = name,
			.mode = S_IFREG | 0644,
			.now_ns = i,
			.hold = i % 2};
		struct kv_extent extents[8];
		struct kv_chunk chunk = {0, 0, KV_CHUNK_FRESH, i, extents};
		struct kv_content content = {8 * KV_BLOCK_SIZE, 1, i, i, i, true, &chunk, 1, 0, 0};
		struct names names = {""};
		struct kv_inode inode;
		struct kv_freed freed;
		int count;

		make.length = (size_t)snprintf(name, sizeof(name), "%u-%u", worker->number, i);
		if (kv_index_make(index, &make, &inode) != 0 || kv_space_reserve(space, 8) != 0)
			return arg;
		count = kv_space_alloc(space, (uint16_t)(i % 2), 8, 0, extents);
		if (count < 1)
			return arg;
		chunk.extent_count = (uint32_t)count;
		if (kv_index_publish(index, inode.ino, &content, &inode, &freed) != 0 ||
			kv_index_lookup(index, worker->parent, name, make.length, &inode) != 0 ||
			inode.blocks != 8)
			return arg;
		kv_space_release(space, &freed);
		if (i % 10 == 0 && (kv_index_wait(index, kv_index_sequence(index)) != 0 ||
					   kv_index_readdir(index, worker->parent, 0, true,
						   add_name, &names) != 0))
			return arg;
		if (i % 3 == 0)
			continue;
		if (kv_index_unlink(index, worker->parent, name, make.length, false, inode.ino, i,
			    &inode) != 0 ||
			kv_index_reap(index, inode.ino, &freed) != 0)
			return arg;
		kv_space_release(space, &freed);
	}
	return NULL;
}

/* Many threads at once leave a consistent index with exactly what they left. */
static void test_index_layers__threads(void **state)
{
	struct unit *unit = *state;
	struct worker workers[4];
	struct kv_inode dir;

	unit_close(unit);
	unit->options.commit_delay_ms = 1;
	unit_open(unit);
	dir = unit_make(unit, KV_ROOT_INO, "dir", S_IFDIR | 0755);
	for (unsigned i = 0; i < 4; i++) {
		workers[i] = (struct worker){unit, dir.ino, i, 0};
		assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (unsigned i = 0; i < 4; i++) {
		void *failed;

		assert_int_equal(pthread_join(workers[i].thread, &failed), 0);
		assert_null(failed);
	}
	unit_sync(unit);
	assert_int_equal(unit_space(unit).used, 4 * 100 * 8);
	assert_int_equal(unit_space(unit).busy, 0);
}

static void *touch(void *arg)
{
	struct worker *worker = arg;

	return kv_index_touch(worker->unit->index, worker->parent, 1, 1, INT64_MIN) == 0 ? NULL
											 : arg;
}

/* Gives up after some seconds. */
static uint64_t pending_in_the_end(struct unit *unit)
{
	struct kv_index_usage usage = {.pending = 1};

	for (unsigned i = 0; i < 5000 && usage.pending > 0; i++) {
		(void)usleep(1000);
		kv_index_usage(unit->index, &usage);
	}
	return usage.pending;
}

/*
 * An operation that comes in between the commit thread's waking up and its taking the batch does
 * not leave it asleep behind the next one.
 */
static void test_index_layers__nothing_stays_pending(void **state)
{
	struct unit *unit = *state;
	struct worker worker = {.unit = unit};
	void *failed;

	unit_close(unit);
	unit->options.commit_delay_ms = 20;
	unit_open(unit);
	worker.parent = unit_make(unit, KV_ROOT_INO, "file", S_IFREG | 0644).ino;
	for (unsigned i = 0; i < 5; i++) {
		assert_null(touch(&worker)); /* wakes it */
		(void)pthread_rwlock_rdlock(&unit->index->lock);
		assert_int_equal(pthread_create(&worker.thread, NULL, touch, &worker), 0);
		(void)usleep(60000); /* both wait for the lock */
		(void)pthread_rwlock_unlock(&unit->index->lock);
		assert_int_equal(pthread_join(worker.thread, &failed), 0);
		assert_null(failed);
		assert_int_equal(pending_in_the_end(unit), 0);
		(void)usleep(20000); /* it sleeps */
		assert_null(touch(&worker));
		assert_int_equal(pending_in_the_end(unit), 0);
	}
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, unit_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_layers__all_four),
		TEST(test_index_layers__newest_wins),
		TEST(test_index_layers__emptiness),
		TEST(test_index_layers__held_then_published),
		TEST(test_index_layers__held_links),
		TEST(test_index_layers__group_commit),
		TEST(test_index_layers__commits_by_itself),
		TEST(test_index_layers__pending_is_bounded),
		TEST(test_index_layers__failed_commit),
		TEST(test_index_layers__failed_batch_keeps_its_place),
		TEST(test_index_layers__retries_by_itself),
		TEST(test_index_layers__close_while_failing),
		TEST(test_index_layers__full_map),
		TEST(test_index_layers__threads),
		TEST(test_index_layers__nothing_stays_pending),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
