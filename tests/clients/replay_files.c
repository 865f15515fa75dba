/* SPDX-License-Identifier: Apache-2.0 */
/* A file for each block, written under another name and renamed. */
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <utime.h>

#include "tests/clients/replay.h"

/* ---- LMCache, storage_backend/gds_backend.py without cuFile: written through a mapping ---- */

#define GDS_HEADER 4096u

static const char *gds_path(char *path, const char *dir, uint64_t i)
{
	replay_make_dir(replay_path(path, "%s/%02" PRIu64, dir, i % 100));
	replay_make_dir(replay_path(path, "%s/%02" PRIu64 "/42", dir, i % 100));
	return replay_path(path, "%s/%02" PRIu64 "/42/model%%40%" PRIu64 ".kvcache.safetensors",
		dir, i % 100, i);
}

/* The header by write, then the size, the bytes through a shared mapping, and the rename. */
static void gds_store_data(const char *path, uint64_t i)
{
	uint8_t header[GDS_HEADER] = {0};
	char temporary[PATH_MAX];
	uint8_t *data;
	int fd;

	replay_path(temporary, "%s.tmp", path);
	replay_fill(header, sizeof(header), ~i);
	fd = replay_open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	replay_expect(write(fd, header, sizeof(header)), sizeof(header), "write of the header");
	replay_close(fd);
	fd = replay_open(temporary, O_RDWR | O_CLOEXEC, 0);
	replay_expect(ftruncate(fd, GDS_HEADER + REPLAY_ODD), 0, "ftruncate");
	data = mmap(NULL, GDS_HEADER + REPLAY_ODD, PROT_WRITE, MAP_SHARED, fd, 0);
	if (data == MAP_FAILED)
		replay_fail("mmap, shared, for writing: %s", strerror(errno));
	replay_fill(data + GDS_HEADER, REPLAY_ODD, i);
	replay_expect(munmap(data, GDS_HEADER + REPLAY_ODD), 0, "munmap");
	replay_close(fd);
	replay_expect(rename(temporary, path), 0, "rename");
}

void replay_gds_store(const char *dir, uint64_t count)
{
	char path[PATH_MAX], meta[PATH_MAX], temporary[PATH_MAX];
	uint64_t record[512];
	int fd;

	for (uint64_t i = 0; i < count; i++) {
		gds_store_data(gds_path(path, dir, i), i);
		replay_fill(record, sizeof(record), i + 1000);
		replay_path(temporary, "%s.tmp",
			replay_path(meta, "%.*s.metadata", PATH_MAX - 20, path));
		fd = replay_open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
		replay_expect(
			write(fd, record, sizeof(record)), sizeof(record), "write of the metadata");
		replay_close(fd);
		replay_expect(rename(temporary, meta), 0, "rename of the metadata");
	}
}

static bool gds_load_metadata(const char *path, uint64_t i)
{
	char meta[PATH_MAX];
	uint64_t record[512];
	int fd =
		open(replay_path(meta, "%.*s.metadata", PATH_MAX - 20, path), O_RDONLY | O_NOATIME);

	if (fd < 0 && errno == ENOENT)
		return false;
	replay_expect(fd < 0 ? -1 : 0, 0, "open of the metadata, O_NOATIME");
	replay_expect(read(fd, record, sizeof(record)), sizeof(record), "read of the metadata");
	replay_verify(record, sizeof(record), i + 1000, "metadata");
	replay_close(fd);
	return true;
}

uint64_t replay_gds_load(const char *dir, uint64_t count)
{
	char path[PATH_MAX];
	uint64_t hits = 0;

	for (uint64_t i = 0; i < count; i++) {
		struct stat st;
		uint8_t *data;
		int fd;

		if (!gds_load_metadata(gds_path(path, dir, i), i))
			continue;
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 && errno == ENOENT)
			continue;
		replay_expect(fd < 0 ? -1 : 0, 0, "open");
		replay_expect(fstat(fd, &st), 0, "fstat");
		replay_expect(st.st_size, GDS_HEADER + REPLAY_ODD, "st_size");
		data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
		if (data == MAP_FAILED)
			replay_fail("mmap, private, populated: %s", strerror(errno));
		replay_verify(data, GDS_HEADER, ~i, "the header");
		replay_verify(data + GDS_HEADER, REPLAY_ODD, i, "the mapping");
		replay_expect(munmap(data, (size_t)st.st_size), 0, "munmap");
		replay_close(fd);
		hits++;
	}
	return hits;
}

/* ---- UCM, ucm/store/posix/cc: native AIO on shards of a block, into a temporary file ---- */

#define UCM_SHARDS 8u

static void ucm_shards(aio_context_t *context, int fd, uint8_t *data, bool store)
{
	struct io_event events[UCM_SHARDS];
	struct iocb blocks[UCM_SHARDS], *list[UCM_SHARDS];

	if (!*context)
		replay_expect(syscall(SYS_io_setup, UCM_SHARDS, context), 0, "io_setup");
	for (unsigned i = 0; i < UCM_SHARDS; i++) {
		unsigned shard = i * 3 % UCM_SHARDS;

		blocks[i] = (struct iocb){
			.aio_fildes = (uint32_t)fd,
			.aio_lio_opcode = store ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
			.aio_buf = (uintptr_t)(data + shard * (REPLAY_BLOCK / UCM_SHARDS)),
			.aio_nbytes = REPLAY_BLOCK / UCM_SHARDS,
			.aio_offset = (int64_t)(shard * (REPLAY_BLOCK / UCM_SHARDS)),
		};
		list[i] = &blocks[i];
	}
	replay_expect(syscall(SYS_io_submit, *context, UCM_SHARDS, list), UCM_SHARDS, "io_submit");
	replay_expect(syscall(SYS_io_getevents, *context, UCM_SHARDS, UCM_SHARDS, events, NULL),
		UCM_SHARDS, "io_getevents");
	for (unsigned i = 0; i < UCM_SHARDS; i++) {
		errno = events[i].res < 0 ? (int)-events[i].res : 0;
		replay_expect(events[i].res < 0 ? -1 : events[i].res, REPLAY_BLOCK / UCM_SHARDS,
			store ? "AIO write" : "AIO read");
	}
}

static const char *ucm_path(char *path, const char *dir, uint64_t i)
{
	replay_make_dir(replay_path(path, "%s/%02" PRIx64, dir, i % 256));
	return replay_path(path, "%s/%02" PRIx64 "/%032" PRIx64, dir, i % 256, i);
}

void replay_ucm_store(const char *dir, uint64_t count)
{
	char path[PATH_MAX], temporary[PATH_MAX];
	uint8_t *data = replay_memory(REPLAY_BLOCK);
	aio_context_t context = 0;

	for (uint64_t i = 0; i < count; i++) {
		int fd;

		replay_path(temporary, "%s.tmp", ucm_path(path, dir, i));
		fd = replay_open(temporary, O_CREAT | O_WRONLY | O_DIRECT, 0644);
		replay_fill(data, REPLAY_BLOCK, i);
		ucm_shards(&context, fd, data, true);
		replay_close(fd);
		replay_expect(rename(temporary, path), 0, "rename");
		replay_expect(access(path, F_OK | R_OK | W_OK), 0, "access right after the rename");
	}
	(void)munmap(data, REPLAY_BLOCK);
}

uint64_t replay_ucm_load(const char *dir, uint64_t count)
{
	uint8_t *data = replay_memory(REPLAY_BLOCK);
	aio_context_t context = 0;
	char path[PATH_MAX];
	uint64_t hits = 0;

	for (uint64_t i = 0; i < count; i++) {
		int fd;

		if (access(ucm_path(path, dir, i), F_OK | R_OK | W_OK) < 0 && errno == ENOENT)
			continue;
		fd = open(path, O_RDONLY | O_DIRECT);
		if (fd < 0 && errno == ENOENT)
			continue;
		replay_expect(fd < 0 ? -1 : 0, 0, "open");
		ucm_shards(&context, fd, data, false);
		replay_verify(data, REPLAY_BLOCK, i, "AIO read");
		replay_close(fd);
		if (utime(path, NULL) < 0 && errno != ENOENT)
			replay_fail("utime: %s", strerror(errno));
		hits++;
	}
	(void)munmap(data, REPLAY_BLOCK);
	return hits;
}

/* ---- llm-d, llmd_fs_backend/csrc/storage/backends/fs_io/file_io.cpp: a C++ stream ---- */

#define LLMD_TAIL (REPLAY_ODD / 4)

static const char *llmd_path(char *path, const char *dir, uint64_t i)
{
	replay_make_dir(replay_path(path, "%s/%03" PRIx64, dir, i % 4096));
	return replay_path(path, "%s/%03" PRIx64 "/%064" PRIx64 ".bin", dir, i % 4096, i);
}

/* Stored again, a block is only touched: the atime, for whoever evicts, and nothing else. */
static void llmd_touch(const char *path)
{
	const struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_OMIT}};
	struct stat before, after;

	replay_expect(stat(path, &before), 0, "stat");
	replay_expect(utimensat(AT_FDCWD, path, times, 0), 0, "utimensat");
	replay_expect(stat(path, &after), 0, "stat");
	if (after.st_ino != before.st_ino)
		return; /* another process has stored it anew */
	if (after.st_mtim.tv_sec != before.st_mtim.tv_sec ||
		after.st_mtim.tv_nsec != before.st_mtim.tv_nsec)
		replay_fail("a touch of the atime changed the mtime from %lld.%09ld to %lld.%09ld",
			(long long)before.st_mtim.tv_sec, before.st_mtim.tv_nsec,
			(long long)after.st_mtim.tv_sec, after.st_mtim.tv_nsec);
	if (after.st_atim.tv_sec < before.st_atim.tv_sec)
		replay_fail("the atime went back");
}

void replay_llmd_store(const char *dir, uint64_t count)
{
	char path[PATH_MAX], temporary[PATH_MAX], *buffer = replay_memory(1u << 20);
	uint8_t *data = replay_memory(REPLAY_ODD);

	for (uint64_t i = 0; i < count; i++) {
		FILE *f;

		replay_path(temporary, "%s_%08x.tmp", llmd_path(path, dir, i), (unsigned)getpid());
		f = fopen(temporary, "wb");
		if (!f)
			replay_fail("fopen: %s", strerror(errno));
		(void)setvbuf(f, buffer, _IOFBF, 1u << 20);
		replay_fill(data, REPLAY_ODD, i);
		replay_expect((int64_t)fwrite(data, 1, REPLAY_ODD, f), REPLAY_ODD, "fwrite");
		replay_expect(fflush(f), 0, "fflush");
		replay_expect(fclose(f), 0, "fclose");
		replay_expect(rename(temporary, path), 0, "rename");
		llmd_touch(path);
	}
	(void)munmap(buffer, 1u << 20);
	(void)munmap(data, REPLAY_ODD);
}

/* The whole, and the tail alone: readers seek to the size less what they need. */
uint64_t replay_llmd_load(const char *dir, uint64_t count)
{
	uint64_t *data = replay_memory(REPLAY_ODD), *whole = replay_memory(REPLAY_ODD), hits = 0;
	char path[PATH_MAX];

	for (uint64_t i = 0; i < count; i++) {
		int fd = open(llmd_path(path, dir, i), O_RDONLY);
		struct stat st;

		if (fd < 0 && errno == ENOENT)
			continue;
		replay_expect(fd < 0 ? -1 : 0, 0, "open");
		replay_expect(fstat(fd, &st), 0, "fstat");
		replay_expect(st.st_size, REPLAY_ODD, "st_size");
		replay_expect(pread(fd, data, LLMD_TAIL, st.st_size - LLMD_TAIL), LLMD_TAIL,
			"pread of the tail");
		replay_fill(whole, REPLAY_ODD, i);
		if (memcmp(data, whole + (REPLAY_ODD - LLMD_TAIL) / 8, LLMD_TAIL) != 0)
			replay_fail("wrong bytes in the tail of block %" PRIu64, i);
		replay_expect(read(fd, data, REPLAY_ODD), REPLAY_ODD, "read");
		replay_verify(data, REPLAY_ODD, i, "read");
		replay_close(fd);
		hits++;
	}
	(void)munmap(data, REPLAY_ODD);
	(void)munmap(whole, REPLAY_ODD);
	return hits;
}

/* ---- ds4 (antirez): a header of 48 bytes in front, whose hit count is rewritten in place ---- */

#define DS4_HEADER 48u

static const char *ds4_path(char *path, const char *dir, uint64_t i)
{
	return replay_path(path, "%s/%040" PRIx64 ".kv", dir, i);
}

void replay_ds4_store(const char *dir, uint64_t count)
{
	char path[PATH_MAX], temporary[PATH_MAX];
	uint8_t *data = replay_memory(REPLAY_ODD);
	uint64_t header[DS4_HEADER / 8];

	for (uint64_t i = 0; i < count; i++) {
		FILE *f;

		replay_path(temporary, "%s.tmp.%d", ds4_path(path, dir, i), (int)getpid());
		f = fopen(temporary, "wb");
		if (!f)
			replay_fail("fopen: %s", strerror(errno));
		replay_fill(header, DS4_HEADER, ~i);
		header[5] = 0;
		replay_fill(data, REPLAY_ODD, i);
		replay_expect((int64_t)fwrite(header, 1, DS4_HEADER, f), DS4_HEADER, "fwrite");
		replay_expect((int64_t)fwrite(data, 1, REPLAY_ODD, f), REPLAY_ODD, "fwrite");
		replay_expect(fclose(f), 0, "fclose");
		replay_expect(rename(temporary, path), 0, "rename");
	}
	(void)munmap(data, REPLAY_ODD);
}

/* Every load counts a hit, and finds the count of the load before. */
uint64_t replay_ds4_load(const char *dir, uint64_t count)
{
	uint64_t header[DS4_HEADER / 8], wanted[DS4_HEADER / 8], hits = 0;
	uint8_t *data = replay_memory(REPLAY_ODD);
	char path[PATH_MAX];

	for (uint64_t i = 0; i < 2 * count; i++) {
		FILE *f = fopen(ds4_path(path, dir, i / 2), "r+b");

		if (!f && errno == ENOENT)
			continue;
		if (!f)
			replay_fail("fopen for an update: %s", strerror(errno));
		replay_expect((int64_t)fread(header, 1, DS4_HEADER, f), DS4_HEADER, "fread");
		replay_expect((int64_t)fread(data, 1, REPLAY_ODD, f), REPLAY_ODD, "fread");
		replay_fill(wanted, DS4_HEADER, ~(i / 2));
		wanted[5] = header[5];
		if (memcmp(header, wanted, DS4_HEADER) != 0 || (i % 2 && header[5] == 0))
			replay_fail("wrong header of block %" PRIu64, i / 2);
		replay_verify(data, REPLAY_ODD, i / 2, "fread");
		header[5]++;
		replay_expect(fseek(f, 0, SEEK_SET), 0, "fseek");
		replay_expect((int64_t)fwrite(header, 1, DS4_HEADER, f), DS4_HEADER, "fwrite");
		replay_expect(fclose(f), 0, "fclose");
		hits += i % 2;
	}
	(void)munmap(data, REPLAY_ODD);
	return hits;
}
