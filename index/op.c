/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations: what they change is collected in a layer of their own and applied whole, or not at
 * all.
 */
#include "index/journal.h"

static void start_locked(struct kv_op *op, struct kv_index *index)
{
	*op = (struct kv_op){.index = index};
	kv_overlay_init(&op->layer);
	kv_view_init(&op->view, index, &op->layer);
}

/* A batch is above its bound by one operation at most, however many wait to begin. */
int kv_op_begin(struct kv_op *op, struct kv_index *index)
{
	for (;;) {
		int r = kv_commit_admit(index);

		if (r < 0)
			return r;
		(void)pthread_rwlock_wrlock(&index->lock);
		if (!kv_commit_is_full(index))
			break;
		(void)pthread_rwlock_unlock(&index->lock);
	}
	start_locked(op, index);
	return 0;
}

void kv_op_start(struct kv_op *op, struct kv_index *index)
{
	(void)pthread_rwlock_wrlock(&index->lock);
	start_locked(op, index);
}

int kv_op_begin_growing(struct kv_op *op, struct kv_index *index)
{
	return kv_index_is_short(index) ? -ENOSPC : kv_op_begin(op, index);
}

/* Moves the records of the operation to the layers they belong to. */
static void op_apply(struct kv_op *op)
{
	struct kv_index *index = op->index;
	struct kv_record *record;

	while ((record = kv_overlay_take_first(&op->layer)) != NULL) {
		switch (record->kind) {
		case KV_RECORD_HELD:
			kv_overlay_put(&index->held, record);
			break;
		case KV_RECORD_UNHOLD:
			kv_overlay_drop(&index->held, &record->key);
			free(record);
			break;
		default:
			/* A record that is published moves down: the held one would hide it. */
			kv_overlay_drop(&index->held, &record->key);
			kv_overlay_put(&index->pending, record);
			break;
		}
	}
	index->inodes += (uint64_t)op->inodes;
	index->held_inodes += (uint64_t)op->held_inodes;
	op->sequence = atomic_load_explicit(&index->sequence, memory_order_relaxed) + 1;
	atomic_store_explicit(&index->pending_weight, index->pending.weight, memory_order_relaxed);
	/* Pairs with the acquire in kv_commit_notify's and the commit thread's reads. */
	atomic_store_explicit(&index->sequence, op->sequence, memory_order_release);
}

int kv_op_end(struct kv_op *op, int r)
{
	struct kv_index *index = op->index;
	bool applied = r >= 0 && (op->layer.count > 0 || op->domains.count > 0);

	assert(r < 0 || op->layer.count > 0 || op->space.count == 0);
	op->sequence = atomic_load_explicit(&index->sequence, memory_order_relaxed);
	kv_view_done(&op->view);
	if (applied) {
		kv_journal_add(op);
		op_apply(op);
		kv_journal_done(op);
	}
	kv_domain_op_end(op, applied);
	kv_space_op_end(op, applied);
	(void)pthread_rwlock_unlock(&index->lock);
	kv_overlay_done(&op->layer);
	if (applied)
		kv_commit_notify(index);
	return r;
}

uint8_t *kv_op_put(struct kv_op *op, const struct kv_key *key, size_t size, bool held)
{
	struct kv_record *record =
		kv_record_new(held ? KV_RECORD_HELD : KV_RECORD_VALUE, key, size);

	if (!record)
		return NULL;
	kv_overlay_put(&op->layer, record);
	return record->value;
}

int kv_op_drop(struct kv_op *op, const struct kv_key *key, bool held)
{
	struct kv_record *record =
		kv_record_new(held ? KV_RECORD_UNHOLD : KV_RECORD_TOMBSTONE, key, 0);

	if (!record)
		return -ENOMEM;
	kv_overlay_put(&op->layer, record);
	return 0;
}

uint64_t kv_op_new_ino(struct kv_op *op)
{
	uint64_t ino = atomic_load_explicit(&op->index->next_ino, memory_order_relaxed);

	/* kv_commit_admit keeps half the margin free, far more than there are threads. */
	assert(ino < atomic_load_explicit(&op->index->ino_limit, memory_order_relaxed));
	/* Not given back if the operation fails: numbers are plenty. */
	atomic_store_explicit(&op->index->next_ino, ino + 1, memory_order_relaxed);
	return ino;
}
