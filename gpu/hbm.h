/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which files are in device memory: a budget, entries, who has them mapped, what goes.
 *
 * An entry is one version of one file, or a stretch of one, for one user (the trust domain: whoever
 * holds a segment's descriptor may write to it on a GPU, so users never share one). Who wants part
 * of what is there gets it from there; stretches that only overlap are entries of their own, which
 * share the segments that they have in common (block.h): each is loaded once, and counts once.
 *
 *	            admit                 staged
 *	  (absent) -------> STAGING --------------> RESIDENT <--> mapped (n)
 *	                       | failed                 |
 *	                       v                        | evict, when nobody has it mapped
 *	                     FAILED                     v
 *	                (retry after 100 ms x 2^k)   (absent)
 *
 * A STALE entry is found by no one any more (its file has changed, or it is being given up); it
 * goes with its last mapping. When room is short and nothing is idle, mappings of clients that
 * agreed are revoked; one that is not given back by the deadline leaves an ORPHAN: our reference
 * is dropped, but the bytes count, against whoever still has them, until that process has ended. A
 * segment that was ever exported is never used for another file, and none is exported before what
 * it held of others is gone: it is filled with zeros first, since it is shared while it is still
 * staged.
 *
 * Threads: one. It calls nobody back but the hooks. Times are milliseconds of a monotonic clock.
 * Errors: negative errno.
 */
#ifndef KVFS_GPU_HBM_H
#define KVFS_GPU_HBM_H

#include <bsd/sys/queue.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "fs/tree.h"
#include "gpu/backend.h"
#include "gpu/block.h"
#include "gpu/ghost.h"

#define KVG_REVOKE_MS 2000
#define KVG_REFILL_MS 1000
#define KVG_RETRY_FIRST_MS 100
#define KVG_RETRY_LAST_MS 10000

struct kvg_hbm;
struct kvg_map;
struct kvg_user;

/* A stretch of a version of a file, for a user. */
struct kvg_key {
	uint64_t ino;
	uint64_t version;
	uid_t uid;
	uint64_t first; /* offset in the file; so end, which is behind the last byte */
	uint64_t end;
};

enum kvg_state {
	KVG_STAGING,
	KVG_RESIDENT,
	KVG_FAILED,
};

struct kvg_part {
	struct kvg_block *block;
	bool own; /* this entry stages it; else it is there already, or another entry does */
};

/* Which list of those that may have to go an entry is in. */
enum kvg_list {
	KVG_LIST_NONE,   /* of none: being staged, or kept by who has it mapped */
	KVG_LIST_IDLE,   /* nobody has it mapped */
	KVG_LIST_LOOSE,  /* all who have it mapped would give it back */
	KVG_LIST_FAILED, /* what is left of a failure */
	_KVG_LIST_MAX,
};

struct kvg_entry {
	RB_ENTRY(kvg_entry) by_key;
	TAILQ_ENTRY(kvg_entry) by_use; /* in LIST, least recently used first; so the next */
	TAILQ_ENTRY(kvg_entry) by_use_of_user;
	LIST_ENTRY(kvg_entry) stale_entry;
	LIST_ENTRY(kvg_entry) revoked_entry;
	struct kvg_hbm *hbm;
	struct kvg_user *user;
	enum kvg_list list;
	struct kvg_key key;
	enum kvg_state state;
	bool stale;
	bool orphan;
	int error;           /* FAILED */
	unsigned failures;   /* in a row */
	int64_t retry_ms;    /* FAILED: not before */
	int64_t deadline_ms; /* of a revocation under way; 0: none */
	unsigned held;       /* kvg_hbm_hold */
	int64_t expires_ms;  /* given up then if nobody has mapped it; 0: never */
	LIST_ENTRY(kvg_entry) expiring_entry;
	uint64_t size;  /* of the stretch, bytes */
	uint64_t bytes; /* of its segments, also of those that others have too */
	unsigned count;
	struct kvg_part *parts;
	LIST_HEAD(, kvg_map) maps;
	unsigned map_count;
	unsigned fixed; /* of them, those that cannot be asked back */
	void *owner;    /* the server's: its staging, its watermark */
};

/* A process that has mappings. Its memory is the caller's. */
struct kvg_holder {
	unsigned maps;
	uint64_t overdue; /* bytes of orphans that it has */
};

struct kvg_map {
	LIST_ENTRY(kvg_map) of_entry;
	struct kvg_entry *entry;
	struct kvg_holder *holder;
	bool revocable;
	void *owner; /* the server's */
};

struct kvg_hbm_options {
	struct kvg_backend *backend; /* outlives it */
	uint64_t budget;             /* bytes; as many entries as it has granules can be there */
	uint64_t share;              /* bytes of it that one user's entries may take */
	uint64_t segment;            /* bytes: size of all but the last one of a file */
	uint64_t granularity;
	uint64_t margin; /* bytes of the device's memory that are left to others; 0: all is ours */
	bool zeroed;     /* new segments hold zeros */
	void *arg;
	/* Asks for MAP back by DEADLINE_MS. */
	void (*revoke)(void *arg, struct kvg_map *map, int64_t deadline_ms);
	/* ENTRY is being staged, and nobody has wanted it in time: it may be made to end, at once.
	 */
	void (*expired)(void *arg, struct kvg_entry *entry);
	/* ENTRY, whose content nobody may use for new maps, is about to be freed. */
	void (*gone)(void *arg, struct kvg_entry *entry);
};

struct kvg_hbm_usage {
	uint64_t budget;
	uint64_t used;
	uint64_t orphaned;
	uint64_t entries;
	uint64_t resident;
	uint64_t maps;
	uint64_t evicted;
	uint64_t missing; /* bytes of the budget that others have taken from the device */
	uint64_t reserve; /* bytes of segments kept so that nobody else takes them */
	uint64_t held;    /* bytes of failed stagings that a drive may still write to */
};

/* Takes the whole budget from the device at once. -ENOMEM: so much is not there. */
int kvg_hbm_new(const struct kvg_hbm_options *options, struct kvg_hbm **ret_hbm);
/* No map may be left. NULL is allowed. Returns NULL. */
struct kvg_hbm *kvg_hbm_free(struct kvg_hbm *hbm);
void kvg_hbm_usage(const struct kvg_hbm *hbm, struct kvg_hbm_usage *ret_usage);
/* The one that matters often: missing. */
uint64_t kvg_hbm_missing(const struct kvg_hbm *hbm);

/*
 * The entry that has all of KEY's stretch, or will, as the most recently used one now. Else the
 * FAILED one of just this stretch, or NULL.
 */
struct kvg_entry *kvg_hbm_find(struct kvg_hbm *hbm, const struct kvg_key *key);

/* Whether all of KEY's stretch is there, or on its way, in whatever entries. */
bool kvg_hbm_has(struct kvg_hbm *hbm, const struct kvg_key *key);

/*
 * Whether a hint of KEY is worth staging: the second one within KVG_GHOST_MS. (A map is always.)
 */
bool kvg_hbm_hint(struct kvg_hbm *hbm, const struct kvg_key *key, int64_t now_ms);

/*
 * A STAGING entry with segments for SIZE bytes, those of KEY's stretch: those that no other entry
 * has are its own, and mapped for writing. KEY's stretch begins with a whole segment. A FAILED
 * entry of KEY is replaced. What was not used for longest, and nobody has mapped, is evicted for
 * it. -ERANGE: smaller than a granule, which is not worth a segment; -E2BIG: more than the budget,
 * or the user's share; -ENOSPC: nothing can be evicted now; -ENOBUFS: nothing of this user's; the
 * error of the last attempt before its time.
 */
int kvg_hbm_admit(struct kvg_hbm *hbm, const struct kvg_key *key, uint64_t size, int64_t now_ms,
	struct kvg_entry **ret_entry);
/*
 * ENTRY's own segments are there, and not written to any more. 0: so are the others:
 * kvg_hbm_staged; -EAGAIN: another entry still stages some: ask again when that has ended; -EIO: it
 * has failed.
 */
int kvg_hbm_filled(struct kvg_entry *entry);
/* It is all there. */
void kvg_hbm_staged(struct kvg_entry *entry);
/* ENTRY may be gone afterwards, if it is stale and nobody has it mapped. */
void kvg_hbm_failed(struct kvg_entry *entry, int error, int64_t now_ms);

/* Something may still use ENTRY's memory: however it ends, it is not freed before kvg_hbm_release.
 */
void kvg_hbm_hold(struct kvg_entry *entry);
/* ENTRY may be gone afterwards. */
void kvg_hbm_release(struct kvg_entry *entry);

/*
 * Somebody wants ENTRY, which nobody has mapped yet, until then only; 0: for good. What is wanted
 * for longer stays so.
 */
void kvg_hbm_expire(struct kvg_entry *entry, int64_t expires_ms);

/* From now on ENTRY does not expire. Descriptors are exported by kvg_hbm_export only. -EDQUOT:
 * HOLDER has orphans. */
int kvg_hbm_map(struct kvg_entry *entry, struct kvg_holder *holder, bool revocable,
	struct kvg_map **ret_map);
/* ENTRY may be gone afterwards. */
void kvg_hbm_unmap(struct kvg_map *map);
/* A descriptor of segment NUMBER. -ESTALE: it was not given back in time, and given up. */
int kvg_hbm_export(struct kvg_entry *entry, unsigned number, int *ret_fd);

/* ENTRY is found no more; it goes at once if nobody uses it, else with its last use. */
void kvg_hbm_stale(struct kvg_entry *entry);
/* Calls EACH for all entries of INO that are not stale. EACH may make them so. */
void kvg_hbm_of_ino(struct kvg_hbm *hbm, uint64_t ino,
	void (*each)(void *arg, struct kvg_entry *entry), void *arg);
/* Calls EACH for the blocks of all that are not stale. EACH changes none of them. */
void kvg_hbm_blocks(
	struct kvg_hbm *hbm, void (*each)(void *arg, struct kvg_block *block), void *arg);
/* Calls EACH for all that are not stale. */
void kvg_hbm_all(struct kvg_hbm *hbm, void (*each)(void *arg, struct kvg_entry *entry), void *arg);

/*
 * Revocations whose time is over leave orphans, what was wanted for a time only goes, and what is
 * missing of the budget is asked for again now and then. Returns the time of the next revocation,
 * 0: there is none.
 */
int64_t kvg_hbm_tick(struct kvg_hbm *hbm, int64_t now_ms);

#endif
