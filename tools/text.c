/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text for terminals: see text.h.
 */
#include "tools/text.h"

size_t kv_text_length(const unsigned char *text)
{
	size_t length = text[0] >= 0xf0 ? 4 : text[0] >= 0xe0 ? 3 : 2;

	if (text[0] < 0x80)
		return 1;
	if (text[0] < 0xc2 || text[0] > 0xf4)
		return 0;
	for (size_t i = 1; i < length; i++) {
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	}
	/* Overlong forms, surrogates, and what lies beyond U+10FFFF. */
	if ((text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xed && text[1] > 0x9f) ||
		(text[0] == 0xf0 && text[1] < 0x90) || (text[0] == 0xf4 && text[1] > 0x8f))
		return 0;
	return length;
}

bool kv_text_is_control(const unsigned char *text)
{
	return text[0] < 0x20 || text[0] == 0x7f || (text[0] == 0xc2 && text[1] < 0xa0);
}

void kv_text_print(FILE *out, const char *text)
{
	const unsigned char *p = (const unsigned char *)text;

	while (*p != '\0') {
		size_t length = kv_text_length(p);

		if (length > 0 && !kv_text_is_control(p)) {
			(void)fwrite(p, 1, length, out);
			p += length;
			continue;
		}
		/* The second byte of a control character comes out as one that is alone. */
		(void)fprintf(out, "\\x%02x", *p++);
	}
}
