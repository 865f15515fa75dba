/* SPDX-License-Identifier: Apache-2.0 */
/* Handles over restarts: see handles.h. */

#include "fs/handles.h"

#include <stdlib.h>

#include "fs/request.h"
#include "fs/takeover.h"

#define GENERATION_SHIFT 48u

struct kv_old_handle {
	uint64_t number;
	uint64_t request;
	struct kv_handle *_Atomic handle; /* NULL: released */
};

void kv_handles_note(struct kv_daemon *daemon, struct kv_handle *handle)
{
	handle->number = (uintptr_t)handle;
	if (!daemon->takeover)
		return;
	handle->number = kv_takeover_tag(daemon->takeover, handle);
	if (handle->node->kind != KV_NODE_WRITING)
		return;
	handle->place = kv_takeover_add_handle(
		daemon->takeover, &(struct kv_takeover_handle){
					  .number = handle->number,
					  .nodeid = handle->node->id,
					  .request = kv_request_number(),
					  .may_write = handle->may_write,
					  .elsewhere = handle->version != NULL,
				  });
}

static int open_elsewhere(struct kv_handle *handle)
{
	enum kv_access access;
	int r = kv_file_current(handle->node->file, &handle->version);

	if (r == 0) {
		r = kv_version_open(handle->version, true, &access);
		if (r < 0)
			handle->version = kv_version_unref(handle->version);
	}
	return r;
}

static struct kv_handle *make(
	struct kv_daemon *daemon, uint32_t place, const struct kv_takeover_handle *record)
{
	struct kv_node *node = kv_node_find(daemon, record->nodeid);
	struct kv_handle *handle;

	if (!node || node->kind != KV_NODE_WRITING)
		return NULL;
	handle = calloc(1, sizeof(*handle));
	if (!handle)
		return NULL;
	handle->node = node;
	handle->may_write = record->may_write;
	handle->flushed = record->flushed;
	handle->place = place;
	handle->number = record->number;
	if (record->elsewhere && open_elsewhere(handle) < 0) {
		free(handle);
		return NULL;
	}
	KV_LOCKED(kv_node_lock(daemon, node->ino));
	kv_node_opened(node, handle->may_write);
	return handle;
}

static void resume_one(void *arg, uint32_t place, const struct kv_takeover_handle *record)
{
	struct kv_daemon *daemon = arg;
	struct kv_old_handle *more =
		reallocarray(daemon->old_handles, daemon->old_handle_count + 1, sizeof(*more));
	struct kv_handle *handle = NULL;

	if (more) {
		daemon->old_handles = more;
		handle = make(daemon, place, record);
	}
	if (!handle) {
		kv_takeover_remove_handle(daemon->takeover, place);
		return;
	}
	more[daemon->old_handle_count].number = record->number;
	more[daemon->old_handle_count].request = record->request;
	atomic_init(&more[daemon->old_handle_count].handle, handle);
	daemon->old_handle_count++;
}

static int compare(const void *a, const void *b)
{
	uint64_t one = ((const struct kv_old_handle *)a)->number;
	uint64_t other = ((const struct kv_old_handle *)b)->number;

	return one < other ? -1 : one > other;
}

void kv_handles_resume(struct kv_daemon *daemon)
{
	kv_takeover_each_handle(daemon->takeover, resume_one, daemon);
	if (daemon->old_handle_count > 0)
		qsort(daemon->old_handles, daemon->old_handle_count, sizeof(*daemon->old_handles),
			compare);
}

void kv_handles_done(struct kv_daemon *daemon)
{
	free(daemon->old_handles);
	daemon->old_handles = NULL;
	daemon->old_handle_count = 0;
}

bool kv_handles_is_old(const struct kv_daemon *daemon, uint64_t number)
{
	return number >> GENERATION_SHIFT !=
	       kv_takeover_tag(daemon->takeover, NULL) >> GENERATION_SHIFT;
}

struct kv_handle *kv_handles_find(struct kv_daemon *daemon, uint64_t number, bool last)
{
	const struct kv_old_handle key = {.number = number};
	struct kv_old_handle *old =
		daemon->old_handle_count == 0
			? NULL
			: bsearch(&key, daemon->old_handles, daemon->old_handle_count, sizeof(key),
				  compare);

	if (!old)
		return NULL;
	return last ? atomic_exchange(&old->handle, NULL) : atomic_load(&old->handle);
}

struct kv_handle *kv_handles_given(struct kv_daemon *daemon)
{
	if (!kv_request_comes_again())
		return NULL;
	for (size_t i = 0; i < daemon->old_handle_count; i++)
		if (daemon->old_handles[i].request == kv_request_number())
			return atomic_load(&daemon->old_handles[i].handle);
	return NULL;
}
