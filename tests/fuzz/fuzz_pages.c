/* SPDX-License-Identifier: Apache-2.0 */
/* The pages of the index's file: whatever is in it, it is told of or walked. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "index/pages.h"
#include "tests/fuzz/fuzz.h"

static int record(void *arg, const void *key, size_t key_size, const void *value, size_t value_size)
{
	volatile uint8_t sum = 0;

	(void)arg;
	for (size_t i = 0; i < key_size; i++)
		sum ^= ((const uint8_t *)key)[i];
	for (size_t i = 0; i < value_size; i++)
		sum ^= ((const uint8_t *)value)[i];
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct kv_pages pages = {.fd = memfd_create("kvfs-fuzz", MFD_CLOEXEC), .record = record};

	if (pages.fd < 0)
		return 0;
	if (write(pages.fd, data, size) == (ssize_t)size)
		(void)kv_pages_check(&pages);
	(void)close(pages.fd);
	return 0;
}
