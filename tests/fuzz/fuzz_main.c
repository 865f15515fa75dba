/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls a fuzz target without libFuzzer: with each file of the folders it is given, and with
 * changes of each that are the same in every run.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"

#define INPUT_MAX (1u << 20)
#define CHANGES 2000u

static uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static void call(const uint8_t *data, size_t size)
{
	/* Of its very size, for the sanitizers to see what reads behind it. */
	uint8_t *copy = calloc(1, size > 0 ? size : 1);

	if (!copy)
		abort();
	memcpy(copy, data, size);
	(void)LLVMFuzzerTestOneInput(copy, size);
	free(copy);
}

static void call_changed(uint8_t *data, size_t size)
{
	uint64_t random = size + 1;

	for (unsigned i = 0; i < CHANGES && size > 0; i++) {
		uint64_t at = next_random(&random) % size;
		uint8_t before = data[at];

		data[at] = (uint8_t)next_random(&random);
		call(data, i % 4 == 0 ? next_random(&random) % size : size);
		/* Every other change stays for a while, so that they meet. */
		if (i % 2 == 0)
			data[at] = before;
	}
}

static int run_file(const char *folder, const char *name)
{
	uint8_t *data = malloc(INPUT_MAX);
	char path[4096];
	size_t size;
	FILE *file;

	(void)snprintf(path, sizeof(path), "%s/%s", folder, name);
	file = fopen(path, "r");
	if (!file || !data) {
		perror(path);
		free(data);
		return -1;
	}
	size = fread(data, 1, INPUT_MAX, file);
	(void)fclose(file);
	call(data, size);
	call_changed(data, size);
	free(data);
	return 0;
}

static int run_folder(const char *folder)
{
	DIR *directory = opendir(folder);
	const struct dirent *entry;
	int count = 0;

	if (!directory) {
		perror(folder);
		return -1;
	}
	while ((entry = readdir(directory)))
		if (entry->d_name[0] != '.')
			count = run_file(folder, entry->d_name) < 0 || count < 0 ? -1 : count + 1;
	(void)closedir(directory);
	return count;
}

int main(int argc, char **argv)
{
	call((const uint8_t *)"", 0);
	for (int i = 1; i < argc; i++) {
		int count = run_folder(argv[i]);

		(void)printf("%s: %d inputs\n", argv[i], count);
		/* A corpus that is not there tests nothing. */
		if (count <= 0)
			return 1;
	}
	return argc > 1 ? 0 : 1;
}
