/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sharing extents between files: whole chunks change hands as numbers, edges are copied.
 */
#include "fs/write_internal.h"

static int wait_committed(struct kv_version *version)
{
	int r = kv_version_wait_settled(version);

	if (r < 0)
		return r;
	KV_LOCKED(&version->lock);
	return version->state == KV_VERSION_COMMITTED ? 0 : -EIO;
}

/* VERSION's extents are FROM's until the index counts them: FROM must outlive that. */
static int keep_source(struct kv_version *version, struct kv_version *from)
{
	struct kv_source *source = malloc(sizeof(*source));

	if (!source)
		return -ENOMEM;
	KV_LOCKED(&version->lock);
	for (const struct kv_source *other = version->sources; other; other = other->next) {
		if (other->version == from) {
			free(source);
			return 0;
		}
	}
	*source = (struct kv_source){.next = version->sources, .version = kv_version_ref(from)};
	version->sources = source;
	return 0;
}

struct shared {
	enum kv_chunk_state state;
	uint64_t sum;
	unsigned extent_count;
	unsigned blocks;
	struct kv_extent extents[KV_CHUNK_BLOCKS];
};

static int look_up(struct kv_version *from, uint32_t number, struct shared *ret_shared)
{
	KV_LOCKED(&from->lock);
	int r = kv_map_load(from, number);
	const struct kv_slot *slot = kv_slot_find(from, number);

	ret_shared->state = kv_slot_state(from, number);
	ret_shared->extent_count = slot ? slot->extent_count : 0;
	ret_shared->blocks = 0;
	if (r < 0 || ret_shared->extent_count == 0)
		return r;
	ret_shared->sum = slot->sum;
	memcpy(ret_shared->extents, kv_slot_extents(slot),
		slot->extent_count * sizeof(struct kv_extent));
	for (unsigned i = 0; i < slot->extent_count; i++)
		ret_shared->blocks += ret_shared->extents[i].count;
	return from->damaged ? -EIO : 0;
}

static int take_extents(struct kv_version *version, uint32_t to, const struct shared *shared)
{
	struct kv_slot *slot;
	KV_LOCKED(&version->lock);
	int r = kv_slot_get(version, to, &slot);

	if (r == 0)
		r = kv_slot_set_extents(slot, shared->extents, shared->extent_count);
	if (r < 0)
		return r;
	slot->state = KV_CHUNK_COLD;
	kv_unsettled_lose(version);
	slot->sum = shared->sum;
	slot->flags |= KV_SLOT_SHARED;
	version->blocks += shared->blocks;
	return 0;
}

static int share_chunk(
	struct kv_writer *writer, uint32_t to, struct kv_version *from, uint32_t number)
{
	uint64_t first = (uint64_t)to * KV_CHUNK_BLOCKS;
	struct kv_version *version = writer->version;
	struct shared shared;
	int r;

	r = look_up(from, number, &shared);
	/* Space that is shared needs no promise, and holes come along as holes. */
	if (r == 0)
		r = kv_promise_drop(version, first, first + KV_CHUNK_BLOCKS);
	if (r == 0)
		r = kv_chunk_drop(writer, to);
	if (r < 0 || shared.extent_count == 0)
		return r;
	r = kv_quota_promise(version, shared.blocks);
	if (r < 0)
		return r;
	r = take_extents(version, to, &shared);
	kv_quota_grown(version, shared.blocks);
	return r;
}

static int copy_piece(struct kv_writer *writer, struct kv_version *from, uint64_t from_offset,
	const struct kv_span *span)
{
	size_t size = span->to - span->from;
	_cleanup_free_ uint8_t *buffer = malloc(size);
	int r;

	if (!buffer)
		return -ENOMEM;
	ssize_t n = kv_version_read(from, buffer, size, from_offset);
	if (n < 0)
		return (int)n;
	memset(buffer + n, 0, size - (size_t)n);
	/* Entered exclusively, the version is not thinned by write-back: only its own chunks may be
	 * waited for. */
	r = kv_writer_promise(writer, ((uint64_t)span->chunk << KV_CHUNK_SHIFT) + span->from, size);
	return r < 0 ? r : kv_writer_span(writer, span, buffer);
}

/* The piece of the copy that begins DONE bytes in, up to the next chunk border of the target. */
static int clone_piece(
	struct kv_writer *writer, const struct kv_clone *clone, uint64_t done, uint64_t *ret_length)
{
	struct kv_version *version = writer->version, *from = clone->from;
	uint64_t from_at = clone->from_offset + done;
	uint64_t to_at = clone->to_offset + done;
	const struct kv_span span = kv_span_at(to_at, clone->length - done);
	uint64_t size;

	*ret_length = span.to - span.from;
	(void)pthread_mutex_lock(&version->lock);
	size = version->size;
	(void)pthread_mutex_unlock(&version->lock);
	bool aligned = span.from == 0 && (from_at & (KV_CHUNK_SIZE - 1)) == 0;
	/* The last, partial chunk of the source may be shared too if nothing of the target follows
	 * it. */
	bool whole = span.to == KV_CHUNK_SIZE ||
		     (from_at + span.to >= from->size && to_at + span.to >= size);
	if (aligned && whole)
		return share_chunk(writer, span.chunk, from, (uint32_t)(from_at >> KV_CHUNK_SHIFT));
	return copy_piece(writer, from, from_at, &span);
}

int kv_version_clone(
	struct kv_version *version, const struct kv_clone *request, uint64_t *ret_copied)
{
	struct kv_writer writer = {.version = version};
	struct kv_clone clone = *request;
	uint64_t done = 0;
	int r;

	assert(clone.from != version);
	r = wait_committed(clone.from);
	if (r < 0)
		return r;
	if (clone.from_offset >= clone.from->size || clone.length == 0) {
		*ret_copied = 0;
		return 0;
	}
	clone.length = kv_min_u64(clone.length, clone.from->size - clone.from_offset);
	if (clone.to_offset > KV_FILE_SIZE_MAX || clone.length > KV_FILE_SIZE_MAX - clone.to_offset)
		return -EFBIG;
	r = kv_version_enter_exclusive(version);
	if (r < 0)
		return r;
	r = keep_source(version, clone.from);
	while (done < clone.length && r == 0) {
		uint64_t length;

		r = clone_piece(&writer, &clone, done, &length);
		if (r < 0)
			break;
		done += length;
		KV_LOCKED(&version->lock);
		version->size = kv_max_u64(version->size, clone.to_offset + done);
	}
	kv_writer_done(&writer);
	int64_t now_ns = kv_core_now_ns(version->file->core);
	(void)pthread_mutex_lock(&version->lock);
	version->changed = true;
	version->mtime_ns = version->ctime_ns = now_ns;
	version->mtime_set = version->ctime_set = false;
	(void)pthread_mutex_unlock(&version->lock);
	kv_version_leave_exclusive(version);
	if (r < 0)
		return r;
	*ret_copied = clone.length;
	return 0;
}
