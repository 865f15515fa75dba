/* SPDX-License-Identifier: Apache-2.0 */
/* Parked requests: see parking.h. */

#include "fs/parking.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define BUCKETS 256u
#define MS_PER_S 1000
#define NS_PER_MS 1000000
/*
 * The kernel tells of the first signal only (fs/fuse/dev.c, request_wait_answer), and that one may
 * have been harmless: whoever got one is looked at this often.
 */
#define INTERRUPTED_LOOK_MS 50

TAILQ_HEAD(parked_queue, kv_parked);
STAILQ_HEAD(ready_queue, kv_parked);
RB_HEAD(due_tree, kv_parked);

struct kv_parking {
	struct kv_daemon *daemon;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t work;
	_Atomic unsigned count;
	/* Guarded by the lock: */
	struct parked_queue buckets[BUCKETS];
	struct ready_queue ready;
	struct due_tree due;
	bool stop;
};

static int compare_due(struct kv_parked *a, struct kv_parked *b)
{
	if (a->due_ms != b->due_ms)
		return a->due_ms < b->due_ms ? -1 : 1;
	return a < b ? -1 : a > b;
}

KV_TREE_GENERATE(due_tree, kv_parked, by_due, compare_due)

static struct parked_queue *bucket_of(struct kv_parking *parking, uint64_t key)
{
	return &parking->buckets[key % BUCKETS];
}

/* Lock held. */
static void make_ready(struct kv_parking *parking, struct kv_parked *parked)
{
	if (parked->is_ready)
		return;
	parked->is_ready = true;
	STAILQ_INSERT_TAIL(&parking->ready, parked, ready);
	(void)pthread_cond_signal(&parking->work);
}

/* Lock held. */
static void untime(struct kv_parking *parking, struct kv_parked *parked)
{
	if (parked->is_timed)
		(void)RB_REMOVE(due_tree, &parking->due, parked);
	parked->is_timed = false;
}

/* Lock held. */
static void set_time(struct kv_parking *parking, struct kv_parked *parked)
{
	int64_t due_ms = parked->end_ms;

	untime(parking, parked);
	if (parked->interrupted)
		due_ms = (int64_t)kv_min_u64(
			(uint64_t)due_ms, (uint64_t)kv_monotonic_ms() + INTERRUPTED_LOOK_MS);
	if (due_ms == INT64_MAX)
		return;
	parked->due_ms = due_ms;
	parked->is_timed = true;
	(void)RB_INSERT(due_tree, &parking->due, parked);
}

/* libfuse calls it on the worker that read the INTERRUPT, with the request's lock held. */
static void on_interrupt(fuse_req_t req, void *data)
{
	struct kv_parked *parked = data;
	struct kv_parking *parking = parked->parking;

	(void)req;
	KV_LOCKED(&parking->lock);
	parked->interrupted = true;
	if (parked->is_parked)
		make_ready(parking, parked);
}

/* ---- The thread ---- */

static void wait_for_work(struct kv_parking *parking)
{
	const struct kv_parked *next = RB_MIN(due_tree, &parking->due);
	struct timespec due;

	if (!next) {
		(void)pthread_cond_wait(&parking->work, &parking->lock);
		return;
	}
	due.tv_sec = next->due_ms / MS_PER_S;
	due.tv_nsec = next->due_ms % MS_PER_S * NS_PER_MS;
	(void)pthread_cond_timedwait(&parking->work, &parking->lock, &due);
}

/* Lock held. The next one to be looked at, or NULL. */
static struct kv_parked *take_ready(struct kv_parking *parking)
{
	struct kv_parked *parked = STAILQ_FIRST(&parking->ready);

	if (parked) {
		STAILQ_REMOVE_HEAD(&parking->ready, ready);
		parked->is_ready = false;
		return parked;
	}
	parked = RB_MIN(due_tree, &parking->due);
	return parked && parked->due_ms <= kv_monotonic_ms() ? parked : NULL;
}

/* Lock held. */
static enum kv_parked_why why_now(const struct kv_parking *parking, const struct kv_parked *parked)
{
	if (parking->stop)
		return KV_PARKED_ENDING;
	if (parked->end_ms <= kv_monotonic_ms())
		return KV_PARKED_LATE;
	return parked->interrupted ? KV_PARKED_INTERRUPTED : KV_PARKED_WOKEN;
}

/* Lock held. */
static void leave(struct kv_parking *parking, struct kv_parked *parked)
{
	untime(parking, parked);
	if (parked->is_ready)
		STAILQ_REMOVE(&parking->ready, parked, kv_parked, ready);
	TAILQ_REMOVE(bucket_of(parking, parked->key), parked, by_key);
	parked->is_ready = parked->is_parked = false;
	atomic_fetch_sub(&parking->count, 1);
}

/* Lock held, and released meanwhile: what happens then makes PARKED ready again. */
static void look_at(struct kv_parking *parking, struct kv_parked *parked)
{
	enum kv_parked_why why = why_now(parking, parked);
	int result;

	(void)pthread_mutex_unlock(&parking->lock);
	result = parked->look(parking->daemon, parked, why);
	(void)pthread_mutex_lock(&parking->lock);
	if (result == KV_PARKED_STAYS) {
		set_time(parking, parked);
		return;
	}
	leave(parking, parked);
	(void)pthread_mutex_unlock(&parking->lock);
	/* Waits for on_interrupt if that is running; it is not called any more. */
	fuse_req_interrupt_func(parked->req, NULL, NULL);
	parked->answer(parking->daemon, parked, result);
	(void)pthread_mutex_lock(&parking->lock);
}

/* Lock held. Any one that is parked, or NULL. */
static struct kv_parked *any_parked(struct kv_parking *parking)
{
	for (unsigned i = 0; i < BUCKETS; i++)
		if (!TAILQ_EMPTY(&parking->buckets[i]))
			return TAILQ_FIRST(&parking->buckets[i]);
	return NULL;
}

static void *parking_thread(void *arg)
{
	struct kv_parking *parking = arg;
	struct kv_parked *parked;
	KV_LOCKED(&parking->lock);

	for (;;) {
		parked = take_ready(parking);
		if (!parked && parking->stop)
			parked = any_parked(parking);
		if (parked)
			look_at(parking, parked);
		else if (parking->stop)
			return NULL;
		else
			wait_for_work(parking);
	}
}

/* ---- Life ---- */

int kv_parking_new(struct kv_daemon *daemon, struct kv_parking **ret_parking)
{
	struct kv_parking *parking = calloc(1, sizeof(*parking));
	pthread_condattr_t attr;
	int r;

	if (!parking)
		return -ENOMEM;
	parking->daemon = daemon;
	for (unsigned i = 0; i < BUCKETS; i++)
		TAILQ_INIT(&parking->buckets[i]);
	STAILQ_INIT(&parking->ready);
	RB_INIT(&parking->due);
	(void)pthread_mutex_init(&parking->lock, NULL);
	(void)pthread_condattr_init(&attr);
	(void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&parking->work, &attr);
	(void)pthread_condattr_destroy(&attr);
	r = pthread_create(&parking->thread, NULL, parking_thread, parking);
	if (r != 0) {
		free(parking);
		return -r;
	}
	*ret_parking = parking;
	return 0;
}

void kv_parking_stop(struct kv_parking *parking)
{
	if (!parking)
		return;
	(void)pthread_mutex_lock(&parking->lock);
	parking->stop = true;
	(void)pthread_cond_signal(&parking->work);
	(void)pthread_mutex_unlock(&parking->lock);
	(void)pthread_join(parking->thread, NULL);
	assert(atomic_load(&parking->count) == 0);
}

struct kv_parking *kv_parking_free(struct kv_parking *parking)
{
	if (!parking)
		return NULL;
	(void)pthread_cond_destroy(&parking->work);
	(void)pthread_mutex_destroy(&parking->lock);
	free(parking);
	return NULL;
}

/* ---- Parking ---- */

int kv_parking_add(struct kv_parking *parking, struct kv_parked *parked)
{
	if (atomic_fetch_add(&parking->count, 1) >= KV_PARKED_MAX) {
		atomic_fetch_sub(&parking->count, 1);
		return -ENOBUFS;
	}
	parked->parking = parking;
	parked->end_ms = parked->wait_ms < 0 ? INT64_MAX : kv_monotonic_ms() + parked->wait_ms;
	/* Once it is parked it may be answered, and freed, at any time. */
	fuse_req_interrupt_func(parked->req, on_interrupt, parked);
	KV_LOCKED(&parking->lock);
	parked->is_parked = true;
	TAILQ_INSERT_TAIL(bucket_of(parking, parked->key), parked, by_key);
	make_ready(parking, parked);
	return 0;
}

void kv_parking_wake(struct kv_parking *parking, uint64_t key)
{
	struct kv_parked *parked;

	/* Whoever is being parked now looks for itself afterwards. */
	if (atomic_load(&parking->count) == 0)
		return;
	KV_LOCKED(&parking->lock);
	TAILQ_FOREACH (parked, bucket_of(parking, key), by_key)
		if (parked->key == key)
			make_ready(parking, parked);
}

unsigned kv_parking_count(struct kv_parking *parking)
{
	return atomic_load(&parking->count);
}
