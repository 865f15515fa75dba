/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Residency on request: bringing ranges of published versions into DRAM, and dropping idle ones.
 */
#include "fs/core_internal.h"

#define WARM_PATIENCE_MS 2000u
/* A version that is committed and closed may be held by the threads that did that for a moment. */
#define COOL_TRIES 50u
#define COOL_PAUSE_US 2000u

struct chunk_range {
	uint32_t first;
	uint32_t end;
};

/* The chunks of RANGE's bytes, and where its last byte ends. */
static struct chunk_range chunks_of(const struct kv_warm *range, uint64_t size, uint64_t *ret_end)
{
	uint64_t end = range->offset < size
			       ? range->offset + kv_min_u64(range->length, size - range->offset)
			       : range->offset;

	*ret_end = end;
	return (struct chunk_range){
		.first = (uint32_t)(range->offset >> KV_CHUNK_SHIFT),
		.end = kv_chunk_count(end),
	};
}

static int bring_in(struct kv_version *version, struct chunk_range chunks)
{
	const struct kv_fill_range fill = {
		.first = chunks.first,
		.count = chunks.end - chunks.first,
		.patience_ms = WARM_PATIENCE_MS,
	};
	int r = kv_fill_begin(version, &fill);
	bool dense;

	for (uint32_t i = chunks.first; i < chunks.end && r == 0; i++)
		r = kv_fill_wait(version, i);
	{
		KV_LOCKED(&version->lock);
		dense = kv_version_is_dense(version);
	}
	/* With pages for its few holes too, the whole file can be handed to the kernel. */
	for (uint32_t i = chunks.first; i < chunks.end && r == 0 && dense; i++)
		r = kv_chunk_allocate_rest(version, i);
	return r;
}

/* What of the range is where. */
static int count_resident(struct kv_version *version, const struct kv_warm *range, uint64_t end,
	struct kv_warm_result *ret_result)
{
	struct kv_warm_result result = {.done = end - range->offset};
	uint64_t at = range->offset;

	while (at < end) {
		uint32_t number = (uint32_t)(at >> KV_CHUNK_SHIFT);
		uint64_t next = kv_min_u64(end, ((uint64_t)number + 1) << KV_CHUNK_SHIFT);
		KV_LOCKED(&version->lock);
		int r = kv_map_load(version, number);
		const struct kv_slot *slot = kv_slot_find(version, number);

		if (r < 0)
			return r;
		if (kv_slot_state(version, number) == KV_CHUNK_HOLE)
			result.holes += next - at;
		else if (slot && kv_slot_is_resident(slot))
			result.resident += next - at;
		at = next;
	}
	*ret_result = result;
	return 0;
}

int kv_version_warm(
	struct kv_version *version, const struct kv_warm *range, struct kv_warm_result *ret_result)
{
	struct kv_core *core = version->file->core;
	struct chunk_range chunks;
	bool became_hot;
	uint64_t end;
	int r = 0;

	{
		KV_LOCKED(&version->lock);
		chunks = chunks_of(range, version->size, &end);
	}
	if (!range->ask && end > range->offset)
		r = bring_in(version, chunks);
	/* DRAM is short: what came in is told. */
	if (r < 0 && r != -EAGAIN)
		return r == -ENOENT || r == -ETIMEDOUT ? -EIO : r;
	r = count_resident(version, range, end, ret_result);
	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		bool streamed = version->streamed && !version->hot;

		/* Where it outlives us, what is whole gets its mark by the look. */
		became_hot = !range->ask && (streamed || core->outlives) &&
			     kv_version_is_resident_locked(version) && streamed;
	}
	if (became_hot && core->hooks.became_hot)
		core->hooks.became_hot(core->hooks.arg, version->file->ino);
	return 0;
}

/* ---- Out again ---- */

static bool is_being_written(struct kv_file *file)
{
	KV_LOCKED(&kv_shard_of(file->core, file->ino)->lock);

	return file->writers > 0;
}

static int cool_version(struct kv_version *version, uint64_t *ret_bytes)
{
	int r = kv_version_sync(version);

	for (unsigned i = 0; r == 0 && i < COOL_TRIES; i++) {
		bool open, empty;
		{
			KV_LOCKED(&version->lock);
			empty = !version->object;
			open = version->opens > 0;
		}
		if (empty)
			return 0;
		if (open)
			return -EBUSY;
		*ret_bytes = kv_version_drop_object(version);
		if (*ret_bytes > 0)
			return 0;
		(void)usleep(COOL_PAUSE_US);
	}
	return r < 0 ? r : -EBUSY;
}

int kv_core_cool(struct kv_core *core, uint64_t ino, uint64_t *ret_bytes)
{
	struct kv_file *file = kv_file_find(core, ino);
	struct kv_version *version;
	int r;

	*ret_bytes = 0;
	/* What is not known to the core has nothing in DRAM. */
	if (!file)
		return 0;
	r = is_being_written(file) ? -EBUSY : kv_file_current(file, &version);
	if (r == 0) {
		r = cool_version(version, ret_bytes);
		kv_version_unref(version);
	}
	kv_file_put(file);
	return r;
}
