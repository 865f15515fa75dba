/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The FUSE session: mounting, the INIT handshake, probing passthrough, the request loop.
 *
 * Called in order by kvfsd.c on its main thread: new, mount, start, loop, free.
 */
#ifndef KVFS_FS_SESSION_H
#define KVFS_FS_SESSION_H

#include <stddef.h>

#include "fs/daemon.h"

/*
 * Mounts on DIRECTORY (absolute) and answers INIT, so that the mode is known and all later requests
 * can be served. One line for the user in ret_error on failure.
 */
int kv_session_start(
	struct kv_daemon *daemon, const char *directory, char *ret_error, size_t error_size);

/* Serves requests until the mount ends or a signal asks to stop. 0, or negative errno. */
int kv_session_loop(struct kv_daemon *daemon);

/* Unmounts if still mounted. The session stays for threads that may notify; kv_session_free ends
 * it. */
void kv_session_stop(struct kv_daemon *daemon);
void kv_session_free(struct kv_daemon *daemon);

#endif
