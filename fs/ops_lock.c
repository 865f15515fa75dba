/* SPDX-License-Identifier: Apache-2.0 */
/* Locks: fcntl's byte ranges and flock, across all the nodes of a file. See lock.h. */

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>

#include "fs/handle.h"
#include "fs/lock.h"
#include "fs/ops.h"
#include "fs/parking.h"
#include "fs/reply.h"

/*
 * RELEASE, with which flock's locks end, is sent before close(2) returns but not waited for: a
 * holder that may be closed already is given this long until others are told that it has the lock.
 */
#define CLOSING_MS 100

struct waiting_lock {
	struct kv_parked parked;
	struct kv_lock lock;
};

static struct kv_lock lock_of(const struct fuse_file_info *fi)
{
	const struct kv_handle *handle = kv_handle_of(fi);

	return (struct kv_lock){
		.ino = handle->node->ino,
		.owner = fi->lock_owner,
		.handle = handle,
		.end = KV_LOCK_END_MAX,
		/* Its closes are not announced (noflush). */
		.unsure = handle->version != NULL,
	};
}

static struct kv_lock range_of(const struct fuse_file_info *fi, const struct flock *flock)
{
	struct kv_lock lock = lock_of(fi);

	lock.start = (uint64_t)flock->l_start;
	if (flock->l_len > 0)
		lock.end = lock.start + (uint64_t)flock->l_len - 1;
	lock.exclusive = flock->l_type == F_WRLCK;
	lock.pid = flock->l_pid;
	return lock;
}

static void wake_waiters(struct kv_daemon *daemon, uint64_t ino)
{
	kv_parking_wake(daemon->parking, kv_parking_key(ino, KV_PARKING_LOCK));
}

static int look_at_lock(struct kv_daemon *daemon, struct kv_parked *parked, enum kv_parked_why why)
{
	struct waiting_lock *waiting = (struct waiting_lock *)parked;
	struct kv_lock conflict;
	int r;

	/* The VFS makes it a restart where the signal's handler wants that (SA_RESTART). */
	if (why == KV_PARKED_INTERRUPTED || why == KV_PARKED_ENDING)
		return -EINTR;
	r = kv_lock_take(daemon->locks, &waiting->lock, &conflict);
	/* It may have taken the place of a stronger one. */
	if (r == 0)
		wake_waiters(daemon, waiting->lock.ino);
	return r == -EAGAIN && why != KV_PARKED_LATE ? KV_PARKED_STAYS : r;
}

static void answer_lock(struct kv_daemon *daemon, struct kv_parked *parked, int result)
{
	(void)daemon;
	kv_reply_error(parked->req, result);
	free(parked);
}

static int wait_for_lock(fuse_req_t req, const struct kv_lock *lock, int64_t wait_ms)
{
	struct waiting_lock *waiting = malloc(sizeof(*waiting));

	if (!waiting)
		return -ENOMEM;
	*waiting = (struct waiting_lock){
		.parked =
			{
				.req = req,
				.key = kv_parking_key(lock->ino, KV_PARKING_LOCK),
				.wait_ms = wait_ms,
				.look = look_at_lock,
				.answer = answer_lock,
			},
		.lock = *lock,
	};
	if (kv_parking_add(kv_daemon_of(req)->parking, &waiting->parked) == 0)
		return 0;
	free(waiting);
	return -ENOLCK;
}

static void take(fuse_req_t req, const struct kv_lock *lock, bool wait)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_lock conflict;
	int r = kv_lock_take(daemon->locks, lock, &conflict);

	/* A flock gives up what it had in any case, a range only to what it has now. */
	if (r == 0 || lock->whole)
		wake_waiters(daemon, lock->ino);
	if (r == -EAGAIN && (wait || conflict.unsure)) {
		r = wait_for_lock(req, lock, wait ? -1 : CLOSING_MS);
		if (r == 0)
			return;
	}
	kv_reply_error(req, r);
}

static void give_up(fuse_req_t req, const struct kv_lock *lock)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	bool released;
	int r = kv_lock_give_up(daemon->locks, lock, &released);

	if (r == 0 && released)
		wake_waiters(daemon, lock->ino);
	kv_reply_error(req, r);
}

static void op_getlk(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi, struct flock *flock)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	const struct kv_lock lock = range_of(fi, flock);
	struct kv_lock conflict;

	(void)id;
	if (kv_lock_conflicts(daemon->locks, &lock, &conflict)) {
		flock->l_type = conflict.exclusive ? F_WRLCK : F_RDLCK;
		flock->l_start = (off_t)conflict.start;
		flock->l_len = conflict.end == KV_LOCK_END_MAX
				       ? 0
				       : (off_t)(conflict.end - conflict.start + 1);
		flock->l_pid = conflict.pid;
	} else {
		flock->l_type = F_UNLCK;
	}
	kv_reply_check(daemon, fuse_reply_lock(req, flock));
}

static void op_setlk(
	fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi, struct flock *flock, int sleep)
{
	const struct kv_lock lock = range_of(fi, flock);

	(void)id;
	if (lock.start > lock.end || lock.end > KV_LOCK_END_MAX)
		kv_reply_error(req, EINVAL);
	else if (flock->l_type == F_UNLCK)
		give_up(req, &lock);
	else
		take(req, &lock, sleep != 0);
}

static void op_flock(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi, int operation)
{
	struct kv_lock lock = lock_of(fi);

	(void)id;
	lock.whole = true;
	lock.exclusive = (operation & LOCK_EX) != 0;
	lock.pid = fuse_req_ctx(req)->pid;
	if (operation & LOCK_UN)
		give_up(req, &lock);
	else
		take(req, &lock, !(operation & LOCK_NB));
}

void kv_locks_flushed(
	struct kv_daemon *daemon, struct kv_handle *handle, const struct fuse_file_info *fi)
{
	uint64_t ino = handle->node->ino;

	/* Byte ranges end with any close by their process; the others only perhaps. */
	if (kv_lock_owner_closed(daemon->locks, ino, fi->lock_owner))
		wake_waiters(daemon, ino);
	kv_lock_handle_closing(daemon->locks, ino, handle);
}

void kv_locks_released(struct kv_daemon *daemon, struct kv_handle *handle)
{
	if (kv_lock_handle_closed(daemon->locks, handle->node->ino, handle))
		wake_waiters(daemon, handle->node->ino);
}

void kv_ops_lock(struct fuse_lowlevel_ops *ops)
{
	ops->getlk = op_getlk;
	ops->setlk = op_setlk;
	ops->flock = op_flock;
}
