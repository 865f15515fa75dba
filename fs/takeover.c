/* SPDX-License-Identifier: Apache-2.0 */
/* What outlives a daemon: see takeover.h. */

#include "fs/takeover.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "fs/base.h"
#include "index/index.h"

#define MAGIC UINT64_C(0x6b76667374616b33) /* "kvfstak3" */
#define RECORDS_SHIFT 22u
#define RECORDS (UINT64_C(1) << RECORDS_SHIFT)
#define BACKINGS (1u << 18)
/* Ids without a record. */
#define UNRECORDED (UINT64_C(1) << 63)

/* ID is written last and cleared first: 0 means that the rest does not count. */
struct record {
	_Atomic uint64_t id;
	_Atomic uint64_t version;
	_Atomic uint64_t lookups;
	_Atomic int64_t mtime_ns;
	uint64_t ino;
	uint32_t kind;
	uint32_t padding;
};

/* Sparse: only what was used once takes memory. */
struct memory {
	uint64_t magic;
	_Atomic uint64_t generation; /* daemons so far */
	_Atomic uint64_t serial;     /* of the last nodeid */
	_Atomic uint64_t high;       /* records that were used once */
	_Atomic uint64_t init_length;
	uint8_t init[KV_TAKEOVER_INIT_MAX];
	_Atomic uint32_t backings[BACKINGS];
	struct record records[RECORDS];
	_Alignas(64) uint8_t journal[KV_INDEX_JOURNAL_SIZE];
};

struct kv_takeover {
	struct memory *memory;
	uint64_t first_serial;  /* of this daemon */
	uint32_t *old_backings; /* those that were there before it; 0: the end */
	pthread_mutex_t lock;   /* guards what follows */
	uint32_t *free;         /* records below high that are free: a stack */
	size_t free_count;
	size_t free_capacity;
};

int kv_takeover_memory(void)
{
	int fd = memfd_create("kvfs-takeover", MFD_CLOEXEC);

	if (fd < 0)
		return -errno;
	if (ftruncate(fd, sizeof(struct memory)) < 0) {
		int r = -errno;

		(void)close(fd);
		return r;
	}
	return fd;
}

/* Lock held. Best effort: a record that cannot be remembered is not used again. */
static void push_free(struct kv_takeover *takeover, uint32_t slot)
{
	if (takeover->free_count == takeover->free_capacity) {
		size_t capacity = takeover->free_capacity ? takeover->free_capacity * 2 : 256;
		uint32_t *more = realloc(takeover->free, capacity * sizeof(*more));

		if (!more)
			return;
		takeover->free = more;
		takeover->free_capacity = capacity;
	}
	takeover->free[takeover->free_count++] = slot;
}

static int list_backings(struct kv_takeover *takeover)
{
	size_t count = 0;

	if (atomic_load(&takeover->memory->generation) < 2)
		return 0;
	takeover->old_backings = calloc(BACKINGS + 1, sizeof(*takeover->old_backings));
	if (!takeover->old_backings)
		return -ENOMEM;
	for (uint32_t i = 0; i < BACKINGS; i++) {
		uint32_t id = atomic_load(&takeover->memory->backings[i]);

		if (id != 0)
			takeover->old_backings[count++] = id;
	}
	return 0;
}

/* Whether what is in FD is ours: a daemon that died of a stray write may have hit it. */
static int map_memory(int fd, struct memory **ret_memory)
{
	struct memory *memory;
	struct stat st;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (st.st_size != sizeof(*memory))
		return -EPROTO;
	memory = mmap(
		NULL, sizeof(*memory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (memory == MAP_FAILED)
		return -ENOMEM;
	if ((memory->magic != 0 && memory->magic != MAGIC) ||
		atomic_load(&memory->high) > RECORDS ||
		atomic_load(&memory->init_length) > KV_TAKEOVER_INIT_MAX) {
		(void)munmap(memory, sizeof(*memory));
		return -EPROTO;
	}
	*ret_memory = memory;
	return 0;
}

int kv_takeover_new(int fd, struct kv_takeover **ret_takeover)
{
	struct kv_takeover *takeover = calloc(1, sizeof(*takeover));
	struct memory *memory = NULL;
	int r = takeover ? map_memory(fd, &memory) : -ENOMEM;

	(void)close(fd);
	if (r < 0) {
		free(takeover);
		return r;
	}
	memory->magic = MAGIC;
	takeover->memory = memory;
	(void)pthread_mutex_init(&takeover->lock, NULL);
	atomic_fetch_add(&memory->generation, 1);
	takeover->first_serial = atomic_load(&memory->serial) + 1;
	for (uint64_t i = 0; i < atomic_load(&memory->high); i++)
		if (atomic_load(&memory->records[i].id) == 0)
			push_free(takeover, (uint32_t)i);
	if (list_backings(takeover) < 0) {
		(void)kv_takeover_free(takeover);
		return -ENOMEM;
	}
	*ret_takeover = takeover;
	return 0;
}

struct kv_takeover *kv_takeover_free(struct kv_takeover *takeover)
{
	if (!takeover)
		return NULL;
	(void)munmap(takeover->memory, sizeof(*takeover->memory));
	(void)pthread_mutex_destroy(&takeover->lock);
	free(takeover->free);
	free(takeover->old_backings);
	free(takeover);
	return NULL;
}

bool kv_takeover_resumes(const struct kv_takeover *takeover)
{
	return atomic_load(&takeover->memory->init_length) > 0 &&
	       atomic_load(&takeover->memory->generation) > 1;
}

void *kv_takeover_init(struct kv_takeover *takeover, size_t *ret_length)
{
	*ret_length = atomic_load(&takeover->memory->init_length);
	return takeover->memory->init;
}

void kv_takeover_set_init(struct kv_takeover *takeover, const void *request, size_t length)
{
	assert(length <= KV_TAKEOVER_INIT_MAX);
	memcpy(takeover->memory->init, request, length);
	atomic_store(&takeover->memory->init_length, length);
}

void *kv_takeover_journal(struct kv_takeover *takeover)
{
	return takeover->memory->journal;
}

/* ---- Records ---- */

static struct record *record_of(struct kv_takeover *takeover, uint64_t id)
{
	struct record *record = &takeover->memory->records[id & (RECORDS - 1)];

	return id != 0 && atomic_load(&record->id) == id ? record : NULL;
}

static bool take_slot(struct kv_takeover *takeover, uint64_t *ret_slot)
{
	KV_LOCKED(&takeover->lock);

	if (takeover->free_count > 0) {
		*ret_slot = takeover->free[--takeover->free_count];
		return true;
	}
	*ret_slot = atomic_load(&takeover->memory->high);
	if (*ret_slot == RECORDS)
		return false;
	atomic_store(&takeover->memory->high, *ret_slot + 1);
	return true;
}

uint64_t kv_takeover_add(struct kv_takeover *takeover, uint64_t ino, uint32_t kind)
{
	uint64_t serial = atomic_fetch_add(&takeover->memory->serial, 1) + 1;
	struct record *record;
	uint64_t slot;

	if (!take_slot(takeover, &slot))
		return UNRECORDED | serial << RECORDS_SHIFT;
	record = &takeover->memory->records[slot];
	atomic_store(&record->version, 0);
	atomic_store(&record->mtime_ns, 0);
	atomic_store(&record->lookups, 0);
	record->ino = ino;
	record->kind = kind;
	atomic_store(&record->id, serial << RECORDS_SHIFT | slot);
	return serial << RECORDS_SHIFT | slot;
}

void kv_takeover_set_version(
	struct kv_takeover *takeover, uint64_t id, uint64_t version, int64_t mtime_ns)
{
	struct record *record = record_of(takeover, id);

	if (!record)
		return;
	atomic_store(&record->mtime_ns, mtime_ns);
	atomic_store(&record->version, version);
}

void kv_takeover_set_lookups(struct kv_takeover *takeover, uint64_t id, uint64_t lookups)
{
	struct record *record = record_of(takeover, id);

	if (record)
		atomic_store(&record->lookups, lookups);
}

void kv_takeover_remove(struct kv_takeover *takeover, uint64_t id)
{
	struct record *record = record_of(takeover, id);
	KV_LOCKED(&takeover->lock);

	if (!record)
		return;
	atomic_store(&record->id, 0);
	push_free(takeover, (uint32_t)(id & (RECORDS - 1)));
}

void kv_takeover_forget(struct kv_takeover *takeover, uint64_t id, uint64_t lookups)
{
	struct record *record = record_of(takeover, id);

	if (record && atomic_fetch_sub(&record->lookups, lookups) == lookups)
		kv_takeover_remove(takeover, id);
}

bool kv_takeover_is_old(const struct kv_takeover *takeover, uint64_t id)
{
	return (id & ~UNRECORDED) >> RECORDS_SHIFT < takeover->first_serial;
}

void kv_takeover_each(struct kv_takeover *takeover,
	void (*each)(void *arg, uint64_t id, const struct kv_takeover_record *record), void *arg)
{
	uint64_t high = atomic_load(&takeover->memory->high);

	for (uint64_t i = 0; i < high; i++) {
		const struct record *record = &takeover->memory->records[i];
		uint64_t id = atomic_load(&record->id);
		const struct kv_takeover_record copy = {
			.ino = record->ino,
			.version = atomic_load(&record->version),
			.mtime_ns = atomic_load(&record->mtime_ns),
			.lookups = atomic_load(&record->lookups),
			.kind = record->kind,
		};

		if (id != 0 && (id & (RECORDS - 1)) == i && kv_takeover_is_old(takeover, id))
			each(arg, id, &copy);
	}
}

/* ---- Backing ids: found by their numbers, which the kernel deals out in turn ---- */

void kv_takeover_backing(struct kv_takeover *takeover, int id)
{
	_Atomic uint32_t *slots = takeover->memory->backings;

	for (uint32_t i = 0; i < BACKINGS; i++) {
		uint32_t none = 0;

		if (atomic_compare_exchange_strong(
			    &slots[((uint32_t)id + i) % BACKINGS], &none, (uint32_t)id))
			return;
	}
}

void kv_takeover_no_backing(struct kv_takeover *takeover, int id)
{
	_Atomic uint32_t *slots = takeover->memory->backings;

	for (uint32_t i = 0; i < BACKINGS; i++) {
		uint32_t wanted = (uint32_t)id;

		if (atomic_compare_exchange_strong(
			    &slots[((uint32_t)id + i) % BACKINGS], &wanted, 0))
			return;
	}
}

void kv_takeover_close_backings(
	struct kv_takeover *takeover, void (*close)(void *arg, int id), void *arg)
{
	for (size_t i = 0; takeover->old_backings && takeover->old_backings[i] != 0; i++) {
		int id = (int)takeover->old_backings[i];

		close(arg, id);
		kv_takeover_no_backing(takeover, id);
	}
	free(takeover->old_backings);
	takeover->old_backings = NULL;
}
