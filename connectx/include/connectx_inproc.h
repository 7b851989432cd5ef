/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The ConnectX model in a process, for C, C++ and CUDA programs: queues, records and doorbell pages are memory of the
 * caller, for example what cudaHostRegister took; one engine thread serves them. Build the library with
 *
 *   cargo rustc -p connectx --lib --release --crate-type staticlib
 *
 * and link libconnectx.a with -lpthread -ldl -lm. Calls return 0, or -1 with the reason in cx_error(). Functions are
 * numbered from 0. Any thread may call; cx_close only when no other call is under way.
 */
#ifndef CONNECTX_INPROC_H
#define CONNECTX_INPROC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cx_fabric cx_fabric;

/* What a memory key permits, besides local reads. */
#define CX_LOCAL_WRITE 1u
#define CX_REMOTE_READ 2u
#define CX_REMOTE_WRITE 4u
#define CX_REMOTE_ATOMIC 8u
#define CX_ACCESS_ALL 15u

/* An RC queue pair with CQs and UAR page of its own. Addresses are the CPU's; a GPU has its own for the same memory. */
struct cx_qp {
	uint32_t qpn, uar, send_cqn, recv_cqn;
	uint64_t send_ring, recv_ring;	/* slots of 64 and of 16 bytes */
	uint64_t record;		/* two big-endian words: receive counter, send counter */
	uint64_t send_cq_ring, send_cq_record;
	uint64_t recv_cq_ring, recv_cq_record;
	uint64_t doorbell;		/* send doorbell register */
	uint64_t arm;			/* CQ doorbell register */
};

/* Why the last call of this thread failed; valid until its next one fails. */
const char *cx_error(void);

/*
 * `nics` functions, 1 to 64. The engine spins for `spin_ns` after it last had work before it sleeps between looks;
 * UINT64_MAX: always. Null on failure.
 */
cx_fabric *cx_open(uint32_t nics, uint64_t spin_ns);
/* Ends the engine thread. Then nothing touches registered memory any more. Null does nothing. */
void cx_close(cx_fabric *fabric);

/* Lets the engine reach memory, which stays mapped until cx_unregister or cx_close has returned. */
int cx_register(cx_fabric *fabric, void *addr, size_t len);
int cx_unregister(cx_fabric *fabric, void *addr);
/* Non-zero: the engine stops, as firmware that hangs. 0: it goes on. */
void cx_freeze(cx_fabric *fabric, int frozen);

/* LID of a function's port; 0 if there is no such function. */
uint16_t cx_lid(const cx_fabric *fabric, uint32_t nic);
/* Address of its status page (4096 bytes, words as in uapi/ibgda.h). */
uint64_t cx_status_page(const cx_fabric *fabric, uint32_t nic);
/* A counter by its name in `connectx ctl counts`, such as "torn_wqes"; 0 for an unknown name. */
uint64_t cx_count(const cx_fabric *fabric, uint32_t nic, const char *name);

int cx_alloc_pd(cx_fabric *fabric, uint32_t nic, uint32_t *pd);
/* A key, both lkey and rkey, for registered memory. `access`: CX_LOCAL_WRITE and so on. */
int cx_create_mkey(cx_fabric *fabric, uint32_t nic, uint32_t pd, uint64_t addr, uint64_t len, uint32_t access,
		   uint32_t *key);

/* Bytes of a queue pair's block; 0 if a depth is no power of two up to 32768 (recv_depth may be 0). */
size_t cx_qp_bytes(uint32_t send_depth, uint32_t recv_depth);
/*
 * A queue pair in RESET. `block`: cx_qp_bytes of registered memory, aligned to 4096, which the call clears; `uar`: the
 * doorbell page, aligned to 4096, or null for the one in the block.
 */
int cx_open_qp(cx_fabric *fabric, uint32_t nic, uint32_t pd, uint32_t send_depth, uint32_t recv_depth, int collapsed,
	       void *block, void *uar, struct cx_qp *qp);
/* RESET to INIT to RTR to RTS, with all remote access, MTU 4096, ACK timeout code 14, 7 retries. */
int cx_connect(cx_fabric *fabric, uint32_t nic, uint32_t qpn, uint16_t peer_lid, uint32_t peer_qpn);
int cx_to_error(cx_fabric *fabric, uint32_t nic, uint32_t qpn);
/* Ends the queue pair, its CQs and its UAR page; the memory is the caller's again. */
int cx_close_qp(cx_fabric *fabric, uint32_t nic, const struct cx_qp *qp);
/* Non-zero: the function is lost, as by a reset: the status page says so, all its objects are gone. 0: it comes back. */
int cx_lose(cx_fabric *fabric, uint32_t nic, int lost);

#ifdef __cplusplus
}
#endif

#endif
