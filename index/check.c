/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that the tables of an index agree with each other. */
#include "index/check.h"

#include <stdio.h>
#include <sys/stat.h>

#include "index/space_internal.h"
#include "index/tally.h"

struct check {
	struct kv_index *index;
	struct kv_view view;
	const struct kv_check_to *to;
	ssize_t violations;
	struct kv_tally tally;
	uint64_t inodes;
	uint64_t held_inodes;
	struct kv_domain_record *domains; /* what they should count */
};

/* What a violation is about; zero: the store. */
struct about {
	uint64_t ino;
	const struct kv_extent *extent;
};
#define INODE(number) (&(const struct about){.ino = (number)})

static void report(struct check *check, const struct about *about, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

static void report(struct check *check, const struct about *about, const char *format, ...)
{
	_cleanup_free_ char *path = NULL;
	struct kv_violation violation = {.ino = about ? about->ino : 0};
	char text[256];
	va_list args;

	check->violations++;
	if (!check->to->tell)
		return;
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	violation.text = text;
	if (violation.ino != 0)
		path = kv_view_path(&check->view, violation.ino);
	violation.path = path;
	if (about && about->extent) {
		violation.has_blocks = true;
		violation.device = about->extent->device;
		violation.block = about->extent->start;
		violation.blocks = about->extent->count;
	}
	check->to->tell(check->to->arg, &violation);
}

#define U(x) ((unsigned long long)(x))

/* A record that cannot be read is a violation; other errors end the check. */
static int damaged(struct check *check, const struct kv_key *key, int r)
{
	uint8_t table = key->bytes[0];
	bool of_device = table == KV_TABLE_SPACE_GROUP || table == KV_TABLE_SPACE_SUMMARY ||
			 table == KV_TABLE_REFCOUNT;

	if (r != -EUCLEAN && r != -ENOENT)
		return r;
	report(check,
		of_device ? NULL : INODE(table == KV_TABLE_USE ? kv_key_b(key) : kv_key_a(key)),
		"%s %llu, %llu: damaged, or what it points to is missing", kv_table_name(table),
		U(kv_key_a(key)), U(kv_key_b(key)));
	return 0;
}

typedef int check_record(
	struct check *check, const struct kv_key *key, const struct kv_value *value);

/* Calls EACH for the records whose keys begin as START, which has PREFIX_SIZE bytes of meaning. */
static int each_record(
	struct check *check, struct kv_key start, size_t prefix_size, check_record *each)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key;
	struct kv_value value;
	int r = kv_iter_init(&iter, &check->view, &start, prefix_size);

	while (r >= 0 && (r = kv_iter_next(&iter, &key, &value)) == 1) {
		r = each(check, &key, &value);
		if (r < 0)
			r = damaged(check, &key, r);
	}
	if (r != -EUCLEAN)
		return r;
	report(check, NULL, "%s: a key that is none", kv_table_name(start.bytes[0]));
	return 0;
}

static int each_of_table(struct check *check, enum kv_table table, check_record *each)
{
	struct kv_key start = {.size = KV_KEY_TABLE_SIZE, .bytes = {(uint8_t)table}};

	return each_record(check, start, KV_KEY_TABLE_SIZE, each);
}

/* ---- Chunk maps ---- */

static int check_extent(struct check *check, uint64_t ino, const struct kv_extent *extent)
{
	int r = kv_tally_hold(&check->tally, extent);

	if (r == -EUCLEAN)
		report(check, &(const struct about){ino, extent},
			"inode %llu: blocks at %llu of device %u belong to another, too", U(ino),
			U(extent->start), extent->device);
	return r == -EUCLEAN ? 0 : r;
}

static int check_segment(
	struct check *check, const struct kv_index_node *node, uint64_t number, uint64_t *blocks)
{
	uint64_t limit = kv_div_round_up(node->inode.size, KV_CHUNK_SIZE);
	struct kv_map_reader reader;
	struct kv_chunk chunk;
	int r = kv_view_segment(&check->view, node, number, &reader);

	while (r == 1 && (r = kv_view_next_chunk(&check->view, node, &reader, &chunk)) == 1) {
		if (chunk.number >= limit)
			report(check, INODE(node->inode.ino), "inode %llu: chunk %u behind its end",
				U(node->inode.ino), chunk.number);
		*blocks += kv_chunk_blocks(&chunk);
		for (uint32_t i = 0; i < chunk.extent_count; i++)
			if (check_extent(check, node->inode.ino, &chunk.extents[i]) < 0)
				return -ENOMEM;
	}
	return r;
}

static int check_map(struct check *check, const struct kv_index_node *node)
{
	uint64_t number = 0;
	uint64_t blocks = 0;
	int r;

	if (node->tail_size > 0) {
		r = check_segment(check, node, 0, &blocks);
	} else {
		while ((r = kv_view_next_segment(&check->view, node, &number)) == 1) {
			r = check_segment(check, node, number++, &blocks);
			if (r < 0)
				return r;
		}
	}
	if (r == 0 && blocks != node->inode.blocks)
		report(check, INODE(node->inode.ino), "inode %llu: counts %llu blocks, has %llu",
			U(node->inode.ino), U(node->inode.blocks), U(blocks));
	return r;
}

static int check_map_owner(
	struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	int r = kv_view_node(&check->view, kv_key_a(key), &node);

	(void)value;
	if (r == 0 && (!S_ISREG(node.inode.mode) || node.tail_size > 0 || node.inode.blocks == 0))
		report(check, INODE(kv_key_a(key)),
			"inode %llu: has a map segment it should not have", U(kv_key_a(key)));
	return r;
}

/* ---- Inodes and names ---- */

static int count_links(struct check *check, const struct kv_index_node *node, uint64_t *ret_links)
{
	struct kv_link_walk walk = {0};
	struct kv_place place;
	struct kv_entry entry;
	int r;

	*ret_links = 0;
	while ((r = kv_view_next_link(&check->view, node, &walk, &place)) == 1) {
		r = kv_view_entry_at(&check->view, &place, &entry);
		if (r < 0)
			return r;
		if (entry.record.ino != node->inode.ino)
			report(check, INODE(node->inode.ino), "inode %llu: a link names inode %llu",
				U(node->inode.ino), U(entry.record.ino));
		++*ret_links;
	}
	return r;
}

static int count_subdirectories(struct check *check, uint64_t ino, uint64_t *ret_count)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, ino, 0);
	struct kv_dirent_record record;
	struct kv_value value;
	int r = kv_iter_init(&iter, &check->view, &key, KV_KEY_SINGLE_SIZE);

	*ret_count = 0;
	while (r >= 0 && (r = kv_iter_next(&iter, &key, &value)) == 1) {
		r = kv_dirent_decode(value.data, value.size, &record);
		*ret_count += r == 0 && record.type == S_IFDIR;
	}
	return r;
}

static int check_path(struct check *check, const struct kv_index_node *node)
{
	uint64_t steps = check->index->inodes + check->index->held_inodes;
	struct kv_index_node at = *node;

	/* A retired directory, with what is below it, is on no path. */
	while (at.inode.ino != KV_ROOT_INO && !at.orphan) {
		int r = kv_view_node(&check->view, at.inode.parent, &at);

		if (r == 0 && !S_ISDIR(at.inode.mode))
			r = -ENOTDIR;

		if (r < 0 || steps-- == 0) {
			report(check, INODE(node->inode.ino), "inode %llu: no path to the root",
				U(node->inode.ino));
			return 0;
		}
	}
	return 0;
}

static int check_directory(struct check *check, const struct kv_index_node *node)
{
	uint64_t count;
	int r = count_subdirectories(check, node->inode.ino, &count);

	if (r < 0)
		return r;
	if (node->inode.nlink == 0)
		return 0; /* retired: its entries are worked off */
	if (node->inode.nlink != 2 + count)
		report(check, INODE(node->inode.ino),
			"directory %llu: link count %u, subdirectories %llu", U(node->inode.ino),
			node->inode.nlink, U(count));
	return check_path(check, node);
}

static int check_order(struct check *check, const struct kv_index_node *node)
{
	struct kv_key key = kv_key_pair(KV_TABLE_USE, node->order, node->inode.ino);
	struct kv_value value;
	int r = node->ordered ? kv_view_get(&check->view, &key, &value) : 0;

	if (r == -ENOENT)
		report(check, INODE(node->inode.ino), "inode %llu: not in the use order",
			U(node->inode.ino));
	return r == -ENOENT ? 0 : r;
}

/* ---- Quota domains ---- */

/* The domain that the place of NODE says; while a walk is under way either will do. */
static int check_domain(struct check *check, const struct kv_index_node *node)
{
	const struct kv_index *index = check->index;
	struct kv_domain_record *sum = &check->domains[node->inode.domain];
	uint32_t state = atomic_load(&index->domains[node->inode.domain].state);
	struct kv_index_node parent;
	int r;

	sum->used += node->counted.used;
	sum->pinned += node->counted.pinned;
	sum->inodes += !node->counted.held;
	if (state == KV_DOMAIN_NONE)
		report(check, INODE(node->inode.ino),
			"inode %llu: in domain %u, which there is not", U(node->inode.ino),
			node->inode.domain);
	if (node->inode.cookie == 0 || kv_index_node_is_domain(index, node))
		return 0;
	r = kv_view_node(&check->view, node->inode.parent, &parent);
	if (r < 0)
		return r;
	if (parent.inode.domain != node->inode.domain && state == KV_DOMAIN_LIVE &&
		atomic_load(&index->domains[parent.inode.domain].state) == KV_DOMAIN_LIVE)
		report(check, INODE(node->inode.ino),
			"inode %llu: in domain %u, its directory in %u", U(node->inode.ino),
			node->inode.domain, parent.inode.domain);
	return 0;
}

static void check_domains(struct check *check)
{
	uint64_t pinned = 0;

	for (uint32_t i = 0; i < KV_DOMAINS_MAX; i++) {
		const struct kv_domain *domain = &check->index->domains[i];
		const struct kv_domain_record *sum = &check->domains[i];
		uint64_t ino = atomic_load(&domain->ino);
		struct kv_index_node node;

		pinned += sum->pinned;
		if (atomic_load(&domain->used) != sum->used ||
			atomic_load(&domain->pinned) != sum->pinned ||
			atomic_load(&domain->inodes) != sum->inodes)
			report(check, NULL,
				"domain %u: counts %llu blocks, %llu pinned, %llu inodes, has "
				"%llu, "
				"%llu, %llu",
				i, U(domain->used), U(domain->pinned), U(domain->inodes),
				U(sum->used), U(sum->pinned), U(sum->inodes));
		if (ino != 0 && kv_view_directory(&check->view, ino, &node) < 0)
			report(check, NULL, "domain %u: its directory %llu is not there", i,
				U(ino));
	}
	if (pinned != atomic_load(&check->index->pinned))
		report(check, NULL, "counts %llu pinned blocks, has %llu", U(check->index->pinned),
			U(pinned));
}

static int check_inode(struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	uint64_t links = 0;
	int r = kv_view_node(&check->view, kv_key_a(key), &node);

	if (r == 0)
		r = count_links(check, &node, &links);
	if (r < 0)
		return r;
	if (value->held)
		check->held_inodes++;
	else
		check->inodes++;
	if (node.inode.ino >= atomic_load(&check->index->next_ino))
		report(check, INODE(node.inode.ino), "inode %llu: number not handed out",
			U(node.inode.ino));
	if (S_ISDIR(node.inode.mode)
			? links != (node.inode.ino != KV_ROOT_INO && node.inode.nlink > 0)
			: links != node.inode.nlink)
		report(check, INODE(node.inode.ino), "inode %llu: link count %u, links %llu",
			U(node.inode.ino), node.inode.nlink, U(links));
	if (node.inode.nlink == 0 && !node.orphan && !node.ordered)
		report(check, INODE(node.inode.ino), "inode %llu: has no name and is no orphan",
			U(node.inode.ino));
	r = check_order(check, &node);
	if (r == 0)
		r = check_domain(check, &node);
	if (r == 0 && S_ISDIR(node.inode.mode))
		r = check_directory(check, &node);
	if (r == 0 && S_ISREG(node.inode.mode))
		r = check_map(check, &node);
	return r;
}

static int check_name(struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_entry entry;
	struct kv_index_node node;
	struct kv_index_node directory;
	int r = kv_view_entry_at(
		&check->view, &(struct kv_place){kv_key_a(key), kv_key_b(key)}, &entry);

	(void)value;
	if (r == 0)
		r = kv_view_node(&check->view, entry.place.parent, &directory);
	if (r == 0 && (!S_ISDIR(directory.inode.mode) ||
			      (directory.inode.nlink == 0 && !directory.orphan)))
		r = -ENOENT;
	if (r == 0)
		r = kv_view_entry_node(&check->view, &entry, &node);
	if (r == 0)
		r = kv_view_has_link(&check->view, &node, &entry.place);
	if (r == 0 && entry.place.cookie / KV_HASH_SLOTS !=
			      kv_index_hash(check->index, entry.record.name, entry.record.length) /
				      KV_HASH_SLOTS)
		report(check, INODE(entry.place.parent),
			"directory %llu: an entry is not where its name belongs",
			U(entry.place.parent));
	return r;
}

static int check_link(struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	int r = kv_view_node(&check->view, kv_key_a(key), &node);

	(void)value;
	if (r == 0 && (node.inode.cookie == 0 || S_ISDIR(node.inode.mode)))
		report(check, INODE(kv_key_a(key)), "inode %llu: further links without a first",
			U(kv_key_a(key)));
	return r;
}

static int check_xattr(struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_xattr_record record;
	struct kv_index_node node;
	int r = kv_view_node(&check->view, kv_key_a(key), &node);

	if (r == 0)
		r = kv_xattr_decode(value->data, value->size, &record);
	if (r == 0 &&
		kv_key_b(key) / KV_HASH_SLOTS !=
			kv_index_hash(check->index, record.name, record.length) / KV_HASH_SLOTS)
		report(check, INODE(kv_key_a(key)),
			"inode %llu: an attribute is not where its name belongs", U(kv_key_a(key)));
	return r;
}

static int check_orphan(struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	int r = kv_view_node(&check->view, kv_key_a(key), &node);

	if (r == 0 && (node.inode.nlink != 0 || value->held != kv_index_node_is_held(&node)))
		report(check, INODE(kv_key_a(key)), "inode %llu: an orphan with a name",
			U(kv_key_a(key)));
	return r;
}

static int check_use(struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	int r;

	(void)value;
	if (kv_key_b(key) == 0)
		return 0; /* padding */
	r = kv_view_node(&check->view, kv_key_b(key), &node);
	if (r == 0 && (!node.ordered || node.order != kv_key_a(key)))
		report(check, INODE(kv_key_b(key)),
			"inode %llu: a place in the use order that is not its own",
			U(kv_key_b(key)));
	return r;
}

/* ---- Space ---- */

static int check_refcount(
	struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	const struct kv_record *shared = kv_overlay_find(&check->tally.shared, key);
	uint32_t count;
	int r = kv_refcount_decode(value->data, value->size, &count);

	if (r < 0)
		return r;
	if (!shared || kv_get_le32(shared->value) != count)
		report(check, NULL, "block %llu of device %llu: reference count %u, references %u",
			U(kv_key_b(key)), U(kv_key_a(key)), count,
			shared ? kv_get_le32(shared->value) : 1);
	kv_overlay_drop(&check->tally.shared, key);
	return 0;
}

static int check_group(struct check *check, uint16_t number, uint64_t group_number)
{
	struct kv_space *space = check->index->space;
	const struct kv_space_device *device = &space->devices[number];
	const uint64_t *held = check->tally.devices[number].held + group_number * KV_GROUP_WORDS;
	struct kv_group *group;
	unsigned busy = 0;
	int r = kv_space_load(space, &check->view, number, group_number, &group);

	if (r < 0)
		return r;
	for (size_t i = 0; i < KV_GROUP_WORDS; i++) {
		busy += (unsigned)__builtin_popcountll(group->busy[i]);
		if (group->used[i] & group->busy[i])
			report(check, NULL, "device %u group %llu: used and busy at once", number,
				U(group_number));
		if (group->used[i] != held[i])
			report(check, NULL, "device %u block %llu: bitmap %016llx, maps %016llx",
				number, U(group_number * KV_GROUP_BLOCKS + 64 * i),
				U(group->used[i]), U(held[i]));
	}
	if (busy != device->counts[group_number].busy)
		report(check, NULL, "device %u group %llu: counts %u busy, has %u", number,
			U(group_number), device->counts[group_number].busy, busy);
	return 0;
}

static int check_device(struct check *check, uint16_t number, uint64_t *used, uint64_t *busy)
{
	const struct kv_space_device *device = &check->index->space->devices[number];
	uint64_t free_blocks = 0;

	for (uint64_t i = 0; i < device->group_count; i++) {
		struct kv_key key = kv_key_pair(KV_TABLE_SPACE_GROUP, number, i);
		int r = check_group(check, number, i);

		if (r < 0)
			r = damaged(check, &key, r);
		if (r < 0)
			return r;
		*used += device->counts[i].used;
		*busy += device->counts[i].busy;
		free_blocks += kv_group_free(device, i);
	}
	if (free_blocks != device->free)
		report(check, NULL, "device %u: counts %llu free blocks, has %llu", number,
			U(device->free), U(free_blocks));
	return 0;
}

static int check_space(struct check *check)
{
	struct kv_space *space = check->index->space;
	uint64_t used = 0;
	uint64_t busy = 0;

	if (!space)
		return 0; /* kv_index_inspect has said that it cannot be read */
	KV_LOCKED(&space->lock);
	for (uint32_t i = 0; i < space->device_count; i++) {
		int r = check_device(check, (uint16_t)i, &used, &busy);

		if (r < 0)
			return r;
	}
	if (used != space->used || busy != space->busy)
		report(check, NULL,
			"the store counts %llu used and %llu busy blocks, has %llu and %llu",
			U(space->used), U(space->busy), U(used), U(busy));
	return 0;
}

/* ---- All of it ---- */

static int check_init(struct check *check)
{
	int r = kv_tally_init(&check->tally, &check->index->record.store);

	check->domains = calloc(KV_DOMAINS_MAX, sizeof(*check->domains));
	return r < 0 || check->domains ? r : -ENOMEM;
}

static void check_done(struct check *check)
{
	free(check->domains);
	kv_tally_done(&check->tally);
}

static int check_tables(struct check *check)
{
	static const struct {
		enum kv_table table;
		check_record *each;
	} tables[] = {
		{KV_TABLE_INODE, check_inode}, /* first: it gathers what the others need */
		{KV_TABLE_DIRENT, check_name},
		{KV_TABLE_LINK, check_link},
		{KV_TABLE_XATTR, check_xattr},
		{KV_TABLE_MAP, check_map_owner},
		{KV_TABLE_ORPHAN, check_orphan},
		{KV_TABLE_USE, check_use},
		{KV_TABLE_REFCOUNT, check_refcount},
	};

	for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++) {
		int r = each_of_table(check, tables[i].table, tables[i].each);

		if (r < 0)
			return r;
	}
	if (check->tally.shared.count > 0)
		report(check, NULL, "%zu shared extents have no reference count",
			check->tally.shared.count);
	if (check->inodes != check->index->inodes ||
		check->held_inodes != check->index->held_inodes)
		report(check, NULL, "counts %llu inodes and %llu held ones, has %llu and %llu",
			U(check->index->inodes), U(check->index->held_inodes), U(check->inodes),
			U(check->held_inodes));
	check_domains(check);
	return check_space(check);
}

ssize_t kv_index_check_all(struct kv_index *index, const struct kv_check_to *to)
{
	struct check check = {.index = index, .to = to};
	int r = check_init(&check);

	if (r == 0) {
		kv_view_begin(&check.view, index);
		r = check_tables(&check);
		kv_view_end(&check.view);
	}
	check_done(&check);
	return r < 0 ? r : check.violations;
}

struct lines {
	void (*violation)(void *arg, const char *text);
	void *arg;
};

static void tell_line(void *arg, const struct kv_violation *violation)
{
	const struct lines *lines = arg;

	lines->violation(lines->arg, violation->text);
}

ssize_t kv_index_check(
	struct kv_index *index, void (*violation)(void *arg, const char *text), void *arg)
{
	struct lines lines = {violation, arg};

	return kv_index_check_all(
		index, &(struct kv_check_to){violation ? tell_line : NULL, &lines});
}
