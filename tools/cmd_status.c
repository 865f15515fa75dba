/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs status: what a mount is doing, for people or as JSON.
 */
#include <inttypes.h>
#include <stdio.h>

#include "fs/base.h"
#include "fs/parse.h"
#include "fs/stats.h"
#include "tools/cmd.h"
#include "tools/report.h"

#define DEFAULT_DIRECTORY "/kv"

static const char help_text[] =
	"usage: kvfs status [DIR] [--json]\n"
	"\n"
	"Shows the kvfs mount that DIR is in (default " DEFAULT_DIRECTORY "): store, mode, DRAM\n"
	"tier, devices, and counters since it was mounted.\n"
	"\n"
	"  --json  print one JSON object: sizes in bytes, \"devices\" and \"users\" (those\n"
	"          nearest to their limits) lists, \"counters\" an object; kvfs(1) has\n"
	"          the units of all\n";

static bool is_list(const struct kv_report_line *line)
{
	return strcmp(line->key, "devices") == 0 || strcmp(line->key, "device") == 0 ||
	       strcmp(line->key, "stat") == 0 || strcmp(line->key, "user") == 0;
}

static void device_to_json(char *value, struct kv_json *json)
{
	kv_json_open(json, NULL, '{');
	kv_json_number(json, "number", kv_report_word_number(&value));
	kv_json_number(json, "size", kv_report_word_number(&value));
	kv_json_number(json, "blocks", kv_report_word_number(&value));
	kv_json_bool(json, "failed", kv_report_word_number(&value) != 0);
	kv_json_text(json, "answers", kv_report_word(&value));
	kv_json_number(json, "waiting_ms", kv_report_word_number(&value));
	kv_json_text(json, "path", value);
	kv_json_close(json, '}');
}

static void user_to_json(char *value, struct kv_json *json)
{
	kv_json_open(json, NULL, '{');
	kv_json_number(json, "uid", kv_report_word_number(&value));
	kv_json_number(json, "files", kv_report_word_number(&value));
	kv_json_number(json, "writers", kv_report_word_number(&value));
	kv_json_number(json, "space", kv_report_word_number(&value));
	kv_json_number(json, "dirty", kv_report_word_number(&value));
	kv_json_close(json, '}');
}

/* A list NAME of what the lines with KEY say. */
static void print_list(const struct kv_report *report, struct kv_json *json, const char *name,
	const char *key, void (*to_json)(char *value, struct kv_json *json))
{
	kv_json_open(json, name, '[');
	for (size_t i = 0; i < report->count; i++) {
		if (strcmp(report->lines[i].key, key) == 0)
			to_json(report->lines[i].value, json);
	}
	kv_json_close(json, ']');
}

static void print_json(const struct kv_report *report)
{
	struct kv_json json = {.out = stdout};

	kv_json_open(&json, NULL, '{');
	for (size_t i = 0; i < report->count; i++) {
		if (!is_list(&report->lines[i]))
			kv_report_line_to_json(&report->lines[i], &json);
	}
	print_list(report, &json, "devices", "device", device_to_json);
	print_list(report, &json, "users", "user", user_to_json);
	kv_json_open(&json, "counters", '{');
	for (size_t i = 0; i < report->count; i++) {
		char *value = report->lines[i].value;
		const char *name;

		if (strcmp(report->lines[i].key, "stat") != 0)
			continue;
		name = kv_report_word(&value);
		kv_json_number(&json, name, kv_report_word_number(&value));
	}
	kv_json_close(&json, '}');
	kv_json_close(&json, '}');
}

/* Prints LABEL and the size in field KEY of the report. */
static void print_size(const struct kv_report *report, const char *label, const char *key)
{
	char text[16];

	(void)printf(
		"%s%s", label, kv_format_size(kv_report_number(report, key), text, sizeof(text)));
}

static void print_uptime(uint64_t seconds)
{
	if (seconds >= 86400)
		(void)printf("%" PRIu64 "d ", seconds / 86400);
	if (seconds >= 3600)
		(void)printf("%" PRIu64 "h ", seconds / 3600 % 24);
	if (seconds >= 60)
		(void)printf("%" PRIu64 "m ", seconds / 60 % 60);
	(void)printf("%" PRIu64 "s\n", seconds % 60);
}

static void print_store(const struct kv_report *report)
{
	(void)printf("  store    %s: %" PRIu64 " inodes", kv_report_text(report, "store"),
		kv_report_number(report, "files"));
	print_size(report, ", ", "store_used");
	print_size(report, " of ", "store_total");
	print_size(report, " used, ", "store_busy");
	print_size(report, " in motion, ", "store_reserved");
	(void)printf(" promised\n");
}

static void print_mode(const struct kv_report *report)
{
	const char *reason = kv_report_text(report, "mode_reason");
	bool reasoned = *reason != '\0' && strcmp(reason, "-") != 0;

	(void)printf("  mode     %s%s%s%s\n", kv_report_text(report, "mode"), reasoned ? " (" : "",
		reasoned ? reason : "", reasoned ? ")" : "");
}

static void print_dram(const struct kv_report *report)
{
	print_size(report, "  DRAM     ", "dram_charged");
	print_size(report, " of ", "dram_budget");
	(void)printf(" used by %" PRIu64 " files", kv_report_number(report, "dram_objects"));
	print_size(report, "; ", "dram_dirty");
	print_size(report, " not yet on a device, ", "dram_zombie");
	(void)printf(" only kept by mappings; %s%s\n", kv_report_text(report, "dram_kind"),
		kv_report_number(report, "dram_huge") ? ", huge pages" : "");
}

static uint64_t counter(const struct kv_report *report, const char *name)
{
	size_t length = strlen(name);
	uint64_t number = 0;

	for (size_t i = 0; i < report->count; i++) {
		const char *value = report->lines[i].value;

		if (strcmp(report->lines[i].key, "stat") == 0 &&
			strncmp(value, name, length) == 0 && value[length] == ' ') {
			(void)kv_parse_u64(value + length + 1, &number);
			break;
		}
	}
	return number;
}

static void print_hits(const struct kv_report *report)
{
	uint64_t hot = counter(report, "open_hot");
	uint64_t all = hot + counter(report, "open_cold") + counter(report, "open_streamed");

	(void)printf("  opens    %" PRIu64 " for reading", all);
	if (all > 0) {
		uint64_t permille = (uint64_t)((unsigned __int128)hot * 1000 / all);

		(void)printf(", %" PRIu64 ".%" PRIu64 " %% of them found the file in DRAM",
			permille / 10, permille % 10);
	}
	(void)printf("; %" PRIu64 " handles open now\n", kv_report_number(report, "open_handles"));
}

static void print_users(const struct kv_report *report)
{
	for (size_t i = 0; i < report->count; i++) {
		char *value = report->lines[i].value;
		uint64_t uid, files, writers;
		char size[16];

		if (strcmp(report->lines[i].key, "user") != 0)
			continue;
		uid = kv_report_word_number(&value);
		files = kv_report_word_number(&value);
		writers = kv_report_word_number(&value);
		(void)printf("  user     %" PRIu64 ": %" PRIu64 " files open, %" PRIu64
			     " of them for writing; %s not published, ",
			uid, files, writers,
			kv_format_size(kv_report_word_number(&value), size, sizeof(size)));
		(void)printf("%s not yet on a device\n",
			kv_format_size(kv_report_word_number(&value), size, sizeof(size)));
	}
}

static void print_devices(const struct kv_report *report)
{
	(void)printf("\n  device       size  state   path\n");
	for (size_t i = 0; i < report->count; i++) {
		char *value = report->lines[i].value;
		char size[16];
		const char *answers;
		uint64_t number;
		bool failed, hung;

		if (strcmp(report->lines[i].key, "device") != 0)
			continue;
		number = kv_report_word_number(&value);
		(void)kv_format_size(kv_report_word_number(&value), size, sizeof(size));
		(void)kv_report_word(&value);
		failed = kv_report_word_number(&value) != 0;
		answers = kv_report_word(&value);
		(void)kv_report_word(&value);
		hung = strcmp(answers, "hung") == 0;
		(void)printf("  %6" PRIu64 " %10s  %-6s  %s\n", number, size,
			hung     ? "HUNG"
			: failed ? "FAILED"
				 : answers,
			value);
	}
}

static void print_counters(const struct kv_report *report)
{
	(void)printf("\n");
#define PRINT_COUNTER(name, help)                                                                  \
	(void)printf("  %-20s %14" PRIu64 "  %s\n", #name, counter(report, #name), help);
	KV_STATS(PRINT_COUNTER)
#undef PRINT_COUNTER
}

static void print_text(const struct kv_report *report, const char *directory)
{
	(void)printf("kvfs %s on %s, up ", kv_report_text(report, "version"), directory);
	print_uptime(kv_report_number(report, "uptime_s"));
	print_mode(report);
	print_store(report);
	print_dram(report);
	print_hits(report);
	print_users(report);
	print_devices(report);
	print_counters(report);
}

int status_main(int argc, char **argv)
{
	bool json = false;
	const struct cmd_option options[] = {{.name = "json", .flag = &json}};
	const char *directory;
	struct kv_report report;
	int status, r;

	if (!cmd_options(argc, argv, help_text, options, 1, &status))
		return status;
	if (argc - optind > 1)
		return cmd_bad_usage(argv[0], "more than one DIR");
	directory = optind < argc ? argv[optind] : DEFAULT_DIRECTORY;
	r = kv_report_read(directory, "status", &report);
	if (r == -ENODATA)
		return cmd_fail(
			argv[0], "%s is not on a kvfs mount; kvfs mount makes one", directory);
	if (r == -EACCES)
		return cmd_fail(argv[0],
			"%s: only root, who mounted it and the owner of its root may ask, for the "
			"figures are about everybody's files",
			directory);
	if (r < 0)
		return cmd_fail(argv[0], "%s: %s%s", directory, strerror(-r),
			optind < argc ? "" : "; name a directory on the mount");
	if (json)
		print_json(&report);
	else
		print_text(&report, directory);
	kv_report_done(&report);
	return 0;
}
