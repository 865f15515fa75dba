/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of the workloads. What fails is no matter here: the model says what was begun. */
#include "tests/crash/work.h"

#include <linux/falloc.h>

#define BLOCKS_MAX 420u /* of one file: two chunks */

static size_t pick(struct work *work, size_t count)
{
	return (size_t)((sim_random(&work->seed) >> 16) % count);
}

static struct kv_index *index_of(struct work *work)
{
	return kv_core_index(work->unit->core);
}

static uint64_t some_parent(struct work *work)
{
	return pick(work, 3) == 0 ? KV_ROOT_INO : work->model->dirs[pick(work, MODEL_DIRS)];
}

/* ---- The model's side ---- */

static void promise(struct work *work, struct model_file *file, int content, int name)
{
	if (file->promise_count < (int)(2 * MODEL_STATES_MAX))
		file->promises[file->promise_count++] =
			(struct model_promise){sim_place(work->sim), content, name};
}

static struct model_name *add_name(
	struct work *work, struct model_file *file, uint64_t parent, size_t begun)
{
	struct model_name *name = &file->names[file->name_count++];

	*name = (struct model_name){.parent = parent, .begun = begun, .step = work->model->step};
	return name;
}

static const struct model_name *last_name(const struct model_file *file)
{
	return &file->names[file->name_count - 1];
}

/* A file that has a name, and room for more history; NULL if chance finds none. */
static struct model_file *some_file(struct work *work)
{
	for (unsigned i = 0; i < 8 && work->model->file_count > 0; i++) {
		struct model_file *file = &work->model->files[pick(work, work->model->file_count)];

		if (last_name(file)->parent != 0 && file->name_count < (int)MODEL_STATES_MAX - 2 &&
			file->content_count < (int)MODEL_STATES_MAX - 2)
			return file;
	}
	return NULL;
}

static struct model_file *named_file(struct work *work, uint64_t parent, const char *text)
{
	for (unsigned i = 0; i < work->model->file_count; i++) {
		struct model_file *file = &work->model->files[i];

		if (last_name(file)->parent == parent && strcmp(last_name(file)->text, text) == 0)
			return file;
	}
	return NULL;
}

static struct model_file *file_with(struct work *work, uint64_t ino)
{
	for (unsigned i = 0; i < work->model->file_count; i++)
		if (work->model->files[i].ino == ino)
			return &work->model->files[i];
	return NULL;
}

static struct model_content *begin_content(struct work *work, struct model_file *file, size_t size)
{
	struct model_content *content = &file->contents[file->content_count];
	size_t blocks = kv_div_round_up(size, KV_BLOCK_SIZE);

	*content = (struct model_content){
		.size = size,
		.pieces = calloc(blocks + 1, sizeof(struct piece)),
		.step = work->model->step,
	};
	assert_non_null(content->pieces);
	return content;
}

/* ---- Content ---- */

static int write_block(
	struct kv_version *version, const struct model_content *content, size_t number)
{
	uint8_t block[KV_BLOCK_SIZE];
	size_t at = number * KV_BLOCK_SIZE;

	model_piece_fill(&content->pieces[number], block);
	return kv_version_write(
		version, block, (size_t)kv_min_u64(KV_BLOCK_SIZE, content->size - at), at);
}

/* Publishes VERSION as the content that begin_content began, and now and then waits for it. */
static void publish(struct work *work, struct model_file *file, struct kv_version *version, int r)
{
	struct model_content *content = &file->contents[file->content_count];

	content->begun = sim_place(work->sim);
	if (r == 0)
		r = unit_publish(version);
	if (r < 0) {
		free(content->pieces);
		return;
	}
	int number = file->content_count++, name = file->name_count - 1;
	if (pick(work, 3) == 0 && kv_version_sync(version) == 0)
		promise(work, file, number, name);
}

static size_t some_size(struct work *work)
{
	size_t blocks = pick(work, 12) == 0 ? 1 + pick(work, BLOCKS_MAX) : 1 + pick(work, 8);

	return blocks * KV_BLOCK_SIZE - (pick(work, 2) == 0 ? 0 : pick(work, KV_BLOCK_SIZE - 1));
}

static struct model_file *make_file(struct work *work)
{
	uint64_t parent = some_parent(work);
	char text[MODEL_NAME_MAX];
	(void)snprintf(text, sizeof(text), "f%u", (unsigned)pick(work, 24));
	const struct kv_make make = {
		.parent = parent,
		.name = text,
		.length = strlen(text),
		.mode = S_IFREG | 0644,
		.now_ns = kv_core_now_ns(work->unit->core),
		.hold = true,
	};
	struct kv_inode inode;
	struct model_file *file;
	size_t begun = sim_place(work->sim);

	if (work->model->file_count == MODEL_FILES_MAX ||
		kv_index_make(index_of(work), &make, &inode) < 0)
		return NULL;
	/* Inode numbers are never used again, also not those that a crash lost. */
	assert_true(inode.ino > work->model->last_ino);
	work->model->last_ino = inode.ino;
	file = &work->model->files[work->model->file_count++];
	*file = (struct model_file){
		.ino = inode.ino, .made = sim_place(work->sim), .may_vanish = SIZE_MAX};
	(void)snprintf(add_name(work, file, parent, begun)->text, MODEL_NAME_MAX, "%s", text);
	work->file_number++;
	return file;
}

/* New bytes for block NUMBER. */
static void new_piece(struct work *work, struct model_content *content, size_t number)
{
	content->pieces[number] =
		(struct piece){work->file_number, work->model->contents, (uint32_t)number};
}

static void write_all(struct work *work, struct model_file *file)
{
	struct kv_file *core_file;
	struct kv_version *version;
	struct model_content *content = begin_content(work, file, some_size(work));
	int r = kv_file_get(work->unit->core, file->ino, &core_file);

	work->model->contents++;
	if (r == 0)
		r = kv_version_new(core_file, NULL, &version);
	if (r < 0) {
		free(content->pieces);
		return;
	}
	for (size_t b = 0; b * KV_BLOCK_SIZE < content->size; b++) {
		new_piece(work, content, b);
		if (r == 0)
			r = write_block(version, content, b);
	}
	publish(work, file, version, r);
	kv_version_unref(version);
	kv_file_put(core_file);
}

static void do_store(struct work *work)
{
	struct model_file *file = make_file(work);

	if (file)
		write_all(work, file);
}

static void do_overwrite(struct work *work)
{
	struct model_file *file = some_file(work);

	if (file)
		write_all(work, file);
}

/* Changes some blocks of BASE, cuts it or makes it longer. CONTENT has what BASE has. */
static int change(struct work *work, struct kv_version *version, struct model_content *content,
	size_t old_size)
{
	size_t old_blocks = kv_div_round_up(old_size, KV_BLOCK_SIZE);
	size_t blocks = kv_div_round_up(content->size, KV_BLOCK_SIZE);
	int r = content->size < old_size ? kv_version_truncate(version, content->size) : 0;

	for (size_t b = 0; b < blocks && r == 0; b++) {
		/* Where it grows, the old last block is written anew, for what was behind its end.
		 */
		bool wanted = b >= old_blocks ||
			      (b + 1 == old_blocks && content->size > old_size) ||
			      pick(work, 4) == 0;
		if (!wanted)
			continue;
		new_piece(work, content, b);
		r = write_block(version, content, b);
	}
	return r;
}

/* Which of FILE's contents BASE has: by its bytes, for the newest may have been lost to a fault. */
static const struct model_content *content_of(
	const struct model_file *file, struct kv_version *base)
{
	uint8_t block[KV_BLOCK_SIZE], expected[KV_BLOCK_SIZE];

	for (int i = file->content_count - 1; i >= 0; i--) {
		const struct model_content *content = &file->contents[i];
		bool same = content->size == unit_attr(base).size;

		for (size_t at = 0; at < content->size && same; at += KV_BLOCK_SIZE) {
			size_t part = (size_t)kv_min_u64(KV_BLOCK_SIZE, content->size - at);

			model_piece_fill(&content->pieces[at / KV_BLOCK_SIZE], expected);
			same = kv_version_read(base, block, part, at) == (ssize_t)part &&
			       memcmp(block, expected, part) == 0;
		}
		if (same)
			return content;
	}
	return NULL;
}

/* The current version of FILE and its content, with references; false if there is none to read. */
static bool get_current(struct work *work, struct model_file *file, struct kv_file **ret_file,
	struct kv_version **ret_version, const struct model_content **ret_content)
{
	if (kv_file_get(work->unit->core, file->ino, ret_file) < 0)
		return false;
	if (kv_file_current(*ret_file, ret_version) < 0) {
		kv_file_put(*ret_file);
		return false;
	}
	*ret_content = content_of(file, *ret_version);
	if (*ret_content)
		return true;
	kv_version_unref(*ret_version);
	kv_file_put(*ret_file);
	return false;
}

static void do_rewrite(struct work *work)
{
	struct model_file *file = some_file(work);
	const struct model_content *old;
	struct kv_version *base, *version;
	struct kv_file *core_file;

	if (!file || !get_current(work, file, &core_file, &base, &old))
		return;
	size_t size = pick(work, 3) > 0 ? old->size : some_size(work);
	struct model_content *content = begin_content(work, file, size);
	memcpy(content->pieces, old->pieces,
		kv_div_round_up(kv_min_u64(size, old->size), KV_BLOCK_SIZE) * sizeof(struct piece));
	work->model->contents++;
	work->file_number++;
	if (kv_version_new(core_file, base, &version) == 0) {
		publish(work, file, version, change(work, version, content, old->size));
		kv_version_unref(version);
	} else {
		free(content->pieces);
	}
	kv_version_unref(base);
	kv_file_put(core_file);
}

static void do_clone(struct work *work)
{
	struct model_file *from = some_file(work);
	const struct model_content *old;
	struct kv_version *source, *version;
	struct kv_file *source_file, *core_file;
	uint64_t copied = 0;

	if (!from || !get_current(work, from, &source_file, &source, &old))
		return;
	struct model_file *file = make_file(work);
	if (file && kv_file_get(work->unit->core, file->ino, &core_file) == 0) {
		struct model_content *content = begin_content(work, file, old->size);
		const struct kv_clone clone = {.from = source, .length = old->size};

		memcpy(content->pieces, old->pieces,
			kv_div_round_up(old->size, KV_BLOCK_SIZE) * sizeof(struct piece));
		int r = kv_version_new(core_file, NULL, &version);
		if (r == 0) {
			r = kv_version_clone(version, &clone, &copied);
			publish(work, file, version, r == 0 && copied < old->size ? -EIO : r);
			kv_version_unref(version);
		} else {
			free(content->pieces);
		}
		kv_file_put(core_file);
	}
	kv_version_unref(source);
	kv_file_put(source_file);
}

/* ---- Names ---- */

static void sync_file(struct work *work, struct model_file *file)
{
	struct kv_version *version;
	struct kv_file *core_file;

	if (kv_file_get(work->unit->core, file->ino, &core_file) < 0)
		return;
	if (kv_file_current(core_file, &version) == 0) {
		(void)kv_version_sync(version);
		kv_version_unref(version);
	}
	kv_file_put(core_file);
}

static void do_rename(struct work *work)
{
	struct model_file *file = some_file(work);
	uint64_t parent = some_parent(work);
	char text[MODEL_NAME_MAX];
	struct kv_inode moved, replaced = {0};
	int r = -EINPROGRESS;

	if (!file)
		return;
	(void)snprintf(text, sizeof(text), "f%u", (unsigned)pick(work, 24));
	struct model_file *target = named_file(work, parent, text);
	const struct model_name from = *last_name(file);
	const struct kv_rename rename = {from.parent, from.text, strlen(from.text), parent, text,
		strlen(text), 0, kv_core_now_ns(work->unit->core)};
	size_t begun = sim_place(work->sim);
	if (target == file || (target && target->name_count >= (int)MODEL_STATES_MAX - 1))
		return;
	for (unsigned i = 0; i < 3 && r == -EINPROGRESS; i++) {
		r = kv_index_rename(index_of(work), &rename, &moved, &replaced);
		if (r == -EINPROGRESS) {
			sync_file(work, file);
			if (target)
				sync_file(work, target);
		}
	}
	if (r < 0)
		return;
	assert_int_equal(moved.ino, file->ino);
	(void)snprintf(add_name(work, file, parent, begun)->text, MODEL_NAME_MAX, "%s", text);
	if (replaced.ino == 0)
		return;
	/* By number: who had the name in the model may have been evicted meanwhile. */
	target = file_with(work, replaced.ino);
	assert_non_null(target);
	struct model_name *none = add_name(work, target, 0, begun);
	none->taker = file;
	none->taker_name = (unsigned)file->name_count - 1;
	kv_core_orphan(work->unit->core, replaced.ino);
}

static void do_unlink(struct work *work)
{
	struct model_file *file = some_file(work);
	size_t begun = sim_place(work->sim);
	struct kv_inode inode;

	if (!file)
		return;
	const struct model_name name = *last_name(file);
	if (kv_index_unlink(index_of(work), name.parent, name.text, strlen(name.text), false, 0,
		    kv_core_now_ns(work->unit->core), &inode) < 0)
		return;
	(void)add_name(work, file, 0, begun);
	kv_core_orphan(work->unit->core, inode.ino);
}

static void do_evict(struct work *work)
{
	struct model_file *file = some_file(work);
	size_t begun = sim_place(work->sim);
	uint64_t bytes;

	if (!file)
		return;
	/* Also one that failed may have gone half of the way. */
	file->may_vanish = kv_min_u64(file->may_vanish, begun);
	if (kv_core_evict(work->unit->core, file->ino, true, &bytes) == 0)
		(void)add_name(work, file, 0, begun);
}

static void do_quota(struct work *work)
{
	uint64_t limit = pick(work, 3) == 0 ? 0 : 20 + pick(work, 200);

	work->model->may_vanish = kv_min_u64(work->model->may_vanish, sim_place(work->sim));
	work->model->quotas = true;
	(void)kv_core_set_quota(work->unit->core, work->model->dirs[pick(work, MODEL_DIRS)], limit);
}

static void do_retire(struct work *work)
{
	uint64_t *dir = &work->model->dirs[pick(work, MODEL_DIRS)];
	const struct kv_retire retire = {.ino = *dir, .now_ns = kv_core_now_ns(work->unit->core)};
	size_t begun = sim_place(work->sim);
	struct kv_inode fresh;

	if (kv_index_retire(index_of(work), &retire, &fresh) != 1)
		return;
	for (unsigned i = 0; i < work->model->file_count; i++) {
		struct model_file *file = &work->model->files[i];

		if (last_name(file)->parent == *dir)
			(void)add_name(work, file, 0, begun);
	}
	kv_core_retired(work->unit->core, *dir);
	kv_core_orphan(work->unit->core, *dir);
	work->model->last_ino = fresh.ino;
	*dir = fresh.ino;
}

static void do_pin(struct work *work)
{
	struct model_file *file = some_file(work);
	struct kv_inode inode;

	if (file)
		(void)kv_index_pin(index_of(work), file->ino, pick(work, 3) > 0, true, &inode);
}

/* What a sync of everything promises: the newest content, as far as it was not lost to a fault. */
static void do_sync(struct work *work)
{
	if (kv_core_sync(work->unit->core) < 0)
		return;
	for (unsigned i = 0; i < work->model->file_count; i++) {
		struct model_file *file = &work->model->files[i];

		if (file->content_count > 0 && work->sim->struck == 0)
			promise(work, file, file->content_count - 1, file->name_count - 1);
	}
}

/* ---- Steps ---- */

enum { STORE, OVERWRITE, REWRITE, CLONE, RENAME, UNLINK, EVICT, QUOTA, RETIRE, PIN, SYNC, STEPS };

static void (*const steps[STEPS])(struct work *work) = {do_store, do_overwrite, do_rewrite,
	do_clone, do_rename, do_unlink, do_evict, do_quota, do_retire, do_pin, do_sync};

static const struct {
	const char *name;
	unsigned char weights[STEPS];
} kinds[_WORK_KIND_MAX] = {
	[WORK_STORE] = {"store", {12, 2, 0, 0, 0, 2, 0, 0, 0, 1, 1}},
	[WORK_REWRITE] = {"rewrite", {4, 4, 12, 0, 0, 1, 0, 0, 0, 1, 1}},
	[WORK_RENAME] = {"rename", {6, 1, 1, 0, 12, 2, 0, 0, 0, 0, 1}},
	[WORK_EVICT] = {"evict", {10, 2, 2, 1, 0, 0, 6, 0, 0, 1, 1}},
	[WORK_CLONE] = {"clone", {4, 1, 5, 8, 1, 3, 1, 0, 0, 0, 1}},
	[WORK_QUOTA] = {"quota", {9, 2, 2, 1, 4, 1, 0, 5, 0, 2, 1}},
	[WORK_RETIRE] = {"retire", {12, 1, 1, 1, 3, 0, 0, 1, 4, 0, 1}},
	[WORK_MIXED] = {"mixed", {8, 2, 4, 3, 4, 2, 2, 1, 1, 1, 1}},
};

const char *work_name(enum work_kind kind)
{
	return kinds[kind].name;
}

static void make_directory(struct work *work, const char *name, uint64_t *ret_ino)
{
	const struct kv_make make = {.parent = KV_ROOT_INO,
		.name = name,
		.length = strlen(name),
		.mode = S_IFDIR | 0755};
	struct kv_inode inode;

	assert_int_equal(kv_index_make(index_of(work), &make, &inode), 0);
	work->model->last_ino = inode.ino;
	*ret_ino = inode.ino;
}

void work_prepare(struct work *work)
{
	char name[] = "d0";
	uint64_t token;

	for (unsigned i = 0; i < MODEL_DIRS; i++) {
		name[1] = (char)('0' + i);
		make_directory(work, name, &work->model->dirs[i]);
	}
	make_directory(work, "token-0", &token);
	work->model->files = calloc(MODEL_FILES_MAX, sizeof(*work->model->files));
	assert_non_null(work->model->files);
	work->model->may_vanish = SIZE_MAX;
}

/* A refused rename leaves the token behind, and the next step has the same number. */
static void move_token(struct work *work)
{
	char from[MODEL_NAME_MAX], to[MODEL_NAME_MAX];
	struct kv_inode moved, replaced;

	(void)snprintf(from, sizeof(from), "token-%u", work->model->step);
	(void)snprintf(to, sizeof(to), "token-%u", work->model->step + 1);
	const struct kv_rename rename = {
		KV_ROOT_INO, from, strlen(from), KV_ROOT_INO, to, strlen(to), 0, 1};
	if (kv_index_rename(index_of(work), &rename, &moved, &replaced) == 0)
		work->model->step++;
}

static unsigned some_step(struct work *work)
{
	const unsigned char *weights = kinds[work->kind].weights;
	size_t sum = 0, at;
	unsigned i = 0;

	for (unsigned j = 0; j < STEPS; j++)
		sum += weights[j];
	for (at = pick(work, sum); at >= weights[i]; i++)
		at -= weights[i];
	return i;
}

void work_run(struct work *work, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		steps[some_step(work)](work);
		move_token(work);
	}
}
