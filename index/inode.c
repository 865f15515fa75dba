/* SPDX-License-Identifier: Apache-2.0 */
/* Inodes: their records in a view and in an operation, and what reads or changes only them. */
#include <sys/stat.h>

#include "index/index_internal.h"

/* ---- Nodes ---- */

/* Published files with a name are in the use order unless they are pinned, and quarantined ones
 * until they are evicted. */
static bool node_belongs_in_order(const struct kv_index_node *node)
{
	const struct kv_inode *inode = &node->inode;

	return S_ISREG(inode->mode) && !(inode->flags & (KV_INODE_HELD | KV_INODE_PINNED)) &&
	       (inode->nlink > 0 || (inode->flags & KV_INODE_QUARANTINED && !node->orphan));
}

static uint64_t node_order(const struct kv_index_node *node)
{
	unsigned use_class = node->inode.flags & KV_INODE_READ ? KV_USE_READ : KV_USE_UNREAD;

	return kv_use_order(node->inode.domain, use_class, node->inode.last_use_ns);
}

/* Only an inode without a name can be an orphan: spare the others the look. */
static int node_load_state(struct kv_view *view, struct kv_index_node *node)
{
	struct kv_key key = kv_key_single(KV_TABLE_ORPHAN, node->inode.ino);
	struct kv_value value;
	int r = node->inode.nlink == 0 ? kv_view_get(view, &key, &value) : -ENOENT;

	node->orphan = r == 0;
	node->ordered = node_belongs_in_order(node);
	node->order = node_order(node);
	kv_index_node_init_counted(node);
	return r == -ENOENT ? 0 : r;
}

int kv_view_node(struct kv_view *view, uint64_t ino, struct kv_index_node *ret_node)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, ino);
	struct kv_value value;
	struct kv_index_node node = {0};
	size_t head;
	int r = kv_view_get(view, &key, &value);

	if (r < 0)
		return r;
	if (kv_inode_decode(ino, value.data, value.size, &node.inode, &head) < 0)
		return kv_index_damaged(view->index, &key, "inode");
	if (value.held)
		node.inode.flags |= KV_INODE_HELD;
	node.tail = value.data + head;
	node.tail_size = value.size - head;
	r = node_load_state(view, &node);
	if (r < 0)
		return r;
	*ret_node = node;
	return 0;
}

int kv_view_directory(struct kv_view *view, uint64_t ino, struct kv_index_node *ret_node)
{
	struct kv_index_node node;
	int r = kv_view_node(view, ino, &node);

	if (r < 0)
		return r;
	if (!S_ISDIR(node.inode.mode))
		return -ENOTDIR;
	if (node.inode.nlink == 0)
		return -ENOENT;
	*ret_node = node;
	return 0;
}

static int op_order(struct kv_op *op, struct kv_index_node *node, bool ordered)
{
	uint64_t order = node_order(node);
	struct kv_key old = kv_key_pair(KV_TABLE_USE, node->order, node->inode.ino);
	struct kv_key key = kv_key_pair(KV_TABLE_USE, order, node->inode.ino);
	bool moved = node->ordered != ordered || node->order != order;

	if (moved && node->ordered && kv_op_drop(op, &old, false) < 0)
		return -ENOMEM;
	if (moved && ordered && !kv_op_put(op, &key, 0, false))
		return -ENOMEM;
	node->ordered = ordered;
	node->order = order;
	return 0;
}

int kv_op_put_node(struct kv_op *op, struct kv_index_node *node)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, node->inode.ino);
	uint8_t head[KV_INODE_HEAD_MAX];
	size_t size = kv_inode_encode(&node->inode, head);
	struct kv_record *record =
		kv_record_new(kv_index_node_is_held(node) ? KV_RECORD_HELD : KV_RECORD_VALUE, &key,
			size + node->tail_size);
	int r;

	if (!record)
		return -ENOMEM;
	memcpy(record->value, head, size);
	/* The tail may lie in the record that this one replaces: copy before, and follow it. */
	if (node->tail_size > 0)
		memcpy(record->value + size, node->tail, node->tail_size);
	node->tail = record->value + size;
	kv_overlay_put(&op->layer, record);
	r = op_order(op, node, node_belongs_in_order(node));
	return r < 0 ? r : kv_op_count_node(op, node, false);
}

int kv_op_drop_node(struct kv_op *op, struct kv_index_node *node)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, node->inode.ino);
	int r = op_order(op, node, false);

	if (r == 0)
		r = kv_op_count_node(op, node, true);
	if (r < 0)
		return r;
	if (kv_index_node_is_held(node))
		op->held_inodes--;
	else
		op->inodes--;
	return kv_op_drop(op, &key, kv_index_node_is_held(node));
}

/* ---- Reading ---- */

int kv_index_get(struct kv_index *index, uint64_t ino, struct kv_inode *ret_inode)
{
	struct kv_view view;
	struct kv_index_node node;
	int r;

	kv_view_begin(&view, index);
	r = kv_view_node(&view, ino, &node);
	kv_view_end(&view);
	if (r == 0)
		*ret_inode = node.inode;
	return r;
}

ssize_t kv_index_readlink(struct kv_index *index, uint64_t ino, char *ret_target, size_t size)
{
	struct kv_view view;
	struct kv_index_node node;
	ssize_t r;

	kv_view_begin(&view, index);
	r = kv_view_node(&view, ino, &node);
	if (r == 0 && !S_ISLNK(node.inode.mode))
		r = -EINVAL;
	if (r == 0) {
		r = (ssize_t)kv_min_u64(size, node.tail_size);
		memcpy(ret_target, node.tail, (size_t)r);
	}
	kv_view_end(&view);
	return r;
}

static ssize_t files(struct kv_view *view, uint64_t after, uint64_t *ret_inos, size_t capacity)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key = kv_key_single(KV_TABLE_INODE, after + 1);
	struct kv_value value;
	size_t count = 0;
	int r = kv_iter_init(&iter, view, &key, KV_KEY_TABLE_SIZE);

	while (r >= 0 && count < capacity && (r = kv_iter_next(&iter, &key, &value)) == 1) {
		struct kv_inode inode;
		size_t head;

		if (kv_inode_decode(kv_key_a(&key), value.data, value.size, &inode, &head) == 0 &&
			S_ISREG(inode.mode) && inode.blocks > 0)
			ret_inos[count++] = inode.ino;
	}
	return r < 0 ? r : (ssize_t)count;
}

ssize_t kv_index_files(struct kv_index *index, uint64_t after, uint64_t *ret_inos, size_t capacity)
{
	struct kv_view view;
	ssize_t r;

	if (after == UINT64_MAX)
		return 0;
	kv_view_begin(&view, index);
	r = files(&view, after, ret_inos, capacity);
	kv_view_end(&view);
	return r;
}

char *kv_index_path(struct kv_index *index, uint64_t ino)
{
	struct kv_view view;
	char *path;

	kv_view_begin(&view, index);
	path = kv_view_path(&view, ino);
	kv_view_end(&view);
	return path;
}

/* ---- Changing ---- */

static void inode_change(struct kv_inode *inode, const struct kv_change *change)
{
	if (change->mask & KV_CHANGE_MODE)
		inode->mode = (inode->mode & S_IFMT) | (change->mode & 07777);
	if (change->mask & KV_CHANGE_UID)
		inode->uid = change->uid;
	if (change->mask & KV_CHANGE_GID)
		inode->gid = change->gid;
	if (change->mask & KV_CHANGE_ATIME)
		inode->atime_ns = change->atime_ns;
	if (change->mask & KV_CHANGE_MTIME)
		inode->mtime_ns = change->mtime_ns;
	if (change->mask & KV_CHANGE_CTIME)
		inode->ctime_ns = change->ctime_ns;
}

int kv_index_change(struct kv_index *index, uint64_t ino, const struct kv_change *change,
	struct kv_inode *ret_inode)
{
	struct kv_op op;
	struct kv_index_node node;
	int r = kv_op_begin(&op, index);

	if (r < 0)
		return r;
	r = kv_view_node(&op.view, ino, &node);
	if (r == 0) {
		inode_change(&node.inode, change);
		r = kv_op_put_node(&op, &node);
	}
	r = kv_op_end(&op, r);
	if (r == 0)
		*ret_inode = node.inode;
	return r;
}
