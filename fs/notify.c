/* SPDX-License-Identifier: Apache-2.0 */
/* The notification thread: see notify.h. */

#include "fs/notify.h"

#include <bsd/sys/queue.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "fs/log.h"
#include "fs/reply.h"

#define NS_PER_S INT64_C(1000000000)

enum notice_kind {
	NOTICE_ENTRY,
	NOTICE_ATTRIBUTES,
	NOTICE_PAGES,
	NOTICE_REPLY,
	NOTICE_REPLY_IOCTL,
	NOTICE_EXPIRE,
};

struct notice {
	STAILQ_ENTRY(notice) queue;
	enum notice_kind kind;
	uint64_t nodeid;
	uint64_t ino;   /* NOTICE_EXPIRE */
	int64_t due_ns; /* NOTICE_EXPIRE */
	fuse_req_t req; /* to be answered: NOTICE_REPLY, NOTICE_REPLY_IOCTL */
	int error;
	size_t length;
	char name[]; /* NOTICE_REPLY_IOCTL: the answer */
};

STAILQ_HEAD(notices, notice);

/*
 * Where another daemon may go on: the thread that tells the kernel. A client that holds the lock
 * of a directory, or of a page, and waits for an answer keeps it waiting there; if this process is
 * killed then, the answer is the next daemon's to give, and this thread ends behind that. So it has
 * the connection and no other descriptor: all others are closed when the process is killed, by
 * which the supervisor knows, and the next daemon can lock the store.
 */
struct sender {
	pthread_t thread;
	bool runs;
	pthread_cond_t given;
	pthread_cond_t sent;
	/* Guarded by the notification lock. */
	const struct notice *notice; /* to be sent */
	int result;
	bool stop;
};

struct kv_notify {
	struct kv_daemon *daemon;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t work;
	struct sender sender;
	struct notices queue;    /* guarded by lock */
	struct notices expiring; /* guarded by lock; the oldest is due first */
	bool busy;               /* guarded by lock: one that was queued is being worked off */
	bool stop;               /* guarded by lock */
};

static int64_t now_ns(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_REALTIME, &now);
	return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

/* Waits for locks that clients hold while they wait for answers. */
static int tell_kernel(const struct kv_notify *notify, const struct notice *notice)
{
	struct fuse_session *session = notify->daemon->session;

	if (notice->kind == NOTICE_ENTRY)
		return fuse_lowlevel_notify_inval_entry(
			session, notice->nodeid, notice->name, notice->length);
	return fuse_lowlevel_notify_inval_inode(
		session, notice->nodeid, notice->kind == NOTICE_PAGES ? 0 : -1, 0);
}

/* ---- The sender ---- */

static void keep_only(int fd)
{
	(void)unshare(CLONE_FILES);
	if (fd > 0)
		(void)close_range(0, (unsigned)fd - 1, 0);
	(void)close_range((unsigned)fd + 1, ~0u, 0);
}

static void *sender_main(void *arg)
{
	struct kv_notify *notify = arg;
	struct sender *sender = &notify->sender;

	keep_only(notify->daemon->fuse_fd);
	KV_LOCKED(&notify->lock);
	while (!sender->stop) {
		int r;

		if (!sender->notice) {
			(void)pthread_cond_wait(&sender->given, &notify->lock);
			continue;
		}
		(void)pthread_mutex_unlock(&notify->lock);
		r = tell_kernel(notify, sender->notice);
		(void)pthread_mutex_lock(&notify->lock);
		sender->result = r;
		sender->notice = NULL;
		(void)pthread_cond_signal(&sender->sent);
	}
	return NULL;
}

static int sender_start(struct kv_notify *notify)
{
	struct sender *sender = &notify->sender;
	int r;

	(void)pthread_cond_init(&sender->given, NULL);
	(void)pthread_cond_init(&sender->sent, NULL);
	r = notify->daemon->takeover ? pthread_create(&sender->thread, NULL, sender_main, notify)
				     : 0;
	sender->runs = notify->daemon->takeover && r == 0;
	return -r;
}

static void sender_stop(struct kv_notify *notify)
{
	struct sender *sender = &notify->sender;

	if (sender->runs) {
		(void)pthread_mutex_lock(&notify->lock);
		sender->stop = true;
		(void)pthread_cond_signal(&sender->given);
		(void)pthread_mutex_unlock(&notify->lock);
		(void)pthread_join(sender->thread, NULL);
	}
	(void)pthread_cond_destroy(&sender->given);
	(void)pthread_cond_destroy(&sender->sent);
}

static int have_sent(struct kv_notify *notify, const struct notice *notice)
{
	struct sender *sender = &notify->sender;
	KV_LOCKED(&notify->lock);

	sender->notice = notice;
	(void)pthread_cond_signal(&sender->given);
	while (sender->notice)
		(void)pthread_cond_wait(&sender->sent, &notify->lock);
	return sender->result;
}

/* ---- The thread ---- */

static void send_notice(struct kv_notify *notify, const struct notice *notice)
{
	int r = notify->sender.runs ? have_sent(notify, notice) : tell_kernel(notify, notice);

	/* ENOENT: the kernel knows no such entry; the others come with the end of the mount. */
	if (r < 0 && r != -ENOENT && r != -ENODEV && r != -EBADF && r != -ENOTCONN)
		kv_log_debug("notify", "kernel refused nodeid=%llu error=%s, ignoring",
			(unsigned long long)notice->nodeid, strerror(-r));
}

/* Lock held. The next one to work off, or NULL. */
static struct notice *take_notice(struct kv_notify *notify)
{
	struct notice *notice = STAILQ_FIRST(&notify->queue);

	if (notice) {
		STAILQ_REMOVE_HEAD(&notify->queue, queue);
		notify->busy = true;
		return notice;
	}
	notice = STAILQ_FIRST(&notify->expiring);
	if (!notice || (notice->due_ns > now_ns() && !notify->stop))
		return NULL;
	STAILQ_REMOVE_HEAD(&notify->expiring, queue);
	return notice;
}

/* Lock held. Waits for work, or until the next one is due. */
static void wait_for_notice(struct kv_notify *notify)
{
	const struct notice *next = STAILQ_FIRST(&notify->expiring);
	struct timespec due;

	if (!next) {
		(void)pthread_cond_wait(&notify->work, &notify->lock);
		return;
	}
	due.tv_sec = next->due_ns / NS_PER_S;
	due.tv_nsec = next->due_ns % NS_PER_S;
	(void)pthread_cond_timedwait(&notify->work, &notify->lock, &due);
}

static void do_notice(struct kv_notify *notify, const struct notice *notice)
{
	switch (notice->kind) {
	case NOTICE_REPLY:
		kv_reply_error(notice->req, notice->error);
		break;
	case NOTICE_REPLY_IOCTL:
		kv_reply_check(notify->daemon,
			fuse_reply_ioctl(notice->req, 0, notice->name, notice->length));
		break;
	case NOTICE_EXPIRE:
		kv_node_expire(notify->daemon, notice->ino, notice->nodeid);
		break;
	case NOTICE_ENTRY:
	case NOTICE_ATTRIBUTES:
	case NOTICE_PAGES:
		send_notice(notify, notice);
		break;
	}
}

static void *notify_thread(void *arg)
{
	struct kv_notify *notify = arg;
	struct notice *notice;

	(void)pthread_mutex_lock(&notify->lock);
	for (;;) {
		notice = take_notice(notify);
		if (!notice && notify->stop)
			break;
		if (!notice) {
			wait_for_notice(notify);
			continue;
		}
		(void)pthread_mutex_unlock(&notify->lock);
		do_notice(notify, notice);
		free(notice);
		(void)pthread_mutex_lock(&notify->lock);
		notify->busy = false;
	}
	(void)pthread_mutex_unlock(&notify->lock);
	return NULL;
}

int kv_notify_new(struct kv_daemon *daemon, struct kv_notify **ret_notify)
{
	struct kv_notify *notify = calloc(1, sizeof(*notify));
	int r;

	if (!notify)
		return -ENOMEM;
	notify->daemon = daemon;
	STAILQ_INIT(&notify->queue);
	STAILQ_INIT(&notify->expiring);
	(void)pthread_mutex_init(&notify->lock, NULL);
	(void)pthread_cond_init(&notify->work, NULL);
	r = sender_start(notify);
	if (r == 0)
		r = -pthread_create(&notify->thread, NULL, notify_thread, notify);
	if (r < 0) {
		sender_stop(notify);
		free(notify);
		return r;
	}
	*ret_notify = notify;
	return 0;
}

struct kv_notify *kv_notify_free(struct kv_notify *notify)
{
	if (!notify)
		return NULL;
	(void)pthread_mutex_lock(&notify->lock);
	notify->stop = true;
	(void)pthread_cond_signal(&notify->work);
	(void)pthread_mutex_unlock(&notify->lock);
	(void)pthread_join(notify->thread, NULL);
	sender_stop(notify);
	(void)pthread_cond_destroy(&notify->work);
	(void)pthread_mutex_destroy(&notify->lock);
	free(notify);
	return NULL;
}

static struct notice *notice_new(
	enum notice_kind kind, uint64_t nodeid, const char *name, size_t length)
{
	struct notice *notice = calloc(1, sizeof(*notice) + length + 1);

	if (!notice)
		return NULL;
	notice->kind = kind;
	notice->nodeid = nodeid;
	notice->length = length;
	if (length > 0)
		memcpy(notice->name, name, length);
	return notice;
}

static void enqueue(struct kv_notify *notify, struct notice *notice)
{
	(void)pthread_mutex_lock(&notify->lock);
	STAILQ_INSERT_TAIL(&notify->queue, notice, queue);
	(void)pthread_cond_signal(&notify->work);
	(void)pthread_mutex_unlock(&notify->lock);
}

int kv_notify_entry(struct kv_notify *notify, uint64_t directory, const char *name, size_t length)
{
	struct notice *notice = notice_new(NOTICE_ENTRY, directory, name, length);

	if (!notice)
		return -ENOMEM;
	enqueue(notify, notice);
	return 0;
}

/* Nothing that was queued before this call is still to come. */
static bool is_idle(struct kv_notify *notify)
{
	KV_LOCKED(&notify->lock);

	return STAILQ_EMPTY(&notify->queue) && !notify->busy;
}

void kv_notify_then_reply_ioctl(
	struct kv_notify *notify, fuse_req_t req, const void *answer, size_t size)
{
	struct notice *notice =
		is_idle(notify) ? NULL : notice_new(NOTICE_REPLY_IOCTL, 0, answer, size);

	if (!notice) {
		kv_reply_check(notify->daemon, fuse_reply_ioctl(req, 0, answer, size));
		return;
	}
	notice->req = req;
	enqueue(notify, notice);
}

void kv_notify_then_reply(struct kv_notify *notify, fuse_req_t req, int error)
{
	struct notice *notice = is_idle(notify) ? NULL : notice_new(NOTICE_REPLY, 0, NULL, 0);

	if (!notice) {
		kv_reply_error(req, error);
		return;
	}
	notice->req = req;
	notice->error = error;
	enqueue(notify, notice);
}

int kv_notify_expire(struct kv_notify *notify, uint64_t ino, uint64_t nodeid)
{
	struct notice *notice = notice_new(NOTICE_EXPIRE, nodeid, NULL, 0);

	if (!notice)
		return -ENOMEM;
	notice->ino = ino;
	/* A little later than the node's own reckoning. */
	notice->due_ns = now_ns() + KV_NODE_PENDING_NS + NS_PER_S;
	(void)pthread_mutex_lock(&notify->lock);
	STAILQ_INSERT_TAIL(&notify->expiring, notice, queue);
	(void)pthread_cond_signal(&notify->work);
	(void)pthread_mutex_unlock(&notify->lock);
	return 0;
}

int kv_notify_pages(struct kv_notify *notify, uint64_t nodeid)
{
	struct notice *notice = notice_new(NOTICE_PAGES, nodeid, NULL, 0);

	if (!notice)
		return -ENOMEM;
	enqueue(notify, notice);
	return 0;
}

int kv_notify_attributes(struct kv_notify *notify, uint64_t nodeid)
{
	struct notice *notice = notice_new(NOTICE_ATTRIBUTES, nodeid, NULL, 0);

	if (!notice)
		return -ENOMEM;
	enqueue(notify, notice);
	return 0;
}
