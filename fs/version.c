/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a version: made, written by several threads at once, published, settled, gone.
 */
#include "fs/charge_internal.h"
#include "fs/core_internal.h"

struct kv_version *kv_version_alloc(struct kv_file *file)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	struct kv_version *version = calloc(1, sizeof(*version));

	if (!version)
		return NULL;
	atomic_init(&version->refs, 1);
	version->file = file;
	(void)pthread_mutex_init(&version->lock, NULL);
	RB_INIT(&version->segments);
	RB_INIT(&version->ranges);
	{
		KV_LOCKED(&shard->lock);
		kv_file_ref_locked(file);
	}
	atomic_fetch_add(&file->core->versions, 1);
	return version;
}

struct kv_version *kv_version_ref(struct kv_version *version)
{
	unsigned before = atomic_fetch_add(&version->refs, 1);

	assert(before > 0);
	(void)before;
	return version;
}

bool kv_version_try_ref(struct kv_version *version)
{
	unsigned refs = atomic_load(&version->refs);

	while (refs > 0)
		if (atomic_compare_exchange_weak(&version->refs, &refs, refs + 1))
			return true;
	return false;
}

/* Cancels what a version that was never committed has allocated, and gives back all promises. */
static void version_give_back(struct kv_core *core, struct kv_version *version)
{
	struct kv_segment *segment;

	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			struct kv_slot *slot = &segment->slots[i];

			if (slot->flags & KV_SLOT_FRESH && slot->extent_count > 0)
				kv_space_cancel(
					core->space, kv_slot_extents(slot), slot->extent_count);
		}
	}
	kv_promise_clear(version);
	if (version->reserved > 0)
		kv_space_unreserve(core->space, version->reserved);
	if (version->dirty > 0)
		kv_charge_clean_locked(version, version->dirty);
}

static void version_drop_sources(struct kv_version *version)
{
	struct kv_source *source;

	while ((source = version->sources)) {
		version->sources = source->next;
		kv_version_unref(source->version);
		free(source);
	}
}

/* The last reference is gone; FREED has been handed on if an older version may need it. */
static void version_destroy(struct kv_version *version, struct kv_freed_node *freed)
{
	struct kv_file *file = version->file;
	struct kv_core *core = file->core;
	struct kv_shard *shard = kv_shard_of(core, file->ino);
	struct kv_object *object;
	uint64_t bytes = 0;
	int backing = 0;
	bool destroy;

	assert(!version->busy && !version->writers && !version->jobs);
	(void)pthread_mutex_lock(&version->lock);
	version->opens = 0;
	kv_unsettled_end(version);
	version_give_back(core, version);
	kv_quota_drop_locked(version);
	kv_charge_drop_locked(version);
	object = kv_version_detach_locked(version, &backing, &bytes);
	(void)pthread_mutex_unlock(&version->lock);
	if (backing > 0 && core->hooks.backing_close)
		core->hooks.backing_close(core->hooks.arg, backing);
	kv_object_free(object);
	kv_core_uncharge(core, bytes);
	kv_freed_release(core, freed);
	version_drop_sources(version);
	kv_version_unref(version->base);
	kv_map_free(version);
	(void)pthread_mutex_destroy(&version->lock);
	atomic_fetch_sub(&core->versions, 1);
	(void)pthread_mutex_lock(&shard->lock);
	struct kv_version *idle = NULL;
	destroy = kv_file_unref_locked(file);
	if (!destroy)
		idle = kv_file_trim_locked(file);
	(void)pthread_mutex_unlock(&shard->lock);
	free(version);
	if (destroy)
		kv_file_destroy(file);
	kv_version_unref(idle);
}

/* Takes a version without references out of its file. Shard locked. Returns the space to be
 * released. */
static struct kv_freed_node *version_leave_file(struct kv_version *version)
{
	struct kv_file *file = version->file;
	struct kv_freed_node **end = &version->freed;
	struct kv_version *older;

	if (version->state == KV_VERSION_WRITING) {
		assert(file->writers > 0);
		file->writers--;
		return NULL;
	}
	if (version->sibling.tqe_prev == NULL)
		return NULL;
	older = TAILQ_PREV(version, kv_version_queue, sibling);
	TAILQ_REMOVE(&file->versions, version, sibling);
	if (!older)
		return kv_steal_ptr(&version->freed);
	while (*end)
		end = &(*end)->next;
	*end = older->freed;
	older->freed = kv_steal_ptr(&version->freed);
	return NULL;
}

struct kv_version *kv_version_unref(struct kv_version *version)
{
	if (!version)
		return NULL;
	struct kv_file *file = version->file;
	struct kv_core *core = file->core;
	struct kv_shard *shard = kv_shard_of(core, file->ino);
	struct kv_freed_node *freed = NULL;
	struct kv_version *idle = NULL;

	(void)pthread_mutex_lock(&shard->lock);
	unsigned before = atomic_fetch_sub(&version->refs, 1);
	assert(before > 0);
	if (before == 1) {
		freed = version_leave_file(version);
		kv_park_wake(core, file);
	} else if (file->current == version) {
		idle = kv_file_trim_locked(file);
	}
	(void)pthread_mutex_unlock(&shard->lock);
	if (before == 1)
		version_destroy(version, freed);
	kv_version_unref(idle);
	return NULL;
}

int kv_version_failure_locked(const struct kv_version *version)
{
	if (version->state != KV_VERSION_FAILED)
		return 0;
	return version->dropped ? -ENOENT : -EIO;
}

/* A chain of bases that are not committed makes every look-up longer: wait for it to shorten. */
static int wait_for_base(struct kv_core *core, struct kv_version *base)
{
	int64_t since_ms = kv_monotonic_ms(), until = since_ms + KV_PATIENCE_MS;
	KV_LOCKED(&base->lock);

	while (base->state == KV_VERSION_PUBLISHED && base->depth >= KV_BASE_DEPTH_MAX) {
		if (kv_monotonic_ms() > until || kv_core_gives_up(core, since_ms))
			return -EIO;
		kv_writeback_hurry(core);
		kv_park_wait(core, base, &base->lock, KV_WAIT_SLICE_MS);
	}
	return base->state == KV_VERSION_FAILED && !base->dropped ? -EIO : 0;
}

int kv_version_new(struct kv_file *file, struct kv_version *base, struct kv_version **ret_version)
{
	struct kv_core *core = file->core;
	struct kv_shard *shard = kv_shard_of(core, file->ino);
	int r = base ? wait_for_base(core, base) : 0;

	if (r < 0)
		return r;
	struct kv_version *version = kv_version_alloc(file);
	if (!version)
		return -ENOMEM;
	version->state = KV_VERSION_WRITING;
	version->mtime_ns = version->ctime_ns = kv_core_now_ns(core);
	if (base) {
		KV_LOCKED(&base->lock);
		assert(base->state != KV_VERSION_WRITING);
		version->base = kv_version_ref(base);
		version->depth = base->state == KV_VERSION_COMMITTED ? 0 : base->depth + 1;
		version->size = base->size;
		version->blocks = base->blocks;
		version->quota.credit = base->blocks;
		version->base_chunks = kv_chunk_count(base->size);
		version->mtime_ns = base->mtime_ns;
		version->ctime_ns = base->ctime_ns;
	}
	version->changed = !base;
	{
		KV_LOCKED(&shard->lock);
		file->writers++;
	}
	kv_unsettled_begin(version);
	*ret_version = version;
	return 0;
}

/* Both locked. Slots for all chunks that FROM has in DRAM, so that what follows cannot fail. */
static int prepare_slots(struct kv_version *version, struct kv_version *from)
{
	struct kv_segment *segment;
	struct kv_slot *slot;
	int r = 0;

	RB_FOREACH (segment, kv_segment_tree, &from->segments) {
		uint32_t count = segment->capacity;

		while (count > 0 && !segment->slots[count - 1].charge)
			count--;
		/* The last one brings those before it. */
		if (count > 0 && r == 0)
			r = kv_slot_get(
				version, segment->number * KV_SEGMENT_CHUNKS + count - 1, &slot);
	}
	return r;
}

/*
 * Both locked. FROM's object becomes VERSION's if nobody else uses it: its chunks are copies of
 * what VERSION has in its base, and FROM can read its own from the devices. So a writer that syncs
 * now and then does not lose what it has in DRAM, and it costs a look at each resident chunk.
 */
static void take_object(struct kv_version *version, struct kv_version *from)
{
	const struct kv_mark none = {.kind = KV_MARK_NONE};
	struct kv_segment *segment;

	if (!from->object || from->state != KV_VERSION_COMMITTED || from->opens > 0 ||
		from->busy > 0 || from->exposed || from->backing > 0 || version->object ||
		prepare_slots(version, from) < 0 || kv_object_mark(from->object, &none) < 0)
		return;
	RB_FOREACH (segment, kv_segment_tree, &from->segments) {
		struct kv_slot *first = kv_slot_find(version, segment->number * KV_SEGMENT_CHUNKS);

		for (uint32_t i = 0; i < segment->capacity; i++) {
			struct kv_slot *theirs = &segment->slots[i], *ours = &first[i];

			if (!theirs->charge)
				continue;
			assert(ours->state == KV_CHUNK_BASE);
			ours->flags |= KV_SLOT_RESIDENT |
				       (theirs->flags & (KV_SLOT_USED | KV_SLOT_SPARSE));
			ours->charge = theirs->charge;
			version->charged += kv_slot_forget_pages(from, theirs);
			if (theirs->state == KV_CHUNK_HOT)
				theirs->state = KV_CHUNK_COLD;
		}
	}
	version->object = kv_steal_ptr(&from->object);
	version->object_size = from->object_size;
	assert(from->charged == 0);
	from->object_size = 0;
	from->all_hot = false;
	kv_version_relist_locked(from, false);
	kv_version_relist_locked(version, true);
}

void kv_version_continue(struct kv_version *version, struct kv_version *from)
{
	KV_LOCKED(&version->lock);

	assert(version->base == from);
	(void)pthread_mutex_lock(&from->lock);
	assert(from->state != KV_VERSION_WRITING);
	version->continues = true;
	kv_promise_move(version, from);
	kv_charge_move_locked(version, from);
	take_object(version, from);
	(void)pthread_mutex_unlock(&from->lock);
}

void kv_version_attr(struct kv_version *version, struct kv_version_attr *ret_attr)
{
	KV_LOCKED(&version->lock);

	*ret_attr = (struct kv_version_attr){
		.number = version->number,
		.size = version->size,
		.blocks = version->blocks + version->unwritten,
		.unwritten = version->unwritten,
		.mtime_ns = version->mtime_ns,
		.ctime_ns = version->ctime_ns,
		.published = version->state != KV_VERSION_WRITING,
		.committed = version->state == KV_VERSION_COMMITTED,
		.changed = version->state == KV_VERSION_WRITING && version->changed,
	};
}

void kv_version_set_times(struct kv_version *version, int64_t mtime_ns, int64_t ctime_ns)
{
	KV_LOCKED(&version->lock);

	if (mtime_ns != INT64_MIN) {
		version->mtime_ns = mtime_ns;
		version->mtime_set = true;
	}
	if (ctime_ns != INT64_MIN) {
		version->ctime_ns = ctime_ns;
		version->ctime_set = true;
	}
	kv_unsettled_changed(version);
}

int kv_version_enter(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	while (version->exclusive)
		kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
	if (version->state != KV_VERSION_WRITING)
		return -ESTALE;
	if (version->error)
		return version->error;
	version->writers++;
	return 0;
}

void kv_version_leave(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	assert(version->writers > 0);
	if (--version->writers == 0)
		kv_park_wake(version->file->core, version);
}

int kv_version_enter_exclusive(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	KV_LOCKED(&version->lock);

	while (version->exclusive)
		kv_park_wait(core, version, &version->lock, KV_WAIT_SLICE_MS);
	if (version->state != KV_VERSION_WRITING)
		return -ESTALE;
	if (version->error)
		return version->error;
	version->exclusive = true;
	while (version->writers > 0)
		kv_park_wait(core, version, &version->lock, KV_WAIT_SLICE_MS);
	return 0;
}

void kv_version_leave_exclusive(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	assert(version->exclusive);
	version->exclusive = version->sealed = false;
	/* It was cut or published, it may be. */
	kv_charge_settle_locked(version);
	kv_park_wake(version->file->core, version);
}

int kv_version_object_locked(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	struct kv_object *object;
	int r;

	if (version->object)
		return 0;
	uint64_t serial = atomic_fetch_add(&core->objects, 1) + 1;
	r = kv_object_new(core->dram, version->file->ino, serial, &object);
	if (r < 0)
		return r;
	kv_unsettled_object(version, serial);
	/* What is published never changes its size: readers see the end of the file where it is. */
	if (version->state != KV_VERSION_WRITING) {
		r = kv_object_resize(object, version->size);
		if (r < 0) {
			kv_object_free(object);
			return r;
		}
		version->object_size = version->size;
	} else {
		version->object_size = 0;
	}
	version->object = object;
	/* Of a small file there will be all or nothing. */
	if (version->size > KV_CHUNK_SIZE)
		(void)kv_version_mark_locked(version);
	kv_version_relist_locked(version, true);
	return 0;
}

void kv_version_relist_locked(struct kv_version *version, bool last)
{
	struct kv_core *core = version->file->core;
	enum kv_version_list list = KV_LIST_NONE;

	if (version->object)
		list = version->state == KV_VERSION_COMMITTED && !version->opens ? KV_LIST_IDLE
										 : KV_LIST_ACTIVE;
	KV_LOCKED(&core->lists.lock);
	if (version->list == list && !last)
		return;
	if (version->list == KV_LIST_IDLE)
		TAILQ_REMOVE(&core->lists.idle, version, lru);
	else if (version->list == KV_LIST_ACTIVE)
		TAILQ_REMOVE(&core->lists.active, version, lru);
	version->list = list;
	if (list == KV_LIST_IDLE)
		TAILQ_INSERT_TAIL(&core->lists.idle, version, lru);
	else if (list == KV_LIST_ACTIVE)
		TAILQ_INSERT_TAIL(&core->lists.active, version, lru);
}

bool kv_version_is_held_up(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	struct kv_shard *shard = kv_shard_of(core, version->file->ino);
	uint64_t slow = kv_devices_slow(core->devices);

	if (slow == 0 || kv_devices_all_slow(core->devices))
		return slow != 0;
	KV_LOCKED(&shard->lock);
	for (; version; version = TAILQ_PREV(version, kv_version_queue, sibling))
		if (atomic_load(&version->wrote_on) & slow && !kv_version_is_settled(version))
			return true;
	return false;
}

int kv_version_wait_settled(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	int64_t since_ms = kv_monotonic_ms();

	if (!kv_version_is_settled(version))
		kv_writeback_hurry(core);
	while (!kv_version_is_settled(version)) {
		if (kv_version_is_held_up(version) && kv_core_gives_up(core, since_ms))
			return -EIO;
		KV_LOCKED(&version->lock);
		if (version->state == KV_VERSION_PUBLISHED)
			kv_park_wait(core, version, &version->lock, KV_WAIT_SLICE_MS);
	}
	return 0;
}

int kv_version_sync(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	uint64_t sequence;
	int r;

	{
		KV_LOCKED(&version->lock);
		if (version->state == KV_VERSION_WRITING)
			return -EINVAL;
	}
	r = kv_version_wait_settled(version);
	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		if (version->state == KV_VERSION_FAILED)
			return version->dropped ? 0 : -EIO;
		sequence = version->sequence;
	}
	return kv_index_wait(core->index, sequence);
}
