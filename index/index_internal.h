/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of index/ share: the index itself, views, operations.
 *
 * Lock order: index->lock, then the space lock, then commit_lock or pool_lock (leaves).
 * A view (kv_view_begin) holds index->lock shared, an operation (kv_op_begin) exclusively. Pointers
 * into records, from either, are valid until its end, or until the operation changes that record.
 * An operation collects its changes in a layer of its own, which its view shows on top. Only
 * kv_op_end, which cannot fail, applies them: so an error half way leaves nothing behind.
 */
#ifndef KVFS_INDEX_INDEX_INTERNAL_H
#define KVFS_INDEX_INDEX_INTERNAL_H

#include <lmdb.h>
#include <stdatomic.h>

#include "fs/log.h"
#include "index/format.h"
#include "index/overlay.h"
#include "index/space.h"

/* Mutators wait above that weight (kv_record_weight): bounds memory when commits are slow. */
#define KV_PENDING_MAX 200000u
/* The commit thread waits no longer for company above that. */
#define KV_PENDING_GOAL 20000u
/* Each commit promises that many inode numbers beyond those in use, so none is reused after a
 * crash. */
#define KV_INO_MARGIN (UINT64_C(1) << 20)
#define KV_NLINK_MAX 65000u

/* An LMDB read transaction that is renewed for each use, and its cursor. */
struct kv_reader {
	MDB_txn *txn;
	MDB_cursor *cursor;
	bool cursor_lent;
	MDB_cursor *last;       /* where the last look-up ended: neighbours are found in its page */
	struct kv_reader *next; /* in the pool */
};

/* A quota domain in memory. Written under the index lock, but for PROMISED; read without it. */
struct kv_domain {
	_Atomic uint32_t state; /* enum kv_domain_state */
	_Atomic uint64_t ino;
	_Atomic uint64_t limit; /* blocks; UINT64_MAX: none */
	_Atomic uint64_t used;
	_Atomic uint64_t pinned;
	/* Used and promised together: a publish turns one into the other, and nobody sees both. */
	_Atomic uint64_t taken;
	_Atomic uint64_t inodes; /* held ones not counted */
	uint64_t held;           /* inodes that are; under the lock */
	bool dirty;              /* differs from its record; under the lock */
};

struct kv_index {
	MDB_env *env; /* replaced under the lock; NULL if that failed */
	MDB_dbi dbi;
	char *path;
	uint64_t map_size; /* bytes, or 0 */
	unsigned env_flags;
	struct kv_store_record record;
	uint64_t hash_mask; /* all ones; tests clear it to make names collide */
	uint32_t commit_delay_ms;
	struct kv_space *space;
	struct kv_journal *journal; /* or NULL */

	pthread_rwlock_t lock;
	struct kv_overlay held;
	struct kv_overlay pending;
	struct kv_overlay flushing;
	uint64_t inodes; /* held ones not counted */
	uint64_t held_inodes;
	struct kv_domain *domains;     /* KV_DOMAINS_MAX */
	_Atomic uint32_t domain_count; /* those behind are unused */
	_Atomic uint64_t pinned;       /* blocks, of all domains */
	_Atomic uint64_t domain_epoch;
	uint64_t directory_moves;        /* renames of directories to another parent */
	_Atomic uint64_t sequence;       /* written under the lock */
	_Atomic uint64_t next_ino;       /* written under the lock */
	_Atomic uint64_t ino_limit;      /* durable: numbers below it may be handed out */
	_Atomic uint64_t pending_weight; /* of pending, for those without the lock */

	pthread_mutex_t pool_lock;
	struct kv_reader *pool;

	/* Guarded by commit_lock, but for what is atomic and what the commit thread alone uses. */
	pthread_mutex_t commit_lock;
	pthread_cond_t commit_work; /* wakes the commit thread */
	pthread_cond_t commit_done; /* wakes those who wait for it */
	pthread_t commit_thread;
	bool commit_started;
	bool commit_stop;
	bool commit_urgent;
	uint64_t durable;          /* sequence */
	uint64_t attempts;         /* transactions tried */
	_Atomic int commit_error;  /* negative errno of the last attempt, or 0 */
	_Atomic bool commit_awake; /* the thread will look at the sequence again */
	_Atomic uint64_t commits;
	uint64_t reserve_end; /* see reserve.c; of the file; commit thread only */
	struct kv_log_limit reserve_log;
	_Atomic bool is_short;
	_Atomic uint64_t pending_max; /* mutators wait above that weight */
	/* The commit thread's alone: a commit whose sync failed, and an environment that may be
	 * broken. */
	bool unsynced;
	bool broken;
	unsigned memory_retries;
	bool batch_taken; /* flushing is a batch not yet written: commit thread only */
	uint64_t batch_sequence;
	uint64_t batch_ino_limit;
	struct kv_log_limit commit_log;
	struct kv_log_limit damage_log;
	/* Tests: that many commits fail with this error (LMDB's or an errno). */
	_Atomic int fail_error;
	_Atomic unsigned fail_count;
};

/* Writes a record, with its sum. Returns LMDB's code. */
int kv_index_put(
	MDB_txn *txn, MDB_dbi dbi, const struct kv_key *key, const void *value, size_t size);
/* LMDB's codes as negative errno. */
int kv_index_errno(int code);
/* One with nothing opened yet, for kv_index_close, and its parts in the order they are loaded. */
int kv_index_new(const struct kv_index_options *options, struct kv_index **ret_index);
int kv_index_load_meta(struct kv_index *index, struct kv_state *ret_state);
/* The line for the user that says why the head cannot be used. */
const char *kv_index_meta_error(
	const struct kv_index *index, int r, char *ret_text, size_t text_size);
/* Whether the regular file data.mdb is in PATH: 0, -ENOENT, -EUCLEAN for anything else of the name.
 */
int kv_index_file_check(const char *path);
/* Makes the names in the directory PATH durable. */
int kv_index_sync_directory(const char *path);
/* Logs a record that failed its checks, and returns -EUCLEAN. */
int kv_index_damaged(struct kv_index *index, const struct kv_key *key, const char *what);

static inline uint64_t kv_index_hash(const struct kv_index *index, const void *data, size_t size)
{
	return kv_hash_base(data, size, index->record.hash_seed, index->hash_mask);
}

/* ---- view.c: the layers as one ---- */

struct kv_value {
	const uint8_t *data;
	size_t size;
	bool held;
};

#define KV_VIEW_LAYERS 4
struct kv_view {
	struct kv_index *index;
	const struct kv_overlay *layers[KV_VIEW_LAYERS]; /* newest first; NULL: none */
	struct kv_reader *reader;                        /* taken when first needed */
};

void kv_view_begin(struct kv_view *view, struct kv_index *index);
void kv_view_end(struct kv_view *view);
/* For those who hold the lock already. OP may be NULL. */
void kv_view_init(struct kv_view *view, struct kv_index *index, const struct kv_overlay *op);
void kv_view_done(struct kv_view *view);
void kv_view_pool_done(struct kv_index *index);

/* 0 or -ENOENT or an error. */
int kv_view_get(struct kv_view *view, const struct kv_key *key, struct kv_value *ret_value);

/* Walks the keys that begin as START does in its first PREFIX_SIZE bytes, from START on. */
struct kv_iter {
	struct kv_view *view;
	const struct kv_record *heads[KV_VIEW_LAYERS];
	MDB_cursor *cursor;
	bool cursor_owned;
	bool lmdb_live; /* lmdb_key and lmdb_value are the next in LMDB */
	MDB_val lmdb_key;
	MDB_val lmdb_value;
	size_t prefix_size;
	uint8_t prefix[KV_KEY_PAIR_SIZE];
};
int kv_iter_init(
	struct kv_iter *iter, struct kv_view *view, const struct kv_key *start, size_t prefix_size);
/* 1, or 0 at the end, or an error. The view must not change between calls. */
int kv_iter_next(struct kv_iter *iter, struct kv_key *ret_key, struct kv_value *ret_value);
void kv_iter_done(struct kv_iter *iter);
#define _cleanup_iter_ __attribute__((cleanup(kv_iter_done)))

/* The first such key at or behind START, for loops that change what they walk. As kv_iter_next. */
int kv_view_seek(struct kv_view *view, size_t prefix_size, struct kv_key *start_ret_key,
	struct kv_value *ret_value);

/* ---- op.c: operations ---- */

enum kv_space_change_kind {
	KV_SPACE_USE,
	KV_SPACE_ADOPT,
	KV_SPACE_DROP,
	KV_SPACE_CLAIM,
};
struct kv_space_change {
	struct kv_extent extent;
	enum kv_space_change_kind kind;
};
/* What an operation did to the space, to be undone if it fails. See space_op.c. */
struct kv_space_op {
	struct kv_space_change *changes;
	size_t count;
	size_t capacity;
	bool expect_release;
	bool locked;
};

/* What an operation does to a domain. SET: also its record's fields. See domain.c. */
struct kv_domain_change {
	uint32_t domain;
	bool set;
	enum kv_domain_state state;
	uint64_t ino;
	uint64_t limit;
	int64_t used;
	int64_t redeemed; /* promises that end with it */
	int64_t pinned;
	int64_t inodes;
	int64_t held;
};
struct kv_domain_op {
	struct kv_domain_change *changes;
	size_t count;
	size_t capacity;
	bool moved; /* an inode changed its domain or pin: what others remember is out of date */
	bool directory_moved;
};

struct kv_op {
	struct kv_index *index;
	struct kv_overlay layer;
	struct kv_view view;
	struct kv_space_op space;
	struct kv_domain_op domains;
	int64_t inodes; /* what to add to the index's counts */
	int64_t held_inodes;
	uint64_t sequence; /* set by kv_op_end */
	bool in_journal;
};

/* Before the commit thread begins: waits for nothing. */
void kv_op_start(struct kv_op *op, struct kv_index *index);
/* Waits while too much is pending; fails while commits do. */
int kv_op_begin(struct kv_op *op, struct kv_index *index);
/* Applies the changes if R is not negative, else forgets them. Returns R. */
int kv_op_end(struct kv_op *op, int r);

/* The same for what makes the index grow: -ENOSPC while only removals are taken. */
int kv_op_begin_growing(struct kv_op *op, struct kv_index *index);
/* A record of the operation to be filled in by the caller at once; NULL if memory is short. */
uint8_t *kv_op_put(struct kv_op *op, const struct kv_key *key, size_t size, bool held);
int kv_op_drop(struct kv_op *op, const struct kv_key *key, bool held);
uint64_t kv_op_new_ino(struct kv_op *op);

/* ---- inode.c ---- */

/* An inode as an operation or a view has it. */
struct kv_index_node {
	struct kv_inode inode;
	const uint8_t *tail; /* lent by the view */
	size_t tail_size;
	bool orphan;    /* kv_index_reap may take it */
	bool ordered;   /* in the view it has a place in the use order, at ORDER */
	uint64_t order; /* see format.h */
	/* What its domain counts for it in the view. */
	struct {
		bool there;
		bool held;
		uint32_t domain;
		uint64_t used;
		uint64_t pinned;
	} counted;
};
int kv_view_node(struct kv_view *view, uint64_t ino, struct kv_index_node *ret_node);
/* A live directory: -ENOTDIR, and -ENOENT also for one that was removed or retired. */
int kv_view_directory(struct kv_view *view, uint64_t ino, struct kv_index_node *ret_node);
/* Writes it to the layer that its KV_INODE_HELD says, and keeps its place in the use order right.
 */
int kv_op_put_node(struct kv_op *op, struct kv_index_node *node);
/* Removes the record and the place in the use order, and counts. */
int kv_op_drop_node(struct kv_op *op, struct kv_index_node *node);

static inline bool kv_index_node_is_held(const struct kv_index_node *node)
{
	return node->inode.flags & KV_INODE_HELD;
}

/* ---- dirent.c ---- */

struct kv_name {
	const char *bytes;
	size_t length;
};
struct kv_entry {
	struct kv_place place;
	struct kv_dirent_record record; /* name lent by the view */
	bool held;
};
/* -ENAMETOOLONG, -EINVAL for what cannot be a name. */
int kv_name_check(const struct kv_name *name);
/* The entry NAME of directory PARENT, or -ENOENT. */
int kv_view_entry(struct kv_view *view, uint64_t parent, const struct kv_name *name,
	struct kv_entry *ret_entry);
/* The entry at PLACE, which an inode points to: -EUCLEAN if there is none. */
int kv_view_entry_at(
	struct kv_view *view, const struct kv_place *place, struct kv_entry *ret_entry);
/* The inode that ENTRY names: -EUCLEAN if it is gone or of another type. */
int kv_view_entry_node(
	struct kv_view *view, const struct kv_entry *entry, struct kv_index_node *ret_node);
/* The path of the first name of INO from the root, for the caller to free; NULL: none is known. */
char *kv_view_path(struct kv_view *view, uint64_t ino);
/* A free place for NAME: -EEXIST, or -ENOSPC if its hash has none left. */
int kv_view_free_place(struct kv_view *view, uint64_t parent, const struct kv_name *name,
	struct kv_place *ret_place);
/* 1 or 0. */
int kv_view_is_empty(struct kv_view *view, uint64_t ino);
int kv_op_put_entry(struct kv_op *op, const struct kv_entry *entry);
int kv_op_drop_entry(struct kv_op *op, const struct kv_entry *entry);

/* ---- link.c: which names an inode has ---- */

/* The first link from *PLACE on (cookie 0: the first of all) that comes in the order of the index.
 */
struct kv_link_walk {
	bool first_done;
	uint64_t next; /* key of the next further link */
};
/* 1: ret_place is the next link of NODE; 0: no more. Works while links are removed. */
int kv_view_next_link(struct kv_view *view, const struct kv_index_node *node,
	struct kv_link_walk *walk, struct kv_place *ret_place);
/* 0 if the inode has a link at PLACE, else -ENOENT. */
int kv_view_has_link(
	struct kv_view *view, const struct kv_index_node *node, const struct kv_place *place);
/* These change NODE's place and link count (not of directories), not its record. */
int kv_op_add_link(struct kv_op *op, struct kv_index_node *node, const struct kv_place *place);
int kv_op_remove_link(struct kv_op *op, struct kv_index_node *node, const struct kv_place *place);
int kv_op_move_link(struct kv_op *op, struct kv_index_node *node, const struct kv_place *from,
	const struct kv_place *to);
/* DIRECTORY has one subdirectory more (1) or less (-1): changes its link count. */
int kv_op_count_subdirectory(struct kv_op *op, struct kv_index_node *directory, int by);
/* NODE, which has no link left, waits for kv_index_reap from now on. */
int kv_op_make_orphan(struct kv_op *op, struct kv_index_node *node);
/* Writes NODE after a link was removed: as an orphan if that was the last. */
int kv_op_put_unlinked(struct kv_op *op, struct kv_index_node *node);

static inline void kv_index_node_changed(struct kv_index_node *directory, int64_t now_ns)
{
	directory->inode.mtime_ns = now_ns;
	directory->inode.ctime_ns = now_ns;
}

/* ---- domain.c ---- */

int kv_domains_new(struct kv_index *index);
int kv_domains_load(struct kv_index *index);
void kv_domains_free(struct kv_index *index);
/* The change of DOMAIN by this operation, to be added to; NULL if memory is short. */
struct kv_domain_change *kv_op_domain(struct kv_op *op, uint32_t domain);
/* Notes what NODE counts from now on, or, with GONE, that it counts nothing any more. */
int kv_op_count_node(struct kv_op *op, struct kv_index_node *node, bool gone);
void kv_index_node_init_counted(struct kv_index_node *node);
/* NODE, a directory, is removed: if it carries a quota, that ends. */
int kv_op_end_domain(struct kv_op *op, const struct kv_index_node *node);
/* Whether the directory carries a quota. Under the lock. */
bool kv_index_node_is_domain(const struct kv_index *index, const struct kv_index_node *node);
/* NODE goes to DOMAIN: -EDQUOT if it could never fit there, or its pin does not. */
int kv_op_move_node(struct kv_op *op, struct kv_index_node *node, uint32_t domain);
void kv_domain_op_end(struct kv_op *op, bool applied);
/* Writes changed domains to the pending layer. Index lock held exclusively. */
int kv_domains_collect(struct kv_index *index);
/* The padding of the lists of DOMAIN, see format.h: CALL for each key. */
int kv_domain_padding(uint32_t domain, int (*call)(void *arg, const struct kv_key *key), void *arg);

/* ---- xattr.c ---- */

/* Gives TO, which has none, the attributes of FROM, in the same layer. */
int kv_op_copy_xattrs(
	struct kv_op *op, const struct kv_index_node *from, const struct kv_index_node *to);
/* Sets an attribute of NODE, whose record is not written. */
int kv_op_set_xattr(struct kv_op *op, const struct kv_index_node *node, const char *name,
	const void *value, size_t size);
/* An attribute's value, lent by the view: 0, or -ENODATA. */
int kv_view_xattr(struct kv_view *view, uint64_t ino, const char *name, const void **ret_value,
	size_t *ret_size);

int kv_op_drop_xattrs(struct kv_op *op, const struct kv_index_node *node);

/* ---- space.c and space_op.c ---- */

int kv_space_new(struct kv_index *index, uint64_t quota_blocks, struct kv_space **ret_space);
struct kv_space *kv_space_free(struct kv_space *space);
/* Writes what operations changed to the pending layer. Index lock held exclusively. */
int kv_space_collect(struct kv_space *space, struct kv_overlay *pending);
uint64_t kv_space_used(struct kv_space *space);
/* Operations up to SEQUENCE are durable: what they freed may be used again once it is released. */
void kv_space_durable(struct kv_space *space, uint64_t sequence);

/* The extent becomes used: by FRESH content, or as a further reference to SHARED content. */
int kv_space_op_use(struct kv_op *op, const struct kv_extent *extent);
int kv_space_op_share(struct kv_op *op, const struct kv_extent *extent);
/* One reference less. 1: it was the last, and the blocks are busy until kv_space_release. */
int kv_space_op_drop(struct kv_op *op, const struct kv_extent *extent);
/* What an operation of a process before this one has done. 1: the blocks are busy until
 * kv_space_release. */
int kv_space_op_again(struct kv_op *op, const struct kv_space_change *change);
/* Room for one more kv_freed, so that kv_space_release need not allocate. */
int kv_space_op_expect_release(struct kv_op *op);
/* From the first call above to here the space lock is held. */
void kv_space_op_end(struct kv_op *op, bool applied);

/* ---- publish.c and reap.c: chunk maps in operations ---- */

/* Extents that lose a reference in an operation. */
struct kv_drops {
	struct kv_extent *extents;
	size_t count;
	size_t capacity;
};
int kv_drops_add(struct kv_drops *drops, const struct kv_chunk *chunk);
/* NODE loses a chunk: takes its blocks off the inode's count. */
int kv_op_count_blocks(struct kv_op *op, struct kv_index_node *node, const struct kv_chunk *gone);
/* Drops the references; what was the last one of its extent stays in the list. */
int kv_op_drop_extents(struct kv_op *op, struct kv_drops *drops);
/* After kv_op_end with R: the list becomes ret_freed, or is forgotten. Returns R. */
int kv_drops_finish(
	struct kv_drops *drops, const struct kv_op *op, int r, struct kv_freed *ret_freed);

static inline uint64_t kv_chunk_blocks(const struct kv_chunk *chunk)
{
	uint64_t blocks = 0;

	for (uint32_t i = 0; i < chunk->extent_count; i++)
		blocks += chunk->extents[i].count;
	return blocks;
}

/* Begins to read segment NUMBER of a node's map: 1, or 0 if it has none there. READER lends the
 * data. */
int kv_view_segment(struct kv_view *view, const struct kv_index_node *node, uint64_t number,
	struct kv_map_reader *ret_reader);
/* The number of the first segment at or behind *NUMBER that has a record: 1, or 0. */
int kv_view_next_segment(struct kv_view *view, const struct kv_index_node *node, uint64_t *number);
/* kv_map_next, with the damage logged. */
int kv_view_next_chunk(struct kv_view *view, const struct kv_index_node *node,
	struct kv_map_reader *reader, struct kv_chunk *ret_chunk);

/* ---- reserve.c ---- */

/* After a commit, by its thread: keeps the reserve, and learns whether the index may grow. */
void kv_reserve_update(struct kv_index *index);
/* Of a name that goes or moves: entry, link, inode, orphan, and two of the order of use. */
#define KV_RECORDS_A_NAME 6u
/* How many of at most MOST steps, of so many RECORDS each, one operation may take. At least 1. */
unsigned kv_reserve_steps(const struct kv_index *index, unsigned most, unsigned records);

/* ---- suspect.c ---- */

/* Whether a process has crashed with the index in PATH since it was last found sound: 0, 1. */
int kv_suspect_find(const char *path);
int kv_suspect_clear(const char *path);

/* ---- env.c ---- */

/* An index up to that size is a small one: a hundred thousand files or so. */
#define KV_ENV_SMALL (UINT64_C(64) << 20)
/* FLAGS are LMDB's, beside ours. MAP_SIZE 0: the default. */
int kv_env_open(const char *path, uint64_t map_size, unsigned flags, MDB_env **ret_env);
/* Opens the index's own. */
int kv_env_attach(struct kv_index *index, const char *path, uint64_t map_size, unsigned flags);
/* Closes and opens it while no view is there. */
int kv_env_reopen(struct kv_index *index);
/* Makes the last commit durable after its sync has failed. */
int kv_env_sync_again(struct kv_index *index);

/* ---- commit.c ---- */

int kv_commit_start(struct kv_index *index);
/* Before that: commits what is pending. */
int kv_commit_now(struct kv_index *index);
void kv_commit_stop(struct kv_index *index);
/* Waits while too much is pending; the error of commits while they fail. */
int kv_commit_admit(struct kv_index *index);
/* Too much is pending. */
bool kv_commit_is_full(struct kv_index *index);
/* An operation was applied. */
void kv_commit_notify(struct kv_index *index);
/* Fails the next COUNT commits with ERROR. For tests. */
void kv_commit_fail(struct kv_index *index, int error, unsigned count);

#endif
