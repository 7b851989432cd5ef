/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The requests themselves. Each posts and returns before the NIC has executed it; *request, when asked for, is the index
 * that ibgda_wait takes. flags: IBGDA_UNSIGNALED, IBGDA_NO_DOORBELL, IBGDA_FENCED, IBGDA_SOLICITED, in a warp's or block's
 * call IBGDA_SKIP.
 *
 * The template argument M says how the QP is used (types.h), and with IBGDA_WARP or IBGDA_BLOCK that all threads of a warp
 * or block call, each with arguments of its own.
 *
 * All return: IBGDA_OK posted; IBGDA_ERR_INVALID_ARGUMENT, or with IBGDA_CHECKS_FULL the code that names the argument:
 * nothing was posted; IBGDA_ERR_QUEUE_FULL no room within the QP's patience; else the QP's first error, at once and for
 * good. In a warp's or block's call a thread whose arguments are refused counts as one with IBGDA_SKIP.
 */
#ifndef IBGDA_VERBS_H
#define IBGDA_VERBS_H

#include "ibgda/checks.h"
#include "ibgda/post.h"

/* ibgda_post, if the checks found nothing. A group's threads all have to take part, so that one that fails skips. */
template <ibgda_u32 M, ibgda_u32 N, class Build>
IBGDA_FN ibgda_status ibgda_checked_post(ibgda_qp *qp, ibgda_status found, ibgda_u32 flags, ibgda_u64 *request, Build build)
{
	if (found == IBGDA_OK)
		found = ibgda_check_handle<M>(qp, flags);
	if constexpr (M & IBGDA_SCOPES) {
		ibgda_status status = ibgda_post<M, N>(qp, found == IBGDA_OK ? flags : flags | IBGDA_SKIP, request, build);
		return found == IBGDA_OK ? status : found;
	}
	return found == IBGDA_OK ? ibgda_post<M, N>(qp, flags, request, build) : found;
}

/* The first that is not IBGDA_OK. */
IBGDA_PURE ibgda_status ibgda_either(ibgda_status one, ibgda_status other) { return one == IBGDA_OK ? other : one; }

/* Of a request that writes local memory and has no completion: a later one's is to be acquired for it. */
template <ibgda_u32 M> IBGDA_FN void ibgda_note_fetch(ibgda_qp *qp, ibgda_u64 index, ibgda_u32 flags)
{
	if (!(M & IBGDA_SHARED) && (flags & IBGDA_UNSIGNALED))
		qp->send_cq->fetching = index + 1;
}

/* RDMA WRITE: `bytes` of local memory to the peer's, 0 to IBGDA_MAX_MESSAGE_BYTES. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_put(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				ibgda_u32 bytes, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	ibgda_status found = ibgda_either(ibgda_check_local(local, lkey, bytes), ibgda_check_remote(remote, rkey, bytes, 1));
	return ibgda_checked_post<M, 1>(qp, found, flags, request, [&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return ibgda_wqe_write(IBGDA_OP_RDMA_WRITE, index, qpn, remote, rkey, local, lkey, bytes, 0, slot_flags);
	});
}

/* RDMA WRITE that also takes a receive of the peer and gives it `immediate`. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_put_imm(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				    ibgda_u32 bytes, ibgda_u32 immediate, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	ibgda_status found = ibgda_either(ibgda_check_local(local, lkey, bytes), ibgda_check_remote(remote, rkey, bytes, 1));
	return ibgda_checked_post<M, 1>(qp, found, flags, request, [&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return ibgda_wqe_write(IBGDA_OP_RDMA_WRITE_IMM, index, qpn, remote, rkey, local, lkey, bytes, immediate,
				       slot_flags);
	});
}

/* RDMA WRITE of 1 to IBGDA_MAX_INLINE_BYTES bytes, which the call copies: the source may change at once. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_put_inline(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, const void *data, ibgda_u32 bytes,
				       ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	ibgda_status found = ibgda_either(ibgda_check_inline(bytes), ibgda_check_remote(remote, rkey, bytes, 1));
	return ibgda_checked_post<M, 1>(qp, found, flags, request, [&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return ibgda_wqe_write_inline(index, qpn, remote, rkey, data, bytes, slot_flags);
	});
}

/* RDMA WRITE of a value of 1, 2, 4 or 8 bytes, from registers. */
template <ibgda_u32 M = 0, class T>
IBGDA_FN ibgda_status ibgda_put_value(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, T value, ibgda_u32 flags = 0,
				      ibgda_u64 *request = nullptr)
{
	static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "a value of 1, 2, 4 or 8 bytes");
	ibgda_u64 word = 0;
#ifdef __CUDACC__
	/* NVRTC has no __builtin_memcpy. */
	memcpy(&word, &value, sizeof(T));
#else
	__builtin_memcpy(&word, &value, sizeof(T));
#endif
	return ibgda_checked_post<M, 1>(qp, ibgda_check_remote(remote, rkey, sizeof(T), 1), flags, request,
					[&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
						return ibgda_wqe_write_value(index, qpn, remote, rkey, word, sizeof(T), slot_flags);
					});
}

/*
 * RDMA READ: `bytes` of the peer's memory into local memory. With IBGDA_FLUSH the data is there for every reader of this
 * GPU when the request is complete, by whatever way the completion came; costs a WQE.
 */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_get(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 remote, ibgda_u32 rkey,
				ibgda_u32 bytes, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	ibgda_status found = ibgda_either(ibgda_check_local(local, lkey, bytes), ibgda_check_remote(remote, rkey, bytes, 1));
	if ((flags & IBGDA_FLUSH) && bytes)
		return ibgda_checked_post<M, 2>(qp, found, flags, request, [&](ibgda_u32 k, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
			ibgda_note_fetch<M>(qp, index, IBGDA_UNSIGNALED);
			/* The last byte: PCIe keeps the order of what was written before it. */
			return k ? ibgda_wqe_dump(index, qpn, local + bytes - 1, lkey, 1, slot_flags | IBGDA_FENCED) :
				   ibgda_wqe_read(index, qpn, remote, rkey, local, lkey, bytes, slot_flags);
		});
	return ibgda_checked_post<M, 1>(qp, found, flags, request, [&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		ibgda_note_fetch<M>(qp, index, slot_flags);
		return ibgda_wqe_read(index, qpn, remote, rkey, local, lkey, bytes, slot_flags);
	});
}

/* SEND into the peer's next receive. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_send(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 flags = 0,
				 ibgda_u64 *request = nullptr)
{
	return ibgda_checked_post<M, 1>(qp, ibgda_check_local(local, lkey, bytes), flags, request,
					[&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
						return ibgda_wqe_send(IBGDA_OP_SEND, index, qpn, local, lkey, bytes, 0, slot_flags);
					});
}

/* SEND that also gives the receiver `immediate`. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_send_imm(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 immediate,
				     ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	return ibgda_checked_post<M, 1>(qp, ibgda_check_local(local, lkey, bytes), flags, request,
					[&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
						return ibgda_wqe_send(IBGDA_OP_SEND_IMM, index, qpn, local, lkey, bytes,
								      immediate, slot_flags);
					});
}

/* SEND that invalidates `rkey` of the receiver: a memory window or a region registered by a work request. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_send_inval(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 rkey,
				       ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	return ibgda_checked_post<M, 1>(qp, ibgda_check_local(local, lkey, bytes), flags, request,
					[&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
						return ibgda_wqe_send(IBGDA_OP_SEND_INVAL, index, qpn, local, lkey, bytes, rkey,
								      slot_flags);
					});
}

/* What all atomics share: alignment, the old value's place, and the read-back that IBGDA_FLUSH asks for. */
template <ibgda_u32 M, class Build>
IBGDA_FN ibgda_status ibgda_post_atomic(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
					ibgda_u32 bytes, ibgda_u32 flags, ibgda_u64 *request, Build build)
{
	ibgda_status found = ibgda_either(ibgda_check_local(local, lkey, bytes), ibgda_check_remote(remote, rkey, bytes, bytes));
	if (flags & IBGDA_FLUSH)
		return ibgda_checked_post<M, 2>(qp, found, flags, request, [&](ibgda_u32 k, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
			ibgda_note_fetch<M>(qp, index, IBGDA_UNSIGNALED);
			return k ? ibgda_wqe_dump(index, qpn, local, lkey, bytes, slot_flags | IBGDA_FENCED) :
				   build(index, slot_flags, qpn);
		});
	return ibgda_checked_post<M, 1>(qp, found, flags, request, [&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		ibgda_note_fetch<M>(qp, index, slot_flags);
		return build(index, slot_flags, qpn);
	});
}

/* 64-bit fetch-and-add at 8-byte aligned peer memory; 8 bytes of local memory take the old value. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_fetch_add(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				      ibgda_u64 add, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	return ibgda_post_atomic<M>(qp, remote, rkey, local, lkey, 8, flags, request, [&](ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return ibgda_wqe_fetch_add(index, qpn, remote, rkey, local, lkey, add, slot_flags);
	});
}

/* 64-bit compare-and-swap at 8-byte aligned peer memory; 8 bytes of local memory take the old value. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_compare_swap(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
					 ibgda_u64 compare, ibgda_u64 swap, ibgda_u32 flags = 0,
					 ibgda_u64 *request = nullptr)
{
	return ibgda_post_atomic<M>(qp, remote, rkey, local, lkey, 8, flags, request, [&](ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return ibgda_wqe_compare_swap(index, qpn, remote, rkey, local, lkey, compare, swap, slot_flags);
	});
}

/* 32-bit fetch-and-add at 4-byte aligned peer memory; 4 bytes of local memory take the old value. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_fetch_add32(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
					ibgda_u32 add, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	return ibgda_post_atomic<M>(qp, remote, rkey, local, lkey, 4, flags, request, [&](ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return ibgda_wqe_fetch_add32(index, qpn, remote, rkey, local, lkey, add, slot_flags);
	});
}

/* 32-bit compare-and-swap at 4-byte aligned peer memory; 4 bytes of local memory take the old value. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_compare_swap32(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
					   ibgda_u32 compare, ibgda_u32 swap, ibgda_u32 flags = 0,
					   ibgda_u64 *request = nullptr)
{
	return ibgda_post_atomic<M>(qp, remote, rkey, local, lkey, 4, flags, request, [&](ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return ibgda_wqe_compare_swap32(index, qpn, remote, rkey, local, lkey, compare, swap, slot_flags);
	});
}

/*
 * Tells the peer something: writes 8 bytes at an 8-byte aligned address there, behind all that was put on this QP before.
 * The peer waits with ibgda_wait_until.
 */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_signal(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 value, ibgda_u32 flags = 0,
				   ibgda_u64 *request = nullptr)
{
	return ibgda_checked_post<M, 1>(qp, ibgda_check_remote(remote, rkey, 8, 8), flags, request,
					[&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
						return ibgda_wqe_write_value(index, qpn, remote, rkey, value, 8, slot_flags);
					});
}

/*
 * ibgda_put and ibgda_signal in two WQEs with one doorbell, which nothing comes between. The data is there when the signal
 * is: an RC QP's writes arrive in order, and a region that was not registered for relaxed ordering keeps it.
 */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_put_signal(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				       ibgda_u32 bytes, ibgda_u64 signal, ibgda_u32 signal_rkey, ibgda_u64 value,
				       ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	ibgda_status found = ibgda_either(ibgda_check_local(local, lkey, bytes), ibgda_check_remote(remote, rkey, bytes, 1));
	found = ibgda_either(found, ibgda_check_remote(signal, signal_rkey, 8, 8));
	return ibgda_checked_post<M, 2>(qp, found, flags, request, [&](ibgda_u32 k, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return k ? ibgda_wqe_write_value(index, qpn, signal, signal_rkey, value, 8, slot_flags) :
			   ibgda_wqe_write(IBGDA_OP_RDMA_WRITE, index, qpn, remote, rkey, local, lkey, bytes, 0, slot_flags);
	});
}

/* The same with a signal that is added to a counter; `scratch` are 8 local bytes under `lkey` for its old value. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_put_signal_add(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
					   ibgda_u32 bytes, ibgda_u64 signal, ibgda_u32 signal_rkey, ibgda_u64 add,
					   ibgda_u64 scratch, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	ibgda_status found = ibgda_either(ibgda_check_local(local, lkey, bytes), ibgda_check_remote(remote, rkey, bytes, 1));
	found = ibgda_either(found, ibgda_check_remote(signal, signal_rkey, 8, 8));
	return ibgda_checked_post<M, 2>(qp, found, flags, request, [&](ibgda_u32 k, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
		return k ? ibgda_wqe_fetch_add(index, qpn, signal, signal_rkey, scratch, lkey, add, slot_flags) :
			   ibgda_wqe_write(IBGDA_OP_RDMA_WRITE, index, qpn, remote, rkey, local, lkey, bytes, 0, slot_flags);
	});
}

/*
 * Orders requests at the NIC: those that come after it begin when every get and atomic before it is complete. Puts and
 * sends are in order without it. Costs a WQE; IBGDA_FENCED on the next request costs none.
 */
template <ibgda_u32 M = 0> IBGDA_FN ibgda_status ibgda_fence(ibgda_qp *qp)
{
	return ibgda_checked_post<M, 1>(qp, IBGDA_OK, IBGDA_UNSIGNALED | IBGDA_NO_DOORBELL, nullptr,
					[&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
						return ibgda_wqe_nop(index, qpn, slot_flags | IBGDA_FENCED);
					});
}

/* ibgda_put between regions, with the bounds of both checked: IBGDA_ERR_INVALID_ARGUMENT instead of an error CQE. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_put(ibgda_qp *qp, const ibgda_region &to, ibgda_u64 to_offset, const ibgda_region &from,
				ibgda_u64 from_offset, ibgda_u32 bytes, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	bool inside = ibgda_inside(to, to_offset, bytes) && ibgda_inside(from, from_offset, bytes);
	if (M & IBGDA_SCOPES ? false : !inside)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_status status = ibgda_put<M>(qp, to.address + to_offset, to.rkey, from.address + from_offset, from.lkey, bytes,
					   inside ? flags : flags | IBGDA_SKIP, request);
	return inside ? status : IBGDA_ERR_INVALID_ARGUMENT;
}

/* ibgda_get between regions, with the bounds of both checked. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_get(ibgda_qp *qp, const ibgda_region &to, ibgda_u64 to_offset, const ibgda_region &from,
				ibgda_u64 from_offset, ibgda_u32 bytes, ibgda_u32 flags = 0, ibgda_u64 *request = nullptr)
{
	bool inside = ibgda_inside(to, to_offset, bytes) && ibgda_inside(from, from_offset, bytes);
	if (M & IBGDA_SCOPES ? false : !inside)
		return IBGDA_ERR_INVALID_ARGUMENT;
	ibgda_status status = ibgda_get<M>(qp, to.address + to_offset, to.lkey, from.address + from_offset, from.rkey, bytes,
					   inside ? flags : flags | IBGDA_SKIP, request);
	return inside ? status : IBGDA_ERR_INVALID_ARGUMENT;
}

/*
 * Posts one receive of 1 to IBGDA_MAX_MESSAGE_BYTES bytes; a call for one thread, whatever M. The receive queue has no
 * doorbell register: the NIC reads the record when a message arrives. IBGDA_ERR_QUEUE_FULL at once when every slot is
 * posted. On a shared QP threads take turns; IBGDA_TIMEOUT when the turn does not come within post_timeout_ns.
 */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_recv(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes)
{
	if (!qp->recv_depth)
		return IBGDA_ERR_NO_QUEUE;
	if (!bytes)
		return IBGDA_CHECKS < IBGDA_CHECKS_FULL ? IBGDA_ERR_INVALID_ARGUMENT : IBGDA_ERR_BYTES;
	ibgda_status found = ibgda_check_local(local, lkey, bytes);
	if (found != IBGDA_OK)
		return found;
	if (M & IBGDA_SHARED) {
		ibgda_u64 deadline = ibgda_clock_ns() + qp->post_timeout_ns;
		while (!ibgda_try_lock(&qp->recv_lock)) {
			if (ibgda_clock_ns() >= deadline)
				return IBGDA_TIMEOUT;
			ibgda_relax();
		}
	}
	ibgda_known known = ibgda_look<M>(qp->recv_cq);
	ibgda_status status = known.error;
	if (status == IBGDA_OK && qp->recv_producer - known.completed >= qp->recv_depth)
		status = IBGDA_ERR_QUEUE_FULL;
	if (status == IBGDA_OK) {
		ibgda_u64 index = qp->recv_producer++;
		ibgda_store_quad(qp->recv_ring + (index & (qp->recv_depth - 1)) * IBGDA_RECV_WQE_BYTES,
				 ibgda_data_segment(local, lkey, bytes));
		ibgda_release<M>();
		ibgda_store_record(qp->doorbell_record, ibgda_be16((ibgda_u32)index + 1));
	}
	if (M & IBGDA_SHARED)
		ibgda_unlock<M>(&qp->recv_lock);
	return status;
}

template <ibgda_u32 M> IBGDA_FN ibgda_u64 ibgda_posted(const ibgda_qp *qp)
{
	return M & IBGDA_SHARED ? ibgda_load_shared(&qp->producer) : qp->producer;
}

/* One thread's call, or with a scope that of the group's leader, whose status all get. */
template <ibgda_u32 M, class Call> IBGDA_FN ibgda_status ibgda_once(const ibgda_qp *qp, ibgda_u64 argument, Call call)
{
	if constexpr (M & IBGDA_SCOPES) {
		ibgda_group group = ibgda_group_form<M>(qp, true);
		argument = ibgda_group_max<M>(group, argument);
		ibgda_u64 status = 0;
		if (group.leads)
			status = call(argument);
		return static_cast<ibgda_status>(ibgda_group_share<M>(group, status));
	}
	return call(argument);
}

/*
 * Waits until one request has completed; a warp or block, until the latest of its threads' requests has. IBGDA_OK: it
 * succeeded; IBGDA_ERR_INVALID_INDEX: it was never posted.
 */
template <ibgda_u32 M = 0> IBGDA_FN ibgda_status ibgda_wait(ibgda_qp *qp, ibgda_u64 request, ibgda_u64 deadline_ns)
{
	return ibgda_once<M>(qp, request, [&](ibgda_u64 latest) {
		ibgda_cq *cq = ibgda_send_cq(qp);
		if constexpr (M & IBGDA_SHARED) {
			const ibgda_quad ends = ibgda_load_shared_pair(&qp->producer);
			if (latest >= ends.low)
				return IBGDA_ERR_INVALID_INDEX;
			/* The limit is a ring ahead of what is known complete. */
			if (latest + ibgda_sq_of(qp).depth < ends.high) {
				ibgda_acquire();
				return IBGDA_OK;
			}
		} else {
			/* Nothing is known complete that was not posted: that need not be looked at first. */
			if (ibgda_wait_short<M>(cq, latest))
				return IBGDA_OK;
			if (latest >= qp->producer)
				return IBGDA_ERR_INVALID_INDEX;
		}
		return ibgda_wait_long<M>(cq, latest, deadline_ns);
	});
}

/*
 * Waits until every request posted so far, by whatever thread, has completed; rings for those that were not rung. If the
 * last one has no completion of its own, or the QP is shared, an empty request that has one is put behind it.
 */
template <ibgda_u32 M = 0> IBGDA_FN ibgda_status ibgda_quiet(ibgda_qp *qp, ibgda_u64 deadline_ns)
{
	return ibgda_once<M>(qp, 0, [&](ibgda_u64) {
		ibgda_u64 posted = ibgda_posted<M>(qp);
		if (ibgda_look<M>(qp->send_cq).completed >= posted)
			return IBGDA_OK;
		ibgda_u64 last = posted - 1;
		ibgda_status status;
		if ((M & IBGDA_SHARED) || qp->silent == posted)
			status = ibgda_post<M & ~IBGDA_SCOPES, 1>(qp, 0, &last, [&](ibgda_u32, ibgda_u64 index, ibgda_u32 slot_flags, ibgda_u32 qpn) {
				return ibgda_wqe_nop(index, qpn, slot_flags);
			});
		else
			status = ibgda_write_doorbell<M>(qp, posted);
		return status == IBGDA_OK ? ibgda_wait_request<M>(qp->send_cq, last, deadline_ns) : status;
	});
}

/* ibgda_quiet of many QPs. The first status that is not IBGDA_OK; *which, when asked for, is then the QP's place. */
template <ibgda_u32 M = 0>
IBGDA_FN ibgda_status ibgda_quiet_all(ibgda_qp *const *qps, ibgda_u32 count, ibgda_u64 deadline_ns, ibgda_u32 *which = nullptr)
{
	for (ibgda_u32 i = 0; i < count; i++) {
		ibgda_status status = ibgda_quiet<M>(qps[i], deadline_ns);
		if (status != IBGDA_OK) {
			if (which)
				*which = i;
			return status;
		}
	}
	return IBGDA_OK;
}

/*
 * Runs a statement in which `route` is a constant: M for the route that the QP's handle was made for. So one kernel serves
 * every route,
 *
 *   IBGDA_BY_ROUTE(qp, 0, status = ibgda_put<route>(qp, ...));
 *   IBGDA_BY_ROUTE(qp, IBGDA_SHARED, return body_of_the_kernel<route>(qp, ...));
 *
 * at the price of a load and a branch, once for all that the statement does. Not a function that takes a lambda: NVRTC has no
 * generic ones for devices.
 */
#define IBGDA_BY_ROUTE(qp, M, ...)                                            \
	do {                                                                  \
		if ((qp)->mode & IBGDA_CPU_DOORBELL) {                        \
			constexpr ibgda_u32 route = (M) | IBGDA_CPU_DOORBELL; \
			__VA_ARGS__;                                          \
		} else {                                                      \
			constexpr ibgda_u32 route = (M);                      \
			__VA_ARGS__;                                          \
		}                                                             \
	} while (0)

#endif
