/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text to numbers, strictly: the whole text must be used, nothing wraps, and no locale matters.
 * All return 0, or -EINVAL (not of the form), or -ERANGE (does not fit); ret_* only on success.
 */
#ifndef KVFS_FS_PARSE_H
#define KVFS_FS_PARSE_H

#include <stddef.h>
#include <stdint.h>

/* Decimal, no sign, no leading or trailing space. */
int kv_parse_u64(const char *text, uint64_t *ret_value);

/* Bytes: "4096", "512M", "8G", "1.5T"; K, M, G, T, P are powers of 1024, in either case, with an
 * optional "iB" or "B". */
int kv_parse_size(const char *text, uint64_t *ret_bytes);

/* As kv_parse_size, or "25%": then TOTAL_BYTES times the percentage (0-100). */
int kv_parse_size_or_percent(const char *text, uint64_t total_bytes, uint64_t *ret_bytes);

/* A time: "250ms", "5s", "10m", "2h", "7d"; a bare number is seconds. */
int kv_parse_duration_ms(const char *text, uint64_t *ret_ms);

/* Writes BYTES as "8.0G"; at most 16 bytes with the NUL. Returns TEXT. */
char *kv_format_size(uint64_t bytes, char *text, size_t text_size);

#endif
