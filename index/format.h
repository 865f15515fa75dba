/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The records of the index as they lie in LMDB: keys, layouts, encoding and checked decoding.
 *
 * Pure functions, no state, any thread. Encoders write to buffers of the stated size. Decoders
 * never trust what they read: everything that does not fit the layout or the store answers
 * -EUCLEAN, and ret_* is then not written. Pointers that a decoder returns point into the record it
 * was given.
 *
 * Values are little-endian, without alignment; keys are big-endian, because LMDB compares bytes:
 *
 *   key   [1 table] [8 a]            or   [1 table] [8 a] [8 b]
 *
 *   table            a         b            value
 *   META             0         -            store: written once
 *   META             1         -            state: counters, in every commit
 *   SPACE_GROUP      device    group        bitmap of used blocks; absent: none used
 *   SPACE_SUMMARY    device    group / 256  used blocks of 256 groups; absent: none used
 *   REFCOUNT         device    block        how many chunks hold the extent; absent: one
 *   ORPHAN           ino       -            empty
 *   DOMAIN           number    -            quota domain and what it uses; 0 is what has no quota
 *   XATTR            ino       hash, slot   name and value
 *   LINK             ino       hash, slot   a name beyond the first
 *   MAP              ino       segment      extents of 32 chunks
 *   DIRENT           parent    cookie       one name
 *   USE              order     ino          empty; of ino 0: padding, see below
 *   GUARD            0         -            padding, see below
 *   INODE            ino       -            one inode
 *
 * The order of a use is [10 bits domain] [2 bits class] [52 bits last use, in 4096 ns, its sign bit
 * flipped]: so each domain's files that were never read (class 0) and the others (class 1) form
 * lists of their own, oldest first. Pinned files are in none.
 *
 * LMDB fills pages only where keys are appended behind the last key of a page; elsewhere it splits
 * them in halves. Inodes, and uses within each list, come in ascending order. So INODE is the last
 * table of all, and each list ends where a page ends: records of half a page each stand before
 * every list and behind the last one of its domain, and two of them share a page only as long as
 * nothing is between them. That saves one byte in nine of a store of small files; nothing depends
 * on it, and nobody reads them.
 *
 * Behind each value, but for the store's, which has a sum of its own, and those of ORPHAN, USE and
 * GUARD, which say nothing, stand 4 bytes: XXH3-64 of the value, seeded with that of the key, cut
 * to 32 bits. So a record that changed where it lies, or that stands under another's key, is
 * damaged.
 *
 *   store  [8 magic] [4 format] [4 device_count] [16 uuid] [8 hash seed] [4 block size]
 *          [4 chunk size] [8 blocks] x device_count [8 XXH3-64 of all before]
 *   state  [8 next ino] [8 inodes] [8 used blocks] [8 zero]
 *   inode  the head: numbers as below, then the tail: a symlink's target; of a regular file
 *          whose map is small the map of segment 0 (at most 256 bytes; there is no MAP record then)
 *   head   [8 mtime] [8 cookie] [8 atime] [7 last use, as in its order] [4 hits] and as varints:
 *          mode, uid, gid, nlink, flags, domain, size, blocks, version, parent, and the distances
 *          of ctime and btime from mtime, with their signs folded in. What a use changes keeps its
 *          size: a record that grows would split its page, which is full
 *   varint 7 bits a byte, lowest first, the high bit on all but the last
 *   domain [8 directory] [8 limit] [8 used] [8 pinned] (in blocks) [8 inodes] [1 state] [7 zero]
 *   map    chunks, ascending: [1 number in segment] [1 zero] [2 extent count] [8 sum] and extents:
 *          [8 start] [2 device] [2 block in chunk] [4 count], ascending
 *   dirent [8 ino] [1 type: S_IFMT >> 12] [name: the rest, 1 to 1023 bytes]
 *   xattr  [1 name length] [name] [value: the rest]
 *   link   [8 parent] [8 cookie]
 *   refcount [4 count, at least 2]
 *   group  1024 bytes, bit N of byte N / 8: block N of the group
 *   summary 256 x [2 used blocks]
 */
#ifndef KVFS_INDEX_FORMAT_H
#define KVFS_INDEX_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "fs/base.h"
#include "index/index.h"

#define KV_INDEX_FORMAT 3u
#define KV_INDEX_MAGIC UINT64_C(0x007864697366766b) /* "kvfsidx" read as little-endian */

enum kv_table {
	KV_TABLE_META = 1,
	KV_TABLE_SPACE_GROUP,
	KV_TABLE_SPACE_SUMMARY,
	KV_TABLE_REFCOUNT,
	KV_TABLE_ORPHAN,
	KV_TABLE_DOMAIN,
	KV_TABLE_XATTR,
	KV_TABLE_LINK,
	KV_TABLE_MAP,
	KV_TABLE_DIRENT,
	KV_TABLE_USE,
	KV_TABLE_GUARD,
	KV_TABLE_INODE,
	_KV_TABLE_MAX,
};

/* As messages call it; "table" for none of them. */
const char *kv_table_name(unsigned table);

#define KV_META_STORE 0u
#define KV_META_STATE 1u
/* With the longest key a node of half a page. */
#define KV_PADDING_SIZE 2013u

/* ---- Keys ---- */

#define KV_KEY_TABLE_SIZE 1u
#define KV_KEY_SINGLE_SIZE 9u
#define KV_KEY_PAIR_SIZE 17u
struct kv_key {
	uint8_t size; /* 9 or 17 */
	uint8_t bytes[KV_KEY_PAIR_SIZE];
};

static inline struct kv_key kv_key_single(enum kv_table table, uint64_t a)
{
	struct kv_key key = {.size = KV_KEY_SINGLE_SIZE};

	key.bytes[0] = (uint8_t)table;
	kv_put_be64(key.bytes + 1, a);
	return key;
}

static inline struct kv_key kv_key_pair(enum kv_table table, uint64_t a, uint64_t b)
{
	struct kv_key key = {.size = KV_KEY_PAIR_SIZE};

	key.bytes[0] = (uint8_t)table;
	kv_put_be64(key.bytes + 1, a);
	kv_put_be64(key.bytes + 9, b);
	return key;
}

static inline uint64_t kv_key_a(const struct kv_key *key)
{
	return kv_get_be64(key->bytes + 1);
}

/* 0 for a key without b. */
static inline uint64_t kv_key_b(const struct kv_key *key)
{
	return key->size == KV_KEY_PAIR_SIZE ? kv_get_be64(key->bytes + 9) : 0;
}

/* The order of LMDB: bytes first, then length. */
static inline int kv_key_compare(const struct kv_key *a, const struct kv_key *b)
{
	int r = memcmp(a->bytes, b->bytes, a->size < b->size ? a->size : b->size);

	return r != 0 ? r : (int)a->size - (int)b->size;
}

/* Bytes of unknown origin into a key; -EUCLEAN if no table has such keys. */
int kv_key_decode(const void *data, size_t size, struct kv_key *ret_key);

/* ---- Sums ---- */

#define KV_RECORD_SUM_SIZE 4u
/* Bytes of the sum behind a value under KEY: KV_RECORD_SUM_SIZE or 0. */
size_t kv_record_sum_size(const struct kv_key *key);
uint32_t kv_record_sum(const struct kv_key *key, const void *value, size_t size);
/* The size of the value of a record of SIZE bytes, without its sum; 0, which no table with sums
 * takes for a value, if that does not match. */
size_t kv_record_value_size(const struct kv_key *key, const void *record, size_t size);

/* ---- The use order ---- */

enum kv_use_class {
	KV_USE_UNREAD, /* not opened for reading since it was published */
	KV_USE_READ,
	_KV_USE_CLASS_MAX,
};

#define KV_USE_SHIFT 12u
#define KV_USE_CLASS_BITS 2u
#define KV_USE_TIME_BITS (64u - KV_USE_SHIFT)

static_assert(
	KV_DOMAINS_MAX <= 1u << (KV_USE_SHIFT - KV_USE_CLASS_BITS), "a domain fits the order");

/* Times of use are kept in that grain. */
static inline int64_t kv_use_round(int64_t ns)
{
	return (int64_t)((uint64_t)ns & ~((UINT64_C(1) << KV_USE_SHIFT) - 1));
}

static inline uint64_t kv_use_order(uint32_t domain, unsigned use_class, int64_t ns)
{
	uint64_t list = (uint64_t)domain << KV_USE_CLASS_BITS | use_class;

	return list << KV_USE_TIME_BITS | ((uint64_t)ns ^ UINT64_C(1) << 63) >> KV_USE_SHIFT;
}

static inline uint32_t kv_use_domain(uint64_t order)
{
	return (uint32_t)(order >> (KV_USE_TIME_BITS + KV_USE_CLASS_BITS));
}

static inline unsigned kv_use_class(uint64_t order)
{
	return (unsigned)(order >> KV_USE_TIME_BITS) & ((1u << KV_USE_CLASS_BITS) - 1);
}

static inline int64_t kv_use_ns(uint64_t order)
{
	return (int64_t)(order << KV_USE_SHIFT ^ UINT64_C(1) << 63);
}

/* ---- Hashed keys: directory entries, extended attributes, further links ---- */

/* Names of one hash take the 16 slots behind hash << 4. */
#define KV_HASH_SLOTS 16u
#define KV_HASH_BITS 59u
/* Never 0, so that every cookie is above the ones that stand for "." and "..". */
uint64_t kv_hash_base(const void *data, size_t size, uint64_t seed, uint64_t mask);

/* ---- Store and state ---- */

/* Bounds what a mount keeps in memory: 4 PiB a device. */
#define KV_DEVICE_BLOCKS_MAX (UINT64_C(1) << 40)
#define KV_STORE_RECORD_MAX (48u + 8u * KV_DEVICES_MAX + 8u)

struct kv_store_record {
	struct kv_index_store store;
	uint64_t hash_seed;
};
/* Returns the size. */
size_t kv_store_encode(const struct kv_store_record *record, uint8_t ret_data[KV_STORE_RECORD_MAX]);
/* -EPROTO: made by a newer or older kvfs; ret_record->store.format is then its format. */
int kv_store_decode(const void *data, size_t size, struct kv_store_record *ret_record);

#define KV_STATE_RECORD_SIZE 32u
struct kv_state {
	uint64_t next_ino; /* no inode number at or above it was ever handed out */
	uint64_t inodes;
	uint64_t used_blocks;
};
void kv_state_encode(const struct kv_state *state, uint8_t ret_data[KV_STATE_RECORD_SIZE]);
int kv_state_decode(const void *data, size_t size, struct kv_state *ret_state);

/* ---- Inodes ---- */

#define KV_INODE_HEAD_MAX 168u
#define KV_TARGET_MAX 4095u
#define KV_INLINE_MAP_MAX 256u

/* KV_INODE_HELD is not written: the layer that holds the record says so. Returns the head's size.
 */
size_t kv_inode_encode(const struct kv_inode *inode, uint8_t ret_data[KV_INODE_HEAD_MAX]);
/* The tail lies behind the first *RET_HEAD bytes; its size has been checked for the type. */
int kv_inode_decode(
	uint64_t ino, const void *data, size_t size, struct kv_inode *ret_inode, size_t *ret_head);

/* ---- Quota domains ---- */

#define KV_DOMAIN_RECORD_SIZE 48u
struct kv_domain_record {
	uint64_t ino;    /* the directory; 0 of domain 0 */
	uint64_t limit;  /* blocks */
	uint64_t used;   /* blocks */
	uint64_t pinned; /* blocks */
	uint64_t inodes;
	enum kv_domain_state state;
};
void kv_domain_encode(
	const struct kv_domain_record *record, uint8_t ret_data[KV_DOMAIN_RECORD_SIZE]);
int kv_domain_decode(const void *data, size_t size, struct kv_domain_record *ret_record);

/* ---- Chunk maps ---- */

#define KV_SEGMENT_CHUNKS 32u
#define KV_CHUNK_HEADER_SIZE 12u
#define KV_EXTENT_RECORD_SIZE 16u

/* -EUCLEAN unless the extent lies on a device of STORE and inside one chunk. */
int kv_extent_check(const struct kv_index_store *store, const struct kv_extent *extent);
/* The same for COUNT extents of one chunk, which must ascend by block. */
int kv_extents_check(
	const struct kv_index_store *store, const struct kv_extent *extents, size_t count);

static inline size_t kv_chunk_record_size(uint32_t extent_count)
{
	return KV_CHUNK_HEADER_SIZE + (size_t)extent_count * KV_EXTENT_RECORD_SIZE;
}
/* Writes kv_chunk_record_size bytes, and returns how many that are. */
size_t kv_chunk_encode(const struct kv_chunk *chunk, uint8_t *ret_data);

/* Walks the chunks of one segment. */
struct kv_map_reader {
	const struct kv_index_store *store;
	const uint8_t *data;
	size_t size;
	size_t at;
	uint32_t segment;
	int last; /* number within the segment of the chunk before, or -1 */
	struct kv_extent extents[KV_CHUNK_BLOCKS];
};
void kv_map_reader_init(struct kv_map_reader *reader, const struct kv_index_store *store,
	const void *data, size_t size);
/*
 * 1: ret_chunk is the next chunk, its extents valid until the next call; its record is the
 * kv_chunk_record_size bytes before reader->at. 0: no more. -EUCLEAN.
 */
int kv_map_next(struct kv_map_reader *reader, struct kv_chunk *ret_chunk);

/* ---- Names, links, attributes ---- */

#define KV_DIRENT_HEADER_SIZE 9u
#define KV_DIRENT_RECORD_MAX (KV_DIRENT_HEADER_SIZE + KV_NAME_MAX)
struct kv_dirent_record {
	uint64_t ino;
	uint32_t type; /* S_IFMT bits */
	const char *name;
	size_t length;
};
size_t kv_dirent_encode(
	const struct kv_dirent_record *record, uint8_t ret_data[KV_DIRENT_RECORD_MAX]);
int kv_dirent_decode(const void *data, size_t size, struct kv_dirent_record *ret_record);

#define KV_LINK_RECORD_SIZE 16u
/* Where a name is: the directory and the place in it. */
struct kv_place {
	uint64_t parent;
	uint64_t cookie;
};
void kv_link_encode(const struct kv_place *place, uint8_t ret_data[KV_LINK_RECORD_SIZE]);
int kv_link_decode(const void *data, size_t size, struct kv_place *ret_place);

#define KV_XATTR_NAME_MAX 255u
#define KV_XATTR_SIZE_MAX 65536u
struct kv_xattr_record {
	const char *name;
	size_t length;
	const void *value;
	size_t size;
};
/* Writes 1 + length + size bytes. */
void kv_xattr_encode(const struct kv_xattr_record *record, uint8_t *ret_data);
int kv_xattr_decode(const void *data, size_t size, struct kv_xattr_record *ret_record);

/* ---- Space ---- */

#define KV_GROUP_BLOCKS 8192u
#define KV_GROUP_WORDS (KV_GROUP_BLOCKS / 64u)
#define KV_GROUP_RECORD_SIZE (KV_GROUP_BLOCKS / 8u)
#define KV_SUMMARY_GROUPS 256u
#define KV_SUMMARY_RECORD_SIZE (KV_SUMMARY_GROUPS * 2u)
#define KV_REFCOUNT_RECORD_SIZE 4u

void kv_group_encode(const uint64_t words[KV_GROUP_WORDS], uint8_t ret_data[KV_GROUP_RECORD_SIZE]);
/* BLOCKS: how many of the group the device has; -EUCLEAN if one behind them is marked. */
int kv_group_decode(
	const void *data, size_t size, uint32_t blocks, uint64_t ret_words[KV_GROUP_WORDS]);
void kv_summary_encode(
	const uint16_t *used, size_t count, uint8_t ret_data[KV_SUMMARY_RECORD_SIZE]);
/* Checks that no group uses more than KV_GROUP_BLOCKS. */
int kv_summary_decode(const void *data, size_t size, uint16_t ret_used[KV_SUMMARY_GROUPS]);
void kv_refcount_encode(uint32_t count, uint8_t ret_data[KV_REFCOUNT_RECORD_SIZE]);
int kv_refcount_decode(const void *data, size_t size, uint32_t *ret_count);

#endif
