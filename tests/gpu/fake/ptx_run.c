/* SPDX-License-Identifier: Apache-2.0 */
/* Running PTX: see ptx.h. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/fake/ptx.h"

/* A thread that has done so much without an end has none. */
#define STEPS_MAX 10000000u

struct thread {
	uint64_t registers[PTX_REGISTERS_MAX];
	uint64_t written; /* a bit a register */
	unsigned at;      /* the next code */
	bool ended;
};

struct block {
	const struct ptx_launch *launch;
	unsigned number;
	uint8_t *shared;
	struct thread *threads;
	bool wrong; /* the next store is to come out wrong */
	const char *fault;
	uint64_t fault_address;
};

static uint64_t mask_of(unsigned bits)
{
	return bits >= 64 ? UINT64_MAX : (UINT64_C(1) << bits) - 1;
}

static uint64_t get(struct block *block, const struct thread *t, const struct ptx_operand *operand)
{
	switch (operand->kind) {
	case PTX_REGISTER:
		if ((t->written >> operand->number & 1) == 0)
			block->fault = "a register that was not written";
		return t->registers[operand->number];
	case PTX_TID:
		return (uint64_t)(t - block->threads);
	case PTX_CTAID:
		return block->number;
	case PTX_NUMBER:
	case PTX_NONE:
		break;
	}
	return operand->value;
}

static void set(const struct block *block, struct thread *t, const struct ptx_operand *operand,
	uint64_t value)
{
	t->registers[operand->number] =
		value & mask_of(block->launch->entry->registers[operand->number].bits);
	t->written |= UINT64_C(1) << operand->number;
}

/* ---- Memory ---- */

static uint8_t *within(uint8_t *memory, unsigned have, uint64_t address, uint64_t size)
{
	return address <= have && size <= have - address ? memory + address : NULL;
}

static uint8_t *find(struct block *block, const struct ptx_code *code, uint64_t address)
{
	const struct ptx_entry *entry = block->launch->entry;
	uint64_t size = code->vector * code->bits / 8;
	uint8_t *memory;

	block->fault_address = address;
	if (address % size != 0) {
		block->fault = "an address that is not aligned";
		return NULL;
	}
	if (code->mode == PTX_PARAM)
		memory = within((uint8_t *)(uintptr_t)block->launch->params, entry->param_bytes,
			address, size);
	else if (code->mode == PTX_SHARED)
		memory = within(block->shared, entry->shared_bytes, address, size);
	else
		memory = block->launch->memory(address, size, code->op == PTX_ST);
	if (!memory)
		block->fault = "an address that is not mapped";
	return memory;
}

static void load(struct block *block, struct thread *t, const struct ptx_code *code)
{
	uint64_t address = get(block, t, &code->operands[2]) + code->offset;
	const uint8_t *memory = find(block, code, address);
	unsigned size = code->bits / 8;

	for (unsigned i = 0; memory && i < code->vector; i++) {
		uint64_t value = 0;

		memcpy(&value, memory + (size_t)i * size, size);
		set(block, t, &code->operands[i], value);
	}
}

static void store(struct block *block, struct thread *t, const struct ptx_code *code)
{
	uint64_t address = get(block, t, &code->operands[2]) + code->offset;
	uint8_t *memory = find(block, code, address);
	unsigned size = code->bits / 8;

	for (unsigned i = 0; memory && i < code->vector; i++) {
		uint64_t value = get(block, t, &code->operands[i]);

		memcpy(memory + (size_t)i * size, &value, size);
	}
	if (memory && block->wrong && code->mode == PTX_GLOBAL) {
		memory[0] ^= 1;
		block->wrong = false;
	}
}

/* ---- Arithmetic ---- */

static uint64_t multiply(const struct ptx_code *code, uint64_t a, uint64_t b)
{
	__extension__ typedef unsigned __int128 wide;
	wide product = (wide)a * b;

	return code->mode == PTX_HI ? (uint64_t)(product >> code->bits) : (uint64_t)product;
}

static bool compare(enum ptx_mode mode, uint64_t a, uint64_t b)
{
	switch (mode) {
	case PTX_EQ:
		return a == b;
	case PTX_NE:
		return a != b;
	case PTX_LT:
		return a < b;
	case PTX_LE:
		return a <= b;
	case PTX_GT:
		return a > b;
	default:
		return a >= b;
	}
}

/* Shifts by more than there are bits give 0. */
static uint64_t calculate(const struct ptx_code *code, uint64_t a, uint64_t b, uint64_t c)
{
	switch (code->op) {
	case PTX_ADD:
		return a + b;
	case PTX_SUB:
		return a - b;
	case PTX_AND:
		return a & b;
	case PTX_OR:
		return a | b;
	case PTX_XOR:
		return a ^ b;
	case PTX_NOT:
		return ~a;
	case PTX_NEG:
		return 0 - a;
	case PTX_MIN:
		return a < b ? a : b;
	case PTX_SHL:
		return b >= code->bits ? 0 : a << b;
	case PTX_SHR:
		return b >= code->bits ? 0 : a >> b;
	case PTX_MUL:
		return multiply(code, a, b);
	case PTX_MAD:
		return multiply(code, a, b) + c;
	case PTX_SETP:
		return compare(code->mode, a, b);
	case PTX_SELP:
		return c ? a : b;
	default:
		assert(code->op == PTX_CVT);
		return a;
	}
}

static void move(struct block *block, struct thread *t, const struct ptx_code *code)
{
	uint64_t value = get(block, t, &code->operands[2]);

	set(block, t, &code->operands[0], value);
	if (code->vector == 2)
		set(block, t, &code->operands[1], value >> code->bits / 2);
}

/* Numbers are 64 bits wide whatever the type. */
static uint64_t get_masked(
	struct block *block, const struct thread *t, const struct ptx_code *code, unsigned i)
{
	if (code->operands[i].kind == PTX_NONE)
		return 0;
	return get(block, t, &code->operands[i]) &
	       mask_of(i < 3 && code->op != PTX_CVT ? code->bits : 64);
}

/* ---- Threads ---- */

/* Runs T up to a barrier or its end. */
static void run_thread(struct block *block, struct thread *t)
{
	const struct ptx_entry *entry = block->launch->entry;

	for (unsigned steps = 0; !block->fault; steps++) {
		const struct ptx_code *code = &entry->code[t->at++];

		if (steps == STEPS_MAX)
			block->fault = "a thread that does not end";
		if (code->guard >= 0) {
			const struct ptx_operand guard = {
				.kind = PTX_REGISTER, .number = (unsigned)code->guard};

			if ((get(block, t, &guard) != 0) == code->negated)
				continue;
		}
		switch (code->op) {
		case PTX_BAR:
			return;
		case PTX_RET:
			t->ended = true;
			return;
		case PTX_BRA:
			t->at = code->target;
			break;
		case PTX_LD:
			load(block, t, code);
			break;
		case PTX_ST:
			store(block, t, code);
			break;
		case PTX_MOV:
			move(block, t, code);
			break;
		default:
			set(block, t, &code->operands[0],
				calculate(code, get_masked(block, t, code, 1),
					get_masked(block, t, code, 2),
					get_masked(block, t, code, 3)));
		}
	}
}

/* All threads up to the next barrier; false when they have ended. */
static bool run_to_barrier(struct block *block, bool backwards)
{
	unsigned count = block->launch->entry->threads, ended = 0;

	for (unsigned i = 0; i < count && !block->fault; i++) {
		struct thread *t = &block->threads[backwards ? count - 1 - i : i];

		run_thread(block, t);
		ended += t->ended;
		if (t->at != block->threads[backwards ? count - 1 : 0].at && !t->ended)
			block->fault = "a barrier that not all threads reach";
	}
	if (ended != 0 && ended != count && !block->fault)
		block->fault = "a barrier that not all threads reach";
	return ended == 0 && !block->fault;
}

bool ptx_run(const struct ptx_launch *launch, char *ret_error, size_t error_size)
{
	const struct ptx_entry *entry = launch->entry;
	struct thread *threads = calloc(entry->threads, sizeof(*threads));
	uint8_t *shared = calloc(1, entry->shared_bytes + 1u);
	struct block block = {.launch = launch, .shared = shared, .threads = threads};

	assert(threads && shared);
	for (; block.number < launch->blocks && !block.fault; block.number++) {
		bool backwards = block.number % 2 == 1;

		for (unsigned i = 0; i < entry->threads; i++) {
			threads[i].written = 0;
			threads[i].at = 0;
			threads[i].ended = false;
		}
		/* Shared memory holds whatever was there before. */
		memset(shared, 0xa5, entry->shared_bytes);
		block.wrong = launch->wrong;
		while (run_to_barrier(&block, backwards))
			backwards = !backwards;
	}
	if (block.fault)
		(void)snprintf(ret_error, error_size, "%s: %s, at 0x%llx", entry->name, block.fault,
			(unsigned long long)block.fault_address);
	free(shared);
	free(threads);
	return !block.fault;
}
