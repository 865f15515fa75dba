/* SPDX-License-Identifier: Apache-2.0 */
/* The node table, and the life of a node: see node.h. */

#include "fs/node_internal.h"

#include <sys/stat.h>

#include "fs/parking.h"
#include "fs/takeover.h"
#include "fs/users.h"

#define NODE_STRIPES 256u

RB_HEAD(node_id_tree, kv_node);
RB_HEAD(node_ino_tree, kv_node);

struct kv_nodes {
	pthread_rwlock_t lock; /* guards what follows; a leaf */
	struct node_id_tree by_id;
	struct node_ino_tree by_ino;
	struct kv_takeover *takeover; /* or NULL */
	uint64_t next_id;
	uint64_t count;
	pthread_mutex_t stripes[NODE_STRIPES];
};

static int compare_u64(uint64_t a, uint64_t b)
{
	return a < b ? -1 : a > b;
}

static int compare_id(struct kv_node *a, struct kv_node *b)
{
	return compare_u64(a->id, b->id);
}

static int compare_ino(struct kv_node *a, struct kv_node *b)
{
	return compare_u64(a->ino, b->ino);
}

KV_TREE_GENERATE(node_id_tree, kv_node, by_id, compare_id)
KV_TREE_GENERATE(node_ino_tree, kv_node, by_ino, compare_ino)

static bool is_file_node(const struct kv_node *node)
{
	return node->kind == KV_NODE_PUBLISHED || node->kind == KV_NODE_WRITING;
}

/* ---- The table ---- */

pthread_mutex_t *kv_node_lock(struct kv_daemon *daemon, uint64_t ino)
{
	return &daemon->nodes->stripes[ino % NODE_STRIPES];
}

struct kv_node *kv_node_find(struct kv_daemon *daemon, uint64_t nodeid)
{
	struct kv_nodes *nodes = daemon->nodes;
	struct kv_node key = {.id = nodeid};
	struct kv_node *node;

	(void)pthread_rwlock_rdlock(&nodes->lock);
	node = RB_FIND(node_id_tree, &nodes->by_id, &key);
	(void)pthread_rwlock_unlock(&nodes->lock);
	return node;
}

struct kv_node *kv_node_find_plain(struct kv_daemon *daemon, uint64_t ino)
{
	struct kv_nodes *nodes = daemon->nodes;
	struct kv_node key = {.ino = ino};
	struct kv_node *node;

	(void)pthread_rwlock_rdlock(&nodes->lock);
	node = RB_FIND(node_ino_tree, &nodes->by_ino, &key);
	(void)pthread_rwlock_unlock(&nodes->lock);
	return node;
}

uint64_t kv_node_directory_id(struct kv_daemon *daemon, uint64_t ino)
{
	struct kv_node *node = kv_node_find_plain(daemon, ino);

	return node ? node->id : 0;
}

uint64_t kv_nodes_count(struct kv_nodes *nodes)
{
	uint64_t count;

	(void)pthread_rwlock_rdlock(&nodes->lock);
	count = nodes->count;
	(void)pthread_rwlock_unlock(&nodes->lock);
	return count;
}

uint64_t kv_nodes_writers(struct kv_nodes *nodes)
{
	struct kv_node *node;
	uint64_t count = 0;

	(void)pthread_rwlock_rdlock(&nodes->lock);
	RB_FOREACH (node, node_id_tree, &nodes->by_id)
		count += atomic_load(&node->write_opens);
	(void)pthread_rwlock_unlock(&nodes->lock);
	return count;
}

/* The table's lock is held. Ids of a mount that can be restarted outlive this process. */
static uint64_t next_id(struct kv_nodes *nodes, uint64_t ino, enum kv_node_kind kind)
{
	return nodes->takeover && ino != KV_ROOT_INO ? kv_takeover_add(nodes->takeover, ino, kind)
						     : nodes->next_id++;
}

struct kv_node *kv_node_new_plain(
	struct kv_nodes *nodes, uint64_t ino, enum kv_node_kind kind, uint64_t id)
{
	struct kv_node *node = calloc(1, sizeof(*node));

	if (!node)
		return NULL;
	node->ino = ino;
	node->kind = kind;
	(void)pthread_rwlock_wrlock(&nodes->lock);
	node->id = id != 0 ? id : next_id(nodes, ino, kind);
	nodes->count++;
	(void)RB_INSERT(node_id_tree, &nodes->by_id, node);
	if (!is_file_node(node))
		(void)RB_INSERT(node_ino_tree, &nodes->by_ino, node);
	(void)pthread_rwlock_unlock(&nodes->lock);
	return node;
}

int kv_nodes_new(struct kv_daemon *daemon, struct kv_nodes **ret_nodes)
{
	struct kv_nodes *nodes = calloc(1, sizeof(*nodes));
	struct kv_node *root;

	if (!nodes)
		return -ENOMEM;
	(void)pthread_rwlock_init(&nodes->lock, NULL);
	for (unsigned i = 0; i < NODE_STRIPES; i++)
		(void)pthread_mutex_init(&nodes->stripes[i], NULL);
	RB_INIT(&nodes->by_id);
	RB_INIT(&nodes->by_ino);
	nodes->takeover = daemon->takeover;
	nodes->next_id = FUSE_ROOT_ID;
	root = kv_node_new_plain(nodes, KV_ROOT_INO, KV_NODE_DIRECTORY, 0);
	if (!root) {
		free(nodes);
		return -ENOMEM;
	}
	root->lookups = 1; /* the mount's own, never forgotten */
	daemon->nodes = nodes;
	*ret_nodes = nodes;
	return 0;
}

/* ---- The nodes of one file (its stripe held) ---- */

struct kv_node *kv_node_first(struct kv_file *file)
{
	return *kv_file_cookie(file);
}

static void file_nodes_add(struct kv_file *file, struct kv_node *node)
{
	node->sibling = kv_node_first(file);
	*kv_file_cookie(file) = node;
}

static void file_nodes_remove(struct kv_file *file, struct kv_node *node)
{
	struct kv_node *other = kv_node_first(file);

	if (other == node) {
		*kv_file_cookie(file) = node->sibling;
		return;
	}
	while (other->sibling != node)
		other = other->sibling;
	other->sibling = node->sibling;
}

struct kv_node *kv_node_published_of(struct kv_file *file)
{
	for (struct kv_node *node = kv_node_first(file); node; node = node->sibling)
		if (node->kind == KV_NODE_PUBLISHED && !node->retired)
			return node;
	return NULL;
}

struct kv_node *kv_node_any_writer(struct kv_file *file)
{
	for (struct kv_node *node = kv_node_first(file); node; node = node->sibling)
		if (node->kind == KV_NODE_WRITING && node->active)
			return node;
	return NULL;
}

struct kv_node *kv_node_any_draft(struct kv_file *file)
{
	for (struct kv_node *node = kv_node_first(file); node; node = node->sibling)
		if (node->kind == KV_NODE_WRITING && node->active && node->version)
			return node;
	return NULL;
}

struct kv_node *kv_node_writer_of(struct kv_file *file, pid_t process)
{
	for (struct kv_node *node = kv_node_first(file); node; node = node->sibling)
		if (node->kind == KV_NODE_WRITING && node->active && node->writer == process)
			return node;
	return NULL;
}

struct kv_node *kv_node_new(
	struct kv_daemon *daemon, uint64_t ino, enum kv_node_kind kind, uint64_t id)
{
	_cleanup_free_ struct kv_draft *draft = NULL;
	struct kv_file *file;
	struct kv_node *node;

	if (kind == KV_NODE_WRITING) {
		draft = malloc(sizeof(*draft));
		if (!draft)
			return NULL;
		kv_draft_init(draft);
	}
	if (kv_file_get(daemon->core, ino, &file) < 0)
		return NULL;
	node = kv_node_new_plain(daemon->nodes, ino, kind, id);
	if (!node) {
		kv_file_put(file);
		return NULL;
	}
	node->draft = kv_steal_ptr(&draft);
	node->file = file;
	file_nodes_add(file, node);
	return node;
}

static bool is_pending(const struct kv_daemon *daemon, const struct kv_node *node)
{
	return node->pending_since_ns != 0 &&
	       kv_core_now_ns(daemon->core) - node->pending_since_ns < KV_NODE_PENDING_NS;
}

/* Its memory, and what it refers to. The lock of the file's nodes is held. */
static void node_done(struct kv_node *node)
{
	if (node->old_handle) {
		if (!node->kept)
			kv_version_close(node->version);
		kv_file_closed(node->file);
		free(node->old_handle);
	}
	if (node->file) {
		file_nodes_remove(node->file, node);
		kv_version_unref(node->version);
		if (node->orphan)
			kv_file_closed(node->file);
		kv_file_put(node->file);
	}
	if (node->draft)
		kv_draft_done(node->draft);
	free(node->draft);
	kv_user_unref(node->user);
	free(node);
}

/* The table's lock is held. */
static void leave_table(struct kv_nodes *nodes, struct kv_node *node)
{
	(void)RB_REMOVE(node_id_tree, &nodes->by_id, node);
	if (!is_file_node(node))
		(void)RB_REMOVE(node_ino_tree, &nodes->by_ino, node);
	nodes->count--;
	if (nodes->takeover)
		kv_takeover_remove(nodes->takeover, node->id);
}

void kv_node_free_if_unused(struct kv_daemon *daemon, struct kv_node *node)
{
	struct kv_nodes *nodes = daemon->nodes;

	if (node->lookups > 0 || node->opens > 0 || is_pending(daemon, node))
		return;
	(void)pthread_rwlock_wrlock(&nodes->lock);
	leave_table(nodes, node);
	(void)pthread_rwlock_unlock(&nodes->lock);
	if (node->orphan && !node->file)
		kv_core_orphan(daemon->core, node->ino);
	node_done(node);
}

void kv_node_expire(struct kv_daemon *daemon, uint64_t ino, uint64_t nodeid)
{
	KV_LOCKED(kv_node_lock(daemon, ino));
	struct kv_node *node = kv_node_find(daemon, nodeid);

	if (node)
		kv_node_free_if_unused(daemon, node);
}

/* True if the kernel knows a node of FILE. */
bool kv_node_orphan_file(struct kv_daemon *daemon, struct kv_file *file)
{
	bool known = false;

	/* To the core a node that the kernel knows is an open one from here on. */
	for (struct kv_node *node = kv_node_first(file); node; node = node->sibling) {
		if (!node->orphan)
			kv_file_opened(file);
		node->orphan = true;
		known = true;
	}
	kv_core_orphan(daemon->core, kv_file_ino(file));
	kv_parking_wake(daemon->parking, kv_parking_key(kv_file_ino(file), KV_PARKING_PUBLISH));
	return known;
}

bool kv_node_orphan(struct kv_daemon *daemon, const struct kv_inode *inode)
{
	KV_LOCKED(kv_node_lock(daemon, inode->ino));
	struct kv_node *node = S_ISREG(inode->mode) ? NULL : kv_node_find_plain(daemon, inode->ino);
	struct kv_file *file = node ? NULL : kv_file_find(daemon->core, inode->ino);
	bool known = node != NULL;

	if (node)
		node->orphan = true;
	else if (file)
		known = kv_node_orphan_file(daemon, file);
	else
		kv_core_orphan(daemon->core, inode->ino);
	kv_file_put(file);
	return known;
}

/* Frees the node with the least id. False if there is none left. */
static bool free_any(struct kv_nodes *nodes)
{
	struct kv_node *node;
	uint64_t ino;

	(void)pthread_rwlock_rdlock(&nodes->lock);
	node = RB_MIN(node_id_tree, &nodes->by_id);
	ino = node ? node->ino : 0;
	(void)pthread_rwlock_unlock(&nodes->lock);
	if (!node)
		return false;
	KV_LOCKED(&nodes->stripes[ino % NODE_STRIPES]);
	(void)pthread_rwlock_wrlock(&nodes->lock);
	node = RB_MIN(node_id_tree, &nodes->by_id);
	/* An expired one may just have gone by itself. */
	if (node && node->ino == ino)
		leave_table(nodes, node);
	else
		node = NULL;
	(void)pthread_rwlock_unlock(&nodes->lock);
	if (node)
		node_done(node);
	return true;
}

void kv_nodes_clear(struct kv_nodes *nodes)
{
	while (nodes && free_any(nodes))
		continue;
}

struct kv_nodes *kv_nodes_free(struct kv_nodes *nodes)
{
	if (!nodes)
		return NULL;
	kv_nodes_clear(nodes);
	for (unsigned i = 0; i < NODE_STRIPES; i++)
		(void)pthread_mutex_destroy(&nodes->stripes[i]);
	(void)pthread_rwlock_destroy(&nodes->lock);
	free(nodes);
	return NULL;
}

void kv_node_set_lookups(struct kv_daemon *daemon, struct kv_node *node, uint64_t lookups)
{
	node->lookups = lookups;
	if (daemon->takeover)
		kv_takeover_set_lookups(daemon->takeover, node->id, lookups);
}

void kv_node_forget(struct kv_daemon *daemon, struct kv_node *node, uint64_t lookups)
{
	KV_LOCKED(kv_node_lock(daemon, node->ino));

	assert(node->lookups >= lookups);
	kv_node_set_lookups(daemon, node, node->lookups - lookups);
	kv_node_free_if_unused(daemon, node);
}

void kv_node_opened(struct kv_node *node, bool may_write)
{
	node->opens++;
	if (may_write)
		node->write_opens++;
	kv_file_opened(node->file);
}

void kv_node_closed(struct kv_daemon *daemon, struct kv_node *node, bool may_write)
{
	assert(node->opens > 0);
	node->opens--;
	if (may_write)
		node->write_opens--;
	if (node->opens == 0)
		node->mode = KV_NODE_CLOSED;
	kv_file_closed(node->file);
	kv_node_free_if_unused(daemon, node);
}
