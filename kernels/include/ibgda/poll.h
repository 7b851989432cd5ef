/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Completions: decoding, latching the first error, and bounded waiting.
 *
 * Deadlines are absolute, on ibgda_clock_ns(); 0, or any time that has passed, means: look once.
 */
#ifndef IBGDA_POLL_H
#define IBGDA_POLL_H

#include "platform.h"

/* Broker's status page (uapi/ibgda.h): word 0 = generation << 32 | state, state 1 = ready. */
#define IBGDA_STATE_WORD_READY(generation) ((ibgda_u64)(generation) << 32 | 1u)

/* Polls without a completion between two looks at the status page, a power of two. */
#define IBGDA_POLLS_PER_STATUS_LOOK 64u

/* The 32-bit big-endian word at byte `offset` of a completion that was found valid. */
IBGDA_FN ibgda_u32 ibgda_cqe_word(const ibgda_u8 *cqe, unsigned offset)
{
	return ibgda_be32(*reinterpret_cast<const ibgda_u32 *>(cqe + offset));
}

/* Does the broker still vouch for this NIC, in the generation that the queue was made in? */
IBGDA_FN bool ibgda_nic_lost(const ibgda_cq *cq)
{
	return cq->status_page && ibgda_load_relaxed(cq->status_page) != IBGDA_STATE_WORD_READY(cq->generation);
}

/*
 * Takes the next completion, if one is there; no waiting. IBGDA_OK: a request succeeded. IBGDA_TIMEOUT: none is there.
 * Anything else: an error completion was taken, and the first one of this queue is latched in cq->error.
 *
 * `completed` advances to behind the request that succeeded, or to the request that failed: requests complete in
 * order, so all before the failed one have succeeded, even those without a completion of their own.
 */
IBGDA_FN ibgda_status ibgda_take_cqe(ibgda_cq *cq, ibgda_cqe *out)
{
	const ibgda_u8 *cqe = cq->ring + (cq->consumer & (cq->depth - 1)) * IBGDA_CQE_BYTES;
	ibgda_quad tail = ibgda_load_tail(cqe + 48);
	/* Bytes 56..63: opcode and QPN, big-endian; WQE counter, big-endian; signature; kind << 4 | format | owner. */
	ibgda_u32 kind = (ibgda_u32)(tail.high >> 60);
	ibgda_u32 owner = (ibgda_u32)(tail.high >> 56) & 1;
	ibgda_u32 lap = cq->consumer & cq->depth ? 1 : 0;

	out->kind = IBGDA_CQE_INVALID;
	if (kind == IBGDA_CQE_INVALID || owner != lap)
		return IBGDA_TIMEOUT;
	ibgda_acquire();

	ibgda_u32 opcode_qpn = ibgda_be32((ibgda_u32)tail.high);
	ibgda_u32 counter = ibgda_be32((ibgda_u32)(tail.high >> 32)) >> 16;
	/* At most 32768 requests are under way, so the nearest index at or above `completed` with these 16 bits is meant. */
	ibgda_u64 index = cq->completed + (ibgda_u16)(counter - (ibgda_u32)cq->completed);

	out->wqe_index = index;
	out->qpn = opcode_qpn & 0xffffff;
	out->opcode = (ibgda_u8)(opcode_qpn >> 24);
	out->kind = (ibgda_u8)kind;
	out->syndrome = 0;
	out->vendor_syndrome = 0;
	out->byte_count = 0;
	out->immediate = 0;

	cq->consumer++;
	ibgda_store_relaxed(cq->doorbell_record, ibgda_be32((ibgda_u32)cq->consumer & 0xffffff));

	if (kind <= IBGDA_CQE_RESP_SEND_INV) {
		out->byte_count = ibgda_cqe_word(cqe, 44);
		out->immediate = ibgda_cqe_word(cqe, 36);
		cq->completed = index + 1;
		return IBGDA_OK;
	}

	ibgda_status status = IBGDA_ERR_UNKNOWN_CQE;
	if (kind == IBGDA_CQE_REQ_ERR || kind == IBGDA_CQE_RESP_ERR) {
		/* From the same load as the kind: nothing that lands later can change what is latched. */
		out->vendor_syndrome = (ibgda_u8)(tail.low >> 48);
		out->syndrome = (ibgda_u8)(tail.low >> 56);
		status = static_cast<ibgda_status>(IBGDA_ERR_COMPLETION | out->syndrome);
	}
	if (!cq->error.status) {
		cq->completed = index;
		cq->error.wqe_index = index;
		cq->error.status = status;
		cq->error.qpn = out->qpn;
		cq->error.kind = out->kind;
		cq->error.opcode = out->opcode;
		cq->error.syndrome = out->syndrome;
		cq->error.vendor_syndrome = out->vendor_syndrome;
	}
	return status;
}

/* Loss has no completion: it is latched like an error of no request in particular. */
IBGDA_FN ibgda_status ibgda_latch_lost(ibgda_cq *cq)
{
	if (!cq->error.status) {
		cq->error.wqe_index = cq->completed;
		cq->error.status = IBGDA_ERR_NIC_LOST;
		cq->error.kind = IBGDA_CQE_INVALID;
	}
	return static_cast<ibgda_status>(cq->error.status);
}

/*
 * Takes one completion, waiting for it until the deadline.
 *
 * IBGDA_OK: *cqe is the completion of a request that succeeded. IBGDA_TIMEOUT: none came. IBGDA_ERR_NIC_LOST: none will
 * come. Other errors: the status of the completion taken, or, when none is there (cqe->kind is IBGDA_CQE_INVALID), the
 * queue's latched first error, at once and however far the deadline.
 */
IBGDA_FN ibgda_status ibgda_poll_cq(ibgda_cq *cq, ibgda_cqe *cqe, ibgda_u64 deadline_ns)
{
	for (;;) {
		ibgda_status status = ibgda_take_cqe(cq, cqe);
		if (status != IBGDA_TIMEOUT)
			return status;
		if (cq->error.status)
			return static_cast<ibgda_status>(cq->error.status);
		if ((++cq->misses & (IBGDA_POLLS_PER_STATUS_LOOK - 1)) == 0 && ibgda_nic_lost(cq))
			return ibgda_latch_lost(cq);
		if (!deadline_ns || ibgda_clock_ns() >= deadline_ns)
			return IBGDA_TIMEOUT;
		ibgda_relax();
	}
}

/*
 * Waits until request `index` of the queue is known complete. IBGDA_OK: it succeeded, whatever happened to later ones.
 * An error: it failed, or never will complete; cq->error says which request failed first and why.
 */
IBGDA_FN ibgda_status ibgda_wait_request(ibgda_cq *cq, ibgda_u64 index, ibgda_u64 deadline_ns)
{
	while (cq->completed <= index) {
		ibgda_cqe cqe;
		ibgda_status status = ibgda_poll_cq(cq, &cqe, deadline_ns);
		if (status != IBGDA_OK && cq->completed <= index)
			return cq->error.status ? static_cast<ibgda_status>(cq->error.status) : status;
	}
	return IBGDA_OK;
}

#endif
