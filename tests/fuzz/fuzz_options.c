/* SPDX-License-Identifier: Apache-2.0 */
/* Mount options: refused ones change nothing and leave one line. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fs/options.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *text = malloc(size + 1);
	char error[256] = "";
	struct kv_options options, before;
	int r;

	if (!text)
		return 0;
	if (size > 0)
		memcpy(text, data, size);
	text[size] = '\0';
	memset(&options, 0, sizeof(options));
	kv_options_init(&options);
	memcpy(&before, &options, sizeof(options));
	r = kv_options_parse(&options, text, error, sizeof(error));
	if (r != 0 && (r != -EINVAL || error[0] == '\0' || strchr(error, '\n') ||
			      memcmp(&before, &options, sizeof(options)) != 0))
		abort();
	free(text);
	return 0;
}
