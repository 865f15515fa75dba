/* SPDX-License-Identifier: Apache-2.0 */
/* The virtual attributes: see control.h. */

#include "fs/control.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>

#include "fs/attributes.h"
#include "fs/daemon.h"
#include "fs/node.h"
#include "fs/parking.h"
#include "fs/parse.h"
#include "fs/users.h"
#include "index/space.h"

/* Text of one answer: below the kernel's 64 KiB for an attribute. */
#define MAP_TEXT_MAX (60u << 10)

/* ---- user.kvfs.status ---- */

static void print_devices(FILE *out, struct kv_daemon *daemon)
{
	static const char *const states[] = {
		[KV_DEVICE_OK] = "ok",
		[KV_DEVICE_SLOW] = "slow",
		[KV_DEVICE_HUNG] = "hung",
	};
	struct kv_devices *devices = daemon->store->devices;
	unsigned count = kv_devices_count(devices);

	fprintf(out, "devices %u\n", count);
	for (unsigned i = 0; i < count; i++) {
		struct kv_device_info info;

		kv_devices_info(devices, i, &info);
		fprintf(out, "device %u %" PRIu64 " %" PRIu64 " %d %s %" PRIu64 " %s\n", i,
			info.size, info.blocks, info.failed, states[info.state], info.waiting_ms,
			info.path);
	}
}

static void print_index(FILE *out, struct kv_daemon *daemon)
{
	struct kv_space_usage space;
	struct kv_index_usage usage;

	kv_space_usage(kv_index_space(daemon->index), &space);
	kv_index_usage(daemon->index, &usage);
	fprintf(out, "store_total %" PRIu64 "\n", space.total * KV_BLOCK_SIZE);
	fprintf(out, "store_used %" PRIu64 "\n", space.used * KV_BLOCK_SIZE);
	fprintf(out, "store_busy %" PRIu64 "\n", space.busy * KV_BLOCK_SIZE);
	fprintf(out, "store_reserved %" PRIu64 "\n", space.reserved * KV_BLOCK_SIZE);
	fprintf(out, "store_pinned %" PRIu64 "\n", usage.pinned * KV_BLOCK_SIZE);
	fprintf(out, "files %" PRIu64 "\n", usage.inodes);
	fprintf(out, "index_bytes %" PRIu64 "\n", usage.size_bytes);
	fprintf(out, "index_pending %" PRIu64 "\n", usage.pending);
	fprintf(out, "index_held %" PRIu64 "\n", usage.held);
	fprintf(out, "index_commits %" PRIu64 "\n", usage.commits);
}

static void print_dram(FILE *out, struct kv_daemon *daemon)
{
	struct kv_dram_usage dram;
	struct kv_core_usage core;

	kv_dram_usage(kv_core_dram(daemon->core), &dram);
	kv_core_usage(daemon->core, &core);
	fprintf(out, "dram_budget %" PRIu64 "\n", dram.budget);
	fprintf(out, "dram_charged %" PRIu64 "\n", dram.charged);
	fprintf(out, "dram_zombie %" PRIu64 "\n", dram.zombie);
	fprintf(out, "dram_dirty %" PRIu64 "\n", core.dirty_bytes);
	fprintf(out, "dram_objects %" PRIu64 "\n", dram.objects);
	fprintf(out, "dram_kind %s\n", dram.tmpfs ? "tmpfs" : "memfd");
	fprintf(out, "dram_huge %d\n", dram.huge);
	fprintf(out, "open_handles %" PRIu64 "\n", core.open_handles);
	fprintf(out, "parked %u\n", kv_parking_count(daemon->parking));
	fprintf(out, "nodes %" PRIu64 "\n", kv_nodes_count(daemon->nodes));
	kv_users_print(daemon->users, out);
}

static void print_counters(FILE *out, const struct kv_stats *stats)
{
#define PRINT_COUNTER(name, help)                                                                  \
	fprintf(out, "stat " #name " %" PRIu64 "\n", kv_stat_get(&stats->name));
	KV_STATS(PRINT_COUNTER)
#undef PRINT_COUNTER
}

static void print_status(FILE *out, struct kv_daemon *daemon)
{
	fprintf(out, "version %s\n", KV_VERSION);
	fprintf(out, "store %s\n", daemon->store->path);
	fprintf(out, "mode %s\n", daemon->passthrough ? "passthrough" : "daemon");
	fprintf(out, "mode_reason %s\n", daemon->passthrough_reason);
	fprintf(out, "transport legacy\n");
	fprintf(out, "uptime_s %" PRId64 "\n",
		(kv_core_now_ns(daemon->core) - daemon->start_ns) / 1000000000);
	print_devices(out, daemon);
	print_index(out, daemon);
	print_dram(out, daemon);
	print_counters(out, &daemon->stats);
}

/* ---- user.kvfs.stat and user.kvfs.map.N ---- */

struct chunk_counts {
	uint64_t chunks;
	uint64_t stored;   /* on the devices */
	uint64_t resident; /* in DRAM */
	uint64_t dirty;
};

static bool count_chunk(void *arg, const struct kv_chunk_info *info)
{
	struct chunk_counts *counts = arg;

	counts->chunks++;
	counts->stored += info->state == KV_CHUNK_COLD || info->state == KV_CHUNK_HOT;
	counts->resident += info->state == KV_CHUNK_HOT || info->state == KV_CHUNK_DIRTY;
	counts->dirty += info->state == KV_CHUNK_DIRTY;
	return true;
}

static const char *tier_of(const struct chunk_counts *counts, bool published)
{
	if (!published)
		return "writing";
	if (counts->resident > 0)
		return counts->stored > 0 ? "dram+nvme" : "dram";
	return counts->stored > 0 ? "nvme" : "none";
}

struct kv_version *kv_control_version(struct kv_daemon *daemon, uint64_t ino)
{
	struct kv_version *version = NULL;
	struct kv_file *file;

	if (kv_file_get(daemon->core, ino, &file) < 0)
		return NULL;
	if (kv_file_current(file, &version) < 0)
		version = kv_node_unpublished_version(daemon, file);
	kv_file_put(file);
	return version;
}

int kv_control_inode(struct kv_daemon *daemon, uint64_t ino, struct kv_inode *ret_inode)
{
	struct kv_file *file = kv_file_find(daemon->core, ino);

	if (file)
		kv_file_note_uses(file);
	kv_file_put(file);
	return kv_index_get(daemon->index, ino, ret_inode);
}

void kv_control_content(struct kv_daemon *daemon, const struct kv_inode *inode,
	struct kv_content_report *ret_content)
{
	struct kv_version *version =
		S_ISREG(inode->mode) ? kv_control_version(daemon, inode->ino) : NULL;
	struct kv_version_attr attr = {
		.number = inode->version,
		.size = inode->size,
		.blocks = inode->blocks,
		.published = true,
		.committed = true,
	};
	struct chunk_counts counts = {0};
	const char *checksum = "none";

	if (version) {
		kv_version_attr(version, &attr);
		(void)kv_version_map(version, 0, count_chunk, &counts);
	}
	kv_version_unref(version);
	if (counts.dirty > 0 || !attr.committed)
		checksum = "pending";
	else if (counts.stored > 0)
		checksum = "stored";
	*ret_content = (struct kv_content_report){
		.version = attr.number,
		.tier = tier_of(&counts, attr.published),
		.size = attr.size,
		.blocks = attr.blocks,
		.chunks = counts.chunks,
		.resident = counts.resident,
		.dirty = counts.dirty,
		.checksum = checksum,
	};
}

static int print_stat(FILE *out, struct kv_daemon *daemon, uint64_t ino)
{
	struct kv_content_report content;
	struct kv_inode inode;
	int r = kv_control_inode(daemon, ino, &inode);

	if (r < 0)
		return r;
	kv_control_content(daemon, &inode, &content);
	fprintf(out, "ino %" PRIu64 "\n", ino);
	fprintf(out, "version %" PRIu64 "\n", content.version);
	fprintf(out, "tier %s\n", content.tier);
	fprintf(out, "size %" PRIu64 "\n", content.size);
	fprintf(out, "blocks %" PRIu64 "\n", content.blocks);
	fprintf(out, "chunks %" PRIu64 "\n", content.chunks);
	fprintf(out, "chunks_resident %" PRIu64 "\n", content.resident);
	fprintf(out, "chunks_dirty %" PRIu64 "\n", content.dirty);
	fprintf(out, "checksum %s\n", content.checksum);
	fprintf(out, "hits %" PRIu32 "\n", inode.hits);
	fprintf(out, "last_use_ns %" PRId64 "\n", inode.last_use_ns);
	fprintf(out, "quarantined %d\n", (inode.flags & KV_INODE_QUARANTINED) != 0);
	return 0;
}

static bool print_chunk(void *arg, const struct kv_chunk_info *info)
{
	static const char *const states[_KV_CHUNK_STATE_MAX] = {
		[KV_CHUNK_HOLE] = "hole",
		[KV_CHUNK_COLD] = "cold",
		[KV_CHUNK_HOT] = "hot",
		[KV_CHUNK_DIRTY] = "dirty",
		[KV_CHUNK_BASE] = "base",
	};
	FILE *out = arg;

	fprintf(out, "chunk %" PRIu32 " %016" PRIx64 " %s\n", info->number, info->sum,
		states[info->state]);
	for (uint32_t i = 0; i < info->extent_count; i++) {
		const struct kv_extent *extent = &info->extents[i];

		fprintf(out, "extent %" PRIu32 " %u %" PRIu32 " %u %" PRIu64 "\n", info->number,
			extent->block, extent->count, extent->device, kv_extent_offset(extent));
	}
	/* Whole chunks only: the reader goes on at the next number. */
	return ftell(out) < (long)MAP_TEXT_MAX / 2;
}

static int print_map(FILE *out, struct kv_daemon *daemon, uint64_t ino, const char *number)
{
	struct kv_version *version;
	uint64_t first;
	int r;

	if (kv_parse_u64(number, &first) < 0 || first > UINT32_MAX)
		return -EINVAL;
	version = kv_control_version(daemon, ino);
	if (!version)
		return 0;
	r = kv_version_map(version, (uint32_t)first, print_chunk, out);
	kv_version_unref(version);
	return r;
}

ssize_t kv_control_get(struct kv_daemon *daemon, uint64_t ino, const char *name, char **ret_text)
{
	const char *key = name + strlen(KV_CONTROL_PREFIX);
	_cleanup_free_ char *text = NULL;
	size_t size = 0;
	FILE *out;
	int r = 0;

	assert(strncmp(name, KV_CONTROL_PREFIX, strlen(KV_CONTROL_PREFIX)) == 0);
	out = open_memstream(&text, &size);
	if (!out)
		return -ENOMEM;
	if (strcmp(key, "status") == 0)
		print_status(out, daemon);
	else if (strcmp(key, "stat") == 0)
		r = print_stat(out, daemon, ino);
	else if (strncmp(key, "map.", strlen("map.")) == 0)
		r = print_map(out, daemon, ino, key + strlen("map."));
	else
		r = kv_attribute_print(out, daemon, ino, key);
	if (fclose(out) != 0 && r == 0)
		r = -ENOMEM;
	if (r < 0)
		return r;
	*ret_text = kv_steal_ptr(&text);
	return (ssize_t)size;
}
