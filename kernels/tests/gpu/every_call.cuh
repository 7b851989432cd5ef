/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Every call of the header, in the two modes that differ most, for NVRTC: kernels/tests/tests/nvrtc.rs, which sees to it that
 * no call is missing. It is never run.
 */
#include <ibgda_device.cuh>

struct Arguments {
	ibgda_region here, there;
	ibgda_u64 deadline_ns;
	ibgda_u64 value;
	ibgda_u32 bytes;
	ibgda_u32 flags;
};

/* Not inlined: one function of all calls would take the compiler minutes. */
template <class Call> static __device__ __noinline__ ibgda_u32 apart(Call call) { return call(); }

template <ibgda_u32 M> static __device__ ibgda_u32 every_request(ibgda_qp *qp, const Arguments &a)
{
	ibgda_u64 remote = a.there.address, local = a.here.address, request = 0;
	ibgda_u32 rkey = a.there.rkey, lkey = a.here.lkey, failed = 0;
	failed |= apart([&] { return ibgda_put<M>(qp, remote, rkey, local, lkey, a.bytes, a.flags, &request); });
	failed |= apart([&] { return ibgda_put<M>(qp, a.there, 0, a.here, 0, a.bytes, a.flags, &request); });
	failed |= apart([&] { return ibgda_put_imm<M>(qp, remote, rkey, local, lkey, a.bytes, 1, a.flags, &request); });
	failed |= apart([&] { return ibgda_put_inline<M>(qp, remote, rkey, &a.value, sizeof a.value, a.flags, &request); });
	failed |= apart([&] { return ibgda_put_value<M>(qp, remote, rkey, 1.0f, a.flags, &request); });
	failed |= apart([&] { return ibgda_get<M>(qp, local, lkey, remote, rkey, a.bytes, a.flags, &request); });
	failed |= apart([&] { return ibgda_get<M>(qp, a.here, 0, a.there, 0, a.bytes, a.flags, &request); });
	failed |= apart([&] { return ibgda_send<M>(qp, local, lkey, a.bytes, a.flags, &request); });
	failed |= apart([&] { return ibgda_send_imm<M>(qp, local, lkey, a.bytes, 1, a.flags, &request); });
	failed |= apart([&] { return ibgda_send_inval<M>(qp, local, lkey, a.bytes, rkey, a.flags, &request); });
	failed |= apart([&] { return ibgda_fetch_add<M>(qp, remote, rkey, local, lkey, 1, a.flags, &request); });
	failed |= apart([&] { return ibgda_compare_swap<M>(qp, remote, rkey, local, lkey, 0, 1, a.flags, &request); });
	failed |= apart([&] { return ibgda_fetch_add32<M>(qp, remote, rkey, local, lkey, 1, a.flags, &request); });
	failed |= apart([&] { return ibgda_compare_swap32<M>(qp, remote, rkey, local, lkey, 0, 1, a.flags, &request); });
	failed |= apart([&] { return ibgda_signal<M>(qp, remote, rkey, 1, a.flags, &request); });
	failed |= apart([&] { return ibgda_put_signal<M>(qp, remote, rkey, local, lkey, a.bytes, remote, rkey, 1, a.flags, &request); });
	failed |= apart([&] { return ibgda_put_signal_add<M>(qp, remote, rkey, local, lkey, a.bytes, remote, rkey, 1, local, a.flags, &request); });
	failed |= apart([&] { return ibgda_fence<M>(qp); });
	failed |= apart([&] { return ibgda_recv<M>(qp, local, lkey, a.bytes); });
	failed |= apart([&] { return ibgda_wait<M>(qp, request, a.deadline_ns); });
	failed |= apart([&] { return ibgda_quiet<M>(qp, a.deadline_ns); });
	return failed;
}

/* What is called by one thread, whatever the scope of requests. */
template <ibgda_u32 M> static __device__ ibgda_u32 every_other(ibgda_qp *qp, const Arguments &a)
{
	ibgda_u32 failed = 0, which;
	ibgda_u64 request;
	failed |= apart([&] { return ibgda_quiet_all<M>(&qp, 1, a.deadline_ns, &which); });
	IBGDA_BY_ROUTE(qp, M, failed |= apart([&] { return ibgda_quiet<route>(qp, a.deadline_ns); }));

	/* A request of one's own. */
	failed |= apart([&] { return ibgda_reserve<M>(qp, &request); });
	ibgda_write_wqe(qp, request, ibgda_wqe_nop(request, qp->number, ibgda_slot_flags(qp->send_depth, request, a.flags)));
	if constexpr (M & IBGDA_SHARED)
		ibgda_publish<M>(qp, request, 1);
	failed |= apart([&] { return ibgda_write_doorbell<M>(qp, request + 1); });

	ibgda_cqe cqe;
	failed |= apart([&] { return ibgda_poll_cq<M>(qp->send_cq, &cqe, a.deadline_ns); });
	failed |= apart([&] { return ibgda_wait_request<M>(qp->send_cq, cqe.wqe_index, a.deadline_ns); });
	failed |= apart([&] { return ibgda_wait_for_cq_event<M>(qp->send_cq, a.deadline_ns); });
	failed |= apart([&] { return ibgda_wait_until(reinterpret_cast<const ibgda_u64 *>(a.here.address), IBGDA_GE, a.value, a.deadline_ns, qp->send_cq); });
	return failed;
}

/* A kernel each, so that registers and local memory of one mode do not hide in another's. */
#define KERNEL(name, mode)                                                                          \
	extern "C" __global__ void name(ibgda_qp *qp, Arguments arguments, ibgda_u32 *result)       \
	{                                                                                           \
		*result = every_request<(mode)>(qp, arguments);                                     \
	}                                                                                           \
	extern "C" __global__ void name##_other(ibgda_qp *qp, Arguments arguments, ibgda_u32 *result) \
	{                                                                                           \
		*result = every_other<(mode) & ~IBGDA_SCOPES>(qp, arguments);                       \
	}

KERNEL(exclusive_host, 0)
KERNEL(shared_gpu_warp, IBGDA_ON_GPU | IBGDA_SHARED | IBGDA_WARP)
