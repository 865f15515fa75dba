/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quotas of directories: promises before a write, eviction within a full domain, changes.
 *
 * A domain counts what its files hold by the index, and promises what versions that are not there
 * yet will add: as much as they have, or will have, beyond the blocks that their file has now. A
 * rewrite in place costs nothing, though the devices hold both versions for a while.
 */
#include "fs/charge_internal.h"
#include "fs/core_internal.h"

#include <inttypes.h>

/* Looks in vain before a domain counts as full, and between them; see evict_store.c. */
#define QUIET_MAX 10u
#define QUIET_SLICE_MS 20u
/* Who needs room makes a little more, so that not every write has to: this share of the limit. */
#define AHEAD_SHARE 64u

/* ---- Promises ---- */

/* Looks up whose quota VERSION counts against, if that may have changed. No locks held. */
static int learn_domain(struct kv_version *version)
{
	struct kv_index *index = version->file->core->index;
	uint64_t epoch = kv_index_domain_epoch(index);
	struct kv_quota *quota = &version->quota;
	struct kv_inode inode = {0};
	bool known;
	int r;

	(void)pthread_mutex_lock(&version->lock);
	known = quota->known && quota->epoch == epoch;
	(void)pthread_mutex_unlock(&version->lock);
	if (known)
		return 0;
	r = kv_index_get(index, version->file->ino, &inode);
	if (r < 0 && r != -ENOENT)
		return r;
	KV_LOCKED(&version->lock);
	if (quota->promised > 0 && quota->domain != inode.domain) {
		(void)kv_index_charge(index, quota->domain, 0, quota->promised);
		quota->promised = 0;
	}
	quota->credit = kv_max_u64(quota->credit, inode.blocks);
	quota->domain = inode.domain;
	quota->pinned = inode.flags & KV_INODE_PINNED;
	quota->epoch = epoch;
	quota->known = true;
	return 0;
}

struct demand {
	uint32_t domain;
	uint64_t wanted; /* what is to be promised now, beyond what is */
	bool hopeless;   /* the file alone is too large */
};

static int promise_pinned(struct kv_index *index, const struct kv_quota *quota, uint64_t target)
{
	return quota->pinned && target > quota->promised
		       ? kv_index_pin_check(index, quota->domain, target)
		       : 0;
}

/* -EDQUOT with ret_demand: what room is to be made for. */
static int try_promise(struct kv_version *version, uint64_t growth, struct demand *ret_demand)
{
	struct kv_index *index = version->file->core->index;
	struct kv_quota *quota = &version->quota;
	struct kv_domain_info info;
	KV_LOCKED(&version->lock);
	uint64_t after = version->blocks + version->unwritten + quota->pending + growth;
	uint64_t target = after > quota->credit ? after - quota->credit : 0;
	int r = promise_pinned(index, quota, target);

	*ret_demand = (struct demand){.domain = quota->domain, .hopeless = r < 0};
	if (r == 0 && quota->domain != 0) {
		ret_demand->wanted = target > quota->promised ? target - quota->promised : 0;
		r = kv_index_charge(index, quota->domain, target, quota->promised);
		if (r == 0)
			quota->promised = target;
		else if (kv_index_domain(index, quota->domain, &info) == 0)
			ret_demand->hopeless = after > info.limit;
	}
	if (r == 0)
		quota->pending += growth;
	return r;
}

void kv_quota_grown(struct kv_version *version, uint64_t growth)
{
	if (growth == 0)
		return;
	KV_LOCKED(&version->lock);
	assert(version->quota.pending >= growth);
	version->quota.pending -= growth;
	kv_charge_grown_locked(version, growth);
}

void kv_quota_drop_locked(struct kv_version *version)
{
	struct kv_quota *quota = &version->quota;

	if (quota->promised > 0)
		(void)kv_index_charge(
			version->file->core->index, quota->domain, 0, quota->promised);
	quota->promised = 0;
}

static int refuse(struct kv_version *version, int r)
{
	KV_LOCKED(&version->lock);

	version->quota.refused = true;
	return r;
}

/* ---- Making room ---- */

static uint64_t room(const struct kv_domain_info *info)
{
	uint64_t taken = info->used + info->promised;

	return info->limit > taken ? info->limit - taken : 0;
}

static bool has_room(struct kv_core *core, const struct kv_eviction *eviction)
{
	struct kv_domain_info info;

	return kv_index_domain(core->index, eviction->domain, &info) < 0 ||
	       (room(&info) >= eviction->wanted && info.used + info.promised <= info.limit);
}

/* One thread evicts in a domain; the others wait for it. False if this one waited. */
static bool enter_domain(struct kv_core *core, uint32_t domain)
{
	KV_LOCKED(&core->quotas.lock);

	if (!core->quotas.evicting[domain]) {
		core->quotas.evicting[domain] = true;
		return true;
	}
	(void)kv_cond_wait_ms(&core->quotas.changed, &core->quotas.lock, KV_WAIT_SLICE_MS);
	return false;
}

static void leave_domain(struct kv_core *core, uint32_t domain)
{
	KV_LOCKED(&core->quotas.lock);

	core->quotas.evicting[domain] = false;
	(void)pthread_cond_broadcast(&core->quotas.changed);
}

enum outcome {
	OUTCOME_GAINED, /* try again at once */
	OUTCOME_WAIT,   /* something will become evictable */
	OUTCOME_NOTHING,
};

static enum outcome evict_in_domain(struct kv_core *core, uint32_t domain, uint64_t wanted)
{
	struct kv_eviction eviction = {.domain = domain, .enough = has_room};
	struct kv_domain_info info;

	if (kv_index_domain(core->index, domain, &info) < 0)
		return OUTCOME_GAINED;
	if (!enter_domain(core, domain))
		return OUTCOME_GAINED;
	eviction.wanted = kv_min_u64(wanted + info.limit / AHEAD_SHARE, info.limit);
	kv_evict_files(core, &eviction);
	leave_domain(core, domain);
	if (eviction.evicted > 0 || (eviction.wanted = wanted, has_room(core, &eviction)))
		return OUTCOME_GAINED;
	return eviction.leased > 0 ? OUTCOME_WAIT : OUTCOME_NOTHING;
}

static int promise(struct kv_version *version, uint64_t growth)
{
	struct kv_core *core = version->file->core;
	int64_t until = kv_monotonic_ms() + kv_evict_patience_ms(core);
	unsigned quiet = 0;
	struct demand demand = {0};
	int r;

	for (;;) {
		r = learn_domain(version);
		if (r == 0)
			r = try_promise(version, growth, &demand);
		if (r != -EDQUOT && r != -ENOSPC)
			return r;
		if (demand.hopeless || atomic_load(&core->stopping) || kv_monotonic_ms() > until)
			return refuse(version, r);
		switch (evict_in_domain(core, demand.domain, demand.wanted)) {
		case OUTCOME_GAINED:
			quiet = 0;
			continue;
		case OUTCOME_WAIT:
			quiet = 0;
			(void)usleep(QUIET_SLICE_MS * 1000);
			continue;
		case OUTCOME_NOTHING:
			break;
		}
		if (kv_evict_wait(core))
			quiet = 0;
		else if (quiet++ == QUIET_MAX)
			return refuse(version, r);
		else
			(void)usleep(QUIET_SLICE_MS * 1000);
	}
}

int kv_quota_promise(struct kv_version *version, uint64_t growth)
{
	int r = kv_charge_grow(version, growth);

	if (r < 0 || growth == 0)
		return r;
	r = promise(version, growth);
	if (r < 0) {
		KV_LOCKED(&version->lock);
		kv_charge_grown_locked(version, growth);
	}
	return r;
}

static bool is_over(struct kv_core *core, uint32_t domain)
{
	struct kv_domain_info info;

	return kv_index_domain(core->index, domain, &info) == 0 &&
	       info.used + info.promised > info.limit;
}

void kv_quota_trim(struct kv_core *core)
{
	uint32_t count = kv_index_domain_count(core->index);

	for (uint32_t i = 1; i < count && !atomic_load(&core->stopping); i++)
		if (is_over(core, i))
			(void)evict_in_domain(core, i, 0);
}

void kv_quota_kick(struct kv_core *core)
{
	uint32_t count = kv_index_domain_count(core->index);

	for (uint32_t i = 1; i < count; i++) {
		if (!is_over(core, i))
			continue;
		KV_LOCKED(&core->evictor.lock);
		core->evictor.kicked = true;
		(void)pthread_cond_signal(&core->evictor.wanted);
		return;
	}
}

/* ---- Setting ---- */

/* Waits for other walks: what one sets another may be walking over. */
static void walk_begin(struct kv_core *core)
{
	KV_LOCKED(&core->quotas.lock);

	while (core->quotas.walking)
		(void)kv_cond_wait_ms(&core->quotas.changed, &core->quotas.lock, KV_WAIT_SLICE_MS);
	core->quotas.walking = true;
}

static void walk_end(struct kv_core *core)
{
	KV_LOCKED(&core->quotas.lock);

	core->quotas.walking = false;
	(void)pthread_cond_broadcast(&core->quotas.changed);
}

/* To its end, or to that of the core: then the next mount goes on. */
static int walk(struct kv_core *core, uint32_t domain)
{
	struct kv_quota_walk walk = {0};
	int r;

	do {
		r = kv_index_quota_step(core->index, domain, &walk);
	} while (r == 1 && !atomic_load(&core->stopping));
	return r < 0 ? r : 0;
}

int kv_core_set_quota(struct kv_core *core, uint64_t ino, uint64_t limit_blocks)
{
	uint32_t domain;
	int r;

	walk_begin(core);
	r = kv_index_quota_set(core->index, ino, limit_blocks, &domain);
	if (r == 0)
		r = walk(core, domain);
	walk_end(core);
	kv_quota_kick(core);
	return r;
}

void kv_quota_resume(struct kv_core *core)
{
	uint32_t count = kv_index_domain_count(core->index);

	for (uint32_t i = 1; i < count; i++) {
		struct kv_domain_info info;

		if (kv_index_domain(core->index, i, &info) < 0 ||
			(info.state != KV_DOMAIN_ADOPTING && info.state != KV_DOMAIN_LEAVING))
			continue;
		walk_begin(core);
		int r = walk(core, i);
		walk_end(core);
		if (r < 0)
			kv_log_warning("quota",
				"cannot go on with a quota's walk dir_ino=%" PRIu64 " error=%s",
				info.ino, strerror(-r));
	}
}
