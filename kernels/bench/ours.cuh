/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The header under test, as implementations of trait.cuh. */
#ifndef IBGDA_BENCH_OURS_CUH
#define IBGDA_BENCH_OURS_CUH

#include <cstring>

#include <ibgda_device.cuh>

#include "trait.cuh"

namespace bench {

struct OursHandle {
	ibgda_qp qp;
	ibgda_cq cq;
	ibgda_u64 ready[IBGDA_READY_WORDS(DEPTH)];
};

/*
 * `Names::name` is the column; Mode as in types.h, without placement and scope.
 *
 * Of an exclusive QP no more can be known complete than was posted.
 */
template <class Names, ibgda_u32 Mode> struct Ours {
	static constexpr const char *name = Names::name;
	static constexpr bool posts = true, warps = true, contends = Mode & IBGDA_SHARED, polls = true, on_host = true,
			      record = !(Mode & IBGDA_NO_RECORD), collapsed = Mode & IBGDA_COLLAPSED;
	static constexpr size_t handle_bytes = sizeof(OursHandle);

	static void set_up(const Queue &queue, uint8_t *bytes, uint64_t address)
	{
		OursHandle handle = {};
		handle.cq.ring = queue.cq;
		handle.cq.doorbell_record = queue.cq_record;
		handle.cq.number = queue.cqn;
		handle.cq.depth = queue.cq_depth;
		handle.cq.completed = Mode & IBGDA_SHARED || queue.completed < queue.producer ? queue.completed : queue.producer;
		handle.qp.send_ring = queue.ring;
		handle.qp.doorbell_record = queue.record;
		handle.qp.doorbell = reinterpret_cast<ibgda_u64 *>(queue.doorbell);
		handle.qp.send_cq = reinterpret_cast<ibgda_cq *>(address + offsetof(OursHandle, cq));
		handle.qp.number = queue.qpn;
		handle.qp.send_depth = queue.depth;
		handle.qp.mode = Mode | (queue.on_gpu ? IBGDA_ON_GPU : 0);
		handle.qp.post_timeout_ns = 5000000000ull;
		handle.qp.producer = queue.producer;
		handle.qp.rung = queue.producer;
		handle.qp.limit = handle.cq.completed + queue.depth;
		handle.cq.limit = reinterpret_cast<ibgda_u64 *>(address + offsetof(OursHandle, qp) + offsetof(ibgda_qp, limit));
		if (Mode & IBGDA_SHARED)
			handle.qp.limit = (queue.completed < queue.producer ? queue.completed : queue.producer) + queue.depth;
		else if (queue.completed > queue.producer)
			handle.qp.limit = ~0ull >> 1;
		if (Mode & IBGDA_SHARED) {
			handle.qp.ready = reinterpret_cast<ibgda_u64 *>(address + offsetof(OursHandle, ready));
			handle.ready[0] = IBGDA_READY_FIRST;
			handle.qp.publisher = queue.producer << 2;
			handle.qp.unrung = queue.producer;
		}
		std::memcpy(bytes, &handle, sizeof handle);
	}

	struct Poster {
		ibgda_qp *qp;
	};

	template <bool on_gpu> static __device__ __forceinline__ void open(uint8_t *bytes, Poster &poster)
	{
		poster.qp = &reinterpret_cast<OursHandle *>(bytes)->qp;
	}

	template <bool on_gpu, Scope scope, bool inlined>
	static __device__ __forceinline__ bool post(Poster &poster, const Request &first, uint32_t count)
	{
		constexpr ibgda_u32 M = Mode | (on_gpu ? IBGDA_ON_GPU : 0) | (scope == Scope::warp ? IBGDA_WARP : 0);
		ibgda_qp *qp = poster.qp;
		bool good = true;
#pragma unroll 1
		for (uint32_t i = 0; i < count; i++) {
			ibgda_u32 flags = i + 1 < count ? IBGDA_NO_DOORBELL : 0;
			ibgda_u64 remote = first.remote + i * STEP, local = first.local + i * STEP;
			if (inlined)
				good &= ibgda_put_value<M>(qp, remote, first.rkey, local, flags) == IBGDA_OK;
			else
				good &= ibgda_put<M>(qp, remote, first.rkey, local, first.lkey, first.bytes, flags) == IBGDA_OK;
		}
		return good;
	}

	template <bool on_gpu> static __device__ __forceinline__ bool poll(Poster &poster, uint64_t index, uint64_t deadline)
	{
		return ibgda_wait<Mode | (on_gpu ? IBGDA_ON_GPU : 0)>(poster.qp, index, deadline) == IBGDA_OK;
	}

	static __device__ __forceinline__ void forget(Poster &poster, uint64_t index) { poster.qp->send_cq->completed = index; }
};

struct ExclusiveName {
	static constexpr const char *name = "exclusive";
};
struct SharedName {
	static constexpr const char *name = "shared";
};
struct NoRecordName {
	static constexpr const char *name = "shared, no record";
};
using Exclusive = Ours<ExclusiveName, 0>;
using Shared = Ours<SharedName, IBGDA_SHARED>;
using SharedNoRecord = Ours<NoRecordName, IBGDA_SHARED | IBGDA_NO_RECORD>;

} // namespace bench

#endif
