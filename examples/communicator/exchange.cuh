/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The communicator's kernels: an all-to-all of equal blocks by puts with signals. nvcc compiles them for a GPU, a C++
 * compiler with IBGDA_HOST for a thread.
 */
#ifndef EXCHANGE_CUH
#define EXCHANGE_CUH

#include <ibgda_device.cuh>

enum { MOST_RANKS = 16, BLOCK_BYTES = 16384 };

/* What each rank registers, and its peers write into. Slot r of what comes belongs to rank r. */
struct window {
	unsigned char out[MOST_RANKS][BLOCK_BYTES]; /* block r is for rank r */
	unsigned char in[MOST_RANKS][BLOCK_BYTES];
	ibgda_u64 arrived[MOST_RANKS]; /* the last round whose block of rank r is here */
	ibgda_u64 taken[MOST_RANKS];   /* the last round whose block rank r has used up */
};

/* What a kernel is given. */
struct team {
	ibgda_u32 rank, size;
	window *own;
	ibgda_region region;		      /* of `own` */
	ibgda_region windows[MOST_RANKS]; /* the peers' */
	ibgda_qp *qps[MOST_RANKS];	      /* to the peers */
};


/* Where a slot of a rank's window is for requests. */
#define PLACE(region, field, slot) ((region).address + __builtin_offsetof(window, field) + (slot) * sizeof(window::field[0]))

#if defined(__CUDACC__) && !defined(IBGDA_HOST)
#define DEVICE static __device__
#else
#define DEVICE static inline
#endif

/* Sends every block of round `round` (from 1 on), and returns when every peer's has arrived. */
DEVICE ibgda_status exchange(const team &team, ibgda_u64 round, ibgda_u64 deadline_ns)
{
	for (ibgda_u32 peer = 0; peer < team.size; peer++) {
		if (peer == team.rank)
			continue;
		const ibgda_region &there = team.windows[peer];
		/* Its slot is free when it has used up what came before. */
		ibgda_status status = ibgda_wait_until(&team.own->taken[peer], IBGDA_GE, round - 1, deadline_ns, team.qps[peer]->send_cq);
		if (status == IBGDA_OK)
			status = ibgda_put_signal(team.qps[peer], PLACE(there, in, team.rank), there.rkey, PLACE(team.region, out, peer),
						  team.region.lkey, BLOCK_BYTES, PLACE(there, arrived, team.rank), there.rkey, round);
		if (status != IBGDA_OK)
			return status;
	}
	for (ibgda_u32 peer = 0; peer < team.size; peer++) {
		if (peer == team.rank)
			continue;
		ibgda_status status = ibgda_wait_until(&team.own->arrived[peer], IBGDA_GE, round, deadline_ns, team.qps[peer]->send_cq);
		/* What was sent has to be gone before the blocks are filled again; an error of it is the reason for a block that is missing. */
		ibgda_status sent = ibgda_quiet(team.qps[peer], deadline_ns);
		if (sent != IBGDA_OK || status != IBGDA_OK)
			return sent != IBGDA_OK ? sent : status;
	}
	return IBGDA_OK;
}

/* Tells the peers that their blocks of this round are used up. */
DEVICE ibgda_status acknowledge(const team &team, ibgda_u64 round)
{
	for (ibgda_u32 peer = 0; peer < team.size; peer++) {
		if (peer == team.rank)
			continue;
		const ibgda_region &there = team.windows[peer];
		ibgda_status status = ibgda_signal(team.qps[peer], PLACE(there, taken, team.rank), there.rkey, round);
		if (status != IBGDA_OK)
			return status;
	}
	return IBGDA_OK;
}

#endif
