/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The device header on a GPU, against the ConnectX model in this process: queues, records and doorbell pages lie in pinned
 * host memory, the model's engine thread is the NIC. Data is compared byte for byte, errors are raised on purpose.
 * kernels/run-h200.sh builds and runs it; the last line is "N passed, N failed".
 */
#include "rig.cuh"

#include <chrono>

Result *results;
unsigned divisor = 1;
static int passed, failed;

static std::vector<void (*)()> &tests()
{
	static std::vector<void (*)()> list;
	return list;
}

Test::Test(void (*run)()) { tests().push_back(run); }

void check(bool good, const char *name)
{
	static auto since = std::chrono::steady_clock::now();
	auto now = std::chrono::steady_clock::now();
	std::printf("%s … %s (%.1f s)\n", name, good ? "ok" : "FAILED", std::chrono::duration<double>(now - since).count());
	since = now;
	std::fflush(stdout);
	(good ? passed : failed)++;
}

Result finish()
{
	must(cudaGetLastError(), "kernel launch");
	must(cudaDeviceSynchronize(), "kernel");
	return results[0];
}

bool counters_are_clean(Rig &rig)
{
	bool clean = true;
	for (const char *name : {"torn_wqes", "doorbells_ahead", "foreign_doorbells", "dma_faults"})
		for (uint32_t i = 0; i < 2; i++)
			if (uint64_t count = cx_count(rig.fabric, i, name)) {
				std::printf("  nic%u %s %llu\n", i, name, (unsigned long long)count);
				clean = false;
			}
	return clean;
}

int main(int argc, char **argv)
{
	if (argc > 1 && !std::strcmp(argv[1], "quick"))
		divisor = 50;
	cudaDeviceProp card;
	must(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");
	int driver = 0;
	must(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
	std::printf("%s, sm_%d%d, driver API %d.%d\n", card.name, card.major, card.minor, driver / 1000, driver % 1000 / 10);
	must(cudaHostAlloc(&results, RESULTS * sizeof *results, cudaHostAllocMapped), "cudaHostAlloc");
	for (void (*test)() : tests())
		test();
	std::printf("%d passed, %d failed\n", passed, failed);
	return failed != 0;
}
