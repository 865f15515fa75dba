/* SPDX-License-Identifier: Apache-2.0 */
/* The fake driver's environment, faults, and its report at the end: see fakecu.h. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include "tests/gpu/fake/internal.h"

#define FAULTS_MAX 64
#define NAMES_MAX 96
#define LIST_MAX 32

struct fault {
	char name[48];
	unsigned at; /* the count of calls at which it strikes */
	bool repeat;
	bool of_file; /* it is there as long as the control file says it */
	kvg_cu_result code;
};

struct count {
	char name[48];
	unsigned calls;
};

struct fake_state fake = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct fault faults[FAULTS_MAX];
static unsigned fault_count;
static struct count counts[NAMES_MAX]; /* the first is of all calls */
static unsigned name_count = 1;
static char hidden[LIST_MAX][48];
static unsigned hidden_count;
static struct {
	int attribute, value;
} overrides[LIST_MAX];
static unsigned override_count;
static bool configured;
static bool held, held_by_file;
static struct stat control_seen; /* what was read last; no file has the number 0 */

/* ---- Configuration ---- */

static uint64_t number(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static void text(const char *name, const char *otherwise, char *ret, size_t size)
{
	const char *value = getenv(name);

	(void)snprintf(ret, size, "%s", value ? value : otherwise);
}

/* Calls EACH with every part of the list in the variable NAME. */
static void each(const char *name, void (*part)(const char *))
{
	const char *value = getenv(name);
	char copy[1024], *rest = copy, *word;

	if (!value)
		return;
	(void)snprintf(copy, sizeof(copy), "%s", value);
	while ((word = strsep(&rest, ",")) != NULL)
		if (*word)
			part(word);
}

static void hide(const char *word)
{
	assert(hidden_count < LIST_MAX);
	(void)snprintf(hidden[hidden_count++], sizeof(hidden[0]), "%s", word);
}

static void override(const char *word)
{
	assert(override_count < LIST_MAX);
	if (sscanf(word, "%d=%d", &overrides[override_count].attribute,
		    &overrides[override_count].value) == 2)
		override_count++;
}

static struct count *count_of(const char *name)
{
	if (strcmp(name, "*") == 0)
		return &counts[0];
	for (unsigned i = 1; i < name_count; i++)
		if (strcmp(counts[i].name, name) == 0)
			return &counts[i];
	assert(name_count < NAMES_MAX);
	(void)snprintf(counts[name_count].name, sizeof(counts[0].name), "%s", name);
	return &counts[name_count++];
}

static struct fault *add_fault(const char *name, unsigned nth, bool repeat, kvg_cu_result code)
{
	struct fault *fault = &faults[fault_count];

	assert(fault_count < FAULTS_MAX);
	(void)snprintf(fault->name, sizeof(fault->name), "%s", name);
	fault->at = count_of(name)->calls + nth;
	fault->repeat = repeat;
	fault->of_file = false;
	fault->code = code;
	fault_count++;
	return fault;
}

/* NAME:NTH[+]:CODE */
static struct fault *read_fault(const char *word)
{
	char name[48], nth[16];
	unsigned code;

	if (sscanf(word, "%47[^:]:%15[^:]:%u", name, nth, &code) != 3) {
		(void)fprintf(stderr, "fakecu: cannot read the fault '%s'\n", word);
		abort();
	}
	return add_fault(name, (unsigned)strtoul(nth, NULL, 10), strchr(nth, '+') != NULL, code);
}

static void parse_fault(const char *word)
{
	(void)read_fault(word);
}

static void drop_faults_of_file(void)
{
	unsigned kept = 0;

	for (unsigned i = 0; i < fault_count; i++)
		if (!faults[i].of_file)
			faults[kept++] = faults[i];
	fault_count = kept;
}

static enum fake_clock parse_clock(void)
{
	char name[16];

	text("FAKECU_CLOCK", "virtual", name, sizeof(name));
	if (strcmp(name, "manual") == 0)
		return FAKE_CLOCK_MANUAL;
	return strcmp(name, "real") == 0 ? FAKE_CLOCK_REAL : FAKE_CLOCK_VIRTUAL;
}

void fake_config_read(void)
{
	struct fake_config *config = &fake.config;
	char copy[16];

	if (configured)
		return;
	configured = true;
	text("FAKECU_COPY", "late", copy, sizeof(copy));
	*config = (struct fake_config){
		.devices = (int)number("FAKECU_DEVICES", 1),
		.mig = number("FAKECU_MIG", 0) != 0,
		.stub = number("FAKECU_STUB", 0) != 0,
		.cpu_access = number("FAKECU_CPU", 0) != 0,
		.early_copies = strcmp(copy, "early") == 0,
		.legacy = number("FAKECU_LEGACY", 0) != 0,
		.clock = parse_clock(),
		.version = (int)number("FAKECU_VERSION", 12080),
		.memory = number("FAKECU_MEMORY", UINT64_C(8) << 30),
		.context_size = number("FAKECU_CONTEXT", UINT64_C(512) << 20),
		.register_max = number("FAKECU_REGISTER_MAX", UINT64_C(512) << 30),
		.bandwidth = {number("FAKECU_BW", UINT64_C(55600000000)),
			number("FAKECU_BW_D2H", UINT64_C(52800000000)),
			number("FAKECU_BW_D2D", UINT64_C(1600000000000))},
		.bandwidth_pageable = number("FAKECU_BW_PAGEABLE", UINT64_C(12000000000)),
		.gap_ns = number("FAKECU_GAP_NS", 2000),
		.batch_gap_ns = number("FAKECU_BATCH_GAP_NS", 300),
		.submit_ns = number("FAKECU_SUBMIT_NS", 2300),
		.kernel_ns = number("FAKECU_KERNEL_NS", 5000),
	};
	if (config->devices > FAKE_DEVICES_MAX)
		config->devices = FAKE_DEVICES_MAX;
	text("FAKECU_NAME", config->mig ? "Modelled H200 MIG 1g.18gb" : "Modelled H200",
		config->name, sizeof(config->name));
	text("FAKECU_DIR", "", config->directory, sizeof(config->directory));
	text("FAKECU_CONTROL", "", config->control, sizeof(config->control));
	text("FAKECU_WRONG", "", config->wrong, sizeof(config->wrong));
	hidden_count = override_count = 0;
	each("FAKECU_HIDE", hide);
	each("FAKECU_ATTR", override);
	each("FAKECU_FAIL", parse_fault);
}

bool fake_is_hidden(const char *symbol)
{
	for (unsigned i = 0; i < hidden_count; i++)
		if (strcmp(hidden[i], symbol) == 0)
			return true;
	return false;
}

int fake_attribute_override(int attribute, int value)
{
	for (unsigned i = 0; i < override_count; i++)
		if (overrides[i].attribute == attribute)
			value = overrides[i].value;
	return value;
}

/* ---- The control file ---- */

/* A test may write two of one size within a tick of the clock; each is a file of its own. */
static bool is_seen(const struct stat *st)
{
	return st->st_ino == control_seen.st_ino && st->st_size == control_seen.st_size &&
	       st->st_mtim.tv_sec == control_seen.st_mtim.tv_sec &&
	       st->st_mtim.tv_nsec == control_seen.st_mtim.tv_nsec;
}

/*
 * Reads it when it has changed: what it held and the faults it named end with what it said then.
 * What counts as read is what was opened: the file that was looked at may have been replaced since,
 * and its successor, read twice, would have each of its faults twice.
 */
static void look_at_control(void)
{
	char line[128], word[96];
	struct stat st;
	FILE *file;

	if (fake.config.control[0] == '\0')
		return;
	if (stat(fake.config.control, &st) < 0) {
		held_by_file = false;
		control_seen.st_ino = 0;
		return;
	}
	if (is_seen(&st))
		return;
	file = fopen(fake.config.control, "re");
	if (!file)
		return;
	if (fstat(fileno(file), &control_seen) < 0)
		control_seen.st_ino = 0;
	held_by_file = false;
	drop_faults_of_file();
	while (fgets(line, sizeof(line), file)) {
		if (strncmp(line, "hold", 4) == 0)
			held_by_file = true;
		else if (sscanf(line, "fail %95s", word) == 1)
			read_fault(word)->of_file = true;
	}
	(void)fclose(file);
}

bool fake_is_held(void)
{
	look_at_control();
	return held || held_by_file;
}

/* ---- Faults ---- */

static kvg_cu_result strike(const char *name)
{
	struct count *count = count_of(name);

	count->calls++;
	counts[0].calls++;
	for (unsigned i = 0; i < fault_count; i++) {
		bool any = strcmp(faults[i].name, "*") == 0;
		unsigned calls = any ? counts[0].calls : count->calls;

		if (!any && strcmp(faults[i].name, name) != 0)
			continue;
		if (calls == faults[i].at || (faults[i].repeat && calls > faults[i].at))
			return fake_result(faults[i].code);
	}
	return KVG_CU_SUCCESS;
}

kvg_cu_result fake_result(kvg_cu_result code)
{
	if (kvg_cuda_is_fatal(code))
		fake.fatal = code;
	return code;
}

kvg_cu_result fake_enter(const char *symbol, enum fake_need need)
{
	kvg_cu_result result;

	look_at_control();
	result = strike(symbol);
	if (result != KVG_CU_SUCCESS)
		return result;
	if (need == FAKE_NOTHING)
		return KVG_CU_SUCCESS;
	if (!fake.initialised || fake.process != getpid())
		return KVG_CU_NOT_INITIALIZED;
	if (fake.fatal != KVG_CU_SUCCESS)
		return fake.fatal;
	if (need != FAKE_INIT && !fake_context_current())
		return KVG_CU_INVALID_CONTEXT;
	return KVG_CU_SUCCESS;
}

void fake_faults_reset(void)
{
	fault_count = 0;
	name_count = 1;
	memset(counts, 0, sizeof(counts));
	held = held_by_file = false;
	control_seen.st_ino = 0;
}

/* ---- For tests in the same process ---- */

FAKE_API void fakecu_fail(const char *name, unsigned nth, bool repeat, unsigned code)
{
	KV_LOCKED(&fake.lock);
	(void)add_fault(name, nth, repeat, code);
}

FAKE_API void fakecu_heal(void)
{
	KV_LOCKED(&fake.lock);
	fault_count = 0;
}

FAKE_API unsigned fakecu_fault(const char *name)
{
	KV_LOCKED(&fake.lock);
	look_at_control();
	return strike(name);
}

FAKE_API unsigned fakecu_calls(const char *name)
{
	KV_LOCKED(&fake.lock);
	return count_of(name)->calls;
}

FAKE_API void fakecu_hold(bool hold)
{
	KV_LOCKED(&fake.lock);
	held = hold;
}

FAKE_API bool fakecu_is_held(void)
{
	KV_LOCKED(&fake.lock);
	return fake_is_held();
}

static void live(struct fakecu_live *ret_live)
{
	*ret_live = (struct fakecu_live){
		.registrations = fake_host_live(),
		.contexts = fake_contexts_live(),
		.modules = fake_modules_live(),
	};
	fake_memory_live(ret_live);
	fake_streams_live(ret_live);
}

FAKE_API void fakecu_live(struct fakecu_live *ret_live)
{
	KV_LOCKED(&fake.lock);
	live(ret_live);
}

FAKE_API void fakecu_reset(void)
{
	KV_LOCKED(&fake.lock);
	fake_streams_reset();
	fake_memory_reset();
	fake_host_reset();
	fake_contexts_reset();
	fake_modules_reset();
	fake_faults_reset();
	fake.fatal = KVG_CU_SUCCESS;
	configured = false;
	fake_config_read();
}

FAKE_API bool fakecu_is_mapped(uint64_t address, uint64_t size, bool *ret_rdma)
{
	KV_LOCKED(&fake.lock);
	return fake_range_is_mapped(address, size, ret_rdma);
}

/* ---- The report ---- */

static void print(FILE *file, const struct fakecu_live *l, bool leaks)
{
	(void)fprintf(file,
		"fakecu: process=%d %s handles=%u allocations=%u reservations=%u mappings=%u "
		"registrations=%u streams=%u events=%u contexts=%u modules=%u\n",
		(int)getpid(), leaks ? "leaks" : "clean", l->handles, l->allocations,
		l->reservations, l->mappings, l->registrations, l->streams, l->events, l->contexts,
		l->modules);
}

static void print_traffic(FILE *file)
{
	static const char *const names[] = {"h2d", "d2h", "d2d"};

	for (int i = 0; i < _FAKECU_DIRECTION_MAX; i++) {
		struct fakecu_traffic t;

		fakecu_traffic((enum fakecu_direction)i, &t);
		(void)fprintf(file, "fakecu: process=%d %s copies=%llu bytes=%llu busy_ns=%llu\n",
			(int)getpid(), names[i], (unsigned long long)t.copies,
			(unsigned long long)t.bytes, (unsigned long long)t.busy_ns);
	}
}

__attribute__((destructor)) static void report(void)
{
	const char *path = getenv("FAKECU_REPORT");
	struct fakecu_live none = {0}, l;
	FILE *file;
	bool leaks;

	if (!fake.initialised || fake.process != getpid())
		return;
	fakecu_live(&l);
	leaks = memcmp(&none, &l, sizeof(l)) != 0;
	file = path ? fopen(path, "ae") : NULL;
	if (file) {
		print(file, &l, leaks);
		print_traffic(file);
		(void)fclose(file);
	} else if (leaks) {
		print(stderr, &l, leaks);
	}
}
