/* SPDX-License-Identifier: Apache-2.0 */
/* Who holds which blocks: see tally.h. */
#include "index/tally.h"

static bool bit_get(const uint64_t *words, uint64_t bit)
{
	return words[bit / 64] >> (bit % 64) & 1;
}

static void bit_set(uint64_t *words, uint64_t bit)
{
	words[bit / 64] |= UINT64_C(1) << (bit % 64);
}

int kv_tally_init(struct kv_tally *tally, const struct kv_index_store *store)
{
	*tally = (struct kv_tally){0};
	kv_overlay_init(&tally->shared);
	for (uint32_t i = 0; i < store->device_count; i++) {
		size_t words = (size_t)kv_div_round_up(store->device_blocks[i], KV_GROUP_BLOCKS) *
				       KV_GROUP_WORDS +
			       1;

		tally->devices[i].held = calloc(words, sizeof(uint64_t));
		tally->devices[i].starts = calloc(words, sizeof(uint64_t));
		if (!tally->devices[i].held || !tally->devices[i].starts)
			return -ENOMEM;
	}
	return 0;
}

void kv_tally_done(struct kv_tally *tally)
{
	for (uint32_t i = 0; i < KV_DEVICES_MAX; i++) {
		free(tally->devices[i].held);
		free(tally->devices[i].starts);
	}
	kv_overlay_done(&tally->shared);
}

/* A second chunk holds the extent: counts it. */
static int note_shared(struct kv_tally *tally, const struct kv_extent *extent)
{
	struct kv_key key = kv_key_pair(KV_TABLE_REFCOUNT, extent->device, extent->start);
	struct kv_record *record = kv_overlay_find(&tally->shared, &key);

	if (!record) {
		record = kv_record_new(KV_RECORD_VALUE, &key, KV_REFCOUNT_RECORD_SIZE);
		if (!record)
			return -ENOMEM;
		kv_put_le32(record->value, 1);
		kv_overlay_put(&tally->shared, record);
	}
	kv_put_le32(record->value, kv_get_le32(record->value) + 1);
	return 0;
}

static uint32_t count_held(const struct kv_tally *tally, const struct kv_extent *extent)
{
	uint32_t held = 0;

	for (uint32_t i = 0; i < extent->count; i++)
		held += bit_get(tally->devices[extent->device].held, extent->start + i);
	return held;
}

bool kv_tally_may_hold(const struct kv_tally *tally, const struct kv_extent *extent)
{
	uint32_t held = count_held(tally, extent);

	return held == 0 || (held == extent->count &&
				    bit_get(tally->devices[extent->device].starts, extent->start));
}

int kv_tally_hold(struct kv_tally *tally, const struct kv_extent *extent)
{
	struct kv_tally_device *device = &tally->devices[extent->device];
	uint32_t held = count_held(tally, extent);

	if (held == extent->count && bit_get(device->starts, extent->start))
		return note_shared(tally, extent);
	for (uint32_t i = 0; i < extent->count; i++)
		bit_set(device->held, extent->start + i);
	bit_set(device->starts, extent->start);
	return held != 0 ? -EUCLEAN : 0;
}
