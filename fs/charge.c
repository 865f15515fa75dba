/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a version counts against its writer's limits.
 *
 * While it is being written: all blocks that it has or was promised, those that it shares with what
 * it was made from too, for it may come to own them. Once it is published its blocks can be
 * evicted, and only promises to a writer who goes on are left.
 *
 * Until it is written back: its dirty blocks, published or not. A user who has more of them than
 * his share waits until there are fewer, so that others find room in DRAM for theirs.
 */
#include "fs/charge_internal.h"
#include "fs/users.h"

/*
 * Who is held back goes on all the same when nothing of his was written back for that long: a
 * device may hang, or all that he has are the ends of files that still grow.
 */
#define STALLED_MS 500
#define LOOK_MS 50

void kv_version_set_user(struct kv_version *version, struct kv_user *user)
{
	KV_LOCKED(&version->lock);

	assert(!version->user && version->charge == 0);
	version->user = kv_user_ref(user);
}

int kv_charge_grow(struct kv_version *version, uint64_t growth)
{
	uint64_t after;
	int r = 0;

	/* While it is being written nobody sets it. */
	if (!version->user)
		return 0;
	KV_LOCKED(&version->lock);
	after = version->blocks + version->unwritten + version->growing + growth;
	if (after > version->charge) {
		r = kv_user_take(version->user, after - version->charge);
		if (r < 0)
			return r;
		version->charge = after;
	}
	version->growing += growth;
	return 0;
}

/* Nothing of it counts any more, nor will. */
static void drop_user_locked(struct kv_version *version)
{
	if (version->charge == 0 && version->dirty == 0 && version->state != KV_VERSION_WRITING)
		version->user = kv_user_unref(version->user);
}

void kv_charge_settle_locked(struct kv_version *version)
{
	uint64_t held = version->unwritten;

	if (version->state == KV_VERSION_WRITING)
		held += version->blocks + version->growing;
	if (version->charge > held) {
		kv_user_give(version->user, version->charge - held);
		version->charge = held;
	}
	drop_user_locked(version);
}

void kv_charge_grown_locked(struct kv_version *version, uint64_t growth)
{
	if (!version->user)
		return;
	assert(version->growing >= growth);
	version->growing -= growth;
	kv_charge_settle_locked(version);
}

void kv_charge_move_locked(struct kv_version *version, struct kv_version *from)
{
	if (version->user == from->user && version->charge == 0) {
		version->charge = from->charge;
		from->charge = 0;
	}
	kv_charge_settle_locked(from);
}

void kv_charge_drop_locked(struct kv_version *version)
{
	if (version->charge > 0)
		kv_user_give(version->user, version->charge);
	version->charge = 0;
	version->user = kv_user_unref(version->user);
}

void kv_charge_dirty_locked(struct kv_version *version, uint64_t blocks)
{
	version->dirty += blocks;
	kv_user_dirtied(version->user, blocks);
	kv_core_dirty_add(version->file->core, blocks);
}

void kv_charge_clean_locked(struct kv_version *version, uint64_t blocks)
{
	assert(version->dirty >= blocks);
	version->dirty -= blocks;
	kv_core_dirty_sub(version->file->core, blocks, kv_user_cleaned(version->user, blocks));
	drop_user_locked(version);
}

void kv_charge_hold(struct kv_version *version)
{
	struct kv_core *core = version->file->core;
	struct kv_user *user = version->user;
	int64_t since_ms = kv_monotonic_ms();
	uint64_t progress = 0;

	if (!kv_user_is_over(user) || !kv_user_hold(user))
		return;
	kv_stat_add(&core->stats->throttled, 1);
	while (kv_user_is_over(user) && !atomic_load(&core->stopping)) {
		if (kv_user_progress(user) != progress) {
			progress = kv_user_progress(user);
			since_ms = kv_monotonic_ms();
		}
		if (kv_monotonic_ms() - since_ms > STALLED_MS)
			break;
		/* What is published, and of what is not the chunks that are whole. */
		kv_writeback_kick(core, true);
		KV_LOCKED(&core->writeback.lock);
		if (kv_user_is_over(user))
			(void)kv_cond_wait_ms(
				&core->writeback.settled, &core->writeback.lock, LOOK_MS);
	}
	kv_user_let_go(user);
}
