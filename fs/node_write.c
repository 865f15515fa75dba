/* SPDX-License-Identifier: Apache-2.0 */
/* Writing nodes: how they come, get versions, publish and go. See node.h. */

#include "fs/node_internal.h"

#include "fs/caller.h"
#include "fs/daemon.h"
#include "fs/log.h"
#include "fs/notify.h"

int kv_node_create(struct kv_daemon *daemon, uint64_t ino, pid_t pid, struct kv_node **ret_node)
{
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_node *node = kv_node_new(daemon, ino, KV_NODE_WRITING);
	int r;

	if (!node)
		return -ENOMEM;
	node->writer = kv_caller_process(pid);
	node->open_pid = (uint32_t)pid;
	r = kv_version_new(node->file, NULL, &node->version);
	if (r < 0) {
		kv_node_free_if_unused(daemon, node);
		return r;
	}
	node->active = true;
	node->lookups = 1;
	*ret_node = node;
	return 0;
}

int kv_node_add_writer(struct kv_daemon *daemon, struct kv_file *file, pid_t process)
{
	struct kv_node *writer = kv_node_writer_of(file, process);

	if (!writer) {
		writer = kv_node_new(daemon, kv_file_ino(file), KV_NODE_WRITING);
		if (!writer)
			return -ENOMEM;
		writer->writer = process;
		writer->active = true;
	} else if (writer->lookups > 0 || writer->opens > 0) {
		return 0;
	}
	writer->pending_since_ns = kv_core_now_ns(daemon->core);
	return kv_notify_expire(daemon->notify, writer->ino, writer->id);
}

int kv_node_prepare_writer(struct kv_daemon *daemon, struct kv_node *node, pid_t pid)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));

	return kv_node_add_writer(daemon, node->file, kv_caller_process(pid));
}

bool kv_node_is_own(const struct kv_node *node, pid_t pid)
{
	return node->kind == KV_NODE_WRITING && ((pid != 0 && (uint32_t)pid == node->open_pid) ||
							kv_caller_process(pid) == node->writer);
}

/* Its publish failed: what it had is lost, and what would be written on top of that torn. */
static bool is_lost(const struct kv_node *node)
{
	struct kv_version_attr attr;

	if (node->active || !node->version)
		return false;
	kv_version_attr(node->version, &attr);
	return !attr.published;
}

int kv_node_writable(struct kv_daemon *daemon, struct kv_node *node, bool truncate)
{
	struct kv_version *base = NULL;
	struct kv_version *version;
	int r = 0;

	(void)daemon;
	assert(node->kind == KV_NODE_WRITING);
	/* The process came back. Not at its LOOKUP: the kernel may do that twice, with a FORGET
	 * between. */
	node->pending_since_ns = 0;
	if (node->version && node->active)
		return truncate ? kv_version_truncate(node->version, 0) : 0;
	if (is_lost(node) && !truncate)
		return -EIO;
	if (truncate)
		base = NULL;
	else if (node->version)
		base = kv_version_ref(node->version);
	else
		r = kv_file_current(node->file, &base);
	if (r < 0 && r != -ENOENT)
		return r;
	r = kv_version_new(node->file, base, &version);
	if (r == 0 && base && base == node->version)
		kv_version_continue(version, base);
	kv_version_unref(base);
	if (r < 0)
		return r;
	if (node->version)
		kv_version_give_up(node->version);
	kv_version_unref(node->version);
	node->version = version;
	node->active = true;
	node->wrote = false;
	return 0;
}

struct kv_version *kv_node_unpublished_version(struct kv_daemon *daemon, struct kv_file *file)
{
	KV_LOCKED(kv_node_lock(daemon, kv_file_ino(file)));
	struct kv_node *writer = kv_node_any_writer(file);

	return writer && writer->version ? kv_version_ref(writer->version) : NULL;
}

void kv_node_notify_name(struct kv_daemon *daemon, uint64_t ino)
{
	char name[KV_NAME_MAX + 1];
	uint64_t directory;
	uint64_t parent;

	if (kv_index_name(daemon->index, ino, &parent, name) < 0)
		return;
	directory = kv_node_directory_id(daemon, parent);
	if (directory != 0)
		(void)kv_notify_entry(daemon->notify, directory, name, strlen(name));
}

/* True if nothing of FILE was ever published: then even an unchanged version is news. */
static bool is_first_time(struct kv_file *file)
{
	struct kv_version *version;

	if (kv_file_current(file, &version) < 0)
		return true;
	kv_version_unref(version);
	return false;
}

/*
 * A first-time file whose only content is lost: it was never there. Its names go, and what
 * the kernel knows of them.
 */
static void vanish(struct kv_daemon *daemon, uint64_t ino)
{
	char name[KV_NAME_MAX + 1];
	struct kv_inode inode;
	uint64_t parent;

	while (kv_index_name(daemon->index, ino, &parent, name) == 0) {
		uint64_t directory = kv_node_directory_id(daemon, parent);

		if (kv_index_unlink(daemon->index, parent, name, strlen(name), false, ino,
			    kv_core_now_ns(daemon->core), &inode) < 0)
			break;
		if (directory != 0)
			(void)kv_notify_entry(daemon->notify, directory, name, strlen(name));
		if (inode.nlink == 0)
			kv_core_orphan(daemon->core, ino);
	}
}

/*
 * The kernel may remember the name of FILE as the node of the version that is being replaced: from
 * before it was written to, or from between two publishes of one writer.
 */
static void forget_old_entry(struct kv_daemon *daemon, struct kv_file *file)
{
	struct kv_node *old = kv_node_published_of(file);

	if (!old)
		return;
	old->retired = true;
	if (old->lookups > 0)
		kv_node_notify_name(daemon, kv_file_ino(file));
}

int kv_node_publish(struct kv_daemon *daemon, struct kv_node *node, bool force)
{
	struct kv_version_attr attr;
	bool first;
	int r;

	if (!node->active || !node->version)
		return is_lost(node) ? -EIO : 0;
	kv_version_attr(node->version, &attr);
	if (!attr.changed && !force)
		return 0;
	first = is_first_time(node->file);
	/* What a pool's owner has allocated stays promised until its last close. */
	r = kv_version_publish_and_go_on(node->version);
	if (r == -EALREADY)
		r = 0;
	node->active = false;
	node->wrote = false;
	if (r == 0)
		forget_old_entry(daemon, node->file);
	if (r < 0) {
		kv_log_warning("node", "publish failed ino=%llu error=%s",
			(unsigned long long)node->ino, strerror(-r));
		if (first)
			vanish(daemon, node->ino);
	}
	return r;
}

void kv_node_last_writer_closed(struct kv_daemon *daemon, struct kv_node *node)
{
	if (node->active)
		(void)kv_node_publish(daemon, node, is_first_time(node->file));
	if (!node->active) {
		if (node->version)
			kv_version_give_up(node->version);
		return;
	}
	/* Opened for writing and never written: that version goes, read-only handles see the
	 * current one. */
	node->active = false;
	node->version = kv_version_unref(node->version);
	if (kv_file_current(node->file, &node->version) < 0)
		node->version = NULL;
}

int kv_node_publish_for_rename(struct kv_daemon *daemon, uint64_t ino, pid_t pid)
{
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_file *file = kv_file_find(daemon->core, ino);
	struct kv_node *writer;
	int r = 0;

	if (!file)
		return 0;
	writer = kv_node_any_writer(file);
	if (writer) {
		struct kv_node *own = kv_node_writer_of(file, kv_caller_process(pid));

		if (own)
			r = kv_node_publish(daemon, own, is_first_time(file));
		else if (is_first_time(file))
			r = kv_node_publish(daemon, writer, true);
	}
	kv_file_put(file);
	return r;
}
