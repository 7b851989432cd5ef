/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * M1 (M1i inline): one thread, a doorbell for each WQE. M2 (M2w: a warp): a doorbell for 32. M3 (M3w): many threads (warps),
 * each with a QP of its own.
 */
#include "implementations.cuh"
#include "rig.cuh"

namespace bench {

/* One poster for each block, a thread or a warp. Calls before the warm_up-th are not timed. */
template <class I, bool on_gpu, Scope scope, bool inlined, uint32_t batch>
static __global__ void __launch_bounds__(32) post(uint8_t *handles, size_t stride, Plan plan, uint32_t warm_up, Outcome *outcomes)
{
	typename I::Poster poster;
	I::template open<on_gpu>(handles + blockIdx.x * stride, poster);
	plan.rkey += blockIdx.x;
	uint64_t start = 0;
	uint32_t failures = 0;
#pragma unroll 1
	for (uint32_t i = 0; i < plan.each; i += batch) {
		if (i == warm_up)
			start = now_ns();
		failures += !I::template post<on_gpu, scope, inlined>(poster, request_of(plan, threadIdx.x, i), batch);
	}
	uint64_t end = now_ns();
	if (threadIdx.x == 0)
		outcomes[blockIdx.x] = {start, end, 0};
	__syncwarp();
	if (failures)
		atomicAdd_system(reinterpret_cast<unsigned long long *>(&outcomes[blockIdx.x].failures), failures);
}

struct Posting {
	Bench &bench;
	Row row;
	Where where;
	uint32_t queues;  /* one block for each */
	uint32_t calls, warm_up;
	unsigned repeats; /* each at a place of its own */

	template <class I, bool on_gpu, Scope scope, bool inlined, uint32_t batch> void measure() const
	{
		Rig &rig = bench.rig;
		Plan plan = {0x11223344556677ull << 8, 0x0102030405060700ull, 0xa1b2c300, 0x99aabb00, 0x1234, 1, calls * batch, inlined};
		if (scope == Scope::warp)
			plan.posters = 32;
		std::vector<double> values;
		for (unsigned i = 0; i < repeats; i++) {
			Set set = rig.prepare<I>(where, queues, 16, FIRST, FAR_AHEAD, i);
			post<I, on_gpu, scope, inlined, batch><<<queues, plan.posters, 0, rig.stream>>>(
				set.handles, set.stride, plan, warm_up * batch, rig.outcomes);
			rig.finish(row.text().c_str());
			std::string wrong = rig.check(set, plan, I::record);
			if (uint64_t failed = rig.failures(queues))
				wrong = std::to_string(failed) + " calls failed; " + wrong;
			if (!wrong.empty())
				bench.fail(row, I::name, i, wrong);
			double wqes = (double)(calls - warm_up) * batch * plan.posters * queues, ns = rig.elapsed_ns(queues);
			values.push_back(row.unit == "ns" ? ns / wqes : wqes / ns * 1e3);
		}
		bench.add(row, I::name, values);
	}

	template <class I, Scope scope, bool inlined, uint32_t batch> void one() const
	{
		if constexpr (I::posts && (scope == Scope::thread || I::warps)) {
			if (where != Where::host)
				measure<I, true, scope, inlined, batch>();
			else if constexpr (I::on_host)
				measure<I, false, scope, inlined, batch>();
		}
	}

	template <Scope scope, bool inlined, uint32_t batch> void all() const
	{
		Implementations::for_each([&](auto i) { one<decltype(i), scope, inlined, batch>(); });
	}
};

void measure_posting(Bench &bench, bool loaded)
{
	unsigned places = bench.placements(), repeats = bench.repeats();
	for (Where where : {Where::gpu, Where::host}) {
		auto row = [&](const char *metric, const char *shape, const char *unit) {
			return Row{name_of(where), metric, shape, unit, loaded};
		};
		if (bench.wants("M1"))
			Posting{bench, row("M1", "write, 1 thread, own doorbell", "ns"), where, 1, 2304, 256, places}
				.all<Scope::thread, false, 1>();
		if (loaded)
			continue;
		if (bench.wants("M1i"))
			Posting{bench, row("M1i", "inline 8 B, 1 thread, own doorbell", "ns"), where, 1, 2304, 256, places}
				.all<Scope::thread, true, 1>();
		if (bench.wants("M2"))
			Posting{bench, row("M2", "1 thread, doorbell per 32", "ns"), where, 1, 576, 64, places}
				.all<Scope::thread, false, 32>();
		if (bench.wants("M2w"))
			Posting{bench, row("M2w", "1 warp, doorbell per 32", "ns"), where, 1, 1088, 64, places}
				.all<Scope::warp, false, 1>();
		for (uint32_t queues : {132u, 528u}) {
			/* Rings of 528 QPs in host memory say nothing but how fast the link is, as those of 132 do. */
			if (queues > 132 && where == Where::host)
				continue;
			std::string n = std::to_string(queues);
			if (bench.wants("M3"))
				Posting{bench, row("M3", (n + " x 1 thread, own QP").c_str(), "M/s"), where, queues, 2304, 256, repeats}
					.all<Scope::thread, false, 1>();
			if (bench.wants("M3") && queues == 132)
				Posting{bench, row("M3", (n + " x 1 thread, own QP, doorbell per 32").c_str(), "M/s"), where, queues,
					576, 64, repeats}
					.all<Scope::thread, false, 32>();
			if (bench.wants("M3w"))
				Posting{bench, row("M3w", (n + " x 1 warp, own QP, doorbell per 32").c_str(), "M/s"), where, queues,
					1088, 64, repeats}
					.all<Scope::warp, false, 1>();
		}
	}
}

} // namespace bench
