/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The log: composes one line an event and hands it to stderr or the system log in one call.
 */
#include "fs/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>

/* Longer messages are cut; a name of a file (1023 bytes, escaped) and its context still fit. */
#define MESSAGE_MAX 3072
#define LINE_MAX_BYTES (MESSAGE_MAX + 128)

static const struct {
	const char *name;
	int priority;
} levels[_KV_LOG_MAX] = {
	[KV_LOG_ERROR] = {"error", LOG_ERR},
	[KV_LOG_WARNING] = {"warning", LOG_WARNING},
	[KV_LOG_INFO] = {"info", LOG_INFO},
	[KV_LOG_DEBUG] = {"debug", LOG_DEBUG},
};

static enum kv_log_level log_level = KV_LOG_INFO;
static enum kv_log_target log_target = KV_LOG_STDERR;
static bool log_prefix; /* stderr is the journal, which takes a "<3>" in front as the priority */

/* The variable is inherited by children whose stderr is something else: systemd names the file. */
static bool stderr_is_journal(void)
{
	const char *text = getenv("JOURNAL_STREAM");
	struct stat st;
	uintmax_t device, inode;

	if (!text || sscanf(text, "%ju:%ju", &device, &inode) != 2 || fstat(STDERR_FILENO, &st) < 0)
		return false;
	return st.st_dev == device && st.st_ino == inode;
}

void kv_log_setup(enum kv_log_level level, enum kv_log_target target)
{
	log_level = level;
	log_target = target;
	log_prefix = target == KV_LOG_STDERR && stderr_is_journal();
	if (target == KV_LOG_SYSLOG)
		openlog(program_invocation_short_name, LOG_PID, LOG_DAEMON);
}

enum kv_log_level kv_log_level_parse(const char *text)
{
	for (int i = 0; i < _KV_LOG_MAX; i++)
		if (strcmp(text, levels[i].name) == 0)
			return (enum kv_log_level)i;
	return _KV_LOG_INVALID;
}

bool kv_log_enabled(enum kv_log_level level)
{
	return level <= log_level;
}

/*
 * Copies TEXT so that it stays one line and cannot drive a terminal: names of files are the
 * users' to choose. Bytes above ASCII pass, they are mostly UTF-8.
 */
static void escape(char *to, size_t size, const char *text)
{
	size_t used = 0;

	for (; *text != '\0'; text++) {
		unsigned char c = (unsigned char)*text;
		bool plain = c >= 0x20 && c != 0x7f && c != '\\';

		if (used + (plain ? 1 : 4) + sizeof("...") > size) {
			(void)strcpy(to + used, "...");
			return;
		}
		if (plain)
			to[used++] = *text;
		else if (c == '\\')
			used += (size_t)sprintf(to + used, "\\\\");
		else
			used += (size_t)sprintf(to + used, "\\x%02x", c);
	}
	to[used] = '\0';
}

static void write_stderr(enum kv_log_level level, const char *subsystem, const char *message)
{
	char line[LINE_MAX_BYTES];
	char prefix[8] = "";
	int length;

	if (log_prefix)
		(void)snprintf(prefix, sizeof(prefix), "<%d>", levels[level].priority);
	length = snprintf(line, sizeof(line), "%s%.64s[%d] %s %s: %s\n", prefix,
		program_invocation_short_name, (int)getpid(), levels[level].name, subsystem,
		message);
	if (length >= (int)sizeof(line)) {
		length = (int)sizeof(line) - 1;
		line[length - 1] = '\n';
	}
	/* There is nowhere to report that stderr is gone. */
	if (write(STDERR_FILENO, line, (size_t)length) < 0)
		return;
}

void kv_log(enum kv_log_level level, const char *subsystem, const char *format, ...)
{
	char raw[MESSAGE_MAX], message[MESSAGE_MAX];
	int saved = errno;
	va_list args;

	if (!kv_log_enabled(level))
		return;
	va_start(args, format);
	if (vsnprintf(raw, sizeof(raw), format, args) < 0)
		raw[0] = '\0';
	va_end(args);
	escape(message, sizeof(message), raw);
	if (log_target == KV_LOG_SYSLOG)
		syslog(levels[level].priority, "%s %s: %s", levels[level].name, subsystem, message);
	else
		write_stderr(level, subsystem, message);
	errno = saved;
}

bool kv_log_allowed(struct kv_log_limit *limit, unsigned *ret_suppressed)
{
	struct timespec now;
	long second, last;

	(void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	second = now.tv_sec + 1; /* never 0, which a fresh LIMIT holds */
	/* Relaxed: the winner of the exchange alone logs; a count that slips into the next line is
	 * fine. */
	last = __atomic_load_n(&limit->last_s, __ATOMIC_RELAXED);
	if (last == second || !__atomic_compare_exchange_n(&limit->last_s, &last, second, false,
				      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
		(void)__atomic_add_fetch(&limit->suppressed, 1, __ATOMIC_RELAXED);
		return false;
	}
	*ret_suppressed = __atomic_exchange_n(&limit->suppressed, 0, __ATOMIC_RELAXED);
	return true;
}
