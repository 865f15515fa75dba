/* SPDX-License-Identifier: Apache-2.0 */
/* The operations on one name: make, link, unlink. */
#include <sys/stat.h>

#include "index/index_internal.h"

/* ---- Making ---- */

static int make_check(const struct kv_make *make)
{
	const struct kv_name name = {make->name, make->length};
	size_t target = make->target ? strlen(make->target) : 0;

	switch (make->mode & S_IFMT) {
	case S_IFREG:
		break;
	case S_IFDIR:
		if (make->hold)
			return -EINVAL;
		break;
	case S_IFLNK:
		if (target > KV_TARGET_MAX)
			return -ENAMETOOLONG;
		if (target == 0 || make->hold)
			return -EINVAL;
		break;
	default:
		return -EPERM;
	}
	return kv_name_check(&name);
}

static struct kv_index_node make_node(const struct kv_make *make, uint64_t ino,
	const struct kv_place *place, const struct kv_index_node *directory)
{
	bool link = S_ISLNK(make->mode);
	uint32_t pinned = link ? 0 : directory->inode.flags & KV_INODE_PINNED;

	return (struct kv_index_node){
		.inode =
			{
				.ino = ino,
				.mode = make->mode & (S_IFMT | 07777),
				.uid = make->uid,
				.gid = make->gid,
				.nlink = S_ISDIR(make->mode) ? 2 : 1,
				.size = link ? strlen(make->target) : 0,
				.atime_ns = make->now_ns,
				.mtime_ns = make->now_ns,
				.ctime_ns = make->now_ns,
				.btime_ns = make->now_ns,
				.last_use_ns = kv_use_round(make->now_ns),
				.flags = pinned | (make->hold ? KV_INODE_HELD : 0),
				.domain = directory->inode.domain,
				.parent = place->parent,
				.cookie = place->cookie,
			},
		.tail = link ? (const uint8_t *)make->target : NULL,
		.tail_size = link ? strlen(make->target) : 0,
	};
}

static int make(struct kv_op *op, const struct kv_make *make, struct kv_index_node *ret_node)
{
	const struct kv_name name = {make->name, make->length};
	struct kv_entry entry = {.held = make->hold};
	struct kv_index_node directory;
	int r = kv_view_directory(&op->view, make->parent, &directory);

	if (r == 0)
		r = kv_view_free_place(&op->view, make->parent, &name, &entry.place);
	if (r < 0)
		return r;
	*ret_node = make_node(make, kv_op_new_ino(op), &entry.place, &directory);
	entry.record = (struct kv_dirent_record){
		.ino = ret_node->inode.ino,
		.type = ret_node->inode.mode & S_IFMT,
		.name = make->name,
		.length = make->length,
	};
	kv_index_node_changed(&directory, make->now_ns);
	if (S_ISDIR(make->mode))
		directory.inode.nlink++;
	if (make->hold)
		op->held_inodes++;
	else
		op->inodes++;
	r = kv_op_put_node(op, ret_node);
	if (r == 0)
		r = kv_op_put_entry(op, &entry);
	return r < 0 ? r : kv_op_put_node(op, &directory);
}

int kv_index_make(struct kv_index *index, const struct kv_make *what, struct kv_inode *ret_inode)
{
	struct kv_op op;
	struct kv_index_node node;
	int r = make_check(what);

	if (r == 0)
		r = kv_op_begin_growing(&op, index);
	if (r < 0)
		return r;
	r = kv_op_end(&op, make(&op, what, &node));
	if (r == 0)
		*ret_inode = node.inode;
	return r;
}

/* ---- Linking ---- */

static int link_name(
	struct kv_op *op, struct kv_index_node *node, const struct kv_entry *entry, int64_t now_ns)
{
	int r = kv_op_add_link(op, node, &entry->place);

	node->inode.ctime_ns = now_ns;
	if (r == 0)
		r = kv_op_put_entry(op, entry);
	return r < 0 ? r : kv_op_put_node(op, node);
}

static int link_check(const struct kv_index_node *node)
{
	if (S_ISDIR(node->inode.mode))
		return -EPERM;
	if (node->inode.nlink == 0)
		return -ENOENT; /* an orphan stays one */
	return node->inode.nlink >= KV_NLINK_MAX ? -EMLINK : 0;
}

int kv_index_link(struct kv_index *index, uint64_t ino, uint64_t parent, const char *name,
	size_t length, int64_t now_ns, struct kv_inode *ret_inode)
{
	const struct kv_name what = {name, length};
	struct kv_op op;
	struct kv_index_node node;
	struct kv_index_node directory;
	struct kv_entry entry = {.record = {.ino = ino, .name = name, .length = length}};
	int r = kv_name_check(&what);

	if (r == 0)
		r = kv_op_begin_growing(&op, index);
	if (r < 0)
		return r;
	r = kv_view_directory(&op.view, parent, &directory);
	if (r == 0)
		r = kv_view_node(&op.view, ino, &node);
	if (r == 0)
		r = link_check(&node);
	if (r == 0)
		r = kv_view_free_place(&op.view, parent, &what, &entry.place);
	if (r == 0) {
		entry.record.type = node.inode.mode & S_IFMT;
		entry.held = kv_index_node_is_held(&node);
		kv_index_node_changed(&directory, now_ns);
		r = link_name(&op, &node, &entry, now_ns);
	}
	if (r == 0)
		r = kv_op_put_node(&op, &directory);
	r = kv_op_end(&op, r);
	if (r == 0)
		*ret_inode = node.inode;
	return r;
}

/* ---- Unlinking ---- */

struct unlink {
	uint64_t parent;
	struct kv_name name;
	bool directory;
	uint64_t expected_ino;
	int64_t now_ns;
};

static int unlink_check(
	struct kv_op *op, const struct unlink *unlink, const struct kv_index_node *node)
{
	bool is_directory = S_ISDIR(node->inode.mode);
	int r;

	if (unlink->expected_ino != 0 && node->inode.ino != unlink->expected_ino)
		return -ESTALE;
	if (unlink->directory != is_directory)
		return is_directory ? -EISDIR : -ENOTDIR;
	r = is_directory ? kv_view_is_empty(&op->view, node->inode.ino) : 1;
	return r == 0 ? -ENOTEMPTY : r < 0 ? r : 0;
}

static int unlink_name(struct kv_op *op, const struct unlink *unlink, struct kv_index_node *node)
{
	struct kv_index_node directory;
	struct kv_entry entry;
	int r = kv_view_directory(&op->view, unlink->parent, &directory);

	if (r == 0)
		r = kv_view_entry(&op->view, unlink->parent, &unlink->name, &entry);
	if (r == 0)
		r = kv_view_entry_node(&op->view, &entry, node);
	if (r == 0)
		r = unlink_check(op, unlink, node);
	if (r == 0)
		r = kv_op_remove_link(op, node, &entry.place);
	if (r == 0)
		r = kv_op_drop_entry(op, &entry);
	if (r < 0)
		return r;
	node->inode.ctime_ns = unlink->now_ns;
	kv_index_node_changed(&directory, unlink->now_ns);
	if (unlink->directory)
		r = kv_op_count_subdirectory(op, &directory, -1);
	if (r == 0 && unlink->directory)
		r = kv_op_end_domain(op, node);
	if (r == 0)
		r = kv_op_put_unlinked(op, node);
	return r < 0 ? r : kv_op_put_node(op, &directory);
}

int kv_index_unlink(struct kv_index *index, uint64_t parent, const char *name, size_t length,
	bool directory, uint64_t expected_ino, int64_t now_ns, struct kv_inode *ret_inode)
{
	const struct unlink unlink = {
		.parent = parent,
		.name = {name, length},
		.directory = directory,
		.expected_ino = expected_ino,
		.now_ns = now_ns,
	};
	struct kv_op op;
	struct kv_index_node node;
	int r = kv_name_check(&unlink.name);

	if (r == 0)
		r = kv_op_begin(&op, index);
	if (r < 0)
		return r;
	r = kv_op_end(&op, unlink_name(&op, &unlink, &node));
	if (r == 0)
		*ret_inode = node.inode;
	return r;
}
