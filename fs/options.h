/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mount options: one table feeds parsing, checking and `--help`.
 *
 * Plain value; kv_options_init fills in the defaults, no clean-up is needed.
 */
#ifndef KVFS_FS_OPTIONS_H
#define KVFS_FS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "fs/log.h"

enum kv_passthrough_mode {
	KV_PASSTHROUGH_AUTO, /* on where the kernel and the privileges allow it */
	KV_PASSTHROUGH_ON,   /* the mount fails where it is not possible */
	KV_PASSTHROUGH_OFF,
};

struct kv_options {
	uint64_t dram_bytes; /* dram=SIZE|PERCENT: budget of the DRAM tier */
	uint64_t
		stream_above_bytes; /* stream_above=SIZE: larger files are served while they fill */
	uint64_t max_size_bytes;    /* max_size=SIZE: quota of the store; 0 = the devices' size */
	uint64_t read_wait_ms;      /* read_wait=TIME: how long an open waits for a first publish */
	uint64_t io_timeout_ms;     /* io_timeout=TIME: how long a call waits for a device */
	uint64_t lease_ms;          /* lease=TIME: so long after a look-up or open not evicted */
	uint64_t unread_ttl_ms; /* unread_ttl=TIME: never read until then: evicted first; 0: off */
	uint64_t user_files;    /* user_files=NUMBER: a user's open files; 0: no limit */
	uint64_t user_writers;  /* user_writers=NUMBER: those open for writing; 0: no limit */
	uint64_t user_space_percent; /* user_space=PERCENT of the store for what is not published */
	uint64_t user_dirty_percent; /* user_dirty=PERCENT of what may wait for write-back */
	bool allow_other;
	bool restart; /* a daemon that is killed is followed by another */
	enum kv_passthrough_mode passthrough;
	enum kv_log_level log_level; /* log=LEVEL */
};

/* Defaults for this machine: dram is 25 % of the memory. */
void kv_options_init(struct kv_options *options);

/*
 * Parses TEXT ("dram=8G,allow_other,ro...") into OPTIONS. Returns 0, or -EINVAL with one line in
 * ret_error (ret_error_size bytes) that names the option, the value, what is allowed and where help
 * is. OPTIONS is unchanged on failure.
 */
int kv_options_parse(
	struct kv_options *options, const char *text, char *ret_error, size_t ret_error_size);

/* Prints the table, a line or more an option, within 80 columns. */
void kv_options_help(FILE *out);

#endif
