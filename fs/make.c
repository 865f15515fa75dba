/* SPDX-License-Identifier: Apache-2.0 */
/* Room for the index to grow: where it has none, files are evicted for that. */
#include "fs/core_internal.h"
#include "fs/writeback_internal.h"

/* Files that go before the index is asked again. */
#define FILES_AT_ONCE 256u
/* Enough of them free as much as the index wants. */
#define ROUNDS_MAX 256u

static bool has_evicted(struct kv_core *core, const struct kv_eviction *eviction)
{
	return eviction->evicted >= FILES_AT_ONCE || !kv_index_is_short(core->index);
}

bool kv_core_index_room(struct kv_core *core)
{
	struct kv_eviction eviction = {.domain = KV_DOMAIN_ANY, .enough = has_evicted};
	KV_LOCKED(&core->index_room_lock);

	/* Whoever was here before may have done it. */
	if (!kv_index_is_short(core->index))
		return true;
	kv_evict_files(core, &eviction);
	/* What they freed counts when it is committed. */
	if (kv_index_wait(core->index, kv_index_sequence(core->index)) < 0)
		return false;
	return eviction.evicted > 0 || !kv_index_is_short(core->index);
}

int kv_core_make(struct kv_core *core, const struct kv_make *make, struct kv_inode *ret_inode)
{
	int r = kv_index_make(core->index, make, ret_inode);

	for (unsigned i = 0; i < ROUNDS_MAX && r == -ENOSPC && kv_index_is_short(core->index) &&
			     kv_core_index_room(core);
		i++)
		r = kv_index_make(core->index, make, ret_inode);
	return r;
}
