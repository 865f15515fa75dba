/* SPDX-License-Identifier: Apache-2.0 */
/* The table of virtual attributes: see attributes.h. */

#include "fs/attributes.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>

#include "fs/control.h"
#include "fs/daemon.h"
#include "fs/keep.h"

/* Runs that user.kvfs.extents names. */
#define RUNS_MAX 8u

struct subject {
	struct kv_daemon *daemon;
	const struct kv_inode *inode;
	const char *key; /* of the attribute */
};

/* ---- The values ---- */

static int print_tier(FILE *out, const struct subject *subject)
{
	struct kv_content_report content;

	kv_control_content(subject->daemon, subject->inode, &content);
	fputs(content.tier, out);
	return 0;
}

static int print_hits(FILE *out, const struct subject *subject)
{
	fprintf(out, "%" PRIu32, subject->inode->hits);
	return 0;
}

static int print_version(FILE *out, const struct subject *subject)
{
	struct kv_version *version = kv_control_version(subject->daemon, subject->inode->ino);
	struct kv_version_attr attr = {.number = subject->inode->version};

	if (version)
		kv_version_attr(version, &attr);
	kv_version_unref(version);
	fprintf(out, "%" PRIu64, attr.number);
	return 0;
}

static int print_checksum(FILE *out, const struct subject *subject)
{
	struct kv_content_report content;

	kv_control_content(subject->daemon, subject->inode, &content);
	fputs(content.checksum, out);
	return 0;
}

struct runs {
	FILE *out;
	unsigned count;
	uint32_t device; /* of the last run, not printed yet */
	uint64_t offset; /* bytes */
	uint64_t length; /* bytes */
};

static void print_run(struct runs *runs)
{
	if (runs->length > 0)
		fprintf(runs->out, "%s%" PRIu32 ":%" PRIu64 "+%" PRIu64,
			runs->count++ > 0 ? " " : "", runs->device, runs->offset, runs->length);
	runs->length = 0;
}

static bool add_extents(void *arg, const struct kv_chunk_info *info)
{
	struct runs *runs = arg;

	for (uint32_t i = 0; i < info->extent_count; i++) {
		const struct kv_extent *extent = &info->extents[i];
		uint64_t offset = kv_extent_offset(extent);
		uint64_t length = (uint64_t)extent->count << KV_BLOCK_SHIFT;

		if (runs->length > 0 && runs->device == extent->device &&
			runs->offset + runs->length == offset) {
			runs->length += length;
			continue;
		}
		print_run(runs);
		if (runs->count == RUNS_MAX) {
			fputs(" ...", runs->out);
			return false;
		}
		runs->device = extent->device;
		runs->offset = offset;
		runs->length = length;
	}
	return true;
}

static int print_extents(FILE *out, const struct subject *subject)
{
	struct kv_version *version = kv_control_version(subject->daemon, subject->inode->ino);
	struct runs runs = {.out = out};
	int r = 0;

	if (version)
		r = kv_version_map(version, 0, add_extents, &runs);
	kv_version_unref(version);
	print_run(&runs);
	return r;
}

/* Of keep.c, which also takes new values for some. */
static int print_kept(FILE *out, const struct subject *subject)
{
	_cleanup_free_ char *text = NULL;
	char name[32];
	ssize_t n;

	(void)snprintf(name, sizeof(name), KV_CONTROL_PREFIX "%s", subject->key);
	n = kv_keep_get(subject->daemon, subject->inode->ino, name, &text);
	if (n < 0)
		return (int)n;
	fputs(text, out);
	return 0;
}

/* ---- The table ---- */

static const struct attribute {
	const char *key;
	mode_t type; /* S_IFREG or S_IFDIR: what can have it */
	int (*print)(FILE *out, const struct subject *subject); /* -ENODATA: has it not */
} attributes[] = {
	{"tier", S_IFREG, print_tier},
	{"hits", S_IFREG, print_hits},
	{"version", S_IFREG, print_version},
	{"checksum", S_IFREG, print_checksum},
	{"extents", S_IFREG, print_extents},
	{"pin", S_IFREG, print_kept},
	{"lease", S_IFREG, print_kept},
	{"pin", S_IFDIR, print_kept},
	{"quota", S_IFDIR, print_kept},
};

#define ATTRIBUTES (sizeof(attributes) / sizeof(attributes[0]))

int kv_attribute_print(FILE *out, struct kv_daemon *daemon, uint64_t ino, const char *key)
{
	struct kv_inode inode;
	const struct subject subject = {daemon, &inode, key};
	int r = kv_control_inode(daemon, ino, &inode);

	if (r < 0)
		return r;
	for (size_t i = 0; i < ATTRIBUTES; i++)
		if (strcmp(attributes[i].key, key) == 0 &&
			attributes[i].type == (inode.mode & S_IFMT))
			return attributes[i].print(out, &subject);
	return -ENODATA;
}

bool kv_attribute_is_viewer(pid_t caller)
{
	static const char *const viewers[] = {"getfattr\n", "attr\n", "xattr\n"};
	char path[32], name[32] = "";
	_cleanup_fd_ int fd = -1;

	if (caller <= 0)
		return false;
	(void)snprintf(path, sizeof(path), "/proc/%d/comm", caller);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, name, sizeof(name) - 1) <= 0)
		return false;
	for (size_t i = 0; i < sizeof(viewers) / sizeof(viewers[0]); i++)
		if (strcmp(name, viewers[i]) == 0)
			return true;
	return false;
}

/* An attribute without a value, which print() says, is none that the inode has. */
static bool has_attribute(const struct subject *subject, const struct attribute *attribute)
{
	_cleanup_free_ char *text = NULL;
	size_t size;
	FILE *out;
	int r;

	if (attribute->type != (subject->inode->mode & S_IFMT))
		return false;
	out = open_memstream(&text, &size);
	if (!out)
		return false;
	r = attribute->print(out, subject);
	return fclose(out) == 0 && r == 0;
}

ssize_t kv_attribute_names(struct kv_daemon *daemon, uint64_t ino, char *ret_names, size_t size)
{
	struct kv_inode inode;
	struct subject subject = {.daemon = daemon, .inode = &inode};
	size_t used = 0;
	int r = kv_control_inode(daemon, ino, &inode);

	if (r < 0)
		return r;
	for (size_t i = 0; i < ATTRIBUTES; i++) {
		size_t length = strlen(KV_CONTROL_PREFIX) + strlen(attributes[i].key) + 1;

		subject.key = attributes[i].key;
		if (!has_attribute(&subject, &attributes[i]))
			continue;
		if (used + length <= size)
			(void)strcpy(
				stpcpy(ret_names + used, KV_CONTROL_PREFIX), attributes[i].key);
		used += length;
	}
	return (ssize_t)used;
}
