/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvfsd: the daemon. Parses its command line, opens the store, mounts, goes into the background
 * once the mount answers, and on the way out writes back and commits everything.
 */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>

#include "fs/daemon.h"
#include "fs/gpu.h"
#include "fs/guard.h"
#include "fs/handles.h"
#include "fs/lock.h"
#include "fs/log.h"
#include "fs/node.h"
#include "fs/notify.h"
#include "fs/parking.h"
#include "fs/parse.h"
#include "fs/passthrough.h"
#include "fs/privileges.h"
#include "fs/retry.h"
#include "fs/session.h"
#include "fs/supervise.h"
#include "fs/takeover.h"
#include "fs/teller.h"
#include "fs/users.h"
#include "index/space.h"

#define MESSAGE_SIZE 512u
/* How long a mount waits for the previous daemon of the store, which may still be writing back. */
#define CLOSING_WAIT_MS 60000u

struct arguments {
	const char *store;
	char directory[PATH_MAX]; /* absolute */
	struct kv_options options;
	char option_text[4096]; /* all of it, for who is started again */
	bool foreground;
};

/* ---- Command line ---- */

static void print_help(FILE *out)
{
	fprintf(out, "Usage: kvfsd STORE DIR [-o OPTION[,OPTION...]] [-f]\n"
		     "\n"
		     "Mounts the store STORE (made by `kvfs format`) on the directory DIR.\n"
		     "`umount DIR` ends the daemon after it has written everything back.\n"
		     "\n"
		     "  -o OPTIONS      mount options, see below\n"
		     "  -f              stay in the foreground, log to stderr\n"
		     "  -h, --help      this text\n"
		     "  -V, --version   the version\n"
		     "\n"
		     "Mount options:\n");
	kv_options_help(out);
}

static int fail(const char *message)
{
	fprintf(stderr, "kvfsd: %s\n", message);
	return -EINVAL;
}

static int parse_mountpoint(const char *path, char *ret_directory)
{
	char message[MESSAGE_SIZE];
	struct stat st;

	if (!realpath(path, ret_directory) || stat(ret_directory, &st) < 0) {
		(void)snprintf(message, sizeof(message), "%.400s: %s%s", path, strerror(errno),
			errno == ENOTCONN ? " (a dead mount: run `umount` on it first)" : "");
		return fail(message);
	}
	if (!S_ISDIR(st.st_mode)) {
		(void)snprintf(message, sizeof(message), "%.400s is not a directory", path);
		return fail(message);
	}
	return 0;
}

/* 0: go on; 1: help or version was printed; negative: bad usage, said. */
static int parse_arguments(int argc, char **argv, bool is_served, struct arguments *arguments)
{
	static const struct option long_options[] = {
		{"help", no_argument, NULL, 'h'},
		{"version", no_argument, NULL, 'V'},
		{0},
	};
	char message[MESSAGE_SIZE];
	int c;

	kv_options_init(&arguments->options);
	while ((c = getopt_long(argc, argv, "o:fhV", long_options, NULL)) != -1) {
		switch (c) {
		case 'o':
			if (strlen(arguments->option_text) + strlen(optarg) + 2 >
				sizeof(arguments->option_text))
				return fail("the options are too long; see `kvfsd --help`");
			(void)strcat(strcat(arguments->option_text, ","), optarg);
			if (kv_options_parse(
				    &arguments->options, optarg, message, sizeof(message)) < 0)
				return fail(message);
			break;
		case 'f':
			arguments->foreground = true;
			break;
		case 'h':
			print_help(stdout);
			return 1;
		case 'V':
			printf("kvfsd %s\n", KV_VERSION);
			return 1;
		default:
			return fail("see `kvfsd --help`");
		}
	}
	if (argc - optind != 2)
		return fail("give a store and a directory: kvfsd STORE DIR; see `kvfsd --help`");
	arguments->store = argv[optind];
	/* What the mount is on answers only when we do: its supervisor gave us the absolute path.
	 */
	if (is_served) {
		(void)snprintf(
			arguments->directory, sizeof(arguments->directory), "%s", argv[optind + 1]);
		return 0;
	}
	return parse_mountpoint(argv[optind + 1], arguments->directory);
}

/* ---- Background ---- */

/*
 * Forks before any thread exists. The parent waits until the child reports over the pipe, so that
 * errors appear where the user typed. Returns the pipe's end in the child; exits in the parent.
 */
static int go_background(void)
{
	unsigned char status = 1;
	int ends[2];
	pid_t child;

	if (pipe2(ends, O_CLOEXEC) < 0)
		return -errno;
	child = fork();
	if (child < 0)
		return -errno;
	if (child == 0) {
		(void)close(ends[0]);
		(void)setsid();
		return ends[1];
	}
	(void)close(ends[1]);
	if (read(ends[0], &status, 1) != 1)
		status = 1;
	_exit(status);
}

/* Tells the parent that the mount is up, and lets go of the terminal. */
static void report_ready(int pipe_end)
{
	const unsigned char status = 0;
	int null;

	if (pipe_end < 0)
		return;
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (null >= 0) {
		(void)dup2(null, STDIN_FILENO);
		(void)dup2(null, STDOUT_FILENO);
		(void)dup2(null, STDERR_FILENO);
		(void)close(null);
	}
	(void)chdir("/");
	(void)!write(pipe_end, &status, 1);
	(void)close(pipe_end);
}

/* ---- What the core asks of us ---- */

static int backing_open(void *arg, int fd)
{
	struct kv_daemon *daemon = arg;

	int id;

	if (!daemon->passthrough)
		return -EOPNOTSUPP;
	id = kv_passthrough_open(fuse_session_fd(daemon->session), fd);
	if (id > 0 && daemon->takeover)
		kv_takeover_backing(daemon->takeover, id);
	return id;
}

static void backing_close(void *arg, int backing_id)
{
	struct kv_daemon *daemon = arg;

	kv_passthrough_close(fuse_session_fd(daemon->session), backing_id);
	if (daemon->takeover)
		kv_takeover_no_backing(daemon->takeover, backing_id);
}

static void name_gone(void *arg, uint64_t parent, const char *name, size_t length)
{
	struct kv_daemon *daemon = arg;
	uint64_t directory = kv_node_directory_id(daemon, parent);

	if (directory != 0)
		(void)kv_notify_entry(daemon->notify, directory, name, length);
}

/* The kernel's entry goes, and the next LOOKUP makes a node that can be passed through. */
static void became_hot(void *arg, uint64_t ino)
{
	kv_node_retire_published(arg, ino);
	kv_node_notify_name(arg, ino);
}

/* What the kernel knows of it goes when it is closed: without this it would stay as a cached name.
 */
static void orphaned(
	void *arg, const struct kv_inode *inode, uint64_t parent, const char *name, size_t length)
{
	if (kv_node_orphan(arg, inode))
		name_gone(arg, parent, name, length);
}

static void changed(void *arg, uint64_t ino)
{
	struct kv_daemon *daemon = arg;

	kv_gpu_changed(daemon->gpu, ino);
}

/* ---- Life ---- */

static int open_store(struct kv_daemon *daemon, const char *path, char *ret_error)
{
	struct kv_store_open open = {
		.path = path,
		.quota_bytes = daemon->options.max_size_bytes,
		.stats = &daemon->stats,
		.closing_wait_ms = CLOSING_WAIT_MS,
		.journal = daemon->takeover ? kv_takeover_journal(daemon->takeover) : NULL,
	};
	int r = kv_store_open(&open, &daemon->store, ret_error, MESSAGE_SIZE);

	if (r < 0)
		return r;
	daemon->index = daemon->store->index;
	r = kv_index_watch_crashes(daemon->index);
	if (r < 0)
		(void)snprintf(
			ret_error, MESSAGE_SIZE, "%s cannot be watched: %s", path, strerror(-r));
	return r;
}

static uint64_t or_none(uint64_t max)
{
	return max > 0 ? max : UINT64_MAX;
}

static struct kv_users *make_users(struct kv_daemon *daemon)
{
	const struct kv_options *options = &daemon->options;
	struct kv_space_usage space;

	kv_space_usage(kv_index_space(daemon->index), &space);
	const struct kv_user_max max = {
		.files = or_none(options->user_files),
		.writers = or_none(options->user_writers),
		.blocks = options->user_space_percent < 100
				  ? space.total / 100 * options->user_space_percent
				  : UINT64_MAX,
		.dirty = options->user_dirty_percent < 100
				 ? KV_DIRTY_LIMIT(options->dram_bytes) / KV_BLOCK_SIZE *
					   options->user_dirty_percent / 100
				 : UINT64_MAX,
	};

	return kv_users_new(&max, &daemon->stats);
}

static int start_core(struct kv_daemon *daemon, char *ret_error)
{
	struct kv_core_options options = {
		.options = &daemon->options,
		.store = daemon->store,
		.stats = &daemon->stats,
		.dram_is_shared = daemon->takeover != NULL,
		.dram_mount = daemon->dram_fd,
		.unsettled = daemon->takeover ? kv_takeover_unsettled(daemon->takeover) : NULL,
		.awaits_word = daemon->takeover != NULL,
		.hooks =
			{
				.arg = daemon,
				.backing_open = backing_open,
				.backing_close = backing_close,
				.name_gone = name_gone,
				.became_hot = became_hot,
				.orphaned = orphaned,
				.changed = changed,
			},
	};
	int r;

	daemon->retries = kv_retries_new();
	daemon->reader_retries = kv_retries_new();
	daemon->locks = kv_locks_new();
	daemon->users = make_users(daemon);
	r = daemon->retries && daemon->reader_retries && daemon->locks && daemon->users
		    ? kv_nodes_new(daemon, &daemon->nodes)
		    : -ENOMEM;
	if (r == 0)
		r = kv_notify_new(daemon, &daemon->notify);
	if (r == 0)
		r = kv_parking_new(daemon, &daemon->parking);
	if (r < 0) {
		(void)snprintf(ret_error, MESSAGE_SIZE, "%s", strerror(-r));
		return r;
	}
	return kv_core_new(&options, &daemon->core, ret_error, MESSAGE_SIZE);
}

static void log_mounted(struct kv_daemon *daemon, const char *directory)
{
	struct kv_dram_usage dram;
	char dram_size[16];
	char store_size[16];
	uint64_t total = 0;

	kv_dram_usage(kv_core_dram(daemon->core), &dram);
	for (unsigned i = 0; i < kv_devices_count(daemon->store->devices); i++) {
		struct kv_device_info info;

		kv_devices_info(daemon->store->devices, i, &info);
		total += info.blocks * KV_BLOCK_SIZE;
	}
	kv_log_info("mount",
		"ready store=%s dir=%s devices=%u size=%s dram=%s dram_kind=%s mode=%s "
		"reason=\"%s\" version=%s",
		daemon->store->path, directory, kv_devices_count(daemon->store->devices),
		kv_format_size(total, store_size, sizeof(store_size)),
		kv_format_size(dram.budget, dram_size, sizeof(dram_size)),
		dram.tmpfs ? "tmpfs" : "memfd", daemon->passthrough ? "passthrough" : "daemon",
		daemon->passthrough_reason, KV_VERSION);
}

/*
 * The order matters: the kernel goes first, then what it knew (nodes), then the core, which
 * writes back; it may still notify until it is gone.
 */
static void stop(struct kv_daemon *daemon)
{
	if (daemon->store)
		kv_store_closing(daemon->store);
	kv_session_stop(daemon);
	kv_handles_done(daemon);
	kv_parking_stop(daemon->parking);
	kv_nodes_clear(daemon->nodes);
	kv_gpu_stop(daemon->gpu);
	daemon->retries = kv_retries_free(daemon->retries);
	daemon->reader_retries = kv_retries_free(daemon->reader_retries);
	daemon->locks = kv_locks_free(daemon->locks);
	daemon->core = kv_core_free(daemon->core);
	if (daemon->core) {
		/* A device may still write to memory of ours: it goes with the process. */
		daemon->guard = kv_guard_free(daemon->guard);
		_exit(1);
	}
	/* What the core's hooks use, which come until its end. */
	daemon->gpu = kv_gpu_free(daemon->gpu);
	daemon->notify = kv_notify_free(daemon->notify);
	daemon->teller = kv_teller_free(daemon->teller);
	daemon->parking = kv_parking_free(daemon->parking);
	daemon->nodes = kv_nodes_free(daemon->nodes);
	daemon->users = kv_users_free(daemon->users);
	kv_session_free(daemon);
	daemon->guard = kv_guard_free(daemon->guard);
	daemon->store = kv_store_close(daemon->store);
	daemon->takeover = kv_takeover_free(daemon->takeover);
}

static int run(struct kv_daemon *daemon, const struct arguments *arguments, int pipe_end)
{
	char message[MESSAGE_SIZE];
	/* The supervisor does what the guard would, and better. */
	int r = daemon->takeover ? 0 : kv_guard_new(&daemon->guard);

	if (r == 0 && daemon->takeover)
		r = kv_teller_new(daemon->fuse_fd, &daemon->teller);
	if (r < 0)
		return fail(strerror(-r));
	daemon->directory = arguments->directory;
	daemon->main_thread = pthread_self();
	r = open_store(daemon, arguments->store, message);
	if (r == 0)
		r = start_core(daemon, message);
	if (r == 0)
		r = kv_session_start(daemon, arguments->directory, message, sizeof(message));
	if (r < 0) {
		fail(message);
		return r;
	}
	daemon->start_ns = kv_core_now_ns(daemon->core);
	if (fuse_set_signal_handlers(daemon->session) != 0)
		return fail("cannot set signal handlers");
	if (!arguments->foreground)
		kv_log_setup(daemon->options.log_level, KV_LOG_SYSLOG);
	log_mounted(daemon, arguments->directory);
	report_ready(pipe_end);
	r = kv_session_loop(daemon);
	fuse_remove_signal_handlers(daemon->session);
	if (r < 0)
		kv_log_error("mount", "request loop ended error=%s", strerror(-r));
	return r;
}

/* Holds the mount for daemons that run one after the other. */
static int supervise(struct arguments *arguments, char **argv, int pipe_end)
{
	/* Later daemons start elsewhere. One that is not there is for the first one to name. */
	_cleanup_free_ char *path = realpath(arguments->store, NULL);
	const char *store = path ? path : arguments->store;
	const char *const words[] = {argv[0], store, arguments->directory, "-o",
		arguments->option_text, arguments->foreground ? "-f" : NULL, NULL};
	const struct kv_supervise options = {
		.store = store,
		.directory = arguments->directory,
		.dram_bytes = arguments->options.dram_bytes,
		.log_level = arguments->options.log_level,
		.allow_other = arguments->options.allow_other,
		.foreground = arguments->foreground,
		.ready_fd = pipe_end,
		.argv = words,
	};

	return kv_supervise(&options);
}

int main(int argc, char **argv)
{
	struct arguments arguments = {0};
	struct kv_daemon daemon = {0};
	struct kv_served served;
	int pipe_end = -1;
	bool is_served = kv_supervise_inherit(&served);
	int r = parse_arguments(argc, argv, is_served, &arguments);

	if (r != 0)
		return r < 0;
	daemon.options = arguments.options;
	kv_log_setup(daemon.options.log_level, KV_LOG_STDERR);
	kv_raise_file_limit();
	r = kv_privileges_drop();
	if (r < 0)
		return fail(strerror(-r)) != 0;
	if (!arguments.foreground && served.fuse_fd < 0) {
		pipe_end = go_background();
		if (pipe_end < 0)
			return fail(strerror(-pipe_end)) != 0;
	}
	if (served.fuse_fd >= 0) {
		pipe_end = served.ready_fd;
		daemon.fuse_fd = served.fuse_fd;
		daemon.dram_fd = served.dram_fd;
		r = kv_takeover_new(served.state_fd, &daemon.takeover);
		if (r < 0)
			return fail("cannot take over from another version of kvfsd") != 0;
	} else if (daemon.options.restart) {
		return supervise(&arguments, argv, pipe_end);
	}
	r = run(&daemon, &arguments, pipe_end);
	stop(&daemon);
	if (daemon.start_ns != 0)
		kv_log_info("mount", "ended dir=%s", arguments.directory);
	return r < 0;
}
