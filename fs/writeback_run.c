/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing a batch of chunks: extents, transfers out of the objects' own pages, sums, and the slots'
 * new state.
 */
#include "fs/charge_internal.h"
#include "fs/writeback_internal.h"

#include <inttypes.h>

/* Chunks of a file go to the devices in runs of that many. */
#define STRIPE_CHUNKS 4u
/* A chunk with no more bytes than this is copied, so that many small ones fit one registered
 * buffer. */
#define COPY_BYTES (128u << 10)
/* Failed writes after which nothing more is put on a device, if there are others. */
#define DEVICE_ERRORS_MAX 3u

/* ---- Extents ---- */

/* The piece of EXTENT that is for block FIRST of the chunk and those behind it, up to END. Takes it
 * off EXTENT. */
static struct kv_extent take_piece(struct kv_extent *extent, unsigned first, unsigned end)
{
	struct kv_extent piece = *extent;

	piece.block = (uint16_t)first;
	piece.count = (uint32_t)kv_min_u64(extent->count, end - first);
	extent->start += piece.count;
	extent->count -= piece.count;
	return piece;
}

/*
 * Turns the chunk's promise into extents: all at once, so that runs of blocks with holes between
 * them lie side by side on the device, then cut at the holes.
 */
static int allocate_extents(struct kv_core *core, struct kv_batch_chunk *chunk, unsigned device)
{
	struct kv_extent found[KV_CHUNK_BLOCKS], cut[KV_CHUNK_BLOCKS];
	struct kv_extent *rest = found;
	unsigned count = 0;
	int r = kv_space_alloc(core->space, (uint16_t)device, chunk->blocks, 0, found);

	if (r < 0)
		return r;
	chunk->promised = 0;
	KV_BITS_FOREACH (first, end, &chunk->content.bits) {
		for (unsigned b = first; b < end; b += cut[count++].count) {
			rest += rest->count == 0;
			cut[count] = take_piece(rest, b, end);
		}
	}
	chunk->extents = malloc(count * sizeof(cut[0]));
	if (!chunk->extents) {
		kv_space_cancel(core->space, cut, count);
		return -ENOMEM;
	}
	memcpy(chunk->extents, cut, count * sizeof(cut[0]));
	chunk->extent_count = count;
	for (unsigned i = 0; i < count; i++)
		(void)atomic_fetch_or(&chunk->version->wrote_on, UINT64_C(1) << cut[i].device);
	return 0;
}

/* The device whose turn it is, TRY devices on, or the first one after it that answers in time. */
static unsigned device_of(
	const struct kv_core *core, const struct kv_batch_chunk *chunk, unsigned try)
{
	unsigned count = kv_devices_count(core->devices);
	uint64_t slow = kv_devices_slow(core->devices);
	unsigned turn = (unsigned)((chunk->version->file->ino +
					   chunk->content.number / STRIPE_CHUNKS + try) %
				   count);

	for (unsigned i = 0; i < count; i++)
		if ((slow >> (turn + i) % count & 1) == 0)
			return (turn + i) % count;
	return turn;
}

/* ---- Memory ---- */

/* Room for BYTES in a registered buffer that small chunks share, or NULL. */
static uint8_t *slab_get(struct kv_worker *worker, size_t bytes)
{
	struct kv_batch *batch = &worker->batch;

	if (!batch->slab || batch->slab_used + bytes > KV_RING_BUFFER_SIZE) {
		int index;
		uint8_t *buffer = kv_ring_buffer_get(worker->ring, &index);

		if (!buffer)
			return NULL;
		batch->slab = buffer;
		batch->slab_used = 0;
		batch->buffers[batch->buffer_count++] = index;
	}
	return batch->slab + batch->slab_used;
}

/* A copy of the chunk's blocks, packed. False if there is no room. */
static bool copy_to_slab(struct kv_worker *worker, struct kv_batch_chunk *chunk)
{
	struct kv_batch *batch = &worker->batch;
	size_t bytes = (size_t)chunk->blocks << KV_BLOCK_SHIFT;
	struct kv_blocks copy = chunk->content;

	copy.packed = true;
	copy.memory = slab_get(worker, bytes);
	if (!copy.memory || kv_blocks_load(&copy, chunk->version->object) < 0)
		return false;
	chunk->content = copy;
	chunk->buffer = batch->buffers[batch->buffer_count - 1];
	batch->slab_used += bytes;
	return true;
}

static bool follows(const struct kv_batch_chunk *before, const struct kv_batch_chunk *chunk)
{
	return before->version == chunk->version &&
	       before->content.number + 1 == chunk->content.number;
}

/* Maps the run of neighbours that begins with chunk FIRST. Returns how many chunks that are. */
static unsigned map_run(struct kv_batch *batch, unsigned first)
{
	struct kv_batch_chunk *chunks = &batch->chunks[first];
	unsigned count = 1, left = batch->chunk_count - first;
	struct kv_mapping *mapping = &batch->mappings[batch->mapping_count];
	int r;

	while (count < left && count < KV_RUN_CHUNKS && follows(&chunks[count - 1], &chunks[count]))
		count++;
	mapping->length = ((size_t)(count - 1) << KV_CHUNK_SHIFT) +
			  ((size_t)kv_bits_end(&chunks[count - 1].content.bits) << KV_BLOCK_SHIFT);
	r = kv_object_map(chunks[0].version->object,
		(uint64_t)chunks[0].content.number << KV_CHUNK_SHIFT, mapping->length,
		&mapping->memory);
	for (unsigned i = 0; i < count; i++) {
		if (r == 0)
			chunks[i].content.memory =
				(uint8_t *)mapping->memory + ((size_t)i << KV_CHUNK_SHIFT);
		else
			chunks[i].result = r;
	}
	if (r == 0)
		batch->mapping_count++;
	return count;
}

static void find_memory(struct kv_worker *worker)
{
	struct kv_batch *batch = &worker->batch;

	for (unsigned i = 0; i < batch->chunk_count;) {
		size_t bytes = (size_t)batch->chunks[i].blocks << KV_BLOCK_SHIFT;
		/* Each hole would be one transfer more. */
		size_t most = kv_bits_is_prefix(&batch->chunks[i].content.bits)
				      ? COPY_BYTES
				      : KV_RING_BUFFER_SIZE;

		if (bytes <= most && copy_to_slab(worker, &batch->chunks[i]))
			i++;
		else
			i += map_run(batch, i);
	}
}

/* ---- Transfers ---- */

static int add_ios(struct kv_batch *batch, struct kv_batch_chunk *chunk)
{
	if (batch->io_count + chunk->extent_count > batch->io_capacity) {
		unsigned capacity = (batch->io_count + chunk->extent_count) * 2;
		struct kv_io *ios = realloc(batch->ios, capacity * sizeof(*ios));

		if (!ios)
			return -ENOMEM;
		batch->ios = ios;
		batch->io_capacity = capacity;
	}
	const struct kv_io template = {
		.kind = KV_IO_WRITE,
		.buffer = chunk->buffer,
		.arg = chunk,
	};
	chunk->left = kv_blocks_ios(&chunk->content, chunk->extents, chunk->extent_count, &template,
		&batch->ios[batch->io_count]);
	batch->io_count += chunk->left;
	return 0;
}

/* Lock held. The slot of a chunk that is on the devices now. */
static int adopt_extents(struct kv_batch_chunk *chunk, struct kv_slot *slot, uint64_t sum)
{
	struct kv_version *version = chunk->version;
	int r = kv_slot_set_extents(slot, chunk->extents, chunk->extent_count);

	if (r < 0)
		return r;
	kv_charge_clean_locked(version, chunk->blocks);
	slot->state = KV_CHUNK_HOT;
	slot->flags |= KV_SLOT_FRESH;
	slot->sum = sum;
	chunk->extent_count = 0;
	return 0;
}

/* Settles the slot by chunk->result. Extents that the slot did not take over are free again. */
static void finish_chunk(struct kv_core *core, struct kv_batch_chunk *chunk)
{
	struct kv_version *version = chunk->version;
	uint64_t bytes = (uint64_t)chunk->blocks << KV_BLOCK_SHIFT;
	uint64_t sum = 0;

	if (chunk->result == 0)
		chunk->result =
			kv_blocks_sum(&chunk->content, chunk->extents, chunk->extent_count, &sum);
	assert(!chunk->finished && chunk->left == 0);
	chunk->finished = true;
	{
		KV_LOCKED(&version->lock);
		struct kv_slot *slot = kv_slot_find(version, chunk->content.number);
		bool stale = slot->flags & KV_SLOT_REDIRTIED;
		slot->flags &= (uint16_t) ~(KV_SLOT_WRITEBACK | KV_SLOT_REDIRTIED);
		if (chunk->result == 0 && !stale)
			chunk->result = adopt_extents(chunk, slot, sum);
		if (chunk->result < 0) {
			version->error = chunk->result == -ENOMEM ? -ENOMEM : -EIO;
			if (!stale)
				slot->flags |= KV_SLOT_LOST;
		}
		version->busy--;
		version->jobs--;
		kv_park_wake(core, version);
	}
	if (chunk->extent_count > 0)
		kv_space_cancel(core->space, chunk->extents, chunk->extent_count);
	if (chunk->promised > 0)
		kv_space_unreserve(core->space, chunk->promised);
	if (chunk->result == 0) {
		kv_stat_add(&core->stats->writeback_chunks, 1);
		kv_stat_add(&core->stats->writeback_bytes, bytes);
	}
}

static void io_done(void *arg, struct kv_io *io)
{
	struct kv_core *core = arg;
	struct kv_batch_chunk *chunk = io->arg;

	assert(chunk->left > 0);
	chunk->left--;
	if (io->result < 0) {
		chunk->result = io->result;
		unsigned errors = atomic_fetch_add(&core->write_errors[io->device], 1) + 1;
		if (errors == DEVICE_ERRORS_MAX && kv_devices_count(core->devices) > 1) {
			kv_log_error("writeback", "device gets no more writes device=%u error=%s",
				io->device, strerror(-io->result));
			kv_space_disable(core->space, io->device);
		}
	} else {
		atomic_store(&core->write_errors[io->device], 0);
	}
	/* Failed ones are tried again, elsewhere, when the others are through. */
	if (chunk->left == 0 && chunk->result == 0)
		finish_chunk(core, chunk);
}

/* One more attempt for a chunk that a device refused, on other blocks, of the next device if there
 * is one. */
static void retry_chunk(struct kv_worker *worker, struct kv_batch_chunk *chunk)
{
	struct kv_core *core = worker->core;
	struct kv_extent *refused = chunk->extents;
	unsigned refused_count = chunk->extent_count;
	int r = 0;

	if (refused_count == 0 || !chunk->content.memory) {
		finish_chunk(core, chunk);
		return;
	}
	/* The refused blocks stay taken, so that others are found; unless there are no others. */
	if (kv_space_reserve(core->space, chunk->blocks) < 0) {
		kv_space_cancel(core->space, refused, refused_count);
		refused_count = 0;
		r = kv_space_reserve(core->space, chunk->blocks);
	}
	chunk->extents = NULL;
	chunk->extent_count = 0;
	if (r == 0) {
		chunk->promised = chunk->blocks;
		r = allocate_extents(core, chunk, device_of(core, chunk, 1));
	}
	worker->batch.io_count = 0;
	if (r == 0)
		r = add_ios(&worker->batch, chunk);
	chunk->result = r;
	if (r == 0)
		(void)kv_ring_run(
			worker->ring, worker->batch.ios, worker->batch.io_count, io_done, core);
	if (!chunk->finished)
		finish_chunk(core, chunk);
	kv_space_cancel(core->space, refused, refused_count);
	free(refused);
}

static void batch_reset(struct kv_worker *worker)
{
	struct kv_batch *batch = &worker->batch;

	for (unsigned i = 0; i < batch->mapping_count; i++)
		kv_object_unmap(batch->mappings[i].memory, batch->mappings[i].length);
	for (unsigned i = 0; i < batch->buffer_count; i++)
		kv_ring_buffer_put(worker->ring, batch->buffers[i]);
	for (unsigned i = 0; i < batch->chunk_count; i++) {
		free(batch->chunks[i].extents);
		kv_version_unref(batch->chunks[i].version);
	}
	batch->mapping_count = batch->buffer_count = batch->chunk_count = batch->io_count = 0;
	batch->blocks = 0;
	batch->slab = NULL;
}

void kv_batch_run(struct kv_worker *worker)
{
	struct kv_core *core = worker->core;
	struct kv_batch *batch = &worker->batch;

	if (batch->chunk_count == 0)
		return;
	/* What it lacked when the thread began may be there now. */
	if (worker->ring_error < 0)
		worker->ring_error = kv_ring_new(core->devices, KV_RING_DEPTH, &worker->ring);
	kv_crew_begin(&core->writeback.crew, worker->member);
	if (worker->ring_error == 0)
		find_memory(worker);
	for (unsigned i = 0; i < batch->chunk_count; i++) {
		struct kv_batch_chunk *chunk = &batch->chunks[i];

		chunk->promised = chunk->blocks;
		if (worker->ring_error < 0)
			chunk->result = worker->ring_error;
		if (chunk->result == 0)
			chunk->result = allocate_extents(core, chunk, device_of(core, chunk, 0));
		if (chunk->result == 0)
			chunk->result = add_ios(batch, chunk);
	}
	if (batch->io_count > 0)
		(void)kv_ring_run(worker->ring, batch->ios, batch->io_count, io_done, core);
	for (unsigned i = 0; i < batch->chunk_count; i++)
		if (!batch->chunks[i].finished)
			retry_chunk(worker, &batch->chunks[i]);
	{
		KV_LOCKED(&core->writeback.lock);
		core->writeback.progress++;
		(void)pthread_cond_broadcast(&core->writeback.settled);
	}
	batch_reset(worker);
}

void kv_batch_done(struct kv_worker *worker)
{
	free(worker->batch.ios);
	worker->batch.ios = NULL;
	worker->batch.io_capacity = 0;
}
