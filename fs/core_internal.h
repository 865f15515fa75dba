/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the core share: the structs behind core.h and the calls between its rooms.
 *
 * Rooms
 *   core.c         life, threads, waiting, accounting
 *   file.c         table of files, current versions, uses
 *   version.c      life of a version, its writers and lists
 *   publish.c      publishing and settling
 *   open.c         opening and closing for readers
 *   map.c          chunk slots, presence of blocks, what the index has
 *   pages.c        which pages of DRAM a chunk has, and getting more
 *   blocks.c       content of a chunk's blocks, in memory and on its way to and from devices
 *   seek.c         walking a map
 *   read.c         reading
 *   write.c        writing
 *   write_pair.c   writing what fills a huge page
 *   change.c       truncate, allocate, punch
 *   promise.c      blocks that are allocated and not written
 *   clone.c        sharing extents
 *   fill.c         devices to DRAM: who wants what; fill_run.c: reading; fill_piece.c: checking
 *   writeback.c    DRAM to devices: which chunks; writeback_run.c: writing
 *   commit.c       devices to index
 *   evict.c        DRAM eviction
 *   warm.c         DRAM residency on request
 *   adopt.c        DRAM residency that another process has left
 *   kept.c         old versions that it has left; unsettled.c: those that were not committed
 *   reap.c         orphans
 *   evict_store.c  store eviction
 *   quota.c        promises of quotas, eviction within them
 *   charge.c       what counts against its writer's limits, holding him back
 *   lease.c        who was looked up or opened of late
 *   flush.c        flushing the devices
 *   watch.c        devices that do not answer
 *
 * Locks, outermost first: shard (a file's members), version, leaves (index, space, DRAM, lists,
 * parks). A derived version may be locked before its base, never the other way round. The mutex
 * that kv_file_lock returns belongs to the FUSE side; the core never takes it.
 *
 * Blocks of a version's chunks are accounted so:
 *   DIRTY                      promised (kv_space_reserve), counted in version->reserved
 *   DIRTY, being written back  allocated; the write-back job owns the extents
 *   ... and written again      both: the job's extents are dropped when it ends
 *   HOT or COLD, FRESH         allocated; the slot owns the extents until the commit
 *   HOT or COLD, otherwise     owned by the index
 *   absent, in a range         promised, counted in version->unwritten
 */
#ifndef KVFS_FS_CORE_INTERNAL_H
#define KVFS_FS_CORE_INTERNAL_H

#include <bsd/sys/queue.h>
#include <bsd/sys/tree.h>
#include <stdatomic.h>

#include "fs/adopt_internal.h"
#include "fs/core.h"
#include "fs/device.h"
#include "fs/log.h"
#include "fs/table.h"
#include "fs/watch_internal.h"
#include "index/space.h"

#define KV_SHARDS 64u
#define KV_PARKS 64u
#define KV_THREADS_MAX 160u
#define KV_SEGMENT_CHUNKS 32u
/* Longest run of chunks in one fill job or one mapped window. */
#define KV_RUN_CHUNKS 16u
#define KV_RING_DEPTH 64u
/* A wait looks at least this often whether the core is being shut down. */
#define KV_WAIT_SLICE_MS 500u
/* How long a request waits for DRAM or for write-back that makes no progress before it gives up. */
#define KV_PATIENCE_MS 30000u
/* A base that waits for its own commit may itself have such a base; beyond this depth writers wait.
 */
#define KV_BASE_DEPTH_MAX 8u

enum kv_slot_flag {
	KV_SLOT_BUSY = 1u << 0,      /* one thread prepares or fills it; the others wait */
	KV_SLOT_WRITEBACK = 1u << 1, /* on its way to a device */
	KV_SLOT_REDIRTIED = 1u << 2, /* ... and changed since: the extents under way are stale */
	KV_SLOT_FRESH = 1u << 3,     /* extents are ours until the commit */
	KV_SLOT_SHARED = 1u << 4,    /* extents are another file's */
	KV_SLOT_RESIDENT = 1u << 5,  /* BASE only: copied into the object */
	KV_SLOT_FAILED = 1u << 6,    /* the last fill failed */
	KV_SLOT_USED = 1u << 7,      /* read since the clock's hand passed */
	KV_SLOT_BITMAP = 1u << 8,    /* DIRTY only: presence is in bitmap, else it is a prefix */
	KV_SLOT_LOST =
		1u << 9, /* DIRTY only: could not be written, has no promise of space any more */
	KV_SLOT_SPARSE = 1u << 10, /* has the pages of its present blocks, not the first ones */
};

/* One chunk. Moves in memory when its segment grows: hold the version's lock while using a pointer
 * to it. */
struct kv_slot {
	unsigned state : 3;        /* enum kv_chunk_state */
	unsigned extent_count : 9; /* HOT, COLD */
	unsigned blocks : 9;       /* DIRTY: blocks present */
	unsigned charge : 9;       /* pages of DRAM charged and allocated: see pages.c */
	uint16_t pins;             /* copies under way between the object and a request */
	uint16_t flags;            /* enum kv_slot_flag */
	uint64_t sum;              /* HOT, COLD */
	union {
		struct kv_extent one;   /* extent_count == 1 */
		struct kv_extent *many; /* extent_count > 1, malloc'ed */
		uint64_t *bitmap;       /* KV_SLOT_BITMAP: 256 bits, malloc'ed */
	};
};
static_assert(sizeof(struct kv_slot) == 32, "a slot is a resident chunk's whole overhead");

struct kv_segment {
	RB_ENTRY(kv_segment) entry;
	uint32_t number;
	uint32_t capacity; /* slots there are; the others are as if the segment were missing */
	struct kv_slot slots[];
};
RB_HEAD(kv_segment_tree, kv_segment);

/* A piece of one chunk. */
struct kv_span {
	uint32_t chunk;
	uint32_t from; /* bytes within the chunk */
	uint32_t to;
};

/* Presence of the blocks of one chunk. */
struct kv_bits {
	uint64_t word[KV_CHUNK_BLOCKS / 64];
};

/* Blocks [FIRST, END) of a file that are allocated: see promise.c. */
struct kv_range {
	RB_ENTRY(kv_range) entry;
	uint64_t first;
	uint64_t end;
};
RB_HEAD(kv_range_tree, kv_range);

enum kv_version_state {
	KV_VERSION_WRITING,
	KV_VERSION_PUBLISHED,
	KV_VERSION_COMMITTED,
	KV_VERSION_FAILED,
};

enum kv_version_list {
	KV_LIST_NONE,
	KV_LIST_IDLE,   /* may be dropped from DRAM whole, least recently used first */
	KV_LIST_ACTIVE, /* single chunks may be punched or written early */
};

struct kv_freed_node {
	struct kv_freed_node *next;
	struct kv_freed freed;
};

/* A version whose extents this one shares until its own commit. */
struct kv_source {
	struct kv_source *next;
	struct kv_version *version;
};

/* What a version was promised of its domain's quota. Guarded by the version's lock. */
struct kv_quota {
	uint64_t epoch;  /* of the domains, when DOMAIN, PINNED and CREDIT were looked up */
	uint32_t domain; /* as all here but CREDIT and PENDING 0 before the first write */
	bool known;
	bool pinned;
	bool refused;      /* a write did not fit: half of the content is missing */
	uint64_t credit;   /* blocks that the file has already, and gives up for this version */
	uint64_t pending;  /* blocks that writes under way will add */
	uint64_t promised; /* blocks, of DOMAIN */
};

struct kv_version {
	_Atomic unsigned refs; /* goes down under the shard's lock only */
	struct kv_file *file;  /* counted */
	pthread_mutex_t lock;

	/* Guarded by the shard's lock. */
	TAILQ_ENTRY(kv_version) sibling; /* in file->versions once published */
	struct kv_freed_node *freed;     /* space that no older version may be reading any more */

	/* Guarded by the lists' lock. */
	TAILQ_ENTRY(kv_version) lru;
	uint8_t list; /* enum kv_version_list */

	/* Guarded by the write-back queue's lock. */
	TAILQ_ENTRY(kv_version) queued;   /* for write-back, then for the commit */
	TAILQ_ENTRY(kv_version) inflight; /* published and not settled, in order of serial */
	uint64_t serial;
	bool bulky; /* written alone, not in one batch with others */
	bool aside; /* in core->writeback.waiting; changed under the file's lock, too */

	/* Guarded by the lock. */
	uint8_t state; /* enum kv_version_state */
	bool changed;
	bool exclusive;  /* somebody changes size, map or state: no writer may be inside */
	bool sealed;     /* being published: no early write-back may begin */
	bool from_index; /* segments that are missing are in the index */
	bool all_hot;    /* wholly in the object, all pages allocated */
	bool hot;        /* an open that was promised that is there */
	bool streamed;   /* an open that was not is there */
	bool direct;     /* all opens that are there are O_DIRECT and not admitted */
	bool exposed;    /* a client may have the object's pages mapped: never punch */
	bool damaged;
	bool continues; /* its base was published by the same writer, who goes on */
	bool pinned;    /* segments in memory may differ from the index: never drop them */
	bool dropped;   /* settled without a commit because nobody can see it any more */
	bool mtime_set;
	bool ctime_set;
	uint8_t depth; /* of uncommitted bases */
	int error;     /* a write-back that failed */
	unsigned opens;
	unsigned busy;           /* pins and jobs that use the object */
	unsigned writers;        /* writes inside */
	unsigned jobs;           /* write-back batches inside */
	int backing;             /* id, or 0 */
	uint32_t base_chunks;    /* chunks below it are BASE unless a slot says otherwise */
	uint32_t cursor;         /* of early write-back */
	uint32_t hand;           /* of the clock that punches */
	unsigned flush_failures; /* of the core, when the first chunk was written */
	bool wrote;
	uint64_t write_end;        /* of the last write: a stream goes on there */
	_Atomic uint64_t wrote_on; /* bit N: a chunk was written to device N */
	uint32_t next_read;        /* chunk at which a sequential reader would go on */
	uint8_t ahead;             /* chunks that one gets in advance */
	uint64_t size;
	uint64_t number;
	uint64_t blocks;
	uint64_t reserved;  /* blocks */
	uint64_t unwritten; /* blocks promised to the absent ones of the ranges */
	uint64_t dirty;     /* blocks */
	uint64_t charged;   /* blocks */
	uint64_t object_size;
	struct kv_quota quota;
	struct kv_user *user; /* counted; whose limit it counts against, or NULL */
	uint64_t charge;      /* blocks, of that */
	uint64_t growing;     /* blocks that writes under way will add */
	uint64_t sequence;    /* of the commit's operation */
	int64_t mtime_ns;
	int64_t ctime_ns;
	int64_t published_ns;
	struct kv_version *base; /* counted, until the commit */
	struct kv_source *sources;
	struct kv_object *object;
	struct kv_unsettled *note; /* or NULL */
	struct kv_segment_tree segments;
	struct kv_range_tree ranges;
};
TAILQ_HEAD(kv_version_queue, kv_version);

struct kv_file {
	struct kv_link link; /* in its shard; first */
	struct kv_core *core;
	uint64_t ino;
	pthread_mutex_t lock; /* the FUSE side's */
	void *cookie;         /* the FUSE side's */
	_Atomic unsigned opens;

	/* Guarded by the shard's lock. */
	unsigned refs; /* one a version among them */
	unsigned writers;
	unsigned inflight;                /* published versions that are not settled */
	uint64_t generation;              /* grows when the current version changes */
	uint64_t last_number;             /* 0: not known */
	struct kv_version *current;       /* counted */
	struct kv_version_queue versions; /* published ones that are alive, oldest first */
	int64_t touched_ns;
	int64_t noted_ns; /* last time the index was told */
	uint32_t hits;    /* not told yet */
	bool unlinked;
	bool quarantined;
	bool reap_queued;
	bool reaped;
};

struct kv_shard {
	pthread_mutex_t lock;
	struct kv_table files;
};

/* Where threads sleep that wait for a change of a version or file; hashed by its address. */
struct kv_park {
	pthread_mutex_t lock;
	pthread_cond_t cond;
};

struct kv_fill;
TAILQ_HEAD(kv_fill_queue, kv_fill);

struct kv_orphan {
	STAILQ_ENTRY(kv_orphan) entry;
	uint64_t ino;
	bool clear; /* a directory: first what is in it */
	bool keep;  /* and only that */
};
STAILQ_HEAD(kv_orphan_queue, kv_orphan);

struct kv_core {
	struct kv_options options;
	struct kv_store *store;
	struct kv_index *index;
	struct kv_space *space;
	struct kv_devices *devices;
	struct kv_dram *dram;
	struct kv_stats *stats;
	struct kv_core_hooks hooks;
	struct kv_shard shards[KV_SHARDS];
	struct kv_park parks[KV_PARKS];
	uint64_t budget;            /* bytes of DRAM */
	bool outlives;              /* the DRAM tier does: what is whole in it gets marks */
	_Atomic uint64_t charged;   /* bytes */
	_Atomic uint64_t dirty;     /* bytes */
	_Atomic uint64_t unwritten; /* blocks: the sum over all versions */
	_Atomic uint64_t files;
	_Atomic uint64_t versions;
	_Atomic uint64_t opens;
	_Atomic uint64_t objects; /* serial of object names */
	_Atomic bool stopping;    /* waits end */
	_Atomic unsigned write_errors[KV_DEVICES_MAX];
	_Atomic unsigned flush_failures;
	_Atomic uint32_t *leases; /* see lease.c */
	pthread_t threads[KV_THREADS_MAX];
	unsigned thread_count;

	struct {
		pthread_mutex_t lock;
		struct kv_version_queue idle;
		struct kv_version_queue active;
	} lists;
	struct kv_legacies legacies;
	struct kv_left unsettled;
	struct {
		pthread_mutex_t lock;
		pthread_cond_t cond;
		struct kv_fill_queue urgent;
		struct kv_fill_queue ahead;
		unsigned idle; /* threads without work */
		/* A chunk, for the one thread that works while all others are idle; NULL while it
		 * has it. */
		void *staging;
		bool stop;
		struct kv_crew crew;
	} fill;
	struct {
		pthread_mutex_t lock;
		pthread_cond_t work;  /* for the write-back threads */
		pthread_cond_t ready; /* for the commit thread */
		pthread_cond_t
			settled; /* a version was committed or failed, dirty bytes went down */
		struct kv_version_queue queue;
		struct kv_version_queue waiting; /* for an earlier version of their file */
		struct kv_version_queue complete;
		struct kv_version_queue inflight;
		uint64_t serial;
		uint64_t due;         /* versions up to this serial are written now */
		int64_t held_ms;      /* when the oldest of the others was published */
		int64_t published_ms; /* last publish */
		uint64_t progress;    /* grows with every chunk written or version settled */
		bool spill;           /* DRAM is short: write unpublished versions early */
		bool stop;
		struct kv_crew crew;
	} writeback;
	struct {
		pthread_mutex_t lock;
		pthread_cond_t wanted;
		pthread_cond_t ended;
		bool stop;
		struct kv_flusher flushers[KV_DEVICES_MAX];
	} flush;
	struct {
		pthread_mutex_t lock;
		pthread_cond_t cond;
		pthread_t thread;
		bool running;
		bool ending; /* no more threads */
		bool stop;
	} watch;
	struct {
		pthread_mutex_t lock;
		pthread_cond_t cond;
		bool stop;
	} dram_evictor;
	struct kv_evictor {
		pthread_mutex_t lock;
		pthread_cond_t wanted;
		pthread_cond_t done;
		uint64_t need;              /* blocks somebody waits for */
		uint64_t begun;             /* rounds */
		uint64_t ended;             /* rounds */
		_Atomic int64_t evicted_ms; /* last eviction */
		uint64_t held;   /* freed blocks that readers keep; the evictor's thread's own */
		int64_t own_ms;  /* its last eviction; its own, too */
		uint64_t barren; /* number of the last round that found nothing to evict */
		bool kicked;
		bool stop;
	} evictor;
	pthread_mutex_t index_room_lock; /* one at a time evicts for the index; above all others */
	struct {
		pthread_mutex_t lock;
		pthread_cond_t changed;        /* a flag below went down */
		bool evicting[KV_DOMAINS_MAX]; /* somebody makes room in it */
		bool walking;                  /* kv_core_set_quota */
	} quotas;
	struct {
		pthread_mutex_t lock;
		pthread_cond_t cond;
		pthread_cond_t idle;
		struct kv_orphan_queue queue;
		unsigned drains; /* who wait on idle */
		bool awaits_word;
		bool working;
		bool stop;
	} reaper;
};

/* ---- core.c ---- */

int kv_core_thread(struct kv_core *core, void *(*main)(void *core));
void kv_cond_init(pthread_cond_t *cond);
/* Waits on COND for at most MS. False on time-out. */
bool kv_cond_wait_ms(pthread_cond_t *cond, pthread_mutex_t *lock, unsigned ms);
/* Sleeps until KEY is woken, or MS: HELD is released meanwhile. May wake early. */
void kv_park_wait(struct kv_core *core, const void *key, pthread_mutex_t *held, unsigned ms);
void kv_park_wake(struct kv_core *core, const void *key);

/* Tells the FUSE side that INO has other content, or none. No locks held. */
void kv_core_changed(struct kv_core *core, uint64_t ino);

/* Charges DRAM, waiting up to PATIENCE_MS; wakes the evictor. -EAGAIN if DRAM stays short. */
int kv_core_charge(struct kv_core *core, uint64_t bytes, unsigned patience_ms);
void kv_core_uncharge(struct kv_core *core, uint64_t bytes);
/* For pages that are there already. -EAGAIN if the budget is smaller. Never waits. */
int kv_core_charge_found(struct kv_core *core, uint64_t bytes);
/* Promises blocks of the store; evicts and waits when it is full: also, as long as leases run, for
 * their end. */
int kv_core_reserve(struct kv_core *core, uint64_t blocks);
/* Holds a writer back while too much is dirty. */
void kv_core_throttle(struct kv_core *core);
void kv_core_dirty_add(struct kv_core *core, uint64_t blocks);
/* WAKE: somebody may wait for it although the sum is below the limit. */
void kv_core_dirty_sub(struct kv_core *core, uint64_t blocks, bool wake);

/* ---- file.c ---- */

struct kv_shard *kv_shard_of(struct kv_core *core, uint64_t ino);
/* With the shard's lock held: */
void kv_file_ref_locked(struct kv_file *file);
/* Drops a reference; true if the caller must call kv_file_destroy without locks. */
bool kv_file_unref_locked(struct kv_file *file);
void kv_file_destroy(struct kv_file *file);
/* If only the file itself keeps its idle current version: takes it out, for the caller to unref
 * without locks. */
struct kv_version *kv_file_trim_locked(struct kv_file *file);
/* Queues the file for the reaper when it has lost its names and nothing uses it. */
void kv_file_consider_reap_locked(struct kv_file *file);
/* Frees what is left of the table. Returns how many files were there. */
unsigned kv_files_free(struct kv_core *core);

/* ---- version.c ---- */

struct kv_version *kv_version_alloc(struct kv_file *file);
/* A reference unless VERSION is being destroyed. */
bool kv_version_try_ref(struct kv_version *version);
/* -EIO if VERSION was lost, -ENOENT if it was dropped unwritten with its file: what builds on it
 * shares that. Lock held. */
int kv_version_failure_locked(const struct kv_version *version);
int kv_version_enter(struct kv_version *version); /* a writer; -ESTALE */
void kv_version_leave(struct kv_version *version);
int kv_version_enter_exclusive(struct kv_version *version);
void kv_version_leave_exclusive(struct kv_version *version);
/* All in the object, all pages allocated. Lock held. */
bool kv_version_is_resident_locked(struct kv_version *version);
/* Creates the object if there is none. Lock held. */
int kv_version_object_locked(struct kv_version *version);
/* Puts the version on the list where it belongs now; LAST: as the most recently used. Lock held. */
void kv_version_relist_locked(struct kv_version *version, bool last);
bool kv_version_is_settled(struct kv_version *version);
/* True if VERSION's commit waits for a device that is slow. No locks held; so for the next. */
bool kv_version_is_held_up(struct kv_version *version);
/* Waits until a published version is settled. -EIO: a device does not answer; it still may be
 * settled later. */
int kv_version_wait_settled(struct kv_version *version);
/* The version leaves the inflight list for good. No locks held. */
void kv_version_settle(struct kv_version *version, enum kv_version_state state, int error);
/* Has no name and no open any more: its write-back is pointless. */
bool kv_version_is_invisible(struct kv_version *version);
/* Hands FREED to the versions of FILE older than VERSION (NULL: to any) that may read it, or to the
 * space. */
void kv_file_release(struct kv_file *file, struct kv_version *version, struct kv_freed *freed);
void kv_freed_release(struct kv_core *core, struct kv_freed_node *node);

/* ---- map.c: lock held unless said ---- */

static inline uint32_t kv_chunk_count(uint64_t size)
{
	return (uint32_t)kv_div_round_up(size, KV_CHUNK_SIZE);
}

/* Blocks of chunk NUMBER that lie inside a file of SIZE bytes. */
static inline unsigned kv_chunk_used(uint64_t size, uint32_t number)
{
	uint64_t start = (uint64_t)number << KV_CHUNK_SHIFT;

	if (size <= start)
		return 0;
	return (unsigned)kv_div_round_up(kv_min_u64(size - start, KV_CHUNK_SIZE), KV_BLOCK_SIZE);
}

RB_PROTOTYPE(kv_segment_tree, kv_segment, entry, kv_segment_compare)
int kv_segment_compare(const struct kv_segment *a, const struct kv_segment *b);

/* Makes sure that the segment of chunk NUMBER is in memory; drops the lock to read the index. */
int kv_map_load(struct kv_version *version, uint32_t number);
/* Loads all segments that the index has, so that VERSION survives a change there. No locks held. */
int kv_map_load_all(struct kv_version *version);
/* After the commit: BASE slots learn their extents from the index. No locks held. */
int kv_map_rebase(struct kv_version *version);
/* The slot, or NULL where the default holds. */
struct kv_slot *kv_slot_find(struct kv_version *version, uint32_t number);
/* The slot, made if there is none. The segment must be loaded. -ENOMEM. */
int kv_slot_get(struct kv_version *version, uint32_t number, struct kv_slot **ret_slot);
enum kv_chunk_state kv_slot_state(struct kv_version *version, uint32_t number);
bool kv_slot_is_resident(const struct kv_slot *slot);
const struct kv_extent *kv_slot_extents(const struct kv_slot *slot);
/* Replaces content of the union and the count. */
int kv_slot_set_extents(struct kv_slot *slot, const struct kv_extent *extents, unsigned count);
void kv_slot_clear_extents(struct kv_slot *slot);
/* Presence by the slot itself; not for BASE. */
void kv_slot_bits(const struct kv_slot *slot, struct kv_bits *ret_bits);
int kv_slot_set_bits(struct kv_slot *slot, const struct kv_bits *bits);
/* The devices that a COLD one names, a bit each. */
uint64_t kv_slot_devices(const struct kv_slot *slot);
/* The two halves of kv_slot_set_bits, for a slot that becomes DIRTY in between: what may fail, and
 * what cannot. The memory, NULL if none is needed, then is the slot's. */
int kv_slot_memory_for_bits(
	const struct kv_slot *slot, const struct kv_bits *bits, uint64_t **ret_memory);
void kv_slot_put_bits(struct kv_slot *slot, const struct kv_bits *bits, uint64_t *memory);
void kv_map_free(struct kv_version *version);
/* Presence of the blocks of a chunk through all bases. No locks held. */
int kv_chunk_bits(struct kv_version *version, uint32_t number, struct kv_bits *ret_bits);
/* With the devices that it has to be read from, a bit each. */
int kv_chunk_find(struct kv_version *version, uint32_t number, struct kv_bits *ret_bits,
	uint64_t *ret_devices);

void kv_bits_set(struct kv_bits *bits, unsigned first, unsigned end);
void kv_bits_clear(struct kv_bits *bits, unsigned first, unsigned end);
unsigned kv_bits_count(const struct kv_bits *bits);
/* Behind the last block that is present. */
unsigned kv_bits_end(const struct kv_bits *bits);
/* First block at or behind FROM that is present (or absent); KV_CHUNK_BLOCKS if none. */
unsigned kv_bits_next(const struct kv_bits *bits, unsigned from, bool present);
bool kv_bits_is_prefix(const struct kv_bits *bits);
/* The runs [FIRST, END) of blocks that are present. */
#define KV_BITS_FOREACH(first, end, bits)                                                          \
	for (unsigned first = kv_bits_next(bits, 0, true), end = kv_bits_next(bits, first, false); \
		first < KV_CHUNK_BLOCKS;                                                           \
		first = kv_bits_next(bits, end, true), end = kv_bits_next(bits, first, false))
struct kv_bits kv_bits_without(const struct kv_bits *bits, const struct kv_bits *others);

/* ---- pages.c: lock held unless said ---- */

/* The pages that the chunk is charged for. */
void kv_slot_pages(const struct kv_slot *slot, struct kv_bits *ret_pages);
/* True if every page that the chunk may have, the first USED ones, is there. */
bool kv_slot_has_all_pages(const struct kv_slot *slot, unsigned used);
/* The slot has no pages any more. Returns how many it had. */
unsigned kv_slot_forget_pages(struct kv_version *version, struct kv_slot *slot);
/* The slot has none so far: it gets those of BITS. */
void kv_slot_charge_pages(
	struct kv_version *version, struct kv_slot *slot, const struct kv_bits *bits);
/* A sparse slot whose present blocks are its first ones is none. */
void kv_slot_settle_pages(struct kv_slot *slot);
/* Gives back the pages of a sparse chunk's blocks GONE. */
int kv_chunk_free_pages(struct kv_version *version, uint32_t number, struct kv_slot *slot,
	const struct kv_bits *gone);
/*
 * What a chunk needs: pages for a write (kv_pages_for_span), or for BITS, all of its blocks.
 */
struct kv_pages {
	struct kv_bits add;
	struct kv_bits drop; /* a chunk that becomes sparse: pages that no block is on */
	bool sparse;
	bool pair; /* the next chunk's along with it, if it is free */
	unsigned patience_ms;
};
/* STREAM: the write goes on where the one before has ended. */
void kv_pages_for_span(struct kv_version *version, const struct kv_span *span, bool stream,
	struct kv_pages *ret_pages);
void kv_pages_for_bits(const struct kv_bits *bits, struct kv_pages *ret_pages);
/* Charges and allocates them. The slot is BUSY by the caller, which it stays; drops the lock
 * meanwhile. -EAGAIN if DRAM stays short. */
int kv_chunk_add_pages(struct kv_version *version, uint32_t number, const struct kv_pages *pages);
/* All pages of NUMBER and the next chunk, or none: both have none so far, and are BUSY by the
 * caller, which they stay. Drops the lock meanwhile. Does not wait for DRAM. */
int kv_chunk_add_pair(struct kv_version *version, uint32_t number);
/* No locks held: allocates what is charged already. On failure none of BITS is there. */
int kv_chunk_allocate(struct kv_version *version, uint32_t number, const struct kv_bits *bits);

/* ---- blocks.c: no locks held ---- */

/*
 * Blocks of a chunk and their content: MEMORY is where the chunk's first byte is, or would be; with
 * PACKED that of its first block, and the others follow without the holes.
 */
struct kv_blocks {
	uint32_t number;
	bool packed;
	struct kv_bits bits;
	uint8_t *memory;
};
/* Between there and OBJECT. Nothing is written behind SIZE. */
int kv_blocks_load(const struct kv_blocks *blocks, struct kv_object *object);
int kv_blocks_store(const struct kv_blocks *blocks, struct kv_object *object, uint64_t size);
/* Where EXTENT's content is, AT blocks having come before it. */
static inline uint8_t *kv_blocks_memory(
	const struct kv_blocks *blocks, const struct kv_extent *extent, unsigned at)
{
	return blocks->memory + ((size_t)(blocks->packed ? at : extent->block) << KV_BLOCK_SHIFT);
}
/* The sum of a chunk: over the content of its extents, one behind the other. -ENOMEM. */
int kv_blocks_sum(const struct kv_blocks *blocks, const struct kv_extent *extents, unsigned count,
	uint64_t *ret_sum);
/*
 * Transfers for EXTENTS, one for those that lie side by side in memory and on the device. ret_ios
 * has room for COUNT, and is filled from *TEMPLATE. Returns how many they are.
 */
unsigned kv_blocks_ios(const struct kv_blocks *blocks, const struct kv_extent *extents,
	unsigned count, const struct kv_io *template, struct kv_io *ret_ios);

/* ---- seek.c ---- */

/* First chunk in [FIRST, END) that has blocks, or END. No locks held. */
int kv_chunks_next(struct kv_version *version, uint32_t first, uint32_t end, uint32_t *ret_number);
/* Blocks present in the chunks [FIRST, END). No locks held. */
int kv_chunks_count(struct kv_version *version, uint32_t first, uint32_t end, uint64_t *ret_blocks);

/* ---- read.c ---- */

/* Reads a piece of one chunk, regardless of the size; zeros where there is nothing. */
int kv_version_read_span(struct kv_version *version, const struct kv_span *span, void *ret_memory);

/* ---- change.c ---- */

struct kv_writer; /* write_internal.h */
/* Lock held. Waits until nobody prepares, fills or writes back the chunk. *ret_slot is NULL where
 * the default holds. -EIO: a device does not answer. */
int kv_slot_when_free(struct kv_version *version, uint32_t number, struct kv_slot **ret_slot);
/* Makes [SPAN) read as zeros, whole blocks of it absent. The version is entered exclusively. */
int kv_writer_punch(struct kv_writer *writer, const struct kv_span *span);
/* Lock held. The blocks [FIRST, END) of a DIRTY chunk that is not being written back are absent
 * from now on. */
int kv_slot_clear_blocks(struct kv_version *version, uint32_t number, unsigned first, unsigned end);
/* Turns a chunk into a hole. The version is entered exclusively. */
int kv_chunk_drop(struct kv_writer *writer, uint32_t number);
/* Drops all chunks from FIRST on. */
int kv_chunks_drop_from(struct kv_writer *writer, uint32_t first);

/* ---- promise.c: blocks count from the start of the file ---- */

/* Promises the blocks [FIRST, END) as far as they have no space yet. -ENOSPC: nothing changed. No
 * locks held, the version is entered exclusively; so for the next. */
int kv_promise_allocate(struct kv_version *version, uint64_t first, uint64_t end);
/* They are not allocated any more. Those that are present stay so. */
int kv_promise_drop(struct kv_version *version, uint64_t first, uint64_t end);
/* All of them. Lock held; so for the others. */
void kv_promise_clear(struct kv_version *version);
/* How many of BITS, blocks of one chunk, are allocated. */
unsigned kv_promise_covers(struct kv_version *version, uint32_t chunk, const struct kv_bits *bits);
/* BITS become present: promises that were theirs are reserved by DIRTY blocks now. Returns how
 * many. */
unsigned kv_promise_take(struct kv_version *version, uint32_t chunk, const struct kv_bits *bits);
/* BITS, reserved until now, are absent again. */
void kv_promise_return(struct kv_version *version, uint32_t chunk, const struct kv_bits *bits);
/* The same for a slot's FRESH extents. */
void kv_promise_cancel(struct kv_version *version, uint32_t chunk, const struct kv_slot *slot);
/* What FROM has is VERSION's, whose content is the same. Both locked. */
void kv_promise_move(struct kv_version *version, struct kv_version *from);
/* COUNT blocks that the caller has promised are for absent ones of the ranges now. */
void kv_promise_keep(struct kv_version *version, uint64_t count);

/* ---- fill.c ---- */

int kv_fill_start(struct kv_core *core);
void kv_fill_stop(struct kv_core *core);
/*
 * Begins to bring the chunks [FIRST, FIRST + COUNT) into the object, as far as they are not there
 * or on their way. Waits for DRAM for PATIENCE_MS; -EAGAIN if it is short. AHEAD: behind all other
 * fills.
 */
struct kv_fill_range {
	uint32_t first;
	uint32_t count;
	unsigned patience_ms;
	bool ahead;
};
int kv_fill_begin(struct kv_version *version, const struct kv_fill_range *range);
/* Waits until chunk NUMBER is not on its way. -ETIMEDOUT: a device does not answer. */
int kv_fill_wait(struct kv_version *version, uint32_t number);
/* Lock held. True if who waits for the slot, which is busy, since SINCE_MS, does so no longer. */
bool kv_fill_gives_up(struct kv_version *version, const struct kv_slot *slot, int64_t since_ms);
/*
 * Reads and verifies one COLD chunk: KV_CHUNK_SIZE bytes, block-aligned, for the caller to free.
 * OURS: the slot is BUSY for the caller, and free when the read has ended, which may be later than
 * the call: -ETIMEDOUT, the device does not answer.
 */
int kv_fill_private(struct kv_version *version, uint32_t number, bool ours, void **ret_memory);
/* Reads and verifies what the device has of a chunk, although DRAM may have it, and keeps nothing.
 */
int kv_fill_stored(struct kv_version *version, uint32_t number);

/* ---- open.c ---- */

/* Few enough holes for the whole of it to be worth its DRAM. Lock held. */
bool kv_version_is_dense(const struct kv_version *version);
/* Charges and allocates the pages that chunk NUMBER of a version that is open lacks. */
int kv_chunk_allocate_rest(struct kv_version *version, uint32_t number);

/* ---- writeback.c, commit.c ---- */

int kv_writeback_start(struct kv_core *core);
void kv_writeback_stop(struct kv_core *core);
/* Takes a reference. */
void kv_writeback_push(struct kv_version *version);
void kv_writeback_kick(struct kv_core *core, bool spill);
/* Somebody waits for what is published by now: nothing of it is held back for company. */
void kv_writeback_hurry(struct kv_core *core);
void *kv_commit_main(void *core);
/* Loads the maps of all versions of FILE: the index is about to forget them. */
int kv_file_pin_maps(struct kv_file *file);
/* VERSION's bytes are on the devices: commit it. Takes over the reference. */
void kv_commit_push(struct kv_version *version);
/* VERSION could not be written. No locks held. */
void kv_version_fail(struct kv_version *version, int error);

/* ---- evict.c: DRAM ---- */

int kv_evict_start(struct kv_core *core);
void kv_evict_stop(struct kv_core *core);
uint64_t kv_evict_reclaim(void *core, uint64_t bytes);
void kv_evict_kick(struct kv_core *core);
/* Drops VERSION from DRAM if it is idle: committed, and nobody has it open. Returns the bytes. */
uint64_t kv_version_drop_object(struct kv_version *version);
/* Gives the object and its charge back. Lock held; the caller calls kv_object_free and the hook. */
struct kv_object *kv_version_detach_locked(
	struct kv_version *version, int *ret_backing, uint64_t *ret_bytes);

/* ---- reap.c, evict_store.c: the store ---- */

int kv_reap_start(struct kv_core *core);
void kv_reap_stop(struct kv_core *core);
void kv_reap_push(struct kv_core *core, uint64_t ino);
/* Reaps INO if nothing uses it. Returns the blocks that become free. */
uint64_t kv_reap_ino(struct kv_core *core, uint64_t ino);
int kv_store_evict_start(struct kv_core *core);
void kv_store_evict_stop(struct kv_core *core);
/* Waits until the reaper has nothing to do, or MS. */
void kv_reap_drain(struct kv_core *core, unsigned ms);
/* Wakes the store evictor if free space is low. */
void kv_store_evict_kick(struct kv_core *core);
/* Evicts files of SCOPE, oldest first, until ENOUGH says so. */
struct kv_eviction {
	uint32_t domain; /* or KV_DOMAIN_ANY */
	bool (*enough)(struct kv_core *core, const struct kv_eviction *eviction);
	uint64_t wanted; /* blocks, for ENOUGH */
	uint64_t blocks; /* of those evicted that are, or will be, free */
	unsigned evicted;
	unsigned leased; /* files that are kept only because of their leases */
};
void kv_evict_files(struct kv_core *core, struct kv_eviction *eviction);
/* Waits a little for what is under way: false if there was nothing. */
bool kv_evict_wait(struct kv_core *core);
/* How long a writer waits for room that may still come. */
int64_t kv_evict_patience_ms(const struct kv_core *core);

/* ---- quota.c ---- */

/* Promises VERSION to grow by GROWTH blocks: -EDQUOT. Evicts within its domain and waits. */
int kv_quota_promise(struct kv_version *version, uint64_t growth);
/* What was promised is in version->blocks now, or will not come. */
void kv_quota_grown(struct kv_version *version, uint64_t growth);
/* The index counts VERSION's blocks by now, or it is gone. */
void kv_quota_drop_locked(struct kv_version *version);
/* Evicts in every domain that holds more than its limit. */
void kv_quota_trim(struct kv_core *core);
/* Goes on with the walks that a crash left. */
void kv_quota_resume(struct kv_core *core);

/* ---- lease.c ---- */

int kv_lease_start(struct kv_core *core);
/* INO was published: it stays for a moment. */
void kv_lease_published(struct kv_core *core, uint64_t ino);

/* Takes every name from INO and tells the FUSE side. */
int kv_core_unname(
	struct kv_core *core, uint64_t ino, int64_t expected_last_use_ns, bool quarantine);

#endif
