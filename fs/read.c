/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading a version: from its object, from its base, or from the devices while it fills.
 */
#include "fs/write_internal.h"

/*
 * Chunks that are brought in ahead of a sequential reader: few at first, more as it goes on. They
 * are asked for by half a window at a time, so that the devices get long runs.
 */
#define AHEAD_CHUNKS_MIN 4u
#define AHEAD_CHUNKS_MAX (4 * KV_RUN_CHUNKS)
/* A chunk that is punched that often before its reader got to it is read past the object. */
#define FILLS_MAX 3u
#define READ_PATIENCE_MS 1000u
/* A huge page. */
#define LOAN_ALIGNMENT (UINT64_C(2) << 20)

struct kv_span kv_span_at(uint64_t offset, uint64_t size)
{
	uint32_t from = (uint32_t)(offset & (KV_CHUNK_SIZE - 1));

	return (struct kv_span){
		.chunk = (uint32_t)(offset >> KV_CHUNK_SHIFT),
		.from = from,
		.to = (uint32_t)kv_min_u64(from + size, KV_CHUNK_SIZE),
	};
}

/* Chunks that may be under way for one reader without crowding out the others. */
static uint32_t window(const struct kv_core *core, uint32_t most)
{
	uint64_t share = core->budget / 8 / KV_CHUNK_SIZE;

	return (uint32_t)kv_min_u64(kv_max_u64(share, 1), most);
}

struct reading {
	struct kv_version *version; /* counted */
	struct kv_version *keeper;  /* counted: what is brought in is kept here; NULL: in VERSION */
	bool direct;                /* O_DIRECT */
	unsigned fills;
	int64_t since_ms;
};

/* Lock held. Keeps a resident chunk in the object while bytes up to TO are read from it. */
static void pin(struct kv_version *version, struct kv_slot *slot, uint32_t to)
{
	slot->pins++;
	version->busy++;
	/* A stream that has come to a chunk's end is done with it: it is the first to go. */
	if (to == KV_CHUNK_SIZE)
		slot->flags &= (uint16_t)~KV_SLOT_USED;
	else
		slot->flags |= KV_SLOT_USED;
}

/* Lock held. */
static void unpin(struct kv_version *version, uint32_t number)
{
	struct kv_slot *slot = kv_slot_find(version, number);

	assert(slot->pins > 0 && version->busy > 0);
	slot->pins--;
	version->busy--;
}

/* Copies out of the object. Lock held; comes back unlocked. */
static int read_resident(
	struct reading *reading, struct kv_slot *slot, const struct kv_span *span, void *ret_memory)
{
	struct kv_version *version = reading->version;
	uint64_t offset = ((uint64_t)span->chunk << KV_CHUNK_SHIFT) + span->from;
	int r;

	bool used = slot->flags & KV_SLOT_USED;

	pin(version, slot, span->to);
	/* An O_DIRECT reader has a cache of his own: what was brought in for him is the first to
	 * go. */
	if (reading->direct && (reading->fills > 0 || !used))
		slot->flags &= (uint16_t)~KV_SLOT_USED;
	(void)pthread_mutex_unlock(&version->lock);
	r = kv_object_read(version->object, ret_memory, span->to - span->from, offset);
	KV_LOCKED(&version->lock);
	unpin(version, span->chunk);
	return r;
}

/* Reads a COLD chunk past the object. Of a version being written, the slot is kept from changing
 * meanwhile. */
static int read_past(struct kv_version *version, const struct kv_span *span, void *ret_memory)
{
	_cleanup_free_ uint8_t *buffer = NULL;
	void *memory = NULL;
	bool lock_slot;
	int r;

	{
		KV_LOCKED(&version->lock);
		struct kv_slot *slot = kv_slot_find(version, span->chunk);
		lock_slot = version->state == KV_VERSION_WRITING;
		if (lock_slot && (slot->flags & KV_SLOT_BUSY || slot->state != KV_CHUNK_COLD))
			return -EAGAIN;
		if (lock_slot)
			slot->flags |= KV_SLOT_BUSY;
	}
	r = kv_fill_private(version, span->chunk, lock_slot, &memory);
	buffer = memory;
	if (r == 0)
		memcpy(ret_memory, buffer + span->from, span->to - span->from);
	return r;
}

enum step {
	STEP_DONE,
	STEP_BASE,  /* go on with the base */
	STEP_FILL,  /* bring it in, look again */
	STEP_PAST,  /* read it past the object, look again if that is refused */
	STEP_AGAIN, /* something changed */
};

static bool covers_used(const struct kv_version *version, const struct kv_span *span)
{
	uint64_t start = (uint64_t)span->chunk << KV_CHUNK_SHIFT;

	return span->from == 0 && (span->to == KV_CHUNK_SIZE || start + span->to >= version->size);
}

/* One look at the chunk. *ret_result is the outcome of STEP_DONE. */
static enum step look(
	struct reading *reading, const struct kv_span *span, void *ret_memory, int *ret_result)
{
	struct kv_version *version = reading->version;
	enum step step = STEP_DONE;

	*ret_result = 0;
	(void)pthread_mutex_lock(&version->lock);
	int r = kv_map_load(version, span->chunk);
	struct kv_slot *slot = kv_slot_find(version, span->chunk);
	enum kv_chunk_state state = kv_slot_state(version, span->chunk);
	if (r < 0 || version->damaged) {
		*ret_result = -EIO;
	} else if (slot && kv_slot_is_resident(slot)) {
		*ret_result = read_resident(reading, slot, span, ret_memory);
		return STEP_DONE;
	} else if (state == KV_CHUNK_HOLE) {
		memset(ret_memory, 0, span->to - span->from);
	} else if (slot && slot->flags & KV_SLOT_BUSY &&
		   kv_fill_gives_up(version, slot, reading->since_ms)) {
		*ret_result = -EIO;
	} else if (slot && slot->flags & KV_SLOT_BUSY) {
		kv_park_wait(version->file->core, version, &version->lock, KV_WAIT_SLICE_MS);
		step = STEP_AGAIN;
	} else if (state == KV_CHUNK_BASE) {
		struct kv_version *base = kv_version_ref(version->base);
		/* It outlives its base, which nobody but its writer may be reading. */
		bool keeps = version->continues && version->state == KV_VERSION_WRITING;

		(void)pthread_mutex_unlock(&version->lock);
		if (keeps && !reading->keeper)
			reading->keeper = version;
		else
			kv_version_unref(version);
		reading->version = base;
		return STEP_BASE;
	} else if (slot->flags & KV_SLOT_FAILED && reading->fills > 0) {
		*ret_result = -EIO;
	} else if (reading->fills > FILLS_MAX ||
		   ((version->direct || reading->direct) && covers_used(version, span))) {
		step = STEP_PAST;
	} else {
		step = STEP_FILL;
	}
	(void)pthread_mutex_unlock(&version->lock);
	return step;
}

/* Brings the chunk in; goes back to the keeper's view of it. */
static int fill(struct reading *reading, const struct kv_span *span)
{
	const struct kv_fill_range range = {
		.first = span->chunk,
		.count = 1,
		.patience_ms = READ_PATIENCE_MS,
	};
	int r;

	reading->fills++;
	if (reading->keeper) {
		kv_version_unref(reading->version);
		reading->version = kv_steal_ptr(&reading->keeper);
	}
	r = kv_fill_begin(reading->version, &range);
	if (r == -EAGAIN)
		reading->fills = FILLS_MAX + 1;
	return r == -EAGAIN ? 0 : r;
}

static int reading_step(
	struct reading *reading, const struct kv_span *span, void *ret_memory, bool *ret_done)
{
	struct kv_version *version = reading->version;
	int r;

	switch (look(reading, span, ret_memory, &r)) {
	case STEP_DONE:
		*ret_done = true;
		return r;
	case STEP_FILL:
		return fill(reading, span);
	case STEP_PAST:
		r = read_past(version, span, ret_memory);
		*ret_done = r != -EAGAIN;
		return r == -EAGAIN ? 0 : r;
	default:
		return 0;
	}
}

static int read_span(
	struct kv_version *version, const struct kv_span *span, bool direct, void *ret_memory)
{
	struct reading reading = {
		.version = kv_version_ref(version),
		.direct = direct,
		.since_ms = kv_monotonic_ms(),
	};
	bool done = false;
	int r;

	assert(span->from < span->to && span->to <= KV_CHUNK_SIZE);
	do
		r = reading_step(&reading, span, ret_memory, &done);
	while (r == 0 && !done);
	kv_version_unref(reading.version);
	kv_version_unref(reading.keeper);
	return r < 0 && r != -ENOMEM ? -EIO : r;
}

int kv_version_read_span(struct kv_version *version, const struct kv_span *span, void *ret_memory)
{
	return read_span(version, span, false, ret_memory);
}

/* Lock held. How many chunks from NUMBER on, up to MOST, are there or on their way. */
static uint32_t lead_of(struct kv_version *version, uint32_t number, uint32_t most)
{
	uint32_t lead = 0;

	while (lead < most) {
		const struct kv_slot *slot = kv_slot_find(version, number + lead);

		if (!slot || (!kv_slot_is_resident(slot) && !(slot->flags & KV_SLOT_BUSY)))
			break;
		lead++;
	}
	return lead;
}

/* Lock held. A reader asks for [FIRST, LAST]: what to bring in behind that, if anything. */
static struct kv_fill_range ahead_of(struct kv_version *version, uint32_t first, uint32_t last)
{
	uint32_t left = kv_chunk_count(version->size) - (last + 1);
	struct kv_fill_range range = {.first = last + 1, .ahead = true};

	if (first == version->next_read)
		version->ahead = (uint8_t)kv_min_u64(
			kv_max_u64(version->ahead * 2u, AHEAD_CHUNKS_MIN), AHEAD_CHUNKS_MAX);
	else if (first + 1 != version->next_read) /* else it goes on within a chunk */
		version->ahead = 0;
	version->next_read = last + 1;
	uint32_t most = window(version->file->core, version->ahead);
	uint32_t lead =
		most > 0 ? lead_of(version, range.first, (uint32_t)kv_min_u64(most, left)) : 0;
	if (version->ahead == 0 || lead > most / 2)
		return range;
	range.first += lead;
	range.count = (uint32_t)kv_min_u64(most - lead, left - lead);
	return range;
}

/* Starts what this reader will need: the rest of its request first, then what a sequential one asks
 * for next. */
static void begin_fills(struct kv_version *version, uint32_t first, uint32_t last)
{
	struct kv_core *core = version->file->core;
	struct kv_fill_range range = {
		.first = first,
		.count = window(core, (uint32_t)kv_min_u64(last - first + 1, KV_RUN_CHUNKS)),
		.patience_ms = READ_PATIENCE_MS,
	};
	struct kv_fill_range ahead;

	{
		KV_LOCKED(&version->lock);
		if (version->all_hot || version->direct || version->damaged ||
			version->state == KV_VERSION_WRITING)
			return;
		ahead = ahead_of(version, first, last);
	}
	if (kv_fill_begin(version, &range) == 0 && ahead.count > 0)
		(void)kv_fill_begin(version, &ahead);
}

static ssize_t read_version(
	struct kv_version *version, void *ret_memory, size_t size, uint64_t offset, bool direct)
{
	uint8_t *memory = ret_memory;
	uint64_t end, at;

	{
		KV_LOCKED(&version->lock);
		if (size == 0 || offset >= version->size)
			return 0;
		end = offset + kv_min_u64(size, version->size - offset);
	}
	for (at = offset; at < end;) {
		const struct kv_span span = kv_span_at(at, end - at);
		uint32_t last = (uint32_t)((end - 1) >> KV_CHUNK_SHIFT);

		if (!direct)
			begin_fills(version, span.chunk, last);
		int r = read_span(version, &span, direct, memory + (at - offset));
		if (r < 0)
			return r;
		at += span.to - span.from;
	}
	return (ssize_t)(end - offset);
}

ssize_t kv_version_read(struct kv_version *version, void *ret_memory, size_t size, uint64_t offset)
{
	return read_version(version, ret_memory, size, offset, false);
}

ssize_t kv_version_read_direct(
	struct kv_version *version, void *ret_memory, size_t size, uint64_t offset)
{
	return read_version(version, ret_memory, size, offset, true);
}

/* ---- Lending ---- */

/* All of the loan's chunks pinned, or none: -EAGAIN. */
static int pin_loan(struct kv_loan *loan, uint64_t end)
{
	struct kv_version *version = loan->version;
	KV_LOCKED(&version->lock);

	for (uint32_t i = loan->first; i <= loan->last; i++) {
		const struct kv_slot *slot = kv_slot_find(version, i);

		/* A mapping would allocate the pages of holes. */
		if (version->damaged || !slot || !kv_slot_is_resident(slot) ||
			!kv_slot_has_all_pages(slot, kv_chunk_used(version->size, i)))
			return -EAGAIN;
	}
	for (uint32_t i = loan->first; i <= loan->last; i++) {
		uint64_t start = (uint64_t)i << KV_CHUNK_SHIFT;

		pin(version, kv_slot_find(version, i),
			(uint32_t)kv_min_u64(end - start, KV_CHUNK_SIZE));
	}
	return 0;
}

static void unpin_loan(struct kv_loan *loan)
{
	KV_LOCKED(&loan->version->lock);

	for (uint32_t i = loan->first; i <= loan->last; i++)
		unpin(loan->version, i);
	kv_park_wake(loan->version->file->core, loan->version);
}

/* Maps whole huge pages, so that one fault does for all of them. */
static int map_loan(struct kv_loan *loan, uint64_t offset)
{
	uint64_t from = offset - offset % LOAN_ALIGNMENT;
	int r;

	loan->mapping_size = kv_round_up(offset + loan->size, LOAN_ALIGNMENT) - from;
	r = kv_object_map(loan->version->object, from, loan->mapping_size, &loan->mapping);
	if (r == 0)
		loan->memory = (const uint8_t *)loan->mapping + (offset - from);
	return r;
}

int kv_version_lend(
	struct kv_version *version, uint64_t offset, size_t size, struct kv_loan *ret_loan)
{
	struct kv_loan loan = {.version = version};

	{
		/* The object of a version being written may be cut under a mapping. */
		KV_LOCKED(&version->lock);
		if (version->state == KV_VERSION_WRITING || size == 0 || offset >= version->size)
			return -EAGAIN;
		loan.size = (size_t)kv_min_u64(size, version->size - offset);
	}
	loan.first = (uint32_t)(offset >> KV_CHUNK_SHIFT);
	loan.last = (uint32_t)((offset + loan.size - 1) >> KV_CHUNK_SHIFT);
	begin_fills(version, loan.first, loan.last);
	for (uint32_t i = loan.first; i <= loan.last; i++) {
		int r = kv_fill_wait(version, i);
		if (r < 0)
			return r == -ETIMEDOUT ? -EIO : -EAGAIN;
	}
	if (pin_loan(&loan, offset + loan.size) < 0)
		return -EAGAIN;
	if (map_loan(&loan, offset) < 0) {
		unpin_loan(&loan);
		return -EAGAIN;
	}
	(void)kv_version_ref(version);
	*ret_loan = loan;
	return 0;
}

void kv_loan_end(struct kv_loan *loan)
{
	kv_object_unmap(loan->mapping, loan->mapping_size);
	unpin_loan(loan);
	kv_version_unref(loan->version);
}
