/* SPDX-License-Identifier: Apache-2.0 */
/* From the text of PTX to what can be run: see ptx.h. */
#include "tests/gpu/fake/ptx.h"

#include <ctype.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is read, and the word that comes next. The first mistake ends it all. */
struct parser {
	const char *at;
	unsigned line;
	char word[PTX_NAME_MAX];
	struct ptx_entry *entry;
	/* Where labels are, and which code is to go to which. */
	struct ptx_symbol labels[PTX_LABELS_MAX], jumps[PTX_LABELS_MAX];
	unsigned label_count, jump_count;
	char *error;
	size_t error_size;
	jmp_buf end;
};

static _Noreturn void refuse(struct parser *p, const char *why)
{
	(void)snprintf(p->error, p->error_size, "line %u, '%s': %s", p->line, p->word, why);
	longjmp(p->end, 1);
}

static void need(struct parser *p, bool fine, const char *why)
{
	if (!fine)
		refuse(p, why);
}

/* ---- Words ---- */

static bool is_part(char c)
{
	return isalnum((unsigned char)c) || c == '_' || c == '.' || c == '%';
}

static void skip_space(struct parser *p)
{
	for (;; p->at++) {
		if (strncmp(p->at, "//", 2) == 0)
			p->at += strcspn(p->at, "\n");
		if (*p->at == '\0' || !isspace((unsigned char)*p->at))
			return;
		p->line += *p->at == '\n';
	}
}

/* Takes the next word: a name, a number, or one other character; "" at the end. */
static void next(struct parser *p)
{
	size_t length = 0;

	skip_space(p);
	if (is_part(p->at[0]) || (p->at[0] == '-' && isdigit((unsigned char)p->at[1])))
		for (length = 1; is_part(p->at[length]);)
			length++;
	else if (p->at[0] != '\0')
		length = 1;
	need(p, length < sizeof(p->word), "too long");
	memcpy(p->word, p->at, length);
	p->word[length] = '\0';
	p->at += length;
}

static bool is(const struct parser *p, const char *word)
{
	return strcmp(p->word, word) == 0;
}

/* The word must be WORD; goes on behind it. */
static void expect(struct parser *p, const char *word)
{
	need(p, is(p, word), word);
	next(p);
}

/* Goes on behind it if the word is WORD. */
static bool accept(struct parser *p, const char *word)
{
	if (!is(p, word))
		return false;
	next(p);
	return true;
}

static uint64_t number(struct parser *p)
{
	char *end;
	uint64_t value = strtoull(p->word, &end, 0);

	need(p, end > p->word && *end == '\0', "a number is wanted");
	next(p);
	return value;
}

static void take_name(struct parser *p, char *ret_name)
{
	need(p, isalpha((unsigned char)p->word[0]), "a name is wanted");
	(void)snprintf(ret_name, PTX_NAME_MAX, "%s", p->word);
	next(p);
}

/* ".u64" and the like; predicates have one bit. */
static unsigned bits_of(struct parser *p, const char *type)
{
	static const struct {
		const char *name;
		unsigned bits;
	} types[] = {{"pred", 1}, {"u8", 8}, {"b8", 8}, {"u32", 32}, {"b32", 32}, {"u64", 64},
		{"b64", 64}, {"s64", 64}};

	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
		if (strcmp(type, types[i].name) == 0)
			return types[i].bits;
	refuse(p, "an unknown type");
}

/* ---- Declarations ---- */

static void read_registers(struct parser *p)
{
	unsigned bits = bits_of(p, p->word + 1), count;
	struct ptx_entry *entry = p->entry;
	char name[PTX_NAME_MAX];

	next(p);
	do {
		struct ptx_register *made = &entry->registers[entry->register_count];

		take_name(p, name);
		count = 0;
		if (accept(p, "<")) {
			count = (unsigned)number(p);
			expect(p, ">");
		}
		for (unsigned i = 0; i < (count > 0 ? count : 1); i++, made++) {
			need(p, entry->register_count++ < PTX_REGISTERS_MAX, "too many registers");
			made->bits = bits;
			if (count > 0)
				(void)snprintf(made->name, sizeof(made->name), "%.20s%u", name, i);
			else
				(void)snprintf(made->name, sizeof(made->name), "%s", name);
		}
	} while (accept(p, ","));
}

/* ".align 8 .b8 name[192]" or ".u64 name", behind what is there. */
static void read_symbol(
	struct parser *p, struct ptx_symbol *symbols, unsigned *count, unsigned *bytes)
{
	struct ptx_symbol *made = &symbols[*count];
	unsigned align = 0, bits;

	need(p, (*count)++ < PTX_SYMBOLS_MAX, "too many");
	if (accept(p, ".align"))
		align = (unsigned)number(p);
	bits = bits_of(p, p->word + 1);
	next(p);
	take_name(p, made->name);
	made->size = bits / 8;
	if (accept(p, "[")) {
		made->size *= (unsigned)number(p);
		expect(p, "]");
	}
	align = align > 0 ? align : made->size;
	made->offset = (*bytes + align - 1) / align * align;
	*bytes = made->offset + made->size;
}

/* ---- Operands ---- */

static int find_register(const struct ptx_entry *entry, const char *name)
{
	for (unsigned i = 0; i < entry->register_count; i++)
		if (strcmp(entry->registers[i].name, name) == 0)
			return (int)i;
	return -1;
}

static const struct ptx_symbol *find_symbol(
	const struct ptx_symbol *symbols, unsigned count, const char *name)
{
	for (unsigned i = 0; i < count; i++)
		if (strcmp(symbols[i].name, name) == 0)
			return &symbols[i];
	return NULL;
}

/* BITS: what a register must have. */
static struct ptx_operand read_operand(struct parser *p, unsigned bits)
{
	const struct ptx_entry *entry = p->entry;
	struct ptx_operand operand = {.kind = PTX_REGISTER};
	int found = find_register(entry, p->word);
	const struct ptx_symbol *symbol = find_symbol(entry->params, entry->param_count, p->word);

	symbol = symbol ? symbol : find_symbol(entry->shared, entry->shared_count, p->word);
	if (found >= 0) {
		operand.number = (unsigned)found;
		need(p, entry->registers[found].bits == bits, "a register of another type");
	} else if (is(p, "%tid.x")) {
		operand.kind = PTX_TID;
	} else if (is(p, "%ctaid.x")) {
		operand.kind = PTX_CTAID;
	} else if (symbol) {
		operand.kind = PTX_NUMBER;
		operand.value = symbol->offset;
	} else {
		operand.kind = PTX_NUMBER;
		operand.value = number(p);
		return operand;
	}
	next(p);
	return operand;
}

static struct ptx_operand read_register(struct parser *p, unsigned bits)
{
	struct ptx_operand operand = read_operand(p, bits);

	need(p, operand.kind == PTX_REGISTER, "a register is wanted before this");
	return operand;
}

/* "{a, b}" of registers, or one. Returns how many. */
static unsigned read_vector(struct parser *p, unsigned bits, struct ptx_operand *ret_operands)
{
	if (!accept(p, "{")) {
		ret_operands[0] = read_register(p, bits);
		return 1;
	}
	ret_operands[0] = read_register(p, bits);
	expect(p, ",");
	ret_operands[1] = read_register(p, bits);
	expect(p, "}");
	return 2;
}

/* Parameters and global memory are named by 64 bits, shared memory by 32. */
static struct ptx_operand read_address(struct parser *p, struct ptx_code *code)
{
	struct ptx_operand operand;

	expect(p, "[");
	operand = read_operand(p, code->mode == PTX_SHARED ? 32 : 64);
	if (accept(p, "+"))
		code->offset = number(p);
	expect(p, "]");
	return operand;
}

/* ---- Code ---- */

static const char *const op_names[_PTX_OP_MAX] = {"add", "and", "bar", "bra", "cvt", "ld", "mad",
	"min", "mov", "mul", "neg", "not", "or", "ret", "selp", "setp", "shl", "shr", "st", "sub",
	"xor"};
static const char *const mode_names[_PTX_MODE_MAX] = {
	"", "lo", "hi", "wide", "eq", "ne", "lt", "le", "gt", "ge", "param", "shared", "global"};

static bool find_name(const char *const *names, unsigned count, const char *name, unsigned *ret)
{
	for (unsigned i = 0; i < count; i++) {
		if (strcmp(names[i], name) != 0)
			continue;
		*ret = i;
		return true;
	}
	return false;
}

/* "ld.global.v2.u64": the operation, then modes and types. */
static void read_mnemonic(struct parser *p, struct ptx_code *code)
{
	char copy[PTX_NAME_MAX], *rest = copy, *part;
	unsigned found;

	memcpy(copy, p->word, sizeof(copy));
	need(p, find_name(op_names, _PTX_OP_MAX, strsep(&rest, "."), &found), "unknown");
	code->op = (enum ptx_op)found;
	code->vector = 1;
	while ((part = strsep(&rest, ".")) != NULL) {
		if (find_name(mode_names, _PTX_MODE_MAX, part, &found)) {
			code->mode = (enum ptx_mode)found;
		} else if (strcmp(part, "v2") == 0) {
			code->vector = 2;
		} else if (code->op == PTX_BAR && strcmp(part, "sync") == 0) {
			continue;
		} else if (code->op == PTX_CVT && code->bits != 0) {
			code->from_bits = bits_of(p, part);
		} else {
			code->bits = bits_of(p, part);
		}
	}
	next(p);
}

/* Bytes are kept in registers of 32 bits. */
static unsigned register_bits(const struct ptx_code *code)
{
	return code->bits == 8 ? 32 : code->bits;
}

static void read_memory(struct parser *p, struct ptx_code *code)
{
	unsigned count;

	need(p, code->mode >= PTX_PARAM, "which memory?");
	if (code->op == PTX_LD) {
		count = read_vector(p, register_bits(code), code->operands);
		expect(p, ",");
		code->operands[2] = read_address(p, code);
	} else {
		need(p, code->mode != PTX_PARAM, "parameters are not written");
		code->operands[2] = read_address(p, code);
		expect(p, ",");
		count = read_vector(p, register_bits(code), code->operands);
	}
	need(p, count == code->vector, "another number of registers than said");
}

static void read_mov(struct parser *p, struct ptx_code *code)
{
	unsigned bits = is(p, "{") ? code->bits / 2 : code->bits;

	code->vector = read_vector(p, bits, code->operands);
	expect(p, ",");
	code->operands[2] = read_operand(p, code->bits);
}

/* A result and up to three operands, each of the bits that the operation says. */
static void read_arithmetic(struct parser *p, struct ptx_code *code)
{
	unsigned wide = code->mode == PTX_WIDE ? 2 * code->bits : code->bits;
	unsigned count = code->op == PTX_MAD || code->op == PTX_SELP                         ? 3
			 : code->op == PTX_NEG || code->op == PTX_NOT || code->op == PTX_CVT ? 1
											     : 2;

	need(p, code->op != PTX_MUL || (code->mode >= PTX_LO && code->mode <= PTX_WIDE),
		"lo, hi or wide?");
	need(p, code->op != PTX_SETP || (code->mode >= PTX_EQ && code->mode <= PTX_GE),
		"which comparison?");
	code->operands[0] = read_register(p, code->op == PTX_SETP ? 1 : wide);
	for (unsigned i = 1; i <= count; i++) {
		unsigned bits = code->bits;

		if (code->op == PTX_CVT)
			bits = code->from_bits;
		if ((code->op == PTX_SHL || code->op == PTX_SHR) && i == 2)
			bits = 32;
		if (i == 3)
			bits = code->op == PTX_MAD ? wide : 1;
		expect(p, ",");
		code->operands[i] = read_operand(p, bits);
	}
}

static void read_code(struct parser *p)
{
	struct ptx_entry *entry = p->entry;
	struct ptx_code *code = &entry->code[entry->code_count];

	need(p, entry->code_count++ < PTX_CODE_MAX, "too much code");
	code->guard = -1;
	if (accept(p, "@")) {
		code->negated = accept(p, "!");
		code->guard = (int)read_register(p, 1).number;
	}
	read_mnemonic(p, code);
	switch (code->op) {
	case PTX_RET:
		break;
	case PTX_BAR:
		need(p, code->guard < 0 && number(p) == 0, "one barrier there is, for all");
		break;
	case PTX_BRA:
		need(p, p->jump_count < PTX_LABELS_MAX, "too many branches");
		p->jumps[p->jump_count].offset = entry->code_count - 1;
		take_name(p, p->jumps[p->jump_count++].name);
		break;
	case PTX_LD:
	case PTX_ST:
		read_memory(p, code);
		break;
	case PTX_MOV:
		read_mov(p, code);
		break;
	default:
		read_arithmetic(p, code);
	}
	expect(p, ";");
}

static bool is_label(const struct parser *p)
{
	return isupper((unsigned char)p->word[0]) && *p->at == ':';
}

static void read_body(struct parser *p)
{
	struct ptx_entry *entry = p->entry;

	expect(p, "{");
	while (!accept(p, "}")) {
		if (accept(p, ".reg")) {
			read_registers(p);
			expect(p, ";");
		} else if (accept(p, ".shared")) {
			read_symbol(p, entry->shared, &entry->shared_count, &entry->shared_bytes);
			expect(p, ";");
		} else if (is_label(p)) {
			need(p, p->label_count < PTX_LABELS_MAX, "too many labels");
			p->labels[p->label_count].offset = entry->code_count;
			take_name(p, p->labels[p->label_count++].name);
			expect(p, ":");
		} else {
			read_code(p);
		}
	}
	for (unsigned i = 0; i < p->jump_count; i++) {
		const struct ptx_symbol *label =
			find_symbol(p->labels, p->label_count, p->jumps[i].name);

		need(p, label != NULL, p->jumps[i].name);
		entry->code[p->jumps[i].offset].target = label->offset;
	}
	need(p, entry->code_count > 0 && entry->code[entry->code_count - 1].op == PTX_RET,
		"its end is no ret");
}

static void read_entry(struct parser *p)
{
	struct ptx_entry *entry = p->entry;

	p->label_count = p->jump_count = 0;
	take_name(p, entry->name);
	expect(p, "(");
	do {
		expect(p, ".param");
		read_symbol(p, entry->params, &entry->param_count, &entry->param_bytes);
	} while (accept(p, ","));
	expect(p, ")");
	expect(p, ".reqntid");
	entry->threads = (unsigned)number(p);
	expect(p, ",");
	need(p, number(p) == 1, "one dimension is enough");
	expect(p, ",");
	need(p, number(p) == 1, "one dimension is enough");
	read_body(p);
}

bool ptx_parse(const char *text, struct ptx_module *ret_module, char *ret_error, size_t error_size)
{
	struct parser p = {.at = text, .line = 1, .error = ret_error, .error_size = error_size};

	memset(ret_module, 0, sizeof(*ret_module));
	if (setjmp(p.end) != 0)
		return false;
	next(&p);
	expect(&p, ".version");
	expect(&p, "7.0");
	expect(&p, ".target");
	expect(&p, "sm_70");
	expect(&p, ".address_size");
	expect(&p, "64");
	while (!is(&p, "")) {
		expect(&p, ".visible");
		expect(&p, ".entry");
		need(&p, ret_module->entry_count < PTX_ENTRIES_MAX, "too many entries");
		p.entry = &ret_module->entries[ret_module->entry_count++];
		read_entry(&p);
	}
	return true;
}
