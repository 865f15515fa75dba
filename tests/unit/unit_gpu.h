/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of gpu/ on the fake driver share: an opened device, other processes (a program
 * that has used the driver must not fork, so they run the test's own executable), and descriptors
 * on their way between the two.
 */
#ifndef KVFS_TESTS_UNIT_UNIT_GPU_H
#define KVFS_TESTS_UNIT_UNIT_GPU_H

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "gpu/backend.h"
#include "gpu/cuda_driver.h"
#include "tests/gpu/fake/fakecu.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)
#define GRANULE (2 * MIB)

/* Drops what an earlier test has set; the fake reads it anew with unit_gpu_setup. */
static inline void unit_gpu_clear_environment(void)
{
	static const char *const names[] = {"FAKECU_DEVICES", "FAKECU_MIG", "FAKECU_VERSION",
		"FAKECU_HIDE", "FAKECU_STUB", "FAKECU_ATTR", "FAKECU_MEMORY", "FAKECU_DIR",
		"FAKECU_CPU", "FAKECU_FAIL", "FAKECU_CONTROL", "FAKECU_CLOCK", "FAKECU_COPY",
		"FAKECU_REPORT", "FAKECU_REGISTER_MAX", "FAKECU_LEGACY", "FAKECU_WRONG",
		"FAKECUFILE_GDS", "FAKECUFILE_OLD", "FAKECUFILE_FORCE_COMPAT",
		"FAKECUFILE_PINNED_MAX"};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		(void)unsetenv(names[i]);
}

static inline void unit_gpu_set(const char *name, const char *value)
{
	assert_int_equal(setenv(name, value, 1), 0);
	fakecu_reset();
}

static inline int unit_gpu_setup(void **state)
{
	unit_gpu_clear_environment();
	/* Containers have their files on it; the real one refuses it. */
	(void)setenv("FAKECUFILE_OVERLAY", "1", 1);
	fakecu_reset();
	return 0;
}

static inline void unit_gpu_assert_nothing_lives(void)
{
	struct fakecu_live live, none = {0};

	fakecu_live(&live);
	assert_memory_equal(&live, &none, sizeof(live));
}

static inline struct kvg_backend *unit_gpu_open(
	const struct kvg_backend_ops *ops, const char *device)
{
	const struct kvg_backend_open options = {.device = device};
	struct kvg_backend *backend = NULL;
	char error[256] = "";

	if (ops->open(&options, &backend, error, sizeof(error)) < 0)
		fail_msg("%s", error);
	return backend;
}

/* ---- Other processes ---- */

struct unit_child {
	pid_t pid;
	int socket; /* its other end is the child's descriptor 3 */
};

/* Runs this program with the argument ROLE. */
static inline struct unit_child unit_child_start(const char *role)
{
	char *arguments[] = {(char *)"/proc/self/exe", (char *)role, NULL};
	posix_spawn_file_actions_t actions;
	struct unit_child child;
	extern char **environ;
	int ends[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
	assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
	assert_int_equal(posix_spawn_file_actions_adddup2(&actions, ends[1], 3), 0);
	assert_int_equal(
		posix_spawn(&child.pid, "/proc/self/exe", &actions, NULL, arguments, environ), 0);
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)close(ends[1]);
	child.socket = ends[0];
	return child;
}

/* Its exit status, or minus the signal that ended it. */
static inline int unit_child_end(struct unit_child *child)
{
	int status;

	(void)close(child->socket);
	assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static inline void unit_child_kill(struct unit_child *child)
{
	(void)kill(child->pid, SIGKILL);
	(void)unit_child_end(child);
}

/* One byte, with FD along if it is not -1. False if the other end is gone. */
static inline bool unit_send(int to, int fd)
{
	char byte = 'x', control[CMSG_SPACE(sizeof(fd))] = {0};
	struct iovec vector = {.iov_base = &byte, .iov_len = 1};
	struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};

	if (fd >= 0) {
		struct cmsghdr *header;

		message.msg_control = control;
		message.msg_controllen = sizeof(control);
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(fd));
		memcpy(CMSG_DATA(header), &fd, sizeof(fd));
	}
	return sendmsg(to, &message, MSG_NOSIGNAL) == 1;
}

/* Waits for a byte; ret_fd: the descriptor that came with it, -1 if none. */
static inline bool unit_receive(int from, int *ret_fd)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec vector = {.iov_base = &byte, .iov_len = 1};
	struct msghdr message = {.msg_iov = &vector,
		.msg_iovlen = 1,
		.msg_control = control,
		.msg_controllen = sizeof(control)};
	struct cmsghdr *header;

	if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1)
		return false;
	*ret_fd = -1;
	header = CMSG_FIRSTHDR(&message);
	if (header && header->cmsg_type == SCM_RIGHTS)
		memcpy(ret_fd, CMSG_DATA(header), sizeof(*ret_fd));
	return true;
}

/* ---- Device memory as the CPU's ---- */

static inline void unit_gpu_copy(struct kvg_backend *backend, enum kvg_copy_kind kind, uint64_t to,
	uint64_t from, uint64_t size)
{
	const struct kvg_copy copy = {.to = to, .from = from, .size = size};

	assert_int_equal(backend->ops->copy(backend, NULL, kind, &copy, 1), 0);
	assert_int_equal(backend->ops->stream_sync(backend, NULL), 0);
}

static inline void unit_gpu_write(
	struct kvg_backend *backend, kvg_devptr to, const void *memory, uint64_t size)
{
	unit_gpu_copy(backend, KVG_COPY_TO_DEVICE, to, (uint64_t)(uintptr_t)memory, size);
}

static inline void unit_gpu_read(
	struct kvg_backend *backend, kvg_devptr from, void *memory, uint64_t size)
{
	unit_gpu_copy(backend, KVG_COPY_TO_HOST, (uint64_t)(uintptr_t)memory, from, size);
}

#endif
