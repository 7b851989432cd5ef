/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a measurement asks of an implementation, in plain data: where the queues of a QP lie, and which requests are posted.
 * For the host's compiler as well as nvcc.
 */
#ifndef IBGDA_BENCH_PLAN_H
#define IBGDA_BENCH_PLAN_H

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define BENCH_BOTH __host__ __device__ __forceinline__
#else
#define BENCH_BOTH inline
#endif

namespace bench {

/* Where send ring and record, and the completion queue lie: rows A, B and C of facts/device-cost.md. */
enum class Where { gpu, host, mixed };

inline const char *name_of(Where where)
{
	return where == Where::gpu ? "A" : where == Where::host ? "B" : "C";
}

/* Slots of every send ring. */
constexpr uint32_t DEPTH = 1024;

/* One QP with its send CQ. Addresses hold on GPU and host alike, as far as the host can reach the memory. */
struct Queue {
	uint8_t *ring;		   /* depth WQEs of 64 bytes */
	uint32_t *record;	   /* two words: receive counter, send counter */
	uint64_t *doorbell;	   /* register in a page of its own */
	uint8_t *cq;		   /* cq_depth completions of 64 bytes */
	uint32_t *cq_record;	   /* two words: consumer index, arm */
	uint32_t qpn, cqn;
	bool on_gpu;		   /* ring and record are in GPU memory */
	uint32_t depth, cq_depth;  /* powers of two */
	uint64_t producer;	   /* requests posted so far */
	uint64_t completed;	   /* requests known complete; beyond producer: every slot is known to be free for good */
};

/*
 * Requests of one QP: each of `posters` posts `each` RDMA WRITEs. Every one has addresses of its own, from which the check
 * of the ring (check.h) tells who posted it and which one it was.
 */
struct Plan {
	uint64_t remote, local;
	uint32_t rkey, lkey;
	uint32_t bytes;
	uint32_t posters, each;
	bool inlined; /* 8 bytes in the WQE, the value of the local address, instead of the data at that address */

	BENCH_BOTH uint64_t total() const { return (uint64_t)posters * each; }
};

/* Consecutive requests are this far apart, in both address spaces. */
constexpr uint32_t STEP = 8;

struct Request {
	uint64_t remote, local;
	uint32_t rkey, lkey, bytes;
};

BENCH_BOTH Request request_of(const Plan &plan, uint32_t poster, uint32_t sequence)
{
	uint64_t offset = ((uint64_t)poster * plan.each + sequence) * STEP;
	return {plan.remote + offset, plan.local + offset, plan.rkey, plan.lkey, plan.bytes};
}

} // namespace bench

#endif
