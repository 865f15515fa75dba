/* SPDX-License-Identifier: Apache-2.0 */
/* Many names at once: see lookup.h. */
#include "fs/lookup.h"

#include <sys/stat.h>

#include "fs/core_internal.h"

static_assert(KVFS_NAME_MAX == KV_NAME_MAX, "the longest name is a public limit");
static_assert(sizeof(struct kvfs_lookup) == 16376, "public: must not change");
static_assert(offsetof(struct kvfs_lookup, u) == 24, "public: must not change");
static_assert(sizeof(struct kvfs_lookup) < 1u << _IOC_SIZEBITS, "what an ioctl can carry");

/* Names that are looked up under one hold of the index's lock. */
#define FINDS_MAX 64u

/* Whether a file has content to be read, as far as is known without reading it. */
static bool is_published(struct kv_core *core, const struct kv_find *found)
{
	struct kv_file *file = kv_file_find(core, found->ino);
	bool published;

	/* Names of what is quarantined are gone from the index. */
	if (!file)
		return !found->held;
	{
		KV_LOCKED(&kv_shard_of(core, found->ino)->lock);
		published = !file->quarantined && !file->reaped && (file->current || !found->held);
	}
	kv_file_put(file);
	return published;
}

static int check(const struct kvfs_lookup *request)
{
	/* Each name takes two bytes at least, and the last one ends with the list. */
	if (request->flags & ~KVFS_LOOKUP_STOP || request->reserved != 0 ||
		request->length > sizeof(request->u.names) || request->count > request->length / 2)
		return -EINVAL;
	if (request->length > 0 && request->u.names[request->length - 1] != '\0')
		return -EINVAL;
	return 0;
}

struct batch {
	struct kv_core *core;
	uint64_t parent;
	const char *next; /* name that comes next */
	const char *end;  /* of the names */
	uint32_t count;   /* names that were looked up */
	struct kvfs_lookup *answer;
};

/* The next names of BATCH, LEFT of them at most. Returns how many there are. */
static int find_some(struct batch *batch, uint32_t left, struct kv_find finds[static FINDS_MAX])
{
	uint32_t count = 0;
	int r;

	for (; count < left && count < FINDS_MAX && batch->next < batch->end; count++) {
		size_t length = strlen(batch->next);

		finds[count] = (struct kv_find){.name = batch->next, .length = length};
		batch->next += length + 1;
	}
	r = kv_index_find(batch->core->index, batch->parent, finds, count);
	return r < 0 ? r : (int)count;
}

/* True if the name is present. */
static bool answer_one(struct batch *batch, const struct kv_find *find)
{
	uint32_t number = batch->count++;
	struct kvfs_lookup *answer = batch->answer;

	if (find->ino == 0 ||
		(S_ISREG(find->type) && (!is_published(batch->core, find) ||
						kv_core_lease_found(batch->core, find->ino) < 0)))
		return false;
	answer->u.bitmap[number / 8] |= (uint8_t)(1u << (number % 8));
	answer->leading += answer->leading == number;
	answer->present++;
	return true;
}

int kv_lookup_names(struct kv_core *core, uint64_t parent, const struct kvfs_lookup *request,
	struct kvfs_lookup *ret_answer, size_t *ret_size)
{
	const uint32_t bytes = (request->count + 7) / 8;
	struct kv_find finds[FINDS_MAX];
	struct batch batch = {
		.core = core,
		.parent = parent,
		.next = request->u.names,
		.answer = ret_answer,
	};
	bool stop = false;
	int r = check(request);

	if (r < 0)
		return r;
	batch.end = request->u.names + request->length;
	*ret_answer = (struct kvfs_lookup){.count = request->count};
	while (!stop && batch.count < request->count) {
		int found = find_some(&batch, request->count - batch.count, finds);

		if (found <= 0)
			return found < 0 ? found : -EINVAL;
		for (int i = 0; i < found && !stop; i++)
			stop = !answer_one(&batch, &finds[i]) && request->flags & KVFS_LOOKUP_STOP;
	}
	/* More names than counted. */
	if (!stop && batch.next != batch.end)
		return -EINVAL;
	kv_stat_add(&core->stats->lookup_names, batch.count);
	*ret_size = offsetof(struct kvfs_lookup, u) + bytes;
	return 0;
}
