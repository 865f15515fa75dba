/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend cufile on the fakes: when it is taken and when not, its probe of a real file, and
 * reads, with all that can fail in them.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "gpu/cufile_driver.h"
#include "tests/unit/unit_gpu.h"

#define FILE_SIZE (GRANULE + 8192 + 100)

static const struct kvg_backend_ops *const ops = &kvg_backend_cufile;

/* A file with random bytes on a real filesystem, and what is in it. */
struct fixture {
	void *directory; /* of unit_directory_setup */
	int fd;          /* O_DIRECT */
	uint8_t *data;
};

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));
	uint64_t seed = 11;
	const char *path;
	int fd;

	assert_non_null(f);
	assert_int_equal(unit_directory_setup(&f->directory), 0);
	f->data = malloc(FILE_SIZE);
	assert_non_null(f->data);
	unit_random_fill(&seed, f->data, FILE_SIZE);
	path = unit_path(&f->directory, "data0");
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, f->data, FILE_SIZE), FILE_SIZE);
	assert_int_equal(fsync(fd), 0);
	(void)close(fd);
	f->fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
	assert_true(f->fd >= 0);
	*state = f;
	return unit_gpu_setup(NULL);
}

static int teardown(void **state)
{
	struct fixture *f = *state;
	int r = unit_directory_teardown(&f->directory);

	(void)close(f->fd);
	free(f->data);
	free(f);
	return r;
}

/* ---- When it is taken ---- */

static void check_refused(const char *wanted)
{
	const struct kvg_backend_open options = {.device = "0"};
	struct kvg_backend *backend = NULL;
	char error[256] = "";

	assert_int_equal(ops->open(&options, &backend, error, sizeof(error)), -EOPNOTSUPP);
	assert_null(backend);
	if (!strstr(error, wanted))
		fail_msg("'%s' is not in '%s'", wanted, error);
	unit_gpu_assert_nothing_lives();
	/* Who named it is told the same. */
	error[0] = '\0';
	assert_int_equal(kvg_backend_choose("cufile", &options, &backend, error, sizeof(error)),
		-EOPNOTSUPP);
	assert_non_null(strstr(error, wanted));
	unit_gpu_assert_nothing_lives();
}

static void test_gpu_cufile__info(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct kvg_device_info info;

	ops->info(backend, &info);
	assert_string_equal(info.mode, "cufile: CUDA 12.8, batched copies, cuFile 1.14");
	assert_true(info.direct);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
}

/* Whatever would go round through the CPU unseen is refused. */
static void test_gpu_cufile__no_silent_way_round(void **state)
{
	unit_gpu_set("FAKECUFILE_GDS", "0");
	check_refused("cuFileDriverOpen: error 5001, the kernel has neither nvidia-fs");
	unit_gpu_clear_environment();
	unit_gpu_set("FAKECUFILE_FORCE_COMPAT", "1");
	check_refused("cufile.json or the environment forces compatibility mode");
	unit_gpu_clear_environment();
	unit_gpu_set("FAKECUFILE_OLD", "1");
	check_refused("set properties.allow_compat_mode to false in cufile.json");
	unit_gpu_clear_environment();
	unit_gpu_set("FAKECU_ATTR", "110=0");
	check_refused("does not let drives write into memory that is shared");
}

static void test_gpu_cufile__errors_at_start(void **state)
{
	fakecu_fail("cuFileDriverOpen", 1, true, KVG_CUFILE_PLATFORM_NOT_SUPPORTED);
	check_refused("cuFileDriverOpen: error 5007, this machine is not supported");
	fakecu_heal();
	fakecu_fail("cuFileSetParameterBool", 1, true, KVG_CUFILE_INVALID_VALUE);
	check_refused("cuFileSetParameterBool: error 5022");
	fakecu_heal();
	fakecu_fail("cuFileDriverGetProperties", 1, true, KVG_CUFILE_INTERNAL);
	check_refused("cuFileDriverGetProperties: error 5030");
	fakecu_heal();
	/* After all that it starts. */
	kvg_backend_close(unit_gpu_open(ops, NULL));
}

/* cuFile is started once, however many devices use it. */
static void test_gpu_cufile__two_devices(void **state)
{
	struct kvg_backend *first, *second;

	unit_gpu_set("FAKECU_DEVICES", "2");
	first = unit_gpu_open(ops, "0");
	second = unit_gpu_open(ops, "1");
	assert_int_equal(fakecu_calls("cuFileDriverOpen"), 1);
	kvg_backend_close(first);
	kvg_backend_close(second);
	unit_gpu_assert_nothing_lives();
	kvg_backend_close(unit_gpu_open(ops, "1"));
	assert_int_equal(fakecu_calls("cuFileDriverOpen"), 2);
}

/* ---- The probe ---- */

static void check_probe(struct fixture *f, int fd, int expected, const char *wanted)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	char reason[256] = "";

	assert_int_equal(ops->direct_probe(backend, fd, 4096, reason, sizeof(reason)), expected);
	if (!strstr(reason, wanted))
		fail_msg("'%s' is not in '%s'", wanted, reason);
	kvg_backend_close(backend);
	if (expected != -EIO)
		unit_gpu_assert_nothing_lives();
	fakecu_heal();
}

static void test_gpu_cufile__probe(void **state)
{
	struct fixture *f = *state;

	check_probe(f, f->fd, 0, "");
}

/* Files that it cannot read, with the reason. */
static void test_gpu_cufile__probe_of_bad_files(void **state)
{
	struct fixture *f = *state;
	int memory = memfd_create("tier", MFD_CLOEXEC);
	int buffered = open(unit_path(&f->directory, "data0"), O_RDONLY | O_CLOEXEC);
	int short_file = open(
		unit_path(&f->directory, "short"), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);

	assert_true(memory >= 0 && buffered >= 0 && short_file >= 0);
	check_probe(f, memory, -EOPNOTSUPP, "cuFileHandleRegister: error 5030, cuFile cannot");
	check_probe(f, buffered, -EOPNOTSUPP, "cuFileHandleRegister: error 5020, the file");
	check_probe(f, short_file, -EOPNOTSUPP, "a read by the CPU: ");
	check_probe(f, -1, -EOPNOTSUPP, "cuFileHandleRegister: ");
	(void)close(memory);
	(void)close(buffered);
	(void)close(short_file);
}

/* Each way in which a read goes wrong; wrong bytes above all. */
static void test_gpu_cufile__probe_of_bad_reads(void **state)
{
	struct fixture *f = *state;
	static const struct {
		const char *call;
		unsigned code;
		const char *wanted;
	} cases[] = {
		{"cuFileRead", 2, "cuFileRead gives other bytes than the CPU"},
		{"cuFileRead", 1, "cuFileRead: "},
		{"cuFileRead", EIO, "cuFileRead: Input/output error"},
		{"cuFileRead", 5008,
			"cuFileRead: error 5008, this file, its filesystem or its drive"},
		{"cuFileHandleRegister", 5030, "cuFileHandleRegister: error 5030, "},
		{"cuFileBufRegister", 5016, "cuFileBufRegister: error 5016, no more device memory"},
		{"cuMemCreate", 2, "device memory: Cannot allocate memory"},
		{"cuMemMap", 999, "device memory: Input/output error"},
		{"cuMemsetD8Async", 999, "filling device memory: "},
		{"cuMemcpyDtoHAsync", 999, "reading device memory: "},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		fakecu_fail(cases[i].call, 1, false, cases[i].code);
		check_probe(f, f->fd, -EOPNOTSUPP, cases[i].wanted);
	}
	fakecu_fail("cuMemsetD8Async", 1, false, KVG_CU_ILLEGAL_ADDRESS);
	check_probe(f, f->fd, -EIO, "filling device memory: ");
}

/* ---- Reads ---- */

struct opened {
	struct kvg_backend *backend;
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	struct kvg_direct *direct;
	kvg_devptr base;
};

static struct opened open_all(struct fixture *f)
{
	struct opened o = {.backend = unit_gpu_open(ops, NULL)};

	assert_int_equal(ops->segment_new(o.backend, 2 * GRANULE, &o.segment), 0);
	assert_int_equal(ops->map(o.backend, &o.segment, 1, true, &o.mapping), 0);
	o.base = ops->address(o.backend, o.mapping);
	assert_int_equal(ops->direct_register(o.backend, o.base, 2 * GRANULE), 0);
	assert_int_equal(ops->direct_open(o.backend, f->fd, &o.direct), 0);
	return o;
}

static void close_all(struct opened *o)
{
	ops->direct_close(o->backend, o->direct);
	ops->direct_close(o->backend, NULL);
	ops->direct_unregister(o->backend, o->base);
	ops->unmap(o->backend, o->mapping);
	ops->segment_free(o->backend, o->segment);
	kvg_backend_close(o->backend);
	unit_gpu_assert_nothing_lives();
}

/* Any offset and size; less at the end of the file, and nothing behind it. */
static void test_gpu_cufile__reads(void **state)
{
	struct fixture *f = *state;
	struct opened o = open_all(f);
	uint8_t *back = malloc(FILE_SIZE);
	static const struct {
		uint64_t offset, size, file_offset;
		ssize_t expected;
	} cases[] = {
		{0, FILE_SIZE, 0, FILE_SIZE},
		{GRANULE, 4096, 8192, 4096},
		{4096, 5000, 100, 5000},
		{0, 8192, FILE_SIZE - 100, 100},
		{0, 4096, FILE_SIZE, 0},
		{0, 4096, FILE_SIZE + 4096, 0},
	};

	assert_non_null(back);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		ssize_t n = ops->direct_read(o.backend, o.direct, o.base, cases[i].offset,
			cases[i].size, cases[i].file_offset);

		assert_int_equal(n, cases[i].expected);
		if (n == 0)
			continue;
		unit_gpu_read(o.backend, o.base + cases[i].offset, back, (uint64_t)n);
		assert_memory_equal(back, f->data + cases[i].file_offset, (size_t)n);
	}
	close_all(&o);
	free(back);
}

/* What cuFile answers, as errno; short reads are told by their length. */
static void test_gpu_cufile__failing_reads(void **state)
{
	struct opened o = open_all(*state);
	static const struct {
		unsigned code;
		ssize_t expected;
	} cases[] = {
		{1, 4096},
		{EIO, -EIO},
		{ENODATA, -ENODATA},
		{5008, -EOPNOTSUPP},
		{5009, -EOPNOTSUPP},
		{5016, -ENOSPC},
		{5024, -EINVAL},
		{5030, -EOPNOTSUPP},
		{5010, -EIO},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		fakecu_fail("cuFileRead", 1, false, cases[i].code);
		assert_int_equal(ops->direct_read(o.backend, o.direct, o.base, 0, 8192, 0),
			cases[i].expected);
		fakecu_heal();
	}
	/* Beyond what is registered, and from an address within it. */
	assert_int_equal(ops->direct_read(o.backend, o.direct, o.base, 2 * GRANULE - 4096, 8192, 0),
		-EINVAL);
	assert_int_equal(ops->direct_read(o.backend, o.direct, o.base + 4096, 0, 4096, 0), -EINVAL);
	assert_int_equal(ops->direct_read(o.backend, o.direct, o.base, 0, 8192, 0), 8192);
	close_all(&o);
}

/* When no more memory can be opened to drives, that is told from other errors. */
static void test_gpu_cufile__registration(void **state)
{
	struct fixture *f = *state;
	struct opened o;
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	kvg_devptr base;

	unit_gpu_set("FAKECUFILE_PINNED_MAX", "5000000");
	o = open_all(f);
	assert_int_equal(ops->segment_new(o.backend, GRANULE, &segment), 0);
	assert_int_equal(ops->map(o.backend, &segment, 1, true, &mapping), 0);
	base = ops->address(o.backend, mapping);
	assert_int_equal(ops->direct_register(o.backend, base, GRANULE), -ENOSPC);
	assert_int_equal(ops->direct_register(o.backend, o.base, GRANULE), -EINVAL);
	assert_int_equal(ops->direct_register(o.backend, base, 2 * GRANULE), -EINVAL);
	ops->direct_unregister(o.backend, o.base);
	assert_int_equal(ops->direct_register(o.backend, base, GRANULE), 0);
	ops->direct_unregister(o.backend, base);
	fakecu_fail("cuFileBufRegister", 1, false, KVG_CU_LAUNCH_FAILED);
	assert_int_equal(ops->direct_register(o.backend, base, GRANULE), -EIO);
	assert_int_equal(ops->last_code(o.backend), KVG_CU_LAUNCH_FAILED);
	assert_true(ops->is_dead(o.backend));
	assert_int_equal(ops->direct_register(o.backend, base, GRANULE), -EIO);
	assert_int_equal(ops->direct_read(o.backend, o.direct, base, 0, 4096, 0), -EIO);
	assert_int_equal(ops->direct_open(o.backend, f->fd, &o.direct), -EIO);
	ops->direct_close(o.backend, o.direct);
	ops->unmap(o.backend, mapping);
	ops->segment_free(o.backend, segment);
	ops->unmap(o.backend, o.mapping);
	ops->segment_free(o.backend, o.segment);
	kvg_backend_close(o.backend);
	fakecu_reset();
}

#define TEST(name) cmocka_unit_test_setup_teardown(test_gpu_cufile__##name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(info),
		TEST(no_silent_way_round),
		TEST(errors_at_start),
		TEST(two_devices),
		TEST(probe),
		TEST(probe_of_bad_files),
		TEST(probe_of_bad_reads),
		TEST(reads),
		TEST(failing_reads),
		TEST(registration),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
