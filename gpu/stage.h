/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stager: brings the bytes of files into device memory, at the speed of the link.
 *
 * Of a file that is in the DRAM tier: its object is mapped and registered a piece at a time, by
 * workers, ahead of the copies, which the device then makes by itself. Of others: chunks are read
 * from the drives into a ring of pinned slots, checked against their sums by workers, and copied,
 * each slot at its own pace, so that drives and link are busy together. What is not on a drive, and
 * what could not be read or does not match its sum, is read through the mount, once.
 *
 * Where the backend lets drives write into device memory, what can goes past the CPU, and comes
 * back through slots of the ring to be checked as everything else; see stage_direct.c.
 *
 * Jobs go by their priority, then by the order in which they came: what is free of the ring, and of
 * the link, is given to the first that can use it.
 *
 * One thread runs all of it; it sleeps while there is nothing to do. Jobs belong to the caller, who
 * leaves them alone between submit and reap. Errors: negative errno.
 */
#ifndef KVFS_GPU_STAGE_H
#define KVFS_GPU_STAGE_H

#include <bsd/sys/queue.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "fs/device.h"
#include "fs/gpu_protocol.h"
#include "gpu/backend.h"
#include "gpu/watermark.h"

#define KVG_NEWS_SIZE 512u

struct kvg_samples;
struct kvg_stager;

struct kvg_target {
	kvg_devptr address;
	uint64_t size;               /* bytes; of all but the last the same */
	bool skip;                   /* its bytes are somebody else's matter: ADDRESS may be 0 */
	struct kvg_samples *samples; /* of it, to be filled; NULL: none are wanted */
};

/* A chunk of the file: as struct kv_gpu_chunk says, with its extents in the job's array. */
struct kvg_chunk {
	uint16_t where; /* enum kv_gpu_where */
	uint16_t extents;
	uint32_t first; /* extent */
	uint64_t sum;
};

struct kvg_job_counts {
	uint64_t from_dram; /* bytes */
	uint64_t from_device;
	uint64_t direct; /* of them, past the CPU */
	uint64_t from_file;
	uint64_t checksum_errors;
	uint64_t direct_errors; /* reads past the CPU that failed, and were done again */
};

struct kvg_job {
	/* The caller's: */
	uint64_t offset; /* in the file, of the first byte that is wanted: of a chunk */
	uint64_t size;   /* bytes that are wanted; > 0. A last chunk that is cut ends the file */
	const struct kvg_target *targets; /* cover it; what is left of the last one becomes zero */
	unsigned target_count;
	int object_fd;                  /* the whole file, in DRAM; or -1: */
	const struct kvg_chunk *chunks; /* one for each chunk of the range */
	const struct kv_gpu_extent *extents;
	int file_fd; /* to be read through, or -1 */
	/* Of the mount, what file_fd must be open on: it is somebody else's word. INO 0: anything.
	 */
	uint64_t ino;
	uint64_t version;
	struct kvg_watermark *watermark; /* offsets in the file; may be NULL */
	uint64_t mark_end; /* where the watermark stops: the first byte somebody else may still owe;
			      0: nowhere */
	unsigned priority; /* what has more goes first; see kvg_stager_raise */
	void *arg;
	/* At the end: */
	int result;
	/*
	 * False: it has failed, but a drive may still write into its targets: their memory must
	 * stay as it is, and only the array is the caller's again. The job will be reaped once
	 * more, with true, when that is over.
	 */
	bool final;
	struct kvg_job_counts counts;
	/* The stager's: */
	TAILQ_ENTRY(kvg_job) entry;
	_Atomic bool cancel;
	unsigned rank;      /* the priority that it goes by */
	uint64_t next;      /* offset in the file of the first byte that nothing was begun for */
	unsigned in_flight; /* slots, pieces, windows and copies */
	bool tail_done;
	bool ring;   /* could not be registered: what was not begun goes by the ring */
	bool early;  /* was reported before its end */
	bool queued; /* is in the queue for reap; stager's lock, so the next */
	bool over;
};

struct kvg_stager_options {
	struct kvg_backend *backend; /* outlives it */
	const struct kv_io_ops *io;
	const int *devices; /* the store's, by number: borrowed */
	unsigned device_count;
	unsigned slots;          /* of the ring; 0: 16 */
	uint32_t slot_size;      /* bytes, of whole chunks; 0: 8 MiB */
	unsigned streams;        /* 0: 2 */
	unsigned workers;        /* threads for sums and registrations; 0: as many as make sense */
	unsigned timeout_ms;     /* of one read; 0: 5000 */
	const char *sysfs;       /* NULL: /sys */
	bool direct;             /* reads past the CPU, where the backend and the drives can */
	unsigned direct_threads; /* 0: 16, or none with the next */
	bool inline_workers;     /* tests: no threads at all; kvg_stager_step is called by hand */
};

int kvg_stager_new(const struct kvg_stager_options *options, struct kvg_stager **ret_stager);
/*
 * Ends what is under way. False if a read would not end: then its memory stays, and the process had
 * better end as well. NULL is allowed.
 */
bool kvg_stager_free(struct kvg_stager *stager);
void kvg_stager_submit(struct kvg_stager *stager, struct kvg_job *job);
/* JOB, which was submitted and not reaped, has at least this priority from now on. */
void kvg_stager_raise(struct kvg_stager *stager, struct kvg_job *job, unsigned priority);
/* JOB, which was submitted and not reaped, ends soon, with -ECANCELED if it has not ended before.
 */
void kvg_stager_cancel(struct kvg_job *job);
/* Copies are half as long as slots: who else uses the link waits less, and files come a bit later.
 */
void kvg_stager_latency(struct kvg_stager *stager, bool wanted);
/* Readable when a job has ended. */
int kvg_stager_fd(const struct kvg_stager *stager);
/* A job that has ended, or (see its FINAL) will bring no more, or NULL. */
struct kvg_job *kvg_stager_reap(struct kvg_stager *stager);
/*
 * One line of why some reads do not go past the CPU, each reason once; "": there is none that was
 * not told yet.
 */
void kvg_stager_news(struct kvg_stager *stager, char ret_line[KVG_NEWS_SIZE]);

/* For tests and benchmarks: one round by hand. True if anything went on. */
bool kvg_stager_step(struct kvg_stager *stager);

#endif
