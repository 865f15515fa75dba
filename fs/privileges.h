/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the process may do: as little as a mount needs, and as many descriptors as there are.
 *
 * Call them once, on the main thread, before there are others. Errors: negative errno.
 */
#ifndef KVFS_FS_PRIVILEGES_H
#define KVFS_FS_PRIVILEGES_H

/*
 * Gives up, for good and for children too, every capability but those that a mount goes on to need,
 * and, if the process is root's, ways to get them back. No core files are written from here on:
 * cached content is somebody's prompt.
 */
int kv_privileges_drop(void);

/* As many descriptors as the process may have: objects in use and segments take one each. */
void kv_raise_file_limit(void);

#endif
