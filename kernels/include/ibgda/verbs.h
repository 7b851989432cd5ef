/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The requests themselves. Each posts one WQE and returns before the NIC has executed it; *request, when asked for, is
 * the index that ibgda_wait takes. flags: IBGDA_UNSIGNALED, IBGDA_NO_DOORBELL, IBGDA_FENCED, IBGDA_SOLICITED.
 *
 * All return: IBGDA_OK posted; IBGDA_ERR_INVALID_ARGUMENT nothing was posted; IBGDA_ERR_QUEUE_FULL no room within the
 * QP's patience; else the QP's first error, at once and for good.
 */
#ifndef IBGDA_VERBS_H
#define IBGDA_VERBS_H

#include "post.h"

/* RDMA WRITE: `bytes` of local memory to the peer's, 0 to IBGDA_MAX_MESSAGE_BYTES. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_put(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				ibgda_u32 bytes, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	if (bytes > IBGDA_MAX_MESSAGE_BYTES)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_u64 index;
	ibgda_status status = ibgda_reserve<P>(qp, &index);
	if (status != IBGDA_OK)
		return status;
	return ibgda_publish<P>(qp, index,
				ibgda_wqe_write(IBGDA_OP_RDMA_WRITE, index, qp->number, remote, rkey, local, lkey, bytes, 0,
						ibgda_slot_flags(qp, index, flags)),
				flags, request);
}

/* RDMA WRITE that also takes a receive of the peer and gives it `immediate`. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_put_imm(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				    ibgda_u32 bytes, ibgda_u32 immediate, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	if (bytes > IBGDA_MAX_MESSAGE_BYTES)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_u64 index;
	ibgda_status status = ibgda_reserve<P>(qp, &index);
	if (status != IBGDA_OK)
		return status;
	return ibgda_publish<P>(qp, index,
				ibgda_wqe_write(IBGDA_OP_RDMA_WRITE_IMM, index, qp->number, remote, rkey, local, lkey, bytes,
						immediate, ibgda_slot_flags(qp, index, flags)),
				flags, request);
}

/* RDMA WRITE of 1 to IBGDA_MAX_INLINE_BYTES bytes, which the call copies: the source may change at once. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_put_inline(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, const void *data, ibgda_u32 bytes,
				       ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	if (!bytes || bytes > IBGDA_MAX_INLINE_BYTES)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_u64 index;
	ibgda_status status = ibgda_reserve<P>(qp, &index);
	if (status != IBGDA_OK)
		return status;
	return ibgda_publish<P>(qp, index,
				ibgda_wqe_write_inline(index, qp->number, remote, rkey, data, bytes,
						       ibgda_slot_flags(qp, index, flags)),
				flags, request);
}

/* RDMA READ: `bytes` of the peer's memory into local memory. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_get(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 remote, ibgda_u32 rkey,
				ibgda_u32 bytes, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	if (bytes > IBGDA_MAX_MESSAGE_BYTES)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_u64 index;
	ibgda_status status = ibgda_reserve<P>(qp, &index);
	if (status != IBGDA_OK)
		return status;
	return ibgda_publish<P>(qp, index,
				ibgda_wqe_read(index, qp->number, remote, rkey, local, lkey, bytes,
					       ibgda_slot_flags(qp, index, flags)),
				flags, request);
}

/* SEND into the peer's next receive. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_send(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 flags = 0,
				 ibgda_u64 *request = nullptr)
{
	if (bytes > IBGDA_MAX_MESSAGE_BYTES)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_u64 index;
	ibgda_status status = ibgda_reserve<P>(qp, &index);
	if (status != IBGDA_OK)
		return status;
	return ibgda_publish<P>(qp, index,
				ibgda_wqe_send(IBGDA_OP_SEND, index, qp->number, local, lkey, bytes, 0,
					       ibgda_slot_flags(qp, index, flags)),
				flags, request);
}

/* 64-bit fetch-and-add at 8-byte aligned peer memory; 8 bytes of local memory take the old value. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_fetch_add(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				      ibgda_u64 add, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	if (remote & 7)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_u64 index;
	ibgda_status status = ibgda_reserve<P>(qp, &index);
	if (status != IBGDA_OK)
		return status;
	return ibgda_publish<P>(qp, index,
				ibgda_wqe_fetch_add(index, qp->number, remote, rkey, local, lkey, add,
						    ibgda_slot_flags(qp, index, flags)),
				flags, request);
}

/* 64-bit compare-and-swap at 8-byte aligned peer memory; 8 bytes of local memory take the old value. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_compare_swap(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
					 ibgda_u64 compare, ibgda_u64 swap, ibgda_u32 flags = 0,
					 ibgda_u64 *request = nullptr)
{
	if (remote & 7)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_u64 index;
	ibgda_status status = ibgda_reserve<P>(qp, &index);
	if (status != IBGDA_OK)
		return status;
	return ibgda_publish<P>(qp, index,
				ibgda_wqe_compare_swap(index, qp->number, remote, rkey, local, lkey, compare, swap,
						       ibgda_slot_flags(qp, index, flags)),
				flags, request);
}

/* Are `bytes` at `offset` inside the region? */
IBGDA_PURE bool ibgda_inside(const ibgda_region &region, ibgda_u64 offset, ibgda_u64 bytes)
{
	return offset <= region.length && bytes <= region.length - offset;
}

/* ibgda_put between regions, with the bounds of both checked: IBGDA_ERR_INVALID_ARGUMENT instead of an error CQE. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_put(ibgda_qp *qp, const ibgda_region &to, ibgda_u64 to_offset, const ibgda_region &from,
				ibgda_u64 from_offset, ibgda_u32 bytes, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	if (!ibgda_inside(to, to_offset, bytes) || !ibgda_inside(from, from_offset, bytes))
		return IBGDA_ERR_INVALID_ARGUMENT;
	return ibgda_put<P>(qp, to.address + to_offset, to.rkey, from.address + from_offset, from.lkey, bytes, flags, request);
}

/* ibgda_get between regions, with the bounds of both checked. */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_get(ibgda_qp *qp, const ibgda_region &to, ibgda_u64 to_offset, const ibgda_region &from,
				ibgda_u64 from_offset, ibgda_u32 bytes, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	if (!ibgda_inside(to, to_offset, bytes) || !ibgda_inside(from, from_offset, bytes))
		return IBGDA_ERR_INVALID_ARGUMENT;
	return ibgda_get<P>(qp, to.address + to_offset, to.lkey, from.address + from_offset, from.rkey, bytes, flags, request);
}

/*
 * Posts one receive of 1 to IBGDA_MAX_MESSAGE_BYTES bytes. The receive queue has no doorbell register: the NIC reads the
 * record when a message arrives. IBGDA_ERR_QUEUE_FULL at once when every slot is posted.
 */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST>
IBGDA_FN ibgda_status ibgda_recv(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes)
{
	if (!qp->recv_depth)
		return IBGDA_ERR_NO_QUEUE;
	if (!bytes || bytes > IBGDA_MAX_MESSAGE_BYTES)
		return IBGDA_ERR_INVALID_ARGUMENT;
	const ibgda_cq *cq = qp->recv_cq;
	if (cq->error.status)
		return static_cast<ibgda_status>(cq->error.status);
	if (qp->recv_producer - cq->completed >= qp->recv_depth)
		return IBGDA_ERR_QUEUE_FULL;
	ibgda_u64 index = qp->recv_producer++;
	ibgda_store_quad(qp->recv_ring + (index & (qp->recv_depth - 1)) * IBGDA_RECV_WQE_BYTES,
			 ibgda_data_segment(local, lkey, bytes));
	ibgda_store_record<P>(qp->doorbell_record, ibgda_be32((ibgda_u32)(qp->recv_producer & 0xffff)));
	return IBGDA_OK;
}

/* Waits until one request has completed. IBGDA_OK: it succeeded; IBGDA_ERR_INVALID_INDEX: it was never posted. */
IBGDA_FN ibgda_status ibgda_wait(ibgda_qp *qp, ibgda_u64 request, ibgda_u64 deadline_ns)
{
	if (request >= qp->producer)
		return IBGDA_ERR_INVALID_INDEX;
	return ibgda_wait_request(qp->send_cq, request, deadline_ns);
}

/*
 * Waits until every request posted so far has completed. The last one must have a completion of its own: it was posted
 * without IBGDA_UNSIGNALED.
 */
template <ibgda_placement P = IBGDA_QUEUES_ON_HOST> IBGDA_FN ibgda_status ibgda_quiet(ibgda_qp *qp, ibgda_u64 deadline_ns)
{
	ibgda_status status = ibgda_write_doorbell<P>(qp, qp->producer);
	if (status != IBGDA_OK || !qp->producer)
		return status;
	return ibgda_wait_request(qp->send_cq, qp->producer - 1, deadline_ns);
}

#endif
