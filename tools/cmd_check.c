/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs check: looks for damage in a store that is not mounted, and repairs it.
 */
#include <inttypes.h>
#include <stdio.h>

#include "fs/base.h"
#include "fs/log.h"
#include "fs/parse.h"
#include "fs/store_check.h"
#include "tools/cmd.h"
#include "tools/json.h"
#include "tools/progress.h"
#include "tools/text.h"

/* As those of fsck(8). */
enum status {
	STATUS_CLEAN = 0,
	STATUS_REPAIRED = 1,
	STATUS_LEFT = 4,
	STATUS_FAILED = 8,
	STATUS_USAGE = 16,
};

static const char help_text[] =
	"usage: kvfs check STORE [--data] [--repair] [--json] [--quiet]\n"
	"\n"
	"Checks a store that is not mounted, or a copy of one: superblocks, and that\n"
	"names, files, blocks, free space and quotas agree. Nothing in it changes\n"
	"without --repair. Each line names what is wrong: the file, the blocks.\n"
	"\n"
	"  --data       read every byte, too, and compare the checksums\n"
	"  --repair     mend what can be mended; files that are not whole are dropped\n"
	"  --json       print the result as JSON\n"
	"  -q, --quiet  print no progress and no summary\n"
	"\n"
	"Exit status: 0 sound; 1 all was repaired; 4 damage is left; 8 it could not\n"
	"be checked; 16 wrong usage.\n";

struct printing {
	const char *command;
	bool as_json;
	struct kv_json json;
	bool dropping; /* the list of what is dropped has begun */
	struct kv_progress progress;
};

static void print_json_violation(struct kv_json *json, const struct kv_violation *violation)
{
	kv_json_open(json, NULL, '{');
	kv_json_text(json, "text", violation->text);
	if (violation->ino != 0)
		kv_json_number(json, "inode", violation->ino);
	if (violation->path)
		kv_json_text(json, "path", violation->path);
	if (violation->has_blocks) {
		kv_json_number(json, "device", violation->device);
		kv_json_number(json, "block", violation->block);
		kv_json_number(json, "blocks", violation->blocks);
	}
	kv_json_close(json, '}');
}

static void print_violation(struct printing *printing, const struct kv_violation *violation)
{
	kv_progress_clear(&printing->progress);
	kv_text_print(stdout, violation->text);
	if (violation->path) {
		(void)printf(", path ");
		kv_text_print(stdout, violation->path);
	}
	if (violation->has_blocks)
		(void)printf(", device %u blocks %" PRIu64 "-%" PRIu64, violation->device,
			violation->block, violation->block + violation->blocks - 1);
	(void)printf("\n");
}

static void found(void *arg, const struct kv_violation *violation)
{
	struct printing *printing = arg;

	if (printing->as_json)
		print_json_violation(&printing->json, violation);
	else
		print_violation(printing, violation);
}

static void begin_dropped(struct printing *printing)
{
	if (!printing->as_json || printing->dropping)
		return;
	kv_json_close(&printing->json, ']');
	kv_json_open(&printing->json, "dropped", '[');
	printing->dropping = true;
}

static void dropped(void *arg, const struct kv_violation *violation)
{
	struct printing *printing = arg;

	begin_dropped(printing);
	if (printing->as_json) {
		print_json_violation(&printing->json, violation);
		return;
	}
	kv_progress_clear(&printing->progress);
	(void)printf(
		"dropped: inode %" PRIu64 "%s", violation->ino, violation->path ? ", path " : "");
	kv_text_print(stdout, violation->path ? violation->path : "");
	(void)printf(": %s\n", violation->text);
}

static void progress(void *arg, const struct kv_store_progress *done)
{
	struct printing *printing = arg;

	printing->progress.files = done->files;
	printing->progress.bytes = done->bytes;
	printing->progress.total_files = done->total_files;
	printing->progress.total_bytes = done->total_bytes;
	kv_progress_show(&printing->progress);
}

static enum status status_of(const struct kv_store_check_result *result, int r)
{
	if (r < 0)
		return result->violations > 0 ? STATUS_LEFT : STATUS_FAILED;
	if (result->left)
		return STATUS_LEFT;
	return result->violations > 0 ? STATUS_REPAIRED : STATUS_CLEAN;
}

static void end_json(
	struct printing *printing, const struct kv_store_check_result *result, enum status status)
{
	static const char *const words[] = {
		[STATUS_CLEAN] = "sound",
		[STATUS_REPAIRED] = "repaired",
		[STATUS_LEFT] = "damaged",
		[STATUS_FAILED] = "failed",
	};
	struct kv_json *json = &printing->json;

	begin_dropped(printing);
	kv_json_close(json, ']');
	kv_json_number(json, "files_read", result->read.files);
	kv_json_number(json, "bytes_read", result->read.bytes);
	kv_json_text(json, "result", words[status]);
	kv_json_close(json, '}');
}

static void print_summary(const struct kv_store_check *check,
	const struct kv_store_check_result *result, enum status status)
{
	char text[16];

	if (check->data)
		(void)printf("read %" PRIu64 " files, %s\n", result->read.files,
			kv_format_size(result->read.bytes, text, sizeof(text)));
	if (status == STATUS_CLEAN)
		(void)printf("%s is sound\n", check->path);
	else if (status == STATUS_REPAIRED)
		(void)printf("%s: %" PRIu64 " things were wrong and are repaired, %" PRIu64
			     " files and directories were dropped\n",
			check->path, result->violations, result->dropped);
	else
		(void)printf("%s: %" PRIu64 " things are wrong%s\n", check->path,
			result->violations, check->repair ? "" : "; --repair mends what can be");
	if (result->hint)
		(void)printf("not repaired: %s\n", result->hint);
}

static int run(struct printing *printing, struct kv_store_check *check)
{
	struct kv_store_check_result result;
	char error[512] = "";
	enum status status;
	int r;

	if (printing->as_json) {
		kv_json_open(&printing->json, NULL, '{');
		kv_json_text(&printing->json, "store", check->path);
		kv_json_open(&printing->json, "violations", '[');
	}
	r = kv_store_check(check, &result, error, sizeof(error));
	status = status_of(&result, r);
	kv_progress_clear(&printing->progress);
	if (printing->as_json)
		end_json(printing, &result, status);
	else if (!printing->progress.quiet && status != STATUS_FAILED)
		print_summary(check, &result, status);
	if (r < 0)
		(void)cmd_fail(printing->command, "%s", error);
	return (int)status;
}

int check_main(int argc, char **argv)
{
	struct printing printing = {.command = argv[0], .json.out = stdout};
	struct kv_store_check check = {
		.found = {found, &printing},
		.dropped = {dropped, &printing},
		.progress = progress,
		.arg = &printing,
	};
	const struct cmd_option options[] = {
		{.name = "data", .flag = &check.data},
		{.name = "repair", .flag = &check.repair},
		{.name = "json", .flag = &printing.as_json},
		{.name = "quiet", .letter = 'q', .flag = &printing.progress.quiet},
	};
	int status;

	printing.progress.command = argv[0];
	if (!cmd_options(
		    argc, argv, help_text, options, sizeof(options) / sizeof(options[0]), &status))
		return status == 0 ? STATUS_CLEAN : STATUS_USAGE;
	if (argc - optind != 1) {
		(void)cmd_bad_usage(
			argv[0], optind == argc ? "STORE is missing" : "more than one STORE");
		return STATUS_USAGE;
	}
	check.path = argv[optind];
	printing.progress.quiet |= printing.as_json;
	/* What is found is told in full; the log would say it again, in part. */
	kv_log_setup(_KV_LOG_INVALID, KV_LOG_STDERR);
	return run(&printing, &check);
}
