/* SPDX-License-Identifier: Apache-2.0 */
/* Superblocks: what is taken for one is one that this kvfs writes. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "fs/device_internal.h"
#include "tests/fuzz/fuzz.h"

/* The first byte says whether to put a right sum in, which chance does not. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static uint8_t area[KV_DEVICE_DATA_START];
	uint8_t again[KV_BLOCK_SIZE];
	struct kv_superblock superblock;
	int r;

	memset(area, 0, sizeof(area));
	if (size > 1)
		memcpy(area, data + 1, size - 1 < sizeof(area) ? size - 1 : sizeof(area));
	if (size > 0 && data[0] & 1)
		kv_put_le64(area + 56, XXH3_64bits(area, 56));
	(void)kv_superblock_describe(area);
	r = kv_superblock_decode(area, &superblock);
	if (r == 0) {
		kv_superblock_encode(&superblock, again);
		if (memcmp(area, again, sizeof(again)) != 0)
			abort();
	} else if (r != -ENODATA && r != -EUCLEAN && r != -EPROTO) {
		abort();
	}
	return 0;
}
