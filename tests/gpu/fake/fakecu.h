/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for NVIDIA's driver, for tests on machines without a GPU: libcuda.so.1 with the calls
 * that kvfs uses, checked as strictly as the driver checks them or more so.
 *
 * What is real: device memory is a memfd, so exported descriptors travel between processes, keep
 * the memory while anybody holds it, and survive their maker. What is modelled: the link. Copies
 * cost time on a virtual clock, and their bytes move when that time has come, not before. Nobody
 * sleeps. The CPU cannot touch device memory through its address, as with a real device.
 *
 * Environment, read by the first cuGetProcAddress, and by fakecu_reset:
 *   FAKECU_DEVICES=1        how many; FAKECU_MIG=1: each is a MIG instance
 *   FAKECU_NAME             name of the devices
 *   FAKECU_VERSION=12080    CUDA of the driver; symbols newer than it are not found
 *   FAKECU_HIDE=a,b         symbols that are not found; FAKECU_STUB=1: be the toolkit's stub
 *   FAKECU_ATTR=102=0,110=0 device attributes
 *   FAKECU_MEMORY=8589934592, FAKECU_CONTEXT=536870912   bytes of a device, and what a context
 * takes FAKECU_DIR              folder on tmpfs: then processes share the devices' memory, and
 *                           cuMemGetInfo counts what is alive in any of them
 *   FAKECU_LEGACY=1         pointers are said to be of cuMemAlloc, not of the virtual memory calls
 *   FAKECU_WRONG=name       kernel whose first store in each block comes out wrong
 *   FAKECU_KERNEL_NS=5000   a kernel takes
 *   FAKECU_CPU=1            the CPU can touch device memory, as the mapping's access says
 *   FAKECU_FAIL=cuMemCreate:3:2,cuMemMap:1+:999,*:7:2    the Nth call of a name, or each from the
 *                           Nth on, or the Nth call of all, fails with that code; a code that is
 *                           fatal stays (FAKECU_FAIL=cuStreamSynchronize:1:700)
 *   FAKECU_CONTROL          a file, looked at in each call. Its lines: `fail NAME:NTH:CODE`
 * (counted from then on), `hold` (no copy completes while the line is there) FAKECU_CLOCK=virtual
 * virtual: whoever polls or waits in vain moves the clock to the next completion; manual: only
 * fakecu_advance and waiting do; real: it is the machine's clock FAKECU_COPY=late        late:
 * bytes move when the copy is done; early: in the call FAKECU_BW=55600000000, FAKECU_BW_D2H,
 * FAKECU_BW_D2D, FAKECU_BW_PAGEABLE   bytes a second FAKECU_GAP_NS=2000      between copies of one
 * stream; other streams fill it FAKECU_BATCH_GAP_NS=300 between copies of one batch; nobody fills
 * it FAKECU_SUBMIT_NS=2300   of the caller's time, a call FAKECU_REGISTER_MAX=549755813888   bytes:
 * one registration of that much fails FAKECU_REPORT           file to append the report to; without
 * it only leaks are told, to stderr
 *
 * The functions below are for tests that run in the same process; they may be called at any time.
 */
#ifndef KVFS_TESTS_GPU_FAKE_FAKECU_H
#define KVFS_TESTS_GPU_FAKE_FAKECU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What is alive in this process. */
struct fakecu_live {
	unsigned handles;      /* cuMemCreate, cuMemImport..., not released */
	unsigned allocations;  /* device memory that this process keeps alive */
	unsigned reservations; /* of addresses */
	unsigned mappings;
	unsigned registrations; /* of host memory */
	unsigned streams;
	unsigned events;
	unsigned contexts; /* references to primary contexts */
	unsigned modules;
};

/* What copies have cost so far. */
struct fakecu_traffic {
	uint64_t copies;
	uint64_t bytes;
	uint64_t busy_ns; /* the link was moving bytes */
};

enum fakecu_direction {
	FAKECU_TO_DEVICE,
	FAKECU_TO_HOST,
	FAKECU_ON_DEVICE,
	_FAKECU_DIRECTION_MAX,
};

/* Forgets faults, counts, errors, the clock and what is alive, and reads the environment anew. */
void fakecu_reset(void);
/* The NTH call of NAME from now on (REPEAT: and all later ones) fails with CODE. */
void fakecu_fail(const char *name, unsigned nth, bool repeat, unsigned code);
/* Takes all faults back. */
void fakecu_heal(void);
/* Counts a call of NAME and returns the code it is to fail with, or 0: for the fake libcufile. */
unsigned fakecu_fault(const char *name);
/* Calls of NAME so far; of "*": all. */
unsigned fakecu_calls(const char *name);
/* Copies complete no more, until it is taken back. */
void fakecu_hold(bool hold);
bool fakecu_is_held(void);
/* Nanoseconds of the virtual clock. */
uint64_t fakecu_now(void);
/* Moves the clock on, and what is due with it. */
void fakecu_advance(uint64_t ns);
/* When the next copy is done; UINT64_MAX: none is under way. */
uint64_t fakecu_next(void);
void fakecu_live(struct fakecu_live *ret_live);
void fakecu_traffic(enum fakecu_direction direction, struct fakecu_traffic *ret_traffic);
/* True if [ADDRESS, ADDRESS + SIZE) is mapped; ret_rdma: and made fit for reads by other devices.
 */
bool fakecu_is_mapped(uint64_t address, uint64_t size, bool *ret_rdma);

#endif
