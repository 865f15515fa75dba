/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon that does nothing: see stand_in.h. */
#include "tests/fuzz/stand_in.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "fs/device.h"
#include "fs/gpu.h"
#include "fs/kvfs_ioctl.h"
#include "fs/lookup.h"
#include "fs/notify.h"
#include "fs/parking.h"
#include "fs/passthrough.h"
#include "fs/reply.h"
#include "fs/users.h"
#include "index/space.h"

#define FILES 3u

struct kv_version {
	uint64_t number;
	uint64_t ino;
};

struct kv_file {
	uint64_t ino;
};

static struct kv_version versions[FILES] = {{1, 2}, {70, 3}, {UINT64_MAX, 4}};
static struct kv_file files[FILES] = {{2}, {3}, {4}};
static struct kv_node nodes[FILES + 1] = {
	{.ino = 1, .kind = KV_NODE_DIRECTORY},
	{.ino = 2, .kind = KV_NODE_PUBLISHED},
	{.ino = 3, .kind = KV_NODE_WRITING},
	{.ino = 4, .kind = KV_NODE_PUBLISHED},
};
static char store_path[] = "/store";
static struct kv_store store = {.path = store_path, .directory_fd = -1};
static struct fuse_ctx context;
static unsigned answers;
static int held;

struct kv_daemon stand_in = {.store = &store};

fuse_req_t stand_in_request(uint32_t uid)
{
	context = (struct fuse_ctx){.uid = uid, .gid = uid, .pid = 1};
	return (fuse_req_t)&context;
}

struct kv_node *stand_in_node(uint64_t ino)
{
	return &nodes[ino % (FILES + 1)];
}

struct kv_version *stand_in_version(uint64_t ino)
{
	return kv_version_ref(&versions[ino % FILES]);
}

unsigned stand_in_answers(void)
{
	unsigned count = answers;

	answers = 0;
	return count;
}

int stand_in_held(void)
{
	return held;
}

/* ---- Requests ---- */

const struct fuse_ctx *fuse_req_ctx(fuse_req_t req)
{
	return (const struct fuse_ctx *)req;
}

void *fuse_req_userdata(fuse_req_t req)
{
	(void)req;
	return &stand_in;
}

int fuse_req_getgroups(fuse_req_t req, int size, gid_t list[])
{
	(void)req;
	for (int i = 0; i < size && i < 3; i++)
		list[i] = (gid_t)i;
	return 3;
}

int fuse_reply_ioctl(fuse_req_t req, int result, const void *answer, size_t size)
{
	static volatile uint8_t sum;

	(void)req;
	(void)result;
	/* Reads all of it: the sanitizers see whether it is there. */
	for (size_t i = 0; i < size; i++)
		sum = (uint8_t)(sum ^ ((const uint8_t *)answer)[i]);
	answers++;
	return 0;
}

void kv_reply_error(fuse_req_t req, int error)
{
	(void)req;
	if (error < -4095 || error > 4095)
		abort();
	answers++;
}

void kv_reply_check(struct kv_daemon *daemon, int result)
{
	(void)daemon;
	(void)result;
}

void kv_notify_then_reply_ioctl(
	struct kv_notify *notify, fuse_req_t req, const void *answer, size_t size)
{
	(void)notify;
	(void)fuse_reply_ioctl(req, 0, answer, size);
}

int kv_notify_entry(struct kv_notify *notify, uint64_t directory, const char *name, size_t length)
{
	(void)notify;
	(void)directory;
	return strlen(name) == length ? 0 : -EINVAL;
}

int kv_notify_attributes(struct kv_notify *notify, uint64_t nodeid)
{
	(void)notify;
	(void)nodeid;
	return 0;
}

/* ---- Nodes ---- */

struct kv_node *kv_node_find(struct kv_daemon *daemon, uint64_t nodeid)
{
	(void)daemon;
	return stand_in_node(nodeid);
}

uint64_t kv_node_directory_id(struct kv_daemon *daemon, uint64_t ino)
{
	(void)daemon;
	return ino;
}

bool kv_node_orphan(struct kv_daemon *daemon, const struct kv_inode *inode)
{
	(void)daemon;
	return inode->ino % 2;
}

void kv_node_drop_pages(struct kv_daemon *daemon, uint64_t ino)
{
	(void)daemon;
	(void)ino;
}

struct kv_version *kv_node_unpublished_version(struct kv_daemon *daemon, struct kv_file *file)
{
	(void)daemon;
	return file->ino % 2 ? stand_in_version(file->ino) : NULL;
}

uint64_t kv_nodes_count(struct kv_nodes *all)
{
	(void)all;
	return FILES + 1;
}

unsigned kv_parking_count(struct kv_parking *parking)
{
	(void)parking;
	return 0;
}

void kv_users_print(struct kv_users *users, FILE *out)
{
	(void)users;
	fprintf(out, "user 1 2 3 4\n");
}

int kv_gpu_ticket(
	struct kv_gpu *gpu, struct kv_handle *handle, uid_t uid, struct kvfs_ticket *ret_ticket)
{
	(void)gpu;
	(void)handle;
	memset(ret_ticket, (int)uid, sizeof(*ret_ticket));
	return uid % 2 ? -EBUSY : 0;
}

int kv_gpu_look(const struct kv_handle *handle, struct kvfs_ticket *ret_ticket)
{
	(void)handle;
	memset(ret_ticket, 1, sizeof(*ret_ticket));
	return 0;
}

/* ---- Files and versions ---- */

int kv_file_get(struct kv_core *core, uint64_t ino, struct kv_file **ret_file)
{
	*ret_file = kv_file_find(core, ino);
	return *ret_file ? 0 : -ENOENT;
}

struct kv_file *kv_file_find(struct kv_core *core, uint64_t ino)
{
	(void)core;
	if (ino < 2 || ino >= 2 + FILES)
		return NULL;
	held++;
	return &files[ino - 2];
}

struct kv_file *kv_file_put(struct kv_file *file)
{
	held -= file != NULL;
	return NULL;
}

void kv_file_opened(struct kv_file *file)
{
	(void)file;
	held++;
}

void kv_file_closed(struct kv_file *file)
{
	(void)file;
	held--;
}

void kv_file_note_uses(struct kv_file *file)
{
	(void)file;
}

int kv_file_current(struct kv_file *file, struct kv_version **ret_version)
{
	if (file->ino == 3)
		return -ENOENT;
	*ret_version = stand_in_version(file->ino - 2);
	return 0;
}

struct kv_version *kv_version_ref(struct kv_version *version)
{
	held++;
	return version;
}

struct kv_version *kv_version_unref(struct kv_version *version)
{
	held -= version != NULL;
	return NULL;
}

void kv_version_attr(struct kv_version *version, struct kv_version_attr *ret_attr)
{
	*ret_attr = (struct kv_version_attr){
		.number = version->number,
		.size = version->number << 20,
		.published = version->number != 70,
		.committed = version->number == 1,
	};
}

int kv_version_open(struct kv_version *version, bool direct, enum kv_access *ret_access)
{
	(void)direct;
	if (version->number == 70)
		return -ENOENT;
	held++;
	*ret_access = version->number == 1 ? KV_ACCESS_HOT : KV_ACCESS_STREAM;
	return 0;
}

void kv_version_close(struct kv_version *version)
{
	(void)version;
	held--;
}

int kv_version_share(struct kv_version *version)
{
	(void)version;
	return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* Chunks of every state and number of extents. */
int kv_version_map(struct kv_version *version, uint32_t first,
	bool (*chunk)(void *arg, const struct kv_chunk_info *info), void *arg)
{
	static struct kv_extent extents[KV_CHUNK_BLOCKS];

	for (uint32_t i = first; i < first + 200; i++) {
		struct kv_chunk_info info = {
			.number = i,
			.state = i % _KV_CHUNK_STATE_MAX,
			.sum = i * version->number,
			.extents = extents,
		};

		if (info.state == KV_CHUNK_COLD || info.state == KV_CHUNK_HOT)
			info.extent_count = i % 7 ? i % 3 : KV_CHUNK_BLOCKS;
		if (!chunk(arg, &info))
			break;
	}
	return 0;
}

int kv_version_warm(
	struct kv_version *version, const struct kv_warm *range, struct kv_warm_result *ret_result)
{
	(void)version;
	if (range->length > KVFS_WARM_BYTES)
		abort();
	*ret_result = (struct kv_warm_result){.done = range->length};
	return range->offset % 3 == 2 ? -EIO : 0;
}

/* ---- Core ---- */

int kv_core_cool(struct kv_core *core, uint64_t ino, uint64_t *ret_bytes)
{
	(void)core;
	*ret_bytes = ino;
	return ino % 2 ? -EBUSY : 0;
}

int kv_core_evict(struct kv_core *core, uint64_t ino, bool leased, uint64_t *ret_bytes)
{
	(void)leased;
	return kv_core_cool(core, ino, ret_bytes);
}

int kv_core_scrub(struct kv_core *core, uint64_t ino, const struct kv_scrub *range,
	struct kv_scrub_result *ret_result)
{
	(void)core;
	if (range->offset % KV_CHUNK_SIZE != 0 || range->length > KVFS_SCRUB_BYTES)
		abort();
	*ret_result = (struct kv_scrub_result){.done = range->length};
	return ino % 2 ? -ENOENT : 0;
}

int kv_core_set_quota(struct kv_core *core, uint64_t ino, uint64_t limit_blocks)
{
	(void)core;
	(void)ino;
	if (limit_blocks > KV_FILE_SIZE_MAX / KV_BLOCK_SIZE)
		abort();
	return 0;
}

void kv_core_retired(struct kv_core *core, uint64_t ino)
{
	(void)core;
	(void)ino;
}

int64_t kv_core_now_ns(struct kv_core *core)
{
	(void)core;
	return 1;
}

int64_t kv_core_lease_left(struct kv_core *core, uint64_t ino)
{
	(void)core;
	return (int64_t)ino;
}

struct kv_dram *kv_core_dram(struct kv_core *core)
{
	(void)core;
	return NULL;
}

void kv_core_usage(struct kv_core *core, struct kv_core_usage *ret_usage)
{
	(void)core;
	*ret_usage = (struct kv_core_usage){0};
}

void kv_dram_usage(struct kv_dram *dram, struct kv_dram_usage *ret_usage)
{
	(void)dram;
	*ret_usage = (struct kv_dram_usage){0};
}

unsigned kv_devices_count(const struct kv_devices *devices)
{
	(void)devices;
	return 2;
}

void kv_devices_info(
	const struct kv_devices *devices, unsigned number, struct kv_device_info *ret_info)
{
	(void)devices;
	(void)number;
	*ret_info = (struct kv_device_info){.path = "/dev/null"};
}

/* ---- Index ---- */

int kv_index_get(struct kv_index *index, uint64_t ino, struct kv_inode *ret_inode)
{
	(void)index;
	if (ino == 0 || ino > 2 + FILES)
		return -ENOENT;
	*ret_inode = (struct kv_inode){
		.ino = ino,
		.parent = 1,
		.uid = (uint32_t)ino % 2,
		.mode = (ino == 1          ? S_IFDIR
				: ino == 5 ? S_IFLNK
					   : S_IFREG) |
			0755,
		.nlink = 1,
	};
	return 0;
}

int kv_index_lookup(struct kv_index *index, uint64_t parent, const char *name, size_t length,
	struct kv_inode *ret_inode)
{
	(void)parent;
	if (length == 0 || memchr(name, '\0', length) || memchr(name, '/', length))
		return -EINVAL;
	if (length > KV_NAME_MAX)
		return -ENAMETOOLONG;
	return kv_index_get(index, (uint8_t)name[0] % 8, ret_inode);
}

int kv_index_name(struct kv_index *index, uint64_t ino, uint64_t *ret_parent, char *ret_name)
{
	(void)index;
	(void)ino;
	*ret_parent = 1;
	(void)strcpy(ret_name, "name");
	return 0;
}

int kv_index_domain(struct kv_index *index, uint32_t number, struct kv_domain_info *ret_info)
{
	(void)index;
	(void)number;
	*ret_info = (struct kv_domain_info){.ino = 1, .limit = UINT64_MAX};
	return 0;
}

int kv_index_pin(
	struct kv_index *index, uint64_t ino, bool pin, bool privileged, struct kv_inode *ret_inode)
{
	(void)pin;
	(void)privileged;
	return kv_index_get(index, ino, ret_inode);
}

int kv_index_retire(
	struct kv_index *index, const struct kv_retire *retire, struct kv_inode *ret_fresh)
{
	static volatile uint8_t sum;

	for (size_t i = 0; i < retire->unless_size; i++)
		sum = (uint8_t)(sum ^ ((const uint8_t *)retire->unless)[i]);
	return kv_index_get(index, retire->ino, ret_fresh) < 0 ? -ENOENT : 1;
}

struct kv_space *kv_index_space(struct kv_index *index)
{
	(void)index;
	return NULL;
}

void kv_space_usage(struct kv_space *space, struct kv_space_usage *ret_usage)
{
	(void)space;
	*ret_usage = (struct kv_space_usage){.total = 1000};
}

void kv_index_usage(struct kv_index *index, struct kv_index_usage *ret_usage)
{
	(void)index;
	*ret_usage = (struct kv_index_usage){0};
}
