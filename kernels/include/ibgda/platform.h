/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The few operations that differ between a GPU and a CPU thread: stores, loads, atomics and fences, and the clock. All
 * fences of the data path are here; docs/memory-order.md says which write each orders before which, and why.
 *
 *   operation                PTX, queues on the GPU / in host memory     CPU
 *   ibgda_release            fence.release.gpu / .sys (1)                in the store or atomic that follows
 *   ibgda_acquire_release    fence.acq_rel.gpu / .sys                    in the atomics around it
 *   ibgda_acquire            fence.acquire.sys (1)                       in the load before it
 *   ibgda_store_record       st.relaxed.sys                              store-release
 *   ibgda_store_doorbell     st.mmio.relaxed.sys                         store-release; uncached, so in program order
 *   ibgda_load_shared        ld.relaxed.gpu                              load-acquire
 *   ibgda_store_shared       st.relaxed.gpu                              store-release
 *   ibgda_atomic_*           atom.relaxed.gpu                            acq_rel
 *   (1) before sm_90 or CUDA 12.8: fence.acq_rel
 *
 * Scope. Queue memory on the GPU: the NIC's reads reach the GPU's L2, where gpu scope makes writes visible. In host
 * memory: sys scope. The doorbell store itself is a posted PCIe write and needs no fence behind it.
 *
 * A CPU needs no fences of its own: x86 keeps stores in order, to write-back memory and to the uncached register; Arm
 * has the dmb oshst that the CPU variants add. With the order in the accesses themselves ThreadSanitizer can check it.
 */
#ifndef IBGDA_PLATFORM_H
#define IBGDA_PLATFORM_H

#include "ibgda/types.h"

#if defined(__CUDACC__) && !defined(IBGDA_HOST)
#define IBGDA_FN static __device__ __forceinline__
#define IBGDA_SLOW static __device__ __noinline__
#define IBGDA_PURE static __host__ __device__ __forceinline__
#else
#ifndef IBGDA_HOST
#error "compile with nvcc or NVRTC for a GPU, or define IBGDA_HOST for CPU threads"
#endif
#include <sched.h>
#include <time.h>
#define IBGDA_FN static inline
#define IBGDA_SLOW static inline
#define IBGDA_PURE static inline
#endif

/* 16 bytes: the unit in which WQEs are stored. */
struct alignas(16) ibgda_quad {
	ibgda_u64 low, high;
};

/* Its four words as inputs of an asm. */
#define IBGDA_WORDS(quad) \
	"r"((ibgda_u32)(quad).low), "r"((ibgda_u32)((quad).low >> 32)), "r"((ibgda_u32)(quad).high), "r"((ibgda_u32)((quad).high >> 32))

/*
 * Four bytes of `low` (0 to 3) and `high` (4 to 7), of which each hexadecimal digit of `selector` names one, the last digit the
 * first byte in memory: PRMT of the PTX ISA, with which a GPU makes a word of a WQE in one instruction.
 */
IBGDA_PURE ibgda_u32 ibgda_bytes(ibgda_u32 low, ibgda_u32 high, ibgda_u32 selector)
{
#ifdef __CUDA_ARCH__
	return __byte_perm(low, high, selector);
#else
	ibgda_u64 bytes = (ibgda_u64)high << 32 | low;
	ibgda_u32 word = 0;
	for (ibgda_u32 byte = 0; byte < 4; byte++)
		word |= (ibgda_u32)(bytes >> 8 * (selector >> 4 * byte & 7) & 0xff) << 8 * byte;
	return word;
#endif
}

IBGDA_PURE ibgda_u32 ibgda_be32(ibgda_u32 value) { return ibgda_bytes(value, 0, 0x0123); }

/* The same of value's low 16 or 24 bits with the byte `low` behind them: what most words of a WQE are. */
IBGDA_PURE ibgda_u32 ibgda_be16_8(ibgda_u32 value, ibgda_u32 low) { return ibgda_bytes(value, low, 0x4015); }
IBGDA_PURE ibgda_u32 ibgda_be24_8(ibgda_u32 value, ibgda_u32 low) { return ibgda_bytes(value, low, 0x4012); }

/* The low 24 or 16 bits alone: words of doorbell records. */
IBGDA_PURE ibgda_u32 ibgda_be24(ibgda_u32 value) { return ibgda_bytes(value, 0, 0x0124); }
IBGDA_PURE ibgda_u32 ibgda_be16(ibgda_u32 value) { return ibgda_bytes(value, 0, 0x0144); }

#if defined(__CUDACC__) && !defined(IBGDA_HOST)

#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8))
#define IBGDA_FENCE_RELEASE "fence.release"
#define IBGDA_FENCE_ACQUIRE "fence.acquire"
#else
#define IBGDA_FENCE_RELEASE "fence.acq_rel"
#define IBGDA_FENCE_ACQUIRE "fence.acq_rel"
#endif

/* Nanoseconds of the clock that deadlines are on: the GPU's global timer. */
IBGDA_FN ibgda_u64 ibgda_clock_ns()
{
	ibgda_u64 now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	return now;
}

IBGDA_FN void ibgda_relax() { __nanosleep(20); }

/*
 * 0, which for the compiler may differ between a warp's lanes. What is the same for all it would do once for the warp: adds up
 * atomics, and moves values to the uniform registers and back, and both take longer than what they save.
 */
IBGDA_FN ibgda_u32 ibgda_zero()
{
	ibgda_u32 lane;
	asm("mov.u32 %0, %%laneid;" : "=r"(lane));
	return lane >> 5;
}

/* Between looks at something that will take microseconds. */
IBGDA_FN void ibgda_sleep() { __nanosleep(1000); }

template <ibgda_u32 M> IBGDA_FN void ibgda_release()
{
	if (M & IBGDA_ON_GPU)
		asm volatile(IBGDA_FENCE_RELEASE ".gpu;" ::: "memory");
	else
		asm volatile(IBGDA_FENCE_RELEASE ".sys;" ::: "memory");
}

template <ibgda_u32 M> IBGDA_FN void ibgda_acquire_release()
{
	if (M & IBGDA_ON_GPU)
		asm volatile("fence.acq_rel.gpu;" ::: "memory");
	else
		asm volatile("fence.acq_rel.sys;" ::: "memory");
}

IBGDA_FN void ibgda_acquire() { asm volatile(IBGDA_FENCE_ACQUIRE ".sys;" ::: "memory"); }

IBGDA_FN void ibgda_store_quad(void *to, ibgda_quad value)
{
	asm volatile("st.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "l"(value.low), "l"(value.high)
		     : "memory");
}

/* The first three quads of a slot. */
IBGDA_FN void ibgda_store_quads(void *to, const ibgda_quad *quads)
{
	asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
		     "st.global.v4.b32 [%0+16], {%5, %6, %7, %8};"
		     "st.global.v4.b32 [%0+32], {%9, %10, %11, %12};" ::"l"(__cvta_generic_to_global(to)),
		     IBGDA_WORDS(quads[0]), IBGDA_WORDS(quads[1]), IBGDA_WORDS(quads[2])
		     : "memory");
}

/* base + index * 64 */
IBGDA_FN ibgda_u8 *ibgda_slot(ibgda_u8 *base, ibgda_u32 index)
{
	ibgda_u64 slot;
	asm("mad.wide.u32 %0, %1, 64, %2;" : "=l"(slot) : "r"(index), "l"(base));
	return reinterpret_cast<ibgda_u8 *>(slot);
}

/* base + index */
IBGDA_FN ibgda_u64 *ibgda_word(ibgda_u64 *base, ibgda_u32 index)
{
	ibgda_u64 word;
	asm("mad.wide.u32 %0, %1, 8, %2;" : "=l"(word) : "r"(index), "l"(base));
	return reinterpret_cast<ibgda_u64 *>(word);
}

/* For words that the NIC or the CPU reads; what must be seen before them is fenced off before. */
IBGDA_FN void ibgda_store_relaxed(ibgda_u32 *word, ibgda_u32 value)
{
	asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "r"(value) : "memory");
}

IBGDA_FN void ibgda_store_record(ibgda_u32 *record, ibgda_u32 big_endian) { ibgda_store_relaxed(record, big_endian); }

/* A doorbell in memory: the CPU thread that looks at it does the rest. */
IBGDA_FN void ibgda_store_word(ibgda_u64 *word, ibgda_u64 value)
{
	asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}

IBGDA_FN void ibgda_store_doorbell(ibgda_u64 *doorbell, ibgda_u64 value)
{
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 2)
	asm volatile("st.mmio.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(doorbell)), "l"(value)
		     : "memory");
#else
	ibgda_store_word(doorbell, value);
#endif
}

/* A WQE into a BlueFlame buffer, in address order. */
IBGDA_FN void ibgda_store_blueflame(void *to, const ibgda_quad *quads)
{
#pragma unroll
	for (int i = 0; i < 4; i++)
		asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(static_cast<char *>(to) + 16 * i)),
			     "l"(quads[i].low), "l"(quads[i].high)
			     : "memory");
}

/* A word that the host or the NIC writes. */
IBGDA_FN ibgda_u64 ibgda_load_relaxed(const ibgda_u64 *word)
{
	ibgda_u64 value;
	asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
	return value;
}

IBGDA_FN ibgda_u32 ibgda_load_relaxed(const ibgda_u32 *word)
{
	ibgda_u32 value;
	asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
	return value;
}

/*
 * 16 bytes in one load: bytes 48..63 of a completion, so that syndromes, opcode, QPN, counter and ownership are of one
 * moment. An aligned 16-byte access is one transaction.
 */
IBGDA_FN ibgda_quad ibgda_load_tail(const void *tail)
{
	ibgda_quad value;
	asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
		     : "=l"(value.low), "=l"(value.high)
		     : "l"(__cvta_generic_to_global(tail))
		     : "memory");
	return value;
}

/*
 * Two words that nobody else writes, aligned to 16, by way of the L1; volatile, so that several are under way at the same
 * time instead of each just before its use.
 */
IBGDA_FN ibgda_quad ibgda_load_own_pair(const void *words)
{
	ibgda_quad value;
	asm volatile("ld.global.v2.b64 {%0, %1}, [%2];"
		     : "=l"(value.low), "=l"(value.high)
		     : "l"(__cvta_generic_to_global(words))
		     : "memory");
	return value;
}

/*
 * Two words that are constant as long as the kernel runs, aligned to 16: the compiler may keep them in registers from one
 * call to the next, since this is no access to memory for it.
 */
IBGDA_FN ibgda_quad ibgda_load_constant_pair(const void *words)
{
	ibgda_quad value;
	asm("ld.global.v2.b64 {%0, %1}, [%2];" : "=l"(value.low), "=l"(value.high) : "l"(__cvta_generic_to_global(words)));
	return value;
}

/* Words that threads of this GPU share: past the L1, which does not see other SMs' writes. */
IBGDA_FN ibgda_u64 ibgda_load_shared(const ibgda_u64 *word)
{
	ibgda_u64 value;
	asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
	return value;
}

/* Two words, aligned to 16, of one moment. */
IBGDA_FN ibgda_quad ibgda_load_shared_pair(const ibgda_u64 *words)
{
	ibgda_quad value;
	asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
		     : "=l"(value.low), "=l"(value.high)
		     : "l"(__cvta_generic_to_global(words))
		     : "memory");
	return value;
}

IBGDA_FN void ibgda_store_shared(ibgda_u64 *word, ibgda_u64 value)
{
	asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}

IBGDA_FN void ibgda_store_shared(ibgda_u32 *word, ibgda_u32 value)
{
	asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "r"(value) : "memory");
}

/*
 * `value`, as if it came about here: what an atomic gives and nobody needs sooner. Otherwise the compiler looks at it, and so
 * waits for it, before the fences that come first.
 */
IBGDA_FN ibgda_u64 ibgda_later(ibgda_u64 value)
{
	ibgda_u64 same;
	asm volatile("mov.b64 %0, %1;" : "=l"(same) : "l"(value) : "memory");
	return same;
}

/* Atomics on global memory, relaxed: what else they are to order is fenced off. They give what was there before. */
IBGDA_FN ibgda_u64 ibgda_atomic_add(ibgda_u64 *word, ibgda_u64 value)
{
	ibgda_u64 old;
	asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
		     : "=l"(old)
		     : "l"(__cvta_generic_to_global(word)), "l"(value)
		     : "memory");
	return old;
}

IBGDA_FN ibgda_u64 ibgda_atomic_xor(ibgda_u64 *word, ibgda_u64 value)
{
	ibgda_u64 old;
	asm volatile("atom.relaxed.gpu.global.xor.b64 %0, [%1], %2;"
		     : "=l"(old)
		     : "l"(__cvta_generic_to_global(word)), "l"(value)
		     : "memory");
	return old;
}

IBGDA_FN ibgda_u64 ibgda_atomic_max(ibgda_u64 *word, ibgda_u64 value)
{
	ibgda_u64 old;
	asm volatile("atom.relaxed.gpu.global.max.u64 %0, [%1], %2;"
		     : "=l"(old)
		     : "l"(__cvta_generic_to_global(word)), "l"(value)
		     : "memory");
	return old;
}

IBGDA_FN ibgda_u64 ibgda_atomic_cas(ibgda_u64 *word, ibgda_u64 expected, ibgda_u64 value)
{
	ibgda_u64 old;
	asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
		     : "=l"(old)
		     : "l"(__cvta_generic_to_global(word)), "l"(expected), "l"(value)
		     : "memory");
	return old;
}

IBGDA_FN ibgda_u32 ibgda_atomic_cas(ibgda_u32 *word, ibgda_u32 expected, ibgda_u32 value)
{
	ibgda_u32 old;
	asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
		     : "=r"(old)
		     : "l"(__cvta_generic_to_global(word)), "r"(expected), "r"(value)
		     : "memory");
	return old;
}

#else /* CPU threads */

/* Nanoseconds of the clock that deadlines are on: CLOCK_MONOTONIC. */
IBGDA_FN ibgda_u64 ibgda_clock_ns()
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (ibgda_u64)now.tv_sec * 1000000000ull + (ibgda_u64)now.tv_nsec;
}

/* There can be more threads than processors: let the others run. */
IBGDA_FN void ibgda_relax() { sched_yield(); }

IBGDA_FN ibgda_u32 ibgda_zero() { return 0; }

IBGDA_FN void ibgda_sleep()
{
	const struct timespec pause = {0, 20000};
	nanosleep(&pause, nullptr);
}

/* Between memory and a device's register Arm needs the outer shareable domain; a store-release covers the inner one. */
IBGDA_FN void ibgda_device_barrier()
{
#if defined(__aarch64__)
	__asm__ volatile("dmb oshst" ::: "memory");
#endif
}

/* The order is in the accesses themselves. */
template <ibgda_u32 M> IBGDA_FN void ibgda_release() {}
template <ibgda_u32 M> IBGDA_FN void ibgda_acquire_release() {}
IBGDA_FN void ibgda_acquire() {}

IBGDA_FN void ibgda_store_quad(void *to, ibgda_quad value) { *static_cast<ibgda_quad *>(to) = value; }

IBGDA_FN void ibgda_store_quads(void *to, const ibgda_quad *quads)
{
	for (int i = 0; i < 3; i++)
		static_cast<ibgda_quad *>(to)[i] = quads[i];
}

IBGDA_FN ibgda_u8 *ibgda_slot(ibgda_u8 *base, ibgda_u32 index) { return base + (ibgda_u64)index * 64; }
IBGDA_FN ibgda_u64 *ibgda_word(ibgda_u64 *base, ibgda_u32 index) { return base + index; }

IBGDA_FN void ibgda_store_relaxed(ibgda_u32 *word, ibgda_u32 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

IBGDA_FN void ibgda_store_record(ibgda_u32 *record, ibgda_u32 big_endian)
{
	ibgda_device_barrier();
	__atomic_store_n(record, big_endian, __ATOMIC_RELEASE);
}

IBGDA_FN void ibgda_store_doorbell(ibgda_u64 *doorbell, ibgda_u64 value)
{
	ibgda_device_barrier();
	__atomic_store_n(doorbell, value, __ATOMIC_RELEASE);
}

IBGDA_FN void ibgda_store_word(ibgda_u64 *word, ibgda_u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Write-combining stores stay in the CPU's buffers until a barrier, and are not ordered with others. */
IBGDA_FN void ibgda_store_blueflame(void *to, const ibgda_quad *quads)
{
	ibgda_u64 *words = static_cast<ibgda_u64 *>(to);
	__asm__ volatile("" ::: "memory");
	ibgda_device_barrier();
#if defined(__x86_64__)
	__builtin_ia32_sfence();
#endif
	for (int i = 0; i < 4; i++) {
		__atomic_store_n(words + 2 * i, quads[i].low, __ATOMIC_RELAXED);
		__atomic_store_n(words + 2 * i + 1, quads[i].high, __ATOMIC_RELAXED);
	}
#if defined(__x86_64__)
	__builtin_ia32_sfence();
#endif
}

IBGDA_FN ibgda_u64 ibgda_load_relaxed(const ibgda_u64 *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
IBGDA_FN ibgda_u32 ibgda_load_relaxed(const ibgda_u32 *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* The half that holds the ownership bit first, so that the other half is not older. */
IBGDA_FN ibgda_quad ibgda_load_tail(const void *tail)
{
	const ibgda_u64 *words = static_cast<const ibgda_u64 *>(tail);
	ibgda_quad value;
	value.high = __atomic_load_n(words + 1, __ATOMIC_ACQUIRE);
	value.low = __atomic_load_n(words, __ATOMIC_RELAXED);
	return value;
}

IBGDA_FN ibgda_u64 ibgda_load_shared(const ibgda_u64 *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* The higher word first: the lower one may be newer, never older (an error behind what completed; rung behind its teller). */
IBGDA_FN ibgda_quad ibgda_load_shared_pair(const ibgda_u64 *words)
{
	ibgda_quad value;
	value.high = __atomic_load_n(words + 1, __ATOMIC_ACQUIRE);
	value.low = __atomic_load_n(words, __ATOMIC_ACQUIRE);
	return value;
}

IBGDA_FN void ibgda_store_shared(ibgda_u64 *word, ibgda_u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
IBGDA_FN void ibgda_store_shared(ibgda_u32 *word, ibgda_u32 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

IBGDA_FN ibgda_u64 ibgda_later(ibgda_u64 value) { return value; }

IBGDA_FN ibgda_u64 ibgda_atomic_add(ibgda_u64 *word, ibgda_u64 value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }
IBGDA_FN ibgda_u64 ibgda_atomic_xor(ibgda_u64 *word, ibgda_u64 value) { return __atomic_fetch_xor(word, value, __ATOMIC_ACQ_REL); }

IBGDA_FN ibgda_u64 ibgda_atomic_cas(ibgda_u64 *word, ibgda_u64 expected, ibgda_u64 value)
{
	__atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
	return expected;
}

IBGDA_FN ibgda_u32 ibgda_atomic_cas(ibgda_u32 *word, ibgda_u32 expected, ibgda_u32 value)
{
	__atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
	return expected;
}

IBGDA_FN ibgda_u64 ibgda_atomic_max(ibgda_u64 *word, ibgda_u64 value)
{
	ibgda_u64 old = __atomic_load_n(word, __ATOMIC_ACQUIRE);
	while (old < value && !__atomic_compare_exchange_n(word, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		;
	return old;
}

#endif

#endif
