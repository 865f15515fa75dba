/* SPDX-License-Identifier: Apache-2.0 */
/* What a repaired index counts and derives: links, quotas, the use order, free space, the head. */
#include "index/repair_internal.h"

/* Number of inodes beyond those that are known, when the counter of them is lost. */
#define INO_MARGIN (UINT64_C(1) << 32)

/* ---- What is counted ---- */

/* Keeps the quotas whose directories are there; what they count comes later. */
static int domains_sort(
	struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_domain_record *kept = &repair->domains[kv_key_a(key)];
	struct kv_domain_record record;
	struct kv_index_node node;
	int r = kv_domain_decode(value->data, value->size, &record);

	if (r == 0 && record.state != KV_DOMAIN_LIVE && record.state != KV_DOMAIN_ADOPTING)
		r = -ENOENT;
	if (r == 0 && record.ino == KV_ROOT_INO)
		r = -ENOENT;
	if (r == 0)
		r = kv_view_directory(&repair->view, record.ino, &node);
	for (uint32_t i = 1; i < KV_DOMAINS_MAX && r == 0; i++)
		if (repair->domains[i].ino == record.ino)
			r = -ENOENT;
	if (r == -ENOENT || r == -ENOTDIR || r == -EUCLEAN)
		return kv_repair_drop(repair, key);
	if (r == 0)
		*kept = (struct kv_domain_record){
			.ino = record.ino, .limit = record.limit, .state = KV_DOMAIN_LIVE};
	return r;
}

/* The domain of what is in directory INO, or is it. */
static int domain_of(struct kv_repair *repair, uint64_t ino, uint32_t *ret_domain)
{
	*ret_domain = 0;
	while (ino != KV_ROOT_INO) {
		struct kv_index_node node;
		int r;

		for (uint32_t i = 1; i < KV_DOMAINS_MAX; i++)
			if (repair->domains[i].ino == ino) {
				*ret_domain = i;
				return 0;
			}
		r = kv_view_node(&repair->view, ino, &node);
		if (r < 0)
			return r;
		ino = node.inode.parent;
	}
	return 0;
}

static int count_subdirectories(struct kv_repair *repair, uint64_t ino, uint32_t *ret_count)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, ino, 0);
	struct kv_dirent_record record;
	struct kv_value value;
	int r = kv_iter_init(&iter, &repair->view, &key, KV_KEY_SINGLE_SIZE);

	*ret_count = 0;
	while (r >= 0 && (r = kv_iter_next(&iter, &key, &value)) == 1)
		*ret_count += kv_dirent_decode(value.data, value.size, &record) == 0 &&
			      record.type == S_IFDIR;
	return r;
}

static int count_inode(
	struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	struct kv_domain_record *domain;
	struct kv_inode before;
	int r = kv_view_node(&repair->view, kv_key_a(key), &node);

	(void)value;
	if (r < 0)
		return r;
	before = node.inode;
	if (S_ISDIR(node.inode.mode)) {
		r = count_subdirectories(repair, node.inode.ino, &node.inode.nlink);
		node.inode.nlink += 2;
	} else {
		uint32_t links;

		r = kv_repair_sort_links(repair, &node, &links);
		node.inode.nlink = links;
	}
	if (r == 0)
		r = domain_of(repair, S_ISDIR(node.inode.mode) ? node.inode.ino : node.inode.parent,
			&node.inode.domain);
	if (r < 0)
		return r;
	domain = &repair->domains[node.inode.domain];
	kv_index_node_init_counted(&node);
	domain->used += node.counted.used;
	domain->pinned += node.counted.pinned;
	domain->inodes++;
	repair->inodes++;
	if (before.nlink == node.inode.nlink && before.domain == node.inode.domain)
		return 0;
	return kv_repair_put_node(repair, &node);
}

static int put_domains(struct kv_repair *repair)
{
	int r = 0;

	repair->domains[0].state = KV_DOMAIN_LIVE;
	for (uint32_t i = 0; i < KV_DOMAINS_MAX && r == 0; i++) {
		struct kv_key key = kv_key_single(KV_TABLE_DOMAIN, i);
		uint8_t data[KV_DOMAIN_RECORD_SIZE];

		if (repair->domains[i].state == KV_DOMAIN_NONE)
			continue;
		kv_domain_encode(&repair->domains[i], data);
		r = kv_repair_copy(repair, &key, data, sizeof(data));
		if (r == 0 && i > 0)
			r = kv_domain_padding(i, kv_repair_put_padding, repair);
	}
	return r;
}

/* ---- What follows from other tables ---- */

static int put_use(struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value)
{
	struct kv_index_node node;
	struct kv_key use;
	int r = kv_view_node(&repair->view, kv_key_a(key), &node);

	(void)value;
	if (r < 0 || !node.ordered)
		return r;
	use = kv_key_pair(KV_TABLE_USE, node.order, node.inode.ino);
	return kv_repair_copy(repair, &use, NULL, 0);
}

static uint16_t count_bits(const uint64_t *words)
{
	unsigned count = 0;

	for (size_t i = 0; i < KV_GROUP_WORDS; i++)
		count += (unsigned)__builtin_popcountll(words[i]);
	return (uint16_t)count;
}

/* The bitmaps of one summary's groups, and the summary. */
static int put_span(struct kv_repair *repair, uint32_t device, uint64_t span, uint64_t groups)
{
	uint64_t first = span * KV_SUMMARY_GROUPS;
	size_t count = (size_t)kv_min_u64(KV_SUMMARY_GROUPS, groups - first);
	struct kv_key summary = kv_key_pair(KV_TABLE_SPACE_SUMMARY, device, span);
	uint16_t used[KV_SUMMARY_GROUPS] = {0};
	uint8_t data[KV_GROUP_RECORD_SIZE];
	uint64_t total = 0;
	int r = 0;

	for (size_t i = 0; i < count && r == 0; i++) {
		struct kv_key key = kv_key_pair(KV_TABLE_SPACE_GROUP, device, first + i);
		const uint64_t *words =
			repair->tally.devices[device].held + (first + i) * KV_GROUP_WORDS;

		used[i] = count_bits(words);
		total += used[i];
		if (used[i] == 0)
			continue;
		kv_group_encode(words, data);
		r = kv_repair_copy(repair, &key, data, KV_GROUP_RECORD_SIZE);
	}
	if (r < 0 || total == 0)
		return r;
	repair->used += total;
	kv_summary_encode(used, count, data);
	return kv_repair_copy(repair, &summary, data, KV_SUMMARY_RECORD_SIZE);
}

static int put_space(struct kv_repair *repair)
{
	const struct kv_index_store *store = &repair->index->record.store;
	struct kv_record *record;
	int r = 0;

	for (uint32_t i = 0; i < store->device_count; i++) {
		uint64_t groups = kv_div_round_up(store->device_blocks[i], KV_GROUP_BLOCKS);

		for (uint64_t span = 0; span * KV_SUMMARY_GROUPS < groups && r == 0; span++)
			r = put_span(repair, i, span, groups);
	}
	for (record = kv_overlay_first(&repair->tally.shared); record && r == 0;
		record = kv_overlay_next(record))
		r = kv_repair_copy(repair, &record->key, record->value, record->size);
	return r;
}

static int put_state(struct kv_repair *repair)
{
	struct kv_key key = kv_key_single(KV_TABLE_META, KV_META_STATE);
	struct kv_state state = {
		.next_ino = kv_max_u64(repair->next_ino, repair->last_ino + 1),
		.inodes = repair->inodes,
		.used_blocks = repair->used,
	};
	uint8_t data[KV_STATE_RECORD_SIZE];

	/* The numbers of inodes that are gone are not known: none may come again. */
	if (repair->next_ino == 0)
		state.next_ino = kv_min_u64(repair->last_ino + INO_MARGIN, INT64_MAX);
	kv_state_encode(&state, data);
	return kv_repair_copy(repair, &key, data, sizeof(data));
}

int kv_repair_make(struct kv_repair *repair)
{
	int r = kv_repair_each(repair, KV_TABLE_DOMAIN, domains_sort);

	if (r == 0)
		r = kv_repair_each(repair, KV_TABLE_INODE, count_inode);
	if (r == 0)
		r = kv_repair_each(repair, KV_TABLE_INODE, put_use);
	if (r == 0)
		r = put_domains(repair);
	if (r == 0)
		r = put_space(repair);
	if (r == 0)
		r = put_state(repair);
	return r < 0 ? r : kv_repair_write(repair);
}
