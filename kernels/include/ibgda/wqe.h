/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * WQE builders: pure functions from the fields of a request to the 64 bytes of its slot. They touch no queue.
 *
 * A WQE here is always one basic block (64 bytes, four 16-byte segments), so that a slot index is a request's index.
 * Layouts are those of rdma-core's mlx5dv.h: control segment, then remote address, then data, inline data or atomic.
 */
#ifndef IBGDA_WQE_H
#define IBGDA_WQE_H

#include "ibgda/platform.h"

enum ibgda_opcode {
	IBGDA_OP_NOP = 0x00,
	IBGDA_OP_SEND_INVAL = 0x01,
	IBGDA_OP_RDMA_WRITE = 0x08,
	IBGDA_OP_RDMA_WRITE_IMM = 0x09,
	IBGDA_OP_SEND = 0x0a,
	IBGDA_OP_SEND_IMM = 0x0b,
	IBGDA_OP_RDMA_READ = 0x10,
	IBGDA_OP_ATOMIC_CS = 0x11,
	IBGDA_OP_ATOMIC_FA = 0x12,
	IBGDA_OP_ATOMIC_MASKED_CS = 0x14,
	IBGDA_OP_ATOMIC_MASKED_FA = 0x15,
	IBGDA_OP_DUMP = 0x23
};

/* fm_ce_se, byte 11 of the control segment. */
enum {
	IBGDA_CTRL_SOLICITED = 1 << 1,
	IBGDA_CTRL_CQ_UPDATE = 2 << 2,
	IBGDA_CTRL_FENCE = 4 << 5
};

/* opmod of a masked atomic on 4 bytes (UCX's UCT_IB_MLX5_OPMOD_EXT_ATOMIC), in its place in the control segment. */
#define IBGDA_OPMOD_ATOMIC_4 0x08000000u

/* Marks the length of inline data; and the data segment that ends a receive's list. */
#define IBGDA_INLINE_FLAG 0x80000000u
#define IBGDA_INVALID_LKEY 0x100u

/* One send queue slot; only the first `segments` quads mean anything to the NIC. */
struct ibgda_wqe {
	ibgda_quad quad[4];
	ibgda_u32 segments;
};

/* Where the compiler shall have made the WQE by: it would leave it for after what comes next, however long that takes. */
IBGDA_FN void ibgda_made(const ibgda_wqe &wqe)
{
#ifdef __CUDACC__
#pragma unroll
#endif
	for (int i = 0; i < 4; i++)
		asm volatile("" ::IBGDA_WORDS(wqe.quad[i]));
}

/* A quad from four 32-bit words in host order, stored big-endian. */
IBGDA_PURE ibgda_quad ibgda_quad_be(ibgda_u32 w0, ibgda_u32 w1, ibgda_u32 w2, ibgda_u32 w3)
{
	ibgda_quad q;
	q.low = (ibgda_u64)ibgda_be32(w1) << 32 | ibgda_be32(w0);
	q.high = (ibgda_u64)ibgda_be32(w3) << 32 | ibgda_be32(w2);
	return q;
}

/* Of the control segment's flags byte, what the caller's flags ask for. */
IBGDA_PURE ibgda_u32 ibgda_ctrl_flags(ibgda_u32 flags)
{
	return (flags & IBGDA_UNSIGNALED ? 0u : (ibgda_u32)IBGDA_CTRL_CQ_UPDATE) |
	       (flags & IBGDA_SOLICITED ? (ibgda_u32)IBGDA_CTRL_SOLICITED : 0u) |
	       (flags & IBGDA_FENCED ? (ibgda_u32)IBGDA_CTRL_FENCE : 0u);
}

IBGDA_PURE ibgda_quad ibgda_ctrl_segment(ibgda_opcode opcode, ibgda_u64 index, ibgda_u32 qpn, ibgda_u32 segments,
					 ibgda_u32 flags, ibgda_u32 immediate)
{
	ibgda_quad q;
	q.low = (ibgda_u64)ibgda_be24_8(qpn, segments) << 32 | ibgda_be16_8((ibgda_u32)index, opcode);
	q.high = (ibgda_u64)ibgda_be32(immediate) << 32 | ibgda_be32(ibgda_ctrl_flags(flags));
	return q;
}

IBGDA_PURE ibgda_quad ibgda_remote_segment(ibgda_u64 address, ibgda_u32 rkey)
{
	return ibgda_quad_be((ibgda_u32)(address >> 32), (ibgda_u32)address, rkey, 0);
}

IBGDA_PURE ibgda_quad ibgda_data_segment(ibgda_u64 address, ibgda_u32 lkey, ibgda_u32 bytes)
{
	return ibgda_quad_be(bytes, lkey, (ibgda_u32)(address >> 32), (ibgda_u32)address);
}

/*
 * RDMA WRITE of local memory; with IBGDA_OP_RDMA_WRITE_IMM the immediate goes along. A byte count of 0 would mean 2 GiB
 * to the NIC, so that an empty message has no data segment.
 */
IBGDA_PURE ibgda_wqe ibgda_wqe_write(ibgda_opcode opcode, ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey,
				     ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 immediate, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	w.segments = bytes ? 3 : 2;
	w.quad[0] = ibgda_ctrl_segment(opcode, index, qpn, w.segments, flags, immediate);
	w.quad[1] = ibgda_remote_segment(remote, rkey);
	w.quad[2] = ibgda_data_segment(local, lkey, bytes);
	return w;
}

/* RDMA READ into local memory. */
IBGDA_PURE ibgda_wqe ibgda_wqe_read(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local,
				    ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 flags)
{
	return ibgda_wqe_write(IBGDA_OP_RDMA_READ, index, qpn, remote, rkey, local, lkey, bytes, 0, flags);
}

/*
 * RDMA WRITE of at most IBGDA_MAX_INLINE_BYTES carried in the WQE itself: the NIC reads no local memory. Up to 12 bytes
 * fit behind the length in the third segment; more take the fourth.
 */
IBGDA_PURE ibgda_wqe ibgda_wqe_write_inline(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, const void *data,
					    ibgda_u32 bytes, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	const ibgda_u8 *from = static_cast<const ibgda_u8 *>(data);
	/* Bytes in memory order, as little-endian words: both processors are little-endian. */
	ibgda_u32 words[8] = {ibgda_be32(bytes | IBGDA_INLINE_FLAG), 0, 0, 0, 0, 0, 0, 0};
#ifdef __CUDACC__
#pragma unroll
#endif
	for (ibgda_u32 i = 0; i < IBGDA_MAX_INLINE_BYTES; i++)
		if (i < bytes)
			words[1 + i / 4] |= (ibgda_u32)from[i] << (i % 4 * 8);

	w.segments = bytes <= 12 ? 3 : 4;
	w.quad[0] = ibgda_ctrl_segment(IBGDA_OP_RDMA_WRITE, index, qpn, w.segments, flags, 0);
	w.quad[1] = ibgda_remote_segment(remote, rkey);
	w.quad[2].low = (ibgda_u64)words[1] << 32 | words[0];
	w.quad[2].high = (ibgda_u64)words[3] << 32 | words[2];
	w.quad[3].low = (ibgda_u64)words[5] << 32 | words[4];
	w.quad[3].high = (ibgda_u64)words[7] << 32 | words[6];
	return w;
}

/* The same of a value in a register: `bytes` (1, 2, 4 or 8) of it, in memory order. */
IBGDA_PURE ibgda_wqe ibgda_wqe_write_value(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 value,
					   ibgda_u32 bytes, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	w.segments = 3;
	w.quad[0] = ibgda_ctrl_segment(IBGDA_OP_RDMA_WRITE, index, qpn, w.segments, flags, 0);
	w.quad[1] = ibgda_remote_segment(remote, rkey);
	w.quad[2].low = value << 32 | ibgda_be32(bytes | IBGDA_INLINE_FLAG);
	w.quad[2].high = value >> 32;
	return w;
}

/* SEND; with IBGDA_OP_SEND_IMM the immediate goes along, with IBGDA_OP_SEND_INVAL the peer's key that it invalidates. */
IBGDA_PURE ibgda_wqe ibgda_wqe_send(ibgda_opcode opcode, ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 local, ibgda_u32 lkey,
				    ibgda_u32 bytes, ibgda_u32 immediate, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	w.segments = bytes ? 2 : 1;
	w.quad[0] = ibgda_ctrl_segment(opcode, index, qpn, w.segments, flags, immediate);
	w.quad[1] = ibgda_data_segment(local, lkey, bytes);
	return w;
}

/*
 * 64-bit fetch-and-add; the old value lands in 8 bytes of local memory, in the host's byte order: the mlx5 driver puts
 * the NIC into that mode (atomic_req_8B_endianness_mode).
 */
IBGDA_PURE ibgda_wqe ibgda_wqe_fetch_add(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local,
					 ibgda_u32 lkey, ibgda_u64 add, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	w.segments = 4;
	w.quad[0] = ibgda_ctrl_segment(IBGDA_OP_ATOMIC_FA, index, qpn, w.segments, flags, 0);
	w.quad[1] = ibgda_remote_segment(remote, rkey);
	w.quad[2] = ibgda_quad_be((ibgda_u32)(add >> 32), (ibgda_u32)add, 0, 0);
	w.quad[3] = ibgda_data_segment(local, lkey, 8);
	return w;
}

/* 64-bit compare-and-swap; the old value as in ibgda_wqe_fetch_add. */
IBGDA_PURE ibgda_wqe ibgda_wqe_compare_swap(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local,
					    ibgda_u32 lkey, ibgda_u64 compare, ibgda_u64 swap, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	w.segments = 4;
	w.quad[0] = ibgda_ctrl_segment(IBGDA_OP_ATOMIC_CS, index, qpn, w.segments, flags, 0);
	w.quad[1] = ibgda_remote_segment(remote, rkey);
	w.quad[2] = ibgda_quad_be((ibgda_u32)(swap >> 32), (ibgda_u32)swap, (ibgda_u32)(compare >> 32), (ibgda_u32)compare);
	w.quad[3] = ibgda_data_segment(local, lkey, 8);
	return w;
}

/*
 * Atomics on 4 bytes are the masked ones with masks that let all bits pass. The old value lands in 4 bytes, in the byte
 * order of the 8-byte ones.
 */
IBGDA_PURE ibgda_wqe ibgda_wqe_atomic32(ibgda_opcode opcode, ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey,
					ibgda_u64 local, ibgda_u32 lkey, ibgda_quad operands, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	w.segments = 4;
	w.quad[0] = ibgda_ctrl_segment(opcode, index, qpn, w.segments, flags, 0);
	w.quad[0].low |= ibgda_be32(IBGDA_OPMOD_ATOMIC_4);
	w.quad[1] = ibgda_remote_segment(remote, rkey);
	w.quad[2] = operands;
	w.quad[3] = ibgda_data_segment(local, lkey, 4);
	return w;
}

IBGDA_PURE ibgda_wqe ibgda_wqe_fetch_add32(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local,
					   ibgda_u32 lkey, ibgda_u32 add, ibgda_u32 flags)
{
	/* What to add; the bits at which a carry stops. */
	return ibgda_wqe_atomic32(IBGDA_OP_ATOMIC_MASKED_FA, index, qpn, remote, rkey, local, lkey, ibgda_quad_be(add, 0, 0, 0), flags);
}

IBGDA_PURE ibgda_wqe ibgda_wqe_compare_swap32(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local,
					      ibgda_u32 lkey, ibgda_u32 compare, ibgda_u32 swap, ibgda_u32 flags)
{
	return ibgda_wqe_atomic32(IBGDA_OP_ATOMIC_MASKED_CS, index, qpn, remote, rkey, local, lkey,
				  ibgda_quad_be(swap, compare, ~0u, ~0u), flags);
}

/* Has the NIC read local memory and drop it: behind what it wrote there before, over the same way. */
IBGDA_PURE ibgda_wqe ibgda_wqe_dump(ibgda_u64 index, ibgda_u32 qpn, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	w.segments = 2;
	w.quad[0] = ibgda_ctrl_segment(IBGDA_OP_DUMP, index, qpn, w.segments, flags, 0);
	w.quad[1] = ibgda_data_segment(local, lkey, bytes);
	return w;
}

IBGDA_PURE ibgda_wqe ibgda_wqe_nop(ibgda_u64 index, ibgda_u32 qpn, ibgda_u32 flags)
{
	ibgda_wqe w = {};
	w.segments = 1;
	w.quad[0] = ibgda_ctrl_segment(IBGDA_OP_NOP, index, qpn, w.segments, flags, 0);
	return w;
}

/* What a doorbell store carries: the producer index and the QP, laid out as a control segment begins. */
IBGDA_PURE ibgda_u64 ibgda_doorbell_value(ibgda_u64 producer_index, ibgda_u32 qpn)
{
	return (ibgda_u64)ibgda_be24_8(qpn, 0) << 32 | ibgda_be16_8((ibgda_u32)producer_index, 0);
}

#endif
