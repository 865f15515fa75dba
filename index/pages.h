/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pages of an LMDB file, checked without LMDB, which trusts what it reads: a page whose bytes
 * were changed behind its back can make it read or write anywhere.
 *
 * Nothing in the file is believed; it is read, never mapped or written. It must not change
 * meanwhile. Any thread. Memory: a bit a page. Errors: negative errno.
 *
 * What is known of the layout comes from the structures in mdb.c of LMDB 0.9 (MDB_page, MDB_meta,
 * MDB_db, MDB_node), for 64-bit little-endian machines.
 */
#ifndef KVFS_INDEX_PAGES_H
#define KVFS_INDEX_PAGES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct kv_pages {
	int fd; /* of data.mdb */
	/* Called for each thing that is wrong; may be NULL. */
	void (*damage)(void *arg, uint64_t page, const char *what);
	/*
	 * Called for the records of the last commit, ascending, that are on sound pages; may be
	 * NULL. What it is given is valid during the call. An error ends the check.
	 */
	int (*record)(
		void *arg, const void *key, size_t key_size, const void *value, size_t value_size);
	void *arg;
};

/* data.mdb of the index in PATH, for the check: a descriptor. */
int kv_pages_open(const char *path);
/* Returns how many things are wrong: with 0 LMDB can be let at the file. -EUCLEAN: it has no root
 * to begin at. */
ssize_t kv_pages_check(const struct kv_pages *pages);

#endif
