/* SPDX-License-Identifier: Apache-2.0 */
/* The threads that receive requests and handle them: see workers.h. */

#include "fs/workers.h"

#include <bsd/sys/queue.h>
#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>

#include "fs/base.h"
#include "fs/wait.h"

/* How often the watcher looks while there are requests. */
#define TICK_NS INT64_C(1000000)
/* And without: a signal that ends the loop may come right before the wait that it should end. */
#define SLEEP_NS INT64_C(1000000000)
#define NS_PER_S INT64_C(1000000000)
/* Looks without a request after which it sleeps until there is one. */
#define QUIET_TICKS 100u
/*
 * How long the receiver looks for the next request before it sleeps. A client that asks one thing
 * after the other sends it in that time, and to be woken takes longer than that where an idle
 * processor has to be: calls of 4 KiB, look-ups and removals one by one became 1.6 to 2.7 times as
 * fast in a virtual machine of two processors.
 */
#define SPIN_NS INT64_C(20000)
/* Looks in a row that found requests pending before there is another receiver: a client that asks
 * one thing after the other is caught in between now and then. */
#define PENDING_TICKS 3u
/* Looks that found a receiver without work before there is one less. */
#define CALM_TICKS 8u
/* Threads beyond that number that have no turn keep no memory for requests, which is megabytes. */
#define BUFFERS_IDLE 4u

struct worker {
	struct workers *workers;
	pthread_t thread;
	void *memory; /* of its request */
	pthread_cond_t turn;
	bool chosen;               /* to receive; workers->lock */
	TAILQ_ENTRY(worker) idle;  /* while it waits for its turn */
	SLIST_ENTRY(worker) every; /* never taken out */
};

struct workers {
	const struct kv_workers_source *source;
	_Atomic unsigned receiving; /* threads in receive, or bound for it */
	unsigned receivers_max;     /* one a processor */
	_Atomic unsigned wanted;    /* as many are to be there; only the watcher changes it */
	_Atomic unsigned received;  /* requests */
	_Atomic bool watched;       /* the watcher looks by itself */
	_Atomic int error;
	sem_t look; /* wakes the watcher */
	pthread_mutex_t lock;
	TAILQ_HEAD(, worker) idlers; /* the one that came last first: its memory is warm */
	SLIST_HEAD(, worker) all;
	unsigned idle;
	unsigned count;
	bool ending;
};

static void *worker_main(void *arg);

/* ---- Turns ---- */

/* Lock held. Signals that end the daemon are for its main thread. */
static int start_thread(struct workers *workers)
{
	struct worker *worker = calloc(1, sizeof(*worker));
	sigset_t signals, before;
	int r;

	if (!worker)
		return -ENOMEM;
	worker->workers = workers;
	(void)pthread_cond_init(&worker->turn, NULL);
	(void)sigemptyset(&signals);
	(void)sigaddset(&signals, SIGTERM);
	(void)sigaddset(&signals, SIGINT);
	(void)sigaddset(&signals, SIGHUP);
	(void)sigaddset(&signals, SIGQUIT);
	(void)pthread_sigmask(SIG_BLOCK, &signals, &before);
	r = pthread_create(&worker->thread, NULL, worker_main, worker);
	(void)pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (r != 0) {
		(void)pthread_cond_destroy(&worker->turn);
		free(worker);
		return -r;
	}
	SLIST_INSERT_HEAD(&workers->all, worker, every);
	workers->count++;
	return 0;
}

/* One more receiver, if there are fewer than COUNT. */
static int add_receiver(struct workers *workers, unsigned count)
{
	KV_LOCKED(&workers->lock);
	struct worker *worker = TAILQ_FIRST(&workers->idlers);
	int r = 0;

	if (workers->ending || atomic_load(&workers->receiving) >= count)
		return 0;
	atomic_fetch_add(&workers->receiving, 1);
	if (worker) {
		TAILQ_REMOVE(&workers->idlers, worker, idle);
		workers->idle--;
		worker->chosen = true;
		(void)pthread_cond_signal(&worker->turn);
	} else {
		r = workers->count < workers->source->threads_max ? start_thread(workers) : -EAGAIN;
	}
	if (r < 0)
		atomic_fetch_sub(&workers->receiving, 1);
	return r;
}

/* A worker is about to wait. If it finds no successor, the watcher will. */
static void before_wait(void *arg)
{
	struct workers *workers = arg;

	if (atomic_load(&workers->receiving) == 0)
		(void)add_receiver(workers, 1);
}

static bool take_place(struct workers *workers)
{
	unsigned receiving = atomic_load(&workers->receiving);

	while (receiving < atomic_load(&workers->wanted))
		if (atomic_compare_exchange_weak(&workers->receiving, &receiving, receiving + 1))
			return true;
	return false;
}

/* Until WORKER is to receive again. False at the end. */
static bool wait_for_turn(struct worker *worker)
{
	struct workers *workers = worker->workers;

	if (take_place(workers))
		return true;
	KV_LOCKED(&workers->lock);
	if (take_place(workers))
		return true;
	TAILQ_INSERT_HEAD(&workers->idlers, worker, idle);
	if (++workers->idle > BUFFERS_IDLE) {
		free(worker->memory);
		worker->memory = NULL;
	}
	worker->chosen = false;
	while (!worker->chosen && !workers->ending)
		(void)pthread_cond_wait(&worker->turn, &workers->lock);
	return worker->chosen;
}

/* ---- Workers ---- */

static bool is_pending(const struct workers *workers)
{
	struct pollfd pollfd = {.fd = workers->source->fd, .events = POLLIN};

	return poll(&pollfd, 1, 0) > 0;
}

/* Not where others receive, too, or where it would keep the client from running. */
static void look_for_next(const struct workers *workers)
{
	int64_t until = kv_monotonic_ns() + SPIN_NS;

	while (workers->receivers_max > 1 && atomic_load(&workers->receiving) == 1 &&
		!is_pending(workers) && kv_monotonic_ns() < until)
		continue;
}

static int receive(struct worker *worker)
{
	struct workers *workers = worker->workers;
	int r;

	do {
		(void)pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
		r = workers->source->receive(workers->source->arg, &worker->memory);
		(void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	} while (
		(r == -EINTR || r == -EAGAIN) && !workers->source->has_ended(workers->source->arg));
	atomic_fetch_sub(&workers->receiving, 1);
	atomic_fetch_add(&workers->received, 1);
	/* Pairs with the watcher's look after it has let its flag down. */
	if (!atomic_load(&workers->watched) && !atomic_exchange(&workers->watched, true))
		(void)sem_post(&workers->look);
	return r;
}

static void *worker_main(void *arg)
{
	struct worker *worker = arg;
	struct workers *workers = worker->workers;
	const struct kv_workers_source *source = workers->source;
	int r;

	(void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	kv_wait_hook(before_wait, workers);
	do {
		r = receive(worker);
		if (r <= 0)
			break;
		source->handle(source->arg, worker->memory, (size_t)r);
		if (source->has_ended(source->arg) || !wait_for_turn(worker))
			break;
		look_for_next(workers);
	} while (true);
	if (r < 0 && r != -EINTR && r != -EAGAIN)
		atomic_store(&workers->error, r);
	(void)sem_post(&workers->look);
	return NULL;
}

/* ---- The watcher ---- */

struct watch {
	unsigned received; /* at the last look */
	unsigned quiet;    /* looks without a request */
	unsigned pending;  /* looks with requests that nobody receives */
	unsigned calm;     /* looks with a receiver to spare */
};

/* All who would receive are busy. STUCK: with the same requests as at the last look. */
static void look_at_busy(struct workers *workers, struct watch *watch, bool stuck)
{
	unsigned wanted = atomic_load(&workers->wanted);

	watch->calm = 0;
	if (!is_pending(workers)) {
		watch->pending = 0;
		return;
	}
	if (stuck) {
		(void)add_receiver(workers, 1);
		return;
	}
	if (++watch->pending < PENDING_TICKS)
		return;
	watch->pending = 0;
	if (wanted < workers->receivers_max)
		atomic_store(&workers->wanted, wanted + 1);
	(void)add_receiver(workers, wanted + 1);
}

static void look_at_idle(struct workers *workers, struct watch *watch)
{
	unsigned wanted = atomic_load(&workers->wanted);

	watch->pending = 0;
	if (wanted == 1 || ++watch->calm < CALM_TICKS)
		return;
	watch->calm = 0;
	atomic_store(&workers->wanted, wanted - 1);
}

static void look(struct workers *workers, struct watch *watch)
{
	unsigned received = atomic_load(&workers->received);
	bool same = received == watch->received;
	bool busy = atomic_load(&workers->receiving) == 0;

	watch->received = received;
	watch->quiet = same && !busy ? watch->quiet + 1 : 0;
	if (busy)
		look_at_busy(workers, watch, same);
	else
		look_at_idle(workers, watch);
}

static void wait_to_look(struct workers *workers, int64_t ns)
{
	int64_t end_ns = kv_monotonic_ns() + ns;
	const struct timespec until = {end_ns / NS_PER_S, end_ns % NS_PER_S};

	(void)sem_clockwait(&workers->look, CLOCK_MONOTONIC, &until);
}

/* Until the next look. */
static void pause_watch(struct workers *workers, struct watch *watch)
{
	if (watch->quiet < QUIET_TICKS) {
		wait_to_look(workers, TICK_NS);
		return;
	}
	atomic_store(&workers->watched, false);
	/* What came before the flag was down has woken nobody. */
	if (atomic_load(&workers->received) == watch->received)
		wait_to_look(workers, SLEEP_NS);
	atomic_store(&workers->watched, true);
}

/* ---- All of it ---- */

static void end_workers(struct workers *workers)
{
	struct worker *worker;

	{
		KV_LOCKED(&workers->lock);

		workers->ending = true;
		SLIST_FOREACH(worker, &workers->all, every)
		{
			(void)pthread_cond_signal(&worker->turn);
			(void)pthread_cancel(worker->thread);
		}
	}
	while ((worker = SLIST_FIRST(&workers->all))) {
		SLIST_REMOVE_HEAD(&workers->all, every);
		(void)pthread_join(worker->thread, NULL);
		(void)pthread_cond_destroy(&worker->turn);
		free(worker->memory);
		free(worker);
	}
}

int kv_workers_run(const struct kv_workers_source *source)
{
	long processors = sysconf(_SC_NPROCESSORS_ONLN);
	struct workers workers = {
		.source = source,
		.receivers_max = processors > 1 ? (unsigned)processors : 1,
		.wanted = 1,
		.watched = true,
	};
	struct watch watch = {0};
	int r;

	TAILQ_INIT(&workers.idlers);
	SLIST_INIT(&workers.all);
	(void)pthread_mutex_init(&workers.lock, NULL);
	(void)sem_init(&workers.look, 0, 0);
	r = add_receiver(&workers, 1);
	while (r == 0 && atomic_load(&workers.error) == 0 && !source->has_ended(source->arg)) {
		pause_watch(&workers, &watch);
		look(&workers, &watch);
	}
	end_workers(&workers);
	(void)sem_destroy(&workers.look);
	(void)pthread_mutex_destroy(&workers.lock);
	return r < 0 ? r : atomic_load(&workers.error);
}
