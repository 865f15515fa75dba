/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The chunk map of a version: slots in segments of 32, read from the index when they are needed.
 */
#include "fs/core_internal.h"

/* Chunks asked of the index at once when a whole map is read. */
#define LOAD_ALL_CHUNKS 65536u

int kv_segment_compare(const struct kv_segment *a, const struct kv_segment *b)
{
	return a->number < b->number ? -1 : a->number > b->number;
}

RB_GENERATE(kv_segment_tree, kv_segment, entry, kv_segment_compare)

/* ---- Bits ---- */

void kv_bits_set(struct kv_bits *bits, unsigned first, unsigned end)
{
	assert(end <= KV_CHUNK_BLOCKS);
	for (unsigned i = first; i < end; i++) {
		if (i % 64 == 0 && end - i >= 64) {
			bits->word[i / 64] = UINT64_MAX;
			i += 63;
		} else {
			bits->word[i / 64] |= UINT64_C(1) << i % 64;
		}
	}
}

void kv_bits_clear(struct kv_bits *bits, unsigned first, unsigned end)
{
	assert(end <= KV_CHUNK_BLOCKS);
	for (unsigned i = first; i < end; i++)
		bits->word[i / 64] &= ~(UINT64_C(1) << i % 64);
}

unsigned kv_bits_count(const struct kv_bits *bits)
{
	unsigned count = 0;

	for (unsigned i = 0; i < KV_CHUNK_BLOCKS / 64; i++)
		count += (unsigned)__builtin_popcountll(bits->word[i]);
	return count;
}

unsigned kv_bits_next(const struct kv_bits *bits, unsigned from, bool present)
{
	while (from < KV_CHUNK_BLOCKS) {
		uint64_t word = present ? bits->word[from / 64] : ~bits->word[from / 64];

		word >>= from % 64;
		if (word)
			return from + (unsigned)__builtin_ctzll(word);
		from = (from / 64 + 1) * 64;
	}
	return KV_CHUNK_BLOCKS;
}

unsigned kv_bits_end(const struct kv_bits *bits)
{
	for (unsigned i = KV_CHUNK_BLOCKS / 64; i > 0; i--)
		if (bits->word[i - 1])
			return i * 64 - (unsigned)__builtin_clzll(bits->word[i - 1]);
	return 0;
}

bool kv_bits_is_prefix(const struct kv_bits *bits)
{
	return kv_bits_next(bits, 0, false) >= kv_bits_count(bits);
}

struct kv_bits kv_bits_without(const struct kv_bits *bits, const struct kv_bits *others)
{
	struct kv_bits rest;

	for (unsigned i = 0; i < KV_CHUNK_BLOCKS / 64; i++)
		rest.word[i] = bits->word[i] & ~others->word[i];
	return rest;
}

/* ---- Slots ---- */

const struct kv_extent *kv_slot_extents(const struct kv_slot *slot)
{
	return slot->extent_count > 1 ? slot->many : &slot->one;
}

void kv_slot_clear_extents(struct kv_slot *slot)
{
	if (slot->extent_count > 1)
		free(slot->many);
	if (slot->flags & KV_SLOT_BITMAP)
		free(slot->bitmap);
	slot->flags &= (uint16_t)~KV_SLOT_BITMAP;
	slot->extent_count = 0;
	slot->blocks = 0;
	slot->bitmap = NULL;
}

int kv_slot_set_extents(struct kv_slot *slot, const struct kv_extent *extents, unsigned count)
{
	struct kv_extent *many = NULL;

	assert(count <= KV_CHUNK_BLOCKS);
	if (count > 1) {
		many = malloc(count * sizeof(*many));
		if (!many)
			return -ENOMEM;
		memcpy(many, extents, count * sizeof(*many));
	}
	kv_slot_clear_extents(slot);
	slot->extent_count = count & 511;
	if (count > 1)
		slot->many = many;
	else if (count == 1)
		slot->one = extents[0];
	return 0;
}

bool kv_slot_is_resident(const struct kv_slot *slot)
{
	if (slot->state == KV_CHUNK_DIRTY)
		return true;
	/* BUSY: perhaps being punched at this moment. A dirty chunk never is. */
	return !(slot->flags & KV_SLOT_BUSY) &&
	       (slot->state == KV_CHUNK_HOT ||
		       (slot->state == KV_CHUNK_BASE && slot->flags & KV_SLOT_RESIDENT));
}

void kv_slot_bits(const struct kv_slot *slot, struct kv_bits *ret_bits)
{
	const struct kv_extent *extents = kv_slot_extents(slot);

	*ret_bits = (struct kv_bits){0};
	switch (slot->state) {
	case KV_CHUNK_HOT:
	case KV_CHUNK_COLD:
		for (unsigned i = 0; i < slot->extent_count; i++)
			kv_bits_set(
				ret_bits, extents[i].block, extents[i].block + extents[i].count);
		break;
	case KV_CHUNK_DIRTY:
		if (slot->flags & KV_SLOT_BITMAP)
			memcpy(ret_bits, slot->bitmap, sizeof(*ret_bits));
		else
			kv_bits_set(ret_bits, 0, slot->blocks);
		break;
	default:
		break;
	}
}

uint64_t kv_slot_devices(const struct kv_slot *slot)
{
	uint64_t devices = 0;

	if (slot->state != KV_CHUNK_COLD)
		return 0;
	for (unsigned i = 0; i < slot->extent_count; i++)
		devices |= UINT64_C(1) << kv_slot_extents(slot)[i].device;
	return devices;
}

int kv_slot_memory_for_bits(
	const struct kv_slot *slot, const struct kv_bits *bits, uint64_t **ret_memory)
{
	bool has_memory = slot->state == KV_CHUNK_DIRTY && slot->flags & KV_SLOT_BITMAP;

	*ret_memory = NULL;
	if (has_memory || kv_bits_is_prefix(bits))
		return 0;
	*ret_memory = malloc(sizeof(*bits));
	return *ret_memory ? 0 : -ENOMEM;
}

void kv_slot_put_bits(struct kv_slot *slot, const struct kv_bits *bits, uint64_t *memory)
{
	assert(slot->state == KV_CHUNK_DIRTY);
	assert(slot->extent_count == 0);
	if (kv_bits_is_prefix(bits)) {
		kv_slot_clear_extents(slot);
	} else {
		if (memory) {
			assert(!(slot->flags & KV_SLOT_BITMAP));
			slot->bitmap = memory;
			slot->flags |= KV_SLOT_BITMAP;
		}
		memcpy(slot->bitmap, bits, sizeof(*bits));
	}
	slot->blocks = kv_bits_count(bits) & 511;
}

int kv_slot_set_bits(struct kv_slot *slot, const struct kv_bits *bits)
{
	uint64_t *memory;
	int r = kv_slot_memory_for_bits(slot, bits, &memory);

	if (r == 0)
		kv_slot_put_bits(slot, bits, memory);
	return r;
}

/* ---- Segments ---- */

static struct kv_segment *segment_find(struct kv_version *version, uint32_t number)
{
	struct kv_segment key = {.number = number};

	return RB_FIND(kv_segment_tree, &version->segments, &key);
}

struct kv_slot *kv_slot_find(struct kv_version *version, uint32_t number)
{
	struct kv_segment *segment = segment_find(version, number / KV_SEGMENT_CHUNKS);

	if (!segment || number % KV_SEGMENT_CHUNKS >= segment->capacity)
		return NULL;
	return &segment->slots[number % KV_SEGMENT_CHUNKS];
}

/* State of a chunk that has no slot in a segment that is, or need not be, loaded. */
static enum kv_chunk_state default_state(const struct kv_version *version, uint32_t number)
{
	return number < version->base_chunks ? KV_CHUNK_BASE : KV_CHUNK_HOLE;
}

enum kv_chunk_state kv_slot_state(struct kv_version *version, uint32_t number)
{
	const struct kv_slot *slot = kv_slot_find(version, number);

	return slot ? (enum kv_chunk_state)slot->state : default_state(version, number);
}

static struct kv_segment *segment_new(uint32_t number, uint32_t capacity)
{
	struct kv_segment *segment =
		calloc(1, sizeof(*segment) + capacity * sizeof(struct kv_slot));

	if (!segment)
		return NULL;
	segment->number = number;
	segment->capacity = capacity;
	return segment;
}

static void slots_init(struct kv_version *version, struct kv_segment *segment, uint32_t from)
{
	for (uint32_t i = from; i < segment->capacity; i++) {
		segment->slots[i] = (struct kv_slot){0};
		segment->slots[i].state =
			default_state(version, segment->number * KV_SEGMENT_CHUNKS + i) & 7;
	}
}

/* Room for slot WANTED in SEGMENT (NULL: a new one), doubling so that growing files copy little. */
static struct kv_segment *segment_grow(
	struct kv_version *version, struct kv_segment *segment, uint32_t number, uint32_t wanted)
{
	uint32_t before = segment ? segment->capacity : 0;
	uint32_t capacity = before ? before : 1;
	struct kv_segment *grown;

	if (before > wanted)
		return segment;
	while (capacity <= wanted)
		capacity *= 2;
	assert(capacity <= KV_SEGMENT_CHUNKS);
	if (segment)
		RB_REMOVE(kv_segment_tree, &version->segments, segment);
	grown = realloc(segment, sizeof(*grown) + capacity * sizeof(struct kv_slot));
	if (!grown) {
		if (segment)
			RB_INSERT(kv_segment_tree, &version->segments, segment);
		return NULL;
	}
	grown->number = number;
	grown->capacity = capacity;
	slots_init(version, grown, before);
	RB_INSERT(kv_segment_tree, &version->segments, grown);
	return grown;
}

int kv_slot_get(struct kv_version *version, uint32_t number, struct kv_slot **ret_slot)
{
	struct kv_segment *segment = segment_find(version, number / KV_SEGMENT_CHUNKS);

	segment = segment_grow(
		version, segment, number / KV_SEGMENT_CHUNKS, number % KV_SEGMENT_CHUNKS);
	if (!segment)
		return -ENOMEM;
	*ret_slot = &segment->slots[number % KV_SEGMENT_CHUNKS];
	return 0;
}

/* ---- From the index ---- */

struct load {
	struct kv_version *version;
	struct kv_segment *segment; /* kv_map_load: the one being built */
	uint32_t number;            /* kv_map_load_all: segment of the chunk before */
	bool known;                 /* ... and whether it was in memory already */
	int error;
};

static void load_slot(struct kv_slot *slot, const struct kv_chunk *chunk, int *error)
{
	int r = kv_slot_set_extents(slot, chunk->extents, chunk->extent_count);

	if (r < 0) {
		*error = r;
		return;
	}
	slot->state = chunk->extent_count > 0 ? KV_CHUNK_COLD : KV_CHUNK_HOLE;
	slot->sum = chunk->sum;
}

static void load_one(void *arg, const struct kv_chunk *chunk)
{
	struct load *load = arg;
	uint32_t first = load->segment->number * KV_SEGMENT_CHUNKS;

	if (chunk->number - first < load->segment->capacity)
		load_slot(&load->segment->slots[chunk->number - first], chunk, &load->error);
}

static void segment_free(struct kv_segment *segment)
{
	for (uint32_t i = 0; segment && i < segment->capacity; i++)
		kv_slot_clear_extents(&segment->slots[i]);
	free(segment);
}

int kv_map_load(struct kv_version *version, uint32_t number)
{
	uint32_t count = kv_chunk_count(version->size);
	uint32_t segment = number / KV_SEGMENT_CHUNKS;
	uint32_t first = segment * KV_SEGMENT_CHUNKS;
	struct load load = {0};
	int r;

	if (!version->from_index || number >= count || segment_find(version, segment))
		return 0;
	load.segment = segment_new(segment, (uint32_t)kv_min_u64(count - first, KV_SEGMENT_CHUNKS));
	if (!load.segment)
		return -ENOMEM;
	(void)pthread_mutex_unlock(&version->lock);
	r = kv_index_map(version->file->core->index, version->file->ino, first, KV_SEGMENT_CHUNKS,
		load_one, &load);
	(void)pthread_mutex_lock(&version->lock);
	r = load.error ? load.error : r;
	/* If the map was pinned meanwhile, the index may have a later version's: keep what is here.
	 */
	if (r < 0 || !version->from_index || segment_find(version, segment)) {
		segment_free(load.segment);
		return r;
	}
	RB_INSERT(kv_segment_tree, &version->segments, load.segment);
	return 0;
}

static void pin_one(void *arg, const struct kv_chunk *chunk)
{
	struct load *load = arg;
	uint32_t number = chunk->number / KV_SEGMENT_CHUNKS;
	struct kv_slot *slot;

	if (number != load->number)
		load->known = segment_find(load->version, number) != NULL;
	load->number = number;
	/* It is whole, and the index may be at a later version's. */
	if (load->known)
		return;
	int r = kv_slot_get(load->version, chunk->number, &slot);
	if (r < 0)
		load->error = r;
	else
		load_slot(slot, chunk, &load->error);
}

int kv_map_load_all(struct kv_version *version)
{
	struct load load = {.version = version, .number = UINT32_MAX};
	KV_LOCKED(&version->lock);
	uint32_t count = kv_chunk_count(version->size);
	int r = 0;

	if (!version->from_index)
		return 0;
	/* Under the lock, which is longer than usual: it happens when a file that is being read is
	 * replaced or deleted. */
	for (uint64_t first = 0; first < count && r == 0; first += LOAD_ALL_CHUNKS) {
		uint32_t part = (uint32_t)kv_min_u64(count - first, LOAD_ALL_CHUNKS);

		r = kv_index_map(version->file->core->index, version->file->ino, (uint32_t)first,
			part, pin_one, &load);
		r = load.error ? load.error : r;
	}
	if (r == 0)
		version->from_index = false;
	return r;
}

static void rebase_one(void *arg, const struct kv_chunk *chunk)
{
	struct load *load = arg;
	struct kv_slot *slot = kv_slot_find(load->version, chunk->number);

	if (!slot || slot->state != KV_CHUNK_BASE)
		return;
	load_slot(slot, chunk, &load->error);
	if (slot->flags & KV_SLOT_RESIDENT)
		slot->state = KV_CHUNK_HOT;
	slot->flags &= (uint16_t)~KV_SLOT_RESIDENT;
}

int kv_map_rebase(struct kv_version *version)
{
	struct load load = {.version = version};
	struct kv_segment *segment, *next;
	KV_LOCKED(&version->lock);
	uint32_t count = kv_chunk_count(version->size);
	int r = 0;

	/* First of all: from now on the extents are the index's, whatever else goes wrong. */
	RB_FOREACH (segment, kv_segment_tree, &version->segments) {
		for (uint32_t i = 0; i < segment->capacity; i++) {
			struct kv_slot *slot = &segment->slots[i];

			slot->flags &= (uint16_t) ~(KV_SLOT_FRESH | KV_SLOT_SHARED);
			/* All of it was punched: there was nothing to write. DIRTY would mean that
			 * its content is in the object for ever. */
			if (slot->state == KV_CHUNK_DIRTY) {
				slot->state = KV_CHUNK_HOLE;
				slot->flags &= (uint16_t)~KV_SLOT_SPARSE;
			}
		}
	}
	for (segment = RB_MIN(kv_segment_tree, &version->segments); segment && r >= 0;
		segment = next) {
		uint32_t first = segment->number * KV_SEGMENT_CHUNKS;

		if (first < count) {
			segment = segment_grow(version, segment, segment->number,
				(uint32_t)kv_min_u64(count - first, KV_SEGMENT_CHUNKS) - 1);
			if (!segment)
				return -ENOMEM;
			r = kv_index_map(version->file->core->index, version->file->ino, first,
				segment->capacity, rebase_one, &load);
			r = load.error ? load.error : r;
		}
		for (uint32_t i = 0; i < segment->capacity; i++) {
			struct kv_slot *slot = &segment->slots[i];

			/* The base had nothing there. */
			if (slot->state == KV_CHUNK_BASE)
				slot->state = KV_CHUNK_HOLE;
			slot->flags &= (uint16_t)~KV_SLOT_RESIDENT;
		}
		next = RB_NEXT(kv_segment_tree, &version->segments, segment);
	}
	version->base_chunks = 0;
	version->from_index = true;
	return r;
}

void kv_map_free(struct kv_version *version)
{
	struct kv_segment *segment;

	while ((segment = RB_MIN(kv_segment_tree, &version->segments))) {
		RB_REMOVE(kv_segment_tree, &version->segments, segment);
		segment_free(segment);
	}
}

int kv_chunk_find(struct kv_version *version, uint32_t number, struct kv_bits *ret_bits,
	uint64_t *ret_devices)
{
	struct kv_version *held = kv_version_ref(version);
	int r;

	for (;;) {
		struct kv_version *base = NULL;

		(void)pthread_mutex_lock(&held->lock);
		r = kv_map_load(held, number);
		const struct kv_slot *slot = kv_slot_find(held, number);
		*ret_bits = (struct kv_bits){0};
		*ret_devices = 0;
		if (r == 0 && kv_slot_state(held, number) == KV_CHUNK_BASE) {
			base = kv_version_ref(held->base);
		} else if (r == 0 && slot) {
			kv_slot_bits(slot, ret_bits);
			*ret_devices = kv_slot_devices(slot);
		}
		(void)pthread_mutex_unlock(&held->lock);
		kv_version_unref(held);
		if (!base)
			return r;
		held = base;
	}
}

int kv_chunk_bits(struct kv_version *version, uint32_t number, struct kv_bits *ret_bits)
{
	uint64_t devices;

	return kv_chunk_find(version, number, ret_bits, &devices);
}
