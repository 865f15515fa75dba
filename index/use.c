/* SPDX-License-Identifier: Apache-2.0 */
/* The use order, and what works by it: noting uses, listing the oldest, evicting. */
#include <sys/stat.h>

#include "index/index_internal.h"

/* Before all real times: a quarantined inode is the first to be evicted. */
#define OLDEST_NS INT64_MIN

int kv_index_touch(
	struct kv_index *index, uint64_t ino, int64_t last_use_ns, uint32_t hits, int64_t atime_ns)
{
	struct kv_op op;
	struct kv_node node;
	int r = kv_op_begin(&op, index);

	if (r < 0)
		return r;
	r = kv_view_node(&op.view, ino, &node);
	if (r == 0) {
		uint32_t room = UINT32_MAX - node.inode.hits;

		node.inode.hits += (uint32_t)kv_min_u64(hits, room);
		if (!(node.inode.flags & KV_INODE_QUARANTINED))
			node.inode.last_use_ns = last_use_ns;
		if (atime_ns != INT64_MIN)
			node.inode.atime_ns = atime_ns;
		r = kv_op_put_node(&op, &node);
	}
	return kv_op_end(&op, r);
}

static ssize_t oldest(
	struct kv_view *view, struct kv_key start, struct kv_index_use *ret_uses, size_t capacity)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key;
	struct kv_value value;
	size_t count = 0;
	int r = kv_iter_init(&iter, view, &start, KV_KEY_TABLE_SIZE);

	while (r >= 0 && count < capacity && (r = kv_iter_next(&iter, &key, &value)) == 1) {
		ret_uses[count].last_use_ns = kv_ns_of_order(kv_key_a(&key));
		ret_uses[count++].ino = kv_key_b(&key);
	}
	return r < 0 ? r : (ssize_t)count;
}

ssize_t kv_index_oldest(struct kv_index *index, const struct kv_index_use *after,
	struct kv_index_use *ret_uses, size_t capacity)
{
	struct kv_key start = kv_key_pair(KV_TABLE_USE, 0, 0);
	struct kv_view view;
	ssize_t r;

	if (after)
		start = kv_key_pair(
			KV_TABLE_USE, kv_order_of_ns(after->last_use_ns), after->ino + 1);
	kv_view_begin(&view, index);
	r = oldest(&view, start, ret_uses, capacity);
	kv_view_end(&view);
	return r;
}

/* ---- Eviction ---- */

struct evict {
	struct kv_op *op;
	struct kv_node node;
	int64_t expected_last_use_ns;
	bool quarantine;
	int64_t now_ns;
	void (*name)(void *arg, uint64_t parent, const char *name, size_t length);
	void *arg;
};

/* Takes away one name, its link excepted, and tells its directory. */
static int evict_name(struct evict *evict, const struct kv_place *place)
{
	struct kv_op *op = evict->op;
	struct kv_entry entry;
	struct kv_node directory;
	int r = kv_view_entry_at(&op->view, place, &entry);

	if (r == 0)
		r = kv_view_directory(&op->view, place->parent, &directory);
	if (r == 0)
		r = kv_op_drop_entry(op, &entry);
	if (r < 0)
		return r;
	kv_node_changed(&directory, evict->now_ns);
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
			r = kv_op_drop(evict->op, &key, kv_node_is_held(&evict->node));
		if (r < 0)
			return r;
	}
	return r;
}

static int evict_inode(struct evict *evict, uint64_t ino)
{
	struct kv_node *node = &evict->node;
	bool had_names;
	int r = kv_view_node(&evict->op->view, ino, node);

	if (r < 0)
		return r;
	if (!S_ISREG(node->inode.mode))
		return S_ISDIR(node->inode.mode) ? -EISDIR : -EINVAL;
	if (node->inode.last_use_ns != evict->expected_last_use_ns)
		return -EAGAIN;
	had_names = node->inode.nlink > 0;
	r = evict_links(evict);
	if (r < 0)
		return r;
	node->inode.nlink = 0;
	node->inode.cookie = 0;
	if (had_names)
		node->inode.ctime_ns = evict->now_ns;
	if (evict->quarantine && !node->orphan && !kv_node_is_held(node)) {
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
	struct kv_node node;
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

int kv_index_evict(struct kv_index *index, uint64_t ino, int64_t expected_last_use_ns,
	bool quarantine, int64_t now_ns,
	void (*name)(void *arg, uint64_t parent, const char *name, size_t length), void *arg)
{
	struct kv_op op;
	struct evict evict = {
		.op = &op,
		.expected_last_use_ns = expected_last_use_ns,
		.quarantine = quarantine,
		.now_ns = now_ns,
		.name = name,
		.arg = arg,
	};
	int r = kv_op_begin(&op, index);

	if (r < 0)
		return r;
	r = evict_inode(&evict, ino);
	if (r == 0)
		evict_tell(&evict);
	return kv_op_end(&op, r);
}
