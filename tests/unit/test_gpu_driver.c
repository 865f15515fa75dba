/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which backend a machine gets as it is: without a driver, with one that is too old, with a library
 * that lacks what is needed, and, where there is a GPU, with that. Not linked with the fakes; each
 * case is a process of its own, as a driver is loaded once.
 */
#include <dlfcn.h>

#include "gpu/backend.h"
#include "tests/unit/unit_fs.h"

#define GRANULE_MAX (UINT64_C(64) << 20)

/*
 * Runs this program as `chooser` of the backend NAME ("": the best) with LIBRARY_PATH, and LOADED
 * opened before; gives its line.
 */
static void choose(
	const char *name, const char *library_path, const char *loaded, char *line, int line_size)
{
	char command[2048];
	FILE *output;

	(void)snprintf(command, sizeof(command),
		"LD_LIBRARY_PATH='%s' /proc/%d/exe chooser '%s' '%s'", library_path, (int)getpid(),
		loaded, name);
	output = popen(command, "re");
	assert_non_null(output);
	assert_non_null(fgets(line, line_size, output));
	assert_int_equal(pclose(output), 0);
}

static int run_chooser(const char *loaded, const char *name)
{
	const struct kvg_backend_open options = {.device = "0"};
	struct kvg_backend *backend = NULL;
	char reasons[1024];

	if (*loaded && !dlopen(loaded, RTLD_NOW)) {
		(void)fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	if (kvg_backend_choose(*name ? name : NULL, &options, &backend, reasons, sizeof(reasons)) <
		0)
		(void)printf("none: %s\n", reasons);
	else
		(void)printf("%s: %s\n", backend->ops->name, reasons);
	kvg_backend_close(backend);
	return 0;
}

static void check_line(const char *line, const char *wanted)
{
	if (!strstr(line, wanted))
		fail_msg("'%s' is not in '%s'", wanted, line);
}

static void test_gpu_driver__as_the_machine_is(void **state)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	char line[1200] = "";

	choose("", "", "", line, sizeof(line));
	if (driver)
		skip();
	check_line(line, "host: cuda: no NVIDIA driver: libcuda.so.1: ");
}

static void test_gpu_driver__too_old(void **state)
{
	char line[1200] = "";

	choose("", getenv("KVFS_FAKE_GPU_OLD"), "", line, sizeof(line));
	check_line(line, "host: cuda: the NVIDIA driver is older than 525 (CUDA 12.0)");
	choose("cufile", getenv("KVFS_FAKE_GPU_OLD"), "", line, sizeof(line));
	check_line(line, "none: cufile: the NVIDIA driver is older than 525 (CUDA 12.0)");
}

static void test_gpu_driver__cufile_lacks_something(void **state)
{
	char line[1200] = "", driver[512];

	(void)snprintf(driver, sizeof(driver), "%s/libcuda.so.1", getenv("KVFS_FAKE_GPU"));
	choose("cufile", getenv("KVFS_FAKE_GPU_OLD"), driver, line, sizeof(line));
	check_line(line, "none: cufile: libcufile.so.0 has no cuFileDriverOpen: install another");
}

static void test_gpu_driver__no_cufile(void **state)
{
	char line[1200] = "", driver[512];

	if (dlopen("libcufile.so.0", RTLD_NOW))
		skip();
	(void)snprintf(driver, sizeof(driver), "%s/libcuda.so.1", getenv("KVFS_FAKE_GPU"));
	choose("cufile", "", driver, line, sizeof(line));
	check_line(line, "none: cufile: no cuFile: libcufile.so.0: ");
}

/* With a GPU: bytes go in and come back, and its memory can be exported and imported. */
static void test_gpu_driver__a_real_device(void **state)
{
	const struct kvg_backend_open options = {.device = "0"};
	const struct kvg_backend_ops *ops = &kvg_backend_cuda;
	struct kvg_segment *segment, *import;
	struct kvg_mapping *mapping, *view;
	struct kvg_backend *backend;
	struct kvg_device_info info;
	struct kvg_copy copy;
	uint64_t seed = 5;
	uint8_t *data, *back;
	char error[256];
	int fd;

	if (ops->open(&options, &backend, error, sizeof(error)) < 0)
		skip();
	ops->info(backend, &info);
	assert_true(info.granularity <= GRANULE_MAX);
	data = malloc(info.granularity);
	back = calloc(1, info.granularity);
	assert_true(data && back);
	unit_random_fill(&seed, data, info.granularity);
	assert_int_equal(ops->segment_new(backend, info.granularity, &segment), 0);
	assert_int_equal(ops->map(backend, &segment, 1, true, &mapping), 0);
	assert_int_equal(ops->segment_export(backend, segment, &fd), 0);
	assert_int_equal(ops->segment_import(backend, fd, info.granularity, &import), 0);
	assert_int_equal(ops->map(backend, &import, 1, false, &view), 0);
	copy = (struct kvg_copy){.to = ops->address(backend, mapping),
		.from = (uint64_t)(uintptr_t)data,
		.size = info.granularity};
	assert_int_equal(ops->copy(backend, NULL, KVG_COPY_TO_DEVICE, &copy, 1), 0);
	copy.from = ops->address(backend, view);
	copy.to = (uint64_t)(uintptr_t)back;
	assert_int_equal(ops->copy(backend, NULL, KVG_COPY_TO_HOST, &copy, 1), 0);
	assert_int_equal(ops->stream_sync(backend, NULL), 0);
	assert_memory_equal(data, back, info.granularity);
	ops->unmap(backend, view);
	ops->unmap(backend, mapping);
	ops->segment_free(backend, import);
	ops->segment_free(backend, segment);
	(void)close(fd);
	kvg_backend_close(backend);
	free(data);
	free(back);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_gpu_driver__as_the_machine_is),
		cmocka_unit_test(test_gpu_driver__too_old),
		cmocka_unit_test(test_gpu_driver__cufile_lacks_something),
		cmocka_unit_test(test_gpu_driver__no_cufile),
		cmocka_unit_test(test_gpu_driver__a_real_device),
	};

	if (argc > 3 && strcmp(argv[1], "chooser") == 0)
		return run_chooser(argv[2], argv[3]);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
