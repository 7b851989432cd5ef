/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Completions: decoding, latching the first error, bounded waiting, and sleeping until the CQ has an event.
 *
 * Deadlines are absolute, on ibgda_clock_ns(); 0, or any time that has passed, means: look once.
 *
 * Of a shared QP, one thread at a time takes completions, under a lock that is only ever tried: the others look at what
 * it found. All leave what they learned in `completed` and `error`, which are read in one load.
 */
#ifndef IBGDA_POLL_H
#define IBGDA_POLL_H

#include "ibgda/platform.h"

/* Broker's status page (uapi/ibgda.h): word 0 = generation << 32 | state, state 1 = ready. */
#define IBGDA_STATE_WORD_READY(generation) ((ibgda_u64)(generation) << 32 | 1u)

/* Polls without a completion between two looks at the status page, a power of two. */
#define IBGDA_POLLS_PER_STATUS_LOOK 64u

/* Reads and atomics: from here on, opcodes of requests that write local memory. */
#define IBGDA_FIRST_FETCHING_OPCODE 0x10

/* The 32-bit big-endian word at byte `offset` of a completion that was found valid. */
IBGDA_FN ibgda_u32 ibgda_cqe_word(const ibgda_u8 *cqe, unsigned offset)
{
	return ibgda_be32(*reinterpret_cast<const ibgda_u32 *>(cqe + offset));
}

/* Does the broker still vouch for this NIC, in the generation that the queue was made in? */
IBGDA_FN bool ibgda_nic_lost(const ibgda_cq *cq)
{
#ifdef IBGDA_PLANTED_BLIND /* A fault, for the test that must see it (ci/vmtests/tests/hil.rs). */
	return false;
#endif
	return cq->status_page && ibgda_load_relaxed(cq->status_page) != IBGDA_STATE_WORD_READY(cq->generation);
}

/* What is known of a queue: requests complete, and its first error or 0. */
struct ibgda_known {
	ibgda_u64 completed;
	ibgda_status error;
};

template <ibgda_u32 M> IBGDA_FN ibgda_known ibgda_look(const ibgda_cq *cq)
{
	if (!(M & IBGDA_SHARED))
		return {cq->completed, static_cast<ibgda_status>(cq->error.status)};
	ibgda_quad both = ibgda_load_shared_pair(&cq->completed);
	return {both.low, static_cast<ibgda_status>((ibgda_u32)both.high)};
}

/* Keeps the first error. Of a shared QP the status is written last, when the rest can be read. */
template <ibgda_u32 M> IBGDA_FN void ibgda_latch(ibgda_cq *cq, ibgda_status status, ibgda_u64 index, const ibgda_cqe *cqe)
{
	if (cq->error.status)
		return;
	cq->error.wqe_index = index;
	cq->error.kind = cqe ? cqe->kind : (ibgda_u8)IBGDA_CQE_INVALID;
	cq->error.opcode = cqe ? cqe->opcode : (ibgda_u8)0;
	cq->error.syndrome = cqe ? cqe->syndrome : (ibgda_u8)0;
	cq->error.vendor_syndrome = cqe ? cqe->vendor_syndrome : (ibgda_u8)0;
	if (M & IBGDA_SHARED) {
		ibgda_u64 word = (ibgda_u64)(cqe ? cqe->qpn : 0) << 32 | (ibgda_u32)status;
		ibgda_acquire_release<M>();
		ibgda_store_shared(reinterpret_cast<ibgda_u64 *>(&cq->error), word);
		/* Whoever posts looks here first, and then at the error. */
		ibgda_acquire_release<M>();
		if (cq->limit)
			ibgda_store_shared(cq->limit, 0);
	} else {
		cq->error.qpn = cqe ? cqe->qpn : 0;
		cq->error.status = status;
		if (cq->limit)
			*cq->limit = 0;
	}
}

/* Of a ring: is a completion there that was not taken? `high` is the last 8 bytes of the next one's place. */
IBGDA_FN bool ibgda_cqe_waits(const ibgda_cq *cq, ibgda_u64 high)
{
	const ibgda_u32 lap = cq->consumer & cq->depth ? 1 : 0;
	return high >> 60 != IBGDA_CQE_INVALID && ((ibgda_u32)(high >> 56) & 1) == lap;
}

IBGDA_FN const ibgda_u8 *ibgda_next_cqe(const ibgda_cq *cq) { return cq->ring + ((ibgda_u32)cq->consumer & (cq->depth - 1)) * IBGDA_CQE_BYTES; }

/*
 * Takes the next completion, if one is there; no waiting. IBGDA_OK: a request succeeded. IBGDA_TIMEOUT: none is there.
 * Anything else: an error completion was taken, and the first one of this queue is latched in cq->error.
 *
 * *completed advances to behind the request that succeeded, or to the request that failed: requests complete in
 * order, so all before the failed one have succeeded, even those without a completion of their own.
 */
template <ibgda_u32 M> IBGDA_FN ibgda_status ibgda_take_cqe(ibgda_cq *cq, ibgda_cqe *out, ibgda_u64 *completed)
{
	const bool ring = !(M & IBGDA_COLLAPSED);
	const ibgda_u8 *cqe = ring ? ibgda_next_cqe(cq) : cq->ring;
	ibgda_quad tail = ibgda_load_tail(cqe + 48);
	/* Bytes 56..63: opcode and QPN, big-endian; WQE counter, big-endian; signature; kind << 4 | format | owner. */
	ibgda_u32 kind = (ibgda_u32)(tail.high >> 60);
	ibgda_u32 counter = ibgda_be32((ibgda_u32)(tail.high >> 32)) >> 16;

	out->kind = IBGDA_CQE_INVALID;
	if (kind == IBGDA_CQE_INVALID)
		return IBGDA_TIMEOUT;
	/* At most 32768 requests are under way, so the nearest index at or above *completed with these 16 bits is meant. */
	ibgda_u64 ahead = (ibgda_u16)(counter - (ibgda_u32)*completed);
	if (ring) {
		if (!ibgda_cqe_waits(cq, tail.high))
			return IBGDA_TIMEOUT;
		cq->consumer++;
	} else if (ahead >= IBGDA_MAX_DEPTH) {
		/* The one that is known. */
		return IBGDA_TIMEOUT;
	}

	ibgda_u32 opcode_qpn = ibgda_be32((ibgda_u32)tail.high);
	ibgda_u64 index = *completed + ahead;
	out->wqe_index = index;
	out->qpn = opcode_qpn & 0xffffff;
	out->opcode = (ibgda_u8)(opcode_qpn >> 24);
	out->kind = (ibgda_u8)kind;
	out->syndrome = 0;
	out->vendor_syndrome = 0;
	out->byte_count = 0;
	out->immediate = 0;
	if (ring && !(M & IBGDA_SHARED))
		ibgda_store_relaxed(cq->doorbell_record, ibgda_be24((ibgda_u32)cq->consumer));

	if (kind <= IBGDA_CQE_RESP_SEND_INV) {
		/* A request that brought no data has none to acquire, and a fence would empty the L1. */
		if ((M & IBGDA_SHARED) || kind != IBGDA_CQE_REQ || out->opcode >= IBGDA_FIRST_FETCHING_OPCODE ||
		    cq->fetching > *completed) {
			ibgda_acquire();
			/* A collapsed one may be a later request's by now. */
			if (ring) {
				out->byte_count = ibgda_cqe_word(cqe, 44);
				out->immediate = ibgda_cqe_word(cqe, 36);
			}
		}
		*completed = index + 1;
		return IBGDA_OK;
	}

	ibgda_status status = IBGDA_ERR_UNKNOWN_CQE;
	if (kind == IBGDA_CQE_REQ_ERR || kind == IBGDA_CQE_RESP_ERR) {
		/* From the same load as the kind: nothing that lands later can change what is latched. */
		out->vendor_syndrome = (ibgda_u8)(tail.low >> 48);
		out->syndrome = (ibgda_u8)(tail.low >> 56);
		status = static_cast<ibgda_status>(IBGDA_ERR_COMPLETION | out->syndrome);
	}
	if (!cq->error.status)
		*completed = index;
	ibgda_latch<M>(cq, status, index, out);
	return status;
}

IBGDA_FN bool ibgda_try_lock(ibgda_u32 *lock)
{
	if (ibgda_atomic_cas(lock, 0u, 1u))
		return false;
	ibgda_acquire();
	return true;
}

template <ibgda_u32 M> IBGDA_FN void ibgda_unlock(ibgda_u32 *lock)
{
	ibgda_acquire_release<M>();
	ibgda_store_shared(lock, 0);
}

/* Loss has no completion: it is latched like an error of no request in particular. */
template <ibgda_u32 M> IBGDA_FN ibgda_status ibgda_latch_lost(ibgda_cq *cq)
{
	ibgda_latch<M>(cq, IBGDA_ERR_NIC_LOST, cq->completed, nullptr);
	return static_cast<ibgda_status>(cq->error.status);
}

/* After a poll that found nothing: sometimes asks the broker. IBGDA_TIMEOUT: nothing is wrong. */
template <ibgda_u32 M> IBGDA_FN ibgda_status ibgda_missed(ibgda_cq *cq)
{
	if ((++cq->misses & (IBGDA_POLLS_PER_STATUS_LOOK - 1)) == 0 && ibgda_nic_lost(cq))
		return ibgda_latch_lost<M>(cq);
	return IBGDA_TIMEOUT;
}

/*
 * Of a shared QP, if no other thread does: takes up to `most` completions, until one is an error or request `index` is
 * known complete. IBGDA_TIMEOUT: there was nothing to take, or another thread is at it.
 */
template <ibgda_u32 M> IBGDA_FN ibgda_status ibgda_drain(ibgda_cq *cq, ibgda_cqe *cqe, ibgda_u64 index, ibgda_u32 most)
{
	cqe->kind = IBGDA_CQE_INVALID;
	if (!ibgda_try_lock(&cq->lock))
		return IBGDA_TIMEOUT;
	ibgda_u64 before = ibgda_load_shared(&cq->completed), completed = before;
	ibgda_status status = IBGDA_TIMEOUT, last = IBGDA_OK;
	for (ibgda_u32 i = 0; i < most && last == IBGDA_OK && (!i || completed <= index); i++) {
		last = ibgda_take_cqe<M>(cq, cqe, &completed);
		if (last != IBGDA_TIMEOUT || !i)
			status = last;
	}
	if (status == IBGDA_TIMEOUT) {
		status = ibgda_missed<M>(cq);
	} else if (!(M & IBGDA_COLLAPSED)) {
		ibgda_store_relaxed(cq->doorbell_record, ibgda_be24((ibgda_u32)cq->consumer));
	}
	ibgda_acquire_release<M>();
	if (completed != before)
		ibgda_store_shared(&cq->completed, completed);
	ibgda_store_shared(&cq->lock, 0);
	return status;
}

/*
 * Takes one completion, waiting for it until the deadline.
 *
 * IBGDA_OK: *cqe is the completion of a request that succeeded. IBGDA_TIMEOUT: none came. IBGDA_ERR_NIC_LOST: none will
 * come. Other errors: the status of the completion taken, or, when none is there (cqe->kind is IBGDA_CQE_INVALID), the
 * queue's latched first error, at once and however far the deadline.
 *
 * byte_count and immediate are of receives, reads and atomics on a ring; 0 otherwise.
 */
template <ibgda_u32 M = 0> IBGDA_FN ibgda_status ibgda_poll_cq(ibgda_cq *cq, ibgda_cqe *cqe, ibgda_u64 deadline_ns)
{
	for (;;) {
		ibgda_status status, error;
		if (M & IBGDA_SHARED) {
			status = ibgda_drain<M>(cq, cqe, 0, 1);
			error = ibgda_look<M>(cq).error;
		} else {
			status = ibgda_take_cqe<M>(cq, cqe, &cq->completed);
			error = static_cast<ibgda_status>(cq->error.status);
			if (status == IBGDA_TIMEOUT && !error)
				status = ibgda_missed<M>(cq);
		}
		if (status != IBGDA_TIMEOUT)
			return status;
		if (error)
			return error;
		if (!deadline_ns || ibgda_clock_ns() >= deadline_ns)
			return IBGDA_TIMEOUT;
		ibgda_relax();
	}
}

/*
 * What is read of an exclusive QP's CQ to learn of a request: all of it at once, since on a GPU each load that waits for
 * the one before costs as much as ten instructions.
 */
struct ibgda_cq_view {
	ibgda_u64 completed, consumer, fetching;
	const ibgda_u8 *ring;
	ibgda_u32 *record;
	ibgda_u32 depth;
};

IBGDA_FN ibgda_cq_view ibgda_cq_read(const ibgda_cq *cq)
{
#if defined(__CUDACC__) && !defined(IBGDA_HOST)
	const ibgda_quad known = ibgda_load_own_pair(&cq->completed), where = ibgda_load_own_pair(&cq->consumer);
	const ibgda_quad addresses = ibgda_load_constant_pair(&cq->ring), numbers = ibgda_load_constant_pair(&cq->number);
	return {known.low, where.low, where.high, reinterpret_cast<const ibgda_u8 *>(addresses.low),
		reinterpret_cast<ibgda_u32 *>(addresses.high), (ibgda_u32)(numbers.low >> 32)};
#else
	return {cq->completed, cq->consumer, cq->fetching, cq->ring, cq->doorbell_record, cq->depth};
#endif
}

/*
 * The usual case in few instructions: request `index` is not known complete, but the next completion says so and brings no
 * data. False: nothing was changed.
 */
IBGDA_FN bool ibgda_take_success(ibgda_cq *cq, const ibgda_cq_view &view, ibgda_u64 index)
{
	const ibgda_u64 tail = ibgda_load_tail(view.ring + ((ibgda_u32)view.consumer & (view.depth - 1)) * IBGDA_CQE_BYTES + 48).high;
	/* Kind 0, a request's; its owner; an opcode below those that bring data. */
	const ibgda_u32 lap = (ibgda_u32)view.consumer & view.depth ? 1 : 0, flags = (ibgda_u32)(tail >> 56);
	if ((flags & 0xf1) != lap || (tail & 0xff) >= IBGDA_FIRST_FETCHING_OPCODE || view.fetching > view.completed)
		return false;
	const ibgda_u32 counter = ibgda_be32((ibgda_u32)(tail >> 32)) >> 16;
	const ibgda_u64 next = view.completed + (ibgda_u16)(counter - (ibgda_u32)view.completed) + 1;
	if (next <= index)
		return false;
	cq->consumer = view.consumer + 1;
	cq->completed = next;
	ibgda_store_relaxed(view.record, ibgda_be24((ibgda_u32)view.consumer + 1));
	return true;
}

/* Is request `index` of an exclusive QP known complete, or found so with one look at a ring? Of a shared one: false. */
template <ibgda_u32 M> IBGDA_FN bool ibgda_wait_short(ibgda_cq *cq, ibgda_u64 index)
{
	if (M & IBGDA_SHARED)
		return false;
	if (M & IBGDA_COLLAPSED)
		return cq->completed > index;
	const ibgda_cq_view view = ibgda_cq_read(cq);
	return view.completed > index || ibgda_take_success(cq, view, index);
}

/* The part of ibgda_wait_request that really waits. */
template <ibgda_u32 M> IBGDA_SLOW ibgda_status ibgda_wait_long(ibgda_cq *cq, ibgda_u64 index, ibgda_u64 deadline_ns)
{
	for (bool late = false;;) {
		ibgda_known known = ibgda_look<M>(cq);
		if (known.completed > index) {
			if (M & IBGDA_SHARED)
				ibgda_acquire();
			return IBGDA_OK;
		}
		if (late)
			return known.error ? known.error : IBGDA_TIMEOUT;
		ibgda_cqe cqe;
		ibgda_status status;
		if (M & IBGDA_SHARED) {
			status = ibgda_drain<M>(cq, &cqe, index, 64);
			/* A collapsed CQ shows its error again and again. */
			late = known.error && (status == IBGDA_TIMEOUT || (M & IBGDA_COLLAPSED));
		} else {
			status = ibgda_take_cqe<M>(cq, &cqe, &cq->completed);
			if (status == IBGDA_TIMEOUT && !known.error)
				status = ibgda_missed<M>(cq);
			late = status != IBGDA_OK && cq->error.status;
		}
		if (status == IBGDA_TIMEOUT && !late) {
			late = !deadline_ns || ibgda_clock_ns() >= deadline_ns;
			if (!late)
				ibgda_relax();
		}
	}
}

/*
 * Waits until request `index` of the queue is known complete. IBGDA_OK: it succeeded, whatever happened to later ones.
 * An error: it failed, or never will complete; cq->error says which request failed first and why.
 */
template <ibgda_u32 M = 0> IBGDA_FN ibgda_status ibgda_wait_request(ibgda_cq *cq, ibgda_u64 index, ibgda_u64 deadline_ns)
{
	if (ibgda_wait_short<M>(cq, index))
		return IBGDA_OK;
	return ibgda_wait_long<M>(cq, index, deadline_ns);
}

/*
 * Sleeps until the CQ has a completion that was not taken. Arms the CQ for its next one and looks at a word that the
 * host's event thread counts in, and only seldom at the CQ. A completion that came before the arming gives an event too.
 *
 * IBGDA_OK: poll. IBGDA_ERR_NO_QUEUE: the handle has no event counter, or the CQ is collapsed. IBGDA_TIMEOUT,
 * IBGDA_ERR_NIC_LOST, and the queue's first error when there is one and nothing else to take.
 */
template <ibgda_u32 M = 0> IBGDA_FN ibgda_status ibgda_wait_for_cq_event(ibgda_cq *cq, ibgda_u64 deadline_ns)
{
	if (!cq->events || !cq->arm_doorbell || (M & IBGDA_COLLAPSED))
		return IBGDA_ERR_NO_QUEUE;
	if (M & IBGDA_SHARED)
		while (!ibgda_try_lock(&cq->lock)) {
			if (!deadline_ns || ibgda_clock_ns() >= deadline_ns)
				return IBGDA_TIMEOUT;
			ibgda_relax();
		}
	ibgda_u32 events = ibgda_load_relaxed(cq->events);
	bool waits = ibgda_cqe_waits(cq, ibgda_load_tail(ibgda_next_cqe(cq) + 48).high);
	if (!waits && !ibgda_look<M>(cq).error) {
		ibgda_u32 arm = (events & 3) << 28 | ((ibgda_u32)cq->consumer & 0xffffff);
		ibgda_release<0>();
		ibgda_store_record(cq->doorbell_record + 1, ibgda_be32(arm));
		ibgda_release<0>();
		ibgda_store_doorbell(cq->arm_doorbell, (ibgda_u64)ibgda_be32(cq->number) << 32 | ibgda_be32(arm));
	}
	if (M & IBGDA_SHARED)
		ibgda_unlock<M>(&cq->lock);
	if (waits)
		return IBGDA_OK;

	for (ibgda_u32 looks = 1;; looks++) {
		ibgda_status error = ibgda_look<M>(cq).error;
		if (error)
			return error;
		if (ibgda_load_relaxed(cq->events) != events) {
			ibgda_acquire();
			return IBGDA_OK;
		}
		/* Sometimes at the broker's word and the CQ: no wait hangs on an event that was merged with one before. */
		if ((looks & (IBGDA_POLLS_PER_STATUS_LOOK - 1)) == 0 && (!(M & IBGDA_SHARED) || ibgda_try_lock(&cq->lock))) {
			waits = ibgda_cqe_waits(cq, ibgda_load_tail(ibgda_next_cqe(cq) + 48).high);
			if (!waits && ibgda_nic_lost(cq))
				error = ibgda_latch_lost<M>(cq);
			if (M & IBGDA_SHARED)
				ibgda_unlock<M>(&cq->lock);
			if (error)
				return error;
			if (waits)
				return IBGDA_OK;
		}
		if (!deadline_ns || ibgda_clock_ns() >= deadline_ns)
			return IBGDA_TIMEOUT;
		ibgda_sleep();
	}
}

IBGDA_PURE bool ibgda_compare(ibgda_u64 word, ibgda_comparison comparison, ibgda_u64 value)
{
	switch (comparison) {
	case IBGDA_EQ:
		return word == value;
	case IBGDA_NE:
		return word != value;
	case IBGDA_GE:
		return word >= value;
	case IBGDA_GT:
		return word > value;
	case IBGDA_LE:
		return word <= value;
	default:
		return word < value;
	}
}

/*
 * Waits until a local word that a peer signals compares so with `value`; then what the peer had put before the signal, on
 * the same QP, can be read. `cq`, when given, is any CQ of that NIC: its status page ends the wait when the NIC is lost.
 */
IBGDA_FN ibgda_status ibgda_wait_until(const ibgda_u64 *word, ibgda_comparison comparison, ibgda_u64 value, ibgda_u64 deadline_ns,
				       const ibgda_cq *cq = nullptr)
{
	for (ibgda_u32 looks = 1;; looks++) {
		if (ibgda_compare(ibgda_load_relaxed(word), comparison, value)) {
			ibgda_acquire();
			return IBGDA_OK;
		}
		if (cq && (looks & (IBGDA_POLLS_PER_STATUS_LOOK - 1)) == 0 && ibgda_nic_lost(cq))
			return IBGDA_ERR_NIC_LOST;
		if (!deadline_ns || ibgda_clock_ns() >= deadline_ns)
			return IBGDA_TIMEOUT;
		ibgda_relax();
	}
}

#endif
