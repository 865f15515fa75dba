/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Crashes and restarts: a process that dies without closing leaves the index as of an operation
 * boundary; opening asks only for what it needs; what cannot be opened is refused with a reason.
 *
 * No index is open in this process when it forks: LMDB does not survive that.
 */
#include <signal.h>

#include "unit_index.h"

static int setup(void **state)
{
	static struct unit unit;

	unit_create(&unit, 2, 100000);
	*state = &unit;
	return 0;
}

static int teardown(void **state)
{
	unit_remove(*state);
	return 0;
}

/* What the child has told the parent it waited for. */
static uint64_t last_told(int fd)
{
	uint64_t step;
	uint64_t last = 0;

	while (read(fd, &step, sizeof(step)) == (ssize_t)sizeof(step))
		last = step + 1;
	return last;
}

static void remove_file(struct unit *unit, uint64_t number)
{
	char name[32];
	uint64_t ino;

	(void)snprintf(name, sizeof(name), "file-%llu", (unsigned long long)number);
	ino = unit_lookup(unit, KV_ROOT_INO, name);
	if (ino == 0)
		return;
	unit_unlink(unit, KV_ROOT_INO, name);
	unit_reap(unit, ino);
}

/*
 * The child's life: in step K, file K is made held, written, published; file K - 10 is removed and
 * reaped; the token is renamed to K + 1. So the token tells exactly what else must be there.
 */
static void live_step(struct unit *unit, uint64_t step)
{
	char name[32];
	char next[32];
	struct kv_inode file;
	struct kv_inode replaced;
	struct kv_rename rename = {.parent = KV_ROOT_INO, .new_parent = KV_ROOT_INO};

	(void)snprintf(name, sizeof(name), "file-%llu", (unsigned long long)step);
	file = unit_hold(unit, KV_ROOT_INO, name);
	(void)unit_write(unit, file.ino, (uint32_t)(1 + step % 200));
	if (step >= 10)
		remove_file(unit, step - 10);
	(void)snprintf(name, sizeof(name), "token-%llu", (unsigned long long)step);
	(void)snprintf(next, sizeof(next), "token-%llu", (unsigned long long)(step + 1));
	rename.name = name;
	rename.length = strlen(name);
	rename.new_name = next;
	rename.new_length = strlen(next);
	assert_int_equal(kv_index_rename(unit->index, &rename, &file, &replaced), 0);
}

static void live(struct unit *unit, uint64_t first, int told)
{
	uint64_t orphan;

	unit_open(unit);
	/* What the crash before left half done: the step begins anew. */
	while (kv_index_orphans(unit->index, 0, &orphan, 1) == 1)
		unit_reap(unit, orphan);
	remove_file(unit, first);
	(void)unit_hold(unit, KV_ROOT_INO, "never-published");
	for (uint64_t step = first;; step++) {
		live_step(unit, step);
		if (step % 5 != 0)
			continue;
		unit_sync(unit);
		if (write(told, &step, sizeof(step)) != (ssize_t)sizeof(step))
			_exit(1);
	}
}

struct find_token {
	uint64_t token;
	unsigned tokens;
	unsigned files;
	uint64_t least;
	uint64_t most;
};

static bool look_at_entry(void *arg, const struct kv_dirent *dirent)
{
	struct find_token *find = arg;
	char name[64] = {0};
	unsigned long long number;

	assert_true(dirent->length < sizeof(name));
	memcpy(name, dirent->name, dirent->length);
	if (sscanf(name, "token-%llu", &number) == 1) {
		find->token = number;
		find->tokens++;
		return true;
	}
	assert_int_equal(sscanf(name, "file-%llu", &number), 1);  /* nothing else, nothing held */
	assert_int_equal(dirent->inode.blocks, 1 + number % 200); /* whole */
	find->least = find->files == 0 ? number : kv_min_u64(number, find->least);
	find->most = find->files++ == 0 ? number : kv_max_u64(number, find->most);
	return true;
}

/* The index as a crash left it is as of an operation boundary. Returns the steps that were done. */
static uint64_t inspect(struct unit *unit, uint64_t durable)
{
	struct find_token find = {0};
	uint64_t inos[2];
	ssize_t orphans;

	unit_open(unit);
	unit_check(unit);
	assert_int_equal(
		kv_index_readdir(unit->index, KV_ROOT_INO, 0, true, look_at_entry, &find), 0);
	orphans = kv_index_orphans(unit->index, 0, inos, 2);
	assert_int_equal(find.tokens, 1);
	assert_true(find.token >= durable);
	assert_true(orphans <= 1);
	if (find.token > 0) {
		/* The token's own step may be half done: its file there, an old one gone. */
		bool begun = find.most == find.token;

		assert_true(begun || find.most == find.token - 1);
		assert_int_equal(find.files, find.most - find.least + 1);
		assert_true(find.files + 1 >= kv_min_u64(find.token, 10));
		assert_true(find.files <= 10u + begun);
	}
	unit_close(unit);
	return find.token;
}

static void token_make(struct unit *unit)
{
	unit_open(unit);
	(void)unit_make(unit, KV_ROOT_INO, "token-0", S_IFREG | 0644);
	unit_close(unit);
}

/* Whenever the process is killed, the index is whole, and has all that was waited for. */
static void test_index_crash__killed_at_any_time(void **state)
{
	struct unit *unit = *state;
	uint64_t done = 0;

	token_make(unit);
	/* On a slow machine it takes more rounds, and longer ones, to get anywhere. */
	for (unsigned round = 0; round < 25 || (done <= 50 && round < 500); round++) {
		int told[2];
		int status;
		pid_t child;

		assert_int_equal(pipe(told), 0);
		child = fork();
		assert_true(child >= 0);
		if (child == 0) {
			(void)close(told[0]);
			live(unit, done, told[1]);
			_exit(1);
		}
		(void)close(told[1]);
		(void)usleep(2000 + round * 4001 % 60000 * (1 + round / 25));
		assert_int_equal(kill(child, SIGKILL), 0);
		assert_int_equal(waitpid(child, &status, 0), child);
		assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		done = inspect(unit, last_told(told[0]));
		(void)close(told[0]);
	}
	assert_true(done > 50); /* else nothing was shown */
}

/* Operations that nobody waited for may be lost, but only from the end; held files always are. */
static void test_index_crash__exit_without_close(void **state)
{
	struct unit *unit = *state;
	struct kv_inode inode;
	int status;
	pid_t child = fork();

	assert_true(child >= 0);
	if (child == 0) {
		unit->options.commit_delay_ms = UNIT_NEVER_MS;
		unit_open(unit);
		inode = unit_make(unit, KV_ROOT_INO, "durable", S_IFREG | 0644);
		(void)unit_write(unit, inode.ino, 20);
		(void)unit_hold(unit, KV_ROOT_INO, "held");
		unit_sync(unit);
		(void)unit_make(unit, KV_ROOT_INO, "lost", S_IFREG | 0644);
		(void)unit_write(unit, inode.ino, 30);
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	unit_open(unit);
	unit_check(unit);
	inode = unit_get(unit, unit_lookup(unit, KV_ROOT_INO, "durable"));
	assert_int_equal(inode.blocks, 20);
	assert_int_equal(unit_space(unit).used, 20);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "held"), 0);
	assert_int_equal(unit_lookup(unit, KV_ROOT_INO, "lost"), 0);
	/* The numbers of those lost are not used again. */
	assert_true(unit_make(unit, KV_ROOT_INO, "next", S_IFREG | 0644).ino > inode.ino + 2);
	unit_close(unit);
}

/* ---- Opening ---- */

static int try_open(struct unit *unit, const char *path, char error[256])
{
	struct kv_index *index = NULL;
	int r;

	error[0] = '\0';
	r = kv_index_open(path, &unit->options, &index, error, 256);
	assert_true((r == 0) == (index != NULL));
	assert_true((r == 0) == (error[0] == '\0'));
	(void)kv_index_close(index);
	return r;
}

static void file_path(const struct unit *unit, char path[160])
{
	(void)snprintf(path, 160, "%s/data.mdb", unit->path);
}

/* What cannot be opened is told apart, in one line. */
static void test_index_crash__open_errors(void **state)
{
	struct unit *unit = *state;
	char error[256];
	char path[160];
	FILE *file;

	assert_int_equal(try_open(unit, "/nonexistent/kvfs", error), -ENOENT);
	assert_non_null(strstr(error, "no index"));
	file_path(unit, path);
	assert_int_equal(unlink(path), 0);
	assert_int_equal(try_open(unit, unit->path, error), -ENOENT);
	file = fopen(path, "w");
	assert_non_null(file);
	assert_int_equal(fclose(file), 0);
	assert_int_equal(try_open(unit, unit->path, error), -EUCLEAN); /* empty */
	file = fopen(path, "w");
	assert_non_null(file);
	for (int i = 0; i < 10000; i++)
		assert_int_equal(fputc('x', file), 'x');
	assert_int_equal(fclose(file), 0);
	assert_int_equal(try_open(unit, unit->path, error), -EUCLEAN); /* no LMDB file */
	assert_non_null(strstr(error, "damaged"));
	assert_int_equal(unlink(path), 0);
	assert_int_equal(symlink("/dev/null", path), 0);
	assert_int_equal(try_open(unit, unit->path, error), -EUCLEAN);
}

static void put_meta(struct unit *unit, uint64_t which, void *data, size_t size)
{
	struct kv_key key = kv_key_single(KV_TABLE_META, which);
	MDB_val k = {key.size, key.bytes};
	MDB_env *env;
	MDB_txn *txn;
	MDB_dbi dbi;

	assert_int_equal(mdb_env_create(&env), 0);
	assert_int_equal(mdb_env_open(env, unit->path, 0, 0600), 0);
	assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
	assert_int_equal(mdb_dbi_open(txn, NULL, 0, &dbi), 0);
	if (size > 0)
		assert_int_equal(kv_index_put(txn, dbi, &key, data, size), 0);
	else
		assert_int_equal(mdb_del(txn, dbi, &k, NULL), 0);
	assert_int_equal(mdb_txn_commit(txn), 0);
	mdb_env_close(env);
}

/* A newer format is refused by name; damaged heads and counts are refused as damaged. */
static void test_index_crash__open_checks_the_head(void **state)
{
	struct unit *unit = *state;
	struct kv_store_record record = {
		.store = {.format = KV_INDEX_FORMAT + 1, .device_count = 1}};
	uint8_t store[KV_STORE_RECORD_MAX];
	uint8_t counters[KV_STATE_RECORD_SIZE];
	char error[256];
	size_t size;

	kv_state_encode(&(struct kv_state){.next_ino = 2, .inodes = 1, .used_blocks = 5}, counters);
	put_meta(unit, KV_META_STATE, counters, sizeof(counters));
	assert_int_equal(try_open(unit, unit->path, error), -EUCLEAN);
	assert_non_null(strstr(error, "used blocks"));
	put_meta(unit, KV_META_STATE, NULL, 0);
	assert_int_equal(try_open(unit, unit->path, error), -EUCLEAN);
	size = kv_store_encode(&record, store);
	put_meta(unit, KV_META_STORE, store, size);
	assert_int_equal(try_open(unit, unit->path, error), -EPROTO);
	assert_non_null(strstr(error, "newer"));
	record.store.format = KV_INDEX_FORMAT - 1;
	put_meta(unit, KV_META_STORE, store, kv_store_encode(&record, store));
	assert_int_equal(try_open(unit, unit->path, error), -EPROTO);
	assert_non_null(strstr(error, "older"));
	assert_non_null(strstr(error, "kvfs format"));
	store[0] ^= 1;
	put_meta(unit, KV_META_STORE, store, size);
	assert_int_equal(try_open(unit, unit->path, error), -EUCLEAN);
	put_meta(unit, KV_META_STORE, NULL, 0);
	assert_int_equal(try_open(unit, unit->path, error), -EUCLEAN);
}

/* create refuses what cannot be a store, and a directory that has an index. */
static void test_index_crash__create_errors(void **state)
{
	struct unit *unit = *state;
	struct kv_index_store store = {.device_count = 1, .device_blocks = {100}};

	assert_int_equal(kv_index_create(unit->path, &store, 0755, 0, 0, 1), -EEXIST);
	assert_int_equal(kv_index_create("/nonexistent/kvfs", &store, 0755, 0, 0, 1), -ENOENT);
	store.device_count = 0;
	assert_int_equal(kv_index_create(unit->path, &store, 0755, 0, 0, 1), -EINVAL);
	store.device_count = KV_DEVICES_MAX + 1;
	assert_int_equal(kv_index_create(unit->path, &store, 0755, 0, 0, 1), -EINVAL);
	store.device_count = 1;
	store.device_blocks[0] = KV_DEVICE_BLOCKS_MAX + 1;
	assert_int_equal(kv_index_create(unit->path, &store, 0755, 0, 0, 1), -EINVAL);
}

/* What the store was made with comes back. */
static void test_index_crash__store_comes_back(void **state)
{
	struct unit *unit = *state;
	const struct kv_index_store *store;

	unit_open(unit);
	store = kv_index_store(unit->index);
	assert_int_equal(store->format, KV_INDEX_FORMAT);
	assert_int_equal(store->device_count, 2);
	assert_int_equal(store->device_blocks[1], 100000);
	assert_memory_equal(store->uuid, "\1\2\3", 4);
	unit_close(unit);
	assert_null(kv_index_close(NULL));
}

/* Makes every record worthless that opening has no business with. */
static void damage_everything(struct unit *unit)
{
	struct kv_key *keys = calloc(10000, sizeof(*keys));
	size_t count = 0;
	char bad[] = "bad";
	MDB_val value = {3, bad};
	MDB_val key;
	MDB_cursor *cursor;
	MDB_txn *txn;

	assert_non_null(keys);
	assert_int_equal(mdb_txn_begin(unit->index->env, NULL, 0, &txn), 0);
	assert_int_equal(mdb_cursor_open(txn, unit->index->dbi, &cursor), 0);
	while (mdb_cursor_get(cursor, &key, &(MDB_val){0, NULL}, MDB_NEXT) == 0 && count < 10000) {
		uint8_t table = *(const uint8_t *)key.mv_data;

		if (table != KV_TABLE_META && table != KV_TABLE_SPACE_SUMMARY &&
			table != KV_TABLE_DOMAIN)
			assert_int_equal(
				kv_key_decode(key.mv_data, key.mv_size, &keys[count++]), 0);
	}
	mdb_cursor_close(cursor);
	assert_true(count > 3000 && count < 10000);
	for (size_t i = 0; i < count; i++) {
		key = (MDB_val){keys[i].size, keys[i].bytes};
		assert_int_equal(mdb_put(txn, unit->index->dbi, &key, &value, 0), 0);
	}
	assert_int_equal(mdb_txn_commit(txn), 0);
	free(keys);
}

/* Opening reads no file and no bitmap: it succeeds though every one of them is damaged. */
static void test_index_crash__open_reads_no_files(void **state)
{
	struct unit *unit = *state;
	char name[32];
	struct kv_inode inode;

	unit_open(unit);
	for (unsigned i = 0; i < 1000; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		inode = unit_make(unit, KV_ROOT_INO, name, S_IFREG | 0644);
		(void)unit_write(unit, inode.ino, 3);
	}
	unit_sync(unit);
	damage_everything(unit);
	unit_reopen(unit);
	assert_int_equal(unit_space(unit).used, 3000);
	assert_int_equal(kv_index_get(unit->index, KV_ROOT_INO, &inode), -EUCLEAN);
	assert_true(kv_index_check(unit->index, NULL, NULL) > 1000);
	unit_close(unit);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_index_crash__killed_at_any_time),
		TEST(test_index_crash__exit_without_close),
		TEST(test_index_crash__open_errors),
		TEST(test_index_crash__open_checks_the_head),
		TEST(test_index_crash__create_errors),
		TEST(test_index_crash__store_comes_back),
		TEST(test_index_crash__open_reads_no_files),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
