/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One chunk that is brought into DRAM: where it is, and what becomes of it when it has arrived.
 */
#include "fs/fill_piece.h"

#include <inttypes.h>

/* ---- Preparing ---- */

static int piece_take_extents(struct kv_piece *piece, const struct kv_slot *slot)
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
static int copy_resident(struct kv_piece *piece, struct kv_version *source, struct kv_slot *slot)
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
static int piece_resolve(struct kv_piece *piece)
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

static int make_ios(struct kv_piece *piece)
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

void kv_piece_prepare(struct kv_piece *piece)
{
	piece->result = piece_resolve(piece);
	if (piece->result == 0)
		piece->result = make_ios(piece);
	if (piece->result < 0)
		piece->extent_count = 0;
}

/* ---- Ending ---- */

/*
 * The chunk is in the object (RESULT 0), or must look as if it had never been asked for. Who waits
 * for it finds the object free, too: it may be about to take it along (kv_version_continue).
 */
void kv_piece_settle(struct kv_core *core, struct kv_piece *piece)
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
		kv_park_wake(core, version);
	}
	kv_core_uncharge(core, given_back << KV_BLOCK_SHIFT);
}

/* Before anybody is woken: whoever looks now must not try again. */
static void note_mismatch(struct kv_core *core, struct kv_piece *piece)
{
	struct kv_version *versions[] = {piece->job->version, piece->source};

	kv_stat_add(&core->stats->checksum_errors, 1);
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
static void verify(struct kv_core *core, struct kv_piece *piece)
{
	uint64_t sum;

	if (piece->result < 0 || piece->extent_count == 0)
		return;
	piece->result = kv_blocks_sum(&piece->blocks, piece->extents, piece->extent_count, &sum);
	if (piece->result == 0 && sum != piece->sum)
		note_mismatch(core, piece);
}

static int copy_to_object(struct kv_piece *piece)
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
static void copy_to_target(const struct kv_piece *piece)
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

void kv_piece_finish(struct kv_core *core, struct kv_piece *piece)
{
	struct kv_fill *job = piece->job;

	assert(!piece->finished && piece->left == 0);
	piece->finished = true;
	verify(core, piece);
	if (piece->result == 0 && piece->extent_count > 0) {
		kv_stat_add(&core->stats->fill_chunks, 1);
		for (unsigned i = 0; i < piece->extent_count; i++)
			kv_stat_add(&core->stats->fill_bytes,
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
		kv_piece_settle(core, piece);
}

/* The rest of the file, and later openers, must not meet these bytes again. */
static void report_damage(struct kv_core *core, const struct kv_piece *piece)
{
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

void kv_piece_end_damaged(struct kv_core *core, struct kv_piece *piece)
{
	report_damage(core, piece);
	if (!piece->job->memory)
		kv_piece_settle(core, piece);
}
