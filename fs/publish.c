/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Publishing a version, and settling it: committed, failed, or dropped because nobody can see it
 * any more.
 */
#include "fs/write_internal.h"
#include "fs/writeback_internal.h"
#include "fs/crash.h"

#include <inttypes.h>

/* The number that the file's next version gets must be above everything the index knows. */
static int learn_last_number(struct kv_file *file)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	struct kv_inode inode;
	int r;

	{
		KV_LOCKED(&shard->lock);
		if (file->last_number > 0)
			return 0;
	}
	r = kv_index_get(file->core->index, file->ino, &inode);
	if (r < 0)
		return r == -ENOENT ? 0 : r;
	KV_LOCKED(&shard->lock);
	file->last_number = kv_max_u64(file->last_number, inode.version);
	return 0;
}

/* Pages allocated ahead of the writer, and blocks allocated behind the end, do not survive the
 * publish. */
static int trim_slot(struct kv_version *version, uint32_t number, uint64_t *bytes)
{
	struct kv_slot *slot = kv_slot_find(version, number);
	unsigned used = kv_chunk_used(version->size, number);

	if (slot->charge > used && !(slot->flags & KV_SLOT_SPARSE)) {
		*bytes += (uint64_t)(slot->charge - used) << KV_BLOCK_SHIFT;
		version->charged -= slot->charge - used;
		slot->charge = used;
	}
	if (slot->state != KV_CHUNK_DIRTY)
		return 0;
	return kv_slot_clear_blocks(version, number, used, KV_CHUNK_BLOCKS);
}

/* The last chunk may have been written early with blocks behind the end, which its extents must not
 * have. */
static int own_last_chunk(struct kv_version *version)
{
	struct kv_writer writer = {.version = version};
	uint32_t count = kv_chunk_count(version->size);
	struct kv_bits bits = {0};
	int r;

	if (count == 0)
		return 0;
	{
		KV_LOCKED(&version->lock);
		const struct kv_slot *slot = kv_slot_find(version, count - 1);
		if (slot && slot->state != KV_CHUNK_DIRTY)
			kv_slot_bits(slot, &bits);
	}
	if (kv_bits_end(&bits) <= kv_chunk_used(version->size, count - 1))
		return 0;
	r = kv_writer_own(&writer, count - 1);
	kv_writer_done(&writer);
	return r;
}

/* From here on nothing is written early; *ret_last_fits says that the last chunk is as
 * own_last_chunk left it. -EIO: a device does not answer what was begun. */
static int seal(struct kv_version *version, bool *ret_last_fits)
{
	int64_t since_ms = kv_monotonic_ms();
	uint32_t count = kv_chunk_count(version->size);
	struct kv_slot *slot = NULL;
	struct kv_bits bits = {0};
	KV_LOCKED(&version->lock);

	/* Until the caller leaves the version. */
	version->sealed = true;
	while (version->jobs > 0) {
		if (kv_core_gives_up(version->file->core, since_ms))
			return -EIO;
		kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
	}
	int r = count > 0 ? kv_slot_when_free(version, count - 1, &slot) : 0;
	if (r < 0)
		return r;
	if (slot && slot->state != KV_CHUNK_DIRTY)
		kv_slot_bits(slot, &bits);
	*ret_last_fits =
		count == 0 || kv_bits_end(&bits) <= kv_chunk_used(version->size, count - 1);
	version->sealed = *ret_last_fits;
	return 0;
}

static int trim_sealed(struct kv_version *version, uint64_t *ret_bytes)
{
	struct kv_segment *segment;
	int r = 0;
	KV_LOCKED(&version->lock);

	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity && r == 0; i++)
			r = trim_slot(version, segment->number * KV_SEGMENT_CHUNKS + i, ret_bytes);
	}
	if (r == 0 && version->object && version->object_size != version->size) {
		r = kv_object_resize(version->object, version->size);
		version->object_size = version->size;
	}
	return r;
}

static int trim(struct kv_version *version)
{
	struct kv_writer writer = {.version = version};
	struct kv_core *core = version->file->core;
	uint64_t bytes = 0;
	bool last_fits;
	int r;

	r = kv_chunks_drop_from(&writer, kv_chunk_count(version->size));
	kv_writer_done(&writer);
	do {
		if (r == 0)
			r = own_last_chunk(version);
		if (r == 0)
			r = seal(version, &last_fits);
		if (r < 0)
			return r;
	} while (!last_fits);
	r = trim_sealed(version, &bytes);
	kv_core_uncharge(core, bytes);
	return r;
}

/* Makes VERSION the current one. Returns the one it replaces. */
static struct kv_version *make_current(struct kv_version *version)
{
	struct kv_file *file = version->file;
	struct kv_core *core = file->core;
	struct kv_shard *shard = kv_shard_of(core, file->ino);
	struct kv_version *before;
	KV_LOCKED(&shard->lock);

	(void)pthread_mutex_lock(&version->lock);
	version->number = ++file->last_number;
	version->state = KV_VERSION_PUBLISHED;
	version->changed = false;
	/* The explicit times were meant for the content as it is now. */
	int64_t now_ns = kv_core_now_ns(core);
	if (!version->ctime_set)
		version->ctime_ns = now_ns;
	version->published_ns = now_ns;
	kv_unsettled_changed(version);
	kv_version_relist_locked(version, true);
	(void)pthread_mutex_unlock(&version->lock);

	before = file->current;
	file->current = kv_version_ref(version);
	file->generation++;
	file->writers--;
	file->inflight++;
	TAILQ_INSERT_TAIL(&file->versions, version, sibling);
	/* Under the shard's lock, so that the versions of a file are queued in the order of their
	 * numbers. */
	kv_writeback_push(version);
	kv_park_wake(core, file);
	return before;
}

int kv_version_publish(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	int r;

	r = learn_last_number(version->file);
	if (r < 0)
		return r;
	r = kv_version_enter_exclusive(version);
	if (r < 0)
		return r == -ESTALE ? -EALREADY : r;
	r = version->quota.refused ? -EDQUOT : trim(version);
	if (r == 0) {
		kv_lease_published(core, version->file->ino);
		kv_crash_point("publish-before");
		kv_version_unref(make_current(version));
		kv_crash_point("publish-after");
		kv_stat_add(&core->stats->published, 1);
	}
	kv_version_leave_exclusive(version);
	if (r == 0)
		kv_core_changed(core, version->file->ino);
	return r;
}

bool kv_version_is_invisible(struct kv_version *version)
{
	struct kv_file *file = version->file;
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	KV_LOCKED(&shard->lock);

	return file->unlinked && atomic_load(&file->opens) == 0;
}

bool kv_version_is_settled(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	return version->state == KV_VERSION_COMMITTED || version->state == KV_VERSION_FAILED;
}

/* What a version keeps only while its commit is ahead. */
struct kv_leftovers {
	struct kv_version *base;
	struct kv_source *sources;
};

static void set_settled(struct kv_version *version, enum kv_version_state state, int error,
	struct kv_leftovers *ret_leftovers)
{
	struct kv_core *core = version->file->core;
	KV_LOCKED(&version->lock);

	assert(version->state == KV_VERSION_PUBLISHED);
	version->state = (uint8_t)state;
	kv_unsettled_end(version);
	if (error)
		version->error = error;
	kv_quota_drop_locked(version);
	version->depth = 0;
	*ret_leftovers = (struct kv_leftovers){0};
	/* A failed version may still be read, and its bases with it. */
	if (state == KV_VERSION_COMMITTED) {
		ret_leftovers->base = kv_steal_ptr(&version->base);
		ret_leftovers->sources = kv_steal_ptr(&version->sources);
		version->base_chunks = 0;
		/* For who comes after a restart. */
		if (core->outlives) {
			(void)kv_version_is_resident_locked(version);
			(void)kv_version_mark_locked(version);
		}
	}
	kv_version_relist_locked(version, true);
	kv_park_wake(core, version);
}

void kv_version_settle(struct kv_version *version, enum kv_version_state state, int error)
{
	struct kv_file *file = version->file;
	struct kv_core *core = file->core;
	struct kv_shard *shard = kv_shard_of(core, file->ino);
	struct kv_version *lost = NULL, *reaped = NULL;
	struct kv_leftovers left;

	(void)pthread_mutex_lock(&shard->lock);
	/* A lost version gives way to what the index has, before anybody hears of the loss. */
	if (state == KV_VERSION_FAILED && !version->dropped && file->current == version) {
		lost = kv_steal_ptr(&file->current);
		file->generation++;
	}
	(void)pthread_mutex_unlock(&shard->lock);
	set_settled(version, state, error, &left);
	(void)pthread_mutex_lock(&shard->lock);
	assert(file->inflight > 0);
	file->inflight--;
	/* Published to a file that had been reaped by then: nobody will come to take it away. */
	if (file->reaped && file->current == version)
		reaped = kv_steal_ptr(&file->current);
	kv_file_consider_reap_locked(file);
	kv_writeback_next_locked(file);
	kv_park_wake(core, file);
	(void)pthread_mutex_unlock(&shard->lock);
	{
		KV_LOCKED(&core->writeback.lock);
		TAILQ_REMOVE(&core->writeback.inflight, version, inflight);
		core->writeback.progress++;
		(void)pthread_cond_broadcast(&core->writeback.settled);
		(void)pthread_cond_signal(&core->writeback.ready);
	}
	if (lost)
		kv_core_changed(core, file->ino);
	kv_version_unref(lost);
	kv_version_unref(reaped);
	kv_version_unref(left.base);
	while (left.sources) {
		struct kv_source *source = left.sources;

		left.sources = source->next;
		kv_version_unref(source->version);
		free(source);
	}
}

/* A file that has nothing but a lost version must not stay in the namespace without content. */
static bool remove_held(struct kv_core *core, uint64_t ino)
{
	struct kv_inode inode;
	int r = -EAGAIN;

	for (unsigned i = 0; i < 3 && r == -EAGAIN; i++) {
		if (kv_index_get(core->index, ino, &inode) < 0 || !(inode.flags & KV_INODE_HELD))
			return false;
		r = kv_core_unname(core, ino, inode.last_use_ns, false);
	}
	return r == 0;
}

static bool is_in_memory(struct kv_core *core, uint64_t ino)
{
	struct kv_file *file = kv_file_find(core, ino);
	bool there = false;

	if (file) {
		struct kv_shard *shard = kv_shard_of(core, ino);
		KV_LOCKED(&shard->lock);

		there = file->writers > 0 || file->current;
	}
	kv_file_put(file);
	return there;
}

void kv_core_drop_held(struct kv_core *core)
{
	uint64_t ino = 0;

	while ((ino = kv_index_next_held(core->index, ino)) != 0) {
		if (is_in_memory(core, ino))
			continue;
		(void)remove_held(core, ino);
		kv_core_orphan(core, ino);
	}
}

void kv_version_fail(struct kv_version *version, int error)
{
	struct kv_file *file = version->file;
	struct kv_core *core = file->core;

	kv_stat_add(&core->stats->writeback_errors, 1);
	kv_log_error("writeback", "version lost ino=%" PRIu64 " version=%" PRIu64 " error=%s",
		file->ino, version->number, strerror(-error));
	bool removed = remove_held(core, file->ino);
	kv_version_settle(version, KV_VERSION_FAILED, error);
	if (removed)
		kv_core_orphan(core, file->ino);
}
