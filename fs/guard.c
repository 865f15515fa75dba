/* SPDX-License-Identifier: Apache-2.0 */
/* The guard process: see guard.h. */

#include "fs/guard.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fs/base.h"

/* In the order in which they are taken when several are pending: the lowest number first. */
#define SIGNAL_ARM SIGUSR1
#define SIGNAL_PARENT_DIED SIGUSR2
#define SIGNAL_END SIGTERM

struct kv_guard {
	pid_t process;
};

/*
 * The root of the control filesystem: of a mount that has no place in any tree, so that nobody
 * sees it appear, or for who may not mount where the system has it.
 */
static int open_control(void)
{
	_cleanup_fd_ int fs_fd = (int)syscall(SYS_fsopen, "fusectl", FSOPEN_CLOEXEC);

	if (fs_fd >= 0 && syscall(SYS_fsconfig, fs_fd, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
		return (int)syscall(SYS_fsmount, fs_fd, FSMOUNT_CLOEXEC, 0);
	return open("/sys/fs/fuse/connections", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/*
 * The connection's abort file. It is opened while the connection is there: the number may be
 * another mount's by the time the daemon dies, but a file that is open stays this one's, and
 * writing to it does nothing once the connection has ended.
 */
static int open_abort(unsigned minor_number)
{
	_cleanup_fd_ int control_fd = open_control();
	char path[32];

	(void)snprintf(path, sizeof(path), "%u/abort", minor_number);
	return control_fd < 0 ? -1 : openat(control_fd, path, O_WRONLY | O_CLOEXEC);
}

static void guard_main(pid_t daemon, const sigset_t *signals)
{
	siginfo_t info = {0};
	int abort_fd = -1;

	(void)prctl(PR_SET_NAME, "kvfsd-guard");
	(void)prctl(PR_SET_PDEATHSIG, SIGNAL_PARENT_DIED);
	for (int fd = 0; fd < 64; fd++)
		(void)close(fd);
	/* The daemon may have died before the lines above. */
	while (getppid() == daemon && sigwaitinfo(signals, &info) == SIGNAL_ARM)
		abort_fd = open_abort((unsigned)info.si_value.sival_int);
	if (info.si_signo != SIGNAL_END && abort_fd >= 0)
		(void)!write(abort_fd, "1", 1);
	_exit(0);
}

int kv_guard_new(struct kv_guard **ret_guard)
{
	_cleanup_free_ struct kv_guard *guard = calloc(1, sizeof(*guard));
	pid_t daemon = getpid();
	sigset_t signals;
	sigset_t before;

	if (!guard)
		return -ENOMEM;
	/* All signals are blocked in the guard: a Ctrl-C is for the daemon, which then ends it. */
	(void)sigfillset(&signals);
	(void)sigprocmask(SIG_BLOCK, &signals, &before);
	(void)sigemptyset(&signals);
	(void)sigaddset(&signals, SIGNAL_ARM);
	(void)sigaddset(&signals, SIGNAL_PARENT_DIED);
	(void)sigaddset(&signals, SIGNAL_END);
	guard->process = fork();
	if (guard->process == 0)
		guard_main(daemon, &signals);
	(void)sigprocmask(SIG_SETMASK, &before, NULL);
	if (guard->process < 0)
		return -errno;
	*ret_guard = kv_steal_ptr(&guard);
	return 0;
}

void kv_guard_arm(struct kv_guard *guard, unsigned minor_number)
{
	(void)sigqueue(guard->process, SIGNAL_ARM, (union sigval){.sival_int = (int)minor_number});
}

struct kv_guard *kv_guard_free(struct kv_guard *guard)
{
	if (!guard)
		return NULL;
	(void)kill(guard->process, SIGNAL_END);
	while (waitpid(guard->process, NULL, 0) < 0 && errno == EINTR)
		continue;
	free(guard);
	return NULL;
}
