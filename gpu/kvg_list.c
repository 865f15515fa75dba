/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of segments: small copies are slow, so what can be one copy becomes one. */
#include <errno.h>

#include "fs/base.h"
#include "gpu/kvg_internal.h"

static int compare(const void *a, const void *b)
{
	const struct kvg_seg *one = a, *two = b;

	if (one->file_off != two->file_off)
		return one->file_off < two->file_off ? -1 : 1;
	return one->dst < two->dst ? -1 : one->dst > two->dst;
}

/* Pieces that LEN bytes make when they are cut at MOST. */
static size_t pieces_of(uint64_t len, uint64_t most)
{
	return (size_t)(len / most + (len % most != 0));
}

static size_t join(struct kvg_seg *segs, size_t n)
{
	size_t count = 0;

	for (size_t i = 0; i < n; i++) {
		struct kvg_seg *last = count > 0 ? &segs[count - 1] : NULL;

		if (segs[i].len == 0)
			continue;
		if (last && last->file_off + last->len == segs[i].file_off &&
			last->dst + last->len == segs[i].dst)
			last->len += segs[i].len;
		else
			segs[count++] = segs[i];
	}
	return count;
}

int kvg_list_new(const struct kvg_seg *segs, size_t n, uint64_t most, struct kvg_seg **ret_segs,
	size_t *ret_n)
{
	_cleanup_free_ struct kvg_seg *sorted = malloc((n + 1) * sizeof(*sorted));
	struct kvg_seg *cut;
	size_t count, total = 0, at = 0;

	if (!sorted)
		return -ENOMEM;
	for (size_t i = 0; i < n; i++)
		if (segs[i].file_off + segs[i].len < segs[i].file_off ||
			segs[i].dst + segs[i].len < segs[i].dst || segs[i].file_off > INT64_MAX)
			return -EINVAL;
	memcpy(sorted, segs, n * sizeof(*sorted));
	qsort(sorted, n, sizeof(*sorted), compare);
	count = join(sorted, n);
	for (size_t i = 0; i < count; i++)
		total += pieces_of(sorted[i].len, most);
	cut = malloc((total + 1) * sizeof(*cut));
	if (!cut)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++) {
		for (uint64_t done = 0, piece; done < sorted[i].len; done += piece) {
			piece = kv_min_u64(most, sorted[i].len - done);
			cut[at++] = (struct kvg_seg){
				.file_off = sorted[i].file_off + done,
				.len = piece,
				.dst = sorted[i].dst + done,
			};
		}
	}
	assert(at == total);
	*ret_segs = cut;
	*ret_n = total;
	return 0;
}
