/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The JSON writer.
 */
#include "tools/json.h"

#include <inttypes.h>
#include <stddef.h>

#include "tools/text.h"

static void write_escaped(FILE *out, unsigned code)
{
	(void)fprintf(out, "\\u%04x", code);
}

static void write_string(FILE *out, const char *text)
{
	const unsigned char *p = (const unsigned char *)text;

	(void)fputc('"', out);
	while (*p != '\0') {
		size_t length = kv_text_length(p);

		if (length == 0) {
			write_escaped(out, 0xdc00u + *p);
			length = 1;
		} else if (kv_text_is_control(p)) {
			/* Of two bytes, the second one is the whole number. */
			write_escaped(out, p[length - 1]);
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
