/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * From a WQE to the NIC: reserve a slot, write it, publish it. For a QP that one thread at a time posts to (exclusive);
 * a kernel that posts much may keep a copy of the ibgda_qp in registers and write it back when it is done.
 */
#ifndef IBGDA_POST_H
#define IBGDA_POST_H

#include "poll.h"
#include "wqe.h"

/*
 * Tells the NIC of every slot below producer_index (the index of the next free slot, one past the last written):
 * doorbell record, then doorbell, with the two fences of platform.h.
 *
 * IBGDA_ERR_INVALID_INDEX: those slots were not all reserved. An index that was rung before is no error and does
 * nothing, since the record must never go back.
 */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_write_doorbell(ibgda_qp *qp, ibgda_u64 producer_index)
{
	if (producer_index > qp->producer)
		return IBGDA_ERR_INVALID_INDEX;
	if (producer_index <= qp->rung)
		return IBGDA_OK;
	qp->rung = producer_index;
	ibgda_store_record<P>(qp->doorbell_record + 1, ibgda_be32((ibgda_u32)(producer_index & 0xffff)));
	ibgda_store_doorbell<P>(qp->doorbell, ibgda_doorbell_value(producer_index, qp->number));
	return IBGDA_OK;
}

/*
 * Waits, for at most post_timeout_ns, until the ring has room. Takes completions itself while it does: know a request's
 * fate by ibgda_wait, or keep fewer than the queue's depth under way, if you also poll the CQ.
 */
template <ibgda_placement P> IBGDA_FN ibgda_status ibgda_wait_for_slot(ibgda_qp *qp)
{
	/* Slots written but never rung would never become free. */
	ibgda_status status = ibgda_write_doorbell<P>(qp, qp->producer);
	if (status != IBGDA_OK)
		return status;
	ibgda_u64 deadline = qp->post_timeout_ns ? ibgda_clock_ns() + qp->post_timeout_ns : 0;
	status = ibgda_wait_request(qp->send_cq, qp->producer - qp->send_depth, deadline);
	return status == IBGDA_TIMEOUT ? IBGDA_ERR_QUEUE_FULL : status;
}

/*
 * Reserves the next slot; *index is its 64-bit index from the queue's start. After an error of this QP: that error.
 * A reserved slot must be written and rung, in order.
 */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST> IBGDA_FN ibgda_status ibgda_reserve(ibgda_qp *qp, ibgda_u64 *index)
{
	const ibgda_cq *cq = qp->send_cq;
	if (cq->error.status)
		return static_cast<ibgda_status>(cq->error.status);
	if (qp->producer - cq->completed >= qp->send_depth) {
		ibgda_status status = ibgda_wait_for_slot<P>(qp);
		if (status != IBGDA_OK)
			return status;
	}
	*index = qp->producer++;
	return IBGDA_OK;
}

/*
 * The flags of request `index`, with a completion forced where two halves of the ring meet: a ring full of requests
 * without completions would never have room again.
 */
IBGDA_FN ibgda_u32 ibgda_slot_flags(const ibgda_qp *qp, ibgda_u64 index, ibgda_u32 flags)
{
	ibgda_u32 half = qp->send_depth > 1 ? qp->send_depth / 2 : 1;
	return ((ibgda_u32)index + 1) & (half - 1) ? flags : flags & ~IBGDA_UNSIGNALED;
}

/* Writes a WQE into its slot, 16 bytes a store. */
IBGDA_FN void ibgda_write_wqe(const ibgda_qp *qp, ibgda_u64 index, const ibgda_wqe &wqe)
{
	ibgda_u8 *slot = qp->send_ring + (index & (qp->send_depth - 1)) * IBGDA_WQEBB_BYTES;
#ifdef __CUDACC__
#pragma unroll
#endif
	for (ibgda_u32 i = 0; i < 4; i++)
		if (i < wqe.segments)
			ibgda_store_quad(slot + 16 * i, wqe.quad[i]);
}

/* Writes the WQE and, unless told not to, rings for it and all before it. */
template <ibgda_placement P>
IBGDA_FN ibgda_status ibgda_publish(ibgda_qp *qp, ibgda_u64 index, const ibgda_wqe &wqe, ibgda_u32 flags, ibgda_u64 *request)
{
	ibgda_write_wqe(qp, index, wqe);
	if (request)
		*request = index;
	return flags & IBGDA_NO_DOORBELL ? IBGDA_OK : ibgda_write_doorbell<P>(qp, index + 1);
}

#endif
