/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Listing. A directory handle has no state: the offset of an entry is its cookie in the index,
 * stable for the entry's life, so that listing goes on correctly whatever is created or removed
 * meanwhile. Offsets 1 and 2 are those of "." and "..".
 */

#include <errno.h>
#include <sys/stat.h>

#include "fs/node.h"
#include "fs/ops.h"
#include "fs/reply.h"

#define OFFSET_DOT 1
#define OFFSET_DOTDOT 2
/* Bytes of an entry's header in a plain and in a "plus" reply (struct fuse_dirent,
 * fuse_direntplus). */
#define DIRENT_HEADER 24u
#define DIRENT_PLUS_HEADER 152u

/* An entry copied out of the index, so that its lock is not held while nodes are made. */
struct listed {
	uint64_t ino;
	uint64_t cookie;
	uint32_t type;
	struct kv_inode inode;
	char *name;           /* NUL-terminated, in the arena */
	struct kv_node *node; /* that the reply names: a lookup */
};

struct listing {
	fuse_req_t req;
	bool plus;
	size_t size; /* the reply's room */
	char *reply;
	size_t used; /* bytes of reply filled */
	struct listed *entries;
	size_t count;
	size_t capacity;
	char *arena; /* names; SIZE bytes suffice, since the reply holds them too */
	size_t arena_used;
	uint64_t sequence; /* of the index, before the entries were copied */
	size_t estimate;   /* reply bytes the copied entries will take */
};

static size_t entry_size(const struct listing *listing, size_t length)
{
	return kv_round_up((listing->plus ? DIRENT_PLUS_HEADER : DIRENT_HEADER) + length, 8);
}

static bool collect(void *arg, const struct kv_dirent *dirent)
{
	struct listing *listing = arg;
	struct listed *entry;

	listing->estimate += entry_size(listing, dirent->length);
	if (listing->estimate > listing->size || listing->count == listing->capacity)
		return false;
	entry = &listing->entries[listing->count++];
	entry->ino = dirent->ino;
	entry->cookie = dirent->cookie;
	entry->type = dirent->type;
	if (listing->plus)
		entry->inode = dirent->inode;
	entry->name = listing->arena + listing->arena_used;
	memcpy(entry->name, dirent->name, dirent->length);
	entry->name[dirent->length] = '\0';
	listing->arena_used += dirent->length + 1;
	return true;
}

/* Adds a plain entry, or one without a node to a "plus" reply. False when the reply is full. */
static bool add_plain(
	struct listing *listing, const char *name, uint64_t ino, uint32_t type, uint64_t offset)
{
	struct fuse_entry_param entry = {.attr = {.st_ino = ino, .st_mode = type}};
	char *to = listing->reply + listing->used;
	size_t room = listing->size - listing->used;
	size_t n;

	if (listing->plus)
		n = fuse_add_direntry_plus(listing->req, to, room, name, &entry, (off_t)offset);
	else
		n = fuse_add_direntry(listing->req, to, room, name, &entry.attr, (off_t)offset);
	if (n > room)
		return false;
	listing->used += n;
	return true;
}

/* Adds an entry with its node, which counts as a lookup once the kernel has the reply. */
static bool add_plus(struct listing *listing, struct listed *listed)
{
	struct kv_daemon *daemon = kv_daemon_of(listing->req);
	const struct kv_seen seen = {&listed->inode, listing->sequence};
	size_t room = listing->size - listing->used;
	struct fuse_entry_param entry;
	struct kv_node *node = NULL;
	size_t n;

	if (entry_size(listing, strlen(listed->name)) > room)
		return false;
	if (kv_node_for_listing(daemon, &seen, &node) < 0 || !node)
		return add_plain(listing, listed->name, listed->ino, listed->type, listed->cookie);
	if (kv_entry_fill(daemon, node, &seen, true, &entry) < 0) {
		kv_node_forget(daemon, node, 1);
		return add_plain(listing, listed->name, listed->ino, listed->type, listed->cookie);
	}
	n = fuse_add_direntry_plus(listing->req, listing->reply + listing->used, room, listed->name,
		&entry, (off_t)listed->cookie);
	assert(n <= room);
	listing->used += n;
	listed->node = node;
	return true;
}

static bool add_dots(struct listing *listing, struct kv_node *node, off_t offset)
{
	struct kv_daemon *daemon = kv_daemon_of(listing->req);
	struct kv_inode inode;

	if (kv_index_get(daemon->index, node->ino, &inode) < 0)
		inode.parent = node->ino;
	if (offset < OFFSET_DOT && !add_plain(listing, ".", node->ino, S_IFDIR, OFFSET_DOT))
		return false;
	return offset >= OFFSET_DOTDOT ||
	       add_plain(listing, "..", inode.parent, S_IFDIR, OFFSET_DOTDOT);
}

static int list(struct listing *listing, struct kv_node *node, off_t offset)
{
	struct kv_daemon *daemon = kv_daemon_of(listing->req);
	uint64_t cookie = offset > OFFSET_DOTDOT ? (uint64_t)offset : 0;
	int r;

	if (!add_dots(listing, node, offset))
		return 0;
	listing->estimate = listing->used;
	listing->sequence = kv_index_sequence(daemon->index);
	r = kv_index_readdir(daemon->index, node->ino, cookie, listing->plus, collect, listing);
	/* A removed directory that is still open is empty. */
	if (r == -ENOENT)
		r = 0;
	for (size_t i = 0; r == 0 && i < listing->count; i++) {
		struct listed *entry = &listing->entries[i];

		if (listing->plus ? !add_plus(listing, entry)
				  : !add_plain(listing, entry->name, entry->ino, entry->type,
					    entry->cookie))
			break;
	}
	return r;
}

static void forget_all(struct kv_daemon *daemon, const struct listing *listing)
{
	for (size_t i = 0; i < listing->count; i++)
		if (listing->entries[i].node)
			kv_node_forget(daemon, listing->entries[i].node, 1);
}

static void reply_listing(fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, bool plus)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	size_t capacity = size / (plus ? DIRENT_PLUS_HEADER : DIRENT_HEADER) + 1;
	_cleanup_free_ char *reply = malloc(size);
	_cleanup_free_ char *arena = malloc(size);
	_cleanup_free_ struct listed *entries = calloc(capacity, sizeof(*entries));
	struct listing listing = {
		.req = req,
		.plus = plus,
		.size = size,
		.reply = reply,
		.arena = arena,
		.entries = entries,
		.capacity = capacity,
	};
	int r = reply && arena && entries ? 0 : -ENOMEM;

	if (r == 0)
		r = list(&listing, kv_node_find(daemon, id), offset);
	if (r < 0) {
		forget_all(daemon, &listing);
		kv_reply_error(req, r);
		return;
	}
	r = fuse_reply_buf(req, reply, listing.used);
	/* Interrupted: the kernel has seen none of the names. */
	if (r == -ENOENT)
		forget_all(daemon, &listing);
	kv_reply_check(daemon, r);
}

static void op_readdir(
	fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, struct fuse_file_info *fi)
{
	(void)fi;
	reply_listing(req, id, size, offset, false);
}

static void op_readdirplus(
	fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, struct fuse_file_info *fi)
{
	(void)fi;
	reply_listing(req, id, size, offset, true);
}

static void op_opendir(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	struct kv_daemon *daemon = kv_daemon_of(req);

	(void)id;
	kv_reply_check(daemon, fuse_reply_open(req, fi));
}

static void op_releasedir(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	(void)id;
	(void)fi;
	kv_reply_error(req, 0);
}

/* Names become durable with all published content they stand for. */
static void op_fsyncdir(fuse_req_t req, fuse_ino_t id, int datasync, struct fuse_file_info *fi)
{
	(void)id;
	(void)datasync;
	(void)fi;
	kv_reply_error(req, kv_core_sync(kv_daemon_of(req)->core));
}

void kv_ops_dir(struct fuse_lowlevel_ops *ops)
{
	ops->opendir = op_opendir;
	ops->readdir = op_readdir;
	ops->readdirplus = op_readdirplus;
	ops->releasedir = op_releasedir;
	ops->fsyncdir = op_fsyncdir;
}
