/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Results: one table, the targets, JSON. Plain C++, so that it is tested without a GPU. */
#ifndef IBGDA_BENCH_REPORT_H
#define IBGDA_BENCH_REPORT_H

#include <cstdio>
#include <string>
#include <vector>

#include "stats.h"

namespace bench {

/* A row of the table: which metric, of what shape, with queues where. */
struct Row {
	std::string where;  /* A, B, C */
	std::string metric; /* M1, M1i, … */
	std::string shape;  /* what tells rows of one metric apart */
	std::string unit;   /* "ns" or "M/s" */
	bool loaded;	    /* while copies saturate the PCIe link */

	bool operator==(const Row &other) const
	{
		return where == other.where && metric == other.metric && shape == other.shape && loaded == other.loaded;
	}
	std::string text() const { return where + " " + metric + " " + shape + (loaded ? ", link busy" : ""); }
};

struct Cell {
	Row row;
	std::string implementation;
	Summary summary;
};

/* Text of a value: four significant digits, as in facts/device-cost.md. */
inline std::string number(double value)
{
	char text[32];
	std::snprintf(text, sizeof text, "%.4g", value);
	return text;
}

class Report {
public:
	std::vector<Cell> cells;
	std::vector<std::string> failures;

	void add(const Row &row, const std::string &implementation, const Summary &summary)
	{
		cells.push_back({row, implementation, summary});
	}

	/* One line for each thing that went wrong; any makes the run fail. */
	void fail(const std::string &text) { failures.push_back(text); }

	/* The median, or null when that was not measured. */
	const double *find(const Row &row, const std::string &implementation) const
	{
		for (const Cell &cell : cells)
			if (cell.row == row && cell.implementation == implementation)
				return &cell.summary.median;
		return nullptr;
	}

	/* Rows and columns in the order in which they were first measured. */
	std::string table() const
	{
		std::vector<Row> rows;
		std::vector<std::string> columns;
		for (const Cell &cell : cells) {
			if (std::find(rows.begin(), rows.end(), cell.row) == rows.end())
				rows.push_back(cell.row);
			if (std::find(columns.begin(), columns.end(), cell.implementation) == columns.end())
				columns.push_back(cell.implementation);
		}
		std::string text = "| metric | unit |";
		for (const std::string &column : columns)
			text += " " + column + " |";
		text += "\n|---|---|";
		for (size_t i = 0; i < columns.size(); i++)
			text += "---|";
		text += "\n";
		for (const Row &row : rows) {
			text += "| " + row.text() + " | " + row.unit + " |";
			for (const std::string &column : columns) {
				const double *value = find(row, column);
				text += " " + (value ? number(*value) : "-") + " |";
			}
			text += "\n";
		}
		return text;
	}
};

/* What issue 5 wants: a measured value against a floor of the same run, or against a peer's number that was measured once. */
struct Target {
	std::string name;
	Row row;
	std::string implementation;
	Row floor_row;		    /* of the floor; its implementation empty: none, `peer` is the figure */
	std::string floor_implementation;
	double peer;		    /* from facts/device-cost.md */
	double ratio;		    /* value / floor or peer */
	bool more_is_better;	    /* the ratio is a lower bound */
	bool strictly;		    /* equal is not enough */
};

struct Verdict {
	enum { not_measured, met, missed } outcome;
	double value, floor, ratio;
};

inline Verdict judge(const Target &target, const Report &report)
{
	const double *value = report.find(target.row, target.implementation);
	const double *floor = target.floor_implementation.empty() ? &target.peer
								  : report.find(target.floor_row, target.floor_implementation);
	if (!value || !floor || *floor <= 0)
		return {Verdict::not_measured, 0, 0, 0};
	double ratio = *value / *floor;
	bool good = target.more_is_better ? ratio >= target.ratio : ratio <= target.ratio;
	/* A rate or a time of nothing is no result. */
	if (*value <= 0 || (target.strictly && ratio == target.ratio))
		good = false;
	return {good ? Verdict::met : Verdict::missed, *value, *floor, ratio};
}

inline std::string line_of(const Target &target, const Verdict &verdict)
{
	std::string wanted = std::string(target.more_is_better ? (target.strictly ? ">" : "≥") : "≤") + " " + number(target.ratio);
	std::string against = target.floor_implementation.empty() ? "peer (facts/device-cost.md)" : target.floor_implementation;
	if (verdict.outcome == Verdict::not_measured)
		return target.name + ": not measured";
	char text[400];
	std::snprintf(text, sizeof text, "%s: %s %s, %s %s, ratio %.3f, wanted %s: %s", target.name.c_str(),
		      number(verdict.value).c_str(), target.row.unit.c_str(), against.c_str(), number(verdict.floor).c_str(),
		      verdict.ratio, wanted.c_str(), verdict.outcome == Verdict::met ? "met" : "MISSED");
	return text;
}

/* A string of JSON: our own texts have no control characters, a card's name or a path might. */
inline std::string quoted(const std::string &text)
{
	std::string out = "\"";
	char code[8];
	for (char c : text)
		if (c == '"' || c == '\\') {
			out += '\\';
			out += c;
		} else if ((unsigned char)c < 0x20) {
			std::snprintf(code, sizeof code, "\\u%04x", (unsigned char)c);
			out += code;
		} else {
			out += c;
		}
	return out + "\"";
}

/* `head`: name and value of what describes the run. */
inline std::string json(const Report &report, const std::vector<Target> &targets,
			const std::vector<std::pair<std::string, std::string>> &head)
{
	char text[400];
	std::string out = "{";
	for (const auto &entry : head)
		out += quoted(entry.first) + ": " + quoted(entry.second) + ", ";
	out += "\n\"results\": [";
	for (size_t i = 0; i < report.cells.size(); i++) {
		const Cell &cell = report.cells[i];
		std::snprintf(text, sizeof text, "\"median\": %.6g, \"min\": %.6g, \"max\": %.6g, \"repeats\": %zu}",
			      cell.summary.median, cell.summary.low, cell.summary.high, cell.summary.count);
		out += std::string(i ? ",\n" : "\n") + "{\"where\": " + quoted(cell.row.where) + ", \"metric\": " +
		       quoted(cell.row.metric) + ", \"shape\": " + quoted(cell.row.shape) + ", \"link_busy\": " +
		       (cell.row.loaded ? "true" : "false") + ", \"implementation\": " + quoted(cell.implementation) +
		       ", \"unit\": " + quoted(cell.row.unit) + ", " + text;
	}
	out += "\n],\n\"targets\": [";
	for (size_t i = 0; i < targets.size(); i++) {
		Verdict verdict = judge(targets[i], report);
		const char *outcome = verdict.outcome == Verdict::met	   ? "met"
				      : verdict.outcome == Verdict::missed ? "missed"
									   : "not measured";
		std::snprintf(text, sizeof text, "\"value\": %.6g, \"floor\": %.6g, \"ratio\": %.6g, \"wanted\": %.6g, \"outcome\": \"%s\"}",
			      verdict.value, verdict.floor, verdict.ratio, targets[i].ratio, outcome);
		out += std::string(i ? ",\n" : "\n") + "{\"name\": " + quoted(targets[i].name) + ", " + text;
	}
	out += "\n],\n\"failures\": [";
	for (size_t i = 0; i < report.failures.size(); i++)
		out += (i ? ",\n" : "\n") + quoted(report.failures[i]);
	return out + "\n]}\n";
}

} // namespace bench

#endif
