/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which devices answer, and which do not: kv_devices_watch of device.h.
 */
#include "fs/device.h"
#include "fs/device_internal.h"

/* So many times the time-out: what is under way for longer is lost, whatever else is answered. */
#define LOST_FACTOR 4u

uint64_t kv_devices_slow(const struct kv_devices *devices)
{
	return atomic_load_explicit(&devices->slow, memory_order_relaxed);
}

uint64_t kv_devices_hung(const struct kv_devices *devices)
{
	return atomic_load_explicit(&devices->hung, memory_order_relaxed);
}

bool kv_devices_all_slow(const struct kv_devices *devices)
{
	uint64_t all = devices->count == 64 ? UINT64_MAX : (UINT64_C(1) << devices->count) - 1;

	return (kv_devices_slow(devices) & all) == all;
}

void kv_devices_closing(struct kv_devices *devices)
{
	atomic_store_explicit(&devices->closing, true, memory_order_relaxed);
}

/* Once for each time that a device hangs. */
static void log_change(struct kv_devices *devices, uint64_t before, uint64_t after)
{
	for (unsigned i = 0; i < devices->count; i++) {
		const uint64_t bit = UINT64_C(1) << i;

		if (after & ~before & bit)
			kv_log_error("device",
				"does not answer; what is on it is missing until it does device=%s",
				devices->device[i].path);
		if (before & ~after & bit)
			kv_log_warning(
				"device", "answers again device=%s", devices->device[i].path);
	}
}

void kv_devices_excuse(struct kv_devices *devices, int64_t now_ms)
{
	devices->excused_ms = now_ms;
}

/*
 * Since when the device has been silent, by what is under way on it since OLDEST. One that answers
 * others meanwhile has a long queue; but what is as old as that is lost.
 */
static int64_t silent_since(const struct kv_device *device, int64_t oldest, uint64_t hung_ms)
{
	int64_t answered = atomic_load_explicit(&device->answered_ms, memory_order_relaxed);
	int64_t latest = oldest + (int64_t)(LOST_FACTOR * hung_ms);

	if (oldest == 0 || answered <= oldest)
		return oldest;
	return answered < latest ? answered : latest;
}

bool kv_devices_watch(
	struct kv_devices *devices, int64_t now_ms, uint64_t slow_ms, uint64_t hung_ms)
{
	int64_t oldest[KV_DEVICES_MAX] = {0};
	uint64_t slow = 0, hung = 0;
	uint64_t slow_before = kv_devices_slow(devices), hung_before = kv_devices_hung(devices);

	const unsigned count = devices->count;

	assert(count <= KV_DEVICES_MAX);
	kv_rings_oldest(devices, oldest);
	for (unsigned i = 0; i < count; i++) {
		struct kv_device *device = &devices->device[i];
		int64_t flush = atomic_load_explicit(&device->flush_since_ms, memory_order_relaxed);

		if (flush > 0 && (oldest[i] == 0 || flush < oldest[i]))
			oldest[i] = flush;
		if (oldest[i] != 0 && oldest[i] < devices->excused_ms)
			oldest[i] = devices->excused_ms;
		oldest[i] = silent_since(device, oldest[i], hung_ms);
		atomic_store_explicit(&device->oldest_ms, oldest[i], memory_order_relaxed);
		if (oldest[i] == 0 || oldest[i] > now_ms)
			continue;
		if ((uint64_t)(now_ms - oldest[i]) >= slow_ms)
			slow |= UINT64_C(1) << i;
		if ((uint64_t)(now_ms - oldest[i]) >= hung_ms)
			hung |= UINT64_C(1) << i;
	}
	atomic_store_explicit(&devices->slow, slow, memory_order_relaxed);
	atomic_store_explicit(&devices->hung, hung, memory_order_relaxed);
	log_change(devices, hung_before, hung);
	return slow != slow_before || hung != hung_before;
}
