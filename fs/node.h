/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes: what the kernel knows by a FUSE nodeid.
 *
 * A directory or symlink has one node. A regular file has one node for its published version
 * and one for each process that is writing it: the kernel fixes an inode's I/O mode (passed
 *through, direct, cached) as long as it is open, so a version that is read and one that is written
 *must be different kernel inodes. All of them carry the same st_ino. The id spaces and the allowed
 *conversions:
 *
 *	(parent, name) --index--> ino --kv_node_for--> node --> nodeid      LOOKUP, by caller
 *	nodeid --kv_node_find--> node --> ino, version                      every request
 *	version --> object --> backing id                                   OPEN
 * never ino -> nodeid without the caller (two processes may see two nodes), never nodeid -> name.
 *
 * A published node belongs to one version for ever. When a newer one is published, LOOKUP makes a
 *new node, and the old one stays until the kernel forgets it. A writing node is found by LOOKUP
 * only for the process it belongs to; when its version is published, it is found by nobody as long
 * as it has open handles, which live on. Behind them it becomes the published node, if there is no
 * other: the kernel's entry from the time of the CREATE then stays right.
 *
 * Lifetime: a node lives while the kernel's lookup count is above 0 (or while it is a
 * writing node that waits for its process to come back after ESTALE, for at most
 * KV_NODE_PENDING_NS). The kernel sends no request for a node it has forgotten, so handlers need no
 *reference. Locks: a striped lock by ino guards a file's nodes (list, counts, mode); it comes
 *before the core's locks. The table of ids has a lock of its own, a leaf.
 */
#ifndef KVFS_FS_NODE_H
#define KVFS_FS_NODE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "fs/core.h"
#include "fs/draft.h"
#include "fs/tree.h"
#include "index/index.h"

struct kv_daemon;
struct kv_handle;
struct kv_nodes;
struct kv_takeover_record;
struct kv_user;

enum kv_node_kind {
	KV_NODE_DIRECTORY,
	KV_NODE_SYMLINK,
	KV_NODE_PUBLISHED,
	KV_NODE_WRITING,
};

/* The kernel's I/O mode of an open published node. */
enum kv_node_mode {
	KV_NODE_CLOSED,
	KV_NODE_PASSTHROUGH,
	KV_NODE_DIRECT,
	KV_NODE_CACHED,
};

/* How long a writing node waits for the LOOKUP that must follow an ESTALE. */
#define KV_NODE_PENDING_NS (INT64_C(10) * 1000 * 1000 * 1000)

struct kv_node {
	RB_ENTRY(kv_node) by_id;
	RB_ENTRY(kv_node) by_ino; /* directories and symlinks */
	struct kv_node *sibling;  /* next node of the same file */
	uint64_t id;
	uint64_t ino;
	_Atomic enum kv_node_kind kind; /* WRITING may become PUBLISHED, lock held, not open */
	uint64_t lookups;               /* the kernel's references */
	struct kv_file *file;           /* regular files; a reference */
	struct kv_version
		*version; /* regular files; a reference. NULL: writing node without a first write */
	bool orphan;      /* without a name, and kept from being reaped until it is forgotten */
	bool retired;     /* published node that LOOKUP must not give out any more */
	bool inherited;   /* ... of a daemon before this one: the kernel may have it open */
	int passed;       /* ... then, with that backing file; 0: with none */
	bool kept;        /* ... whose version is an old one: see kv_version_keep */
	enum kv_node_mode mode;       /* published nodes, while opens > 0 */
	unsigned opens;               /* handles of any kind */
	_Atomic unsigned write_opens; /* handles that may write */
	bool active;   /* writing node: the version is unpublished, LOOKUP by WRITER finds it */
	bool wrote;    /* writing node: data arrived since the last publish */
	bool closed;   /* writing node: WRITER has closed a descriptor, and may end unseen */
	bool borrowed; /* writing node: version is the file's published one, not its own */
	_Atomic bool cached; /* writing node: the kernel may keep pages of it, or an old size */
	int lost; /* writing node: its version was dropped; what changes it gets this error */
	struct kv_user *user;         /* writing node: whose limits hold, a reference; or NULL */
	struct kv_draft *draft;       /* writing node: about its unpublished content */
	pid_t writer;                 /* writing node: process (tgid) */
	int64_t pending_since_ns;     /* writing node that was not opened yet */
	struct kv_handle *old_handle; /* of a daemon before this one: stands for all of its handles
				       */
	uint32_t open_pid; /* thread that last opened it for writing: spares a look into /proc */
};

int kv_nodes_new(struct kv_daemon *daemon, struct kv_nodes **ret_nodes);
/*
 * Drops all nodes: the kernel is gone. The table stays, for the core may still ask for directories
 * until it is freed. NULL is allowed.
 */
void kv_nodes_clear(struct kv_nodes *nodes);
/* NULL is allowed. Returns NULL. */
struct kv_nodes *kv_nodes_free(struct kv_nodes *nodes);
uint64_t kv_nodes_count(struct kv_nodes *nodes);
/* Handles that may write. */
uint64_t kv_nodes_writers(struct kv_nodes *nodes);

/* The node of NODEID; NULL only for ids the kernel cannot know. */
struct kv_node *kv_node_find(struct kv_daemon *daemon, uint64_t nodeid);

/* The lock of the nodes of INO. */
pthread_mutex_t *kv_node_lock(struct kv_daemon *daemon, uint64_t ino);

/*
 * The node that the thread PID shall see for the inode SEEN, with one lookup more. ret_cacheable:
 * the kernel may keep the entry and the attributes. PID 0: nobody's.
 */
int kv_node_for(struct kv_daemon *daemon, const struct kv_seen *seen, pid_t pid,
	struct kv_node **ret_node, bool *ret_cacheable);

/* As above for READDIRPLUS, but NULL for files that are being written: LOOKUP must decide then. */
int kv_node_for_listing(
	struct kv_daemon *daemon, const struct kv_seen *seen, struct kv_node **ret_node);

/* Nodeid of directory INO, 0 if the kernel does not know it. */
uint64_t kv_node_directory_id(struct kv_daemon *daemon, uint64_t ino);

/* Frees writing node NODEID of INO if its process did not come back within KV_NODE_PENDING_NS. */
void kv_node_expire(struct kv_daemon *daemon, uint64_t ino, uint64_t nodeid);

/*
 * After a restart: makes the node that the kernel knows as NODEID. -ENOENT: what it showed is lost.
 */
int kv_node_resume(
	struct kv_daemon *daemon, uint64_t nodeid, const struct kv_takeover_record *record);
/* The handle that stands for all that an earlier daemon gave out for NODE, published; NULL: its
 * bytes are damaged, or out of memory. It lives as long as the node. */
struct kv_handle *kv_node_old_handle(struct kv_daemon *daemon, struct kv_node *node);

void kv_node_forget(struct kv_daemon *daemon, struct kv_node *node, uint64_t lookups);

/* A writing node for a file just created by PID, with one lookup. */
int kv_node_create(struct kv_daemon *daemon, uint64_t ino, pid_t pid, struct kv_node **ret_node);

/* NODE (writing, its lock held) is opened for writing by USER: the first one's limits hold. */
void kv_node_set_user(struct kv_node *node, struct kv_user *user);

/*
 * The process of PID wants to write to the file of NODE, which is not its own: prepares a writing
 * node for it, which the LOOKUP after ESTALE will find. -ESTALE, to be answered, or another error.
 */
int kv_node_prepare_writer(struct kv_daemon *daemon, struct kv_node *node, pid_t pid);

/* Whether NODE is the writing node of the process of thread PID. */
bool kv_node_is_own(const struct kv_node *node, pid_t pid);

/*
 * Gives NODE (writing, its lock held) a version to be written: the one it has, or a new one made
 * from the one it published, or from the file's current one, or empty if TRUNCATE.
 */
int kv_node_writable(struct kv_daemon *daemon, struct kv_node *node, bool truncate);

/*
 * A change of NODE by thread PID begins (PID 0: through a mapping): as kv_node_writable, and notes
 * who it is. The version, with a reference.
 */
int kv_node_change(
	struct kv_daemon *daemon, struct kv_node *node, pid_t pid, struct kv_version **ret_version);
/* What came of changing the bytes [FROM, TO) of VERSION, begun so. No locks held. */
struct kv_node_outcome {
	struct kv_version *version;
	uint64_t from;
	uint64_t to;
	int error; /* 0 or negative errno */
};
void kv_node_changed(
	struct kv_daemon *daemon, struct kv_node *node, const struct kv_node_outcome *outcome);
/* Sets the size of NODE's version (lock held) for thread PID. */
int kv_node_set_size(struct kv_daemon *daemon, struct kv_node *node, pid_t pid, uint64_t size);

/*
 * Publishes NODE's version (lock held) if it is unpublished and changed, as the first one of a file
 * always is. 0 also if there is nothing to publish. An error if bytes of it are missing: then it is
 * kept, for they may still be written.
 */
int kv_node_publish(struct kv_daemon *daemon, struct kv_node *node);

/*
 * Thread PID closes a descriptor through which NODE can be written: publishes what its process has
 * written, or gives that up (P6). The error is for close(2). ret_news: the kernel's entries of the
 * file are out of date, and are queued to go.
 */
int kv_node_flush(struct kv_daemon *daemon, struct kv_node *node, pid_t pid, bool *ret_news);

/*
 * Whether who waits for the first publish of FILE may have it: 0; -EAGAIN while somebody is
 * writing it; -ENOENT if nobody is.
 */
int kv_node_is_published(struct kv_daemon *daemon, struct kv_file *file);

/*
 * INODE lost its last name: it is reaped when nothing uses it any more. What the kernel knows (the
 * result) may be on some path walk, or be somebody's directory, and stays until it is forgotten.
 */
bool kv_node_orphan(struct kv_daemon *daemon, const struct kv_inode *inode);

/* Counts a handle of a regular file's node, lock held, before the reply to OPEN leaves. */
void kv_node_opened(struct kv_node *node, bool may_write);
/* Its end, lock held; NODE may be gone afterwards. */
void kv_node_closed(struct kv_daemon *daemon, struct kv_node *node, bool may_write);

/*
 * A handle that could write to NODE ends: looks for a process that may have been killed unseen.
 * FLUSHED: one of its descriptors was closed. No locks held.
 */
void kv_node_look_for_writer(struct kv_daemon *daemon, struct kv_node *node, bool flushed);
/* The last handle that could write to NODE (lock held) is closed: publishes a changed version,
 * drops an untouched one and one that is not whole. */
void kv_node_last_writer_closed(struct kv_daemon *daemon, struct kv_node *node);

/* The version that somebody is writing to FILE, with a reference, or NULL. */
struct kv_version *kv_node_unpublished_version(struct kv_daemon *daemon, struct kv_file *file);

/* Publishes what is being written to INO by the process of PID, before a rename. -EBUSY if nothing
 * is published, and others are writing it: what they have so far is nobody's to publish. */
int kv_node_publish_for_rename(struct kv_daemon *daemon, uint64_t ino, pid_t pid);

/*
 * The published node of INO is not given out by LOOKUP any more, which makes a new one. For a
 * version that became resident while its node was open in a slower mode.
 */
void kv_node_retire_published(struct kv_daemon *daemon, uint64_t ino);

/* The kernel must not trust its entry for the (first) name of INO any more: queues that. */
void kv_node_notify_name(struct kv_daemon *daemon, uint64_t ino);

/* The kernel must not keep pages of its own of what INO has published: queues that. */
void kv_node_drop_pages(struct kv_daemon *daemon, uint64_t ino);

/* As kv_node_notify_name, if the kernel knows a node of INO that shows an older version than the
 * current one. */
void kv_node_check_entry(struct kv_daemon *daemon, uint64_t ino);

/* NODE's inode changed by a request on NODE: the kernel's copies under the file's other nodes are
 * out of date. */
void kv_node_attributes_changed(struct kv_daemon *daemon, struct kv_node *node);

#endif
