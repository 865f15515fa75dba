/* SPDX-License-Identifier: Apache-2.0 */
/*
 * KV_CRASH_AT=NAME:COUNT in the environment: the daemon dies by SIGKILL when it comes to the place
 * NAME for the COUNTth time.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "fs/crash.h"

static struct {
	const char *name;
	_Atomic long left;
} wanted;

__attribute__((constructor)) static void read_wanted(void)
{
	const char *text = getenv("KV_CRASH_AT"), *colon = text ? strchr(text, ':') : NULL;

	if (!colon)
		return;
	wanted.name = strndup(text, (size_t)(colon - text));
	wanted.left = strtol(colon + 1, NULL, 10);
}

void kv_crash_point(const char *name)
{
	if (wanted.name && strcmp(wanted.name, name) == 0 && atomic_fetch_sub(&wanted.left, 1) == 1)
		(void)raise(SIGKILL);
}
