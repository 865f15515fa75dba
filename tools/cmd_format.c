/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfs format: makes a store.
 */
#include <stdio.h>

#include "fs/base.h"
#include "fs/parse.h"
#include "fs/store.h"
#include "tools/cmd.h"

static const char help_text[] =
	"usage: kvfs format STORE [--size SIZE] [--device PATH]... [--force]\n"
	"\n"
	"Makes a store in the directory STORE, which must be empty or not exist.\n"
	"\n"
	"  --size SIZE    size of the data file STORE/data0, or of each --device that is\n"
	"                 a file and does not exist yet; such as 512M, 8G, 1.5T\n"
	"                 (default for data0: half of the free space)\n"
	"  --device PATH  keep the data on this block device or file instead of data0;\n"
	"                 repeat it for several: big files are spread over all of them\n"
	"  --force        replace a store that is there, and whatever the devices hold\n"
	"\n"
	"Example: kvfs format /var/lib/kvfs --size 8G\n";

static int parse_arguments(int argc, char **argv, struct kv_store_format *format)
{
	static const struct option longs[] = {
		{"size", required_argument, NULL, 's'},
		{"device", required_argument, NULL, 'd'},
		{"force", no_argument, NULL, 'f'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	static const char *devices[KV_DEVICES_MAX];
	int c;

	while ((c = cmd_getopt(argc, argv, ":h", longs)) != -1) {
		switch (c) {
		case 's':
			if (kv_parse_size(optarg, &format->size_bytes) < 0 ||
				format->size_bytes == 0)
				return cmd_bad_usage(argv[0],
					"--size %.64s: not a size such as 512M or 8G", optarg);
			break;
		case 'd':
			if (format->device_count == KV_DEVICES_MAX)
				return cmd_bad_usage(
					argv[0], "more than %u devices", KV_DEVICES_MAX);
			devices[format->device_count++] = optarg;
			format->devices = devices;
			break;
		case 'f':
			format->force = true;
			break;
		case 'h':
			(void)fputs(help_text, stdout);
			return -1;
		default:
			return 1;
		}
	}
	if (argc - optind != 1)
		return cmd_bad_usage(
			argv[0], optind == argc ? "STORE is missing" : "more than one STORE");
	format->path = argv[optind];
	return 0;
}

int format_main(int argc, char **argv)
{
	struct kv_store_format format = {0};
	char error[512];
	int r = parse_arguments(argc, argv, &format);

	if (r != 0)
		return r < 0 ? 0 : r;
	if (kv_store_format(&format, error, sizeof(error)) < 0)
		return cmd_fail(argv[0], "%s", error);
	(void)printf(
		"%s is a store now; mount it with: kvfs mount %s DIR\n", format.path, format.path);
	return 0;
}
