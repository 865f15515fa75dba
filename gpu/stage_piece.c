/* SPDX-License-Identifier: Apache-2.0 */
/*
 * DRAM objects, copied from where they are: workers map and register them a piece at a time, a few
 * pieces ahead of the copies. Where that is refused, the rest of the file goes by the ring.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "gpu/stage_internal.h"

/* Whole pages: what is registered. */
static uint64_t mapped_length(const struct kvg_piece *piece)
{
	return kv_round_up(piece->length, KV_BLOCK_SIZE);
}

static void run_register(struct kvg_task *task)
{
	struct kvg_piece *piece = (struct kvg_piece *)task;
	struct kvg_backend *backend = piece->stager->backend;
	void *memory = mmap(
		NULL, mapped_length(piece), PROT_READ, MAP_SHARED, piece->fd, (off_t)piece->offset);

	(void)close(piece->fd);
	piece->fd = -1;
	piece->memory = memory == MAP_FAILED ? NULL : memory;
	piece->result = memory == MAP_FAILED
				? -errno
				: backend->ops->host_register(backend, memory, mapped_length(piece),
					  KVG_REGISTER_READ_ONLY);
	if (piece->result < 0 && piece->memory)
		(void)munmap(kv_steal_ptr(&piece->memory), mapped_length(piece));
}

static void run_unregister(struct kvg_task *task)
{
	struct kvg_piece *piece = (struct kvg_piece *)task;
	struct kvg_backend *backend = piece->stager->backend;

	backend->ops->host_unregister(backend, piece->memory);
	(void)munmap(kv_steal_ptr(&piece->memory), mapped_length(piece));
}

static void piece_release(struct kvg_piece *piece)
{
	piece->job->in_flight--;
	piece->job = NULL;
	piece->state = KVG_PIECE_FREE;
}

static void piece_begin(struct kvg_piece *piece, struct kvg_job *job, uint64_t length)
{
	piece->fd = fcntl(job->object_fd, F_DUPFD_CLOEXEC, 0);
	if (piece->fd < 0) {
		kvg_job_fail(job, -errno);
		return;
	}
	piece->job = job;
	piece->offset = job->next;
	piece->length = length;
	piece->next = 0;
	piece->copies = 0;
	piece->memory = NULL;
	piece->state = KVG_PIECE_REGISTERING;
	piece->task.run = run_register;
	job->next += piece->length;
	job->in_flight++;
	kvg_workers_start(piece->stager->workers, &piece->task);
}

bool kvg_pieces_begin(struct kvg_stager *stager, struct kvg_job *job)
{
	uint64_t length = kvg_job_more(job, KVG_PIECE_SIZE);
	bool progress = false;

	for (unsigned i = 0; i < KVG_PIECES && length > 0 && job->result == 0; i++) {
		if (stager->pieces[i].state != KVG_PIECE_FREE)
			continue;
		piece_begin(&stager->pieces[i], job, length);
		length = kvg_job_more(job, KVG_PIECE_SIZE);
		progress = true;
	}
	return progress;
}

/*
 * It could not be registered: the file goes on by the ring from the first byte that was refused.
 * Pieces behind it that were registered are given up, for the ring takes them too.
 */
static void refuse(struct kvg_piece *piece)
{
	struct kvg_job *job = piece->job;

	job->ring = true;
	job->next = kv_min_u64(job->next, piece->offset);
	piece_release(piece);
}

static void piece_end(struct kvg_piece *piece)
{
	piece->state = KVG_PIECE_ENDING;
	piece->task.run = run_unregister;
	kvg_workers_start(piece->stager->workers, &piece->task);
}

static bool copy_more(struct kvg_piece *piece)
{
	struct kvg_stager *stager = piece->stager;
	struct kvg_job *job = piece->job;
	uint64_t next = piece->next;

	/* A piece before it was refused, and the ring goes on from there. */
	if (job->ring && piece->offset >= job->next)
		piece->next = piece->length;
	while (piece->next < piece->length && job->result == 0) {
		uint64_t length =
			kv_min_u64(kvg_stager_copy_max(stager), piece->length - piece->next);
		struct kvg_lane *lane =
			kvg_copy_begin(stager, job, (uint8_t *)piece->memory + piece->next,
				piece->offset + piece->next, length, false);

		if (!lane)
			break;
		kvg_job_sample(job, (const uint8_t *)piece->memory + piece->next,
			piece->offset + piece->next, length);
		lane->piece = piece;
		piece->copies++;
		piece->next += length;
		job->counts.from_dram += length;
	}
	if (piece->copies == 0 && (piece->next == piece->length || job->result < 0))
		piece_end(piece);
	return piece->next > next || piece->state == KVG_PIECE_ENDING;
}

/* First the most urgent, and of them those that come first in their file. */
static bool copy_in_order(struct kvg_stager *stager)
{
	bool tried[KVG_PIECES] = {false};
	bool progress = false;

	for (unsigned round = 0; round < KVG_PIECES; round++) {
		struct kvg_piece *best = NULL;

		for (unsigned i = 0; i < KVG_PIECES; i++) {
			struct kvg_piece *piece = &stager->pieces[i];

			if (!tried[i] && piece->state == KVG_PIECE_COPYING &&
				(!best || kvg_job_is_before(piece->job, piece->offset, best->job,
						  best->offset)))
				best = piece;
		}
		if (!best)
			break;
		tried[best - stager->pieces] = true;
		progress |= copy_more(best);
	}
	return progress;
}

bool kvg_pieces_step(struct kvg_stager *stager)
{
	bool progress = false;

	for (unsigned i = 0; i < KVG_PIECES; i++) {
		struct kvg_piece *piece = &stager->pieces[i];

		if ((piece->state != KVG_PIECE_REGISTERING && piece->state != KVG_PIECE_ENDING) ||
			!kvg_task_is_done(&piece->task))
			continue;
		progress = true;
		if (piece->state == KVG_PIECE_ENDING)
			piece_release(piece);
		else if (piece->result < 0)
			refuse(piece);
		else
			piece->state = KVG_PIECE_COPYING;
	}
	return copy_in_order(stager) || progress;
}

void kvg_piece_copied(struct kvg_piece *piece)
{
	assert(piece->copies > 0);
	piece->copies--;
}

bool kvg_pieces_idle(const struct kvg_stager *stager)
{
	for (unsigned i = 0; i < KVG_PIECES; i++)
		if (stager->pieces[i].state != KVG_PIECE_FREE)
			return false;
	return true;
}
