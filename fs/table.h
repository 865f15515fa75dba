/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hash tables of things that have a number.
 *
 * A look-up costs the same whatever the table holds: it grows by a bucket or two with each entry
 * (linear hashing), so that no insertion stops for the others. It does not get smaller again; an
 * empty bucket is a pointer.
 *
 * Ownership: entries are the caller's, who embeds the link. Threads: the caller's lock.
 */
#ifndef KVFS_FS_TABLE_H
#define KVFS_FS_TABLE_H

#include <stddef.h>
#include <stdint.h>

struct kv_link {
	struct kv_link *next;
	uint64_t key;
};

struct kv_table {
	struct kv_link **buckets; /* NULL as long as nothing was added */
	size_t used;              /* buckets in use */
	size_t capacity;          /* a power of two; used >= capacity / 2 */
	size_t count;             /* entries */
};

/* The entry of KEY, or NULL. */
struct kv_link *kv_table_find(const struct kv_table *table, uint64_t key);

/* Adds LINK under KEY, which is not there yet. -ENOMEM only for the first entry of a table. */
int kv_table_add(struct kv_table *table, struct kv_link *link, uint64_t key);

/* LINK is in TABLE. */
void kv_table_remove(struct kv_table *table, struct kv_link *link);

/* Frees the buckets of an empty table, which can be used again. */
void kv_table_done(struct kv_table *table);

#endif
