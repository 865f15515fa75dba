/* SPDX-License-Identifier: Apache-2.0 */
/* Attributes: getattr, setattr, statfs and extended attributes. */

#include <errno.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "fs/attributes.h"
#include "fs/control.h"
#include "fs/keep.h"
#include "fs/node.h"
#include "fs/notify.h"
#include "fs/ops.h"
#include "fs/reply.h"
#include "fs/request.h"
#include "fs/retry.h"
#include "index/space.h"

#define XATTR_VALUE_MAX (64u << 10)

static void op_getattr(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);

	(void)fi;
	kv_stat_add(&daemon->stats.fuse_getattr, 1);
	kv_reply_attr(req, kv_node_find(daemon, id));
}

/* ---- setattr ---- */

/*
 * A new size. By path, on a node that is not the caller's, it is sent to one of its own (ESTALE);
 * on a writing node it changes the version, and is published at once when no handle will do that
 * later.
 */
static int set_size(fuse_req_t req, struct kv_node *node, uint64_t size, bool by_handle)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	pid_t pid = fuse_req_ctx(req)->pid;
	int r;

	if (node->kind == KV_NODE_DIRECTORY)
		return -EISDIR;
	if (node->kind == KV_NODE_SYMLINK)
		return -EINVAL;
	if (node->kind == KV_NODE_PUBLISHED || (!by_handle && !kv_node_is_own(node, pid)))
		return kv_node_prepare_writer(daemon, node, pid);
	(void)kv_retry_take(daemon->retries, pid, kv_core_now_ns(daemon->core));
	{
		KV_LOCKED(kv_node_lock(daemon, node->ino));

		/* The kernel takes the size from nothing else before it has our answer. */
		if (!by_handle)
			node->cached = true;
		r = kv_node_set_size(daemon, node, pid, size);
	}
	return r == -EREMCHG ? kv_node_prepare_writer(daemon, node, pid) : r;
}

static int64_t to_ns(struct timespec ts)
{
	return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

/* What the index shall change; owner changes and sizes take the set-ID bits along, as Linux does.
 */
static int change_of(fuse_req_t req, struct kv_node *node, const struct stat *attr, int to_set,
	struct kv_change *ret_change)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	int64_t now = kv_core_now_ns(daemon->core);
	struct kv_change change = {.ctime_ns = now, .mask = KV_CHANGE_CTIME};
	bool owner = to_set & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID);
	bool kill = owner || ((to_set & FUSE_SET_ATTR_SIZE) && fuse_req_ctx(req)->uid != 0);

	if (to_set & FUSE_SET_ATTR_MODE) {
		change.mask |= KV_CHANGE_MODE;
		change.mode = attr->st_mode & 07777;
	} else if (kill && node->file) {
		struct kv_inode inode;
		int r = kv_index_get(daemon->index, node->ino, &inode);

		if (r < 0)
			return r;
		change.mask |= KV_CHANGE_MODE;
		change.mode = kv_without_set_id(inode.mode);
	}
	if (to_set & FUSE_SET_ATTR_UID)
		change.mask |= KV_CHANGE_UID;
	if (to_set & FUSE_SET_ATTR_GID)
		change.mask |= KV_CHANGE_GID;
	change.uid = attr->st_uid;
	change.gid = attr->st_gid;
	if (to_set & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_ATIME_NOW))
		change.mask |= KV_CHANGE_ATIME;
	if (to_set & (FUSE_SET_ATTR_MTIME | FUSE_SET_ATTR_MTIME_NOW))
		change.mask |= KV_CHANGE_MTIME;
	change.atime_ns = to_set & FUSE_SET_ATTR_ATIME_NOW ? now : to_ns(attr->st_atim);
	change.mtime_ns = to_set & FUSE_SET_ATTR_MTIME_NOW ? now : to_ns(attr->st_mtim);
	*ret_change = change;
	return 0;
}

/*
 * Times of content that is not committed belong to its version, which brings them to the index
 * when it is; until then the committed content keeps its own.
 */
static void change_version_times(
	struct kv_daemon *daemon, struct kv_node *node, struct kv_change *change)
{
	int64_t mtime = change->mask & KV_CHANGE_MTIME ? change->mtime_ns : INT64_MIN;
	struct kv_version_attr attr;

	KV_LOCKED(kv_node_lock(daemon, node->ino));
	if (!node->version)
		return;
	kv_version_attr(node->version, &attr);
	if (attr.committed)
		return;
	kv_version_set_times(node->version, mtime, change->ctime_ns);
	if (!attr.published)
		change->mask &= ~KV_CHANGE_MTIME;
}

static int set_attributes(fuse_req_t req, struct kv_node *node, const struct stat *attr, int to_set)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_change change;
	struct kv_inode inode;
	int r = change_of(req, node, attr, to_set, &change);

	if (r < 0)
		return r;
	if (node->file)
		change_version_times(daemon, node, &change);
	r = kv_index_change(daemon->index, node->ino, &change, &inode);
	if (r < 0 || !node->file)
		return r;
	/* A touch: engines tell evictors so what they use. */
	if (change.mask & KV_CHANGE_ATIME)
		kv_file_used_at(node->file, change.atime_ns);
	kv_node_attributes_changed(daemon, node);
	return 0;
}

static void op_setattr(
	fuse_req_t req, fuse_ino_t id, struct stat *attr, int to_set, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_node *node = kv_node_find(daemon, id);
	int r = 0;

	if (to_set & FUSE_SET_ATTR_SIZE)
		r = set_size(req, node, (uint64_t)attr->st_size, fi != NULL);
	if (r == 0)
		r = set_attributes(req, node, attr, to_set);
	if (r < 0)
		kv_reply_error(req, r);
	else
		kv_reply_attr(req, node);
}

/* ---- statfs ---- */

/* Below a directory with a quota that is what there is, as XFS shows it for projects. */
static void apply_quota(struct kv_daemon *daemon, fuse_ino_t id, struct statvfs *vfs)
{
	struct kv_domain_info quota;
	struct kv_inode inode;
	uint64_t taken;

	if (kv_index_get(daemon->index, kv_node_find(daemon, id)->ino, &inode) < 0 ||
		inode.domain == 0 || kv_index_domain(daemon->index, inode.domain, &quota) < 0 ||
		quota.limit >= vfs->f_blocks)
		return;
	taken = quota.used + quota.promised;
	vfs->f_blocks = quota.limit;
	vfs->f_bfree = kv_min_u64(vfs->f_bfree, quota.limit > taken ? quota.limit - taken : 0);
	vfs->f_bavail = vfs->f_bfree;
}

static void op_statfs(fuse_req_t req, fuse_ino_t id)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_index_usage index;
	struct kv_space_usage space;
	struct statvfs vfs = {
		.f_bsize = KV_BLOCK_SIZE,
		.f_frsize = KV_BLOCK_SIZE,
		.f_namemax = KV_NAME_MAX,
	};
	uint64_t taken;

	kv_space_usage(kv_index_space(daemon->index), &space);
	kv_index_usage(daemon->index, &index);
	taken = space.used + space.busy + space.reserved;
	vfs.f_blocks = space.total;
	vfs.f_bfree = space.total > taken ? space.total - taken : 0;
	vfs.f_bavail = vfs.f_bfree;
	apply_quota(daemon, id, &vfs);
	/* The index has no limit of its own that a user could meet first. */
	vfs.f_ffree = UINT64_C(1) << 40;
	vfs.f_favail = vfs.f_ffree;
	vfs.f_files = vfs.f_ffree + index.inodes;
	kv_reply_check(daemon, fuse_reply_statfs(req, &vfs));
}

/* ---- Extended attributes ---- */

static bool is_control(const char *name)
{
	return strncmp(name, KV_CONTROL_PREFIX, strlen(KV_CONTROL_PREFIX)) == 0 &&
	       strcmp(name, KV_FINGERPRINT_NAME) != 0;
}

/* "system." names are the kernel's own (ACLs), which this mount does not offer. */
static bool is_unsupported(const char *name)
{
	return strncmp(name, "system.", strlen("system.")) == 0;
}

static int set_xattr(struct kv_daemon *daemon, fuse_ino_t id, const char *name, const char *value,
	size_t size, int flags)
{
	kv_request_counts();
	return kv_index_xattr_set(daemon->index, kv_node_find(daemon, id)->ino, name, value, size,
		flags, kv_core_now_ns(daemon->core));
}

static void op_setxattr(
	fuse_req_t req, fuse_ino_t id, const char *name, const char *value, size_t size, int flags)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	int r;

	if (kv_keep_has(name)) {
		kv_keep_set(req, kv_node_find(daemon, id), name, value, size);
		return;
	}
	if (is_unsupported(name))
		r = -EOPNOTSUPP;
	else if (is_control(name))
		r = -EPERM;
	else
		r = kv_request_was_done(daemon) ? 0
						: set_xattr(daemon, id, name, value, size, flags);
	kv_reply_error(req, r);
}

/* Answers a request for an attribute or a list: its LENGTH when SIZE is 0, else the bytes. */
static void reply_xattr(fuse_req_t req, const char *value, ssize_t length, size_t size)
{
	struct kv_daemon *daemon = kv_daemon_of(req);

	if (length < 0)
		kv_reply_error(req, (int)length);
	else if (size == 0)
		kv_reply_check(daemon, fuse_reply_xattr(req, (size_t)length));
	else if ((size_t)length > size)
		kv_reply_error(req, ERANGE);
	else
		kv_reply_check(daemon, fuse_reply_buf(req, value, (size_t)length));
}

static void op_getxattr(fuse_req_t req, fuse_ino_t id, const char *name, size_t size)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	uint64_t ino = kv_node_find(daemon, id)->ino;
	_cleanup_free_ char *value = NULL;
	ssize_t n;

	if (is_unsupported(name)) {
		kv_reply_error(req, EOPNOTSUPP);
		return;
	}
	if (is_control(name) && !kv_keep_may_see(req, name)) {
		kv_reply_error(req, EACCES);
		return;
	}
	if (is_control(name)) {
		n = kv_keep_has(name) ? kv_keep_get(daemon, ino, name, &value)
				      : kv_control_get(daemon, ino, name, &value);
		reply_xattr(req, value, n, size);
		return;
	}
	value = malloc(kv_min_u64(size, XATTR_VALUE_MAX) + 1);
	n = value ? kv_index_xattr_get(
			    daemon->index, ino, name, value, kv_min_u64(size, XATTR_VALUE_MAX))
		  : -ENOMEM;
	reply_xattr(req, value, n, size);
}

/* The stored names and, for those who show them, behind them the virtual ones, if the kernel's
 * limit lets them. */
static ssize_t list_names(fuse_req_t req, uint64_t ino, char *ret_names, size_t size)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	ssize_t stored = kv_index_xattr_list(daemon->index, ino, ret_names, size);
	ssize_t more;

	if (stored < 0 || !kv_attribute_is_viewer(fuse_req_ctx(req)->pid))
		return stored;
	more = kv_attribute_names(
		daemon, ino, ret_names + stored, size > 0 ? size - (size_t)stored : 0);
	if (more < 0 || (size_t)(stored + more) > XATTR_VALUE_MAX)
		return stored;
	return size != 0 && (size_t)(stored + more) > size ? -ERANGE : stored + more;
}

static void op_listxattr(fuse_req_t req, fuse_ino_t id, size_t size)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	_cleanup_free_ char *names = malloc(kv_min_u64(size, XATTR_VALUE_MAX) + 1);
	ssize_t n = -ENOMEM;

	if (names)
		n = list_names(req, kv_node_find(daemon, id)->ino, names,
			kv_min_u64(size, XATTR_VALUE_MAX));
	reply_xattr(req, names, n, size);
}

static int remove_xattr(struct kv_daemon *daemon, fuse_ino_t id, const char *name)
{
	kv_request_counts();
	return kv_index_xattr_remove(
		daemon->index, kv_node_find(daemon, id)->ino, name, kv_core_now_ns(daemon->core));
}

static void op_removexattr(fuse_req_t req, fuse_ino_t id, const char *name)
{
	struct kv_daemon *daemon = kv_daemon_of(req);

	if (is_unsupported(name))
		kv_reply_error(req, EOPNOTSUPP);
	else if (kv_keep_has(name))
		kv_keep_remove(req, kv_node_find(daemon, id), name);
	else if (is_control(name))
		kv_reply_error(req, EPERM);
	else
		kv_reply_error(
			req, kv_request_was_done(daemon) ? 0 : remove_xattr(daemon, id, name));
}

void kv_ops_attr(struct fuse_lowlevel_ops *ops)
{
	ops->getattr = op_getattr;
	ops->setattr = op_setattr;
	ops->statfs = op_statfs;
	ops->setxattr = op_setxattr;
	ops->getxattr = op_getxattr;
	ops->listxattr = op_listxattr;
	ops->removexattr = op_removexattr;
}
