/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading chunks from the devices straight into the object's pages; what one of them needs is in
 * fill_piece.c.
 */
#include "fs/fill_piece.h"

#define ALLOCATE_ATTEMPTS 3u

struct mapping {
	void *memory;
	size_t length;
};

struct kv_fill_run {
	struct kv_core *core;
	struct kv_ring *ring;
	struct kv_fill_batch *batch;
	bool started;  /* each job is, as soon as it is prepared */
	unsigned left; /* transfers of all pieces */
	struct kv_piece *pieces;
	unsigned piece_count;
	struct mapping *mappings; /* one a job */
};

/* ---- Preparing ---- */

/* Pages for the run, and a mapping of them. */
static int map_job(struct kv_fill_run *run, unsigned index)
{
	const struct kv_fill *job = run->batch->jobs[index];
	struct mapping *mapping = &run->mappings[index];
	uint64_t offset = (uint64_t)job->first << KV_CHUNK_SHIFT;
	size_t length = ((size_t)(job->count - 1) << KV_CHUNK_SHIFT) +
			((size_t)kv_bits_end(&job->bits) << KV_BLOCK_SHIFT);
	int r = -ENOSPC;

	/* The tier's filesystem may be short although the budget is not: huge pages that are used
	 * in part. */
	for (unsigned i = 0; i < ALLOCATE_ATTEMPTS && r == -ENOSPC; i++) {
		r = job->count == 1 ? kv_chunk_allocate(job->version, job->first, &job->bits)
				    : kv_object_allocate(job->version->object, offset, length);
		if (r == -ENOSPC)
			(void)kv_evict_reclaim(run->core, length);
	}
	if (r == 0)
		r = kv_object_map(job->version->object, offset, length, &mapping->memory);
	if (r == 0)
		mapping->length = length;
	return r;
}

static int memory_for_job(struct kv_fill_run *run, unsigned index, struct kv_piece *pieces)
{
	struct kv_fill *job = run->batch->jobs[index];
	size_t bytes = (size_t)kv_bits_count(&job->bits) << KV_BLOCK_SHIFT;
	struct kv_blocks *first = &pieces[0].blocks;
	int r;

	if (job->memory) {
		first->memory = job->memory;
		return 0;
	}
	if (job->count == 1 && bytes <= KV_RING_BUFFER_SIZE) {
		first->memory = kv_ring_buffer_get(run->ring, &pieces[0].buffer);
		if (first->memory) {
			memset(first->memory, 0, bytes);
			first->packed = true;
			return 0;
		}
		pieces[0].buffer = -1;
	}
	r = map_job(run, index);
	for (uint32_t i = 0; i < job->count && r == 0; i++) {
		uint8_t *memory =
			(uint8_t *)run->mappings[index].memory + ((size_t)i << KV_CHUNK_SHIFT);

		if (pieces[i].early)
			pieces[i].target = memory;
		else
			pieces[i].blocks.memory = memory;
	}
	return r;
}

static void start_piece(struct kv_fill_run *run, struct kv_piece *piece)
{
	piece->left = piece->io_count + piece->early;
	run->left += piece->io_count;
	kv_ring_add(run->ring, piece->ios, piece->io_count);
}

static void start_pieces(struct kv_fill_run *run, struct kv_piece *pieces, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		if (pieces[i].result == 0)
			start_piece(run, &pieces[i]);
	kv_ring_submit(run->ring);
}

/* ---- Ending ---- */

/* Only notes it: others may be waiting for the device. */
static void io_done(void *arg, struct kv_io *io)
{
	struct kv_piece *piece = io->arg;

	(void)arg;
	assert(piece->left > 0 && piece->run->left > 0);
	piece->left--;
	piece->run->left--;
	if (io->result < 0)
		piece->result = io->result;
}

/* Failed ones are tried again when the others are through. */
static void finish_arrived(struct kv_fill_run *run)
{
	for (unsigned i = 0; i < run->piece_count; i++) {
		struct kv_piece *piece = &run->pieces[i];

		if (!piece->finished && piece->left == 0 && piece->result == 0)
			kv_piece_finish(run->core, piece);
	}
}

/* One more attempt for a piece whose transfers failed. */
static void retry_piece(struct kv_fill_run *run, struct kv_piece *piece)
{
	if (piece->extent_count > 0) {
		piece->result = 0;
		start_pieces(run, piece, 1);
		while (piece->left > 0)
			kv_ring_wait(run->ring);
	}
	kv_piece_finish(run->core, piece);
}

static void end_private(struct kv_fill *job, int result)
{
	struct kv_version *version = job->version;
	bool left;

	{
		KV_LOCKED(&version->lock);
		if (job->ours)
			kv_slot_find(version, job->first)->flags &= (uint16_t)~KV_SLOT_BUSY;
		job->result = result < 0 ? -EIO : 0;
		job->done = true;
		left = job->left;
		kv_park_wake(version->file->core, version);
	}
	/* From here on the job is the waiter's, if there is one. */
	if (left)
		kv_fill_free(job);
}

/* Lock held. A look at each chunk is worth it: to hand the version to the kernel, or to mark it. */
static bool may_be_whole(const struct kv_version *version)
{
	if (version->streamed && !version->hot)
		return true;
	return version->file->core->outlives && version->busy == 0 &&
	       version->charged << KV_BLOCK_SHIFT >= version->size;
}

static void end_job(struct kv_fill_run *run, unsigned index, const struct kv_piece *pieces)
{
	struct kv_fill *job = run->batch->jobs[index];
	struct kv_version *version = job->version;
	struct kv_core *core = run->core;
	bool became_hot = false;

	if (run->mappings[index].length > 0)
		kv_object_unmap(run->mappings[index].memory, run->mappings[index].length);
	if (job->memory) {
		end_private(job, pieces[0].result);
		return;
	}
	(void)pthread_mutex_lock(&version->lock);
	if (may_be_whole(version) && kv_version_is_resident_locked(version))
		became_hot = version->streamed && !version->hot;
	(void)pthread_mutex_unlock(&version->lock);
	if (became_hot && core->hooks.became_hot)
		core->hooks.became_hot(core->hooks.arg, version->file->ino);
	kv_version_unref(version);
	free(job);
}

/* ---- Running ---- */

/*
 * Making a huge page takes as long as a good part of reading it (the kernel clears it). So the
 * chunks of a job that comes alone are on their way before its pages are there.
 */
static bool starts_early(const struct kv_fill_run *run, const struct kv_fill *job)
{
	size_t bytes = (size_t)kv_bits_count(&job->bits) << KV_BLOCK_SHIFT;

	return run->batch->staging && run->batch->count == 1 && !job->memory &&
	       (job->count > 1 || bytes > KV_RING_BUFFER_SIZE) && kv_bits_is_prefix(&job->bits);
}

static void start_early(struct kv_fill_run *run, struct kv_piece *pieces, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		pieces[i].early = true;
		pieces[i].blocks.memory =
			(uint8_t *)run->batch->staging + ((size_t)i << KV_CHUNK_SHIFT);
		kv_piece_prepare(&pieces[i]);
	}
	start_pieces(run, pieces, count);
}

/* The early piece's pages are there, or cannot be had (R). */
static void target_early(struct kv_piece *piece, int r)
{
	bool started = piece->result == 0 || piece->extent_count > 0;

	piece->early = false;
	if (started)
		piece->left--;
	if (r < 0) {
		piece->result = r;
		piece->extent_count = 0;
		return;
	}
	kv_object_touch(piece->target, (size_t)kv_bits_end(&piece->blocks.bits) << KV_BLOCK_SHIFT);
}

/*
 * Finds memory and extents for a job. Started, it is on its way before the next one is prepared;
 * else its pages are made now, so that nothing is left to do then. Not where there are holes: these
 * would get pages, too.
 */
static void prepare_job(struct kv_fill_run *run, unsigned index, struct kv_piece *pieces)
{
	const struct kv_fill *job = run->batch->jobs[index];
	const bool early = starts_early(run, job);
	struct kv_bits whole = {0};
	int r;

	kv_bits_set(&whole, 0, KV_CHUNK_BLOCKS);
	for (uint32_t i = 0; i < job->count; i++)
		pieces[i] = (struct kv_piece){
			.run = run,
			.job = run->batch->jobs[index],
			.blocks.number = job->first + i,
			.blocks.bits = job->memory || i + 1 < job->count ? whole : job->bits,
			.buffer = -1,
		};
	if (early)
		start_early(run, pieces, job->count);
	r = memory_for_job(run, index, pieces);
	for (uint32_t i = 0; i < job->count; i++) {
		if (early) {
			target_early(&pieces[i], r);
			continue;
		}
		pieces[i].result = r;
		if (r == 0)
			kv_piece_prepare(&pieces[i]);
	}
	if (run->started && !early)
		start_pieces(run, pieces, job->count);
	else if (!early && run->mappings[index].length > 0 && kv_bits_is_prefix(&job->bits))
		kv_object_touch(run->mappings[index].memory, run->mappings[index].length);
}

static void end_jobs(struct kv_fill_run *run)
{
	struct kv_piece *pieces = run->pieces;

	for (unsigned i = 0; i < run->batch->count; i++) {
		uint32_t count = run->batch->jobs[i]->count;

		for (uint32_t k = 0; k < count; k++) {
			if (pieces[k].mismatch)
				kv_piece_end_damaged(run->core, &pieces[k]);
			if (pieces[k].buffer >= 0)
				kv_ring_buffer_put(run->ring, pieces[k].buffer);
		}
		for (uint32_t k = 0; k < count; k++)
			kv_version_unref(pieces[k].source);
		end_job(run, i, pieces);
		pieces += count;
	}
}

/* There is no memory or no ring to work with: every job ends with ERROR. */
static void fail_all(struct kv_core *core, struct kv_fill_batch *batch, int error)
{
	for (unsigned i = 0; i < batch->count; i++) {
		struct kv_fill *job = batch->jobs[i];
		struct kv_fill_batch alone = {.jobs = {job}, .count = 1};
		struct mapping none = {0};
		struct kv_fill_run run = {.core = core, .batch = &alone, .mappings = &none};
		struct kv_piece piece = {
			.job = job, .buffer = -1, .result = error, .finished = true};

		for (uint32_t k = 0; k < job->count && !job->memory; k++) {
			piece.blocks.number = job->first + k;
			kv_piece_settle(core, &piece);
		}
		end_job(&run, 0, &piece);
	}
}

static struct kv_fill_run *run_free(struct kv_fill_run *run)
{
	for (unsigned i = 0; i < run->piece_count && run->pieces; i++) {
		free(run->pieces[i].extents);
		free(run->pieces[i].ios);
	}
	free(run->pieces);
	free(run->mappings);
	free(run);
	return NULL;
}

static struct kv_fill_run *run_new(
	struct kv_core *core, struct kv_ring *ring, struct kv_fill_batch *batch)
{
	struct kv_fill_run *run = calloc(1, sizeof(*run));

	if (!run)
		return NULL;
	run->core = core;
	run->ring = ring;
	run->batch = batch;
	for (unsigned i = 0; i < batch->count; i++)
		run->piece_count += batch->jobs[i]->count;
	run->pieces = calloc(run->piece_count, sizeof(*run->pieces));
	run->mappings = calloc(batch->count, sizeof(*run->mappings));
	return run->pieces && run->mappings ? run : run_free(run);
}

struct kv_fill_run *kv_fill_prepare(struct kv_core *core, struct kv_ring *ring, int ring_error,
	struct kv_fill_batch *batch, bool start)
{
	struct kv_fill_run *run = ring_error < 0 ? NULL : run_new(core, ring, batch);
	struct kv_piece *pieces;

	if (!run) {
		fail_all(core, batch, ring_error < 0 ? ring_error : -ENOMEM);
		return NULL;
	}
	run->started = start;
	pieces = run->pieces;
	for (unsigned i = 0; i < batch->count; i++) {
		prepare_job(run, i, pieces);
		pieces += batch->jobs[i]->count;
	}
	return run;
}

void kv_fill_finish(struct kv_fill_run *run, struct kv_fill_run *next)
{
	assert(run->started);
	for (;;) {
		bool answered = run->left == 0;

		/* Sums are compared while the device is at work. */
		if (answered && next) {
			next->started = true;
			start_pieces(next, next->pieces, next->piece_count);
		}
		finish_arrived(run);
		if (answered)
			break;
		kv_ring_wait(run->ring);
	}
	for (unsigned i = 0; i < run->piece_count; i++)
		if (!run->pieces[i].finished)
			retry_piece(run, &run->pieces[i]);
	end_jobs(run);
	(void)run_free(run);
}

int kv_fill_ring_new(struct kv_core *core, struct kv_ring **ret_ring)
{
	int r = kv_ring_new(core->devices, KV_RING_DEPTH, ret_ring);

	if (r == 0)
		kv_ring_begin(*ret_ring, io_done, NULL);
	return r;
}

struct kv_ring *kv_fill_ring_free(struct kv_ring *ring)
{
	if (ring)
		(void)kv_ring_end(ring);
	return kv_ring_free(ring);
}
