/* SPDX-License-Identifier: Apache-2.0 */
/* The helper's loop, what the daemon tells it, and its end: see server.h and server_internal.h. */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>

#include "fs/log.h"
#include "fs/parse.h"
#include "gpu/server_internal.h"

int kvg_watch(const struct kvg_server *server, int fd, void *what)
{
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};

	return epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
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

struct kvg_source_hooks kvg_server_hooks(struct kvg_server *server)
{
	return (struct kvg_source_hooks){
		.arg = server,
		.connected = on_connected,
		.lost = on_lost,
		.changed = on_changed,
		.hot = on_hot,
	};
}

void kvg_follow_source(struct kvg_server *server)
{
	int fd = kvg_source_fd(server->source);
	struct epoll_event event = {
		.events = EPOLLIN | (kvg_source_has_unsent(server->source) ? EPOLLOUT : 0u),
		.data.ptr = &server->source,
	};
	int what = fd == server->source_fd ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;

	if (fd == server->source_fd && event.events == server->source_events)
		return;
	/* A closed one has left epoll by itself. */
	if (fd < 0) {
		server->source_fd = -1;
		return;
	}
	server->source_fd = epoll_ctl(server->epoll_fd, what, fd, &event) < 0 ? -1 : fd;
	server->source_events = event.events;
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

	kvg_listen_again(server, now_ms);
	kvg_source_tick(server->source, now_ms);
	kvg_follow_source(server);
	(void)kvg_hbm_tick(server->hbm, now_ms);
	check_room(server);
	kvg_stage_news(server);
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
		kvg_client_accept(server);
	else if (what == &server->signal_fd)
		take_signal(server);
	else if (what == &server->source)
		serve_source(server);
	else if (what == &server->stager)
		kvg_stage_reap(server);
	else if (what == &server->checker)
		kvg_check_reap(server);
	else
		kvg_client_serve(what);
}

int kvg_server_run(struct kvg_server *server)
{
	struct epoll_event event;

	while (!server->stop) {
		/* One at a time, for it may end the client that the next one is of. */
		int n = epoll_wait(server->epoll_fd, &event, 1, KVG_TICK_MS);

		if (n < 0 && errno != EINTR)
			return 1;
		if (n > 0)
			serve_event(server, event.data.ptr);
		tick(server);
	}
	return server->status;
}

/* ---- Life ---- */

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
	server->stager = NULL;
	kvg_check_done(server);
	if (server->status == KVG_EXIT_DEVICE)
		kvg_stage_abandon(server);
	while ((client = LIST_FIRST(&server->clients)))
		kvg_client_free(client);
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
