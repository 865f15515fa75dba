/* SPDX-License-Identifier: Apache-2.0 */
/* Reading what the devices hold of a file, only to check it. */
#include "fs/core_internal.h"

/* Counts chunk NUMBER, of BYTES, and reads it if a device has it. */
static int scrub_chunk(struct kv_version *version, uint32_t number, uint64_t bytes, void *memory,
	struct kv_scrub_result *result)
{
	enum kv_chunk_state state;
	int r;

	{
		KV_LOCKED(&version->lock);
		r = kv_map_load(version, number);
		state = kv_slot_state(version, number);
		result->damaged |= version->damaged;
	}
	if (r < 0)
		return r;
	/* Not on a device, or not yet. */
	if (result->damaged || state == KV_CHUNK_HOLE || state == KV_CHUNK_DIRTY)
		return 0;
	r = kv_fill_stored(version, number, memory);
	{
		KV_LOCKED(&version->lock);
		result->damaged |= version->damaged;
	}
	if (r == 0)
		result->checked += bytes;
	else if (!result->damaged)
		result->unreadable += bytes;
	return 0;
}

static int scrub_version(struct kv_version *version, const struct kv_scrub *range,
	struct kv_scrub_result *ret_result)
{
	_cleanup_free_ void *memory = aligned_alloc(KV_BLOCK_SIZE, KV_CHUNK_SIZE);
	struct kv_scrub_result result = {0};
	uint64_t end, at = range->offset;
	int r = memory ? 0 : -ENOMEM;

	{
		KV_LOCKED(&version->lock);
		end = at < version->size ? at + kv_min_u64(range->length, version->size - at) : at;
	}
	result.done = end - at;
	while (at < end && r == 0 && !result.damaged) {
		uint32_t number = (uint32_t)(at >> KV_CHUNK_SHIFT);
		uint64_t next = kv_min_u64(end, ((uint64_t)number + 1) << KV_CHUNK_SHIFT);

		r = scrub_chunk(version, number, next - at, memory, &result);
		at = next;
	}
	if (r == 0)
		*ret_result = result;
	return r;
}

int kv_core_scrub(struct kv_core *core, uint64_t ino, const struct kv_scrub *range,
	struct kv_scrub_result *ret_result)
{
	struct kv_version *version;
	struct kv_file *file;
	int r = kv_file_get(core, ino, &file);

	if (r < 0)
		return r;
	r = kv_file_current(file, &version);
	if (r == 0) {
		r = scrub_version(version, range, ret_result);
		kv_version_unref(version);
	}
	kv_file_put(file);
	if (r < 0)
		return r;
	kv_stat_add(&core->stats->scrub_bytes, ret_result->checked);
	kv_stat_add(&core->stats->scrub_damaged, ret_result->damaged);
	return 0;
}
