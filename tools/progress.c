/* SPDX-License-Identifier: Apache-2.0 */
/* The progress of a long command: see progress.h. */
#include "tools/progress.h"

#include <inttypes.h>
#include <stdio.h>

#include "fs/base.h"
#include "fs/parse.h"

#define BAR_WIDTH 30u
#define BAR_EVERY_MS 100
#define LINE_EVERY_MS 1000

static void print_state(const struct kv_progress *progress, FILE *out)
{
	char done[16], total[16];

	(void)fprintf(out, "%s of %s, %" PRIu64 " of %" PRIu64 " files",
		kv_format_size(progress->bytes, done, sizeof(done)),
		kv_format_size(progress->total_bytes, total, sizeof(total)), progress->files,
		progress->total_files);
}

static void draw_bar(struct kv_progress *progress)
{
	char bar[BAR_WIDTH + 1] = "";
	uint64_t total = kv_max_u64(progress->total_bytes, 1);
	uint64_t filled = kv_min_u64(progress->bytes / kv_max_u64(total / BAR_WIDTH, 1), BAR_WIDTH);

	for (unsigned i = 0; i < BAR_WIDTH; i++)
		bar[i] = i < filled ? '#' : '.';
	/* The line may have become shorter: what is left of the old one goes. */
	(void)fprintf(stderr, "\r[%s] ", bar);
	print_state(progress, stderr);
	(void)fprintf(stderr, "\033[K");
	(void)fflush(stderr);
	progress->drawn = true;
}

void kv_progress_show(struct kv_progress *progress)
{
	bool terminal = isatty(STDERR_FILENO);
	int64_t now = kv_monotonic_ms();

	if (progress->quiet || now < progress->due_ms)
		return;
	if (terminal) {
		draw_bar(progress);
	} else if (progress->due_ms != 0) {
		(void)printf("%s: ", progress->command);
		print_state(progress, stdout);
		(void)printf("\n");
		(void)fflush(stdout);
	}
	progress->due_ms = now + (terminal ? BAR_EVERY_MS : LINE_EVERY_MS);
}

void kv_progress_clear(struct kv_progress *progress)
{
	if (progress->drawn)
		(void)fprintf(stderr, "\r\033[K");
	progress->drawn = false;
	(void)fflush(stderr);
}
