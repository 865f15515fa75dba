/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's side of the GPU helpers: tickets that prove a permission, where a file's bytes are,
 * and word of changes. gpu_protocol.h has the messages.
 *
 * A ticket belongs to an open file description of a published file, and ends with it. Whoever shows
 * it names that file and the user who asked for it; the kernel had checked that one's permission at
 * the open.
 *
 * One thread answers all helpers. Requests' threads only send short notes, which never wait. Lock:
 * a leaf. Errors: negative errno.
 */
#ifndef KVFS_FS_GPU_H
#define KVFS_FS_GPU_H

#include <stdint.h>
#include <sys/types.h>

struct kv_daemon;
struct kv_gpu;
struct kv_handle;
struct kvfs_ticket;

/*
 * Listens at KV_GPU_SOCKET in the store, for processes of the daemon's own user and root. DEVICE:
 * that of the mount. A mount without it works as well; only helpers find nobody.
 */
int kv_gpu_new(struct kv_daemon *daemon, dev_t device, struct kv_gpu **ret_gpu);
/* Ends all connections, what they hold, and all tickets. Notes may still come. NULL is allowed. */
void kv_gpu_stop(struct kv_gpu *gpu);
/* When nobody sends notes any more. NULL is allowed. Returns NULL. */
struct kv_gpu *kv_gpu_free(struct kv_gpu *gpu);

/* The ticket of HANDLE (of a published file) for UID, made if there is none. -EBUSY: not published.
 */
int kv_gpu_ticket(
	struct kv_gpu *gpu, struct kv_handle *handle, uid_t uid, struct kvfs_ticket *ret_ticket);
/* The same without a token: what a ticket of HANDLE would be of. */
int kv_gpu_look(const struct kv_handle *handle, struct kvfs_ticket *ret_ticket);
/* HANDLE ends. */
void kv_gpu_released(struct kv_gpu *gpu, struct kv_handle *handle);
/* INO has other content now, or none. */
void kv_gpu_changed(struct kv_gpu *gpu, uint64_t ino);
/* UID has opened HANDLE for reading. */
void kv_gpu_opened(struct kv_gpu *gpu, struct kv_handle *handle, uid_t uid);

#endif
