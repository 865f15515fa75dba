/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The live view: held over pending over flushing over LMDB, looked up and walked as one table.
 *
 * LMDB is asked only when the layers do not answer, through a pool of read transactions that are
 * renewed for a view and reset behind it. The pool grows to the number of views at one time.
 */
#include "index/index_internal.h"

/* ---- Readers ---- */

static void reader_free(struct kv_reader *reader)
{
	if (reader->cursor)
		mdb_cursor_close(reader->cursor);
	if (reader->last)
		mdb_cursor_close(reader->last);
	if (reader->txn)
		mdb_txn_abort(reader->txn);
	free(reader);
}

static int reader_new(struct kv_index *index, struct kv_reader **ret_reader)
{
	struct kv_reader *reader;
	int code;

	if (!index->env)
		return -EIO;
	reader = calloc(1, sizeof(*reader));
	if (!reader)
		return -ENOMEM;
	code = mdb_txn_begin(index->env, NULL, MDB_RDONLY, &reader->txn);
	if (code == 0)
		code = mdb_cursor_open(reader->txn, index->dbi, &reader->cursor);
	if (code == 0)
		code = mdb_cursor_open(reader->txn, index->dbi, &reader->last);
	if (code != 0) {
		reader_free(reader);
		return kv_index_errno(code);
	}
	*ret_reader = reader;
	return 0;
}

static int reader_get(struct kv_index *index, struct kv_reader **ret_reader)
{
	struct kv_reader *reader;
	int code;

	(void)pthread_mutex_lock(&index->pool_lock);
	reader = index->pool;
	if (reader)
		index->pool = reader->next;
	(void)pthread_mutex_unlock(&index->pool_lock);
	if (!reader)
		return reader_new(index, ret_reader);
	code = mdb_txn_renew(reader->txn);
	if (code == 0)
		code = mdb_cursor_renew(reader->txn, reader->cursor);
	if (code == 0)
		code = mdb_cursor_renew(reader->txn, reader->last);
	if (code != 0) {
		reader_free(reader);
		return kv_index_errno(code);
	}
	*ret_reader = reader;
	return 0;
}

static void reader_put(struct kv_index *index, struct kv_reader *reader)
{
	assert(!reader->cursor_lent);
	mdb_txn_reset(reader->txn);
	(void)pthread_mutex_lock(&index->pool_lock);
	reader->next = index->pool;
	index->pool = reader;
	(void)pthread_mutex_unlock(&index->pool_lock);
}

void kv_view_pool_done(struct kv_index *index)
{
	while (index->pool) {
		struct kv_reader *reader = index->pool;

		index->pool = reader->next;
		reader_free(reader);
	}
}

/* ---- Views ---- */

void kv_view_init(struct kv_view *view, struct kv_index *index, const struct kv_overlay *op)
{
	view->index = index;
	view->layers[0] = op;
	view->layers[1] = &index->held;
	view->layers[2] = &index->pending;
	view->layers[3] = &index->flushing;
	view->reader = NULL;
}

void kv_view_done(struct kv_view *view)
{
	if (view->reader)
		reader_put(view->index, view->reader);
	view->reader = NULL;
}

void kv_view_begin(struct kv_view *view, struct kv_index *index)
{
	(void)pthread_rwlock_rdlock(&index->lock);
	kv_view_init(view, index, NULL);
}

void kv_view_end(struct kv_view *view)
{
	kv_view_done(view);
	(void)pthread_rwlock_unlock(&view->index->lock);
}

static bool record_is_live(const struct kv_record *record)
{
	return record->kind == KV_RECORD_VALUE || record->kind == KV_RECORD_HELD;
}

static struct kv_value record_value(const struct kv_record *record)
{
	return (struct kv_value){
		.data = record->value,
		.size = record->size,
		.held = record->kind == KV_RECORD_HELD,
	};
}

static int view_reader(struct kv_view *view)
{
	return view->reader ? 0 : reader_get(view->index, &view->reader);
}

int kv_view_get(struct kv_view *view, const struct kv_key *key, struct kv_value *ret_value)
{
	MDB_val k = {.mv_size = key->size, .mv_data = (void *)key->bytes};
	MDB_val v;
	int r;

	for (size_t i = 0; i < KV_VIEW_LAYERS; i++) {
		const struct kv_record *record =
			view->layers[i] ? kv_overlay_find(view->layers[i], key) : NULL;

		if (!record)
			continue;
		if (!record_is_live(record))
			return -ENOENT;
		*ret_value = record_value(record);
		return 0;
	}
	r = view_reader(view);
	if (r < 0)
		return r;
	r = mdb_cursor_get(view->reader->last, &k, &v, MDB_SET);
	if (r != 0)
		return kv_index_errno(r);
	*ret_value = (struct kv_value){
		.data = v.mv_data, .size = kv_record_value_size(key, v.mv_data, v.mv_size)};
	return 0;
}

/* ---- Walking ---- */

static int iter_lmdb(struct kv_iter *iter, MDB_cursor_op how)
{
	int code = mdb_cursor_get(iter->cursor, &iter->lmdb_key, &iter->lmdb_value, how);

	iter->lmdb_live = code == 0 && iter->lmdb_key.mv_size >= iter->prefix_size &&
			  memcmp(iter->lmdb_key.mv_data, iter->prefix, iter->prefix_size) == 0;
	return code == 0 || code == MDB_NOTFOUND ? 0 : kv_index_errno(code);
}

static int iter_cursor(struct kv_iter *iter)
{
	struct kv_reader *reader;
	int r = view_reader(iter->view);

	if (r < 0)
		return r;
	reader = iter->view->reader;
	if (!reader->cursor_lent) {
		reader->cursor_lent = true;
		iter->cursor = reader->cursor;
		return 0;
	}
	r = mdb_cursor_open(reader->txn, iter->view->index->dbi, &iter->cursor);
	iter->cursor_owned = r == 0;
	return kv_index_errno(r);
}

int kv_iter_init(
	struct kv_iter *iter, struct kv_view *view, const struct kv_key *start, size_t prefix_size)
{
	int r;

	assert(prefix_size <= start->size);
	*iter = (struct kv_iter){.view = view, .prefix_size = prefix_size};
	memcpy(iter->prefix, start->bytes, prefix_size);
	for (size_t i = 0; i < KV_VIEW_LAYERS; i++)
		iter->heads[i] = view->layers[i] ? kv_overlay_seek(view->layers[i], start) : NULL;
	r = iter_cursor(iter);
	if (r < 0)
		return r;
	iter->lmdb_key = (MDB_val){.mv_size = start->size, .mv_data = (void *)start->bytes};
	return iter_lmdb(iter, MDB_SET_RANGE);
}

void kv_iter_done(struct kv_iter *iter)
{
	if (iter->cursor_owned)
		mdb_cursor_close(iter->cursor);
	else if (iter->cursor)
		iter->view->reader->cursor_lent = false;
	iter->cursor = NULL;
	iter->cursor_owned = false;
}

/* The newest record of the least key of the layers, or NULL. */
static const struct kv_record *iter_least(struct kv_iter *iter)
{
	const struct kv_record *least = NULL;

	for (size_t i = 0; i < KV_VIEW_LAYERS; i++) {
		const struct kv_record *head = iter->heads[i];

		if (head && memcmp(head->key.bytes, iter->prefix, iter->prefix_size) != 0)
			head = iter->heads[i] = NULL;
		if (head && (!least || kv_key_compare(&head->key, &least->key) < 0))
			least = head;
	}
	return least;
}

static void iter_skip(struct kv_iter *iter, const struct kv_key *key)
{
	for (size_t i = 0; i < KV_VIEW_LAYERS; i++)
		if (iter->heads[i] && kv_key_compare(&iter->heads[i]->key, key) == 0)
			iter->heads[i] = kv_overlay_next(iter->heads[i]);
}

int kv_iter_next(struct kv_iter *iter, struct kv_key *ret_key, struct kv_value *ret_value)
{
	for (;;) {
		const struct kv_record *least = iter_least(iter);
		struct kv_key lmdb = {0};
		int order = -1; /* the layers come first */
		int r;

		if (!least && !iter->lmdb_live)
			return 0;
		if (iter->lmdb_live) {
			r = kv_key_decode(iter->lmdb_key.mv_data, iter->lmdb_key.mv_size, &lmdb);
			if (r < 0)
				return kv_index_damaged(iter->view->index, NULL, "key");
			order = least ? kv_key_compare(&least->key, &lmdb) : 1;
		}
		*ret_key = order <= 0 ? least->key : lmdb;
		if (order > 0)
			*ret_value = (struct kv_value){.data = iter->lmdb_value.mv_data,
				.size = kv_record_value_size(ret_key, iter->lmdb_value.mv_data,
					iter->lmdb_value.mv_size)};
		else
			*ret_value = record_value(least);
		if (order <= 0)
			iter_skip(iter, ret_key);
		if (iter->lmdb_live && order >= 0) {
			r = iter_lmdb(iter, MDB_NEXT);
			if (r < 0)
				return r;
		}
		if (order > 0 || record_is_live(least))
			return 1;
	}
}

int kv_view_seek(struct kv_view *view, size_t prefix_size, struct kv_key *start_ret_key,
	struct kv_value *ret_value)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key;
	int r = kv_iter_init(&iter, view, start_ret_key, prefix_size);

	if (r < 0)
		return r;
	r = kv_iter_next(&iter, &key, ret_value);
	if (r == 1)
		*start_ret_key = key;
	return r;
}
