/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quotas of directories: setting them, the walk that makes what is below join, promises, pins.
 *
 * The walk has no stack: it goes down by names and up by the parent and cookie in each inode. Who
 * moves a directory about meanwhile may make it miss some, so it goes on until a whole pass has
 * changed nothing while nobody did. What is made during the walk inherits from a directory that
 * has joined already, or is met later.
 */
#include <sys/stat.h>

#include "index/index_internal.h"

/* Of a walk, should directories be renamed all the time. */
#define PASSES_MAX 16u

/* ---- Setting ---- */

static int pad(void *arg, const struct kv_key *key)
{
	struct kv_op *op = arg;
	uint8_t *data = kv_op_put(op, key, KV_PADDING_SIZE, false);

	if (!data)
		return -ENOMEM;
	memset(data, 0, KV_PADDING_SIZE);
	return 0;
}

static int free_number(const struct kv_index *index, uint32_t *ret_number)
{
	for (uint32_t i = 1; i < KV_DOMAINS_MAX; i++) {
		if (atomic_load(&index->domains[i].state) == KV_DOMAIN_NONE &&
			atomic_load(&index->domains[i].taken) == 0) {
			*ret_number = i;
			return 0;
		}
	}
	return -ENOSPC;
}

static int put_domain(struct kv_op *op, uint32_t number, const struct kv_domain_change *fields)
{
	struct kv_domain_change *change = kv_op_domain(op, number);

	if (!change)
		return -ENOMEM;
	change->set = true;
	change->state = fields->state;
	change->ino = fields->ino;
	change->limit = fields->limit;
	return 0;
}

static int domain_begin(
	struct kv_op *op, struct kv_index_node *node, uint64_t limit, uint32_t *ret_number)
{
	const struct kv_domain_change fields = {
		.state = KV_DOMAIN_ADOPTING, .ino = node->inode.ino, .limit = limit};
	int r = free_number(op->index, ret_number);

	if (r == 0)
		r = put_domain(op, *ret_number, &fields);
	if (r == 0)
		r = kv_domain_padding(*ret_number, pad, op);
	node->inode.domain = *ret_number;
	op->domains.moved = true;
	return r < 0 ? r : kv_op_put_node(op, node);
}

static int domain_change(struct kv_op *op, const struct kv_index_node *node, uint64_t limit)
{
	const struct kv_domain *domain = &op->index->domains[node->inode.domain];
	const struct kv_domain_change fields = {
		.state = (enum kv_domain_state)atomic_load(&domain->state),
		.ino = node->inode.ino,
		.limit = limit,
	};

	if (atomic_load(&domain->pinned) > limit / 8 * KV_PIN_SHARE)
		return -EDQUOT;
	return put_domain(op, node->inode.domain, &fields);
}

/* The directory itself leaves at once, what is below it follows. */
static int domain_end(struct kv_op *op, struct kv_index_node *node)
{
	uint32_t number = node->inode.domain;
	const struct kv_domain_change fields = {
		.state = KV_DOMAIN_LEAVING,
		.ino = node->inode.ino,
		.limit = UINT64_MAX >> 1,
	};
	struct kv_index_node parent;
	int r = kv_view_directory(&op->view, node->inode.parent, &parent);

	if (r == 0)
		r = put_domain(op, number, &fields);
	if (r < 0)
		return r;
	node->inode.domain = parent.inode.domain;
	op->domains.moved = true;
	return kv_op_put_node(op, node);
}

/* A domain that its directory is still leaving. */
static bool has_leaving(const struct kv_index *index, uint64_t ino)
{
	uint32_t count = atomic_load(&index->domain_count);

	for (uint32_t i = 1; i < count; i++)
		if (atomic_load(&index->domains[i].state) == KV_DOMAIN_LEAVING &&
			atomic_load(&index->domains[i].ino) == ino)
			return true;
	return false;
}

static int quota_set(struct kv_op *op, uint64_t ino, uint64_t limit, uint32_t *ret_number)
{
	struct kv_index_node node;
	int r = kv_view_directory(&op->view, ino, &node);

	if (r < 0)
		return r;
	if (ino == KV_ROOT_INO)
		return -EINVAL;
	*ret_number = node.inode.domain;
	if (kv_index_node_is_domain(op->index, &node))
		return limit != 0 ? domain_change(op, &node, limit) : domain_end(op, &node);
	if (has_leaving(op->index, ino))
		return -EBUSY;
	return limit != 0 ? domain_begin(op, &node, limit, ret_number) : -ENODATA;
}

int kv_index_quota_set(struct kv_index *index, uint64_t ino, uint64_t limit, uint32_t *ret_number)
{
	uint32_t number = 0;
	struct kv_op op;
	int r;

	if (limit > UINT64_MAX >> 1)
		return -EINVAL;
	r = kv_op_begin_growing(&op, index);
	if (r < 0)
		return r;
	r = kv_op_end(&op, quota_set(&op, ino, limit, &number));
	if (r == 0)
		*ret_number = number;
	return r;
}

/* ---- The walk ---- */

struct step {
	struct kv_op *op;
	struct kv_quota_walk *walk;
	uint64_t top;    /* the domain's directory */
	uint32_t target; /* whom everybody below it joins */
};

static int step_join(struct step *step, struct kv_index_node *node)
{
	int r;

	if (node->inode.domain == step->target)
		return 1;
	node->inode.domain = step->target;
	step->op->domains.moved = true;
	step->walk->moved++;
	r = kv_op_put_node(step->op, node);
	return r < 0 ? r : 1;
}

/* One entry: its inode joins; the walk goes on behind it, or inside it. */
static int step_entry(struct step *step, const struct kv_key *key)
{
	struct kv_quota_walk *walk = step->walk;
	const struct kv_place place = {kv_key_a(key), kv_key_b(key)};
	struct kv_entry entry;
	struct kv_index_node node;
	int r = kv_view_entry_at(&step->op->view, &place, &entry);

	if (r == 0)
		r = kv_view_entry_node(&step->op->view, &entry, &node);
	if (r < 0)
		return r;
	walk->cookie = place.cookie;
	if (S_ISDIR(node.inode.mode)) {
		if (kv_index_node_is_domain(step->op->index, &node))
			return 1;
		walk->ino = node.inode.ino;
		walk->cookie = 0;
	} else if (node.inode.parent != place.parent || node.inode.cookie != place.cookie) {
		return 1; /* not its first name */
	}
	return step_join(step, &node);
}

/* At the end of a directory: 1, or 0 at the end of the pass. */
static int step_up(struct step *step)
{
	struct kv_quota_walk *walk = step->walk;
	struct kv_index_node node;
	int r;

	if (walk->ino == step->top)
		return 0;
	r = kv_view_node(&step->op->view, walk->ino, &node);
	if (r < 0 && r != -ENOENT)
		return r;
	/* Removed meanwhile, or moved to where the walk has no business: the next pass decides. */
	if (r == -ENOENT || node.inode.cookie == 0 ||
		kv_index_node_is_domain(step->op->index, &node)) {
		walk->moved++;
		return 0;
	}
	walk->ino = node.inode.parent;
	walk->cookie = node.inode.cookie;
	return 1;
}

static int step_some(struct step *step)
{
	struct kv_quota_walk *walk = step->walk;
	unsigned most = kv_reserve_steps(step->op->index, KV_QUOTA_STEP, KV_RECORDS_A_NAME);

	for (unsigned i = 0; i < most; i++) {
		struct kv_key key = kv_key_pair(KV_TABLE_DIRENT, walk->ino, walk->cookie + 1);
		struct kv_value value;
		int r = kv_view_seek(&step->op->view, KV_KEY_SINGLE_SIZE, &key, &value);

		if (r == 1)
			r = step_entry(step, &key);
		else if (r == 0)
			r = step_up(step);
		if (r != 1)
			return r;
	}
	return 1;
}

/* The end of a pass: 1 if another is needed. */
static int pass_end(struct step *step, uint32_t number)
{
	struct kv_index *index = step->op->index;
	struct kv_quota_walk *walk = step->walk;
	const struct kv_domain *domain = &index->domains[number];
	bool leaving = atomic_load(&domain->state) == KV_DOMAIN_LEAVING;
	const struct kv_domain_change fields = {
		.state = leaving ? KV_DOMAIN_DEAD : KV_DOMAIN_LIVE,
		.ino = leaving ? 0 : step->top,
		.limit = atomic_load(&domain->limit),
	};

	if ((walk->moved > 0 || walk->moves != index->directory_moves) &&
		walk->passes < PASSES_MAX) {
		*walk = (struct kv_quota_walk){.passes = walk->passes + 1};
		return 1;
	}
	return put_domain(step->op, number, &fields);
}

static int quota_step(struct kv_op *op, uint32_t number, struct kv_quota_walk *walk)
{
	const struct kv_domain *domain = &op->index->domains[number];
	uint32_t state = atomic_load(&domain->state);
	struct step step = {.op = op, .walk = walk, .top = atomic_load(&domain->ino)};
	struct kv_index_node top;
	int r;

	if (state != KV_DOMAIN_ADOPTING && state != KV_DOMAIN_LEAVING)
		return 0; /* done, or its directory was removed */
	r = kv_view_node(&op->view, step.top, &top);
	if (r < 0)
		return r;
	step.target = top.inode.domain;
	if (walk->ino == 0) {
		walk->ino = step.top;
		walk->moves = op->index->directory_moves;
	}
	r = step_some(&step);
	return r == 0 ? pass_end(&step, number) : r;
}

int kv_index_quota_step(struct kv_index *index, uint32_t number, struct kv_quota_walk *walk)
{
	struct kv_quota_walk before = *walk;
	struct kv_op op;
	int r;

	if (number == 0 || number >= KV_DOMAINS_MAX)
		return -EINVAL;
	r = kv_op_begin(&op, index);
	if (r < 0)
		return r;
	r = kv_op_end(&op, quota_step(&op, number, walk));
	if (r < 0)
		*walk = before;
	return r;
}

/* ---- Promises ---- */

int kv_index_charge(struct kv_index *index, uint32_t domain, uint64_t growth, uint64_t shrink)
{
	struct kv_domain *to = &index->domains[domain];
	uint64_t limit = atomic_load_explicit(&to->limit, memory_order_relaxed);
	uint64_t before = atomic_load_explicit(&to->taken, memory_order_relaxed);

	assert(domain < KV_DOMAINS_MAX);
	/* Not added and taken back: others would be refused for what is refused itself. */
	do {
		assert(before + growth >= shrink);
		if (growth > shrink && before + growth - shrink > limit)
			return -EDQUOT;
	} while (!atomic_compare_exchange_weak_explicit(&to->taken, &before,
		before + growth - shrink, memory_order_relaxed, memory_order_relaxed));
	return 0;
}

/* ---- Pins ---- */

static uint64_t share_of(struct kv_index *index, unsigned eighths)
{
	struct kv_space_usage usage;

	kv_space_usage(index->space, &usage);
	return usage.total / 8 * eighths;
}

int kv_index_pin_check(struct kv_index *index, uint32_t domain, uint64_t growth)
{
	struct kv_domain_info info;
	int r = kv_index_domain(index, domain, &info);

	if (r < 0)
		return r;
	if (info.pinned > info.pin_limit || growth > info.pin_limit - info.pinned)
		return -EDQUOT;
	return atomic_load_explicit(&index->pinned, memory_order_relaxed) + growth >
			       share_of(index, KV_PIN_SHARE)
		       ? -ENOSPC
		       : 0;
}

static int pin_allowed(struct kv_index *index, const struct kv_index_node *node, bool privileged)
{
	uint64_t blocks = S_ISREG(node->inode.mode) ? node->inode.blocks : 0;
	int r = kv_index_pin_check(index, node->inode.domain, blocks);

	if (r == 0 && !privileged && node->inode.domain == 0 &&
		atomic_load(&index->domains[0].pinned) + blocks >
			share_of(index, KV_PIN_SHARE_OTHERS))
		r = -ENOSPC;
	return r;
}

static int op_pin(struct kv_op *op, struct kv_index_node *node, bool pin, bool privileged)
{
	bool pinned = node->inode.flags & KV_INODE_PINNED;
	int r = 0;

	if (S_ISLNK(node->inode.mode))
		return -EINVAL;
	if (node->inode.nlink == 0)
		return -ENOENT;
	if (pinned == pin)
		return 0;
	if (pin)
		r = pin_allowed(op->index, node, privileged);
	if (r < 0)
		return r;
	node->inode.flags ^= KV_INODE_PINNED;
	op->domains.moved = true;
	return kv_op_put_node(op, node);
}

int kv_index_pin(
	struct kv_index *index, uint64_t ino, bool pin, bool privileged, struct kv_inode *ret_inode)
{
	struct kv_op op;
	struct kv_index_node node;
	int r = kv_op_begin(&op, index);

	if (r < 0)
		return r;
	r = kv_view_node(&op.view, ino, &node);
	if (r == 0)
		r = op_pin(&op, &node, pin, privileged);
	r = kv_op_end(&op, r);
	if (r == 0)
		*ret_inode = node.inode;
	return r;
}
