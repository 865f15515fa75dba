/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Directory entries: finding, listing, and the operations that make and remove one name.
 *
 * An entry's cookie is a hash of its name and a slot of that hash: it is the key in the
 * directory and the readdir position at once, and stays while the name does.
 */
#include <limits.h>
#include <sys/stat.h>

#include "index/index_internal.h"

/* ---- Entries ---- */

int kv_name_check(const struct kv_name *name)
{
	if (name->length > KV_NAME_MAX)
		return -ENAMETOOLONG;
	if (name->length == 0 || memchr(name->bytes, '/', name->length) ||
		memchr(name->bytes, '\0', name->length) ||
		(name->bytes[0] == '.' &&
			(name->length == 1 || (name->length == 2 && name->bytes[1] == '.'))))
		return -EINVAL;
	return 0;
}

static int entry_decode(struct kv_view *view, const struct kv_key *key,
	const struct kv_value *value, struct kv_entry *ret_entry)
{
	uint64_t cookie = kv_key_b(key);

	if (cookie < KV_HASH_SLOTS || cookie > INT64_MAX ||
		kv_dirent_decode(value->data, value->size, &ret_entry->record) < 0)
		return kv_index_damaged(view->index, key, "directory entry");
	ret_entry->place = (struct kv_place){kv_key_a(key), cookie};
	ret_entry->held = value->held;
	return 0;
}

/* Looks through the slots of one hash, which begin at base_ret_free, for NAME and for a free one.
 */
static int entry_probe(struct kv_view *view, struct kv_place *base_ret_free,
	const struct kv_name *name, struct kv_entry *ret_entry)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	uint64_t base = base_ret_free->cookie;
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, base_ret_free->parent, base);
	struct kv_value value;
	int r = kv_iter_init(&iter, view, &key, KV_KEY_SINGLE_SIZE);

	if (r < 0)
		return r;
	while ((r = kv_iter_next(&iter, &key, &value)) == 1) {
		struct kv_entry entry;

		if (kv_key_b(&key) >= base + KV_HASH_SLOTS)
			break;
		r = entry_decode(view, &key, &value, &entry);
		if (r < 0)
			return r;
		if (entry.record.length == name->length &&
			memcmp(entry.record.name, name->bytes, name->length) == 0) {
			*ret_entry = entry;
			return 0;
		}
		if (entry.place.cookie == base_ret_free->cookie)
			base_ret_free->cookie++;
	}
	return r < 0 ? r : -ENOENT;
}

int kv_view_entry(struct kv_view *view, uint64_t parent, const struct kv_name *name,
	struct kv_entry *ret_entry)
{
	struct kv_place at = {parent, kv_index_hash(view->index, name->bytes, name->length)};

	return entry_probe(view, &at, name, ret_entry);
}

int kv_view_free_place(struct kv_view *view, uint64_t parent, const struct kv_name *name,
	struct kv_place *ret_place)
{
	uint64_t base = kv_index_hash(view->index, name->bytes, name->length);
	struct kv_place at = {parent, base};
	struct kv_entry entry;
	int r = entry_probe(view, &at, name, &entry);

	if (r == 0)
		return -EEXIST;
	if (r != -ENOENT)
		return r;
	if (at.cookie >= base + KV_HASH_SLOTS)
		return -ENOSPC;
	*ret_place = at;
	return 0;
}

int kv_view_entry_at(struct kv_view *view, const struct kv_place *place, struct kv_entry *ret_entry)
{
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, place->parent, place->cookie);
	struct kv_value value;
	int r = kv_view_get(view, &key, &value);

	if (r == -ENOENT)
		return kv_index_damaged(view->index, &key, "missing directory entry");
	return r < 0 ? r : entry_decode(view, &key, &value, ret_entry);
}

int kv_view_is_empty(struct kv_view *view, uint64_t ino)
{
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, ino, 0);
	struct kv_value value;
	int r = kv_view_seek(view, KV_KEY_SINGLE_SIZE, &key, &value);

	return r < 0 ? r : r == 0;
}

int kv_op_put_entry(struct kv_op *op, const struct kv_entry *entry)
{
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, entry->place.parent, entry->place.cookie);
	uint8_t data[KV_DIRENT_RECORD_MAX];
	size_t size = kv_dirent_encode(&entry->record, data);
	uint8_t *record = kv_op_put(op, &key, size, entry->held);

	if (!record)
		return -ENOMEM;
	memcpy(record, data, size);
	return 0;
}

int kv_op_drop_entry(struct kv_op *op, const struct kv_entry *entry)
{
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, entry->place.parent, entry->place.cookie);

	return kv_op_drop(op, &key, entry->held);
}

/* ---- Reading ---- */

int kv_view_entry_node(
	struct kv_view *view, const struct kv_entry *entry, struct kv_index_node *ret_node)
{
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, entry->place.parent, entry->place.cookie);
	struct kv_index_node node;
	int r = kv_view_node(view, entry->record.ino, &node);

	if (r == -ENOENT || (r == 0 && ((node.inode.mode & S_IFMT) != entry->record.type ||
					       node.inode.nlink == 0 ||
					       kv_index_node_is_held(&node) != entry->held)))
		return kv_index_damaged(view->index, &key, "entry without its inode");
	if (r == 0)
		*ret_node = node;
	return r;
}

static int view_lookup(struct kv_view *view, uint64_t parent, const struct kv_name *name,
	struct kv_index_node *ret_node)
{
	struct kv_index_node directory;
	struct kv_entry entry;
	int r = kv_view_directory(view, parent, &directory);

	if (r == 0)
		r = kv_view_entry(view, parent, name, &entry);
	return r < 0 ? r : kv_view_entry_node(view, &entry, ret_node);
}

int kv_index_lookup(struct kv_index *index, uint64_t parent, const char *name, size_t length,
	struct kv_inode *ret_inode)
{
	const struct kv_name what = {name, length};
	struct kv_view view;
	struct kv_index_node node;
	int r = kv_name_check(&what);

	if (r < 0)
		return r;
	kv_view_begin(&view, index);
	r = view_lookup(&view, parent, &what, &node);
	kv_view_end(&view);
	if (r == 0)
		*ret_inode = node.inode;
	return r;
}

/* One name; HAS_ENTRIES: its directory is there. */
static int view_find(struct kv_view *view, uint64_t parent, bool has_entries, struct kv_find *find)
{
	const struct kv_name name = {find->name, find->length};
	struct kv_entry entry;
	int r = kv_name_check(&name);

	find->ino = 0;
	if (r < 0 || !has_entries)
		return r;
	r = kv_view_entry(view, parent, &name, &entry);
	if (r < 0)
		return r == -ENOENT ? 0 : r;
	find->ino = entry.record.ino;
	find->type = entry.record.type;
	find->held = entry.held;
	return 0;
}

int kv_index_find(struct kv_index *index, uint64_t parent, struct kv_find *finds, size_t count)
{
	struct kv_view view;
	struct kv_index_node directory;
	bool has_entries;
	int r;

	kv_view_begin(&view, index);
	r = kv_view_directory(&view, parent, &directory);
	has_entries = r == 0;
	if (r == -ENOENT)
		r = 0;
	for (size_t i = 0; i < count && r == 0; i++)
		r = view_find(&view, parent, has_entries, &finds[i]);
	kv_view_end(&view);
	return r;
}

struct listing {
	bool want_inodes;
	bool (*entry)(void *arg, const struct kv_dirent *dirent);
	void *arg;
};

/* 1 if the callback wants more. */
static int list_entry(
	struct kv_view *view, const struct kv_entry *entry, const struct listing *listing)
{
	struct kv_dirent dirent = {
		.name = entry->record.name,
		.length = entry->record.length,
		.ino = entry->record.ino,
		.type = entry->record.type,
		.cookie = entry->place.cookie,
	};
	struct kv_index_node node;
	int r;

	if (listing->want_inodes) {
		r = kv_view_entry_node(view, entry, &node);
		if (r < 0)
			return r;
		dirent.inode = node.inode;
	}
	return listing->entry(listing->arg, &dirent);
}

static int list(struct kv_view *view, struct kv_key *start, const struct listing *listing)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key;
	struct kv_value value;
	struct kv_entry entry;
	int r = kv_iter_init(&iter, view, start, KV_KEY_SINGLE_SIZE);

	while (r >= 0 && (r = kv_iter_next(&iter, &key, &value)) == 1) {
		r = entry_decode(view, &key, &value, &entry);
		if (r == 0)
			r = list_entry(view, &entry, listing);
		if (r <= 0)
			break;
	}
	return r;
}

int kv_index_readdir(struct kv_index *index, uint64_t ino, uint64_t cookie, bool want_inodes,
	bool (*entry)(void *arg, const struct kv_dirent *dirent), void *arg)
{
	const struct listing listing = {want_inodes, entry, arg};
	struct kv_view view;
	struct kv_index_node directory;
	int r;

	if (cookie >= INT64_MAX)
		return 0;
	kv_view_begin(&view, index);
	r = kv_view_node(&view, ino, &directory);
	if (r == 0 && !S_ISDIR(directory.inode.mode))
		r = -ENOTDIR;
	/* What is left in a retired directory is not seen. */
	if (r == 0 && directory.inode.nlink > 0) {
		struct kv_key start = kv_key_pair(KV_TABLE_DIRENT, ino, cookie + 1);

		r = list(&view, &start, &listing);
	}
	kv_view_end(&view);
	return r;
}

int kv_index_name(struct kv_index *index, uint64_t ino, uint64_t *ret_parent, char *ret_name)
{
	struct kv_view view;
	struct kv_index_node node;
	struct kv_entry entry;
	int r;

	kv_view_begin(&view, index);
	r = kv_view_node(&view, ino, &node);
	if (r == 0 && node.inode.cookie == 0)
		r = -ENOENT;
	if (r == 0)
		r = kv_view_entry_at(
			&view, &(struct kv_place){node.inode.parent, node.inode.cookie}, &entry);
	if (r == 0) {
		*ret_parent = entry.place.parent;
		memcpy(ret_name, entry.record.name, entry.record.length);
		ret_name[entry.record.length] = '\0';
	}
	kv_view_end(&view);
	return r;
}

char *kv_view_path(struct kv_view *view, uint64_t ino)
{
	char path[PATH_MAX];
	size_t at = sizeof(path) - 1;

	path[at] = '\0';
	if (ino == KV_ROOT_INO)
		path[--at] = '/';
	/* Each step takes two bytes at least, so that circles end. */
	while (ino != KV_ROOT_INO) {
		struct kv_index_node node;
		struct kv_entry entry;

		if (kv_view_node(view, ino, &node) < 0 || node.inode.cookie == 0 ||
			kv_view_entry_at(view,
				&(struct kv_place){node.inode.parent, node.inode.cookie},
				&entry) < 0 ||
			entry.record.length + 1 > at)
			return NULL;
		at -= entry.record.length;
		memcpy(path + at, entry.record.name, entry.record.length);
		path[--at] = '/';
		ino = node.inode.parent;
	}
	return strdup(path + at);
}
