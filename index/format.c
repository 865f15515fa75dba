/* SPDX-License-Identifier: Apache-2.0 */
/* Encoding and checked decoding of the index's records. */
#include "index/format.h"

#include <sys/stat.h>
#include <xxhash.h>

static_assert(KV_GROUP_RECORD_SIZE == 1024, "group record");
static_assert(KV_SUMMARY_RECORD_SIZE == 512, "summary record");
static_assert(KV_GROUP_BLOCKS <= UINT16_MAX, "a group's count fits its summary");
static_assert(KV_CHUNK_BLOCKS <= UINT16_MAX, "an extent's block fits its field");
static_assert(_KV_TABLE_MAX <= UINT8_MAX, "a table fits the key's first byte");

#define STORE_HEADER_SIZE 48u

/* ---- Keys ---- */

static bool table_has_pairs(uint8_t table)
{
	return table != KV_TABLE_META && table != KV_TABLE_ORPHAN && table != KV_TABLE_DOMAIN &&
	       table != KV_TABLE_GUARD && table != KV_TABLE_INODE;
}

size_t kv_record_sum_size(const struct kv_key *key)
{
	switch (key->bytes[0]) {
	case KV_TABLE_META:
		return kv_key_a(key) == KV_META_STORE ? 0 : KV_RECORD_SUM_SIZE;
	case KV_TABLE_ORPHAN:
	case KV_TABLE_USE:
	case KV_TABLE_GUARD:
		return 0;
	default:
		return KV_RECORD_SUM_SIZE;
	}
}

uint32_t kv_record_sum(const struct kv_key *key, const void *value, size_t size)
{
	return (uint32_t)XXH3_64bits_withSeed(value, size, XXH3_64bits(key->bytes, key->size));
}

size_t kv_record_value_size(const struct kv_key *key, const void *record, size_t size)
{
	size_t sum_size = kv_record_sum_size(key);
	const uint8_t *p = record;

	if (sum_size == 0)
		return size;
	if (size <= sum_size)
		return 0;
	size -= sum_size;
	return kv_get_le32(p + size) == kv_record_sum(key, p, size) ? size : 0;
}

const char *kv_table_name(unsigned table)
{
	static const char *const names[_KV_TABLE_MAX] = {
		[KV_TABLE_META] = "head",
		[KV_TABLE_SPACE_GROUP] = "bitmap of blocks",
		[KV_TABLE_SPACE_SUMMARY] = "count of blocks",
		[KV_TABLE_REFCOUNT] = "reference count",
		[KV_TABLE_ORPHAN] = "orphan",
		[KV_TABLE_DOMAIN] = "quota",
		[KV_TABLE_XATTR] = "attribute",
		[KV_TABLE_LINK] = "link",
		[KV_TABLE_MAP] = "map",
		[KV_TABLE_DIRENT] = "name",
		[KV_TABLE_USE] = "use",
		[KV_TABLE_GUARD] = "padding",
		[KV_TABLE_INODE] = "inode",
	};

	return table < _KV_TABLE_MAX && names[table] ? names[table] : "table";
}

int kv_key_decode(const void *data, size_t size, struct kv_key *ret_key)
{
	const uint8_t *bytes = data;

	if (size == 0 || bytes[0] == 0 || bytes[0] >= _KV_TABLE_MAX)
		return -EUCLEAN;
	if (size != (table_has_pairs(bytes[0]) ? KV_KEY_PAIR_SIZE : KV_KEY_SINGLE_SIZE))
		return -EUCLEAN;
	*ret_key = (struct kv_key){.size = (uint8_t)size};
	memcpy(ret_key->bytes, bytes, size);
	return 0;
}

uint64_t kv_hash_base(const void *data, size_t size, uint64_t seed, uint64_t mask)
{
	uint64_t hash = (XXH3_64bits_withSeed(data, size, seed) & mask) >> (64 - KV_HASH_BITS);

	return (hash != 0 ? hash : 1) * KV_HASH_SLOTS;
}

/* ---- Store and state ---- */

size_t kv_store_encode(const struct kv_store_record *record, uint8_t ret_data[KV_STORE_RECORD_MAX])
{
	const struct kv_index_store *store = &record->store;
	size_t size = STORE_HEADER_SIZE;

	assert(store->device_count >= 1 && store->device_count <= KV_DEVICES_MAX);
	kv_put_le64(ret_data, KV_INDEX_MAGIC);
	kv_put_le32(ret_data + 8, store->format);
	kv_put_le32(ret_data + 12, store->device_count);
	memcpy(ret_data + 16, store->uuid, sizeof(store->uuid));
	kv_put_le64(ret_data + 32, record->hash_seed);
	kv_put_le32(ret_data + 40, KV_BLOCK_SIZE);
	kv_put_le32(ret_data + 44, KV_CHUNK_SIZE);
	for (uint32_t i = 0; i < store->device_count; i++, size += 8)
		kv_put_le64(ret_data + size, store->device_blocks[i]);
	kv_put_le64(ret_data + size, XXH3_64bits(ret_data, size));
	return size + 8;
}

int kv_store_decode(const void *data, size_t size, struct kv_store_record *ret_record)
{
	const uint8_t *p = data;
	struct kv_store_record record = {0};
	struct kv_index_store *store = &record.store;

	/* Magic and format stay where they are in every format, so that another one is recognised.
	 */
	if (size < 12 || kv_get_le64(p) != KV_INDEX_MAGIC)
		return -EUCLEAN;
	store->format = kv_get_le32(p + 8);
	if (store->format != KV_INDEX_FORMAT && store->format != 0) {
		*ret_record = record;
		return -EPROTO;
	}
	if (size < STORE_HEADER_SIZE + 8 || store->format == 0)
		return -EUCLEAN;
	store->device_count = kv_get_le32(p + 12);
	if (store->device_count < 1 || store->device_count > KV_DEVICES_MAX ||
		size != STORE_HEADER_SIZE + 8 * (size_t)store->device_count + 8 ||
		kv_get_le64(p + size - 8) != XXH3_64bits(p, size - 8) ||
		kv_get_le32(p + 40) != KV_BLOCK_SIZE || kv_get_le32(p + 44) != KV_CHUNK_SIZE)
		return -EUCLEAN;
	memcpy(store->uuid, p + 16, sizeof(store->uuid));
	record.hash_seed = kv_get_le64(p + 32);
	for (uint32_t i = 0; i < store->device_count; i++) {
		store->device_blocks[i] = kv_get_le64(p + STORE_HEADER_SIZE + 8 * (size_t)i);
		if (store->device_blocks[i] > KV_DEVICE_BLOCKS_MAX)
			return -EUCLEAN;
	}
	*ret_record = record;
	return 0;
}

void kv_state_encode(const struct kv_state *state, uint8_t ret_data[KV_STATE_RECORD_SIZE])
{
	kv_put_le64(ret_data, state->next_ino);
	kv_put_le64(ret_data + 8, state->inodes);
	kv_put_le64(ret_data + 16, state->used_blocks);
	kv_put_le64(ret_data + 24, 0);
}

int kv_state_decode(const void *data, size_t size, struct kv_state *ret_state)
{
	const uint8_t *p = data;
	struct kv_state state;

	if (size != KV_STATE_RECORD_SIZE || kv_get_le64(p + 24) != 0)
		return -EUCLEAN;
	state.next_ino = kv_get_le64(p);
	state.inodes = kv_get_le64(p + 8);
	state.used_blocks = kv_get_le64(p + 16);
	if (state.next_ino <= KV_ROOT_INO || state.next_ino > INT64_MAX || state.inodes == 0 ||
		state.inodes >= state.next_ino)
		return -EUCLEAN;
	*ret_state = state;
	return 0;
}

/* ---- Inodes ---- */

#define VARINT_MAX 10u
#define INODE_FIXED 35u

static size_t put_varint(uint8_t *data, uint64_t value)
{
	size_t size = 0;

	for (; value >= 0x80; value >>= 7)
		data[size++] = (uint8_t)(value | 0x80);
	data[size++] = (uint8_t)value;
	return size;
}

/* Small distances of either sign as small numbers. */
static uint64_t fold(int64_t distance)
{
	return (uint64_t)distance << 1 ^ (uint64_t)(distance >> 63);
}

static int64_t unfold(uint64_t folded)
{
	return (int64_t)(folded >> 1 ^ (0 - (folded & 1)));
}

/* Bytes that are read one number at a time; bad once one did not fit. */
struct reader {
	const uint8_t *at;
	const uint8_t *end;
	bool bad;
};

static uint64_t get_varint(struct reader *reader, uint64_t max)
{
	uint64_t value = 0;

	for (unsigned i = 0; i < VARINT_MAX && reader->at < reader->end; i++) {
		uint8_t byte = *reader->at++;

		/* The tenth byte has the 64th bit. */
		if (i == VARINT_MAX - 1 && byte > 1)
			break;
		value |= (uint64_t)(byte & 0x7f) << 7 * i;
		if (byte >= 0x80)
			continue;
		reader->bad |= value > max;
		return value;
	}
	reader->bad = true;
	return 0;
}

/* Differences wrap: any two times have one. */
static uint64_t distance(int64_t from, int64_t to)
{
	return fold((int64_t)((uint64_t)to - (uint64_t)from));
}

static int64_t at_distance(int64_t from, uint64_t folded)
{
	return (int64_t)((uint64_t)from + (uint64_t)unfold(folded));
}

size_t kv_inode_encode(const struct kv_inode *inode, uint8_t ret_data[KV_INODE_HEAD_MAX])
{
	const uint64_t numbers[] = {
		inode->mode,
		inode->uid,
		inode->gid,
		inode->nlink,
		inode->flags & ~KV_INODE_HELD,
		inode->domain,
		inode->size,
		inode->blocks,
		inode->version,
		inode->parent,
		distance(inode->mtime_ns, inode->ctime_ns),
		distance(inode->mtime_ns, inode->btime_ns),
	};
	size_t size = INODE_FIXED;

	static_assert(INODE_FIXED + VARINT_MAX * sizeof(numbers) / sizeof(numbers[0]) <=
			      KV_INODE_HEAD_MAX,
		"an inode's head fits its buffer");
	kv_put_le64(ret_data, (uint64_t)inode->mtime_ns);
	kv_put_le64(ret_data + 8, inode->cookie);
	kv_put_le64(ret_data + 16, (uint64_t)inode->atime_ns);
	/* Seven bytes: the eighth is overwritten. */
	kv_put_le64(ret_data + 24, kv_use_order(0, 0, inode->last_use_ns));
	kv_put_le32(ret_data + 31, inode->hits);
	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
		size += put_varint(ret_data + size, numbers[i]);
	return size;
}

static bool inode_tail_fits(const struct kv_inode *inode, size_t tail)
{
	switch (inode->mode & S_IFMT) {
	case S_IFREG:
		return tail <= KV_INLINE_MAP_MAX;
	case S_IFDIR:
		return tail == 0 && inode->blocks == 0;
	case S_IFLNK:
		return tail >= 1 && tail <= KV_TARGET_MAX && tail == inode->size &&
		       inode->blocks == 0;
	default:
		return false;
	}
}

static bool inode_is_sane(const struct kv_inode *inode)
{
	bool placed = inode->cookie >= KV_HASH_SLOTS && inode->cookie <= INT64_MAX;

	if (inode->ino == 0 || inode->ino > INT64_MAX ||
		inode->mode & ~(uint32_t)(S_IFMT | 07777) || inode->flags & ~KV_INODE_FLAGS ||
		inode->parent > INT64_MAX || inode->size > KV_FILE_SIZE_MAX ||
		inode->blocks > (uint64_t)UINT32_MAX * KV_CHUNK_BLOCKS)
		return false;
	if (inode->ino == KV_ROOT_INO)
		return S_ISDIR(inode->mode) && inode->nlink >= 2 && inode->parent == KV_ROOT_INO &&
		       inode->cookie == 0;
	if (inode->nlink == 0)
		return inode->cookie == 0 && !(inode->flags & KV_INODE_PINNED);
	return placed && inode->parent != 0 && inode->parent != inode->ino &&
	       !(inode->flags & KV_INODE_QUARANTINED);
}

int kv_inode_decode(
	uint64_t ino, const void *data, size_t size, struct kv_inode *ret_inode, size_t *ret_head)
{
	const uint8_t *p = data;
	struct reader reader = {.at = p + INODE_FIXED, .end = p + size};
	struct kv_inode inode = {.ino = ino};
	uint64_t order;

	if (size < INODE_FIXED)
		return -EUCLEAN;
	inode.mtime_ns = (int64_t)kv_get_le64(p);
	inode.cookie = kv_get_le64(p + 8);
	inode.atime_ns = (int64_t)kv_get_le64(p + 16);
	order = kv_get_le64(p + 24) & ~(UINT64_C(0xff) << 56);
	inode.last_use_ns = kv_use_ns(order);
	inode.hits = kv_get_le32(p + 31);
	inode.mode = (uint32_t)get_varint(&reader, UINT32_MAX);
	inode.uid = (uint32_t)get_varint(&reader, UINT32_MAX);
	inode.gid = (uint32_t)get_varint(&reader, UINT32_MAX);
	inode.nlink = (uint32_t)get_varint(&reader, UINT32_MAX);
	inode.flags = (uint32_t)get_varint(&reader, UINT32_MAX);
	inode.domain = (uint32_t)get_varint(&reader, KV_DOMAINS_MAX - 1);
	inode.size = get_varint(&reader, UINT64_MAX);
	inode.blocks = get_varint(&reader, UINT64_MAX);
	inode.version = get_varint(&reader, UINT64_MAX);
	inode.parent = get_varint(&reader, UINT64_MAX);
	inode.ctime_ns = at_distance(inode.mtime_ns, get_varint(&reader, UINT64_MAX));
	inode.btime_ns = at_distance(inode.mtime_ns, get_varint(&reader, UINT64_MAX));
	if (reader.bad || order >> KV_USE_TIME_BITS != 0 || !inode_is_sane(&inode) ||
		!inode_tail_fits(&inode, (size_t)(reader.end - reader.at)))
		return -EUCLEAN;
	*ret_inode = inode;
	*ret_head = (size_t)(reader.at - p);
	return 0;
}

/* ---- Quota domains ---- */

void kv_domain_encode(
	const struct kv_domain_record *record, uint8_t ret_data[KV_DOMAIN_RECORD_SIZE])
{
	kv_put_le64(ret_data, record->ino);
	kv_put_le64(ret_data + 8, record->limit);
	kv_put_le64(ret_data + 16, record->used);
	kv_put_le64(ret_data + 24, record->pinned);
	kv_put_le64(ret_data + 32, record->inodes);
	kv_put_le64(ret_data + 40, record->state);
}

int kv_domain_decode(const void *data, size_t size, struct kv_domain_record *ret_record)
{
	const uint8_t *p = data;
	struct kv_domain_record record;
	uint64_t state;

	if (size != KV_DOMAIN_RECORD_SIZE)
		return -EUCLEAN;
	state = kv_get_le64(p + 40);
	record = (struct kv_domain_record){
		.ino = kv_get_le64(p),
		.limit = kv_get_le64(p + 8),
		.used = kv_get_le64(p + 16),
		.pinned = kv_get_le64(p + 24),
		.inodes = kv_get_le64(p + 32),
		.state = (enum kv_domain_state)state,
	};
	if (state == KV_DOMAIN_NONE || state >= _KV_DOMAIN_STATE_MAX || record.ino > INT64_MAX ||
		record.inodes > INT64_MAX || record.used > INT64_MAX || record.limit > INT64_MAX ||
		record.pinned > record.used)
		return -EUCLEAN;
	*ret_record = record;
	return 0;
}

/* ---- Chunk maps ---- */

int kv_extent_check(const struct kv_index_store *store, const struct kv_extent *extent)
{
	uint64_t blocks;

	if (extent->device >= store->device_count || extent->count == 0 ||
		extent->count > KV_CHUNK_BLOCKS || extent->block + extent->count > KV_CHUNK_BLOCKS)
		return -EUCLEAN;
	blocks = store->device_blocks[extent->device];
	if (extent->start >= blocks || extent->count > blocks - extent->start)
		return -EUCLEAN;
	return 0;
}

int kv_extents_check(
	const struct kv_index_store *store, const struct kv_extent *extents, size_t count)
{
	uint32_t end = 0;

	if (count > KV_CHUNK_BLOCKS)
		return -EUCLEAN;
	for (size_t i = 0; i < count; i++) {
		if (kv_extent_check(store, &extents[i]) < 0 || extents[i].block < end)
			return -EUCLEAN;
		end = extents[i].block + extents[i].count;
	}
	return 0;
}

size_t kv_chunk_encode(const struct kv_chunk *chunk, uint8_t *ret_data)
{
	uint8_t *p = ret_data + KV_CHUNK_HEADER_SIZE;

	assert(chunk->extent_count >= 1 && chunk->extent_count <= KV_CHUNK_BLOCKS);
	ret_data[0] = (uint8_t)(chunk->number % KV_SEGMENT_CHUNKS);
	ret_data[1] = 0;
	kv_put_le16(ret_data + 2, (uint16_t)chunk->extent_count);
	kv_put_le64(ret_data + 4, chunk->sum);
	for (uint32_t i = 0; i < chunk->extent_count; i++, p += KV_EXTENT_RECORD_SIZE) {
		kv_put_le64(p, chunk->extents[i].start);
		kv_put_le16(p + 8, chunk->extents[i].device);
		kv_put_le16(p + 10, chunk->extents[i].block);
		kv_put_le32(p + 12, chunk->extents[i].count);
	}
	return kv_chunk_record_size(chunk->extent_count);
}

void kv_map_reader_init(struct kv_map_reader *reader, const struct kv_index_store *store,
	const void *data, size_t size)
{
	reader->store = store;
	reader->data = data;
	reader->size = size;
	reader->at = 0;
	reader->segment = 0;
	reader->last = -1;
}

int kv_map_next(struct kv_map_reader *reader, struct kv_chunk *ret_chunk)
{
	size_t left = reader->size - reader->at;
	const uint8_t *p = reader->data + reader->at;
	uint32_t count;

	if (left == 0)
		return 0;
	if (left < KV_CHUNK_HEADER_SIZE || p[0] >= KV_SEGMENT_CHUNKS || p[0] <= reader->last ||
		p[1] != 0)
		return -EUCLEAN;
	count = kv_get_le16(p + 2);
	if (count == 0 || count > KV_CHUNK_BLOCKS || left < kv_chunk_record_size(count))
		return -EUCLEAN;
	for (uint32_t i = 0; i < count; i++) {
		const uint8_t *e = p + kv_chunk_record_size(i);

		reader->extents[i] = (struct kv_extent){
			.start = kv_get_le64(e),
			.device = kv_get_le16(e + 8),
			.block = kv_get_le16(e + 10),
			.count = kv_get_le32(e + 12),
		};
	}
	if (kv_extents_check(reader->store, reader->extents, count) < 0)
		return -EUCLEAN;
	*ret_chunk = (struct kv_chunk){
		.number = reader->segment * KV_SEGMENT_CHUNKS + p[0],
		.extent_count = count,
		.origin = KV_CHUNK_KEPT,
		.sum = kv_get_le64(p + 4),
		.extents = reader->extents,
	};
	reader->last = p[0];
	reader->at += kv_chunk_record_size(count);
	return 1;
}

/* ---- Names, links, attributes ---- */

size_t kv_dirent_encode(
	const struct kv_dirent_record *record, uint8_t ret_data[KV_DIRENT_RECORD_MAX])
{
	assert(record->length >= 1 && record->length <= KV_NAME_MAX);
	kv_put_le64(ret_data, record->ino);
	ret_data[8] = (uint8_t)(record->type >> 12);
	memcpy(ret_data + KV_DIRENT_HEADER_SIZE, record->name, record->length);
	return KV_DIRENT_HEADER_SIZE + record->length;
}

int kv_dirent_decode(const void *data, size_t size, struct kv_dirent_record *ret_record)
{
	const uint8_t *p = data;
	struct kv_dirent_record record;

	if (size <= KV_DIRENT_HEADER_SIZE || size > KV_DIRENT_RECORD_MAX)
		return -EUCLEAN;
	record.ino = kv_get_le64(p);
	record.type = (uint32_t)p[8] << 12;
	record.name = (const char *)p + KV_DIRENT_HEADER_SIZE;
	record.length = size - KV_DIRENT_HEADER_SIZE;
	if (record.ino <= KV_ROOT_INO || record.ino > INT64_MAX ||
		(record.type != S_IFREG && record.type != S_IFDIR && record.type != S_IFLNK) ||
		memchr(record.name, '\0', record.length) || memchr(record.name, '/', record.length))
		return -EUCLEAN;
	*ret_record = record;
	return 0;
}

void kv_link_encode(const struct kv_place *place, uint8_t ret_data[KV_LINK_RECORD_SIZE])
{
	kv_put_le64(ret_data, place->parent);
	kv_put_le64(ret_data + 8, place->cookie);
}

int kv_link_decode(const void *data, size_t size, struct kv_place *ret_place)
{
	const uint8_t *p = data;
	struct kv_place place;

	if (size != KV_LINK_RECORD_SIZE)
		return -EUCLEAN;
	place.parent = kv_get_le64(p);
	place.cookie = kv_get_le64(p + 8);
	if (place.parent == 0 || place.parent > INT64_MAX || place.cookie < KV_HASH_SLOTS ||
		place.cookie > INT64_MAX)
		return -EUCLEAN;
	*ret_place = place;
	return 0;
}

void kv_xattr_encode(const struct kv_xattr_record *record, uint8_t *ret_data)
{
	assert(record->length >= 1 && record->length <= KV_XATTR_NAME_MAX);
	ret_data[0] = (uint8_t)record->length;
	memcpy(ret_data + 1, record->name, record->length);
	if (record->size > 0)
		memcpy(ret_data + 1 + record->length, record->value, record->size);
}

int kv_xattr_decode(const void *data, size_t size, struct kv_xattr_record *ret_record)
{
	const uint8_t *p = data;
	struct kv_xattr_record record;

	if (size < 2 || p[0] == 0 || size - 1 < p[0])
		return -EUCLEAN;
	record.name = (const char *)p + 1;
	record.length = p[0];
	record.value = p + 1 + record.length;
	record.size = size - 1 - record.length;
	if (record.size > KV_XATTR_SIZE_MAX || memchr(record.name, '\0', record.length))
		return -EUCLEAN;
	*ret_record = record;
	return 0;
}

/* ---- Space ---- */

void kv_group_encode(const uint64_t words[KV_GROUP_WORDS], uint8_t ret_data[KV_GROUP_RECORD_SIZE])
{
	for (size_t i = 0; i < KV_GROUP_WORDS; i++)
		kv_put_le64(ret_data + 8 * i, words[i]);
}

int kv_group_decode(
	const void *data, size_t size, uint32_t blocks, uint64_t ret_words[KV_GROUP_WORDS])
{
	const uint8_t *p = data;

	if (size != KV_GROUP_RECORD_SIZE)
		return -EUCLEAN;
	for (uint32_t i = blocks; i < KV_GROUP_BLOCKS; i++)
		if (p[i / 8] & (1u << (i % 8)))
			return -EUCLEAN;
	for (size_t i = 0; i < KV_GROUP_WORDS; i++)
		ret_words[i] = kv_get_le64(p + 8 * i);
	return 0;
}

void kv_summary_encode(const uint16_t *used, size_t count, uint8_t ret_data[KV_SUMMARY_RECORD_SIZE])
{
	for (size_t i = 0; i < KV_SUMMARY_GROUPS; i++)
		kv_put_le16(ret_data + 2 * i, i < count ? used[i] : 0);
}

int kv_summary_decode(const void *data, size_t size, uint16_t ret_used[KV_SUMMARY_GROUPS])
{
	const uint8_t *p = data;

	if (size != KV_SUMMARY_RECORD_SIZE)
		return -EUCLEAN;
	for (size_t i = 0; i < KV_SUMMARY_GROUPS; i++)
		if (kv_get_le16(p + 2 * i) > KV_GROUP_BLOCKS)
			return -EUCLEAN;
	for (size_t i = 0; i < KV_SUMMARY_GROUPS; i++)
		ret_used[i] = kv_get_le16(p + 2 * i);
	return 0;
}

void kv_refcount_encode(uint32_t count, uint8_t ret_data[KV_REFCOUNT_RECORD_SIZE])
{
	assert(count >= 2);
	kv_put_le32(ret_data, count);
}

int kv_refcount_decode(const void *data, size_t size, uint32_t *ret_count)
{
	if (size != KV_REFCOUNT_RECORD_SIZE || kv_get_le32(data) < 2)
		return -EUCLEAN;
	*ret_count = kv_get_le32(data);
	return 0;
}
