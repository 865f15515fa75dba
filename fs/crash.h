/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Named places at which the tests let the daemon die (tests/crash/crash_point.c). Only the daemon
 * that is built there has them: elsewhere they are nothing.
 */
#ifndef KVFS_FS_CRASH_H
#define KVFS_FS_CRASH_H

#ifdef KV_CRASH_POINTS
/* Does not return the time it was told not to. Any thread. */
void kv_crash_point(const char *name);
#else
#define kv_crash_point(name) ((void)0)
#endif

#endif
