/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A version that the index does not know any more and that somebody has open still: an earlier
 * process has left all of it in DRAM.
 *
 * It is like one that is being written, by nobody, and is never published: what it has is dirty,
 * has the promise of space, and goes to the devices early where dirty bytes are many. Its object
 * keeps its mark, for the process after this one.
 */
#include "fs/core_internal.h"

/* Lock held. All slots, so that what follows cannot fail. */
static int make_slots(struct kv_version *version, uint32_t count)
{
	struct kv_slot *slot;
	int r = 0;

	for (uint32_t i = 0; i < count && r == 0; i += KV_SEGMENT_CHUNKS)
		r = kv_slot_get(
			version, (uint32_t)kv_min_u64(i + KV_SEGMENT_CHUNKS, count) - 1, &slot);
	return r;
}

/* Lock held. */
static void make_dirty(struct kv_version *version, uint64_t size)
{
	for (uint32_t i = 0; i < kv_chunk_count(size); i++) {
		struct kv_slot *slot = kv_slot_find(version, i);
		struct kv_bits bits = {0};

		kv_bits_set(&bits, 0, kv_chunk_used(size, i));
		slot->state = KV_CHUNK_DIRTY;
		/* A prefix, for which no memory is needed. */
		(void)kv_slot_set_bits(slot, &bits);
		kv_slot_charge_pages(version, slot, &bits);
	}
}

static int attach(struct kv_version *version, struct kv_found *found)
{
	struct kv_core *core = version->file->core;
	uint64_t blocks = kv_div_round_up(found->size, KV_BLOCK_SIZE);
	KV_LOCKED(&version->lock);
	int r = make_slots(version, kv_chunk_count(found->size));

	if (r == 0)
		r = kv_space_reserve(core->space, blocks);
	if (r < 0)
		return r;
	r = kv_core_charge_found(core, blocks << KV_BLOCK_SHIFT);
	if (r < 0) {
		kv_space_unreserve(core->space, blocks);
		return r;
	}
	make_dirty(version, found->size);
	version->size = version->object_size = found->size;
	version->blocks = version->dirty = version->reserved = blocks;
	kv_core_dirty_add(core, blocks);
	/* Whoever had it mapped may have it still. */
	version->exposed = true;
	version->object = kv_steal_ptr(&found->object);
	kv_version_relist_locked(version, true);
	return 0;
}

int kv_version_keep(struct kv_file *file, uint64_t number, struct kv_version **ret_version)
{
	struct kv_version *version;
	struct kv_found found;
	int r = kv_adopt_whole(file->core, file->ino, number, &found);

	if (r < 0)
		return r;
	r = found.allocated < found.size ? -ENOENT : kv_version_new(file, NULL, &version);
	if (r == 0) {
		r = attach(version, &found);
		if (r == 0)
			*ret_version = version;
		else
			kv_version_unref(version);
	}
	kv_object_free(found.object);
	return r;
}
