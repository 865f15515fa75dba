/* SPDX-License-Identifier: Apache-2.0 */
/* Pools: large files that an engine lays out by itself, written and read by offset. */
#include <fcntl.h>
#include <inttypes.h>
#include <liburing.h>
#include <limits.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "tests/clients/replay.h"

#define LAYERS 32u
#define LAYER_SIZE (REPLAY_BLOCK / LAYERS)
#define POOL_BLOCKS 12u
#define POOL_SIZE (POOL_BLOCKS * REPLAY_BLOCK)
/* SGLang's default for a rank's file in 3FS. */
#define SPARSE_SIZE (UINT64_C(1) << 40)

/* The order in which an engine frees and takes slots: none that a readahead would like. */
static uint64_t slot_of(uint64_t i)
{
	return i * 7 % POOL_BLOCKS;
}

/* Whoever runs this may do something now; at the end of the input it goes on at once. */
static void pause_here(void)
{
	(void)printf("stored\n");
	(void)fflush(stdout);
	for (int c = getchar(); c != EOF && c != '\n'; c = getchar())
		;
}

/* A pool written through one descriptor and read through another (or the same) one. */
static void exercise_pool(int out, int in)
{
	uint8_t *data = replay_memory(REPLAY_BLOCK);
	uint64_t version = 1;

	for (uint64_t i = 0; i < POOL_BLOCKS; i++) {
		replay_fill(data, REPLAY_BLOCK, slot_of(i) + version * 100);
		replay_expect(pwrite(out, data, REPLAY_BLOCK, (off_t)(slot_of(i) * REPLAY_BLOCK)),
			REPLAY_BLOCK, "pwrite");
	}
	pause_here();
	for (; version < 3; version++)
		for (uint64_t slot = 0; slot < POOL_BLOCKS; slot++) {
			off_t offset = (off_t)(slot * REPLAY_BLOCK);

			replay_expect(pread(in, data, REPLAY_BLOCK, offset), REPLAY_BLOCK, "pread");
			replay_verify(data, REPLAY_BLOCK, slot + version * 100, "pread");
			replay_fill(data, REPLAY_BLOCK, slot + (version + 1) * 100);
			replay_expect(pwrite(out, data, REPLAY_BLOCK, offset), REPLAY_BLOCK,
				"pwrite again");
		}
	(void)munmap(data, REPLAY_BLOCK);
}

/* ---- Dynamo KVBM, lib/llm/src/block_manager/storage/disk.rs ---- */

static int dynamo_open(const char *dir, char *path)
{
	int fd = mkostemp(
		(char *)replay_path(path, "%s/dynamo-kvbm-disk-cache-XXXXXX", dir), O_CLOEXEC);
	int flags;

	if (fd < 0)
		replay_fail("mkostemp: %s", strerror(errno));
	flags = fcntl(fd, F_GETFL);
	replay_expect(fcntl(fd, F_SETFL, flags | O_DIRECT), 0, "F_SETFL O_DIRECT");
	if (!(fcntl(fd, F_GETFL) & O_DIRECT))
		replay_fail("O_DIRECT did not stay");
	return fd;
}

/* It is unlinked once the GPU library has taken the descriptor; the pool lives on without a name.
 */
static void dynamo_unlink(int fd, const char *path, uint64_t size)
{
	struct stat st;

	replay_expect(unlink(path), 0, "unlink");
	replay_expect(fstat(fd, &st), 0, "fstat");
	if (st.st_nlink != 0 || (uint64_t)st.st_size != size)
		replay_fail("after unlink: %u links, %" PRId64 " bytes", (unsigned)st.st_nlink,
			(int64_t)st.st_size);
	if (access(path, F_OK) == 0)
		replay_fail("the name is still there");
}

void replay_dynamo_pool(const char *dir)
{
	char path[PATH_MAX];
	int fd = dynamo_open(dir, path);

	replay_expect(fallocate(fd, 0, 0, POOL_SIZE), 0, "fallocate");
	dynamo_unlink(fd, path, POOL_SIZE);
	exercise_pool(fd, fd);
	replay_close(fd);
}

/* Where fallocate is not to be had: zeros in pieces of 16 MiB, and what is too much cut off. */
void replay_dynamo_zeros_pool(const char *dir)
{
	const uint64_t piece = UINT64_C(16) << 20, size = POOL_SIZE + 1000;
	void *zeros = replay_memory(piece);
	uint64_t done = 0;
	char path[PATH_MAX];
	int fd = dynamo_open(dir, path);

	while (done < size) {
		uint64_t length = kv_min_u64(kv_round_up(size - done, 4096), piece);

		replay_expect(write(fd, zeros, length), length, "write of zeros");
		done += length;
	}
	replay_expect(ftruncate(fd, (off_t)size), 0, "ftruncate");
	dynamo_unlink(fd, path, size);
	exercise_pool(fd, fd);
	(void)munmap(zeros, piece);
	replay_close(fd);
}

/* The file that stays: new_at_path(create, persist), a slot for each block. */
static int dynamo_path_open(const char *dir, int flags)
{
	char path[PATH_MAX];

	return replay_open(
		replay_path(path, "%s/g3.bin", dir), O_RDWR | O_CLOEXEC | O_DIRECT | flags, 0644);
}

void replay_dynamo_path_store(const char *dir, uint64_t count)
{
	uint8_t *data = replay_memory(REPLAY_BLOCK);
	int fd = dynamo_path_open(dir, O_CREAT);

	replay_expect(fallocate(fd, 0, 0, (off_t)(count * REPLAY_BLOCK)), 0, "fallocate");
	for (uint64_t i = 0; i < count; i++) {
		replay_fill(data, REPLAY_BLOCK, i);
		replay_expect(pwrite(fd, data, REPLAY_BLOCK, (off_t)(i * REPLAY_BLOCK)),
			REPLAY_BLOCK, "pwrite");
	}
	(void)munmap(data, REPLAY_BLOCK);
	replay_close(fd);
}

uint64_t replay_dynamo_path_load(const char *dir, uint64_t count)
{
	uint8_t *data = replay_memory(REPLAY_BLOCK);
	int fd = dynamo_path_open(dir, 0);

	for (uint64_t i = 0; i < count; i++) {
		replay_expect(pread(fd, data, REPLAY_BLOCK, (off_t)(i * REPLAY_BLOCK)),
			REPLAY_BLOCK, "pread");
		replay_verify(data, REPLAY_BLOCK, i, "pread");
	}
	(void)munmap(data, REPLAY_BLOCK);
	replay_close(fd);
	return count;
}

/* ---- vLLM, vllm/v1/simple_kv_offload/disk_backend.py: one vector for each layer's tensor ---- */

struct vllm_lane {
	pthread_t thread;
	int fd;
	bool store;
	uint64_t first, count;
	uint8_t *layers[LAYERS];
};

static void *vllm_lane_run(void *arg)
{
	struct vllm_lane *lane = arg;
	struct iovec iov[LAYERS];

	for (unsigned i = 0; i < LAYERS; i++)
		iov[i] = (struct iovec){lane->layers[i], LAYER_SIZE};
	for (uint64_t slot = lane->first; slot < lane->first + lane->count; slot++) {
		off_t offset = (off_t)(slot * REPLAY_BLOCK);

		for (unsigned i = 0; lane->store && i < LAYERS; i++)
			replay_fill(lane->layers[i], LAYER_SIZE, slot * LAYERS + i);
		if (lane->store)
			replay_expect(
				pwritev(lane->fd, iov, LAYERS, offset), REPLAY_BLOCK, "pwritev");
		else
			replay_expect(
				preadv(lane->fd, iov, LAYERS, offset), REPLAY_BLOCK, "preadv");
		for (unsigned i = 0; !lane->store && i < LAYERS; i++)
			replay_verify(lane->layers[i], LAYER_SIZE, slot * LAYERS + i, "preadv");
	}
	return NULL;
}

static void vllm_lane_start(struct vllm_lane *lane)
{
	if (pthread_create(&lane->thread, NULL, vllm_lane_run, lane) != 0)
		replay_fail("no thread");
}

/* Stores and loads have a thread each; the loads are of what was stored a round before. */
void replay_vllm_disk_pool(const char *dir)
{
	const uint64_t half = POOL_BLOCKS / 2;
	struct vllm_lane store = {.store = true, .count = half}, load = {.count = half};
	char path[PATH_MAX];

	replay_path(path, "%s/kv_offload_disk.bin", dir);
	if (unlink(path) < 0 && errno != ENOENT)
		replay_fail("unlink: %s", strerror(errno));
	store.fd = replay_open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT, 0600);
	load.fd = store.fd;
	replay_expect(ftruncate(store.fd, POOL_SIZE), 0, "ftruncate");
	for (unsigned i = 0; i < LAYERS; i++) {
		store.layers[i] = replay_memory(LAYER_SIZE);
		load.layers[i] = replay_memory(LAYER_SIZE);
	}
	(void)vllm_lane_run(&store);
	pause_here();
	for (unsigned round = 0; round < 4; round++) {
		load.first = store.first;
		store.first = half - store.first;
		vllm_lane_start(&store);
		vllm_lane_start(&load);
		(void)pthread_join(store.thread, NULL);
		(void)pthread_join(load.thread, NULL);
	}
	replay_expect(unlink(path), 0, "unlink");
	replay_close(store.fd);
}

/* ---- FlexKV, flexkv/storage/allocator.py and csrc/transfer_ssd.cpp ---- */

static void flexkv_submit(struct io_uring *ring, int fd, bool store, uint8_t *data)
{
	struct io_uring_cqe *cqe;

	for (uint64_t i = 0; i < POOL_BLOCKS; i++) {
		struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
		uint8_t *block = data + slot_of(i) * REPLAY_BLOCK;

		if (store)
			io_uring_prep_write(
				sqe, fd, block, REPLAY_BLOCK, slot_of(i) * REPLAY_BLOCK);
		else
			io_uring_prep_read(sqe, fd, block, REPLAY_BLOCK, slot_of(i) * REPLAY_BLOCK);
	}
	replay_expect(io_uring_submit(ring), POOL_BLOCKS, "io_uring_submit");
	for (uint64_t i = 0; i < POOL_BLOCKS; i++) {
		if (io_uring_wait_cqe(ring, &cqe) < 0)
			replay_fail("io_uring_wait_cqe");
		errno = -cqe->res;
		replay_expect(cqe->res < 0 ? -1 : cqe->res, REPLAY_BLOCK,
			store ? "write by ring" : "read by ring");
		io_uring_cqe_seen(ring, cqe);
	}
}

/* Each file is open twice, buffered and O_DIRECT, and both are used. */
void replay_flexkv_pool(const char *dir)
{
	uint8_t *data = replay_memory(POOL_SIZE);
	struct io_uring ring;
	char path[PATH_MAX];
	int fd, buffered, direct;

	replay_path(path, "%s/flexkv_ssd_cache_0_0.bin", dir);
	fd = replay_open(path, O_RDWR | O_CREAT | O_TRUNC, 0666);
	replay_expect(ftruncate(fd, POOL_SIZE), 0, "truncate");
	replay_expect(fsync(fd), 0, "fsync");
	replay_close(fd);
	buffered = replay_open(path, O_RDWR, 0);
	direct = replay_open(path, O_RDWR | O_DIRECT, 0);
	replay_expect(posix_fadvise(buffered, 0, 0, POSIX_FADV_RANDOM), 0, "posix_fadvise");
	if (io_uring_queue_init(512, &ring, 0) < 0)
		replay_fail("no io_uring");
	for (unsigned round = 0; round < 4; round++) {
		for (uint64_t i = 0; i < POOL_BLOCKS; i++)
			replay_fill(data + i * REPLAY_BLOCK, REPLAY_BLOCK, i + round * 100);
		flexkv_submit(&ring, round % 2 ? buffered : direct, true, data);
		if (round == 0)
			pause_here();
		memset(data, 0, POOL_SIZE);
		flexkv_submit(&ring, round / 2 ? buffered : direct, false, data);
		for (uint64_t i = 0; i < POOL_BLOCKS; i++)
			replay_verify(data + i * REPLAY_BLOCK, REPLAY_BLOCK, i + round * 100,
				"read by ring");
	}
	io_uring_queue_exit(&ring);
	replay_close(direct);
	replay_close(buffered);
	replay_expect(unlink(path), 0, "unlink");
	(void)munmap(data, POOL_SIZE);
}

/* ---- 3FS: SGLang's storage/hf3fs, a rank's file of 1 TiB of which little is ever written ---- */

static int hf3fs_open(const char *dir)
{
	char path[PATH_MAX];
	int fd = replay_open(replay_path(path, "%s/hicache.0.bin", dir), O_RDWR | O_CREAT, 0644);

	replay_expect(ftruncate(fd, (off_t)SPARSE_SIZE), 0, "ftruncate to 1 TiB");
	return fd;
}

static off_t hf3fs_page(uint64_t i)
{
	return (off_t)(i * 7919 * REPLAY_ODD % (SPARSE_SIZE - REPLAY_ODD));
}

void replay_hf3fs_store(const char *dir, uint64_t count)
{
	uint8_t *data = replay_memory(REPLAY_ODD);
	int fd = hf3fs_open(dir);

	for (uint64_t i = 0; i < count; i++) {
		replay_fill(data, REPLAY_ODD, i);
		replay_expect(lseek(fd, hf3fs_page(i), SEEK_SET), (uint64_t)hf3fs_page(i), "lseek");
		replay_expect(write(fd, data, REPLAY_ODD), REPLAY_ODD, "write");
	}
	replay_expect(fsync(fd), 0, "fsync");
	(void)munmap(data, REPLAY_ODD);
	replay_close(fd);
}

uint64_t replay_hf3fs_load(const char *dir, uint64_t count)
{
	uint8_t *data = replay_memory(REPLAY_ODD);
	int fd = hf3fs_open(dir);
	struct stat st;

	replay_expect(fstat(fd, &st), 0, "fstat");
	if ((uint64_t)st.st_blocks * 512 > 2 * count * (REPLAY_ODD + 4096u))
		replay_fail("holes take space: %" PRId64 " blocks", (int64_t)st.st_blocks);
	for (uint64_t i = 0; i < count; i++) {
		replay_expect(lseek(fd, hf3fs_page(i), SEEK_SET), (uint64_t)hf3fs_page(i), "lseek");
		replay_expect(read(fd, data, REPLAY_ODD), REPLAY_ODD, "read");
		replay_verify(data, REPLAY_ODD, i, "read");
	}
	(void)munmap(data, REPLAY_ODD);
	replay_close(fd);
	return count;
}
