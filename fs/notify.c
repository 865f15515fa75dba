/* SPDX-License-Identifier: Apache-2.0 */
/* The notification thread: see notify.h. */

#include "fs/notify.h"

#include <bsd/sys/queue.h>
#include <pthread.h>

#include "fs/log.h"
#include "fs/reply.h"

enum notice_kind {
	NOTICE_ENTRY,
	NOTICE_ATTRIBUTES,
	NOTICE_REPLY,
};

struct notice {
	STAILQ_ENTRY(notice) queue;
	enum notice_kind kind;
	uint64_t nodeid;
	fuse_req_t req; /* to be answered: NOTICE_REPLY */
	int error;
	size_t length;
	char name[];
};

STAILQ_HEAD(notices, notice);

struct kv_notify {
	struct kv_daemon *daemon;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t work;
	struct notices queue; /* guarded by lock */
	bool stop;            /* guarded by lock */
};

static void send_notice(struct kv_notify *notify, const struct notice *notice)
{
	struct fuse_session *session = notify->daemon->session;
	int r;

	if (notice->kind == NOTICE_ENTRY)
		r = fuse_lowlevel_notify_inval_entry(
			session, notice->nodeid, notice->name, notice->length);
	else
		r = fuse_lowlevel_notify_inval_inode(session, notice->nodeid, -1, 0);
	/* ENOENT: the kernel knows no such entry; the others come with the end of the mount. */
	if (r < 0 && r != -ENOENT && r != -ENODEV && r != -EBADF && r != -ENOTCONN)
		kv_log_debug("notify", "kernel refused nodeid=%llu error=%s, ignoring",
			(unsigned long long)notice->nodeid, strerror(-r));
}

static void *notify_thread(void *arg)
{
	struct kv_notify *notify = arg;
	struct notice *notice;

	(void)pthread_mutex_lock(&notify->lock);
	for (;;) {
		notice = STAILQ_FIRST(&notify->queue);
		if (!notice) {
			if (notify->stop)
				break;
			(void)pthread_cond_wait(&notify->work, &notify->lock);
			continue;
		}
		STAILQ_REMOVE_HEAD(&notify->queue, queue);
		(void)pthread_mutex_unlock(&notify->lock);
		if (notice->kind == NOTICE_REPLY)
			kv_reply_error(notice->req, notice->error);
		else
			send_notice(notify, notice);
		free(notice);
		(void)pthread_mutex_lock(&notify->lock);
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

void kv_notify_then_reply(struct kv_notify *notify, fuse_req_t req, int error)
{
	struct notice *notice = notice_new(NOTICE_REPLY, 0, NULL, 0);

	if (!notice) {
		kv_reply_error(req, error);
		return;
	}
	notice->req = req;
	notice->error = error;
	enqueue(notify, notice);
}

int kv_notify_attributes(struct kv_notify *notify, uint64_t nodeid)
{
	struct notice *notice = notice_new(NOTICE_ATTRIBUTES, nodeid, NULL, 0);

	if (!notice)
		return -ENOMEM;
	enqueue(notify, notice);
	return 0;
}
