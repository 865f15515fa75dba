/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a fuzz target is: a function that takes any bytes and must neither crash nor break what it
 * asserts. libFuzzer calls it, or fuzz_main.c does.
 */
#ifndef KVFS_TESTS_FUZZ_FUZZ_H
#define KVFS_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* Always 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
