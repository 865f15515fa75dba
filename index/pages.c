/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Walks the trees of an LMDB file: from the newest root down, each page checked as a whole before
 * anything in it is used. What lies below a page that is not sound is left out.
 */
#include "index/pages.h"

#include <fcntl.h>
#include <stdio.h>

#include "fs/base.h"

/*
 *   page   [8 number] [2 pad] [2 flags] [2 lower] [2 upper], or of overflow pages [4 pages]
 *          [2 offset of a node] x (lower - 16) / 2, nodes from upper to the end
 *   node   [2 low] [2 high] [2 flags] [2 key size] [key] [value]
 *          leaf: low and high are the value's size; branch: with flags the number of a page
 *   meta   behind the page's header: [4 magic] [4 version] [8 address] [8 map size]
 *          [48 free tree] [48 main tree] [8 last page] [8 transaction]
 *   tree   [4 page size, in the free tree] [2 flags] [2 depth] [8 branch, leaf, overflow pages]
 *          [8 entries] [8 root]
 */
#define PAGE_HEADER 16u
#define NODE_HEADER 8u
#define PAGE_BRANCH 0x01u
#define PAGE_LEAF 0x02u
#define PAGE_OVERFLOW 0x04u
#define PAGE_META 0x08u
#define NODE_BIG 0x01u
#define META_MAGIC 0xbeefc0deu
#define META_VERSION 1u
#define META_SIZE 136u
#define META_PAGES 2u
#define TREE_SIZE 48u
#define TREE_FREE_FLAGS 0x08u /* keys are integers */
#define ROOT_NONE UINT64_MAX
#define KEY_MAX 511u
#define DEPTH_MAX 32u
#define PAGE_SIZE_MIN 512u
#define PAGE_SIZE_MAX 32768u
/* Far above the largest of our records. */
#define VALUE_MAX (UINT64_C(1) << 20)
/* Far above the largest index. */
#define END_MAX (UINT64_C(1) << 40)

struct tree {
	uint16_t flags;
	uint16_t depth;
	uint64_t branch_pages;
	uint64_t leaf_pages;
	uint64_t overflow_pages;
	uint64_t entries;
	uint64_t root;
};

struct meta {
	uint32_t page_size;
	uint64_t last_page;
	uint64_t txn;
	struct tree free;
	struct tree main;
};

/* A key of a page above, which stays where it is while the walk is below it. */
struct bound {
	const uint8_t *key; /* NULL: none */
	size_t size;
};

struct level {
	uint8_t *page;
	unsigned next; /* node to go down at */
	struct bound low;
	struct bound high;
};

struct walk {
	const struct kv_pages *pages;
	struct meta meta;
	uint64_t *seen; /* a bit a page: it is in a tree, or free */
	struct level levels[DEPTH_MAX];
	uint8_t *value; /* of VALUE_MAX and a page */
	bool is_free_tree;
	struct tree found; /* counted */
	bool pruned;       /* something was left out: the counts tell nothing */
	ssize_t damages;
};

struct node {
	const uint8_t *key;
	size_t key_size;
	uint64_t size; /* leaf: of the value */
	uint64_t page; /* branch */
	bool big;
	const uint8_t *value;
};

static void damage(struct walk *walk, uint64_t page, const char *what)
{
	walk->damages++;
	walk->pruned = true;
	if (walk->pages->damage)
		walk->pages->damage(walk->pages->arg, page, what);
}

static bool read_at(int fd, uint8_t *memory, size_t size, uint64_t offset)
{
	while (size > 0) {
		ssize_t n = pread(fd, memory, size, (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return false;
		memory += n;
		size -= (size_t)n;
		offset += (uint64_t)n;
	}
	return true;
}

/* ---- Meta pages ---- */

static struct tree tree_decode(const uint8_t *p)
{
	return (struct tree){
		.flags = kv_get_le16(p + 4),
		.depth = kv_get_le16(p + 6),
		.branch_pages = kv_get_le64(p + 8),
		.leaf_pages = kv_get_le64(p + 16),
		.overflow_pages = kv_get_le64(p + 24),
		.entries = kv_get_le64(p + 32),
		.root = kv_get_le64(p + 40),
	};
}

/* NULL, or what is wrong. */
static const char *meta_decode(const uint8_t *page, unsigned number, struct meta *ret_meta)
{
	const uint8_t *p = page + PAGE_HEADER;
	struct meta meta = {
		.page_size = kv_get_le32(p + 24),
		.free = tree_decode(p + 24),
		.main = tree_decode(p + 24 + TREE_SIZE),
		.last_page = kv_get_le64(p + 24 + 2 * TREE_SIZE),
		.txn = kv_get_le64(p + 32 + 2 * TREE_SIZE),
	};

	if (kv_get_le64(page) != number || kv_get_le16(page + 10) != PAGE_META)
		return "no meta page";
	if (kv_get_le32(p) != META_MAGIC || kv_get_le32(p + 4) != META_VERSION)
		return "not one of LMDB, version 1";
	if (meta.page_size < PAGE_SIZE_MIN || meta.page_size > PAGE_SIZE_MAX ||
		(meta.page_size & (meta.page_size - 1)) != 0)
		return "page size";
	/* The file may end before: pages that a transaction took and gave back are not written.
	 * Where it ends before a page of a tree, the walk tells. */
	if (meta.last_page < META_PAGES - 1 || meta.last_page >= END_MAX / meta.page_size)
		return "last page";
	if (meta.free.flags != TREE_FREE_FLAGS || meta.main.flags != 0)
		return "flags";
	if (meta.txn != 0 && (meta.txn & 1) != number)
		return "transaction number";
	*ret_meta = meta;
	return NULL;
}

/* The newest sound one. */
static int choose_meta(struct walk *walk)
{
	uint8_t page[PAGE_HEADER + META_SIZE];
	const char *wrong[META_PAGES];
	struct meta metas[META_PAGES];
	uint64_t at = 0;
	int chosen = -1;

	for (unsigned i = 0; i < META_PAGES; i++) {
		/* Where the second one is, the first one says; else it is where it usually is. */
		at = i == 0 ? 0 : chosen == 0 ? metas[0].page_size : KV_BLOCK_SIZE;
		wrong[i] = read_at(walk->pages->fd, page, sizeof(page), at)
				   ? meta_decode(page, i, &metas[i])
				   : "cannot be read";
		if (!wrong[i] && at != i * (uint64_t)metas[i].page_size)
			wrong[i] = "page size";
		if (!wrong[i] && (chosen < 0 || metas[i].txn > metas[chosen].txn))
			chosen = (int)i;
	}
	for (unsigned i = 0; i < META_PAGES; i++)
		if (wrong[i])
			damage(walk, i, wrong[i]);
	if (chosen < 0)
		return -EUCLEAN;
	walk->meta = metas[chosen];
	return 0;
}

/* ---- Pages ---- */

static bool page_take(struct walk *walk, uint64_t number)
{
	uint64_t bit = UINT64_C(1) << (number % 64);

	if (number < META_PAGES || number > walk->meta.last_page || walk->seen[number / 64] & bit)
		return false;
	walk->seen[number / 64] |= bit;
	return true;
}

static unsigned page_nodes(const uint8_t *page)
{
	return (kv_get_le16(page + 12) - PAGE_HEADER) / 2;
}

static bool page_is_leaf(const uint8_t *page)
{
	return kv_get_le16(page + 10) == PAGE_LEAF;
}

static struct node page_node(const uint8_t *page, unsigned number)
{
	const uint8_t *p = page + kv_get_le16(page + PAGE_HEADER + 2 * (size_t)number);
	uint64_t low = kv_get_le16(p) | (uint64_t)kv_get_le16(p + 2) << 16;
	uint16_t flags = kv_get_le16(p + 4);
	size_t key_size = kv_get_le16(p + 6);

	return (struct node){
		.key = p + NODE_HEADER,
		.key_size = key_size,
		.size = low,
		.page = low | (uint64_t)flags << 32,
		.big = flags & NODE_BIG,
		.value = p + NODE_HEADER + key_size,
	};
}

/* The order of LMDB: bytes, then length; integers in the free tree, which are little-endian. */
static int key_compare(
	const struct walk *walk, const uint8_t *a, size_t a_size, const uint8_t *b, size_t b_size)
{
	int r;

	if (walk->is_free_tree) {
		uint64_t x = kv_get_le64(a), y = kv_get_le64(b);

		return (x > y) - (x < y);
	}
	r = memcmp(a, b, a_size < b_size ? a_size : b_size);
	return r != 0 ? r : (a_size > b_size) - (a_size < b_size);
}

/* Whether the node lies in the page's upper part, and is one that we write. */
static bool node_is_sound(const struct walk *walk, const uint8_t *page, unsigned number)
{
	size_t size = walk->meta.page_size;
	size_t at = kv_get_le16(page + PAGE_HEADER + 2 * (size_t)number);
	bool leaf = page_is_leaf(page);
	struct node node;
	size_t end;

	if (at < kv_get_le16(page + 14) || at % 2 != 0 || at + NODE_HEADER > size)
		return false;
	node = page_node(page, number);
	end = at + NODE_HEADER + node.key_size;
	if (node.key_size > KEY_MAX || end > size)
		return false;
	if (!leaf) /* the first key of a branch is not looked at, and may be empty */
		return number == 0 ||
		       (node.key_size > 0 && (!walk->is_free_tree || node.key_size == 8));
	if (node.key_size == 0 || (walk->is_free_tree && node.key_size != 8) ||
		kv_get_le16(page + at + 4) > NODE_BIG)
		return false;
	if (node.big)
		return end + 8 <= size;
	return node.size <= size - end;
}

/* Nodes must not share bytes. Marks them in a map of the page, two bytes a bit. */
static bool nodes_are_apart(const struct walk *walk, const uint8_t *page)
{
	uint64_t taken[PAGE_SIZE_MAX / 2 / 64] = {0};
	bool leaf = page_is_leaf(page);

	for (unsigned i = 0; i < page_nodes(page); i++) {
		struct node node = page_node(page, i);
		size_t from = kv_get_le16(page + PAGE_HEADER + 2 * (size_t)i) / 2;
		size_t size = NODE_HEADER + node.key_size +
			      (!leaf             ? 0
				      : node.big ? 8
						 : (size_t)node.size);

		for (size_t at = from; at < from + (size + 1) / 2; at++) {
			if (at >= walk->meta.page_size / 2 || taken[at / 64] >> (at % 64) & 1)
				return false;
			taken[at / 64] |= UINT64_C(1) << (at % 64);
		}
	}
	return true;
}

static bool keys_ascend(const struct walk *walk, const struct level *level)
{
	const uint8_t *page = level->page;
	unsigned first = page_is_leaf(page) ? 0 : 1;
	const uint8_t *last = level->low.key;
	size_t last_size = level->low.size;
	bool may_equal = page_is_leaf(page); /* a leaf's first may be the key that leads to it */

	for (unsigned i = first; i < page_nodes(page); i++) {
		struct node node = page_node(page, i);
		int order = last ? key_compare(walk, last, last_size, node.key, node.key_size) : -1;

		if (order > 0 || (order == 0 && !may_equal))
			return false;
		last = node.key;
		last_size = node.key_size;
		may_equal = false;
	}
	return !last || !level->high.key ||
	       key_compare(walk, last, last_size, level->high.key, level->high.size) < 0;
}

/* NULL, or what is wrong with the page in LEVEL, which is to be page NUMBER. */
static const char *page_check(const struct walk *walk, const struct level *level, uint64_t number)
{
	const uint8_t *page = level->page;
	uint16_t flags = kv_get_le16(page + 10);
	uint16_t lower = kv_get_le16(page + 12);
	uint16_t upper = kv_get_le16(page + 14);
	unsigned count;

	if (kv_get_le64(page) != number)
		return "another page's number";
	if (flags != PAGE_LEAF && flags != PAGE_BRANCH)
		return "page flags";
	if (lower < PAGE_HEADER || lower % 2 != 0 || lower > upper || upper > walk->meta.page_size)
		return "page bounds";
	count = page_nodes(page);
	/* LMDB leaves branches of one in the tree of free pages alone. */
	if (count < (flags == PAGE_BRANCH && !walk->is_free_tree ? 2u : 1u))
		return "too few nodes";
	for (unsigned i = 0; i < count; i++)
		if (!node_is_sound(walk, page, i))
			return "a node outside of its page";
	if (!nodes_are_apart(walk, page))
		return "nodes that overlap";
	return keys_ascend(walk, level) ? NULL : "keys out of order";
}

/* Reads page NUMBER for LEVEL, whose bounds are set. */
static bool page_enter(struct walk *walk, unsigned depth, uint64_t number)
{
	struct level *level = &walk->levels[depth];
	const char *wrong;

	if (!page_take(walk, number)) {
		damage(walk, number, "a page that is used twice, or does not exist");
		return false;
	}
	level->next = 0;
	if (!read_at(walk->pages->fd, level->page, walk->meta.page_size,
		    number * walk->meta.page_size)) {
		damage(walk, number, "cannot be read");
		return false;
	}
	wrong = page_check(walk, level, number);
	if (wrong)
		damage(walk, number, wrong);
	return !wrong;
}

/* ---- Records ---- */

/* A value on pages of its own. */
static const uint8_t *big_value(struct walk *walk, const struct node *node)
{
	uint64_t number = kv_get_le64(node->value);
	uint64_t count = (PAGE_HEADER - 1 + node->size) / walk->meta.page_size + 1;
	size_t page_size = walk->meta.page_size;

	if (node->size > VALUE_MAX || number > walk->meta.last_page ||
		count > walk->meta.last_page - number + 1) {
		damage(walk, number, "a value outside of the file");
		return NULL;
	}
	for (uint64_t i = 0; i < count; i++)
		if (!page_take(walk, number + i)) {
			damage(walk, number + i, "a page that is used twice");
			return NULL;
		}
	if (!read_at(walk->pages->fd, walk->value, (size_t)count * page_size, number * page_size)) {
		damage(walk, number, "cannot be read");
		return NULL;
	}
	if (kv_get_le64(walk->value) != number || kv_get_le16(walk->value + 10) != PAGE_OVERFLOW ||
		kv_get_le32(walk->value + 12) != count) {
		damage(walk, number, "a value's page that is none");
		return NULL;
	}
	walk->found.overflow_pages += count;
	return walk->value + PAGE_HEADER;
}

/* A record of the free tree: a transaction, and the pages that it freed, descending. */
static void free_list(struct walk *walk, const uint8_t *value, uint64_t size)
{
	uint64_t count = size >= 8 ? kv_get_le64(value) : 0;
	uint64_t last = UINT64_MAX;

	if (size < 8 || count > size / 8 - 1) {
		damage(walk, 0, "a list of free pages that is cut short");
		return;
	}
	for (uint64_t i = 0; i < count; i++) {
		uint64_t number = kv_get_le64(value + 8 + 8 * i);

		if (number >= last || !page_take(walk, number)) {
			damage(walk, number, "free, and used or free elsewhere, too");
			return;
		}
		last = number;
	}
}

static int leaf_records(struct walk *walk, const uint8_t *page)
{
	const struct kv_pages *pages = walk->pages;

	for (unsigned i = 0; i < page_nodes(page); i++) {
		struct node node = page_node(page, i);
		const uint8_t *value = node.big ? big_value(walk, &node) : node.value;
		int r = 0;

		walk->found.entries++;
		if (!value)
			continue;
		if (walk->is_free_tree)
			free_list(walk, value, node.size);
		else if (pages->record)
			r = pages->record(
				pages->arg, node.key, node.key_size, value, (size_t)node.size);
		if (r < 0)
			return r;
	}
	return 0;
}

/* ---- Trees ---- */

/* Goes to the next child of the branch at DEPTH: false if there is none. */
static bool next_child(struct walk *walk, unsigned depth, uint64_t *ret_number)
{
	struct level *level = &walk->levels[depth];
	struct level *below = &walk->levels[depth + 1];
	unsigned count = page_nodes(level->page);
	unsigned i = level->next;
	struct node node;

	if (i >= count)
		return false;
	node = page_node(level->page, i);
	below->low = i > 0 ? (struct bound){node.key, node.key_size} : level->low;
	below->high = level->high;
	if (i + 1 < count) {
		struct node next = page_node(level->page, i + 1);

		below->high = (struct bound){next.key, next.key_size};
	}
	level->next++;
	*ret_number = node.page;
	return true;
}

/* The page at DEPTH was entered: 1 if the walk is to go on below it. */
static int page_visit(struct walk *walk, unsigned depth, const struct tree *tree)
{
	const uint8_t *page = walk->levels[depth].page;

	if (!page_is_leaf(page)) {
		walk->found.branch_pages++;
		if (depth + 1 < tree->depth)
			return 1;
		damage(walk, kv_get_le64(page), "a branch where a leaf belongs");
		return 0;
	}
	walk->found.leaf_pages++;
	if (depth + 1 == tree->depth)
		return leaf_records(walk, page);
	damage(walk, kv_get_le64(page), "a leaf where a branch belongs");
	return 0;
}

static int walk_below(struct walk *walk, const struct tree *tree)
{
	unsigned depth = 0;
	uint64_t number;
	int r;

	walk->levels[0].low = walk->levels[0].high = (struct bound){0};
	if (!page_enter(walk, 0, tree->root))
		return 0;
	r = page_visit(walk, 0, tree);
	while (r >= 0) {
		if (r == 1 && next_child(walk, depth, &number)) {
			if (!page_enter(walk, depth + 1, number))
				continue;
			r = page_visit(walk, depth + 1, tree);
			if (r == 1)
				depth++;
			else if (r == 0)
				r = 1;
			continue;
		}
		if (r == 0 || depth == 0)
			return 0;
		depth--;
	}
	return r;
}

static int walk_tree(struct walk *walk, const struct tree *tree, bool is_free_tree)
{
	int r;

	walk->is_free_tree = is_free_tree;
	walk->found = (struct tree){0};
	walk->pruned = false;
	if (tree->root == ROOT_NONE) {
		if (tree->depth != 0 || tree->entries != 0)
			damage(walk, 0, "a tree without a root");
		return 0;
	}
	if (tree->depth == 0 || tree->depth > DEPTH_MAX) {
		damage(walk, tree->root, "the depth of a tree");
		return 0;
	}
	r = walk_below(walk, tree);
	if (r == 0 && !walk->pruned &&
		(walk->found.branch_pages != tree->branch_pages ||
			walk->found.leaf_pages != tree->leaf_pages ||
			walk->found.overflow_pages != tree->overflow_pages ||
			walk->found.entries != tree->entries))
		damage(walk, tree->root, "the counts of a tree");
	return r;
}

static int walk_init(struct walk *walk)
{
	size_t page_size = walk->meta.page_size;

	walk->seen = calloc(walk->meta.last_page / 64 + 1, sizeof(uint64_t));
	walk->value = malloc(VALUE_MAX + 2 * page_size);
	if (!walk->seen || !walk->value)
		return -ENOMEM;
	for (unsigned i = 0; i < DEPTH_MAX; i++) {
		walk->levels[i].page = malloc(page_size);
		if (!walk->levels[i].page)
			return -ENOMEM;
	}
	return 0;
}

static void walk_free(struct walk *walk)
{
	for (unsigned i = 0; i < DEPTH_MAX; i++)
		free(walk->levels[i].page);
	free(walk->seen);
	free(walk->value);
	free(walk);
}

int kv_pages_open(const char *path)
{
	_cleanup_free_ char *file = NULL;
	int fd;

	if (asprintf(&file, "%s/data.mdb", path) < 0) {
		file = NULL;
		return -ENOMEM;
	}
	fd = open(file, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

ssize_t kv_pages_check(const struct kv_pages *pages)
{
	struct walk *walk = calloc(1, sizeof(*walk));
	ssize_t r;

	if (!walk)
		return -ENOMEM;
	walk->pages = pages;
	r = choose_meta(walk);
	if (r == 0)
		r = walk_init(walk);
	if (r == 0)
		r = walk_tree(walk, &walk->meta.main, false);
	if (r == 0)
		r = walk_tree(walk, &walk->meta.free, true);
	if (r == 0)
		r = walk->damages;
	walk_free(walk);
	return r;
}
