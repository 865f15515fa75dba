/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one line for the user that set-up functions leave behind when they fail.
 *
 * A borrowed buffer; header only. Whoever fails first writes the line and hands its errno up.
 */
#ifndef KVFS_FS_ERROR_H
#define KVFS_FS_ERROR_H

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

struct kv_error {
	char *text;
	size_t size;
};

/* Writes the line and returns R. */
__attribute__((format(printf, 3, 4))) static inline int kv_fail(
	const struct kv_error *error, int r, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	(void)vsnprintf(error->text, error->size, format, args);
	va_end(args);
	return r;
}

#endif
