/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ioctls, as any user may call them. Input: command (4 bytes), what the descriptor is of and
 * which inode (1), user (1), bytes more or less than the command says (1), argument.
 */
#include <stdlib.h>

#include "fs/handle.h"
#include "fs/kvfs_ioctl.h"
#include "fs/lookup.h"
#include "fs/ops.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/stand_in.h"

#define HEAD 7u

/* Its own target is fuzz_lookup. */
int kv_lookup_names(struct kv_core *core, uint64_t parent, const struct kvfs_lookup *request,
	struct kvfs_lookup *ret_answer, size_t *ret_size)
{
	(void)core;
	(void)parent;
	memcpy(ret_answer, request, sizeof(*ret_answer));
	*ret_size = sizeof(*ret_answer);
	return request->flags ? -EINVAL : 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fuse_lowlevel_ops ops = {0};
	struct kv_handle handle = {0};
	struct fuse_file_info fi = {.fh = (uintptr_t)&handle};
	unsigned command;
	uint8_t *in;
	size_t in_size;

	if (size < HEAD)
		return 0;
	memcpy(&command, data, sizeof(command));
	/* The kernel hands on as much as the number says (fs/fuse/ioctl.c). */
	in_size = _IOC_SIZE(command) + (data[6] % 3 == 2 ? data[6] : 0);
	in = calloc(1, in_size > 0 ? in_size : 1);
	if (!in)
		return 0;
	memcpy(in, data + HEAD, in_size < size - HEAD ? in_size : size - HEAD);
	handle.node = stand_in_node(data[4] >> 1);
	handle.version = data[4] & 2 ? stand_in_version(data[4]) : NULL;
	kv_ops_ioctl(&ops);
	ops.ioctl(stand_in_request(data[5]), handle.node->ino, command, NULL, &fi,
		data[4] & 1 ? FUSE_IOCTL_DIR : 0, in, in_size, _IOC_SIZE(command));
	kv_version_unref(handle.version);
	if (stand_in_answers() != 1 || stand_in_held() != 0)
		abort();
	free(in);
	return 0;
}
