/* SPDX-License-Identifier: Apache-2.0 */
/* Taking over a connection: see resume.h. */

#include "fs/resume.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/uio.h>

#include "fs/handles.h"
#include "fs/kvfs_ioctl.h"
#include "fs/log.h"
#include "fs/node.h"
#include "fs/passthrough.h"
#include "fs/send.h"
#include "fs/takeover.h"

/* Of the kernel's ABI (include/uapi/linux/fuse.h), which is stable; the system's header may be
 * older than what is used here. */
struct in_header {
	uint32_t length;
	uint32_t opcode;
	uint64_t unique;
	uint64_t nodeid;
	uint32_t uid;
	uint32_t gid;
	uint32_t pid;
	uint32_t padding;
};
_Static_assert(sizeof(struct in_header) == 40, "kernel ABI");

struct out_header {
	uint32_t length;
	int32_t error;
	uint64_t unique;
};
_Static_assert(sizeof(struct out_header) == 16, "kernel ABI");

/* All of these carry the handle first, but for the first few. */
enum opcode {
	OP_FORGET = 2,
	OP_GETATTR = 3,
	OP_SETATTR = 4,
	OP_SYMLINK = 6,
	OP_MKNOD = 8,
	OP_MKDIR = 9,
	OP_UNLINK = 10,
	OP_RMDIR = 11,
	OP_RENAME = 12,
	OP_LINK = 13,
	OP_OPEN = 14,
	OP_READ = 15,
	OP_WRITE = 16,
	OP_RELEASE = 18,
	OP_FSYNC = 20,
	OP_SETXATTR = 21,
	OP_REMOVEXATTR = 24,
	OP_FLUSH = 25,
	OP_INIT = 26,
	OP_GETLK = 31,
	OP_SETLK = 32,
	OP_SETLKW = 33,
	OP_CREATE = 35,
	OP_IOCTL = 39,
	OP_BATCH_FORGET = 42,
	OP_FALLOCATE = 43,
	OP_RENAME2 = 45,
	OP_LSEEK = 46,
	OP_COPY_FILE_RANGE = 47,
};

#define NOTIFY_RESEND 7    /* Linux 6.9 */
#define NOTIFY_INC_EPOCH 8 /* Linux 6.16 */
#define DRAIN_POLL_MS 5u
#define GETATTR_FH 1u
#define SETATTR_FH (1u << 6)

static uint64_t word_at(const struct in_header *request, size_t offset)
{
	uint64_t word = 0;

	if (request->length >= sizeof(*request) + offset + sizeof(word))
		memcpy(&word, (const uint8_t *)(request + 1) + offset, sizeof(word));
	return word;
}

static bool has_handle(uint32_t opcode)
{
	switch (opcode) {
	case OP_READ:
	case OP_FSYNC:
	case OP_IOCTL:
	case OP_FALLOCATE:
	case OP_LSEEK:
	case OP_COPY_FILE_RANGE:
		return true;
	default:
		return false;
	}
}

static bool is_lock(uint32_t opcode)
{
	return opcode == OP_GETLK || opcode == OP_SETLK || opcode == OP_SETLKW;
}

static uint32_t ioctl_command(const struct in_header *request)
{
	return (uint32_t)(word_at(request, sizeof(uint64_t)) >> 32);
}

/* What to answer about a file that is lost to this daemon; 1: nothing, libfuse sees to it. */
static int answer_lost(const struct in_header *request)
{
	uint64_t word = word_at(request, 0);

	switch (request->opcode) {
	case OP_FORGET:
	case OP_BATCH_FORGET:
		return 1;
	case OP_RELEASE:
		return 0;
	case OP_OPEN:
		return -ESTALE;
	case OP_GETATTR:
		return word & GETATTR_FH ? -EIO : -ESTALE;
	case OP_SETATTR:
		return word & SETATTR_FH ? -EIO : -ESTALE;
	default:
		return -EIO;
	}
}

/* What is asked of an old version, which is not the published one any more: not more than its bytes
 * and its attributes. The kernel copies by itself. */
static bool can_keep(uint32_t opcode)
{
	return opcode != OP_IOCTL && opcode != OP_COPY_FILE_RANGE;
}

/* The handle at OFFSET of a request on a node that is being written becomes the one that stands for
 * it. False: there is none. */
static bool replace_handle(struct kv_daemon *daemon, struct in_header *request, size_t offset)
{
	uint64_t number = word_at(request, offset);
	struct kv_handle *handle;

	if (!kv_handles_is_old(daemon, number))
		return true;
	handle = kv_handles_find(daemon, number, request->opcode == OP_RELEASE);
	if (!handle)
		return false;
	number = (uintptr_t)handle;
	memcpy((uint8_t *)(request + 1) + offset, &number, sizeof(number));
	return true;
}

/* The same for an old node that is being written: each of its handles goes on. */
static int answer_writing(struct kv_daemon *daemon, struct in_header *request)
{
	bool ends = request->opcode == OP_RELEASE;

	if (is_lock(request->opcode))
		return kv_handles_is_old(daemon, word_at(request, 0)) ? -ENOLCK : 1;
	if (!has_handle(request->opcode) && request->opcode != OP_WRITE &&
		request->opcode != OP_FLUSH && !ends)
		return 1;
	if (replace_handle(daemon, request, 0))
		return 1;
	return ends ? 0 : -EIO;
}

static bool is_by_handle_of_ours(struct kv_daemon *daemon, const struct in_header *request)
{
	return (has_handle(request->opcode) || is_lock(request->opcode) ||
		       request->opcode == OP_FLUSH || request->opcode == OP_RELEASE) &&
	       !kv_handles_is_old(daemon, word_at(request, 0));
}

static bool opens_for_writing(const struct in_header *request)
{
	uint32_t flags = (uint32_t)word_at(request, 0);

	return (flags & O_ACCMODE) != O_RDONLY || flags & O_TRUNC;
}

/* The VFS repeats an open that gets ESTALE once. It may have had it from the daemon before this
 * one, so it gets it only where there is nothing else to say. */
static bool can_open(
	struct kv_daemon *daemon, const struct in_header *request, const struct kv_node *node)
{
	if (opens_for_writing(request))
		return true;
	return !node->kept &&
	       (node->passed == 0 || kv_takeover_has_backing(daemon->takeover, node->passed));
}

/* The same for an old node that there is: its handles are replaced by the one that we have. */
static int answer_old(struct kv_daemon *daemon, struct in_header *request, struct kv_node *node)
{
	if (node->kind == KV_NODE_WRITING)
		return answer_writing(daemon, request);
	if (node->kind != KV_NODE_PUBLISHED || is_by_handle_of_ours(daemon, request))
		return 1;
	if (request->opcode == OP_OPEN)
		return can_open(daemon, request, node) ? 1 : -ESTALE;
	/* Nothing is kept by these handles that only their end would take away. */
	if (request->opcode == OP_RELEASE || request->opcode == OP_FLUSH ||
		(node->kept && request->opcode == OP_FSYNC))
		return 0;
	if (is_lock(request->opcode))
		return -ENOLCK;
	if (node->kept && !can_keep(request->opcode))
		return request->opcode == OP_COPY_FILE_RANGE ? -EOPNOTSUPP : -ESTALE;
	if (request->opcode == OP_IOCTL && ioctl_command(request) == KVFS_IOC_TICKET)
		return -ESTALE;
	if (has_handle(request->opcode) && request->length >= sizeof(*request) + sizeof(uint64_t)) {
		uint64_t handle = (uintptr_t)kv_node_old_handle(daemon, node);

		if (handle == 0)
			return -EIO;
		memcpy(request + 1, &handle, sizeof(handle));
	}
	return 1;
}

/* True if a node that REQUEST names besides its own is lost. */
static bool other_is_lost(struct kv_daemon *daemon, struct in_header *request)
{
	uint64_t id = request->opcode == OP_LINK              ? word_at(request, 0)
		      : request->opcode == OP_COPY_FILE_RANGE ? word_at(request, 16)
							      : 0;

	if (id == 0 || id == FUSE_ROOT_ID || !kv_takeover_is_old(daemon->takeover, id))
		return false;
	const struct kv_node *node = kv_node_find(daemon, id);
	if (request->opcode != OP_COPY_FILE_RANGE)
		return !node;
	return !node || node->kind != KV_NODE_WRITING || !replace_handle(daemon, request, 24);
}

static int look_at(struct kv_daemon *daemon, struct in_header *request)
{
	uint64_t id = request->nodeid;
	struct kv_node *node;

	if (other_is_lost(daemon, request))
		return request->opcode == OP_LINK ? -ESTALE : -EIO;
	if (id == 0 || id == FUSE_ROOT_ID || !kv_takeover_is_old(daemon->takeover, id))
		return 1;
	node = kv_node_find(daemon, id);
	return node ? answer_old(daemon, request, node) : answer_lost(request);
}

/* ---- A planned end ---- */

/* True if what REQUEST does can be done once only, or begins a version. */
static bool begins_change(const struct in_header *request)
{
	uint32_t flags = (uint32_t)word_at(request, 0);

	switch (request->opcode) {
	case OP_SETATTR: /* by who has it open for writing: goes on with that */
		return !(flags & SETATTR_FH);
	case OP_OPEN:
		return opens_for_writing(request);
	case OP_SYMLINK:
	case OP_MKNOD:
	case OP_MKDIR:
	case OP_UNLINK:
	case OP_RMDIR:
	case OP_RENAME:
	case OP_RENAME2:
	case OP_LINK:
	case OP_SETXATTR:
	case OP_REMOVEXATTR:
	case OP_CREATE:
	case OP_IOCTL:
		return true;
	default:
		return false;
	}
}

/* A change under way, by its number; an older one that never ended is taken for ended. */
static _Atomic uint64_t *change_of(struct kv_daemon *daemon, uint64_t unique)
{
	return &daemon->changes[unique / 2 % KV_CHANGES_MAX];
}

/* Notes that REQUEST is on its way. False: it is for the next daemon. */
static bool admit(struct kv_daemon *daemon, const struct in_header *request)
{
	if (!begins_change(request))
		return true;
	atomic_store(change_of(daemon, request->unique), request->unique);
	/* Pairs with kv_resume_drain: either it sees the change, or we see that it has begun. */
	if (!atomic_load(&daemon->draining))
		return true;
	atomic_store(change_of(daemon, request->unique), 0);
	return false;
}

static void note_reply(struct kv_daemon *daemon, uint64_t unique)
{
	uint64_t expected = unique;

	(void)atomic_compare_exchange_strong(change_of(daemon, unique), &expected, 0);
}

static bool is_quiet(struct kv_daemon *daemon)
{
	for (unsigned i = 0; i < KV_CHANGES_MAX; i++)
		if (atomic_load(&daemon->changes[i]) != 0)
			return false;
	return kv_nodes_writers(daemon->nodes) == 0;
}

int kv_resume_drain(struct kv_daemon *daemon, unsigned wait_ms)
{
	int64_t until = kv_monotonic_ms() + wait_ms;
	int sync, r = 0;

	atomic_store(&daemon->draining, true);
	while (!is_quiet(daemon) && !atomic_load(&daemon->ending)) {
		if (kv_monotonic_ms() > until) {
			r = -EBUSY;
			break;
		}
		(void)usleep(DRAIN_POLL_MS * 1000);
	}
	do
		sync = atomic_load(&daemon->ending) ? -ECANCELED : kv_core_sync(daemon->core);
	while (sync < 0 && sync != -ECANCELED && kv_monotonic_ms() < until);
	if (sync < 0 && sync != -ECANCELED)
		kv_log_error("resume",
			"not everything could be written, what is lacking is lost: %s",
			strerror(-sync));
	return sync == -ECANCELED ? sync : r;
}

/* ---- The connection ---- */

static void reply(int fd, const struct in_header *request, int error)
{
	const struct out_header answer = {
		.length = sizeof(answer),
		.error = error,
		.unique = request->unique,
	};

	/* ENOENT: its process has been killed meanwhile. */
	if (write(fd, &answer, sizeof(answer)) < 0 && errno != ENOENT)
		kv_log_error("resume", "reply refused by the kernel error=%s", strerror(errno));
}

/* The first request is INIT, for the second daemon on it is the one that the first one got. */
static ssize_t read_init(struct kv_daemon *daemon, int fd, void *buffer, size_t size)
{
	size_t length;
	const void *init = kv_takeover_init(daemon->takeover, &length);
	ssize_t n;

	if (kv_takeover_resumes(daemon->takeover)) {
		if (length > size) {
			errno = EINVAL;
			return -1;
		}
		memcpy(buffer, init, length);
		return (ssize_t)length;
	}
	n = read(fd, buffer, size);
	if (n > 0 && (size_t)n <= KV_TAKEOVER_INIT_MAX)
		kv_takeover_set_init(daemon->takeover, buffer, (size_t)n);
	return n;
}

static ssize_t read_request(int fd, void *buffer, size_t size, void *arg)
{
	struct kv_daemon *daemon = arg;
	int cancel;

	if (!daemon->initialised)
		return read_init(daemon, fd, buffer, size);
	for (;;) {
		ssize_t n = read(fd, buffer, size);
		int answer;

		if (n < (ssize_t)sizeof(struct in_header))
			return n;
		/* libfuse ends its threads while they read: not in here. */
		(void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
		answer = kv_takeover_resumes(daemon->takeover) ? look_at(daemon, buffer) : 1;
		if (answer <= 0)
			reply(fd, buffer, answer);
		(void)pthread_setcancelstate(cancel, NULL);
		if (answer > 0 && admit(daemon, buffer))
			return n;
	}
}

static ssize_t write_reply(int fd, struct iovec *iov, int count, void *arg)
{
	struct kv_daemon *daemon = arg;
	const struct out_header *answer = iov[0].iov_base;
	ssize_t n;

	/* The kernel has had its answer to INIT. */
	if (!daemon->initialised && kv_takeover_resumes(daemon->takeover)) {
		n = 0;
		for (int i = 0; i < count; i++)
			n += (ssize_t)iov[i].iov_len;
		return n;
	}
	n = kv_send(fd, iov, count, daemon);
	/* Notices have no number. */
	if (answer->unique != 0)
		note_reply(daemon, answer->unique);
	return n;
}

int kv_resume_attach(struct kv_daemon *daemon, struct fuse_session *session, int fd)
{
	static const struct fuse_custom_io io = {.read = read_request, .writev = write_reply};

	(void)daemon;
	return fuse_session_custom_io(session, &io, sizeof(io), fd);
}

static void close_backing(void *arg, int id)
{
	struct kv_daemon *daemon = arg;

	kv_passthrough_close(fuse_session_fd(daemon->session), id);
}

/* Files that are open keep theirs; all others would keep their DRAM for ever. */
size_t kv_resume_release(struct kv_daemon *daemon, int64_t age_ms)
{
	return kv_takeover_close_backings(daemon->takeover, age_ms, close_backing, daemon);
}

struct resuming {
	struct kv_daemon *daemon;
	uint64_t nodes;
	uint64_t lost;
};

static void resume_one(void *arg, uint64_t id, const struct kv_takeover_record *record)
{
	struct resuming *resuming = arg;

	if (kv_node_resume(resuming->daemon, id, record) == 0) {
		resuming->nodes++;
		return;
	}
	resuming->lost++;
	/* For good: a number that was not committed is given to other content. */
	kv_takeover_set_version(resuming->daemon->takeover, id, UINT64_MAX, 0);
}

int kv_resume_nodes(struct kv_daemon *daemon)
{
	struct resuming resuming = {.daemon = daemon};

	if (!kv_takeover_resumes(daemon->takeover))
		return 0;
	kv_takeover_each(daemon->takeover, resume_one, &resuming);
	kv_handles_resume(daemon);
	kv_log_info("resume", "took over nodes=%llu lost=%llu", (unsigned long long)resuming.nodes,
		(unsigned long long)resuming.lost);
	return 0;
}

static int notify(struct kv_daemon *daemon, int32_t code)
{
	const struct out_header notice = {.length = sizeof(notice), .error = code};

	return write(fuse_session_fd(daemon->session), &notice, sizeof(notice)) < 0 ? -errno : 0;
}

int kv_resume_requests(struct kv_daemon *daemon)
{
	int r = notify(daemon, NOTIFY_INC_EPOCH);

	return r < 0 ? r : notify(daemon, NOTIFY_RESEND);
}
