/* SPDX-License-Identifier: Apache-2.0 */
/* Where a helper listens. Header only; what the helper, the library and the tools agree on. */
#ifndef KVFS_GPU_SOCKET_H
#define KVFS_GPU_SOCKET_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* Root's helpers are found by all; a user's own by his processes. */
static inline int kvg_socket_folder(char *ret_path, size_t size)
{
	const char *runtime = getenv("XDG_RUNTIME_DIR");
	int n = geteuid() == 0 || !runtime ? snprintf(ret_path, size, "/run/kvfs")
					   : snprintf(ret_path, size, "%s/kvfs", runtime);

	return n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
}

/* FOLDER/gpu-<uuid in hexadecimal>.sock */
static inline int kvg_socket_path(const uint8_t uuid[16], char *ret_path, size_t size)
{
	char folder[128];
	int n, r = kvg_socket_folder(folder, sizeof(folder));

	if (r < 0)
		return r;
	n = snprintf(ret_path, size, "%s/gpu-", folder);
	for (unsigned i = 0; i < 16 && n > 0 && (size_t)n < size; i++)
		n += snprintf(ret_path + n, size - (size_t)n, "%02x", uuid[i]);
	if (n > 0 && (size_t)n < size)
		n += snprintf(ret_path + n, size - (size_t)n, ".sock");
	return n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
}

static inline int kvg_socket_address(const char *path, struct sockaddr_un *ret_address)
{
	int n;

	*ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
	n = snprintf(ret_address->sun_path, sizeof(ret_address->sun_path), "%s", path);
	return n < 0 || (size_t)n >= sizeof(ret_address->sun_path) ? -ENAMETOOLONG : 0;
}

#endif
