/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attributes that are control messages: read, listed, set and removed. Input: inode (1 byte), user
 * (1), the name behind "user.kvfs.", a NUL, the value.
 */
#include <stdlib.h>
#include <string.h>

#include "fs/attributes.h"
#include "fs/control.h"
#include "fs/keep.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/stand_in.h"

#define NAME_MAX_LENGTH 255u /* XATTR_NAME_MAX, which the kernel sees to */

static void read_it(uint64_t ino, const char *name)
{
	char *text = NULL;
	ssize_t n = kv_control_get(&stand_in, ino, name, &text);

	if (n >= 0 && (!text || (size_t)n > 64u << 10 || strlen(text) != (size_t)n))
		abort();
	free(text);
	text = NULL;
	n = kv_keep_get(&stand_in, ino, name, &text);
	if (n >= 0 && (!text || strlen(text) != (size_t)n))
		abort();
	free(text);
}

static void list_them(uint64_t ino)
{
	char names[512];
	ssize_t wanted = kv_attribute_names(&stand_in, ino, NULL, 0);
	ssize_t n = kv_attribute_names(&stand_in, ino, names, sizeof(names));

	if (n != wanted || n > (ssize_t)sizeof(names))
		abort();
	for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1)
		if (strncmp(names + at, KV_CONTROL_PREFIX, strlen(KV_CONTROL_PREFIX)) != 0)
			abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char name[NAME_MAX_LENGTH + 1] = KV_CONTROL_PREFIX;
	size_t length, value_size;
	struct kv_node *node;
	fuse_req_t req;
	char *value;

	if (size < 3)
		return 0;
	length = strnlen((const char *)data + 2, size - 2);
	value_size = size - 2 - length - (length < size - 2);
	value = malloc(value_size + 1);
	if (!value)
		return 0;
	/* Without a NUL behind it, as it comes. */
	value = realloc(value, value_size > 0 ? value_size : 1);
	memcpy(value, data + (size - value_size), value_size);
	(void)strncat(
		name, (const char *)data + 2, kv_min_u64(length, NAME_MAX_LENGTH - strlen(name)));
	node = stand_in_node(data[0]);
	req = stand_in_request(data[1] % 4);
	read_it(data[0] % 8, name);
	list_them(data[0] % 8);
	(void)kv_keep_may_see(req, name);
	if (kv_keep_has(name)) {
		kv_keep_set(req, node, name, value, value_size);
		kv_keep_remove(req, node, name);
		if (stand_in_answers() != 2)
			abort();
	}
	if (stand_in_held() != 0)
		abort();
	free(value);
	return 0;
}
