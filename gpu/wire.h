/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What engines (libkvg) and the GPU helper say to each other, over a SOCK_SEQPACKET socket. One
 * packet is a header of 64 bytes, a payload of up to 32 KiB and up to 253 descriptors; all numbers
 * are little-endian.
 *
 *	offset  size  field
 *	     0     4  magic "kvg1"
 *	     4     2  version
 *	     6     2  type
 *	     8     4  flags
 *	    12     4  segments that this packet describes
 *	    16     8  request id: the reply carries it
 *	    24     8  map id
 *	    32     8  offset in the file
 *	    40     8  length
 *	    48     4  status: 0 or a negative errno
 *	    52     4  bytes of payload
 *	    56     4  priority of a PREFETCH, signed; else zero
 *	    60     4  milliseconds that a PREFETCH is wanted for, 0: for good; else zero
 *
 * Both sides speak one version. Where type, flags, request id and status are is the same in all of
 * them: who gets a request of another version answers it, in his own, with -EPROTONOSUPPORT, and
 *ends the connection; so each side can tell its user which versions they are.
 *
 *	HELLO     c -> s; reply: struct kvg_hello. LATENCY: as long as this client is connected,
 *	          copies are short ones, so that its own wait less for the link
 *
 *	MAP       c -> s, ticket, 1 descriptor (the file)
 *	          reply: map id, file's size in length, for each segment its size (u64) and a
 *	          descriptor; the first packet has one descriptor more, in front: the watermark
 *	          page. MORE: another packet follows. Without READY set, READY comes later. An
 *	          error with a map id ends a mapping that was begun: UNMAP it
 *
 *	READY     s -> c: map id, status
 *
 *	UNMAP     c -> s: map id; no reply
 *
 *	PREFETCH  c -> s, ticket, 1 descriptor; reply: status. The more its priority, the
 *	          earlier: below 0 after all others, above 0 as what somebody waits for. What
 *	          nobody has mapped when its time is over is given up
 *
 *	STAT      c -> s, ticket or nothing, with it 1 descriptor; reply: struct kvg_wire_stat
 *
 *	EVICT     c -> s, ticket, 1 descriptor; reply: status, bytes in length
 *
 *	REVOKE    s -> c: map id, milliseconds in length
 *
 *	INVALID   s -> c: map id: the file has other content now, or none
 *
 * Nothing here allocates. Functions return 0 or negative errno: -EPROTO, not a packet of this
 * protocol; -EPROTONOSUPPORT, one of another version, of which only version, type, flags, id and
 * status are told.
 */
#ifndef KVFS_GPU_WIRE_H
#define KVFS_GPU_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVG_WIRE_VERSION 3u
#define KVG_HEADER_SIZE 64u
#define KVG_PAYLOAD_MAX (32u << 10)
/* SCM_MAX_FD of the kernel. */
#define KVG_FDS_MAX 253u
#define KVG_TICKET_SIZE 40u

enum kvg_type {
	KVG_HELLO = 1,
	KVG_MAP,
	KVG_READY,
	KVG_UNMAP,
	KVG_PREFETCH,
	KVG_STAT,
	KVG_EVICT,
	KVG_REVOKE,
	KVG_INVALID,
	_KVG_TYPE_MAX,
};

enum kvg_flag {
	KVG_FLAG_REPLY = 1u << 0,
	KVG_FLAG_MORE = 1u << 1,      /* MAP's reply: goes on in the next packet */
	KVG_FLAG_READY = 1u << 2,     /* MAP's reply: it is all there */
	KVG_FLAG_NOSTAGE = 1u << 3,   /* MAP: only if it is there already */
	KVG_FLAG_REVOCABLE = 1u << 4, /* MAP: the client answers REVOKE */
	KVG_FLAG_LATENCY = 1u << 5,   /* HELLO */
	KVG_FLAGS = (1u << 6) - 1,
};

struct kvg_message {
	uint16_t version; /* as received */
	uint16_t type;
	uint32_t flags;
	uint32_t segments;
	uint64_t id;
	uint64_t map;
	uint64_t offset;
	uint64_t length;
	int32_t status;
	int32_t priority;
	uint32_t ttl_ms;
	uint32_t payload_size;
	uint8_t payload[KVG_PAYLOAD_MAX];
	unsigned fd_count;
	int fds[KVG_FDS_MAX];
};

struct kvg_ticket {
	uint8_t token[16];
	uint64_t ino;
	uint64_t version;
	uint64_t size; /* bytes */
};

struct kvg_hello {
	uint8_t uuid[16];
	uint64_t granularity; /* bytes; so the others */
	uint64_t segment;
	uint64_t budget;
	char name[64];
	char mode[96];
	char reasons[512]; /* why no better backend was taken */
};
#define KVG_HELLO_SIZE (16u + 3 * 8 + 64 + 96 + 512)

/* Counters: one list for the struct, the wire and what people read. */
#define KVG_STATS(X)                                                                               \
	X(budget, "bytes of device memory that files may take")                                    \
	X(share, "bytes of them that one user's files may take")                                   \
	X(used, "bytes they take")                                                                 \
	X(missing, "those of the budget that other processes have taken from the device")          \
	X(orphaned, "those of them that clients did not give back in time")                        \
	X(held, "those of failed stagings that a drive may still write to")                        \
	X(entries, "files there or on their way")                                                  \
	X(resident, "files there")                                                                 \
	X(maps, "mappings of clients")                                                             \
	X(clients, "connections")                                                                  \
	X(staged, "files staged")                                                                  \
	X(staged_bytes, "bytes of them")                                                           \
	X(from_dram_bytes, "bytes copied from the DRAM tier")                                      \
	X(from_device_bytes, "bytes read from drives")                                             \
	X(direct_bytes, "those of them that did not pass the CPU on their way (cuFile)")           \
	X(direct_errors, "reads past the CPU that failed, and were done again")                    \
	X(from_file_bytes, "bytes read through the mount")                                         \
	X(hits, "maps of files that were there, or on their way")                                  \
	X(misses, "maps that began to stage")                                                      \
	X(evicted, "files evicted")                                                                \
	X(invalidated, "files given up because their content changed")                             \
	X(failed, "stagings that failed")                                                          \
	X(checksum_errors, "chunks whose checksum did not match")                                  \
	X(checked, "segments whose samples were looked at (--check sampled)")                      \
	X(check_errors, "segments that did not hold what was loaded, and were given up")           \
	X(refused, "maps that were refused")                                                       \
	X(malformed, "clients ended because of what they sent")                                    \
	X(daemon, "1 while the daemon of the mount is connected")                                  \
	X(asked_resident, "of the file asked about: bytes there")                                  \
	X(asked_size, "of the file asked about: bytes")

struct kvg_wire_stat {
#define KVG_STAT_FIELD(name, help) uint64_t name;
	KVG_STATS(KVG_STAT_FIELD)
#undef KVG_STAT_FIELD
};
#define KVG_WIRE_STAT_SIZE sizeof(struct kvg_wire_stat)

/* The header of MESSAGE. */
void kvg_message_encode(const struct kvg_message *message, uint8_t ret_header[KVG_HEADER_SIZE]);
/* DATA: a whole packet. Fills all but the descriptors. */
int kvg_message_decode(const void *data, size_t size, struct kvg_message *ret_message);

void kvg_ticket_put(const struct kvg_ticket *ticket, struct kvg_message *message);
int kvg_ticket_get(const struct kvg_message *message, struct kvg_ticket *ret_ticket);
void kvg_hello_put(const struct kvg_hello *hello, struct kvg_message *message);
int kvg_hello_get(const struct kvg_message *message, struct kvg_hello *ret_hello);
void kvg_stat_put(const struct kvg_wire_stat *stat, struct kvg_message *message);
int kvg_stat_get(const struct kvg_message *message, struct kvg_wire_stat *ret_stat);
/* Sizes of SEGMENTS segments behind one another. */
void kvg_sizes_put(const uint64_t *sizes, unsigned count, struct kvg_message *message);
/* Of segment I, which must be below message->segments. */
uint64_t kvg_sizes_get(const struct kvg_message *message, unsigned i);

/*
 * Sends a packet; its descriptors stay the caller's. -EAGAIN on a socket that would block; -EPIPE
 * if the other side is gone, without a signal.
 */
int kvg_send(int fd, const struct kvg_message *message);
/*
 * Receives one; its descriptors (O_CLOEXEC) are the caller's: kvg_message_close. -EAGAIN: there is
 * none yet; -EPIPE: the other side is gone; -EPROTO: nonsense, and -EPROTONOSUPPORT: of another
 * version, whose descriptors are closed;
 * -EMFILE: this process could not take the descriptors of *RET_MESSAGE, which is filled but for
 * them.
 */
int kvg_receive(int fd, struct kvg_message *ret_message);
/* Closes those that were not taken (set to -1). */
void kvg_message_close(struct kvg_message *message);

#endif
