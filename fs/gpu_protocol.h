/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the daemon and the GPU helpers of its own user say to each other, over the SOCK_SEQPACKET
 * socket STORE/gpu.sock. Both run on one host and come of one build or of two close ones: fields
 * are in the host's order, and a version number guards them.
 *
 *	helper  -> daemon   struct kv_gpu_request
 *	daemon  -> helper   struct kv_gpu_reply, with chunks behind it where TYPE is CHUNKS
 *	daemon  -> helper   struct kv_gpu_reply with TYPE CHANGED or HOT and id 0, whenever it likes
 *
 *	HELLO    session, device (of the mount), count of data devices; descriptors: the data
 *	         devices, for reading, O_DIRECT where they take it
 *
 *	LOCATE   of a ticket, or (token zero) of ino and number for uid: hold, ino, number, uid,
 *	         size, flags; descriptor: the DRAM object, for reading, if the file is RESIDENT.
 *	         What it names is there, unchanged, until DROP of the hold or the end of the
 *	         connection. From then on CHANGED is sent when the file has other content or
 *	         none, until as many UNWATCH came as LOCATE were answered
 *
 *	CHUNKS   of a hold, from chunk `first` on: count struct kv_gpu_chunk, each followed by
 *	         its extents
 *
 *	DROP     hold
 *
 *	UNWATCH  ino: takes one LOCATE of it back
 *
 *	CHANGED  ino: what was located is not the file's content any more
 *
 *	HOT      ino, number, uid, size: UID opened it for reading; only if HELLO asked for it.
 *	         May get lost
 *
 * The daemon never waits for a helper: a connection that does not take what it is sent is ended,
 * and whoever connects again must take everything it had for changed.
 */
#ifndef KVFS_FS_GPU_PROTOCOL_H
#define KVFS_FS_GPU_PROTOCOL_H

#include <stdint.h>

#define KV_GPU_SOCKET "gpu.sock"
#define KV_GPU_MAGIC 0x4756464bu
#define KV_GPU_VERSION 1u
#define KV_GPU_PACKET_MAX (60u << 10)
#define KV_GPU_TOKEN_SIZE 16u

enum kv_gpu_type {
	KV_GPU_HELLO = 1,
	KV_GPU_LOCATE,
	KV_GPU_CHUNKS,
	KV_GPU_DROP,
	KV_GPU_UNWATCH,
	_KV_GPU_REQUEST_MAX,
	KV_GPU_CHANGED = 64,
	KV_GPU_HOT,
};

/* HELLO: HOT is wanted. */
#define KV_GPU_WANT_HOT 1u
/* LOCATE: the whole file is in its DRAM object. */
#define KV_GPU_RESIDENT 1u

struct kv_gpu_request {
	uint32_t magic;
	uint16_t version;
	uint16_t type;
	uint64_t id; /* comes back in the reply; not 0 */
	uint8_t token[KV_GPU_TOKEN_SIZE];
	uint64_t ino;
	uint64_t number; /* of the file's version */
	uint64_t hold;
	uint32_t uid;
	uint32_t first;
	uint32_t flags;
	uint32_t zero;
};

struct kv_gpu_reply {
	uint32_t magic;
	uint16_t version;
	uint16_t type;
	uint64_t id;
	int32_t status; /* 0 or negative errno */
	uint32_t count;
	uint8_t session[16]; /* of this life of the daemon */
	uint64_t device;     /* as st_dev */
	uint64_t hold;
	uint64_t ino;
	uint64_t number;
	uint64_t size; /* bytes */
	uint32_t uid;
	uint32_t flags;
};

enum kv_gpu_where {
	KV_GPU_HOLE,   /* zeros */
	KV_GPU_DEVICE, /* its extents say where, SUM is the XXH3-64 of them, one after the other */
	KV_GPU_FILE,   /* to be read through the file itself */
};

struct kv_gpu_chunk {
	uint32_t number;
	uint16_t where; /* enum kv_gpu_where */
	uint16_t extents;
	uint64_t sum;
};

struct kv_gpu_extent {
	uint64_t offset; /* bytes, on the device */
	uint32_t length; /* bytes; a multiple of 4096 */
	uint16_t device;
	uint16_t block; /* first one within the chunk, of 4096 bytes */
};

#endif
