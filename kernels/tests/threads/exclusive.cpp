/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The header on CPU threads with a thread as the NIC, for ThreadSanitizer: kernels/tests/threads/run builds it with and
 * without. The data of a request is read as soon as it is known complete, without any order of the test's own.
 */
#include "nic.h"

static const ibgda_u64 PATIENCE = 60000000000ull;

/* One poster: a ring of `depth` passed many times, waiting for each request or only when the ring is full. */
static void exclusive(ibgda_u32 depth, ibgda_u64 count, ibgda_u64 wait_every, Watches watches)
{
	Nic nic(depth, depth, watches);
	ibgda_u64 known = 0;
	for (ibgda_u64 i = 0; i < count; i++) {
		/* With the request before in the same place known complete. */
		if (i >= depth)
			CHECK(ibgda_wait(&nic.qp, i - depth, ibgda_clock_ns() + PATIENCE) == IBGDA_OK);
		ibgda_u64 value = ~i, request;
		CHECK(ibgda_put_inline(&nic.qp, (ibgda_u64)&nic.target[i % depth], 0, &value, 8, 0, &request) == IBGDA_OK);
		CHECK(request == i);
		if ((i + 1) % wait_every)
			continue;
		CHECK(ibgda_quiet(&nic.qp, ibgda_clock_ns() + PATIENCE) == IBGDA_OK);
		for (; known <= i; known++)
			CHECK(nic.target[known % depth] == ~known);
	}
}

int main()
{
	struct {
		const char *name;
		Watches watches;
	} nics[] = {{"record", Watches::RECORD}, {"doorbell", Watches::DOORBELL}};
	unsigned passed = 0;
	for (auto &nic : nics) {
		exclusive(16, 20000, 1, nic.watches);
		exclusive(16, 70000, 16, nic.watches);
		exclusive(1, 5000, 1, nic.watches);
		std::printf("test exclusive_with_a_nic_that_watches_the_%s ... ok\n", nic.name);
		passed++;
	}
	std::printf("test result: ok. %u passed; 0 failed;\n", passed);
}
