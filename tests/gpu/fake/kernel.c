/* SPDX-License-Identifier: Apache-2.0 */
/* Modules and kernels of the fake driver: PTX is parsed when it is loaded and run when its time in
 * the stream has come. */
#include <stdio.h>

#include "tests/gpu/fake/internal.h"
#include "tests/gpu/fake/ptx.h"

#define MODULES_MAX 16u

struct kvg_cu_fun {
	const struct ptx_entry *entry;
};

struct kvg_cu_mod {
	struct ptx_module parsed;
	struct kvg_cu_fun functions[PTX_ENTRIES_MAX];
};

/* With the parameters as they were in the call; the module may be gone when it runs. */
struct fake_launch {
	struct ptx_entry entry;
	unsigned blocks;
	uint8_t params[];
};

static struct kvg_cu_mod *modules[MODULES_MAX]; /* NULL: free */

kvg_cu_result fake_module_load(kvg_cu_module *module, const void *image)
{
	struct kvg_cu_mod *made;
	char error[128];
	unsigned i = 0;
	FAKE_ENTER("cuModuleLoadData", FAKE_CONTEXT);

	while (i < MODULES_MAX && modules[i])
		i++;
	assert(i < MODULES_MAX);
	made = calloc(1, sizeof(*made));
	assert(made);
	if (!ptx_parse(image, &made->parsed, error, sizeof(error))) {
		(void)fprintf(stderr, "fakecu: PTX, %s\n", error);
		free(made);
		return KVG_CU_INVALID_PTX;
	}
	modules[i] = made;
	*module = made;
	return KVG_CU_SUCCESS;
}

static int find_module(kvg_cu_module module)
{
	for (unsigned i = 0; i < MODULES_MAX; i++)
		if (module && modules[i] == module)
			return (int)i;
	return -1;
}

kvg_cu_result fake_module_unload(kvg_cu_module module)
{
	int found;
	FAKE_ENTER("cuModuleUnload", FAKE_CONTEXT);

	found = find_module(module);
	if (found < 0)
		return KVG_CU_INVALID_HANDLE;
	free(modules[found]);
	modules[found] = NULL;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_module_function(
	kvg_cu_function *function, kvg_cu_module module, const char *name)
{
	FAKE_ENTER("cuModuleGetFunction", FAKE_CONTEXT);

	if (find_module(module) < 0)
		return KVG_CU_INVALID_HANDLE;
	for (unsigned i = 0; i < module->parsed.entry_count; i++) {
		if (strcmp(module->parsed.entries[i].name, name) != 0)
			continue;
		module->functions[i].entry = &module->parsed.entries[i];
		*function = &module->functions[i];
		return KVG_CU_SUCCESS;
	}
	return KVG_CU_NOT_FOUND;
}

static bool is_function(kvg_cu_function function)
{
	for (unsigned i = 0; i < MODULES_MAX; i++)
		for (unsigned k = 0; modules[i] && k < PTX_ENTRIES_MAX; k++)
			if (function == &modules[i]->functions[k])
				return function->entry != NULL;
	return false;
}

kvg_cu_result fake_launch(kvg_cu_function function, unsigned blocks_x, unsigned blocks_y,
	unsigned blocks_z, unsigned threads_x, unsigned threads_y, unsigned threads_z,
	unsigned shared_bytes, kvg_cu_stream stream, void **params, void **extra)
{
	const struct ptx_entry *entry;
	struct fake_launch *launch;
	FAKE_ENTER("cuLaunchKernel", FAKE_CONTEXT);

	if (!is_function(function))
		return KVG_CU_INVALID_HANDLE;
	entry = function->entry;
	if (blocks_x == 0 || blocks_y != 1 || blocks_z != 1 || threads_x != entry->threads ||
		threads_y != 1 || threads_z != 1 || shared_bytes != 0 || extra || !params)
		return KVG_CU_INVALID_VALUE;
	launch = calloc(1, sizeof(*launch) + entry->param_bytes);
	assert(launch);
	launch->entry = *entry;
	launch->blocks = blocks_x;
	for (unsigned i = 0; i < entry->param_count; i++)
		memcpy(launch->params + entry->params[i].offset, params[i], entry->params[i].size);
	return fake_launch_submit(stream, launch);
}

bool fake_launch_run(struct fake_launch *launch)
{
	const struct ptx_launch run = {
		.entry = &launch->entry,
		.blocks = launch->blocks,
		.params = launch->params,
		.memory = fake_kernel_memory,
		.wrong = strcmp(fake.config.wrong, launch->entry.name) == 0,
	};
	char error[128];
	bool fine = ptx_run(&run, error, sizeof(error));

	if (!fine)
		(void)fprintf(stderr, "fakecu: %s\n", error);
	free(launch);
	return fine;
}

void fake_modules_reset(void)
{
	for (unsigned i = 0; i < MODULES_MAX; i++) {
		free(modules[i]);
		modules[i] = NULL;
	}
}

unsigned fake_modules_live(void)
{
	unsigned count = 0;

	for (unsigned i = 0; i < MODULES_MAX; i++)
		count += modules[i] != NULL;
	return count;
}
