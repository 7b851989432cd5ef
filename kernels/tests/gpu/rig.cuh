/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What the tests on a GPU share: the ConnectX model in this process, pinned memory that it and the GPU see, queue handles,
 * and the list of tests. Every test file adds its own to the list; main.cu runs them.
 */
#ifndef GPU_RIG_CUH
#define GPU_RIG_CUH

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <connectx_inproc.h>
#include <ibgda_device.cuh>

inline void must(cudaError_t error, const char *what)
{
	if (error == cudaSuccess)
		return;
	std::printf("%s: %s\n", what, cudaGetErrorString(error));
	std::exit(1);
}

inline void must(int result, const char *what)
{
	if (!result)
		return;
	std::printf("%s: %s\n", what, cx_error());
	std::exit(1);
}

const size_t LEN = 1 << 20;
const ibgda_u64 PATIENCE = 5000000000ull;

/* Pinned host memory that the GPU and the engine see at one address. */
inline char *pinned(cx_fabric *fabric, size_t bytes)
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
	std::vector<std::pair<char *, size_t>> chunks;
	size_t used = 0;
	std::vector<std::thread> carriers;
	std::atomic<bool> stop{false};
	uint32_t pd[2], key[2];
	char *buffer[2];
	std::vector<cx_qp> qps;
	std::vector<char *> handles;
	const ibgda_u64 *status;

	Rig()
	{
		if (!fabric)
			must(-1, "cx_open");
		for (uint32_t i = 0; i < 2; i++) {
			buffer[i] = pin(LEN);
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
		stop = true;
		for (std::thread &carrier : carriers)
			carrier.join();
		cudaHostUnregister((void *)status);
		cx_close(fabric);
		for (char *handle : handles)
			cudaFree(handle);
		for (auto &chunk : chunks)
			cudaHostUnregister(chunk.first), munmap(chunk.first, chunk.second);
	}

	/* Pinned memory, zeroed, of whole pages; from large pieces, since to pin one takes many milliseconds. */
	char *pin(size_t bytes)
	{
		bytes = (bytes + 4095) & ~(size_t)4095;
		if (chunks.empty() || used + bytes > chunks.back().second) {
			size_t size = std::max(bytes, 2 * LEN);
			chunks.push_back({pinned(fabric, size), size});
			used = 0;
		}
		used += bytes;
		return chunks.back().first + used - bytes;
	}

	/*
	 * Handles, in GPU memory, of a new QP on function `nic` that is connected to one on the other function; `peer` takes the
	 * other's. `mode`: IBGDA_SHARED, IBGDA_COLLAPSED.
	 */
	ibgda_qp *open(uint32_t depth, ibgda_u64 post_timeout = PATIENCE, ibgda_u32 mode = 0, uint32_t recv_depth = 0,
		       ibgda_qp **peer = nullptr)
	{
		cx_qp pair[2];
		size_t bytes = cx_qp_bytes(depth, recv_depth);
		int collapsed = mode & IBGDA_COLLAPSED ? 1 : 0;
		for (uint32_t i = 0; i < 2; i++)
			must(cx_open_qp(fabric, i, pd[i], depth, recv_depth, collapsed, pin(bytes), pin(4096), &pair[i]),
			     "cx_open_qp");
		must(cx_connect(fabric, 0, pair[0].qpn, cx_lid(fabric, 1), pair[1].qpn), "cx_connect");
		must(cx_connect(fabric, 1, pair[1].qpn, cx_lid(fabric, 0), pair[0].qpn), "cx_connect");
		qps.push_back(pair[0]);
		if (peer)
			*peer = handle(pair[1], depth, recv_depth, post_timeout, mode);
		return handle(pair[0], depth, recv_depth, post_timeout, mode);
	}

	ibgda_region region(int i)
	{
		return {(ibgda_u64)buffer[i], LEN, key[i], key[i]};
	}

	void fill(int salt)
	{
		for (size_t i = 0; i < LEN; i++)
			buffer[0][i] = (char)(i * 131 + i / 257 + (size_t)salt), buffer[1][i] = (char)0xee;
	}

    private:
	/* A word in memory, of which a thread carries each new value to the register. */
	ibgda_u64 *carried(ibgda_u64 *doorbell)
	{
		ibgda_u64 *word = (ibgda_u64 *)pin(4096);
		carriers.emplace_back([this, word, doorbell] {
			for (ibgda_u64 last = 0; !stop;) {
				ibgda_u64 value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
				if (value != last)
					__atomic_store_n(doorbell, last = value, __ATOMIC_RELEASE);
			}
		});
		return word;
	}

	ibgda_qp *handle(const cx_qp &made, uint32_t depth, uint32_t recv_depth, ibgda_u64 post_timeout, ibgda_u32 mode)
	{
		/* QP, its two CQs, its ready words: one piece of GPU memory. */
		const size_t words = IBGDA_READY_WORDS(depth), bytes = sizeof(ibgda_qp) + 2 * sizeof(ibgda_cq) + 8 * words;
		char *device;
		must(cudaMalloc(&device, bytes), "cudaMalloc");
		must(cudaMemset(device, 0, bytes), "cudaMemset");
		handles.push_back(device);
		ibgda_cq *cqs = (ibgda_cq *)(device + sizeof(ibgda_qp)), cq = {};
		ibgda_u64 *ready = (ibgda_u64 *)(cqs + 2), first = IBGDA_READY_FIRST;
		cq.ring = (const ibgda_u8 *)made.send_cq_ring;
		cq.doorbell_record = (ibgda_u32 *)made.send_cq_record;
		cq.status_page = status;
		cq.number = made.send_cqn;
		cq.depth = depth;
		cq.generation = 1;
		cq.limit = &((ibgda_qp *)device)->limit;
		must(cudaMemcpy(cqs, &cq, sizeof cq, cudaMemcpyHostToDevice), "cudaMemcpy");
		cq.ring = (const ibgda_u8 *)made.recv_cq_ring;
		cq.doorbell_record = (ibgda_u32 *)made.recv_cq_record;
		cq.number = made.recv_cqn;
		cq.depth = recv_depth;
		cq.limit = nullptr;
		must(cudaMemcpy(cqs + 1, &cq, sizeof cq, cudaMemcpyHostToDevice), "cudaMemcpy");
		must(cudaMemcpy(ready, &first, sizeof first, cudaMemcpyHostToDevice), "cudaMemcpy");
		ibgda_qp qp = {};
		qp.send_ring = (ibgda_u8 *)made.send_ring;
		qp.recv_ring = (ibgda_u8 *)made.recv_ring;
		qp.doorbell_record = (ibgda_u32 *)made.record;
		qp.doorbell = (ibgda_u64 *)made.doorbell;
		qp.send_cq = cqs;
		qp.recv_cq = recv_depth ? cqs + 1 : nullptr;
		qp.ready = ready;
		qp.number = made.qpn;
		qp.send_depth = depth;
		qp.limit = depth;
		qp.recv_depth = recv_depth;
		qp.mode = mode;
		qp.post_timeout_ns = post_timeout;
		if (mode & IBGDA_BLUEFLAME)
			qp.blueflame_bytes = 256;
		if (mode & IBGDA_CPU_DOORBELL)
			qp.doorbell = carried((ibgda_u64 *)made.doorbell);
		must(cudaMemcpy(device, &qp, sizeof qp, cudaMemcpyHostToDevice), "cudaMemcpy");
		return (ibgda_qp *)device;
	}
};

struct Result {
	ibgda_u32 status;
	ibgda_u32 rounds;
	ibgda_u64 ns;
	ibgda_error error;
};

const int RESULTS = 4096;
extern Result *results;
/* 1, or with "quick" on the command line what counts are divided by: compute-sanitizer makes everything slow. */
extern unsigned divisor;

/* Waits for the kernel; the first result. */
Result finish();
void check(bool good, const char *name);
bool counters_are_clean(Rig &rig);

/* Puts a function into the list of tests. */
struct Test {
	Test(void (*run)());
};

#endif
