/* SPDX-License-Identifier: Apache-2.0 */
/* Which backend is taken: see backend.h. */
#include "gpu/backend.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define LINE_SIZE 192u
#define BY_NAME "reads from drives past the CPU only with --backend cufile"

static const struct kvg_backend_ops *const backends[] = {
	&kvg_backend_cufile,
	&kvg_backend_cuda,
	&kvg_backend_host,
};
#define BACKENDS (sizeof(backends) / sizeof(backends[0]))

static void add_reason(char *reasons, size_t size, const char *name, const char *line)
{
	size_t length = strlen(reasons);

	if (length < size)
		(void)snprintf(reasons + length, size - length, "%s%s: %s", length > 0 ? "; " : "",
			name, line);
}

static int try_backend(const struct kvg_backend_ops *ops, const struct kvg_backend_open *open,
	struct kvg_backend **ret_backend, char *reasons, size_t reasons_size)
{
	char line[LINE_SIZE] = "";
	int r = ops->probe(line, sizeof(line));

	if (r == 0)
		r = ops->open(open, ret_backend, line, sizeof(line));
	if (r < 0)
		add_reason(reasons, reasons_size, ops->name, line);
	return r;
}

int kvg_backend_choose(const char *name, const struct kvg_backend_open *open,
	struct kvg_backend **ret_backend, char *ret_reasons, size_t reasons_size)
{
	bool known = false;
	int r = -ENODEV;

	ret_reasons[0] = '\0';
	for (size_t i = 0; i < BACKENDS; i++) {
		if (name && strcmp(name, backends[i]->name) != 0)
			continue;
		known = true;
		/* What it needs of drives and kernel is seldom there, nor always faster. */
		if (!name && backends[i] == &kvg_backend_cufile)
			continue;
		r = try_backend(backends[i], open, ret_backend, ret_reasons, reasons_size);
		if (r == 0 && !name && backends[i] == &kvg_backend_cuda)
			add_reason(ret_reasons, reasons_size, kvg_backend_cufile.name, BY_NAME);
		if (r == 0)
			return 0;
	}
	if (known)
		return r;
	(void)snprintf(ret_reasons, reasons_size,
		"there is no backend '%.32s'; there are cufile, cuda and host", name);
	return -EINVAL;
}

struct kvg_backend *kvg_backend_close(struct kvg_backend *backend)
{
	if (backend)
		backend->ops->close(backend);
	return NULL;
}
