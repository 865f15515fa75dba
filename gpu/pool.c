/* SPDX-License-Identifier: Apache-2.0 */
/* Segments, and those that are kept: see pool.h. */
#include "gpu/pool.h"

#include <errno.h>

#include "fs/base.h"

struct spare {
	LIST_ENTRY(spare) entry;
	struct kvg_segment *segment;
};

static int clear(struct kvg_pool *pool, struct kvg_segment *segment, uint64_t size)
{
	struct kvg_backend *backend = pool->backend;
	struct kvg_mapping *mapping;
	int r = backend->ops->map(backend, &segment, 1, true, &mapping);

	if (r < 0)
		return r;
	r = backend->ops->fill(backend, NULL, backend->ops->address(backend, mapping), 0, size);
	if (r == 0)
		r = backend->ops->stream_sync(backend, NULL);
	backend->ops->unmap(backend, mapping);
	return r;
}

/*
 * The last bytes of a device are not taken, though the driver would give them: whoever computes
 * there fails without. Others may have taken what was ours to have.
 */
static int check_room(const struct kvg_pool *pool, uint64_t size)
{
	uint64_t available;
	int r;

	if (pool->margin == 0)
		return 0;
	r = pool->backend->ops->free_bytes(pool->backend, &available);
	if (r < 0)
		return r;
	return available >= size + pool->margin ? 0 : -ENOMEM;
}

/* Memory that this process has freed may come back as it was, with another user's bytes in it. */
static int segment_new(struct kvg_pool *pool, uint64_t size, struct kvg_segment **ret_segment)
{
	struct kvg_backend *backend = pool->backend;
	struct kvg_segment *segment;
	int r = check_room(pool, size);

	if (r == 0)
		r = backend->ops->segment_new(backend, size, &segment);
	if (r < 0)
		return r;
	if (!pool->zeroed)
		r = clear(pool, segment, size);
	if (r < 0) {
		backend->ops->segment_free(backend, segment);
		return r;
	}
	*ret_segment = segment;
	return 0;
}

static void spare_drop(struct kvg_pool *pool)
{
	struct spare *spare = LIST_FIRST(&pool->spares);

	LIST_REMOVE(spare, entry);
	pool->backend->ops->segment_free(pool->backend, spare->segment);
	pool->spare_bytes -= pool->segment;
	free(spare);
}

int kvg_pool_fill(struct kvg_pool *pool)
{
	while (pool->used + pool->spare_bytes + pool->segment <= pool->budget) {
		struct spare *spare = calloc(1, sizeof(*spare));
		int r = spare ? segment_new(pool, pool->segment, &spare->segment) : -ENOMEM;

		if (r < 0) {
			free(spare);
			return r;
		}
		LIST_INSERT_HEAD(&pool->spares, spare, entry);
		pool->spare_bytes += pool->segment;
	}
	return 0;
}

int kvg_pool_take(struct kvg_pool *pool, uint64_t size, struct kvg_segment **ret_segment)
{
	struct spare *spare = LIST_FIRST(&pool->spares);

	if (spare && size == pool->segment) {
		*ret_segment = spare->segment;
		LIST_REMOVE(spare, entry);
		pool->spare_bytes -= size;
		free(spare);
		return 0;
	}
	while (pool->used + pool->spare_bytes + size > pool->budget && !LIST_EMPTY(&pool->spares))
		spare_drop(pool);
	return segment_new(pool, size, ret_segment);
}

uint64_t kvg_pool_missing(const struct kvg_pool *pool)
{
	uint64_t left = pool->budget - kv_min_u64(pool->budget, pool->used + pool->spare_bytes);

	/* Less than a spare is never kept. */
	return left - left % pool->segment;
}

void kvg_pool_drain(struct kvg_pool *pool)
{
	while (!LIST_EMPTY(&pool->spares))
		spare_drop(pool);
}
