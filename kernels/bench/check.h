/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Did an implementation post what it was asked to? WQEs, doorbell record and doorbell, byte for byte. Written from the
 * PRM's layouts and not with the header's builders, which are under test here.
 */
#ifndef IBGDA_BENCH_CHECK_H
#define IBGDA_BENCH_CHECK_H

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "plan.h"

namespace bench {

inline void put_be32(uint8_t *to, uint32_t value)
{
	for (int i = 0; i < 4; i++)
		to[i] = (uint8_t)(value >> (24 - 8 * i));
}

inline void put_be64(uint8_t *to, uint64_t value)
{
	put_be32(to, (uint32_t)(value >> 32));
	put_be32(to + 4, (uint32_t)value);
}

inline uint32_t get_be32(const uint8_t *from)
{
	return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | from[3];
}

inline uint64_t get_be64(const uint8_t *from) { return (uint64_t)get_be32(from) << 32 | get_be32(from + 4); }

inline std::string hex(const uint8_t *bytes, size_t count)
{
	std::string text;
	char two[3];
	for (size_t i = 0; i < count; i++) {
		std::snprintf(two, sizeof two, "%02x", bytes[i]);
		text += two;
		if (i % 16 == 15 && i + 1 < count)
			text += ' ';
	}
	return text;
}

/* An RDMA WRITE of either kind: control, remote address, and data or inline segment. */
constexpr size_t WQE_BYTES = 48;

/* fm_ce_se of a request that has a completion of its own. */
constexpr uint8_t CQ_UPDATE = 0x08;

inline void expected_wqe(uint8_t out[WQE_BYTES], uint64_t index, uint32_t qpn, const Request &request, bool inlined)
{
	std::memset(out, 0, WQE_BYTES);
	put_be32(out, (uint32_t)(index & 0xffff) << 8 | 0x08);
	put_be32(out + 4, qpn << 8 | 3);
	out[11] = CQ_UPDATE;
	put_be64(out + 16, request.remote);
	put_be32(out + 24, request.rkey);
	if (inlined) {
		put_be32(out + 32, 0x80000000u | 8);
		std::memcpy(out + 36, &request.local, 8);
	} else {
		put_be32(out + 32, request.bytes);
		put_be32(out + 36, request.lkey);
		put_be64(out + 40, request.local);
	}
}

/*
 * The WQEs that the ring holds after all of the plan's requests, the first of which has index `first`. Each one's remote
 * address names the poster and which of its requests it is; that must be one that was made, once, with all other bytes to
 * match, and what a poster has in the ring must be the end of its requests in order.
 * Empty: all is well; else the first thing that is wrong.
 */
inline std::string check_ring(const uint8_t *ring, uint32_t depth, uint64_t first, uint32_t qpn, const Plan &plan)
{
	char text[400];
	uint64_t end = first + plan.total();
	/* Of each poster, the request that comes next in the ring; `each` when all have been seen. */
	std::vector<uint32_t> next(plan.posters, UINT32_MAX);
	for (uint64_t index = plan.total() > depth ? end - depth : first; index < end; index++) {
		const uint8_t *slot = ring + (index & (depth - 1)) * 64;
		uint64_t offset = get_be64(slot + 16) - plan.remote;
		uint64_t number = offset / STEP;
		if (offset % STEP || number >= plan.total()) {
			std::snprintf(text, sizeof text, "WQE %llu: no poster has such a remote address: %s", (unsigned long long)index,
				      hex(slot, WQE_BYTES).c_str());
			return text;
		}
		uint32_t poster = (uint32_t)(number / plan.each), sequence = (uint32_t)(number % plan.each);
		uint8_t expected[WQE_BYTES];
		expected_wqe(expected, index, qpn, request_of(plan, poster, sequence), plan.inlined);
		if (std::memcmp(slot, expected, WQE_BYTES)) {
			std::snprintf(text, sizeof text, "WQE %llu: is %s, should be %s", (unsigned long long)index,
				      hex(slot, WQE_BYTES).c_str(), hex(expected, WQE_BYTES).c_str());
			return text;
		}
		if (next[poster] != UINT32_MAX && next[poster] != sequence) {
			std::snprintf(text, sizeof text, "WQE %llu: request %u of poster %u, but its request %u should be next",
				      (unsigned long long)index, sequence, poster, next[poster]);
			return text;
		}
		next[poster] = sequence + 1;
	}
	for (uint32_t poster = 0; poster < plan.posters; poster++)
		if (next[poster] != UINT32_MAX && next[poster] != plan.each) {
			std::snprintf(text, sizeof text, "the ring lacks request %u of poster %u", next[poster], poster);
			return text;
		}
	return "";
}

/* The send counter of the record after `end` requests. */
inline std::string check_record(const uint32_t record[2], uint64_t end)
{
	uint8_t expected[4];
	put_be32(expected, (uint32_t)(end & 0xffff));
	if (!std::memcmp(record + 1, expected, 4))
		return "";
	return "doorbell record: is " + hex(reinterpret_cast<const uint8_t *>(record + 1), 4) + ", should be " + hex(expected, 4);
}

/* What the doorbell register holds when the NIC has been told of `end` requests. */
inline uint64_t expected_doorbell(uint64_t end, uint32_t qpn)
{
	uint8_t bytes[8];
	uint64_t value;
	put_be32(bytes, (uint32_t)(end & 0xffff) << 8);
	put_be32(bytes + 4, qpn << 8);
	std::memcpy(&value, bytes, 8);
	return value;
}

inline std::string check_doorbell(uint64_t doorbell, uint64_t end, uint32_t qpn)
{
	uint64_t expected = expected_doorbell(end, qpn);
	if (doorbell == expected)
		return "";
	return "doorbell: is " + hex(reinterpret_cast<const uint8_t *>(&doorbell), 8) + ", should be " +
	       hex(reinterpret_cast<const uint8_t *>(&expected), 8);
}

/*
 * Bytes 56 to 63 of the completion of request `index`, whose place among the completions of the CQ is `number`: send opcode
 * and QPN, WQE counter, no signature, kind REQ and owner.
 */
inline uint64_t completion_tail(uint64_t index, uint64_t number, uint32_t cq_depth, uint32_t qpn)
{
	uint8_t bytes[8];
	uint64_t value;
	put_be32(bytes, 0x08u << 24 | qpn);
	put_be32(bytes + 4, (uint32_t)(index & 0xffff) << 16 | (number & cq_depth ? 1 : 0));
	std::memcpy(&value, bytes, 8);
	return value;
}

} // namespace bench

#endif
