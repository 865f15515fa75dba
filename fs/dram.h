/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The DRAM tier: one object a file version, on a private, detached tmpfs with huge pages.
 *
 * An object is a file, opened by name when it is used and closed when it is idle, so an idle object
 * needs no descriptor. Where a tmpfs cannot be
 * mounted (no CAP_SYS_ADMIN) each object is a memfd instead, which keeps its descriptor; their
 * number is then bounded by RLIMIT_NOFILE.
 *
 * A tier whose mount somebody else holds as well outlives the process. What may be found there
 * again is marked, by its name (mark.c): a rename is done or not done, whenever the process dies.
 *
 * Memory is accounted in bytes against the budget before it is touched: kv_dram_charge, then
 * kv_object_allocate. When the budget is short, kv_dram_charge asks the reclaimer (set by the owner
 * of the tier) to drop idle objects, least recently used first. Pages are always allocated by the
 * daemon (fallocate), so that they are charged to the daemon's memory cgroup and never to an
 * engine's. An object that was ever passed through must never be punched or truncated (its mappings
 * may outlive every descriptor): only freed. Its pages may then live on in a client's mapping
 * ("zombies"): kv_dram_usage sees them through the tmpfs's own count.
 *
 * Threads: any. The tier's lock is a leaf. Errors: negative errno.
 */
#ifndef KVFS_FS_DRAM_H
#define KVFS_FS_DRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fs/base.h"

struct kv_dram;
struct kv_object;

struct kv_dram_options {
	uint64_t budget_bytes;
	bool force_memfd; /* tests: behave as without CAP_SYS_ADMIN */
	bool shared;      /* the tier is MOUNT_FD, which kv_dram_free will close */
	int mount_fd;     /* of kv_dram_mount */
	/*
	 * Called without locks when BYTES are wanted beyond the budget: drops idle objects. Returns
	 * the bytes it freed, 0 when nothing can be dropped now.
	 */
	uint64_t (*reclaim)(void *arg, uint64_t bytes);
	void *reclaim_arg;
};

struct kv_dram_usage {
	uint64_t budget;  /* bytes */
	uint64_t charged; /* bytes promised or allocated */
	uint64_t zombie;  /* bytes of freed objects that client mappings keep alive */
	uint64_t objects;
	bool tmpfs; /* false: memfds */
	bool huge;  /* huge pages are in use */
};

/* A mount for a tier of that budget, to be held beyond the life of a process. Its descriptor. */
int kv_dram_mount(uint64_t budget_bytes);

/* On failure one line in ret_error: at least KV_DRAM_MIN bytes are needed. */
#define KV_DRAM_MIN (UINT64_C(16) << 20)
int kv_dram_new(const struct kv_dram_options *options, struct kv_dram **ret_dram, char *ret_error,
	size_t error_size);
/* All objects must be freed. NULL is allowed. Returns NULL. */
struct kv_dram *kv_dram_free(struct kv_dram *dram);
void kv_dram_usage(struct kv_dram *dram, struct kv_dram_usage *ret_usage);

/*
 * Takes BYTES of the budget. Reclaims when it is short; then waits up to WAIT_MS for others to give
 * back. -EAGAIN if it stays short; -E2BIG if BYTES exceed the whole budget.
 */
int kv_dram_charge(struct kv_dram *dram, uint64_t bytes, unsigned wait_ms);
void kv_dram_uncharge(struct kv_dram *dram, uint64_t bytes);
/* The same as kv_dram_charge for pages that are there already. -EAGAIN: the budget is smaller. */
int kv_dram_charge_found(struct kv_dram *dram, uint64_t bytes);

/* A new, empty object. Its name must not be in use. */
int kv_object_new(
	struct kv_dram *dram, uint64_t ino, uint64_t serial, struct kv_object **ret_object);

/*
 * What another process may make of an object, once this one is gone. WHOLE: all of VERSION is
 * there. SUM tells that content from any other, for version numbers may come again. PART: what is
 * there may be of VERSION. NONE: it is removed.
 */
enum kv_mark_kind {
	KV_MARK_NONE,
	KV_MARK_PART,
	KV_MARK_WHOLE,
};
struct kv_mark {
	uint64_t ino;
	uint64_t serial;
	enum kv_mark_kind kind;
	uint64_t version; /* PART and WHOLE */
	uint64_t sum;     /* WHOLE */
};
/* Kind, version and sum are taken from MARK. Nothing happens in a tier that is not shared. What is
 * whole must not be changed before it has another mark: on failure not at all. */
int kv_object_mark(struct kv_object *object, const struct kv_mark *mark);
/* The marks that an earlier process has left, for the caller to free. Removes all else, but for
 * objects without a mark that KEEP wants; before the first object is made. */
int kv_dram_found(struct kv_dram *dram, bool (*keep)(void *arg, const struct kv_mark *mark),
	void *arg, struct kv_mark **ret_marks, size_t *ret_count);
/* Makes the object of MARK again, with its size and the bytes of memory that it has. */
struct kv_found {
	struct kv_object *object;
	uint64_t size;
	uint64_t allocated;
};
int kv_object_find(struct kv_dram *dram, const struct kv_mark *mark, struct kv_found *ret_found);

/* Unlinks and closes; charges are the caller's to give back. NULL is allowed. Returns NULL. */
struct kv_object *kv_object_free(struct kv_object *object);

/*
 * Borrows a descriptor (O_RDWR | O_CLOEXEC) until the matching kv_object_put; the last put of a
 * tmpfs object closes it, after a short cache of recently used ones. Returns the descriptor or a
 * negative errno.
 */
int kv_object_get(struct kv_object *object);
void kv_object_put(struct kv_object *object);

/* Sets the size: readers of a passed-through object see EOF there. Growing leaves holes. */
int kv_object_resize(struct kv_object *object, uint64_t size);
/*
 * Allocates pages for the bytes [OFFSET, OFFSET + LENGTH): huge pages where the range allows. Does
 * not change the size. Content of new pages is zero. Whole aligned 2 MiB of one call become huge
 * pages on new kernels whatever the size (Linux 6.18: yes; before 6.14 only inside the size).
 * Inside the size a smaller call takes its whole 2 MiB, too.
 */
int kv_object_allocate(struct kv_object *object, uint64_t offset, uint64_t length);
/*
 * The same, never with huge pages: takes the blocks that are asked for, and no more. They lie
 * inside the size. On failure some of them may be there.
 */
int kv_object_allocate_small(struct kv_object *object, uint64_t offset, uint64_t length);
/* Frees the pages of whole blocks in the range; they read as zero. */
int kv_object_punch(struct kv_object *object, uint64_t offset, uint64_t length);
/* True if there is content on all of the range: pages that were only allocated have none. */
bool kv_object_has(struct kv_object *object, uint64_t offset, uint64_t length);
/* True if there is none. */
bool kv_object_is_empty(struct kv_object *object, uint64_t offset, uint64_t length);
/* Whole-length transfers (no short results). Reading behind the end gives zeros. */
int kv_object_read(struct kv_object *object, void *ret_memory, size_t length, uint64_t offset);
int kv_object_write(struct kv_object *object, const void *memory, size_t length, uint64_t offset);
/* Copies between objects in the kernel or through a bounded buffer. */
int kv_object_copy(struct kv_object *to, uint64_t to_offset, struct kv_object *from,
	uint64_t from_offset, size_t length);
/*
 * Maps [OFFSET, OFFSET + LENGTH) (multiples of KV_BLOCK_SIZE) shared, writable: for device I/O into
 * and out of the object's own pages. The range must be allocated and inside the size rounded up to
 * a block. Unmap with kv_object_unmap.
 */
int kv_object_map(struct kv_object *object, uint64_t offset, size_t length, void **ret_memory);
void kv_object_unmap(void *memory, size_t length);
/* Makes the pages of a mapping ready for what will be written there. */
void kv_object_touch(void *memory, size_t length);

#endif
