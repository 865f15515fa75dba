/* SPDX-License-Identifier: Apache-2.0 */
/* Unsettled versions, for the files of the core: see unsettled.h and unsettled.c. */
#ifndef KVFS_FS_UNSETTLED_INTERNAL_H
#define KVFS_FS_UNSETTLED_INTERNAL_H

#include <stddef.h>

#include "fs/dram.h"
#include "fs/unsettled.h"

struct kv_core;
struct kv_remains;
struct kv_version;

struct kv_left {
	struct kv_unsettled_notes *notes; /* or NULL */
	struct kv_remains *remains;       /* until kv_core_go_on */
	size_t count;
};

/* FOUND's object, SIZE bytes of it, becomes that of VERSION, which has nothing yet: all of it is
 * dirty. */
int kv_version_attach(struct kv_version *version, struct kv_found *found, uint64_t size);
/* A note begins with VERSION and ends when it is settled or given up. Lock held, but for _begin. */
void kv_unsettled_begin(struct kv_version *version);
void kv_unsettled_end(struct kv_version *version);
/* Its size, times or number have changed. */
void kv_unsettled_changed(struct kv_version *version);
/* It has got an object, of that name. */
void kv_unsettled_object(struct kv_version *version, uint64_t serial);
/* Its object has not all of it any more. */
void kv_unsettled_lose(struct kv_version *version);
/* Looks what an earlier process has left, before kv_dram_found. */
int kv_unsettled_find(struct kv_core *core);
bool kv_unsettled_has(void *core, const struct kv_mark *mark);
void kv_unsettled_go_on(struct kv_core *core);

#endif
