/* SPDX-License-Identifier: Apache-2.0 */
/* Backing files of FUSE passthrough: see passthrough.h. */

#include "fs/passthrough.h"

#include <errno.h>
#include <stdint.h>
#include <sys/ioctl.h>

/*
 * libfuse's own calls want a request and log every failure; eviction has no request. The system's
 * <linux/fuse.h> may be older than the feature (Debian 12), so the ABI is spelled out here.
 */
struct fuse_backing_map_abi {
	int32_t fd;
	uint32_t flags;
	uint64_t padding;
};
_Static_assert(sizeof(struct fuse_backing_map_abi) == 16, "kernel ABI");

#define FUSE_IOCTL_MAGIC 229
#define FUSE_IOCTL_BACKING_OPEN _IOW(FUSE_IOCTL_MAGIC, 1, struct fuse_backing_map_abi)
#define FUSE_IOCTL_BACKING_CLOSE _IOW(FUSE_IOCTL_MAGIC, 2, uint32_t)

int kv_passthrough_open(int session_fd, int fd)
{
	struct fuse_backing_map_abi map = {.fd = fd};
	int id = ioctl(session_fd, FUSE_IOCTL_BACKING_OPEN, &map);

	if (id < 0)
		return -errno;
	return id > 0 ? id : -EIO;
}

void kv_passthrough_close(int session_fd, int backing_id)
{
	uint32_t id = (uint32_t)backing_id;

	(void)ioctl(session_fd, FUSE_IOCTL_BACKING_CLOSE, &id);
}
