/* SPDX-License-Identifier: Apache-2.0 */
/* Writing nodes: how they come, get versions, publish and go. See node.h. */

#include "fs/node_internal.h"

#include <fcntl.h>

#include "fs/caller.h"
#include "fs/daemon.h"
#include "fs/log.h"
#include "fs/notify.h"
#include "fs/parking.h"
#include "fs/retry.h"
#include "fs/takeover.h"
#include "fs/users.h"

static unsigned flags_of(const struct kv_node *node, uint64_t note)
{
	const struct kv_draft *draft = node->draft;
	bool by_writer = !draft->many && kv_draft_was_changed_by(draft, node->writer);
	bool lost = node->lost || (node->active && node->version && note == 0);

	return (node->active ? KV_TAKEOVER_ACTIVE : 0) | (node->wrote ? KV_TAKEOVER_WROTE : 0) |
	       (node->closed ? KV_TAKEOVER_CLOSED : 0) |
	       (node->borrowed ? KV_TAKEOVER_BORROWED : 0) |
	       (node->cached ? KV_TAKEOVER_CACHED : 0) | (lost ? KV_TAKEOVER_LOST : 0) |
	       (draft->abandoned ? KV_TAKEOVER_ABANDONED : 0) |
	       (by_writer ? KV_TAKEOVER_BY_WRITER : 0) |
	       (draft->many || draft->process_count > by_writer ? KV_TAKEOVER_BY_OTHERS : 0);
}

/* NODE has changed: for the daemon after this one. */
static void note_node(struct kv_daemon *daemon, const struct kv_node *node)
{
	struct kv_takeover_writing writing = {
		.writer = node->writer,
		.open_pid = node->open_pid,
	};
	struct kv_version_attr attr;

	if (!daemon->takeover)
		return;
	if (node->version && !node->borrowed)
		writing.note = kv_version_note(node->version);
	writing.flags = flags_of(node, writing.note);
	if (node->version && !node->active) {
		kv_version_attr(node->version, &attr);
		kv_takeover_set_version(daemon->takeover, node->id, attr.number, attr.mtime_ns);
	}
	kv_takeover_set_writing(daemon->takeover, node->id, &writing);
}

/* The node that a daemon before this one has made for the request that comes again. */
static struct kv_node *node_made_before(struct kv_daemon *daemon, uint64_t ino, pid_t pid)
{
	struct kv_file *file = kv_file_find(daemon->core, ino);
	struct kv_node *node = file ? kv_node_writer_of(file, kv_caller_process(pid)) : NULL;

	kv_file_put(file);
	return node && node->version && node->lookups == 1 && node->opens == 0 ? node : NULL;
}

int kv_node_create(struct kv_daemon *daemon, uint64_t ino, pid_t pid, struct kv_node **ret_node)
{
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_node *node = daemon->takeover ? node_made_before(daemon, ino, pid) : NULL;
	int r;

	if (node) {
		*ret_node = node;
		return 0;
	}
	node = kv_node_new(daemon, ino, KV_NODE_WRITING, 0);
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
	kv_node_set_lookups(daemon, node, 1);
	note_node(daemon, node);
	*ret_node = node;
	return 0;
}

void kv_node_set_user(struct kv_node *node, struct kv_user *user)
{
	if (!node->user)
		node->user = kv_user_ref(user);
}

int kv_node_add_writer(struct kv_daemon *daemon, struct kv_file *file, pid_t process)
{
	struct kv_node *writer = kv_node_writer_of(file, process);

	if (!writer) {
		writer = kv_node_new(daemon, kv_file_ino(file), KV_NODE_WRITING, 0);
		if (!writer)
			return -ENOMEM;
		writer->writer = process;
		writer->active = true;
	} else if (writer->lookups > 0 || writer->opens > 0) {
		return 0;
	}
	writer->pending_since_ns = kv_core_now_ns(daemon->core);
	note_node(daemon, writer);
	return kv_notify_expire(daemon->notify, writer->ino, writer->id);
}

int kv_node_prepare_writer(struct kv_daemon *daemon, struct kv_node *node, pid_t pid)
{
	int r;

	{
		KV_LOCKED(kv_node_lock(daemon, node->ino));

		r = kv_node_add_writer(daemon, node->file, kv_caller_process(pid));
	}
	kv_retry_note(daemon->retries, pid, kv_core_now_ns(daemon->core));
	return r < 0 ? r : -ESTALE;
}

bool kv_node_is_own(const struct kv_node *node, pid_t pid)
{
	return node->kind == KV_NODE_WRITING && ((pid != 0 && (uint32_t)pid == node->open_pid) ||
							kv_caller_process(pid) == node->writer);
}

/* What NODE's published version was promised and has not used. */
static void give_up_promises(struct kv_node *node)
{
	if (node->version && !node->borrowed)
		kv_version_give_up(node->version);
}

int kv_node_writable(struct kv_daemon *daemon, struct kv_node *node, bool truncate)
{
	struct kv_version *base = NULL;
	struct kv_version *version;
	int r = 0;

	/* It has become the published one since the caller looked. */
	if (node->kind != KV_NODE_WRITING)
		return -EREMCHG;
	/* The process came back. Not at its LOOKUP: the kernel may do that twice, with a FORGET
	 * between. */
	node->pending_since_ns = 0;
	if (node->lost)
		return node->lost;
	if (node->version && node->active) {
		r = truncate ? kv_version_truncate(node->version, 0) : 0;
		if (truncate && r == 0)
			kv_draft_cut(node->draft, 0);
		return r;
	}
	if (truncate)
		base = NULL;
	else if (node->version)
		base = kv_version_ref(node->version);
	else
		r = kv_file_current(node->file, &base);
	if (r < 0 && r != -ENOENT)
		return r;
	r = kv_version_new(node->file, base, &version);
	if (r == 0)
		kv_version_set_user(version, node->user);
	if (r == 0 && base && base == node->version && !node->borrowed)
		kv_version_continue(version, base);
	kv_version_unref(base);
	if (r < 0)
		return r;
	give_up_promises(node);
	kv_version_unref(node->version);
	node->version = version;
	node->borrowed = false;
	node->active = true;
	node->wrote = false;
	note_node(daemon, node);
	return 0;
}

/* ---- Changes ---- */

/* Pages of a mapping come without a caller: they are its process's, as far as can be told. */
static void note_change(struct kv_node *node, pid_t pid)
{
	pid_t tid = pid != 0 ? pid : node->writer;

	node->wrote = true;
	/* Who opened the file is the writer, or one of its threads. */
	kv_draft_changed_by(node->draft, tid,
		tid == node->writer || (uint32_t)tid == node->open_pid ? node->writer : 0);
	if (node->closed)
		kv_draft_watch(node->draft, tid);
}

int kv_node_change(
	struct kv_daemon *daemon, struct kv_node *node, pid_t pid, struct kv_version **ret_version)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));
	int r = node->kind == KV_NODE_WRITING ? kv_node_writable(daemon, node, false) : -EBADF;

	if (r < 0)
		return r;
	note_change(node, pid);
	note_node(daemon, node);
	*ret_version = kv_version_ref(node->version);
	return 0;
}

void kv_node_changed(
	struct kv_daemon *daemon, struct kv_node *node, const struct kv_node_outcome *outcome)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));

	if (node->version != outcome->version || !node->active)
		return;
	if (outcome->error < 0) {
		kv_draft_failed(node->draft, outcome->from, outcome->to, outcome->error);
		kv_version_is_short(node->version);
	} else {
		kv_draft_written(node->draft, outcome->from, outcome->to);
	}
}

int kv_node_set_size(struct kv_daemon *daemon, struct kv_node *node, pid_t pid, uint64_t size)
{
	int r = kv_node_writable(daemon, node, false);

	if (r < 0)
		return r;
	note_change(node, pid);
	note_node(daemon, node);
	r = kv_version_truncate(node->version, size);
	if (r < 0) {
		kv_draft_failed(node->draft, size, UINT64_MAX, r);
		kv_version_is_short(node->version);
	} else {
		kv_draft_cut(node->draft, size);
	}
	if (node->write_opens > 0)
		return r;
	/* By path: no close will come. */
	if (r < 0)
		kv_node_last_writer_closed(daemon, node);
	return r < 0 ? r : kv_node_publish(daemon, node);
}

struct kv_version *kv_node_unpublished_version(struct kv_daemon *daemon, struct kv_file *file)
{
	KV_LOCKED(kv_node_lock(daemon, kv_file_ino(file)));
	struct kv_node *writer = kv_node_any_draft(file);

	return writer ? kv_version_ref(writer->version) : NULL;
}

/* ---- The end of a draft ---- */

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
static void vanish(struct kv_daemon *daemon, struct kv_file *file)
{
	uint64_t ino = kv_file_ino(file);
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
			kv_node_orphan_file(daemon, file);
	}
}

static void wake_readers(struct kv_daemon *daemon, struct kv_node *node)
{
	kv_parking_wake(daemon->parking, kv_parking_key(node->ino, KV_PARKING_PUBLISH));
}

/* Leaves what NODE has not published: its handles see what is published, and write no more. */
static void let_go(struct kv_node *node)
{
	node->active = false;
	node->wrote = false;
	kv_draft_reset(node->draft);
	node->version = kv_version_unref(node->version);
	node->borrowed = true;
	if (kv_file_current(node->file, &node->version) < 0)
		node->version = NULL;
}

/* NODE's draft is worth nothing, for ERROR. Where there was nothing before, the file goes with it,
 * unless somebody else is writing it as well. */
static void drop(struct kv_daemon *daemon, struct kv_node *node, int error)
{
	bool first = is_first_time(node->file);

	kv_log_info("node", "not published ino=%llu first=%d error=%s",
		(unsigned long long)node->ino, first, strerror(-error));
	kv_stat_add(&daemon->stats.unfinished, 1);
	node->lost = error;
	let_go(node);
	note_node(daemon, node);
	if (first && !kv_node_any_draft(node->file))
		vanish(daemon, node->file);
	wake_readers(daemon, node);
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

static bool is_changed(struct kv_node *node)
{
	struct kv_version_attr attr;

	if (!node->active || !node->version)
		return false;
	kv_version_attr(node->version, &attr);
	return attr.changed;
}

int kv_node_publish(struct kv_daemon *daemon, struct kv_node *node)
{
	int r;

	if (!is_changed(node))
		return 0;
	if (node->draft->error)
		return node->draft->error;
	/* What a pool's owner has allocated stays promised until its last close. */
	r = kv_version_publish(node->version);
	if (r < 0 && r != -EALREADY) {
		drop(daemon, node, r);
		return r;
	}
	node->active = false;
	node->wrote = false;
	kv_draft_reset(node->draft);
	note_node(daemon, node);
	forget_old_entry(daemon, node->file);
	wake_readers(daemon, node);
	return 0;
}

/* Once a mount. */
static void say_blind(struct kv_daemon *daemon, pid_t pid)
{
	if (!atomic_exchange(&daemon->said_blind, true))
		kv_log_warning("node",
			"how writers end cannot be seen, so what a killed one has written is "
			"published pid=%d (%s)",
			(int)pid,
			pid == 0 ? "it is in another PID namespace"
				 : "the daemon may not look at it in /proc");
}

/* A process was ended by a signal. */
static int flush_of_killed(struct kv_daemon *daemon, struct kv_node *node, pid_t process)
{
	if (kv_draft_was_changed_by(node->draft, process)) {
		drop(daemon, node, -EIO);
		return -EIO;
	}
	/* It opened the file for others, who may go on with it. */
	node->draft->abandoned = true;
	note_node(daemon, node);
	return 0;
}

static bool has_changes(struct kv_daemon *daemon, struct kv_node *node)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));

	return is_changed(node);
}

int kv_node_flush(struct kv_daemon *daemon, struct kv_node *node, pid_t pid, bool *ret_news)
{
	/* Nothing is read from /proc with the lock held, nor where there is nothing to publish. */
	enum kv_end end = has_changes(daemon, node) ? kv_caller_end(pid) : KV_END_NONE;
	KV_LOCKED(kv_node_lock(daemon, node->ino));
	pid_t process = kv_node_is_own(node, pid) ? node->writer : kv_caller_process(pid);
	int r;

	*ret_news = false;
	if (node->lost)
		return process == node->writer ? node->lost : 0;
	if (!is_changed(node) ||
		(process != node->writer && !kv_draft_was_changed_by(node->draft, process)))
		return 0;
	if (end == KV_END_UNKNOWN)
		say_blind(daemon, pid);
	if (end == KV_END_KILLED) {
		*ret_news = true;
		return flush_of_killed(daemon, node, process);
	}
	node->draft->abandoned = false;
	if (process != node->writer)
		return 0;
	node->closed = true;
	note_node(daemon, node);
	if (!node->wrote)
		return 0;
	*ret_news = true;
	r = kv_node_publish(daemon, node);
	/* Another descriptor may still write what is missing. */
	if (r < 0 && node->active && node->write_opens == 1)
		drop(daemon, node, r);
	return r;
}

/* Who is to be looked for at the end of a handle of NODE. */
struct suspects {
	pid_t processes[KV_DRAFT_PROCESSES];
	unsigned count;
	int watch;
	pid_t watched;
};

/*
 * Without a FLUSH the open never came to its end, because its thread was killed in it, or it made
 * no descriptor (io_uring): who has changed something is asked for, where nobody has it is nothing.
 */
static void find_suspects(struct kv_node *node, bool flushed, struct suspects *ret_suspects)
{
	const struct kv_draft *draft = node->draft;

	*ret_suspects = (struct suspects){.watch = -1};
	if (draft->watch >= 0) {
		ret_suspects->watch = fcntl(draft->watch, F_DUPFD_CLOEXEC, 0);
		ret_suspects->watched = draft->watched;
	}
	if (flushed)
		return;
	if (!node->wrote)
		node->draft->abandoned = true;
	ret_suspects->count = draft->process_count;
	memcpy(ret_suspects->processes, draft->processes, sizeof(draft->processes));
}

void kv_node_look_for_writer(struct kv_daemon *daemon, struct kv_node *node, bool flushed)
{
	struct suspects suspects;
	bool killed = false;

	if (node->kind != KV_NODE_WRITING)
		return;
	{
		KV_LOCKED(kv_node_lock(daemon, node->ino));

		find_suspects(node, flushed, &suspects);
	}
	for (unsigned i = 0; i < suspects.count; i++)
		killed |= kv_caller_end(suspects.processes[i]) == KV_END_KILLED;
	if (suspects.watch >= 0) {
		killed |= kv_caller_end_of(suspects.watch, suspects.watched) == KV_END_KILLED;
		(void)close(suspects.watch);
	}
	if (!killed)
		return;
	KV_LOCKED(kv_node_lock(daemon, node->ino));
	node->draft->abandoned = true;
	note_node(daemon, node);
}

void kv_node_last_writer_closed(struct kv_daemon *daemon, struct kv_node *node)
{
	if (!node->active) {
		give_up_promises(node);
		return;
	}
	if (!is_changed(node)) {
		/* Opened for writing and never written. */
		let_go(node);
		note_node(daemon, node);
		return;
	}
	if (node->draft->error)
		drop(daemon, node, node->draft->error);
	else if (node->draft->abandoned)
		drop(daemon, node, -EIO);
	else if (kv_node_publish(daemon, node) == 0)
		give_up_promises(node);
}

int kv_node_is_published(struct kv_daemon *daemon, struct kv_file *file)
{
	uint64_t ino = kv_file_ino(file);
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_inode inode;

	if (!is_first_time(file))
		return 0;
	if (kv_index_get(daemon->index, ino, &inode) < 0 || inode.nlink == 0)
		return -ENOENT;
	return kv_node_any_draft(file) ? -EAGAIN : -ENOENT;
}

int kv_node_publish_for_rename(struct kv_daemon *daemon, uint64_t ino, pid_t pid)
{
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_file *file = kv_file_find(daemon->core, ino);
	struct kv_node *writer;
	int r = 0;

	if (!file)
		return 0;
	writer = kv_node_writer_of(file, kv_caller_process(pid));
	if (writer && writer->version)
		r = kv_node_publish(daemon, writer);
	else if (is_first_time(file) && kv_node_any_draft(file))
		r = -EBUSY;
	kv_file_put(file);
	return r;
}
