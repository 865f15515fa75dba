/* SPDX-License-Identifier: Apache-2.0 */
/* Publishing: a new version's map replaces the old one, in one operation with its space. */
#include <sys/stat.h>

#include "index/index_internal.h"

struct publish {
	struct kv_op *op;
	const struct kv_content *content;
	struct kv_index_node node;
	uint64_t limit; /* chunks that the new size has */
	size_t next;    /* first listed chunk that has not been written to the map */
	struct kv_drops drops;
	int64_t grown; /* extents more than before */
	/* The segment that is being made. */
	uint8_t *map;
	size_t map_size;
	size_t map_capacity;
	uint8_t inline_map[KV_INLINE_MAP_MAX];
};

/* ---- Dropping extents ---- */

int kv_drops_add(struct kv_drops *drops, const struct kv_chunk *chunk)
{
	size_t wanted = drops->count + chunk->extent_count;

	if (wanted > drops->capacity) {
		size_t capacity = wanted * 2;
		struct kv_extent *grown = reallocarray(drops->extents, capacity, sizeof(*grown));

		if (!grown)
			return -ENOMEM;
		drops->extents = grown;
		drops->capacity = capacity;
	}
	if (chunk->extent_count > 0)
		memcpy(drops->extents + drops->count, chunk->extents,
			chunk->extent_count * sizeof(*drops->extents));
	drops->count = wanted;
	return 0;
}

int kv_op_count_blocks(struct kv_op *op, struct kv_index_node *node, const struct kv_chunk *gone)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, node->inode.ino);
	uint64_t blocks = kv_chunk_blocks(gone);

	if (blocks > node->inode.blocks)
		return kv_index_damaged(op->index, &key, "block count");
	node->inode.blocks -= blocks;
	return 0;
}

int kv_op_drop_extents(struct kv_op *op, struct kv_drops *drops)
{
	size_t freed = 0;

	for (size_t i = 0; i < drops->count; i++) {
		int r = kv_space_op_drop(op, &drops->extents[i]);

		if (r < 0)
			return r;
		if (r == 1)
			drops->extents[freed++] = drops->extents[i];
	}
	drops->count = freed;
	return freed > 0 ? kv_space_op_expect_release(op) : 0;
}

int kv_drops_finish(
	struct kv_drops *drops, const struct kv_op *op, int r, struct kv_freed *ret_freed)
{
	if (r < 0 || drops->count == 0) {
		free(drops->extents);
		*drops = (struct kv_drops){0};
	}
	if (r >= 0)
		*ret_freed = (struct kv_freed){
			.extents = drops->extents,
			.count = drops->count,
			.sequence = op->sequence,
		};
	return r;
}

/* ---- Making segments ---- */

static int map_make_room(struct publish *publish, size_t size)
{
	size_t wanted = publish->map_size + size;
	uint8_t *grown;

	if (wanted <= publish->map_capacity)
		return 0;
	grown = realloc(publish->map, wanted * 2);
	if (!grown)
		return -ENOMEM;
	publish->map = grown;
	publish->map_capacity = wanted * 2;
	return 0;
}

static int map_add(struct publish *publish, const struct kv_chunk *chunk)
{
	if (chunk->extent_count == 0)
		return 0; /* a hole */
	publish->grown += chunk->extent_count;
	if (map_make_room(publish, kv_chunk_record_size(chunk->extent_count)) < 0)
		return -ENOMEM;
	publish->map_size += kv_chunk_encode(chunk, publish->map + publish->map_size);
	return 0;
}

static int publish_drop(struct publish *publish, const struct kv_chunk *old)
{
	int r = kv_op_count_blocks(publish->op, &publish->node, old);

	return r < 0 ? r : kv_drops_add(&publish->drops, old);
}

static bool chunks_equal(const struct kv_chunk *a, const struct kv_chunk *b)
{
	if (a->extent_count != b->extent_count || a->sum != b->sum)
		return false;
	for (uint32_t i = 0; i < a->extent_count; i++) {
		const struct kv_extent *x = &a->extents[i];
		const struct kv_extent *y = &b->extents[i];

		if (x->start != y->start || x->device != y->device || x->block != y->block ||
			x->count != y->count)
			return false;
	}
	return true;
}

/* One chunk of the new map: OLD is what the index has (NULL: a hole), LISTED what the caller wants.
 */
static int publish_chunk(
	struct publish *publish, const struct kv_chunk *old, const struct kv_chunk *listed)
{
	int r = 0;

	if (old)
		publish->grown -= old->extent_count;
	if (!listed) {
		bool stays = !publish->content->replace && old->number < publish->limit;

		return stays ? map_add(publish, old) : publish_drop(publish, old);
	}
	publish->next++;
	if (listed->origin == KV_CHUNK_KEPT) {
		/* The caller's idea of the map must be ours, or its bytes are of another version.
		 */
		if (old ? !chunks_equal(old, listed) : listed->extent_count > 0)
			return -ESTALE;
		return old ? map_add(publish, old) : 0;
	}
	if (old)
		r = publish_drop(publish, old);
	publish->node.inode.blocks += kv_chunk_blocks(listed);
	return r < 0 ? r : map_add(publish, listed);
}

static const struct kv_chunk *next_listed(const struct publish *publish)
{
	return publish->next < publish->content->chunk_count
		       ? &publish->content->chunks[publish->next]
		       : NULL;
}

/* The segment is in publish->map: to the inode if the whole map fits there, else to its record. */
static int segment_put(struct publish *publish, uint64_t number, bool had_record)
{
	struct kv_key key = kv_key_pair(KV_TABLE_MAP, publish->node.inode.ino, number);
	bool fits = publish->limit <= KV_SEGMENT_CHUNKS && publish->map_size <= KV_INLINE_MAP_MAX;
	uint8_t *data;

	if (number == 0) {
		publish->node.tail = publish->inline_map;
		publish->node.tail_size = fits ? publish->map_size : 0;
		if (publish->node.tail_size > 0)
			memcpy(publish->inline_map, publish->map, publish->map_size);
	}
	if (publish->map_size == 0 || (number == 0 && fits))
		return had_record ? kv_op_drop(publish->op, &key, false) : 0;
	data = kv_op_put(publish->op, &key, publish->map_size, false);
	if (!data)
		return -ENOMEM;
	memcpy(data, publish->map, publish->map_size);
	return 0;
}

/* Merges the old segment with what is listed for it. OLD_NODE still has the old tail. */
static int publish_segment(
	struct publish *publish, const struct kv_index_node *old_node, uint64_t number)
{
	struct kv_view *view = &publish->op->view;
	struct kv_map_reader reader;
	struct kv_chunk old;
	int had = kv_view_segment(view, old_node, number, &reader);
	int more = had == 1 ? kv_view_next_chunk(view, old_node, &reader, &old) : had;

	publish->map_size = 0;
	while (more >= 0) {
		const struct kv_chunk *listed = next_listed(publish);
		bool both;
		bool use_old;
		int r;

		if (listed && listed->number / KV_SEGMENT_CHUNKS != number)
			listed = NULL;
		if (more == 0 && !listed)
			break;
		both = more == 1 && listed && listed->number == old.number;
		use_old = both || (more == 1 && (!listed || old.number < listed->number));
		r = publish_chunk(publish, use_old ? &old : NULL, both || !use_old ? listed : NULL);
		if (r < 0)
			return r;
		if (use_old)
			more = kv_view_next_chunk(view, old_node, &reader, &old);
	}
	if (more < 0)
		return more;
	return segment_put(publish, number, had == 1 && (number > 0 || old_node->tail_size == 0));
}

/* The next segment at or behind AT to make: segment 0 always, those listed, old ones that change.
 */
static int next_segment(struct publish *publish, const struct kv_index_node *old_node, uint64_t *at)
{
	const struct kv_chunk *listed = next_listed(publish);
	uint64_t cut = publish->content->replace ? 0 : publish->limit / KV_SEGMENT_CHUNKS;
	uint64_t old = kv_max_u64(*at, cut);
	int r;

	if (*at == 0)
		return 1;
	r = kv_view_next_segment(&publish->op->view, old_node, &old);
	if (r < 0 || (r == 0 && !listed))
		return r;
	if (r == 0 || (listed && listed->number / KV_SEGMENT_CHUNKS < old))
		*at = listed->number / KV_SEGMENT_CHUNKS;
	else
		*at = old;
	return 1;
}

static int publish_map(struct publish *publish)
{
	struct kv_index_node old_node = publish->node;
	uint64_t at = 0;
	int r;

	while ((r = next_segment(publish, &old_node, &at)) == 1) {
		r = publish_segment(publish, &old_node, at++);
		if (r < 0)
			return r;
	}
	return r;
}

/* ---- Space ---- */

/* References that come, before those that go: an extent that moves within the file is never free.
 */
static int publish_space(struct publish *publish, enum kv_chunk_origin origin)
{
	for (size_t i = 0; i < publish->content->chunk_count; i++) {
		const struct kv_chunk *chunk = &publish->content->chunks[i];

		for (uint32_t k = 0; chunk->origin == origin && k < chunk->extent_count; k++) {
			int r = origin == KV_CHUNK_SHARED
					? kv_space_op_share(publish->op, &chunk->extents[k])
					: kv_space_op_use(publish->op, &chunk->extents[k]);

			if (r < 0)
				return r;
		}
	}
	return 0;
}

/* ---- Held records ---- */

/* The records of one table of the inode go to the pending layer as they are. */
static int unhold_table(struct kv_op *op, enum kv_table table, uint64_t ino)
{
	struct kv_key key = kv_key_pair(table, ino, 0);
	struct kv_value value;
	int r;

	while ((r = kv_view_seek(&op->view, KV_KEY_SINGLE_SIZE, &key, &value)) == 1) {
		uint8_t *data = kv_op_put(op, &key, value.size, false);

		if (!data)
			return -ENOMEM;
		if (value.size > 0)
			memcpy(data, value.data, value.size);
		key = kv_key_pair(table, ino, kv_key_b(&key) + 1);
	}
	return r;
}

static int unhold_names(struct kv_op *op, const struct kv_index_node *node)
{
	struct kv_link_walk walk = {0};
	struct kv_place place;
	int r;

	while ((r = kv_view_next_link(&op->view, node, &walk, &place)) == 1) {
		struct kv_entry entry;

		r = kv_view_entry_at(&op->view, &place, &entry);
		entry.held = false;
		if (r == 0)
			r = kv_op_put_entry(op, &entry);
		if (r < 0)
			return r;
	}
	return r;
}

static int unhold(struct kv_op *op, struct kv_index_node *node)
{
	int r = unhold_names(op, node);

	if (r == 0)
		r = unhold_table(op, KV_TABLE_LINK, node->inode.ino);
	if (r == 0)
		r = unhold_table(op, KV_TABLE_XATTR, node->inode.ino);
	node->inode.flags &= ~KV_INODE_HELD;
	if (r == 0 && node->orphan)
		r = kv_op_make_orphan(op, node);
	op->held_inodes--;
	op->inodes++;
	return r;
}

/* ---- The operation ---- */

static int content_check(struct kv_index *index, const struct kv_content *content)
{
	uint64_t limit = kv_div_round_up(content->size, KV_CHUNK_SIZE);
	int64_t last = -1;

	if (content->size > KV_FILE_SIZE_MAX)
		return -EFBIG;
	for (size_t i = 0; i < content->chunk_count; i++) {
		const struct kv_chunk *chunk = &content->chunks[i];

		if (chunk->number <= last || chunk->number >= limit ||
			kv_extents_check(
				&index->record.store, chunk->extents, chunk->extent_count) < 0)
			return -EINVAL;
		last = chunk->number;
	}
	return 0;
}

static void publish_attributes(struct publish *publish)
{
	const struct kv_content *content = publish->content;
	struct kv_inode *inode = &publish->node.inode;

	inode->size = content->size;
	inode->version = content->version;
	inode->mtime_ns = content->mtime_ns;
	inode->ctime_ns = content->ctime_ns;
	/* A quarantined inode stays the first to be evicted. */
	if (inode->flags & KV_INODE_QUARANTINED)
		return;
	/* It may have been read between its publish and this. */
	if (inode->flags & KV_INODE_READ && inode->last_use_ns > content->last_use_ns)
		return;
	inode->last_use_ns = kv_use_round(content->last_use_ns);
	inode->flags &= ~KV_INODE_READ;
}

static int redeem_promise(struct kv_op *op, const struct kv_content *content)
{
	struct kv_domain_change *change;

	if (content->promised == 0)
		return 0;
	change = kv_op_domain(op, content->domain);
	if (!change)
		return -ENOMEM;
	change->redeemed += (int64_t)content->promised;
	return 0;
}

static int publish_inode(struct publish *publish, uint64_t ino)
{
	struct kv_op *op = publish->op;
	struct kv_index_node *node = &publish->node;
	int r = kv_view_node(&op->view, ino, node);

	if (r < 0)
		return r;
	if (!S_ISREG(node->inode.mode) || publish->content->version <= node->inode.version)
		return -EINVAL;
	publish->limit = kv_div_round_up(publish->content->size, KV_CHUNK_SIZE);
	r = publish_space(publish, KV_CHUNK_SHARED);
	if (r == 0)
		r = publish_space(publish, KV_CHUNK_FRESH);
	if (r == 0)
		r = publish_map(publish);
	/* The reserve is for removals: who publishes makes room by these. */
	if (r == 0 && kv_index_is_short(op->index) &&
		(kv_index_node_is_held(node) || publish->grown > 0))
		r = -ENOSPC;
	if (r == 0)
		r = kv_op_drop_extents(op, &publish->drops);
	if (r == 0 && kv_index_node_is_held(node))
		r = unhold(op, node);
	if (r == 0)
		r = redeem_promise(op, publish->content);
	if (r < 0)
		return r;
	publish_attributes(publish);
	return kv_op_put_node(op, node);
}

int kv_index_publish(struct kv_index *index, uint64_t ino, const struct kv_content *content,
	struct kv_inode *ret_inode, struct kv_freed *ret_freed)
{
	struct kv_op op;
	struct publish publish = {.op = &op, .content = content};
	int r = content_check(index, content);

	if (r == 0)
		r = kv_op_begin(&op, index);
	if (r < 0)
		return r;
	r = kv_op_end(&op, publish_inode(&publish, ino));
	free(publish.map);
	if (r == 0)
		*ret_inode = publish.node.inode;
	return kv_drops_finish(&publish.drops, &op, r, ret_freed);
}
