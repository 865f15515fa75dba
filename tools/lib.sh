# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What the set-up scripts share. Sourced by bash, from the top of the tree.

# The log of the command that runs now; shown when it fails.
KV_LOG=

say() {
	printf '%s: %s\n' "$KV_SCRIPT" "$*"
}

fail() {
	printf '%s: %s\n' "$KV_SCRIPT" "$*" >&2
	exit 1
}

# quietly WHAT COMMAND...: runs COMMAND with its output in a log, and shows the end of that on failure.
quietly() {
	local what=$1 status=0
	shift
	[ -n "$KV_LOG" ] || KV_LOG=$(mktemp -t kvfs-XXXXXX.log)
	"$@" >"$KV_LOG" 2>&1 </dev/null || status=$?
	if [ "$status" -ne 0 ]; then
		tail -n 30 "$KV_LOG" >&2
		printf '%s: %s failed (status %d); the whole output is in %s\n' \
			"$KV_SCRIPT" "$what" "$status" "$KV_LOG" >&2
		KV_LOG=
		return "$status"
	fi
	rm -f "$KV_LOG"
	KV_LOG=
}

# configure DIR OPTION...: a Meson build folder with these options, made or brought up to date.
configure() {
	local dir=$1
	shift
	if [ -f "$dir/build.ninja" ]; then
		quietly "meson configure ($dir)" meson configure "$dir" "$@" && return
		# A folder of another version of Meson, or of a tree that was moved.
		say "making $dir anew"
		rm -rf "$dir"
	elif [ -e "$dir" ] && [ -n "$(ls -A "$dir" 2>/dev/null)" ] && [ ! -d "$dir/meson-private" ]; then
		say "$dir is there and is no build folder: move it away"
		return 1
	fi
	rm -rf "$dir"
	quietly "meson setup ($dir)" meson setup "$dir" "$@"
}

# compile DIR [TARGET...]
compile() {
	quietly "the build in $1" ninja -C "$@"
}
