/* SPDX-License-Identifier: Apache-2.0 */
/* Replies and what they carry: see reply.h. */

#include "fs/reply.h"

#include <errno.h>
#include <signal.h>
#include <sys/stat.h>

#include "fs/log.h"

void kv_reply_check(struct kv_daemon *daemon, int result)
{
	if (result >= 0 || result == -ENOENT)
		return;
	kv_log_error("fuse", "no reply can be sent, ending the mount error=%s", strerror(-result));
	fuse_session_exit(daemon->session);
	/* The thread that waits for the end of the loop looks when a signal comes. */
	(void)pthread_kill(daemon->main_thread, SIGTERM);
}

void kv_reply_error(fuse_req_t req, int error)
{
	struct kv_daemon *daemon = kv_daemon_of(req);

	kv_reply_check(daemon, fuse_reply_err(req, error < 0 ? -error : error));
}

static struct timespec to_timespec(int64_t ns)
{
	struct timespec ts = {
		.tv_sec = ns / 1000000000,
		.tv_nsec = ns % 1000000000,
	};

	if (ts.tv_nsec < 0) {
		ts.tv_sec--;
		ts.tv_nsec += 1000000000;
	}
	return ts;
}

/*
 * The content's part of the attributes. A version that is not committed, or is not the committed
 * one, knows better than the index, which describes the committed one.
 */
static void overlay_version(struct kv_inode *inode, struct kv_version *version)
{
	struct kv_version_attr attr;

	kv_version_attr(version, &attr);
	inode->size = attr.size;
	if (attr.committed && attr.number == inode->version) {
		/* What its writer has allocated for the time to come. */
		inode->blocks += attr.unwritten;
		return;
	}
	inode->blocks = attr.blocks;
	inode->mtime_ns = attr.mtime_ns;
	if (attr.ctime_ns > inode->ctime_ns)
		inode->ctime_ns = attr.ctime_ns;
}

static void fill_stat(const struct kv_inode *inode, struct stat *ret_stat)
{
	*ret_stat = (struct stat){
		.st_ino = inode->ino,
		.st_mode = inode->mode,
		.st_nlink = inode->nlink,
		.st_uid = inode->uid,
		.st_gid = inode->gid,
		.st_size = (off_t)inode->size,
		.st_blksize = KV_BLOCK_SIZE,
		.st_blocks = (blkcnt_t)(inode->blocks * (KV_BLOCK_SIZE / 512)),
		.st_atim = to_timespec(inode->atime_ns),
		.st_mtim = to_timespec(inode->mtime_ns),
		.st_ctim = to_timespec(inode->ctime_ns),
	};
}

static int stat_node(struct kv_daemon *daemon, struct kv_node *node, const struct kv_seen *seen,
	struct stat *ret_stat)
{
	struct kv_version *version = NULL;
	struct kv_inode inode;
	int r = kv_core_look(daemon->core, node->ino, seen, &inode);

	if (r < 0)
		return r;
	if (node->file) {
		KV_LOCKED(kv_node_lock(daemon, node->ino));

		version = node->version ? kv_version_ref(node->version) : NULL;
	}
	if (node->file && !version)
		(void)kv_file_current(node->file, &version);
	if (version) {
		overlay_version(&inode, version);
		kv_version_unref(version);
	}
	fill_stat(&inode, ret_stat);
	return 0;
}

int kv_node_stat(struct kv_daemon *daemon, struct kv_node *node, struct stat *ret_stat)
{
	return stat_node(daemon, node, NULL, ret_stat);
}

int kv_entry_fill(struct kv_daemon *daemon, struct kv_node *node, const struct kv_seen *seen,
	bool cacheable, struct fuse_entry_param *ret_entry)
{
	struct fuse_entry_param entry = {
		.ino = node->id,
		.generation = 1,
		.attr_timeout = cacheable ? KV_TIMEOUT_LONG : KV_TIMEOUT_CALL,
		.entry_timeout = cacheable ? KV_TIMEOUT_LONG : 0,
	};
	int r = stat_node(daemon, node, seen, &entry.attr);

	if (r < 0)
		return r;
	*ret_entry = entry;
	return 0;
}

void kv_reply_entry(
	fuse_req_t req, struct kv_node *node, const struct kv_seen *seen, bool cacheable)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct fuse_entry_param entry;
	int r = kv_entry_fill(daemon, node, seen, cacheable, &entry);

	if (r < 0) {
		kv_node_forget(daemon, node, 1);
		kv_reply_error(req, r);
		return;
	}
	r = fuse_reply_entry(req, &entry);
	if (r == -ENOENT)
		kv_node_forget(daemon, node, 1);
	kv_reply_check(daemon, r);
}

void kv_reply_attr(fuse_req_t req, struct kv_node *node)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	double timeout = node->kind == KV_NODE_WRITING ? 0 : KV_TIMEOUT_LONG;
	struct stat attr;
	int r = kv_node_stat(daemon, node, &attr);

	if (r == 0 && attr.st_nlink != 1 && node->kind == KV_NODE_PUBLISHED)
		timeout = 0;
	if (r < 0)
		kv_reply_error(req, r);
	else
		kv_reply_check(daemon, fuse_reply_attr(req, &attr, timeout));
}
