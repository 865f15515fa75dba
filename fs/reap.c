/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reaper: frees files that have lost their last name, once nothing uses them. Also what a crash
 * left.
 */
#include "fs/core_internal.h"

#include <inttypes.h>
#include <sys/stat.h>

#define ORPHANS_AT_ONCE 256u
/* How long the first orphan waits for more of them. */
#define COMPANY_MS 10u

static void push(struct kv_core *core, const struct kv_orphan *what)
{
	struct kv_orphan *orphan = malloc(sizeof(*orphan));

	if (!orphan) {
		/* The index knows it: the next mount frees it. */
		kv_log_warning(
			"reap", "out of memory, left for the next mount ino=%" PRIu64, what->ino);
		return;
	}
	*orphan = *what;
	KV_LOCKED(&core->reaper.lock);
	/* With others in the queue the reaper is at work, or waits for company. */
	if (STAILQ_EMPTY(&core->reaper.queue))
		(void)pthread_cond_signal(&core->reaper.cond);
	STAILQ_INSERT_TAIL(&core->reaper.queue, orphan, entry);
}

void kv_reap_push(struct kv_core *core, uint64_t ino)
{
	push(core, &(struct kv_orphan){.ino = ino});
}

void kv_core_retired(struct kv_core *core, uint64_t ino)
{
	push(core, &(struct kv_orphan){.ino = ino, .clear = true, .keep = true});
}

/* Nobody can get at the file's content any more, or false. Shard locked. */
static bool close_file_locked(struct kv_file *file, struct kv_version **ret_current)
{
	if (atomic_load(&file->opens) > 0 || file->inflight > 0 || file->reaped) {
		file->reap_queued = false;
		return false;
	}
	file->reaped = true;
	file->generation++;
	*ret_current = kv_steal_ptr(&file->current);
	return true;
}

static uint64_t reap_records(struct kv_core *core, uint64_t ino, struct kv_file *file)
{
	uint64_t blocks = 0;
	int r;

	do {
		struct kv_freed freed = {0};

		r = kv_index_reap(core->index, ino, &freed);
		if (r < 0)
			break;
		for (size_t i = 0; i < freed.count; i++)
			blocks += freed.extents[i].count;
		if (file)
			kv_file_release(file, NULL, &freed);
		else
			kv_space_release(core->space, &freed);
	} while (r == 1 && !atomic_load(&core->stopping));
	if (r == -ENOTEMPTY) /* what a crash left of a retired directory */
		push(core, &(struct kv_orphan){.ino = ino, .clear = true});
	else if (r < 0 && r != -ENOENT)
		kv_log_warning("reap", "cannot free ino=%" PRIu64 " error=%s", ino, strerror(-r));
	return blocks;
}

uint64_t kv_reap_ino(struct kv_core *core, uint64_t ino)
{
	struct kv_shard *shard = kv_shard_of(core, ino);
	struct kv_file *file = kv_file_find(core, ino);
	struct kv_version *current = NULL;
	uint64_t blocks = 0;
	bool closed = true;

	if (file) {
		KV_LOCKED(&shard->lock);
		closed = close_file_locked(file, &current);
	}
	/* Before the index forgets: whoever still reads an old version knows all of its extents
	 * himself. */
	kv_version_unref(current);
	if (closed && file && kv_file_pin_maps(file) < 0) {
		kv_log_warning("reap", "out of memory, left for the next mount ino=%" PRIu64, ino);
		closed = false;
	}
	if (closed)
		blocks = reap_records(core, ino, file);
	kv_file_put(file);
	return blocks;
}

/* ---- Retired directories ---- */

struct cleared {
	struct kv_inode inode;
	size_t length;
	char name[KV_NAME_MAX];
};

struct clearing {
	struct cleared *names; /* KV_CLEAR_NAMES */
	unsigned count;
};

static void note_cleared(void *arg, const struct kv_inode *inode, const char *name, size_t length)
{
	struct clearing *clearing = arg;
	struct cleared *cleared = &clearing->names[clearing->count++];

	assert(clearing->count <= KV_CLEAR_NAMES && length <= sizeof(cleared->name));
	cleared->inode = *inode;
	cleared->length = length;
	memcpy(cleared->name, name, length);
}

static void cleared_orphan(struct kv_core *core, uint64_t parent, const struct cleared *cleared)
{
	if (cleared->inode.nlink > 0)
		return;
	if (S_ISDIR(cleared->inode.mode))
		kv_core_retired(core, cleared->inode.ino);
	if (core->hooks.orphaned)
		core->hooks.orphaned(
			core->hooks.arg, &cleared->inode, parent, cleared->name, cleared->length);
	else
		kv_core_orphan(core, cleared->inode.ino);
}

/*
 * One piece of what is in the directory. The rest goes to the end of the queue, so that what this
 * piece has left without a name is freed first: the queue stays short.
 */
static void clear_some(struct kv_core *core, const struct kv_orphan *orphan)
{
	struct clearing clearing = {.names = calloc(KV_CLEAR_NAMES, sizeof(*clearing.names))};
	int r;

	if (!clearing.names) {
		kv_log_warning(
			"reap", "out of memory, left for the next mount ino=%" PRIu64, orphan->ino);
		return;
	}
	r = kv_index_clear(core->index, orphan->ino, kv_core_now_ns(core), note_cleared, &clearing);
	for (unsigned i = 0; r >= 0 && i < clearing.count; i++)
		cleared_orphan(core, orphan->ino, &clearing.names[i]);
	free(clearing.names);
	if (r == 1)
		push(core, orphan);
	else if (r == 0 && !orphan->keep)
		(void)kv_reap_ino(core, orphan->ino);
	else if (r < 0 && r != -ENOENT)
		kv_log_warning("reap", "cannot free what is below dir_ino=%" PRIu64 " error=%s",
			orphan->ino, strerror(-r));
}

static void reap_leftovers(struct kv_core *core)
{
	uint64_t inos[ORPHANS_AT_ONCE];
	uint64_t after = 0;
	ssize_t n;

	while ((n = kv_index_orphans(core->index, after, inos, ORPHANS_AT_ONCE)) > 0) {
		for (ssize_t i = 0; i < n; i++) {
			if (atomic_load(&core->stopping))
				return;
			(void)kv_reap_ino(core, inos[i]);
		}
		after = inos[n - 1];
	}
}

/*
 * The reaper's lock is held. Who removes many files does so one by one: to be woken for each would
 * cost more than to free it.
 */
static void wait_for_orphans(struct kv_core *core)
{
	core->reaper.working = false;
	if (!STAILQ_EMPTY(&core->reaper.queue))
		return;
	(void)pthread_cond_broadcast(&core->reaper.idle);
	while (STAILQ_EMPTY(&core->reaper.queue) && !core->reaper.stop)
		(void)pthread_cond_wait(&core->reaper.cond, &core->reaper.lock);
	if (!core->reaper.stop && core->reaper.drains == 0)
		(void)kv_cond_wait_ms(&core->reaper.cond, &core->reaper.lock, COMPANY_MS);
}

/* What a process has left without a name, the next one may have open. */
void kv_core_await_word(struct kv_core *core)
{
	KV_LOCKED(&core->reaper.lock);

	while (core->reaper.awaits_word && !core->reaper.stop)
		(void)pthread_cond_wait(&core->reaper.cond, &core->reaper.lock);
}

void kv_core_go_on(struct kv_core *core)
{
	kv_unsettled_go_on(core);
	KV_LOCKED(&core->reaper.lock);

	core->reaper.awaits_word = false;
	(void)pthread_cond_broadcast(&core->reaper.cond);
}

static void *reap_main(void *arg)
{
	struct kv_core *core = arg;

	kv_core_await_word(core);
	reap_leftovers(core);
	kv_quota_resume(core);
	for (;;) {
		struct kv_orphan *orphan;
		{
			KV_LOCKED(&core->reaper.lock);
			wait_for_orphans(core);
			orphan = STAILQ_FIRST(&core->reaper.queue);
			if (!orphan)
				return NULL;
			STAILQ_REMOVE_HEAD(&core->reaper.queue, entry);
			core->reaper.working = true;
			/* At the end the rest is left to the next mount, which finds it in the
			 * index. */
			if (core->reaper.stop) {
				free(orphan);
				continue;
			}
		}
		if (orphan->clear)
			clear_some(core, orphan);
		else
			(void)kv_reap_ino(core, orphan->ino);
		free(orphan);
	}
}

void kv_reap_drain(struct kv_core *core, unsigned ms)
{
	int64_t left, until = kv_monotonic_ms() + ms;
	KV_LOCKED(&core->reaper.lock);

	core->reaper.drains++;
	(void)pthread_cond_signal(&core->reaper.cond);
	while ((core->reaper.working || !STAILQ_EMPTY(&core->reaper.queue)) &&
		(left = until - kv_monotonic_ms()) > 0)
		(void)kv_cond_wait_ms(&core->reaper.idle, &core->reaper.lock, (unsigned)left);
	core->reaper.drains--;
}

int kv_reap_start(struct kv_core *core)
{
	int r;

	core->reaper.working = true;
	r = kv_core_thread(core, reap_main);
	return r < 0 ? r : kv_store_evict_start(core);
}

void kv_reap_stop(struct kv_core *core)
{
	kv_store_evict_stop(core);
	KV_LOCKED(&core->reaper.lock);
	core->reaper.stop = true;
	(void)pthread_cond_broadcast(&core->reaper.cond);
}
