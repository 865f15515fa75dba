/* SPDX-License-Identifier: Apache-2.0 */
/* Samples of what was staged, and what is done when they do not match: see server_internal.h. */
#include <errno.h>
#include <inttypes.h>

#include "fs/log.h"
#include "gpu/server_internal.h"

void kvg_check_prepare(struct kvg_placement *placement)
{
	const struct kvg_entry *entry = placement->entry;

	for (unsigned i = 0; i < entry->count && placement->server->checker; i++) {
		struct kvg_block *block = entry->parts[i].block;
		uint64_t used = kv_min_u64(block->size, entry->key.end - block->key.first);

		/* The last segment of a file may have a few bytes only. */
		if (entry->parts[i].own && used >= (uint64_t)KVG_SAMPLES * KVG_SAMPLE_SIZE)
			block->samples = kvg_samples_new(used);
	}
}

static bool check_block(
	struct kvg_server *server, const struct kvg_block *block, struct kvg_placement *placement)
{
	return block->samples && block->segment &&
	       kvg_checker_start(server->checker, block->segment, block->samples, &block->key,
		       placement) == 0;
}

bool kvg_check_begin(struct kvg_placement *placement)
{
	const struct kvg_entry *entry = placement->entry;

	if (!placement->server->checker || placement->checked)
		return false;
	placement->checked = true;
	for (unsigned i = 0; i < entry->count; i++)
		if (entry->parts[i].own)
			placement->checks +=
				check_block(placement->server, entry->parts[i].block, placement);
	return placement->checks > 0;
}

/* ---- A user's ---- */

static void check_of_user(void *arg, struct kvg_block *block)
{
	const struct kvg_sweep *sweep = arg;

	if (block->key.uid == sweep->uid && block->state == KVG_BLOCK_THERE)
		sweep->server->sweeping += check_block(sweep->server, block, NULL);
}

/* One at a time: when a hundred processes end together, their user's files are looked at twice. */
static void sweep_next(struct kvg_server *server)
{
	struct kvg_sweep *sweep;

	while (server->sweeping == 0 && (sweep = LIST_FIRST(&server->sweeps))) {
		LIST_REMOVE(sweep, entry);
		kvg_hbm_blocks(server->hbm, check_of_user, sweep);
		free(sweep);
	}
}

void kvg_check_user(struct kvg_server *server, uid_t uid)
{
	struct kvg_sweep *sweep;

	LIST_FOREACH (sweep, &server->sweeps, entry)
		if (sweep->uid == uid)
			return;
	sweep = server->checker ? calloc(1, sizeof(*sweep)) : NULL;
	if (!sweep)
		return;
	sweep->server = server;
	sweep->uid = uid;
	LIST_INSERT_HEAD(&server->sweeps, sweep, entry);
	sweep_next(server);
}

void kvg_check_done(struct kvg_server *server)
{
	struct kvg_sweep *sweep;

	while ((sweep = LIST_FIRST(&server->sweeps))) {
		LIST_REMOVE(sweep, entry);
		free(sweep);
	}
	server->checker = kvg_checker_free(server->checker);
}

/* ---- Checks end ---- */

struct bad {
	struct kvg_server *server;
	const struct kvg_block_key *key;
};

static void give_up_bad(void *arg, struct kvg_entry *entry)
{
	const struct bad *bad = arg;
	const struct kvg_block_key *key = bad->key;

	if (entry->state == KVG_FAILED || entry->key.version != key->version ||
		entry->key.uid != key->uid || key->first < entry->key.first ||
		key->first >= entry->key.end)
		return;
	if (entry->state == KVG_STAGING) {
		((struct kvg_placement *)entry->owner)->check_result = -EIO;
		return;
	}
	bad->server->stat.invalidated++;
	kvg_tell_invalid(entry);
	kvg_hbm_stale(entry);
}

/* What was learnt is kept; PLACEMENT's entry is still being staged, so its segments are there. */
static void placement_checked(struct kvg_placement *placement, const struct kvg_check *check)
{
	const struct kvg_entry *entry = placement->entry;

	for (unsigned i = 0; i < entry->count; i++)
		if (entry->parts[i].own && entry->parts[i].block->key.first == check->key.first)
			*entry->parts[i].block->samples = check->samples;
	if (check->result < 0)
		placement->check_result = -EIO;
}

static void take(struct kvg_server *server, struct kvg_check *check)
{
	struct bad bad = {server, &check->key};
	struct kvg_placement *placement = check->arg;

	server->stat.checked++;
	if (check->result == -EBADMSG) {
		server->stat.check_errors++;
		kv_log_warning("gpu",
			"device memory does not hold what was loaded, giving it up ino=%" PRIu64
			" offset=%" PRIu64 " uid=%u",
			check->key.ino, check->key.first, check->key.uid);
		if (!placement)
			kvg_hbm_of_ino(server->hbm, check->key.ino, give_up_bad, &bad);
	}
	if (placement)
		placement_checked(placement, check);
	kvg_check_free(check);
	if (placement && --placement->checks == 0)
		kvg_stage_checked(placement);
	if (placement)
		return;
	server->sweeping--;
	sweep_next(server);
}

void kvg_check_reap(struct kvg_server *server)
{
	struct kvg_check *check;

	while ((check = kvg_checker_reap(server->checker)))
		take(server, check);
}
