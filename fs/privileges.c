/* SPDX-License-Identifier: Apache-2.0 */
/* Privileges and limits: see privileges.h. */

#include "fs/privileges.h"

#include <errno.h>
#include <linux/capability.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * Of what is there at the start, this stays:
 *   SYS_ADMIN     passthrough registers each object's file; the tier's size changes; umount
 *   DAC_OVERRIDE  stores and mount points that belong to another user
 *   SYS_PTRACE    how writers of other users end
 *   SYS_RESOURCE, IPC_LOCK  descriptors and registered buffers beyond the limits
 */
static const unsigned kept[] = {
	CAP_SYS_ADMIN, CAP_DAC_OVERRIDE, CAP_SYS_PTRACE, CAP_SYS_RESOURCE, CAP_IPC_LOCK};

static bool is_kept(unsigned capability)
{
	for (unsigned i = 0; i < sizeof(kept) / sizeof(kept[0]); i++)
		if (kept[i] == capability)
			return true;
	return false;
}

/* The kernel's wrapper is in libcap; two words a set are all there is to it. */
static int cut_sets(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];

	if (syscall(SYS_capget, &header, sets) < 0)
		return -errno;
	for (unsigned i = 0; i < _LINUX_CAPABILITY_U32S_3 * 32; i++) {
		struct __user_cap_data_struct *set = &sets[i / 32];
		uint32_t bit = UINT32_C(1) << i % 32;

		if (!is_kept(i)) {
			set->effective &= ~bit;
			set->permitted &= ~bit;
		}
		set->inheritable &= ~bit;
	}
	return syscall(SYS_capset, &header, sets) < 0 ? -errno : 0;
}

int kv_privileges_drop(void)
{
	(void)prctl(PR_SET_DUMPABLE, 0);
	/* An ordinary user's mount ends through fusermount3, which needs its set-user-ID bit. */
	if (geteuid() == 0) {
		if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
			return -errno;
		/* Fails at the first number that the kernel does not know, or without SETPCAP. */
		for (unsigned i = 0; prctl(PR_CAPBSET_READ, i) >= 0; i++)
			if (!is_kept(i))
				(void)prctl(PR_CAPBSET_DROP, i);
		(void)prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	}
	return cut_sets();
}

void kv_raise_file_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return;
	limit.rlim_cur = limit.rlim_max;
	(void)setrlimit(RLIMIT_NOFILE, &limit);
}
