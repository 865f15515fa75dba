/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names and bytes that follow from a number.
 *
 * Every page has a stamp of its file and page number in its first and its last word, and between
 * them words that are the same in all pages. So making a block another file's costs two words a
 * page, far below the cost of storing it, and a page of another place, a torn page, and zeros are
 * all told apart.
 */
#include <string.h>

#include "fs/base.h"
#include "tools/bench/kvbench.h"

#define PAGE_WORDS (PAGE_BYTES / sizeof(uint64_t))
/* Names are like those of vLLM's blocks: 32 bytes of hash in hexadecimal. */
#define NAME_HASHES 4u

/* The finaliser of splitmix64: all bits of the result depend on all bits of X. */
uint64_t pattern_mix(uint64_t x)
{
	x += UINT64_C(0x9e3779b97f4a7c15);
	x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
	return x ^ (x >> 31);
}

static char *put_hex(char *out, uint64_t value, unsigned digits)
{
	static const char hex[] = "0123456789abcdef";

	while (digits > 0)
		*out++ = hex[(value >> (4 * --digits)) & 15];
	return out;
}

void pattern_fan(uint64_t number, char ret_name[static NAME_BYTES])
{
	*put_hex(ret_name, number, 4) = '\0';
}

void pattern_name(const struct bench *bench, uint64_t number, char ret_name[static NAME_BYTES])
{
	char *out = ret_name;

	if (bench->fan > 0) {
		out = put_hex(out, number % bench->fan, 4);
		*out++ = '/';
	}
	for (unsigned i = 0; i < NAME_HASHES; i++)
		out = put_hex(out, pattern_mix(number * NAME_HASHES + i), 16);
	memcpy(out, ".bin", sizeof(".bin"));
}

static uint64_t stamp_of(struct place place)
{
	return pattern_mix(place.file << 32 ^ place.offset / PAGE_BYTES);
}

void pattern_fill(void *memory, uint64_t size)
{
	uint64_t *word = memory;

	assert(size % PAGE_BYTES == 0);
	for (uint64_t i = 0; i < size / sizeof(*word); i++)
		word[i] = pattern_mix(i % PAGE_WORDS);
}

void pattern_stamp(void *memory, uint64_t size, struct place place)
{
	uint64_t *word = memory;

	assert(size % PAGE_BYTES == 0 && place.offset % PAGE_BYTES == 0);
	for (uint64_t done = 0; done < size; done += PAGE_BYTES) {
		uint64_t stamp = stamp_of(place);

		word[0] = stamp;
		word[PAGE_WORDS - 1] = ~stamp;
		word += PAGE_WORDS;
		place.offset += PAGE_BYTES;
	}
}

static bool check_stamp(const uint64_t *word, struct place place)
{
	uint64_t stamp = stamp_of(place);

	return word[0] == stamp && word[PAGE_WORDS - 1] == ~stamp;
}

bool pattern_check(const void *memory, uint64_t size, struct place place, bool all)
{
	const uint64_t *word = memory;

	assert(size > 0 && size % PAGE_BYTES == 0 && place.offset % PAGE_BYTES == 0);
	for (uint64_t done = 0; done < size; done += PAGE_BYTES) {
		const uint64_t *page = word + done / sizeof(*word);

		if (!all && done > 0 && done + PAGE_BYTES < size)
			done = size - 2 * PAGE_BYTES; /* the next page is the last one */
		else if (!check_stamp(page, (struct place){place.file, place.offset + done}))
			return false;
		for (unsigned i = 1; all && i + 1 < PAGE_WORDS; i++) {
			if (page[i] != pattern_mix(i))
				return false;
		}
	}
	return true;
}
