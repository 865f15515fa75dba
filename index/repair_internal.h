/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of a repair share. repair.c copies the records and writes the changes of a step,
 * repair_sort.c leaves out what does not fit together, repair_make.c counts and derives the rest.
 */
#ifndef KVFS_INDEX_REPAIR_INTERNAL_H
#define KVFS_INDEX_REPAIR_INTERNAL_H

#include <sys/stat.h>

#include "index/repair.h"
#include "index/tally.h"

struct kv_repair {
	const struct kv_index_repair *what;
	struct kv_index *index; /* the new one */
	struct kv_view view;
	struct kv_overlay changes;
	size_t changed; /* records in this step */
	struct kv_tally tally;
	/* Of the old index. */
	uint8_t store[KV_STORE_RECORD_MAX];
	size_t store_size;
	uint64_t next_ino;
	uint64_t last_ino;
	/* Made anew. */
	struct kv_domain_record domains[KV_DOMAINS_MAX];
	uint64_t inodes;
	uint64_t used;
};

typedef int kv_repair_record(
	struct kv_repair *repair, const struct kv_key *key, const struct kv_value *value);

/* ---- repair.c ---- */

/* One step: EACH for the records of TABLE, in repair->view. Returns 0 or an error. */
int kv_repair_each(struct kv_repair *repair, enum kv_table table, kv_repair_record *each);
/* Changes of a step, which the step does not see. */
int kv_repair_copy(
	struct kv_repair *repair, const struct kv_key *key, const void *value, size_t size);
int kv_repair_drop(struct kv_repair *repair, const struct kv_key *key);
int kv_repair_put_node(struct kv_repair *repair, const struct kv_index_node *node);
/* Leaves an inode out, and tells why. What belongs to it goes when the names are sorted. */
int kv_repair_drop_inode(struct kv_repair *repair, uint64_t ino, const char *why);
/* For kv_domain_padding; ARG is the repair. */
int kv_repair_put_padding(void *arg, const struct kv_key *key);
/* Writes what has gathered. */
int kv_repair_write(struct kv_repair *repair);

/* ---- repair_sort.c ---- */

/* Removes what nothing holds or what is not whole; leaves in the tally what the files hold. */
int kv_repair_sort(struct kv_repair *repair);
/* Takes the links from NODE that are none, and gives it another first one if it must have. */
int kv_repair_sort_links(struct kv_repair *repair, struct kv_index_node *node, uint32_t *ret_links);

/* ---- repair_make.c ---- */

/* Counts links, quotas and blocks, and writes the tables that follow from others. */
int kv_repair_make(struct kv_repair *repair);

#endif
