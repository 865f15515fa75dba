/* SPDX-License-Identifier: Apache-2.0 */
/* The batch look-up against requests that lie: whatever comes, it answers or refuses, and reads
 * nothing outside of the request. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fs/lookup.h"
#include "tests/unit/unit_core.h"

#define FILES 5u

static int setup(void **state)
{
	struct unit *unit = calloc(1, sizeof(*unit));
	char name[2] = "a";

	assert_non_null(unit);
	unit_init(unit, (struct unit_sizes){.store = 64 * MIB, .dram = 32 * MIB});
	for (unsigned i = 0; i < FILES; i++, name[0]++)
		(void)unit_put(unit, name, 4096, i);
	*state = unit;
	return 0;
}

static int teardown(void **state)
{
	unit_done(*state);
	free(*state);
	return 0;
}

/* A request on the heap, where the sanitizers watch its ends. */
static struct kvfs_lookup *request_new(const char *names, size_t length, uint32_t count)
{
	struct kvfs_lookup *request = calloc(1, sizeof(*request));

	assert_non_null(request);
	memcpy(request->u.names, names, length);
	request->length = (uint32_t)length;
	request->count = count;
	return request;
}

static int ask(struct unit *unit, struct kvfs_lookup *request, struct kvfs_lookup *ret_answer)
{
	size_t size = 0;
	int r = kv_lookup_names(unit->core, KV_ROOT_INO, request, ret_answer, &size);

	if (r == 0)
		assert_int_equal(size, 24 + (request->count + 7) / 8);
	free(request);
	return r;
}

/* Names in any order: a bit for each. */
static void test_lookup__bits_are_those_of_the_names(void **state)
{
	static const char names[] = "a\0z\0e\0c\0aa\0b\0d\0y\0a";
	struct kvfs_lookup answer;

	assert_int_equal(ask(*state, request_new(names, sizeof(names), 9), &answer), 0);
	assert_int_equal(answer.count, 9);
	assert_int_equal(answer.leading, 1);
	assert_int_equal(answer.present, 6);
	assert_int_equal(answer.u.bitmap[0], 0x6d);
	assert_int_equal(answer.u.bitmap[1], 0x01);
}

/* An index that fails is no absence. */
static void test_lookup__of_what_is_no_directory(void **state)
{
	struct unit *unit = *state;
	struct kvfs_lookup *request = request_new("a", 2, 1), answer;
	size_t size;

	assert_int_equal(
		kv_lookup_names(unit->core, unit_lookup(unit, "a"), request, &answer, &size),
		-ENOTDIR);
	free(request);
}

/* A name in as many bytes as there are; then nothing but NULs, and nothing but names of a byte. */
static void test_lookup__requests_at_the_limits(void **state)
{
	struct kvfs_lookup answer, *request = request_new("", 0, 0);

	memset(request->u.names, 'n', KVFS_LOOKUP_BYTES);
	request->length = KVFS_LOOKUP_BYTES;
	request->count = 1;
	assert_int_equal(ask(*state, request, &answer), -EINVAL);

	request = request_new("", 0, KVFS_LOOKUP_BYTES / 2);
	request->length = KVFS_LOOKUP_BYTES;
	assert_int_equal(ask(*state, request, &answer), -EINVAL);

	request = request_new("", 0, KVFS_LOOKUP_BYTES / 2);
	request->length = KVFS_LOOKUP_BYTES;
	for (size_t i = 0; i < KVFS_LOOKUP_BYTES; i += 2)
		request->u.names[i] = 'a';
	assert_int_equal(ask(*state, request, &answer), 0);
	assert_int_equal(answer.leading, KVFS_LOOKUP_BYTES / 2);
	assert_int_equal(answer.present, KVFS_LOOKUP_BYTES / 2);

	request = request_new("", 0, KVFS_LOOKUP_BYTES / 2 + 1);
	request->length = KVFS_LOOKUP_BYTES;
	assert_int_equal(ask(*state, request, &answer), -EINVAL);
}

/* Noise, and noise made of pieces that each mean something. */
static void test_lookup__fuzz(void **state)
{
	static const char *const words[] = {
		"a", "b\0c", "", "/", ".", "..", "zz", "a\0", "\xff\xfe", "e"};
	uint64_t seed = 88172645463325252u;
	unsigned answered = 0, refused = 0;

	for (unsigned turn = 0; turn < 20000; turn++) {
		struct kvfs_lookup *request = request_new("", 0, 0), answer;
		size_t length = 0;
		uint32_t nuls = 0;

		for (unsigned i = 0; i < turn % 12; i++) {
			seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
			const char *word = words[seed % 10];
			size_t n = strlen(word) + (seed >> 8) % 2;

			memcpy(request->u.names + length, word, n);
			length += n;
		}
		for (size_t i = 0; i < length; i++)
			nuls += request->u.names[i] == '\0';
		request->length = seed % 7 == 0 ? (uint32_t)(seed >> 20) : (uint32_t)length;
		request->count = seed % 5 == 0 ? (uint32_t)(seed >> 30) : nuls;
		request->flags = seed % 11 == 0 ? KVFS_LOOKUP_STOP : 0;
		int r = ask(*state, request, &answer);
		assert_true(r == 0 || r == -EINVAL);
		answered += r == 0;
		refused += r < 0;
	}
	assert_true(answered > 1000 && refused > 1000);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_lookup__bits_are_those_of_the_names),
		cmocka_unit_test(test_lookup__of_what_is_no_directory),
		cmocka_unit_test(test_lookup__requests_at_the_limits),
		cmocka_unit_test(test_lookup__fuzz),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
