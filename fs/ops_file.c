/* SPDX-License-Identifier: Apache-2.0 */
/* Content: read, write, fsync, fallocate, lseek, copy_file_range. */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "fs/handle.h"
#include "fs/notify.h"
#include "fs/ops.h"
#include "fs/reply.h"

/* A publish can slip in between taking a version and changing it; more often than that is a bug. */
#define WRITE_RETRIES_MAX 64u
/* Below it a copy costs less than a mapping. */
#define LEND_MIN (128u << 10)

static pthread_key_t read_buffer_key;
static pthread_once_t read_buffer_once = PTHREAD_ONCE_INIT;

static void read_buffer_key_make(void)
{
	int r = pthread_key_create(&read_buffer_key, free);

	assert(r == 0);
	(void)r;
}

/* This worker's buffer for replies, SIZE bytes or more: no allocation but the first. */
static void *read_buffer(struct kv_daemon *daemon, size_t size)
{
	void *buffer;

	assert(size <= daemon->max_write);
	(void)pthread_once(&read_buffer_once, read_buffer_key_make);
	buffer = pthread_getspecific(read_buffer_key);
	if (buffer)
		return buffer;
	if (posix_memalign(&buffer, KV_BLOCK_SIZE, daemon->max_write) != 0)
		return NULL;
	/* Somebody's content: see privileges.h. */
	(void)madvise(buffer, daemon->max_write, MADV_DONTDUMP);
	if (pthread_setspecific(read_buffer_key, buffer) != 0) {
		free(buffer);
		return NULL;
	}
	return buffer;
}

/* What a read through HANDLE sees now, with a reference; NULL if the file has no content yet. */
static struct kv_version *version_to_read(struct kv_daemon *daemon, struct kv_handle *handle)
{
	struct kv_node *node = handle->node;
	struct kv_version *version = NULL;

	if (handle->version)
		return kv_version_ref(handle->version);
	KV_LOCKED(kv_node_lock(daemon, node->ino));
	if (node->version)
		return kv_version_ref(node->version);
	return kv_file_current(node->file, &version) == 0 ? version : NULL;
}

static void reply_read(fuse_req_t req, const void *memory, size_t size)
{
	struct kv_daemon *daemon = kv_daemon_of(req);

	kv_stat_add(&daemon->stats.fuse_read, 1);
	kv_stat_add(&daemon->stats.fuse_read_bytes, size);
	kv_reply_check(daemon, fuse_reply_buf(req, memory, size));
}

/*
 * Has the pages of a loan mapped before the reply copies from them, as it does else: a reply that
 * has to wait for a page when the process is killed fails its request (session.c, request_memory).
 */
static void map_pages(const struct kv_loan *loan)
{
	uintptr_t at = (uintptr_t)loan->memory % KV_BLOCK_SIZE;

	(void)madvise((uint8_t *)loan->memory - at, loan->size + at, MADV_POPULATE_READ);
}

/* Answers from the object's own pages, where that is less work than a copy. */
static bool reply_lent(fuse_req_t req, struct kv_version *version, size_t size, uint64_t offset)
{
	struct kv_loan loan;
	int r = !version || size < LEND_MIN ? -EAGAIN
					    : kv_version_lend(version, offset, size, &loan);

	if (r == -EAGAIN)
		return false;
	if (r < 0) {
		kv_reply_error(req, r);
		return true;
	}
	if (kv_daemon_of(req)->takeover)
		map_pages(&loan);
	reply_read(req, loan.memory, loan.size);
	kv_loan_end(&loan);
	return true;
}

static void reply_copied(
	fuse_req_t req, struct kv_version *version, size_t size, uint64_t offset, bool direct)
{
	void *buffer = read_buffer(kv_daemon_of(req), size);
	ssize_t n = buffer ? 0 : -ENOMEM;

	if (buffer && version)
		n = direct ? kv_version_read_direct(version, buffer, size, offset)
			   : kv_version_read(version, buffer, size, offset);
	if (n < 0)
		kv_reply_error(req, (int)n);
	else
		reply_read(req, buffer, (size_t)n);
}

static void op_read(
	fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct kv_version *version = version_to_read(kv_daemon_of(req), kv_handle_of(fi));

	(void)id;
	/* It may be for a mapping, which keeps what it gets. */
	if (!kv_handle_of(fi)->version)
		kv_handle_of(fi)->node->cached = true;
	/* The kernel sends the flags as they are now, after F_SETFL. What the owner of a pool reads
	 * by O_DIRECT does not come into DRAM for that. */
	bool direct = fi->flags & O_DIRECT && !kv_handle_of(fi)->version;
	if (direct || !reply_lent(req, version, size, (uint64_t)offset))
		reply_copied(req, version, size, (uint64_t)offset, direct);
	kv_version_unref(version);
}

/*
 * Whoever is not root takes the set-ID bits away by writing (FUSE_CAP_HANDLE_KILLPRIV_V2 makes that
 * ours; libfuse 3.17 does not hand us the kernel's flag, which says the same).
 */
void kv_drop_set_id(fuse_req_t req, struct kv_node *node)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_change change = {.mask = KV_CHANGE_MODE};
	struct kv_inode inode;

	if (fuse_req_ctx(req)->uid == 0)
		return;
	if (kv_index_get(daemon->index, node->ino, &inode) < 0)
		return;
	change.mode = kv_without_set_id(inode.mode);
	if (change.mode != (inode.mode & 07777) &&
		kv_index_change(daemon->index, node->ino, &change, &inode) == 0)
		kv_node_attributes_changed(daemon, node);
}

/* Whose change REQ is; nobody's if its bytes come from a mapping. */
static pid_t changer_of(fuse_req_t req, const struct fuse_file_info *fi)
{
	return fi->writepage ? 0 : fuse_req_ctx(req)->pid;
}

static void op_write(fuse_req_t req, fuse_ino_t id, const char *data, size_t size, off_t offset,
	struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_node *node = kv_handle_of(fi)->node;
	struct kv_node_outcome outcome = {
		.from = (uint64_t)offset,
		.to = (uint64_t)offset + size,
		.error = -ESTALE,
	};

	(void)id;
	for (unsigned i = 0; outcome.error == -ESTALE && i < WRITE_RETRIES_MAX; i++) {
		outcome.error = kv_node_change(daemon, node, changer_of(req, fi), &outcome.version);
		if (outcome.error < 0)
			break;
		outcome.error = kv_version_write(outcome.version, data, size, outcome.from);
		kv_node_changed(daemon, node, &outcome);
		kv_version_unref(outcome.version);
	}
	if (outcome.error < 0) {
		kv_reply_error(req, outcome.error == -ESTALE ? EIO : outcome.error);
		return;
	}
	/* Pages of a mapping are not written by a caller. */
	if (fi->writepage)
		node->cached = true;
	else
		kv_drop_set_id(req, node);
	kv_stat_add(&daemon->stats.fuse_write, 1);
	kv_stat_add(&daemon->stats.fuse_write_bytes, size);
	kv_reply_check(daemon, fuse_reply_write(req, size));
}

/* Publishes what was written through a writing node; the version to be made durable, or NULL if
 * there is none. */
static int publish_for_sync(
	struct kv_daemon *daemon, struct kv_node *node, struct kv_version **ret_version)
{
	int r;

	KV_LOCKED(kv_node_lock(daemon, node->ino));
	r = node->lost ? node->lost : kv_node_publish(daemon, node);
	*ret_version = NULL;
	if (r == 0 && !node->active && node->version)
		*ret_version = kv_version_ref(node->version);
	return r;
}

static void op_fsync(fuse_req_t req, fuse_ino_t id, int datasync, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_handle *handle = kv_handle_of(fi);
	struct kv_version *version = NULL;
	int r = 0;

	(void)id;
	(void)datasync;
	if (handle->version)
		version = kv_version_ref(handle->version);
	else
		r = publish_for_sync(daemon, handle->node, &version);
	if (version)
		r = kv_version_sync(version);
	kv_version_unref(version);
	/* The names too: who renamed the file and then syncs it wants to find it there. */
	if (r == 0)
		r = kv_index_wait(daemon->index, kv_index_sequence(daemon->index));
	/*
	 * Not behind the notices: the kernel holds the file's lock until it has the answer. Who
	 * removes or replaces that file waits for it with the directory's lock held, and notices of
	 * names wait for that.
	 */
	kv_reply_error(req, r);
}

static void op_fallocate(fuse_req_t req, fuse_ino_t id, int mode, off_t offset, off_t length,
	struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_node *node = kv_handle_of(fi)->node;
	struct kv_version *version;
	int r = kv_node_change(daemon, node, fuse_req_ctx(req)->pid, &version);

	(void)id;
	/* What fails here leaves nothing out that was promised: the caller may write all the same.
	 */
	if (r == 0) {
		r = kv_version_allocate(version, mode, (uint64_t)offset, (uint64_t)length);
		kv_version_unref(version);
	}
	if (r == 0)
		kv_drop_set_id(req, node);
	kv_reply_error(req, r);
}

static void op_lseek(
	fuse_req_t req, fuse_ino_t id, off_t offset, int whence, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_version *version = version_to_read(daemon, kv_handle_of(fi));
	uint64_t found;
	int r = -ENXIO;

	(void)id;
	if (version) {
		r = kv_version_seek(version, (uint64_t)offset, whence, &found);
		kv_version_unref(version);
	}
	if (r < 0)
		kv_reply_error(req, r);
	else
		kv_reply_check(daemon, fuse_reply_lseek(req, (off_t)found));
}

/*
 * Within one file ranges must not overlap. The kernel sees to that for one inode, and the version
 * that is read and the one that is written are two to it.
 */
static bool overlaps_itself(const struct kv_clone *clone, uint64_t source_size)
{
	uint64_t length = clone->from_offset < source_size
				  ? kv_min_u64(clone->length, source_size - clone->from_offset)
				  : 0;

	return clone->to_offset + length > clone->from_offset &&
	       clone->to_offset < clone->from_offset + length;
}

/* Shares extents where it can. Sources that are not published: the kernel copies (EOPNOTSUPP). */
static void op_copy_file_range(fuse_req_t req, fuse_ino_t from_id, off_t from_offset,
	struct fuse_file_info *from_fi, fuse_ino_t to_id, off_t to_offset,
	struct fuse_file_info *to_fi, size_t length, int flags)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_clone clone = {
		.from = kv_handle_of(from_fi)->version,
		.from_offset = (uint64_t)from_offset,
		.to_offset = (uint64_t)to_offset,
		.length = length,
	};
	struct kv_node_outcome outcome = {.from = (uint64_t)to_offset};
	struct kv_node *node = kv_handle_of(to_fi)->node;
	struct kv_version_attr source;
	uint64_t copied;

	(void)from_id;
	(void)to_id;
	(void)flags;
	if (!clone.from) {
		kv_reply_error(req, EOPNOTSUPP);
		return;
	}
	kv_version_attr(clone.from, &source);
	if (kv_handle_of(from_fi)->node->ino == node->ino && overlaps_itself(&clone, source.size)) {
		kv_reply_error(req, EINVAL);
		return;
	}
	outcome.error = kv_node_change(daemon, node, fuse_req_ctx(req)->pid, &outcome.version);
	if (outcome.error == 0) {
		/* Behind the source's end there is nothing to be missed. */
		if (clone.from_offset < source.size)
			outcome.to =
				outcome.from + kv_min_u64(length, source.size - clone.from_offset);
		outcome.error = kv_version_clone(outcome.version, &clone, &copied);
		kv_node_changed(daemon, node, &outcome);
		kv_version_unref(outcome.version);
	}
	if (outcome.error < 0) {
		kv_reply_error(req, outcome.error);
		return;
	}
	kv_drop_set_id(req, node);
	kv_reply_check(daemon, fuse_reply_write(req, copied));
}

void kv_ops_file(struct fuse_lowlevel_ops *ops)
{
	ops->read = op_read;
	ops->write = op_write;
	ops->fsync = op_fsync;
	ops->fallocate = op_fallocate;
	ops->lseek = op_lseek;
	ops->copy_file_range = op_copy_file_range;
}
