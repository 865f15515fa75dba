/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs gpu: looks into the GPU helpers, and has files brought into device memory or dropped from
 * it.
 */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "fs/base.h"
#include "fs/parse.h"
#include "gpu/kvg.h"
#include "gpu/socket.h"
#include "tools/cmd.h"
#include "tools/json.h"
#include "tools/walk.h"

#define STATS_MAX 64u
#define PAUSE_MS 20u
/* A file that does not get on for so long is given up. */
#define PATIENCE_MS 30000u

static const char help_text[] =
	"usage: kvfs gpu status [--json] [--socket PATH]\n"
	"       kvfs gpu warm PATH... [--quiet] [--socket PATH]\n"
	"       kvfs gpu evict PATH... [--quiet] [--socket PATH]\n"
	"\n"
	"status: what each GPU helper (kvgpud) of this machine is doing, which backend it\n"
	"uses, and why not a better one. warm brings files, directories with all that is\n"
	"below them, into device memory, and waits for that; evict drops them from it.\n"
	"Files are kept for each user apart: warm them as the user whose engine reads\n"
	"them. Files smaller than the device's granularity are left out.\n"
	"\n"
	"  -j, --json         JSON\n"
	"  -q, --quiet        print no summary\n"
	"  -s, --socket PATH  of one helper; default: all of them\n";

struct gpu {
	const char *command;
	struct kvg_ctx *ctx;
	bool evict;
	bool quiet;
	uint64_t files;
	uint64_t bytes;
	uint64_t small; /* files */
	int status;
};

/* ---- Helpers ---- */

static int open_helper(const struct gpu *gpu, const char *path, struct kvg_ctx **ret_ctx)
{
	const struct kvg_opts opts = {.size = sizeof(opts), .flags = KVG_OPEN_CONTROL};
	int r = kvg_open(ret_ctx, path, &opts);

	return r < 0 ? cmd_fail(gpu->command, "%s", kvg_error(NULL)) : 0;
}

/* The sockets of all helpers that this user can see; the caller frees with globfree. */
static int find_helpers(const struct gpu *gpu, const char *path, glob_t *ret_found)
{
	char folder[128], pattern[160];

	if (path) {
		if (glob(path, GLOB_NOCHECK | GLOB_NOESCAPE, NULL, ret_found) == 0)
			return 0;
		return cmd_fail(gpu->command, "%s: %s", path, strerror(errno));
	}
	if (kvg_socket_folder(folder, sizeof(folder)) < 0)
		return cmd_fail(gpu->command, "XDG_RUNTIME_DIR is too long");
	(void)snprintf(pattern, sizeof(pattern), "%s/gpu-*.sock", folder);
	if (glob(pattern, 0, NULL, ret_found) == 0)
		return 0;
	return cmd_fail(gpu->command,
		"no kvgpud listens in %s; start one, or name its socket with --socket", folder);
}

/* ---- status ---- */

static void print_text(const struct kvg_helper *helper, const char *socket,
	const struct kvg_stat_entry *entries, size_t count)
{
	(void)printf("%s\n  device   %s\n  backend  %s\n", socket, helper->name, helper->mode);
	if (helper->reasons[0])
		(void)printf("  not      %s\n", helper->reasons);
	for (size_t i = 0; i < count; i++)
		if (strncmp(entries[i].name, "asked_", 6) != 0)
			(void)printf("  %-18s %12" PRIu64 "  %s\n", entries[i].name,
				entries[i].value, entries[i].help);
}

static void print_json(struct kv_json *json, const struct kvg_helper *helper, const char *socket,
	const struct kvg_stat_entry *entries, size_t count)
{
	char uuid[33];

	for (unsigned i = 0; i < 16; i++)
		(void)snprintf(uuid + (size_t)i * 2, 3, "%02x", helper->uuid[i]);
	kv_json_open(json, NULL, '{');
	kv_json_text(json, "socket", socket);
	kv_json_text(json, "uuid", uuid);
	kv_json_text(json, "device", helper->name);
	kv_json_text(json, "backend", helper->mode);
	kv_json_text(json, "not", helper->reasons);
	kv_json_number(json, "granularity", helper->granularity);
	kv_json_number(json, "segment", helper->segment);
	for (size_t i = 0; i < count; i++)
		if (strncmp(entries[i].name, "asked_", 6) != 0)
			kv_json_number(json, entries[i].name, entries[i].value);
	kv_json_close(json, '}');
}

static int show_helper(const struct gpu *gpu, const char *socket, struct kv_json *json)
{
	struct kvg_stat_entry entries[STATS_MAX];
	struct kvg_helper helper;
	struct kvg_ctx *ctx;
	size_t count;
	int r;

	if (open_helper(gpu, socket, &ctx) != 0)
		return 1;
	r = kvg_helper(ctx, &helper);
	if (r == 0)
		r = kvg_stats(ctx, -1, entries, STATS_MAX, &count);
	if (r < 0)
		r = cmd_fail(gpu->command, "%s: %s", socket, kvg_error(ctx));
	else if (json)
		print_json(json, &helper, socket, entries, count);
	else
		print_text(&helper, socket, entries, count);
	kvg_close(ctx);
	return r;
}

static int show_all(const struct gpu *gpu, const glob_t *found, bool as_json)
{
	struct kv_json json = {.out = stdout};
	int status = 0;

	if (as_json)
		kv_json_open(&json, NULL, '[');
	for (size_t i = 0; i < found->gl_pathc; i++)
		status |= show_helper(gpu, found->gl_pathv[i], as_json ? &json : NULL);
	if (as_json)
		kv_json_close(&json, ']');
	return status;
}

/* ---- warm and evict ---- */

static int asked(struct gpu *gpu, int fd, uint64_t *ret_resident, uint64_t *ret_size)
{
	struct kvg_stat_entry entries[STATS_MAX];
	size_t count;
	int r = kvg_stats(gpu->ctx, fd, entries, STATS_MAX, &count);

	if (r < 0)
		return r;
	for (size_t i = 0; i < count; i++) {
		if (strcmp(entries[i].name, "asked_resident") == 0)
			*ret_resident = entries[i].value;
		if (strcmp(entries[i].name, "asked_size") == 0)
			*ret_size = entries[i].value;
	}
	return 0;
}

/* Asks again and again: what could not be staged says so then. */
static int warm_file(struct gpu *gpu, int fd, uint64_t *ret_bytes)
{
	const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000};
	uint64_t size = 0, last = 0;
	unsigned waited_ms = 0;

	for (*ret_bytes = 0;; waited_ms += PAUSE_MS) {
		int r = kvg_prefetch(gpu->ctx, fd, 0, 0, 0, 0);

		if (r == 0)
			r = asked(gpu, fd, ret_bytes, &size);
		if (r < 0 || *ret_bytes >= size)
			return r;
		if (*ret_bytes > last)
			waited_ms = 0;
		if (waited_ms >= PATIENCE_MS)
			return -ETIMEDOUT;
		last = *ret_bytes;
		(void)nanosleep(&pause, NULL);
	}
}

static const char *reason(const struct gpu *gpu, int r)
{
	switch (r) {
	case -E2BIG:
		return "larger than what the helper may take of the device (--hbm)";
	case -ENOSPC:
		return "no room: everything else in device memory is in use";
	case -EBUSY:
		return gpu->evict ? "in use: an engine has it mapped, or it is on its way"
				  : "is being written";
	case -EXDEV:
		return "not on the mount that the helper serves";
	case -ENOTTY:
		return "not on a kvfs mount";
	case -EIO:
		return "damaged or unreadable: its bytes cannot be had";
	default:
		return strerror(-r);
	}
}

static void each_file(void *arg, const struct kv_walk_file *file)
{
	struct gpu *gpu = arg;
	_cleanup_fd_ int fd = -1;
	uint64_t bytes = 0;
	int r = file->error;

	if (r == 0) {
		/* O_DIRECT, so that the open does not bring it into DRAM. */
		fd = openat(file->directory, file->name,
			O_RDONLY | O_DIRECT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		r = fd < 0 ? -errno : 0;
	}
	/* Evicted or removed meanwhile. */
	if (r == -ENOENT && file->error == 0 && !file->named)
		return;
	if (r == 0)
		r = gpu->evict ? kvg_evict(gpu->ctx, fd, &bytes) : warm_file(gpu, fd, &bytes);
	if (r == -ERANGE) {
		gpu->small++;
	} else if (r < 0) {
		gpu->status = cmd_fail(gpu->command, "%s: %s", file->path, reason(gpu, r));
	} else {
		gpu->files += bytes > 0;
		gpu->bytes += bytes;
	}
}

static int change(struct gpu *gpu, const glob_t *found, char **paths, int count)
{
	char text[16];

	for (size_t i = 0; i < found->gl_pathc; i++) {
		if (open_helper(gpu, found->gl_pathv[i], &gpu->ctx) != 0) {
			gpu->status = 1;
			continue;
		}
		for (int k = 0; k < count; k++) {
			int r = kv_walk(paths[k], each_file, gpu);

			if (r < 0)
				gpu->status =
					cmd_fail(gpu->command, "%s: %s", paths[k], reason(gpu, r));
		}
		kvg_close(gpu->ctx);
	}
	if (!gpu->quiet)
		(void)printf("%" PRIu64 " files %s device memory, %s\n", gpu->files,
			gpu->evict ? "dropped from" : "in",
			kv_format_size(gpu->bytes, text, sizeof(text)));
	if (!gpu->quiet && gpu->small > 0)
		(void)printf("%" PRIu64 " are too small for it: engines read them from DRAM\n",
			gpu->small);
	return gpu->status;
}

int gpu_main(int argc, char **argv)
{
	struct gpu gpu = {.command = argv[0]};
	const char *socket = NULL, *verb;
	bool json = false;
	const struct cmd_option options[] = {
		{.name = "json", .letter = 'j', .flag = &json},
		{.name = "quiet", .letter = 'q', .flag = &gpu.quiet},
		{.name = "socket", .letter = 's', .value = &socket},
	};
	glob_t found;
	int status;

	if (!cmd_options(argc, argv, help_text, options, 3, &status))
		return status;
	verb = optind < argc ? argv[optind++] : "";
	gpu.evict = strcmp(verb, "evict") == 0;
	if (strcmp(verb, "status") != 0 && strcmp(verb, "warm") != 0 && !gpu.evict)
		return cmd_bad_usage(gpu.command, "say status, warm or evict");
	if ((strcmp(verb, "status") == 0) != (optind == argc))
		return cmd_bad_usage(
			gpu.command, optind == argc ? "PATH is missing" : "status takes no PATH");
	if (find_helpers(&gpu, socket, &found) != 0)
		return 1;
	status = optind == argc ? show_all(&gpu, &found, json)
				: change(&gpu, &found, argv + optind, argc - optind);
	globfree(&found);
	return status;
}
