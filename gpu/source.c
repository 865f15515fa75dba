/* SPDX-License-Identifier: Apache-2.0 */
/* Talking to the daemon: see source.h. */
#include "gpu/source.h"

#include <bsd/sys/queue.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "fs/error.h"

#define RETRY_MS 500
#define HELLO_PATIENCE_MS 10000

struct question {
	LIST_ENTRY(question) entry;
	uint64_t id;
	void (*callback)(void *arg, const struct kvg_answer *answer);
	void *arg;
};

/* A request that the socket had no room for. */
struct unsent {
	STAILQ_ENTRY(unsent) entry;
	struct kv_gpu_request request;
};

struct kvg_source {
	struct kvg_source_hooks hooks;
	char *store;
	bool hot;
	int fd; /* -1: not connected */
	bool greeted;
	uint8_t session[16];
	uint64_t device;
	int devices[KV_DEVICES_MAX];
	unsigned device_count;
	uint64_t last_id;
	int64_t retry_ms;
	int error; /* that ended the last connection */
	LIST_HEAD(, question) questions;
	STAILQ_HEAD(, unsent) unsent;
};

/* ---- Questions ---- */

static int try_send(const struct kvg_source *source, const struct kv_gpu_request *request)
{
	if (send(source->fd, request, sizeof(*request), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
		return 0;
	return errno == ENOTCONN || errno == ECONNRESET   ? -EPIPE
	       : errno == EWOULDBLOCK || errno == ENOBUFS ? -EAGAIN
							  : -errno;
}

/*
 * What the socket has no room for waits in a queue: nothing that is said once, as DROP is, may get
 * lost. The queue is as long as what clients may ask for at once, and what is held, make it.
 */
static int ask(struct kvg_source *source, struct kv_gpu_request *request)
{
	struct unsent *unsent;
	int r = -EAGAIN;

	request->magic = KV_GPU_MAGIC;
	request->version = KV_GPU_VERSION;
	request->id = ++source->last_id;
	request->zero = 0;
	if (source->fd < 0)
		return -EPIPE;
	if (STAILQ_EMPTY(&source->unsent))
		r = try_send(source, request);
	if (r != -EAGAIN)
		return r;
	unsent = malloc(sizeof(*unsent));
	if (!unsent)
		return -ENOMEM;
	unsent->request = *request;
	STAILQ_INSERT_TAIL(&source->unsent, unsent, entry);
	return 0;
}

/* What waits, as far as there is room. */
static int send_unsent(struct kvg_source *source)
{
	struct unsent *unsent;

	while ((unsent = STAILQ_FIRST(&source->unsent))) {
		int r = try_send(source, &unsent->request);

		if (r < 0)
			return r == -EAGAIN ? 0 : r;
		STAILQ_REMOVE_HEAD(&source->unsent, entry);
		free(unsent);
	}
	return 0;
}

static void forget_unsent(struct kvg_source *source)
{
	struct unsent *unsent;

	while ((unsent = STAILQ_FIRST(&source->unsent))) {
		STAILQ_REMOVE_HEAD(&source->unsent, entry);
		free(unsent);
	}
}

int kvg_source_ask(struct kvg_source *source, struct kv_gpu_request *request,
	void (*callback)(void *arg, const struct kvg_answer *answer), void *arg)
{
	struct question *question = calloc(1, sizeof(*question));
	int r = question ? ask(source, request) : -ENOMEM;

	if (r < 0) {
		free(question);
		return r;
	}
	question->id = request->id;
	question->callback = callback;
	question->arg = arg;
	LIST_INSERT_HEAD(&source->questions, question, entry);
	return 0;
}

void kvg_source_tell(struct kvg_source *source, struct kv_gpu_request *request)
{
	/*
	 * Said never, it would hold a file, or watch it, for as long as the connection: that is
	 * ended instead, which ends them all. Who waits learns of it at the next round, not here.
	 */
	if (ask(source, request) < 0 && source->fd >= 0)
		(void)shutdown(source->fd, SHUT_RDWR);
}

static void answer_question(struct kvg_source *source, uint64_t id, const struct kvg_answer *answer)
{
	struct question *question;

	LIST_FOREACH (question, &source->questions, entry) {
		if (question->id != id)
			continue;
		LIST_REMOVE(question, entry);
		question->callback(question->arg, answer);
		free(question);
		return;
	}
}

static void lose(struct kvg_source *source)
{
	const struct kvg_answer none = {.error = -EPIPE};
	struct question *question;
	bool greeted = source->greeted;

	if (source->fd >= 0)
		(void)close(source->fd);
	source->fd = -1;
	source->greeted = false;
	forget_unsent(source);
	while ((question = LIST_FIRST(&source->questions)))
		answer_question(source, question->id, &none);
	if (greeted && source->hooks.lost)
		source->hooks.lost(source->hooks.arg);
}

/* ---- Packets ---- */

struct packet {
	struct kv_gpu_reply reply;
	uint8_t payload[KV_GPU_PACKET_MAX];
	size_t payload_size;
	int fds[KV_DEVICES_MAX];
	unsigned fd_count;
};

static void close_fds(struct packet *packet)
{
	for (unsigned i = 0; i < packet->fd_count; i++)
		if (packet->fds[i] >= 0)
			(void)close(packet->fds[i]);
}

static int receive(int fd, struct packet *packet)
{
	struct iovec parts[] = {
		{.iov_base = &packet->reply, .iov_len = sizeof(packet->reply)},
		{.iov_base = packet->payload, .iov_len = sizeof(packet->payload)},
	};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(KV_DEVICES_MAX * sizeof(int))];
	} control;
	struct msghdr message = {
		.msg_iov = parts,
		.msg_iovlen = 2,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	struct cmsghdr *item;

	packet->fd_count = 0;
	if (n < 0)
		return errno == EINTR ? -EAGAIN : -errno;
	for (item = CMSG_FIRSTHDR(&message); item; item = CMSG_NXTHDR(&message, item)) {
		if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS)
			continue;
		packet->fd_count = (unsigned)((item->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(packet->fds, CMSG_DATA(item), packet->fd_count * sizeof(int));
	}
	/* Without descriptors left there is the answer alone: the file's bytes come another way. */
	if ((size_t)n < sizeof(packet->reply) || message.msg_flags & MSG_TRUNC ||
		packet->reply.magic != KV_GPU_MAGIC) {
		close_fds(packet);
		return n == 0 ? -EPIPE : -EPROTO;
	}
	packet->payload_size = (size_t)n - sizeof(packet->reply);
	return 0;
}

/* ---- Connecting ---- */

/* The path may be longer than an address: the store is opened, and the socket reached through it.
 */
static int connect_to(const char *store, int *ret_fd)
{
	_cleanup_fd_ int directory = open(store, O_PATH | O_DIRECTORY | O_CLOEXEC);
	_cleanup_fd_ int fd = -1;
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	if (directory < 0)
		return -errno;
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/%s", directory,
		KV_GPU_SOCKET);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0)
		return -errno;
	*ret_fd = kv_steal_fd(&fd);
	return 0;
}

static int say_hello(struct kvg_source *source)
{
	struct kv_gpu_request request = {
		.type = KV_GPU_HELLO,
		.flags = source->hot ? KV_GPU_WANT_HOT : 0,
	};
	int r = connect_to(source->store, &source->fd);

	if (r == 0)
		r = ask(source, &request);
	if (r < 0)
		lose(source);
	return r;
}

static bool is_same_device(int a, int b)
{
	struct stat one, two;

	return fstat(a, &one) == 0 && fstat(b, &two) == 0 && one.st_dev == two.st_dev &&
	       one.st_ino == two.st_ino && one.st_rdev == two.st_rdev;
}

/* The devices are taken from the first daemon; later ones must have the same. */
static int take_devices(struct kvg_source *source, struct packet *packet)
{
	if (packet->fd_count < packet->reply.count)
		return -EMFILE;
	if (packet->fd_count == 0 || packet->fd_count != packet->reply.count)
		return -EPROTO;
	if (source->device_count == 0) {
		memcpy(source->devices, packet->fds, packet->fd_count * sizeof(int));
		source->device_count = packet->fd_count;
		packet->fd_count = 0;
		return 0;
	}
	if (packet->fd_count != source->device_count)
		return -ESTALE;
	for (unsigned i = 0; i < packet->fd_count; i++)
		if (!is_same_device(packet->fds[i], source->devices[i]))
			return -ESTALE;
	return 0;
}

static int greet(struct kvg_source *source, struct packet *packet)
{
	static const uint8_t none[sizeof(source->session)];
	bool first = memcmp(source->session, none, sizeof(none)) == 0;
	int r = packet->reply.status < 0 ? packet->reply.status : take_devices(source, packet);

	if (r < 0)
		return r;
	memcpy(source->session, packet->reply.session, sizeof(source->session));
	source->device = packet->reply.device;
	source->greeted = true;
	/* Also after a mere break: notes were lost in it. */
	if (source->hooks.connected)
		source->hooks.connected(source->hooks.arg, !first);
	return 0;
}

static int take_packet(struct kvg_source *source, struct packet *packet)
{
	const struct kvg_answer answer = {
		.reply = &packet->reply,
		.error = packet->reply.status,
		.payload = packet->payload,
		.payload_size = packet->payload_size,
		.fds = packet->fds,
		.fd_count = packet->fd_count,
	};

	if (!source->greeted)
		return packet->reply.type == KV_GPU_HELLO ? greet(source, packet) : 0;
	/* Before the hooks are known nothing is watched, and hints may get lost. */
	if (packet->reply.type == KV_GPU_CHANGED && source->hooks.changed)
		source->hooks.changed(source->hooks.arg, packet->reply.ino);
	else if (packet->reply.type == KV_GPU_HOT && source->hooks.hot)
		source->hooks.hot(source->hooks.arg, &packet->reply);
	else if (packet->reply.id != 0)
		answer_question(source, packet->reply.id, &answer);
	return 0;
}

int kvg_source_dispatch(struct kvg_source *source)
{
	struct packet *packet = malloc(sizeof(*packet));
	int r = packet ? 0 : -ENOMEM;

	if (r == 0 && source->fd >= 0)
		r = send_unsent(source);

	while (r == 0 && source->fd >= 0) {
		r = receive(source->fd, packet);
		if (r < 0)
			break;
		r = take_packet(source, packet);
		close_fds(packet);
	}
	free(packet);
	if (r == 0 || r == -EAGAIN || r == -ENOMEM)
		return 0;
	source->error = r;
	lose(source);
	return r == -ESTALE ? r : 0;
}

void kvg_source_tick(struct kvg_source *source, int64_t now_ms)
{
	if (source->fd >= 0 || now_ms < source->retry_ms)
		return;
	source->retry_ms = now_ms + RETRY_MS;
	(void)say_hello(source);
}

/* ---- Life ---- */

static int wait_greeted(struct kvg_source *source)
{
	while (!source->greeted) {
		struct pollfd fd = {.fd = source->fd, .events = POLLIN};
		int n = poll(&fd, 1, HELLO_PATIENCE_MS);

		if (n <= 0)
			return n == 0 ? -ETIMEDOUT : -errno;
		int r = kvg_source_dispatch(source);
		if (r < 0 || source->fd < 0)
			return r < 0 ? r : source->error;
	}
	return 0;
}

static int explain(const struct kv_error *error, const char *store, int r)
{
	switch (r) {
	case -ENOENT:
		return kv_fail(error, r,
			"%.300s is no store, or is not mounted: run `kvfs mount` first", store);
	case -ECONNREFUSED:
		return kv_fail(error, r, "%.300s is not mounted: run `kvfs mount` first", store);
	case -EACCES:
	case -EPERM:
		return kv_fail(error, r,
			"%.300s belongs to another user: run kvgpud as the user who mounts it",
			store);
	case -EPROTONOSUPPORT:
		return kv_fail(error, r, "the daemon of %.300s is of another version: restart both",
			store);
	default:
		return kv_fail(
			error, r, "cannot talk to the daemon of %.300s: %s", store, strerror(-r));
	}
}

int kvg_source_new(const char *store, bool hot, const struct kvg_source_hooks *hooks,
	struct kvg_source **ret_source, char *ret_error, size_t error_size)
{
	const struct kv_error error = {ret_error, error_size};
	struct kvg_source *source = calloc(1, sizeof(*source));
	int r;

	if (!source)
		return kv_fail(&error, -ENOMEM, "out of memory");
	source->fd = -1;
	source->hot = hot;
	source->store = realpath(store, NULL);
	LIST_INIT(&source->questions);
	STAILQ_INIT(&source->unsent);
	r = source->store ? say_hello(source) : -errno;
	if (r == 0)
		r = wait_greeted(source);
	if (r < 0) {
		kvg_source_free(source);
		return explain(&error, store, r);
	}
	source->hooks = *hooks;
	*ret_source = source;
	return 0;
}

struct kvg_source *kvg_source_free(struct kvg_source *source)
{
	struct question *question;

	if (!source)
		return NULL;
	while ((question = LIST_FIRST(&source->questions))) {
		LIST_REMOVE(question, entry);
		free(question);
	}
	forget_unsent(source);
	if (source->fd >= 0)
		(void)close(source->fd);
	for (unsigned i = 0; i < source->device_count; i++)
		(void)close(source->devices[i]);
	free(source->store);
	free(source);
	return NULL;
}

int kvg_source_fd(const struct kvg_source *source)
{
	return source->fd;
}

bool kvg_source_has_unsent(const struct kvg_source *source)
{
	return !STAILQ_EMPTY(&source->unsent);
}

bool kvg_source_is_connected(const struct kvg_source *source)
{
	return source->greeted;
}

uint64_t kvg_source_device(const struct kvg_source *source)
{
	return source->device;
}

const int *kvg_source_devices(const struct kvg_source *source, unsigned *ret_count)
{
	*ret_count = source->device_count;
	return source->devices;
}
