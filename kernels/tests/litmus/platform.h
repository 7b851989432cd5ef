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
#define ibgda_release cpu_release
#define ibgda_acquire_release cpu_acquire_release
#define ibgda_acquire cpu_acquire
#define ibgda_store_quad cpu_store_quad
#define ibgda_store_quads cpu_store_quads
#define ibgda_store_relaxed cpu_store_relaxed
#define ibgda_store_record cpu_store_record
#define ibgda_store_word cpu_store_word
#define ibgda_store_doorbell cpu_store_doorbell
#define ibgda_load_relaxed cpu_load_relaxed
#define ibgda_load_tail cpu_load_tail
#define ibgda_load_shared cpu_load_shared
#define ibgda_load_shared_pair cpu_load_shared_pair
#define ibgda_store_shared cpu_store_shared
#define ibgda_atomic_add cpu_atomic_add
#define ibgda_atomic_xor cpu_atomic_xor
#define ibgda_atomic_cas cpu_atomic_cas
#define ibgda_atomic_max cpu_atomic_max
#define ibgda_relax cpu_relax
#define ibgda_sleep cpu_sleep
#include <ibgda/platform.h>
#undef ibgda_release
#undef ibgda_acquire_release
#undef ibgda_acquire
#undef ibgda_store_quad
#undef ibgda_store_quads
#undef ibgda_store_relaxed
#undef ibgda_store_record
#undef ibgda_store_word
#undef ibgda_store_doorbell
#undef ibgda_load_relaxed
#undef ibgda_load_tail
#undef ibgda_load_shared
#undef ibgda_load_shared_pair
#undef ibgda_store_shared
#undef ibgda_atomic_add
#undef ibgda_atomic_xor
#undef ibgda_atomic_cas
#undef ibgda_atomic_max
#undef ibgda_relax
#undef ibgda_sleep

namespace litmus {

/*
 * What can be left out: a release before the record or before the doorbell, known by what was stored last; the
 * acquire_release before the ready bits, and the one before the publisher's word, in this order; an acquire.
 */
enum fence { NONE, BEFORE_RECORD, BEFORE_DOORBELL, BEFORE_READY, BEFORE_PUBLISHER, ACQUIRE };

static fence left_out = NONE;

static const unsigned THREADS = 4;

/* What a thread did last: the fence that it comes to next. */
static fence next[THREADS];

static fence &mine() { return next[rl::ctx().current_thread()]; }

static void fenced(fence which, bool acquires)
{
	if (which != left_out)
		rl::atomic_thread_fence(acquires ? rl::mo_acq_rel : rl::mo_release, $);
}

static void acquire(fence which = NONE)
{
	if (which == NONE || which != left_out)
		rl::atomic_thread_fence(rl::mo_acquire, $);
}

/* The memory that more than one side sees: each address that is used has a word here. Made anew for each execution. */
struct memory {
	static const unsigned SIZE = 32;
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

	bool knows(const void *address) const
	{
		for (unsigned i = 0; i < count; i++)
			if (addresses[i] == address)
				return true;
		return false;
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
IBGDA_FN void ibgda_sleep() { rl::yield(1, $); }

template <ibgda_u32 M> IBGDA_FN void ibgda_release() { litmus::fenced(litmus::mine(), false); }
template <ibgda_u32 M> IBGDA_FN void ibgda_acquire_release()
{
	litmus::fence which = litmus::mine() == litmus::BEFORE_RECORD ? litmus::BEFORE_READY : litmus::mine();
	litmus::fenced(which, true);
}
IBGDA_FN void ibgda_acquire() { litmus::acquire(litmus::ACQUIRE); }

/* The first half stands for all 16 bytes, which is one transaction on a GPU. */
IBGDA_FN void ibgda_store_quad(void *to, ibgda_quad value)
{
	litmus::store(to, value.low);
	litmus::mine() = litmus::BEFORE_RECORD;
}

/* The first of them stands for all. */
IBGDA_FN void ibgda_store_quads(void *to, const ibgda_quad *quads) { ibgda_store_quad(to, quads[0]); }

IBGDA_FN void ibgda_store_relaxed(ibgda_u32 *word, ibgda_u32 value) { litmus::store(word, value); }

IBGDA_FN void ibgda_store_record(ibgda_u32 *record, ibgda_u32 big_endian)
{
	litmus::store(record, big_endian);
	litmus::mine() = litmus::BEFORE_DOORBELL;
}

IBGDA_FN void ibgda_store_word(ibgda_u64 *word, ibgda_u64 value) { litmus::store(word, value); }
IBGDA_FN void ibgda_store_doorbell(ibgda_u64 *doorbell, ibgda_u64 value) { litmus::store(doorbell, value); }

IBGDA_FN ibgda_u64 ibgda_load_relaxed(const ibgda_u64 *word) { return litmus::load(word); }
IBGDA_FN ibgda_u32 ibgda_load_relaxed(const ibgda_u32 *word) { return (ibgda_u32)litmus::load(word); }

IBGDA_FN ibgda_quad ibgda_load_tail(const void *tail)
{
	ibgda_quad value = {0, litmus::load(tail)};
	return value;
}

IBGDA_FN ibgda_u64 ibgda_load_shared(const ibgda_u64 *word) { return litmus::load(word); }

/* The publisher's word and `rung`; or `completed` and the error, of which there is none. */
IBGDA_FN ibgda_quad ibgda_load_shared_pair(const ibgda_u64 *words)
{
	ibgda_quad value = {litmus::load(words), litmus::memory::current->knows(words + 1) ? litmus::load(words + 1) : 0};
	return value;
}

IBGDA_FN void ibgda_store_shared(ibgda_u64 *word, ibgda_u64 value) { litmus::store(word, value); }
IBGDA_FN void ibgda_store_shared(ibgda_u32 *word, ibgda_u32 value) { litmus::store(word, value); }

IBGDA_FN ibgda_u64 ibgda_atomic_add(ibgda_u64 *word, ibgda_u64 value)
{
	return litmus::memory::current->at(word).fetch_add(value, rl::mo_relaxed, $);
}

IBGDA_FN ibgda_u64 ibgda_atomic_xor(ibgda_u64 *word, ibgda_u64 value)
{
	ibgda_u64 old = litmus::memory::current->at(word).fetch_xor(value, rl::mo_relaxed, $);
	litmus::mine() = litmus::BEFORE_PUBLISHER;
	return old;
}

template <class T> IBGDA_FN T litmus_cas(T *word, T expected, T value)
{
	ibgda_u64 old = expected;
	litmus::memory::current->at(word).compare_exchange(rl::bool_t<false>(), old, (ibgda_u64)value, rl::mo_relaxed, rl::mo_relaxed, $);
	return (T)old;
}

IBGDA_FN ibgda_u64 ibgda_atomic_cas(ibgda_u64 *word, ibgda_u64 expected, ibgda_u64 value) { return litmus_cas(word, expected, value); }
IBGDA_FN ibgda_u32 ibgda_atomic_cas(ibgda_u32 *word, ibgda_u32 expected, ibgda_u32 value) { return litmus_cas(word, expected, value); }

IBGDA_FN ibgda_u64 ibgda_atomic_max(ibgda_u64 *word, ibgda_u64 value)
{
	/* Of what is there now: a load might give what was. */
	ibgda_u64 old = ibgda_atomic_add(word, 0);
	while (old < value) {
		ibgda_u64 seen = litmus_cas(word, old, value);
		if (seen == old)
			break;
		old = seen;
	}
	return old;
}

#endif
