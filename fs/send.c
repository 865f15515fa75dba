/* SPDX-License-Identifier: Apache-2.0 */
/* Replies on their way: see send.h. */

#include "fs/send.h"

#include <errno.h>
#include <linux/fuse.h>

#include "fs/log.h"

/* In all, about a second. */
#define TRIES_MAX 10u
#define FIRST_WAIT_US 1000u

/* The request at hand, if it must not be lost. */
static _Thread_local struct {
	uint64_t unique;
	bool refused;
} kept;

bool kv_send_is_end(uint32_t opcode)
{
	return opcode == FUSE_RELEASE || opcode == FUSE_RELEASEDIR || opcode == FUSE_FORGET ||
	       opcode == FUSE_BATCH_FORGET;
}

void kv_send_keep(uint64_t unique)
{
	kept.unique = unique;
	kept.refused = false;
}

bool kv_send_was_kept(void)
{
	return kept.refused;
}

/* Short of something that comes back. */
static bool is_passing(int error)
{
	return error == EINTR || error == EAGAIN || error == ENOMEM || error == ENOBUFS;
}

static ssize_t try_writev(int fd, const struct iovec *iov, int count)
{
	unsigned wait_us = FIRST_WAIT_US;
	ssize_t n = writev(fd, iov, count);

	for (unsigned i = 1; n < 0 && is_passing(errno) && i < TRIES_MAX; i++, wait_us *= 2) {
		(void)usleep(wait_us);
		n = writev(fd, iov, count);
	}
	return n;
}

/* Whoever waits for ANSWER is told that it failed. 0: that has arrived, or nobody waits. */
static int send_error(int fd, const struct fuse_out_header *answer)
{
	struct fuse_out_header error = {
		.len = sizeof(error),
		.error = -EIO,
		.unique = answer->unique,
	};
	const struct iovec iov = {.iov_base = &error, .iov_len = sizeof(error)};

	return try_writev(fd, &iov, 1) < 0 && errno != ENOENT ? -errno : 0;
}

ssize_t kv_send(int fd, struct iovec *iov, int count, void *arg)
{
	const struct fuse_out_header *answer = iov[0].iov_base;
	struct kv_daemon *daemon = arg;

	if (answer->error == -ENOMEM && kept.unique != 0 && answer->unique == kept.unique) {
		kept.refused = true;
		kv_stat_add(&daemon->stats.ends_retried, 1);
		return answer->len;
	}
	ssize_t n = try_writev(fd, iov, count);
	int error = errno;

	/* libfuse, without memory for INIT: no other request will come. */
	if (!daemon->initialised && answer->error != 0) {
		daemon->init_refused = true;
		fuse_session_exit(daemon->session);
	}
	/* Notices have no number, and nobody who waits. */
	if (n >= 0 || error == ENOENT || answer->unique == 0) {
		errno = error;
		return n;
	}
	kv_stat_add(&daemon->stats.replies_refused, 1);
	kv_log_error("fuse", "reply refused by the kernel length=%u error=%s", answer->len,
		strerror(error));
	/* Without its answer to INIT there is no mount. */
	if (!daemon->initialised)
		daemon->init_refused = true;
	errno = send_error(fd, answer) < 0 ? error : ENOENT;
	return -1;
}

static ssize_t receive(int fd, void *buffer, size_t size, void *arg)
{
	(void)arg;
	return read(fd, buffer, size);
}

int kv_send_attach(struct fuse_session *session)
{
	static const struct fuse_custom_io io = {
		.read = receive,
		.writev = kv_send,
	};

	return fuse_session_custom_io(session, &io, sizeof(io), fuse_session_fd(session));
}
