/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hangfs FILE DIR: a filesystem with one file, "data", that is FILE; while FILE.hang exists, nobody
 * who reads, writes or flushes it gets an answer. A drive that hangs, for tests.
 */
#define FUSE_USE_VERSION 317
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DATA_INO 2
#define THREADS 64

static struct {
	int fd;
	char hang_path[4096];
} arg;

static void wait_while_hung(void)
{
	while (access(arg.hang_path, F_OK) == 0)
		(void)usleep(5000);
}

static int attributes(fuse_ino_t ino, struct stat *ret_st)
{
	memset(ret_st, 0, sizeof(*ret_st));
	if (ino == DATA_INO && fstat(arg.fd, ret_st) < 0)
		return errno;
	if (ino == FUSE_ROOT_ID)
		ret_st->st_mode = S_IFDIR | 0755;
	ret_st->st_nlink = 1;
	ret_st->st_ino = ino;
	return 0;
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct fuse_entry_param entry = {.ino = DATA_INO, .attr_timeout = 1, .entry_timeout = 1};
	int error = parent == FUSE_ROOT_ID && strcmp(name, "data") == 0
			    ? attributes(DATA_INO, &entry.attr)
			    : ENOENT;

	if (error)
		(void)fuse_reply_err(req, error);
	else
		(void)fuse_reply_entry(req, &entry);
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct stat st;
	int error = attributes(ino, &st);

	(void)fi;
	if (error)
		(void)fuse_reply_err(req, error);
	else
		(void)fuse_reply_attr(req, &st, 1);
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino;
	fi->direct_io = 1;
	fi->parallel_direct_writes = 1;
	(void)fuse_reply_open(req, fi);
}

static void op_read(
	fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
{
	char *buffer = malloc(size);
	ssize_t n;

	(void)ino;
	(void)fi;
	wait_while_hung();
	n = buffer ? pread(arg.fd, buffer, size, offset) : -1;
	if (n < 0)
		(void)fuse_reply_err(req, EIO);
	else
		(void)fuse_reply_buf(req, buffer, (size_t)n);
	free(buffer);
}

static void op_write(fuse_req_t req, fuse_ino_t ino, const char *bytes, size_t size, off_t offset,
	struct fuse_file_info *fi)
{
	ssize_t n;

	(void)ino;
	(void)fi;
	wait_while_hung();
	n = pwrite(arg.fd, bytes, size, offset);
	if (n < 0)
		(void)fuse_reply_err(req, EIO);
	else
		(void)fuse_reply_write(req, (size_t)n);
}

static void op_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi)
{
	(void)ino;
	(void)datasync;
	(void)fi;
	wait_while_hung();
	(void)fuse_reply_err(req, 0);
}

static const struct fuse_lowlevel_ops ops = {
	.lookup = op_lookup,
	.getattr = op_getattr,
	.open = op_open,
	.read = op_read,
	.write = op_write,
	.fsync = op_fsync,
};

static int serve(const char *program, const char *directory)
{
	char *words[] = {(char *)(uintptr_t)program, NULL};
	struct fuse_args args = FUSE_ARGS_INIT(1, words);
	struct fuse_session *session = fuse_session_new(&args, &ops, sizeof(ops), NULL);
	struct fuse_loop_config *config = fuse_loop_cfg_create();
	int r = -1;

	if (!session || !config)
		return 1;
	fuse_loop_cfg_set_max_threads(config, THREADS);
	fuse_loop_cfg_set_idle_threads(config, THREADS);
	if (fuse_session_mount(session, directory) == 0) {
		r = fuse_session_loop_mt(session, config);
		fuse_session_unmount(session);
	}
	fuse_loop_cfg_destroy(config);
	fuse_session_destroy(session);
	return r != 0;
}

int main(int argc, char **argv)
{
	if (argc != 3) {
		(void)fprintf(stderr, "usage: hangfs FILE DIR\n");
		return 2;
	}
	arg.fd = open(argv[1], O_RDWR | O_CLOEXEC);
	(void)snprintf(arg.hang_path, sizeof(arg.hang_path), "%s.hang", argv[1]);
	if (arg.fd < 0) {
		perror(argv[1]);
		return 1;
	}
	return serve(argv[0], argv[2]);
}
