/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A QP that many threads post to at once. Without a lock that a poster could wait for, and without an order in which they
 * would have to wait for each other:
 *
 * 1. Reserve: one atomic add gives a range of slots. It may be used when the NIC has executed what was there before.
 * 2. Write the WQEs, then a fence.
 * 3. Ready: each slot has a bit, in a word for a quarter of the ring or 32 slots; a bit that was toggled in this lap is a
 *    slot that is written. One more bit of the word, its entry, says that all words before it are full. An atomic xor sets
 *    the bits and shows the word as it is now: whoever sees the entry and all lower bits set has completed the prefix and
 *    publishes it, with what others left behind his slots; everybody else is done. A word that is full hands its entry to
 *    the next by another xor. So each slot is in the prefix that exactly one thread publishes.
 * 4. Publish: the record must never go back, so one at a time writes it. `publisher` is the index told to the NIC, and
 *    whether somebody is telling. An atomic max puts the new index there: when somebody is telling he will find it when he
 *    tries to leave, by a compare-and-swap, and tells again. A poster who finds the prefix before his slots told and nobody
 *    telling takes the word at once, before he writes the WQE, with a plain store: nobody else can complete a prefix before
 *    his slots are ready. So alone on the QP he pays two atomics and two fences.
 *    A teller who has told IBGDA_PATIENT_ROUNDS times marks himself tired; the next that brings an index takes over, as
 *    soon as the tired one is done, so that nobody tells for others for ever.
 *
 * Laps. A word holds bits of one lap at a time: a slot is used again only when the NIC has executed all slots of its word.
 */
#ifndef IBGDA_SHARED_H
#define IBGDA_SHARED_H

#include "ibgda/poll.h"
#include "ibgda/wqe.h"

#define IBGDA_BUSY 1ull
#define IBGDA_TIRED 2ull
#ifndef IBGDA_PATIENT_ROUNDS
#define IBGDA_PATIENT_ROUNDS 64u
#endif

/* How long a poster whose own patience is at an end waits for those behind him to take their reservations back. */
#define IBGDA_UNWIND_NS 1000000000ull

/*
 * What of a QP is constant and a post needs: read at once, before the first fence, since each fence that acquires empties
 * the L1.
 */
struct ibgda_sq {
	ibgda_u8 *ring;
	ibgda_u32 *record;
	ibgda_u64 *doorbell;
	ibgda_u64 *ready;
	ibgda_u32 qpn, depth;
};

/* What is read in pairs lies in pairs. NVRTC has no offsetof; the other compilers see the same structures. */
#ifndef __CUDACC_RTC__
#define IBGDA_PAIR(type, first, second) \
	static_assert(__builtin_offsetof(type, first) % 16 == 0 && __builtin_offsetof(type, second) == __builtin_offsetof(type, first) + 8, \
		      "words of a pair")
IBGDA_PAIR(ibgda_qp, send_ring, recv_ring);
IBGDA_PAIR(ibgda_qp, doorbell_record, doorbell);
IBGDA_PAIR(ibgda_qp, ready, post_timeout_ns);
IBGDA_PAIR(ibgda_qp, producer, limit);
IBGDA_PAIR(ibgda_cq, ring, doorbell_record);
IBGDA_PAIR(ibgda_cq, consumer, fetching);
IBGDA_PAIR(ibgda_cq, completed, error);
#undef IBGDA_PAIR
static_assert(__builtin_offsetof(ibgda_qp, number) % 16 == 0 && __builtin_offsetof(ibgda_cq, number) % 16 == 0, "numbers of a pair");
#endif

IBGDA_FN ibgda_sq ibgda_sq_of(const ibgda_qp *qp)
{
#if defined(__CUDACC__) && !defined(IBGDA_HOST)
	ibgda_quad rings = ibgda_load_own_pair(&qp->send_ring), registers = ibgda_load_own_pair(&qp->doorbell_record);
	ibgda_quad ready = ibgda_load_own_pair(&qp->ready), numbers = ibgda_load_own_pair(&qp->number);
	return {reinterpret_cast<ibgda_u8 *>(rings.low), reinterpret_cast<ibgda_u32 *>(registers.low) + 1,
		reinterpret_cast<ibgda_u64 *>(registers.high), reinterpret_cast<ibgda_u64 *>(ready.low), (ibgda_u32)numbers.low,
		(ibgda_u32)(numbers.low >> 32)};
#else
	return {qp->send_ring, qp->doorbell_record + 1, qp->doorbell, qp->ready, qp->number, qp->send_depth};
#endif
}

/* Half of the ring: what may be reserved at a time. */
IBGDA_PURE ibgda_u32 ibgda_half(ibgda_u32 depth) { return depth > 1 ? depth / 2 : 1; }

/*
 * Raises the QP's limit to what is known now, and gives it. 0 stays 0: an error. What was not told cannot be complete,
 * whatever a completion says.
 */
IBGDA_FN ibgda_u64 ibgda_shared_limit(ibgda_qp *qp, ibgda_u64 completed)
{
	ibgda_u64 told = ibgda_load_shared(&qp->publisher) >> 2, old = ibgda_load_shared(&qp->limit);
	ibgda_u64 limit = (completed < told ? completed : told) + qp->send_depth;
	limit &= ~(ibgda_u64)(IBGDA_READY_SLOTS(qp->send_depth) - 1);
	while (old && old < limit) {
		ibgda_u64 now = ibgda_atomic_cas(&qp->limit, old, limit);
		if (now == old)
			return limit;
		old = now;
	}
	return old;
}

/*
 * The slow path of a reservation that was made: waits for room, for at most the QP's patience, then takes the reservation
 * back. That can be done when all later ones are taken back; they have no room either. If they are not within a second,
 * the QP is at its end: a slot that was reserved and is never written would stop all that follow.
 */
template <ibgda_u32 M> IBGDA_SLOW ibgda_status ibgda_shared_wait_for_room(ibgda_qp *qp, ibgda_u64 index, ibgda_u64 end)
{
	ibgda_cq *cq = qp->send_cq;
	ibgda_u64 deadline = ibgda_clock_ns() + qp->post_timeout_ns;
	for (;;) {
		ibgda_known known = ibgda_look<M>(cq);
		if (known.error)
			return known.error;
		if (end <= ibgda_shared_limit(qp, known.completed))
			return IBGDA_OK;
		ibgda_cqe cqe;
		if (ibgda_drain<M>(cq, &cqe, index, 64) != IBGDA_TIMEOUT)
			continue;
		ibgda_u64 now = ibgda_clock_ns();
		if (now >= deadline) {
			if (ibgda_atomic_cas(&qp->producer, end, index) == end)
				return IBGDA_ERR_QUEUE_FULL;
			if (now >= deadline + IBGDA_UNWIND_NS && ibgda_try_lock(&cq->lock)) {
				ibgda_latch<M>(cq, IBGDA_ERR_QUEUE_FULL, index, nullptr);
				ibgda_unlock<M>(&cq->lock);
			}
		}
		ibgda_relax();
	}
}

/*
 * Reserves `slots` slots, at most half of the ring. *alone: all before them was told and nobody is telling.
 */
template <ibgda_u32 M>
IBGDA_FN ibgda_status ibgda_shared_reserve(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u32 slots, ibgda_u64 *index, bool *alone)
{
	/* The three are under way at the same time. */
	ibgda_u64 at = ibgda_atomic_add(&qp->producer, slots);
	ibgda_u64 limit = ibgda_load_shared(&qp->limit), publisher = ibgda_load_shared(&qp->publisher);
	/* Not looked at before, when it would have to be waited for. */
	if (!sq.ready) {
		ibgda_atomic_add(&qp->producer, ~(ibgda_u64)slots + 1);
		return IBGDA_ERR_NO_QUEUE;
	}
	if (at + slots > limit) {
		ibgda_status status = ibgda_shared_wait_for_room<M>(qp, at, at + slots);
		if (status != IBGDA_OK)
			return status;
		publisher = ibgda_load_shared(&qp->publisher);
	}
	*alone = publisher == at << 2;
	*index = at;
	return IBGDA_OK;
}

/* The bits of slots [index, end), which lie in one word. */
IBGDA_PURE ibgda_u64 ibgda_ready_bits(ibgda_u64 index, ibgda_u64 end, ibgda_u32 slots)
{
	ibgda_u32 first = (ibgda_u32)index & (slots - 1);
	return (((1ull << (end - index)) - 1) << first);
}

/* Toggles bits of the word that slot `index` lies in; the word as it is then, with 1 for what was toggled in this lap. */
IBGDA_FN ibgda_u64 ibgda_ready_toggle(const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 bits)
{
	ibgda_u32 slots = IBGDA_READY_SLOTS(sq.depth);
	ibgda_u64 *word = sq.ready + ((ibgda_u32)index & (sq.depth - 1)) / slots;
	ibgda_u64 now = ibgda_atomic_xor(word, bits) ^ bits;
	return index & sq.depth ? ~now : now;
}

/* One past the last of the slots that are ready in the word of slot `index`, from the word's first on. */
IBGDA_PURE ibgda_u64 ibgda_ready_end(ibgda_u64 index, ibgda_u64 now, ibgda_u32 slots)
{
	ibgda_u64 missing = ~now | (1ull << slots), first = index & ~(ibgda_u64)(slots - 1);
#ifdef __CUDA_ARCH__
	return first + (ibgda_u32)(__ffsll((long long)missing) - 1);
#else
	return first + (ibgda_u32)__builtin_ctzll(missing);
#endif
}

/*
 * Makes slots [index, end) ready. The end of the prefix that the caller has to publish; 0: none, another thread will. The
 * bits of the first word are set by the last xor, of which `now` is the result when it was done before.
 */
IBGDA_FN ibgda_u64 ibgda_ready_prefix(const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 now)
{
	ibgda_u32 slots = IBGDA_READY_SLOTS(sq.depth);
	if (!(now & IBGDA_READY_FIRST))
		return 0;
	ibgda_u64 end = ibgda_ready_end(index, now, slots);
	if (end <= index)
		return 0;
	while (!(end & (slots - 1))) {
		ibgda_u64 next = ibgda_ready_toggle(sq, end, IBGDA_READY_FIRST);
		ibgda_u64 further = ibgda_ready_end(end, next, slots);
		if (further == end)
			break;
		end = further;
	}
	return end;
}

/* The xors; the higher words first, so that the first one, whose result is returned, decides. */
IBGDA_FN ibgda_u64 ibgda_ready_set(const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 end)
{
	ibgda_u32 slots = IBGDA_READY_SLOTS(sq.depth);
	ibgda_u64 first_end = (index & ~(ibgda_u64)(slots - 1)) + slots;
	while (end > first_end) {
		ibgda_u64 from = (end - 1) & ~(ibgda_u64)(slots - 1);
		ibgda_ready_toggle(sq, from, ibgda_ready_bits(from, end, slots));
		end = from;
	}
	return ibgda_ready_toggle(sq, index, ibgda_ready_bits(index, end, slots));
}

/* Record, fence, doorbell. Whatever must be seen before the record was fenced off. */
template <ibgda_u32 M> IBGDA_FN void ibgda_tell(const ibgda_sq &sq, ibgda_u64 end)
{
	if (!(M & IBGDA_NO_RECORD)) {
		ibgda_store_record(sq.record, ibgda_be32((ibgda_u32)(end & 0xffff)));
		ibgda_release<M>();
	}
	ibgda_u64 value = ibgda_doorbell_value(end, sq.qpn);
	if (M & IBGDA_CPU_DOORBELL)
		ibgda_store_word(sq.doorbell, value);
	else
		ibgda_store_doorbell(sq.doorbell, value);
}

/*
 * Leaves the publisher's word as somebody who told the NIC of `told`; tells of what came meanwhile first. `word` is what
 * is in the word, if nothing came.
 */
template <ibgda_u32 M> IBGDA_FN void ibgda_leave(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 told, ibgda_u64 word)
{
	for (ibgda_u32 rounds = 1;; rounds++) {
		ibgda_u64 now = ibgda_atomic_cas(&qp->publisher, word, told << 2);
		if (now == word)
			return;
		if (word & IBGDA_TIRED) {
			/* Taken over. What was told last can be passed now. */
			ibgda_acquire_release<M>();
			ibgda_store_shared(&qp->rung, told);
			return;
		}
		word = now;
		if (rounds >= IBGDA_PATIENT_ROUNDS) {
			now = ibgda_atomic_cas(&qp->publisher, word, word | IBGDA_TIRED);
			word = now == word ? word | IBGDA_TIRED : now;
		}
		told = word >> 2;
		ibgda_acquire_release<M>();
		ibgda_tell<M>(sq, told);
	}
}

/* Publishes all slots below `end`, a prefix that the caller completed. */
template <ibgda_u32 M> IBGDA_FN void ibgda_shared_publish(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 end)
{
	ibgda_u64 word = end << 2 | IBGDA_BUSY;
	ibgda_acquire_release<M>();
	ibgda_u64 old = ibgda_atomic_max(&qp->publisher, word);
	if (old >> 2 >= end && old != end << 2)
		return;
	if (old & IBGDA_BUSY) {
		if (!(old & IBGDA_TIRED))
			return;
		/* What the tired one tells at most; then the record is free. He waits for nobody. */
		while (ibgda_load_shared(&qp->rung) < old >> 2)
			ibgda_relax();
	}
	ibgda_acquire_release<M>();
	/* If it was told before, by another who rang for the same slots, this one only has to leave. */
	if (old >> 2 < end)
		ibgda_tell<M>(sq, end);
	ibgda_leave<M>(qp, sq, end, word);
}

/*
 * Leaves as the poster who took the publisher's word before he wrote slots [index, end), and has told of them. `now` is the
 * first slot's ready word as his xor made it: it may show slots of others behind his.
 */
template <ibgda_u32 M>
IBGDA_FN void ibgda_leave_alone(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 end, ibgda_u64 now)
{
	const ibgda_u64 prefix = ibgda_ready_prefix(sq, index, now);
	if (prefix > end) {
		ibgda_acquire_release<M>();
		ibgda_tell<M>(sq, prefix);
	}
	ibgda_leave<M>(qp, sq, prefix, index << 2 | IBGDA_BUSY);
}

/*
 * The usual case in few instructions: slots of one word, which they do not fill, of a poster who is alone, and still is when
 * he has told. False: nothing was done.
 */
template <ibgda_u32 M> IBGDA_FN bool ibgda_shared_ring_alone(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 end)
{
	const ibgda_u32 slots = IBGDA_READY_SLOTS(sq.depth), count = (ibgda_u32)(end - index), at = (ibgda_u32)index & (slots - 1);
	if (at + count >= slots)
		return false;
	const ibgda_u32 before = (1u << at) - 1, bits = ((1u << count) - 1) << at;
	const ibgda_u32 all = slots == 32 ? ~0u : (1u << slots) - 1;
	ibgda_u64 *word = sq.ready + ((ibgda_u32)index & (sq.depth - 1)) / slots;
	/* The word if only what is before these slots is ready: as it is, or in an odd lap the other way round. */
	const ibgda_u64 usual = (ibgda_u32)index & sq.depth ? all ^ before : IBGDA_READY_FIRST | before;
	const ibgda_u64 old = ibgda_atomic_xor(word, bits), busy = index << 2 | IBGDA_BUSY;
	ibgda_tell<M>(sq, end);
	if (old == usual && ibgda_atomic_cas(&qp->publisher, busy, end << 2) == busy)
		return true;
	/* Others came. */
	const ibgda_u64 now = old ^ bits;
	ibgda_leave_alone<M>(qp, sq, index, end, (ibgda_u32)index & sq.depth ? ~now : now);
	return true;
}

/*
 * Makes slots [index, end), which were written before the fence that the caller had, known to the NIC. `alone` as the
 * reservation said, if the caller then put index << 2 | IBGDA_BUSY into the publisher's word.
 */
template <ibgda_u32 M>
IBGDA_FN void ibgda_shared_ring(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 end, bool alone, bool ring)
{
	if (alone && ibgda_shared_ring_alone<M>(qp, sq, index, end))
		return;
	ibgda_u64 now = ibgda_ready_set(sq, index, end);
	if (alone) {
		/* While the xor is under way: whatever it shows, the slots before `end` are the prefix. */
		ibgda_tell<M>(sq, end);
		ibgda_leave_alone<M>(qp, sq, index, end, now);
		return;
	}
	ibgda_u64 prefix = ibgda_ready_prefix(sq, index, now);
	if (!prefix)
		return;
	/* Slots of others behind these: who wrote them counts on it that this thread rings. */
	if (ring || prefix > end)
		ibgda_shared_publish<M>(qp, sq, prefix);
	else
		ibgda_atomic_max(&qp->unrung, prefix);
}

#endif
