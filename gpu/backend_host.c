/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend without a device: segments are memfds, streams are threads that copy. It shares
 * memory between processes for real, so that everything above it runs, and is tested, on any
 * machine; an engine on CPUs can use it as it is.
 *
 * A segment is sealed: nobody can change its size, and from its first export on nobody can map it
 * for writing who has not done so (F_SEAL_FUTURE_WRITE, Linux 5.1). So a reader that turns on the
 * others gets nowhere, which no GPU promises.
 */
#include "gpu/backend.h"

#include <bsd/sys/queue.h>
/* Inlined, so that what engines link needs no further library. */
#define XXH_INLINE_ALL
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "fs/base.h"

#define GRANULARITY (UINT64_C(2) << 20)
#define DEVICES_MAX 64u

struct kvg_segment {
	int fd;
	uint64_t size; /* bytes */
	bool imported;
};

struct kvg_mapping {
	void *memory;
	uint64_t size; /* bytes */
};

/* What a stream does next: copies or a fill. */
struct work {
	STAILQ_ENTRY(work) entry;
	bool fill;
	uint8_t byte;
	size_t count;
	struct kvg_copy copies[];
};

struct stream {
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t more;        /* work came, or stop */
	pthread_cond_t done;        /* finished grew */
	STAILQ_HEAD(, work) queue;  /* lock */
	uint64_t added;             /* lock */
	_Atomic uint64_t completed; /* written under the lock */
	bool stop;                  /* lock */
};

struct kvg_event {
	struct stream *stream; /* NULL: nothing to wait for */
	uint64_t mark;         /* done when the stream's completed is as much */
};

struct host {
	struct kvg_backend base;
	unsigned number;
};

/* ---- The device ---- */

static int host_probe(char *ret_reason, size_t reason_size)
{
	return 0;
}

static int parse_number(const char *text, unsigned *ret_number)
{
	char *end;
	unsigned long number;

	if (!text) {
		*ret_number = 0;
		return 0;
	}
	errno = 0;
	number = strtoul(text, &end, 10);
	if (errno != 0 || end == text || *end != '\0' || number >= DEVICES_MAX)
		return -ENODEV;
	*ret_number = (unsigned)number;
	return 0;
}

static int host_open(const struct kvg_backend_open *open_options, struct kvg_backend **ret_backend,
	char *ret_error, size_t error_size)
{
	struct host *host;
	unsigned number;

	if (parse_number(open_options->device, &number) < 0) {
		(void)snprintf(ret_error, error_size,
			"host devices are numbers from 0 to %u, not '%.64s'", DEVICES_MAX - 1,
			open_options->device);
		return -ENODEV;
	}
	host = calloc(1, sizeof(*host));
	if (!host) {
		(void)snprintf(ret_error, error_size, "out of memory");
		return -ENOMEM;
	}
	host->base.ops = &kvg_backend_host;
	host->number = number;
	*ret_backend = &host->base;
	return 0;
}

static void host_close(struct kvg_backend *backend)
{
	free(backend);
}

/* All processes of one boot of a machine agree on it; none of another machine does. */
static void make_uuid(unsigned number, uint8_t *ret_uuid)
{
	char text[64] = "";
	unsigned filled = 0, half = 0;
	FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");

	memset(ret_uuid, 0, KVG_UUID_SIZE);
	if (file) {
		if (!fgets(text, sizeof(text), file))
			text[0] = '\0';
		(void)fclose(file);
	}
	for (const char *p = text; *p && filled < KVG_UUID_SIZE; p++) {
		int digit = *p >= '0' && *p <= '9'   ? *p - '0'
			    : *p >= 'a' && *p <= 'f' ? *p - 'a' + 10
						     : -1;
		if (digit < 0)
			continue;
		ret_uuid[filled] = (uint8_t)(ret_uuid[filled] << 4 | digit);
		half ^= 1;
		filled += half == 0;
	}
	ret_uuid[KVG_UUID_SIZE - 1] ^= (uint8_t)number;
}

static void host_info(struct kvg_backend *backend, struct kvg_device_info *ret_info)
{
	const struct host *host = (const struct host *)backend;

	*ret_info = (struct kvg_device_info){
		.name = "host memory",
		.mode = "host: no device, segments are memfds, copies are memcpy",
		.kernels = "none: there is no device",
		.granularity = GRANULARITY,
		.total = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE),
		.numa_node = -1,
		.integrated = true,
		.register_read_only = true,
		.zeroed = true,
		.modelled = true,
		.dl_device_type = 1,
		.dl_device_id = 0,
	};
	make_uuid(host->number, ret_info->uuid);
}

static int host_free_bytes(struct kvg_backend *backend, uint64_t *ret_bytes)
{
	*ret_bytes = (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	return 0;
}

static bool host_is_dead(struct kvg_backend *backend)
{
	return false;
}

static int host_last_code(struct kvg_backend *backend)
{
	return 0;
}

/* ---- Segments ---- */

static int host_segment_new(
	struct kvg_backend *backend, uint64_t size, struct kvg_segment **ret_segment)
{
	_cleanup_fd_ int fd = -1;
	struct kvg_segment *segment;

	if (size == 0 || size % GRANULARITY != 0)
		return -EINVAL;
	fd = memfd_create("kvg-segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)size) < 0)
		return errno == ENOSPC ? -ENOMEM : -errno;
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
		return -errno;
	segment = calloc(1, sizeof(*segment));
	if (!segment)
		return -ENOMEM;
	segment->fd = kv_steal_fd(&fd);
	segment->size = size;
	*ret_segment = segment;
	return 0;
}

static void host_segment_free(struct kvg_backend *backend, struct kvg_segment *segment)
{
	if (!segment)
		return;
	(void)close(segment->fd);
	free(segment);
}

static int host_segment_export(
	struct kvg_backend *backend, struct kvg_segment *segment, int *ret_fd)
{
	int fd;

	if (segment->imported)
		return -EINVAL;
	/* EBUSY does not come of it: writable mappings that are there stay. */
	if (fcntl(segment->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) < 0)
		return -errno;
	fd = fcntl(segment->fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	*ret_fd = fd;
	return 0;
}

static int host_segment_import(
	struct kvg_backend *backend, int fd, uint64_t size, struct kvg_segment **ret_segment)
{
	int seals = fcntl(fd, F_GET_SEALS);
	struct kvg_segment *segment;
	struct stat st;

	/* Without the seals its owner could cut it under our mapping. */
	if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
		return -EINVAL;
	if (fstat(fd, &st) < 0 || (uint64_t)st.st_size != size)
		return -EINVAL;
	segment = calloc(1, sizeof(*segment));
	if (!segment)
		return -ENOMEM;
	segment->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (segment->fd < 0) {
		int r = -errno;

		free(segment);
		return r;
	}
	segment->size = size;
	segment->imported = true;
	*ret_segment = segment;
	return 0;
}

static int map_all(uint8_t *memory, struct kvg_segment *const *segments, size_t count, int prot)
{
	for (size_t i = 0; i < count; i++) {
		if (mmap(memory, segments[i]->size, prot, MAP_SHARED | MAP_FIXED, segments[i]->fd,
			    0) == MAP_FAILED)
			return errno == EPERM ? -EACCES : -errno;
		memory += segments[i]->size;
	}
	return 0;
}

static int host_map(struct kvg_backend *backend, struct kvg_segment *const *segments, size_t count,
	bool writable, struct kvg_mapping **ret_mapping)
{
	struct kvg_mapping *mapping;
	uint64_t size = 0;
	int r;

	for (size_t i = 0; i < count; i++)
		size += segments[i]->size;
	if (size == 0)
		return -EINVAL;
	mapping = calloc(1, sizeof(*mapping));
	if (!mapping)
		return -ENOMEM;
	mapping->size = size;
	mapping->memory =
		mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (mapping->memory == MAP_FAILED) {
		r = -errno;
		free(mapping);
		return r;
	}
	r = map_all(mapping->memory, segments, count, PROT_READ | (writable ? PROT_WRITE : 0));
	if (r < 0) {
		(void)munmap(mapping->memory, size);
		free(mapping);
		return r;
	}
	*ret_mapping = mapping;
	return 0;
}

static void host_unmap(struct kvg_backend *backend, struct kvg_mapping *mapping)
{
	if (!mapping)
		return;
	(void)munmap(mapping->memory, mapping->size);
	free(mapping);
}

static kvg_devptr host_address(struct kvg_backend *backend, struct kvg_mapping *mapping)
{
	return (kvg_devptr)(uintptr_t)mapping->memory;
}

/* ---- Host memory: nothing to do ---- */

static int host_register(struct kvg_backend *backend, void *memory, uint64_t size, unsigned flags)
{
	return size == 0 || size > KVG_REGISTER_MAX ? -EINVAL : 0;
}

static void host_unregister(struct kvg_backend *backend, void *memory)
{
}

/* ---- Streams ---- */

static void run_work(const struct work *work)
{
	for (size_t i = 0; i < work->count; i++) {
		void *to = (void *)(uintptr_t)work->copies[i].to;

		if (work->fill)
			memset(to, work->byte, work->copies[i].size);
		else
			memcpy(to, (const void *)(uintptr_t)work->copies[i].from,
				work->copies[i].size);
	}
}

static void *stream_main(void *arg)
{
	struct stream *stream = arg;
	KV_LOCKED(&stream->lock);

	for (;;) {
		struct work *work = STAILQ_FIRST(&stream->queue);

		if (!work && stream->stop)
			return NULL;
		if (!work) {
			(void)pthread_cond_wait(&stream->more, &stream->lock);
			continue;
		}
		STAILQ_REMOVE_HEAD(&stream->queue, entry);
		(void)pthread_mutex_unlock(&stream->lock);
		run_work(work);
		free(work);
		(void)pthread_mutex_lock(&stream->lock);
		/* Pairs with the load in host_event_query: what was copied is seen with it. */
		atomic_store_explicit(
			&stream->completed, stream->completed + 1, memory_order_release);
		(void)pthread_cond_broadcast(&stream->done);
	}
}

static int host_stream_new(struct kvg_backend *backend, kvg_stream *ret_stream)
{
	struct stream *stream = calloc(1, sizeof(*stream));
	int r;

	if (!stream)
		return -ENOMEM;
	(void)pthread_mutex_init(&stream->lock, NULL);
	(void)pthread_cond_init(&stream->more, NULL);
	(void)pthread_cond_init(&stream->done, NULL);
	STAILQ_INIT(&stream->queue);
	r = pthread_create(&stream->thread, NULL, stream_main, stream);
	if (r != 0) {
		free(stream);
		return -r;
	}
	*ret_stream = stream;
	return 0;
}

static void host_stream_free(struct kvg_backend *backend, kvg_stream handle)
{
	struct stream *stream = handle;

	if (!stream)
		return;
	{
		KV_LOCKED(&stream->lock);
		stream->stop = true;
		(void)pthread_cond_signal(&stream->more);
	}
	(void)pthread_join(stream->thread, NULL);
	(void)pthread_cond_destroy(&stream->more);
	(void)pthread_cond_destroy(&stream->done);
	(void)pthread_mutex_destroy(&stream->lock);
	free(stream);
}

static int host_stream_sync(struct kvg_backend *backend, kvg_stream handle)
{
	struct stream *stream = handle;

	if (!stream)
		return 0;
	KV_LOCKED(&stream->lock);
	while (stream->completed < stream->added)
		(void)pthread_cond_wait(&stream->done, &stream->lock);
	return 0;
}

/* Takes WORK. */
static void add_work(struct stream *stream, struct work *work)
{
	if (!stream) {
		run_work(work);
		free(work);
		return;
	}
	KV_LOCKED(&stream->lock);
	STAILQ_INSERT_TAIL(&stream->queue, work, entry);
	stream->added++;
	(void)pthread_cond_signal(&stream->more);
}

static int host_copy(struct kvg_backend *backend, kvg_stream stream, enum kvg_copy_kind kind,
	const struct kvg_copy *copies, size_t count)
{
	struct work *work;

	if (count == 0)
		return 0;
	work = calloc(1, sizeof(*work) + count * sizeof(*copies));
	if (!work)
		return -ENOMEM;
	work->count = count;
	memcpy(work->copies, copies, count * sizeof(*copies));
	add_work(stream, work);
	return 0;
}

static int host_fill(
	struct kvg_backend *backend, kvg_stream stream, kvg_devptr to, uint8_t byte, uint64_t size)
{
	struct work *work;

	if (size == 0)
		return 0;
	work = calloc(1, sizeof(*work) + sizeof(work->copies[0]));
	if (!work)
		return -ENOMEM;
	work->fill = true;
	work->byte = byte;
	work->count = 1;
	work->copies[0] = (struct kvg_copy){.to = to, .size = size};
	add_work(stream, work);
	return 0;
}

static int host_event_new(struct kvg_backend *backend, struct kvg_event **ret_event)
{
	struct kvg_event *event = calloc(1, sizeof(*event));

	if (!event)
		return -ENOMEM;
	*ret_event = event;
	return 0;
}

static void host_event_free(struct kvg_backend *backend, struct kvg_event *event)
{
	free(event);
}

static int host_event_record(
	struct kvg_backend *backend, struct kvg_event *event, kvg_stream handle)
{
	struct stream *stream = handle;

	event->stream = stream;
	if (!stream)
		return 0;
	KV_LOCKED(&stream->lock);
	event->mark = stream->added;
	return 0;
}

static int host_event_query(struct kvg_backend *backend, struct kvg_event *event)
{
	if (!event->stream)
		return 0;
	/* Pairs with the store in stream_main. */
	return atomic_load_explicit(&event->stream->completed, memory_order_acquire) >= event->mark
		       ? 0
		       : -EAGAIN;
}

/* ---- Checksums ---- */

static int host_checksum_probe(struct kvg_backend *backend, char *ret_reason, size_t reason_size)
{
	return 0;
}

static int host_checksum(struct kvg_backend *backend, kvg_stream stream,
	const struct kvg_range *ranges, size_t count, uint64_t *ret_sums)
{
	int r = host_stream_sync(backend, stream);

	for (size_t i = 0; i < count && r == 0; i++)
		ret_sums[i] =
			XXH3_64bits((const void *)(uintptr_t)ranges[i].address, ranges[i].size);
	return r;
}

const struct kvg_backend_ops kvg_backend_host = {
	.name = "host",
	.probe = host_probe,
	.open = host_open,
	.close = host_close,
	.info = host_info,
	.free_bytes = host_free_bytes,
	.is_dead = host_is_dead,
	.last_code = host_last_code,
	.segment_new = host_segment_new,
	.segment_free = host_segment_free,
	.segment_export = host_segment_export,
	.segment_import = host_segment_import,
	.map = host_map,
	.unmap = host_unmap,
	.address = host_address,
	.host_register = host_register,
	.host_unregister = host_unregister,
	.stream_new = host_stream_new,
	.stream_free = host_stream_free,
	.stream_sync = host_stream_sync,
	.copy = host_copy,
	.fill = host_fill,
	.event_new = host_event_new,
	.event_free = host_event_free,
	.event_record = host_event_record,
	.event_query = host_event_query,
	.checksum_probe = host_checksum_probe,
	.checksum = host_checksum,
};
