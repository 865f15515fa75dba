/* SPDX-License-Identifier: Apache-2.0 */
/* Samples of segments, and their checks: see sample.h. */
#include "gpu/sample.h"

#include <errno.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/random.h>

#include "fs/base.h"
#include "fs/sum.h"

STAILQ_HEAD(check_queue, kvg_check);

struct kvg_checker {
	struct kvg_backend *backend;
	struct kvg_workers *workers;
	kvg_stream stream;
	int event_fd;
	unsigned busy; /* started, and not reaped */
	pthread_mutex_t lock;
	struct check_queue done; /* lock */
};

struct kvg_samples *kvg_samples_new(uint64_t used)
{
	struct kvg_samples *samples = calloc(1, sizeof(*samples));
	uint64_t strip = used / KVG_SAMPLES;
	uint32_t dice[KVG_SAMPLES];

	assert(strip >= KVG_SAMPLE_SIZE);
	if (!samples || getrandom(dice, sizeof(dice), 0) != (ssize_t)sizeof(dice)) {
		free(samples);
		return NULL;
	}
	for (unsigned i = 0; i < KVG_SAMPLES; i++)
		samples->each[i].offset = i * strip + dice[i] % (strip - KVG_SAMPLE_SIZE + 1);
	return samples;
}

void kvg_samples_take(
	struct kvg_samples *samples, const void *memory, uint64_t offset, uint64_t length)
{
	for (unsigned i = 0; i < KVG_SAMPLES; i++) {
		struct kvg_sample *sample = &samples->each[i];

		if (sample->offset < offset || sample->offset + KVG_SAMPLE_SIZE > offset + length)
			continue;
		sample->sum = XXH3_64bits(
			(const uint8_t *)memory + (sample->offset - offset), KVG_SAMPLE_SIZE);
		sample->known = true;
	}
}

/* ---- Checks ---- */

static int fetch(struct kvg_check *check, uint8_t *memory)
{
	struct kvg_backend *backend = check->checker->backend;
	struct kvg_copy copies[KVG_SAMPLES];
	kvg_devptr base = backend->ops->address(backend, check->mapping);
	int r, synced;

	for (unsigned i = 0; i < KVG_SAMPLES; i++)
		copies[i] = (struct kvg_copy){
			.to = (uint64_t)(uintptr_t)memory + (uint64_t)i * KVG_SAMPLE_SIZE,
			.from = base + check->samples.each[i].offset,
			.size = KVG_SAMPLE_SIZE,
		};
	r = backend->ops->copy(
		backend, check->checker->stream, KVG_COPY_TO_HOST, copies, KVG_SAMPLES);
	/* Also after an error: some of them may be under way into MEMORY. */
	synced = backend->ops->stream_sync(backend, check->checker->stream);
	return r < 0 ? r : synced;
}

static int compare(struct kvg_check *check)
{
	_cleanup_free_ uint8_t *memory = malloc((size_t)KVG_SAMPLES * KVG_SAMPLE_SIZE);
	int r = memory ? fetch(check, memory) : -ENOMEM;

	for (unsigned i = 0; i < KVG_SAMPLES && r == 0; i++) {
		struct kvg_sample *sample = &check->samples.each[i];
		uint64_t sum = XXH3_64bits(memory + (size_t)i * KVG_SAMPLE_SIZE, KVG_SAMPLE_SIZE);

		if (sample->known && sum != sample->sum)
			r = -EBADMSG;
		sample->sum = sum;
		sample->known = true;
	}
	return r;
}

static void run_check(struct kvg_task *task)
{
	struct kvg_check *check = (struct kvg_check *)task;
	struct kvg_checker *checker = check->checker;
	const uint64_t one = 1;

	check->result = compare(check);
	KV_LOCKED(&checker->lock);
	STAILQ_INSERT_TAIL(&checker->done, check, entry);
	(void)!write(checker->event_fd, &one, sizeof(one));
}

int kvg_checker_start(struct kvg_checker *checker, struct kvg_segment *segment,
	const struct kvg_samples *samples, const struct kvg_block_key *key, void *arg)
{
	struct kvg_backend *backend = checker->backend;
	struct kvg_check *check = calloc(1, sizeof(*check));
	int r;

	if (!check)
		return -ENOMEM;
	r = backend->ops->map(backend, &segment, 1, false, &check->mapping);
	if (r < 0) {
		free(check);
		return r;
	}
	check->checker = checker;
	check->samples = *samples;
	check->key = *key;
	check->arg = arg;
	check->task.run = run_check;
	checker->busy++;
	kvg_workers_start(checker->workers, &check->task);
	return 0;
}

struct kvg_check *kvg_checker_reap(struct kvg_checker *checker)
{
	struct kvg_check *check;
	uint64_t count;

	{
		KV_LOCKED(&checker->lock);
		(void)!read(checker->event_fd, &count, sizeof(count));
		check = STAILQ_FIRST(&checker->done);
		if (check)
			STAILQ_REMOVE_HEAD(&checker->done, entry);
	}
	/* The thread is about to say that it has let go of it. */
	while (check && !kvg_task_is_done(&check->task))
		(void)sched_yield();
	return check;
}

void kvg_check_free(struct kvg_check *check)
{
	struct kvg_backend *backend = check->checker->backend;

	check->checker->busy--;
	backend->ops->unmap(backend, check->mapping);
	free(check);
}

/* ---- Life ---- */

int kvg_checker_new(struct kvg_backend *backend, struct kvg_checker **ret_checker)
{
	struct kvg_checker *checker = calloc(1, sizeof(*checker));
	int r;

	if (!checker)
		return -ENOMEM;
	checker->backend = backend;
	(void)pthread_mutex_init(&checker->lock, NULL);
	STAILQ_INIT(&checker->done);
	checker->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	r = checker->event_fd < 0 ? -errno : kvg_workers_new(1, &checker->workers);
	if (r == 0)
		r = backend->ops->stream_new(backend, &checker->stream);
	if (r < 0) {
		(void)kvg_checker_free(checker);
		return r;
	}
	*ret_checker = checker;
	return 0;
}

struct kvg_checker *kvg_checker_free(struct kvg_checker *checker)
{
	struct kvg_check *check;

	if (!checker)
		return NULL;
	(void)kvg_workers_free(checker->workers, false);
	while ((check = kvg_checker_reap(checker)))
		kvg_check_free(check);
	assert(checker->busy == 0);
	checker->backend->ops->stream_free(checker->backend, checker->stream);
	if (checker->event_fd >= 0)
		(void)close(checker->event_fd);
	(void)pthread_mutex_destroy(&checker->lock);
	free(checker);
	return NULL;
}

int kvg_checker_fd(const struct kvg_checker *checker)
{
	return checker->event_fd;
}
