/* SPDX-License-Identifier: Apache-2.0 */
/* Free space: the map of blocks, reservations, releases, and what a commit writes of them. */
#include "index/space_internal.h"

#define LOADED_MAX 8192u
/* Looks at that many loaded groups for one to drop. */
#define DROP_TRIES 16u

/* ---- Bits ---- */

static uint64_t word_mask(uint32_t bit, uint32_t count)
{
	return (count == 64 ? UINT64_MAX : (UINT64_C(1) << count) - 1) << bit;
}

static bool bits_are(const uint64_t *words, uint32_t from, uint32_t count, bool value)
{
	while (count > 0) {
		uint32_t bit = from % 64;
		uint32_t n = (uint32_t)kv_min_u64(64 - bit, count);
		uint64_t mask = word_mask(bit, n);

		if ((words[from / 64] & mask) != (value ? mask : 0))
			return false;
		from += n;
		count -= n;
	}
	return true;
}

static void bits_set(uint64_t *words, uint32_t from, uint32_t count, bool value)
{
	while (count > 0) {
		uint32_t bit = from % 64;
		uint32_t n = (uint32_t)kv_min_u64(64 - bit, count);
		uint64_t mask = word_mask(bit, n);

		words[from / 64] = value ? words[from / 64] | mask : words[from / 64] & ~mask;
		from += n;
		count -= n;
	}
}

/* ---- Groups ---- */

static bool group_may_go(const struct kv_space *space, const struct kv_group *group)
{
	return !group->is_dirty && space->devices[group->device].counts[group->number].busy == 0;
}

static void drop_groups(struct kv_space *space)
{
	for (unsigned i = 0; i < DROP_TRIES && space->loaded_count >= space->loaded_max; i++) {
		struct kv_group *group = TAILQ_FIRST(&space->loaded);

		TAILQ_REMOVE(&space->loaded, group, loaded);
		if (!group_may_go(space, group)) {
			TAILQ_INSERT_TAIL(&space->loaded, group, loaded);
			continue;
		}
		space->devices[group->device].groups[group->number] = NULL;
		space->loaded_count--;
		free(group);
	}
}

static int group_read(struct kv_space *space, struct kv_view *view, struct kv_group *group)
{
	struct kv_space_device *device = &space->devices[group->device];
	struct kv_key key = kv_key_pair(KV_TABLE_SPACE_GROUP, group->device, group->number);
	struct kv_value value;
	unsigned used = 0;
	int r = kv_view_get(view, &key, &value);

	if (r == 0 && kv_group_decode(value.data, value.size,
			      kv_group_blocks(device, group->number), group->used) < 0)
		return kv_index_damaged(space->index, &key, "space group");
	if (r < 0 && r != -ENOENT)
		return r;
	for (size_t i = 0; i < KV_GROUP_WORDS; i++)
		used += (unsigned)__builtin_popcountll(group->used[i]);
	if (used != device->counts[group->number].used)
		return kv_index_damaged(space->index, &key, "space group's count");
	return 0;
}

/* Nothing can be told of the free blocks of a damaged group: let nobody have them. */
static void group_condemn(struct kv_space *space, struct kv_space_device *device, uint64_t number)
{
	uint32_t blocks = kv_group_free(device, number);

	device->counts[number].busy = (uint16_t)(device->counts[number].busy + blocks);
	device->spans[number / KV_SUMMARY_GROUPS].free -= blocks;
	device->free -= blocks;
	space->busy += blocks;
}

int kv_space_load(struct kv_space *space, struct kv_view *view, uint16_t device, uint64_t number,
	struct kv_group **ret_group)
{
	struct kv_group *group = space->devices[device].groups[number];
	int r;

	if (group) {
		TAILQ_REMOVE(&space->loaded, group, loaded);
		TAILQ_INSERT_TAIL(&space->loaded, group, loaded);
		*ret_group = group;
		return 0;
	}
	drop_groups(space);
	group = calloc(1, sizeof(*group));
	if (!group)
		return -ENOMEM;
	group->device = device;
	group->number = number;
	r = group_read(space, view, group);
	if (r < 0) {
		if (r == -EUCLEAN)
			group_condemn(space, &space->devices[device], number);
		free(group);
		return r;
	}
	space->devices[device].groups[number] = group;
	TAILQ_INSERT_TAIL(&space->loaded, group, loaded);
	space->loaded_count++;
	*ret_group = group;
	return 0;
}

/* The part of EXTENT from block AT of the device on that lies in one group. */
static uint32_t extent_part(const struct kv_extent *extent, uint64_t at)
{
	uint64_t end = extent->start + extent->count;

	return (uint32_t)kv_min_u64(end - at, KV_GROUP_BLOCKS - at % KV_GROUP_BLOCKS);
}

static bool part_is(
	const struct kv_group *group, uint32_t from, uint32_t count, enum kv_block_state state)
{
	return bits_are(group->used, from, count, state == KV_BLOCK_USED) &&
	       bits_are(group->busy, from, count, state == KV_BLOCK_BUSY);
}

int kv_space_is(struct kv_space *space, struct kv_view *view, const struct kv_extent *extent,
	enum kv_block_state state)
{
	uint64_t at = extent->start;

	while (at < extent->start + extent->count) {
		uint32_t count = extent_part(extent, at);
		struct kv_group *group;
		int r = kv_space_load(space, view, extent->device, at / KV_GROUP_BLOCKS, &group);

		if (r < 0)
			return r;
		if (!part_is(group, (uint32_t)(at % KV_GROUP_BLOCKS), count, state))
			return 0;
		at += count;
	}
	return 1;
}

static void group_mark_dirty(struct kv_space *space, struct kv_group *group)
{
	if (group->is_dirty)
		return;
	group->is_dirty = true;
	TAILQ_INSERT_TAIL(&space->dirty, group, dirty);
}

static void count_state(
	struct kv_space *space, const struct kv_group *group, enum kv_block_state state, int blocks)
{
	struct kv_space_device *device = &space->devices[group->device];
	struct kv_group_count *count = &device->counts[group->number];

	switch (state) {
	case KV_BLOCK_FREE:
		device->free += (uint64_t)(int64_t)blocks;
		device->spans[group->number / KV_SUMMARY_GROUPS].free += (uint32_t)blocks;
		break;
	case KV_BLOCK_BUSY:
		count->busy = (uint16_t)(count->busy + blocks);
		space->busy += (uint64_t)(int64_t)blocks;
		break;
	case KV_BLOCK_USED:
		count->used = (uint16_t)(count->used + blocks);
		space->used += (uint64_t)(int64_t)blocks;
		break;
	}
}

void kv_space_move(struct kv_space *space, const struct kv_extent *extent, enum kv_block_state from,
	enum kv_block_state to)
{
	uint64_t at = extent->start;

	while (at < extent->start + extent->count) {
		uint32_t count = extent_part(extent, at);
		uint32_t bit = (uint32_t)(at % KV_GROUP_BLOCKS);
		struct kv_group *group =
			space->devices[extent->device].groups[at / KV_GROUP_BLOCKS];

		assert(group && part_is(group, bit, count, from));
		bits_set(group->used, bit, count, to == KV_BLOCK_USED);
		bits_set(group->busy, bit, count, to == KV_BLOCK_BUSY);
		count_state(space, group, from, -(int)count);
		count_state(space, group, to, (int)count);
		if (from == KV_BLOCK_USED || to == KV_BLOCK_USED)
			group_mark_dirty(space, group);
		at += count;
	}
}

/* ---- Life ---- */

static int device_init(struct kv_space_device *device, uint64_t blocks)
{
	uint64_t groups = kv_div_round_up(blocks, KV_GROUP_BLOCKS);
	uint64_t spans = kv_div_round_up(groups, KV_SUMMARY_GROUPS);

	/* One more than needed: a device may be empty, and calloc(0) may answer NULL. */
	device->counts = calloc(groups + 1, sizeof(*device->counts));
	device->groups = calloc(groups + 1, sizeof(struct kv_group *));
	device->spans = calloc(spans + 1, sizeof(*device->spans));
	if (!device->counts || !device->groups || !device->spans)
		return -ENOMEM;
	device->blocks = blocks;
	device->group_count = groups;
	device->free = blocks;
	for (uint64_t i = 0; i < spans; i++)
		device->spans[i].free =
			(uint32_t)kv_min_u64((uint64_t)KV_SUMMARY_GROUPS * KV_GROUP_BLOCKS,
				blocks - i * KV_SUMMARY_GROUPS * KV_GROUP_BLOCKS);
	return 0;
}

static int load_summary(
	struct kv_space *space, const struct kv_key *key, const struct kv_value *value)
{
	uint16_t used[KV_SUMMARY_GROUPS];
	uint64_t first = kv_key_b(key) * KV_SUMMARY_GROUPS;
	struct kv_space_device *device;

	if (kv_key_a(key) >= space->device_count ||
		kv_key_b(key) >= KV_DEVICE_BLOCKS_MAX / KV_SUMMARY_GROUPS ||
		kv_summary_decode(value->data, value->size, used) < 0)
		return kv_index_damaged(space->index, key, "space summary");
	device = &space->devices[kv_key_a(key)];
	for (uint64_t i = 0; i < KV_SUMMARY_GROUPS; i++) {
		uint32_t blocks =
			first + i < device->group_count ? kv_group_blocks(device, first + i) : 0;

		if (used[i] > blocks)
			return kv_index_damaged(space->index, key, "space summary");
		if (used[i] == 0)
			continue;
		device->counts[first + i].used = used[i];
		device->spans[kv_key_b(key)].free -= used[i];
		device->free -= used[i];
		space->used += used[i];
	}
	return 0;
}

static int load_summaries(struct kv_space *space, struct kv_view *view)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key = kv_key_pair(KV_TABLE_SPACE_SUMMARY, 0, 0);
	struct kv_value value;
	int r = kv_iter_init(&iter, view, &key, KV_KEY_TABLE_SIZE);

	while (r >= 0 && (r = kv_iter_next(&iter, &key, &value)) == 1)
		r = load_summary(space, &key, &value);
	return r;
}

int kv_space_new(struct kv_index *index, uint64_t quota_blocks, struct kv_space **ret_space)
{
	const struct kv_index_store *store = &index->record.store;
	struct kv_space *space = calloc(1, sizeof(*space));
	struct kv_view view;
	int r = 0;

	if (!space)
		return -ENOMEM;
	space->index = index;
	space->loaded_max = LOADED_MAX;
	TAILQ_INIT(&space->loaded);
	TAILQ_INIT(&space->dirty);
	kv_overlay_init(&space->adopted);
	(void)pthread_mutex_init(&space->lock, NULL);
	space->device_count = store->device_count;
	for (uint32_t i = 0; i < store->device_count && r == 0; i++) {
		r = device_init(&space->devices[i], store->device_blocks[i]);
		space->total += store->device_blocks[i];
	}
	if (quota_blocks != 0)
		space->total = kv_min_u64(space->total, quota_blocks);
	kv_view_begin(&view, index);
	if (r == 0)
		r = load_summaries(space, &view);
	kv_view_end(&view);
	if (r < 0) {
		(void)kv_space_free(space);
		return r;
	}
	*ret_space = space;
	return 0;
}

struct kv_space *kv_space_free(struct kv_space *space)
{
	struct kv_group *group;

	if (!space)
		return NULL;
	while ((group = TAILQ_FIRST(&space->loaded)) != NULL) {
		TAILQ_REMOVE(&space->loaded, group, loaded);
		free(group);
	}
	for (uint32_t i = 0; i < space->device_count; i++) {
		free(space->devices[i].counts);
		free(space->devices[i].groups);
		free(space->devices[i].spans);
	}
	for (size_t i = 0; i < space->release_count; i++)
		free(space->releases[i].extents);
	free(space->releases);
	kv_overlay_done(&space->adopted);
	(void)pthread_mutex_destroy(&space->lock);
	free(space);
	return NULL;
}

/* ---- Committing ---- */

static int collect_group(
	const struct kv_space *space, const struct kv_group *group, struct kv_overlay *pending)
{
	struct kv_key key = kv_key_pair(KV_TABLE_SPACE_GROUP, group->device, group->number);
	bool empty = space->devices[group->device].counts[group->number].used == 0;
	struct kv_record *record = kv_record_new(empty ? KV_RECORD_TOMBSTONE : KV_RECORD_VALUE,
		&key, empty ? 0 : KV_GROUP_RECORD_SIZE);

	if (!record)
		return -ENOMEM;
	if (!empty)
		kv_group_encode(group->used, record->value);
	kv_overlay_put(pending, record);
	return 0;
}

static int collect_span(
	const struct kv_space *space, const struct kv_group *group, struct kv_overlay *pending)
{
	const struct kv_space_device *device = &space->devices[group->device];
	uint64_t span = group->number / KV_SUMMARY_GROUPS;
	uint64_t first = span * KV_SUMMARY_GROUPS;
	size_t count = (size_t)kv_min_u64(KV_SUMMARY_GROUPS, device->group_count - first);
	struct kv_key key = kv_key_pair(KV_TABLE_SPACE_SUMMARY, group->device, span);
	uint16_t used[KV_SUMMARY_GROUPS];
	struct kv_record *record;

	if (!device->spans[span].is_dirty)
		return 0;
	for (size_t i = 0; i < count; i++)
		used[i] = device->counts[first + i].used;
	record = kv_record_new(KV_RECORD_VALUE, &key, KV_SUMMARY_RECORD_SIZE);
	if (!record)
		return -ENOMEM;
	kv_summary_encode(used, count, record->value);
	kv_overlay_put(pending, record);
	device->spans[span].is_dirty = false;
	return 0;
}

int kv_space_collect(struct kv_space *space, struct kv_overlay *pending)
{
	struct kv_group *group;
	int r = 0;
	KV_LOCKED(&space->lock);

	TAILQ_FOREACH (group, &space->dirty, dirty)
		space->devices[group->device].spans[group->number / KV_SUMMARY_GROUPS].is_dirty =
			true;
	while (r == 0 && (group = TAILQ_FIRST(&space->dirty)) != NULL) {
		r = collect_span(space, group, pending);
		if (r == 0)
			r = collect_group(space, group, pending);
		if (r < 0)
			break;
		TAILQ_REMOVE(&space->dirty, group, dirty);
		group->is_dirty = false;
	}
	return r;
}

uint64_t kv_space_used(struct kv_space *space)
{
	KV_LOCKED(&space->lock);

	return space->used;
}

/* ---- Reservations ---- */

void kv_space_usage(struct kv_space *space, struct kv_space_usage *ret_usage)
{
	KV_LOCKED(&space->lock);

	*ret_usage = (struct kv_space_usage){
		.total = space->total,
		.used = space->used,
		.busy = space->busy,
		.freed = space->freed,
		.reserved = space->reserved,
	};
}

int kv_space_reserve(struct kv_space *space, uint64_t blocks)
{
	uint64_t free_blocks = 0;
	KV_LOCKED(&space->lock);
	uint64_t taken = space->used + space->busy + space->reserved;

	/* Blocks of a failed device count as free, but cannot be had. */
	for (uint32_t i = 0; i < space->device_count; i++)
		if (!space->devices[i].disabled)
			free_blocks += space->devices[i].free;
	if (taken > space->total || blocks > space->total - taken ||
		space->reserved > free_blocks || blocks > free_blocks - space->reserved)
		return -ENOSPC;
	space->reserved += blocks;
	return 0;
}

void kv_space_unreserve(struct kv_space *space, uint64_t blocks)
{
	KV_LOCKED(&space->lock);

	assert(blocks <= space->reserved);
	space->reserved -= blocks;
}

void kv_space_disable(struct kv_space *space, uint16_t device)
{
	KV_LOCKED(&space->lock);

	assert(device < space->device_count);
	space->devices[device].disabled = true;
}

/* ---- Giving back ---- */

static struct kv_key adopted_key(const struct kv_extent *extent)
{
	return kv_key_pair(KV_TABLE_REFCOUNT, extent->device, extent->start);
}

int kv_space_adopt(struct kv_space *space, const struct kv_extent *extent)
{
	struct kv_key key = adopted_key(extent);
	struct kv_record *record = kv_overlay_find(&space->adopted, &key);

	if (!record) {
		record = kv_record_new(KV_RECORD_VALUE, &key, 4);
		if (!record)
			return -ENOMEM;
		kv_put_le32(record->value, 0);
		kv_overlay_put(&space->adopted, record);
	}
	kv_put_le32(record->value, kv_get_le32(record->value) + 1);
	return 0;
}

bool kv_space_unadopt(struct kv_space *space, const struct kv_extent *extent)
{
	struct kv_key key = adopted_key(extent);
	struct kv_record *record = kv_overlay_find(&space->adopted, &key);

	if (!record)
		return false;
	kv_put_le32(record->value, kv_get_le32(record->value) - 1);
	if (kv_get_le32(record->value) == 0)
		kv_overlay_drop(&space->adopted, &key);
	return true;
}

/* Of an extent freed, adopted and freed again, the last release frees it, whichever that is. */
static void free_extents(struct kv_space *space, struct kv_freed *freed)
{
	for (size_t i = 0; i < freed->count; i++)
		if (!kv_space_unadopt(space, &freed->extents[i])) {
			kv_space_move(space, &freed->extents[i], KV_BLOCK_BUSY, KV_BLOCK_FREE);
			space->freed -= freed->extents[i].count;
		}
	free(freed->extents);
	*freed = (struct kv_freed){0};
}

void kv_space_cancel(struct kv_space *space, const struct kv_extent *extents, size_t count)
{
	KV_LOCKED(&space->lock);

	for (size_t i = 0; i < count; i++)
		kv_space_move(space, &extents[i], KV_BLOCK_BUSY, KV_BLOCK_FREE);
}

void kv_space_renew(struct kv_space *space, const struct kv_extent *extents, size_t count)
{
	KV_LOCKED(&space->lock);

	for (size_t i = 0; i < count; i++) {
		kv_space_move(space, &extents[i], KV_BLOCK_BUSY, KV_BLOCK_FREE);
		space->reserved += extents[i].count;
	}
}

void kv_space_release(struct kv_space *space, struct kv_freed *freed)
{
	KV_LOCKED(&space->lock);

	if (freed->count == 0) {
		free(freed->extents);
		*freed = (struct kv_freed){0};
		return;
	}
	assert(space->expected > 0);
	space->expected--;
	if (freed->sequence <= space->durable) {
		free_extents(space, freed);
		return;
	}
	assert(space->release_count < space->release_capacity);
	space->releases[space->release_count++] = *freed;
	*freed = (struct kv_freed){0};
}

void kv_space_durable(struct kv_space *space, uint64_t sequence)
{
	size_t kept = 0;
	KV_LOCKED(&space->lock);

	space->durable = sequence;
	for (size_t i = 0; i < space->release_count; i++) {
		if (space->releases[i].sequence <= sequence)
			free_extents(space, &space->releases[i]);
		else
			space->releases[kept++] = space->releases[i];
	}
	space->release_count = kept;
}
