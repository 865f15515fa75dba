/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether an index is consistent: names, inodes and links, chunk maps and references, bitmaps and
 * their counts, quota domains, the use order. For tests and for `kvfs check`.
 *
 * The live view is checked, with everything that is not committed. Operations wait meanwhile, and
 * the time is proportional to the index. Memory: two bits a block of the devices. Any thread.
 * Errors: negative errno.
 */
#ifndef KVFS_INDEX_CHECK_H
#define KVFS_INDEX_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct kv_index;

/* Something that is wrong, valid during the call that tells it. */
struct kv_violation {
	const char *text; /* a line */
	uint64_t ino;     /* the inode that it is about; 0: none */
	const char *path; /* its first name, from the root of the store; NULL: it has none */
	bool has_blocks;
	uint16_t device;
	uint64_t block; /* first of BLOCKS on the device */
	uint64_t blocks;
};

/* Who is told; TELL may be NULL, and must not call the index. */
struct kv_check_to {
	void (*tell)(void *arg, const struct kv_violation *violation);
	void *arg;
};

/* Returns how many violations there are, or an error. */
ssize_t kv_index_check_all(struct kv_index *index, const struct kv_check_to *to);
/* The same, with the lines alone. */
ssize_t kv_index_check(
	struct kv_index *index, void (*violation)(void *arg, const char *text), void *arg);

/*
 * Opens the index in PATH to be read alone: not a byte of it changes, and no damage but that of its
 * very head is refused. The caller keeps everybody else away. Its pages are checked first; what is
 * wrong with them, and with what an index keeps in memory, is told to TO and counted in
 * ret_violations. -EUCLEAN: too much for it to be read; -EPROTO: of another format, -ENOENT; then
 * one line for the user is in ret_error. kv_index_close closes it.
 */
int kv_index_inspect(const char *path, const struct kv_check_to *to, struct kv_index **ret_index,
	size_t *ret_violations, char *ret_error, size_t error_size);

#endif
