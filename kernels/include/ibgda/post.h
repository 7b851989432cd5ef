/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * From a WQE to the NIC: reserve slots, write them, publish them. An exclusive QP is posted to by one thread, warp or block
 * at a time. How a shared QP does it is in shared.h.
 *
 * Every half of the ring ends in a request with a completion and a doorbell, whatever the flags say: so a full ring has
 * room again in time.
 */
#ifndef IBGDA_POST_H
#define IBGDA_POST_H

#include "ibgda/group.h"
#include "ibgda/shared.h"
#include "ibgda/wqe.h"

/*
 * The slow path of a reservation of an exclusive QP: waits, for at most post_timeout_ns, until the ring has room for `slots`.
 * Takes completions itself while it does: know a request's fate by ibgda_wait, or keep fewer than the queue's depth under
 * way, if you also poll the CQ.
 */
template <ibgda_u32 M> IBGDA_SLOW ibgda_status ibgda_make_room(ibgda_qp *qp, ibgda_u32 slots)
{
	ibgda_cq *cq = qp->send_cq;
	if (slots > 1 && slots > ibgda_half(qp->send_depth))
		return IBGDA_ERR_INVALID_ARGUMENT;
	if (cq->error.status)
		return static_cast<ibgda_status>(cq->error.status);
	ibgda_u64 end = qp->producer + slots;
	if (end > cq->completed + qp->send_depth) {
		ibgda_u64 deadline = qp->post_timeout_ns ? ibgda_clock_ns() + qp->post_timeout_ns : 0;
		ibgda_status status = ibgda_wait_request<M>(cq, end - qp->send_depth - 1, deadline);
		if (status != IBGDA_OK)
			return status == IBGDA_TIMEOUT ? IBGDA_ERR_QUEUE_FULL : status;
	}
	/* There is room; but an error that was met on the way stays one. */
	if (cq->error.status)
		return static_cast<ibgda_status>(cq->error.status);
	qp->limit = cq->completed + qp->send_depth;
	return IBGDA_OK;
}

/* Where an exclusive QP's poster is, and how far it may go. */
IBGDA_FN void ibgda_where(const ibgda_qp *qp, ibgda_u64 *producer, ibgda_u64 *limit)
{
#if defined(__CUDACC__) && !defined(IBGDA_HOST)
	ibgda_quad both = ibgda_load_own_pair(&qp->producer + ibgda_zero());
	*producer = both.low;
	*limit = both.high;
#else
	*producer = qp->producer;
	*limit = qp->limit;
#endif
}

/*
 * Of an exclusive QP: how many slots the NIC was told of. Nothing is stored for a request that is rung at once, only for
 * those that wait.
 */
IBGDA_FN ibgda_u64 ibgda_rung(const ibgda_qp *qp) { return qp->unrung == qp->producer ? qp->rung : qp->producer; }

/* Slots [index, end) wait for a doorbell. */
IBGDA_FN void ibgda_note_unrung(ibgda_qp *qp, ibgda_u64 index, ibgda_u64 end)
{
	if (qp->unrung != index)
		qp->rung = index;
	qp->unrung = end;
}

/*
 * Reserves the next `slots` slots, at most half of the ring (or 1); *index is the 64-bit index of the first from the queue's
 * start. After an error of this QP: that error. A reserved slot must be written and published: with ibgda_write_doorbell
 * (exclusive) or ibgda_publish (shared).
 */
template <ibgda_u32 M = 0> IBGDA_FN ibgda_status ibgda_reserve(ibgda_qp *qp, ibgda_u64 *index, ibgda_u32 slots = 1)
{
	if (M & IBGDA_SHARED) {
		if (slots > 1 && slots > ibgda_half(qp->send_depth))
			return IBGDA_ERR_INVALID_ARGUMENT;
		ibgda_quad teller;
		return ibgda_shared_reserve<M>(qp, ibgda_sq_of(qp), slots, index, &teller);
	}
	ibgda_u64 limit;
	ibgda_where(qp, index, &limit);
	if (*index + slots > limit) {
		ibgda_status status = ibgda_make_room<M>(qp, slots);
		if (status != IBGDA_OK)
			return status;
	}
	ibgda_note_unrung(qp, *index, *index + slots);
	qp->producer = *index + slots;
	return IBGDA_OK;
}

/* Rings for all slots of an exclusive QP below `end`, which were written. */
template <ibgda_u32 M> IBGDA_FN void ibgda_ring(const ibgda_sq &sq, ibgda_u64 end)
{
	ibgda_release<M>();
	ibgda_tell<M>(sq, end);
}

/*
 * Tells the NIC of every slot below producer_index (the index of the next free slot, one past the last written):
 * doorbell record, then doorbell, with a fence before each.
 *
 * IBGDA_ERR_INVALID_INDEX: those slots were not all reserved. An index that was rung before is no error and does
 * nothing, since the record must never go back. Of a shared QP the slots of other threads below producer_index are waited
 * for, for at most post_timeout_ns: IBGDA_TIMEOUT.
 */
template <ibgda_u32 M = 0> IBGDA_FN ibgda_status ibgda_write_doorbell(ibgda_qp *qp, ibgda_u64 producer_index)
{
	ibgda_sq sq = ibgda_sq_of(qp);
	if (M & IBGDA_SHARED) {
		if (producer_index > ibgda_load_shared(&qp->producer))
			return IBGDA_ERR_INVALID_INDEX;
		ibgda_u64 deadline = ibgda_clock_ns() + qp->post_timeout_ns;
		while (ibgda_told(qp) < producer_index) {
			ibgda_u64 written = ibgda_load_shared(&qp->unrung);
			if (written >= producer_index) {
				ibgda_shared_publish<M>(qp, sq, written, true);
				break;
			}
			if (ibgda_clock_ns() >= deadline)
				return IBGDA_TIMEOUT;
			ibgda_relax();
		}
		return IBGDA_OK;
	}
	if (producer_index > qp->producer)
		return IBGDA_ERR_INVALID_INDEX;
	if (producer_index <= ibgda_rung(qp))
		return IBGDA_OK;
	qp->rung = producer_index;
	ibgda_ring<M>(sq, producer_index);
	return IBGDA_OK;
}

/* The same for a request that is rung alone: it goes along with its doorbell, and the NIC need not fetch it. */
template <ibgda_u32 M> IBGDA_FN void ibgda_ring_blueflame(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u64 producer_index, const ibgda_wqe &wqe)
{
	ibgda_u32 offset = qp->blueflame_offset;
	qp->blueflame_offset = offset ^ qp->blueflame_bytes;
	ibgda_release<M>();
	ibgda_store_record(sq.record, ibgda_be16((ibgda_u32)producer_index));
	ibgda_release<M>();
	ibgda_store_blueflame(reinterpret_cast<ibgda_u8 *>(sq.doorbell) + offset, wqe.quad);
}

/*
 * Makes slots [index, index + slots) of a shared QP, which were written, known to the NIC, or with ring = false only ready
 * for the next doorbell.
 */
template <ibgda_u32 M> IBGDA_FN void ibgda_publish(ibgda_qp *qp, ibgda_u64 index, ibgda_u32 slots, bool ring = true)
{
	static_assert(M & IBGDA_SHARED, "slots of an exclusive QP are published by ibgda_write_doorbell");
	ibgda_sq sq = ibgda_sq_of(qp);
	ibgda_shared_finish<M>(qp, sq, index, index + slots, false, ring);
}

/*
 * The flags of request `index`, with a completion forced where two halves of the ring meet: a ring full of requests
 * without completions would never have room again.
 */
IBGDA_PURE ibgda_u32 ibgda_slot_flags(ibgda_u32 depth, ibgda_u64 index, ibgda_u32 flags)
{
	return ((ibgda_u32)index + 1) & (ibgda_half(depth) - 1) ? flags : flags & ~IBGDA_UNSIGNALED;
}

/* Does a half of the ring end in slots [index, end)? Then a doorbell is due. */
IBGDA_PURE bool ibgda_half_ends(ibgda_u32 depth, ibgda_u64 index, ibgda_u64 end)
{
	return (index ^ end) & ~(ibgda_u64)(ibgda_half(depth) - 1);
}

/* Writes a WQE into its slot, 16 bytes a store. What is behind its segments means nothing to the NIC. */
IBGDA_FN void ibgda_write_slot(const ibgda_sq &sq, ibgda_u64 index, const ibgda_wqe &wqe)
{
	ibgda_u8 *slot = ibgda_slot(sq.ring, (ibgda_u32)index & (sq.depth - 1));
	ibgda_store_quads(slot, wqe.quad);
	if (wqe.segments > 3)
		ibgda_store_quad(slot + 48, wqe.quad[3]);
}

/* The same for a slot that was reserved by ibgda_reserve. */
IBGDA_FN void ibgda_write_wqe(const ibgda_qp *qp, ibgda_u64 index, const ibgda_wqe &wqe) { ibgda_write_slot(ibgda_sq_of(qp), index, wqe); }

/* Of the last request of an exclusive QP: does a completion tell of it? */
template <ibgda_u32 M> IBGDA_FN void ibgda_note_silent(ibgda_qp *qp, ibgda_u32 depth, ibgda_u64 index, ibgda_u32 flags)
{
	if (!(M & IBGDA_SHARED) && (ibgda_slot_flags(depth, index, flags) & IBGDA_UNSIGNALED))
		qp->silent = index + 1;
}

/* Writes a request of N slots. */
template <ibgda_u32 N, class Build>
IBGDA_FN ibgda_wqe ibgda_write_request(const ibgda_sq &sq, ibgda_u64 index, ibgda_u32 flags, Build build)
{
	ibgda_wqe wqe;
#ifdef __CUDACC__
#pragma unroll
#endif
	for (ibgda_u32 k = 0; k < N; k++) {
		ibgda_u32 asked = k + 1 < N ? flags | IBGDA_UNSIGNALED : flags;
		wqe = build(k, index + k, ibgda_slot_flags(sq.depth, index + k, asked), sq.qpn);
		ibgda_write_slot(sq, index + k, wqe);
	}
	return wqe;
}

/* The WQEs of a request of N slots, but for the index: made while its reservation is under way. */
template <ibgda_u32 N, class Build> IBGDA_FN void ibgda_build_request(ibgda_wqe *wqe, ibgda_u32 qpn, ibgda_u32 flags, Build build)
{
#ifdef __CUDACC__
#pragma unroll
#endif
	for (ibgda_u32 k = 0; k < N; k++) {
		wqe[k] = build(k, 0, k + 1 < N ? flags | IBGDA_UNSIGNALED : flags, qpn);
		ibgda_made(wqe[k]);
	}
}

/* Writes them into the slots from `index` on. */
template <ibgda_u32 N> IBGDA_FN void ibgda_write_built(const ibgda_sq &sq, ibgda_u64 index, ibgda_u32 flags, const ibgda_wqe *wqe)
{
#ifdef __CUDACC__
#pragma unroll
#endif
	for (ibgda_u32 k = 0; k < N; k++) {
		ibgda_wqe with = wqe[k];
		with.quad[0].low |= ibgda_be16_8((ibgda_u32)(index + k), 0);
		if ((k + 1 < N || (flags & IBGDA_UNSIGNALED)) && !ibgda_slot_flags(sq.depth, index + k, IBGDA_UNSIGNALED))
			with.quad[0].high |= ibgda_be32(IBGDA_CTRL_CQ_UPDATE);
		ibgda_write_slot(sq, index + k, with);
	}
}

/* A request of N slots of a shared QP, of a thread that no other of its warp calls with. */
template <ibgda_u32 M, ibgda_u32 N, class Build>
IBGDA_FN ibgda_status ibgda_post_lane(ibgda_qp *qp, const ibgda_sq &sq, ibgda_u32 flags, ibgda_u64 *request, Build build)
{
	if (N > ibgda_half(sq.depth))
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_wqe wqe[N];
	ibgda_build_request<N>(wqe, sq.qpn, flags, build);
	ibgda_u64 index;
	ibgda_quad teller;
	ibgda_status status = ibgda_shared_reserve<M>(qp, sq, N, &index, &teller);
	if (status != IBGDA_OK)
		return status;
	const ibgda_u64 end = index + N;
	const bool ring = !(flags & IBGDA_NO_DOORBELL) || ibgda_half_ends(sq.depth, index, end);
	const bool alone = ring && ibgda_is_alone(sq, teller, index);
	if (alone)
		ibgda_shared_take(qp, end);
	ibgda_write_built<N>(sq, index, flags, wqe);
	if (request)
		*request = end - 1;
	ibgda_shared_finish<M>(qp, sq, index, end, alone, ring);
	return IBGDA_OK;
}

/*
 * Posts a request of N slots, for each thread of the group: build(k, index, flags, qpn) is its WQE number k, for slot
 * `index`. Only the last has a completion, or where half of the ring ends. *request, when asked for, is the index of the
 * last.
 */
template <ibgda_u32 M, ibgda_u32 N, class Build>
IBGDA_FN ibgda_status ibgda_post(ibgda_qp *qp, ibgda_u32 flags, ibgda_u64 *request, Build build)
{
	const ibgda_sq sq = ibgda_sq_of(qp);
	if constexpr (!(M & (IBGDA_SHARED | IBGDA_SCOPES))) {
		ibgda_u64 index, limit;
		ibgda_where(qp, &index, &limit);
		if (index + N > limit) {
			ibgda_status status = ibgda_make_room<M>(qp, N);
			if (status != IBGDA_OK)
				return status;
		}
		ibgda_wqe wqe = ibgda_write_request<N>(sq, index, flags, build);
		ibgda_u64 end = index + N;
		if (request)
			*request = end - 1;
		ibgda_note_silent<M>(qp, sq.depth, end - 1, flags);
		const bool along = (M & IBGDA_BLUEFLAME) && N == 1 && qp->blueflame_bytes && ibgda_rung(qp) == index;
		qp->producer = end;
		if ((flags & IBGDA_NO_DOORBELL) && !ibgda_half_ends(sq.depth, index, end))
			ibgda_note_unrung(qp, index, end);
		else if (along)
			ibgda_ring_blueflame<M>(qp, sq, end, wqe);
		else
			ibgda_ring<M>(sq, end);
		return IBGDA_OK;
	} else {
		if constexpr (!(M & IBGDA_SCOPES))
			if (ibgda_is_only_lane())
				return ibgda_post_lane<M, N>(qp, sq, flags, request, build);
		/* Of an exclusive QP all read where it is, before the leader goes on: forming the group synchronises. */
		ibgda_u64 producer = 0, limit = 0;
		if (!(M & IBGDA_SHARED))
			ibgda_where(qp, &producer, &limit);
		ibgda_group group = ibgda_group_form<M>(qp, !(flags & IBGDA_SKIP));
		/* How many requests fit into half of the ring: so many at a time. A single WQE does, without a look. */
		const ibgda_u32 most = group.count * N <= 1 ? 1 : ibgda_half(sq.depth) / N;
		if (!most)
			return IBGDA_ERR_INVALID_ARGUMENT;
		ibgda_wqe wqe[N];
		if (M & IBGDA_SHARED)
			ibgda_build_request<N>(wqe, sq.qpn, flags, build);
		ibgda_status result = IBGDA_OK;
		for (ibgda_u32 done = 0; done < group.count; done += most) {
			const ibgda_u32 count = group.count - done < most ? group.count - done : most;
			const bool mine = !(flags & IBGDA_SKIP) && group.rank - done < count;
			ibgda_quad teller = {~0ull, 0};
			ibgda_u64 base = producer;
			if ((M & IBGDA_SHARED) || producer + count * N > limit) {
				ibgda_status status = IBGDA_OK;
				if (group.leads)
					status = M & IBGDA_SHARED ? ibgda_shared_reserve<M>(qp, sq, count * N, &base, &teller) :
								    ibgda_make_room<M>(qp, count * N);
				/* No index comes near the end of 64 bits: those are statuses. */
				base = ibgda_group_share<M>(group, status == IBGDA_OK ? base : ~(ibgda_u64)status);
				if (base > ~0x10000ull) {
					if (mine)
						result = static_cast<ibgda_status>(~base);
					continue;
				}
				/* What there is room for now is at least this. */
				limit = base + count * N;
			}
			const ibgda_u64 end = base + count * N;
			producer = end;
			const bool ring = ibgda_group_any<M>(group, mine && !(flags & IBGDA_NO_DOORBELL)) ||
					  ibgda_half_ends(sq.depth, base, end);
			const bool alone = (M & IBGDA_SHARED) && group.leads && ring && ibgda_is_alone(sq, teller, base);
			if (group.leads && !(M & IBGDA_SHARED))
				qp->producer = end;
			if (alone)
				ibgda_shared_take(qp, end);
			if (mine) {
				ibgda_u64 index = base + (ibgda_u64)(group.rank - done) * N;
				if (M & IBGDA_SHARED)
					ibgda_write_built<N>(sq, index, flags, wqe);
				else
					ibgda_write_request<N>(sq, index, flags, build);
				if (request)
					*request = index + N - 1;
				if (group.rank - done == count - 1)
					ibgda_note_silent<M>(qp, sq.depth, index + N - 1, flags);
			}
			ibgda_group_sync<M>(group);
			if (group.leads) {
				if (M & IBGDA_SHARED)
					ibgda_shared_finish<M>(qp, sq, base, end, alone, ring);
				else if (ring)
					ibgda_ring<M>(sq, end);
				else
					ibgda_note_unrung(qp, base, end);
			}
			ibgda_group_sync<M>(group);
		}
		return result;
	}
}

#endif
