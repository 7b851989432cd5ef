/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Errors raised on purpose: the right one, in time, on every thread, and for good. */
#include "rig.cuh"

#include <atomic>
#include <thread>

/* Each thread posts and waits, until something is wrong or `rounds` are through. */
template <ibgda_u32 M>
static __global__ void until(ibgda_qp *qp, ibgda_region to, ibgda_region from, ibgda_u64 offset, ibgda_u32 rounds, ibgda_u64 patience,
			     Result *results)
{
	ibgda_u32 me = blockIdx.x * blockDim.x + threadIdx.x, i = 0;
	ibgda_status status = IBGDA_OK;
	ibgda_u64 start = ibgda_clock_ns(), request;
	for (; i < rounds && status == IBGDA_OK; i++) {
		status = ibgda_put<M>(qp, to.address + offset, to.rkey, from.address, from.lkey, 64, 0, &request);
		if (status == IBGDA_OK)
			status = ibgda_wait<M>(qp, request, ibgda_clock_ns() + patience);
	}
	results[me] = {(ibgda_u32)status, i, ibgda_clock_ns() - start, qp->send_cq->error};
}

/* All threads ended in `want`, within ten seconds. */
static bool all_ended(int threads, ibgda_u32 want)
{
	for (int i = 0; i < threads; i++)
		if (results[i].status != want || results[i].ns > 10000000000ull) {
			std::printf("  thread %d: status %#x after %.1f ms\n", i, results[i].status, (double)results[i].ns / 1e6);
			return false;
		}
	return true;
}

/* What is wrong with a request, and what the NIC says to it. */
template <ibgda_u32 M> static void wrong(const char *name, int threads, ibgda_u32 status, ibgda_u8 syndrome, void (*spoil)(ibgda_region &, ibgda_region &),
					 ibgda_u64 offset = 0)
{
	Rig rig;
	ibgda_qp *qp = rig.open(128, PATIENCE, M & ~IBGDA_SCOPES);
	ibgda_region to = rig.region(1), from = rig.region(0);
	spoil(to, from);
	until<M><<<1, threads>>>(qp, to, from, offset, 10, PATIENCE, results);
	Result r = finish();
	bool good = all_ended(threads, status) && r.error.status == status && r.error.syndrome == syndrome && r.error.opcode == IBGDA_OP_RDMA_WRITE;
	if (M & IBGDA_COLLAPSED) /* the NIC may have put a flush over it */
		good = r.status == status || r.status == IBGDA_ERR_WR_FLUSHED;
	std::printf("  status %#x, WQE %llu, syndrome %#x, vendor syndrome %#x\n", r.status, (unsigned long long)r.error.wqe_index,
		    r.error.syndrome, r.error.vendor_syndrome);
	until<M><<<1, threads>>>(qp, rig.region(1), rig.region(0), 0, 1, PATIENCE, results);
	finish();
	check(good && all_ended(threads, r.status), name);
}

static void nothing(ibgda_region &, ibgda_region &) {}
static void rkey(ibgda_region &to, ibgda_region &) { to.rkey ^= 0xff00; }
static void lkey(ibgda_region &, ibgda_region &from) { from.lkey ^= 0xff00; }
static void local(ibgda_region &, ibgda_region &from) { from.address += LEN - 32; }

static void faults()
{
	const ibgda_u32 S = IBGDA_SHARED;
	wrong<0>("a wrong rkey", 1, IBGDA_ERR_REMOTE_ACCESS, 0x13, rkey);
	wrong<0>("a wrong lkey", 1, IBGDA_ERR_LOCAL_PROTECTION, 0x04, lkey);
	wrong<0>("past the end of the peer's region", 1, IBGDA_ERR_REMOTE_ACCESS, 0x13, nothing, LEN - 63);
	wrong<0>("past the end of the local region", 1, IBGDA_ERR_LOCAL_PROTECTION, 0x04, local);
	wrong<S>("a wrong rkey, seen by 96 threads of a shared QP", 96, IBGDA_ERR_REMOTE_ACCESS, 0x13, rkey);
	wrong<IBGDA_WARP>("a wrong rkey of a warp", 32, IBGDA_ERR_REMOTE_ACCESS, 0x13, rkey);
	wrong<IBGDA_BLOCK>("a wrong lkey of a block", 64, IBGDA_ERR_LOCAL_PROTECTION, 0x04, lkey);
	wrong<S | IBGDA_COLLAPSED>("a wrong rkey on a collapsed CQ", 64, IBGDA_ERR_REMOTE_ACCESS, 0x13, rkey);
}

/* Something happens to the NIC while `threads` threads post and wait for ever. */
template <ibgda_u32 M, class Event> static void meanwhile(const char *name, int threads, ibgda_u32 want, Event event)
{
	Rig rig;
	ibgda_qp *qp = rig.open(128, 20000000000ull, M & ~IBGDA_SCOPES);
	until<M><<<1, threads>>>(qp, rig.region(1), rig.region(0), 0, ~0u, 20000000000ull, results);
	must(cudaGetLastError(), "kernel launch");
	timespec pause = {0, 50000000};
	nanosleep(&pause, nullptr);
	event(rig);
	Result r = finish();
	std::printf("  after %u requests\n", r.rounds);
	check(all_ended(threads, want), name);
}

static void events()
{
	const ibgda_u32 S = IBGDA_SHARED;
	auto to_error = [](Rig &rig) { must(cx_to_error(rig.fabric, 0, rig.qps[0].qpn), "cx_to_error"); };
	auto lose = [](Rig &rig) { must(cx_lose(rig.fabric, 0, 1), "cx_lose"); };
	meanwhile<0>("a QP that goes to the error state flushes", 1, IBGDA_ERR_WR_FLUSHED, to_error);
	meanwhile<S>("a shared one, 128 threads", 128, IBGDA_ERR_WR_FLUSHED, to_error);
	meanwhile<0>("a lost NIC ends a wait through the status page", 1, IBGDA_ERR_NIC_LOST, lose);
	meanwhile<S>("the waits of 128 threads", 128, IBGDA_ERR_NIC_LOST, lose);
	meanwhile<IBGDA_WARP>("a warp's wait", 32, IBGDA_ERR_NIC_LOST, lose);
	meanwhile<S | IBGDA_COLLAPSED>("the waits of 128 threads on a collapsed CQ", 128, IBGDA_ERR_NIC_LOST, lose);
}

/* Posts until the ring is full. */
template <ibgda_u32 M> static __global__ void fill_ring(ibgda_qp *qp, ibgda_region to, ibgda_region from, Result *results)
{
	ibgda_u32 me = blockIdx.x * blockDim.x + threadIdx.x, i = 0;
	ibgda_status status = IBGDA_OK;
	ibgda_u64 start = ibgda_clock_ns();
	for (; status == IBGDA_OK; i++)
		status = ibgda_put<M>(qp, to, 0, from, 0, 64);
	results[me] = {(ibgda_u32)status, i - 1, ibgda_clock_ns() - start, qp->send_cq->error};
}

template <ibgda_u32 M> static void hangs(const char *name, int threads)
{
	Rig rig;
	ibgda_qp *qp = rig.open(64, 50000000, M);
	cx_freeze(rig.fabric, 1);
	until<M><<<1, 1>>>(qp, rig.region(1), rig.region(0), 0, 1, 50000000, results);
	bool good = finish().status == IBGDA_TIMEOUT && results[0].ns >= 50000000;
	fill_ring<M><<<1, threads>>>(qp, rig.region(1), rig.region(0), results);
	finish();
	good &= all_ended(threads, IBGDA_ERR_QUEUE_FULL);
	ibgda_u32 posted = 1;
	for (int i = 0; i < threads; i++)
		posted += results[i].rounds;
	std::printf("  %u requests fit into a ring of 64\n", posted);
	good &= posted <= 64 && posted > 32 && !results[0].error.status;
	/* And goes on as if nothing had been. */
	cx_freeze(rig.fabric, 0);
	until<M><<<1, threads>>>(qp, rig.region(1), rig.region(0), 0, 5, PATIENCE, results);
	finish();
	check(good && all_ended(threads, IBGDA_OK) && counters_are_clean(rig), name);
}

static void frozen()
{
	hangs<0>("a NIC that hangs ends in timeout, then queue full, and goes on when it does", 1);
	hangs<IBGDA_SHARED>("the same on a shared QP of 64 threads", 64);
}

/* Sleeps until the CQ has an event, takes what is there, as long as something comes. */
static __global__ void sleeper(ibgda_qp *qp, ibgda_region to, ibgda_region from, ibgda_u32 rounds, Result *result)
{
	ibgda_status status = IBGDA_OK;
	ibgda_u32 i = 0;
	for (; i < rounds && status == IBGDA_OK; i++) {
		status = ibgda_put(qp, to, 0, from, 0, 64);
		if (status == IBGDA_OK)
			status = ibgda_wait_for_cq_event(qp->send_cq, ibgda_clock_ns() + PATIENCE);
		ibgda_cqe cqe;
		if (status == IBGDA_OK)
			status = ibgda_poll_cq(qp->send_cq, &cqe, ibgda_clock_ns() + PATIENCE);
	}
	*result = {(ibgda_u32)status, i, 0, {}};
	/* Nothing is under way: no event comes. */
	if (status == IBGDA_OK && ibgda_wait_for_cq_event(qp->send_cq, ibgda_clock_ns() + 10000000) != IBGDA_TIMEOUT)
		result->status = IBGDA_ERR_UNKNOWN_CQE;
}

/* The host's event thread: what an armed CQ's interrupt would tell it, it sees in the CQ itself. */
static void sleeps()
{
	Rig rig;
	ibgda_qp *qp = rig.open(16);
	ibgda_u32 *count = (ibgda_u32 *)rig.pin(4096);
	ibgda_qp host;
	must(cudaMemcpy(&host, qp, sizeof host, cudaMemcpyDeviceToHost), "cudaMemcpy");
	ibgda_cq cq;
	must(cudaMemcpy(&cq, host.send_cq, sizeof cq, cudaMemcpyDeviceToHost), "cudaMemcpy");
	cq.events = count;
	/* A serial number that no arming has before the fourth: the register is not to be looked at, the model empties it. */
	__atomic_store_n(cq.doorbell_record + 1, __builtin_bswap32(3u << 28), __ATOMIC_RELEASE);
	cq.arm_doorbell = (ibgda_u64 *)rig.qps[0].arm;
	must(cudaMemcpy(host.send_cq, &cq, sizeof cq, cudaMemcpyHostToDevice), "cudaMemcpy");
	std::atomic<bool> stop{false};
	std::thread host_thread([&] {
		while (!stop) {
			ibgda_u32 arm = __builtin_bswap32(__atomic_load_n(cq.doorbell_record + 1, __ATOMIC_ACQUIRE));
			ibgda_u32 consumer = arm & 0xffffff, serial = arm >> 28 & 3;
			const ibgda_u8 *cqe = cq.ring + (consumer & (cq.depth - 1)) * 64;
			ibgda_u8 last = __atomic_load_n(cqe + 63, __ATOMIC_ACQUIRE);
			bool there = last >> 4 != 15 && (last & 1) == (consumer & cq.depth ? 1 : 0);
			/* An event for each arming. */
			if (there && (*count & 3) == serial)
				__atomic_fetch_add(count, 1, __ATOMIC_RELEASE);
		}
	});
	sleeper<<<1, 1>>>(qp, rig.region(1), rig.region(0), 500 / divisor, results);
	Result r = finish();
	stop = true;
	host_thread.join();
	std::printf("  %u rounds, %u events, status %#x\n", r.rounds, *count, r.status);
	check(r.status == IBGDA_OK && counters_are_clean(rig), "a kernel sleeps until the CQ has an event");
}

static const Test test_faults(faults), test_events(events), test_frozen(frozen), test_sleeps(sleeps);
