/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* All that is measured, in the order of the table's columns. */
#ifndef IBGDA_BENCH_IMPLEMENTATIONS_CUH
#define IBGDA_BENCH_IMPLEMENTATIONS_CUH

#include "floors.cuh"
#include "ours.cuh"

namespace bench {

using Implementations = List<Bare<1, false>, Bare<2, false>, Bare<2, true>, Exclusive, Shared, SharedNoRecord>;

} // namespace bench

#endif
