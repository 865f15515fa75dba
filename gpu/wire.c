/* SPDX-License-Identifier: Apache-2.0 */
/* Packets between engines and the helper: see wire.h. */
#include "gpu/wire.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "fs/base.h"

#define MAGIC 0x3167766bu /* "kvg1" */

/* What a packet of each type may carry. */
static const struct {
	uint32_t request_payload[2]; /* either of them, exactly */
	uint32_t request_fds;        /* most */
	bool reply;                  /* there is one */
	uint32_t reply_payload;      /* exactly, when it succeeds; 0: depends */
} shapes[_KVG_TYPE_MAX] = {
	[KVG_HELLO] = {{0, 0}, 0, true, KVG_HELLO_SIZE},
	[KVG_MAP] = {{KVG_TICKET_SIZE, KVG_TICKET_SIZE}, 1, true, 0},
	[KVG_READY] = {{0, 0}, 0, false, 0},
	[KVG_UNMAP] = {{0, 0}, 0, false, 0},
	[KVG_PREFETCH] = {{KVG_TICKET_SIZE, KVG_TICKET_SIZE}, 1, true, 0},
	[KVG_STAT] = {{0, KVG_TICKET_SIZE}, 1, true, KVG_WIRE_STAT_SIZE},
	[KVG_EVICT] = {{KVG_TICKET_SIZE, KVG_TICKET_SIZE}, 1, true, 0},
	[KVG_REVOKE] = {{0, 0}, 0, false, 0},
	[KVG_INVALID] = {{0, 0}, 0, false, 0},
};

void kvg_message_encode(const struct kvg_message *message, uint8_t ret_header[KVG_HEADER_SIZE])
{
	memset(ret_header, 0, KVG_HEADER_SIZE);
	kv_put_le32(ret_header, MAGIC);
	kv_put_le16(ret_header + 4, KVG_WIRE_VERSION);
	kv_put_le16(ret_header + 6, message->type);
	kv_put_le32(ret_header + 8, message->flags);
	kv_put_le32(ret_header + 12, message->segments);
	kv_put_le64(ret_header + 16, message->id);
	kv_put_le64(ret_header + 24, message->map);
	kv_put_le64(ret_header + 32, message->offset);
	kv_put_le64(ret_header + 40, message->length);
	kv_put_le32(ret_header + 48, (uint32_t)message->status);
	kv_put_le32(ret_header + 52, message->payload_size);
	kv_put_le32(ret_header + 56, (uint32_t)message->priority);
	kv_put_le32(ret_header + 60, message->ttl_ms);
}

static bool is_shaped(const struct kvg_message *message)
{
	uint32_t size = message->payload_size;

	if ((message->priority != 0 || message->ttl_ms != 0) &&
		(message->type != KVG_PREFETCH || message->flags & KVG_FLAG_REPLY))
		return false;
	if (!(message->flags & KVG_FLAG_REPLY))
		return message->segments == 0 && message->status <= 0 &&
		       (size == shapes[message->type].request_payload[0] ||
			       size == shapes[message->type].request_payload[1]);
	if (!shapes[message->type].reply || message->status > 0)
		return false;
	if (message->status < 0)
		return size == 0 && message->segments == 0;
	if (message->type == KVG_MAP)
		return message->segments <= KVG_FDS_MAX && size == message->segments * 8u;
	return message->segments == 0 && size == shapes[message->type].reply_payload;
}

int kvg_message_decode(const void *data, size_t size, struct kvg_message *ret_message)
{
	const uint8_t *header = data;

	if (size < KVG_HEADER_SIZE || size - KVG_HEADER_SIZE > KVG_PAYLOAD_MAX ||
		kv_get_le32(header) != MAGIC)
		return -EPROTO;
	ret_message->version = kv_get_le16(header + 4);
	ret_message->type = kv_get_le16(header + 6);
	ret_message->flags = kv_get_le32(header + 8);
	ret_message->id = kv_get_le64(header + 16);
	ret_message->status = (int32_t)kv_get_le32(header + 48);
	ret_message->fd_count = 0;
	if (ret_message->version != KVG_WIRE_VERSION)
		return -EPROTONOSUPPORT;
	ret_message->segments = kv_get_le32(header + 12);
	ret_message->map = kv_get_le64(header + 24);
	ret_message->offset = kv_get_le64(header + 32);
	ret_message->length = kv_get_le64(header + 40);
	ret_message->payload_size = kv_get_le32(header + 52);
	ret_message->priority = (int32_t)kv_get_le32(header + 56);
	ret_message->ttl_ms = kv_get_le32(header + 60);
	if (ret_message->type == 0 || ret_message->type >= _KVG_TYPE_MAX ||
		ret_message->flags & ~KVG_FLAGS ||
		ret_message->payload_size != size - KVG_HEADER_SIZE || !is_shaped(ret_message))
		return -EPROTO;
	memcpy(ret_message->payload, header + KVG_HEADER_SIZE, ret_message->payload_size);
	return 0;
}

/* ---- Payloads ---- */

void kvg_ticket_put(const struct kvg_ticket *ticket, struct kvg_message *message)
{
	memcpy(message->payload, ticket->token, sizeof(ticket->token));
	kv_put_le64(message->payload + 16, ticket->ino);
	kv_put_le64(message->payload + 24, ticket->version);
	kv_put_le64(message->payload + 32, ticket->size);
	message->payload_size = KVG_TICKET_SIZE;
}

int kvg_ticket_get(const struct kvg_message *message, struct kvg_ticket *ret_ticket)
{
	if (message->payload_size != KVG_TICKET_SIZE)
		return -EPROTO;
	memcpy(ret_ticket->token, message->payload, sizeof(ret_ticket->token));
	ret_ticket->ino = kv_get_le64(message->payload + 16);
	ret_ticket->version = kv_get_le64(message->payload + 24);
	ret_ticket->size = kv_get_le64(message->payload + 32);
	return 0;
}

void kvg_hello_put(const struct kvg_hello *hello, struct kvg_message *message)
{
	uint8_t *to = message->payload;

	memcpy(to, hello->uuid, 16);
	kv_put_le64(to + 16, hello->granularity);
	kv_put_le64(to + 24, hello->segment);
	kv_put_le64(to + 32, hello->budget);
	memcpy(to + 40, hello->name, 64);
	memcpy(to + 104, hello->mode, 96);
	memcpy(to + 200, hello->reasons, 512);
	message->payload_size = KVG_HELLO_SIZE;
}

int kvg_hello_get(const struct kvg_message *message, struct kvg_hello *ret_hello)
{
	const uint8_t *from = message->payload;

	if (message->payload_size != KVG_HELLO_SIZE)
		return -EPROTO;
	memcpy(ret_hello->uuid, from, 16);
	ret_hello->granularity = kv_get_le64(from + 16);
	ret_hello->segment = kv_get_le64(from + 24);
	ret_hello->budget = kv_get_le64(from + 32);
	memcpy(ret_hello->name, from + 40, 64);
	memcpy(ret_hello->mode, from + 104, 96);
	memcpy(ret_hello->reasons, from + 200, 512);
	ret_hello->name[63] = ret_hello->mode[95] = ret_hello->reasons[511] = '\0';
	return 0;
}

void kvg_stat_put(const struct kvg_wire_stat *stat, struct kvg_message *message)
{
	uint8_t *to = message->payload;

#define PUT(name, help)                                                                            \
	kv_put_le64(to, stat->name);                                                               \
	to += 8;
	KVG_STATS(PUT)
#undef PUT
	message->payload_size = (uint32_t)(to - message->payload);
}

int kvg_stat_get(const struct kvg_message *message, struct kvg_wire_stat *ret_stat)
{
	const uint8_t *from = message->payload;

	if (message->payload_size != KVG_WIRE_STAT_SIZE)
		return -EPROTO;
#define GET(name, help)                                                                            \
	ret_stat->name = kv_get_le64(from);                                                        \
	from += 8;
	KVG_STATS(GET)
#undef GET
	return 0;
}

void kvg_sizes_put(const uint64_t *sizes, unsigned count, struct kvg_message *message)
{
	assert(count <= KVG_FDS_MAX);
	for (unsigned i = 0; i < count; i++)
		kv_put_le64(message->payload + (size_t)i * 8, sizes[i]);
	message->segments = count;
	message->payload_size = count * 8;
}

uint64_t kvg_sizes_get(const struct kvg_message *message, unsigned i)
{
	assert(i < message->segments && (i + 1) * 8 <= message->payload_size);
	return kv_get_le64(message->payload + (size_t)i * 8);
}

/* ---- Packets ---- */

union control {
	struct cmsghdr header;
	char space[CMSG_SPACE(KVG_FDS_MAX * sizeof(int))];
};

int kvg_send(int fd, const struct kvg_message *message)
{
	uint8_t header[KVG_HEADER_SIZE];
	struct iovec parts[] = {
		{.iov_base = header, .iov_len = sizeof(header)},
		{.iov_base = (void *)message->payload, .iov_len = message->payload_size},
	};
	union control control = {0};
	struct msghdr packet = {.msg_iov = parts, .msg_iovlen = 2};
	ssize_t n;

	assert(message->fd_count <= KVG_FDS_MAX && message->payload_size <= KVG_PAYLOAD_MAX);
	kvg_message_encode(message, header);
	if (message->fd_count > 0) {
		size_t size = message->fd_count * sizeof(int);

		packet.msg_control = &control;
		packet.msg_controllen = CMSG_SPACE(size);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(size);
		memcpy(CMSG_DATA(&control.header), message->fds, size);
	}
	do
		n = sendmsg(fd, &packet, MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	if (n >= 0)
		return 0;
	return errno == ECONNRESET || errno == ENOTCONN ? -EPIPE : -errno;
}

static void take_fds(struct msghdr *packet, struct kvg_message *message)
{
	struct cmsghdr *item;

	for (item = CMSG_FIRSTHDR(packet); item; item = CMSG_NXTHDR(packet, item)) {
		size_t count;

		if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS)
			continue;
		count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		assert(count <= KVG_FDS_MAX - message->fd_count);
		memcpy(message->fds + message->fd_count, CMSG_DATA(item), count * sizeof(int));
		message->fd_count += (unsigned)count;
	}
}

int kvg_receive(int fd, struct kvg_message *ret_message)
{
	uint8_t data[KVG_HEADER_SIZE + KVG_PAYLOAD_MAX];
	struct iovec part = {.iov_base = data, .iov_len = sizeof(data)};
	union control control;
	struct msghdr packet = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	struct kvg_message fds = {.fd_count = 0};
	ssize_t n;
	int r;

	do
		n = recvmsg(fd, &packet, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == ECONNRESET ? -EPIPE : -errno;
	take_fds(&packet, &fds);
	/* The end; or an empty packet, which may bring descriptors all the same. */
	if (n == 0) {
		kvg_message_close(&fds);
		return -EPIPE;
	}
	r = packet.msg_flags & MSG_TRUNC ? -EPROTO
					 : kvg_message_decode(data, (size_t)n, ret_message);
	if (r == 0 && !(ret_message->flags & KVG_FLAG_REPLY) &&
		fds.fd_count > shapes[ret_message->type].request_fds)
		r = -EPROTO;
	/* There is room for all that a packet can have, so it is ours that are used up. */
	if (r == 0 && packet.msg_flags & MSG_CTRUNC)
		r = -EMFILE;
	if (r < 0) {
		kvg_message_close(&fds);
		ret_message->fd_count = 0;
		return r;
	}
	ret_message->fd_count = fds.fd_count;
	memcpy(ret_message->fds, fds.fds, fds.fd_count * sizeof(int));
	return 0;
}

void kvg_message_close(struct kvg_message *message)
{
	for (unsigned i = 0; i < message->fd_count; i++)
		if (message->fds[i] >= 0)
			(void)close(message->fds[i]);
	message->fd_count = 0;
}
