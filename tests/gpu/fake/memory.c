/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory of the fake driver. An allocation is a memfd or, with FAKECU_DIR, a file in that
 * folder: its one open file description is shared by all processes that import it and is locked
 * (flock) as long as any of them holds it by a descriptor, and so the lock tells who looks at the
 * folder which memory is in use, as the driver knows it.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/gpu/fake/internal.h"

#define HANDLES_MAX 4096
#define RESERVATIONS_MAX 4096
#define MAPPINGS_MAX 8192
/* Handles look like no pointer and no small number. */
#define HANDLE_BASE UINT64_C(0xfa4e00000000)

struct reservation {
	uint64_t address;
	uint64_t size;
};

static struct fake_allocation *handles[HANDLES_MAX]; /* NULL: free */
static struct reservation reservations[RESERVATIONS_MAX];
static unsigned reservation_count;
static struct fake_mapping mappings[MAPPINGS_MAX]; /* by address */
static unsigned mapping_count;
static uint64_t local_bytes[FAKE_DEVICES_MAX]; /* alive in this process */
static unsigned allocation_count;

/* ---- Allocations ---- */

static void unref(struct fake_allocation *allocation)
{
	assert(allocation->references > 0);
	if (--allocation->references > 0)
		return;
	local_bytes[allocation->device] -= allocation->size;
	allocation_count--;
	if (allocation->memory)
		(void)munmap(allocation->memory, allocation->size);
	(void)close(allocation->fd);
	free(allocation);
}

static kvg_cu_result new_handle(struct fake_allocation *allocation, kvg_cu_handle *handle)
{
	for (unsigned i = 0; i < HANDLES_MAX; i++) {
		if (handles[i])
			continue;
		handles[i] = allocation;
		allocation->references++;
		*handle = HANDLE_BASE + i;
		return KVG_CU_SUCCESS;
	}
	return KVG_CU_OUT_OF_MEMORY;
}

static struct fake_allocation *of_handle(kvg_cu_handle handle)
{
	if (handle < HANDLE_BASE || handle >= HANDLE_BASE + HANDLES_MAX)
		return NULL;
	return handles[handle - HANDLE_BASE];
}

/* Bytes of DEVICE in FAKECU_DIR that somebody holds; what nobody holds goes. */
static uint64_t shared_bytes(int device)
{
	DIR *directory = opendir(fake.config.directory);
	uint64_t bytes = 0;
	struct dirent *entry;

	while (directory && (entry = readdir(directory)) != NULL) {
		_cleanup_fd_ int fd = -1;
		struct stat st;
		int number;

		if (sscanf(entry->d_name, "fakecu-gpu%d-", &number) != 1 || number != device)
			continue;
		fd = openat(dirfd(directory), entry->d_name, O_RDWR | O_CLOEXEC);
		if (fd < 0 || fstat(fd, &st) < 0)
			continue;
		if (flock(fd, LOCK_EX | LOCK_NB) == 0)
			(void)unlinkat(dirfd(directory), entry->d_name, 0);
		else
			bytes += (uint64_t)st.st_size;
	}
	if (directory)
		(void)closedir(directory);
	return bytes;
}

static uint64_t used_bytes(int device)
{
	uint64_t context =
		fake.contexts[device].references > 0 ? fake.config.context_size : UINT64_C(0);

	return context + (fake.config.directory[0] ? shared_bytes(device) : local_bytes[device]);
}

/* It is locked before it has its name, lest another process takes it for a dead one. */
static int open_memory(int device)
{
	static unsigned serial;
	char fresh[320], path[320];
	int fd;

	if (fake.config.directory[0] == '\0') {
		(void)snprintf(path, sizeof(path), "fakecu-gpu%d", device);
		return memfd_create(path, MFD_CLOEXEC);
	}
	(void)snprintf(
		fresh, sizeof(fresh), "%s/new-%d-%u", fake.config.directory, (int)getpid(), serial);
	(void)snprintf(path, sizeof(path), "%s/fakecu-gpu%d-%d-%u", fake.config.directory, device,
		(int)getpid(), serial++);
	fd = open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd >= 0 && (flock(fd, LOCK_EX | LOCK_NB) < 0 || rename(fresh, path) < 0)) {
		(void)close(fd);
		return -1;
	}
	return fd;
}

static struct fake_allocation *new_allocation(int fd, int device, uint64_t size)
{
	struct fake_allocation *allocation = calloc(1, sizeof(*allocation));

	assert(allocation);
	allocation->fd = fd;
	allocation->device = device;
	allocation->size = size;
	local_bytes[device] += size;
	allocation_count++;
	return allocation;
}

static bool is_valid(const struct kvg_cu_allocation *a)
{
	if (a->type != KVG_CU_ALLOCATION_PINNED || a->location.type != KVG_CU_LOCATION_DEVICE)
		return false;
	if (a->location.id < 0 || a->location.id >= fake.config.devices)
		return false;
	if (!fake_attribute_override(KVG_CU_ATTRIBUTE_VMM, 1) || a->windows ||
		a->flags.compression || a->flags.usage)
		return false;
	if (a->handle_types == KVG_CU_HANDLE_POSIX_FD)
		return fake_attribute_override(KVG_CU_ATTRIBUTE_POSIX_FD, 1) != 0;
	return a->handle_types == KVG_CU_HANDLE_NONE;
}

kvg_cu_result fake_granularity(
	size_t *granularity, const struct kvg_cu_allocation *allocation, unsigned option)
{
	FAKE_ENTER("cuMemGetAllocationGranularity", FAKE_INIT);

	if (!is_valid(allocation) || option > 1)
		return KVG_CU_INVALID_VALUE;
	*granularity = FAKE_GRANULARITY;
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_create(kvg_cu_handle *handle, size_t size,
	const struct kvg_cu_allocation *allocation, unsigned long long flags)
{
	struct fake_allocation *made;
	int device, fd;
	FAKE_ENTER("cuMemCreate", FAKE_INIT);

	if (size == 0 || size % FAKE_GRANULARITY != 0 || flags != 0 || !is_valid(allocation))
		return KVG_CU_INVALID_VALUE;
	if (allocation->flags.rdma && !fake_attribute_override(KVG_CU_ATTRIBUTE_RDMA_VMM, 1))
		return KVG_CU_NOT_SUPPORTED;
	device = allocation->location.id;
	if (used_bytes(device) + size > fake.config.memory)
		return KVG_CU_OUT_OF_MEMORY;
	fd = open_memory(device);
	if (fd < 0 || ftruncate(fd, (off_t)size) < 0) {
		if (fd >= 0)
			(void)close(fd);
		return KVG_CU_OPERATING_SYSTEM;
	}
	made = new_allocation(fd, device, size);
	made->exportable = allocation->handle_types == KVG_CU_HANDLE_POSIX_FD;
	made->rdma = allocation->flags.rdma != 0;
	return new_handle(made, handle);
}

kvg_cu_result fake_release(kvg_cu_handle handle)
{
	struct fake_allocation *allocation;
	FAKE_ENTER("cuMemRelease", FAKE_INIT);

	allocation = of_handle(handle);
	if (!allocation)
		return KVG_CU_INVALID_VALUE;
	handles[handle - HANDLE_BASE] = NULL;
	unref(allocation);
	return KVG_CU_SUCCESS;
}

/* The descriptor is inherited by children, as far as anybody has promised. */
kvg_cu_result fake_export_handle(
	void *shareable, kvg_cu_handle handle, unsigned type, unsigned long long flags)
{
	struct fake_allocation *allocation;
	int fd;
	FAKE_ENTER("cuMemExportToShareableHandle", FAKE_INIT);

	allocation = of_handle(handle);
	if (!allocation || !allocation->exportable || type != KVG_CU_HANDLE_POSIX_FD || flags != 0)
		return KVG_CU_INVALID_VALUE;
	fd = dup(allocation->fd);
	if (fd < 0)
		return KVG_CU_OPERATING_SYSTEM;
	memcpy(shareable, &fd, sizeof(fd));
	return KVG_CU_SUCCESS;
}

/* The device whose memory FD is, or -1. */
static int device_of(int fd)
{
	char link[64], target[512], *name;
	ssize_t length;
	int device;

	(void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, target, sizeof(target) - 1);
	if (length < 0)
		return -1;
	target[length] = '\0';
	name = strrchr(target, '/');
	if (!name)
		return -1;
	if (strncmp(name, "/memfd:", 7) == 0)
		name += 6;
	return sscanf(name + 1, "fakecu-gpu%d", &device) == 1 && device >= 0 ? device : -1;
}

kvg_cu_result fake_import_handle(kvg_cu_handle *handle, void *shareable, unsigned type)
{
	int fd = (int)(intptr_t)shareable;
	int device, copy;
	struct stat st;
	FAKE_ENTER("cuMemImportFromShareableHandle", FAKE_INIT);

	if (type != KVG_CU_HANDLE_POSIX_FD)
		return KVG_CU_INVALID_VALUE;
	device = device_of(fd);
	if (device < 0 || fstat(fd, &st) < 0)
		return KVG_CU_INVALID_VALUE;
	if (device >= fake.config.devices)
		return KVG_CU_INVALID_DEVICE;
	/* The same open file description, so that its lock lives on here. */
	copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (copy < 0)
		return KVG_CU_OPERATING_SYSTEM;
	return new_handle(new_allocation(copy, device, (uint64_t)st.st_size), handle);
}

kvg_cu_result fake_handle_allocation(struct kvg_cu_allocation *allocation, kvg_cu_handle handle)
{
	struct fake_allocation *known;
	FAKE_ENTER("cuMemGetAllocationPropertiesFromHandle", FAKE_INIT);

	known = of_handle(handle);
	if (!known)
		return KVG_CU_INVALID_VALUE;
	*allocation = (struct kvg_cu_allocation){
		.type = KVG_CU_ALLOCATION_PINNED,
		.handle_types = KVG_CU_HANDLE_POSIX_FD,
		.location = {.type = KVG_CU_LOCATION_DEVICE, .id = known->device},
	};
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_memory_info(size_t *free_bytes, size_t *total_bytes)
{
	uint64_t used;
	FAKE_ENTER("cuMemGetInfo", FAKE_CONTEXT);

	used = used_bytes(fake_context_current()->device);
	*total_bytes = fake.config.memory;
	*free_bytes = used < fake.config.memory ? fake.config.memory - used : 0;
	return KVG_CU_SUCCESS;
}

/* ---- Addresses ---- */

bool fake_is_device(uint64_t address)
{
	for (unsigned i = 0; i < reservation_count; i++)
		if (address - reservations[i].address < reservations[i].size)
			return true;
	return false;
}

kvg_cu_result fake_reserve(kvg_cu_ptr *address, size_t size, size_t alignment, kvg_cu_ptr fixed,
	unsigned long long flags)
{
	uint64_t start, base;
	void *memory;
	FAKE_ENTER("cuMemAddressReserve", FAKE_INIT);

	if (size == 0 || size % FAKE_GRANULARITY != 0 || flags != 0 || fixed != 0)
		return KVG_CU_INVALID_VALUE;
	if (alignment < FAKE_GRANULARITY)
		alignment = FAKE_GRANULARITY;
	if ((alignment & (alignment - 1)) != 0)
		return KVG_CU_INVALID_VALUE;
	memory = mmap(NULL, size + alignment, PROT_NONE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return KVG_CU_OUT_OF_MEMORY;
	base = (uint64_t)(uintptr_t)memory;
	start = kv_round_up(base, alignment);
	if (start > base)
		(void)munmap(memory, start - base);
	if (base + alignment > start)
		(void)munmap((void *)(uintptr_t)(start + size), base + alignment - start);
	assert(reservation_count < RESERVATIONS_MAX);
	reservations[reservation_count].address = start;
	reservations[reservation_count++].size = size;
	*address = start;
	return KVG_CU_SUCCESS;
}

/* The first mapping that ends behind ADDRESS. */
static unsigned mapping_index(uint64_t address)
{
	unsigned low = 0, high = mapping_count;

	while (low < high) {
		unsigned middle = (low + high) / 2;

		if (mappings[middle].address + mappings[middle].size <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static bool is_free(uint64_t address, uint64_t size)
{
	unsigned i = mapping_index(address);

	return i == mapping_count || mappings[i].address >= address + size;
}

kvg_cu_result fake_unreserve(kvg_cu_ptr address, size_t size)
{
	FAKE_ENTER("cuMemAddressFree", FAKE_INIT);

	for (unsigned i = 0; i < reservation_count; i++) {
		if (reservations[i].address != address || reservations[i].size != size)
			continue;
		if (!is_free(address, size))
			return KVG_CU_INVALID_VALUE;
		(void)munmap((void *)(uintptr_t)address, size);
		reservations[i] = reservations[--reservation_count];
		return KVG_CU_SUCCESS;
	}
	return KVG_CU_INVALID_VALUE;
}

static bool is_reserved(uint64_t address, uint64_t size)
{
	for (unsigned i = 0; i < reservation_count; i++)
		if (address >= reservations[i].address &&
			address + size <= reservations[i].address + reservations[i].size)
			return true;
	return false;
}

/* ---- Mappings ---- */

kvg_cu_result fake_map(kvg_cu_ptr address, size_t size, size_t offset, kvg_cu_handle handle,
	unsigned long long flags)
{
	struct fake_allocation *allocation;
	unsigned i;
	FAKE_ENTER("cuMemMap", FAKE_INIT);

	allocation = of_handle(handle);
	if (!allocation || flags != 0 || offset != 0 || size == 0 || size > allocation->size ||
		size % FAKE_GRANULARITY != 0 || address % FAKE_GRANULARITY != 0 ||
		!is_reserved(address, size))
		return KVG_CU_INVALID_VALUE;
	if (!is_free(address, size))
		return KVG_CU_INVALID_VALUE;
	assert(mapping_count < MAPPINGS_MAX);
	i = mapping_index(address);
	memmove(&mappings[i + 1], &mappings[i], (mapping_count - i) * sizeof(mappings[0]));
	mapping_count++;
	allocation->references++;
	mappings[i] = (struct fake_mapping){
		.address = address,
		.size = size,
		.allocation = allocation,
		.access = KVG_CU_ACCESS_NONE,
	};
	return KVG_CU_SUCCESS;
}

/* Whole mappings, one behind the other, that make up exactly the range; -1 if it is none. */
static int whole_mappings(uint64_t address, uint64_t size, unsigned *ret_count)
{
	unsigned first = mapping_index(address), i = first;
	uint64_t reached = address;

	while (i < mapping_count && reached < address + size && mappings[i].address == reached)
		reached += mappings[i++].size;
	*ret_count = i - first;
	return reached == address + size && i > first ? (int)first : -1;
}

static void touch_address(const struct fake_mapping *mapping)
{
	int access = mapping->access == KVG_CU_ACCESS_READ_WRITE ? PROT_READ | PROT_WRITE
		     : mapping->access == KVG_CU_ACCESS_READ     ? PROT_READ
								 : PROT_NONE;

	if (fake.config.cpu_access)
		(void)mmap((void *)(uintptr_t)mapping->address, mapping->size, access,
			MAP_SHARED | MAP_FIXED, mapping->allocation->fd, (off_t)mapping->offset);
}

static void remove_mappings(unsigned first, unsigned count)
{
	for (unsigned i = first; i < first + count; i++) {
		(void)mmap((void *)(uintptr_t)mappings[i].address, mappings[i].size, PROT_NONE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
		unref(mappings[i].allocation);
	}
	memmove(&mappings[first], &mappings[first + count],
		(mapping_count - first - count) * sizeof(mappings[0]));
	mapping_count -= count;
}

kvg_cu_result fake_unmap(kvg_cu_ptr address, size_t size)
{
	unsigned count;
	int first;
	FAKE_ENTER("cuMemUnmap", FAKE_INIT);

	first = whole_mappings(address, size, &count);
	if (first < 0)
		return KVG_CU_INVALID_VALUE;
	remove_mappings((unsigned)first, count);
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_set_access(
	kvg_cu_ptr address, size_t size, const struct kvg_cu_access *access, size_t count)
{
	unsigned mapped;
	int first;
	FAKE_ENTER("cuMemSetAccess", FAKE_INIT);

	if (count != 1 || access->location.type != KVG_CU_LOCATION_DEVICE ||
		(access->flags != KVG_CU_ACCESS_NONE && access->flags != KVG_CU_ACCESS_READ &&
			access->flags != KVG_CU_ACCESS_READ_WRITE))
		return KVG_CU_INVALID_VALUE;
	if (access->location.id < 0 || access->location.id >= fake.config.devices)
		return KVG_CU_INVALID_DEVICE;
	first = whole_mappings(address, size, &mapped);
	if (first < 0)
		return KVG_CU_INVALID_VALUE;
	for (unsigned i = (unsigned)first; i < (unsigned)first + mapped; i++) {
		mappings[i].access = access->flags;
		touch_address(&mappings[i]);
	}
	return KVG_CU_SUCCESS;
}

struct fake_mapping *fake_mapping_find(uint64_t address)
{
	unsigned i = mapping_index(address);

	return i < mapping_count && mappings[i].address <= address ? &mappings[i] : NULL;
}

bool fake_range_is_mapped(uint64_t address, uint64_t size, bool *ret_rdma)
{
	uint64_t reached = address;

	*ret_rdma = true;
	while (reached < address + size) {
		const struct fake_mapping *mapping = fake_mapping_find(reached);

		if (!mapping)
			return false;
		*ret_rdma = *ret_rdma && mapping->allocation->rdma;
		reached = mapping->address + mapping->size;
	}
	return true;
}

uint8_t *fake_kernel_memory(uint64_t address, uint64_t size, bool write)
{
	const struct fake_mapping *m = fake_mapping_find(address);
	struct fake_allocation *allocation;

	if (!m || size > m->address + m->size - address || m->access == KVG_CU_ACCESS_NONE ||
		(write && m->access != KVG_CU_ACCESS_READ_WRITE))
		return NULL;
	allocation = m->allocation;
	if (!allocation->memory) {
		void *memory = mmap(NULL, allocation->size, PROT_READ | PROT_WRITE, MAP_SHARED,
			allocation->fd, 0);

		assert(memory != MAP_FAILED);
		allocation->memory = memory;
	}
	return allocation->memory + m->offset + (address - m->address);
}

/* As the driver has it for memory of the virtual memory calls. */
kvg_cu_result fake_pointer_attribute(void *value, unsigned attribute, kvg_cu_ptr address)
{
	const struct fake_mapping *m;
	FAKE_ENTER("cuPointerGetAttribute", FAKE_INIT);

	m = fake_mapping_find(address);
	if (!m)
		return KVG_CU_INVALID_VALUE;
	switch (attribute) {
	case KVG_CU_POINTER_MEMORY_TYPE:
		*(unsigned *)value = KVG_CU_MEMORY_DEVICE;
		return KVG_CU_SUCCESS;
	case KVG_CU_POINTER_DEVICE:
		*(int *)value = m->allocation->device;
		return KVG_CU_SUCCESS;
	case KVG_CU_POINTER_ACCESS:
		*(unsigned *)value = m->access;
		return KVG_CU_SUCCESS;
	case KVG_CU_POINTER_LEGACY:
		*(bool *)value = fake.config.legacy;
		return KVG_CU_SUCCESS;
	case KVG_CU_POINTER_RANGE_START:
		*(kvg_cu_ptr *)value = m->address;
		return KVG_CU_SUCCESS;
	case KVG_CU_POINTER_RANGE_SIZE:
		*(size_t *)value = m->size;
		return KVG_CU_SUCCESS;
	case KVG_CU_POINTER_MAPPING_START:
		*(kvg_cu_ptr *)value = fake.config.legacy ? 0 : m->address;
		return KVG_CU_SUCCESS;
	case KVG_CU_POINTER_MAPPING_SIZE:
		*(size_t *)value = fake.config.legacy ? 0 : m->size;
		return KVG_CU_SUCCESS;
	default:
		return KVG_CU_INVALID_VALUE;
	}
}

/* ---- All of it ---- */

void fake_memory_live(struct fakecu_live *live)
{
	for (unsigned i = 0; i < HANDLES_MAX; i++)
		live->handles += handles[i] != NULL;
	live->allocations = allocation_count;
	live->reservations = reservation_count;
	live->mappings = mapping_count;
}

void fake_memory_reset(void)
{
	remove_mappings(0, mapping_count);
	for (unsigned i = 0; i < HANDLES_MAX; i++) {
		if (handles[i])
			unref(handles[i]);
		handles[i] = NULL;
	}
	for (unsigned i = 0; i < reservation_count; i++)
		(void)munmap((void *)(uintptr_t)reservations[i].address, reservations[i].size);
	reservation_count = 0;
}
