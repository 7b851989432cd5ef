/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The calls of include/ibgda_host.h: the device header, compiled for CPU threads, for programs that cannot include it.
 *
 * Each has the name of the header's own call, which is inline and has no symbol, so that the name is given to the linker
 * only. What a kernel says in a template argument comes from the handle here.
 */
#define IBGDA_HOST
#include <ibgda_device.cuh>

#define CALL(result, name, ...) extern "C" result host_##name(__VA_ARGS__) __asm__(#name)

namespace
{
template <ibgda_u32 M> struct Mode {
	static constexpr ibgda_u32 value = M;
};

/* call(Mode<M>) for the mode of a handle, of whose bits those of BlueFlame and of a GPU's memory mean nothing to a CPU. */
template <class Call> ibgda_status by_mode(ibgda_u32 mode, Call call)
{
	constexpr ibgda_u32 S = IBGDA_SHARED, C = IBGDA_COLLAPSED, D = IBGDA_CPU_DOORBELL;
	switch (mode & (S | C | D)) {
	case 0:
		return call(Mode<0>());
	case S:
		return call(Mode<S>());
	case C:
		return call(Mode<C>());
	case D:
		return call(Mode<D>());
	case S | C:
		return call(Mode<S | C>());
	case S | D:
		return call(Mode<S | D>());
	case C | D:
		return call(Mode<C | D>());
	default:
		return call(Mode<S | C | D>());
	}
}

/* Does a thread's own call have no such flag? Kernels are told with IBGDA_CHECKS_FULL only. */
bool unknown(ibgda_u32 flags) { return flags & (~IBGDA_ALL_FLAGS | IBGDA_SKIP); }
} // namespace

CALL(ibgda_u64, ibgda_clock_ns, void);
ibgda_u64 host_ibgda_clock_ns(void) { return ibgda_clock_ns(); }

/* POST(name, (parameters between the QP and the flags), (arguments)): a call that posts. */
#define POST(name, parameters, arguments)                                                                      \
	CALL(ibgda_status, name, ibgda_qp *qp, UNPACK parameters, ibgda_u32 flags, ibgda_u64 *request);         \
	ibgda_status host_##name(ibgda_qp *qp, UNPACK parameters, ibgda_u32 flags, ibgda_u64 *request)          \
	{                                                                                                       \
		if (!qp)                                                                                        \
			return IBGDA_ERR_INVALID_ARGUMENT;                                                      \
		if (unknown(flags))                                                                             \
			return IBGDA_ERR_FLAGS;                                                                 \
		return by_mode(qp->mode, [&](auto mode) {                                                       \
			return name<decltype(mode)::value>(qp, UNPACK arguments, flags, request);                \
		});                                                                                             \
	}
#define UNPACK(...) __VA_ARGS__

POST(ibgda_put, (ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes), (remote, rkey, local, lkey, bytes))
POST(ibgda_put_imm, (ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 immediate),
     (remote, rkey, local, lkey, bytes, immediate))
POST(ibgda_put_signal,
     (ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u64 signal, ibgda_u32 signal_rkey,
      ibgda_u64 value),
     (remote, rkey, local, lkey, bytes, signal, signal_rkey, value))
POST(ibgda_signal, (ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 value), (remote, rkey, value))
POST(ibgda_get, (ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u32 bytes), (local, lkey, remote, rkey, bytes))
POST(ibgda_fetch_add, (ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 add), (remote, rkey, local, lkey, add))
POST(ibgda_compare_swap, (ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 compare, ibgda_u64 swap),
     (remote, rkey, local, lkey, compare, swap))
POST(ibgda_send, (ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes), (local, lkey, bytes))

CALL(ibgda_status, ibgda_put_inline, ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, const void *data, ibgda_u32 bytes,
     ibgda_u32 flags, ibgda_u64 *request);
ibgda_status host_ibgda_put_inline(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, const void *data, ibgda_u32 bytes,
				   ibgda_u32 flags, ibgda_u64 *request)
{
	if (!qp || !data)
		return IBGDA_ERR_INVALID_ARGUMENT;
	if (unknown(flags))
		return IBGDA_ERR_FLAGS;
	return by_mode(qp->mode, [&](auto mode) {
		return ibgda_put_inline<decltype(mode)::value>(qp, remote, rkey, data, bytes, flags, request);
	});
}

/* TAKE(name, what, (parameters behind it), (arguments)): a call on a QP or a CQ that does not post. */
#define TAKE(name, what, parameters, arguments)                                                        \
	CALL(ibgda_status, name, what *queue, UNPACK parameters);                                       \
	ibgda_status host_##name(what *queue, UNPACK parameters)                                        \
	{                                                                                               \
		if (!queue)                                                                             \
			return IBGDA_ERR_INVALID_ARGUMENT;                                              \
		return by_mode(queue->mode, [&](auto mode) {                                            \
			return name<decltype(mode)::value>(queue, UNPACK arguments);                     \
		});                                                                                     \
	}

TAKE(ibgda_recv, ibgda_qp, (ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes), (local, lkey, bytes))
TAKE(ibgda_wait, ibgda_qp, (ibgda_u64 request, ibgda_u64 deadline_ns), (request, deadline_ns))
TAKE(ibgda_quiet, ibgda_qp, (ibgda_u64 deadline_ns), (deadline_ns))
TAKE(ibgda_write_doorbell, ibgda_qp, (ibgda_u64 producer_index), (producer_index))
TAKE(ibgda_wait_for_cq_event, ibgda_cq, (ibgda_u64 deadline_ns), (deadline_ns))

CALL(ibgda_status, ibgda_poll_cq, ibgda_cq *cq, ibgda_cqe *cqe, ibgda_u64 deadline_ns);
ibgda_status host_ibgda_poll_cq(ibgda_cq *cq, ibgda_cqe *cqe, ibgda_u64 deadline_ns)
{
	if (!cq || !cqe)
		return IBGDA_ERR_INVALID_ARGUMENT;
	*cqe = {};
	cqe->kind = IBGDA_CQE_INVALID;
	return by_mode(cq->mode, [&](auto mode) { return ibgda_poll_cq<decltype(mode)::value>(cq, cqe, deadline_ns); });
}

CALL(ibgda_status, ibgda_wait_until, const ibgda_u64 *word, ibgda_comparison comparison, ibgda_u64 value, ibgda_u64 deadline_ns,
     const ibgda_cq *cq);
ibgda_status host_ibgda_wait_until(const ibgda_u64 *word, ibgda_comparison comparison, ibgda_u64 value, ibgda_u64 deadline_ns,
				   const ibgda_cq *cq)
{
	if (!word || comparison > IBGDA_LT)
		return IBGDA_ERR_INVALID_ARGUMENT;
	return ibgda_wait_until(word, comparison, value, deadline_ns, cq);
}
