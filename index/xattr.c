/* SPDX-License-Identifier: Apache-2.0 */
/* Extended attributes: one record each, found by a hash of the name, the name in the value. */
#include <sys/xattr.h>

#include "index/index_internal.h"

/* Bounds what one inode may hold: values, and names as kv_index_xattr_list gives them. */
#define NAMES_TOTAL_MAX 65536u
#define VALUES_TOTAL_MAX 65536u

struct totals {
	size_t names; /* with a NUL each */
	size_t values;
};

struct probe {
	const char *name;
	size_t length;
	bool found;
	struct kv_key key;             /* of the attribute, or of a free slot */
	struct kv_xattr_record record; /* if found */
};

static int name_length(const char *name, size_t *ret_length)
{
	size_t length = strnlen(name, KV_XATTR_NAME_MAX + 1);

	if (length == 0 || length > KV_XATTR_NAME_MAX)
		return -ERANGE; /* as setxattr(2) */
	*ret_length = length;
	return 0;
}

static int xattr_decode(struct kv_view *view, const struct kv_key *key,
	const struct kv_value *value, struct kv_xattr_record *ret_record)
{
	if (kv_xattr_decode(value->data, value->size, ret_record) < 0)
		return kv_index_damaged(view->index, key, "extended attribute");
	return 0;
}

/* Finds the attribute, or a free slot of its hash: -ENOSPC if there is neither. */
static int xattr_find(struct kv_view *view, uint64_t ino, struct probe *probe)
{
	uint64_t base = kv_index_hash(view->index, probe->name, probe->length);
	bool have_free = false;

	for (uint64_t slot = 0; slot < KV_HASH_SLOTS; slot++) {
		struct kv_key key = kv_key_pair(KV_TABLE_XATTR, ino, base + slot);
		struct kv_value value;
		int r = kv_view_get(view, &key, &value);

		if (r == -ENOENT && !have_free) {
			have_free = true;
			probe->key = key;
		}
		if (r == -ENOENT)
			continue;
		if (r == 0)
			r = xattr_decode(view, &key, &value, &probe->record);
		if (r < 0)
			return r;
		if (probe->record.length == probe->length &&
			memcmp(probe->record.name, probe->name, probe->length) == 0) {
			probe->found = true;
			probe->key = key;
			return 0;
		}
	}
	return have_free ? 0 : -ENOSPC;
}

/* Calls EACH for all attributes of INO. */
static int xattr_each(struct kv_view *view, uint64_t ino,
	void (*each)(void *arg, const struct kv_xattr_record *record), void *arg)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key = kv_key_pair(KV_TABLE_XATTR, ino, 0);
	struct kv_value value;
	struct kv_xattr_record record;
	int r = kv_iter_init(&iter, view, &key, KV_KEY_SINGLE_SIZE);

	while (r >= 0 && (r = kv_iter_next(&iter, &key, &value)) == 1) {
		r = xattr_decode(view, &key, &value, &record);
		if (r == 0)
			each(arg, &record);
	}
	return r;
}

static void add_totals(void *arg, const struct kv_xattr_record *record)
{
	struct totals *totals = arg;

	totals->names += record->length + 1;
	totals->values += record->size;
}

/* ---- Setting ---- */

/* Whether the inode may hold the new attribute in place of the old one. */
static int check_room(
	struct kv_op *op, uint64_t ino, const struct probe *probe, size_t new_value_size)
{
	struct totals totals = {probe->length + 1, new_value_size};
	int r = xattr_each(&op->view, ino, add_totals, &totals);

	if (r < 0)
		return r;
	if (probe->found) {
		totals.names -= probe->length + 1;
		totals.values -= probe->record.size;
	}
	return totals.names > NAMES_TOTAL_MAX || totals.values > VALUES_TOTAL_MAX ? -ENOSPC : 0;
}

struct setting {
	const char *name;
	const void *value;
	size_t size;
	int flags;
	int64_t now_ns;
};

static int op_set(struct kv_op *op, struct kv_index_node *node, const struct setting *setting,
	struct probe *probe)
{
	struct kv_xattr_record record = {probe->name, probe->length, setting->value, setting->size};
	uint8_t *data;
	int r = xattr_find(&op->view, node->inode.ino, probe);

	if (r < 0)
		return r;
	if (probe->found && setting->flags & XATTR_CREATE)
		return -EEXIST;
	if (!probe->found && setting->flags & XATTR_REPLACE)
		return -ENODATA;
	r = check_room(op, node->inode.ino, probe, setting->size);
	if (r < 0)
		return r;
	data = kv_op_put(
		op, &probe->key, 1 + record.length + record.size, kv_index_node_is_held(node));
	if (!data)
		return -ENOMEM;
	kv_xattr_encode(&record, data);
	node->inode.ctime_ns = setting->now_ns;
	return kv_op_put_node(op, node);
}

int kv_index_xattr_set(struct kv_index *index, uint64_t ino, const char *name, const void *value,
	size_t size, int flags, int64_t now_ns)
{
	const struct setting setting = {name, value, size, flags, now_ns};
	struct probe probe = {.name = name};
	struct kv_op op;
	struct kv_index_node node;
	int r = name_length(name, &probe.length);

	if (r < 0)
		return r;
	if (size > KV_XATTR_SIZE_MAX)
		return -E2BIG; /* as setxattr(2) */
	if (flags & ~(XATTR_CREATE | XATTR_REPLACE))
		return -EINVAL;
	r = kv_op_begin_growing(&op, index);
	if (r < 0)
		return r;
	r = kv_view_node(&op.view, ino, &node);
	if (r == 0)
		r = op_set(&op, &node, &setting, &probe);
	return kv_op_end(&op, r);
}

/* ---- Reading ---- */

ssize_t kv_index_xattr_get(
	struct kv_index *index, uint64_t ino, const char *name, void *ret_value, size_t size)
{
	struct probe probe = {.name = name};
	struct kv_view view;
	struct kv_index_node node;
	ssize_t r = name_length(name, &probe.length);

	if (r < 0)
		return r;
	kv_view_begin(&view, index);
	r = kv_view_node(&view, ino, &node);
	if (r == 0)
		r = xattr_find(&view, ino, &probe);
	if (r == -ENOSPC || (r == 0 && !probe.found))
		r = -ENODATA;
	if (r == 0) {
		r = (ssize_t)probe.record.size;
		if (size != 0 && size < probe.record.size)
			r = -ERANGE;
		else if (size != 0)
			memcpy(ret_value, probe.record.value, probe.record.size);
	}
	kv_view_end(&view);
	return r;
}

struct name_list {
	char *names;
	size_t size; /* 0: only the length is wanted */
	size_t used;
};

static void add_name(void *arg, const struct kv_xattr_record *record)
{
	struct name_list *list = arg;

	if (list->used + record->length + 1 <= list->size) {
		memcpy(list->names + list->used, record->name, record->length);
		list->names[list->used + record->length] = '\0';
	}
	list->used += record->length + 1;
}

ssize_t kv_index_xattr_list(struct kv_index *index, uint64_t ino, char *ret_names, size_t size)
{
	struct name_list list = {ret_names, size, 0};
	struct kv_view view;
	struct kv_index_node node;
	int r;

	kv_view_begin(&view, index);
	r = kv_view_node(&view, ino, &node);
	if (r == 0)
		r = xattr_each(&view, ino, add_name, &list);
	kv_view_end(&view);
	if (r < 0)
		return r;
	return size != 0 && list.used > size ? -ERANGE : (ssize_t)list.used;
}

/* ---- Removing ---- */

int kv_index_xattr_remove(struct kv_index *index, uint64_t ino, const char *name, int64_t now_ns)
{
	struct probe probe = {.name = name};
	struct kv_op op;
	struct kv_index_node node;
	int r = name_length(name, &probe.length);

	if (r == 0)
		r = kv_op_begin(&op, index);
	if (r < 0)
		return r;
	r = kv_view_node(&op.view, ino, &node);
	if (r == 0)
		r = xattr_find(&op.view, ino, &probe);
	if (r == -ENOSPC || (r == 0 && !probe.found))
		r = -ENODATA;
	if (r == 0)
		r = kv_op_drop(&op, &probe.key, kv_index_node_is_held(&node));
	if (r == 0) {
		node.inode.ctime_ns = now_ns;
		r = kv_op_put_node(&op, &node);
	}
	return kv_op_end(&op, r);
}

int kv_op_copy_xattrs(
	struct kv_op *op, const struct kv_index_node *from, const struct kv_index_node *to)
{
	struct kv_key key = kv_key_pair(KV_TABLE_XATTR, from->inode.ino, 0);
	struct kv_value value;
	int r;

	assert(kv_index_node_is_held(from) == kv_index_node_is_held(to));
	while ((r = kv_view_seek(&op->view, KV_KEY_SINGLE_SIZE, &key, &value)) == 1) {
		struct kv_key copy = kv_key_pair(KV_TABLE_XATTR, to->inode.ino, kv_key_b(&key));
		uint8_t *data = kv_op_put(op, &copy, value.size, kv_index_node_is_held(to));

		if (!data)
			return -ENOMEM;
		memcpy(data, value.data, value.size);
		key = kv_key_pair(KV_TABLE_XATTR, from->inode.ino, kv_key_b(&key) + 1);
	}
	return r;
}

int kv_op_set_xattr(struct kv_op *op, const struct kv_index_node *node, const char *name,
	const void *value, size_t size)
{
	struct probe probe = {.name = name, .length = strlen(name)};
	struct kv_xattr_record record = {name, probe.length, value, size};
	uint8_t *data;
	int r = xattr_find(&op->view, node->inode.ino, &probe);

	if (r == 0)
		r = check_room(op, node->inode.ino, &probe, size);
	if (r < 0)
		return r;
	data = kv_op_put(op, &probe.key, 1 + record.length + size, kv_index_node_is_held(node));
	if (!data)
		return -ENOMEM;
	kv_xattr_encode(&record, data);
	return 0;
}

int kv_view_xattr(struct kv_view *view, uint64_t ino, const char *name, const void **ret_value,
	size_t *ret_size)
{
	struct probe probe = {.name = name, .length = strlen(name)};
	int r = xattr_find(view, ino, &probe);

	if (r == -ENOSPC || (r == 0 && !probe.found))
		return -ENODATA;
	if (r < 0)
		return r;
	*ret_value = probe.record.value;
	*ret_size = probe.record.size;
	return 0;
}

int kv_op_drop_xattrs(struct kv_op *op, const struct kv_index_node *node)
{
	struct kv_key key = kv_key_pair(KV_TABLE_XATTR, node->inode.ino, 0);
	struct kv_value value;
	int r;

	while ((r = kv_view_seek(&op->view, KV_KEY_SINGLE_SIZE, &key, &value)) == 1) {
		r = kv_op_drop(op, &key, kv_index_node_is_held(node));
		if (r < 0)
			return r;
	}
	return r;
}
