/* SPDX-License-Identifier: Apache-2.0 */
/* The journal of operations: see journal.h. */
#include "index/journal.h"

#include <sys/stat.h>

#define MAGIC UINT64_C(0x6b76666a6f757231) /* "kvfjour1" */
#define HALF_SIZE (UINT64_C(32) << 20)
/* Requests that were done: by number, of which every second is one. */
#define DONE_MAX 16384u

struct half {
	_Atomic uint64_t length;     /* written last */
	_Atomic uint64_t checkpoint; /* of that, the held records at the begin */
	_Atomic uint64_t number;     /* of the transaction that commits it; 0: not known yet */
	_Atomic bool cut;            /* what came later is missing */
	uint8_t bytes[HALF_SIZE];
};

struct kv_journal {
	_Atomic uint64_t magic;
	_Atomic uint64_t last; /* transaction that was committed */
	_Atomic uint32_t current;
	_Atomic uint64_t done[DONE_MAX];
	struct half halves[2];
};
_Static_assert(sizeof(struct kv_journal) <= KV_INDEX_JOURNAL_SIZE, "room");

/* Followed by its records, changes of the space, and changes of domains. */
struct entry {
	uint64_t size;
	uint64_t request; /* or 0 */
	int64_t inodes;
	uint32_t records;
	uint32_t space_changes;
	uint32_t domain_changes;
	bool checkpoint; /* all held records, and no operation */
};

/* Followed by its key and its value. */
struct entry_record {
	uint32_t size;
	uint8_t key_size;
	uint8_t kind;
};

static _Thread_local uint64_t request_now;

void kv_index_for_request(uint64_t number)
{
	request_now = number;
}

static _Atomic uint64_t *done_slot(struct kv_journal *journal, uint64_t number)
{
	return &journal->done[number / 2 % DONE_MAX];
}

bool kv_index_was_done(struct kv_index *index, uint64_t number)
{
	return index->journal && number != 0 &&
	       atomic_load(done_slot(index->journal, number)) == number;
}

/* ---- Writing ---- */

static uint64_t record_size(const struct kv_record *record)
{
	return sizeof(struct entry_record) + record->key.size + record->size;
}

static uint64_t layer_size(const struct kv_overlay *layer)
{
	uint64_t size = 0;

	for (const struct kv_record *record = kv_overlay_first(layer); record;
		record = kv_overlay_next(record))
		size += record_size(record);
	return size;
}

static uint8_t *put(uint8_t *at, const void *data, size_t size)
{
	if (size > 0)
		memcpy(at, data, size);
	return at + size;
}

static uint8_t *put_layer(uint8_t *at, const struct kv_overlay *layer)
{
	for (const struct kv_record *record = kv_overlay_first(layer); record;
		record = kv_overlay_next(record)) {
		const struct entry_record head = {
			.size = record->size,
			.key_size = (uint8_t)record->key.size,
			.kind = record->kind,
		};

		at = put(at, &head, sizeof(head));
		at = put(at, record->key.bytes, record->key.size);
		at = put(at, record->value, record->size);
	}
	return at;
}

/* Where an entry of SIZE begins; NULL, from then on, if there is no room. */
static uint8_t *room_for(struct half *half, uint64_t size)
{
	uint64_t length = atomic_load_explicit(&half->length, memory_order_relaxed);

	if (atomic_load_explicit(&half->cut, memory_order_relaxed))
		return NULL;
	if (size <= HALF_SIZE - length)
		return half->bytes + length;
	atomic_store(&half->cut, true);
	return NULL;
}

static struct half *current_half(struct kv_journal *journal)
{
	return &journal->halves[atomic_load_explicit(&journal->current, memory_order_relaxed)];
}

void kv_journal_add(struct kv_op *op)
{
	const struct kv_space_op *space = &op->space;
	const struct kv_domain_op *domains = &op->domains;
	struct entry entry = {
		.request = request_now,
		.inodes = op->inodes,
		.records = (uint32_t)op->layer.count,
		.space_changes = (uint32_t)space->count,
		.domain_changes = (uint32_t)domains->count,
	};
	struct half *half;
	uint8_t *at;

	op->in_journal = false;
	if (!op->index->journal)
		return;
	half = current_half(op->index->journal);
	entry.size = sizeof(entry) + layer_size(&op->layer) +
		     space->count * sizeof(*space->changes) +
		     domains->count * sizeof(*domains->changes);
	at = room_for(half, entry.size);
	if (!at)
		return;
	at = put(at, &entry, sizeof(entry));
	at = put_layer(at, &op->layer);
	at = put(at, space->changes, space->count * sizeof(*space->changes));
	(void)put(at, domains->changes, domains->count * sizeof(*domains->changes));
	atomic_fetch_add_explicit(&half->length, entry.size, memory_order_release);
	op->in_journal = true;
}

void kv_journal_done(struct kv_op *op)
{
	/* Behind the entry, from which it can be made again. */
	if (op->in_journal && request_now != 0)
		atomic_store(done_slot(op->index->journal, request_now), request_now);
	request_now = 0;
}

/* Makes HALF one that has all held records and nothing else. */
static void begin(struct half *half, const struct kv_overlay *held)
{
	struct entry entry = {
		.size = sizeof(entry) + layer_size(held),
		.records = (uint32_t)held->count,
		.checkpoint = true,
	};
	uint8_t *at;

	atomic_store(&half->length, 0);
	atomic_store(&half->cut, false);
	atomic_store(&half->number, 0);
	at = room_for(half, entry.size);
	if (at) {
		at = put(at, &entry, sizeof(entry));
		(void)put_layer(at, held);
		atomic_store(&half->length, entry.size);
	}
	atomic_store(&half->checkpoint, atomic_load(&half->length));
}

void kv_journal_turn(struct kv_index *index)
{
	struct kv_journal *journal = index->journal;

	if (!journal)
		return;
	uint32_t next = 1 - atomic_load(&journal->current);
	begin(&journal->halves[next], &index->held);
	atomic_store(&journal->current, next);
}

void kv_journal_commits(struct kv_index *index, uint64_t number)
{
	if (index->journal)
		atomic_store(
			&index->journal->halves[1 - atomic_load(&index->journal->current)].number,
			number);
}

void kv_journal_committed(struct kv_index *index)
{
	if (index->journal)
		atomic_store(&index->journal->last,
			atomic_load(
				&index->journal->halves[1 - atomic_load(&index->journal->current)]
					 .number));
}

bool kv_journal_is_full(struct kv_index *index)
{
	const struct half *half;
	uint64_t length, checkpoint;

	if (!index->journal)
		return false;
	half = current_half(index->journal);
	length = atomic_load_explicit(&half->length, memory_order_relaxed);
	checkpoint = atomic_load_explicit(&half->checkpoint, memory_order_relaxed);
	return length > checkpoint && length - checkpoint > (HALF_SIZE - checkpoint) / 4 * 3;
}

/* ---- Reading ---- */

struct reader {
	const uint8_t *at;
	const uint8_t *end;
};

static bool get(struct reader *reader, void *ret_data, size_t size)
{
	if (size > (size_t)(reader->end - reader->at))
		return false;
	if (size > 0)
		memcpy(ret_data, reader->at, size);
	reader->at += size;
	return true;
}

/* A record of an entry, for the caller to free. -EUCLEAN: the memory was written over. */
static int get_record(struct reader *reader, struct kv_record **ret_record)
{
	struct entry_record head;
	struct kv_key key = {0};
	struct kv_record *record;

	if (!get(reader, &head, sizeof(head)) || head.kind > KV_RECORD_UNHOLD ||
		head.key_size > sizeof(key.bytes) || !get(reader, key.bytes, head.key_size) ||
		head.size > (size_t)(reader->end - reader->at))
		return -EUCLEAN;
	key.size = head.key_size;
	record = kv_record_new((enum kv_record_kind)head.kind, &key, head.size);
	if (!record)
		return -ENOMEM;
	(void)get(reader, record->value, head.size);
	*ret_record = record;
	return 0;
}

static int get_layer(struct reader *reader, uint32_t count, struct kv_overlay *layer)
{
	for (uint32_t i = 0; i < count; i++) {
		struct kv_record *record;
		int r = get_record(reader, &record);

		if (r < 0)
			return r;
		kv_overlay_put(layer, record);
	}
	return 0;
}

/* ---- Doing it again ---- */

/* A held one is counted when all is done: see count_held. */
static int replay_domains(struct kv_op *op, struct reader *reader, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		struct kv_domain_change change, *ours;

		if (!get(reader, &change, sizeof(change)) || change.domain >= KV_DOMAINS_MAX)
			return -EUCLEAN;
		ours = kv_op_domain(op, change.domain);
		if (!ours)
			return -ENOMEM;
		/* What was promised went with the process. */
		change.redeemed = 0;
		change.held = 0;
		*ours = change;
	}
	return 0;
}

static int replay_space(
	struct kv_op *op, struct reader *reader, uint32_t count, struct kv_drops *drops)
{
	int r = 0;

	for (uint32_t i = 0; i < count && r >= 0; i++) {
		struct kv_space_change change;
		const struct kv_chunk gone = {.extent_count = 1, .extents = &change.extent};

		if (!get(reader, &change, sizeof(change)) ||
			kv_extents_check(&op->index->record.store, &change.extent, 1) < 0)
			return -EUCLEAN;
		r = kv_space_op_again(op, &change);
		if (r == 1)
			r = kv_drops_add(drops, &gone);
	}
	if (r >= 0 && drops->count > 0)
		r = kv_space_op_expect_release(op);
	return r;
}

static int replay(struct kv_index *index, const struct entry *entry, struct reader *reader)
{
	struct kv_drops drops = {0};
	struct kv_freed freed = {0};
	struct kv_op op;
	int r;

	kv_op_start(&op, index);
	r = get_layer(reader, entry->records, &op.layer);
	if (r == 0)
		r = replay_space(&op, reader, entry->space_changes, &drops);
	if (r >= 0)
		r = replay_domains(&op, reader, entry->domain_changes);
	op.inodes = entry->inodes;
	r = kv_drops_finish(&drops, &op, kv_op_end(&op, r), &freed);
	/* Nobody reads of it any more. */
	if (r >= 0)
		kv_space_release(index->space, &freed);
	return r < 0 ? r : 0;
}

/* The held records of an operation that LMDB has. */
static int replay_held(struct kv_index *index, const struct entry *entry, struct reader *reader)
{
	for (uint32_t i = 0; i < entry->records; i++) {
		struct kv_record *record;
		int r = get_record(reader, &record);

		if (r < 0)
			return r;
		if (record->kind == KV_RECORD_HELD) {
			kv_overlay_put(&index->held, record);
			continue;
		}
		kv_overlay_drop(&index->held, &record->key);
		free(record);
	}
	return 0;
}

/* COMMITTED: LMDB has what is in HALF. Returns how many operations were done again. */
static int replay_half(
	struct kv_index *index, struct kv_journal *journal, const struct half *half, bool committed)
{
	uint64_t length = kv_min_u64(atomic_load(&half->length), HALF_SIZE);
	struct reader reader = {.at = half->bytes, .end = half->bytes + length};
	struct entry entry;
	int count = 0;

	while (get(&reader, &entry, sizeof(entry))) {
		struct reader body = {.at = reader.at};
		int r;

		if (entry.size < sizeof(entry) ||
			entry.size - sizeof(entry) > (size_t)(reader.end - reader.at))
			return -EUCLEAN;
		body.end = reader.at += entry.size - sizeof(entry);
		if (entry.checkpoint)
			kv_overlay_done(&index->held);
		if (entry.checkpoint || committed)
			r = replay_held(index, &entry, &body);
		else
			r = replay(index, &entry, &body);
		if (r < 0)
			return r;
		count += !entry.checkpoint && !committed;
		if (entry.request != 0)
			atomic_store(done_slot(journal, entry.request), entry.request);
	}
	return count;
}

static bool is_committed(const struct half *half, uint64_t last)
{
	uint64_t number = atomic_load(&half->number);

	return number != 0 && number <= last;
}

/* LAST is the transaction that LMDB has. */
static int replay_all(struct kv_index *index, struct kv_journal *journal, uint64_t last)
{
	uint32_t current = atomic_load(&journal->current) & 1;
	const struct half *older = &journal->halves[1 - current];
	const struct half *newer = &journal->halves[current];
	bool done = is_committed(older, last);
	int before = done ? 0 : replay_half(index, journal, older, false);
	int r = before;

	if (r >= 0 && (done || !atomic_load(&older->cut)))
		r = replay_half(index, journal, newer, is_committed(newer, last));
	return r < 0 ? r : r + before;
}

/* The first held inode at or behind INO. False if there is none. */
static bool next_held(struct kv_index *index, uint64_t ino, struct kv_inode *ret_inode)
{
	const struct kv_key key = kv_key_single(KV_TABLE_INODE, ino);
	const struct kv_record *record = kv_overlay_seek(&index->held, &key);
	size_t head;

	return record && record->key.bytes[0] == KV_TABLE_INODE &&
	       kv_inode_decode(
		       kv_key_a(&record->key), record->value, record->size, ret_inode, &head) == 0;
}

static void count_held(struct kv_index *index)
{
	struct kv_inode inode = {0};

	while (next_held(index, inode.ino + 1, &inode)) {
		index->held_inodes++;
		index->domains[inode.domain].held++;
	}
}

uint64_t kv_index_next_held(struct kv_index *index, uint64_t after)
{
	struct kv_inode inode;
	bool there;

	(void)pthread_rwlock_rdlock(&index->lock);
	there = next_held(index, after + 1, &inode);
	(void)pthread_rwlock_unlock(&index->lock);
	return there ? inode.ino : 0;
}

static uint64_t last_transaction(struct kv_index *index)
{
	MDB_envinfo info;

	return mdb_env_info(index->env, &info) == 0 ? info.me_last_txnid : 0;
}

/*
 * Everything that is in both halves goes into one transaction: they both say so, for this process
 * may be killed before or behind that.
 */
static int commit_all(struct kv_index *index, struct kv_journal *journal, uint64_t last)
{
	if (index->pending.count == 0)
		return 0;
	for (unsigned i = 0; i < 2; i++)
		if (!is_committed(&journal->halves[i], last))
			atomic_store(&journal->halves[i].number, last + 1);
	return kv_commit_now(index);
}

static int go_on(struct kv_index *index, struct kv_journal *journal)
{
	uint64_t last = last_transaction(index);
	uint32_t older = 1 - (atomic_load(&journal->current) & 1);
	int r;

	if (last != atomic_load(&journal->last) &&
		last != atomic_load(&journal->halves[older].number) &&
		last != atomic_load(&journal->halves[1 - older].number)) {
		kv_log_warning(
			"index", "somebody has changed it since the last process was killed");
		return 0;
	}
	r = replay_all(index, journal, last);
	/* What there is before the damage is whole. */
	if (r < 0)
		kv_log_error("index", "what the last process did cannot all be done again: %s",
			strerror(-r));
	else
		kv_log_info("index", "done again operations=%d held=%zu", r, index->held.count);
	count_held(index);
	r = commit_all(index, journal, last);
	/* The process before may have been killed between a commit and its sync. */
	return r < 0 ? r : kv_index_errno(mdb_env_sync(index->env, 1));
}

int kv_journal_attach(struct kv_index *index, void *memory)
{
	struct kv_journal *journal = memory;
	int r = atomic_load(&journal->magic) == MAGIC ? go_on(index, journal) : 0;

	if (r < 0)
		return r;
	uint32_t next = 1 - (atomic_load(&journal->current) & 1);
	begin(&journal->halves[next], &index->held);
	atomic_store(&journal->last, last_transaction(index));
	atomic_store(&journal->current, next);
	atomic_store(&journal->magic, MAGIC);
	index->journal = journal;
	return 0;
}
