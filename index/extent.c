/* SPDX-License-Identifier: Apache-2.0 */
/* Reading chunk maps: from the tail of the inode's record, or segment by segment. */
#include <sys/stat.h>

#include "index/index_internal.h"

static struct kv_key segment_key(const struct kv_index_node *node, uint64_t number)
{
	return kv_key_pair(KV_TABLE_MAP, node->inode.ino, number);
}

int kv_view_segment(struct kv_view *view, const struct kv_index_node *node, uint64_t number,
	struct kv_map_reader *ret_reader)
{
	struct kv_value value = {.data = node->tail, .size = node->tail_size};
	struct kv_key key = segment_key(node, number);

	if (node->tail_size == 0 || number != 0) {
		int r = kv_view_get(view, &key, &value);

		if (r < 0)
			return r == -ENOENT ? 0 : r;
		/* Without a right sum, it has no value; it is not a segment without chunks. */
		if (value.size == 0)
			return kv_index_damaged(view->index, &key, "map segment");
	}
	kv_map_reader_init(ret_reader, &view->index->record.store, value.data, value.size);
	ret_reader->segment = (uint32_t)number;
	return 1;
}

int kv_view_next_segment(struct kv_view *view, const struct kv_index_node *node, uint64_t *number)
{
	struct kv_key key = segment_key(node, *number);
	struct kv_value value;
	int r;

	if (node->tail_size > 0 || node->inode.blocks == 0)
		return 0; /* the map is in the inode, or empty */
	r = kv_view_seek(view, KV_KEY_SINGLE_SIZE, &key, &value);
	if (r == 1 && kv_key_b(&key) > UINT32_MAX / KV_SEGMENT_CHUNKS)
		return kv_index_damaged(view->index, &key, "map segment");
	if (r == 1)
		*number = kv_key_b(&key);
	return r;
}

int kv_view_next_chunk(struct kv_view *view, const struct kv_index_node *node,
	struct kv_map_reader *reader, struct kv_chunk *ret_chunk)
{
	struct kv_key key = segment_key(node, reader->segment);
	int r = kv_map_next(reader, ret_chunk);

	return r < 0 ? kv_index_damaged(view->index, &key, "map segment") : r;
}

/* ---- The map for readers ---- */

struct range {
	uint64_t first;
	uint64_t end;
	void (*chunk)(void *arg, const struct kv_chunk *chunk);
	void *arg;
};

static int map_segment(struct kv_view *view, const struct kv_index_node *node, uint64_t number,
	const struct range *range)
{
	struct kv_map_reader reader;
	struct kv_chunk chunk;
	int r = kv_view_segment(view, node, number, &reader);

	while (r == 1 && (r = kv_view_next_chunk(view, node, &reader, &chunk)) == 1) {
		if (chunk.number >= range->end)
			return 0;
		if (chunk.number >= range->first)
			range->chunk(range->arg, &chunk);
	}
	return r;
}

static int map(struct kv_view *view, uint64_t ino, const struct range *range)
{
	struct kv_index_node node;
	uint64_t number = range->first / KV_SEGMENT_CHUNKS;
	int r = kv_view_node(view, ino, &node);

	if (r < 0)
		return r;
	if (!S_ISREG(node.inode.mode))
		return -EINVAL;
	if (node.tail_size > 0)
		return number == 0 ? map_segment(view, &node, 0, range) : 0;
	while ((r = kv_view_next_segment(view, &node, &number)) == 1 &&
		number * KV_SEGMENT_CHUNKS < range->end) {
		r = map_segment(view, &node, number++, range);
		if (r < 0)
			return r;
	}
	return r < 0 ? r : 0;
}

int kv_index_map(struct kv_index *index, uint64_t ino, uint32_t first, uint32_t count,
	void (*chunk)(void *arg, const struct kv_chunk *chunk), void *arg)
{
	const struct range range = {first, (uint64_t)first + count, chunk, arg};
	struct kv_view view;
	int r;

	kv_view_begin(&view, index);
	r = map(&view, ino, &range);
	kv_view_end(&view);
	return r;
}
