/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device's memory and copy engines, as one table of functions: `host` (memfds and memcpy, always
 * there), `cuda` (the driver, by dlopen) and `cufile` (cuda, and reads from drives past the CPU).
 * The helper and the library see devices through this table only; no CUDA type leaves the files
 * backend_cuda.c, backend_cufile.c and cuda_driver.c.
 *
 * Objects, each freed by who made it, all before the backend is closed
 *   kvg_backend  one opened device
 *   kvg_segment  a piece of device memory that can be shared with other processes
 *   kvg_mapping  segments, one behind the other, at one device address of this process
 *   kvg_event    a mark in a stream
 *   kvg_direct   a file that the device reads by itself
 * A stream is a CUstream where there is CUDA, so an engine's own stream can be passed; NULL is the
 * default stream (of host: the call itself does the work).
 *
 * Units: sizes and offsets are bytes; device addresses are plain numbers (CUdeviceptr).
 * Threads: every function may be called by any thread, but the calls on one stream, one mapping or
 * one event by one thread at a time. No function needs a current context, and none leaves one
 * behind that was not current before. No fork between open and close.
 * Blocking: only those that say so wait for the device.
 * Errors: 0 or negative errno: -ENOMEM, no device memory (may be tried again); -ENODEV, no such
 * device; -EOPNOTSUPP, this device or driver cannot; -EXDEV, a descriptor of another device;
 * -EINVAL, the caller's mistake; -EIO, everything else, among it errors after which the process can
 * use the device no more. Those make the backend dead: each later call returns -EIO at once, except
 * frees, which still free what is the CPU's. Out-parameters are written on success only.
 */
#ifndef KVFS_GPU_BACKEND_H
#define KVFS_GPU_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define KVG_UUID_SIZE 16u
/* Pieces in which long host memory is registered: drivers fail single calls of 512 GiB. */
#define KVG_REGISTER_MAX (UINT64_C(64) << 30)

typedef uint64_t kvg_devptr;
typedef void *kvg_stream;

struct kvg_backend;
struct kvg_segment;
struct kvg_mapping;
struct kvg_event;
struct kvg_direct;

struct kvg_backend_open {
	/*
	 * Which device: a UUID as the vendor's tools print it ("GPU-..." or "MIG-..."), or a number
	 * in the process's own order, or NULL: that of the calling thread's current context, else
	 * the first.
	 */
	const char *device;
	/*
	 * In an engine: take the driver that is loaded already and the thread's current context
	 * (without one, the device's primary context is retained); make no context of one's own.
	 */
	bool client;
	bool no_kernels;   /* none is run on the device, also not to try it */
	const char *sysfs; /* NULL: /sys */
};

struct kvg_device_info {
	uint8_t uuid[KVG_UUID_SIZE];
	char name[64];        /* of the product; "host memory" */
	char mode[96];        /* for people: driver, version, what is used and what is not */
	char kernels[96];     /* for people: whether the device's kernels are in use, and why not */
	uint64_t granularity; /* sizes of segments are multiples of it; a power of two */
	uint64_t total;       /* bytes of device memory */
	int numa_node;        /* where memory for copies belongs; -1: anywhere */
	bool integrated; /* host memory needs no registration (Grace): register only populates */
	bool register_read_only; /* KVG_REGISTER_READ_ONLY works */
	bool direct;             /* direct_* work, if direct_probe agrees */
	bool reserves;           /* a segment takes its memory when it is made: free_bytes tells */
	bool zeroed;             /* a new segment holds zeros; else whatever was there before */
	bool modelled;           /* not a real device: what is measured on it says nothing */
	int dl_device_type;      /* DLPack's: 1 CPU, 2 CUDA */
	int dl_device_id;        /* number of the device in this process's order */
};

enum kvg_copy_kind {
	KVG_COPY_TO_DEVICE,
	KVG_COPY_TO_HOST,
	KVG_COPY_ON_DEVICE,
};

/* One run of bytes. Of the addresses, that on the host is a pointer's value. */
struct kvg_copy {
	uint64_t to;
	uint64_t from;
	uint64_t size; /* > 0 */
};

/* A range of device memory. */
struct kvg_range {
	kvg_devptr address;
	uint64_t size; /* bytes */
};

/* The memory is mapped without PROT_WRITE in this process. */
#define KVG_REGISTER_READ_ONLY 1u

struct kvg_backend_ops {
	const char *name;

	/*
	 * Whether this machine has such a device at all; opens none. On failure one line of why in
	 * ret_reason.
	 */
	int (*probe)(char *ret_reason, size_t reason_size);
	/* One line in ret_error on failure. */
	int (*open)(const struct kvg_backend_open *open, struct kvg_backend **ret_backend,
		char *ret_error, size_t error_size);
	/* NULL is allowed. */
	void (*close)(struct kvg_backend *backend);
	void (*info)(struct kvg_backend *backend, struct kvg_device_info *ret_info);
	/* Bytes of device memory that are free now, whoever uses the rest. */
	int (*free_bytes)(struct kvg_backend *backend, uint64_t *ret_bytes);
	/* True after an error that this process cannot get over. */
	bool (*is_dead)(struct kvg_backend *backend);
	/* The driver's own code of this thread's last failed call (CUresult), 0 if none failed. */
	int (*last_code)(struct kvg_backend *backend);

	/* ---- Segments ---- */

	/* SIZE: a multiple of the granularity. What it holds is undefined. */
	int (*segment_new)(
		struct kvg_backend *backend, uint64_t size, struct kvg_segment **ret_segment);
	/*
	 * Drops the reference that this process has; the memory is free when all mappings, all
	 * imports and all descriptors of it are gone too. Mappings here stay valid. NULL is
	 * allowed.
	 */
	void (*segment_free)(struct kvg_backend *backend, struct kvg_segment *segment);
	/* A new descriptor (O_CLOEXEC) for others to import; the caller's. Not from an import. */
	int (*segment_export)(
		struct kvg_backend *backend, struct kvg_segment *segment, int *ret_fd);
	/*
	 * FD is borrowed. SIZE must be that of the exporter's segment: -EINVAL where that can be
	 * seen to be false, or FD is no such descriptor.
	 */
	int (*segment_import)(struct kvg_backend *backend, int fd, uint64_t size,
		struct kvg_segment **ret_segment);

	/*
	 * Maps COUNT segments one behind the other; for reading and writing, or for reading only.
	 * The segments may be freed before the mapping. Who fills a segment maps it for writing
	 * before its first export: later, and for imports, only reading is sure to work (-EACCES).
	 */
	int (*map)(struct kvg_backend *backend, struct kvg_segment *const *segments, size_t count,
		bool writable, struct kvg_mapping **ret_mapping);
	/* Nothing on the device may be using it any more: the caller waits for that. NULL is
	 * allowed. */
	void (*unmap)(struct kvg_backend *backend, struct kvg_mapping *mapping);
	kvg_devptr (*address)(struct kvg_backend *backend, struct kvg_mapping *mapping);

	/* ---- Host memory ---- */

	/*
	 * Makes host memory (page-aligned, SIZE up to KVG_REGISTER_MAX, of one mapping: anonymous,
	 * memfd or tmpfs) fit for copies that the device makes by itself. Waits, about 0.1 s a GB.
	 * A failure leaves nothing behind, also no pending error in the driver.
	 */
	int (*host_register)(
		struct kvg_backend *backend, void *memory, uint64_t size, unsigned flags);
	/* MEMORY: as it was registered, whole; no copy may be using it. */
	void (*host_unregister)(struct kvg_backend *backend, void *memory);

	/* ---- Streams, copies ---- */

	int (*stream_new)(struct kvg_backend *backend, kvg_stream *ret_stream);
	/* Waits for what is in it. NULL is allowed. */
	void (*stream_free)(struct kvg_backend *backend, kvg_stream stream);
	/* Waits. */
	int (*stream_sync)(struct kvg_backend *backend, kvg_stream stream);
	/*
	 * Queues COUNT copies, in one call to the driver where it has one; in no order among
	 * themselves, but after what is in STREAM already. Host memory stays as it is until they
	 * are done. Unregistered host memory is allowed: then the call may wait. The array is the
	 * caller's again when the call returns. On an error some of the copies may still take
	 * place. Thousands of small ones on the device may be a kernel's: the first such call
	 * waits until that was tried, on a stream of its own.
	 */
	int (*copy)(struct kvg_backend *backend, kvg_stream stream, enum kvg_copy_kind kind,
		const struct kvg_copy *copies, size_t count);
	/* Queues: SIZE bytes from TO on become BYTE. */
	int (*fill)(struct kvg_backend *backend, kvg_stream stream, kvg_devptr to, uint8_t byte,
		uint64_t size);

	int (*event_new)(struct kvg_backend *backend, struct kvg_event **ret_event);
	/* NULL is allowed. */
	void (*event_free)(struct kvg_backend *backend, struct kvg_event *event);
	/* Marks the end of what is in STREAM now; an event can be used again and again. */
	int (*event_record)(
		struct kvg_backend *backend, struct kvg_event *event, kvg_stream stream);
	/*
	 * 0: all before the mark is done, also if nothing was recorded; -EAGAIN: not yet; other
	 * errors: it failed.
	 */
	int (*event_query)(struct kvg_backend *backend, struct kvg_event *event);

	/* ---- Checksums by the device itself; NULL: there are none ---- */

	/*
	 * Whether checksum works here, which is tried on the device itself, against the CPU, by
	 * the first call; it waits for that, later ones know. -EOPNOTSUPP with one line in
	 * ret_reason if it does not work, -EIO if the device is dead.
	 */
	int (*checksum_probe)(struct kvg_backend *backend, char *ret_reason, size_t reason_size);
	/*
	 * The sums (XXH3-64, seed 0: the store's of a chunk) of COUNT ranges, each of any size and
	 * alignment, as their bytes are after what is in STREAM already. Waits. Any number of
	 * threads at a time, each on a stream of its own. Ranges of some 1 MiB, and as many as
	 * there are in one call, suit the device best: each is one block of threads. The ranges
	 * stay mapped until it returns. -EOPNOTSUPP: as checksum_probe; -EINVAL: not all of a range
	 * is memory that this device can read, and nothing was started. On an error ret_sums
	 * holds nothing of use.
	 */
	int (*checksum)(struct kvg_backend *backend, kvg_stream stream,
		const struct kvg_range *ranges, size_t count, uint64_t *ret_sums);

	/* ---- Reads by the device itself; NULL where info.direct is false ---- */

	/*
	 * Reads 4 KiB at OFFSET (a multiple of it) of FD both ways, with no silent way around
	 * through the CPU, and compares. -EOPNOTSUPP with one line in ret_reason if it does not
	 * work.
	 */
	int (*direct_probe)(struct kvg_backend *backend, int fd, uint64_t offset, char *ret_reason,
		size_t reason_size);
	/* One line of why the calling thread's last direct_register or direct_read failed. */
	void (*direct_reason)(struct kvg_backend *backend, char *ret_reason, size_t reason_size);
	/* FD is borrowed and must stay open until direct_close; opened with O_DIRECT. */
	int (*direct_open)(struct kvg_backend *backend, int fd, struct kvg_direct **ret_direct);
	/* NULL is allowed. */
	void (*direct_close)(struct kvg_backend *backend, struct kvg_direct *direct);
	/*
	 * Makes the range fit for it; to be undone before the range is unmapped. BASE: address of a
	 * mapping of one segment. -ENOSPC: no more can be registered, use other ways.
	 */
	int (*direct_register)(struct kvg_backend *backend, kvg_devptr base, uint64_t size);
	void (*direct_unregister)(struct kvg_backend *backend, kvg_devptr base);
	/*
	 * Reads SIZE bytes at FILE_OFFSET to BASE + OFFSET, BASE as registered. Waits. Returns the
	 * bytes, maybe fewer; 0 at the end of the file; -EOPNOTSUPP: neither this nor others will
	 * work.
	 */
	ssize_t (*direct_read)(struct kvg_backend *backend, struct kvg_direct *direct,
		kvg_devptr base, uint64_t offset, uint64_t size, uint64_t file_offset);
};

/* Each implementation begins with this. */
struct kvg_backend {
	const struct kvg_backend_ops *ops;
};

extern const struct kvg_backend_ops kvg_backend_host;
extern const struct kvg_backend_ops kvg_backend_cuda;
extern const struct kvg_backend_ops kvg_backend_cufile;

/*
 * Opens the backend NAME, or with NULL the best one that works: cuda, host. (cufile only by name.)
 * ret_reasons gets one line of why others were not taken, or why it failed.
 */
int kvg_backend_choose(const char *name, const struct kvg_backend_open *open,
	struct kvg_backend **ret_backend, char *ret_reasons, size_t reasons_size);
/* NULL is allowed. Returns NULL. */
struct kvg_backend *kvg_backend_close(struct kvg_backend *backend);

#endif
