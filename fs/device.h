/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data devices of a store (raw block devices or files), and rings that read and write them.
 *
 * Each device begins with a superblock area of KV_DEVICE_DATA_START bytes: two copies of
 *
 *	offset  size  field (little-endian)
 *	     0     8  magic "kvfsdev1"
 *	     8     4  format version
 *	    12     4  device number
 *	    16    16  store UUID
 *	    32     8  device size in bytes, as formatted
 *	    40     8  first byte of the data area
 *	    48     4  devices in the store
 *	    52     4  zero
 *	    56     8  XXH3-64 of bytes 0..55
 *
 * in a block each (bytes 56.. of the block after the sum are zero), at offsets 0 and KV_BLOCK_SIZE.
 *Block N of the index's count is at KV_DEVICE_DATA_START + N * KV_BLOCK_SIZE.
 *
 * All I/O goes through struct kv_io_ops. The real table is O_DIRECT and io_uring; the tests
 * put a simulated disk there. Files that refuse O_DIRECT are used buffered (logged once).
 *
 * Threads: struct kv_devices may be used by any thread; a struct kv_ring belongs to the thread that
 *made it. Errors: negative errno; a failed device is counted and logged by this module,
 *rate-limited.
 */
#ifndef KVFS_FS_DEVICE_H
#define KVFS_FS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fs/base.h"
#include "fs/stats.h"

#define KV_DEVICE_DATA_START (UINT64_C(1) << 20)
#define KV_DEVICE_FORMAT 1u
#define KV_RING_DEPTH_MAX 256u
/* Size of one registered buffer of a ring; transfers up to that size go through them. */
#define KV_RING_BUFFER_SIZE (256u << 10)

enum kv_io_kind {
	KV_IO_READ,
	KV_IO_WRITE,
};

/* One transfer: block-aligned offset, length and memory. Lives until its completion was reaped. */
struct kv_io {
	enum kv_io_kind kind;
	uint16_t device;
	int buffer;      /* index of a registered buffer that holds MEMORY, or -1 */
	uint64_t offset; /* byte offset on the device */
	void *memory;
	uint32_t length; /* bytes */
	int result;      /* after completion: 0 or negative errno; never short */
	uint32_t done;   /* bytes transferred so far; the ring's own */
	void *arg;       /* the caller's */
};

/* A completion queue of the table below, opaque to all but its implementation. */
struct kv_io_queue;

/*
 * The one seam to the hardware. HANDLE values come from open. Results are negative errno.
 * submit queues one transfer (-EAGAIN when the queue is full); reap blocks until at least one is
 * complete (wait) or returns 0, stores up to CAPACITY of them and their raw results (bytes or
 * negative errno).
 */
struct kv_io_completion {
	struct kv_io *io;
	int result;
};
struct kv_io_ops {
	void *context;
	/* Takes PATH for this process alone: -EBUSY. CREATE: a new file of SIZE bytes, -EEXIST. */
	int (*open)(void *context, const char *path, bool create, uint64_t size, int *ret_handle,
		uint64_t *ret_size);
	void (*close)(void *context, int handle);
	/* read and write transfer all of LENGTH, or fail. */
	int (*read)(void *context, int handle, void *memory, size_t length, uint64_t offset);
	int (*write)(void *context, int handle, const void *memory, size_t length, uint64_t offset);
	int (*flush)(void *context, int handle);
	int (*queue_new)(void *context, const int *handles, unsigned handle_count, unsigned depth,
		struct kv_io_queue **ret_queue);
	void (*queue_free)(void *context, struct kv_io_queue *queue);
	int (*submit)(void *context, struct kv_io_queue *queue, struct kv_io *io);
	int (*reap)(void *context, struct kv_io_queue *queue, bool wait,
		struct kv_io_completion *ret_completions, unsigned capacity);
	/* Memory of registered buffer INDEX, or NULL if the queue has fewer. */
	void *(*buffer)(void *context, struct kv_io_queue *queue, unsigned index);
	/*
	 * Registers COUNT buffers of SIZE bytes each, at MEMORY, in place of the queue's own;
	 * nothing is in flight, and they outlive it. On an error the queue has no buffers. NULL: it
	 * cannot.
	 */
	int (*lend)(void *context, struct kv_io_queue *queue, void *memory, size_t size,
		unsigned count);
	int64_t (*clock_ns)(void *context); /* CLOCK_REALTIME */
	void (*random)(void *context, void *memory, size_t length);
};

/* The real table: O_DIRECT, io_uring with registered files and buffers where the limits allow them.
 */
const struct kv_io_ops *kv_io_real(void);

struct kv_devices;

/* How a device answers. */
enum kv_device_state {
	KV_DEVICE_OK,
	KV_DEVICE_SLOW, /* something is without an answer for longer than a device should take */
	KV_DEVICE_HUNG, /* ... for so long that nobody waits for it any more */
};

struct kv_device_info {
	const char *path; /* valid as long as the devices */
	uint64_t size;    /* bytes, as formatted */
	uint64_t blocks;  /* blocks that may be allocated */
	bool failed;
	enum kv_device_state state;
	uint64_t waiting_ms; /* how long the oldest transfer or flush is without an answer */
};

/*
 * Writes superblocks to COUNT devices. PATHS[i] is a block device, or a file: created with
 * SIZE_BYTES if absent (preallocated where the filesystem can). Devices that carry a kvfs
 * superblock or, on block devices, any known signature or a mount are refused unless FORCE (a
 * mounted one always). ret_blocks[i] receives the allocatable blocks. One line for the user in
 * ret_error on failure; files it created are removed then.
 */
struct kv_devices_format {
	const struct kv_io_ops *ops;
	const char *const *paths;
	unsigned count;
	uint64_t size_bytes; /* of files to be created */
	const uint8_t *uuid; /* 16 bytes */
	bool force;
	/*
	 * May be NULL. Called when every check has passed and new files exist, before the first
	 * superblock is written, with the blocks of each device: its failure ends the format, and
	 * it writes the line in ret_error itself.
	 */
	int (*prepare)(void *arg, const uint64_t *blocks);
	void *prepare_arg;
};
int kv_devices_format(const struct kv_devices_format *format, uint64_t *ret_blocks, char *ret_error,
	size_t error_size);

/* Opens, locks (-EBUSY) and verifies them against UUID and BLOCKS; a damaged first superblock is
 * repaired from the second. */
struct kv_devices_open {
	const struct kv_io_ops *ops;
	const char *const *paths;
	unsigned count;
	const uint8_t *uuid;
	const uint64_t *blocks;
	struct kv_stats *stats;
};
int kv_devices_open(const struct kv_devices_open *open, struct kv_devices **ret_devices,
	char *ret_error, size_t error_size);
/* NULL is allowed. Returns NULL. */
struct kv_devices *kv_devices_close(struct kv_devices *devices);

unsigned kv_devices_count(const struct kv_devices *devices);
void kv_devices_info(
	const struct kv_devices *devices, unsigned number, struct kv_device_info *ret_info);
/* Makes all completed writes of DEVICE durable. */
int kv_devices_flush(struct kv_devices *devices, unsigned number);
/* True if the device was written since the last successful flush. */
bool kv_devices_unflushed(const struct kv_devices *devices, unsigned number);
const struct kv_io_ops *kv_devices_ops(const struct kv_devices *devices);

/*
 * Looks how long transfers and flushes have been without an answer at NOW_MS (kv_monotonic_ms):
 * from SLOW_MS on a device is slow, from HUNG_MS on hung, until they are answered. A transfer that
 * is under way keeps its memory and its ring's thread until then, for the device may still write to
 * it; reads that are added to a ring for a hung device end at once with -ECANCELED. Logs what has
 * changed and returns whether anything has. By one thread, now and then.
 */
bool kv_devices_watch(
	struct kv_devices *devices, int64_t now_ms, uint64_t slow_ms, uint64_t hung_ms);
/*
 * What is under way is reckoned from NOW_MS, as if it had begun then: nobody has looked for long,
 * and then nobody may have taken the answers either (a machine that stood still, or starves us). By
 * the thread that watches.
 */
void kv_devices_excuse(struct kv_devices *devices, int64_t now_ms);
/* Bit N: device N is slow (hung ones are slow, too), or hung. */
uint64_t kv_devices_slow(const struct kv_devices *devices);
uint64_t kv_devices_hung(const struct kv_devices *devices);
/* True if there is no device that answers in time. */
bool kv_devices_all_slow(const struct kv_devices *devices);
/* From now on reads of slow devices are refused like those of hung ones: the mount ends. */
void kv_devices_closing(struct kv_devices *devices);

/* Byte offset on its device of extent E. */
static inline uint64_t kv_extent_offset(const struct kv_extent *e)
{
	return KV_DEVICE_DATA_START + (e->start << KV_BLOCK_SHIFT);
}

struct kv_ring;
/* DEPTH transfers in flight at most (capped at KV_RING_DEPTH_MAX). */
int kv_ring_new(struct kv_devices *devices, unsigned depth, struct kv_ring **ret_ring);
struct kv_ring *kv_ring_free(struct kv_ring *ring);

/*
 * Runs COUNT transfers, keeping the queue as deep as allowed, and calls DONE (may be NULL) for each
 * as it completes, in any order, on this thread, while the others are in flight. Short transfers
 * are continued; every io->result is set. Returns 0, or the first error; DONE was called for all in
 * any case.
 */
int kv_ring_run(struct kv_ring *ring, struct kv_io *ios, unsigned count,
	void (*done)(void *arg, struct kv_io *io), void *arg);

/*
 * The same in steps, for callers that prepare transfers while earlier ones are under way. add
 * queues transfers, which must stay where they are until DONE; it waits when the queue is full.
 * submit starts what was added. wait starts it, too, and waits until one of those under way is
 * complete; end waits for all. DONE may be called in any of the four.
 */
void kv_ring_begin(struct kv_ring *ring, void (*done)(void *arg, struct kv_io *io), void *arg);
void kv_ring_add(struct kv_ring *ring, struct kv_io *ios, unsigned count);
void kv_ring_submit(struct kv_ring *ring);
void kv_ring_wait(struct kv_ring *ring);
int kv_ring_end(struct kv_ring *ring);

/* Registered buffers, KV_RING_BUFFER_SIZE bytes each: NULL if all are taken or none could be
 * registered. */
void *kv_ring_buffer_get(struct kv_ring *ring, int *ret_index);
void kv_ring_buffer_put(struct kv_ring *ring, int index);

#endif
