/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the shapes of replay share: checked calls, and bytes that only their seed gives.
 *
 * Every function here ends the program, with one line that tells why, when what it does or checks
 * goes wrong. Threads: any.
 */
#ifndef KVFS_TESTS_CLIENTS_REPLAY_H
#define KVFS_TESTS_CLIENTS_REPLAY_H

#include <sys/types.h>

#include "fs/base.h"

/* 16 tokens of an 8B model, all its layers: what one block of vLLM holds. */
#define REPLAY_BLOCK (UINT64_C(2) << 20)
/* DeepSeek-V3, 16 tokens: no multiple of 4096. */
#define REPLAY_ODD 1124352u

__attribute__((format(printf, 1, 2), noreturn)) void replay_fail(const char *format, ...);

/* A call that returned RESULT (below 0: errno tells) was to return WANTED. */
void replay_expect(int64_t result, uint64_t wanted, const char *what);

/* Prints a path into PATH, of PATH_MAX bytes, and returns it. */
__attribute__((format(printf, 2, 3))) const char *replay_path(char *path, const char *format, ...);

int replay_open(const char *path, int flags, mode_t mode);

void replay_close(int fd);

/* One that is there is as good. */
void replay_make_dir(const char *path);

/* Memory as engines have it for O_DIRECT: aligned to pages. */
void *replay_memory(uint64_t size);

/* The bytes of SEED; SIZE must be a multiple of 8, for both. */
void replay_fill(void *data, uint64_t size, uint64_t seed);
void replay_verify(const void *data, uint64_t size, uint64_t seed, const char *what);

/* ---- Pools: written and read by offset (replay_pools.c) ---- */

void replay_dynamo_pool(const char *dir);
void replay_dynamo_zeros_pool(const char *dir);
void replay_vllm_disk_pool(const char *dir);
void replay_flexkv_pool(const char *dir);

/* ---- Blocks: COUNT are stored; loading gives how many are there (dynamo and 3fs: all) ---- */

void replay_dynamo_path_store(const char *dir, uint64_t count);
uint64_t replay_dynamo_path_load(const char *dir, uint64_t count);
void replay_hf3fs_store(const char *dir, uint64_t count);
uint64_t replay_hf3fs_load(const char *dir, uint64_t count);
void replay_gds_store(const char *dir, uint64_t count);
uint64_t replay_gds_load(const char *dir, uint64_t count);
void replay_ucm_store(const char *dir, uint64_t count);
uint64_t replay_ucm_load(const char *dir, uint64_t count);
void replay_llmd_store(const char *dir, uint64_t count);
uint64_t replay_llmd_load(const char *dir, uint64_t count);
void replay_ds4_store(const char *dir, uint64_t count);
uint64_t replay_ds4_load(const char *dir, uint64_t count);

#endif
