/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What operations do to the space: fresh blocks become used, shared extents gain and lose
 * references, blocks that lose the last one become busy.
 *
 * The bitmaps in memory are changed at once, so that an operation that names an extent twice sees
 * what it did; the space lock is held from the first change to the end, and a failed operation is
 * undone.
 */
#include "index/space_internal.h"

static struct kv_space *op_space(struct kv_op *op)
{
	struct kv_space *space = op->index->space;

	if (!op->space.locked) {
		(void)pthread_mutex_lock(&space->lock);
		op->space.locked = true;
	}
	return space;
}

/* Room for one more change, so that a change that was made can always be noted. */
static int op_make_room(struct kv_op *op)
{
	struct kv_space_op *changes = &op->space;
	size_t capacity = changes->capacity != 0 ? changes->capacity * 2 : 64;
	struct kv_space_change *grown;

	if (changes->count < changes->capacity)
		return 0;
	grown = reallocarray(changes->changes, capacity, sizeof(*grown));
	if (!grown)
		return -ENOMEM;
	changes->changes = grown;
	changes->capacity = capacity;
	return 0;
}

static void op_note(
	struct kv_op *op, const struct kv_extent *extent, enum kv_space_change_kind kind)
{
	op->space.changes[op->space.count++] = (struct kv_space_change){*extent, kind};
}

/* 1 if all of EXTENT was FROM, and is TO now; 0 if not. */
static int op_turn(struct kv_op *op, const struct kv_extent *extent, enum kv_block_state from,
	enum kv_block_state to, enum kv_space_change_kind kind)
{
	struct kv_space *space = op_space(op);
	int r = op_make_room(op);

	if (r < 0)
		return r;
	r = kv_space_is(space, &op->view, extent, from);
	if (r == 1) {
		kv_space_move(space, extent, from, to);
		op_note(op, extent, kind);
	}
	return r;
}

/* The same for blocks that have lost their last reference. */
static int op_free(struct kv_op *op, const struct kv_extent *extent)
{
	int r = op_turn(op, extent, KV_BLOCK_USED, KV_BLOCK_BUSY, KV_SPACE_DROP);

	if (r == 1)
		op->index->space->freed += extent->count;
	return r;
}

int kv_space_op_use(struct kv_op *op, const struct kv_extent *extent)
{
	int r = op_turn(op, extent, KV_BLOCK_BUSY, KV_BLOCK_USED, KV_SPACE_USE);

	if (r == 0)
		return -EINVAL;
	return r < 0 ? r : 0;
}

/* ---- References ---- */

static struct kv_key refcount_key(const struct kv_extent *extent)
{
	return kv_key_pair(KV_TABLE_REFCOUNT, extent->device, extent->start);
}

/* Absent means one. */
static int refcount_get(struct kv_op *op, const struct kv_extent *extent, uint32_t *ret_count)
{
	struct kv_key key = refcount_key(extent);
	struct kv_value value;
	int r = kv_view_get(&op->view, &key, &value);

	if (r == -ENOENT) {
		*ret_count = 1;
		return 0;
	}
	if (r == 0 && kv_refcount_decode(value.data, value.size, ret_count) < 0)
		return kv_index_damaged(op->index, &key, "reference count");
	return r;
}

static int refcount_put(struct kv_op *op, const struct kv_extent *extent, uint32_t count)
{
	struct kv_key key = refcount_key(extent);
	uint8_t *data;

	if (count == 1)
		return kv_op_drop(op, &key, false);
	data = kv_op_put(op, &key, KV_REFCOUNT_RECORD_SIZE, false);
	if (!data)
		return -ENOMEM;
	kv_refcount_encode(count, data);
	return 0;
}

int kv_space_op_share(struct kv_op *op, const struct kv_extent *extent)
{
	struct kv_space *space = op_space(op);
	uint32_t count;
	int r = kv_space_is(space, &op->view, extent, KV_BLOCK_USED);

	if (r == 1) {
		r = refcount_get(op, extent, &count);
		if (r == 0 && count == UINT32_MAX)
			r = -EMLINK;
		return r < 0 ? r : refcount_put(op, extent, count + 1);
	}
	/* Freed meanwhile, but not released: the caller keeps the bytes from reuse. */
	if (r == 0)
		r = kv_space_is(space, &op->view, extent, KV_BLOCK_BUSY);
	if (r <= 0)
		return r < 0 ? r : -ESTALE;
	r = op_make_room(op);
	if (r == 0)
		r = kv_space_adopt(space, extent);
	if (r < 0)
		return r;
	kv_space_move(space, extent, KV_BLOCK_BUSY, KV_BLOCK_USED);
	space->freed -= extent->count;
	op_note(op, extent, KV_SPACE_ADOPT);
	return 0;
}

int kv_space_op_drop(struct kv_op *op, const struct kv_extent *extent)
{
	struct kv_key key = refcount_key(extent);
	uint32_t count;
	int r = refcount_get(op, extent, &count);

	if (r < 0)
		return r;
	if (count > 1)
		return refcount_put(op, extent, count - 1);
	r = op_free(op, extent);
	if (r == 0) /* two maps name the blocks, or the bitmap lost them */
		return kv_index_damaged(op->index, &key, "extent that is not in use");
	return r;
}

/* ---- Again, after a restart: allocations have gone with the process ---- */

/* Fresh blocks become used. */
static int op_claim(struct kv_op *op, const struct kv_extent *extent)
{
	int r = op_turn(op, extent, KV_BLOCK_FREE, KV_BLOCK_USED, KV_SPACE_CLAIM);

	if (r == 0)
		return -EUCLEAN;
	return r < 0 ? r : 0;
}

/* References are records, which come by themselves. */
static int op_give_up(struct kv_op *op, const struct kv_extent *extent)
{
	int r = op_free(op, extent);

	return r == 0 ? -EUCLEAN : r;
}

/* Blocks that an operation before this one has freed, or one that is durable by now. */
static int op_adopt(struct kv_op *op, const struct kv_extent *extent)
{
	int r = kv_space_is(op_space(op), &op->view, extent, KV_BLOCK_BUSY);

	if (r < 0)
		return r;
	return r == 1 ? kv_space_op_share(op, extent) : op_claim(op, extent);
}

int kv_space_op_again(struct kv_op *op, const struct kv_space_change *change)
{
	switch (change->kind) {
	case KV_SPACE_USE:
	case KV_SPACE_CLAIM:
		return op_claim(op, &change->extent);
	case KV_SPACE_ADOPT:
		return op_adopt(op, &change->extent);
	case KV_SPACE_DROP:
		return op_give_up(op, &change->extent);
	}
	return -EUCLEAN;
}

/* ---- The end ---- */

int kv_space_op_expect_release(struct kv_op *op)
{
	struct kv_space *space = op_space(op);
	size_t wanted = space->release_count + space->expected + 1;
	struct kv_freed *grown;

	if (wanted > space->release_capacity) {
		grown = reallocarray(space->releases, wanted * 2, sizeof(*grown));
		if (!grown)
			return -ENOMEM;
		space->releases = grown;
		space->release_capacity = wanted * 2;
	}
	op->space.expect_release = true;
	return 0;
}

static void op_undo(struct kv_space *space, const struct kv_space_change *change)
{
	switch (change->kind) {
	case KV_SPACE_ADOPT:
		(void)kv_space_unadopt(space, &change->extent);
		space->freed += change->extent.count;
		/* fall through */
	case KV_SPACE_USE:
		kv_space_move(space, &change->extent, KV_BLOCK_USED, KV_BLOCK_BUSY);
		break;
	case KV_SPACE_DROP:
		kv_space_move(space, &change->extent, KV_BLOCK_BUSY, KV_BLOCK_USED);
		space->freed -= change->extent.count;
		break;
	case KV_SPACE_CLAIM:
		kv_space_move(space, &change->extent, KV_BLOCK_USED, KV_BLOCK_FREE);
		break;
	}
}

void kv_space_op_end(struct kv_op *op, bool applied)
{
	struct kv_space *space = op->index->space;

	if (!op->space.locked)
		return;
	if (applied && op->space.expect_release)
		space->expected++;
	while (!applied && op->space.count > 0)
		op_undo(space, &op->space.changes[--op->space.count]);
	(void)pthread_mutex_unlock(&space->lock);
	free(op->space.changes);
	op->space = (struct kv_space_op){0};
}
