/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A list of device calls for each block of a kernel, made by the host: what ibgda_kernel_steps (steps.cu) runs. Plain C, of
 * which the Rust side is generated.
 */
#ifndef IBGDA_STEPS_H
#define IBGDA_STEPS_H

#include "ibgda/types.h"

/* What a step does; in parentheses which of its members it takes besides the QP. */
enum ibgda_step_kind {
	IBGDA_STEP_PUT = 1,		/* remote, rkey, local, lkey, bytes */
	IBGDA_STEP_PUT_INLINE = 2,	/* remote, rkey, value, bytes up to 8 */
	IBGDA_STEP_GET = 3,		/* local, lkey, remote, rkey, bytes */
	IBGDA_STEP_FETCH_ADD = 4,	/* remote, rkey, local, lkey, value */
	IBGDA_STEP_COMPARE_SWAP = 5,	/* remote, rkey, local, lkey, compare, value */
	IBGDA_STEP_SEND = 6,		/* local, lkey, bytes */
	IBGDA_STEP_RECV = 7,		/* local, lkey, bytes */
	IBGDA_STEP_PUT_SIGNAL = 8,	/* remote, rkey, local, lkey, bytes, compare: the signal's address, value: what it becomes */
	IBGDA_STEP_QUIET = 9,		/* timeout_ns */
	IBGDA_STEP_POLL_RECV = 10,	/* timeout_ns; result: bytes received */
	IBGDA_STEP_POLL_SEND = 11,	/* timeout_ns: a completion of the send queue, which may never come */
	IBGDA_STEP_WAIT_UNTIL = 12,	/* word, value, timeout_ns: until the word is not less */
	/* count puts of their numbers to word number % slots of the peer's memory, each waited for when the ring is full, the
	 * last one at the end: remote, rkey, count, slots, timeout_ns */
	IBGDA_STEP_STORM = 13,
	/* count puts, each waited for: remote, rkey, local, lkey, bytes, count, timeout_ns; word: count words for how long each took */
	IBGDA_STEP_ROUNDS = 14,
	/* Does nothing; result: the word. */
	IBGDA_STEP_LOAD = 15
};

struct ibgda_step {
	ibgda_u64 qp;			/* a QP's handle, where the kernel sees it; of LOAD and WAIT_UNTIL may be 0 */
	ibgda_u64 remote, local;	/* as the NIC knows them */
	ibgda_u64 word;			/* as the kernel sees it */
	ibgda_u64 value, compare;
	ibgda_u64 timeout_ns;
	ibgda_u64 count, slots;
	ibgda_u32 rkey, lkey;
	ibgda_u32 bytes;
	ibgda_u32 flags;		/* IBGDA_UNSIGNALED and so on */
	ibgda_u32 kind;
	ibgda_u32 reserved;
	/* What came of it. */
	ibgda_u32 status;		/* ibgda_status */
	ibgda_u32 done;			/* it was reached */
	ibgda_u64 result;
	ibgda_u64 began_ns, ended_ns;	/* by the clock that deadlines are on */
};

/* The argument of the kernel. Block b runs steps b * each to b * each + each - 1, and none after one that failed. */
struct ibgda_task {
	ibgda_u64 steps;		/* where the kernel sees them */
	ibgda_u32 each;
	ibgda_u32 reserved;
};

#endif
