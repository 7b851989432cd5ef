/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Sizes and places of everything that programs and kernels compiled against another version of the headers rely on. A line
 * here changes only together with the soname; the attributes of ibgda.h, which carry their size, may grow.
 */
#include <ibgda.h>
#include <ibgda_host.h>
#include <stddef.h>

#define SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), "size of " #type)
#define FIELD(type, field, offset, bytes)                                          \
	_Static_assert(offsetof(struct type, field) == (offset) &&                 \
			       sizeof(((struct type *)0)->field) == (bytes),       \
		       #type "." #field)

SIZE(ibgda_open_attr, 32);
FIELD(ibgda_open_attr, size, 0, 4);
FIELD(ibgda_open_attr, port, 4, 4);
FIELD(ibgda_open_attr, nic, 8, 8);
FIELD(ibgda_open_attr, gpu, 16, 8);
FIELD(ibgda_open_attr, route, 24, 4);

SIZE(ibgda_qp_attr, 56);
FIELD(ibgda_qp_attr, size, 0, 4);
FIELD(ibgda_qp_attr, send_depth, 4, 4);
FIELD(ibgda_qp_attr, recv_depth, 8, 4);
FIELD(ibgda_qp_attr, access, 12, 4);
FIELD(ibgda_qp_attr, post_timeout_ns, 16, 8);
FIELD(ibgda_qp_attr, mode, 24, 4);
FIELD(ibgda_qp_attr, ack_timeout, 32, 4);
FIELD(ibgda_qp_attr, retry_count, 36, 4);
FIELD(ibgda_qp_attr, rnr_retry, 40, 4);
FIELD(ibgda_qp_attr, memory, 48, 8);

SIZE(ibgda_cq_attr, 24);
FIELD(ibgda_cq_attr, size, 0, 4);
FIELD(ibgda_cq_attr, entries, 4, 4);
FIELD(ibgda_cq_attr, flags, 8, 4);
FIELD(ibgda_cq_attr, memory, 16, 8);

SIZE(ibgda_session_state, 24);
FIELD(ibgda_session_state, state, 0, 4);
FIELD(ibgda_session_state, generation, 4, 4);
FIELD(ibgda_session_state, reason, 8, 4);
FIELD(ibgda_session_state, changed_ns, 16, 8);

SIZE(ibgda_region, 24);
FIELD(ibgda_region, address, 0, 8);
FIELD(ibgda_region, length, 8, 8);
FIELD(ibgda_region, lkey, 16, 4);
FIELD(ibgda_region, rkey, 20, 4);

SIZE(ibgda_cqe, 24);
FIELD(ibgda_cqe, wqe_index, 0, 8);
FIELD(ibgda_cqe, qpn, 8, 4);
FIELD(ibgda_cqe, byte_count, 12, 4);
FIELD(ibgda_cqe, immediate, 16, 4);
FIELD(ibgda_cqe, kind, 20, 1);
FIELD(ibgda_cqe, opcode, 21, 1);
FIELD(ibgda_cqe, syndrome, 22, 1);
FIELD(ibgda_cqe, vendor_syndrome, 23, 1);

SIZE(ibgda_error, 24);
FIELD(ibgda_error, status, 0, 4);
FIELD(ibgda_error, qpn, 4, 4);
FIELD(ibgda_error, wqe_index, 8, 8);
FIELD(ibgda_error, kind, 16, 1);
FIELD(ibgda_error, opcode, 17, 1);
FIELD(ibgda_error, syndrome, 18, 1);
FIELD(ibgda_error, vendor_syndrome, 19, 1);

SIZE(ibgda_cq, 128);
FIELD(ibgda_cq, ring, 0, 8);
FIELD(ibgda_cq, doorbell_record, 8, 8);
FIELD(ibgda_cq, status_page, 16, 8);
FIELD(ibgda_cq, arm_doorbell, 24, 8);
FIELD(ibgda_cq, events, 32, 8);
FIELD(ibgda_cq, limit, 40, 8);
FIELD(ibgda_cq, number, 48, 4);
FIELD(ibgda_cq, depth, 52, 4);
FIELD(ibgda_cq, generation, 56, 4);
FIELD(ibgda_cq, misses, 60, 4);
FIELD(ibgda_cq, consumer, 64, 8);
FIELD(ibgda_cq, fetching, 72, 8);
FIELD(ibgda_cq, completed, 80, 8);
FIELD(ibgda_cq, error, 88, 24);
FIELD(ibgda_cq, lock, 112, 4);
FIELD(ibgda_cq, mode, 116, 4);

SIZE(ibgda_qp, 256);
FIELD(ibgda_qp, send_ring, 0, 8);
FIELD(ibgda_qp, recv_ring, 8, 8);
FIELD(ibgda_qp, doorbell_record, 16, 8);
FIELD(ibgda_qp, doorbell, 24, 8);
FIELD(ibgda_qp, send_cq, 32, 8);
FIELD(ibgda_qp, recv_cq, 40, 8);
FIELD(ibgda_qp, ready, 48, 8);
FIELD(ibgda_qp, post_timeout_ns, 56, 8);
FIELD(ibgda_qp, number, 64, 4);
FIELD(ibgda_qp, send_depth, 68, 4);
FIELD(ibgda_qp, recv_depth, 72, 4);
FIELD(ibgda_qp, mode, 76, 4);
FIELD(ibgda_qp, blueflame_bytes, 80, 4);
FIELD(ibgda_qp, producer, 128, 8);
FIELD(ibgda_qp, limit, 136, 8);
FIELD(ibgda_qp, publisher, 144, 8);
FIELD(ibgda_qp, rung, 152, 8);
FIELD(ibgda_qp, recv_producer, 160, 8);
FIELD(ibgda_qp, unrung, 168, 8);
FIELD(ibgda_qp, blueflame_offset, 176, 4);
FIELD(ibgda_qp, recv_lock, 180, 4);
FIELD(ibgda_qp, silent, 184, 8);

SIZE(ibgda_async_event, 80);
FIELD(ibgda_async_event, size, 0, 4);
FIELD(ibgda_async_event, kind, 4, 4);
FIELD(ibgda_async_event, generation, 8, 4);
FIELD(ibgda_async_event, reason, 12, 4);
FIELD(ibgda_async_event, number, 16, 4);
FIELD(ibgda_async_event, time_ns, 24, 8);
FIELD(ibgda_async_event, error, 32, 24);
FIELD(ibgda_async_event, what, 56, 8);
FIELD(ibgda_async_event, why, 64, 8);
FIELD(ibgda_async_event, advice, 72, 8);

SIZE(ibgda_qp_counters, 64);
FIELD(ibgda_qp_counters, size, 0, 4);
FIELD(ibgda_qp_counters, posted, 8, 8);
FIELD(ibgda_qp_counters, told, 16, 8);
FIELD(ibgda_qp_counters, completed, 24, 8);
FIELD(ibgda_qp_counters, failed, 32, 8);
FIELD(ibgda_qp_counters, recv_posted, 40, 8);
FIELD(ibgda_qp_counters, recv_completed, 48, 8);
FIELD(ibgda_qp_counters, carried, 56, 8);
