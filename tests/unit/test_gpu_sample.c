/* SPDX-License-Identifier: Apache-2.0 */
/* Samples of segments and their checks, on the backend host. */
#include <errno.h>
#include <poll.h>
#include <sys/mman.h>

#include "fs/sum.h"
#include "gpu/sample.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)
#define SIZE (8 * MIB)
#define STRIP (SIZE / KVG_SAMPLES)

static struct kvg_backend_ops ops;
static struct kvg_backend *backend;
static struct kvg_checker *checker;
static struct kvg_segment *segment;
static struct kvg_mapping *mapping;
static struct kvg_samples *samples;
static uint8_t *memory; /* of the segment */
static int fail_copies;

static int copy(struct kvg_backend *b, kvg_stream stream, enum kvg_copy_kind kind,
	const struct kvg_copy *copies, size_t count)
{
	return fail_copies < 0 ? fail_copies
			       : kvg_backend_host.copy(b, stream, kind, copies, count);
}

static int setup(void **state)
{
	const struct kvg_backend_open open = {0};
	char reasons[256];

	(void)state;
	assert_int_equal(kvg_backend_choose("host", &open, &backend, reasons, sizeof(reasons)), 0);
	ops = kvg_backend_host;
	ops.copy = copy;
	backend->ops = &ops;
	fail_copies = 0;
	assert_int_equal(ops.segment_new(backend, SIZE, &segment), 0);
	assert_int_equal(ops.map(backend, &segment, 1, true, &mapping), 0);
	memory = (uint8_t *)(uintptr_t)ops.address(backend, mapping);
	for (uint64_t i = 0; i < SIZE; i++)
		memory[i] = (uint8_t)(i * 7 ^ i >> 11);
	samples = kvg_samples_new(SIZE);
	assert_non_null(samples);
	return kvg_checker_new(backend, &checker);
}

static int teardown(void **state)
{
	(void)state;
	checker = kvg_checker_free(checker);
	ops.unmap(backend, mapping);
	ops.segment_free(backend, segment);
	kvg_backend_close(backend);
	free(samples);
	return 0;
}

/* The result of one check; what it has learnt is kept. */
static int check(void)
{
	struct kvg_block_key key = {1, 2, 3, 4};
	struct pollfd fd = {.fd = kvg_checker_fd(checker), .events = POLLIN};
	struct kvg_check *done;
	int r = kvg_checker_start(checker, segment, samples, &key, &key);

	assert_int_equal(r, 0);
	assert_int_equal(poll(&fd, 1, 60000), 1);
	done = kvg_checker_reap(checker);
	assert_non_null(done);
	assert_null(kvg_checker_reap(checker));
	assert_int_equal(done->key.first, 4);
	assert_ptr_equal(done->arg, &key);
	*samples = done->samples;
	r = done->result;
	kvg_check_free(done);
	return r;
}

/* One in each strip, whole, and not the same ones for the next segment. */
static void test_sample__is_somewhere_in_each_strip(void **state)
{
	struct kvg_samples *other = kvg_samples_new(SIZE);
	unsigned same = 0;

	(void)state;
	assert_non_null(other);
	for (unsigned i = 0; i < KVG_SAMPLES; i++) {
		assert_in_range(
			samples->each[i].offset, i * STRIP, (i + 1) * STRIP - KVG_SAMPLE_SIZE);
		assert_false(samples->each[i].known);
		same += samples->each[i].offset == other->each[i].offset;
	}
	assert_true(same < KVG_SAMPLES);
	free(other);
	/* The least that a segment may have. */
	other = kvg_samples_new(KVG_SAMPLES * KVG_SAMPLE_SIZE);
	assert_non_null(other);
	for (unsigned i = 0; i < KVG_SAMPLES; i++)
		assert_int_equal(other->each[i].offset, i * KVG_SAMPLE_SIZE);
	free(other);
}

/* Bytes come in any pieces; a sample that no piece has all of is not known. */
static void test_sample__is_taken_of_whole_pieces(void **state)
{
	(void)state;
	kvg_samples_take(samples, memory, 0, samples->each[3].offset + KVG_SAMPLE_SIZE - 1);
	for (unsigned i = 0; i < KVG_SAMPLES; i++)
		assert_int_equal(samples->each[i].known, i < 3);
	kvg_samples_take(samples, memory + samples->each[3].offset, samples->each[3].offset,
		SIZE - samples->each[3].offset);
	for (unsigned i = 0; i < KVG_SAMPLES; i++)
		assert_int_equal(samples->each[i].sum,
			XXH3_64bits(memory + samples->each[i].offset, KVG_SAMPLE_SIZE));
	assert_int_equal(check(), 0);
}

/* What is written over two strips is found; what is beside all samples is not. */
static void test_sample__finds_what_was_written(void **state)
{
	(void)state;
	kvg_samples_take(samples, memory, 0, SIZE);
	assert_int_equal(check(), 0);
	memory[samples->each[0].offset > 0 ? 0 : KVG_SAMPLE_SIZE] ^= 1;
	assert_int_equal(check(), 0);
	memset(memory + 5 * STRIP, 0x5a, 2 * STRIP);
	assert_int_equal(check(), -EBADMSG);
}

/* Without sums of what was loaded, the first check learns them. */
static void test_sample__is_learnt(void **state)
{
	(void)state;
	assert_int_equal(check(), 0);
	assert_true(samples->each[9].known);
	memory[samples->each[9].offset + 17] ^= 1;
	assert_int_equal(check(), -EBADMSG);
}

/* A check of memory that was freed meanwhile has it still; one that fails says so. */
static void test_sample__check_has_its_own_mapping(void **state)
{
	const struct kvg_block_key key = {0};

	(void)state;
	kvg_samples_take(samples, memory, 0, SIZE);
	fail_copies = -EIO;
	assert_int_equal(check(), -EIO);
	fail_copies = 0;
	assert_int_equal(kvg_checker_start(checker, segment, samples, &key, NULL), 0);
	ops.unmap(backend, mapping);
	ops.segment_free(backend, segment);
	mapping = NULL;
	segment = NULL;
	/* It is left to the checker's end. */
}

#define TEST(name) cmocka_unit_test_setup_teardown(test_sample__##name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(is_somewhere_in_each_strip),
		TEST(is_taken_of_whole_pieces),
		TEST(finds_what_was_written),
		TEST(is_learnt),
		TEST(check_has_its_own_mapping),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
