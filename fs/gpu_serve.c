/* SPDX-License-Identifier: Apache-2.0 */
/* What helpers ask, and what they are told: see gpu_protocol.h. All of it on one thread. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>

#include "fs/device.h"
#include "fs/gpu_internal.h"

int kv_ticket_compare(const struct kv_ticket *a, const struct kv_ticket *b)
{
	return memcmp(a->token, b->token, sizeof(a->token));
}
RB_GENERATE(kv_ticket_tree, kv_ticket, entry, kv_ticket_compare)

int kv_watch_compare(const struct kv_watch *a, const struct kv_watch *b)
{
	return a->ino < b->ino ? -1 : a->ino > b->ino;
}
RB_GENERATE(kv_watch_tree, kv_watch, entry, kv_watch_compare)

/* One answer on its way: the reply, what follows it, and descriptors. */
struct answer {
	struct kv_gpu_reply reply;
	uint8_t payload[KV_GPU_PACKET_MAX - sizeof(struct kv_gpu_reply)];
	size_t payload_size;
	int fds[KV_DEVICES_MAX];
	unsigned fd_count;
};

static void answer_done(struct answer *answer)
{
	for (unsigned i = 0; i < answer->fd_count; i++)
		(void)close(answer->fds[i]);
	free(answer);
}

static int send_answer(struct kv_link *link, const struct answer *answer)
{
	struct iovec parts[] = {
		{.iov_base = (void *)&answer->reply, .iov_len = sizeof(answer->reply)},
		{.iov_base = (void *)answer->payload, .iov_len = answer->payload_size},
	};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(KV_DEVICES_MAX * sizeof(int))];
	} control = {0};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};

	if (answer->fd_count > 0) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(answer->fd_count * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(answer->fd_count * sizeof(int));
		memcpy(CMSG_DATA(&control.header), answer->fds, answer->fd_count * sizeof(int));
	}
	/* There was room when the question was read: what has taken it since are notes, unread. */
	return sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* ---- Hello ---- */

/* A descriptor of one's own, which can only read: where the file system refuses O_DIRECT, without.
 */
static int reopen_device(const struct kv_daemon *daemon, const char *path)
{
	int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW;
	int fd = openat(daemon->store->directory_fd, path, flags | O_DIRECT);

	if (fd < 0 && errno == EINVAL)
		fd = openat(daemon->store->directory_fd, path, flags);
	/* The store's list of devices may name a link of the machine's administrator. */
	if (fd < 0 && errno == ELOOP && path[0] == '/')
		fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
	return fd < 0 ? -errno : fd;
}

static int serve_hello(struct kv_gpu *gpu, struct kv_link *link,
	const struct kv_gpu_request *request, struct answer *answer)
{
	struct kv_devices *devices = gpu->daemon->store->devices;
	unsigned count = kv_devices_count(devices);

	memcpy(answer->reply.session, gpu->session, sizeof(gpu->session));
	answer->reply.device = gpu->device;
	for (unsigned i = 0; i < count; i++) {
		struct kv_device_info info;
		int fd;

		kv_devices_info(devices, i, &info);
		fd = reopen_device(gpu->daemon, info.path);
		if (fd < 0)
			return fd;
		answer->fds[answer->fd_count++] = fd;
	}
	answer->reply.count = count;
	link->said_hello = true;
	KV_LOCKED(&gpu->lock);
	link->wants_hot = request->flags & KV_GPU_WANT_HOT;
	return 0;
}

/* ---- Locate ---- */

static struct kv_gpu_hold *hold_find(struct kv_link *link, uint64_t id)
{
	struct kv_gpu_hold *hold;

	LIST_FOREACH (hold, &link->holds, entry)
		if (hold->id == id)
			return hold;
	return NULL;
}

static void hold_free(struct kv_gpu_hold *hold)
{
	kv_version_close(hold->version);
	kv_version_unref(hold->version);
	kv_file_closed(hold->file);
	kv_file_put(hold->file);
	free(hold);
}

/* Sets who, what and which version: of a ticket, or as a trusted helper asks. */
static int find_version(struct kv_gpu *gpu, const struct kv_gpu_request *request,
	struct kv_version **ret_version, struct kv_gpu_reply *reply)
{
	static const uint8_t none[KV_GPU_TOKEN_SIZE];
	struct kv_version_attr attr;
	struct kv_ticket key;
	struct kv_file *file;
	int r;

	reply->ino = request->ino;
	reply->uid = request->uid;
	if (memcmp(request->token, none, sizeof(none)) != 0) {
		memcpy(key.token, request->token, sizeof(key.token));
		KV_LOCKED(&gpu->lock);
		const struct kv_ticket *ticket = RB_FIND(kv_ticket_tree, &gpu->tickets, &key);

		if (!ticket)
			return -ESTALE;
		reply->ino = ticket->ino;
		reply->uid = ticket->uid;
		*ret_version = kv_version_ref(ticket->version);
		return 0;
	}
	file = kv_file_find(gpu->daemon->core, request->ino);
	if (!file)
		return -ESTALE;
	r = kv_file_current(file, ret_version);
	kv_file_put(file);
	if (r < 0)
		return -ESTALE;
	kv_version_attr(*ret_version, &attr);
	if (attr.number == request->number)
		return 0;
	kv_version_unref(*ret_version);
	return -ESTALE;
}

static int add_watch(struct kv_gpu *gpu, struct kv_link *link, uint64_t ino)
{
	struct kv_watch *watch = calloc(1, sizeof(*watch));
	struct kv_watch *found = NULL;
	KV_LOCKED(&gpu->lock);

	if (watch) {
		watch->ino = ino;
		watch->count = 1;
		found = RB_FIND(kv_watch_tree, &link->watches, watch);
	}
	if (found) {
		found->count++;
		free(watch);
		return 0;
	}
	if (!watch || link->watch_count >= KV_GPU_WATCHES_MAX) {
		free(watch);
		return -ENOMEM;
	}
	RB_INSERT(kv_watch_tree, &link->watches, watch);
	link->watch_count++;
	return 0;
}

static void remove_watch(struct kv_gpu *gpu, struct kv_link *link, uint64_t ino)
{
	struct kv_watch key = {.ino = ino};
	KV_LOCKED(&gpu->lock);
	struct kv_watch *watch = RB_FIND(kv_watch_tree, &link->watches, &key);

	if (!watch || --watch->count > 0)
		return;
	RB_REMOVE(kv_watch_tree, &link->watches, watch);
	link->watch_count--;
	free(watch);
}

/* Takes VERSION over. */
static int hold_new(struct kv_gpu *gpu, uint64_t ino, struct kv_version *version,
	struct kv_gpu_hold **ret_hold, bool *ret_hot)
{
	struct kv_gpu_hold *hold = calloc(1, sizeof(*hold));
	enum kv_access access;
	int r = hold ? kv_file_get(gpu->daemon->core, ino, &hold->file) : -ENOMEM;

	if (r == 0) {
		kv_file_opened(hold->file);
		/* As O_DIRECT: what is not in DRAM goes to the device without passing it. */
		r = kv_version_open(version, true, &access);
		if (r < 0) {
			kv_file_closed(hold->file);
			kv_file_put(hold->file);
		}
	}
	if (r < 0) {
		kv_version_unref(version);
		free(hold);
		return r;
	}
	hold->version = version;
	hold->id = ++gpu->last_hold;
	*ret_hot = access == KV_ACCESS_HOT;
	*ret_hold = hold;
	return 0;
}

static int serve_locate(struct kv_gpu *gpu, struct kv_link *link,
	const struct kv_gpu_request *request, struct answer *answer)
{
	struct kv_gpu_reply *reply = &answer->reply;
	struct kv_version *version;
	struct kv_version_attr attr;
	struct kv_gpu_hold *hold;
	bool hot;
	int r = find_version(gpu, request, &version, reply);

	if (r < 0)
		return r;
	/* Before the version is looked at, so that no change falls in between. */
	r = add_watch(gpu, link, reply->ino);
	if (r < 0) {
		kv_version_unref(version);
		return r;
	}
	r = hold_new(gpu, reply->ino, version, &hold, &hot);
	if (r < 0) {
		remove_watch(gpu, link, reply->ino);
		return r;
	}
	LIST_INSERT_HEAD(&link->holds, hold, entry);
	kv_version_attr(version, &attr);
	reply->hold = hold->id;
	reply->number = attr.number;
	reply->size = attr.size;
	/* Without its descriptor the bytes are read like others': the chunks say from where. */
	r = hot ? kv_version_share(version) : -EAGAIN;
	if (r >= 0) {
		answer->fds[answer->fd_count++] = r;
		reply->flags = KV_GPU_RESIDENT;
	}
	return 0;
}

/* ---- Chunks ---- */

static bool put_chunk(void *arg, const struct kv_chunk_info *info)
{
	struct answer *answer = arg;
	bool stored = info->state == KV_CHUNK_COLD || info->state == KV_CHUNK_HOT;
	struct kv_gpu_chunk chunk = {
		.number = info->number,
		.where = info->state == KV_CHUNK_HOLE ? KV_GPU_HOLE
			 : stored                     ? KV_GPU_DEVICE
						      : KV_GPU_FILE,
		.extents = stored ? (uint16_t)info->extent_count : 0,
		.sum = stored ? info->sum : 0,
	};
	size_t size = sizeof(chunk) + chunk.extents * sizeof(struct kv_gpu_extent);
	uint8_t *to = answer->payload + answer->payload_size;

	if (size > sizeof(answer->payload) - answer->payload_size)
		return false;
	memcpy(to, &chunk, sizeof(chunk));
	to += sizeof(chunk);
	for (unsigned i = 0; i < chunk.extents; i++, to += sizeof(struct kv_gpu_extent)) {
		const struct kv_extent *from = &info->extents[i];
		const struct kv_gpu_extent extent = {
			.offset = kv_extent_offset(from),
			.length = from->count << KV_BLOCK_SHIFT,
			.device = from->device,
			.block = from->block,
		};

		memcpy(to, &extent, sizeof(extent));
	}
	answer->payload_size += size;
	answer->reply.count++;
	return true;
}

static int serve_chunks(
	struct kv_link *link, const struct kv_gpu_request *request, struct answer *answer)
{
	struct kv_gpu_hold *hold = hold_find(link, request->hold);

	if (!hold)
		return -ENOENT;
	return kv_version_map(hold->version, request->first, put_chunk, answer);
}

static int serve_drop(struct kv_link *link, const struct kv_gpu_request *request)
{
	struct kv_gpu_hold *hold = hold_find(link, request->hold);

	if (!hold)
		return -ENOENT;
	LIST_REMOVE(hold, entry);
	hold_free(hold);
	return 0;
}

/* ---- One request ---- */

static int serve_request(struct kv_gpu *gpu, struct kv_link *link,
	const struct kv_gpu_request *request, struct answer *answer)
{
	switch (request->type) {
	case KV_GPU_HELLO:
		return serve_hello(gpu, link, request, answer);
	case KV_GPU_LOCATE:
		return serve_locate(gpu, link, request, answer);
	case KV_GPU_CHUNKS:
		return serve_chunks(link, request, answer);
	case KV_GPU_DROP:
		return serve_drop(link, request);
	default:
		remove_watch(gpu, link, request->ino);
		return 0;
	}
}

static int check_request(
	const struct kv_link *link, const struct kv_gpu_request *request, ssize_t size)
{
	if (size != (ssize_t)sizeof(*request) || request->magic != KV_GPU_MAGIC ||
		request->type < KV_GPU_HELLO || request->type >= _KV_GPU_REQUEST_MAX ||
		request->id == 0 || request->zero != 0)
		return -EPROTO;
	return link->said_hello || request->type == KV_GPU_HELLO ? 0 : -EPROTO;
}

int kv_link_serve(struct kv_gpu *gpu, struct kv_link *link)
{
	struct kv_gpu_request request;
	struct answer *answer;
	/* Descriptors that come along are closed by the kernel, for there is no room for them. */
	ssize_t size = recv(link->fd, &request, sizeof(request), MSG_DONTWAIT | MSG_TRUNC);
	int r;

	if (size < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	if (size == 0)
		return -EPIPE;
	r = check_request(link, &request, size);
	if (r < 0)
		return r;
	answer = calloc(1, sizeof(*answer));
	if (!answer)
		return -ENOMEM;
	answer->reply = (struct kv_gpu_reply){
		.magic = KV_GPU_MAGIC,
		.version = KV_GPU_VERSION,
		.type = request.type,
		.id = request.id,
	};
	answer->reply.status = request.version == KV_GPU_VERSION
				       ? serve_request(gpu, link, &request, answer)
				       : -EPROTONOSUPPORT;
	if (answer->reply.status < 0)
		answer->payload_size = answer->reply.count = 0;
	r = send_answer(link, answer);
	answer_done(answer);
	return r;
}

void kv_link_free(struct kv_gpu *gpu, struct kv_link *link)
{
	struct kv_gpu_hold *hold;
	struct kv_watch *watch;

	while ((hold = LIST_FIRST(&link->holds))) {
		LIST_REMOVE(hold, entry);
		hold_free(hold);
	}
	while ((watch = RB_MIN(kv_watch_tree, &link->watches))) {
		RB_REMOVE(kv_watch_tree, &link->watches, watch);
		free(watch);
	}
	(void)close(link->fd);
	free(link);
}
