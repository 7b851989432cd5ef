/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What calls leave in a ring, a record and a register, one call at a time and without a NIC: requests of two WQEs, silent
 * ones, BlueFlame, events, signals, and every check of IBGDA_CHECKS_FULL. The last line is "N passed, N failed".
 */
#define IBGDA_CHECKS 2
#include <ibgda_device.cuh>

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

const ibgda_u32 DEPTH = 16, BUFFER = 256;

struct Rig {
	std::vector<ibgda_quad> ring, cq_ring;
	std::vector<ibgda_u64> page;
	ibgda_u32 records[2] = {}, cq_records[2] = {}, events = 0;
	ibgda_u64 arm = 0;
	ibgda_cq cq = {};
	ibgda_qp qp = {};

	explicit Rig(ibgda_u32 mode = 0) : ring(4 * DEPTH, ibgda_quad{}), cq_ring(4 * DEPTH, ibgda_quad{~0ull, ~0ull}), page(2 * BUFFER / 8)
	{
		cq.ring = reinterpret_cast<const ibgda_u8 *>(cq_ring.data());
		cq.doorbell_record = cq_records;
		cq.depth = DEPTH;
		cq.number = 0x123;
		cq.arm_doorbell = &arm;
		cq.events = &events;
		qp.send_ring = reinterpret_cast<ibgda_u8 *>(ring.data());
		qp.doorbell_record = records;
		qp.doorbell = page.data();
		qp.send_cq = &cq;
		qp.number = 0x4a;
		qp.send_depth = DEPTH;
		qp.mode = mode;
		qp.blueflame_bytes = BUFFER;
		qp.limit = DEPTH;
		cq.limit = &qp.limit;
	}

	ibgda_u32 word(ibgda_u64 slot, int i) const
	{
		ibgda_u32 words[16];
		std::memcpy(words, &ring[4 * (slot % DEPTH)], sizeof words);
		return ibgda_be32(words[i]);
	}
	ibgda_u32 opcode(ibgda_u64 slot) const { return word(slot, 0) & 0xff; }
	bool signalled(ibgda_u64 slot) const { return word(slot, 2) & IBGDA_CTRL_CQ_UPDATE; }
	bool fenced(ibgda_u64 slot) const { return word(slot, 2) & IBGDA_CTRL_FENCE; }
	ibgda_u32 record() const { return ibgda_be32(records[1]); }

	void complete(ibgda_u64 cqe, ibgda_u64 index)
	{
		cq_ring[4 * (cqe % DEPTH) + 3].high = (cqe & DEPTH ? 1ull << 56 : 0) |
						      (ibgda_u64)ibgda_be32((ibgda_u32)(index & 0xffff) << 16) << 32;
	}
};

int passed, failures;

void check(bool good, const char *name)
{
	std::printf("%s … %s\n", name, good ? "ok" : "FAILED");
	(good ? passed : failures)++;
}

void two_wqes()
{
	Rig rig;
	ibgda_u64 request = 0;
	bool good = ibgda_put_signal(&rig.qp, 64, 1, 128, 2, 8, 256, 3, 0x1122334455667788ull, 0, &request) == IBGDA_OK;
	good &= request == 1 && rig.opcode(0) == IBGDA_OP_RDMA_WRITE && !rig.signalled(0) && rig.opcode(1) == IBGDA_OP_RDMA_WRITE &&
		rig.signalled(1) && rig.record() == 2 && rig.word(1, 5) == 256 && rig.word(1, 8) == (8 | IBGDA_INLINE_FLAG) &&
		rig.word(1, 9) == 0x88776655;
	good &= ibgda_put_signal_add(&rig.qp, 64, 1, 128, 2, 8, 256, 3, 5, 512) == IBGDA_OK && rig.opcode(3) == IBGDA_OP_ATOMIC_FA;
	good &= ibgda_get(&rig.qp, 128, 2, 64, 1, 100, IBGDA_FLUSH, &request) == IBGDA_OK && request == 5 &&
		rig.opcode(4) == IBGDA_OP_RDMA_READ && !rig.signalled(4) && rig.opcode(5) == IBGDA_OP_DUMP && rig.fenced(5) &&
		rig.word(5, 7) == 128 + 99;
	/* Slot 7 ends a half of the ring: it has a completion though it is the first of two. */
	good &= ibgda_put_value(&rig.qp, 0, 1, 1u) == IBGDA_OK;
	good &= ibgda_put_signal(&rig.qp, 64, 1, 128, 2, 8, 256, 3, 9, IBGDA_UNSIGNALED | IBGDA_NO_DOORBELL) == IBGDA_OK;
	good &= rig.signalled(7) && !rig.signalled(8) && rig.record() == 9;
	check(good, "requests of two WQEs");
}

void silent()
{
	Rig rig;
	bool good = ibgda_quiet(&rig.qp, 0) == IBGDA_OK && rig.qp.producer == 0;
	good &= ibgda_put_value(&rig.qp, 0, 1, 1u, IBGDA_UNSIGNALED | IBGDA_NO_DOORBELL) == IBGDA_OK && rig.record() == 0;
	/* Nothing would tell of the last request: an empty one that does is put behind it. */
	good &= ibgda_quiet(&rig.qp, 0) == IBGDA_TIMEOUT && rig.qp.producer == 2 && rig.opcode(1) == IBGDA_OP_NOP && rig.signalled(1) &&
		rig.record() == 2;
	rig.complete(0, 1);
	good &= ibgda_quiet(&rig.qp, 0) == IBGDA_OK && rig.qp.producer == 2;
	good &= ibgda_fence(&rig.qp) == IBGDA_OK && rig.fenced(2) && !rig.signalled(2) && rig.record() == 2;
	good &= ibgda_put_value(&rig.qp, 0, 1, 1u) == IBGDA_OK && rig.record() == 4;
	good &= ibgda_quiet(&rig.qp, 0) == IBGDA_TIMEOUT && rig.qp.producer == 4;
	check(good, "quiet after requests without completion");
}

void blueflame()
{
	Rig rig(IBGDA_BLUEFLAME);
	const ibgda_u32 B = IBGDA_BLUEFLAME;
	auto shows = [&](ibgda_u32 at, ibgda_u64 slot) { return !std::memcmp(&rig.page[at / 8], &rig.ring[4 * slot], 48); };
	bool good = ibgda_put<B>(&rig.qp, 64, 1, 128, 2, 8) == IBGDA_OK && shows(0, 0) && rig.record() == 1;
	good &= ibgda_put<B>(&rig.qp, 64, 1, 256, 2, 8) == IBGDA_OK && shows(BUFFER, 1) && shows(0, 0) && rig.record() == 2;
	/* Two at a time do not fit: the plain doorbell. */
	good &= ibgda_put<B>(&rig.qp, 64, 1, 512, 2, 8, IBGDA_NO_DOORBELL) == IBGDA_OK && ibgda_put<B>(&rig.qp, 64, 1, 1024, 2, 8) == IBGDA_OK;
	good &= rig.record() == 4 && rig.page[0] == ibgda_doorbell_value(4, 0x4a);
	good &= ibgda_put<B>(&rig.qp, 64, 1, 2048, 2, 8) == IBGDA_OK && shows(0, 4) && rig.record() == 5;
	check(good, "a request that is rung alone goes along with its doorbell, in turns of two buffers");
}

void events()
{
	Rig rig;
	rig.events = 6;
	bool good = ibgda_wait_for_cq_event(&rig.cq, ibgda_clock_ns() + 1000000) == IBGDA_TIMEOUT;
	/* Serial number: the events so far, of which two bits; consumer index 0; CQN. */
	good &= ibgda_be32(rig.cq_records[1]) == 2u << 28 && rig.arm == ((ibgda_u64)ibgda_be32(0x123) << 32 | ibgda_be32(2u << 28));
	rig.arm = 0;
	std::thread host([&] {
		while (!__atomic_load_n(&rig.arm, __ATOMIC_ACQUIRE))
			std::this_thread::yield();
		__atomic_fetch_add(&rig.events, 1, __ATOMIC_RELEASE);
	});
	good &= ibgda_wait_for_cq_event(&rig.cq, ibgda_clock_ns() + 60000000000ull) == IBGDA_OK;
	host.join();
	rig.complete(0, 0);
	rig.arm = 0;
	good &= ibgda_wait_for_cq_event(&rig.cq, 0) == IBGDA_OK && rig.arm == 0 && rig.cq.consumer == 0;
	rig.cq.events = nullptr;
	good &= ibgda_wait_for_cq_event(&rig.cq, 0) == IBGDA_ERR_NO_QUEUE;
	good &= ibgda_wait_for_cq_event<IBGDA_COLLAPSED>(&rig.cq, 0) == IBGDA_ERR_NO_QUEUE;
	check(good, "events: arming, one that comes, one that need not");
}

void signals()
{
	ibgda_u64 word = 5, lost = 1ull << 32 | 2;
	ibgda_cq cq = {};
	cq.status_page = &lost;
	cq.generation = 1;
	bool good = ibgda_wait_until(&word, IBGDA_GE, 5, 0) == IBGDA_OK && ibgda_wait_until(&word, IBGDA_GT, 5, 0) == IBGDA_TIMEOUT &&
		    ibgda_wait_until(&word, IBGDA_EQ, 5, 0) == IBGDA_OK && ibgda_wait_until(&word, IBGDA_NE, 5, 0) == IBGDA_TIMEOUT &&
		    ibgda_wait_until(&word, IBGDA_LE, 4, 0) == IBGDA_TIMEOUT && ibgda_wait_until(&word, IBGDA_LT, 6, 0) == IBGDA_OK;
	good &= ibgda_wait_until(&word, IBGDA_GT, 5, ~0ull, &cq) == IBGDA_ERR_NIC_LOST;
	check(good, "waiting for a signal");
}

void receives()
{
	Rig rig;
	std::vector<ibgda_quad> ring(4);
	rig.qp.recv_ring = reinterpret_cast<ibgda_u8 *>(ring.data());
	rig.qp.recv_cq = &rig.cq;
	rig.qp.recv_depth = 4;
	bool good = true;
	for (int i = 0; i < 4; i++)
		good &= ibgda_recv<IBGDA_SHARED>(&rig.qp, 64, 1, 8) == IBGDA_OK;
	good &= ibgda_recv<IBGDA_SHARED>(&rig.qp, 64, 1, 8) == IBGDA_ERR_QUEUE_FULL && ibgda_be32(rig.records[0]) == 4 && !rig.qp.recv_lock;
	rig.qp.recv_lock = 1;
	good &= ibgda_recv<IBGDA_SHARED>(&rig.qp, 64, 1, 8) == IBGDA_TIMEOUT;
	check(good, "receives of a shared QP");
}

void full_checks()
{
	Rig rig(IBGDA_SHARED | IBGDA_BLUEFLAME);
	ibgda_qp *qp = &rig.qp;
	const ibgda_u32 big = IBGDA_MAX_MESSAGE_BYTES + 1;
	bool good = ibgda_put<IBGDA_ON_GPU>(qp, 0, 1, 0, 1, 8) == IBGDA_ERR_MODE;
	good &= ibgda_put<IBGDA_COLLAPSED>(qp, 0, 1, 0, 1, 8) == IBGDA_ERR_MODE;
	rig.qp.mode = IBGDA_COLLAPSED;
	good &= ibgda_put(qp, 0, 1, 0, 1, 8) == IBGDA_ERR_MODE;
	rig.qp.mode = 0;
	good &= ibgda_put<IBGDA_SHARED>(qp, 0, 1, 0, 1, 8) == IBGDA_ERR_MODE;
	good &= ibgda_put<IBGDA_WARP | IBGDA_BLOCK>(qp, 0, 1, 0, 1, 8) == IBGDA_ERR_MODE;
	good &= ibgda_put(qp, 0, 1, 0, 1, 8, 1u << 20) == IBGDA_ERR_FLAGS;
	good &= ibgda_put(qp, 0, 1, 0, 1, 8, IBGDA_SKIP) == IBGDA_ERR_FLAGS;
	good &= ibgda_put(qp, 0, 1, 0, 1, big) == IBGDA_ERR_BYTES;
	good &= ibgda_put_inline(qp, 0, 1, qp, 29) == IBGDA_ERR_BYTES && ibgda_put_inline(qp, 0, 1, qp, 0) == IBGDA_ERR_BYTES;
	good &= ibgda_put(qp, ~0ull - 3, 1, 0, 1, 8) == IBGDA_ERR_REMOTE;
	good &= ibgda_fetch_add(qp, 4, 1, 0, 1, 1) == IBGDA_ERR_REMOTE && ibgda_fetch_add32(qp, 2, 1, 0, 1, 1) == IBGDA_ERR_REMOTE;
	good &= ibgda_signal(qp, 4, 1, 1) == IBGDA_ERR_REMOTE;
	good &= ibgda_put(qp, 0, IBGDA_INVALID_LKEY, 0, 1, 8) == IBGDA_ERR_RKEY && ibgda_signal(qp, 0, ~0u, 1) == IBGDA_ERR_RKEY;
	good &= ibgda_put(qp, 0, 1, ~0ull, 1, 8) == IBGDA_ERR_LOCAL;
	good &= ibgda_get(qp, 0, ~0u, 0, 1, 8) == IBGDA_ERR_LKEY && ibgda_send(qp, 0, IBGDA_INVALID_LKEY, 8) == IBGDA_ERR_LKEY;
	good &= rig.qp.producer == 0 && rig.record() == 0;
	rig.qp.mode = IBGDA_SHARED;
	rig.qp.ready = nullptr;
	good &= ibgda_put<IBGDA_SHARED>(qp, 0, 1, 0, 1, 8) == IBGDA_ERR_NO_QUEUE;
	/* A shared handle by one thread alone. */
	good &= ibgda_put(qp, 0, 1, 0, 1, 8) == IBGDA_OK;
	check(good, "each argument that is wrong is named, and nothing posted");
}

} // namespace

int main()
{
	two_wqes();
	silent();
	blueflame();
	events();
	signals();
	receives();
	full_checks();
	std::printf("%d passed, %d failed\n", passed, failures);
	return failures != 0;
}
