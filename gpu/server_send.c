/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What clients are sent: see server_internal.h. Nobody is ended for reading slowly. Replies wait in
 * a queue while their client's socket is full, and no more requests of it are read meanwhile, which
 * bounds the queue; notes wait as bits of their leases, behind the replies.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "fs/log.h"
#include "gpu/server_internal.h"

/* The longest reply without descriptors. */
#define PAYLOAD_MAX KVG_HELLO_SIZE

/* A reply that waits for room. */
struct kvg_reply {
	STAILQ_ENTRY(kvg_reply) entry;
	uint64_t id;
	/* MAP's, when it succeeds: what is sent of LEASE's entry, segment by segment. */
	struct kvg_lease *lease; /* NULL: another one */
	unsigned first;
	unsigned next;
	unsigned end;
	/* The others: */
	uint16_t type;
	int32_t status;
	uint64_t length;
	uint32_t payload_size;
	uint8_t payload[PAYLOAD_MAX];
};

/* ---- One packet ---- */

/* A message is large: one for all that this thread sends, filled anew each time. */
static struct kvg_message *message_for(uint16_t type)
{
	static struct kvg_message message;

	memset(&message, 0, offsetof(struct kvg_message, payload));
	message.fd_count = 0;
	message.type = type;
	return &message;
}

struct kvg_message *kvg_reply_to(uint16_t type, uint64_t id, int status)
{
	struct kvg_message *reply = message_for(type);

	reply->flags = KVG_FLAG_REPLY;
	reply->id = id;
	reply->status = status;
	return reply;
}

/* The loop sees it, when nobody looks at CLIENT. */
static void end_client(struct kvg_client *client, const char *what, int r)
{
	if (client->ended || client->fd < 0)
		return;
	client->ended = true;
	(void)shutdown(client->fd, SHUT_RDWR);
	/* Most just close the connection, or die. */
	if (r != -EPIPE)
		kv_log_warning("gpu", "client ended: %s pid=%d uid=%u error=\"%s\"", what,
			(int)client->pid, client->uid, strerror(-r));
}

/* 0, also when CLIENT has gone; -EAGAIN: there is no room. */
static int try_to_send(struct kvg_client *client, const struct kvg_message *message)
{
	int r = client->ended || client->fd < 0 ? 0 : kvg_send(client->fd, message);

	if (r == 0 || r == -EAGAIN)
		return r;
	end_client(client, "it cannot be sent anything", r);
	return 0;
}

/* Something is owed, or no more: its socket is watched for room. */
static void set_owes(struct kvg_client *client, bool owes)
{
	bool replies = !STAILQ_EMPTY(&client->replies);
	struct epoll_event event = {
		.events = (owes ? EPOLLOUT : 0u) | (replies ? 0u : EPOLLIN),
		.data.ptr = client,
	};

	client->owes = owes;
	if (client->fd >= 0 && !client->ended && client->events != event.events &&
		epoll_ctl(client->server->epoll_fd, EPOLL_CTL_MOD, client->fd, &event) < 0)
		end_client(client, "its socket cannot be watched", -errno);
	client->events = event.events;
}

/* ---- Replies ---- */

static void queue_reply(struct kvg_client *client, const struct kvg_reply *reply)
{
	struct kvg_reply *copy;

	if (client->ended || client->fd < 0)
		return;
	copy = malloc(sizeof(*copy));
	if (!copy) {
		end_client(client, "no memory for what it does not read", -ENOMEM);
		return;
	}
	*copy = *reply;
	if (copy->lease)
		copy->lease->reply = copy;
	STAILQ_INSERT_TAIL(&client->replies, copy, entry);
	set_owes(client, true);
}

static void reply_free(struct kvg_client *client, struct kvg_reply *reply)
{
	STAILQ_REMOVE(&client->replies, reply, kvg_reply, entry);
	if (reply->lease)
		reply->lease->reply = NULL;
	free(reply);
}

void kvg_client_send(struct kvg_client *client, const struct kvg_message *message)
{
	struct kvg_reply reply = {
		.id = message->id,
		.type = message->type,
		.status = message->status,
		.length = message->length,
		.payload_size = message->payload_size,
	};

	assert(message->fd_count == 0 && message->payload_size <= PAYLOAD_MAX);
	if (!client->owes && try_to_send(client, message) == 0)
		return;
	memcpy(reply.payload, message->payload, message->payload_size);
	queue_reply(client, &reply);
}

static int send_plain(struct kvg_client *client, const struct kvg_reply *reply)
{
	struct kvg_message *message = kvg_reply_to(reply->type, reply->id, reply->status);

	message->length = reply->length;
	message->payload_size = reply->payload_size;
	memcpy(message->payload, reply->payload, reply->payload_size);
	return try_to_send(client, message);
}

/* As many segments as a packet takes: from FIRST on. Their descriptors are the packet's. */
static int pack_segments(struct kvg_entry *entry, unsigned first, unsigned end,
	struct kvg_message *message, unsigned *ret_next)
{
	uint64_t sizes[KVG_FDS_MAX];
	unsigned count = 0;

	while (first + count < end && message->fd_count < KVG_FDS_MAX) {
		int r = kvg_hbm_export(entry, first + count, &message->fds[message->fd_count]);

		if (r < 0)
			return r;
		message->fd_count++;
		sizes[count] = entry->parts[first + count].block->size;
		count++;
	}
	kvg_sizes_put(sizes, count, message);
	*ret_next = first + count;
	return 0;
}

/* The next packet of REPLY. An error ends it, and tells of a mapping only who has heard of it. */
static struct kvg_message *pack_map(const struct kvg_reply *reply, unsigned *ret_next)
{
	const struct kvg_lease *lease = reply->lease;
	struct kvg_entry *entry = lease->map->entry;
	const struct kvg_placement *placement = entry->owner;
	struct kvg_message *message = kvg_reply_to(KVG_MAP, reply->id, 0);
	bool first = reply->next == reply->first;
	int r = 0;

	if (first) {
		message->fds[0] = fcntl(placement->mark_fd, F_DUPFD_CLOEXEC, 0);
		r = message->fds[0] < 0 ? -errno : 0;
		message->fd_count = r == 0;
	}
	if (r == 0)
		r = pack_segments(entry, reply->next, reply->end, message, ret_next);
	if (r < 0) {
		kvg_message_close(message);
		message = kvg_reply_to(KVG_MAP, reply->id, r);
		message->map = first ? 0 : lease->id;
		return message;
	}
	message->map = lease->id;
	message->offset = entry->key.first + reply->first * entry->parts[0].block->size;
	message->length = placement->file_size;
	message->flags |= *ret_next < reply->end ? KVG_FLAG_MORE : 0;
	/* Who is owed READY is told by that, which may be bad news. */
	message->flags |= lease->told && !(lease->owed & 1u << KVG_READY) ? KVG_FLAG_READY : 0;
	return message;
}

/*
 * All packets of it. -EAGAIN: REPLY goes on when there is room; -ECANCELED: it has failed, and the
 * client knows of no mapping that it could give back.
 */
static int send_map(struct kvg_reply *reply)
{
	while (reply->next < reply->end) {
		unsigned next = reply->next;
		struct kvg_message *message = pack_map(reply, &next);
		int status = message->status;
		bool known = message->map != 0;
		int r = try_to_send(reply->lease->client, message);

		kvg_message_close(message);
		if (r < 0)
			return r;
		if (status < 0 && !known)
			return -ECANCELED;
		reply->next = status < 0 ? reply->end : next;
	}
	return 0;
}

static void drop_lease(struct kvg_lease *lease)
{
	lease->client->server->stat.refused++;
	kvg_lease_free(lease);
}

void kvg_client_send_map(struct kvg_lease *lease, uint64_t id, uint64_t offset, uint64_t end)
{
	struct kvg_client *client = lease->client;
	const struct kvg_entry *entry = lease->map->entry;
	uint64_t segment = entry->parts[0].block->size;
	unsigned first = (unsigned)((offset - entry->key.first) / segment);
	struct kvg_reply reply = {
		.id = id,
		.lease = lease,
		.first = first,
		.next = first,
		.end = (unsigned)kv_div_round_up(end - entry->key.first, segment),
	};
	int r = client->owes ? -EAGAIN : send_map(&reply);

	if (r == -EAGAIN)
		queue_reply(client, &reply);
	else if (r < 0)
		drop_lease(lease);
}

void kvg_lease_free(struct kvg_lease *lease)
{
	if (lease->reply)
		reply_free(lease->client, lease->reply);
	LIST_REMOVE(lease, entry);
	kvg_hbm_unmap(lease->map);
	free(lease);
}

void kvg_client_forget_owed(struct kvg_client *client)
{
	struct kvg_reply *reply;

	while ((reply = STAILQ_FIRST(&client->replies)))
		reply_free(client, reply);
	client->owes = false;
}

/* ---- Notes ---- */

/* Those that LEASE is owed. -EAGAIN: there is no room for more. */
static int send_owed(struct kvg_lease *lease)
{
	static const uint16_t types[] = {KVG_READY, KVG_INVALID, KVG_REVOKE};

	for (unsigned i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
		struct kvg_message *message;
		int64_t left_ms;

		if (!(lease->owed & 1u << types[i]))
			continue;
		message = message_for(types[i]);
		message->map = lease->id;
		if (types[i] == KVG_READY)
			message->status = lease->status;
		left_ms = lease->deadline_ms - kv_monotonic_ms();
		if (types[i] == KVG_REVOKE)
			message->length = left_ms > 0 ? (uint64_t)left_ms : 0;
		if (try_to_send(lease->client, message) == -EAGAIN)
			return -EAGAIN;
		lease->owed &= ~(1u << types[i]);
	}
	return 0;
}

static void give_note(struct kvg_lease *lease, enum kvg_type type)
{
	lease->owed |= 1u << type;
	if (!lease->client->owes && send_owed(lease) == -EAGAIN)
		set_owes(lease->client, true);
}

void kvg_tell_ready(struct kvg_entry *entry, int status)
{
	struct kvg_map *map;

	LIST_FOREACH (map, &entry->maps, of_entry) {
		struct kvg_lease *lease = map->owner;

		if (lease->told)
			continue;
		lease->told = true;
		lease->status = status;
		give_note(lease, KVG_READY);
	}
}

void kvg_tell_invalid(struct kvg_entry *entry)
{
	struct kvg_map *map;

	LIST_FOREACH (map, &entry->maps, of_entry)
		give_note(map->owner, KVG_INVALID);
}

void kvg_tell_revoke(void *arg, struct kvg_map *map, int64_t deadline_ms)
{
	struct kvg_lease *lease = map->owner;

	(void)arg;
	lease->deadline_ms = deadline_ms;
	give_note(lease, KVG_REVOKE);
}

/* ---- There is room ---- */

void kvg_settle(struct kvg_client *client)
{
	struct kvg_reply *reply;
	struct kvg_lease *lease;

	while ((reply = STAILQ_FIRST(&client->replies))) {
		int r = reply->lease ? send_map(reply) : send_plain(client, reply);

		if (r == -EAGAIN)
			return;
		if (r < 0)
			drop_lease(reply->lease);
		else
			reply_free(client, reply);
	}
	LIST_FOREACH (lease, &client->leases, entry) {
		if (send_owed(lease) == -EAGAIN) {
			/* Its requests are read again. */
			set_owes(client, true);
			return;
		}
	}
	set_owes(client, false);
}
