/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which of a machine's memory nodes a device is near to, and work there: what passes from one node
 * to another on its way to a GPU comes at a fraction of the link's speed.
 *
 * All of it is best effort: a machine that does not tell, or a container that may not, goes on as
 * without. SYSFS: NULL for /sys; tests have their own. Threads: any.
 */
#ifndef KVFS_GPU_NUMA_H
#define KVFS_GPU_NUMA_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>

/* The node of the PCI device BUS_ID ("0000:3B:00.0", as drivers print it); -1: it is near to none.
 */
int kvg_numa_node(const char *sysfs, const char *bus_id);
/* The memory comes from NODE when it is touched first. -1: from anywhere. */
void kvg_numa_bind(void *memory, size_t size, int node);
/*
 * The calling thread, and those that it makes, run on NODE's CPUs only, of which it must be allowed
 * some. True: it was somewhere else, until kvg_numa_leave.
 */
bool kvg_numa_enter(const char *sysfs, int node, cpu_set_t *ret_before);
void kvg_numa_leave(const cpu_set_t *before);

#endif
