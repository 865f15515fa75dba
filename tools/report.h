/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reports of the daemon (fs/control.h): an attribute's text, taken apart into lines `key value`.
 *
 * All pointers are into the report and live as long as it. Single-threaded. Errors: negative errno.
 */
#ifndef KVFS_TOOLS_REPORT_H
#define KVFS_TOOLS_REPORT_H

#include <stddef.h>
#include <stdint.h>

#include "tools/json.h"

struct kv_report_line {
	const char *key;
	char *value; /* "" if the line has none */
};

struct kv_report {
	char *text;
	struct kv_report_line *lines;
	size_t count;
};

/* Reads attribute user.kvfs.NAME of PATH. -ENODATA: PATH is not on a kvfs mount, or has no such
 * report. */
int kv_report_read(const char *path, const char *name, struct kv_report *ret_report);
/* A zeroed report is allowed. */
void kv_report_done(struct kv_report *report);

/* The value of the first line KEY, or "" if there is none. */
const char *kv_report_text(const struct kv_report *report, const char *key);
/* The same as a number: 0 if there is none, or it is no number. */
uint64_t kv_report_number(const struct kv_report *report, const char *key);

/*
 * Cuts the next word off *VALUE, in place: "" when there are no more. The last field of a line may
 * hold spaces, and is what is left in *VALUE.
 */
const char *kv_report_word(char **value);
uint64_t kv_report_word_number(char **value);

/* Writes LINE as a member of JSON's current object: a number, true or false, null ("-") or a text.
 */
void kv_report_line_to_json(const struct kv_report_line *line, struct kv_json *json);

#endif
