/* SPDX-License-Identifier: Apache-2.0 */
/* Drafts: see draft.h. */

#include "fs/draft.h"

#include "fs/base.h"
#include "fs/caller.h"

void kv_draft_init(struct kv_draft *draft)
{
	*draft = (struct kv_draft){.watch = -1};
}

void kv_draft_done(struct kv_draft *draft)
{
	if (draft->watch >= 0)
		(void)close(draft->watch);
	draft->watch = -1;
}

void kv_draft_reset(struct kv_draft *draft)
{
	kv_draft_done(draft);
	kv_draft_init(draft);
}

/* ---- Who changed it ---- */

void kv_draft_changed_by(struct kv_draft *draft, pid_t tid, pid_t process)
{
	pid_t *thread = &draft->threads[(uint32_t)tid % KV_DRAFT_THREADS];

	if (tid <= 0 || *thread == tid)
		return;
	if (process == 0)
		process = kv_caller_process(tid);
	*thread = tid;
	if (kv_draft_was_changed_by(draft, process))
		return;
	if (draft->process_count < KV_DRAFT_PROCESSES)
		draft->processes[draft->process_count++] = process;
	else
		draft->many = true;
}

bool kv_draft_was_changed_by(const struct kv_draft *draft, pid_t process)
{
	for (unsigned i = 0; i < draft->process_count; i++)
		if (draft->processes[i] == process)
			return true;
	return draft->many;
}

void kv_draft_watch(struct kv_draft *draft, pid_t tid)
{
	if (draft->watch >= 0)
		return;
	draft->watched = kv_caller_process(tid);
	draft->watch = kv_caller_watch(draft->watched);
}

/* ---- What is missing ---- */

/* Errors of a change that was right and was not made, wholly or in part. */
static bool leaves_a_gap(int error)
{
	switch (error) {
	case -ENOSPC:
	case -EDQUOT:
	case -EIO:
	case -ENOMEM:
	case -EAGAIN:
	case -ESTALE:
		return true;
	default:
		return false;
	}
}

void kv_draft_failed(struct kv_draft *draft, uint64_t from, uint64_t to, int error)
{
	if (!leaves_a_gap(error))
		return;
	if (draft->error == 0) {
		draft->error = error == -ESTALE || error == -EAGAIN ? -EIO : error;
		draft->missing_from = from;
		draft->missing_to = to;
	}
	draft->missing_from = kv_min_u64(draft->missing_from, from);
	draft->missing_to = kv_max_u64(draft->missing_to, to);
}

/* Nothing is missing any more once the range is empty. */
static void settle(struct kv_draft *draft)
{
	if (draft->missing_from >= draft->missing_to)
		draft->error = 0;
}

void kv_draft_written(struct kv_draft *draft, uint64_t from, uint64_t to)
{
	if (draft->error == 0)
		return;
	/* One range is kept: a piece out of its middle does not make it smaller. */
	if (from <= draft->missing_from && to > draft->missing_from)
		draft->missing_from = to;
	else if (to >= draft->missing_to && from < draft->missing_to)
		draft->missing_to = from;
	settle(draft);
}

void kv_draft_cut(struct kv_draft *draft, uint64_t size)
{
	if (draft->error == 0)
		return;
	draft->missing_to = kv_min_u64(draft->missing_to, size);
	settle(draft);
}
