/* SPDX-License-Identifier: Apache-2.0 */
/* Packets between engines and the GPU helper. With KVFS_LONG set the parser is fuzzed for a minute.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

#include "gpu/wire.h"
#include "tests/unit/unit_fs.h"

static int pair[2];

static int setup(void **state)
{
	(void)state;
	return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair);
}

static int teardown(void **state)
{
	(void)state;
	(void)close(pair[0]);
	(void)close(pair[1]);
	return 0;
}

static unsigned descriptors(void)
{
	unsigned count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static struct kvg_message sent, got;

static void message_init(uint16_t type)
{
	memset(&sent, 0, sizeof(sent));
	memset(&got, 0xee, sizeof(got));
	sent.type = type;
}

/* Every field and payload of a packet comes out as it went in. */
static void test_wire__carries_all_fields(void **state)
{
	const struct kvg_ticket ticket = {"0123456789abcde", 1, 1ull << 40, 3};
	struct kvg_ticket out;

	(void)state;
	message_init(KVG_MAP);
	sent.flags = KVG_FLAG_NOSTAGE | KVG_FLAG_REVOCABLE;
	sent.id = 0x1122334455667788;
	sent.map = 5;
	sent.offset = 6;
	sent.length = UINT64_MAX;
	kvg_ticket_put(&ticket, &sent);
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	assert_int_equal(kvg_receive(pair[1], &got), 0);
	assert_int_equal(got.flags, sent.flags);
	assert_int_equal(got.id, sent.id);
	assert_int_equal(got.map, 5);
	assert_int_equal(got.offset, 6);
	assert_true(got.length == UINT64_MAX);
	assert_int_equal(kvg_ticket_get(&got, &out), 0);
	assert_memory_equal(&out, &ticket, sizeof(out));
	sent.type = KVG_PREFETCH;
	sent.flags = 0;
	sent.priority = -7;
	sent.ttl_ms = UINT32_MAX;
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	assert_int_equal(kvg_receive(pair[1], &got), 0);
	assert_int_equal(got.priority, -7);
	assert_true(got.ttl_ms == UINT32_MAX && got.version == KVG_WIRE_VERSION);
	message_init(KVG_READY);
	sent.status = -EIO;
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	assert_int_equal(kvg_receive(pair[1], &got), 0);
	assert_int_equal(got.status, -EIO);
	assert_int_equal(kvg_ticket_get(&got, &out), -EPROTO);
}

/* The longer replies too; texts end inside their fields whatever comes. */
static void test_wire__carries_hello_and_counters(void **state)
{
	struct kvg_hello hello = {.granularity = 1, .segment = 2, .budget = 3}, hello_out;
	struct kvg_wire_stat stat, stat_out;

	(void)state;
	memset(hello.name, 'n', sizeof(hello.name));
	message_init(KVG_HELLO);
	sent.flags = KVG_FLAG_REPLY;
	kvg_hello_put(&hello, &sent);
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	assert_int_equal(kvg_receive(pair[1], &got), 0);
	assert_int_equal(kvg_hello_get(&got, &hello_out), 0);
	assert_int_equal(hello_out.budget, 3);
	assert_int_equal(strlen(hello_out.name), sizeof(hello.name) - 1);
	memset(&stat, 7, sizeof(stat));
	message_init(KVG_STAT);
	sent.flags = KVG_FLAG_REPLY;
	kvg_stat_put(&stat, &sent);
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	assert_int_equal(kvg_receive(pair[1], &got), 0);
	assert_int_equal(kvg_stat_get(&got, &stat_out), 0);
	assert_memory_equal(&stat_out, &stat, sizeof(stat));
}

/* As many descriptors as the kernel lets through in one packet. */
static void test_wire__carries_253_descriptors(void **state)
{
	uint64_t sizes[KVG_FDS_MAX];
	unsigned before = descriptors();

	(void)state;
	message_init(KVG_MAP);
	sent.flags = KVG_FLAG_REPLY | KVG_FLAG_MORE;
	for (unsigned i = 0; i < KVG_FDS_MAX; i++) {
		sizes[i] = i * 3;
		sent.fds[i] = pair[0];
	}
	sent.fd_count = KVG_FDS_MAX;
	kvg_sizes_put(sizes, KVG_FDS_MAX, &sent);
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	assert_int_equal(kvg_receive(pair[1], &got), 0);
	assert_int_equal(got.fd_count, KVG_FDS_MAX);
	assert_int_equal(descriptors(), before + KVG_FDS_MAX);
	for (unsigned i = 0; i < KVG_FDS_MAX; i++) {
		assert_int_equal(kvg_sizes_get(&got, i), i * 3);
		assert_true(fcntl(got.fds[i], F_GETFD) & FD_CLOEXEC);
	}
	kvg_message_close(&got);
	assert_int_equal(descriptors(), before);
}

/* What cannot be taken for want of descriptors is said, with the rest of the packet. */
static void test_wire__says_that_descriptors_are_used_up(void **state)
{
	struct rlimit limit, low;
	unsigned before = descriptors();
	int fd;

	(void)state;
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
	message_init(KVG_MAP);
	sent.flags = KVG_FLAG_REPLY;
	sent.map = 5;
	sent.fds[0] = sent.fds[1] = pair[0];
	sent.fd_count = 2;
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	fd = fcntl(pair[0], F_DUPFD, 0);
	(void)close(fd);
	/* There is room for one of the two. */
	low = (struct rlimit){.rlim_cur = (rlim_t)fd + 1, .rlim_max = limit.rlim_max};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	assert_int_equal(kvg_receive(pair[1], &got), -EMFILE);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
	assert_int_equal(got.map, 5);
	assert_int_equal(got.fd_count, 0);
	assert_int_equal(descriptors(), before);
}

/* Descriptors that a request may not have are closed with it. */
static void test_wire__refuses_surplus_descriptors(void **state)
{
	const struct kvg_ticket ticket = {0};
	unsigned before = descriptors();

	(void)state;
	message_init(KVG_MAP);
	kvg_ticket_put(&ticket, &sent);
	sent.fds[0] = sent.fds[1] = pair[0];
	sent.fd_count = 2;
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	assert_int_equal(kvg_receive(pair[1], &got), -EPROTO);
	message_init(KVG_UNMAP);
	sent.fds[0] = pair[0];
	sent.fd_count = 1;
	assert_int_equal(kvg_send(pair[0], &sent), 0);
	assert_int_equal(kvg_receive(pair[1], &got), -EPROTO);
	assert_int_equal(descriptors(), before);
}

/* An empty packet is as good as the end, and what it brought is closed. */
static void test_wire__closes_what_an_empty_packet_brings(void **state)
{
	char control[CMSG_SPACE(sizeof(int))] = {0};
	struct msghdr packet = {.msg_control = control, .msg_controllen = sizeof(control)};
	struct cmsghdr *item = CMSG_FIRSTHDR(&packet);
	unsigned before = descriptors();

	(void)state;
	item->cmsg_level = SOL_SOCKET;
	item->cmsg_type = SCM_RIGHTS;
	item->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(item), &pair[0], sizeof(int));
	assert_int_equal(sendmsg(pair[0], &packet, 0), 0);
	assert_int_equal(kvg_receive(pair[1], &got), -EPIPE);
	assert_int_equal(descriptors(), before);
}

static int decode(const uint8_t *data, size_t size)
{
	return kvg_message_decode(data, size, &got);
}

/* Whatever is wrong with a packet is seen before anything of it is used. */
static void test_wire__refuses_what_is_no_packet(void **state)
{
	static const struct {
		unsigned at;
		uint8_t value;
		int result;
	} wrong[] = {
		{0, 'x', -EPROTO},                                                 /* magic */
		{4, 1, -EPROTONOSUPPORT}, {5, 1, -EPROTONOSUPPORT},                /* version */
		{6, 0, -EPROTO},                                                   /* type */
		{6, _KVG_TYPE_MAX, -EPROTO}, {7, 1, -EPROTO}, {11, 0x80, -EPROTO}, /* flags */
		{8, KVG_FLAG_REPLY, -EPROTO}, /* there is no reply to UNMAP */
		{12, 1, -EPROTO},             /* segments of a request */
		{48, 1, -EPROTO},             /* a positive status */
		{52, 1, -EPROTO},             /* payload that is not there */
		{56, 1, -EPROTO},             /* a priority, of nothing to be staged */
		{60, 1, -EPROTO},             /* a time, of the same */
	};
	uint8_t data[KVG_HEADER_SIZE + 8];

	(void)state;
	message_init(KVG_UNMAP);
	memset(data, 0, sizeof(data));
	for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		kvg_message_encode(&sent, data);
		assert_int_equal(decode(data, KVG_HEADER_SIZE), 0);
		data[wrong[i].at] = wrong[i].value;
		assert_int_equal(decode(data, KVG_HEADER_SIZE), wrong[i].result);
	}
	kvg_message_encode(&sent, data);
	assert_int_equal(decode(data, KVG_HEADER_SIZE - 1), -EPROTO);
	assert_int_equal(decode(data, KVG_HEADER_SIZE + 8), -EPROTO);
	assert_int_equal(decode(data, 0), -EPROTO);
	/* The sizes of a MAP's reply must be as many as its segments. */
	message_init(KVG_MAP);
	sent.flags = KVG_FLAG_REPLY;
	sent.segments = 2;
	sent.payload_size = 8;
	kvg_message_encode(&sent, data);
	assert_int_equal(decode(data, KVG_HEADER_SIZE + 8), -EPROTO);
	sent.segments = 1;
	kvg_message_encode(&sent, data);
	assert_int_equal(decode(data, KVG_HEADER_SIZE + 8), 0);
}

/* Of a packet of another version is told what an answer needs, whatever else is in it. */
static void test_wire__tells_another_version(void **state)
{
	uint8_t data[KVG_HEADER_SIZE + 3];

	(void)state;
	memset(data, 0xee, sizeof(data));
	message_init(KVG_HELLO);
	sent.flags = KVG_FLAG_REPLY;
	sent.id = 77;
	sent.status = -EPROTONOSUPPORT;
	kvg_message_encode(&sent, data);
	data[4] = 9;
	data[5] = 1;
	data[60] = 5;
	assert_int_equal(decode(data, sizeof(data)), -EPROTONOSUPPORT);
	assert_int_equal(got.version, 256 + 9);
	assert_int_equal(got.type, KVG_HELLO);
	assert_int_equal(got.flags, KVG_FLAG_REPLY);
	assert_int_equal(got.id, 77);
	assert_int_equal(got.status, -EPROTONOSUPPORT);
	assert_int_equal(got.fd_count, 0);
}

/* The ends of a connection are told apart from bad packets. */
static void test_wire__says_how_a_connection_is(void **state)
{
	(void)state;
	message_init(KVG_UNMAP);
	assert_int_equal(kvg_receive(pair[1], &got), -EAGAIN);
	assert_int_equal(send(pair[0], "nonsense", 8, 0), 8);
	assert_int_equal(kvg_receive(pair[1], &got), -EPROTO);
	int r = 0;
	for (unsigned i = 0; i < 100000 && r == 0; i++)
		r = kvg_send(pair[0], &sent);
	assert_int_equal(r, -EAGAIN);
	(void)close(pair[1]);
	assert_int_equal(kvg_send(pair[0], &sent), -EPIPE);
	assert_int_equal(kvg_receive(pair[0], &got), -EPIPE);
}

/* Random changes of good packets: refused, or everything in them within its bounds. */
static void test_wire__survives_random_packets(void **state)
{
	static uint8_t good[KVG_HEADER_SIZE + KVG_PAYLOAD_MAX];
	static uint8_t bad[sizeof(good)];
	bool thorough = getenv("KVFS_LONG") != NULL;
	time_t end = time(NULL) + 60;
	unsigned random = 1, accepted = 0;

	(void)state;
	for (unsigned round = 0; round < 200000 || (thorough && time(NULL) < end); round++) {
		struct kvg_ticket ticket;
		struct kvg_hello hello;
		struct kvg_wire_stat stat;
		size_t size;

		message_init((uint16_t)(1 + rand_r(&random) % (_KVG_TYPE_MAX - 1)));
		sent.flags = rand_r(&random) % 2 ? KVG_FLAG_REPLY : 0;
		sent.segments = (uint32_t)(rand_r(&random) % 4);
		sent.payload_size =
			(uint32_t)(rand_r(&random) % 2 ? KVG_TICKET_SIZE : sent.segments * 8);
		size = KVG_HEADER_SIZE + sent.payload_size;
		kvg_message_encode(&sent, good);
		memcpy(bad, good, size);
		for (int k = rand_r(&random) % 4; k > 0; k--)
			bad[(size_t)rand_r(&random) % size] = (uint8_t)rand_r(&random);
		size -= rand_r(&random) % 16 == 0 ? (size_t)rand_r(&random) % size : 0;
		if (decode(bad, size) < 0)
			continue;
		accepted++;
		assert_true(got.type > 0 && got.type < _KVG_TYPE_MAX);
		assert_true(got.payload_size <= KVG_PAYLOAD_MAX && got.segments <= KVG_FDS_MAX);
		(void)kvg_ticket_get(&got, &ticket);
		(void)kvg_hello_get(&got, &hello);
		(void)kvg_stat_get(&got, &stat);
		for (unsigned i = 0; i < got.segments; i++)
			(void)kvg_sizes_get(&got, i);
	}
	assert_true(accepted > 1000);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_wire__carries_all_fields, setup, teardown),
		cmocka_unit_test_setup_teardown(
			test_wire__carries_hello_and_counters, setup, teardown),
		cmocka_unit_test_setup_teardown(
			test_wire__carries_253_descriptors, setup, teardown),
		cmocka_unit_test_setup_teardown(
			test_wire__says_that_descriptors_are_used_up, setup, teardown),
		cmocka_unit_test_setup_teardown(
			test_wire__refuses_surplus_descriptors, setup, teardown),
		cmocka_unit_test_setup_teardown(
			test_wire__closes_what_an_empty_packet_brings, setup, teardown),
		cmocka_unit_test_setup_teardown(
			test_wire__refuses_what_is_no_packet, setup, teardown),
		cmocka_unit_test_setup_teardown(test_wire__tells_another_version, setup, teardown),
		cmocka_unit_test_setup_teardown(
			test_wire__says_how_a_connection_is, setup, teardown),
		cmocka_unit_test(test_wire__survives_random_packets),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
