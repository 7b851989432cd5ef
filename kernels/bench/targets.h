/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * "Targets on an H200" of the project's issue on the device header. Peers' figures are those of facts/device-cost.md, measured
 * once: NVSHMEM 3.8.0 and DOCA GPUNetIO 4.1.0 on an H200, CUDA 13.0.88, driver 580.159.04.
 */
#ifndef IBGDA_BENCH_TARGETS_H
#define IBGDA_BENCH_TARGETS_H

#include "report.h"

namespace bench {

inline std::vector<Target> targets()
{
	const std::string two_fences = "bare 2 fence.gpu", exclusive = "exclusive", shared = "shared", no_record = "shared, no record";
	std::vector<Target> list;
	auto against_floor = [&](const std::string &name, const Row &row, const std::string &ours, double ratio, bool more = false) {
		list.push_back({name, row, ours, row, two_fences, 0, ratio, more, false});
	};
	auto against_peer = [&](const std::string &name, const Row &row, const std::string &ours, double peer, bool more) {
		list.push_back({name, row, ours, {}, "", peer, 1, more, more});
	};

	Row m1 = {"A", "M1", "write, 1 thread, own doorbell", "ns", false}, m2w = {"A", "M2w", "1 warp, doorbell per 32", "ns", false};
	against_floor("M1 exclusive", m1, exclusive, 1.15);
	against_peer("M1 exclusive, best peer", m1, exclusive, 1035, false);
	against_floor("M1 shared", m1, shared, 1.9);
	against_peer("M1 shared, best peer (block-shared)", m1, shared, 2235, false);
	against_floor("M2w exclusive", m2w, exclusive, 1.3);
	against_peer("M2w exclusive, best peer", m2w, exclusive, 33.51, false);
	against_floor("M2w shared", m2w, shared, 2);
	against_peer("M2w shared, best peer (block-shared)", m2w, shared, 65.27, false);
	Row m3 = {"A", "M3", "132 x 1 thread, own QP", "M/s", false};
	against_floor("M3 132 x 1 exclusive", m3, exclusive, 0.85, true);
	against_peer("M3 132 x 1 exclusive, best peer", m3, exclusive, 107.2, true);

	/* The peers' best of those that write the doorbell record, and of the mode that does not. */
	struct {
		const char *metric, *shape;
		double with_record, without;
	} const rows[] = {
		{"M4", "1 x 32 threads, one QP", 10.48, 12.94},	    {"M4", "1 x 128 threads, one QP", 21.32, 45.35},
		{"M4", "1 x 1024 threads, one QP", 19.56, 73.75},   {"M4", "32 x 1 threads, one QP", 7.62, 7.81},
		{"M4", "32 x 32 threads, one QP", 34.56, 85.56},    {"M4w", "32 x 32 threads as warps, one QP", 44.61, 219.4},
	};
	for (auto &row : rows) {
		std::string name = std::string(row.metric) + " " + row.shape;
		against_peer(name + ", with record", {"A", row.metric, row.shape, "M/s", false}, shared, row.with_record, true);
		against_peer(name + ", no record", {"A", row.metric, row.shape, "M/s", false}, no_record, row.without, true);
	}

	against_floor("M5 CQE is there", {"A", "M5", "poll, CQE is there", "ns", false}, exclusive, 1.3);
	against_floor("M5 already known", {"A", "M5", "poll, already known", "ns", false}, exclusive, 1.3);
	Row m6 = {"B", "M6", "post, CPU as NIC, poll", "ns", false};
	against_peer("M6 host memory, best peer", m6, exclusive, 2287, false);
	list.push_back({"M6 host memory, CPU-proxied path", m6, exclusive,
			{"B", "M6", "M6': descriptor, CPU posts, flag", "ns", false}, "floor", 0, 1, false, false});
	return list;
}

} // namespace bench

#endif
