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

static bool has_chunk(struct kv_object *object, uint32_t number)
{
	return !kv_object_is_empty(object, (uint64_t)number << KV_CHUNK_SHIFT, KV_CHUNK_SIZE);
}

/* Lock held. */
static void make_dirty(struct kv_version *version, struct kv_object *object, uint64_t size)
{
	for (uint32_t i = 0; i < kv_chunk_count(size); i++) {
		struct kv_slot *slot = kv_slot_find(version, i);
		struct kv_bits bits = {0};

		if (!has_chunk(object, i))
			continue;
		kv_bits_set(&bits, 0, kv_chunk_used(size, i));
		slot->state = KV_CHUNK_DIRTY;
		/* A prefix, for which no memory is needed. */
		(void)kv_slot_set_bits(slot, &bits);
		kv_slot_charge_pages(version, slot, &bits);
	}
}

static uint64_t count_blocks(struct kv_object *object, uint64_t size)
{
	uint64_t blocks = 0;

	for (uint32_t i = 0; i < kv_chunk_count(size); i++)
		if (has_chunk(object, i))
			blocks += kv_chunk_used(size, i);
	return blocks;
}

int kv_version_attach(struct kv_version *version, struct kv_found *found, uint64_t size)
{
	struct kv_core *core = version->file->core;
	KV_LOCKED(&version->lock);
	int r = make_slots(version, kv_chunk_count(size));

	/* What lies behind the end is of a write that nobody was told of. */
	if (r == 0 && found->size != size)
		r = kv_object_resize(found->object, size);
	uint64_t blocks = r == 0 ? count_blocks(found->object, size) : 0;
	if (r == 0)
		r = kv_space_reserve(core->space, blocks);
	if (r < 0)
		return r;
	r = kv_core_charge_found(core, blocks << KV_BLOCK_SHIFT);
	if (r < 0) {
		kv_space_unreserve(core->space, blocks);
		return r;
	}
	make_dirty(version, found->object, size);
	version->size = version->object_size = size;
	version->blocks = version->dirty = version->reserved = blocks;
	kv_core_dirty_add(core, blocks);
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
		/* Whoever had it mapped may have it still. */
		version->exposed = true;
		/* It is found again by its mark. */
		kv_unsettled_end(version);
		r = kv_version_attach(version, &found, found.size);
		if (r == 0)
			*ret_version = version;
		else
			kv_version_unref(version);
	}
	kv_object_free(found.object);
	return r;
}
