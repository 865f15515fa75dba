/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What gpu.c (life, tickets, notes) and gpu_serve.c (answers to helpers) share.
 */
#ifndef KVFS_FS_GPU_INTERNAL_H
#define KVFS_FS_GPU_INTERNAL_H

#include <bsd/sys/queue.h>
#include <bsd/sys/tree.h>
#include <pthread.h>
#include <stdbool.h>

#include "fs/daemon.h"
#include "fs/gpu.h"
#include "fs/gpu_protocol.h"
#include "fs/log.h"

/* Helpers at once: one a GPU or a part of one, and tools. */
#define KV_GPU_LINKS_MAX 64u
#define KV_GPU_WATCHES_MAX (1u << 20)
/* What a helper may be behind with notes: bytes, of which the kernel makes the double. */
#define KV_GPU_QUEUE_SIZE (512 << 10)

struct kv_ticket {
	RB_ENTRY(kv_ticket) entry;
	uint8_t token[KV_GPU_TOKEN_SIZE];
	struct kv_version *version; /* counted */
	uint64_t ino;
	struct kv_file *file; /* of the handle's node, which lives as long as the ticket */
	uid_t uid;
};
RB_HEAD(kv_ticket_tree, kv_ticket);

/* A version that a helper is reading. */
struct kv_gpu_hold {
	LIST_ENTRY(kv_gpu_hold) entry;
	uint64_t id;
	struct kv_version *version; /* counted, and open */
	struct kv_file *file;       /* counted, and open */
};

struct kv_watch {
	RB_ENTRY(kv_watch) entry;
	uint64_t ino;
	uint64_t count; /* answers to LOCATE that UNWATCH has not taken back */
};
RB_HEAD(kv_watch_tree, kv_watch);

/* One helper. */
struct kv_link {
	int fd;
	int queue_size; /* bytes, as the kernel counts them */
	bool said_hello;
	bool wants_hot;                 /* gpu lock */
	bool broken;                    /* gpu lock; it does not read: to be ended */
	struct kv_watch_tree watches;   /* gpu lock */
	unsigned watch_count;           /* gpu lock */
	LIST_HEAD(, kv_gpu_hold) holds; /* the thread's */
};

struct kv_gpu {
	struct kv_daemon *daemon;
	dev_t device;
	uint8_t session[16];
	pthread_t thread;
	int listen_fd;
	int stop_fd;
	uint64_t last_hold; /* the thread's */
	struct kv_log_limit accept_log;

	pthread_mutex_t lock;
	struct kv_ticket_tree tickets;
	struct kv_link *links[KV_GPU_LINKS_MAX]; /* changed by the thread, under the lock */
	_Atomic unsigned link_count;
};

RB_PROTOTYPE(kv_ticket_tree, kv_ticket, entry, kv_ticket_compare)
int kv_ticket_compare(const struct kv_ticket *a, const struct kv_ticket *b);
RB_PROTOTYPE(kv_watch_tree, kv_watch, entry, kv_watch_compare)
int kv_watch_compare(const struct kv_watch *a, const struct kv_watch *b);

/* Reads one request of LINK and answers it. Negative: the connection ends. */
int kv_link_serve(struct kv_gpu *gpu, struct kv_link *link);
/* Ends what it holds, closes it. */
void kv_link_free(struct kv_gpu *gpu, struct kv_link *link);

#endif
