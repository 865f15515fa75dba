/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts, and talking to the helper: see kvg.h. */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>

#include "fs/base.h"
#include "fs/kvfs_ioctl.h"
#include "gpu/kvg_internal.h"
#include "gpu/socket.h"

/* Of this thread's last kvg_open. */
static _Thread_local char open_error[512];

int kvg_fail(struct kvg_ctx *ctx, int r, const char *format, ...)
{
	const struct kvg_backend *backend = ctx->backend;
	va_list args;

	/* Then it does not matter what it was that could not be done. */
	if (r == -EIO && backend && backend->ops->is_dead(ctx->backend)) {
		(void)snprintf(ctx->error, sizeof(ctx->error),
			"the device is lost to this process (CUDA error %d): end it and start it "
			"again",
			backend->ops->last_code(ctx->backend));
		return r;
	}
	va_start(args, format);
	(void)vsnprintf(ctx->error, sizeof(ctx->error), format, args);
	va_end(args);
	return r;
}

int kvg_check_device(struct kvg_ctx *ctx)
{
	if (!ctx->backend)
		return kvg_fail(ctx, -EINVAL, "opened without a device");
	return ctx->backend->ops->is_dead(ctx->backend) ? kvg_fail(ctx, -EIO, "lost") : 0;
}

const char *kvg_error(const struct kvg_ctx *ctx)
{
	return ctx ? ctx->error : open_error;
}

int kvg_last_cuda(const struct kvg_ctx *ctx)
{
	return ctx->backend ? ctx->backend->ops->last_code(ctx->backend) : 0;
}

int kvg_fd(const struct kvg_ctx *ctx)
{
	return ctx->fd;
}

/* ---- Messages ---- */

int kvg_lost(struct kvg_ctx *ctx)
{
	if (ctx->fd >= 0)
		(void)close(ctx->fd);
	ctx->fd = -1;
	return kvg_fail(ctx, ctx->had_helper ? -EPIPE : -ENOTCONN,
		ctx->had_helper ? "the GPU helper has gone; what is mapped stays valid"
				: "opened without a GPU helper");
}

struct kvg_message *kvg_request(struct kvg_ctx *ctx, uint16_t type)
{
	struct kvg_message *message = &ctx->message;

	memset(message, 0, offsetof(struct kvg_message, payload));
	message->fd_count = 0;
	message->type = type;
	message->id = ++ctx->last_id;
	return message;
}

/* What the helper says of its own accord. */
static void handle_note(struct kvg_ctx *ctx, const struct kvg_message *message)
{
	struct kvg_buf *buf;

	LIST_FOREACH (buf, &ctx->bufs, entry)
		if (buf->id == message->map)
			break;
	/* It may cross an unmap on its way. */
	if (!buf)
		return;
	if (message->type == KVG_READY) {
		buf->ready = true;
		buf->status = message->status;
	} else if (message->type == KVG_REVOKE && ctx->opts.event) {
		ctx->opts.event(ctx->opts.arg, buf, KVG_EVENT_REVOKE, (unsigned)message->length);
	} else if (message->type == KVG_INVALID && ctx->opts.event) {
		ctx->opts.event(ctx->opts.arg, buf, KVG_EVENT_INVALID, 0);
	}
}

int kvg_next(struct kvg_ctx *ctx, int ms)
{
	struct pollfd fd = {.fd = ctx->fd, .events = POLLIN};
	int r;

	if (ctx->fd < 0)
		return kvg_lost(ctx);
	r = poll(&fd, 1, ms);
	if (r == 0)
		return -EAGAIN;
	if (r < 0)
		return errno == EINTR ? 0 : -errno;
	r = kvg_receive(ctx->fd, &ctx->message);
	if (r == -EAGAIN)
		return 0;
	/* One answer is of no use then; the next one may be. */
	if ((r == -EMFILE || r == -EPROTONOSUPPORT) && ctx->message.flags & KVG_FLAG_REPLY)
		ctx->message.status = r;
	else if (r < 0)
		return kvg_lost(ctx);
	if (ctx->message.flags & KVG_FLAG_REPLY)
		return 1;
	handle_note(ctx, &ctx->message);
	kvg_message_close(&ctx->message);
	return 0;
}

void kvg_ignore(struct kvg_ctx *ctx)
{
	const struct kvg_message *late = &ctx->message;
	/* Its last packet says it: the helper has a mapping of ours, or had begun one. */
	bool mapped = late->type == KVG_MAP && late->map != 0 && !(late->flags & KVG_FLAG_MORE);
	uint64_t map = late->map;

	kvg_message_close(&ctx->message);
	if (!mapped || ctx->fd < 0)
		return;
	kvg_request(ctx, KVG_UNMAP)->map = map;
	if (kvg_send(ctx->fd, &ctx->message) < 0)
		(void)kvg_lost(ctx);
}

int kvg_call(struct kvg_ctx *ctx)
{
	uint64_t id = ctx->message.id;
	int r = ctx->fd < 0 ? -EPIPE : kvg_send(ctx->fd, &ctx->message);

	if (r < 0)
		return kvg_lost(ctx);
	for (;;) {
		r = kvg_next(ctx, KVG_PATIENCE_MS);
		if (r == -EAGAIN)
			return kvg_fail(ctx, -ETIMEDOUT, "the GPU helper does not answer");
		if (r < 0)
			return r;
		if (r == 1 && ctx->message.id == id) {
			r = ctx->message.status;
			/* What could not be taken is given back. */
			if (r < 0)
				kvg_ignore(ctx);
			else if (ctx->message.type != KVG_MAP)
				kvg_message_close(&ctx->message);
			return r;
		}
		if (r == 1)
			kvg_ignore(ctx);
	}
}

int kvg_dispatch(struct kvg_ctx *ctx)
{
	int r;

	do {
		r = kvg_next(ctx, 0);
		if (r == 1)
			kvg_ignore(ctx);
	} while (r >= 0);
	return r == -EAGAIN ? 0 : r;
}

static int get_ticket(struct kvg_ctx *ctx, int fd, struct kvg_ticket *ret_ticket)
{
	struct kvfs_ticket ticket = {0};

	if (ioctl(fd, KVFS_IOC_TICKET, &ticket) < 0) {
		int r = -errno;

		if (r == -ENOTTY || r == -EINVAL)
			return kvg_fail(ctx, -EXDEV, "not a file of a kvfs mount");
		if (r == -EBUSY)
			return kvg_fail(ctx, r,
				"the file is being written: open it for reading "
				"when it is published");
		return kvg_fail(ctx, r, "the mount gives no ticket: %s", strerror(-r));
	}
	memcpy(ret_ticket->token, ticket.token, sizeof(ret_ticket->token));
	ret_ticket->ino = ticket.ino;
	ret_ticket->version = ticket.version;
	ret_ticket->size = ticket.size;
	return 0;
}

int kvg_file_request(struct kvg_ctx *ctx, uint16_t type, int fd, struct kvg_ticket *ret_ticket)
{
	struct kvg_message *message = kvg_request(ctx, type);
	int r = ctx->fd < 0 ? kvg_lost(ctx) : get_ticket(ctx, fd, ret_ticket);

	if (r < 0)
		return r;
	kvg_ticket_put(ret_ticket, message);
	message->fds[0] = fd;
	message->fd_count = 1;
	return 0;
}

/* ---- Small requests ---- */

int kvg_prefetch(struct kvg_ctx *ctx, int fd, uint64_t off, uint64_t len, int prio, unsigned ttl_ms)
{
	struct kvg_ticket ticket;
	int r = kvg_file_request(ctx, KVG_PREFETCH, fd, &ticket);

	ctx->message.priority = prio;
	ctx->message.ttl_ms = ttl_ms;
	ctx->message.offset = off;
	ctx->message.length = len;
	if (r == 0)
		r = kvg_call(ctx);
	return r;
}

int kvg_evict(struct kvg_ctx *ctx, int fd, uint64_t *ret_bytes)
{
	struct kvg_ticket ticket;
	int r = kvg_file_request(ctx, KVG_EVICT, fd, &ticket);

	if (r == 0)
		r = kvg_call(ctx);
	if (r == 0)
		*ret_bytes = ctx->message.length;
	return r;
}

static size_t list_stats(
	const struct kvg_wire_stat *stat, struct kvg_stat_entry *ret_entries, size_t capacity)
{
	const struct kvg_stat_entry entries[] = {
#define ENTRY(name, help) {#name, help, stat->name},
		KVG_STATS(ENTRY)
#undef ENTRY
	};
	size_t count = sizeof(entries) / sizeof(entries[0]);

	count = count < capacity ? count : capacity;
	memcpy(ret_entries, entries, count * sizeof(entries[0]));
	return count;
}

int kvg_stats(struct kvg_ctx *ctx, int fd, struct kvg_stat_entry *ret_entries, size_t capacity,
	size_t *ret_n)
{
	struct kvg_wire_stat stat;
	struct kvg_ticket ticket;
	int r = 0;

	if (fd >= 0)
		r = kvg_file_request(ctx, KVG_STAT, fd, &ticket);
	else
		(void)kvg_request(ctx, KVG_STAT);
	if (r == 0)
		r = kvg_call(ctx);
	if (r == 0)
		r = kvg_stat_get(&ctx->message, &stat);
	if (r == 0)
		*ret_n = list_stats(&stat, ret_entries, capacity);
	return r;
}

int kvg_helper(const struct kvg_ctx *ctx, struct kvg_helper *ret_helper)
{
	if (!ctx->had_helper)
		return -ENOTCONN;
	ret_helper->granularity = ctx->hello.granularity;
	ret_helper->segment = ctx->hello.segment;
	ret_helper->budget = ctx->hello.budget;
	memcpy(ret_helper->uuid, ctx->hello.uuid, sizeof(ret_helper->uuid));
	memcpy(ret_helper->name, ctx->hello.name, sizeof(ret_helper->name));
	memcpy(ret_helper->mode, ctx->hello.mode, sizeof(ret_helper->mode));
	memcpy(ret_helper->reasons, ctx->hello.reasons, sizeof(ret_helper->reasons));
	return 0;
}

/* ---- Life ---- */

static int open_backend(struct kvg_ctx *ctx)
{
	const struct kvg_backend_open open = {
		.device = ctx->opts.device,
		.client = true,
		.no_kernels = (ctx->opts.flags & KVG_OPEN_NOKERNELS) != 0,
	};
	char reasons[sizeof(ctx->error)];
	int r = kvg_backend_choose(
		ctx->opts.backend, &open, &ctx->backend, reasons, sizeof(reasons));

	if (r < 0)
		return kvg_fail(ctx, r, "%s", reasons);
	ctx->backend->ops->info(ctx->backend, &ctx->info);
	return 0;
}

static int find_socket(struct kvg_ctx *ctx, const char *socket_path, char *ret_path, size_t size)
{
	if (socket_path) {
		int n = snprintf(ret_path, size, "%s", socket_path);

		return n < 0 || (size_t)n >= size
			       ? kvg_fail(ctx, -ENAMETOOLONG, "too long for a socket")
			       : 0;
	}
	if (!ctx->backend)
		return kvg_fail(ctx, -EINVAL, "without a device, the socket must be named");
	return kvg_socket_path(ctx->info.uuid, ret_path, size);
}

static int explain_hello(struct kvg_ctx *ctx, int r, const char *path)
{
	if (r == -EUSERS)
		return kvg_fail(ctx, r,
			"kvgpud at %.120s has as many connections as it allows, of this user or of "
			"all: close some (see --share)",
			path);
	if (r == -EPROTONOSUPPORT)
		return kvg_fail(ctx, r,
			"kvgpud at %.120s speaks version %u of the protocol, this libkvg %u: "
			"install both from one release",
			path, ctx->message.version, KVG_WIRE_VERSION);
	if (r == -EPIPE || r == -EPROTO)
		return kvg_fail(ctx, -EPROTONOSUPPORT,
			"kvgpud at %.120s has ended the connection: it has too many, or is of "
			"another version",
			path);
	return r;
}

static int connect_helper(struct kvg_ctx *ctx, const char *path)
{
	struct sockaddr_un address;
	int r = kvg_socket_address(path, &address);

	if (r < 0)
		return kvg_fail(ctx, r, "%.180s: too long for a socket", path);
	ctx->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (ctx->fd < 0 || connect(ctx->fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		r = errno == ENOENT || errno == ECONNREFUSED ? -ENOTCONN : -errno;
		return kvg_fail(ctx, r,
			r == -ENOTCONN ? "no kvgpud listens at %.180s"
				       : "%.180s: no permission, or no socket",
			path);
	}
	ctx->had_helper = true;
	kvg_request(ctx, KVG_HELLO)->flags =
		ctx->opts.flags & KVG_OPEN_LATENCY ? KVG_FLAG_LATENCY : 0;
	r = kvg_call(ctx);
	if (r == 0)
		r = kvg_hello_get(&ctx->message, &ctx->hello);
	if (r < 0)
		return explain_hello(ctx, r, path);
	if (ctx->backend && memcmp(ctx->hello.uuid, ctx->info.uuid, sizeof(ctx->info.uuid)) != 0)
		return kvg_fail(ctx, -EXDEV, "kvgpud at %.160s is of another device (%.40s)", path,
			ctx->hello.name);
	return 0;
}

static int ctx_open(struct kvg_ctx *ctx, const char *socket_path)
{
	char path[256];
	int r;

	if (ctx->opts.flags &
		~(KVG_OPEN_CONTROL | KVG_OPEN_NOHELPER | KVG_OPEN_LATENCY | KVG_OPEN_NOKERNELS))
		return kvg_fail(ctx, -EINVAL, "flags that this libkvg does not know");
	r = ctx->opts.flags & KVG_OPEN_CONTROL ? 0 : open_backend(ctx);
	if (r < 0 || ctx->opts.flags & KVG_OPEN_NOHELPER)
		return r;
	r = find_socket(ctx, socket_path, path, sizeof(path));
	return r < 0 ? r : connect_helper(ctx, path);
}

int kvg_open(struct kvg_ctx **ret_ctx, const char *socket_path, const struct kvg_opts *opts)
{
	struct kvg_ctx *ctx = calloc(1, sizeof(*ctx));
	int r;

	if (!ctx)
		return -ENOMEM;
	ctx->fd = -1;
	if (opts)
		memcpy(&ctx->opts, opts, kv_min_u64(opts->size, sizeof(*opts)));
	LIST_INIT(&ctx->bufs);
	(void)pthread_mutex_init(&ctx->ring_lock, NULL);
	(void)pthread_cond_init(&ctx->ring_free, NULL);
	r = ctx_open(ctx, socket_path);
	if (r < 0) {
		(void)snprintf(open_error, sizeof(open_error), "%s", ctx->error);
		kvg_close(ctx);
		return r;
	}
	*ret_ctx = ctx;
	return 0;
}

static void ring_done(struct kvg_ctx *ctx)
{
	size_t size = KVG_RING_SLOTS * KVG_RING_SLOT_SIZE;

	for (unsigned i = 0; i < KVG_RING_SLOTS; i++)
		if (ctx->backend)
			ctx->backend->ops->event_free(ctx->backend, ctx->slots[i].event);
	if (!ctx->ring)
		return;
	ctx->backend->ops->host_unregister(ctx->backend, ctx->ring);
	(void)munmap(ctx->ring, size);
}

void kvg_close(struct kvg_ctx *ctx)
{
	if (!ctx)
		return;
	assert(LIST_EMPTY(&ctx->bufs) && ctx->ops == 0);
	if (ctx->fd >= 0)
		(void)close(ctx->fd);
	ring_done(ctx);
	kvg_backend_close(ctx->backend);
	(void)pthread_cond_destroy(&ctx->ring_free);
	(void)pthread_mutex_destroy(&ctx->ring_lock);
	free(ctx);
}
