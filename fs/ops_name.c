/* SPDX-License-Identifier: Apache-2.0 */
/* The namespace: lookup, forget, and everything that makes, moves or removes names. */

#include <errno.h>
#include <linux/fs.h>
#include <sys/stat.h>

#include "fs/node.h"
#include "fs/notify.h"
#include "fs/ops.h"
#include "fs/reply.h"
#include "fs/request.h"
#include "fs/takeover.h"

/* Longest symlink target: the kernel's PATH_MAX without the NUL. */
#define TARGET_MAX 4095u

/*
 * A directory that was removed or retired, but is somebody's current one. The kernel keeps the name
 * that was not found there, and with it the directory, unless it is told to forget it.
 */
static bool is_orphan(struct kv_daemon *daemon, const struct kv_node *node)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));

	return node->orphan;
}

static int find_node(
	fuse_req_t req, const struct kv_seen *seen, struct kv_node **ret_node, bool *ret_cacheable)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	pid_t pid = fuse_req_ctx(req)->pid;
	int r = kv_node_for(daemon, seen, pid, ret_node, ret_cacheable);

	/* Who looks at what it is writing has no need of a lease. */
	if (r < 0 || !(*ret_node)->file || kv_node_is_own(*ret_node, pid))
		return r;
	r = kv_core_lease_found(daemon->core, seen->inode->ino);
	if (r < 0)
		kv_node_forget(daemon, *ret_node, 1);
	return r;
}

/*
 * There is no such name, and the kernel may remember that: names come into being by requests of
 * this mount alone, under the directory's lock, which excludes LOOKUPs in it. For the same reason a
 * name that the daemon itself takes away cannot live on in a LOOKUP that was under way: the
 * notification waits for that lock (Linux fs/fuse/dir.c, fuse_reverse_inval_entry) and then finds
 * its entry.
 */
static void reply_absent(fuse_req_t req, struct kv_node *parent, const char *name)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	const struct fuse_entry_param absent = {.entry_timeout = KV_TIMEOUT_LONG};

	/* Before the reply: behind it the kernel may forget the node. */
	bool orphan = is_orphan(daemon, parent);

	kv_reply_check(daemon, fuse_reply_entry(req, &absent));
	if (orphan)
		(void)kv_notify_entry(daemon->notify, parent->id, name, strlen(name));
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent_id, const char *name)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_node *parent = kv_node_find(daemon, parent_id);
	struct kv_inode inode;
	struct kv_seen seen = {.inode = &inode};
	struct kv_node *node;
	bool cacheable;
	int r;

	kv_stat_add(&daemon->stats.fuse_lookup, 1);
	seen.sequence = kv_index_sequence(daemon->index);
	r = kv_index_lookup(daemon->index, parent->ino, name, strlen(name), &inode);
	if (r == -ENOENT) {
		reply_absent(req, parent, name);
		return;
	}
	if (r == 0)
		r = find_node(req, &seen, &node, &cacheable);
	if (r < 0) {
		/* Without content, or evicted just now, it is as good as absent, but only for now.
		 */
		kv_reply_error(req, r);
		return;
	}
	kv_reply_entry(req, node, &seen, cacheable);
}

static void forget(struct kv_daemon *daemon, fuse_ino_t id, uint64_t lookups)
{
	struct kv_node *node = kv_node_find(daemon, id);

	if (node && node->ino != KV_ROOT_INO)
		kv_node_forget(daemon, node, lookups);
	else if (!node && daemon->takeover) /* lost by a restart */
		kv_takeover_forget(daemon->takeover, id, lookups);
}

static void op_forget(fuse_req_t req, fuse_ino_t id, uint64_t lookups)
{
	forget(kv_daemon_of(req), id, lookups);
	fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
	for (size_t i = 0; i < count; i++)
		forget(kv_daemon_of(req), forgets[i].ino, forgets[i].nlookup);
	fuse_reply_none(req);
}

int kv_make_owned(fuse_req_t req, struct kv_node *parent, struct kv_make *make)
{
	const struct fuse_ctx *caller = fuse_req_ctx(req);
	struct kv_inode directory;
	int r = kv_index_get(kv_daemon_of(req)->index, parent->ino, &directory);

	if (r < 0)
		return r;
	make->parent = parent->ino;
	make->length = strlen(make->name);
	make->now_ns = kv_core_now_ns(kv_daemon_of(req)->core);
	make->uid = caller->uid;
	make->gid = caller->gid;
	if (directory.mode & S_ISGID) {
		make->gid = directory.gid;
		if (S_ISDIR(make->mode))
			make->mode |= S_ISGID;
	}
	return 0;
}

int kv_make_once(struct kv_daemon *daemon, const struct kv_make *make, struct kv_inode *ret_inode)
{
	/* Gone again: then it is made anew. */
	if (kv_request_was_done(daemon) && kv_index_lookup(daemon->index, make->parent, make->name,
						   make->length, ret_inode) == 0)
		return 0;
	kv_request_counts();
	return kv_core_make(daemon->core, make, ret_inode);
}

/* Makes what MAKE says and answers with its entry. */
static void make_and_reply(fuse_req_t req, struct kv_node *parent, struct kv_make *make)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_inode inode;
	const struct kv_seen seen = {&inode, kv_index_sequence(daemon->index)};
	struct kv_node *node;
	bool cacheable;
	int r = kv_make_owned(req, parent, make);

	if (r == 0)
		r = kv_make_once(daemon, make, &inode);
	if (r == 0)
		r = kv_node_for(daemon, &seen, fuse_req_ctx(req)->pid, &node, &cacheable);
	if (r < 0)
		kv_reply_error(req, r);
	else
		kv_reply_entry(req, node, NULL, cacheable);
}

static void op_mknod(
	fuse_req_t req, fuse_ino_t parent_id, const char *name, mode_t mode, dev_t device)
{
	struct kv_make make = {.name = name, .mode = mode};

	(void)device;
	if (!S_ISREG(mode))
		kv_reply_error(req, EPERM);
	else
		make_and_reply(req, kv_node_find(kv_daemon_of(req), parent_id), &make);
}

static void op_mkdir(fuse_req_t req, fuse_ino_t parent_id, const char *name, mode_t mode)
{
	struct kv_make make = {.name = name, .mode = S_IFDIR | (mode & 07777)};

	make_and_reply(req, kv_node_find(kv_daemon_of(req), parent_id), &make);
}

static void op_symlink(fuse_req_t req, const char *target, fuse_ino_t parent_id, const char *name)
{
	struct kv_make make = {.name = name, .mode = S_IFLNK | 0777, .target = target};

	make_and_reply(req, kv_node_find(kv_daemon_of(req), parent_id), &make);
}

static void op_readlink(fuse_req_t req, fuse_ino_t id)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	char target[TARGET_MAX + 1];
	ssize_t n =
		kv_index_readlink(daemon->index, kv_node_find(daemon, id)->ino, target, TARGET_MAX);

	if (n < 0) {
		kv_reply_error(req, (int)n);
		return;
	}
	target[n] = '\0';
	kv_reply_check(daemon, fuse_reply_readlink(req, target));
}

/* What is published of INO becomes durable. */
static int sync_file(struct kv_daemon *daemon, uint64_t ino)
{
	struct kv_version *version;
	struct kv_file *file;
	int r = kv_file_get(daemon->core, ino, &file);

	if (r < 0)
		return r;
	r = kv_file_current(file, &version);
	if (r == 0) {
		r = kv_version_sync(version);
		kv_version_unref(version);
	}
	kv_file_put(file);
	return r;
}

/*
 * A file that has older content in the index takes its newest along to another name. Else a crash
 * might leave there what it was before: an older content than the name ever had, or another's. A
 * file that was never in the index (HELD) gets there with its first content.
 */
static int sync_rewritten(struct kv_daemon *daemon, const struct kv_inode *inode)
{
	int r;

	if (!S_ISREG(inode->mode) || inode->flags & KV_INODE_HELD)
		return 0;
	r = sync_file(daemon, inode->ino);
	return r == -ENOENT ? 0 : r; /* quarantined: it has no content to take along */
}

/* NODE gets another name. */
static int link_once(struct kv_daemon *daemon, const struct kv_node *node,
	const struct kv_node *parent, const char *name, struct kv_inode *ret_inode)
{
	int r = kv_index_get(daemon->index, node->ino, ret_inode);

	if (r < 0 || kv_request_was_done(daemon))
		return r;
	r = sync_rewritten(daemon, ret_inode);
	if (r < 0)
		return r;
	kv_request_counts();
	return kv_index_link(daemon->index, node->ino, parent->ino, name, strlen(name),
		kv_core_now_ns(daemon->core), ret_inode);
}

static void op_link(fuse_req_t req, fuse_ino_t id, fuse_ino_t parent_id, const char *name)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_node *node = kv_node_find(daemon, id);
	struct kv_node *parent = kv_node_find(daemon, parent_id);
	struct kv_inode inode;
	const struct kv_seen seen = {&inode, kv_index_sequence(daemon->index)};
	bool cacheable;
	int r;

	/* Another name can rewrite the file from now on, and only one can be invalidated. */
	if (node->file)
		kv_node_notify_name(daemon, node->ino);
	r = link_once(daemon, node, parent, name, &inode);
	if (r == 0)
		r = kv_node_for(daemon, &seen, fuse_req_ctx(req)->pid, &node, &cacheable);
	if (r < 0)
		kv_reply_error(req, r);
	else
		kv_reply_entry(req, node, NULL, cacheable);
}

static void remove_name(fuse_req_t req, fuse_ino_t parent_id, const char *name, bool directory)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_node *parent = kv_node_find(daemon, parent_id);
	struct kv_inode inode;
	int r;

	if (kv_request_was_done(daemon)) {
		kv_reply_error(req, 0);
		return;
	}
	kv_request_counts();
	r = kv_index_unlink(daemon->index, parent->ino, name, strlen(name), directory, 0,
		kv_core_now_ns(daemon->core), &inode);
	if (r == 0 && inode.nlink == 0)
		(void)kv_node_orphan(daemon, &inode);
	kv_reply_error(req, r);
}

static void op_unlink(fuse_req_t req, fuse_ino_t parent_id, const char *name)
{
	remove_name(req, parent_id, name, false);
}

static void op_rmdir(fuse_req_t req, fuse_ino_t parent_id, const char *name)
{
	remove_name(req, parent_id, name, true);
}

/* ---- rename ---- */

/*
 * Publishes what the caller writes to the file under a name that is to be renamed. DURABLE: waits
 * until it is that. -EBUSY: nothing of it is published, and another process is writing it.
 * *ret_inode is what was found under the name, all zero if nothing was.
 */
static int publish_name(
	fuse_req_t req, uint64_t parent, const char *name, bool durable, struct kv_inode *ret_inode)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	int r;

	*ret_inode = (struct kv_inode){0};
	r = kv_index_lookup(daemon->index, parent, name, strlen(name), ret_inode);
	if (r < 0 || !S_ISREG(ret_inode->mode))
		return r == -ENOENT ? 0 : r;
	r = kv_node_publish_for_rename(daemon, ret_inode->ino, fuse_req_ctx(req)->pid);
	if (r < 0)
		return r;
	return durable ? sync_file(daemon, ret_inode->ino) : sync_rewritten(daemon, ret_inode);
}

/* Takes the name that is to be replaced from a file that nobody but its writer has seen. */
static int remove_unpublished(struct kv_daemon *daemon, const struct kv_rename *rename)
{
	struct kv_inode inode;
	int r = kv_index_unlink(daemon->index, rename->new_parent, rename->new_name,
		rename->new_length, false, 0, rename->now_ns, &inode);

	if (r == 0 && inode.nlink == 0)
		kv_node_orphan(daemon, &inode);
	return r == -ENOENT ? 0 : r;
}

/*
 * Who has looked the file up, as RENAME itself has, did so by a name that leads nowhere any more:
 * that leases it no longer. The lease ends before the new name is there to be looked up. SOURCE is
 * what has the name.
 */
static int rename_leased(struct kv_daemon *daemon, const struct kv_rename *rename,
	const struct kv_inode *source, struct kv_inode *ret_moved, struct kv_inode *ret_replaced)
{
	bool ends =
		!(rename->flags & RENAME_EXCHANGE) && S_ISREG(source->mode) && source->nlink == 1;

	if (ends)
		kv_core_lease_renamed(daemon->core, source->ino);
	kv_request_counts();
	int r = kv_index_rename(daemon->index, rename, ret_moved, ret_replaced);
	kv_index_for_request(0);
	if (r < 0 && ends)
		(void)kv_core_lease(daemon->core, source->ino);
	return r;
}

/*
 * A rename publishes the file (P2). Where it replaces another file, that one must not be lost
 * before the new content is durable: the index then asks for the sync first. What another process
 * is still writing for the first time is not there yet for the caller, who gets -ENOENT, as by
 * opening it. It is not waited for: during a RENAME the kernel holds the locks of the directory and
 * of the file, which the writer may need.
 */
static int rename_published(fuse_req_t req, const struct kv_rename *rename,
	struct kv_inode *ret_moved, struct kv_inode *ret_replaced)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_inode source, target;
	int r = publish_name(req, rename->parent, rename->name, false, &source);

	if ((r == 0 || r == -EBUSY) && rename->flags & RENAME_EXCHANGE)
		r = publish_name(req, rename->new_parent, rename->new_name, false, &target);
	/* Another process's unpublished file changes its name only. */
	if (r == -EBUSY)
		r = 0;
	while (r == 0) {
		r = rename_leased(daemon, rename, &source, ret_moved, ret_replaced);
		if (r != -EINPROGRESS)
			return r;
		r = publish_name(req, rename->parent, rename->name, true, &source);
		if (r < 0)
			return r == -EBUSY ? -ENOENT : r;
		r = publish_name(req, rename->new_parent, rename->new_name, true, &target);
		if (r == -EBUSY && !(rename->flags & RENAME_EXCHANGE))
			r = remove_unpublished(daemon, rename);
	}
	return r;
}

static void op_rename(fuse_req_t req, fuse_ino_t parent_id, const char *name,
	fuse_ino_t new_parent_id, const char *new_name, unsigned flags)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_inode moved;
	struct kv_inode replaced;
	struct kv_rename rename = {
		.parent = kv_node_find(daemon, parent_id)->ino,
		.name = name,
		.length = strlen(name),
		.new_parent = kv_node_find(daemon, new_parent_id)->ino,
		.new_name = new_name,
		.new_length = strlen(new_name),
		.flags = flags,
		.now_ns = kv_core_now_ns(daemon->core),
	};
	int r;

	if (kv_request_was_done(daemon)) {
		kv_reply_error(req, 0);
		return;
	}
	r = rename_published(req, &rename, &moved, &replaced);
	if (r == 0 && replaced.ino != 0 && replaced.nlink == 0)
		(void)kv_node_orphan(daemon, &replaced);
	kv_reply_error(req, r);
	/* The kernel has moved its entry, which may be that of a version older than the one just
	 * published. */
	if (r == 0) {
		kv_node_check_entry(daemon, moved.ino);
		/* Within a directory nothing changes its quota. */
		if (rename.parent != rename.new_parent)
			kv_quota_kick(daemon->core);
	}
}

void kv_ops_name(struct fuse_lowlevel_ops *ops)
{
	ops->lookup = op_lookup;
	ops->forget = op_forget;
	ops->forget_multi = op_forget_multi;
	ops->mknod = op_mknod;
	ops->mkdir = op_mkdir;
	ops->symlink = op_symlink;
	ops->readlink = op_readlink;
	ops->link = op_link;
	ops->unlink = op_unlink;
	ops->rmdir = op_rmdir;
	ops->rename = op_rename;
}
