/* SPDX-License-Identifier: Apache-2.0 */
/* The nodes that the kernel knew before this process began: see node.h. */

#include "fs/node_internal.h"

#include "fs/handle.h"
#include "fs/notify.h"
#include "fs/takeover.h"

/* What the kernel knows may have lost its name: nobody else keeps it. */
static void resume_orphan(struct kv_daemon *daemon, struct kv_node *node)
{
	struct kv_inode inode;

	if (kv_index_get(daemon->index, node->ino, &inode) == 0 && inode.nlink == 0)
		(void)kv_node_orphan_file(daemon, node->file);
}

/* The version that a node of before has shown, and whether it is an old one. */
static int resume_version(struct kv_daemon *daemon, const struct kv_takeover_record *record,
	struct kv_version **ret_version, bool *ret_kept)
{
	struct kv_version_attr attr = {0};
	struct kv_version *version;
	struct kv_file *file;
	int r = kv_file_get(daemon->core, record->ino, &file);

	if (r < 0)
		return r;
	r = kv_file_current(file, &version);
	if (r == 0)
		kv_version_attr(version, &attr);
	*ret_kept = attr.number != record->version;
	if (r == 0 && *ret_kept)
		kv_version_unref(version);
	if (*ret_kept) {
		r = kv_version_keep(file, record->version, &version);
		if (r == 0)
			kv_version_set_times(version, record->mtime_ns, INT64_MIN);
	}
	if (r == 0)
		*ret_version = version;
	kv_file_put(file);
	return r;
}

static int resume_file(
	struct kv_daemon *daemon, uint64_t nodeid, const struct kv_takeover_record *record)
{
	struct kv_version *version = NULL;
	struct kv_node *node;
	bool kept;

	if (resume_version(daemon, record, &version, &kept) < 0)
		return -ENOENT;
	node = kv_node_new(daemon, record->ino, KV_NODE_PUBLISHED, nodeid);
	if (!node) {
		kv_version_unref(version);
		return -ENOENT;
	}
	node->version = version;
	node->kept = kept;
	/* The kernel's mode for it cannot change: LOOKUP makes another. */
	node->retired = true;
	node->inherited = true;
	node->passed = record->passed;
	node->lookups = record->lookups;
	resume_orphan(daemon, node);
	return 0;
}

/* The version of a writing node; NULL, where the result is 0, if it has none. */
static int resume_draft(struct kv_daemon *daemon, const struct kv_takeover_record *record,
	struct kv_version **ret_version)
{
	const struct kv_takeover_writing *writing = &record->writing;
	struct kv_version_attr attr = {0};
	struct kv_file *file;
	int r;

	*ret_version = kv_core_claim(daemon->core, writing->note);
	if (*ret_version)
		return 0;
	if (writing->flags & KV_TAKEOVER_LOST)
		return -ENOENT;
	/* Prepared for somebody, who has not come yet. */
	if (writing->flags & KV_TAKEOVER_ACTIVE)
		return writing->note == 0 ? 0 : -ENOENT;
	r = kv_file_get(daemon->core, record->ino, &file);
	if (r < 0)
		return r;
	r = kv_file_current(file, ret_version);
	if (r == 0)
		kv_version_attr(*ret_version, &attr);
	kv_file_put(file);
	/* It must go on with its own. */
	if (r == 0 && !(writing->flags & KV_TAKEOVER_BORROWED) && attr.number != record->version) {
		*ret_version = kv_version_unref(*ret_version);
		return -ENOENT;
	}
	return r;
}

static void resume_writers(struct kv_node *node, const struct kv_takeover_writing *writing)
{
	struct kv_draft *draft = node->draft;

	if (writing->flags & KV_TAKEOVER_BY_WRITER)
		draft->processes[draft->process_count++] = writing->writer;
	draft->many = writing->flags & KV_TAKEOVER_BY_OTHERS;
	draft->abandoned = writing->flags & KV_TAKEOVER_ABANDONED;
	if (node->closed && node->wrote)
		kv_draft_watch(draft, writing->writer);
}

static int resume_writing(
	struct kv_daemon *daemon, uint64_t nodeid, const struct kv_takeover_record *record)
{
	const struct kv_takeover_writing *writing = &record->writing;
	struct kv_version_attr attr = {0};
	struct kv_version *version;
	struct kv_node *node;

	if (resume_draft(daemon, record, &version) < 0)
		return -ENOENT;
	node = kv_node_new(daemon, record->ino, KV_NODE_WRITING, nodeid);
	if (!node) {
		kv_version_unref(version);
		return -ENOENT;
	}
	if (version)
		kv_version_attr(version, &attr);
	node->version = version;
	node->writer = writing->writer;
	node->open_pid = writing->open_pid;
	/* It may have been published behind what the record says. */
	node->active = writing->flags & KV_TAKEOVER_ACTIVE && !attr.published;
	node->wrote = node->active && writing->flags & KV_TAKEOVER_WROTE;
	node->closed = writing->flags & KV_TAKEOVER_CLOSED;
	node->borrowed = writing->flags & KV_TAKEOVER_BORROWED;
	node->cached = writing->flags & KV_TAKEOVER_CACHED;
	node->lookups = record->lookups;
	if (node->active && !version) {
		node->pending_since_ns = kv_core_now_ns(daemon->core);
		(void)kv_notify_expire(daemon->notify, node->ino, node->id);
	}
	if (node->active)
		resume_writers(node, writing);
	resume_orphan(daemon, node);
	return 0;
}

int kv_node_resume(
	struct kv_daemon *daemon, uint64_t nodeid, const struct kv_takeover_record *record)
{
	KV_LOCKED(kv_node_lock(daemon, record->ino));
	struct kv_node *node;

	if (record->lookups == 0 && record->kind != KV_NODE_WRITING) {
		kv_takeover_remove(daemon->takeover, nodeid);
		return 0;
	}
	if (record->kind == KV_NODE_PUBLISHED)
		return resume_file(daemon, nodeid, record);
	if (record->kind == KV_NODE_WRITING)
		return resume_writing(daemon, nodeid, record);
	if (record->kind != KV_NODE_DIRECTORY && record->kind != KV_NODE_SYMLINK)
		return -ENOENT;
	/* Whether or not there is such a directory: then its index says so. */
	node = kv_node_new_plain(
		daemon->nodes, record->ino, (enum kv_node_kind)record->kind, nodeid);
	if (!node)
		return -ENOENT;
	node->lookups = record->lookups;
	return 0;
}

struct kv_handle *kv_node_old_handle(struct kv_daemon *daemon, struct kv_node *node)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));
	struct kv_handle *handle = node->old_handle;
	enum kv_access access;

	if (handle)
		return handle;
	handle = calloc(1, sizeof(*handle));
	/* As by O_DIRECT: nothing is waited for. */
	if (!handle || (!node->kept && kv_version_open(node->version, true, &access) < 0)) {
		free(handle);
		return NULL;
	}
	handle->node = node;
	handle->place = KV_TAKEOVER_NO_HANDLE;
	handle->version = node->version;
	kv_file_opened(node->file);
	node->old_handle = handle;
	return handle;
}
