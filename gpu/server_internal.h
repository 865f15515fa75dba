/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What server.c (the loop), server_start.c (how it begins), server_client.c (connections),
 * server_map.c (requests), server_send.c (replies, notes), server_stage.c (staging) and
 * server_check.c (samples of what was staged) share. All of it on one thread.
 *
 * Every request for a file goes to the daemon first, with its ticket: the answer says which file
 * that is, and whose; only then is anything looked up.
 */
#ifndef KVFS_GPU_SERVER_INTERNAL_H
#define KVFS_GPU_SERVER_INTERNAL_H

#include <bsd/sys/queue.h>
#include <stdbool.h>

#include "fs/base.h"
#include "gpu/hbm.h"
#include "gpu/sample.h"
#include "gpu/server.h"
#include "gpu/source.h"
#include "gpu/stage.h"
#include "gpu/wire.h"

#define KVG_TICK_MS 500
#define KVG_CLIENTS_MAX 1024u
/* So many more than a limit allows are told that, before others are just ended. */
#define KVG_CLIENTS_REFUSED 8u
#define KVG_CLIENT_MAPS_MAX 4096u
#define KVG_CLIENT_PENDING_MAX 64u

/* What is staged first. */
enum kvg_priority {
	KVG_PRIORITY_HINT,
	KVG_PRIORITY_PREFETCH,
	KVG_PRIORITY_MAP, /* somebody waits */
};

struct kvg_client;
struct kvg_reply;

/* A client's mapping of a file. */
struct kvg_lease {
	LIST_ENTRY(kvg_lease) entry;
	struct kvg_client *client;
	struct kvg_map *map;
	uint64_t id;
	bool told; /* that it is ready, or never will be */
	/* Notes that its client's socket had no room for: a bit 1 << enum kvg_type each. */
	unsigned owed;
	int status;              /* READY's */
	int64_t deadline_ms;     /* REVOKE's */
	struct kvg_reply *reply; /* MAP's, if it waits for room; NULL */
};

struct kvg_client {
	struct kvg_holder holder; /* first member */
	LIST_ENTRY(kvg_client) entry;
	struct kvg_server *server;
	bool owes;       /* replies or notes: its socket is watched for room */
	bool ended;      /* by us: the loop lets it go */
	bool refused;    /* one too many: so is all that it asks for */
	bool latency;    /* wants short copies */
	uint32_t events; /* that epoll knows */
	int fd;          /* -1: it has gone, but its process lives on with what it has mapped */
	int pidfd;       /* -1: its end cannot be watched */
	pid_t pid;
	uid_t uid;
	unsigned pending;
	uint64_t last_map;
	LIST_HEAD(, kvg_lease) leases;
	STAILQ_HEAD(, kvg_reply) replies; /* that wait for room; none of its requests is read */
};

/* A request that waits for the daemon's answer. */
struct kvg_pending {
	LIST_ENTRY(kvg_pending) entry;
	struct kvg_server *server;
	struct kvg_client *client; /* NULL: a hint, or it has gone */
	uint16_t type;
	uint32_t flags;
	uint64_t id;
	uint64_t offset;
	uint64_t length;
	unsigned priority; /* enum kvg_priority */
	uint32_t ttl_ms;   /* PREFETCH; 0: for good */
	int file_fd;       /* -1: none */
};

/* What belongs to an entry beside its memory: its owner. */
struct kvg_placement {
	LIST_ENTRY(kvg_placement) waiting_entry;
	bool waiting; /* what other entries stage is still missing */
	struct kvg_server *server;
	struct kvg_entry *entry;
	uint64_t file_size;  /* bytes, of which the entry may be a stretch */
	uint64_t connection; /* that the daemon's hold and watch belong to */
	int mark_fd;
	struct kvg_watermark *mark;
	unsigned checks; /* under way, before it is said to be there */
	bool checked;
	int check_result;
	bool held; /* a drive may still write to its memory */
	/* While it is being staged: */
	bool submitted;
	bool cancelled;
	unsigned priority; /* enum kvg_priority */
	uint64_t hold;     /* 0: none */
	int object_fd;
	int file_fd;
	struct kvg_job job;
	struct kvg_target *targets;
	struct kvg_chunk *chunks;
	uint32_t chunk_count;
	uint32_t chunks_known;
	struct kv_gpu_extent *extents;
	uint32_t extent_count;
	uint32_t extent_capacity;
};

/* All that a user has is to be looked at. */
struct kvg_sweep {
	LIST_ENTRY(kvg_sweep) entry;
	struct kvg_server *server;
	uid_t uid;
};

struct kvg_server {
	struct kvg_server_options options;
	struct kvg_backend *backend;
	struct kvg_device_info info;
	struct kvg_hbm *hbm;
	struct kvg_stager *stager;
	struct kvg_source *source;
	struct kvg_checker *checker; /* NULL: no samples are kept */
	unsigned sweeping;           /* checks of a user's segments, under way */
	LIST_HEAD(, kvg_sweep) sweeps;
	char socket_path[256];
	int listen_fd;
	int epoll_fd;
	int signal_fd;
	int source_fd; /* the one that epoll knows; -1 */
	uint32_t source_events;
	int64_t lost_ms;     /* since when there is no daemon; 0 */
	int64_t listen_ms;   /* no descriptors for more clients: when to listen again; 0 */
	int64_t full_ms;     /* when that was said last; 0 */
	bool short_said;     /* that others have taken device memory */
	uint64_t connection; /* number of the one to the daemon, or of the next one */
	bool stop;
	int status;
	unsigned client_count;
	unsigned latency_count; /* of them, those that want short copies */
	LIST_HEAD(, kvg_client) clients;
	LIST_HEAD(, kvg_pending) pendings;
	LIST_HEAD(, kvg_placement) waiting; /* for what other entries stage */
	unsigned stagings;
	struct kvg_wire_stat stat; /* the counters among them */
	char reasons[512];
};

/* Bytes that one user's files may take: of 100 percent not one less than all. */
static inline uint64_t kvg_server_share(const struct kvg_server *server)
{
	return server->options.budget -
	       server->options.budget / 100 * (100 - server->options.share);
}

/* ---- server.c ---- */

/* The loop is woken, with WHAT, when FD can be read. */
int kvg_watch(const struct kvg_server *server, int fd, void *what);
/* What is done with what the daemon tells. */
struct kvg_source_hooks kvg_server_hooks(struct kvg_server *server);
/* The connection to the daemon may be another one than before, or have more to send. */
void kvg_follow_source(struct kvg_server *server);

/* ---- server_client.c ---- */

void kvg_client_accept(struct kvg_server *server);
/* After a time without descriptors for more clients. */
void kvg_listen_again(struct kvg_server *server, int64_t now_ms);
/* A few of its messages; CLIENT may be gone afterwards. */
void kvg_client_serve(struct kvg_client *client);
void kvg_client_free(struct kvg_client *client);
/* CLIENT wants short copies, or not any more. */
void kvg_client_latency(struct kvg_client *client, bool wanted);

/* ---- server_send.c ---- */

/* A reply to fill; valid until the next message is made. */
struct kvg_message *kvg_reply_to(uint16_t type, uint64_t id, int status);
/* Sends a reply without descriptors, now or when there is room. */
void kvg_client_send(struct kvg_client *client, const struct kvg_message *message);
/*
 * The reply to the MAP number ID: the segments with the bytes [OFFSET, END) of the file. LEASE may
 * go with it.
 */
void kvg_client_send_map(struct kvg_lease *lease, uint64_t id, uint64_t offset, uint64_t end);
/* Sends what CLIENT is owed, as far as there is room now. */
void kvg_settle(struct kvg_client *client);
/* CLIENT goes: its replies are for nobody. */
void kvg_client_forget_owed(struct kvg_client *client);
/* CLIENT has nothing of it any more. */
void kvg_lease_free(struct kvg_lease *lease);
/* Tells all who have ENTRY mapped and wait. ENTRY may be gone afterwards. */
void kvg_tell_ready(struct kvg_entry *entry, int status);
void kvg_tell_invalid(struct kvg_entry *entry);
void kvg_tell_revoke(void *arg, struct kvg_map *map, int64_t deadline_ms);

/* ---- server_map.c ---- */

/* One request of CLIENT, whose descriptors are taken or closed. -EPROTO: nonsense, end it. */
int kvg_serve(struct kvg_server *server, struct kvg_client *client, struct kvg_message *message);
/* The same for one that had to be left undone: R says why. */
void kvg_refuse(struct kvg_server *server, struct kvg_client *client,
	const struct kvg_message *request, int r);
/* The daemon says that somebody opened the file. */
void kvg_serve_hint(struct kvg_server *server, const struct kv_gpu_reply *note);
/* CLIENT goes: what it waits for is for nobody. */
void kvg_forget_client(struct kvg_server *server, struct kvg_client *client);
void kvg_pendings_free(struct kvg_server *server);

/* ---- server_stage.c ---- */

/*
 * Begins to stage ENTRY, just admitted, from what the daemon has answered. Takes the hold, the
 * object's descriptor and FILE_FD over, also when it fails: then ENTRY is gone or FAILED.
 */
int kvg_stage_begin(struct kvg_server *server, struct kvg_entry *entry,
	const struct kvg_answer *answer, int file_fd, unsigned priority);
/* ENTRY, which may be resident, is wanted as urgently as that. */
void kvg_stage_raise(struct kvg_entry *entry, unsigned priority);
/* Takes jobs that have ended. */
void kvg_stage_reap(struct kvg_server *server);
/* Says, and keeps for `kvfs gpu status`, why reads do not go past the CPU. */
void kvg_stage_news(struct kvg_server *server);
/* Nobody wants ENTRY, which is being staged, any more: that ends soon, or at once. */
void kvg_stage_cancel(void *server, struct kvg_entry *entry);
/* ENTRY is about to be freed. */
void kvg_stage_gone(void *server, struct kvg_entry *entry);
/* The device is lost, and the stager freed: all who wait are told that nothing comes. */
void kvg_stage_abandon(struct kvg_server *server);
/* All checks that PLACEMENT has waited for have ended. It may be gone afterwards. */
void kvg_stage_checked(struct kvg_placement *placement);
/* What the daemon has answered to LOCATE is not needed: its hold and its watch end. */
void kvg_decline(struct kvg_server *server, const struct kv_gpu_reply *reply);

/* ---- server_check.c ---- */

/* Samples of PLACEMENT's own segments are to be kept. Without memory for them there are none. */
void kvg_check_prepare(struct kvg_placement *placement);
/* Checks what was staged; true: PLACEMENT is to wait for kvg_stage_checked. */
bool kvg_check_begin(struct kvg_placement *placement);
/* A process of UID has ended without giving back what it had: all that is UID's is looked at. */
void kvg_check_user(struct kvg_server *server, uid_t uid);
/* No more are begun. */
void kvg_check_done(struct kvg_server *server);
/* Takes checks that have ended. */
void kvg_check_reap(struct kvg_server *server);

#endif
