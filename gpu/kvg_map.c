/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers: files of the helper's, mapped in this process. */
#include <errno.h>
#include <inttypes.h>
#include <sys/mman.h>

#include "fs/base.h"
#include "gpu/kvg_internal.h"

/* The slowest staging that is waited for: 60 s, and a second more each 100 MB. */
#define STAGE_PATIENCE_MS 60000
#define STAGE_BYTES_PER_MS 100000
/* Between two looks whether the helper lives. */
#define SLEEP_MS 100

/* ---- Taking the segments in ---- */

struct incoming {
	struct kvg_segment **segments;
	size_t count;
	size_t capacity;
	uint64_t bytes;
};

static void incoming_done(struct kvg_ctx *ctx, struct incoming *in)
{
	for (size_t i = 0; i < in->count; i++)
		ctx->backend->ops->segment_free(ctx->backend, in->segments[i]);
	free(in->segments);
}

/* One packet's segments: FIRST is the index of the first descriptor that is one. */
static int take_packet(struct kvg_ctx *ctx, struct incoming *in, unsigned first)
{
	struct kvg_message *message = &ctx->message;

	if (message->fd_count != message->segments + first || message->segments == 0)
		return -EPROTO;
	if (in->count + message->segments > in->capacity) {
		size_t capacity = in->count + message->segments + KVG_FDS_MAX;
		struct kvg_segment **more =
			realloc(in->segments, capacity * sizeof(struct kvg_segment *));

		if (!more)
			return -ENOMEM;
		in->segments = more;
		in->capacity = capacity;
	}
	for (unsigned i = 0; i < message->segments; i++) {
		uint64_t size = kvg_sizes_get(message, i);
		int r = ctx->backend->ops->segment_import(
			ctx->backend, message->fds[first + i], size, &in->segments[in->count]);

		if (r < 0)
			return r;
		in->count++;
		in->bytes += size;
	}
	return 0;
}

static int take_mark(struct kvg_ctx *ctx, struct kvg_buf *buf)
{
	void *memory = ctx->message.fd_count > 0 ? mmap(NULL, KVG_WATERMARK_SIZE, PROT_READ,
							   MAP_SHARED, ctx->message.fds[0], 0)
						 : MAP_FAILED;

	if (memory == MAP_FAILED)
		return -EPROTO;
	buf->mark = memory;
	return 0;
}

/* All packets of the reply, of which the first has come. */
static int take_reply(struct kvg_ctx *ctx, struct kvg_buf *buf, struct incoming *in)
{
	uint64_t id = ctx->message.id;
	int r = take_mark(ctx, buf);
	bool more;

	buf->id = ctx->message.map;
	buf->first = ctx->message.offset;
	buf->ready = ctx->message.flags & KVG_FLAG_READY;
	if (r == 0)
		r = take_packet(ctx, in, 1);
	more = ctx->message.flags & KVG_FLAG_MORE;
	kvg_message_close(&ctx->message);
	while (more) {
		int n = kvg_next(ctx, KVG_PATIENCE_MS);

		if (n == -EAGAIN) {
			/* Given back when the last packet comes after all. */
			buf->id = 0;
			return -ETIMEDOUT;
		}
		if (n < 0)
			return n;
		if (n == 1 && ctx->message.id != id)
			kvg_ignore(ctx);
		if (n == 0 || ctx->message.id != id)
			continue;
		more = ctx->message.status == 0 && ctx->message.flags & KVG_FLAG_MORE;
		if (r == 0)
			r = ctx->message.status < 0 ? ctx->message.status : take_packet(ctx, in, 0);
		kvg_message_close(&ctx->message);
	}
	return r;
}

static int map_segments(struct kvg_buf *buf, const struct incoming *in)
{
	struct kvg_backend *backend = buf->ctx->backend;
	int r;

	if (buf->off < buf->first || buf->off + buf->len > buf->first + in->bytes)
		return -EPROTO;
	r = backend->ops->map(backend, in->segments, in->count, false, &buf->mapping);
	if (r == 0)
		buf->address = backend->ops->address(backend, buf->mapping);
	return r;
}

/* ---- Giving back ---- */

static void buf_free(struct kvg_buf *buf)
{
	struct kvg_ctx *ctx = buf->ctx;
	struct kvg_message *message;

	ctx->backend->ops->unmap(ctx->backend, buf->mapping);
	if (buf->mark)
		(void)munmap((void *)buf->mark, KVG_WATERMARK_SIZE);
	if (buf->id != 0 && ctx->fd >= 0) {
		message = kvg_request(ctx, KVG_UNMAP);
		message->map = buf->id;
		if (kvg_send(ctx->fd, message) < 0)
			(void)kvg_lost(ctx);
	}
	LIST_REMOVE(buf, entry);
	free(buf);
}

int kvg_unmap(struct kvg_buf *buf, kvg_stream_handle stream)
{
	int r;

	if (!buf)
		return 0;
	r = buf->ctx->backend->ops->stream_sync(buf->ctx->backend, stream);
	buf_free(buf);
	return r;
}

/* ---- Waiting ---- */

/* READY, or why it will never be. */
static int wait_ready(struct kvg_buf *buf)
{
	int64_t end_ms = kv_monotonic_ms() + STAGE_PATIENCE_MS +
			 (int64_t)(buf->ticket.size / STAGE_BYTES_PER_MS);

	while (!buf->ready) {
		int r = kvg_next(buf->ctx, SLEEP_MS);

		if (r == 1)
			kvg_ignore(buf->ctx);
		if (r < 0 && r != -EAGAIN)
			return r;
		if (kv_monotonic_ms() > end_ms)
			return kvg_fail(buf->ctx, -ETIMEDOUT, "the file does not arrive");
	}
	return buf->status < 0 ? kvg_fail(buf->ctx, buf->status, "the file could not be staged: %s",
					 strerror(-buf->status))
			       : 0;
}

/* 0: it is there; -EAGAIN: not yet. */
static int look(const struct kvg_buf *buf, uint64_t end)
{
	int status;

	if (buf->ready)
		return buf->status;
	/* Pair with the stores of kvg_watermark_set. */
	if (atomic_load_explicit(&buf->mark->staged, memory_order_acquire) >= end)
		return 0;
	status = atomic_load_explicit(&buf->mark->status, memory_order_acquire);
	return status < 0 ? status : -EAGAIN;
}

int kvg_wait(struct kvg_buf *buf, uint64_t upto, int timeout_ms)
{
	uint64_t end = buf->off + kv_min_u64(upto, buf->len);
	int64_t end_ms = timeout_ms < 0 ? INT64_MAX : kv_monotonic_ms() + timeout_ms;

	for (;;) {
		uint32_t sequence =
			atomic_load_explicit(&buf->mark->sequence, memory_order_acquire);
		int64_t left_ms;
		int r = look(buf, end);

		if (r != -EAGAIN)
			return r;
		/* A helper that has died wakes nobody. */
		r = kvg_dispatch(buf->ctx);
		if (r < 0 && look(buf, end) == -EAGAIN)
			return r;
		left_ms = end_ms - kv_monotonic_ms();
		if (left_ms <= 0)
			return kvg_fail(buf->ctx, -ETIMEDOUT, "not there yet");
		kvg_watermark_sleep(
			buf->mark, sequence, (int)kv_min_u64((uint64_t)left_ms, SLEEP_MS));
	}
}

/* ---- Map ---- */

static const char *explain(int r)
{
	switch (r) {
	case -ERANGE:
		return "smaller than the device's granularity: pull it";
	case -E2BIG:
		return "larger than what files may take: map parts of it, or pull it";
	case -ENOSPC:
		return "no room in device memory now: pull it";
	case -ENOBUFS:
		return "this user has his share of device memory mapped: unmap some, or pull it";
	case -EDQUOT:
		return "this process has not given back what was revoked";
	case -EXDEV:
		return "not on the mount that the helper serves";
	case -ESTALE:
		return "the file was closed, or is another user's";
	case -ENODATA:
		return "not in device memory";
	case -ENOTCONN:
		return "the helper has lost the daemon";
	default:
		return strerror(-r);
	}
}

static int send_map(struct kvg_buf *buf, int fd, unsigned flags)
{
	struct kvg_ctx *ctx = buf->ctx;
	int r = kvg_file_request(ctx, KVG_MAP, fd, &buf->ticket);

	if (r < 0)
		return r;
	if (buf->len == 0 && buf->off < buf->ticket.size)
		buf->len = buf->ticket.size - buf->off;
	ctx->message.offset = buf->off;
	ctx->message.length = buf->len;
	ctx->message.flags = (flags & KVG_MAP_NOSTAGE ? KVG_FLAG_NOSTAGE : 0) |
			     (flags & KVG_MAP_REVOCABLE ? KVG_FLAG_REVOCABLE : 0);
	r = kvg_call(ctx);
	return r < 0 && ctx->fd >= 0 ? kvg_fail(ctx, r, "%s", explain(r)) : r;
}

int kvg_map(struct kvg_ctx *ctx, int fd, uint64_t off, uint64_t len, unsigned flags,
	struct kvg_buf **ret_buf)
{
	struct incoming in = {0};
	struct kvg_buf *buf;
	int r = kvg_check_device(ctx);

	if (r < 0)
		return r;
	if (flags & ~(KVG_MAP_EARLY | KVG_MAP_NOSTAGE | KVG_MAP_REVOCABLE) ||
		(flags & KVG_MAP_REVOCABLE && !ctx->opts.event))
		return kvg_fail(ctx, -EINVAL, "unknown flags, or REVOCABLE without an event call");
	buf = calloc(1, sizeof(*buf));
	if (!buf)
		return -ENOMEM;
	buf->ctx = ctx;
	buf->off = off;
	buf->len = len;
	LIST_INSERT_HEAD(&ctx->bufs, buf, entry);
	r = send_map(buf, fd, flags);
	if (r == 0) {
		r = take_reply(ctx, buf, &in);
		if (r == 0)
			r = map_segments(buf, &in);
		if (r < 0)
			(void)kvg_fail(
				ctx, r, "the helper's segments cannot be mapped: %s", strerror(-r));
	}
	/* The mapping holds them. */
	incoming_done(ctx, &in);
	if (r == 0 && !(flags & KVG_MAP_EARLY))
		r = wait_ready(buf);
	if (r < 0) {
		buf_free(buf);
		return r;
	}
	*ret_buf = buf;
	return 0;
}

int kvg_info(const struct kvg_buf *buf, struct kvg_info *ret_info)
{
	*ret_info = (struct kvg_info){
		.ptr = buf->address + (buf->off - buf->first),
		.off = buf->off,
		.len = buf->len,
		.version = buf->ticket.version,
		.ino = buf->ticket.ino,
		.device_type = buf->ctx->info.dl_device_type,
		.device_id = buf->ctx->info.dl_device_id,
	};
	memcpy(ret_info->uuid, buf->ctx->info.uuid, sizeof(ret_info->uuid));
	return 0;
}

int kvg_scatter(struct kvg_buf *buf, const struct kvg_seg *segs, size_t n, kvg_stream_handle stream)
{
	struct kvg_backend *backend = buf->ctx->backend;
	_cleanup_free_ struct kvg_seg *list = NULL;
	_cleanup_free_ struct kvg_copy *copies = NULL;
	size_t count;
	int r = kvg_check_device(buf->ctx);

	if (r == 0)
		r = kvg_list_new(segs, n, UINT64_MAX, &list, &count);
	if (r < 0)
		return r;
	for (size_t i = 0; i < count; i++)
		if (list[i].file_off < buf->off ||
			list[i].file_off + list[i].len > buf->off + buf->len)
			return kvg_fail(buf->ctx, -EINVAL,
				"bytes at %" PRIu64 " of the file are not in this buffer",
				list[i].file_off);
	copies = malloc((count + 1) * sizeof(*copies));
	if (!copies)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++)
		copies[i] = (struct kvg_copy){
			.to = list[i].dst,
			.from = buf->address + (list[i].file_off - buf->first),
			.size = list[i].len,
		};
	r = backend->ops->copy(backend, stream, KVG_COPY_ON_DEVICE, copies, count);
	return r < 0 ? kvg_fail(buf->ctx, r, "copying failed: %s", strerror(-r)) : 0;
}
