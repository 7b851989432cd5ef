/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* M5: what it takes to learn that a request has completed; its CQE is there, or it was counted before. */
#include "implementations.cuh"
#include "rig.cuh"

namespace bench {

constexpr uint32_t CQES = 4096;
constexpr uint64_t PATIENCE_NS = 5000000000ull;

/* `known`: all have been counted. Else every call finds a CQE; one more must find none. */
template <class I, bool on_gpu>
static __global__ void __launch_bounds__(32) poll(uint8_t *handle, uint64_t first, uint32_t count, bool known, Outcome *outcome)
{
	typename I::Poster poster;
	I::template open<on_gpu>(handle, poster);
	uint32_t warm_up = count / 8;
	uint64_t start = 0, deadline = now_ns() + PATIENCE_NS;
	uint32_t failures = 0;
#pragma unroll 1
	for (uint32_t i = 0; i < count; i++) {
		if (i == warm_up)
			start = now_ns();
		if constexpr (I::collapsed)
			if (!known)
				I::forget(poster, first + i);
		failures += !I::template poll<on_gpu>(poster, first + i, deadline);
	}
	uint64_t end = now_ns();
	if (!known && !I::collapsed && I::template poll<on_gpu>(poster, first + count, 0))
		failures += 1u << 16;
	*outcome = {start, end, failures};
}

template <class I, bool on_gpu> static void measure(Bench &bench, const Row &row, Where where, bool known)
{
	Rig &rig = bench.rig;
	uint32_t count = known ? 32768 : CQES;
	std::vector<double> values;
	for (unsigned r = 0; r < bench.placements(); r++) {
		/* One more is posted than completes. */
		uint64_t end = FIRST + count;
		Set set = rig.prepare<I>(where, 1, known ? 16 : CQES, end + 1, known ? end : FIRST, r);
		const Queue &queue = set.queues[0];
		if (!known) {
			std::vector<uint8_t> cqes(queue.cq_depth * 64);
			for (uint32_t i = 0; i < count; i++) {
				/* A collapsed CQ's one CQE is that of the last request. */
				uint64_t tail = completion_tail(I::collapsed ? end - 1 : FIRST + i, I::collapsed ? 0 : i, queue.cq_depth,
								queue.qpn);
				std::memcpy(&cqes[i * 64 + 56], &tail, 8);
			}
			rig.write_gpu(queue.cq, cqes.data(), cqes.size());
		}
		poll<I, on_gpu><<<1, 1, 0, rig.stream>>>(set.handles, FIRST, count, known, rig.outcomes);
		rig.finish(row.text().c_str());
		if (uint64_t failed = rig.failures(1))
			bench.fail(row, I::name, r,
				   failed >> 16 ? "a completion that is not there was found, " + std::to_string(failed & 0xffff) +
							  " that are there were not"
						: std::to_string(failed) + " completions that are there were not found");
		values.push_back(rig.elapsed_ns(1) / (count - count / 8));
	}
	bench.add(row, I::name, values);
}

void measure_polling(Bench &bench, bool loaded)
{
	if (!bench.wants("M5"))
		return;
	for (Where where : {Where::gpu, Where::host})
		for (bool known : {false, true})
			Implementations::for_each([&](auto i) {
				using I = decltype(i);
				Row row = {name_of(where), "M5", known ? "poll, already known" : "poll, CQE is there", "ns", loaded};
				if constexpr (I::polls) {
					if (where == Where::gpu)
						measure<I, true>(bench, row, where, known);
					else if constexpr (I::on_host)
						measure<I, false>(bench, row, where, known);
				}
			});
}

} // namespace bench
