/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kvg.c (contexts, the helper), kvg_map.c (buffers), kvg_op.c (pull and push) and kvg_list.c
 * (segments) share.
 */
#ifndef KVFS_GPU_KVG_INTERNAL_H
#define KVFS_GPU_KVG_INTERNAL_H

#include <bsd/sys/queue.h>
#include <pthread.h>
#include <stdbool.h>

#include "gpu/backend.h"
#include "gpu/kvg.h"
#include "gpu/watermark.h"
#include "gpu/wire.h"

#define KVG_RING_SLOTS 8u
#define KVG_RING_SLOT_SIZE (UINT64_C(8) << 20)
/* What the helper answers at once is waited for this long. */
#define KVG_PATIENCE_MS 30000

struct kvg_ring_slot {
	uint8_t *memory;
	struct kvg_event *event;
	bool taken; /* ring lock */
};

struct kvg_ctx {
	struct kvg_opts opts;
	struct kvg_backend *backend; /* NULL: control only */
	struct kvg_device_info info;
	int fd; /* -1: no helper, or it has gone */
	bool had_helper;
	uint64_t last_id;
	struct kvg_hello hello;
	LIST_HEAD(, kvg_buf) bufs;
	unsigned ops;
	char error[256];
	struct kvg_message message; /* the one that was received last, or is to be sent */

	uint8_t *ring; /* made by the first op */
	struct kvg_ring_slot slots[KVG_RING_SLOTS];
	pthread_mutex_t ring_lock;
	pthread_cond_t ring_free;
};

struct kvg_buf {
	LIST_ENTRY(kvg_buf) entry;
	struct kvg_ctx *ctx;
	uint64_t id;
	struct kvg_ticket ticket;
	uint64_t off; /* asked for; so len */
	uint64_t len;
	uint64_t first; /* offset in the file of the first segment */
	struct kvg_mapping *mapping;
	kvg_devptr address; /* of the byte at `first` */
	const struct kvg_watermark *mark;
	bool ready; /* told */
	int status;
};

/* ---- kvg.c ---- */

/* Notes the words, returns R. */
int kvg_fail(struct kvg_ctx *ctx, int r, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
/* Whether there is a device that can be used. */
int kvg_check_device(struct kvg_ctx *ctx);
/* A request in ctx->message, empty but for its id. */
struct kvg_message *kvg_request(struct kvg_ctx *ctx, uint16_t type);
/*
 * Sends ctx->message and waits for (the first packet of) its reply, which is in ctx->message then;
 * returns its status. What comes in between is handled.
 */
int kvg_call(struct kvg_ctx *ctx);
/* Waits for one more message, at most MS; handles it if it is no reply. 1: it is a reply. */
int kvg_next(struct kvg_ctx *ctx, int ms);
/* ctx->message is an answer that nobody waits for any more. What it brings is given back. */
void kvg_ignore(struct kvg_ctx *ctx);
/* The helper is gone. Returns -EPIPE. */
int kvg_lost(struct kvg_ctx *ctx);
/* A request about the file FD: with its ticket, and the descriptor. */
int kvg_file_request(struct kvg_ctx *ctx, uint16_t type, int fd, struct kvg_ticket *ret_ticket);

/* ---- kvg_list.c ---- */

/* SEGS by their place in the file, neighbours joined, cut at MOST bytes. The caller's to free. */
int kvg_list_new(const struct kvg_seg *segs, size_t n, uint64_t most, struct kvg_seg **ret_segs,
	size_t *ret_n);

#endif
