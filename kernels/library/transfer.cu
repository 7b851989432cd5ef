/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Kernels that examples and tests load (src/kernels.rs): nvcc compiles them at build time where there is one, else NVRTC
 * when they are loaded; a C++ compiler with IBGDA_HOST for a CPU thread.
 */
#include <ibgda_device.cuh>

#ifdef IBGDA_HOST
#define KERNEL extern "C" void
#define ONE_THREAD()
#else
#define KERNEL extern "C" __global__ void
#define ONE_THREAD()                   \
	if (threadIdx.x || blockIdx.x) \
	return
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
