/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * M6: post, a CPU thread as NIC, poll. Beside it, in the same run: a flag from GPU to CPU and back, under which nothing can
 * go, and M6', the same request handed to a CPU proxy that is idealised (cpu_nic.h).
 */
#include "cpu_nic.h"
#include "implementations.cuh"
#include "rig.cuh"

namespace bench {

constexpr uint32_t ROUNDS = 3072, WARM_UP = 512;
constexpr uint64_t PATIENCE_NS = 5000000000ull;
/* Looks at a flag in host memory: seconds. */
constexpr uint32_t LOOKS = 1u << 22;

template <class I, bool on_gpu>
static __global__ void __launch_bounds__(32) post_and_poll(uint8_t *handle, uint64_t first, Plan plan, Outcome *outcome)
{
	typename I::Poster poster;
	I::template open<on_gpu>(handle, poster);
	uint64_t start = 0, deadline = now_ns() + PATIENCE_NS;
	uint32_t i = 0;
#pragma unroll 1
	for (; i < plan.each; i++) {
		if (i == WARM_UP)
			start = now_ns();
		if (!I::template post<on_gpu, Scope::thread, false>(poster, request_of(plan, 0, i), 1) ||
		    !I::template poll<on_gpu>(poster, first + i, deadline))
			break;
	}
	*outcome = {start, now_ns(), plan.each - i};
}

static __device__ bool await_done(const uint64_t *done, uint64_t value)
{
	for (uint32_t i = 0; i < LOOKS; i++)
		if (load_u64(done) == value)
			return true;
	return false;
}

static __global__ void __launch_bounds__(32) flags(uint64_t *flag, const uint64_t *done, uint32_t rounds, Outcome *outcome)
{
	uint64_t start = 0;
	uint32_t i = 0;
#pragma unroll 1
	for (; i < rounds; i++) {
		if (i == WARM_UP)
			start = now_ns();
		store_u64(flag, i + 1);
		if (!await_done(done, i + 1))
			break;
	}
	*outcome = {start, now_ns(), rounds - i};
}

static __global__ void __launch_bounds__(32) hand_over(Descriptor *descriptor, const uint64_t *done, uint32_t qpn, Plan plan,
						       Outcome *outcome)
{
	uint64_t start = 0;
	uint32_t i = 0;
#pragma unroll 1
	for (; i < plan.each; i++) {
		if (i == WARM_UP)
			start = now_ns();
		Request request = request_of(plan, 0, i);
		store16(descriptor, (uint32_t)request.remote, (uint32_t)(request.remote >> 32), (uint32_t)request.local,
			(uint32_t)(request.local >> 32));
		store16(&descriptor->rkey, request.rkey, request.lkey, request.bytes, qpn);
		/* The descriptor before the word that says that it is there. */
		fence_gpu();
		store_u64(&descriptor->sequence, i + 1);
		if (!await_done(done, i + 1))
			break;
	}
	*outcome = {start, now_ns(), plan.each - i};
}

static Plan round_plan()
{
	return {0x11223344556677ull << 8, 0x0102030405060700ull, 0xa1b2c300, 0x99aabb00, 0x1234, 1, ROUNDS, false};
}

/* `launch` starts the kernel while the engine runs; `check` looks at what was left. */
template <class Prepare, class Engine_, class Launch, class Check>
static void repeat(Bench &bench, const Row &row, const char *name, Prepare prepare, Engine_ engine, Launch launch, Check check)
{
	std::vector<double> values;
	for (unsigned r = 0; r < bench.repeats(); r++) {
		auto set = prepare(r);
		std::string wrong;
		{
			Engine cpu([&](const std::atomic<bool> &stop) { return engine(set, stop); });
			launch(set);
			bench.rig.finish(row.text().c_str());
			wrong = cpu.finish();
		}
		if (uint64_t failed = bench.rig.failures(1))
			wrong += " the GPU gave up " + std::to_string(failed) + " rounds before the end";
		if (wrong.empty())
			wrong = check(set);
		if (!wrong.empty())
			bench.fail(row, name, r, wrong);
		values.push_back(bench.rig.elapsed_ns(1) / (ROUNDS - WARM_UP));
	}
	bench.add(row, name, values);
}

template <class I, bool on_gpu> static void measure(Bench &bench, const Row &row, Where where)
{
	Plan plan = round_plan();
	Rig &rig = bench.rig;
	repeat(
		bench, row, I::name, [&](unsigned r) { return rig.prepare<I>(where, 1, DEPTH, FIRST, FIRST, r); },
		[&](const Set &set, const std::atomic<bool> &stop) {
			return be_nic(set.queues[0], plan, where == Where::host, I::record, I::collapsed, stop);
		},
		[&](const Set &set) {
			post_and_poll<I, on_gpu><<<1, 1, 0, rig.stream>>>(set.handles, FIRST, plan, rig.outcomes);
		},
		[&](const Set &set) { return rig.check(set, plan, I::record); });
}

void measure_round_trips(Bench &bench, bool loaded)
{
	if (!bench.wants("M6"))
		return;
	Rig &rig = bench.rig;
	Plan plan = round_plan();
	/* Flags in both directions, on lines of their own. */
	Descriptor *descriptor = reinterpret_cast<Descriptor *>(rig.words);
	uint64_t *done = reinterpret_cast<uint64_t *>(rig.words + 1024);
	using Floor = Bare<1, false>; /* for its handle only */
	auto prepare = [&](unsigned r) {
		std::memset(rig.words, 0, 4096);
		return rig.prepare<Floor>(Where::host, 1, 16, FIRST, FIRST, r);
	};
	repeat(
		bench, {"B", "M6", "flag GPU, CPU, GPU", "ns", loaded}, "floor", prepare,
		[&](const Set &, const std::atomic<bool> &stop) { return be_mirror(&descriptor->sequence, done, ROUNDS, stop); },
		[&](const Set &) { flags<<<1, 1, 0, rig.stream>>>(&descriptor->sequence, done, ROUNDS, rig.outcomes); },
		[&](const Set &) { return std::string(); });
	repeat(
		bench, {"B", "M6", "M6': descriptor, CPU posts, flag", "ns", loaded}, "floor", prepare,
		[&](const Set &set, const std::atomic<bool> &stop) {
			return be_proxy(set.queues[0], descriptor, done, ROUNDS, stop);
		},
		[&](const Set &set) {
			hand_over<<<1, 1, 0, rig.stream>>>(descriptor, done, set.queues[0].qpn, plan, rig.outcomes);
		},
		[&](const Set &set) { return rig.check(set, plan, true); });

	for (Where where : {Where::host, Where::mixed})
		Implementations::for_each([&](auto i) {
			using I = decltype(i);
			Row row = {name_of(where), "M6", "post, CPU as NIC, poll", "ns", loaded};
			if constexpr (I::posts && I::polls) {
				if (where == Where::mixed)
					measure<I, true>(bench, row, where);
				else if constexpr (I::on_host)
					measure<I, false>(bench, row, where);
			}
		});
}

} // namespace bench
