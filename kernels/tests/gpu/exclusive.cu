/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A QP that one thread posts to: data, ring wrap, many QPs. */
#include "rig.cuh"

/* Each of `rounds`: a WRITE, a completion, a READ back, a completion. */
static __global__ void put_get(ibgda_qp *qp, ibgda_region to, ibgda_region from, ibgda_u32 bytes, ibgda_u32 rounds,
			       ibgda_u64 patience, Result *result)
{
	ibgda_status status = IBGDA_OK;
	ibgda_u32 i = 0;
	ibgda_u64 start = ibgda_clock_ns();
	for (; i < rounds && status == IBGDA_OK; i++) {
		status = ibgda_put(qp, to, 0, from, 0, bytes);
		if (status == IBGDA_OK)
			status = ibgda_quiet(qp, ibgda_clock_ns() + patience);
	}
	if (status == IBGDA_OK && rounds == 1) {
		status = ibgda_get(qp, from, LEN / 2, to, 0, bytes);
		if (status == IBGDA_OK)
			status = ibgda_quiet(qp, ibgda_clock_ns() + patience);
	}
	*result = {(ibgda_u32)status, i, ibgda_clock_ns() - start, qp->send_cq->error};
}

/* Posts `count` inline WRITEs as fast as the ring lets it: a counter at the peer, one word for each block. */
static __global__ void stream(ibgda_qp *const *qps, ibgda_region to, ibgda_u64 count, Result *results)
{
	ibgda_qp *qp = qps[blockIdx.x];
	ibgda_status status = IBGDA_OK;
	ibgda_u64 start = ibgda_clock_ns();
	ibgda_u64 i = 1;
	for (; i <= count && status == IBGDA_OK; i++)
		status = ibgda_put_inline(qp, to.address + 8 * blockIdx.x, to.rkey, &i, 8);
	if (status == IBGDA_OK)
		status = ibgda_quiet(qp, ibgda_clock_ns() + 5000000000ull);
	results[blockIdx.x] = {(ibgda_u32)status, (ibgda_u32)(i - 1), ibgda_clock_ns() - start, qp->send_cq->error};
}

static __global__ void add(ibgda_qp *qp, ibgda_region to, ibgda_region from, ibgda_u32 rounds, Result *result)
{
	ibgda_status status = IBGDA_OK;
	ibgda_u32 i = 0;
	for (; i < rounds && status == IBGDA_OK; i++) {
		status = ibgda_fetch_add(qp, to.address, to.rkey, from.address, from.lkey, 3);
		if (status == IBGDA_OK)
			status = ibgda_quiet(qp, ibgda_clock_ns() + 5000000000ull);
	}
	*result = {(ibgda_u32)status, i, 0, qp->send_cq->error};
}

static void sizes()
{
	Rig rig;
	ibgda_qp *qp = rig.open(64);
	bool good = true;
	for (ibgda_u32 bytes : {0u, 1u, 3u, 8u, 28u, 29u, 64u, 4095u, 4096u, 4097u, 65536u, (unsigned)LEN / 2}) {
		for (size_t i = 0; i < LEN; i++)
			rig.buffer[0][i] = (char)(i * 131 + bytes), rig.buffer[1][i] = (char)0xee;
		put_get<<<1, 1>>>(qp, rig.region(1), rig.region(0), bytes, 1, PATIENCE, results);
		Result r = finish();
		bool same = r.status == IBGDA_OK && !std::memcmp(rig.buffer[1], rig.buffer[0], bytes) &&
			    !std::memcmp(rig.buffer[0] + LEN / 2, rig.buffer[1], bytes) &&
			    (bytes == LEN || rig.buffer[1][bytes] == (char)0xee);
		if (!same)
			std::printf("  %u bytes: status %#x\n", bytes, r.status);
		good &= same;
	}
	check(good && counters_are_clean(rig), "put and get move the right bytes, 0 to 512 KiB");
}

static void wrap()
{
	const struct {
		uint32_t depth;
		ibgda_u64 laps;
	} rings[] = {{1024, 1000}, {16, 100000}, {1, 2000}};
	for (auto ring : rings) {
		Rig rig;
		ibgda_qp *qp = rig.open(ring.depth), **list;
		must(cudaMalloc(&list, sizeof qp), "cudaMalloc");
		must(cudaMemcpy(list, &qp, sizeof qp, cudaMemcpyHostToDevice), "cudaMemcpy");
		const ibgda_u64 count = ring.depth * ring.laps / divisor;
		stream<<<1, 1>>>(list, rig.region(1), count, results);
		Result r = finish();
		cudaFree(list);
		ibgda_u64 last;
		std::memcpy(&last, rig.buffer[1], 8);
		std::printf("  ring of %u, %u WQEs, status %#x, %.2f M/s\n", ring.depth, r.rounds, r.status, r.rounds * 1e3 / (double)r.ns);
		check(r.status == IBGDA_OK && last == count && counters_are_clean(rig), "a ring is passed many times");
	}
}

static void many()
{
	Rig rig;
	const int blocks = 528;
	std::vector<ibgda_qp *> qps;
	for (int i = 0; i < blocks; i++)
		qps.push_back(rig.open(128));
	ibgda_qp **list;
	must(cudaMalloc(&list, blocks * sizeof *list), "cudaMalloc");
	must(cudaMemcpy(list, qps.data(), blocks * sizeof *list, cudaMemcpyHostToDevice), "cudaMemcpy");
	const ibgda_u64 count = 200 / divisor;
	stream<<<blocks, 1>>>(list, rig.region(1), count, results);
	finish();
	bool good = true;
	for (int i = 0; i < blocks; i++) {
		ibgda_u64 last;
		std::memcpy(&last, rig.buffer[1] + 8 * i, 8);
		if (results[i].status != IBGDA_OK || last != count) {
			std::printf("  block %d: status %#x, last %llu\n", i, results[i].status, (unsigned long long)last);
			good = false;
		}
	}
	check(good && counters_are_clean(rig), "528 QPs from 528 blocks");
}

static void atomics()
{
	Rig rig;
	ibgda_qp *qp = rig.open(16);
	add<<<1, 1>>>(qp, rig.region(1), rig.region(0), 1000, results);
	Result r = finish();
	ibgda_u64 sum, old;
	std::memcpy(&sum, rig.buffer[1], 8);
	std::memcpy(&old, rig.buffer[0], 8);
	check(r.status == IBGDA_OK && sum == 3000 && old == 2997, "fetch-add counts");
}

static void latency()
{
	Rig rig;
	ibgda_qp *qp = rig.open(64);
	std::vector<double> ns;
	for (int i = 0; i < 15; i++) {
		put_get<<<1, 1>>>(qp, rig.region(1), rig.region(0), 8, 1000 / divisor, PATIENCE, results);
		Result r = finish();
		if (r.status == IBGDA_OK)
			ns.push_back((double)r.ns / r.rounds);
	}
	std::sort(ns.begin(), ns.end());
	if (!ns.empty())
		std::printf("  8-byte WRITE, post to completion through the CPU engine: median %.0f ns (%.0f to %.0f)\n",
			    ns[ns.size() / 2], ns.front(), ns.back());
	check(ns.size() == 15, "WRITEs, one at a time");
}

static const Test test_sizes(sizes), test_wrap(wrap), test_many(many), test_atomics(atomics), test_latency(latency);
