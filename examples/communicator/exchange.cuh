/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The communicator's kernels: an all-to-all of equal blocks by puts with signals. nvcc compiles them for a GPU, a C++
 * compiler with IBGDA_HOST for a thread.
 */
#ifndef EXCHANGE_CUH
#define EXCHANGE_CUH

#include <ibgda_device.cuh>

enum { MOST_RANKS = 16, BLOCK_BYTES = 16384, SILENCE_NS = 250000000 };

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

/*
 * Looks for a rank that has gone: tells every peer what it has been told before, and waits until their NICs have taken it.
 * The NIC of a rank that is only slow does; where a process has ended, nobody does, and the request fails when its retries
 * are used up, long before a deadline that a slow rank needs. `peer` is then that rank.
 */
DEVICE ibgda_status look_for_the_lost(const team &team, ibgda_u64 round, ibgda_u64 deadline_ns, ibgda_u32 &peer)
{
	ibgda_status status = IBGDA_OK;
	for (peer = 0; peer < team.size && status == IBGDA_OK; peer++)
		if (peer != team.rank)
			status = ibgda_signal(team.qps[peer], PLACE(team.windows[peer], taken, team.rank), team.windows[peer].rkey, round);
	if (status != IBGDA_OK) {
		peer--;
		return status;
	}
	for (peer = 0; peer < team.size; peer++) {
		if (peer == team.rank)
			continue;
		status = ibgda_quiet(team.qps[peer], deadline_ns);
		if (status != IBGDA_OK)
			return status;
	}
	return IBGDA_OK;
}

/* Waits for a word that `peer` writes. While it is silent, now and then looks whether all are there; if not, `peer` is who is not. */
DEVICE ibgda_status hear(const team &team, const ibgda_u64 *word, ibgda_u64 value, ibgda_u64 used_up, ibgda_u64 deadline_ns, ibgda_u32 &peer)
{
	for (ibgda_u32 speaker = peer;; peer = speaker) {
		ibgda_u64 until = ibgda_clock_ns() + SILENCE_NS;
		bool last = until >= deadline_ns;
		ibgda_status status = ibgda_wait_until(word, IBGDA_GE, value, last ? deadline_ns : until, team.qps[speaker]->send_cq);
		if (status != IBGDA_TIMEOUT || last)
			return status;
		status = look_for_the_lost(team, used_up, deadline_ns, peer);
		if (status != IBGDA_OK)
			return status;
	}
}

/* Sends every block of round `round` (from 1 on), and returns when every peer's has arrived. When it fails, `peer` is by whom. */
DEVICE ibgda_status exchange(const team &team, ibgda_u64 round, ibgda_u64 deadline_ns, ibgda_u32 &peer)
{
	for (peer = 0; peer < team.size; peer++) {
		if (peer == team.rank)
			continue;
		const ibgda_region &there = team.windows[peer];
		/* Its slot is free when it has used up what came before. */
		ibgda_status status = hear(team, &team.own->taken[peer], round - 1, round - 1, deadline_ns, peer);
		if (status == IBGDA_OK)
			status = ibgda_put_signal(team.qps[peer], PLACE(there, in, team.rank), there.rkey, PLACE(team.region, out, peer),
						  team.region.lkey, BLOCK_BYTES, PLACE(there, arrived, team.rank), there.rkey, round);
		if (status != IBGDA_OK)
			return status;
	}
	for (peer = 0; peer < team.size; peer++) {
		if (peer == team.rank)
			continue;
		ibgda_status status = hear(team, &team.own->arrived[peer], round, round - 1, deadline_ns, peer);
		/* What was sent has to be gone before the blocks are filled again. */
		if (status == IBGDA_OK)
			status = ibgda_quiet(team.qps[peer], deadline_ns);
		if (status != IBGDA_OK)
			return status;
	}
	return IBGDA_OK;
}

/* Tells the peers that their blocks of this round are used up. */
DEVICE ibgda_status acknowledge(const team &team, ibgda_u64 round, ibgda_u32 &peer)
{
	for (peer = 0; peer < team.size; peer++) {
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
