/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The device calls behind C names, and the loops that tests need to run at a kernel's speed. */
#include <ibgda_device.cuh>

#include <cstring>

namespace {

void bytes_of(const ibgda_wqe &wqe, void *out) { std::memcpy(out, wqe.quad, IBGDA_WQEBB_BYTES); }

template <ibgda_u32 M>
ibgda_status put_storm(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 slots, ibgda_u64 count, ibgda_u64 signal_every,
		       ibgda_u64 doorbell_every, ibgda_u64 deadline_ns)
{
	for (ibgda_u64 i = 0; i < count; i++) {
		ibgda_u32 flags = 0;
		if ((i + 1) % signal_every && i + 1 != count)
			flags |= IBGDA_UNSIGNALED;
		if ((i + 1) % doorbell_every && i + 1 != count)
			flags |= IBGDA_NO_DOORBELL;
		ibgda_u64 value = qp->producer;
		ibgda_status status = ibgda_put_inline<M>(qp, remote + value % slots * 8, rkey, &value, 8, flags);
		if (status != IBGDA_OK)
			return status;
	}
	return ibgda_quiet<M>(qp, deadline_ns);
}

template <ibgda_u32 M>
ibgda_status shared_adds(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 count,
			 ibgda_u64 deadline_ns)
{
	for (ibgda_u64 i = 0; i < count; i++) {
		ibgda_status status = ibgda_fetch_add<M>(qp, remote, rkey, local, lkey, 1, i % 8 ? IBGDA_UNSIGNALED : 0);
		if (status != IBGDA_OK)
			return status;
	}
	return ibgda_quiet<M>(qp, deadline_ns);
}

} // namespace

extern "C" {

/* Builders: 64 bytes to out, the number of 16-byte segments returned. */

ibgda_u32 test_wqe_write(ibgda_u32 opcode, ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local,
			 ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 immediate, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_write(static_cast<ibgda_opcode>(opcode), index, qpn, remote, rkey, local, lkey, bytes, immediate, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_read(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
			ibgda_u32 bytes, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_read(index, qpn, remote, rkey, local, lkey, bytes, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_write_inline(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, const void *data, ibgda_u32 bytes,
				ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_write_inline(index, qpn, remote, rkey, data, bytes, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_send(ibgda_u32 opcode, ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes,
			ibgda_u32 immediate, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_send(static_cast<ibgda_opcode>(opcode), index, qpn, local, lkey, bytes, immediate, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_fetch_add(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
			     ibgda_u64 add, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_fetch_add(index, qpn, remote, rkey, local, lkey, add, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_compare_swap(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				ibgda_u64 compare, ibgda_u64 swap, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_compare_swap(index, qpn, remote, rkey, local, lkey, compare, swap, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_write_value(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 value, ibgda_u32 bytes,
			       ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_write_value(index, qpn, remote, rkey, value, bytes, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_fetch_add32(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
			       ibgda_u32 add, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_fetch_add32(index, qpn, remote, rkey, local, lkey, add, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_compare_swap32(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey,
				  ibgda_u32 compare, ibgda_u32 swap, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_compare_swap32(index, qpn, remote, rkey, local, lkey, compare, swap, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_dump(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_dump(index, qpn, local, lkey, bytes, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u32 test_wqe_nop(ibgda_u64 index, ibgda_u32 qpn, ibgda_u32 flags, void *out)
{
	ibgda_wqe wqe = ibgda_wqe_nop(index, qpn, flags);
	bytes_of(wqe, out);
	return wqe.segments;
}

ibgda_u64 test_doorbell_value(ibgda_u64 producer_index, ibgda_u32 qpn) { return ibgda_doorbell_value(producer_index, qpn); }

ibgda_u64 test_clock_ns() { return ibgda_clock_ns(); }

/* Calls, on the route that the handle was made for. */

ibgda_u32 test_put(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 flags,
		   ibgda_u64 *request)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_put<route>(qp, remote, rkey, local, lkey, bytes, flags, request));
}

ibgda_u32 test_put_imm(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes,
		       ibgda_u32 immediate, ibgda_u32 flags, ibgda_u64 *request)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_put_imm<route>(qp, remote, rkey, local, lkey, bytes, immediate, flags, request));
}

ibgda_u32 test_put_region(ibgda_qp *qp, const ibgda_region *to, ibgda_u64 to_offset, const ibgda_region *from, ibgda_u64 from_offset,
			  ibgda_u32 bytes)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_put<route>(qp, *to, to_offset, *from, from_offset, bytes));
}

ibgda_u32 test_put_inline(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, const void *data, ibgda_u32 bytes, ibgda_u32 flags,
			  ibgda_u64 *request)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_put_inline<route>(qp, remote, rkey, data, bytes, flags, request));
}

ibgda_u32 test_get(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u32 bytes, ibgda_u32 flags,
		   ibgda_u64 *request)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_get<route>(qp, local, lkey, remote, rkey, bytes, flags, request));
}

ibgda_u32 test_send(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 flags, ibgda_u64 *request)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_send<route>(qp, local, lkey, bytes, flags, request));
}

ibgda_u32 test_fetch_add(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 add, ibgda_u32 flags,
			 ibgda_u64 *request)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_fetch_add<route>(qp, remote, rkey, local, lkey, add, flags, request));
}

ibgda_u32 test_compare_swap(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 compare,
			    ibgda_u64 swap, ibgda_u32 flags, ibgda_u64 *request)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_compare_swap<route>(qp, remote, rkey, local, lkey, compare, swap, flags, request));
}

ibgda_u32 test_recv(ibgda_qp *qp, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_recv<route>(qp, local, lkey, bytes));
}

ibgda_u32 test_wait(ibgda_qp *qp, ibgda_u64 request, ibgda_u64 deadline_ns)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_wait<route>(qp, request, deadline_ns));
}

ibgda_u32 test_quiet(ibgda_qp *qp, ibgda_u64 deadline_ns)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_quiet<route>(qp, deadline_ns));
}

ibgda_u32 test_put_blueflame(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes,
			     ibgda_u64 *request)
{
	return ibgda_put<IBGDA_BLUEFLAME>(qp, remote, rkey, local, lkey, bytes, 0, request);
}

ibgda_u32 test_wait_for_cq_event(ibgda_cq *cq, ibgda_u64 deadline_ns) { return ibgda_wait_for_cq_event(cq, deadline_ns); }
ibgda_u32 test_poll_cq(ibgda_cq *cq, ibgda_cqe *cqe, ibgda_u64 deadline_ns) { return ibgda_poll_cq(cq, cqe, deadline_ns); }

ibgda_u32 test_write_doorbell(ibgda_qp *qp, ibgda_u64 producer_index)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_write_doorbell<route>(qp, producer_index));
}

ibgda_u32 test_reserve(ibgda_qp *qp, ibgda_u64 *index)
{
	IBGDA_BY_ROUTE(qp, 0, return ibgda_reserve<route>(qp, index));
}

/*
 * `count` 8-byte inline writes of the request's own index to remote[index % slots], one completion in `signal_every`, one
 * doorbell in `doorbell_every`, and then quiet.
 */
ibgda_u32 test_put_storm(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 slots, ibgda_u64 count, ibgda_u64 signal_every,
			 ibgda_u64 doorbell_every, ibgda_u64 deadline_ns)
{
	IBGDA_BY_ROUTE(qp, 0, return put_storm<route>(qp, remote, rkey, slots, count, signal_every, doorbell_every, deadline_ns));
}

/* One of many threads on a shared QP: `count` fetch-adds of 1, one completion in eight, and then quiet. */
ibgda_u32 test_shared_adds(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u64 count,
			   ibgda_u64 deadline_ns)
{
	IBGDA_BY_ROUTE(qp, IBGDA_SHARED, return shared_adds<route>(qp, remote, rkey, local, lkey, count, deadline_ns));
}

} /* extern "C" */
