/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing what fills a huge page: two chunks that have nothing yet, in one copy.
 *
 * A page is zeroed by the first copy into it that leaves some of it out, so two copies of one chunk
 * each cost three passes over the memory instead of two (Linux 6.18: 0.21 s/GB of processor time
 * instead of 0.10).
 */
#include "fs/write_internal.h"

#define PAIR_SIZE (UINT64_C(2) * KV_CHUNK_SIZE)

/* Lock held. Nothing is there, and nobody is at it. */
static bool is_empty(const struct kv_slot *slot)
{
	return slot->state == KV_CHUNK_HOLE && slot->charge == 0 && !(slot->flags & KV_SLOT_BUSY);
}

/* Lock held. Whether both chunks are empty, and WRITER has the blocks for them. */
static bool may_claim(struct kv_writer *writer, uint32_t number, const struct kv_bits *bits)
{
	struct kv_version *version = writer->version;
	unsigned needed = 0;
	struct kv_slot *slot;

	for (uint32_t i = number; i < number + 2; i++) {
		if (kv_slot_get(version, i, &slot) < 0 || !is_empty(slot))
			return false;
		needed += KV_CHUNK_BLOCKS - kv_promise_covers(version, i, bits);
	}
	return writer->promised >= needed;
}

/* Lock held. */
static void set_flag(struct kv_version *version, uint32_t number, bool busy)
{
	for (uint32_t i = number; i < number + 2; i++) {
		struct kv_slot *slot = kv_slot_find(version, i);

		slot->flags =
			(uint16_t)(busy ? slot->flags | KV_SLOT_BUSY : slot->flags & ~KV_SLOT_BUSY);
	}
	if (!busy)
		kv_park_wake(version->file->core, version);
}

/* Lock held. */
static void set_pins(struct kv_version *version, uint32_t number, int change)
{
	for (uint32_t i = number; i < number + 2; i++) {
		struct kv_slot *slot = kv_slot_find(version, i);

		slot->pins = (uint16_t)(slot->pins + change);
	}
	version->busy = (unsigned)((int)version->busy + change);
}

/* Both chunks DIRTY with all of their pages, and kept where they are; or false, as they were. */
static bool make_ready(struct kv_writer *writer, uint32_t number)
{
	struct kv_version *version = writer->version;
	uint64_t offset = (uint64_t)number << KV_CHUNK_SHIFT;
	struct kv_bits bits = {0};
	KV_LOCKED(&version->lock);

	kv_bits_set(&bits, 0, KV_CHUNK_BLOCKS);
	if (!may_claim(writer, number, &bits) || kv_writer_object(version, offset + PAIR_SIZE) < 0)
		return false;
	set_flag(version, number, true);
	int r = kv_chunk_add_pair(version, number);
	for (uint32_t i = number; i < number + 2 && r == 0; i++)
		r = kv_writer_make_dirty(writer, i, &bits);
	if (r == 0)
		set_pins(version, number, 1);
	set_flag(version, number, false);
	return r == 0;
}

int64_t kv_writer_pair(
	struct kv_writer *writer, uint64_t offset, uint64_t size, const uint8_t *memory)
{
	struct kv_version *version = writer->version;
	uint32_t number = (uint32_t)(offset >> KV_CHUNK_SHIFT);
	int r;

	/* A last block that is written in part is there as a whole all the same. */
	size = kv_min_u64(size, PAIR_SIZE);
	if (offset % PAIR_SIZE != 0 || size + KV_BLOCK_SIZE <= PAIR_SIZE ||
		!make_ready(writer, number))
		return 0;
	r = kv_object_write(version->object, memory, size, offset);
	KV_LOCKED(&version->lock);
	set_pins(version, number, -1);
	if (r < 0)
		return r;
	version->size = kv_max_u64(version->size, offset + size);
	return (int64_t)size;
}
