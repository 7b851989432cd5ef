/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What ibgda_kernel_jobs and ibgda_kernel_streams (transfer.cu) are given by the host, and give back. Plain C, as
 * ibgda/types.h: bindgen reads it too.
 */
#ifndef IBGDA_REQUESTS_H
#define IBGDA_REQUESTS_H

#include "ibgda/types.h"

/* What a request does. */
typedef enum ibgda_request_kind {
	/* RDMA WRITE. */
	IBGDA_REQUEST_PUT = 0,
	/* RDMA WRITE of `data`. */
	IBGDA_REQUEST_PUT_INLINE = 1,
	/* RDMA WRITE, then `value` at `signal`. */
	IBGDA_REQUEST_PUT_SIGNAL = 2,
	/* RDMA READ. */
	IBGDA_REQUEST_GET = 3,
	/* Adds `value`; `local` takes the old word. */
	IBGDA_REQUEST_FETCH_ADD = 4,
	/* Swaps in `value` where the word is `compare`; `local` takes the old word. */
	IBGDA_REQUEST_COMPARE_SWAP = 5,
	IBGDA_REQUEST_SEND = 6,
	/* Posts a receive. */
	IBGDA_REQUEST_RECV = 7,
	/* Takes a completion of the receive queue: `index` and `received` are its. */
	IBGDA_REQUEST_POLL_RECV = 8
} ibgda_request_kind;

/* One request, and what became of it. */
struct ibgda_request {
	ibgda_u64 local;	/* of puts and sends the source, of others where what comes back goes */
	ibgda_u64 remote;
	ibgda_u64 value;
	ibgda_u64 compare;
	ibgda_u64 signal;	/* 8-byte aligned, under rkey */
	ibgda_u32 kind;
	ibgda_u32 bytes;
	ibgda_u32 lkey;
	ibgda_u32 rkey;
	ibgda_u32 flags;	/* of the device calls: IBGDA_FENCED and so on */
	ibgda_u32 wait;		/* not 0: the next one is posted when this one is complete */
	ibgda_u8 data[32];
	/* Written by the kernel. */
	ibgda_u64 index;	/* of the (last) WQE, counted from the queue's start */
	ibgda_u64 begun_ns;	/* before it was posted; if it is waited for, when it was complete */
	ibgda_u64 ended_ns;
	ibgda_u32 status;	/* ibgda_status */
	ibgda_u32 received;	/* bytes */
};

/* The requests of one QP, in order, up to the first that fails; then all are waited for. */
struct ibgda_job {
	struct ibgda_qp *qp;
	struct ibgda_request *requests;
	ibgda_u64 timeout_ns;	/* for each wait */
	ibgda_u32 count;
	/* Written by the kernel. */
	ibgda_u32 status;	/* the first that is not IBGDA_OK */
	ibgda_u32 done;		/* requests that were posted, and if need be waited for */
	ibgda_u32 reserved;
};

/* RDMA WRITEs of one length, as fast as they go: request i between slots i of two regions, a doorbell for each `batch`. */
struct ibgda_stream {
	struct ibgda_qp *qp;
	ibgda_u64 local;
	ibgda_u64 remote;
	ibgda_u64 stride;	/* bytes from slot to slot */
	ibgda_u64 timeout_ns;	/* for the wait at the end */
	ibgda_u32 lkey;
	ibgda_u32 rkey;
	ibgda_u32 bytes;
	ibgda_u32 count;
	ibgda_u32 batch;	/* 1 to half of the ring's depth */
	/* Written by the kernel. */
	ibgda_u32 status;
	ibgda_u64 begun_ns;
	ibgda_u64 ended_ns;	/* when the last was complete */
};

#endif
