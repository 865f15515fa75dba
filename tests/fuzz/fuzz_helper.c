/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What GPU helpers ask the daemon: a connection on which the input comes, as packets of the size of
 * a request, but for the last one.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "fs/gpu_internal.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/stand_in.h"

#define PACKETS_MAX 64u

/* As a helper would: numbers in order, and nothing behind the last extent. */
static void read_chunks(const struct kv_gpu_reply *reply, const uint8_t *from, size_t size)
{
	for (uint32_t i = 0; i < reply->count; i++) {
		struct kv_gpu_chunk chunk;
		size_t length;

		if (size < sizeof(chunk))
			abort();
		memcpy(&chunk, from, sizeof(chunk));
		length = sizeof(chunk) + chunk.extents * sizeof(struct kv_gpu_extent);
		if (length > size)
			abort();
		from += length;
		size -= length;
	}
	if (size > 0)
		abort();
}

static void close_all(struct msghdr *message)
{
	const struct cmsghdr *item = CMSG_FIRSTHDR(message);
	int fds[KV_DEVICES_MAX];
	size_t size = item ? item->cmsg_len - CMSG_LEN(0) : 0;

	memcpy(fds, item ? CMSG_DATA(item) : (const unsigned char *)fds, size);
	for (size_t i = 0; i < size / sizeof(int); i++)
		(void)close(fds[i]);
}

static void read_answer(int fd, const struct kv_gpu_request *request)
{
	static uint8_t payload[KV_GPU_PACKET_MAX];
	struct kv_gpu_reply reply;
	char control[CMSG_SPACE(KV_DEVICES_MAX * sizeof(int))];
	struct iovec parts[] = {{&reply, sizeof(reply)}, {payload, sizeof(payload)}};
	struct msghdr message = {
		.msg_iov = parts,
		.msg_iovlen = 2,
		.msg_control = control,
		.msg_controllen = sizeof(control),
	};
	ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT);

	if (n < (ssize_t)sizeof(reply) || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) ||
		reply.id != request->id || reply.type != request->type || reply.status > 0)
		abort();
	close_all(&message);
	if (reply.status < 0 && (size_t)n != sizeof(reply))
		abort();
	if (reply.type == KV_GPU_CHUNKS)
		read_chunks(&reply, payload, (size_t)n - sizeof(reply));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct kv_gpu gpu = {.daemon = &stand_in, .lock = PTHREAD_MUTEX_INITIALIZER};
	struct kv_ticket ticket = {.token = "token-of-a-file.", .ino = STAND_IN_FILE, .uid = 5};
	struct kv_link *link = calloc(1, sizeof(*link));
	int ends[2], r = 0;

	if (!link || socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) < 0)
		abort();
	ticket.version = stand_in_version(STAND_IN_FILE - 2);
	RB_INSERT(kv_ticket_tree, &gpu.tickets, &ticket);
	RB_INIT(&link->watches);
	link->fd = ends[0];
	for (unsigned i = 0; i < PACKETS_MAX && size > 0 && r == 0; i++) {
		struct kv_gpu_request request = {0};
		size_t length = size < sizeof(request) ? size : sizeof(request);

		memcpy(&request, data, length);
		if (send(ends[1], data, length, 0) != (ssize_t)length)
			abort();
		r = kv_link_serve(&gpu, link);
		if (r == 0)
			read_answer(ends[1], &request);
		data += length;
		size -= length;
	}
	kv_link_free(&gpu, link);
	(void)close(ends[1]);
	kv_version_unref(ticket.version);
	if (stand_in_held() != 0)
		abort();
	return 0;
}
