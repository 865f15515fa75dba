/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Room for deletions. LMDB copies each page that it changes, so removing things needs room before
 * it gives any. A reserve is kept: blocks behind the end of the file, allocated but not in use, and
 * so many addresses of the map. While less than that is left, counting the pages that are free in
 * the file, what makes the index grow is refused, and batches are kept small enough for the
 * reserve. What removals free lifts that again.
 */
#include <fcntl.h>
#include <sys/statvfs.h>

#include "index/index_internal.h"

#define RESERVE_MIN (UINT64_C(1) << 20)
#define RESERVE_MAX (UINT64_C(8) << 20)
/* Of the map, or of the filesystem, whichever is smaller. */
#define RESERVE_SHARE 64u
/* With so much left no batch can get near the reserve: each of KV_PENDING_MAX records may copy a
 * page, in the batch that is written and in the one behind it. */
#define PLENTY (UINT64_C(2) << 30)
/*
 * Else a record may take so many pages of the reserve, for two batches: what the first one frees
 * can be used by the third. Of its own it takes a leaf and, where that splits or joins another, one
 * more and its parent; the pages above are few, and shared.
 */
#define PAGES_A_RECORD 8u

struct room {
	uint64_t end;     /* of what LMDB uses of the file */
	uint64_t map;     /* left of the map */
	uint64_t disk;    /* left of the filesystem, the reserve not counted */
	uint64_t reserve; /* to be kept */
	uint64_t page_size;
};

static int measure(struct kv_index *index, int fd, struct room *ret_room)
{
	MDB_envinfo info;
	MDB_stat stat;
	struct statvfs fs;
	uint64_t total;

	if (mdb_env_info(index->env, &info) != 0 || mdb_env_stat(index->env, &stat) != 0)
		return -EIO;
	if (fstatvfs(fd, &fs) < 0)
		return -errno;
	total = kv_min_u64(info.me_mapsize, (uint64_t)fs.f_blocks * fs.f_frsize);
	*ret_room = (struct room){
		.end = ((uint64_t)info.me_last_pgno + 1) * stat.ms_psize,
		.disk = (uint64_t)fs.f_bfree * fs.f_frsize,
		.reserve = kv_min_u64(RESERVE_MAX,
			kv_max_u64(kv_min_u64(RESERVE_MIN, total / 8), total / RESERVE_SHARE)),
		.page_size = stat.ms_psize,
	};
	ret_room->map = info.me_mapsize - kv_min_u64(info.me_mapsize, ret_room->end);
	return 0;
}

/* Allocates the reserve where it is used up by half; less of it where there is no more. */
static void allocate(struct kv_index *index, int fd, const struct room *room)
{
	uint64_t size = room->reserve;

	if (index->reserve_end >= room->end + room->reserve / 2)
		return;
	for (; size >= room->page_size; size /= 2) {
		if (fallocate(fd, FALLOC_FL_KEEP_SIZE, (off_t)room->end, (off_t)size) == 0) {
			index->reserve_end = kv_max_u64(index->reserve_end, room->end + size);
			return;
		}
		if (errno == EOPNOTSUPP)
			break;
		if (errno != ENOSPC && errno != EDQUOT && errno != EINTR)
			return;
	}
	/* It cannot be had in advance there: what is free stands for it. */
	if (size >= room->page_size)
		index->reserve_end = room->end + kv_min_u64(room->reserve, room->disk);
}

/* Bytes of pages that are free in the file. LMDB lists them in its tree number 0, in records that
 * begin with their number. */
static uint64_t free_in_file(struct kv_index *index, uint64_t page_size)
{
	MDB_cursor *cursor;
	MDB_txn *txn;
	MDB_val key, value;
	uint64_t pages = 0;

	if (mdb_txn_begin(index->env, NULL, MDB_RDONLY, &txn) != 0)
		return 0;
	if (mdb_cursor_open(txn, 0, &cursor) == 0) {
		while (mdb_cursor_get(cursor, &key, &value, MDB_NEXT) == 0)
			if (value.mv_size >= sizeof(uint64_t))
				pages += kv_get_le64(value.mv_data);
		mdb_cursor_close(cursor);
	}
	mdb_txn_abort(txn);
	return pages * page_size;
}

static void set_short(struct kv_index *index, bool is_short)
{
	unsigned suppressed;

	if (atomic_exchange_explicit(&index->is_short, is_short, memory_order_acq_rel) == is_short)
		return;
	if (kv_log_allowed(&index->reserve_log, &suppressed))
		kv_log_warning("index",
			is_short ? "no room left to grow: only removals are taken, until they "
				   "have freed enough; give its filesystem more room suppressed=%u"
				 : "has room again suppressed=%u",
			suppressed);
}

void kv_reserve_update(struct kv_index *index)
{
	mdb_filehandle_t fd;
	struct room room = {0};
	uint64_t ahead, left;

	if (mdb_env_get_fd(index->env, &fd) != 0 || measure(index, fd, &room) < 0)
		return;
	allocate(index, fd, &room);
	ahead = index->reserve_end - kv_min_u64(index->reserve_end, room.end);
	left = kv_min_u64(room.map, ahead);
	if (kv_min_u64(room.map, room.disk + ahead) >= PLENTY) {
		atomic_store_explicit(&index->pending_max, KV_PENDING_MAX, memory_order_relaxed);
		set_short(index, false);
		return;
	}
	atomic_store_explicit(&index->pending_max,
		kv_max_u64(1, room.reserve / room.page_size / PAGES_A_RECORD),
		memory_order_relaxed);
	/* Room to grow is beyond the reserve. */
	if (kv_min_u64(room.map, room.disk + ahead) > 2 * room.reserve && left >= room.reserve / 2)
		set_short(index, false);
	else
		set_short(index, left / 2 + free_in_file(index, room.page_size) < room.reserve);
}

unsigned kv_reserve_steps(const struct kv_index *index, unsigned most, unsigned records)
{
	uint64_t max = atomic_load_explicit(&index->pending_max, memory_order_relaxed);

	return (unsigned)kv_max_u64(1, kv_min_u64(most, max / records));
}

bool kv_index_is_short(const struct kv_index *index)
{
	return atomic_load_explicit(&index->is_short, memory_order_acquire);
}
