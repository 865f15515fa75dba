/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Group commit. One thread takes all pending records as the batch, writes them in one LMDB
 * transaction and syncs it; meanwhile the batch stays visible as the flushing layer. A batch that
 * fails stays there and is tried again, every second, or when somebody asks; until it succeeds
 * operations are refused.
 *
 * A sync that failed once (and whose pages the kernel then takes for clean) is not believed later:
 * a retry writes every page of the batch anew, or, where only the head was left to sync, the head.
 */
#include <time.h>

#include "fs/crash.h"
#include "fs/wait.h"
#include "index/journal.h"

#define RETRY_NS INT64_C(1000000000)
/* Memory comes back: a batch that lacked some is tried that often before anybody hears of it. */
#define MEMORY_RETRIES_MAX 8u
#define MEMORY_RETRY_NS INT64_C(10000000)
#define NS_PER_S INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)

/* ---- The batch ---- */

/* Whether the transaction has to be written although no operation is waiting. */
static bool ino_margin_low(struct kv_index *index)
{
	uint64_t next = atomic_load_explicit(&index->next_ino, memory_order_relaxed);
	uint64_t limit = atomic_load_explicit(&index->ino_limit, memory_order_relaxed);

	return limit - next < KV_INO_MARGIN / 2;
}

static int batch_add_state(struct kv_index *index, uint64_t ino_limit)
{
	struct kv_key key = kv_key_single(KV_TABLE_META, KV_META_STATE);
	struct kv_record *record = kv_record_new(KV_RECORD_VALUE, &key, KV_STATE_RECORD_SIZE);
	struct kv_state state = {
		.next_ino = ino_limit,
		.inodes = index->inodes,
		.used_blocks = kv_space_used(index->space),
	};

	if (!record)
		return -ENOMEM;
	kv_state_encode(&state, record->value);
	kv_overlay_put(&index->pending, record);
	return 0;
}

/* Under the lock: pending becomes the batch, with the space and the counters as of now. */
static int batch_take_locked(struct kv_index *index, bool last)
{
	uint64_t next = atomic_load_explicit(&index->next_ino, memory_order_relaxed);
	int r;

	index->batch_ino_limit = last ? next : next + KV_INO_MARGIN;
	r = kv_space_collect(index->space, &index->pending);
	if (r >= 0)
		r = kv_domains_collect(index);
	/* Who opened and closed and did nothing leaves every byte as it was. */
	if (r >= 0 && (index->pending.count > 0 ||
			      (last ? atomic_load(&index->sequence) > 0 : ino_margin_low(index))))
		r = batch_add_state(index, index->batch_ino_limit);
	if (r < 0)
		return r;
	kv_overlay_move(&index->flushing, &index->pending);
	atomic_store_explicit(&index->pending_weight, 0, memory_order_relaxed);
	index->batch_sequence = atomic_load_explicit(&index->sequence, memory_order_relaxed);
	index->batch_taken = true;
	kv_journal_turn(index);
	return 0;
}

static int batch_take(struct kv_index *index, bool last)
{
	int r;

	(void)pthread_rwlock_wrlock(&index->lock);
	r = batch_take_locked(index, last);
	(void)pthread_rwlock_unlock(&index->lock);
	return r;
}

static int batch_put(struct kv_index *index, MDB_txn *txn, struct kv_record *record)
{
	MDB_val key = {.mv_size = record->key.size, .mv_data = record->key.bytes};
	int code;

	assert(record->kind == KV_RECORD_VALUE || record->kind == KV_RECORD_TOMBSTONE);
	if (record->kind == KV_RECORD_VALUE)
		return kv_index_put(txn, index->dbi, &record->key, record->value, record->size);
	code = mdb_del(txn, index->dbi, &key, NULL);
	return code == MDB_NOTFOUND ? 0 : code; /* made and removed within one batch */
}

static int batch_fail_wanted(struct kv_index *index)
{
	unsigned left = atomic_load_explicit(&index->fail_count, memory_order_acquire);

	if (left == 0)
		return 0;
	if (left != UINT32_MAX)
		atomic_store_explicit(&index->fail_count, left - 1, memory_order_release);
	return atomic_load_explicit(&index->fail_error, memory_order_relaxed);
}

/* The layer is read without the lock: nobody but this thread changes it. */
static int batch_write(struct kv_index *index)
{
	struct kv_record *record;
	MDB_txn *txn;
	int code = mdb_txn_begin(index->env, NULL, 0, &txn);

	if (code != 0)
		return code;
	for (record = kv_overlay_first(&index->flushing); record && code == 0;
		record = kv_overlay_next(record))
		code = batch_put(index, txn, record);
	if (code == 0)
		code = batch_fail_wanted(index);
	if (code != 0) {
		mdb_txn_abort(txn);
		return code;
	}
	kv_journal_commits(index, mdb_txn_id(txn));
	kv_crash_point("index-filled");
	code = mdb_txn_commit(txn);
	kv_crash_point("index-committed");
	if (code == 0)
		kv_journal_committed(index);
	index->broken = code != 0;
	return code;
}

/* Makes the batch durable, from where the last attempt stopped. */
static int batch_commit(struct kv_index *index)
{
	int r = 0;

	if (index->unsynced) {
		r = kv_env_sync_again(index);
	} else {
		r = kv_index_errno(batch_write(index));
		index->unsynced = r == 0;
		if (r == 0) /* NOMETASYNC: without this the commit may be undone by a power cut */
			r = kv_index_errno(mdb_env_sync(index->env, 1));
	}
	kv_crash_point("index-synced");
	if (r == 0) {
		index->unsynced = false;
		atomic_fetch_add_explicit(&index->commits, 1, memory_order_relaxed);
	}
	/* At once, for nobody can read meanwhile. */
	if (index->broken && kv_env_reopen(index) == 0)
		index->broken = false;
	return r;
}

static void batch_done(struct kv_index *index)
{
	struct kv_overlay written;

	kv_overlay_init(&written);
	(void)pthread_rwlock_wrlock(&index->lock);
	if (index->flushing.count > 0) {
		kv_overlay_move(&written, &index->flushing);
		atomic_store_explicit(
			&index->ino_limit, index->batch_ino_limit, memory_order_relaxed);
	}
	index->batch_taken = false;
	(void)pthread_rwlock_unlock(&index->lock);
	kv_overlay_done(&written);
	/* First the space, so that whoever waited for the commit finds it. */
	kv_space_durable(index->space, index->batch_sequence);
}

static void commit_report(struct kv_index *index, int r)
{
	unsigned suppressed;
	int before = atomic_load_explicit(&index->commit_error, memory_order_relaxed);

	index->memory_retries = r == -ENOMEM ? index->memory_retries + 1 : 0;
	if (r == -ENOMEM && index->memory_retries <= MEMORY_RETRIES_MAX)
		return;
	if (r < 0 && kv_log_allowed(&index->commit_log, &suppressed))
		kv_log_error("index",
			"commit failed, changes are refused until a retry succeeds error=\"%s\" "
			"suppressed=%u",
			strerror(-r), suppressed);
	if (r == 0 && before < 0)
		kv_log_info("index", "commit succeeded again");
	(void)pthread_mutex_lock(&index->commit_lock);
	atomic_store_explicit(&index->commit_error, r, memory_order_release);
	index->attempts++;
	if (r == 0)
		index->durable = index->batch_sequence;
	(void)pthread_cond_broadcast(&index->commit_done);
	(void)pthread_mutex_unlock(&index->commit_lock);
}

static int commit_once(struct kv_index *index, bool last)
{
	int r = index->batch_taken ? 0 : batch_take(index, last);

	if (r == 0 && !index->env)
		r = kv_env_reopen(index);
	if (r == 0 && index->flushing.count > 0)
		r = batch_commit(index);
	if (r == 0)
		batch_done(index);
	/* A failed one may have used the reserve up. */
	kv_reserve_update(index);
	commit_report(index, r);
	return r;
}

/* At the end there is no later. */
static int commit_insist(struct kv_index *index, bool last)
{
	int r = commit_once(index, last);

	while (r == -ENOMEM && index->memory_retries <= MEMORY_RETRIES_MAX)
		r = commit_once(index, last);
	return r;
}

int kv_commit_now(struct kv_index *index)
{
	return commit_insist(index, false);
}

/* ---- The thread ---- */

/* Until the deadline, or a stop, or a waiter, or GOAL records are pending. */
static void commit_wait(struct kv_index *index, int64_t wait_ns, uint64_t goal)
{
	int64_t deadline_ns = kv_monotonic_ns() + wait_ns;
	struct timespec deadline = {
		.tv_sec = deadline_ns / NS_PER_S, .tv_nsec = deadline_ns % NS_PER_S};

	while (!index->commit_stop && !index->commit_urgent && kv_monotonic_ns() < deadline_ns &&
		atomic_load_explicit(&index->pending_weight, memory_order_relaxed) < goal)
		(void)pthread_cond_timedwait(&index->commit_work, &index->commit_lock, &deadline);
}

/*
 * Asked right before every sleep. By the exchange, an operation either is seen here or finds the
 * flag down and sends its signal; nothing in between may lower the flag, for then an operation
 * could be taken into a batch and leave it up behind a thread that sleeps.
 */
static bool commit_has_work(struct kv_index *index)
{
	(void)atomic_exchange_explicit(&index->commit_awake, false, memory_order_acq_rel);
	return index->batch_taken ||
	       atomic_load_explicit(&index->sequence, memory_order_acquire) != index->durable;
}

/* Waits for something to commit, and then for company. Returns whether to stop. */
static bool commit_pause(struct kv_index *index)
{
	bool stop;

	(void)pthread_mutex_lock(&index->commit_lock);
	if (atomic_load_explicit(&index->commit_error, memory_order_relaxed) < 0) {
		commit_wait(index, RETRY_NS, UINT64_MAX);
	} else if (index->memory_retries > 0) {
		commit_wait(index, MEMORY_RETRY_NS, UINT64_MAX);
	} else {
		while (!index->commit_stop && !index->commit_urgent && !commit_has_work(index))
			(void)pthread_cond_wait(&index->commit_work, &index->commit_lock);
		commit_wait(index, (int64_t)index->commit_delay_ms * NS_PER_MS, KV_PENDING_GOAL);
	}
	index->commit_urgent = false;
	stop = index->commit_stop;
	(void)pthread_mutex_unlock(&index->commit_lock);
	return stop;
}

static void *commit_main(void *arg)
{
	struct kv_index *index = arg;

	while (!commit_pause(index))
		(void)commit_once(index, false);
	/* A batch that was taken before the stop first, then what is left, with exact counters. */
	if (index->batch_taken && commit_insist(index, false) < 0)
		return NULL;
	(void)commit_insist(index, true);
	return NULL;
}

int kv_commit_start(struct kv_index *index)
{
	int r;

	atomic_store(&index->pending_max, KV_PENDING_MAX);
	kv_reserve_update(index);
	r = pthread_create(&index->commit_thread, NULL, commit_main, index);

	index->commit_started = r == 0;
	return -r;
}

void kv_commit_stop(struct kv_index *index)
{
	if (!index->commit_started)
		return;
	(void)pthread_mutex_lock(&index->commit_lock);
	index->commit_stop = true;
	(void)pthread_cond_signal(&index->commit_work);
	(void)pthread_mutex_unlock(&index->commit_lock);
	(void)pthread_join(index->commit_thread, NULL);
	index->commit_started = false;
	if (index->durable != atomic_load(&index->sequence))
		kv_log_error("index", "closed without a last commit operations_lost=%llu",
			(unsigned long long)(atomic_load(&index->sequence) - index->durable));
}

/* ---- Those who use it ---- */

bool kv_commit_is_full(struct kv_index *index)
{
	return atomic_load_explicit(&index->pending_weight, memory_order_relaxed) >
		       atomic_load_explicit(&index->pending_max, memory_order_relaxed) ||
	       ino_margin_low(index) || kv_journal_is_full(index);
}

static void commit_hurry(struct kv_index *index)
{
	index->commit_urgent = true;
	(void)pthread_cond_signal(&index->commit_work);
}

int kv_commit_admit(struct kv_index *index)
{
	int r = atomic_load_explicit(&index->commit_error, memory_order_acquire);

	if (r < 0 || !kv_commit_is_full(index))
		return r;
	(void)pthread_mutex_lock(&index->commit_lock);
	while ((r = atomic_load_explicit(&index->commit_error, memory_order_acquire)) == 0 &&
		kv_commit_is_full(index)) {
		commit_hurry(index);
		kv_wait_begins();
		(void)pthread_cond_wait(&index->commit_done, &index->commit_lock);
	}
	(void)pthread_mutex_unlock(&index->commit_lock);
	return r;
}

void kv_commit_notify(struct kv_index *index)
{
	bool goal = atomic_load_explicit(&index->pending_weight, memory_order_relaxed) >=
		    KV_PENDING_GOAL;

	if (atomic_exchange_explicit(&index->commit_awake, true, memory_order_acq_rel) && !goal)
		return;
	(void)pthread_mutex_lock(&index->commit_lock);
	(void)pthread_cond_signal(&index->commit_work);
	(void)pthread_mutex_unlock(&index->commit_lock);
}

uint64_t kv_index_sequence(struct kv_index *index)
{
	return atomic_load_explicit(&index->sequence, memory_order_acquire);
}

int kv_index_wait(struct kv_index *index, uint64_t sequence)
{
	uint64_t attempts;
	int r = 0;

	assert(sequence <= kv_index_sequence(index));
	(void)pthread_mutex_lock(&index->commit_lock);
	attempts = index->attempts;
	while (index->durable < sequence) {
		r = atomic_load_explicit(&index->commit_error, memory_order_relaxed);
		if (r < 0 && index->attempts != attempts)
			break;
		r = 0;
		commit_hurry(index);
		kv_wait_begins();
		(void)pthread_cond_wait(&index->commit_done, &index->commit_lock);
	}
	(void)pthread_mutex_unlock(&index->commit_lock);
	return r;
}

void kv_commit_fail(struct kv_index *index, int error, unsigned count)
{
	atomic_store_explicit(&index->fail_error, error, memory_order_relaxed);
	atomic_store_explicit(&index->fail_count, count, memory_order_release);
}
