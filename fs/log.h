/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The log: one line an event, `program[pid] level subsystem: message key=value ...`.
 *
 * Goes to stderr in the foreground, and to the system log (which journald reads) in the background;
 * lines that systemd reads from stderr (JOURNAL_STREAM set) carry its <N> priority prefix.
 * Core and index code logs only what nobody else can report; a request that fails is answered
 * with an errno instead. Any thread may log; a line is written by one system call.
 */
#ifndef KVFS_FS_LOG_H
#define KVFS_FS_LOG_H

#include <stdarg.h>
#include <stdbool.h>

enum kv_log_level {
	KV_LOG_ERROR,
	KV_LOG_WARNING,
	KV_LOG_INFO,
	KV_LOG_DEBUG,
	_KV_LOG_MAX,
	_KV_LOG_INVALID = -22,
};

enum kv_log_target {
	KV_LOG_STDERR,
	KV_LOG_SYSLOG,
};

/* Sets what is written and where to. Not thread-safe: call it before threads start. */
void kv_log_setup(enum kv_log_level level, enum kv_log_target target);

/* The level named TEXT ("error", "warning", "info", "debug"), or _KV_LOG_INVALID. */
enum kv_log_level kv_log_level_parse(const char *text);

bool kv_log_enabled(enum kv_log_level level);

/* SUBSYSTEM is a short static word ("index", "fill"). FORMAT ends without a newline. */
void kv_log(enum kv_log_level level, const char *subsystem, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

#define kv_log_error(...) kv_log(KV_LOG_ERROR, __VA_ARGS__)
#define kv_log_warning(...) kv_log(KV_LOG_WARNING, __VA_ARGS__)
#define kv_log_info(...) kv_log(KV_LOG_INFO, __VA_ARGS__)
#define kv_log_debug(...) kv_log(KV_LOG_DEBUG, __VA_ARGS__)

/*
 * True at most once a second for one LIMIT, which the caller keeps static and zeroed;
 * ret_suppressed receives how many calls answered false since the last true.
 */
struct kv_log_limit {
	long last_s;
	unsigned suppressed;
};
bool kv_log_allowed(struct kv_log_limit *limit, unsigned *ret_suppressed);

#endif
