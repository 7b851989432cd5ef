/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The device header on a GPU, against the ConnectX model in this process: queues, records and doorbell pages lie in pinned
 * host memory, the model's engine thread is the NIC. Data is compared byte for byte, errors are raised on purpose.
 * kernels/run-h200.sh builds and runs it; the last line is "N passed, N failed".
 */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <connectx_inproc.h>
#include <ibgda_device.cuh>

static void must(cudaError_t error, const char *what)
{
	if (error == cudaSuccess)
		return;
	std::printf("%s: %s\n", what, cudaGetErrorString(error));
	std::exit(1);
}

static void must(int result, const char *what)
{
	if (!result)
		return;
	std::printf("%s: %s\n", what, cx_error());
	std::exit(1);
}

static const size_t LEN = 1 << 20;
static const ibgda_u64 PATIENCE = 5000000000ull;

/* Pinned host memory that the GPU and the engine see at one address. */
static char *pinned(cx_fabric *fabric, size_t bytes)
{
	void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), *device;
	if (memory == MAP_FAILED) {
		std::perror("mmap");
		std::exit(1);
	}
	std::memset(memory, 0, bytes);
	must(cudaHostRegister(memory, bytes, cudaHostRegisterMapped), "cudaHostRegister");
	must(cudaHostGetDevicePointer(&device, memory, 0), "cudaHostGetDevicePointer");
	if (device != memory) {
		std::printf("the GPU sees host memory at another address: not supported by this program\n");
		std::exit(1);
	}
	must(cx_register(fabric, memory, bytes), "cx_register");
	return static_cast<char *>(memory);
}

/* Two functions of the model, a QP pair between them, a buffer on each. */
struct Rig {
	cx_fabric *fabric = cx_open(2, UINT64_MAX);
	uint32_t pd[2], key[2];
	char *buffer[2];
	std::vector<cx_qp> qps;
	const ibgda_u64 *status;

	Rig()
	{
		if (!fabric)
			must(-1, "cx_open");
		for (uint32_t i = 0; i < 2; i++) {
			buffer[i] = pinned(fabric, LEN);
			must(cx_alloc_pd(fabric, i, &pd[i]), "cx_alloc_pd");
			must(cx_create_mkey(fabric, i, pd[i], (uint64_t)buffer[i], LEN, CX_ACCESS_ALL, &key[i]),
			     "cx_create_mkey");
		}
		void *page = (void *)cx_status_page(fabric, 0);
		must(cudaHostRegister(page, 4096, cudaHostRegisterMapped), "cudaHostRegister of the status page");
		status = static_cast<const ibgda_u64 *>(page);
	}

	~Rig()
	{
		cudaHostUnregister((void *)status);
		cx_close(fabric);
		for (char *memory : buffer)
			cudaHostUnregister(memory), munmap(memory, LEN);
	}

	/* Handles, in GPU memory, of a new QP on function 0 that is connected to one on function 1. */
	ibgda_qp *open(uint32_t depth, ibgda_u64 post_timeout = PATIENCE)
	{
		cx_qp pair[2];
		size_t bytes = (cx_qp_bytes(depth, 0) + 4095) & ~(size_t)4095;
		for (uint32_t i = 0; i < 2; i++)
			must(cx_open_qp(fabric, i, pd[i], depth, 0, 0, pinned(fabric, bytes), pinned(fabric, 4096), &pair[i]),
			     "cx_open_qp");
		must(cx_connect(fabric, 0, pair[0].qpn, cx_lid(fabric, 1), pair[1].qpn), "cx_connect");
		must(cx_connect(fabric, 1, pair[1].qpn, cx_lid(fabric, 0), pair[0].qpn), "cx_connect");
		qps.push_back(pair[0]);

		char *device;
		must(cudaMalloc(&device, sizeof(ibgda_qp) + sizeof(ibgda_cq)), "cudaMalloc");
		ibgda_cq cq = {};
		cq.ring = (const ibgda_u8 *)pair[0].send_cq_ring;
		cq.doorbell_record = (ibgda_u32 *)pair[0].send_cq_record;
		cq.status_page = status;
		cq.number = pair[0].send_cqn;
		cq.depth = depth;
		cq.generation = 1;
		ibgda_qp qp = {};
		qp.send_ring = (ibgda_u8 *)pair[0].send_ring;
		qp.doorbell_record = (ibgda_u32 *)pair[0].record;
		qp.doorbell = (ibgda_u64 *)pair[0].doorbell;
		qp.send_cq = (ibgda_cq *)(device + sizeof(ibgda_qp));
		qp.number = pair[0].qpn;
		qp.send_depth = depth;
		qp.post_timeout_ns = post_timeout;
		must(cudaMemcpy(device, &qp, sizeof qp, cudaMemcpyHostToDevice), "cudaMemcpy");
		must(cudaMemcpy(device + sizeof qp, &cq, sizeof cq, cudaMemcpyHostToDevice), "cudaMemcpy");
		return (ibgda_qp *)device;
	}

	ibgda_region region(int i)
	{
		return {(ibgda_u64)buffer[i], LEN, key[i], key[i]};
	}
};

struct Result {
	ibgda_u32 status;
	ibgda_u32 rounds;
	ibgda_u64 ns;
	ibgda_error error;
};

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

static int passed, failed;
static Result *results;

static void check(bool good, const char *name)
{
	std::printf("%s … %s\n", name, good ? "ok" : "FAILED");
	(good ? passed : failed)++;
}

static Result finish()
{
	must(cudaGetLastError(), "kernel launch");
	must(cudaDeviceSynchronize(), "kernel");
	return results[0];
}

static bool counters_are_clean(Rig &rig)
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
	Rig rig;
	ibgda_qp *qp = rig.open(16), **list;
	must(cudaMalloc(&list, sizeof qp), "cudaMalloc");
	must(cudaMemcpy(list, &qp, sizeof qp, cudaMemcpyHostToDevice), "cudaMemcpy");
	const ibgda_u64 count = 200000;
	stream<<<1, 1>>>(list, rig.region(1), count, results);
	Result r = finish();
	ibgda_u64 last;
	std::memcpy(&last, rig.buffer[1], 8);
	std::printf("  %u WQEs, status %#x, %.2f M/s\n", r.rounds, r.status, r.rounds * 1e3 / (double)r.ns);
	check(r.status == IBGDA_OK && last == count && counters_are_clean(rig), "200,000 WQEs on a ring of 16");
}

static void many()
{
	Rig rig;
	const int blocks = 64;
	std::vector<ibgda_qp *> qps;
	for (int i = 0; i < blocks; i++)
		qps.push_back(rig.open(128));
	ibgda_qp **list;
	must(cudaMalloc(&list, blocks * sizeof *list), "cudaMalloc");
	must(cudaMemcpy(list, qps.data(), blocks * sizeof *list, cudaMemcpyHostToDevice), "cudaMemcpy");
	const ibgda_u64 count = 5000;
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
	check(good && counters_are_clean(rig), "64 QPs from 64 blocks");
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
		put_get<<<1, 1>>>(qp, rig.region(1), rig.region(0), 8, 1000, PATIENCE, results);
		Result r = finish();
		if (r.status == IBGDA_OK)
			ns.push_back((double)r.ns / r.rounds);
	}
	std::sort(ns.begin(), ns.end());
	if (!ns.empty())
		std::printf("  8-byte WRITE, post to completion through the CPU engine: median %.0f ns (%.0f to %.0f)\n",
			    ns[ns.size() / 2], ns.front(), ns.back());
	check(ns.size() == 15, "15,000 WRITEs, one at a time");
}

static void wrong_key()
{
	Rig rig;
	ibgda_qp *qp = rig.open(16);
	ibgda_region wrong = rig.region(1);
	wrong.rkey ^= 0xff00;
	put_get<<<1, 1>>>(qp, wrong, rig.region(0), 64, 1, PATIENCE, results);
	Result r = finish();
	std::printf("  status %#x, WQE %llu, syndrome %#x, vendor syndrome %#x\n", r.status,
		    (unsigned long long)r.error.wqe_index, r.error.syndrome, r.error.vendor_syndrome);
	check(r.status == IBGDA_ERR_REMOTE_ACCESS && r.error.syndrome == 0x13, "a wrong rkey is a remote access error");
	put_get<<<1, 1>>>(qp, rig.region(1), rig.region(0), 64, 1, PATIENCE, results);
	check(finish().status == IBGDA_ERR_REMOTE_ACCESS, "and stays the QP's first error");
}

static void frozen()
{
	Rig rig;
	ibgda_qp *qp = rig.open(16, 50000000);
	cx_freeze(rig.fabric, 1);
	put_get<<<1, 1>>>(qp, rig.region(1), rig.region(0), 64, 1, 50000000, results);
	Result r = finish();
	std::printf("  returned after %.1f ms\n", (double)r.ns / 1e6);
	cx_freeze(rig.fabric, 0);
	check(r.status == IBGDA_TIMEOUT, "a NIC that hangs ends in a timeout");
}

static void lost()
{
	Rig rig;
	ibgda_qp *qp = rig.open(16);
	cx_freeze(rig.fabric, 1);
	put_get<<<1, 1>>>(qp, rig.region(1), rig.region(0), 64, 1, 20000000000ull, results);
	must(cudaGetLastError(), "kernel launch");
	timespec pause = {0, 100000000};
	nanosleep(&pause, nullptr);
	must(cx_lose(rig.fabric, 0, 1), "cx_lose");
	cx_freeze(rig.fabric, 0);
	Result r = finish();
	check(r.status == IBGDA_ERR_NIC_LOST && r.ns < 10000000000ull, "a lost NIC ends a wait through the status page");
}

int main()
{
	cudaDeviceProp card;
	must(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");
	int driver = 0;
	must(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
	std::printf("%s, sm_%d%d, driver API %d.%d\n", card.name, card.major, card.minor, driver / 1000, driver % 1000 / 10);
	must(cudaHostAlloc(&results, 64 * sizeof *results, cudaHostAllocMapped), "cudaHostAlloc");
	sizes();
	wrap();
	many();
	atomics();
	latency();
	wrong_key();
	frozen();
	lost();
	std::printf("%d passed, %d failed\n", passed, failed);
	return failed != 0;
}
