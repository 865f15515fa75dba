/* SPDX-License-Identifier: Apache-2.0 */
/* Which node a caller is given, and what the kernel is told when that changes: see node.h. */

#include "fs/node_internal.h"

#include <sys/stat.h>

#include "fs/caller.h"
#include "fs/notify.h"
#include "fs/retry.h"
#include "fs/takeover.h"
#include "fs/users.h"

static int directory_node(
	struct kv_daemon *daemon, const struct kv_inode *inode, struct kv_node **ret_node)
{
	struct kv_node *node = kv_node_find_plain(daemon, inode->ino);

	if (!node)
		node = kv_node_new_plain(daemon->nodes, inode->ino,
			S_ISDIR(inode->mode) ? KV_NODE_DIRECTORY : KV_NODE_SYMLINK, 0);
	if (!node)
		return -ENOMEM;
	kv_node_set_lookups(daemon, node, node->lookups + 1);
	*ret_node = node;
	return 0;
}

static void note_version(struct kv_daemon *daemon, struct kv_node *node)
{
	struct kv_version_attr attr;

	if (!daemon->takeover)
		return;
	kv_version_attr(node->version, &attr);
	kv_takeover_set_version(daemon->takeover, node->id, attr.number, attr.mtime_ns);
}

/*
 * A writing node becomes the published node of FILE, for it shows the current version, and nothing
 * can change it any more. Not where the kernel may keep what is of its writer's time.
 */
static struct kv_node *settle_writer(struct kv_daemon *daemon, struct kv_file *file)
{
	struct kv_node *node = kv_node_first(file);

	while (node && (node->kind != KV_NODE_WRITING || node->active || node->borrowed ||
			       node->opens > 0 || node->lost || node->cached || !node->version ||
			       !kv_file_is_current(file, node->version)))
		node = node->sibling;
	/* The next daemon knows what kind of node an id is of. */
	if (!node || daemon->takeover)
		return NULL;
	kv_draft_done(node->draft);
	free(node->draft);
	node->draft = NULL;
	node->user = kv_user_unref(node->user);
	node->kind = KV_NODE_PUBLISHED;
	return node;
}

/* The node of FILE's current version, made if the one that is there shows an older one. */
static int published_node(struct kv_daemon *daemon, struct kv_file *file,
	const struct kv_seen *seen, struct kv_node **ret_node)
{
	struct kv_node *node = kv_node_published_of(file);
	struct kv_version *version;
	int r;

	if (node && kv_file_is_current(file, node->version)) {
		*ret_node = node;
		return 0;
	}
	*ret_node = settle_writer(daemon, file);
	if (*ret_node && node)
		node->retired = true;
	if (*ret_node)
		return 0;
	r = kv_file_current_seen(file, seen, &version);
	if (r < 0)
		return r;
	if (node)
		node->retired = true;
	node = kv_node_new(daemon, kv_file_ino(file), KV_NODE_PUBLISHED, 0);
	if (!node) {
		kv_version_unref(version);
		return -ENOMEM;
	}
	node->version = version;
	note_version(daemon, node);
	*ret_node = node;
	return 0;
}

/* As the comment of kv_node_for says, for a regular file, its stripe held. */
static int file_node(struct kv_daemon *daemon, struct kv_file *file, const struct kv_seen *seen,
	pid_t pid, struct kv_node **ret_node)
{
	struct kv_node *writer = kv_node_any_writer(file);
	struct kv_node *own = NULL;
	struct kv_node *draft;
	int r;

	if (writer)
		own = kv_node_writer_of(file, kv_caller_process(pid));
	if (own) {
		*ret_node = own;
		return 0;
	}
	r = published_node(daemon, file, seen, ret_node);
	draft = r == -ENOENT ? kv_node_any_draft(file) : NULL;
	if (!draft)
		return r;
	/* Nothing published yet: the name is there, and an open for reading waits. */
	*ret_node = draft;
	return 0;
}

int kv_node_for(struct kv_daemon *daemon, const struct kv_seen *seen, pid_t pid,
	struct kv_node **ret_node, bool *ret_cacheable)
{
	const struct kv_inode *inode = seen->inode;
	KV_LOCKED(kv_node_lock(daemon, inode->ino));
	struct kv_file *file;
	struct kv_node *node;
	int r;

	if (!S_ISREG(inode->mode)) {
		*ret_cacheable = true;
		return directory_node(daemon, inode, ret_node);
	}
	r = kv_file_get(daemon->core, inode->ino, &file);
	if (r < 0)
		return r;
	/* Who was sent here to write gets a node of its own, whatever file the name is of by now.
	 */
	if (kv_retry_pending(daemon->retries, pid, kv_core_now_ns(daemon->core)))
		r = kv_node_add_writer(daemon, file, kv_caller_process(pid));
	if (r == 0)
		r = file_node(daemon, file, seen, pid, &node);
	if (r == 0) {
		kv_node_set_lookups(daemon, node, node->lookups + 1);
		*ret_node = node;
		*ret_cacheable = !kv_node_any_writer(file) && inode->nlink == 1;
	}
	kv_file_put(file);
	return r;
}

int kv_node_for_listing(
	struct kv_daemon *daemon, const struct kv_seen *seen, struct kv_node **ret_node)
{
	const struct kv_inode *inode = seen->inode;
	KV_LOCKED(kv_node_lock(daemon, inode->ino));
	struct kv_file *file;
	int r;

	*ret_node = NULL;
	if (!S_ISREG(inode->mode))
		return directory_node(daemon, inode, ret_node);
	if (inode->nlink != 1)
		return 0;
	r = kv_file_get(daemon->core, inode->ino, &file);
	if (r < 0)
		return r;
	if (!kv_node_any_writer(file)) {
		r = published_node(daemon, file, seen, ret_node);
		if (r == 0)
			kv_node_set_lookups(daemon, *ret_node, (*ret_node)->lookups + 1);
	}
	kv_file_put(file);
	return r == -ENOENT ? 0 : r;
}

void kv_node_retire_published(struct kv_daemon *daemon, uint64_t ino)
{
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_file *file = kv_file_find(daemon->core, ino);
	struct kv_node *node;

	if (!file)
		return;
	node = kv_node_published_of(file);
	if (node)
		node->retired = true;
	kv_file_put(file);
}

void kv_node_check_entry(struct kv_daemon *daemon, uint64_t ino)
{
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_file *file = kv_file_find(daemon->core, ino);
	bool stale = false;

	if (!file)
		return;
	for (struct kv_node *node = kv_node_first(file); node; node = node->sibling)
		stale |= node->kind == KV_NODE_PUBLISHED && node->retired && node->lookups > 0;
	if (stale)
		kv_node_notify_name(daemon, ino);
	kv_file_put(file);
}

void kv_node_attributes_changed(struct kv_daemon *daemon, struct kv_node *node)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));

	for (struct kv_node *other = kv_node_first(node->file); other; other = other->sibling)
		if (other != node && other->lookups > 0)
			(void)kv_notify_attributes(daemon->notify, other->id);
}

void kv_node_drop_pages(struct kv_daemon *daemon, uint64_t ino)
{
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_file *file = kv_file_find(daemon->core, ino);

	if (!file)
		return;
	for (struct kv_node *node = kv_node_first(file); node; node = node->sibling)
		if (node->kind == KV_NODE_PUBLISHED && node->lookups > 0)
			(void)kv_notify_pages(daemon->notify, node->id);
	kv_file_put(file);
}
