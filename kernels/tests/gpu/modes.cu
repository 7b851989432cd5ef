/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Scopes, sharing and collapsed CQs: every thread moves its own piece, and each byte is where it belongs. */
#include "rig.cuh"

/* Each thread: puts its piece, then gets it back to another place, and waits for both. */
template <ibgda_u32 M> static __global__ void __launch_bounds__(1024) pieces(ibgda_qp *qp, ibgda_region to, ibgda_region from, ibgda_u32 bytes, ibgda_u32 stride,
					      Result *results)
{
	ibgda_u32 me = blockIdx.x * blockDim.x + threadIdx.x;
	ibgda_u64 at = (ibgda_u64)me * stride, request;
	ibgda_status status = ibgda_put<M>(qp, to, at, from, at, bytes, 0, &request);
	if (status == IBGDA_OK)
		status = ibgda_wait<M>(qp, request, ibgda_clock_ns() + PATIENCE);
	if (status == IBGDA_OK)
		status = ibgda_get<M>(qp, from, LEN / 2 + at, to, at, bytes, IBGDA_FLUSH, &request);
	if (status == IBGDA_OK)
		status = ibgda_wait<M>(qp, request, ibgda_clock_ns() + PATIENCE);
	results[me].status = status;
}


template <ibgda_u32 M> static bool moves(const char *what, uint32_t depth, int blocks, int threads)
{
	Rig rig;
	ibgda_qp *qp = rig.open(depth, PATIENCE, M & ~IBGDA_SCOPES);
	bool good = true;
	const int all = blocks * threads;
	const ibgda_u32 room = (ibgda_u32)(LEN / 2) / (ibgda_u32)all;
	for (ibgda_u32 bytes : {0u, 1u, 3u, 8u, 28u, 29u, 64u, room - 1}) {
		rig.fill((int)bytes);
		std::vector<char> want(rig.buffer[1], rig.buffer[1] + LEN), local(rig.buffer[0], rig.buffer[0] + LEN);
		for (int i = 0; i < all; i++) {
			std::memcpy(&want[(size_t)i * room], rig.buffer[0] + (size_t)i * room, bytes);
			std::memcpy(&local[LEN / 2 + (size_t)i * room], rig.buffer[0] + (size_t)i * room, bytes);
			results[i].status = 0xdead;
		}
		pieces<M><<<blocks, threads>>>(qp, rig.region(1), rig.region(0), bytes, room, results);
		finish();
		int bad = -1;
		for (int i = 0; i < all && bad < 0; i++)
			bad = results[i].status == IBGDA_OK ? -1 : i;
		bool same = !std::memcmp(rig.buffer[1], want.data(), LEN) && !std::memcmp(rig.buffer[0], local.data(), LEN);
		if (bad >= 0 || !same) {
			std::printf("  %s, %u bytes: thread %d, status %#x, data %s\n", what, bytes, bad, bad < 0 ? 0 : results[bad].status,
				    same ? "right" : "wrong");
			good = false;
		}
	}
	return good && counters_are_clean(rig);
}

static void scopes()
{
	const ibgda_u32 S = IBGDA_SHARED, W = IBGDA_WARP, B = IBGDA_BLOCK, C = IBGDA_COLLAPSED;
	check(moves<0>("thread", 64, 1, 1), "a thread's puts and gets");
	check(moves<C>("thread, collapsed", 64, 1, 1), "the same with a collapsed CQ");
	check(moves<W>("warp", 64, 1, 32), "a warp's");
	check(moves<W>("warp", 16, 1, 32), "a warp's on a ring of 16");
	check(moves<B>("block", 256, 1, 128), "a block's");
	check(moves<B>("block", 64, 1, 1024), "a block's of 1024 threads on a ring of 64");
	check(moves<S>("shared", 256, 1, 1), "one thread on a shared QP");
	check(moves<S>("shared", 256, 8, 96), "768 threads on a shared QP");
	check(moves<S>("shared", 16, 4, 64), "256 threads on a shared QP of 16");
	check(moves<S | C>("shared, collapsed", 1024, 8, 128), "1024 threads on a shared QP, collapsed CQ");
	check(moves<S | W>("shared warps", 128, 8, 64), "16 warps on a shared QP");
	check(moves<S | B>("shared blocks", 512, 8, 128), "8 blocks on a shared QP");
	check(moves<IBGDA_BLUEFLAME>("BlueFlame", 64, 1, 1), "requests that go along with their doorbell");
	check(moves<IBGDA_CPU_DOORBELL>("CPU doorbell", 64, 1, 1), "a CPU thread that carries the doorbells");
	check(moves<S | IBGDA_CPU_DOORBELL>("shared, CPU doorbell", 256, 8, 96), "768 threads, and a CPU thread that carries the doorbells");
}

/* Threads with nothing to post take part; each other one adds to the peer's counter. */
template <ibgda_u32 M> static __global__ void __launch_bounds__(1024) count(ibgda_qp *qp, ibgda_region to, ibgda_region from, ibgda_u32 rounds, Result *results)
{
	ibgda_u32 me = blockIdx.x * blockDim.x + threadIdx.x;
	bool skip = (M & IBGDA_SCOPES) && threadIdx.x % 3 == 1;
	ibgda_status status = IBGDA_OK;
	for (ibgda_u32 i = 0; i < rounds && status == IBGDA_OK; i++) {
		ibgda_u32 flags = (skip ? IBGDA_SKIP : 0) | (i % 4 ? IBGDA_UNSIGNALED : 0);
		status = i & 1 ? ibgda_fetch_add32<M>(qp, to.address + 8, to.rkey, from.address + me * 8, from.lkey, 1, flags) :
				 ibgda_fetch_add<M>(qp, to.address, to.rkey, from.address + me * 8, from.lkey, 1, flags);
	}
	if (!(M & IBGDA_SCOPES) || (M & IBGDA_BLOCK) || status != IBGDA_OK) {
		ibgda_status quiet = ibgda_quiet<M>(qp, ibgda_clock_ns() + PATIENCE);
		status = status == IBGDA_OK ? quiet : status;
	} else {
		status = ibgda_quiet<M>(qp, ibgda_clock_ns() + PATIENCE);
	}
	results[me].status = status;
}

template <ibgda_u32 M> static bool counts(uint32_t depth, int blocks, int threads, ibgda_u32 rounds)
{
	Rig rig;
	ibgda_qp *qp = rig.open(depth, PATIENCE, M & ~IBGDA_SCOPES);
	std::memset(rig.buffer[1], 0, 16);
	count<M><<<blocks, threads>>>(qp, rig.region(1), rig.region(0), rounds, results);
	finish();
	ibgda_u64 want = 0, sums[2];
	bool good = true;
	for (int i = 0; i < blocks * threads; i++) {
		want += (M & IBGDA_SCOPES) && i % threads % 3 == 1 ? 0 : 1;
		if (results[i].status != IBGDA_OK && good) {
			std::printf("  thread %d: status %#x\n", i, results[i].status);
			good = false;
		}
	}
	std::memcpy(sums, rig.buffer[1], 16);
	if (sums[0] != want * ((rounds + 1) / 2) || sums[1] != want * (rounds / 2)) {
		std::printf("  sums %llu and %llu, %llu threads\n", (unsigned long long)sums[0], (unsigned long long)sums[1], (unsigned long long)want);
		good = false;
	}
	return good && counters_are_clean(rig);
}

static void counters()
{
	check(counts<IBGDA_SHARED>(1024, 1, 1024, 20), "1024 threads of a block on one QP count");
	check(counts<IBGDA_SHARED>(1024, 32, 32, 20), "32 warps of 32 blocks on one QP count");
	check(counts<IBGDA_SHARED>(128, 132, 1, 100), "132 blocks of one thread on one QP count");
	check(counts<IBGDA_SHARED | IBGDA_COLLAPSED>(256, 16, 64, 20), "1024 threads on one QP with a collapsed CQ count");
	check(counts<IBGDA_WARP>(64, 1, 32, 50), "a warp, of which some lanes skip, counts");
	check(counts<IBGDA_BLOCK>(256, 1, 200, 20), "a block with a broken last warp counts");
	check(counts<IBGDA_SHARED | IBGDA_BLOCK>(1024, 4, 256, 20), "4 blocks on one QP count");
}

/* Every value once, on a small ring, under many threads. */
static __global__ void __launch_bounds__(1024) wrap_shared(ibgda_qp *qp, ibgda_region to, ibgda_u64 each, Result *results)
{
	ibgda_u32 me = blockIdx.x * blockDim.x + threadIdx.x;
	ibgda_status status = IBGDA_OK;
	ibgda_u64 start = ibgda_clock_ns(), i = 0;
	for (; i < each && status == IBGDA_OK; i++)
		status = ibgda_put_value<IBGDA_SHARED>(qp, to.address + 8 * me, to.rkey, i + 1, i % 8 ? IBGDA_UNSIGNALED : 0);
	if (status == IBGDA_OK)
		status = ibgda_quiet<IBGDA_SHARED>(qp, ibgda_clock_ns() + PATIENCE);
	results[me] = {(ibgda_u32)status, (ibgda_u32)i, ibgda_clock_ns() - start, qp->send_cq->error};
}

static void wraps()
{
	for (uint32_t depth : {16u, 1024u}) {
		Rig rig;
		ibgda_qp *qp = rig.open(depth, PATIENCE, IBGDA_SHARED);
		const int threads = 128;
		const ibgda_u64 each = 8000 / divisor;
		wrap_shared<<<4, threads / 4>>>(qp, rig.region(1), each, results);
		Result r = finish();
		bool good = true;
		for (int i = 0; i < threads; i++) {
			ibgda_u64 last;
			std::memcpy(&last, rig.buffer[1] + 8 * i, 8);
			if (results[i].status != IBGDA_OK || last != each) {
				std::printf("  thread %d: status %#x, last %llu\n", i, results[i].status, (unsigned long long)last);
				good = false;
				break;
			}
		}
		std::printf("  ring of %u: %.2f M/s\n", depth, threads * each * 1e3 / (double)r.ns);
		check(good && counters_are_clean(rig), "a million WQEs of 128 threads");
	}
}

static const Test test_scopes(scopes), test_counters(counters), test_wraps(wraps);
