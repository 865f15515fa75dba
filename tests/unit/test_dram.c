/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The DRAM tier: budget, objects and their bytes, on a tmpfs and on memfds.
 *
 * Every test of objects runs twice: the state says whether on memfds. Without CAP_SYS_ADMIN the
 * first round falls back to memfds by itself, which is then what it tests.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include "fs/base.h"
#include "fs/dram.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)
#define BUDGET (64 * MIB)

static struct kv_dram *make_dram(bool force_memfd)
{
	const struct kv_dram_options options = {
		.budget_bytes = BUDGET,
		.force_memfd = force_memfd,
	};
	struct kv_dram *dram = NULL;
	char error[256] = "";

	assert_int_equal(kv_dram_new(&options, &dram, error, sizeof(error)), 0);
	assert_string_equal(error, "");
	return dram;
}

static int setup_tmpfs(void **state)
{
	*state = make_dram(false);
	return 0;
}

static int setup_memfd(void **state)
{
	*state = make_dram(true);
	return 0;
}

static int teardown(void **state)
{
	*state = kv_dram_free(*state);
	return 0;
}

static struct kv_dram_usage usage_of(struct kv_dram *dram)
{
	struct kv_dram_usage usage;

	kv_dram_usage(dram, &usage);
	return usage;
}

/* OBJECT occupies BYTES of memory. On memfds the system's own setting may round up to huge pages.
 */
static void assert_allocated(struct kv_dram *dram, struct kv_object *object, uint64_t bytes)
{
	int fd = kv_object_get(object);
	struct stat st;

	assert_true(fd >= 0);
	assert_int_equal(fstat(fd, &st), 0);
	kv_object_put(object);
	if (usage_of(dram).tmpfs)
		assert_int_equal((uint64_t)st.st_blocks * 512, bytes);
	else
		assert_true((uint64_t)st.st_blocks * 512 >= bytes);
}

/* A budget that cannot hold anything is refused with the option's name. */
static void test_dram__refuses_tiny_budget(void **state)
{
	const struct kv_dram_options options = {.budget_bytes = KV_DRAM_MIN - 1};
	struct kv_dram *dram = NULL;
	char error[256] = "";

	(void)state;
	assert_int_equal(kv_dram_new(&options, &dram, error, sizeof(error)), -EINVAL);
	assert_non_null(strstr(error, "dram=SIZE"));
	assert_null(dram);
	assert_null(kv_dram_free(NULL));
}

/* The usage says which memory is in use: memfds when they are asked for, never huge pages then. */
static void test_dram__says_its_mode(void **state)
{
	struct kv_dram_usage usage = usage_of(*state);

	assert_int_equal(usage.budget, BUDGET);
	assert_int_equal(usage.charged, 0);
	assert_int_equal(usage.zombie, 0);
	assert_int_equal(usage.objects, 0);
	if (!usage.tmpfs)
		assert_false(usage.huge);
}

static void test_dram__memfd_mode(void **state)
{
	struct kv_dram_usage usage = usage_of(*state);

	assert_false(usage.tmpfs);
	assert_false(usage.huge);
}

/* What is written is read back, at any offset; behind the end there are zeros. */
static void test_dram__reads_what_was_written(void **state)
{
	static unsigned char data[3 * 65536 + 17], back[sizeof(data) + 100];
	struct kv_object *object;
	uint64_t seed = 1;

	unit_random_fill(&seed, data, sizeof(data));
	assert_int_equal(kv_object_new(*state, 0x10, 1, &object), 0);
	assert_int_equal(usage_of(*state).objects, 1);
	assert_int_equal(kv_object_write(object, data, sizeof(data), 4099), 0);
	memset(back, 0xaa, sizeof(back));
	assert_int_equal(kv_object_read(object, back, sizeof(back), 4099), 0);
	assert_memory_equal(back, data, sizeof(data));
	assert_true(unit_is_zero(back + sizeof(data), 100));
	memset(back, 0xaa, 4099);
	assert_int_equal(kv_object_read(object, back, 4099, 0), 0);
	assert_true(unit_is_zero(back, 4099));
	memset(back, 0xaa, 100);
	assert_int_equal(kv_object_read(object, back, 100, 100 * MIB), 0);
	assert_true(unit_is_zero(back, 100));
	assert_null(kv_object_free(object));
	assert_int_equal(usage_of(*state).objects, 0);
}

/* Resizing cuts, and what grows again is zero. */
static void test_dram__resize_cuts(void **state)
{
	unsigned char data[10000], back[10000];
	struct kv_object *object;

	memset(data, 0x5a, sizeof(data));
	assert_int_equal(kv_object_new(*state, 1, 1, &object), 0);
	assert_int_equal(kv_object_write(object, data, sizeof(data), 0), 0);
	assert_int_equal(kv_object_resize(object, 5000), 0);
	assert_int_equal(kv_object_resize(object, 10000), 0);
	assert_int_equal(kv_object_read(object, back, sizeof(back), 0), 0);
	assert_memory_equal(back, data, 5000);
	assert_true(unit_is_zero(back + 5000, 5000));
	assert_int_equal(kv_object_resize(object, UINT64_MAX), -EFBIG);
	(void)kv_object_free(object);
}

/* Allocating takes the pages, not the size; new pages are zero, old bytes stay. */
static void test_dram__allocate_keeps_size_and_bytes(void **state)
{
	unsigned char data[8192], back[8192];
	struct kv_object *object;
	struct stat st;
	int fd;

	memset(data, 0x77, sizeof(data));
	assert_int_equal(kv_object_new(*state, 1, 1, &object), 0);
	assert_int_equal(kv_object_write(object, data, 4096, 0), 0);
	assert_int_equal(kv_object_allocate(object, 0, MIB), 0);
	assert_int_equal(kv_object_allocate(object, 0, 0), 0);
	assert_int_equal(kv_object_allocate(object, UINT64_MAX - 5, 10), -EFBIG);
	fd = kv_object_get(object);
	assert_true(fd >= 0);
	assert_int_equal(fstat(fd, &st), 0);
	kv_object_put(object);
	assert_int_equal(st.st_size, 4096);
	assert_allocated(*state, object, MIB);
	assert_int_equal(kv_object_resize(object, 8192), 0);
	assert_int_equal(kv_object_read(object, back, sizeof(back), 0), 0);
	assert_memory_equal(back, data, 4096);
	assert_true(unit_is_zero(back + 4096, 4096));
	(void)kv_object_free(object);
}

/* A small object costs its blocks, a big one exactly its size: 2 MiB pages never round up. */
static void test_dram__objects_cost_their_size(void **state)
{
	static const uint64_t sizes[] = {4096, 65536, 2 * MIB, 3 * MIB, 4 * MIB + 4096};

	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct kv_object *object;

		assert_int_equal(kv_object_new(*state, 1, i, &object), 0);
		assert_int_equal(kv_object_resize(object, sizes[i]), 0);
		assert_int_equal(kv_object_allocate(object, 0, sizes[i]), 0);
		assert_allocated(*state, object, sizes[i]);
		(void)kv_object_free(object);
	}
}

/* Kilobytes that OBJECT's mapping has in huge pages, as the kernel counts them. */
static uint64_t huge_kib(struct kv_object *object, size_t length)
{
	char line[256], range[64];
	unsigned long long kib = 0;
	bool inside = false;
	void *memory = NULL;
	FILE *smaps;

	assert_int_equal(kv_object_map(object, 0, length, &memory), 0);
	for (size_t i = 0; i < length; i += 4096)
		((volatile char *)memory)[i] = 1;
	smaps = fopen("/proc/self/smaps", "re");
	assert_non_null(smaps);
	(void)snprintf(range, sizeof(range), "%lx-", (unsigned long)memory);
	while (fgets(line, sizeof(line), smaps)) {
		if (strncmp(line, range, strlen(range)) == 0)
			inside = true;
		if (inside && sscanf(line, "ShmemPmdMapped: %llu kB", &kib) == 1)
			break;
	}
	(void)fclose(smaps);
	kv_object_unmap(memory, length);
	return kib;
}

/* A big allocation is huge pages, mapped as such, where the kernel gives them to this mount. */
static void test_dram__big_objects_get_huge_pages(void **state)
{
	struct kv_object *object;

	if (!usage_of(*state).huge) {
		print_message("no huge pages here\n");
		skip();
	}
	assert_int_equal(kv_object_new(*state, 1, 1, &object), 0);
	assert_int_equal(kv_object_resize(object, 16 * MIB), 0);
	assert_int_equal(kv_object_allocate(object, 0, 16 * MIB), 0);
	/* Fragmented memory may deny some, not all, of them. */
	assert_true(huge_kib(object, 16 * MIB) >= 2048);
	(void)kv_object_free(object);
}

/* Punching gives whole blocks back and leaves zeros. */
static void test_dram__punch_frees(void **state)
{
	static unsigned char data[MIB], back[MIB];
	struct kv_object *object;
	uint64_t seed = 5;

	unit_random_fill(&seed, data, sizeof(data));
	assert_int_equal(kv_object_new(*state, 1, 1, &object), 0);
	assert_int_equal(kv_object_write(object, data, sizeof(data), 0), 0);
	assert_int_equal(kv_object_punch(object, 65536, 131072), 0);
	assert_allocated(*state, object, MIB - 131072);
	assert_int_equal(kv_object_read(object, back, sizeof(back), 0), 0);
	assert_memory_equal(back, data, 65536);
	assert_true(unit_is_zero(back + 65536, 131072));
	assert_memory_equal(back + 196608, data + 196608, MIB - 196608);
	(void)kv_object_free(object);
}

/* Copies are byte for byte, also at odd offsets, and holes of the source arrive as zeros. */
static void test_dram__copy(void **state)
{
	static unsigned char data[MIB], back[MIB + 300000];
	struct kv_object *from, *to;
	uint64_t seed = 9;

	unit_random_fill(&seed, data, sizeof(data));
	assert_int_equal(kv_object_new(*state, 1, 1, &from), 0);
	assert_int_equal(kv_object_new(*state, 1, 2, &to), 0);
	assert_int_equal(kv_object_write(from, data, sizeof(data), 0), 0);
	assert_int_equal(kv_object_punch(from, 8192, 8192), 0);
	memset(data + 8192, 0, 8192);
	memset(back, 0xff, sizeof(back));
	assert_int_equal(kv_object_write(to, back, sizeof(back), 0), 0);
	assert_int_equal(kv_object_copy(to, 777, from, 0, MIB), 0);
	assert_int_equal(kv_object_copy(to, 0, from, 0, 0), 0);
	assert_int_equal(kv_object_read(to, back, sizeof(back), 0), 0);
	assert_int_equal(back[776], 0xff);
	assert_memory_equal(back + 777, data, MIB);
	assert_int_equal(back[777 + MIB], 0xff);
	/* Behind the end of the source there are zeros. */
	assert_int_equal(kv_object_copy(to, 0, from, MIB, 4096), 0);
	assert_int_equal(kv_object_read(to, back, 4097, 0), 0);
	assert_true(unit_is_zero(back, 4096));
	assert_memory_equal(back + 4096, data + 4096 - 777, 1);
	(void)kv_object_free(from);
	(void)kv_object_free(to);
}

/* A mapping is the object's own memory, both ways. */
static void test_dram__map_is_shared(void **state)
{
	struct kv_object *object;
	unsigned char byte = 0;
	void *memory;

	assert_int_equal(kv_object_new(*state, 1, 1, &object), 0);
	assert_int_equal(kv_object_resize(object, 3 * MIB), 0);
	assert_int_equal(kv_object_allocate(object, 0, 3 * MIB), 0);
	assert_int_equal(kv_object_map(object, MIB, MIB, &memory), 0);
	((unsigned char *)memory)[5] = 0x42;
	assert_int_equal(kv_object_read(object, &byte, 1, MIB + 5), 0);
	assert_int_equal(byte, 0x42);
	byte = 0x43;
	assert_int_equal(kv_object_write(object, &byte, 1, 2 * MIB - 1), 0);
	assert_int_equal(((unsigned char *)memory)[MIB - 1], 0x43);
	kv_object_unmap(memory, MIB);
	(void)kv_object_free(object);
}

/* A name that is in use cannot be made again on the tmpfs; after the object is gone it can. */
static void test_dram__names_are_unique(void **state)
{
	struct kv_object *a, *b, *c = NULL;

	if (!usage_of(*state).tmpfs)
		skip();
	assert_int_equal(kv_object_new(*state, UINT64_MAX, UINT64_MAX, &a), 0);
	assert_int_equal(kv_object_new(*state, UINT64_MAX, UINT64_MAX - 1, &b), 0);
	assert_int_equal(kv_object_new(*state, UINT64_MAX, UINT64_MAX, &c), -EEXIST);
	assert_null(c);
	assert_int_equal(usage_of(*state).objects, 2);
	(void)kv_object_free(a);
	assert_int_equal(kv_object_new(*state, UINT64_MAX, UINT64_MAX, &c), 0);
	(void)kv_object_free(b);
	(void)kv_object_free(c);
}

static unsigned open_descriptors(void)
{
	unsigned count = 0;

	for (int fd = 0; fd < 8192; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

/* Idle objects keep no descriptor beyond the cache, and are opened again with their bytes. */
static void test_dram__idle_objects_need_no_descriptor(void **state)
{
	enum { COUNT = 1500 };
	static struct kv_object *objects[COUNT];
	unsigned before = open_descriptors();

	if (!usage_of(*state).tmpfs)
		skip();
	for (uint32_t i = 0; i < COUNT; i++) {
		assert_int_equal(kv_object_new(*state, i, 1, &objects[i]), 0);
		assert_int_equal(kv_object_write(objects[i], &i, sizeof(i), 0), 0);
	}
	assert_true(open_descriptors() - before <= 1024);
	for (uint32_t i = 0; i < COUNT; i++) {
		uint32_t back = 0;

		assert_int_equal(kv_object_read(objects[i], &back, sizeof(back), 0), 0);
		assert_int_equal(back, i);
	}
	for (uint32_t i = 0; i < COUNT; i++)
		(void)kv_object_free(objects[i]);
	assert_int_equal(open_descriptors(), before);
}

/* Borrowing twice gives one descriptor, which outlives the first return. */
static void test_dram__descriptors_are_counted(void **state)
{
	struct kv_object *object;
	int a, b;

	assert_int_equal(kv_object_new(*state, 1, 1, &object), 0);
	a = kv_object_get(object);
	b = kv_object_get(object);
	assert_true(a >= 0);
	assert_int_equal(a, b);
	assert_int_equal(fcntl(a, F_GETFD), FD_CLOEXEC);
	assert_int_equal(fcntl(a, F_GETFL) & O_ACCMODE, O_RDWR);
	kv_object_put(object);
	assert_true(fcntl(a, F_GETFD) >= 0);
	kv_object_put(object);
	(void)kv_object_free(object);
}

/* When descriptors run out, idle ones make way for what is in use. */
static void test_dram__survives_descriptor_shortage(void **state)
{
	struct kv_object *objects[40];
	struct rlimit old, small;
	int holes[64], held = 0;

	if (!usage_of(*state).tmpfs)
		skip();
	for (uint32_t i = 0; i < 40; i++)
		assert_int_equal(kv_object_new(*state, i, 7, &objects[i]), 0);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	small = old;
	small.rlim_cur = 64;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &small), 0);
	while (held < 64 && (holes[held] = dup(STDIN_FILENO)) >= 0)
		held++;
	assert_int_equal(errno, EMFILE);
	for (uint32_t i = 0; i < 40; i++) {
		struct kv_object *more;

		assert_int_equal(kv_object_write(objects[i], &i, sizeof(i), 0), 0);
		assert_int_equal(kv_object_new(*state, i, 8, &more), 0);
		(void)kv_object_free(more);
	}
	while (held > 0)
		(void)close(holes[--held]);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	for (uint32_t i = 0; i < 40; i++)
		(void)kv_object_free(objects[i]);
}

/* The tmpfs cannot take the machine: beyond twice its normal size it is full. */
static void test_dram__tmpfs_is_capped(void **state)
{
	struct kv_object *object;

	if (!usage_of(*state).tmpfs)
		skip();
	assert_int_equal(kv_object_new(*state, 1, 1, &object), 0);
	assert_int_equal(
		kv_object_allocate(object, 0, 2 * (BUDGET + BUDGET / 8 + 65 * MIB)), -ENOSPC);
	assert_int_equal(kv_object_allocate(object, 0, BUDGET), 0);
	(void)kv_object_free(object);
}

static uint64_t tmpfs_size(struct kv_object *object)
{
	int fd = kv_object_get(object);
	struct statvfs st;

	assert_true(fd >= 0);
	assert_int_equal(fstatvfs(fd, &st), 0);
	kv_object_put(object);
	return (uint64_t)st.f_blocks * st.f_frsize;
}

/* Blocks spread over a large object take more pages than was charged: the mount grows, and shrinks
 * again. */
static void test_dram__sparse_objects_find_room(void **state)
{
	static const char data[KV_BLOCK_SIZE] = "x";
	struct kv_dram *dram = *state;
	struct kv_object *object, *other;
	uint64_t normal;

	if (!usage_of(dram).tmpfs)
		skip();
	assert_int_equal(kv_dram_charge(dram, MIB, 0), 0);
	assert_int_equal(kv_object_new(dram, 1, 1, &object), 0);
	assert_int_equal(kv_object_new(dram, 2, 1, &other), 0);
	normal = tmpfs_size(object);
	assert_int_equal(kv_object_resize(object, 200 * MIB), 0);
	for (uint64_t at = 0; at < 150 * MIB; at += 2 * MIB)
		assert_int_equal(kv_object_allocate(object, at, KV_BLOCK_SIZE), 0);
	for (uint64_t at = 150 * MIB; at < 200 * MIB; at += 2 * MIB)
		assert_int_equal(kv_object_write(object, data, sizeof(data), at), 0);
	if (usage_of(dram).huge)
		assert_true(tmpfs_size(object) > normal);
	(void)kv_object_free(object);
	kv_dram_uncharge(dram, MIB);
	assert_int_equal(tmpfs_size(other), normal);
	(void)kv_object_free(other);
}

/* Small pages are asked for one by one, inside the size; what was there stays, and a full mount is
 * ENOSPC. */
static void test_dram__small_pages(void **state)
{
	struct kv_dram *dram = *state;
	struct kv_object *object;
	char byte = 'x', found;

	assert_int_equal(kv_object_new(dram, 1, 1, &object), 0);
	assert_int_equal(kv_object_resize(object, 1000 * MIB), 0);
	for (uint64_t i = 0; i < 40; i++)
		assert_int_equal(
			kv_object_allocate_small(object, i * 21 * MIB, 2 * KV_BLOCK_SIZE), 0);
	assert_allocated(dram, object, 80ul * KV_BLOCK_SIZE);
	assert_int_equal(kv_object_write(object, &byte, 1, 21 * MIB + 5), 0);
	assert_int_equal(kv_object_allocate_small(object, 21 * MIB, 2 * KV_BLOCK_SIZE), 0);
	assert_int_equal(kv_object_allocate_small(object, 21 * MIB, 0), 0);
	assert_allocated(dram, object, 80ul * KV_BLOCK_SIZE);
	assert_int_equal(kv_object_read(object, &found, 1, 21 * MIB + 5), 0);
	assert_int_equal(found, byte);
	assert_int_equal(kv_object_read(object, &found, 1, 21 * MIB + 4), 0);
	assert_int_equal(found, 0);
	if (usage_of(dram).tmpfs)
		assert_int_equal(kv_object_allocate_small(object, 400 * MIB, 400 * MIB), -ENOSPC);
	(void)kv_object_free(object);
}

/* Charges add up to the budget and no further. */
static void test_dram__charges_are_bounded(void **state)
{
	struct kv_dram *dram = *state;

	assert_int_equal(kv_dram_charge(dram, BUDGET + 1, 0), -E2BIG);
	assert_int_equal(kv_dram_charge(dram, BUDGET - MIB, 0), 0);
	assert_int_equal(kv_dram_charge(dram, 2 * MIB, 0), -EAGAIN);
	assert_int_equal(kv_dram_charge(dram, 2 * MIB, 20), -EAGAIN);
	assert_int_equal(kv_dram_charge(dram, MIB, 0), 0);
	assert_int_equal(usage_of(dram).charged, BUDGET);
	assert_int_equal(kv_dram_charge(dram, 1, 0), -EAGAIN);
	kv_dram_uncharge(dram, BUDGET);
	assert_int_equal(usage_of(dram).charged, 0);
}

struct reclaimer {
	struct kv_dram *dram;
	uint64_t droppable;
	uint64_t asked; /* bytes asked for in the first call */
	unsigned calls;
};

/* Gives back a MiB at a time while there is some. Uses the tier, as a real reclaimer does. */
static uint64_t reclaim(void *arg, uint64_t bytes)
{
	struct reclaimer *reclaimer = arg;

	if (reclaimer->calls++ == 0)
		reclaimer->asked = bytes;
	if (reclaimer->droppable == 0)
		return 0;
	reclaimer->droppable -= MIB;
	kv_dram_uncharge(reclaimer->dram, MIB);
	return MIB;
}

/* A short budget asks the reclaimer for what is missing, until it is there or nothing more comes.
 */
static void test_dram__reclaims(void **state)
{
	struct reclaimer reclaimer = {.droppable = 10 * MIB};
	const struct kv_dram_options options = {
		.budget_bytes = BUDGET,
		.force_memfd = true,
		.reclaim = reclaim,
		.reclaim_arg = &reclaimer,
	};
	char error[256];

	(void)state;
	assert_int_equal(kv_dram_new(&options, &reclaimer.dram, error, sizeof(error)), 0);
	assert_int_equal(kv_dram_charge(reclaimer.dram, BUDGET, 0), 0);
	assert_int_equal(reclaimer.calls, 0);
	assert_int_equal(kv_dram_charge(reclaimer.dram, 4 * MIB, 0), 0);
	assert_int_equal(reclaimer.asked, 4 * MIB);
	assert_int_equal(reclaimer.calls, 4);
	assert_int_equal(kv_dram_charge(reclaimer.dram, 7 * MIB, 0), -EAGAIN);
	assert_int_equal(reclaimer.droppable, 0);
	/* What was reclaimed in vain is there for others. */
	assert_int_equal(kv_dram_charge(reclaimer.dram, 6 * MIB, 0), 0);
	kv_dram_uncharge(reclaimer.dram, BUDGET);
	(void)kv_dram_free(reclaimer.dram);
}

static void *give_back_later(void *arg)
{
	for (int i = 0; i < 16; i++) {
		(void)usleep(2000);
		kv_dram_uncharge(arg, MIB);
	}
	return NULL;
}

/* A charge that does not fit waits for others to give back. */
static void test_dram__waits_for_uncharge(void **state)
{
	struct kv_dram *dram = *state;
	pthread_t thread;

	assert_int_equal(kv_dram_charge(dram, BUDGET, 0), 0);
	assert_int_equal(pthread_create(&thread, NULL, give_back_later, dram), 0);
	assert_int_equal(kv_dram_charge(dram, 16 * MIB, 60000), 0);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_equal(usage_of(dram).charged, BUDGET);
	kv_dram_uncharge(dram, BUDGET);
}

enum { THREADS = 4, ROUNDS = 300 };

static void *charge_and_use(void *arg)
{
	struct kv_dram *dram = arg;
	uint64_t seed = (uint64_t)(uintptr_t)&seed | 1;

	for (uint64_t i = 0; i < ROUNDS; i++) {
		uint64_t bytes = (1 + unit_random(&seed) % 30) * MIB;
		struct kv_object *object;

		if (kv_dram_charge(dram, bytes, 60000) < 0)
			return arg;
		if (kv_object_new(dram, (uint64_t)(uintptr_t)&seed, i, &object) < 0)
			return arg;
		if (kv_object_allocate(object, 0, KV_BLOCK_SIZE) < 0)
			return arg;
		(void)kv_object_free(object);
		kv_dram_uncharge(dram, bytes);
	}
	return NULL;
}

/* Threads that compete for the budget all get through, and it comes out even. */
static void test_dram__threads_share_the_budget(void **state)
{
	pthread_t threads[THREADS];

	for (int i = 0; i < THREADS; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, charge_and_use, *state), 0);
	for (int i = 0; i < THREADS; i++) {
		void *failed;

		assert_int_equal(pthread_join(threads[i], &failed), 0);
		assert_null(failed);
	}
	assert_int_equal(usage_of(*state).charged, 0);
	assert_int_equal(usage_of(*state).objects, 0);
}

/* A child that maps OBJECT, says so through READY, and holds on until HOLD closes. */
static pid_t fork_mapper(struct kv_object *object, size_t length, int pipe_ends[2])
{
	int ready[2], hold[2];
	pid_t child;
	char byte;

	assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
	assert_int_equal(pipe2(hold, O_CLOEXEC), 0);
	child = fork();
	assert_true(child >= 0);
	if (child == 0) {
		void *memory = NULL;
		bool mapped = kv_object_map(object, 0, length, &memory) == 0;

		/* Of the object, only the mapping may be left. */
		for (int fd = 3; fd < 1024; fd++)
			if (fd != ready[1] && fd != hold[0])
				(void)close(fd);
		mapped = mapped && write(ready[1], "x", 1) == 1 && read(hold[0], &byte, 1) == 0;
		_exit(mapped && ((char *)memory)[length - 1] == 7 ? 0 : 1);
	}
	(void)close(ready[1]);
	(void)close(hold[0]);
	assert_int_equal(read(ready[0], &byte, 1), 1);
	pipe_ends[0] = ready[0];
	pipe_ends[1] = hold[1];
	return child;
}

/* Pages that a client's mapping keeps after the object was freed are seen, until the mapping goes.
 */
static void test_dram__sees_zombies(void **state)
{
	struct kv_dram *dram = *state;
	struct kv_object *object;
	int ends[2], status;
	pid_t child;
	char seven = 7;

	if (!usage_of(dram).tmpfs)
		skip();
	assert_int_equal(kv_dram_charge(dram, 8 * MIB, 0), 0);
	assert_int_equal(kv_object_new(dram, 1, 1, &object), 0);
	assert_int_equal(kv_object_resize(object, 8 * MIB), 0);
	assert_int_equal(kv_object_allocate(object, 0, 8 * MIB), 0);
	assert_int_equal(kv_object_write(object, &seven, 1, 8 * MIB - 1), 0);
	assert_int_equal(usage_of(dram).zombie, 0);
	child = fork_mapper(object, 8 * MIB, ends);
	(void)kv_object_free(object);
	kv_dram_uncharge(dram, 8 * MIB);
	assert_int_equal(usage_of(dram).charged, 0);
	assert_int_equal(usage_of(dram).zombie, 8 * MIB);
	(void)close(ends[1]);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	(void)close(ends[0]);
	assert_int_equal(usage_of(dram).zombie, 0);
}

/* Zombies beyond the slack of the mount count against the budget, so that nobody meets ENOSPC. */
static void test_dram__zombies_shrink_the_budget(void **state)
{
	const uint64_t size = BUDGET + 40 * MIB; /* the slack is 72 MiB */
	struct kv_dram *dram = *state;
	struct kv_object *object;
	int ends[2], status;
	pid_t child;
	char seven = 7;

	if (!usage_of(dram).tmpfs)
		skip();
	assert_int_equal(kv_object_new(dram, 1, 1, &object), 0);
	assert_int_equal(kv_object_resize(object, size), 0);
	assert_int_equal(kv_object_allocate(object, 0, size), 0);
	assert_int_equal(kv_object_write(object, &seven, 1, size - 1), 0);
	child = fork_mapper(object, size, ends);
	(void)kv_object_free(object);
	assert_int_equal(kv_dram_charge(dram, 33 * MIB, 0), -EAGAIN);
	assert_int_equal(kv_dram_charge(dram, 32 * MIB, 0), 0);
	kv_dram_uncharge(dram, 32 * MIB);
	(void)close(ends[1]);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	(void)close(ends[0]);
	/* The zombies went without a signal; a waiter notices all the same. */
	assert_int_equal(kv_dram_charge(dram, BUDGET, 60000), 0);
	kv_dram_uncharge(dram, BUDGET);
}

#define BOTH(name)                                                                                 \
	{#name " (tmpfs)", name, setup_tmpfs, teardown, NULL},                                     \
	{                                                                                          \
#name " (memfd)", name, setup_memfd, teardown, NULL                                \
	}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_dram__refuses_tiny_budget),
		cmocka_unit_test_setup_teardown(test_dram__memfd_mode, setup_memfd, teardown),
		BOTH(test_dram__says_its_mode),
		BOTH(test_dram__reads_what_was_written),
		BOTH(test_dram__resize_cuts),
		BOTH(test_dram__allocate_keeps_size_and_bytes),
		BOTH(test_dram__objects_cost_their_size),
		cmocka_unit_test_setup_teardown(
			test_dram__big_objects_get_huge_pages, setup_tmpfs, teardown),
		BOTH(test_dram__punch_frees),
		BOTH(test_dram__copy),
		BOTH(test_dram__map_is_shared),
		cmocka_unit_test_setup_teardown(test_dram__names_are_unique, setup_tmpfs, teardown),
		cmocka_unit_test_setup_teardown(
			test_dram__idle_objects_need_no_descriptor, setup_tmpfs, teardown),
		BOTH(test_dram__descriptors_are_counted),
		cmocka_unit_test_setup_teardown(
			test_dram__survives_descriptor_shortage, setup_tmpfs, teardown),
		cmocka_unit_test_setup_teardown(test_dram__tmpfs_is_capped, setup_tmpfs, teardown),
		cmocka_unit_test_setup_teardown(
			test_dram__sparse_objects_find_room, setup_tmpfs, teardown),
		BOTH(test_dram__small_pages),
		BOTH(test_dram__charges_are_bounded),
		cmocka_unit_test(test_dram__reclaims),
		BOTH(test_dram__waits_for_uncharge),
		BOTH(test_dram__threads_share_the_budget),
		cmocka_unit_test_setup_teardown(test_dram__sees_zombies, setup_tmpfs, teardown),
		cmocka_unit_test_setup_teardown(
			test_dram__zombies_shrink_the_budget, setup_tmpfs, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
