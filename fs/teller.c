/* SPDX-License-Identifier: Apache-2.0 */
/* The process that tells the kernel: see teller.h. */

#include "fs/teller.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "fs/base.h"

struct kv_teller {
	pid_t process;
	int socket;
};

/* Closes every descriptor but these. */
static void keep_only(int one, int other)
{
	unsigned low = (unsigned)(one < other ? one : other);
	unsigned high = (unsigned)(one < other ? other : one);

	if (low > 0)
		(void)close_range(0, low - 1, 0);
	if (high > low + 1)
		(void)close_range(low + 1, high - 1, 0);
	(void)close_range(high + 1, ~0u, 0);
}

static void teller_main(int fuse_fd, int socket)
{
	uint8_t message[KV_TELLER_MESSAGE_MAX];
	sigset_t signals;
	ssize_t n;

	/* A Ctrl-C is for the daemon, whose end is ours. */
	(void)sigfillset(&signals);
	(void)sigprocmask(SIG_BLOCK, &signals, NULL);
	(void)prctl(PR_SET_NAME, "kvfsd-teller");
	keep_only(fuse_fd, socket);
	while ((n = recv(socket, message, sizeof(message), 0)) > 0) {
		int result = write(fuse_fd, message, (size_t)n) < 0 ? -errno : 0;

		if (send(socket, &result, sizeof(result), MSG_NOSIGNAL) < 0)
			break;
	}
	_exit(0);
}

int kv_teller_new(int fuse_fd, struct kv_teller **ret_teller)
{
	struct kv_teller *teller = calloc(1, sizeof(*teller));
	int sockets[2];

	if (!teller)
		return -ENOMEM;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0) {
		free(teller);
		return -errno;
	}
	teller->socket = sockets[0];
	teller->process = fork();
	if (teller->process == 0)
		teller_main(fuse_fd, sockets[1]);
	(void)close(sockets[1]);
	if (teller->process < 0) {
		int r = -errno;

		(void)close(sockets[0]);
		free(teller);
		return r;
	}
	*ret_teller = teller;
	return 0;
}

struct kv_teller *kv_teller_free(struct kv_teller *teller)
{
	if (!teller)
		return NULL;
	(void)close(teller->socket);
	while (waitpid(teller->process, NULL, 0) < 0 && errno == EINTR)
		continue;
	free(teller);
	return NULL;
}

int kv_teller_tell(struct kv_teller *teller, const void *message, size_t length)
{
	int result;
	ssize_t n;

	if (send(teller->socket, message, length, MSG_NOSIGNAL) < 0)
		return errno == ECONNRESET ? -EPIPE : -errno;
	do
		n = recv(teller->socket, &result, sizeof(result), 0);
	while (n < 0 && errno == EINTR);
	return n == (ssize_t)sizeof(result) ? result : -EPIPE;
}
