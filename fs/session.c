/* SPDX-License-Identifier: Apache-2.0 */
/* Mounting, the INIT handshake and the loop: see session.h. */

#include "fs/session.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>

#include "fs/gpu.h"
#include "fs/guard.h"
#include "fs/log.h"
#include "fs/node.h"
#include "fs/ops.h"
#include "fs/passthrough.h"
#include "fs/request.h"
#include "fs/resume.h"
#include "fs/send.h"
#include "fs/supervise.h"
#include "fs/takeover.h"
#include "fs/wait.h"
#include "fs/workers.h"

/*
 * Bytes one request carries: a huge page, so that a large write comes into one at once. The kernel
 * cuts at its own limit, by default 1 MiB, which is all there was before Linux 6.13.
 */
#define REQUEST_SIZE (2 * KV_CHUNK_SIZE)
#define REQUEST_PAGES (REQUEST_SIZE / 4096)
#define REQUEST_LIMIT "/proc/sys/fs/fuse/max_pages_limit"
/* What is before the bytes of a WRITE: fuse_in_header and fuse_write_in of <linux/fuse.h>. */
#define REQUEST_HEADER 80u
/* What libfuse wants to have room for beside the bytes (FUSE_BUFFER_HEADER_SIZE). */
#define REQUEST_SPARE 4096u
/* Workers block while a cold file is filled or write-back is behind, so there may be many. */
#define WORKERS_MAX 256u
#define BACKGROUND_MAX 64u
/* How often what ends something is handled for which there is no memory, and the first pause. */
#define END_TRIES_MAX 17u
#define END_WAIT_US 1000u
/* FUSE 7.44, Linux 6.16: names that the kernel knows can be taken back all at once. */
#define RESTART_MINOR 44u
/* How long a planned restart waits for who writes. */
#define DRAIN_MS 30000u
/* How long backing files of the daemons before are kept: the kernel may be at an open by one. */
#define RELEASE_MS 2000
#define RELEASE_LOOK_NS 250000000L
/* Readahead for mappings that the daemon serves: the default of 128 KiB makes small requests. */
#define READ_AHEAD_KB 4096

static void op_init(void *userdata, struct fuse_conn_info *conn)
{
	struct kv_daemon *daemon = userdata;

	/* Content changes only with a node, so the kernel need not look for changes itself. */
	(void)fuse_unset_feature_flag(conn, FUSE_CAP_AUTO_INVAL_DATA);
	(void)fuse_set_feature_flag(conn, FUSE_CAP_EXPLICIT_INVAL_DATA);
	(void)fuse_set_feature_flag(conn, FUSE_CAP_HANDLE_KILLPRIV_V2);
	(void)fuse_set_feature_flag(conn, FUSE_CAP_PARALLEL_DIROPS);
	(void)fuse_set_feature_flag(conn, FUSE_CAP_CACHE_SYMLINKS);
	(void)fuse_set_feature_flag(conn, FUSE_CAP_DIRECT_IO_ALLOW_MMAP);
	(void)fuse_set_feature_flag(conn, FUSE_CAP_NO_EXPORT_SUPPORT);
	(void)fuse_unset_feature_flag(conn, FUSE_CAP_SPLICE_READ);
	conn->max_write = REQUEST_SIZE;
	conn->max_background = BACKGROUND_MAX;
	if (daemon->options.passthrough != KV_PASSTHROUGH_OFF) {
		daemon->init_passthrough = fuse_set_feature_flag(conn, FUSE_CAP_PASSTHROUGH);
		conn->max_backing_stack_depth = 1;
	}
	daemon->max_write = conn->max_write;
	daemon->proto_minor = conn->proto_minor;
	/* The loop in answer_init. */
	fuse_session_exit(daemon->session);
}

static void fill_ops(struct fuse_lowlevel_ops *ops)
{
	ops->init = op_init;
	kv_ops_name(ops);
	kv_ops_attr(ops);
	kv_ops_open(ops);
	kv_ops_file(ops);
	kv_ops_dir(ops);
	kv_ops_ioctl(ops);
	kv_ops_lock(ops);
}

static int add_option(struct fuse_args *args, const char *option)
{
	return fuse_opt_add_arg(args, "-o") == 0 && fuse_opt_add_arg(args, option) == 0 ? 0
											: -ENOMEM;
}

/* The limit is the host's, for all FUSE mounts to come: it is raised where it is too low. */
static void raise_request_limit(void)
{
	_cleanup_fd_ int fd = open(REQUEST_LIMIT, O_RDWR | O_CLOEXEC);
	char text[16] = "";

	if (fd < 0 || pread(fd, text, sizeof(text) - 1, 0) <= 0 ||
		(strtoul(text, NULL, 10) < REQUEST_PAGES && dprintf(fd, "%d", REQUEST_PAGES) < 0))
		kv_log_debug("mount", "requests stay at the default size path=%s error=%s",
			REQUEST_LIMIT, strerror(errno));
}

static int session_new(struct kv_daemon *daemon)
{
	struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
	struct fuse_lowlevel_ops ops = {0};
	char source[4096];
	int r = 0;

	/* A comma would end the option; the source is only for people to read. */
	(void)snprintf(source, sizeof(source), "fsname=kvfs:%.4000s", daemon->store->path);
	for (char *p = source; *p; p++)
		if (*p == ',')
			*p = '_';
	if (fuse_opt_add_arg(&args, "kvfsd") < 0)
		r = -ENOMEM;
	if (r == 0)
		r = add_option(&args, source);
	if (r == 0)
		r = add_option(&args, "subtype=kvfs,default_permissions");
	if (r == 0 && daemon->options.allow_other)
		r = add_option(&args, "allow_other");
	fill_ops(&ops);
	raise_request_limit();
	if (r == 0) {
		daemon->session = fuse_session_new(&args, &ops, sizeof(ops), daemon);
		if (!daemon->session)
			r = -EINVAL;
	}
	fuse_opt_free_args(&args);
	return r;
}

/*
 * The first request of a connection is INIT; answers it. By libfuse's own loop, for only with
 * buffers of its own does it agree to requests of more than 1 MiB; op_init ends it.
 */
static int answer_init(struct kv_daemon *daemon)
{
	int r = fuse_session_loop(daemon->session);

	daemon->initialised = true;
	if (r != 0 || daemon->init_refused)
		return r < 0 ? r : -EPROTO;
	return daemon->proto_minor == 0 ? -ENODEV : 0;
}

/* Tries passthrough once with a file of the DRAM tier; if it fails, the whole mount goes without.
 */
static int probe_passthrough(struct kv_daemon *daemon)
{
	struct kv_object *object;
	int id;
	int fd;
	int r = kv_object_new(kv_core_dram(daemon->core), 0, 0, &object);

	if (r < 0)
		return r;
	fd = kv_object_get(object);
	id = fd < 0 ? fd : kv_passthrough_open(fuse_session_fd(daemon->session), fd);
	if (id > 0)
		kv_passthrough_close(fuse_session_fd(daemon->session), id);
	if (fd >= 0)
		kv_object_put(object);
	kv_object_free(object);
	return id < 0 ? id : 0;
}

static void decide_passthrough(struct kv_daemon *daemon)
{
	const char *reason = "-";
	int r = 0;

	if (daemon->options.passthrough == KV_PASSTHROUGH_OFF) {
		reason = "switched off by -o passthrough=off";
	} else if (!daemon->init_passthrough) {
		reason = "the kernel does not offer it (needs Linux 6.9 with FUSE_PASSTHROUGH)";
	} else {
		r = probe_passthrough(daemon);
		daemon->passthrough = r == 0;
		if (r == -EPERM)
			reason = "needs CAP_SYS_ADMIN in the initial user namespace";
		else if (r < 0)
			reason = strerror(-r);
	}
	(void)snprintf(
		daemon->passthrough_reason, sizeof(daemon->passthrough_reason), "%s", reason);
}

/* The device number of the mount, found without a request to ourselves. */
static int find_device(const char *directory, unsigned *ret_major, unsigned *ret_minor)
{
	FILE *file = fopen("/proc/self/mountinfo", "re");
	_cleanup_free_ char *line = NULL;
	size_t size = 0;
	int r = -ENOENT;

	if (!file)
		return -errno;
	while (getline(&line, &size, file) > 0) {
		unsigned major_number;
		unsigned minor_number;
		char path[4097];

		if (sscanf(line, "%*s %*s %u:%u %*s %4096s", &major_number, &minor_number, path) ==
				3 &&
			strcmp(path, directory) == 0) {
			*ret_major = major_number;
			*ret_minor = minor_number;
			r = 0; /* the last one is the one on top */
		}
	}
	(void)fclose(file);
	return r;
}

static void raise_read_ahead(unsigned major_number, unsigned minor_number)
{
	char path[64];
	_cleanup_fd_ int fd = -1;

	(void)snprintf(path, sizeof(path), "/sys/class/bdi/%u:%u/read_ahead_kb", major_number,
		minor_number);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || dprintf(fd, "%d", READ_AHEAD_KB) < 0)
		kv_log_debug("mount", "read-ahead stays at the default path=%s error=%s", path,
			strerror(errno));
}

int kv_session_start(
	struct kv_daemon *daemon, const char *directory, char *ret_error, size_t error_size)
{
	unsigned major_number;
	unsigned minor_number;
	int r = session_new(daemon);

	if (r == 0 && daemon->takeover)
		r = kv_resume_attach(daemon, daemon->session, daemon->fuse_fd);
	if (r < 0) {
		(void)snprintf(
			ret_error, error_size, "cannot make a FUSE session: %s", strerror(-r));
		return r;
	}
	if (!daemon->takeover && fuse_session_mount(daemon->session, directory) != 0) {
		(void)snprintf(ret_error, error_size,
			"cannot mount on %s: is /dev/fuse there, and are you root (or is "
			"fusermount3 installed)?",
			directory);
		return -EPERM;
	}
	r = daemon->takeover ? 0 : kv_send_attach(daemon->session);
	if (r == 0)
		r = answer_init(daemon);
	if (r < 0) {
		(void)snprintf(ret_error, error_size, "the kernel's FUSE handshake failed: %s",
			strerror(-r));
		return r;
	}
	if (daemon->takeover && daemon->proto_minor < RESTART_MINOR) {
		(void)snprintf(ret_error, error_size, "restart needs Linux 6.16; leave it out");
		return -EOPNOTSUPP;
	}
	decide_passthrough(daemon);
	if (daemon->options.passthrough == KV_PASSTHROUGH_ON && !daemon->passthrough) {
		(void)snprintf(ret_error, error_size,
			"passthrough=on, but it is not possible: %s; use passthrough=auto",
			daemon->passthrough_reason);
		return -EOPNOTSUPP;
	}
	if (find_device(directory, &major_number, &minor_number) == 0) {
		if (daemon->guard)
			kv_guard_arm(daemon->guard, minor_number);
		raise_read_ahead(major_number, minor_number);
		/* It says so itself where it cannot; the mount goes without. */
		(void)kv_gpu_new(daemon, makedev(major_number, minor_number), &daemon->gpu);
	}
	if (!daemon->takeover)
		return 0;
	kv_core_take_up(daemon->core);
	r = kv_resume_nodes(daemon);
	kv_core_drop_held(daemon->core);
	kv_core_go_on(daemon->core);
	if (r == 0 && kv_takeover_resumes(daemon->takeover))
		r = kv_resume_requests(daemon);
	if (r < 0)
		(void)snprintf(
			ret_error, error_size, "the kernel refuses to go on: %s", strerror(-r));
	return r;
}

/* Waits for the supervisor's word that another daemon is to go on. */
static void *next_main(void *arg)
{
	struct kv_daemon *daemon = arg;
	const struct timespec a_moment = {.tv_nsec = RELEASE_LOOK_NS};
	sigset_t signals;
	int number;

	(void)sigemptyset(&signals);
	(void)sigaddset(&signals, SIGUSR1);
	do
		number = sigtimedwait(&signals, NULL, &a_moment);
	while (number != SIGUSR1 && kv_resume_release(daemon, RELEASE_MS) > 0);
	while (number != SIGUSR1)
		number = sigwaitinfo(&signals, NULL);
	(void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	kv_log_info("resume", "making way for the next daemon");
	int r = kv_resume_drain(daemon, DRAIN_MS);
	if (r == -ECANCELED)
		return NULL;
	if (r < 0)
		kv_log_warning("resume",
			"files are still open for writing: their writers will get EIO files=%llu",
			(unsigned long long)kv_nodes_writers(daemon->nodes));
	/* What is under way now is the next one's: it only looks, and is sent again. */
	_exit(KV_SUPERVISE_NEXT);
}

/* Where the kernel writes to: a request lies behind the first page but for its header. */
#define REQUEST_ROOM (KV_BLOCK_SIZE + REQUEST_SIZE + REQUEST_SPARE)

/*
 * Memory for a request, and where in it one begins so that the bytes of a WRITE lie in whole pages:
 * the kernel copies a page at a time, and looks up each that it copies to. A huge page makes that
 * cheaper.
 *
 * Where another daemon may go on, all of its pages are there before a request is asked for: one
 * that is on its way when this process is killed arrives and is sent again, but if a page has to be
 * made first, the kernel gives that up for the kill and the request fails (Linux mm/gup.c, by way
 * of fs/fuse/dev.c, fuse_dev_do_read).
 */
static void *request_memory(const struct kv_daemon *daemon)
{
	void *memory = aligned_alloc(REQUEST_SIZE, 2 * REQUEST_SIZE);

	if (!memory)
		return NULL;
	(void)madvise(memory, REQUEST_SIZE, MADV_HUGEPAGE);
	if (daemon->takeover)
		(void)madvise(memory, REQUEST_ROOM, MADV_POPULATE_WRITE);
	return memory;
}

static void *request_in(void *memory)
{
	static_assert(REQUEST_ROOM <= 2 * REQUEST_SIZE, "fits");
	return (uint8_t *)memory + KV_BLOCK_SIZE - REQUEST_HEADER;
}

static int receive_request(void *arg, void **memory)
{
	const struct kv_daemon *daemon = arg;
	struct fuse_buf buffer = {0};

	if (!*memory)
		*memory = request_memory(daemon);
	if (!*memory)
		return -ENOMEM;
	buffer.mem = request_in(*memory);
	return fuse_session_receive_buf(daemon->session, &buffer);
}

/*
 * RELEASE and FORGET come once. Where libfuse has no memory for one, which is less than that of any
 * request that makes something, it gets it again and again, for a minute: what it would end stays
 * until the mount ends otherwise.
 */
static void handle_end(struct fuse_session *session, const struct fuse_buf *buffer, uint64_t unique)
{
	unsigned wait_us = END_WAIT_US;

	for (unsigned i = 1; i < END_TRIES_MAX; i++, wait_us *= 2) {
		kv_send_keep(unique);
		fuse_session_process_buf(session, buffer);
		bool again = kv_send_was_kept();
		kv_send_keep(0);
		if (!again)
			return;
		kv_wait_begins();
		(void)usleep(wait_us);
	}
	kv_log_error("fuse", "no memory for the end of an open file or a name, which is lost");
	fuse_session_process_buf(session, buffer);
}

static void handle_request(void *arg, void *memory, size_t size)
{
	const struct kv_daemon *daemon = arg;
	const struct fuse_buf buffer = {.mem = request_in(memory), .size = size};
	const struct fuse_in_header *request = buffer.mem;

	if (size >= sizeof(*request))
		kv_request_begin(request->unique);
	if (size >= sizeof(*request) && kv_send_is_end(request->opcode))
		handle_end(daemon->session, &buffer, request->unique);
	else
		fuse_session_process_buf(daemon->session, &buffer);
}

static bool has_ended(void *arg)
{
	const struct kv_daemon *daemon = arg;

	return fuse_session_exited(daemon->session);
}

int kv_session_loop(struct kv_daemon *daemon)
{
	const struct kv_workers_source source = {
		.fd = fuse_session_fd(daemon->session),
		.receive = receive_request,
		.handle = handle_request,
		.has_ended = has_ended,
		.arg = daemon,
		.threads_max = WORKERS_MAX,
	};
	int r;

	if (daemon->takeover)
		daemon->has_next_thread =
			pthread_create(&daemon->next_thread, NULL, next_main, daemon) == 0;
	r = kv_workers_run(&source);
	fuse_session_reset(daemon->session);
	return r;
}

void kv_session_stop(struct kv_daemon *daemon)
{
	if (daemon->has_next_thread) {
		atomic_store(&daemon->ending, true);
		(void)pthread_cancel(daemon->next_thread);
		(void)pthread_join(daemon->next_thread, NULL);
		daemon->has_next_thread = false;
	}
	if (daemon->session && daemon->takeover)
		kv_supervise_unmount(daemon->directory, fuse_session_fd(daemon->session));
	else if (daemon->session)
		fuse_session_unmount(daemon->session);
}

void kv_session_free(struct kv_daemon *daemon)
{
	if (daemon->session)
		fuse_session_destroy(daemon->session);
	daemon->session = NULL;
}
