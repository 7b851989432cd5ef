/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A thread that does to a QP's memory what a NIC does, with the order that a NIC has and no more, so that ThreadSanitizer
 * sees what the header itself must order. Requests are writes of 8 inline bytes to an array; each gets its completion.
 */
#ifndef IBGDA_TEST_NIC_H
#define IBGDA_TEST_NIC_H

#include <ibgda_device.cuh>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#define CHECK(condition)                                                                        \
	do {                                                                                    \
		if (!(condition)) {                                                             \
			std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
			std::exit(1);                                                           \
		}                                                                               \
	} while (0)

/* What makes the NIC fetch WQEs. Whichever it is, it orders them for itself: the other word is read without order. */
enum class Watches { RECORD, DOORBELL };

class Nic {
public:
	ibgda_qp qp = {};
	ibgda_cq cq = {};
	/* What requests write to; a request must not write where another, not known complete, does. */
	std::unique_ptr<ibgda_u64[]> target;

	Nic(ibgda_u32 depth, ibgda_u64 slots, Watches watches)
	    : target(new ibgda_u64[slots]()), ring(new Block[depth]()), completions(new Block[depth]), watches(watches)
	{
		std::memset(static_cast<void *>(completions.get()), 0xff, sizeof(Block) * depth);
		cq.ring = completions[0].bytes;
		cq.doorbell_record = cq_record;
		cq.depth = depth;
		qp.send_ring = ring[0].bytes;
		qp.doorbell_record = record;
		qp.doorbell = &doorbell;
		qp.send_cq = &cq;
		qp.number = 0x4a;
		qp.send_depth = depth;
		qp.limit = depth;
		cq.limit = &qp.limit;
		qp.post_timeout_ns = 60000000000ull;
		thread = std::thread([this] { run(); });
	}

	~Nic()
	{
		stop.store(true, std::memory_order_relaxed);
		thread.join();
	}

private:
	struct alignas(64) Block {
		ibgda_u8 bytes[64];
	};

	std::unique_ptr<Block[]> ring, completions;
	ibgda_u32 record[2] = {}, cq_record[2] = {};
	ibgda_u64 doorbell = 0;
	Watches watches;
	std::atomic<bool> stop{false};
	std::thread thread;

	/* The 16-bit count of slots that may be fetched. */
	ibgda_u32 told()
	{
		if (watches == Watches::RECORD)
			return ibgda_be32(__atomic_load_n(&record[1], __ATOMIC_ACQUIRE));
		ibgda_u32 rung = ibgda_be32((ibgda_u32)__atomic_load_n(&doorbell, __ATOMIC_ACQUIRE)) >> 8;
		ibgda_u32 recorded = ibgda_be32(__atomic_load_n(&record[1], __ATOMIC_RELAXED));
		CHECK((ibgda_u16)(recorded - rung) <= qp.send_depth);
		return rung;
	}

	void run()
	{
		ibgda_u64 done = 0;
		while (!stop.load(std::memory_order_relaxed)) {
			ibgda_u16 count = (ibgda_u16)(told() - (ibgda_u32)done);
			if (!count)
				std::this_thread::yield();
			CHECK(count <= qp.send_depth);
			for (; count; count--)
				execute(done++);
		}
	}

	void execute(ibgda_u64 index)
	{
		ibgda_u32 words[16];
		std::memcpy(words, ring[index & (qp.send_depth - 1)].bytes, sizeof words);
		CHECK(ibgda_be32(words[0]) == ((ibgda_u32)(index & 0xffff) << 8 | IBGDA_OP_RDMA_WRITE));
		CHECK(ibgda_be32(words[1]) == (qp.number << 8 | 3));
		CHECK(ibgda_be32(words[8]) == (8 | IBGDA_INLINE_FLAG));
		ibgda_u64 remote = (ibgda_u64)ibgda_be32(words[4]) << 32 | ibgda_be32(words[5]);
		std::memcpy(reinterpret_cast<void *>(remote), words + 9, 8);

		/* The owner bit is in the last byte, and so is last. */
		ibgda_u8 *cqe = completions[index & (qp.send_depth - 1)].bytes;
		std::memset(cqe, 0, 48);
		ibgda_u64 *tail = reinterpret_cast<ibgda_u64 *>(cqe + 48);
		ibgda_u64 owner = index & qp.send_depth ? 1 : 0;
		ibgda_u64 high = owner << 56 | (ibgda_u64)ibgda_be32((ibgda_u32)(index & 0xffff) << 16) << 32 |
				 ibgda_be32((ibgda_u32)IBGDA_OP_RDMA_WRITE << 24 | qp.number);
		__atomic_store_n(tail, 0, __ATOMIC_RELAXED);
		__atomic_store_n(tail + 1, high, __ATOMIC_RELEASE);
	}
};

#endif
