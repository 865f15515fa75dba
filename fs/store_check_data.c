/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads all data of a store that is checked. One thread goes through the files and hands their
 * chunks to others, which read and compare: one alone does not keep many drives busy.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "fs/io_internal.h"
#include "fs/store_check_internal.h"
#include "fs/sum.h"

#define WORKERS 8u
#define JOBS_MAX (2 * WORKERS)
/* Files looked up at once, and chunks of one. */
#define FILES_MAX 256u
#define CHUNKS_MAX 64u

struct job {
	uint64_t ino;
	uint64_t sum;
	uint32_t number;
	uint32_t extent_count;
	struct kv_extent extents[KV_CHUNK_BLOCKS];
};

struct reading {
	struct kv_checking *checking;
	pthread_t threads[WORKERS];
	struct kv_store_progress progress; /* under lock, as all that follows */
	pthread_mutex_t lock;
	pthread_cond_t more; /* jobs came, or the end */
	pthread_cond_t less; /* jobs went */
	struct job *jobs;    /* JOBS_MAX */
	unsigned first;
	unsigned waiting;
	bool end;
	int error;
	atomic_bool lost[KV_DEVICES_MAX]; /* failed meanwhile, as a whole; without the lock */
};

/* ---- One chunk ---- */

/* The whole chunk's blocks, one extent behind the other. Returns their bytes, or an error. */
static ssize_t read_chunk(struct reading *reading, const struct job *job, uint8_t *memory,
	const struct kv_extent **ret_extent)
{
	size_t size = 0;

	for (uint32_t i = 0; i < job->extent_count; i++) {
		const struct kv_extent *extent = &job->extents[i];
		size_t length = (size_t)extent->count << KV_BLOCK_SHIFT;
		int fd = reading->checking->devices[extent->device].fd;
		int r;

		*ret_extent = extent;
		r = fd < 0 || atomic_load(&reading->lost[extent->device])
			    ? -ENODEV
			    : kv_io_file_read(
				      NULL, fd, memory + size, length, kv_extent_offset(extent));
		if (r < 0)
			return r;
		size += length;
	}
	return (ssize_t)size;
}

/* Whether the drive answers at all: its superblock can be read, from the drive itself. */
static bool device_answers(int fd)
{
	_cleanup_free_ uint8_t *block = aligned_alloc(KV_BLOCK_SIZE, KV_BLOCK_SIZE);

	(void)posix_fadvise(
		fd, 0, (off_t)KV_SUPERBLOCK_COPIES * KV_BLOCK_SIZE, POSIX_FADV_DONTNEED);
	for (unsigned i = 0; block && i < KV_SUPERBLOCK_COPIES; i++)
		if (kv_io_file_read(NULL, fd, block, KV_BLOCK_SIZE, (uint64_t)i * KV_BLOCK_SIZE) ==
			0)
			return true;
	return false;
}

/* Lock held. */
static void tell_bad(
	struct reading *reading, const struct job *job, const struct kv_extent *extent, int error)
{
	struct kv_checking *checking = reading->checking;
	_cleanup_free_ char *path = kv_index_path(checking->index, job->ino);
	char text[128];
	const struct kv_violation violation = {
		.text = text,
		.ino = job->ino,
		.path = path,
		.has_blocks = true,
		.device = extent->device,
		.block = extent->start,
		.blocks = extent->count,
	};

	if (error < 0)
		(void)snprintf(text, sizeof(text), "inode %llu: chunk %u cannot be read: %s",
			(unsigned long long)job->ino, job->number, strerror(-error));
	else
		(void)snprintf(text, sizeof(text), "inode %llu: chunk %u fails its checksum",
			(unsigned long long)job->ino, job->number);
	kv_checking_tell(checking, &violation);
}

/* A drive that does not answer any more has told nothing about its files: it is used no longer. */
static void lose_device(struct reading *reading, unsigned number)
{
	struct kv_checking *checking = reading->checking;
	KV_LOCKED(&reading->lock);

	if (atomic_exchange(&reading->lost[number], true))
		return;
	checking->devices[number].damaged = true;
	kv_checking_say(checking,
		"device %u (%s): does not answer any more, so no file is dropped for its data",
		number, checking->list.paths[number]);
}

/*
 * The same as read_chunk, but what fails once is told and tried again: -EIO and the like only if it
 * fails twice on a drive that answers, -ENODEV if the drive does not.
 */
static ssize_t read_chunk_twice(struct reading *reading, const struct job *job, uint8_t *memory,
	const struct kv_extent **ret_extent)
{
	ssize_t size = read_chunk(reading, job, memory, ret_extent);
	unsigned number;

	if (size >= 0 || size == -ENODEV)
		return size;
	{
		KV_LOCKED(&reading->lock);

		tell_bad(reading, job, *ret_extent, (int)size);
	}
	size = read_chunk(reading, job, memory, ret_extent);
	number = (*ret_extent)->device;
	if (size >= 0 || size == -ENODEV || device_answers(reading->checking->devices[number].fd))
		return size;
	lose_device(reading, number);
	return -ENODEV;
}

static void do_job(struct reading *reading, const struct job *job, uint8_t *memory)
{
	const struct kv_extent *extent = &job->extents[0];
	ssize_t size = read_chunk_twice(reading, job, memory, &extent);
	bool bad = size < 0 ? size != -ENODEV : XXH3_64bits(memory, (size_t)size) != job->sum;
	KV_LOCKED(&reading->lock);

	/* A device that cannot be used was told of, as were errors; its files may be whole. */
	if (bad && size >= 0)
		tell_bad(reading, job, extent, 0);
	if (bad && kv_checking_add_bad(reading->checking, job->ino) < 0)
		reading->error = -ENOMEM;
	if (size > 0)
		reading->progress.bytes += (uint64_t)size;
	if (reading->checking->check->progress)
		reading->checking->check->progress(
			reading->checking->check->arg, &reading->progress);
}

static bool take_job(struct reading *reading, struct job *ret_job)
{
	KV_LOCKED(&reading->lock);

	while (reading->waiting == 0 && !reading->end)
		(void)pthread_cond_wait(&reading->more, &reading->lock);
	if (reading->waiting == 0)
		return false;
	*ret_job = reading->jobs[reading->first];
	reading->first = (reading->first + 1) % JOBS_MAX;
	reading->waiting--;
	(void)pthread_cond_signal(&reading->less);
	return true;
}

static void *worker(void *arg)
{
	struct reading *reading = arg;
	_cleanup_free_ uint8_t *memory = aligned_alloc(KV_BLOCK_SIZE, KV_CHUNK_SIZE);
	_cleanup_free_ struct job *job = malloc(sizeof(*job));

	if (!memory || !job) {
		KV_LOCKED(&reading->lock);

		reading->error = -ENOMEM;
		return NULL;
	}
	while (take_job(reading, job))
		do_job(reading, job, memory);
	return NULL;
}

/* ---- All chunks ---- */

struct chunks {
	struct job *jobs; /* CHUNKS_MAX */
	uint32_t count;
};

static void take_chunk(void *arg, const struct kv_chunk *chunk)
{
	struct chunks *chunks = arg;
	struct job *job = &chunks->jobs[chunks->count++];

	job->sum = chunk->sum;
	job->number = chunk->number;
	job->extent_count = chunk->extent_count;
	memcpy(job->extents, chunk->extents, chunk->extent_count * sizeof(chunk->extents[0]));
}

static int give_job(struct reading *reading, const struct job *job)
{
	KV_LOCKED(&reading->lock);

	while (reading->waiting == JOBS_MAX && reading->error == 0)
		(void)pthread_cond_wait(&reading->less, &reading->lock);
	if (reading->error == 0) {
		reading->jobs[(reading->first + reading->waiting++) % JOBS_MAX] = *job;
		(void)pthread_cond_signal(&reading->more);
	}
	return reading->error;
}

static int read_file(struct reading *reading, struct chunks *chunks, uint64_t ino)
{
	struct kv_index *index = reading->checking->index;
	struct kv_inode inode;
	int r = kv_index_get(index, ino, &inode);
	uint64_t count = r == 0 ? kv_div_round_up(inode.size, KV_CHUNK_SIZE) : 0;

	for (uint64_t first = 0; first < count && r == 0; first += CHUNKS_MAX) {
		chunks->count = 0;
		r = kv_index_map(index, ino, (uint32_t)first, CHUNKS_MAX, take_chunk, chunks);
		for (uint32_t i = 0; i < chunks->count && r == 0; i++) {
			chunks->jobs[i].ino = ino;
			r = give_job(reading, &chunks->jobs[i]);
		}
	}
	{
		KV_LOCKED(&reading->lock);

		reading->progress.files++;
	}
	/* What is wrong with the records was told before. */
	return r == -EUCLEAN || r == -ENOENT ? 0 : r;
}

static int read_files(struct reading *reading, struct chunks *chunks)
{
	uint64_t inos[FILES_MAX];
	uint64_t after = 0;
	ssize_t count;
	int r = 0;

	while (r == 0 &&
		(count = kv_index_files(reading->checking->index, after, inos, FILES_MAX)) > 0) {
		for (ssize_t i = 0; i < count && r == 0; i++)
			r = read_file(reading, chunks, inos[i]);
		after = inos[count - 1];
	}
	return r < 0 ? r : (int)(count < 0 ? count : 0);
}

/* What there is to read, by the counters. */
static void learn_total(struct reading *reading)
{
	struct kv_index *index = reading->checking->index;

	for (uint32_t i = 0; i < kv_index_domain_count(index); i++) {
		struct kv_domain_info info;

		if (kv_index_domain(index, i, &info) == 0) {
			reading->progress.total_bytes += info.used << KV_BLOCK_SHIFT;
			reading->progress.total_files += info.inodes;
		}
	}
}

static int read_all(struct reading *reading)
{
	struct chunks chunks = {.jobs = calloc(CHUNKS_MAX, sizeof(struct job))};
	unsigned threads = 0;
	int r = chunks.jobs ? 0 : -ENOMEM;

	while (r == 0 && threads < WORKERS) {
		r = -pthread_create(&reading->threads[threads], NULL, worker, reading);
		threads += r == 0;
	}
	/* Fewer do as well. */
	if (chunks.jobs && threads > 0)
		r = read_files(reading, &chunks);
	(void)pthread_mutex_lock(&reading->lock);
	reading->end = true;
	(void)pthread_cond_broadcast(&reading->more);
	(void)pthread_mutex_unlock(&reading->lock);
	while (threads > 0)
		(void)pthread_join(reading->threads[--threads], NULL);
	free(chunks.jobs);
	return r < 0 ? r : reading->error;
}

/* What the others say of files is not to be trusted while the set of devices is not whole. */
static void spare_files(const struct reading *reading)
{
	struct kv_checking *checking = reading->checking;

	for (unsigned i = 0; i < checking->list.count; i++) {
		if (atomic_load(&reading->lost[i]))
			kv_cleanup_fd(&checking->devices[i].fd);
		if (checking->devices[i].fd < 0)
			checking->bad_count = 0;
	}
}

int kv_checking_data(struct kv_checking *checking)
{
	struct reading reading = {
		.checking = checking,
		.lock = PTHREAD_MUTEX_INITIALIZER,
		.more = PTHREAD_COND_INITIALIZER,
		.less = PTHREAD_COND_INITIALIZER,
		.jobs = calloc(JOBS_MAX, sizeof(struct job)),
	};
	int r = reading.jobs ? 0 : -ENOMEM;

	if (r == 0) {
		learn_total(&reading);
		r = read_all(&reading);
	}
	spare_files(&reading);
	checking->result->read = reading.progress;
	free(reading.jobs);
	return r < 0 ? kv_fail(&checking->error, r, "the data of %s cannot be read: %s",
			       checking->path, strerror(-r))
		     : 0;
}
