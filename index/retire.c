/* SPDX-License-Identifier: Apache-2.0 */
/* Retiring a directory: its name gets a new inode, the old one is worked off piece by piece. */
#include <sys/stat.h>

#include "index/index_internal.h"

/* Whether the directory carries the fingerprint UNLESS: 1, 0, or an error. */
static int has_fingerprint(
	struct kv_op *op, const struct kv_index_node *node, const struct kv_retire *retire)
{
	const void *value;
	size_t size;
	int r;

	if (retire->unless_size == 0)
		return 0;
	r = kv_view_xattr(&op->view, node->inode.ino, KV_FINGERPRINT_NAME, &value, &size);
	if (r == -ENODATA)
		return 0;
	return r < 0 ? r : size == retire->unless_size && memcmp(value, retire->unless, size) == 0;
}

static struct kv_index_node fresh_node(
	struct kv_op *op, const struct kv_index_node *old, int64_t now_ns)
{
	struct kv_index_node node = {.inode = old->inode};

	node.inode.ino = kv_op_new_ino(op);
	node.inode.nlink = 2;
	node.inode.ctime_ns = now_ns;
	return node;
}

/* The quota goes over to the new directory; what is left of the old one counts until it is freed.
 */
static int move_domain(
	struct kv_op *op, const struct kv_index_node *old, const struct kv_index_node *fresh)
{
	struct kv_domain *domain = &op->index->domains[old->inode.domain];
	struct kv_domain_change *change;

	if (!kv_index_node_is_domain(op->index, old))
		return kv_op_end_domain(op, old); /* one that was taken away and is still leaving */
	change = kv_op_domain(op, old->inode.domain);
	if (!change)
		return -ENOMEM;
	change->set = true;
	change->ino = fresh->inode.ino;
	change->limit = atomic_load(&domain->limit);
	change->state = (enum kv_domain_state)atomic_load(&domain->state);
	return 0;
}

static int replace(struct kv_op *op, struct kv_index_node *old, const struct kv_retire *retire,
	struct kv_index_node *fresh)
{
	const struct kv_place place = {old->inode.parent, old->inode.cookie};
	struct kv_entry entry;
	struct kv_index_node parent;
	int r = kv_view_entry_at(&op->view, &place, &entry);

	if (r == 0)
		r = kv_view_directory(&op->view, place.parent, &parent);
	if (r < 0)
		return r;
	*fresh = fresh_node(op, old, retire->now_ns);
	op->inodes++;
	entry.record.ino = fresh->inode.ino;
	r = kv_op_put_entry(op, &entry);
	if (r == 0)
		r = kv_op_copy_xattrs(op, old, fresh);
	if (r == 0 && retire->unless_size > 0)
		r = kv_op_set_xattr(
			op, fresh, KV_FINGERPRINT_NAME, retire->unless, retire->unless_size);
	if (r == 0)
		r = move_domain(op, old, fresh);
	if (r == 0)
		r = kv_op_put_node(op, fresh);
	if (r < 0)
		return r;
	kv_index_node_changed(&parent, retire->now_ns);
	return kv_op_put_node(op, &parent);
}

static int retire_directory(
	struct kv_op *op, const struct kv_retire *retire, struct kv_index_node *fresh)
{
	struct kv_index_node old;
	int r = kv_view_directory(&op->view, retire->ino, &old);

	if (r < 0)
		return r;
	if (retire->ino == KV_ROOT_INO)
		return -EBUSY;
	r = has_fingerprint(op, &old, retire);
	if (r != 0)
		return r < 0 ? r : 0;
	r = replace(op, &old, retire, fresh);
	if (r < 0)
		return r;
	old.inode.nlink = 0;
	old.inode.cookie = 0;
	old.inode.ctime_ns = retire->now_ns;
	r = kv_op_put_unlinked(op, &old);
	return r < 0 ? r : 1;
}

int kv_index_retire(
	struct kv_index *index, const struct kv_retire *retire, struct kv_inode *ret_fresh)
{
	struct kv_op op;
	struct kv_index_node fresh;
	int r;

	if (retire->unless_size > KV_FINGERPRINT_MAX)
		return -E2BIG;
	r = kv_op_begin(&op, index);
	if (r < 0)
		return r;
	r = kv_op_end(&op, retire_directory(&op, retire, &fresh));
	if (r == 1)
		*ret_fresh = fresh.inode;
	return r;
}

/* ---- Working it off ---- */

struct clear {
	struct kv_op *op;
	uint64_t ino;
	int64_t now_ns;
	void (*gone)(void *arg, const struct kv_inode *inode, const char *name, size_t length);
	void *arg;
};

/* As unlink or rmdir would, but a directory goes with what is in it, which is worked off later. */
static int clear_entry(struct clear *clear, const struct kv_key *key)
{
	struct kv_op *op = clear->op;
	const struct kv_place place = {kv_key_a(key), kv_key_b(key)};
	struct kv_entry entry;
	struct kv_index_node node;
	int r = kv_view_entry_at(&op->view, &place, &entry);

	if (r == 0)
		r = kv_view_entry_node(&op->view, &entry, &node);
	if (r == 0)
		r = kv_op_remove_link(op, &node, &place);
	if (r == 0 && S_ISDIR(node.inode.mode))
		r = kv_op_end_domain(op, &node);
	if (r < 0)
		return r;
	node.inode.ctime_ns = clear->now_ns;
	r = kv_op_put_unlinked(op, &node);
	if (r < 0)
		return r;
	clear->gone(clear->arg, &node.inode, entry.record.name, entry.record.length);
	return kv_op_drop_entry(op, &entry);
}

static int clear_some(struct clear *clear)
{
	struct kv_view *view = &clear->op->view;
	unsigned most = kv_reserve_steps(clear->op->index, KV_CLEAR_NAMES, KV_RECORDS_A_NAME);
	struct kv_index_node node;
	int r = kv_view_node(view, clear->ino, &node);

	if (r < 0)
		return r;
	if (!node.orphan)
		return -ENOENT;
	for (unsigned i = 0; i < most; i++) {
		struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, clear->ino, 0);
		struct kv_value value;

		r = kv_view_seek(view, KV_KEY_SINGLE_SIZE, &key, &value);
		if (r == 1)
			r = clear_entry(clear, &key);
		else
			return r;
		if (r < 0)
			return r;
	}
	return 1;
}

int kv_index_clear(struct kv_index *index, uint64_t ino, int64_t now_ns,
	void (*gone)(void *arg, const struct kv_inode *inode, const char *name, size_t length),
	void *arg)
{
	struct kv_op op;
	struct clear clear = {.op = &op, .ino = ino, .now_ns = now_ns, .gone = gone, .arg = arg};
	int r = kv_op_begin(&op, index);

	return r < 0 ? r : kv_op_end(&op, clear_some(&clear));
}
