/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that the tables of an index agree with each other. */
#include "index/check.h"

#include <stdio.h>
#include <sys/stat.h>

#include "index/space_internal.h"

struct device_bits {
	uint64_t *held;   /* blocks that some chunk holds */
	uint64_t *starts; /* first blocks of extents that some chunk holds */
};

struct check {
	struct kv_index *index;
	struct kv_view view;
	void (*violation)(void *arg, const char *text);
	void *arg;
	ssize_t violations;
	struct device_bits devices[KV_DEVICES_MAX];
	struct kv_overlay shared; /* by REFCOUNT key: how many chunks hold the extent */
	uint64_t inodes;
	uint64_t held_inodes;
	struct kv_domain_record *domains; /* what they should count */
};

static void report(struct check *check, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

static void report(struct check *check, const char *format, ...)
{
	char text[256];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	check->violations++;
	if (check->violation)
		check->violation(check->arg, text);
}

#define U(x) ((unsigned long long)(x))

/* A record that cannot be read is a violation; other errors end the check. */
static int damaged(struct check *check, const struct kv_key *key, int r)
{
	if (r != -EUCLEAN && r != -ENOENT)
		return r;
	report(check, "table %u a %llu b %llu: damaged or missing record", key->bytes[0],
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
	return r;
}

static int each_of_table(struct check *check, enum kv_table table, check_record *each)
{
	struct kv_key start = {.size = KV_KEY_TABLE_SIZE, .bytes = {(uint8_t)table}};

	return each_record(check, start, KV_KEY_TABLE_SIZE, each);
}

/* ---- Chunk maps ---- */

static bool bit_get(const uint64_t *words, uint64_t bit)
{
	return words[bit / 64] >> (bit % 64) & 1;
}

static void bit_set(uint64_t *words, uint64_t bit)
{
	words[bit / 64] |= UINT64_C(1) << (bit % 64);
}

/* A second chunk holds the extent: counts it. */
static int note_shared(struct check *check, const struct kv_extent *extent)
{
	struct kv_key key = kv_key_pair(KV_TABLE_REFCOUNT, extent->device, extent->start);
	struct kv_record *record = kv_overlay_find(&check->shared, &key);

	if (!record) {
		record = kv_record_new(KV_RECORD_VALUE, &key, KV_REFCOUNT_RECORD_SIZE);
		if (!record)
			return -ENOMEM;
		kv_put_le32(record->value, 1);
		kv_overlay_put(&check->shared, record);
	}
	kv_put_le32(record->value, kv_get_le32(record->value) + 1);
	return 0;
}

static int check_extent(struct check *check, uint64_t ino, const struct kv_extent *extent)
{
	struct device_bits *bits = &check->devices[extent->device];
	uint32_t held = 0;

	for (uint32_t i = 0; i < extent->count; i++)
		held += bit_get(bits->held, extent->start + i);
	if (held == extent->count && bit_get(bits->starts, extent->start))
		return note_shared(check, extent);
	if (held != 0)
		report(check, "inode %llu: blocks at %llu of device %u belong to another, too",
			U(ino), U(extent->start), extent->device);
	for (uint32_t i = 0; i < extent->count; i++)
		bit_set(bits->held, extent->start + i);
	bit_set(bits->starts, extent->start);
	return 0;
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
			report(check, "inode %llu: chunk %u behind its end", U(node->inode.ino),
				chunk.number);
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
		report(check, "inode %llu: counts %llu blocks, has %llu", U(node->inode.ino),
			U(node->inode.blocks), U(blocks));
	return r;
}

static int check_map_owner(
	struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	int r = kv_view_node(&check->view, kv_key_a(key), &node);

	(void)value;
	if (r == 0 && (!S_ISREG(node.inode.mode) || node.tail_size > 0 || node.inode.blocks == 0))
		report(check, "inode %llu: has a map segment it should not have", U(kv_key_a(key)));
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
			report(check, "inode %llu: a link names inode %llu", U(node->inode.ino),
				U(entry.record.ino));
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
			report(check, "inode %llu: no path to the root", U(node->inode.ino));
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
		report(check, "directory %llu: link count %u, subdirectories %llu",
			U(node->inode.ino), node->inode.nlink, U(count));
	return check_path(check, node);
}

static int check_order(struct check *check, const struct kv_index_node *node)
{
	struct kv_key key = kv_key_pair(KV_TABLE_USE, node->order, node->inode.ino);
	struct kv_value value;
	int r = node->ordered ? kv_view_get(&check->view, &key, &value) : 0;

	if (r == -ENOENT)
		report(check, "inode %llu: not in the use order", U(node->inode.ino));
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
		report(check, "inode %llu: in domain %u, which there is not", U(node->inode.ino),
			node->inode.domain);
	if (node->inode.cookie == 0 || kv_index_node_is_domain(index, node))
		return 0;
	r = kv_view_node(&check->view, node->inode.parent, &parent);
	if (r < 0)
		return r;
	if (parent.inode.domain != node->inode.domain && state == KV_DOMAIN_LIVE &&
		atomic_load(&index->domains[parent.inode.domain].state) == KV_DOMAIN_LIVE)
		report(check, "inode %llu: in domain %u, its directory in %u", U(node->inode.ino),
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
			report(check,
				"domain %u: counts %llu blocks, %llu pinned, %llu inodes, has "
				"%llu, "
				"%llu, %llu",
				i, U(domain->used), U(domain->pinned), U(domain->inodes),
				U(sum->used), U(sum->pinned), U(sum->inodes));
		if (ino != 0 && kv_view_directory(&check->view, ino, &node) < 0)
			report(check, "domain %u: its directory %llu is not there", i, U(ino));
	}
	if (pinned != atomic_load(&check->index->pinned))
		report(check, "counts %llu pinned blocks, has %llu", U(check->index->pinned),
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
		report(check, "inode %llu: number not handed out", U(node.inode.ino));
	if (S_ISDIR(node.inode.mode)
			? links != (node.inode.ino != KV_ROOT_INO && node.inode.nlink > 0)
			: links != node.inode.nlink)
		report(check, "inode %llu: link count %u, links %llu", U(node.inode.ino),
			node.inode.nlink, U(links));
	if (node.inode.nlink == 0 && !node.orphan && !node.ordered)
		report(check, "inode %llu: has no name and is no orphan", U(node.inode.ino));
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
		report(check, "directory %llu: an entry is not where its name belongs",
			U(entry.place.parent));
	return r;
}

static int check_link(struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	int r = kv_view_node(&check->view, kv_key_a(key), &node);

	(void)value;
	if (r == 0 && (node.inode.cookie == 0 || S_ISDIR(node.inode.mode)))
		report(check, "inode %llu: further links without a first", U(kv_key_a(key)));
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
		report(check, "inode %llu: an attribute is not where its name belongs",
			U(kv_key_a(key)));
	return r;
}

static int check_orphan(struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	int r = kv_view_node(&check->view, kv_key_a(key), &node);

	if (r == 0 && (node.inode.nlink != 0 || value->held != kv_index_node_is_held(&node)))
		report(check, "inode %llu: an orphan with a name", U(kv_key_a(key)));
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
		report(check, "inode %llu: a place in the use order that is not its own",
			U(kv_key_b(key)));
	return r;
}

/* ---- Space ---- */

static int check_refcount(
	struct check *check, const struct kv_key *key, const struct kv_value *value)
{
	const struct kv_record *shared = kv_overlay_find(&check->shared, key);
	uint32_t count;
	int r = kv_refcount_decode(value->data, value->size, &count);

	if (r < 0)
		return r;
	if (!shared || kv_get_le32(shared->value) != count)
		report(check, "block %llu of device %llu: reference count %u, references %u",
			U(kv_key_b(key)), U(kv_key_a(key)), count,
			shared ? kv_get_le32(shared->value) : 1);
	kv_overlay_drop(&check->shared, key);
	return 0;
}

static int check_group(struct check *check, uint16_t number, uint64_t group_number)
{
	struct kv_space *space = check->index->space;
	const struct kv_space_device *device = &space->devices[number];
	const uint64_t *held = check->devices[number].held + group_number * KV_GROUP_WORDS;
	struct kv_group *group;
	unsigned busy = 0;
	int r = kv_space_load(space, &check->view, number, group_number, &group);

	if (r < 0)
		return r;
	for (size_t i = 0; i < KV_GROUP_WORDS; i++) {
		busy += (unsigned)__builtin_popcountll(group->busy[i]);
		if (group->used[i] & group->busy[i])
			report(check, "device %u group %llu: used and busy at once", number,
				U(group_number));
		if (group->used[i] != held[i])
			report(check, "device %u block %llu: bitmap %016llx, maps %016llx", number,
				U(group_number * KV_GROUP_BLOCKS + 64 * i), U(group->used[i]),
				U(held[i]));
	}
	if (busy != device->counts[group_number].busy)
		report(check, "device %u group %llu: counts %u busy, has %u", number,
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
		report(check, "device %u: counts %llu free blocks, has %llu", number,
			U(device->free), U(free_blocks));
	return 0;
}

static int check_space(struct check *check)
{
	struct kv_space *space = check->index->space;
	uint64_t used = 0;
	uint64_t busy = 0;
	KV_LOCKED(&space->lock);

	for (uint32_t i = 0; i < space->device_count; i++) {
		int r = check_device(check, (uint16_t)i, &used, &busy);

		if (r < 0)
			return r;
	}
	if (used != space->used || busy != space->busy)
		report(check, "the store counts %llu used and %llu busy blocks, has %llu and %llu",
			U(space->used), U(space->busy), U(used), U(busy));
	return 0;
}

/* ---- All of it ---- */

static int check_init(struct check *check)
{
	const struct kv_index_store *store = &check->index->record.store;

	kv_overlay_init(&check->shared);
	check->domains = calloc(KV_DOMAINS_MAX, sizeof(*check->domains));
	if (!check->domains)
		return -ENOMEM;
	for (uint32_t i = 0; i < store->device_count; i++) {
		size_t words = (size_t)kv_div_round_up(store->device_blocks[i], KV_GROUP_BLOCKS) *
				       KV_GROUP_WORDS +
			       1;

		check->devices[i].held = calloc(words, sizeof(uint64_t));
		check->devices[i].starts = calloc(words, sizeof(uint64_t));
		if (!check->devices[i].held || !check->devices[i].starts)
			return -ENOMEM;
	}
	return 0;
}

static void check_done(struct check *check)
{
	for (uint32_t i = 0; i < KV_DEVICES_MAX; i++) {
		free(check->devices[i].held);
		free(check->devices[i].starts);
	}
	free(check->domains);
	kv_overlay_done(&check->shared);
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
	if (check->shared.count > 0)
		report(check, "%zu shared extents have no reference count", check->shared.count);
	if (check->inodes != check->index->inodes ||
		check->held_inodes != check->index->held_inodes)
		report(check, "counts %llu inodes and %llu held ones, has %llu and %llu",
			U(check->index->inodes), U(check->index->held_inodes), U(check->inodes),
			U(check->held_inodes));
	check_domains(check);
	return check_space(check);
}

ssize_t kv_index_check(
	struct kv_index *index, void (*violation)(void *arg, const char *text), void *arg)
{
	struct check check = {.index = index, .violation = violation, .arg = arg};
	int r = check_init(&check);

	if (r == 0) {
		kv_view_begin(&check.view, index);
		r = check_tables(&check);
		kv_view_end(&check.view);
	}
	check_done(&check);
	return r < 0 ? r : check.violations;
}
