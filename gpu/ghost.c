/* SPDX-License-Identifier: Apache-2.0 */
/* Which hints are worth staging: see ghost.h. */
#include "gpu/ghost.h"

bool kvg_ghost_hint(
	struct kvg_ghosts *ghosts, uint64_t ino, uint64_t version, uid_t uid, int64_t now_ms)
{
	uint64_t hash = (ino * 31 + version) * 31 + uid;
	struct kvg_ghost *ghost =
		&ghosts->slots[(hash * UINT64_C(0x9e3779b97f4a7c15)) >> 52 & (KVG_GHOSTS_MAX - 1)];
	bool again = ghost->used && ghost->ino == ino && ghost->version == version &&
		     ghost->uid == uid && now_ms - ghost->when_ms <= KVG_GHOST_MS;

	*ghost = (struct kvg_ghost){ino, version, uid, !again, now_ms};
	return again;
}
