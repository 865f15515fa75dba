/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing to a version, for those who change one: write.c, and write_pair.c for what fills a huge
 * page. No locks held unless said; errors are negative errno.
 */
#ifndef KVFS_FS_WRITE_INTERNAL_H
#define KVFS_FS_WRITE_INTERNAL_H

#include "fs/core_internal.h"

/* A writer's state across the chunks of one request. The caller has entered the version. */
struct kv_writer {
	struct kv_version *version;
	uint64_t promised; /* blocks reserved and not used yet */
	uint64_t growth;   /* blocks that this will add to the version, promised by the quota */
	bool stream;       /* goes on where the write before has ended */
	int64_t since_ms;  /* when it came to the chunk at hand */
};
/* Writes what lies inside one chunk. Sizes are the caller's. */
int kv_writer_span(struct kv_writer *writer, const struct kv_span *span, const uint8_t *memory);
/*
 * Bytes of a write of SIZE bytes at OFFSET that fill a whole huge page which the version does not
 * have yet, written: they come into one page at once. 0: not to be had that way, nothing changed.
 */
int64_t kv_writer_pair(
	struct kv_writer *writer, uint64_t offset, uint64_t size, const uint8_t *memory);
/* Lock held, the slot's content resident (or not needed): DIRTY with BITS. The promise pays for it.
 */
int kv_writer_make_dirty(struct kv_writer *writer, uint32_t number, const struct kv_bits *bits);
/* Lock held. The object, large enough for END bytes. */
int kv_writer_object(struct kv_version *version, uint64_t end);
/* Reserves what the bytes [OFFSET, OFFSET + SIZE) need. */
int kv_writer_promise(struct kv_writer *writer, uint64_t offset, uint64_t size);
void kv_writer_done(struct kv_writer *writer);
/* Makes sure that BLOCKS are promised and not used. */
int kv_writer_promise_more(struct kv_writer *writer, unsigned blocks);
/* Makes a BASE, COLD or HOT chunk DIRTY with the content it has. */
int kv_writer_own(struct kv_writer *writer, uint32_t number);
/* Cuts [OFFSET, OFFSET + SIZE) at chunk borders: the piece at OFFSET. */
struct kv_span kv_span_at(uint64_t offset, uint64_t size);

#endif
