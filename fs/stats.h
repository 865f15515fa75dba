/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counters of one mount. One X-macro is the list: the struct, the names in `kvfs status` and the
 * README's table cannot diverge. Any thread adds with kv_stat_add; reads are relaxed, for people.
 */
#ifndef KVFS_FS_STATS_H
#define KVFS_FS_STATS_H

#include <stdatomic.h>
#include <stdint.h>

#define KV_STATS(X)                                                                                \
	X(fuse_lookup, "LOOKUP requests")                                                          \
	X(fuse_getattr, "GETATTR requests")                                                        \
	X(lookup_names, "names asked for by the batch look-up")                                    \
	X(fuse_open, "OPEN and CREATE requests")                                                   \
	X(fuse_read, "READ requests that reached the daemon")                                      \
	X(fuse_read_bytes, "bytes the daemon served for them")                                     \
	X(fuse_write, "WRITE requests that reached the daemon")                                    \
	X(fuse_write_bytes, "bytes the daemon took in by them")                                    \
	X(open_hot, "opens for reading answered from DRAM")                                        \
	X(open_cold, "opens for reading that waited for a fill")                                   \
	X(open_streamed, "opens for reading served while the file fills")                          \
	X(open_passthrough, "opens passed through to the kernel")                                  \
	X(fill_chunks, "chunks read from the devices")                                             \
	X(fill_bytes, "bytes read from the devices")                                               \
	X(writeback_chunks, "chunks written to the devices")                                       \
	X(writeback_bytes, "bytes written to the devices")                                         \
	X(writeback_errors, "versions lost to a failed write-back")                                \
	X(published, "versions published")                                                         \
	X(unfinished, "versions not published: their writer was killed, or a write failed")        \
	X(committed, "versions made durable")                                                      \
	X(adopted, "files found in DRAM after a restart")                                          \
	X(evicted_dram, "files dropped from DRAM")                                                 \
	X(evicted_store, "files evicted from the store")                                           \
	X(evicted_store_bytes, "bytes freed by that")                                              \
	X(checksum_errors, "chunks whose checksum did not match")                                  \
	X(quarantined, "files quarantined for that")                                               \
	X(scrub_bytes, "bytes that a scrub has read and checked")                                  \
	X(scrub_damaged, "files that a scrub has found damaged")                                   \
	X(io_errors, "device requests that failed")                                                \
	X(io_timeouts, "waits given up because a device did not answer")                           \
	X(throttled, "writes held back until write-back caught up")                                \
	X(replies_refused, "replies that the kernel did not take; their callers got EIO")          \
	X(ends_retried, "ends of open files and names for which there was no memory at first")     \
	X(limited, "opens and writes refused because their user had all he may have")

struct kv_stats {
#define KV_STATS_FIELD(name, help) _Atomic uint64_t name;
	KV_STATS(KV_STATS_FIELD)
#undef KV_STATS_FIELD
};

static inline void kv_stat_add(_Atomic uint64_t *counter, uint64_t n)
{
	atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static inline uint64_t kv_stat_get(const _Atomic uint64_t *counter)
{
	return atomic_load_explicit((_Atomic uint64_t *)counter, memory_order_relaxed);
}

#endif
