/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core: files, their versions, and what moves bytes between DRAM and the devices. Knows nothing
 * of FUSE.
 *
 * Objects
 *   kv_core     one mounted store: index, space, devices, DRAM tier, and the threads for fill,
 * write-back, eviction, reaping kv_file     an inode number in use: its published version, the
 * versions being written. One per ino, counted kv_version  a state of a file's content, counted.
 * Being written (changes by kv_version_write and friends), then published (immutable for ever),
 * then committed (its extents are in the index)
 *
 * A version keeps for every chunk one of these states:
 *   HOLE   no bytes: reads as zero
 *   COLD   bytes are on the devices (extents known), not in the object
 *   HOT    in the object, and on the devices
 *   DIRTY  in the object only
 *   BASE   as in the version this one was made from (rewrites; resolved by copying or by inheriting
 * extents) Map segments are loaded from the index on demand, so that opening a huge file costs what
 * is touched.
 *
 * A version pins the extents it knows: space freed by a later commit is handed to kv_space_release
 * only when the last reference to the version that named it is gone. So readers keep an old version
 * for as long as they like.
 *
 * Lock order: file lock, version lock, then one of the leaves (index, space, DRAM, queues).
 * Nothing waits for I/O, for DRAM or for space with a lock held.
 * Threads: any, unless said. Functions that may wait say so. Errors: negative errno.
 */
#ifndef KVFS_FS_CORE_H
#define KVFS_FS_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "fs/base.h"
#include "fs/dram.h"
#include "fs/options.h"
#include "fs/stats.h"
#include "fs/store.h"

struct kv_core;
struct kv_inode;
struct kv_unsettled_notes;
struct kv_user;
struct kv_file;
struct kv_version;

/* What the core asks of the FUSE side. Called without core locks; must not call back into the core.
 */
struct kv_core_hooks {
	void *arg;
	/* Registers FD as a passthrough backing file: an id > 0, or negative errno. NULL: no
	 * passthrough. */
	int (*backing_open)(void *arg, int fd);
	void (*backing_close)(void *arg, int backing_id);
	/* A name vanished without a request (eviction, quarantine): the kernel's entry must go. */
	void (*name_gone)(void *arg, uint64_t parent, const char *name, size_t length);
	/* Version VERSION of INO became wholly resident while it was open as a stream. */
	void (*became_hot)(void *arg, uint64_t ino);
	/*
	 * INODE has lost its last name, NAME in directory PARENT, which was retired: kv_core_orphan
	 * is to be called when the FUSE side does not need it any more, maybe at once. NULL: at
	 * once.
	 */
	void (*orphaned)(void *arg, const struct kv_inode *inode, uint64_t parent, const char *name,
		size_t length);
	/* What INO had published is not its content any more. May be NULL. */
	void (*changed)(void *arg, uint64_t ino);
};

struct kv_core_options {
	const struct kv_options *options; /* copied */
	struct kv_store *store;           /* outlives the core */
	struct kv_stats *stats;           /* outlives the core */
	struct kv_core_hooks hooks;
	bool dram_is_shared; /* the DRAM tier is DRAM_MOUNT, and outlives this process: dram.h */
	int dram_mount;
	struct kv_unsettled_notes *unsettled; /* that outlive the process, too; or NULL */
	bool awaits_word; /* what was left by another process is kept until kv_core_go_on */
};

/* Starts the DRAM tier and the threads; *ret_core is set before a hook is called. One line in
 * ret_error on failure. */
int kv_core_new(const struct kv_core_options *options, struct kv_core **ret_core, char *ret_error,
	size_t error_size);
/*
 * Writes back what is published, commits, stops the threads, frees everything. All files must be
 * put, except those the core itself holds. Waits. NULL is allowed. Returns NULL; or CORE if a
 * device that does not answer still has its memory: then nothing that it knows may be freed, and
 * all that is left to do is to end the process.
 */
struct kv_core *kv_core_free(struct kv_core *core);
/* All that was open when this process began is so to the core by now: what is left, without a name
 * or in DRAM, may be freed. With awaits_word, once. */
void kv_core_go_on(struct kv_core *core);

/* After a restart: goes on with the versions that the process before has left unsettled. Those that
 * nobody claims until kv_core_go_on are given up, unless they were published. */
void kv_core_take_up(struct kv_core *core);
/* The one that had this note (kv_version_note), with a reference, or NULL: it is lost, or settled.
 */
struct kv_version *kv_core_claim(struct kv_core *core, uint64_t note);
/* After a restart: files that were never published, and that nobody goes on writing, go. */
void kv_core_drop_held(struct kv_core *core);

struct kv_index *kv_core_index(struct kv_core *core);
struct kv_dram *kv_core_dram(struct kv_core *core);
/* Set once, after kv_core_new and before the first request. */
void kv_core_set_hooks(struct kv_core *core, const struct kv_core_hooks *hooks);
/* CLOCK_REALTIME through the I/O table's clock. */
int64_t kv_core_now_ns(struct kv_core *core);

/* Of a DRAM budget, bytes that may wait to be written back. */
#define KV_DIRTY_LIMIT(budget) ((budget) / 2)
struct kv_core_usage {
	uint64_t files;       /* in memory */
	uint64_t versions;    /* in memory */
	uint64_t dirty_bytes; /* in DRAM and not on the devices */
	uint64_t dirty_limit; /* writers are held back above it: KV_DIRTY_LIMIT */
	uint64_t open_handles;
};
void kv_core_usage(struct kv_core *core, struct kv_core_usage *ret_usage);

/* Makes everything published so far durable. Waits. */
int kv_core_sync(struct kv_core *core);

/*
 * INO has lost its last name: its records and space are freed when nothing uses it any more, by a
 * background thread. To be called after every index operation that left an inode with nlink 0.
 */
void kv_core_orphan(struct kv_core *core, uint64_t ino);

/*
 * Sets, changes or takes away (LIMIT_BLOCKS 0) the quota of directory INO, and waits until what is
 * below it has joined; kv_index_quota_set's errors.
 */
int kv_core_set_quota(struct kv_core *core, uint64_t ino, uint64_t limit_blocks);
/* Makes domains that hold more than their limits evict, in the background. */
void kv_quota_kick(struct kv_core *core);

/*
 * Directory INO was retired: what is below it is freed in the background, piece by piece. Its own
 * record goes as that of any orphan.
 */
void kv_core_retired(struct kv_core *core, uint64_t ino);

/* ---- Files ---- */

/* The file of INO, made if it is not in memory. A reference; nodes hold one each. -ENOMEM. */
int kv_file_get(struct kv_core *core, uint64_t ino, struct kv_file **ret_file);
/* As above, but NULL unless it is in memory already. */
struct kv_file *kv_file_find(struct kv_core *core, uint64_t ino);
/* Drops a reference. The file stays in memory while it has content in DRAM or work to do. NULL is
 * allowed. Returns NULL. */
struct kv_file *kv_file_put(struct kv_file *file);

uint64_t kv_file_ino(const struct kv_file *file);
/* The file's lock, for the FUSE side's own per-file state (nodes). */
pthread_mutex_t *kv_file_lock(struct kv_file *file);
/* A pointer for the FUSE side, NULL at first; guarded by the file's lock. */
void **kv_file_cookie(struct kv_file *file);

/* Open handles of any kind keep a file in the store. */
void kv_file_opened(struct kv_file *file);
void kv_file_closed(struct kv_file *file);

/*
 * What the index said of an inode, and the index's sequence before that was asked: while this has
 * not moved, the index says the same, and need not be asked again.
 */
struct kv_seen {
	const struct kv_inode *inode;
	uint64_t sequence;
};

/* What the index says of INO now; SEEN, of this inode or NULL, spares asking it. */
int kv_core_look(
	struct kv_core *core, uint64_t ino, const struct kv_seen *seen, struct kv_inode *ret_inode);

/*
 * The newest published version, with a reference; loaded from the index if need be.
 * -ENOENT: nothing was published yet, or the file is quarantined, or it is gone. *ret_version only
 * on success.
 */
int kv_file_current(struct kv_file *file, struct kv_version **ret_version);
/* The same; SEEN, of this file, spares a look into the index. */
int kv_file_current_seen(
	struct kv_file *file, const struct kv_seen *seen, struct kv_version **ret_version);
/* True if VERSION is what kv_file_current would return. */
bool kv_file_is_current(struct kv_file *file, const struct kv_version *version);

/* Counts an open for reading: last use, hits, relatime-like atime; written to the index at most
 * once a second a file. */
void kv_file_touch(struct kv_file *file);

/*
 * INO was looked up or opened: it is not evicted within the lease (K2). True if it had none: then
 * eviction may just have taken it, and only a look at the index from now on tells.
 */
bool kv_core_lease(struct kv_core *core, uint64_t ino);
/* The same for a file that was just found in the index, with that look: -ENOENT if it is gone. */
int kv_core_lease_found(struct kv_core *core, uint64_t ino);
/* INO is about to lose the name that it was leased by: it stays for a moment only. */
void kv_core_lease_renamed(struct kv_core *core, uint64_t ino);
/* Milliseconds that are left of the lease, 0 if there is none. */
int64_t kv_core_lease_left(struct kv_core *core, uint64_t ino);

/*
 * Somebody says that the file was used at WHEN_NS: orders eviction as an open would, from DRAM and
 * from the store, but is no hit. It never makes the last use earlier, and the future counts as now.
 */
void kv_file_used_at(struct kv_file *file, int64_t when_ns);

/* Writes the uses counted since then to the index now: for who wants to read them there. */
void kv_file_note_uses(struct kv_file *file);

/* ---- Versions: life ---- */

struct kv_version *kv_version_ref(struct kv_version *version);
/* The last reference of a version that was not published discards it. NULL is allowed. Returns
 * NULL. */
struct kv_version *kv_version_unref(struct kv_version *version);

/*
 * A version to be written: as BASE is (published; shares its chunks until they change), or empty
 * with BASE NULL. It becomes one of FILE's writers until it is published or discarded.
 */
int kv_version_new(struct kv_file *file, struct kv_version *base, struct kv_version **ret_version);

/*
 * After a restart, until kv_core_go_on: the version NUMBER of FILE, which is not its current one
 * any more. For reading by kv_version_read alone; it counts as unpublished, and is nobody's.
 * -ENOENT if not all of it was left in DRAM.
 */
int kv_version_keep(struct kv_file *file, uint64_t number, struct kv_version **ret_version);

/* Whose limit VERSION counts against while it is being written; once, before it is changed. NULL is
 * allowed: nobody's. */
void kv_version_set_user(struct kv_version *version, struct kv_user *user);

struct kv_version_attr {
	uint64_t number;    /* of the published version; 0 while being written */
	uint64_t size;      /* bytes */
	uint64_t blocks;    /* of KV_BLOCK_SIZE; written and allocated ones */
	uint64_t unwritten; /* those that are allocated only */
	int64_t mtime_ns;
	int64_t ctime_ns;
	bool published;
	bool committed; /* the index has it: its record is the truth for times and blocks */
	bool changed; /* being written, and differs from its base (or was truncated by its creation)
		       */
};
void kv_version_attr(struct kv_version *version, struct kv_version_attr *ret_attr);
/* What another process finds VERSION by, until it is settled; 0: it cannot. */
uint64_t kv_version_note(struct kv_version *version);
/* A part of its content is missing: nobody else is to go on with it. */
void kv_version_is_short(struct kv_version *version);
/* Explicit times from the user (utimensat): survive the publish. INT64_MIN leaves one alone. */
void kv_version_set_times(struct kv_version *version, int64_t mtime_ns, int64_t ctime_ns);

/*
 * Publishes: VERSION becomes the file's current one, readable at once, its write-back is queued.
 * From now on it never changes. What its writer allocated and has not written stays promised, for
 * kv_version_continue or until kv_version_give_up. -EALREADY if it is published. -EIO if a write to
 * it failed before, -EDQUOT if it did not fit its quota.
 */
int kv_version_publish(struct kv_version *version);
/* VERSION, made from FROM just now, takes over what FROM was published with: its promises, and
 * its bytes in DRAM unless a reader has them. */
void kv_version_continue(struct kv_version *version, struct kv_version *from);
/* The writer of this published version does not go on. */
void kv_version_give_up(struct kv_version *version);
/* Waits until a published version (or a later one of the file) is durable. -EIO if its write-back
 * failed, or if a device does not answer: then it may become durable later, and be asked for again.
 */
int kv_version_sync(struct kv_version *version);

/* ---- Versions: access ---- */

enum kv_access {
	KV_ACCESS_HOT, /* wholly in the object, which stays so until kv_version_close: may be passed
			  through */
	KV_ACCESS_STREAM, /* serve it by kv_version_read */
};
/*
 * Prepares a published version for a reader, and pins it until kv_version_close. HOT if it is
 * resident, or if it is small enough (stream_above, a quarter of the DRAM budget) to be filled now:
 * waits for that. DIRECT (O_DIRECT) does not admit a version that is not resident. -ENOENT: its
 * bytes are damaged or cannot be read.
 */
int kv_version_open(struct kv_version *version, bool direct, enum kv_access *ret_access);
void kv_version_close(struct kv_version *version);
/* The backing id of a HOT version's object, registered on first use and kept for the object's
 * residency. > 0, or negative errno. */
int kv_version_backing(struct kv_version *version);

/*
 * A descriptor, for reading, of the object of a version that an open has found HOT: the caller's.
 * Its bytes are there, and are the version's, until kv_version_close.
 */
int kv_version_share(struct kv_version *version);

/* Reads up to SIZE bytes: short only at the end of the file. Waits for fills. -EIO. */
ssize_t kv_version_read(struct kv_version *version, void *ret_memory, size_t size, uint64_t offset);
/*
 * The same for O_DIRECT: whole chunks that are not in DRAM are read past it. A piece of one brings
 * it in, for its checksum is the chunk's and the reader may come for the rest; but it is the first
 * to go.
 */
ssize_t kv_version_read_direct(
	struct kv_version *version, void *ret_memory, size_t size, uint64_t offset);

/*
 * The same without a copy: the bytes [OFFSET, OFFSET + SIZE) of a published version, as far as it
 * goes, mapped. They are there until kv_loan_end, which must follow. -EIO: a device does not
 * answer. -EAGAIN: not to be had that way (holes, damage, a version being written, no room): use
 * kv_version_read. Waits for fills.
 */
struct kv_loan {
	const void *memory;
	size_t size; /* bytes */
	struct kv_version *version;
	uint32_t first, last; /* chunks kept in the object */
	void *mapping;
	size_t mapping_size;
};
int kv_version_lend(
	struct kv_version *version, uint64_t offset, size_t size, struct kv_loan *ret_loan);
void kv_loan_end(struct kv_loan *loan);

/* SEEK_DATA or SEEK_HOLE, block-granular; -ENXIO as lseek(2). */
int kv_version_seek(struct kv_version *version, uint64_t offset, int whence, uint64_t *ret_offset);

/* ---- Versions: change (only while being written; else -ESTALE) ---- */

/*
 * Writes all of SIZE bytes or fails. Space in the store is reserved before anything is changed
 * (-ENOSPC only if nothing can be evicted; -EDQUOT the same within a directory's quota), DRAM is
 * charged; waits when write-back is behind. -EFBIG. After -EDQUOT the version cannot be published
 * unless it is truncated: half a file is not kept.
 */
int kv_version_write(struct kv_version *version, const void *memory, size_t size, uint64_t offset);
int kv_version_truncate(struct kv_version *version, uint64_t size);
/* MODE as fallocate(2): 0, KEEP_SIZE, PUNCH_HOLE|KEEP_SIZE, ZERO_RANGE[|KEEP_SIZE]; others
 * -EOPNOTSUPP. Allocating promises space of the store, which waits for eviction, and costs no DRAM;
 * -ENOSPC only before anything is changed. Allocated blocks count in blocks, read as zeros, and are
 * holes once they are published. */
int kv_version_allocate(struct kv_version *version, int mode, uint64_t offset, uint64_t length);
/*
 * Copies LENGTH bytes from FROM (published; waits until it is committed): whole chunks at equal
 * chunk offsets share extents, the rest is copied. FROM's size bounds it. ret_copied: bytes.
 */
struct kv_clone {
	struct kv_version *from;
	uint64_t from_offset;
	uint64_t to_offset;
	uint64_t length;
};
int kv_version_clone(
	struct kv_version *version, const struct kv_clone *clone, uint64_t *ret_copied);

/* ---- Residency on request ---- */

struct kv_warm {
	uint64_t offset; /* bytes */
	uint64_t length;
	bool ask; /* only look */
};
struct kv_warm_result {
	uint64_t done;     /* bytes of the range that are in the file */
	uint64_t resident; /* those of them that are in DRAM */
	uint64_t holes;    /* those of them that are nowhere */
};
/*
 * Brings a range of a version that kv_version_open has opened into DRAM, and waits for it. What
 * does not fit is left out, as ret_result shows. -EIO: damaged, or a device failed.
 */
int kv_version_warm(
	struct kv_version *version, const struct kv_warm *range, struct kv_warm_result *ret_result);

/* kv_index_make; evicts files if the index has no room to grow. May wait: no locks held. */
int kv_core_make(struct kv_core *core, const struct kv_make *make, struct kv_inode *ret_inode);

/*
 * Reads what the devices hold of a range of INO, and checks it, without bringing it into DRAM or
 * noting a use. A file with a chunk that fails its checksum is quarantined, as by a read. -ENOENT:
 * there is nothing published of it.
 */
struct kv_scrub {
	uint64_t offset;
	uint64_t length;
};
struct kv_scrub_result {
	uint64_t done;       /* bytes of the range that are in the file */
	uint64_t checked;    /* those of them that a device holds, and that were read */
	uint64_t unreadable; /* those of them that the device did not give */
	bool damaged;        /* a chunk failed: the file is quarantined, the rest was left out */
};
int kv_core_scrub(struct kv_core *core, uint64_t ino, const struct kv_scrub *range,
	struct kv_scrub_result *ret_result);

/*
 * Drops what INO has published from DRAM, after it was written back; waits for that. -EBUSY: it is
 * open or being written. -EIO: the write-back failed.
 */
int kv_core_cool(struct kv_core *core, uint64_t ino, uint64_t *ret_bytes);

/*
 * Evicts INO from the store as the evictor would, after it was written back: names, then space.
 * -EBUSY: open or being written. -EAGAIN: opened within the lease, unless LEASED. -EPERM:
 * pinned. ret_bytes: freed.
 */
int kv_core_evict(struct kv_core *core, uint64_t ino, bool leased, uint64_t *ret_bytes);

/* ---- For control.c ---- */

enum kv_chunk_state {
	KV_CHUNK_HOLE,
	KV_CHUNK_COLD,
	KV_CHUNK_HOT,
	KV_CHUNK_DIRTY,
	KV_CHUNK_BASE,
	_KV_CHUNK_STATE_MAX,
};
/* Calls CHUNK for chunk numbers from FIRST on (holes too) until it returns false. No lock is held.
 */
struct kv_chunk_info {
	uint32_t number;
	enum kv_chunk_state state;
	uint64_t sum; /* valid with extents */
	uint32_t extent_count;
	const struct kv_extent *extents; /* valid during the callback */
};
int kv_version_map(struct kv_version *version, uint32_t first,
	bool (*chunk)(void *arg, const struct kv_chunk_info *info), void *arg);

#endif
