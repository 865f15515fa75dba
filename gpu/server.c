/* SPDX-License-Identifier: Apache-2.0 */
/* The helper's loop and its clients: see server.h and server_internal.h. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "fs/error.h"
#include "fs/log.h"
#include "fs/parse.h"
#include "gpu/server_internal.h"
#include "gpu/socket.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

#define EVENTS_MAX 64
#define TICK_MS 500
/* Between two warnings that there are too many clients. */
#define FULL_LOG_MS 10000
#define MESSAGES_MAX 64u
/* What a context takes of a real device's memory. */
#define CONTEXT_BYTES (UINT64_C(600) << 20)
/* What is left of it to others, who fail when there is nothing. */
#define MARGIN_BYTES (UINT64_C(64) << 20)

static int watch(const struct kvg_server *server, int fd, void *what)
{
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};

	return epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

/* ---- Clients ---- */

static bool is_alive(const struct kvg_client *client)
{
	if (client->pidfd < 0)
		return false;
	/* Another user's process may not be signalled, which tells that there is one. */
	return syscall(SYS_pidfd_send_signal, client->pidfd, 0, NULL, 0) == 0 || errno == EPERM;
}

static void client_free(struct kvg_server *server, struct kvg_client *client)
{
	struct kvg_lease *lease;

	kvg_forget_client(server, client);
	kvg_client_forget_owed(client);
	while ((lease = LIST_FIRST(&client->leases)))
		kvg_lease_free(lease);
	if (client->fd >= 0)
		(void)close(client->fd);
	if (client->pidfd >= 0)
		(void)close(client->pidfd);
	LIST_REMOVE(client, entry);
	server->client_count--;
	free(client);
}

/*
 * Its connection has ended. What it had mapped is free when its process is gone, which is the
 * driver's rule too: until then it stays on its account.
 */
static void client_gone(struct kvg_server *server, struct kvg_client *client)
{
	if (LIST_EMPTY(&client->leases) || !is_alive(client)) {
		client_free(server, client);
		return;
	}
	kvg_forget_client(server, client);
	kvg_client_forget_owed(client);
	(void)close(client->fd);
	client->fd = -1;
	if (watch(server, client->pidfd, client) < 0)
		client_free(server, client);
}

static int peer_pidfd(int fd, pid_t pid)
{
	int pidfd = -1;
	socklen_t size = sizeof(pidfd);

	if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0)
		return pidfd;
	/* Before Linux 6.5; the process may be another one by now, whose life is as good. */
	return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

static void say_no_descriptors(struct kvg_server *server, int error)
{
	int64_t now_ms = kv_monotonic_ms();

	if (server->full_ms > 0 && now_ms - server->full_ms < FULL_LOG_MS)
		return;
	server->full_ms = now_ms;
	kv_log_warning("gpu",
		"no descriptors left for clients: raise the limit (ulimit -n) "
		"error=\"%s\"",
		strerror(error));
}

/* Who waits to be accepted would wake the loop without end. */
static void pause_listening(struct kvg_server *server, int error)
{
	(void)epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, server->listen_fd, NULL);
	server->listen_ms = kv_monotonic_ms() + TICK_MS;
	say_no_descriptors(server, error);
}

static void listen_again(struct kvg_server *server, int64_t now_ms)
{
	if (server->listen_ms == 0 || now_ms < server->listen_ms)
		return;
	if (watch(server, server->listen_fd, &server->listen_fd) == 0)
		server->listen_ms = 0;
}

/* By how many connections one more of UID would be too many: of all, or of that user's. */
static unsigned surplus_of(const struct kvg_server *server, uid_t uid)
{
	unsigned share = (unsigned)kv_max_u64(KVG_CLIENTS_MAX * server->options.share / 100, 1);
	const struct kvg_client *client;
	unsigned own = 1, all = server->client_count + 1;

	LIST_FOREACH (client, &server->clients, entry)
		own += client->uid == uid;
	return (unsigned)kv_max_u64(
		all > KVG_CLIENTS_MAX ? all - KVG_CLIENTS_MAX : 0, own > share ? own - share : 0);
}

static void accept_client(struct kvg_server *server)
{
	_cleanup_fd_ int fd = accept4(server->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct kvg_client *client;
	struct ucred peer;
	socklen_t size = sizeof(peer);
	unsigned surplus;

	if (fd < 0 && kv_accept_lacks(errno))
		pause_listening(server, errno);
	if (fd < 0 || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
		return;
	surplus = surplus_of(server, peer.uid);
	if (surplus > KVG_CLIENTS_REFUSED) {
		server->stat.refused++;
		return;
	}
	client = calloc(1, sizeof(*client));
	if (!client)
		return;
	LIST_INIT(&client->leases);
	STAILQ_INIT(&client->replies);
	client->server = server;
	client->events = EPOLLIN;
	client->pid = peer.pid;
	client->uid = peer.uid;
	client->refused = surplus > 0;
	client->pidfd = peer_pidfd(fd, peer.pid);
	client->fd = kv_steal_fd(&fd);
	LIST_INSERT_HEAD(&server->clients, client, entry);
	server->client_count++;
	if (watch(server, client->fd, client) < 0)
		client_free(server, client);
}

static int serve_message(struct kvg_server *server, struct kvg_client *client)
{
	static struct kvg_message message;
	int r = kvg_receive(client->fd, &message);

	if (r == 0)
		return kvg_serve(server, client, &message);
	if (r != -EMFILE || message.flags & KVG_FLAG_REPLY)
		return r;
	say_no_descriptors(server, -r);
	kvg_refuse(server, client, &message, r);
	return 0;
}

/* A few messages, then the others have their turn. */
static void serve_client(struct kvg_server *server, struct kvg_client *client)
{
	int r = 0;

	/* Only its process's end is watched any more. */
	if (client->fd < 0) {
		client_free(server, client);
		return;
	}
	if (client->owes)
		kvg_settle(client);
	for (unsigned i = 0; i < MESSAGES_MAX && r == 0 && STAILQ_EMPTY(&client->replies); i++)
		r = serve_message(server, client);
	if ((r == 0 || r == -EAGAIN) && !client->ended)
		return;
	if (r == -EPROTO || r == -EPROTONOSUPPORT) {
		server->stat.malformed++;
		kv_log_warning("gpu", "client ended: what it sent makes no sense pid=%d uid=%u",
			(int)client->pid, client->uid);
	} else if (r < 0 && r != -EPIPE && !client->ended) {
		kv_log_warning("gpu",
			"client ended: nothing can be read from it pid=%d uid=%u error=\"%s\"",
			(int)client->pid, client->uid, strerror(-r));
	}
	client_gone(server, client);
}

/* ---- The daemon ---- */

static void give_up_entry(void *arg, struct kvg_entry *entry)
{
	struct kvg_server *server = arg;

	if (entry->state == KVG_FAILED && entry->count == 0 && !entry->owner) {
		kvg_hbm_stale(entry);
		return;
	}
	server->stat.invalidated++;
	kvg_tell_invalid(entry);
	kvg_hbm_stale(entry);
}

static void on_connected(void *arg, bool changed)
{
	struct kvg_server *server = arg;

	server->lost_ms = 0;
	kv_log_info("gpu", "connected to the daemon store=%s", server->options.store);
	if (changed)
		kvg_hbm_all(server->hbm, give_up_entry, server);
}

static void on_lost(void *arg)
{
	struct kvg_server *server = arg;

	server->lost_ms = kv_monotonic_ms();
	server->connection++;
	kv_log_warning(
		"gpu", "the daemon has gone, trying to reach it store=%s", server->options.store);
}

static void on_changed(void *arg, uint64_t ino)
{
	struct kvg_server *server = arg;

	kvg_hbm_of_ino(server->hbm, ino, give_up_entry, server);
}

static void on_hot(void *arg, const struct kv_gpu_reply *note)
{
	kvg_serve_hint(arg, note);
}

static void follow_source(struct kvg_server *server)
{
	int fd = kvg_source_fd(server->source);

	/* A closed one has left epoll by itself. */
	if (fd == server->source_fd && fd >= 0)
		return;
	server->source_fd = fd;
	if (fd >= 0 && watch(server, fd, &server->source) < 0)
		server->source_fd = -1;
}

static void serve_source(struct kvg_server *server)
{
	if (kvg_source_dispatch(server->source) == -ESTALE) {
		kv_log_error("gpu", "the store has other devices than before, ending store=%s",
			server->options.store);
		server->stop = true;
		server->status = 1;
	}
	if (kvg_source_fd(server->source) < 0)
		server->source_fd = -1;
}

/* ---- The loop ---- */

static void check_device(struct kvg_server *server)
{
	if (!server->backend->ops->is_dead(server->backend) || server->stop)
		return;
	kv_log_error("gpu", "the device is lost to this process, ending: what engines have mapped "
			    "stays theirs");
	server->stop = true;
	server->status = KVG_EXIT_DEVICE;
}

/* What was given back to the device, as exported segments are, others may have taken since. */
static void check_room(struct kvg_server *server)
{
	uint64_t missing = kvg_hbm_missing(server->hbm);
	char text[16];

	if (server->short_said == (missing > 0))
		return;
	server->short_said = missing > 0;
	if (missing > 0)
		kv_log_warning("gpu",
			"other processes have taken device memory, files have less than --hbm says "
			"missing=%s",
			kv_format_size(missing, text, sizeof(text)));
	else
		kv_log_info("gpu", "all of the device memory that --hbm says is there again");
}

static void tick(struct kvg_server *server)
{
	int64_t now_ms = kv_monotonic_ms();

	listen_again(server, now_ms);
	kvg_source_tick(server->source, now_ms);
	follow_source(server);
	(void)kvg_hbm_tick(server->hbm, now_ms);
	check_room(server);
	/* Nobody knows any more whether that is what the files hold. */
	if (server->lost_ms > 0 &&
		(uint64_t)(now_ms - server->lost_ms) > server->options.unsure_ms) {
		kvg_hbm_all(server->hbm, give_up_entry, server);
		server->lost_ms = now_ms;
	}
	check_device(server);
}

static void take_signal(struct kvg_server *server)
{
	struct signalfd_siginfo info;

	if (read(server->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info))
		server->stop = true;
}

static void serve_event(struct kvg_server *server, void *what)
{
	if (what == &server->listen_fd)
		accept_client(server);
	else if (what == &server->signal_fd)
		take_signal(server);
	else if (what == &server->source)
		serve_source(server);
	else if (what == &server->stager)
		kvg_stage_reap(server);
	else
		serve_client(server, what);
}

int kvg_server_run(struct kvg_server *server)
{
	struct epoll_event events[EVENTS_MAX];

	while (!server->stop) {
		/* One at a time, for it may end the client that the next one is of. */
		int n = epoll_wait(server->epoll_fd, events, 1, TICK_MS);

		if (n < 0 && errno != EINTR)
			return 1;
		if (n > 0)
			serve_event(server, events[0].data.ptr);
		tick(server);
	}
	return server->status;
}

/* ---- Life ---- */

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
		chmod(path, 0600) < 0 || listen(server->listen_fd, 64) < 0)
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
	const struct kvg_backend_open open = {.device = server->options.device};
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
	};
	int r;

	options.devices = kvg_source_devices(server->source, &options.device_count);
	r = kvg_stager_new(&options, &server->stager);
	return r < 0 ? kv_fail(error, r, "cannot set up the ring for copies: %s", strerror(-r)) : 0;
}

static int start_source(struct kvg_server *server, const struct kv_error *error)
{
	const struct kvg_source_hooks hooks = {
		.arg = server,
		.connected = on_connected,
		.lost = on_lost,
		.changed = on_changed,
		.hot = on_hot,
	};

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
	r = watch(server, server->signal_fd, &server->signal_fd);
	if (r == 0)
		r = watch(server, server->listen_fd, &server->listen_fd);
	if (r == 0)
		r = watch(server, kvg_stager_fd(server->stager), &server->stager);
	follow_source(server);
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
	say_ready(server);
	*ret_server = server;
	return 0;
}

/* Frees what belongs to clients and files, unless the stager still uses it. */
struct kvg_server *kvg_server_free(struct kvg_server *server)
{
	struct kvg_client *client;

	if (!server)
		return NULL;
	if (server->listen_fd >= 0) {
		(void)unlink(server->socket_path);
		(void)close(server->listen_fd);
	}
	/* A drive that hangs may still write into the ring: the process's end takes it all. */
	if (!kvg_stager_free(server->stager)) {
		kv_log_warning("gpu", "a read does not end, leaving it");
		return NULL;
	}
	if (server->status == KVG_EXIT_DEVICE)
		kvg_stage_abandon(server);
	while ((client = LIST_FIRST(&server->clients)))
		client_free(server, client);
	kvg_pendings_free(server);
	kvg_hbm_free(server->hbm);
	kvg_source_free(server->source);
	kvg_backend_close(server->backend);
	if (server->epoll_fd >= 0)
		(void)close(server->epoll_fd);
	if (server->signal_fd >= 0)
		(void)close(server->signal_fd);
	free(server);
	return NULL;
}
