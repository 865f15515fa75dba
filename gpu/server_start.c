/* SPDX-License-Identifier: Apache-2.0 */
/* How the helper begins: daemon, device, socket, memory, ring: see server.h. */
#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "fs/error.h"
#include "fs/log.h"
#include "fs/parse.h"
#include "gpu/server_internal.h"
#include "gpu/socket.h"

/* What a context takes of a real device's memory. */
#define CONTEXT_BYTES (UINT64_C(600) << 20)
/* What is left of it to others, who fail when there is nothing. */
#define MARGIN_BYTES (UINT64_C(64) << 20)

static int listen_at(struct kvg_server *server, const struct kv_error *error)
{
	const char *path = server->socket_path;
	struct sockaddr_un address;
	int r = kvg_socket_address(path, &address);
	struct stat st;
	int other;

	if (r < 0)
		return kv_fail(error, r, "%.200s: too long for a socket", path);
	if (lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode))
		return kv_fail(error, -EEXIST,
			"%.200s is there, and is no socket: name another (--socket)", path);
	/* Another helper of this device? A dead one's socket refuses. */
	other = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (other >= 0 && connect(other, (struct sockaddr *)&address, sizeof(address)) == 0) {
		(void)close(other);
		return kv_fail(error, -EADDRINUSE,
			"another kvgpud listens at %.200s: one helper a device", path);
	}
	if (other >= 0)
		(void)close(other);
	(void)unlink(path);
	server->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (server->listen_fd < 0 ||
		bind(server->listen_fd, (struct sockaddr *)&address, sizeof(address)) < 0 ||
		chmod(path, 0600) < 0 || listen(server->listen_fd, KVG_CLIENTS_MAX) < 0)
		return kv_fail(error, -errno, "cannot listen at %.200s: %s", path, strerror(errno));
	return 0;
}

static int open_to_group(struct kvg_server *server, const struct kv_error *error)
{
	const struct group *group;

	if (!server->options.group)
		return 0;
	group = getgrnam(server->options.group);
	if (!group)
		return kv_fail(error, -ENOENT, "there is no group '%.64s'", server->options.group);
	if (chown(server->socket_path, (uid_t)-1, group->gr_gid) < 0 ||
		chmod(server->socket_path, 0660) < 0)
		return kv_fail(error, -errno, "cannot give %.200s to group %.64s: %s",
			server->socket_path, server->options.group, strerror(errno));
	return 0;
}

static int choose_path(struct kvg_server *server, const struct kv_error *error)
{
	char folder[128];
	int r;

	if (server->options.socket) {
		(void)snprintf(server->socket_path, sizeof(server->socket_path), "%.255s",
			server->options.socket);
		return 0;
	}
	r = kvg_socket_folder(folder, sizeof(folder));
	if (r == 0 && mkdir(folder, 0755) < 0 && errno != EEXIST)
		r = -errno;
	if (r == 0)
		r = kvg_socket_path(
			server->info.uuid, server->socket_path, sizeof(server->socket_path));
	return r < 0 ? kv_fail(error, r, "%s: %s; name a socket with --socket", folder,
			       strerror(-r))
		     : 0;
}

static int open_backend(struct kvg_server *server, const struct kv_error *error)
{
	const struct kvg_backend_open open = {
		.device = server->options.device, .no_kernels = server->options.no_kernels};
	int r = kvg_backend_choose(server->options.backend, &open, &server->backend,
		server->reasons, sizeof(server->reasons));

	if (r < 0)
		return kv_fail(error, r, "%.400s", server->reasons);
	server->backend->ops->info(server->backend, &server->info);
	return 0;
}

/* What the options ask for, as far as the device has it. */
static int set_budget(struct kvg_server *server, const struct kv_error *error)
{
	struct kvg_server_options *options = &server->options;
	uint64_t context = server->info.modelled ? 0 : CONTEXT_BYTES;
	uint64_t most = server->info.total - kv_min_u64(server->info.total, context);
	char text[2][16];

	if (options->percent > 0)
		options->budget = server->info.total / 100 * options->percent;
	options->budget = kv_min_u64(options->budget, most);
	/* Stretches of files are whole segments, and are read by the chunk. */
	options->segment =
		kv_round_up(options->segment, kv_max_u64(server->info.granularity, KV_CHUNK_SIZE));
	options->budget -= options->budget % server->info.granularity;
	if (options->budget >= server->info.granularity)
		return 0;
	return kv_fail(error, -EINVAL,
		"%s of device memory is too little: give at least %s (--hbm)",
		kv_format_size(options->budget, text[0], sizeof(text[0])),
		kv_format_size(server->info.granularity, text[1], sizeof(text[1])));
}

static int start_hbm(struct kvg_server *server, const struct kv_error *error)
{
	const struct kvg_hbm_options options = {
		.backend = server->backend,
		.budget = server->options.budget,
		.share = kvg_server_share(server),
		.segment = server->options.segment,
		.granularity = server->info.granularity,
		.margin = server->info.reserves ? MARGIN_BYTES : 0,
		.zeroed = server->info.zeroed,
		.arg = server,
		.revoke = kvg_tell_revoke,
		.expired = kvg_stage_cancel,
		.gone = kvg_stage_gone,
	};
	uint64_t available = 0;
	char text[2][16];
	int r = kvg_hbm_new(&options, &server->hbm);

	if (r == 0)
		return 0;
	(void)kv_format_size(options.budget, text[0], sizeof(text[0]));
	if (r != -ENOMEM || server->backend->ops->free_bytes(server->backend, &available) < 0)
		return kv_fail(error, r,
			"cannot take %s of device memory: %s; ask for less (--hbm)", text[0],
			strerror(-r));
	return kv_fail(error, r,
		"cannot take %s of device memory: others have the rest, only %s are free; ask for "
		"less (--hbm)",
		text[0], kv_format_size(available, text[1], sizeof(text[1])));
}

static int start_stager(struct kvg_server *server, const struct kv_error *error)
{
	struct kvg_stager_options options = {
		.backend = server->backend,
		.io = kv_io_real(),
		.slots = server->options.slots,
		.slot_size = server->options.slot_size,
		.direct = server->info.direct,
	};
	int r;

	if (server->options.check) {
		r = kvg_checker_new(server->backend, &server->checker);
		if (r < 0)
			return kv_fail(error, r, "cannot set up checks: %s", strerror(-r));
	}
	options.devices = kvg_source_devices(server->source, &options.device_count);
	r = kvg_stager_new(&options, &server->stager);
	return r < 0 ? kv_fail(error, r, "cannot set up the ring for copies: %s", strerror(-r)) : 0;
}

static int start_source(struct kvg_server *server, const struct kv_error *error)
{
	const struct kvg_source_hooks hooks = kvg_server_hooks(server);

	return kvg_source_new(server->options.store, server->options.hints, &hooks, &server->source,
		error->text, error->size);
}

static int start_loop(struct kvg_server *server)
{
	sigset_t signals;
	int r;

	(void)sigemptyset(&signals);
	(void)sigaddset(&signals, SIGTERM);
	(void)sigaddset(&signals, SIGINT);
	server->signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
	server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (server->signal_fd < 0 || server->epoll_fd < 0)
		return -errno;
	r = kvg_watch(server, server->signal_fd, &server->signal_fd);
	if (r == 0)
		r = kvg_watch(server, server->listen_fd, &server->listen_fd);
	if (r == 0)
		r = kvg_watch(server, kvg_stager_fd(server->stager), &server->stager);
	if (r == 0 && server->checker)
		r = kvg_watch(server, kvg_checker_fd(server->checker), &server->checker);
	kvg_follow_source(server);
	return r;
}

static void say_ready(const struct kvg_server *server)
{
	char budget[16];

	kv_log_info("gpu", "ready store=%s socket=%s device=\"%s\" backend=\"%s\" hbm=%s%s%s%s",
		server->options.store, server->socket_path, server->info.name, server->info.mode,
		kv_format_size(server->options.budget, budget, sizeof(budget)),
		server->reasons[0] ? " not=\"" : "", server->reasons,
		server->reasons[0] ? "\"" : "");
}

/* Signals are blocked before there are threads, which inherit that. */
static void block_signals(void)
{
	sigset_t signals;

	(void)sigemptyset(&signals);
	(void)sigaddset(&signals, SIGTERM);
	(void)sigaddset(&signals, SIGINT);
	(void)pthread_sigmask(SIG_BLOCK, &signals, NULL);
}

int kvg_server_new(const struct kvg_server_options *options, struct kvg_server **ret_server,
	char *ret_error, size_t error_size)
{
	const struct kv_error error = {ret_error, error_size};
	struct kvg_server *server = calloc(1, sizeof(*server));
	int r;

	if (!server)
		return kv_fail(&error, -ENOMEM, "out of memory");
	server->options = *options;
	if (options->share == 0)
		server->options.share = options->group ? 50 : 100;
	server->listen_fd = server->epoll_fd = server->signal_fd = server->source_fd = -1;
	LIST_INIT(&server->clients);
	LIST_INIT(&server->pendings);
	LIST_INIT(&server->waiting);
	LIST_INIT(&server->sweeps);
	block_signals();
	r = start_source(server, &error);
	if (r == 0)
		r = open_backend(server, &error);
	if (r == 0)
		r = choose_path(server, &error);
	if (r == 0)
		r = listen_at(server, &error);
	if (r == 0)
		r = open_to_group(server, &error);
	if (r == 0)
		r = set_budget(server, &error);
	if (r == 0)
		r = start_hbm(server, &error);
	if (r == 0)
		r = start_stager(server, &error);
	if (r == 0) {
		r = start_loop(server);
		if (r < 0)
			(void)kv_fail(&error, r, "cannot start: %s", strerror(-r));
	}
	if (r < 0) {
		kvg_server_free(server);
		return r;
	}
	kvg_stage_news(server);
	say_ready(server);
	*ret_server = server;
	return 0;
}
