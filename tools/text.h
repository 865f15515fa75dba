/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text for terminals: names of files are whatever their owners like, and must not reach the
 * terminal of somebody else as commands to it.
 *
 * Single-threaded. Never fails.
 */
#ifndef KVFS_TOOLS_TEXT_H
#define KVFS_TOOLS_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Bytes of the UTF-8 character at TEXT, which is not at its end; 0: those are none. */
size_t kv_text_length(const unsigned char *text);
/* Whether such a character is a control character, one of C1 (U+0080 to U+009F) included. */
bool kv_text_is_control(const unsigned char *text);

/* Prints TEXT, with control characters and bytes that are no UTF-8 as \xNN. */
void kv_text_print(FILE *out, const char *text);

#endif
