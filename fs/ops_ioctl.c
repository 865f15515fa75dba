/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public ioctls of kvfs_ioctl.h. The kernel copies as many bytes in and out as the command's
 * number says (fs/fuse/ioctl.c: only CUSE devices may ask for more), so a command that matches has
 * an argument of the right size; it is checked all the same.
 */

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "fs/gpu.h"
#include "fs/handle.h"
#include "fs/kvfs_ioctl.h"
#include "fs/lookup.h"
#include "fs/notify.h"
#include "fs/ops.h"
#include "fs/reply.h"

static_assert(sizeof(struct kvfs_warm) == 48, "public: must not change");
static_assert(sizeof(struct kvfs_drop) == 1040, "public: must not change");
static_assert(sizeof(struct kvfs_scrub) == 1080, "public: must not change");

static void reply_ioctl(fuse_req_t req, const void *answer, size_t size)
{
	struct kv_daemon *daemon = kv_daemon_of(req);

	kv_reply_check(daemon, fuse_reply_ioctl(req, 0, answer, size));
}

static void ioctl_lookup(fuse_req_t req, uint64_t directory, const void *in)
{
	struct kvfs_lookup answer;
	size_t size;
	int r = kv_lookup_names(kv_daemon_of(req)->core, directory, in, &answer, &size);

	if (r < 0)
		kv_reply_error(req, r);
	else
		reply_ioctl(req, &answer, size);
}

static void ioctl_warm(fuse_req_t req, struct kv_version *version, const void *in)
{
	struct kvfs_warm answer;
	struct kv_warm_result result;
	int r = 0;

	memcpy(&answer, in, sizeof(answer));
	const struct kv_warm range = {
		.offset = answer.offset,
		.length = kv_min_u64(answer.length, KVFS_WARM_BYTES),
		.ask = answer.flags & KVFS_WARM_ASK,
	};
	if (answer.flags & ~KVFS_WARM_ASK || answer.reserved != 0)
		r = -EINVAL;
	else if (!version)
		r = -EBUSY;
	else
		r = kv_version_warm(version, &range, &result);
	if (r < 0) {
		kv_reply_error(req, r);
		return;
	}
	answer.done = result.done;
	answer.resident = result.resident;
	answer.holes = result.holes;
	reply_ioctl(req, &answer, sizeof(answer));
}

/* The file NAME (of SIZE bytes, with its NUL), if the caller may have something done to it. */
static int find_named(fuse_req_t req, uint64_t directory, const char *name, size_t size,
	struct kv_inode *ret_inode)
{
	const struct fuse_ctx *caller = fuse_req_ctx(req);
	int r = kv_index_lookup(
		kv_daemon_of(req)->index, directory, name, strnlen(name, size), ret_inode);

	if (r < 0)
		return r;
	if (S_ISDIR(ret_inode->mode))
		return -EISDIR;
	if (!S_ISREG(ret_inode->mode))
		return -EINVAL;
	return caller->uid == 0 || caller->uid == ret_inode->uid ? 0 : -EPERM;
}

static void ioctl_drop(fuse_req_t req, uint64_t directory, const void *in, bool evict)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kvfs_drop answer;
	struct kv_inode inode;
	uint64_t bytes = 0;
	int r;

	memcpy(&answer, in, sizeof(answer));
	r = answer.flags & ~(evict ? KVFS_DROP_LEASED : 0) || answer.reserved != 0
		    ? -EINVAL
		    : find_named(req, directory, answer.name, sizeof(answer.name), &inode);
	if (r == 0 && evict)
		r = kv_core_evict(daemon->core, inode.ino, answer.flags & KVFS_DROP_LEASED, &bytes);
	else if (r == 0)
		r = kv_core_cool(daemon->core, inode.ino, &bytes);
	if (r < 0) {
		kv_reply_error(req, r);
		return;
	}
	/* The kernel's own copies must not outlive ours. */
	if (!evict)
		kv_node_drop_pages(daemon, inode.ino);
	answer.bytes = bytes;
	/* Nobody may find the name, or the pages, once the call has returned. */
	kv_notify_then_reply_ioctl(daemon->notify, req, &answer, sizeof(answer));
}

static void ioctl_scrub(fuse_req_t req, uint64_t directory, const void *in)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_scrub_result result = {0};
	struct kvfs_scrub answer;
	struct kv_inode inode;
	int r;

	memcpy(&answer, in, sizeof(answer));
	r = answer.flags & ~KVFS_SCRUB_ASK || answer.reserved != 0 ||
			    answer.offset % KV_CHUNK_SIZE != 0
		    ? -EINVAL
		    : find_named(req, directory, answer.name, sizeof(answer.name), &inode);
	if (r == 0 && !(answer.flags & KVFS_SCRUB_ASK))
		r = kv_core_scrub(daemon->core, inode.ino,
			&(struct kv_scrub){answer.offset, KVFS_SCRUB_BYTES}, &result);
	if (r < 0) {
		kv_reply_error(req, r);
		return;
	}
	answer.size = inode.size;
	answer.done = result.done;
	answer.checked = result.checked;
	answer.unreadable = result.unreadable;
	answer.damaged = result.damaged;
	kv_notify_then_reply_ioctl(daemon->notify, req, &answer, sizeof(answer));
}

static void ioctl_ticket(fuse_req_t req, struct kv_handle *handle, const void *in)
{
	struct kvfs_ticket ticket;
	int r = -EINVAL;

	memcpy(&ticket, in, sizeof(ticket));
	if (ticket.flags == KVFS_TICKET_LOOK)
		r = kv_gpu_look(handle, &ticket);
	else if (ticket.flags == 0)
		r = kv_gpu_ticket(kv_daemon_of(req)->gpu, handle, fuse_req_ctx(req)->uid, &ticket);
	if (r < 0)
		kv_reply_error(req, r);
	else
		reply_ioctl(req, &ticket, sizeof(ticket));
}

static const struct {
	unsigned command;
	size_t size;
	bool directory; /* what the descriptor must be of */
} commands[] = {
	{KVFS_IOC_LOOKUP, sizeof(struct kvfs_lookup), true},
	{KVFS_IOC_WARM, sizeof(struct kvfs_warm), false},
	{KVFS_IOC_COOL, sizeof(struct kvfs_drop), true},
	{KVFS_IOC_EVICT, sizeof(struct kvfs_drop), true},
	{KVFS_IOC_SCRUB, sizeof(struct kvfs_scrub), true},
	{KVFS_IOC_TICKET, sizeof(struct kvfs_ticket), false},
};

/* Whether COMMAND is known, and comes with what it needs. */
static int check_command(unsigned command, unsigned flags, size_t in_size, size_t out_size)
{
	bool directory = flags & FUSE_IOCTL_DIR;

	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		if (commands[i].command != command)
			continue;
		if (commands[i].directory != directory)
			return directory ? -EISDIR : -ENOTDIR;
		return in_size == commands[i].size && out_size == commands[i].size ? 0 : -EINVAL;
	}
	return -ENOTTY;
}

static void op_ioctl(fuse_req_t req, fuse_ino_t id, unsigned int command, void *arg,
	struct fuse_file_info *fi, unsigned flags, const void *in, size_t in_size, size_t out_size)
{
	struct kv_node *node = kv_node_find(kv_daemon_of(req), id);
	int r = check_command(command, flags, in_size, out_size);

	(void)arg;
	if (r < 0) {
		kv_reply_error(req, r);
		return;
	}
	switch (command) {
	case KVFS_IOC_LOOKUP:
		ioctl_lookup(req, node->ino, in);
		break;
	case KVFS_IOC_WARM:
		ioctl_warm(req, kv_handle_of(fi)->version, in);
		break;
	case KVFS_IOC_SCRUB:
		ioctl_scrub(req, node->ino, in);
		break;
	case KVFS_IOC_TICKET:
		ioctl_ticket(req, kv_handle_of(fi), in);
		break;
	default:
		ioctl_drop(req, node->ino, in, command == KVFS_IOC_EVICT);
		break;
	}
}

void kv_ops_ioctl(struct fuse_lowlevel_ops *ops)
{
	ops->ioctl = op_ioctl;
}
