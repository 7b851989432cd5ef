/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The device header over relacy: what platform.h does with memory that the NIC also sees is done with atomics of a checker
 * that knows every value that C++11 lets a load return. Everything else, post.h and poll.h first of all, is the header as it
 * is. A fence can be left out, which is how the checker shows what it is for.
 *
 * A fence of gpu or sys scope becomes one of C++11, and a store to the doorbell register one to memory: scopes and PCIe are
 * beyond the checker (docs/memory-order.md).
 */
#ifndef IBGDA_LITMUS_PLATFORM_H
#define IBGDA_LITMUS_PLATFORM_H

#include <relacy/relacy.hpp>

#define IBGDA_HOST

/* The CPU's variants, under other names. */
#define ibgda_store_quad cpu_store_quad
#define ibgda_store_record cpu_store_record
#define ibgda_store_doorbell cpu_store_doorbell
#define ibgda_store_relaxed cpu_store_relaxed
#define ibgda_load_relaxed cpu_load_relaxed
#define ibgda_load_tail cpu_load_tail
#define ibgda_acquire cpu_acquire
#define ibgda_relax cpu_relax
#include <ibgda/platform.h>
#undef ibgda_store_quad
#undef ibgda_store_record
#undef ibgda_store_doorbell
#undef ibgda_store_relaxed
#undef ibgda_load_relaxed
#undef ibgda_load_tail
#undef ibgda_acquire
#undef ibgda_relax

namespace litmus {

/* The fences of platform.h, by the function that they are in. */
enum fence { NONE, STORE_RECORD, STORE_DOORBELL, ACQUIRE };

/* The one that is left out. */
static fence left_out = NONE;

static void release(fence which)
{
	if (which != left_out)
		rl::atomic_thread_fence(rl::mo_release, $);
}

static void acquire(fence which = NONE)
{
	if (which == NONE || which != left_out)
		rl::atomic_thread_fence(rl::mo_acquire, $);
}

/* The memory that more than one side sees: each address that is used has a word here. Made anew for each execution. */
struct memory {
	static const unsigned SIZE = 16;
	rl::atomic<ibgda_u64> words[SIZE];
	const void *addresses[SIZE];
	unsigned count;

	static memory *current;

	memory() : count(0) { current = this; }

	void add(const void *address, ibgda_u64 value)
	{
		RL_ASSERT(count < SIZE);
		addresses[count] = address;
		words[count++].store(value, rl::mo_relaxed, $);
	}

	rl::atomic<ibgda_u64> &at(const void *address)
	{
		for (unsigned i = 0; i < count; i++)
			if (addresses[i] == address)
				return words[i];
		RL_ASSERT(!"an address that the test does not know");
		return words[0];
	}
};

memory *memory::current;

static void store(const void *to, ibgda_u64 value) { memory::current->at(to).store(value, rl::mo_relaxed, $); }

static ibgda_u64 load(const void *from) { return memory::current->at(from).load(rl::mo_relaxed, $); }

} // namespace litmus

IBGDA_FN void ibgda_relax() { rl::yield(1, $); }

/* The first half stands for all 16 bytes, which is one transaction on a GPU. */
IBGDA_FN void ibgda_store_quad(void *to, ibgda_quad value) { litmus::store(to, value.low); }

template <ibgda_placement P> IBGDA_FN void ibgda_store_record(ibgda_u32 *record, ibgda_u32 big_endian)
{
	litmus::release(litmus::STORE_RECORD);
	litmus::store(record, big_endian);
}

template <ibgda_placement P> IBGDA_FN void ibgda_store_doorbell(ibgda_u64 *doorbell, ibgda_u64 value)
{
	litmus::release(litmus::STORE_DOORBELL);
	litmus::store(doorbell, value);
}

IBGDA_FN void ibgda_store_relaxed(ibgda_u32 *word, ibgda_u32 value) { litmus::store(word, value); }

IBGDA_FN ibgda_u64 ibgda_load_relaxed(const ibgda_u64 *word) { return litmus::load(word); }

IBGDA_FN ibgda_quad ibgda_load_tail(const void *tail)
{
	ibgda_quad value = {0, litmus::load(tail)};
	return value;
}

IBGDA_FN void ibgda_acquire() { litmus::acquire(litmus::ACQUIRE); }

#endif
