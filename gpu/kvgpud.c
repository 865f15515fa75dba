/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvgpud: the GPU helper. One a GPU, or a part of one; runs as the user who mounts the store.
 */
#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/prctl.h>

#include "fs/base.h"
#include "fs/log.h"
#include "fs/parse.h"
#include "fs/privileges.h"
#include "gpu/server.h"

#define MESSAGE_SIZE 640u
#define SEGMENT_DEFAULT (UINT64_C(64) << 20)
#define SEGMENT_MAX (UINT64_C(4) << 30)

static const char help_text[] =
	"Usage: kvgpud STORE [OPTION...]\n"
	"\n"
	"Keeps files of the mounted store STORE in the memory of a GPU, and shares them\n"
	"between the processes that ask for them through libkvg. It stays in the\n"
	"foreground and logs to stderr. Run one for each GPU, as the user who mounts.\n"
	"\n"
	"  --device DEVICE    a UUID (GPU-..., MIG-...) or a number; default: the first\n"
	"  --backend NAME     cuda, host or cufile; default: the best that works\n"
	"  --hbm SIZE|PERCENT how much of the device's memory files may take (25%)\n"
	"  --share PERCENT    of that, and of connections, what one user may have (100%;\n"
	"                     with --group 50%)\n"
	"  --segment SIZE     of the pieces in which it is shared (64M)\n"
	"  --socket PATH      where it listens; default: /run/kvfs/gpu-UUID.sock, or in\n"
	"                     $XDG_RUNTIME_DIR/kvfs when not run by root\n"
	"  --group NAME       let this group's members in, not only the same user\n"
	"  --unsure TIME      trust what is there that long without the daemon (30s)\n"
	"  --check sampled    look at samples of device memory when a file is there, and\n"
	"                     when a process ends without giving it back\n"
	"  --no-hints         only stage what is asked for, not what is opened often\n"
	"  --no-kernels       run nothing on the device's multiprocessors\n"
	"  --log LEVEL        error, warning, info or debug\n"
	"  -h, --help         this text\n"
	"  -V, --version      the version\n";

__attribute__((format(printf, 1, 2))) static int fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	(void)fprintf(stderr, "kvgpud: ");
	(void)vfprintf(stderr, format, args);
	(void)fprintf(stderr, "\n");
	va_end(args);
	return -EINVAL;
}

enum option_id {
	OPTION_DEVICE = 256,
	OPTION_BACKEND,
	OPTION_HBM,
	OPTION_SHARE,
	OPTION_SEGMENT,
	OPTION_SOCKET,
	OPTION_GROUP,
	OPTION_CHECK,
	OPTION_NO_HINTS,
	OPTION_NO_KERNELS,
	OPTION_UNSURE,
	OPTION_LOG,
};

static int parse_percent(const char *text, unsigned *ret_percent)
{
	size_t length = strlen(text);
	uint64_t value;

	if (length == 0 || text[length - 1] != '%' ||
		kv_parse_size_or_percent(text, 100, &value) < 0 || value == 0)
		return -EINVAL;
	*ret_percent = (unsigned)value;
	return 0;
}

static int parse_hbm(const char *text, struct kvg_server_options *options)
{
	size_t length = strlen(text);

	if (length > 0 && text[length - 1] == '%')
		return parse_percent(text, &options->percent);
	options->percent = 0;
	return kv_parse_size(text, &options->budget);
}

static int parse_log(const char *text)
{
	enum kv_log_level level = kv_log_level_parse(text);

	if (level == _KV_LOG_INVALID)
		return -EINVAL;
	kv_log_setup(level, KV_LOG_STDERR);
	return 0;
}

static int parse_value(int id, const char *text, struct kvg_server_options *options)
{
	switch (id) {
	case OPTION_DEVICE:
		options->device = text;
		return 0;
	case OPTION_BACKEND:
		options->backend = text;
		return 0;
	case OPTION_HBM:
		return parse_hbm(text, options);
	case OPTION_SHARE:
		return parse_percent(text, &options->share);
	case OPTION_SEGMENT:
		return kv_parse_size(text, &options->segment) < 0 || options->segment == 0 ||
				       options->segment > SEGMENT_MAX
			       ? -EINVAL
			       : 0;
	case OPTION_UNSURE:
		return kv_parse_duration_ms(text, &options->unsure_ms);
	case OPTION_CHECK:
		options->check = strcmp(text, "sampled") == 0;
		return options->check || strcmp(text, "off") == 0 ? 0 : -EINVAL;
	case OPTION_SOCKET:
		options->socket = text;
		return 0;
	case OPTION_GROUP:
		options->group = text;
		return 0;
	default:
		return parse_log(text);
	}
}

/* 0: go on; 1: help or version was printed; negative: bad usage, said. */
static int parse_arguments(int argc, char **argv, struct kvg_server_options *options)
{
	static const struct option long_options[] = {
		{"device", required_argument, NULL, OPTION_DEVICE},
		{"backend", required_argument, NULL, OPTION_BACKEND},
		{"hbm", required_argument, NULL, OPTION_HBM},
		{"share", required_argument, NULL, OPTION_SHARE},
		{"segment", required_argument, NULL, OPTION_SEGMENT},
		{"socket", required_argument, NULL, OPTION_SOCKET},
		{"group", required_argument, NULL, OPTION_GROUP},
		{"check", required_argument, NULL, OPTION_CHECK},
		{"unsure", required_argument, NULL, OPTION_UNSURE},
		{"no-hints", no_argument, NULL, OPTION_NO_HINTS},
		{"no-kernels", no_argument, NULL, OPTION_NO_KERNELS},
		{"log", required_argument, NULL, OPTION_LOG},
		{"help", no_argument, NULL, 'h'},
		{"version", no_argument, NULL, 'V'},
		{0},
	};
	int id;

	opterr = 0;
	while ((id = getopt_long(argc, argv, ":hV", long_options, NULL)) != -1) {
		if (id == 'h' || id == 'V') {
			if (id == 'h')
				(void)fputs(help_text, stdout);
			else
				(void)printf("kvgpud %s\n", KV_VERSION);
			return 1;
		}
		if (id == OPTION_NO_HINTS)
			options->hints = false;
		else if (id == OPTION_NO_KERNELS)
			options->no_kernels = true;
		else if (id == '?' || id == ':')
			return fail(id == ':' ? "%.64s needs a value; see `kvgpud --help`"
					      : "unknown option '%.64s'; see `kvgpud --help`",
				argv[optind - 1]);
		else if (parse_value(id, optarg, options) < 0)
			return fail("bad value '%.64s'; see `kvgpud --help`", optarg);
	}
	if (argc - optind != 1)
		return fail("give a store: kvgpud STORE; see `kvgpud --help`");
	options->store = argv[optind];
	return 0;
}

int main(int argc, char **argv)
{
	struct kvg_server_options options = {
		.percent = 25,
		.segment = SEGMENT_DEFAULT,
		.unsure_ms = 30000,
		.hints = true,
	};
	struct kvg_server *server;
	char message[MESSAGE_SIZE];
	int r, status;

	kv_log_setup(KV_LOG_INFO, KV_LOG_STDERR);
	r = parse_arguments(argc, argv, &options);
	if (r != 0)
		return r < 0;
	/* Cached content is somebody's prompt: it must not end in a core file. */
	(void)prctl(PR_SET_DUMPABLE, 0);
	kv_raise_file_limit();
	if (kvg_server_new(&options, &server, message, sizeof(message)) < 0)
		return fail("%s", message) != 0;
	status = kvg_server_run(server);
	(void)kvg_server_free(server);
	return status;
}
