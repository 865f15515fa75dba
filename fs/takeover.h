/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What outlives a daemon whose FUSE connection goes on: memory that its supervisor holds, in which
 * the daemon keeps which nodeids the kernel knows and what they stand for.
 *
 *	header   magic, generation, the kernel's INIT request
 *	backing  ids of registered backing files, 0 where there is none
 *	records  one a nodeid: what node it is, and how often the kernel has looked it up
 *	handles  of nodes that are being written
 *	journal  the index's: what was done and is not committed
 *	notes    the core's: versions that are not committed (unsettled.h)
 *
 * A nodeid is the number of its record and, above it, a serial number that only grows. The memory
 * is written by one daemon at a time; it is not stored, so its layout may change with every
 * version that cannot take over from the one before: then the magic changes.
 *
 * Thread-safe; a record is changed under the lock of its node's file only.
 */
#ifndef KVFS_FS_TAKEOVER_H
#define KVFS_FS_TAKEOVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The descriptor of fresh memory for a supervisor. Negative errno. */
int kv_takeover_memory(void);

struct kv_takeover;

/*
 * Maps the memory in FD, which is closed. The first daemon to do so begins, any other takes over.
 * -EPROTO: it is another version's, or damaged.
 */
int kv_takeover_new(int fd, struct kv_takeover **ret_takeover);
/* NULL is allowed. Returns NULL. */
struct kv_takeover *kv_takeover_free(struct kv_takeover *takeover);

/* True if there was a daemon before this one. */
bool kv_takeover_resumes(const struct kv_takeover *takeover);

/* The INIT request, as the kernel sent it: room for one, and its length or 0. */
#define KV_TAKEOVER_INIT_MAX 512u
void *kv_takeover_init(struct kv_takeover *takeover, size_t *ret_length);
void kv_takeover_set_init(struct kv_takeover *takeover, const void *request, size_t length);

/* KV_INDEX_JOURNAL_SIZE bytes for the index, and what the core has: both only pass through here. */
void *kv_takeover_journal(struct kv_takeover *takeover);
struct kv_unsettled_notes *kv_takeover_unsettled(struct kv_takeover *takeover);

struct kv_takeover_record {
	uint64_t ino;
	uint64_t version; /* of a published node */
	int64_t mtime_ns; /* of that */
	uint64_t lookups;
	uint32_t kind; /* enum kv_node_kind */
	struct kv_takeover_writing {
		uint64_t note; /* of its version; 0: it has none, or one that is the current one */
		int32_t writer;
		uint32_t open_pid;
		uint32_t flags; /* enum kv_takeover_flag */
	} writing;              /* of a node that is being written */
	int passed; /* of a published one: the backing file that it was opened with, or 0 */
};

enum kv_takeover_flag {
	KV_TAKEOVER_ACTIVE = 1u << 0,
	KV_TAKEOVER_WROTE = 1u << 1,
	KV_TAKEOVER_CLOSED = 1u << 2,
	KV_TAKEOVER_BORROWED = 1u << 3,
	KV_TAKEOVER_CACHED = 1u << 4,
	KV_TAKEOVER_LOST = 1u << 5,
	KV_TAKEOVER_ABANDONED = 1u << 6,
	KV_TAKEOVER_BY_WRITER = 1u << 7, /* its writer has changed it */
	KV_TAKEOVER_BY_OTHERS = 1u << 8, /* others have */
};

/* A new nodeid. Those beyond a few millions have no record: what they name is lost in a restart. */
uint64_t kv_takeover_add(struct kv_takeover *takeover, uint64_t ino, uint32_t kind);
void kv_takeover_set_version(
	struct kv_takeover *takeover, uint64_t id, uint64_t version, int64_t mtime_ns);
void kv_takeover_set_lookups(struct kv_takeover *takeover, uint64_t id, uint64_t lookups);
/* The kernel has forgotten LOOKUPS look-ups of an id that no node was made of any more. */
void kv_takeover_forget(struct kv_takeover *takeover, uint64_t id, uint64_t lookups);
void kv_takeover_remove(struct kv_takeover *takeover, uint64_t id);
/* True if ID was given out by a daemon before this one, or by none. */
bool kv_takeover_is_old(const struct kv_takeover *takeover, uint64_t id);
/* Calls EACH for every record that a daemon before this one left. */
void kv_takeover_each(struct kv_takeover *takeover,
	void (*each)(void *arg, uint64_t id, const struct kv_takeover_record *record), void *arg);

void kv_takeover_set_passed(struct kv_takeover *takeover, uint64_t id, int backing);
void kv_takeover_set_writing(
	struct kv_takeover *takeover, uint64_t id, const struct kv_takeover_writing *writing);

/*
 * Handles of nodes that are being written. The kernel's number of one is no address: the same one
 * of another daemon is another handle's, so it has the daemon's generation above it.
 */
uint64_t kv_takeover_tag(const struct kv_takeover *takeover, const void *handle);
struct kv_takeover_handle {
	uint64_t number;
	uint64_t nodeid;
	uint64_t request; /* that opened it */
	bool may_write;
	bool flushed;
	bool elsewhere; /* it reads what was published */
};
/* A place for a handle, which begins to count before the kernel hears of it; UINT32_MAX: there is
 * none, and it is lost in a restart. */
#define KV_TAKEOVER_NO_HANDLE UINT32_MAX
uint32_t kv_takeover_add_handle(
	struct kv_takeover *takeover, const struct kv_takeover_handle *handle);
void kv_takeover_handle_flushed(struct kv_takeover *takeover, uint32_t place);
void kv_takeover_remove_handle(struct kv_takeover *takeover, uint32_t place);
/* Calls EACH for every one that a daemon before this one left. */
void kv_takeover_each_handle(struct kv_takeover *takeover,
	void (*each)(void *arg, uint32_t place, const struct kv_takeover_handle *handle),
	void *arg);

/* Notes backing ids, so that they can be given back by who takes over. */
void kv_takeover_backing(struct kv_takeover *takeover, int id);
void kv_takeover_no_backing(struct kv_takeover *takeover, int id);
/* True if it is there still. */
bool kv_takeover_has_backing(struct kv_takeover *takeover, int id);
/* Calls CLOSE for every one of daemons before this one that have been followed by another since
 * AGE_MS or more, and forgets it. Returns how many are left for later. By one thread. */
size_t kv_takeover_close_backings(
	struct kv_takeover *takeover, int64_t age_ms, void (*close)(void *arg, int id), void *arg);

#endif
