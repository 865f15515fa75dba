/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing a store that survived with what it may be. */
#include "tests/crash/model.h"

void model_piece_fill(const struct piece *piece, uint8_t ret_block[KV_BLOCK_SIZE])
{
	const uint64_t seed =
		((uint64_t)piece->file << 40) ^ ((uint64_t)piece->content << 16) ^ piece->block;

	unit_pattern(ret_block, KV_BLOCK_SIZE, 0, seed * UINT64_C(0x2545f4914f6cdd1d) + 1);
}

void model_violation(struct model_check *check, const char *format, ...)
{
	va_list args;

	if (check->violations++ > 0)
		return;
	va_start(args, format);
	(void)vsnprintf(check->text, sizeof(check->text), format, args);
	va_end(args);
}

static struct model_file *file_of(struct model *model, uint64_t ino)
{
	for (unsigned i = 0; i < model->file_count; i++)
		if (model->files[i].ino == ino)
			return &model->files[i];
	return NULL;
}

/* ---- What may be there ---- */

struct bounds {
	int content_first, content_last; /* first -1: none need be there */
	int name_first, name_last;
};

/* Lock-step with the token: operations of earlier steps are there, of later ones cannot be. */
static struct bounds bounds_of(const struct model_check *check, const struct model_file *file)
{
	struct bounds b = {-1, -1, 0, 0};

	for (int i = 0; i < file->promise_count; i++) {
		const struct model_promise *promise = &file->promises[i];

		if (promise->place > check->place)
			continue;
		b.content_first =
			promise->content > b.content_first ? promise->content : b.content_first;
		b.name_first = promise->name > b.name_first ? promise->name : b.name_first;
	}
	for (int i = 0; i < file->content_count; i++)
		if (file->contents[i].begun <= check->place &&
			file->contents[i].step <= check->token)
			b.content_last = i;
	for (int i = 0; i < file->name_count; i++) {
		if (file->names[i].begun > check->place || file->names[i].step > check->token)
			continue;
		b.name_last = i;
		if (file->names[i].step < check->token && i > b.name_first)
			b.name_first = i;
	}
	return b;
}

/* ---- Reading ---- */

static bool has_content(const uint8_t *bytes, size_t size, const struct model_content *content)
{
	uint8_t block[KV_BLOCK_SIZE];

	if (size != content->size)
		return false;
	for (size_t at = 0; at < size; at += KV_BLOCK_SIZE) {
		size_t part = (size_t)kv_min_u64(KV_BLOCK_SIZE, size - at);

		model_piece_fill(&content->pieces[at / KV_BLOCK_SIZE], block);
		if (memcmp(bytes + at, block, part) != 0)
			return false;
	}
	return true;
}

/* The bytes of the file, to be freed, or a negative errno. */
static int read_file(struct unit *unit, uint64_t ino, uint8_t **ret_bytes, size_t *ret_size)
{
	struct kv_version *version = NULL;
	struct kv_file *file = NULL;
	uint8_t *bytes = NULL;
	ssize_t n = -ENOMEM;
	int r = kv_file_get(unit->core, ino, &file);

	if (r == 0)
		r = kv_file_current(file, &version);
	if (r == 0) {
		*ret_size = unit_attr(version).size;
		bytes = malloc(*ret_size + 1);
		if (bytes)
			n = kv_version_read(version, bytes, *ret_size + 1, 0);
		r = n < 0 ? (int)n : (size_t)n == *ret_size ? 0 : -EIO;
		kv_version_unref(version);
	}
	kv_file_put(file);
	if (r == 0)
		*ret_bytes = bytes;
	else
		free(bytes);
	return r;
}

static void find_content(struct model_check *check, struct model_file *file, const struct bounds *b,
	const char *name)
{
	uint8_t *bytes = NULL;
	size_t size = 0;
	int r = read_file(check->unit, file->ino, &bytes, &size);

	if (r < 0) {
		if (check->flipped && (r == -ENOENT || r == -EIO))
			file->found_content = b->content_last;
		else
			model_violation(check, "%s (ino %llu) is not readable: %s", name,
				(unsigned long long)file->ino, strerror(-r));
		return;
	}
	for (int i = b->content_last; i >= 0 && i >= b->content_first; i--) {
		if (has_content(bytes, size, &file->contents[i])) {
			file->found_content = i;
			break;
		}
	}
	if (file->found_content < 0)
		model_violation(check, "%s (ino %llu), %zu bytes, is none of its contents %d to %d",
			name, (unsigned long long)file->ino, size, b->content_first,
			b->content_last);
	free(bytes);
}

/* ---- Names ---- */

struct listing {
	struct {
		uint64_t ino;
		uint32_t type;
		char text[MODEL_NAME_MAX];
	} entries[MODEL_FILES_MAX];
	unsigned count;
};

static bool note_entry(void *arg, const struct kv_dirent *dirent)
{
	struct listing *listing = arg;

	if (listing->count == MODEL_FILES_MAX || dirent->length >= MODEL_NAME_MAX)
		return false;
	listing->entries[listing->count].ino = dirent->ino;
	listing->entries[listing->count].type = dirent->type;
	memcpy(listing->entries[listing->count].text, dirent->name, dirent->length);
	listing->entries[listing->count++].text[dirent->length] = '\0';
	return true;
}

static void list(struct model_check *check, uint64_t ino, struct listing *ret_listing)
{
	*ret_listing = (struct listing){0};
	int r = kv_index_readdir(unit_index(check->unit), ino, 0, false, note_entry, ret_listing);

	if (r < 0)
		model_violation(check, "directory %llu is not readable: %s",
			(unsigned long long)ino, strerror(-r));
}

static void compare_file(struct model_check *check, uint64_t parent, const char *text, uint64_t ino)
{
	struct model_file *file = file_of(check->model, ino);
	struct bounds b;

	if (!file) {
		model_violation(
			check, "%s (ino %llu) was never made", text, (unsigned long long)ino);
		return;
	}
	if (file->found_name >= 0) {
		model_violation(check, "%s is there twice", text);
		return;
	}
	b = bounds_of(check, file);
	for (int i = b.name_last; i >= b.name_first && file->found_name < 0; i--)
		if (file->names[i].parent == parent && strcmp(file->names[i].text, text) == 0)
			file->found_name = i;
	if (file->found_name < 0)
		model_violation(check, "%s (ino %llu) is none of its names %d to %d", text,
			(unsigned long long)ino, b.name_first, b.name_last);
	else
		find_content(check, file, &b, text);
}

static void compare_directory(struct model_check *check, uint64_t ino)
{
	struct listing *listing = malloc(sizeof(*listing));

	assert_non_null(listing);
	list(check, ino, listing);
	for (unsigned i = 0; i < listing->count; i++) {
		if (listing->entries[i].type == S_IFREG)
			compare_file(check, ino, listing->entries[i].text, listing->entries[i].ino);
		else
			model_violation(check, "%s is no file", listing->entries[i].text);
	}
	free(listing);
}

static void find_token(struct model_check *check, const struct listing *listing)
{
	unsigned tokens = 0;

	for (unsigned i = 0; i < listing->count; i++)
		tokens += sscanf(listing->entries[i].text, "token-%u", &check->token) == 1;
	if (tokens != 1)
		model_violation(check, "there are %u tokens", tokens);
}

static void compare_root(struct model_check *check)
{
	struct listing *listing = malloc(sizeof(*listing));
	unsigned dirs = 0;

	assert_non_null(listing);
	list(check, KV_ROOT_INO, listing);
	find_token(check, listing);
	for (unsigned i = 0; i < listing->count; i++) {
		const char *text = listing->entries[i].text;
		uint64_t ino = listing->entries[i].ino;

		if (listing->entries[i].type == S_IFREG) {
			compare_file(check, KV_ROOT_INO, text, ino);
			continue;
		}
		if (text[0] != 'd')
			continue;
		check->model->dirs[text[1] - '0'] = ino;
		dirs++;
		compare_directory(check, ino);
	}
	if (dirs != MODEL_DIRS)
		model_violation(check, "there are %u directories", dirs);
	free(listing);
}

/* ---- What is not there ---- */

/* Whether a state without a name explains it: who took the name must have it. */
static bool is_nameless(const struct model_file *file, const struct bounds *b)
{
	for (int i = b->name_first; i <= b->name_last; i++) {
		const struct model_name *name = &file->names[i];

		if (name->parent != 0)
			continue;
		if (!name->taker || name->taker->found_name < 0 ||
			name->taker->found_name >= (int)name->taker_name)
			return true;
	}
	return false;
}

static void compare_absent(struct model_check *check)
{
	for (unsigned i = 0; i < check->model->file_count; i++) {
		struct model_file *file = &check->model->files[i];
		struct bounds b = bounds_of(check, file);
		size_t vanish = kv_min_u64(file->may_vanish, check->model->may_vanish);

		if (file->found_name >= 0 || b.content_first < 0 || vanish <= check->place ||
			is_nameless(file, &b))
			continue;
		model_violation(check, "ino %llu is gone: content %d was promised, names %d to %d",
			(unsigned long long)file->ino, b.content_first, b.name_first, b.name_last);
	}
}

void model_compare(struct model_check *check)
{
	for (unsigned i = 0; i < check->model->file_count; i++)
		check->model->files[i].found_content = check->model->files[i].found_name = -1;
	compare_root(check);
	compare_absent(check);
}

/* ---- The next life ---- */

static void forget_contents(struct model_file *file, int kept)
{
	for (int i = 0; i < file->content_count; i++)
		if (i != kept)
			free(file->contents[i].pieces);
}

void model_restart(struct model_check *check)
{
	struct model *model = check->model;
	unsigned left = 0;

	for (unsigned i = 0; i < model->file_count; i++) {
		struct model_file *file = &model->files[i];

		if (file->made <= check->place)
			model->settled_ino = kv_max_u64(model->settled_ino, file->ino);
		forget_contents(file, file->found_content);
		if (file->found_name < 0 || file->found_content < 0)
			continue;
		file->contents[0] = file->contents[file->found_content];
		file->names[0] = file->names[file->found_name];
		file->contents[0].begun = file->names[0].begun = 0;
		file->contents[0].step = file->names[0].step = 0;
		file->content_count = file->name_count = file->promise_count = 1;
		file->promises[0] = (struct model_promise){0, 0, 0};
		file->may_vanish = SIZE_MAX;
		file->made = 0;
		model->files[left++] = *file;
	}
	model->file_count = left;
	model->last_ino = model->settled_ino;
	model->step = check->token;
	model->may_vanish = model->quotas ? 0 : SIZE_MAX;
}

void model_done(struct model *model)
{
	for (unsigned i = 0; i < model->file_count; i++)
		forget_contents(&model->files[i], -1);
	free(model->files);
	*model = (struct model){0};
}
