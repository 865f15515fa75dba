/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring: chunks are read into slots, checked, and copied from there.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <linux/mman.h>
#include <sys/mman.h>

#include "fs/kvfs_ioctl.h"
#include "fs/sum.h"
#include "gpu/numa.h"
#include "gpu/stage_internal.h"

#define REAP_MAX 64u
#define HUGE_PAGE_SIZE (UINT64_C(2) << 20)

static unsigned slot_chunks(const struct kvg_slot *slot)
{
	return (unsigned)kv_div_round_up(slot->length, KV_CHUNK_SIZE);
}

/* Chunk I of SLOT. */
static const struct kvg_chunk *chunk_of(const struct kvg_slot *slot, unsigned i)
{
	return kvg_job_chunk(slot->job, slot->offset) + i;
}

/* Bytes of the file in chunk I of SLOT. */
static uint64_t chunk_length(const struct kvg_slot *slot, unsigned i)
{
	return kv_min_u64(slot->length - ((uint64_t)i << KV_CHUNK_SHIFT), KV_CHUNK_SIZE);
}

static uint8_t *chunk_memory(const struct kvg_slot *slot, unsigned i)
{
	return slot->memory + ((size_t)i << KV_CHUNK_SHIFT);
}

static void slot_release(struct kvg_slot *slot)
{
	if (slot->job)
		slot->job->in_flight--;
	slot->job = NULL;
	slot->state = KVG_SLOT_FREE;
}

/* ---- Reads ---- */

static int add_io(struct kvg_slot *slot, const struct kv_gpu_extent *extent, unsigned i)
{
	if (slot->io_count == slot->io_capacity) {
		unsigned capacity = slot->io_capacity * 2 + 16;
		struct kv_io *ios = realloc(slot->ios, capacity * sizeof(*ios));

		if (!ios)
			return -ENOMEM;
		slot->ios = ios;
		slot->io_capacity = capacity;
	}
	slot->ios[slot->io_count++] = (struct kv_io){
		.kind = KV_IO_READ,
		.device = extent->device,
		.buffer = slot->stager->ring_lent ? (int)(slot - slot->stager->slots) : -1,
		.offset = extent->offset,
		.memory = chunk_memory(slot, i) + ((size_t)extent->block << KV_BLOCK_SHIFT),
		.length = extent->length,
		.arg = slot,
	};
	return 0;
}

bool kvg_extent_is_sane(const struct kvg_stager *stager, const struct kv_gpu_extent *extent)
{
	return extent->device < stager->options.device_count && extent->length > 0 &&
	       extent->length % KV_BLOCK_SIZE == 0 &&
	       ((uint64_t)extent->block << KV_BLOCK_SHIFT) + extent->length <= KV_CHUNK_SIZE;
}

static int add_chunk(struct kvg_slot *slot, unsigned i)
{
	const struct kvg_chunk *chunk = chunk_of(slot, i);
	const struct kv_gpu_extent *extents = &slot->job->extents[chunk->first];
	uint64_t covered = 0;

	if (chunk->where == KV_GPU_FILE) {
		slot->chunks[i].failed = true;
		return 0;
	}
	for (unsigned k = 0; k < chunk->extents; k++) {
		int r = kvg_extent_is_sane(slot->stager, &extents[k]) ? add_io(slot, &extents[k], i)
								      : -EPROTO;

		if (r < 0)
			return r;
		covered += extents[k].length;
	}
	/* Blocks that were never written are not on the drives. */
	if (covered < chunk_length(slot, i))
		memset(chunk_memory(slot, i), 0, KV_CHUNK_SIZE);
	return 0;
}

static void set_deadline(struct kvg_slot *slot)
{
	slot->deadline_ns =
		kvg_stager_now(slot->stager) + (int64_t)slot->stager->options.timeout_ms * 1000000;
}

static bool submit_reads(struct kvg_slot *slot)
{
	struct kvg_stager *stager = slot->stager;
	const struct kv_io_ops *io = stager->options.io;
	unsigned before = slot->submitted;

	while (slot->submitted < slot->io_count &&
		io->submit(io->context, stager->queue, &slot->ios[slot->submitted]) == 0) {
		slot->submitted++;
		slot->left++;
		stager->reads++;
	}
	return slot->submitted > before;
}

static void start_rescue(struct kvg_slot *slot, int fd);

/* Reads chunks from drives: all, or with FAILED those that have. */
static void start_reads(struct kvg_slot *slot, bool failed)
{
	int r = 0;

	slot->io_count = slot->submitted = slot->left = 0;
	slot->fetched = false;
	slot->state = KVG_SLOT_READING;
	set_deadline(slot);
	for (unsigned i = 0; i < slot_chunks(slot) && r == 0; i++) {
		if (failed && !slot->chunks[i].failed)
			continue;
		slot->chunks[i].failed = false;
		r = add_chunk(slot, i);
	}
	if (r < 0) {
		kvg_job_fail(slot->job, r);
		slot->io_count = 0;
	}
	(void)submit_reads(slot);
}

static void slot_take(struct kvg_slot *slot, struct kvg_job *job, uint64_t offset, uint64_t length)
{
	slot->job = job;
	slot->offset = offset;
	slot->length = length;
	slot->fetched = false;
	memset(slot->chunks, 0, sizeof(slot->chunks));
	job->in_flight++;
}

static void slot_begin(struct kvg_slot *slot, struct kvg_job *job, uint64_t offset, uint64_t length)
{
	slot_take(slot, job, offset, length);
	for (unsigned i = 0; i < slot_chunks(slot) && job->object_fd >= 0; i++)
		slot->chunks[i].failed = true;
	if (job->object_fd >= 0)
		start_rescue(slot, job->object_fd);
	else
		start_reads(slot, false);
}

static struct kvg_slot *free_slot(struct kvg_stager *stager)
{
	for (unsigned i = 0; i < stager->options.slots; i++)
		if (stager->slots[i].state == KVG_SLOT_FREE)
			return &stager->slots[i];
	return NULL;
}

bool kvg_slots_begin(struct kvg_stager *stager, struct kvg_job *job)
{
	uint64_t length = kvg_job_more(job, kvg_stager_copy_max(stager));
	bool progress = false;

	while (length > 0 && kvg_slots_read(stager, job, job->next, length)) {
		job->next += length;
		length = kvg_job_more(job, kvg_stager_copy_max(stager));
		progress = true;
	}
	return progress;
}

bool kvg_slots_read(
	struct kvg_stager *stager, struct kvg_job *job, uint64_t offset, uint64_t length)
{
	struct kvg_slot *slot = free_slot(stager);

	if (!slot)
		return false;
	slot_begin(slot, job, offset, length);
	return true;
}

bool kvg_slots_fetch(
	struct kvg_stager *stager, struct kvg_job *job, uint64_t offset, uint64_t length)
{
	struct kvg_slot *slot = free_slot(stager);
	struct kvg_lane *lane =
		slot ? kvg_copy_begin(stager, job, slot->memory, offset, length, true) : NULL;

	if (!lane)
		return false;
	slot_take(slot, job, offset, length);
	slot->fetched = true;
	slot->state = KVG_SLOT_FETCHING;
	lane->slot = slot;
	return true;
}

static bool reap_reads(struct kvg_stager *stager)
{
	struct kv_io_completion completions[REAP_MAX];
	const struct kv_io_ops *io = stager->options.io;
	int n;

	if (stager->reads == 0)
		return false;
	n = io->reap(io->context, stager->queue, false, completions, REAP_MAX);
	for (int i = 0; i < n; i++) {
		const struct kv_io *done = completions[i].io;
		struct kvg_slot *slot = done->arg;
		size_t at = (size_t)((uint8_t *)done->memory - slot->memory);

		/* Short ones too: what is missing is read again with its chunk. */
		if (completions[i].result != (int)done->length)
			slot->chunks[at >> KV_CHUNK_SHIFT].failed = true;
		slot->left--;
		stager->reads--;
	}
	return n > 0;
}

/* ---- Sums ---- */

static bool matches(
	const struct kvg_chunk *chunk, const struct kv_gpu_extent *extents, const uint8_t *memory)
{
	XXH3_state_t *state = XXH3_createState();
	uint64_t sum;

	if (!state)
		return false;
	(void)XXH3_64bits_reset(state);
	for (unsigned k = 0; k < chunk->extents; k++)
		(void)XXH3_64bits_update(state,
			memory + ((size_t)extents[k].block << KV_BLOCK_SHIFT), extents[k].length);
	sum = XXH3_64bits_digest(state);
	XXH3_freeState(state);
	return sum == chunk->sum;
}

static void run_check(struct kvg_task *task)
{
	struct kvg_slot *slot = (struct kvg_slot *)task;
	const struct kvg_job *job = slot->job;

	slot->mismatches = 0;
	for (unsigned i = 0; i < slot_chunks(slot); i++) {
		const struct kvg_chunk *chunk = chunk_of(slot, i);

		if (chunk->where != KV_GPU_DEVICE || slot->chunks[i].failed ||
			matches(chunk, &job->extents[chunk->first], chunk_memory(slot, i)))
			continue;
		slot->chunks[i].failed = true;
		slot->mismatches++;
	}
}

static void start_check(struct kvg_slot *slot)
{
	slot->state = KVG_SLOT_CHECKING;
	slot->task.run = run_check;
	kvg_workers_start(slot->stager->workers, &slot->task);
}

/* ---- Through the mount, or out of the object ---- */

/*
 * What a client passed is of the mount, but may be of another file than its ticket. The call goes
 * to the daemon, and may hang like the reads do.
 */
static bool is_the_file(const struct kvg_slot *slot)
{
	struct kvfs_ticket look = {.flags = KVFS_TICKET_LOOK};

	if (slot->task_ino == 0)
		return true;
	return ioctl(slot->task_fd, KVFS_IOC_TICKET, &look) == 0 && look.ino == slot->task_ino &&
	       look.version == slot->task_version;
}

static void run_rescue(struct kvg_task *task)
{
	struct kvg_slot *slot = (struct kvg_slot *)task;

	slot->impostor = !is_the_file(slot);
	for (unsigned i = 0; i < slot_chunks(slot); i++) {
		uint64_t at = (uint64_t)i << KV_CHUNK_SHIFT, end = at + chunk_length(slot, i);
		ssize_t n = 1;

		if (!slot->chunks[i].failed)
			continue;
		slot->chunks[i].rescued = true;
		while (at < end && n > 0 && !slot->impostor) {
			n = pread(slot->task_fd, slot->memory + at, end - at,
				(off_t)(slot->offset + at));
			at += n > 0 ? (uint64_t)n : 0;
		}
		slot->chunks[i].failed = at < end;
	}
	(void)close(slot->task_fd);
	slot->task_fd = -1;
}

static void start_rescue(struct kvg_slot *slot, int fd)
{
	struct kvg_stager *stager = slot->stager;
	bool object = slot->job->object_fd >= 0;

	slot->task_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (slot->task_fd < 0) {
		kvg_job_fail(slot->job, -errno);
		slot_release(slot);
		return;
	}
	slot->task_ino = object ? 0 : slot->job->ino;
	slot->task_version = slot->job->version;
	slot->state = KVG_SLOT_RESCUING;
	slot->task.run = run_rescue;
	set_deadline(slot);
	kvg_workers_start(object ? stager->workers : stager->rescuers, &slot->task);
}

/* What is in SLOT is right. */
static void count_bytes(struct kvg_slot *slot)
{
	struct kvg_job *job = slot->job;

	kvg_job_sample(job, slot->memory, slot->offset, slot->length);

	for (unsigned i = 0; i < slot_chunks(slot); i++) {
		uint64_t length = chunk_length(slot, i);

		if (slot->chunks[i].rescued && job->object_fd >= 0)
			job->counts.from_dram += length;
		else if (slot->chunks[i].rescued)
			job->counts.from_file += length;
		else if (chunk_of(slot, i)->where == KV_GPU_DEVICE)
			job->counts.from_device += length;
		job->counts.direct += slot->chunks[i].direct ? length : 0;
	}
}

static bool any_failed(const struct kvg_slot *slot, bool *ret_rescued)
{
	bool failed = false;

	*ret_rescued = false;
	for (unsigned i = 0; i < slot_chunks(slot); i++) {
		failed |= slot->chunks[i].failed;
		*ret_rescued |= slot->chunks[i].failed && slot->chunks[i].rescued;
	}
	return failed;
}

/* What is in device memory as it should be is done with; the rest is read once more. */
static void judge_fetched(struct kvg_slot *slot, bool failed)
{
	struct kvg_job *job = slot->job;

	for (unsigned i = 0; i < slot_chunks(slot); i++)
		slot->chunks[i].direct = !slot->chunks[i].failed;
	if (failed) {
		start_reads(slot, true);
		return;
	}
	count_bytes(slot);
	slot_release(slot);
	kvg_job_advance(slot->stager, job);
}

/* What could be read was, and was checked. */
static void judge(struct kvg_slot *slot)
{
	struct kvg_job *job = slot->job;
	bool rescued, failed = any_failed(slot, &rescued);

	if (job->result < 0) {
		slot_release(slot);
	} else if (slot->fetched) {
		judge_fetched(slot, failed);
	} else if (!failed) {
		count_bytes(slot);
		slot->state = KVG_SLOT_READY;
	} else if (rescued || job->file_fd < 0) {
		kvg_job_fail(job, rescued && slot->impostor ? -ESTALE : -EIO);
		slot_release(slot);
	} else {
		start_rescue(slot, job->file_fd);
	}
}

/* ---- Rounds ---- */

/* A read that does not come leaves its slot to itself: the drive may still write there. */
static void give_up(struct kvg_slot *slot)
{
	kvg_job_fail(slot->job, -ETIMEDOUT);
	slot->job->in_flight--;
	slot->job = NULL;
	slot->io_count = slot->submitted;
}

static bool slot_step(struct kvg_slot *slot)
{
	enum kvg_slot_state before = slot->state;
	bool progress = slot->state == KVG_SLOT_READING && submit_reads(slot);
	bool ended = slot->state == KVG_SLOT_READING
			     ? slot->left == 0 && slot->submitted == slot->io_count
			     : kvg_task_is_done(&slot->task);

	if (ended && !slot->job) {
		slot->state = KVG_SLOT_FREE;
	} else if (ended && slot->state == KVG_SLOT_READING) {
		if (slot->job->result < 0)
			slot_release(slot);
		else
			start_check(slot);
	} else if (ended) {
		slot->job->counts.checksum_errors +=
			slot->state == KVG_SLOT_CHECKING ? slot->mismatches : 0;
		judge(slot);
	} else if (slot->job && slot->state != KVG_SLOT_CHECKING &&
		   kvg_stager_now(slot->stager) > slot->deadline_ns) {
		give_up(slot);
	}
	return progress || slot->state != before;
}

/* Of the most urgent the one that comes first in its file: so the watermark moves on. */
static struct kvg_slot *next_ready(struct kvg_stager *stager)
{
	struct kvg_slot *best = NULL;

	for (unsigned i = 0; i < stager->options.slots; i++) {
		struct kvg_slot *slot = &stager->slots[i];

		if (slot->state == KVG_SLOT_READY &&
			(!best || kvg_job_is_before(
					  slot->job, slot->offset, best->job, best->offset)))
			best = slot;
	}
	return best;
}

static bool copy_ready(struct kvg_stager *stager)
{
	struct kvg_slot *slot;
	bool progress = false;

	while ((slot = next_ready(stager))) {
		struct kvg_lane *lane;

		if (slot->job->result < 0) {
			slot_release(slot);
			continue;
		}
		lane = kvg_copy_begin(
			stager, slot->job, slot->memory, slot->offset, slot->length, false);
		if (!lane)
			break;
		lane->slot = slot;
		slot->state = KVG_SLOT_COPYING;
		progress = true;
	}
	return progress;
}

bool kvg_slots_step(struct kvg_stager *stager)
{
	bool progress = reap_reads(stager);

	for (unsigned i = 0; i < stager->options.slots; i++) {
		struct kvg_slot *slot = &stager->slots[i];

		if (slot->state == KVG_SLOT_READING || slot->state == KVG_SLOT_CHECKING ||
			slot->state == KVG_SLOT_RESCUING)
			progress |= slot_step(slot);
	}
	return copy_ready(stager) || progress;
}

void kvg_slot_copied(struct kvg_slot *slot)
{
	assert(slot->state == KVG_SLOT_COPYING || slot->state == KVG_SLOT_FETCHING);
	if (slot->state == KVG_SLOT_COPYING || slot->job->result < 0)
		slot_release(slot);
	else
		start_check(slot);
}

bool kvg_slots_idle(const struct kvg_stager *stager)
{
	for (unsigned i = 0; stager->slots && i < stager->options.slots; i++)
		if (stager->slots[i].state != KVG_SLOT_FREE)
			return false;
	return true;
}

uint64_t kvg_slots_lowest(const struct kvg_stager *stager, const struct kvg_job *job, uint64_t end)
{
	for (unsigned i = 0; i < stager->options.slots; i++)
		if (stager->slots[i].job == job)
			end = kv_min_u64(end, stager->slots[i].offset);
	return end;
}

/* ---- Life ---- */

/* NULL with errno. Its pages are there now, not inside the first copies. */
static void *ring_map(size_t size, int node, int flags)
{
	void *ring = mmap(
		NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	if (ring == MAP_FAILED)
		return NULL;
	kvg_numa_bind(ring, size, node);
	(void)madvise(ring, size, MADV_HUGEPAGE);
	(void)madvise(ring, size, MADV_DONTFORK);
	if (madvise(ring, size, MADV_POPULATE_WRITE) == 0)
		return ring;
	/* Linux before 5.14; but writing where the node has no reserved page would be a SIGBUS. */
	if (errno == EINVAL && flags == 0)
		return memset(ring, 0, size);
	int error = errno;
	(void)munmap(ring, size);
	errno = error;
	return NULL;
}

static int ring_new(struct kvg_stager *stager, size_t size)
{
	struct kvg_device_info info;
	int r;

	stager->backend->ops->info(stager->backend, &info);
	/* Of the huge pages that the operator has set aside, or transparent ones. */
	stager->ring = ring_map(size, info.numa_node, MAP_HUGETLB | MAP_HUGE_2MB);
	if (!stager->ring)
		stager->ring = ring_map(size, info.numa_node, 0);
	if (!stager->ring)
		return -errno;
	r = stager->backend->ops->host_register(stager->backend, stager->ring, size, 0);
	stager->ring_registered = r == 0;
	return r;
}

int kvg_slots_new(struct kvg_stager *stager)
{
	const struct kvg_stager_options *options = &stager->options;
	size_t size = (size_t)options->slots * options->slot_size;

	stager->slots = calloc(options->slots, sizeof(*stager->slots));
	if (!stager->slots)
		return -ENOMEM;
	int r = ring_new(stager, kv_round_up(size, HUGE_PAGE_SIZE));
	for (unsigned i = 0; i < options->slots && r == 0; i++) {
		stager->slots[i].stager = stager;
		stager->slots[i].task_fd = -1;
		stager->slots[i].memory = stager->ring + (size_t)i * options->slot_size;
	}
	return r;
}

void kvg_slots_free(struct kvg_stager *stager)
{
	size_t size = (size_t)stager->options.slots * stager->options.slot_size;

	for (unsigned i = 0; stager->slots && i < stager->options.slots; i++)
		free(stager->slots[i].ios);
	free(stager->slots);
	if (stager->ring_registered)
		stager->backend->ops->host_unregister(stager->backend, stager->ring);
	if (stager->ring)
		(void)munmap(stager->ring, kv_round_up(size, HUGE_PAGE_SIZE));
}
