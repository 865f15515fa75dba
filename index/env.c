/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The LMDB environment: opening it, and what LMDB leaves to its user when the disk failed for a
 * moment.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "index/index_internal.h"

#define MAP_SIZE_DEFAULT (UINT64_C(64) << 30)
/* Views at one time; each slot is a cache line of the lock file. */
#define READERS_MAX 4096u
#define ENV_FLAGS (MDB_NOTLS | MDB_NOMETASYNC | MDB_NORDAHEAD)
#define HEAD_PAGES 2u
#define PAGE_SIZE_MAX 65536u

/*
 * Reads the start of a small index ahead, in the background: LMDB is told not to, for a large one
 * is read at random, but then the first look-ups after a boot wait for a page of the disk each.
 */
static void read_ahead(MDB_env *env)
{
	mdb_filehandle_t fd;
	struct stat st;

	if (mdb_env_get_fd(env, &fd) == 0 && fstat(fd, &st) == 0 &&
		st.st_size <= (off_t)KV_ENV_SMALL)
		(void)posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED);
}

/* LMDB has met pages that make no sense to it, and aborts when this returns. */
static void report_assert(MDB_env *env, const char *message)
{
	(void)env;
	kv_log_error("index", "damaged, LMDB gives up; " KV_INDEX_ADVICE " reason=\"%s\"", message);
}

int kv_env_open(const char *path, uint64_t map_size, unsigned flags, MDB_env **ret_env)
{
	MDB_env *env;
	int dead;
	int code = mdb_env_create(&env);

	if (code != 0)
		return kv_index_errno(code);
	(void)mdb_env_set_assert(env, report_assert);
	code = mdb_env_set_mapsize(env, map_size != 0 ? map_size : MAP_SIZE_DEFAULT);
	if (code == 0)
		code = mdb_env_set_maxreaders(env, READERS_MAX);
	if (code == 0)
		code = mdb_env_open(env, path, ENV_FLAGS | flags, 0600);
	if (code == 0) /* slots of a daemon that was killed would keep old pages from reuse */
		code = mdb_reader_check(env, &dead);
	if (code != 0) {
		mdb_env_close(env);
		return kv_index_errno(code);
	}
	read_ahead(env);
	*ret_env = env;
	return 0;
}

static int attach(struct kv_index *index)
{
	MDB_txn *txn;
	MDB_env *env;
	int r = kv_env_open(index->path, index->map_size, index->env_flags, &env);

	if (r < 0)
		return r;
	r = kv_index_errno(mdb_txn_begin(env, NULL, MDB_RDONLY, &txn));
	if (r == 0) {
		r = kv_index_errno(mdb_dbi_open(txn, NULL, 0, &index->dbi));
		mdb_txn_abort(txn);
	}
	if (r < 0)
		mdb_env_close(env);
	else
		index->env = env;
	return r;
}

int kv_env_attach(struct kv_index *index, const char *path, uint64_t map_size, unsigned flags)
{
	index->map_size = map_size;
	index->env_flags = flags;
	index->path = strdup(path);
	return index->path ? attach(index) : -ENOMEM;
}

/*
 * When the write of a head page fails, LMDB marks the environment as broken: every transaction from
 * then on fails, reading ones too, until it is opened anew. The file is in order: LMDB has put the
 * page of before back, and a batch that went in half would be written again.
 */
int kv_env_reopen(struct kv_index *index)
{
	int r;

	(void)pthread_rwlock_wrlock(&index->lock);
	kv_view_pool_done(index);
	if (index->env)
		mdb_env_close(index->env);
	index->env = NULL;
	r = attach(index);
	(void)pthread_rwlock_unlock(&index->lock);
	return r;
}

/*
 * A sync of a head page that failed is not made good by the next one: the kernel takes the page for
 * clean then. Later transactions would reuse what the head on the disk still needs. So both are
 * written again.
 */
int kv_env_sync_again(struct kv_index *index)
{
	uint8_t page[PAGE_SIZE_MAX];
	mdb_filehandle_t fd;
	MDB_stat stat;
	int code = mdb_env_stat(index->env, &stat);

	if (code == 0)
		code = mdb_env_get_fd(index->env, &fd);
	if (code != 0)
		return kv_index_errno(code);
	assert(stat.ms_psize <= sizeof(page));
	for (unsigned i = 0; i < HEAD_PAGES; i++) {
		off_t at = (off_t)i * (off_t)stat.ms_psize;

		if (pread(fd, page, stat.ms_psize, at) != (ssize_t)stat.ms_psize ||
			pwrite(fd, page, stat.ms_psize, at) != (ssize_t)stat.ms_psize)
			return errno ? -errno : -EIO;
	}
	return kv_index_errno(mdb_env_sync(index->env, 1));
}
