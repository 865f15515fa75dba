/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvgbench's questions about several processes. The others are this program again, with one socket;
 * a process that has used the driver cannot fork.
 *
 *   reader    maps what it is sent, for reading, and compares
 *   storer    maps it for reading and lets the device store there: that must not work
 *   exporter  makes memory, sends it, and waits for its end
 *   holder    opens the device, says so, and waits for its end
 */
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "fs/base.h"
#include "tools/bench/kvgbench.h"

#define READERS 3u
#define CHILD_SOCKET 3
/* Until the driver has noticed that a process is gone. */
#define SETTLE_TRIES 50u

/* Parent and child must make the same of it. */
static uint64_t shared_size(const struct kvgbench *bench)
{
	return kv_round_up((bench->quick ? 4 : 64) * MIB, bench->info.granularity);
}

struct message {
	char verdict; /* 'y', or what went wrong */
	double us;    /* that a map took */
};

struct child {
	pid_t pid;
	int socket;
};

/* ---- Processes ---- */

static int start_child(const struct kvgbench *bench, const char *role, struct child *ret_child)
{
	/* Those that are not always there come last: a NULL ends the list. */
	char *arguments[] = {(char *)bench->program, (char *)"--backend", (char *)bench->ops->name,
		(char *)"--child", (char *)role, NULL, NULL, NULL, NULL};
	unsigned count = 5;
	posix_spawn_file_actions_t actions;
	extern char **environ;
	int ends[2], r;

	if (bench->quick)
		arguments[count++] = (char *)"--quick";
	if (bench->device) {
		arguments[count++] = (char *)"--device";
		arguments[count++] = (char *)bench->device;
	}
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
		return -errno;
	(void)posix_spawn_file_actions_init(&actions);
	(void)posix_spawn_file_actions_adddup2(&actions, ends[1], CHILD_SOCKET);
	r = posix_spawn(&ret_child->pid, bench->program, &actions, NULL, arguments, environ);
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)close(ends[1]);
	if (r != 0) {
		(void)close(ends[0]);
		return -r;
	}
	ret_child->socket = ends[0];
	return 0;
}

static void end_child(struct child *child, bool kill_it)
{
	/* First, or it would end in good order. */
	if (kill_it)
		(void)kill(child->pid, SIGKILL);
	(void)close(child->socket);
	(void)waitpid(child->pid, NULL, 0);
}

static int send_message(int to, const struct message *message, int fd)
{
	struct iovec vector = {.iov_base = (void *)message, .iov_len = sizeof(*message)};
	char control[CMSG_SPACE(sizeof(fd))] = {0};
	struct msghdr header = {.msg_iov = &vector, .msg_iovlen = 1};

	if (fd >= 0) {
		header.msg_control = control;
		header.msg_controllen = sizeof(control);
		CMSG_FIRSTHDR(&header)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&header)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&header)->cmsg_len = CMSG_LEN(sizeof(fd));
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&header)), &fd, sizeof(fd));
	}
	return sendmsg(to, &header, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* -EPIPE: the other one has ended. ret_fd may be NULL. */
static int receive_message(int from, struct message *ret_message, int *ret_fd)
{
	struct iovec vector = {.iov_base = ret_message, .iov_len = sizeof(*ret_message)};
	char control[CMSG_SPACE(sizeof(int))];
	struct msghdr header = {.msg_iov = &vector,
		.msg_iovlen = 1,
		.msg_control = control,
		.msg_controllen = sizeof(control)};
	ssize_t n = recvmsg(from, &header, MSG_CMSG_CLOEXEC);

	if (n != (ssize_t)sizeof(*ret_message))
		return n < 0 ? -errno : -EPIPE;
	if (ret_fd && CMSG_FIRSTHDR(&header))
		memcpy(ret_fd, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof(*ret_fd));
	return 0;
}

/* ---- What is in the memory ---- */

static void make_pattern(uint64_t *words, uint64_t size)
{
	uint64_t seed = 88172645463325252u;

	for (uint64_t i = 0; i < size / sizeof(*words); i++) {
		seed ^= seed << 13;
		seed ^= seed >> 7;
		seed ^= seed << 17;
		words[i] = seed;
	}
}

static int copy_and_wait(
	struct kvgbench *bench, enum kvg_copy_kind kind, uint64_t to, uint64_t from, uint64_t size)
{
	const struct kvg_copy copy = {.to = to, .from = from, .size = size};
	int r = bench->ops->copy(bench->backend, NULL, kind, &copy, 1);

	return r < 0 ? r : bench->ops->stream_sync(bench->backend, NULL);
}

static int check_pattern(struct kvgbench *bench, kvg_devptr address, uint64_t size)
{
	_cleanup_free_ uint64_t *expected = malloc(size), *found = malloc(size);
	int r;

	if (!expected || !found)
		return -ENOMEM;
	make_pattern(expected, size);
	r = copy_and_wait(bench, KVG_COPY_TO_HOST, (uint64_t)(uintptr_t)found, address, size);
	if (r < 0)
		return r;
	return memcmp(expected, found, size) == 0 ? 0 : -EBADMSG;
}

/* Device memory with the pattern, and a descriptor of it. */
static int make_shared(struct kvgbench *bench, struct kvgbench_memory *memory, int *ret_fd)
{
	_cleanup_free_ uint64_t *pattern = malloc(shared_size(bench));
	int r;

	if (!pattern)
		return -ENOMEM;
	make_pattern(pattern, shared_size(bench));
	r = kvgbench_memory_get(bench, shared_size(bench), 0, memory);
	if (r < 0)
		return r;
	r = copy_and_wait(bench, KVG_COPY_TO_DEVICE, memory->address, (uint64_t)(uintptr_t)pattern,
		shared_size(bench));
	if (r == 0)
		r = bench->ops->segment_export(bench->backend, memory->segment, ret_fd);
	if (r < 0)
		kvgbench_memory_put(bench, memory);
	return r;
}

/* Imports FD and maps it for reading; the segment is given back. */
static int map_shared(struct kvgbench *bench, int fd, struct kvg_mapping **ret_mapping)
{
	struct kvg_segment *segment;
	int r = bench->ops->segment_import(bench->backend, fd, shared_size(bench), &segment);

	if (r < 0)
		return r;
	r = bench->ops->map(bench->backend, &segment, 1, false, ret_mapping);
	bench->ops->segment_free(bench->backend, segment);
	return r;
}

/* ---- The others ---- */

static int run_reader(struct kvgbench *bench, bool stores)
{
	struct kvg_mapping *mapping = NULL;
	kvg_stream stream = NULL;
	struct message message;
	double start;
	int fd = -1, r;

	if (receive_message(CHILD_SOCKET, &message, &fd) < 0 || fd < 0)
		return 1;
	start = kvgbench_now(bench);
	r = map_shared(bench, fd, &mapping);
	message.us = (kvgbench_now(bench) - start) * 1e6;
	(void)close(fd);
	if (r == 0 && stores) {
		r = bench->ops->stream_new(bench->backend, &stream);
		if (r == 0)
			r = bench->ops->fill(bench->backend, stream,
				bench->ops->address(bench->backend, mapping), 0,
				shared_size(bench));
		if (r == 0)
			r = bench->ops->stream_sync(bench->backend, stream);
	} else if (r == 0) {
		r = check_pattern(
			bench, bench->ops->address(bench->backend, mapping), shared_size(bench));
	}
	message.verdict = r == 0 ? 'y' : r == -EBADMSG ? 'b' : 'e';
	bench->ops->stream_free(bench->backend, stream);
	bench->ops->unmap(bench->backend, mapping);
	(void)send_message(CHILD_SOCKET, &message, -1);
	return 0;
}

static int run_exporter(struct kvgbench *bench, bool makes_memory)
{
	struct kvgbench_memory memory = {0};
	struct message message = {.verdict = 'y'};
	_cleanup_fd_ int fd = -1;
	int r = makes_memory ? make_shared(bench, &memory, &fd) : 0;

	if (r == 0)
		r = send_message(CHILD_SOCKET, &message, fd);
	if (r == 0)
		(void)receive_message(CHILD_SOCKET, &message, NULL);
	kvgbench_memory_put(bench, &memory);
	return r < 0;
}

int kvgbench_child(struct kvgbench *bench, const char *role)
{
	if (strcmp(role, "reader") == 0 || strcmp(role, "storer") == 0)
		return run_reader(bench, role[0] == 's');
	if (strcmp(role, "exporter") == 0 || strcmp(role, "holder") == 0)
		return run_exporter(bench, role[0] == 'e');
	return 2;
}

/* ---- share ---- */

static int share_with_readers(struct kvgbench *bench, int fd)
{
	for (unsigned i = 0; i < READERS; i++) {
		struct message message = {0};
		struct child child;
		int r = start_child(bench, "reader", &child);

		if (r == 0)
			r = send_message(child.socket, &message, fd);
		if (r == 0)
			r = receive_message(child.socket, &message, NULL);
		if (r < 0)
			return kvgbench_fail(r, "a reader");
		end_child(&child, false);
		if (message.verdict != 'y')
			return kvgbench_fail(-EBADMSG, "what a reader sees");
		kvgbench_say(message.us, "us", "share.reader%u.map", i + 1);
	}
	(void)printf("share.readers: all %u see the same bytes\n", READERS);
	return 0;
}

/* The owner's bytes must be as they were, whatever the driver made of the store. */
static int share_with_a_storer(struct kvgbench *bench, int fd, const struct kvgbench_memory *memory)
{
	struct message message = {0};
	struct child child;
	int r = start_child(bench, "storer", &child);

	if (r == 0)
		r = send_message(child.socket, &message, fd);
	if (r < 0)
		return kvgbench_fail(r, "a storer");
	/* It may die of it. */
	r = receive_message(child.socket, &message, NULL);
	end_child(&child, false);
	(void)printf("share.store_by_reader: %s\n",
		r < 0                    ? "kills the process"
		: message.verdict == 'e' ? "is an error of the device"
					 : "TAKES PLACE: read-only mappings are none");
	r = check_pattern(bench, memory->address, shared_size(bench));
	(void)printf("share.store_by_reader: the owner's bytes are %s\n",
		r == 0 ? "as they were" : "OTHERS NOW");
	return r < 0 ? kvgbench_fail(r, "after a store by a reader") : 0;
}

static int wait_for_free(struct kvgbench *bench, uint64_t wanted, uint64_t *ret_free)
{
	const struct timespec pause = {.tv_nsec = 20000000};
	int r = 0;

	for (unsigned i = 0; r == 0 && i < SETTLE_TRIES; i++) {
		r = bench->ops->free_bytes(bench->backend, ret_free);
		if (*ret_free >= wanted)
			break;
		(void)nanosleep(&pause, NULL);
	}
	return r;
}

/* Its memory lives on in our descriptor, and counts, until that is closed as well. */
static int outlive_an_exporter(struct kvgbench *bench)
{
	uint64_t before = 0, orphaned = 0, after = 0;
	struct kvg_mapping *mapping = NULL;
	struct message message;
	struct child child;
	int fd = -1, r;

	r = bench->ops->free_bytes(bench->backend, &before);
	if (r == 0)
		r = start_child(bench, "exporter", &child);
	if (r < 0)
		return kvgbench_fail(r, "an exporter");
	r = receive_message(child.socket, &message, &fd);
	if (r == 0)
		r = map_shared(bench, fd, &mapping);
	end_child(&child, true);
	if (r == 0)
		r = check_pattern(
			bench, bench->ops->address(bench->backend, mapping), shared_size(bench));
	bench->ops->unmap(bench->backend, mapping);
	if (r < 0)
		return kvgbench_fail(r, "memory of a dead process");
	(void)printf("share.dead_exporter: its bytes are intact\n");
	r = wait_for_free(bench, before - shared_size(bench), &orphaned);
	(void)close(fd);
	if (r == 0)
		r = wait_for_free(bench, before, &after);
	if (r < 0)
		return kvgbench_fail(r, "free memory");
	kvgbench_say(((double)before - (double)orphaned) / MIB, "MiB", "share.orphan_by_fd");
	kvgbench_say(((double)before - (double)after) / MIB, "MiB", "share.orphan_after_close");
	return 0;
}

int kvgbench_share(struct kvgbench *bench)
{
	struct kvgbench_memory memory;
	int fd = -1, r = make_shared(bench, &memory, &fd);

	if (r < 0)
		return kvgbench_fail(r, "memory to share");
	r = share_with_readers(bench, fd);
	if (r == 0)
		r = share_with_a_storer(bench, fd, &memory);
	(void)close(fd);
	kvgbench_memory_put(bench, &memory);
	return r < 0 ? r : outlive_an_exporter(bench);
}

/* ---- context ---- */

int kvgbench_context(struct kvgbench *bench)
{
	uint64_t before = 0, with = 0;
	struct message message;
	struct child child;
	int r = bench->ops->free_bytes(bench->backend, &before);

	if (r == 0)
		r = start_child(bench, "holder", &child);
	if (r < 0)
		return kvgbench_fail(r, "another process");
	r = receive_message(child.socket, &message, NULL);
	if (r == 0)
		r = bench->ops->free_bytes(bench->backend, &with);
	end_child(&child, false);
	if (r < 0)
		return kvgbench_fail(r, "another process");
	kvgbench_say((double)bench->info.total / MIB, "MiB", "context.total");
	kvgbench_say((double)before / MIB, "MiB", "context.free");
	kvgbench_say(((double)before - (double)with) / MIB, "MiB", "context.another_process");
	return 0;
}
