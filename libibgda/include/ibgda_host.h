/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The device calls for threads of a C program: same names, arguments and results as in ibgda_device.cuh, which C++ and CUDA
 * include instead. Here the library has them, and each looks at the handle's `mode` for how its QP is used.
 *
 * All return a status of ibgda/types.h; ibgda_status_text() puts it in words. `flags` are those of ibgda/types.h. `request`,
 * unless NULL, takes the index that ibgda_wait() takes. Deadlines are on ibgda_clock_ns(); 0 means: look once.
 *
 * A QP that was not created with IBGDA_SHARED is for one thread at a time, and so is its CQ.
 */
#ifndef IBGDA_HOST_H
#define IBGDA_HOST_H

#ifdef __cplusplus
#error "C++ includes <ibgda_device.cuh> with IBGDA_HOST defined, which has these calls inline"
#endif

#include <ibgda/types.h>

/* Nanoseconds of CLOCK_MONOTONIC. */
ibgda_u64 ibgda_clock_ns(void);

/* RDMA WRITE of `bytes` from local memory to the peer's. */
ibgda_status ibgda_put(struct ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
		       ibgda_u32 bytes, ibgda_u32 flags, ibgda_u64 *request);

/* RDMA WRITE that also takes a receive of the peer and gives it `immediate`. */
ibgda_status ibgda_put_imm(struct ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
			   ibgda_u32 bytes, ibgda_u32 immediate, ibgda_u32 flags, ibgda_u64 *request);

/* RDMA WRITE of 1 to IBGDA_MAX_INLINE_BYTES bytes, which the call copies. */
ibgda_status ibgda_put_inline(struct ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, const void *data, ibgda_u32 bytes,
			      ibgda_u32 flags, ibgda_u64 *request);

/* RDMA WRITE, then 8 bytes `value` at `signal`, for which the peer waits with ibgda_wait_until(). */
ibgda_status ibgda_put_signal(struct ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
			      ibgda_u32 bytes, ibgda_u64 signal, ibgda_u32 signal_rkey, ibgda_u64 value, ibgda_u32 flags,
			      ibgda_u64 *request);

/* The signal alone, behind all that was put on this QP before. */
ibgda_status ibgda_signal(struct ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 value, ibgda_u32 flags,
			  ibgda_u64 *request);

/* RDMA READ of `bytes` from the peer's memory. */
ibgda_status ibgda_get(struct ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 remote, ibgda_u32 rkey,
		       ibgda_u32 bytes, ibgda_u32 flags, ibgda_u64 *request);

/* 64-bit atomics on 8-byte aligned peer memory; the old value lands in 8 bytes of local memory. */
ibgda_status ibgda_fetch_add(struct ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
			     ibgda_u64 add, ibgda_u32 flags, ibgda_u64 *request);
ibgda_status ibgda_compare_swap(struct ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				ibgda_u64 compare, ibgda_u64 swap, ibgda_u32 flags, ibgda_u64 *request);

/* SEND into the peer's next receive. */
ibgda_status ibgda_send(struct ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 flags,
			ibgda_u64 *request);

/* Posts a receive of up to `bytes` bytes. */
ibgda_status ibgda_recv(struct ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes);

/* Waits until a request has completed, and until every one has. */
ibgda_status ibgda_wait(struct ibgda_qp *qp, ibgda_u64 request, ibgda_u64 deadline_ns);
ibgda_status ibgda_quiet(struct ibgda_qp *qp, ibgda_u64 deadline_ns);

/* Rings for requests posted with IBGDA_NO_DOORBELL, up to the index of the next free slot. */
ibgda_status ibgda_write_doorbell(struct ibgda_qp *qp, ibgda_u64 producer_index);

/* Takes one completion; cqe->kind is IBGDA_CQE_INVALID when there was none. */
ibgda_status ibgda_poll_cq(struct ibgda_cq *cq, struct ibgda_cqe *cqe, ibgda_u64 deadline_ns);

/* Sleeps until the CQ may have a completion that was not taken. IBGDA_ERR_NO_QUEUE: made without IBGDA_CQ_EVENTS. */
ibgda_status ibgda_wait_for_cq_event(struct ibgda_cq *cq, ibgda_u64 deadline_ns);

/* Waits for a word that a peer signals to be `comparison` to `value`; `cq`, unless NULL, is any of that NIC. */
ibgda_status ibgda_wait_until(const ibgda_u64 *word, enum ibgda_comparison comparison, ibgda_u64 value,
			      ibgda_u64 deadline_ns, const struct ibgda_cq *cq);

#endif
