/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvgbench: what one device and its driver can do, one question each, through the same table of
 * functions as the GPU helper. A question prints lines `NAME VALUE UNIT`; it is answered when it
 * returns 0, and says why not on stderr otherwise.
 *
 * On a modelled driver (the tests') time is the model's: the lines then say what the model says,
 * and the first of them that it is one.
 */
#ifndef KVFS_TOOLS_BENCH_KVGBENCH_H
#define KVFS_TOOLS_BENCH_KVGBENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu/backend.h"

#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

struct kvgbench {
	const struct kvg_backend_ops *ops;
	struct kvg_backend *backend;
	struct kvg_device_info info;
	bool quick;       /* a 64th of the bytes, fewer cases */
	bool model_clock; /* time is the modelled driver's */
	double peak;      /* bytes a second to the device, once it was measured; else 0 */
	const char *file; /* for the question `direct` */
	const char *program;
	const char *device;
};

/* Device memory in one segment, mapped for writing, and host memory that copies go from and to. */
struct kvgbench_memory {
	struct kvg_segment *segment;
	struct kvg_mapping *mapping;
	kvg_devptr address;
	uint64_t device_size;
	uint8_t *host; /* registered */
	uint64_t host_size;
};

/* ---- kvgbench.c ---- */

/* Seconds, on whichever clock counts. */
double kvgbench_now(const struct kvgbench *bench);
/* SIZE, or a 64th of it, in whole granules. */
uint64_t kvgbench_size(const struct kvgbench *bench, uint64_t size);
int kvgbench_memory_get(struct kvgbench *bench, uint64_t device_size, uint64_t host_size,
	struct kvgbench_memory *ret_memory);
void kvgbench_memory_put(struct kvgbench *bench, struct kvgbench_memory *memory);
/* Prints a result. */
void kvgbench_say(double value, const char *unit, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
/* One line on stderr. Returns R. */
int kvgbench_fail(int r, const char *what);
/* Opens and closes the device. */
int kvgbench_open(struct kvgbench *bench, const char *backend);
void kvgbench_close(struct kvgbench *bench);

/* ---- The questions ---- */

int kvgbench_peak(struct kvgbench *bench);
int kvgbench_ring(struct kvgbench *bench);
int kvgbench_runs(struct kvgbench *bench);
int kvgbench_inside(struct kvgbench *bench);
int kvgbench_checksum(struct kvgbench *bench);
int kvgbench_register(struct kvgbench *bench);
int kvgbench_segments(struct kvgbench *bench);
int kvgbench_share(struct kvgbench *bench);
int kvgbench_context(struct kvgbench *bench);
int kvgbench_direct(struct kvgbench *bench);

/* What another process of this program does for share and context: ROLE, with socket 3. */
int kvgbench_child(struct kvgbench *bench, const char *role);

#endif
