/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A kernel whose every block runs a list of device calls that the host has made: for tests that want many different ones,
 * and for processes that cannot compile. Compiled as transfer.cu is.
 */
#include <ibgda_device.cuh>
#ifndef IBGDA_STEPS_H
#include "steps.h"
#endif

/* With the status page left out of the header (poll.h), for the test that shows what it is for. */
#ifdef IBGDA_PLANTED_BLIND
#define STEPS ibgda_kernel_steps_blind
#else
#define STEPS ibgda_kernel_steps
#endif

#ifdef IBGDA_HOST
#define STEPS_KERNEL extern "C" void
#define BLOCK_ARGUMENT , ibgda_u32 block
#else
#define STEPS_KERNEL extern "C" __global__ void
#define BLOCK_ARGUMENT
#endif

template <ibgda_u32 M> IBGDA_FN ibgda_status step_storm(ibgda_qp *qp, const ibgda_step &step)
{
	for (ibgda_u64 number = 0; number < step.count; number++) {
		/* Three of four without a completion of their own. */
		const ibgda_u32 flags = (number & 3) == 3 || number + 1 == step.count ? 0 : IBGDA_UNSIGNALED;
		const ibgda_u64 place = step.remote + number % step.slots * 8;
		ibgda_status status = ibgda_put_value<M>(qp, place, step.rkey, number, flags);
		if (status != IBGDA_OK)
			return status;
	}
	return ibgda_quiet<M>(qp, ibgda_clock_ns() + step.timeout_ns);
}

template <ibgda_u32 M> IBGDA_FN ibgda_status step_rounds(ibgda_qp *qp, const ibgda_step &step)
{
	ibgda_u64 *times = reinterpret_cast<ibgda_u64 *>(step.word);
	for (ibgda_u64 round = 0; round < step.count; round++) {
		ibgda_u64 request, begin = ibgda_clock_ns();
		ibgda_status status = ibgda_put<M>(qp, step.remote, step.rkey, step.local, step.lkey, step.bytes, 0, &request);
		if (status == IBGDA_OK)
			status = ibgda_wait<M>(qp, request, begin + step.timeout_ns);
		if (status != IBGDA_OK)
			return status;
		times[round] = ibgda_clock_ns() - begin;
	}
	return IBGDA_OK;
}

template <ibgda_u32 M> IBGDA_FN ibgda_status step_with(ibgda_qp *qp, ibgda_step &step)
{
	const ibgda_u64 deadline = ibgda_clock_ns() + step.timeout_ns;
	switch (step.kind) {
	case IBGDA_STEP_PUT:
		return ibgda_put<M>(qp, step.remote, step.rkey, step.local, step.lkey, step.bytes, step.flags);
	case IBGDA_STEP_PUT_INLINE:
		return ibgda_put_inline<M>(qp, step.remote, step.rkey, &step.value, step.bytes, step.flags);
	case IBGDA_STEP_GET:
		return ibgda_get<M>(qp, step.local, step.lkey, step.remote, step.rkey, step.bytes, step.flags);
	case IBGDA_STEP_FETCH_ADD:
		return ibgda_fetch_add<M>(qp, step.remote, step.rkey, step.local, step.lkey, step.value, step.flags);
	case IBGDA_STEP_COMPARE_SWAP:
		return ibgda_compare_swap<M>(qp, step.remote, step.rkey, step.local, step.lkey, step.compare, step.value,
					     step.flags);
	case IBGDA_STEP_SEND:
		return ibgda_send<M>(qp, step.local, step.lkey, step.bytes, step.flags);
	case IBGDA_STEP_RECV:
		return ibgda_recv<M>(qp, step.local, step.lkey, step.bytes);
	case IBGDA_STEP_PUT_SIGNAL:
		return ibgda_put_signal<M>(qp, step.remote, step.rkey, step.local, step.lkey, step.bytes, step.compare, step.rkey,
					   step.value, step.flags);
	case IBGDA_STEP_QUIET:
		return ibgda_quiet<M>(qp, deadline);
	case IBGDA_STEP_POLL_RECV:
	case IBGDA_STEP_POLL_SEND: {
		ibgda_cqe cqe;
		ibgda_status status = ibgda_poll_cq<M>(step.kind == IBGDA_STEP_POLL_RECV ? qp->recv_cq : qp->send_cq, &cqe, deadline);
		step.result = cqe.byte_count;
		return status;
	}
	case IBGDA_STEP_STORM:
		return step_storm<M>(qp, step);
	case IBGDA_STEP_ROUNDS:
		return step_rounds<M>(qp, step);
	default:
		return IBGDA_ERR_INVALID_ARGUMENT;
	}
}

IBGDA_FN ibgda_status run_step(ibgda_step &step)
{
	ibgda_qp *qp = reinterpret_cast<ibgda_qp *>(step.qp);
	const ibgda_u64 *word = reinterpret_cast<const ibgda_u64 *>(step.word);
	if (step.kind == IBGDA_STEP_WAIT_UNTIL) {
		ibgda_status status = ibgda_wait_until(word, IBGDA_GE, step.value, ibgda_clock_ns() + step.timeout_ns,
						       qp ? qp->send_cq : nullptr);
		step.result = ibgda_load_relaxed(word);
		return status;
	}
	if (step.kind == IBGDA_STEP_LOAD) {
		step.result = ibgda_load_relaxed(word);
		return IBGDA_OK;
	}
	ibgda_status status;
	IBGDA_BY_ROUTE(qp, 0, status = step_with<route>(qp, step));
	return status;
}

STEPS_KERNEL STEPS(const ibgda_task *task BLOCK_ARGUMENT)
{
#ifndef IBGDA_HOST
	const ibgda_u32 block = blockIdx.x;
	if (threadIdx.x)
		return;
#endif
	ibgda_step *steps = reinterpret_cast<ibgda_step *>(task->steps) + (ibgda_u64)block * task->each;
	for (ibgda_u32 i = 0; i < task->each; i++) {
		/* A copy: the list may lie in the host's memory, which is far. */
		ibgda_step step = steps[i];
		step.began_ns = ibgda_clock_ns();
		step.status = run_step(step);
		step.ended_ns = ibgda_clock_ns();
		step.done = 1;
		steps[i] = step;
		if (step.status != IBGDA_OK)
			return;
	}
}
