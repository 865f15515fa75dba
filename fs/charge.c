/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a version being written counts against its writer's limit: all blocks that it has or was
 * promised, those that it shares with what it was made from too, for it may come to own them. Once
 * it is published its blocks can be evicted, and only promises to a writer who goes on are left.
 */
#include "fs/charge_internal.h"
#include "fs/users.h"

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

void kv_charge_settle_locked(struct kv_version *version)
{
	uint64_t held = version->unwritten;

	if (version->state == KV_VERSION_WRITING)
		held += version->blocks + version->growing;
	if (version->charge > held) {
		kv_user_give(version->user, version->charge - held);
		version->charge = held;
	}
	if (version->charge == 0 && version->state != KV_VERSION_WRITING)
		version->user = kv_user_unref(version->user);
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
