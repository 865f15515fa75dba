/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One mount as the FUSE side sees it: what every request handler is given as its user data.
 *
 * Made by kvfsd.c before the first request and freed behind the last one; the members marked
 * const-after-init need no lock. Threads: request handlers run on the workers (workers.h).
 */
#ifndef KVFS_FS_DAEMON_H
#define KVFS_FS_DAEMON_H

#define FUSE_USE_VERSION 317

#include <fuse_lowlevel.h>
#include <stdbool.h>
#include <stdint.h>

#include "fs/core.h"
#include "fs/options.h"
#include "fs/stats.h"
#include "fs/store.h"

struct kv_gpu;
struct kv_guard;
struct kv_users;
struct kv_locks;
struct kv_nodes;
struct kv_notify;
struct kv_old_handle;
struct kv_parking;
struct kv_retries;
struct kv_takeover;
struct kv_teller;

/* More than there are workers and requests that wait without one. */
#define KV_CHANGES_MAX 4096u

struct kv_daemon {
	struct kv_options options;
	struct kv_store *store;
	struct kv_core *core;
	struct kv_index *index; /* the store's */
	struct kv_nodes *nodes;
	struct kv_notify *notify;
	struct kv_parking *parking;
	struct kv_locks *locks;
	struct kv_users *users;
	struct kv_retries *retries;        /* of who wants to write */
	struct kv_retries *reader_retries; /* of who waited for a publish */
	struct kv_guard *guard;
	struct kv_gpu *gpu; /* NULL: there are no GPU helpers */
	struct fuse_session *session;
	pthread_t main_thread; /* runs the request loop */
	/* With -o restart; else NULL. */
	struct kv_takeover *takeover;
	struct kv_teller *teller;
	struct kv_old_handle *old_handles; /* of daemons before this one, by their numbers */
	size_t old_handle_count;
	const char *directory; /* absolute: what to unmount, where libfuse has not mounted it */
	pthread_t next_thread; /* waits for the word that another daemon is to go on */
	bool has_next_thread;
	_Atomic bool draining; /* it ends, and another daemon will go on; see resume.h */
	_Atomic bool ending;   /* it ends, and none will */
	_Atomic uint64_t changes[KV_CHANGES_MAX]; /* numbers of the requests that change something
						   */
	int fuse_fd;                              /* until the session has it */
	int dram_fd;                              /* with -o restart, until the core has it */
	bool initialised;                         /* INIT was answered */
	bool init_refused;                        /* its answer was not taken, or says no */
	struct kv_stats stats;
	int64_t start_ns;
	/*
	 * Whether published files are passed through, and if not, why. Decided between INIT and the
	 * first other request (session.c), const afterwards.
	 */
	bool passthrough;
	char passthrough_reason[160];
	bool init_passthrough;   /* INIT offered FUSE_PASSTHROUGH */
	_Atomic bool said_blind; /* the log has it that ends of writers cannot be seen */
	uint32_t proto_minor;    /* of the kernel's FUSE protocol, version 7 */
	uint32_t max_write;      /* bytes a request may carry, as negotiated */
};

/* How long the kernel may keep what cannot change behind its back, in seconds. */
#define KV_TIMEOUT_LONG 3600.0
/*
 * Attributes that come with a name which it may not keep: long enough for the call that asked for
 * the name not to ask for them once more (fs/fuse/dir.c, fuse_permission, with default_permissions:
 * open and create do), and no longer. The kernel rounds it up to a tick.
 */
#define KV_TIMEOUT_CALL 0.001

/* The daemon of a request. */
static inline struct kv_daemon *kv_daemon_of(fuse_req_t req)
{
	return fuse_req_userdata(req);
}

#endif
