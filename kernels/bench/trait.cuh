/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What an implementation under test is: a struct of static members. To set another beside ours, write such a struct in a
 * file of its own and add it to a list in implementations.cuh; nothing else changes.
 *
 *   struct Example {
 *	static constexpr const char *name;	// its column
 *	static constexpr bool posts;		// M1, M2, M3, and with polls M6
 *	static constexpr bool warps;		// M2w, M3w, and with contends M4w
 *	static constexpr bool contends;		// M4: many threads post to one QP
 *	static constexpr bool polls;		// M5
 *	static constexpr bool on_host;		// works with ring and record in host memory (rows B)
 *	static constexpr bool record;		// writes the doorbell record; without, it is not checked
 *	static constexpr bool collapsed;	// its CQ is one CQE, overwritten; else a ring
 *
 *	// What a kernel needs of one QP, in GPU memory. The host makes its bytes; `address` is where the kernel finds them.
 *	static constexpr size_t handle_bytes;
 *	static void set_up(const Queue &, uint8_t *bytes, uint64_t address);
 *
 *	// A thread's own state while it posts or polls.
 *	struct Poster;
 *	template <bool on_gpu> static __device__ void open(uint8_t *handle, Poster &);
 *
 *	// Scope::thread: posts `count` requests, which follow `first` STEP bytes apart, with one doorbell.
 *	// Scope::warp: 32 lanes call, each posts its own `first`, with one doorbell; `count` is 1.
 *	// Each request asks for a completion of its own. False: it could not.
 *	template <bool on_gpu, Scope, bool inlined> static __device__ bool post(Poster &, const Request &first, uint32_t count);
 *
 *	// Waits until request `index` has completed, in the clock of now_ns(); deadline 0: looks once. False: it has not.
 *	template <bool on_gpu> static __device__ bool poll(Poster &, uint64_t index, uint64_t deadline);
 *
 *	// Collapsed CQs only: takes back that anything from `index` on is known complete, so that M5 can look again.
 *	static __device__ void forget(Poster &, uint64_t index);
 *   };
 *
 * on_gpu: send ring and record are in GPU memory.
 */
#ifndef IBGDA_BENCH_TRAIT_CUH
#define IBGDA_BENCH_TRAIT_CUH

#include "plan.h"

namespace bench {

enum class Scope { thread, warp };

/* A list of implementations, and the call of a template for each of them. */
template <class... I> struct List {
	template <class Each> static void for_each(Each each) { (each(I()), ...); }
};

static __device__ __forceinline__ uint64_t now_ns()
{
	uint64_t now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
	return now;
}

/* Bytes in memory order from a big-endian value. */
static __device__ __forceinline__ uint32_t be32(uint32_t value) { return __byte_perm(value, 0, 0x0123); }

} // namespace bench

#endif
