/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quota domains: their records, and what they count. An operation collects its changes of them
 * beside its layer; they are applied with it, and the records follow in the same transaction.
 */
#include <sys/stat.h>

#include "index/index_internal.h"

/* ---- Life ---- */

int kv_domains_new(struct kv_index *index)
{
	index->domains = calloc(KV_DOMAINS_MAX, sizeof(*index->domains));
	if (!index->domains)
		return -ENOMEM;
	atomic_store(&index->domain_count, 1);
	return 0;
}

void kv_domains_free(struct kv_index *index)
{
	free(index->domains);
	index->domains = NULL;
}

static void domain_load(
	struct kv_index *index, uint32_t number, const struct kv_domain_record *record)
{
	struct kv_domain *domain = &index->domains[number];

	atomic_store(&domain->state, record->state);
	atomic_store(&domain->ino, record->ino);
	atomic_store(&domain->limit, number == 0 ? UINT64_MAX : record->limit);
	atomic_store(&domain->used, record->used);
	atomic_store(&domain->taken, record->used);
	atomic_store(&domain->pinned, record->pinned);
	atomic_store(&domain->inodes, record->inodes);
	atomic_fetch_add(&index->pinned, record->pinned);
	if (number >= atomic_load(&index->domain_count))
		atomic_store(&index->domain_count, number + 1);
}

static int domains_read(struct kv_index *index, struct kv_view *view)
{
	_cleanup_iter_ struct kv_iter iter = {0};
	struct kv_key key = kv_key_single(KV_TABLE_DOMAIN, 0);
	struct kv_value value;
	bool first = false;
	int r = kv_iter_init(&iter, view, &key, KV_KEY_TABLE_SIZE);

	while (r >= 0 && (r = kv_iter_next(&iter, &key, &value)) == 1) {
		struct kv_domain_record record;

		if (kv_key_a(&key) >= KV_DOMAINS_MAX ||
			kv_domain_decode(value.data, value.size, &record) < 0)
			return kv_index_damaged(index, &key, "quota domain");
		first |= kv_key_a(&key) == 0;
		domain_load(index, (uint32_t)kv_key_a(&key), &record);
	}
	return r == 0 && !first ? -EUCLEAN : r;
}

int kv_domains_load(struct kv_index *index)
{
	struct kv_view view;
	int r;

	kv_view_begin(&view, index);
	r = domains_read(index, &view);
	kv_view_end(&view);
	return r;
}

int kv_domain_padding(uint32_t domain, int (*call)(void *arg, const struct kv_key *key), void *arg)
{
	int r = 0;

	/* Before each list, and behind the last. */
	for (unsigned use_class = 0; use_class <= _KV_USE_CLASS_MAX && r == 0; use_class++) {
		struct kv_key key =
			kv_key_pair(KV_TABLE_USE, kv_use_order(domain, use_class, INT64_MIN), 0);

		r = call(arg, &key);
	}
	return r;
}

/* ---- Changes by operations ---- */

struct kv_domain_change *kv_op_domain(struct kv_op *op, uint32_t domain)
{
	struct kv_domain_op *domains = &op->domains;

	for (size_t i = 0; i < domains->count; i++)
		if (domains->changes[i].domain == domain)
			return &domains->changes[i];
	if (domains->count == domains->capacity) {
		size_t capacity = domains->capacity != 0 ? domains->capacity * 2 : 4;
		struct kv_domain_change *grown =
			reallocarray(domains->changes, capacity, sizeof(*grown));

		if (!grown)
			return NULL;
		domains->changes = grown;
		domains->capacity = capacity;
	}
	domains->changes[domains->count] = (struct kv_domain_change){.domain = domain};
	return &domains->changes[domains->count++];
}

void kv_index_node_init_counted(struct kv_index_node *node)
{
	bool pinned = node->inode.flags & KV_INODE_PINNED && S_ISREG(node->inode.mode);

	node->counted.there = true;
	node->counted.held = node->inode.flags & KV_INODE_HELD;
	node->counted.domain = node->inode.domain;
	node->counted.used = node->inode.blocks;
	node->counted.pinned = pinned ? node->inode.blocks : 0;
}

static int count(struct kv_op *op, const struct kv_index_node *node, int sign)
{
	struct kv_domain_change *change = kv_op_domain(op, node->counted.domain);

	if (!change)
		return -ENOMEM;
	change->used += sign * (int64_t)node->counted.used;
	change->pinned += sign * (int64_t)node->counted.pinned;
	if (node->counted.held)
		change->held += sign;
	else
		change->inodes += sign;
	return 0;
}

int kv_op_count_node(struct kv_op *op, struct kv_index_node *node, bool gone)
{
	struct kv_index_node before = *node;

	kv_index_node_init_counted(node);
	/* Spares most operations the look at the list: only times have changed. */
	if (!gone && before.counted.there && before.counted.held == node->counted.held &&
		before.counted.domain == node->counted.domain &&
		before.counted.used == node->counted.used &&
		before.counted.pinned == node->counted.pinned)
		return 0;
	if (before.counted.there && count(op, &before, -1) < 0)
		return -ENOMEM;
	node->counted.there = !gone;
	return gone ? 0 : count(op, node, 1);
}

bool kv_index_node_is_domain(const struct kv_index *index, const struct kv_index_node *node)
{
	const struct kv_domain *domain = &index->domains[node->inode.domain];
	uint32_t state = atomic_load_explicit(&domain->state, memory_order_relaxed);

	return (state == KV_DOMAIN_LIVE || state == KV_DOMAIN_ADOPTING) &&
	       atomic_load_explicit(&domain->ino, memory_order_relaxed) == node->inode.ino;
}

static bool is_leaving(const struct kv_domain *domain, uint64_t ino)
{
	return atomic_load_explicit(&domain->state, memory_order_relaxed) == KV_DOMAIN_LEAVING &&
	       atomic_load_explicit(&domain->ino, memory_order_relaxed) == ino;
}

int kv_op_end_domain(struct kv_op *op, const struct kv_index_node *node)
{
	struct kv_index *index = op->index;
	uint32_t count = atomic_load_explicit(&index->domain_count, memory_order_relaxed);

	for (uint32_t i = 1; i < count; i++) {
		struct kv_domain_change *change;

		if (!(i == node->inode.domain && kv_index_node_is_domain(index, node)) &&
			!is_leaving(&index->domains[i], node->inode.ino))
			continue;
		change = kv_op_domain(op, i);
		if (!change)
			return -ENOMEM;
		change->set = true;
		change->state = KV_DOMAIN_DEAD;
		change->ino = 0;
		change->limit =
			atomic_load_explicit(&index->domains[i].limit, memory_order_relaxed);
	}
	return 0;
}

int kv_op_move_node(struct kv_op *op, struct kv_index_node *node, uint32_t domain)
{
	uint64_t limit =
		atomic_load_explicit(&op->index->domains[domain].limit, memory_order_relaxed);
	uint64_t blocks = node->inode.blocks;

	if (node->inode.domain == domain)
		return 0;
	if (S_ISREG(node->inode.mode) && blocks > limit)
		return -EDQUOT;
	if (S_ISREG(node->inode.mode) && node->inode.flags & KV_INODE_PINNED &&
		kv_index_pin_check(op->index, domain, blocks) == -EDQUOT)
		return -EDQUOT;
	node->inode.domain = domain;
	op->domains.moved = true;
	return 0;
}

/* ---- Applying them ---- */

static void add(_Atomic uint64_t *to, int64_t by)
{
	uint64_t before = atomic_fetch_add_explicit(to, (uint64_t)by, memory_order_relaxed);

	assert(by >= 0 || before >= (uint64_t)-by);
	(void)before;
}

static void apply(struct kv_index *index, const struct kv_domain_change *change)
{
	struct kv_domain *domain = &index->domains[change->domain];

	add(&domain->used, change->used);
	add(&domain->taken, change->used - change->redeemed);
	add(&domain->pinned, change->pinned);
	add(&index->pinned, change->pinned);
	add(&domain->inodes, change->inodes);
	domain->held += (uint64_t)change->held;
	domain->dirty = domain->dirty || change->set || change->used != 0 || change->pinned != 0 ||
			change->inodes != 0;
	if (!change->set)
		return;
	atomic_store(&domain->ino, change->ino);
	atomic_store(&domain->limit, change->limit);
	atomic_store(&domain->state, change->state);
	if (change->domain >= atomic_load(&index->domain_count))
		atomic_store(&index->domain_count, change->domain + 1);
}

void kv_domain_op_end(struct kv_op *op, bool applied)
{
	struct kv_index *index = op->index;

	for (size_t i = 0; applied && i < op->domains.count; i++)
		apply(index, &op->domains.changes[i]);
	if (applied && op->domains.moved)
		atomic_fetch_add(&index->domain_epoch, 1);
	if (applied && op->domains.directory_moved)
		index->directory_moves++;
	free(op->domains.changes);
	op->domains = (struct kv_domain_op){0};
}

struct drop {
	struct kv_overlay *pending;
};

static int drop_key(void *arg, const struct kv_key *key)
{
	struct drop *drop = arg;
	struct kv_record *record = kv_record_new(KV_RECORD_TOMBSTONE, key, 0);

	if (!record)
		return -ENOMEM;
	kv_overlay_put(drop->pending, record);
	return 0;
}

/* The last inode of a domain without a directory is gone: the number is free. */
static int collect_dead(struct kv_index *index, uint32_t number)
{
	struct kv_key key = kv_key_single(KV_TABLE_DOMAIN, number);
	struct drop drop = {.pending = &index->pending};
	int r = drop_key(&drop, &key);

	if (r == 0)
		r = kv_domain_padding(number, drop_key, &drop);
	if (r == 0)
		atomic_store(&index->domains[number].state, KV_DOMAIN_NONE);
	return r;
}

static int collect_domain(struct kv_index *index, uint32_t number)
{
	const struct kv_domain *domain = &index->domains[number];
	struct kv_key key = kv_key_single(KV_TABLE_DOMAIN, number);
	struct kv_domain_record state = {
		.ino = atomic_load(&domain->ino),
		.limit = number == 0 ? 0 : atomic_load(&domain->limit),
		.used = atomic_load(&domain->used),
		.pinned = atomic_load(&domain->pinned),
		.inodes = atomic_load(&domain->inodes),
		.state = (enum kv_domain_state)atomic_load(&domain->state),
	};
	struct kv_record *record;

	if (state.state == KV_DOMAIN_DEAD && state.inodes == 0 && domain->held == 0)
		return collect_dead(index, number);
	record = kv_record_new(KV_RECORD_VALUE, &key, KV_DOMAIN_RECORD_SIZE);
	if (!record)
		return -ENOMEM;
	kv_domain_encode(&state, record->value);
	kv_overlay_put(&index->pending, record);
	return 0;
}

int kv_domains_collect(struct kv_index *index)
{
	uint32_t count = atomic_load(&index->domain_count);

	for (uint32_t i = 0; i < count; i++) {
		struct kv_domain *domain = &index->domains[i];
		bool dead = i > 0 && atomic_load(&domain->state) == KV_DOMAIN_DEAD;
		int r = domain->dirty || dead ? collect_domain(index, i) : 0;

		if (r < 0)
			return r;
		domain->dirty = false;
	}
	return 0;
}

/* ---- Reading ---- */

uint32_t kv_index_domain_count(const struct kv_index *index)
{
	return atomic_load_explicit(&index->domain_count, memory_order_acquire);
}

uint64_t kv_index_domain_epoch(const struct kv_index *index)
{
	return atomic_load_explicit(&index->domain_epoch, memory_order_acquire);
}

int kv_index_domain(struct kv_index *index, uint32_t number, struct kv_domain_info *ret_info)
{
	const struct kv_domain *domain;
	uint32_t state;

	if (number >= KV_DOMAINS_MAX)
		return -ENOENT;
	domain = &index->domains[number];
	state = atomic_load_explicit(&domain->state, memory_order_acquire);
	if (state == KV_DOMAIN_NONE)
		return -ENOENT;
	*ret_info = (struct kv_domain_info){
		.number = number,
		.state = (enum kv_domain_state)state,
		.ino = atomic_load_explicit(&domain->ino, memory_order_relaxed),
		.limit = atomic_load_explicit(&domain->limit, memory_order_relaxed),
		.used = atomic_load_explicit(&domain->used, memory_order_relaxed),
		.pinned = atomic_load_explicit(&domain->pinned, memory_order_relaxed),
		.inodes = atomic_load_explicit(&domain->inodes, memory_order_relaxed),
	};
	uint64_t taken = atomic_load_explicit(&domain->taken, memory_order_relaxed);
	ret_info->promised = taken > ret_info->used ? taken - ret_info->used : 0;
	ret_info->pin_limit =
		ret_info->limit == UINT64_MAX ? UINT64_MAX : ret_info->limit / 8 * KV_PIN_SHARE;
	return 0;
}
