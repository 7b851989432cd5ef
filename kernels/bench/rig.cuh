/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* GPU and pinned memory, queues laid out in it at varied places, and what every measurement does with them. */
#ifndef IBGDA_BENCH_RIG_CUH
#define IBGDA_BENCH_RIG_CUH

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "check.h"
#include "plan.h"
#include "report.h"
#include "trait.cuh"

namespace bench {

/* Ends the program: what was called, where, and what CUDA says. */
void cuda_check(cudaError_t error, const char *call, const char *file, int line);
#define CUDA(call) ::bench::cuda_check((call), #call, __FILE__, __LINE__)

/* Beyond the 16 bits of a WQE counter, and all of the ring's laps. */
constexpr uint64_t FIRST = 1u << 20;
/* A consumer index that says of every slot of a measurement that it is free. */
constexpr uint64_t FAR_AHEAD = FIRST + (1u << 30);
constexpr uint32_t QPN = 0x4a00;
constexpr uint32_t MAX_QUEUES = 528;
constexpr uint32_t MAX_OUTCOMES = 1024;

/* What a thread or warp of a kernel has to say: its times on the GPU's clock, and calls that failed. */
struct Outcome {
	uint64_t start, end;
	uint64_t failures;
};

/* QPs with their handles in GPU memory, `stride` bytes apart. */
struct Set {
	std::vector<Queue> queues;
	bool on_gpu;
	uint8_t *handles;
	size_t stride;
};

class Rig {
public:
	cudaStream_t stream;
	Outcome *outcomes; /* pinned; the GPU has the same address */
	uint8_t *words;	   /* pinned, 4096 bytes: flags and descriptors of round trips */

	Rig();
	~Rig();
	Rig(const Rig &) = delete;

	/*
	 * `count` QPs of I, poisoned, at a place that `placement` chooses: an L2 line is near to an SM or far, so that one place
	 * says little. CQEs are invalid.
	 */
	template <class I>
	Set prepare(Where where, uint32_t count, uint32_t cq_depth, uint64_t producer, uint64_t completed, unsigned placement)
	{
		Set set = lay_out(where, count, cq_depth, producer, completed, I::handle_bytes, placement);
		std::vector<uint8_t> image(count * set.stride);
		for (uint32_t i = 0; i < count; i++)
			I::set_up(set.queues[i], &image[i * set.stride], reinterpret_cast<uint64_t>(set.handles) + i * set.stride);
		write_gpu(set.handles, image.data(), image.size());
		return set;
	}

	/* Memory of the GPU or pinned memory, by the host. */
	void write_gpu(void *to, const void *from, size_t bytes);
	void read(void *to, const void *from, size_t bytes);

	/* Waits for the kernel launched on `stream`; one that does not end within half a minute ends the program. */
	void finish(const char *what);

	/* Empty, or what is wrong with the queues after `plan` was posted to each (rkeys one apart, as the kernels do it). */
	std::string check(const Set &set, const Plan &plan, bool record);

	/* From the first outcome's start to the last one's end; failures of them all. */
	double elapsed_ns(uint32_t count) const;
	uint64_t failures(uint32_t count) const;

private:
	uint8_t *gpu, *host, *pages;
	Set lay_out(Where where, uint32_t count, uint32_t cq_depth, uint64_t producer, uint64_t completed, size_t handle_bytes,
		    unsigned placement);
};

struct Options {
	bool quick = false;
	std::vector<std::string> only; /* metrics; empty: all */
	std::string json;
};

/* What the files of metrics share. */
struct Bench {
	Rig &rig;
	Report &report;
	Options options;

	bool wants(const std::string &metric) const;
	unsigned placements() const { return options.quick ? 3 : 15; }
	unsigned repeats() const { return options.quick ? 3 : 7; }
	/* Into the report, with a line of progress. */
	void add(const Row &row, const std::string &implementation, const std::vector<double> &values);
	/* A check's or a kernel's failure. */
	void fail(const Row &row, const std::string &implementation, unsigned repeat, const std::string &what);
};

/* The files of metrics; `loaded`: copies run meanwhile, fewer rows. */
void measure_instructions(Bench &);
void measure_posting(Bench &, bool loaded);
void measure_contention(Bench &);
void measure_polling(Bench &, bool loaded);
void measure_round_trips(Bench &, bool loaded);

} // namespace bench

#endif
