/* SPDX-License-Identifier: Apache-2.0 */
/* Orphans: inodes without a name, freed piece by piece when nothing uses them any more. */
#include <sys/stat.h>

#include "index/index_internal.h"

struct reap {
	struct kv_op *op;
	struct kv_index_node node;
	struct kv_drops drops;
	uint32_t work; /* extents done */
	uint32_t most; /* of that */
};

static int reap_segment(struct reap *reap, uint64_t number)
{
	struct kv_view *view = &reap->op->view;
	struct kv_map_reader reader;
	struct kv_chunk chunk;
	int r = kv_view_segment(view, &reap->node, number, &reader);

	while (r == 1 && (r = kv_view_next_chunk(view, &reap->node, &reader, &chunk)) == 1) {
		r = kv_op_count_blocks(reap->op, &reap->node, &chunk);
		if (r == 0)
			r = kv_drops_add(&reap->drops, &chunk);
		if (r < 0)
			return r;
		reap->work += chunk.extent_count;
		r = 1;
	}
	return r;
}

/* 1: some of the map is left. */
static int reap_map(struct reap *reap)
{
	uint64_t number = 0;
	int r;

	if (reap->node.tail_size > 0) {
		r = S_ISREG(reap->node.inode.mode) ? reap_segment(reap, 0) : 0;
		reap->node.tail_size = 0;
		return r;
	}
	while ((r = kv_view_next_segment(&reap->op->view, &reap->node, &number)) == 1) {
		struct kv_key key = kv_key_pair(KV_TABLE_MAP, reap->node.inode.ino, number);

		if (reap->work > 0 && reap->work + KV_SEGMENT_CHUNKS > reap->most)
			return 1;
		r = reap_segment(reap, number++);
		if (r == 0)
			r = kv_op_drop(reap->op, &key, false);
		if (r < 0)
			return r;
	}
	return r;
}

static int reap_rest(struct reap *reap)
{
	struct kv_key key = kv_key_single(KV_TABLE_ORPHAN, reap->node.inode.ino);
	int r = kv_op_drop_xattrs(reap->op, &reap->node);

	if (r == 0)
		r = kv_op_drop(reap->op, &key, kv_index_node_is_held(&reap->node));
	return r < 0 ? r : kv_op_drop_node(reap->op, &reap->node);
}

static int reap_inode(struct reap *reap, uint64_t ino)
{
	struct kv_op *op = reap->op;
	int left;
	int r = kv_view_node(&op->view, ino, &reap->node);

	if (r < 0)
		return r;
	if (reap->node.inode.nlink > 0)
		return -EBUSY;
	if (!reap->node.orphan)
		return -ENOENT;
	if (S_ISDIR(reap->node.inode.mode)) {
		r = kv_view_is_empty(&op->view, ino);
		if (r != 1)
			return r < 0 ? r : -ENOTEMPTY;
	}
	left = reap_map(reap);
	if (left < 0)
		return left;
	r = left == 1 ? kv_op_put_node(op, &reap->node) : reap_rest(reap);
	if (r == 0)
		r = kv_op_drop_extents(op, &reap->drops);
	return r < 0 ? r : left;
}

int kv_index_reap(struct kv_index *index, uint64_t ino, struct kv_freed *ret_freed)
{
	struct kv_op op;
	struct reap reap = {.op = &op};
	int r = kv_op_begin(&op, index);

	if (r < 0)
		return r;
	/* A segment may have but one, and one that is shared has a record of its own. */
	reap.most = kv_reserve_steps(index, KV_REAP_CHUNKS, 2);
	r = kv_op_end(&op, reap_inode(&reap, ino));
	return kv_drops_finish(&reap.drops, &op, r, ret_freed);
}

static ssize_t orphans(struct kv_view *view, uint64_t after, uint64_t *ret_inos, size_t capacity)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key = kv_key_single(KV_TABLE_ORPHAN, after + 1);
	struct kv_value value;
	size_t count = 0;
	int r = kv_iter_init(&iter, view, &key, KV_KEY_TABLE_SIZE);

	while (r >= 0 && count < capacity && (r = kv_iter_next(&iter, &key, &value)) == 1)
		ret_inos[count++] = kv_key_a(&key);
	return r < 0 ? r : (ssize_t)count;
}

ssize_t kv_index_orphans(
	struct kv_index *index, uint64_t after, uint64_t *ret_inos, size_t capacity)
{
	struct kv_view view;
	ssize_t r;

	if (after == UINT64_MAX)
		return 0;
	kv_view_begin(&view, index);
	r = orphans(&view, after, ret_inos, capacity);
	kv_view_end(&view);
	return r;
}
