/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A shared QP under many CPU threads, against a thread that does what a NIC does: it looks at the doorbell, then the
 * record, executes WQEs in order and writes completions. It demands that each slot holds its own WQE when it is told of it,
 * and that the record never goes back. Runs as it is and under ThreadSanitizer; the last line is "N passed, N failed".
 */
/* Tellers are tired at once. */
#define IBGDA_PATIENT_ROUNDS 1u
#include <ibgda_device.cuh>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace {

const ibgda_u32 QPN = 0x51;
const ibgda_u64 SECOND = 1000000000ull, PATIENCE = 20 * SECOND;

template <class T> T load(const T *word, int order = __ATOMIC_ACQUIRE) { return __atomic_load_n(word, order); }

/* What a test wants of the NIC. */
struct Conduct {
	ibgda_u64 fail_at = ~0ull;	/* this request ends in a remote access error, and all behind it are flushed */
	ibgda_u64 stop_at = ~0ull;	/* this and later requests are not executed */
	unsigned pause = 0;		/* times it lets others run, after each request */
};

struct Rig {
	ibgda_u32 depth;
	bool collapsed;
	std::vector<ibgda_quad> ring, cq_ring;
	std::vector<ibgda_u64> ready;
	ibgda_u32 records[2] = {}, cq_records[2] = {};
	ibgda_u64 doorbell = 0, status_page = 1ull << 32 | 1;
	ibgda_cq cq = {};
	ibgda_qp qp = {};
	std::atomic<bool> stop{false};
	std::vector<ibgda_u64> executed;
	const char *fault = nullptr;

	Rig(ibgda_u32 depth, ibgda_u64 first, bool collapsed)
		: depth(depth), collapsed(collapsed), ring(4 * depth, ibgda_quad{}), cq_ring(4 * depth, ibgda_quad{~0ull, ~0ull}),
		  ready(IBGDA_READY_WORDS(depth))
	{
		/* As if the requests before `first` had been posted and executed: all bits as the lap before left them. */
		ibgda_u32 slots = IBGDA_READY_SLOTS(depth);
		for (ibgda_u32 i = 0; i < depth; i++) {
			ibgda_u64 used = (first + depth - 1 - i) / depth, entered = (first + depth - i) / depth;
			ready[i / slots] ^= (used & 1) << i % slots;
			if (i % slots == 0 && (entered & 1))
				ready[i / slots] ^= IBGDA_READY_FIRST;
		}
		for (ibgda_u64 i = first > depth ? first - depth : 0; i < first; i++)
			cq_ring[4 * (i & (depth - 1)) + 3].high = 0xf0ull << 56 | (i & depth ? 1ull << 56 : 0);
		cq.ring = reinterpret_cast<const ibgda_u8 *>(cq_ring.data());
		cq.doorbell_record = cq_records;
		cq.status_page = &status_page;
		cq.depth = depth;
		cq.generation = 1;
		cq.consumer = cq.completed = first;
		qp.send_ring = reinterpret_cast<ibgda_u8 *>(ring.data());
		qp.doorbell_record = records;
		qp.doorbell = &doorbell;
		qp.send_cq = &cq;
		qp.ready = ready.data();
		qp.post_timeout_ns = PATIENCE;
		qp.number = QPN;
		qp.send_depth = depth;
		qp.mode = IBGDA_SHARED | (collapsed ? IBGDA_COLLAPSED : 0);
		qp.producer = first;
		qp.publisher = first << 2;
		qp.limit = (first + depth) & ~(ibgda_u64)(slots - 1);
		cq.limit = &qp.limit;
		records[1] = ibgda_be32((ibgda_u32)first & 0xffff);
	}

	void complete(ibgda_u64 cqe, ibgda_u64 index, ibgda_u32 kind, ibgda_u8 syndrome)
	{
		ibgda_quad *at = &cq_ring[collapsed ? 0 : 4 * (cqe & (depth - 1))];
		ibgda_u64 owner = cqe & depth ? 1 : 0;
		ibgda_u64 high = (ibgda_u64)(kind << 4 | owner) << 56 | (ibgda_u64)ibgda_be32((ibgda_u32)(index & 0xffff) << 16) << 32 |
				 ibgda_be32(0x08u << 24 | QPN);
		__atomic_store_n(&at[2].high, 0, __ATOMIC_RELAXED);
		__atomic_store_n(&at[3].low, (ibgda_u64)syndrome << 56 | 0x77ull << 48, __ATOMIC_RELAXED);
		__atomic_store_n(&at[3].high, high, __ATOMIC_RELEASE);
	}

	/* The NIC was told of everything, and nobody is telling. */
	bool idle() const
	{
		const ibgda_u64 told = qp.producer;
		return qp.publisher == told << 2 || (qp.publisher == (told << 2 | IBGDA_BUSY | IBGDA_TIRED) && qp.rung == told);
	}

	/* How far the NIC is. */
	std::atomic<ibgda_u64> reached{0};

	void nic(ibgda_u64 first, Conduct conduct)
	{
		ibgda_u64 next = first, cqe = first;
		ibgda_u16 last_record = (ibgda_u16)first;
		bool failed = false;
		while (!stop.load(std::memory_order_relaxed)) {
			ibgda_u64 bell = load(&doorbell);
			ibgda_u16 rung = (ibgda_u16)(ibgda_be32((ibgda_u32)bell) >> 8);
			ibgda_u16 record = (ibgda_u16)ibgda_be32(load(records + 1));
			if ((ibgda_u16)(record - last_record) >= 0x8000)
				fault = "the record went back";
			last_record = record;
			if (bell && (ibgda_u16)(record - rung) >= 0x8000)
				fault = "the doorbell came before its record";
			while (bell && (ibgda_u16)next != record && next < conduct.stop_at && !fault) {
				const ibgda_quad *slot = &ring[4 * (next & (depth - 1))];
				ibgda_u32 ctrl = ibgda_be32((ibgda_u32)slot[0].low), flags = ibgda_be32((ibgda_u32)slot[0].high);
				if ((ctrl >> 8 & 0xffff) != (next & 0xffff))
					fault = "a slot holds another request";
				executed.push_back(slot[2].low >> 32 | slot[2].high << 32);
				if (next == conduct.fail_at || failed) {
					complete(cqe++, next, IBGDA_CQE_REQ_ERR, failed ? 0x05 : 0x13);
					failed = true;
				} else if (flags & IBGDA_CTRL_CQ_UPDATE) {
					complete(cqe++, next, IBGDA_CQE_REQ, 0);
				}
				reached = ++next;
				for (unsigned i = 0; i < conduct.pause; i++)
					std::this_thread::yield();
			}
			std::this_thread::yield();
		}
	}
};

int passed, failures;

void check(bool good, const char *name, const Rig &rig)
{
	if (rig.fault)
		std::printf("  %s\n", rig.fault);
	good = good && !rig.fault;
	std::printf("%s … %s\n", name, good ? "ok" : "FAILED");
	(good ? passed : failures)++;
}

/* Runs `threads` of `body` beside a NIC. */
template <class Body> void together(Rig &rig, ibgda_u64 first, Conduct conduct, unsigned threads, Body body)
{
	std::thread nic([&] { rig.nic(first, conduct); });
	std::vector<std::thread> posters;
	for (unsigned i = 0; i < threads; i++)
		posters.emplace_back([&, i] { body(i); });
	for (auto &poster : posters)
		poster.join();
	rig.stop = true;
	nic.join();
}

/* Each thread posts `count` values of its own, some without completion, some two slots at a time, and waits now and then. */
template <ibgda_u32 M> void storm(ibgda_u32 depth, ibgda_u64 first, unsigned threads, ibgda_u64 count, Conduct conduct, const char *name)
{
	Rig rig(depth, first, M & IBGDA_COLLAPSED);
	std::vector<ibgda_status> statuses(threads, IBGDA_OK);
	together(rig, first, conduct, threads, [&](unsigned me) {
		ibgda_status status = IBGDA_OK;
		for (ibgda_u64 i = 0; i < count && status == IBGDA_OK; i++) {
			ibgda_u64 value = (ibgda_u64)me << 32 | i, request = 0;
			ibgda_u32 flags = (i + me) % 3 ? IBGDA_UNSIGNALED : 0;
			if ((i + me) % 7 == 0 && depth > 2)
				status = ibgda_put_signal<M>(&rig.qp, 0, 0, ~0ull, 0, 8, 0, 0, value, flags, &request);
			else
				status = ibgda_put_value<M>(&rig.qp, 0, 0, value, flags, &request);
			if (status == IBGDA_OK && !flags && i % 5 == 0)
				status = ibgda_wait<M>(&rig.qp, request, ibgda_clock_ns() + PATIENCE);
		}
		if (status == IBGDA_OK)
			status = ibgda_quiet<M>(&rig.qp, ibgda_clock_ns() + PATIENCE);
		statuses[me] = status;
	});
	bool good = true;
	for (unsigned i = 0; i < threads; i++)
		if (statuses[i] != IBGDA_OK) {
			std::printf("  thread %u: status %#x, producer %llu, told %llu, record %u, completed %llu, executed %zu\n", i,
				    statuses[i], rig.qp.producer, rig.qp.publisher >> 2, ibgda_be32(rig.records[1]), rig.cq.completed,
				    rig.executed.size());
			good = false;
		}
	/* Every thread's values, each once and in its order. */
	std::vector<ibgda_u64> next(threads, 0);
	ibgda_u64 seen = 0;
	for (ibgda_u64 value : rig.executed) {
		unsigned thread = (unsigned)(value >> 32);
		if (thread < threads && (value & 0xffffffff) == next[thread])
			next[thread]++, seen++;
	}
	if (seen != threads * count) {
		std::printf("  %llu of %llu values in order\n", seen, threads * count);
		good = false;
	}
	good &= rig.idle();
	check(good, name, rig);
}

/* On a collapsed CQ the first error can be gone before anybody looks: then it is a flush. */
template <ibgda_u32 M> void an_error_ends_every_thread(const char *name)
{
	const unsigned threads = 4;
	Rig rig(64, 0, M & IBGDA_COLLAPSED);
	std::vector<ibgda_status> statuses(threads);
	Conduct conduct;
	conduct.fail_at = 1000;
	together(rig, 0, conduct, threads, [&](unsigned me) {
		ibgda_status status = IBGDA_OK;
		ibgda_u64 request = 0;
		while (status == IBGDA_OK) {
			status = ibgda_put_value<M>(&rig.qp, 0, 0, (ibgda_u64)me, 0, &request);
			if (status == IBGDA_OK && me & 1)
				status = ibgda_wait<M>(&rig.qp, request, ibgda_clock_ns() + PATIENCE);
		}
		statuses[me] = status;
	});
	ibgda_error error = rig.cq.error;
	bool hidden = (M & IBGDA_COLLAPSED) && error.status == IBGDA_ERR_WR_FLUSHED;
	bool good = hidden ? error.wqe_index > 1000 : error.status == IBGDA_ERR_REMOTE_ACCESS && error.wqe_index == 1000;
	for (ibgda_status status : statuses)
		good &= status == (ibgda_status)error.status;
	good &= error.syndrome == (error.status & 0xff) && error.vendor_syndrome == 0x77 && error.qpn == QPN &&
		rig.cq.completed == error.wqe_index;
	ibgda_u64 late = 0;
	good &= ibgda_put_value<M>(&rig.qp, 0, 0, late) == (ibgda_status)error.status;
	good &= ibgda_wait<M>(&rig.qp, 999, 0) == IBGDA_OK;
	good &= ibgda_wait<M>(&rig.qp, error.wqe_index, ~0ull) == (ibgda_status)error.status;
	check(good, name, rig);
}

void a_nic_that_stops_fills_the_ring(ibgda_u64 patience, const char *name)
{
	const unsigned threads = 4;
	Rig rig(64, 0, false);
	rig.qp.post_timeout_ns = patience;
	std::vector<ibgda_status> statuses(threads);
	Conduct conduct;
	conduct.stop_at = 100;
	std::atomic<ibgda_u64> posted{0};
	together(rig, 0, conduct, threads, [&](unsigned me) {
		ibgda_status status = IBGDA_OK;
		/* With no patience at all a full ring need not mean that the NIC has stopped. */
		for (int full = 0; full < 200;) {
			status = ibgda_put_value<IBGDA_SHARED>(&rig.qp, 0, 0, (ibgda_u64)me);
			posted += status == IBGDA_OK;
			if (status == IBGDA_OK) {
				full = 0;
				continue;
			}
			/* Nor with any, when the NIC's thread had no processor for so long. */
			full += rig.reached == conduct.stop_at;
			if (patience && full)
				break;
			std::this_thread::yield();
		}
		statuses[me] = status;
	});
	bool good = true;
	for (ibgda_status status : statuses)
		good &= status == IBGDA_ERR_QUEUE_FULL;
	good &= posted <= 100 + 64 && rig.qp.producer - 100 <= 64 && !rig.cq.error.status;
	if (!good)
		std::printf("  posted %llu, producer %llu, error %#x\n", (unsigned long long)posted, rig.qp.producer, rig.cq.error.status);
	check(good, name, rig);
}

void a_lost_nic_ends_every_wait()
{
	const unsigned threads = 4;
	Rig rig(64, 0, false);
	std::vector<ibgda_status> statuses(threads);
	Conduct conduct;
	conduct.stop_at = 10;
	together(rig, 0, conduct, threads + 1, [&](unsigned me) {
		if (me == threads) {
			while (load(&rig.qp.producer) < 64)
				std::this_thread::yield();
			__atomic_store_n(&rig.status_page, 1ull << 32 | 2, __ATOMIC_RELEASE);
			return;
		}
		ibgda_status status = IBGDA_OK;
		ibgda_u64 request = 0;
		while (status == IBGDA_OK)
			status = ibgda_put_value<IBGDA_SHARED>(&rig.qp, 0, 0, (ibgda_u64)me, 0, &request);
		/* What was executed before stays so. */
		if (status == IBGDA_ERR_NIC_LOST && request >= conduct.stop_at)
			status = ibgda_wait<IBGDA_SHARED>(&rig.qp, request, ~0ull);
		statuses[me] = status;
	});
	bool good = true;
	for (ibgda_status status : statuses)
		good &= status == IBGDA_ERR_NIC_LOST;
	check(good, "a lost NIC ends every thread's post and wait", rig);
}

/* Doorbells left to one who rings for all. */
void rings_for_others()
{
	const unsigned threads = 4;
	Rig rig(256, 0, false);
	bool good = true;
	std::atomic<unsigned> done{0};
	together(rig, 0, Conduct(), threads, [&](unsigned me) {
		ibgda_u64 request = 0;
		for (ibgda_u64 i = 0; i < 20; i++)
			ibgda_put_value<IBGDA_SHARED>(&rig.qp, 0, 0, (ibgda_u64)me << 32 | i, IBGDA_NO_DOORBELL, &request);
		if (++done < threads)
			return;
		if (ibgda_wait<IBGDA_SHARED>(&rig.qp, request, ibgda_clock_ns() + SECOND / 20) != IBGDA_TIMEOUT)
			good = false;
		if (ibgda_write_doorbell<IBGDA_SHARED>(&rig.qp, 20 * threads + 1) != IBGDA_ERR_INVALID_INDEX)
			good = false;
		if (ibgda_write_doorbell<IBGDA_SHARED>(&rig.qp, 20 * threads) != IBGDA_OK ||
		    ibgda_write_doorbell<IBGDA_SHARED>(&rig.qp, 20 * threads) != IBGDA_OK)
			good = false;
		if (ibgda_wait<IBGDA_SHARED>(&rig.qp, 20 * threads - 1, ibgda_clock_ns() + PATIENCE) != IBGDA_OK)
			good = false;
	});
	good &= rig.executed.size() == 20 * threads && rig.idle() && rig.qp.producer == 20ull * threads;
	check(good, "one thread's doorbell is for all that was written", rig);
}

/* Threads that leave doorbells and then ring for all, beside one that is alone most of the time. */
void rings_from_everywhere(ibgda_u64 first)
{
	const unsigned threads = 4;
	const ibgda_u64 count = 3000;
	Rig rig(1024, first, false);
	std::atomic<unsigned> good{0};
	together(rig, first, Conduct(), threads, [&](unsigned me) {
		ibgda_u64 request = 0;
		ibgda_status status = IBGDA_OK;
		for (ibgda_u64 i = 0; i < count && status == IBGDA_OK; i++) {
			status = ibgda_put_value<IBGDA_SHARED>(&rig.qp, 0, 0, (ibgda_u64)me << 32 | i, me ? IBGDA_NO_DOORBELL : 0, &request);
			if (status == IBGDA_OK && me && i % 2)
				status = ibgda_write_doorbell<IBGDA_SHARED>(&rig.qp, request + 1);
			if (status == IBGDA_OK && i % 50 == 49)
				status = ibgda_wait<IBGDA_SHARED>(&rig.qp, request, ibgda_clock_ns() + PATIENCE);
		}
		if (status == IBGDA_OK)
			status = ibgda_quiet<IBGDA_SHARED>(&rig.qp, ibgda_clock_ns() + PATIENCE);
		good += status == IBGDA_OK;
	});
	check(good == threads && rig.idle(), first ? "the same past 2^32" : "doorbells of many threads, one of them alone at times", rig);
}

} // namespace

int main()
{
	const ibgda_u32 S = IBGDA_SHARED;
	Conduct slow;
	slow.pause = 3;
	storm<S>(1024, 0, 4, 5000, {}, "4 threads, ring of 1024");
	storm<S>(16, 0, 4, 5000, {}, "4 threads, ring of 16");
	storm<S>(64, (1ull << 40) - 777, 3, 5000, {}, "3 threads, indices past 2^40");
	storm<S>(128, (1ull << 32) - 777, 3, 5000, {}, "3 threads, indices past 2^32, ring of 128");
	storm<S>(16, 0, 8, 1500, slow, "8 threads and a slow NIC, ring of 16");
	storm<S>(4, 0, 3, 2000, {}, "3 threads, ring of 4");
	storm<S>(1, 0, 2, 500, {}, "2 threads, ring of 1");
	storm<S>(2, 0, 2, 500, {}, "2 threads, ring of 2");
	storm<S>(128, 1000, 1, 5000, {}, "1 thread alone");
	storm<S | IBGDA_COLLAPSED>(256, 0, 4, 5000, {}, "4 threads, collapsed CQ");
	storm<S | IBGDA_CPU_DOORBELL>(32, 65530, 4, 5000, {}, "4 threads, doorbell in memory, counter wraps");
	an_error_ends_every_thread<S>("the first error is every thread's, and stays");
	an_error_ends_every_thread<S | IBGDA_COLLAPSED>("the same on a collapsed CQ");
	a_nic_that_stops_fills_the_ring(SECOND / 10, "a NIC that stops ends in queue full, and nothing is reserved in vain");
	a_nic_that_stops_fills_the_ring(0, "the same without patience");
	a_lost_nic_ends_every_wait();
	rings_for_others();
	rings_from_everywhere(0);
	rings_from_everywhere((1ull << 32) - 777);
	std::printf("%d passed, %d failed\n", passed, failures);
	return failures != 0;
}
