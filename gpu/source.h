/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The helper's end of the daemon's socket (fs/gpu_protocol.h): questions and answers without
 * waiting, notes, and connecting again when the daemon has gone.
 *
 * Threads: the one that made it. It calls back from kvg_source_dispatch and kvg_source_tick only.
 * Errors: negative errno; -EPIPE to all who wait when the connection ends.
 */
#ifndef KVFS_GPU_SOURCE_H
#define KVFS_GPU_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fs/base.h"
#include "fs/gpu_protocol.h"

struct kvg_source;

/* An answer. Its descriptors are the callback's to take (and set to -1). */
struct kvg_answer {
	const struct kv_gpu_reply *reply; /* NULL: there is none, see error */
	int error;                        /* 0, the reply's status, or why there is none */
	const uint8_t *payload;
	size_t payload_size;
	int *fds;
	unsigned fd_count;
};

struct kvg_source_hooks {
	void *arg;
	/* A daemon answers. CHANGED: nothing of what it was asked before is sure any more. */
	void (*connected)(void *arg, bool changed);
	void (*lost)(void *arg);
	void (*changed)(void *arg, uint64_t ino);
	void (*hot)(void *arg, const struct kv_gpu_reply *note);
};

/*
 * Connects to the daemon of store PATH and learns its devices; one line in ret_error if that is
 * not possible. HOT: wants hints.
 */
int kvg_source_new(const char *store, bool hot, const struct kvg_source_hooks *hooks,
	struct kvg_source **ret_source, char *ret_error, size_t error_size);
/* Nobody is called back any more. NULL is allowed. Returns NULL. */
struct kvg_source *kvg_source_free(struct kvg_source *source);

/* The socket, for POLLIN; -1 while there is none. It is another one after a new connection. */
int kvg_source_fd(const struct kvg_source *source);
/* Something waits for room in it: dispatch is to be called when there is (POLLOUT), too. */
bool kvg_source_has_unsent(const struct kvg_source *source);
bool kvg_source_is_connected(const struct kvg_source *source);
/* Of the mount, as st_dev. */
uint64_t kvg_source_device(const struct kvg_source *source);
/* The data devices, open as long as the source. */
const int *kvg_source_devices(const struct kvg_source *source, unsigned *ret_count);

/* Sends what waits, and reads what is there. -ESTALE: the store has other devices than before:
 * start again. */
int kvg_source_dispatch(struct kvg_source *source);
/* Connects again, if it is time. */
void kvg_source_tick(struct kvg_source *source, int64_t now_ms);

/* Asks; CALLBACK comes once, later. On an error it does not. Sets the fields that all have. */
int kvg_source_ask(struct kvg_source *source, struct kv_gpu_request *request,
	void (*callback)(void *arg, const struct kvg_answer *answer), void *arg);
/* The same without an interest in the answer. It is said, or the connection ends. */
void kvg_source_tell(struct kvg_source *source, struct kv_gpu_request *request);

#endif
