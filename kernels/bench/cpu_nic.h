/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The other end of M6: CPU threads that do what a NIC or a proxy would, one request at a time. Plain C++.
 */
#ifndef IBGDA_BENCH_CPU_NIC_H
#define IBGDA_BENCH_CPU_NIC_H

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "check.h"

namespace bench {

/* A thread that ends by itself, or soon after it is told to. */
class Engine {
	std::atomic<bool> stop{false};
	std::string wrong; /* the thread's, until it has been joined */
	std::thread thread;

public:
	/* `work` returns what went wrong, or nothing. */
	template <class Work> explicit Engine(Work work) : thread([this, work] { wrong = work(stop); }) {}
	~Engine()
	{
		stop = true;
		if (thread.joinable())
			thread.join();
	}
	Engine(const Engine &) = delete;

	std::string finish()
	{
		stop = true;
		thread.join();
		return wrong;
	}
};

/* Spins until the word has the value; false: told to stop. A look at a line that nobody writes costs the link nothing. */
inline bool await(const uint64_t *word, uint64_t value, const std::atomic<bool> &stop)
{
	while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value)
		if (stop.load(std::memory_order_relaxed))
			return false;
	return true;
}

/* What a doorbell found: copied at once as a NIC would fetch it, compared after the completion is on its way. */
struct Fetched {
	uint8_t wqe[WQE_BYTES];
	uint32_t record;
};

/*
 * A NIC: doorbell, record and WQE (if both are in host memory), completion. A WQE or record that is not yet what the doorbell
 * announced is what the fences are there to prevent.
 */
inline std::string be_nic(const Queue &queue, const Plan &plan, bool reads_queue, bool record, bool collapsed,
			  const std::atomic<bool> &stop)
{
	uint32_t stale = 0;
	std::string first;
	for (uint32_t i = 0; i < plan.each; i++) {
		uint64_t index = queue.producer + i;
		if (!await(queue.doorbell, expected_doorbell(index + 1, queue.qpn), stop))
			return "the NIC saw " + std::to_string(i) + " doorbells";
		Fetched fetched;
		if (reads_queue) {
			fetched.record = __atomic_load_n(queue.record + 1, __ATOMIC_ACQUIRE);
			std::memcpy(fetched.wqe, queue.ring + (index & (queue.depth - 1)) * 64, WQE_BYTES);
		}
		uint64_t *cqe = reinterpret_cast<uint64_t *>(queue.cq + (collapsed ? 0 : i & (queue.cq_depth - 1)) * 64);
		for (int word = 0; word < 7; word++)
			__atomic_store_n(cqe + word, 0, __ATOMIC_RELAXED);
		__atomic_store_n(cqe + 7, completion_tail(index, collapsed ? 0 : i, queue.cq_depth, queue.qpn), __ATOMIC_RELEASE);
		if (!reads_queue)
			continue;
		uint8_t expected[WQE_BYTES];
		expected_wqe(expected, index, queue.qpn, request_of(plan, 0, i), plan.inlined);
		uint32_t counters[2] = {0, fetched.record};
		std::string wrong = record ? check_record(counters, index + 1) : "";
		if (std::memcmp(fetched.wqe, expected, WQE_BYTES))
			wrong += " WQE " + std::to_string(index) + " is " + hex(fetched.wqe, WQE_BYTES);
		if (!wrong.empty() && !stale++)
			first = wrong;
	}
	return stale ? std::to_string(stale) + " requests were not in memory at their doorbell, the first: " + first : "";
}

/* What the GPU hands to a proxy: 40 bytes, the last of which say that the others are there. */
struct Descriptor {
	uint64_t remote, local;
	uint32_t rkey, lkey;
	uint32_t bytes, qpn;
	uint64_t sequence;
};

/* Idealised: builds the WQE in host memory, rings a doorbell that is memory, and reports completion at once. */
inline std::string be_proxy(const Queue &queue, const Descriptor *descriptor, uint64_t *done, uint32_t rounds,
			    const std::atomic<bool> &stop)
{
	for (uint32_t i = 0; i < rounds; i++) {
		if (!await(&descriptor->sequence, i + 1, stop))
			return "the proxy saw " + std::to_string(i) + " descriptors";
		uint64_t index = queue.producer + i;
		expected_wqe(queue.ring + (index & (queue.depth - 1)) * 64, index, descriptor->qpn,
			     {descriptor->remote, descriptor->local, descriptor->rkey, descriptor->lkey, descriptor->bytes}, false);
		uint32_t counter;
		put_be32(reinterpret_cast<uint8_t *>(&counter), (uint32_t)((index + 1) & 0xffff));
		__atomic_store_n(queue.record + 1, counter, __ATOMIC_RELEASE);
		__atomic_store_n(queue.doorbell, expected_doorbell(index + 1, descriptor->qpn), __ATOMIC_RELEASE);
		__atomic_store_n(done, i + 1, __ATOMIC_RELEASE);
	}
	return "";
}

/* The flag comes back as it is. */
inline std::string be_mirror(const uint64_t *flag, uint64_t *done, uint32_t rounds, const std::atomic<bool> &stop)
{
	for (uint32_t i = 0; i < rounds; i++) {
		if (!await(flag, i + 1, stop))
			return "the CPU saw " + std::to_string(i) + " flags";
		__atomic_store_n(done, i + 1, __ATOMIC_RELEASE);
	}
	return "";
}

} // namespace bench

#endif
