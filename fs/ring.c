/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rings: many transfers at once over any kv_io_ops table, made whole.
 *
 * The table gets copies of the callers' transfers, one a slot, so that a short one can be
 * continued, and a caller may reuse its own as soon as DONE was called for it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fs/device.h"
#include "fs/device_internal.h"
#include "fs/wait.h"

/* A transfer that makes no progress that many times in a row fails. */
#define RETRIES_MAX 64u
/* Buffers are tracked in a 64-bit word. */
#define RING_BUFFERS_MAX 64u
#define REAP_BATCH 32u

struct slot {
	struct kv_io
		io; /* the rest of USER's transfer; first, so that a completion finds its slot */
	struct kv_io *user;
	unsigned retries;
	/* For the watch: since when it is under way (ms), shifted by 8, and the device; 0: it is
	 * not. */
	_Atomic uint64_t under_way;
};

struct kv_ring {
	LIST_ENTRY(kv_ring) entry; /* in devices->rings */
	struct kv_devices *devices;
	const struct kv_io_ops *ops;
	struct kv_io_queue *queue;
	unsigned depth;
	/* Between kv_ring_begin and kv_ring_end. */
	bool running;
	void (*done)(void *arg, struct kv_io *io);
	void *arg;
	int error; /* the first */
	unsigned buffer_count;
	uint64_t buffers_taken; /* bit N: buffer N */
	unsigned free_count;
	struct slot *free[KV_RING_DEPTH_MAX]; /* unused slots */
	unsigned again_count;
	struct slot *again[KV_RING_DEPTH_MAX]; /* slots to be submitted once more */
	struct slot slots[KV_RING_DEPTH_MAX];
};

int kv_ring_new(struct kv_devices *devices, unsigned depth, struct kv_ring **ret_ring)
{
	struct kv_ring *ring = calloc(1, sizeof(*ring));
	int r;

	if (!ring)
		return -ENOMEM;
	ring->devices = devices;
	ring->ops = devices->ops;
	ring->depth = depth == 0 ? 1 : (unsigned)kv_min_u64(depth, KV_RING_DEPTH_MAX);
	r = ring->ops->queue_new(
		ring->ops->context, devices->handles, devices->count, ring->depth, &ring->queue);
	if (r < 0) {
		free(ring);
		return r;
	}
	while (ring->buffer_count < RING_BUFFERS_MAX &&
		ring->ops->buffer(ring->ops->context, ring->queue, ring->buffer_count))
		ring->buffer_count++;
	for (unsigned i = 0; i < ring->depth; i++)
		ring->free[ring->free_count++] = &ring->slots[i];
	KV_LOCKED(&devices->rings_lock);
	LIST_INSERT_HEAD(&devices->rings, ring, entry);
	*ret_ring = ring;
	return 0;
}

struct kv_ring *kv_ring_free(struct kv_ring *ring)
{
	if (!ring)
		return NULL;
	assert(!ring->running);
	assert(ring->buffers_taken == 0);
	{
		KV_LOCKED(&ring->devices->rings_lock);
		LIST_REMOVE(ring, entry);
	}
	ring->ops->queue_free(ring->ops->context, ring->queue);
	free(ring);
	return NULL;
}

void kv_rings_oldest(struct kv_devices *devices, int64_t *ret_oldest_ms)
{
	const struct kv_ring *ring;
	KV_LOCKED(&devices->rings_lock);

	LIST_FOREACH (ring, &devices->rings, entry) {
		for (unsigned i = 0; i < ring->depth; i++) {
			uint64_t under_way = atomic_load_explicit(
				&ring->slots[i].under_way, memory_order_relaxed);
			int64_t *oldest = &ret_oldest_ms[under_way & 0xff];
			int64_t since = (int64_t)(under_way >> 8);

			if (under_way != 0 && (*oldest == 0 || since < *oldest))
				*oldest = since;
		}
	}
}

static void finish(struct kv_ring *ring, struct slot *slot, int result)
{
	struct kv_io *user = slot->user;

	atomic_store_explicit(&slot->under_way, 0, memory_order_relaxed);
	user->result = result;
	user->done = user->length - slot->io.length;
	if (result < 0 && ring->error == 0)
		ring->error = result;
	/* That of a refused one is no news. */
	if (result < 0 && result != -ECANCELED)
		kv_devices_note_error(ring->devices, user, result);
	/* A write that failed may have changed something, too. */
	if (user->kind == KV_IO_WRITE)
		kv_devices_note_write(ring->devices, user->device);
	ring->free[ring->free_count++] = slot;
	if (ring->done)
		ring->done(ring->arg, user);
}

/* Tries SLOT again for lack of progress, or gives up with ERROR. */
static void retry(struct kv_ring *ring, struct slot *slot, int error)
{
	if (++slot->retries > RETRIES_MAX)
		finish(ring, slot, error);
	else
		ring->again[ring->again_count++] = slot;
}

static void complete(struct kv_ring *ring, struct slot *slot, int result)
{
	struct kv_io *io = &slot->io;
	uint32_t moved;

	atomic_store_explicit(&ring->devices->device[io->device].answered_ms, kv_monotonic_ms(),
		memory_order_relaxed);
	if (result == -EINTR || result == -EAGAIN) {
		retry(ring, slot, -EIO);
		return;
	}
	/* Nothing moved, without an error: behind the end of the device. */
	if (result == 0 || result > (int64_t)io->length)
		result = -EIO;
	if (result < 0) {
		finish(ring, slot, result);
		return;
	}
	if ((uint32_t)result == io->length) {
		io->length = 0;
		finish(ring, slot, 0);
		return;
	}
	/* Direct I/O must go on at a block; the part of one is transferred again. */
	moved = (uint32_t)result & ~(KV_BLOCK_SIZE - 1);
	if (moved == 0) {
		retry(ring, slot, -EIO);
		return;
	}
	io->offset += moved;
	io->memory = (char *)io->memory + moved;
	io->length -= moved;
	slot->retries = 0;
	ring->again[ring->again_count++] = slot;
}

static struct slot *take_slot(struct kv_ring *ring, struct kv_io *user)
{
	struct slot *slot = ring->free[--ring->free_count];

	assert(user->device < ring->devices->count);
	assert(user->offset % KV_BLOCK_SIZE == 0);
	assert(user->length % KV_BLOCK_SIZE == 0 && user->length > 0);
	assert((uintptr_t)user->memory % KV_BLOCK_SIZE == 0);
	user->done = 0;
	slot->io = *user;
	slot->user = user;
	slot->retries = 0;
	atomic_store_explicit(&slot->under_way, (uint64_t)kv_monotonic_ms() << 8 | user->device,
		memory_order_relaxed);
	return slot;
}

/* Nobody would wait for a read; what has to be written stays with who has it. */
static bool is_refused(const struct kv_devices *devices, const struct kv_io *io)
{
	uint64_t refused = atomic_load_explicit(&devices->closing, memory_order_relaxed)
				   ? kv_devices_slow(devices)
				   : kv_devices_hung(devices);

	return io->kind == KV_IO_READ && refused >> io->device & 1;
}

/* Queues SLOT. False: the queue is full, and completions will make room. */
static bool submit_slot(struct kv_ring *ring, struct slot *slot)
{
	int r = is_refused(ring->devices, &slot->io)
			? -ECANCELED
			: ring->ops->submit(ring->ops->context, ring->queue, &slot->io);

	if (r == -EAGAIN && ring->free_count + ring->again_count + 1 < ring->depth)
		return false;
	if (r == -EAGAIN)
		retry(ring, slot, -EIO);
	else if (r < 0)
		finish(ring, slot, r);
	return true;
}

/* Fills the queue: first what has to go on, then new transfers from IOS. Returns how many of these.
 */
static unsigned fill_queue(struct kv_ring *ring, struct kv_io *ios, unsigned count)
{
	unsigned taken = 0;

	while (ring->again_count > 0) {
		struct slot *slot = ring->again[--ring->again_count];

		if (!submit_slot(ring, slot)) {
			ring->again[ring->again_count++] = slot;
			return 0;
		}
	}
	while (taken < count && ring->free_count > 0) {
		struct slot *slot = take_slot(ring, &ios[taken]);

		taken++;
		if (!submit_slot(ring, slot)) {
			ring->again[ring->again_count++] = slot;
			break;
		}
	}
	return taken;
}

/* Hands what is queued to the devices, and takes what is complete; WAIT: one at least. */
static void step(struct kv_ring *ring, bool wait)
{
	struct kv_io_completion completions[REAP_BATCH];
	int n;

	if (ring->free_count + ring->again_count == ring->depth)
		return; /* nothing is under way: all that was submitted failed at once */
	if (wait)
		kv_wait_begins();
	n = ring->ops->reap(ring->ops->context, ring->queue, wait, completions, REAP_BATCH);
	/*
	 * Only misuse of the queue ends here. Going on would leave transfers in flight into memory
	 * that the caller takes back: better no daemon than that.
	 */
	assert(n >= 0);
	for (int i = 0; i < n; i++)
		complete(ring, (struct slot *)completions[i].io, completions[i].result);
}

void kv_ring_begin(struct kv_ring *ring, void (*done)(void *arg, struct kv_io *io), void *arg)
{
	assert(!ring->running);
	ring->running = true;
	ring->done = done;
	ring->arg = arg;
	ring->error = 0;
}

void kv_ring_add(struct kv_ring *ring, struct kv_io *ios, unsigned count)
{
	unsigned next = 0;

	assert(ring->running);
	for (;;) {
		next += fill_queue(ring, ios + next, count - next);
		if (next == count)
			return;
		step(ring, true);
	}
}

void kv_ring_submit(struct kv_ring *ring)
{
	assert(ring->running);
	step(ring, false);
}

void kv_ring_wait(struct kv_ring *ring)
{
	assert(ring->running);
	(void)fill_queue(ring, NULL, 0);
	step(ring, true);
}

int kv_ring_end(struct kv_ring *ring)
{
	while (ring->free_count < ring->depth)
		kv_ring_wait(ring);
	assert(ring->running);
	ring->running = false;
	return ring->error;
}

int kv_ring_run(struct kv_ring *ring, struct kv_io *ios, unsigned count,
	void (*done)(void *arg, struct kv_io *io), void *arg)
{
	kv_ring_begin(ring, done, arg);
	kv_ring_add(ring, ios, count);
	return kv_ring_end(ring);
}

void *kv_ring_buffer_get(struct kv_ring *ring, int *ret_index)
{
	for (unsigned i = 0; i < ring->buffer_count; i++) {
		if (ring->buffers_taken & (UINT64_C(1) << i))
			continue;
		ring->buffers_taken |= UINT64_C(1) << i;
		*ret_index = (int)i;
		return ring->ops->buffer(ring->ops->context, ring->queue, i);
	}
	return NULL;
}

void kv_ring_buffer_put(struct kv_ring *ring, int index)
{
	assert(index >= 0 && (unsigned)index < ring->buffer_count);
	assert(ring->buffers_taken & (UINT64_C(1) << index));
	ring->buffers_taken &= ~(UINT64_C(1) << index);
}
