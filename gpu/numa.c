/* SPDX-License-Identifier: Apache-2.0 */
/* Memory nodes: see numa.h. */
#include "gpu/numa.h"

#include <ctype.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINE_SIZE 4096
#define BUS_ID_SIZE 32u
#define NODES_MAX 1024u

/* The first line of a small file. */
static bool read_line(const char *path, char *line, int size)
{
	FILE *file = fopen(path, "re");
	bool found;

	if (!file)
		return false;
	found = fgets(line, size, file) != NULL;
	(void)fclose(file);
	return found;
}

static const char *root(const char *sysfs)
{
	return sysfs ? sysfs : "/sys";
}

/* As sysfs writes it: in small letters, four digits of the domain. */
static bool normalize(const char *bus_id, char *ret_name)
{
	size_t length = strlen(bus_id);

	/* Some tools print a domain of eight digits. */
	if (length > 8 && bus_id[8] == ':' && strncmp(bus_id, "0000", 4) == 0) {
		bus_id += 4;
		length -= 4;
	}
	if (length == 0 || length >= BUS_ID_SIZE)
		return false;
	for (size_t i = 0; i <= length; i++) {
		char c = bus_id[i];

		if (c != '\0' && c != ':' && c != '.' && !isxdigit((unsigned char)c))
			return false;
		ret_name[i] = (char)tolower((unsigned char)c);
	}
	return true;
}

int kvg_numa_node(const char *sysfs, const char *bus_id)
{
	char path[4096], name[BUS_ID_SIZE], line[32], *end;
	long node;

	if (!normalize(bus_id, name))
		return -1;
	(void)snprintf(path, sizeof(path), "%s/bus/pci/devices/%s/numa_node", root(sysfs), name);
	if (!read_line(path, line, sizeof(line)))
		return -1;
	node = strtol(line, &end, 10);
	return end == line || node < 0 || node >= (long)NODES_MAX ? -1 : (int)node;
}

void kvg_numa_bind(void *memory, size_t size, int node)
{
	unsigned long mask[NODES_MAX / (8 * sizeof(unsigned long))] = {0};
	unsigned bits = 8 * sizeof(mask[0]);

	if (node < 0 || (unsigned)node >= NODES_MAX)
		return;
	mask[(unsigned)node / bits] |= 1ul << ((unsigned)node % bits);
	(void)syscall(SYS_mbind, memory, size, MPOL_PREFERRED, mask, (unsigned long)NODES_MAX, 0);
}

/* "0-3,8,10-11" */
static bool parse_cpus(const char *text, cpu_set_t *ret_cpus)
{
	CPU_ZERO(ret_cpus);
	while (isdigit((unsigned char)*text)) {
		char *end;
		unsigned long first = strtoul(text, &end, 10), last = first;

		if (*end == '-')
			last = strtoul(end + 1, &end, 10);
		if (last < first || last >= CPU_SETSIZE)
			return false;
		for (; first <= last; first++)
			CPU_SET(first, ret_cpus);
		text = *end == ',' ? end + 1 : end;
	}
	return *text == '\0' || *text == '\n';
}

bool kvg_numa_enter(const char *sysfs, int node, cpu_set_t *ret_before)
{
	char path[4096], line[LINE_SIZE];
	cpu_set_t cpus;

	if (node < 0)
		return false;
	(void)snprintf(
		path, sizeof(path), "%s/devices/system/node/node%d/cpulist", root(sysfs), node);
	if (!read_line(path, line, sizeof(line)) || !parse_cpus(line, &cpus) ||
		sched_getaffinity(0, sizeof(*ret_before), ret_before) < 0)
		return false;
	/* Who was put on some CPUs stays on those. */
	CPU_AND(&cpus, &cpus, ret_before);
	return CPU_COUNT(&cpus) > 0 && sched_setaffinity(0, sizeof(cpus), &cpus) == 0;
}

void kvg_numa_leave(const cpu_set_t *before)
{
	(void)sched_setaffinity(0, sizeof(*before), before);
}
