/* SPDX-License-Identifier: Apache-2.0 */
/* The use order, and what works by it: noting uses, listing the oldest, evicting. */
#include <sys/stat.h>

#include "index/index_internal.h"

/* Before all real times: a quarantined inode is the first to be evicted. */
#define OLDEST_NS INT64_MIN

static_assert((INT64_MIN & ((1 << KV_USE_SHIFT) - 1)) == 0, "a time that is kept as it is");

int kv_index_touch(
	struct kv_index *index, uint64_t ino, int64_t last_use_ns, uint32_t hits, int64_t atime_ns)
{
	struct kv_op op;
	struct kv_index_node node;
	int r = kv_op_begin(&op, index);

	if (r < 0)
		return r;
	r = kv_view_node(&op.view, ino, &node);
	if (r == 0) {
		uint32_t room = UINT32_MAX - node.inode.hits;

		node.inode.hits += (uint32_t)kv_min_u64(hits, room);
		if (!(node.inode.flags & KV_INODE_QUARANTINED))
			node.inode.last_use_ns = kv_use_round(last_use_ns);
		if (hits > 0)
			node.inode.flags |= KV_INODE_READ;
		if (atime_ns != INT64_MIN)
			node.inode.atime_ns = atime_ns;
		r = kv_op_put_node(&op, &node);
	}
	return kv_op_end(&op, r);
}

/* ---- The oldest ---- */

/* One list of the use order, and the next in it. */
struct list {
	uint32_t domain;
	unsigned use_class;
	uint64_t order;
	uint64_t ino;
};

struct merge {
	struct kv_view *view;
	const struct kv_index_scope *scope;
	struct list *lists;
	size_t count;
};

/* The first of LIST at or behind its place: 1, or 0 at its end. */
static int list_seek(const struct merge *merge, struct list *list)
{
	const int64_t before_ns = merge->scope->before_ns;
	uint64_t end = kv_use_order(list->domain, list->use_class + 1, INT64_MIN);
	struct kv_key key = kv_key_pair(KV_TABLE_USE, list->order, list->ino);
	struct kv_value value;
	int r = kv_view_seek(merge->view, KV_KEY_TABLE_SIZE, &key, &value);

	if (r != 1)
		return r;
	list->order = kv_key_a(&key);
	list->ino = kv_key_b(&key);
	return list->order < end && (before_ns == 0 || kv_use_ns(list->order) < before_ns);
}

static int merge_add(
	struct merge *merge, uint32_t domain, unsigned use_class, const struct kv_index_use *after)
{
	int64_t ns = after ? after->last_use_ns : INT64_MIN;
	struct list list = {
		.domain = domain,
		.use_class = use_class,
		.order = kv_use_order(domain, use_class, ns),
		.ino = after ? after->ino + 1 : 1, /* behind the padding */
	};
	int r = list_seek(merge, &list);

	if (r == 1)
		merge->lists[merge->count++] = list;
	return r < 0 ? r : 0;
}

static int merge_init(struct merge *merge, const struct kv_index_use *after)
{
	const struct kv_domain *domains = merge->view->index->domains;
	uint32_t first = merge->scope->domain;
	uint32_t end = first + 1;
	int r = 0;

	if (first == KV_DOMAIN_ANY) {
		first = 0;
		end = kv_index_domain_count(merge->view->index);
	}
	merge->lists = calloc(end - first, _KV_USE_CLASS_MAX * sizeof(*merge->lists));
	if (!merge->lists)
		return -ENOMEM;
	for (uint32_t i = first; i < end && r == 0; i++) {
		if (atomic_load_explicit(&domains[i].state, memory_order_relaxed) ==
				KV_DOMAIN_NONE ||
			atomic_load_explicit(&domains[i].inodes, memory_order_relaxed) == 0)
			continue;
		r = merge_add(merge, i, KV_USE_UNREAD, after);
		if (r == 0 && !merge->scope->unread)
			r = merge_add(merge, i, KV_USE_READ, after);
	}
	return r;
}

/* By time, then by number: the order does not depend on the lists. */
static struct list *merge_least(const struct merge *merge)
{
	struct list *least = NULL;

	for (size_t i = 0; i < merge->count; i++) {
		struct list *list = &merge->lists[i];
		int64_t ns = kv_use_ns(list->order);

		if (!least || ns < kv_use_ns(least->order) ||
			(ns == kv_use_ns(least->order) && list->ino < least->ino))
			least = list;
	}
	return least;
}

static ssize_t merge_take(struct merge *merge, struct kv_index_use *ret_uses, size_t capacity)
{
	size_t count = 0;

	while (count < capacity && merge->count > 0) {
		struct list *list = merge_least(merge);
		int r;

		ret_uses[count++] = (struct kv_index_use){
			.last_use_ns = kv_use_ns(list->order),
			.ino = list->ino,
			.domain = list->domain,
			.unread = list->use_class == KV_USE_UNREAD,
		};
		list->ino++;
		r = list_seek(merge, list);
		if (r < 0)
			return r;
		if (r == 0)
			*list = merge->lists[--merge->count];
	}
	return (ssize_t)count;
}

ssize_t kv_index_oldest(struct kv_index *index, const struct kv_index_scope *scope,
	const struct kv_index_use *after, struct kv_index_use *ret_uses, size_t capacity)
{
	static const struct kv_index_scope all = {.domain = KV_DOMAIN_ANY};
	struct merge merge = {.scope = scope ? scope : &all};
	struct kv_view view;
	ssize_t r;

	assert(merge.scope->domain == KV_DOMAIN_ANY || merge.scope->domain < KV_DOMAINS_MAX);
	kv_view_begin(&view, index);
	merge.view = &view;
	r = merge_init(&merge, after);
	if (r == 0)
		r = merge_take(&merge, ret_uses, capacity);
	kv_view_end(&view);
	free(merge.lists);
	return r;
}

/* ---- Eviction ---- */

struct evict {
	struct kv_op *op;
	struct kv_index_node node;
	int64_t expected_last_use_ns;
	bool quarantine;
	int64_t now_ns;
	bool spares; /* what is pinned, and what KEEP names */
	bool (*keep)(void *arg, uint64_t ino);
	void (*name)(void *arg, uint64_t parent, const char *name, size_t length);
	void *arg;
};

/* Takes away one name, its link excepted, and tells its directory. */
static int evict_name(struct evict *evict, const struct kv_place *place)
{
	struct kv_op *op = evict->op;
	struct kv_entry entry;
	struct kv_index_node directory;
	int r = kv_view_entry_at(&op->view, place, &entry);

	/* Which may be a retired one that is still being worked off. */
	if (r == 0)
		r = kv_view_node(&op->view, place->parent, &directory);
	if (r == 0)
		r = kv_op_drop_entry(op, &entry);
	if (r < 0)
		return r;
	kv_index_node_changed(&directory, evict->now_ns);
	return kv_op_put_node(op, &directory);
}

static int evict_links(struct evict *evict)
{
	struct kv_link_walk walk = {0};
	struct kv_place place;
	int r;

	while ((r = kv_view_next_link(&evict->op->view, &evict->node, &walk, &place)) == 1) {
		struct kv_key key =
			kv_key_pair(KV_TABLE_LINK, evict->node.inode.ino, walk.next - 1);

		r = evict_name(evict, &place);
		if (r == 0 && walk.next > 0)
			r = kv_op_drop(evict->op, &key, kv_index_node_is_held(&evict->node));
		if (r < 0)
			return r;
	}
	return r;
}

static int evict_inode(struct evict *evict, uint64_t ino)
{
	struct kv_index_node *node = &evict->node;
	bool had_names;
	int r = kv_view_node(&evict->op->view, ino, node);

	if (r < 0)
		return r;
	if (!S_ISREG(node->inode.mode))
		return S_ISDIR(node->inode.mode) ? -EISDIR : -EINVAL;
	if (node->inode.last_use_ns != evict->expected_last_use_ns)
		return -EAGAIN;
	if (evict->spares && (node->inode.flags & KV_INODE_PINNED ||
				     (evict->keep && evict->keep(evict->arg, ino))))
		return -EBUSY;
	had_names = node->inode.nlink > 0;
	r = evict_links(evict);
	if (r < 0)
		return r;
	node->inode.nlink = 0;
	node->inode.cookie = 0;
	node->inode.flags &= ~KV_INODE_PINNED;
	if (had_names)
		node->inode.ctime_ns = evict->now_ns;
	if (evict->quarantine && !node->orphan && !kv_index_node_is_held(node)) {
		node->inode.flags |= KV_INODE_QUARANTINED;
		node->inode.last_use_ns = OLDEST_NS;
	} else if (!node->orphan) {
		r = kv_op_make_orphan(evict->op, node);
	}
	return r < 0 ? r : kv_op_put_node(evict->op, node);
}

/* Nothing can fail any more: the names as they were below the operation. */
static void evict_tell(struct evict *evict)
{
	struct kv_view view;
	struct kv_index_node node;
	struct kv_link_walk walk = {0};
	struct kv_place place;
	struct kv_entry entry;

	if (!evict->name)
		return;
	kv_view_init(&view, evict->op->index, NULL);
	if (kv_view_node(&view, evict->node.inode.ino, &node) == 0)
		while (kv_view_next_link(&view, &node, &walk, &place) == 1)
			if (kv_view_entry_at(&view, &place, &entry) == 0)
				evict->name(evict->arg, place.parent, entry.record.name,
					entry.record.length);
	kv_view_done(&view);
}

static int evict_run(struct kv_index *index, uint64_t ino, struct evict *evict)
{
	struct kv_op op;
	int r = kv_op_begin(&op, index);

	if (r < 0)
		return r;
	evict->op = &op;
	r = evict_inode(evict, ino);
	if (r == 0)
		evict_tell(evict);
	return kv_op_end(&op, r);
}

int kv_index_evict(struct kv_index *index, uint64_t ino, int64_t expected_last_use_ns,
	bool quarantine, int64_t now_ns,
	void (*name)(void *arg, uint64_t parent, const char *name, size_t length), void *arg)
{
	struct evict evict = {
		.expected_last_use_ns = expected_last_use_ns,
		.quarantine = quarantine,
		.now_ns = now_ns,
		.name = name,
		.arg = arg,
	};

	return evict_run(index, ino, &evict);
}

int kv_index_evict_unless(struct kv_index *index, const struct kv_index_use *use, int64_t now_ns,
	bool (*keep)(void *arg, uint64_t ino),
	void (*name)(void *arg, uint64_t parent, const char *name, size_t length), void *arg)
{
	struct evict evict = {
		.expected_last_use_ns = use->last_use_ns,
		.now_ns = now_ns,
		.spares = true,
		.keep = keep,
		.name = name,
		.arg = arg,
	};

	return evict_run(index, use->ino, &evict);
}
