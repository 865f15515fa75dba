/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of records in memory: a red-black tree by key. */
#include "index/overlay.h"

static inline int record_compare(const struct kv_record *a, const struct kv_record *b)
{
	return kv_key_compare(&a->key, &b->key);
}

/* Not RB_GENERATE_STATIC: it needs a definition of __unused, which glibc does not have. */
RB_GENERATE_INTERNAL(
	kv_record_tree, kv_record, entry, record_compare, static __attribute__((unused)))

struct kv_record *kv_record_new(enum kv_record_kind kind, const struct kv_key *key, size_t size)
{
	struct kv_record *record;

	assert(size <= UINT32_MAX);
	record = malloc(sizeof(*record) + size);
	if (!record)
		return NULL;
	record->kind = (uint8_t)kind;
	record->size = (uint32_t)size;
	record->key = *key;
	return record;
}

void kv_overlay_init(struct kv_overlay *overlay)
{
	RB_INIT(&overlay->tree);
	overlay->count = 0;
	overlay->weight = 0;
}

/* Frees a subtree without recursion or rebalancing: leaves first, climbing by the parent links. */
void kv_overlay_done(struct kv_overlay *overlay)
{
	struct kv_record *at = RB_ROOT(&overlay->tree);

	while (at) {
		struct kv_record *parent;

		if (RB_LEFT(at, entry)) {
			at = RB_LEFT(at, entry);
			continue;
		}
		if (RB_RIGHT(at, entry)) {
			at = RB_RIGHT(at, entry);
			continue;
		}
		parent = RB_PARENT(at, entry);
		if (parent && RB_LEFT(parent, entry) == at)
			RB_LEFT(parent, entry) = NULL;
		else if (parent)
			RB_RIGHT(parent, entry) = NULL;
		free(at);
		at = parent;
	}
	kv_overlay_init(overlay);
}

/* The tree functions take pointers to what they do not change. */
static struct kv_record_tree *tree_of(const struct kv_overlay *overlay)
{
	return (struct kv_record_tree *)&overlay->tree;
}

struct kv_record *kv_overlay_find(const struct kv_overlay *overlay, const struct kv_key *key)
{
	struct kv_record probe;

	if (overlay->count == 0)
		return NULL;
	probe.key = *key;
	return RB_FIND(kv_record_tree, tree_of(overlay), &probe);
}

struct kv_record *kv_overlay_first(const struct kv_overlay *overlay)
{
	return RB_MIN(kv_record_tree, tree_of(overlay));
}

struct kv_record *kv_overlay_seek(const struct kv_overlay *overlay, const struct kv_key *key)
{
	struct kv_record probe;

	if (overlay->count == 0)
		return NULL;
	probe.key = *key;
	return RB_NFIND(kv_record_tree, tree_of(overlay), &probe);
}

struct kv_record *kv_overlay_next(const struct kv_record *record)
{
	return RB_NEXT(kv_record_tree, NULL, (struct kv_record *)record);
}

/* Takes RECORD out of the tree; it is then the caller's. */
static struct kv_record *overlay_take(struct kv_overlay *overlay, struct kv_record *record)
{
	(void)RB_REMOVE(kv_record_tree, &overlay->tree, record);
	overlay->count--;
	overlay->weight -= kv_record_weight(record);
	return record;
}

void kv_overlay_put(struct kv_overlay *overlay, struct kv_record *record)
{
	struct kv_record *old = RB_INSERT(kv_record_tree, &overlay->tree, record);

	if (old) {
		free(overlay_take(overlay, old));
		old = RB_INSERT(kv_record_tree, &overlay->tree, record);
		assert(!old);
	}
	overlay->count++;
	overlay->weight += kv_record_weight(record);
}

void kv_overlay_drop(struct kv_overlay *overlay, const struct kv_key *key)
{
	struct kv_record *record = kv_overlay_find(overlay, key);

	if (record)
		free(overlay_take(overlay, record));
}

struct kv_record *kv_overlay_take_first(struct kv_overlay *overlay)
{
	struct kv_record *record = kv_overlay_first(overlay);

	return record ? overlay_take(overlay, record) : NULL;
}

void kv_overlay_move(struct kv_overlay *to, struct kv_overlay *from)
{
	assert(to->count == 0);
	*to = *from;
	kv_overlay_init(from);
}
