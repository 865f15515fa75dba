/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What another process has left in DRAM: a daemon that was killed, or has made way.
 *
 * An object that has all of a version that is committed says so in its mark, with a sum over the
 * sums of its chunks: version numbers of what was lost with a process come again for other content,
 * and the index may be behind the mark, or ahead of it. So it is taken for the content that the
 * index has if that has the same sums. It is taken when its file is first asked for, or else by a
 * thread.
 *
 * Where an object has a part of a version, nothing says which: the thread looks at each chunk, and
 * takes those whose sums are right. Who asks for the file before that reads it from the devices.
 *
 * The thread begins with what was used longest ago, so that all of it is evicted in that order.
 * What it has not seen yet counts as memory that mappings keep.
 */
#include "fs/core_internal.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <xxhash.h>

struct kv_legacy {
	struct kv_mark mark;
	int64_t last_use_ns; /* INT64_MIN: of nothing that there is */
	bool taken;          /* lock */
};

/* ---- Sums ---- */

struct summed {
	uint64_t number;
	uint64_t sum;
	struct kv_bits bits;
};

/* Lock held, all segments in memory. Of content and holes, not of where they lie. */
static int sum_of(struct kv_version *version, uint64_t *ret_sum)
{
	XXH3_state_t *state = XXH3_createState();
	struct kv_segment *segment;

	if (!state)
		return -ENOMEM;
	(void)XXH3_64bits_reset_withSeed(state, version->size);
	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			const struct kv_slot *slot = &segment->slots[i];
			struct summed summed = {
				.number = segment->number * KV_SEGMENT_CHUNKS + i,
				.sum = slot->sum,
			};

			if (slot->extent_count == 0)
				continue;
			kv_slot_bits(slot, &summed.bits);
			(void)XXH3_64bits_update(state, &summed, sizeof(summed));
		}
	}
	*ret_sum = XXH3_64bits_digest(state);
	(void)XXH3_freeState(state);
	return 0;
}

int kv_version_mark_locked(struct kv_version *version)
{
	struct kv_mark mark = {.kind = KV_MARK_NONE, .version = version->number};

	if (!version->file->core->outlives || version->state != KV_VERSION_COMMITTED ||
		!version->object)
		return 0;
	if (!version->damaged && !version->all_hot)
		mark.kind = KV_MARK_PART;
	/* Clients may come to map it, so it must never be taken for a part, which can be cut. */
	else if (!version->damaged && sum_of(version, &mark.sum) == 0)
		mark.kind = KV_MARK_WHOLE;
	return kv_object_mark(version->object, &mark);
}

/* ---- Taking a whole one ---- */

static int load_map(struct kv_version *version)
{
	uint32_t count = kv_chunk_count(version->size);
	int r = 0;

	for (uint64_t i = 0; i < count && r == 0; i += KV_SEGMENT_CHUNKS)
		r = kv_map_load(version, (uint32_t)i);
	return r;
}

/* Lock held. The object has all pages, and its chunks are as the devices have them. */
static void make_hot(struct kv_version *version)
{
	struct kv_segment *segment;

	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			struct kv_slot *slot = &segment->slots[i];
			struct kv_bits pages = {0};

			kv_bits_set(&pages, 0,
				kv_chunk_used(
					version->size, segment->number * KV_SEGMENT_CHUNKS + i));
			kv_slot_charge_pages(version, slot, &pages);
			if (slot->state == KV_CHUNK_COLD)
				slot->state = KV_CHUNK_HOT;
		}
	}
	version->all_hot = true;
	/* Whoever had it mapped may have it still. */
	version->exposed = true;
}

static bool is_of(struct kv_version *version, const struct kv_mark *mark)
{
	uint64_t sum;

	return load_map(version) == 0 && sum_of(version, &sum) == 0 && sum == mark->sum;
}

static bool adopt(struct kv_version *version, struct kv_found *found, const struct kv_mark *mark)
{
	uint64_t bytes = kv_round_up(version->size, KV_BLOCK_SIZE);
	KV_LOCKED(&version->lock);

	if (found->size != version->size || found->allocated < bytes || !is_of(version, mark) ||
		kv_core_charge_found(version->file->core, bytes) < 0)
		return false;
	make_hot(version);
	assert(version->charged << KV_BLOCK_SHIFT == bytes);
	version->object = kv_steal_ptr(&found->object);
	version->object_size = version->size;
	kv_version_relist_locked(version, true);
	return true;
}

static int compare(const void *a, const void *b)
{
	const struct kv_mark *one = &((const struct kv_legacy *)a)->mark;
	const struct kv_mark *other = &((const struct kv_legacy *)b)->mark;

	if (one->ino != other->ino)
		return one->ino < other->ino ? -1 : 1;
	return one->version < other->version ? -1 : one->version > other->version;
}

static bool take(struct kv_core *core, struct kv_legacy *legacy)
{
	KV_LOCKED(&core->legacies.lock);

	if (legacy->taken)
		return false;
	legacy->taken = true;
	atomic_fetch_sub(&core->legacies.left, 1);
	return true;
}

/* The first one for version NUMBER of INO, or NULL. */
static struct kv_legacy *first_for(struct kv_core *core, uint64_t ino, uint64_t number)
{
	const struct kv_legacy key = {.mark = {.ino = ino, .version = number}};
	struct kv_legacy *legacy = bsearch(&key, core->legacies.list, core->legacies.count,
		sizeof(*core->legacies.list), compare);

	while (legacy && legacy > core->legacies.list && compare(legacy - 1, &key) == 0)
		legacy--;
	return legacy;
}

void kv_version_adopt(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	const struct kv_legacy *end = core->legacies.list + core->legacies.count;
	struct kv_legacy *legacy;

	if (atomic_load(&core->legacies.left) == 0)
		return;
	legacy = first_for(core, version->file->ino, version->number);
	for (const struct kv_legacy *first = legacy;
		legacy && legacy < end && !version->object && compare(legacy, first) == 0;
		legacy++) {
		struct kv_found found;

		if (legacy->mark.kind != KV_MARK_WHOLE || !take(core, legacy) ||
			kv_object_find(core->dram, &legacy->mark, &found) < 0)
			continue;
		if (adopt(version, &found, &legacy->mark))
			kv_stat_add(&core->stats->adopted, 1);
		kv_object_free(found.object);
	}
}

int kv_adopt_whole(struct kv_core *core, uint64_t ino, uint64_t number, struct kv_found *ret_found)
{
	const struct kv_legacy *end = core->legacies.list + core->legacies.count;
	struct kv_legacy *first = first_for(core, ino, number);

	for (struct kv_legacy *legacy = first;
		legacy && legacy < end && compare(legacy, first) == 0; legacy++)
		if (legacy->mark.kind == KV_MARK_WHOLE && take(core, legacy) &&
			kv_object_find(core->dram, &legacy->mark, ret_found) == 0)
			return 0;
	return -ENOENT;
}

/* ---- Taking a part ---- */

/* What the devices have of a chunk. */
struct stored {
	struct kv_blocks blocks;
	struct kv_extent extents[KV_CHUNK_BLOCKS];
	unsigned extent_count;
	uint64_t sum;
};

static bool is_stored(struct kv_version *version, uint32_t number, struct stored *ret_stored)
{
	KV_LOCKED(&version->lock);
	int r = kv_map_load(version, number);
	const struct kv_slot *slot = kv_slot_find(version, number);

	if (r < 0 || !slot || slot->state != KV_CHUNK_COLD)
		return false;
	ret_stored->blocks = (struct kv_blocks){.number = number};
	kv_slot_bits(slot, &ret_stored->blocks.bits);
	ret_stored->extent_count = slot->extent_count;
	memcpy(ret_stored->extents, kv_slot_extents(slot),
		slot->extent_count * sizeof(ret_stored->extents[0]));
	ret_stored->sum = slot->sum;
	return true;
}

/* Pages that were allocated and never filled need not be looked at, and would be made by that. */
static bool is_filled(struct kv_object *object, const struct kv_blocks *blocks, uint64_t size)
{
	uint64_t start = (uint64_t)blocks->number << KV_CHUNK_SHIFT;

	KV_BITS_FOREACH (first, end, &blocks->bits) {
		uint64_t from = start + ((uint64_t)first << KV_BLOCK_SHIFT);
		uint64_t to = kv_min_u64(start + ((uint64_t)end << KV_BLOCK_SHIFT), size);

		if (!kv_object_has(object, from, to - from))
			return false;
	}
	return true;
}

static bool is_good(struct kv_object *object, struct stored *stored, uint64_t size)
{
	size_t length = (size_t)kv_bits_end(&stored->blocks.bits) << KV_BLOCK_SHIFT;
	void *memory;
	uint64_t sum;
	int r;

	if (!is_filled(object, &stored->blocks, size) ||
		kv_object_map(object, (uint64_t)stored->blocks.number << KV_CHUNK_SHIFT, length,
			&memory) < 0)
		return false;
	stored->blocks.memory = memory;
	r = kv_blocks_sum(&stored->blocks, stored->extents, stored->extent_count, &sum);
	kv_object_unmap(memory, length);
	return r == 0 && sum == stored->sum;
}

/* A byte for each chunk that OBJECT has, which nobody else knows of; frees the pages of others. */
static uint8_t *find_good(
	struct kv_version *version, struct kv_object *object, uint64_t *ret_blocks)
{
	uint32_t count = kv_chunk_count(version->size);
	_cleanup_free_ struct stored *stored = malloc(sizeof(*stored));
	_cleanup_free_ uint8_t *good = calloc(count, 1);

	if (!stored || !good)
		return NULL;
	*ret_blocks = 0;
	for (uint32_t i = 0; i < count && !atomic_load(&version->file->core->stopping); i++) {
		good[i] = is_stored(version, i, stored) && is_good(object, stored, version->size);
		if (good[i])
			*ret_blocks += kv_bits_count(&stored->blocks.bits);
		else if (kv_object_punch(object, (uint64_t)i << KV_CHUNK_SHIFT, KV_CHUNK_SIZE) < 0)
			return NULL;
	}
	return kv_steal_ptr(&good);
}

/* Lock held. The chunk is in the object. */
static void make_chunk_hot(struct kv_version *version, uint32_t number)
{
	struct kv_slot *slot = kv_slot_find(version, number);
	struct kv_bits bits;

	/* Somebody reads it from the devices at this moment: its pages are as good for the next. */
	if (!slot || slot->state != KV_CHUNK_COLD || slot->charge || slot->flags & KV_SLOT_BUSY)
		return;
	kv_slot_bits(slot, &bits);
	kv_slot_charge_pages(version, slot, &bits);
	slot->state = KV_CHUNK_HOT;
}

/* Of BYTES that are charged for. Returns those that were not needed. */
static uint64_t attach_part(
	struct kv_version *version, struct kv_found *found, const uint8_t *good, uint64_t bytes)
{
	uint32_t count = kv_chunk_count(version->size);
	KV_LOCKED(&version->lock);

	/* Opened meanwhile, or replaced and lost. */
	if (version->object || version->state != KV_VERSION_COMMITTED || version->damaged)
		return bytes;
	for (uint32_t i = 0; i < count; i++)
		if (good[i])
			make_chunk_hot(version, i);
	version->object = kv_steal_ptr(&found->object);
	version->object_size = version->size;
	(void)kv_version_is_resident_locked(version);
	kv_version_relist_locked(version, true);
	kv_stat_add(&version->file->core->stats->adopted, 1);
	return bytes - (version->charged << KV_BLOCK_SHIFT);
}

static bool has_object(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	return version->object != NULL;
}

static void adopt_part(
	struct kv_version *version, struct kv_found *found, const struct kv_mark *mark)
{
	struct kv_core *core = version->file->core;
	_cleanup_free_ uint8_t *good = NULL;
	uint64_t blocks;

	if (version->number != mark->version || version->size != found->size || has_object(version))
		return;
	good = find_good(version, found->object, &blocks);
	if (!good || blocks == 0 || kv_core_charge_found(core, blocks << KV_BLOCK_SHIFT) < 0)
		return;
	kv_core_uncharge(core, attach_part(version, found, good, blocks << KV_BLOCK_SHIFT));
}

/* ---- The thread ---- */

/* Nobody asked for its version, and nobody will. */
static void discard(struct kv_core *core, struct kv_legacy *legacy)
{
	struct kv_found found;

	if (take(core, legacy) && kv_object_find(core->dram, &legacy->mark, &found) == 0)
		kv_object_free(found.object);
}

static void look_at(struct kv_core *core, struct kv_legacy *legacy)
{
	struct kv_version *version;
	struct kv_found found;
	struct kv_file *file;

	if (kv_file_get(core, legacy->mark.ino, &file) < 0)
		return;
	/* Which takes what is whole. */
	if (kv_file_current(file, &version) == 0) {
		if (legacy->mark.kind == KV_MARK_PART && take(core, legacy) &&
			kv_object_find(core->dram, &legacy->mark, &found) == 0) {
			adopt_part(version, &found, &legacy->mark);
			kv_object_free(found.object);
		}
		kv_version_unref(version);
	}
	kv_file_put(file);
}

static void note_use(struct kv_core *core, struct kv_legacy *legacy)
{
	struct kv_inode inode;

	legacy->last_use_ns = INT64_MIN;
	if (kv_index_get(core->index, legacy->mark.ino, &inode) == 0 && inode.nlink > 0 &&
		S_ISREG(inode.mode) && inode.version == legacy->mark.version)
		legacy->last_use_ns = inode.last_use_ns;
}

static int compare_use(const void *a, const void *b)
{
	const struct kv_legacy *one = *(struct kv_legacy *const *)a;
	const struct kv_legacy *other = *(struct kv_legacy *const *)b;

	return one->last_use_ns < other->last_use_ns ? -1 : one->last_use_ns > other->last_use_ns;
}

static void *adopt_main(void *arg)
{
	struct kv_core *core = arg;
	size_t count = core->legacies.count;
	/* Without memory for an order they come in any. */
	struct kv_legacy **order = calloc(count, sizeof(*order));

	/* Of versions that are not current any more somebody may have one open. */
	kv_core_await_word(core);
	for (size_t i = 0; i < count; i++) {
		note_use(core, &core->legacies.list[i]);
		if (order)
			order[i] = &core->legacies.list[i];
	}
	if (order)
		qsort(order, count, sizeof(*order), compare_use);
	for (size_t i = 0; i < count && !atomic_load(&core->stopping); i++) {
		struct kv_legacy *legacy = order ? order[i] : &core->legacies.list[i];

		if (legacy->last_use_ns > INT64_MIN)
			look_at(core, legacy);
		discard(core, legacy);
	}
	free(order);
	kv_log_info("adopt", "found in DRAM objects=%zu taken=%llu", count,
		(unsigned long long)kv_stat_get(&core->stats->adopted));
	return NULL;
}

int kv_adopt_start(struct kv_core *core)
{
	_cleanup_free_ struct kv_mark *marks = NULL;
	size_t count;
	int r;

	if (!core->outlives)
		return 0;
	r = kv_unsettled_find(core);
	if (r == 0)
		r = kv_dram_found(core->dram, kv_unsettled_has, core, &marks, &count);
	if (r < 0 || count == 0)
		return r;
	core->legacies.list = calloc(count, sizeof(*core->legacies.list));
	if (!core->legacies.list)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++) {
		core->legacies.list[i].mark = marks[i];
		/* Names of objects are never used twice. */
		atomic_store(
			&core->objects, kv_max_u64(atomic_load(&core->objects), marks[i].serial));
	}
	qsort(core->legacies.list, count, sizeof(*core->legacies.list), compare);
	core->legacies.count = count;
	atomic_store(&core->legacies.left, count);
	return kv_core_thread(core, adopt_main);
}

void kv_adopt_done(struct kv_core *core)
{
	(void)pthread_mutex_destroy(&core->legacies.lock);
	free(core->legacies.list);
}
