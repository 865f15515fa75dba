/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file half of the real kv_io_ops table (io_file.c), for io_uring.c, which completes it. The
 * handle is the descriptor; CONTEXT is not used.
 */
#ifndef KVFS_FS_IO_INTERNAL_H
#define KVFS_FS_IO_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

int kv_io_file_open(void *context, const char *path, bool create, uint64_t size, int *ret_handle,
	uint64_t *ret_size);
void kv_io_file_close(void *context, int handle);
int kv_io_file_read(void *context, int handle, void *memory, size_t length, uint64_t offset);
int kv_io_file_write(void *context, int handle, const void *memory, size_t length, uint64_t offset);
int kv_io_file_flush(void *context, int handle);

#endif
