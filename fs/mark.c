/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of objects, which say what another process may make of them. In hexadecimal, with points:
 *
 *	ino serial                   nothing: it is being written, or was never committed
 *	ino serial version           what is there may be of that version: it has to be checked
 *	ino serial version sum       all of that version is there
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fs/dram.h"
#include "fs/dram_internal.h"

void kv_mark_name(const struct kv_mark *mark, char ret_name[KV_OBJECT_NAME_SIZE])
{
	int length = snprintf(
		ret_name, KV_OBJECT_NAME_SIZE, "%" PRIx64 ".%" PRIx64, mark->ino, mark->serial);

	if (mark->kind != KV_MARK_NONE)
		length += snprintf(ret_name + length, KV_OBJECT_NAME_SIZE - (size_t)length,
			".%" PRIx64, mark->version);
	if (mark->kind == KV_MARK_WHOLE)
		(void)snprintf(ret_name + length, KV_OBJECT_NAME_SIZE - (size_t)length, ".%" PRIx64,
			mark->sum);
}

static bool parse(const char *name, struct kv_mark *ret_mark)
{
	char again[KV_OBJECT_NAME_SIZE];
	struct kv_mark mark = {0};
	int count = sscanf(name, "%" SCNx64 ".%" SCNx64 ".%" SCNx64 ".%" SCNx64, &mark.ino,
		&mark.serial, &mark.version, &mark.sum);

	if (count < 2)
		return false;
	mark.kind = count == 2 ? KV_MARK_NONE : count == 3 ? KV_MARK_PART : KV_MARK_WHOLE;
	kv_mark_name(&mark, again);
	if (strcmp(name, again) != 0)
		return false;
	*ret_mark = mark;
	return true;
}

int kv_object_mark(struct kv_object *object, const struct kv_mark *mark)
{
	char from[KV_OBJECT_NAME_SIZE], to[KV_OBJECT_NAME_SIZE];
	struct kv_dram *dram = object->dram;
	struct kv_mark wanted = *mark;
	KV_LOCKED(&dram->lock);

	wanted.ino = object->mark.ino;
	wanted.serial = object->mark.serial;
	kv_mark_name(&object->mark, from);
	kv_mark_name(&wanted, to);
	if (!dram->options.shared || strcmp(from, to) == 0)
		return 0;
	if (renameat(dram->mount_fd, from, dram->mount_fd, to) < 0)
		return -errno;
	object->mark = wanted;
	return 0;
}

static int add(struct kv_mark **marks, size_t *count, size_t *capacity, const struct kv_mark *mark)
{
	if (*count == *capacity) {
		size_t larger = *capacity ? *capacity * 2 : 256;
		struct kv_mark *more = realloc(*marks, larger * sizeof(*more));

		if (!more)
			return -ENOMEM;
		*marks = more;
		*capacity = larger;
	}
	(*marks)[(*count)++] = *mark;
	return 0;
}

int kv_dram_found(struct kv_dram *dram, bool (*keep)(void *arg, const struct kv_mark *mark),
	void *arg, struct kv_mark **ret_marks, size_t *ret_count)
{
	_cleanup_free_ struct kv_mark *marks = NULL;
	size_t count = 0, capacity = 0;
	const struct dirent *entry;
	int fd = openat(dram->mount_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	int r = 0;

	if (!directory) {
		r = -errno;
		if (fd >= 0)
			(void)close(fd);
		return r;
	}
	while (r == 0 && (entry = readdir(directory))) {
		struct kv_mark mark;

		bool is_ours = parse(entry->d_name, &mark);

		if (is_ours && mark.kind != KV_MARK_NONE)
			r = add(&marks, &count, &capacity, &mark);
		else if (entry->d_name[0] != '.' && !(is_ours && keep(arg, &mark)))
			(void)unlinkat(dram->mount_fd, entry->d_name, 0);
	}
	(void)closedir(directory);
	if (r < 0)
		return r;
	*ret_marks = kv_steal_ptr(&marks);
	*ret_count = count;
	return 0;
}

int kv_object_find(struct kv_dram *dram, const struct kv_mark *mark, struct kv_found *ret_found)
{
	_cleanup_free_ struct kv_object *object = calloc(1, sizeof(*object));
	char name[KV_OBJECT_NAME_SIZE];
	struct stat st;
	KV_LOCKED(&dram->lock);

	if (!object)
		return -ENOMEM;
	kv_mark_name(mark, name);
	if (fstatat(dram->mount_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return -errno;
	object->dram = dram;
	object->mark = *mark;
	object->fd = -1;
	dram->objects++;
	*ret_found = (struct kv_found){
		.object = kv_steal_ptr(&object),
		.size = (uint64_t)st.st_size,
		.allocated = (uint64_t)st.st_blocks * 512,
	};
	return 0;
}
