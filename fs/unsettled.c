/* SPDX-License-Identifier: Apache-2.0 */
/* Versions that another process has left unsettled: see unsettled.h. */
#include "fs/core_internal.h"

#include <errno.h>
#include <stdlib.h>

/* What an earlier process has left. */
struct kv_remains {
	struct kv_unsettled *note;
	uint64_t id;
	uint64_t serial;
	uint64_t ino;
	uint64_t number;
	struct kv_version *version; /* when it was taken up */
};

/* ---- Notes of our own versions ---- */

void kv_unsettled_begin(struct kv_version *version)
{
	struct kv_unsettled_notes *notes = version->file->core->unsettled.notes;

	if (!notes)
		return;
	uint64_t id = atomic_fetch_add(&notes->last, 1) + 1;
	for (uint32_t i = 0; i < KV_UNSETTLED_MAX && !version->note; i++) {
		struct kv_unsettled *note = &notes->notes[(id + i) % KV_UNSETTLED_MAX];
		uint64_t none = 0;

		/* Without a file it does not count. */
		if (atomic_load(&note->id) != 0 ||
			!atomic_compare_exchange_strong(&note->id, &none, UINT64_MAX))
			continue;
		atomic_store(&note->ino, version->file->ino);
		atomic_store(&note->serial, 0);
		atomic_store(&note->lost, version->base != NULL);
		version->note = note;
		kv_unsettled_changed(version);
		atomic_store(&note->id, id);
	}
}

void kv_unsettled_changed(struct kv_version *version)
{
	struct kv_unsettled *note = version->note;

	if (!note)
		return;
	atomic_store_explicit(&note->mtime_ns, version->mtime_ns, memory_order_relaxed);
	atomic_store_explicit(&note->ctime_ns, version->ctime_ns, memory_order_relaxed);
	atomic_store_explicit(&note->changed, version->changed, memory_order_relaxed);
	atomic_store_explicit(&note->size, version->size, memory_order_relaxed);
	atomic_store_explicit(&note->number, version->number, memory_order_release);
}

void kv_unsettled_object(struct kv_version *version, uint64_t serial)
{
	if (version->note)
		atomic_store(&version->note->serial, serial);
}

void kv_unsettled_lose(struct kv_version *version)
{
	if (version->note)
		atomic_store(&version->note->lost, true);
}

void kv_version_is_short(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	kv_unsettled_lose(version);
}

void kv_unsettled_end(struct kv_version *version)
{
	if (version->note)
		atomic_store(&version->note->id, 0);
	version->note = NULL;
}

uint64_t kv_version_note(struct kv_version *version)
{
	KV_LOCKED(&version->lock);

	return version->note ? atomic_load(&version->note->id) : 0;
}

/* ---- What another process has left ---- */

static int compare_u64(uint64_t a, uint64_t b)
{
	return a < b ? -1 : a > b;
}

static int compare_id(const void *a, const void *b)
{
	return compare_u64(((const struct kv_remains *)a)->id, ((const struct kv_remains *)b)->id);
}

/* Published ones of a file first, in their order. */
static int compare_age(const void *a, const void *b)
{
	const struct kv_remains *one = a, *other = b;
	int r = compare_u64(one->ino, other->ino);

	/* 0, not published, comes last. */
	return r != 0 ? r : compare_u64(one->number - 1, other->number - 1);
}

static bool is_left(struct kv_unsettled *note)
{
	uint64_t id = atomic_load(&note->id);

	if (id == 0)
		return false;
	if (id != UINT64_MAX && !atomic_load(&note->lost))
		return true;
	atomic_store(&note->id, 0);
	return false;
}

int kv_unsettled_find(struct kv_core *core)
{
	struct kv_unsettled_notes *notes = core->unsettled.notes;
	size_t count = 0;

	for (uint32_t i = 0; notes && i < KV_UNSETTLED_MAX; i++)
		count += is_left(&notes->notes[i]);
	if (count == 0)
		return 0;
	core->unsettled.remains = calloc(count, sizeof(*core->unsettled.remains));
	if (!core->unsettled.remains)
		return -ENOMEM;
	for (uint32_t i = 0; i < KV_UNSETTLED_MAX; i++) {
		struct kv_unsettled *note = &notes->notes[i];

		if (!is_left(note))
			continue;
		core->unsettled.remains[core->unsettled.count++] = (struct kv_remains){
			.note = note,
			.id = atomic_load(&note->id),
			.serial = atomic_load(&note->serial),
			.ino = atomic_load(&note->ino),
			.number = atomic_load(&note->number),
		};
		/* Names of objects are never used twice. */
		atomic_store(&core->objects,
			kv_max_u64(atomic_load(&core->objects), atomic_load(&note->serial)));
	}
	qsort(core->unsettled.remains, core->unsettled.count, sizeof(*core->unsettled.remains),
		compare_age);
	return 0;
}

bool kv_unsettled_has(void *arg, const struct kv_mark *mark)
{
	struct kv_core *core = arg;

	for (size_t i = 0; i < core->unsettled.count; i++)
		if (core->unsettled.remains[i].serial == mark->serial &&
			core->unsettled.remains[i].ino == mark->ino)
			return true;
	return false;
}

/* FOUND's object becomes VERSION's, as NOTE says. */
static int attach(struct kv_version *version, struct kv_unsettled *note, struct kv_found *found,
	bool published)
{
	int r = 0;

	if (found->object)
		r = kv_version_attach(version, found, atomic_load(&note->size));
	if (r < 0)
		return r;
	KV_LOCKED(&version->lock);
	version->size = atomic_load(&note->size);
	version->mtime_ns = atomic_load(&note->mtime_ns);
	version->ctime_ns = atomic_load(&note->ctime_ns);
	version->mtime_set = version->ctime_set = published;
	version->changed = atomic_load(&note->changed);
	version->exposed = published;
	/* From here on the note is this version's. */
	if (version->note)
		atomic_store(&version->note->id, 0);
	version->note = note;
	return 0;
}

static void expect_number(struct kv_file *file, uint64_t number)
{
	struct kv_shard *shard = kv_shard_of(file->core, file->ino);
	KV_LOCKED(&shard->lock);

	file->last_number = number - 1;
}

/* Whether the index has it by now. */
static bool is_committed(struct kv_core *core, const struct kv_remains *remains)
{
	struct kv_inode inode;

	return remains->number != 0 && (kv_index_get(core->index, remains->ino, &inode) < 0 ||
					       inode.version >= remains->number);
}

static int make_version(struct kv_file *file, struct kv_remains *remains)
{
	struct kv_core *core = file->core;
	const struct kv_mark mark = {.ino = remains->ino, .serial = remains->serial};
	struct kv_found found = {0};
	struct kv_version *version;
	int r = kv_version_new(file, NULL, &version);

	if (r < 0)
		return r;
	if (mark.serial != 0)
		r = kv_object_find(core->dram, &mark, &found);
	if (r == 0)
		r = attach(version, remains->note, &found, remains->number != 0);
	kv_object_free(found.object);
	if (r == 0 && remains->number != 0) {
		expect_number(file, remains->number);
		r = kv_version_publish(version);
	}
	if (r < 0)
		kv_version_unref(version);
	else
		remains->version = version;
	return r;
}

static int take_up(struct kv_core *core, struct kv_remains *remains)
{
	struct kv_file *file;
	struct kv_inode inode;
	int r = kv_index_get(core->index, remains->ino, &inode);

	if (r < 0)
		return r;
	r = kv_file_get(core, remains->ino, &file);
	if (r < 0)
		return r;
	r = make_version(file, remains);
	kv_file_put(file);
	return r;
}

static void drop_object(struct kv_core *core, const struct kv_remains *remains)
{
	const struct kv_mark mark = {.ino = remains->ino, .serial = remains->serial};
	struct kv_found found;

	if (remains->serial != 0 && kv_object_find(core->dram, &mark, &found) == 0)
		kv_object_free(found.object);
}

void kv_core_take_up(struct kv_core *core)
{
	unsigned taken = 0;

	for (size_t i = 0; i < core->unsettled.count; i++) {
		struct kv_remains *remains = &core->unsettled.remains[i];
		int r = is_committed(core, remains) ? -EALREADY : take_up(core, remains);

		taken += r == 0;
		if (r == 0)
			continue;
		if (r != -EALREADY)
			kv_log_warning("unsettled", "lost ino=%llu error=%s",
				(unsigned long long)remains->ino, strerror(-r));
		atomic_store(&remains->note->id, 0);
		drop_object(core, remains);
	}
	if (core->unsettled.count == 0)
		return;
	kv_log_info("unsettled", "goes on with versions=%u of=%zu", taken, core->unsettled.count);
	qsort(core->unsettled.remains, core->unsettled.count, sizeof(*core->unsettled.remains),
		compare_id);
}

struct kv_version *kv_core_claim(struct kv_core *core, uint64_t note)
{
	const struct kv_remains key = {.id = note};
	struct kv_remains *remains =
		core->unsettled.count == 0
			? NULL
			: bsearch(&key, core->unsettled.remains, core->unsettled.count, sizeof(key),
				  compare_id);

	return remains && remains->version ? kv_version_ref(remains->version) : NULL;
}

void kv_unsettled_go_on(struct kv_core *core)
{
	for (size_t i = 0; i < core->unsettled.count; i++)
		kv_version_unref(core->unsettled.remains[i].version);
	free(core->unsettled.remains);
	core->unsettled.remains = NULL;
	core->unsettled.count = 0;
}
