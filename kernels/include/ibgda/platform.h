/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The few operations that differ between a GPU and a CPU thread: stores, loads and fences towards the NIC, and the clock.
 *
 * Every fence of the data path is here, with what it orders:
 *
 *   ibgda_store_record    WQE bytes before the doorbell record. The NIC fetches slots up to the record's value, so a
 *                         record that is seen before its WQE makes the NIC execute what lay in the slot before.
 *   ibgda_store_doorbell  the record before the doorbell. The doorbell makes the NIC read the record; were it to arrive
 *                         first, the NIC could find the old value and never look again.
 *   ibgda_acquire         the completion before the data it announces: reads after it see what the NIC wrote before it.
 *
 * Scope. Queue memory on the GPU: the NIC's reads reach the GPU's L2, where gpu scope makes writes visible. In host
 * memory: sys scope. The doorbell store itself is a posted PCIe write and needs no fence behind it.
 *
 *   operation               PTX, memory on the GPU / on the host       CPU
 *   ibgda_store_record      fence.acq_rel.gpu / .sys; st.relaxed.sys   store-release
 *   ibgda_store_doorbell    fence.acq_rel.gpu / .sys; st.mmio          store-release; uncached, so in program order
 *   ibgda_acquire           fence.acquire.sys, before sm_90            acquire load of the completion
 *                           fence.acq_rel.sys
 *
 * On a CPU the write-back queue memory and the uncached doorbell stay in order on x86 by themselves, on Arm by the
 * dmb oshst that the CPU variants add.
 */
#ifndef IBGDA_PLATFORM_H
#define IBGDA_PLATFORM_H

#include "types.h"

#if defined(__CUDACC__) && !defined(IBGDA_HOST)
#define IBGDA_FN static __device__ __forceinline__
#define IBGDA_PURE static __host__ __device__ __forceinline__
#else
#ifndef IBGDA_HOST
#error "compile with nvcc or NVRTC for a GPU, or define IBGDA_HOST for CPU threads"
#endif
#include <sched.h>
#include <time.h>
#define IBGDA_FN static inline
#define IBGDA_PURE static inline
#endif

/* Where a QP's queues lie, which decides the scope of the fences. */
enum ibgda_placement { IBGDA_QUEUES_ON_HOST, IBGDA_QUEUES_ON_GPU };

/* 16 bytes: the unit in which WQEs are stored. */
struct alignas(16) ibgda_quad {
	ibgda_u64 low, high;
};

IBGDA_PURE ibgda_u32 ibgda_be32(ibgda_u32 value)
{
#ifdef __CUDA_ARCH__
	return __byte_perm(value, 0, 0x0123);
#else
	return (value >> 24) | ((value >> 8) & 0xff00u) | ((value << 8) & 0xff0000u) | (value << 24);
#endif
}

#if defined(__CUDACC__) && !defined(IBGDA_HOST)

/* Nanoseconds of the clock that deadlines are on: the GPU's global timer. */
IBGDA_FN ibgda_u64 ibgda_clock_ns()
{
	ibgda_u64 now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	return now;
}

IBGDA_FN void ibgda_relax() { __nanosleep(20); }

template <ibgda_placement P> IBGDA_FN void ibgda_release()
{
	if (P == IBGDA_QUEUES_ON_GPU)
		asm volatile("fence.acq_rel.gpu;" ::: "memory");
	else
		asm volatile("fence.acq_rel.sys;" ::: "memory");
}

IBGDA_FN void ibgda_store_quad(void *to, ibgda_quad value)
{
	asm volatile("st.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "l"(value.low), "l"(value.high)
		     : "memory");
}

template <ibgda_placement P> IBGDA_FN void ibgda_store_record(ibgda_u32 *record, ibgda_u32 big_endian)
{
	ibgda_release<P>();
	asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(record)), "r"(big_endian) : "memory");
}

template <ibgda_placement P> IBGDA_FN void ibgda_store_doorbell(ibgda_u64 *doorbell, ibgda_u64 value)
{
	ibgda_release<P>();
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 2)
	asm volatile("st.mmio.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(doorbell)), "l"(value)
		     : "memory");
#else
	asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(doorbell)), "l"(value) : "memory");
#endif
}

/* For words whose order towards others does not matter: the CQ's consumer index, which only guards against overrun. */
IBGDA_FN void ibgda_store_relaxed(ibgda_u32 *word, ibgda_u32 value)
{
	asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "r"(value) : "memory");
}

IBGDA_FN ibgda_u64 ibgda_load_relaxed(const ibgda_u64 *word)
{
	ibgda_u64 value;
	asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
	return value;
}

/*
 * Bytes 48..63 of a completion in one load, so that syndromes, opcode, QPN, counter and ownership are of one moment: an
 * aligned 16-byte access is one transaction.
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

IBGDA_FN void ibgda_acquire()
{
#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8))
	asm volatile("fence.acquire.sys;" ::: "memory");
#else
	asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
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

/* Between memory and a device's register Arm needs the outer shareable domain; a store-release covers the inner one. */
IBGDA_FN void ibgda_device_barrier()
{
#if defined(__aarch64__)
	__asm__ volatile("dmb oshst" ::: "memory");
#endif
}

IBGDA_FN void ibgda_store_quad(void *to, ibgda_quad value) { *static_cast<ibgda_quad *>(to) = value; }

template <ibgda_placement P> IBGDA_FN void ibgda_store_record(ibgda_u32 *record, ibgda_u32 big_endian)
{
	ibgda_device_barrier();
	__atomic_store_n(record, big_endian, __ATOMIC_RELEASE);
}

template <ibgda_placement P> IBGDA_FN void ibgda_store_doorbell(ibgda_u64 *doorbell, ibgda_u64 value)
{
	ibgda_device_barrier();
	__atomic_store_n(doorbell, value, __ATOMIC_RELEASE);
}

IBGDA_FN void ibgda_store_relaxed(ibgda_u32 *word, ibgda_u32 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

IBGDA_FN ibgda_u64 ibgda_load_relaxed(const ibgda_u64 *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

/* The half that holds the ownership bit first, so that the other half is not older. */
IBGDA_FN ibgda_quad ibgda_load_tail(const void *tail)
{
	const ibgda_u64 *words = static_cast<const ibgda_u64 *>(tail);
	ibgda_quad value;
	value.high = __atomic_load_n(words + 1, __ATOMIC_ACQUIRE);
	value.low = __atomic_load_n(words, __ATOMIC_RELAXED);
	return value;
}

/* The load of the tail has acquired already. */
IBGDA_FN void ibgda_acquire() {}

#endif

#endif
