/* SPDX-License-Identifier: Apache-2.0 */
/* Renaming: to a free name, over another file, or two names exchanged. */
#include <linux/fs.h>
#include <sys/stat.h>

#include "index/index_internal.h"

/* One side of a rename: a name, and what it names. */
struct side {
	struct kv_name name;
	struct kv_index_node *directory; /* both sides may share it */
	struct kv_entry entry;
	struct kv_index_node node;
	bool exists;
};

struct renaming {
	struct kv_op *op;
	const struct kv_rename *rename;
	struct kv_index_node directories[2];
	struct side from;
	struct side to;
};

static int side_load(struct kv_view *view, struct side *side)
{
	int r = kv_view_entry(view, side->directory->inode.ino, &side->name, &side->entry);

	if (r == 0)
		r = kv_view_entry_node(view, &side->entry, &side->node);
	side->exists = r == 0;
	return r;
}

static int renaming_load(struct renaming *renaming)
{
	const struct kv_rename *rename = renaming->rename;
	struct kv_view *view = &renaming->op->view;
	int r = kv_view_directory(view, rename->parent, &renaming->directories[0]);

	renaming->from.name = (struct kv_name){rename->name, rename->length};
	renaming->to.name = (struct kv_name){rename->new_name, rename->new_length};
	renaming->from.directory = renaming->to.directory = &renaming->directories[0];
	if (r == 0 && rename->new_parent != rename->parent) {
		renaming->to.directory = &renaming->directories[1];
		r = kv_view_directory(view, rename->new_parent, renaming->to.directory);
	}
	if (r == 0)
		r = side_load(view, &renaming->from);
	if (r < 0)
		return r;
	r = side_load(view, &renaming->to);
	return r == -ENOENT && !(rename->flags & RENAME_EXCHANGE) ? 0 : r;
}

/* ---- Checks ---- */

/* -EINVAL if directory INO is SIDE's inode, or below it. */
static int subtree_check(struct renaming *renaming, uint64_t ino, const struct side *side)
{
	struct kv_index *index = renaming->op->index;
	/* No path is longer than there are inodes; a damaged index may have a circle. */
	uint64_t steps = index->inodes + 1;
	struct kv_index_node node;

	if (!S_ISDIR(side->node.inode.mode))
		return 0;
	while (ino != KV_ROOT_INO) {
		struct kv_key key = kv_key_single(KV_TABLE_INODE, ino);
		int r;

		if (ino == side->node.inode.ino)
			return -EINVAL;
		if (steps-- == 0)
			return kv_index_damaged(index, &key, "circle of directories");
		r = kv_view_node(&renaming->op->view, ino, &node);
		if (r == -ENOENT)
			return kv_index_damaged(index, &key, "missing parent");
		if (r < 0)
			return r;
		ino = node.inode.parent;
	}
	return 0;
}

static int replace_check(struct renaming *renaming)
{
	bool to_directory = S_ISDIR(renaming->to.node.inode.mode);
	int r;

	if (S_ISDIR(renaming->from.node.inode.mode) != to_directory)
		return to_directory ? -EISDIR : -ENOTDIR;
	r = to_directory ? kv_view_is_empty(&renaming->op->view, renaming->to.node.inode.ino) : 1;
	return r == 0 ? -ENOTEMPTY : r < 0 ? r : 0;
}

static int renaming_check(struct renaming *renaming)
{
	const struct kv_rename *rename = renaming->rename;
	bool exchange = rename->flags & RENAME_EXCHANGE;
	int r = 0;

	if (rename->parent != rename->new_parent)
		r = subtree_check(renaming, rename->new_parent, &renaming->from);
	if (r == 0 && exchange && rename->parent != rename->new_parent)
		r = subtree_check(renaming, rename->parent, &renaming->to);
	if (r < 0 || !renaming->to.exists)
		return r;
	if (!exchange)
		r = replace_check(renaming);
	if (r == 0 && (renaming->from.entry.held || renaming->to.entry.held))
		r = -EINPROGRESS;
	return r;
}

/* ---- Quotas ---- */

/* What SIDE names comes to TO's directory: to its domain, too, if that was its first name. */
static int change_domain(struct renaming *renaming, struct side *side, const struct side *to)
{
	uint32_t domain = to->directory->inode.domain;
	struct kv_index_node *node = &side->node;
	const struct kv_place *place = &side->entry.place;
	int empty;

	if (side->directory->inode.domain == domain)
		return 0;
	if (!S_ISDIR(node->inode.mode))
		return node->inode.parent == place->parent && node->inode.cookie == place->cookie
			       ? kv_op_move_node(renaming->op, node, domain)
			       : 0;
	if (kv_index_node_is_domain(renaming->op->index, node))
		return 0;
	/* Millions of files may be below it: the caller copies, as between filesystems. */
	empty = kv_view_is_empty(&renaming->op->view, node->inode.ino);
	if (empty != 1)
		return empty < 0 ? empty : -EXDEV;
	return kv_op_move_node(renaming->op, node, domain);
}

static int change_domains(struct renaming *renaming)
{
	bool exchange = renaming->rename->flags & RENAME_EXCHANGE;
	int r = change_domain(renaming, &renaming->from, &renaming->to);

	if (r == 0 && exchange)
		r = change_domain(renaming, &renaming->to, &renaming->from);
	return r;
}

/* ---- Changes ---- */

/* A directory moves from one parent to another. */
static int move_subdirectory(struct renaming *renaming, const struct side *side,
	struct kv_index_node *from, struct kv_index_node *to)
{
	int r;

	if (!S_ISDIR(side->node.inode.mode) || from == to)
		return 0;
	renaming->op->domains.directory_moved = true;
	r = kv_op_count_subdirectory(renaming->op, from, -1);
	return r < 0 ? r : kv_op_count_subdirectory(renaming->op, to, 1);
}

/* The name at TO names FROM's inode from now on. */
static int put_name(struct renaming *renaming, struct side *from, const struct side *to)
{
	struct kv_entry entry = {
		.place = to->entry.place,
		.held = from->entry.held,
		.record =
			{
				.ino = from->entry.record.ino,
				.type = from->entry.record.type,
				.name = to->name.bytes,
				.length = to->name.length,
			},
	};
	int r = kv_op_put_entry(renaming->op, &entry);

	from->node.inode.ctime_ns = renaming->rename->now_ns;
	return r < 0 ? r
		     : kv_op_move_link(
			       renaming->op, &from->node, &from->entry.place, &to->entry.place);
}

static int exchange(struct renaming *renaming)
{
	struct side *from = &renaming->from;
	struct side *to = &renaming->to;
	int r = put_name(renaming, from, to);

	if (r == 0)
		r = put_name(renaming, to, from);
	if (r == 0)
		r = move_subdirectory(renaming, from, from->directory, to->directory);
	if (r == 0)
		r = move_subdirectory(renaming, to, to->directory, from->directory);
	if (r == 0)
		r = kv_op_put_node(renaming->op, &from->node);
	return r < 0 ? r : kv_op_put_node(renaming->op, &to->node);
}

/* Takes the name away from what has it. */
static int displace(struct renaming *renaming)
{
	struct side *to = &renaming->to;
	int r = kv_op_remove_link(renaming->op, &to->node, &to->entry.place);

	if (r == 0 && S_ISDIR(to->node.inode.mode))
		r = kv_op_count_subdirectory(renaming->op, to->directory, -1);
	if (r == 0 && S_ISDIR(to->node.inode.mode))
		r = kv_op_end_domain(renaming->op, &to->node);
	if (r < 0)
		return r;
	to->node.inode.ctime_ns = renaming->rename->now_ns;
	return kv_op_put_unlinked(renaming->op, &to->node);
}

static int move(struct renaming *renaming)
{
	struct kv_op *op = renaming->op;
	struct side *from = &renaming->from;
	struct side *to = &renaming->to;
	int r = kv_op_drop_entry(op, &from->entry);

	if (r == 0)
		r = to->exists ? displace(renaming)
			       : kv_view_free_place(&op->view, to->directory->inode.ino, &to->name,
					 &to->entry.place);
	if (r == 0)
		r = put_name(renaming, from, to);
	if (r == 0)
		r = move_subdirectory(renaming, from, from->directory, to->directory);
	return r < 0 ? r : kv_op_put_node(op, &from->node);
}

static int rename_names(struct renaming *renaming)
{
	const struct kv_rename *rename = renaming->rename;
	int r = renaming_load(renaming);

	if (r < 0)
		return r;
	if (renaming->to.exists && rename->flags & RENAME_NOREPLACE)
		return -EEXIST;
	if (renaming->to.exists && renaming->to.node.inode.ino == renaming->from.node.inode.ino) {
		renaming->to.node.inode.ino = 0; /* two names of one file: nothing to do */
		return 0;
	}
	r = renaming_check(renaming);
	if (r == 0)
		r = change_domains(renaming);
	if (r == 0)
		r = rename->flags & RENAME_EXCHANGE ? exchange(renaming) : move(renaming);
	if (r < 0)
		return r;
	kv_index_node_changed(renaming->from.directory, rename->now_ns);
	kv_index_node_changed(renaming->to.directory, rename->now_ns);
	r = kv_op_put_node(renaming->op, renaming->from.directory);
	if (r == 0 && renaming->to.directory != renaming->from.directory)
		r = kv_op_put_node(renaming->op, renaming->to.directory);
	return r;
}

static int rename_arguments_check(const struct kv_rename *rename)
{
	const struct kv_name from = {rename->name, rename->length};
	const struct kv_name to = {rename->new_name, rename->new_length};
	int r = kv_name_check(&from);

	if (rename->flags & ~(unsigned)(RENAME_NOREPLACE | RENAME_EXCHANGE) ||
		rename->flags == (RENAME_NOREPLACE | RENAME_EXCHANGE))
		return -EINVAL;
	return r < 0 ? r : kv_name_check(&to);
}

int kv_index_rename(struct kv_index *index, const struct kv_rename *rename,
	struct kv_inode *ret_moved, struct kv_inode *ret_replaced)
{
	struct kv_op op;
	struct renaming renaming = {.op = &op, .rename = rename};
	int r = rename_arguments_check(rename);

	if (r == 0)
		r = kv_op_begin(&op, index);
	if (r < 0)
		return r;
	r = kv_op_end(&op, rename_names(&renaming));
	if (r == 0) {
		*ret_moved = renaming.from.node.inode;
		*ret_replaced =
			renaming.to.exists ? renaming.to.node.inode : (struct kv_inode){.ino = 0};
	}
	return r;
}
