/* SPDX-License-Identifier: Apache-2.0 */
/* Opening an index that may be damaged, to be looked at: see check.h. */
#include <fcntl.h>
#include <stdio.h>

#include "fs/error.h"
#include "index/check.h"
#include "index/index_internal.h"
#include "index/pages.h"

struct inspection {
	const struct kv_check_to *to;
	size_t violations;
};

static void tell(struct inspection *inspection, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

static void tell(struct inspection *inspection, const char *format, ...)
{
	char text[256];
	va_list args;

	inspection->violations++;
	if (!inspection->to->tell)
		return;
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	inspection->to->tell(inspection->to->arg, &(struct kv_violation){.text = text});
}

static void tell_page(void *arg, uint64_t page, const char *what)
{
	tell(arg, "index page %llu: %s", (unsigned long long)page, what);
}

static int check_pages(
	struct inspection *inspection, const char *path, const struct kv_error *error)
{
	_cleanup_fd_ int fd = kv_pages_open(path);
	struct kv_pages pages = {.damage = tell_page, .arg = inspection};
	ssize_t damages;

	if (fd < 0)
		return kv_fail(error, fd, "%s/data.mdb cannot be opened: %s", path, strerror(-fd));
	pages.fd = fd;
	damages = kv_pages_check(&pages);
	if (damages == -EUCLEAN)
		return kv_fail(error, -EUCLEAN, "%s/data.mdb has no root that could be read", path);
	if (damages < 0)
		return kv_fail(error, (int)damages, "%s/data.mdb cannot be checked: %s", path,
			strerror((int)-damages));
	if (damages > 0)
		return kv_fail(error, -EUCLEAN,
			"%s/data.mdb has damaged pages: what is on the others cannot be checked "
			"before a repair",
			path);
	return 0;
}

static int load(struct kv_index *index, struct inspection *inspection, const struct kv_error *error)
{
	struct kv_state state = {.next_ino = INT64_MAX};
	char text[256];
	int r = kv_index_load_meta(index, &state);

	if (r < 0 && (r != -EUCLEAN || index->record.store.device_count == 0))
		return kv_fail(error, r, "%s", kv_index_meta_error(index, r, text, sizeof(text)));
	if (r < 0)
		tell(inspection, "the counters of the store cannot be read");
	index->inodes = state.inodes;
	atomic_store(&index->next_ino, state.next_ino);
	atomic_store(&index->ino_limit, state.next_ino);
	r = kv_domains_load(index);
	if (r < 0)
		tell(inspection, "the quotas cannot be read: %s", strerror(-r));
	r = kv_space_new(index, 0, &index->space);
	if (r == -ENOMEM)
		return kv_fail(error, r, "out of memory");
	if (r < 0)
		tell(inspection, "the counts of used blocks cannot be read: %s", strerror(-r));
	else if (state.used_blocks != kv_space_used(index->space))
		tell(inspection, "the store counts %llu used blocks, its devices %llu",
			(unsigned long long)state.used_blocks,
			(unsigned long long)kv_space_used(index->space));
	return 0;
}

int kv_index_inspect(const char *path, const struct kv_check_to *to, struct kv_index **ret_index,
	size_t *ret_violations, char *ret_error, size_t error_size)
{
	const struct kv_error error = {ret_error, error_size};
	struct inspection inspection = {.to = to};
	struct kv_index *index = NULL;
	int r = kv_index_file_check(path);

	*ret_violations = 0;
	if (r < 0)
		return kv_fail(&error, r, "%s/data.mdb cannot be used: %s", path, strerror(-r));
	r = check_pages(&inspection, path, &error);
	*ret_violations = inspection.violations;
	if (r < 0)
		return r;
	r = kv_index_new(&(struct kv_index_options){0}, &index);
	if (r < 0)
		return kv_fail(&error, r, "out of memory");
	/* Nobody else is there: the lock file is left as it is. */
	r = kv_env_attach(index, path, 0, MDB_RDONLY | MDB_NOLOCK);
	if (r < 0)
		r = kv_fail(&error, r, "the index in %s cannot be opened: %s", path, strerror(-r));
	else
		r = load(index, &inspection, &error);
	*ret_violations = inspection.violations;
	if (r < 0) {
		(void)kv_index_close(index);
		return r;
	}
	*ret_index = index;
	return 0;
}
