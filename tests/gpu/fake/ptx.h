/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs PTX without a GPU: the part of the language that gpu/kernels.ptx is written in, and no more,
 * on device memory of the fake driver. What it does not know it refuses; what a device faults at
 * (addresses that are not mapped or not aligned) it faults at; and it faults, too, at what a device
 * leaves undefined: registers that were not written, barriers that not all threads reach.
 *
 * A block's threads run one after the other from barrier to barrier, in the order of their numbers
 * or, every other time, against it: what depends on the order comes out differently.
 */
#ifndef KVFS_TESTS_GPU_FAKE_PTX_H
#define KVFS_TESTS_GPU_FAKE_PTX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PTX_NAME_MAX 32u
#define PTX_SYMBOLS_MAX 8u
#define PTX_REGISTERS_MAX 64u
#define PTX_LABELS_MAX 32u
#define PTX_CODE_MAX 256u
#define PTX_ENTRIES_MAX 4u

enum ptx_op {
	PTX_ADD,
	PTX_AND,
	PTX_BAR,
	PTX_BRA,
	PTX_CVT,
	PTX_LD,
	PTX_MAD,
	PTX_MIN,
	PTX_MOV,
	PTX_MUL,
	PTX_NEG,
	PTX_NOT,
	PTX_OR,
	PTX_RET,
	PTX_SELP,
	PTX_SETP,
	PTX_SHL,
	PTX_SHR,
	PTX_ST,
	PTX_SUB,
	PTX_XOR,
	_PTX_OP_MAX,
};

/* The word behind the operation: of mul and mad, of comparisons, of memory. */
enum ptx_mode {
	PTX_PLAIN,
	PTX_LO,
	PTX_HI,
	PTX_WIDE,
	PTX_EQ,
	PTX_NE,
	PTX_LT,
	PTX_LE,
	PTX_GT,
	PTX_GE,
	PTX_PARAM,
	PTX_SHARED,
	PTX_GLOBAL,
	_PTX_MODE_MAX,
};

enum ptx_kind {
	PTX_NONE,
	PTX_REGISTER,
	PTX_NUMBER, /* also the address of a parameter or of shared memory */
	PTX_TID,
	PTX_CTAID,
};

struct ptx_operand {
	enum ptx_kind kind;
	unsigned number; /* of the register */
	uint64_t value;
};

struct ptx_code {
	enum ptx_op op;
	enum ptx_mode mode;
	unsigned bits; /* of its type; mul.wide's are those of what is multiplied */
	unsigned from_bits;
	unsigned vector; /* ld, st: how many; mov: 2 if it takes a register apart */
	int guard;       /* the predicate's register; -1: none */
	bool negated;    /* the guard */
	unsigned target; /* bra: the code to go on with */
	uint64_t offset; /* ld, st */
	struct ptx_operand operands[4];
};

struct ptx_symbol {
	char name[PTX_NAME_MAX];
	unsigned offset, size; /* bytes */
};

struct ptx_register {
	char name[PTX_NAME_MAX];
	unsigned bits; /* 1: a predicate */
};

struct ptx_entry {
	char name[PTX_NAME_MAX];
	unsigned threads; /* of a block, .reqntid */
	struct ptx_symbol params[PTX_SYMBOLS_MAX], shared[PTX_SYMBOLS_MAX];
	unsigned param_count, shared_count;
	unsigned param_bytes, shared_bytes;
	struct ptx_register registers[PTX_REGISTERS_MAX];
	unsigned register_count;
	struct ptx_code code[PTX_CODE_MAX];
	unsigned code_count;
};

struct ptx_module {
	struct ptx_entry entries[PTX_ENTRIES_MAX];
	unsigned entry_count;
};

/* False if TEXT is not understood: then where and why in ret_error. */
bool ptx_parse(const char *text, struct ptx_module *ret_module, char *ret_error, size_t error_size);

/* Memory of the device for SIZE bytes at ADDRESS; NULL: a fault. */
typedef uint8_t *(*ptx_memory)(uint64_t address, uint64_t size, bool write);

struct ptx_launch {
	const struct ptx_entry *entry;
	unsigned blocks;
	const uint8_t *params; /* param_bytes */
	ptx_memory memory;
	bool wrong; /* the first store of each block comes out wrong */
};

/* False if the device faults, with why in ret_error. */
bool ptx_run(const struct ptx_launch *launch, char *ret_error, size_t error_size);

#endif
