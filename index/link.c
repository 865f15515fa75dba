/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The links of an inode: the first one is in the inode's record, further ones are LINK records,
 * found by a hash of the place they name. A directory has one link, of which nlink does not tell.
 */
#include <sys/stat.h>

#include "index/index_internal.h"

static bool place_equal(const struct kv_place *a, const struct kv_place *b)
{
	return a->parent == b->parent && a->cookie == b->cookie;
}

static bool node_first_is(const struct kv_index_node *node, const struct kv_place *place)
{
	return node->inode.cookie != 0 && node->inode.parent == place->parent &&
	       node->inode.cookie == place->cookie;
}

static struct kv_key link_base(const struct kv_index *index, const struct kv_index_node *node,
	const struct kv_place *place)
{
	uint8_t data[KV_LINK_RECORD_SIZE];

	kv_link_encode(place, data);
	return kv_key_pair(
		KV_TABLE_LINK, node->inode.ino, kv_index_hash(index, data, sizeof(data)));
}

/* The key of the LINK record of PLACE, or, with PLACE NULL, of a free slot of BASE. */
static int link_find(struct kv_view *view, const struct kv_key *base, const struct kv_place *place,
	struct kv_key *ret_key)
{
	for (uint64_t slot = 0; slot < KV_HASH_SLOTS; slot++) {
		struct kv_key key =
			kv_key_pair(KV_TABLE_LINK, kv_key_a(base), kv_key_b(base) + slot);
		struct kv_value value;
		struct kv_place found;
		int r = kv_view_get(view, &key, &value);

		if (r < 0 && r != -ENOENT)
			return r;
		if (r == 0 && kv_link_decode(value.data, value.size, &found) < 0)
			return kv_index_damaged(view->index, &key, "link");
		if (place ? r == 0 && place_equal(&found, place) : r == -ENOENT) {
			*ret_key = key;
			return 0;
		}
	}
	return place ? -ENOENT : -ENOSPC;
}

int kv_view_next_link(struct kv_view *view, const struct kv_index_node *node,
	struct kv_link_walk *walk, struct kv_place *ret_place)
{
	struct kv_key key = kv_key_pair(KV_TABLE_LINK, node->inode.ino, walk->next);
	struct kv_value value;
	int r;

	if (!walk->first_done && node->inode.cookie != 0) {
		walk->first_done = true;
		*ret_place = (struct kv_place){node->inode.parent, node->inode.cookie};
		return 1;
	}
	walk->first_done = true;
	r = kv_view_seek(view, KV_KEY_SINGLE_SIZE, &key, &value);
	if (r != 1)
		return r;
	if (kv_link_decode(value.data, value.size, ret_place) < 0)
		return kv_index_damaged(view->index, &key, "link");
	walk->next = kv_key_b(&key) + 1;
	return 1;
}

int kv_view_has_link(
	struct kv_view *view, const struct kv_index_node *node, const struct kv_place *place)
{
	struct kv_key base = link_base(view->index, node, place);
	struct kv_key key;

	return node_first_is(node, place) ? 0 : link_find(view, &base, place, &key);
}

static int op_put_link(
	struct kv_op *op, const struct kv_index_node *node, const struct kv_place *place)
{
	struct kv_key base = link_base(op->index, node, place);
	struct kv_key key;
	uint8_t *data;
	int r = link_find(&op->view, &base, NULL, &key);

	if (r < 0)
		return r;
	data = kv_op_put(op, &key, KV_LINK_RECORD_SIZE, kv_index_node_is_held(node));
	if (!data)
		return -ENOMEM;
	kv_link_encode(place, data);
	return 0;
}

/* -EUCLEAN: a name without its link. */
static int op_drop_link(
	struct kv_op *op, const struct kv_index_node *node, const struct kv_place *place)
{
	struct kv_key base = link_base(op->index, node, place);
	struct kv_key key;
	int r = link_find(&op->view, &base, place, &key);

	if (r == -ENOENT)
		return kv_index_damaged(op->index, &base, "missing link");
	return r < 0 ? r : kv_op_drop(op, &key, kv_index_node_is_held(node));
}

int kv_op_add_link(struct kv_op *op, struct kv_index_node *node, const struct kv_place *place)
{
	assert(!S_ISDIR(node->inode.mode));
	if (node->inode.cookie != 0) {
		int r = op_put_link(op, node, place);

		if (r < 0)
			return r;
	} else {
		node->inode.parent = place->parent;
		node->inode.cookie = place->cookie;
	}
	node->inode.nlink++;
	return 0;
}

/* The first of the further links becomes the link in the inode. */
static int op_promote_link(struct kv_op *op, struct kv_index_node *node)
{
	struct kv_link_walk walk = {.first_done = true};
	struct kv_index_node directory;
	struct kv_place place;
	int r = kv_view_next_link(&op->view, node, &walk, &place);

	if (r < 0)
		return r;
	node->inode.cookie = 0;
	if (r == 0)
		return 0;
	r = op_drop_link(op, node, &place);
	node->inode.parent = place.parent;
	node->inode.cookie = place.cookie;
	if (r == 0)
		r = kv_view_node(&op->view, place.parent, &directory);
	if (r < 0)
		return r;
	/* A name goes whatever the quota there is: the domain evicts. */
	op->domains.moved |= node->inode.domain != directory.inode.domain;
	node->inode.domain = directory.inode.domain;
	return 0;
}

int kv_op_remove_link(struct kv_op *op, struct kv_index_node *node, const struct kv_place *place)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, node->inode.ino);
	int r = node_first_is(node, place) ? op_promote_link(op, node)
					   : op_drop_link(op, node, place);

	if (r < 0)
		return r;
	if (S_ISDIR(node->inode.mode)) {
		node->inode.nlink = 0;
		return 0;
	}
	/* The count must agree with the links: what follows depends on it. */
	if (node->inode.nlink == 0 || (node->inode.nlink == 1) != (node->inode.cookie == 0))
		return kv_index_damaged(op->index, &key, "link count");
	node->inode.nlink--;
	return 0;
}

int kv_op_move_link(struct kv_op *op, struct kv_index_node *node, const struct kv_place *from,
	const struct kv_place *to)
{
	int r;

	if (node_first_is(node, from)) {
		node->inode.parent = to->parent;
		node->inode.cookie = to->cookie;
		return 0;
	}
	r = op_drop_link(op, node, from);
	return r < 0 ? r : op_put_link(op, node, to);
}

int kv_op_count_subdirectory(struct kv_op *op, struct kv_index_node *directory, int by)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, directory->inode.ino);

	if (by < 0 && directory->inode.nlink <= 2)
		return kv_index_damaged(op->index, &key, "link count");
	directory->inode.nlink += (uint32_t)by;
	return 0;
}

int kv_op_make_orphan(struct kv_op *op, struct kv_index_node *node)
{
	struct kv_key key = kv_key_single(KV_TABLE_ORPHAN, node->inode.ino);

	assert(node->inode.nlink == 0 && node->inode.cookie == 0);
	node->orphan = true;
	node->inode.flags &= ~KV_INODE_PINNED;
	return kv_op_put(op, &key, 0, kv_index_node_is_held(node)) ? 0 : -ENOMEM;
}

int kv_op_put_unlinked(struct kv_op *op, struct kv_index_node *node)
{
	int r = node->inode.nlink == 0 ? kv_op_make_orphan(op, node) : 0;

	return r < 0 ? r : kv_op_put_node(op, node);
}
