/* SPDX-License-Identifier: Apache-2.0 */
/* Residency on a host backend whose segments are counted, and fail on demand. */
#ifndef KVFS_TESTS_UNIT_UNIT_HBM_H
#define KVFS_TESTS_UNIT_UNIT_HBM_H

#include <errno.h>
#include <stdlib.h>

#include "gpu/hbm.h"
#include "tests/unit/unit_fs.h"

#define MIB (UINT64_C(1) << 20)
#define GRANULE (2 * MIB)
#define SEGMENT (8 * MIB)
#define BUDGET (32 * MIB)

static struct kvg_backend_ops ops;
static struct kvg_backend *backend;
static struct kvg_hbm *hbm;
static struct {
	unsigned live;      /* segments */
	unsigned fail_at;   /* the call of segment_new that fails, 1 for the next */
	unsigned fails;     /* how many from there on */
	uint64_t available; /* bytes of the device */
	uint64_t cleared;   /* bytes */
	bool synced;        /* since then */
	unsigned revoked;
	unsigned gone;
	uint64_t gone_ino;
	struct kvg_entry *expired;
	struct kvg_map *maps[64];
} seen;

static inline int counted_new(
	struct kvg_backend *b, uint64_t size, struct kvg_segment **ret_segment)
{
	int r;

	if (seen.fail_at > 0 && --seen.fail_at == 0 && seen.fails > 0) {
		seen.fails--;
		seen.fail_at = 1;
		return -ENOMEM;
	}
	r = kvg_backend_host.segment_new(b, size, ret_segment);
	seen.live += r == 0;
	return r;
}

static inline void counted_free(struct kvg_backend *b, struct kvg_segment *segment)
{
	seen.live -= segment != NULL;
	kvg_backend_host.segment_free(b, segment);
}

static inline int counted_fill(
	struct kvg_backend *b, kvg_stream stream, kvg_devptr to, uint8_t byte, uint64_t size)
{
	assert_int_equal(byte, 0);
	seen.cleared += size;
	seen.synced = false;
	return kvg_backend_host.fill(b, stream, to, byte, size);
}

static inline int counted_sync(struct kvg_backend *b, kvg_stream stream)
{
	seen.synced = true;
	return kvg_backend_host.stream_sync(b, stream);
}

static inline int counted_free_bytes(struct kvg_backend *b, uint64_t *ret_bytes)
{
	(void)b;
	*ret_bytes = seen.available;
	return 0;
}

static inline void on_revoke(void *arg, struct kvg_map *map, int64_t deadline_ms)
{
	(void)arg;
	(void)deadline_ms;
	seen.maps[seen.revoked++] = map;
}

static inline void on_gone(void *arg, struct kvg_entry *entry)
{
	(void)arg;
	seen.gone++;
	seen.gone_ino = entry->key.ino;
}

static inline void on_expired(void *arg, struct kvg_entry *entry)
{
	(void)arg;
	seen.expired = entry;
}

static bool zeroed = true;
static uint64_t margin;
static uint64_t share = BUDGET;

static inline struct kvg_hbm_options hbm_options(void)
{
	return (struct kvg_hbm_options){
		.backend = backend,
		.budget = BUDGET,
		.share = share,
		.segment = SEGMENT,
		.granularity = GRANULE,
		.margin = margin,
		.zeroed = zeroed,
		.revoke = on_revoke,
		.expired = on_expired,
		.gone = on_gone,
	};
}

static inline int setup(void **state)
{
	const struct kvg_backend_open open = {0};
	struct kvg_hbm_options options;
	char reasons[256];

	(void)state;
	memset(&seen, 0, sizeof(seen));
	seen.available = BUDGET;
	if (kvg_backend_choose("host", &open, &backend, reasons, sizeof(reasons)) < 0)
		return -1;
	ops = kvg_backend_host;
	ops.segment_new = counted_new;
	ops.segment_free = counted_free;
	ops.fill = counted_fill;
	ops.free_bytes = counted_free_bytes;
	ops.stream_sync = counted_sync;
	backend->ops = &ops;
	options = hbm_options();
	return kvg_hbm_new(&options, &hbm);
}

static inline int setup_used(void **state)
{
	int r;

	zeroed = false;
	r = setup(state);
	zeroed = true;
	return r;
}

static inline int setup_shared(void **state)
{
	int r;

	margin = GRANULE;
	r = setup(state);
	margin = 0;
	return r;
}

static inline int setup_halves(void **state)
{
	int r;

	share = BUDGET / 2;
	r = setup(state);
	share = BUDGET;
	return r;
}

static inline int teardown(void **state)
{
	(void)state;
	kvg_hbm_free(hbm);
	kvg_backend_close(backend);
	return seen.live == 0 ? 0 : -1;
}

static inline struct kvg_key key_of(uint64_t ino)
{
	return (struct kvg_key){.ino = ino, .version = 1, .uid = 7};
}

static inline const struct kvg_hbm_usage *usage(void)
{
	static struct kvg_hbm_usage last;

	kvg_hbm_usage(hbm, &last);
	return &last;
}

static inline struct kvg_entry *admit(uint64_t ino, uint64_t size)
{
	const struct kvg_key key = key_of(ino);
	struct kvg_entry *entry;

	assert_int_equal(kvg_hbm_admit(hbm, &key, size, 0, &entry), 0);
	return entry;
}

static inline struct kvg_entry *resident(uint64_t ino, uint64_t size)
{
	struct kvg_entry *entry = admit(ino, size);

	kvg_hbm_staged(entry);
	return entry;
}

static inline struct kvg_entry *find(uint64_t ino)
{
	const struct kvg_key key = key_of(ino);

	return kvg_hbm_find(hbm, &key);
}

static inline int try_admit(uint64_t ino, uint64_t size, int64_t now_ms)
{
	const struct kvg_key key = key_of(ino);
	struct kvg_entry *entry;

	return kvg_hbm_admit(hbm, &key, size, now_ms, &entry);
}

#endif
