/* SPDX-License-Identifier: Apache-2.0 */
/* The records of the index: a key of 17 bytes, and a value under it. */
#include <stdlib.h>
#include <sys/stat.h>

#include "index/format.h"
#include "tests/fuzz/fuzz.h"

static const struct kv_index_store store = {
	.format = KV_INDEX_FORMAT, .device_count = 2, .device_blocks = {100000, 50}};

/* What is decoded is encoded to the same bytes, but for varints that were longer than needed. */
static void try_inode(uint64_t ino, const uint8_t *value, size_t size)
{
	uint8_t again[KV_INODE_HEAD_MAX];
	struct kv_inode inode, twice;
	size_t head, head_again;

	if (kv_inode_decode(ino, value, size, &inode, &head) < 0)
		return;
	if (head > size || inode.size > KV_FILE_SIZE_MAX)
		abort();
	head_again = kv_inode_encode(&inode, again);
	if (head_again > head || (S_ISLNK(inode.mode) && size - head != inode.size))
		abort();
	if (!S_ISLNK(inode.mode) && (kv_inode_decode(ino, again, head_again, &twice, &head) < 0 ||
					    memcmp(&inode, &twice, sizeof(inode)) != 0))
		abort();
}

static void try_map(const uint8_t *value, size_t size)
{
	static struct kv_map_reader reader;
	struct kv_chunk chunk;

	kv_map_reader_init(&reader, &store, value, size);
	while (kv_map_next(&reader, &chunk) == 1)
		if (kv_extents_check(&store, chunk.extents, chunk.extent_count) < 0)
			abort();
}

static void try_names(const uint8_t *value, size_t size)
{
	struct kv_dirent_record dirent;
	struct kv_xattr_record xattr;
	struct kv_place place;

	if (kv_dirent_decode(value, size, &dirent) == 0 &&
		(dirent.length == 0 || dirent.length > KV_NAME_MAX ||
			(const uint8_t *)dirent.name + dirent.length != value + size))
		abort();
	if (kv_xattr_decode(value, size, &xattr) == 0 &&
		(const uint8_t *)xattr.value + xattr.size != value + size)
		abort();
	(void)kv_link_decode(value, size, &place);
}

static void try_space(const uint8_t *value, size_t size)
{
	static uint64_t words[KV_GROUP_WORDS];
	static uint16_t used[KV_SUMMARY_GROUPS];
	uint32_t count;

	(void)kv_group_decode(value, size, size % (KV_GROUP_BLOCKS + 1), words);
	if (kv_summary_decode(value, size, used) == 0)
		for (size_t i = 0; i < KV_SUMMARY_GROUPS; i++)
			if (used[i] > KV_GROUP_BLOCKS)
				abort();
	if (kv_refcount_decode(value, size, &count) == 0 && count < 2)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct kv_key key = {0};
	struct kv_store_record record;
	struct kv_domain_record domain;
	struct kv_state state;
	size_t key_size = size < KV_KEY_PAIR_SIZE ? size : KV_KEY_PAIR_SIZE;
	const uint8_t *value = data + key_size;

	size -= key_size;
	if (kv_key_decode(data, key_size, &key) == 0 &&
		kv_record_value_size(&key, value, size) > size)
		abort();
	try_inode(key.size > 0 ? kv_key_a(&key) : 7, value, size);
	try_map(value, size);
	try_names(value, size);
	try_space(value, size);
	if (kv_store_decode(value, size, &record) == 0 &&
		(record.store.device_count == 0 || record.store.device_count > KV_DEVICES_MAX))
		abort();
	(void)kv_state_decode(value, size, &state);
	if (kv_domain_decode(value, size, &domain) == 0 && domain.state >= _KV_DOMAIN_STATE_MAX)
		abort();
	return 0;
}
