/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who holds which blocks: what chunk maps say, gathered to be compared with bitmaps and reference
 * counts, or to make those anew.
 *
 * Two bits a block of the devices, and a record a shared extent. Single-threaded. Errors: -ENOMEM.
 */
#ifndef KVFS_INDEX_TALLY_H
#define KVFS_INDEX_TALLY_H

#include "index/index_internal.h"

struct kv_tally_device {
	uint64_t *held;   /* bit a block: some chunk holds it; whole groups */
	uint64_t *starts; /* some extent begins there */
};

struct kv_tally {
	struct kv_tally_device devices[KV_DEVICES_MAX];
	struct kv_overlay shared; /* by REFCOUNT key: how many chunks hold the extent, if several */
};

/* On failure, too, kv_tally_done is to be called. */
int kv_tally_init(struct kv_tally *tally, const struct kv_index_store *store);
void kv_tally_done(struct kv_tally *tally);

/* A chunk holds EXTENT, which lies on its device: 0, or -EUCLEAN if another extent has some of its
 * blocks. */
int kv_tally_hold(struct kv_tally *tally, const struct kv_extent *extent);
/* Whether that would be 0. */
bool kv_tally_may_hold(const struct kv_tally *tally, const struct kv_extent *extent);

#endif
