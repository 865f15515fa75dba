/* SPDX-License-Identifier: Apache-2.0 */
/* Checking and repairing a store: the frame of it. See store_check.h. */
#include "fs/store_check.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/store_check_internal.h"
#include "index/repair.h"

#define INDEX_NEW KV_STORE_INDEX KV_STORE_NEW_SUFFIX
/* A repair may show damage that could not be seen before: it is then repaired, too. */
#define ROUNDS_MAX 3u
/* umount returns before the daemon has written everything back. */
#define CLOSING_WAIT_MS 30000u

void kv_checking_tell(struct kv_checking *checking, const struct kv_violation *violation)
{
	const struct kv_check_to *to = &checking->check->found;

	checking->result->violations++;
	if (to->tell)
		to->tell(to->arg, violation);
}

void kv_checking_say(struct kv_checking *checking, const char *format, ...)
{
	char text[512];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	kv_checking_tell(checking, &(struct kv_violation){.text = text});
}

int kv_checking_add_bad(struct kv_checking *checking, uint64_t ino)
{
	uint64_t *grown;

	if (checking->bad_count == checking->bad_capacity) {
		size_t capacity = kv_max_u64(64, 2 * checking->bad_capacity);

		grown = reallocarray(checking->bad, capacity, sizeof(*grown));
		if (!grown)
			return -ENOMEM;
		checking->bad = grown;
		checking->bad_capacity = capacity;
	}
	checking->bad[checking->bad_count++] = ino;
	return 0;
}

static int index_path(struct kv_checking *checking, const char *name, char **ret_path)
{
	if (asprintf(ret_path, "%s/%s", checking->path, name) < 0) {
		*ret_path = NULL;
		return kv_fail(&checking->error, -ENOMEM, "out of memory");
	}
	return 0;
}

/* ---- Looking ---- */

static void found(void *arg, const struct kv_violation *violation)
{
	struct kv_checking *checking = arg;

	checking->index_damaged = true;
	kv_checking_tell(checking, violation);
}

static int check_index(struct kv_checking *checking)
{
	const struct kv_check_to to = {found, checking};
	_cleanup_free_ char *path = NULL;
	size_t violations;
	int r = kv_store_check_index_files(
		&checking->error, checking->directory_fd, checking->path);

	if (r == 0)
		r = index_path(checking, KV_STORE_INDEX, &path);
	if (r < 0)
		return r;
	r = kv_index_inspect(path, &to, &checking->index, &violations, checking->error.text,
		checking->error.size);
	if (r == -EUCLEAN) {
		checking->index_damaged = true;
		kv_checking_say(checking, "%s", checking->error.text);
		return 0;
	}
	return r;
}

static int check_tables(struct kv_checking *checking)
{
	const struct kv_check_to to = {found, checking};
	ssize_t r = checking->index ? kv_index_check_all(checking->index, &to) : 0;

	return r < 0 ? kv_fail(&checking->error, (int)r, "the index of %s cannot be checked: %s",
			       checking->path, strerror((int)-r))
		     : 0;
}

static int check_all(struct kv_checking *checking)
{
	int r = check_index(checking);

	if (r == 0)
		r = kv_checking_devices(checking);
	if (r == 0)
		r = check_tables(checking);
	if (r == 0 && checking->check->data && checking->index)
		r = kv_checking_data(checking);
	return r;
}

/* ---- Repairing ---- */

static void dropped(void *arg, const struct kv_violation *violation)
{
	struct kv_checking *checking = arg;
	const struct kv_check_to *to = &checking->check->dropped;

	checking->result->dropped++;
	if (to->tell)
		to->tell(to->arg, violation);
}

static int compare_inos(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* Opens the new index as the one that is checked, if it is sound. */
static int prove_index(struct kv_checking *checking, const char *path)
{
	const struct kv_check_to nobody = {0};
	size_t violations;
	ssize_t r = kv_index_inspect(path, &nobody, &checking->index, &violations,
		checking->error.text, checking->error.size);

	if (r == 0)
		r = kv_index_check_all(checking->index, &nobody);
	if (r > 0 || (r == 0 && violations > 0))
		return kv_fail(&checking->error, -EUCLEAN,
			"the repair of %s did not make it sound, so it was left as it is; make it "
			"anew with `kvfs format --force`",
			checking->path);
	return (int)r;
}

static int make_index(struct kv_checking *checking)
{
	_cleanup_free_ char *path = NULL;
	_cleanup_free_ char *new_path = NULL;
	struct kv_index_repair repair = {
		.bad = checking->bad,
		.bad_count = checking->bad_count,
		.dropped = {dropped, checking},
	};
	int r = index_path(checking, KV_STORE_INDEX, &path);

	if (r == 0)
		r = index_path(checking, INDEX_NEW, &new_path);
	if (r == 0)
		r = kv_store_remove_directory(checking->directory_fd, INDEX_NEW);
	if (r == 0 && mkdirat(checking->directory_fd, INDEX_NEW, 0700) < 0)
		r = -errno;
	if (r < 0)
		return kv_fail(&checking->error, r, "%s/" INDEX_NEW " cannot be made: %s",
			checking->path, strerror(-r));
	repair.path = path;
	repair.new_path = new_path;
	qsort(checking->bad, checking->bad_count, sizeof(checking->bad[0]), compare_inos);
	r = kv_index_repair(&repair, checking->error.text, checking->error.size);
	checking->index = kv_index_close(checking->index);
	return r < 0 ? r : prove_index(checking, new_path);
}

/*
 * The index that is open stays open: it is the new one, whatever its name. After an error the old
 * one has its name again, or, where ret_kept says so, that of the new one.
 */
static int put_index(struct kv_checking *checking, bool *ret_kept)
{
	int r = kv_store_swap(checking->directory_fd, KV_STORE_INDEX, INDEX_NEW);

	*ret_kept = false;
	if (r == 0 && fsync(checking->directory_fd) < 0) {
		r = -errno;
		*ret_kept = kv_store_swap(checking->directory_fd, KV_STORE_INDEX, INDEX_NEW) < 0;
	}
	if (r < 0)
		return kv_fail(&checking->error, r,
			"the new index of %s cannot be put in place: %s%s", checking->path,
			strerror(-r), *ret_kept ? "; the old one is " INDEX_NEW " there now" : "");
	(void)kv_store_remove_directory(checking->directory_fd, INDEX_NEW);
	checking->index_damaged = false;
	checking->bad_count = 0;
	return 0;
}

static int repair_index(struct kv_checking *checking)
{
	bool kept = false;
	int r = make_index(checking);

	if (r == 0)
		r = put_index(checking, &kept);
	if (r < 0) {
		if (!kept)
			(void)kv_store_remove_directory(checking->directory_fd, INDEX_NEW);
		checking->result->left = true;
	}
	return r;
}

static int repair_all(struct kv_checking *checking)
{
	bool unknown = !checking->index;
	int r = 0;

	for (unsigned i = 0;
		r == 0 && (checking->index_damaged || checking->bad_count > 0) && i < ROUNDS_MAX;
		i++) {
		r = repair_index(checking);
		/* Only now is it known what the devices are to be, and what there is to read. */
		if (r == 0 && unknown)
			r = kv_checking_identify(checking);
		if (r == 0 && unknown && checking->check->data)
			r = kv_checking_data(checking);
		unknown = false;
	}
	return r == 0 ? kv_checking_mend_devices(checking) : r;
}

/* ---- All of it ---- */

static int open_store(struct kv_checking *checking)
{
	const struct kv_store_check *check = checking->check;
	const struct kv_error *error = &checking->error;

	checking->path = realpath(check->path, NULL);
	if (!checking->path)
		return kv_fail(
			error, -errno, "%s cannot be opened: %s", check->path, strerror(errno));
	checking->directory_fd = kv_store_open_directory(error, checking->path);
	if (checking->directory_fd < 0)
		return checking->directory_fd;
	checking->lock_fd = kv_store_take_lock_patiently(
		error, checking->directory_fd, checking->path, CLOSING_WAIT_MS, !check->repair);
	if (checking->lock_fd < 0)
		return checking->lock_fd;
	return kv_store_read_devices(
		error, checking->directory_fd, checking->path, &checking->list);
}

static void close_store(struct kv_checking *checking)
{
	(void)kv_index_close(checking->index);
	for (unsigned i = 0; i < KV_DEVICES_MAX; i++)
		kv_cleanup_fd(&checking->devices[i].fd);
	kv_store_devices_done(&checking->list);
	kv_cleanup_fd(&checking->lock_fd);
	kv_cleanup_fd(&checking->directory_fd);
	free(checking->bad);
	free(checking->path);
}

int kv_store_check(const struct kv_store_check *check, struct kv_store_check_result *ret_result,
	char *ret_error, size_t error_size)
{
	struct kv_checking *checking = calloc(1, sizeof(*checking));
	int r;

	*ret_result = (struct kv_store_check_result){0};
	if (!checking) {
		(void)snprintf(ret_error, error_size, "out of memory");
		return -ENOMEM;
	}
	checking->check = check;
	checking->result = ret_result;
	checking->error = (struct kv_error){ret_error, error_size};
	checking->directory_fd = checking->lock_fd = -1;
	for (unsigned i = 0; i < KV_DEVICES_MAX; i++)
		checking->devices[i].fd = -1;
	r = open_store(checking);
	if (r == 0)
		r = check_all(checking);
	if (r == 0 && ret_result->violations > 0 && check->repair)
		r = repair_all(checking);
	else if (r == 0)
		ret_result->left = ret_result->violations > 0;
	close_store(checking);
	free(checking);
	return r;
}
