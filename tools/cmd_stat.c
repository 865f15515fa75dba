/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs stat: where the bytes of files are, for people or as JSON.
 */
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>

#include "fs/base.h"
#include "fs/parse.h"
#include "tools/cmd.h"
#include "tools/report.h"
#include "tools/text.h"

static const char help_text[] =
	"usage: kvfs stat FILE... [--json]\n"
	"\n"
	"Shows of files on a kvfs mount: the tiers that hold them, size, version,\n"
	"hits, last use, and where on the devices their bytes are.\n"
	"\n"
	"  --json  print a JSON list with an object a file: sizes and offsets in bytes,\n"
	"          \"extents\" a list, \"chunks\" a list with the checksum of each\n";

/* The lines of the reports user.kvfs.map.N, one at a time. */
struct map {
	const char *path;
	struct kv_report page;
	size_t line;         /* the next one in page */
	uint64_t next_chunk; /* behind the last one seen */
};

/* An extent, or several that follow each other both in the file and on the device. */
struct run {
	uint64_t file_offset; /* bytes, as all here */
	uint64_t length;
	uint64_t device;
	uint64_t offset;
};

/* Loads the next page when the last one is used up. True if there is a line. */
static bool map_fill(struct map *map)
{
	char name[32];
	struct kv_report page;

	if (map->line < map->page.count)
		return true;
	(void)snprintf(name, sizeof(name), "map.%" PRIu64, map->next_chunk);
	if (kv_report_read(map->path, name, &page) < 0)
		return false;
	kv_report_done(&map->page);
	map->page = page;
	map->line = 0;
	return page.count > 0;
}

/* The chunk number and the rest of the next line KEY ("chunk" or "extent"). False at the end. */
static bool map_next(struct map *map, const char *key, uint64_t *ret_chunk, char **ret_rest)
{
	while (map_fill(map)) {
		const struct kv_report_line *line = &map->page.lines[map->line++];
		char *rest = line->value;
		uint64_t chunk = kv_report_word_number(&rest);

		/* A page that does not move on would be read for ever. */
		if (map->line == 1 && chunk < map->next_chunk)
			return false;
		map->next_chunk = chunk + 1;
		if (strcmp(line->key, key) == 0) {
			*ret_chunk = chunk;
			*ret_rest = rest;
			return true;
		}
	}
	return false;
}

static bool next_extent(struct map *map, struct run *ret_extent)
{
	uint64_t chunk, block;
	char *value;

	if (!map_next(map, "extent", &chunk, &value))
		return false;
	block = kv_report_word_number(&value);
	ret_extent->file_offset = (chunk << KV_CHUNK_SHIFT) + (block << KV_BLOCK_SHIFT);
	ret_extent->length = kv_report_word_number(&value) << KV_BLOCK_SHIFT;
	ret_extent->device = kv_report_word_number(&value);
	ret_extent->offset = kv_report_word_number(&value);
	return true;
}

/* Calls PRINT for the runs of PATH's extents, joined as far as they can be. */
static void each_run(const char *path, void (*print)(void *arg, const struct run *run), void *arg)
{
	struct map map = {.path = path};
	struct run run = {0}, extent;

	while (next_extent(&map, &extent)) {
		if (run.length > 0 && extent.device == run.device &&
			extent.file_offset == run.file_offset + run.length &&
			extent.offset == run.offset + run.length) {
			run.length += extent.length;
			continue;
		}
		if (run.length > 0)
			print(arg, &run);
		run = extent;
	}
	if (run.length > 0)
		print(arg, &run);
	kv_report_done(&map.page);
}

static void run_to_json(void *arg, const struct run *run)
{
	struct kv_json *json = arg;

	kv_json_open(json, NULL, '{');
	kv_json_number(json, "file_offset", run->file_offset);
	kv_json_number(json, "length", run->length);
	kv_json_number(json, "count", run->length >> KV_BLOCK_SHIFT);
	kv_json_number(json, "device", run->device);
	kv_json_number(json, "offset", run->offset);
	kv_json_close(json, '}');
}

static void chunks_to_json(const char *path, struct kv_json *json)
{
	struct map map = {.path = path};
	uint64_t number;
	char *value;

	kv_json_open(json, "chunks", '[');
	while (map_next(&map, "chunk", &number, &value)) {
		const char *sum = kv_report_word(&value);
		const char *state = kv_report_word(&value);

		kv_json_open(json, NULL, '{');
		kv_json_number(json, "number", number);
		kv_json_text(json, "state", state);
		/* Only what is on a device has a checksum. */
		if (strcmp(state, "hot") == 0 || strcmp(state, "cold") == 0)
			kv_json_text(json, "checksum", sum);
		else
			kv_json_null(json, "checksum");
		kv_json_close(json, '}');
	}
	kv_json_close(json, ']');
	kv_report_done(&map.page);
}

static void print_json(const struct kv_report *report, const char *path, struct kv_json *json)
{
	kv_json_open(json, NULL, '{');
	kv_json_text(json, "path", path);
	for (size_t i = 0; i < report->count; i++) {
		struct kv_report_line line = report->lines[i];

		if (strcmp(line.key, "chunks") == 0)
			line.key = "chunk_count";
		kv_report_line_to_json(&line, json);
	}
	kv_json_open(json, "extents", '[');
	each_run(path, run_to_json, json);
	kv_json_close(json, ']');
	chunks_to_json(path, json);
	kv_json_close(json, '}');
}

static void print_last_use(uint64_t ns)
{
	time_t seconds = (time_t)(ns / 1000000000u);
	struct tm tm;
	char text[32];

	if (ns == 0 || !localtime_r(&seconds, &tm) ||
		strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &tm) == 0)
		(void)snprintf(text, sizeof(text), "never");
	(void)printf("last use %s", text);
}

static void print_run(void *arg, const struct run *run)
{
	char length[16];
	bool *headed = arg;

	if (!*headed)
		(void)printf("     file offset    length  device   device offset\n");
	*headed = true;
	(void)printf("  %14" PRIu64 " %9s %7" PRIu64 "  %14" PRIu64 "\n", run->file_offset,
		kv_format_size(run->length, length, sizeof(length)), run->device, run->offset);
}

static void print_text(const struct kv_report *report, const char *path)
{
	char size[16], allocated[16];
	bool headed = false;

	kv_text_print(stdout, path);
	(void)printf("\n  size      %s (%" PRIu64 " bytes), %s allocated; inode %" PRIu64
		     ", version %s\n",
		kv_format_size(kv_report_number(report, "size"), size, sizeof(size)),
		kv_report_number(report, "size"),
		kv_format_size(kv_report_number(report, "blocks") << KV_BLOCK_SHIFT, allocated,
			sizeof(allocated)),
		kv_report_number(report, "ino"), kv_report_text(report, "version"));
	(void)printf("  tier      %s: of %" PRIu64 " chunks %" PRIu64 " in DRAM, %" PRIu64
		     " not yet on a device\n",
		kv_report_text(report, "tier"), kv_report_number(report, "chunks"),
		kv_report_number(report, "chunks_resident"),
		kv_report_number(report, "chunks_dirty"));
	(void)printf("  checksum  %s%s\n", kv_report_text(report, "checksum"),
		kv_report_number(report, "quarantined") ? "; QUARANTINED: it did not match" : "");
	(void)printf("  use       %" PRIu64 " hits, ", kv_report_number(report, "hits"));
	print_last_use(kv_report_number(report, "last_use_ns"));
	(void)printf("\n");
	each_run(path, print_run, &headed);
}

static int show(const char *command, const char *path, struct kv_json *json)
{
	struct kv_report report;
	struct stat st;

	if (stat(path, &st) < 0)
		return cmd_fail(command, "%s: %s", path, strerror(errno));
	if (!S_ISREG(st.st_mode))
		return cmd_fail(command, "%s: not a regular file", path);
	if (cmd_report(command, path, "stat", &report) != 0)
		return 1;
	if (json)
		print_json(&report, path, json);
	else
		print_text(&report, path);
	kv_report_done(&report);
	return 0;
}

int stat_main(int argc, char **argv)
{
	struct kv_json json = {.out = stdout};
	bool as_json = false;
	const struct cmd_option options[] = {{.name = "json", .flag = &as_json}};
	int status = 0;

	if (!cmd_options(argc, argv, help_text, options, 1, &status))
		return status;
	if (optind == argc)
		return cmd_bad_usage(argv[0], "FILE is missing");
	if (as_json)
		kv_json_open(&json, NULL, '[');
	for (int i = optind; i < argc; i++)
		status |= show(argv[0], argv[i], as_json ? &json : NULL);
	if (as_json)
		kv_json_close(&json, ']');
	return status;
}
