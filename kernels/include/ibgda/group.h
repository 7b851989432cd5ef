/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Threads that post together: one reservation, one pair of fences and one doorbell for all of them.
 *
 * A warp's or block's call is made by all its threads. Threads that call by themselves on a shared QP are put together as
 * they come: those of a warp that are at the same place with the same QP. An exclusive QP's thread is alone.
 */
#ifndef IBGDA_GROUP_H
#define IBGDA_GROUP_H

#include "ibgda/platform.h"

struct ibgda_group {
	ibgda_u32 lanes;	/* of this warp, as a mask */
	ibgda_u32 count;	/* threads with something to post */
	ibgda_u32 rank;		/* this one's place among them */
	bool leads;		/* does for all what one does */
};

#if defined(__CUDACC__) && !defined(IBGDA_HOST)

IBGDA_FN ibgda_u32 ibgda_lane()
{
	ibgda_u32 lane;
	asm("mov.u32 %0, %%laneid;" : "=r"(lane));
	return lane;
}

IBGDA_FN ibgda_u32 ibgda_lanes_below() { return (1u << ibgda_lane()) - 1; }

IBGDA_FN ibgda_u32 ibgda_thread_of_block()
{
	return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

/* Is this thread the only one of its warp at this place? A hint: the others may come, or go. */
IBGDA_FN bool ibgda_is_only_lane()
{
	const ibgda_u32 active = __activemask();
	return !(active & (active - 1));
}

template <ibgda_u32 M> IBGDA_FN void ibgda_group_sync(const ibgda_group &group)
{
	if (M & IBGDA_BLOCK)
		__syncthreads();
	else
		__syncwarp(group.lanes);
}

template <ibgda_u32 M> IBGDA_FN bool ibgda_group_any(const ibgda_group &group, bool what)
{
	if (M & IBGDA_BLOCK)
		return __syncthreads_or(what);
	return __any_sync(group.lanes, what);
}

/* The leader's value, for all. */
template <ibgda_u32 M> IBGDA_FN ibgda_u64 ibgda_group_share(const ibgda_group &group, ibgda_u64 value)
{
	if (M & IBGDA_BLOCK) {
		__shared__ ibgda_u64 shared;
		__syncthreads();
		if (group.leads)
			shared = value;
		__syncthreads();
		return shared;
	}
	return __shfl_sync(group.lanes, value, __ffs((int)group.lanes) - 1);
}

/* The highest value, for all. */
template <ibgda_u32 M> IBGDA_FN ibgda_u64 ibgda_group_max(const ibgda_group &group, ibgda_u64 value)
{
	for (int step = 16; step; step /= 2) {
		ibgda_u64 other = __shfl_xor_sync(group.lanes, value, step);
		/* Of a block's last warp not all lanes need be there. */
		value = (group.lanes >> (ibgda_lane() ^ (ibgda_u32)step) & 1) && other > value ? other : value;
	}
	if (M & IBGDA_BLOCK) {
		__shared__ unsigned long long highest;
		__syncthreads();
		if (group.leads)
			highest = 0;
		__syncthreads();
		if (ibgda_lane() == 0)
			atomicMax(&highest, value);
		__syncthreads();
		value = highest;
	}
	return value;
}

template <ibgda_u32 M> IBGDA_FN ibgda_group ibgda_group_form(const void *qp, bool posts)
{
	ibgda_group group;
	if (M & IBGDA_BLOCK) {
		__shared__ ibgda_u32 counts[32];
		ibgda_u32 thread = ibgda_thread_of_block(), warp = thread / 32;
		ibgda_u32 threads = blockDim.x * blockDim.y * blockDim.z;
		group.lanes = threads - warp * 32 >= 32 ? ~0u : (1u << (threads & 31)) - 1;
		ibgda_u32 posters = __ballot_sync(group.lanes, posts);
		__syncthreads();
		if (ibgda_lane() == 0)
			counts[warp] = (ibgda_u32)__popc(posters);
		__syncthreads();
		group.count = 0;
		group.rank = (ibgda_u32)__popc(posters & ibgda_lanes_below());
		for (ibgda_u32 i = 0; i * 32 < threads; i++) {
			if (i < warp)
				group.rank += counts[i];
			group.count += counts[i];
		}
		group.leads = thread == 0;
		return group;
	}
	if (M & IBGDA_WARP) {
		group.lanes = ~0u;
	} else {
		/* What comes back is those that are here. The mask itself does not do: the compiler may look again, elsewhere. */
		group.lanes = __match_any_sync(__activemask(), (unsigned long long)qp);
	}
	ibgda_u32 posters = M & IBGDA_WARP ? __ballot_sync(group.lanes, posts) : group.lanes;
	group.count = (ibgda_u32)__popc(posters);
	group.rank = (ibgda_u32)__popc(posters & ibgda_lanes_below());
	group.leads = (group.lanes & ibgda_lanes_below()) == 0;
	return group;
}

#else /* CPU threads: each is a group of its own */

IBGDA_FN bool ibgda_is_only_lane() { return true; }

template <ibgda_u32 M> IBGDA_FN void ibgda_group_sync(const ibgda_group &) {}
template <ibgda_u32 M> IBGDA_FN bool ibgda_group_any(const ibgda_group &, bool what) { return what; }
template <ibgda_u32 M> IBGDA_FN ibgda_u64 ibgda_group_share(const ibgda_group &, ibgda_u64 value) { return value; }
template <ibgda_u32 M> IBGDA_FN ibgda_u64 ibgda_group_max(const ibgda_group &, ibgda_u64 value) { return value; }

template <ibgda_u32 M> IBGDA_FN ibgda_group ibgda_group_form(const void *, bool posts) { return {1, posts ? 1u : 0u, 0, true}; }

#endif

#endif
