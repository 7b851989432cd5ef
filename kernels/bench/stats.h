/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Repeats of one measurement, summed up. */
#ifndef IBGDA_BENCH_STATS_H
#define IBGDA_BENCH_STATS_H

#include <algorithm>
#include <vector>

namespace bench {

struct Summary {
	double median, low, high;
	size_t count;
};

/* Of no repeats: all zero. */
inline Summary summary_of(std::vector<double> values)
{
	if (values.empty())
		return {0, 0, 0, 0};
	std::sort(values.begin(), values.end());
	size_t n = values.size();
	return {n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2, values.front(), values.back(), n};
}

} // namespace bench

#endif
