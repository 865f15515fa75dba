/* SPDX-License-Identifier: Apache-2.0 */
/* What engines ask for: see server_internal.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "gpu/server_internal.h"

/* ---- MAP ---- */

/* What the process behind OF has not given back, on any connection. */
static uint64_t overdue_of(const struct kvg_server *server, const struct kvg_client *of)
{
	const struct kvg_client *client;
	uint64_t bytes = of->holder.overdue;

	/* Containers' processes may have no number here: then they are not all the same. */
	LIST_FOREACH (client, &server->clients, entry)
		if (client != of && of->pid > 0 && client->pid == of->pid && client->uid == of->uid)
			bytes += client->holder.overdue;
	return bytes;
}

static int give_lease(
	struct kvg_pending *pending, struct kvg_entry *entry, struct kvg_lease **ret_lease)
{
	struct kvg_client *client = pending->client;
	struct kvg_lease *lease;
	int r;

	if (client->holder.maps >= KVG_CLIENT_MAPS_MAX)
		return -EMFILE;
	/* A new connection does not pay an old debt. */
	if (overdue_of(pending->server, client) > 0)
		return -EDQUOT;
	lease = calloc(1, sizeof(*lease));
	if (!lease)
		return -ENOMEM;
	r = kvg_hbm_map(entry, &client->holder, pending->flags & KVG_FLAG_REVOCABLE, &lease->map);
	if (r < 0) {
		free(lease);
		return r;
	}
	lease->map->owner = lease;
	lease->client = client;
	lease->id = ++client->last_map;
	lease->told = entry->state == KVG_RESIDENT;
	LIST_INSERT_HEAD(&client->leases, lease, entry);
	*ret_lease = lease;
	return 0;
}

/* Until when PENDING wants its stretch, if nobody maps it; 0: for good. */
static int64_t expiry_of(const struct kvg_pending *pending)
{
	return pending->ttl_ms > 0 ? kv_monotonic_ms() + pending->ttl_ms : 0;
}

/* The entry that is asked for, there or begun. Takes the answer's hold over. */
static int get_entry(struct kvg_pending *pending, const struct kvg_key *key,
	const struct kvg_answer *answer, struct kvg_entry **ret_entry)
{
	struct kvg_server *server = pending->server;
	struct kvg_entry *entry = kvg_hbm_find(server->hbm, key);
	int r = 0;

	if (entry && entry->state != KVG_FAILED) {
		server->stat.hits += pending->type == KVG_MAP;
		kvg_stage_raise(entry, pending->priority);
		/* What is there for good, or was mapped, is not there for a time only. */
		if (pending->client && entry->expires_ms > 0)
			kvg_hbm_expire(entry, expiry_of(pending));
		kvg_decline(server, answer->reply);
		*ret_entry = entry;
		return 0;
	}
	if (pending->flags & KVG_FLAG_NOSTAGE && !kvg_hbm_has(server->hbm, key))
		r = -ENODATA;
	if (r == 0)
		r = kvg_hbm_admit(
			server->hbm, key, key->end - key->first, kv_monotonic_ms(), &entry);
	if (r < 0) {
		kvg_decline(server, answer->reply);
		return r;
	}
	server->stat.misses += pending->type == KVG_MAP;
	if (pending->ttl_ms > 0)
		kvg_hbm_expire(entry, expiry_of(pending));
	r = kvg_stage_begin(
		server, entry, answer, kv_steal_fd(&pending->file_fd), pending->priority);
	if (r == 0)
		*ret_entry = entry;
	return r;
}

/*
 * The whole segments that hold what PENDING wants of a file of SIZE bytes, in KEY. Too few bytes at
 * the end of a file make no segment: then the one before them too.
 */
static int widen(const struct kvg_pending *pending, uint64_t size, struct kvg_key *key)
{
	const struct kvg_server *server = pending->server;
	uint64_t segment = server->options.segment;
	uint64_t end = pending->length > 0 ? pending->offset + pending->length : size;

	if (pending->offset >= end || end > size)
		return -EINVAL;
	key->first = pending->offset - pending->offset % segment;
	key->end = kv_min_u64(kv_round_up(end, segment), size);
	while (key->first > 0 && key->end - key->first < server->info.granularity)
		key->first -= segment;
	return 0;
}

/* The entry of what PENDING wants. Takes the answer's hold over. */
static int get_stretch(struct kvg_pending *pending, struct kvg_key *key,
	const struct kvg_answer *answer, struct kvg_entry **ret_entry)
{
	int r = widen(pending, answer->reply->size, key);

	if (r == 0)
		return get_entry(pending, key, answer, ret_entry);
	kvg_decline(pending->server, answer->reply);
	return r;
}

static int map_located(
	struct kvg_pending *pending, struct kvg_key *key, const struct kvg_answer *answer)
{
	uint64_t size = answer->reply->size;
	uint64_t end = pending->length > 0 ? pending->offset + pending->length : size;
	struct kvg_entry *entry;
	struct kvg_lease *lease = NULL;
	int r = get_stretch(pending, key, answer, &entry);

	if (r == 0)
		r = give_lease(pending, entry, &lease);
	if (r < 0)
		return r;
	kvg_client_send_map(lease, pending->id, pending->offset, end);
	return 0;
}

/* ---- PREFETCH, STAT, EVICT, hints ---- */

struct match {
	struct kvg_server *server;
	uid_t uid;
	bool all; /* of every user */
	uint64_t version;
	uint64_t bytes;
	bool busy;
	/* STAT: of the user whose entries are being looked at. */
	uid_t of;
	uint64_t of_bytes;
	uint64_t upto; /* offset in the file of what is counted already */
};

static bool is_matched(const struct match *match, const struct kvg_entry *entry)
{
	return (match->all || entry->key.uid == match->uid) && entry->key.version == match->version;
}

static void evict_entry(void *arg, struct kvg_entry *entry)
{
	struct match *match = arg;

	if (!is_matched(match, entry))
		return;
	if (entry->state == KVG_STAGING || entry->map_count > 0) {
		match->busy = true;
		return;
	}
	match->server->stat.evicted += entry->bytes > 0;
	kvg_hbm_stale(entry);
}

static void count_entry(void *arg, struct kvg_entry *entry)
{
	struct match *match = arg;
	const struct kvg_placement *placement = entry->owner;
	uint64_t from, staged;

	if (!is_matched(match, entry) || !placement || entry->state == KVG_FAILED)
		return;
	/* They come user by user, and by their place in the file; they may overlap. */
	if (match->of != entry->key.uid)
		match->of_bytes = match->upto = 0;
	match->of = entry->key.uid;
	from = kv_max_u64(entry->key.first, match->upto);
	staged = atomic_load(&placement->mark->staged);
	if (staged > from) {
		match->of_bytes += staged - from;
		match->upto = staged;
	}
	match->bytes = kv_max_u64(match->bytes, match->of_bytes);
}

static void put_stat(struct kvg_server *server, struct kvg_message *reply)
{
	struct kvg_hbm_usage usage;
	struct kvg_wire_stat stat = server->stat;
	const struct kvg_client *client;

	kvg_hbm_usage(server->hbm, &usage);
	stat.budget = usage.budget;
	stat.share = kvg_server_share(server);
	stat.used = usage.used;
	stat.missing = usage.missing;
	stat.orphaned = usage.orphaned;
	stat.held = usage.held;
	stat.entries = usage.entries;
	stat.resident = usage.resident;
	stat.maps = usage.maps;
	stat.evicted += usage.evicted;
	stat.daemon = kvg_source_is_connected(server->source);
	LIST_FOREACH (client, &server->clients, entry)
		stat.clients += client->fd >= 0;
	kvg_stat_put(&stat, reply);
}

static void send_stat(struct kvg_pending *pending, uint64_t resident, uint64_t size)
{
	struct kvg_server *server = pending->server;
	struct kvg_message *reply = kvg_reply_to(KVG_STAT, pending->id, 0);

	server->stat.asked_resident = resident;
	server->stat.asked_size = size;
	put_stat(server, reply);
	server->stat.asked_resident = server->stat.asked_size = 0;
	kvg_client_send(pending->client, reply);
}

static void each_located(struct kvg_pending *pending, const struct kvg_key *key, uint64_t size)
{
	struct kvg_server *server = pending->server;
	struct kvg_client *client = pending->client;
	struct match match = {
		.server = server,
		.uid = key->uid,
		.all = client->uid == 0 || client->uid == geteuid(),
		.version = key->version,
	};
	struct kvg_hbm_usage before, after;
	struct kvg_message *reply;

	if (pending->type == KVG_STAT) {
		kvg_hbm_of_ino(server->hbm, key->ino, count_entry, &match);
		send_stat(pending, match.bytes, size);
		return;
	}
	kvg_hbm_usage(server->hbm, &before);
	kvg_hbm_of_ino(server->hbm, key->ino, evict_entry, &match);
	kvg_hbm_usage(server->hbm, &after);
	reply = kvg_reply_to(KVG_EVICT, pending->id, match.busy ? -EBUSY : 0);
	reply->length = before.used - after.used;
	kvg_client_send(client, reply);
}

static int prefetch_located(
	struct kvg_pending *pending, struct kvg_key *key, const struct kvg_answer *answer)
{
	struct kvg_entry *entry;
	int r = get_stretch(pending, key, answer, &entry);

	if (r == 0 && pending->client)
		kvg_client_send(pending->client, kvg_reply_to(KVG_PREFETCH, pending->id, 0));
	return r;
}

/* ---- The daemon has answered ---- */

static void pending_free(struct kvg_pending *pending)
{
	LIST_REMOVE(pending, entry);
	if (pending->client)
		pending->client->pending--;
	if (pending->file_fd >= 0)
		(void)close(pending->file_fd);
	free(pending);
}

static int serve_located(struct kvg_pending *pending, const struct kvg_answer *answer)
{
	struct kvg_key key = {
		.ino = answer->reply->ino,
		.version = answer->reply->number,
		.uid = answer->reply->uid,
	};

	/* A ticket is of use to the user it was given to only. */
	if (pending->client && pending->client->uid != key.uid) {
		kvg_decline(pending->server, answer->reply);
		return -EACCES;
	}
	if (pending->type == KVG_MAP)
		return map_located(pending, &key, answer);
	if (pending->type == KVG_PREFETCH)
		return prefetch_located(pending, &key, answer);
	kvg_decline(pending->server, answer->reply);
	each_located(pending, &key, answer->reply->size);
	return 0;
}

static void located(void *arg, const struct kvg_answer *answer)
{
	struct kvg_pending *pending = arg;
	bool wanted = pending->client || pending->type == KVG_PREFETCH;
	int r = answer->error == -EPIPE ? -ENOTCONN : answer->error;

	if (r == 0 && wanted)
		r = serve_located(pending, answer);
	else if (r == 0)
		kvg_decline(pending->server, answer->reply);
	if (r < 0 && pending->client) {
		pending->server->stat.refused++;
		kvg_client_send(pending->client, kvg_reply_to(pending->type, pending->id, r));
	}
	pending_free(pending);
}

static int locate(struct kvg_pending *pending, struct kv_gpu_request *request)
{
	struct kvg_server *server = pending->server;
	int r;

	LIST_INSERT_HEAD(&server->pendings, pending, entry);
	if (pending->client)
		pending->client->pending++;
	request->type = KV_GPU_LOCATE;
	r = kvg_source_ask(server->source, request, located, pending);
	if (r < 0)
		pending_free(pending);
	return r == -EPIPE ? -ENOTCONN : r;
}

void kvg_serve_hint(struct kvg_server *server, const struct kv_gpu_reply *note)
{
	struct kv_gpu_request request = {
		.ino = note->ino,
		.number = note->number,
		.uid = note->uid,
	};
	const struct kvg_key key = {note->ino, note->number, note->uid, 0, note->size};
	struct kvg_pending *pending;

	if (note->size < server->info.granularity || kvg_hbm_find(server->hbm, &key) ||
		!kvg_hbm_hint(server->hbm, &key, kv_monotonic_ms()))
		return;
	pending = calloc(1, sizeof(*pending));
	if (!pending)
		return;
	pending->server = server;
	pending->type = KVG_PREFETCH;
	pending->file_fd = -1;
	(void)locate(pending, &request);
}

/* ---- Requests ---- */

/*
 * In this order, for FD may be of a file system whose server never answers: what the kernel knows
 * of the descriptor first, then of the file system, with a call that asks no server.
 */
static int check_file(const struct kvg_server *server, int fd)
{
	uint64_t device = kvg_source_device(server->source);
	int flags = fcntl(fd, F_GETFL);
	struct statx st;

	if (flags < 0 || flags & O_PATH)
		return -EBADF;
	if ((flags & O_ACCMODE) == O_WRONLY)
		return -EACCES;
	if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &st) < 0)
		return -errno;
	return makedev(st.stx_dev_major, st.stx_dev_minor) == device ? 0 : -EXDEV;
}

static unsigned priority_of(const struct kvg_message *message)
{
	if (message->type != KVG_PREFETCH || message->priority > 0)
		return KVG_PRIORITY_MAP;
	return message->priority < 0 ? KVG_PRIORITY_HINT : KVG_PRIORITY_PREFETCH;
}

static int begin_request(
	struct kvg_server *server, struct kvg_client *client, struct kvg_message *message)
{
	struct kv_gpu_request request = {0};
	struct kvg_pending *pending;
	struct kvg_ticket ticket;
	int r = kvg_ticket_get(message, &ticket);

	if (r < 0)
		return r;
	if (message->fd_count != 1)
		return -EBADF;
	if (client->pending >= KVG_CLIENT_PENDING_MAX)
		return -EAGAIN;
	r = check_file(server, message->fds[0]);
	if (r < 0)
		return r;
	pending = calloc(1, sizeof(*pending));
	if (!pending)
		return -ENOMEM;
	*pending = (struct kvg_pending){
		.server = server,
		.client = client,
		.type = message->type,
		.flags = message->flags,
		.id = message->id,
		.offset = message->offset,
		.length = message->length,
		.priority = priority_of(message),
		.ttl_ms = message->ttl_ms,
		.file_fd = kv_steal_fd(&message->fds[0]),
	};
	if (pending->offset + pending->length < pending->offset)
		pending->length = UINT64_MAX - pending->offset;
	memcpy(request.token, ticket.token, sizeof(request.token));
	return locate(pending, &request);
}

/* Kernels may have turned out not to work since the start. */
static void add_kernels(struct kvg_server *server, struct kvg_hello *hello)
{
	size_t length = strlen(hello->reasons);
	struct kvg_device_info info;

	server->backend->ops->info(server->backend, &info);
	if (strncmp(info.kernels, "off: ", 5) == 0)
		(void)snprintf(hello->reasons + length, sizeof(hello->reasons) - length,
			"%skernels: %s", length > 0 ? "; " : "", info.kernels + 5);
}

static void serve_hello(
	struct kvg_server *server, struct kvg_client *client, const struct kvg_message *request)
{
	struct kvg_message *reply = kvg_reply_to(KVG_HELLO, request->id, 0);
	struct kvg_hello hello = {
		.granularity = server->info.granularity,
		.segment = server->options.segment,
		.budget = server->options.budget,
	};

	kvg_client_latency(client, request->flags & KVG_FLAG_LATENCY);
	memcpy(hello.uuid, server->info.uuid, sizeof(hello.uuid));
	memcpy(hello.name, server->info.name, sizeof(hello.name));
	memcpy(hello.mode, server->info.mode, sizeof(hello.mode));
	memcpy(hello.reasons, server->reasons, sizeof(hello.reasons));
	add_kernels(server, &hello);
	kvg_hello_put(&hello, reply);
	kvg_client_send(client, reply);
}

static int serve_unmap(struct kvg_client *client, uint64_t id)
{
	struct kvg_lease *lease;

	LIST_FOREACH (lease, &client->leases, entry) {
		if (lease->id != id)
			continue;
		kvg_lease_free(lease);
		return 0;
	}
	return -EPROTO;
}

static void serve_plain_stat(struct kvg_server *server, struct kvg_client *client, uint64_t id)
{
	struct kvg_pending pending = {.server = server, .client = client, .id = id};

	send_stat(&pending, 0, 0);
}

void kvg_refuse(struct kvg_server *server, struct kvg_client *client,
	const struct kvg_message *request, int r)
{
	server->stat.refused++;
	kvg_client_send(client, kvg_reply_to(request->type, request->id, r));
}

int kvg_serve(struct kvg_server *server, struct kvg_client *client, struct kvg_message *message)
{
	int r = 0;

	if (message->flags & KVG_FLAG_REPLY) {
		r = -EPROTO;
	} else if (client->refused) {
		kvg_refuse(server, client, message, -EUSERS);
	} else if (message->type == KVG_HELLO) {
		serve_hello(server, client, message);
	} else if (message->type == KVG_UNMAP) {
		r = serve_unmap(client, message->map);
	} else if (message->type == KVG_STAT && message->payload_size == 0) {
		serve_plain_stat(server, client, message->id);
	} else if (message->type == KVG_MAP || message->type == KVG_PREFETCH ||
		   message->type == KVG_STAT || message->type == KVG_EVICT) {
		r = begin_request(server, client, message);
		if (r < 0 && r != -EPROTO) {
			kvg_refuse(server, client, message, r);
			r = 0;
		}
	} else {
		r = -EPROTO;
	}
	kvg_message_close(message);
	return r;
}

void kvg_forget_client(struct kvg_server *server, struct kvg_client *client)
{
	struct kvg_pending *pending;

	LIST_FOREACH (pending, &server->pendings, entry) {
		if (pending->client != client)
			continue;
		pending->client = NULL;
		/* A prefetch was asked for, whoever has gone since; a map is nobody's. */
		client->pending--;
	}
}

void kvg_pendings_free(struct kvg_server *server)
{
	struct kvg_pending *pending;

	while ((pending = LIST_FIRST(&server->pendings)))
		pending_free(pending);
}
