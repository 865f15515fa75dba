/* SPDX-License-Identifier: Apache-2.0 */
/* Threads for small tasks: see workers.h. */
#include "gpu/workers.h"

#include <errno.h>

#include "fs/base.h"

struct kvg_workers {
	pthread_mutex_t lock;
	pthread_cond_t more;
	STAILQ_HEAD(, kvg_task) queue;
	bool stop;
	unsigned busy; /* threads in a task */
	unsigned count;
	pthread_t threads[];
};

static void run_task(struct kvg_task *task)
{
	task->run(task);
	/* Pairs with the load in kvg_task_is_done. From here on the task is the caller's. */
	atomic_store_explicit(&task->done, true, memory_order_release);
}

static void *worker_main(void *arg)
{
	struct kvg_workers *workers = arg;
	KV_LOCKED(&workers->lock);

	for (;;) {
		struct kvg_task *task = STAILQ_FIRST(&workers->queue);

		if (!task && workers->stop)
			return NULL;
		if (!task) {
			(void)pthread_cond_wait(&workers->more, &workers->lock);
			continue;
		}
		STAILQ_REMOVE_HEAD(&workers->queue, entry);
		workers->busy++;
		(void)pthread_mutex_unlock(&workers->lock);
		run_task(task);
		(void)pthread_mutex_lock(&workers->lock);
		workers->busy--;
	}
}

int kvg_workers_new(unsigned threads, struct kvg_workers **ret_workers)
{
	struct kvg_workers *workers =
		calloc(1, sizeof(*workers) + threads * sizeof(workers->threads[0]));

	if (!workers)
		return -ENOMEM;
	(void)pthread_mutex_init(&workers->lock, NULL);
	(void)pthread_cond_init(&workers->more, NULL);
	STAILQ_INIT(&workers->queue);
	while (workers->count < threads) {
		int r = pthread_create(
			&workers->threads[workers->count], NULL, worker_main, workers);

		if (r != 0) {
			kvg_workers_free(workers, false);
			return -r;
		}
		workers->count++;
	}
	*ret_workers = workers;
	return 0;
}

struct kvg_workers *kvg_workers_free(struct kvg_workers *workers, bool abandon)
{
	if (!workers)
		return NULL;
	{
		KV_LOCKED(&workers->lock);
		workers->stop = true;
		(void)pthread_cond_broadcast(&workers->more);
		if (abandon && workers->busy > 0)
			return NULL;
	}
	for (unsigned i = 0; i < workers->count; i++)
		(void)pthread_join(workers->threads[i], NULL);
	(void)pthread_cond_destroy(&workers->more);
	(void)pthread_mutex_destroy(&workers->lock);
	free(workers);
	return NULL;
}

void kvg_workers_start(struct kvg_workers *workers, struct kvg_task *task)
{
	atomic_store_explicit(&task->done, false, memory_order_relaxed);
	if (workers->count == 0) {
		run_task(task);
		return;
	}
	KV_LOCKED(&workers->lock);
	STAILQ_INSERT_TAIL(&workers->queue, task, entry);
	(void)pthread_cond_signal(&workers->more);
}
