/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a handle: create, open, flush, release, and with them publishing (P2). */

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "fs/caller.h"
#include "fs/gpu.h"
#include "fs/handles.h"
#include "fs/notify.h"
#include "fs/ops.h"
#include "fs/parking.h"
#include "fs/reply.h"
#include "fs/retry.h"
#include "fs/takeover.h"
#include "fs/users.h"

static bool wants_write(const struct fuse_file_info *fi)
{
	return (fi->flags & O_ACCMODE) != O_RDONLY || (fi->flags & O_TRUNC);
}

/* -EMFILE: the caller has as many as he may. */
static int handle_new(
	fuse_req_t req, struct kv_node *node, bool may_write, struct kv_handle **ret_handle)
{
	struct kv_handle *handle = calloc(1, sizeof(*handle));
	int r;

	if (!handle)
		return -ENOMEM;
	r = kv_user_open(
		kv_daemon_of(req)->users, fuse_req_ctx(req)->uid, may_write, &handle->user);
	if (r < 0) {
		free(handle);
		return r;
	}
	handle->node = node;
	handle->may_write = may_write;
	handle->place = KV_TAKEOVER_NO_HANDLE;
	*ret_handle = handle;
	return 0;
}

/* Undoes handle_new alone. NULL is allowed. */
static void handle_drop(struct kv_handle *handle)
{
	if (handle)
		kv_user_close(handle->user, handle->may_write);
	free(handle);
}

/* Undoes an open: the counts, the pin, the memory. Publishes if it was the last handle that could
 * write. */
static void handle_free(struct kv_daemon *daemon, struct kv_handle *handle)
{
	struct kv_node *node = handle->node;

	kv_gpu_released(daemon->gpu, handle);
	if (handle->version)
		kv_version_close(handle->version);
	if (handle->may_write)
		kv_node_look_for_writer(daemon, node, handle->flushed);
	{
		KV_LOCKED(kv_node_lock(daemon, node->ino));

		if (handle->may_write && node->write_opens == 1)
			kv_node_last_writer_closed(daemon, node);
		kv_node_closed(daemon, node, handle->may_write);
	}
	kv_version_unref(handle->version);
	if (daemon->takeover)
		kv_takeover_remove_handle(daemon->takeover, handle->place);
	handle_drop(handle);
}

static void reply_open(fuse_req_t req, struct kv_handle *handle, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	int r;

	kv_handles_note(daemon, handle);
	fi->fh = handle->number;
	r = fuse_reply_open(req, fi);
	/* Interrupted: the kernel knows no handle, so no RELEASE will come. */
	if (r == -ENOENT)
		handle_free(daemon, handle);
	kv_reply_check(daemon, r);
}

/* ---- Published nodes ---- */

/*
 * The kernel's mode for one more open of NODE (lock held): as long as others have it open it
 * cannot change.
 */
static enum kv_node_mode choose_mode(
	struct kv_daemon *daemon, struct kv_node *node, enum kv_access access)
{
	if (node->opens > 0)
		return node->mode;
	if (node->inherited && node->passed > 0)
		return KV_NODE_PASSTHROUGH;
	if (!daemon->passthrough)
		return KV_NODE_CACHED;
	if (node->inherited)
		return KV_NODE_DIRECT;
	if (access == KV_ACCESS_HOT && kv_version_backing(node->version) > 0)
		return KV_NODE_PASSTHROUGH;
	return KV_NODE_DIRECT;
}

/* The backing file of one more open of NODE, which is passed through; lock held. */
static int backing_of(struct kv_daemon *daemon, struct kv_node *node)
{
	int id = node->inherited ? node->passed : kv_version_backing(node->version);

	if (daemon->takeover)
		kv_takeover_set_passed(daemon->takeover, node->id, id);
	return id;
}

static void open_published(fuse_req_t req, struct kv_node *node, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_handle *handle = NULL;
	enum kv_access access;
	int r = handle_new(req, node, false, &handle);

	if (r == 0)
		r = kv_version_open(node->version, fi->flags & O_DIRECT, &access);
	if (r < 0) {
		handle_drop(handle);
		kv_reply_error(req, r);
		return;
	}
	handle->version = kv_version_ref(node->version);
	fi->noflush = 1;
	{
		KV_LOCKED(kv_node_lock(daemon, node->ino));

		node->mode = choose_mode(daemon, node, access);
		kv_node_opened(node, false);
		fi->direct_io = node->mode == KV_NODE_DIRECT;
		fi->keep_cache = node->mode == KV_NODE_CACHED;
		if (node->mode == KV_NODE_PASSTHROUGH)
			fi->backing_id = backing_of(daemon, node);
	}
	kv_file_touch(node->file);
	kv_gpu_opened(daemon->gpu, handle, fuse_req_ctx(req)->uid);
	if (fi->backing_id > 0)
		kv_stat_add(&daemon->stats.open_passthrough, 1);
	reply_open(req, handle, fi);
}

/* ---- Writing nodes ---- */

static void direct_open(struct fuse_file_info *fi)
{
	fi->direct_io = 1;
	fi->parallel_direct_writes = 1;
}

static void open_for_writing(fuse_req_t req, struct kv_node *node, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_handle *handle = NULL;
	int r = handle_new(req, node, true, &handle);

	if (r == 0) {
		KV_LOCKED(kv_node_lock(daemon, node->ino));

		kv_node_set_user(node, handle->user);
		r = kv_node_writable(daemon, node, fi->flags & O_TRUNC);
		if (r == 0) {
			node->open_pid = (uint32_t)fuse_req_ctx(req)->pid;
			kv_node_opened(node, true);
		}
	}
	if (r < 0) {
		handle_drop(handle);
		kv_reply_error(req,
			r == -EREMCHG ? kv_node_prepare_writer(daemon, node, fuse_req_ctx(req)->pid)
				      : r);
		return;
	}
	if (fi->flags & O_TRUNC)
		kv_drop_set_id(req, node);
	direct_open(fi);
	reply_open(req, handle, fi);
}

/*
 * Counts an open of NODE for reading. False: it was a writing node, and is the published one since
 * the caller looked.
 */
static bool open_writing(struct kv_daemon *daemon, struct kv_node *node)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));

	if (node->kind != KV_NODE_WRITING)
		return false;
	kv_node_opened(node, false);
	return true;
}

/* A handle of the writing node's own process: it sees what it writes. */
static void open_own(fuse_req_t req, struct kv_node *node, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_handle *handle;
	int r = handle_new(req, node, false, &handle);

	if (r < 0) {
		kv_reply_error(req, r);
		return;
	}
	if (!open_writing(daemon, node)) {
		handle_drop(handle);
		open_published(req, node, fi);
		return;
	}
	direct_open(fi);
	reply_open(req, handle, fi);
}

/* A handle on what is published by now, through a writing node: slower, but it is there. */
static void open_published_elsewhere(
	fuse_req_t req, struct kv_node *node, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_handle *handle = NULL;
	enum kv_access access;
	int r = handle_new(req, node, false, &handle);

	if (r == 0)
		r = kv_file_current(node->file, &handle->version);
	if (r == 0) {
		r = kv_version_open(handle->version, true, &access);
		if (r < 0)
			kv_version_unref(handle->version);
	}
	if (r < 0) {
		handle_drop(handle);
		kv_reply_error(req, r);
		return;
	}
	if (!open_writing(daemon, node)) {
		kv_version_close(handle->version);
		kv_version_unref(handle->version);
		handle_drop(handle);
		open_published(req, node, fi);
		return;
	}
	direct_open(fi);
	reply_open(req, handle, fi);
}

static bool has_version(struct kv_daemon *daemon, struct kv_node *node)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));

	return node->version != NULL;
}

/* An OPEN that waits for the first publish of its file (P3). */
struct waiting_open {
	struct kv_parked parked;
	struct kv_node *node; /* known to the kernel as long as the request is not answered */
	struct fuse_file_info fi;
	bool again;  /* it has been sent to LOOKUP once before */
	bool writes; /* it will get a node of its own, made from what is published */
};

/*
 * The file of NODE has been published. The VFS repeats the call with LOOKUP_REVAL, and LOOKUP finds
 * the published node; but it does that once only, and hands a second ESTALE to the user.
 */
static void answer_published(
	fuse_req_t req, struct kv_node *node, struct fuse_file_info *fi, bool again)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	pid_t pid = fuse_req_ctx(req)->pid;

	if (again || pid == 0) {
		open_published_elsewhere(req, node, fi);
		return;
	}
	kv_retry_note(daemon->reader_retries, pid, kv_core_now_ns(daemon->core));
	kv_reply_error(req, ESTALE);
}

/* The VFS repeats the call with LOOKUP_REVAL, and LOOKUP finds the node. */
static void send_to_own_node(struct kv_daemon *daemon, fuse_req_t req, struct kv_node *node)
{
	kv_reply_error(req, kv_node_prepare_writer(daemon, node, fuse_req_ctx(req)->pid));
}

static int look_at_open(struct kv_daemon *daemon, struct kv_parked *parked, enum kv_parked_why why)
{
	struct waiting_open *waiting = (struct waiting_open *)parked;
	int r = kv_node_is_published(daemon, waiting->node->file);

	if (r != -EAGAIN)
		return r;
	/* Only who is being ended is let go: an engine would take the error for the file's. */
	if (why == KV_PARKED_INTERRUPTED && kv_caller_is_dying(fuse_req_ctx(parked->req)->pid))
		return -EINTR;
	/* Who writes can begin with nothing. */
	if (why == KV_PARKED_LATE && waiting->writes)
		return 0;
	return why == KV_PARKED_LATE || why == KV_PARKED_ENDING ? -ENOENT : KV_PARKED_STAYS;
}

static void answer_open(struct kv_daemon *daemon, struct kv_parked *parked, int result)
{
	struct waiting_open *waiting = (struct waiting_open *)parked;

	if (waiting->writes && result == 0)
		send_to_own_node(daemon, parked->req, waiting->node);
	else if (waiting->writes && result == -ENOENT) /* gone: the VFS looks, and may create */
		kv_reply_error(parked->req, ESTALE);
	else if (result == 0)
		answer_published(parked->req, waiting->node, &waiting->fi, waiting->again);
	else
		kv_reply_error(parked->req, result);
	free(waiting);
}

static int wait_for_publish(
	fuse_req_t req, struct kv_node *node, const struct fuse_file_info *fi, bool again)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct waiting_open *waiting = malloc(sizeof(*waiting));
	int r;

	if (!waiting)
		return -ENOMEM;
	*waiting = (struct waiting_open){
		.parked =
			{
				.req = req,
				.key = kv_parking_key(node->ino, KV_PARKING_PUBLISH),
				.wait_ms = daemon->options.read_wait_ms,
				.look = look_at_open,
				.answer = answer_open,
			},
		.node = node,
		.fi = *fi,
		.again = again,
		.writes = wants_write(fi),
	};
	r = kv_parking_add(daemon->parking, &waiting->parked);
	if (r < 0)
		free(waiting);
	return r;
}

/*
 * Reading on a writing node. Its own process sees its own data. Another process gets here while
 * nothing is published, and waits for that (P3).
 */
static void open_unpublished(fuse_req_t req, struct kv_node *node, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	pid_t pid = fuse_req_ctx(req)->pid;
	bool again = kv_retry_take(daemon->reader_retries, pid, kv_core_now_ns(daemon->core));
	int r;

	/* A node that was only prepared has nothing of its own to show. */
	if (has_version(daemon, node) && kv_node_is_own(node, pid)) {
		open_own(req, node, fi);
		return;
	}
	r = kv_node_is_published(daemon, node->file);
	if (r == 0) {
		answer_published(req, node, fi, again);
		return;
	}
	if (r == -EAGAIN)
		r = wait_for_publish(req, node, fi, again);
	if (r < 0)
		kv_reply_error(req, ENOENT);
}

/*
 * Writing on a node that is not the caller's: it gets one of its own. Who also reads, and keeps
 * what is there, waits like a reader while another process writes the file for the first time: to
 * begin with nothing would be of no use to it.
 */
static void open_for_writing_elsewhere(
	fuse_req_t req, struct kv_node *node, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	bool keeps = (fi->flags & O_ACCMODE) == O_RDWR && !(fi->flags & O_TRUNC);
	/* Before a node is made for him that nobody would open. */
	int r = kv_user_may_open(daemon->users, fuse_req_ctx(req)->uid, true);

	if (r < 0) {
		kv_reply_error(req, r);
		return;
	}
	if (keeps && node->kind == KV_NODE_WRITING &&
		kv_node_is_published(daemon, node->file) == -EAGAIN &&
		wait_for_publish(req, node, fi, false) == 0)
		return;
	send_to_own_node(daemon, req, node);
}

static void op_open(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_node *node = kv_node_find(daemon, id);

	struct kv_handle *given = kv_handles_given(daemon);

	kv_stat_add(&daemon->stats.fuse_open, 1);
	if (given) {
		direct_open(fi);
		fi->fh = given->number;
		kv_reply_check(daemon, fuse_reply_open(req, fi));
		return;
	}
	if (wants_write(fi) && !kv_node_is_own(node, fuse_req_ctx(req)->pid)) {
		open_for_writing_elsewhere(req, node, fi);
		return;
	}
	(void)kv_retry_take(daemon->retries, fuse_req_ctx(req)->pid, kv_core_now_ns(daemon->core));
	if (wants_write(fi))
		open_for_writing(req, node, fi);
	else if (node->kind == KV_NODE_PUBLISHED)
		open_published(req, node, fi);
	else
		open_unpublished(req, node, fi);
}

/* ---- Create ---- */

/* Takes back a name whose node could not be made. */
static void unmake(struct kv_daemon *daemon, const struct kv_make *make)
{
	struct kv_inode inode;

	if (kv_index_unlink(daemon->index, make->parent, make->name, make->length, false, 0,
		    make->now_ns, &inode) == 0 &&
		inode.nlink == 0)
		kv_core_orphan(daemon->core, inode.ino);
}

static int create(fuse_req_t req, struct kv_make *make, struct kv_node **ret_node)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_inode inode;
	int r = kv_make_once(daemon, make, &inode);

	if (r < 0)
		return r;
	r = kv_node_create(daemon, inode.ino, fuse_req_ctx(req)->pid, ret_node);
	if (r < 0)
		unmake(daemon, make);
	return r;
}

/* A daemon before this one has made it all, and could not say so any more. */
static bool create_given(fuse_req_t req, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_handle *given = kv_handles_given(daemon);
	struct fuse_entry_param entry;

	if (!given || kv_entry_fill(daemon, given->node, NULL, false, &entry) < 0)
		return false;
	direct_open(fi);
	fi->fh = given->number;
	kv_reply_check(daemon, fuse_reply_create(req, &entry, fi));
	return true;
}

static void op_create(fuse_req_t req, fuse_ino_t parent_id, const char *name, mode_t mode,
	struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_make make = {.name = name, .mode = S_IFREG | (mode & 07777), .hold = true};
	struct kv_handle *handle = NULL;
	struct fuse_entry_param entry;
	struct kv_node *node;
	int r;

	if (create_given(req, fi))
		return;
	r = kv_make_owned(req, kv_node_find(daemon, parent_id), &make);
	kv_stat_add(&daemon->stats.fuse_open, 1);
	/* It came to rewrite a file that has gone meanwhile. */
	(void)kv_retry_take(daemon->retries, fuse_req_ctx(req)->pid, kv_core_now_ns(daemon->core));
	if (r == 0)
		r = handle_new(req, NULL, true, &handle);
	if (r == 0)
		r = create(req, &make, &node);
	if (r < 0) {
		handle_drop(handle);
		kv_reply_error(req, r);
		return;
	}
	handle->node = node;
	r = kv_entry_fill(daemon, node, NULL, false, &entry);
	if (r < 0) {
		handle_drop(handle);
		unmake(daemon, &make);
		kv_node_forget(daemon, node, 1);
		kv_reply_error(req, r);
		return;
	}
	{
		KV_LOCKED(kv_node_lock(daemon, node->ino));

		kv_node_set_user(node, handle->user);
		kv_version_set_user(node->version, handle->user);
		kv_node_opened(node, true);
	}
	kv_handles_note(daemon, handle);
	direct_open(fi);
	fi->fh = handle->number;
	r = fuse_reply_create(req, &entry, fi);
	if (r == -ENOENT) {
		handle_free(daemon, handle);
		kv_node_forget(daemon, node, 1);
	}
	kv_reply_check(daemon, r);
}

/* ---- Flush and release ---- */

/*
 * A close by the process that opened the file publishes what was written. Closes of copies of the
 * descriptor that forked children make (every exec closes them) do not; if the children wrote, the
 * last RELEASE publishes.
 */
static void op_flush(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_handle *handle = kv_handle_of(fi);
	bool news = false;
	int r = 0;

	(void)id;
	handle->flushed = true;
	if (daemon->takeover)
		kv_takeover_handle_flushed(daemon->takeover, handle->place);
	kv_locks_flushed(daemon, handle, fi);
	if (handle->may_write)
		r = kv_node_flush(daemon, handle->node, fuse_req_ctx(req)->pid, &news);
	/* Nobody may find the old version by the kernel's entry once close has returned. */
	if (news)
		kv_notify_then_reply(daemon->notify, req, r);
	else
		kv_reply_error(req, r);
}

static void op_release(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	(void)id;
	kv_locks_released(kv_daemon_of(req), kv_handle_of(fi));
	handle_free(kv_daemon_of(req), kv_handle_of(fi));
	kv_reply_error(req, 0);
}

void kv_ops_open(struct fuse_lowlevel_ops *ops)
{
	ops->open = op_open;
	ops->create = op_create;
	ops->flush = op_flush;
	ops->release = op_release;
}
