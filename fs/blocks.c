/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The content of a chunk's blocks, between its object, memory and the devices. With holes between
 * them they are packed where they are copied anyway, so that a chunk of many holes is one transfer.
 */
#include "fs/core_internal.h"
#include "fs/sum.h"

static size_t bytes_of(unsigned blocks)
{
	return (size_t)blocks << KV_BLOCK_SHIFT;
}

int kv_blocks_load(const struct kv_blocks *blocks, struct kv_object *object)
{
	uint64_t start = (uint64_t)blocks->number << KV_CHUNK_SHIFT;
	unsigned done = 0;

	KV_BITS_FOREACH (first, end, &blocks->bits) {
		int r = kv_object_read(object,
			blocks->memory + bytes_of(blocks->packed ? done : first),
			bytes_of(end - first), start + bytes_of(first));

		if (r < 0)
			return r;
		done += end - first;
	}
	return 0;
}

int kv_blocks_store(const struct kv_blocks *blocks, struct kv_object *object, uint64_t size)
{
	uint64_t start = (uint64_t)blocks->number << KV_CHUNK_SHIFT;
	unsigned done = 0;

	KV_BITS_FOREACH (first, end, &blocks->bits) {
		uint64_t from = start + bytes_of(first);
		uint64_t to = kv_min_u64(start + bytes_of(end), size);

		if (from >= to)
			break;
		int r = kv_object_write(object,
			blocks->memory + bytes_of(blocks->packed ? done : first), to - from, from);
		if (r < 0)
			return r;
		done += end - first;
	}
	return 0;
}

int kv_blocks_sum(const struct kv_blocks *blocks, const struct kv_extent *extents, unsigned count,
	uint64_t *ret_sum)
{
	XXH3_state_t *state;
	unsigned at = 0;

	if (count == 1) {
		*ret_sum = XXH3_64bits(
			kv_blocks_memory(blocks, extents, 0), bytes_of(extents[0].count));
		return 0;
	}
	state = XXH3_createState();
	if (!state)
		return -ENOMEM;
	(void)XXH3_64bits_reset(state);
	for (unsigned i = 0; i < count; i++) {
		(void)XXH3_64bits_update(state, kv_blocks_memory(blocks, &extents[i], at),
			bytes_of(extents[i].count));
		at += extents[i].count;
	}
	*ret_sum = XXH3_64bits_digest(state);
	XXH3_freeState(state);
	return 0;
}

static bool goes_on(const struct kv_io *before, const struct kv_io *io)
{
	return before->device == io->device && before->offset + before->length == io->offset &&
	       (const uint8_t *)before->memory + before->length == io->memory;
}

unsigned kv_blocks_ios(const struct kv_blocks *blocks, const struct kv_extent *extents,
	unsigned count, const struct kv_io *template, struct kv_io *ret_ios)
{
	unsigned ios = 0, at = 0;

	for (unsigned i = 0; i < count; i++) {
		struct kv_io io = *template;

		io.device = extents[i].device;
		io.offset = kv_extent_offset(&extents[i]);
		io.memory = kv_blocks_memory(blocks, &extents[i], at);
		io.length = extents[i].count << KV_BLOCK_SHIFT;
		if (ios > 0 && goes_on(&ret_ios[ios - 1], &io))
			ret_ios[ios - 1].length += io.length;
		else
			ret_ios[ios++] = io;
		at += extents[i].count;
	}
	return ios;
}
