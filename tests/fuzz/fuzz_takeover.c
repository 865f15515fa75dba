/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory that a daemon finds when it takes over: what the one before it has left, which may
 * have died of a stray write. The first bytes of the input are its header, the others records.
 */
#include <stdlib.h>
#include <sys/mman.h>

/* Its layout is nobody else's business. */
#include "fs/takeover.c"
#include "tests/fuzz/fuzz.h"

#define HEADER offsetof(struct memory, init)

static void look_at(void *arg, uint64_t id, const struct kv_takeover_record *record)
{
	struct kv_takeover *takeover = arg;

	if (id == 0 || !kv_takeover_is_old(takeover, id))
		abort();
	if (record->lookups == 0)
		kv_takeover_remove(takeover, id);
	else
		kv_takeover_forget(takeover, id, record->lookups);
}

static void close_backing(void *arg, int id)
{
	(void)arg;
	if (id == 0)
		abort();
}

/* Cuts down what would only take long: memory that is in use. */
static void shape(struct memory *memory, const uint8_t *data, size_t size)
{
	size_t rest = size > HEADER ? size - HEADER : 0;
	uint64_t high;

	memcpy(memory, data, size < HEADER ? size : HEADER);
	memcpy(memory->records, data + (size - rest), rest);
	for (size_t i = 0; i + 4 <= rest && i < 64; i += 4)
		memory->backings[i * 11] = kv_get_le32(data + HEADER + i);
	high = atomic_load(&memory->high);
	if (high > 1000 && high <= RECORDS)
		atomic_store(&memory->high, high % 1000);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int fd = kv_takeover_memory();
	struct kv_takeover *takeover;
	struct memory *memory;
	size_t length;

	if (fd < 0)
		return 0;
	memory = mmap(NULL, sizeof(*memory), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		abort();
	shape(memory, data, size < 4096 ? size : 4096);
	(void)munmap(memory, sizeof(*memory));
	if (kv_takeover_new(fd, &takeover) < 0)
		return 0;
	(void)kv_takeover_init(takeover, &length);
	if (length > KV_TAKEOVER_INIT_MAX)
		abort();
	(void)kv_takeover_resumes(takeover);
	kv_takeover_each(takeover, look_at, takeover);
	(void)kv_takeover_close_backings(takeover, 0, close_backing, NULL);
	/* It works for the one that goes on. */
	uint64_t id = kv_takeover_add(takeover, 7, 1);
	kv_takeover_set_lookups(takeover, id, 2);
	kv_takeover_forget(takeover, id, 2);
	kv_takeover_free(takeover);
	return 0;
}
