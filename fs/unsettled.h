/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Versions that are being written, or published and not committed: a note of each in memory that
 * outlives the process, so that another one can go on with them. Their bytes are in their objects,
 * which outlive it, too.
 *
 * A note says of which file, which object, how long, and since when; not which blocks are there:
 * what an object has no bytes of reads as zeros, as does what was never written. So a version can
 * only be gone on with where its object has all that is not zeros: not if a part of it lies on the
 * devices alone, or in the version that it changes, nor if a write to it has failed.
 */
#ifndef KVFS_FS_UNSETTLED_H
#define KVFS_FS_UNSETTLED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define KV_UNSETTLED_MAX 65536u

/* Changed under the version's lock; ID is written last and cleared first, 0: free. */
struct kv_unsettled {
	_Atomic uint64_t id;
	_Atomic uint64_t ino;
	_Atomic uint64_t serial; /* of the object; 0: there is none yet */
	_Atomic uint64_t number; /* 0: it is being written */
	_Atomic uint64_t size;
	_Atomic int64_t mtime_ns;
	_Atomic int64_t ctime_ns;
	_Atomic bool lost;
	_Atomic bool changed;
};

/* Zeros at first. Those beyond the maximum have no note, and are lost with the process. */
struct kv_unsettled_notes {
	_Atomic uint64_t last; /* id */
	struct kv_unsettled notes[KV_UNSETTLED_MAX];
};

#endif
