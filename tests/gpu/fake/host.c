/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered host memory. The fake refuses what the kernel and the driver refuse: memory that is
 * not there, read-only memory without the flag, and writable mappings of files other than those of
 * tmpfs (mm/gup.c, writable_file_mapping_allowed, since Linux 6.5).
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/statfs.h>

#include "tests/gpu/fake/internal.h"

#define REGISTRATIONS_MAX 1024
#define NS_A_GIB                                                                                   \
	UINT64_C(100000000) /* of registering; 0.1 s a GB is what users of H200s report            \
			     */
#define TMPFS 0x01021994
#define HUGETLBFS 0x958458f6

static struct {
	uint64_t address;
	uint64_t size;
} registrations[REGISTRATIONS_MAX];
static unsigned registration_count;

void fake_host_reset(void)
{
	registration_count = 0;
}

unsigned fake_host_live(void)
{
	return registration_count;
}

bool fake_host_is_pinned(uint64_t address, uint64_t size)
{
	for (unsigned i = 0; i < registration_count; i++)
		if (address >= registrations[i].address &&
			address + size <= registrations[i].address + registrations[i].size)
			return true;
	return false;
}

static bool overlaps(uint64_t address, uint64_t size)
{
	for (unsigned i = 0; i < registration_count; i++)
		if (address < registrations[i].address + registrations[i].size &&
			registrations[i].address < address + size)
			return true;
	return false;
}

/* Whether the file below the mapping at [FROM, TO) is in memory; true where nobody can tell. */
static bool is_memory_file(uint64_t from, uint64_t to)
{
	_cleanup_fd_ int fd = -1;
	struct statfs st;
	char path[80];

	(void)snprintf(path, sizeof(path), "/proc/self/map_files/%" PRIx64 "-%" PRIx64, from, to);
	fd = open(path, O_PATH | O_CLOEXEC);
	if (fd < 0 || fstatfs(fd, &st) < 0)
		return true;
	return (uint64_t)st.f_type == TMPFS || (uint64_t)st.f_type == HUGETLBFS;
}

/* Whether all of the range is mapped so that a device can be given it. */
static bool can_pin(uint64_t address, uint64_t size, bool read_only)
{
	uint64_t reached = address, from, to;
	FILE *maps = fopen("/proc/self/maps", "re");
	unsigned long inode;
	char line[512], access[8];
	bool ok = true;

	if (!maps)
		return true;
	while (ok && reached < address + size && fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %*x %*s %lu", &from, &to, access,
			    &inode) != 4 ||
			to <= reached)
			continue;
		ok = from <= reached && access[0] == 'r' && (access[1] == 'w' || read_only);
		if (ok && inode != 0 && access[3] == 's' && access[1] == 'w')
			ok = is_memory_file(from, to);
		reached = to;
	}
	(void)fclose(maps);
	return ok && reached >= address + size;
}

kvg_cu_result fake_host_register(void *memory, size_t size, unsigned flags)
{
	uint64_t address = (uint64_t)(uintptr_t)memory;
	bool read_only = (flags & KVG_CU_REGISTER_READ_ONLY) != 0;
	FAKE_ENTER("cuMemHostRegister", FAKE_CONTEXT);

	if (size == 0 || (flags & ~(unsigned)(KVG_CU_REGISTER_PORTABLE | 2 | 4 |
					      KVG_CU_REGISTER_READ_ONLY)) != 0)
		return KVG_CU_INVALID_VALUE;
	if (read_only && !fake_attribute_override(KVG_CU_ATTRIBUTE_REGISTER_READ_ONLY, 1))
		return KVG_CU_NOT_SUPPORTED;
	if (size >= fake.config.register_max)
		return KVG_CU_OUT_OF_MEMORY;
	if (overlaps(address, size))
		return KVG_CU_ALREADY_REGISTERED;
	if (!can_pin(address, size, read_only))
		return KVG_CU_INVALID_VALUE;
	assert(registration_count < REGISTRATIONS_MAX);
	registrations[registration_count].address = address;
	registrations[registration_count++].size = size;
	fake_spend((uint64_t)((double)size / (double)(1u << 30) * (double)NS_A_GIB));
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_host_unregister(void *memory)
{
	FAKE_ENTER("cuMemHostUnregister", FAKE_CONTEXT);

	for (unsigned i = 0; i < registration_count; i++) {
		if (registrations[i].address != (uint64_t)(uintptr_t)memory)
			continue;
		registrations[i] = registrations[--registration_count];
		return KVG_CU_SUCCESS;
	}
	return KVG_CU_NOT_REGISTERED;
}
