/* SPDX-License-Identifier: Apache-2.0 */
/* libkvg without a helper: lists of segments, pull and push, on the fake driver. */
#include <stdlib.h>
#include <sys/mman.h>

#include "gpu/kvg_internal.h"
#include "tests/unit/unit_gpu.h"

#define FILE_SIZE (37 * MIB + 4321)

static struct kvg_ctx *ctx;
static uint8_t *content;

/* ---- Late answers ---- */

static void put_map_reply(int to, uint64_t id, uint64_t map, uint32_t flags, int status)
{
	static struct kvg_message reply;
	const uint64_t size = GRANULE;

	memset(&reply, 0, sizeof(reply));
	reply.type = KVG_MAP;
	reply.flags = KVG_FLAG_REPLY | flags;
	reply.id = id;
	reply.map = map;
	reply.status = status;
	if (status == 0) {
		kvg_sizes_put(&size, 1, &reply);
		reply.fds[0] = to;
		reply.fd_count = 1;
	}
	assert_int_equal(kvg_send(to, &reply), 0);
}

/* A mapping that came when nobody waited for it any more is given back, once. */
static void test_ctx__gives_back_what_comes_too_late(void **state)
{
	static struct kvg_message got;
	int ends[2];

	(void)state;
	assert_int_equal(
		socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
	ctx->fd = ends[0];
	ctx->had_helper = true;
	put_map_reply(ends[1], 99, 5, KVG_FLAG_MORE, 0);
	put_map_reply(ends[1], 99, 5, 0, 0);
	put_map_reply(ends[1], 98, 6, 0, -EIO);
	put_map_reply(ends[1], 97, 0, 0, -ENOSPC);
	assert_int_equal(kvg_dispatch(ctx), 0);
	for (uint64_t map = 5; map < 7; map++) {
		assert_int_equal(kvg_receive(ends[1], &got), 0);
		assert_int_equal(got.type, KVG_UNMAP);
		assert_int_equal(got.map, map);
	}
	assert_int_equal(kvg_receive(ends[1], &got), -EAGAIN);
	(void)close(ends[1]);
	assert_int_equal(kvg_dispatch(ctx), -EPIPE);
}

/* ---- Lists ---- */

static void assert_list(const struct kvg_seg *segs, size_t n, uint64_t most,
	const struct kvg_seg *wanted, size_t count)
{
	struct kvg_seg *list;
	size_t got;

	assert_int_equal(kvg_list_new(segs, n, most, &list, &got), 0);
	assert_int_equal(got, count);
	for (size_t i = 0; i < count; i++) {
		assert_int_equal(list[i].file_off, wanted[i].file_off);
		assert_int_equal(list[i].len, wanted[i].len);
		assert_int_equal(list[i].dst, wanted[i].dst);
	}
	free(list);
}

/* Neighbours on both sides become one, whatever their order; empty ones vanish. */
static void test_list__joins_neighbours(void **state)
{
	const struct kvg_seg segs[] = {
		{30, 10, 130}, {10, 10, 110}, {20, 10, 120}, {50, 0, 7}, {60, 5, 90}, {65, 5, 96}};
	const struct kvg_seg wanted[] = {{10, 30, 110}, {60, 5, 90}, {65, 5, 96}};

	(void)state;
	assert_list(segs, 6, UINT64_MAX, wanted, 3);
	assert_list(segs, 0, UINT64_MAX, NULL, 0);
}

/* What is longer than a slot is cut. */
static void test_list__cuts_long_ones(void **state)
{
	const struct kvg_seg seg = {100, 25, 1000};
	const struct kvg_seg wanted[] = {{100, 10, 1000}, {110, 10, 1010}, {120, 5, 1020}};

	(void)state;
	assert_list(&seg, 1, 10, wanted, 3);
	assert_list(&seg, 1, 25, &seg, 1);
}

/* Nothing wraps. */
static void test_list__refuses_overflow(void **state)
{
	const struct kvg_seg bad[] = {
		{UINT64_MAX, 2, 0}, {0, 2, UINT64_MAX}, {UINT64_MAX - 9, 1, 0}};
	struct kvg_seg *list;
	size_t count;

	(void)state;
	for (unsigned i = 0; i < 3; i++)
		assert_int_equal(kvg_list_new(&bad[i], 1, 10, &list, &count), -EINVAL);
}

/* ---- Transfers ---- */

static int setup(void **state)
{
	const struct kvg_opts opts = {
		.size = sizeof(opts), .flags = KVG_OPEN_NOHELPER, .backend = "cuda"};

	if (unit_gpu_setup(state) < 0 || kvg_open(&ctx, NULL, &opts) < 0)
		return -1;
	content = malloc(FILE_SIZE);
	for (uint64_t i = 0; i < FILE_SIZE; i++)
		content[i] = (uint8_t)(i * 11 ^ i >> 8 ^ i >> 16);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fakecu_heal();
	kvg_close(ctx);
	free(content);
	unit_gpu_assert_nothing_lives();
	return 0;
}

/* Who wants nothing to run on the device's multiprocessors has it so. */
static void test_open__without_kernels(void **state)
{
	const struct kvg_opts opts = {.size = sizeof(opts),
		.flags = KVG_OPEN_NOHELPER | KVG_OPEN_NOKERNELS,
		.backend = "cuda"};
	struct kvg_ctx *other;

	(void)state;
	assert_string_equal(ctx->info.kernels, "not tried yet");
	assert_int_equal(kvg_open(&other, NULL, &opts), 0);
	assert_string_equal(other->info.kernels, "off: not wanted");
	kvg_close(other);
}

static int new_file(bool filled)
{
	int fd = memfd_create("file", MFD_CLOEXEC);

	assert_true(fd >= 0);
	if (filled)
		assert_int_equal(pwrite(fd, content, FILE_SIZE, 0), FILE_SIZE);
	return fd;
}

/* Device memory of the engine's own. */
struct pool {
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	kvg_devptr address;
};

static void pool_init(struct pool *pool)
{
	struct kvg_backend *backend = ctx->backend;
	uint64_t size = (FILE_SIZE + GRANULE - 1) / GRANULE * GRANULE;

	assert_int_equal(backend->ops->segment_new(backend, size, &pool->segment), 0);
	assert_int_equal(backend->ops->map(backend, &pool->segment, 1, true, &pool->mapping), 0);
	pool->address = backend->ops->address(backend, pool->mapping);
}

static void pool_done(struct pool *pool)
{
	ctx->backend->ops->unmap(ctx->backend, pool->mapping);
	ctx->backend->ops->segment_free(ctx->backend, pool->segment);
}

static int finish(int r, struct kvg_op *op)
{
	if (r < 0)
		return r;
	r = kvg_op_poll(op, 60000);
	kvg_op_free(op);
	return r;
}

static int pull(int fd, const struct kvg_seg *segs, size_t n)
{
	struct kvg_op *op = NULL;
	int r = kvg_pull(ctx, fd, segs, n, NULL, &op);

	return finish(r, op);
}

static int push(int fd, const struct kvg_seg *segs, size_t n)
{
	struct kvg_op *op = NULL;
	int r = kvg_push(ctx, fd, segs, n, NULL, &op);

	return finish(r, op);
}

/* Blocks of a file, scattered over device memory and gathered again, are the file. */
static void test_op__what_was_pulled_can_be_pushed(void **state)
{
	static const uint64_t blocks[] = {32 << 10, 5000, 3 << 20, 20 << 20};
	struct pool pool;

	(void)state;
	pool_init(&pool);
	for (unsigned b = 0; b < 4; b++) {
		size_t n = (size_t)((FILE_SIZE + blocks[b] - 1) / blocks[b]);
		struct kvg_seg *segs = calloc(n, sizeof(*segs));
		uint8_t *back = malloc(FILE_SIZE);
		int from = new_file(true), to = new_file(false);
		uint64_t place = 0;

		/* Backwards in memory, so that no two are neighbours. */
		for (size_t i = n; i-- > 0;) {
			uint64_t at = i * blocks[b];

			segs[i].file_off = at;
			segs[i].len = FILE_SIZE - at < blocks[b] ? FILE_SIZE - at : blocks[b];
			segs[i].dst = pool.address + place;
			place += segs[i].len;
		}
		assert_int_equal(pull(from, segs, n), 0);
		assert_int_equal(push(to, segs, n), 0);
		assert_int_equal(pread(to, back, FILE_SIZE, 0), FILE_SIZE);
		assert_memory_equal(back, content, FILE_SIZE);
		free(back);
		free(segs);
		(void)close(from);
		(void)close(to);
	}
	pool_done(&pool);
}

/* Gaps are read over, and never written over. */
static void test_op__leaves_gaps_alone(void **state)
{
	const uint64_t ends[] = {0, 1000, 2000, 3000};
	struct kvg_seg segs[2];
	struct pool pool;
	uint8_t back[3000];
	int from = new_file(true), to = new_file(false);

	(void)state;
	pool_init(&pool);
	segs[0] = (struct kvg_seg){ends[0], 1000, pool.address};
	segs[1] = (struct kvg_seg){ends[2], 1000, pool.address + 5000};
	assert_int_equal(pwrite(to, memset(back, 'x', sizeof(back)), sizeof(back), 0), 3000);
	assert_int_equal(pull(from, segs, 2), 0);
	assert_int_equal(push(to, segs, 2), 0);
	assert_int_equal(pread(to, back, sizeof(back), 0), 3000);
	assert_memory_equal(back, content, 1000);
	assert_memory_equal(back + 2000, content + 2000, 1000);
	for (unsigned i = 1000; i < 2000; i++)
		assert_int_equal(back[i], 'x');
	(void)close(from);
	(void)close(to);
	pool_done(&pool);
}

/* Errors of the file's side: behind its end, the wrong way round, closed. */
static void test_op__reports_errors_of_the_file(void **state)
{
	struct pool pool;
	int fd = new_file(true), pipe_ends[2];

	(void)state;
	pool_init(&pool);
	const struct kvg_seg behind = {FILE_SIZE - 5, 10, pool.address};
	const struct kvg_seg good = {0, 10, pool.address};
	assert_int_equal(pull(fd, &behind, 1), -EINVAL);
	assert_int_equal(pull(-1, &good, 1), -EBADF);
	assert_int_equal(pipe(pipe_ends), 0);
	assert_int_equal(pull(pipe_ends[0], &good, 1), -ESPIPE);
	assert_int_equal(push(pipe_ends[0], &good, 1), -ESPIPE);
	assert_int_equal(pull(fd, &good, 0), 0);
	(void)close(pipe_ends[0]);
	(void)close(pipe_ends[1]);
	(void)close(fd);
	pool_done(&pool);
}

/* Every call of the driver fails once: an error, no leak, and it works afterwards. */
static void test_op__survives_any_failure_of_the_driver(void **state)
{
	static const char *const calls[] = {"cuMemHostRegister", "cuEventCreate", "cuEventRecord",
		"cuMemcpyBatchAsync", "cuStreamCreate"};
	struct pool pool;
	int fd = new_file(true), to = new_file(false);

	(void)state;
	pool_init(&pool);
	const struct kvg_seg segs[] = {
		{0, 9 * MIB, pool.address}, {9 * MIB, MIB, pool.address + 20 * MIB}};
	for (unsigned i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		for (unsigned nth = 1; nth < 3; nth++) {
			fakecu_fail(calls[i], nth, false, 2);
			int r = pull(fd, segs, 2);
			if (r == 0)
				r = push(to, segs, 2);
			assert_true(r == 0 || r == -ENOMEM);
			fakecu_heal();
			assert_int_equal(pull(fd, segs, 2), 0);
			assert_int_equal(push(to, segs, 2), 0);
		}
	}
	(void)close(fd);
	(void)close(to);
	pool_done(&pool);
}

/* A copy whose end cannot be marked has ended before its slot is used again. */
static void test_op__waits_for_copies_that_have_no_mark(void **state)
{
	struct pool pool;
	int fd = new_file(true), to = new_file(false);
	uint8_t *back = calloc(1, FILE_SIZE);

	(void)state;
	pool_init(&pool);
	const struct kvg_seg whole = {0, FILE_SIZE, pool.address};
	assert_int_equal(pull(fd, &whole, 1), 0);
	for (unsigned nth = 1; nth < 4; nth++) {
		struct kvg_op *op;
		unsigned syncs = fakecu_calls("cuStreamSynchronize");

		fakecu_fail("cuEventRecord", 1 + nth, false, 2);
		assert_int_equal(kvg_push(ctx, to, &whole, 1, NULL, &op), 0);
		assert_int_equal(kvg_op_poll(op, 60000), -ENOMEM);
		assert_non_null(strstr(kvg_error(ctx), "the transfer has failed: "));
		/* That of the failed one, and one for each thread's stream that ends. */
		kvg_op_free(op);
		assert_int_equal(fakecu_calls("cuStreamSynchronize") - syncs, 1 + 4);
		fakecu_heal();
		assert_int_equal(push(to, &whole, 1), 0);
		assert_int_equal(pread(to, back, FILE_SIZE, 0), FILE_SIZE);
		assert_memory_equal(back, content, FILE_SIZE);
	}
	free(back);
	(void)close(fd);
	(void)close(to);
	pool_done(&pool);
}

static unsigned open_descriptors(void)
{
	unsigned count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

/* Descriptors that come with an answer that has none are closed. */
static void test_ctx__closes_what_it_did_not_ask_for(void **state)
{
	static struct kvg_message reply;
	const struct kvg_wire_stat stat = {.clients = 5};
	struct kvg_stat_entry entries[64];
	unsigned before;
	size_t count;
	int ends[2];

	(void)state;
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
	ctx->fd = ends[0];
	before = open_descriptors();
	reply = (struct kvg_message){
		.type = KVG_STAT,
		.flags = KVG_FLAG_REPLY,
		.id = ctx->last_id + 1,
		.fds = {ends[1], ends[1]},
		.fd_count = 2,
	};
	kvg_stat_put(&stat, &reply);
	assert_int_equal(kvg_send(ends[1], &reply), 0);
	assert_int_equal(kvg_stats(ctx, -1, entries, 64, &count), 0);
	for (size_t i = 0; i < count; i++)
		if (strcmp(entries[i].name, "clients") == 0)
			assert_int_equal(entries[i].value, 5);
	assert_int_equal(open_descriptors(), before);
	(void)close(ends[1]);
}

/* An error that no process gets over: it is told in words, and nothing touches the driver again. */
static void test_ctx__a_lost_device(void **state)
{
	static const unsigned codes[] = {700, 214, 709, 719};

	for (unsigned i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
		struct kvg_buf *buf;
		struct pool pool;
		char words[64];
		unsigned calls;
		int fd;

		assert_int_equal(setup(state), 0);
		fd = new_file(true);
		pool_init(&pool);
		const struct kvg_seg segs[] = {
			{0, MIB, pool.address}, {2 * MIB, MIB, pool.address + 2 * MIB}};
		(void)snprintf(
			words, sizeof(words), "lost to this process (CUDA error %u)", codes[i]);
		assert_int_equal(pull(fd, segs, 2), 0);
		fakecu_fail("cuEventQuery", 1, false, codes[i]);
		assert_int_equal(pull(fd, segs, 2), -EIO);
		assert_non_null(strstr(kvg_error(ctx), words));
		calls = fakecu_calls("*");
		assert_int_equal(pull(fd, segs, 2), -EIO);
		assert_non_null(strstr(kvg_error(ctx), words));
		assert_int_equal(kvg_map(ctx, fd, 0, 0, 0, &buf), -EIO);
		assert_int_equal(fakecu_calls("*"), calls);
		assert_int_equal(kvg_last_cuda(ctx), codes[i]);
		assert_int_equal(push(fd, segs, 2), -EIO);
		assert_non_null(strstr(kvg_error(ctx), words));
		(void)close(fd);
		pool_done(&pool);
		kvg_close(ctx);
		free(content);
	}
}

/* While the link stands still an op is under way, and its end can be waited for. */
static void test_op__can_be_polled(void **state)
{
	struct kvg_op *op;
	struct pool pool;
	int fd = new_file(true);

	(void)state;
	pool_init(&pool);
	const struct kvg_seg seg = {0, 3 * MIB, pool.address};
	fakecu_hold(true);
	assert_int_equal(kvg_pull(ctx, fd, &seg, 1, NULL, &op), 0);
	assert_int_equal(kvg_op_poll(op, 0), -EAGAIN);
	assert_int_equal(kvg_op_poll(op, 50), -EAGAIN);
	fakecu_hold(false);
	assert_int_equal(kvg_op_poll(op, -1), 0);
	assert_int_equal(kvg_op_poll(op, 0), 0);
	kvg_op_free(op);
	(void)close(fd);
	pool_done(&pool);
}

/* What needs a helper says that there is none. */
static void test_ctx__without_a_helper(void **state)
{
	const struct kvg_opts opts = {.size = sizeof(opts), .backend = "cuda"};
	struct kvg_stat_entry entries[4];
	struct kvg_helper helper;
	struct kvg_ctx *other;
	struct kvg_buf *buf;
	size_t count;
	int fd = new_file(true);

	(void)state;
	assert_int_equal(kvg_map(ctx, fd, 0, 0, 0, &buf), -ENOTCONN);
	assert_int_equal(kvg_stats(ctx, -1, entries, 4, &count), -ENOTCONN);
	assert_int_equal(kvg_helper(ctx, &helper), -ENOTCONN);
	assert_int_equal(kvg_fd(ctx), -1);
	assert_int_equal(kvg_map(ctx, fd, 0, 0, 99, &buf), -EINVAL);
	assert_int_equal(kvg_map(ctx, fd, 0, 0, KVG_MAP_REVOCABLE, &buf), -EINVAL);
	assert_int_equal(kvg_open(&other, "/nowhere/socket", &opts), -ENOTCONN);
	assert_non_null(strstr(kvg_error(NULL), "no kvgpud listens at /nowhere/socket"));
	kvg_close(NULL);
	assert_int_equal(kvg_unmap(NULL, NULL), 0);
	kvg_op_free(NULL);
	(void)close(fd);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_list__joins_neighbours),
		cmocka_unit_test(test_list__cuts_long_ones),
		cmocka_unit_test(test_list__refuses_overflow),
		TEST(test_open__without_kernels),
		TEST(test_op__what_was_pulled_can_be_pushed),
		TEST(test_op__leaves_gaps_alone),
		TEST(test_op__reports_errors_of_the_file),
		TEST(test_op__survives_any_failure_of_the_driver),
		TEST(test_op__waits_for_copies_that_have_no_mark),
		cmocka_unit_test(test_ctx__a_lost_device),
		TEST(test_ctx__closes_what_it_did_not_ask_for),
		TEST(test_op__can_be_polled),
		TEST(test_ctx__without_a_helper),
		TEST(test_ctx__gives_back_what_comes_too_late),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
