/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening versions for readers: hot ones stay wholly in DRAM while they are open, large ones are
 * streamed.
 */
#include <fcntl.h>
#include <stdio.h>

#include "fs/core_internal.h"

/* More holes than one in HOLE_SHARE blocks, and the file is never filled whole: holes would cost
 * DRAM. */
#define HOLE_SHARE 8u
#define OPEN_PATIENCE_MS 2000u

enum residency {
	RESIDENT,    /* all there */
	FILLABLE,    /* chunks are missing */
	UNALLOCATED, /* only pages of holes are missing */
};

static uint64_t blocks_of(uint64_t size)
{
	return kv_div_round_up(size, KV_BLOCK_SIZE);
}

/* Lock held. Missing segments of a version that is still to be committed count as missing chunks.
 */
static enum residency residency_of(struct kv_version *version)
{
	uint32_t count = kv_chunk_count(version->size);
	bool allocated = true;

	if (version->all_hot || !count)
		return RESIDENT;
	if (!version->object)
		return FILLABLE;
	for (uint32_t i = 0; i < count; i++) {
		const struct kv_slot *slot = kv_slot_find(version, i);

		if (!slot && (version->from_index || i < version->base_chunks))
			return FILLABLE;
		if (slot && slot->state != KV_CHUNK_HOLE && !kv_slot_is_resident(slot))
			return FILLABLE;
		if (slot && slot->flags & KV_SLOT_BUSY)
			return FILLABLE;
		if (!slot || !kv_slot_has_all_pages(slot, kv_chunk_used(version->size, i)))
			allocated = false;
	}
	version->all_hot = allocated;
	if (allocated)
		(void)kv_version_mark_locked(version);
	return allocated ? RESIDENT : UNALLOCATED;
}

bool kv_version_is_resident_locked(struct kv_version *version)
{
	return residency_of(version) == RESIDENT;
}

bool kv_version_is_dense(const struct kv_version *version)
{
	uint64_t whole = blocks_of(version->size);

	return version->blocks >= whole - whole / HOLE_SHARE;
}

static bool is_worth_filling(const struct kv_version *version)
{
	const struct kv_core *core = version->file->core;

	return version->size <= kv_min_u64(core->options.stream_above_bytes, core->budget / 4) &&
	       kv_version_is_dense(version);
}

static bool has_all_pages(struct kv_version *version, uint32_t number)
{
	KV_LOCKED(&version->lock);
	const struct kv_slot *slot = kv_slot_find(version, number);

	return slot && kv_slot_has_all_pages(slot, kv_chunk_used(version->size, number));
}

int kv_chunk_allocate_rest(struct kv_version *version, uint32_t number)
{
	unsigned used = kv_chunk_used(version->size, number);
	struct kv_pages pages = {.patience_ms = OPEN_PATIENCE_MS};
	struct kv_slot *slot;
	struct kv_bits have;
	int r;

	if (has_all_pages(version, number))
		return 0;
	/* What is published does not change. */
	r = kv_chunk_bits(version, number, &have);
	KV_LOCKED(&version->lock);
	if (r == 0)
		r = kv_slot_get(version, number, &slot);
	if (r == 0)
		r = kv_version_object_locked(version);
	if (r < 0)
		return r;
	if (slot->flags & KV_SLOT_BUSY || kv_slot_has_all_pages(slot, used))
		return 0;
	/* Evicted again meanwhile: pages without its content are not to be had. */
	if (slot->state != KV_CHUNK_HOLE && !kv_slot_is_resident(slot))
		return 0;
	if (!(slot->flags & KV_SLOT_SPARSE))
		kv_slot_pages(slot, &have);
	kv_bits_set(&pages.add, 0, used);
	pages.add = kv_bits_without(&pages.add, &have);
	slot->flags |= KV_SLOT_BUSY;
	r = kv_chunk_add_pages(version, number, &pages);
	kv_slot_find(version, number)->flags &= (uint16_t)~KV_SLOT_BUSY;
	kv_park_wake(version->file->core, version);
	return r;
}

/* Brings everything into the object. The version is open, so nothing is evicted meanwhile. */
static int fill_whole(struct kv_version *version)
{
	uint32_t count = kv_chunk_count(version->size);
	const struct kv_fill_range range = {.count = count, .patience_ms = OPEN_PATIENCE_MS};
	int r = kv_fill_begin(version, &range);

	for (uint32_t i = 0; i < count && r == 0; i++)
		r = kv_fill_wait(version, i);
	for (uint32_t i = 0; i < count && r == 0; i++)
		r = kv_chunk_allocate_rest(version, i);
	return r;
}

/* Lock held. */
static void note_open(struct kv_version *version, bool hot, bool direct)
{
	version->direct = direct && (version->direct || version->opens == 0);
	version->opens++;
	if (hot)
		version->hot = true;
	else
		version->streamed = true;
	kv_version_relist_locked(version, false);
}

static int open_damaged(struct kv_version *version)
{
	kv_version_close(version);
	return -ENOENT;
}

int kv_version_open(struct kv_version *version, bool direct, enum kv_access *ret_access)
{
	struct kv_stats *stats = version->file->core->stats;
	enum residency residency;
	bool fill;
	int r = 0;

	{
		KV_LOCKED(&version->lock);
		if (version->damaged)
			return -ENOENT;
		residency = residency_of(version);
		fill = residency == UNALLOCATED
			       ? is_worth_filling(version)
			       : residency == FILLABLE && !direct && is_worth_filling(version);
		note_open(version, residency == RESIDENT || fill, direct && residency != RESIDENT);
	}
	if (residency == RESIDENT) {
		kv_stat_add(&stats->open_hot, 1);
		*ret_access = KV_ACCESS_HOT;
		return 0;
	}
	/* Another thread may punch between two looks while the version was open as a stream before:
	 * look again. */
	for (unsigned i = 0; fill && i < 3; i++) {
		r = fill_whole(version);
		/* The failure may have been that of a fill which was under way before: one try of
		 * our own. */
		if (r == -EIO && i == 0)
			continue;
		if (r < 0)
			break;
		(void)pthread_mutex_lock(&version->lock);
		bool resident = residency_of(version) == RESIDENT;
		(void)pthread_mutex_unlock(&version->lock);
		if (resident) {
			kv_stat_add(&stats->open_cold, 1);
			*ret_access = KV_ACCESS_HOT;
			return 0;
		}
	}
	if (r == -EIO || r == -ENOENT || r == -ETIMEDOUT)
		return open_damaged(version);
	KV_LOCKED(&version->lock);
	/* Nobody was promised that it stays whole. */
	if (version->opens == 1)
		version->hot = false;
	version->streamed = true;
	kv_stat_add(&stats->open_streamed, 1);
	*ret_access = KV_ACCESS_STREAM;
	return 0;
}

void kv_version_close(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	assert(version->opens > 0);
	version->opens--;
	if (version->opens == 0)
		version->hot = version->streamed = version->direct = false;
	kv_version_relist_locked(version, version->opens == 0);
}

/* Lock held. The object of a resident version, busy, for others to map: its pages are never taken
 * away from a reader from here on. */
static struct kv_object *expose(struct kv_version *version)
{
	if (!version->all_hot || version->opens == 0 || !version->object ||
		kv_version_mark_locked(version) < 0)
		return NULL;
	version->exposed = true;
	version->busy++;
	return version->object;
}

int kv_version_share(struct kv_version *version)
{
	struct kv_object *object;
	char path[32];
	int fd;

	{
		KV_LOCKED(&version->lock);
		object = expose(version);
	}
	if (!object)
		return -EINVAL;
	fd = kv_object_get(object);
	if (fd >= 0) {
		(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		fd = fd < 0 ? -errno : fd;
		kv_object_put(object);
	}
	KV_LOCKED(&version->lock);
	version->busy--;
	return fd;
}

int kv_version_backing(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	struct kv_object *object;
	int fd, id;

	if (!core->hooks.backing_open)
		return -EOPNOTSUPP;
	{
		KV_LOCKED(&version->lock);
		if (version->backing > 0)
			return version->backing;
		object = expose(version);
	}
	if (!object)
		return -EINVAL;
	fd = kv_object_get(object);
	id = fd < 0 ? fd : core->hooks.backing_open(core->hooks.arg, fd);
	if (fd >= 0)
		kv_object_put(object);
	int surplus = 0;
	{
		KV_LOCKED(&version->lock);
		version->busy--;
		if (id > 0 && version->backing > 0) {
			surplus = id;
			id = version->backing;
		} else if (id > 0) {
			version->backing = id;
		}
	}
	if (surplus > 0 && core->hooks.backing_close)
		core->hooks.backing_close(core->hooks.arg, surplus);
	return id;
}
