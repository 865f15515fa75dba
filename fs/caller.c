/* SPDX-License-Identifier: Apache-2.0 */
/* From thread ids to processes and their ends: see caller.h. */

#include "fs/caller.h"

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fs/base.h"
#include "fs/parse.h"

/* A status text has the user's groups in it before the signals. */
#define TEXT_SIZE 8192u

/* include/linux/sched.h: part of the flags in /proc/TID/stat since Linux 2.6. */
#define PF_EXITING 0x4u

/* proc_pid_stat(5): numbers of the fields used here. */
enum {
	FIELD_STATE = 3,
	FIELD_FLAGS = 9,
	FIELD_STACK = 29,
	FIELD_INSTRUCTION = 30,
	FIELD_EXIT_CODE = 52,
};

/*
 * include/uapi/linux/pidfd.h, which distributions do not have yet: PIDFD_GET_INFO is of Linux 6.13,
 * and it tells the exit code of a process that has been reaped since 6.15.
 */
struct pidfd_info_v0 {
	uint64_t mask;
	uint64_t cgroup;
	uint32_t ids[11];
	int32_t exit_code;
};
static_assert(sizeof(struct pidfd_info_v0) == 64, "the kernel tells the version by the size");
#define PIDFD_GET_INFO_V0 _IOWR(0xFF, 11, struct pidfd_info_v0)
#define PIDFD_INFO_HAS_IDS (UINT64_C(1) << 0)
#define PIDFD_INFO_HAS_EXIT (UINT64_C(1) << 3)
#define PIDFD_INFO_PROCESS 1 /* of its ids */
/* PIDFD_THREAD, since Linux 6.9: the id may be that of any thread. */
#define PIDFD_OF_THREAD O_EXCL

/* Reads /proc/TID/NAME as a string. */
static int read_proc(pid_t tid, const char *name, char ret_text[TEXT_SIZE])
{
	_cleanup_fd_ int fd = -1;
	char path[64];
	ssize_t n;

	(void)snprintf(path, sizeof(path), "/proc/%d/%s", (int)tid, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	n = read(fd, ret_text, TEXT_SIZE - 1);
	if (n <= 0)
		return n < 0 ? -errno : -ESRCH;
	ret_text[n] = '\0';
	return 0;
}

/* ---- Processes ---- */

/* By two calls that cost a tenth of a look into /proc, where the kernel has them; or 0. */
static pid_t process_from_pidfd(pid_t tid)
{
	_cleanup_fd_ int fd = (int)syscall(SYS_pidfd_open, tid, PIDFD_OF_THREAD);
	struct pidfd_info_v0 info = {.mask = PIDFD_INFO_HAS_IDS};

	if (fd < 0 || ioctl(fd, PIDFD_GET_INFO_V0, &info) < 0 || !(info.mask & PIDFD_INFO_HAS_IDS))
		return 0;
	return (pid_t)info.ids[PIDFD_INFO_PROCESS];
}

/* The "Tgid:" line of /proc/TID/status, or 0. */
static pid_t process_from_proc(pid_t tid)
{
	char text[TEXT_SIZE];
	char *line;
	uint64_t value;

	if (read_proc(tid, "status", text) < 0)
		return 0;
	line = strstr(text, "\nTgid:\t");
	if (!line)
		return 0;
	line += strlen("\nTgid:\t");
	line[strcspn(line, "\n")] = '\0';
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
	process = process_from_pidfd(tid);
	if (process == 0)
		process = process_from_proc(tid);
	return process > 0 ? process : tid;
}

/* ---- How they end ---- */

/* Field NUMBER, behind the name, of a stat line whose state begins at STATE. */
static uint64_t stat_field(const char *state, int number)
{
	for (int i = FIELD_STATE; i < number && state; i++) {
		state = strchr(state, ' ');
		if (state)
			state++;
	}
	return state ? strtoull(state, NULL, 10) : 0;
}

static enum kv_end end_of_code(uint64_t code)
{
	/* wait(2)'s encoding: a signal in the low bits, or an exit status above them. */
	return code & 0x7f ? KV_END_KILLED : KV_END_EXIT;
}

enum kv_end kv_end_of_stat(const char *text)
{
	/* The name is the user's choice and may hold anything, also brackets. */
	const char *name_end = strrchr(text, ')');
	const char *state = name_end && name_end[1] == ' ' ? name_end + 2 : NULL;

	if (!state)
		return KV_END_UNKNOWN;
	if (!(stat_field(state, FIELD_FLAGS) & PF_EXITING))
		return KV_END_NONE;
	/*
	 * fs/proc/array.c, do_task_stat(): whoever may not trace the thread reads 0 as its exit
	 * code. Its stack and instruction pointers are shown under the same condition while it
	 * exits, and no user thread has 0 there.
	 */
	if (stat_field(state, FIELD_EXIT_CODE) == 0 && stat_field(state, FIELD_STACK) == 0 &&
		stat_field(state, FIELD_INSTRUCTION) == 0)
		return KV_END_UNKNOWN;
	return end_of_code(stat_field(state, FIELD_EXIT_CODE));
}

/*
 * The stat file NAME of thread TID, if the thread is on its way out. First a look at its memory,
 * which is gone by then: reading a stat file may wait for an exec of the process to come to its end
 * (6.18 takes signal->exec_update_lock for it), and the exec may be waiting for us to answer the
 * FLUSH of a descriptor that it closes.
 */
static enum kv_end end_of_task(pid_t tid, const char *name)
{
	char text[TEXT_SIZE];

	if (read_proc(tid, "statm", text) < 0)
		return KV_END_UNKNOWN;
	if (strncmp(text, "0 ", 2) != 0)
		return KV_END_NONE;
	return read_proc(tid, name, text) < 0 ? KV_END_UNKNOWN : kv_end_of_stat(text);
}

enum kv_end kv_caller_end(pid_t tid)
{
	char name[32];

	if (tid <= 0)
		return KV_END_UNKNOWN;
	/* The thread's own file: that of the process counts the time of all its threads together.
	 */
	(void)snprintf(name, sizeof(name), "task/%d/stat", (int)tid);
	return end_of_task(tid, name);
}

int kv_caller_watch(pid_t process)
{
	int fd;

	if (process <= 0)
		return -ESRCH;
	fd = (int)syscall(SYS_pidfd_open, process, 0);
	return fd < 0 ? -errno : fd;
}

enum kv_end kv_caller_end_of(int watch, pid_t process)
{
	struct pidfd_info_v0 info = {.mask = PIDFD_INFO_HAS_EXIT};
	/* The process's file, for its first thread may have ended before the others. */
	enum kv_end end = end_of_task(process, "stat");

	/* Asked in this order, what was read cannot be that of a later process with the same id. */
	if (syscall(SYS_pidfd_send_signal, watch, 0, NULL, 0) == 0 || errno != ESRCH)
		return end;
	if (ioctl(watch, PIDFD_GET_INFO_V0, &info) < 0 || !(info.mask & PIDFD_INFO_HAS_EXIT))
		return KV_END_UNKNOWN;
	return end_of_code((uint32_t)info.exit_code);
}

/* ---- Who is about to end ---- */

/* The mask in the line NAME ("\nSigPnd:\t") of a status text; bit 0 is signal 1. */
static uint64_t status_mask(const char *text, const char *name)
{
	const char *line = strstr(text, name);

	return line ? strtoull(line + strlen(name), NULL, 16) : 0;
}

static uint64_t mask_of(int number)
{
	return UINT64_C(1) << (number - 1);
}

bool kv_is_dying_in_status(const char *text)
{
	/* By default these stop a process, go on with it, or do nothing: signal(7). */
	const uint64_t harmless = mask_of(SIGSTOP) | mask_of(SIGTSTP) | mask_of(SIGTTIN) |
				  mask_of(SIGTTOU) | mask_of(SIGCONT) | mask_of(SIGCHLD) |
				  mask_of(SIGURG) | mask_of(SIGWINCH);
	uint64_t pending = status_mask(text, "\nSigPnd:\t") | status_mask(text, "\nShdPnd:\t");

	/* The kernel turns a signal that ends the whole process into SIGKILL for each thread. */
	if (pending & mask_of(SIGKILL))
		return true;
	pending &= ~(status_mask(text, "\nSigBlk:\t") | status_mask(text, "\nSigIgn:\t") |
		     status_mask(text, "\nSigCgt:\t"));
	return (pending & ~harmless) != 0;
}

bool kv_caller_is_dying(pid_t tid)
{
	char text[TEXT_SIZE];
	int r = tid > 0 ? read_proc(tid, "status", text) : -EACCES;

	/* Who cannot be found is gone. */
	return r < 0 ? r == -ENOENT || r == -ESRCH : kv_is_dying_in_status(text);
}
