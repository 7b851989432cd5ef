/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What posting and polling cost, without a NIC: one table of the metrics below for our header and for the floors under it, all
 * in one run, then the targets of the project's issue. Build it with build.sh, run it on an idle GPU:
 *
 *   bench [--quick] [--only METRIC[,METRIC…]] [--json FILE]
 *
 * Exit status 0: every WQE, record, doorbell and completion was as it must be, whatever the times; 1: one was not; 2: the run
 * could not be made.
 *
 * F   single instructions			    M1  one WQE per doorbell, 1 thread (M1i: 8 bytes inline)
 * M2  one doorbell for 32, thread (M2w: warp)	    M3  many threads (M3w: warps), each with its own QP
 * M4  many threads on one QP (M4w: as warps)	    M5  poll
 * M6  post, CPU as NIC, poll
 *
 * Queues: A in GPU memory, B in pinned host memory, C send queue in GPU memory and CQ in host memory. Doorbells are pages of
 * host memory, so that a doorbell store crosses the link like one to a NIC. Rings have 1024 slots that are all known to be free.
 * "link busy": while copies saturate the link in both directions.
 */
#include <cstring>

#include "link_load.cuh"
#include "machine.h"
#include "rig.cuh"
#include "targets.h"

using namespace bench;

static const char *const METRICS[] = {"F", "M1", "M1i", "M2", "M2w", "M3", "M3w", "M4", "M4w", "M5", "M6"};

static int usage(const std::string &wrong)
{
	std::string metrics;
	for (const char *metric : METRICS)
		metrics += std::string(" ") + metric;
	std::fprintf(stderr, "%s\nusage: bench [--quick] [--only METRIC[,METRIC…]] [--json FILE]\nmetrics:%s\n", wrong.c_str(),
		     metrics.c_str());
	return 2;
}

/* Empty, or what is wrong. */
static std::string parse(int argc, char **argv, Options &options)
{
	for (int i = 1; i < argc; i++) {
		std::string word = argv[i];
		if (word == "--quick") {
			options.quick = true;
		} else if (word == "--json" && i + 1 < argc) {
			options.json = argv[++i];
		} else if (word == "--only" && i + 1 < argc) {
			std::string rest = argv[++i];
			while (!rest.empty()) {
				size_t comma = rest.find(',');
				std::string metric = rest.substr(0, comma);
				rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
				bool known = false;
				for (const char *name : METRICS)
					known |= metric == name;
				if (!known)
					return "no metric '" + metric + "'";
				options.only.push_back(metric);
			}
		} else {
			return "'" + word + "': " + (word == "--json" || word == "--only" ? "needs a value" : "no such option");
		}
	}
	return "";
}

/* The first milliseconds of a GPU that was idle are slower. */
static __global__ void spin(uint64_t ns)
{
	uint64_t end = now_ns() + ns;
	while (now_ns() < end)
		;
}

int main(int argc, char **argv)
{
	Options options;
	std::string wrong = parse(argc, argv, options);
	if (!wrong.empty())
		return usage(wrong);
	std::FILE *file = nullptr;
	if (!options.json.empty() && !(file = std::fopen(options.json.c_str(), "w"))) {
		std::perror(options.json.c_str());
		return 2;
	}

	cudaDeviceProp card;
	int driver_api = 0;
	char bus_id[32];
	CUDA(cudaDriverGetVersion(&driver_api));
	CUDA(cudaGetDeviceProperties(&card, 0));
	std::snprintf(bus_id, sizeof bus_id, "%04x:%02x:%02x.0", card.pciDomainID, card.pciBusID, card.pciDeviceID);
	std::string place = move_next_to(bus_id), device = std::string("/sys/bus/pci/devices/") + bus_id;
	std::vector<std::pair<std::string, std::string>> head = {
		{"gpu", card.name},
		{"driver", driver_version()},
		{"driver_api", std::to_string(driver_api / 1000) + "." + std::to_string(driver_api % 1000 / 10)},
		{"nvcc", std::to_string(__CUDACC_VER_MAJOR__) + "." + std::to_string(__CUDACC_VER_MINOR__) + "." +
				 std::to_string(__CUDACC_VER_BUILD__)},
		{"date", date_utc()},
		{"link", line_in(device + "/current_link_speed") + " x" + line_in(device + "/current_link_width")},
		{"cpu_threads", place},
		{"repeats", options.quick ? "3 placements, 3 repeats" : "15 placements, 7 repeats"}};
	for (const auto &entry : head)
		std::printf("%s: %s\n", entry.first.c_str(), entry.second.c_str());
	std::fflush(stdout);

	Rig rig;
	Report report;
	Bench bench = {rig, report, options};
	spin<<<1, 1, 0, rig.stream>>>(300000000);
	rig.finish("warm-up");

	measure_instructions(bench);
	measure_posting(bench, false);
	measure_contention(bench);
	measure_polling(bench, false);
	measure_round_trips(bench, false);
	if (bench.wants("M1") || bench.wants("M5") || bench.wants("M6")) {
		LinkLoad load;
		measure_posting(bench, true);
		measure_polling(bench, true);
		measure_round_trips(bench, true);
		std::pair<double, double> gbps = load.finish();
		head.push_back({"link_busy", number(gbps.first) + " GB/s to the GPU, " + number(gbps.second) + " GB/s from it"});
		std::printf("link_busy: %s\n", head.back().second.c_str());
	}

	std::printf("\n%s\n", report.table().c_str());
	for (const Target &target : targets())
		std::printf("%s\n", line_of(target, judge(target, report)).c_str());
	std::printf("\n");
	for (const std::string &failure : report.failures)
		std::printf("FAILED %s\n", failure.c_str());
	std::printf("checks: %zu failed\n", report.failures.size());
	if (file) {
		bool good = std::fputs(json(report, targets(), head).c_str(), file) >= 0;
		if (std::fclose(file) || !good) {
			std::perror(options.json.c_str());
			return 2;
		}
	}
	return report.failures.empty() ? 0 : 1;
}
