/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * All-reduce over a ring, in one kernel: the block adds up what has arrived while its first thread sends on what is added
 * up. No CPU has a part in it between beginning and end.
 *
 * The vector has a segment for each rank, and a segment has chunks. In step s each rank sends segment (rank - s) to the next
 * one: in the first n - 1 steps (reduce-scatter) into staging slots there, from which the receiver adds it to its own; then
 * a rank has one segment complete, and in n - 1 more steps (all-gather) they go into the vectors themselves.
 *
 * Flow control. A staging slot is written again when its receiver has said that it is used up (`consumed`, a credit). A
 * vector needs none: a segment is complete only when every rank has sent its part of it, and so has begun this call and
 * needs nothing of the one before; and a rank does not touch that part of its vector any more.
 *
 * It cannot lock up: each rank takes message i - lag before it sends message i, and lag is at most the number of slots, so
 * that whoever is furthest behind always has data and room. Every wait ends at the deadline, at an error, or when a rank is
 * gone.
 *
 * The order of additions is that of the ring, from the segment's own rank on: the same on every run and every processor.
 */
#ifndef TEAM_CUH
#include "../../communicator-rust/kernels/team.cuh"
#endif

/* As in src/ring.rs. */
struct ring_call {
	ibgda_u64 count;      /* elements of the vector */
	ibgda_u64 chunk;      /* elements of a chunk */
	ibgda_u64 messages;   /* that each rank has sent in calls before */
	ibgda_u64 staged;     /* of those, the ones that went through staging */
	ibgda_u64 staging;    /* where the slots begin in the window, in bytes */
	ibgda_u64 timeout_ns;
	ibgda_u32 slots;
	ibgda_u32 type;	      /* 0: ibgda_u32, 1: float */
};
static_assert(sizeof(ring_call) == 56, "as in src/ring.rs");

/* The beginning of a rank's own part of its window; the vector follows. */
struct ring_words {
	ibgda_u64 arrived;  /* messages of the previous rank */
	ibgda_u64 reserved[7];
	ibgda_u64 consumed; /* staging slots that the next rank has used up */
	ibgda_u64 reserved2[7];
};
#define RING_VECTOR (TEAM_HEADER_BYTES + sizeof(ring_words))

struct ring_place {
	ibgda_u32 next, prev;
	ibgda_u64 chunks;      /* of a segment */
	ibgda_u64 staged;      /* messages of the reduce-scatter; as many follow */
	ibgda_u64 deadline_ns;
	ring_words *words;
};

struct ring_range {
	ibgda_u64 first, count;
};

IBGDA_FN ibgda_u64 ring_least(ibgda_u64 one, ibgda_u64 other) { return one < other ? one : other; }

/* What of the vector message `message` of the rank before, or of this one, has. The last segments may have fewer chunks. */
IBGDA_FN ring_range ring_of(const team &t, const ring_call &call, const ring_place &place, ibgda_u64 message, bool mine)
{
	const ibgda_u64 step = message / place.chunks, length = (call.count + t.size - 1) / t.size;
	const ibgda_u64 segment = (t.rank + 2 * t.size - (mine ? 0 : 1) - step) % t.size;
	const ibgda_u64 end = ring_least((segment + 1) * length, call.count);
	const ibgda_u64 first = ring_least(segment * length + message % place.chunks * call.chunk, end);
	return {first, ring_least(call.chunk, end - first)};
}

/* Sends a message to the next rank. */
template <ibgda_u32 M, class T>
IBGDA_FN team_outcome ring_send(const team &t, const ring_call &call, const ring_place &place, ibgda_u64 message)
{
	const ring_range range = ring_of(t, call, place, message, true);
	const ibgda_region &there = t.windows[place.next];
	ibgda_u64 remote = there.address + RING_VECTOR + range.first * sizeof(T);
	if (message < place.staged) {
		const ibgda_u64 sequence = call.staged + message;
		if (sequence >= call.slots) {
			ibgda_u32 status = team_wait<M>(t, place.next, &place.words->consumed, sequence + 1 - call.slots, place.deadline_ns);
			if (status)
				return team_ended(status, place.next, TEAM_AWAITING_ROOM);
		}
		remote = there.address + call.staging + sequence % call.slots * call.chunk * sizeof(T);
	}
	const ibgda_u64 arrived = team_place(t, there, &place.words->arrived);
	const ibgda_u64 local = t.region.address + RING_VECTOR + range.first * sizeof(T), value = call.messages + message + 1;
	ibgda_qp *qp = t.qps[place.next];
	ibgda_status status = range.count ? ibgda_put_signal<M>(qp, remote, there.rkey, local, t.region.lkey,
								(ibgda_u32)(range.count * sizeof(T)), arrived, there.rkey, value) :
					    ibgda_signal<M>(qp, arrived, there.rkey, value);
	return team_ended(status, place.next, TEAM_POSTING);
}

/* Tells the previous rank that the staging slot of its message is used up. */
template <ibgda_u32 M>
IBGDA_FN team_outcome ring_give_back(const team &t, const ring_call &call, const ring_place &place, ibgda_u64 message)
{
	const ibgda_region &there = t.windows[place.prev];
	const ibgda_u64 consumed = team_place(t, there, &place.words->consumed);
	ibgda_status status = ibgda_signal<M>(t.qps[place.prev], consumed, there.rkey, call.staged + message + 1);
	return team_ended(status, place.prev, TEAM_POSTING);
}

/* Adds what is in the slot of a message to the vector: all threads. */
template <class T> IBGDA_FN void ring_add(const team &t, const ring_call &call, const ring_place &place, ibgda_u64 message)
{
	const ring_range range = ring_of(t, call, place, message, false);
	ibgda_u8 *window = reinterpret_cast<ibgda_u8 *>(t.own);
	const ibgda_u64 slot = (call.staged + message) % call.slots;
	const T *from = reinterpret_cast<const T *>(window + call.staging + slot * call.chunk * sizeof(T));
	T *to = reinterpret_cast<T *>(window + RING_VECTOR) + range.first;
	for (ibgda_u64 i = THREAD; i < range.count; i += THREADS)
		to[i] = to[i] + from[i];
}

template <ibgda_u32 M, class T> IBGDA_FN void ring(const team &t, const ring_call &call, team_outcome *ended)
{
	ring_place place;
	place.next = (t.rank + 1) % t.size;
	place.prev = (t.rank + t.size - 1) % t.size;
	place.chunks = ((call.count + t.size - 1) / t.size + call.chunk - 1) / call.chunk;
	place.staged = (t.size - 1) * place.chunks;
	place.deadline_ns = ibgda_clock_ns() + call.timeout_ns;
	place.words = reinterpret_cast<ring_words *>(reinterpret_cast<ibgda_u8 *>(t.own) + TEAM_HEADER_BYTES);
	const ibgda_u64 all = 2 * place.staged, lag = ring_least(place.chunks, call.slots);
	const bool leads = THREAD == 0;
	if (leads)
		*ended = team_ended(IBGDA_OK, t.rank, 0);
	for (ibgda_u64 i = 0; i < all + lag; i++) {
		const ibgda_u64 taken = i - lag;
		if (leads && !ended->status && i >= lag) {
			ibgda_u32 status = team_wait<M>(t, place.prev, &place.words->arrived, call.messages + taken + 1, place.deadline_ns);
			*ended = team_ended(status, place.prev, TEAM_AWAITING_DATA);
		}
		BLOCK_SYNC();
		/* All threads see the same: it is written again behind the next barrier only. */
		if (ended->status)
			return;
		const bool adds = i >= lag && taken < place.staged;
		if (adds)
			ring_add<T>(t, call, place, taken);
		BLOCK_SYNC();
		if (leads && adds)
			*ended = ring_give_back<M>(t, call, place, taken);
		if (leads && !ended->status && i < all)
			*ended = ring_send<M, T>(t, call, place, i);
	}
	/* The caller may fill the vector again. */
	for (ibgda_u32 side = 0; leads && !ended->status && side < 2; side++) {
		const ibgda_u32 peer = side ? place.prev : place.next;
		*ended = team_ended(team_quiet<M>(t, peer, place.deadline_ns), peer, TEAM_AWAITING_COMPLETION);
	}
}

KERNEL all_reduce_ring(team t, ring_call call)
{
	BLOCK_SHARED team_outcome ended;
	if (call.type)
		IBGDA_BY_ROUTE(t.qps[(t.rank + 1) % t.size], 0, ring<route, float>(t, call, &ended));
	else
		IBGDA_BY_ROUTE(t.qps[(t.rank + 1) % t.size], 0, ring<route, ibgda_u32>(t, call, &ended));
	if (THREAD == 0)
		t.own->outcome = ended;
}
