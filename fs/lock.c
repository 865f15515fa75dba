/* SPDX-License-Identifier: Apache-2.0 */
/* File locks: see lock.h. */

#include "fs/lock.h"

#include <bsd/sys/queue.h>
#include <stdatomic.h>

#include "fs/base.h"

#define BUCKETS 256u

struct record {
	LIST_ENTRY(record) entry;
	struct kv_lock lock;
};
LIST_HEAD(record_list, record);

struct kv_locks {
	pthread_mutex_t mutex;
	struct record_list buckets[BUCKETS]; /* by ino */
	_Atomic unsigned count;              /* changed under the mutex */
};

struct kv_locks *kv_locks_new(void)
{
	struct kv_locks *locks = calloc(1, sizeof(*locks));

	if (locks)
		(void)pthread_mutex_init(&locks->mutex, NULL);
	return locks;
}

static struct record_list *bucket_of(struct kv_locks *locks, uint64_t ino)
{
	return &locks->buckets[ino % BUCKETS];
}

static void record_free(struct kv_locks *locks, struct record *record)
{
	LIST_REMOVE(record, entry);
	atomic_fetch_sub(&locks->count, 1);
	free(record);
}

static void record_add(struct kv_locks *locks, struct record *record, const struct kv_lock *lock)
{
	record->lock = *lock;
	LIST_INSERT_HEAD(bucket_of(locks, lock->ino), record, entry);
	atomic_fetch_add(&locks->count, 1);
}

struct kv_locks *kv_locks_free(struct kv_locks *locks)
{
	if (!locks)
		return NULL;
	for (unsigned i = 0; i < BUCKETS; i++)
		while (!LIST_EMPTY(&locks->buckets[i]))
			record_free(locks, LIST_FIRST(&locks->buckets[i]));
	(void)pthread_mutex_destroy(&locks->mutex);
	free(locks);
	return NULL;
}

unsigned kv_locks_count(struct kv_locks *locks)
{
	return atomic_load(&locks->count);
}

/* ---- Ranges ---- */

static bool is_same_kind(const struct kv_lock *a, const struct kv_lock *b)
{
	return a->ino == b->ino && a->whole == b->whole;
}

static bool overlaps(const struct kv_lock *a, const struct kv_lock *b)
{
	return a->start <= b->end && b->start <= a->end;
}

/* No byte between them is neither one's. */
static bool touches(const struct kv_lock *a, const struct kv_lock *b)
{
	return (a->start == 0 || a->start - 1 <= b->end) &&
	       (b->start == 0 || b->start - 1 <= a->end);
}

/* Mutex held. */
static struct record *find_conflict(struct kv_locks *locks, const struct kv_lock *lock)
{
	struct record *record;

	LIST_FOREACH (record, bucket_of(locks, lock->ino), entry)
		if (is_same_kind(&record->lock, lock) && record->lock.owner != lock->owner &&
			overlaps(&record->lock, lock) &&
			(record->lock.exclusive || lock->exclusive))
			return record;
	return NULL;
}

/* Mutex held. Whether LOCK's range lies inside one of its owner's, which clearing would split. */
static bool would_split(struct kv_locks *locks, const struct kv_lock *lock)
{
	struct record *record;

	LIST_FOREACH (record, bucket_of(locks, lock->ino), entry)
		if (is_same_kind(&record->lock, lock) && record->lock.owner == lock->owner &&
			record->lock.start < lock->start && record->lock.end > lock->end)
			return true;
	return false;
}

/*
 * Mutex held. Takes LOCK's range away from its owner. SPARE, if a split needs it, is used up. True
 * if anything was there.
 */
static bool clear_range(struct kv_locks *locks, const struct kv_lock *lock, struct record **spare)
{
	struct record *record;
	struct record *next;
	bool cleared = false;

	LIST_FOREACH_SAFE (record, bucket_of(locks, lock->ino), entry, next) {
		struct kv_lock *old = &record->lock;
		struct kv_lock behind = *old;

		if (!is_same_kind(old, lock) || old->owner != lock->owner || !overlaps(old, lock))
			continue;
		cleared = true;
		if (old->start < lock->start && old->end > lock->end) {
			behind.start = lock->end + 1;
			record_add(locks, kv_steal_ptr(spare), &behind);
			old->end = lock->start - 1;
		} else if (old->start < lock->start) {
			old->end = lock->start - 1;
		} else if (old->end > lock->end) {
			old->start = lock->end + 1;
		} else {
			record_free(locks, record);
		}
	}
	return cleared;
}

/* Mutex held. Widens LOCK by what its owner has of the same type next to it, which goes. */
static void absorb_neighbours(struct kv_locks *locks, struct kv_lock *lock)
{
	struct record *record;
	struct record *next;

	LIST_FOREACH_SAFE (record, bucket_of(locks, lock->ino), entry, next) {
		const struct kv_lock *old = &record->lock;

		/* Through another handle it ends with that one. */
		if (!is_same_kind(old, lock) || old->owner != lock->owner ||
			old->handle != lock->handle || old->exclusive != lock->exclusive ||
			!touches(old, lock))
			continue;
		lock->start = kv_min_u64(lock->start, old->start);
		lock->end = kv_max_u64(lock->end, old->end);
		record_free(locks, record);
	}
}

/* ---- Taking and giving up ---- */

int kv_lock_take(struct kv_locks *locks, const struct kv_lock *lock, struct kv_lock *ret_conflict)
{
	struct record *record = malloc(sizeof(*record));
	struct record *spare = malloc(sizeof(*spare));
	struct kv_lock taken = *lock;
	const struct record *conflict;
	int r = record && spare ? 0 : -ENOMEM;

	assert(lock->start <= lock->end && lock->end <= KV_LOCK_END_MAX);
	if (r == 0) {
		KV_LOCKED(&locks->mutex);

		if (lock->whole)
			(void)clear_range(locks, lock, NULL);
		conflict = find_conflict(locks, lock);
		if (conflict) {
			*ret_conflict = conflict->lock;
			r = -EAGAIN;
		} else if (atomic_load(&locks->count) + 2 > KV_LOCKS_MAX) {
			r = -ENOLCK;
		} else {
			(void)clear_range(locks, lock, &spare);
			absorb_neighbours(locks, &taken);
			record_add(locks, kv_steal_ptr(&record), &taken);
		}
	}
	free(record);
	free(spare);
	return r;
}

bool kv_lock_conflicts(
	struct kv_locks *locks, const struct kv_lock *lock, struct kv_lock *ret_conflict)
{
	KV_LOCKED(&locks->mutex);
	const struct record *conflict = find_conflict(locks, lock);

	if (conflict)
		*ret_conflict = conflict->lock;
	return conflict != NULL;
}

int kv_lock_give_up(struct kv_locks *locks, const struct kv_lock *lock, bool *ret_released)
{
	struct record *spare = malloc(sizeof(*spare));
	int r = 0;

	{
		KV_LOCKED(&locks->mutex);

		if (would_split(locks, lock)) {
			if (!spare)
				r = -ENOMEM;
			else if (atomic_load(&locks->count) + 1 > KV_LOCKS_MAX)
				r = -ENOLCK;
		}
		if (r == 0)
			*ret_released = clear_range(locks, lock, &spare);
	}
	free(spare);
	return r;
}

bool kv_lock_owner_closed(struct kv_locks *locks, uint64_t ino, uint64_t owner)
{
	const struct kv_lock all = {.ino = ino, .owner = owner, .end = KV_LOCK_END_MAX};

	/* Relaxed: whoever closes has taken its locks before. */
	if (atomic_load_explicit(&locks->count, memory_order_relaxed) == 0)
		return false;
	KV_LOCKED(&locks->mutex);
	return clear_range(locks, &all, NULL);
}

bool kv_lock_handle_closed(struct kv_locks *locks, uint64_t ino, const void *handle)
{
	struct record *record;
	struct record *next;
	bool released = false;

	if (atomic_load_explicit(&locks->count, memory_order_relaxed) == 0)
		return false;
	KV_LOCKED(&locks->mutex);
	LIST_FOREACH_SAFE (record, bucket_of(locks, ino), entry, next) {
		if (record->lock.ino != ino || record->lock.handle != handle)
			continue;
		record_free(locks, record);
		released = true;
	}
	return released;
}

void kv_lock_handle_closing(struct kv_locks *locks, uint64_t ino, const void *handle)
{
	struct record *record;

	if (atomic_load_explicit(&locks->count, memory_order_relaxed) == 0)
		return;
	KV_LOCKED(&locks->mutex);
	LIST_FOREACH (record, bucket_of(locks, ino), entry)
		if (record->lock.ino == ino && record->lock.handle == handle)
			record->lock.unsure = true;
}
