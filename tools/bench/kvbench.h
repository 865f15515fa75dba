/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench: load kernels, one question each, that run the same on every filesystem.
 *
 * A kernel splits its load into items. The harness hands the items out to threads, takes the time,
 * the CPU time and, if asked, a latency an item, and prints them. A kernel only does one item at a
 * time. File NUMBER of a directory has a name and content that follow from the number, so what one
 * run stores another run can find and check, with nothing kept in between.
 *
 * Errors: negative errno, after one line on stderr that names the file.
 */
#ifndef KVFS_TOOLS_BENCH_KVBENCH_H
#define KVFS_TOOLS_BENCH_KVBENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Sizes and blocks are multiples of this; also the alignment of all buffers. */
#define PAGE_BYTES 4096u
/* Of a path of a numbered file, relative to its directory, with the NUL. */
#define NAME_BYTES 96u

/* The command line. The harness makes DIRECTORY the working directory, so its depth costs nothing.
 */
struct bench {
	const char *directory;
	uint64_t count; /* files */
	uint64_t first; /* number of the first of them */
	uint64_t size;  /* bytes a file */
	uint64_t block; /* bytes a system call */
	uint64_t ops;   /* calls; 0: what the kernel makes of it */
	uint64_t fan;   /* sub-directories the files are spread over; 0: none */
	uint64_t threads;
	uint64_t depth;    /* requests in flight on one ring */
	uint64_t rate;     /* bytes a second at most; 0: no limit */
	uint64_t pause_ms; /* before every item, outside of its latency */
	uint64_t seed;     /* of the random order */
	bool random;       /* items in random order */
	bool reopen;       /* opening and closing the files is part of the load */
	bool direct;       /* O_DIRECT */
	bool rename;       /* store under another name, then rename */
	bool sync;         /* what was stored is durable before the clock stops */
	bool absent;       /* names that are not there */
	bool write;
	bool latency;
	bool verify; /* look at every byte that was read; the times are worth nothing then */
};

struct run;

struct worker {
	struct run *run;
	const struct bench *bench;
	unsigned number;
	void *buffer;   /* bench->block bytes, prefaulted, in huge pages where there are any */
	uint64_t bytes; /* moved */
	uint64_t ops;   /* done */
	uint64_t sum;   /* of what was scanned, so that the scan is not optimised away */
	int error;
};

struct kernel {
	const char *name;
	const char *help;
	/* How many items there are. */
	uint64_t (*items)(const struct bench *bench);
	/* Once, before the clock starts; NULL: nothing to do. *ret_state belongs to the kernel. */
	int (*prepare)(const struct bench *bench, void **ret_state);
	/* One item. With `batch`: all of them, taken by run_next. */
	int (*item)(struct worker *worker, uint64_t item);
	/* Once, after the last item, before the clock stops; NULL: nothing to do. */
	int (*finish)(const struct bench *bench);
	/* Once, after the clock has stopped; NULL: nothing to do. */
	void (*release)(const struct bench *bench, void *state);
	bool batch;
};

/* ---- harness.c ---- */

/* Runs KERNEL as BENCH says, and prints the results as lines of "name value unit". */
int bench_run(const struct bench *bench, const struct kernel *kernel);
/* The next item, in the order of the run. False: there are no more. */
bool run_next(struct worker *worker, uint64_t *ret_item);
/* What the kernel's prepare has left. */
void *run_state(const struct worker *worker);
/* Page-aligned, prefaulted; unmapped at the exit. NULL without memory. */
void *bench_memory(uint64_t size);
uint64_t bench_now_ns(void);
/* Set by SIGTERM and SIGINT: an endless kernel ends. */
bool bench_stopped(void);
/* Prints "kvbench: PATH: WHAT failed: ..." for the negative errno R. Returns R. */
int bench_fail(const char *path, const char *what, int r);

/* ---- pattern.c ---- */

uint64_t pattern_mix(uint64_t x);
/* The path of file NUMBER, relative to the directory. */
void pattern_name(const struct bench *bench, uint64_t number, char ret_name[static NAME_BYTES]);
/* The sub-directory NUMBER of bench->fan. */
void pattern_fan(uint64_t number, char ret_name[static NAME_BYTES]);

/* Where bytes belong: file, and offset in it (a multiple of PAGE_BYTES). */
struct place {
	uint64_t file;
	uint64_t offset;
};

/* Fills SIZE bytes with what all pages of all files share. */
void pattern_fill(void *memory, uint64_t size);
/* Makes filled pages those of PLACE, by changing two words of each. */
void pattern_stamp(void *memory, uint64_t size, struct place place);
/* True if MEMORY is what belongs to PLACE. Unless ALL: looks at the first and the last page only.
 */
bool pattern_check(const void *memory, uint64_t size, struct place place, bool all);

/* ---- The kernels ---- */

extern const struct kernel kernel_read, kernel_mmap, kernel_random;
extern const struct kernel kernel_store, kernel_unlink, kernel_copy, kernel_sync;
extern const struct kernel kernel_access, kernel_lookup, kernel_list, kernel_walk;
extern const struct kernel kernel_raw, kernel_stream, kernel_touch, kernel_pool;

#endif
