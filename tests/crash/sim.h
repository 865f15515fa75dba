/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A simulated disk under a whole store: what the core writes to its devices and what LMDB writes to
 * the index's file go into one recording, in the order in which they were issued. For every place
 * in it the images can be built that a power cut there may leave.
 *
 * Devices stand behind struct kv_io_ops; sim_files.c takes the place of the C library's functions
 * for the index's file, which lies on a tmpfs because LMDB maps it.
 *
 * What a power cut leaves: a write that was complete when a flush began that succeeded is there.
 * Every other block of 4 KiB that was issued is there or not, by itself; but of two writes to the
 * same block never the older instead of the newer. After a flush that failed the writes before it
 * are never safe again, as Linux has it.
 *
 * Threads: any for the I/O; one for everything else. There is one simulation in a process.
 */
#ifndef KVFS_TESTS_CRASH_SIM_H
#define KVFS_TESTS_CRASH_SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "fs/device.h"

#define SIM_DEVICES 2u
#define SIM_INDEX SIM_DEVICES /* number of the index's file among the disks */
#define SIM_DISKS (SIM_DEVICES + 1u)
#define SIM_DEVICE_SIZE (UINT64_C(64) << 20)
/* Of every disk; the index stays below it, too. */
#define SIM_BLOCKS ((uint32_t)(SIM_DEVICE_SIZE / KV_BLOCK_SIZE))

enum sim_kind {
	SIM_WRITE,
	SIM_FLUSH,
	SIM_FLUSH_FAILED,
};

/* A place in the recording is a number of events: place N is before event N. */
struct sim_event {
	enum sim_kind kind;
	unsigned disk;
	uint64_t offset;
	uint32_t length;
	uint8_t *bytes;
	size_t completed; /* writes: the place then; SIZE_MAX: not yet */
	size_t begun;     /* flushes: the place then */
};

/* What goes wrong while the workload runs. */
enum sim_fault {
	SIM_FAULT_WRITE, /* of a device: EIO, half of it written */
	SIM_FAULT_SHORT,
	SIM_FAULT_READ,
	SIM_FAULT_FULL, /* submit answers -EAGAIN */
	SIM_FAULT_FLUSH,
	SIM_FAULT_INDEX_WRITE, /* EIO */
	SIM_FAULT_INDEX_FULL,  /* ENOSPC, half of it written */
	SIM_FAULT_INDEX_HEAD,  /* EIO, of a head page */
	SIM_FAULT_INDEX_FLUSH,
	_SIM_FAULT_MAX,
};

/* Disks as they are, or as a cut leaves them. Blocks are borrowed; NULL is zeros. */
struct sim_image {
	const uint8_t **blocks[SIM_DISKS];
	uint64_t index_size; /* bytes */
};

struct sim {
	struct kv_io_ops ops;
	pthread_mutex_t lock; /* of all below */
	uint64_t seed;
	bool recording;
	bool late; /* completions come late and in any order */
	struct sim_event *events;
	size_t count;
	size_t capacity;
	/* After so many that succeed (negative: never), so many fail in a row. */
	struct {
		int after;
		int count;
	} faults[_SIM_FAULT_MAX];
	unsigned struck;       /* faults that came true */
	struct sim_image live; /* the devices; the index is in its file */
	bool open[SIM_DEVICES];
	char index_path[320];
	/* Copies that are not the recording's; freed by sim_forget. */
	uint8_t **copies;
	size_t copy_count;
	size_t copy_capacity;
};

struct sim *sim_new(const char *store);
struct sim *sim_free(struct sim *sim);
uint64_t sim_random(uint64_t *seed);

/* The place now. */
size_t sim_place(struct sim *sim);
/* Begins a recording: the events before are gone. */
void sim_record(struct sim *sim, uint64_t seed);
/* Ends it. What is written from now on is forgotten by sim_load. */
void sim_stop(struct sim *sim);

void sim_image_init(struct sim_image *image);
void sim_image_done(struct sim_image *image);
/* TO shares FROM's blocks. */
void sim_image_copy(struct sim_image *to, const struct sim_image *from);
/* IMAGE is what the disks and the index's file hold from now on. */
void sim_load(struct sim *sim, const struct sim_image *image);
/* What they hold; the blocks are IMAGE's own, to be freed by sim_image_free_blocks. */
void sim_save(struct sim *sim, struct sim_image *ret_image);
/* Makes the blocks of IMAGE its own. */
void sim_image_own(struct sim_image *image);
void sim_image_free_blocks(struct sim_image *image);

/* ---- Cuts ---- */

enum sim_survivors {
	SIM_NOTHING,
	SIM_EVERYTHING,
	SIM_BLOCKS_BY_CHANCE,
	SIM_WRITES_BY_CHANCE,
	SIM_TORN,       /* every write up to some block */
	SIM_INDEX_ONLY, /* of what is not safe */
	SIM_DEVICES_ONLY,
	_SIM_SURVIVORS_MAX,
};

/* Goes through the recording; at a place it can tell what a cut there leaves. */
struct sim_cut {
	struct sim *sim;
	size_t place;
	struct sim_image safe;
	/* Event that wrote the safe block last, plus one. */
	uint32_t *stamps[SIM_DISKS];
	size_t *pending; /* writes that are not safe, in order */
	size_t pending_count;
	bool *limbo; /* by event: a flush that failed has covered it */
};
/* START is what the disks held at place 0. */
void sim_cut_init(struct sim_cut *cut, struct sim *sim, const struct sim_image *start);
void sim_cut_done(struct sim_cut *cut);
/* One place on. */
void sim_cut_step(struct sim_cut *cut);
/* RET_IMAGE (initialised) borrows blocks of the recording and of CUT. */
void sim_cut_image(struct sim_cut *cut, enum sim_survivors survivors, uint64_t seed,
	struct sim_image *ret_image);

/* ---- For sim_files.c ---- */

/* True once, when FAULT is due. Lock held. */
bool sim_strikes(struct sim *sim, enum sim_fault fault);
/* Lock held. Returns its number, for sim_completed; SIZE_MAX when nothing is recorded. */
size_t sim_note_write(
	struct sim *sim, unsigned disk, const void *bytes, uint32_t length, uint64_t offset);
void sim_completed(struct sim *sim, size_t event);
void sim_note_flush(struct sim *sim, unsigned disk, size_t begun, bool failed);
/* Where the wrapped functions find it. */
extern struct sim *sim_current;
/* The wrapped functions' own ways to the kernel. */
void sim_file_store(const char *path, const uint8_t *const *blocks, uint64_t size);
/* Returns the size in bytes; BLOCKS receives copies. */
uint64_t sim_file_fetch(const char *path, const uint8_t **ret_blocks);

#endif
