/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a kvfs mount answers to ioctl(2), for programs; includable from C and C++, needs nothing
 *else of kvfs and no library.
 *
 *	KVFS_IOC_LOOKUP  directory  which of many names are there, in one call
 *	KVFS_IOC_WARM    file       bring a range of it into DRAM, or ask how much of it is there
 *	KVFS_IOC_COOL    directory  drop a file from DRAM
 *	KVFS_IOC_EVICT   directory  remove a file from the store, as eviction does
 *	KVFS_IOC_SCRUB   directory  read what the devices hold of a file, and check it
 *	KVFS_IOC_TICKET  file       something to show to a GPU helper
 *
 * Descriptors opened O_RDONLY do for all of them. The structs are the same for 32-bit programs.
 * Errors of all: ENOTTY, not on a kvfs mount (or one older than the call); EINVAL, a reserved field
 * or an unknown flag is set, or a name is empty, "." or "..", or has a '/'; ENAMETOOLONG, a name is
 * longer than 1023 bytes; ENOTDIR and EISDIR, the descriptor is of the wrong kind.
 *
 * A FUSE filesystem is handed as much of an argument as the call's number says, and that has 14
 *bits for it: so no argument is longer than 16,383 bytes, and long lists take several calls. The
 *inline functions below make them.
 */
#ifndef KVFS_IOCTL_H
#define KVFS_IOCTL_H

#include <errno.h>
#include <linux/ioctl.h>
#include <linux/types.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>

#define KVFS_IOC_MAGIC 0xBF

/* ---- Which names are there ---- */

/* Bytes of names in one call. */
#define KVFS_LOOKUP_BYTES 16352
/* Longest name, without its NUL. */
#define KVFS_NAME_MAX 1023

/* Stop at the first name that is absent: `leading` is right, the others count as absent. */
#define KVFS_LOOKUP_STOP 1u

/*
 * Asks for names in the directory that the descriptor is of. A file is present when it has
 * published content that is not known to be damaged; one that is being written for the first time
 * is absent, also to its writer. Directories and symlinks are present. Being able to read the
 * directory is enough: who can list it sees its names anyway.
 */
struct kvfs_lookup {
	__u32 count;    /* in: names */
	__u32 length;   /* in: bytes of u.names that are used */
	__u32 flags;    /* in: KVFS_LOOKUP_* */
	__u32 reserved; /* in: 0 */
	__u32 leading;  /* out: how many names from the first on are present */
	__u32 present;  /* out: how many of all of them are */
	union {
		char names[KVFS_LOOKUP_BYTES];  /* in: one behind the other, a NUL behind each */
		__u8 bitmap[KVFS_LOOKUP_BYTES]; /* out: (count + 7) / 8 bytes; name I is bit I % 8
						    of byte I / 8 */
	} u;
};
#define KVFS_IOC_LOOKUP _IOWR(KVFS_IOC_MAGIC, 1, struct kvfs_lookup)

/* ---- Into DRAM ---- */

/* Bytes that one call works off at most. */
#define KVFS_WARM_BYTES (32u << 20)

/*
 * Brings a range of the file into DRAM and waits until it is there; the descriptor must be open for
 * reading, and of a published file (EBUSY if it is being written). Go on at offset + done while
 * done is not 0. Where resident + holes is less than done, the rest did not fit the DRAM budget:
 * files that are open, and bytes not yet written, do not make room. EIO: damaged, or the device
 * failed.
 */
struct kvfs_warm {
	__u64 offset;   /* in: bytes */
	__u64 length;   /* in: bytes; what lies behind the end of the file is left out */
	__u32 flags;    /* in: KVFS_WARM_* */
	__u32 reserved; /* in: 0 */
	__u64 done;     /* out: bytes looked at from offset on; 0 at the end of the file */
	__u64 resident; /* out: those of them that are in DRAM */
	__u64 holes;    /* out: those of them that need neither DRAM nor a device */
};
#define KVFS_IOC_WARM _IOWR(KVFS_IOC_MAGIC, 2, struct kvfs_warm)

/* Only ask: brings nothing in. */
#define KVFS_WARM_ASK 1u

/* ---- Out of DRAM, out of the store ---- */

/* KVFS_IOC_EVICT: although it was opened within the lease. */
#define KVFS_DROP_LEASED 1u

/*
 * Names a file in the directory that the descriptor is of; the file need not be open, which would
 * keep it where it is. Root and the file's owner may, and nobody evict what is pinned (EPERM).
 * ENOENT: no such name.
 *
 * COOL drops the file's bytes from DRAM, after what is not on the device yet was written there.
 * EBUSY: it is open, or being written. Mappings that live on keep their memory. EVICT removes the
 * file from the store: all of its names go, and its space is freed. EBUSY: it is open, or was
 * closed this moment, or is being written. EAGAIN: it was opened within the lease.
 */
struct kvfs_drop {
	__u32 flags;                  /* in: KVFS_DROP_* */
	__u32 reserved;               /* in: 0 */
	__u64 bytes;                  /* out: bytes of DRAM, or of the store, that were freed */
	char name[KVFS_NAME_MAX + 1]; /* in: with a NUL */
};
#define KVFS_IOC_COOL _IOWR(KVFS_IOC_MAGIC, 3, struct kvfs_drop)
#define KVFS_IOC_EVICT _IOWR(KVFS_IOC_MAGIC, 4, struct kvfs_drop)

/* ---- Checking ---- */

/* Bytes that one call works off at most. */
#define KVFS_SCRUB_BYTES (8u << 20)

/*
 * Reads what the devices hold of a range of a file and compares the checksums; the file is named as
 * for COOL, by root or its owner, and neither opened nor used by that, nor does it come into DRAM.
 * Go on at offset + done while that is below size and damaged is 0. A file that fails is
 * quarantined, as by a read: its names are gone when the call returns.
 */
struct kvfs_scrub {
	__u64 offset;     /* in: bytes, a multiple of 1 MiB */
	__u32 flags;      /* in: KVFS_SCRUB_* */
	__u32 reserved;   /* in: 0 */
	__u64 size;       /* out: of the file */
	__u64 done;       /* out: bytes looked at from offset on; 0 at the end */
	__u64 checked;    /* out: those of them that a device holds, and that were read */
	__u64 unreadable; /* out: those of them that the device did not give */
	__u64 damaged;    /* out: 1: it fails its checksum */
	char name[KVFS_NAME_MAX + 1]; /* in: with a NUL */
};
#define KVFS_IOC_SCRUB _IOWR(KVFS_IOC_MAGIC, 5, struct kvfs_scrub)

/* Only ask for the size: reads nothing. */
#define KVFS_SCRUB_ASK 1u

/* ---- For GPU helpers ---- */

/*
 * What a GPU helper (kvgpud) is shown to have the file in device memory: that the kernel let this
 * process open it. Good as long as this open file description is; only for the user who asked last.
 * EBUSY: the file is being written, or was opened for writing. libkvg asks for it by itself.
 */
struct kvfs_ticket {
	__u8 token[16]; /* out: a secret */
	__u64 ino;      /* out */
	__u64 version;  /* out: of the file's content, as user.kvfs.version */
	__u64 size;     /* out: bytes */
	__u64 flags;    /* in: 0, or */
};

/* Only ino, version and size: of what this open file is. Makes no ticket, and ends none. */
#define KVFS_TICKET_LOOK 1u
#define KVFS_IOC_TICKET _IOWR(KVFS_IOC_MAGIC, 6, struct kvfs_ticket)

/* ---- Calls as needed ---- */

/* Packs names from FIRST on into LOOKUP. Returns how many it took; 0 with errno if the first is too
 * long, or empty. */
static inline size_t kvfs_lookup_pack(
	struct kvfs_lookup *lookup, const char *const *names, size_t first, size_t count)
{
	size_t used = 0, i;

	for (i = first; i < count; i++) {
		size_t length = strlen(names[i]);

		if (length == 0 || length > KVFS_NAME_MAX) {
			errno = length == 0 ? EINVAL : ENAMETOOLONG;
			break;
		}
		if (used + length + 1 > sizeof(lookup->u.names))
			break;
		memcpy(lookup->u.names + used, names[i], length + 1);
		used += length + 1;
	}
	lookup->count = (__u32)(i - first);
	lookup->length = (__u32)used;
	lookup->flags = lookup->reserved = lookup->leading = lookup->present = 0;
	return i - first;
}

/*
 * Asks for COUNT names in the directory of descriptor DIRECTORY. RET_BITMAP: (COUNT + 7) / 8 bytes
 * that say which are present, or NULL; FLAGS: KVFS_LOOKUP_STOP to end at the first absent one.
 * Returns how many from the first on are present, or -1 with errno. Needs 16 KiB of stack.
 */
static inline long kvfs_lookup_names(int directory, const char *const *names, size_t count,
	unsigned flags, unsigned char *ret_bitmap)
{
	struct kvfs_lookup lookup;
	size_t leading = 0, first = 0;

	if (ret_bitmap)
		memset(ret_bitmap, 0, (count + 7) / 8);
	while (first < count) {
		size_t i, taken = kvfs_lookup_pack(&lookup, names, first, count);

		lookup.flags = flags;
		if (taken == 0 || ioctl(directory, KVFS_IOC_LOOKUP, &lookup) < 0)
			return -1;
		for (i = 0; ret_bitmap && i < taken; i++)
			if (lookup.u.bitmap[i / 8] >> (i % 8) & 1)
				ret_bitmap[(first + i) / 8] |=
					(unsigned char)(1u << ((first + i) % 8));
		if (leading == first)
			leading += lookup.leading;
		first += taken;
		if ((flags & KVFS_LOOKUP_STOP) && leading < first)
			break;
	}
	return (long)leading;
}

#endif
