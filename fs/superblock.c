/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Superblocks as bytes, and what else may be found where a superblock goes. device.h draws the
 * layout.
 */
#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "fs/device_internal.h"

#define MAGIC "kvfsdev1"
#define MAGIC_SIZE 8u

enum superblock_offset {
	OFFSET_MAGIC = 0,
	OFFSET_FORMAT = 8,
	OFFSET_NUMBER = 12,
	OFFSET_UUID = 16,
	OFFSET_SIZE = 32,
	OFFSET_DATA_START = 40,
	OFFSET_COUNT = 48,
	OFFSET_ZERO = 52,
	OFFSET_SUM = 56,
	OFFSET_END = 64,
};

static_assert(sizeof(MAGIC) - 1 == MAGIC_SIZE, "the magic fills its field");
static_assert(OFFSET_FORMAT - OFFSET_MAGIC == MAGIC_SIZE, "the magic is followed by the format");
static_assert(OFFSET_SIZE - OFFSET_UUID == sizeof(((struct kv_superblock *)0)->uuid), "UUID");
static_assert(KV_SUPERBLOCK_COPIES * KV_BLOCK_SIZE <= KV_DEVICE_DATA_START, "copies fit");

void kv_superblock_encode(const struct kv_superblock *superblock, void *ret_block)
{
	uint8_t *b = ret_block;

	memset(b, 0, KV_BLOCK_SIZE);
	memcpy(b + OFFSET_MAGIC, MAGIC, MAGIC_SIZE);
	kv_put_le32(b + OFFSET_FORMAT, superblock->format);
	kv_put_le32(b + OFFSET_NUMBER, superblock->number);
	memcpy(b + OFFSET_UUID, superblock->uuid, sizeof(superblock->uuid));
	kv_put_le64(b + OFFSET_SIZE, superblock->size);
	kv_put_le64(b + OFFSET_DATA_START, superblock->data_start);
	kv_put_le32(b + OFFSET_COUNT, superblock->count);
	kv_put_le64(b + OFFSET_SUM, XXH3_64bits(b, OFFSET_SUM));
}

static bool is_zero(const uint8_t *memory, size_t length)
{
	return length == 0 || (memory[0] == 0 && memcmp(memory, memory + 1, length - 1) == 0);
}

int kv_superblock_decode(const void *block, struct kv_superblock *ret_superblock)
{
	const uint8_t *b = block;
	struct kv_superblock s;

	if (memcmp(b + OFFSET_MAGIC, MAGIC, MAGIC_SIZE) != 0)
		return -ENODATA;
	if (kv_get_le64(b + OFFSET_SUM) != XXH3_64bits(b, OFFSET_SUM))
		return -EUCLEAN;
	/* The sum's place is the same in every format, so a flipped bit is never taken for one. */
	s.format = kv_get_le32(b + OFFSET_FORMAT);
	if (s.format != KV_DEVICE_FORMAT && s.format != 0)
		return -EPROTO;
	s.number = kv_get_le32(b + OFFSET_NUMBER);
	memcpy(s.uuid, b + OFFSET_UUID, sizeof(s.uuid));
	s.size = kv_get_le64(b + OFFSET_SIZE);
	s.data_start = kv_get_le64(b + OFFSET_DATA_START);
	s.count = kv_get_le32(b + OFFSET_COUNT);
	if (s.format != KV_DEVICE_FORMAT || s.data_start != KV_DEVICE_DATA_START ||
		s.size < KV_DEVICE_SIZE_MIN || s.size % KV_BLOCK_SIZE != 0 || s.count == 0 ||
		s.count > KV_DEVICES_MAX || s.number >= s.count ||
		kv_get_le32(b + OFFSET_ZERO) != 0 ||
		!is_zero(b + OFFSET_END, KV_BLOCK_SIZE - OFFSET_END))
		return -EUCLEAN;
	*ret_superblock = s;
	return 0;
}

const char *kv_superblock_describe(const uint8_t *area)
{
	static const struct {
		uint32_t offset;
		const char *magic;
		uint32_t size;
		const char *name;
	} known[] = {
		{0, MAGIC, MAGIC_SIZE, "a kvfs device"},
		{KV_BLOCK_SIZE, MAGIC, MAGIC_SIZE, "a kvfs device"},
		{1024 + 56, "\x53\xef", 2, "an ext2, ext3 or ext4 filesystem"},
		{0, "XFSB", 4, "an XFS filesystem"},
		{65536 + 64, "_BHRfS_M", 8, "a btrfs filesystem"},
		{4096 - 10, "SWAPSPACE2", 10, "swap space"},
		{512, "LABELONE", 8, "an LVM physical volume"},
		{0, "LUKS\xba\xbe", 6, "an encrypted volume (LUKS)"},
		{4096, "\xfc\x4e\x2b\xa9", 4, "a member of a RAID"},
		{0, "\xfc\x4e\x2b\xa9", 4, "a member of a RAID"},
		{1024, "\x10\x20\xf5\xf2", 4, "an F2FS filesystem"},
		{512, "EFI PART", 8, "a partition table"},
		{510, "\x55\xaa", 2, "a partition table or boot sector"},
	};

	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (memcmp(area + known[i].offset, known[i].magic, known[i].size) == 0)
			return known[i].name;
	return is_zero(area, KV_DEVICE_DATA_START) ? NULL : "data";
}
