/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend cuda on the fake driver: what it does with devices, memory shared between processes,
 * copies, and every call of the driver's that can fail.
 */
#include <sys/mman.h>

#include "tests/unit/unit_gpu.h"

/* The fake's first device, as parse and print of UUIDs must agree on it. */
#define UUID_0 "GPU-fafbfcfd-feff-0001-0203-040506070000"
#define UUID_2 "GPU-fafbfcfd-feff-0001-0203-040506070002"

static const struct kvg_backend_ops *const ops = &kvg_backend_cuda;

/* ---- Devices ---- */

/* What the device is, is told. */
static void test_gpu_cuda__info(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct kvg_device_info info;
	uint64_t available;

	ops->info(backend, &info);
	assert_string_equal(info.name, "Modelled H200");
	assert_string_equal(info.mode, "cuda: CUDA 12.8, batched copies");
	assert_int_equal(info.granularity, GRANULE);
	assert_int_equal(info.total, UINT64_C(8) << 30);
	assert_int_equal(info.numa_node, -1);
	assert_true(info.modelled && info.register_read_only && !info.integrated && !info.direct);
	assert_int_equal(info.dl_device_type, 2);
	assert_int_equal(ops->free_bytes(backend, &available), 0);
	assert_int_equal(available, (UINT64_C(8) << 30) - 512 * MIB);
	assert_null(kvg_backend_close(backend));
	unit_gpu_assert_nothing_lives();
}

/* An instance of MIG is a device of its own, and says which GPU it is of. */
static void test_gpu_cuda__mig(void **state)
{
	struct kvg_backend *backend;
	struct kvg_device_info info;

	unit_gpu_set("FAKECU_MIG", "1");
	backend = unit_gpu_open(ops, "MIG-fafbfcfd-feff-0001-0203-040506070100");
	ops->info(backend, &info);
	assert_string_equal(info.mode, "cuda: CUDA 12.8, batched copies, MIG of " UUID_0);
	kvg_backend_close(backend);
}

static void check_device(const char *device, int expected)
{
	const struct kvg_backend_open options = {.device = device};
	struct kvg_backend *backend = NULL;
	struct kvg_device_info info;
	char error[256] = "";
	int r = ops->open(&options, &backend, error, sizeof(error));

	if (expected < 0) {
		assert_int_equal(r, expected);
		assert_true(strlen(error) > 10);
		return;
	}
	assert_int_equal(r, 0);
	ops->info(backend, &info);
	assert_int_equal(info.dl_device_id, expected);
	assert_int_equal(info.uuid[15], expected);
	kvg_backend_close(backend);
}

/* Devices are found by UUID or number; what is neither is refused. */
static void test_gpu_cuda__devices(void **state)
{
	unit_gpu_set("FAKECU_DEVICES", "3");
	check_device(NULL, 0);
	check_device("0", 0);
	check_device("2", 2);
	check_device(UUID_2, 2);
	check_device("GPU-FAFBFCFD-FEFF-0001-0203-040506070002", 2);
	check_device("3", -ENODEV);
	check_device("GPU-fafbfcfd-feff-0001-0203-040506070003", -ENODEV);
	check_device("GPU-fafbfcfd-feff-0001-0203-04050607000", -ENODEV);
	check_device("GPU-fafbfcfd-feff-0001-0203-0405060700022", -ENODEV);
	check_device("GPU-xafbfcfd-feff-0001-0203-040506070002", -ENODEV);
	check_device("2x", -ENODEV);
	check_device("", -ENODEV);
	check_device("first", -ENODEV);
	unit_gpu_assert_nothing_lives();
}

/* In an engine the current context is taken, its device with it, and no reference is added. */
static void test_gpu_cuda__client_uses_the_current_context(void **state)
{
	const struct kvg_backend_open options = {.client = true};
	const struct kvg_cuda_driver *driver;
	struct kvg_backend *backend;
	struct kvg_device_info info;
	struct fakecu_live live;
	kvg_cu_context context, current;
	char error[256];

	unit_gpu_set("FAKECU_DEVICES", "2");
	assert_int_equal(kvg_cuda_load(&driver, error, sizeof(error)), 0);
	assert_int_equal(driver->primary_retain(&context, 1), 0);
	assert_int_equal(driver->context_push(context), 0);
	assert_int_equal(ops->open(&options, &backend, error, sizeof(error)), 0);
	ops->info(backend, &info);
	assert_int_equal(info.dl_device_id, 1);
	fakecu_live(&live);
	assert_int_equal(live.contexts, 1);
	kvg_backend_close(backend);
	assert_int_equal(driver->context_get(&current), 0);
	assert_ptr_equal(current, context);
	assert_int_equal(driver->context_pop(&current), 0);
	assert_int_equal(driver->primary_release(1), 0);
	unit_gpu_assert_nothing_lives();
}

/* Without one the primary context is retained, and no context stays current. */
static void test_gpu_cuda__no_context_is_left_current(void **state)
{
	const struct kvg_backend_open options = {.client = true};
	const struct kvg_cuda_driver *driver;
	struct kvg_backend *backend;
	struct fakecu_live live;
	kvg_cu_context current;
	kvg_stream stream;
	char error[256];

	assert_int_equal(ops->open(&options, &backend, error, sizeof(error)), 0);
	fakecu_live(&live);
	assert_int_equal(live.contexts, 1);
	assert_int_equal(ops->stream_new(backend, &stream), 0);
	assert_int_equal(kvg_cuda_load(&driver, error, sizeof(error)), 0);
	assert_int_equal(driver->context_get(&current), 0);
	assert_null(current);
	ops->stream_free(backend, stream);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
}

/* ---- Memory ---- */

/* Segments behind one another are one range, and hold what was copied to them. */
static void test_gpu_cuda__map_is_one_range(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct kvg_segment *segments[3];
	struct kvg_mapping *mapping;
	uint64_t size = 6 * GRANULE, seed = 7;
	uint8_t *data = malloc(size), *back = malloc(size);

	assert_true(data && back);
	unit_random_fill(&seed, data, size);
	for (size_t i = 0; i < 3; i++)
		assert_int_equal(ops->segment_new(backend, (i + 1) * GRANULE, &segments[i]), 0);
	assert_int_equal(ops->map(backend, segments, 3, true, &mapping), 0);
	/* The mapping keeps them. */
	for (size_t i = 0; i < 3; i++)
		ops->segment_free(backend, segments[i]);
	unit_gpu_write(backend, ops->address(backend, mapping), data, size);
	unit_gpu_read(backend, ops->address(backend, mapping), back, size);
	assert_memory_equal(data, back, size);
	ops->unmap(backend, mapping);
	ops->unmap(backend, NULL);
	ops->segment_free(backend, NULL);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
	free(data);
	free(back);
}

static void test_gpu_cuda__bad_sizes(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	int fd = memfd_create("not-a-segment", MFD_CLOEXEC);

	assert_int_equal(ops->segment_new(backend, 0, &segment), -EINVAL);
	assert_int_equal(ops->segment_new(backend, GRANULE + 4096, &segment), -EINVAL);
	assert_int_equal(ops->segment_new(backend, UINT64_C(16) << 30, &segment), -ENOMEM);
	assert_int_equal(ops->last_code(backend), KVG_CU_OUT_OF_MEMORY);
	assert_int_equal(ops->map(backend, NULL, 0, true, &mapping), -EINVAL);
	assert_int_equal(ops->segment_import(backend, -1, GRANULE, &segment), -EINVAL);
	assert_int_equal(ops->segment_import(backend, fd, GRANULE, &segment), -EINVAL);
	assert_int_equal(ops->host_register(backend, &fd, 0, 0), -EINVAL);
	assert_int_equal(ops->host_register(backend, &fd, KVG_REGISTER_MAX + 1, 0), -EINVAL);
	assert_int_equal(ops->host_register(backend, &fd, 4096, 1u << 7), -EINVAL);
	(void)close(fd);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
}

/* A descriptor does not outlive exec, an import is not passed on, a wrong size does not map. */
static void test_gpu_cuda__exports(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct kvg_segment *segment, *import;
	struct kvg_mapping *mapping;
	int fd = -1, other;

	assert_int_equal(ops->segment_new(backend, GRANULE, &segment), 0);
	assert_int_equal(ops->segment_export(backend, segment, &fd), 0);
	assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC);
	assert_int_equal(ops->segment_import(backend, fd, GRANULE, &import), 0);
	assert_int_equal(ops->segment_export(backend, import, &other), -EINVAL);
	ops->segment_free(backend, import);
	assert_int_equal(ops->segment_import(backend, fd, GRANULE + 1, &import), -EINVAL);
	assert_int_equal(ops->segment_import(backend, fd, 2 * GRANULE, &import), 0);
	assert_int_equal(ops->map(backend, &import, 1, false, &mapping), -EINVAL);
	ops->segment_free(backend, import);
	ops->segment_free(backend, segment);
	(void)close(fd);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
}

/* The memory of another device is told from one's own. */
static void test_gpu_cuda__import_from_another_device(void **state)
{
	struct kvg_backend *first, *second;
	struct kvg_segment *segment, *import;
	int fd = -1;

	unit_gpu_set("FAKECU_DEVICES", "2");
	first = unit_gpu_open(ops, "0");
	second = unit_gpu_open(ops, "1");
	assert_int_equal(ops->segment_new(second, GRANULE, &segment), 0);
	assert_int_equal(ops->segment_export(second, segment, &fd), 0);
	assert_int_equal(ops->segment_import(first, fd, GRANULE, &import), -EXDEV);
	ops->segment_free(second, segment);
	(void)close(fd);
	kvg_backend_close(second);
	kvg_backend_close(first);
	unit_gpu_assert_nothing_lives();
}

/* ---- Another process ---- */

/* The helper's side: a segment with known bytes, sent, and held until the socket says to end. */
static int run_exporter(void)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	uint64_t seed = 99;
	uint8_t *data = malloc(GRANULE);
	int fd = -1, none;

	assert_non_null(data);
	unit_random_fill(&seed, data, GRANULE);
	assert_int_equal(ops->segment_new(backend, GRANULE, &segment), 0);
	assert_int_equal(ops->map(backend, &segment, 1, true, &mapping), 0);
	unit_gpu_write(backend, ops->address(backend, mapping), data, GRANULE);
	assert_int_equal(ops->segment_export(backend, segment, &fd), 0);
	assert_true(unit_send(3, fd));
	while (unit_receive(3, &none)) {
		/* The first 4 bytes, anew: the other side sees it. */
		unit_gpu_write(backend, ops->address(backend, mapping), "anew", 4);
		assert_true(unit_send(3, -1));
	}
	return 0;
}

/* Both processes see the same bytes, also when the maker of the memory is dead. */
static void test_gpu_cuda__memory_outlives_its_maker(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct unit_child child = unit_child_start("exporter");
	uint8_t *expected = malloc(GRANULE), *back = malloc(GRANULE);
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	uint64_t seed = 99;
	int fd = -1, none;

	assert_true(expected && back);
	unit_random_fill(&seed, expected, GRANULE);
	assert_true(unit_receive(child.socket, &fd));
	assert_int_equal(ops->segment_import(backend, fd, GRANULE, &segment), 0);
	(void)close(fd);
	assert_int_equal(ops->map(backend, &segment, 1, false, &mapping), 0);
	ops->segment_free(backend, segment);
	unit_gpu_read(backend, ops->address(backend, mapping), back, GRANULE);
	assert_memory_equal(expected, back, GRANULE);

	assert_true(unit_send(child.socket, -1) && unit_receive(child.socket, &none));
	memcpy(expected, "anew", 4);
	unit_gpu_read(backend, ops->address(backend, mapping), back, GRANULE);
	assert_memory_equal(expected, back, GRANULE);

	unit_child_kill(&child);
	unit_gpu_read(backend, ops->address(backend, mapping), back, GRANULE);
	assert_memory_equal(expected, back, GRANULE);
	ops->unmap(backend, mapping);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
	free(expected);
	free(back);
}

/* Memory of a dead process counts as used as long as somebody holds its descriptor. */
static void test_gpu_cuda__orphans_are_seen(void **state)
{
	char directory[] = "/dev/shm/kvfs-unit-XXXXXX";
	struct kvg_backend *backend;
	struct kvg_segment *segment;
	uint64_t before, now;
	struct unit_child child;
	int fd = -1;

	assert_non_null(mkdtemp(directory));
	unit_gpu_set("FAKECU_DIR", directory);
	backend = unit_gpu_open(ops, NULL);
	assert_int_equal(ops->free_bytes(backend, &before), 0);
	child = unit_child_start("exporter");
	assert_true(unit_receive(child.socket, &fd));
	assert_int_equal(ops->free_bytes(backend, &now), 0);
	assert_int_equal(before - now, GRANULE);
	unit_child_kill(&child);
	assert_int_equal(ops->free_bytes(backend, &now), 0);
	assert_int_equal(before - now, GRANULE);
	/* An import is as good a hold as the descriptor. */
	assert_int_equal(ops->segment_import(backend, fd, GRANULE, &segment), 0);
	(void)close(fd);
	assert_int_equal(ops->free_bytes(backend, &now), 0);
	assert_int_equal(before - now, GRANULE);
	ops->segment_free(backend, segment);
	assert_int_equal(ops->free_bytes(backend, &now), 0);
	assert_int_equal(now, before);
	kvg_backend_close(backend);
	/* What nobody holds has gone from it. */
	assert_int_equal(rmdir(directory), 0);
}

/* ---- Copies ---- */

/* A mapping that is for reading takes no copy: the device faults, and with it the backend ends. */
static void test_gpu_cuda__a_store_to_read_only_memory_is_fatal(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct kvg_segment *segment, *other;
	struct kvg_mapping *mapping;
	kvg_stream stream;
	uint64_t bytes;

	assert_int_equal(ops->stream_new(backend, &stream), 0);
	assert_int_equal(ops->segment_new(backend, GRANULE, &segment), 0);
	assert_int_equal(ops->map(backend, &segment, 1, false, &mapping), 0);
	assert_false(ops->is_dead(backend));
	assert_int_equal(ops->fill(backend, stream, ops->address(backend, mapping), 1, GRANULE), 0);
	assert_int_equal(ops->stream_sync(backend, stream), -EIO);
	assert_int_equal(ops->last_code(backend), KVG_CU_ILLEGAL_ADDRESS);
	assert_true(ops->is_dead(backend));

	assert_int_equal(ops->segment_new(backend, GRANULE, &other), -EIO);
	assert_int_equal(ops->free_bytes(backend, &bytes), -EIO);
	ops->unmap(backend, mapping);
	ops->segment_free(backend, segment);
	ops->stream_free(backend, stream);
	kvg_backend_close(backend);
}

/* Runs of all sizes arrive; with batches where the driver has them, else one by one. */
static void check_copies(bool batches)
{
	enum { RUNS = 600 };
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	uint8_t *data = malloc(GRANULE), *back = malloc(GRANULE);
	struct kvg_copy copies[RUNS];
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	uint64_t seed = 3, at = 0;
	kvg_devptr base;
	kvg_stream stream;

	unit_random_fill(&seed, data, GRANULE);
	assert_int_equal(ops->stream_new(backend, &stream), 0);
	assert_int_equal(ops->segment_new(backend, GRANULE, &segment), 0);
	assert_int_equal(ops->map(backend, &segment, 1, true, &mapping), 0);
	base = ops->address(backend, mapping);
	for (size_t i = 0; i < RUNS; i++) {
		uint64_t size = i == RUNS - 1 ? GRANULE - at : 1 + unit_random(&seed) % 3000;

		copies[i] = (struct kvg_copy){
			.to = base + at, .from = (uint64_t)(uintptr_t)data + at, .size = size};
		at += size;
	}
	assert_int_equal(ops->copy(backend, stream, KVG_COPY_TO_DEVICE, copies, RUNS), 0);
	assert_int_equal(ops->copy(backend, stream, KVG_COPY_TO_DEVICE, copies, 0), 0);
	assert_int_equal(fakecu_calls("cuMemcpyBatchAsync"), batches ? 3 : 0);
	assert_int_equal(fakecu_calls("cuMemcpyHtoDAsync"), batches ? 0 : RUNS);
	assert_int_equal(ops->stream_sync(backend, stream), 0);
	unit_gpu_read(backend, base, back, GRANULE);
	assert_memory_equal(data, back, GRANULE);
	/* The default stream takes no batches. */
	assert_int_equal(ops->copy(backend, NULL, KVG_COPY_TO_DEVICE, copies, 2), 0);
	assert_int_equal(fakecu_calls("cuMemcpyBatchAsync"), batches ? 3 : 0);
	ops->unmap(backend, mapping);
	ops->segment_free(backend, segment);
	ops->stream_free(backend, stream);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
	free(data);
	free(back);
}

static void test_gpu_cuda__copies_in_batches(void **state)
{
	check_copies(true);
}

/* An event is done when what was before it is, and not before. */
static void test_gpu_cuda__events(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	struct kvg_event *event;
	kvg_stream stream;
	uint8_t byte = 0;
	kvg_devptr at;

	assert_int_equal(ops->stream_new(backend, &stream), 0);
	assert_int_equal(ops->event_new(backend, &event), 0);
	assert_int_equal(ops->event_query(backend, event), 0);
	assert_int_equal(ops->segment_new(backend, GRANULE, &segment), 0);
	assert_int_equal(ops->map(backend, &segment, 1, true, &mapping), 0);
	at = ops->address(backend, mapping);
	assert_int_equal(ops->fill(backend, stream, at, 5, 0), 0);
	assert_int_equal(ops->fill(backend, stream, at, 5, GRANULE), 0);
	assert_int_equal(ops->event_record(backend, event, stream), 0);
	fakecu_hold(true);
	for (int i = 0; i < 5; i++)
		assert_int_equal(ops->event_query(backend, event), -EAGAIN);
	fakecu_hold(false);
	assert_int_equal(ops->event_query(backend, event), -EAGAIN);
	assert_int_equal(ops->event_query(backend, event), 0);
	unit_gpu_read(backend, at + GRANULE - 1, &byte, 1);
	assert_int_equal(byte, 5);
	ops->event_free(backend, event);
	ops->event_free(backend, NULL);
	ops->stream_free(backend, stream);
	ops->stream_free(backend, NULL);
	ops->unmap(backend, mapping);
	ops->segment_free(backend, segment);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
}

/* ---- Host memory ---- */

/* Memory files register, also read-only where the device can; twice is a mistake. */
static void test_gpu_cuda__registration(void **state)
{
	struct kvg_backend *backend = unit_gpu_open(ops, NULL);
	int fd = memfd_create("tier", MFD_CLOEXEC);
	struct fakecu_live live;
	uint8_t *memory, *readable;

	assert_int_equal(ftruncate(fd, GRANULE), 0);
	memory = mmap(NULL, GRANULE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	readable = mmap(NULL, GRANULE, PROT_READ, MAP_SHARED, fd, 0);
	assert_true(memory != MAP_FAILED && readable != MAP_FAILED);
	assert_int_equal(ops->host_register(backend, memory, GRANULE, 0), 0);
	assert_int_equal(ops->host_register(backend, memory, 4096, 0), -EINVAL);
	assert_int_equal(ops->host_register(backend, readable, GRANULE, 0), -EINVAL);
	assert_int_equal(ops->host_register(backend, readable, GRANULE, KVG_REGISTER_READ_ONLY), 0);
	fakecu_live(&live);
	assert_int_equal(live.registrations, 2);
	ops->host_unregister(backend, memory);
	ops->host_unregister(backend, readable);
	/* Not registered any more: no harm. */
	ops->host_unregister(backend, readable);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();

	unit_gpu_set("FAKECU_ATTR", "113=0");
	backend = unit_gpu_open(ops, NULL);
	assert_int_equal(ops->host_register(backend, readable, GRANULE, KVG_REGISTER_READ_ONLY),
		-EOPNOTSUPP);
	kvg_backend_close(backend);
	unit_gpu_assert_nothing_lives();
	(void)munmap(memory, GRANULE);
	(void)munmap(readable, GRANULE);
	(void)close(fd);
}

/* ---- Every call that can fail ---- */

/* All that a client and a helper do; undone in full whatever fails. The first error is returned. */
static int live_a_life(void)
{
	const struct kvg_backend_open options = {.device = "0"};
	static uint8_t memory[4096] __attribute__((aligned(4096)));
	struct kvg_copy copies[2];
	struct kvg_segment *segment = NULL, *import = NULL;
	struct kvg_mapping *mapping = NULL, *view = NULL;
	struct kvg_backend *backend = NULL;
	struct kvg_event *event = NULL;
	kvg_stream stream = NULL;
	bool registered = false;
	char error[256] = "";
	uint64_t bytes;
	int fd = -1, r;

	r = ops->open(&options, &backend, error, sizeof(error));
	if (r < 0) {
		assert_true(strlen(error) > 5);
		return r;
	}
	r = ops->free_bytes(backend, &bytes);
	r = r < 0 ? r : ops->segment_new(backend, GRANULE, &segment);
	r = r < 0 ? r : ops->map(backend, &segment, 1, true, &mapping);
	r = r < 0 ? r : ops->segment_export(backend, segment, &fd);
	r = r < 0 ? r : ops->segment_import(backend, fd, GRANULE, &import);
	r = r < 0 ? r
		  : ops->map(backend, (struct kvg_segment *[]){segment, import}, 2, false, &view);
	r = r < 0 ? r : ops->host_register(backend, memory, sizeof(memory), 0);
	registered = r == 0;
	r = r < 0 ? r : ops->stream_new(backend, &stream);
	r = r < 0 ? r : ops->event_new(backend, &event);
	if (r == 0) {
		uint64_t at = ops->address(backend, mapping), from = (uint64_t)(uintptr_t)memory;

		copies[0] = (struct kvg_copy){.to = at, .from = from, .size = 1000};
		copies[1] = (struct kvg_copy){.to = at + 2000, .from = from, .size = 1000};
		r = ops->fill(backend, stream, at, 0, GRANULE);
		r = r < 0 ? r : ops->copy(backend, stream, KVG_COPY_TO_DEVICE, copies, 2);
		r = r < 0 ? r : ops->copy(backend, stream, KVG_COPY_TO_DEVICE, copies, 1);
		copies[1] = (struct kvg_copy){.to = from, .from = at, .size = 1000};
		r = r < 0 ? r : ops->copy(backend, stream, KVG_COPY_TO_HOST, copies + 1, 1);
		copies[1] = (struct kvg_copy){.to = at + 4096, .from = at, .size = 1000};
		r = r < 0 ? r : ops->copy(backend, stream, KVG_COPY_ON_DEVICE, copies + 1, 1);
	}
	r = r < 0 ? r : ops->event_record(backend, event, stream);
	for (int i = 0; i < 100; i++) {
		int queried = r < 0 ? r : ops->event_query(backend, event);

		if (queried == -EAGAIN)
			continue;
		r = queried;
		break;
	}
	r = r < 0 ? r : ops->stream_sync(backend, stream);
	ops->event_free(backend, event);
	ops->stream_free(backend, stream);
	if (registered)
		ops->host_unregister(backend, memory);
	ops->unmap(backend, view);
	ops->unmap(backend, mapping);
	ops->segment_free(backend, import);
	ops->segment_free(backend, segment);
	if (fd >= 0)
		(void)close(fd);
	kvg_backend_close(backend);
	return r;
}

/* All that may fail; of those that free, the fake would leak what they do not free. */
static const char *const fallible[] = {"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName",
	"cuDeviceTotalMem", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemGetInfo",
	"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle",
	"cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle",
	"cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemHostRegister", "cuStreamCreate",
	"cuEventCreate", "cuMemsetD8Async", "cuMemcpyBatchAsync", "cuMemcpyHtoDAsync",
	"cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuEventRecord", "cuEventQuery",
	"cuStreamSynchronize"};

/* Calls whose failure is of no consequence: while freeing, or of what may be missing. */
static bool is_tolerated(const char *name, unsigned nth)
{
	/* Those of the frees, which come last. */
	if (strcmp(name, "cuCtxPushCurrent") == 0)
		return nth > 16;
	return strcmp(name, "cuStreamSynchronize") == 0 && nth == 2;
}

static void check_failures(unsigned code, int expected)
{
	for (size_t i = 0; i < sizeof(fallible) / sizeof(fallible[0]); i++) {
		unsigned calls;

		fakecu_reset();
		assert_int_equal(live_a_life(), 0);
		unit_gpu_assert_nothing_lives();
		calls = fakecu_calls(fallible[i]);
		assert_true(calls > 0);
		for (unsigned nth = 1; nth <= calls; nth++) {
			int r;

			fakecu_reset();
			fakecu_fail(fallible[i], nth, false, code);
			r = live_a_life();
			if (r != 0 || !is_tolerated(fallible[i], nth)) {
				if (r != expected && r != -ENODEV)
					fail_msg("%s:%u:%u gave %d", fallible[i], nth, code, r);
				unit_gpu_assert_nothing_lives();
			}
		}
	}
}

/* Out of memory, at each call: -ENOMEM, and nothing is left. */
static void test_gpu_cuda__out_of_memory_at_each_call(void **state)
{
	check_failures(KVG_CU_OUT_OF_MEMORY, -ENOMEM);
}

/* Any other error, at each call: -EIO, and nothing is left. */
static void test_gpu_cuda__an_error_at_each_call(void **state)
{
	check_failures(KVG_CU_UNKNOWN, -EIO);
}

/* What fails while something is freed harms nobody: the work was done. */
static void test_gpu_cuda__an_error_while_freeing(void **state)
{
	static const char *const frees[] = {"cuMemRelease", "cuMemUnmap", "cuMemAddressFree",
		"cuMemHostUnregister", "cuStreamDestroy", "cuEventDestroy", "cuCtxPopCurrent",
		"cuDevicePrimaryCtxRelease"};

	for (size_t i = 0; i < sizeof(frees) / sizeof(frees[0]); i++) {
		fakecu_reset();
		fakecu_fail(frees[i], 1, false, KVG_CU_UNKNOWN);
		assert_int_equal(live_a_life(), 0);
		assert_true(fakecu_calls(frees[i]) > 0);
	}
	fakecu_reset();
}

/* An error that the process cannot get over, at each call: -EIO, from then on. */
static void test_gpu_cuda__a_fatal_error_at_each_call(void **state)
{
	for (size_t i = 0; i < sizeof(fallible) / sizeof(fallible[0]); i++) {
		int r;

		fakecu_reset();
		fakecu_fail(fallible[i], 1, false, KVG_CU_LAUNCH_FAILED);
		r = live_a_life();
		if (r != -EIO && r != -ENODEV)
			fail_msg("%s gave %d", fallible[i], r);
	}
	fakecu_reset();
}

/* The driver's codes, as what callers act upon. */
static void test_gpu_cuda__errors(void **state)
{
	static const struct {
		unsigned code;
		int error;
		bool fatal;
	} cases[] = {
		{0, 0, false},
		{1, -EINVAL, false},
		{2, -ENOMEM, false},
		{46, -ENODEV, false},
		{100, -ENODEV, false},
		{101, -ENODEV, false},
		{201, -EIO, false},
		{214, -EIO, true},
		{400, -EINVAL, false},
		{600, -EAGAIN, false},
		{700, -EIO, true},
		{702, -EIO, true},
		{712, -EINVAL, false},
		{719, -EIO, true},
		{801, -EOPNOTSUPP, false},
		{999, -EIO, false},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		assert_int_equal(kvg_cuda_errno(cases[i].code), cases[i].error);
		assert_int_equal(kvg_cuda_is_fatal(cases[i].code), cases[i].fatal);
	}
}

/* ---- Which backend is taken, and why not a better one: in a process of its own ---- */

/* Prints what kvg_backend_choose says into the socket. */
static int run_chooser(void)
{
	const struct kvg_backend_open options = {.client = getenv("UNIT_CLIENT") != NULL};
	const char *name = getenv("UNIT_BACKEND");
	struct kvg_backend *backend = NULL;
	char reasons[1024], line[1200];
	int r = kvg_backend_choose(name, &options, &backend, reasons, sizeof(reasons));

	(void)snprintf(line, sizeof(line), "%s: %s", r < 0 ? "none" : backend->ops->name, reasons);
	(void)send(3, line, strlen(line) + 1, 0);
	kvg_backend_close(backend);
	return 0;
}

/* WANTED must be in what a process says that chooses with VARIABLE set to VALUE. */
static void check_choice(const char *variable, const char *value, const char *wanted)
{
	struct unit_child child;
	char line[1200] = "";

	unit_gpu_clear_environment();
	assert_int_equal(setenv(variable, value, 1), 0);
	child = unit_child_start("chooser");
	assert_true(recv(child.socket, line, sizeof(line) - 1, 0) > 0);
	assert_int_equal(unit_child_end(&child), 0);
	assert_int_equal(unsetenv(variable), 0);
	if (!strstr(line, wanted))
		fail_msg("%s=%s: '%s' is not in '%s'", variable, value, wanted, line);
}

static void test_gpu_cuda__the_choice_says_why(void **state)
{
	check_choice("UNIT_NOTHING", "1",
		"cuda: cufile: reads from drives past the CPU only with --backend cufile");
	check_choice("UNIT_BACKEND", "cufile", "cufile: ");
	check_choice("UNIT_BACKEND", "cuda", "cuda: ");
	check_choice("UNIT_BACKEND", "metal", "none: there is no backend 'metal'");
	check_choice("FAKECU_DEVICES", "0", "host: cuda: cuInit: CUDA_ERROR_NO_DEVICE (100)");
	check_choice("FAKECU_STUB", "1", "libcuda.so.1 is the toolkit's stub");
	check_choice("FAKECU_ATTR", "102=0",
		"cuda: Modelled H200 has no virtual memory management here");
	check_choice("FAKECU_ATTR", "103=0", "has no sharing of memory by file descriptors");
	check_choice("FAKECU_VERSION", "11040",
		"host: cuda: the NVIDIA driver is of CUDA 11.4: install 525");
	check_choice("FAKECU_HIDE", "cuMemCreate",
		"host: cuda: the NVIDIA driver has no cuMemCreate of CUDA 10.2");
	check_choice("FAKECU_FAIL", "cuInit:1:999", "cuInit: CUDA_ERROR_UNKNOWN (999)");
	check_choice("FAKECU_FAIL", "cuDriverGetVersion:1+:3",
		"cuDriverGetVersion: CUDA_ERROR_NOT_INITIALIZED (3)");
	check_choice("FAKECU_FAIL", "cuDevicePrimaryCtxRetain:1+:2",
		"host: cuda: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2)");
	check_choice("UNIT_CLIENT", "1", "cuda: cufile: ");
}

/* A driver before CUDA 12.8 has no batches: the copies are made one by one. */
static int run_copier(void)
{
	check_copies(false);
	return 0;
}

static void test_gpu_cuda__copies_one_by_one(void **state)
{
	struct unit_child child;

	assert_int_equal(setenv("FAKECU_VERSION", "12060", 1), 0);
	child = unit_child_start("copier");
	assert_int_equal(unit_child_end(&child), 0);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(test_gpu_cuda__info, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__mig, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__devices, unit_gpu_setup),
		cmocka_unit_test_setup(
			test_gpu_cuda__client_uses_the_current_context, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__no_context_is_left_current, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__map_is_one_range, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__bad_sizes, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__exports, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__import_from_another_device, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__memory_outlives_its_maker, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__orphans_are_seen, unit_gpu_setup),
		cmocka_unit_test_setup(
			test_gpu_cuda__a_store_to_read_only_memory_is_fatal, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__copies_in_batches, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__copies_one_by_one, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__events, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__registration, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__out_of_memory_at_each_call, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__an_error_at_each_call, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__an_error_while_freeing, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__a_fatal_error_at_each_call, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__errors, unit_gpu_setup),
		cmocka_unit_test_setup(test_gpu_cuda__the_choice_says_why, unit_gpu_setup),
	};

	if (argc > 1 && strcmp(argv[1], "exporter") == 0)
		return run_exporter();
	if (argc > 1 && strcmp(argv[1], "chooser") == 0)
		return run_chooser();
	if (argc > 1 && strcmp(argv[1], "copier") == 0)
		return run_copier();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
