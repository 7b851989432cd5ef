/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* M4: many threads post to one QP, one WQE a call; M4w: in warps, one doorbell for 32. */
#include "implementations.cuh"
#include "rig.cuh"

namespace bench {

template <class I, Scope scope>
static __global__ void __launch_bounds__(1024) contend(uint8_t *handle, Plan plan, Outcome *outcomes)
{
	typename I::Poster poster;
	I::template open<true>(handle, poster);
	uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, failures = 0;
	/* All of a block begin at once; blocks begin as the GPU launches them, within microseconds. */
	__syncthreads();
	uint64_t start = now_ns();
#pragma unroll 1
	for (uint32_t i = 0; i < plan.each; i++)
		failures += !I::template post<true, scope, false>(poster, request_of(plan, me, i), 1);
	__syncwarp();
	uint64_t end = now_ns();
	/* Warps of a block of one thread have one outcome too. */
	uint32_t warps = (blockDim.x + 31) / 32;
	Outcome *outcome = &outcomes[blockIdx.x * warps + threadIdx.x / 32];
	if (threadIdx.x % 32 == 0)
		*outcome = {start, end, 0};
	__syncwarp();
	if (failures)
		atomicAdd_system(reinterpret_cast<unsigned long long *>(&outcome->failures), failures);
}

struct Contention {
	Bench &bench;
	Row row;
	uint32_t blocks, threads;

	template <class I, Scope scope> void measure() const
	{
		Rig &rig = bench.rig;
		/* Enough for the slowest to show, not so much that it takes seconds. */
		Plan plan = {0x11223344556677ull << 8, 0x0102030405060700ull, 0xa1b2c300,       0x99aabb00, 0x1234,
			     blocks * threads,	       65536 / (blocks * threads),	false};
		uint32_t warps = blocks * ((threads + 31) / 32);
		std::vector<double> values;
		/* The first repeat warms up. */
		for (unsigned i = 0; i <= bench.repeats(); i++) {
			Set set = rig.prepare<I>(Where::gpu, 1, 16, FIRST, FAR_AHEAD, i);
			contend<I, scope><<<blocks, threads, 0, rig.stream>>>(set.handles, plan, rig.outcomes);
			rig.finish(row.text().c_str());
			std::string wrong = rig.check(set, plan, I::record);
			if (uint64_t failed = rig.failures(warps))
				wrong = std::to_string(failed) + " calls failed; " + wrong;
			if (!wrong.empty())
				bench.fail(row, I::name, i, wrong);
			if (i)
				values.push_back((double)plan.total() / rig.elapsed_ns(warps) * 1e3);
		}
		bench.add(row, I::name, values);
	}
};

void measure_contention(Bench &bench)
{
	struct {
		uint32_t blocks, threads;
	} const shapes[] = {{32, 1}, {4, 32}, {32, 32}, {1, 32}, {1, 128}, {1, 1024}};
	for (bool warps : {false, true})
		for (auto shape : shapes) {
			if (!bench.wants(warps ? "M4w" : "M4") || (warps && shape.threads < 32))
				continue;
			Row row = {"A", warps ? "M4w" : "M4",
				   std::to_string(shape.blocks) + " x " + std::to_string(shape.threads) +
					   (warps ? " threads as warps, one QP" : " threads, one QP"),
				   "M/s", false};
			Contention contention = {bench, row, shape.blocks, shape.threads};
			Implementations::for_each([&](auto i) {
				using I = decltype(i);
				if constexpr (I::contends) {
					if (!warps)
						contention.measure<I, Scope::thread>();
					else if constexpr (I::warps)
						contention.measure<I, Scope::warp>();
				}
			});
		}
}

} // namespace bench
