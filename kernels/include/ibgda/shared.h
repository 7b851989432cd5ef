/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A QP that many threads post to at once. Without a lock, and without an order in which they would have to wait for each
 * other: a poster waits for another at most as long as that one's record, fence and doorbell take, for him who tells alone.
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
 *    tries to leave, by a compare-and-swap, and tells again.
 *    A teller who has told IBGDA_PATIENT_ROUNDS times marks himself tired: the next that brings an index takes over, as
 *    soon as the tired one has put what he told last into `rung`, so that nobody tells for others for ever.
 *    A poster who is alone is tired from the start. That is one who finds the prefix before his slots told and nobody
 *    telling; he takes the publisher's word at once, before he writes the WQE, with a plain store: nobody else can complete a
 *    prefix before his slots are ready. He leaves by `rung` alone: when it has the index that is in the word of a tired one,
 *    nobody is telling. So alone on the QP one pays two fences and waits for one atomic.
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
	ibgda_u32 ready_shift;	/* IBGDA_READY_SLOTS as a power of two */
};

/* What is read in pairs lies in pairs. NVRTC has no offsetof; the other compilers see the same structures. */
#ifndef __CUDACC_RTC__
#define IBGDA_PAIR(type, first, second) \
	static_assert(__builtin_offsetof(type, first) % 16 == 0 && __builtin_offsetof(type, second) == __builtin_offsetof(type, first) + 8, \
		      "words of a pair")
IBGDA_PAIR(ibgda_qp, send_ring, recv_ring);
IBGDA_PAIR(ibgda_qp, doorbell_record, doorbell);
IBGDA_PAIR(ibgda_qp, send_cq, recv_cq);
IBGDA_PAIR(ibgda_qp, ready, post_timeout_ns);
IBGDA_PAIR(ibgda_qp, producer, limit);
IBGDA_PAIR(ibgda_qp, publisher, rung);
IBGDA_PAIR(ibgda_cq, ring, doorbell_record);
IBGDA_PAIR(ibgda_cq, consumer, fetching);
IBGDA_PAIR(ibgda_cq, completed, error);
#undef IBGDA_PAIR
static_assert(__builtin_offsetof(ibgda_qp, number) % 16 == 0 && __builtin_offsetof(ibgda_cq, number) % 16 == 0, "numbers of a pair");
#endif

IBGDA_FN ibgda_u32 ibgda_ready_shift(ibgda_u32 depth)
{
	ibgda_u32 zeros;
#if defined(__CUDACC__) && !defined(IBGDA_HOST)
	/* Not __clz, which the compiler does again wherever it is needed. */
	asm("clz.b32 %0, %1;" : "=r"(zeros) : "r"(depth));
#else
	zeros = (ibgda_u32)__builtin_clz(depth);
#endif
	return depth >= 4 * IBGDA_READY_MOST ? 5 : depth >= 4 ? 29 - zeros : 0;
}

IBGDA_FN ibgda_sq ibgda_sq_of(const ibgda_qp *qp)
{
#if defined(__CUDACC__) && !defined(IBGDA_HOST)
	ibgda_quad rings = ibgda_load_constant_pair(&qp->send_ring), registers = ibgda_load_constant_pair(&qp->doorbell_record);
	ibgda_quad ready = ibgda_load_constant_pair(&qp->ready), numbers = ibgda_load_constant_pair(&qp->number);
	const ibgda_u32 depth = (ibgda_u32)(numbers.low >> 32);
	return {reinterpret_cast<ibgda_u8 *>(rings.low), reinterpret_cast<ibgda_u32 *>(registers.low) + 1,
		reinterpret_cast<ibgda_u64 *>(registers.high), reinterpret_cast<ibgda_u64 *>(ready.low), (ibgda_u32)numbers.low,
		depth, ibgda_ready_shift(depth)};
#else
	return {qp->send_ring, qp->doorbell_record + 1, qp->doorbell, qp->ready, qp->number, qp->send_depth,
		ibgda_ready_shift(qp->send_depth)};
#endif
}

/* The CQ of the send queue; constant too. */
IBGDA_FN ibgda_cq *ibgda_send_cq(const ibgda_qp *qp)
{
#if defined(__CUDACC__) && !defined(IBGDA_HOST)
	return reinterpret_cast<ibgda_cq *>(ibgda_load_constant_pair(&qp->send_cq).low);
#else
	return qp->send_cq;
#endif
}

/* Half of the ring: what may be reserved at a time. */
IBGDA_PURE ibgda_u32 ibgda_half(ibgda_u32 depth) { return depth > 1 ? depth / 2 : 1; }

/* Slots that the NIC was told of for certain: of a tired teller what he told before, unless he is done. */
IBGDA_FN ibgda_u64 ibgda_told(const ibgda_qp *qp)
{
	const ibgda_quad both = ibgda_load_shared_pair(&qp->publisher);
	return both.low & IBGDA_TIRED ? both.high : both.low >> 2;
}

/*
 * Raises the QP's limit to what is known now, and gives it. 0 stays 0: an error. What was not told cannot be complete,
 * whatever a completion says.
 */
IBGDA_FN ibgda_u64 ibgda_shared_limit(ibgda_qp *qp, ibgda_u64 completed)
{
	ibgda_u64 told = ibgda_told(qp), old = ibgda_load_shared(&qp->limit);
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
	if (!qp->ready) {
		/* A handle that was not made for it. */
		ibgda_atomic_add(&qp->producer, index - end);
		return IBGDA_ERR_NO_QUEUE;
	}
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
 * Reserves `slots` slots, at most half of the ring. *teller is the publisher's word and `rung`, as they were meanwhile; after
 * a wait, a word of no index.
 */
template <ibgda_u32 M>
IBGDA_FN ibgda_status ibgda_shared_reserve(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u32 slots, ibgda_u64 *index, ibgda_quad *teller)
{
	/* The three are under way at the same time. */
	ibgda_u64 at = ibgda_atomic_add(&qp->producer, slots + ibgda_zero());
	ibgda_u64 limit = ibgda_load_shared(&qp->limit);
	*teller = ibgda_load_shared_pair(&qp->publisher);
	*index = at;
	if (at + slots <= limit && sq.ready)
		return IBGDA_OK;
	teller->low = ~0ull;
	return ibgda_shared_wait_for_room<M>(qp, at, at + slots);
}

/*
 * Is a poster whose slots begin with `index` alone: all before them was told, and nobody is telling? Of the publisher's word
 * 32 bits do, which is never a ring away from what was reserved. What follows is for rings with IBGDA_READY_MOST slots to a word.
 */
IBGDA_FN bool ibgda_is_alone(const ibgda_sq &sq, const ibgda_quad &teller, ibgda_u64 index)
{
	const ibgda_u32 state = (ibgda_u32)teller.low - ((ibgda_u32)index << 2);
	/* No branches. */
	return (sq.depth >= 4 * IBGDA_READY_MOST) & ((state == 0) | ((state == (IBGDA_BUSY | IBGDA_TIRED)) & (teller.high == index)));
}

/* A word of `ready`, and what slot it begins with. */
struct ibgda_ready {
	ibgda_u64 *word;
	ibgda_u64 first;
	ibgda_u32 slots;
	bool odd;	/* of an odd lap: its bits are 0 when they have been toggled */
};

/* The word that slot `index` lies in. */
IBGDA_FN ibgda_ready ibgda_ready_of(const ibgda_sq &sq, ibgda_u64 index)
{
	const ibgda_u32 slots = 1u << sq.ready_shift;
	return {sq.ready + (((ibgda_u32)index & (sq.depth - 1)) >> sq.ready_shift), index & ~(ibgda_u64)(slots - 1), slots,
		((ibgda_u32)index & sq.depth) != 0};
}

/* The bits of slots [index, end) that are in the word, as `index` is. */
IBGDA_PURE ibgda_u64 ibgda_ready_bits(const ibgda_ready &ready, ibgda_u64 index, ibgda_u64 end)
{
	const ibgda_u32 from = (ibgda_u32)(index - ready.first);
	const ibgda_u32 to = end < ready.first + ready.slots ? (ibgda_u32)(end - ready.first) : ready.slots;
	return (1ull << to) - (1ull << from);
}

/* Toggles bits of the word; as it is then, with 1 for what was toggled in this lap. */
IBGDA_FN ibgda_u64 ibgda_ready_toggle(const ibgda_ready &ready, ibgda_u64 bits)
{
	ibgda_u64 now = ibgda_atomic_xor(ready.word, bits) ^ bits;
	return ready.odd ? ~now : now;
}

/* One past the last of the slots that are ready, from the word's first on. */
IBGDA_PURE ibgda_u64 ibgda_ready_end(const ibgda_ready &ready, ibgda_u64 now)
{
	ibgda_u64 missing = ~now | (1ull << ready.slots);
#ifdef __CUDA_ARCH__
	return ready.first + (ibgda_u32)(__ffsll((long long)missing) - 1);
#else
	return ready.first + (ibgda_u32)__builtin_ctzll(missing);
#endif
}

/* Gives the entry to the word that begins with slot `end`, all before being ready. The end of what is ready then. */
IBGDA_SLOW ibgda_u64 ibgda_ready_pass(ibgda_sq sq, ibgda_u64 end)
{
	for (;;) {
		const ibgda_ready ready = ibgda_ready_of(sq, end);
		const ibgda_u64 further = ibgda_ready_end(ready, ibgda_ready_toggle(ready, IBGDA_READY_FIRST));
		if (further != ready.first + ready.slots)
			return further;
		end = further;
	}
}

/*
 * Makes slots [index, end) ready. The end of the prefix that the caller has to publish; 0: none, another thread will. The
 * higher words first, so that the first one decides.
 */
IBGDA_FN ibgda_u64 ibgda_ready_set(const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 end)
{
	const ibgda_ready ready = ibgda_ready_of(sq, index);
	while (end > ready.first + ready.slots) {
		const ibgda_ready last = ibgda_ready_of(sq, end - 1);
		ibgda_ready_toggle(last, ibgda_ready_bits(last, last.first, end));
		end = last.first;
	}
	const ibgda_u64 now = ibgda_ready_toggle(ready, ibgda_ready_bits(ready, index, end));
	if (!(now & IBGDA_READY_FIRST))
		return 0;
	const ibgda_u64 prefix = ibgda_ready_end(ready, now);
	if (prefix <= index)
		return 0;
	return prefix == ready.first + ready.slots ? ibgda_ready_pass(sq, prefix) : prefix;
}

/* Record, fence, doorbell. Whatever must be seen before the record was fenced off. */
template <ibgda_u32 M> IBGDA_FN void ibgda_tell(const ibgda_sq &sq, ibgda_u64 end)
{
	if (!(M & IBGDA_NO_RECORD)) {
		ibgda_store_record(sq.record, ibgda_be16((ibgda_u32)end));
		ibgda_release<M>();
	}
	ibgda_u64 value = ibgda_doorbell_value(end, sq.qpn);
	if (M & IBGDA_CPU_DOORBELL)
		ibgda_store_word(sq.doorbell, value);
	else
		ibgda_store_doorbell(sq.doorbell, value);
}

/*
 * How somebody who told the NIC of `told` leaves the publisher's word when that is not `word`, as he left it, but `now`: tells
 * of what came meanwhile first.
 */
template <ibgda_u32 M> IBGDA_SLOW void ibgda_leave_later(ibgda_qp *qp, ibgda_sq sq, ibgda_u64 told, ibgda_u64 word, ibgda_u64 now)
{
	for (ibgda_u32 rounds = 1; now != word; rounds++) {
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
		now = ibgda_atomic_cas(&qp->publisher, word, told << 2);
	}
}

/*
 * Publishes all slots below `end`, a prefix that the caller completed; or, `again`, one that others may publish too: then an
 * idle word of the same index must stay as it is, for a poster who is alone may have seen it.
 */
template <ibgda_u32 M> IBGDA_FN void ibgda_shared_publish(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 end, bool again = false)
{
	const ibgda_u64 word = end << 2 | IBGDA_BUSY;
	ibgda_acquire_release<M>();
	ibgda_u64 old;
	if (again) {
		old = ibgda_load_shared(&qp->publisher);
		while (old >> 2 < end) {
			const ibgda_u64 now = ibgda_atomic_cas(&qp->publisher, old, word);
			if (now == old)
				break;
			old = now;
		}
	} else {
		old = ibgda_atomic_max(&qp->publisher, word);
	}
	if (old >> 2 >= end)
		return;
	if (old & IBGDA_BUSY) {
		if (!(old & IBGDA_TIRED))
			return;
		/* What the tired one tells at most; then the record is free. He waits for nobody. */
		while (ibgda_load_shared(&qp->rung) < old >> 2)
			ibgda_relax();
	}
	ibgda_acquire_release<M>();
	ibgda_tell<M>(sq, end);
	const ibgda_u64 now = ibgda_atomic_cas(&qp->publisher, word, end << 2);
	if (now != word)
		ibgda_leave_later<M>(qp, sq, end, word, now);
}

/*
 * The rest of ibgda_shared_ring_alone when slots behind `end` are ready, as the word of slot `index` says: nobody else will
 * tell of them. `now` is that word.
 */
template <ibgda_u32 M>
IBGDA_SLOW void ibgda_shared_ring_others(ibgda_qp *qp, ibgda_sq sq, ibgda_u64 end, ibgda_u64 index, ibgda_u64 now)
{
	const ibgda_ready ready = ibgda_ready_of(sq, index);
	ibgda_u64 prefix = ibgda_ready_end(ready, ready.odd ? ~now : now);
	if (prefix == ready.first + ready.slots)
		prefix = ibgda_ready_pass(sq, prefix);
	if (prefix > end)
		ibgda_shared_publish<M>(qp, sq, prefix);
}

/* Takes the publisher's word for slots below `end`, as a poster who is alone and has not written them yet. */
IBGDA_FN void ibgda_shared_take(ibgda_qp *qp, ibgda_u64 end) { ibgda_store_shared(&qp->publisher, end << 2 | IBGDA_BUSY | IBGDA_TIRED); }

/*
 * Tells of slots [index, end) as the poster who took the publisher's word before he wrote them: all before them was told, so
 * that they are the prefix, whatever else is ready. The usual case, in few instructions.
 */
template <ibgda_u32 M> IBGDA_FN void ibgda_shared_ring_alone(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 end)
{
	/* The slots' word, from bit `from` up to `to`; `entry`: with its entry. */
	ibgda_u32 slot = (ibgda_u32)index, from = slot & (IBGDA_READY_MOST - 1), to = from + (ibgda_u32)end - slot, entry = 0;
	ibgda_u64 *word = ibgda_word(sq.ready, (slot & (sq.depth - 1)) / IBGDA_READY_MOST);
	while (to >= IBGDA_READY_MOST) {
		/* Full, whatever its xor gives: nobody else has slots in it that were not told. The next one gets its entry at once. */
		ibgda_atomic_xor(word, (ibgda_u64)entry << 32 | (ibgda_u32)(~0u << from));
		slot += IBGDA_READY_MOST - from;
		word = ibgda_word(sq.ready, (slot & (sq.depth - 1)) / IBGDA_READY_MOST);
		to -= IBGDA_READY_MOST;
		from = 0;
		entry = 1;
	}
	const ibgda_u64 bits = (ibgda_u64)entry << 32 | ((1u << to) - (1u << from));
	ibgda_u64 old = ibgda_atomic_xor(word, bits);
	/* While that is under way. */
	ibgda_tell<M>(sq, end);
	/* The fence in ibgda_tell is before the record and the xors are seen; without a record there is none. */
	if (M & IBGDA_NO_RECORD)
		ibgda_release<M>();
	ibgda_store_shared(&qp->rung, end);
	old = ibgda_later(old);
	/* The word if only what is before these slots is ready: in an even lap, in an odd one. */
	const ibgda_u32 odd = slot & sq.depth ? ~0u : 0;
	if ((ibgda_u32)old != (((1u << from) - 1) ^ odd) || (ibgda_u32)(old >> 32) != ((entry ^ 1) ^ (odd & 1)))
		ibgda_shared_ring_others<M>(qp, sq, end, end - to, old ^ bits);
}

/*
 * Makes slots [index, end), which were written before the fence that the caller had, known to the NIC, or with ring = false
 * only ready for the next doorbell.
 */
template <ibgda_u32 M> IBGDA_SLOW void ibgda_shared_ring(ibgda_qp *qp, ibgda_sq sq, ibgda_u64 index, ibgda_u64 end, bool ring)
{
	ibgda_u64 prefix = ibgda_ready_set(sq, index, end);
	if (!prefix)
		return;
	/* Slots of others behind these: who wrote them counts on it that this thread rings. */
	if (ring || prefix > end)
		ibgda_shared_publish<M>(qp, sq, prefix);
	else {
		/* Whoever rings for them acquires by it what the others made ready. */
		ibgda_acquire_release<M>();
		ibgda_atomic_max(&qp->unrung, prefix);
	}
}

/* What is left of a post whose slots [index, end) are written: a poster who is `alone` rings, whatever `ring` says. */
template <ibgda_u32 M>
IBGDA_FN void ibgda_shared_finish(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 index, ibgda_u64 end, bool alone, bool ring)
{
	ibgda_acquire_release<M>();
	if (alone)
		ibgda_shared_ring_alone<M>(qp, sq, index, end);
	else
		ibgda_shared_ring<M>(qp, sq, index, end, ring);
}

#endif
