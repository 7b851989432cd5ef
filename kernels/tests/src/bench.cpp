/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What of the bench needs no GPU, behind C names. */
#include "cpu_nic.h"
#include "targets.h"

namespace {

/* The text, cut to fit; is it empty? */
bool give(const std::string &text, char *out, size_t room)
{
	std::snprintf(out, room, "%s", text.c_str());
	return text.empty();
}

} // namespace

extern "C" {

bool bench_check_ring(const uint8_t *ring, uint32_t depth, uint64_t first, uint32_t qpn, const bench::Plan *plan, char *out, size_t room)
{
	return give(bench::check_ring(ring, depth, first, qpn, *plan), out, room);
}

bool bench_check_record(const uint32_t *record, uint64_t end, char *out, size_t room)
{
	return give(bench::check_record(record, end), out, room);
}

bool bench_check_doorbell(uint64_t doorbell, uint64_t end, uint32_t qpn, char *out, size_t room)
{
	return give(bench::check_doorbell(doorbell, end, qpn), out, room);
}

void bench_request(const bench::Plan *plan, uint32_t poster, uint32_t sequence, uint64_t *remote, uint64_t *local)
{
	bench::Request request = bench::request_of(*plan, poster, sequence);
	*remote = request.remote;
	*local = request.local;
}

/* Serves plan->each requests of one QP, or as many as come until *stop is set. */
bool bench_be_nic(const bench::Queue *queue, const bench::Plan *plan, const std::atomic<bool> *stop, char *out, size_t room)
{
	return give(bench::be_nic(*queue, *plan, true, true, false, *stop), out, room);
}

void bench_summary(const double *values, size_t count, double out[3])
{
	bench::Summary summary = bench::summary_of(std::vector<double>(values, values + count));
	out[0] = summary.median;
	out[1] = summary.low;
	out[2] = summary.high;
}

/*
 * A report of one row with a floor of 100, ours at `value`, judged by "at most `ratio` times the floor" (or "at least", or
 * "more than a peer's 100"): the target's line. `what`: 0, 1, 2.
 */
void bench_target_line(double value, double ratio, int what, char *out, size_t room)
{
	bench::Report report;
	bench::Row row = {"A", "M9", "a shape", what ? "M/s" : "ns", false};
	report.add(row, "ours", bench::summary_of({value}));
	report.add(row, "floor", bench::summary_of({100}));
	bench::Target target = {"M9", row, "ours", row, what == 2 ? "" : "floor", 100, ratio, what != 0, what == 2};
	give(bench::line_of(target, bench::judge(target, report)), out, room);
}

/* A small report as a table, and as JSON; a report of nothing as the lines of the targets. */
void bench_table(char *out, size_t room)
{
	bench::Report report;
	report.add({"A", "M1", "x", "ns", false}, "floor", bench::summary_of({3, 1, 2}));
	report.add({"A", "M1", "x", "ns", false}, "ours", bench::summary_of({12345.678}));
	report.add({"A", "M1", "x", "ns", true}, "ours", bench::summary_of({0.5}));
	give(report.table(), out, room);
}

void bench_json(char *out, size_t room)
{
	bench::Report report;
	bench::Row row = {"A", "M1", "x", "ns", false};
	report.add(row, "floor", bench::summary_of({3, 1, 2}));
	report.add(row, "ours", bench::summary_of({3}));
	report.fail("WQE \"7\"\n");
	give(bench::json(report, {{"M1", row, "ours", row, "floor", 0, 1.5, false, false}}, {{"gpu", "a \\ b"}}), out, room);
}

void bench_target_lines(char *out, size_t room)
{
	std::string text;
	bench::Report report;
	for (const bench::Target &target : bench::targets())
		text += bench::line_of(target, bench::judge(target, report)) + "\n";
	give(text, out, room);
}

} /* extern "C" */
