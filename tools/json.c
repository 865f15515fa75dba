/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The JSON writer.
 */
#include "tools/json.h"

#include <inttypes.h>
#include <stddef.h>

static void write_escaped(FILE *out, unsigned code)
{
	(void)fprintf(out, "\\u%04x", code);
}

/* Length of the valid UTF-8 sequence of two bytes or more at TEXT; 0 if there is none. */
static size_t sequence_length(const unsigned char *text)
{
	size_t length = text[0] >= 0xf0 ? 4 : text[0] >= 0xe0 ? 3 : 2;

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

static void write_string(FILE *out, const char *text)
{
	const unsigned char *p = (const unsigned char *)text;

	(void)fputc('"', out);
	while (*p != '\0') {
		size_t length = *p < 0x80 ? 1 : sequence_length(p);

		if (length == 0) {
			write_escaped(out, 0xdc00u + *p);
			length = 1;
		} else if (*p < 0x20 || *p == 0x7f) {
			write_escaped(out, *p);
		} else {
			if (*p == '"' || *p == '\\')
				(void)fputc('\\', out);
			(void)fwrite(p, 1, length, out);
		}
		p += length;
	}
	(void)fputc('"', out);
}

static void begin(struct kv_json *json, const char *key)
{
	if (json->more)
		(void)fputc(',', json->out);
	if (json->depth > 0)
		(void)fprintf(json->out, "\n%*s", (int)json->depth * 2, "");
	if (key) {
		write_string(json->out, key);
		(void)fputs(": ", json->out);
	}
	json->more = true;
}

void kv_json_open(struct kv_json *json, const char *key, char kind)
{
	begin(json, key);
	(void)fputc(kind, json->out);
	json->depth++;
	json->more = false;
}

void kv_json_close(struct kv_json *json, char kind)
{
	json->depth--;
	if (json->more)
		(void)fprintf(json->out, "\n%*s", (int)json->depth * 2, "");
	(void)fputc(kind, json->out);
	if (json->depth == 0)
		(void)fputc('\n', json->out);
	json->more = true;
}

void kv_json_number(struct kv_json *json, const char *key, uint64_t number)
{
	begin(json, key);
	(void)fprintf(json->out, "%" PRIu64, number);
}

void kv_json_bool(struct kv_json *json, const char *key, bool value)
{
	begin(json, key);
	(void)fputs(value ? "true" : "false", json->out);
}

void kv_json_null(struct kv_json *json, const char *key)
{
	begin(json, key);
	(void)fputs("null", json->out);
}

void kv_json_text(struct kv_json *json, const char *key, const char *text)
{
	begin(json, key);
	write_string(json->out, text);
}
