/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads that receive requests and handle them.
 *
 * One thread receives, handles what it got itself, and receives the next. So nobody is woken
 * between two requests of one client: it sleeps until its answer, and the thread that gave it finds
 * the next request when it comes back. Where many threads wait for requests, as in libfuse's own
 * loop, the kernel wakes another one for each; on a machine whose processors are few every answer
 * lets the client run before the thread that gave it, and a dozen of them stand half-way through.
 *
 * It looks for the next request for some microseconds before it sleeps.
 *
 * Another thread receives while the one that would is about to wait (fs/wait.h), or is seen to be
 * at one request for long while others are pending. Where requests come faster than the
 * receivers take them there are more of them, up to one a processor, and fewer again later.
 *
 * Ownership: kv_workers_run has all of it. Errors: negative errno.
 */
#ifndef KVFS_FS_WORKERS_H
#define KVFS_FS_WORKERS_H

#include <stdbool.h>
#include <stddef.h>

/* Where requests come from, and who handles them. */
struct kv_workers_source {
	int fd; /* readable while requests are pending */
	/*
	 * Waits for a request, and may be cancelled in that: its size, 0 at the end, -EINTR and
	 * -EAGAIN to be asked again, or another negative errno. It is put into *memory, which is a
	 * thread's own, NULL at first, and freed when it has none to receive.
	 */
	int (*receive)(void *arg, void **memory);
	void (*handle)(void *arg, void *memory, size_t size);
	bool (*has_ended)(void *arg);
	void *arg;
	unsigned threads_max;
};

/*
 * Handles requests until the source has ended; a signal that interrupts the calling thread makes it
 * look. Returns when all threads are gone: 0, or why it could not receive, or begin.
 */
int kv_workers_run(const struct kv_workers_source *source);

#endif
