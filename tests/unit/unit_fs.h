/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the unit tests of fs/ share: temporary directories, random bytes that repeat, and captured
 * stderr.
 */
#ifndef KVFS_TESTS_UNIT_UNIT_FS_H
#define KVFS_TESTS_UNIT_UNIT_FS_H

#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define UNIT_SKIP 77

static inline int unit_remove_entry(
	const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

/* A new directory on a real filesystem (direct I/O works there); the state of a test is its path.
 */
static inline int unit_directory_setup(void **state)
{
	const char *base = getenv("TMPDIR");
	char *path;

	if (asprintf(&path, "%s/kvfs-unit-XXXXXX", base ? base : "/var/tmp") < 0)
		return -1;
	*state = mkdtemp(path);
	return *state ? 0 : -1;
}

static inline int unit_directory_teardown(void **state)
{
	int r = nftw(*state, unit_remove_entry, 16, FTW_DEPTH | FTW_PHYS);

	free(*state);
	return r;
}

/* "DIRECTORY/NAME", in one of some static buffers. */
static inline const char *unit_path(void *const *state, const char *name)
{
	static char paths[64][512];
	static unsigned next;
	char *path = paths[next++ % 64];

	(void)snprintf(path, sizeof(paths[0]), "%s/%s", (const char *)*state, name);
	return path;
}

/* xorshift64*: the same numbers in every run. */
static inline uint64_t unit_random(uint64_t *seed)
{
	*seed ^= *seed >> 12;
	*seed ^= *seed << 25;
	*seed ^= *seed >> 27;
	return *seed * UINT64_C(2685821657736338717);
}

static inline void unit_random_fill(uint64_t *seed, void *memory, size_t length)
{
	unsigned char *p = memory;

	for (size_t i = 0; i < length; i++)
		p[i] = (unsigned char)(unit_random(seed) >> 32);
}

static inline bool unit_is_zero(const void *memory, size_t length)
{
	const unsigned char *p = memory;

	for (size_t i = 0; i < length; i++)
		if (p[i] != 0)
			return false;
	return true;
}

/* Sends stderr to a file until unit_capture_end, which gives the text back (to be freed). */
struct unit_capture {
	FILE *file;
	int saved_fd;
};

static inline void unit_capture_begin(struct unit_capture *capture)
{
	capture->file = tmpfile();
	assert_non_null(capture->file);
	capture->saved_fd = dup(STDERR_FILENO);
	assert_true(capture->saved_fd >= 0);
	assert_int_equal(dup2(fileno(capture->file), STDERR_FILENO), STDERR_FILENO);
}

static inline char *unit_capture_end(struct unit_capture *capture)
{
	char *text;
	long length;

	assert_int_equal(dup2(capture->saved_fd, STDERR_FILENO), STDERR_FILENO);
	(void)close(capture->saved_fd);
	assert_int_equal(fseek(capture->file, 0, SEEK_END), 0);
	length = ftell(capture->file);
	assert_true(length >= 0);
	rewind(capture->file);
	text = calloc(1, (size_t)length + 1);
	assert_non_null(text);
	assert_int_equal(fread(text, 1, (size_t)length, capture->file), length);
	(void)fclose(capture->file);
	return text;
}

#endif
