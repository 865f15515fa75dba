/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs retire: empties a model's directory at once; what was in it is freed in the background.
 */
#include <stdio.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "fs/base.h"
#include "index/index.h"
#include "tools/cmd.h"
#include "tools/report.h"

static const char help_text[] =
	"usage: kvfs retire [--unless FINGERPRINT] DIR\n"
	"\n"
	"Empties DIR in one step that takes no time however much is in it: files that\n"
	"are open live until they are closed, the others are freed in the background.\n"
	"DIR keeps its owner, mode, attributes and quota. Its owner, who must be able to\n"
	"write to the directory above, and root may.\n"
	"\n"
	"  --unless FINGERPRINT\n"
	"      do nothing if DIR carries that fingerprint; else DIR gets it. If there is\n"
	"      no DIR it is made. So engines can call this when they start, with a hash\n"
	"      of what their caches depend on, also several at once.\n";

/* Not for ever: another engine may have retired it again. */
#define SEEN_WAIT_MS 5000u

struct request {
	const char *fingerprint; /* NULL: none */
	const char *path;
};

static int fail(const char *command, const char *path, int error)
{
	switch (error) {
	case EPERM:
	case EACCES:
		return cmd_fail(command,
			"%s: only its owner, who must be able to write to the directory above, and "
			"root may",
			path);
	case EBUSY:
		return cmd_fail(command, "%s: the mount itself cannot be retired", path);
	case ENODATA:
	case EOPNOTSUPP:
		return cmd_fail(command, "%s is not on a kvfs mount", path);
	default:
		return cmd_fail(command, "%s: %s", path, strerror(error));
	}
}

/* Whether PATH is on kvfs: elsewhere the attribute would be an ordinary one. */
static int check(const char *path)
{
	struct kv_report usage;
	int r = kv_report_read(path, "quota.usage", &usage);

	if (r == 0)
		kv_report_done(&usage);
	return r;
}

/* Whether PATH is the new directory by now, or carries the fingerprint. */
static bool is_done(const struct request *request, ino_t before)
{
	char value[KV_FINGERPRINT_MAX + 1];
	struct stat st;
	ssize_t n;

	if (!request->fingerprint)
		return stat(request->path, &st) < 0 || st.st_ino != before;
	n = getxattr(request->path, KV_FINGERPRINT_NAME, value, sizeof(value));
	return n == (ssize_t)strlen(request->fingerprint) &&
	       memcmp(value, request->fingerprint, (size_t)n) == 0;
}

/* The kernel may show the old directory for another moment. */
static void wait_until_seen(const struct request *request, ino_t before)
{
	for (unsigned i = 0; i < SEEN_WAIT_MS && !is_done(request, before); i++)
		(void)usleep(1000);
}

/* Negative errno. *ret_before is the directory that it was. */
static int retire_once(const struct request *request, ino_t *ret_before)
{
	const char *fingerprint = request->fingerprint ? request->fingerprint : "";
	struct stat st;
	int r = check(request->path);

	if (r < 0)
		return r;
	if (stat(request->path, &st) < 0)
		return -errno;
	*ret_before = st.st_ino;
	return setxattr(request->path, "user.kvfs.retire", fingerprint, strlen(fingerprint), 0) < 0
		       ? -errno
		       : 0;
}

static int retire(const char *command, const struct request *request)
{
	ino_t before = 0;
	int r;

	for (unsigned i = 0;; i++) {
		/* Another engine may make it at the same time. */
		if (request->fingerprint && mkdir(request->path, 0777) < 0 && errno != EEXIST)
			return cmd_fail(command, "%s: %s", request->path, strerror(errno));
		r = retire_once(request, &before);
		/* ... or have retired it just now, so that this was about the old one. */
		if ((r != -ENOENT && r != -ESTALE) || !request->fingerprint || i == SEEN_WAIT_MS)
			break;
		(void)usleep(1000);
	}
	if (r < 0)
		return fail(command, request->path, -r);
	wait_until_seen(request, before);
	return 0;
}

int retire_main(int argc, char **argv)
{
	struct request request = {0};
	const struct cmd_option options[] = {{.name = "unless", .value = &request.fingerprint}};
	int status;

	if (!cmd_options(argc, argv, help_text, options, 1, &status))
		return status;
	if (optind == argc)
		return cmd_bad_usage(argv[0], "DIR is missing");
	if (argc - optind > 1)
		return cmd_bad_usage(argv[0], "more than one DIR");
	request.path = argv[optind];
	if (request.fingerprint && (request.fingerprint[0] == '\0' ||
					   strlen(request.fingerprint) > KV_FINGERPRINT_MAX))
		return cmd_bad_usage(
			argv[0], "FINGERPRINT must have 1 to %u bytes", KV_FINGERPRINT_MAX);
	return retire(argv[0], &request);
}
