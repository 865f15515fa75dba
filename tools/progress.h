/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far a long command is: a bar on a terminal, else a line on stdout every second.
 *
 * Plain value; single-threaded. Never fails.
 */
#ifndef KVFS_TOOLS_PROGRESS_H
#define KVFS_TOOLS_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct kv_progress {
	const char *command;
	uint64_t total_bytes;
	uint64_t total_files;
	uint64_t bytes; /* done */
	uint64_t files; /* done */
	bool quiet;
	bool drawn;     /* a bar stands in the terminal's current line */
	int64_t due_ms; /* when to show the next state */
};

/* Shows the state, if it is time. */
void kv_progress_show(struct kv_progress *progress);
/* Takes the bar away, so that a message can be printed. */
void kv_progress_clear(struct kv_progress *progress);

#endif
