/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The DRAM tier's budget and its private tmpfs.
 *
 * huge=within_size, because that alone serves both ends: measured on Linux 6.18, an allocation of
 * 4 KiB costs 4 KiB (huge=always takes 2 MiB for it), and whole aligned 2 MiB inside the size,
 * or inside one allocation, are huge pages at once. A small allocation inside a large size
 * takes its whole 2 MiB too. That excess shows as zombies, so that it shrinks the budget where the
 * slack does not cover it, and a mount that fills up all the same is enlarged for a while.
 */
#include "fs/dram.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/mount.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fs/dram_internal.h"
#include "fs/wait.h"

#define HUGE_PAGE_SIZE (UINT64_C(2) << 20)
#define SLACK_MIN (UINT64_C(64) << 20)
/* Descriptors that the rest of the daemon needs. */
#define DESCRIPTORS_RESERVED 256u
#define IDLE_DESCRIPTORS_MAX 1024u
/* Zombies vanish without a signal: a waiter looks again that often. */
#define WAIT_SLICE_MS 50
/* Others may take what the reclaimer freed; do not run after it for ever. */
#define RECLAIM_ROUNDS_MAX 1000
/* The tmpfs never gets larger than that many times its normal size. */
#define SIZE_FACTOR_MAX 2

/* Bytes of the tmpfs beyond the budget. */
static uint64_t slack_of(uint64_t budget)
{
	return budget / 8 + SLACK_MIN;
}

static int set_option(int fs_fd, const char *key, const char *value)
{
	unsigned command = value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG;

	return syscall(SYS_fsconfig, fs_fd, command, key, value, 0) < 0 ? -errno : 0;
}

/* Mounts a tmpfs of SIZE bytes that has no place in any tree. Returns the mount's descriptor. */
static int mount_tmpfs(uint64_t size)
{
	_cleanup_fd_ int fs_fd = (int)syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC);
	char text[32];
	int r, mount_fd;

	if (fs_fd < 0)
		return -errno;
	(void)snprintf(text, sizeof(text), "%" PRIu64, size);
	r = set_option(fs_fd, "size", text);
	if (r == 0)
		r = set_option(fs_fd, "nr_inodes", "0");
	if (r == 0)
		r = set_option(fs_fd, "mode", "0700");
	if (r < 0)
		return r;
	/* Kernels without huge pages, or before 6.4 (noswap), work as well without. */
	(void)set_option(fs_fd, "huge", "within_size");
	(void)set_option(fs_fd, "noswap", NULL);
	if (syscall(SYS_fsconfig, fs_fd, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		return -errno;
	mount_fd = (int)syscall(SYS_fsmount, fs_fd, FSMOUNT_CLOEXEC,
		MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
	return mount_fd < 0 ? -errno : mount_fd;
}

int kv_dram_mount(uint64_t budget_bytes)
{
	return mount_tmpfs(budget_bytes + slack_of(budget_bytes));
}

static int resize_tmpfs(int mount_fd, uint64_t size)
{
	_cleanup_fd_ int fs_fd =
		(int)syscall(SYS_fspick, mount_fd, "", FSPICK_EMPTY_PATH | FSPICK_CLOEXEC);
	char text[32];
	int r;

	if (fs_fd < 0)
		return -errno;
	(void)snprintf(text, sizeof(text), "%" PRIu64, size);
	r = set_option(fs_fd, "size", text);
	if (r < 0)
		return r;
	return syscall(SYS_fsconfig, fs_fd, FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0) < 0 ? -errno
											 : 0;
}

/* The daemon before may have enlarged it, and there may be more on it than its normal size. */
static void take_mount(struct kv_dram *dram)
{
	struct statfs st;

	dram->mount_fd = dram->options.mount_fd;
	if (resize_tmpfs(dram->mount_fd, dram->size) < 0 && fstatfs(dram->mount_fd, &st) == 0)
		dram->size = (uint64_t)st.f_blocks * (uint64_t)st.f_bsize;
}

/* Whether huge pages come, by asking for one: the switches in /sys may forbid what mount took. */
static bool probe_huge(int mount_fd)
{
	static const char name[] = "probe";
	/* It may be there from a process that ended in here. */
	_cleanup_fd_ int fd =
		openat(mount_fd, name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	struct stat st;
	bool huge;

	if (fd < 0)
		return false;
	huge = ftruncate(fd, (off_t)HUGE_PAGE_SIZE) == 0 &&
	       fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, KV_BLOCK_SIZE) == 0 && fstat(fd, &st) == 0 &&
	       (uint64_t)st.st_blocks * 512 >= HUGE_PAGE_SIZE;
	(void)unlinkat(mount_fd, name, 0);
	return huge;
}

/* Descriptors this process may open, after raising the soft limit to the hard one. */
static unsigned descriptors_max(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return 1024;
	if (limit.rlim_cur < limit.rlim_max) {
		rlim_t soft = limit.rlim_cur;

		limit.rlim_cur = limit.rlim_max;
		if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
			limit.rlim_cur = soft;
	}
	return (unsigned)kv_min_u64(limit.rlim_cur, UINT32_MAX);
}

static int init_lock(struct kv_dram *dram)
{
	pthread_condattr_t attributes;
	int r = pthread_condattr_init(&attributes);

	if (r != 0)
		return -r;
	r = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	if (r == 0)
		r = pthread_cond_init(&dram->given_back, &attributes);
	(void)pthread_condattr_destroy(&attributes);
	if (r != 0)
		return -r;
	return -pthread_mutex_init(&dram->lock, NULL);
}

int kv_dram_new(const struct kv_dram_options *options, struct kv_dram **ret_dram, char *ret_error,
	size_t error_size)
{
	_cleanup_free_ struct kv_dram *dram = NULL;
	unsigned descriptors;
	int r;

	if (options->budget_bytes < KV_DRAM_MIN) {
		(void)snprintf(ret_error, error_size,
			"the DRAM tier needs at least 16M; give it more with dram=SIZE");
		return -EINVAL;
	}
	dram = calloc(1, sizeof(*dram));
	r = dram ? init_lock(dram) : -ENOMEM;
	if (r < 0) {
		(void)snprintf(
			ret_error, error_size, "the DRAM tier cannot start: %s", strerror(-r));
		return r;
	}
	dram->options = *options;
	dram->slack = slack_of(options->budget_bytes);
	dram->size_normal = options->budget_bytes + dram->slack;
	dram->size = dram->size_normal;
	TAILQ_INIT(&dram->idle_objects);
	descriptors = descriptors_max();
	dram->idle_max = (unsigned)kv_min_u64(IDLE_DESCRIPTORS_MAX, descriptors / 4);
	dram->objects_max = descriptors > 2 * DESCRIPTORS_RESERVED
				    ? descriptors - DESCRIPTORS_RESERVED
				    : descriptors / 2;
	dram->mount_fd = -1;
	if (options->shared)
		take_mount(dram);
	else if (!options->force_memfd)
		dram->mount_fd = mount_tmpfs(dram->size);
	if (dram->mount_fd < 0)
		dram->mount_fd = -1;
	else
		dram->huge = probe_huge(dram->mount_fd);
	*ret_dram = kv_steal_ptr(&dram);
	return 0;
}

struct kv_dram *kv_dram_free(struct kv_dram *dram)
{
	if (!dram)
		return NULL;
	assert(dram->objects == 0);
	assert(dram->waiters == 0);
	if (dram->mount_fd >= 0)
		(void)close(dram->mount_fd);
	(void)pthread_cond_destroy(&dram->given_back);
	(void)pthread_mutex_destroy(&dram->lock);
	free(dram);
	return NULL;
}

/* Bytes of memory in the tmpfs; 0 on memfds. */
static uint64_t used_bytes(const struct kv_dram *dram)
{
	struct statfs st;

	if (dram->mount_fd < 0 || fstatfs(dram->mount_fd, &st) < 0)
		return 0;
	return (uint64_t)(st.f_blocks - st.f_bfree) * (uint64_t)st.f_bsize;
}

/*
 * Bytes of the tmpfs that nobody is charged for. Low by what is charged but not allocated yet,
 * high by huge pages that are used in part: good enough to keep the mount from filling up.
 */
static uint64_t zombie_bytes(const struct kv_dram *dram)
{
	uint64_t used = used_bytes(dram);

	return used > dram->charged ? used - dram->charged : 0;
}

void kv_dram_usage(struct kv_dram *dram, struct kv_dram_usage *ret_usage)
{
	KV_LOCKED(&dram->lock);

	*ret_usage = (struct kv_dram_usage){
		.budget = dram->options.budget_bytes,
		.charged = dram->charged,
		.zombie = zombie_bytes(dram),
		.objects = dram->objects,
		.tmpfs = dram->mount_fd >= 0,
		.huge = dram->huge,
	};
}

/*
 * Bytes that must be given back before BYTES more fit; 0 if they fit now. Zombies beyond the
 * slack shrink the budget: the tmpfs would answer ENOSPC otherwise.
 */
static uint64_t shortage(const struct kv_dram *dram, uint64_t bytes)
{
	uint64_t zombie = zombie_bytes(dram);
	uint64_t taken = dram->charged + (zombie > dram->slack ? zombie - dram->slack : 0);
	uint64_t wanted = taken + bytes;

	return wanted > dram->options.budget_bytes ? wanted - dram->options.budget_bytes : 0;
}

/* Waits for somebody to give back, at most until DEADLINE. Holds the lock before and after. */
static void wait_given_back(struct kv_dram *dram, int64_t deadline_ms)
{
	int64_t until = kv_monotonic_ms() + WAIT_SLICE_MS;
	struct timespec time;

	if (until > deadline_ms)
		until = deadline_ms;
	time.tv_sec = until / 1000;
	time.tv_nsec = until % 1000 * 1000000;
	dram->waiters++;
	kv_wait_begins();
	(void)pthread_cond_timedwait(&dram->given_back, &dram->lock, &time);
	dram->waiters--;
}

/* One look at the budget. Returns 0 when BYTES were taken, else what is missing. */
static uint64_t try_charge(struct kv_dram *dram, uint64_t bytes)
{
	uint64_t missing = shortage(dram, bytes);

	if (missing == 0)
		dram->charged += bytes;
	return missing;
}

int kv_dram_charge(struct kv_dram *dram, uint64_t bytes, unsigned wait_ms)
{
	int64_t deadline_ms = kv_monotonic_ms() + wait_ms;

	if (bytes > dram->options.budget_bytes)
		return -E2BIG;
	for (unsigned round = 0; round < RECLAIM_ROUNDS_MAX; round++) {
		uint64_t missing, freed = 0;

		{
			KV_LOCKED(&dram->lock);
			missing = try_charge(dram, bytes);
		}
		if (missing == 0)
			return 0;
		if (dram->options.reclaim)
			freed = dram->options.reclaim(dram->options.reclaim_arg, missing);
		if (freed > 0)
			continue;
		if (kv_monotonic_ms() >= deadline_ms)
			return -EAGAIN;
		KV_LOCKED(&dram->lock);
		/* What was given back since the look above has signalled nobody. */
		if (try_charge(dram, bytes) == 0)
			return 0;
		wait_given_back(dram, deadline_ms);
	}
	return -EAGAIN;
}

int kv_dram_charge_found(struct kv_dram *dram, uint64_t bytes)
{
	KV_LOCKED(&dram->lock);

	/* Until now they counted as zombies. */
	if (bytes > dram->options.budget_bytes - dram->charged)
		return -EAGAIN;
	dram->charged += bytes;
	return 0;
}

void kv_dram_uncharge(struct kv_dram *dram, uint64_t bytes)
{
	KV_LOCKED(&dram->lock);

	assert(bytes <= dram->charged);
	dram->charged -= bytes;
	if (dram->waiters > 0)
		(void)pthread_cond_broadcast(&dram->given_back);
	if (dram->size > dram->size_normal && used_bytes(dram) <= dram->options.budget_bytes &&
		resize_tmpfs(dram->mount_fd, dram->size_normal) == 0)
		dram->size = dram->size_normal;
}

bool kv_dram_make_room(struct kv_dram *dram)
{
	KV_LOCKED(&dram->lock);
	uint64_t size = kv_min_u64(dram->size + dram->slack, dram->size_normal * SIZE_FACTOR_MAX);

	if (dram->mount_fd < 0 || size == dram->size || resize_tmpfs(dram->mount_fd, size) < 0)
		return false;
	dram->size = size;
	return true;
}
