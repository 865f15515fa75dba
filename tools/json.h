/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes JSON to a stream, indented, member by member.
 *
 * Plain value, no clean-up. Errors are the stream's: ferror() tells. KEY is NULL inside lists.
 */
#ifndef KVFS_TOOLS_JSON_H
#define KVFS_TOOLS_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct kv_json {
	FILE *out;
	unsigned depth;
	bool more; /* something was written before at this depth */
};

/* KIND is '{' or '['. */
void kv_json_open(struct kv_json *json, const char *key, char kind);
/* KIND is '}' or ']'; after the outermost a newline is written. */
void kv_json_close(struct kv_json *json, char kind);

void kv_json_number(struct kv_json *json, const char *key, uint64_t number);
void kv_json_bool(struct kv_json *json, const char *key, bool value);
void kv_json_null(struct kv_json *json, const char *key);
/*
 * File names may hold any byte: one that is not part of valid UTF-8 is written as \udcXX, which
 * Python's "surrogateescape" turns back.
 */
void kv_json_text(struct kv_json *json, const char *key, const char *text);

#endif
