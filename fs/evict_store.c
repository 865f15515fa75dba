/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Store eviction: makes room by taking the names, then the space, of the files used longest ago.
 *
 * Works in rounds. A writer that finds the store full asks for one and waits for its end; a round
 * that found nothing to evict, and nothing under way that would free space or become evictable, is
 * what ENOSPC rests on.
 */
#include "fs/core_internal.h"

#include <inttypes.h>

#define CANDIDATES_AT_ONCE 64u
/* The index rounds times of use down to that. */
#define GRAIN_NS 4096
/* So many files that are kept are looked at before a round gives up for now. */
#define KEPT_MAX 4096u
#define ROUNDS_MAX 200u
/* How long one round waits, in slices and in all, for what is under way. */
#define SLICE_MS 50u
#define PATIENCE_MS 10000u
/* ... and behind the end of the last lease. */
#define LEASE_SLACK_MS 2000u
#define PINNED_SLICE_MS 5u
/*
 * Looks in vain, with nothing under way, before the store counts as full: a file that was just
 * closed still is open until the kernel's RELEASE has come.
 */
#define QUIET_MAX 10u
#define QUIET_SLICE_MS 20u
/*
 * What was freed is not free before its commit is durable, and the kernel has forgotten the nodes
 * that pin it: that long it is waited for, rather than more being evicted. What has not come by
 * then is held by somebody who reads it.
 */
#define PINNED_MS 3000
/* Below 1/20 of the store, or this much, is low; eviction goes on to twice that. */
#define LOW_SHARE 20u
#define LOW_MIN_BLOCKS ((UINT64_C(64) << 20) / KV_BLOCK_SIZE)
#define LOW_MIN_SHARE 8u

static uint64_t low_watermark(uint64_t total)
{
	return kv_max_u64(total / LOW_SHARE, kv_min_u64(LOW_MIN_BLOCKS, total / LOW_MIN_SHARE));
}

struct room {
	uint64_t total; /* blocks, all of these */
	uint64_t free;  /* could be promised now */
	uint64_t freed; /* not free yet */
};

static struct room room_of(struct kv_core *core)
{
	struct kv_space_usage usage;

	kv_space_usage(core->space, &usage);
	uint64_t taken = usage.used + usage.busy + usage.reserved;
	return (struct room){
		.total = usage.total,
		.free = usage.total > taken ? usage.total - taken : 0,
		.freed = usage.freed,
	};
}

/* ---- Names ---- */

struct name {
	struct name *next;
	uint64_t parent;
	size_t length;
	char text[];
};

static void note_name(void *arg, uint64_t parent, const char *text, size_t length)
{
	struct name **names = arg;
	struct name *name = malloc(sizeof(*name) + length + 1);

	/* The kernel's entry then lives until its time-out: a look-up behind it finds nothing. */
	if (!name)
		return;
	*name = (struct name){.next = *names, .parent = parent, .length = length};
	memcpy(name->text, text, length);
	name->text[length] = '\0';
	*names = name;
}

/* What is told while the index takes names away. */
struct unnaming {
	struct kv_core *core;
	struct name *names;
};

static void note_unnamed(void *arg, uint64_t parent, const char *text, size_t length)
{
	struct unnaming *unnaming = arg;

	note_name(&unnaming->names, parent, text, length);
}

/* Tells the FUSE side, if R says that they are gone. Returns R. */
static int tell_names(struct unnaming *unnaming, int r)
{
	struct kv_core *core = unnaming->core;
	struct name *name;

	while ((name = unnaming->names)) {
		unnaming->names = name->next;
		if (r == 0 && core->hooks.name_gone)
			core->hooks.name_gone(
				core->hooks.arg, name->parent, name->text, name->length);
		free(name);
	}
	return r;
}

int kv_core_unname(
	struct kv_core *core, uint64_t ino, int64_t expected_last_use_ns, bool quarantine)
{
	struct unnaming unnaming = {.core = core};

	return tell_names(
		&unnaming, kv_index_evict(core->index, ino, expected_last_use_ns, quarantine,
				   kv_core_now_ns(core), note_unnamed, &unnaming));
}

static bool is_leased(void *arg, uint64_t ino)
{
	const struct unnaming *unnaming = arg;

	return kv_core_lease_left(unnaming->core, ino) > 0;
}

/* ---- Choosing ---- */

enum verdict {
	EVICT,
	KEEP,
	KEEP_LEASED,
};

/* FILE was used since the index heard of it: it must not be among the oldest. Shard locked. */
static bool was_touched(struct kv_file *file, const struct kv_index_use *use, uint32_t *ret_hits)
{
	/* What is quarantined stays the first to go. */
	if (file->quarantined || file->touched_ns == 0 ||
		file->touched_ns / GRAIN_NS <= use->last_use_ns / GRAIN_NS)
		return false;
	*ret_hits = file->hits;
	file->hits = 0;
	return true;
}

static enum verdict judge_file(struct kv_core *core, const struct kv_index_use *use)
{
	struct kv_shard *shard = kv_shard_of(core, use->ino);
	struct kv_file *file = kv_file_find(core, use->ino);
	enum verdict verdict = EVICT;
	int64_t touched_ns = INT64_MIN;
	uint32_t hits = 0;

	if (!file)
		return EVICT;
	{
		KV_LOCKED(&shard->lock);
		if (atomic_load(&file->opens) > 0 || file->writers > 0 || file->inflight > 0)
			verdict = KEEP;
		else if (was_touched(file, use, &hits))
			touched_ns = file->touched_ns;
	}
	if (touched_ns != INT64_MIN) {
		verdict = KEEP;
		(void)kv_index_touch(core->index, use->ino, touched_ns, hits, INT64_MIN);
	}
	kv_file_put(file);
	return verdict;
}

static enum verdict judge(struct kv_core *core, const struct kv_index_use *use)
{
	int64_t left_ms = kv_core_lease_left(core, use->ino);
	enum verdict verdict = judge_file(core, use);

	if (verdict == KEEP || left_ms == 0)
		return verdict;
	/* A look-up is no use, but the next look at the oldest need not find it there. */
	int64_t noted_ns =
		kv_core_now_ns(core) - ((int64_t)core->options.lease_ms - left_ms) * 1000000;
	if (noted_ns > use->last_use_ns)
		(void)kv_index_touch(core->index, use->ino, noted_ns, 0, INT64_MIN);
	return KEEP_LEASED;
}

static void mark_unlinked(struct kv_core *core, uint64_t ino)
{
	struct kv_shard *shard = kv_shard_of(core, ino);
	struct kv_file *file = kv_file_find(core, ino);

	kv_core_changed(core, ino);
	if (!file)
		return;
	(void)pthread_mutex_lock(&shard->lock);
	file->unlinked = true;
	/* Reaped right away; if somebody opens it in between, by the reaper later. */
	file->reap_queued = true;
	(void)pthread_mutex_unlock(&shard->lock);
	kv_file_put(file);
}

static void evict_file(
	struct kv_core *core, const struct kv_index_use *use, struct kv_eviction *eviction)
{
	struct unnaming unnaming = {.core = core};
	enum verdict verdict = judge(core, use);

	if (verdict != EVICT) {
		eviction->leased += verdict == KEEP_LEASED;
		return;
	}
	if (tell_names(&unnaming, kv_index_evict_unless(core->index, use, kv_core_now_ns(core),
					  is_leased, note_unnamed, &unnaming)) < 0)
		return;
	mark_unlinked(core, use->ino);
	uint64_t freed = kv_reap_ino(core, use->ino);
	eviction->blocks += freed;
	eviction->evicted++;
	atomic_store(&core->evictor.evicted_ms, kv_monotonic_ms());
	kv_stat_add(&core->stats->evicted_store, 1);
	kv_stat_add(&core->stats->evicted_store_bytes, freed << KV_BLOCK_SHIFT);
}

/* ---- On request ---- */

/* What a person asked for waits for the write-back: a file that is not durable is not evictable. */
static int settle_current(struct kv_file *file)
{
	struct kv_version *version;
	int r = kv_file_current(file, &version);

	if (r < 0)
		return r == -ENOENT ? 0 : r;
	r = kv_version_sync(version);
	kv_version_unref(version);
	return r;
}

/* Looks do not count: whoever names a file to have it evicted has just looked at it. */
static bool was_opened_lately(struct kv_core *core, const struct kv_inode *inode)
{
	int64_t lease_ns = (int64_t)core->options.lease_ms * 1000000;

	return inode->hits > 0 && kv_core_now_ns(core) - inode->last_use_ns < lease_ns;
}

static int why_kept(struct kv_core *core, const struct kv_inode *inode, bool leased)
{
	struct kv_file *file = kv_file_find(core, inode->ino);
	int r = 0;

	if (file) {
		KV_LOCKED(&kv_shard_of(core, inode->ino)->lock);
		if (atomic_load(&file->opens) > 0 || file->writers > 0 || file->inflight > 0)
			r = -EBUSY;
	}
	kv_file_put(file);
	if (r == 0 && inode->flags & KV_INODE_PINNED)
		r = -EPERM;
	if (r == 0 && !leased && was_opened_lately(core, inode))
		r = -EAGAIN;
	return r;
}

int kv_core_evict(struct kv_core *core, uint64_t ino, bool leased, uint64_t *ret_bytes)
{
	struct kv_file *file = kv_file_find(core, ino);
	struct unnaming unnaming = {.core = core};
	struct kv_index_use use = {.ino = ino};
	struct kv_inode inode;
	int r = 0;

	if (file) {
		r = settle_current(file);
		kv_file_note_uses(file);
	}
	kv_file_put(file);
	if (r == 0)
		r = kv_index_get(core->index, ino, &inode);
	if (r == 0)
		r = why_kept(core, &inode, leased);
	if (r < 0)
		return r;
	use.last_use_ns = inode.last_use_ns;
	/* -EAGAIN: somebody has just used it. -EBUSY: somebody has just pinned it. */
	r = tell_names(&unnaming, kv_index_evict_unless(core->index, &use, kv_core_now_ns(core),
					  NULL, note_unnamed, &unnaming));
	if (r < 0)
		return r;
	mark_unlinked(core, ino);
	*ret_bytes = kv_reap_ino(core, ino) << KV_BLOCK_SHIFT;
	kv_stat_add(&core->stats->evicted_store, 1);
	kv_stat_add(&core->stats->evicted_store_bytes, *ret_bytes);
	return 0;
}

/* ---- To make room ---- */

static bool is_enough(struct kv_core *core, const struct kv_eviction *eviction)
{
	return atomic_load(&core->stopping) || eviction->enough(core, eviction);
}

static void evict_scope(
	struct kv_core *core, const struct kv_index_scope *scope, struct kv_eviction *eviction)
{
	struct kv_index_use uses[CANDIDATES_AT_ONCE], after;
	unsigned kept = 0;
	bool first = true;

	while (kept < KEPT_MAX && !is_enough(core, eviction)) {
		unsigned before = eviction->evicted;
		ssize_t n = kv_index_oldest(
			core->index, scope, first ? NULL : &after, uses, CANDIDATES_AT_ONCE);
		if (n <= 0)
			break;
		for (ssize_t i = 0; i < n && !is_enough(core, eviction); i++)
			evict_file(core, &uses[i], eviction);
		after = uses[n - 1];
		first = false;
		kept += (unsigned)n - (eviction->evicted - before);
	}
}

void kv_evict_files(struct kv_core *core, struct kv_eviction *eviction)
{
	int64_t ttl_ns = (int64_t)core->options.unread_ttl_ms * 1000000;
	const struct kv_index_scope unread = {
		.domain = eviction->domain,
		.unread = true,
		.before_ns = kv_core_now_ns(core) - ttl_ns,
	};
	const struct kv_index_scope all = {.domain = eviction->domain};

	if (ttl_ns > 0)
		evict_scope(core, &unread, eviction);
	evict_scope(core, &all, eviction);
}

static bool has_freed(struct kv_core *core, const struct kv_eviction *eviction)
{
	(void)core;
	return eviction->blocks >= eviction->wanted;
}

/* ---- Rounds ---- */

/* Of what was freed, the blocks that will be free in a moment. The evictor's thread only. */
static uint64_t coming_blocks(struct kv_core *core)
{
	struct kv_evictor *evictor = &core->evictor;
	uint64_t freed = room_of(core).freed;

	/* Evictions for quotas go on elsewhere: they say nothing of what is waited for here. */
	evictor->held = kv_monotonic_ms() - evictor->own_ms < PINNED_MS
				? kv_min_u64(evictor->held, freed)
				: freed;
	return freed - evictor->held;
}

/* Space of files evicted just now that is not free yet. */
static bool has_pinned(struct kv_core *core)
{
	int64_t evicted_ms = atomic_load(&core->evictor.evicted_ms);

	return room_of(core).freed > 0 && kv_monotonic_ms() - evicted_ms < PINNED_MS;
}

/* True if space may still come from what is under way: orphans, commits, versions that become
 * evictable. */
bool kv_evict_wait(struct kv_core *core)
{
	bool any;

	{
		KV_LOCKED(&core->reaper.lock);
		any = core->reaper.working || !STAILQ_EMPTY(&core->reaper.queue);
	}
	kv_reap_drain(core, SLICE_MS);
	if (!any && has_pinned(core)) {
		any = true;
		(void)usleep(PINNED_SLICE_MS * 1000);
	}
	kv_writeback_hurry(core);
	KV_LOCKED(&core->writeback.lock);
	if (!TAILQ_EMPTY(&core->writeback.inflight)) {
		any = true;
		(void)kv_cond_wait_ms(&core->writeback.settled, &core->writeback.lock, SLICE_MS);
	}
	return any;
}

int64_t kv_evict_patience_ms(const struct kv_core *core)
{
	return kv_max_u64(PATIENCE_MS, core->options.lease_ms + LEASE_SLACK_MS);
}

/* Something may still come of a round that evicted nothing: waits a little for it. */
static bool may_go_on(struct kv_core *core, const struct kv_eviction *eviction, unsigned *quiet)
{
	if (kv_evict_wait(core)) {
		*quiet = 0;
		return true;
	}
	(void)usleep(QUIET_SLICE_MS * 1000);
	if (eviction->leased > 0)
		*quiet = 0;
	return (*quiet)++ < QUIET_MAX;
}

/* Evicts until WANTED blocks are free, or will be in a moment. True if something went. */
static bool evict_until(struct kv_core *core, uint64_t wanted, struct kv_eviction *ret_eviction)
{
	uint64_t have = room_of(core).free + coming_blocks(core);

	*ret_eviction = (struct kv_eviction){
		.domain = KV_DOMAIN_ANY,
		.enough = has_freed,
		.wanted = wanted > have ? wanted - have : 0,
	};
	if (have < wanted)
		kv_evict_files(core, ret_eviction);
	if (ret_eviction->evicted > 0)
		core->evictor.own_ms = kv_monotonic_ms();
	/* Freed blocks may be used again when the freeing is durable. */
	(void)kv_index_wait(core->index, kv_index_sequence(core->index));
	return ret_eviction->evicted > 0;
}

/* Makes room for NEED blocks, and up to the watermark. False if there was nothing to gain. */
static bool run_round(struct kv_core *core, uint64_t need)
{
	int64_t until = kv_monotonic_ms() + kv_evict_patience_ms(core);
	unsigned quiet = 0;
	bool gained = false;

	/* What others freed just now may be enough. */
	(void)kv_index_wait(core->index, kv_index_sequence(core->index));
	while (!atomic_load(&core->stopping)) {
		struct kv_eviction eviction;
		struct room before = room_of(core);
		uint64_t low = low_watermark(before.total);
		uint64_t wanted = kv_max_u64(need, before.free < low || need ? 2 * low : 0);

		wanted = kv_min_u64(wanted, before.total);
		if (before.free >= wanted)
			return true;
		bool any = evict_until(core, wanted, &eviction);
		gained = gained || any || room_of(core).free > before.free;
		if (any)
			continue;
		if (room_of(core).free >= need)
			return true;
		if (kv_monotonic_ms() > until || !may_go_on(core, &eviction, &quiet))
			break;
	}
	return gained;
}

static void *evict_store_main(void *arg)
{
	struct kv_core *core = arg;

	for (;;) {
		uint64_t need;
		{
			KV_LOCKED(&core->evictor.lock);
			while (!core->evictor.kicked && !core->evictor.stop)
				(void)pthread_cond_wait(&core->evictor.wanted, &core->evictor.lock);
			if (core->evictor.stop)
				return NULL;
			core->evictor.kicked = false;
			core->evictor.begun++;
			need = core->evictor.need;
			core->evictor.need = 0;
		}
		kv_quota_trim(core);
		bool gained = run_round(core, need);
		KV_LOCKED(&core->evictor.lock);
		core->evictor.ended = core->evictor.begun;
		if (!gained)
			core->evictor.barren = core->evictor.ended;
		(void)pthread_cond_broadcast(&core->evictor.done);
	}
}

/* Asks for a round and waits for its end. False if it was in vain. */
static bool ask_for_round(struct kv_core *core, uint64_t blocks)
{
	KV_LOCKED(&core->evictor.lock);
	uint64_t mine = core->evictor.begun + 1;

	core->evictor.need = kv_max_u64(core->evictor.need, blocks);
	core->evictor.kicked = true;
	(void)pthread_cond_signal(&core->evictor.wanted);
	while (core->evictor.ended < mine) {
		if (core->evictor.stop || atomic_load(&core->stopping))
			return false;
		(void)kv_cond_wait_ms(&core->evictor.done, &core->evictor.lock, KV_WAIT_SLICE_MS);
	}
	return core->evictor.barren < mine;
}

void kv_store_evict_kick(struct kv_core *core)
{
	struct room room = room_of(core);

	if (room.free >= low_watermark(room.total))
		return;
	KV_LOCKED(&core->evictor.lock);
	core->evictor.kicked = true;
	(void)pthread_cond_signal(&core->evictor.wanted);
}

int kv_core_reserve(struct kv_core *core, uint64_t blocks)
{
	struct kv_space_usage usage;
	int r;

	if (blocks == 0)
		return 0;
	for (unsigned i = 0; i < ROUNDS_MAX; i++) {
		r = kv_space_reserve(core->space, blocks);
		if (r != -ENOSPC) {
			kv_store_evict_kick(core);
			return r;
		}
		kv_space_usage(core->space, &usage);
		if (blocks > usage.total)
			return -ENOSPC;
		if (!ask_for_round(core, blocks))
			break;
	}
	/* What others gave back since. */
	return kv_space_reserve(core->space, blocks);
}

int kv_store_evict_start(struct kv_core *core)
{
	return kv_core_thread(core, evict_store_main);
}

void kv_store_evict_stop(struct kv_core *core)
{
	KV_LOCKED(&core->evictor.lock);

	core->evictor.stop = true;
	(void)pthread_cond_broadcast(&core->evictor.wanted);
	(void)pthread_cond_broadcast(&core->evictor.done);
}
