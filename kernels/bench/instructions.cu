/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * F: single instructions, one thread, each waiting for the one before. From them one can tell which of those that an
 * implementation's SASS shows makes up its time.
 */
#include "floors.cuh"
#include "rig.cuh"

namespace bench {

namespace {
enum Instruction {
	FENCE_GPU,
	FENCE_SYS,
	STORE_FENCE_GPU,
	STORE_FENCE_SYS,
	DOORBELL,
	DOORBELL_FENCE_GPU,
	DOORBELL_FENCE_SYS,
	LOAD_L1,
	LOAD_L2,
	ATOMIC_ADD,
	/* From here on in host memory. */
	LOAD_HOST,
	LOAD_HOST_TWICE,
	LOAD_HOST_BOTH,
	INSTRUCTIONS
};
const char *const names[INSTRUCTIONS] = {"fence.release.gpu, idle",
					 "fence.release.sys, idle",
					 "16 B store, fence.release.gpu",
					 "16 B store, fence.release.sys",
					 "doorbell store",
					 "doorbell store, fence.release.gpu",
					 "doorbell store, fence.release.sys",
					 "ld, L1",
					 "ld.relaxed.sys, L2",
					 "atom.add.u64, returned",
					 "ld.relaxed.sys",
					 "the same word twice at a time",
					 "two words in two lines at a time"};
} // namespace

constexpr uint32_t WARM_UP_CALLS = 1024;
/* A load from host memory takes a microsecond. */
template <int instruction> constexpr uint32_t CALLS = instruction < LOAD_HOST ? 16384 : 4096;

template <int instruction> static __global__ void __launch_bounds__(32) repeat(Queue queue, Outcome *outcome)
{
	/* The words are zero, so that each address depends on the value before and stays. */
	uint64_t start = 0, value = 0;
	uint64_t *word = reinterpret_cast<uint64_t *>(queue.record), *other = reinterpret_cast<uint64_t *>(queue.cq_record);
#pragma unroll 1
	for (uint32_t i = 0; i < CALLS<instruction>; i++) {
		if (i == WARM_UP_CALLS)
			start = now_ns();
		if (instruction == STORE_FENCE_GPU || instruction == STORE_FENCE_SYS)
			store16(queue.ring + (i & (queue.depth - 1)) * 64, i, i, i, i);
		if (instruction == DOORBELL || instruction == DOORBELL_FENCE_GPU || instruction == DOORBELL_FENCE_SYS)
			store_mmio(queue.doorbell, i);
		if (instruction == FENCE_GPU || instruction == STORE_FENCE_GPU || instruction == DOORBELL_FENCE_GPU)
			fence_gpu();
		if (instruction == FENCE_SYS || instruction == STORE_FENCE_SYS || instruction == DOORBELL_FENCE_SYS)
			fence_sys();
		if (instruction == LOAD_L1)
			asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word + value)) : "memory");
		if (instruction == LOAD_L2 || instruction == LOAD_HOST)
			value = load_u64(word + value);
		if (instruction == LOAD_HOST_TWICE || instruction == LOAD_HOST_BOTH) {
			uint64_t first = load_u64(word + value);
			value = first + load_u64((instruction == LOAD_HOST_TWICE ? word : other) + value);
		}
		if (instruction == ATOMIC_ADD)
			value = atomicAdd(reinterpret_cast<unsigned long long *>(word + value), 0ull);
	}
	*outcome = {start, now_ns(), value};
}

template <int instruction> static void measure(Bench &bench)
{
	constexpr Where where = instruction < LOAD_HOST ? Where::gpu : Where::host;
	Row row = {name_of(where), "F", names[instruction], "ns", false};
	std::vector<double> values;
	for (unsigned r = 0; r < bench.placements(); r++) {
		using Floor = Bare<1, false>; /* for its handle only */
		Set set = bench.rig.prepare<Floor>(where, 1, 16, 0, 0, r);
		repeat<instruction><<<1, 1, 0, bench.rig.stream>>>(set.queues[0], bench.rig.outcomes);
		bench.rig.finish(names[instruction]);
		if (bench.rig.failures(1))
			bench.fail(row, "floor", r, "a word of memory is not zero");
		values.push_back(bench.rig.elapsed_ns(1) / (CALLS<instruction> - WARM_UP_CALLS));
	}
	bench.add(row, "floor", values);
}

template <int instruction> static void measure_from(Bench &bench)
{
	if constexpr (instruction < INSTRUCTIONS) {
		measure<instruction>(bench);
		measure_from<instruction + 1>(bench);
	}
}

void measure_instructions(Bench &bench)
{
	if (bench.wants("F"))
		measure_from<0>(bench);
}

} // namespace bench
