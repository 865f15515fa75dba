/* SPDX-License-Identifier: Apache-2.0 */
/* Segments that stretches of a file share: see block.h. */
#include "gpu/block.h"

#include <errno.h>

#include "fs/base.h"

static int compare_u64(uint64_t a, uint64_t b)
{
	return a < b ? -1 : a > b;
}

static int block_compare(const struct kvg_block *a, const struct kvg_block *b)
{
	int r = compare_u64(a->key.ino, b->key.ino);

	if (r == 0)
		r = compare_u64(a->key.version, b->key.version);
	if (r == 0)
		r = compare_u64(a->key.uid, b->key.uid);
	return r != 0 ? r : compare_u64(a->key.first, b->key.first);
}
KV_TREE_GENERATE(kvg_block_tree, kvg_block, by_key, block_compare)

void kvg_block_all(
	struct kvg_blocks *blocks, void (*each)(void *arg, struct kvg_block *block), void *arg)
{
	struct kvg_block *block;

	RB_FOREACH (block, kvg_block_tree, &blocks->tree)
		each(arg, block);
}

struct kvg_block *kvg_block_find(struct kvg_blocks *blocks, const struct kvg_block_key *key)
{
	struct kvg_block wanted = {.key = *key};

	return RB_FIND(kvg_block_tree, &blocks->tree, &wanted);
}

struct kvg_block *kvg_block_take(struct kvg_blocks *blocks, const struct kvg_block_key *key)
{
	struct kvg_block *block = kvg_block_find(blocks, key);

	if (!block)
		return NULL;
	block->users++;
	block->live++;
	return block;
}

int kvg_block_new(struct kvg_blocks *blocks, const struct kvg_block_key *key, uint64_t size,
	uint64_t *charged, struct kvg_block **ret_block)
{
	struct kvg_pool *pool = blocks->pool;
	struct kvg_backend *backend = pool->backend;
	struct kvg_block *block = calloc(1, sizeof(*block));
	int r;

	if (!block)
		return -ENOMEM;
	*block = (struct kvg_block){
		.key = *key, .size = size, .charged = charged, .users = 1, .live = 1};
	pool->used += size;
	*charged += size;
	r = kvg_pool_take(pool, size, &block->segment);
	if (r == 0)
		r = backend->ops->map(backend, &block->segment, 1, true, &block->mapping);
	if (r < 0) {
		backend->ops->segment_free(backend, block->segment);
		pool->used -= size;
		*charged -= size;
		free(block);
		return r;
	}
	RB_INSERT(kvg_block_tree, &blocks->tree, block);
	*ret_block = block;
	return 0;
}

static void give_up(struct kvg_blocks *blocks, struct kvg_block *block)
{
	struct kvg_backend *backend = blocks->pool->backend;

	backend->ops->unmap(backend, kv_steal_ptr(&block->mapping));
	backend->ops->segment_free(backend, kv_steal_ptr(&block->segment));
}

/* Whether only orphans have it: then it is theirs alone, for whom its bytes are counted. */
static void consider_orphan(struct kvg_blocks *blocks, struct kvg_block *block)
{
	if (!block->segment || block->orphans < block->users)
		return;
	give_up(blocks, block);
	blocks->orphaned += block->size;
}

void kvg_block_hide(struct kvg_blocks *blocks, struct kvg_block *block)
{
	assert(block->live > 0);
	if (--block->live == 0)
		RB_REMOVE(kvg_block_tree, &blocks->tree, block);
}

void kvg_block_put(struct kvg_blocks *blocks, struct kvg_block *block, bool live, bool orphan)
{
	if (live)
		kvg_block_hide(blocks, block);
	assert(block->users > 0 && block->orphans >= orphan);
	block->orphans -= orphan;
	if (--block->users > 0) {
		consider_orphan(blocks, block);
		return;
	}
	if (!block->segment)
		blocks->orphaned -= block->size;
	give_up(blocks, block);
	assert(blocks->pool->used >= block->size && *block->charged >= block->size);
	blocks->pool->used -= block->size;
	*block->charged -= block->size;
	free(block->samples);
	free(block);
}

void kvg_block_orphan(struct kvg_blocks *blocks, struct kvg_block *block)
{
	block->orphans++;
	consider_orphan(blocks, block);
}

void kvg_block_filled(struct kvg_blocks *blocks, struct kvg_block *block)
{
	struct kvg_backend *backend = blocks->pool->backend;

	assert(block->state == KVG_BLOCK_FILLING);
	backend->ops->unmap(backend, kv_steal_ptr(&block->mapping));
	block->state = KVG_BLOCK_THERE;
}
