/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting, told to whom it concerns: a thread that others count on says before it waits, so that
 * another one can take its place meanwhile. Threads: each for itself; any lock may be held.
 */
#ifndef KVFS_FS_WAIT_H
#define KVFS_FS_WAIT_H

/* From now on HOOK is called with ARG when the calling thread is about to wait. It must be quick,
 * and take no lock that is held by a caller of kv_wait_begins. */
void kv_wait_hook(void (*hook)(void *arg), void *arg);

/* The calling thread is about to wait: for a device, for memory, for another request. */
void kv_wait_begins(void);

#endif
