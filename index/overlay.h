/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One layer of the live view in memory: records of the index, newer than those in LMDB, by key.
 *
 * A layer owns its records. Not thread-safe: the index lock guards the layers. Pointers to records
 * are valid until the record is replaced or taken out. Only kv_record_new can fail.
 */
#ifndef KVFS_INDEX_OVERLAY_H
#define KVFS_INDEX_OVERLAY_H

#include <bsd/sys/tree.h>

#include "index/format.h"

enum kv_record_kind {
	KV_RECORD_VALUE,     /* goes to LMDB */
	KV_RECORD_TOMBSTONE, /* removes the key from LMDB */
	KV_RECORD_HELD,      /* stays in memory until its file is published */
	KV_RECORD_UNHOLD,    /* of an operation: removes a held record */
};

struct kv_record {
	RB_ENTRY(kv_record) entry;
	uint32_t size;
	uint8_t kind; /* enum kv_record_kind */
	struct kv_key key;
	uint8_t value[];
};

RB_HEAD(kv_record_tree, kv_record);

struct kv_overlay {
	struct kv_record_tree tree;
	size_t count;
	size_t weight; /* sum of kv_record_weight */
};

/* A measure of memory: large values count as several records. */
static inline size_t kv_record_weight(const struct kv_record *record)
{
	return 1 + record->size / 512;
}

/* A record that belongs to the caller, its value uninitialised. NULL if memory is short. */
struct kv_record *kv_record_new(enum kv_record_kind kind, const struct kv_key *key, size_t size);

void kv_overlay_init(struct kv_overlay *overlay);
/* Frees the records; the layer is empty then, and usable. */
void kv_overlay_done(struct kv_overlay *overlay);

/* NULL if there is none. */
struct kv_record *kv_overlay_find(const struct kv_overlay *overlay, const struct kv_key *key);
/* The first record of all, the first at or behind KEY, and the one behind RECORD, or NULL. */
struct kv_record *kv_overlay_first(const struct kv_overlay *overlay);
struct kv_record *kv_overlay_seek(const struct kv_overlay *overlay, const struct kv_key *key);
struct kv_record *kv_overlay_next(const struct kv_record *record);

/* Takes over RECORD; one with the same key is freed. */
void kv_overlay_put(struct kv_overlay *overlay, struct kv_record *record);
/* Frees the record of KEY, if there is one. */
void kv_overlay_drop(struct kv_overlay *overlay, const struct kv_key *key);
/* Hands the first record to the caller, or NULL. */
struct kv_record *kv_overlay_take_first(struct kv_overlay *overlay);
/* Moves everything to the layer TO, which must be empty. */
void kv_overlay_move(struct kv_overlay *to, struct kv_overlay *from);

#endif
