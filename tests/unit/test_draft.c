/* SPDX-License-Identifier: Apache-2.0 */
/* Drafts: who changed them, and what of them is missing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fs/caller.h"
#include "fs/draft.h"

/* A failed write leaves a gap until its bytes are written after all, front to back. */
static void test_draft__gap_closed_by_a_second_try(void **state)
{
	struct kv_draft draft;

	(void)state;
	kv_draft_init(&draft);
	kv_draft_failed(&draft, 1000, 3000, -ENOSPC);
	assert_int_equal(draft.error, -ENOSPC);
	kv_draft_written(&draft, 0, 1000);
	assert_int_equal(draft.error, -ENOSPC);
	kv_draft_written(&draft, 1000, 2000);
	assert_int_equal(draft.error, -ENOSPC);
	kv_draft_written(&draft, 1500, 3000);
	assert_int_equal(draft.error, 0);
}

/* Back to front as well; a piece of the middle alone does not count. */
static void test_draft__gap_closed_backwards(void **state)
{
	struct kv_draft draft;

	(void)state;
	kv_draft_init(&draft);
	kv_draft_failed(&draft, 1000, 3000, -EIO);
	kv_draft_failed(&draft, 5000, 6000, -ENOSPC);
	assert_int_equal(draft.error, -EIO);
	kv_draft_written(&draft, 2000, 2500);
	kv_draft_written(&draft, 3000, 9000);
	assert_int_equal(draft.error, -EIO);
	kv_draft_written(&draft, 1000, 3000);
	assert_int_equal(draft.error, 0);
}

/* Who cuts the file off before the gap does not want the bytes; behind its beginning is not enough.
 */
static void test_draft__gap_cut_off(void **state)
{
	struct kv_draft draft;

	(void)state;
	kv_draft_init(&draft);
	kv_draft_failed(&draft, 1000, UINT64_MAX, -ENOMEM);
	kv_draft_cut(&draft, 5000);
	assert_int_equal(draft.error, -ENOMEM);
	kv_draft_cut(&draft, 1000);
	assert_int_equal(draft.error, 0);
}

/* Calls that were wrong in themselves left nothing out; what is not the user's fault is EIO. */
static void test_draft__errors(void **state)
{
	struct kv_draft draft;

	(void)state;
	kv_draft_init(&draft);
	kv_draft_failed(&draft, 0, 10, -EFBIG);
	kv_draft_failed(&draft, 0, 10, -EINVAL);
	kv_draft_failed(&draft, 0, 10, -EOPNOTSUPP);
	assert_int_equal(draft.error, 0);
	kv_draft_failed(&draft, 0, 10, -ESTALE);
	assert_int_equal(draft.error, -EIO);
	kv_draft_reset(&draft);
	assert_int_equal(draft.error, 0);
}

/* More processes than there is room for: each counts, rather than none. */
static void test_draft__changers(void **state)
{
	struct kv_draft draft;
	pid_t children[KV_DRAFT_PROCESSES + 1];

	(void)state;
	kv_draft_init(&draft);
	kv_draft_changed_by(&draft, 0, 0);
	assert_false(kv_draft_was_changed_by(&draft, getpid()));
	kv_draft_changed_by(&draft, getpid(), 0);
	assert_true(kv_draft_was_changed_by(&draft, getpid()));
	assert_false(kv_draft_was_changed_by(&draft, getppid()));
	for (unsigned i = 0; i <= KV_DRAFT_PROCESSES; i++) {
		children[i] = fork();
		if (children[i] == 0) {
			(void)pause();
			_exit(0);
		}
		kv_draft_changed_by(&draft, children[i], 0);
	}
	assert_true(kv_draft_was_changed_by(&draft, children[0]));
	assert_true(kv_draft_was_changed_by(&draft, getppid()));
	for (unsigned i = 0; i <= KV_DRAFT_PROCESSES; i++) {
		(void)kill(children[i], SIGKILL);
		(void)waitpid(children[i], NULL, 0);
	}
}

static bool is_lost(const struct kv_draft *draft)
{
	return kv_caller_end_of(draft->watch, draft->watched) == KV_END_KILLED;
}

/* A watched process: whether it was killed shows also when it has been reaped. */
static void test_draft__watch(void **state)
{
	struct kv_draft draft;

	(void)state;
	for (int killed = 0; killed < 2; killed++) {
		pid_t child = fork();

		if (child == 0) {
			if (killed)
				(void)pause();
			_exit(3);
		}
		kv_draft_init(&draft);
		kv_draft_watch(&draft, child);
		assert_true(draft.watch >= 0);
		if (killed) {
			assert_false(is_lost(&draft));
			(void)kill(child, SIGKILL);
		}
		siginfo_t info;
		assert_int_equal(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), 0);
		assert_int_equal(is_lost(&draft), killed);
		assert_int_equal(waitpid(child, NULL, 0), child);
		/* Before Linux 6.15 that is not to be known. */
		if (killed && !is_lost(&draft))
			print_message("the kernel does not tell how reaped processes ended\n");
		else
			assert_int_equal(is_lost(&draft), killed);
		kv_draft_done(&draft);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_draft__gap_closed_by_a_second_try),
		cmocka_unit_test(test_draft__gap_closed_backwards),
		cmocka_unit_test(test_draft__gap_cut_off),
		cmocka_unit_test(test_draft__errors),
		cmocka_unit_test(test_draft__changers),
		cmocka_unit_test(test_draft__watch),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
