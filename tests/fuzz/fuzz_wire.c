/* SPDX-License-Identifier: Apache-2.0 */
/* Packets between engines and the GPU helper, and what is in them. */
#include <stdlib.h>

#include "fs/base.h"
#include "gpu/wire.h"
#include "tests/fuzz/fuzz.h"

/* What was taken apart is put together to the same bytes. */
static void encode_again(const struct kvg_message *message, const uint8_t *data)
{
	uint8_t header[KVG_HEADER_SIZE];

	kvg_message_encode(message, header);
	if (memcmp(header, data, sizeof(header)) != 0)
		abort();
}

/* A payload that one reader takes is written back as it was. */
static void read_payload(const struct kvg_message *message)
{
	static struct kvg_message again;
	struct kvg_ticket ticket;
	struct kvg_hello hello;
	struct kvg_wire_stat stat;

	if (kvg_ticket_get(message, &ticket) == 0) {
		kvg_ticket_put(&ticket, &again);
		if (memcmp(again.payload, message->payload, KVG_TICKET_SIZE) != 0)
			abort();
	}
	if (kvg_stat_get(message, &stat) == 0) {
		kvg_stat_put(&stat, &again);
		if (memcmp(again.payload, message->payload, KVG_WIRE_STAT_SIZE) != 0)
			abort();
	}
	/* Texts end where they must. */
	if (kvg_hello_get(message, &hello) == 0 &&
		strlen(hello.name) + strlen(hello.mode) + strlen(hello.reasons) >
			sizeof(hello.name) + sizeof(hello.mode) + sizeof(hello.reasons))
		abort();
	if (message->type == KVG_MAP && message->flags & KVG_FLAG_REPLY)
		for (unsigned i = 0; i < message->segments; i++)
			(void)kvg_sizes_get(message, i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct kvg_message message;

	if (kvg_message_decode(data, size, &message) < 0)
		return 0;
	if (message.payload_size != size - KVG_HEADER_SIZE || message.fd_count != 0 ||
		message.type >= _KVG_TYPE_MAX || message.status > 0)
		abort();
	encode_again(&message, data);
	read_payload(&message);
	return 0;
}
