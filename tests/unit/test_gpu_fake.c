/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake driver itself: that it refuses what the real one refuses, moves bytes no sooner than
 * their time has come, models the link as it says, and reports what was left. Tests that lean on it
 * are worth as much as this.
 */
#include <sys/mman.h>

#include "fs/base.h"
#include "tests/unit/unit_gpu.h"

#define NS_A_SECOND 1e9
#define LINK 55.6e9

static const struct kvg_cuda_driver *cu;
static const struct kvg_cu_access read_write = {
	.location = {.type = KVG_CU_LOCATION_DEVICE, .id = 0}, .flags = KVG_CU_ACCESS_READ_WRITE};
static const struct kvg_cu_allocation shared = {.type = KVG_CU_ALLOCATION_PINNED,
	.handle_types = KVG_CU_HANDLE_POSIX_FD,
	.location = {.type = KVG_CU_LOCATION_DEVICE, .id = 0}};

/* Starts anew with the environment as it is, and makes a context current. */
static void start(void)
{
	kvg_cu_context context;
	char reason[256] = "";

	fakecu_reset();
	assert_int_equal(kvg_cuda_load(&cu, reason, sizeof(reason)), 0);
	assert_int_equal(cu->primary_retain(&context, 0), 0);
	assert_int_equal(cu->context_push(context), 0);
}

static void start_with(const char *name, const char *value)
{
	assert_int_equal(setenv(name, value, 1), 0);
	start();
}

static int setup(void **state)
{
	(void)unit_gpu_setup(state);
	start();
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fakecu_reset();
	return 0;
}

/* SIZE bytes, mapped for reading and writing; the handle is given back. */
static kvg_cu_ptr device_memory(uint64_t size)
{
	kvg_cu_handle handle;
	kvg_cu_ptr at;

	assert_int_equal(cu->create(&handle, size, &shared, 0), 0);
	assert_int_equal(cu->reserve(&at, size, 0, 0, 0), 0);
	assert_int_equal(cu->map(at, size, 0, handle, 0), 0);
	assert_int_equal(cu->set_access(at, size, &read_write, 1), 0);
	assert_int_equal(cu->release(handle), 0);
	return at;
}

static void *host_memory(uint64_t size, bool pinned)
{
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	assert_true(memory != MAP_FAILED);
	if (pinned)
		assert_int_equal(cu->host_register(memory, size, KVG_CU_REGISTER_PORTABLE), 0);
	return memory;
}

/* ---- What is refused ---- */

static void test_gpu_fake__memory_calls_are_strict(void **state)
{
	struct kvg_cu_allocation bad = shared;
	kvg_cu_handle handle, secret;
	kvg_cu_ptr at, none;
	int fd;

	assert_int_equal(cu->create(&handle, GRANULE - 1, &shared, 0), KVG_CU_INVALID_VALUE);
	bad.location.id = 1;
	assert_int_equal(cu->create(&handle, GRANULE, &bad, 0), KVG_CU_INVALID_VALUE);
	bad = shared;
	bad.handle_types = KVG_CU_HANDLE_NONE;
	assert_int_equal(cu->create(&secret, GRANULE, &bad, 0), 0);
	assert_int_equal(
		cu->export_handle(&fd, secret, KVG_CU_HANDLE_POSIX_FD, 0), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->release(secret), 0);
	assert_int_equal(cu->release(secret), KVG_CU_INVALID_VALUE);

	assert_int_equal(cu->create(&handle, 2 * GRANULE, &shared, 0), 0);
	assert_int_equal(cu->reserve(&at, 4 * GRANULE, 0, 0, 0), 0);
	assert_int_equal(at % GRANULE, 0);
	assert_int_equal(cu->reserve(&none, 100, 0, 0, 0), KVG_CU_INVALID_VALUE);
	assert_int_equal(
		cu->map(at + 4 * GRANULE, 2 * GRANULE, 0, handle, 0), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->map(at, 4 * GRANULE, 0, handle, 0), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->map(at, 2 * GRANULE, GRANULE, handle, 0), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->map(at, 2 * GRANULE, 0, handle, 0), 0);
	assert_int_equal(cu->map(at + GRANULE, 2 * GRANULE, 0, handle, 0), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->set_access(at, 4 * GRANULE, &read_write, 1), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->unmap(at, GRANULE), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->unmap(at + GRANULE, GRANULE), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->unreserve(at, 4 * GRANULE), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->unmap(at, 2 * GRANULE), 0);
	assert_int_equal(cu->unreserve(at, 2 * GRANULE), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->unreserve(at, 4 * GRANULE), 0);
	assert_int_equal(cu->release(handle), 0);
}

static void test_gpu_fake__without_a_context(void **state)
{
	kvg_cu_context context;
	kvg_cu_stream stream;
	size_t a, b;

	assert_int_equal(cu->context_pop(&context), 0);
	assert_int_equal(cu->stream_create(&stream, 0), KVG_CU_INVALID_CONTEXT);
	assert_int_equal(cu->memory_info(&a, &b), KVG_CU_INVALID_CONTEXT);
	assert_int_equal(cu->context_pop(&context), KVG_CU_INVALID_CONTEXT);
	assert_int_equal(cu->context_push(NULL), KVG_CU_INVALID_CONTEXT);
}

static void test_gpu_fake__handles_that_are_gone(void **state)
{
	kvg_cu_stream stream;
	kvg_cu_event event;

	assert_int_equal(cu->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING), 0);
	assert_int_equal(cu->event_create(&event, KVG_CU_EVENT_DISABLE_TIMING), 0);
	assert_int_equal(cu->stream_destroy(stream), 0);
	assert_int_equal(cu->stream_destroy(stream), KVG_CU_INVALID_HANDLE);
	assert_int_equal(cu->stream_sync(stream), KVG_CU_INVALID_HANDLE);
	assert_int_equal(cu->event_record(event, stream), KVG_CU_INVALID_HANDLE);
	assert_int_equal(cu->event_destroy(event), 0);
	assert_int_equal(cu->event_query(event), KVG_CU_INVALID_HANDLE);
}

/* A child of a process that has used the driver cannot use it. */
static void test_gpu_fake__after_a_fork(void **state)
{
	int status;
	pid_t child = fork();

	assert_true(child >= 0);
	if (child == 0) {
		int count;

		_exit(cu->device_count(&count) == KVG_CU_NOT_INITIALIZED &&
					cu->init(0) == KVG_CU_NOT_INITIALIZED
				? 0
				: 1);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
}

/* The CPU cannot touch device memory by its address. */
static void test_gpu_fake__addresses_are_the_device_s(void **state)
{
	kvg_cu_ptr at = device_memory(GRANULE);
	int ends[2];

	assert_int_equal(pipe(ends), 0);
	assert_int_equal(write(ends[1], (void *)(uintptr_t)at, 16), -1);
	assert_int_equal(errno, EFAULT);
	(void)close(ends[0]);
	(void)close(ends[1]);
}

/* Unless a test asks for it; then access is what the mapping's is. */
static void test_gpu_fake__cpu_access(void **state)
{
	const struct kvg_cu_access read_only = {
		.location = {.type = KVG_CU_LOCATION_DEVICE}, .flags = KVG_CU_ACCESS_READ};
	char word[8] = "";
	kvg_cu_ptr at;
	int ends[2];

	start_with("FAKECU_CPU", "1");
	at = device_memory(GRANULE);
	memcpy((void *)(uintptr_t)at, "by hand", 8);
	assert_int_equal(cu->set_access(at, GRANULE, &read_only, 1), 0);
	assert_string_equal((const char *)(uintptr_t)at, "by hand");
	assert_int_equal(pipe(ends), 0);
	assert_int_equal(write(ends[1], word, 8), 8);
	assert_int_equal(read(ends[0], (void *)(uintptr_t)at, 8), -1);
	assert_int_equal(errno, EFAULT);
	(void)close(ends[0]);
	(void)close(ends[1]);
}

/* ---- Host memory ---- */

static void test_gpu_fake__registration_is_strict(void **state)
{
	void *directory = NULL;
	char *memory = host_memory(4 * GRANULE, false);
	char *file_memory;
	int fd;

	assert_int_equal(cu->host_register(memory, 4 * GRANULE, 1), 0);
	assert_int_equal(
		cu->host_register(memory + GRANULE, GRANULE, 1), KVG_CU_ALREADY_REGISTERED);
	assert_int_equal(cu->host_unregister(memory + GRANULE), KVG_CU_NOT_REGISTERED);
	assert_int_equal(cu->host_unregister(memory), 0);
	assert_int_equal(munmap(memory + GRANULE, GRANULE), 0);
	assert_int_equal(cu->host_register(memory, 4 * GRANULE, 1), KVG_CU_INVALID_VALUE);
	assert_int_equal(cu->host_register(memory, UINT64_C(512) << 30, 1), KVG_CU_OUT_OF_MEMORY);

	/* A file's pages, mapped for writing, cannot be pinned. */
	assert_int_equal(unit_directory_setup(&directory), 0);
	fd = open(unit_path(&directory, "file"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_true(fd >= 0 && ftruncate(fd, 4096) == 0);
	file_memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_true(file_memory != MAP_FAILED);
	/* Only root can tell what file it is. */
	if (geteuid() == 0)
		assert_int_equal(cu->host_register(file_memory, 4096, 1), KVG_CU_INVALID_VALUE);
	(void)munmap(file_memory, 4096);
	(void)close(fd);
	assert_int_equal(unit_directory_teardown(&directory), 0);
	(void)munmap(memory, 4 * GRANULE);
}

/* ---- Time ---- */

static void copy_in(kvg_cu_ptr to, const void *from, uint64_t size, kvg_cu_stream stream)
{
	assert_int_equal(cu->copy_to_device(to, from, size, stream), 0);
}

/* The share of the link that COUNT copies of SIZE get over STREAMS streams. */
static double fraction(uint64_t size, unsigned count, unsigned streams)
{
	kvg_cu_stream stream[4];
	kvg_cu_ptr at = device_memory(kv_round_up(size, GRANULE));
	char *memory = host_memory(size, true);
	uint64_t start = fakecu_now();
	double seconds;

	for (unsigned i = 0; i < streams; i++)
		assert_int_equal(cu->stream_create(&stream[i], KVG_CU_STREAM_NON_BLOCKING), 0);
	for (unsigned i = 0; i < count; i++)
		copy_in(at, memory, size, stream[i % streams]);
	for (unsigned i = 0; i < streams; i++)
		assert_int_equal(cu->stream_sync(stream[i]), 0);
	seconds = (double)(fakecu_now() - start) / NS_A_SECOND;
	assert_int_equal(cu->host_unregister(memory), 0);
	(void)munmap(memory, size);
	return (double)size * count / seconds / LINK;
}

/* One stream pays the gap of 2 us with each copy, as S/(S + B*gap) has it; two hide it. */
static void test_gpu_fake__the_link(void **state)
{
	assert_true(fraction(8 * MIB, 16, 1) > 0.98 && fraction(8 * MIB, 16, 1) < 0.992);
	assert_true(fraction(MIB, 64, 1) > 0.89 && fraction(MIB, 64, 1) < 0.91);
	assert_true(fraction(8 * MIB, 16, 2) > 0.995);
	/* Small copies are bound by the calls, which more streams do not hide. */
	assert_true(fraction(32 << 10, 64, 4) < 0.3);
}

/* What is not registered is slower, and the call waits. */
static void test_gpu_fake__pageable_memory(void **state)
{
	kvg_cu_ptr at = device_memory(8 * MIB);
	char *memory = host_memory(8 * MIB, false);
	struct fakecu_traffic traffic;
	kvg_cu_stream stream;

	assert_int_equal(cu->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING), 0);
	copy_in(at, memory, 8 * MIB, stream);
	assert_int_equal(fakecu_next(), UINT64_MAX);
	assert_true((double)fakecu_now() >= 8.0 * MIB / 12e9 * NS_A_SECOND);
	fakecu_traffic(FAKECU_TO_DEVICE, &traffic);
	assert_int_equal(traffic.copies, 1);
	assert_int_equal(traffic.bytes, 8 * MIB);
	(void)munmap(memory, 8 * MIB);
}

/* Bytes move when the copy is done: a buffer that is used again too soon is seen. */
static void test_gpu_fake__copies_are_late(void **state)
{
	kvg_cu_ptr at = device_memory(GRANULE);
	char *memory = host_memory(GRANULE, true), *back = host_memory(GRANULE, true);
	kvg_cu_stream stream;

	assert_int_equal(cu->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING), 0);
	memcpy(memory, "first", 6);
	copy_in(at, memory, GRANULE, stream);
	memcpy(memory, "later", 6);
	assert_int_equal(cu->copy_to_host(back, at, GRANULE, stream), 0);
	assert_string_equal(back, "");
	assert_int_equal(cu->stream_sync(stream), 0);
	assert_string_equal(back, "later");
	assert_int_equal(cu->host_unregister(memory), 0);
	assert_int_equal(cu->host_unregister(back), 0);
	(void)munmap(memory, GRANULE);
	(void)munmap(back, GRANULE);
}

/* Or in the call, where a test is about the other mistake. */
static void test_gpu_fake__copies_can_be_early(void **state)
{
	char *memory, *back;
	kvg_cu_stream stream;
	kvg_cu_ptr at;

	start_with("FAKECU_COPY", "early");
	memory = host_memory(GRANULE, true);
	back = host_memory(GRANULE, true);
	at = device_memory(GRANULE);
	assert_int_equal(cu->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING), 0);
	memcpy(memory, "first", 6);
	copy_in(at, memory, GRANULE, stream);
	memcpy(memory, "later", 6);
	assert_int_equal(cu->copy_to_host(back, at, GRANULE, stream), 0);
	assert_string_equal(back, "first");
	(void)munmap(memory, GRANULE);
	(void)munmap(back, GRANULE);
}

/* With the clock in the test's hand nothing completes unless it moves. */
static void test_gpu_fake__manual_clock(void **state)
{
	char *memory = host_memory(8 * MIB, false);
	kvg_cu_stream stream;
	kvg_cu_event event;
	kvg_cu_ptr at;
	uint64_t due;

	start_with("FAKECU_CLOCK", "manual");
	assert_int_equal(cu->host_register(memory, 8 * MIB, 1), 0);
	at = device_memory(8 * MIB);
	assert_int_equal(cu->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING), 0);
	assert_int_equal(cu->event_create(&event, KVG_CU_EVENT_DISABLE_TIMING), 0);
	copy_in(at, memory, 8 * MIB, stream);
	assert_int_equal(cu->event_record(event, stream), 0);
	assert_int_equal(fakecu_now(), 0);
	due = fakecu_next();
	assert_int_equal(due, (uint64_t)(8.0 * MIB * NS_A_SECOND / LINK));
	for (int i = 0; i < 10; i++)
		assert_int_equal(cu->event_query(event), KVG_CU_NOT_READY);
	fakecu_advance(due - 1);
	assert_int_equal(cu->event_query(event), KVG_CU_NOT_READY);
	fakecu_advance(1);
	assert_int_equal(cu->event_query(event), 0);
	assert_int_equal(cu->host_unregister(memory), 0);
	(void)munmap(memory, 8 * MIB);
}

/* With the machine's clock a copy takes as long as the link says, and waiting is waiting. */
static void test_gpu_fake__real_clock(void **state)
{
	uint64_t size = 8 * MIB, before;
	kvg_cu_stream stream;
	kvg_cu_event event;
	kvg_cu_ptr at;
	char *memory;

	(void)setenv("FAKECU_BW", "1000000000", 1);
	start_with("FAKECU_CLOCK", "real");
	memory = host_memory(size, true);
	at = device_memory(size);
	assert_int_equal(cu->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING), 0);
	assert_int_equal(cu->event_create(&event, KVG_CU_EVENT_DISABLE_TIMING), 0);
	before = fakecu_now();
	copy_in(at, memory, size, stream);
	assert_int_equal(cu->event_record(event, stream), 0);
	assert_int_equal(cu->stream_sync(stream), 0);
	assert_true(fakecu_now() - before >= size);
	assert_int_equal(cu->event_query(event), 0);
	(void)unsetenv("FAKECU_BW");
	(void)munmap(memory, size);
}

/* Unmapped while a copy is under way: the device faults, and nothing goes on after that. */
static void test_gpu_fake__unmapped_too_soon(void **state)
{
	kvg_cu_ptr at = device_memory(GRANULE);
	char *memory = host_memory(GRANULE, true);
	kvg_cu_stream stream;
	kvg_cu_handle handle;

	assert_int_equal(cu->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING), 0);
	copy_in(at, memory, GRANULE, stream);
	assert_int_equal(cu->unmap(at, GRANULE), 0);
	assert_int_equal(cu->stream_sync(stream), KVG_CU_ILLEGAL_ADDRESS);
	assert_int_equal(cu->create(&handle, GRANULE, &shared, 0), KVG_CU_ILLEGAL_ADDRESS);
	(void)munmap(memory, GRANULE);
}

/* A batch names the copy that is wrong, and is none with the default stream. */
static void test_gpu_fake__batches(void **state)
{
	struct kvg_cu_copy_attributes attributes = {.source_order = KVG_CU_SOURCE_ORDER_STREAM};
	char *memory = host_memory(GRANULE, true);
	kvg_cu_ptr at = device_memory(GRANULE);
	kvg_cu_ptr to[3] = {at, at + GRANULE, at + 4096};
	kvg_cu_ptr from[3] = {(uintptr_t)memory, (uintptr_t)memory, (uintptr_t)memory};
	size_t sizes[3] = {100, 100, 100}, start = 0, failed = 0;
	kvg_cu_stream stream;

	assert_int_equal(cu->stream_create(&stream, KVG_CU_STREAM_NON_BLOCKING), 0);
	assert_int_equal(
		cu->copy_batch(to, from, sizes, 3, &attributes, &start, 1, &failed, stream),
		KVG_CU_INVALID_VALUE);
	assert_int_equal(failed, 1);
	to[1] = at + 8192;
	assert_int_equal(cu->copy_batch(to, from, sizes, 3, &attributes, &start, 1, &failed, NULL),
		KVG_CU_INVALID_VALUE);
	attributes.source_order = 0;
	assert_int_equal(
		cu->copy_batch(to, from, sizes, 3, &attributes, &start, 1, &failed, stream),
		KVG_CU_INVALID_VALUE);
	attributes.source_order = KVG_CU_SOURCE_ORDER_STREAM;
	assert_int_equal(
		cu->copy_batch(to, from, sizes, 3, &attributes, &start, 1, &failed, stream), 0);
	assert_int_equal(cu->stream_sync(stream), 0);
	assert_int_equal(cu->host_unregister(memory), 0);
	(void)munmap(memory, GRANULE);
}

/* ---- Faults from outside, and the report ---- */

static void write_file(const char *path, const char *text)
{
	FILE *file = fopen(path, "we");

	assert_non_null(file);
	assert_true(fputs(text, file) >= 0);
	assert_int_equal(fclose(file), 0);
}

/* A running process can be held and failed through a file. */
static void test_gpu_fake__control_file(void **state)
{
	void *directory = NULL;
	const char *path;

	assert_int_equal(unit_directory_setup(&directory), 0);
	path = unit_path(&directory, "control");
	start_with("FAKECU_CONTROL", path);
	assert_false(fakecu_is_held());
	write_file(path, "hold\nfail cuDeviceGetCount:2:999\n");
	assert_true(fakecu_is_held());
	assert_int_equal(cu->device_count(&(int){0}), 0);
	assert_int_equal(cu->device_count(&(int){0}), KVG_CU_UNKNOWN);
	assert_int_equal(cu->device_count(&(int){0}), 0);
	assert_int_equal(unlink(path), 0);
	assert_false(fakecu_is_held());
	assert_int_equal(unit_directory_teardown(&directory), 0);
}

/* A process that ends with things left; what it leaves is told in the report. */
static int run_leaker(void)
{
	kvg_cu_stream stream;

	start();
	(void)device_memory(GRANULE);
	return (int)cu->stream_create(&stream, 0);
}

static void test_gpu_fake__leaks_are_reported(void **state)
{
	void *directory = NULL;
	char line[512] = "", *counts;
	struct unit_child child;
	const char *path;
	FILE *file;

	assert_int_equal(unit_directory_setup(&directory), 0);
	path = unit_path(&directory, "report");
	(void)setenv("FAKECU_REPORT", path, 1);
	child = unit_child_start("leaker");
	assert_int_equal(unit_child_end(&child), 0);
	(void)unsetenv("FAKECU_REPORT");
	file = fopen(path, "re");
	assert_non_null(file);
	assert_non_null(fgets(line, sizeof(line), file));
	(void)fclose(file);
	counts = strstr(line, "leaks ");
	assert_non_null(counts);
	assert_string_equal(counts,
		"leaks handles=0 allocations=1 reservations=1 mappings=1 registrations=0 streams=1 "
		"events=0 contexts=1 modules=0\n");
	assert_int_equal(unit_directory_teardown(&directory), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(test_gpu_fake__##name, setup, teardown)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		TEST(memory_calls_are_strict),
		TEST(without_a_context),
		TEST(handles_that_are_gone),
		TEST(after_a_fork),
		TEST(addresses_are_the_device_s),
		TEST(cpu_access),
		TEST(registration_is_strict),
		TEST(the_link),
		TEST(pageable_memory),
		TEST(copies_are_late),
		TEST(copies_can_be_early),
		TEST(manual_clock),
		TEST(real_clock),
		TEST(unmapped_too_soon),
		TEST(batches),
		TEST(control_file),
		TEST(leaks_are_reported),
	};

	if (argc > 1 && strcmp(argv[1], "leaker") == 0)
		return run_leaker();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
