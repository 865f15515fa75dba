/* SPDX-License-Identifier: Apache-2.0 */
/* What outlives a daemon: see takeover.h. */

#include "fs/takeover.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "fs/base.h"
#include "fs/unsettled.h"
#include "index/index.h"

#define MAGIC UINT64_C(0x6b76667374616b33) /* "kvfstak3" */
#define RECORDS_SHIFT 22u
#define RECORDS (UINT64_C(1) << RECORDS_SHIFT)
#define BACKINGS (1u << 18)
#define STARTS 16u
#define HANDLES (1u << 16)
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
	_Atomic uint64_t note;
	_Atomic int32_t writer;
	_Atomic uint32_t open_pid;
	_Atomic uint32_t flags;
	_Atomic int passed;
};

/* NUMBER is written last and cleared first. */
struct handle {
	_Atomic uint64_t number;
	_Atomic uint64_t nodeid;
	_Atomic uint64_t request;
	_Atomic bool may_write;
	_Atomic bool flushed;
	_Atomic bool elsewhere;
};

/* Sparse: only what was used once takes memory. */
struct memory {
	uint64_t magic;
	_Atomic uint64_t generation; /* daemons so far */
	_Atomic uint64_t serial;     /* of the last nodeid */
	_Atomic uint64_t high;       /* records that were used once */
	_Atomic uint64_t init_length;
	uint8_t init[KV_TAKEOVER_INIT_MAX];
	_Atomic int64_t started_ms[STARTS];  /* of the last daemons, by generation */
	_Atomic uint64_t backings[BACKINGS]; /* generation, and below it the id */
	struct record records[RECORDS];
	_Atomic uint32_t next_handle;
	struct handle handles[HANDLES];
	struct kv_unsettled_notes unsettled;
	_Alignas(64) uint8_t journal[KV_INDEX_JOURNAL_SIZE];
};

struct kv_takeover {
	struct memory *memory;
	uint64_t first_serial;  /* of this daemon */
	uint64_t *old_backings; /* those that were there before it */
	size_t old_backing_count;
	pthread_mutex_t lock; /* guards what follows */
	uint32_t *free;       /* records below high that are free: a stack */
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
	if (atomic_load(&takeover->memory->generation) < 2)
		return 0;
	takeover->old_backings = calloc(BACKINGS, sizeof(*takeover->old_backings));
	if (!takeover->old_backings)
		return -ENOMEM;
	for (uint32_t i = 0; i < BACKINGS; i++) {
		uint64_t backing = atomic_load(&takeover->memory->backings[i]);

		if (backing != 0)
			takeover->old_backings[takeover->old_backing_count++] = backing;
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
	uint64_t generation = atomic_load(&memory->generation) + 1;
	atomic_store(&memory->started_ms[generation % STARTS], kv_monotonic_ms());
	atomic_store(&memory->generation, generation);
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

struct kv_unsettled_notes *kv_takeover_unsettled(struct kv_takeover *takeover)
{
	return &takeover->memory->unsettled;
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
	atomic_store(&record->note, 0);
	atomic_store(&record->writer, 0);
	atomic_store(&record->open_pid, 0);
	atomic_store(&record->flags, 0);
	atomic_store(&record->passed, 0);
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
			.passed = atomic_load(&record->passed),
			.writing =
				{
					.note = atomic_load(&record->note),
					.writer = atomic_load(&record->writer),
					.open_pid = atomic_load(&record->open_pid),
					.flags = atomic_load(&record->flags),
				},
		};

		if (id != 0 && (id & (RECORDS - 1)) == i && kv_takeover_is_old(takeover, id))
			each(arg, id, &copy);
	}
}

void kv_takeover_set_writing(
	struct kv_takeover *takeover, uint64_t id, const struct kv_takeover_writing *writing)
{
	struct record *record = record_of(takeover, id);

	if (!record)
		return;
	atomic_store_explicit(&record->writer, writing->writer, memory_order_relaxed);
	atomic_store_explicit(&record->open_pid, writing->open_pid, memory_order_relaxed);
	atomic_store_explicit(&record->note, writing->note, memory_order_relaxed);
	atomic_store_explicit(&record->flags, writing->flags, memory_order_release);
}

void kv_takeover_set_passed(struct kv_takeover *takeover, uint64_t id, int backing)
{
	struct record *record = record_of(takeover, id);

	if (record)
		atomic_store(&record->passed, backing);
}

/* ---- Handles ---- */

uint64_t kv_takeover_tag(const struct kv_takeover *takeover, const void *handle)
{
	return (uint64_t)(uintptr_t)handle | atomic_load(&takeover->memory->generation) << 48;
}

uint32_t kv_takeover_add_handle(
	struct kv_takeover *takeover, const struct kv_takeover_handle *handle)
{
	struct memory *memory = takeover->memory;
	uint32_t first = atomic_fetch_add(&memory->next_handle, 1);

	for (uint32_t i = 0; i < HANDLES; i++) {
		uint32_t place = (first + i) % HANDLES;
		struct handle *ours = &memory->handles[place];
		uint64_t none = 0;

		/* Of no node, until the rest is there. */
		if (atomic_load(&ours->number) != 0 ||
			!atomic_compare_exchange_strong(&ours->number, &none, UINT64_MAX))
			continue;
		atomic_store(&ours->nodeid, handle->nodeid);
		atomic_store(&ours->request, handle->request);
		atomic_store(&ours->may_write, handle->may_write);
		atomic_store(&ours->flushed, handle->flushed);
		atomic_store(&ours->elsewhere, handle->elsewhere);
		atomic_store(&ours->number, handle->number);
		return place;
	}
	return KV_TAKEOVER_NO_HANDLE;
}

void kv_takeover_handle_flushed(struct kv_takeover *takeover, uint32_t place)
{
	if (place != KV_TAKEOVER_NO_HANDLE)
		atomic_store(&takeover->memory->handles[place].flushed, true);
}

void kv_takeover_remove_handle(struct kv_takeover *takeover, uint32_t place)
{
	if (place != KV_TAKEOVER_NO_HANDLE)
		atomic_store(&takeover->memory->handles[place].number, 0);
}

void kv_takeover_each_handle(struct kv_takeover *takeover,
	void (*each)(void *arg, uint32_t place, const struct kv_takeover_handle *handle), void *arg)
{
	for (uint32_t i = 0; i < HANDLES; i++) {
		struct handle *handle = &takeover->memory->handles[i];
		const struct kv_takeover_handle copy = {
			.number = atomic_load(&handle->number),
			.nodeid = atomic_load(&handle->nodeid),
			.request = atomic_load(&handle->request),
			.may_write = atomic_load(&handle->may_write),
			.flushed = atomic_load(&handle->flushed),
			.elsewhere = atomic_load(&handle->elsewhere),
		};

		if (copy.number == UINT64_MAX)
			atomic_store(&handle->number, 0);
		else if (copy.number != 0)
			each(arg, i, &copy);
	}
}

/* ---- Backing ids: found by their numbers, which the kernel deals out in turn ---- */

/* Where ID is, or NULL. */
static _Atomic uint64_t *find_backing(struct kv_takeover *takeover, int id)
{
	_Atomic uint64_t *slots = takeover->memory->backings;

	for (uint32_t i = 0; i < BACKINGS; i++) {
		_Atomic uint64_t *slot = &slots[((uint32_t)id + i) % BACKINGS];

		if ((uint32_t)atomic_load(slot) == (uint32_t)id)
			return slot;
	}
	return NULL;
}

void kv_takeover_backing(struct kv_takeover *takeover, int id)
{
	_Atomic uint64_t *slots = takeover->memory->backings;
	uint64_t backing = atomic_load(&takeover->memory->generation) << 32 | (uint32_t)id;

	for (uint32_t i = 0; i < BACKINGS; i++) {
		uint64_t none = 0;

		if (atomic_compare_exchange_strong(
			    &slots[((uint32_t)id + i) % BACKINGS], &none, backing))
			return;
	}
}

void kv_takeover_no_backing(struct kv_takeover *takeover, int id)
{
	_Atomic uint64_t *slot = find_backing(takeover, id);

	if (slot)
		atomic_store(slot, 0);
}

bool kv_takeover_has_backing(struct kv_takeover *takeover, int id)
{
	return find_backing(takeover, id) != NULL;
}

/* Since when the daemon that has registered BACKING is followed by another; long ago: 0. */
static int64_t followed_ms(const struct memory *memory, uint64_t backing)
{
	uint64_t next = (backing >> 32) + 1;
	uint64_t now = (uint32_t)atomic_load(&memory->generation);

	return now - next < STARTS ? atomic_load(&memory->started_ms[next % STARTS]) : 0;
}

size_t kv_takeover_close_backings(
	struct kv_takeover *takeover, int64_t age_ms, void (*close)(void *arg, int id), void *arg)
{
	int64_t until_ms = kv_monotonic_ms() - age_ms;
	size_t left = 0;

	for (size_t i = 0; i < takeover->old_backing_count; i++) {
		uint64_t backing = takeover->old_backings[i];

		if (followed_ms(takeover->memory, backing) > until_ms) {
			takeover->old_backings[left++] = backing;
			continue;
		}
		close(arg, (int)(uint32_t)backing);
		kv_takeover_no_backing(takeover, (int)(uint32_t)backing);
	}
	takeover->old_backing_count = left;
	return left;
}
