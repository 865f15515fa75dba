/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies: lanes, which are places for copies under way in the streams, and what the watermark says
 * of them.
 */
#include <errno.h>
#include <stdatomic.h>

#include "gpu/stage_internal.h"

static struct kvg_lane *free_lane(struct kvg_stager *stager, bool back)
{
	for (unsigned i = 0; i < stager->lane_count; i++)
		if (!stager->lanes[i].busy && stager->lanes[i].back == back)
			return &stager->lanes[i];
	return NULL;
}

/* LANE's stream has been given what it is to do for JOB, or R is why not. */
static void lane_start(struct kvg_stager *stager, struct kvg_lane *lane, struct kvg_job *job, int r)
{
	const struct kvg_backend_ops *ops = stager->backend->ops;
	int recorded = ops->event_record(stager->backend, lane->event, lane->stream);

	/* Some of a failed copy may be under way: its memory is not to be used before that ends. */
	if (recorded < 0)
		(void)ops->stream_sync(stager->backend, lane->stream);
	if (r < 0 || recorded < 0)
		kvg_job_fail(job, r < 0 ? r : recorded);
	lane->busy = true;
	lane->job = job;
	lane->slot = NULL;
	lane->piece = NULL;
	job->in_flight++;
}

struct kvg_lane *kvg_copy_begin(struct kvg_stager *stager, struct kvg_job *job, void *host,
	uint64_t offset, uint64_t length, bool back)
{
	struct kvg_lane *lane = free_lane(stager, back);
	uint64_t size = job->targets[0].size;
	unsigned count = 0;

	if (!lane)
		return NULL;
	for (uint64_t done = 0; done < length;) {
		uint64_t at = offset - job->offset + done;
		const struct kvg_target *target = &job->targets[at / size];
		uint64_t part = kv_min_u64(length - done, target->size - at % size);
		uint64_t device = target->address + at % size;
		uint64_t memory = (uint64_t)(uintptr_t)host + done;

		assert(at / size < job->target_count && count < stager->copies_max);
		stager->copies[count++] = (struct kvg_copy){
			.to = back ? memory : device,
			.from = back ? device : memory,
			.size = part,
		};
		done += part;
	}
	lane_start(stager, lane, job,
		stager->backend->ops->copy(stager->backend, lane->stream,
			back ? KVG_COPY_TO_HOST : KVG_COPY_TO_DEVICE, stager->copies, count));
	lane->offset = offset;
	return lane;
}

/* What lies behind the file in its last segment was somebody else's. */
bool kvg_tail_begin(struct kvg_stager *stager, struct kvg_job *job)
{
	const struct kvg_target *last = &job->targets[job->target_count - 1];
	uint64_t before = (uint64_t)(job->target_count - 1) * job->targets[0].size;
	uint64_t used = job->size - before;
	struct kvg_lane *lane;

	assert(job->size > before && used <= last->size);
	if (used == last->size || last->skip) {
		job->tail_done = true;
		return true;
	}
	lane = free_lane(stager, false);
	if (!lane)
		return false;
	lane_start(stager, lane, job,
		stager->backend->ops->fill(
			stager->backend, lane->stream, last->address + used, 0, last->size - used));
	lane->offset = kvg_job_end(job);
	job->tail_done = true;
	return true;
}

/* All of JOB below this is there. */
static uint64_t reached(const struct kvg_stager *stager, const struct kvg_job *job)
{
	uint64_t lowest = kvg_directs_lowest(stager, job, kvg_slots_lowest(stager, job, job->next));

	for (unsigned i = 0; i < KVG_PIECES; i++) {
		const struct kvg_piece *piece = &stager->pieces[i];

		if (piece->job == job && piece->state != KVG_PIECE_ENDING)
			lowest = kv_min_u64(lowest, piece->offset + piece->next);
	}
	for (unsigned i = 0; i < stager->lane_count; i++)
		if (stager->lanes[i].busy && stager->lanes[i].job == job)
			lowest = kv_min_u64(lowest, stager->lanes[i].offset);
	return lowest;
}

void kvg_job_advance(const struct kvg_stager *stager, struct kvg_job *job)
{
	uint64_t staged;

	if (!job->watermark || job->result < 0)
		return;
	staged = reached(stager, job);
	if (job->mark_end > 0)
		staged = kv_min_u64(staged, job->mark_end);
	if (staged > atomic_load_explicit(&job->watermark->staged, memory_order_relaxed) &&
		staged < kvg_job_end(job))
		kvg_watermark_set(job->watermark, staged, 0);
}

bool kvg_lanes_step(struct kvg_stager *stager)
{
	bool progress = false;

	for (unsigned i = 0; i < stager->lane_count; i++) {
		struct kvg_lane *lane = &stager->lanes[i];
		int r = lane->busy ? stager->backend->ops->event_query(stager->backend, lane->event)
				   : -EAGAIN;

		if (r == -EAGAIN)
			continue;
		/* Nobody knows then whether the copy has ended, and its memory may be freed next.
		 */
		if (r < 0) {
			(void)stager->backend->ops->stream_sync(stager->backend, lane->stream);
			kvg_job_fail(lane->job, r);
		}
		lane->busy = false;
		lane->job->in_flight--;
		if (lane->slot)
			kvg_slot_copied(lane->slot);
		if (lane->piece)
			kvg_piece_copied(lane->piece);
		kvg_job_advance(stager, lane->job);
		progress = true;
	}
	return progress;
}

/* ---- Life ---- */

int kvg_lanes_new(struct kvg_stager *stager)
{
	const struct kvg_backend_ops *ops = stager->backend->ops;
	bool back = stager->options.direct;
	kvg_stream streams[KVG_STREAMS_MAX + 1];
	unsigned count = stager->options.streams + back;

	for (unsigned i = 0; i < count; i++) {
		int r = ops->stream_new(stager->backend, &streams[i]);

		if (r < 0) {
			while (i > 0)
				ops->stream_free(stager->backend, streams[--i]);
			return r;
		}
	}
	/* The lanes of one stream are not neighbours, so that the streams take turns. */
	stager->stream_count = count;
	stager->lane_count = count * KVG_COPIES_PER_STREAM;
	for (unsigned i = 0; i < stager->lane_count; i++) {
		stager->lanes[i].stream = streams[i % count];
		stager->lanes[i].back = back && i % count == count - 1;
	}
	for (unsigned i = 0; i < stager->lane_count; i++) {
		int r = ops->event_new(stager->backend, &stager->lanes[i].event);

		if (r < 0)
			return r;
	}
	return 0;
}

void kvg_lanes_free(struct kvg_stager *stager)
{
	const struct kvg_backend_ops *ops = stager->backend->ops;

	for (unsigned i = 0; i < stager->lane_count; i++)
		ops->event_free(stager->backend, stager->lanes[i].event);
	for (unsigned i = 0; i < stager->stream_count; i++)
		ops->stream_free(stager->backend, stager->lanes[i].stream);
}
