/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What every kernel of a communicator is given, and its bounded waits. src/view.rs has the same structures. For nvcc and
 * NVRTC, and for a C++17 compiler with IBGDA_HOST.
 */
#ifndef TEAM_CUH
#define TEAM_CUH

#include <ibgda_device.cuh>

#ifdef IBGDA_HOST
#define KERNEL extern "C" void
#define THREAD 0u
#define THREADS 1u
#define BLOCK_SHARED
#define BLOCK_SYNC()
#else
/* No kernel here is for more threads. */
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK_SHARED __shared__
#define BLOCK_SYNC() __syncthreads()
#endif

#define MOST_RANKS 16
/* Where a rank's own part of its window begins. */
#define TEAM_HEADER_BYTES 4096

/* A status of ours, beyond those of the device header: the host has heard that a rank is gone, and says no more here. */
#define TEAM_ABORTED 0x10000u

/* What a kernel was at when it failed. */
enum team_act { TEAM_POSTING = 1, TEAM_AWAITING_DATA = 2, TEAM_AWAITING_ROOM = 3, TEAM_AWAITING_COMPLETION = 4 };

/* How a kernel ended: status is an ibgda_status or TEAM_ABORTED, peer the rank that it was dealing with. */
struct team_outcome {
	ibgda_u32 status;
	ibgda_u32 peer;
	ibgda_u32 act;
	ibgda_u32 reserved;
};

/* The beginning of each rank's window. */
struct team_header {
	ibgda_u64 abort; /* not 0: stop. The own host writes it */
	team_outcome outcome;
	ibgda_u64 reserved;
	/* Slot r is written by rank r. */
	ibgda_u64 entered[MOST_RANKS]; /* barriers */
	ibgda_u64 arrived[MOST_RANKS]; /* the last round whose block of rank r is here */
	ibgda_u64 taken[MOST_RANKS];   /* the last round whose block rank r has used up */
};
static_assert(sizeof(team_header) == 416, "as in src/view.rs");

struct team {
	ibgda_u32 rank, size;
	team_header *own;		  /* the own window, as this processor sees it */
	ibgda_region region;		  /* the same, for requests */
	ibgda_region windows[MOST_RANKS]; /* the peers' */
	ibgda_qp *qps[MOST_RANKS];	  /* to the peers; null to itself */
};
static_assert(sizeof(team) == 552, "as in src/view.rs");

/* Where something of the own window is in a peer's, for requests: they are laid out alike. */
IBGDA_FN ibgda_u64 team_place(const team &t, const ibgda_region &window, const void *mine)
{
	return window.address + (ibgda_u64)(static_cast<const ibgda_u8 *>(mine) - reinterpret_cast<const ibgda_u8 *>(t.own));
}

/* How long a wait looks at one thing before it looks at the others. */
#define TEAM_LOOK_NS 50000ull

IBGDA_FN ibgda_u64 team_sooner(ibgda_u64 deadline_ns)
{
	ibgda_u64 look = ibgda_clock_ns() + TEAM_LOOK_NS;
	return look < deadline_ns ? look : deadline_ns;
}

/* Between two looks: is there a reason to give up? An error of what was sent to `peer` is one. */
template <ibgda_u32 M> IBGDA_FN ibgda_u32 team_trouble(const team &t, ibgda_u32 peer, ibgda_u64 deadline_ns)
{
	if (ibgda_load_relaxed(&t.own->abort))
		return TEAM_ABORTED;
	ibgda_cqe cqe;
	ibgda_status status = ibgda_poll_cq<M>(t.qps[peer]->send_cq, &cqe, 0);
	if (status != IBGDA_OK && status != IBGDA_TIMEOUT)
		return status;
	return ibgda_clock_ns() >= deadline_ns ? IBGDA_TIMEOUT : IBGDA_OK;
}

/* Waits until a word of the own window, which `peer` writes, is at least `value`. */
template <ibgda_u32 M>
IBGDA_FN ibgda_u32 team_wait(const team &t, ibgda_u32 peer, const ibgda_u64 *word, ibgda_u64 value, ibgda_u64 deadline_ns)
{
	for (;;) {
		ibgda_status status = ibgda_wait_until(word, IBGDA_GE, value, team_sooner(deadline_ns), t.qps[peer]->send_cq);
		if (status != IBGDA_TIMEOUT)
			return status;
		ibgda_u32 trouble = team_trouble<M>(t, peer, deadline_ns);
		if (trouble)
			return trouble;
	}
}

/* Waits until all that was sent to `peer` has completed. */
template <ibgda_u32 M> IBGDA_FN ibgda_u32 team_quiet(const team &t, ibgda_u32 peer, ibgda_u64 deadline_ns)
{
	for (;;) {
		ibgda_status status = ibgda_quiet<M>(t.qps[peer], team_sooner(deadline_ns));
		if (status != IBGDA_TIMEOUT)
			return status;
		ibgda_u32 trouble = team_trouble<M>(t, peer, deadline_ns);
		if (trouble)
			return trouble;
	}
}

IBGDA_FN team_outcome team_ended(ibgda_u32 status, ibgda_u32 peer, ibgda_u32 act) { return {status, peer, act, 0}; }

#endif
