/* SPDX-License-Identifier: Apache-2.0 */
/* Hash tables of things that have a number: see table.h. */

#include "fs/table.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#define CAPACITY_MIN 16u
/* Each step along a chain is a miss of the processor's caches. */
#define BUCKETS_PER_ENTRY 2u

/* Buckets from USED on are not there yet: what belongs to them is in the one that will be split. */
static size_t bucket_of(const struct kv_table *table, uint64_t key)
{
	uint64_t hash = key * UINT64_C(0x9e3779b97f4a7c15);
	size_t bucket = (size_t)(hash ^ hash >> 32) & (table->capacity - 1);

	return bucket < table->used ? bucket : bucket & (table->capacity / 2 - 1);
}

struct kv_link *kv_table_find(const struct kv_table *table, uint64_t key)
{
	struct kv_link *link = table->buckets ? table->buckets[bucket_of(table, key)] : NULL;

	while (link && link->key != key)
		link = link->next;
	return link;
}

/* Room for one bucket more. */
static int grow(struct kv_table *table)
{
	size_t capacity = table->capacity > 0 ? table->capacity * 2 : CAPACITY_MIN;
	struct kv_link **buckets;

	if (table->used < table->capacity)
		return 0;
	buckets = realloc(table->buckets, capacity * sizeof(*buckets));
	if (!buckets)
		return -ENOMEM;
	table->buckets = buckets;
	table->capacity = capacity;
	if (table->used > 0)
		return 0;
	for (; table->used < CAPACITY_MIN / 2 + 1; table->used++)
		buckets[table->used] = NULL;
	return 0;
}

static void put(struct kv_table *table, struct kv_link *link)
{
	struct kv_link **bucket = &table->buckets[bucket_of(table, link->key)];

	link->next = *bucket;
	*bucket = link;
}

/* One bucket more, which takes its part of the one that has held its entries so far. */
static void split(struct kv_table *table)
{
	struct kv_link **from = &table->buckets[table->used & (table->capacity / 2 - 1)];
	struct kv_link *link = *from, *next;

	*from = NULL;
	table->buckets[table->used++] = NULL;
	for (; link; link = next) {
		next = link->next;
		put(table, link);
	}
}

int kv_table_add(struct kv_table *table, struct kv_link *link, uint64_t key)
{
	int r = table->buckets ? 0 : grow(table);

	if (r < 0)
		return r;
	/* Without memory chains get longer, and that is all. */
	while (table->used < table->count * BUCKETS_PER_ENTRY && grow(table) == 0)
		split(table);
	link->key = key;
	put(table, link);
	table->count++;
	return 0;
}

void kv_table_remove(struct kv_table *table, struct kv_link *link)
{
	struct kv_link **at = &table->buckets[bucket_of(table, link->key)];

	while (*at != link)
		at = &(*at)->next;
	*at = link->next;
	table->count--;
}

void kv_table_done(struct kv_table *table)
{
	assert(table->count == 0);
	free(table->buckets);
	*table = (struct kv_table){0};
}
