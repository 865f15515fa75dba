/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What stage.c (life, jobs), stage_lane.c (copies), stage_slot.c (the ring), stage_piece.c (DRAM
 * objects) and stage_direct.c (past the CPU) share. All of it is the stager's thread's, but for
 * tasks that are under way.
 */
#ifndef KVFS_GPU_STAGE_INTERNAL_H
#define KVFS_GPU_STAGE_INTERNAL_H

#include "fs/base.h"
#include "gpu/stage.h"
#include "gpu/workers.h"

#define KVG_COPIES_PER_STREAM 2u
#define KVG_STREAMS_MAX 8u
#define KVG_SLOTS_MAX 256u
#define KVG_SLOT_CHUNKS_MAX 64u
#define KVG_PIECES 4u
#define KVG_PIECE_SIZE (UINT64_C(64) << 20)
#define KVG_QUEUE_DEPTH KV_RING_DEPTH_MAX
#define KVG_WINDOWS 8u
#define KVG_DIRECT_THREADS 16u
/* So many of them wait for slots to be checked in. */
#define KVG_SPANS (2 * KVG_DIRECT_THREADS)
#define KVG_SPAN_CHUNKS 16u
/* What is in more pieces on its drive is read by the ring. */
#define KVG_SPAN_READS 8u
#define KVG_WHY_SIZE 192u

struct kvg_slot;
struct kvg_piece;

/* A copy under way. */
struct kvg_lane {
	struct kvg_event *event;
	kvg_stream stream;
	bool back; /* from the device */
	bool busy;
	struct kvg_job *job;
	struct kvg_slot *slot;   /* or */
	struct kvg_piece *piece; /* or neither: the tail */
	uint64_t offset;         /* in the file */
};

enum kvg_slot_state {
	KVG_SLOT_FREE,
	KVG_SLOT_FETCHING, /* out of device memory */
	KVG_SLOT_READING,
	KVG_SLOT_CHECKING, /* a worker computes sums */
	KVG_SLOT_RESCUING, /* a worker reads through the mount */
	KVG_SLOT_READY,
	KVG_SLOT_COPYING,
};

/* One chunk within a slot. */
struct kvg_slot_chunk {
	unsigned left; /* reads */
	bool failed;   /* could not be read, or does not match */
	bool rescued;
	bool direct; /* it is in device memory already, and right */
};

struct kvg_slot {
	struct kvg_task task; /* first member: the worker's */
	struct kvg_stager *stager;
	enum kvg_slot_state state;
	struct kvg_job *job; /* NULL: given up; free when the reads and the task have ended */
	uint8_t *memory;
	uint64_t offset; /* in the file */
	uint64_t length; /* bytes of the file in it */
	int64_t deadline_ns;
	unsigned left; /* reads under way */
	struct kv_io *ios;
	unsigned io_count;
	unsigned io_capacity;
	unsigned submitted; /* of them, in order */
	struct kvg_slot_chunk chunks[KVG_SLOT_CHUNKS_MAX];
	int task_fd; /* the worker's own: the job, and its descriptors, may end before it does */
	uint64_t task_ino; /* so this, and the next one */
	uint64_t task_version;
	bool fetched;        /* what is in it was in device memory first */
	bool impostor;       /* found by the worker: task_fd is of another file */
	unsigned mismatches; /* found by the worker */
};

enum kvg_piece_state {
	KVG_PIECE_FREE,
	KVG_PIECE_REGISTERING,
	KVG_PIECE_COPYING,
	KVG_PIECE_ENDING,
};

/* A stretch of a DRAM object that is mapped and registered. */
struct kvg_piece {
	struct kvg_task task; /* first member */
	struct kvg_stager *stager;
	enum kvg_piece_state state;
	struct kvg_job *job;
	int fd;
	uint64_t offset; /* in the file */
	uint64_t length;
	uint64_t next; /* bytes of it that copies were begun for */
	unsigned copies;
	void *memory;
	int result;
};

enum kvg_window_state {
	KVG_WINDOW_FREE,
	KVG_WINDOW_REGISTERING,
	KVG_WINDOW_OPEN,
	KVG_WINDOW_ENDING,
};

/* A target that drives can write to. */
struct kvg_window {
	struct kvg_task task; /* first member */
	struct kvg_stager *stager;
	enum kvg_window_state state;
	struct kvg_job *job;
	kvg_devptr base; /* of the target */
	uint64_t size;
	uint64_t at;   /* offset in the file of the target's first byte */
	uint64_t next; /* offset in the file of the first byte that nothing was begun for */
	uint64_t end;
	unsigned spans;  /* under way */
	unsigned late;   /* of them, those that do not end */
	bool registered; /* else all of it goes by the ring */
	int result;
	char why[KVG_WHY_SIZE];
};

enum kvg_span_state {
	KVG_SPAN_FREE,
	KVG_SPAN_READING, /* a thread waits for the drive */
	KVG_SPAN_PASSING, /* on, to slots */
};

/* Chunks that one thread reads past the CPU in one go, as a rule one request. */
struct kvg_span {
	struct kvg_task task; /* first member */
	struct kvg_window *window;
	enum kvg_span_state state;
	uint64_t offset; /* in the file */
	uint64_t length;
	uint64_t passed; /* bytes, to slots */
	int64_t deadline_ns;
	_Atomic bool late; /* given up: what was not begun is not to begin */
	unsigned count;
	struct kvg_span_read {
		uint64_t from; /* on the device */
		uint64_t to;   /* in the window's target */
		uint64_t length;
		unsigned device;
	} reads[KVG_SPAN_READS];
	kvg_stream stream; /* for sums by the device; made with the stager, if it has them */
	bool by_device;    /* it is to compute them */
	bool summed;       /* it has */
	unsigned wrong;    /* chunks whose sum is another one */
	uint64_t sums[KVG_SPAN_CHUNKS]; /* as they should be */
	int result;
	char why[KVG_WHY_SIZE];
};

/* Reads past the CPU. */
struct kvg_directs {
	bool on;       /* never again once it was off */
	bool full;     /* said that no more memory could be registered */
	bool failed;   /* said that a read failed */
	bool sums;     /* are the device's matter; never again once they were not */
	unsigned busy; /* threads in a read */
	unsigned hung; /* of them, those whose reads were given up */
	unsigned threads;
	struct kvg_workers *readers;
	struct kvg_workers *registrars;
	struct kvg_direct *devices[KV_DEVICES_MAX]; /* NULL: not this one */
	struct kvg_window windows[KVG_WINDOWS];
	struct kvg_span spans[KVG_SPANS];
	char news[KVG_NEWS_SIZE]; /* stager's lock */
};

TAILQ_HEAD(kvg_job_queue, kvg_job);

struct kvg_stager {
	struct kvg_stager_options options;
	struct kvg_backend *backend;
	struct kv_io_queue *queue; /* NULL: no devices */
	struct kvg_workers *workers;
	struct kvg_workers *rescuers;
	uint8_t *ring;
	bool ring_registered;
	bool ring_lent; /* reads into it are of registered buffers, one a slot */
	unsigned chunks_per_slot;
	struct kvg_slot *slots;
	struct kvg_piece pieces[KVG_PIECES];
	struct kvg_lane lanes[(KVG_STREAMS_MAX + 1) * KVG_COPIES_PER_STREAM];
	unsigned lane_count;
	unsigned stream_count;   /* the last one is for copies from the device, if there are any */
	struct kvg_copy *copies; /* for one call */
	unsigned copies_max;
	struct kvg_directs directs;
	struct kvg_job_queue active; /* by rank */
	unsigned reads;              /* in the queue */
	_Atomic bool latency;        /* copies are short */

	pthread_t thread;
	bool has_thread;
	int event_fd;
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct kvg_job_queue submitted; /* lock */
	bool reorder;                   /* lock; priorities were raised */
	struct kvg_job_queue done;      /* lock */
	bool stop;                      /* lock */
};

static inline uint64_t kvg_job_end(const struct kvg_job *job)
{
	return job->offset + job->size;
}

/* The chunk at OFFSET in the file. */
static inline const struct kvg_chunk *kvg_job_chunk(const struct kvg_job *job, uint64_t offset)
{
	return &job->chunks[(offset - job->offset) >> KV_CHUNK_SHIFT];
}

/* Whether what lies at OFFSET of JOB is to be copied before that at OTHER_OFFSET of OTHER. */
static inline bool kvg_job_is_before(const struct kvg_job *job, uint64_t offset,
	const struct kvg_job *other, uint64_t other_offset)
{
	return job->rank != other->rank ? job->rank > other->rank : offset < other_offset;
}

/*
 * Bytes from JOB's next one on that are to be staged in one go, AT MOST; those that are somebody
 * else's are passed over. 0: nothing is left to begin.
 */
uint64_t kvg_job_more(struct kvg_job *job, uint64_t at_most);
/* What is at MEMORY is right for LENGTH bytes at OFFSET of JOB, who may want samples of it. */
void kvg_job_sample(
	const struct kvg_job *job, const void *memory, uint64_t offset, uint64_t length);
/* Bytes of the longest copy now. */
uint64_t kvg_stager_copy_max(const struct kvg_stager *stager);
int64_t kvg_stager_now(const struct kvg_stager *stager);
/* Ends JOB with ERROR (the first one counts) when nothing of it is under way any more. */
void kvg_job_fail(struct kvg_job *job, int error);
/* One has ended for good that was reported before. */
void kvg_job_over(struct kvg_stager *stager, struct kvg_job *job);

/* ---- stage_lane.c ---- */

int kvg_lanes_new(struct kvg_stager *stager);
void kvg_lanes_free(struct kvg_stager *stager);
bool kvg_lanes_step(struct kvg_stager *stager);
/*
 * Begins to copy LENGTH bytes between HOST and OFFSET of JOB's targets: to the device, or BACK.
 * NULL: no lane is free.
 */
struct kvg_lane *kvg_copy_begin(struct kvg_stager *stager, struct kvg_job *job, void *host,
	uint64_t offset, uint64_t length, bool back);
/* Zeros behind JOB's bytes in its last target. False: no lane is free. */
bool kvg_tail_begin(struct kvg_stager *stager, struct kvg_job *job);
/* Some of JOB's bytes are there: the watermark follows. */
void kvg_job_advance(const struct kvg_stager *stager, struct kvg_job *job);

/* ---- stage_slot.c ---- */

int kvg_slots_new(struct kvg_stager *stager);
void kvg_slots_free(struct kvg_stager *stager);
/* Puts what is next of JOB into slots that are free. */
bool kvg_slots_begin(struct kvg_stager *stager, struct kvg_job *job);
/* The same with LENGTH bytes at OFFSET, no more than a copy is long. False: no slot is free. */
bool kvg_slots_read(
	struct kvg_stager *stager, struct kvg_job *job, uint64_t offset, uint64_t length);
/*
 * Whole chunks that are on drives, and were read into JOB's targets: they are fetched and checked,
 * and read as by kvg_slots_read where they do not match. False: nothing is free for it.
 */
bool kvg_slots_fetch(
	struct kvg_stager *stager, struct kvg_job *job, uint64_t offset, uint64_t length);
/* Whether EXTENT, which the daemon sent, stays within a chunk and the drives there are. */
bool kvg_extent_is_sane(const struct kvg_stager *stager, const struct kv_gpu_extent *extent);
bool kvg_slots_step(struct kvg_stager *stager);
/* Its copy has ended. */
void kvg_slot_copied(struct kvg_slot *slot);
/* Whether none is in use. */
bool kvg_slots_idle(const struct kvg_stager *stager);
/* Lowest byte of JOB that is in a slot, or END. */
uint64_t kvg_slots_lowest(const struct kvg_stager *stager, const struct kvg_job *job, uint64_t end);

/* ---- stage_piece.c ---- */

bool kvg_pieces_begin(struct kvg_stager *stager, struct kvg_job *job);
bool kvg_pieces_step(struct kvg_stager *stager);
void kvg_piece_copied(struct kvg_piece *piece);
bool kvg_pieces_idle(const struct kvg_stager *stager);

/* ---- stage_direct.c ---- */

int kvg_directs_new(struct kvg_stager *stager);
/* ABANDON: a read does not end; then its memory stays. */
void kvg_directs_free(struct kvg_stager *stager, bool abandon);
/* Whether what was not begun of JOB is to go past the CPU. */
bool kvg_job_is_direct(const struct kvg_stager *stager, const struct kvg_job *job);
bool kvg_windows_begin(struct kvg_stager *stager, struct kvg_job *job);
bool kvg_directs_step(struct kvg_stager *stager);
bool kvg_directs_idle(const struct kvg_stager *stager);
/* Lowest byte of JOB that is somewhere on its way past the CPU, or END. */
uint64_t kvg_directs_lowest(
	const struct kvg_stager *stager, const struct kvg_job *job, uint64_t end);
/* Windows of JOB, in each of which there are reads that do not end, and nothing else. */
unsigned kvg_directs_stuck(const struct kvg_stager *stager, const struct kvg_job *job);

#endif
