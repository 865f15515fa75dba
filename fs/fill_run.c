/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading chunks from the devices straight into the object's pages, checking each against its sum
 * as it arrives.
 */
#include "fs/fill_internal.h"

#include <inttypes.h>

#define ALLOCATE_ATTEMPTS 3u

/* One chunk on its way. */
struct piece {
	struct kv_fill *job;
	struct kv_version
		*source; /* whose extents these are; counted if it is not the job's version */
	struct kv_blocks blocks;   /* present blocks, or more: what the memory has room for */
	int buffer;                /* index of a ring buffer that is the memory, or -1 */
	struct kv_extent *extents; /* a copy */
	unsigned extent_count;
	struct kv_io *ios;
	unsigned io_count;
	uint64_t sum;
	uint8_t *target; /* where it is copied to; NULL: it is read there */
	bool early;      /* TARGET is still to come */
	unsigned left;   /* transfers, and TARGET */
	int result;
	bool finished;
	bool mismatch;
	bool first_mismatch; /* of the source */
};

struct mapping {
	void *memory;
	size_t length;
};

struct run {
	struct kv_core *core;
	struct kv_ring *ring;
	struct kv_fill_batch batch;
	struct piece *pieces;
	unsigned piece_count;
	struct mapping *mappings; /* one a job */
};

/* ---- Preparing ---- */

static int piece_take_extents(struct piece *piece, const struct kv_slot *slot)
{
	const struct kv_extent *extents = kv_slot_extents(slot);

	for (unsigned i = 0; i < slot->extent_count; i++)
		if (extents[i].block + extents[i].count > kv_bits_end(&piece->blocks.bits))
			return -EUCLEAN;
	piece->extents = malloc((slot->extent_count + 1u) * sizeof(*extents));
	if (!piece->extents)
		return -ENOMEM;
	memcpy(piece->extents, extents, slot->extent_count * sizeof(*extents));
	piece->extent_count = slot->extent_count;
	piece->sum = slot->sum;
	return 0;
}

/* Copies a chunk that a base has in its object. SLOT's version is locked; returns unlocked. */
static int copy_resident(struct piece *piece, struct kv_version *source, struct kv_slot *slot)
{
	int r;

	slot->pins++;
	source->busy++;
	(void)pthread_mutex_unlock(&source->lock);
	r = kv_blocks_load(&piece->blocks, source->object);
	KV_LOCKED(&source->lock);
	kv_slot_find(source, piece->blocks.number)->pins--;
	source->busy--;
	return r;
}

/* Finds where the content of PIECE is, following the bases; copies it if that is DRAM. */
static int piece_resolve(struct piece *piece)
{
	struct kv_version *held = kv_version_ref(piece->job->version);
	int r;

	for (;;) {
		struct kv_version *base = NULL;

		(void)pthread_mutex_lock(&held->lock);
		r = kv_map_load(held, piece->blocks.number);
		struct kv_slot *slot = kv_slot_find(held, piece->blocks.number);
		enum kv_chunk_state state = kv_slot_state(held, piece->blocks.number);
		bool stored = piece->job->stored && state == KV_CHUNK_HOT;
		if (r == 0 && slot && kv_slot_is_resident(slot) && !stored) {
			r = copy_resident(piece, held, slot);
			break;
		}
		if (r == 0 && state == KV_CHUNK_BASE)
			base = kv_version_ref(held->base);
		else if (r == 0 && (state == KV_CHUNK_COLD || state == KV_CHUNK_HOT))
			r = piece_take_extents(piece, slot);
		(void)pthread_mutex_unlock(&held->lock);
		if (!base)
			break;
		kv_version_unref(held);
		held = base;
	}
	piece->source = held;
	return r;
}

/* Pages for the run, and a mapping of them. */
static int map_job(struct run *run, unsigned index)
{
	const struct kv_fill *job = run->batch.jobs[index];
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

static int memory_for_job(struct run *run, unsigned index, struct piece *pieces)
{
	struct kv_fill *job = run->batch.jobs[index];
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

static int make_ios(struct piece *piece)
{
	const struct kv_io template = {
		.kind = KV_IO_READ,
		.buffer = piece->buffer,
		.arg = piece,
	};

	piece->ios = malloc((piece->extent_count + 1u) * sizeof(*piece->ios));
	if (!piece->ios)
		return -ENOMEM;
	piece->io_count = kv_blocks_ios(
		&piece->blocks, piece->extents, piece->extent_count, &template, piece->ios);
	return 0;
}

static void start_piece(struct run *run, struct piece *piece)
{
	piece->left = piece->io_count + piece->early;
	kv_ring_add(run->ring, piece->ios, piece->io_count);
}

static void prepare_piece(struct run *run, struct piece *piece)
{
	piece->result = piece_resolve(piece);
	if (piece->result == 0)
		piece->result = make_ios(piece);
	if (piece->result < 0)
		piece->extent_count = 0;
	else
		start_piece(run, piece);
}

/* ---- Ending ---- */

/*
 * The chunk is in the object (RESULT 0), or must look as if it had never been asked for. Who waits
 * for it finds the object free, too: it may be about to take it along (kv_version_continue).
 */
static void settle_slot(struct run *run, struct piece *piece)
{
	struct kv_version *version = piece->job->version;
	uint64_t offset = (uint64_t)piece->blocks.number << KV_CHUNK_SHIFT;
	uint64_t given_back = 0;

	if (piece->result < 0)
		(void)kv_object_punch(version->object, offset, KV_CHUNK_SIZE);
	{
		KV_LOCKED(&version->lock);
		struct kv_slot *slot = kv_slot_find(version, piece->blocks.number);
		slot->flags &= (uint16_t)~KV_SLOT_BUSY;
		if (piece->result < 0) {
			slot->flags |= KV_SLOT_FAILED;
			given_back = kv_slot_forget_pages(version, slot);
		} else if (slot->state == KV_CHUNK_BASE) {
			slot->flags |= KV_SLOT_RESIDENT | KV_SLOT_USED;
		} else if (slot->state == KV_CHUNK_COLD) {
			slot->state = KV_CHUNK_HOT;
			slot->flags |= KV_SLOT_USED;
		}
		version->busy--;
		kv_park_wake(run->core, version);
	}
	kv_core_uncharge(run->core, given_back << KV_BLOCK_SHIFT);
}

/* Before anybody is woken: whoever looks now must not try again. */
static void note_mismatch(struct run *run, struct piece *piece)
{
	struct kv_version *versions[] = {piece->job->version, piece->source};

	kv_stat_add(&run->core->stats->checksum_errors, 1);
	piece->mismatch = true;
	piece->result = -EUCLEAN;
	for (unsigned i = 0; i < 2; i++) {
		KV_LOCKED(&versions[i]->lock);
		if (i == 1 || versions[0] == versions[1])
			piece->first_mismatch = piece->first_mismatch || !versions[i]->damaged;
		versions[i]->damaged = true;
		versions[i]->all_hot = false;
		(void)kv_version_mark_locked(versions[i]);
	}
}

/* That there was no memory to look is no damage. */
static void verify(struct run *run, struct piece *piece)
{
	uint64_t sum;

	if (piece->result < 0 || piece->extent_count == 0)
		return;
	piece->result = kv_blocks_sum(&piece->blocks, piece->extents, piece->extent_count, &sum);
	if (piece->result == 0 && sum != piece->sum)
		note_mismatch(run, piece);
}

static int copy_to_object(struct piece *piece)
{
	struct kv_version *version = piece->job->version;
	int r = kv_chunk_allocate(version, piece->blocks.number, &piece->blocks.bits);
	uint64_t size;

	if (r < 0)
		return r;
	{
		KV_LOCKED(&version->lock);
		/* Of a published version it is exact already: what lies behind the end must not
		 * grow it. */
		size = version->object_size;
	}
	return kv_blocks_store(&piece->blocks, version->object, size);
}

/* What no extent covers is not copied: the staging memory has another chunk's bytes there. */
static void copy_to_target(const struct piece *piece)
{
	struct kv_bits bits = {0};

	for (unsigned i = 0; i < piece->extent_count; i++)
		kv_bits_set(&bits, piece->extents[i].block,
			piece->extents[i].block + piece->extents[i].count);
	if (piece->extent_count == 0) /* it came from a base's object, whole */
		bits = piece->blocks.bits;
	KV_BITS_FOREACH (first, end, &bits)
		memcpy(piece->target + ((size_t)first << KV_BLOCK_SHIFT),
			piece->blocks.memory + ((size_t)first << KV_BLOCK_SHIFT),
			(size_t)(end - first) << KV_BLOCK_SHIFT);
}

static void finish_piece(struct run *run, struct piece *piece)
{
	struct kv_fill *job = piece->job;

	assert(!piece->finished && piece->left == 0);
	piece->finished = true;
	verify(run, piece);
	if (piece->result == 0 && piece->extent_count > 0) {
		kv_stat_add(&run->core->stats->fill_chunks, 1);
		for (unsigned i = 0; i < piece->extent_count; i++)
			kv_stat_add(&run->core->stats->fill_bytes,
				(uint64_t)piece->extents[i].count << KV_BLOCK_SHIFT);
	}
	if (job->memory)
		return;
	if (piece->result == 0 && piece->buffer >= 0)
		piece->result = copy_to_object(piece);
	if (piece->result == 0 && piece->target)
		copy_to_target(piece);
	/* Who waits for a damaged one hears of it when the file has lost its name. */
	if (!piece->mismatch)
		settle_slot(run, piece);
}

static void io_done(void *arg, struct kv_io *io)
{
	struct piece *piece = io->arg;

	assert(piece->left > 0);
	piece->left--;
	if (io->result < 0)
		piece->result = io->result;
	/* Failed ones are tried again when the others are through. */
	if (piece->left == 0 && piece->result == 0)
		finish_piece(arg, piece);
}

/* The rest of the file, and later openers, must not meet these bytes again. */
static void report_damage(struct run *run, const struct piece *piece)
{
	struct kv_core *core = run->core;
	struct kv_version *version = piece->source;
	struct kv_file *file = version->file;
	struct kv_shard *shard = kv_shard_of(core, file->ino);
	struct kv_inode inode;
	bool current;

	kv_log_error("fill",
		"checksum mismatch ino=%" PRIu64 " version=%" PRIu64 " chunk=%" PRIu32
		" device=%u offset=%" PRIu64,
		file->ino, version->number, piece->blocks.number, piece->extents[0].device,
		kv_extent_offset(&piece->extents[0]));
	(void)pthread_mutex_lock(&version->lock);
	bool committed = version->state == KV_VERSION_COMMITTED;
	(void)pthread_mutex_unlock(&version->lock);
	(void)pthread_mutex_lock(&shard->lock);
	current = file->current == version || (file->current && file->current->base == version);
	if (committed && current && piece->first_mismatch)
		file->quarantined = true;
	(void)pthread_mutex_unlock(&shard->lock);
	if (!committed || !current || !piece->first_mismatch)
		return;
	kv_stat_add(&core->stats->quarantined, 1);
	kv_core_changed(core, file->ino);
	for (unsigned i = 0; i < 3; i++)
		if (kv_index_get(core->index, file->ino, &inode) < 0 ||
			kv_core_unname(core, file->ino, inode.last_use_ns, true) != -EAGAIN)
			break;
}

static void end_damaged(struct run *run, struct piece *piece)
{
	report_damage(run, piece);
	if (!piece->job->memory)
		settle_slot(run, piece);
}

/* One more attempt for a piece whose transfers failed. */
static void retry_piece(struct run *run, struct piece *piece)
{
	if (piece->extent_count > 0) {
		piece->result = 0;
		kv_ring_begin(run->ring, io_done, run);
		start_piece(run, piece);
		(void)kv_ring_end(run->ring);
	}
	if (!piece->finished)
		finish_piece(run, piece);
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

static void end_job(struct run *run, unsigned index, const struct piece *pieces)
{
	struct kv_fill *job = run->batch.jobs[index];
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
 * first chunk of a job that comes alone is on its way before its pages are there.
 */
static bool starts_early(const struct run *run, const struct kv_fill *job)
{
	size_t bytes = (size_t)kv_bits_count(&job->bits) << KV_BLOCK_SHIFT;

	return run->batch.staging && run->batch.count == 1 && !job->memory &&
	       (job->count > 1 || bytes > KV_RING_BUFFER_SIZE) && kv_bits_is_prefix(&job->bits);
}

static void start_early(struct run *run, struct piece *piece)
{
	piece->early = true;
	piece->blocks.memory = run->batch.staging;
	prepare_piece(run, piece);
	kv_ring_submit(run->ring);
}

/* The early piece's pages are there, or cannot be had (R). */
static void target_early(struct run *run, struct piece *piece, int r)
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
	if (started && piece->left == 0 && piece->result == 0)
		finish_piece(run, piece);
}

/* Finds memory and extents for a job, and sends it on its way before the next one is prepared. */
static void start_job(struct run *run, unsigned index, struct piece *pieces)
{
	struct kv_fill *job = run->batch.jobs[index];
	const bool early = starts_early(run, job);
	struct kv_bits whole = {0};
	int r;

	kv_bits_set(&whole, 0, KV_CHUNK_BLOCKS);
	for (uint32_t i = 0; i < job->count; i++)
		pieces[i] = (struct piece){
			.job = job,
			.blocks.number = job->first + i,
			.blocks.bits = job->memory || i + 1 < job->count ? whole : job->bits,
			.buffer = -1,
		};
	if (early)
		start_early(run, &pieces[0]);
	r = memory_for_job(run, index, pieces);
	for (uint32_t i = early; i < job->count; i++) {
		pieces[i].result = r;
		if (r == 0)
			prepare_piece(run, &pieces[i]);
	}
	kv_ring_submit(run->ring);
	if (early)
		target_early(run, &pieces[0], r);
}

static void run_pieces(struct run *run)
{
	unsigned at = 0;

	kv_ring_begin(run->ring, io_done, run);
	for (unsigned i = 0; i < run->batch.count; i++) {
		start_job(run, i, &run->pieces[at]);
		at += run->batch.jobs[i]->count;
	}
	(void)kv_ring_end(run->ring);
	for (unsigned i = 0; i < run->piece_count; i++)
		if (!run->pieces[i].finished)
			retry_piece(run, &run->pieces[i]);
	at = 0;
	for (unsigned i = 0; i < run->batch.count; i++) {
		struct piece *pieces = &run->pieces[at];
		uint32_t count = run->batch.jobs[i]->count;

		for (uint32_t k = 0; k < count; k++) {
			if (pieces[k].mismatch)
				end_damaged(run, &pieces[k]);
			if (pieces[k].buffer >= 0)
				kv_ring_buffer_put(run->ring, pieces[k].buffer);
		}
		for (uint32_t k = 0; k < count; k++)
			kv_version_unref(pieces[k].source);
		end_job(run, i, pieces);
		at += count;
	}
}

/* There is no memory or no ring to work with: every job ends with ERROR. */
static void fail_all(struct run *run, int error)
{
	for (unsigned i = 0; i < run->batch.count; i++) {
		struct kv_fill *job = run->batch.jobs[i];
		struct mapping none = {0};
		struct piece piece = {.job = job, .buffer = -1, .result = error, .finished = true};

		for (uint32_t k = 0; k < job->count && !job->memory; k++) {
			piece.blocks.number = job->first + k;
			settle_slot(run, &piece);
		}
		run->mappings = &none;
		struct run one = *run;
		one.batch.jobs = &job;
		end_job(&one, 0, &piece);
	}
}

void kv_fill_run(
	struct kv_core *core, struct kv_ring *ring, int ring_error, struct kv_fill_batch batch)
{
	struct run run = {.core = core, .ring = ring, .batch = batch};

	for (unsigned i = 0; i < batch.count; i++)
		run.piece_count += batch.jobs[i]->count;
	run.pieces = calloc(run.piece_count, sizeof(*run.pieces));
	run.mappings = calloc(batch.count, sizeof(*run.mappings));
	if (ring_error < 0 || !run.pieces || !run.mappings) {
		free(run.mappings);
		fail_all(&run, ring_error < 0 ? ring_error : -ENOMEM);
		free(run.pieces);
		return;
	}
	run_pieces(&run);
	for (unsigned i = 0; i < run.piece_count; i++) {
		free(run.pieces[i].extents);
		free(run.pieces[i].ios);
	}
	free(run.pieces);
	free(run.mappings);
}
