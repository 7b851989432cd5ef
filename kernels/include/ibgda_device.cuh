/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * GPU-initiated RDMA: what a kernel calls. For nvcc (sm_75 and later), NVRTC, and a C++17 compiler with IBGDA_HOST
 * defined, where CPU threads stand in for GPU threads.
 *
 *   ibgda/types.h     queue handles, completions, status codes; shared with the host
 *   ibgda/platform.h  stores, loads, atomics, fences, clock: all that differs between GPU and CPU
 *   ibgda/group.h     threads that post together
 *   ibgda/wqe.h       WQE builders, pure
 *   ibgda/poll.h      completions, errors, bounded waits, events, signals
 *   ibgda/post.h      reserve, write, publish; the doorbell
 *   ibgda/shared.h    the same for many threads at a time
 *   ibgda/checks.h    what is looked at before a request is posted
 *   ibgda/verbs.h     put, get, send, atomics, signal, recv, wait, quiet, fence
 *
 * The handles come from libibgda (ibgda_qp_device_handle). A typical kernel:
 *
 *   ibgda_u64 request;
 *   ibgda_status status = ibgda_put(qp, peer, 0, mine, 0, bytes, 0, &request);
 *   if (status == IBGDA_OK)
 *       status = ibgda_wait(qp, request, ibgda_clock_ns() + 1000000);
 *   if (status != IBGDA_OK)
 *       ...                       // qp->send_cq->error says which request failed first, and why
 *
 * What of a handle is constant is read once and stays in registers as long as the kernel runs. A kernel of more than 512
 * threads a block needs __launch_bounds__, as the compiler may give it more than 64 registers.
 */
#ifndef IBGDA_DEVICE_CUH
#define IBGDA_DEVICE_CUH

#include "ibgda/verbs.h"

#endif
