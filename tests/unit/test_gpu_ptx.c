/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The interpreter that runs the kernels in tests: it must not be kinder than a device is. What it
 * does not know it refuses, and it faults at what a device faults at or leaves undefined.
 */
#include "tests/gpu/fake/ptx.h"
#include "tests/unit/unit_fs.h"

#define HEAD ".version 7.0\n.target sm_70\n.address_size 64\n"
#define ENTRY                                                                                      \
	HEAD ".visible .entry f(.param .u64 to, .param .align 8 .b8 list[16]) .reqntid 64, 1, 1 {" \
	     " .reg .pred p, q; .reg .u32 a, b; .reg .u64 r, s, t, v<2>;"                          \
	     " .shared .align 8 .b8 box[512];"
#define BASE UINT64_C(0x7000000000)

static uint8_t memory[1024];

static uint8_t *find(uint64_t address, uint64_t size, bool write)
{
	(void)write;
	return address >= BASE && size <= sizeof(memory) && address - BASE <= sizeof(memory) - size
		       ? memory + (address - BASE)
		       : NULL;
}

/* Runs CODE in two blocks; "" or why it faulted. */
static const char *run(const char *code, bool wrong)
{
	static char error[128], text[4096];
	const uint64_t params[] = {BASE, 0x1122334455667788, 7};
	static struct ptx_module module;
	struct ptx_launch launch = {
		.blocks = 2, .params = (const uint8_t *)params, .memory = find, .wrong = wrong};

	(void)snprintf(text, sizeof(text), "%s %s }", ENTRY, code);
	error[0] = '\0';
	memset(memory, 0, sizeof(memory));
	if (!ptx_parse(text, &module, error, sizeof(error)))
		return error;
	launch.entry = &module.entries[0];
	(void)ptx_run(&launch, error, sizeof(error));
	return error;
}

static void faults(const char *code, const char *why)
{
	const char *told = run(code, false);

	if (!strstr(told, why))
		fail_msg("%s: '%s' is not '%s'", code, told, why);
}

/* The first word at BASE when CODE has put something there in its register r. */
static uint64_t result(const char *code)
{
	char text[1024];
	uint64_t value;

	(void)snprintf(
		text, sizeof(text), "%s ld.param.u64 s, [to]; st.global.u64 [s], r; ret;", code);
	assert_string_equal(run(text, false), "");
	memcpy(&value, memory, sizeof(value));
	return value;
}

/* Each operation gives what the language says. */
static void test_gpu_ptx__arithmetic(void **state)
{
	assert_int_equal(result("mov.u64 r, 5; sub.u64 r, r, 7;"), UINT64_MAX - 1);
	assert_int_equal(result("mov.u32 a, 5; sub.u32 a, a, 7; cvt.u64.u32 r, a;"), 0xfffffffe);
	assert_int_equal(result("mov.u64 r, -8; and.b64 r, r, 15;"), 8);
	assert_int_equal(result("mov.u64 r, 3; neg.s64 r, r; and.b64 r, r, 15;"), 13);
	assert_int_equal(result("mov.u64 r, 3; not.b64 r, r;"), UINT64_MAX - 3);
	assert_int_equal(result("mov.u64 r, 3; min.u64 r, r, 2;"), 2);
	assert_int_equal(result("mov.u64 r, 1; shl.b64 r, r, 64;"), 0);
	assert_int_equal(result("mov.u64 r, -1; shr.u64 r, r, 63;"), 1);
	assert_int_equal(result("mov.u32 a, 1; shl.b32 a, a, 32; cvt.u64.u32 r, a;"), 0);
	assert_int_equal(result("mov.u32 a, -1; mul.wide.u32 r, a, 16;"), UINT64_C(0xffffffff0));
	assert_int_equal(result("mov.u64 r, -1; mul.lo.u64 r, r, 3;"), UINT64_MAX - 2);
	assert_int_equal(result("mov.u64 r, -1; mul.hi.u64 r, r, 3;"), 2);
	assert_int_equal(result("mov.u32 a, -1; mov.u64 r, 1; mad.wide.u32 r, a, a, r;"),
		UINT64_C(0xfffffffe00000002));
	assert_int_equal(
		result("ld.param.u64 r, [list]; mov.b64 {a, b}, r; cvt.u64.u32 r, a;"), 0x55667788);
	assert_int_equal(
		result("ld.param.u64 r, [list]; mov.b64 {a, b}, r; cvt.u64.u32 r, b;"), 0x11223344);
	assert_int_equal(result("mov.u64 s, list; ld.param.u64 r, [s+8];"), 7);
	assert_int_equal(
		result("ld.param.u64 s, [list+8]; cvt.u32.u64 a, s; cvt.u64.u32 r, a;"), 7);
	assert_int_equal(result("mov.u64 s, 4; setp.le.u64 p, s, 4; selp.u64 r, 1, 2, p;"), 1);
	assert_int_equal(result("mov.u64 s, -1; setp.lt.u64 p, s, 4; selp.u64 r, 1, 2, p;"), 2);
	assert_int_equal(
		result("mov.u64 r, 1; setp.ne.u64 p, r, 1; @!p bra L; mov.u64 r, 9; L:"), 1);
}

/* Threads see what others have put into shared memory, behind a barrier. */
static void test_gpu_ptx__barriers(void **state)
{
	assert_int_equal(result("mov.u32 a, %tid.x; shl.b32 b, a, 3; cvt.u64.u32 r, a;"
				"mov.u32 a, box; add.u32 b, b, a; st.shared.u64 [b], r;"
				"bar.sync 0; ld.shared.u64 r, [a+504];"),
		63);
	/* Without one, the order of the threads shows. */
	assert_int_not_equal(result("mov.u32 a, %tid.x; shl.b32 b, a, 3; cvt.u64.u32 r, a;"
				    "mov.u32 a, box; add.u32 b, b, a; st.shared.u64 [b], r;"
				    "ld.shared.u64 r, [a+504];"),
		0);
}

/* What a device faults at, or leaves undefined. */
static void test_gpu_ptx__faults(void **state)
{
	const char *aligned = "an address that is not aligned";
	const char *mapped = "an address that is not mapped";

	faults("ld.param.u64 s, [to]; ld.global.u64 r, [s+4]; ret;", aligned);
	faults("ld.param.u64 s, [to]; ld.global.v2.u64 {v0, v1}, [s+8]; ret;", aligned);
	faults("ld.param.u64 s, [to]; mov.u32 a, 1; st.global.u32 [s+2], a; ret;", aligned);
	faults("ld.param.u64 s, [to]; ld.global.u8 a, [s+1024]; ret;", mapped);
	faults("ld.param.u64 s, [to]; mov.u32 a, 1; st.global.u8 [s+1024], a; ret;", mapped);
	faults("mov.u64 s, 0; ld.global.u8 a, [s]; ret;", mapped);
	faults("mov.u32 a, box; ld.shared.u64 r, [a+512]; ret;", mapped);
	faults("ld.param.u64 r, [list+16]; ret;", mapped);
	faults("add.u64 r, s, 1; ret;", "a register that was not written");
	faults("@p bra L; L: ret;", "a register that was not written");
	faults("L: bra L; ret;", "a thread that does not end");
	faults("mov.u32 a, %tid.x; setp.eq.u32 p, a, 5; @p bra L; bar.sync 0; L: ret;",
		"a barrier that not all threads reach");
	faults("mov.u32 a, %tid.x; setp.eq.u32 p, a, 5; @p bra L; bar.sync 0; bra M;"
	       "L: bar.sync 0; M: ret;",
		"a barrier that not all threads reach");
}

/* What is not of the language, or not of its part that is known. */
static void test_gpu_ptx__refuses(void **state)
{
	faults("add.u64 r, s; ret;", "line 4");
	faults("add.u64 r, a, 1; ret;", "a register of another type");
	faults("add.f64 r, s, 1; ret;", "an unknown type");
	faults("fma.u64 r, s, 1; ret;", "unknown");
	faults("mul.u64 r, s, 1; ret;", "lo, hi or wide?");
	faults("setp.u64 p, s, 1; ret;", "which comparison?");
	faults("ld.u64 r, [s]; ret;", "which memory?");
	faults("ld.global.v2.u64 r, [s]; ret;", "another number of registers");
	faults("st.param.u64 [to], r; ret;", "parameters are not written");
	faults("bra NOWHERE; ret;", "NOWHERE");
	faults("bar.sync 1; ret;", "one barrier there is");
	faults("mov.u64 r, nobody; ret;", "a number is wanted");
	faults("mov.u64 r, 1;", "its end is no ret");
}

/* A wrong result is one, in each block. */
static void test_gpu_ptx__wrong(void **state)
{
	const char *code = "ld.param.u64 s, [to]; mov.u32 a, %ctaid.x; mul.wide.u32 t, a, 8;"
			   "add.u64 s, s, t; mov.u64 r, 2; st.global.u64 [s], r; ret;";

	assert_string_equal(run(code, false), "");
	assert_true(memory[0] == 2 && memory[8] == 2);
	assert_string_equal(run(code, true), "");
	/* The first thread's; all others write it anew. */
	assert_true(memory[0] == 2 && memory[8] == 2);
	code = "mov.u32 a, %tid.x; setp.ne.u32 p, a, 0; @p bra L; ld.param.u64 s, [to];"
	       "mov.u64 r, 2; st.global.u64 [s], r; L: ret;";
	assert_string_equal(run(code, true), "");
	assert_int_equal(memory[0], 3);
}

#define TEST(name) cmocka_unit_test(test_gpu_ptx__##name)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(arithmetic),
		TEST(barriers),
		TEST(faults),
		TEST(refuses),
		TEST(wrong),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
