/* SPDX-License-Identifier: Apache-2.0 */
/* Clients of the helper, from their connection to their process's end: see server_internal.h. */
#include <errno.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "fs/log.h"
#include "gpu/server_internal.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

/* Between two warnings that there are too many clients. */
#define FULL_LOG_MS 10000
#define MESSAGES_MAX 64u

static bool is_alive(const struct kvg_client *client)
{
	if (client->pidfd < 0)
		return false;
	/* Another user's process may not be signalled, which tells that there is one. */
	return syscall(SYS_pidfd_send_signal, client->pidfd, 0, NULL, 0) == 0 || errno == EPERM;
}

void kvg_client_free(struct kvg_client *client)
{
	struct kvg_server *server = client->server;
	struct kvg_lease *lease;

	kvg_forget_client(server, client);
	kvg_client_forget_owed(client);
	if (!LIST_EMPTY(&client->leases))
		kvg_check_user(server, client->uid);
	while ((lease = LIST_FIRST(&client->leases)))
		kvg_lease_free(lease);
	if (client->fd >= 0)
		(void)close(client->fd);
	if (client->pidfd >= 0)
		(void)close(client->pidfd);
	LIST_REMOVE(client, entry);
	kvg_client_latency(client, false);
	server->client_count--;
	free(client);
}

/*
 * Its connection has ended. What it had mapped is free when its process is gone, which is the
 * driver's rule too: until then it stays on its account.
 */
static void client_gone(struct kvg_client *client)
{
	struct kvg_server *server = client->server;

	if (LIST_EMPTY(&client->leases) || !is_alive(client)) {
		kvg_client_free(client);
		return;
	}
	kvg_forget_client(server, client);
	kvg_client_forget_owed(client);
	kvg_client_latency(client, false);
	(void)close(client->fd);
	client->fd = -1;
	if (kvg_watch(server, client->pidfd, client) < 0)
		kvg_client_free(client);
}

void kvg_client_latency(struct kvg_client *client, bool wanted)
{
	struct kvg_server *server = client->server;

	if (client->latency == wanted)
		return;
	client->latency = wanted;
	server->latency_count += wanted ? 1u : -1u;
	kvg_stager_latency(server->stager, server->latency_count > 0);
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
	server->listen_ms = kv_monotonic_ms() + KVG_TICK_MS;
	say_no_descriptors(server, error);
}

void kvg_listen_again(struct kvg_server *server, int64_t now_ms)
{
	if (server->listen_ms == 0 || now_ms < server->listen_ms)
		return;
	if (kvg_watch(server, server->listen_fd, &server->listen_fd) == 0)
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

void kvg_client_accept(struct kvg_server *server)
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
	if (kvg_watch(server, client->fd, client) < 0)
		kvg_client_free(client);
}

/* It is told so in a way that it understands, whichever version it is of; then it has to go. */
static void refuse_version(struct kvg_client *client, const struct kvg_message *request)
{
	kv_log_warning("gpu",
		"client ended: it speaks version %u of the protocol, this kvgpud %u: install both "
		"from one release pid=%d uid=%u",
		request->version, KVG_WIRE_VERSION, (int)client->pid, client->uid);
	if (!(request->flags & KVG_FLAG_REPLY) && request->type > 0 &&
		request->type < _KVG_TYPE_MAX)
		kvg_refuse(client->server, client, request, -EPROTONOSUPPORT);
}

static int serve_message(struct kvg_server *server, struct kvg_client *client)
{
	static struct kvg_message message;
	int r = kvg_receive(client->fd, &message);

	if (r == 0)
		return kvg_serve(server, client, &message);
	if (r == -EPROTONOSUPPORT) {
		refuse_version(client, &message);
		return -EPIPE;
	}
	if (r != -EMFILE || message.flags & KVG_FLAG_REPLY)
		return r;
	say_no_descriptors(server, -r);
	kvg_refuse(server, client, &message, r);
	return 0;
}

/* A few messages, then the others have their turn. */
void kvg_client_serve(struct kvg_client *client)
{
	struct kvg_server *server = client->server;
	int r = 0;

	/* Only its process's end is watched any more. */
	if (client->fd < 0) {
		kvg_client_free(client);
		return;
	}
	if (client->owes)
		kvg_settle(client);
	for (unsigned i = 0; i < MESSAGES_MAX && r == 0 && STAILQ_EMPTY(&client->replies); i++)
		r = serve_message(server, client);
	if ((r == 0 || r == -EAGAIN) && !client->ended)
		return;
	if (r == -EPROTO) {
		server->stat.malformed++;
		kv_log_warning("gpu", "client ended: what it sent makes no sense pid=%d uid=%u",
			(int)client->pid, client->uid);
	} else if (r < 0 && r != -EPIPE && !client->ended) {
		kv_log_warning("gpu",
			"client ended: nothing can be read from it pid=%d uid=%u error=\"%s\"",
			(int)client->pid, client->uid, strerror(-r));
	}
	client_gone(client);
}
