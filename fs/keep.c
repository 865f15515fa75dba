/* SPDX-License-Identifier: Apache-2.0 */
/* What is kept and what goes first, as users say it: see keep.h. */

#include "fs/keep.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>

#include "fs/notify.h"
#include "fs/parse.h"
#include "fs/reply.h"
#include "index/space.h"

#define NAME_STATUS "user.kvfs.status"
#define NAME_PIN "user.kvfs.pin"
#define NAME_QUOTA "user.kvfs.quota"
#define NAME_USAGE "user.kvfs.quota.usage"
#define NAME_LEASE "user.kvfs.lease"
#define NAME_RETIRE "user.kvfs.retire"

#define VALUE_MAX 64u
#define GROUPS_MAX 256
/* A smaller quota is a typing error. */
#define QUOTA_MIN (UINT64_C(1) << 20)

/* ---- Who may ---- */

/* Root, and whoever runs the daemon. */
static bool is_privileged(fuse_req_t req)
{
	uid_t uid = fuse_req_ctx(req)->uid;

	return uid == 0 || uid == geteuid();
}

bool kv_keep_may_see(fuse_req_t req, const char *name)
{
	struct kv_inode root;

	return strcmp(name, NAME_STATUS) != 0 || is_privileged(req) ||
	       (kv_index_get(kv_daemon_of(req)->index, KV_ROOT_INO, &root) == 0 &&
		       fuse_req_ctx(req)->uid == root.uid);
}

static bool is_in_group(fuse_req_t req, gid_t group)
{
	gid_t groups[GROUPS_MAX];
	int n;

	if (fuse_req_ctx(req)->gid == group)
		return true;
	n = fuse_req_getgroups(req, GROUPS_MAX, groups);
	for (int i = 0; i < n && i < GROUPS_MAX; i++)
		if (groups[i] == group)
			return true;
	return false;
}

/* Whether the caller may remove and make names in DIRECTORY. */
static bool may_change_names(fuse_req_t req, const struct kv_inode *directory)
{
	const unsigned wanted = 3; /* write, search */
	unsigned bits;

	if (is_privileged(req))
		return true;
	if (fuse_req_ctx(req)->uid == directory->uid)
		bits = directory->mode >> 6;
	else if (is_in_group(req, directory->gid))
		bits = directory->mode >> 3;
	else
		bits = directory->mode;
	return (bits & wanted) == wanted;
}

/* ---- Pins ---- */

static int set_pin(fuse_req_t req, struct kv_node *node, bool pin)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	struct kv_inode inode;
	int r = kv_index_get(daemon->index, node->ino, &inode);

	if (r < 0)
		return r;
	if (!is_privileged(req) && fuse_req_ctx(req)->uid != inode.uid)
		return -EPERM;
	return kv_index_pin(daemon->index, node->ino, pin, is_privileged(req), &inode);
}

static int set_pin_value(fuse_req_t req, struct kv_node *node, const char *value)
{
	if (strcmp(value, "1") != 0 && strcmp(value, "0") != 0)
		return -EINVAL;
	return set_pin(req, node, *value == '1');
}

/* ---- Quotas ---- */

static int set_quota(fuse_req_t req, struct kv_node *node, uint64_t bytes)
{
	struct kv_daemon *daemon = kv_daemon_of(req);

	if (!is_privileged(req))
		return -EPERM;
	if (node->kind != KV_NODE_DIRECTORY)
		return -ENOTDIR;
	return kv_core_set_quota(daemon->core, node->ino, bytes / KV_BLOCK_SIZE);
}

static int set_quota_value(fuse_req_t req, struct kv_node *node, const char *value)
{
	uint64_t bytes = 0;

	if (strcmp(value, "none") != 0 && kv_parse_size(value, &bytes) < 0)
		return -EINVAL;
	if (bytes != 0 && (bytes < QUOTA_MIN || bytes > KV_FILE_SIZE_MAX))
		return -ERANGE;
	return set_quota(req, node, bytes);
}

/* ---- Retiring ---- */

/* As for rmdir of DIRECTORY: names in its parent, and it or the parent is the caller's own where
 * the parent is sticky; its content goes along, so it must be the caller's own in any case. */
static int may_retire(fuse_req_t req, const struct kv_inode *directory)
{
	struct kv_inode parent;
	uid_t uid = fuse_req_ctx(req)->uid;
	int r = kv_index_get(kv_daemon_of(req)->index, directory->parent, &parent);

	if (r < 0)
		return r;
	if (is_privileged(req))
		return 0;
	if (uid != directory->uid && uid != parent.uid)
		return -EPERM;
	return may_change_names(req, &parent) ? 0 : -EACCES;
}

static int retire(fuse_req_t req, struct kv_node *node, const char *unless, size_t size)
{
	struct kv_daemon *daemon = kv_daemon_of(req);
	const struct kv_retire request = {
		.ino = node->ino,
		.unless = unless,
		.unless_size = size,
		.now_ns = kv_core_now_ns(daemon->core),
	};
	struct kv_inode directory;
	struct kv_inode fresh;
	char name[KV_NAME_MAX + 1];
	uint64_t parent;
	int r;

	if (node->kind != KV_NODE_DIRECTORY)
		return -ENOTDIR;
	r = kv_index_get(daemon->index, node->ino, &directory);
	if (r == 0)
		r = may_retire(req, &directory);
	if (r == 0)
		r = kv_index_retire(daemon->index, &request, &fresh);
	if (r != 1)
		return r;
	if (kv_index_name(daemon->index, fresh.ino, &parent, name) == 0) {
		uint64_t id = kv_node_directory_id(daemon, parent);

		/* With the entry go all below it that nobody uses. */
		if (id != 0) {
			(void)kv_notify_entry(daemon->notify, id, name, strlen(name));
			(void)kv_notify_attributes(daemon->notify, id);
		}
	}
	directory.nlink = 0;
	kv_core_retired(daemon->core, node->ino);
	(void)kv_node_orphan(daemon, &directory);
	return 0;
}

/* ---- Setting ---- */

bool kv_keep_has(const char *name)
{
	static const char *const names[] = {
		NAME_PIN, NAME_QUOTA, NAME_USAGE, NAME_LEASE, NAME_RETIRE};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (strcmp(name, names[i]) == 0)
			return true;
	return false;
}

void kv_keep_set(
	fuse_req_t req, struct kv_node *node, const char *name, const char *value, size_t size)
{
	char text[VALUE_MAX + 1];
	int r;

	if (strcmp(name, NAME_RETIRE) == 0) {
		/*
		 * At once: the caller holds the directory's lock in the kernel, for which some
		 * notice in the queue may be waiting. So the new directory is seen a moment later;
		 * who comes to the old one meanwhile is sent to look it up again.
		 */
		r = retire(req, node, value, size);
		kv_reply_error(req, r == -ENOENT ? -ESTALE : r);
		return;
	}
	if (size > VALUE_MAX) {
		kv_reply_error(req, EINVAL);
		return;
	}
	memcpy(text, value, size);
	text[size] = '\0';
	if (strcmp(name, NAME_PIN) == 0)
		kv_reply_error(req, set_pin_value(req, node, text));
	else if (strcmp(name, NAME_QUOTA) == 0)
		kv_reply_error(req, set_quota_value(req, node, text));
	else
		kv_reply_error(req, EPERM);
}

void kv_keep_remove(fuse_req_t req, struct kv_node *node, const char *name)
{
	if (strcmp(name, NAME_PIN) == 0)
		kv_reply_error(req, set_pin(req, node, false));
	else if (strcmp(name, NAME_QUOTA) == 0)
		kv_reply_error(req, set_quota(req, node, 0));
	else
		kv_reply_error(req, EPERM);
}

/* ---- Reading ---- */

static uint64_t to_bytes(uint64_t blocks)
{
	return blocks > UINT64_MAX >> KV_BLOCK_SHIFT ? UINT64_MAX : blocks << KV_BLOCK_SHIFT;
}

/* The domain of INODE; what has no quota has the store's. */
static int domain_of(
	struct kv_daemon *daemon, const struct kv_inode *inode, struct kv_domain_info *ret_info)
{
	struct kv_space_usage space;
	int r = kv_index_domain(daemon->index, inode->domain, ret_info);

	if (r < 0 || inode->domain != 0)
		return r;
	kv_space_usage(kv_index_space(daemon->index), &space);
	ret_info->limit = space.total;
	ret_info->pin_limit = space.total / 8 * KV_PIN_SHARE;
	return 0;
}

static int print_usage(FILE *out, struct kv_daemon *daemon, const struct kv_inode *inode)
{
	struct kv_domain_info info;
	int r = domain_of(daemon, inode, &info);

	if (r < 0)
		return r;
	fprintf(out, "directory_ino %" PRIu64 "\n", info.ino != 0 ? info.ino : KV_ROOT_INO);
	fprintf(out, "own %d\n", info.ino == inode->ino);
	fprintf(out, "limit %" PRIu64 "\n", to_bytes(info.limit));
	fprintf(out, "used %" PRIu64 "\n", to_bytes(info.used));
	fprintf(out, "promised %" PRIu64 "\n", to_bytes(info.promised));
	fprintf(out, "pinned %" PRIu64 "\n", to_bytes(info.pinned));
	fprintf(out, "pin_limit %" PRIu64 "\n", to_bytes(info.pin_limit));
	fprintf(out, "inodes %" PRIu64 "\n", info.inodes);
	return 0;
}

static int print_quota(FILE *out, struct kv_daemon *daemon, const struct kv_inode *inode)
{
	struct kv_domain_info info;
	int r = kv_index_domain(daemon->index, inode->domain, &info);

	if (r < 0 || info.ino != inode->ino)
		return r < 0 ? r : -ENODATA;
	fprintf(out, "%" PRIu64, to_bytes(info.limit));
	return 0;
}

static int print_value(
	FILE *out, struct kv_daemon *daemon, const struct kv_inode *inode, const char *name)
{
	if (strcmp(name, NAME_USAGE) == 0)
		return print_usage(out, daemon, inode);
	if (strcmp(name, NAME_QUOTA) == 0)
		return print_quota(out, daemon, inode);
	if (strcmp(name, NAME_PIN) == 0 && !S_ISLNK(inode->mode))
		return fprintf(out, "%d", (inode->flags & KV_INODE_PINNED) != 0) < 0 ? -ENOMEM : 0;
	if (strcmp(name, NAME_LEASE) == 0 && S_ISREG(inode->mode))
		return fprintf(out, "%" PRId64, kv_core_lease_left(daemon->core, inode->ino)) < 0
			       ? -ENOMEM
			       : 0;
	return -ENODATA;
}

ssize_t kv_keep_get(struct kv_daemon *daemon, uint64_t ino, const char *name, char **ret_text)
{
	_cleanup_free_ char *text = NULL;
	struct kv_inode inode;
	size_t size = 0;
	FILE *out;
	int r = kv_index_get(daemon->index, ino, &inode);

	if (r < 0)
		return r;
	out = open_memstream(&text, &size);
	if (!out)
		return -ENOMEM;
	r = print_value(out, daemon, &inode, name);
	if (fclose(out) != 0 && r == 0)
		r = -ENOMEM;
	if (r < 0)
		return r;
	*ret_text = kv_steal_ptr(&text);
	return (ssize_t)size;
}
