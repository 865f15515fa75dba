/* SPDX-License-Identifier: Apache-2.0 */
/* Finding, starting and ending cuFile: see cufile_driver.h. */
#include "gpu/cufile_driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "fs/base.h"

#define LIBRARY "libcufile.so.0"

struct symbol {
	const char *name;
	bool required;
	size_t offset; /* of its field in kvg_cufile_driver */
};

static const struct symbol symbols[] = {
#define SYMBOL(field, symbol_, required_, returns, parameters)                                     \
	{.name = #symbol_,                                                                         \
		.required = (required_),                                                           \
		.offset = offsetof(struct kvg_cufile_driver, field)},
	KVG_CUFILE_SYMBOLS(SYMBOL)
#undef SYMBOL
};

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvg_cufile_driver loaded; /* load_lock; constant while there are users */
static unsigned users;                  /* load_lock */

const char *kvg_cufile_text(unsigned code)
{
	switch (code) {
	case KVG_CUFILE_NOT_INITIALIZED:
		return "the kernel has neither nvidia-fs nor PCI peer-to-peer for this drive";
	case KVG_CUFILE_PLATFORM_NOT_SUPPORTED:
		return "this machine is not supported";
	case KVG_CUFILE_IO_NOT_SUPPORTED:
		return "this file, its filesystem or its drive is not supported";
	case KVG_CUFILE_DEVICE_NOT_SUPPORTED:
		return "this GPU is not supported";
	case KVG_CUFILE_MAPPING_SIZE:
	case KVG_CUFILE_PINNING_FAILED:
		return "no more device memory can be opened to drives";
	case KVG_CUFILE_NOT_DIRECT:
		return "the file is not open with O_DIRECT";
	case KVG_CUFILE_INTERNAL:
		return "cuFile cannot tell what drive the file is on";
	case KVG_CUFILE_DISABLED:
		return "cufile.json turns it off for this file";
	default:
		return "see the log of cuFile";
	}
}

static int refuse(const char *call, struct kvg_cufile_error error, char *ret_reason, size_t size)
{
	(void)snprintf(ret_reason, size, "%s: error %u, %s", call, error.code,
		kvg_cufile_text(error.code));
	return -EOPNOTSUPP;
}

static int find_symbols(
	void *library, struct kvg_cufile_driver *driver, char *ret_reason, size_t reason_size)
{
	for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
		void *address = dlsym(library, symbols[i].name);

		if (!address && symbols[i].required) {
			(void)snprintf(ret_reason, reason_size,
				"%s has no %s: install another version", LIBRARY, symbols[i].name);
			return -EOPNOTSUPP;
		}
		memcpy((char *)driver + symbols[i].offset, &address, sizeof(address));
	}
	return 0;
}

/* A call beats the environment and cufile.json, but counts only before the start. */
static int forbid_compat(
	const struct kvg_cufile_driver *driver, char *ret_reason, size_t reason_size)
{
	struct kvg_cufile_error error;
	bool forced = false;

	if (!driver->set_bool || !driver->get_bool)
		return 0; /* older than 1.14: the properties will tell */
	error = driver->get_bool(KVG_CUFILE_FORCE_COMPAT, &forced);
	if (error.code == KVG_CUFILE_SUCCESS && forced) {
		(void)snprintf(ret_reason, reason_size,
			"cufile.json or the environment forces compatibility mode");
		return -EOPNOTSUPP;
	}
	error = driver->set_bool(KVG_CUFILE_ALLOW_COMPAT, false);
	if (error.code == KVG_CUFILE_SUCCESS || error.code == KVG_CUFILE_ALREADY_OPEN)
		return 0;
	return refuse("cuFileSetParameterBool", error, ret_reason, reason_size);
}

static int check_compat(
	const struct kvg_cufile_driver *driver, char *ret_reason, size_t reason_size)
{
	struct kvg_cufile_properties properties = {0};
	struct kvg_cufile_error error = driver->get_properties(&properties);

	if (error.code != KVG_CUFILE_SUCCESS)
		return refuse("cuFileDriverGetProperties", error, ret_reason, reason_size);
	if ((properties.nvfs.control & (1u << KVG_CUFILE_CONTROL_COMPAT)) == 0)
		return 0;
	(void)snprintf(ret_reason, reason_size,
		"compatibility mode is on: set properties.allow_compat_mode to false in "
		"cufile.json");
	return -EOPNOTSUPP;
}

static int start(struct kvg_cufile_driver *driver, char *ret_reason, size_t reason_size)
{
	struct kvg_cufile_error error;
	int r = forbid_compat(driver, ret_reason, reason_size);

	if (r < 0)
		return r;
	error = driver->driver_open();
	if (error.code != KVG_CUFILE_SUCCESS)
		return refuse("cuFileDriverOpen", error, ret_reason, reason_size);
	if (driver->get_version(&driver->version).code != KVG_CUFILE_SUCCESS)
		driver->version = 0;
	r = check_compat(driver, ret_reason, reason_size);
	if (r < 0)
		(void)driver->driver_close();
	return r;
}

static int load(char *ret_reason, size_t reason_size)
{
	struct kvg_cufile_driver driver = {0};
	void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	const char *text;
	int r;

	if (!library) {
		text = dlerror();
		(void)snprintf(ret_reason, reason_size, "no cuFile: %s", text ? text : LIBRARY);
		return -ENODEV;
	}
	r = find_symbols(library, &driver, ret_reason, reason_size);
	if (r == 0)
		r = start(&driver, ret_reason, reason_size);
	/* It has threads of its own once it has started: the library itself stays for ever. */
	if (r == 0)
		loaded = driver;
	return r;
}

int kvg_cufile_load(
	const struct kvg_cufile_driver **ret_driver, char *ret_reason, size_t reason_size)
{
	KV_LOCKED(&load_lock);

	if (users == 0) {
		int r = load(ret_reason, reason_size);

		if (r < 0)
			return r;
	}
	users++;
	*ret_driver = &loaded;
	return 0;
}

void kvg_cufile_unload(void)
{
	KV_LOCKED(&load_lock);

	assert(users > 0);
	if (--users == 0)
		(void)loaded.driver_close();
}
