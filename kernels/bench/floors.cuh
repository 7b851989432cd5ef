/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Floors of posting and polling: the least that a NIC needs, with no regard for safety. The producer index is in a register,
 * no slot check, no errors; a WQE is three 16-byte stores. Shares no code with the header.
 *
 *   fences 1: WQE, record | doorbell	what the NIC can see out of order: a record ahead of its WQE
 *   fences 2: WQE | record | doorbell	the order that the PRM asks for
 *
 * A poll is one plain load of the index known complete (L1), and if that is not enough one 4-byte load of the completion's
 * {wqe_counter, signature, op_own}.
 */
#ifndef IBGDA_BENCH_FLOORS_CUH
#define IBGDA_BENCH_FLOORS_CUH

#include "trait.cuh"

namespace bench {

/* All that is needed before a store is release; before sm_90 there is none by itself. */
#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8))
#define BENCH_RELEASE "fence.release."
#else
#define BENCH_RELEASE "fence.acq_rel."
#endif
static __device__ __forceinline__ void fence_gpu() { asm volatile(BENCH_RELEASE "gpu;" ::: "memory"); }
static __device__ __forceinline__ void fence_sys() { asm volatile(BENCH_RELEASE "sys;" ::: "memory"); }

static __device__ __forceinline__ void store16(void *to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
	asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b), "r"(c), "r"(d)
		     : "memory");
}

static __device__ __forceinline__ void store_u32(void *to, uint32_t value)
{
	asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value) : "memory");
}

static __device__ __forceinline__ void store_u64(void *to, uint64_t value)
{
	asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value) : "memory");
}

static __device__ __forceinline__ void store_mmio(void *to, uint64_t value)
{
	asm volatile("st.mmio.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value) : "memory");
}

static __device__ __forceinline__ uint32_t load_u32(const void *from)
{
	uint32_t value;
	asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
	return value;
}

static __device__ __forceinline__ uint64_t load_u64(const void *from)
{
	uint64_t value;
	asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
	return value;
}

/* `sys`: fences of system scope, for queues in host memory. */
template <int fences, bool sys> struct Bare {
	static constexpr const char *name = sys ? (fences == 1 ? "bare 1 fence.sys" : "bare 2 fence.sys")
						: (fences == 1 ? "bare 1 fence.gpu" : "bare 2 fence.gpu");
	static constexpr bool posts = true, warps = true, contends = false, polls = true, on_host = true, record = true,
			      collapsed = false;

	struct Handle {
		Queue queue;
		uint64_t completed;
	};
	static constexpr size_t handle_bytes = sizeof(Handle);

	static void set_up(const Queue &queue, uint8_t *bytes, uint64_t)
	{
		Handle *handle = reinterpret_cast<Handle *>(bytes);
		handle->queue = queue;
		handle->completed = queue.completed;
	}

	struct Poster {
		uint8_t *ring;
		uint32_t *record;
		uint64_t *doorbell;
		uint8_t *cq;
		uint64_t *completed;
		uint64_t producer, consumer;
		uint32_t qpn, depth, cq_depth;
	};

	template <bool on_gpu> static __device__ __forceinline__ void open(uint8_t *bytes, Poster &poster)
	{
		Handle *handle = reinterpret_cast<Handle *>(bytes);
		const Queue &queue = handle->queue;
		poster = {queue.ring,	  queue.record, queue.doorbell, queue.cq,    &handle->completed,
			  queue.producer, 0,		queue.qpn,	queue.depth, queue.cq_depth};
	}

	static __device__ __forceinline__ void fence()
	{
		if (sys)
			fence_sys();
		else
			fence_gpu();
	}

	template <bool inlined>
	static __device__ __forceinline__ void write(const Poster &poster, uint64_t index, const Request &request, uint32_t offset)
	{
		uint8_t *slot = poster.ring + (index & (poster.depth - 1)) * 64;
		uint64_t remote = request.remote + offset, local = request.local + offset;
		store16(slot, be32((uint32_t)(index & 0xffff) << 8 | 0x08), be32(poster.qpn << 8 | 3), 0x08000000, 0);
		store16(slot + 16, be32((uint32_t)(remote >> 32)), be32((uint32_t)remote), be32(request.rkey), 0);
		if (inlined)
			store16(slot + 32, be32(0x80000008), (uint32_t)local, (uint32_t)(local >> 32), 0);
		else
			store16(slot + 32, be32(request.bytes), be32(request.lkey), be32((uint32_t)(local >> 32)), be32((uint32_t)local));
	}

	static __device__ __forceinline__ void ring(const Poster &poster)
	{
		uint32_t end = (uint32_t)poster.producer & 0xffff;
		if (fences == 2)
			fence();
		store_u32(poster.record + 1, be32(end));
		fence();
		store_mmio(poster.doorbell, (uint64_t)be32(poster.qpn << 8) << 32 | be32(end << 8));
	}

	template <bool on_gpu, Scope scope, bool inlined>
	static __device__ __forceinline__ bool post(Poster &poster, const Request &first, uint32_t count)
	{
		if constexpr (scope == Scope::warp) {
			uint32_t lane = threadIdx.x % 32;
			write<inlined>(poster, poster.producer + lane, first, 0);
			poster.producer += 32;
			/* The other lanes' stores come before lane 0's fence, which covers what it has synchronised with. */
			__syncwarp();
			if (lane == 0)
				ring(poster);
			__syncwarp();
		} else {
#pragma unroll 1
			for (uint32_t i = 0; i < count; i++)
				write<inlined>(poster, poster.producer++, first, i * STEP);
			ring(poster);
		}
		return true;
	}

	template <bool on_gpu> static __device__ __forceinline__ bool poll(Poster &poster, uint64_t index, uint64_t deadline)
	{
		uint64_t completed;
		asm volatile("ld.global.b64 %0, [%1];" : "=l"(completed) : "l"(__cvta_generic_to_global(poster.completed)) : "memory");
		if (completed > index)
			return true;
		/* Bounded by looks, since reading the clock would be no floor: seconds. */
		uint32_t looks = deadline ? 1u << 22 : 1;
		for (uint32_t i = 0; i < looks; i++) {
			const uint8_t *cqe = poster.cq + (poster.consumer & (poster.cq_depth - 1)) * 64;
			uint32_t word = load_u32(cqe + 60);
			uint32_t lap = poster.consumer & poster.cq_depth ? 1 : 0;
			if (word >> 28 == 15 || ((word >> 24) & 1) != lap)
				continue;
			poster.consumer++;
			completed += (uint16_t)((be32(word) >> 16) - (uint32_t)completed) + 1u;
			asm volatile("st.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(poster.completed)), "l"(completed)
				     : "memory");
			if (word >> 28)
				return false;
			if (completed > index)
				return true;
		}
		return false;
	}
};

} // namespace bench

#endif
