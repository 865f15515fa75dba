/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is kept and what goes first, in the core: promises of quotas, eviction within them, leases,
 * never-read files, retired directories, walks that a crash left.
 */
#include "unit_core.h"

#define BLOCKS(bytes) ((bytes) / KV_BLOCK_SIZE)

static const struct unit_sizes sizes = {.store = 64 * MIB, .dram = 64 * MIB};

static int setup(void **state)
{
	static struct unit unit;

	unit_init(&unit, sizes);
	*state = &unit;
	return 0;
}

static int teardown(void **state)
{
	unit_done(*state);
	return 0;
}

static uint64_t make(struct unit *unit, uint64_t parent, const char *name, uint32_t mode)
{
	const struct kv_make make = {
		.parent = parent,
		.name = name,
		.length = strlen(name),
		.mode = mode,
		.now_ns = kv_core_now_ns(unit->core),
		.hold = S_ISREG(mode),
	};
	struct kv_inode inode;

	assert_int_equal(kv_index_make(unit_index(unit), &make, &inode), 0);
	return inode.ino;
}

static uint64_t make_dir(struct unit *unit, const char *name)
{
	return make(unit, KV_ROOT_INO, name, S_IFDIR | 0755);
}

static uint64_t find(struct unit *unit, uint64_t parent, const char *name)
{
	struct kv_inode inode;
	int r = kv_index_lookup(unit_index(unit), parent, name, strlen(name), &inode);

	return r == 0 ? inode.ino : 0;
}

/* Writes and publishes: the first error of either. */
static int try_put(
	struct unit *unit, uint64_t parent, const char *name, uint64_t size, uint64_t seed)
{
	uint64_t ino = find(unit, parent, name);
	struct kv_file *file;
	struct kv_version *version;
	int r;

	if (ino == 0)
		ino = make(unit, parent, name, S_IFREG | 0644);
	file = unit_file(unit, ino);
	version = unit_new(file, NULL);
	r = unit_write_pattern(version, size, 0, seed);
	/* Half of it must not be had, whatever the writer does. */
	if (r == -EDQUOT)
		assert_int_equal(unit_publish(version), -EDQUOT);
	else if (r == 0)
		r = unit_publish(version);
	kv_version_unref(version);
	kv_file_put(file);
	return r;
}

static void put(struct unit *unit, uint64_t parent, const char *name, uint64_t size)
{
	assert_int_equal(try_put(unit, parent, name, size, 7), 0);
}

static struct kv_domain_info domain_of(struct unit *unit, uint64_t ino)
{
	struct kv_domain_info info;
	struct kv_inode inode;

	assert_int_equal(kv_index_get(unit_index(unit), ino, &inode), 0);
	assert_int_equal(kv_index_domain(unit_index(unit), inode.domain, &info), 0);
	return info;
}

static void set_quota(struct unit *unit, uint64_t ino, uint64_t bytes)
{
	assert_int_equal(kv_core_set_quota(unit->core, ino, BLOCKS(bytes)), 0);
}

/* A full domain evicts its own oldest, and stays below its limit at every moment. */
static void test_core_quota__evicts_its_own(void **state)
{
	struct unit *unit = *state;
	uint64_t dir = make_dir(unit, "dir");
	uint64_t other = unit_put(unit, "other", MIB, 1);
	char name[16];

	set_quota(unit, dir, 8 * MIB);
	for (unsigned i = 0; i < 24; i++) {
		struct kv_domain_info info;

		(void)snprintf(name, sizeof(name), "%u", i);
		put(unit, dir, name, MIB);
		info = domain_of(unit, dir);
		assert_true(info.used + info.promised <= info.limit);
	}
	assert_true(find(unit, dir, "23") != 0);
	assert_int_equal(find(unit, dir, "0"), 0);
	unit_expect_file(unit, other, MIB, 1);
	unit_sync(unit);
	assert_int_equal(domain_of(unit, dir).promised, 0);
}

/* Nothing to evict, or too large in any case: refused whole, and the promises are given back. */
static void test_core_quota__refuses(void **state)
{
	struct unit *unit = *state;
	uint64_t dir = make_dir(unit, "dir");
	struct kv_file *file;

	set_quota(unit, dir, 8 * MIB);
	put(unit, dir, "kept", 5 * MIB);
	unit_sync(unit);
	file = unit_file(unit, find(unit, dir, "kept"));
	kv_file_opened(file);
	assert_int_equal(try_put(unit, dir, "new", 4 * MIB, 1), -EDQUOT);
	assert_int_equal(try_put(unit, dir, "huge", 9 * MIB, 1), -EDQUOT);
	assert_true(find(unit, dir, "kept") != 0);
	assert_int_equal(domain_of(unit, dir).promised, 0);
	kv_file_closed(file);
	kv_file_put(file);
	assert_int_equal(try_put(unit, dir, "new", 4 * MIB, 1), 0);
	assert_int_equal(find(unit, dir, "kept"), 0);
}

/* A rewrite is promised only what the file grows by, whole or in place, also before the commit. */
static void test_core_quota__rewrites(void **state)
{
	struct unit *unit = *state;
	uint64_t dir = make_dir(unit, "dir");
	struct kv_version *base;
	struct kv_version *version;
	struct kv_file *file;

	set_quota(unit, dir, 8 * MIB);
	put(unit, dir, "a", 6 * MIB);
	unit_sync(unit);
	file = unit_file(unit, find(unit, dir, "a"));
	kv_file_opened(file); /* so that it is not the victim of its own growth */
	put(unit, dir, "a", 6 * MIB);
	base = unit_current(file);
	version = unit_new(file, base);
	assert_int_equal(unit_write_pattern(version, 6 * MIB, 0, 9), 0);
	assert_int_equal(unit_write_pattern(version, 2 * MIB, 6 * MIB, 9), 0);
	assert_int_equal(unit_write_pattern(version, MIB, 8 * MIB, 9), -EDQUOT);
	assert_int_equal(unit_publish(version), -EDQUOT);
	assert_int_equal(kv_version_truncate(version, 8 * MIB), 0);
	assert_int_equal(unit_publish(version), 0);
	kv_version_unref(base);
	kv_version_unref(version);
	unit_sync(unit);
	assert_int_equal(domain_of(unit, dir).used, BLOCKS(8 * MIB));
	assert_int_equal(domain_of(unit, dir).promised, 0);
	unit_expect_file(unit, find(unit, dir, "a"), 8 * MIB, 9);
	kv_file_closed(file);
	kv_file_put(file);
}

/* A version whose file changes domain while it is written counts in the new one. */
static void test_core_quota__moved_while_written(void **state)
{
	struct unit *unit = *state;
	uint64_t a = make_dir(unit, "a");
	uint64_t b = make_dir(unit, "b");
	uint64_t ino = make(unit, a, "file", S_IFREG | 0644);
	struct kv_file *file = unit_file(unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	const struct kv_rename rename = {a, "file", 4, b, "file", 4, 0, 1};
	struct kv_inode moved, replaced;

	set_quota(unit, a, 8 * MIB);
	set_quota(unit, b, 4 * MIB);
	assert_int_equal(unit_write_pattern(version, 3 * MIB, 0, 1), 0);
	assert_int_equal(domain_of(unit, a).promised, BLOCKS(3 * MIB));
	assert_int_equal(kv_index_rename(unit_index(unit), &rename, &moved, &replaced), 0);
	assert_int_equal(unit_write_pattern(version, MIB, 3 * MIB, 1), 0);
	assert_int_equal(domain_of(unit, a).promised, 0);
	assert_int_equal(domain_of(unit, b).promised, BLOCKS(4 * MIB));
	assert_int_equal(unit_write_pattern(version, MIB, 4 * MIB, 1), -EDQUOT);
	kv_version_unref(version);
	assert_int_equal(domain_of(unit, b).promised, 0);
	kv_file_put(file);
}

/* ---- Leases ---- */

/* A file in memory or not is kept for the lease, and goes behind it. */
static void test_core_lease__keeps(void **state)
{
	struct unit *unit = *state;
	uint64_t looked_up = unit_put(unit, "looked-up", MIB, 1);
	uint64_t other = unit_put(unit, "other", MIB, 1);
	char name[16];

	assert_false(kv_core_lease(unit->core, looked_up)); /* switched off */
	assert_int_equal(kv_core_lease_left(unit->core, looked_up), 0);
	unit->options.lease_ms = 600000;
	unit_chill(unit);
	assert_true(kv_core_lease(unit->core, looked_up));
	assert_false(kv_core_lease(unit->core, looked_up));
	assert_true(kv_core_lease_left(unit->core, looked_up) > 500000);
	for (unsigned i = 0; i < 120; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		(void)unit_put(unit, name, MIB, i);
	}
	assert_int_equal(unit_lookup(unit, "looked-up"), looked_up);
	assert_int_equal(unit_lookup(unit, "other"), 0);
	(void)other;
}

/* Room is made when the lease has run out, and the writer waits for that. */
static void test_core_lease__is_waited_for(void **state)
{
	struct unit *unit = *state;
	uint64_t dir = make_dir(unit, "dir");

	unit->options.lease_ms = 500;
	unit_chill(unit);
	set_quota(unit, dir, 8 * MIB);
	put(unit, dir, "a", 6 * MIB);
	unit_sync(unit);
	(void)kv_core_lease(unit->core, find(unit, dir, "a"));
	put(unit, dir, "b", 6 * MIB);
	assert_int_equal(find(unit, dir, "a"), 0);
}

/* ---- Never read ---- */

/* Older than the option says and never read: before older ones that were. */
static void test_core_unread__goes_first(void **state)
{
	struct unit *unit = *state;
	uint64_t dir = make_dir(unit, "dir");
	struct kv_file *file;

	unit->options.unread_ttl_ms = 3600000;
	unit_chill(unit);
	set_quota(unit, dir, 8 * MIB);
	put(unit, dir, "read", 2 * MIB);
	put(unit, dir, "read-too", 2 * MIB);
	unit_sync(unit);
	for (unsigned i = 0; i < 2; i++) {
		file = unit_file(unit, find(unit, dir, i ? "read-too" : "read"));
		kv_file_touch(file);
		kv_file_put(file);
	}
	put(unit, dir, "unread", 2 * MIB);
	unit_sync(unit);
	atomic_store(&unit->disk.offset_ns, INT64_C(3601) * 1000000000);
	put(unit, dir, "new", 3 * MIB);
	assert_int_equal(find(unit, dir, "unread"), 0);
	assert_true(find(unit, dir, "read") != 0);
	assert_true(find(unit, dir, "read-too") != 0);
	atomic_store(&unit->disk.offset_ns, 0);
}

/* A use between publish and commit counts: by order and as a read. */
static void test_core_unread__read_before_the_commit(void **state)
{
	struct unit *unit = *state;
	struct kv_index_scope scope = {.domain = 0, .unread = true};
	struct kv_index_use uses[4];
	struct kv_file *file;
	uint64_t first;

	atomic_store(&unit->disk.hold, true);
	first = unit_put(unit, "first", MIB, 1);
	(void)unit_put(unit, "second", MIB, 1);
	(void)usleep(1000);
	file = unit_file(unit, first);
	kv_file_touch(file);
	kv_file_put(file);
	atomic_store(&unit->disk.hold, false);
	unit_sync(unit);
	assert_int_equal(kv_index_oldest(unit_index(unit), &scope, NULL, uses, 4), 1);
	scope.unread = false;
	assert_int_equal(kv_index_oldest(unit_index(unit), &scope, NULL, uses, 4), 2);
	assert_int_equal(uses[1].ino, first);
}

/* ---- Retired directories, and what a crash leaves ---- */

/* What is below is freed while the core runs, or by the next mount. */
static void test_core_retire__is_worked_off(void **state)
{
	struct unit *unit = *state;
	char name[16];

	for (unsigned round = 0; round < 2; round++) {
		uint64_t dir = round ? find(unit, KV_ROOT_INO, "dir") : make_dir(unit, "dir");
		uint64_t sub = make(unit, dir, "sub", S_IFDIR | 0755);
		struct kv_retire retire = {.ino = dir, .now_ns = 1};
		struct kv_inode fresh;

		for (unsigned i = 0; i < 700; i++) {
			(void)snprintf(name, sizeof(name), "%u", i);
			put(unit, i % 2 ? sub : dir, name, KV_BLOCK_SIZE);
		}
		unit_sync(unit);
		assert_int_equal(kv_index_retire(unit_index(unit), &retire, &fresh), 1);
		if (round == 0) {
			kv_core_retired(unit->core, dir);
			kv_core_orphan(unit->core, dir);
		} else {
			unit_chill(unit); /* nobody told the core */
		}
		unit_expect_used(unit, 0);
		assert_int_equal(find(unit, KV_ROOT_INO, "dir"), fresh.ino);
	}
}

/* A walk that was not ended is gone on with by the next mount. */
static void test_core_quota__walk_is_resumed(void **state)
{
	struct unit *unit = *state;
	uint64_t dir = make_dir(unit, "dir");
	struct kv_quota_walk walk = {0};
	uint32_t domain;
	char name[16];

	for (unsigned i = 0; i < 400; i++) {
		(void)snprintf(name, sizeof(name), "%u", i);
		put(unit, dir, name, KV_BLOCK_SIZE);
	}
	unit_sync(unit);
	assert_int_equal(kv_index_quota_set(unit_index(unit), dir, BLOCKS(8 * MIB), &domain), 0);
	assert_int_equal(kv_index_quota_step(unit_index(unit), domain, &walk), 1);
	assert_true(domain_of(unit, dir).used < 400);
	unit_chill(unit);
	UNIT_WAIT_FOR(domain_of(unit, dir).state == KV_DOMAIN_LIVE);
	assert_int_equal(domain_of(unit, dir).state, KV_DOMAIN_LIVE);
	assert_int_equal(domain_of(unit, dir).used, 400);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_core_quota__evicts_its_own),
		TEST(test_core_quota__refuses),
		TEST(test_core_quota__rewrites),
		TEST(test_core_quota__moved_while_written),
		TEST(test_core_quota__walk_is_resumed),
		TEST(test_core_lease__keeps),
		TEST(test_core_lease__is_waited_for),
		TEST(test_core_unread__goes_first),
		TEST(test_core_unread__read_before_the_commit),
		TEST(test_core_retire__is_worked_off),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
