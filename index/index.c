/* SPDX-License-Identifier: Apache-2.0 */
/* Life of an index: making, opening, closing; errors; figures. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "index/journal.h"
#include "index/pages.h"

/*
 * Nobody waits for it: who wants a commit gets it at once. What comes in meanwhile shares the pages
 * that are written, of which each file alone has three, and the two flushes of the disk.
 */
#define COMMIT_DELAY_MS_DEFAULT 50u

/* ---- Errors ---- */

int kv_index_errno(int code)
{
	switch (code) {
	case MDB_SUCCESS:
		return 0;
	case MDB_NOTFOUND:
		return -ENOENT;
	case MDB_MAP_FULL:
		return -ENOSPC;
	case MDB_PAGE_NOTFOUND:
	case MDB_CORRUPTED:
	case MDB_INVALID:
		return -EUCLEAN;
	case MDB_VERSION_MISMATCH:
		return -EPROTO;
	case MDB_READERS_FULL:
		return -ENFILE;
	default:
		return code > 0 ? -code : -EIO;
	}
}

int kv_index_damaged(struct kv_index *index, const struct kv_key *key, const char *what)
{
	unsigned suppressed;

	if (kv_log_allowed(&index->damage_log, &suppressed))
		kv_log_error("index", "damaged record what=%s table=%u a=%llu b=%llu suppressed=%u",
			what, key ? key->bytes[0] : 0, key ? (unsigned long long)kv_key_a(key) : 0,
			key ? (unsigned long long)kv_key_b(key) : 0, suppressed);
	return -EUCLEAN;
}

/* ---- Making ---- */

int kv_index_put(
	MDB_txn *txn, MDB_dbi dbi, const struct kv_key *key, const void *value, size_t size)
{
	size_t sum_size = kv_record_sum_size(key);
	MDB_val k = {.mv_size = key->size, .mv_data = (void *)key->bytes};
	MDB_val v = {.mv_size = size + sum_size};
	int code = mdb_put(txn, dbi, &k, &v, MDB_RESERVE);

	if (code != 0)
		return code;
	if (size > 0)
		memcpy(v.mv_data, value, size);
	if (sum_size > 0)
		kv_put_le32((uint8_t *)v.mv_data + size, kv_record_sum(key, value, size));
	return 0;
}

static int put(MDB_txn *txn, MDB_dbi dbi, struct kv_key key, MDB_val value)
{
	return kv_index_errno(kv_index_put(txn, dbi, &key, value.mv_data, value.mv_size));
}

struct padding {
	MDB_txn *txn;
	MDB_dbi dbi;
};

static int put_padding(void *arg, const struct kv_key *key)
{
	static const uint8_t zeros[KV_PADDING_SIZE];
	struct padding *padding = arg;

	return put(padding->txn, padding->dbi, *key, (MDB_val){sizeof(zeros), (void *)zeros});
}

static int create_records(MDB_txn *txn, MDB_dbi dbi, const struct kv_store_record *record,
	const struct kv_inode *root)
{
	uint8_t store[KV_STORE_RECORD_MAX];
	uint8_t state[KV_STATE_RECORD_SIZE];
	uint8_t domain[KV_DOMAIN_RECORD_SIZE];
	uint8_t inode[KV_INODE_HEAD_MAX];
	struct padding padding = {txn, dbi};
	const struct {
		struct kv_key key;
		MDB_val value;
	} records[] = {
		{kv_key_single(KV_TABLE_META, KV_META_STORE),
			{kv_store_encode(record, store), store}},
		{kv_key_single(KV_TABLE_META, KV_META_STATE), {sizeof(state), state}},
		{kv_key_single(KV_TABLE_DOMAIN, 0), {sizeof(domain), domain}},
		{kv_key_single(KV_TABLE_INODE, KV_ROOT_INO), {kv_inode_encode(root, inode), inode}},
	};
	struct kv_key guard = kv_key_single(KV_TABLE_GUARD, 0);
	int r = 0;

	kv_state_encode(&(struct kv_state){.next_ino = KV_ROOT_INO + 1, .inodes = 1}, state);
	kv_domain_encode(&(struct kv_domain_record){.state = KV_DOMAIN_LIVE, .inodes = 1}, domain);
	for (size_t i = 0; i < sizeof(records) / sizeof(records[0]) && r == 0; i++)
		r = put(txn, dbi, records[i].key, records[i].value);
	if (r == 0)
		r = kv_domain_padding(0, put_padding, &padding);
	return r < 0 ? r : put_padding(&padding, &guard);
}

static int create_write(
	MDB_env *env, const struct kv_store_record *record, const struct kv_inode *root)
{
	MDB_txn *txn;
	MDB_dbi dbi;
	int r = kv_index_errno(mdb_txn_begin(env, NULL, 0, &txn));

	if (r < 0)
		return r;
	r = kv_index_errno(mdb_dbi_open(txn, NULL, 0, &dbi));
	if (r == 0)
		r = create_records(txn, dbi, record, root);
	if (r < 0) {
		mdb_txn_abort(txn);
		return r;
	}
	r = kv_index_errno(mdb_txn_commit(txn));
	return r < 0 ? r : kv_index_errno(mdb_env_sync(env, 1));
}

int kv_index_sync_directory(const char *path)
{
	_cleanup_fd_ int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	return fd < 0 || fsync(fd) < 0 ? -errno : 0;
}

int kv_index_file_check(const char *path)
{
	_cleanup_fd_ int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	struct stat st;

	if (fd < 0)
		return -errno;
	if (fstatat(fd, "data.mdb", &st, AT_SYMLINK_NOFOLLOW) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode) || st.st_size == 0)
		return -EUCLEAN;
	if (fstatat(fd, "lock.mdb", &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(st.st_mode))
		return -EUCLEAN;
	return 0;
}

static bool store_is_valid(const struct kv_index_store *store)
{
	if (store->device_count < 1 || store->device_count > KV_DEVICES_MAX)
		return false;
	for (uint32_t i = 0; i < store->device_count; i++)
		if (store->device_blocks[i] > KV_DEVICE_BLOCKS_MAX)
			return false;
	return true;
}

int kv_index_create(const char *path, const struct kv_index_store *store, uint32_t root_mode,
	uint32_t uid, uint32_t gid, int64_t now_ns)
{
	struct kv_store_record record = {.store = *store};
	struct kv_inode root = {
		.ino = KV_ROOT_INO,
		.mode = S_IFDIR | (root_mode & 07777),
		.uid = uid,
		.gid = gid,
		.nlink = 2,
		.atime_ns = now_ns,
		.mtime_ns = now_ns,
		.ctime_ns = now_ns,
		.btime_ns = now_ns,
		.last_use_ns = now_ns,
		.parent = KV_ROOT_INO,
	};
	MDB_env *env;
	int r;

	if (!store_is_valid(store))
		return -EINVAL;
	r = kv_index_file_check(path);
	if (r != -ENOENT)
		return r < 0 && r != -EUCLEAN ? r : -EEXIST;
	record.store.format = KV_INDEX_FORMAT;
	if (getrandom(&record.hash_seed, sizeof(record.hash_seed), 0) !=
		(ssize_t)sizeof(record.hash_seed))
		return -EIO;
	r = kv_env_open(path, 0, 0, &env);
	if (r < 0)
		return r;
	r = create_write(env, &record, &root);
	mdb_env_close(env);
	return r < 0 ? r : kv_index_sync_directory(path);
}

/* ---- Opening ---- */

struct error_text {
	char *text;
	size_t size;
};

static int fail(const struct error_text *error, int r, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

static int fail(const struct error_text *error, int r, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	(void)vsnprintf(error->text, error->size, format, args);
	va_end(args);
	return r;
}

static int load_record(struct kv_view *view, uint64_t which, struct kv_value *ret_value)
{
	struct kv_key key = kv_key_single(KV_TABLE_META, which);
	int r = kv_view_get(view, &key, ret_value);

	return r == -ENOENT ? -EUCLEAN : r;
}

int kv_index_load_meta(struct kv_index *index, struct kv_state *ret_state)
{
	struct kv_view view;
	struct kv_value value;
	int r;

	kv_view_begin(&view, index);
	r = load_record(&view, KV_META_STORE, &value);
	if (r == 0)
		r = kv_store_decode(value.data, value.size, &index->record);
	if (r == 0)
		r = load_record(&view, KV_META_STATE, &value);
	if (r == 0)
		r = kv_state_decode(value.data, value.size, ret_state);
	kv_view_end(&view);
	return r;
}

const char *kv_index_meta_error(
	const struct kv_index *index, int r, char *ret_text, size_t text_size)
{
	unsigned format = index->record.store.format;

	if (r != -EPROTO)
		(void)snprintf(ret_text, text_size,
			"the index is damaged, its head cannot be read: %s; " KV_INDEX_ADVICE,
			strerror(-r));
	else if (format < KV_INDEX_FORMAT)
		(void)snprintf(ret_text, text_size,
			"the index has format %u, of an older kvfs; this one has format %u and "
			"cannot read it: it is a cache, so make the store anew with `kvfs format "
			"--force`, or use the older kvfs",
			format, KV_INDEX_FORMAT);
	else
		(void)snprintf(ret_text, text_size,
			"the index has format %u, made by a newer kvfs; this one knows up to %u: "
			"update kvfs, or make the store anew with `kvfs format --force`",
			format, KV_INDEX_FORMAT);
	return ret_text;
}

static int load(struct kv_index *index, const struct kv_index_options *options,
	const struct error_text *error)
{
	struct kv_state state;
	char text[256];
	int r = kv_index_load_meta(index, &state);

	if (r < 0)
		return fail(error, r, "%s", kv_index_meta_error(index, r, text, sizeof(text)));
	index->inodes = state.inodes;
	r = kv_domains_load(index);
	if (r < 0)
		return fail(error, r,
			"the index is damaged, its quotas cannot be read: %s; " KV_INDEX_ADVICE,
			strerror(-r));
	atomic_store(&index->next_ino, state.next_ino);
	atomic_store(&index->ino_limit, state.next_ino);
	r = kv_space_new(index, options->quota_blocks, &index->space);
	if (r < 0)
		return fail(error, r,
			"the index is damaged, its free space cannot be read: %s; " KV_INDEX_ADVICE,
			strerror(-r));
	if (state.used_blocks != kv_space_used(index->space))
		return fail(error, -EUCLEAN,
			"the index is damaged, its counts of used blocks "
			"disagree; " KV_INDEX_ADVICE);
	return 0;
}

int kv_index_new(const struct kv_index_options *options, struct kv_index **ret_index)
{
	struct kv_index *index = calloc(1, sizeof(*index));
	pthread_rwlockattr_t writers_first;
	pthread_condattr_t monotonic;

	if (!index)
		return -ENOMEM;
	if (kv_domains_new(index) < 0) {
		free(index);
		return -ENOMEM;
	}
	index->hash_mask = UINT64_MAX;
	index->commit_delay_ms =
		options->commit_delay_ms != 0 ? options->commit_delay_ms : COMMIT_DELAY_MS_DEFAULT;
	kv_overlay_init(&index->held);
	kv_overlay_init(&index->pending);
	kv_overlay_init(&index->flushing);
	/* Lookups never nest, so operations may go first; by default a stream of lookups starves
	 * them. */
	(void)pthread_rwlockattr_init(&writers_first);
	(void)pthread_rwlockattr_setkind_np(
		&writers_first, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
	(void)pthread_rwlock_init(&index->lock, &writers_first);
	(void)pthread_rwlockattr_destroy(&writers_first);
	(void)pthread_mutex_init(&index->pool_lock, NULL);
	(void)pthread_mutex_init(&index->commit_lock, NULL);
	(void)pthread_condattr_init(&monotonic);
	(void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&index->commit_work, &monotonic);
	(void)pthread_cond_init(&index->commit_done, &monotonic);
	(void)pthread_condattr_destroy(&monotonic);
	*ret_index = index;
	return 0;
}

/*
 * LMDB may crash on pages that changed where they lie. Up to a size that keeps opening short they
 * are all looked at before; of a larger index only where that may have happened.
 */
static int check_pages(const char *path, uint64_t checked_bytes)
{
	_cleanup_fd_ int fd = kv_pages_open(path);
	int suspect = kv_suspect_find(path);
	struct stat st;
	ssize_t r;

	if (fd < 0 || suspect < 0)
		return fd < 0 ? fd : suspect;
	if (fstat(fd, &st) < 0)
		return -errno;
	if (st.st_size > (off_t)(checked_bytes > 0 ? checked_bytes : KV_ENV_SMALL) && !suspect)
		return 0;
	if (suspect)
		kv_log_warning(
			"index", "a process has crashed with it: looking at all of its pages");
	r = kv_pages_check(&(struct kv_pages){.fd = fd});
	if (r == 0 && suspect)
		return kv_suspect_clear(path);
	return r > 0 ? -EUCLEAN : (int)r;
}

static int open_all(struct kv_index *index, const char *path,
	const struct kv_index_options *options, const struct error_text *error)
{
	int r = check_pages(path, options->checked_bytes);

	if (r == 0)
		r = kv_env_attach(index, path, options->map_size_bytes, 0);
	if (r == -EUCLEAN || r == -EPROTO)
		return fail(error, r,
			"%s/data.mdb is damaged or not an LMDB file: %s; " KV_INDEX_ADVICE, path,
			strerror(-r));
	if (r < 0)
		return fail(error, r, "cannot open the index in %s: %s", path, strerror(-r));
	r = load(index, options, error);
	if (r < 0)
		return r;
	if (options->journal)
		r = kv_journal_attach(index, options->journal);
	if (r < 0)
		return fail(error, r, "cannot do again what was done before a restart: %s",
			strerror(-r));
	r = kv_commit_start(index);
	return r < 0 ? fail(error, r, "cannot start the commit thread: %s", strerror(-r)) : 0;
}

int kv_index_open(const char *path, const struct kv_index_options *options,
	struct kv_index **ret_index, char *ret_error, size_t error_size)
{
	const struct error_text error = {.text = ret_error, .size = error_size};
	struct kv_index *index;
	int r = kv_index_file_check(path);

	if (r == -ENOENT)
		return fail(&error, r, "there is no index in %s: format the store first", path);
	if (r < 0)
		return fail(&error, r, "%s/data.mdb cannot be used: %s", path, strerror(-r));
	r = kv_index_new(options, &index);
	if (r < 0)
		return fail(&error, r, "cannot open the index in %s: %s", path, strerror(-r));
	r = open_all(index, path, options, &error);
	if (r < 0) {
		(void)kv_index_close(index);
		return r;
	}
	*ret_index = index;
	return 0;
}

struct kv_index *kv_index_close(struct kv_index *index)
{
	if (!index)
		return NULL;
	kv_commit_stop(index);
	kv_view_pool_done(index);
	if (index->env)
		mdb_env_close(index->env);
	(void)kv_space_free(index->space);
	kv_domains_free(index);
	free(index->path);
	kv_overlay_done(&index->held);
	kv_overlay_done(&index->pending);
	kv_overlay_done(&index->flushing);
	(void)pthread_cond_destroy(&index->commit_done);
	(void)pthread_cond_destroy(&index->commit_work);
	(void)pthread_mutex_destroy(&index->commit_lock);
	(void)pthread_mutex_destroy(&index->pool_lock);
	(void)pthread_rwlock_destroy(&index->lock);
	free(index);
	return NULL;
}

const struct kv_index_store *kv_index_store(const struct kv_index *index)
{
	return &index->record.store;
}

struct kv_space *kv_index_space(struct kv_index *index)
{
	return index->space;
}

void kv_index_usage(struct kv_index *index, struct kv_index_usage *ret_usage)
{
	struct kv_index_usage usage;
	MDB_stat stat = {0};

	(void)pthread_rwlock_rdlock(&index->lock);
	usage = (struct kv_index_usage){
		.inodes = index->inodes + index->held_inodes,
		.pending = index->pending.count + index->flushing.count,
		.held = index->held.count,
		.pinned = atomic_load_explicit(&index->pinned, memory_order_relaxed),
		.commits = atomic_load_explicit(&index->commits, memory_order_relaxed),
	};
	if (index->env && mdb_env_stat(index->env, &stat) == 0)
		usage.size_bytes =
			(stat.ms_branch_pages + stat.ms_leaf_pages + stat.ms_overflow_pages) *
			(uint64_t)stat.ms_psize;
	(void)pthread_rwlock_unlock(&index->lock);
	*ret_usage = usage;
}
