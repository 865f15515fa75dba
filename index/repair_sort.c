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

/* A look at a file's map. */
struct look {
	const struct kv_index_node *node;
	bool hold; /* its blocks, in the tally: else it is only asked whether it could */
	uint64_t blocks;
	const char *wrong; /* NULL: nothing */
};

static int look_at_chunk(struct kv_repair *repair, struct look *look, const struct kv_chunk *chunk)
{
	look->blocks += kv_chunk_blocks(chunk);
	for (uint32_t i = 0; i < chunk->extent_count; i++) {
		const struct kv_extent *extent = &chunk->extents[i];
		int r = 0;

		if (look->hold)
			r = kv_tally_hold(&repair->tally, extent);
		else if (!kv_tally_may_hold(&repair->tally, extent))
			r = -EUCLEAN;
		if (r == -EUCLEAN)
			look->wrong = "has blocks that belong to another, too";
		else if (r < 0)
			return r;
	}
	return 0;
}

static int look_at_segment(struct kv_repair *repair, struct look *look, uint64_t number)
{
	uint64_t limit = kv_div_round_up(look->node->inode.size, KV_CHUNK_SIZE);
	struct kv_map_reader reader;
	struct kv_chunk chunk;
	int r = kv_view_segment(&repair->view, look->node, number, &reader);

	while (r == 1 && !look->wrong && (r = kv_map_next(&reader, &chunk)) == 1) {
		if (chunk.number >= limit)
			look->wrong = "has data behind its end";
		else if (look_at_chunk(repair, look, &chunk) < 0)
			return -ENOMEM;
	}
	return r;
}

static int look_at_map(struct kv_repair *repair, struct look *look)
{
	uint64_t number = 0;
	int r = 1;

	look->blocks = 0;
	if (look->node->tail_size > 0)
		return look_at_segment(repair, look, 0);
	while (r >= 0 && !look->wrong &&
		(r = kv_view_next_segment(&repair->view, look->node, &number)) == 1)
		r = look_at_segment(repair, look, number++);
	return r;
}

/*
 * What a file that goes had in its map must not keep others from their blocks: so the map is looked
 * at as a whole before a block of it is held.
 */
static int content_inode(
	struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	struct look look = {.node = &node};
	int r = kv_view_node(&repair->view, kv_key_a(key), &node);

	(void)value;
	if (r < 0 || !S_ISREG(node.inode.mode))
		return r;
	r = look_at_map(repair, &look);
	if (r >= 0 && !look.wrong && look.blocks != node.inode.blocks)
		look.wrong = "has lost a part of its map";
	if (r >= 0 && !look.wrong) {
		look.hold = true;
		r = look_at_map(repair, &look);
	}
	if (r == -EUCLEAN)
		look.wrong = "its map is damaged";
	else if (r < 0)
		return r;
	return look.wrong ? kv_repair_drop_inode(repair, node.inode.ino, look.wrong) : 0;
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
