/* SPDX-License-Identifier: Apache-2.0 */
/* Staging, from the daemon's answers to READY: see server_internal.h. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>

#include "fs/log.h"
#include "gpu/server_internal.h"

/* Clients can only read the page: the writable mapping is older than the seal. */
static int mark_new(struct kvg_placement *placement)
{
	void *memory;
	int fd = memfd_create("kvg-watermark", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return -errno;
	placement->mark_fd = fd;
	if (ftruncate(fd, KVG_WATERMARK_SIZE) < 0)
		return -errno;
	memory = mmap(NULL, KVG_WATERMARK_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return -errno;
	placement->mark = memory;
	return fcntl(fd, F_ADD_SEALS,
		       F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0
		       ? -errno
		       : 0;
}

static void drop_hold(struct kvg_server *server, uint64_t hold)
{
	struct kv_gpu_request request = {.type = KV_GPU_DROP, .hold = hold};

	kvg_source_tell(server->source, &request);
}

/* Once for each LOCATE that was answered: the daemon counts. */
static void unwatch(struct kvg_server *server, uint64_t ino)
{
	struct kv_gpu_request request = {.type = KV_GPU_UNWATCH, .ino = ino};

	kvg_source_tell(server->source, &request);
}

void kvg_decline(struct kvg_server *server, const struct kv_gpu_reply *reply)
{
	drop_hold(server, reply->hold);
	unwatch(server, reply->ino);
}

/* Holds and watches end with their connection; a later one has others of the same numbers. */
static bool is_known(const struct kvg_placement *placement)
{
	return placement->connection == placement->server->connection;
}

/* What is only needed while it is being staged. */
static void staging_done(struct kvg_placement *placement)
{
	if (placement->hold != 0 && is_known(placement))
		drop_hold(placement->server, placement->hold);
	placement->hold = 0;
	if (placement->object_fd >= 0)
		(void)close(placement->object_fd);
	if (placement->file_fd >= 0)
		(void)close(placement->file_fd);
	placement->object_fd = placement->file_fd = -1;
	free(kv_steal_ptr(&placement->targets));
	free(kv_steal_ptr(&placement->chunks));
	free(kv_steal_ptr(&placement->extents));
}

void kvg_stage_gone(void *arg, struct kvg_entry *entry)
{
	struct kvg_placement *placement = entry->owner;

	(void)arg;
	if (!placement)
		return;
	if (placement->waiting)
		LIST_REMOVE(placement, waiting_entry);
	staging_done(placement);
	if (is_known(placement))
		unwatch(placement->server, entry->key.ino);
	if (placement->mark)
		(void)munmap(placement->mark, KVG_WATERMARK_SIZE);
	if (placement->mark_fd >= 0)
		(void)close(placement->mark_fd);
	free(placement);
	entry->owner = NULL;
}

/* The end of a staging, good or bad, told to all. The entry may be gone afterwards. */
static void end(struct kvg_placement *placement, int result)
{
	struct kvg_server *server = placement->server;
	struct kvg_entry *entry = placement->entry;

	if (placement->waiting)
		LIST_REMOVE(placement, waiting_entry);
	placement->waiting = false;
	staging_done(placement);
	server->stagings--;
	kvg_watermark_set(placement->mark,
		result == 0 ? entry->key.end : atomic_load(&placement->mark->staged), result);
	if (result == 0) {
		server->stat.staged++;
		kvg_tell_ready(entry, 0);
		kvg_hbm_staged(entry);
		return;
	}
	if (result == -ECANCELED) {
		kvg_hbm_failed(entry, result, kv_monotonic_ms());
		return;
	}
	server->stat.failed++;
	kv_log_warning("gpu", "staging failed ino=%" PRIu64 " version=%" PRIu64 " error=\"%s\"",
		entry->key.ino, entry->key.version, strerror(-result));
	kvg_tell_ready(entry, result);
	kvg_hbm_failed(entry, result, kv_monotonic_ms());
}

/* A staging has ended: others may have waited for some of it. */
static void end_waiting(struct kvg_server *server)
{
	struct kvg_placement *placement = LIST_FIRST(&server->waiting);

	while (placement) {
		int r = placement->check_result;

		if (r == 0)
			r = kvg_hbm_filled(placement->entry);
		if (r == -EAGAIN) {
			placement = LIST_NEXT(placement, waiting_entry);
			continue;
		}
		end(placement, r);
		/* Which may be what others have waited for. */
		placement = LIST_FIRST(&server->waiting);
	}
}

static void finish(struct kvg_placement *placement, int result)
{
	struct kvg_server *server = placement->server;

	placement->submitted = false;
	if (result == 0 && kvg_check_begin(placement))
		return;
	if (result == 0)
		result = placement->check_result;
	if (result == 0)
		result = kvg_hbm_filled(placement->entry);
	if (result == -EAGAIN) {
		staging_done(placement);
		placement->waiting = true;
		LIST_INSERT_HEAD(&server->waiting, placement, waiting_entry);
	} else {
		end(placement, result);
	}
	end_waiting(server);
}

void kvg_stage_checked(struct kvg_placement *placement)
{
	finish(placement, 0);
}

static int make_targets(struct kvg_placement *placement)
{
	struct kvg_server *server = placement->server;
	struct kvg_entry *entry = placement->entry;

	kvg_check_prepare(placement);
	placement->targets = calloc(entry->count, sizeof(*placement->targets));
	if (!placement->targets)
		return -ENOMEM;
	for (unsigned i = 0; i < entry->count; i++) {
		const struct kvg_block *block = entry->parts[i].block;
		bool own = entry->parts[i].own;

		placement->targets[i] = (struct kvg_target){
			.address =
				own ? server->backend->ops->address(server->backend, block->mapping)
				    : 0,
			.size = block->size,
			.skip = !own,
			.samples = own ? block->samples : NULL,
		};
	}
	return 0;
}

/* Where the first segment begins that another entry has not staged yet; 0: there is none. */
static uint64_t first_owed(const struct kvg_entry *entry)
{
	for (unsigned i = 0; i < entry->count; i++)
		if (!entry->parts[i].own && entry->parts[i].block->state != KVG_BLOCK_THERE)
			return entry->parts[i].block->key.first;
	return 0;
}

static int submit(struct kvg_placement *placement)
{
	int r = make_targets(placement);

	if (r < 0)
		return r;
	placement->job = (struct kvg_job){
		.offset = placement->entry->key.first,
		.size = placement->entry->size,
		.priority = placement->priority,
		.targets = placement->targets,
		.target_count = placement->entry->count,
		.object_fd = placement->object_fd,
		.chunks = placement->chunks,
		.extents = placement->extents,
		.file_fd = placement->file_fd,
		.ino = placement->entry->key.ino,
		.version = placement->entry->key.version,
		.watermark = placement->mark,
		.mark_end = first_owed(placement->entry),
		.arg = placement,
	};
	placement->submitted = true;
	kvg_stager_submit(placement->server->stager, &placement->job);
	return 0;
}

/* ---- Chunks ---- */

static int add_extents(struct kvg_placement *placement, const uint8_t *from, uint32_t count)
{
	if (count == 0)
		return 0;
	if (placement->extent_count + count > placement->extent_capacity) {
		uint32_t capacity = (placement->extent_count + count) * 2;
		struct kv_gpu_extent *extents =
			realloc(placement->extents, capacity * sizeof(*extents));

		if (!extents)
			return -ENOMEM;
		placement->extents = extents;
		placement->extent_capacity = capacity;
	}
	memcpy(placement->extents + placement->extent_count, from,
		count * sizeof(struct kv_gpu_extent));
	placement->extent_count += count;
	return 0;
}

static uint32_t first_chunk(const struct kvg_placement *placement)
{
	return (uint32_t)(placement->entry->key.first >> KV_CHUNK_SHIFT);
}

static int add_chunks(struct kvg_placement *placement, const struct kvg_answer *answer)
{
	size_t at = 0;

	for (uint32_t i = 0; i < answer->reply->count; i++) {
		struct kv_gpu_chunk chunk;
		size_t size;
		int r;

		if (answer->payload_size - at < sizeof(chunk))
			return -EPROTO;
		memcpy(&chunk, answer->payload + at, sizeof(chunk));
		at += sizeof(chunk);
		size = chunk.extents * sizeof(struct kv_gpu_extent);
		/* The daemon does not know where the stretch ends. */
		if (placement->chunks_known == placement->chunk_count)
			return 0;
		if (chunk.number != first_chunk(placement) + placement->chunks_known ||
			chunk.where > KV_GPU_FILE || answer->payload_size - at < size)
			return -EPROTO;
		placement->chunks[placement->chunks_known++] = (struct kvg_chunk){
			.where = chunk.where,
			.extents = chunk.extents,
			.first = placement->extent_count,
			.sum = chunk.sum,
		};
		r = add_extents(placement, answer->payload + at, chunk.extents);
		if (r < 0)
			return r;
		at += size;
	}
	return 0;
}

static int ask_chunks(struct kvg_placement *placement);

static void chunks_answered(void *arg, const struct kvg_answer *answer)
{
	struct kvg_placement *placement = arg;
	uint32_t before = placement->chunks_known;
	int r = answer->error == -EPIPE ? -ENOTCONN : answer->error;

	if (r == 0 && placement->cancelled)
		r = -ECANCELED;
	if (r == 0)
		r = add_chunks(placement, answer);
	if (r == 0 && placement->chunks_known == placement->chunk_count)
		r = submit(placement);
	else if (r == 0)
		r = placement->chunks_known == before ? -EPROTO : ask_chunks(placement);
	if (r < 0)
		finish(placement, r);
}

static int ask_chunks(struct kvg_placement *placement)
{
	struct kv_gpu_request request = {
		.type = KV_GPU_CHUNKS,
		.hold = placement->hold,
		.first = first_chunk(placement) + placement->chunks_known,
	};

	return kvg_source_ask(placement->server->source, &request, chunks_answered, placement);
}

/* ---- Begin and end ---- */

static bool has_own(const struct kvg_entry *entry)
{
	for (unsigned i = 0; i < entry->count; i++)
		if (entry->parts[i].own)
			return true;
	return false;
}

static int start(struct kvg_placement *placement)
{
	int r;

	if (!has_own(placement->entry))
		return 0;
	if (placement->object_fd >= 0)
		return submit(placement);
	placement->chunk_count = (uint32_t)kv_div_round_up(placement->entry->size, KV_CHUNK_SIZE);
	placement->chunks = calloc(placement->chunk_count, sizeof(*placement->chunks));
	r = placement->chunks ? ask_chunks(placement) : -ENOMEM;
	return r;
}

static void raise_one(const struct kvg_entry *entry, unsigned priority)
{
	struct kvg_placement *placement = entry->owner;

	if (entry->state != KVG_STAGING || !placement || placement->priority >= priority)
		return;
	placement->priority = priority;
	if (placement->submitted)
		kvg_stager_raise(placement->server->stager, &placement->job, priority);
}

/* Those who stage what ENTRY waits for are wanted as urgently as itself. What they wait for is not.
 */
static void raise_fillers(const struct kvg_entry *entry, unsigned priority)
{
	for (unsigned i = 0; i < entry->count; i++) {
		const struct kvg_block *block = entry->parts[i].block;

		if (!entry->parts[i].own && block->state == KVG_BLOCK_FILLING)
			raise_one(block->filler, priority);
	}
}

void kvg_stage_raise(struct kvg_entry *entry, unsigned priority)
{
	if (entry->state != KVG_STAGING)
		return;
	raise_one(entry, priority);
	raise_fillers(entry, priority);
}

void kvg_stage_cancel(void *arg, struct kvg_entry *entry)
{
	struct kvg_placement *placement = entry->owner;

	(void)arg;
	placement->cancelled = true;
	if (placement->submitted)
		kvg_stager_cancel(&placement->job);
	/* It must not keep those from ending whom it waits for. */
	else if (placement->waiting)
		end(placement, -ECANCELED);
}

int kvg_stage_begin(struct kvg_server *server, struct kvg_entry *entry,
	const struct kvg_answer *answer, int file_fd, unsigned priority)
{
	struct kvg_placement *placement = calloc(1, sizeof(*placement));
	int r;

	if (!placement) {
		if (file_fd >= 0)
			(void)close(file_fd);
		kvg_decline(server, answer->reply);
		kvg_hbm_failed(entry, -ENOMEM, kv_monotonic_ms());
		return -ENOMEM;
	}
	entry->owner = placement;
	placement->server = server;
	placement->connection = server->connection;
	placement->entry = entry;
	placement->file_size = answer->reply->size;
	placement->priority = priority;
	placement->mark_fd = -1;
	placement->hold = answer->reply->hold;
	placement->file_fd = file_fd;
	placement->object_fd = -1;
	if (answer->reply->flags & KV_GPU_RESIDENT && answer->fd_count == 1)
		placement->object_fd = kv_steal_fd(&answer->fds[0]);
	r = mark_new(placement);
	if (r == 0)
		r = start(placement);
	if (r < 0) {
		kvg_hbm_failed(entry, r, kv_monotonic_ms());
		return r;
	}
	server->stagings++;
	raise_fillers(entry, priority);
	if (!has_own(entry))
		finish(placement, 0);
	return 0;
}

static void add_counts(struct kvg_server *server, const struct kvg_job_counts *counts)
{
	server->stat.from_dram_bytes += counts->from_dram;
	server->stat.from_device_bytes += counts->from_device;
	server->stat.from_file_bytes += counts->from_file;
	server->stat.direct_bytes += counts->direct;
	server->stat.direct_errors += counts->direct_errors;
	server->stat.checksum_errors += counts->checksum_errors;
}

/* Bytes of the file that JOB was to stage. */
static uint64_t own_bytes(const struct kvg_job *job)
{
	uint64_t bytes = 0, left = job->size;

	for (unsigned i = 0; i < job->target_count; i++) {
		uint64_t part = kv_min_u64(left, job->targets[i].size);

		bytes += job->targets[i].skip ? 0 : part;
		left -= part;
	}
	return bytes;
}

static void reap_one(struct kvg_server *server, struct kvg_job *job)
{
	struct kvg_placement *placement = job->arg;
	struct kvg_entry *entry = placement->entry;

	if (!job->final) {
		kv_log_warning("gpu",
			"a drive does not end its writes into device memory, which stays set aside "
			"until it does ino=%" PRIu64 " bytes=%" PRIu64,
			entry->key.ino, entry->bytes);
		placement->held = true;
		kvg_hbm_hold(entry);
		finish(placement, job->result);
		return;
	}
	add_counts(server, &job->counts);
	if (placement->held) {
		placement->held = false;
		kvg_hbm_release(entry);
		return;
	}
	server->stat.staged_bytes += job->result == 0 ? own_bytes(job) : 0;
	finish(placement, job->result);
}

void kvg_stage_reap(struct kvg_server *server)
{
	struct kvg_job *job;

	while ((job = kvg_stager_reap(server->stager)))
		reap_one(server, job);
	kvg_stage_news(server);
}

void kvg_stage_news(struct kvg_server *server)
{
	char news[KVG_NEWS_SIZE];
	size_t length = strlen(server->reasons);

	kvg_stager_news(server->stager, news);
	if (news[0] == '\0')
		return;
	kv_log_warning("gpu", "%s", news);
	(void)snprintf(server->reasons + length, sizeof(server->reasons) - length, "%s%s",
		length > 0 ? "; " : "", news);
}

static void abandon(void *arg, struct kvg_entry *entry)
{
	(void)arg;
	if (entry->state == KVG_STAGING)
		finish(entry->owner, -EIO);
}

void kvg_stage_abandon(struct kvg_server *server)
{
	kvg_hbm_all(server->hbm, abandon, NULL);
}
