/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Copies that keep the PCIe link busy in both directions for as long as the object lives. */
#ifndef IBGDA_BENCH_LINK_LOAD_CUH
#define IBGDA_BENCH_LINK_LOAD_CUH

#include <atomic>
#include <chrono>
#include <thread>

#include "rig.cuh"

namespace bench {

class LinkLoad {
	static constexpr size_t BYTES = 16u << 20;
	/* One copies, the next waits behind it. */
	static constexpr int UNDER_WAY = 2;

	struct Direction {
		cudaStream_t stream;
		uint8_t *gpu, *host;
		cudaEvent_t done[UNDER_WAY];
		double gbps = 0;
		std::thread thread;
	} directions[2];
	std::atomic<bool> stop{false};
	std::atomic<int> running{0};

	void copy(Direction &d, bool to_gpu)
	{
		auto start = std::chrono::steady_clock::now();
		size_t copies = 0;
		for (; !stop; copies++) {
			cudaEvent_t done = d.done[copies % UNDER_WAY];
			/* An event that was never recorded has happened. */
			CUDA(cudaEventSynchronize(done));
			if (to_gpu)
				CUDA(cudaMemcpyAsync(d.gpu, d.host, BYTES, cudaMemcpyHostToDevice, d.stream));
			else
				CUDA(cudaMemcpyAsync(d.host, d.gpu, BYTES, cudaMemcpyDeviceToHost, d.stream));
			CUDA(cudaEventRecord(done, d.stream));
			if (copies == UNDER_WAY)
				running++;
		}
		CUDA(cudaStreamSynchronize(d.stream));
		d.gbps = (double)copies * BYTES / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 1e9;
	}

public:
	LinkLoad()
	{
		for (Direction &d : directions) {
			CUDA(cudaStreamCreateWithFlags(&d.stream, cudaStreamNonBlocking));
			CUDA(cudaMalloc(&d.gpu, BYTES));
			CUDA(cudaHostAlloc(&d.host, BYTES, cudaHostAllocDefault));
			for (cudaEvent_t &event : d.done)
				CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
		}
		for (int i = 0; i < 2; i++)
			directions[i].thread = std::thread([this, i] { copy(directions[i], i == 0); });
		while (running < 2)
			std::this_thread::yield();
	}
	LinkLoad(const LinkLoad &) = delete;

	/* Ends the copies: GB/s to the GPU and from it. */
	std::pair<double, double> finish()
	{
		stop = true;
		for (Direction &d : directions)
			d.thread.join();
		return {directions[0].gbps, directions[1].gbps};
	}

	~LinkLoad()
	{
		stop = true;
		for (Direction &d : directions) {
			if (d.thread.joinable())
				d.thread.join();
			for (cudaEvent_t event : d.done)
				cudaEventDestroy(event);
			cudaFreeHost(d.host);
			cudaFree(d.gpu);
			cudaStreamDestroy(d.stream);
		}
	}
};

} // namespace bench

#endif
