/* SPDX-License-Identifier: Apache-2.0 */
/* What a power cut leaves of the simulated disks. */
#include <stdlib.h>
#include <string.h>

#include "tests/crash/sim.h"

static void *must(void *memory)
{
	if (!memory)
		abort();
	return memory;
}

void sim_cut_init(struct sim_cut *cut, struct sim *sim, const struct sim_image *start)
{
	*cut = (struct sim_cut){.sim = sim};
	sim_image_init(&cut->safe);
	sim_image_copy(&cut->safe, start);
	for (unsigned i = 0; i < SIM_DISKS; i++)
		cut->stamps[i] = must(calloc(SIM_BLOCKS, sizeof(*cut->stamps[i])));
	cut->pending = must(calloc(sim->count + 1, sizeof(*cut->pending)));
	cut->limbo = must(calloc(sim->count + 1, sizeof(*cut->limbo)));
	/* Blocks are put together from parts of some writes: they are ours. */
	sim_image_own(&cut->safe);
}

void sim_cut_done(struct sim_cut *cut)
{
	sim_image_free_blocks(&cut->safe);
	sim_image_done(&cut->safe);
	for (unsigned i = 0; i < SIM_DISKS; i++)
		free(cut->stamps[i]);
	free(cut->pending);
	free(cut->limbo);
}

/* The part of EVENT that lies in block B. */
static void copy_part(uint8_t *block, const struct sim_event *event, uint32_t b)
{
	uint64_t begin = kv_max_u64(event->offset, (uint64_t)b * KV_BLOCK_SIZE);
	uint64_t end = kv_min_u64(event->offset + event->length, (uint64_t)(b + 1) * KV_BLOCK_SIZE);

	memcpy(block + begin % KV_BLOCK_SIZE, event->bytes + (begin - event->offset), end - begin);
}

static uint32_t first_block(const struct sim_event *event)
{
	return (uint32_t)(event->offset / KV_BLOCK_SIZE);
}

static uint32_t end_block(const struct sim_event *event)
{
	return (uint32_t)kv_div_round_up(event->offset + event->length, KV_BLOCK_SIZE);
}

static void grow_index(struct sim_image *image, const struct sim_event *event, uint32_t block)
{
	uint64_t end =
		kv_min_u64(event->offset + event->length, (uint64_t)(block + 1) * KV_BLOCK_SIZE);

	if (event->disk == SIM_INDEX)
		image->index_size = kv_max_u64(image->index_size, end);
}

static void make_safe(struct sim_cut *cut, size_t number)
{
	const struct sim_event *event = &cut->sim->events[number];
	const uint8_t **blocks = cut->safe.blocks[event->disk];

	for (uint32_t b = first_block(event); b < end_block(event); b++) {
		if (cut->stamps[event->disk][b] > number + 1)
			continue;
		if (!blocks[b])
			blocks[b] = must(calloc(1, KV_BLOCK_SIZE));
		copy_part((uint8_t *)blocks[b], event, b);
		cut->stamps[event->disk][b] = (uint32_t)number + 1;
		grow_index(&cut->safe, event, b);
	}
}

static void flush(struct sim_cut *cut, const struct sim_event *flush)
{
	size_t left = 0;

	for (size_t i = 0; i < cut->pending_count; i++) {
		size_t number = cut->pending[i];
		const struct sim_event *event = &cut->sim->events[number];
		bool covered = event->disk == flush->disk && event->completed <= flush->begun;

		if (covered && flush->kind == SIM_FLUSH && !cut->limbo[number]) {
			make_safe(cut, number);
			continue;
		}
		cut->limbo[number] |= covered;
		cut->pending[left++] = number;
	}
	cut->pending_count = left;
}

void sim_cut_step(struct sim_cut *cut)
{
	const struct sim_event *event = &cut->sim->events[cut->place];

	if (event->kind == SIM_WRITE)
		cut->pending[cut->pending_count++] = cut->place;
	else
		flush(cut, event);
	cut->place++;
}

struct choice {
	enum sim_survivors survivors;
	uint64_t seed;
	uint32_t blocks; /* of the write in hand */
};

static bool whole_write_stays(struct choice *choice, const struct sim_event *event)
{
	choice->blocks = end_block(event) - first_block(event);
	switch (choice->survivors) {
	case SIM_NOTHING:
		return false;
	case SIM_INDEX_ONLY:
		return event->disk == SIM_INDEX;
	case SIM_DEVICES_ONLY:
		return event->disk != SIM_INDEX;
	case SIM_WRITES_BY_CHANCE:
		return sim_random(&choice->seed) >> 40 & 1;
	case SIM_TORN:
		choice->blocks = (uint32_t)(sim_random(&choice->seed) % (choice->blocks + 1));
		return true;
	default:
		return true;
	}
}

static bool block_stays(struct choice *choice, uint32_t number)
{
	if (choice->survivors == SIM_BLOCKS_BY_CHANCE)
		return sim_random(&choice->seed) >> 40 & 1;
	return number < choice->blocks;
}

/* Blocks that parts of writes were put together in; they live until the next image. */
static uint8_t *scratch_block(unsigned number)
{
	static uint8_t **blocks;
	static unsigned count;

	if (number >= count) {
		blocks = must(realloc(blocks, (number + 1) * sizeof(*blocks)));
		for (; count <= number; count++)
			blocks[count] = must(malloc(KV_BLOCK_SIZE));
	}
	return blocks[number];
}

static const uint8_t *with_part(
	const uint8_t *before, const struct sim_event *event, uint32_t b, unsigned *scratch_count)
{
	uint64_t begin = (uint64_t)b * KV_BLOCK_SIZE;
	uint8_t *block;

	if (event->offset <= begin && event->offset + event->length >= begin + KV_BLOCK_SIZE)
		return event->bytes + (begin - event->offset);
	block = scratch_block((*scratch_count)++);
	if (before)
		memcpy(block, before, KV_BLOCK_SIZE);
	else
		memset(block, 0, KV_BLOCK_SIZE);
	copy_part(block, event, b);
	return block;
}

void sim_cut_image(struct sim_cut *cut, enum sim_survivors survivors, uint64_t seed,
	struct sim_image *ret_image)
{
	struct choice choice = {.survivors = survivors, .seed = seed | 1};
	unsigned scratch_count = 0;

	sim_image_copy(ret_image, &cut->safe);
	for (size_t i = 0; i < cut->pending_count; i++) {
		const struct sim_event *event = &cut->sim->events[cut->pending[i]];
		const uint8_t **blocks = ret_image->blocks[event->disk];

		if (!whole_write_stays(&choice, event))
			continue;
		for (uint32_t b = first_block(event); b < end_block(event); b++) {
			/* A newer one is safe already. */
			if (cut->stamps[event->disk][b] > cut->pending[i] + 1)
				continue;
			if (!block_stays(&choice, b - first_block(event)))
				continue;
			blocks[b] = with_part(blocks[b], event, b, &scratch_count);
			grow_index(ret_image, event, b);
		}
	}
}
