/* SPDX-License-Identifier: Apache-2.0 */
/* The guard process: see guard.h. */

#include "fs/guard.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fs/base.h"

#define SIGNAL_PARENT_DIED SIGUSR1
#define SIGNAL_END SIGUSR2
#define CONNECTIONS "/sys/fs/fuse/connections"

struct kv_guard {
	pid_t process;
	/* Shared with the process: the mount's minor number + 1, or 0. */
	_Atomic unsigned *armed;
};

/* Writes to the connection's abort file. False if the control filesystem is not mounted. */
static bool abort_connection(unsigned minor_number)
{
	char path[sizeof(CONNECTIONS) + 32];
	_cleanup_fd_ int fd = -1;

	(void)snprintf(path, sizeof(path), CONNECTIONS "/%u/abort", minor_number);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	return fd >= 0 && write(fd, "1", 1) == 1;
}

/* In a mount namespace of its own, so that nobody sees the control filesystem appear. */
static void mount_control(void)
{
	if (unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0)
		(void)mount("fusectl", CONNECTIONS, "fusectl", 0, NULL);
}

static void guard_main(pid_t daemon, const _Atomic unsigned *armed, const sigset_t *signals)
{
	unsigned minor_number;
	int signal_number = 0;

	(void)prctl(PR_SET_NAME, "kvfsd-guard");
	(void)prctl(PR_SET_PDEATHSIG, SIGNAL_PARENT_DIED);
	for (int fd = 0; fd < 64; fd++)
		(void)close(fd);
	/* The daemon may have died before the line above. */
	if (getppid() == daemon && sigwait(signals, &signal_number) == 0 &&
		signal_number == SIGNAL_END)
		_exit(0);
	minor_number = atomic_load_explicit(armed, memory_order_acquire);
	if (minor_number > 0 && !abort_connection(minor_number - 1)) {
		mount_control();
		(void)abort_connection(minor_number - 1);
	}
	_exit(0);
}

int kv_guard_new(struct kv_guard **ret_guard)
{
	struct kv_guard *guard = calloc(1, sizeof(*guard));
	pid_t daemon = getpid();
	sigset_t signals;
	sigset_t before;

	if (!guard)
		return -ENOMEM;
	guard->armed = mmap(NULL, sizeof(*guard->armed), PROT_READ | PROT_WRITE,
		MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (guard->armed == MAP_FAILED) {
		free(guard);
		return -ENOMEM;
	}
	/* All signals are blocked in the guard: a Ctrl-C is for the daemon, which then ends it. */
	(void)sigfillset(&signals);
	(void)sigprocmask(SIG_BLOCK, &signals, &before);
	(void)sigemptyset(&signals);
	(void)sigaddset(&signals, SIGNAL_PARENT_DIED);
	(void)sigaddset(&signals, SIGNAL_END);
	guard->process = fork();
	if (guard->process == 0)
		guard_main(daemon, guard->armed, &signals);
	(void)sigprocmask(SIG_SETMASK, &before, NULL);
	if (guard->process < 0) {
		int r = -errno;

		(void)munmap(guard->armed, sizeof(*guard->armed));
		free(guard);
		return r;
	}
	*ret_guard = guard;
	return 0;
}

void kv_guard_arm(struct kv_guard *guard, unsigned minor_number)
{
	atomic_store_explicit(guard->armed, minor_number + 1, memory_order_release);
}

struct kv_guard *kv_guard_free(struct kv_guard *guard)
{
	if (!guard)
		return NULL;
	(void)kill(guard->process, SIGNAL_END);
	while (waitpid(guard->process, NULL, 0) < 0 && errno == EINTR)
		continue;
	(void)munmap(guard->armed, sizeof(*guard->armed));
	free(guard);
	return NULL;
}
