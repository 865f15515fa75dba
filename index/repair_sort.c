/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What stays in a repaired index: names and inodes that know of each other and hang on the root,
 * files whose whole map is there and whose blocks are nobody else's.
 */
#include "index/repair_internal.h"

/* ---- Names ---- */

/* Whether a name of NODE is at PLACE. 1 or 0 or an error. */
static int place_is_sound(
	struct kv_repair *repair, const struct kv_index_node *node, const struct kv_place *place)
{
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, place->parent, place->cookie);
	struct kv_dirent_record record;
	struct kv_index_node parent;
	struct kv_value value;
	int r = kv_view_get(&repair->view, &key, &value);

	if (r == 0)
		r = kv_view_node(&repair->view, place->parent, &parent);
	if (r < 0)
		return r == -ENOENT ? 0 : r;
	if (kv_dirent_decode(value.data, value.size, &record) < 0)
		return 0;
	return S_ISDIR(parent.inode.mode) && parent.inode.nlink > 0 &&
	       record.ino == node->inode.ino && record.type == (node->inode.mode & S_IFMT) &&
	       place->cookie / KV_HASH_SLOTS ==
		       kv_index_hash(repair->index, record.name, record.length) / KV_HASH_SLOTS;
}

/* Whether the directories above NODE lead to the root. 1 or 0 or an error. */
static int path_is_sound(struct kv_repair *repair, const struct kv_index_node *node)
{
	struct kv_index_node at = *node;

	for (uint64_t steps = 0; at.inode.ino != KV_ROOT_INO; steps++) {
		int r = kv_view_node(&repair->view, at.inode.parent, &at);

		if (r == -ENOENT || (r == 0 && !S_ISDIR(at.inode.mode)) || steps > repair->last_ino)
			return 0;
		if (r < 0)
			return r;
	}
	return 1;
}

int kv_repair_sort_links(struct kv_repair *repair, struct kv_index_node *node, uint32_t *ret_links)
{
	struct kv_link_walk walk = {0};
	struct kv_place place;
	bool first = true;
	bool promoted = false;
	int r;

	*ret_links = 0;
	while ((r = kv_view_next_link(&repair->view, node, &walk, &place)) == 1) {
		struct kv_key key = kv_key_pair(KV_TABLE_LINK, node->inode.ino, walk.next - 1);
		int sound = place_is_sound(repair, node, &place);

		if (sound < 0)
			return sound;
		*ret_links += (uint32_t)sound;
		if (first) {
			first = false;
			promoted = sound == 0;
			continue;
		}
		if (sound && !promoted)
			continue;
		if (kv_repair_drop(repair, &key) < 0)
			return -ENOMEM;
		if (sound) {
			promoted = false;
			node->inode.parent = place.parent;
			node->inode.cookie = place.cookie;
			if (kv_repair_put_node(repair, node) < 0)
				return -ENOMEM;
		}
	}
	return r;
}

static bool is_bad(const struct kv_repair *repair, uint64_t ino)
{
	size_t from = 0;
	size_t to = repair->what->bad_count;

	while (from < to) {
		size_t middle = from + (to - from) / 2;

		if (repair->what->bad[middle] == ino)
			return true;
		if (repair->what->bad[middle] < ino)
			from = middle + 1;
		else
			to = middle;
	}
	return false;
}

static int names_inode(
	struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	uint32_t links;
	int r = kv_view_node(&repair->view, kv_key_a(key), &node);

	(void)value;
	if (r < 0 || node.inode.ino == KV_ROOT_INO)
		return r;
	if (is_bad(repair, node.inode.ino))
		return kv_repair_drop_inode(repair, node.inode.ino, "its data is damaged");
	if (node.inode.flags & KV_INODE_QUARANTINED)
		return kv_repair_drop_inode(
			repair, node.inode.ino, "had failed its checksum before");
	if (node.inode.nlink == 0)
		return kv_repair_drop_inode(repair, node.inode.ino, "had no name any more");
	r = kv_repair_sort_links(repair, &node, &links);
	if (r < 0)
		return r;
	if (links == 0)
		return kv_repair_drop_inode(repair, node.inode.ino, "has no name");
	if (!S_ISDIR(node.inode.mode))
		return 0;
	r = path_is_sound(repair, &node);
	return r == 0  ? kv_repair_drop_inode(repair, node.inode.ino, "no path leads to it")
	       : r < 0 ? r
		       : 0;
}

/* A name stays if its inode knows of it. */
static int names_entry(
	struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value)
{
	const struct kv_place place = {kv_key_a(key), kv_key_b(key)};
	struct kv_dirent_record record;
	struct kv_index_node node;
	int r = kv_dirent_decode(value->data, value->size, &record);

	if (r == 0)
		r = kv_view_node(&repair->view, record.ino, &node);
	if (r == 0)
		r = kv_view_has_link(&repair->view, &node, &place);
	if (r == 0)
		r = place_is_sound(repair, &node, &place);
	if (r == -ENOENT || r == -EUCLEAN)
		r = 0;
	return r == 0 ? kv_repair_drop(repair, key) : r < 0 ? r : 0;
}

/* Further links, attributes and maps stay with their inode. */
static int names_owned(
	struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value)
{
	uint8_t table = key->bytes[0];
	struct kv_xattr_record xattr;
	struct kv_index_node node;
	int r = kv_view_node(&repair->view, kv_key_a(key), &node);

	if (r == -ENOENT)
		return kv_repair_drop(repair, key);
	if (r < 0)
		return r;
	if ((table == KV_TABLE_LINK && S_ISDIR(node.inode.mode)) ||
		(table == KV_TABLE_MAP && (!S_ISREG(node.inode.mode) || node.tail_size > 0 ||
						  node.inode.blocks == 0)))
		return kv_repair_drop(repair, key);
	if (table == KV_TABLE_XATTR &&
		(kv_xattr_decode(value->data, value->size, &xattr) < 0 ||
			kv_key_b(key) / KV_HASH_SLOTS !=
				kv_index_hash(repair->index, xattr.name, xattr.length) /
					KV_HASH_SLOTS))
		return kv_repair_drop(repair, key);
	return 0;
}

static int sort_names(struct kv_repair *repair)
{
	static const struct {
		enum kv_table table;
		kv_repair_record *each;
	} steps[] = {
		{KV_TABLE_INODE, names_inode},
		{KV_TABLE_DIRENT, names_entry},
		{KV_TABLE_LINK, names_owned},
		{KV_TABLE_XATTR, names_owned},
		{KV_TABLE_MAP, names_owned},
	};

	do {
		repair->changed = 0;
		for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
			int r = kv_repair_each(repair, steps[i].table, steps[i].each);

			if (r < 0)
				return r;
		}
	} while (repair->changed > 0);
	return 0;
}

/* ---- Content ---- */

/* NULL, or what is wrong with the segment; counts its blocks. */
static const char *segment_hold(struct kv_repair *repair, const struct kv_index_node *node,
	uint64_t number, uint64_t *blocks, int *ret_error)
{
	uint64_t limit = kv_div_round_up(node->inode.size, KV_CHUNK_SIZE);
	struct kv_map_reader reader;
	struct kv_chunk chunk;
	int r = kv_view_segment(&repair->view, node, number, &reader);

	while (r == 1 && (r = kv_map_next(&reader, &chunk)) == 1) {
		if (chunk.number >= limit)
			return "has data behind its end";
		*blocks += kv_chunk_blocks(&chunk);
		for (uint32_t i = 0; i < chunk.extent_count; i++) {
			int held = kv_tally_hold(&repair->tally, &chunk.extents[i]);

			if (held == -EUCLEAN)
				return "has blocks that belong to another, too";
			if (held < 0)
				*ret_error = held;
		}
	}
	if (r == -EUCLEAN)
		return "its map is damaged";
	if (r < 0)
		*ret_error = r;
	return NULL;
}

static int content_inode(
	struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	const char *wrong = NULL;
	uint64_t blocks = 0;
	uint64_t number = 0;
	int error = 0;
	int r = kv_view_node(&repair->view, kv_key_a(key), &node);

	(void)value;
	if (r < 0 || !S_ISREG(node.inode.mode))
		return r;
	if (node.tail_size > 0) {
		wrong = segment_hold(repair, &node, 0, &blocks, &error);
	} else {
		while (!wrong && error == 0 &&
			(r = kv_view_next_segment(&repair->view, &node, &number)) == 1)
			wrong = segment_hold(repair, &node, number++, &blocks, &error);
	}
	if (r < 0 || error < 0)
		return r < 0 ? r : error;
	if (!wrong && blocks != node.inode.blocks)
		wrong = "has lost a part of its map";
	return wrong ? kv_repair_drop_inode(repair, node.inode.ino, wrong) : 0;
}

/* Leaves in the tally what the files hold that stay. */
int kv_repair_sort(struct kv_repair *repair)
{
	for (;;) {
		int r = sort_names(repair);

		if (r < 0)
			return r;
		kv_tally_done(&repair->tally);
		r = kv_tally_init(&repair->tally, &repair->index->record.store);
		repair->changed = 0;
		if (r == 0)
			r = kv_repair_each(repair, KV_TABLE_INODE, content_inode);
		if (r < 0 || repair->changed == 0)
			return r;
	}
}
