/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Power cuts at every I/O of seeded workloads, on simulated disks (sim.h says what a cut leaves).
 *
 * A chain is a store that lives some lives: each begins with what a cut in the one before left,
 * works, and ends in cuts at all places of its recording, with different survivors each. Every
 * image is opened, checked and compared with the model.
 *
 *	test_sim                        the seeds of seeds.txt, then new ones
 *	test_sim SEED [LIFE [PLACE]]    one chain, or what of it is asked for
 *
 * Environment: KVFS_LONG=1 for a million images; SIM_POINTS for another number of them.
 */
#include <sys/mount.h>

#include "fs/log.h"
#include "tests/crash/work.h"

#define LIVES 4u
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define POINTS_SHORT 1000u /* they take much longer, and look for something else */
#else
#define POINTS_SHORT 10500u
#endif
#define POINTS_LONG 1000000u
#define STEPS_MIN 8u
#define STEPS_MAX 22u
#define FAULTS_MAX 3u
/* They come last, on stderr, behind all that the store logged about the faults there. */
#define FAILURES_SHOWN 5u
#define QUOTA_SMALL (UINT64_C(700) << 10)

#ifdef KV_BREAK_NO_DATA_FLUSH
#define BROKEN true /* this build must lose data, and the test must see it */
#else
#define BROKEN false
#endif

struct only {
	uint64_t seed; /* 0: all */
	long life;     /* -1: all */
	long place;
};

struct run {
	struct sim *sim;
	struct unit unit;
	struct model model;
	struct sim_image formatted;
	struct only only;
	uint64_t seed;
	unsigned life;
	size_t place;
	enum work_kind kind;
	bool faults;
	uint64_t points;
	uint64_t wanted;
	unsigned failed;
	char failures[FAILURES_SHOWN][400];
	uint64_t struck;
	uint64_t by_kind[_WORK_KIND_MAX];
};

/* ---- Mounting ---- */

static int mount_store(struct run *run, char *error, size_t error_size)
{
	struct unit *unit = &run->unit;
	const struct kv_store_open open = {
		.ops = &unit->disk.ops,
		.path = unit->store_path,
		.quota_bytes = unit->quota,
		.stats = &unit->stats,
	};
	int r = kv_store_open(&open, &unit->store, error, error_size);

	if (r < 0)
		return r;
	const struct kv_core_options options = {
		.options = &unit->options, .store = unit->store, .stats = &unit->stats};
	r = kv_core_new(&options, &unit->core, error, error_size);
	if (r < 0)
		unit->store = kv_store_close(unit->store);
	return r;
}

static void umount_store(struct run *run)
{
	run->unit.core = kv_core_free(run->unit.core);
	run->unit.store = kv_store_close(run->unit.store);
}

/* ---- One image ---- */

static void note_violation(void *arg, const char *text)
{
	model_violation(arg, "check: %s", text);
}

static void check_index(struct model_check *check)
{
	ssize_t n = kv_index_check(check->unit->store->index, note_violation, check);

	if (n < 0)
		model_violation(check, "check failed: %s", strerror((int)-n));
}

/* What is pinned may be more than the quota that the store was given later: there is no room then.
 */
static bool has_room_beside_pins(struct unit *unit, uint64_t blocks)
{
	struct kv_index_usage usage;

	kv_index_usage(unit->store->index, &usage);
	return usage.pinned + blocks <= unit_usage(unit).total;
}

/* A store that survived takes new files. */
static void check_use(struct model_check *check)
{
	struct unit *unit = check->unit;
	bool room = has_room_beside_pins(unit, 2);
	uint64_t ino = unit_create(unit, "new");
	struct kv_file *file = unit_file(unit, ino);
	struct kv_version *version = unit_new(file, NULL);
	int r = unit_write_pattern(version, 5000, 0, check->place);

	if (r == 0)
		r = unit_publish(version);
	kv_version_unref(version);
	kv_file_put(file);
	if (r == 0)
		r = kv_core_sync(unit->core);
	if (r == 0) {
		unit_expect_file(unit, ino, 5000, check->place);
	} else if (r != -ENOSPC || room) {
		const struct kv_space_usage usage = unit_usage(unit);

		model_violation(check,
			"cannot be written any more: %s (of %llu blocks %llu are used, %llu busy,"
			" %llu promised)",
			strerror(-r), (unsigned long long)usage.total,
			(unsigned long long)usage.used, (unsigned long long)usage.busy,
			(unsigned long long)usage.reserved);
	}
	unit_unlink(unit, "new");
}

static void report(struct run *run, const struct model_check *check, const char *what)
{
	if (run->failed++ >= FAILURES_SHOWN)
		return;
	(void)snprintf(run->failures[run->failed - 1], sizeof(run->failures[0]),
		"test_sim %llu %u %zu (%s, %s%s): %s (and %u more)", (unsigned long long)run->seed,
		run->life, check->place, work_name(run->kind), what,
		run->faults ? ", with faults" : "", check->text, check->violations - 1);
}

static void flip_a_bit(struct sim_image *image, uint64_t *seed)
{
	static uint8_t flipped[KV_BLOCK_SIZE];
	const unsigned first = (unsigned)(KV_DEVICE_DATA_START / KV_BLOCK_SIZE);

	for (unsigned i = 0; i < 10000; i++) {
		unsigned disk = (unsigned)(sim_random(seed) >> 20) % SIM_DEVICES;
		unsigned block = first + (unsigned)(sim_random(seed) >> 20) % 600;

		if (!image->blocks[disk][block])
			continue;
		memcpy(flipped, image->blocks[disk][block], KV_BLOCK_SIZE);
		flipped[sim_random(seed) >> 52] ^= (uint8_t)(1 << (sim_random(seed) >> 61));
		image->blocks[disk][block] = flipped;
		return;
	}
}

static void check_image(
	struct run *run, struct model_check *check, const struct sim_image *image, const char *what)
{
	char error[300] = "";

	sim_load(run->sim, image);
	if (mount_store(run, error, sizeof(error)) < 0) {
		model_violation(check, "does not open: %s", error);
	} else {
		/* A damaged file is quarantined while it is read: the check comes first. */
		check_index(check);
		model_compare(check);
		if (run->points % 16 == 0)
			check_use(check);
		run->unit.core = kv_core_free(run->unit.core);
		if (run->points % 4 == 0)
			check_index(check);
		run->unit.store = kv_store_close(run->unit.store);
	}
	run->points++;
	run->by_kind[run->kind]++;
	if (check->violations > 0)
		report(run, check, what);
}

static const char *const survivor_names[_SIM_SURVIVORS_MAX] = {"nothing unsafe survives",
	"everything survives", "blocks by chance", "writes by chance", "torn writes",
	"the index survives", "the devices survive"};

static void check_place(struct run *run, struct sim_cut *cut, uint64_t *seed)
{
	struct sim_image image;
	/* What is not safe makes the difference. */
	unsigned count = cut->pending_count == 0 ? 1 : 3;

	run->place = cut->place;
	sim_image_init(&image);
	for (unsigned i = 0; i < count; i++) {
		enum sim_survivors survivors =
			i == 0 ? SIM_INDEX_ONLY : (sim_random(seed) >> 20) % _SIM_SURVIVORS_MAX;
		struct model_check check = {
			.model = &run->model, .unit = &run->unit, .place = cut->place};

		sim_cut_image(cut, survivors, sim_random(seed), &image);
		check.flipped = sim_random(seed) >> 60 == 0;
		if (check.flipped)
			flip_a_bit(&image, seed);
		check_image(run, &check, &image,
			check.flipped ? "a bit is flipped" : survivor_names[survivors]);
	}
	sim_image_done(&image);
}

/* ---- One life ---- */

static void plan_faults(struct run *run, uint64_t *seed)
{
	run->faults = (sim_random(seed) >> 20) % 2 == 0;
	run->sim->late = (sim_random(seed) >> 20) % 2 == 0;
	for (unsigned i = 0; run->faults && i < FAULTS_MAX; i++) {
		unsigned fault = (sim_random(seed) >> 20) % _SIM_FAULT_MAX;

		run->sim->faults[fault].after = (int)((sim_random(seed) >> 20) % 40);
		run->sim->faults[fault].count = 1 + (int)((sim_random(seed) >> 20) % 3);
	}
}

static void live(struct run *run, uint64_t *seed)
{
	char error[300] = "";
	struct work work = {.sim = run->sim,
		.unit = &run->unit,
		.model = &run->model,
		.kind = run->kind,
		.file_number = run->life << 16};

	work.seed = sim_random(seed);
	unsigned count = STEPS_MIN + (unsigned)(sim_random(seed) >> 20) % (STEPS_MAX - STEPS_MIN);
	sim_record(run->sim, sim_random(seed));
	plan_faults(run, seed);
	if (run->kind == WORK_EVICT) {
		run->unit.quota = QUOTA_SMALL;
		run->model.may_vanish = 0;
	}
	if (mount_store(run, error, sizeof(error)) == 0) {
		work_run(&work, count);
		umount_store(run);
	}
	run->struck += run->sim->struck;
	sim_stop(run->sim);
}

/* What was recorded, up to the place that was asked for. */
static void print_recording(const struct run *run)
{
	static const char *const kinds[] = {"write", "flush", "flush failed"};

	for (size_t i = 0; i < run->sim->count; i++) {
		const struct sim_event *event = &run->sim->events[i];

		if (run->only.place >= 0 && (size_t)run->only.place < i)
			break;
		printf("%zu %s disk=%u offset=%llu length=%u begun=%zu completed=%zd\n", i,
			kinds[event->kind], event->disk, (unsigned long long)event->offset,
			event->length, event->begun, (ssize_t)event->completed);
	}
}

/* From a place of the life, what the next one begins with. */
static void choose_next(
	struct run *run, struct sim_cut *cut, uint64_t *seed, struct sim_image *start)
{
	struct model_check check = {.model = &run->model, .unit = &run->unit, .place = cut->place};
	struct sim_image image;
	char error[300] = "";

	sim_image_init(&image);
	sim_cut_image(cut, (sim_random(seed) >> 20) % _SIM_SURVIVORS_MAX, sim_random(seed), &image);
	sim_load(run->sim, &image);
	sim_image_free_blocks(start);
	sim_image_copy(start, &image);
	sim_image_own(start);
	sim_image_done(&image);
	if (mount_store(run, error, sizeof(error)) < 0) {
		model_violation(&check, "does not open: %s", error);
	} else {
		model_compare(&check);
		umount_store(run);
	}
	if (check.violations > 0)
		report(run, &check, "for the next life");
	model_restart(&check);
}

static void run_life(struct run *run, uint64_t seed, struct sim_image *start, bool quick)
{
	uint64_t chance = seed;
	struct sim_cut cut;
	size_t next;
	bool mine = run->only.life < 0 || (unsigned)run->only.life == run->life;

	run->kind = (sim_random(&chance) >> 20) % _WORK_KIND_MAX;
	run->unit.quota = 0;
	sim_load(run->sim, start);
	live(run, &chance);
	if (run->only.life >= 0 && mine)
		print_recording(run);
	next = (size_t)(sim_random(&chance) >> 20) % (run->sim->count + 1);
	for (unsigned pass = 0; pass < 2; pass++) {
		sim_cut_init(&cut, run->sim, start);
		for (;; sim_cut_step(&cut)) {
			bool asked = run->only.place < 0 || (size_t)run->only.place == cut.place;

			if (pass == 0 && mine && asked && (!quick || cut.place % 8 == 0))
				check_place(run, &cut, &chance);
			if ((pass == 1 && cut.place == next) || cut.place == run->sim->count)
				break;
		}
		if (pass == 1)
			choose_next(run, &cut, &chance, start);
		sim_cut_done(&cut);
	}
}

static void run_chain(struct run *run, uint64_t seed, bool quick)
{
	struct sim_image start;
	struct work work = {.sim = run->sim, .unit = &run->unit, .model = &run->model};
	char error[300] = "";
	uint64_t chance = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;

	run->seed = seed;
	run->unit.quota = 0;
	sim_load(run->sim, &run->formatted);
	assert_int_equal(mount_store(run, error, sizeof(error)), 0);
	work_prepare(&work);
	umount_store(run);
	sim_image_init(&start);
	sim_save(run->sim, &start);
	/* A broken store that was found out is not lived on in: the model does not know what is
	 * there. */
	for (run->life = 0;
		run->life < LIVES && run->points < run->wanted && !(BROKEN && run->failed);
		run->life++)
		run_life(run, sim_random(&chance), &start, quick);
	sim_image_free_blocks(&start);
	sim_image_done(&start);
	model_done(&run->model);
}

/* ---- All of it ---- */

static void setup(struct run *run)
{
	struct unit *unit = &run->unit;
	char paths[SIM_DEVICES][300];
	const char *devices[SIM_DEVICES];
	char error[300] = "";
	void *state = NULL;

	/* LMDB maps its file: a tmpfs makes nothing else of that than memory. */
	assert_int_equal(setenv("TMPDIR", "/dev/shm", 1), 0);
	assert_int_equal(unit_directory_setup(&state), 0);
	unit->directory = state;
	(void)snprintf(unit->store_path, sizeof(unit->store_path), "%s/store", unit->directory);
	/* Nothing is there: the I/O table knows them by their last letter. */
	for (unsigned i = 0; i < SIM_DEVICES; i++) {
		(void)snprintf(paths[i], sizeof(paths[i]), "%s/disk%u", unit->directory, i);
		devices[i] = paths[i];
	}
	run->sim = sim_new(unit->store_path);
	unit->disk.ops = run->sim->ops;
	kv_options_init(&unit->options);
	unit->options.lease_ms = 0;
	unit->options.dram_bytes = 16 * MIB;
	unit->options.stream_above_bytes = MIB;
	kv_log_setup(KV_LOG_ERROR, KV_LOG_STDERR);
	const struct kv_store_format format = {
		.ops = &unit->disk.ops,
		.path = unit->store_path,
		.devices = devices,
		.device_count = SIM_DEVICES,
	};
	if (kv_store_format(&format, error, sizeof(error)) != 0)
		fail_msg("format: %s", error);
	sim_image_init(&run->formatted);
	sim_save(run->sim, &run->formatted);
}

static void teardown(struct run *run)
{
	void *state = run->unit.directory;

	run->sim = sim_free(run->sim);
	sim_image_free_blocks(&run->formatted);
	sim_image_done(&run->formatted);
	assert_int_equal(unit_directory_teardown(&state), 0);
}

/* Seeds that once failed, shortened to every eighth place. */
static void run_corpus(struct run *run)
{
	FILE *file = fopen(SIM_SEEDS, "r");
	char line[200];

	assert_non_null(file);
	while (fgets(line, sizeof(line), file)) {
		unsigned long long seed;

		if (sscanf(line, "%llu", &seed) == 1)
			run_chain(run, seed, true);
	}
	(void)fclose(file);
}

static uint64_t points_wanted(void)
{
	const char *points = getenv("SIM_POINTS"), *full = getenv("KVFS_LONG");

	if (points)
		return strtoull(points, NULL, 10);
	return full && full[0] ? POINTS_LONG : POINTS_SHORT;
}

static void run_all(struct run *run)
{
	run->wanted = points_wanted();
	if (run->only.seed) {
		run->wanted = UINT64_MAX;
		run_chain(run, run->only.seed, false);
		return;
	}
	if (!BROKEN)
		run_corpus(run);
	for (uint64_t seed = 1; run->points < run->wanted && !(BROKEN && run->failed); seed++)
		run_chain(run, seed, false);
}

static struct run all;

/* No cut shows a violation; in the broken build one does. */
static void test_sim__cuts(void **state)
{
	(void)state;
	setup(&all);
	run_all(&all);
	teardown(&all);
	printf("%llu cuts, %u bad, %llu faults struck;", (unsigned long long)all.points, all.failed,
		(unsigned long long)all.struck);
	for (unsigned i = 0; i < _WORK_KIND_MAX; i++)
		printf(" %s %llu", work_name(i), (unsigned long long)all.by_kind[i]);
	printf("\n");
	if (BROKEN)
		assert_true(all.failed > 0);
	else
		assert_int_equal(all.failed, 0);
}

/* A head page of the index that cannot be written once: the index goes on without a remount. */
static void test_sim__index_head(void **state)
{
	static struct run one;
	char error[300] = "";

	(void)state;
	setup(&one);
	sim_load(one.sim, &one.formatted);
	assert_int_equal(mount_store(&one, error, sizeof(error)), 0);
	uint64_t ino = unit_put(&one.unit, "a", 5000, 1);
	assert_int_equal(kv_core_sync(one.unit.core), 0);
	sim_record(one.sim, 1);
	one.sim->faults[SIM_FAULT_INDEX_HEAD].after = 0;
	one.sim->faults[SIM_FAULT_INDEX_HEAD].count = 1;
	unit_unlink(&one.unit, "a");
	ino = unit_put(&one.unit, "a", 5000, 3);
	for (unsigned i = 0; i < 2000 && one.sim->struck == 0; i++) {
		(void)kv_core_sync(one.unit.core);
		(void)usleep(1000);
	}
	assert_int_equal(one.sim->struck, 1);
	for (unsigned i = 0; i < 10 && kv_core_sync(one.unit.core) < 0; i++)
		(void)usleep(1000);
	assert_int_equal(unit_lookup(&one.unit, "a"), ino);
	uint64_t other = unit_put(&one.unit, "b", 5000, 2);
	assert_int_equal(kv_core_sync(one.unit.core), 0);
	umount_store(&one);
	assert_int_equal(mount_store(&one, error, sizeof(error)), 0);
	unit_expect_file(&one.unit, ino, 5000, 3);
	unit_expect_file(&one.unit, other, 5000, 2);
	umount_store(&one);
	teardown(&one);
}

/* What to run again. An assertion may have ended the test anywhere: then it says where. */
static void print_failures(void)
{
	if (all.failed == 0 && all.seed)
		(void)fprintf(stderr,
			"test_sim %llu %u (%s, behind place %zu): an assertion failed, "
			"see ERROR\n",
			(unsigned long long)all.seed, all.life, work_name(all.kind), all.place);
	for (unsigned i = 0; i < FAILURES_SHOWN && all.failures[i][0]; i++)
		(void)fprintf(stderr, "%s\n", all.failures[i]);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sim__index_head),
		cmocka_unit_test(test_sim__cuts),
	};

	all.only = (struct only){0, -1, -1};
	if (argc > 1)
		all.only.seed = strtoull(argv[1], NULL, 10);
	if (argc > 2)
		all.only.life = strtol(argv[2], NULL, 10);
	if (argc > 3)
		all.only.place = strtol(argv[3], NULL, 10);
	int failed = cmocka_run_group_tests(tests, NULL, NULL);

	if (failed)
		print_failures();
	return failed;
}
