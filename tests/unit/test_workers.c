/* SPDX-License-Identifier: Apache-2.0 */
/* The threads that receive requests: who receives while others wait, and how they end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "fs/base.h"
#include "fs/wait.h"
#include "fs/workers.h"

/* More than keep their memory while they have no turn. */
#define MANY 40u

/* What a request asks for. */
enum {
	QUICK,  /* an answer */
	SAYS,   /* says that it waits, and waits for a permit */
	SILENT, /* waits for a permit without a word */
	FAILS,  /* the next receive fails */
	ENDS,   /* the source ends */
};

struct fixture {
	int sockets[2]; /* requests come out of the second */
	struct kv_workers_source source;
	pthread_t thread; /* runs the workers */
	sem_t answers;
	sem_t permits;
	_Atomic unsigned waiting;
	_Atomic bool failing;
	_Atomic bool ended;
	int result;
};

static int receive(void *arg, void **memory)
{
	struct fixture *fixture = arg;
	ssize_t n;

	if (!*memory)
		*memory = malloc(1);
	if (!*memory)
		return -ENOMEM;
	n = recv(fixture->sockets[1], *memory, 1, 0);
	if (n < 0)
		return -errno;
	if (atomic_load(&fixture->failing))
		return -EIO;
	return (int)n;
}

static void handle(void *arg, void *memory, size_t size)
{
	struct fixture *fixture = arg;
	int what = *(uint8_t *)memory;

	assert_int_equal(size, 1);
	if (what == SAYS)
		kv_wait_begins();
	if (what == SAYS || what == SILENT) {
		atomic_fetch_add(&fixture->waiting, 1);
		while (sem_wait(&fixture->permits) < 0)
			continue;
	}
	if (what == FAILS)
		atomic_store(&fixture->failing, true);
	if (what == ENDS)
		atomic_store(&fixture->ended, true);
	(void)sem_post(&fixture->answers);
}

static bool has_ended(void *arg)
{
	struct fixture *fixture = arg;

	return atomic_load(&fixture->ended);
}

static void *run(void *arg)
{
	struct fixture *fixture = arg;

	fixture->result = kv_workers_run(&fixture->source);
	return NULL;
}

static struct fixture *start(unsigned threads_max)
{
	struct fixture *fixture = calloc(1, sizeof(*fixture));

	assert_non_null(fixture);
	assert_int_equal(
		socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fixture->sockets), 0);
	(void)sem_init(&fixture->answers, 0, 0);
	(void)sem_init(&fixture->permits, 0, 0);
	fixture->source = (struct kv_workers_source){
		.fd = fixture->sockets[1],
		.receive = receive,
		.handle = handle,
		.has_ended = has_ended,
		.arg = fixture,
		.threads_max = threads_max,
	};
	assert_int_equal(pthread_create(&fixture->thread, NULL, run, fixture), 0);
	return fixture;
}

static void ask(struct fixture *fixture, uint8_t what)
{
	assert_int_equal(send(fixture->sockets[0], &what, 1, 0), 1);
}

static void await_answers(struct fixture *fixture, unsigned count)
{
	while (count > 0)
		count -= sem_wait(&fixture->answers) == 0;
}

/* All of COUNT are there, and none has its permit. */
static void await_waiting(struct fixture *fixture, unsigned count)
{
	while (atomic_load(&fixture->waiting) < count)
		(void)usleep(1000);
	atomic_store(&fixture->waiting, 0);
}

static void permit(struct fixture *fixture, unsigned count)
{
	while (count-- > 0)
		(void)sem_post(&fixture->permits);
}

/* What the workers ended with. */
static int finish(struct fixture *fixture)
{
	int result;

	assert_int_equal(pthread_join(fixture->thread, NULL), 0);
	result = fixture->result;
	(void)close(fixture->sockets[0]);
	(void)close(fixture->sockets[1]);
	(void)sem_destroy(&fixture->answers);
	(void)sem_destroy(&fixture->permits);
	free(fixture);
	return result;
}

/* Requests of one client are answered one after the other, until the source ends. */
static void test_workers__answer(void **state)
{
	struct fixture *fixture = start(4);

	(void)state;
	for (unsigned i = 0; i < 1000; i++) {
		ask(fixture, QUICK);
		await_answers(fixture, 1);
	}
	ask(fixture, ENDS);
	assert_int_equal(finish(fixture), 0);
}

/* As many as say that they wait are replaced, and others are answered meanwhile. */
static void test_workers__one_that_says_it_waits_is_replaced(void **state)
{
	struct fixture *fixture = start(MANY + 1);

	(void)state;
	for (unsigned round = 0; round < 2; round++) {
		for (unsigned i = 0; i < MANY; i++)
			ask(fixture, SAYS);
		ask(fixture, QUICK);
		await_answers(fixture, 1);
		await_waiting(fixture, MANY);
		permit(fixture, MANY);
		await_answers(fixture, MANY);
	}
	ask(fixture, ENDS);
	assert_int_equal(finish(fixture), 0);
}

/* The same for those that say nothing: their successor is found by looking. */
static void test_workers__one_that_waits_silently_is_replaced(void **state)
{
	struct fixture *fixture = start(4);

	(void)state;
	for (unsigned i = 0; i < 3; i++)
		ask(fixture, SILENT);
	ask(fixture, QUICK);
	await_answers(fixture, 1);
	await_waiting(fixture, 3);
	permit(fixture, 3);
	await_answers(fixture, 3);
	ask(fixture, ENDS);
	assert_int_equal(finish(fixture), 0);
}

/* There is a most of threads: what comes then waits until one of them is free. */
static void test_workers__no_more_than_allowed(void **state)
{
	struct fixture *fixture = start(2);

	(void)state;
	ask(fixture, SAYS);
	ask(fixture, SAYS);
	ask(fixture, QUICK);
	await_waiting(fixture, 2);
	assert_int_not_equal(sem_trywait(&fixture->answers), 0);
	permit(fixture, 1);
	await_answers(fixture, 2);
	permit(fixture, 1);
	await_answers(fixture, 1);
	ask(fixture, ENDS);
	assert_int_equal(finish(fixture), 0);
}

/* Who cannot receive ends all of it, with his error. */
static void test_workers__failed_receive_ends_them(void **state)
{
	struct fixture *fixture = start(4);

	(void)state;
	ask(fixture, FAILS);
	await_answers(fixture, 1);
	ask(fixture, QUICK);
	assert_int_equal(finish(fixture), -EIO);
}

/* The end of the source, as by an unmount. */
static void test_workers__end_while_others_wait_for_their_turn(void **state)
{
	struct fixture *fixture = start(4);

	(void)state;
	ask(fixture, SAYS);
	ask(fixture, SAYS);
	permit(fixture, 2);
	await_answers(fixture, 2);
	(void)shutdown(fixture->sockets[0], SHUT_WR);
	atomic_store(&fixture->ended, true);
	assert_int_equal(finish(fixture), 0);
}

/* A client that sleeps for longer than the watcher looks finds somebody who receives. */
static void test_workers__watcher_wakes_up_again(void **state)
{
	struct fixture *fixture = start(4);

	(void)state;
	for (unsigned i = 0; i < 3; i++) {
		ask(fixture, QUICK);
		await_answers(fixture, 1);
		(void)usleep(200000);
		ask(fixture, SILENT);
		ask(fixture, QUICK);
		await_answers(fixture, 1);
		permit(fixture, 1);
		await_answers(fixture, 1);
	}
	ask(fixture, ENDS);
	assert_int_equal(finish(fixture), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_workers__answer),
		cmocka_unit_test(test_workers__one_that_says_it_waits_is_replaced),
		cmocka_unit_test(test_workers__one_that_waits_silently_is_replaced),
		cmocka_unit_test(test_workers__no_more_than_allowed),
		cmocka_unit_test(test_workers__failed_receive_ends_them),
		cmocka_unit_test(test_workers__end_while_others_wait_for_their_turn),
		cmocka_unit_test(test_workers__watcher_wakes_up_again),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
