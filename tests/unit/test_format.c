/* SPDX-License-Identifier: Apache-2.0 */
/* The index's records: round trips, exact layouts, and decoding of whatever may lie on a disk. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "index/format.h"

static const struct kv_index_store STORE = {
	.format = KV_INDEX_FORMAT,
	.device_count = 2,
	.device_blocks = {1000, 5000},
};

/* A simple generator: the same bytes in every run. */
static uint64_t random_state = 1;

static uint32_t random_u32(void)
{
	random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407u;
	return (uint32_t)(random_state >> 32);
}

/* Keys sort by table, a, b, as numbers. */
static void test_format__keys_sort_as_numbers(void **state)
{
	const struct kv_key keys[] = {
		kv_key_single(KV_TABLE_META, 0),
		kv_key_single(KV_TABLE_META, 1),
		kv_key_pair(KV_TABLE_MAP, 1, 2),
		kv_key_pair(KV_TABLE_MAP, 1, 256),
		kv_key_pair(KV_TABLE_MAP, 255, 0),
		kv_key_pair(KV_TABLE_MAP, 256, 0),
		kv_key_pair(KV_TABLE_USE, kv_use_order(0, 0, INT64_MIN), 0),
		kv_key_pair(KV_TABLE_USE, kv_use_order(0, 0, INT64_MIN), 9),
		kv_key_pair(KV_TABLE_USE, kv_use_order(0, 0, -1), 9),
		kv_key_pair(KV_TABLE_USE, kv_use_order(0, 0, 0), 3),
		kv_key_pair(KV_TABLE_USE, kv_use_order(0, 0, INT64_MAX), 1),
		kv_key_pair(KV_TABLE_USE, kv_use_order(0, 1, INT64_MIN), 0),
		kv_key_pair(KV_TABLE_USE, kv_use_order(1, 0, 5), 1),
		kv_key_pair(KV_TABLE_USE, kv_use_order(KV_DOMAINS_MAX - 1, 2, INT64_MAX), 1),
		kv_key_single(KV_TABLE_INODE, 1),
		kv_key_single(KV_TABLE_INODE, UINT64_MAX),
	};

	(void)state;
	for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
		for (size_t k = 0; k < sizeof(keys) / sizeof(keys[0]); k++) {
			int order = kv_key_compare(&keys[i], &keys[k]);

			assert_int_equal((order > 0) - (order < 0), (i > k) - (i < k));
		}
	assert_int_equal(kv_key_a(&keys[3]), 1);
	assert_int_equal(kv_key_b(&keys[3]), 256);
	assert_int_equal(kv_use_ns(kv_use_order(7, 1, -12345)), kv_use_round(-12345));
	assert_int_equal(kv_use_round(-12345), -4 * 4096);
	assert_int_equal(kv_use_round(INT64_MIN), INT64_MIN);
	assert_int_equal(kv_use_domain(kv_use_order(1023, 1, INT64_MAX)), 1023);
	assert_int_equal(kv_use_class(kv_use_order(1023, 1, INT64_MAX)), 1);
}

/* Keys of a wrong length or an unknown table are refused. */
static void test_format__key_decode_checks(void **state)
{
	struct kv_key pair = kv_key_pair(KV_TABLE_DIRENT, 7, 8);
	struct kv_key single = kv_key_single(KV_TABLE_INODE, 7);
	struct kv_key key;

	(void)state;
	assert_int_equal(kv_key_decode(pair.bytes, pair.size, &key), 0);
	assert_int_equal(kv_key_compare(&pair, &key), 0);
	assert_int_equal(kv_key_decode(single.bytes, single.size, &key), 0);
	assert_int_equal(kv_key_decode(pair.bytes, 16, &key), -EUCLEAN);
	assert_int_equal(kv_key_decode(pair.bytes, 9, &key), -EUCLEAN);
	assert_int_equal(kv_key_decode(single.bytes, 8, &key), -EUCLEAN);
	assert_int_equal(kv_key_decode(single.bytes, 0, &key), -EUCLEAN);
	single.bytes[0] = _KV_TABLE_MAX;
	assert_int_equal(kv_key_decode(single.bytes, single.size, &key), -EUCLEAN);
	single.bytes[0] = 0;
	assert_int_equal(kv_key_decode(single.bytes, single.size, &key), -EUCLEAN);
}

/* Cookies are multiples of 16, above those of "." and "..", and fit 63 bits. */
static void test_format__hash_base_is_a_cookie(void **state)
{
	(void)state;
	for (uint64_t i = 0; i < 1000; i++) {
		uint64_t base = kv_hash_base(&i, sizeof(i), 5, UINT64_MAX);

		assert_int_equal(base % KV_HASH_SLOTS, 0);
		assert_true(base >= KV_HASH_SLOTS && base + KV_HASH_SLOTS - 1 <= INT64_MAX);
	}
	assert_int_equal(kv_hash_base("a", 1, 5, 0), KV_HASH_SLOTS);
	assert_true(kv_hash_base("a", 1, 5, UINT64_MAX) != kv_hash_base("a", 1, 6, UINT64_MAX));
}

static size_t store_record(uint8_t data[KV_STORE_RECORD_MAX])
{
	const struct kv_store_record record = {.store = STORE, .hash_seed = 77};

	return kv_store_encode(&record, data);
}

/* The store record comes back as it was, and any flipped bit in it is noticed. */
static void test_format__store_record(void **state)
{
	uint8_t data[KV_STORE_RECORD_MAX];
	struct kv_store_record record;
	size_t size = store_record(data);

	(void)state;
	assert_int_equal(size, 48 + 2 * 8 + 8);
	assert_memory_equal(data, "kvfsidx", 8);
	assert_int_equal(kv_store_decode(data, size, &record), 0);
	assert_int_equal(record.hash_seed, 77);
	assert_int_equal(record.store.device_count, 2);
	assert_int_equal(record.store.device_blocks[1], 5000);
	for (size_t bit = 0; bit < 8 * size; bit++) {
		int r;

		data[bit / 8] ^= (uint8_t)(1u << bit % 8);
		r = kv_store_decode(data, size, &record);
		/* Bits of the format may make it look of another; nothing may make it look well. */
		assert_true(r == -EUCLEAN || (r == -EPROTO && bit >= 64 && bit < 96));
		data[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	for (size_t cut = 0; cut < size; cut++)
		assert_int_equal(kv_store_decode(data, cut, &record), -EUCLEAN);
}

/* Another format is told from damage, and named. */
static void test_format__other_store_is_eproto(void **state)
{
	uint8_t data[KV_STORE_RECORD_MAX];
	struct kv_store_record record;

	(void)state;
	(void)store_record(data);
	kv_put_le32(data + 8, KV_INDEX_FORMAT + 1);
	assert_int_equal(kv_store_decode(data, 12, &record), -EPROTO);
	assert_int_equal(record.store.format, KV_INDEX_FORMAT + 1);
	kv_put_le32(data + 8, KV_INDEX_FORMAT - 1);
	assert_int_equal(kv_store_decode(data, 12, &record), -EPROTO);
	assert_int_equal(record.store.format, KV_INDEX_FORMAT - 1);
}

/* The state record comes back; impossible counters are refused. */
static void test_format__state_record(void **state)
{
	struct kv_state counters = {.next_ino = 10, .inodes = 3, .used_blocks = 4};
	uint8_t data[KV_STATE_RECORD_SIZE];
	struct kv_state back;

	(void)state;
	kv_state_encode(&counters, data);
	assert_int_equal(kv_state_decode(data, sizeof(data), &back), 0);
	assert_memory_equal(&back, &counters, sizeof(back));
	assert_int_equal(kv_state_decode(data, sizeof(data) - 1, &back), -EUCLEAN);
	counters.inodes = 10;
	kv_state_encode(&counters, data);
	assert_int_equal(kv_state_decode(data, sizeof(data), &back), -EUCLEAN);
	counters = (struct kv_state){.next_ino = 1, .inodes = 1};
	kv_state_encode(&counters, data);
	assert_int_equal(kv_state_decode(data, sizeof(data), &back), -EUCLEAN);
}

static struct kv_inode some_inode(void)
{
	return (struct kv_inode){
		.ino = 5,
		.mode = S_IFREG | 0640,
		.uid = 1,
		.gid = 2,
		.nlink = 3,
		.size = 4,
		.blocks = 5,
		.version = 6,
		.atime_ns = -7,
		.mtime_ns = 8,
		.ctime_ns = 9,
		.btime_ns = 10,
		.last_use_ns = 11 * 4096,
		.hits = 12,
		.domain = 13,
		.parent = 1,
		.cookie = 160,
	};
}

/* Field by field: there is padding between them. */
static void assert_same_inode(const struct kv_inode *a, const struct kv_inode *b)
{
	assert_int_equal(a->ino, b->ino);
	assert_int_equal(a->mode, b->mode);
	assert_int_equal(a->uid, b->uid);
	assert_int_equal(a->gid, b->gid);
	assert_int_equal(a->nlink, b->nlink);
	assert_int_equal(a->size, b->size);
	assert_int_equal(a->blocks, b->blocks);
	assert_int_equal(a->version, b->version);
	assert_int_equal(a->atime_ns, b->atime_ns);
	assert_int_equal(a->mtime_ns, b->mtime_ns);
	assert_int_equal(a->ctime_ns, b->ctime_ns);
	assert_int_equal(a->btime_ns, b->btime_ns);
	assert_int_equal(a->last_use_ns, b->last_use_ns);
	assert_int_equal(a->hits, b->hits);
	assert_int_equal(a->flags, b->flags);
	assert_int_equal(a->domain, b->domain);
	assert_int_equal(a->parent, b->parent);
	assert_int_equal(a->cookie, b->cookie);
}

/* Every field of an inode comes back; HELD is not written. */
static void test_format__inode_round_trip(void **state)
{
	struct kv_inode inode = some_inode();
	struct kv_inode held = inode;
	uint8_t data[KV_INODE_HEAD_MAX];
	struct kv_inode back;
	size_t head;
	size_t size;

	(void)state;
	held.flags |= KV_INODE_HELD;
	size = kv_inode_encode(&held, data);
	assert_int_equal(kv_inode_decode(5, data, size, &back, &head), 0);
	assert_int_equal(head, size);
	assert_same_inode(&back, &inode);
}

/* Extremes come back, and fit the buffer; nothing that was cut off is taken for an inode. */
static void test_format__inode_extremes(void **state)
{
	struct kv_inode inode = {
		.ino = INT64_MAX,
		.mode = S_IFREG | 07777,
		.uid = UINT32_MAX,
		.gid = UINT32_MAX,
		.nlink = UINT32_MAX,
		.size = KV_FILE_SIZE_MAX,
		.blocks = (uint64_t)UINT32_MAX * KV_CHUNK_BLOCKS,
		.version = UINT64_MAX,
		.atime_ns = INT64_MIN,
		.mtime_ns = INT64_MAX,
		.ctime_ns = INT64_MIN,
		.btime_ns = INT64_MAX,
		.last_use_ns = INT64_MIN,
		.hits = UINT32_MAX,
		.flags = KV_INODE_PINNED | KV_INODE_READ,
		.domain = KV_DOMAINS_MAX - 1,
		.parent = INT64_MAX - 1,
		.cookie = INT64_MAX,
	};
	uint8_t data[KV_INODE_HEAD_MAX];
	struct kv_inode back;
	size_t head;
	size_t size = kv_inode_encode(&inode, data);

	(void)state;
	assert_true(size <= sizeof(data));
	assert_int_equal(kv_inode_decode(INT64_MAX, data, size, &back, &head), 0);
	assert_same_inode(&back, &inode);
	for (size_t cut = 0; cut < size; cut++)
		assert_int_equal(kv_inode_decode(INT64_MAX, data, cut, &back, &head), -EUCLEAN);
	/* A number that does not end, or is too large for its field. */
	memset(data + 35, 0xff, sizeof(data) - 35);
	assert_int_equal(kv_inode_decode(INT64_MAX, data, sizeof(data), &back, &head), -EUCLEAN);
	inode.domain = KV_DOMAINS_MAX;
	size = kv_inode_encode(&inode, data);
	assert_int_equal(kv_inode_decode(INT64_MAX, data, size, &back, &head), -EUCLEAN);
}

/* A domain comes back; what cannot be is refused. */
static void test_format__domain_record(void **state)
{
	struct kv_domain_record domain = {.ino = 7,
		.limit = 100,
		.used = 60,
		.pinned = 50,
		.inodes = 4,
		.state = KV_DOMAIN_ADOPTING};
	uint8_t data[KV_DOMAIN_RECORD_SIZE];
	struct kv_domain_record back;

	(void)state;
	kv_domain_encode(&domain, data);
	assert_int_equal(kv_domain_decode(data, sizeof(data), &back), 0);
	assert_int_equal(back.ino, 7);
	assert_int_equal(back.limit, 100);
	assert_int_equal(back.used, 60);
	assert_int_equal(back.pinned, 50);
	assert_int_equal(back.inodes, 4);
	assert_int_equal(back.state, KV_DOMAIN_ADOPTING);
	assert_int_equal(kv_domain_decode(data, sizeof(data) - 1, &back), -EUCLEAN);
	domain.pinned = 61;
	kv_domain_encode(&domain, data);
	assert_int_equal(kv_domain_decode(data, sizeof(data), &back), -EUCLEAN);
	domain.pinned = 0;
	domain.state = _KV_DOMAIN_STATE_MAX;
	kv_domain_encode(&domain, data);
	assert_int_equal(kv_domain_decode(data, sizeof(data), &back), -EUCLEAN);
	domain.state = KV_DOMAIN_NONE;
	kv_domain_encode(&domain, data);
	assert_int_equal(kv_domain_decode(data, sizeof(data), &back), -EUCLEAN);
}

static int decode_changed(void (*change)(struct kv_inode *inode), uint64_t ino, size_t tail)
{
	uint8_t data[KV_INODE_HEAD_MAX + KV_TARGET_MAX + 1] = {0};
	struct kv_inode inode = some_inode();
	struct kv_inode back;
	size_t head;
	size_t size;

	change(&inode);
	size = kv_inode_encode(&inode, data);
	return kv_inode_decode(ino, data, size + tail, &back, &head);
}

static void no_change(struct kv_inode *inode)
{
	(void)inode;
}

static void make_fifo(struct kv_inode *inode)
{
	inode->mode = S_IFIFO | 0644;
}

static void set_high_mode(struct kv_inode *inode)
{
	inode->mode |= 1u << 20;
}

static void make_own_parent(struct kv_inode *inode)
{
	inode->parent = inode->ino;
}

static void lose_parent(struct kv_inode *inode)
{
	inode->parent = 0;
}

static void lose_cookie(struct kv_inode *inode)
{
	inode->cookie = 2;
}

static void set_unknown_flag(struct kv_inode *inode)
{
	inode->flags = 1u << 3;
}

static void name_quarantined(struct kv_inode *inode)
{
	inode->flags = KV_INODE_QUARANTINED;
}

static void pin_orphan(struct kv_inode *inode)
{
	inode->nlink = 0;
	inode->cookie = 0;
	inode->flags = KV_INODE_PINNED;
}

static void lose_links(struct kv_inode *inode)
{
	inode->nlink = 0;
}

static void grow(struct kv_inode *inode)
{
	inode->size = KV_FILE_SIZE_MAX + 1;
}

static void grow_blocks(struct kv_inode *inode)
{
	inode->blocks = UINT64_MAX;
}

static void make_symlink(struct kv_inode *inode)
{
	inode->mode = S_IFLNK | 0777;
	inode->blocks = 0;
}

static void make_directory(struct kv_inode *inode)
{
	inode->mode = S_IFDIR | 0755;
	inode->blocks = 0;
}

/* Inodes that cannot be are refused, each for one reason. */
static void test_format__inode_decode_checks(void **state)
{
	static const struct {
		void (*change)(struct kv_inode *inode);
		uint64_t ino;
		size_t tail;
		int result;
	} cases[] = {
		{no_change, 5, 0, 0},
		{no_change, 5, KV_INLINE_MAP_MAX, 0},
		{no_change, 5, KV_INLINE_MAP_MAX + 1, -EUCLEAN},
		{no_change, 0, 0, -EUCLEAN},
		{no_change, UINT64_MAX, 0, -EUCLEAN},
		{no_change, KV_ROOT_INO, 0, -EUCLEAN},
		{make_fifo, 5, 0, -EUCLEAN},
		{set_high_mode, 5, 0, -EUCLEAN},
		{make_own_parent, 5, 0, -EUCLEAN},
		{lose_parent, 5, 0, -EUCLEAN},
		{lose_cookie, 5, 0, -EUCLEAN},
		{set_unknown_flag, 5, 0, -EUCLEAN},
		{name_quarantined, 5, 0, -EUCLEAN},
		{lose_links, 5, 0, -EUCLEAN},
		{pin_orphan, 5, 0, -EUCLEAN},
		{grow, 5, 0, -EUCLEAN},
		{grow_blocks, 5, 0, -EUCLEAN},
		{make_symlink, 5, 4, 0},
		{make_symlink, 5, 0, -EUCLEAN},
		{make_symlink, 5, 5, -EUCLEAN},
		{make_directory, 5, 0, 0},
		{make_directory, 5, 1, -EUCLEAN},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		assert_int_equal(decode_changed(cases[i].change, cases[i].ino, cases[i].tail),
			cases[i].result);
}

/* Two chunks of a segment come back in order, with the number of the segment in theirs. */
static void test_format__map_round_trip(void **state)
{
	const struct kv_extent extents[] = {{10, 0, 0, 3}, {900, 1, 8, 248}};
	const struct kv_chunk chunks[] = {
		{64 + 1, 1, KV_CHUNK_KEPT, 111, extents},
		{64 + 31, 2, KV_CHUNK_KEPT, 222, extents},
	};
	uint8_t data[256];
	struct kv_map_reader reader;
	struct kv_chunk chunk;
	size_t size = kv_chunk_encode(&chunks[0], data);

	(void)state;
	assert_int_equal(size, 28);
	size += kv_chunk_encode(&chunks[1], data + size);
	assert_int_equal(size, 28 + 44);
	kv_map_reader_init(&reader, &STORE, data, size);
	reader.segment = 2;
	for (size_t i = 0; i < 2; i++) {
		assert_int_equal(kv_map_next(&reader, &chunk), 1);
		assert_int_equal(chunk.number, chunks[i].number);
		assert_int_equal(chunk.sum, chunks[i].sum);
		assert_int_equal(chunk.extent_count, i + 1);
		assert_memory_equal(chunk.extents, extents, (i + 1) * sizeof(extents[0]));
	}
	assert_int_equal(kv_map_next(&reader, &chunk), 0);
}

/* Extents outside the devices or the chunk, or out of order, are refused. */
static void test_format__extents_are_checked(void **state)
{
	static const struct {
		struct kv_extent extent;
		int result;
	} cases[] = {
		{{0, 0, 0, 256}, 0},
		{{999, 0, 255, 1}, 0},
		{{0, 0, 0, 0}, -EUCLEAN},
		{{0, 0, 1, 256}, -EUCLEAN},
		{{0, 0, 0, 257}, -EUCLEAN},
		{{0, 0, 0, UINT32_MAX}, -EUCLEAN},
		{{0, 2, 0, 1}, -EUCLEAN},
		{{1000, 0, 0, 1}, -EUCLEAN},
		{{999, 0, 0, 2}, -EUCLEAN},
		{{UINT64_MAX, 1, 0, 2}, -EUCLEAN},
	};
	const struct kv_extent overlap[] = {{0, 0, 0, 8}, {100, 0, 7, 8}};
	const struct kv_extent descending[] = {{0, 0, 8, 8}, {100, 0, 0, 8}};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		assert_int_equal(kv_extent_check(&STORE, &cases[i].extent), cases[i].result);
	assert_int_equal(kv_extents_check(&STORE, overlap, 2), -EUCLEAN);
	assert_int_equal(kv_extents_check(&STORE, descending, 2), -EUCLEAN);
	assert_int_equal(kv_extents_check(&STORE, overlap, 1), 0);
}

/* Names, links, attributes and counts come back; what cannot be is refused. */
static void test_format__small_records(void **state)
{
	const struct kv_dirent_record dirent = {9, S_IFDIR, "name", 4};
	const struct kv_xattr_record xattr = {"user.a", 6, "value", 5};
	struct kv_dirent_record dirent_back;
	struct kv_xattr_record xattr_back;
	struct kv_place place;
	uint8_t data[KV_DIRENT_RECORD_MAX];
	uint32_t count;

	(void)state;
	assert_int_equal(kv_dirent_encode(&dirent, data), 13);
	assert_int_equal(kv_dirent_decode(data, 13, &dirent_back), 0);
	assert_int_equal(dirent_back.ino, 9);
	assert_int_equal(dirent_back.type, S_IFDIR);
	assert_memory_equal(dirent_back.name, "name", 4);
	assert_int_equal(kv_dirent_decode(data, 9, &dirent_back), -EUCLEAN);
	data[8] = S_IFSOCK >> 12;
	assert_int_equal(kv_dirent_decode(data, 13, &dirent_back), -EUCLEAN);
	data[8] = S_IFREG >> 12;
	data[10] = '/';
	assert_int_equal(kv_dirent_decode(data, 13, &dirent_back), -EUCLEAN);
	data[10] = '\0';
	assert_int_equal(kv_dirent_decode(data, 13, &dirent_back), -EUCLEAN);

	kv_xattr_encode(&xattr, data);
	assert_int_equal(kv_xattr_decode(data, 12, &xattr_back), 0);
	assert_memory_equal(xattr_back.value, "value", 5);
	assert_int_equal(kv_xattr_decode(data, 7, &xattr_back), 0);
	assert_int_equal(xattr_back.size, 0);
	assert_int_equal(kv_xattr_decode(data, 6, &xattr_back), -EUCLEAN);

	kv_link_encode(&(struct kv_place){3, 32}, data);
	assert_int_equal(kv_link_decode(data, 16, &place), 0);
	assert_int_equal(place.cookie, 32);
	assert_int_equal(kv_link_decode(data, 15, &place), -EUCLEAN);
	kv_link_encode(&(struct kv_place){0, 32}, data);
	assert_int_equal(kv_link_decode(data, 16, &place), -EUCLEAN);

	kv_refcount_encode(2, data);
	assert_int_equal(kv_refcount_decode(data, 4, &count), 0);
	assert_int_equal(count, 2);
	data[0] = 1;
	assert_int_equal(kv_refcount_decode(data, 4, &count), -EUCLEAN);
}

/* Bitmaps must not mark blocks that the device does not have; summaries must not count them. */
static void test_format__space_records(void **state)
{
	uint64_t words[KV_GROUP_WORDS] = {[0] = 5, [1] = UINT64_C(1) << 63};
	uint64_t back[KV_GROUP_WORDS];
	uint16_t used[KV_SUMMARY_GROUPS] = {1, KV_GROUP_BLOCKS};
	uint16_t used_back[KV_SUMMARY_GROUPS];
	uint8_t data[KV_GROUP_RECORD_SIZE];

	(void)state;
	kv_group_encode(words, data);
	assert_int_equal(data[0], 5);
	assert_int_equal(data[15], 0x80);
	assert_int_equal(kv_group_decode(data, sizeof(data), 128, back), 0);
	assert_memory_equal(back, words, sizeof(back));
	assert_int_equal(kv_group_decode(data, sizeof(data), 127, back), -EUCLEAN);
	assert_int_equal(kv_group_decode(data, sizeof(data) - 1, 8192, back), -EUCLEAN);

	kv_summary_encode(used, 2, data);
	assert_int_equal(kv_summary_decode(data, KV_SUMMARY_RECORD_SIZE, used_back), 0);
	assert_memory_equal(used_back, used, sizeof(used));
	kv_put_le16(data, KV_GROUP_BLOCKS + 1);
	assert_int_equal(kv_summary_decode(data, KV_SUMMARY_RECORD_SIZE, used_back), -EUCLEAN);
}

static void decode_everything(const uint8_t *data, size_t size)
{
	struct kv_key key;
	struct kv_store_record store;
	struct kv_state counters;
	struct kv_inode inode;
	struct kv_domain_record domain;
	size_t head;
	struct kv_dirent_record dirent;
	struct kv_place place;
	struct kv_xattr_record xattr;
	uint64_t words[KV_GROUP_WORDS];
	uint16_t used[KV_SUMMARY_GROUPS];
	uint32_t count;
	struct kv_map_reader reader;
	struct kv_chunk chunk;

	(void)kv_key_decode(data, size, &key);
	(void)kv_store_decode(data, size, &store);
	(void)kv_state_decode(data, size, &counters);
	(void)kv_inode_decode(5, data, size, &inode, &head);
	(void)kv_domain_decode(data, size, &domain);
	(void)kv_dirent_decode(data, size, &dirent);
	(void)kv_link_decode(data, size, &place);
	(void)kv_xattr_decode(data, size, &xattr);
	(void)kv_group_decode(data, size, 100, words);
	(void)kv_summary_decode(data, size, used);
	(void)kv_refcount_decode(data, size, &count);
	kv_map_reader_init(&reader, &STORE, data, size);
	while (kv_map_next(&reader, &chunk) == 1) {
		assert_int_equal(kv_extents_check(&STORE, chunk.extents, chunk.extent_count), 0);
		assert_true(chunk.number < KV_SEGMENT_CHUNKS);
	}
}

/* Random bytes of any length, exactly as long as the buffer, never make a decoder read astray. */
static void test_format__random_bytes_are_harmless(void **state)
{
	(void)state;
	for (unsigned i = 0; i < 20000; i++) {
		size_t size = random_u32() % 8 == 0 ? random_u32() % 1100 : random_u32() % 120;
		uint8_t *data = malloc(size + 1);
		uint8_t mask = random_u32() % 2 ? 0xff : 0x03;

		assert_non_null(data);
		data = realloc(data, size != 0 ? size : 1);
		for (size_t k = 0; k < size; k++)
			data[k] = (uint8_t)random_u32() & mask;
		decode_everything(data, size);
		free(data);
	}
}

/* A map whose bytes are flipped or cut is read to its damage and no further. */
static void test_format__damaged_map_is_euclean_or_valid(void **state)
{
	const struct kv_extent extents[] = {{10, 0, 0, 3}, {900, 1, 8, 248}};
	const struct kv_chunk chunk = {7, 2, KV_CHUNK_KEPT, 222, extents};
	uint8_t data[44];
	struct kv_map_reader reader;
	struct kv_chunk back;

	(void)state;
	assert_int_equal(kv_chunk_encode(&chunk, data), sizeof(data));
	for (size_t cut = 1; cut < sizeof(data); cut++) {
		kv_map_reader_init(&reader, &STORE, data, cut);
		assert_int_equal(kv_map_next(&reader, &back), -EUCLEAN);
	}
	for (size_t bit = 0; bit < 8 * sizeof(data); bit++) {
		data[bit / 8] ^= (uint8_t)(1u << bit % 8);
		decode_everything(data, sizeof(data));
		data[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_format__keys_sort_as_numbers),
		cmocka_unit_test(test_format__key_decode_checks),
		cmocka_unit_test(test_format__hash_base_is_a_cookie),
		cmocka_unit_test(test_format__store_record),
		cmocka_unit_test(test_format__other_store_is_eproto),
		cmocka_unit_test(test_format__state_record),
		cmocka_unit_test(test_format__inode_round_trip),
		cmocka_unit_test(test_format__inode_extremes),
		cmocka_unit_test(test_format__domain_record),
		cmocka_unit_test(test_format__inode_decode_checks),
		cmocka_unit_test(test_format__map_round_trip),
		cmocka_unit_test(test_format__extents_are_checked),
		cmocka_unit_test(test_format__small_records),
		cmocka_unit_test(test_format__space_records),
		cmocka_unit_test(test_format__random_bytes_are_harmless),
		cmocka_unit_test(test_format__damaged_map_is_euclean_or_valid),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
