/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads and takes apart the reports of the daemon.
 */
#include "tools/report.h"

#include <stdio.h>
#include <sys/xattr.h>

#include "fs/base.h"
#include "fs/control.h"
#include "fs/parse.h"

/* The kernel's limit for the value of an extended attribute. */
#define REPORT_SIZE_MAX 65536

static int split_lines(struct kv_report *report)
{
	size_t newlines = 0;
	char *p = report->text;

	for (const char *q = p; *q != '\0'; q++)
		newlines += *q == '\n';
	report->lines = calloc(newlines + 1, sizeof(report->lines[0]));
	if (!report->lines)
		return -ENOMEM;
	while (*p != '\0') {
		char *end = strchrnul(p, '\n');
		char *next = *end == '\0' ? end : end + 1;
		char *space;

		*end = '\0';
		space = strchr(p, ' ');
		if (space)
			*space = '\0';
		report->lines[report->count].key = p;
		report->lines[report->count].value = space ? space + 1 : end;
		report->count++;
		p = next;
	}
	return 0;
}

int kv_report_read(const char *path, const char *name, struct kv_report *ret_report)
{
	struct kv_report report = {0};
	char attribute[64];
	ssize_t length;
	int r;

	(void)snprintf(attribute, sizeof(attribute), KV_CONTROL_PREFIX "%s", name);
	report.text = malloc(REPORT_SIZE_MAX + 1);
	if (!report.text)
		return -ENOMEM;
	length = getxattr(path, attribute, report.text, REPORT_SIZE_MAX);
	if (length < 0) {
		/* Filesystems without extended attributes are no kvfs either. */
		r = errno == EOPNOTSUPP ? -ENODATA : -errno;
		kv_report_done(&report);
		return r;
	}
	report.text[length] = '\0';
	r = split_lines(&report);
	if (r < 0) {
		kv_report_done(&report);
		return r;
	}
	*ret_report = report;
	return 0;
}

void kv_report_done(struct kv_report *report)
{
	free(report->text);
	free(report->lines);
	*report = (struct kv_report){0};
}

const char *kv_report_text(const struct kv_report *report, const char *key)
{
	for (size_t i = 0; i < report->count; i++) {
		if (strcmp(report->lines[i].key, key) == 0)
			return report->lines[i].value;
	}
	return "";
}

uint64_t kv_report_number(const struct kv_report *report, const char *key)
{
	uint64_t number = 0;

	(void)kv_parse_u64(kv_report_text(report, key), &number);
	return number;
}

const char *kv_report_word(char **value)
{
	char *word = *value;
	char *end = strchrnul(word, ' ');

	*value = *end == '\0' ? end : end + 1;
	*end = '\0';
	return word;
}

uint64_t kv_report_word_number(char **value)
{
	uint64_t number = 0;

	(void)kv_parse_u64(kv_report_word(value), &number);
	return number;
}

static bool is_one_of(const char *key, const char *const *keys)
{
	for (; *keys; keys++) {
		if (strcmp(key, *keys) == 0)
			return true;
	}
	return false;
}

void kv_report_line_to_json(const struct kv_report_line *line, struct kv_json *json)
{
	static const char *const texts[] = {"store", "mode_reason", NULL};
	static const char *const flags[] = {"dram_huge", "quarantined", NULL};
	uint64_t number;

	if (strcmp(line->value, "-") == 0)
		kv_json_null(json, line->key);
	else if (is_one_of(line->key, flags))
		kv_json_bool(json, line->key, strcmp(line->value, "0") != 0);
	else if (!is_one_of(line->key, texts) && kv_parse_u64(line->value, &number) == 0)
		kv_json_number(json, line->key, number);
	else
		kv_json_text(json, line->key, line->value);
}
