/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What operations have changed and LMDB does not have yet, in memory that outlives the process: so
 * whoever goes on after a kill has all that callers were told. A crash of the machine takes it.
 *
 * Two halves take turns: one is of the batch that is being committed, the other takes what is done
 * meanwhile. A half begins with the held records of that moment, and then has the operations in
 * their order, with all they do to records, space and domains. What is behind a half's length does
 * not count, and the length is written last: an operation is there whole, or not at all.
 *
 * Guarded by the index lock, held exclusively, but for the calls of the commit thread.
 */
#ifndef KVFS_INDEX_JOURNAL_H
#define KVFS_INDEX_JOURNAL_H

#include "index/index_internal.h"

/*
 * After the index was loaded, before its commit thread begins: does again what MEMORY has and LMDB
 * lacks, commits it, and keeps the journal from then on. MEMORY of zeros is a new one.
 */
int kv_journal_attach(struct kv_index *index, void *memory);

/* OP is about to be applied. Nothing of these happens in an index without a journal. */
void kv_journal_add(struct kv_op *op);
/* OP counts: so does the request that this thread was to do by it. */
void kv_journal_done(struct kv_op *op);
/* All that is pending is a batch from now on. */
void kv_journal_turn(struct kv_index *index);
/* Transaction NUMBER is about to commit the batch; it has. */
void kv_journal_commits(struct kv_index *index, uint64_t number);
void kv_journal_committed(struct kv_index *index);
/* A commit would make room. */
bool kv_journal_is_full(struct kv_index *index);

#endif
