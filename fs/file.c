/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of files in memory: their current versions, opens, uses, and when they may leave it.
 */
#include "fs/core_internal.h"

#include <sys/stat.h>

#define SECOND_NS INT64_C(1000000000)
#define DAY_NS (24 * 3600 * SECOND_NS)

struct kv_shard *kv_shard_of(struct kv_core *core, uint64_t ino)
{
	return &core->shards[ino % KV_SHARDS];
}

static struct kv_file *file_lookup_locked(struct kv_shard *shard, uint64_t ino)
{
	return (struct kv_file *)kv_table_find(&shard->files, ino);
}

struct kv_file *kv_file_find(struct kv_core *core, uint64_t ino)
{
	struct kv_shard *shard = kv_shard_of(core, ino);
	KV_LOCKED(&shard->lock);
	struct kv_file *file = file_lookup_locked(shard, ino);

	if (file)
		file->refs++;
	return file;
}

int kv_file_get(struct kv_core *core, uint64_t ino, struct kv_file **ret_file)
{
	struct kv_shard *shard = kv_shard_of(core, ino);
	KV_LOCKED(&shard->lock);
	struct kv_file *file = file_lookup_locked(shard, ino);

	if (!file) {
		file = calloc(1, sizeof(*file));
		if (!file || kv_table_add(&shard->files, &file->link, ino) < 0) {
			free(file);
			return -ENOMEM;
		}
		file->core = core;
		file->ino = ino;
		(void)pthread_mutex_init(&file->lock, NULL);
		TAILQ_INIT(&file->versions);
		atomic_fetch_add(&core->files, 1);
	}
	file->refs++;
	*ret_file = file;
	return 0;
}

void kv_file_ref_locked(struct kv_file *file)
{
	assert(file->refs > 0);
	file->refs++;
}

bool kv_file_unref_locked(struct kv_file *file)
{
	assert(file->refs > 0);
	if (--file->refs > 0)
		return false;
	assert(!file->current && TAILQ_EMPTY(&file->versions));
	kv_table_remove(&kv_shard_of(file->core, file->ino)->files, &file->link);
	return true;
}

void kv_file_destroy(struct kv_file *file)
{
	struct kv_core *core = file->core;

	if (file->hits > 0 && !file->reaped)
		(void)kv_index_touch(
			core->index, file->ino, file->touched_ns, file->hits, INT64_MIN);
	atomic_fetch_sub(&core->files, 1);
	(void)pthread_mutex_destroy(&file->lock);
	free(file);
}

struct kv_version *kv_file_trim_locked(struct kv_file *file)
{
	struct kv_version *version = file->current;
	bool idle;

	if (!version || file->refs > 1 || atomic_load(&version->refs) > 1)
		return NULL;
	(void)pthread_mutex_lock(&version->lock);
	idle = version->state == KV_VERSION_COMMITTED && !version->object;
	(void)pthread_mutex_unlock(&version->lock);
	if (!idle)
		return NULL;
	file->current = NULL;
	file->generation++;
	return version;
}

struct kv_file *kv_file_put(struct kv_file *file)
{
	struct kv_version *idle = NULL;
	bool destroy;

	if (!file)
		return NULL;
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	(void)pthread_mutex_lock(&shard->lock);
	destroy = kv_file_unref_locked(file);
	if (!destroy)
		idle = kv_file_trim_locked(file);
	(void)pthread_mutex_unlock(&shard->lock);
	if (destroy)
		kv_file_destroy(file);
	kv_version_unref(idle);
	return NULL;
}

uint64_t kv_file_ino(const struct kv_file *file)
{
	return file->ino;
}

pthread_mutex_t *kv_file_lock(struct kv_file *file)
{
	return &file->lock;
}

void **kv_file_cookie(struct kv_file *file)
{
	return &file->cookie;
}

void kv_file_consider_reap_locked(struct kv_file *file)
{
	if (!file->unlinked || file->reap_queued || file->reaped || file->inflight > 0 ||
		atomic_load(&file->opens) > 0)
		return;
	file->reap_queued = true;
	kv_reap_push(file->core, file->ino);
}

void kv_file_opened(struct kv_file *file)
{
	atomic_fetch_add(&file->opens, 1);
	atomic_fetch_add(&file->core->opens, 1);
}

void kv_file_closed(struct kv_file *file)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);

	atomic_fetch_sub(&file->core->opens, 1);
	KV_LOCKED(&shard->lock);
	assert(atomic_load(&file->opens) > 0);
	atomic_fetch_sub(&file->opens, 1);
	kv_file_consider_reap_locked(file);
}

/* A version of what the index has. */
static int version_from_inode(
	struct kv_file *file, const struct kv_inode *inode, struct kv_version **ret_version)
{
	struct kv_version *version = kv_version_alloc(file);

	if (!version)
		return -ENOMEM;
	version->state = KV_VERSION_COMMITTED;
	version->from_index = true;
	version->size = inode->size;
	version->number = inode->version;
	version->blocks = inode->blocks;
	version->mtime_ns = inode->mtime_ns;
	version->ctime_ns = inode->ctime_ns;
	kv_version_adopt(version);
	*ret_version = version;
	return 0;
}

/* Makes LOADED the current version unless something else happened since GENERATION. Takes LOADED
 * over. */
static bool install_current(struct kv_file *file, struct kv_version *loaded, uint64_t generation)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);

	{
		KV_LOCKED(&shard->lock);
		if (!file->current && file->generation == generation && !file->reaped) {
			/* kv_version_alloc could not know yet that it would be published. */
			TAILQ_INSERT_TAIL(&file->versions, loaded, sibling);
			file->current = loaded;
			file->generation++;
			file->last_number = kv_max_u64(file->last_number, loaded->number);
			return true;
		}
	}
	kv_version_unref(loaded);
	return false;
}

int kv_core_look(
	struct kv_core *core, uint64_t ino, const struct kv_seen *seen, struct kv_inode *ret_inode)
{
	if (!seen || kv_index_sequence(core->index) != seen->sequence)
		return kv_index_get(core->index, ino, ret_inode);
	*ret_inode = *seen->inode;
	return 0;
}

int kv_file_current(struct kv_file *file, struct kv_version **ret_version)
{
	return kv_file_current_seen(file, NULL, ret_version);
}

int kv_file_current_seen(
	struct kv_file *file, const struct kv_seen *seen, struct kv_version **ret_version)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	struct kv_version *loaded;
	struct kv_inode inode;
	uint64_t generation;
	int r;

	for (;;) {
		{
			KV_LOCKED(&shard->lock);
			if (file->quarantined || file->reaped)
				return -ENOENT;
			if (file->current) {
				*ret_version = kv_version_ref(file->current);
				return 0;
			}
			generation = file->generation;
		}
		/* Newer than that look at FILE: who changes an inode changes the file after it. */
		r = kv_core_look(file->core, file->ino, seen, &inode);
		if (r < 0)
			return r;
		if (!S_ISREG(inode.mode))
			return -EINVAL;
		if (inode.flags & (KV_INODE_HELD | KV_INODE_QUARANTINED))
			return -ENOENT;
		r = version_from_inode(file, &inode, &loaded);
		if (r < 0)
			return r;
		(void)install_current(file, loaded, generation);
	}
}

bool kv_file_is_current(struct kv_file *file, const struct kv_version *version)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	KV_LOCKED(&shard->lock);

	return file->current == version;
}

/* As relatime: the access time moves when it is behind the change, or a day old. */
static int64_t new_atime(struct kv_core *core, uint64_t ino, int64_t now_ns)
{
	struct kv_inode inode;

	if (kv_index_get(core->index, ino, &inode) < 0)
		return INT64_MIN;
	if (inode.atime_ns <= inode.mtime_ns || inode.atime_ns <= inode.ctime_ns ||
		now_ns - inode.atime_ns > DAY_NS)
		return now_ns;
	return INT64_MIN;
}

void kv_file_note_uses(struct kv_file *file)
{
	struct kv_core *core = file->core;
	int64_t touched_ns;
	uint32_t hits;

	{
		KV_LOCKED(&kv_shard_of(core, file->ino)->lock);
		if (file->hits == 0)
			return;
		touched_ns = file->touched_ns;
		file->noted_ns = touched_ns;
		hits = file->hits;
		file->hits = 0;
	}
	(void)kv_index_touch(
		core->index, file->ino, touched_ns, hits, new_atime(core, file->ino, touched_ns));
}

void kv_file_touch(struct kv_file *file)
{
	int64_t now_ns = kv_core_now_ns(file->core);
	bool recent;

	{
		KV_LOCKED(&kv_shard_of(file->core, file->ino)->lock);
		(void)kv_core_lease(file->core, file->ino);
		file->touched_ns = now_ns;
		file->hits++;
		recent = now_ns - file->noted_ns < SECOND_NS && now_ns >= file->noted_ns;
	}
	if (!recent)
		kv_file_note_uses(file);
}

void kv_file_used_at(struct kv_file *file, int64_t when_ns)
{
	struct kv_core *core = file->core;
	struct kv_version *current = NULL;
	struct kv_inode inode;

	const int64_t now_ns = kv_core_now_ns(core);

	when_ns = when_ns < now_ns ? when_ns : now_ns;
	{
		KV_LOCKED(&kv_shard_of(core, file->ino)->lock);
		if (when_ns <= file->touched_ns)
			return;
		file->touched_ns = when_ns;
		if (file->current)
			current = kv_version_ref(file->current);
	}
	if (kv_index_get(core->index, file->ino, &inode) == 0 && when_ns > inode.last_use_ns) {
		(void)kv_index_touch(core->index, file->ino, when_ns, 0, INT64_MIN);
		if (current) {
			KV_LOCKED(&current->lock);
			kv_version_relist_locked(current, true);
		}
	}
	kv_version_unref(current);
}

void kv_freed_release(struct kv_core *core, struct kv_freed_node *node)
{
	while (node) {
		struct kv_freed_node *next = node->next;

		kv_space_release(core->space, &node->freed);
		free(node);
		node = next;
	}
}

void kv_file_release(struct kv_file *file, struct kv_version *version, struct kv_freed *freed)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	struct kv_freed_node *node = freed->count > 0 ? malloc(sizeof(*node)) : NULL;

	{
		KV_LOCKED(&shard->lock);
		struct kv_version *older = version ? TAILQ_PREV(version, kv_version_queue, sibling)
						   : TAILQ_LAST(&file->versions, kv_version_queue);
		if (older && node) {
			*node = (struct kv_freed_node){.next = older->freed, .freed = *freed};
			older->freed = node;
			*freed = (struct kv_freed){0};
			return;
		}
		/* Without memory for the note the space is lost until the next mount rather than
		 * read as somebody else's. */
		if (older && freed->count > 0) {
			free(freed->extents);
			*freed = (struct kv_freed){0};
			return;
		}
	}
	free(node);
	kv_space_release(file->core->space, freed);
}

/* All threads are gone: only this one changes the table. Returns how many stay. */
static unsigned free_bucket(struct kv_link *link)
{
	struct kv_link *next;
	unsigned left = 0;

	for (; link; link = next) {
		struct kv_file *file = (struct kv_file *)link;
		struct kv_version *version = file->current;

		file->refs++;
		file->current = NULL;
		kv_version_unref(version);
		next = link->next;
		if (file->refs > 1)
			left++;
		kv_file_put(file);
	}
	return left;
}

unsigned kv_files_free(struct kv_core *core)
{
	unsigned left = 0;

	for (unsigned i = 0; i < KV_SHARDS; i++) {
		struct kv_table *files = &core->shards[i].files;

		for (size_t bucket = 0; bucket < files->used; bucket++)
			left += free_bucket(files->buckets[bucket]);
		if (files->count == 0)
			kv_table_done(files);
	}
	return left;
}
