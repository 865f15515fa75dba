/* SPDX-License-Identifier: Apache-2.0 */
/* Starting daemons again: see supervise.h. */

#include "fs/supervise.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "fs/base.h"
#include "fs/dram.h"
#include "fs/log.h"
#include "fs/takeover.h"

#define SERVED "KVFSD_SERVED"
/* When so many daemons, one after the other, have lived for less than that, the mount ends. */
#define SHORT_LIVES_MAX 5u
#define SHORT_LIFE_MS 1000

struct supervisor {
	const struct kv_supervise *options;
	struct kv_served served;
	char program[PATH_MAX];
	sigset_t signals;
	pid_t daemon;
	int64_t started_ms;
	unsigned started;
	unsigned short_lives;
};

bool kv_supervise_inherit(struct kv_served *ret_served)
{
	const char *text = getenv(SERVED);

	*ret_served = (struct kv_served){-1, -1, -1, -1};
	if (!text)
		return false;
	if (sscanf(text, "%d:%d:%d:%d", &ret_served->fuse_fd, &ret_served->state_fd,
		    &ret_served->ready_fd, &ret_served->dram_fd) != 4)
		return false;
	(void)fcntl(ret_served->fuse_fd, F_SETFD, FD_CLOEXEC);
	(void)fcntl(ret_served->state_fd, F_SETFD, FD_CLOEXEC);
	(void)fcntl(ret_served->dram_fd, F_SETFD, FD_CLOEXEC);
	(void)unsetenv(SERVED);
	return true;
}

static bool is_mounted(int fuse_fd)
{
	struct pollfd look = {.fd = fuse_fd};

	return poll(&look, 1, 0) >= 0 && !(look.revents & POLLERR);
}

void kv_supervise_unmount(const char *directory, int fuse_fd)
{
	if (is_mounted(fuse_fd))
		(void)umount2(directory, MNT_DETACH);
}

static int fail(const char *what, int error)
{
	(void)fprintf(stderr, "kvfsd: %s: %s\n", what, strerror(-error));
	return error;
}

static int mount_connection(struct supervisor *supervisor)
{
	const struct kv_supervise *options = supervisor->options;
	char source[4096], text[128];
	int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		return fail("/dev/fuse", -errno);
	(void)snprintf(source, sizeof(source), "kvfs:%.4000s", options->store);
	(void)snprintf(text, sizeof(text),
		"fd=%d,rootmode=40000,user_id=0,group_id=0,default_permissions%s", fd,
		options->allow_other ? ",allow_other" : "");
	if (mount(source, options->directory, "fuse.kvfs", MS_NOSUID | MS_NODEV, text) < 0) {
		int r = fail("-o restart needs root, to mount by itself", -errno);

		(void)close(fd);
		return r;
	}
	supervisor->served.fuse_fd = fd;
	return 0;
}

static void daemon_main(const struct supervisor *supervisor)
{
	const struct kv_served *served = &supervisor->served;
	char text[64];
	sigset_t mask;

	(void)prctl(PR_SET_PDEATHSIG, SIGTERM);
	(void)sigemptyset(&mask);
	(void)sigaddset(&mask, SIGUSR1);
	(void)sigprocmask(SIG_SETMASK, &mask, NULL);
	(void)fcntl(served->fuse_fd, F_SETFD, 0);
	(void)fcntl(served->state_fd, F_SETFD, 0);
	(void)fcntl(served->dram_fd, F_SETFD, 0);
	if (served->ready_fd >= 0)
		(void)fcntl(served->ready_fd, F_SETFD, 0);
	(void)snprintf(text, sizeof(text), "%d:%d:%d:%d", served->fuse_fd, served->state_fd,
		served->ready_fd, served->dram_fd);
	(void)setenv(SERVED, text, 1);
	(void)execv(supervisor->program, (char *const *)supervisor->options->argv);
	_exit(127);
}

static int start_daemon(struct supervisor *supervisor)
{
	supervisor->started_ms = kv_monotonic_ms();
	supervisor->started++;
	supervisor->daemon = fork();
	if (supervisor->daemon < 0)
		return -errno;
	if (supervisor->daemon == 0)
		daemon_main(supervisor);
	/* Only the first one has somebody waiting for it. */
	if (supervisor->served.ready_fd >= 0)
		(void)close(supervisor->served.ready_fd);
	supervisor->served.ready_fd = -1;
	return 0;
}

/* Whether the one that has just died is to be followed by another. */
static bool goes_on(struct supervisor *supervisor, int status)
{
	bool is_short = kv_monotonic_ms() - supervisor->started_ms < SHORT_LIFE_MS;
	bool planned = WIFEXITED(status) && WEXITSTATUS(status) == KV_SUPERVISE_NEXT;

	supervisor->short_lives = is_short && !planned ? supervisor->short_lives + 1 : 0;
	if (!is_mounted(supervisor->served.fuse_fd))
		return false;
	if (planned)
		return true;
	/* One that cannot begin says why, and is obeyed; one that cannot go on may the next time.
	 */
	if (!WIFSIGNALED(status) && (supervisor->started == 1 || WEXITSTATUS(status) == 0))
		return false;
	if (supervisor->short_lives >= SHORT_LIVES_MAX) {
		kv_log_error("supervise", "the daemon dies again and again, ending the mount");
		return false;
	}
	kv_log_warning("supervise",
		"the daemon died, starting another signal=%d status=%d process=%ld",
		WIFSIGNALED(status) ? WTERMSIG(status) : 0,
		WIFEXITED(status) ? WEXITSTATUS(status) : 0, (long)supervisor->daemon);
	return true;
}

/* Waits for a signal and does what it asks for. False when the mount has ended: *ret_status. */
static bool turn(struct supervisor *supervisor, int *ret_status)
{
	int number = 0, status;

	if (sigwait(&supervisor->signals, &number) != 0)
		return true;
	if (number == SIGTERM || number == SIGINT)
		(void)kill(supervisor->daemon, SIGTERM);
	if (number == SIGHUP)
		(void)kill(supervisor->daemon, SIGUSR1);
	if (number != SIGCHLD || waitpid(supervisor->daemon, &status, WNOHANG) <= 0)
		return true;
	if (goes_on(supervisor, status) && start_daemon(supervisor) == 0)
		return true;
	*ret_status = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
	return false;
}

/* Lets go of the terminal, as the daemon does. */
static void go_quiet(const struct kv_supervise *options)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (null >= 0) {
		(void)dup2(null, STDIN_FILENO);
		(void)dup2(null, STDOUT_FILENO);
		(void)dup2(null, STDERR_FILENO);
		(void)close(null);
	}
	(void)!chdir("/");
	kv_log_setup(options->log_level, KV_LOG_SYSLOG);
}

int kv_supervise(const struct kv_supervise *options)
{
	struct supervisor supervisor = {
		.options = options,
		.served = {-1, -1, -1, options->ready_fd},
	};
	int status = 1;
	ssize_t n = readlink("/proc/self/exe", supervisor.program, sizeof(supervisor.program) - 1);

	if (n < 0)
		return fail("/proc/self/exe", -errno) != 0;
	(void)sigemptyset(&supervisor.signals);
	(void)sigaddset(&supervisor.signals, SIGCHLD);
	(void)sigaddset(&supervisor.signals, SIGTERM);
	(void)sigaddset(&supervisor.signals, SIGINT);
	(void)sigaddset(&supervisor.signals, SIGHUP);
	(void)sigprocmask(SIG_BLOCK, &supervisor.signals, NULL);
	supervisor.served.state_fd = kv_takeover_memory();
	if (supervisor.served.state_fd < 0)
		return fail("memory for restarts", supervisor.served.state_fd) != 0;
	supervisor.served.dram_fd = kv_dram_mount(options->dram_bytes);
	if (supervisor.served.dram_fd < 0)
		return fail("-o restart needs a tmpfs", supervisor.served.dram_fd) != 0;
	if (mount_connection(&supervisor) < 0)
		return 1;
	if (start_daemon(&supervisor) < 0) {
		(void)fail("fork", -errno);
	} else {
		if (!options->foreground)
			go_quiet(options);
		while (turn(&supervisor, &status))
			continue;
	}
	kv_supervise_unmount(options->directory, supervisor.served.fuse_fd);
	(void)close(supervisor.served.fuse_fd);
	return status;
}
