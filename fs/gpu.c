/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets, notes, and the thread that looks after the helpers: see gpu.h. */

#include "fs/gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "fs/gpu_internal.h"
#include "fs/handle.h"
#include "fs/kvfs_ioctl.h"

/* Without descriptors for more helpers: so long they wait to be accepted. */
#define PAUSE_MS 500

static_assert(sizeof(struct kvfs_ticket) == 48, "public: must not change");
static_assert(sizeof(((struct kvfs_ticket *)NULL)->token) == KV_GPU_TOKEN_SIZE, "one token");

/* ---- Tickets ---- */

static int ticket_new(const struct kv_handle *handle, uid_t uid, struct kv_ticket **ret_ticket)
{
	struct kv_ticket *ticket = calloc(1, sizeof(*ticket));

	if (!ticket)
		return -ENOMEM;
	if (getrandom(ticket->token, sizeof(ticket->token), 0) != (ssize_t)sizeof(ticket->token)) {
		free(ticket);
		return -EAGAIN;
	}
	ticket->version = kv_version_ref(handle->version);
	ticket->ino = handle->node->ino;
	ticket->file = handle->node->file;
	ticket->uid = uid;
	*ret_ticket = ticket;
	return 0;
}

static void ticket_free(struct kv_ticket *ticket)
{
	if (!ticket)
		return;
	kv_version_unref(ticket->version);
	free(ticket);
}

int kv_gpu_look(const struct kv_handle *handle, struct kvfs_ticket *ret_ticket)
{
	struct kv_version_attr attr;

	if (!handle->version)
		return -EBUSY;
	kv_version_attr(handle->version, &attr);
	*ret_ticket = (struct kvfs_ticket){
		.ino = handle->node->ino,
		.version = attr.number,
		.size = attr.size,
	};
	return 0;
}

int kv_gpu_ticket(
	struct kv_gpu *gpu, struct kv_handle *handle, uid_t uid, struct kvfs_ticket *ret_ticket)
{
	struct kv_ticket *made;
	int r = kv_gpu_look(handle, ret_ticket);

	if (r < 0)
		return r;
	if (!gpu)
		return -EOPNOTSUPP;
	r = ticket_new(handle, uid, &made);
	if (r < 0)
		return r;
	{
		KV_LOCKED(&gpu->lock);
		struct kv_ticket *old = handle->ticket;

		/* Who shares the description is given the same one; another user a new one, and the
		 * old one is void: there is one a description. */
		if (!old || old->uid != uid) {
			if (old)
				RB_REMOVE(kv_ticket_tree, &gpu->tickets, old);
			RB_INSERT(kv_ticket_tree, &gpu->tickets, made);
			handle->ticket = made;
			made = old;
		}
		memcpy(ret_ticket->token, handle->ticket->token, sizeof(ret_ticket->token));
	}
	ticket_free(made);
	return 0;
}

void kv_gpu_released(struct kv_gpu *gpu, struct kv_handle *handle)
{
	struct kv_ticket *ticket;

	if (!gpu || !handle->ticket)
		return;
	{
		KV_LOCKED(&gpu->lock);
		ticket = kv_steal_ptr(&handle->ticket);
		RB_REMOVE(kv_ticket_tree, &gpu->tickets, ticket);
	}
	ticket_free(ticket);
}

/* ---- Notes ---- */

/* Lock held. */
static int send_note(struct kv_link *link, const struct kv_gpu_reply *note)
{
	return send(link->fd, note, sizeof(*note), MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

void kv_gpu_changed(struct kv_gpu *gpu, uint64_t ino)
{
	const struct kv_gpu_reply note = {
		.magic = KV_GPU_MAGIC,
		.version = KV_GPU_VERSION,
		.type = KV_GPU_CHANGED,
		.ino = ino,
	};
	const struct kv_watch key = {.ino = ino};

	if (!gpu || atomic_load_explicit(&gpu->link_count, memory_order_relaxed) == 0)
		return;
	KV_LOCKED(&gpu->lock);
	for (unsigned i = 0; i < KV_GPU_LINKS_MAX; i++) {
		struct kv_link *link = gpu->links[i];

		if (!link || link->broken ||
			!RB_FIND(kv_watch_tree, &link->watches, (struct kv_watch *)&key))
			continue;
		/* A lost note would leave old content in use: it must learn that it missed some. */
		if (send_note(link, &note) < 0) {
			link->broken = true;
			(void)shutdown(link->fd, SHUT_RDWR);
		}
	}
}

/* Whether less than a PARTth of the queue is used. */
static bool has_room(const struct kv_link *link, int part)
{
	int queued;

	return ioctl(link->fd, SIOCOUTQ, &queued) == 0 && queued < link->queue_size / part;
}

/* Most of the queue is for notes that must not get lost. */
static bool has_room_for_hints(const struct kv_link *link)
{
	return has_room(link, 4);
}

void kv_gpu_opened(struct kv_gpu *gpu, struct kv_handle *handle, uid_t uid)
{
	struct kv_gpu_reply note = {
		.magic = KV_GPU_MAGIC,
		.version = KV_GPU_VERSION,
		.type = KV_GPU_HOT,
		.ino = handle->node->ino,
		.uid = uid,
	};
	struct kv_version_attr attr;

	if (!gpu || atomic_load_explicit(&gpu->link_count, memory_order_relaxed) == 0)
		return;
	kv_version_attr(handle->version, &attr);
	note.number = attr.number;
	note.size = attr.size;
	KV_LOCKED(&gpu->lock);
	for (unsigned i = 0; i < KV_GPU_LINKS_MAX; i++) {
		struct kv_link *link = gpu->links[i];

		/* It is only a hint: a helper that is busy does without. */
		if (link && !link->broken && link->wants_hot && has_room_for_hints(link))
			(void)send_note(link, &note);
	}
}

/* ---- The thread ---- */

static bool is_trusted(int fd)
{
	struct ucred peer;
	socklen_t size = sizeof(peer);

	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
	       (peer.uid == geteuid() || peer.uid == 0);
}

/* As much as it gets: more than the system's limit is for privileged daemons only. */
static void enlarge_queue(struct kv_link *link)
{
	const int wanted = KV_GPU_QUEUE_SIZE;
	socklen_t size = sizeof(link->queue_size);

	if (setsockopt(link->fd, SOL_SOCKET, SO_SNDBUFFORCE, &wanted, sizeof(wanted)) < 0)
		(void)setsockopt(link->fd, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof(wanted));
	(void)getsockopt(link->fd, SOL_SOCKET, SO_SNDBUF, &link->queue_size, &size);
}

static void say_lack(struct kv_gpu *gpu, int error)
{
	unsigned suppressed;

	if (kv_log_allowed(&gpu->accept_log, &suppressed))
		kv_log_warning("gpu",
			"GPU helpers wait: no descriptors left for them, raise the limit (ulimit "
			"-n) error=\"%s\" suppressed=%u",
			strerror(error), suppressed);
}

/* False: there are no descriptors or no memory for it, and it would be tried again without end. */
static bool accept_link(struct kv_gpu *gpu)
{
	_cleanup_fd_ int fd = accept4(gpu->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct kv_link *link;

	if (fd < 0 && kv_accept_lacks(errno)) {
		say_lack(gpu, errno);
		return false;
	}
	if (fd < 0 || !is_trusted(fd))
		return true;
	link = calloc(1, sizeof(*link));
	if (!link)
		return true;
	RB_INIT(&link->watches);
	LIST_INIT(&link->holds);
	link->fd = fd;
	enlarge_queue(link);
	KV_LOCKED(&gpu->lock);
	for (unsigned i = 0; i < KV_GPU_LINKS_MAX; i++) {
		if (gpu->links[i])
			continue;
		gpu->links[i] = link;
		atomic_fetch_add(&gpu->link_count, 1);
		(void)kv_steal_fd(&fd);
		return true;
	}
	free(link);
	return true;
}

static void end_link(struct kv_gpu *gpu, unsigned index)
{
	struct kv_link *link;

	{
		KV_LOCKED(&gpu->lock);
		link = kv_steal_ptr(&gpu->links[index]);
		atomic_fetch_sub(&gpu->link_count, 1);
	}
	kv_link_free(gpu, link);
}

/*
 * Who asks faster than he reads, for want of a processor, is not read from meanwhile; half of the
 * queue stays for notes.
 */
static short awaited(const struct kv_link *link)
{
	return has_room(link, 2) ? POLLIN : POLLOUT;
}

static void *gpu_main(void *arg)
{
	struct kv_gpu *gpu = arg;
	struct pollfd fds[KV_GPU_LINKS_MAX + 2];
	unsigned indexes[KV_GPU_LINKS_MAX];
	bool accepts = true;

	for (;;) {
		unsigned count = 0;

		fds[0] = (struct pollfd){.fd = gpu->stop_fd, .events = POLLIN};
		fds[1] = (struct pollfd){.fd = accepts ? gpu->listen_fd : -1, .events = POLLIN};
		for (unsigned i = 0; i < KV_GPU_LINKS_MAX; i++) {
			if (!gpu->links[i])
				continue;
			indexes[count] = i;
			fds[2 + count++] = (struct pollfd){
				.fd = gpu->links[i]->fd, .events = awaited(gpu->links[i])};
		}
		if (poll(fds, count + 2, accepts ? -1 : PAUSE_MS) < 0 && errno != EINTR)
			return NULL;
		if (fds[0].revents)
			return NULL;
		for (unsigned i = 0; i < count; i++)
			if (fds[2 + i].revents && kv_link_serve(gpu, gpu->links[indexes[i]]) < 0)
				end_link(gpu, indexes[i]);
		accepts = !fds[1].revents || accept_link(gpu);
	}
}

/* ---- Life ---- */

/* The store's path may be longer than an address: it is reached through its descriptor. */
static int listen_in(int directory_fd, int *ret_fd)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	_cleanup_fd_ int fd = -1;

	(void)snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/%s",
		directory_fd, KV_GPU_SOCKET);
	/* The store is locked, so nobody listens there any more. */
	if (unlinkat(directory_fd, KV_GPU_SOCKET, 0) < 0 && errno != ENOENT)
		return -errno;
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || bind(fd, (const struct sockaddr *)&address, sizeof(address)) < 0 ||
		fchmodat(directory_fd, KV_GPU_SOCKET, 0600, 0) < 0 ||
		listen(fd, (int)KV_GPU_LINKS_MAX) < 0)
		return -errno;
	*ret_fd = kv_steal_fd(&fd);
	return 0;
}

static int gpu_start(struct kv_gpu *gpu)
{
	int r;

	if (getrandom(gpu->session, sizeof(gpu->session), 0) != (ssize_t)sizeof(gpu->session))
		return -EAGAIN;
	gpu->stop_fd = eventfd(0, EFD_CLOEXEC);
	if (gpu->stop_fd < 0)
		return -errno;
	r = listen_in(gpu->daemon->store->directory_fd, &gpu->listen_fd);
	if (r < 0)
		return r;
	return -pthread_create(&gpu->thread, NULL, gpu_main, gpu);
}

static void gpu_destroy(struct kv_gpu *gpu)
{
	if (gpu->listen_fd >= 0)
		(void)close(gpu->listen_fd);
	if (gpu->stop_fd >= 0)
		(void)close(gpu->stop_fd);
	(void)pthread_mutex_destroy(&gpu->lock);
	free(gpu);
}

int kv_gpu_new(struct kv_daemon *daemon, dev_t device, struct kv_gpu **ret_gpu)
{
	struct kv_gpu *gpu = calloc(1, sizeof(*gpu));
	int r;

	if (!gpu)
		return -ENOMEM;
	gpu->daemon = daemon;
	gpu->device = device;
	gpu->listen_fd = gpu->stop_fd = -1;
	RB_INIT(&gpu->tickets);
	(void)pthread_mutex_init(&gpu->lock, NULL);
	r = gpu_start(gpu);
	if (r < 0) {
		kv_log_warning("gpu", "GPU helpers cannot connect to this mount error=\"%s\"",
			strerror(-r));
		gpu_destroy(gpu);
		return r;
	}
	*ret_gpu = gpu;
	return 0;
}

void kv_gpu_stop(struct kv_gpu *gpu)
{
	const uint64_t one = 1;
	struct kv_ticket *ticket;

	if (!gpu)
		return;
	(void)!write(gpu->stop_fd, &one, sizeof(one));
	(void)pthread_join(gpu->thread, NULL);
	for (unsigned i = 0; i < KV_GPU_LINKS_MAX; i++)
		if (gpu->links[i])
			end_link(gpu, i);
	(void)unlinkat(gpu->daemon->store->directory_fd, KV_GPU_SOCKET, 0);
	/* The kernel ends no handle of a mount that was aborted. */
	while ((ticket = RB_MIN(kv_ticket_tree, &gpu->tickets))) {
		RB_REMOVE(kv_ticket_tree, &gpu->tickets, ticket);
		ticket_free(ticket);
	}
}

struct kv_gpu *kv_gpu_free(struct kv_gpu *gpu)
{
	if (gpu)
		gpu_destroy(gpu);
	return NULL;
}
