/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and times: -EINVAL or -ERANGE, or a value. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fs/parse.h"
#include "tests/fuzz/fuzz.h"

static void check(int r, uint64_t value, uint64_t untouched)
{
	if (r != 0 && ((r != -EINVAL && r != -ERANGE) || value != untouched))
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const uint64_t mark = UINT64_C(0x1234567812345678);
	char *text = malloc(size + 1);
	char formatted[16];
	uint64_t value;

	if (!text)
		return 0;
	if (size > 0)
		memcpy(text, data, size);
	text[size] = '\0';
	value = mark;
	check(kv_parse_u64(text, &value), value, mark);
	value = mark;
	check(kv_parse_duration_ms(text, &value), value, mark);
	value = mark;
	check(kv_parse_size_or_percent(text, UINT64_MAX, &value), value, mark);
	value = mark;
	check(kv_parse_size(text, &value), value, mark);
	if (strlen(kv_format_size(value, formatted, sizeof(formatted))) >= sizeof(formatted))
		abort();
	free(text);
	return 0;
}
