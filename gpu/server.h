/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPU helper at work: takes engines' requests, has files staged, tells of changes. One epoll
 * loop; the stager has threads of its own.
 */
#ifndef KVFS_GPU_SERVER_H
#define KVFS_GPU_SERVER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* sysexits.h's EX_SOFTWARE: the device is lost to this process; whoever supervises it starts it
 * again.
 */
#define KVG_EXIT_DEVICE 70

struct kvg_server;

struct kvg_server_options {
	const char *store;
	const char *socket;  /* NULL: kvg_socket_path of the device */
	const char *group;   /* whose members may connect; NULL: only the user's own processes */
	const char *device;  /* see kvg_backend_open; NULL */
	const char *backend; /* name, or NULL */
	uint64_t budget;     /* bytes, if percent is 0 */
	unsigned percent;    /* of the device's memory */
	/* Percent of that, and of connections, for one user; 0: all, with a group half. */
	unsigned share;
	uint64_t segment; /* bytes */
	unsigned slots;   /* 0: the stager's default; so the next */
	uint32_t slot_size;
	uint64_t unsure_ms; /* what is there is trusted that long without the daemon */
	bool hints;         /* stage what is opened often without being asked */
	bool no_kernels;    /* see kvg_backend_open */
	bool check;         /* samples of what was staged, see sample.h */
};

/* One line in ret_error. */
int kvg_server_new(const struct kvg_server_options *options, struct kvg_server **ret_server,
	char *ret_error, size_t error_size);
/* Until SIGTERM or SIGINT. The process's exit status. */
int kvg_server_run(struct kvg_server *server);
/* NULL is allowed. Returns NULL. */
struct kvg_server *kvg_server_free(struct kvg_server *server);

#endif
