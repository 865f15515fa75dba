/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A DRAM tier that outlives the process: what is found in it by the next one, and what is not. The
 * first process is a child that works on the store and kills itself.
 */
#include "tests/unit/unit_core.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

static const struct unit_sizes small = {.store = 128 * MIB, .dram = 32 * MIB};

/* A store without a core, and a tier that is empty. */
static void init(struct unit *unit)
{
	if (geteuid() != 0)
		skip();
	unit_init(unit, small);
	unit_unmount(unit);
	unit->dram_fd = kv_dram_mount(small.dram);
	assert_true(unit->dram_fd > 0);
}

static void done(struct unit *unit)
{
	unit_done(unit);
	assert_int_equal(close(unit->dram_fd), 0);
}

/* WORK in a process that is killed when it returns. */
static void in_killed(struct unit *unit, void (*work)(struct unit *unit))
{
	pid_t child = fork();
	int status;

	assert_true(child >= 0);
	if (child == 0) {
		/* What fails in here must not go on with the other tests. */
		(void)setenv("CMOCKA_TEST_ABORT", "1", 1);
		unit_mount(unit);
		work(unit);
		(void)kill(getpid(), SIGKILL);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static unsigned points_in(const char *name)
{
	unsigned count = 0;

	for (; *name; name++)
		count += *name == '.';
	return count;
}

/* What is in the tier: an object that is marked has three points in its name. */
struct tier {
	unsigned count;
	unsigned marked;
	char name[256]; /* of the last one */
};

static struct tier tier_of(const struct unit *unit)
{
	int fd = openat(unit->dram_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = fdopendir(fd);
	const struct dirent *entry;
	struct tier tier = {0};

	assert_non_null(directory);
	while ((entry = readdir(directory))) {
		if (entry->d_name[0] == '.')
			continue;
		tier.count++;
		tier.marked += points_in(entry->d_name) == 3;
		(void)snprintf(tier.name, sizeof(tier.name), "%s", entry->d_name);
	}
	assert_int_equal(closedir(directory), 0);
	return tier;
}

/* As another process would: what is counted begins anew. */
static void mount_again(struct unit *unit)
{
	memset(&unit->stats, 0, sizeof(unit->stats));
	atomic_store(&unit->disk.reads, 0);
	unit_mount(unit);
}

static uint64_t charged(struct unit *unit)
{
	struct kv_dram_usage usage;

	kv_dram_usage(kv_core_dram(unit->core), &usage);
	return usage.charged;
}

static void expect_adopted(struct unit *unit, uint64_t count, uint64_t bytes)
{
	UNIT_WAIT_FOR(kv_stat_get(&unit->stats.adopted) == count && tier_of(unit).count == count &&
		      charged(unit) == bytes);
	assert_int_equal(unit->stats.adopted, count);
	assert_int_equal(tier_of(unit).count, count);
	assert_int_equal(charged(unit), bytes);
}

/* All that was left has been taken or removed: what has no mark at once, and the rest by a thread.
 */
static void expect_seen(struct unit *unit)
{
	UNIT_WAIT_FOR(tier_of(unit).count == kv_stat_get(&unit->stats.adopted));
	assert_int_equal(tier_of(unit).count, unit->stats.adopted);
}

/* ---- What is found ---- */

static void store_three(struct unit *unit)
{
	(void)unit_put(unit, "a", 3 * MIB + 5, 1);
	(void)unit_put(unit, "b", 1, 2);
	(void)unit_put(unit, "c", 0, 3);
	unit_sync(unit);
}

/* What was stored and made durable is hot, and no device is asked for it. */
static void test_adopt__what_was_stored(void **state)
{
	enum kv_access access;
	struct unit unit;

	(void)state;
	init(&unit);
	in_killed(&unit, store_three);
	assert_int_equal(tier_of(&unit).count, 2);
	mount_again(&unit);
	expect_adopted(&unit, 2, 3 * MIB + 2 * KV_BLOCK_SIZE);
	struct kv_file *file = unit_file(&unit, unit_lookup(&unit, "a"));
	struct kv_version *version = unit_current(file);
	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	kv_version_close(version);
	kv_version_unref(version);
	kv_file_put(file);
	unit_expect_file(&unit, unit_lookup(&unit, "a"), 3 * MIB + 5, 1);
	unit_expect_file(&unit, unit_lookup(&unit, "b"), 1, 2);
	unit_expect_file(&unit, unit_lookup(&unit, "c"), 0, 3);
	assert_int_equal(unit.disk.reads, 0);
	done(&unit);
}

static void rewrite(struct unit *unit)
{
	struct kv_file *file = unit_file(unit, unit_lookup(unit, "a"));
	struct kv_version *base = unit_current(file), *version = unit_new(file, base);

	assert_int_equal(unit_write_pattern(version, MIB, MIB, 7), 0);
	assert_int_equal(unit_publish(version), 0);
	kv_version_unref(base);
	kv_version_unref(version);
	kv_file_put(file);
}

static void open_hot(struct unit *unit, const char *name)
{
	struct kv_file *file = unit_file(unit, unit_lookup(unit, name));
	struct kv_version *version = unit_current(file);
	enum kv_access access;

	assert_int_equal(kv_version_open(version, false, &access), 0);
	assert_int_equal(access, KV_ACCESS_HOT);
	kv_version_unref(version);
	kv_file_put(file);
}

static void rewrite_and_open(struct unit *unit)
{
	rewrite(unit);
	unit_sync(unit);
	open_hot(unit, "a");
}

/* What was found is found again, also what was filled, and what was copied from a base. */
static void test_adopt__over_several_processes(void **state)
{
	struct unit unit;

	(void)state;
	init(&unit);
	in_killed(&unit, store_three);
	in_killed(&unit, rewrite_and_open);
	mount_again(&unit);
	expect_adopted(&unit, 2, 3 * MIB + 2 * KV_BLOCK_SIZE);
	struct kv_file *file = unit_file(&unit, unit_lookup(&unit, "a"));
	struct kv_version *version = unit_current(file);
	unit_expect_pattern(version, MIB, 0, 1);
	unit_expect_pattern(version, MIB, MIB, 7);
	unit_expect_pattern(version, MIB + 5, 2 * MIB, 1);
	kv_version_unref(version);
	kv_file_put(file);
	assert_int_equal(unit.disk.reads, 0);
	done(&unit);
}

/* It is a file's like any other: what is written, evicted or removed later. */
static void test_adopt__is_used_as_any_other(void **state)
{
	struct unit unit;
	uint64_t bytes;

	(void)state;
	init(&unit);
	in_killed(&unit, store_three);
	mount_again(&unit);
	expect_adopted(&unit, 2, 3 * MIB + 2 * KV_BLOCK_SIZE);
	assert_int_equal(kv_core_cool(unit.core, unit_lookup(&unit, "a"), &bytes), 0);
	assert_int_equal(bytes, 3 * MIB + KV_BLOCK_SIZE);
	unit_expect_file(&unit, unit_lookup(&unit, "a"), 3 * MIB + 5, 1);
	assert_int_equal(unit.stats.fill_chunks, 4);
	unit_unlink(&unit, "b");
	UNIT_WAIT_FOR(tier_of(&unit).count == 1);
	assert_int_equal(tier_of(&unit).count, 1);
	/* Larger than what is left of the tier. */
	(void)unit_put(&unit, "d", 30 * MIB, 4);
	unit_sync(&unit);
	unit_expect_file(&unit, unit_lookup(&unit, "d"), 30 * MIB, 4);
	unit_expect_file(&unit, unit_lookup(&unit, "a"), 3 * MIB + 5, 1);
	unit_unmount(&unit);
	assert_int_equal(tier_of(&unit).count, 0);
	unit_mount(&unit);
	done(&unit);
}

/* ---- What is not ---- */

static void fill_a_part(struct unit *unit)
{
	const struct kv_warm range = {MIB, 1, false};
	struct kv_warm_result result;
	struct kv_file *file = unit_file(unit, unit_lookup(unit, "a"));
	struct kv_version *version = unit_current(file);

	assert_int_equal(kv_version_warm(version, &range, &result), 0);
	assert_int_equal(result.resident, 1);
	kv_version_unref(version);
	kv_file_put(file);
}

static void *open_in_thread(void *arg)
{
	open_hot(arg, "a");
	return NULL;
}

/* The device has the requests, and answers none. */
static void fill_under_way(struct unit *unit)
{
	uint64_t submitted = unit->disk.submitted;
	pthread_t thread;

	atomic_store(&unit->disk.hold, true);
	assert_int_equal(pthread_create(&thread, NULL, open_in_thread, unit), 0);
	UNIT_WAIT_FOR(unit->disk.submitted > submitted);
	assert_true(unit->disk.submitted > submitted);
	assert_int_equal(tier_of(unit).count, 1);
}

/* Whole, and then a chunk is taken away because another file needs the room. */
static void take_a_part(struct unit *unit)
{
	const struct kv_warm range = {0, UINT64_MAX, false};
	struct kv_warm_result result;
	struct kv_file *file = unit_file(unit, unit_lookup(unit, "a"));
	struct kv_version *version = unit_current(file);
	enum kv_access access;

	assert_int_equal(kv_version_open(version, true, &access), 0);
	assert_int_equal(access, KV_ACCESS_STREAM);
	assert_int_equal(kv_version_warm(version, &range, &result), 0);
	assert_int_equal(tier_of(unit).marked, 1);
	file = unit_file(unit, unit_create(unit, "d"));
	assert_int_equal(unit_write_pattern(unit_new(file, NULL), 12 * MIB, 0, 2), 0);
	assert_int_equal(kv_dram_charge(kv_core_dram(unit->core), 18 * MIB, 0), 0);
	assert_int_equal(tier_of(unit).count, 2);
	assert_int_equal(tier_of(unit).marked, 0);
}

static void store_and_cool(struct unit *unit)
{
	uint64_t bytes;

	store_three(unit);
	assert_int_equal(kv_core_cool(unit->core, unit_lookup(unit, "a"), &bytes), 0);
	assert_int_equal(kv_core_cool(unit->core, unit_lookup(unit, "b"), &bytes), 0);
}

/* What of it is there is told by the sums of its chunks; what is on its way is not there. */
static void test_adopt__a_part(void **state)
{
	void (*const works[])(struct unit * unit) = {fill_a_part, take_a_part, fill_under_way};
	const unsigned least[] = {1, 1, 0}, most[] = {1, 3, 0};
	struct unit unit;

	(void)state;
	init(&unit);
	in_killed(&unit, store_and_cool);
	assert_int_equal(tier_of(&unit).count, 0);
	for (unsigned i = 0; i < 3; i++) {
		in_killed(&unit, works[i]);
		assert_true(tier_of(&unit).count > 0);
		mount_again(&unit);
		expect_seen(&unit);
		assert_int_equal(unit.stats.adopted, most[i] > 0);
		unit_expect_file(&unit, unit_lookup(&unit, "a"), 3 * MIB + 5, 1);
		assert_in_range(4 - unit.stats.fill_chunks, least[i], most[i]);
		unit_unmount(&unit);
	}
	unit_mount(&unit);
	done(&unit);
}

static void damage(struct unit *unit)
{
	const struct tier tier = tier_of(unit);
	int fd = openat(unit->dram_fd, tier.name, O_RDWR | O_CLOEXEC);

	assert_int_equal(tier.count, 1);
	assert_int_equal(points_in(tier.name), 2);
	assert_int_equal(pwrite(fd, "?", 1, MIB + 5000), 1);
	assert_int_equal(close(fd), 0);
}

static void test_adopt__not_a_part_that_is_not_right(void **state)
{
	struct unit unit;

	(void)state;
	init(&unit);
	in_killed(&unit, store_and_cool);
	in_killed(&unit, fill_a_part);
	damage(&unit);
	mount_again(&unit);
	expect_adopted(&unit, 0, 0);
	unit_expect_file(&unit, unit_lookup(&unit, "a"), 3 * MIB + 5, 1);
	assert_int_equal(unit.stats.fill_chunks, 4);
	assert_int_equal(unit.stats.checksum_errors, 0);
	done(&unit);
}

static void store_holes(struct unit *unit)
{
	struct kv_file *file = unit_file(unit, unit_create(unit, "h"));
	struct kv_version *version = unit_new(file, NULL);

	assert_int_equal(unit_write_pattern(version, KV_BLOCK_SIZE, 2 * KV_BLOCK_SIZE, 1), 0);
	assert_int_equal(unit_write_pattern(version, 100, 3 * MIB, 1), 0);
	assert_int_equal(unit_publish(version), 0);
	unit_sync(unit);
}

/* Holes are nobody's pages. */
static void test_adopt__a_file_with_holes(void **state)
{
	static const uint8_t zeros[2 * KV_BLOCK_SIZE];
	uint8_t memory[2 * KV_BLOCK_SIZE];
	struct unit unit;

	(void)state;
	init(&unit);
	in_killed(&unit, store_holes);
	mount_again(&unit);
	expect_adopted(&unit, 1, 2 * KV_BLOCK_SIZE);
	struct kv_file *file = unit_file(&unit, unit_lookup(&unit, "h"));
	struct kv_version *version = unit_current(file);
	unit_expect_pattern(version, KV_BLOCK_SIZE, 2 * KV_BLOCK_SIZE, 1);
	unit_expect_pattern(version, 100, 3 * MIB, 1);
	assert_int_equal(kv_version_read(version, memory, sizeof(memory), 0), sizeof(memory));
	assert_memory_equal(memory, zeros, sizeof(memory));
	kv_version_unref(version);
	kv_file_put(file);
	assert_int_equal(unit.disk.reads, 0);
	done(&unit);
}

static void write_more(struct unit *unit)
{
	struct kv_file *file = unit_file(unit, unit_lookup(unit, "a"));
	struct kv_version *base = unit_current(file);
	struct kv_version *version = unit_new(file, base);

	/* Published, and on no device; then another one, which is not. */
	atomic_store(&unit->disk.hold, true);
	rewrite(unit);
	assert_int_equal(unit_write_pattern(version, MIB, 0, 9), 0);
}

/* The writer goes on in the object of what was found whole: that is not what it was. */
static void go_on(struct unit *unit)
{
	struct kv_file *file = unit_file(unit, unit_lookup(unit, "a"));
	struct kv_version *base = unit_new(file, NULL);
	struct kv_version *version;

	assert_int_equal(unit_write_pattern(base, 2 * MIB, 0, 8), 0);
	assert_int_equal(kv_version_publish(base), 0);
	assert_int_equal(kv_version_sync(base), 0);
	assert_int_equal(tier_of(unit).marked, 1);
	version = unit_new(file, base);
	kv_version_continue(version, base);
	assert_int_equal(tier_of(unit).count, 1);
	assert_int_equal(tier_of(unit).marked, 0);
	assert_int_equal(unit_write_pattern(version, MIB, 0, 9), 0);
}

/* What the index has is what counts. */
static void test_adopt__not_what_was_dirty(void **state)
{
	struct unit unit;

	(void)state;
	init(&unit);
	in_killed(&unit, store_three);
	in_killed(&unit, write_more);
	mount_again(&unit);
	/* The object of what was durable is there beside the others. */
	expect_adopted(&unit, 2, 3 * MIB + 2 * KV_BLOCK_SIZE);
	unit_expect_file(&unit, unit_lookup(&unit, "a"), 3 * MIB + 5, 1);
	assert_int_equal(unit.disk.reads, 0);
	unit_unmount(&unit);
	in_killed(&unit, go_on);
	mount_again(&unit);
	expect_adopted(&unit, 0, 0);
	unit_expect_file(&unit, unit_lookup(&unit, "a"), 2 * MIB, 8);
	done(&unit);
}

/* Without the tier, which it finds again later. */
static void meanwhile(struct unit *unit, void (*work)(struct unit *unit))
{
	int dram_fd = unit->dram_fd;

	unit->dram_fd = 0;
	unit_mount(unit);
	work(unit);
	unit_unmount(unit);
	unit->dram_fd = dram_fd;
}

static void store_a(struct unit *unit)
{
	(void)unit_put(unit, "a", 3 * MIB + 5, 1);
	unit_sync(unit);
}

static void unlink_a(struct unit *unit)
{
	unit_unlink(unit, "a");
}

/* Rewritten or removed by somebody who did not know of the tier. */
static void test_adopt__not_what_has_changed_meanwhile(void **state)
{
	void (*const works[])(struct unit * unit) = {rewrite, unlink_a};
	struct unit unit;

	(void)state;
	for (unsigned i = 0; i < 2; i++) {
		init(&unit);
		in_killed(&unit, store_a);
		assert_int_equal(tier_of(&unit).count, 1);
		meanwhile(&unit, works[i]);
		mount_again(&unit);
		expect_adopted(&unit, 0, 0);
		done(&unit);
	}
}

/* The same number for other content, which only the sum tells; and objects that are not whole. */
static void spoil(struct unit *unit, unsigned how)
{
	const struct tier tier = tier_of(unit);
	const char *name = tier.name;
	char other[260];
	int fd;

	assert_int_equal(tier.marked, 1);
	(void)snprintf(other, sizeof(other), "%s", name);
	fd = openat(unit->dram_fd, name, O_RDWR | O_CLOEXEC);
	assert_true(fd >= 0);
	switch (how) {
	case 0:
		other[strlen(other) - 1] = other[strlen(other) - 1] == '1' ? '2' : '1';
		break;
	case 1: /* not as we write it */
		(void)snprintf(other, sizeof(other), "0%s", name);
		break;
	case 2:
		(void)snprintf(other, sizeof(other), "probe");
		break;
	case 3:
		assert_int_equal(ftruncate(fd, 3 * MIB + 6), 0);
		break;
	default:
		assert_int_equal(
			fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, MIB, MIB), 0);
		break;
	}
	assert_int_equal(close(fd), 0);
	assert_int_equal(renameat(unit->dram_fd, name, unit->dram_fd, other), 0);
}

static void test_adopt__not_what_is_something_else(void **state)
{
	struct unit unit;

	(void)state;
	for (unsigned how = 0; how < 5; how++) {
		init(&unit);
		in_killed(&unit, store_a);
		spoil(&unit, how);
		mount_again(&unit);
		expect_adopted(&unit, 0, 0);
		unit_expect_file(&unit, unit_lookup(&unit, "a"), 3 * MIB + 5, 1);
		assert_int_equal(unit.stats.fill_chunks, 4);
		done(&unit);
	}
}

static void store_large(struct unit *unit)
{
	(void)unit_put(unit, "x", 12 * MIB, 1);
	(void)unit_put(unit, "y", 12 * MIB, 2);
	unit_sync(unit);
}

/* The next process has a smaller budget: one of them fits, and the tier is as small in the end. */
static void test_adopt__as_much_as_there_is_room_for(void **state)
{
	struct kv_dram_usage usage;
	struct unit unit;

	(void)state;
	init(&unit);
	in_killed(&unit, store_large);
	unit.options.dram_bytes = 16 * MIB;
	mount_again(&unit);
	expect_adopted(&unit, 1, 12 * MIB);
	kv_dram_usage(kv_core_dram(unit.core), &usage);
	assert_int_equal(usage.budget, 16 * MIB);
	assert_int_equal(usage.zombie, 0);
	unit_expect_file(&unit, unit_lookup(&unit, "x"), 12 * MIB, 1);
	unit_expect_file(&unit, unit_lookup(&unit, "y"), 12 * MIB, 2);
	done(&unit);
}

/* Nothing is marked in a tier that ends with its process. */
static void test_adopt__only_in_a_tier_that_is_shared(void **state)
{
	struct unit unit;

	(void)state;
	init(&unit);
	meanwhile(&unit, store_three);
	assert_int_equal(tier_of(&unit).count, 0);
	mount_again(&unit);
	expect_adopted(&unit, 0, 0);
	done(&unit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_adopt__what_was_stored),
		cmocka_unit_test(test_adopt__over_several_processes),
		cmocka_unit_test(test_adopt__is_used_as_any_other),
		cmocka_unit_test(test_adopt__a_part),
		cmocka_unit_test(test_adopt__not_a_part_that_is_not_right),
		cmocka_unit_test(test_adopt__a_file_with_holes),
		cmocka_unit_test(test_adopt__not_what_was_dirty),
		cmocka_unit_test(test_adopt__not_what_has_changed_meanwhile),
		cmocka_unit_test(test_adopt__not_what_is_something_else),
		cmocka_unit_test(test_adopt__as_much_as_there_is_room_for),
		cmocka_unit_test(test_adopt__only_in_a_tier_that_is_shared),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
