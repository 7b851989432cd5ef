/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Each kind of request, and random programs of them against a reference on the CPU. */
#include "rig.cuh"

enum Kind : ibgda_u32 { PUT, GET, INLINE, VALUE, ADD, ADD32, SWAP, SWAP32, FENCE, KINDS };

struct Step {
	Kind kind;
	ibgda_u32 bytes, flags;
	ibgda_u64 remote, local;	/* offsets */
	ibgda_u64 a, b;
};

static __global__ void program(ibgda_qp *qp, ibgda_region to, ibgda_region from, const Step *steps, ibgda_u32 count, Result *result)
{
	ibgda_status status = IBGDA_OK;
	ibgda_u32 i = 0;
	for (; i < count && status == IBGDA_OK; i++) {
		const Step s = steps[i];
		ibgda_u64 remote = to.address + s.remote, local = from.address + s.local;
		switch (s.kind) {
		case PUT:
			status = ibgda_put(qp, to, s.remote, from, s.local, s.bytes, s.flags);
			break;
		case GET:
			status = ibgda_get(qp, from, s.local, to, s.remote, s.bytes, s.flags);
			break;
		case INLINE: {
			ibgda_u64 data[4] = {s.a, s.b, ~s.a, ~s.b};
			status = ibgda_put_inline(qp, remote, to.rkey, data, s.bytes, s.flags);
			break;
		}
		case VALUE:
			status = s.bytes == 1 ? ibgda_put_value(qp, remote, to.rkey, (ibgda_u8)s.a, s.flags) :
				 s.bytes == 2 ? ibgda_put_value(qp, remote, to.rkey, (ibgda_u16)s.a, s.flags) :
				 s.bytes == 4 ? ibgda_put_value(qp, remote, to.rkey, (ibgda_u32)s.a, s.flags) :
						ibgda_put_value(qp, remote, to.rkey, s.a, s.flags);
			break;
		case ADD:
			status = ibgda_fetch_add(qp, remote, to.rkey, local, from.lkey, s.a, s.flags);
			break;
		case ADD32:
			status = ibgda_fetch_add32(qp, remote, to.rkey, local, from.lkey, (ibgda_u32)s.a, s.flags);
			break;
		case SWAP:
			status = ibgda_compare_swap(qp, remote, to.rkey, local, from.lkey, s.a, s.b, s.flags);
			break;
		case SWAP32:
			status = ibgda_compare_swap32(qp, remote, to.rkey, local, from.lkey, (ibgda_u32)s.a, (ibgda_u32)s.b, s.flags);
			break;
		default:
			status = ibgda_fence(qp);
		}
	}
	if (status == IBGDA_OK)
		status = ibgda_quiet(qp, ibgda_clock_ns() + PATIENCE);
	*result = {(ibgda_u32)status, i, 0, qp->send_cq->error};
}

template <class T> static void atomic(char *remote, char *local, bool add, ibgda_u64 a, ibgda_u64 b)
{
	T old, now;
	std::memcpy(&old, remote, sizeof old);
	now = add ? (T)(old + (T)a) : old == (T)a ? (T)b : old;
	std::memcpy(local, &old, sizeof old);
	std::memcpy(remote, &now, sizeof now);
}

static void reference(const Step &s, char *remote, char *local)
{
	char *there = remote + s.remote, *here = local + s.local;
	ibgda_u64 data[4] = {s.a, s.b, ~s.a, ~s.b};
	switch (s.kind) {
	case PUT:
		std::memcpy(there, here, s.bytes);
		break;
	case GET:
		std::memcpy(here, there, s.bytes);
		break;
	case INLINE:
	case VALUE:
		std::memcpy(there, data, s.bytes);
		break;
	case ADD:
	case SWAP:
		atomic<ibgda_u64>(there, here, s.kind == ADD, s.a, s.b);
		break;
	case ADD32:
	case SWAP32:
		atomic<ibgda_u32>(there, here, s.kind == ADD32, s.a, s.b);
		break;
	default:
		break;
	}
}

static void programs()
{
	Rig rig;
	ibgda_qp *qp = rig.open(64);
	const ibgda_u32 count = 3000 / divisor;
	Step *steps;
	must(cudaHostAlloc(&steps, count * sizeof *steps, cudaHostAllocMapped), "cudaHostAlloc");
	bool good = true;
	const unsigned seed = (unsigned)time(nullptr);
	std::srand(seed);
	for (int round = 0; round < (divisor > 1 ? 1 : 20) && good; round++) {
		/* A window in which requests meet each other's data. */
		const ibgda_u64 window = round % 2 ? 256 : 65536;
		for (ibgda_u32 i = 0; i < count; i++) {
			Step &s = steps[i];
			s.kind = (Kind)(std::rand() % KINDS);
			s.remote = (ibgda_u64)std::rand() % window, s.local = (ibgda_u64)std::rand() % window;
			s.a = (ibgda_u64)std::rand() << 32 | (ibgda_u64)std::rand(), s.b = (ibgda_u64)std::rand() * 0x9e3779b97f4a7c15ull;
			s.bytes = s.kind == INLINE ? 1 + (ibgda_u32)std::rand() % 28 :
				  s.kind == VALUE  ? 1u << std::rand() % 4 :
						     (ibgda_u32)std::rand() % (std::rand() % 8 ? 128 : 9000);
			/* One after the other, as the reference does it. */
			s.flags = IBGDA_FENCED | (std::rand() % 3 ? IBGDA_UNSIGNALED : 0) | (std::rand() % 2 ? IBGDA_NO_DOORBELL : 0);
			if (s.kind == ADD || s.kind == SWAP)
				s.remote &= ~7ull, s.local &= ~7ull;
			if (s.kind == ADD32 || s.kind == SWAP32)
				s.remote &= ~3ull, s.local &= ~3ull;
			if (s.kind == GET && std::rand() % 4 == 0)
				s.flags |= IBGDA_FLUSH;
			if ((s.kind == SWAP || s.kind == SWAP32) && std::rand() % 2)
				s.a = 0;
		}
		rig.fill(round);
		std::memset(rig.buffer[1], 0, 4096);
		std::vector<char> local(rig.buffer[0], rig.buffer[0] + LEN), remote(rig.buffer[1], rig.buffer[1] + LEN);
		for (ibgda_u32 i = 0; i < count; i++)
			reference(steps[i], remote.data(), local.data());
		program<<<1, 1>>>(qp, rig.region(1), rig.region(0), steps, count, results);
		Result r = finish();
		bool same = !std::memcmp(rig.buffer[0], local.data(), LEN) && !std::memcmp(rig.buffer[1], remote.data(), LEN);
		if (r.status != IBGDA_OK || !same) {
			std::printf("  seed %u, round %d: status %#x at %u, error at %llu, data %s\n", seed, round, r.status, r.rounds,
				    (unsigned long long)r.error.wqe_index, same ? "right" : "wrong");
			good = false;
		}
	}
	cudaFreeHost(steps);
	check(good && counters_are_clean(rig), "random requests leave memory as the reference does");
}

/* Block 0 puts and signals; block 1 waits for each signal, looks at the data, and signals back. */
static __global__ void ping(ibgda_qp *here, ibgda_qp *there, ibgda_region mine, ibgda_region theirs, ibgda_u32 rounds, Result *results)
{
	const ibgda_u64 to = LEN - 64, back = LEN - 32;
	const ibgda_u64 *arrived = (const ibgda_u64 *)(theirs.address + to), *answered = (const ibgda_u64 *)(mine.address + back);
	ibgda_status status = IBGDA_OK;
	ibgda_u32 i = 1;
	for (; i <= rounds && status == IBGDA_OK; i++) {
		if (blockIdx.x == 0) {
			((volatile ibgda_u32 *)mine.address)[i % 1024] = i * 3;
			__threadfence_system();
			status = i & 1 ? ibgda_put_signal(here, theirs.address, theirs.rkey, mine.address, mine.lkey, 4096,
							  theirs.address + to, theirs.rkey, i) :
					 ibgda_put_signal_add(here, theirs.address, theirs.rkey, mine.address, mine.lkey, 4096,
							      theirs.address + to, theirs.rkey, 1, mine.address + 8192);
			if (status == IBGDA_OK)
				status = ibgda_wait_until(answered, IBGDA_GE, i, ibgda_clock_ns() + PATIENCE, here->send_cq);
		} else {
			status = ibgda_wait_until(arrived, IBGDA_GE, i, ibgda_clock_ns() + PATIENCE, there->send_cq);
			if (status == IBGDA_OK && ((const ibgda_u32 *)theirs.address)[i % 1024] != i * 3)
				status = IBGDA_ERR_UNKNOWN_CQE;
			if (status == IBGDA_OK)
				status = ibgda_signal(there, mine.address + back, mine.rkey, i);
		}
	}
	results[blockIdx.x] = {(ibgda_u32)status, i - 1, 0, {}};
}

static void signals()
{
	Rig rig;
	ibgda_qp *peer, *qp = rig.open(64, PATIENCE, 0, 0, &peer);
	std::memset(rig.buffer[0], 0, LEN), std::memset(rig.buffer[1], 0, LEN);
	ping<<<2, 1>>>(qp, peer, rig.region(0), rig.region(1), 5000 / divisor, results);
	finish();
	for (int i = 0; i < 2; i++)
		if (results[i].status)
			std::printf("  side %d: status %#x in round %u\n", i, results[i].status, results[i].rounds);
	check(!results[0].status && !results[1].status && counters_are_clean(rig), "data is there when its signal is, both ways");
}

/* Sends of all kinds from one GPU block to the receives of another. */
static __global__ void letters(ibgda_qp *here, ibgda_qp *there, ibgda_region mine, ibgda_region theirs, ibgda_u32 rounds, Result *results)
{
	ibgda_status status = IBGDA_OK;
	ibgda_u32 i = 0;
	if (blockIdx.x == 0) {
		for (; i < rounds && status == IBGDA_OK; i++) {
			ibgda_u64 from = mine.address + i % 64 * 64;
			status = i % 3 == 0 ? ibgda_send(here, from, mine.lkey, i % 60 + 1) :
				 i % 3 == 1 ? ibgda_send_imm(here, from, mine.lkey, i % 60 + 1, i) :
					      ibgda_put_imm(here, theirs.address + LEN / 2, theirs.rkey, from, mine.lkey, i % 60 + 1, i);
		}
		if (status == IBGDA_OK)
			status = ibgda_quiet(here, ibgda_clock_ns() + PATIENCE);
	} else {
		ibgda_u32 posted = 0;
		for (; i < rounds && status == IBGDA_OK; i++) {
			while (status == IBGDA_OK && posted < rounds && posted < i + 16)
				status = ibgda_recv(there, theirs.address + posted++ % 64 * 64, theirs.lkey, 64);
			ibgda_cqe cqe;
			if (status == IBGDA_OK)
				status = ibgda_poll_cq(there->recv_cq, &cqe, ibgda_clock_ns() + PATIENCE);
			if (status != IBGDA_OK)
				break;
			ibgda_u32 kind = i % 3 == 0 ? IBGDA_CQE_RESP_SEND : i % 3 == 1 ? IBGDA_CQE_RESP_SEND_IMM : IBGDA_CQE_RESP_WRITE_IMM;
			if (cqe.kind != kind || cqe.byte_count != i % 60 + 1 || (i % 3 && cqe.immediate != i) || cqe.wqe_index != i)
				status = IBGDA_ERR_UNKNOWN_CQE;
			const char *got = (const char *)(i % 3 == 2 ? theirs.address + LEN / 2 : theirs.address + i % 64 * 64);
			for (ibgda_u32 b = 0; i % 3 != 2 && b < cqe.byte_count; b++)
				if (got[b] != ((const char *)mine.address)[i % 64 * 64 + b])
					status = IBGDA_ERR_LOCAL_LENGTH;
		}
	}
	results[blockIdx.x] = {(ibgda_u32)status, i, 0, {}};
}

static void messages()
{
	Rig rig;
	ibgda_qp *peer, *qp = rig.open(32, PATIENCE, 0, 32, &peer);
	rig.fill(9);
	letters<<<2, 1>>>(qp, peer, rig.region(0), rig.region(1), 3000 / divisor, results);
	finish();
	for (int i = 0; i < 2; i++)
		if (results[i].status)
			std::printf("  side %d: status %#x in round %u\n", i, results[i].status, results[i].rounds);
	check(!results[0].status && !results[1].status && counters_are_clean(rig), "sends and writes with immediate arrive as they are");
}

static __global__ void bump(ibgda_qp *qp, ibgda_region to, ibgda_region from, Result *result)
{
	ibgda_status status = ibgda_fetch_add(qp, to.address, to.rkey, from.address, from.lkey, 1);
	if (status == IBGDA_OK)
		status = ibgda_quiet(qp, ibgda_clock_ns() + PATIENCE);
	if (status != IBGDA_OK)
		result->status = status;
}

static void graphs()
{
	Rig rig;
	ibgda_qp *qp = rig.open(16);
	std::memset(rig.buffer[1], 0, 8);
	results[0].status = IBGDA_OK;
	cudaStream_t stream;
	cudaGraph_t graph;
	cudaGraphExec_t ready;
	must(cudaStreamCreate(&stream), "cudaStreamCreate");
	must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
	for (int i = 0; i < 5; i++)
		bump<<<1, 1, 0, stream>>>(qp, rig.region(1), rig.region(0), results);
	must(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
	must(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
	for (int i = 0; i < 200; i++)
		must(cudaGraphLaunch(ready, stream), "cudaGraphLaunch");
	Result r = finish();
	ibgda_u64 sum;
	std::memcpy(&sum, rig.buffer[1], 8);
	must(cudaGraphExecDestroy(ready), "cudaGraphExecDestroy");
	must(cudaGraphDestroy(graph), "cudaGraphDestroy");
	must(cudaStreamDestroy(stream), "cudaStreamDestroy");
	check(r.status == IBGDA_OK && sum == 1000 && counters_are_clean(rig), "a graph of five kernels, replayed 200 times");
}

static const Test test_programs(programs), test_signals(signals), test_messages(messages), test_graphs(graphs);
