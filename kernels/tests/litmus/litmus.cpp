/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Litmus tests of the header's order towards the NIC: every execution of a few threads, with every value that a load may
 * return. Each is run as the header is, where no execution may be wrong, and without each fence in turn, where one must be.
 */
#include "platform.h"

#include <ibgda_device.cuh>

#include <cstdio>
#include <cstring>
#include <ostream>
#include <streambuf>

namespace litmus {

/* Only rings of 128 and more have the short way of a poster who is alone. */
static const ibgda_u32 SMALL = 4, LARGE = 128;
static ibgda_u32 depth = SMALL;

/* A QP and what of it the NIC sees. */
struct queue {
	memory shared;
	ibgda_u8 ring[LARGE * IBGDA_WQEBB_BYTES];
	ibgda_u8 cq_ring[LARGE * IBGDA_CQE_BYTES];
	ibgda_u32 record[2], cq_record[2];
	ibgda_u64 doorbell;
	ibgda_u64 ready[IBGDA_READY_WORDS(LARGE)];
	ibgda_cq cq;
	ibgda_qp qp;

	/* What posters of a shared QP share besides. */
	void prepare_shared()
	{
		prepare();
		qp.ready = ready;
		shared.add(&qp.producer, 0);
		shared.add(&qp.limit, depth);
		shared.add(&qp.publisher, 0);
		shared.add(&qp.rung, 0);
		shared.add(&qp.unrung, 0);
		shared.add(&cq.completed, 0);
		for (ibgda_u32 i = 0; i < IBGDA_READY_WORDS(depth); i++)
			shared.add(&ready[i], i ? 0 : IBGDA_READY_FIRST);
	}

	void prepare()
	{
		std::memset(ring, 0, sizeof ring);
		std::memset(cq_ring, 0, sizeof cq_ring);
		cq = ibgda_cq();
		cq.ring = cq_ring;
		cq.doorbell_record = cq_record;
		cq.depth = depth;
		qp = ibgda_qp();
		qp.send_ring = ring;
		qp.doorbell_record = record;
		qp.doorbell = &doorbell;
		qp.send_cq = &cq;
		qp.send_depth = depth;
		qp.limit = depth;
		cq.limit = &qp.limit;
		shared.add(&record[1], 0);
		shared.add(&cq_record[0], 0);
		shared.add(&doorbell, 0);
		for (ibgda_u32 i = 0; i < 2; i++) {
			for (ibgda_u32 quad = 0; quad < 3; quad++)
				shared.add(slot(i) + 16 * quad, 0);
			/* No completion yet: its kind is invalid. */
			shared.add(tail(i), (ibgda_u64)IBGDA_CQE_INVALID << 60);
		}
	}

	/* Of two requests of a shared QP. */
	void all_told()
	{
		RL_ASSERT(ibgda_be32((ibgda_u32)load(&record[1])) == 2);
		ibgda_u64 word = load(&qp.publisher);
		RL_ASSERT(word == 2 << 2 || (word == (2 << 2 | IBGDA_BUSY | IBGDA_TIRED) && load(&qp.rung) == 2));
	}

	ibgda_u8 *slot(ibgda_u32 index) { return ring + index * IBGDA_WQEBB_BYTES; }

	ibgda_u8 *tail(ibgda_u32 index) { return cq_ring + index * IBGDA_CQE_BYTES + 48; }

	/* An empty SEND: a WQE of one segment, whose first bytes say which request it is. */
	void post() { RL_ASSERT(ibgda_send(&qp, 0, 0, 0) == IBGDA_OK); }

	/* The NIC, when it looks at the doorbell register at some time. */
	void nic()
	{
		ibgda_u32 rung = ibgda_be32((ibgda_u32)load(&doorbell)) >> 8;
		if (!rung)
			return;
		acquire();
		ibgda_u32 recorded = ibgda_be32((ibgda_u32)load(&record[1]));
		/* Otherwise it would not look again, and the last requests would wait for ever. */
		RL_ASSERT(recorded >= rung);
		acquire();
		/* The record may be ahead of the doorbell: the NIC fetches all that it covers. */
		for (ibgda_u32 i = 0; i < recorded; i++)
			RL_ASSERT(ibgda_be32((ibgda_u32)load(slot(i))) == (i << 8 | IBGDA_OP_SEND));
	}

	/* The NIC, when it completes the first request. */
	void complete(const ibgda_u64 *data)
	{
		store(data, 1);
		/* Its writes arrive in order. */
		rl::atomic_thread_fence(rl::mo_release, $);
		store(tail(0), (ibgda_u64)IBGDA_CQE_REQ << 60 | ibgda_be32((ibgda_u32)IBGDA_OP_RDMA_READ << 24));
	}
};

/* Requests are whole before the record covers them, and the record is there before the doorbell. */
template <fence without, rl::test_result_e expected> struct post : rl::test_suite<post<without, expected>, 2, expected>, queue {
	void before() { this->prepare(); }

	void thread(unsigned index)
	{
		if (index) {
			this->nic();
		} else {
			queue::post();
			queue::post();
		}
	}
};

/* The same for two posters at a time on a shared QP; and when both are done, the NIC has been told of both requests. */
template <fence without, rl::test_result_e expected>
struct shared_post : rl::test_suite<shared_post<without, expected>, 3, expected>, queue {
	void before() { this->prepare_shared(); }

	void thread(unsigned index)
	{
		if (index == 2)
			this->nic();
		else
			RL_ASSERT(ibgda_send<IBGDA_SHARED>(&this->qp, 0, 0, 0) == IBGDA_OK);
	}

	void after() { this->all_told(); }
};

/* A request waits for its doorbell; two ring for it while a third, who may be alone, posts the next. */
template <fence without, rl::test_result_e expected>
struct shared_ring : rl::test_suite<shared_ring<without, expected>, 4, expected>, queue {
	void before()
	{
		this->prepare_shared();
		RL_ASSERT(ibgda_send<IBGDA_SHARED>(&this->qp, 0, 0, 0, IBGDA_NO_DOORBELL) == IBGDA_OK);
	}

	void thread(unsigned index)
	{
		if (index == 3)
			this->nic();
		else if (index == 2)
			RL_ASSERT(ibgda_send<IBGDA_SHARED>(&this->qp, 0, 0, 0) == IBGDA_OK);
		else
			RL_ASSERT(ibgda_write_doorbell<IBGDA_SHARED>(&this->qp, 1) == IBGDA_OK);
	}

	void after() { this->all_told(); }
};

/* Whoever knows of a completion reads what the NIC wrote before it. */
template <fence without, rl::test_result_e expected>
struct poll : rl::test_suite<poll<without, expected>, 2, expected>, queue {
	ibgda_u64 data;

	void before()
	{
		this->prepare();
		this->shared.add(&data, 0);
		RL_ASSERT(ibgda_get(&this->qp, 0, 0, 0, 0, 8) == IBGDA_OK);
	}

	void thread(unsigned index)
	{
		if (index)
			this->complete(&data);
		else if (ibgda_wait(&this->qp, 0, 0) == IBGDA_OK)
			RL_ASSERT(load(&data) == 1);
	}
};

/* A GPU that polls a signal reads the data that a peer wrote before it. */
template <fence without, rl::test_result_e expected>
struct signal : rl::test_suite<signal<without, expected>, 2, expected>, queue {
	ibgda_u64 data, flag;

	void before()
	{
		this->shared.add(&data, 0);
		this->shared.add(&flag, 0);
	}

	void thread(unsigned index)
	{
		if (index) {
			store(&data, 1);
			/* The NIC's writes arrive in order. */
			rl::atomic_thread_fence(rl::mo_release, $);
			store(&flag, 1);
		} else if (ibgda_wait_until(&flag, IBGDA_EQ, 1, 0) == IBGDA_OK) {
			RL_ASSERT(load(&data) == 1);
		}
	}
};

/* What relacy says of a failure, as much of it as fits: a string would allocate, and relacy replaces the allocator. */
struct log : std::streambuf {
	char text[1 << 16];

	log() { setp(text, text + sizeof text); }

	int print() { return std::printf("%.*s\n", static_cast<int>(pptr() - pbase()), text); }
};

static unsigned passed, failed;

/* All executions, or with `switches` those with at most so many switches from a thread that could go on. */
template <template <fence, rl::test_result_e> class suite, fence without, rl::test_result_e expected>
static void run(const char *name, unsigned switches = 0)
{
	static struct log log;
	std::ostream stream(&log);
	rl::test_params params;
	params.search_type = switches ? rl::sched_bound : rl::sched_full;
	params.context_bound = switches;
	params.output_stream = &stream;
	params.progress_stream = &stream;
	params.execution_depth_limit = 500;
	left_out = without;
	bool ok = rl::simulate<suite<without, expected>>(params);
	std::printf("test %s ... %s (%s after %llu executions)\n", name, ok ? "ok" : "FAILED",
		    rl::test_result_str(params.test_result), (unsigned long long)params.stop_iteration);
	if (!ok)
		log.print();
	++(ok ? passed : failed);
}

} // namespace litmus

int main()
{
	using namespace litmus;
	const rl::test_result_e right = rl::test_result_success, wrong = rl::test_result_user_assert_failed;
	run<post, NONE, right>("post");
	run<post, BEFORE_RECORD, wrong>("post_without_the_fence_before_the_record");
	run<post, BEFORE_DOORBELL, wrong>("post_without_the_fence_before_the_doorbell");
	run<poll, NONE, right>("poll");
	run<poll, ACQUIRE, wrong>("poll_without_ibgda_acquire");
	run<signal, NONE, right>("signal");
	run<signal, ACQUIRE, wrong>("signal_without_ibgda_acquire");
	run<shared_post, NONE, right>("shared_post", 2);
	run<shared_post, BEFORE_READY, wrong>("shared_post_without_the_fence_before_the_ready_bits", 2);
	run<shared_post, BEFORE_PUBLISHER, wrong>("shared_post_without_the_fence_before_the_publisher", 2);
	run<shared_post, BEFORE_DOORBELL, wrong>("shared_post_without_the_fence_before_the_doorbell", 2);
	depth = LARGE;
	run<shared_post, NONE, right>("shared_post_of_one_who_may_be_alone", 2);
	run<shared_post, BEFORE_READY, wrong>("shared_post_alone_without_the_fence_before_the_ready_bits", 2);
	run<shared_post, BEFORE_PUBLISHER, wrong>("shared_post_alone_without_the_fence_before_the_publisher", 2);
	run<shared_post, BEFORE_DOORBELL, wrong>("shared_post_alone_without_the_fence_before_the_doorbell", 2);
	run<shared_ring, NONE, right>("shared_ring_of_two_beside_one_who_may_be_alone", 2);
	std::printf("test result: %s. %u passed; %u failed;\n", failed ? "FAILED" : "ok", passed, failed);
	return failed != 0;
}
