/* SPDX-License-Identifier: Apache-2.0 */
/* What versions count against the limits of who writes them: see charge.c. */
#ifndef KVFS_FS_CHARGE_INTERNAL_H
#define KVFS_FS_CHARGE_INTERNAL_H

#include "fs/core_internal.h"

/* VERSION will grow by GROWTH blocks: -EDQUOT if that is more than its writer may have. */
int kv_charge_grow(struct kv_version *version, uint64_t growth);
/* They are in version->blocks now, or will not come. */
void kv_charge_grown_locked(struct kv_version *version, uint64_t growth);
/* VERSION may have fewer blocks than before. */
void kv_charge_settle_locked(struct kv_version *version);
/* Both locked: VERSION goes on where FROM was published, with its promises. */
void kv_charge_move_locked(struct kv_version *version, struct kv_version *from);
/* VERSION is gone. */
void kv_charge_drop_locked(struct kv_version *version);

/* BLOCKS more of VERSION are in DRAM alone, or BLOCKS fewer. */
void kv_charge_dirty_locked(struct kv_version *version, uint64_t blocks);
void kv_charge_clean_locked(struct kv_version *version, uint64_t blocks);
/* Holds VERSION's writer back while too much of his is to be written back. No locks held. */
void kv_charge_hold(struct kv_version *version);

#endif
