/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes a sound index from a damaged one, in four steps: records that are whole are copied to the
 * new index; then those are removed that nothing or nobody holds, until there are none; then what
 * is counted twice is set right; then the tables that follow from others are written.
 *
 * A step reads the new index as the step before has left it; what it changes is gathered beside
 * it and written behind it.
 */
#include <fcntl.h>
#include <stdio.h>

#include "fs/error.h"
#include "index/pages.h"
#include "index/repair_internal.h"

/* So much is written in a transaction. */
#define BATCH_MAX 100000u
/* ---- Changes ---- */

static int put_record(MDB_txn *txn, MDB_dbi dbi, struct kv_record *record)
{
	MDB_val key = {.mv_size = record->key.size, .mv_data = record->key.bytes};
	int code;

	if (record->kind == KV_RECORD_VALUE)
		return kv_index_put(txn, dbi, &record->key, record->value, record->size);
	code = mdb_del(txn, dbi, &key, NULL);
	return code == MDB_NOTFOUND ? 0 : code;
}

int kv_repair_write(struct kv_repair *repair)
{
	struct kv_record *record;
	MDB_txn *txn;
	int code;

	if (repair->changes.count == 0)
		return 0;
	code = mdb_txn_begin(repair->index->env, NULL, 0, &txn);
	if (code != 0)
		return kv_index_errno(code);
	for (record = kv_overlay_first(&repair->changes); record && code == 0;
		record = kv_overlay_next(record))
		code = put_record(txn, repair->index->dbi, record);
	if (code != 0)
		mdb_txn_abort(txn);
	else
		code = mdb_txn_commit(txn);
	kv_overlay_done(&repair->changes);
	return kv_index_errno(code);
}

/* A record to be filled in at once, or NULL. */
static uint8_t *change_put(struct kv_repair *repair, const struct kv_key *key, size_t size)
{
	struct kv_record *record = kv_record_new(KV_RECORD_VALUE, key, size);

	if (!record)
		return NULL;
	kv_overlay_put(&repair->changes, record);
	repair->changed++;
	return record->value;
}

int kv_repair_copy(
	struct kv_repair *repair, const struct kv_key *key, const void *value, size_t size)
{
	uint8_t *record = change_put(repair, key, size);

	if (!record)
		return -ENOMEM;
	if (size > 0)
		memcpy(record, value, size);
	return repair->changes.count < BATCH_MAX ? 0 : kv_repair_write(repair);
}

int kv_repair_drop(struct kv_repair *repair, const struct kv_key *key)
{
	struct kv_record *record = kv_record_new(KV_RECORD_TOMBSTONE, key, 0);

	if (!record)
		return -ENOMEM;
	kv_overlay_put(&repair->changes, record);
	repair->changed++;
	return repair->changes.count < BATCH_MAX ? 0 : kv_repair_write(repair);
}

int kv_repair_put_node(struct kv_repair *repair, const struct kv_index_node *node)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, node->inode.ino);
	uint8_t head[KV_INODE_HEAD_MAX];
	size_t size = kv_inode_encode(&node->inode, head);
	uint8_t *record = change_put(repair, &key, size + node->tail_size);

	if (!record)
		return -ENOMEM;
	memcpy(record, head, size);
	if (node->tail_size > 0)
		memcpy(record + size, node->tail, node->tail_size);
	return repair->changes.count < BATCH_MAX ? 0 : kv_repair_write(repair);
}

int kv_repair_drop_inode(struct kv_repair *repair, uint64_t ino, const char *why)
{
	struct kv_key key = kv_key_single(KV_TABLE_INODE, ino);
	const struct kv_check_to *to = &repair->what->dropped;
	_cleanup_free_ char *path = kv_view_path(&repair->view, ino);
	const struct kv_violation violation = {.text = why, .ino = ino, .path = path};

	if (to->tell)
		to->tell(to->arg, &violation);
	return kv_repair_drop(repair, &key);
}

/* One step: EACH for the records of TABLE. Returns 0 or an error. */
int kv_repair_each(struct kv_repair *repair, enum kv_table table, kv_repair_record *each)
{
	struct kv_key start = {.size = KV_KEY_TABLE_SIZE, .bytes = {(uint8_t)table}};
	struct kv_iter iter = {0};
	struct kv_key key;
	struct kv_value value;
	int r;

	kv_view_begin(&repair->view, repair->index);
	r = kv_iter_init(&iter, &repair->view, &start, KV_KEY_TABLE_SIZE);
	while (r >= 0 && (r = kv_iter_next(&iter, &key, &value)) == 1)
		r = each(repair, &key, &value);
	kv_iter_done(&iter);
	kv_view_end(&repair->view);
	return r < 0 ? r : kv_repair_write(repair);
}

/* ---- Copying ---- */

static void copy_head(
	struct kv_repair *repair, const struct kv_key *key, const void *value, size_t size)
{
	struct kv_store_record record;
	struct kv_state state;

	if (kv_key_a(key) == KV_META_STORE && kv_store_decode(value, size, &record) == 0) {
		memcpy(repair->store, value, size);
		repair->store_size = size;
	}
	if (kv_key_a(key) == KV_META_STATE && kv_state_decode(value, size, &state) == 0)
		repair->next_ino = state.next_ino;
}

/* Whether the record can be decoded, as far as it can be told without others. */
static bool copy_wanted(const struct kv_key *key, const void *value, size_t size)
{
	struct kv_inode inode;
	struct kv_dirent_record dirent;
	struct kv_place place;
	struct kv_xattr_record xattr;
	struct kv_domain_record domain;
	size_t head;

	switch (key->bytes[0]) {
	case KV_TABLE_INODE:
		return kv_inode_decode(kv_key_a(key), value, size, &inode, &head) == 0;
	case KV_TABLE_DIRENT:
		return kv_dirent_decode(value, size, &dirent) == 0;
	case KV_TABLE_LINK:
		return kv_link_decode(value, size, &place) == 0;
	case KV_TABLE_XATTR:
		return kv_xattr_decode(value, size, &xattr) == 0;
	case KV_TABLE_DOMAIN:
		return kv_key_a(key) > 0 && kv_key_a(key) < KV_DOMAINS_MAX &&
		       kv_domain_decode(value, size, &domain) == 0;
	default:
		return key->bytes[0] == KV_TABLE_MAP; /* looked at with its inode */
	}
}

static int copy_record(
	void *arg, const void *key_data, size_t key_size, const void *value, size_t size)
{
	struct kv_repair *repair = arg;
	struct kv_key key;

	if (kv_key_decode(key_data, key_size, &key) < 0)
		return 0;
	size = kv_record_value_size(&key, value, size);
	if (key.bytes[0] == KV_TABLE_META)
		copy_head(repair, &key, value, size);
	if (!copy_wanted(&key, value, size))
		return 0;
	if (key.bytes[0] == KV_TABLE_INODE)
		repair->last_ino = kv_max_u64(repair->last_ino, kv_key_a(&key));
	return kv_repair_copy(repair, &key, value, size);
}

int kv_repair_put_padding(void *arg, const struct kv_key *key)
{
	static const uint8_t zeros[KV_PADDING_SIZE];

	return kv_repair_copy(arg, key, zeros, sizeof(zeros));
}

static int copy_all(struct kv_repair *repair)
{
	struct kv_key store = kv_key_single(KV_TABLE_META, KV_META_STORE);
	struct kv_key guard = kv_key_single(KV_TABLE_GUARD, 0);
	struct kv_pages pages = {.record = copy_record, .arg = repair};
	_cleanup_fd_ int fd = kv_pages_open(repair->what->path);
	ssize_t r;

	if (fd < 0)
		return fd;
	pages.fd = fd;
	r = kv_pages_check(&pages);
	if (r >= 0 && repair->store_size == 0)
		r = -EUCLEAN;
	if (r < 0)
		return (int)r;
	r = kv_repair_copy(repair, &store, repair->store, repair->store_size);
	if (r == 0)
		r = kv_repair_put_padding(repair, &guard);
	if (r == 0)
		r = kv_domain_padding(0, kv_repair_put_padding, repair);
	return r < 0 ? (int)r : kv_repair_write(repair);
}

/* Without a root there is nothing; one that is made anew is the repairer's alone. */
static int root_make(struct kv_repair *repair)
{
	const struct kv_inode root = {
		.ino = KV_ROOT_INO,
		.mode = S_IFDIR | 0700,
		.uid = geteuid(),
		.gid = getegid(),
		.nlink = 2,
		.parent = KV_ROOT_INO,
	};
	struct kv_key key = kv_key_single(KV_TABLE_INODE, KV_ROOT_INO);
	uint8_t head[KV_INODE_HEAD_MAX];
	struct kv_value value;
	int r;

	kv_view_begin(&repair->view, repair->index);
	r = kv_view_get(&repair->view, &key, &value);
	kv_view_end(&repair->view);
	if (r != -ENOENT)
		return r;
	r = kv_repair_copy(repair, &key, head, kv_inode_encode(&root, head));
	return r < 0 ? r : kv_repair_write(repair);
}

/* ---- All of it ---- */

/* The database must be there before it can be opened. */
static int make_database(struct kv_index *index)
{
	MDB_txn *txn;
	int code = mdb_txn_begin(index->env, NULL, 0, &txn);

	if (code != 0)
		return kv_index_errno(code);
	code = mdb_dbi_open(txn, NULL, 0, &index->dbi);
	if (code != 0) {
		mdb_txn_abort(txn);
		return kv_index_errno(code);
	}
	return kv_index_errno(mdb_txn_commit(txn));
}

static int repair_run(struct kv_repair *repair)
{
	struct kv_index *index = repair->index;
	struct kv_store_record record;
	int r = kv_env_open(repair->what->new_path, 0, MDB_NOSYNC, &index->env);

	if (r == 0)
		r = make_database(index);
	if (r == 0)
		r = copy_all(repair);
	if (r == 0)
		r = kv_store_decode(repair->store, repair->store_size, &record);
	if (r < 0)
		return r;
	index->record = record;
	r = root_make(repair);
	if (r == 0)
		r = kv_repair_sort(repair);
	if (r == 0)
		r = kv_repair_make(repair);
	if (r == 0)
		r = kv_index_errno(mdb_env_sync(index->env, 1));
	return r < 0 ? r : kv_index_sync_directory(repair->what->new_path);
}

int kv_index_repair(const struct kv_index_repair *what, char *ret_error, size_t error_size)
{
	const struct kv_error error = {ret_error, error_size};
	struct kv_repair *repair = calloc(1, sizeof(*repair));
	int r = repair ? kv_index_new(&(struct kv_index_options){0}, &repair->index) : -ENOMEM;

	if (r == 0) {
		repair->what = what;
		kv_overlay_init(&repair->changes);
		kv_overlay_init(&repair->tally.shared);
		r = repair_run(repair);
		kv_overlay_done(&repair->changes);
		kv_tally_done(&repair->tally);
		(void)kv_index_close(repair->index);
	}
	free(repair);
	if (r == -EUCLEAN)
		return kv_fail(&error, r,
			"the index in %s cannot be repaired: what says which store it is is lost; "
			"make the store anew with `kvfs format --force`",
			what->path);
	if (r < 0)
		return kv_fail(&error, r, "the index in %s cannot be repaired: %s", what->path,
			strerror(-r));
	return 0;
}
