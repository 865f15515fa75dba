/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Workloads: seeded steps on a store on simulated disks, noted in a model.
 */
#ifndef KVFS_TESTS_CRASH_WORK_H
#define KVFS_TESTS_CRASH_WORK_H

#include "tests/crash/model.h"
#include "tests/crash/sim.h"

enum work_kind {
	WORK_STORE,
	WORK_REWRITE,
	WORK_RENAME,
	WORK_EVICT,
	WORK_CLONE,
	WORK_QUOTA,
	WORK_RETIRE,
	WORK_MIXED,
	_WORK_KIND_MAX,
};

struct work {
	struct sim *sim;
	struct unit *unit;
	struct model *model;
	uint64_t seed;
	enum work_kind kind;
	uint32_t file_number; /* of the whole run, for the bytes */
};

const char *work_name(enum work_kind kind);
/* The directories and the token of an empty store. */
void work_prepare(struct work *work);
void work_run(struct work *work, unsigned steps);

#endif
