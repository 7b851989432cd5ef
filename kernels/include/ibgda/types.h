/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What the host prepares and a kernel uses: queue handles, completions, status codes.
 *
 * Plain C, so that C, C++, CUDA, NVRTC and bindgen (the Rust definitions) read the same file. Addresses are those of the
 * executing processor: GPU virtual addresses in a CUDA kernel, process addresses for CPU threads.
 */
#ifndef IBGDA_TYPES_H
#define IBGDA_TYPES_H

/* NVRTC has no <stdint.h>. */
typedef unsigned char ibgda_u8;
typedef unsigned short ibgda_u16;
typedef unsigned int ibgda_u32;
typedef unsigned long long ibgda_u64;

/* Of the first member of a structure: its alignment is the structure's. */
#ifdef __cplusplus
#define IBGDA_ALIGNED(bytes) alignas(bytes)
#else
#define IBGDA_ALIGNED(bytes) _Alignas(bytes)
#endif

/* Bytes of one send queue slot (a WQE basic block), and of one completion. */
#define IBGDA_WQEBB_BYTES 64
#define IBGDA_CQE_BYTES 64
/* Bytes of one receive queue slot: one data segment. */
#define IBGDA_RECV_WQE_BYTES 16
/* What fits behind the control and address segments in one slot. */
#define IBGDA_MAX_INLINE_BYTES 28
/* Longest message of one work request. */
#define IBGDA_MAX_MESSAGE_BYTES (1u << 30)
/* Slots of one queue: the WQE counter of a completion has 16 bits, and half of its range must tell old from new. */
#define IBGDA_MAX_DEPTH 32768

/*
 * Result of every device call. Values never change meaning; new ones may be added. 0 is success, and no failed request
 * ever ends in it.
 */
typedef enum ibgda_status {
	IBGDA_OK = 0,
	/* Nothing happened before the deadline. */
	IBGDA_TIMEOUT = 1,
	/* No slot became free within the queue's own patience (post_timeout_ns): the peer or the NIC does not answer. */
	IBGDA_ERR_QUEUE_FULL = 2,
	/* The broker says that the NIC was reset or taken away, or the right to it withdrawn. */
	IBGDA_ERR_NIC_LOST = 3,
	/* A length, alignment or flag that no NIC would take. */
	IBGDA_ERR_INVALID_ARGUMENT = 4,
	/* A doorbell for slots that were never reserved. */
	IBGDA_ERR_INVALID_INDEX = 5,
	/* A completion of a kind that this queue cannot have. */
	IBGDA_ERR_UNKNOWN_CQE = 6,
	/* This QP has no such queue, or its handle was made without what the call needs (see IBGDA_SHARED and the like). */
	IBGDA_ERR_NO_QUEUE = 7,
	/* IBGDA_CHECKS=full: what is wrong with which argument; 0x40 | its place below. */
	IBGDA_ERR_ARGUMENT = 0x40,
	IBGDA_ERR_MODE = 0x40,
	IBGDA_ERR_FLAGS = 0x41,
	IBGDA_ERR_BYTES = 0x42,
	IBGDA_ERR_REMOTE = 0x43,
	IBGDA_ERR_RKEY = 0x44,
	IBGDA_ERR_LOCAL = 0x45,
	IBGDA_ERR_LKEY = 0x46,

	/* An error completion: 0x100 | the syndrome the NIC gave. */
	IBGDA_ERR_COMPLETION = 0x100,
	IBGDA_ERR_LOCAL_LENGTH = 0x101,
	IBGDA_ERR_LOCAL_QP_OPERATION = 0x102,
	IBGDA_ERR_LOCAL_PROTECTION = 0x104,
	/* Flushed: an earlier request failed, see the latched error. */
	IBGDA_ERR_WR_FLUSHED = 0x105,
	IBGDA_ERR_MW_BIND = 0x106,
	IBGDA_ERR_BAD_RESPONSE = 0x110,
	IBGDA_ERR_LOCAL_ACCESS = 0x111,
	IBGDA_ERR_REMOTE_INVALID_REQUEST = 0x112,
	IBGDA_ERR_REMOTE_ACCESS = 0x113,
	IBGDA_ERR_REMOTE_OPERATION = 0x114,
	IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED = 0x115,
	IBGDA_ERR_RNR_RETRY_EXCEEDED = 0x116,
	IBGDA_ERR_REMOTE_ABORTED = 0x122
} ibgda_status;

/* Bits of the flags argument of work requests. */
/* No completion of its own: it is known complete when a later request is. */
#define IBGDA_UNSIGNALED (1u << 0)
/* Do not ring: a later request, or ibgda_write_doorbell, covers it. */
#define IBGDA_NO_DOORBELL (1u << 1)
/* Begin only after every earlier read and atomic of this QP has completed. */
#define IBGDA_FENCED (1u << 2)
/* Ask the receiver's CQ for a solicited event. */
#define IBGDA_SOLICITED (1u << 3)
/* Of a warp's or a block's call: this thread has nothing to post, and only takes part. */
#define IBGDA_SKIP (1u << 4)
/*
 * Of ibgda_get and the atomics: have the NIC read back what it wrote before the completion. Needed where data and
 * completion take different ways, data to GPU memory and CQ in host memory; costs a WQE.
 */
#define IBGDA_FLUSH (1u << 5)

/*
 * How a QP is used: the template argument M of the device calls, and the `mode` of a handle, where it says what the
 * handle is made for. 0 is an exclusive QP with its queues in host memory, whose doorbell the GPU rings.
 */
/* Send ring and doorbell record lie in the memory of the GPU that posts, and the fences reach no further. */
#define IBGDA_ON_GPU (1u << 0)
/* Any number of threads post and wait at the same time. Without it, one at a time: a thread, or its warp or block. */
#define IBGDA_SHARED (1u << 1)
/* The send CQ is collapsed: the NIC keeps one completion, the last. After an error it is soon a flush. */
#define IBGDA_COLLAPSED (1u << 2)
/* The doorbell page is write-combining: a request that is rung alone goes along with its doorbell. */
#define IBGDA_BLUEFLAME (1u << 3)
/* The doorbell is a word in memory, which a CPU thread looks at and carries to the register. */
#define IBGDA_CPU_DOORBELL (1u << 4)
/*
 * No doorbell record is written: only for NICs that take the index from the doorbell, and for comparison with libraries
 * that do so.
 */
#define IBGDA_NO_RECORD (1u << 5)
/* All 32 lanes of a warp call together, each with a request of its own: one reservation and one doorbell for all. */
#define IBGDA_WARP (1u << 6)
/* The same for all threads of a block. */
#define IBGDA_BLOCK (1u << 7)
/* Those of a call, not of a handle. */
#define IBGDA_SCOPES (IBGDA_WARP | IBGDA_BLOCK)

/* Comparisons of ibgda_wait_until. */
enum ibgda_comparison { IBGDA_EQ = 0, IBGDA_NE = 1, IBGDA_GE = 2, IBGDA_GT = 3, IBGDA_LE = 4, IBGDA_LT = 5 };

/* The kind of a completion (CQE opcode). */
#define IBGDA_CQE_REQ 0
#define IBGDA_CQE_RESP_WRITE_IMM 1
#define IBGDA_CQE_RESP_SEND 2
#define IBGDA_CQE_RESP_SEND_IMM 3
#define IBGDA_CQE_RESP_SEND_INV 4
#define IBGDA_CQE_REQ_ERR 13
#define IBGDA_CQE_RESP_ERR 14
#define IBGDA_CQE_INVALID 15

/* One completion, decoded. kind is IBGDA_CQE_INVALID when none was taken. */
struct ibgda_cqe {
	ibgda_u64 wqe_index;	/* which request, counted from the queue's start */
	ibgda_u32 qpn;
	ibgda_u32 byte_count;	/* bytes moved (receives, reads, atomics) */
	ibgda_u32 immediate;	/* host order; receives with immediate */
	ibgda_u8 kind;		/* IBGDA_CQE_* */
	ibgda_u8 opcode;	/* of the request's WQE */
	ibgda_u8 syndrome;	/* errors only */
	ibgda_u8 vendor_syndrome;
};

/* The first error of a queue, kept from being hidden by the flushes that follow. All zero while there is none. */
struct ibgda_error {
	ibgda_u32 status;	/* ibgda_status */
	ibgda_u32 qpn;
	ibgda_u64 wqe_index;
	ibgda_u8 kind;
	ibgda_u8 opcode;
	ibgda_u8 syndrome;
	ibgda_u8 vendor_syndrome;
	ibgda_u32 reserved;
};

/*
 * A completion queue as its poller sees it. It serves one work queue (the send queue or the receive queue of one QP),
 * is at least as deep, and so never overruns.
 */
struct ibgda_cq {
	/* Constant after creation. */
	IBGDA_ALIGNED(16)
	const ibgda_u8 *ring;		/* depth completions of 64 bytes; one if collapsed */
	ibgda_u32 *doorbell_record;	/* two big-endian words: consumer index, arm */
	const ibgda_u64 *status_page;	/* the broker's, or null: not consulted */
	ibgda_u64 *arm_doorbell;	/* the CQ register in the UAR page, or null: no events */
	const ibgda_u32 *events;	/* counts the events of this CQ that the host took, or null */
	ibgda_u64 *limit;		/* of a send CQ: the QP's, which an error makes 0; else null */
	ibgda_u32 number;		/* CQN */
	ibgda_u32 depth;		/* a power of two */
	ibgda_u32 generation;		/* of the session when the queue was made */
	/* The poller's own; of a shared QP, of whoever holds the lock. */
	ibgda_u32 misses;		/* polls that found nothing: when to look at the status page */
	ibgda_u64 consumer;		/* completions taken */
	ibgda_u64 fetching;		/* one past the last request without completion of its own that brings data */
	/* Read together, in one load. */
	ibgda_u64 completed;		/* work requests known complete: all below this index succeeded */
	struct ibgda_error error;	/* the first error, latched */
	ibgda_u32 lock;
	ibgda_u32 mode;			/* IBGDA_SHARED and so on of the QP that it serves; for the calls of ibgda_host.h */
	ibgda_u64 reserved64;
};

/*
 * A queue pair as the poster of its requests sees it. What many threads write of a shared QP lies in another line than
 * what they only read.
 */
struct ibgda_qp {
	/* Constant after creation. */
	IBGDA_ALIGNED(128)
	ibgda_u8 *send_ring;		/* send_depth slots of 64 bytes */
	ibgda_u8 *recv_ring;		/* recv_depth slots of 16 bytes, or null */
	ibgda_u32 *doorbell_record;	/* two big-endian words: receive counter, send counter */
	ibgda_u64 *doorbell;		/* the register in the UAR page; write only */
	struct ibgda_cq *send_cq;
	struct ibgda_cq *recv_cq;	/* or null */
	ibgda_u64 *ready;		/* shared: IBGDA_READY_WORDS words, all 0 at first but the first; else null */
	ibgda_u64 post_timeout_ns;	/* how long a post may wait for a free slot; 0: not at all */
	ibgda_u32 number;		/* QPN */
	ibgda_u32 send_depth;		/* a power of two */
	ibgda_u32 recv_depth;		/* a power of two, or 0 */
	ibgda_u32 mode;			/* IBGDA_ON_GPU and so on, without the scopes */
	ibgda_u32 blueflame_bytes;	/* size of a BlueFlame buffer, a power of two; 0: not to be used */
	ibgda_u32 reserved;
	ibgda_u64 reserved64[5];
	/* The poster's own. */
	ibgda_u64 producer;		/* send slots reserved */
	ibgda_u64 limit;		/* up to where they may be without a look at the CQ; at first send_depth; 0 after an error */
	ibgda_u64 publisher;		/* shared: send slots the NIC was or is being told of << 2 | tired << 1 | busy (shared.h) */
	ibgda_u64 rung;			/* shared: what a tired teller told last; exclusive: slots the NIC was told of, while unrung is producer */
	ibgda_u64 recv_producer;	/* receive slots posted */
	ibgda_u64 unrung;		/* one past the last send slot that waits, or waited, for a doorbell */
	ibgda_u32 blueflame_offset;	/* of the BlueFlame buffer that is next: 0 or blueflame_bytes */
	ibgda_u32 recv_lock;
	ibgda_u64 silent;		/* exclusive: one past the last request without a completion of its own */
	ibgda_u64 reserved_own[8];
};

/* Slots of a shared QP whose state is in one word of `ready`: a quarter of the ring, at most 32. */
#define IBGDA_READY_MOST 32u
#define IBGDA_READY_SLOTS(depth) ((depth) >= 4 * IBGDA_READY_MOST ? IBGDA_READY_MOST : (depth) >= 4 ? (depth) / 4 : 1u)
#define IBGDA_READY_WORDS(depth) ((depth) / IBGDA_READY_SLOTS(depth))
/* What the first word starts as: the NIC may be told of its slots as soon as they are written. */
#define IBGDA_READY_FIRST (1ull << 32)

/* Memory registered with the NIC: what a work request names it by. */
struct ibgda_region {
	ibgda_u64 address;	/* for work requests of this and of the remote side */
	ibgda_u64 length;	/* bytes */
	ibgda_u32 lkey;
	ibgda_u32 rkey;
};

#endif
