/* SPDX-License-Identifier: Apache-2.0 */
/* Memory nodes: what sysfs says of a device, and threads that stay near it. */
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "gpu/numa.h"
#include "tests/unit/unit_gpu.h"

static void write_file(void *const *root, const char *folder, const char *name, const char *text)
{
	char path[256];
	FILE *file;

	/* Each part of the path; what is there already is as good. */
	for (const char *end = folder; end; end = strchr(end + 1, '/')) {
		(void)snprintf(path, sizeof(path), "%.*s", (int)(end - folder), folder);
		if (end > folder)
			(void)mkdir(unit_path(root, path), 0700);
	}
	(void)mkdir(unit_path(root, folder), 0700);
	(void)snprintf(path, sizeof(path), "%s/%s", folder, name);
	file = fopen(unit_path(root, path), "we");
	assert_non_null(file);
	(void)fputs(text, file);
	(void)fclose(file);
}

/* However its number is printed; nothing that is no number leads out of the folder. */
static void test_numa__of_a_device(void **state)
{
	static const struct {
		const char *text;
		const char *id;
		int node;
	} cases[] = {
		{"1\n", "0000:3B:00.0", 1},
		{"0\n", "00000000:3B:00.0", 0},
		{"-1\n", "0000:3b:00.0", -1},
		{"", "0000:3b:00.0", -1},
		{"x", "0000:3b:00.0", -1},
		{"99999\n", "0000:3b:00.0", -1},
		{"1\n", "0000:3c:00.0", -1},
		{"1\n", "../devices/0000:3b:00.0", -1},
		{"1\n", "", -1},
		{"1\n", "0000:3b:00.00000:3b:00.00000:3b:00.0", -1},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		write_file(state, "bus/pci/devices/0000:3b:00.0", "numa_node", cases[i].text);
		assert_int_equal(kvg_numa_node(*state, cases[i].id), cases[i].node);
	}
}

/* What the driver knows of it, else what the kernel does. */
static void test_numa__of_a_cuda_device(void **state)
{
	static const char *const settings[][2] = {{"FAKECU_DEVICES", "2"}, {"FAKECU_ATTR", "134=1"},
		{"FAKECU_FAIL", "cuDeviceGetPCIBusId:1:1"}};
	static const int nodes[] = {3, 1, -1};
	const struct kvg_backend_open options = {.device = "1", .sysfs = *state};

	write_file(state, "bus/pci/devices/fafa:c1:00.0", "numa_node", "3\n");
	for (size_t i = 0; i < sizeof(nodes) / sizeof(nodes[0]); i++) {
		struct kvg_backend *backend;
		struct kvg_device_info info;
		char error[256];

		unit_gpu_clear_environment();
		assert_int_equal(setenv("FAKECU_DEVICES", "2", 1), 0);
		assert_int_equal(setenv(settings[i][0], settings[i][1], 1), 0);
		fakecu_reset();
		assert_int_equal(
			kvg_backend_cuda.open(&options, &backend, error, sizeof(error)), 0);
		kvg_backend_cuda.info(backend, &info);
		assert_int_equal(info.numa_node, nodes[i]);
		kvg_backend_close(backend);
	}
}

static void *run(void *arg)
{
	assert_int_equal(sched_getaffinity(0, sizeof(cpu_set_t), arg), 0);
	return NULL;
}

/* Threads are made on the node's CPUs, and who made them goes back to where he was. */
static void test_numa__threads(void **state)
{
	cpu_set_t before, inside, after, made;
	pthread_t thread;
	char text[64];
	int first = 0;

	assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);
	while (!CPU_ISSET(first, &before))
		first++;
	(void)snprintf(text, sizeof(text), "%d-%d,%d\n", first, first, CPU_SETSIZE - 1);
	write_file(state, "devices/system/node/node5", "cpulist", text);
	assert_true(kvg_numa_enter(*state, 5, &inside));
	assert_true(CPU_EQUAL(&inside, &before));
	assert_int_equal(pthread_create(&thread, NULL, run, &made), 0);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_equal(CPU_COUNT(&made), 1);
	assert_true(CPU_ISSET(first, &made));
	kvg_numa_leave(&inside);
	assert_int_equal(sched_getaffinity(0, sizeof(after), &after), 0);
	assert_true(CPU_EQUAL(&after, &before));
}

/* What makes no sense, or would leave no CPU to run on, changes nothing. */
static void test_numa__threads_stay(void **state)
{
	static const char *const lists[] = {"", "\n", "x\n", "3-1\n", "0-99999\n", "0,x\n"};
	cpu_set_t before, after, unused;
	char text[64];
	int absent = CPU_SETSIZE - 1;

	assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);
	for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
		write_file(state, "devices/system/node/node5", "cpulist", lists[i]);
		assert_false(kvg_numa_enter(*state, 5, &unused));
	}
	assert_false(CPU_ISSET(absent, &before));
	(void)snprintf(text, sizeof(text), "%d\n", absent);
	write_file(state, "devices/system/node/node5", "cpulist", text);
	assert_false(kvg_numa_enter(*state, 5, &unused));
	assert_false(kvg_numa_enter(*state, 6, &unused));
	assert_false(kvg_numa_enter(*state, -1, &unused));
	assert_int_equal(sched_getaffinity(0, sizeof(after), &after), 0);
	assert_true(CPU_EQUAL(&after, &before));
}

/* The policy of the memory is set, where the kernel lets us; without a node it is left alone. */
static void test_numa__memory(void **state)
{
	size_t size = 4096;
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int policy = -1;

	(void)state;
	assert_ptr_not_equal(memory, MAP_FAILED);
	kvg_numa_bind(memory, size, -1);
	kvg_numa_bind(memory, size, 1 << 20);
	if (syscall(SYS_get_mempolicy, &policy, NULL, 0ul, memory, (unsigned long)MPOL_F_ADDR) < 0)
		skip();
	assert_int_equal(policy, MPOL_DEFAULT);
	kvg_numa_bind(memory, size, 0);
	assert_int_equal(
		syscall(SYS_get_mempolicy, &policy, NULL, 0ul, memory, (unsigned long)MPOL_F_ADDR),
		0);
	assert_int_equal(policy, MPOL_PREFERRED);
	(void)munmap(memory, size);
}

#define TEST(name)                                                                                 \
	cmocka_unit_test_setup_teardown(                                                           \
		test_numa__##name, unit_directory_setup, unit_directory_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(of_a_device),
		TEST(of_a_cuda_device),
		TEST(threads),
		TEST(threads_stay),
		TEST(memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
