/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting, told to whom it concerns: see wait.h. */

#include "fs/wait.h"

#include <stddef.h>

static _Thread_local struct {
	void (*hook)(void *arg);
	void *arg;
} concerned;

void kv_wait_hook(void (*hook)(void *arg), void *arg)
{
	concerned.hook = hook;
	concerned.arg = arg;
}

void kv_wait_begins(void)
{
	if (concerned.hook)
		concerned.hook(concerned.arg);
}
