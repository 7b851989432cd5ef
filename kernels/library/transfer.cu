/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Kernels that the ibgda command, examples and tests load (src/kernels.rs): nvcc compiles them at build time where there
 * is one, else NVRTC when they are loaded; a C++ compiler with IBGDA_HOST for a CPU thread.
 */
#include <ibgda_device.cuh>
/* NVRTC has no file system: src/kernels.rs puts its text before this one. */
#ifndef IBGDA_REQUESTS_H
#include "requests.h"
#endif

#ifdef IBGDA_HOST
#define KERNEL extern "C" void
#define ONE_THREAD()
#define BLOCK_INDEX 0
#else
#define KERNEL extern "C" __global__ void
#define ONE_THREAD()                   \
	if (threadIdx.x || blockIdx.x) \
	return
#define BLOCK_INDEX blockIdx.x
#endif

template <ibgda_u32 M>
IBGDA_FN ibgda_status put_all(ibgda_qp *qp, const ibgda_region &to, const ibgda_region &from, ibgda_u32 block_bytes, ibgda_u64 timeout_ns)
{
	for (ibgda_u64 offset = 0; offset < from.length; offset += block_bytes) {
		ibgda_u64 left = from.length - offset;
		ibgda_u32 bytes = left < block_bytes ? (ibgda_u32)left : block_bytes;
		ibgda_status status = ibgda_put<M>(qp, to, offset, from, offset, bytes);
		if (status != IBGDA_OK)
			return status;
	}
	return ibgda_quiet<M>(qp, ibgda_clock_ns() + timeout_ns);
}

/*
 * RDMA WRITE of `from`, block by block, to the same offsets of `to`; returns when the last one has completed. On whatever
 * route the QP is: what rings differs, and nothing else.
 */
KERNEL ibgda_kernel_put_blocks(ibgda_qp *qp, ibgda_region to, ibgda_region from, ibgda_u32 block_bytes, ibgda_u64 timeout_ns,
			       ibgda_u32 *result)
{
	ONE_THREAD();
	IBGDA_BY_ROUTE(qp, 0, *result = put_all<route>(qp, to, from, block_bytes, timeout_ns));
}

/* Waits for a completion of the send queue, which may never come. */
KERNEL ibgda_kernel_wait(ibgda_qp *qp, ibgda_u64 timeout_ns, ibgda_u32 *result)
{
	ONE_THREAD();
	ibgda_cqe cqe;
	*result = ibgda_poll_cq(qp->send_cq, &cqe, ibgda_clock_ns() + timeout_ns);
}

/* Posts one request, or does what it says else. */
template <ibgda_u32 M> IBGDA_FN ibgda_status post_request(ibgda_qp *qp, ibgda_request &request, ibgda_u64 timeout_ns)
{
	ibgda_u64 *index = &request.index;
	const ibgda_u32 flags = request.flags, lkey = request.lkey, rkey = request.rkey, bytes = request.bytes;
	const ibgda_u64 local = request.local, remote = request.remote;
	switch (request.kind) {
	case IBGDA_REQUEST_PUT:
		return ibgda_put<M>(qp, remote, rkey, local, lkey, bytes, flags, index);
	case IBGDA_REQUEST_PUT_INLINE:
		return ibgda_put_inline<M>(qp, remote, rkey, request.data, bytes, flags, index);
	case IBGDA_REQUEST_PUT_SIGNAL:
		return ibgda_put_signal<M>(qp, remote, rkey, local, lkey, bytes, request.signal, rkey, request.value, flags, index);
	case IBGDA_REQUEST_GET:
		return ibgda_get<M>(qp, local, lkey, remote, rkey, bytes, flags, index);
	case IBGDA_REQUEST_FETCH_ADD:
		return ibgda_fetch_add<M>(qp, remote, rkey, local, lkey, request.value, flags, index);
	case IBGDA_REQUEST_COMPARE_SWAP:
		return ibgda_compare_swap<M>(qp, remote, rkey, local, lkey, request.compare, request.value, flags, index);
	case IBGDA_REQUEST_SEND:
		return ibgda_send<M>(qp, local, lkey, bytes, flags, index);
	case IBGDA_REQUEST_RECV:
		return ibgda_recv<M>(qp, local, lkey, bytes);
	case IBGDA_REQUEST_POLL_RECV: {
		if (!qp->recv_cq)
			return IBGDA_ERR_NO_QUEUE;
		ibgda_cqe cqe;
		ibgda_status status = ibgda_poll_cq<M>(qp->recv_cq, &cqe, ibgda_clock_ns() + timeout_ns);
		request.index = cqe.wqe_index;
		request.received = cqe.byte_count;
		return status;
	}
	default:
		return IBGDA_ERR_INVALID_ARGUMENT;
	}
}

template <ibgda_u32 M> IBGDA_FN ibgda_status run_job(ibgda_job &job)
{
	ibgda_qp *qp = job.qp;
	for (job.done = 0; job.done < job.count; job.done++) {
		ibgda_request &request = job.requests[job.done];
		/* The receive queue's own need no waiting. */
		const bool waits = request.wait && request.kind < IBGDA_REQUEST_RECV;
		request.begun_ns = ibgda_clock_ns();
		ibgda_status status = post_request<M>(qp, request, job.timeout_ns);
		if (status == IBGDA_OK && waits)
			status = ibgda_wait<M>(qp, request.index, ibgda_clock_ns() + job.timeout_ns);
		request.ended_ns = ibgda_clock_ns();
		request.status = status;
		if (status != IBGDA_OK)
			return status;
	}
	return ibgda_quiet<M>(qp, ibgda_clock_ns() + job.timeout_ns);
}

template <ibgda_u32 M> IBGDA_FN ibgda_status run_stream(ibgda_stream &stream)
{
	ibgda_qp *qp = stream.qp;
	const ibgda_u32 count = stream.count, bytes = stream.bytes, batch = stream.batch;
	const ibgda_u32 lkey = stream.lkey, rkey = stream.rkey;
	ibgda_u64 local = stream.local, remote = stream.remote;
	const ibgda_u64 stride = stream.stride;
	stream.begun_ns = ibgda_clock_ns();
	for (ibgda_u32 i = 0, left = batch; i < count; i++, local += stride, remote += stride) {
		const bool rings = --left == 0 || i + 1 == count;
		ibgda_status status = ibgda_put<M>(qp, remote, rkey, local, lkey, bytes,
						   rings ? 0 : IBGDA_UNSIGNALED | IBGDA_NO_DOORBELL);
		if (status != IBGDA_OK)
			return status;
		if (rings)
			left = batch;
	}
	ibgda_status status = ibgda_quiet<M>(qp, ibgda_clock_ns() + stream.timeout_ns);
	stream.ended_ns = ibgda_clock_ns();
	return status;
}

/* Runs a job in each block. */
KERNEL ibgda_kernel_jobs(ibgda_job *jobs)
{
	ibgda_job &job = jobs[BLOCK_INDEX];
	IBGDA_BY_ROUTE(job.qp, 0, job.status = run_job<route>(job));
}

/* Runs a stream in each block. */
KERNEL ibgda_kernel_streams(ibgda_stream *streams)
{
	ibgda_stream &stream = streams[BLOCK_INDEX];
	IBGDA_BY_ROUTE(stream.qp, 0, stream.status = run_stream<route>(stream));
}
