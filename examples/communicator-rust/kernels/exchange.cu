/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The communicator's own kernels, one thread each: an all-to-all of equal blocks by puts with signals, and a barrier.
 */
#ifndef TEAM_CUH
#include "team.cuh"
#endif

struct exchange_call {
	ibgda_u64 round; /* from 1 on */
	ibgda_u64 block_bytes;
	ibgda_u64 timeout_ns;
};

/* Block p of what goes out is for rank p; block p of what comes in, behind those, is from rank p. */
IBGDA_FN ibgda_u64 block_place(const team &t, const ibgda_region &window, bool in, ibgda_u32 p, ibgda_u64 block_bytes)
{
	return window.address + TEAM_HEADER_BYTES + ((in ? t.size : 0) + p) * block_bytes;
}

template <ibgda_u32 M> IBGDA_FN team_outcome all_to_all(const team &t, const exchange_call &call)
{
	const ibgda_u64 deadline = ibgda_clock_ns() + call.timeout_ns;
	/* The host has used up what came in the round before: it has called again. */
	for (ibgda_u32 k = 1; k < t.size && call.round > 1; k++) {
		const ibgda_u32 peer = (t.rank + k) % t.size;
		const ibgda_region &there = t.windows[peer];
		ibgda_status status = ibgda_signal<M>(t.qps[peer], team_place(t, there, &t.own->taken[t.rank]), there.rkey, call.round - 1);
		if (status != IBGDA_OK)
			return team_ended(status, peer, TEAM_POSTING);
	}
	for (ibgda_u32 k = 1; k < t.size; k++) {
		const ibgda_u32 peer = (t.rank + k) % t.size;
		const ibgda_region &there = t.windows[peer];
		ibgda_u32 status = team_wait<M>(t, peer, &t.own->taken[peer], call.round - 1, deadline);
		if (status)
			return team_ended(status, peer, TEAM_AWAITING_ROOM);
		status = ibgda_put_signal<M>(t.qps[peer], block_place(t, there, true, t.rank, call.block_bytes), there.rkey,
					     block_place(t, t.region, false, peer, call.block_bytes), t.region.lkey,
					     (ibgda_u32)call.block_bytes, team_place(t, there, &t.own->arrived[t.rank]), there.rkey, call.round);
		if (status)
			return team_ended(status, peer, TEAM_POSTING);
	}
	for (ibgda_u32 k = 1; k < t.size; k++) {
		const ibgda_u32 peer = (t.rank + k) % t.size;
		ibgda_u32 status = team_wait<M>(t, peer, &t.own->arrived[peer], call.round, deadline);
		if (status)
			return team_ended(status, peer, TEAM_AWAITING_DATA);
		/* The host may fill the blocks again. */
		status = team_quiet<M>(t, peer, deadline);
		if (status)
			return team_ended(status, peer, TEAM_AWAITING_COMPLETION);
	}
	return team_ended(IBGDA_OK, t.rank, 0);
}

template <ibgda_u32 M> IBGDA_FN team_outcome barrier(const team &t, const exchange_call &call)
{
	const ibgda_u64 deadline = ibgda_clock_ns() + call.timeout_ns;
	for (ibgda_u32 k = 1; k < t.size; k++) {
		const ibgda_u32 peer = (t.rank + k) % t.size;
		const ibgda_region &there = t.windows[peer];
		ibgda_status status = ibgda_signal<M>(t.qps[peer], team_place(t, there, &t.own->entered[t.rank]), there.rkey, call.round);
		if (status != IBGDA_OK)
			return team_ended(status, peer, TEAM_POSTING);
	}
	for (ibgda_u32 k = 1; k < t.size; k++) {
		const ibgda_u32 peer = (t.rank + k) % t.size;
		ibgda_u32 status = team_wait<M>(t, peer, &t.own->entered[peer], call.round, deadline);
		if (status)
			return team_ended(status, peer, TEAM_AWAITING_DATA);
		status = team_quiet<M>(t, peer, deadline);
		if (status)
			return team_ended(status, peer, TEAM_AWAITING_COMPLETION);
	}
	return team_ended(IBGDA_OK, t.rank, 0);
}

KERNEL communicator_all_to_all(team t, exchange_call call)
{
	if (THREAD)
		return;
	IBGDA_BY_ROUTE(t.qps[(t.rank + 1) % t.size], 0, t.own->outcome = all_to_all<route>(t, call));
}

KERNEL communicator_barrier(team t, exchange_call call)
{
	if (THREAD)
		return;
	IBGDA_BY_ROUTE(t.qps[(t.rank + 1) % t.size], 0, t.own->outcome = barrier<route>(t, call));
}
