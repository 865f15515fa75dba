/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the fake driver share. All state is below one lock. */
#ifndef KVFS_TESTS_GPU_FAKE_INTERNAL_H
#define KVFS_TESTS_GPU_FAKE_INTERNAL_H

#include <bsd/sys/queue.h>
#include <pthread.h>
#include <sys/types.h>

#include "fs/base.h"
#include "gpu/cuda_driver.h"
#include "tests/gpu/fake/fakecu.h"

#define FAKE_API __attribute__((visibility("default")))
#define FAKE_DEVICES_MAX 16
#define FAKE_GRANULARITY (UINT64_C(2) << 20)

enum fake_clock {
	FAKE_CLOCK_VIRTUAL,
	FAKE_CLOCK_MANUAL,
	FAKE_CLOCK_REAL,
};

struct fake_config {
	int devices;
	bool mig;
	bool stub;
	bool cpu_access;
	bool early_copies;
	bool legacy;
	enum fake_clock clock;
	char name[64];
	char directory[256];
	char control[256];
	int version;
	uint64_t memory;
	uint64_t context_size;
	uint64_t register_max;
	uint64_t bandwidth[_FAKECU_DIRECTION_MAX]; /* bytes a second */
	uint64_t bandwidth_pageable;
	uint64_t gap_ns;
	uint64_t batch_gap_ns;
	uint64_t submit_ns;
	uint64_t kernel_ns;
	char wrong[64];
};

struct kvg_cu_ctx {
	int device;
	unsigned references;
	bool was_active;
};

struct fake_state {
	pthread_mutex_t lock;
	struct fake_config config;
	bool initialised;
	pid_t process;       /* that called cuInit: its children cannot use it */
	kvg_cu_result fatal; /* what every call returns once it is set */
	struct kvg_cu_ctx contexts[FAKE_DEVICES_MAX];
};

extern struct fake_state fake;

/* ---- control.c ---- */

/* Reads the environment, once. */
void fake_config_read(void);
/* What a call needs before it does anything. */
enum fake_need {
	FAKE_NOTHING,
	FAKE_INIT,
	FAKE_CONTEXT,
};
/* To be called below the lock: faults, initialisation, fatal errors, the current context. */
kvg_cu_result fake_enter(const char *symbol, enum fake_need need);
/* Makes CODE the result of all further calls if it is fatal. Returns CODE. */
kvg_cu_result fake_result(kvg_cu_result code);
bool fake_is_held(void);
void fake_faults_reset(void);
bool fake_is_hidden(const char *symbol);
int fake_attribute_override(int attribute, int value);

/* Takes the lock until the end of the function; returns from it if the call is not to go on. */
#define FAKE_ENTER(symbol, need)                                                                   \
	KV_LOCKED(&fake.lock);                                                                     \
	do {                                                                                       \
		kvg_cu_result result_ = fake_enter(symbol, need);                                  \
		if (result_ != KVG_CU_SUCCESS)                                                     \
			return result_;                                                            \
	} while (0)

/* The driver's functions, of the types that kvfs calls them by. */
#define FAKE_PROTOTYPE(field, symbol, version, required, parameters)                               \
	kvg_cu_result fake_##field parameters;
KVG_CUDA_SYMBOLS(FAKE_PROTOTYPE)
#undef FAKE_PROTOTYPE

/* ---- device.c ---- */

/* The calling thread's; NULL if there is none. */
kvg_cu_context fake_context_current(void);
void fake_contexts_reset(void);
unsigned fake_contexts_live(void);

/* ---- memory.c ---- */

/* Device memory: alive while a handle or a mapping of it is. */
struct fake_allocation {
	int fd;
	int device;
	uint64_t size;
	uint8_t *memory; /* mapped when a kernel first touches it; else NULL */
	unsigned references;
	bool exportable;
	bool rdma;
};

struct fake_mapping {
	uint64_t address;
	uint64_t size;
	uint64_t offset; /* in the allocation */
	struct fake_allocation *allocation;
	unsigned access; /* KVG_CU_ACCESS_* */
};

void fake_memory_reset(void);
void fake_memory_live(struct fakecu_live *live);
/* The mapping that ADDRESS is in, or NULL. */
struct fake_mapping *fake_mapping_find(uint64_t address);
/* Where a kernel finds SIZE bytes at ADDRESS, all in one mapping; NULL: it faults. */
uint8_t *fake_kernel_memory(uint64_t address, uint64_t size, bool write);
/* True if all of the range is mapped. */
bool fake_range_is_mapped(uint64_t address, uint64_t size, bool *ret_rdma);
/* True if the range touches addresses that are the device's. */
bool fake_is_device(uint64_t address);

/* ---- host.c ---- */

void fake_host_reset(void);
unsigned fake_host_live(void);
/* True if all of the range is registered. */
bool fake_host_is_pinned(uint64_t address, uint64_t size);

/* ---- kernel.c ---- */

struct fake_launch;

void fake_modules_reset(void);
unsigned fake_modules_live(void);
/* Runs it, and frees it; false if the device faults. */
bool fake_launch_run(struct fake_launch *launch);

/* ---- stream.c ---- */

/* Queues LAUNCH, which it takes. */
kvg_cu_result fake_launch_submit(kvg_cu_stream stream, struct fake_launch *launch);

void fake_streams_reset(void);
void fake_streams_live(struct fakecu_live *live);
/* The caller spends time. */
void fake_spend(uint64_t ns);
/* Does all that is queued, whatever the time. */
void fake_drain(void);

#endif
