/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Walking the map of a version that may be huge and sparse: what costs is what is there.
 */
#include "fs/core_internal.h"

/* Chunks asked of the index at once: few at first, because the next one is usually near. */
#define PROBE_MIN 32u
#define PROBE_MAX (1u << 20)

struct probe {
	bool found;
	uint32_t number; /* of the first chunk seen */
	uint64_t blocks; /* of all */
};

static void probe_chunk(void *arg, const struct kv_chunk *chunk)
{
	struct probe *probe = arg;

	if (chunk->extent_count > 0 && !probe->found) {
		probe->found = true;
		probe->number = chunk->number;
	}
	for (uint32_t i = 0; i < chunk->extent_count; i++)
		probe->blocks += chunk->extents[i].count;
}

static int next_in_index(
	struct kv_version *version, uint32_t first, uint32_t end, uint32_t *ret_number)
{
	uint32_t step = PROBE_MIN;

	while (first < end) {
		struct probe probe = {0};
		uint32_t count = (uint32_t)kv_min_u64(end - first, step);
		int r = kv_index_map(version->file->core->index, version->file->ino, first, count,
			probe_chunk, &probe);
		if (r < 0)
			return r;
		if (probe.found) {
			*ret_number = probe.number;
			return 0;
		}
		first += count;
		step = step < PROBE_MAX ? step * 2 : step;
	}
	*ret_number = end;
	return 0;
}

/* Where the next answer must be looked for. */
enum where {
	WHERE_HERE,  /* at *ret_number, or nowhere before *ret_end */
	WHERE_INDEX, /* in the index, up to *ret_end */
	WHERE_BASE,  /* in the base, up to *ret_end */
};

/* Lock held. The first chunk behind FIRST that belongs to a segment in memory, at most END. */
static uint32_t next_segment(struct kv_version *version, uint32_t first, uint32_t end)
{
	struct kv_segment key = {.number = first / KV_SEGMENT_CHUNKS + 1};
	struct kv_segment *segment = RB_NFIND(kv_segment_tree, &version->segments, &key);

	if (!segment)
		return end;
	return (uint32_t)kv_min_u64(end, (uint64_t)segment->number * KV_SEGMENT_CHUNKS);
}

static enum where look(struct kv_version *version, uint32_t first, uint32_t end, uint32_t *ret_end,
	bool *ret_found)
{
	KV_LOCKED(&version->lock);
	struct kv_segment key = {.number = first / KV_SEGMENT_CHUNKS};
	bool loaded = RB_FIND(kv_segment_tree, &version->segments, &key);
	struct kv_slot *slot = kv_slot_find(version, first);
	enum kv_chunk_state state = kv_slot_state(version, first);

	*ret_found = false;
	if (slot || (loaded && state == KV_CHUNK_HOLE)) {
		*ret_end = first + 1;
		*ret_found = slot && (state == KV_CHUNK_HOT || state == KV_CHUNK_COLD ||
					     (state == KV_CHUNK_DIRTY && slot->blocks > 0));
		return state == KV_CHUNK_BASE ? WHERE_BASE : WHERE_HERE;
	}
	if (loaded) {
		*ret_end = first + 1;
		return WHERE_BASE;
	}
	*ret_end = next_segment(version, first, end);
	if (version->from_index)
		return WHERE_INDEX;
	if (state == KV_CHUNK_BASE) {
		*ret_end = (uint32_t)kv_min_u64(*ret_end, version->base_chunks);
		return WHERE_BASE;
	}
	return WHERE_HERE;
}

static struct kv_version *base_of(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	return version->base ? kv_version_ref(version->base) : NULL;
}

/* Recursion is bounded by KV_BASE_DEPTH_MAX bases. */
int kv_chunks_next(struct kv_version *version, uint32_t first, uint32_t end, uint32_t *ret_number)
{
	while (first < end) {
		uint32_t part, found;
		bool here;
		int r = 0;

		switch (look(version, first, end, &part, &here)) {
		case WHERE_HERE:
			found = here ? first : part;
			break;
		case WHERE_INDEX:
			r = next_in_index(version, first, part, &found);
			break;
		default: {
			struct kv_version *base = base_of(version);
			/* Committed between the two looks: look again. */
			if (!base)
				continue;
			r = kv_chunks_next(base, first, part, &found);
			kv_version_unref(base);
		}
		}
		if (r < 0)
			return r;
		if (found < part) {
			*ret_number = found;
			return 0;
		}
		first = part;
	}
	*ret_number = end;
	return 0;
}

int kv_chunks_count(struct kv_version *version, uint32_t first, uint32_t end, uint64_t *ret_blocks)
{
	uint64_t blocks = 0;
	uint32_t number;
	int r;

	for (;;) {
		struct kv_bits bits;

		r = kv_chunks_next(version, first, end, &number);
		if (r < 0 || number >= end)
			break;
		r = kv_chunk_bits(version, number, &bits);
		if (r < 0)
			break;
		blocks += kv_bits_count(&bits);
		first = number + 1;
	}
	if (r == 0)
		*ret_blocks = blocks;
	return r;
}

int kv_version_seek(struct kv_version *version, uint64_t offset, int whence, uint64_t *ret_offset)
{
	bool data = whence == SEEK_DATA;
	uint64_t size;

	if (whence != SEEK_DATA && whence != SEEK_HOLE)
		return -EINVAL;
	{
		KV_LOCKED(&version->lock);
		size = version->size;
	}
	if (offset >= size)
		return -ENXIO;
	uint32_t end = kv_chunk_count(size);
	uint64_t at = offset;
	while (at < size) {
		uint32_t number = (uint32_t)(at >> KV_CHUNK_SHIFT);
		unsigned block = (unsigned)(at >> KV_BLOCK_SHIFT) % KV_CHUNK_BLOCKS;
		struct kv_bits bits;
		int r;

		if (data) {
			uint32_t next;
			r = kv_chunks_next(version, number, end, &next);
			if (r < 0)
				return r;
			if (next > number) {
				at = (uint64_t)next << KV_CHUNK_SHIFT;
				if (next < end)
					continue;
				break;
			}
		}
		r = kv_chunk_bits(version, number, &bits);
		if (r < 0)
			return r;
		unsigned found = kv_bits_next(&bits, block, data);
		if (found > block)
			at = ((uint64_t)number << KV_CHUNK_SHIFT) +
			     ((uint64_t)found << KV_BLOCK_SHIFT);
		if (found < KV_CHUNK_BLOCKS)
			break;
	}
	if (data && at >= size)
		return -ENXIO;
	*ret_offset = kv_min_u64(at, size);
	return 0;
}

int kv_version_map(struct kv_version *version, uint32_t first,
	bool (*chunk)(void *arg, const struct kv_chunk_info *info), void *arg)
{
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	uint32_t number = first;

	for (;; number++) {
		struct kv_chunk_info info = {.number = number, .extents = extents};
		{
			KV_LOCKED(&version->lock);
			if (number >= kv_chunk_count(version->size))
				return 0;
			int r = kv_map_load(version, number);
			if (r < 0)
				return r;
			const struct kv_slot *slot = kv_slot_find(version, number);
			info.state = kv_slot_state(version, number);
			if (slot && slot->extent_count > 0) {
				info.sum = slot->sum;
				info.extent_count = slot->extent_count;
				memcpy(extents, kv_slot_extents(slot),
					slot->extent_count * sizeof(*extents));
			}
		}
		if (!chunk(arg, &info))
			return 0;
	}
}
