/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvg: files of a kvfs mount in device memory.
 *
 * An engine opens a file by its path, as always, and passes the descriptor. kvg_map gives it device
 * memory that holds the file, which the GPU helper (kvgpud) has loaded and shares with every other
 * process of the same user. kvg_pull copies parts of a file into memory of the engine's own, and
 * kvg_push the other way round, into a file open for writing: both work without a helper.
 *
 * Without a GPU (backend "host") device memory is memory of the CPU, and everything else is the
 * same.
 *
 * Ownership: a context owns the connection; buffers and ops are made from a context and freed
 * before it (kvg_unmap, kvg_op_free, kvg_close). Strings that are passed are copied, descriptors
 *are borrowed for the call only, arrays of segments may be freed when the call returns. Device
 *memory that segments name is the engine's, and must stay until the stream (scatter), or the op
 *(pull, push), has come past it. What is returned as `const char *` belongs to the library.
 *
 * Contexts: the library uses the CUDA driver that the process has loaded, and the calling thread's
 * current context at kvg_open (else the device's primary one); it makes none. Do not fork between
 * kvg_open and kvg_close.
 *
 * Threads: one at a time a kvg_ctx, and what was made from it; several contexts may be used at
 *once. kvg_op_poll is a call of its op's context. Ops have threads of their own. The event function
 *is called in the thread that called the library.
 *
 * Units: offsets, lengths and sizes are bytes; times milliseconds. A file is flat: its shape is the
 * engine's own matter, who says which bytes of the file go where (struct kvg_seg).
 *
 * Errors: 0 or a negative errno; out-parameters are written on success only. Among the errors
 *	-EINVAL          the caller's mistake: a range behind the file's end, unknown flags
 *	-ENOTCONN        opened without a helper, or the helper has lost the daemon
 *	-EPIPE           the helper has gone: what is mapped stays valid, kvg_open again for more
 *	-EPROTONOSUPPORT the helper is of another version (kvg_open)
 *	-ETIMEDOUT       the helper does not answer, or not in the time that was given
 *	-ENODEV, -EOPNOTSUPP  no such device; it cannot share memory
 *	-EXDEV           not on the helper's mount, or another device
 *	-EBUSY           the file is being written; kvg_evict: it is mapped
 *	-ESTALE          the file was closed, or changed
 *	-EACCES, -EBADF  the descriptor cannot be read, or the ticket is another user's
 *	-ERANGE          too small to be mapped: kvg_pull it
 *	-ENOSPC, -E2BIG  no room in device memory, now or ever: kvg_pull it
 *	-ENOBUFS         none in this user's share of it: the same
 *	-ENODATA         not there, and KVG_MAP_NOSTAGE
 *	-EDQUOT          this process has not given back what was revoked
 *	-EMFILE, -EUSERS, -EAGAIN  too many mappings, connections, requests at once
 *	-ENOMEM          no memory, of the host or of the device
 *	-EIO             the bytes are damaged, or the device has failed: kvg_error says which.
 *After an error that the driver lets no process get over (a reset, an illegal address in one of the
 *engine's own kernels) every call but those that free fails so
 */
#ifndef KVG_H
#define KVG_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

struct kvg_ctx;
struct kvg_buf;
struct kvg_op;
typedef uint64_t kvg_ptr;        /* a device address: CUdeviceptr; on the host a pointer's value */
typedef void *kvg_stream_handle; /* CUstream; NULL: the default stream */

enum {
	KVG_EVENT_REVOKE = 1, /* give the buffer back (kvg_unmap) within `ms` */
	KVG_EVENT_INVALID =
		2, /* the file has other content now, or none; the buffer stays as it is */
};

struct kvg_opts {
	uint32_t size;       /* sizeof(struct kvg_opts) */
	uint32_t flags;      /* KVG_OPEN_* */
	const char *device;  /* UUID, number, or NULL: the current context's, else the first */
	const char *backend; /* "cuda", "host", or NULL: the best there is */
	/* Called by kvg_dispatch, and by other calls that wait for the helper. Must not call back.
	 */
	void (*event)(void *arg, struct kvg_buf *buf, int event, unsigned ms);
	void *arg;
};
#define KVG_OPEN_CONTROL 1u   /* no device: only prefetch, evict and statistics */
#define KVG_OPEN_NOHELPER 2u  /* no helper: only pull, push and scatter */
#define KVG_OPEN_LATENCY 4u   /* the helper copies in shorter steps: own copies wait less for it */
#define KVG_OPEN_NOKERNELS 8u /* nothing of libkvg runs on the device's multiprocessors */

/*
 * Connects to the helper and waits for its answer, at most 30 s. SOCKET: the helper's, or NULL:
 * that of the device, in the usual place. OPTS may be NULL. -EINVAL: flags that this version does
 * not know, or a socket that must be named. The context is the caller's to kvg_close.
 */
int kvg_open(struct kvg_ctx **ret_ctx, const char *socket, const struct kvg_opts *opts);
/* All buffers and ops must be gone. Their mappings end with it. NULL is allowed. */
void kvg_close(struct kvg_ctx *ctx);
/* Why the last call failed, in words; valid until the next one. NULL: this thread's last kvg_open.
 */
const char *kvg_error(const struct kvg_ctx *ctx);
/* The CUresult behind this thread's last -EIO or -ENOMEM; 0: none. */
int kvg_last_cuda(const struct kvg_ctx *ctx);

/* For poll(2) with POLLIN; the library's own, another one after no call but kvg_open. -1: no
 * helper. */
int kvg_fd(const struct kvg_ctx *ctx);
/* Takes what the helper has sent and calls opts.event for it; never waits. -EPIPE: it has gone. */
int kvg_dispatch(struct kvg_ctx *ctx);

#define KVG_MAP_EARLY 1u     /* return at once; kvg_wait says what is there */
#define KVG_MAP_NOSTAGE 2u   /* only if it is there already, or on its way */
#define KVG_MAP_REVOCABLE 4u /* it may be asked back: needs opts.event and kvg_dispatch */

/*
 * LEN bytes of FD's file from OFF on in device memory, as they were when it was opened: whatever
 * happens to the file, the buffer's bytes stay. LEN 0: to the end of the file. FD: open for
 * reading; it may be closed afterwards. Of a file whose size is more than one segment of the
 * helper's only those that hold the range are brought in. Waits until all of it is there (60 s and
 * a second more each 100 MB), but for KVG_MAP_EARLY. The buffer is the caller's to kvg_unmap. Its
 * memory is for reading: other processes have the same.
 */
int kvg_map(struct kvg_ctx *ctx, int fd, uint64_t off, uint64_t len, unsigned flags,
	struct kvg_buf **ret_buf);
/*
 * Waits until the buffer's first UPTO bytes are there (more than it has: all); TIMEOUT_MS < 0: as
 * long as it takes. -ETIMEDOUT; else why they will never be. What is there is there for every
 * stream.
 */
int kvg_wait(struct kvg_buf *buf, uint64_t upto, int timeout_ms);
/*
 * Waits for STREAM, the last one that used it. The memory is gone afterwards, also when an error
 * says that the stream has failed. NULL is allowed.
 */
int kvg_unmap(struct kvg_buf *buf, kvg_stream_handle stream);

struct kvg_info {
	kvg_ptr ptr;      /* of the byte at `off` */
	uint64_t off;     /* in the file */
	uint64_t len;     /* bytes */
	uint64_t version; /* of the file's content */
	uint64_t ino;
	uint8_t uuid[16];    /* of the device */
	int32_t device_type; /* as DLPack: 1 CPU, 2 CUDA */
	int32_t device_id;
};
/* Never fails. What it says is the same for the buffer's whole life. */
int kvg_info(const struct kvg_buf *buf, struct kvg_info *ret_info);

/* LEN bytes at FILE_OFF of the file, and a place in the engine's own device memory. */
struct kvg_seg {
	uint64_t file_off;
	uint64_t len;
	kvg_ptr dst;
};
/*
 * Queues copies of N segments out of a mapped buffer, in STREAM's order, and does not wait for them
 * (the host backend copies at once). All of their bytes must be in the buffer (-EINVAL), and there
 * (kvg_wait). Segments in any order; where they overlap in dst: the bytes of any of them.
 *
 * More than 4096 pieces below 64 KiB are copied by a kernel, where the driver and the device let it
 * work (KVG_OPEN_NOKERNELS: never). The first such call of a context waits until the kernel was
 * compiled and tried; it must not come while a CUDA graph is being captured.
 */
int kvg_scatter(
	struct kvg_buf *buf, const struct kvg_seg *segs, size_t n, kvg_stream_handle stream);

/*
 * File to device memory; segments in any order. Copies go by STREAM, after what it holds; FD is
 * read by the op's own threads, and may be closed at once. -EINVAL: a segment reaches over the
 * file's end. The op is the caller's to kvg_op_free.
 */
int kvg_pull(struct kvg_ctx *ctx, int fd, const struct kvg_seg *segs, size_t n,
	kvg_stream_handle stream, struct kvg_op **ret_op);
/*
 * Device memory (dst) to a file open for writing; what is between the segments is left alone.
 * What STREAM holds at the call is done first. Close the file to publish it.
 */
int kvg_push(struct kvg_ctx *ctx, int fd, const struct kvg_seg *segs, size_t n,
	kvg_stream_handle stream, struct kvg_op **ret_op);
/*
 * 0: all bytes have arrived, and may be used by any stream; -EAGAIN: not within TIMEOUT_MS (< 0: as
 * long as it takes; 0: only looks); else why not: then some of the bytes may have arrived.
 */
int kvg_op_poll(struct kvg_op *op, int timeout_ms);
/* Waits until it has ended. NULL is allowed. */
void kvg_op_free(struct kvg_op *op);

/*
 * Asks for LEN bytes at OFF of the file (LEN 0: to its end) to be brought in, and does not wait for
 * them. PRIO: 0, before what the helper stages unasked, and after what somebody waits for; above
 * 0, as if somebody waited; below 0, when there is nothing else to do. TTL_MS: what nobody has
 * mapped by then is given up, there or not; 0: it stays until room is short.
 */
int kvg_prefetch(
	struct kvg_ctx *ctx, int fd, uint64_t off, uint64_t len, int prio, unsigned ttl_ms);
/* Drops it from device memory; RET_BYTES of it are free. -EBUSY: somebody has some of it mapped. */
int kvg_evict(struct kvg_ctx *ctx, int fd, uint64_t *ret_bytes);

struct kvg_stat_entry {
	const char *name;
	const char *help;
	uint64_t value;
};
/*
 * The helper's counters, at most CAPACITY, with FD >= 0 those of that file too (asked_*). Names and
 * help are static.
 */
int kvg_stats(struct kvg_ctx *ctx, int fd, struct kvg_stat_entry *ret_entries, size_t capacity,
	size_t *ret_n);

struct kvg_helper {
	uint8_t uuid[16];
	uint64_t granularity; /* bytes; so the next */
	uint64_t segment;
	uint64_t budget;
	char name[64];     /* of the device */
	char mode[96];     /* backend, driver */
	char reasons[512]; /* why no better backend */
};
/* What the helper has said of itself at kvg_open. -ENOTCONN: there was none. */
int kvg_helper(const struct kvg_ctx *ctx, struct kvg_helper *ret_helper);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
