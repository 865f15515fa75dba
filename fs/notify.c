/* SPDX-License-Identifier: Apache-2.0 */
/* The notification thread: see notify.h. */

#include "fs/notify.h"

#include <bsd/sys/queue.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <time.h>

#include "fs/log.h"
#include "fs/reply.h"
#include "fs/teller.h"

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

struct kv_notify {
	struct kv_daemon *daemon;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t work;
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

/* As the kernel's ABI has it: what libfuse would send, in the two functions below. */
struct message {
	struct fuse_out_header header;
	union {
		struct fuse_notify_inval_inode_out inode;
		struct {
			struct fuse_notify_inval_entry_out entry;
			char name[KV_NAME_MAX + 1];
		};
	};
};
_Static_assert(sizeof(struct message) <= KV_TELLER_MESSAGE_MAX, "fits");

static int offset_to_drop(const struct notice *notice)
{
	/* A negative one: no pages, but the attributes. */
	return notice->kind == NOTICE_PAGES ? 0 : -1;
}

static int send_by_teller(struct kv_teller *teller, const struct notice *notice)
{
	struct message message = {0};

	assert(notice->length <= KV_NAME_MAX);
	if (notice->kind == NOTICE_ENTRY) {
		message.header.error = FUSE_NOTIFY_INVAL_ENTRY;
		message.entry.parent = notice->nodeid;
		message.entry.namelen = (uint32_t)notice->length;
		memcpy(message.name, notice->name, notice->length);
		message.header.len =
			(uint32_t)(offsetof(struct message, name) + notice->length + 1);
	} else {
		message.header.error = FUSE_NOTIFY_INVAL_INODE;
		message.inode.ino = notice->nodeid;
		message.inode.off = offset_to_drop(notice);
		message.header.len = offsetof(struct message, inode) + sizeof(message.inode);
	}
	return kv_teller_tell(teller, &message, message.header.len);
}

static int send_by_libfuse(struct fuse_session *session, const struct notice *notice)
{
	if (notice->kind == NOTICE_ENTRY)
		return fuse_lowlevel_notify_inval_entry(
			session, notice->nodeid, notice->name, notice->length);
	return fuse_lowlevel_notify_inval_inode(session, notice->nodeid, offset_to_drop(notice), 0);
}

static void send_notice(struct kv_notify *notify, const struct notice *notice)
{
	struct kv_daemon *daemon = notify->daemon;
	int r = daemon->teller ? send_by_teller(daemon->teller, notice) : -EPIPE;

	/* That tries more than once. */
	if (r == -EPIPE || r == -ENOMEM)
		r = send_by_libfuse(daemon->session, notice);
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
	r = pthread_create(&notify->thread, NULL, notify_thread, notify);
	if (r != 0) {
		free(notify);
		return -r;
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
