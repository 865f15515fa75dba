/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index: names, inodes, chunk maps, extended attributes, use order and free space of one store,
 * in LMDB.
 *
 * Three layers make up the live view, newest first:
 *   held     records of files whose first content is not on the device yet; never committed as such
 *   pending  records of finished operations that wait for the group commit
 *   LMDB     what the last commit left
 * An operation is atomic: it is applied to the upper layers whole, under the index lock, and
 * reaches LMDB with all earlier operations in one transaction. After a crash the store is as of
 * some operation boundary, and a file made with HOLD that was not published is absent.
 *
 * Ownership: the caller owns what it passes in; results are copied out, or lent to a callback for
 * the length of the call (callbacks must not call the index).
 * Threads: every function may be called by any thread. Lookups take the index lock shared and never
 * wait for a commit. The index lock is a leaf below a file's lock; no callback runs under it but
 * those named so. Errors: negative errno. -EUCLEAN: a record failed its checks (logged once, with
 * its key). -EIO or -ENOSPC: LMDB could not commit; operations are refused until a retry succeeds.
 * Times are nanoseconds since the epoch. Names are KV_NAME_MAX bytes at most, need no NUL.
 */
#ifndef KVFS_INDEX_INDEX_H
#define KVFS_INDEX_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "fs/base.h"

struct kv_index;
struct kv_space;

/* What the index knows of the store it belongs to. Written once by kv_index_create. */
struct kv_index_store {
	uint8_t uuid[16];
	uint32_t format; /* KV_INDEX_FORMAT of the writer */
	uint32_t device_count;
	uint64_t device_blocks[KV_DEVICES_MAX]; /* blocks that may be allocated, superblock area
						   excluded */
};

/* What to do about damage, for the end of a message. */
#define KV_INDEX_ADVICE                                                                            \
	"run `kvfs check` on the store, which can repair it, or make it anew with `kvfs format "   \
	"--force`"

struct kv_index_options {
	uint64_t map_size_bytes;  /* 0: 64 GiB of address space */
	uint32_t commit_delay_ms; /* group commit waits that long for company; 0: 50 */
	uint64_t quota_blocks;    /* 0: all devices */
	/* All pages of an index up to that size are looked at before it is opened; 0: 64 MiB. */
	uint64_t checked_bytes;
	/*
	 * Memory that outlives the process, KV_INDEX_JOURNAL_SIZE bytes, zeros at first: with it
	 * whoever opens the index next has all that this process has done, even if it is killed.
	 * Or NULL.
	 */
	void *journal;
};
#define KV_INDEX_JOURNAL_SIZE ((UINT64_C(64) << 20) + (UINT64_C(1) << 18))

/* Quota domains that there can be; 0 is the rest of the store, which has no quota of its own. */
#define KV_DOMAINS_MAX 1024u

/* One file, directory or symlink. A plain value. */
struct kv_inode {
	uint64_t ino;  /* never reused */
	uint32_t mode; /* type and permissions, as st_mode */
	uint32_t uid;
	uint32_t gid;
	uint32_t nlink;
	uint64_t size; /* bytes */
	uint64_t
		blocks; /* blocks of KV_BLOCK_SIZE that the content occupies, shared ones counted */
	uint64_t version; /* of the committed content; grows with every publish */
	int64_t atime_ns;
	int64_t mtime_ns;
	int64_t ctime_ns;
	int64_t btime_ns;
	int64_t last_use_ns; /* orders eviction; in steps of 4096 ns */
	uint32_t hits;       /* opens for reading */
	uint32_t flags;      /* KV_INODE_* */
	uint32_t domain;     /* whose quota it counts against */
	uint64_t parent;     /* directory of the first link (of the directory itself: its parent) */
	uint64_t cookie;     /* that link's place in the directory */
};

#define KV_INODE_QUARANTINED (1u << 0) /* content failed its checksum: has no name any more */
/* Never evicted. Of a directory: what is made in it will be pinned. */
#define KV_INODE_PINNED (1u << 1)
#define KV_INODE_READ (1u << 2) /* opened for reading since it was published */
#define KV_INODE_FLAGS (KV_INODE_QUARANTINED | KV_INODE_PINNED | KV_INODE_READ)
#define KV_INODE_HELD (1u << 31) /* live view only: no content on the device yet */

/* ---- Life of an index ---- */

/* Makes an empty index in the existing, empty directory PATH, with the root directory owned by
 * UID:GID, MODE bits. */
int kv_index_create(const char *path, const struct kv_index_store *store, uint32_t root_mode,
	uint32_t uid, uint32_t gid, int64_t now_ns);

/*
 * Opens it: constant time in the number of files, unless it was open in a crash. ret_error
 * (error_size bytes) receives one line for the user on failure: -ENOENT no index there, -EPROTO
 * made by a kvfs with another format, -EUCLEAN damaged.
 */
int kv_index_open(const char *path, const struct kv_index_options *options,
	struct kv_index **ret_index, char *ret_error, size_t error_size);

/* Commits everything that may be committed, stops the commit thread. NULL is allowed. Returns NULL.
 */
struct kv_index *kv_index_close(struct kv_index *index);

/*
 * When this process crashes from now on (by a fault, or an assertion), whoever opens INDEX next
 * looks at all of its pages first: LMDB may have met a damaged one. Once a process; it crashes all
 * the same.
 */
int kv_index_watch_crashes(const struct kv_index *index);

/*
 * The next operation of this thread that succeeds does what request NUMBER (even, from 2 on; never
 * used twice) asks for. 0: it does not. In an index with a journal, after a restart: whether that
 * was done; of the last ten thousand or so.
 */
void kv_index_for_request(uint64_t number);
bool kv_index_was_done(struct kv_index *index, uint64_t number);

/* The first inode behind AFTER that was made to be held, and is; 0: there is none. */
uint64_t kv_index_next_held(struct kv_index *index, uint64_t after);

const struct kv_index_store *kv_index_store(const struct kv_index *index);
struct kv_space *kv_index_space(struct kv_index *index);

/*
 * The map, or the filesystem that the index is on, is so full that only removals are taken: what
 * makes names, links, attributes or quotas answers -ENOSPC until those have freed enough.
 */
bool kv_index_is_short(const struct kv_index *index);

/* ---- Durability ---- */

/* The number of the last operation applied. */
uint64_t kv_index_sequence(struct kv_index *index);
/* Waits until operation SEQUENCE and all before it are on stable storage. */
int kv_index_wait(struct kv_index *index, uint64_t sequence);

/* ---- Reading ---- */

int kv_index_get(struct kv_index *index, uint64_t ino, struct kv_inode *ret_inode);
int kv_index_lookup(struct kv_index *index, uint64_t parent, const char *name, size_t length,
	struct kv_inode *ret_inode);
/*
 * What the entries of directory PARENT say by themselves of COUNT names: a fraction of a look-up's
 * work each, for the directory is looked at once and no record of a file is read. Stops at the
 * first that is no name (-EINVAL, -ENAMETOOLONG). -ENOTDIR; no such directory: it has none of them.
 */
struct kv_find {
	const char *name;
	size_t length;
	uint64_t ino;  /* out; 0: no such entry */
	uint32_t type; /* out: S_IFMT bits */
	bool held;     /* out: no content on the device yet */
};
int kv_index_find(struct kv_index *index, uint64_t parent, struct kv_find *finds, size_t count);
/* Copies at most SIZE bytes of the target, no NUL. Returns its length; -EINVAL if not a symlink. */
ssize_t kv_index_readlink(struct kv_index *index, uint64_t ino, char *ret_target, size_t size);

struct kv_dirent {
	const char *name; /* valid during the callback */
	size_t length;
	uint64_t ino;
	uint32_t type;   /* S_IFMT bits */
	uint64_t cookie; /* pass it to kv_index_readdir to go on behind this entry; 63 bits, > 2 */
	struct kv_inode inode; /* only with want_inodes */
};
/*
 * Calls ENTRY for the entries of directory INO behind COOKIE (0: from the start), in a stable
 * order, until it returns false. "." and ".." are not among them. The index lock is held shared:
 * ENTRY must not block.
 */
int kv_index_readdir(struct kv_index *index, uint64_t ino, uint64_t cookie, bool want_inodes,
	bool (*entry)(void *arg, const struct kv_dirent *dirent), void *arg);

/*
 * The name and directory of the first link of INO: for invalidation and for messages.
 * ret_name takes KV_NAME_MAX + 1 bytes, NUL-terminated.
 */
int kv_index_name(struct kv_index *index, uint64_t ino, uint64_t *ret_parent, char *ret_name);
/* The path of the first name of INO from the root, for the caller to free; NULL if it has none. */
char *kv_index_path(struct kv_index *index, uint64_t ino);

/* Fills ret_inos with regular files above AFTER that have blocks, ascending; returns how many. */
ssize_t kv_index_files(struct kv_index *index, uint64_t after, uint64_t *ret_inos, size_t capacity);

/* ---- Names ---- */

struct kv_make {
	uint64_t parent;
	const char *name;
	size_t length;
	uint32_t mode; /* type and permissions; regular, directory or symlink */
	uint32_t uid;
	uint32_t gid;
	const char *target; /* of a symlink, NUL-terminated, 1 to 4095 bytes; else NULL */
	int64_t now_ns;
	bool hold; /* regular files: keep every record of it in the held layer until
		      kv_index_publish */
};
/* Makes an inode with one name. -EEXIST, -ENOENT (no such parent), -ENOTDIR, -ENAMETOOLONG. */
int kv_index_make(struct kv_index *index, const struct kv_make *make, struct kv_inode *ret_inode);

/* A further name for a file or symlink. -EPERM on directories, -EEXIST, -EMLINK (over 65,000). */
int kv_index_link(struct kv_index *index, uint64_t ino, uint64_t parent, const char *name,
	size_t length, int64_t now_ns, struct kv_inode *ret_inode);

/*
 * Removes a name. DIRECTORY says which of rmdir and unlink this is (-ENOTDIR, -EISDIR, -ENOTEMPTY).
 * EXPECTED_INO other than 0: -ESTALE unless the name has that inode. ret_inode is as after the
 * call. An inode left without a name becomes an orphan: its records and space stay until
 * kv_index_reap.
 */
int kv_index_unlink(struct kv_index *index, uint64_t parent, const char *name, size_t length,
	bool directory, uint64_t expected_ino, int64_t now_ns, struct kv_inode *ret_inode);

struct kv_rename {
	uint64_t parent;
	const char *name;
	size_t length;
	uint64_t new_parent;
	const char *new_name;
	size_t new_length;
	unsigned flags; /* RENAME_NOREPLACE, RENAME_EXCHANGE of linux/fs.h */
	int64_t now_ns;
};
/*
 * Renames atomically, POSIX rules (-EISDIR, -ENOTDIR, -ENOTEMPTY, -EINVAL into its own subtree,
 * same inode: nothing). -EINPROGRESS: the target exists (or is exchanged) and one of the two is
 * held: publish and sync it, then call again; so a held name never hides a committed one.
 * Into another quota domain: files take their blocks along (-EDQUOT if they could never fit), a
 * directory that has entries must be copied (-EXDEV), unless it carries a quota itself.
 * ret_moved: the inode under the new name. ret_replaced: what had it (EXCHANGE: the other one), ino
 * 0 if nothing; nlink 0 there means an orphan to reap.
 */
int kv_index_rename(struct kv_index *index, const struct kv_rename *rename,
	struct kv_inode *ret_moved, struct kv_inode *ret_replaced);

/* ---- Attributes ---- */

#define KV_CHANGE_MODE (1u << 0) /* permission bits only; the type stays */
#define KV_CHANGE_UID (1u << 1)
#define KV_CHANGE_GID (1u << 2)
#define KV_CHANGE_ATIME (1u << 3)
#define KV_CHANGE_MTIME (1u << 4)
#define KV_CHANGE_CTIME (1u << 5)
struct kv_change {
	unsigned mask; /* KV_CHANGE_* */
	uint32_t mode;
	uint32_t uid;
	uint32_t gid;
	int64_t atime_ns;
	int64_t mtime_ns;
	int64_t ctime_ns;
};
int kv_index_change(struct kv_index *index, uint64_t ino, const struct kv_change *change,
	struct kv_inode *ret_inode);

/* Notes uses of a published file: last use, HITS more hits, and a new atime unless INT64_MIN.
 * -ENOENT if gone. */
int kv_index_touch(
	struct kv_index *index, uint64_t ino, int64_t last_use_ns, uint32_t hits, int64_t atime_ns);

/* Extended attributes: names of 1 to 255 bytes, values to 64 KiB, 64 KiB in all per inode
 * (-ENOSPC). FLAGS: XATTR_CREATE, XATTR_REPLACE. */
int kv_index_xattr_set(struct kv_index *index, uint64_t ino, const char *name, const void *value,
	size_t size, int flags, int64_t now_ns);
/* SIZE 0 asks for the length. Returns the length; -ERANGE if SIZE is too small, -ENODATA. */
ssize_t kv_index_xattr_get(
	struct kv_index *index, uint64_t ino, const char *name, void *ret_value, size_t size);
/* NUL-terminated names one after the other; SIZE 0 asks for the length. */
ssize_t kv_index_xattr_list(struct kv_index *index, uint64_t ino, char *ret_names, size_t size);
int kv_index_xattr_remove(struct kv_index *index, uint64_t ino, const char *name, int64_t now_ns);

/* ---- Content ---- */

enum kv_chunk_origin {
	KV_CHUNK_KEPT,   /* extents are those the index has for this chunk */
	KV_CHUNK_FRESH,  /* extents come from kv_space_alloc */
	KV_CHUNK_SHARED, /* extents belong to another file (or chunk): one reference more */
};

/* One chunk of a file's map. A chunk that is not listed, or has no extents, is a hole. */
struct kv_chunk {
	uint32_t number; /* offset in the file / KV_CHUNK_SIZE */
	uint32_t extent_count;
	enum kv_chunk_origin origin;     /* for kv_index_publish; KEPT when read */
	uint64_t sum;                    /* XXH3-64 of the extents' bytes in order, whole blocks */
	const struct kv_extent *extents; /* ascending by block, not overlapping */
};

struct kv_content {
	uint64_t size;    /* bytes */
	uint64_t version; /* must be above the committed one */
	int64_t mtime_ns;
	int64_t ctime_ns;
	int64_t last_use_ns; /* when it became readable: uses since then stand */
	bool replace;        /* chunks not listed go; else they stay, those behind SIZE excepted */
	const struct kv_chunk *chunks; /* ascending by number */
	size_t chunk_count;
	/* What was promised for it (kv_index_charge), in blocks of DOMAIN; ends with its publish.
	 */
	uint32_t domain;
	uint64_t promised;
};

/* Space that an operation freed in the index. Hand it to kv_space_release exactly once. */
struct kv_freed {
	struct kv_extent *extents;
	size_t count;
	uint64_t sequence; /* of the operation */
};

/*
 * Commits a version: size, times and chunk map change in one operation, space changes with them,
 * held records of INO join the pending ones. The bytes must be on the devices, flushed, before the
 * call. ret_freed receives the extents the old content alone used. -ENOENT: INO was reaped
 * meanwhile: nothing changed, the FRESH extents are still the caller's. Orphans can be published
 * to.
 */
int kv_index_publish(struct kv_index *index, uint64_t ino, const struct kv_content *content,
	struct kv_inode *ret_inode, struct kv_freed *ret_freed);

/* Calls CHUNK for the chunks FIRST to FIRST + COUNT - 1 that have extents, ascending; the callback
 * must not block. */
int kv_index_map(struct kv_index *index, uint64_t ino, uint32_t first, uint32_t count,
	void (*chunk)(void *arg, const struct kv_chunk *chunk), void *arg);

/*
 * Frees an orphan that nothing uses any more: records, attributes, space. Works off at most
 * KV_REAP_CHUNKS extents a call, and fewer where room is short, so that the lock is never held
 * long: returns 1 while some are left, 0 when the inode is gone, -ENOENT if there is no such
 * orphan, -EBUSY if it has names.
 */
#define KV_REAP_CHUNKS 4096u
int kv_index_reap(struct kv_index *index, uint64_t ino, struct kv_freed *ret_freed);
/*
 * Works off the entries of a retired directory, KV_CLEAR_NAMES a call at most: 1 while some are
 * left, else 0; -ENOENT if it is no orphan. GONE is called, under the index lock, for each name
 * with its inode, an orphan if that has no link any more; what it was told is not so if the call
 * fails. kv_index_reap answers -ENOTEMPTY until that is done.
 */
#define KV_CLEAR_NAMES 256u
int kv_index_clear(struct kv_index *index, uint64_t ino, int64_t now_ns,
	void (*gone)(void *arg, const struct kv_inode *inode, const char *name, size_t length),
	void *arg);
/* Fills ret_inos with orphans above AFTER, ascending; returns how many. At mount: those a crash
 * left. */
ssize_t kv_index_orphans(
	struct kv_index *index, uint64_t after, uint64_t *ret_inos, size_t capacity);

/* ---- Eviction ---- */

struct kv_index_use {
	int64_t last_use_ns;
	uint64_t ino;
	uint32_t domain;
	bool unread;
};
#define KV_DOMAIN_ANY UINT32_MAX
/* Which files: zero is those of domain 0. */
struct kv_index_scope {
	uint32_t domain;   /* or KV_DOMAIN_ANY */
	bool unread;       /* only those never read since they were published */
	int64_t before_ns; /* only those used before that; 0: all */
};
/*
 * The published files of SCOPE (NULL: all) used longest ago, oldest first, behind AFTER (NULL: the
 * oldest). Pinned ones are not among them. Returns how many. Costs more with the number of quota
 * domains, not with that of files.
 */
ssize_t kv_index_oldest(struct kv_index *index, const struct kv_index_scope *scope,
	const struct kv_index_use *after, struct kv_index_use *ret_uses, size_t capacity);

/*
 * Takes every name from file INO, which becomes an orphan. NAME is called for each link, under the
 * index lock. EXPECTED_LAST_USE_NS: -EAGAIN if it was used since. QUARANTINE marks the inode, and
 * leaves it among the oldest instead of making it an orphan: its space is freed when it is evicted.
 */
int kv_index_evict(struct kv_index *index, uint64_t ino, int64_t expected_last_use_ns,
	bool quarantine, int64_t now_ns,
	void (*name)(void *arg, uint64_t parent, const char *name, size_t length), void *arg);

/*
 * The same for eviction that spares what is pinned by now (-EBUSY), and what KEEP (may be NULL),
 * which is called under the index lock, says is to be kept. Who notes a use and then finds the file
 * has it for good.
 */
int kv_index_evict_unless(struct kv_index *index, const struct kv_index_use *use, int64_t now_ns,
	bool (*keep)(void *arg, uint64_t ino),
	void (*name)(void *arg, uint64_t parent, const char *name, size_t length), void *arg);

/* ---- Keeping: quota domains, pins, retiring ---- */

/*
 * A directory that carries a quota is a domain, with all below it down to the next such directory.
 * What is made in a directory belongs to the directory's domain, a file with several names to that
 * of its first one. The counters of a domain change in the operations that change its files.
 */
enum kv_domain_state {
	KV_DOMAIN_NONE,
	KV_DOMAIN_LIVE,
	KV_DOMAIN_ADOPTING, /* its quota was set: what is below joins it, see kv_index_quota_step */
	KV_DOMAIN_LEAVING,  /* its quota was taken away: what is below joins the one above */
	KV_DOMAIN_DEAD,     /* has no directory any more; goes with the last inode that it has */
	_KV_DOMAIN_STATE_MAX,
};
struct kv_domain_info {
	uint32_t number;
	enum kv_domain_state state;
	uint64_t ino;      /* of the directory */
	uint64_t limit;    /* blocks, as all below; UINT64_MAX: none */
	uint64_t used;     /* by what is in the index */
	uint64_t promised; /* see kv_index_charge */
	uint64_t pinned;
	uint64_t pin_limit; /* so much may be pinned */
	uint64_t inodes;
};
/* -ENOENT if there is no such domain. Cheap: no lock. */
int kv_index_domain(struct kv_index *index, uint32_t number, struct kv_domain_info *ret_info);
/* How many domains there may be at most now, for loops over them. */
uint32_t kv_index_domain_count(const struct kv_index *index);

/*
 * Gives directory INO a quota of LIMIT blocks, or changes it; 0 takes it away. ret_number is the
 * domain, for kv_index_quota_step. -ENOSPC: no domain is left. -EINVAL: the root, whose quota is
 * the store's. -ENODATA: there is none to take away. -EBUSY: what was below it is still leaving.
 * -EDQUOT: more is pinned.
 */
int kv_index_quota_set(struct kv_index *index, uint64_t ino, uint64_t limit, uint32_t *ret_number);

/* Where a walk is; zero at its start. */
struct kv_quota_walk {
	uint64_t ino;
	uint64_t cookie;
	uint64_t moves; /* directories renamed before the pass began */
	uint64_t moved; /* inodes that changed domain in this pass */
	unsigned passes;
};
/*
 * Lets at most KV_QUOTA_STEP entries below the domain's directory join, until a whole pass finds
 * none that must. 1: call again; 0: done, the domain is live, or gone if it was leaving. A walk may
 * begin anew at any time, so one that a crash ended is found by the domain's state and gone on
 * with. One walk at a time.
 */
#define KV_QUOTA_STEP 128u
int kv_index_quota_step(struct kv_index *index, uint32_t number, struct kv_quota_walk *walk);
/* Grows when an inode has changed domain or pin: what was remembered of one must be looked up. */
uint64_t kv_index_domain_epoch(const struct kv_index *index);

/*
 * Promises GROWTH blocks of DOMAIN to content that is not in the index yet: -EDQUOT if they do not
 * fit. SHRINK (both may be given) are given back. Never waits.
 */
int kv_index_charge(struct kv_index *index, uint32_t domain, uint64_t growth, uint64_t shrink);
/* Whether GROWTH blocks more may be pinned: -EDQUOT by DOMAIN, -ENOSPC by the store. */
int kv_index_pin_check(struct kv_index *index, uint32_t domain, uint64_t growth);

/*
 * Pins file or directory INO, or unpins it. What is pinned may be KV_PIN_SHARE/8 of its domain's
 * limit (else -EDQUOT) and of the store (-ENOSPC). PRIVILEGED false: outside of all quotas only
 * KV_PIN_SHARE_OTHERS/8 of the store. -EINVAL: a symlink.
 */
#define KV_PIN_SHARE 7u
#define KV_PIN_SHARE_OTHERS 2u
int kv_index_pin(struct kv_index *index, uint64_t ino, bool pin, bool privileged,
	struct kv_inode *ret_inode);

#define KV_FINGERPRINT_NAME "user.kvfs.fingerprint"
#define KV_FINGERPRINT_MAX 255u
struct kv_retire {
	uint64_t ino;
	const char *unless; /* a fingerprint: nothing is done if the directory carries that one */
	size_t unless_size; /* 0: no condition */
	int64_t now_ns;
};
/*
 * Replaces directory INO by an empty one with the same name, owner, mode, times, attributes and
 * quota; UNLESS becomes its fingerprint. The old one is an orphan, for kv_index_clear. In
 * constant time. 1: done, ret_fresh is the new one; 0: it carries that fingerprint. -ENOTDIR,
 * -ENOENT: removed, -EBUSY: the root.
 */
int kv_index_retire(
	struct kv_index *index, const struct kv_retire *retire, struct kv_inode *ret_fresh);

/* ---- Figures ---- */

struct kv_index_usage {
	uint64_t inodes;     /* live view */
	uint64_t pending;    /* records that wait for the commit */
	uint64_t held;       /* records in the held layer */
	uint64_t commits;    /* LMDB transactions since the start */
	uint64_t size_bytes; /* LMDB pages in use */
	uint64_t pinned;     /* blocks */
};
void kv_index_usage(struct kv_index *index, struct kv_index_usage *ret_usage);

#endif
