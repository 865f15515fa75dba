/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One chunk that is brought into DRAM, for fill_run.c, which asks the devices for it.
 */
#ifndef KVFS_FS_FILL_PIECE_H
#define KVFS_FS_FILL_PIECE_H

#include "fs/fill_internal.h"

/* One chunk on its way. */
struct kv_piece {
	struct kv_fill_run *run;
	struct kv_fill *job;
	struct kv_version
		*source; /* whose extents these are; counted if it is not the job's version */
	struct kv_blocks blocks;   /* present blocks, or more: what the memory has room for */
	int buffer;                /* index of a ring buffer that is the memory, or -1 */
	struct kv_extent *extents; /* a copy */
	unsigned extent_count;
	struct kv_io *ios;
	unsigned io_count;
	uint64_t sum;
	uint8_t *target; /* where it is copied to; NULL: it is read there */
	bool early;      /* TARGET is still to come */
	unsigned left;   /* transfers, and TARGET */
	int result;
	bool finished;
	bool mismatch;
	bool first_mismatch; /* of the source */
};

/* Finds out where the content is and makes transfers of it, or copies it if that is DRAM. The
 * result is in the piece. */
void kv_piece_prepare(struct kv_piece *piece);
/* Its transfers are through: checks what they brought, and ends the chunk's slot unless that is
 * damaged. */
void kv_piece_finish(struct kv_core *core, struct kv_piece *piece);
/* The chunk is in the object (RESULT 0), or must look as if it had never been asked for. */
void kv_piece_settle(struct kv_core *core, struct kv_piece *piece);
/* After a mismatch: the file loses its name, then who waits hears of it. */
void kv_piece_end_damaged(struct kv_core *core, struct kv_piece *piece);

#endif
