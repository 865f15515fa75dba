/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the workload did to a store and was promised of it, and the comparison of a store that
 * survived a cut with that.
 *
 * Every file has a history of contents and one of names, in the order in which they were begun. A
 * promise (an fsync that was acknowledged) is the least that must be there after a cut behind it.
 * Each block of content tells by its bytes which file, content and block it was written as.
 *
 * Every step of the workload ends in renaming the token, "token-K" to "token-K+1". The index keeps
 * the order of operations, so the token that survived tells which of them must have survived and
 * which cannot have.
 */
#ifndef KVFS_TESTS_CRASH_MODEL_H
#define KVFS_TESTS_CRASH_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/unit/unit_core.h"

#define MODEL_FILES_MAX 128u
#define MODEL_STATES_MAX 24u
#define MODEL_DIRS 3u
#define MODEL_NAME_MAX 24u

struct piece {
	uint32_t file;    /* number in the model of the whole run */
	uint32_t content; /* of the whole run */
	uint32_t block;
};

struct model_content {
	size_t size; /* bytes */
	struct piece *pieces;
	size_t begun;
	unsigned step;
};

struct model_name {
	uint64_t parent; /* 0: it has none */
	char text[MODEL_NAME_MAX];
	size_t begun;
	unsigned step;
	/* The file that took this name away, if one did, and which of its names that became. */
	struct model_file *taker;
	unsigned taker_name;
};

struct model_promise {
	size_t place;
	int content;
	int name;
};

struct model_file {
	uint64_t ino;
	size_t made; /* the place when it was known to be made */
	struct model_content contents[MODEL_STATES_MAX];
	int content_count;
	struct model_name names[MODEL_STATES_MAX];
	int name_count;
	struct model_promise promises[2 * MODEL_STATES_MAX];
	int promise_count;
	size_t may_vanish; /* evicted at any time from that place on */
	/* What the last comparison found, or -1. */
	int found_content;
	int found_name;
};

struct model {
	struct model_file *files;
	unsigned file_count;
	uint64_t dirs[MODEL_DIRS]; /* inode numbers, 0: not there */
	unsigned step;
	size_t may_vanish;    /* the same for all */
	bool quotas;          /* of directories were set: they outlive a life, and evict */
	uint32_t contents;    /* of the whole run */
	uint64_t last_ino;    /* the highest that was given */
	uint64_t settled_ino; /* the same before this life */
};

/* Where a comparison is: for what it prints. */
struct model_check {
	struct model *model;
	struct unit *unit;
	size_t place;
	bool flipped; /* a bit of a device was flipped: files may be unreadable, never wrong */
	unsigned token;
	unsigned violations;
	char text[256]; /* the first of them */
};

void model_piece_fill(const struct piece *piece, uint8_t ret_block[KV_BLOCK_SIZE]);
void model_violation(struct model_check *check, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
/* Compares the mounted store with what it may be after a cut at PLACE. */
void model_compare(struct model_check *check);
/* What was found becomes what is there for sure, at place 0. */
void model_restart(struct model_check *check);
void model_done(struct model *model);

#endif
