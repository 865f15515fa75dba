/* SPDX-License-Identifier: Apache-2.0 */
/* From thread ids to processes: see caller.h. */

#include "fs/caller.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fs/base.h"
#include "fs/parse.h"

/* The "Tgid:" line of /proc/TID/status, or 0. */
static pid_t process_from_proc(pid_t tid)
{
	char path[48];
	char text[1024];
	_cleanup_fd_ int fd = -1;
	const char *line;
	uint64_t value;
	ssize_t n;

	(void)snprintf(path, sizeof(path), "/proc/%d/status", (int)tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	n = read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return 0;
	text[n] = '\0';
	line = strstr(text, "\nTgid:\t");
	if (!line)
		return 0;
	line += strlen("\nTgid:\t");
	text[(line - text) + (ptrdiff_t)strcspn(line, "\n")] = '\0';
	if (kv_parse_u64(line, &value) < 0 || value > INT32_MAX)
		return 0;
	return (pid_t)value;
}

pid_t kv_caller_process(pid_t tid)
{
	pid_t process;
	int fd;

	if (tid <= 0)
		return 0;
	/* pidfd_open takes leaders of thread groups only: one call settles the common case. */
	fd = (int)syscall(SYS_pidfd_open, tid, 0);
	if (fd >= 0) {
		(void)close(fd);
		return tid;
	}
	process = process_from_proc(tid);
	return process > 0 ? process : tid;
}
