/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The payload of the batch look-up, the ioctl whose argument is more than numbers. What it asks of
 * the index is answered here.
 */
#include <stdlib.h>
#include <sys/stat.h>

#include "fs/core_internal.h"
#include "fs/lookup.h"
#include "tests/fuzz/fuzz.h"

int kv_index_find(struct kv_index *index, uint64_t parent, struct kv_find *finds, size_t count)
{
	(void)index;
	(void)parent;
	for (size_t i = 0; i < count; i++) {
		if (finds[i].length == 0)
			return -EINVAL;
		/* Reads all of the name: the sanitizers see whether it is the request's. */
		finds[i].ino = strlen(finds[i].name) % 3;
		finds[i].type = i % 2 ? S_IFREG : S_IFDIR;
	}
	return 0;
}

struct kv_file *kv_file_find(struct kv_core *core, uint64_t ino)
{
	(void)core;
	(void)ino;
	return NULL;
}

struct kv_file *kv_file_put(struct kv_file *file)
{
	(void)file;
	return NULL;
}

struct kv_shard *kv_shard_of(struct kv_core *core, uint64_t ino)
{
	(void)core;
	(void)ino;
	abort(); /* only files that are known have one */
}

int kv_core_lease_found(struct kv_core *core, uint64_t ino)
{
	(void)core;
	return ino % 2 ? 0 : -ENOENT;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct kv_stats stats;
	struct kv_core *core = calloc(1, sizeof(*core));
	struct kvfs_lookup *request = calloc(1, sizeof(*request));
	struct kvfs_lookup *answer = calloc(1, sizeof(*answer));
	size_t answer_size = 0;

	if (core && request && answer) {
		core->stats = &stats;
		if (size > 0)
			memcpy(request, data, size < sizeof(*request) ? size : sizeof(*request));
		if (kv_lookup_names(core, 1, request, answer, &answer_size) == 0 &&
			(answer_size > sizeof(*answer) || answer->present > request->count ||
				answer->leading > answer->present))
			abort();
	}
	free(answer);
	free(request);
	free(core);
	return 0;
}
